/* test_long_sums: losses and bias gradients over a million tokens, of equal and of random terms, against sums in
   double. What is allowed is contract 4's bound, and the few ulp of a term. */
#include "support/test.h"

#include <math.h>

#include "support/pool.h"
#include "support/random.h"

enum { T = 1000003, E = 3, K = 2 };
static const double u = 0x1p-24;

static float logits[T * E], grads[T * E], a[T * E];
static int32_t chosen[T * K];

static void *allocate(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void release(void *user, void *from, size_t bytes) { (void)user, (void)bytes, free(from); }
static moe_context context(int threads) {
  return (moe_context){
      .allocate = allocate, .release = release, .num_threads = threads, .parallel_for = test_pool_parallel_for};
}

/* Kind 0: all alike; 1: random; 2: random of both signs. */
static float term(int kind, uint64_t *seed) {
  return kind == 0 ? 0.7f : (float)test_random_range(seed, kind == 1 ? 1 : -9999, 10000) * 0x1.3p-12f;
}

/* Bound 4: of n terms with these sums of magnitudes, of all and of the first 64. */
static double bound(double all, double first) { return 0x1p-22 * all + 0x1p-18 * first; }

static void test_losses(void **state) {
  (void)state;
  for (int kind = 0; kind < 3; kind++) {
    uint64_t seed = 3;
    double z = 0, balance = 0, first = 0, counts[E] = {0}, sums[E] = {0};
    float loss[2];
    for (int64_t i = 0; i < (int64_t)T * E; i++) logits[i] = term(kind, &seed);
    for (int64_t t = 0; t < T; t++)
      for (int k = 0; k < K; k++) counts[chosen[t * K + k] = (int32_t)(test_random_range(&seed, 0, 1) + k)]++;
    for (int64_t t = 0; t < T; t++) {
      double total = 0;
      for (int e = 0; e < E; e++) total += exp((double)logits[t * E + e]);
      for (int e = 0; e < E; e++) sums[e] += exp((double)logits[t * E + e]) / total;
      z += log(total) * log(total);
      if (t < 64) first = z;
    }
    for (int e = 0; e < E; e++) balance += E * counts[e] * sums[e] / ((double)K * T * T);
    moe_context ctx = context(2);
    moe_router_loss_args args = {
        .T = T, .E = E, .K = K, .coefficient = 1, .router_logits = logits, .expert_index = chosen, .loss = &loss[0]};
    assert_int_equal(moe_router_z_loss(&ctx, &args), MOE_OK);
    args.loss = &loss[1];
    assert_int_equal(moe_router_load_balance_loss(&ctx, &args), MOE_OK);
    /* A term: the exponentials' and the logarithm's 2 ulp and the roundings of E sums; a logarithm near 0 is of the
       size of its argument's error. */
    assert_true(fabs(loss[0] - z / T) <= bound(z, first) / T + 24 * u * (1 + z / T));
    assert_true(fabs(loss[1] - balance) <= bound(balance, balance * 64 / T) + 24 * u * balance);
  }
}

static void test_router_bias(void **state) {
  (void)state;
  for (int kind = 0; kind < 3; kind++) {
    uint64_t seed = 4;
    double sum[E] = {0}, all[E] = {0}, first[E] = {0};
    float bias[E];
    moe_context ctx = context(3);
    for (int64_t i = 0; i < (int64_t)T * E; i++) {
      grads[i] = term(kind, &seed);
      sum[i % E] += grads[i], all[i % E] += fabs((double)grads[i]);
      if (i < 64 * E) first[i % E] = all[i % E];
    }
    memset(chosen, 0xff, sizeof chosen);
    const moe_router_topk_bwd_args args = {.T = T,
                                           .E = E,
                                           .K = K,
                                           .router_logits = logits,
                                           .expert_index = chosen,
                                           .expert_weights_grad = a,
                                           .router_logits_grad = grads,
                                           .router_bias_grad = bias,
                                           .accumulate = MOE_ACCUMULATE_ROUTER_LOGITS_GRAD};
    assert_int_equal(moe_router_topk_bwd_f32(&ctx, &args), MOE_OK);
    for (int e = 0; e < E; e++) assert_true(fabs(bias[e] - sum[e]) <= bound(all[e], first[e]));
  }
}

/* One expert has all tokens. With the identity g = x*w, u = x, m = g*u; d = m, dm = a*dy. */
static void test_expert_biases(void **state) {
  (void)state;
  static const float wide[2] = {0.5f, 1}, narrow[1] = {1};
  int32_t *ids = malloc(T * sizeof *ids);
  const int32_t expert = 0;
  assert_non_null(ids);
  for (int64_t t = 0; t < T; t++) ids[t] = (int32_t)t;
  for (int kind = 0; kind < 3; kind++) {
    uint64_t seed = 5;
    double sum[3] = {0}, all[3] = {0}, first[3] = {0};
    float bias[3], *x = logits, *dy = grads;
    moe_context ctx = context(2);
    for (int64_t t = 0; t < T; t++) {
      x[t] = kind ? (float)test_random_range(&seed, -4, 4) : 2, dy[t] = term(kind, &seed);
      a[t] = kind ? (float)test_random_range(&seed, 1, 4) / 4 : 0.25f;
      const double dm = (double)a[t] * dy[t], part[3] = {dm * x[t], dm * 0.5 * x[t], dm};
      for (int i = 0; i < 3; i++) {
        sum[i] += part[i], all[i] += fabs(part[i]);
        if (t < 64) first[i] = all[i];
      }
    }
    const moe_blockwise_mm_bwd_args args = {.layer = {.T = T,
                                                      .H = 1,
                                                      .I = 1,
                                                      .E = 1,
                                                      .N = 1,
                                                      .B = T,
                                                      .hidden_states = x,
                                                      .expert_affinities_masked = a,
                                                      .gate_up_proj_weight = wide,
                                                      .down_proj_weight = narrow,
                                                      .token_position_to_id = ids,
                                                      .block_to_expert = &expert,
                                                      .config = {.activation = MOE_ACT_IDENTITY}},
                                            .output_hidden_states_grad = dy,
                                            .gate_and_up_proj_bias_grad = bias,
                                            .down_proj_bias_grad = bias + 2};
    assert_int_equal(moe_blockwise_mm_bwd_f32(&ctx, &args), MOE_OK);
    for (int i = 0; i < 3; i++) assert_true(fabs(bias[i] - sum[i]) <= bound(all[i], first[i]) + 4 * u * all[i]);
  }
  free(ids);
}

/* Infinities stay infinite, after the first terms, too; and one with the other sign is NaN. */
static void test_infinities(void **state) {
  (void)state;
  for (int kind = 0; kind < 2; kind++) {
    float bias[1], zero[200] = {0};
    moe_context ctx = context(1);
    for (int i = 0; i < 200; i++) grads[i] = 1, chosen[i] = -1;
    grads[100] = INFINITY;
    if (kind) grads[150] = -INFINITY;
    const moe_router_topk_bwd_args args = {.T = 200,
                                           .E = 1,
                                           .K = 1,
                                           .router_logits = zero,
                                           .expert_index = chosen,
                                           .expert_weights_grad = zero,
                                           .router_logits_grad = grads,
                                           .router_bias_grad = bias,
                                           .accumulate = MOE_ACCUMULATE_ROUTER_LOGITS_GRAD};
    assert_int_equal(moe_router_topk_bwd_f32(&ctx, &args), MOE_OK);
    assert_true(kind ? isnan(bias[0]) : isinf(bias[0]) && bias[0] > 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_losses), cmocka_unit_test(test_router_bias),
                                     cmocka_unit_test(test_expert_biases), cmocka_unit_test(test_infinities)};
  return cmocka_run_group_tests_name("long sums", tests, NULL, NULL);
}
