/* test_no_tokens: T = 0, as an idle rank or an empty micro-batch has it, in every function that takes tokens: no error,
   losses are 0, gradients of weights are 0 or, accumulated, what they were, and tensors without elements may be NULL.
   Then blocks that nobody has, and arrays of no rows. */
#include "support/test.h"

#include "support/pool.h"

enum { H = 70, I = 66, E = 3, K = 2, B = 4, GRADS = 2 * E * H * I, MEMORY = 1 << 25 };

static float weight[GRADS], weight_grad[GRADS], bias_grad[2 * E * (H + I)];
static char memory[MEMORY];

static void *allocate(void *user, size_t bytes) {
  (void)user;
  assert_true(bytes <= MEMORY);
  memset(memory, 0xff, bytes);
  return memory;
}
static void release(void *user, void *from, size_t bytes) { (void)user, (void)from, (void)bytes; }

/* One thread or three, fixed shares or not. */
static moe_context context(int i) {
  return (moe_context){.allocate = allocate,
                       .release = release,
                       .num_threads = i % 2 ? 3 : 1,
                       .schedule = (moe_schedule)(i % MOE_SCHEDULE_COUNT_),
                       .parallel_for = test_pool_parallel_for};
}

static void fill(float *x, int64_t n, float value) {
  for (int64_t i = 0; i < n; i++) x[i] = value;
}
static void assert_all(const float *x, int64_t n, float value) {
  for (int64_t i = 0; i < n; i++) assert_true(x[i] == value);
}

/* What was called, by name. */
static struct {
  const char *name;
  int calls;
} functions[] = {
#define PUBLIC(function, form, type) {#function, 0},
#include "support/public.inl"
};
enum { FUNCTIONS = sizeof functions / sizeof *functions };

static void called(const char *text) {
  const size_t n = strcspn(text, "(");
  for (int i = 0; i < FUNCTIONS; i++)
    functions[i].calls += strlen(functions[i].name) == n && memcmp(functions[i].name, text, n) == 0;
}

/* CALL_ takes macros in the status as they are expanded. */
#define CALL_(status, text, ctx)                                     \
  do {                                                               \
    called(text);                                                    \
    if ((status) != MOE_OK) fail_msg("%s: %s", text, (ctx).message); \
  } while (0)
#define CALL(status, ctx) CALL_(status, #status, ctx)

