/* The layouts of MX tensors: shapes, sizes and checks, and the operations moe_mx_layout_convert, moe_nki_x4_permutation
   and moe_nki_vector_convert. */
#ifndef MOE_QUANT_MX_LAYOUT_OP_H
#define MOE_QUANT_MX_LAYOUT_OP_H

/* ----------------------------------------------------------------------------------------------------------- shapes */

/* Layouts of the same order agree on which element a position is. */
MOE_FN int moe_mx_order_(moe_mx_layout layout, int64_t parts, int64_t K) {
  if (K <= MOE_MX_WORD_) return 0;
  switch (layout) {
    case MOE_MX_LAYOUT_NKI_STRIDED_X4: return parts == 2 && K != MOE_MX_TILE_ ? 2 : 1;
    case MOE_MX_LAYOUT_NKI_WRAPX: return K % MOE_MX_TILE_ == 384 ? 3 : 1;
    case MOE_MX_LAYOUT_NKI_WRAPX_WHOLE: return 1;
    default: return 0;
  }
}

/* Rows of so many bytes, one for each column, and one expert after the other. */
MOE_FN moe_mx_strides_ moe_mx_rows_of_(const moe_mx_tensor_ *s, int64_t row, int64_t group) {
  const int64_t plane = moe_mul_(s->columns, row);
  return (moe_mx_strides_){0, moe_mul_(s->parts, plane), plane, row, group, plane};
}

/* Where a layout puts codes and scales: PLAIN, and what is different in others. */
MOE_FN void moe_mx_set_strides_(moe_mx_tensor_ *s) {
  s->code = moe_mx_rows_of_(s, moe_element_bytes_(s->K, s->bits), MOE_MX_GROUP_ * s->bits / 8);
  s->own = moe_mx_rows_of_(s, s->groups, 1);
  switch (s->layout) {
    case MOE_MX_LAYOUT_GPT_OSS: /* rows of gate and up alternate */
      s->code.part = s->code.column, s->code.column = moe_mul_(s->parts, s->code.column);
      s->own.part = s->own.column, s->own.column = moe_mul_(s->parts, s->own.column);
      break;
    case MOE_MX_LAYOUT_GGML: /* a scale byte before its codes */
      s->own = moe_mx_rows_of_(s, moe_mul_(s->groups, MOE_GGML_BLOCK_), MOE_GGML_BLOCK_);
      s->own.expert = s->own.plane, s->own.part = moe_mul_(s->E, s->own.plane);
      s->code = s->own, s->code.first = 1;
      s->split = s->scales_within = 1;
      break;
    default: break;
  }
}

MOE_FN moe_mx_tensor_ moe_mx_tensor_of_shape_(moe_mx_layout layout, int bits, int64_t E, int64_t K, int64_t parts,
                                              int64_t columns) {
  moe_mx_tensor_ s = {0};
  s.layout = layout, s.bits = bits;
  s.E = E, s.K = K, s.parts = parts, s.columns = columns;
  s.groups = moe_ceil_div_(K, MOE_MX_GROUP_);
  s.tiles = moe_ceil_div_(K, MOE_MX_TILE_);
  s.partitions = moe_nki_partitions_(K);
  moe_mx_set_strides_(&s);
  return s;
}

MOE_FN moe_mx_bytes_ moe_mx_size_(const moe_mx_tensor_ *s) {
  moe_mx_bytes_ bytes;
  const int64_t rows = moe_mul_(s->E, moe_mx_rows_(s));
  if (moe_mx_is_nki_(s->layout)) {
    const int64_t tiles = moe_mx_is_x4_(s->layout) ? s->tiles : 1;
    const int64_t words = moe_mx_is_x4_(s->layout) ? s->partitions : s->K / MOE_MX_WORD_;
    bytes.codes = moe_mul4_(rows, words, tiles, s->bits / 2);
    bytes.scales = moe_mul3_(rows, moe_nki_scale_rows_(s), tiles);
  } else {
    bytes.codes = moe_mul3_(s->E, s->parts, s->code.plane);
    bytes.scales = s->scales_within ? 0 : moe_mul3_(s->E, s->parts, s->own.plane);
  }
  if (s->scales == MOE_MX_SCALES_TILED_128X4)
    bytes.scales = moe_mul4_(s->E, moe_ceil_div_(moe_max_(0, moe_mx_rows_(s)), 128), moe_ceil_div_(s->groups, 4), 512);
  return bytes;
}

/* Whether the layout has bytes, or nibbles, that belong to no element. */
MOE_FN int moe_mx_codes_padded_(const moe_mx_tensor_ *s) {
  return (moe_mx_is_x4_(s->layout) && s->K > MOE_MX_TILE_ && s->K % MOE_MX_TILE_ != 0) || (s->logical && s->bits == 4);
}

MOE_FN int moe_mx_scales_padded_(const moe_mx_tensor_ *s) {
  return s->scales != MOE_MX_SCALES_OWN || (moe_mx_is_x4_(s->layout) && moe_mx_codes_padded_(s));
}

/* ----------------------------------------------------------------------------------------------------------- checks */

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

/* -------------------------------------------------------------------------------------------- moe_mx_layout_convert */

