/* moe_quantize_mx and moe_dequantize_mx: groups of 32 elements under one power of two. */
#ifndef MOE_QUANT_MX_QUANTIZE_H
#define MOE_QUANT_MX_QUANTIZE_H

enum {
  MOE_MX_STRIP_ = 1024,       /* elements of a line that a transposed item takes */
  MOE_MX_ITEM_ = 1 << 16,     /* elements of an item, at least, if there are, */
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
  const char *from;
  char *to; /* plain, one of the two */
  const uint8_t *codes, *scales;
  uint8_t *to_codes, *to_scales;
  int64_t line_block, block, blocks; /* an item is line_block lines of block elements, of which a line has `blocks` */
} moe_mx_quantize_job_;

/* ----------------------------------------------------------------------------------------------------------- scales */

/* With amax = m*2^e and the format's largest number M*2^emax, m and M in [1,2), every rule is e - emax + offset, and
   one more from some m on: where adding to the fraction's bits carries into the exponent. So emax >= 2 keeps the byte
   below 254, and takes it to 0 for all subnormals. */
MOE_FN moe_scale_ moe_mx_scale_rule_(moe_scale_rule rule, const moe_element_format_ *f) {
  const uint32_t one = 1u << 23, top = (f->max << (23 - f->fraction) & (one - 1)) | one;
  moe_scale_ s = {0, f->bias - (int)(f->max >> f->fraction)};
  switch (rule) {
    case MOE_SCALE_OCP_FLOOR: break;
    case MOE_SCALE_NKI_ALT: s.offset += f->bits == 8; break;
    case MOE_SCALE_ROUND_UP: s.round = 2 * one - (top + 1); break;
    case MOE_SCALE_CEIL: s.round = one - 1; break;
    case MOE_SCALE_EVEN: s.round = one >> (f->fraction + 1); break;
    case MOE_SCALE_NEAREST: /* M <= sqrt(2) m: M/sqrt(2) is irrational, and the least m above it is searched for */
      s.offset--;
      for (uint64_t low = one, high = 2 * (uint64_t)one; low < high;) {
        const uint64_t m = (low + high) / 2;
        if (2 * m * m < (uint64_t)top * top)
          low = m + 1;
        else
          high = m;
        s.round = 2 * one - (uint32_t)low;
      }
      break;
  }
  return s;
}

MOE_FN uint32_t moe_mx_scale_byte_(const moe_scale_ *rule, uint32_t amax) {
  const int32_t byte = (int32_t)((amax + rule->round) >> 23) + rule->offset;
  return byte < 0 ? 0u : (uint32_t)byte;
}

MOE_FN uint32_t moe_mx_finite_magnitude_(const float *x, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= 0x7fffffffu;
    if (bits < 0x7f800000u && bits > most) most = bits;
  }
  return most;
}

