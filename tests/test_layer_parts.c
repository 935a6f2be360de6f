/* test_layer_parts: moe_layer_* with a router, a shared expert, a scale per expert and identity experts in one call,
   against moe_layer_* alone, with the shared expert as the last of its experts, and moe_router_topk and its backward: 0
   differing bits, forward and backward, whatever is kept; and what is refused. */
#include "support/layer_parts.h"
#include "support/pool.h"

enum { CONFIGURATIONS = 400 };

/* The tensors of all experts: those of the top-k, and the shared one, as wide as the widest. */
enum { GATE_UP, DOWN, GATE_UP_BIAS, DOWN_BIAS, WEIGHTS };

typedef struct test {
  int64_t T, H, I, E, K, N, shared, width; /* N: identity experts; shared: its I, or 0 */
  moe_dtype dtype, grad_dtype;
  uint64_t s;
  int gate, scale, router;
  moe_layer l, all; /* under test; of all experts */
  moe_shared_expert part;
  moe_router_topk_args choose;
  moe_layer_grads g, all_g;
  moe_shared_expert_grads part_g;
  void *weight[WEIGHTS], *grad[WEIGHTS];                     /* of all experts */
  struct ordered own[2], own_grad[2], also[2], also_grad[2]; /* gate_up and down, of the top-k's and the shared one */
  void *bias[2], *bias_grad[2];                              /* of the top-k's */
  void *gate_weight, *gate_grad[2];                          /* [1]: what is expected */
  void *router_weight, *router_bias, *router_grad[2], *router_bias_grad[2];
  float *logits[2], *weights[2], *logits_grad[2], *scales, *scales_grad[2], *topk_grad[2];
  int32_t *index[2];
  void *x, *dy, *y[2], *dx[2];
  float *all_weights, *all_topk_grad;
  int32_t *all_index;
} test;

static int64_t size_of(const test *t) { return (int64_t)moe_dtype_size(t->dtype); }

/* Rows of an expert's tensor, and whether its columns or its rows are along I. */
static int64_t rows_of(const test *t, int which) {
  const int64_t rows[WEIGHTS] = {t->H * 2, t->width, 2, 1};
  return rows[which];
}
static int64_t columns_of(const test *t, int which) {
  return which == GATE_UP || which == GATE_UP_BIAS ? t->width : t->H;
}
static int64_t experts_of(const test *t) { return t->E + (t->shared > 0); }

/* Copies between an expert in `all` and one whose width is its own; back: to `all`. */
static void cut(const test *t, int which, int64_t expert, void *all, void *own, int64_t element, int back) {
  const int64_t width = expert < t->E ? t->I : t->shared, rows = which == DOWN ? width : rows_of(t, which),
                columns = which == DOWN || which == DOWN_BIAS ? t->H : width, pitch = columns_of(t, which);
  char *from = (char *)all + expert * rows_of(t, which) * pitch * element, *to = own;
  for (int64_t r = 0; r < rows; r++)
    memcpy(back ? from + r * pitch * element : to + r * columns * element,
           back ? to + r * columns * element : from + r * pitch * element, (size_t)(columns * element));
}

/* Zeroes what is beyond an expert's width. */
static void pad(const test *t, int which, void *all, int64_t element) {
  for (int64_t e = 0; e < experts_of(t); e++) {
    const int64_t bytes = rows_of(t, which) * columns_of(t, which) * element;
    char *own = malloc((size_t)bytes), *at = (char *)all + e * bytes;
    cut(t, which, e, all, own, element, 0);
    memset(at, 0, (size_t)bytes);
    cut(t, which, e, all, own, element, 1);
    free(own);
  }
}

/* The top-k's experts, or the shared one, of a tensor in its order. */
static struct ordered order(const test *t, int which, int shared, const moe_weight_orders *orders, int64_t element) {
  const int64_t width = shared ? t->shared : t->I;
  struct ordered w = {.order = which == DOWN ? orders->down : orders->gate_up,
                      .apart = orders->up_apart,
                      .per_expert = orders->per_expert,
                      .E = shared ? 1 : t->E,
                      .K = which == DOWN ? width : t->H,
                      .parts = which == DOWN ? 1 : 2,
                      .n = which == DOWN ? t->H : width,
                      .size = element};
  ordered_open(&w);
  return w;
}

