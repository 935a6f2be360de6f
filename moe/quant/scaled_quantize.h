/* moe_quantize_scaled and moe_dequantize_scaled: blocks of 8-bit elements under one binary32 scale. */
#ifndef MOE_QUANT_SCALED_QUANTIZE_H
#define MOE_QUANT_SCALED_QUANTIZE_H

typedef struct moe_scaled_job_ {
  const moe_kernels *kernels;
  moe_element_format_ format;
  moe_cast_ cast;
  moe_numbers_ numbers;
  moe_dtype dtype;
  int decode, given, nt; /* given: scales are; nt: see MOE_NT_MIN_BYTES */
  int powers;            /* scales are powers of two */
  int64_t rows, columns, size;
  int64_t block_rows, block_columns, across; /* across: blocks in a row */
  /* Rows and columns of an item, and items in a row. Columns are of whole blocks; so are rows if scales are
     computed. */
  int64_t height, span, spans;
  int64_t unit;     /* rows that are searched for their largest magnitudes and converted together */
  int64_t prefetch; /* bytes, about, from a plain element to one that is prefetched with it, unless: */
  int in_streams;   /* the rows of an item are converted one at a time, from several read streams */
  char *plain;      /* read or, to decode, written; codes are written or read, and so are scales unless given */
  uint8_t *codes;
  float *scales;
  float largest;
} moe_scaled_job_;

enum {
  MOE_SCALED_STRIP_ = 1024,       /* columns that are searched for their largest magnitudes together */
  MOE_SCALED_ITEM_ = 1 << 15,     /* elements of an item: at least, if there are so many, */
  MOE_SCALED_ITEM_MOST_ = 1 << 18 /* and at most, unless a block has more */
};

/* Columns [first, first+n) of rows [row, end) of an item: whole blocks, if their scales are computed. With its bytes,
   as many from `next` on are prefetched or, if apart is not 0, of what read streams `apart` bytes from each other read
   next. */
typedef struct moe_scaled_area_ {
  int64_t row, end, first, n;
  int numbers; /* all are known to be finite */
  const char *next;
  int64_t apart;
} moe_scaled_area_;

MOE_FN void moe_scaled_load_(const moe_scaled_job_ *job, float *x, int64_t row, int64_t column, int64_t n) {
  const int64_t at = row * job->columns + column;
  if (job->decode) job->kernels->quant->load_codes[1](x, job->codes + at, n, &job->format);
  else moe_load_row_(job->kernels->vec, job->dtype, x, job->plain + at * job->size, n);
}

/* Bytes of n elements of the result. */
MOE_FN int64_t moe_scaled_bytes_(const moe_scaled_job_ *job, int64_t n) { return job->decode ? n * job->size : n; }

/* n elements of the result, from x. */
MOE_FN void moe_scaled_store_(const moe_scaled_job_ *job, const float *x, char *to, int64_t n) {
  if (job->decode) moe_store_row_(job->kernels->vec, job->dtype, to, x, n);
  else job->kernels->quant->store_codes[1]((uint8_t *)to, x, n, &job->format, &job->cast);
}

/* The largest finite magnitude of at most a strip. */
MOE_FN uint32_t moe_scaled_magnitude_(const moe_scaled_job_ *job, moe_scaled_area_ *a, int64_t row, int64_t column,
                                      int64_t n) {
  float x[MOE_SCALED_STRIP_];
  const char *from = job->plain + (row * job->columns + column) * job->size;
  const uint32_t most = n < MOE_MX_GROUP_ ? 0x7f800000u : job->kernels->quant->magnitude[job->dtype](from, n);
  if (most < 0x7f800000u) return most;
  a->numbers = 0;
  moe_scaled_load_(job, x, row, column, n);
  return moe_mx_finite_magnitude_(x, n);
}

/* With powers of two x becomes the next one, or stays. A quotient above one is not rounded to it: amax and `largest`
   have 24 bits, so that it is above by more than half of the last. */
MOE_FN float moe_scaled_scale_of_(const moe_scaled_job_ *job, uint32_t amax) {
  float x = moe_castf_scalar(amax) / job->largest;
  x = amax == 0 ? 1.0f : x < 0x1p-126f ? 0x1p-126f : x;
  return job->powers ? moe_castf_scalar((moe_casti_scalar(x) + 0x007fffffu) & 0x7f800000u) : x;
}

