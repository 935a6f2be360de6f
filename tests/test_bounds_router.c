/* The router, its backward and its losses on random fills: every element within the bound derived in
   reference/bounded_router.h, every selection right. Logits, once stored, are the exact input of what follows them. */
#include "reference/bounded_router.h"
#include "support/arena.h"
#include "support/cases.h"
#include "support/pool.h"
#include "support/test.h"

enum { LOGITS, WEIGHTS, LOGITS_GRAD, WEIGHT_GRAD, BIAS_GRAD, HIDDEN_GRAD, LOSS, TENSORS };
static const char *const tensor_name[TENSORS] = {
    "router_logits",    "expert_weights",     "router_logits_grad", "router_weight_grad",
    "router_bias_grad", "hidden_states_grad", "loss"};
static double worst[TENSORS];

typedef struct fixture {
  uint64_t seed, rng;
  moe_dtype dtype, affinity_dtype, weight_grad_dtype;
  int64_t T, H, E, K;
  int with_product, with_bias, with_mask, with_selection_bias, by_affinity;
  uint32_t accumulate;
  moe_router_config config;
  moe_isa isa;
  test_tensor x, w, b, logits, selection_bias, weights, dw, affinity_grad;
  test_tensor grad[HIDDEN_GRAD + 1], start[HIDDEN_GRAD + 1]; /* LOGITS_GRAD.. only */
  uint8_t *mask;
  int32_t *index;
  test_arena arena;
  double *z, *token_dw;
  bounded *p, *q, *dz;
} fixture;

/* ---------------------------------------------------------------------------------------------------------- fixture */

static void fail_at(const fixture *x, const char *what, int64_t i, double got, bounded want) {
  const moe_router_config *o = &x->config;
  fail_msg("%s[%d] is %.9g, not within %.3g of %.9g | case seed 0x%" PRIx64
           " dtype %s isa %s | T %d H %d E %d K %d | score %d "
           "order %d renormalize %d epsilon %g factor %g groups %d/%d | product %d bias %d mask %d selection_bias %d "
           "by_affinity "
           "%d (%s) weight_grad %s accumulate 0x%x",
           what, (int)i, got, want.e, want.v, x->seed, test_dtype_name(x->dtype), moe_isa_name(x->isa), (int)x->T,
           (int)x->H, (int)x->E, (int)x->K, (int)o->score_function, (int)o->score_order, o->renormalize,
           (double)o->renormalize_epsilon, (double)o->routed_scaling_factor, o->topk_groups, o->num_groups,
           x->with_product, x->with_bias, x->with_mask, x->with_selection_bias, x->by_affinity,
           test_dtype_name(x->affinity_dtype), test_dtype_name(x->weight_grad_dtype), (unsigned)x->accumulate);
}

static void fixture_options(fixture *x, moe_dtype dtype) {
  uint64_t *rng = &x->rng;
  int large = test_with(rng, 0.1);
  x->dtype = dtype, x->affinity_dtype = test_any_dtype(rng, dtype), x->weight_grad_dtype = test_any_dtype(rng, dtype);
  x->T = test_random_range(rng, 1, large ? 150 : 20), x->H = test_random_range(rng, 1, large ? 300 : 40);
  x->E = test_random_range(rng, 1, large ? 140 : 20), x->K = test_random_range(rng, 1, x->E < 8 ? x->E : 8);
  x->with_product = test_with(rng, 0.6), x->with_bias = test_with(rng, 0.5), x->with_mask = test_with(rng, 0.3);
  x->by_affinity = test_with(rng, 0.5);
  x->config = test_router_config(rng);
  if (x->E % 3 == 0 && x->K <= x->E / 3 * 2 && test_with(rng, 0.5)) x->config.num_groups = 3, x->config.topk_groups = 2;
  x->with_selection_bias = test_with(rng, 0.3);
  if (test_with(rng, 0.4))
    x->accumulate = (test_with(rng, 0.5) ? MOE_ACCUMULATE_ROUTER_LOGITS_GRAD : 0u) |
                    (test_with(rng, 0.5) ? MOE_ACCUMULATE_ROUTER_WEIGHT_GRAD : 0u) |
                    (test_with(rng, 0.5) ? MOE_ACCUMULATE_ROUTER_BIAS_GRAD : 0u) |
                    (test_with(rng, 0.5) ? MOE_ACCUMULATE_HIDDEN_STATES_GRAD : 0u);
}

