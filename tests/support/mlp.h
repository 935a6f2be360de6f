/* mlp.h: cases of the MXFP8 MLP, and the MLP written out from its definition in moe/api/mlp.h: operands rounded by
   moe_quantize_mx and moe_dequantize_mx in the order of mx_oracle.h, one chain of fmaf per product, which a sum in double
   confirms within the bound of such a chain. All memory of a case is guarded, inputs are write-protected. */
#ifndef MOE_TEST_MLP_H
#define MOE_TEST_MLP_H

#include <math.h>
#include <stdio.h>

#include "dtype.h"
#include "guard.h"
#include "mx_oracle.h"
#include "pool.h"
#include "random.h"

enum { MLP_MEMORY_MAX = 256 };
struct mlp_memory {
  struct guarded guarded[MLP_MEMORY_MAX];
  int guarded_count;
  void *plain[1024];
  int plain_count;
};
static struct mlp_memory mlp_memory;

/* Until mlp_release: guarded, filled with `fill`; zeroed floats. */
static inline void *mlp_guarded(size_t bytes, int fill) {
  struct guarded *g = &mlp_memory.guarded[mlp_memory.guarded_count++];
  if (mlp_memory.guarded_count > MLP_MEMORY_MAX) abort();
  *g = guard_alloc(bytes, mlp_memory.guarded_count % 2 ? GUARD_AFTER : GUARD_BEFORE);
  if (!g->data) abort();
  memset(g->data, fill, bytes);
  return g->data;
}
static inline float *mlp_floats(int64_t n) {
  void *p = calloc((size_t)n + 1, sizeof(float));
  if (!p || mlp_memory.plain_count == 1024) abort();
  mlp_memory.plain[mlp_memory.plain_count++] = p;
  return (float *)p;
}
static inline void mlp_release(void) {
  while (mlp_memory.guarded_count > 0) guard_free(&mlp_memory.guarded[--mlp_memory.guarded_count]);
  while (mlp_memory.plain_count > 0) free(mlp_memory.plain[--mlp_memory.plain_count]);
}

static inline moe_bf16 *mlp_bf16(const float *x, int64_t n) {
  moe_bf16 *to = (moe_bf16 *)mlp_guarded((size_t)n * 2, 0);
  if (moe_bf16_from_f32(NULL, to, x, n) != MOE_OK) abort();
  return to;
}
static inline float mlp_as_bf16(float x) {
  moe_bf16 stored;
  if (moe_bf16_from_f32(NULL, &stored, &x, 1) != MOE_OK || moe_bf16_to_f32(NULL, &x, &stored, 1) != MOE_OK) abort();
  return x;
}

/* Uniform bf16 values in [-scale,scale); here and there a zero or a larger one. */
static inline float *mlp_values(uint64_t *rng, int64_t n, float scale) {
  float *x = mlp_floats(n);
  for (int64_t i = 0; i < n; i++) {
    x[i] = (float)((int64_t)(test_random(rng) >> 40) - (1 << 23)) * scale * 0x1p-23f;
    if (test_random_chance(rng, 50)) x[i] *= test_random_chance(rng, 2) ? 0.0f : 30.0f;
    x[i] = mlp_as_bf16(x[i]);
  }
  return x;
}

static inline float *mlp_transposed(const float *x, int64_t rows, int64_t columns) {
  float *y = mlp_floats(rows * columns);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++) y[j * rows + i] = x[i * columns + j];
  return y;
}

/* ---------------------------------------------------------------------------------------------------------- operands */

/* An operand [F,K]: what its values are, what products of it take, and how it is given. */
struct mlp_operand {
  int64_t F, K;
  float *values, *rounded;
  moe_mxfp8_operand given;
};

/* Codes and scales of x [F,K] by position. */
static inline mx_tensor mlp_quantize(const moe_mxfp8_format *f, moe_mx_layout layout, const float *x, int64_t F,
                                     int64_t K, int64_t *index) {
  const int64_t G = (K + 31) / 32;
  mx_tensor t = {1, K, 1, F, 8, (uint8_t *)mlp_floats(F * K / 4 + 1), (uint8_t *)mlp_floats(F * G / 4 + 1)};
  float *in_order = mlp_floats(F * K);
  mx_order(layout, 1, K, index);
  for (int64_t i = 0; i < F; i++)
    for (int64_t n = 0; n < K; n++) in_order[i * K + n] = x[i * K + index[n]];
  const moe_quantize_mx_args args = {.element = f->element,
                                     .scale_rule = f->use_scale_rule ? f->scale_rule : MOE_SCALE_NKI_ALT,
                                     .cast = MOE_CAST_SATURATE,
                                     .rows = F,
                                     .columns = K,
                                     .plain = in_order,
                                     .codes = t.code,
                                     .scales = t.scale};
  if (moe_quantize_mx(NULL, &args) != MOE_OK) abort();
  return t;
}

