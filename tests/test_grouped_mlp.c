/* test_grouped_mlp: moe_grouped_mlp_* against moe_layer_* on the same experts: 0 differing bits where slots are sorted
   as the layer sorts them; an expert's slots in another order are its rows in that order; and what is refused. */
#include "support/pool.h"
#include "support/test.h"

enum { CONFIGURATIONS = 250 };

#define CALLS(name, type, NAME)                                                                              \
  static moe_status mlp_##name(moe_context *c, const moe_grouped_mlp_args *a, int backward, size_t *bytes) { \
    if (bytes)                                                                                               \
      return backward ? moe_grouped_mlp_bwd_##name##_workspace_size(c, a, bytes)                             \
                      : moe_grouped_mlp_##name##_workspace_size(c, a, bytes);                                \
    return backward ? moe_grouped_mlp_bwd_##name(c, a) : moe_grouped_mlp_##name(c, a);                       \
  }                                                                                                          \
  static moe_status layer_##name(moe_context *c, const moe_layer *l, void *y, const void *dy,                \
                                 const moe_layer_grads *g) {                                                 \
    return g ? moe_layer_backward_##name(c, l, NULL, dy, g) : moe_layer_forward_##name(c, l, y, NULL);       \
  }
MOE_DTYPE_LIST(CALLS)
#undef CALLS

static const struct calls {
  moe_status (*mlp)(moe_context *, const moe_grouped_mlp_args *, int backward, size_t *);
  moe_status (*layer)(moe_context *, const moe_layer *, void *, const void *, const moe_layer_grads *);
} calls[] = {
#define CALLS_OF(name, type, NAME) [MOE_DTYPE_##NAME] = {mlp_##name, layer_##name},
    MOE_DTYPE_LIST(CALLS_OF)
#undef CALLS_OF
};

