/* test_stack: what moe.h promises of the stack, by painting it: every public function, and every task that it hands to
   parallel_for, in the shapes, types, storages and options that reach all algorithms, on every instruction set. */
#include "support/extras.h"
#include "support/painted_calls.h"
#include "support/painted_faces.h"
#include "support/quantized_layer.h"
#include "support/stored.h"

#ifdef __OPTIMIZE__
enum { STACK_MOST = 32 << 10 };
#elif defined(__clang__) /* every temporary of every inlined function has a place of its own */
enum { STACK_MOST = 96 << 10 };
#else
enum { STACK_MOST = 48 << 10 };
#endif

/* ----------------------------------------------------------------------------------------------------------- layers */

#define SIZED(function)                                                                 \
  {FUNCTIONS, FN_##function##_f32, FN_##function##_bf16, FN_##function##_fp16}, {       \
    FUNCTIONS, FN_##function##_f32_workspace_size, FN_##function##_bf16_workspace_size, \
        FN_##function##_fp16_workspace_size                                             \
  }
#define ALIKE(function) {function, function, function, function}

static const struct {
  size_t args;
  int call[4], size[4];
} ops[PROBLEM_OP_COUNT] = {
    {offsetof(struct problem_args, router), SIZED(moe_router_topk)},
    {offsetof(struct problem_args, load_balance), ALIKE(FN_moe_router_load_balance_loss), ALIKE(FUNCTIONS)},
    {offsetof(struct problem_args, z_loss), ALIKE(FN_moe_router_z_loss), ALIKE(FUNCTIONS)},
    {offsetof(struct problem_args, route), ALIKE(FN_moe_route_blocks), ALIKE(FN_moe_route_blocks_workspace_size)},
    {offsetof(struct problem_args, forward), SIZED(moe_blockwise_mm_fwd)},
    {offsetof(struct problem_args, backward), SIZED(moe_blockwise_mm_bwd)},
    {offsetof(struct problem_args, router_backward), SIZED(moe_router_topk_bwd)}};

static void use_op(enum problem_op op, moe_context *ctx, struct problem_args *args) {
  const void *own = (const char *)args + ops[op].args;
  size_t bytes = 0;
  if (ops[op].size[args->dtype] != FUNCTIONS) use_once(ops[op].size[args->dtype], ctx, own, &bytes);
  void *workspace = take(bytes);
  problem_set_workspace(op, args, workspace, bytes);
  use_once(ops[op].call[args->dtype], ctx, own, NULL);
  free(workspace);
}

static const int pack_call[] = {FUNCTIONS, FN_moe_pack_weights_f32, FN_moe_pack_weights_bf16, FN_moe_pack_weights_fp16};
static const int pack_size[] = {FUNCTIONS, FN_moe_pack_weights_f32_size, FN_moe_pack_weights_bf16_size,
                                FN_moe_pack_weights_fp16_size};

static void *use_pack(moe_dtype dtype, moe_pack_weights_args args, size_t *bytes) {
  use(pack_size[dtype], &args, bytes);
  args.packed = take(args.packed_bytes = *bytes);
  use(pack_call[dtype], &args, NULL);
  return args.packed;
}

/* How a layer's operands are given. */
struct given {
  int quantized, packed, extras; /* extras: as many as there can be, if not 0 */
  const struct stored *x, *grad;
};

static void give_packed(struct layer *l, const struct given *given, moe_blockwise_layer *to) {
  const struct problem_options *o = &l->p.o;
  moe_pack_weights_args args = {.layout = o->layer.skip_gate ? MOE_PACK_UP : MOE_PACK_GATE_UP,
                                .E = o->E,
                                .rows = o->H,
                                .columns = o->I,
                                .weight = given->quantized ? NULL : to->gate_up_proj_weight,
                                .quantized_weight = given->quantized ? &l->gate_up.weight : NULL};
  to->packed_gate_up_proj_weight = use_pack(o->dtype, args, &to->packed_gate_up_proj_weight_bytes);
  args.layout = MOE_PACK_DOWN, args.rows = o->I, args.columns = o->H;
  args.weight = given->quantized ? NULL : to->down_proj_weight;
  args.quantized_weight = given->quantized ? &l->down.weight : NULL;
  to->packed_down_proj_weight = use_pack(o->dtype, args, &to->packed_down_proj_weight_bytes);
}