/* Computes the scales of an area: of many narrow blocks, or of one that may be wider than a strip. */
MOE_FN void moe_scaled_find_(const moe_scaled_job_ *job, moe_scaled_area_ *a) {
  uint32_t amax[MOE_SCALED_STRIP_];
  float *scales = job->scales + a->row / job->block_rows * job->across + a->first / job->block_columns;
  const int64_t blocks = moe_ceil_div_(a->n, job->block_columns);
  memset(amax, 0, (size_t)blocks * sizeof *amax);
  a->numbers = 1;
  for (int64_t row = a->row; row < a->end; row++)
    for (int64_t at = 0, n; at < a->n; at += n) {
      n = moe_min_(MOE_SCALED_STRIP_, a->n - at);
      for (int64_t i = 0; i < n; i += job->block_columns) {
        const int64_t part = moe_min_(job->block_columns, n - i);
        const uint32_t most = moe_scaled_magnitude_(job, a, row, a->first + at + i, part);
        uint32_t *block = amax + (at + i) / job->block_columns;
        if (most > *block) *block = most;
      }
    }
  for (int64_t b = 0; b < blocks; b++) scales[b] = moe_scaled_scale_of_(job, amax[b]);
}

/* What codes or, to encode, plain elements are multiplied by. */
MOE_FN float moe_scaled_factor_(const moe_scaled_job_ *job, int64_t row, int64_t column) {
  const float scale = job->scales[row / job->block_rows * job->across + column / job->block_columns];
  return job->decode ? scale : 1.0f / scale;
}

/* A row of blocks narrower than a group of 32. */
MOE_FN void moe_scaled_narrow_(const moe_scaled_job_ *job, int64_t row, int64_t column, int64_t n, char *to) {
  float x[MOE_SCALED_STRIP_], factor[MOE_SCALED_STRIP_];
  for (int64_t i = 0, end; i < n; i = end) {
    const float value = moe_scaled_factor_(job, row, column + i);
    end = moe_min_(n, i + job->block_columns - (column + i) % job->block_columns);
    for (int64_t j = i; j < end; j++) factor[j] = value;
  }
  moe_scaled_load_(job, x, row, column, n);
  job->kernels->vec->multiply_row(x, factor, n);
  moe_scaled_store_(job, x, to, n);
}

/* What is prefetched with a row's elements from `at` of the area on. */
MOE_FN moe_prefetch_block_ moe_scaled_prefetch_(const moe_scaled_job_ *job, const moe_scaled_area_ *a, int64_t row,
                                                int64_t at) {
  const moe_prefetch_block_ straight = {a->next + ((row - a->row) * job->columns + at) * job->size, 4, 64, 0};
  return a->apart ? moe_prefetch_streams_(a->next + at * job->size / MOE_READ_STREAMS_, a->apart) : straight;
}

/* A row of one block. */
MOE_FN void moe_scaled_wide_(const moe_scaled_job_ *job, const moe_scaled_area_ *a, int64_t row, int64_t column,
                             int64_t n, char *to) {
  const float factor = moe_scaled_factor_(job, row, column);
  const int plain = factor > 0 && factor < 0x1p127f && !job->numbers.general;
  moe_numbers_ q = job->numbers;
  q.factor = factor, q.known = a->numbers;
  for (int64_t i = 0, done; i < n; i += done) {
    const int64_t at = row * job->columns + column + i, groups = plain ? (n - i) / MOE_MX_GROUP_ : 0;
    char *out = to + moe_scaled_bytes_(job, i);
    if (job->decode) {
      done = job->kernels->quant->dequantize_groups[job->dtype](out, job->codes + at, NULL, groups, &q);
    } else {
      const moe_prefetch_block_ fetch = moe_scaled_prefetch_(job, a, row, column + i - a->first);
      done = job->kernels->quant->quantize_groups[job->dtype]((uint8_t *)out, NULL, job->plain + at * job->size, groups,
                                                              &q, &fetch);
    }
    done *= MOE_MX_GROUP_;
    if (done > 0) continue;
    float x[MOE_MX_GROUP_];
    done = moe_min_(MOE_MX_GROUP_, n - i);
    moe_scaled_load_(job, x, row, column + i, done);
    job->kernels->vec->scale_row(x, factor, done);
    moe_scaled_store_(job, x, out, done);
  }
}

MOE_FN void moe_scaled_convert_(const moe_scaled_job_ *job, const moe_scaled_area_ *a) {
  const int narrow = job->block_columns < MOE_MX_GROUP_;
  MOE_LINE_ALIGNED char chunk[MOE_NT_CHUNK_];
  for (int64_t row = a->row; row < a->end; row++)
    for (int64_t at = 0, n; at < a->n; at += n) {
      const int64_t column = a->first + at;
      const int64_t block = narrow ? MOE_SCALED_STRIP_ : job->block_columns - at % job->block_columns;
      n = moe_min_(job->nt ? MOE_NT_CHUNK_ / moe_scaled_bytes_(job, 1) : block, moe_min_(block, a->n - at));
      char *out = (job->decode ? job->plain : (char *)job->codes) + moe_scaled_bytes_(job, row * job->columns + column);
      char *to = job->nt ? chunk : out;
      if (narrow) moe_scaled_narrow_(job, row, column, n, to);
      else moe_scaled_wide_(job, a, row, column, n, to);
      if (job->nt) job->kernels->vec->copy_nt(out, chunk, moe_scaled_bytes_(job, n));
    }
}

