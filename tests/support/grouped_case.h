/* grouped_case.h: grouped GEMM with every option, its tensors against guard pages, and what its results must be: values
   in double, each with a bound of the error that the numeric contract allows, before the store rounds. Of the exact
   fill all values and all sums are integers, or multiples of a power of two, that binary32 holds. */
#ifndef MOE_TEST_GROUPED_CASE_H
#define MOE_TEST_GROUPED_CASE_H

#include "fill.h"
#include "grouped.h"
#include "guard.h"
#include "quantized.h"

enum { GROUPED_Y, GROUPED_DX, GROUPED_DT, GROUPED_DW, GROUPED_DB, GROUPED_OUTPUTS, GROUPED_MEMORIES = 16 };

static const char *const grouped_output_name[] = {"Y", "dX", "topk_weights_grad", "dW", "bias_grad"};
static const uint32_t grouped_bit[] = {MOE_ACCUMULATE_Y, MOE_ACCUMULATE_DX, MOE_ACCUMULATE_TOPK_WEIGHTS_GRAD,
                                       MOE_ACCUMULATE_DW, MOE_ACCUMULATE_BIAS_GRAD};

/* What is asked for; the rest of `args` follows. */
typedef struct grouped_options {
  moe_grouped_gemm_args args;            /* sizes, permutations, orders, modes, accumulate, weight_grad_dtype */
  int gather, bias, topk_weights, grads; /* given; grads: those that are optional */
  int padding, exact;
  moe_quantized_weight storage;
  int quantized;
} grouped_options;

typedef struct grouped_case {
  uint64_t seed, rng;
  moe_dtype dtype;
  grouped_options o;
  moe_grouped_gemm_args args;
  int64_t total, rows;
  int memories;
  struct guarded memory[GROUPED_MEMORIES];
  int32_t *sizes, *gather, *position; /* position: of each slot, -1 of padding */
  test_tensor x, w, bias, dy, topk, out[GROUPED_OUTPUTS], start[GROUPED_OUTPUTS];
  struct quantized q;
  double *xs, *dys, *forward_w, *backward_w; /* while the reference is computed */
} grouped_case;

/* ------------------------------------------------------------------------------------------------------------ cases */

static inline void *grouped_take(grouped_case *c, size_t bytes) {
  struct guarded *g = &c->memory[c->memories++];
  *g = guard_alloc(bytes, c->seed & 1 ? GUARD_AFTER : GUARD_BEFORE);
  if (g->data == NULL) abort();
  memset(g->data, 0x5a, bytes);
  return g->data;
}

static inline test_tensor grouped_tensor(grouped_case *c, moe_dtype dtype, int64_t count) {
  return (test_tensor){dtype, count, grouped_take(c, (size_t)count * moe_dtype_size(dtype))};
}

static inline void grouped_fill(grouped_case *c, test_tensor *t, int64_t limit) {
  if (c->o.exact) test_fill_integers(t, &c->rng, 0.5, limit);
  else test_fill_uniform(t, &c->rng, 1.0);
}

static inline int64_t grouped_slot(const grouped_case *c, int64_t pos) { return c->gather ? c->gather[pos] : pos; }
static inline int64_t grouped_x_row(const grouped_case *c, int64_t pos) {
  return c->args.permute_x ? c->gather[pos] / c->args.topk : pos;
}
static inline int64_t grouped_y_row(const grouped_case *c, int64_t pos) {
  return c->args.permute_y ? c->gather[pos] : pos;
}
static inline int64_t grouped_dx_row(const grouped_case *c, int64_t pos) {
  if (c->args.sum_topk) return c->gather[pos] / c->args.topk;
  return c->args.permute_x ? c->gather[pos] : pos;
}
static inline int64_t grouped_expert(const grouped_case *c, int64_t pos) {
  int64_t e = 0;
  for (int64_t end = c->sizes[0]; pos >= end; end += c->sizes[e]) e++;
  return e;
}
static inline int64_t grouped_w_at(const grouped_case *c, int64_t e, int64_t n, int64_t k) {
  const int64_t N = c->args.N, K = c->args.K;
  return e * N * K + (c->args.weight_order == MOE_GROUPED_EKN ? k * N + n : n * K + k);
}

