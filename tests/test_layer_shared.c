/* test_layer_shared: a shared expert whose weights are quantised or packed is what a routed expert of the same weights
   is that every token has with weight 1: 0 differing bits in y and x's gradient, kept and computed again. And a layer
   that has every tensor there can be. */
#include "support/layer_parts.h"
#include "support/quantized_layer.h"

enum { T = 7, OUTPUTS = 3 };

static void *packed(moe_context *ctx, moe_dtype dtype, moe_pack_layout layout, const struct quantized *q,
                    size_t *bytes) {
  moe_pack_weights_args args = {
      .layout = layout, .E = 1, .rows = q->K, .columns = q->columns, .quantized_weight = &q->weight};
  assert_int_equal(test_pack_new(ctx, dtype, &args), MOE_OK);
  *bytes = args.packed_bytes;
  return args.packed;
}

/* y, and x's gradient from what was kept, and from nothing. */
static void run_layer(moe_dtype dtype, moe_context *ctx, const moe_layer *l, const void *dy, char **out) {
  size_t saved_bytes;
  assert_int_equal(parts_calls[dtype].saved_bytes(ctx, l, &saved_bytes), MOE_OK);
  void *saved = malloc(saved_bytes + 1);
  parts_run_forward(dtype, ctx, *l, out[0], saved);
  for (int i = 0; i < 2; i++) {
    const moe_layer_grads grads = {.x = out[1 + i]};
    parts_run_backward(dtype, ctx, *l, i ? NULL : saved, dy, &grads);
  }
  free(saved);
}

static void check_stored(moe_dtype dtype, int i, const struct storage *s, int64_t H, int64_t I, uint64_t *rng) {
  static const int32_t first[T], none[T] = {-1, -1, -1, -1, -1, -1, -1};
  static const float one[T] = {1, 1, 1, 1, 1, 1, 1};
  struct problem_options o = problem_options_random((uint64_t)i, dtype);
  moe_context ctx = {.num_threads = 1 + i % 3};
  struct layer stored;
  o.E = o.K = 1, o.H = H, o.I = I, o.T = T;
  problem_options_settle(&o);
  layer_open(&stored, &o, s, 0);
  moe_shared_expert shared = {
      .I = I, .quantized_gate_up = &stored.gate_up.weight, .quantized_down = &stored.down.weight};
  if (s->packed) {
    shared.packed_gate_up = packed(&ctx, dtype, MOE_PACK_GATE_UP, &stored.gate_up, &shared.packed_gate_up_bytes);
    shared.packed_down = packed(&ctx, dtype, MOE_PACK_DOWN, &stored.down, &shared.packed_down_bytes);
  }
  void *x = parts_numbers(dtype, T * H, 2, rng), *dy = parts_numbers(dtype, T * H, 2, rng);
  moe_layer l = {.T = T,
                 .H = H,
                 .I = I,
                 .E = 1,
                 .K = 1,
                 .x = x,
                 .topk_index = first,
                 .topk_weights = one,
                 .quantized_gate_up = shared.quantized_gate_up,
                 .quantized_down = shared.quantized_down,
                 .config = {.activation = (moe_activation)(i % 3)}};
  char *out[2][OUTPUTS];
  const size_t bytes = (size_t)(T * H) * moe_dtype_size(dtype);
  for (int j = 0; j < 2 * OUTPUTS; j++) out[j / OUTPUTS][j % OUTPUTS] = memset(malloc(bytes), 0xff, bytes);
  run_layer(dtype, &ctx, &l, dy, out[0]);
  l.topk_index = none, l.shared = &shared;
  run_layer(dtype, &ctx, &l, dy, out[1]);
  for (int j = 0; j < OUTPUTS; j++)
    if (memcmp(out[0][j], out[1][j], bytes) != 0) fail_msg("case %d: output %d differs", i, j);
  for (int j = 0; j < 2 * OUTPUTS; j++) free(out[j / OUTPUTS][j % OUTPUTS]);
  free((void *)(uintptr_t)shared.packed_gate_up), free((void *)(uintptr_t)shared.packed_down);
  free(x), free(dy);
  layer_close(&stored);
}

