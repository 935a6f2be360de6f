/* hash_mlp.h: the MXFP8 MLP and its product, for bits_hash. Its functions are there already. */
#ifndef MOE_TEST_HASH_MLP_H
#define MOE_TEST_HASH_MLP_H

enum { HASH_MLP_ELEMENTS = 2 * 160 * 160 };

/* Random values in [-1,1), some zero, some large; or codes and scales. */
static void hash_mlp_fill(moe_bf16 *x, uint64_t *seed, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    float value = (float)((int64_t)(test_random(seed) >> 40) - (1 << 23)) * 0x1p-23f;
    if (test_random_chance(seed, 40)) value *= test_random_chance(seed, 2) ? 0.0f : 100.0f;
    if (moe_bf16_from_f32(NULL, x + i, &value, 1) != MOE_OK) exit(1);
  }
}

#define HASH_MLP_CALL(function, args)                                                 \
  do {                                                                                \
    size_t bytes = 0;                                                                 \
    if (function##_workspace_size(ctx, args, &bytes) != MOE_OK) fail(#function, ctx); \
    (args)->workspace = malloc(bytes + 1), (args)->workspace_bytes = bytes;           \
    if (function(ctx, args) != MOE_OK) fail(#function, ctx);                          \
    free((args)->workspace);                                                          \
    (args)->workspace = NULL;                                                         \
  } while (0)

static moe_bf16 hash_mlp_in[5][HASH_MLP_ELEMENTS], hash_mlp_out[8][HASH_MLP_ELEMENTS];

/* One format: the forward, the backward of what it saves and of nothing. */
static uint64_t hash_mlp_format(struct settings *set, const moe_mlp_mxfp8 *mlp) {
  moe_context *ctx = &set->ctx;
  moe_bf16(*in)[HASH_MLP_ELEMENTS] = hash_mlp_in, (*out)[HASH_MLP_ELEMENTS] = hash_mlp_out;
  moe_mlp_fwd_mxfp8_args fwd = {.mlp = *mlp,
                                .hidden_states = {.data = in[0]},
                                .gate_up_weights = {.data = in[1]},
                                .down_weight = {.data = in[2]},
                                .gate_pre = out[0],
                                .gate_act = out[1],
                                .up = out[2],
                                .hidden = out[3],
                                .output = out[4]};
  moe_mlp_bwd_mxfp8_args bwd = {.mlp = *mlp,
                                .output_grad = {.data = in[3]},
                                .hidden_states = {.data = in[0]},
                                .gate_up_weights = {.data = in[1]},
                                .down_weight = {.data = in[2]},
                                .hidden_states_grad = out[5],
                                .gate_up_weight_grad = out[6],
                                .down_weight_grad = out[7]};
  uint64_t h = 0;
  memset(out, 0, sizeof hash_mlp_out);
  HASH_MLP_CALL(moe_mlp_fwd_mxfp8, &fwd);
  for (int i = 0; i < 2; i++) {
    HASH_MLP_CALL(moe_mlp_bwd_mxfp8, &bwd);
    h = problem_hash_bytes(h, out, 8 * HASH_MLP_ELEMENTS, 2);
    bwd.gate_pre = out[0], bwd.up = out[2];
  }
  return h;
}

static uint64_t hash_mlp_codes(struct settings *set, const moe_mxfp8_format *format) {
  static uint8_t codes[160 * 96], scales[160 * 3];
  moe_context *ctx = &set->ctx;
  uint64_t seed = 5;
  for (int i = 0; i < 160 * 96; i++) codes[i] = (uint8_t)(test_random(&seed) >> 20 & 0xbfu);
  for (int i = 0; i < 160 * 3; i++) scales[i] = (uint8_t)test_random_range(&seed, 118, 126);
  moe_matmul_mxfp8_args args = {.M = 150,
                                .N = 160,
                                .K = 96,
                                .format = *format,
                                .a = {.data = hash_mlp_in[4]},
                                .b = {.data = codes, .scales = scales},
                                .output = hash_mlp_out[0]};
  memset(hash_mlp_out, 0, sizeof hash_mlp_out);
  HASH_MLP_CALL(moe_matmul_mxfp8, &args);
  return problem_hash_bytes(0, hash_mlp_out, 8 * HASH_MLP_ELEMENTS, 2);
}

static void hash_mlp(struct settings *set) {
  static const moe_element element[] = {MOE_ELEMENT_E4M3FN, MOE_ELEMENT_E5M2, MOE_ELEMENT_E4M3};
  static const moe_mx_layout layout[] = {MOE_MX_LAYOUT_PLAIN, MOE_MX_LAYOUT_NKI_WRAPX};
  uint64_t seed = 3;
  for (int i = 0; i < 5; i++) hash_mlp_fill(hash_mlp_in[i], &seed, HASH_MLP_ELEMENTS);
  for (int i = 0; i < 6; i++) {
    moe_mlp_mxfp8 mlp = {.S = i % 2 ? 96 : 67, .H = i % 2 ? 96 : 77, .I = i % 2 ? 128 : 115};
    mlp.format = (moe_mxfp8_format){element[i / 2], i / 2 == 1, MOE_SCALE_ROUND_UP, layout[i % 2]};
    mlp.config = (moe_layer_config){.activation = (moe_activation)i, .clamp = (uint32_t)(i % 2 * 15)};
    mlp.config.gate_clamp_upper_limit = mlp.config.up_clamp_upper_limit = 3.0f;
    mlp.config.gate_clamp_lower_limit = mlp.config.up_clamp_lower_limit = -2.0f;
    printf("mlp %d            bf16 %016llx\n", i, (unsigned long long)hash_mlp_format(set, &mlp));
    printf("matmul_mxfp8 %d   bf16 %016llx\n", i, (unsigned long long)hash_mlp_codes(set, &mlp.format));
  }
}

#endif /* MOE_TEST_HASH_MLP_H */
