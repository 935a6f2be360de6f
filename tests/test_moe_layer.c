/* test_moe_layer: moe_layer_* from top-k ids against the blockwise layer over the blocks of the same ids: 0 differing
   bits, forward and backward, kept or computed again; a token that has an expert twice; and what is refused. */
#include "support/orders.h"
#include "support/quantized_layer.h"

enum { CONFIGURATIONS = 1700 }; /* of each type */

/* ------------------------------------------------------------------------------------------------ calls by type */

#define CALLS(name, type, NAME)                                                                              \
  static moe_status forward_##name(moe_context *ctx, const moe_layer *l, void *y, void *saved) {             \
    return moe_layer_forward_##name(ctx, l, y, saved);                                                       \
  }                                                                                                          \
  static moe_status backward_##name(moe_context *ctx, const moe_layer *l, const void *saved, const void *dy, \
                                    const moe_layer_grads *g) {                                              \
    return moe_layer_backward_##name(ctx, l, saved, dy, g);                                                  \
  }
MOE_DTYPE_LIST(CALLS)
#undef CALLS

static const struct face {
  moe_status (*forward)(moe_context *, const moe_layer *, void *, void *);
  moe_status (*backward)(moe_context *, const moe_layer *, const void *, const void *, const moe_layer_grads *);
  moe_status (*saved_bytes)(moe_context *, const moe_layer *, size_t *);
  moe_status (*forward_size)(moe_context *, const moe_layer *, size_t *);
  moe_status (*backward_size)(moe_context *, const moe_layer *, const void *, size_t *);
} faces[] = {
#define FACE(name, type, NAME)                                                         \
  [MOE_DTYPE_##NAME] = {forward_##name, backward_##name, moe_layer_saved_bytes_##name, \
                        moe_layer_forward_##name##_workspace_size, moe_layer_backward_##name##_workspace_size},
    MOE_DTYPE_LIST(FACE)
#undef FACE
};

/* With a workspace of exactly the size that is asked for, full of NaN. */
static void *workspace(moe_layer *l, size_t bytes) {
  l->workspace = malloc(bytes);
  l->workspace_bytes = bytes;
  return memset(l->workspace, 0xff, bytes);
}

static void run_forward(moe_dtype dtype, moe_context *ctx, moe_layer l, void *y, void *saved) {
  size_t bytes;
  assert_int_equal(faces[dtype].forward_size(ctx, &l, &bytes), MOE_OK);
  void *room = workspace(&l, bytes);
  if (faces[dtype].forward(ctx, &l, y, saved) != MOE_OK) fail_msg("%s", ctx->message);
  free(room);
}

static void run_backward(moe_dtype dtype, moe_context *ctx, moe_layer l, const void *saved, const void *dy,
                         const moe_layer_grads *grads) {
  size_t bytes;
  assert_int_equal(faces[dtype].backward_size(ctx, &l, saved, &bytes), MOE_OK);
  void *room = workspace(&l, bytes);
  if (faces[dtype].backward(ctx, &l, saved, dy, grads) != MOE_OK) fail_msg("%s", ctx->message);
  free(room);
}

/* ------------------------------------------------------------------------------------- against the blockwise layer */

static struct problem_options options_of(uint64_t seed, moe_dtype dtype) {
  struct problem_options o = problem_options_random(seed, dtype);
  o.affinity_dtype = MOE_DTYPE_F32;
  o.dropping = o.not_accumulating = o.device_output_shape = 0, o.capacity = 0;
  uint64_t s = seed;
  if (seed % 8 != 0) o.T = 1 + o.T % 12, o.H = 1 + o.H % 24, o.I = 1 + o.I % 20;
  if (seed % 50 == 2) o.H = test_random_range(&s, 60, 200), o.I = test_random_range(&s, 60, 200), o.T = 60;
  if (seed % 5 == 1) {
    moe_mx_rounding *each[3] = {&o.mx.activations, &o.mx.weights, &o.mx.gradients};
    for (int i = 0; i < 3; i++) each[i]->enabled = test_random_chance(&s, 2), each[i]->cast = MOE_CAST_SATURATE;
    o.mx.weight_grads = test_random_chance(&s, 2);
  }
  problem_options_settle(&o);
  return o;
}

static void *data(const struct problem *p, enum problem_tensor_id id) { return p->tensor[id].data; }

static struct ordered ordered_of(const moe_weight_orders *orders, const struct problem *p, int down, int id) {
  struct ordered w = {.order = down ? orders->down : orders->gate_up,
                      .apart = orders->up_apart,
                      .per_expert = orders->per_expert,
                      .E = p->o.E,
                      .K = down ? p->o.I : p->o.H,
                      .parts = down ? 1 : 2,
                      .n = down ? p->o.H : p->o.I,
                      .size = p->tensor[id].element};
  ordered_open(&w);
  ordered_copy(&w, p->tensor[id].data, 0);
  return w;
}

/* Of the pairs that have an expert, the gradients [T,E] and [T,K] of affinities: copies or compares. */
static int each_pair(const struct problem *p, float *pairs, int compare) {
  const struct problem_options *o = &p->o;
  const int32_t *index = data(p, PT_EXPERT_INDEX);
  const float *dense = data(p, PT_AFFINITIES_GRAD);
  int differ = 0;
  for (int64_t i = 0; i < o->T * o->K; i++) {
    const float *own = index[i] < 0 ? NULL : dense + i / o->K * o->E + index[i];
    if (compare) differ |= own && memcmp(own, pairs + i, 4) != 0;
    else if (own) memcpy(pairs + i, own, 4);
  }
  return differ;
}

/* Whether the blockwise layer's gradient of affinities comes from results that the forward has kept. */
static int keeps_results(const struct problem_options *o) {
  return o->save_down && o->affinity_option == MOE_AFFINITY_OPTION_ON_H &&
         o->layer.affinity_mode == MOE_AFFINITY_POST_SCALE;
}

static moe_layer layer_of(const struct problem *p, const struct problem_args *args, const moe_weight_orders *orders,
                          const struct ordered *gate_up, const struct ordered *down) {
  const struct problem_options *o = &p->o;
  const moe_blockwise_layer *b = &args->forward.layer;
  return (moe_layer){.T = o->T,
                     .H = o->H,
                     .I = o->I,
                     .E = o->E,
                     .K = o->K,
                     .x = b->hidden_states,
                     .topk_index = data(p, PT_EXPERT_INDEX),
                     .topk_weights = data(p, PT_EXPERT_WEIGHTS),
                     .gate_up = ordered_tensor(gate_up, 0),
                     .up = orders->up_apart ? ordered_tensor(gate_up, 1) : NULL,
                     .down = ordered_tensor(down, 0),
                     .orders = *orders,
                     .gate_up_bias = b->gate_and_up_proj_bias,
                     .down_bias = b->down_proj_bias,
                     .saved_dtype = b->checkpoint_dtype,
                     .keep_results = keeps_results(o),
                     .config = b->config,
                     .mx = b->mx,
                     .accumulate = args->forward.accumulate};
}

/* What differs between p, of the blockwise layer, and q, or NULL. */
static const char *difference(const struct problem *p, const struct problem *q) {
  static const enum problem_tensor_id ids[] = {PT_OUTPUT,           PT_HIDDEN_GRAD,       PT_GATE_UP_WEIGHT_GRAD,
                                               PT_DOWN_WEIGHT_GRAD, PT_GATE_UP_BIAS_GRAD, PT_DOWN_BIAS_GRAD};
  for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
    if (memcmp(data(p, ids[i]), data(q, ids[i]), problem_tensor_bytes(p, ids[i])) != 0) return p->tensor[ids[i]].name;
  return NULL;
}

/* The weights packed, as they are given; or, with `from`, quantised. */
static void pack_weights(moe_context *ctx, moe_dtype dtype, moe_layer *l, struct layer *from) {
  moe_pack_weights_args args[2] = {{.layout = l->config.skip_gate ? MOE_PACK_UP : MOE_PACK_GATE_UP,
                                    .rows = l->H,
                                    .columns = l->I,
                                    .weight = l->gate_up,
                                    .up_weight = l->up},
                                   {.layout = MOE_PACK_DOWN, .rows = l->I, .columns = l->H, .weight = l->down}};
  for (int i = 0; i < 2; i++) {
    args[i].E = l->E, args[i].orders = l->orders;
    if (from) args[i].quantized_weight = i ? &from->down.weight : &from->gate_up.weight;
    assert_int_equal(test_pack_new(ctx, dtype, &args[i]), MOE_OK);
  }
  l->packed_gate_up = args[0].packed, l->packed_gate_up_bytes = args[0].packed_bytes;
  l->packed_down = args[1].packed, l->packed_down_bytes = args[1].packed_bytes;
}

/* Runs the face on q, whose outputs are as p's were before; keep: the forward saves, give: the backward is given it.
   quantized: (optional) whose weights are read in place of p's. */
static void run_face(const struct problem *p, struct problem *q, moe_context *ctx, uint64_t *s, float *pair_grads,
                     struct layer *quantized) {
  const moe_dtype dtype = p->o.dtype;
  const moe_weight_orders orders = test_random_orders(s);
  struct ordered gate_up = ordered_of(&orders, p, 0, PT_GATE_UP_WEIGHT),
                 down = ordered_of(&orders, p, 1, PT_DOWN_WEIGHT),
                 gate_up_grad = ordered_of(&orders, q, 0, PT_GATE_UP_WEIGHT_GRAD),
                 down_grad = ordered_of(&orders, q, 1, PT_DOWN_WEIGHT_GRAD);
  struct problem_args args;
  problem_make_args(p, &args);
  moe_layer l = layer_of(p, &args, &orders, &gate_up, &down);
  size_t bytes;
  if (quantized) {
    l.gate_up = l.up = l.down = NULL;
    l.quantized_gate_up = &quantized->gate_up.weight, l.quantized_down = &quantized->down.weight;
  }
  assert_int_equal(faces[dtype].saved_bytes(ctx, &l, &bytes), MOE_OK);
  void *saved = malloc(bytes);
  memset(saved, 0xff, bytes);
  const int results = keeps_results(&p->o), keep = results || test_random_chance(s, 2),
            give = results || (keep && test_random_chance(s, 2));
  const moe_layer_grads grads = {.x = data(q, PT_HIDDEN_GRAD),
                                 .topk_weights = pair_grads,
                                 .gate_up = ordered_tensor(&gate_up_grad, 0),
                                 .up = orders.up_apart ? ordered_tensor(&gate_up_grad, 1) : NULL,
                                 .down = ordered_tensor(&down_grad, 0),
                                 .gate_up_bias = data(q, PT_GATE_UP_BIAS_GRAD),
                                 .down_bias = data(q, PT_DOWN_BIAS_GRAD),
                                 .weight_dtype = args.backward.weight_grad_dtype,
                                 .accumulate = args.backward.accumulate};
  moe_layer of_forward = l;
  if (test_random_chance(s, 3) && (quantized || !l.mx.weights.enabled)) {
    pack_weights(ctx, dtype, &of_forward, quantized);
    if (!quantized) of_forward.gate_up = of_forward.up = of_forward.down = NULL;
  }
  run_forward(dtype, ctx, of_forward, data(q, PT_OUTPUT), keep ? saved : NULL);
  run_backward(dtype, ctx, l, give ? saved : NULL, data(p, PT_OUTPUT_GRAD), &grads);
  free((void *)(uintptr_t)of_forward.packed_gate_up), free((void *)(uintptr_t)of_forward.packed_down);
  ordered_copy(&gate_up_grad, data(q, PT_GATE_UP_WEIGHT_GRAD), 1);
  ordered_copy(&down_grad, data(q, PT_DOWN_WEIGHT_GRAD), 1);
  ordered_close(&gate_up), ordered_close(&down), ordered_close(&gate_up_grad), ordered_close(&down_grad);
  free(saved);
}

static void as_blockwise(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  const int64_t cases = test_cases(CONFIGURATIONS, CONFIGURATIONS / 16);
  for (int64_t i = 0; i < cases; i++) {
    if (!test_use_isa((int)(i % TEST_ISA_COUNT))) continue;
    uint64_t s = (uint64_t)i + 77;
    const struct problem_options o = options_of((uint64_t)i, dtype);
    struct test_pool pool = {.seed = s};
    moe_context ctx = {.num_threads = (int32_t)(i % 5),
                       .schedule = (moe_schedule)(i % MOE_SCHEDULE_COUNT_),
                       .parallel_for = i % 9 ? test_serial_parallel_for : test_pool_parallel_for,
                       .parallel_for_user = &pool};
    struct problem p, q;
    enum problem_op op;
    assert_true(problem_open(&p, &o, NULL, NULL) && problem_open(&q, &o, NULL, NULL));
    float *pair_grads = calloc((size_t)(o.T * o.K), sizeof *pair_grads);
    assert_int_equal(problem_run_all(&p, &ctx, &op), MOE_OK);
    memcpy(data(&q, PT_EXPERT_INDEX), data(&p, PT_EXPERT_INDEX), problem_tensor_bytes(&p, PT_EXPERT_INDEX));
    each_pair(&q, pair_grads, 0);
    run_face(&p, &q, &ctx, &s, pair_grads, NULL);
    const char *what = each_pair(&p, pair_grads, 1) ? "topk_weights_grad" : difference(&p, &q);
    if (what) {
      char text[512];
      problem_describe(&p, &ctx, text, sizeof text);
      fail_msg("%s differs | case %d %s", what, (int)i, text);
    }
    free(pair_grads);
    problem_close(&p, NULL, NULL), problem_close(&q, NULL, NULL);
  }
  test_use_best_isa();
}

/* Quantised weights of every kind, packed or not, against the blockwise layer from the same. */
static void as_quantized(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t s = 60 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(120, 20); i++) {
    struct storage storage = {.powers = 1};
    const moe_weight_scaling scaling = (moe_weight_scaling)(i % 6);
    const moe_mx_layout layout = (moe_mx_layout)(i / 6 % MOE_MX_LAYOUT_COUNT_);
    int64_t H = test_random_range(&s, 1, 80), I = test_random_range(&s, 1, 80);
    storage.gate_up.scaling = storage.down.scaling = scaling;
    storage.gate_up.block = storage.down.block = 32;
    storage.gate_up.element = storage.down.element = MOE_ELEMENT_E4M3;
    if (scaling == MOE_WEIGHT_MX) {
      storage.gate_up.layout = storage.down.layout = layout;
      if (mx_is_of_e2m1(layout)) storage.gate_up.element = storage.down.element = MOE_ELEMENT_E2M1;
      if (layout != MOE_MX_LAYOUT_PLAIN) H = 32 * test_random_range(&s, 1, 3), I = 32 * test_random_range(&s, 1, 3);
      if (mx_is_x4(layout)) H = 512, I = 4 * test_random_range(&s, 1, 20);
    }
    if (!test_use_isa((int)(i % TEST_ISA_COUNT))) continue;
    struct problem_options o = options_of((uint64_t)i + 5000, dtype);
    moe_context ctx = {.num_threads = 1 + (int32_t)(i % 3)};
    struct layer p, q;
    o.H = H, o.I = I, o.T = 1 + o.T % 20, o.tiny_rows = o.nan_row = 0, o.mx = (moe_mx_operands){0};
    problem_options_settle(&o);
    layer_open(&p, &o, &storage, 0), layer_open(&q, &o, &storage, 0);
    float *pair_grads = calloc((size_t)(o.T * o.K), sizeof *pair_grads);
    run(&p, &ctx, 1, (int)(i & 1));
    memcpy(data(&q.p, PT_EXPERT_INDEX), data(&p.p, PT_EXPERT_INDEX), problem_tensor_bytes(&p.p, PT_EXPERT_INDEX));
    each_pair(&q.p, pair_grads, 0);
    run_face(&p.p, &q.p, &ctx, &s, pair_grads, &q);
    const char *what = each_pair(&p.p, pair_grads, 1) ? "topk_weights_grad" : difference(&p.p, &q.p);
    if (what) {
      char text[512];
      problem_describe(&p.p, &ctx, text, sizeof text);
      fail_msg("%s differs | case %d scaling %d layout %d %s", what, (int)i, (int)scaling, (int)layout, text);
    }
    free(pair_grads);
    layer_close(&p), layer_close(&q);
  }
  test_use_best_isa();
}