static void exchange(const test *t, int which, struct ordered *w, int shared, void *all, int back) {
  const int64_t expert = w->parts * w->K * w->n * w->size;
  unsigned char *plain = malloc((size_t)(w->E * expert));
  if (back) ordered_copy(w, plain, 1);
  for (int64_t e = 0; e < w->E; e++) cut(t, which, shared ? t->E : e, all, plain + e * expert, w->size, back);
  if (!back) ordered_copy(w, plain, 0);
  free(plain);
}

/* ---------------------------------------------------------------------------------------------------------- a case */

static void choose_sizes(test *t, uint64_t seed) {
  t->s = seed * 31 + 7;
  uint64_t *s = &t->s;
  const int wide = seed % 9 == 0;
  t->T = seed % 23 == 0 ? 0 : test_random_range(s, 1, wide ? 90 : 24), t->H = test_random_range(s, 1, wide ? 200 : 40);
  t->I = 2 * test_random_range(s, 1, wide ? 50 : 20), t->E = test_random_range(s, 1, 5);
  t->N = test_random_chance(s, 2) ? test_random_range(s, 1, 2) : 0;
  t->K = test_random_range(s, 1, t->E + t->N < 3 ? t->E + t->N : 3);
  t->shared = test_random_chance(s, 4) ? 0 : 2 * test_random_range(s, 1, wide ? 60 : 30);
  t->width = t->I > t->shared ? t->I : t->shared;
  t->gate = t->shared && test_random_chance(s, 2), t->router = test_random_chance(s, 2);
  t->grad_dtype = test_random_chance(s, 2) ? MOE_DTYPE_F32 : t->dtype;
}

static moe_layer_config choose_config(test *t) {
  uint64_t *s = &t->s;
  moe_layer_config c = {.activation = (moe_activation)test_random_range(s, 0, MOE_ACT_COUNT_ - 1)};
  c.up_offset = test_random_chance(s, 3) ? 1.0f : 0.0f, c.skip_gate = test_random_chance(s, 6);
  c.clamp = (uint32_t)test_random_range(s, 0, 15) * (uint32_t)test_random_chance(s, 2);
  c.gate_clamp_upper_limit = c.up_clamp_upper_limit = 0.5f, c.gate_clamp_lower_limit = c.up_clamp_lower_limit = -0.75f;
  c.affinity_mode =
      t->gate ? MOE_AFFINITY_POST_SCALE : (moe_affinity_mode)test_random_range(s, 0, MOE_AFFINITY_COUNT_ - 1);
  t->scale =
      (c.affinity_mode == MOE_AFFINITY_POST_SCALE || c.affinity_mode == MOE_AFFINITY_ON_I) && test_random_chance(s, 2);
  return c;
}

static void make_weights(test *t) {
  const double width[WEIGHTS] = {0.3, 0.3, 0.5, 0.5};
  const int64_t grad = (int64_t)moe_dtype_size(t->grad_dtype);
  const moe_weight_orders orders = test_random_orders(&t->s);
  moe_weight_orders also = test_random_orders(&t->s);
  also.per_expert = 0;
  for (int i = 0; i < WEIGHTS; i++) {
    const int64_t n = experts_of(t) * rows_of(t, i) * columns_of(t, i);
    t->weight[i] = parts_numbers(t->dtype, n, width[i], &t->s), t->grad[i] = parts_numbers(t->grad_dtype, n, 1, &t->s);
    pad(t, i, t->weight[i], size_of(t)), pad(t, i, t->grad[i], grad);
  }
  for (int i = 0; i < 2; i++) {
    t->own[i] = order(t, i, 0, &orders, size_of(t)), t->own_grad[i] = order(t, i, 0, &orders, grad);
    exchange(t, i, &t->own[i], 0, t->weight[i], 0), exchange(t, i, &t->own_grad[i], 0, t->grad[i], 0);
    if (t->shared) {
      t->also[i] = order(t, i, 1, &also, size_of(t)), t->also_grad[i] = order(t, i, 1, &also, grad);
      exchange(t, i, &t->also[i], 1, t->weight[i], 0), exchange(t, i, &t->also_grad[i], 1, t->grad[i], 0);
    }
    const int64_t row = i ? t->H : 2 * t->I, which = GATE_UP_BIAS + i;
    t->bias[i] = malloc((size_t)(t->E * row * size_of(t))), t->bias_grad[i] = malloc((size_t)(t->E * row * grad));
    for (int64_t e = 0; e < t->E; e++) {
      cut(t, (int)which, e, t->weight[which], (char *)t->bias[i] + e * row * size_of(t), size_of(t), 0);
      cut(t, (int)which, e, t->grad[which], (char *)t->bias_grad[i] + e * row * grad, grad, 0);
    }
  }
  t->l.orders = orders, t->part.orders = also;
}

