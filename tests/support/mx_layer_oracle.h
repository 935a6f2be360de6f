/* mx_layer_oracle.h: the blockwise layer with rounded operands by its definition in moe.h: operands rounded by the
   oracle, products of plain floats by moe_grouped_gemm_dw_*, everything else written out. Without clamping. */
#ifndef MOE_TEST_MX_LAYER_ORACLE_H
#define MOE_TEST_MX_LAYER_ORACLE_H

#include "fill.h"
#include "mx_quantize_oracle.h"
#include "problem.h"

/* ---------------------------------------------------------------------------------------------------------- memory */

static void *oracle_memory[4096];
static int oracle_taken;

/* Zeroed, until oracle_release. */
static inline void *oracle_take(int64_t n, size_t size) {
  void *memory = calloc((size_t)(n > 0 ? n : 1), size);
  if (memory == NULL || oracle_taken == 4096) abort();
  return oracle_memory[oracle_taken++] = memory;
}

static inline float *oracle_floats(int64_t n) { return (float *)oracle_take(n, sizeof(float)); }

static inline void oracle_release(void) {
  while (oracle_taken > 0) free(oracle_memory[--oracle_taken]);
}

static inline void *oracle_allocate(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static inline void oracle_free(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }

/* --------------------------------------------------------------------------------------------------------- tensors */

static inline test_tensor problem_typed(const struct problem *p, int id) {
  const struct problem_tensor *t = &p->tensor[id];
  const moe_dtype own = t->type == PROBLEM_DATA         ? p->o.dtype
                        : t->type == PROBLEM_AFFINITY   ? p->o.affinity_dtype
                        : t->type == PROBLEM_CHECKPOINT ? p->o.checkpoint_dtype
                                                        : p->o.weight_grad_dtype;
  const moe_dtype otherwise = t->type == PROBLEM_AFFINITY ? MOE_DTYPE_F32 : p->o.dtype;
  return (test_tensor){own ? own : otherwise, t->count, t->data};
}

static inline float *problem_floats(const struct problem *p, int id) {
  const test_tensor t = problem_typed(p, id);
  float *x = oracle_floats(t.count);
  for (int64_t i = 0; i < t.count; i++) x[i] = (float)test_tensor_get(&t, i);
  return x;
}

/* Contract 5: rounded once, NaN the canonical one. */
static inline void oracle_put(test_tensor *t, int64_t i, float x) {
  test_tensor_set(t, i, isnan(x) ? (double)float_of(0x7fc00000u) : (double)x);
}

static inline float oracle_as(moe_dtype dtype, float x) {
  return isnan(x) ? float_of(0x7fc00000u) : (float)test_dtype_round(dtype, (double)x);
}

/* -------------------------------------------------------------------------------------------------------- rounding */

/* x [outer,n,inner] rounded along n: position i of a line is its element index[i]. */
static inline void oracle_round(const moe_mx_rounding *r, moe_dtype dtype, float *x, int64_t outer, int64_t n,
                                int64_t inner, const int64_t *index) {
  const struct element *f = &elements[r->element];
  if (!r->enabled) return;
  for (int64_t line = 0; line < outer * inner; line++)
    for (int64_t g = 0; g < n; g += 32) {
      float group[32], *at[32];
      uint8_t codes[32], scale;
      const int64_t count = n - g < 32 ? n - g : 32;
      for (int64_t i = 0; i < count; i++) {
        const int64_t element = index ? index[g + i] : g + i;
        at[i] = x + (line / inner * n + element) * inner + line % inner;
        group[i] = *at[i];
      }
      mx_quantize_line(f, (int)r->scale_rule, r->cast, group, count, codes, &scale);
      for (int64_t i = 0; i < count; i++)
        *at[i] = oracle_as(dtype, float_of(mx_dequantized(f, scale, element_get(f, codes, i))));
    }
}

/* x [n] of an expert's rows under its scale: both multiplications are binary32's. */
static inline void oracle_round_scaled(const moe_mx_rounding *r, moe_dtype dtype, float *x, int64_t n, float scale) {
  const struct element *f = &elements[r->element];
  const float inverse = 1.0f / scale;
  for (int64_t i = 0; i < n; i++) {
    const float y = x[i] * inverse;
    const uint32_t bits = bits_of(y), cast = r->cast & ~(uint32_t)(is_special(y) ? MOE_CAST_SATURATE : 0);
    x[i] = oracle_as(dtype, float_of(element_decoded(f, element_code(f, bits, cast))) * scale);
  }
}

/* ------------------------------------------------------------------------------------------------------- products */

static inline float *oracle_transposed(const float *x, int64_t rows, int64_t columns) {
  float *y = oracle_floats(rows * columns);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++) y[j * rows + i] = x[i * columns + j];
  return y;
}