/* The operations up to `last`. */
static void use_layer(struct layer *l, moe_context *ctx, const struct given *given, enum problem_op last) {
  uint64_t seed = (uint64_t)given->extras;
  static struct extras extras;
  if (given->extras) extras = extras_random(&l->p, &seed);
  problem_describe(&l->p, ctx, situation, sizeof situation);
  for (int op = 0; op <= (int)last; op++) {
    struct problem_args args;
    void *packed[2] = {NULL, NULL};
    problem_make_args(&l->p, &args);
    moe_blockwise_layer *forward = &args.forward.layer, *backward = &args.backward.layer;
    if (given->packed && op == PROBLEM_FORWARD) {
      give_packed(l, given, forward);
      packed[0] = (void *)(uintptr_t)forward->packed_gate_up_proj_weight;
      packed[1] = (void *)(uintptr_t)forward->packed_down_proj_weight;
    }
    if (given->extras) extras_give(&extras, &args);
    if (given->quantized) give_quantized(l, forward), give_quantized(l, backward);
    if (given->x) forward->quantized_hidden_states = backward->quantized_hidden_states = &given->x->a;
    if (given->grad) args.backward.quantized_output_hidden_states_grad = &given->grad->a;
    use_op((enum problem_op)op, ctx, &args);
    free(packed[0]), free(packed[1]);
  }
  if (given->extras) free(extras.scaled);
}

static void use_plain(const struct problem_options *o, int packed, int extras) {
  struct layer l;
  const struct given given = {.packed = packed, .extras = extras};
  memset(&l, 0, sizeof l);
  assert_true(problem_open(&l.p, o, NULL, NULL));
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!test_use_quick_isa(isa)) continue;
    use_layer(&l, &serial, &given, PROBLEM_ROUTER_BACKWARD);
    use_layer(&l, &parallel, &given, PROBLEM_ROUTER_BACKWARD);
  }
  test_use_best_isa();
  problem_close(&l.p, NULL, NULL);
}

/* Few rows and many, short sides and long ones, plain and packed. */
static void test_plain(void **state) {
  static const int64_t shapes[][6] = {/* T, H, I, E, K, B */
                                      {1, 130, 70, 2, 1, 1},    {5, 400, 40, 12, 4, 2},    {26, 300, 130, 3, 2, 8},
                                      {33, 70, 270, 3, 2, 16},  {131, 96, 192, 1, 1, 131}, {300, 24, 20, 1, 1, 300},
                                      {40, 1100, 5, 1, 1, 40},  {20, 6, 3, 3000, 3, 2},    {2100, 5, 3, 40, 2, 64}};
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    const int64_t *s = shapes[i];
    struct problem_options o = problem_options_random(i, dtype);
    o.T = s[0], o.H = s[1], o.I = s[2], o.E = s[3], o.K = s[4], o.B = s[5];
    o.dropping = o.empty_expert = 0;
    problem_options_settle(&o);
    use_plain(&o, i % 2, 0);
    if (o.T > 5 && !test_dtype_narrow(dtype)) use_plain(&o, 0, 1 + (int)i);
  }
}

/* Activations, affinity modes and whatever else the seed chooses. */
static void test_options(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (int i = 0; i < MOE_ACT_COUNT_ * (MOE_AFFINITY_ON_I + 1); i++) {
    struct problem_options o = problem_options_random(200 + (uint64_t)i, dtype);
    o.layer.activation = (moe_activation)(i % MOE_ACT_COUNT_);
    o.layer.affinity_mode = (moe_affinity_mode)(i / MOE_ACT_COUNT_);
    o.empty_expert = 0;
    problem_options_settle(&o);
    use_plain(&o, i % 3 == 0, 0);
    o.mx.weights.enabled = o.mx.activations.enabled = o.mx.gradients.enabled = o.mx.weight_grads = i & 1;
    o.checkpoint_dtype = test_dtype_number(i);
    use_plain(&o, 0, 1 + i);
  }
}

/* ------------------------------------------------------------------------------------------------ quantised weights */

/* Serial from here on: a task takes less than the call that runs it. */
static void use_everywhere(struct layer *l, const struct given *given) {
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    if (test_use_quick_isa(isa)) use_layer(l, &serial, given, PROBLEM_BACKWARD);
  test_use_best_isa();
}

static void use_storage(const struct storage *s, moe_dtype dtype, int64_t H, int64_t I, int64_t rows, int packed) {
  struct problem_options o = shape((uint64_t)rows, dtype, H, I);
  struct layer l;
  const struct given given = {.quantized = 1, .packed = packed};
  o.T = rows, o.E = o.K = 1, o.B = 16;
  o.dropping = 0;
  problem_options_settle(&o);
  layer_open(&l, &o, s, 0);
  use_everywhere(&l, &given);
  layer_close(&l);
}