static void make_router(test *t) {
  const int64_t experts = t->E + t->N, grad = (int64_t)moe_dtype_size(t->grad_dtype), pairs = t->T * t->K;
  uint64_t *s = &t->s;
  t->gate_weight = parts_numbers(t->dtype, t->H, 1, s);
  t->router_weight = parts_numbers(t->dtype, t->H * experts, 1, s);
  t->router_bias = parts_numbers(t->dtype, experts, 1, s);
  t->gate_grad[0] = parts_numbers(t->grad_dtype, t->H, 1, s), t->gate_grad[1] = parts_copy(t->gate_grad[0], t->H, grad);
  t->router_grad[0] = parts_numbers(t->grad_dtype, t->H * experts, 1, s);
  t->router_grad[1] = parts_copy(t->router_grad[0], t->H * experts, grad);
  t->router_bias_grad[0] = parts_numbers(t->grad_dtype, experts, 1, s);
  t->router_bias_grad[1] = parts_copy(t->router_bias_grad[0], experts, grad);
  t->scales = parts_numbers(MOE_DTYPE_F32, t->E, 2, s);
  for (int i = 0; i < 2; i++) {
    uint64_t same = t->s;
    t->logits[i] = parts_numbers(MOE_DTYPE_F32, t->T * experts, 1, &same);
    t->logits_grad[i] = parts_numbers(MOE_DTYPE_F32, t->T * experts, 1, &same);
    t->scales_grad[i] = parts_numbers(MOE_DTYPE_F32, t->E, 1, &same);
    t->weights[i] = parts_numbers(MOE_DTYPE_F32, pairs, 1, &same);
    t->topk_grad[i] = parts_numbers(MOE_DTYPE_F32, pairs, 1, &same);
    t->index[i] = malloc((size_t)pairs * 4 + 4);
    for (int64_t p = 0; p < pairs; p++) t->index[i][p] = (int32_t)test_random_range(&same, -1, experts - 1);
  }
  t->choose = (moe_router_topk_args){.router_weight = t->router_weight,
                                     .router_bias = test_random_chance(s, 2) ? t->router_bias : NULL,
                                     .router_logits = t->logits[0],
                                     .expert_index = t->index[0],
                                     .expert_weights = t->weights[0],
                                     .config = {.score_function = (moe_score_function)test_random_range(s, 0, 2),
                                                .renormalize = test_random_chance(s, 2)},
                                     .indices_given = test_random_chance(s, 4)};
}

static void make_layers(test *t) {
  const int64_t tokens = t->T * t->H;
  t->x = parts_numbers(t->dtype, tokens, 1, &t->s), t->dy = parts_numbers(t->dtype, tokens, 1, &t->s);
  t->y[0] = parts_numbers(t->dtype, tokens, 1, &t->s), t->y[1] = parts_copy(t->y[0], tokens, size_of(t));
  t->dx[0] = parts_numbers(t->dtype, tokens, 1, &t->s), t->dx[1] = parts_copy(t->dx[0], tokens, size_of(t));
  const moe_mx_rounding mx = {.enabled = test_random_chance(&t->s, 5), .cast = MOE_CAST_SATURATE};
  moe_layer *l = &t->l;
  l->T = t->T, l->H = t->H, l->I = t->I, l->E = t->E, l->K = t->K, l->identity_experts = t->N, l->x = t->x;
  l->gate_up = ordered_tensor(&t->own[0], 0), l->down = ordered_tensor(&t->own[1], 0);
  l->up = l->orders.up_apart ? ordered_tensor(&t->own[0], 1) : NULL;
  l->expert_scale = t->scale ? t->scales : NULL;
  if (t->router) l->router = &t->choose;
  else l->topk_index = t->index[0], l->topk_weights = t->weights[0];
  if (test_random_chance(&t->s, 2)) l->gate_up_bias = t->bias[0], l->down_bias = t->bias[1];
  l->mx = (moe_mx_operands){.activations = mx, .weights = mx, .gradients = mx, .weight_grads = mx.enabled};
  l->accumulate = test_random_chance(&t->s, 2) ? MOE_ACCUMULATE_OUTPUT : 0;
  l->recompute = (uint32_t)test_random_range(&t->s, 0, 3);
  l->saved_dtype = test_random_chance(&t->s, 2) ? MOE_DTYPE_F32 : t->dtype;
  t->all = *l;
  t->all.I = t->width, t->all.E = experts_of(t), t->all.K = t->K + 1, t->all.orders = (moe_weight_orders){0};
  t->all.gate_up = t->weight[GATE_UP], t->all.down = t->weight[DOWN], t->all.up = NULL, t->all.router = NULL;
  t->all.expert_scale = NULL, t->all.recompute = 0;
  if (l->gate_up_bias) t->all.gate_up_bias = t->weight[GATE_UP_BIAS], t->all.down_bias = t->weight[DOWN_BIAS];
  if (!t->shared) return;
  l->shared = &t->part;
  t->part.I = t->shared, t->part.gate_up = ordered_tensor(&t->also[0], 0),
  t->part.down = ordered_tensor(&t->also[1], 0);
  t->part.up = t->part.orders.up_apart ? ordered_tensor(&t->also[0], 1) : NULL;
  t->part.gate = t->gate ? t->gate_weight : NULL;
  if (!l->gate_up_bias) return;
  void *gate_up = malloc((size_t)(2 * t->shared * size_of(t)));
  cut(t, GATE_UP_BIAS, t->E, t->weight[GATE_UP_BIAS], gate_up, size_of(t), 0);
  t->part.gate_up_bias = gate_up, t->part.down_bias = (char *)t->weight[DOWN_BIAS] + t->E * t->H * size_of(t);
}