static void *take(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void give(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }

/* n numbers of a type between -2 and 2, as bits. */
static void *numbers(moe_dtype dtype, int64_t n, uint64_t *s) {
  const int64_t size = (int64_t)moe_dtype_size(dtype);
  char *x = malloc((size_t)(n * size + 1));
  for (int64_t i = 0; i < n; i++) {
    const float f = (float)test_random_range(s, -128, 128) / 64.0f;
    moe_bf16 half;
    if (dtype == MOE_DTYPE_BF16) (void)moe_bf16_from_f32(NULL, &half, &f, 1);
    if (dtype == MOE_DTYPE_FP16) (void)moe_fp16_from_f32(NULL, &half, &f, 1);
    memcpy(x + i * size, size == 4 ? (const void *)&f : (const void *)&half, (size_t)size);
  }
  return x;
}

enum { X, GATE_UP, DOWN, GATE_UP_BIAS, DOWN_BIAS, DY, Y, DX, DGATE_UP, DDOWN, DGATE_UP_BIAS, DDOWN_BIAS, TENSORS };

typedef struct test {
  moe_grouped_mlp_args a;
  moe_dtype dtype;
  int64_t count[TENSORS];
  void *own[TENSORS], *layers[TENSORS]; /* the same numbers */
  int32_t *index, *m_sizes, *gather;
  float *weights, *dweights, *layers_dweights;
} test;

/* Slots by expert, stable. What is behind them must not be looked at. */
static void sort_slots(test *t) {
  const int64_t slots = t->a.num_tokens * t->a.topk;
  int64_t at = 0;
  memset(t->m_sizes, 0, (size_t)t->a.E * sizeof *t->m_sizes);
  for (int32_t e = 0; e < t->a.E; e++)
    for (int64_t i = 0; i < slots; i++)
      if (t->index[i] == e) t->gather[at++] = (int32_t)i, t->m_sizes[e]++;
  for (; at < slots; at++) t->gather[at] = -1;
}

static void open_test(test *t, moe_dtype dtype, uint64_t *s) {
  moe_grouped_mlp_args *a = &t->a;
  memset(t, 0, sizeof *t);
  t->dtype = dtype;
  a->num_tokens = test_random_range(s, 1, 60), a->topk = test_random_range(s, 1, 3), a->E = test_random_range(s, 1, 6);
  a->H = test_random_range(s, 1, 140), a->I = test_random_range(s, 1, 90);
  a->config.activation = (moe_activation)test_random_range(s, 0, MOE_ACT_COUNT_ - 1);
  a->config.affinity_mode = test_random_chance(s, 3) ? MOE_AFFINITY_ON_I : MOE_AFFINITY_POST_SCALE;
  a->accumulate = 0;
  const int64_t T = a->num_tokens, H = a->H, I = a->I, E = a->E, slots = T * a->topk;
  const int64_t count[TENSORS] = {T * H, E * 2 * I * H, E * H * I,     E * 2 * I, E * H,     T * H,
                                  T * H, T * H,         E * 2 * I * H, E * H * I, E * 2 * I, E * H};
  memcpy(t->count, count, sizeof count);
  for (int i = 0; i < TENSORS; i++) {
    t->own[i] = numbers(dtype, count[i], s);
    t->layers[i] = malloc((size_t)count[i] * moe_dtype_size(dtype) + 1);
    memcpy(t->layers[i], t->own[i], (size_t)count[i] * moe_dtype_size(dtype));
  }
  t->index = malloc((size_t)slots * 4), t->gather = malloc((size_t)slots * 4), t->m_sizes = malloc((size_t)E * 4);
  for (int64_t i = 0; i < slots; i++)
    t->index[i] = (int32_t)test_random_range(s, test_random_chance(s, 5) ? -1 : 0, E - 1);
  t->weights = numbers(MOE_DTYPE_F32, slots, s);
  t->dweights = malloc((size_t)slots * 4), t->layers_dweights = malloc((size_t)slots * 4);
  sort_slots(t);
  a->m_sizes = t->m_sizes, a->gather_indices = t->gather, a->topk_weights = t->weights;
  a->X = t->own[X], a->gate_up = t->own[GATE_UP], a->down = t->own[DOWN];
  a->gate_up_bias = test_random_chance(s, 2) ? t->own[GATE_UP_BIAS] : NULL;
  a->down_bias = test_random_chance(s, 2) ? t->own[DOWN_BIAS] : NULL;
  a->dY = t->own[DY], a->Y = t->own[Y], a->dX = t->own[DX], a->dgate_up = t->own[DGATE_UP], a->ddown = t->own[DDOWN];
  a->dgate_up_bias = t->own[DGATE_UP_BIAS], a->ddown_bias = t->own[DDOWN_BIAS], a->dtopk_weights = t->dweights;
}

static void close_test(test *t) {
  for (int i = 0; i < TENSORS; i++) free(t->own[i]), free(t->layers[i]);
  free(t->index), free(t->gather), free(t->m_sizes), free(t->weights), free(t->dweights), free(t->layers_dweights);
}

static void run_layer(const test *t, moe_context *ctx) {
  const moe_grouped_mlp_args *a = &t->a;
  void *const *own = t->layers;
  const moe_layer l = {.T = a->num_tokens,
                       .H = a->H,
                       .I = a->I,
                       .E = a->E,
                       .K = a->topk,
                       .x = own[X],
                       .topk_index = t->index,
                       .topk_weights = t->weights,
                       .gate_up = own[GATE_UP],
                       .down = own[DOWN],
                       .orders = {.gate_up = MOE_ORDER_OUT_IN, .down = MOE_ORDER_OUT_IN},
                       .gate_up_bias = a->gate_up_bias,
                       .down_bias = a->down_bias,
                       .config = a->config};
  const moe_layer_grads g = {.x = own[DX],
                             .topk_weights = t->layers_dweights,
                             .gate_up = own[DGATE_UP],
                             .down = own[DDOWN],
                             .gate_up_bias = own[DGATE_UP_BIAS],
                             .down_bias = own[DDOWN_BIAS]};
  assert_int_equal(calls[t->dtype].layer(ctx, &l, own[Y], NULL, NULL), MOE_OK);
  assert_int_equal(calls[t->dtype].layer(ctx, &l, NULL, own[DY], &g), MOE_OK);
}

/* Forward and backward, with a workspace of exactly the size that is asked for, or from the allocator. */
static void run_mlp(const test *t, moe_context *ctx, int keep) {
  moe_grouped_mlp_args a = t->a;
  a.saved = keep ? malloc((size_t)(a.num_tokens * a.topk * 2 * a.I) * moe_dtype_size(t->dtype)) : NULL;
  for (int backward = 0; backward < 2; backward++) {
    size_t bytes;
    assert_int_equal(calls[t->dtype].mlp(ctx, &a, backward, &bytes), MOE_OK);
    a.workspace = malloc(bytes), a.workspace_bytes = bytes;
    memset(a.workspace, 0xff, bytes);
    if (calls[t->dtype].mlp(ctx, &a, backward, NULL) != MOE_OK) fail_msg("%s", ctx->message);
    free(a.workspace);
  }
  free(a.saved);
}

static void as_layer(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (int64_t i = 0; i < test_cases(CONFIGURATIONS, CONFIGURATIONS / 16); i++) {
    if (!test_use_isa((int)(i % TEST_ISA_COUNT))) continue;
    uint64_t s = (uint64_t)i;
    struct test_pool pool = {.seed = s};
    moe_context ctx = {.num_threads = (int32_t)(i % 4),
                       .parallel_for = test_serial_parallel_for,
                       .parallel_for_user = &pool,
                       .allocate = take,
                       .release = give};
    test t;
    open_test(&t, dtype, &s);
    run_layer(&t, &ctx);
    run_mlp(&t, &ctx, test_random_chance(&s, 2));
    for (int j = Y; j < TENSORS; j++)
      if (memcmp(t.own[j], t.layers[j], (size_t)t.count[j] * moe_dtype_size(dtype)) != 0)
        fail_msg("case %d: tensor %d differs", (int)i, j);
    assert_memory_equal(t.dweights, t.layers_dweights, (size_t)(t.a.num_tokens * t.a.topk) * 4);
    close_test(&t);
  }
  test_use_best_isa();
}

/* Without weights they are 1, and without an order of slots that is the positions' own. */
static void without(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (uint64_t i = 0; i < 60; i++) {
    uint64_t s = i + 1000;
    moe_context ctx = {.allocate = take, .release = give};
    test t;
    open_test(&t, dtype, &s);
    const int64_t slots = t.a.num_tokens * t.a.topk;
    const float one = 1.0f;
    int64_t at = 0;
    for (int64_t j = 0; j < slots; j++) memcpy(t.weights + j, &one, 4), t.index[j] = -1;
    for (int64_t e = 0; e < t.a.E; e++)
      for (int64_t j = 0; j < t.m_sizes[e]; j++) t.index[at++] = (int32_t)e;
    t.a.topk_weights = NULL, t.a.gather_indices = NULL;
    run_layer(&t, &ctx);
    run_mlp(&t, &ctx, 1);
    for (int j = Y; j < TENSORS; j++)
      assert_memory_equal(t.own[j], t.layers[j], (size_t)t.count[j] * moe_dtype_size(dtype));
    close_test(&t);
  }
}

/* Two of an expert's slots change places: so do the terms of sums over its rows, and nothing else. */
static void other_order(void **state) {
  (void)state;
  enum { TOKENS = 3 };
  static const float x[TOKENS] = {0x1p24f, 1.0f, 1.0f}, dy[TOKENS] = {1, 1, 1}, weight[2] = {1, 1}, down[1] = {1};
  static const int32_t m_sizes[1] = {TOKENS}, orders[2][TOKENS] = {{0, 1, 2}, {1, 2, 0}};
  float y[TOKENS], grad[2][2];
  moe_context ctx = {.allocate = take, .release = give};
  for (int i = 0; i < 2; i++) {
    const moe_grouped_mlp_args a = {.num_tokens = TOKENS,
                                    .topk = 1,
                                    .E = 1,
                                    .H = 1,
                                    .I = 1,
                                    .m_sizes = m_sizes,
                                    .gather_indices = orders[i],
                                    .X = x,
                                    .gate_up = weight,
                                    .down = down,
                                    .Y = y,
                                    .dY = dy,
                                    .dgate_up = grad[i],
                                    .config = {.activation = MOE_ACT_IDENTITY, .skip_gate = 1}};
    assert_int_equal(moe_grouped_mlp_f32(&ctx, &a), MOE_OK);
    assert_int_equal(moe_grouped_mlp_bwd_f32(&ctx, &a), MOE_OK);
    assert_true(y[0] == x[0] && y[1] == 1.0f && grad[i][0] == 0.0f);
  }
  assert_true(grad[0][1] == 0x1p24f && grad[1][1] == 0x1p24f + 2.0f);
}

static void refused(void **state) {
  (void)state;
  uint64_t s = 12;
  moe_context ctx = {.allocate = take, .release = give};
  test t;
  open_test(&t, MOE_DTYPE_F32, &s);
  t.a.topk = 1, t.a.num_tokens = 2, t.a.E = 1, t.a.accumulate = 0;
  t.m_sizes[0] = 2, t.gather[0] = 0, t.gather[1] = 1;
  moe_grouped_mlp_args a;
  assert_int_equal(moe_grouped_mlp_f32(&ctx, &t.a), MOE_OK);
#define EXPECT(status, begins, backward, ...)                              \
  a = t.a;                                                                 \
  __VA_ARGS__;                                                             \
  assert_int_equal(mlp_f32(&ctx, &a, backward, NULL), MOE_ERROR_##status); \
  if (strncmp(ctx.message, begins " ", strlen(begins) + 1) != 0) fail_msg("%s", ctx.message)
  assert_int_equal(moe_grouped_mlp_f32(&ctx, NULL), MOE_ERROR_NULL_ARGUMENT);
  EXPECT(NULL_ARGUMENT, "m_sizes", 0, a.m_sizes = NULL);
  EXPECT(NULL_ARGUMENT, "X", 0, a.X = NULL);
  EXPECT(NULL_ARGUMENT, "Y", 0, a.Y = NULL);
  EXPECT(NULL_ARGUMENT, "dY", 1, a.dY = NULL);
  EXPECT(INVALID_SHAPE, "num_tokens", 0, a.num_tokens = -1);
  EXPECT(INVALID_SHAPE, "topk", 0, a.topk = 0);
  EXPECT(OVERLAP, "dX", 1, a.dX = t.own[X]);
  EXPECT(OVERLAP, "dgate_up", 1, a.dgate_up = t.own[DOWN]);
  EXPECT(OVERLAP, "dtopk_weights", 1, a.dtopk_weights = t.weights);
  EXPECT(INVALID_OPTION, "weight_grad_dtype", 1, a.weight_grad_dtype = (moe_dtype)77);
  EXPECT(INVALID_OPTION, "accumulate", 0, a.accumulate = MOE_ACCUMULATE_DW);
  t.m_sizes[0] = 3;
  EXPECT(INVALID_SHAPE, "m_sizes", 0, (void)0);
  t.m_sizes[0] = -1;
  EXPECT(INVALID_SHAPE, "m_sizes", 1, (void)0);
  t.m_sizes[0] = 2, t.gather[1] = 2;
  EXPECT(INVALID_INDEX, "gather_indices", 0, (void)0);
  t.gather[1] = -1;
  EXPECT(INVALID_INDEX, "gather_indices", 1, (void)0);
  t.gather[1] = 0;
  memset(t.own[Y], 3, 8);
  EXPECT(INVALID_INDEX, "gather_indices", 0, (void)0);
  assert_int_equal(*(char *)t.own[Y], 3);
  close_test(&t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      EACH_DTYPE(as_layer),
      EACH_DTYPE(without),
      cmocka_unit_test(other_order),
      cmocka_unit_test(refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