static inline float *mlp_rounded(const moe_mxfp8_format *f, moe_mx_layout layout, const float *x, int64_t F,
                                 int64_t K) {
  int64_t *index = (int64_t *)(void *)mlp_floats(2 * K);
  const mx_tensor t = mlp_quantize(f, layout, x, F, K, index);
  float *in_order = mlp_floats(F * K), *y = mlp_floats(F * K);
  const moe_dequantize_mx_args args = {
      .element = f->element, .rows = F, .columns = K, .codes = t.code, .scales = t.scale, .plain = in_order};
  if (moe_dequantize_mx(NULL, &args) != MOE_OK) abort();
  for (int64_t i = 0; i < F; i++)
    for (int64_t n = 0; n < K; n++) y[i * K + index[n]] = mlp_as_bf16(in_order[i * K + n]);
  return y;
}

enum { MLP_PLAIN, MLP_SWIZZLED, MLP_FP8_SWIZZLED, MLP_FP8, MLP_STATES };

static inline void mlp_give_bytes(moe_mxfp8_operand *given, mx_bytes codes, mx_bytes scales) {
  void *data = mlp_guarded(codes.count, 0), *bytes = mlp_guarded(scales.count, 0);
  memcpy(data, codes.data, codes.count);
  memcpy(bytes, scales.data, scales.count);
  given->data = data, given->scales = (const uint8_t *)bytes;
  free(codes.data), free(scales.data);
}

/* In one of the states; under PLAIN there are no swizzled ones. */
static inline struct mlp_operand mlp_operand(const moe_mxfp8_format *f, const float *x, int64_t F, int64_t K, int state,
                                             moe_mx_scales scales) {
  struct mlp_operand o = {F, K, mlp_floats(F * K), NULL, {NULL, NULL, 0, MOE_MX_SCALES_OWN}};
  if (f->layout == MOE_MX_LAYOUT_PLAIN && state == MLP_SWIZZLED) state = MLP_PLAIN;
  if (f->layout == MOE_MX_LAYOUT_PLAIN && state == MLP_FP8_SWIZZLED) state = MLP_FP8;
  const moe_mx_layout layout = state == MLP_FP8 ? MOE_MX_LAYOUT_PLAIN : f->layout;
  o.given.is_swizzled = state == MLP_SWIZZLED || state == MLP_FP8_SWIZZLED;
  int64_t *index = (int64_t *)(void *)mlp_floats(2 * K);
  memcpy(o.values, x, (size_t)(F * K) * sizeof *x);
  o.rounded = mlp_rounded(f, layout, x, F, K);
  if (state == MLP_PLAIN) {
    o.given.data = mlp_bf16(x, F * K);
  } else if (state == MLP_SWIZZLED) {
    float *y = mlp_floats(F * K);
    mx_order(layout, 1, K, index);
    for (int64_t i = 0; i < F; i++)
      for (int64_t n = 0; n < K; n++) y[(n / 4 * F + i) * 4 + n % 4] = x[i * K + index[n]];
    o.given.data = mlp_bf16(y, F * K);
  } else {
    const mx_tensor t = mlp_quantize(f, layout, x, F, K, index);
    if (!mx_placeable(layout, scales)) scales = MOE_MX_SCALES_OWN;
    o.given.scales_layout = scales;
    mlp_give_bytes(&o.given, mx_codes(&t, layout), mx_scales(&t, layout, scales));
    o.values = o.rounded;
  }
  return o;
}

/* ---------------------------------------------------------------------------------------------------------- products */

/* a [M,K] times b [N,K]^T. */
static inline float *mlp_product(const float *a, int64_t M, const float *b, int64_t N, int64_t K) {
  float *c = mlp_floats(M * N);
  for (int64_t i = 0; i < M; i++)
    for (int64_t j = 0; j < N; j++) {
      const float *x = a + i * K, *y = b + j * K;
      float sum = 0;
      double exact = 0, size = 0;
      for (int64_t k = 0; k < K; k += 2) {
        if (k + 1 < K) sum = fmaf(x[k + 1], y[k + 1], sum);
        sum = fmaf(x[k], y[k], sum);
      }
      for (int64_t k = 0; k < K; k++) {
        exact += (double)x[k] * (double)y[k];
        size += fabs((double)x[k] * (double)y[k]);
      }
      if (!(fabs((double)sum - exact) <= 1.01 * (double)K * 0x1p-24 * size + 0x1p-120)) abort();
      c[i * N + j] = sum;
    }
  return c;
}

static inline void mlp_to_bf16(float *x, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = mlp_as_bf16(x[i]);
}