static void test_router(void **state) {
  for (int i = 0; i < 2 * MOE_SCHEDULE_COUNT_; i++) {
    moe_context ctx = context(i);
    const float old = i & 1 ? 3.0f : 0.0f;
    const uint32_t accumulate = i & 1 ? MOE_ACCUMULATE_ROUTER_WEIGHT_GRAD | MOE_ACCUMULATE_ROUTER_BIAS_GRAD : 0;
    const moe_router_topk_args a = {.H = H,
                                    .E = E,
                                    .K = K,
                                    .hidden_states = i & 2 ? weight : NULL,
                                    .router_weight = weight,
                                    .indices_given = i >> 2 & 1,
                                    .config = {.logit_softcap = i & 1 ? 3 : 0}};
    const moe_router_topk_bwd_args b = {.H = H,
                                        .E = E,
                                        .K = K,
                                        .router_weight = weight,
                                        .router_weight_grad = weight_grad,
                                        .router_bias_grad = bias_grad,
                                        .hidden_states_grad = i & 2 ? weight : NULL,
                                        .weight_grad_dtype = MOE_DTYPE_F32,
                                        .accumulate = accumulate};
    fill(weight_grad, H * E, old ? old : 7.0f), fill(bias_grad, E, old ? old : 7.0f);
    size_t bytes;
#define ROUTER(name, type, NAME)                                              \
  if (*(const moe_dtype *)*state == MOE_DTYPE_##NAME) {                       \
    CALL(moe_router_topk_##name##_workspace_size(&ctx, &a, &bytes), ctx);     \
    CALL(moe_router_topk_##name(&ctx, &a), ctx);                              \
    CALL(moe_router_topk_bwd_##name##_workspace_size(&ctx, &b, &bytes), ctx); \
    CALL(moe_router_topk_bwd_##name(&ctx, &b), ctx);                          \
  }
    MOE_DTYPE_LIST(ROUTER)
#undef ROUTER
    assert_all(weight_grad, H * E, old), assert_all(bias_grad, E, old);
  }
}

static void test_losses(void **state) {
  (void)state;
  static const int64_t counts[E] = {5, 0, 1}, nobody[E], first[2];
  for (int i = 0; i < 6; i++) {
    moe_context ctx = context(i);
    float loss = 5, bias[E] = {1, 2, 3};
    const moe_router_loss_args a = {.E = E,
                                    .K = K,
                                    .coefficient = 0.5f,
                                    .loss = &loss,
                                    .logit_softcap = i & 1 ? 2.0f : 0.0f,
                                    .total_tokens = i / 2 == 1 ? 6 : 0,
                                    .expert_counts = i / 2 == 1 ? counts : NULL,
                                    .S = i == 4,
                                    .sequence_first = i / 2 == 2 ? first : NULL};
    CALL(moe_router_load_balance_loss(&ctx, &a), ctx);
    assert_true(loss == 0);
    loss = 5;
    CALL(moe_router_z_loss(&ctx, &a), ctx);
    assert_true(loss == 0);
    const moe_router_bias_update_args u = {
        .E = E, .rate = 0.5f, .centered = i & 1, .expert_counts = nobody, .selection_bias = bias};
    CALL(moe_router_bias_update(&ctx, &u), ctx);
    assert_true(bias[0] == 1 && bias[1] == 2 && bias[2] == 3);
  }
}

static void test_blocks(void **state) {
  (void)state;
  called("moe_route_blocks_count");
  assert_int_equal(moe_route_blocks_count(0, E, K, B), 0);
  for (int i = 0; i < 8; i++) {
    moe_context ctx = context(i);
    float affinities[E] = {9, 9, 9};
    int32_t ids[E * B], experts[E], conditions[E + 1];
    int64_t tokens[E] = {9, 9, 9};
    size_t bytes;
    const int64_t N = i & 2 ? E : 0;
    const moe_route_blocks_args a = {.E = E,
                                     .K = K,
                                     .B = B,
                                     .N = N,
                                     .skip_token = i & 1,
                                     .block_per_expert = (i & 6) == 6,
                                     .drop_policy = i & 1 ? MOE_DROP_BY_WEIGHT : MOE_DROP_BY_POSITION,
                                     .expert_affinities_masked = affinities,
                                     .token_position_to_id = N ? ids : NULL,
                                     .block_to_expert = N ? experts : NULL,
                                     .conditions = conditions,
                                     .tokens_per_expert = tokens};
    memset(ids, 0x55, sizeof ids), memset(conditions, 0x55, sizeof conditions);
    CALL(moe_route_blocks_workspace_size(&ctx, &a, &bytes), ctx);
    CALL(moe_route_blocks(&ctx, &a), ctx);
    assert_all(affinities, E, i & 1 ? 9.0f : 0.0f); /* with padding tokens they have a row of zeros */
    for (int64_t j = 0; j < N * B; j++) assert_int_equal(ids[j], i & 1 ? -1 : 0);
    for (int64_t j = 0; j <= N; j++) assert_int_equal(conditions[j], 0);
    for (int j = 0; j < E; j++) assert_int_equal(tokens[j], 0);
  }
}

/* The layer of no tokens in N blocks, forward and backward; options by the bits of i. */
static void run_layer(moe_dtype dtype, int64_t N, int i) {
  static const int32_t padding[2 * B], minus[2 * B] = {-1, -1, -1, -1, -1, -1, -1, -1}, experts[2] = {0, 2};
  static const uint8_t codes[2 * E * H * I];
  static const float scales[2 * E * H * I] = {1};
  moe_context ctx = context(i);
  const float old = i & 1 ? 3.0f : 0.0f;
  const moe_quantized_activation x = {.float_scales = i & 16 && i & 32};
  const moe_quantized_weight gate_up = {
      .element = MOE_ELEMENT_E4M3FN, .scaling = MOE_WEIGHT_STATIC, .codes = codes, .scales = scales};
  moe_blockwise_layer layer = {
      .H = H,
      .I = I,
      .E = E,
      .N = N,
      .B = B,
      .gate_up_proj_weight = weight,
      .down_proj_weight = weight,
      .gate_and_up_proj_bias = i & 2 ? weight : NULL,
      .down_proj_bias = i & 2 ? weight : NULL,
      .token_position_to_id = N == 0  ? NULL
                              : i & 4 ? minus
                                      : padding,
      .block_to_expert = N ? experts : NULL,
      .skip_token = i & 4 ? 1 : 0,
      .config = {.affinity_mode = (moe_affinity_mode)(i / 8 % MOE_AFFINITY_COUNT_), .skip_gate = i / 64 % 2}};
  layer.mx.activations.enabled = layer.mx.weights.enabled = layer.mx.gradients.enabled = i / 32 % 2;
  if (i & 16) layer.quantized_hidden_states = &x, layer.quantized_gate_up_proj_weight = &gate_up;
  const moe_blockwise_mm_fwd_args f = {.layer = layer};
  moe_blockwise_mm_bwd_args b = {.layer = layer,
                                 .gate_up_proj_weight_grad = weight_grad,
                                 .down_proj_weight_grad = weight_grad,
                                 .gate_and_up_proj_bias_grad = bias_grad,
                                 .down_proj_bias_grad = bias_grad + 2 * E * I,
                                 .weight_grad_dtype = MOE_DTYPE_F32,
                                 .quantized_output_hidden_states_grad = i & 16 ? &x : NULL,
                                 .accumulate =
                                     i & 1 ? MOE_ACCUMULATE_GATE_UP_WEIGHT_GRAD | MOE_ACCUMULATE_DOWN_WEIGHT_GRAD |
                                                 MOE_ACCUMULATE_GATE_UP_BIAS_GRAD | MOE_ACCUMULATE_DOWN_BIAS_GRAD
                                           : 0};
  size_t bytes;
  for (int down = 0; down < 2; down++) {
    b.gate_up_proj_weight_grad = down ? NULL : weight_grad, b.down_proj_weight_grad = down ? weight_grad : NULL;
    fill(weight_grad, GRADS, old ? old : 7.0f), fill(bias_grad, E * (2 * I + H), old ? old : 7.0f);
#define LAYER(name, type, NAME)                                                \
  if (dtype == MOE_DTYPE_##NAME) {                                             \
    CALL(moe_blockwise_mm_fwd_##name##_workspace_size(&ctx, &f, &bytes), ctx); \
    CALL(moe_blockwise_mm_fwd_##name(&ctx, &f), ctx);                          \
    CALL(moe_blockwise_mm_bwd_##name##_workspace_size(&ctx, &b, &bytes), ctx); \
    CALL(moe_blockwise_mm_bwd_##name(&ctx, &b), ctx);                          \
  }
    MOE_DTYPE_LIST(LAYER)
#undef LAYER
    assert_all(weight_grad, down ? E * I * H : E * H * 2 * I, old);
    assert_all(bias_grad, E * (2 * I + H), old);
  }
}

static void test_layer(void **state) {
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (int i = 0; i < 128 && test_use_isa(isa); i++)
      for (int64_t N = 0; N <= 2; N += 2) run_layer(*(const moe_dtype *)*state, N, i);
  test_use_best_isa();
}

/* Tokens of which no block has any: the output is 0, or what it was. */
static void test_no_blocks(void **state) {
  (void)state;
  float y[2 * H], x[2 * H] = {0}, dx[2 * H];
  for (int i = 0; i < 2 * MOE_SCHEDULE_COUNT_; i++) {
    moe_context ctx = context(i);
    const moe_blockwise_layer layer = {.T = 2,
                                       .H = H,
                                       .I = I,
                                       .E = E,
                                       .B = B,
                                       .hidden_states = x,
                                       .gate_up_proj_weight = weight,
                                       .down_proj_weight = weight,
                                       .config = {.affinity_mode = MOE_AFFINITY_NO_SCALE}};
    const moe_blockwise_mm_fwd_args f = {.layer = layer, .output = y, .accumulate = i & 1 ? MOE_ACCUMULATE_OUTPUT : 0};
    const moe_blockwise_mm_bwd_args b = {.layer = layer,
                                         .output_hidden_states_grad = x,
                                         .hidden_states_grad = dx,
                                         .gate_up_proj_weight_grad = weight_grad,
                                         .accumulate = i & 1 ? MOE_ACCUMULATE_HIDDEN_STATES_GRAD : 0};
    fill(y, 2 * H, 4), fill(dx, 2 * H, 4), fill(weight_grad, GRADS, 4);
    CALL(moe_blockwise_mm_fwd_f32(&ctx, &f), ctx);
    CALL(moe_blockwise_mm_bwd_f32(&ctx, &b), ctx);
    assert_all(y, 2 * H, i & 1 ? 4.0f : 0.0f), assert_all(dx, 2 * H, i & 1 ? 4.0f : 0.0f);
    assert_all(weight_grad, E * H * 2 * I, 0);
  }
}

static void test_arrays(void **state) {
  (void)state;
  moe_context ctx = context(1);
#define CONVERT(name, type, NAME)                        \
  CALL(moe_##name##_from_f32(&ctx, NULL, NULL, 0), ctx); \
  CALL(moe_##name##_to_f32(&ctx, NULL, NULL, 0), ctx);
  MOE_DTYPE_LIST(CONVERT)
#undef CONVERT
#define ELEMENT(name, NAME, bits, fraction, bias, max, infinity, nan) \
  CALL(moe_##name##_from_f32(&ctx, NULL, NULL, 0, 0), ctx);           \
  CALL(moe_##name##_to_f32(&ctx, NULL, NULL, 0), ctx);
  MOE_ELEMENT_LIST(ELEMENT)
#undef ELEMENT
  CALL(moe_e8m0_to_f32(&ctx, NULL, NULL, 0), ctx);
  CALL(moe_e8m0_from_f32(&ctx, NULL, NULL, 0), ctx);
  CALL(moe_activation_f32(&ctx, MOE_ACT_GELU, 0, NULL, NULL, NULL, 0), ctx);
  for (int i = 0; i < 16; i++) {
    const int64_t rows = i & 1 ? 5 : 0, columns = i & 1 ? 0 : 40;
    CALL(moe_quantize_mx(&ctx, &(moe_quantize_mx_args){.rows = rows, .columns = columns, .transposed = i >> 1 & 1}),
         ctx);
    CALL(moe_dequantize_mx(&ctx, &(moe_dequantize_mx_args){.rows = rows, .columns = columns, .transposed = i >> 1 & 1}),
         ctx);
    CALL(moe_quantize_scaled(&ctx, &(moe_quantize_scaled_args){.rows = rows,
                                                               .columns = columns,
                                                               .block_rows = i & 4 ? 1 : 0,
                                                               .block_columns = i & 8 ? 128 : 0}),
         ctx);
    CALL(moe_dequantize_scaled(&ctx, &(moe_dequantize_scaled_args){.rows = rows,
                                                                   .columns = columns,
                                                                   .block_rows = i & 4 ? 1 : 0,
                                                                   .block_columns = i & 8 ? 128 : 0}),
         ctx);
    CALL(moe_quantize_group(&ctx, &(moe_quantize_group_args){.rows = rows, .columns = columns, .group = 1 + i}), ctx);
    CALL(moe_dequantize_group(&ctx, &(moe_dequantize_group_args){.rows = rows, .columns = columns, .group = 1 + i}),
         ctx);
  }
}

/* ------------------------------------------------------------------------------------- other faces of the layer */

/* Options by the bits of i: what is accumulated, biases, ... Gradients begin with `old`, or with what must not stay. */
static float begin(int i) {
  const float old = i & 1 ? 3.0f : 0.0f;
  fill(weight_grad, GRADS, old ? old : 7.0f), fill(bias_grad, 2 * E * (H + I), old ? old : 7.0f);
  return old;
}

enum { BIASES = MOE_ACCUMULATE_GATE_UP_BIAS_GRAD | MOE_ACCUMULATE_DOWN_BIAS_GRAD };

#define LAYER_CALLS(name, type, NAME)                                              \
  if (dtype == MOE_DTYPE_##NAME) {                                                 \
    CALL(moe_layer_saved_bytes_##name(&ctx, &l, &bytes), ctx);                     \
    assert_int_equal(bytes, 0);                                                    \
    CALL(moe_layer_forward_##name##_workspace_size(&ctx, &l, &bytes), ctx);        \
    CALL(moe_layer_forward_##name(&ctx, &l, NULL, NULL), ctx);                     \
    CALL(moe_layer_backward_##name##_workspace_size(&ctx, &l, NULL, &bytes), ctx); \
    CALL(moe_layer_backward_##name(&ctx, &l, NULL, NULL, &g), ctx);                \
  }

static void test_moe_layer(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (int i = 0; i < 16; i++) {
    moe_context ctx = context(i);
    const float old = begin(i);
    const void *bias = i & 2 ? weight : NULL;
    const moe_layer l = {.H = H,
                         .I = I,
                         .E = E,
                         .K = K,
                         .gate_up = weight,
                         .down = weight,
                         .gate_up_bias = bias,
                         .down_bias = bias,
                         .identity_experts = i & 4 ? 2 : 0,
                         .config = {.skip_gate = i >> 3 & 1}};
    const moe_layer_grads g = {.gate_up = weight_grad,
                               .gate_up_bias = bias_grad,
                               .down_bias = bias_grad + 2 * E * I,
                               .weight_dtype = MOE_DTYPE_F32,
                               .accumulate = i & 1 ? MOE_ACCUMULATE_GATE_UP_WEIGHT_GRAD | (uint32_t)BIASES : 0};
    size_t bytes = 1;
    MOE_DTYPE_LIST(LAYER_CALLS)
    assert_all(weight_grad, 2 * E * H * I, old), assert_all(bias_grad, E * (2 * I + H), old);
  }
}

#define MLP_CALLS(name, type, NAME)                                                \
  if (dtype == MOE_DTYPE_##NAME) {                                                 \
    CALL(moe_grouped_mlp_##name##_workspace_size(&ctx, &m, &bytes), ctx);          \
    CALL(moe_grouped_mlp_##name(&ctx, &m), ctx);                                   \
    m.accumulate = i & 1 ? MOE_ACCUMULATE_DOWN_WEIGHT_GRAD | (uint32_t)BIASES : 0; \
    CALL(moe_grouped_mlp_bwd_##name##_workspace_size(&ctx, &m, &bytes), ctx);      \
    CALL(moe_grouped_mlp_bwd_##name(&ctx, &m), ctx);                               \
  }

static const int32_t no_rows[E];

static void test_grouped_mlp(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  float *const down_grad = weight_grad + 2 * E * H * I / 2;
  for (int i = 0; i < 16; i++) {
    moe_context ctx = context(i);
    const float old = begin(i);
    const void *bias = i & 2 ? weight : NULL;
    moe_grouped_mlp_args m = {.topk = K,
                              .E = E,
                              .H = H,
                              .I = I,
                              .m_sizes = no_rows,
                              .gate_up = weight,
                              .down = weight,
                              .gate_up_bias = bias,
                              .down_bias = bias,
                              .ddown = down_grad,
                              .ddown_bias = bias_grad,
                              .weight_grad_dtype = MOE_DTYPE_F32};
    size_t bytes = 1;
    MOE_DTYPE_LIST(MLP_CALLS)
    assert_all(down_grad, E * I * H, old), assert_all(bias_grad, E * H, old);
  }
}

#define GEMM_CALLS(name, type, NAME)                                          \
  if (dtype == MOE_DTYPE_##NAME) {                                            \
    CALL(moe_grouped_gemm_##name##_workspace_size(&ctx, &p, &bytes), ctx);    \
    CALL(moe_grouped_gemm_##name(&ctx, &p), ctx);                             \
    CALL(moe_grouped_gemm_dx_##name##_workspace_size(&ctx, &p, &bytes), ctx); \
    CALL(moe_grouped_gemm_dx_##name(&ctx, &p), ctx);                          \
    CALL(moe_grouped_gemm_dw_##name##_workspace_size(&ctx, &p, &bytes), ctx); \
    CALL(moe_grouped_gemm_dw_##name(&ctx, &p), ctx);                          \
  }

static void test_grouped_gemm(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (int i = 0; i < 16; i++) {
    moe_context ctx = context(i);
    const float old = begin(i);
    const moe_grouped_gemm_args p = {.topk = K,
                                     .E = E,
                                     .N = I,
                                     .K = H,
                                     .m_sizes = no_rows,
                                     .permute_x = i >> 1 & 1,
                                     .W = weight,
                                     .bias = i & 2 ? weight : NULL,
                                     .dW = weight_grad,
                                     .bias_grad = bias_grad,
                                     .weight_grad_dtype = MOE_DTYPE_F32,
                                     .accumulate = i & 1 ? MOE_ACCUMULATE_DW | MOE_ACCUMULATE_BIAS_GRAD : 0};
    moe_tune_entry entry;
    moe_tune_table table = {&entry, 0, 1};
    const moe_tune_grouped_gemm_args tune = {
        .gemm = &p, .op = (moe_tune_op)(i % MOE_TUNE_OP_COUNT_), .dtype = dtype, .table = &table, .repeats = 1};
    size_t bytes = 1;
    MOE_DTYPE_LIST(GEMM_CALLS)
    assert_all(weight_grad, E * I * H, old), assert_all(bias_grad, E * I, old);
    CALL(moe_tune_grouped_gemm(&ctx, &tune), ctx);
    assert_int_equal(table.count, 1);
  }
}

/* ------------------------------------------------------------------------------------------------------ MXFP8 MLP */

enum { HM = 96, IM = 64 };

static void test_mlp(void **state) {
  (void)state;
  static const uint8_t scales[1 << 12];
  for (int i = 0; i < 32; i++) {
    moe_context ctx = context(i);
    const float old = i & 1 ? 3.0f : 0.0f;
    const moe_mxfp8_operand w = {.data = weight, .scales = i & 16 ? scales : NULL};
    const moe_mlp_mxfp8 mlp = {.H = HM,
                               .I = IM,
                               .unrounded_gate_act = i >> 1 & 1,
                               .format = {.layout = i & 4 ? MOE_MX_LAYOUT_NKI_WRAPX : MOE_MX_LAYOUT_PLAIN},
                               .config = {.clamp = 15}};
    const moe_mlp_fwd_mxfp8_args f = {.mlp = mlp, .gate_up_weights = w, .down_weight = w};
    const moe_mlp_bwd_mxfp8_args b = {
        .mlp = mlp,
        .gate_up_weights = w,
        .down_weight = w,
        .gate_up_weight_grad = weight_grad,
        .down_weight_grad = weight_grad + 2 * HM * IM,
        .weight_grad_dtype = MOE_DTYPE_F32,
        .accumulate = i & 1 ? MOE_ACCUMULATE_GATE_UP_WEIGHT_GRAD | MOE_ACCUMULATE_DOWN_WEIGHT_GRAD : 0};
    moe_matmul_mxfp8_args p = {
        .M = i & 8 ? 0 : 5, .N = 7, .a = w, .b = w, .output = weight_grad, .output_dtype = MOE_DTYPE_F32};
    size_t bytes;
    for (int phases = 0; phases < 2; phases++) {
      fill(weight_grad, GRADS, old ? old : 7.0f);
      if (phases) {
        CALL(moe_mlp_bwd_mxfp8_recompute_workspace_size(&ctx, &b, &bytes), ctx);
        CALL(moe_mlp_bwd_mxfp8_recompute(&ctx, &b), ctx);
        CALL(moe_mlp_bwd_mxfp8_phase1_workspace_size(&ctx, &b, &bytes), ctx);
        CALL(moe_mlp_bwd_mxfp8_phase1(&ctx, &b), ctx);
        CALL(moe_mlp_bwd_mxfp8_phase2_workspace_size(&ctx, &b, &bytes), ctx);
        CALL(moe_mlp_bwd_mxfp8_phase2(&ctx, &b), ctx);
        CALL(moe_mlp_bwd_mxfp8_phase3_workspace_size(&ctx, &b, &bytes), ctx);
        CALL(moe_mlp_bwd_mxfp8_phase3(&ctx, &b), ctx);
        CALL(moe_mlp_bwd_mxfp8_phase4_workspace_size(&ctx, &b, &bytes), ctx);
        CALL(moe_mlp_bwd_mxfp8_phase4(&ctx, &b), ctx);
      } else {
        CALL(moe_mlp_fwd_mxfp8_workspace_size(&ctx, &f, &bytes), ctx);
        CALL(moe_mlp_fwd_mxfp8(&ctx, &f), ctx);
        CALL(moe_mlp_bwd_mxfp8_workspace_size(&ctx, &b, &bytes), ctx);
        CALL(moe_mlp_bwd_mxfp8(&ctx, &b), ctx);
      }
      assert_all(weight_grad, 3 * HM * IM, old);
    }
    fill(weight_grad, 35, 7);
    if (!p.M) p.K = HM;
    CALL(moe_matmul_mxfp8_workspace_size(&ctx, &p, &bytes), ctx);
    CALL(moe_matmul_mxfp8(&ctx, &p), ctx);
    assert_all(weight_grad, 35, p.M ? 0.0f : 7.0f); /* sums of nothing, or no sums */
  }
}

/* -------------------------------------------------------------------------------------------------- routings, ranks */

static void test_routings(void **state) {
  (void)state;
  for (int i = 0; i < 8; i++) {
    moe_context ctx = context(i);
    int32_t sizes[E], ids[2 * B], experts[2], conditions[3], bins[E], padded[E], counts[E], displacements[E];
    int64_t tokens[E];
    size_t bytes;
    const int64_t N = i & 2 ? 2 : 0;
    moe_routing_args a = {.E = E,
                          .K = K,
                          .B = B,
                          .N = N,
                          .m_sizes = sizes,
                          .skip_token = i & 1,
                          .token_position_to_id = i & 4 ? NULL : ids,
                          .block_to_expert = i & 4 ? NULL : experts,
                          .conditions = i & 4 ? NULL : conditions,
                          .tokens_per_expert = tokens,
                          .bins = bins,
                          .padded_bins = padded};
    memset(sizes, 1, sizeof sizes), memset(ids, 1, sizeof ids), memset(bins, 1, sizeof bins);
    CALL(moe_routing_from_topk_workspace_size(&ctx, &a, &bytes), ctx);
    CALL(moe_routing_from_topk(&ctx, &a), ctx);
    for (int j = 0; j < E; j++) assert_true(sizes[j] == 0 && tokens[j] == 0 && bins[j] == 0 && padded[j] == 0);
    for (int64_t j = 0; j < N * B && a.token_position_to_id; j++) assert_int_equal(ids[j], i & 1 ? -1 : 0);
    CALL(moe_routing_from_sorted_workspace_size(&ctx, &a, &bytes), ctx);
    CALL(moe_routing_from_sorted(&ctx, &a), ctx);
    a.token_position_to_id = ids, a.block_to_expert = experts, a.conditions = conditions;
    for (int64_t j = 0; j < N * B; j++) ids[j] = i & 1 ? -1 : 0;
    for (int64_t j = 0; j < N; j++) experts[j] = E - 1, conditions[j] = 0;
    memset(sizes, 1, sizeof sizes);
    CALL(moe_routing_from_blocks_workspace_size(&ctx, &a, &bytes), ctx);
    CALL(moe_routing_from_blocks(&ctx, &a), ctx);
    for (int j = 0; j < E; j++) assert_int_equal(sizes[j], 0);
    const moe_expert_parallel_send_args send = {
        .E = E, .K = K, .ranks = 2, .one_per_token = i & 1, .send_counts = counts, .send_displacements = displacements};
    CALL(moe_expert_parallel_send_workspace_size(&ctx, &send, &bytes), ctx);
    CALL(moe_expert_parallel_send(&ctx, &send), ctx);
    assert_true(counts[0] == 0 && counts[1] == 0 && displacements[1] == 0);
    static const int32_t of_ranks[2 * E];
    const moe_expert_parallel_receive_args receive = {.E = E,
                                                      .ranks = 2,
                                                      .rank = i & 1,
                                                      .rank_m_sizes = of_ranks,
                                                      .receive_counts = counts,
                                                      .receive_displacements = displacements,
                                                      .local_m_sizes = sizes};
    CALL(moe_expert_parallel_receive(&ctx, &receive), ctx);
    assert_true(counts[0] == 0 && counts[1] == 0 && sizes[0] == 0);
  }
}

/* What no tokens, rows or columns go through: weights, and what only asks. */
static const char *const without_tokens[] = {"moe_pack_weights_",
                                             "moe_mx_layout_",
                                             "moe_nki_",
                                             "moe_status_",
                                             "moe_dtype_size",
                                             "moe_isa_",
                                             "moe_tune_save",
                                             "moe_tune_load",
                                             "moe_expert_parallel_first",
                                             "moe_program_sharding_info"};

static void test_all(void **state) {
  (void)state;
  for (int i = 0; i < FUNCTIONS; i++) {
    int known = functions[i].calls > 0;
    for (size_t j = 0; j < sizeof without_tokens / sizeof *without_tokens; j++)
      known |= strncmp(functions[i].name, without_tokens[j], strlen(without_tokens[j])) == 0;
    if (!known) fail_msg("%s was not called without tokens", functions[i].name);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      EACH_DTYPE(test_router),    cmocka_unit_test(test_losses),    cmocka_unit_test(test_blocks),
      EACH_DTYPE(test_layer),     cmocka_unit_test(test_no_blocks), cmocka_unit_test(test_arrays),
      EACH_DTYPE(test_moe_layer), EACH_DTYPE(test_grouped_mlp),     EACH_DTYPE(test_grouped_gemm),
      cmocka_unit_test(test_mlp), cmocka_unit_test(test_routings),  cmocka_unit_test(test_all)};
  return cmocka_run_group_tests_name("no tokens", tests, NULL, NULL);
}
