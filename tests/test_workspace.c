/* test_workspace: how much scratch memory is asked for, and that it is enough, whatever the instruction set. */
#include "support/test.h"

#include "support/guard.h"
#include "support/pool.h"

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* moe.h's bounds, THREADS AND MEMORY; "a few KiB" for each expert, block and chunk of tokens are four. */
static void assert_documented_workspace(int64_t T, int64_t H, int64_t I, int64_t E, int64_t B, int threads, int bf16,
                                        int tight) {
  const int64_t N = (T * 4 + B - 1) / B + E, slots = N * B, R = tight ? smaller(slots, T * 4) : slots;
  const int64_t s = bf16 ? 2 : 4, thread = threads, MiB = 1 << 20, whole = (I + 63) / 64 * 64;
  const int64_t more = 4096 * (E + N + (T + 2047) / 2048), apart = slots <= 256 * E ? smaller(R, 16 * E) : 0;
  const int64_t few = 8 * (larger(H, 2 * I) + 256) * (R + T + 64) + MiB / 8, lane = smaller(few, 18 * MiB / 5),
                lane_backward = smaller(few, larger(18 * MiB / 5, larger(256 * R, 4 * T) + MiB / 2));
  const int64_t am = smaller(R * whole * s, larger(larger(R * whole * s / 5, 64 * R * s), thread * 2 * MiB));
  moe_blockwise_layer layer = {.T = T, .H = H, .I = I, .E = E, .N = N, .B = B, .max_rows = tight ? T * 4 : 0};
  moe_context ctx = {.num_threads = threads, .parallel_for = test_pool_parallel_for};
  moe_blockwise_mm_fwd_args fwd = {.layer = layer};
  moe_blockwise_mm_bwd_args bwd = {.layer = layer};
  size_t forward, backward, other;
  bwd.gate_up_activations_T = &layer; /* there is one */
  moe_blockwise_mm_bwd_args scaled = bwd, recompute = {.layer = layer};
  scaled.layer.config.affinity_mode = MOE_AFFINITY_PRE_SCALE;
  const int64_t most = R * (2 * whole * s + whole / 16 + 20) + slots + am + thread * lane_backward + more;
#define SIZES(name)                                                                                          \
  (moe_blockwise_mm_fwd_##name##_workspace_size(&ctx, &fwd, &forward) |                                      \
   moe_blockwise_mm_bwd_##name##_workspace_size(&ctx, &bwd, &backward) |                                     \
   moe_blockwise_mm_bwd_##name##_workspace_size(&ctx, &recompute, &other))
  assert_int_equal(bf16 ? SIZES(bf16) : SIZES(f32), MOE_OK);
  assert_in_range(forward, 1, R * (I * s + 20) + slots + apart * H * 4 + thread * lane + more);
  assert_in_range(backward, 1, most);
  assert_in_range(other, 1, most + 2 * slots * I * s);
  assert_int_equal(bf16 ? moe_blockwise_mm_bwd_bf16_workspace_size(&ctx, &scaled, &other)
                        : moe_blockwise_mm_bwd_f32_workspace_size(&ctx, &scaled, &other), MOE_OK);
  assert_in_range(other, 1, most + R * (2 * I * s + H / 16));
  const moe_quantized_activation codes = {.element = MOE_ELEMENT_E4M3FN};
  fwd.layer.quantized_hidden_states = bwd.layer.quantized_hidden_states = &codes;
  bwd.quantized_output_hidden_states_grad = &codes;
  const size_t plain[2] = {forward, backward};
  assert_int_equal(bf16 ? SIZES(bf16) : SIZES(f32), MOE_OK);
  assert_in_range(forward, plain[0], plain[0] + (size_t)(T * H * s) + 64);
  assert_in_range(backward, plain[1], plain[1] + (size_t)(2 * T * H * s) + 128);
#undef SIZES
}

static void test_documented_workspace(void **state) {
  (void)state;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!test_use_isa(isa)) continue;
    for (int64_t i = 0; i < 200; i++) {
      uint64_t seed = (uint64_t)i;
      const int small = i % 5 == 4;
      const int64_t T = test_random_range(&seed, 1, small ? 40 : i % 3 ? 20000 : 200);
      const int64_t H = test_random_range(&seed, 1, small ? 300 : 4096);
      const int64_t I = test_random_range(&seed, 1, small ? 300 : 4096);
      const int64_t E = test_random_range(&seed, 1, small ? 4 : 128);
      assert_documented_workspace(T, H, I, E, test_random_range(&seed, 1, small ? 8 : 256),
                                  (int)test_random_range(&seed, 1, 64), (int)(i % 2), (int)(i / 2 % 2));
    }
  }
  test_use_best_isa();
}

/* At shapes that are trained, with two threads, at most a tenth of what the tensors take; padding is not counted. */
static void test_workspace_share(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  static const int64_t shapes[][5] = {
      {1024, 2048, 768, 16, 4}, {512, 2048, 768, 128, 8}, {4096, 2048, 768, 128, 8}, {2048, 4096, 14336, 8, 2}};
  const int64_t size = (int64_t)moe_dtype_size(dtype), B = 128;
  moe_context ctx = {.num_threads = 2, .parallel_for = test_pool_parallel_for};
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!test_use_isa(isa)) continue;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
      const int64_t T = shapes[i][0], H = shapes[i][1], I = shapes[i][2], E = shapes[i][3], K = shapes[i][4];
      const int64_t N = moe_route_blocks_count(T, E, K, B), weights = 3 * E * H * I, x = T * H;
      moe_blockwise_layer layer = {.T = T, .H = H, .I = I, .E = E, .N = N, .B = B, .max_rows = T * K};
      moe_blockwise_mm_fwd_args fwd = {.layer = layer};
      moe_blockwise_mm_bwd_args bwd = {.layer = layer, .gate_up_activations_T = &layer};
      size_t forward, backward;