static inline void grouped_route(grouped_case *c) {
  c->rows = c->o.padding && c->total ? test_random_range(&c->rng, 0, c->total) : c->total;
  c->sizes = (int32_t *)grouped_take(c, (size_t)c->args.E * 4);
  c->position = (int32_t *)malloc((size_t)c->total * 4 + 1);
  memset(c->sizes, 0, (size_t)c->args.E * 4);
  const int64_t most = test_random_chance(&c->rng, 3) ? (c->args.E + 1) / 2 : c->args.E; /* some experts get none */
  for (int64_t i = 0; i < c->rows; i++) c->sizes[test_random_range(&c->rng, 0, most - 1)]++;
  for (int64_t i = 0; i < c->total; i++) c->position[i] = -1;
  if (c->o.gather) c->gather = (int32_t *)grouped_take(c, (size_t)c->total * 4);
  for (int64_t i = 0; i < c->total && c->gather; i++) {
    const int64_t j = test_random_range(&c->rng, 0, i);
    c->gather[i] = c->gather[j], c->gather[j] = (int32_t)i;
  }
  for (int64_t i = 0; i < c->rows; i++) c->position[grouped_slot(c, i)] = (int32_t)i;
  for (int64_t i = c->rows; i < c->total && c->gather; i++)
    if (test_random_chance(&c->rng, 2)) c->gather[i] = -1;
}

static inline void grouped_nan_row(test_tensor *t, int64_t row, int64_t n) {
  for (int64_t i = 0; i < n; i++) test_tensor_set(t, row * n + i, NAN);
}

/* What is padding, or an expert's without rows, is NaN: it must not be read. */
static inline void grouped_poison(grouped_case *c) {
  const moe_grouped_gemm_args *a = &c->args;
  for (int64_t pos = c->rows; pos < c->total; pos++) {
    if (!a->permute_x) grouped_nan_row(&c->x, pos, a->K);
    if (!a->permute_y) grouped_nan_row(&c->dy, pos, a->N);
  }
  for (int64_t t = 0; t < a->num_tokens; t++) {
    int used = 0;
    for (int64_t slot = t * a->topk; slot < (t + 1) * a->topk; slot++) {
      used |= c->position[slot] >= 0;
      if (c->position[slot] >= 0) continue;
      test_tensor_set(&c->topk, slot, NAN);
      if (a->permute_y) grouped_nan_row(&c->dy, slot, a->N);
    }
    if (!used && a->permute_x) grouped_nan_row(&c->x, t, a->K);
  }
  for (int64_t e = 0; e < a->E; e++) {
    if (c->sizes[e] > 0) continue;
    if (!c->o.quantized) grouped_nan_row(&c->w, e, a->N * a->K);
    grouped_nan_row(&c->bias, e, a->N);
  }
}

/* E8M0 scales and float scales are small; those that multiply sums are powers of two if the fill is exact. */
static inline void grouped_quantize(grouped_case *c) {
  moe_grouped_gemm_args *a = &c->args;
  c->q.weight = c->o.storage;
  c->q.E = a->E, c->q.K = a->K, c->q.parts = 1, c->q.columns = a->N;
  c->q.by_columns = a->weight_order == MOE_GROUPED_ENK;
  quantized_make(&c->q, &c->rng, 124, 127, c->o.exact, (int)(c->seed & 1));
  a->W = NULL, a->quantized_W = &c->q.weight;
}

