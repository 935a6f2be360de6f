/* test_expert_twice: a token that names one expert in several slots. In the blockwise layer its affinity is the sum of
   their weights, it has one row, and each slot's weight has the gradient <dY, d>, whether pairs are dropped or not; by
   the numbers of small integers, of which every sum is exact. Sorted slots keep both, and so does every form of a
   routing; losses count both. Then the router's gradient, against double. */
#include "support/test.h"

#include <math.h>

#include "support/problem.h"
#include "support/random.h"

enum { T = 3, E = 4, K = 3, B = 2, N = 8, H = 2, I = 2 };

static char memory[1 << 22];
static void *allocate(void *user, size_t bytes) { return (void)user, assert_true(bytes <= sizeof memory), memory; }
static void release(void *user, void *from, size_t bytes) { (void)user, (void)from, (void)bytes; }
static const moe_context context = {.allocate = allocate, .release = release};

/* Token 0 names expert 2 twice, token 1 expert 0 three times, token 2 expert 2 once and -1 twice. */
static const int32_t chosen[T * K] = {2, 1, 2, 0, 0, 0, -1, 2, -1};
static const float weights[T * K] = {1, 4, 2, 3, -1, 5, 9, 2, 9};
static const float merged[T * E] = {0, 4, 3, 0, 7, 0, 0, 0, 0, 0, 2, 0};

static void test_blocks(void **state) {
  (void)state;
  for (int i = 0; i < 8; i++) {
    moe_context ctx = context;
    float affinities[(T + 1) * E];
    int32_t ids[N * B], experts[N], conditions[N + 1];
    int64_t tokens[E];
    const int drops = i & 1, by_weight = i & 2, skip = i & 4;
    const moe_route_blocks_args a = {.T = T,
                                     .E = E,
                                     .K = K,
                                     .B = B,
                                     .N = N,
                                     .expert_index = chosen,
                                     .expert_weights = weights,
                                     .skip_token = skip ? 1 : 0,
                                     .capacity = drops,
                                     .drop_policy = by_weight ? MOE_DROP_BY_WEIGHT : MOE_DROP_BY_POSITION,
                                     .expert_affinities_masked = affinities,
                                     .token_position_to_id = ids,
                                     .block_to_expert = experts,
                                     .conditions = conditions,
                                     .tokens_per_expert = tokens};
    assert_int_equal(moe_route_blocks(&ctx, &a), MOE_OK);
    for (int j = 0; j < T * E; j++) assert_true(affinities[j] == (drops && j == 2 * E + 2 ? 0.0f : merged[j]));
    const int32_t pad = skip ? -1 : T, first[3][2] = {{1, pad}, {0, pad}, {0, drops ? pad : 2}};
    for (int b = 0; b < 3; b++) {
      assert_int_equal(experts[b], b), assert_int_equal(conditions[b], 1);
      for (int r = 0; r < B; r++) assert_int_equal(ids[b * B + r], first[b][r]);
    }
    for (int b = 3; b < N; b++) assert_int_equal(conditions[b], 0);
    assert_true(tokens[0] == 1 && tokens[1] == 1 && tokens[2] == 2 && tokens[3] == 0);
  }
}

/* y of a token, and its affinities' gradients, in double. */
static void expect_token(int t, const float *x, const float *dy, const float *wide, const float *narrow, double *y,
                         double *grad) {
  for (int k = 0; k < K; k++) {
    const int e = chosen[t * K + k];
    double m[I], dot = 0;
    for (int i = 0; i < I && e >= 0; i++) {
      double g = 0, u = 0;
      for (int h = 0; h < H; h++) {
        const float *row = wide + (e * H + h) * 2 * I;
        g += (double)x[t * H + h] * row[i], u += (double)x[t * H + h] * row[I + i];
      }
      m[i] = g * u;
    }
    for (int h = 0; h < H && e >= 0; h++) {
      double d = 0;
      for (int i = 0; i < I; i++) d += m[i] * narrow[(e * I + i) * H + h];
      y[h] += weights[t * K + k] * d, dot += dy[t * H + h] * d;
    }
    if (e >= 0) grad[e] = dot; /* of this slot's weight */
  }
}

