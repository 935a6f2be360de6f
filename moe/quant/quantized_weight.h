/* A quantised weight in place of a plain one: its shape and float scales. */
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

/* Whether the scales multiply product sums. */
MOE_FN int moe_weight_scaled_after_(const moe_quantized_weight *w) {
  return w && w->scaling != MOE_WEIGHT_MX && w->scaling != MOE_WEIGHT_BLOCK;
}

MOE_FN int64_t moe_quantized_blocks_(const moe_quantized_ *q, int64_t n) { return moe_ceil_div_(n, q->block); }

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