static inline void grouped_open(grouped_case *c, uint64_t seed, moe_dtype dtype, const grouped_options *o) {
  memset(c, 0, sizeof *c);
  c->seed = c->rng = seed, c->dtype = dtype, c->o = *o, c->args = o->args;
  moe_grouped_gemm_args *a = &c->args;
  const int64_t total = c->total = a->num_tokens * a->topk, x_rows = a->permute_x ? a->num_tokens : total;
  const moe_dtype grad = a->weight_grad_dtype ? a->weight_grad_dtype : dtype;
  c->o.gather |= a->permute_x || a->permute_y;
  grouped_route(c);
  c->x = grouped_tensor(c, dtype, x_rows * a->K), c->dy = grouped_tensor(c, dtype, total * a->N);
  c->w = grouped_tensor(c, dtype, c->o.quantized ? 0 : a->E * a->N * a->K);
  c->bias = grouped_tensor(c, dtype, a->E * a->N), c->topk = grouped_tensor(c, MOE_DTYPE_F32, total);
  test_tensor *in[] = {&c->x, &c->dy, &c->w, &c->bias, &c->topk};
  for (size_t i = 0; i < sizeof in / sizeof *in; i++) grouped_fill(c, in[i], i == 4 ? 2 : 4);
  const int64_t counts[] = {total * a->N, (a->sum_topk ? a->num_tokens : total) * a->K, total, a->E * a->N * a->K,
                            a->E * a->N};
  for (int i = 0; i < GROUPED_OUTPUTS; i++) {
    const moe_dtype type = i >= GROUPED_DW ? grad : i == GROUPED_DT ? MOE_DTYPE_F32 : dtype;
    c->out[i] = grouped_tensor(c, type, counts[i]), c->start[i] = test_tensor_new(type, counts[i]);
    grouped_fill(c, &c->start[i], 8);
  }
  a->m_sizes = c->sizes, a->gather_indices = c->gather, a->X = c->x.data, a->dY = c->dy.data, a->W = c->w.data;
  if (o->bias) a->bias = c->bias.data;
  if (o->topk_weights) a->topk_weights = (const float *)c->topk.data;
  a->Y = c->out[GROUPED_Y].data, a->dX = c->out[GROUPED_DX].data, a->dW = c->out[GROUPED_DW].data;
  if (o->grads) a->topk_weights_grad = (float *)c->out[GROUPED_DT].data, a->bias_grad = c->out[GROUPED_DB].data;
  if (c->o.quantized) grouped_quantize(c);
  grouped_poison(c);
}

static inline void grouped_close(grouped_case *c) {
  for (int i = 0; i < c->memories; i++) guard_free(&c->memory[i]);
  for (int i = 0; i < GROUPED_OUTPUTS; i++) test_tensor_free(&c->start[i]);
  if (c->o.quantized) quantized_free(&c->q);
  free(c->position);
}

/* Whether an operation, 0 to 2, writes an output. */
static inline int grouped_writes(const grouped_case *c, int op, int output) {
  static const int of[] = {0, 1, 1, 2, 2};
  const int optional = output == GROUPED_DT || output == GROUPED_DB;
  return of[output] == op && (c->o.grads || !optional);
}

/* Runs an operation in a workspace of exactly its size that is full of NaN. */
static inline moe_status grouped_run(grouped_case *c, moe_context *ctx, int op, const moe_grouped_gemm_args *args) {
  moe_grouped_gemm_args a = *args;
  for (int i = 0; i < GROUPED_OUTPUTS; i++) test_tensor_copy(&c->out[i], &c->start[i]);
  moe_status status = grouped_size[c->dtype][op](ctx, &a, &a.workspace_bytes);
  if (status != MOE_OK) return status;
  struct guarded workspace = guard_alloc(a.workspace_bytes, GUARD_AFTER);
  if (workspace.data == NULL) abort();
  a.workspace = memset(workspace.data, 0xff, a.workspace_bytes);
  status = grouped_call[c->dtype][op](ctx, &a);
  guard_free(&workspace);
  return status;
}

/* -------------------------------------------------------------------------------------------------------- reference */

/* A value, and how far binary32 may be from it. */
typedef struct carried {
  double v, e;
} carried;

static inline carried carried_rounded(double v, double e) { return (carried){v, e + 0x1p-24 * (fabs(v) + e)}; }
static inline carried carried_times(carried a, double by) { return carried_rounded(a.v * by, a.e * fabs(by)); }
static inline carried carried_plus(carried a, carried b) { return carried_rounded(a.v + b.v, a.e + b.e); }
static inline double carried_gamma(double n) { return n * 0x1p-24 / (1 - n * 0x1p-24); }

/* The weight that the forward multiplies, without what multiplies the sums; that of the backward. */
static inline int grouped_scaled_after(const grouped_case *c) {
  const moe_weight_scaling s = c->q.weight.scaling;
  return c->o.quantized && s != MOE_WEIGHT_MX && s != MOE_WEIGHT_BLOCK && s != MOE_WEIGHT_GROUP;
}
static inline double grouped_w(const grouped_case *c, int64_t e, int64_t n, int64_t k, int backward) {
  if (!c->o.quantized) return test_tensor_get(&c->w, grouped_w_at(c, e, n, k));
  if (!backward && grouped_scaled_after(c)) return (double)quantized_code_value(&c->q, e, k, 0, n);
  return test_dtype_round(c->dtype == MOE_DTYPE_BF16 ? MOE_DTYPE_BF16 : MOE_DTYPE_F32,
                          (double)quantized_value(&c->q, e, k, 0, n));
}