/* ------------------------------------------------------------------------------------------ an expert twice, none */

enum { T = 5, H = 7, I = 6, E = 3, K = 4 };
static const int32_t twice[T][K] = {{1, 1, 0, -1}, {2, 2, 2, 2}, {-1, -1, -1, -1}, {0, 2, 1, 0}, {1, 0, 1, 0}};

static void fill(float *x, int64_t n, uint64_t *s) {
  for (int64_t i = 0; i < n; i++) x[i] = (float)(test_random_range(s, -64, 64)) / 32.0f;
}

/* Each of a token's slots counts, with its own weight and gradient: against the same layer with each slot in a token of
   its own. */
static void expert_twice(void **state) {
  (void)state;
  uint64_t s = 5;
  static float x[T][H], xs[T * K][H], w[T][K], gate_up[E][H][2][I], down[E][I][H], y[T][H], ys[T * K][H], dy[T][H],
      dys[T * K][H], dw[T][K], dws[T * K], dx[T][H], dxs[T * K][H];
  fill(x[0], T * H, &s), fill(w[0], T * K, &s), fill(dy[0], T * H, &s);
  fill(gate_up[0][0][0], E * H * 2 * I, &s), fill(down[0][0], E * I * H, &s);
  for (int i = 0; i < T * K; i++) memcpy(xs[i], x[i / K], sizeof xs[i]), memcpy(dys[i], dy[i / K], sizeof dys[i]);
  moe_layer l = {.T = T,
                 .H = H,
                 .I = I,
                 .E = E,
                 .K = K,
                 .x = x,
                 .topk_index = twice[0],
                 .topk_weights = w[0],
                 .gate_up = gate_up,
                 .down = down},
            apart = l;
  apart.T = T * K, apart.K = 1, apart.x = xs;
  const moe_layer_grads g = {.x = dx, .topk_weights = dw[0]}, gs = {.x = dxs, .topk_weights = dws};
  moe_context ctx = {0};
  memset(dw, 0xff, sizeof dw), memset(dws, 0xff, sizeof dws);
  run_forward(MOE_DTYPE_F32, &ctx, l, y, NULL), run_forward(MOE_DTYPE_F32, &ctx, apart, ys, NULL);
  run_backward(MOE_DTYPE_F32, &ctx, l, NULL, dy, &g), run_backward(MOE_DTYPE_F32, &ctx, apart, NULL, dys, &gs);
  assert_memory_equal(dw, dws, sizeof dw);
  for (int t = 0; t < T; t++)
    for (int h = 0; h < H; h++) {
      float sum = 0, grad = 0; /* by expert, then slot */
      for (int e = 0; e < E; e++)
        for (int k = 0; k < K; k++)
          if (twice[t][k] == e) sum += ys[t * K + k][h], grad += dxs[t * K + k][h];
      assert_memory_equal(&sum, &y[t][h], 4);
      assert_memory_equal(&grad, &dx[t][h], 4);
    }
  for (int k = 0; k < K; k++) assert_true(dw[2][k] == 0.0f && !(dw[1][k] == 0.0f));
}

