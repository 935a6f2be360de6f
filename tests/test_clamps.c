/* test_clamps: gradients of pre-activations at their limits and next to them, with checkpoints of every type and with
   recomputation: whether g and u are limited is judged in binary32, whatever the checkpoint rounds them to, and at a
   limit the derivative is 0. What is expected is computed in double. */
#include "support/test.h"

#include <math.h>

#include "support/random.h"

enum { I = 64, PARTS = 2 };

static void *allocate(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void release(void *user, void *from, size_t bytes) { (void)user, (void)bytes, free(from); }

/* Tokens have one hidden element, 1, so g and u are the weights of gate and up. */
struct layer {
  moe_layer_config config;
  moe_dtype checkpoint;
  float weight[PARTS][I];
};

/* d(sum of m)/d(weight), by the layer. */
static void run(const struct layer *l, int recompute, float grad[PARTS][I], float saved[PARTS][I]) {
  static float down[I], x[1] = {1}, y[1];
  static uint32_t checkpoint[PARTS * I];
  static const int32_t id = 0, expert = 0;
  moe_context ctx = {.allocate = allocate, .release = release};
  for (int i = 0; i < I; i++) down[i] = 1;
  const moe_blockwise_layer layer = {.T = 1,
                                     .H = 1,
                                     .I = I,
                                     .E = 1,
                                     .N = 1,
                                     .B = 1,
                                     .hidden_states = x,
                                     .gate_up_proj_weight = l->weight,
                                     .down_proj_weight = down,
                                     .token_position_to_id = &id,
                                     .block_to_expert = &expert,
                                     .checkpoint_dtype = l->checkpoint,
                                     .config = l->config};
  const moe_blockwise_mm_fwd_args f = {.layer = layer, .gate_up_activations_T = checkpoint, .output = y};
  const moe_blockwise_mm_bwd_args b = {.layer = layer,
                                       .gate_up_activations_T = recompute ? NULL : checkpoint,
                                       .output_hidden_states_grad = x,
                                       .gate_up_proj_weight_grad = grad};
  assert_int_equal(moe_blockwise_mm_fwd_f32(&ctx, &f), MOE_OK);
  assert_int_equal(moe_blockwise_mm_bwd_f32(&ctx, &b), MOE_OK);
  if (l->checkpoint == MOE_DTYPE_BF16) moe_bf16_to_f32(&ctx, saved[0], (const uint16_t *)checkpoint, PARTS * I);
  else if (l->checkpoint == MOE_DTYPE_FP16) moe_fp16_to_f32(&ctx, saved[0], (const uint16_t *)checkpoint, PARTS * I);
  else memcpy(saved, checkpoint, sizeof checkpoint);
}

/* Numbers around a limit: itself, floats next to it, and a little more or less than a step of 16-bit types away. */
static float near(float limit, int i) {
  static const float away[] = {0, 0x1p-23f, 0x1p-20f, 0x1p-13f, 0x1p-11f, 0x1p-9f, 0x1p-8f, 0x1p-7f, 0x1p-4f};
  const float by = away[i / 2 % 9] * (fabsf(limit) + (limit == 0.0f));
  return i % 2 ? limit - by : limit + by;
}

/* Half a step to the limit as the type has it, and one inside. */
static double step(const struct layer *l) {
  return l->checkpoint == MOE_DTYPE_BF16 ? 1.5 * 0x1p-7 : l->checkpoint == MOE_DTYPE_FP16 ? 1.5 * 0x1p-10 : 0;
}

static void check(const struct layer *l, const float limit[4]) {
  float grad[PARTS][I], saved[PARTS][I], again[PARTS][I];
  run(l, 0, grad, saved), run(l, 1, again, saved);
  assert_memory_equal(grad, again, sizeof grad);
  for (int part = 0; part < PARTS; part++)
    for (int i = 0; i < I; i++) {
      const double x = l->weight[part][i], other = l->weight[!part][i];
      const float *mine = limit + 2 * part, *theirs = limit + 2 * !part;
      const int inside = x < mine[0] && x > mine[1];
      const double factor = fmax(fmin(other, theirs[0]), theirs[1]), kept = fmax(fmin(x, mine[0]), mine[1]);
      if (!inside) assert_true(grad[part][i] == 0);
      else assert_true(fabs(grad[part][i] - factor) <= step(l) * fabs(factor) + 0x1p-24 * (step(l) > 0));
      assert_true(fabs(saved[part][i] - kept) <= step(l) * fabs(kept) + 0x1p-24 * (step(l) > 0));
      assert_true(grad[part][i] != 0 || !inside || fabs(factor) < 0x1p-20);
    }
}

static void test_limits(void **state) {
  (void)state;
  static const float limits[][4] = {/* gate, up: upper, lower */
                                    {7, -7, 8, -6}, {1.3f, -1.3f, 1.2f, -0.1f}, {0.1f, -10, 1.0039f, -1.0039f},
                                    {4, 0, 0, -3},  {-1, -2, 3, 2.99f / 2},     {1.00390625f, 0.3f, 300.7f, 1.00781f}};
  uint64_t seed = 1;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!test_use_isa(isa)) continue;
    for (int dtype = MOE_DTYPE_F32; dtype <= TEST_DTYPES; dtype++)
      for (size_t n = 0; n < 16 * sizeof limits / sizeof *limits; n++) {
        const float *limit = limits[n / 16];
        struct layer l = {.config = {.activation = MOE_ACT_IDENTITY,
                                     .affinity_mode = MOE_AFFINITY_NO_SCALE,
                                     .clamp = n % 16,
                                     .gate_clamp_upper_limit = limit[0],
                                     .gate_clamp_lower_limit = limit[1],
                                     .up_clamp_upper_limit = limit[2],
                                     .up_clamp_lower_limit = limit[3]},
                          .checkpoint = (moe_dtype)dtype};
        float used[4];
        for (int i = 0; i < 4; i++) used[i] = n % 16 >> i & 1 ? limit[i] : i % 2 ? -INFINITY : INFINITY;
        for (int i = 0; i < I; i++)
          for (int part = 0; part < PARTS; part++)
            l.weight[part][i] =
                near(limit[2 * part + test_random_range(&seed, 0, 1)], (int)test_random_range(&seed, 0, 17));
        check(&l, used);
      }
  }
  test_use_best_isa();
}

