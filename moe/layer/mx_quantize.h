/* moe_quantize_mx and moe_dequantize_mx: groups of 32 elements under one power of two. */
#ifndef MOE_LAYER_MX_QUANTIZE_H
#define MOE_LAYER_MX_QUANTIZE_H

enum { MOE_MX_STRIP_ = 1024, MOE_MX_ITEM_ = 1 << 16 };

/* A line is a row of codes: a row of the plain tensor or, transposed, a column. */
typedef struct moe_mx_quantize_job_ {
  moe_kernels kernels;
  moe_element element;
  moe_element_format_ format;
  moe_scale_rule rule;
  moe_cast_ cast;
  moe_dtype dtype;
  int decode, transposed;
  int64_t lines, length, size; /* size: bytes of a plain element */
  int64_t code_stride, scale_stride;
  const char *from;
  char *to; /* plain, one of the two */
  const uint8_t *codes, *scales;
  uint8_t *to_codes, *to_scales;
  int64_t line_block, block, blocks; /* an item is line_block lines of block elements, of which a line has `blocks` */
} moe_mx_quantize_job_;

/* ----------------------------------------------------------------------------------------------------------- scales */

/* amax: the bits of a finite magnitude. With amax = m*2^e and the format's largest number M*2^emax, m and M in
   [1,2), every rule is e - emax and at most one more or less, which a comparison of integers tells. So emax >= 2
   keeps the byte below 254, and takes it to 0 for all subnormals. */
