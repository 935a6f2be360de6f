/* moe_quantize_mx and moe_dequantize_mx: groups of 32 elements under one power of two. */
#ifndef MOE_QUANT_MX_QUANTIZE_H
#define MOE_QUANT_MX_QUANTIZE_H

enum {
  MOE_MX_STRIP_ = 1024,       /* elements of a line that a transposed item takes */
  MOE_MX_ITEM_ = 1 << 16,     /* elements of an item: at least, if there are so many, */
  MOE_MX_ITEM_MOST_ = 1 << 18 /* and at most */
};

/* A line is a row of codes: a row of the plain tensor or, transposed, a column. */
typedef struct moe_mx_quantize_job_ {
  const moe_kernels *kernels;
  moe_element element;
  moe_element_format_ format;
  moe_numbers_ numbers;
  moe_cast_ cast;
  moe_dtype dtype;
  int decode, transposed, nt;  /* see MOE_NT_MIN_BYTES */
  int64_t lines, length, size; /* size: bytes of a plain element */
  int64_t code_stride, scale_stride;
  char *plain; /* read or, to decode, written; codes and scales are written or read */
  uint8_t *codes, *scales;
  int64_t line_block, block, blocks; /* an item is line_block lines of block elements, of which a line has `blocks` */
} moe_mx_quantize_job_;

/* n elements of a line from a multiple of 32 on: where they are, plain and as codes. To encode, also what is prefetched
   meanwhile. */
typedef struct moe_mx_part_ {
  moe_dtype dtype;
  char *plain;
  uint8_t *codes, *scales;
  int64_t n;
  moe_prefetch_block_ fetch;
} moe_mx_part_;

/* Elements [at, at+n) of a line, whose plain ones are at `plain`. */
MOE_EITHER moe_mx_part_ moe_mx_part_of_(const moe_mx_quantize_job_ *job, moe_dtype dtype, char *plain, int64_t line,
                                        int64_t at, int64_t n) {
  moe_mx_part_ part = {0};
  part.dtype = dtype, part.plain = plain, part.n = n;
  part.codes = job->codes + line * job->code_stride + moe_element_bytes_(at, job->format.bits);
  part.scales = job->scales + line * job->scale_stride + at / MOE_MX_GROUP_;
  return part;
}

MOE_EITHER void moe_mx_convert_(const moe_mx_quantize_job_ *job, const moe_mx_part_ *part) {
  const moe_quant_table_ *quant = job->kernels->quant;
  const moe_dtype dtype = part->dtype;
  for (int64_t i = 0, done; i < part->n; i += done * MOE_MX_GROUP_) {
    const int64_t groups = job->numbers.general ? 0 : (part->n - i) / MOE_MX_GROUP_,
                  left = moe_min_(MOE_MX_GROUP_, part->n - i);
    char *plain = part->plain + i * moe_dtype_bytes_(dtype);
    uint8_t *codes = part->codes + moe_element_bytes_(i, job->format.bits), *scales = part->scales + i / MOE_MX_GROUP_;
    if (job->decode) done = quant->dequantize_groups[dtype](plain, codes, scales, groups, &job->numbers);
    else done = quant->quantize_groups[dtype](codes, scales, plain, groups, &job->numbers, &part->fetch);
    if (done > 0) continue;
    done = 1;
    float x[MOE_MX_GROUP_];
    if (job->decode) {
      moe_mx_decode_(job->kernels, &job->format, codes, *scales, x, left);
      moe_store_row_(job->kernels->vec, dtype, plain, x, left);
    } else {
      moe_load_row_(job->kernels->vec, dtype, x, plain, left);
      *scales = (uint8_t)moe_mx_encode_(job->kernels, &job->format, &job->numbers.rule, &job->cast, x, left, codes);
    }
  }
}

/* Lines [line, end), elements [from, to) of each, of a tensor that is not transposed, in chunks: `across` in a line and
   `count` in all. Read stream s has chunks [s * deep, (s + 1) * deep). */
typedef struct moe_mx_streams_ {
  int64_t line, from, to, chunk, across, count, deep;
  moe_prefetch_ next; /* what the next item reads first */
} moe_mx_streams_;

/* Of an item. */
MOE_FN moe_mx_streams_ moe_mx_streams_of_(const moe_mx_quantize_job_ *job, int64_t item) {
  moe_mx_streams_ all = {0};
  all.line = item / job->blocks * job->line_block, all.from = item % job->blocks * job->block;
  all.to = moe_min_(job->length, all.from + job->block);
  all.chunk = MOE_NT_CHUNK_ / (job->decode ? job->size : 2);
  all.across = moe_ceil_div_(all.to - all.from, all.chunk);
  all.count = all.across * (moe_min_(job->lines, all.line + job->line_block) - all.line);
  all.deep = moe_ceil_div_(all.count, job->decode ? 1 : MOE_READ_STREAMS_);
  return all;
}

/* Where chunk i is in the plain tensor. */
MOE_EITHER int64_t moe_mx_plain_at_(const moe_mx_quantize_job_ *job, const moe_mx_streams_ *all, int64_t i) {
  const int64_t line = all->line + i / all->across, at = all->from + i % all->across * all->chunk;
  return (line * job->length + at) * job->size;
}