/* Two matrices of rows next to each other. */
static inline float *mlp_joined(const float *a, const float *b, int64_t rows, int64_t columns) {
  float *c = mlp_floats(2 * rows * columns);
  for (int64_t i = 0; i < rows; i++) {
    memcpy(c + 2 * i * columns, a + i * columns, (size_t)columns * sizeof *c);
    memcpy(c + (2 * i + 1) * columns, b + i * columns, (size_t)columns * sizeof *c);
  }
  return c;
}

/* ------------------------------------------------------------------------------------------------------------ oracle */

struct mlp_oracle {
  float *gate_pre, *gate_act, *up, *hidden, *output; /* the first four: also inputs, if not NULL */
  float *d_gate, *d_up, *d_gate_up_T, *hidden_grad, *gate_up_grad, *down_grad;
};

static inline void mlp_limit(float *x, int64_t n, int upper_on, float upper, int lower_on, float lower) {
  for (int64_t i = 0; i < n; i++) {
    if (upper_on && upper < x[i]) x[i] = upper;
    if (lower_on && x[i] < lower) x[i] = lower;
  }
  mlp_to_bf16(x, n);
}

/* gate_pre and up, unless they are there already. */
static inline void mlp_oracle_products(const moe_mlp_mxfp8 *m, const struct mlp_operand *x,
                                       const struct mlp_operand *gate_up, struct mlp_oracle *o) {
  const moe_layer_config *c = &m->config;
  const int64_t n = m->S * m->I;
  if (!o->gate_pre) {
    o->gate_pre = mlp_product(x->rounded, m->S, gate_up->rounded, m->I, m->H);
    mlp_limit(o->gate_pre, n, c->clamp & MOE_CLAMP_GATE_UPPER, c->gate_clamp_upper_limit,
              c->clamp & MOE_CLAMP_GATE_LOWER, c->gate_clamp_lower_limit);
  }
  if (!o->up) {
    o->up = mlp_product(x->rounded, m->S, gate_up->rounded + m->I * m->H, m->I, m->H);
    mlp_limit(o->up, n, c->clamp & MOE_CLAMP_UP_UPPER, c->up_clamp_upper_limit, c->clamp & MOE_CLAMP_UP_LOWER,
              c->up_clamp_lower_limit);
  }
}

static inline void mlp_oracle_unit(const moe_mlp_mxfp8 *m, struct mlp_oracle *o) {
  const int64_t n = m->S * m->I;
  if (!o->gate_act) {
    o->gate_act = mlp_floats(n);
    if (moe_activation_f32(NULL, m->config.activation, m->config.alpha, o->gate_pre, o->gate_act, NULL, n) != MOE_OK)
      abort();
    if (!m->unrounded_gate_act) mlp_to_bf16(o->gate_act, n);
  }
  if (o->hidden) return;
  o->hidden = mlp_floats(n);
  for (int64_t i = 0; i < n; i++) {
    const float v = o->up[i] + m->config.up_offset;
    o->hidden[i] = mlp_as_bf16(o->gate_act[i] * v);
  }
}

static inline int mlp_within(float x, int upper_on, float upper, int lower_on, float lower) {
  return !(upper_on && !(x < mlp_as_bf16(upper))) && !(lower_on && !(mlp_as_bf16(lower) < x));
}

/* d_gate, d_up and their transpose from dm. */
static inline void mlp_oracle_grads(const moe_mlp_mxfp8 *m, const float *dm, struct mlp_oracle *o) {
  const moe_layer_config *c = &m->config;
  const int64_t n = m->S * m->I;
  float *slope = mlp_floats(n);
  o->d_gate = mlp_floats(n), o->d_up = mlp_floats(n);
  if (moe_activation_f32(NULL, c->activation, c->alpha, o->gate_pre, NULL, slope, n) != MOE_OK) abort();
  for (int64_t i = 0; i < n; i++) {
    const float v = o->up[i] + c->up_offset;
    volatile float dg = dm[i] * v;
    dg = dg * slope[i];
    const int in_gate = mlp_within(o->gate_pre[i], c->clamp & MOE_CLAMP_GATE_UPPER, c->gate_clamp_upper_limit,
                                   c->clamp & MOE_CLAMP_GATE_LOWER, c->gate_clamp_lower_limit);
    const int in_up = mlp_within(o->up[i], c->clamp & MOE_CLAMP_UP_UPPER, c->up_clamp_upper_limit,
                                 c->clamp & MOE_CLAMP_UP_LOWER, c->up_clamp_lower_limit);
    o->d_gate[i] = in_gate ? mlp_as_bf16(dg) : 0.0f;
    o->d_up[i] = in_up ? mlp_as_bf16(dm[i] * o->gate_act[i]) : 0.0f;
  }
  o->d_gate_up_T = mlp_transposed(mlp_joined(o->d_gate, o->d_up, m->S, m->I), m->S, 2 * m->I);
}

#endif /* MOE_TEST_MLP_H */
