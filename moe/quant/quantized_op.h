/* Quantised weights and activations as arguments of operations: checked, listed, and activations decoded. */
#ifndef MOE_QUANT_QUANTIZED_OP_H
#define MOE_QUANT_QUANTIZED_OP_H

/* ---------------------------------------------------------------------------------------------------------- weights */

/* The values of magnitudes: they are bf16's. */
MOE_FN void moe_quantized_values_(moe_quantized_ *q) {
  const moe_kernels *kernels = moe_kernels_();
  float value[MOE_BYTE_VALUES_];
  uint8_t code[MOE_BYTE_VALUES_];
  for (int i = 0; i < MOE_BYTE_VALUES_; i++) code[i] = (uint8_t)i;
  kernels->quant->load_codes[1](value, code, MOE_BYTE_VALUES_, &q->format);
  kernels->vec->store_rows[MOE_DTYPE_BF16](q->value, 0, NULL, value, 1, MOE_BYTE_VALUES_);
}

/* `parts`: 2 for gate and up, of which only the second is used with skip_gate. by_columns: the plain tensor is
   [E,columns,K]. The weight must have been checked. */
MOE_FN void moe_quantized_init_(moe_quantized_ *q, const moe_quantized_weight *w, moe_dtype dtype, int64_t E, int64_t K,
                                int parts, int64_t columns, int skip_gate, int by_columns) {
  memset(q, 0, sizeof *q);
  if (!w) return;
  q->weight = w;
  q->format = moe_element_format_of_(w->element);
  q->tensor =
      moe_mx_tensor_of_shape_(moe_is_mx_(w) ? w->layout : MOE_MX_LAYOUT_PLAIN, q->format.bits, E, K, parts, columns);
  q->tensor.scales = w->scales_layout;
  q->tensor.codes = (uint8_t *)(uintptr_t)w->codes;
  q->tensor.scale = (uint8_t *)(uintptr_t)w->scales;
  q->words = moe_is_mx_(w) && !q->format.packed;
  q->blocked = moe_is_mx_(w) || moe_is_group_(w) || w->scaling == MOE_WEIGHT_BLOCK;
  q->block_k = moe_weight_block_k_(w), q->block_n = moe_weight_block_n_(w);
  q->repeat = w->scaling == MOE_WEIGHT_BLOCK && w->repeat ? w->repeat : 1;
  q->scales_type = q->blocked && !moe_is_mx_(w) ? w->scales_type : MOE_SCALES_F32;
  q->part = skip_gate;
  q->by_columns = by_columns || moe_is_mx_(w) || moe_is_group_(w) || w->out_in;
  q->type = dtype;
  if (q->format.bits == 8 && !q->format.packed) moe_quantized_values_(q);
}

MOE_FN moe_mx_bytes_ moe_quantized_bytes_(const moe_quantized_ *q) {
  const moe_mx_tensor_ *s = &q->tensor;
  const int64_t rows = moe_mx_rows_(s);
  moe_mx_bytes_ bytes = {moe_mul3_(s->E, rows, q->by_columns ? s->code.column : s->K), 0};
  switch (q->weight->scaling) {
    case MOE_WEIGHT_COUNT_:
    case MOE_WEIGHT_MX: return moe_mx_size_(s);
    case MOE_WEIGHT_STATIC: bytes.scales = s->parts; break;
    case MOE_WEIGHT_COLUMN: bytes.scales = rows; break;
    case MOE_WEIGHT_GROUP:
    case MOE_WEIGHT_BLOCK:
      bytes.scales = moe_mul_(moe_mul4_(s->E, moe_quantized_down_(q), s->parts, moe_quantized_across_(q)), q->repeat);
      break;
    case MOE_WEIGHT_STATIC_PER_EXPERT: bytes.scales = moe_mul_(s->E, s->parts); break;
    case MOE_WEIGHT_COLUMN_PER_EXPERT: bytes.scales = moe_mul_(s->E, rows); break;
  }
  bytes.scales = moe_mul_(bytes.scales, moe_scales_bytes_(q->scales_type));
  return bytes;
}

