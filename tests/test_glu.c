/* test_glu: what limits the gated unit after the pre-activations: the clamp of the activation, and the softcap of up.
   Step-3.5's and Kimi-K3's units among them, m and its gradients against double, by central differences. */
#include "support/test.h"

#include <math.h>

#include "support/random.h"

static void *allocate(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void release(void *user, void *from, size_t bytes) { (void)user, (void)bytes, free(from); }

enum { I = 70, CASES = 40 };

struct unit {
  const char *name;
  moe_layer_config config;
};
static const struct unit units[] = {
    {"Step-3.5",
     {.activation = MOE_ACT_SILU,
      .clamp = MOE_CLAMP_ACTIVATION_UPPER | MOE_CLAMP_UP_UPPER | MOE_CLAMP_UP_LOWER,
      .activation_clamp_upper_limit = 3,
      .up_clamp_upper_limit = 3,
      .up_clamp_lower_limit = -3}},
    {"Kimi-K3", {.activation = MOE_ACT_SITU, .up_softcap = 25}},
    {"both",
     {.activation = MOE_ACT_SITU,
      .alpha = 1.5f,
      .up_softcap = 0.7f,
      .up_offset = 1,
      .clamp = 31,
      .activation_clamp_upper_limit = 0.9f,
      .gate_clamp_upper_limit = 6,
      .gate_clamp_lower_limit = -6,
      .up_clamp_upper_limit = 2,
      .up_clamp_lower_limit = -2.5f}},
    {"one projection",
     {.activation = MOE_ACT_SQUARED_RELU,
      .skip_gate = 1,
      .clamp = MOE_CLAMP_ACTIVATION_UPPER,
      .activation_clamp_upper_limit = 4,
      .up_softcap = 2}},
};

static double limited(const moe_layer_config *o, unsigned bit, double x, double upper, double lower) {
  if (o->clamp & bit) x = fmin(x, upper);
  return o->clamp & bit << 1 ? fmax(x, lower) : x;
}

static double unit_m(const moe_layer_config *o, double g, double u) {
  const double alpha = o->alpha != 0 ? (double)o->alpha : 4;
  g = limited(o, MOE_CLAMP_GATE_UPPER, g, o->gate_clamp_upper_limit, o->gate_clamp_lower_limit);
  u = limited(o, MOE_CLAMP_UP_UPPER, u, o->up_clamp_upper_limit, o->up_clamp_lower_limit);
  if (o->skip_gate) g = u;
  double f = o->activation == MOE_ACT_SILU   ? g / (1 + exp(-g))
             : o->activation == MOE_ACT_SITU ? alpha * tanh(g / alpha) / (1 + exp(-g))
                                             : fmax(g, 0) * fmax(g, 0);
  if (o->clamp & MOE_CLAMP_ACTIVATION_UPPER) f = fmin(f, o->activation_clamp_upper_limit);
  if (o->skip_gate) return f;
  return f * ((o->up_softcap > 0 ? o->up_softcap * tanh(u / o->up_softcap) : u) + o->up_offset);
}

/* Whether a limit lies so near that a difference would see both its sides. */
static int at_kink(const moe_layer_config *o, double g, double u) {
  const double limits[][2] = {{g, o->gate_clamp_upper_limit},
                              {g, o->gate_clamp_lower_limit},
                              {u, o->up_clamp_upper_limit},
                              {u, o->up_clamp_lower_limit},
                              {o->skip_gate ? u : 1, 0}};
  for (size_t i = 0; i < sizeof limits / sizeof *limits; i++)
    if (fabs(limits[i][0] - limits[i][1]) < 1e-3) return 1;
  moe_layer_config plain = *o;
  plain.clamp &= ~(uint32_t)MOE_CLAMP_ACTIVATION_UPPER, plain.up_softcap = 0, plain.up_offset = 0, plain.skip_gate = 0;
  plain.clamp &= ~(uint32_t)(MOE_CLAMP_UP_UPPER | MOE_CLAMP_UP_LOWER);
  const double f = unit_m(&plain, o->skip_gate ? u : g, 1);
  return (o->clamp & MOE_CLAMP_ACTIVATION_UPPER) && fabs(f - o->activation_clamp_upper_limit) < 1e-3;
}

/* One token with one hidden element, 1: g and u are the weights; the down weight gives every m an output of its own. */
static void check(const struct unit *unit, int recompute, uint64_t *seed) {
  static float weight[2][I], down[I][I], y[I], dy[I], grad[2][I], saved[2][I];
  static const int32_t id = 0, expert = 0;
  moe_context ctx = {.allocate = allocate, .release = release};
  float hidden[I] = {1}, wide[I][2][I] = {{{0}}}, wide_grad[I][2][I]; /* H = I: all hidden elements but one are 0 */
  for (int i = 0; i < I; i++) {
    for (int part = 0; part < 2; part++) {
      weight[part][i] = (float)test_random_range(seed, -900, 900) / 128;
      wide[0][part][i] = weight[part][i];
    }
    down[i][i] = 1, dy[i] = (float)test_random_range(seed, -64, 64) / 32;
  }
  const moe_blockwise_layer layer = {.T = 1,
                                     .H = I,
                                     .I = I,
                                     .E = 1,
                                     .N = 1,
                                     .B = 1,
                                     .hidden_states = hidden,
                                     .gate_up_proj_weight = wide,
                                     .down_proj_weight = down,
                                     .token_position_to_id = &id,
                                     .block_to_expert = &expert,
                                     .config = unit->config};
  moe_blockwise_mm_fwd_args f = {.layer = layer, .gate_up_activations_T = saved, .output = y};
  moe_blockwise_mm_bwd_args b = {.layer = layer,
                                 .gate_up_activations_T = recompute ? NULL : saved,
                                 .output_hidden_states_grad = dy,
                                 .gate_up_proj_weight_grad = wide_grad};
  f.layer.config.affinity_mode = b.layer.config.affinity_mode = MOE_AFFINITY_NO_SCALE;
  assert_int_equal(moe_blockwise_mm_fwd_f32(&ctx, &f), MOE_OK);
  assert_int_equal(moe_blockwise_mm_bwd_f32(&ctx, &b), MOE_OK);
  memcpy(grad, wide_grad[0], sizeof grad);
  for (int i = 0; i < I; i++) {
    const moe_layer_config *o = &unit->config;
    const double g = weight[0][i], u = weight[1][i], h = 1e-5, u24 = 0x1p-24;
    const double m = unit_m(o, g, u), size = (1 + fabs(g)) * (1 + fabs(u)) + u * u * (o->skip_gate != 0);
    /* Contract 6's 8, tanh and the roundings of three products, of factors that are at most |g| and |u|+1. */
    if (!(fabs(y[i] - m) <= 24 * u24 * size)) fail_msg("%s: m(%g, %g) is %.9g, not %.9g", unit->name, g, u, y[i], m);
    if (at_kink(o, g, u)) continue;
    const double slope[2] = {(unit_m(o, g + h, u) - unit_m(o, g - h, u)) / (2 * h),
                             (unit_m(o, g, u + h) - unit_m(o, g, u - h)) / (2 * h)};
    for (int part = o->skip_gate; part < 2; part++)
      if (!(fabs(grad[part][i] - dy[i] * slope[part]) <= fabs((double)dy[i]) * size * (32 * u24 + 1e-8)))
        fail_msg("%s: d%d(%g, %g) is %.9g, not %.9g", unit->name, part, g, u, grad[part][i], dy[i] * slope[part]);
  }
}

static void test_unit(void **state) {
  uint64_t seed = 1;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (int i = 0; i < CASES && test_use_isa(isa); i++) check(*state, i & 1, &seed);
  test_use_best_isa();
}

/* At its limit the activation is limited: no gradient through the gate, but one through up. The limits are exact. */
static void test_at_limit(void **state) {
  (void)state;
  static const int32_t id = 0, expert = 0;
  for (int i = 0; i < 3; i++) {
    const float x[1] = {1}, w[2] = {2 + (float)(i - 1) * 0x1p-22f, 3}, down[1] = {1};
    float y, grad[2];
    moe_context ctx = {.allocate = allocate, .release = release};
    const moe_blockwise_layer layer = {.T = 1,
                                       .H = 1,
                                       .I = 1,
                                       .E = 1,
                                       .N = 1,
                                       .B = 1,
                                       .hidden_states = x,
                                       .gate_up_proj_weight = w,
                                       .down_proj_weight = down,
                                       .token_position_to_id = &id,
                                       .block_to_expert = &expert,
                                       .config = {.activation = MOE_ACT_RELU,
                                                  .clamp = MOE_CLAMP_ACTIVATION_UPPER,
                                                  .activation_clamp_upper_limit = 2,
                                                  .affinity_mode = MOE_AFFINITY_NO_SCALE}};
    const moe_blockwise_mm_fwd_args f = {.layer = layer, .output = &y};
    const moe_blockwise_mm_bwd_args b = {
        .layer = layer, .output_hidden_states_grad = x, .gate_up_proj_weight_grad = grad};
    assert_int_equal(moe_blockwise_mm_fwd_f32(&ctx, &f), MOE_OK);
    assert_int_equal(moe_blockwise_mm_bwd_f32(&ctx, &b), MOE_OK);
    assert_true(y == 3 * fminf(w[0], 2) && grad[0] == (i == 0 ? 3.0f : 0.0f) && grad[1] == fminf(w[0], 2));
  }
}

int main(void) {
  enum { UNITS = sizeof units / sizeof *units };
  struct CMUnitTest tests[UNITS + 1] = {cmocka_unit_test(test_at_limit)};
  for (int i = 0; i < UNITS; i++)
    tests[i + 1] = (struct CMUnitTest){units[i].name, test_unit, NULL, NULL, (void *)(uintptr_t)&units[i]};
  return cmocka_run_group_tests_name("glu", tests, NULL, NULL);
}