static void make_grads(test *t) {
  const uint32_t own = MOE_ACCUMULATE_AFFINITIES_GRAD | MOE_ACCUMULATE_ROUTER_LOGITS_GRAD |
                       MOE_ACCUMULATE_ROUTER_WEIGHT_GRAD | MOE_ACCUMULATE_ROUTER_BIAS_GRAD;
  const int64_t grad = (int64_t)moe_dtype_size(t->grad_dtype), pairs = t->T * (t->K + 1);
  uint32_t accumulate = (uint32_t)test_random_range(&t->s, 0, 63);
  if (t->router || t->gate) accumulate |= (uint32_t)test_random_range(&t->s, 0, 7) * 64;
  t->all_weights = malloc((size_t)pairs * 4 + 4), t->all_topk_grad = malloc((size_t)pairs * 4 + 4);
  t->all_index = malloc((size_t)pairs * 4 + 4);
  t->all.topk_index = t->all_index, t->all.topk_weights = t->all_weights;
  t->g = (moe_layer_grads){.x = t->dx[0],
                           .topk_weights = t->router && test_random_chance(&t->s, 2) ? NULL : t->topk_grad[0],
                           .expert_scale = t->scales_grad[0],
                           .gate_up = ordered_tensor(&t->own_grad[0], 0),
                           .down = ordered_tensor(&t->own_grad[1], 0),
                           .up = t->l.orders.up_apart ? ordered_tensor(&t->own_grad[0], 1) : NULL,
                           .gate_up_bias = t->bias_grad[0],
                           .down_bias = t->bias_grad[1],
                           .weight_dtype = t->grad_dtype,
                           .accumulate = accumulate};
  if (!t->g.topk_weights) t->g.accumulate &= ~(uint32_t)MOE_ACCUMULATE_AFFINITIES_GRAD;
  if (t->router) t->g.router_weight = t->router_grad[0], t->g.router_bias = t->router_bias_grad[0];
  if (t->router && test_random_chance(&t->s, 2)) t->g.router_logits = t->logits_grad[0];
  if (!t->g.router_logits) t->g.accumulate &= ~(uint32_t)MOE_ACCUMULATE_ROUTER_LOGITS_GRAD;
  t->all_g = (moe_layer_grads){.x = t->dx[1],
                               .topk_weights = t->all_topk_grad,
                               .gate_up = t->grad[GATE_UP],
                               .down = t->grad[DOWN],
                               .gate_up_bias = t->grad[GATE_UP_BIAS],
                               .down_bias = t->grad[DOWN_BIAS],
                               .weight_dtype = t->grad_dtype,
                               .accumulate = t->g.accumulate & ~own};
  if (!t->shared) return;
  t->part_g.gate_up = ordered_tensor(&t->also_grad[0], 0), t->part_g.down = ordered_tensor(&t->also_grad[1], 0);
  t->part_g.up = t->part.orders.up_apart ? ordered_tensor(&t->also_grad[0], 1) : NULL;
  t->part_g.gate_up_bias = malloc((size_t)(2 * t->shared * grad)), t->part_g.down_bias = malloc((size_t)(t->H * grad));
  cut(t, GATE_UP_BIAS, t->E, t->grad[GATE_UP_BIAS], t->part_g.gate_up_bias, grad, 0);
  cut(t, DOWN_BIAS, t->E, t->grad[DOWN_BIAS], t->part_g.down_bias, grad, 0);
  t->part_g.gate = t->gate_grad[0];
  t->g.shared = &t->part_g;
}