static void fixture_layout(fixture *x) {
  x->z = test_carve(&x->arena, x->T * x->E, sizeof *x->z), x->dz = test_carve(&x->arena, x->T * x->E, sizeof *x->dz);
  x->p = test_carve(&x->arena, x->E, sizeof *x->p), x->q = test_carve(&x->arena, x->E, sizeof *x->q);
  x->token_dw = test_carve(&x->arena, x->K, sizeof *x->token_dw);
}

/* Logits of a size of about 4, now and then wide apart, now and then on a grid so that there are ties, of 0
   and -0 too. */
static void fixture_fill(fixture *x) {
  uint64_t *rng = &x->rng;
  double scale = test_with(rng, 0.2) ? 60 : 4;
  int grid = test_with(rng, 0.2);
  test_fill_uniform(&x->x, rng, 2), test_fill_uniform(&x->w, rng, scale / sqrt((double)x->H)),
      test_fill_uniform(&x->b, rng, 1);
  for (int64_t i = 0; i < x->logits.count; ++i)
    test_tensor_set(&x->logits, i,
                    grid ? copysign((double)test_random_range(rng, 0, 6) / 2, test_signed(rng))
                         : scale * test_signed(rng));
  test_fill_uniform(&x->selection_bias, rng, 0.5), test_fill_uniform(&x->dw, rng, 1),
      test_fill_uniform(&x->affinity_grad, rng, 1);
  for (int i = LOGITS_GRAD; i <= HIDDEN_GRAD; ++i) test_fill_uniform(&x->start[i], rng, 1);
  for (int64_t t = 0; t < x->T; ++t) x->mask[t] = test_with(rng, 0.8) ? 1 : 0;
}

static void fixture_new(fixture *x, uint64_t seed, moe_dtype dtype) {
  memset(x, 0, sizeof *x);
  x->seed = x->rng = seed;
  fixture_options(x, dtype);
  x->x = test_tensor_new(dtype, x->T * x->H), x->w = test_tensor_new(dtype, x->H * x->E),
  x->b = test_tensor_new(dtype, x->E);
  x->logits = test_tensor_new(MOE_DTYPE_F32, x->T * x->E), x->selection_bias = test_tensor_new(MOE_DTYPE_F32, x->E);
  x->weights = test_tensor_new(MOE_DTYPE_F32, x->T * x->K), x->dw = test_tensor_new(MOE_DTYPE_F32, x->T * x->K);
  x->affinity_grad = test_tensor_new(x->affinity_dtype, x->T * x->E);
  const moe_dtype types[] = {MOE_DTYPE_F32, x->weight_grad_dtype, x->weight_grad_dtype, dtype};
  const int64_t sizes[] = {x->T * x->E, x->H * x->E, x->E, x->T * x->H};
  for (int i = LOGITS_GRAD; i <= HIDDEN_GRAD; ++i) {
    x->grad[i] = test_tensor_new(types[i - LOGITS_GRAD], sizes[i - LOGITS_GRAD]);
    x->start[i] = test_tensor_new(types[i - LOGITS_GRAD], sizes[i - LOGITS_GRAD]);
  }
  x->mask = calloc((size_t)x->T, 1), x->index = calloc((size_t)(x->T * x->K), sizeof *x->index);
  fixture_layout(x);
  test_arena_allocate(&x->arena);
  fixture_layout(x);
  fixture_fill(x);
}

static void fixture_free(fixture *x) {
  test_tensor *single[] = {&x->x, &x->w, &x->b, &x->logits, &x->selection_bias, &x->weights, &x->dw, &x->affinity_grad};
  for (size_t i = 0; i < sizeof single / sizeof *single; ++i) test_tensor_free(single[i]);
  for (int i = LOGITS_GRAD; i <= HIDDEN_GRAD; ++i) test_tensor_free(&x->grad[i]), test_tensor_free(&x->start[i]);
  free(x->mask), free(x->index);
  test_arena_free(&x->arena);
}

/* ------------------------------------------------------------------------------------------------------------ calls */

static void expect_ok(const fixture *x, moe_status status, const moe_context *ctx) {
  if (status != MOE_OK) fail_at(x, ctx->message, (int64_t)status, 0, bounded_exact(0));
}

