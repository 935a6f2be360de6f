/* A quantised weight in place of a plain one: its shape, checks, and float scales. */
#ifndef MOE_QUANT_QUANTIZED_WEIGHT_H
#define MOE_QUANT_QUANTIZED_WEIGHT_H

typedef struct moe_quantized_ {
  const moe_quantized_weight *weight; /* or NULL */
  moe_mx_tensor_ tensor;              /* shapes; and where data is, if MX */
  moe_element_format_ format;
  int64_t block, repeat;
  int64_t part;   /* the first that is used: 1 with skip_gate */
  int by_columns; /* a column's codes are contiguous: MX, and float scales of grouped GEMM's [E,N,K] */
  moe_dtype type; /* what code*float scale is rounded to */
} moe_quantized_;

MOE_FN int moe_is_mx_(const moe_quantized_weight *w) { return w && w->scaling == MOE_WEIGHT_MX; }

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

/* ---------------------------------------------------------------------------------------------------------- checks */

/* Whether the scales multiply product sums. */
MOE_FN int moe_weight_scaled_after_(const moe_quantized_weight *w) {
  return w && w->scaling != MOE_WEIGHT_MX && w->scaling != MOE_WEIGHT_BLOCK;
}

MOE_FN int64_t moe_quantized_blocks_(const moe_quantized_ *q, int64_t n) { return moe_ceil_div_(n, q->block); }

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
  const float *scale = (const float *)q->weight->scales;
  const int64_t step = q->weight->scaling == MOE_WEIGHT_BLOCK ? q->repeat : 1;
  for (int64_t i = 0, n = moe_quantized_bytes_(q).scales / 4; i < n; i += step)
    MOE_TRY(moe_check_finite_(ctx, name, scale + i));
  return MOE_OK;
}

/* ----------------------------------------------------------------------------------------------------- float scales */

/* Where the scale of an element is; the next columns' scales follow if each column has one. Not for MX. */
MOE_FN const float *moe_quantized_scale_(const moe_quantized_ *q, int64_t expert, int64_t part, int64_t column,
                                         int64_t k) {
  const moe_mx_tensor_ *s = &q->tensor;
  const float *scale = (const float *)q->weight->scales;
  const int64_t across = moe_quantized_blocks_(q, s->columns);
  switch (q->weight->scaling) {
    case MOE_WEIGHT_COUNT_:
    case MOE_WEIGHT_MX: break;
    case MOE_WEIGHT_STATIC: return scale + part;
    case MOE_WEIGHT_COLUMN: return scale + part * s->columns + column;
    case MOE_WEIGHT_STATIC_PER_EXPERT: return scale + expert * s->parts + part;
    case MOE_WEIGHT_COLUMN_PER_EXPERT: return scale + (expert * s->parts + part) * s->columns + column;
    case MOE_WEIGHT_BLOCK: break;
  }
  const int64_t down = moe_quantized_blocks_(q, s->K), row = expert * down + k / q->block;
  if (q->by_columns) return scale + ((expert * across + column / q->block) * down + k / q->block) * q->repeat;
  return scale + ((row * s->parts + part) * across + column / q->block) * q->repeat;
}

/* n product sums times the scales of their columns, where these are applied to sums. */
MOE_FN void moe_quantized_scale_sums_(const moe_quantized_ *q, const moe_kernels *kernels, int64_t expert, int64_t part,
                                      int64_t column, int64_t n, float *c) {
  if (!moe_weight_scaled_after_(q->weight)) return;
  const float *scale = moe_quantized_scale_(q, expert, part, column, 0);
  if (q->weight->scaling == MOE_WEIGHT_COLUMN || q->weight->scaling == MOE_WEIGHT_COLUMN_PER_EXPERT)
    kernels->vec->multiply_row(c, scale, n);
  else kernels->vec->scale_row(c, *scale, n);
}

#endif