/* -------------------------------------------------------------------------------------------------- what is expected */

/* The shared expert's gate: a router of one expert. */
typedef struct gate {
  moe_router_topk_args args;
  float *logits, *weights, *logits_grad, *weights_grad;
  int32_t *index;
} gate;

static void choose(test *t, moe_context *ctx, gate *g) {
  moe_router_topk_args args = t->choose;
  args.T = t->T, args.H = t->H, args.E = t->E + t->N, args.K = t->K, args.hidden_states = t->x;
  args.router_logits = t->logits[1], args.expert_index = t->index[1], args.expert_weights = t->weights[1];
  if (t->router) assert_int_equal(parts_calls[t->dtype].router(ctx, &args), MOE_OK);
  float **room[] = {&g->logits, &g->weights, &g->logits_grad, &g->weights_grad};
  for (int i = 0; i < 4; i++) *room[i] = malloc((size_t)t->T * 4 + 4);
  g->index = malloc((size_t)t->T * 4 + 4);
  g->args = (moe_router_topk_args){.T = t->T,
                                   .H = t->H,
                                   .E = 1,
                                   .K = 1,
                                   .hidden_states = t->x,
                                   .router_weight = t->gate_weight,
                                   .router_logits = g->logits,
                                   .expert_index = g->index,
                                   .expert_weights = g->weights,
                                   .config = {.score_function = MOE_SCORE_SIGMOID}};
  assert_int_equal(parts_calls[t->dtype].router(ctx, &g->args), MOE_OK);
  for (int64_t p = 0; p < t->T * (t->K + 1); p++) {
    const int64_t token = p / (t->K + 1), k = p % (t->K + 1), from = token * t->K + k;
    t->all_index[p] = t->shared ? (int32_t)t->E : -1, t->all_weights[p] = t->gate ? g->weights[token] : 1;
    if (k == t->K) continue;
    const int32_t e = t->index[1][from];
    t->all_index[p] = e + (e >= t->E && t->shared), t->all_weights[p] = t->weights[1][from];
    if (t->scale && e >= 0 && e < t->E) t->all_weights[p] *= t->scales[e];
  }
}

/* From the gradients of all experts' weights to those of topk_weights and scales. */
static void expect_weights(test *t, gate *g) {
  const int add = (t->g.accumulate & MOE_ACCUMULATE_AFFINITIES_GRAD) != 0;
  double *sum = calloc((size_t)t->E, sizeof *sum);
  for (int64_t p = 0; p < t->T * t->K; p++) {
    const int32_t e = t->index[1][p];
    float grad = t->all_topk_grad[p / t->K * (t->K + 1) + p % t->K];
    if (e >= 0 && e < t->E) sum[e] += (double)t->weights[1][p] * (double)grad;
    if (e >= 0 && e < t->E && t->scale) grad *= t->scales[e];
    t->topk_grad[1][p] = add ? t->topk_grad[1][p] + grad : grad;
  }
  for (int64_t e = 0; e < t->E && t->scale; e++)
    t->scales_grad[1][e] = add ? t->scales_grad[1][e] + (float)sum[e] : (float)sum[e];
  for (int64_t i = 0; i < t->T; i++) g->weights_grad[i] = t->all_topk_grad[i * (t->K + 1) + t->K];
  free(sum);
}

static moe_router_topk_bwd_args bwd_of(const test *t, const moe_router_topk_args *a, const float *weights_grad,
                                       float *logits_grad) {
  return (moe_router_topk_bwd_args){.T = a->T,
                                    .H = a->H,
                                    .E = a->E,
                                    .K = a->K,
                                    .hidden_states = t->x,
                                    .router_weight = a->router_weight,
                                    .router_logits = a->router_logits,
                                    .expert_index = a->expert_index,
                                    .config = a->config,
                                    .expert_weights_grad = weights_grad,
                                    .router_logits_grad = logits_grad,
                                    .weight_grad_dtype = t->grad_dtype,
                                    .hidden_states_grad = t->dx[1],
                                    .accumulate = MOE_ACCUMULATE_HIDDEN_STATES_GRAD};
}