#define SIZES(name, type, NAME)                                                                        \
  if (dtype == MOE_DTYPE_##NAME)                                                                       \
    assert_int_equal(moe_blockwise_mm_fwd_##name##_workspace_size(&ctx, &fwd, &forward) |              \
                         moe_blockwise_mm_bwd_##name##_workspace_size(&ctx, &bwd, &backward),          \
                     MOE_OK);
      MOE_DTYPE_LIST(SIZES)
#undef SIZES
      assert_in_range(forward, 1, (weights + 2 * x) * size / 10);
      assert_in_range(backward, 1, (2 * weights + 4 * x + 2 * T * K * I) * size / 10);
    }
  }
  test_use_best_isa();
}

/* Tokens are taken 96 at a time: threads that find none get no memory. */
static void test_router_lanes(void **state) {
  (void)state;
  size_t bytes[3], backward[3];
  for (int i = 0; i < 3; i++) {
    moe_context ctx = {.num_threads = i == 0 ? 1 : 64, .parallel_for = test_pool_parallel_for};
    const moe_router_topk_args args = {.T = i == 2 ? 97 : 96, .H = 40, .E = 8, .K = 2};
    const moe_router_topk_bwd_args bwd = {.T = i == 2 ? 1000 : 96, .H = 40, .E = 8, .K = 2};
    assert_int_equal(moe_router_topk_f32_workspace_size(&ctx, &args, &bytes[i]), MOE_OK);
    assert_int_equal(moe_router_topk_bwd_f32_workspace_size(&ctx, &bwd, &backward[i]), MOE_OK);
  }
  assert_int_equal(bytes[1], bytes[0]);
  assert_in_range(bytes[2], bytes[0] + 1, 2 * bytes[0]);
  assert_in_range(backward[1], backward[0], 2 * backward[0]); /* two: the weight's gradient, and the bias's */
  assert_in_range(backward[2], backward[1] + 1, 11 * backward[0]);
}

enum { TOKENS = 3, SIDE_MOST = 300, TIMES_MOST = 200 };

/* One expert for every token, `times` times each: output and gradient of the hidden states, in a workspace that ends
   where nothing may be written. */
static void run_repeated(int64_t side, int64_t times, const float *numbers, float *output, float *grad) {
  static int32_t ids[TOKENS * TIMES_MOST];
  const int32_t expert = 0;
  for (int64_t i = 0; i < TOKENS * times; i++) ids[i] = (int32_t)(i % TOKENS);
  const moe_blockwise_layer layer = {
      .T = TOKENS, .H = side, .I = side, .E = 1, .N = 1, .B = TOKENS * times, .hidden_states = numbers,
      .gate_up_proj_weight = numbers + 7, .down_proj_weight = numbers + 11, .token_position_to_id = ids,
      .block_to_expert = &expert, .config = {.activation = MOE_ACT_RELU, .affinity_mode = MOE_AFFINITY_NO_SCALE}};
  moe_blockwise_mm_fwd_args fwd = {.layer = layer, .output = output};
  moe_blockwise_mm_bwd_args bwd = {
      .layer = layer, .output_hidden_states_grad = numbers + 5, .hidden_states_grad = grad};
  assert_int_equal(moe_blockwise_mm_fwd_f32_workspace_size(NULL, &fwd, &fwd.workspace_bytes), MOE_OK);
  assert_int_equal(moe_blockwise_mm_bwd_f32_workspace_size(NULL, &bwd, &bwd.workspace_bytes), MOE_OK);
  struct guarded forward = guard_alloc(fwd.workspace_bytes, GUARD_AFTER),
                 backward = guard_alloc(bwd.workspace_bytes, GUARD_AFTER);
  assert_true((fwd.workspace = forward.data) && (bwd.workspace = backward.data));
  assert_int_equal(moe_blockwise_mm_fwd_f32(NULL, &fwd), MOE_OK);
  assert_int_equal(moe_blockwise_mm_bwd_f32(NULL, &bwd), MOE_OK);
  guard_free(&forward), guard_free(&backward);
}

/* A lane has room for all rows of an expert, though the tokens are fewer: integers, of which every sum is exact. */
static void test_more_rows_than_tokens(void **state) {
  (void)state;
  static float numbers[2 * SIDE_MOST * SIDE_MOST + 16], once[2][TOKENS * SIDE_MOST], often[2][TOKENS * SIDE_MOST];
  static const int64_t sides[] = {1, 40, 64, 65, SIDE_MOST}, times[] = {2, 5, 33, 130, TIMES_MOST};
  uint64_t seed = 1;
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) numbers[i] = (float)test_random_range(&seed, -1, 1);
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (size_t i = 0; i < 25 && test_use_isa(isa); i++) {
      const int64_t side = sides[i / 5], n = times[i % 5];
      run_repeated(side, 1, numbers, once[0], once[1]);
      run_repeated(side, n, numbers, often[0], often[1]);
      int64_t zeros = 0;
      for (int64_t j = 0; j < 2 * TOKENS * side; j++) {
        assert_true(often[j % 2][j / 2] == (float)n * once[j % 2][j / 2]);
        zeros += once[j % 2][j / 2] == 0.0f;
      }
      assert_true(side == 1 || zeros < TOKENS * side);
    }
  test_use_best_isa();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_documented_workspace), EACH_DTYPE(test_workspace_share),
      cmocka_unit_test(test_router_lanes), cmocka_unit_test(test_more_rows_than_tokens)};
  return cmocka_run_group_tests_name("workspace", tests, NULL, NULL);
}