/* Identity experts add w*x to y, and w*dY to dX, after all others; their weights' gradients are <dY,x>. */
static void identity_experts(void **state) {
  (void)state;
  uint64_t s = 15;
  static float x[T][H], w[T][K], gate_up[E][H][2][I], down[E][I][H], y[2][T][H], dy[T][H], dw[2][T][K], dx[2][T][H];
  int32_t index[2][T][K];
  fill(x[0], T * H, &s), fill(w[0], T * K, &s), fill(dy[0], T * H, &s);
  fill(gate_up[0][0][0], E * H * 2 * I, &s), fill(down[0][0], E * I * H, &s);
  memcpy(index[0], twice, sizeof twice);
  index[0][0][3] = E, index[0][1][0] = E + 1, index[0][1][2] = E + 1, index[0][2][1] = E, index[0][4][0] = E + 1;
  for (int t = 0; t < T; t++)
    for (int k = 0; k < K; k++) index[1][t][k] = index[0][t][k] < E ? index[0][t][k] : -1;
  moe_context ctx = {.num_threads = 2};
  for (int i = 0; i < 2; i++) {
    const moe_layer l = {.T = T,
                         .H = H,
                         .I = I,
                         .E = E,
                         .K = K,
                         .identity_experts = i ? 0 : 2,
                         .x = x,
                         .topk_index = index[i][0],
                         .topk_weights = w[0],
                         .gate_up = gate_up,
                         .down = down};
    const moe_layer_grads g = {.x = dx[i], .topk_weights = dw[i][0]};
    run_forward(MOE_DTYPE_F32, &ctx, l, y[i], NULL);
    run_backward(MOE_DTYPE_F32, &ctx, l, NULL, dy, &g);
  }
  for (int t = 0; t < T; t++)
    for (int k = 0; k < K; k++) {
      double dot = 0;
      const int identity = index[0][t][k] >= E;
      for (int h = 0; h < H; h++) {
        const volatile float term = w[t][k] * x[t][h], grad = w[t][k] * dy[t][h];
        if (identity) y[1][t][h] += term, dx[1][t][h] += grad, dot += (double)dy[t][h] * x[t][h];
      }
      if (identity) assert_true((double)dw[0][t][k] == dot); /* sums of products of multiples of 1/32 are exact */
      else assert_memory_equal(&dw[0][t][k], &dw[1][t][k], 4);
    }
  assert_memory_equal(y[0], y[1], sizeof y[0]);
  assert_memory_equal(dx[0], dx[1], sizeof dx[0]);
}