static void expect(test *t, moe_context *ctx) {
  gate g;
  choose(t, ctx, &g);
  parts_run_forward(t->dtype, ctx, t->all, t->y[1], NULL);
  parts_run_backward(t->dtype, ctx, t->all, NULL, t->dy, &t->all_g);
  expect_weights(t, &g);
  if (t->router) {
    moe_router_topk_args a = t->choose;
    a.T = t->T, a.H = t->H, a.E = t->E + t->N, a.K = t->K, a.router_logits = t->logits[1], a.expert_index = t->index[1];
    moe_router_topk_bwd_args args = bwd_of(t, &a, t->topk_grad[1], t->logits_grad[1]);
    args.router_weight_grad = t->router_grad[1], args.router_bias_grad = t->router_bias_grad[1];
    args.accumulate |= t->g.accumulate & (MOE_ACCUMULATE_ROUTER_LOGITS_GRAD | MOE_ACCUMULATE_ROUTER_WEIGHT_GRAD |
                                          MOE_ACCUMULATE_ROUTER_BIAS_GRAD);
    assert_int_equal(parts_calls[t->dtype].router_bwd(ctx, &args), MOE_OK);
  }
  if (t->gate) {
    moe_router_topk_bwd_args args = bwd_of(t, &g.args, g.weights_grad, g.logits_grad);
    args.router_weight_grad = t->gate_grad[1];
    args.accumulate |= t->g.accumulate & MOE_ACCUMULATE_ROUTER_WEIGHT_GRAD;
    assert_int_equal(parts_calls[t->dtype].router_bwd(ctx, &args), MOE_OK);
  }
  free(g.logits), free(g.weights), free(g.logits_grad), free(g.weights_grad), free(g.index);
}

/* ------------------------------------------------------------------------------------------------------------ checks */

static void run(test *t, moe_context *ctx) {
  size_t bytes;
  assert_int_equal(parts_calls[t->dtype].saved_bytes(ctx, &t->l, &bytes), MOE_OK);
  void *saved = memset(malloc(bytes + 1), 0xff, bytes + 1);
  const int keep = test_random_chance(&t->s, 2), give = keep && !test_random_chance(&t->s, 3);
  parts_run_forward(t->dtype, ctx, t->l, t->y[0], keep ? saved : NULL);
  assert_int_equal(((unsigned char *)saved)[bytes], 0xff);
  parts_run_backward(t->dtype, ctx, t->l, give ? saved : NULL, t->dy, &t->g);
  free(saved);
}

/* Whether the weights' gradients differ. */
static int weights_differ(test *t, int which) {
  const int64_t grad = (int64_t)moe_dtype_size(t->grad_dtype),
                n = experts_of(t) * rows_of(t, which) * columns_of(t, which);
  char *got = calloc((size_t)n, (size_t)grad);
  pad(t, which, t->grad[which], grad);
  for (int64_t e = 0; e < t->E && which >= GATE_UP_BIAS; e++) {
    const int64_t row = which == DOWN_BIAS ? t->H : 2 * t->I;
    cut(t, which, e, got, (char *)t->bias_grad[which - GATE_UP_BIAS] + e * row * grad, grad, 1);
  }
  if (which < GATE_UP_BIAS) exchange(t, which, &t->own_grad[which], 0, got, 1);
  if (t->shared && which < GATE_UP_BIAS) exchange(t, which, &t->also_grad[which], 1, got, 1);
  if (t->shared && which >= GATE_UP_BIAS)
    cut(t, which, t->E, got, which == DOWN_BIAS ? t->part_g.down_bias : t->part_g.gate_up_bias, grad, 1);
  const int differ = memcmp(got, t->grad[which], (size_t)(n * grad)) != 0;
  free(got);
  return differ;
}

static const char *difference(test *t) {
  static const char *const name[WEIGHTS] = {"gate_up", "down", "gate_up_bias", "down_bias"};
  const int64_t grad = (int64_t)moe_dtype_size(t->grad_dtype), tokens = t->T * t->H * size_of(t),
                pairs = t->T * t->K * 4, experts = t->E + t->N;
  const struct {
    const char *name;
    const void *want, *got;
    int64_t bytes;
  } each[] = {{"y", t->y[1], t->y[0], tokens},
              {"x", t->dx[1], t->dx[0], tokens},
              {"topk_weights", t->topk_grad[1], t->topk_grad[0], t->g.topk_weights ? pairs : 0},
              {"expert_scale", t->scales_grad[1], t->scales_grad[0], t->E * 4},
              {"index", t->index[1], t->index[0], pairs},
              {"weights", t->weights[1], t->weights[0], pairs},
              {"logits", t->logits[1], t->logits[0], t->T * experts * 4},
              {"router_logits", t->logits_grad[1], t->logits_grad[0], t->g.router_logits ? t->T * experts * 4 : 0},
              {"router_weight", t->router_grad[1], t->router_grad[0], t->H * experts * grad},
              {"router_bias", t->router_bias_grad[1], t->router_bias_grad[0], experts * grad},
              {"gate", t->gate_grad[1], t->gate_grad[0], t->H * grad}};
  for (size_t i = 0; i < sizeof each / sizeof *each; i++)
    if (memcmp(each[i].want, each[i].got, (size_t)each[i].bytes) != 0) return each[i].name;
  for (int i = 0; i < WEIGHTS; i++)
    if (weights_differ(t, i)) return name[i];
  return NULL;
}

