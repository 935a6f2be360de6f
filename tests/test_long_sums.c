/* test_long_sums: losses and bias gradients over a million tokens and over a hundred, of equal and of random terms,
   against sums in double. What is allowed is contract 4's bound, and the few ulp of a term. */
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

/* Contract 4's bound of n terms with this sum of magnitudes. */
static double bound(int64_t n, double all) { return n > 64 ? 0x1p-22 * all : (double)(n - 1) * u * all; }

/* How many tokens: up to a term more than are summed plainly, somewhat more, and all. */
static const int64_t counts_of_tokens[] = {1, 64, 65, 66, 100, 1000, T};
enum { COUNTS = sizeof counts_of_tokens / sizeof *counts_of_tokens };

/* The losses of n tokens, in one call and with counts from outside, as one sequence and as several. */
static void check_losses(int64_t n, int kind) {
  uint64_t seed = 3;
  double z = 0, balance = 0, sums[E] = {0};
  float loss[4];
  int64_t counts[E] = {0};
  const int64_t first[] = {0, n};
  for (int64_t i = 0; i < n * E; i++) logits[i] = term(kind, &seed);
  for (int64_t t = 0; t < n; t++)
    for (int k = 0; k < K; k++) counts[chosen[t * K + k] = (int32_t)(test_random_range(&seed, 0, 1) + k)]++;
  for (int64_t t = 0; t < n; t++) {
    double total = 0;
    for (int e = 0; e < E; e++) total += exp((double)logits[t * E + e]);
    for (int e = 0; e < E; e++) sums[e] += exp((double)logits[t * E + e]) / total;
    z += log(total) * log(total);
  }
  const double N = (double)n;
  for (int e = 0; e < E; e++) balance += E * (double)counts[e] * sums[e] / (K * N * N);
  moe_context ctx = context(2);
  moe_router_loss_args args = {
      .T = n, .E = E, .K = K, .coefficient = 1, .router_logits = logits, .expert_index = chosen, .loss = &loss[0]};
  assert_int_equal(moe_router_z_loss(&ctx, &args), MOE_OK);
  args.loss = &loss[1];
  assert_int_equal(moe_router_load_balance_loss(&ctx, &args), MOE_OK);
  args.loss = &loss[2], args.expert_counts = counts, args.total_tokens = n;
  assert_int_equal(moe_router_load_balance_loss(&ctx, &args), MOE_OK);
  args.loss = &loss[3], args.expert_counts = NULL, args.total_tokens = 0, args.S = 1, args.sequence_first = first;
  assert_int_equal(moe_router_load_balance_loss(&ctx, &args), MOE_OK);
  /* A term: the exponentials' and the logarithm's 2 ulp and the roundings of E sums; a logarithm near 0 is of the size
     of its argument's error. */
  assert_true(fabs(loss[0] - z / N) <= bound(n, z) / N + 24 * u * (1 + z / N));
  for (int i = 1; i < 4; i++) assert_true(fabs(loss[i] - balance) <= bound(n, balance) + 24 * u * balance);
}

static void test_losses(void **state) {
  (void)state;
  for (int n = 0; n < COUNTS; n++)
    for (int kind = 0; kind < 3; kind++) check_losses(counts_of_tokens[n], kind);
}

/* Sequences of all lengths, a million tokens in all: the mean of their losses. */
static void test_sequences(void **state) {
  (void)state;
  enum { S = 3000 };
  static int64_t first[S + 1];
  double balance = 0;
  float loss;
  uint64_t seed = 8;
  for (int64_t i = 0; i < (int64_t)T * E; i++) logits[i] = term(1, &seed);
  for (int s = 1; s < S; s++) first[s] = first[s - 1] + test_random_range(&seed, 1, T / S * 3 / 2);
  first[S] = T;
  for (int s = 0; s < S; s++) {
    double counts[E] = {0}, sums[E] = {0}, N = (double)(first[s + 1] - first[s]);
    for (int64_t t = first[s]; t < first[s + 1]; t++) {
      double total = 0;
      for (int k = 0; k < K; k++) counts[chosen[t * K + k] = (int32_t)(test_random_range(&seed, 0, 1) + k)]++;
      for (int e = 0; e < E; e++) total += exp((double)logits[t * E + e]);
      for (int e = 0; e < E; e++) sums[e] += exp((double)logits[t * E + e]) / total;
    }
    for (int e = 0; e < E; e++) balance += E * counts[e] * sums[e] / (K * N * N) / S;
  }
  moe_context ctx = context(2);
  const moe_router_loss_args args = {.T = T,
                                     .E = E,
                                     .K = K,
                                     .coefficient = 1,
                                     .router_logits = logits,
                                     .expert_index = chosen,
                                     .S = S,
                                     .sequence_first = first,
                                     .loss = &loss};
  assert_int_equal(moe_router_load_balance_loss(&ctx, &args), MOE_OK);
  assert_true(fabs(loss - balance) <= bound(T, balance) + 24 * u * balance);
}

/* Equal logits of 200 experts: the z-loss is within 8 units of 2^-24, and so is the loss of balanced experts, 1; also
   of a tenth of the tokens. */
