/* test_clamps: gradients of pre-activations at their limits and next to them, with checkpoints of every type and with
   recomputation: whether g and u are limited is judged in binary32, whatever the checkpoint rounds them to, and at a
   limit the derivative is 0. What is expected is computed in double. */
#include "support/test.h"

#include <math.h>

#include "support/problem.h"
#include "support/random.h"

enum { I = 64, PARTS = 2 };

static void *allocate(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void release(void *user, void *from, size_t bytes) { (void)user, (void)bytes, free(from); }

/* By which interface a layer is called: blocks, also with the same weights as codes 1 and scales, also with operands
   rounded to MX; the layer from top-k ids; sorted slots. */
enum face { BLOCKS, SCALED, ROUNDED, LAYER, SORTED, FACES };

/* Tokens have one hidden element, 1, so g and u are the weights of gate and up. */
struct layer {
  moe_layer_config config;
  moe_dtype checkpoint;
  enum face face;
  float weight[PARTS][I];
};

static const int32_t zero, one = 1;
static float x[1] = {1}, y[1], down[I];
static uint32_t checkpoint[PARTS * I];

static void run_blocks(const struct layer *l, int recompute, float grad[PARTS][I]) {
  static uint8_t codes[PARTS * I];
  moe_context ctx = {.allocate = allocate, .release = release};
  memset(codes, 0x38, sizeof codes); /* 1 */
  const moe_quantized_weight weight = {
      .element = MOE_ELEMENT_E4M3FN, .scaling = MOE_WEIGHT_COLUMN_PER_EXPERT, .codes = codes, .scales = l->weight};
  const moe_mx_rounding round = {.enabled = l->face == ROUNDED};
  const moe_blockwise_layer layer = {.T = 1,
                                     .H = 1,
                                     .I = I,
                                     .E = 1,
                                     .N = 1,
                                     .B = 1,
                                     .hidden_states = x,
                                     .gate_up_proj_weight = l->weight,
                                     .quantized_gate_up_proj_weight = l->face == SCALED ? &weight : NULL,
                                     .down_proj_weight = down,
                                     .token_position_to_id = &zero,
                                     .block_to_expert = &zero,
                                     .checkpoint_dtype = l->checkpoint,
                                     .config = l->config,
                                     .mx = {.activations = round, .gradients = round}};
  const moe_blockwise_mm_fwd_args f = {.layer = layer, .gate_up_activations_T = checkpoint, .output = y};
  const moe_blockwise_mm_bwd_args b = {.layer = layer,
                                       .gate_up_activations_T = recompute ? NULL : checkpoint,
                                       .output_hidden_states_grad = x,
                                       .gate_up_proj_weight_grad = grad};
  assert_int_equal(moe_blockwise_mm_fwd_f32(&ctx, &f), MOE_OK);
  assert_int_equal(moe_blockwise_mm_bwd_f32(&ctx, &b), MOE_OK);
}

static void run_layer(const struct layer *l, int recompute, float grad[PARTS][I]) {
  moe_context ctx = {.allocate = allocate, .release = release};
  const moe_layer layer = {.T = 1,
                           .H = 1,
                           .I = I,
                           .E = 1,
                           .K = 1,
                           .x = x,
                           .topk_index = &zero,
                           .gate_up = l->weight,
                           .down = down,
                           .saved_dtype = l->checkpoint,
                           .config = l->config};
  const moe_layer_grads grads = {.gate_up = grad};
  assert_int_equal(moe_layer_forward_f32(&ctx, &layer, y, checkpoint), MOE_OK);
  assert_int_equal(moe_layer_backward_f32(&ctx, &layer, recompute ? NULL : checkpoint, x, &grads), MOE_OK);
}

/* What is saved has the function's type: float. */
static void run_sorted(const struct layer *l, int recompute, float grad[PARTS][I]) {
  moe_context ctx = {.allocate = allocate, .release = release};
  moe_grouped_mlp_args a = {.num_tokens = 1,
                            .topk = 1,
                            .E = 1,
                            .H = 1,
                            .I = I,
                            .m_sizes = &one,
                            .X = x,
                            .gate_up = l->weight,
                            .down = down,
                            .config = l->config,
                            .saved = checkpoint,
                            .Y = y,
                            .dY = x,
                            .dgate_up = grad};
  a.config.affinity_mode = MOE_AFFINITY_POST_SCALE;
  assert_int_equal(moe_grouped_mlp_f32(&ctx, &a), MOE_OK);
  if (recompute) a.saved = NULL;
  assert_int_equal(moe_grouped_mlp_bwd_f32(&ctx, &a), MOE_OK);
}

/* d(sum of m)/d(weight), by the layer. */
static void run(const struct layer *l, int recompute, float grad[PARTS][I], float saved[PARTS][I]) {
  moe_context ctx = {0};
  for (int i = 0; i < I; i++) down[i] = 1;
  if (l->face == LAYER) run_layer(l, recompute, grad);
  else if (l->face == SORTED) run_sorted(l, recompute, grad);
  else run_blocks(l, recompute, grad);
  if (l->checkpoint == MOE_DTYPE_BF16) moe_bf16_to_f32(&ctx, saved[0], (const uint16_t *)checkpoint, PARTS * I);
  else if (l->checkpoint == MOE_DTYPE_FP16) moe_fp16_to_f32(&ctx, saved[0], (const uint16_t *)checkpoint, PARTS * I);
  else memcpy(saved, checkpoint, PARTS * I * sizeof **saved);
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
      const double own = l->weight[part][i], other = l->weight[!part][i];
      const float *mine = limit + 2 * part, *theirs = limit + 2 * !part;
      const int inside = own < mine[0] && own > mine[1];
      const double factor = fmax(fmin(other, theirs[0]), theirs[1]), kept = fmax(fmin(own, mine[0]), mine[1]);
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
      for (size_t n = 0; n < FACES * 16 * sizeof limits / sizeof *limits; n++) {
        const enum face face = (enum face)(n % FACES);
        const uint32_t clamp = (uint32_t)(n / FACES % 16);
        const float *limit = limits[n / FACES / 16];
        if (face == SORTED && dtype != MOE_DTYPE_F32) continue;
        struct layer l = {.config = {.activation = MOE_ACT_IDENTITY,
                                     .affinity_mode = MOE_AFFINITY_NO_SCALE,
                                     .clamp = clamp,
                                     .gate_clamp_upper_limit = limit[0],
                                     .gate_clamp_lower_limit = limit[1],
                                     .up_clamp_upper_limit = limit[2],
                                     .up_clamp_lower_limit = limit[3]},
                          .checkpoint = (moe_dtype)dtype,
                          .face = face};
        float used[4];
        for (int i = 0; i < 4; i++) used[i] = clamp >> i & 1 ? limit[i] : i % 2 ? -INFINITY : INFINITY;
        for (int i = 0; i < I; i++)
          for (int part = 0; part < PARTS; part++)
            l.weight[part][i] =
                near(limit[2 * part + test_random_range(&seed, 0, 1)], (int)test_random_range(&seed, 0, 17));
        check(&l, used);
      }
  }
  test_use_best_isa();
}