static inline double grouped_topk(const grouped_case *c, int64_t pos) {
  return c->args.topk_weights ? test_tensor_get(&c->topk, grouped_slot(c, pos)) : 1;
}

static inline carried grouped_forward(const grouped_case *c, int64_t pos, int64_t n) {
  const moe_grouped_gemm_args *a = &c->args;
  const int64_t e = grouped_expert(c, pos), row = grouped_x_row(c, pos) * a->K;
  double sum = 0, size = 0;
  for (int64_t k = 0; k < a->K; k++) {
    const double product = c->xs[row + k] * c->forward_w[(e * a->N + n) * a->K + k];
    sum += product, size += fabs(product);
  }
  carried y = {sum, carried_gamma((double)a->K + 1) * size};
  const carried bias = {a->bias ? test_tensor_get(&c->bias, e * a->N + n) : 0, 0};
  if (grouped_scaled_after(c)) y = carried_times(y, (double)quantized_scale(&c->q, e, 0, 0, n));
  if (a->topk_mode == MOE_TOPK_PRE) y = carried_times(y, grouped_topk(c, pos));
  if (a->bias) y = carried_plus(y, bias);
  if (a->topk_mode == MOE_TOPK_POST) y = carried_times(y, grouped_topk(c, pos));
  return y;
}

/* dY*W[e], one element. */
static inline carried grouped_back(const grouped_case *c, int64_t pos, int64_t k) {
  const moe_grouped_gemm_args *a = &c->args;
  const int64_t e = grouped_expert(c, pos), row = grouped_y_row(c, pos) * a->N;
  double sum = 0, size = 0;
  for (int64_t n = 0; n < a->N; n++) {
    const double product = c->dys[row + n] * c->backward_w[(e * a->N + n) * a->K + k];
    sum += product, size += fabs(product);
  }
  return (carried){sum, carried_gamma((double)a->N + 1) * size};
}

/* The operand w*x of dW. */
static inline double grouped_scaled_x(const grouped_case *c, int64_t pos, int64_t k) {
  const double x = c->xs[grouped_x_row(c, pos) * c->args.K + k];
  return c->args.topk_weights ? test_dtype_round(c->dtype, (double)((float)grouped_topk(c, pos) * (float)x)) : x;
}

/* Adds the rows' parts to the values and bounds of all outputs but dW. Products come first, by slot. */
static inline void grouped_reference_rows(const grouped_case *c, carried *const want[]) {
  const moe_grouped_gemm_args *a = &c->args;
  const int post = a->topk_mode == MOE_TOPK_POST;
  for (int64_t slot = 0; slot < c->total; slot++) {
    const int64_t pos = c->position[slot];
    if (pos < 0) continue;
    const int64_t e = grouped_expert(c, pos), y = grouped_y_row(c, pos) * a->N, dx = grouped_dx_row(c, pos) * a->K;
    double dot = 0, size = 0, error = 0;
    for (int64_t n = 0; n < a->N; n++) want[GROUPED_Y][y + n] = grouped_forward(c, pos, n);
    for (int64_t k = 0; k < a->K; k++) {
      const carried d = grouped_back(c, pos, k);
      const double x = test_tensor_get(&c->x, grouped_x_row(c, pos) * a->K + k);
      const carried part = carried_times(d, grouped_topk(c, pos));
      want[GROUPED_DX][dx + k] = a->sum_topk ? carried_plus(want[GROUPED_DX][dx + k], part) : part;
      dot += d.v * x, size += fabs(d.v * x), error += d.e * fabs(x);
    }
    for (int64_t n = 0; n < a->N; n++) {
      const double b = test_tensor_get(&c->dy, y + n) * test_tensor_get(&c->bias, e * a->N + n);
      if (a->bias && post) dot += b, size += fabs(b);
    }
    const double depth = 12 + (double)(a->K + a->N) / 64 + 4;
    want[GROUPED_DT][slot] = (carried){dot, error + carried_gamma(depth) * (size + error)};
  }
}

