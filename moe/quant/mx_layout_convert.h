/* moe_mx_layout_convert: any layout to any other, a group of 32 codes at a time. */
#ifndef MOE_QUANT_MX_LAYOUT_CONVERT_H
#define MOE_QUANT_MX_LAYOUT_CONVERT_H

enum { MOE_MX_BLOCK_COLUMNS_ = 64, MOE_MX_ZERO_CHUNK_ = 1 << 16 };

/* ---------------------------------------------------------------------------------------------------------- checks */

MOE_FN moe_status moe_mx_check_shape_(moe_context *ctx, moe_mx_layout layout, int bits, int parts, int64_t K) {
  if (moe_mx_is_x4_(layout) && parts == 2 && K % MOE_MX_TILE_ != 0)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "K", "must be a multiple of 512 in an x4 layout of gate and up");
  if (moe_mx_is_x4_(layout) && K % MOE_MX_WORD_ != 0)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "K", "must be a multiple of 4 in an x4 layout");
  if (!moe_mx_is_x4_(layout) && layout != MOE_MX_LAYOUT_PLAIN && K % MOE_MX_GROUP_ != 0)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "K", "must be a multiple of 32 in this layout");
  if ((layout == MOE_MX_LAYOUT_GPT_OSS || layout == MOE_MX_LAYOUT_GGML) && bits != 4)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "element_bits", "must be 4 in this layout");
  return MOE_OK;
}

MOE_FN moe_status moe_mx_check_scales_(moe_context *ctx, const char *name, moe_mx_layout layout, moe_mx_scales scales) {
  int fits = 1;
  MOE_TRY(moe_check_enum_(ctx, name, (int)scales, MOE_MX_SCALES_COUNT_));
  if (scales == MOE_MX_SCALES_NKI_OVERSIZED) fits = moe_mx_is_nki_(layout);
  if (scales == MOE_MX_SCALES_NKI_PACKED) fits = moe_mx_is_kf_(layout);
  if (scales == MOE_MX_SCALES_TILED_128X4) fits = layout == MOE_MX_LAYOUT_PLAIN || layout == MOE_MX_LAYOUT_GPT_OSS;
  return fits ? MOE_OK : moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, name, "is not a placement of scales in that layout");
}

MOE_FN moe_status moe_mx_check_options_(moe_context *ctx, const moe_mx_layout_args *a) {
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_enum_(ctx, "from", (int)a->from, MOE_MX_LAYOUT_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "to", (int)a->to, MOE_MX_LAYOUT_COUNT_));
  MOE_TRY(moe_mx_check_scales_(ctx, "scales_from", a->from, a->scales_from));
  MOE_TRY(moe_mx_check_scales_(ctx, "scales_to", a->to, a->scales_to));
  MOE_TRY(moe_check_flag_(ctx, "logical_order", a->logical_order));
  if (a->element_bits != 4 && a->element_bits != 8)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "element_bits", "must be 4 or 8");
  if (a->parts != 1 && a->parts != 2) return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "parts", "must be 1 or 2");
  MOE_TRY(moe_check_positive_(ctx, "E", a->E));
  MOE_TRY(moe_check_positive_(ctx, "K", a->K));
  MOE_TRY(moe_check_positive_(ctx, "columns", a->columns));
  MOE_TRY(moe_mx_check_shape_(ctx, a->from, a->element_bits, a->parts, a->K));
  MOE_TRY(moe_mx_check_shape_(ctx, a->to, a->element_bits, a->parts, a->K));
  if (a->logical_order && !((a->from == MOE_MX_LAYOUT_PLAIN && moe_mx_is_nki_(a->to)) ||
                            (a->to == MOE_MX_LAYOUT_PLAIN && moe_mx_is_nki_(a->from))))
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "logical_order", "is between PLAIN and an NKI layout");
  if (moe_mx_is_nki_(a->from) && moe_mx_is_nki_(a->to) &&
      moe_mx_order_(a->from, a->parts, a->K) != moe_mx_order_(a->to, a->parts, a->K))
    return moe_fail_(ctx, MOE_ERROR_UNSUPPORTED, "to", "groups other elements than from does, so that no scale fits");
  return MOE_OK;
}

