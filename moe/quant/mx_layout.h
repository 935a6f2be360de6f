/* moe_mx_layout_convert: every layout is read and written a group of 32 codes at a time. */
#ifndef MOE_QUANT_MX_LAYOUT_H
#define MOE_QUANT_MX_LAYOUT_H

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
  MOE_TRY(moe_check_enum_(ctx, name, (int)scales, MOE_MX_SCALES_TILED_128X4 + 1));
  if (scales == MOE_MX_SCALES_NKI_OVERSIZED) fits = moe_mx_is_nki_(layout);
  if (scales == MOE_MX_SCALES_NKI_PACKED) fits = moe_mx_is_kf_(layout);
  if (scales == MOE_MX_SCALES_TILED_128X4) fits = layout == MOE_MX_LAYOUT_PLAIN || layout == MOE_MX_LAYOUT_GPT_OSS;
  return fits ? MOE_OK : moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, name, "is not a placement of scales in that layout");
}

MOE_FN moe_status moe_mx_check_(moe_context *ctx, const moe_mx_layout_args *a) {
  if (!a) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "args", "is NULL");
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_enum_(ctx, "from", (int)a->from, MOE_MX_LAYOUT_GGML + 1));
  MOE_TRY(moe_check_enum_(ctx, "to", (int)a->to, MOE_MX_LAYOUT_GGML + 1));
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


MOE_FN moe_mx_side_ moe_mx_side_of_(const moe_mx_layout_args *a, int output) {
  moe_mx_side_ s = moe_mx_side_of_shape_(output ? a->to : a->from, a->element_bits, a->E, a->K, a->parts, a->columns);
  s.scales = output ? a->scales_to : a->scales_from;
  s.logical = a->logical_order && s.layout == MOE_MX_LAYOUT_PLAIN;
  s.codes = (uint8_t *)(output ? a->codes_out : (void *)(uintptr_t)a->codes_in);
  s.scale = output ? a->scales_out : (uint8_t *)(uintptr_t)a->scales_in;
  return s;
}

/* ------------------------------------------------------------------------------------------------------------ work */

typedef struct moe_mx_job_ {
  moe_mx_side_ in, out;
  int64_t blocks; /* of columns, per part */
} moe_mx_job_;

/* All groups of a block of columns: what lies in one byte, word or row is written by one item. */
MOE_FN void moe_mx_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_mx_job_ *job = (const moe_mx_job_ *)arg;
  const moe_mx_side_ *in = &job->in, *out = &job->out;
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

/* Padding becomes 0 before anything is written between it. */
MOE_FN void moe_mx_zero_(const moe_context *ctx, const moe_mx_side_ *out, const moe_mx_bytes_ *bytes) {
  moe_zero_job_ codes = {out->codes, moe_mx_codes_padded_(out) ? bytes->codes : 0};
  moe_zero_job_ scales = {out->scale, moe_mx_scales_padded_(out) ? bytes->scales : 0};
  const moe_work_ work[] = {{moe_ceil_div_(codes.bytes, MOE_MX_ZERO_CHUNK_), moe_zero_item_, &codes, NULL},
                            {moe_ceil_div_(scales.bytes, MOE_MX_ZERO_CHUNK_), moe_zero_item_, &scales, NULL}};
  moe_run_(ctx, work, 2);
}

MOE_FN moe_status moe_mx_check_given_(moe_context *ctx, const char *name, size_t given, int64_t need) {
  if (given == 0 || given >= (size_t)need) return MOE_OK;
  return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, name, "is smaller than moe_mx_layout_size says");
}