static inline void grouped_reference_weights(const grouped_case *c, carried *const want[]) {
  const moe_grouped_gemm_args *a = &c->args;
  double *x = (double *)malloc((size_t)a->K * sizeof *x);
  if (!x) abort();
  for (int64_t pos = 0; pos < c->rows; pos++) {
    const int64_t e = grouped_expert(c, pos), y = grouped_y_row(c, pos) * a->N;
    const double topk = a->topk_mode == MOE_TOPK_POST ? grouped_topk(c, pos) : 1;
    const double gamma = carried_gamma((double)c->sizes[e] + 1);
    for (int64_t k = 0; k < a->K; k++) x[k] = grouped_scaled_x(c, pos, k);
    for (int64_t n = 0; n < a->N; n++) {
      const double dy = test_tensor_get(&c->dy, y + n);
      carried *bias = &want[GROUPED_DB][e * a->N + n];
      *bias = carried_plus(*bias, carried_times((carried){dy, 0}, topk));
      for (int64_t k = 0; k < a->K; k++) {
        carried *w = &want[GROUPED_DW][grouped_w_at(c, e, n, k)];
        const double product = dy * x[k];
        w->v += product, w->e += fabs(product) * gamma;
      }
    }
  }
  free(x);
}

static inline double *grouped_values(const test_tensor *t) {
  double *x = (double *)malloc((size_t)t->count * sizeof *x + 1);
  if (!x) abort();
  for (int64_t i = 0; i < t->count; i++) x[i] = test_tensor_get(t, i);
  return x;
}
static inline double *grouped_weight_values(const grouped_case *c, int backward) {
  const int64_t N = c->args.N, K = c->args.K, n = c->args.E * N * K;
  double *w = (double *)malloc((size_t)n * sizeof *w);
  if (!w) abort();
  for (int64_t i = 0; i < n; i++) w[i] = grouped_w(c, i / N / K, i / K % N, i % K, backward);
  return w;
}

/* Allocates and fills want[0..GROUPED_OUTPUTS-1]; what is padding, and accumulated, stays. */
static inline void grouped_reference(grouped_case *c, carried *want[]) {
  c->xs = grouped_values(&c->x), c->dys = grouped_values(&c->dy);
  c->forward_w = grouped_weight_values(c, 0), c->backward_w = grouped_weight_values(c, 1);
  for (int i = 0; i < GROUPED_OUTPUTS; i++) {
    want[i] = (carried *)calloc((size_t)c->out[i].count + 1, sizeof **want);
    if (!want[i]) abort();
  }
  grouped_reference_rows(c, want), grouped_reference_weights(c, want);
  free(c->xs), free(c->dys), free(c->forward_w), free(c->backward_w);
  for (int i = 0; i < GROUPED_OUTPUTS; i++)
    for (int64_t j = 0; j < c->out[i].count && c->args.accumulate & grouped_bit[i]; j++)
      want[i][j] = carried_plus(want[i][j], (carried){test_tensor_get(&c->start[i], j), 0});
}

static inline void grouped_reference_free(carried *want[]) {
  for (int i = 0; i < GROUPED_OUTPUTS; i++) free(want[i]);
}

/* The first element that is not what it must be, or -1. Of the exact fill, and of zeros, no bit may differ. */
static inline int64_t grouped_differs(const grouped_case *c, int output, const carried *want) {
  const test_tensor *t = &c->out[output];
  for (int64_t i = 0; i < t->count; i++) {
    const double got = test_tensor_get(t, i), v = want[i].v, e = c->o.exact ? 0 : want[i].e;
    const double bound = e > 0 ? e + test_dtype_ulp(t->dtype, fabs(v) + e) / 2 : 0;
    if (isinf(got) && e > 0 && got * v > 0 && fabs(v) + e >= test_dtype_max(t->dtype)) continue;
    const double near = e > 0 ? v : test_dtype_round(t->dtype, v);
    if (got != near && !(fabs(got - near) <= bound)) return i;
  }
  return -1;
}

#endif /* MOE_TEST_GROUPED_CASE_H */