static inline void *oracle_bf16(const float *x, int64_t n) {
  moe_bf16 *y = (moe_bf16 *)oracle_take(n, sizeof *y);
  for (int64_t i = 0; i < n; i++) y[i] = (moe_bf16)(bits_of(x[i]) >> 16);
  return y;
}

/* a^T b, [m,n]: the product sums over k of a [k,m] and b [k,n], both of the products' type. */
static inline float *oracle_product(moe_dtype dtype, int64_t k, int64_t m, int64_t n, const float *a, const float *b) {
  const int32_t rows = (int32_t)k;
  const int bf16 = dtype == MOE_DTYPE_BF16;
  moe_context ctx = {.allocate = oracle_allocate, .release = oracle_free};
  moe_grouped_gemm_args args = {
      .num_tokens = k, .topk = 1, .E = 1, .N = m, .K = n, .m_sizes = &rows, .weight_grad_dtype = MOE_DTYPE_F32};
  float *c = oracle_floats(m * n);
  if (k == 0 || m == 0) return c;
  args.dY = bf16 ? oracle_bf16(a, k * m) : (const void *)a;
  args.X = bf16 ? oracle_bf16(b, k * n) : (const void *)b;
  args.dW = c;
  if ((bf16 ? moe_grouped_gemm_dw_bf16(&ctx, &args) : moe_grouped_gemm_dw_f32(&ctx, &args)) != MOE_OK) abort();
  return c;
}

/* ------------------------------------------------------------------------------------------------------------ rows */

struct oracle_layer {
  const struct problem *p;
  const moe_mx_operands *mx;
  moe_dtype dtype, inner; /* inner: of intermediates */
  int64_t T, H, I, E, slots, rows;
  int64_t *first, *token, *slot, *row; /* an expert's rows in block order; row: of a slot, or -1 */
  int64_t *order_x, *order_m;          /* the elements of groups, or NULL */
  float *affinity;                     /* of rows */
  int pre, post, on_i, gate;
};

static inline void oracle_rows(struct oracle_layer *l) {
  const struct problem *p = l->p;
  const int32_t *ids = (const int32_t *)(void *)p->tensor[PT_TOKEN_IDS].data;
  const int32_t *expert = (const int32_t *)(void *)p->tensor[PT_BLOCK_EXPERT].data;
  const int32_t *conditions = (const int32_t *)(void *)p->tensor[PT_CONDITIONS].data;
  const float *affinity = problem_floats(p, PT_AFFINITIES);
  for (int64_t s = 0; s < l->slots; s++) l->row[s] = -1;
  for (int64_t e = 0; e < l->E; e++) {
    l->first[e] = l->rows;
    for (int64_t s = 0; s < l->slots; s++) {
      if (expert[s / p->o.B] != e || ids[s] < 0 || ids[s] == l->T) continue;
      if (!p->o.no_conditions && conditions[s / p->o.B] == 0) continue;
      l->row[s] = l->rows;
      l->token[l->rows] = ids[s];
      l->slot[l->rows] = s;
      l->affinity[l->rows++] = p->o.layer.affinity_mode == MOE_AFFINITY_NO_SCALE ? 1.0f : affinity[ids[s] * l->E + e];
    }
  }
  l->first[l->E] = l->rows;
}

static inline struct oracle_layer oracle_layer_of(const struct problem *p) {
  const moe_affinity_mode mode = p->o.layer.affinity_mode;
  struct oracle_layer l = {
      .p = p, .mx = &p->o.mx, .dtype = p->o.dtype, .T = p->o.T, .H = p->o.H, .I = p->o.I, .E = p->o.E};
  l.inner = l.dtype == MOE_DTYPE_BF16 ? MOE_DTYPE_BF16 : MOE_DTYPE_F32;
  l.slots = p->N * p->o.B;
  l.first = (int64_t *)oracle_take(l.E + 1, 8), l.token = (int64_t *)oracle_take(l.slots, 8);
  l.slot = (int64_t *)oracle_take(l.slots, 8), l.row = (int64_t *)oracle_take(l.slots, 8);
  l.affinity = oracle_floats(l.slots);
  l.pre = mode == MOE_AFFINITY_PRE_SCALE;
  l.on_i = mode == MOE_AFFINITY_ON_I, l.post = l.on_i || mode == MOE_AFFINITY_POST_SCALE;
  l.gate = !p->o.layer.skip_gate;
  if (l.mx->activation_layout != MOE_MX_LAYOUT_PLAIN) {
    l.order_x = (int64_t *)oracle_take(l.H, 8), l.order_m = (int64_t *)oracle_take(l.I, 8);
    if (moe_nki_x4_permutation(NULL, l.mx->activation_layout, 2, l.H, l.order_x) != MOE_OK ||
        moe_nki_x4_permutation(NULL, l.mx->activation_layout, 1, l.I, l.order_m) != MOE_OK)
      abort();
  }
  oracle_rows(&l);
  return l;
}

