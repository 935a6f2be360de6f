/* Quantised weights and activations as arguments of operations: checked, listed, and activations decoded. */
#ifndef MOE_QUANT_QUANTIZED_OP_H
#define MOE_QUANT_QUANTIZED_OP_H

/* ---------------------------------------------------------------------------------------------------------- weights */

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
  q->block = w->block ? w->block : 256;
  q->repeat = w->repeat ? w->repeat : 1;
  q->part = skip_gate;
  q->by_columns = by_columns || moe_is_mx_(w);
  q->type = dtype;
}

MOE_FN moe_mx_bytes_ moe_quantized_bytes_(const moe_quantized_ *q) {
  const moe_mx_tensor_ *s = &q->tensor;
  const int64_t rows = moe_mx_rows_(s);
  moe_mx_bytes_ bytes = {moe_mul3_(s->E, rows, s->K), 0};
  switch (q->weight->scaling) {
    case MOE_WEIGHT_COUNT_:
    case MOE_WEIGHT_MX: return moe_mx_size_(s);
    case MOE_WEIGHT_STATIC: bytes.scales = s->parts; break;
    case MOE_WEIGHT_COLUMN: bytes.scales = rows; break;
    case MOE_WEIGHT_BLOCK:
      bytes.scales = moe_mul_(
          moe_mul4_(s->E, moe_quantized_blocks_(q, s->K), s->parts, moe_quantized_blocks_(q, s->columns)), q->repeat);
      break;
    case MOE_WEIGHT_STATIC_PER_EXPERT: bytes.scales = moe_mul_(s->E, s->parts); break;
    case MOE_WEIGHT_COLUMN_PER_EXPERT: bytes.scales = moe_mul_(s->E, rows); break;
  }
  bytes.scales = moe_mul_(bytes.scales, 4);
  return bytes;
}

MOE_FN moe_status moe_quantized_check_(moe_context *ctx, const moe_quantized_weight *w, int parts, int64_t K) {
  if (!w) return MOE_OK;
  MOE_TRY(moe_check_enum_(ctx, "element", (int)w->element, MOE_ELEMENT_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "scaling", (int)w->scaling, MOE_WEIGHT_COUNT_));
  const int bits = moe_element_format_of_(w->element).bits;
  if (w->scaling != MOE_WEIGHT_MX) {
    if (bits != 8) return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "element", "must have 8 bits under float scales");
    if (w->block < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "block", "is negative");
    if (w->repeat < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "repeat", "is negative");
    return MOE_OK;
  }
  MOE_TRY(moe_check_enum_(ctx, "layout", (int)w->layout, MOE_MX_LAYOUT_COUNT_));
  MOE_TRY(moe_mx_check_scales_(ctx, "scales_layout", w->layout, w->scales_layout));
  return moe_mx_check_shape_(ctx, w->layout, bits, parts, K);
}

/* Lists a weight's codes and scales among a function's tensors. */
MOE_FN void moe_quantized_list_(const moe_quantized_ *q, const char *codes, const char *scales, moe_tensors_ *tensors) {
  if (!q->weight) return;
  const moe_quantized_weight *w = q->weight;
  const moe_mx_bytes_ bytes = moe_quantized_bytes_(q);
  const int mx = w->scaling == MOE_WEIGHT_MX, within = q->tensor.scales_within;
  const moe_tensor_ own[] = {
      {codes, w->codes, bytes.codes, mx && moe_mx_is_nki_(w->layout) ? q->tensor.bits / 2 : 1, MOE_INPUT},
      {scales, within ? NULL : w->scales, bytes.scales, mx ? 1 : 4, within ? MOE_INPUT_OPTIONAL : MOE_INPUT}};
  MOE_LIST_(tensors, own);
}

/* That float scales are finite. E8M0 bytes may be NaN. */
MOE_FN moe_status moe_quantized_check_scales_(moe_context *ctx, const moe_quantized_ *q, const char *name) {
  if (!q->weight || q->weight->scaling == MOE_WEIGHT_MX) return MOE_OK;
  const int64_t step = q->weight->scaling == MOE_WEIGHT_BLOCK ? q->repeat : 1;
  return moe_check_float_scales_(ctx, name, q->weight->scales, moe_quantized_bytes_(q).scales / 4, step);
}

/* ------------------------------------------------------------------------------------------------------ activations */

MOE_FN moe_status moe_quantized_activation_check_(moe_context *ctx, const char *name,
                                                  const moe_quantized_activation *a) {
  if (!a) return MOE_OK;
  MOE_TRY(moe_check_enum_(ctx, name, (int)a->element, MOE_ELEMENT_COUNT_));
  MOE_TRY(moe_check_flag_(ctx, name, a->float_scales));
  if (!a->float_scales) return MOE_OK;
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
