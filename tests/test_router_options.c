/* test_router_options: what real routers bring, against double: ids given, groups by their maximum, softcapped logits,
   float weights with 16-bit hidden states, losses of tokens spread over calls and over sequences, bias updates. */
#include "support/test.h"

#include <math.h>

#include "support/pool.h"
#include "support/random.h"

enum { T = 7, E = 6, K = 3, H = 9, PROBLEMS = 200 };
static const double u = 0x1p-24;

static void *allocate(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void release(void *user, void *from, size_t bytes) { (void)user, (void)bytes, free(from); }
static moe_context context(void) {
  return (moe_context){
      .allocate = allocate, .release = release, .num_threads = 3, .parallel_for = test_pool_parallel_for};
}

#define OK(call) \
  if ((call) != MOE_OK) fail_msg("%s: %s", #call, ctx.message)

static double capped(const moe_router_config *o, double z) {
  return o->logit_softcap > 0 ? o->logit_softcap * tanh(z / o->logit_softcap) : z;
}
static double score(moe_score_function f, double z) {
  return f == MOE_SCORE_SOFTMAX ? exp(z) : f == MOE_SCORE_SIGMOID ? 1 / (1 + exp(-z)) : sqrt(log1p(exp(z)));
}

/* w [K] of one token's logits and ids. */
static void weights(const moe_router_config *o, const double *z, const int32_t *index, double *w) {
  double all = 0, sum = 0;
  const int softmax = o->score_function == MOE_SCORE_SOFTMAX, after = o->score_order == MOE_SCORE_AFTER_TOPK;
  for (int e = 0; e < E; e++) all += score(o->score_function, capped(o, z[e]));
  for (int k = 0; k < K; k++) sum += w[k] = index[k] < 0 ? 0 : score(o->score_function, capped(o, z[index[k]]));
  const double divisor = o->renormalize || (softmax && after) ? sum : softmax ? all : 1;
  for (int k = 0; k < K; k++) w[k] = index[k] < 0 ? 0 : w[k] / divisor * o->routed_scaling_factor;
}

static moe_router_config random_config(uint64_t *seed) {
  return (moe_router_config){.score_function = (moe_score_function)test_random_range(seed, 0, MOE_SCORE_COUNT_ - 1),
                             .score_order = (moe_score_order)test_random_range(seed, 0, 1),
                             .renormalize = (int)test_random_range(seed, 0, 1),
                             .routed_scaling_factor = 1.5f,
                             .logit_softcap = test_random_range(seed, 0, 1) ? 2.0f : 0.0f};
}

static void random_logits(float *z, int64_t n, uint64_t *seed) {
  for (int64_t i = 0; i < n; i++) z[i] = (float)test_random_range(seed, -500, 500) / 128;
}

/* Ids given: weights, and dz by central differences of sum dw*w. */
static void test_given_ids(void **state) {
  (void)state;
  uint64_t seed = 1;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (int n = 0; n < PROBLEMS && test_use_isa(isa); n++) {
      const moe_router_config o = random_config(&seed);
      float z[T * E], w[T * K], dw[T * K], dz[T * E];
      int32_t index[T * K], given[T * K];
      uint8_t mask[T];
      moe_context ctx = context();
      random_logits(z, T * E, &seed), random_logits(dw, T * K, &seed);
      for (int i = 0; i < T * K; i++) given[i] = index[i] = (int32_t)test_random_range(&seed, -1, E - 1);
      for (int t = 0; t < T; t++) mask[t] = test_random_range(&seed, 0, 5) > 0;
      moe_router_topk_args a = {.T = T,
                                .E = E,
                                .K = K,
                                .router_logits = z,
                                .token_mask = mask,
                                .config = o,
                                .expert_index = index,
                                .expert_weights = w,
                                .indices_given = 1};
      const moe_router_topk_bwd_args b = {.T = T,
                                          .E = E,
                                          .K = K,
                                          .router_logits = z,
                                          .expert_index = index,
                                          .config = o,
                                          .expert_weights_grad = dw,
                                          .router_logits_grad = dz};
      OK(moe_router_topk_f32(&ctx, &a));
      OK(moe_router_topk_bwd_f32(&ctx, &b));
      for (int t = 0; t < T; t++) {
        double at[E], want[K], size = 0;
        for (int e = 0; e < E; e++) at[e] = z[t * E + e];
        for (int k = 0; k < K; k++) {
          assert_int_equal(index[t * K + k], mask[t] ? given[t * K + k] : -1);
          size += 1.5 * fabs((double)dw[t * K + k]);
        }
        weights(&o, at, index + t * K, want);
        /* A score is within some 8 roundings or ulp of its capped logit's, which is off by 4 ulp of 4. */
        for (int k = 0; k < K; k++) assert_true(fabs(w[t * K + k] - want[k]) <= 40 * u * (1 + want[k]));
        for (int e = 0; e < E; e++) {
          const double step = 1e-5;
          double side[2] = {0};
          for (int j = 0; j < 2; j++) {
            double moved[E], value[K];
            memcpy(moved, at, sizeof at);
            moved[e] += j ? step : -step;
            weights(&o, moved, index + t * K, value);
            for (int k = 0; k < K; k++) side[j] += dw[t * K + k] * value[k];
          }
          assert_true(fabs(dz[t * E + e] - (side[1] - side[0]) / (2 * step)) <= size * (80 * u + 1e-8));
        }
      }
      /* The ids that the forward selects, given: the same bits. */
      float again[T * K];
      a.indices_given = 0;
      OK(moe_router_topk_f32(&ctx, &a));
      a.indices_given = 1, a.expert_weights = again;
      OK(moe_router_topk_f32(&ctx, &a));
      assert_memory_equal(again, w, sizeof w);
    }
  test_use_best_isa();
}

/* The best `groups` of three groups of two by their largest value, then the K best of these. */
static void test_group_maximum(void **state) {
  (void)state;
  uint64_t seed = 2;
  for (int n = 0; n < PROBLEMS; n++) {
    const moe_router_config o = {
        .score_function = MOE_SCORE_SIGMOID, .num_groups = 3, .topk_groups = 2, .group_score = MOE_GROUP_SCORE_MAX};
    float z[T * E], w[T * K];
    int32_t index[T * K];
    moe_context ctx = context();
    for (int t = 0; t < T; t++) /* all different */
      for (int e = 0; e < E; e++) z[t * E + e] = (float)(test_random_range(&seed, -20, 20) * E + e) / 32;
    const moe_router_topk_args a = {
        .T = T, .E = E, .K = K, .router_logits = z, .config = o, .expert_index = index, .expert_weights = w};
    OK(moe_router_topk_f32(&ctx, &a));
    for (int t = 0; t < T; t++) {
      const float *row = z + t * E;
      int worst = 0;
      for (int g = 1; g < 3; g++)
        if (fmaxf(row[2 * g], row[2 * g + 1]) < fmaxf(row[2 * worst], row[2 * worst + 1])) worst = g;
      for (int k = 0; k < K; k++) {
        int better = 0;
        assert_true(index[t * K + k] / 2 != worst);
        for (int e = 0; e < E; e++) better += e / 2 != worst && row[e] > row[index[t * K + k]];
        assert_int_equal(better, k);
      }
    }
  }
}

/* 16-bit hidden states with float weights: the float router of the same numbers, to the bit. */
static void test_weight_type(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t seed = 3;
  float wide[T * H], weight[H * E], bias[E], z[2][T * E], w[2][T * K], dw[T * K], dz[T * E], dx[T * H], got[T * H];
  float weight_grad[2][H * E], bias_grad[2][E];
  uint16_t x[2 * T * H], dx16[2 * T * H];
  int32_t index[2][T * K];
  moe_context ctx = context();
  random_logits(wide, T * H, &seed), random_logits(weight, H * E, &seed), random_logits(bias, E, &seed);
  for (int i = 0; i < H * E; i++) weight[i] += 0x1p-19f; /* no 16-bit type holds them */
  random_logits(dw, T * K, &seed);
#define ROUND(name, type, NAME)                                     \
  if (dtype == MOE_DTYPE_##NAME) {                                  \
    OK(moe_##name##_from_f32(&ctx, (type *)(void *)x, wide, T *H)); \
    OK(moe_##name##_to_f32(&ctx, wide, (type *)(void *)x, T *H));   \
  }
  MOE_DTYPE_LIST(ROUND)
#undef ROUND
  for (int i = 0; i < 2; i++) {
    const moe_router_topk_args a = {.T = T,
                                    .H = H,
                                    .E = E,
                                    .K = K,
                                    .hidden_states = i ? (void *)x : (void *)wide,
                                    .router_weight = weight,
                                    .router_bias = bias,
                                    .router_logits = z[i],
                                    .expert_index = index[i],
                                    .expert_weights = w[i],
                                    .router_weight_dtype = MOE_DTYPE_F32};
    const moe_router_topk_bwd_args b = {.T = T,
                                        .H = H,
                                        .E = E,
                                        .K = K,
                                        .hidden_states = a.hidden_states,
                                        .router_weight = weight,
                                        .router_logits = z[i],
                                        .expert_index = index[i],
                                        .expert_weights_grad = dw,
                                        .router_logits_grad = dz,
                                        .router_weight_grad = weight_grad[i],
                                        .router_bias_grad = bias_grad[i],
                                        .hidden_states_grad = i ? (void *)dx16 : (void *)dx,
                                        .router_weight_dtype = MOE_DTYPE_F32,
                                        .weight_grad_dtype = MOE_DTYPE_F32};
    if (!i) {
      OK(moe_router_topk_f32(&ctx, &a));
      OK(moe_router_topk_bwd_f32(&ctx, &b));
      continue;
    }
#define ROUTER(name, type, NAME)                                                     \
  if (dtype == MOE_DTYPE_##NAME) {                                                   \
    OK(moe_router_topk_##name(&ctx, &a));                                            \
    OK(moe_router_topk_bwd_##name(&ctx, &b));                                        \
    OK(moe_##name##_from_f32(&ctx, (type *)(void *)x, dx, T *H)); /* rounded once */ \
    OK(moe_##name##_to_f32(&ctx, dx, (type *)(void *)x, T *H));                      \
    OK(moe_##name##_to_f32(&ctx, got, (type *)(void *)dx16, T *H));                  \
  }
    MOE_DTYPE_LIST(ROUTER)
#undef ROUTER
  }
  assert_memory_equal(z[0], z[1], sizeof z[0]), assert_memory_equal(w[0], w[1], sizeof w[0]);
  assert_memory_equal(weight_grad[0], weight_grad[1], sizeof weight_grad[0]);
  assert_memory_equal(bias_grad[0], bias_grad[1], sizeof bias_grad[0]);
  assert_memory_equal(dx, got, sizeof dx);
  double exact = bias[1];
  for (int h = 0; h < H; h++) exact += (double)wide[h] * weight[h * E + 1];
  assert_true(fabs(z[1][1] - exact) <= 2 * H * u * 16 * H);
}

/* ----------------------------------------------------------------------------------------------------------- losses */

/* The losses of logits z [T,E] of tokens [from, to). */
static double balance(const moe_router_loss_args *a, const double *z, int64_t from, int64_t to) {
  const moe_router_config o = {.logit_softcap = a->logit_softcap};
  double n[E] = {0}, tokens = 0, sum = 0;
  for (int64_t t = from; t < to; t++) {
    if (a->token_mask && !a->token_mask[t]) continue;
    tokens++;
    for (int k = 0; k < K && !a->expert_counts; k++)
      if (a->expert_index[t * K + k] >= 0) n[a->expert_index[t * K + k]]++;
  }
  for (int e = 0; e < E && a->expert_counts; e++) n[e] = (double)a->expert_counts[e];
  if (tokens > 0 && a->total_tokens) tokens = (double)a->total_tokens;
  for (int64_t t = from; t < to; t++) {
    double all = 0;
    for (int e = 0; e < E; e++) all += score(a->score_function, capped(&o, z[t * E + e]));
    for (int e = 0; e < E && (!a->token_mask || a->token_mask[t]); e++)
      sum += n[e] * score(a->score_function, capped(&o, z[t * E + e])) / all;
  }
  return tokens > 0 ? a->coefficient * E * sum / (K * tokens * tokens) : 0;
}

static double z_loss(const moe_router_loss_args *a, const double *z) {
  const moe_router_config o = {.logit_softcap = a->logit_softcap};
  double tokens = 0, sum = 0;
  for (int64_t t = 0; t < a->T; t++) {
    double all = 0;
    if (a->token_mask && !a->token_mask[t]) continue;
    for (int e = 0; e < E; e++) all += exp(capped(&o, z[t * E + e]));
    sum += log(all) * log(all), tokens++;
  }
  return tokens > 0 ? a->coefficient * sum / (a->total_tokens ? (double)a->total_tokens : tokens) : 0;
}

static double loss_of(const moe_router_loss_args *a, int kind, const double *z) {
  double sum = 0, sequences = 0;
  if (kind) return z_loss(a, z);
  if (!a->sequence_first) return balance(a, z, 0, a->T);
  for (int64_t s = 0; s < a->S; s++) {
    int counts = 0;
    for (int64_t t = a->sequence_first[s]; t < a->sequence_first[s + 1]; t++)
      counts |= !a->token_mask || a->token_mask[t];
    sum += balance(a, z, a->sequence_first[s], a->sequence_first[s + 1]), sequences += counts;
  }
  return sequences > 0 ? sum / sequences : 0;
}

static void check_loss(moe_router_loss_args *a, int kind) {
  float loss, grad[T * E] = {0};
  double z[T * E];
  moe_context ctx = context();
  a->loss = &loss, a->router_logits_grad = grad;
  OK((kind ? moe_router_z_loss : moe_router_load_balance_loss)(&ctx, a));
  for (int i = 0; i < T * E; i++) z[i] = a->router_logits[i];
  const double want = loss_of(a, kind, z);
  /* Some 30 roundings or ulp, on terms of one sign; a logarithm's argument is off by as much. */
  assert_true(fabs(loss - want) <= 60 * u * (fabs(want) + a->coefficient));
  for (int i = 0; i < T * E; i++) {
    const double kept = z[i], step = 1e-5;
    z[i] = kept + step;
    double slope = loss_of(a, kind, z);
    z[i] = kept - step;
    slope = (slope - loss_of(a, kind, z)) / (2 * step), z[i] = kept;
    assert_true(fabs(grad[i] - slope) <= 60 * u * (fabs(want) + a->coefficient) + 1e-8);
  }
}

static void test_losses(void **state) {
  (void)state;
  uint64_t seed = 4;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (int n = 0; n < PROBLEMS && test_use_isa(isa); n++) {
      float z[T * E];
      int32_t index[T * K];
      uint8_t mask[T];
      int64_t counts[E];
      const int64_t cut = test_random_range(&seed, 0, T), first[] = {0, cut, cut, T, T};
      random_logits(z, T * E, &seed);
      for (int i = 0; i < T * K; i++) index[i] = (int32_t)test_random_range(&seed, -1, E - 1);
      for (int t = 0; t < T; t++) mask[t] = test_random_range(&seed, 0, 2) > 0;
      for (int e = 0; e < E; e++) counts[e] = test_random_range(&seed, 0, 100);
      moe_router_loss_args a = {.T = T,
                                .E = E,
                                .K = K,
                                .coefficient = 0.25f,
                                .score_function = (moe_score_function)(n % MOE_SCORE_COUNT_),
                                .router_logits = z,
                                .expert_index = index,
                                .token_mask = n / 3 % 2 ? mask : NULL,
                                .logit_softcap = n / 6 % 2 ? 3.0f : 0.0f};
      check_loss(&a, 0), check_loss(&a, 1);
      a.total_tokens = 19;
      check_loss(&a, 0), check_loss(&a, 1);
      a.expert_counts = counts, a.expert_index = NULL;
      check_loss(&a, 0);
      a.total_tokens = 0, a.expert_counts = NULL, a.expert_index = index, a.S = 4, a.sequence_first = first;
      check_loss(&a, 0);
    }
  test_use_best_isa();
}

/* Tokens in two calls, with the counts and totals of both: the gradients of one call, to the bit. */
static void test_spread_tokens(void **state) {
  (void)state;
  uint64_t seed = 5;
  float z[T * E], grad[2][T * E] = {{0}}, loss[3];
  int32_t index[T * K];
  int64_t counts[E] = {0};
  moe_context ctx = context();
  random_logits(z, T * E, &seed);
  for (int i = 0; i < T * K; i++) counts[index[i] = (int32_t)test_random_range(&seed, 0, E - 1)]++;
  moe_router_loss_args a = {.T = T,
                            .E = E,
                            .K = K,
                            .coefficient = 1,
                            .router_logits = z,
                            .expert_index = index,
                            .loss = loss,
                            .router_logits_grad = grad[0]};
  OK(moe_router_load_balance_loss(&ctx, &a));
  a.expert_counts = counts, a.total_tokens = T, a.expert_index = NULL;
  for (int i = 0; i < 2; i++) {
    const int64_t from = i ? 3 : 0;
    a.T = i ? T - 3 : 3, a.router_logits = z + from * E, a.router_logits_grad = grad[1] + from * E,
    a.loss = loss + 1 + i;
    OK(moe_router_load_balance_loss(&ctx, &a));
  }
  assert_memory_equal(grad[0], grad[1], sizeof grad[0]);
  assert_true(fabs((double)loss[0] - loss[1] - loss[2]) <= T * u * loss[0]);
}

static void test_bias_update(void **state) {
  (void)state;
  moe_context ctx = context();
  const int64_t counts[4] = {10, 20, 30, 20};
  float bias[4] = {1, 1, 1, -1};
  moe_router_bias_update_args a = {.E = 4, .rate = 0.25f, .expert_counts = counts, .selection_bias = bias};
  OK(moe_router_bias_update(&ctx, &a));
  assert_true(bias[0] == 1.25f && bias[1] == 1 && bias[2] == 0.75f && bias[3] == -1);
  const int64_t uneven[4] = {0, 0, 0, 1}; /* signs 1 1 1 -1, mean 0.5 */
  a.expert_counts = uneven, a.centered = 1;
  OK(moe_router_bias_update(&ctx, &a));
  assert_true(bias[0] == 1.375f && bias[1] == 1.125f && bias[2] == 0.875f && bias[3] == -1.375f);
  const int64_t large[2] = {INT64_MAX / 4, INT64_MAX / 4 - 1};
  a = (moe_router_bias_update_args){.E = 2, .rate = 1, .expert_counts = large, .selection_bias = bias};
  OK(moe_router_bias_update(&ctx, &a));
  assert_true(bias[0] == 0.375f && bias[1] == 2.125f);
}

#define REFUSED(call, STATUS, word)           \
  assert_int_equal(call, MOE_ERROR_##STATUS); \
  if (strncmp(ctx.message, word, strlen(word)) != 0) fail_msg("%s", ctx.message)

static void test_refused(void **state) {
  (void)state;
  moe_context ctx = context();
  float z[E] = {0}, w[K], loss;
  int32_t index[K] = {0, E, 1};
  int64_t counts[E] = {0}, first[2] = {0, 1};
  moe_router_topk_args a = {
      .T = 1, .E = E, .K = K, .router_logits = z, .expert_index = index, .expert_weights = w, .indices_given = 1};
  REFUSED(moe_router_topk_f32(&ctx, &a), INVALID_INDEX, "expert_index");
  a.indices_given = 2;
  REFUSED(moe_router_topk_f32(&ctx, &a), INVALID_OPTION, "indices_given");
  a.indices_given = 0, a.config.group_score = MOE_GROUP_SCORE_COUNT_;
  REFUSED(moe_router_topk_f32(&ctx, &a), INVALID_OPTION, "config.group_score");
  a.config.group_score = MOE_GROUP_SCORE_MAX, a.config.logit_softcap = -1;
  REFUSED(moe_router_topk_f32(&ctx, &a), INVALID_OPTION, "config.logit_softcap");
  a.config.logit_softcap = 0, a.router_weight_dtype = (moe_dtype)77;
  REFUSED(moe_router_topk_f32(&ctx, &a), INVALID_OPTION, "router_weight_dtype");
  moe_router_loss_args l = {.T = 1,
                            .E = E,
                            .K = K,
                            .router_logits = z,
                            .expert_counts = counts,
                            .loss = &loss,
                            .S = 1,
                            .sequence_first = first};
  REFUSED(moe_router_load_balance_loss(&ctx, &l), INVALID_OPTION, "expert_counts");
  l.expert_counts = NULL, l.total_tokens = 1;
  REFUSED(moe_router_load_balance_loss(&ctx, &l), INVALID_OPTION, "total_tokens");
  l.total_tokens = 0, l.expert_index = index, first[1] = 0;
  REFUSED(moe_router_load_balance_loss(&ctx, &l), INVALID_INDEX, "sequence_first");
  first[0] = 2, first[1] = 1;
  REFUSED(moe_router_load_balance_loss(&ctx, &l), INVALID_INDEX, "sequence_first");
  l.sequence_first = NULL, l.expert_counts = counts, counts[3] = -1;
  REFUSED(moe_router_load_balance_loss(&ctx, &l), INVALID_OPTION, "expert_counts");
  l.expert_counts = NULL, l.logit_softcap = NAN;
  REFUSED(moe_router_z_loss(&ctx, &l), INVALID_OPTION, "logit_softcap");
  l.logit_softcap = 0, l.total_tokens = -1;
  REFUSED(moe_router_z_loss(&ctx, &l), INVALID_SHAPE, "total_tokens");
  moe_router_bias_update_args b = {.E = E, .rate = 1, .expert_counts = counts, .selection_bias = w};
  REFUSED(moe_router_bias_update(&ctx, &b), INVALID_OPTION, "expert_counts");
  counts[3] = INT64_MAX / 2;
  REFUSED(moe_router_bias_update(&ctx, &b), OVERFLOW, "expert_counts");
  b.rate = INFINITY;
  REFUSED(moe_router_bias_update(&ctx, &b), INVALID_OPTION, "rate");
  b.rate = 1, b.selection_bias = NULL;
  REFUSED(moe_router_bias_update(&ctx, &b), NULL_ARGUMENT, "selection_bias");
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_given_ids),     cmocka_unit_test(test_group_maximum),
                                     EACH_DTYPE(test_weight_type),         cmocka_unit_test(test_losses),
                                     cmocka_unit_test(test_spread_tokens), cmocka_unit_test(test_bias_update),
                                     cmocka_unit_test(test_refused)};
  return cmocka_run_group_tests_name("router options", tests, NULL, NULL);
}