/* What is not MX. */
MOE_FN moe_status moe_quantized_check_blocks_(moe_context *ctx, const moe_quantized_weight *w) {
  const int group = moe_is_group_(w), block = w->scaling == MOE_WEIGHT_BLOCK;
  if (group) MOE_TRY(moe_check_positive_(ctx, "block", w->block));
  if (!group && moe_element_format_of_(w->element).bits != 8)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "element", "must have 8 bits under float scales");
  if (w->block < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "block", "is negative");
  if (w->repeat < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "repeat", "is negative");
  if (!group) MOE_TRY(moe_check_flag_(ctx, "out_in", w->out_in));
  if (!group && !block) return MOE_OK;
  MOE_TRY(moe_check_enum_(ctx, "scales_type", (int)w->scales_type, MOE_SCALES_COUNT_));
  if (w->first_k < 0 || w->first_k >= moe_weight_block_k_(w))
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "first_k", "is not within a block");
  if (block && w->block_columns < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "block_columns", "is negative");
  if (block && (w->first_column < 0 || w->first_column >= moe_weight_block_n_(w)))
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "first_column", "is not within a block");
  return MOE_OK;
}

MOE_FN moe_status moe_quantized_check_(moe_context *ctx, const moe_quantized_weight *w, int parts, int64_t K) {
  if (!w) return MOE_OK;
  MOE_TRY(moe_check_enum_(ctx, "scaling", (int)w->scaling, MOE_WEIGHT_COUNT_));
  if (moe_is_mx_(w)) MOE_TRY(moe_check_mx_element_(ctx, "element", w->element));
  else if (moe_is_group_(w)) MOE_TRY(moe_check_group_element_(ctx, "element", w->element));
  else MOE_TRY(moe_check_enum_(ctx, "element", (int)w->element, MOE_ELEMENT_COUNT_));
  if (w->global_scale && !moe_is_group_(w))
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "global_scale", "is for GROUP only");
  if (w->zero_points && !(moe_is_group_(w) && w->element == MOE_ELEMENT_UINT4))
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "zero_points", "are for UINT4 and GROUP only");
  if (!moe_is_mx_(w)) return moe_quantized_check_blocks_(ctx, w);
  const moe_element_format_ format = moe_element_format_of_(w->element);
  if (format.packed && w->layout != MOE_MX_LAYOUT_PLAIN)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "layout", "must be PLAIN for this element");
  MOE_TRY(moe_check_enum_(ctx, "layout", (int)w->layout, MOE_MX_LAYOUT_COUNT_));
  MOE_TRY(moe_mx_check_scales_(ctx, "scales_layout", w->layout, w->scales_layout));
  return moe_mx_check_shape_(ctx, w->layout, format.bits, parts, K);
}

/* Lists a weight's tensors, under names that begin with a literal, among a function's. */
#define MOE_QUANTIZED_LIST_(q, name, tensors) \
  moe_quantized_list_(q, name "->codes", name "->scales", name "->global_scale", name "->zero_points", tensors)
MOE_FN void moe_quantized_list_(const moe_quantized_ *q, const char *codes, const char *scales, const char *global,
                                const char *zeros, moe_tensors_ *tensors) {
  if (!q->weight) return;
  const moe_quantized_weight *w = q->weight;
  const moe_mx_bytes_ bytes = moe_quantized_bytes_(q);
  const int mx = moe_is_mx_(w), within = q->tensor.scales_within;
  const int64_t each = mx ? 1 : moe_scales_bytes_(q->scales_type);
  const moe_tensor_ own[] = {
      {codes, w->codes, bytes.codes, mx && moe_mx_is_nki_(w->layout) ? q->tensor.bits / 2 : 1, MOE_INPUT},
      {scales, within ? NULL : w->scales, bytes.scales, each, within ? MOE_INPUT_OPTIONAL : MOE_INPUT},
      {global, w->global_scale, moe_mul3_(q->tensor.E, q->tensor.parts, 4), 4, MOE_INPUT_OPTIONAL},
      {zeros, w->zero_points, bytes.scales / each, 1, MOE_INPUT_OPTIONAL}};
  MOE_LIST_(tensors, own);
}

/* That scales are finite. Bytes may be NaN. */
#define MOE_QUANTIZED_CHECK_SCALES_(ctx, q, name) \
  moe_quantized_check_scales_(ctx, q, name "->scales", name "->global_scale")