/* Expert 2's sum of weights, 3, is more than token 2's 2, though each of them is less. */
static void test_layer(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  float affinities[(T + 1) * E], da[T * E], x[T * H], dy[T * H], wide[E * H * 2 * I], narrow[E * I * H], y[T * H];
  float stored[4][E * H * 2 * I], result[T * H]; /* of any type */
  int32_t ids[N * B], experts[N];
  uint64_t seed = 5;
  moe_context ctx = context;
  for (int i = 0; i < E * H * 2 * I; i++) wide[i] = (float)test_random_range(&seed, -2, 2);
  for (int i = 0; i < E * I * H; i++) narrow[i] = (float)test_random_range(&seed, -2, 2);
  for (int i = 0; i < T * H; i++)
    x[i] = (float)test_random_range(&seed, 1, 2), dy[i] = (float)test_random_range(&seed, 1, 2);
  test_from_f32(dtype, stored[0], x, T * H), test_from_f32(dtype, stored[1], dy, T * H);
  test_from_f32(dtype, stored[2], wide, E * H * 2 * I), test_from_f32(dtype, stored[3], narrow, E * I * H);
  const moe_route_blocks_args route = {.T = T,
                                       .E = E,
                                       .K = K,
                                       .B = B,
                                       .N = N,
                                       .expert_index = chosen,
                                       .expert_weights = weights,
                                       .expert_affinities_masked = affinities,
                                       .token_position_to_id = ids,
                                       .block_to_expert = experts};
  const moe_blockwise_layer layer = {.T = T,
                                     .H = H,
                                     .I = I,
                                     .E = E,
                                     .N = N,
                                     .B = B,
                                     .hidden_states = stored[0],
                                     .expert_affinities_masked = affinities,
                                     .gate_up_proj_weight = stored[2],
                                     .down_proj_weight = stored[3],
                                     .token_position_to_id = ids,
                                     .block_to_expert = experts,
                                     .config = {.activation = MOE_ACT_IDENTITY}};
  const struct problem_args args = {
      .dtype = dtype,
      .forward = {.layer = layer, .output = result},
      .backward = {.layer = layer, .output_hidden_states_grad = stored[1], .expert_affinities_masked_grad = da}};
  assert_int_equal(moe_route_blocks(&ctx, &route), MOE_OK);
  assert_int_equal(problem_call(PROBLEM_FORWARD, &ctx, &args), MOE_OK);
  assert_int_equal(problem_call(PROBLEM_BACKWARD, &ctx, &args), MOE_OK);
  assert_int_equal(test_to_f32(dtype, y, result, T * H), MOE_OK);
  for (int t = 0; t < T; t++) {
    double sum[H] = {0}, grad[E] = {0};
    expect_token(t, x, dy, wide, narrow, sum, grad);
    for (int h = 0; h < H; h++)
      if (dtype != MOE_DTYPE_BF16 || fabs(sum[h]) <= 256) assert_true(y[t * H + h] == sum[h]);
    for (int e = 0; e < E; e++) assert_true(da[t * E + e] == grad[e]);
  }
}