static moe_status call_forward(fixture *x, moe_context *ctx) {
  moe_router_topk_args args = {.T = x->T,
                               .H = x->H,
                               .E = x->E,
                               .K = x->K,
                               .hidden_states = x->with_product ? x->x.data : NULL,
                               .router_weight = x->w.data,
                               .router_bias = x->with_bias ? x->b.data : NULL,
                               .router_logits = x->logits.data,
                               .token_mask = x->with_mask ? x->mask : NULL,
                               .selection_bias = x->with_selection_bias ? x->selection_bias.data : NULL,
                               .config = x->config,
                               .expert_index = x->index,
                               .expert_weights = x->weights.data};
  switch (x->dtype) {
#define TEST_CALL_(name, type, NAME) \
  case MOE_DTYPE_##NAME: return moe_router_topk_##name(ctx, &args);
    MOE_DTYPE_LIST(TEST_CALL_)
#undef TEST_CALL_
    default: return MOE_ERROR_INVALID_OPTION;
  }
}

static moe_status call_backward(fixture *x, moe_context *ctx) {
  moe_router_topk_bwd_args args = {.T = x->T,
                                   .H = x->H,
                                   .E = x->E,
                                   .K = x->K,
                                   .hidden_states = x->x.data,
                                   .router_weight = x->w.data,
                                   .router_logits = x->logits.data,
                                   .expert_index = x->index,
                                   .config = x->config,
                                   .expert_weights_grad = x->by_affinity ? NULL : x->dw.data,
                                   .expert_affinities_masked_grad = x->by_affinity ? x->affinity_grad.data : NULL,
                                   .affinity_dtype = x->affinity_dtype,
                                   .router_logits_grad = x->grad[LOGITS_GRAD].data,
                                   .router_weight_grad = x->grad[WEIGHT_GRAD].data,
                                   .router_bias_grad = x->grad[BIAS_GRAD].data,
                                   .hidden_states_grad = x->grad[HIDDEN_GRAD].data,
                                   .weight_grad_dtype = x->weight_grad_dtype,
                                   .accumulate = x->accumulate};
  for (int i = LOGITS_GRAD; i <= HIDDEN_GRAD; ++i) test_tensor_copy(&x->grad[i], &x->start[i]);
  switch (x->dtype) {
#define TEST_CALL_(name, type, NAME) \
  case MOE_DTYPE_##NAME: return moe_router_topk_bwd_##name(ctx, &args);
    MOE_DTYPE_LIST(TEST_CALL_)
#undef TEST_CALL_
    default: return MOE_ERROR_INVALID_OPTION;
  }
}

/* ----------------------------------------------------------------------------------------------------------- checks */

static void check_element(const fixture *x, int which, const test_tensor *tensor, int64_t i, bounded want) {
  bounded rounded = bounded_round(tensor->dtype, want);
  double got = test_tensor_get(tensor, i);
  if (!bounded_holds(tensor->dtype, rounded, got)) fail_at(x, tensor_name[which], i, got, rounded);
  if (tensor->dtype == MOE_DTYPE_F32 && fabs(got - rounded.v) / rounded.e > worst[which])
    worst[which] = fabs(got - rounded.v) / rounded.e;
}

/* What experts are selected by, for token t, into x->p. */
static void selection_values(const fixture *x, int64_t t) {
  const double *z = x->z + t * x->E;
  int own_logits = (!x->with_selection_bias && !x->config.num_groups) ||
                   (x->config.score_function == MOE_SCORE_SOFTMAX && x->config.score_order == MOE_SCORE_AFTER_TOPK);
  if (!own_logits) bounded_scores(&x->config, x->E, x->K, z, NULL, x->p);
  for (int64_t e = 0; e < x->E; ++e) {
    if (own_logits) x->p[e] = bounded_exact(z[e]);
    if (x->with_selection_bias) x->p[e] = bounded_add(x->p[e], bounded_exact(test_tensor_get(&x->selection_bias, e)));
  }
}

/* Whether expert `a` may stand before expert `b`: its value is larger, or may be, or they tie and its id is lower. */
static int may_precede(const fixture *x, int64_t a, int64_t b) {
  double low = x->p[b].v - x->p[b].e, high = x->p[a].v + x->p[a].e;
  int exact = x->p[a].e == 0 && x->p[b].e == 0;
  return exact ? high > low || (high == low && a < b) : high >= low;
}

/* A group's value, the sum of its two largest, lies between those of the lower and of the upper ends. */
static double group_value(const fixture *x, int64_t group, double end) {
  const int64_t size = x->E / 3;
  double first = -INFINITY, second = -INFINITY;
  for (int64_t e = group * size; e < (group + 1) * size; ++e) {
    const double v = x->p[e].v + end * x->p[e].e;
    second = fmax(second, fmin(first, v)), first = fmax(first, v);
  }
  if (size == 1) return first;
  const double sum = first + second, rounded = test_dtype_round(MOE_DTYPE_F32, sum);
  return end < 0 ? fmin(sum, rounded) : end > 0 ? fmax(sum, rounded) : rounded;
}