MOE_FN moe_status moe_quantized_check_scales_(moe_context *ctx, const moe_quantized_ *q, const char *scales,
                                              const char *global) {
  if (!q->weight || moe_is_mx_(q->weight)) return MOE_OK;
  const int64_t each = moe_scales_bytes_(q->scales_type), n = moe_quantized_bytes_(q).scales / each;
  if (each > 1) MOE_TRY(moe_check_scales_(ctx, scales, q->scales_type, q->weight->scales, n, q->repeat));
  if (!q->weight->global_scale) return MOE_OK;
  return moe_check_float_scales_(ctx, global, q->weight->global_scale, q->tensor.E * q->tensor.parts, 1);
}

/* ------------------------------------------------------------------------------------------------------ activations */

MOE_FN moe_status moe_quantized_activation_check_(moe_context *ctx, const char *name,
                                                  const moe_quantized_activation *a) {
  if (!a) return MOE_OK;
  MOE_TRY(moe_check_flag_(ctx, name, a->float_scales));
  if (!a->float_scales) return moe_check_mx_element_(ctx, name, a->element);
  MOE_TRY(moe_check_enum_(ctx, name, (int)a->element, MOE_ELEMENT_COUNT_));
  if (moe_element_format_of_(a->element).bits != 8)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, name, "must have elements of 8 bits under float scales");
  if (a->block_rows < 0 || a->block_columns < 0)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, name, "has blocks of a negative size");
  return MOE_OK;
}

/* How many scales [rows,columns] have. */
MOE_FN int64_t moe_quantized_activation_scales_(const moe_quantized_activation *a, int64_t rows, int64_t columns) {
  if (rows == 0) return 0;
  if (!a->float_scales) return moe_mul_(rows, moe_ceil_div_(columns, MOE_MX_GROUP_));
  return moe_mul_(a->block_rows ? moe_ceil_div_(rows, a->block_rows) : 1,
                  a->block_columns ? moe_ceil_div_(columns, a->block_columns) : 1);
}

/* Lists its codes and scales, of [rows,columns], among a function's tensors. */
MOE_FN void moe_quantized_activation_list_(const moe_quantized_activation *a, int64_t rows, int64_t columns,
                                           const char *codes, const char *scales, moe_tensors_ *tensors) {
  if (!a) return;
  const int64_t size = a->float_scales ? 4 : 1;
  const int64_t code_bytes = moe_mul_(rows, moe_element_bytes_(columns, moe_element_format_of_(a->element).bits));
  const int64_t scale_bytes = moe_mul_(moe_quantized_activation_scales_(a, rows, columns), size);
  const moe_tensor_ own[] = {{codes, a->codes, code_bytes, 1, MOE_INPUT},
                             {scales, a->scales, scale_bytes, size, MOE_INPUT}};
  MOE_LIST_(tensors, own);
}

/* That float scales are finite. E8M0 bytes may be NaN. */
MOE_FN moe_status moe_quantized_activation_check_scales_(moe_context *ctx, const moe_quantized_activation *a,
                                                         int64_t rows, int64_t columns, const char *name) {
  const int64_t n = a && a->float_scales ? moe_quantized_activation_scales_(a, rows, columns) : 0;
  return n > 0 ? moe_check_float_scales_(ctx, name, a->scales, n, 1) : MOE_OK;
}

/* Decodes to `to`; everything has been checked. */
MOE_FN void moe_quantized_activation_decode_(moe_context *ctx, const moe_quantized_activation *a, moe_dtype dtype,
                                             int64_t rows, int64_t columns, void *to) {
  if (a->float_scales) {
    moe_dequantize_scaled_args args = {0};
    args.element = a->element, args.dtype = dtype, args.rows = rows, args.columns = columns;
    args.block_rows = a->block_rows, args.block_columns = a->block_columns;
    args.codes = a->codes, args.scales = (const float *)a->scales, args.plain = to;
    (void)moe_dequantize_scaled(ctx, &args);
  } else {
    moe_dequantize_mx_args args = {0};
    args.element = a->element, args.dtype = dtype, args.rows = rows, args.columns = columns;
    args.codes = a->codes, args.scales = (const uint8_t *)a->scales, args.plain = to;
    (void)moe_dequantize_mx(ctx, &args);
  }
}

#endif