MOE_FN moe_mx_tensor_ moe_mx_tensor_of_(const moe_mx_layout_args *a, int output) {
  moe_mx_tensor_ s =
      moe_mx_tensor_of_shape_(output ? a->to : a->from, a->element_bits, a->E, a->K, a->parts, a->columns);
  s.scales = output ? a->scales_to : a->scales_from;
  s.logical = a->logical_order && s.layout == MOE_MX_LAYOUT_PLAIN;
  s.codes = (uint8_t *)(output ? a->codes_out : (void *)(uintptr_t)a->codes_in);
  s.scale = output ? a->scales_out : (uint8_t *)(uintptr_t)a->scales_in;
  return s;
}

/* Padding is cleared before codes and scales are written between it. */
MOE_FN void moe_mx_zero_(const moe_context *ctx, const moe_mx_tensor_ *out, const moe_mx_bytes_ *bytes) {
  moe_zero_job_ codes = {out->codes, moe_mx_codes_padded_(out) ? bytes->codes : 0};
  moe_zero_job_ scales = {out->scale, moe_mx_scales_padded_(out) ? bytes->scales : 0};
  const moe_work_ work[] = {{moe_ceil_div_(codes.bytes, MOE_MX_ZERO_CHUNK_), moe_zero_item_, &codes, NULL},
                            {moe_ceil_div_(scales.bytes, MOE_MX_ZERO_CHUNK_), moe_zero_item_, &scales, NULL}};
  moe_run_(ctx, work, 2);
}

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

/* ------------------------------------------------------------------------------------------- moe_nki_x4_permutation */

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

static const moe_op_ moe_permutation_op_ = {moe_permutation_check_, NULL, moe_permutation_run_, NULL, NULL};
moe_status moe_nki_x4_permutation(moe_context *ctx, moe_mx_layout layout, int32_t parts, int64_t K, int64_t *index) {
  moe_permutation_ state = {layout, parts, K, index};
  return moe_op_prepared_(&moe_permutation_op_, &state, ctx);
}

/* ------------------------------------------------------------------------------------------- moe_nki_vector_convert */

MOE_FN moe_status moe_nki_vector_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_nki_vector_job_ *job = (moe_nki_vector_job_ *)state;
  const moe_nki_vector_args *a = job->args = (const moe_nki_vector_args *)call->args;
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_enum_(ctx, "kind", (int)a->kind, MOE_NKI_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "dtype", (int)a->dtype, MOE_DTYPE_COUNT_));
  if (a->dtype == MOE_DTYPE_DEFAULT) return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "dtype", "must be given");
  MOE_TRY(moe_check_flag_(ctx, "to_nki", a->to_nki));
  MOE_TRY(moe_check_positive_(ctx, "E", a->E));
  MOE_TRY(moe_check_positive_(ctx, "length", a->length));
  if (a->kind == MOE_NKI_GATE_UP_BIAS && a->length % MOE_MX_WORD_ != 0)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "length", "must be a multiple of 4 for a bias");
  if (a->kind == MOE_NKI_DOWN_SCALE && a->length % 128 != 0)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "length", "must be a multiple of 128 for a scale");
  job->size = moe_dtype_bytes_(a->dtype);
  job->tiles = moe_ceil_div_(a->length, MOE_MX_TILE_);
  const int64_t plain = moe_mul_(moe_nki_vector_plain_(a), job->size);
  const int64_t device = moe_mul_(moe_nki_vector_device_(a), job->size);
  const moe_tensor_ own[] = {{"in", a->in, a->to_nki ? plain : device, job->size, MOE_INPUT},
                             {"out", a->out, a->to_nki ? device : plain, job->size, MOE_OUTPUT}};
  return MOE_LIST_(tensors, own);
}

MOE_FN moe_status moe_nki_vector_answer_(moe_context *ctx, const moe_tensors_ *tensors, void *answer) {
  size_t *const *bytes = (size_t *const *)answer; /* in, out */
  if (!bytes[0]) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "bytes_in", "is NULL");
  if (!bytes[1]) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "bytes_out", "is NULL");
  for (int i = 0; i < 2; i++) *bytes[i] = (size_t)tensors->tensor[i].bytes;
  return MOE_OK;
}

MOE_FN moe_status moe_nki_vector_run_(moe_context *ctx, void *state) {
  return moe_run_items_(ctx, ((const moe_nki_vector_job_ *)state)->args->E, moe_nki_vector_item_, state);
}

static const moe_op_ moe_nki_vector_op_ = {moe_nki_vector_check_, NULL, moe_nki_vector_run_, NULL,
                                           moe_nki_vector_answer_};
MOE_OP_(moe_nki_vector_convert, moe_nki_vector_args, moe_nki_vector_op_, moe_nki_vector_job_,
        .dtype = MOE_DTYPE_DEFAULT)
moe_status moe_nki_vector_size(moe_context *ctx, const moe_nki_vector_args *args, size_t *bytes_in, size_t *bytes_out) {
  size_t *bytes[] = {bytes_in, bytes_out};
  MOE_OP_BODY_(moe_nki_vector_op_, moe_nki_vector_job_, .args = args, .query = 1, .answer = bytes)
}

#endif