MOE_FN uint32_t moe_mx_scale_byte_(moe_scale_rule rule, const moe_element_format_ *f, uint32_t amax) {
  const int emax = (int)(f->max >> f->fraction) - f->bias;
  const uint64_t one = 1u << 23, m = (amax & (one - 1)) | one;
  const uint64_t top = ((uint64_t)f->max << (23 - f->fraction) & (one - 1)) | one;
  int byte = (int)(amax >> 23) - emax;
  if (amax < 0x00800000u) return 0;
  switch (rule) {
    case MOE_SCALE_OCP_FLOOR: break;
    case MOE_SCALE_NKI_ALT: byte += f->bits == 8; break;
    case MOE_SCALE_ROUND_UP: byte += m > top; break;
    case MOE_SCALE_CEIL: byte += m > one; break;
    case MOE_SCALE_EVEN: byte += m + (one >> (f->fraction + 1)) >= 2 * one; break;
    case MOE_SCALE_NEAREST: byte += (m * m > 2 * top * top) - (2 * m * m < top * top); break;
  }
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

/* Scales a group of n by its byte, which it returns. Products are exact but below 2^-126, where all round to zero. */
MOE_FN uint8_t moe_mx_group_(const moe_mx_quantize_job_ *job, float *x, int64_t n) {
  uint32_t amax = job->kernels.magnitude(x, n);
  if (amax >= 0x7f800000u) {
    if (job->format.nan == 0) {
      memset(x, 0, (size_t)n * sizeof *x);
      return 255;
    }
    amax = moe_mx_finite_magnitude_(x, n);
  }
  const uint32_t byte = moe_mx_scale_byte_(job->rule, &job->format, amax);
  job->kernels.scale_row(x, moe_e8m0_(254 - byte), n);
  return (uint8_t)byte;
}

/* Elements [at, at+n) of a line, to or from x; `at` is a multiple of 32. */
MOE_FN void moe_mx_line_(const moe_mx_quantize_job_ *job, float *x, int64_t line, int64_t at, int64_t n) {
  const int64_t code = line * job->code_stride + moe_element_bytes_(at, job->format.bits);
  const int64_t scale = line * job->scale_stride + at / MOE_MX_GROUP_;
  if (job->decode) job->kernels.load_codes[moe_wide_(&job->format)](x, job->codes + code, n, &job->format);
  for (int64_t i = 0; i < n; i += MOE_MX_GROUP_) {
    const int64_t left = moe_min_(MOE_MX_GROUP_, n - i), group = scale + i / MOE_MX_GROUP_;
    if (job->decode)
      job->kernels.scale_row(x + i, moe_e8m0_(job->scales[group]), left);
    else
      job->to_scales[group] = moe_mx_group_(job, x + i, left);
  }
  if (!job->decode) 
    job->kernels.store_codes[moe_wide_(&job->format)](job->to_codes + code, x, n, &job->format, &job->cast);
}

/* n plain elements, contiguous, to or from x. */
MOE_FN void moe_mx_plain_(const moe_mx_quantize_job_ *job, float *x, int64_t at, int64_t n, int store) {
  if (store)
    job->kernels.store_row[job->dtype](job->to + at * job->size, x, n);
  else
    job->kernels.load_row[job->dtype](x, job->from + at * job->size, n);
}

/* A square of at most 64 lines and 64 elements. */
MOE_FN void moe_mx_square_(const moe_mx_quantize_job_ *job, int64_t line, int64_t lines, int64_t at, int64_t n) {
  float rows[MOE_PANEL * MOE_PANEL] = {0}, columns[MOE_PANEL * MOE_PANEL] = {0};
  if (!job->decode) {
    for (int64_t i = 0; i < n; i++) moe_mx_plain_(job, rows + i * MOE_PANEL, (at + i) * job->lines + line, lines, 0);
    job->kernels.transpose_tile(columns, rows, n, lines);
  }
  for (int64_t j = 0; j < lines; j++) moe_mx_line_(job, columns + j * MOE_PANEL, line + j, at, n);
  if (job->decode) {
    job->kernels.transpose_tile(rows, columns, lines, n);
    for (int64_t i = 0; i < n; i++) moe_mx_plain_(job, rows + i * MOE_PANEL, (at + i) * job->lines + line, lines, 1);
  }
}

MOE_FN void moe_mx_quantize_item_(void *arg, int64_t item, moe_turn_ *turn) {
  const moe_mx_quantize_job_ *job = (const moe_mx_quantize_job_ *)arg;
  const int64_t first = item / job->blocks * job->line_block, last = moe_min_(job->lines, first + job->line_block);
  const int64_t from = item % job->blocks * job->block, to = moe_min_(job->length, from + job->block);
  (void)turn;
  if (job->transposed) {
    for (int64_t at = from; at < to; at += MOE_PANEL)
      moe_mx_square_(job, first, last - first, at, moe_min_(MOE_PANEL, to - at));
    return;
  }
  for (int64_t line = first; line < last; line++)
    for (int64_t at = from; at < to; at += MOE_MX_STRIP_) {
      const int64_t n = moe_min_(MOE_MX_STRIP_, to - at), plain = line * job->length + at;
      float x[MOE_MX_STRIP_];
      if (!job->decode) moe_mx_plain_(job, x, plain, n, 0);
      moe_mx_line_(job, x, line, at, n);
      if (job->decode) moe_mx_plain_(job, x, plain, n, 1);
    }
}

/* ------------------------------------------------------------------------------------------------------------ calls */

MOE_FN moe_status moe_mx_quantize_run_(moe_context *ctx, moe_mx_quantize_job_ *job, int64_t rows, int64_t columns) {
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_enum_(ctx, "element", (int)job->element, MOE_ELEMENT_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "dtype", (int)job->dtype, MOE_DTYPE_COUNT_));
  MOE_TRY(moe_check_flag_(ctx, "transposed", job->transposed));
  MOE_TRY(moe_check_positive_(ctx, "rows", rows));
  MOE_TRY(moe_check_positive_(ctx, "columns", columns));
  job->dtype = moe_or_(job->dtype, MOE_DTYPE_F32);
  job->format = moe_element_format_of_(job->element);
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
  MOE_TRY(moe_check_tensors_(ctx, job->decode ? dequantize : quantize, 3, 0));
  job->kernels = moe_kernels_();
  job->block = moe_min_(job->length, job->transposed ? MOE_MX_STRIP_ : MOE_MX_ITEM_);
  job->line_block = job->transposed ? MOE_PANEL : moe_max_(1, MOE_MX_ITEM_ / job->block);
  job->blocks = moe_ceil_div_(job->length, job->block);
  const moe_work_ work = {moe_ceil_div_(job->lines, job->line_block) * job->blocks, moe_mx_quantize_item_, job, NULL};
  moe_run_(ctx, &work, 1);
  return moe_succeed_(ctx);
}

moe_status moe_quantize_mx(moe_context *ctx, const moe_quantize_mx_args *args) {
  if (!args) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "args", "is NULL");
  moe_mx_quantize_job_ job = {0};
  MOE_TRY(moe_check_enum_(ctx, "element", (int)args->element, MOE_ELEMENT_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "scale_rule", (int)args->scale_rule, MOE_SCALE_NEAREST + 1));
  MOE_TRY(moe_check_cast_(ctx, args->cast));
  job.element = args->element, job.rule = args->scale_rule, job.dtype = args->dtype, job.transposed = args->transposed;
  job.cast = moe_cast_of_(args->element, args->cast);
  job.cast.infinity = moe_cast_of_(args->element, 0).infinity; /* saturating is for numbers */
  job.from = (const char *)args->plain, job.to_codes = args->codes, job.to_scales = args->scales;
  return moe_mx_quantize_run_(ctx, &job, args->rows, args->columns);
}

moe_status moe_dequantize_mx(moe_context *ctx, const moe_dequantize_mx_args *args) {
  if (!args) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "args", "is NULL");
  moe_mx_quantize_job_ job = {0};
  job.element = args->element, job.dtype = args->dtype, job.transposed = args->transposed, job.decode = 1;
  job.to = (char *)args->plain, job.codes = args->codes, job.scales = args->scales;
  return moe_mx_quantize_run_(ctx, &job, args->rows, args->columns);
}

#endif