static void as_routed(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 8;
  for (int i = 0; i < test_cases(84, 28); i++) {
    struct storage s = {.packed = i / 7 % 2, .powers = 1};
    s.gate_up.scaling = s.down.scaling = (moe_weight_scaling)(i % MOE_WEIGHT_COUNT_);
    s.gate_up.block = s.down.block = 32, s.gate_up.out_in = s.down.out_in = i / 14 % 2;
    s.gate_up.element = s.down.element = i % MOE_WEIGHT_COUNT_ ? MOE_ELEMENT_E4M3FN : MOE_ELEMENT_E2M1;
    if (!test_use_isa(i % TEST_ISA_COUNT)) continue;
    check_stored(dtype, i, &s, test_random_range(&rng, 1, 90), test_random_range(&rng, 1, 90), &rng);
  }
  test_use_best_isa();
}

/* ------------------------------------------------------------------------------------------------------ everything */

enum { ROOM = 4096, E_ALL = 3, H_ALL = 8, I_ALL = 4 };
static int64_t rooms;

/* Memory of zeroes for any tensor, one behind the other. */
static void *room(void) {
  static _Alignas(64) char all[64][ROOM];
  assert_true(rooms < 64);
  return all[rooms++];
}
static float *ones(void) {
  float *x = room();
  for (int i = 0; i < ROOM / 4; i++) x[i] = 1;
  return x;
}

static moe_quantized_weight groups(void) {
  return (moe_quantized_weight){.element = MOE_ELEMENT_UINT4,
                                .scaling = MOE_WEIGHT_GROUP,
                                .block = 2,
                                .codes = room(),
                                .scales = ones(),
                                .global_scale = ones(),
                                .zero_points = room()};
}

/* Every tensor at once: no list is too short for them (under a sanitizer, that is). Codes and zero points are 0, so y is
   what biases and the identity expert make, and gate's bias, which is 0, makes silu(0) = 0. */
static void everything(void **state) {
  (void)state;
  enum { K = 2 };
  moe_context ctx = {.allocate = parts_take, .release = parts_give};
  const moe_quantized_weight w[] = {groups(), groups(), groups(), groups()};
  const moe_quantized_activation x = {.element = MOE_ELEMENT_E4M3FN, .codes = room(), .scales = room()};
  const moe_mx_rounding rounding = {.enabled = 1, .element = MOE_ELEMENT_E4M3FN};
  const moe_router_topk_args router = {.router_weight = room(),
                                       .router_bias = room(),
                                       .selection_bias = room(),
                                       .token_mask = memset(room(), 1, T),
                                       .router_logits = room(),
                                       .expert_index = room(),
                                       .expert_weights = room()};
  const moe_shared_expert shared = {.I = I_ALL,
                                    .orders = {.up_apart = 1},
                                    .quantized_gate_up = &w[2],
                                    .quantized_down = &w[3],
                                    .gate_up_bias = room(),
                                    .down_bias = ones(),
                                    .gate = room()};
  const moe_layer l = {.T = T,
                       .H = H_ALL,
                       .I = I_ALL,
                       .E = E_ALL,
                       .K = K,
                       .identity_experts = 1,
                       .quantized_x = &x,
                       .router = &router,
                       .expert_scale = ones(),
                       .shared = &shared,
                       .orders = {.up_apart = 1},
                       .quantized_gate_up = &w[0],
                       .quantized_down = &w[1],
                       .gate_up_bias = room(),
                       .down_bias = room(),
                       .keep_results = 1,
                       .mx = {.activations = rounding, .gate_up_in_scale = ones(), .down_in_scale = ones()}};
  const moe_shared_expert_grads of_shared = {room(), room(), room(), room(), room(), room()};
  const moe_layer_grads grads = {.x = room(),
                                 .topk_weights = room(),
                                 .expert_scale = room(),
                                 .router_logits = room(),
                                 .router_weight = room(),
                                 .router_bias = room(),
                                 .shared = &of_shared,
                                 .gate_up = room(),
                                 .down = room(),
                                 .up = room(),
                                 .gate_up_bias = room(),
                                 .down_bias = room()};
  float *y = room(), *saved = room(), *dy = ones();
  size_t bytes;
  assert_int_equal(moe_layer_saved_bytes_f32(&ctx, &l, &bytes), MOE_OK);
  assert_true(bytes <= ROOM);
  parts_run_forward(MOE_DTYPE_F32, &ctx, l, y, saved);
  for (int i = 0; i < T * H_ALL; i++) assert_true(y[i] == 0.5f); /* the shared expert's bias, its gate sigmoid(0) */
  parts_run_backward(MOE_DTYPE_F32, &ctx, l, saved, dy, &grads);
  for (int i = 0; i < H_ALL; i++) assert_true(((float *)of_shared.down_bias)[i] == 0.5f * T);
}

int main(void) {
  const struct CMUnitTest tests[] = {EACH_DTYPE(as_routed), cmocka_unit_test(everything)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