static void test_equal_logits(void **state) {
  (void)state;
  enum { TOKENS = 100000, EXPERTS = 200 };
  static float z[EXPERTS * 10000];
  static int32_t index[10000];
  static const moe_score_function functions[] = {MOE_SCORE_SOFTMAX, MOE_SCORE_SIGMOID};
  static int64_t counts[EXPERTS];
  for (int e = 0; e < EXPERTS; e++) counts[e] = TOKENS / EXPERTS;
  for (int64_t i = 0; i < 10000; i++) index[i] = (int32_t)(i % EXPERTS);
  for (int value = 0; value < 4; value++) {
    const float v = (float)value * 1.1f - 0.7f;
    const double log_sum = (double)v + log(EXPERTS), want = log_sum * log_sum;
    float loss;
    moe_context ctx = context(2);
    for (int64_t i = 0; i < EXPERTS * 10000; i++) z[i] = v;
    moe_router_loss_args of_equal = {
        .T = 10000, .E = EXPERTS, .K = 1, .coefficient = 1, .router_logits = z, .expert_index = index, .loss = &loss};
    assert_int_equal(moe_router_z_loss(&ctx, &of_equal), MOE_OK);
    assert_true(fabs(loss - want) <= 8 * u * want);
    for (int i = 0; i < 3; i++) {
      of_equal.score_function = functions[i % 2], of_equal.expert_counts = i == 2 ? counts : NULL,
      of_equal.total_tokens = i == 2 ? TOKENS : 0;
      assert_int_equal(moe_router_load_balance_loss(&ctx, &of_equal), MOE_OK);
      assert_true(fabs(loss * (i == 2 ? 10 : 1) - 1) <= 8 * u);
    }
  }
}

static void test_router_bias(void **state) {
  (void)state;
  for (int kind = 0; kind < 3; kind++) {
    uint64_t seed = 4;
    double sum[E] = {0}, all[E] = {0};
    float bias[E];
    moe_context ctx = context(3);
    for (int64_t i = 0; i < (int64_t)T * E; i++) {
      grads[i] = term(kind, &seed);
      sum[i % E] += grads[i], all[i % E] += fabs((double)grads[i]);
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
    for (int e = 0; e < E; e++) assert_true(fabs(bias[e] - sum[e]) <= bound(T, all[e]));
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
    double sum[3] = {0}, all[3] = {0};
    float bias[3][3], *x = logits, *dy = grads;
    moe_context ctx = context(2);
    for (int64_t t = 0; t < T; t++) {
      x[t] = kind ? (float)test_random_range(&seed, -4, 4) : 2, dy[t] = term(kind, &seed);
      a[t] = kind ? (float)test_random_range(&seed, 1, 4) / 4 : 0.25f;
      const double dm = (double)a[t] * dy[t], part[3] = {dm * x[t], dm * 0.5 * x[t], dm};
      for (int i = 0; i < 3; i++) {
        sum[i] += part[i], all[i] += fabs(part[i]);
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
                                            .gate_and_up_proj_bias_grad = bias[0],
                                            .down_proj_bias_grad = bias[0] + 2};
    assert_int_equal(moe_blockwise_mm_bwd_f32(&ctx, &args), MOE_OK);
    static const int32_t none[T];
    static const int32_t all_rows = T;
    const moe_layer layer = {.T = T,
                             .H = 1,
                             .I = 1,
                             .E = 1,
                             .K = 1,
                             .x = x,
                             .topk_index = none,
                             .topk_weights = a,
                             .gate_up = wide,
                             .down = narrow,
                             .config = {.activation = MOE_ACT_IDENTITY}};
    const moe_layer_grads grads_of = {.gate_up_bias = bias[1], .down_bias = bias[1] + 2};
    assert_int_equal(moe_layer_backward_f32(&ctx, &layer, NULL, dy, &grads_of), MOE_OK);
    /* Grouped GEMM: sums of dy*w, and with the weights before the product of dy. */
    moe_grouped_gemm_args gemm = {.num_tokens = T,
                                  .topk = 1,
                                  .E = 1,
                                  .N = 1,
                                  .K = 1,
                                  .m_sizes = &all_rows,
                                  .X = x,
                                  .dY = dy,
                                  .topk_weights = a,
                                  .dW = &bias[2][0],
                                  .bias_grad = &bias[2][2]};
    assert_int_equal(moe_grouped_gemm_dw_f32(&ctx, &gemm), MOE_OK);
    bias[2][0] = bias[0][0], bias[2][1] = bias[0][1];
    for (int i = 0; i < 9; i++)
      assert_true(fabs(bias[i / 3][i % 3] - sum[i % 3]) <= bound(T, all[i % 3]) + 4 * u * all[i % 3]);
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
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_losses),        cmocka_unit_test(test_sequences),
                                     cmocka_unit_test(test_equal_logits),  cmocka_unit_test(test_router_bias),
                                     cmocka_unit_test(test_expert_biases), cmocka_unit_test(test_infinities)};
  return cmocka_run_group_tests_name("long sums", tests, NULL, NULL);
}
