/* Quantised activations: checks, sizes, and decoding. */
#ifndef MOE_QUANT_QUANTIZED_ACTIVATION_H
#define MOE_QUANT_QUANTIZED_ACTIVATION_H

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
  for (int64_t i = 0; i < n; i++) MOE_TRY(moe_check_finite_(ctx, name, (const float *)a->scales + i));
  return MOE_OK;
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