static void close_test(test *t) {
  for (int i = 0; i < WEIGHTS; i++) free(t->weight[i]), free(t->grad[i]);
  for (int i = 0; i < 2; i++) {
    ordered_close(&t->own[i]), ordered_close(&t->own_grad[i]), free(t->bias[i]), free(t->bias_grad[i]);
    if (t->shared) ordered_close(&t->also[i]), ordered_close(&t->also_grad[i]);
    free(t->gate_grad[i]), free(t->router_grad[i]), free(t->router_bias_grad[i]), free(t->logits[i]),
        free(t->weights[i]);
    free(t->logits_grad[i]), free(t->scales_grad[i]), free(t->topk_grad[i]), free(t->index[i]), free(t->y[i]);
    free(t->dx[i]);
  }
  free((void *)(uintptr_t)t->part.gate_up_bias), free(t->part_g.gate_up_bias), free(t->part_g.down_bias);
  free(t->gate_weight), free(t->router_weight), free(t->router_bias), free(t->scales), free(t->x), free(t->dy);
  free(t->all_weights), free(t->all_topk_grad), free(t->all_index);
}

static void as_composed(void **state) {
  const int64_t cases = test_cases(CONFIGURATIONS, CONFIGURATIONS / 16);
  for (int64_t i = 0; i < cases; i++) {
    if (!test_use_isa((int)(i % TEST_ISA_COUNT))) continue;
    struct test_pool pool = {.seed = (uint64_t)i};
    moe_context ctx = {.num_threads = (int32_t)(i % 5),
                       .schedule = (moe_schedule)(i % MOE_SCHEDULE_COUNT_),
                       .parallel_for = i % 3 ? test_serial_parallel_for : test_pool_parallel_for,
                       .parallel_for_user = &pool,
                       .allocate = parts_take,
                       .release = parts_give};
    test t = {.dtype = *(const moe_dtype *)*state};
    choose_sizes(&t, (uint64_t)i);
    t.l.config = choose_config(&t);
    make_weights(&t), make_router(&t), make_layers(&t), make_grads(&t);
    expect(&t, &ctx);
    run(&t, &ctx);
    const char *what = difference(&t);
    if (what)
      fail_msg("%s differs | case %d T %d H %d I %d shared %d E %d+%d K %d gate %d scale %d router %d mode %d", what,
               (int)i, (int)t.T, (int)t.H, (int)t.I, (int)t.shared, (int)t.E, (int)t.N, (int)t.K, t.gate, t.scale,
               t.router, (int)t.l.config.affinity_mode);
    close_test(&t);
  }
  test_use_best_isa();
}

/* ----------------------------------------------------------------------------------------------------------- refused */