MOE_FN float moe_e8m0_(uint32_t byte) {
  const uint32_t bits = moe_e8m0_bits_(byte);
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

/* ----------------------------------------------------------------------------------------------------------- groups */

MOE_FN moe_numbers_ moe_numbers_of_(const moe_element_format_ *f, const moe_cast_ *cast) {
  moe_numbers_ q = {0};
  q.wide = moe_wide_(f);
  q.format = *f, q.away = cast->away;
  q.prefetch = q.prefetch_to = 64;
  q.most = cast->overflow, q.least = f->rebias + (1u << 23);
  q.big = ((127u + (uint32_t)f->shift) << 23) + ((0u - (q.least >> f->shift)) & 0xffffu);
  q.drop = f->nan != 0 && cast->overflow == f->nan;
  for (int code = 1, steps = 1 << (23 - f->shift); q.wide && code < steps; code++) {
    int down = 0;
    while (code << down < steps) down++;
    q.below[code] = (uint8_t)(code - ((1 - down) * steps + (code << down) - steps));
  }
  return q;
}

/* A group of n, whatever it holds. Products are exact but below 2^-126, where all round to zero. */
MOE_FN void moe_mx_group_(const moe_mx_quantize_job_ *job, moe_dtype dtype, const char *from, int64_t n, uint8_t *codes,
                          uint8_t *scale) {
  float x[MOE_MX_GROUP_];
  moe_load_row_(job->kernels->vec, dtype, x, from, n);
  uint32_t amax = job->kernels->quant->magnitude[MOE_DTYPE_F32](x, n);
  const int special = amax >= 0x7f800000u;
  if (special) amax = moe_mx_finite_magnitude_(x, n);
  const uint32_t byte = moe_mx_scale_byte_(&job->numbers.rule, amax);
  *scale = (uint8_t)byte;
  if (special && job->format.nan == 0) {
    memset(x, 0, (size_t)n * sizeof *x);
    *scale = 255;
  } else {
    job->kernels->vec->scale_row(x, moe_e8m0_(254 - byte), n);
  }
  job->kernels->quant->store_codes[moe_wide_(&job->format)](codes, x, n, &job->format, &job->cast);
}

/* Likewise. */
MOE_FN void moe_mx_group_from_(const moe_mx_quantize_job_ *job, moe_dtype dtype, char *to, int64_t n,
                               const uint8_t *codes, const uint8_t *scale) {
  float x[MOE_MX_GROUP_];
  job->kernels->quant->load_codes[moe_wide_(&job->format)](x, codes, n, &job->format);
  job->kernels->vec->scale_row(x, moe_e8m0_(*scale), n);
  moe_store_row_(job->kernels->vec, dtype, to, x, n);
}

/* n elements of a line from a multiple of 32 on: where they are, plain and as codes, and where they go. To codes, what
   is fetched meanwhile. */
typedef struct moe_mx_part_ {
  moe_dtype dtype;
  const char *from;
  char *to;
  const uint8_t *codes, *scales;
  uint8_t *to_codes, *to_scales;
  int64_t n;
  moe_prefetch_block_ fetch;
} moe_mx_part_;

/* The codes of elements [at, at+n). */
MOE_EITHER moe_mx_part_ moe_mx_part_of_(const moe_mx_quantize_job_ *job, moe_dtype dtype, int64_t line, int64_t at,
                                        int64_t n) {
  const int64_t code = line * job->code_stride + moe_element_bytes_(at, job->format.bits);
  const int64_t scale = line * job->scale_stride + at / MOE_MX_GROUP_;
  moe_mx_part_ part = {0};
  part.dtype = dtype, part.n = n;
  if (job->decode)
    part.codes = job->codes + code, part.scales = job->scales + scale;
  else
    part.to_codes = job->to_codes + code, part.to_scales = job->to_scales + scale;
  return part;
}

MOE_EITHER void moe_mx_convert_(const moe_mx_quantize_job_ *job, const moe_mx_part_ *part) {
  const int64_t size = moe_dtype_bytes_(part->dtype);
  for (int64_t i = 0, done; i < part->n; i += done * MOE_MX_GROUP_) {
    const int64_t code = moe_element_bytes_(i, job->format.bits), scale = i / MOE_MX_GROUP_;
    const int64_t groups = (part->n - i) / MOE_MX_GROUP_, left = moe_min_(MOE_MX_GROUP_, part->n - i);
    if (job->decode)
      done = job->kernels->quant->dequantize_groups[part->dtype](part->to + i * size, part->codes + code,
                                                                 part->scales + scale, groups, &job->numbers);
    else
      done = job->kernels->quant->quantize_groups[part->dtype](
          part->to_codes + code, part->to_scales + scale, part->from + i * size, groups, &job->numbers, &part->fetch);
    if (done > 0) continue;
    done = 1;
    if (job->decode)
      moe_mx_group_from_(job, part->dtype, part->to + i * size, left, part->codes + code, part->scales + scale);
    else
      moe_mx_group_(job, part->dtype, part->from + i * size, left, part->to_codes + code, part->to_scales + scale);
  }
}

/* Of a tensor that is not transposed: lines [line, end), elements [from, to) of each, in pieces, `across` to a line and
   `count` in all. Strand s has pieces [s * deep, (s + 1) * deep). */
typedef struct moe_mx_strands_ {
  int64_t line, from, to, chunk, across, count, deep;
} moe_mx_strands_;

MOE_FN moe_mx_strands_ moe_mx_strands_of_(const moe_mx_quantize_job_ *job, int64_t line, int64_t end, int64_t from,
                                          int64_t to) {
  moe_mx_strands_ item = {line, from, to, 0, 0, 0, 0};
  item.chunk = MOE_NT_CHUNK_ / (job->decode ? job->size : 2);
  item.across = moe_ceil_div_(to - from, item.chunk);
  item.count = item.across * (end - line);
  item.deep = moe_ceil_div_(item.count, job->decode ? 1 : MOE_READ_STREAMS_);
  return item;
}

MOE_EITHER int64_t moe_mx_plain_at_(const moe_mx_quantize_job_ *job, const moe_mx_strands_ *item, int64_t i) {
  const int64_t line = item->line + i / item->across, at = item->from + i % item->across * item->chunk;
  return (line * job->length + at) * job->size;
}

/* Beside piece `i` of a strand: its share of every strand's next one, a line of each in turn. */
MOE_EITHER moe_prefetch_block_ moe_mx_prefetch_(const moe_mx_quantize_job_ *job, const moe_mx_strands_ *item,
                                                int64_t strand, int64_t i) {
  const int64_t next = moe_mx_plain_at_(job, item, i + 1 < item->deep ? i + 1 : i);
  const int64_t apart = moe_mx_plain_at_(job, item, item->deep) - moe_mx_plain_at_(job, item, 0);
  return moe_prefetch_streams_(job->from + next + strand * (item->chunk * job->size / MOE_READ_STREAMS_), apart);
}

MOE_EITHER void moe_mx_chunk_(const moe_mx_quantize_job_ *job, const moe_mx_strands_ *item, int64_t strand, int64_t i) {
  const int64_t at = strand * item->deep + i, line = item->line + at / item->across;
  const int64_t from = item->from + at % item->across * item->chunk, n = moe_min_(item->chunk, item->to - from);
  const int64_t plain = moe_mx_plain_at_(job, item, at);
  MOE_LINE_ALIGNED uint8_t chunk[MOE_NT_CHUNK_];
  moe_mx_part_ part = moe_mx_part_of_(job, job->dtype, line, from, n);
  part.from = job->decode ? NULL : job->from + plain;
  part.to = job->decode ? job->to + plain : NULL;
  if (!job->decode) part.fetch = moe_mx_prefetch_(job, item, strand, i);
  void *leaves = job->decode ? (void *)part.to : part.to_codes;
  if (job->nt) part.to = (char *)chunk, part.to_codes = chunk;
  moe_mx_convert_(job, &part);
  if (!job->nt) return;
  job->kernels->vec->copy_nt(leaves, chunk, job->decode ? n * job->size : moe_element_bytes_(n, job->format.bits));
}

/* n plain elements, contiguous, to or from x. */
MOE_FN void moe_mx_plain_(const moe_mx_quantize_job_ *job, float *x, int64_t at, int64_t n, int store) {
  if (store)
    moe_store_row_(job->kernels->vec, job->dtype, job->to + at * job->size, x, n);
  else
    moe_load_row_(job->kernels->vec, job->dtype, x, job->from + at * job->size, n);
}

enum { MOE_MX_LINES_ = 32 };

/* At most 32 lines and 64 elements of them. */
MOE_FN void moe_mx_transposed_(const moe_mx_quantize_job_ *job, int64_t line, int64_t lines, int64_t at, int64_t n) {
  const int64_t pitch = MOE_MX_LINES_ * sizeof(float);
  float rows[MOE_NR * MOE_MX_LINES_] = {0}, columns[MOE_MX_LINES_ * MOE_NR] = {0};
  if (!job->decode) {
    for (int64_t i = 0; i < n; i++) moe_mx_plain_(job, rows + i * MOE_MX_LINES_, (at + i) * job->lines + line, lines, 0);
    job->kernels->vec->transpose_words(columns, MOE_NR_BYTES_, rows, pitch, n, lines);
  }
  for (int64_t j = 0; j < lines; j++) {
    moe_mx_part_ part = moe_mx_part_of_(job, MOE_DTYPE_F32, line + j, at, n);
    part.from = part.to = (char *)(columns + j * MOE_NR);
    part.fetch.at = part.from;
    moe_mx_convert_(job, &part);
  }
  if (job->decode) {
    job->kernels->vec->transpose_words(rows, pitch, columns, MOE_NR_BYTES_, lines, n);
    for (int64_t i = 0; i < n; i++) moe_mx_plain_(job, rows + i * MOE_MX_LINES_, (at + i) * job->lines + line, lines, 1);
  }
}

MOE_FN void moe_mx_quantize_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_mx_quantize_job_ *job = (const moe_mx_quantize_job_ *)arg;
  const int64_t first = item / job->blocks * job->line_block, last = moe_min_(job->lines, first + job->line_block);
  const int64_t from = item % job->blocks * job->block, to = moe_min_(job->length, from + job->block);
  (void)worker;
  if (job->transposed) {
    for (int64_t at = from; at < to; at += MOE_NR)
      for (int64_t line = first; line < last; line += MOE_MX_LINES_)
        moe_mx_transposed_(job, line, moe_min_(MOE_MX_LINES_, last - line), at, moe_min_(MOE_NR, to - at));
    return;
  }
  const moe_mx_strands_ all = moe_mx_strands_of_(job, first, last, from, to);
  for (int64_t i = 0; i < all.deep; i++)
    for (int64_t at = i; at < all.count; at += all.deep) moe_mx_chunk_(job, &all, at / all.deep, i);
}