/* The router's backward where slots share an expert: dz by the chain rule over slots, in double. */
static void test_router(void **state) {
  (void)state;
  enum { CASES = 300, EXPERTS = 5, SLOTS = 4 };
  uint64_t seed = 9;
  for (int n = 0; n < CASES; n++) {
    const moe_router_config config = {.score_function = (moe_score_function)(n % MOE_SCORE_COUNT_),
                                      .score_order = n / 3 % 2 ? MOE_SCORE_BEFORE_TOPK : MOE_SCORE_AFTER_TOPK,
                                      .renormalize = n / 6 % 2};
    float z[EXPERTS], dw[SLOTS], dz[EXPERTS];
    int32_t index[SLOTS];
    for (int e = 0; e < EXPERTS; e++) z[e] = (float)test_random_range(&seed, -300, 300) / 128;
    for (int k = 0; k < SLOTS; k++)
      index[k] = (int32_t)test_random_range(&seed, 0, 2), dw[k] = (float)test_random_range(&seed, -64, 64) / 32;
    const int after = config.score_function == MOE_SCORE_SOFTMAX && config.score_order == MOE_SCORE_AFTER_TOPK;
    double want[EXPERTS], size = 0;
    for (int e = 0; e < EXPERTS; e++) { /* central difference of sum_k dw_k*w_k(z) */
      double side[2];
      for (int j = 0; j < 2; j++) {
        const double step = 1e-5;
        double s[SLOTS], total = 0, all = 0, value = 0, w[EXPERTS];
        for (int i = 0; i < EXPERTS; i++) {
          const double at = z[i] + (i == e ? j ? -step : step : 0);
          w[i] = config.score_function == MOE_SCORE_SOFTMAX   ? exp(at)
                 : config.score_function == MOE_SCORE_SIGMOID ? 1 / (1 + exp(-at))
                                                              : sqrt(log1p(exp(at)));
          all += w[i];
        }
        for (int k = 0; k < SLOTS; k++) s[k] = w[index[k]], total += s[k];
        const double divisor = after || config.renormalize                  ? total
                               : config.score_function == MOE_SCORE_SOFTMAX ? all
                                                                            : 1;
        for (int k = 0; k < SLOTS; k++) value += dw[k] * s[k] / divisor;
        side[j] = value / (2 * step);
      }
      want[e] = side[0] - side[1];
    }
    for (int k = 0; k < SLOTS; k++) size += fabs((double)dw[k]);
    moe_context ctx = context;
    const moe_router_topk_bwd_args a = {.T = 1,
                                        .E = EXPERTS,
                                        .K = SLOTS,
                                        .router_logits = z,
                                        .expert_index = index,
                                        .config = config,
                                        .expert_weights_grad = dw,
                                        .router_logits_grad = dz};
    assert_int_equal(moe_router_topk_bwd_f32(&ctx, &a), MOE_OK);
    /* Some twenty operations within 2^-24 or 2 ulp each, on numbers up to size; and 1e-9 of the difference. */
    for (int e = 0; e < EXPERTS; e++) assert_true(fabs(dz[e] - want[e]) <= size * (40 * 0x1p-24 + 1e-9));
  }
}

/* Positions of the slots with an expert, experts in ascending order: 2 has token 0's slots 0 and 2, and token 2's 7. */
static const int32_t sizes[E] = {3, 1, 3, 0}, gathered[T * K] = {3, 4, 5, 1, 0, 2, 7, -1, -1};

/* Every form of the routing has both slots, and comes back from each other one; ranks are sent both. */
static void test_routings(void **state) {
  (void)state;
  moe_context ctx = context;
  int32_t m_sizes[E], gather[T * K], ids[N * B], experts[N], conditions[N + 1], back[T * K], sent[2], at[2];
  int64_t tokens[E];
  moe_routing_args a = {.T = T,
                        .E = E,
                        .K = K,
                        .B = B,
                        .N = N,
                        .expert_index = back,
                        .m_sizes = m_sizes,
                        .gather_indices = gather,
                        .token_position_to_id = ids,
                        .block_to_expert = experts,
                        .conditions = conditions,
                        .tokens_per_expert = tokens};
  memcpy(back, chosen, sizeof back);
  for (int form = 0; form < 3; form++) { /* from topk, from sorted, from blocks: each from what the one before wrote */
    a.slot_experts = form == 2 ? chosen : NULL;
    assert_int_equal(form == 0   ? moe_routing_from_topk(&ctx, &a)
                     : form == 1 ? moe_routing_from_sorted(&ctx, &a)
                                 : moe_routing_from_blocks(&ctx, &a),
                     MOE_OK);
    assert_memory_equal(m_sizes, sizes, sizeof sizes);
    assert_memory_equal(gather, gathered, sizeof gathered);
    assert_memory_equal(back, chosen, sizeof chosen);
    static const int32_t rows[5][B] = {{1, 1}, {1, T}, {0, T}, {0, 0}, {2, T}};
    assert_memory_equal(ids, rows, sizeof rows);
    for (int e = 0; e < E; e++) assert_true(tokens[e] == sizes[e]);
  }
  const moe_expert_parallel_send_args send = {
      .T = T, .E = E, .K = K, .ranks = 2, .expert_index = chosen, .send_counts = sent, .send_displacements = at};
  assert_int_equal(moe_expert_parallel_send(&ctx, &send), MOE_OK);
  assert_true(sent[0] == 4 && sent[1] == 3);
}