/* Every layout, placement and element; few rows, for which nothing is packed, and more. */
static void test_mx_weights(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (int i = 0, n = 0; i < LAYOUTS * PLACEMENTS * 2; i++) {
    struct storage s = {.sunk = dtype != MOE_DTYPE_FP16};
    const moe_mx_layout layout = (moe_mx_layout)(i % LAYOUTS);
    const moe_mx_scales placement = (moe_mx_scales)(i / LAYOUTS % PLACEMENTS);
    const int wide = i >= LAYOUTS * PLACEMENTS, four = layout == MOE_MX_LAYOUT_GPT_OSS || layout == MOE_MX_LAYOUT_GGML;
    if (!mx_placeable(layout, placement) || (wide && four)) continue;
    s.gate_up.layout = layout, s.gate_up.scales_layout = placement;
    s.gate_up.element = wide ? MOE_ELEMENT_E4M3FN : MOE_ELEMENT_E2M1;
    s.down = s.gate_up;
    const int64_t H = mx_is_x4(layout) ? 512 : layout == MOE_MX_LAYOUT_PLAIN ? 140 : 160;
    const int64_t I = mx_is_x4(layout) ? 20 : layout == MOE_MX_LAYOUT_PLAIN ? 65 : 96;
    use_storage(&s, dtype, H, I, 3, n++ % 2);
    use_storage(&s, dtype, H, I, 33, n % 2);
  }
}

static void test_scaled_weights(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (int i = 0; i < 10; i++) {
    struct storage s = {.powers = 1};
    s.gate_up.scaling = (moe_weight_scaling)(1 + i % 5);
    s.gate_up.block = i < 5 ? 0 : 32;
    s.gate_up.element = (moe_element)(i % 2);
    s.down = s.gate_up;
    use_storage(&s, dtype, 140, 70, 3, i % 2);
    use_storage(&s, dtype, 131, 129, 33, 1 - i % 2);
  }
}

/* --------------------------------------------------------------------------------------------------------- rounding */

static moe_mx_rounding rounding(int element) {
  return (moe_mx_rounding){1, (moe_element)(element % ELEMENTS), MOE_SCALE_OCP_FLOOR, MOE_CAST_SATURATE};
}

/* Operands rounded to MX: of plain weights, and of quantised ones in every layout; and stored activations. */
static void test_rounded(void **state) {
  static const int64_t shapes[][2] = {{64, 96}, {160, 64}, {32, 160}};
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (int i = 0; i < 24; i++) {
    struct storage s = {.gate_up = {.layout = (moe_mx_layout)(i % LAYOUTS)}};
    struct problem_options o = shape((uint64_t)i, dtype, shapes[i % 3][0], shapes[i % 3][1]);
    struct stored x[2] = {{{0}, 0, 0, {0}, {0}}};
    struct layer l;
    uint64_t rng = (uint64_t)i;
    const int quantized = i < 2 * LAYOUTS, four = i < LAYOUTS || s.gate_up.layout >= MOE_MX_LAYOUT_GPT_OSS;
    const struct given given = {.quantized = quantized, .x = i % 3 ? &x[0] : NULL, .grad = i % 2 ? &x[1] : NULL};
    if (quantized && mx_is_x4(s.gate_up.layout)) o.H = 512, o.I = 40;
    if (!quantized) o.H = 33 + i, o.I = 129;
    o.T = i % 2 ? 40 : 5;
    o.mx = (moe_mx_operands){rounding(i), rounding(i + 1), rounding(i + 2), i % 4 < 3, MOE_MX_LAYOUT_PLAIN,
                             NULL, NULL};
    if (quantized && mx_is_x4(s.gate_up.layout)) o.mx.activation_layout = s.gate_up.layout;
    s.gate_up.element = four ? MOE_ELEMENT_E2M1 : MOE_ELEMENT_E5M2;
    s.down = s.gate_up;
    problem_options_settle(&o);
    layer_open(&l, &o, &s, 0);
    for (int j = 0; j < 2; j++) {
      x[j].a.element = (moe_element)((i + j) % ELEMENTS), x[j].rows = o.T, x[j].columns = o.H;
      x[j].a.float_scales = elements[x[j].a.element].bits == 8 && i / 8, x[j].a.block_rows = 1;
      stored_make(&x[j], &rng);
    }
    use_everywhere(&l, &given);
    layer_close(&l), stored_free(&x[0]), stored_free(&x[1]);
  }
}

