/* A quantised weight in place of a plain one: its shape and scales. */
#ifndef MOE_QUANT_QUANTIZED_WEIGHT_H
#define MOE_QUANT_QUANTIZED_WEIGHT_H

typedef struct moe_quantized_ {
  const moe_quantized_weight *weight; /* or NULL */
  moe_mx_tensor_ tensor;              /* shapes; and where data is, if MX */
  moe_element_format_ format;
  int words;   /* kernels take codes with their scale bytes: MX, but for elements that they do not take */
  int blocked; /* scales are of blocks of block_k times block_n elements */
  int64_t block_k, block_n, repeat;
  moe_scales_type scales_type;
  int64_t part;   /* the first that is used: 1 with skip_gate */
  int by_columns; /* a column's codes are contiguous: MX, GROUP; under float scales out_in, grouped GEMM's [E,N,K] */
  moe_dtype type; /* what code*scale is rounded to */
  moe_bf16 value[MOE_BYTE_VALUES_]; /* of magnitudes of 8 bits */
} moe_quantized_;

MOE_FN int moe_is_mx_(const moe_quantized_weight *w) { return w && w->scaling == MOE_WEIGHT_MX; }
MOE_FN int moe_is_group_(const moe_quantized_weight *w) { return w && w->scaling == MOE_WEIGHT_GROUP; }

/* Rows and columns of its blocks. MX's groups are blocks where its kernels do not take the element. */
MOE_FN int64_t moe_weight_block_k_(const moe_quantized_weight *w) {
  return moe_is_mx_(w) ? MOE_MX_GROUP_ : w->block ? w->block : 256;
}
MOE_FN int64_t moe_weight_block_n_(const moe_quantized_weight *w) {
  if (w->scaling != MOE_WEIGHT_BLOCK) return 1;
  return w->block_columns ? w->block_columns : moe_weight_block_k_(w);
}

/* Whether the scales multiply product sums. */
MOE_FN int moe_weight_scaled_after_(const moe_quantized_weight *w) {
  return w && w->scaling != MOE_WEIGHT_MX && w->scaling != MOE_WEIGHT_BLOCK && w->scaling != MOE_WEIGHT_GROUP;
}

/* How many blocks there are along K, and along the columns. The first may have begun before the weight does. */
MOE_FN int64_t moe_quantized_down_(const moe_quantized_ *q) {
  return moe_ceil_div_(moe_add_(q->tensor.K, q->weight->first_k), q->block_k);
}
MOE_FN int64_t moe_quantized_across_(const moe_quantized_ *q) {
  return moe_ceil_div_(moe_add_(q->tensor.columns, q->block_n > 1 ? q->weight->first_column : 0), q->block_n);
}

/* Which scale, and zero point, an element has; the next columns' follow if each column has one. Not for MX. */
MOE_FN int64_t moe_quantized_scale_index_(const moe_quantized_ *q, int64_t expert, int64_t part, int64_t column,
                                          int64_t k) {
  const moe_mx_tensor_ *s = &q->tensor;
  switch (q->weight->scaling) {
    case MOE_WEIGHT_STATIC: return part;
    case MOE_WEIGHT_COLUMN: return part * s->columns + column;
    case MOE_WEIGHT_STATIC_PER_EXPERT: return expert * s->parts + part;
    case MOE_WEIGHT_COLUMN_PER_EXPERT: return (expert * s->parts + part) * s->columns + column;
    default: break;
  }
  const int64_t down = moe_quantized_down_(q), across = moe_quantized_across_(q);
  const int64_t row = (q->weight->first_k + k) / q->block_k;
  if (q->block_n > 1) column = (q->weight->first_column + column) / q->block_n;
  if (q->by_columns) return (((expert * s->parts + part) * across + column) * down + row) * q->repeat;
  return (((expert * down + row) * s->parts + part) * across + column) * q->repeat;
}

/* The scale of an element, neither of MX nor of a group. */
MOE_FN float moe_quantized_scale_(const moe_quantized_ *q, const moe_kernels *kernels, int64_t expert, int64_t part,
                                  int64_t column, int64_t k) {
  return moe_scale_at_(kernels, q->scales_type, q->weight->scales,
                       moe_quantized_scale_index_(q, expert, part, column, k));
}

/* n product sums times the scales of their columns, where these are applied to sums. */
MOE_FN void moe_quantized_scale_sums_(const moe_quantized_ *q, const moe_kernels *kernels, int64_t expert, int64_t part,
                                      int64_t column, int64_t n, float *c) {
  if (!moe_weight_scaled_after_(q->weight)) return;
  const float *scale = (const float *)q->weight->scales + moe_quantized_scale_index_(q, expert, part, column, 0);
  if (q->weight->scaling == MOE_WEIGHT_COLUMN || q->weight->scaling == MOE_WEIGHT_COLUMN_PER_EXPERT)
    kernels->vec->multiply_row(c, scale, n);
  else kernels->vec->scale_row(c, *scale, n);
}

#endif