static inline float *oracle_gather(const struct oracle_layer *l, const float *x) {
  float *rows = oracle_floats(l->rows * l->H);
  for (int64_t r = 0; r < l->rows; r++)
    memcpy(rows + r * l->H, x + l->token[r] * l->H, (size_t)l->H * sizeof *x);
  return rows;
}

/* Every expert's rows x [rows,n] under the expert's scale, if there are such. */
static inline void oracle_round_rows(const struct oracle_layer *l, const float *scale, moe_dtype dtype, float *x,
                                     int64_t n) {
  for (int64_t e = 0; e < l->E && scale; e++)
    oracle_round_scaled(&l->mx->activations, dtype, x + l->first[e] * n, (l->first[e + 1] - l->first[e]) * n, scale[e]);
}

/* Every expert's rows x [rows,k] times its own w [k,n]. */
static inline float *oracle_experts(const struct oracle_layer *l, const float *x, const float *w, int64_t k,
                                    int64_t n) {
  float *y = oracle_floats(l->rows * n);
  for (int64_t e = 0; e < l->E; e++) {
    const int64_t first = l->first[e], rows = l->first[e + 1] - first;
    const float *c = oracle_product(l->dtype, k, rows, n, oracle_transposed(x + first * k, rows, k), w + e * k * n);
    memcpy(y + first * n, c, (size_t)(rows * n) * sizeof *y);
  }
  return y;
}

/* Every expert's w [rows,columns] transposed. */
static inline float *oracle_across(const struct oracle_layer *l, const float *w, int64_t rows, int64_t columns) {
  float *y = oracle_floats(l->E * rows * columns);
  for (int64_t e = 0; e < l->E; e++)
    memcpy(y + e * rows * columns, oracle_transposed(w + e * rows * columns, rows, columns),
           (size_t)(rows * columns) * sizeof *y);
  return y;
}

/* --------------------------------------------------------------------------------------------------------- forward */

struct oracle_forward {
  float *gate_up; /* [N,2,I,B] */
  float *output;  /* [T,H] before it is rounded */
};

static inline void oracle_unit(const struct oracle_layer *l, const float *g, const float *u, float *f, float *df) {
  const moe_layer_config *c = &l->p->o.layer;
  if (moe_activation_f32(NULL, c->activation, c->alpha, l->gate ? g : u, f, df, l->rows * l->I) != MOE_OK) abort();
}

/* g and u, apart, from c [rows,2,I]. */
static inline void oracle_pre_activations(const struct oracle_layer *l, const float *c, float *g, float *u,
                                          float *saved) {
  const float *bias = l->p->o.expert_bias ? problem_floats(l->p, PT_GATE_UP_BIAS) : NULL;
  for (int64_t e = 0; e < l->E; e++)
    for (int64_t r = l->first[e]; r < l->first[e + 1]; r++)
      for (int64_t i = 0; i < 2 * l->I; i++) {
        const int64_t B = l->p->o.B, slot = l->slot[r];
        float z = l->pre ? c[r * 2 * l->I + i] * l->affinity[r] : c[r * 2 * l->I + i];
        if (bias) z = z + bias[e * 2 * l->I + i];
        if (i < l->I && !l->gate) z = 0;
        (i < l->I ? g + r * l->I : u + r * l->I - l->I)[i] = z;
        saved[(slot / B * 2 * l->I + i) * B + slot % B] = z;
      }
}

static inline void oracle_output(const struct oracle_layer *l, const float *c, float *output) {
  const float *bias = l->p->o.expert_bias ? problem_floats(l->p, PT_DOWN_BIAS) : NULL;
  const int32_t *expert = (const int32_t *)(void *)l->p->tensor[PT_BLOCK_EXPERT].data;
  for (int64_t s = 0; s < l->slots; s++) {
    const int64_t r = l->row[s];
    for (int64_t h = 0; h < l->H && r >= 0; h++) {
      float d = c[r * l->H + h], b = bias ? bias[expert[s / l->p->o.B] * l->H + h] : 0;
      if (l->on_i) b = b * l->affinity[r];
      if (bias) d = d + b;
      if (l->post && !l->on_i) d = d * l->affinity[r];
      output[l->token[r] * l->H + h] += d;
    }
  }
}