/* A limit beyond a type's numbers limits what it is given, not what it overflows to. */
static void test_overflow(void **state) {
  (void)state;
  struct layer l = {.config = {.activation = MOE_ACT_IDENTITY,
                               .affinity_mode = MOE_AFFINITY_NO_SCALE,
                               .clamp = MOE_CLAMP_GATE_UPPER | MOE_CLAMP_GATE_LOWER,
                               .gate_clamp_upper_limit = 70000,
                               .gate_clamp_lower_limit = -70000},
                    .checkpoint = MOE_DTYPE_FP16};
  float grad[PARTS][I], saved[PARTS][I];
  for (int i = 0; i < I; i++) l.weight[0][i] = (i % 2 ? -1.0f : 1.0f) * (i < 2 ? 70000 : 69000), l.weight[1][i] = 2;
  run(&l, 0, grad, saved);
  for (int i = 0; i < I; i++) assert_true(grad[0][i] == (i < 2 ? 0 : 2));
}

/* bf16 and fp16 layers: a sum of two products just below the limit. */
static void test_typed(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  static const int32_t id = 0, expert = 0;
  for (int recompute = 0; recompute < 2; recompute++)
    for (int limited = 0; limited < 3; limited++) {
      const float second[] = {-0x1p-16f, 0, 0x1p-16f}, wide[4] = {7, 2, second[limited], 0}, ones[2] = {1, 1};
      float down[2] = {1, 0}, back[4] = {0};
      uint16_t x[2], w[4], d[2], y[2], saved[2], grad[4];
      moe_context ctx = {.allocate = allocate, .release = release};
      moe_blockwise_layer layer = {.T = 1,
                                   .H = 2,
                                   .I = 1,
                                   .E = 1,
                                   .N = 1,
                                   .B = 1,
                                   .token_position_to_id = &id,
                                   .block_to_expert = &expert,
                                   .config = {.activation = MOE_ACT_IDENTITY,
                                              .affinity_mode = MOE_AFFINITY_NO_SCALE,
                                              .clamp = MOE_CLAMP_GATE_UPPER,
                                              .gate_clamp_upper_limit = 7}};
#define TYPED(name, type, NAME)                                                                                       \
  if (dtype == MOE_DTYPE_##NAME && sizeof(type) == 2) {                                                               \
    moe_##name##_from_f32(&ctx, (type *)(void *)x, ones, 2), moe_##name##_from_f32(&ctx, (type *)(void *)w, wide, 4); \
    moe_##name##_from_f32(&ctx, (type *)(void *)d, down, 2);                                                          \
    layer.hidden_states = x, layer.gate_up_proj_weight = w, layer.down_proj_weight = d;                               \
    const moe_blockwise_mm_fwd_args f = {.layer = layer, .gate_up_activations_T = saved, .output = y};                \
    const moe_blockwise_mm_bwd_args b = {.layer = layer,                                                              \
                                         .gate_up_activations_T = recompute ? NULL : saved,                           \
                                         .output_hidden_states_grad = d,                                              \
                                         .gate_up_proj_weight_grad = grad};                                           \
    assert_int_equal(moe_blockwise_mm_fwd_##name(&ctx, &f), MOE_OK);                                                  \
    assert_int_equal(moe_blockwise_mm_bwd_##name(&ctx, &b), MOE_OK);                                                  \
    moe_##name##_to_f32(&ctx, back, (const type *)(const void *)grad, 4);                                             \
    assert_true(back[0] == (limited ? 0 : 2) && back[2] == back[0]);                                                  \
    assert_true(fabsf(back[1] - 7) <= 7 * 0x1p-7f);                                                                   \
  }
      MOE_DTYPE_LIST(TYPED)
#undef TYPED
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_limits), cmocka_unit_test(test_overflow),
                                     EACH_DTYPE(test_typed)};
  return cmocka_run_group_tests_name("clamps", tests, NULL, NULL);
}