/* No tokens: nothing is read, weight gradients are 0, or stay. */
static void no_tokens(void **state) {
  (void)state;
  static float gate_up[E][H][2][I], down[E][I][H], room[1 << 16], dgate_up[E][H][2][I], ddown[E][I][H];
  moe_context ctx = {0};
  moe_layer l = {.T = 0,
                 .H = H,
                 .I = I,
                 .E = E,
                 .K = K,
                 .gate_up = gate_up,
                 .down = down,
                 .workspace = room,
                 .workspace_bytes = sizeof room};
  moe_layer_grads g = {.gate_up = dgate_up, .down = ddown, .accumulate = MOE_ACCUMULATE_DOWN_WEIGHT_GRAD};
  memset(dgate_up, 1, sizeof dgate_up), memset(ddown, 1, sizeof ddown);
  size_t bytes = 1;
  assert_int_equal(moe_layer_saved_bytes_f32(&ctx, &l, &bytes), MOE_OK);
  assert_int_equal(bytes, 0);
  assert_int_equal(moe_layer_forward_f32(&ctx, &l, NULL, NULL), MOE_OK);
  assert_int_equal(moe_layer_backward_f32(&ctx, &l, NULL, NULL, &g), MOE_OK);
  for (size_t i = 0; i < sizeof ddown; i++) assert_int_equal(((char *)ddown)[i], 1);
  for (size_t i = 0; i < sizeof dgate_up; i++) assert_int_equal(((char *)dgate_up)[i], 0);
}