MOE_FN moe_mx_tensor_ moe_mx_tensor_of_(const moe_mx_layout_args *a, int output) {
  moe_mx_tensor_ s =
      moe_mx_tensor_of_shape_(output ? a->to : a->from, a->element_bits, a->E, a->K, a->parts, a->columns);
  s.scales = output ? a->scales_to : a->scales_from;
  s.logical = a->logical_order && s.layout == MOE_MX_LAYOUT_PLAIN;
  s.codes = (uint8_t *)(output ? a->codes_out : (void *)(uintptr_t)a->codes_in);
  s.scale = output ? a->scales_out : (uint8_t *)(uintptr_t)a->scales_in;
  return s;
}

/* ------------------------------------------------------------------------------------------------------------ work */

typedef struct moe_mx_job_ {
  const moe_mx_layout_args *args;
  moe_mx_tensor_ in, out;
  int64_t blocks; /* of columns, per part */
} moe_mx_job_;

/* All groups of a block of columns: no two items write to the same byte, word or row. */
MOE_FN void moe_mx_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_mx_job_ *job = (const moe_mx_job_ *)arg;
  const moe_mx_tensor_ *in = &job->in, *out = &job->out;
  const moe_mx_layout order = in->logical ? out->layout : in->layout;
  int64_t element[MOE_MX_GROUP_];
  uint8_t code[MOE_MX_GROUP_];
  moe_mx_at_ at = {item / job->blocks / in->parts, item / job->blocks % in->parts, 0, 0, element};
  const int64_t first = item % job->blocks * MOE_MX_BLOCK_COLUMNS_;
  const int64_t end = moe_min_(in->columns, first + MOE_MX_BLOCK_COLUMNS_);
  (void)worker;
  for (at.group = 0; at.group < in->groups; at.group++) {
    const int64_t start = at.group * MOE_MX_GROUP_, n = moe_min_(MOE_MX_GROUP_, in->K - start);
    if (in->logical || out->logical)
      for (int64_t j = 0; j < n; j++) element[j] = moe_mx_element_(order, in->parts, in->K, start + j);
    for (at.column = first; at.column < end; at.column++) {
      moe_mx_load_(in, &at, n, code);
      moe_mx_store_(out, &at, n, code);
      *moe_mx_scale_at_(out, &at) = *moe_mx_scale_at_(in, &at);
    }
  }
}

typedef struct moe_zero_job_ {
  uint8_t *memory;
  int64_t bytes;
} moe_zero_job_;

MOE_FN void moe_zero_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_zero_job_ *job = (const moe_zero_job_ *)arg;
  const int64_t at = item * MOE_MX_ZERO_CHUNK_;
  (void)worker;
  memset(job->memory + at, 0, (size_t)moe_min_(MOE_MX_ZERO_CHUNK_, job->bytes - at));
}

/* Padding is cleared before codes and scales are written between it. */
MOE_FN void moe_mx_zero_(const moe_context *ctx, const moe_mx_tensor_ *out, const moe_mx_bytes_ *bytes) {
  moe_zero_job_ codes = {out->codes, moe_mx_codes_padded_(out) ? bytes->codes : 0};
  moe_zero_job_ scales = {out->scale, moe_mx_scales_padded_(out) ? bytes->scales : 0};
  const moe_work_ work[] = {{moe_ceil_div_(codes.bytes, MOE_MX_ZERO_CHUNK_), moe_zero_item_, &codes, NULL},
                            {moe_ceil_div_(scales.bytes, MOE_MX_ZERO_CHUNK_), moe_zero_item_, &scales, NULL}};
  moe_run_(ctx, work, 2);
}

/* ------------------------------------------------------------------------------------------------------- operation */

MOE_FN moe_status moe_mx_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_mx_job_ *job = (moe_mx_job_ *)state;
  const moe_mx_layout_args *a = job->args = (const moe_mx_layout_args *)call->args;
  MOE_TRY(moe_mx_check_options_(ctx, a));
  if (call->query && !call->answer) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "bytes", "is NULL");
  job->blocks = moe_ceil_div_(a->columns, MOE_MX_BLOCK_COLUMNS_);
  job->in = moe_mx_tensor_of_(a, 0);
  job->out = moe_mx_tensor_of_(a, 1);
  const moe_mx_tensor_ *in = &job->in, *out = &job->out;
  const moe_mx_bytes_ from = moe_mx_size_(in), to = moe_mx_size_(out);
  const int64_t word = in->bits / 2;
  const moe_tensor_ own[] = {
      {"codes_in", in->codes, from.codes, moe_mx_is_nki_(in->layout) ? word : 1, MOE_INPUT},
      {"scales_in", in->scales_within ? NULL : in->scale, from.scales, 1,
       in->scales_within ? MOE_INPUT_OPTIONAL : MOE_INPUT},
      {"codes_out", out->codes, to.codes, moe_mx_is_nki_(out->layout) ? word : 1, MOE_OUTPUT},
      {"scales_out", out->scales_within ? NULL : out->scale, to.scales, 1,
       out->scales_within ? MOE_OUTPUT_OPTIONAL : MOE_OUTPUT},
  };
  return MOE_LIST_(tensors, own);
}