MOE_FN moe_status moe_mx_check_buffers_(moe_context *ctx, const moe_mx_layout_args *a, const moe_mx_side_ *in,
                                        const moe_mx_side_ *out, moe_mx_layout_bytes *bytes, int sizes_only) {
  const moe_mx_bytes_ from = moe_mx_size_(in), to = moe_mx_size_(out);
  const int64_t word = in->bits / 2;
  const int ggml_in = in->layout == MOE_MX_LAYOUT_GGML, ggml_out = out->layout == MOE_MX_LAYOUT_GGML;
  const moe_tensor_ tensor[] = {
      {"codes_in", in->codes, from.codes, moe_mx_is_nki_(in->layout) ? word : 1, MOE_INPUT},
      {"scales_in", ggml_in ? NULL : in->scale, from.scales, 1, ggml_in ? MOE_INPUT_OPTIONAL : MOE_INPUT},
      {"codes_out", out->codes, to.codes, moe_mx_is_nki_(out->layout) ? word : 1, MOE_OUTPUT},
      {"scales_out", ggml_out ? NULL : out->scale, to.scales, 1, ggml_out ? MOE_OUTPUT_OPTIONAL : MOE_OUTPUT},
  };
  MOE_TRY(moe_check_tensors_(ctx, tensor, 4, sizes_only));
  const moe_mx_layout_bytes need = {(size_t)from.codes, (size_t)from.scales, (size_t)to.codes, (size_t)to.scales};
  if (bytes) *bytes = need;
  if (sizes_only) return MOE_OK;
  MOE_TRY(moe_mx_check_given_(ctx, "bytes.codes_in", a->bytes.codes_in, from.codes));
  MOE_TRY(moe_mx_check_given_(ctx, "bytes.scales_in", a->bytes.scales_in, from.scales));
  MOE_TRY(moe_mx_check_given_(ctx, "bytes.codes_out", a->bytes.codes_out, to.codes));
  return moe_mx_check_given_(ctx, "bytes.scales_out", a->bytes.scales_out, to.scales);
}

/* ------------------------------------------------------------------------------------------------------------- API */

moe_status moe_mx_layout_size(moe_context *ctx, const moe_mx_layout_args *args, moe_mx_layout_bytes *bytes) {
  MOE_TRY(moe_mx_check_(ctx, args));
  if (!bytes) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "bytes", "is NULL");
  const moe_mx_side_ in = moe_mx_side_of_(args, 0), out = moe_mx_side_of_(args, 1);
  MOE_TRY(moe_mx_check_buffers_(ctx, args, &in, &out, bytes, 1));
  return moe_succeed_(ctx);
}

moe_status moe_mx_layout_convert(moe_context *ctx, const moe_mx_layout_args *args) {
  MOE_TRY(moe_mx_check_(ctx, args));
  moe_mx_job_ job = {0};
  job.in = moe_mx_side_of_(args, 0);
  job.out = moe_mx_side_of_(args, 1);
  MOE_TRY(moe_mx_check_buffers_(ctx, args, &job.in, &job.out, NULL, 0));
  job.blocks = moe_ceil_div_(args->columns, MOE_MX_BLOCK_COLUMNS_);
  const moe_mx_bytes_ bytes = moe_mx_size_(&job.out);
  moe_mx_zero_(ctx, &job.out, &bytes);
  const moe_work_ work = {args->E * args->parts * job.blocks, moe_mx_item_, &job, NULL};
  moe_run_(ctx, &work, 1);
  return moe_succeed_(ctx);
}

moe_status moe_nki_x4_permutation(moe_context *ctx, moe_mx_layout layout, int32_t parts, int64_t K, int64_t *index) {
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_enum_(ctx, "layout", (int)layout, MOE_MX_LAYOUT_GGML + 1));
  if (parts != 1 && parts != 2) return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "parts", "must be 1 or 2");
  MOE_TRY(moe_check_positive_(ctx, "K", K));
  MOE_TRY(moe_mx_check_shape_(ctx, layout, 4, parts, K));
  const int64_t size = (int64_t)sizeof *index;
  const moe_tensor_ tensor[] = {{"index", index, moe_mul_(K, size), size, MOE_OUTPUT}};
  MOE_TRY(moe_check_tensors_(ctx, tensor, 1, 0));
  for (int64_t n = 0; n < K; n++) index[n] = moe_mx_element_(layout, parts, K, n);
  return moe_succeed_(ctx);
}

#endif