/* Where the activation meets its limit, above 1: by bisection in double. */
static double meets(moe_activation activation, double limit) {
  double from = 1, to = 2 * limit + 2;
  for (int i = 0; i < 100; i++) {
    const double at = (from + to) / 2, value = activation == MOE_ACT_GELU ? at / 2 * (1 + erf(at / sqrt(2)))
                                               : activation == MOE_ACT_IDENTITY
                                                   ? at
                                                   : at / (1 + exp(-(activation == MOE_ACT_SWISH ? 1.702 : 1) * at));
    *(value < limit ? &from : &to) = at;
  }
  return from;
}

/* The clamp after the activation: a gradient exactly where the activation of what was computed, in binary32, is below
   its limit, and never where it is above. */
static void test_activation_limits(void **state) {
  (void)state;
  static const moe_activation kinds[] = {MOE_ACT_SILU, MOE_ACT_SWISH, MOE_ACT_GELU, MOE_ACT_IDENTITY};
  static const float limits[] = {7, 1.3f, 2.71f, 15.9f};
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (int n = 0; n < 2 * 4 * 4 * 3 * SORTED && test_use_isa(isa); n++) {
      struct layer l = {.config = {.activation = kinds[n / 2 % 4],
                                   .affinity_mode = MOE_AFFINITY_NO_SCALE,
                                   .skip_gate = n % 2,
                                   .clamp = MOE_CLAMP_ACTIVATION_UPPER,
                                   .activation_clamp_upper_limit = limits[n / 8 % 4]},
                        .checkpoint = (moe_dtype)(MOE_DTYPE_F32 + n / 32 % 3),
                        .face = (enum face)(n / 96)};
      const double at = meets(l.config.activation, (double)l.config.activation_clamp_upper_limit);
      const int part = l.config.skip_gate;
      float grad[PARTS][I], again[PARTS][I], saved[PARTS][I];
      /* The limit's place, and what of it a float's activation, within MOE_ACT_ERROR * 2^-24, does not tell. */
      for (int i = 0; i < I; i++) {
        const double away = ldexp(1, -18 + i / 4) * (i % 2 ? 1 : -1) * (i % 4 < 2 ? 1 : 1.4);
        l.weight[part][i] = (float)(at * (1 + (fabs(away) < 0.5 ? away : 0.5 * away / fabs(away))));
        l.weight[!part][i] = 2;
      }
      run(&l, 0, grad, saved), run(&l, 1, again, saved);
      assert_memory_equal(grad[part], again[part], sizeof *grad);
      for (int i = 0; i < I; i++) {
        const int below = (double)l.weight[part][i] < at;
        const double w = (double)l.weight[part][i], kept = (double)saved[part][i];
        if (below != (grad[part][i] > 0)) fail_msg("case %d: %.9g, limit at %.9g: %g", n, w, at, (double)grad[part][i]);
        assert_true(fabs(kept - w) <= step(&l) * fabs(w));
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
  for (int recompute = 0; recompute < 2 && dtype != MOE_DTYPE_F32; recompute++)
    for (int limited = 0; limited < 3; limited++) {
      const float second[] = {-0x1p-16f, 0, 0x1p-16f}, wide[4] = {7, 2, second[limited], 0}, ones[2] = {1, 1};
      const float first[2] = {1, 0};
      float back[4] = {0};
      float hidden[2], w[4], d[2], output[2], saved[2], grad[4]; /* of any type */
      moe_context ctx = {.allocate = allocate, .release = release};
      test_from_f32(dtype, hidden, ones, 2), test_from_f32(dtype, w, wide, 4), test_from_f32(dtype, d, first, 2);
      const moe_blockwise_layer layer = {.T = 1,
                                         .H = 2,
                                         .I = 1,
                                         .E = 1,
                                         .N = 1,
                                         .B = 1,
                                         .hidden_states = hidden,
                                         .gate_up_proj_weight = w,
                                         .down_proj_weight = d,
                                         .token_position_to_id = &id,
                                         .block_to_expert = &expert,
                                         .config = {.activation = MOE_ACT_IDENTITY,
                                                    .affinity_mode = MOE_AFFINITY_NO_SCALE,
                                                    .clamp = MOE_CLAMP_GATE_UPPER,
                                                    .gate_clamp_upper_limit = 7}};
      const struct problem_args args = {.dtype = dtype,
                                        .forward = {.layer = layer, .gate_up_activations_T = saved, .output = output},
                                        .backward = {.layer = layer,
                                                     .gate_up_activations_T = recompute ? NULL : saved,
                                                     .output_hidden_states_grad = d,
                                                     .gate_up_proj_weight_grad = grad}};
      assert_int_equal(problem_call(PROBLEM_FORWARD, &ctx, &args), MOE_OK);
      assert_int_equal(problem_call(PROBLEM_BACKWARD, &ctx, &args), MOE_OK);
      assert_int_equal(test_to_f32(dtype, back, grad, 4), MOE_OK);
      assert_true(back[0] == (limited ? 0 : 2) && back[2] == back[0]);
      assert_true(fabsf(back[1] - 7) <= 7 * 0x1p-7f);
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_limits), cmocka_unit_test(test_activation_limits),
                                     cmocka_unit_test(test_overflow), EACH_DTYPE(test_typed)};
  return cmocka_run_group_tests_name("clamps", tests, NULL, NULL);
}