/* Sorted slots: both products apart and both in one call. Down weights are an identity, so d is m. */
static void test_sorted(void **state) {
  (void)state;
  moe_context ctx = context;
  float x[T * H], dy[T * H], wide[E][2 * I][H], narrow[E][H][I] = {{{0}}}, y[T * H], dw[T * K], part[T * K * H];
  float dx[T * H], want_y[T * H] = {0}, want_dw[T * K] = {0}, want_part[T * K * H] = {0}, want_dx[T * H] = {0};
  uint64_t seed = 9;
  for (int i = 0; i < T * H; i++)
    x[i] = (float)test_random_range(&seed, 1, 3), dy[i] = (float)test_random_range(&seed, -3, 3);
  for (int i = 0; i < E * 2 * I * H; i++)
    wide[i / H / (2 * I)][i / H % (2 * I)][i % H] = (float)test_random_range(&seed, -2, 2);
  for (int e = 0; e < E; e++)
    for (int h = 0; h < H; h++) narrow[e][h][h] = 1;
  for (int slot = 0; slot < T * K; slot++) {
    const int e = chosen[slot], t = slot / K;
    for (int i = 0; i < I && e >= 0; i++) {
      float g = 0, up = 0;
      for (int h = 0; h < H; h++) g += x[t * H + h] * wide[e][i][h], up += x[t * H + h] * wide[e][I + i][h];
      want_part[slot * H + i] = weights[slot] * g * up;
      want_y[t * H + i] += weights[slot] * g * up;
      want_dw[slot] += dy[t * H + i] * g * up;
      for (int h = 0; h < H; h++)
        want_dx[t * H + h] += weights[slot] * dy[t * H + i] * (wide[e][i][h] * up + wide[e][I + i][h] * g);
    }
  }
  moe_grouped_mlp_args mlp = {.num_tokens = T,
                              .topk = K,
                              .E = E,
                              .H = H,
                              .I = I,
                              .m_sizes = sizes,
                              .gather_indices = gathered,
                              .topk_weights = weights,
                              .X = x,
                              .gate_up = wide,
                              .down = narrow,
                              .config = {.activation = MOE_ACT_IDENTITY},
                              .Y = y,
                              .dY = dy,
                              .dX = dx,
                              .dtopk_weights = dw};
  assert_int_equal(moe_grouped_mlp_f32(&ctx, &mlp), MOE_OK);
  assert_int_equal(moe_grouped_mlp_bwd_f32(&ctx, &mlp), MOE_OK);
  for (int i = 0; i < T * H; i++) assert_true(y[i] == want_y[i] && dx[i] == want_dx[i]);
  for (int i = 0; i < T * K; i++) assert_true(dw[i] == want_dw[i]);
  /* Grouped GEMM of m, in the order of positions, back into slots. */
  float m[T * K * H] = {0};
  for (int pos = 0; pos < 7; pos++)
    for (int h = 0; h < H; h++) m[pos * H + h] = want_part[gathered[pos] * H + h] / weights[gathered[pos]];
  moe_grouped_gemm_args gemm = {.num_tokens = T,
                                .topk = K,
                                .E = E,
                                .N = H,
                                .K = I,
                                .m_sizes = sizes,
                                .gather_indices = gathered,
                                .permute_y = 1,
                                .X = m,
                                .W = narrow,
                                .topk_weights = weights,
                                .Y = part};
  assert_int_equal(moe_grouped_gemm_f32(&ctx, &gemm), MOE_OK);
  for (int i = 0; i < T * K * H; i++) assert_true(part[i] == want_part[i]);
}

/* Slots are counted: token 1 is expert 0's three times. All logits are equal, so the loss is c*E/(K*T^2)*7*T/E. */
static void test_balance(void **state) {
  (void)state;
  static const float z[T * E] = {0};
  float loss;
  moe_context ctx = context;
  const moe_router_loss_args a = {
      .T = T, .E = E, .K = K, .coefficient = 9, .router_logits = z, .expert_index = chosen, .loss = &loss};
  assert_int_equal(moe_router_load_balance_loss(&ctx, &a), MOE_OK);
  assert_true(fabs(loss - 7) <= 8 * 0x1p-24 * 7);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_blocks),   EACH_DTYPE(test_layer),
                                     cmocka_unit_test(test_routings), cmocka_unit_test(test_sorted),
                                     cmocka_unit_test(test_balance),  cmocka_unit_test(test_router)};
  return cmocka_run_group_tests_name("expert twice", tests, NULL, NULL);
}
