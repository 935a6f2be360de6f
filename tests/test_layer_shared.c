/* test_layer_shared: a shared expert whose weights are quantised or packed is what a routed expert of the same weights
   is that every token has with weight 1: 0 differing bits in y and x's gradient, kept and computed again. */
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

int main(void) {
  const struct CMUnitTest tests[] = {EACH_DTYPE(as_routed)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