static void refused(void **state) {
  (void)state;
  enum { T = 3, H = 4, I = 2, E = 2, K = 1 };
  static float x[T * H], y[T * H], gate_up[E * H * 2 * I], down[E * I * H], w[H * E], logits[T * E], weights[T * K];
  static float saved[1000];
  static int32_t index[T * K];
  moe_context ctx = {.allocate = parts_take, .release = parts_give};
  moe_shared_expert shared = {.I = I, .gate_up = gate_up, .down = down, .gate = w};
  moe_router_topk_args router = {
      .router_weight = w, .router_logits = logits, .expert_index = index, .expert_weights = weights};
  const moe_shared_expert usual_shared = shared;
  const moe_router_topk_args usual_router = router;
  const moe_layer usual = {.T = T,
                           .H = H,
                           .I = I,
                           .E = E,
                           .K = K,
                           .x = x,
                           .router = &router,
                           .shared = &shared,
                           .gate_up = gate_up,
                           .down = down};
  const moe_shared_expert_grads also = {.gate = w};
  const moe_quantized_weight no_codes = {.scales = w};
  const moe_quantized_weight misaligned = {.element = MOE_ELEMENT_INT4,
                                           .scaling = MOE_WEIGHT_GROUP,
                                           .block = 2,
                                           .codes = w,
                                           .scales = w,
                                           .global_scale = (const float *)(const void *)((const char *)w + 1)};
  moe_layer_grads grads = {.x = y};
  moe_layer l = usual;
  size_t bytes;
#define EXPECT(status, begins, call, ...)                  \
  l = usual, shared = usual_shared, router = usual_router; \
  __VA_ARGS__;                                             \
  assert_int_equal(call, MOE_##status);                    \
  if (strncmp(ctx.message, begins, strlen(begins)) != 0) fail_msg("%s", ctx.message)
#define FORWARD  moe_layer_forward_f32(&ctx, &l, y, NULL)
#define BACKWARD moe_layer_backward_f32(&ctx, &l, NULL, x, &grads)
  EXPECT(OK, "", FORWARD, (void)0);
  EXPECT(ERROR_INVALID_SHAPE, "shared->I ", FORWARD, shared.I = 0);
  EXPECT(ERROR_INVALID_SHAPE, "shared->I ", moe_layer_saved_bytes_f32(&ctx, &l, &bytes), shared.I = -1);
  EXPECT(ERROR_NULL_ARGUMENT, "shared->gate_up ", FORWARD, shared.gate_up = NULL);
  EXPECT(ERROR_NULL_ARGUMENT, "shared->down ", FORWARD, shared.down = NULL);
  EXPECT(ERROR_NULL_ARGUMENT, "shared->up ", BACKWARD, shared.orders.up_apart = 1);
  EXPECT(ERROR_INVALID_OPTION, "shared->orders.per_expert ", FORWARD, shared.orders.per_expert = 1);
  EXPECT(ERROR_INVALID_OPTION, "shared->orders.down ", FORWARD, shared.orders.down = MOE_ORDER_INTERLEAVED);
  EXPECT(ERROR_MISALIGNED, "shared->gate ", FORWARD, shared.gate = (char *)w + 1);
  EXPECT(ERROR_NULL_ARGUMENT, "shared->quantized_down->codes ", FORWARD, shared.quantized_down = &no_codes);
  EXPECT(ERROR_MISALIGNED, "shared->quantized_down->global_scale ", FORWARD, shared.quantized_down = &misaligned);
  EXPECT(ERROR_NULL_ARGUMENT, "router->router_weight ", FORWARD, router.router_weight = NULL);
  EXPECT(ERROR_NULL_ARGUMENT, "router->router_logits ", FORWARD, router.router_logits = NULL);
  EXPECT(ERROR_NULL_ARGUMENT, "router->expert_index ", FORWARD, router.expert_index = NULL);
  EXPECT(ERROR_INVALID_SHAPE, "router->K ", FORWARD, l.K = 3);
  EXPECT(ERROR_INVALID_OPTION, "router->config.", FORWARD, router.config.renormalize_epsilon = -1);
  EXPECT(ERROR_OVERLAP, "router->router_logits ", FORWARD, router.router_logits = x);
  EXPECT(ERROR_INVALID_OPTION, "config.affinity_mode ", FORWARD, l.expert_scale = w,
         l.config.affinity_mode = MOE_AFFINITY_PRE_SCALE);
  EXPECT(ERROR_INVALID_OPTION, "recompute ", FORWARD, l.recompute = 4);
  EXPECT(ERROR_INVALID_OPTION, "keep_results ", FORWARD, l.keep_results = 2);
  EXPECT(ERROR_NULL_ARGUMENT, "saved ", BACKWARD, l.keep_results = 1);
  EXPECT(ERROR_OVERLAP, "grads.shared->gate ", BACKWARD, grads.shared = &also);
  grads.shared = NULL, grads.router_weight = gate_up;
  EXPECT(ERROR_OVERLAP, "grads.router_weight ", BACKWARD, (void)0);
  index[1] = E, grads.router_weight = NULL;
  EXPECT(ERROR_INVALID_INDEX, "router->expert_index ", BACKWARD, (void)0);
  router.indices_given = 1;
  const moe_router_topk_args given = router;
  EXPECT(ERROR_INVALID_INDEX, "router->expert_index ", FORWARD, router = given);
  EXPECT(ERROR_OVERLAP, "saved ", moe_layer_forward_f32(&ctx, &l, y, x), (void)0);
  EXPECT(OK, "", moe_layer_forward_f32(&ctx, &l, y, saved), (void)0);
}

int main(void) {
  const struct CMUnitTest tests[] = {EACH_DTYPE(as_composed), cmocka_unit_test(refused)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