/* An item's rows [first, end), in areas of which a read stream has `deep`, and columns. With several streams an area is
   a row. */
typedef struct moe_scaled_rows_ {
  int64_t first, end, areas, deep, column, n;
} moe_scaled_rows_;

MOE_FN moe_scaled_rows_ moe_scaled_rows_of_(const moe_scaled_job_ *job, int64_t item) {
  moe_scaled_rows_ r;
  r.first = item / job->spans * job->height, r.end = moe_min_(job->rows, r.first + job->height);
  r.areas = moe_ceil_div_(r.end - r.first, job->unit);
  r.deep = moe_ceil_div_(r.areas, job->in_streams ? MOE_READ_STREAMS_ : 1);
  r.column = item % job->spans * job->span;
  r.n = moe_min_(job->span, job->columns - r.column);
  return r;
}

/* Row i of every read stream. */
MOE_FN void moe_scaled_reads_(const moe_scaled_job_ *job, const moe_scaled_rows_ *r, int64_t i,
                              moe_prefetch_ *prefetch) {
  const int64_t pitch = job->columns * job->size;
  const char *at = job->plain + (r->first + i) * pitch + r->column * job->size;
  moe_prefetch_rows_(prefetch, at, NULL, NULL, r->deep * pitch, MOE_READ_STREAMS_, r->n * job->size);
}

MOE_FN void moe_scaled_first_reads_(void *arg, int64_t item, moe_prefetch_ *prefetch) {
  const moe_scaled_rows_ r = moe_scaled_rows_of_((const moe_scaled_job_ *)arg, item);
  moe_scaled_reads_((const moe_scaled_job_ *)arg, &r, 0, prefetch);
}

/* Area i of a read stream. At last it prefetches what the next item reads first. */
MOE_FN void moe_scaled_area_of_(const moe_scaled_job_ *job, const moe_scaled_rows_ *r, int64_t stream, int64_t i,
                                const moe_prefetch_ *next, moe_scaled_area_ *a) {
  moe_prefetch_ reads = *next;
  a->row = r->first + (stream * r->deep + i) * job->unit;
  a->end = moe_min_(r->end, a->row + job->unit);
  a->first = r->column, a->n = r->n;
  if (job->decode) return;
  a->next = job->plain + (a->row * job->columns + a->first) * job->size + job->prefetch;
  if (!job->in_streams) return;
  if (i + 1 < r->deep || !next->base) moe_scaled_reads_(job, r, moe_min_(i + 1, r->deep - 1), &reads);
  a->apart = reads.stride;
  a->next = reads.base + stream * (a->n * job->size / MOE_READ_STREAMS_ / 64 * 64);
}

MOE_FN void moe_scaled_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_scaled_job_ *job = (const moe_scaled_job_ *)arg;
  const moe_scaled_rows_ r = moe_scaled_rows_of_(job, item);
  moe_scaled_area_ a = {0};
  moe_prefetch_ next;
  moe_next_reads_(worker, &next);
  for (int64_t i = 0; i < r.deep; i++)
    for (int64_t at = i; at < r.areas; at += r.deep) {
      moe_scaled_area_of_(job, &r, at / r.deep, i, &next, &a);
      if (!job->decode && !job->given) moe_scaled_find_(job, &a);
      moe_scaled_convert_(job, &a);
    }
}

/* That n float scales, one in every `step`, are finite. */
MOE_FN moe_status moe_check_float_scales_(moe_context *ctx, const char *name, const void *scales, int64_t n,
                                          int64_t step) {
  const float *scale = (const float *)scales;
  for (int64_t i = 0; i < n; i += step)
    if (!moe_is_finite_(scale + i)) return moe_check_finite_(ctx, name, scale + i);
  return MOE_OK;
}

MOE_FN moe_status moe_quantize_scaled_check_contents_(moe_context *ctx, const void *state) {
  const moe_scaled_job_ *job = (const moe_scaled_job_ *)state;
  const int64_t scales = moe_ceil_div_(job->rows, job->block_rows) * job->across;
  for (int64_t i = 0; i < scales && job->given; i++) {
    MOE_TRY(moe_check_finite_(ctx, "scales", job->scales + i));
    if (job->scales[i] <= 0) return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "scales", "must be above 0");
  }
  return MOE_OK;
}

#endif
