/* The elementwise and level-1 kernels: rows converted, added, scaled, transposed; the gated unit. */
#ifndef MOE_VEC_TABLE_H
#define MOE_VEC_TABLE_H

/* The gated unit of a layer, its defaults resolved. */
typedef struct moe_glu_ {
  moe_activation activation;
  float alpha, up_offset;
  int skip_gate;
  uint32_t clamp;
  float gate_upper, gate_lower, up_upper, up_lower, activation_upper;
  float up_softcap;
} moe_glu_;

/* Rows of at most MOE_NR columns in the gated unit, with stride 64 floats. */
typedef struct moe_glu_rows_ {
  int64_t rows, n;
  float *gate, *up;                 /* forward: products in, clamped pre-activations out; backward: those in */
  const float *gate_bias, *up_bias; /* forward, or NULL */
  const float *pre_scale;           /* forward: multiplies a row's products, or NULL */
  const float *scale;               /* multiplies a row's m (backward: and its dm), or NULL */
  float *m;                         /* out: scale * m */
  const float *dm;                  /* backward in: gradient of m before scale */
  const float *act;                 /* backward in: activations to take instead of gate's, or NULL */
  float *dgate, *dup;               /* backward out; may be gate and up */
  float *dot;                       /* backward out: each row's <dm, m>, both before scale */
} moe_glu_rows_;

typedef struct moe_vec_table_ {
  moe_load_rows_fn_ load_rows[MOE_DTYPE_COUNT_];
  moe_store_rows_fn_ store_rows[MOE_DTYPE_COUNT_]; /* contract 5 */
  void (*glu_forward)(const moe_glu_ *glu, const moe_glu_rows_ *rows);
  void (*glu_backward)(const moe_glu_ *glu, const moe_glu_rows_ *rows); /* limits rounded to the checkpoint's type */
  void (*keep_inside)(float *x, float upper, float below, float lower, float above, int64_t rows, int64_t n);
  void (*activate)(const moe_glu_ *glu, const float *x, float *y, float *dy, int64_t n);
  void (*add_scaled)(float *sum, const float *x, float scale, int64_t n); /* sum += scale*x */
  /* For each row of x, in order: row to[i] of sum += scale[i] * (x + bias). Both have stride 64. bias NULL: 0; scale
     NULL: 1; to NULL: all rows add to one. */
  void (*add_rows)(float *sum, const int32_t *to, const float *x, const float *bias, const float *scale, int64_t rows,
                   int64_t n);
  /* Contract 4's sum over tokens: sum += scale[r]*x[r] for each row of x; `before` terms have been added already. low:
     what the sum lacks, 0 to begin with. scale NULL: 1. Strides are floats */
  void (*add_long)(float *sum, float *low, const float *x, int64_t stride, const float *scale, int64_t before,
                   int64_t rows, int64_t n);
  void (*scale_row)(float *x, float scale, int64_t n);
  void (*multiply_row)(float *x, const float *y, int64_t n);  /* x *= y */
  void (*copy_nt)(void *dst, const void *src, int64_t bytes); /* by non-temporal stores */
  /* 32-bit words: rows x cols, at most 64 x 64; strides in bytes */
  void (*transpose_words)(void *dst, int64_t dst_stride, const void *src, int64_t stride, int64_t rows, int64_t cols);
  float (*dot)(const float *a, const float *b, int64_t n); /* contract 4 */
} moe_vec_table_;

/* One row, of any length. */
MOE_FN void moe_load_row_(const moe_vec_table_ *vec, moe_dtype dtype, float *dst, const void *src, int64_t n) {
  const moe_rows_ row = {(const char *)src, 0, NULL};
  vec->load_rows[dtype](dst, 0, &row, 1, n);
}
MOE_FN void moe_store_row_(const moe_vec_table_ *vec, moe_dtype dtype, void *dst, const float *src, int64_t n) {
  vec->store_rows[dtype](dst, 0, NULL, src, 1, n);
}

#endif