/* Chunk i of every stream. */
MOE_FN void moe_mx_reads_(const moe_mx_quantize_job_ *job, const moe_mx_streams_ *all, int64_t i,
                          moe_prefetch_ *prefetch) {
  const int64_t apart = moe_mx_plain_at_(job, all, all->deep) - moe_mx_plain_at_(job, all, 0);
  const char *first = job->plain + moe_mx_plain_at_(job, all, i);
  moe_prefetch_rows_(prefetch, first, NULL, NULL, apart, MOE_READ_STREAMS_, all->chunk * job->size);
}

MOE_FN void moe_mx_first_reads_(void *arg, int64_t item, moe_prefetch_ *prefetch) {
  const moe_mx_streams_ all = moe_mx_streams_of_((const moe_mx_quantize_job_ *)arg, item);
  moe_mx_reads_((const moe_mx_quantize_job_ *)arg, &all, 0, prefetch);
}

/* What chunk i of a stream prefetches: its share of every stream's next chunk. */
MOE_FN moe_prefetch_block_ moe_mx_prefetch_(const moe_mx_quantize_job_ *job, const moe_mx_streams_ *all, int64_t stream,
                                            int64_t i) {
  moe_prefetch_ reads = all->next;
  const moe_prefetch_block_ nothing = {0};
  if (i + 1 < all->deep) moe_mx_reads_(job, all, i + 1, &reads);
  if (!reads.base) return nothing;
  return moe_prefetch_streams_(reads.base + stream * (all->chunk * job->size / MOE_READ_STREAMS_), reads.stride);
}

MOE_EITHER void moe_mx_chunk_(const moe_mx_quantize_job_ *job, const moe_mx_streams_ *all, int64_t stream, int64_t i) {
  const int64_t at = stream * all->deep + i, line = all->line + at / all->across;
  const int64_t from = all->from + at % all->across * all->chunk, n = moe_min_(all->chunk, all->to - from);
  MOE_LINE_ALIGNED uint8_t chunk[MOE_NT_CHUNK_];
  moe_mx_part_ part = moe_mx_part_of_(job, job->dtype, job->plain + moe_mx_plain_at_(job, all, at), line, from, n);
  if (!job->decode) part.fetch = moe_mx_prefetch_(job, all, stream, i);
  void *out = job->decode ? (void *)part.plain : part.codes;
  if (job->nt && job->decode) part.plain = (char *)chunk;
  else if (job->nt) part.codes = chunk;
  moe_mx_convert_(job, &part);
  if (!job->nt) return;
  job->kernels->vec->copy_nt(out, chunk, job->decode ? n * job->size : moe_element_bytes_(n, job->format.bits));
}

/* n plain elements, contiguous, to or from x. */
MOE_FN void moe_mx_plain_(const moe_mx_quantize_job_ *job, float *x, int64_t at, int64_t n, int store) {
  if (store) moe_store_row_(job->kernels->vec, job->dtype, job->plain + at * job->size, x, n);
  else moe_load_row_(job->kernels->vec, job->dtype, x, job->plain + at * job->size, n);
}

enum { MOE_MX_LINES_ = 32 };

/* At most 32 lines and 64 elements of them. */
MOE_FN void moe_mx_transposed_(const moe_mx_quantize_job_ *job, int64_t line, int64_t lines, int64_t at, int64_t n) {
  const int64_t pitch = MOE_MX_LINES_ * sizeof(float);
  float rows[MOE_NR * MOE_MX_LINES_] = {0}, columns[MOE_MX_LINES_ * MOE_NR] = {0};
  if (!job->decode) {
    for (int64_t i = 0; i < n; i++)
      moe_mx_plain_(job, rows + i * MOE_MX_LINES_, (at + i) * job->lines + line, lines, 0);
    job->kernels->vec->transpose_words(columns, MOE_NR_BYTES_, rows, pitch, n, lines);
  }
  for (int64_t j = 0; j < lines; j++) {
    moe_mx_part_ part = moe_mx_part_of_(job, MOE_DTYPE_F32, (char *)(columns + j * MOE_NR), line + j, at, n);
    part.fetch.at = part.plain;
    moe_mx_convert_(job, &part);
  }
  if (job->decode) {
    job->kernels->vec->transpose_words(rows, pitch, columns, MOE_NR_BYTES_, lines, n);
    for (int64_t i = 0; i < n; i++)
      moe_mx_plain_(job, rows + i * MOE_MX_LINES_, (at + i) * job->lines + line, lines, 1);
  }
}

MOE_FN void moe_mx_transposed_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_mx_quantize_job_ *job = (const moe_mx_quantize_job_ *)arg;
  const int64_t first = item / job->blocks * job->line_block, last = moe_min_(job->lines, first + job->line_block);
  const int64_t from = item % job->blocks * job->block, to = moe_min_(job->length, from + job->block);
  (void)worker;
  for (int64_t at = from; at < to; at += MOE_NR)
    for (int64_t line = first; line < last; line += MOE_MX_LINES_)
      moe_mx_transposed_(job, line, moe_min_(MOE_MX_LINES_, last - line), at, moe_min_(MOE_NR, to - at));
}

MOE_FN void moe_mx_quantize_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_mx_quantize_job_ *job = (const moe_mx_quantize_job_ *)arg;
  moe_mx_streams_ all = moe_mx_streams_of_(job, item);
  moe_next_reads_(worker, &all.next);
  for (int64_t i = 0; i < all.deep; i++)
    for (int64_t at = i; at < all.count; at += all.deep) moe_mx_chunk_(job, &all, at / all.deep, i);
}

#endif