static inline struct oracle_forward oracle_forward_of(const struct oracle_layer *l) {
  const struct oracle_forward out = {oracle_floats(l->slots * 2 * l->I), oracle_floats(l->T * l->H)};
  const int64_t n = l->rows * l->I;
  float *x = problem_floats(l->p, PT_HIDDEN_STATES), *wgu = problem_floats(l->p, PT_GATE_UP_WEIGHT);
  float *wd = problem_floats(l->p, PT_DOWN_WEIGHT), *g = oracle_floats(n), *u = oracle_floats(n), *m = oracle_floats(n);
  if (!l->mx->gate_up_in_scale) oracle_round(&l->mx->activations, l->dtype, x, l->T, l->H, 1, l->order_x);
  x = oracle_gather(l, x);
  oracle_round_rows(l, l->mx->gate_up_in_scale, l->dtype, x, l->H);
  oracle_round(&l->mx->weights, l->dtype, wgu, l->E, l->H, 2 * l->I, NULL);
  oracle_round(&l->mx->weights, l->dtype, wd, l->E, l->I, l->H, NULL);
  oracle_pre_activations(l, oracle_experts(l, x, wgu, l->H, 2 * l->I), g, u, out.gate_up);
  oracle_unit(l, g, u, m, NULL);
  for (int64_t i = 0; i < n; i++) {
    const float v = u[i] + l->p->o.layer.up_offset;
    if (l->gate) m[i] = m[i] * v;
    if (l->on_i) m[i] = m[i] * l->affinity[i / l->I];
    m[i] = oracle_as(l->inner, m[i]);
  }
  if (!l->mx->down_in_scale) oracle_round(&l->mx->activations, l->inner, m, l->rows, l->I, 1, l->order_m);
  oracle_round_rows(l, l->mx->down_in_scale, l->inner, m, l->I);
  oracle_output(l, oracle_experts(l, m, wd, l->I, l->H), out.output);
  return out;
}

/* -------------------------------------------------------------------------------------------------------- backward */

struct oracle_backward {
  float *hidden, *gate_up, *down, *gate_up_bias; /* gradients before they are rounded */
};

/* a*m [rows,I]; dg, du [rows,2,I] as binary32. */
static inline void oracle_unit_back(const struct oracle_layer *l, const float *dm0, float *am, float *pre) {
  const int64_t n = l->rows * l->I, B = l->p->o.B;
  const float *saved = problem_floats(l->p, PT_GATE_UP_CHECKPOINT);
  float *g = oracle_floats(n), *u = oracle_floats(n), *f = oracle_floats(n), *df = oracle_floats(n);
  for (int64_t j = 0; j < n; j++) {
    const int64_t slot = l->slot[j / l->I], i = j % l->I;
    g[j] = saved[(slot / B * 2 * l->I + i) * B + slot % B];
    u[j] = saved[((slot / B * 2 + 1) * l->I + i) * B + slot % B];
  }
  oracle_unit(l, g, u, f, df);
  for (int64_t j = 0; j < n; j++) {
    const float scale = l->post ? l->affinity[j / l->I] : 1.0f, dm = dm0[j] * scale;
    const float v = u[j] + l->p->o.layer.up_offset;
    float *row = pre + j / l->I * 2 * l->I + j % l->I;
    float m = f[j];
    if (l->gate) m = m * v, row[0] = dm * v, row[0] = row[0] * df[j];
    row[l->I] = l->gate ? dm * f[j] : dm * df[j];
    am[j] = oracle_as(l->inner, m * scale);
  }
}

/* dX from dg, du as products take them. */
static inline void oracle_hidden_grad(const struct oracle_layer *l, const float *operand, float *hidden) {
  const int64_t from = l->gate ? 0 : l->I, k = 2 * l->I - from;
  float *wgu = problem_floats(l->p, PT_GATE_UP_WEIGHT), *part = oracle_floats(l->E * l->H * k);
  float *left = oracle_floats(l->rows * k);
  oracle_round(&l->mx->weights, l->dtype, wgu, l->E * l->H * 2, l->I, 1, NULL);
  for (int64_t i = 0; i < l->E * l->H * k; i++) part[i] = wgu[i / k * 2 * l->I + from + i % k];
  for (int64_t i = 0; i < l->rows * k; i++) left[i] = operand[i / k * 2 * l->I + from + i % k];
  const float *c = oracle_experts(l, left, oracle_across(l, part, l->H, k), k, l->H);
  for (int64_t s = 0; s < l->slots; s++)
    for (int64_t h = 0; h < l->H && l->row[s] >= 0; h++) {
      float d = c[l->row[s] * l->H + h];
      if (l->pre) d = d * l->affinity[l->row[s]];
      hidden[l->token[l->row[s]] * l->H + h] += d;
    }
}