/* Whether a group is among the best two, at worst (end -1) or at best (end 1); exact values decide ties by id. */
static int group_stays(const fixture *x, int64_t group, double end) {
  const int exact = x->p[0].e == 0;
  int64_t better = 0;
  for (int64_t g = 0; g < 3; ++g) {
    const double own = group_value(x, group, exact ? 0 : end), other = group_value(x, g, exact ? 0 : -end);
    better += g != group && (other > own || (other == own && (exact ? g < group : end < 0)));
  }
  return better < 2;
}

static void check_selection(const fixture *x, int64_t t) {
  const int32_t *index = x->index + t * x->K;
  int masked = x->with_mask && !x->mask[t];
  selection_values(x, t);
  for (int64_t k = 0; k < x->K; ++k) {
    if (masked ? index[k] != -1 : index[k] < 0 || index[k] >= x->E)
      fail_at(x, "expert_index", t * x->K + k, index[k], bounded_exact(0));
    if (masked) continue;
    if (k > 0 && !may_precede(x, index[k - 1], index[k]))
      fail_at(x, "expert_index (order)", t * x->K + k, index[k], x->p[index[k]]);
    if (x->config.num_groups && !group_stays(x, index[k] / (x->E / 3), 1))
      fail_at(x, "expert_index (group)", t * x->K + k, index[k], x->p[index[k]]);
  }
  for (int64_t e = 0; e < x->E && !masked; ++e) {
    if (selected_f64(x->K, index, e) || (x->config.num_groups && !group_stays(x, e / (x->E / 3), -1))) continue;
    if (!may_precede(x, index[x->K - 1], e)) fail_at(x, "expert_index (missing)", t * x->K, (double)e, x->p[e]);
  }
}

static void check_forward(fixture *x) {
  for (int64_t t = 0; t < x->T; ++t) {
    for (int64_t e = 0; e < x->E; ++e) {
      bounded_sum sum = {0};
      for (int64_t h = 0; h < x->H && x->with_product; ++h)
        bounded_sum_weight(&sum, bounded_exact(test_tensor_get(&x->x, t * x->H + h)),
                           test_tensor_get(&x->w, h * x->E + e), 0);
      bounded z = bounded_chain(&sum);
      if (x->with_product && x->with_bias) z = bounded_add(z, bounded_exact(test_tensor_get(&x->b, e)));
      if (x->with_product) check_element(x, LOGITS, &x->logits, t * x->E + e, z);
      x->z[t * x->E + e] = test_tensor_get(&x->logits, t * x->E + e);
    }
    check_selection(x, t);
    bounded_router_weights(&x->config, x->E, x->K, x->z + t * x->E, x->index + t * x->K, x->p, x->q);
    for (int64_t k = 0; k < x->K; ++k) check_element(x, WEIGHTS, &x->weights, t * x->K + k, x->q[k]);
  }
}

static void check_gradient(const fixture *x, int which, uint32_t bit, int64_t i, bounded want) {
  if (x->accumulate & bit) want = bounded_add(want, bounded_exact(test_tensor_get(&x->start[which], i)));
  check_element(x, which, &x->grad[which], i, want);
}

static void check_logits_grad(fixture *x) {
  for (int64_t t = 0; t < x->T; ++t) {
    const int32_t *index = x->index + t * x->K;
    for (int64_t k = 0; k < x->K; ++k)
      x->token_dw[k] = index[k] < 0      ? 0
                       : x->by_affinity ? test_tensor_get(&x->affinity_grad, t * x->E + index[k])
                                        : test_tensor_get(&x->dw, t * x->K + k);
    bounded_router_weights_bwd(&x->config, x->E, x->K, x->z + t * x->E, index, x->token_dw, x->p, x->q,
                               x->dz + t * x->E);
    for (int64_t e = 0; e < x->E; ++e)
      check_gradient(x, LOGITS_GRAD, MOE_ACCUMULATE_ROUTER_LOGITS_GRAD, t * x->E + e, x->dz[t * x->E + e]);
  }
}