/* ------------------------------------------------------------------------------------------------- from top-k ids */

static const struct face_calls {
  int forward, forward_size, backward, backward_size, saved_bytes, mlp[2], mlp_size[2];
} face_calls[] = {
#define FACE_CALLS(name, type, NAME)                                                \
  [MOE_DTYPE_##NAME] = {FN_moe_layer_forward_##name,                                \
                        FN_moe_layer_forward_##name##_workspace_size,               \
                        FN_moe_layer_backward_##name,                               \
                        FN_moe_layer_backward_##name##_workspace_size,              \
                        FN_moe_layer_saved_bytes_##name,                            \
                        {FN_moe_grouped_mlp_##name, FN_moe_grouped_mlp_bwd_##name}, \
                        {FN_moe_grouped_mlp_##name##_workspace_size, FN_moe_grouped_mlp_bwd_##name##_workspace_size}},
    MOE_DTYPE_LIST(FACE_CALLS)
#undef FACE_CALLS
};

static void use_face(const struct face_calls *fn, struct face *f) {
  size_t saved, bytes;
  use(fn->saved_bytes, &f->layer, &saved);
  f->saved = take(saved);
  for (int backward = 0; backward < 2; backward++) {
    use(backward ? fn->backward_size : fn->forward_size, f, &bytes);
    f->layer.workspace = take(bytes), f->layer.workspace_bytes = bytes;
    use(backward ? fn->backward : fn->forward, f, NULL);
    free(f->layer.workspace);
  }
  free(f->saved);
}

static void use_mlp(const struct face_calls *fn, const struct face *f, const int32_t *m_sizes) {
  const moe_layer *l = &f->layer;
  moe_grouped_mlp_args a = {.num_tokens = l->T,
                            .topk = l->K,
                            .E = l->E,
                            .H = l->H,
                            .I = l->I,
                            .m_sizes = m_sizes,
                            .X = l->x,
                            .gate_up = l->gate_up,
                            .down = l->down,
                            .Y = f->y,
                            .dY = f->y,
                            .dX = f->grads.x,
                            .dgate_up = f->grads.gate_up,
                            .ddown = f->grads.down,
                            .dtopk_weights = f->grads.topk_weights};
  for (int backward = 0; backward < 2; backward++) {
    use(fn->mlp_size[backward], &a, &a.workspace_bytes);
    a.workspace = take(a.workspace_bytes);
    use(fn->mlp[backward], &a, NULL);
    free(a.workspace);
  }
}

static void test_face(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  enum { T = 100, H = 150, I = 131, E = 3, K = 2 };
  void *x = take(T * H * 4), *gate_up = take(E * H * 2 * I * 4), *down = take(E * H * I * 4), *y = take(T * H * 4);
  void *grads[4] = {take(T * H * 4), take(T * K * 4), take(E * H * 2 * I * 4), take(E * H * I * 4)};
  int32_t *index = take(T * K * 4);
  float *weights = take(T * K * 4), *logits = take(T * E * 4);
  for (int i = 0; i < T * K; i++) index[i] = i % (E + 1), weights[i] = 0.5f;
  const int32_t m_sizes[E] = {70, 0, 130};
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (int order = 0; order < MOE_ORDER_COUNT_ && test_use_quick_isa(isa); order++) {
      struct face f = {.y = y,
                       .grads = {.x = grads[0], .topk_weights = grads[1], .gate_up = grads[2], .down = grads[3]},
                       .layer = {.T = T,
                                 .H = H,
                                 .I = I,
                                 .E = E,
                                 .K = K,
                                 .identity_experts = 1,
                                 .x = x,
                                 .topk_index = index,
                                 .topk_weights = weights,
                                 .gate_up = gate_up,
                                 .down = down,
                                 .orders = {(moe_weight_order)order, (moe_weight_order)(order > 0), 0, 0}}};
      snprintf(situation, sizeof situation, "moe_layer order %d", order);
      use_face(&face_calls[dtype], &f);
      const moe_shared_expert shared = {.I = I, .gate_up = gate_up, .down = down, .gate = x};
      const moe_router_topk_args router = {
          .router_weight = x, .router_logits = logits, .expert_index = index, .expert_weights = weights};
      struct face all = f;
      all.layer.shared = &shared, all.layer.router = &router, all.layer.identity_experts = 0;
      all.layer.config = (moe_layer_config){.activation = MOE_ACT_SITU, .up_softcap = 25.0f};
      use_face(&face_calls[dtype], &all);
      use_mlp(&face_calls[dtype], &f, m_sizes);
    }
  free(x), free(gate_up), free(down), free(y), free(index), free(weights), free(logits);
  for (int i = 0; i < 4; i++) free(grads[i]);
  test_use_best_isa();
}

/* ----------------------------------------------------------------------------------------------------- grouped GEMM */

#define SHAPES (sizeof shapes / sizeof *shapes)

static const struct {
  int call[4], size[4];
} grouped[] = {{SIZED(moe_grouped_gemm)}, {SIZED(moe_grouped_gemm_dx)}, {SIZED(moe_grouped_gemm_dw)}};

static void use_grouped(moe_dtype dtype, moe_grouped_gemm_args a) {
  static const moe_quantized_weight storage[] = {{.element = MOE_ELEMENT_E4M3FN, .scaling = MOE_WEIGHT_BLOCK},
                                                 {.element = MOE_ELEMENT_E5M2}};
  const moe_pack_weights_args pack = {.layout = MOE_PACK_GROUPED, .E = a.E, .rows = a.N, .columns = a.K, .weight = a.W};
  void *packed = use_pack(dtype, pack, &a.packed_W_bytes);
  for (int i = 0; i < 8; i++) { /* one from packed weights, the last from quantised ones */
    moe_quantized_weight w = storage[i % 2];
    w.codes = w.scales = a.W;
    a.packed_W = i == 3 ? packed : NULL;
    a.quantized_W = i > 3 ? &w : NULL;
    a.weight_order = (moe_grouped_order)(i > 5);
    use(grouped[i % 3].size[dtype], &a, &a.workspace_bytes);
    a.workspace = take(a.workspace_bytes);
    use(grouped[i % 3].call[dtype], &a, NULL);
    free(a.workspace);
  }
  free(packed);
}

static void test_grouped(void **state) {
  static const int64_t shapes[][3] = {{1, 66, 128}, {9, 66, 700}, {40, 130, 96}, {300, 24, 33}};
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (size_t i = 0; i < 2 * SHAPES && test_use_isa(isa); i++) {
      const int64_t T = shapes[i / 2][0], N = shapes[i / 2][1], K = shapes[i / 2][2];
      int32_t sizes[2] = {(int32_t)(T - T / 3), (int32_t)(T / 3)}, *gather = take((size_t)T * 4);
      float *x = take((size_t)(T * K) * 4), *w = take((size_t)(2 * N * K) * 4), *dy = take((size_t)(T * N) * 4);
      float *y = take((size_t)(T * N) * 4), *dx = take((size_t)(T * K) * 4), *dw = take((size_t)(2 * N * K) * 4);
      float *bias = take((size_t)(4 * N) * 4), *topk = take((size_t)(2 * T) * 4);
      for (int64_t t = 0; t < T; t++) gather[t] = (int32_t)(T - 1 - t);
      use_grouped(dtype, (moe_grouped_gemm_args){.num_tokens = T, .topk = 1, .E = 2, .N = N, .K = K, .m_sizes = sizes,
                                                 .gather_indices = gather, .permute_x = (int)(i % 2), .X = x, .W = w,
                                                 .dY = dy, .Y = y, .dX = dx, .dW = dw,
                                                 .bias = i % 2 ? bias : NULL, .topk_weights = i % 2 ? topk : NULL,
                                                 .topk_weights_grad = i % 2 ? topk + T : NULL,
                                                 .bias_grad = i % 2 ? bias + 2 * N : NULL,
                                                 .accumulate = i % 2 ? MOE_ACCUMULATE_DW | MOE_ACCUMULATE_Y : 0,
                                                 .weight_grad_dtype = i % 2 ? MOE_DTYPE_F32 : MOE_DTYPE_DEFAULT});
      free(gather), free(x), free(w), free(dy), free(y), free(dx), free(dw), free(bias), free(topk);
    }
  test_use_best_isa();
}

/* Whatever number is measured. The clock stands still: nothing is faster than the default. */
static double no_time(void *user) { return (void)user, 0; }

static void test_tune(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  enum { T = 40, N = 200, K = 300 };
  static char text[2000];
  int32_t sizes[2] = {T, 0};
  void *memory[] = {take(T * K * 4), take(2 * N * K * 4), take(T * N * 4)};
  for (int op = 0; op < MOE_TUNE_OP_COUNT_; op++) {
    moe_grouped_gemm_args a = {.num_tokens = T, .topk = 1, .E = 2, .N = N, .K = K, .m_sizes = sizes};
    a.X = a.dX = memory[0], a.W = a.dW = memory[1], a.dY = a.Y = memory[2];
    if (op == 0) a.dX = a.dW = NULL, a.dY = NULL;
    if (op == 1) a.Y = a.dW = NULL, a.X = NULL;
    if (op == 2) a.Y = a.dX = NULL, a.W = NULL;
    use(grouped[op].size[dtype], &a, &a.workspace_bytes);
    a.workspace = take(a.workspace_bytes);
    moe_tune_entry entries[2];
    moe_tune_table table = {entries, 0, 2};
    const moe_tune_grouped_gemm_args tune = {
        .gemm = &a, .op = (moe_tune_op)op, .dtype = dtype, .table = &table, .clock = no_time, .repeats = 1};
    use(FN_moe_tune_grouped_gemm, &tune, NULL);
    size_t length;
    int64_t skipped;
    use(FN_moe_tune_save, &(struct array){.to = text, .from = &table, .n = sizeof text}, &length);
    use(FN_moe_tune_load, &(struct array){.to = &table, .from = text, .n = (int64_t)length}, &skipped);
    free(a.workspace);
  }
  for (int i = 0; i < 3; i++) free(memory[i]);
}

/* ----------------------------------------------------------------------------------------------------------- arrays */

enum { NUMBERS = 70001 };

static float numbers[NUMBERS], moderate[NUMBERS], results[NUMBERS], slopes[NUMBERS];
static uint8_t codes[4 * NUMBERS], scales[4 * NUMBERS];

/* Bits of moderate numbers in any type; and with any others among them. */
static void make_numbers(void) {
  uint64_t seed = 3;
  for (int i = 0; i < NUMBERS; i++) {
    moderate[i] = numbers[i] = (float)test_random_range(&seed, -100, 100) * 0x1p-6f;
    const uint32_t bits = (uint32_t)test_random(&seed);
    if (i % 3 == 0) memcpy(&numbers[i], &bits, 4);
  }
}

static void test_conversions(void **state) {
  static const int64_t lengths[] = {1, 33, NUMBERS};
  (void)state;
  make_numbers();
  for (int i = 0; i < 3 * TEST_ISA_COUNT; i++) {
    if (!test_use_isa(i / 3)) continue;
    const struct array to = {codes, NULL, numbers, lengths[i % 3], MOE_CAST_HALF_AWAY};
    const struct array from = {results, NULL, codes, lengths[i % 3], 0};
#define DTYPE(name, type, NAME) use(FN_moe_##name##_from_f32, &to, NULL), use(FN_moe_##name##_to_f32, &from, NULL);
    MOE_DTYPE_LIST(DTYPE)
#undef DTYPE
#define ELEMENT(name, ...) use(FN_moe_##name##_from_f32, &to, NULL), use(FN_moe_##name##_to_f32, &from, NULL);
    MOE_ELEMENT_LIST(ELEMENT)
#undef ELEMENT
    use(FN_moe_e8m0_from_f32, &to, NULL), use(FN_moe_e8m0_to_f32, &from, NULL);
    for (int activation = 0; activation < MOE_ACT_COUNT_; activation++) {
      const struct array a = {results, slopes, numbers, lengths[i % 3], activation};
      use(FN_moe_activation_f32, &a, NULL);
    }
  }
  test_use_best_isa();
}

static void use_quantize_mx(int i, int64_t rows, int64_t columns) {
  const moe_quantize_mx_args q = {.element = (moe_element)(i % 4), .scale_rule = (moe_scale_rule)(i % 6),
                                  .dtype = (moe_dtype)(i / 4 % 4), .rows = rows, .columns = columns,
                                  .transposed = i / 16, .plain = numbers, .codes = codes, .scales = scales};
  const moe_dequantize_mx_args d = {.element = q.element, .dtype = q.dtype, .rows = rows, .columns = columns,
                                    .transposed = q.transposed, .codes = codes, .scales = scales, .plain = results};
  use(FN_moe_quantize_mx, &q, NULL);
  use(FN_moe_dequantize_mx, &d, NULL);
}

static void use_quantize_scaled(int i, int64_t rows, int64_t columns) {
  static const int64_t blocks[][2] = {{0, 0}, {1, 0}, {0, 1}, {128, 128}};
  const moe_quantize_scaled_args q = {.element = (moe_element)(i % 3), .dtype = (moe_dtype)(i / 4 % 4), .rows = rows,
                                      .columns = columns, .block_rows = blocks[i % 4][0],
                                      .block_columns = blocks[i % 4][1],
                                      .plain = i < 16 ? moderate : numbers, .codes = codes,
                                      .scales = results};
  const moe_dequantize_scaled_args d = {.element = q.element, .dtype = q.dtype, .rows = rows, .columns = columns,
                                        .block_rows = q.block_rows, .block_columns = q.block_columns, .codes = codes,
                                        .scales = results, .plain = slopes};
  use(FN_moe_quantize_scaled, &q, NULL);
  use(FN_moe_dequantize_scaled, &d, NULL);
}

static void use_quantize_group(int i, int64_t rows, int64_t columns) {
  float global = 1;
  const moe_quantize_group_args q = {.element = (moe_element)(i % 12), .scales_type = (moe_scales_type)(i % 5),
                                     .dtype = (moe_dtype)(i / 4 % 4), .rows = rows, .columns = columns,
                                     .group = 1 + 37 * (i % 3), .global_scale = i % 5 == 3 ? &global : NULL,
                                     .plain = moderate, .codes = codes, .scales = results};
  const moe_dequantize_group_args d = {.element = q.element, .scales_type = q.scales_type, .dtype = q.dtype,
                                       .rows = rows, .columns = columns, .group = q.group,
                                       .global_scale = q.global_scale, .codes = codes, .scales = results,
                                       .plain = slopes};
  if (q.element == MOE_ELEMENT_MXINT8) return; /* for MX */
  use(FN_moe_quantize_group, &q, NULL);
  use(FN_moe_dequantize_group, &d, NULL);
}

static void test_quantize(void **state) {
  static const int64_t shapes[][2] = {{1, 1}, {3, 47}, {130, 300}, {2, 4096}};
  (void)state;
  make_numbers();
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (int i = 0; i < 32 * (int)SHAPES && test_use_isa(isa); i++) {
      const int64_t *s = shapes[i / 32];
      snprintf(situation, sizeof situation, "number %d, %d x %d", i % 32, (int)s[0], (int)s[1]);
      use_quantize_mx(i % 32, s[0], s[1]);
      use_quantize_scaled(i % 32, s[0], s[1]);
      use_quantize_group(i % 32, s[0], s[1]);
    }
  test_use_best_isa();
}

static void test_layouts(void **state) {
  (void)state;
  for (int i = 0; i < LAYOUTS * LAYOUTS * PLACEMENTS * 2; i++) {
    moe_mx_layout_args a = {.from = (moe_mx_layout)(i % LAYOUTS), .to = (moe_mx_layout)(i / LAYOUTS % LAYOUTS),
                            .scales_to = (moe_mx_scales)(i / LAYOUTS / LAYOUTS % PLACEMENTS),
                            .element_bits = i < LAYOUTS * LAYOUTS * PLACEMENTS ? 4 : 8, .parts = 2, .E = 1, .K = 512,
                            .columns = 20};
    moe_mx_layout_bytes bytes;
    if (moe_mx_layout_size(NULL, &a, &bytes) != MOE_OK) continue; /* this pair does not convert */
    use(FN_moe_mx_layout_size, &a, &bytes);
    a.codes_in = take(bytes.codes_in), a.scales_in = take(bytes.scales_in);
    a.codes_out = take(bytes.codes_out), a.scales_out = take(bytes.scales_out);
    use(FN_moe_mx_layout_convert, &a, NULL);
    free((void *)(uintptr_t)a.codes_in), free((void *)(uintptr_t)a.scales_in), free(a.codes_out), free(a.scales_out);
  }
  int64_t index[1024];
  for (int kind = 0; kind < 4; kind++) {
    size_t bytes[2];
    const struct array a = {index, NULL, NULL, 1024, MOE_MX_LAYOUT_NKI_STRIDED_X4};
    const moe_nki_vector_args v = {.kind = (moe_nki_vector)(kind / 2), .dtype = MOE_DTYPE_F32, .to_nki = kind % 2,
                                   .E = 2, .length = 640, .in = numbers, .out = results};
    use(FN_moe_nki_x4_permutation, &a, NULL);
    use(FN_moe_nki_vector_size, &v, bytes);
    use(FN_moe_nki_vector_convert, &v, NULL);
  }
}

/* So many tokens and experts that the losses take them in parts. */
static void test_losses(void **state) {
  static const int64_t shapes[][2] = {{1, 1}, {40, 300}, {5000, 9}, {9, 5000}};
  (void)state;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (size_t i = 0; i < 3 * SHAPES && test_use_isa(isa); i++) {
      const int64_t T = shapes[i / 3][0], E = shapes[i / 3][1];
      float loss, *logits = take((size_t)(T * E) * 4), *grad = take((size_t)(T * E) * 4);
      int32_t *index = take((size_t)T * 4);
      int64_t *counts = take((size_t)(E + 1) * 8), first[3] = {0, T / 2, T};
      memset(counts, 0, (size_t)E * 8);
      const moe_router_loss_args a = {.T = T, .E = E, .K = 1, .coefficient = 0.5f, .S = 2,
                                      .sequence_first = i % 3 ? first : NULL, .logit_softcap = 3.0f * (float)(i % 3),
                                      .score_function = (moe_score_function)(i % 3), .router_logits = logits,
                                      .expert_index = index, .loss = &loss, .router_logits_grad = grad};
      snprintf(situation, sizeof situation, "T=%d E=%d", (int)T, (int)E);
      use(FN_moe_router_load_balance_loss, &a, NULL);
      use(FN_moe_router_z_loss, &a, NULL);
      const moe_router_bias_update_args b = {.E = E, .rate = 1, .expert_counts = counts, .selection_bias = logits};
      use(FN_moe_router_bias_update, &b, NULL);
      free(logits), free(grad), free(index), free(counts);
    }
  test_use_best_isa();
}

static void test_others(void **state) {
  (void)state;
  use(FN_moe_route_blocks_count, NULL, NULL), use(FN_moe_status_str, NULL, NULL), use(FN_moe_status_text, NULL, NULL);
  use(FN_moe_dtype_size, NULL, NULL), use(FN_moe_isa_name, NULL, NULL), use(FN_moe_isa_supported, NULL, NULL);
  use(FN_moe_isa_active, NULL, NULL), use(FN_moe_isa_limit, NULL, NULL);
}

/* ---------------------------------------------------------------------------------------------------------- results */

static void touch(void *arg) {
  volatile char *seen[1], memory[10000];
  seen[0] = memory;
  memory[0] = (char)*(const int *)arg;
  (void)seen[0][0];
}

static void nothing(void *arg) { (void)arg; }

/* What is measured is what was used: 10000 bytes, and next to nothing. */
static void test_measure(void **state) {
  int one = 1;
  (void)state;
  assert_in_range(painted_run(&caller, nothing, NULL), 0, 1024);
  assert_in_range(painted_run(&caller, touch, &one), 10000, 11024);
}

/* After all others: every function was called, and none took more than is promised. */
static void test_limit(void **state) {
  int deepest = 0, bad = 0;
  (void)state;
  for (int i = 0; i < FUNCTIONS; i++) {
    if (functions[i].most > functions[deepest].most) deepest = i;
    const int shared = STACK_MOST > 32 << 10 && strncmp(functions[i].name, "moe_layer_", 10) == 0;
    if (functions[i].calls > 0 && functions[i].most <= (size_t)STACK_MOST + (shared ? 4 << 10 : 0)) continue;
    bad++;
    print_message("%s: %d calls, %zu bytes of stack: %s\n", functions[i].name, functions[i].calls, functions[i].most,
                  functions[i].situation);
  }
  print_message("# most: %zu bytes in %s\n", functions[deepest].most, functions[deepest].name);
  if (bad > 0) fail_msg("%d functions were not called or take more than %d bytes of stack", bad, (int)STACK_MOST);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_measure),   EACH_DTYPE(test_plain),           EACH_DTYPE(test_options),
      EACH_DTYPE(test_mx_weights),      EACH_DTYPE(test_scaled_weights),  EACH_DTYPE(test_rounded),
      EACH_DTYPE(test_face),
      EACH_DTYPE(test_tune),            cmocka_unit_test(test_routings),    cmocka_unit_test(test_mxfp8_mlp),
      EACH_DTYPE(test_grouped),         cmocka_unit_test(test_conversions), cmocka_unit_test(test_quantize),
      cmocka_unit_test(test_layouts),   cmocka_unit_test(test_losses),    cmocka_unit_test(test_others),
      cmocka_unit_test(test_limit)};
  if (PAINTED_SANITIZED) return puts("1..0 # SKIP sanitizers have their own variables on the stack"), 0;
  painted_open(&caller), painted_open(&worker);
  return cmocka_run_group_tests_name("stack", tests, NULL, NULL);
}