/* ------------------------------------------------------------------------------------------------------------ calls */

/* What both directions check; their tensors. */
MOE_FN moe_status moe_mx_quantize_list_(moe_context *ctx, moe_mx_quantize_job_ *job, int64_t rows, int64_t columns,
                                        moe_tensors_ *tensors) {
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_enum_(ctx, "dtype", (int)job->dtype, MOE_DTYPE_COUNT_));
  MOE_TRY(moe_check_flag_(ctx, "transposed", job->transposed));
  MOE_TRY(moe_check_positive_(ctx, "rows", rows));
  MOE_TRY(moe_check_positive_(ctx, "columns", columns));
  job->dtype = moe_or_(job->dtype, MOE_DTYPE_F32);
  job->lines = job->transposed ? columns : rows, job->length = job->transposed ? rows : columns;
  job->size = moe_dtype_bytes_(job->dtype);
  job->code_stride = moe_element_bytes_(job->length, job->format.bits);
  job->scale_stride = moe_ceil_div_(job->length, MOE_MX_GROUP_);
  const int64_t plain = moe_mul3_(rows, columns, job->size);
  const int64_t codes = moe_mul_(job->lines, job->code_stride), scales = moe_mul_(job->lines, job->scale_stride);
  const moe_tensor_ quantize[] = {{"plain", job->from, plain, job->size, MOE_INPUT},
                                  {"codes", job->to_codes, codes, 1, MOE_OUTPUT},
                                  {"scales", job->to_scales, scales, 1, MOE_OUTPUT}};
  const moe_tensor_ dequantize[] = {{"codes", job->codes, codes, 1, MOE_INPUT},
                                    {"scales", job->scales, scales, 1, MOE_INPUT},
                                    {"plain", job->to, plain, job->size, MOE_OUTPUT}};
  return job->decode ? MOE_LIST_(tensors, dequantize) : MOE_LIST_(tensors, quantize);
}