/* ---------------------------------------------------------------------------------------------------------- refused */

static void refused(void **state) {
  (void)state;
  static float x[T][H], w[T][K], gate_up[E][H][2][I], down[E][I][H], y[T][H], saved[T * K][2][I], room[1 << 15];
  int32_t index[T][K];
  memcpy(index, twice, sizeof index);
  const moe_layer usual = {.T = T,
                           .H = H,
                           .I = I,
                           .E = E,
                           .K = K,
                           .x = x,
                           .topk_index = index[0],
                           .topk_weights = w[0],
                           .gate_up = gate_up,
                           .down = down,
                           .workspace = room,
                           .workspace_bytes = sizeof room};
  const moe_layer_grads none = {0};
  moe_context ctx = {0};
  moe_layer l;
#define EXPECT(status, begins, call, ...)     \
  l = usual;                                  \
  __VA_ARGS__;                                \
  assert_int_equal(call, MOE_ERROR_##status); \
  if (strncmp(ctx.message, begins " ", strlen(begins) + 1) != 0) fail_msg("%s", ctx.message)
#define FORWARD         moe_layer_forward_f32(&ctx, &l, y, saved)
#define BACKWARD(grads) moe_layer_backward_f32(&ctx, &l, saved, y, grads)
  size_t bytes;
  assert_int_equal(moe_layer_forward_f32(&ctx, &usual, y, saved), MOE_OK);
  assert_int_equal(moe_layer_backward_f32(&ctx, &usual, saved, x, &none), MOE_OK);
  EXPECT(NULL_ARGUMENT, "layer", moe_layer_forward_f32(&ctx, NULL, y, saved), (void)0);
  EXPECT(NULL_ARGUMENT, "y", moe_layer_forward_f32(&ctx, &l, NULL, saved), (void)0);
  EXPECT(NULL_ARGUMENT, "x", FORWARD, l.x = NULL);
  EXPECT(NULL_ARGUMENT, "gate_up", FORWARD, l.gate_up = NULL);
  EXPECT(NULL_ARGUMENT, "down", FORWARD, l.down = NULL);
  EXPECT(NULL_ARGUMENT, "up", FORWARD, l.orders.up_apart = 1);
  EXPECT(NULL_ARGUMENT, "topk_index", FORWARD, l.topk_index = NULL);
  EXPECT(NULL_ARGUMENT, "topk_weights", BACKWARD(&none), l.topk_weights = NULL);
  EXPECT(NULL_ARGUMENT, "y_grad", moe_layer_backward_f32(&ctx, &l, saved, NULL, &none), (void)0);
  EXPECT(NULL_ARGUMENT, "grads", moe_layer_backward_f32(&ctx, &l, saved, y, NULL), (void)0);
  EXPECT(INVALID_SHAPE, "K", FORWARD, l.K = 0);
  EXPECT(INVALID_SHAPE, "T", FORWARD, l.T = -1);
  EXPECT(INVALID_SHAPE, "H", FORWARD, l.H = 0);
  EXPECT(OVERFLOW, "K", FORWARD, l.K = INT64_MAX / 2);
  EXPECT(INVALID_SHAPE, "identity_experts", FORWARD, l.identity_experts = -1);
  EXPECT(OVERFLOW, "identity_experts", FORWARD, l.identity_experts = INT64_MAX);
  EXPECT(OVERFLOW, "K", moe_layer_saved_bytes_f32(&ctx, &l, &bytes), l.K = INT32_MAX);
  EXPECT(INVALID_OPTION, "saved_dtype", FORWARD, l.saved_dtype = (moe_dtype)99);
  EXPECT(INVALID_OPTION, "accumulate", FORWARD, l.accumulate = 1);
  EXPECT(INVALID_OPTION, "config.activation", FORWARD, l.config.activation = MOE_ACT_COUNT_);
  EXPECT(INVALID_OPTION, "grads.weight_dtype", BACKWARD(&(const moe_layer_grads){.weight_dtype = (moe_dtype)-1}),
         (void)0);
  EXPECT(OVERLAP, "y", moe_layer_forward_f32(&ctx, &l, x, saved), (void)0);
  EXPECT(OVERLAP, "saved", moe_layer_forward_f32(&ctx, &l, y, w), (void)0);
  EXPECT(OVERLAP, "grads.x", BACKWARD(&(const moe_layer_grads){.x = x}), (void)0);
  EXPECT(OVERLAP, "grads.topk_weights", BACKWARD(&(const moe_layer_grads){.topk_weights = w[0]}), (void)0);
  EXPECT(MISALIGNED, "gate_up_bias", FORWARD, l.gate_up_bias = (const char *)x + 2);
  EXPECT(WORKSPACE, "workspace", FORWARD, l.workspace = NULL);
  EXPECT(WORKSPACE, "workspace_bytes", FORWARD, l.workspace_bytes = 100);
  EXPECT(NULL_ARGUMENT, "bytes", moe_layer_saved_bytes_f32(&ctx, &l, NULL), (void)0);
  EXPECT(NULL_ARGUMENT, "layer", moe_layer_saved_bytes_f32(&ctx, NULL, &bytes), (void)0);
  y[0][0] = 3.0f;
  index[T - 1][K - 1] = E;
  EXPECT(INVALID_INDEX, "topk_index", FORWARD, (void)0);
  index[T - 1][K - 1] = -2;
  EXPECT(INVALID_INDEX, "topk_index", BACKWARD(&none), (void)0);
  assert_true(y[0][0] == 3.0f);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      EACH_DTYPE(as_blockwise),           EACH_DTYPE(as_quantized),    cmocka_unit_test(expert_twice),
      cmocka_unit_test(identity_experts), cmocka_unit_test(no_tokens), cmocka_unit_test(refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