/* The products of the finished router_logits_grad, as stored. */
static void check_products(const fixture *x) {
  const test_tensor *dz = &x->grad[LOGITS_GRAD];
  for (int64_t e = 0; e < x->E; ++e) {
    bounded_sum bias = {0};
    for (int64_t t = 0; t < x->T; ++t)
      bounded_sum_weight(&bias, bounded_exact(test_tensor_get(dz, t * x->E + e)), 1, 0);
    check_gradient(x, BIAS_GRAD, MOE_ACCUMULATE_ROUTER_BIAS_GRAD, e, bounded_sum_depth(&bias, x->T - 1));
    for (int64_t h = 0; h < x->H; ++h) {
      bounded_sum sum = {0};
      for (int64_t t = 0; t < x->T; ++t)
        bounded_sum_weight(&sum, bounded_exact(test_tensor_get(&x->x, t * x->H + h)), test_tensor_get(dz, t * x->E + e),
                           0);
      check_gradient(x, WEIGHT_GRAD, MOE_ACCUMULATE_ROUTER_WEIGHT_GRAD, h * x->E + e, bounded_chain(&sum));
    }
  }
  for (int64_t i = 0; i < x->T * x->H; ++i) {
    bounded_sum sum = {0};
    for (int64_t e = 0; e < x->E; ++e)
      bounded_sum_weight(&sum, bounded_exact(test_tensor_get(dz, i / x->H * x->E + e)),
                         test_tensor_get(&x->w, i % x->H * x->E + e), 0);
    check_gradient(x, HIDDEN_GRAD, MOE_ACCUMULATE_HIDDEN_STATES_GRAD, i, bounded_chain(&sum));
  }
}

/* Both losses; their gradient is added to what router_logits_grad holds. */
static void check_losses(fixture *x, moe_context *ctx) {
  float loss;
  test_tensor value = {MOE_DTYPE_F32, 1, &loss};
  moe_router_loss_args args = {.T = x->T,
                               .E = x->E,
                               .K = x->K,
                               .coefficient = (float)(0.01 + test_unit(&x->rng)),
                               .score_function = x->config.score_function,
                               .router_logits = x->logits.data,
                               .expert_index = x->index,
                               .token_mask = x->with_mask ? x->mask : NULL,
                               .loss = &loss,
                               .router_logits_grad = x->grad[LOGITS_GRAD].data};
  for (int z_loss = 0; z_loss < 2; ++z_loss) {
    test_tensor_copy(&x->grad[LOGITS_GRAD], &x->start[LOGITS_GRAD]);
    for (int64_t i = 0; i < x->T * x->E; ++i) x->dz[i] = bounded_exact(0);
    expect_ok(x, z_loss ? moe_router_z_loss(ctx, &args) : moe_router_load_balance_loss(ctx, &args), ctx);
    bounded want =
        z_loss ? bounded_z_loss(&args, x->z, x->p, x->dz) : bounded_load_balance_loss(&args, x->z, x->p, x->dz);
    check_element(x, LOSS, &value, 0, want);
    for (int64_t i = 0; i < x->T * x->E; ++i)
      check_element(x, LOGITS_GRAD, &x->grad[LOGITS_GRAD], i,
                    bounded_add(x->dz[i], bounded_exact(test_tensor_get(&x->start[LOGITS_GRAD], i))));
  }
}

static void test_router_bounds(void **state) {
  (void)state;
  int64_t calls = 0, cases = test_cases(400, 40);
  for (int64_t n = 0; n < cases; ++n) {
    fixture x;
    fixture_new(&x, test_case_seed(test_seed(4), (uint64_t)n), test_dtype_number(n));
    for (int isa = 0; isa < TEST_ISA_COUNT; ++isa) {
      if (!test_use_isa(isa)) continue;
      struct test_pool pool = {.seed = x.seed};
      moe_context ctx = {.parallel_for = test_pool_parallel_for, .parallel_for_user = &pool, .num_threads = isa + 1,
                         .allocate = test_allocate, .release = test_release};
      x.isa = (moe_isa)isa;
      expect_ok(&x, call_forward(&x, &ctx), &ctx);
      check_forward(&x);
      expect_ok(&x, call_backward(&x, &ctx), &ctx);
      check_logits_grad(&x);
      check_products(&x);
      check_losses(&x, &ctx);
      calls += 4;
    }
    fixture_free(&x);
  }
  test_use_best_isa();
  print_message("%d calls; largest error/bound of float results:", (int)calls);
  for (int i = 0; i < TENSORS; ++i) print_message(" %s %.2f", tensor_name[i], worst[i]);
  print_message("\n");
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_router_bounds)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