MOE_FN moe_status moe_quantize_mx_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_mx_quantize_job_ *job = (moe_mx_quantize_job_ *)state;
  const moe_quantize_mx_args *args = (const moe_quantize_mx_args *)call->args;
  MOE_TRY(moe_check_enum_(ctx, "element", (int)args->element, MOE_ELEMENT_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "scale_rule", (int)args->scale_rule, MOE_SCALE_NEAREST + 1));
  MOE_TRY(moe_check_cast_(ctx, args->cast));
  job->element = args->element, job->dtype = args->dtype, job->transposed = args->transposed;
  job->format = moe_element_format_of_(args->element);
  job->cast = moe_cast_of_(args->element, args->cast);
  job->cast.infinity = moe_cast_of_(args->element, 0).infinity; /* saturating is for numbers */
  job->numbers = moe_numbers_of_(&job->format, &job->cast);
  job->numbers.rule = moe_mx_scale_rule_(args->scale_rule, &job->format);
  job->from = (const char *)args->plain, job->to_codes = args->codes, job->to_scales = args->scales;
  return moe_mx_quantize_list_(ctx, job, args->rows, args->columns, tensors);
}

MOE_FN moe_status moe_dequantize_mx_check_(moe_context *ctx, void *state, const moe_call_ *call,
                                           moe_tensors_ *tensors) {
  moe_mx_quantize_job_ *job = (moe_mx_quantize_job_ *)state;
  const moe_dequantize_mx_args *args = (const moe_dequantize_mx_args *)call->args;
  MOE_TRY(moe_check_enum_(ctx, "element", (int)args->element, MOE_ELEMENT_COUNT_));
  job->format = moe_element_format_of_(args->element), job->cast = moe_cast_of_(args->element, 0);
  job->numbers = moe_numbers_of_(&job->format, &job->cast);
  job->element = args->element, job->dtype = args->dtype, job->transposed = args->transposed, job->decode = 1;
  job->to = (char *)args->plain, job->codes = args->codes, job->scales = args->scales;
  return moe_mx_quantize_list_(ctx, job, args->rows, args->columns, tensors);
}