/* dW[e] = x^T y over the expert's rows, both rounded along them; x_as, y_as: their types. */
static inline void oracle_weight_grad(const struct oracle_layer *l, float *x, moe_dtype x_as, int64_t m, float *y,
                                      moe_dtype y_as, int64_t n, float *dw) {
  for (int64_t e = 0; e < l->E; e++) {
    const int64_t first = l->first[e], rows = l->first[e + 1] - first;
    if (l->mx->weight_grads) {
      oracle_round(&l->mx->activations, x_as, x + first * m, 1, rows, m, NULL);
      oracle_round(&l->mx->gradients, y_as, y + first * n, 1, rows, n, NULL);
    }
    const float *c = oracle_product(l->dtype, rows, m, n, x + first * m, y + first * n);
    memcpy(dw + e * m * n, c, (size_t)(m * n) * sizeof *c);
  }
}

static inline void oracle_blank_gate(const struct oracle_layer *l, float *gate_up) {
  for (int64_t i = 0; i < l->E * l->H * 2 * l->I && !l->gate; i++)
    if (i / l->I % 2 == 0) gate_up[i] = 0;
}

/* A term of a sum over tokens: contract 4. */
static inline void oracle_long_add(float *sum, float *low, float term, int64_t before) {
  volatile float y = term + (before < 64 ? 0.0f : *low), now = *sum + y, part = now - *sum, lost = y - part;
  if (!isfinite(now)) lost = 0;
  *low = before < 64 ? *low + lost : lost;
  *sum = now;
}

static inline void oracle_bias_grad(const struct oracle_layer *l, const float *pre, float *bias) {
  float *low = oracle_floats(l->E * 2 * l->I);
  for (int64_t e = 0; e < l->E; e++)
    for (int64_t r = l->first[e]; r < l->first[e + 1]; r++)
      for (int64_t i = 0; i < 2 * l->I; i++)
        oracle_long_add(&bias[e * 2 * l->I + i], &low[e * 2 * l->I + i], pre[r * 2 * l->I + i], r - l->first[e]);
}

static inline struct oracle_backward oracle_backward_of(const struct oracle_layer *l) {
  const int64_t n = l->rows * 2 * l->I, wide = 2 * l->I;
  const struct oracle_backward out = {oracle_floats(l->T * l->H), oracle_floats(l->E * l->H * wide),
                                      oracle_floats(l->E * l->I * l->H), oracle_floats(l->E * wide)};
  float *wd = problem_floats(l->p, PT_DOWN_WEIGHT), *pre = oracle_floats(n), *operand = oracle_floats(n);
  float *x = oracle_gather(l, problem_floats(l->p, PT_HIDDEN_STATES)), *am = oracle_floats(l->rows * l->I);
  float *dy = oracle_gather(l, problem_floats(l->p, PT_OUTPUT_GRAD)), *rounded = oracle_floats(l->rows * l->H);
  memcpy(rounded, dy, (size_t)(l->rows * l->H) * sizeof *dy);
  oracle_round(&l->mx->gradients, l->dtype, rounded, l->rows, l->H, 1, NULL);
  oracle_round(&l->mx->weights, l->dtype, wd, l->E * l->I, l->H, 1, NULL);
  oracle_unit_back(l, oracle_experts(l, rounded, oracle_across(l, wd, l->I, l->H), l->H, l->I), am, pre);
  oracle_bias_grad(l, pre, out.gate_up_bias);
  for (int64_t i = 0; i < n; i++) operand[i] = oracle_as(l->inner, pre[i]);
  oracle_round(&l->mx->gradients, l->inner, operand, l->rows * 2, l->I, 1, NULL);
  oracle_hidden_grad(l, operand, out.hidden);
  for (int64_t i = 0; i < n; i++) pre[i] = oracle_as(l->inner, l->pre ? pre[i] * l->affinity[i / wide] : pre[i]);
  oracle_weight_grad(l, x, l->dtype, l->H, pre, l->inner, wide, out.gate_up);
  oracle_blank_gate(l, out.gate_up);
  oracle_weight_grad(l, am, l->inner, l->I, dy, l->dtype, l->H, out.down);
  return out;
}

#endif