MOE_FN moe_status moe_mx_answer_(moe_context *ctx, const moe_tensors_ *tensors, void *answer) {
  const moe_tensor_ *t = tensors->tensor;
  const moe_mx_layout_bytes bytes = {(size_t)t[0].bytes, (size_t)t[1].bytes, (size_t)t[2].bytes, (size_t)t[3].bytes};
  (void)ctx;
  memcpy(answer, &bytes, sizeof bytes);
  return MOE_OK;
}

MOE_FN moe_status moe_mx_check_contents_(moe_context *ctx, const void *state) {
  const moe_mx_job_ *job = (const moe_mx_job_ *)state;
  const moe_mx_layout_bytes *b = &job->args->bytes;
  const moe_mx_bytes_ from = moe_mx_size_(&job->in), to = moe_mx_size_(&job->out);
  const int64_t need[4] = {from.codes, from.scales, to.codes, to.scales};
  const size_t given[4] = {b->codes_in, b->scales_in, b->codes_out, b->scales_out};
  static const char *const name[4] = {"bytes.codes_in", "bytes.scales_in", "bytes.codes_out", "bytes.scales_out"};
  for (int i = 0; i < 4; i++)
    if (given[i] != 0 && given[i] < (size_t)need[i])
      return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, name[i], "is smaller than moe_mx_layout_size says");
  return MOE_OK;
}

MOE_FN moe_status moe_mx_run_(moe_context *ctx, void *state) {
  moe_mx_job_ *job = (moe_mx_job_ *)state;
  const moe_mx_bytes_ bytes = moe_mx_size_(&job->out);
  moe_mx_zero_(ctx, &job->out, &bytes);
  return moe_run_items_(ctx, job->args->E * job->args->parts * job->blocks, moe_mx_item_, job);
}

static const moe_op_ moe_mx_op_ = {moe_mx_check_, NULL, moe_mx_run_, moe_mx_check_contents_, moe_mx_answer_};
MOE_OP_(moe_mx_layout_convert, moe_mx_layout_args, moe_mx_op_, moe_mx_job_, .dtype = MOE_DTYPE_DEFAULT)
moe_status moe_mx_layout_size(moe_context *ctx, const moe_mx_layout_args *args, moe_mx_layout_bytes *bytes) {
  MOE_OP_BODY_(moe_mx_op_, moe_mx_job_, .args = args, .query = 1, .answer = bytes)
}

typedef struct moe_permutation_ {
  moe_mx_layout layout;
  int32_t parts;
  int64_t K, *index;
} moe_permutation_;

MOE_FN moe_status moe_permutation_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  const moe_permutation_ *p = (const moe_permutation_ *)state;
  const int64_t size = (int64_t)sizeof *p->index;
  const moe_tensor_ own[] = {{"index", p->index, moe_mul_(p->K, size), size, MOE_OUTPUT}};
  (void)call;
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_enum_(ctx, "layout", (int)p->layout, MOE_MX_LAYOUT_COUNT_));
  if (p->parts != 1 && p->parts != 2) return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "parts", "must be 1 or 2");
  MOE_TRY(moe_check_positive_(ctx, "K", p->K));
  MOE_TRY(moe_mx_check_shape_(ctx, p->layout, 4, p->parts, p->K));
  return MOE_LIST_(tensors, own);
}

MOE_FN moe_status moe_permutation_run_(moe_context *ctx, void *state) {
  const moe_permutation_ *p = (const moe_permutation_ *)state;
  (void)ctx;
  for (int64_t n = 0; n < p->K; n++) p->index[n] = moe_mx_element_(p->layout, p->parts, p->K, n);
  return MOE_OK;
}

static const moe_op_ moe_permutation_op_ = {moe_permutation_check_, NULL, moe_permutation_run_, NULL, NULL};
moe_status moe_nki_x4_permutation(moe_context *ctx, moe_mx_layout layout, int32_t parts, int64_t K, int64_t *index) {
  moe_permutation_ state = {layout, parts, K, index};
  return moe_op_prepared_(&moe_permutation_op_, &state, ctx);
}

#endif