MOE_FN moe_status moe_mx_quantize_run_(moe_context *ctx, void *state) {
  moe_mx_quantize_job_ *job = (moe_mx_quantize_job_ *)state;
  const int64_t elements = job->lines * job->length,
                out = job->decode ? elements * job->size : job->lines * job->code_stride;
  job->kernels = moe_kernels_();
  job->nt = !job->transposed && out >= MOE_NT_MIN_BYTES;
  if (job->nt) job->numbers.prefetch_to = 0;
  const int64_t part = elements / 256 / MOE_MX_ITEM_ * MOE_MX_ITEM_; /* of whole groups */
  const int64_t item = moe_max_(MOE_MX_ITEM_, moe_min_(MOE_MX_ITEM_MOST_, part));
  job->block = moe_min_(job->length, job->transposed ? MOE_MX_STRIP_ : item);
  job->line_block = job->transposed ? MOE_NR : moe_max_(1, item / job->block);
  job->blocks = moe_ceil_div_(job->length, job->block);
  const moe_work_ work = {moe_ceil_div_(job->lines, job->line_block) * job->blocks, moe_mx_quantize_item_, job, NULL};
  moe_run_(ctx, &work, 1);
  return MOE_OK;
}

static const moe_op_ moe_quantize_mx_op_ = {moe_quantize_mx_check_, NULL, moe_mx_quantize_run_, NULL, NULL};
static const moe_op_ moe_dequantize_mx_op_ = {moe_dequantize_mx_check_, NULL, moe_mx_quantize_run_, NULL, NULL};
MOE_OP_(moe_quantize_mx, moe_quantize_mx_args, moe_quantize_mx_op_, moe_mx_quantize_job_, .dtype = MOE_DTYPE_DEFAULT)
MOE_OP_(moe_dequantize_mx, moe_dequantize_mx_args, moe_dequantize_mx_op_, moe_mx_quantize_job_,
        .dtype = MOE_DTYPE_DEFAULT)

#endif
