/* test_quantized: experts from quantised weights give the same bits, outputs and gradients, as the same experts from
   the plain weights that these stand for, whatever the storage; scales that multiply sums; prepacking; bad input. */
#include "support/test.h"

#include <math.h>

#include "support/pool.h"
#include "support/problem.h"
#include "support/quantized.h"

enum { LAYOUTS = MOE_MX_LAYOUT_GGML + 1, PLACEMENTS = MOE_MX_SCALES_TILED_128X4 + 1 };

/* How the weights of a case are given. */
struct storage {
  moe_quantized_weight gate_up, down;
  int packed, powers; /* powers: float scales are powers of two */
  int tiny;           /* 1: gate and up's float scales are below 2^-125, 2: down's */
  int sunk, normal;   /* see skew_codes */
};

struct layer {
  struct problem p;
  struct quantized gate_up, down;
};

static void shrink_scales(struct quantized *q, uint64_t *rng) {
  guard_free(&q->codes), guard_free(&q->scales);
  for (int64_t i = 0; i < quantized_scale_count(q); i++) q->scale[i] = float_of((uint32_t)(test_random(rng) >> 40));
  quantized_store(q, 1);
}

/* What kernels tell apart: some scale bytes so low that most of what they scale is subnormal, and codes of normal
   numbers only. */
static void skew_codes(struct quantized *q, const struct storage *s, uint64_t *rng, int side) {
  const int least = 1 << q->format->fraction_bits;
  guard_free(&q->codes), guard_free(&q->scales);
  for (int64_t i = 0; i < quantized_count(q) && s->normal; i++)
    if ((q->table.code[i] & (127 >> (8 - q->format->bits))) < least) q->table.code[i] |= (uint8_t)least;
  for (int64_t i = 0; i < quantized_groups(q) && s->sunk; i++)
    if (test_random_chance(rng, 16)) q->table.scale[i] = (uint8_t)test_random_range(rng, 0, 8);
  quantized_store(q, side);
}

static void layer_open(struct layer *l, const struct problem_options *o, const struct storage *s, int codes_only) {
  uint64_t rng = o->seed * 77 + 5;
  const int e5m2 = s->gate_up.element == MOE_ELEMENT_E5M2 || s->down.element == MOE_ELEMENT_E5M2;
  const int low = o->dtype == MOE_DTYPE_FP16 ? 120 : 112, high = o->dtype == MOE_DTYPE_FP16 && e5m2 ? 126 : 130;
  memset(l, 0, sizeof *l);
  assert_true(problem_open(&l->p, o, NULL, NULL));
  problem_fill(&l->p);
  l->gate_up.weight = s->gate_up, l->down.weight = s->down;
  l->gate_up.E = l->down.E = o->E;
  l->gate_up.K = o->H, l->gate_up.parts = 2, l->gate_up.columns = o->I;
  l->down.K = o->I, l->down.parts = 1, l->down.columns = o->H;
  quantized_make(&l->gate_up, &rng, low, high, s->powers, (int)(o->seed & 1));
  quantized_make(&l->down, &rng, low, high, s->powers, (int)(o->seed & 1));
  skew_codes(&l->gate_up, s, &rng, (int)(o->seed & 1));
  skew_codes(&l->down, s, &rng, (int)(o->seed & 1));
  if (s->tiny == 1) shrink_scales(&l->gate_up, &rng);
  if (s->tiny == 2) shrink_scales(&l->down, &rng);
  assert_true(quantized_plain(&l->gate_up, o->dtype, l->p.tensor[PT_GATE_UP_WEIGHT].data, codes_only));
  assert_true(quantized_plain(&l->down, o->dtype, l->p.tensor[PT_DOWN_WEIGHT].data, codes_only));
}

static void layer_close(struct layer *l) {
  problem_close(&l->p, NULL, NULL);
  quantized_free(&l->gate_up), quantized_free(&l->down);
}

/* ------------------------------------------------------------------------------------------------------------ calls */

static void give_quantized(struct layer *l, moe_blockwise_layer *layer) {
  layer->gate_up_proj_weight = layer->down_proj_weight = NULL;
  layer->quantized_gate_up_weight = &l->gate_up.weight;
  layer->quantized_down_weight = &l->down.weight;
}

static void *pack_one(moe_context *ctx, struct layer *l, const struct quantized *q, size_t *bytes) {
  moe_pack_weights_args args = {.layout = q->parts == 1            ? MOE_PACK_DOWN
                                          : l->p.o.layer.skip_gate ? MOE_PACK_UP
                                                                   : MOE_PACK_GATE_UP,
                                .E = q->E,
                                .rows = q->K,
                                .columns = q->columns,
                                .quantized = &q->weight};
  assert_int_equal(quantized_pack(ctx, l->p.o.dtype, &args, bytes), MOE_OK);
  args.packed = aligned_alloc(64, (*bytes + 63) / 64 * 64);
  args.packed_bytes = *bytes;
  assert_non_null(args.packed);
  assert_int_equal(quantized_pack(ctx, l->p.o.dtype, &args, NULL), MOE_OK);
  return args.packed;
}

static void call(struct layer *l, moe_context *ctx, enum problem_op op, struct problem_args *args) {
  size_t bytes = 0;
  assert_int_equal(problem_workspace_size(op, ctx, args, &bytes), MOE_OK);
  void *workspace = malloc(bytes);
  assert_non_null(workspace);
  problem_set_workspace(op, args, workspace, bytes);
  if (problem_call(op, ctx, args) != MOE_OK) {
    char text[400];
    problem_describe(&l->p, ctx, text, sizeof text);
    fail_msg("%s: %s | %s", problem_op_name(op), ctx->message, text);
  }
  free(workspace);
}

/* The forward and the backward; `quantized`: from the quantised weights. */
static void run(struct layer *l, moe_context *ctx, int quantized, int packed) {
  for (int op = 0; op <= PROBLEM_BACKWARD; op++) {
    struct problem_args args;
    void *gate_up = NULL, *down = NULL;
    problem_make_args(&l->p, &args);
    if (quantized) give_quantized(l, &args.forward.layer), give_quantized(l, &args.backward.layer);
    if (packed && op == PROBLEM_FORWARD) {
      moe_blockwise_layer *layer = &args.forward.layer;
      layer->packed_gate_up_weight = gate_up = pack_one(ctx, l, &l->gate_up, &layer->packed_gate_up_bytes);
      layer->packed_down_weight = down = pack_one(ctx, l, &l->down, &layer->packed_down_bytes);
    }
    call(l, ctx, (enum problem_op)op, &args);
    free(gate_up), free(down);
  }
}

static void assert_same(const struct layer *want, const struct layer *got, const struct storage *s, const char *how) {
  for (int i = 0; i < PT_COUNT; i++) {
    const unsigned char *a = want->p.tensor[i].data, *b = got->p.tensor[i].data;
    const size_t bytes = problem_tensor_bytes(&got->p, i);
    if (memcmp(a, b, bytes) == 0) continue;
    size_t at = 0;
    while (a[at] == b[at]) at++;
    char text[400];
    problem_describe(&got->p, NULL, text, sizeof text);
    fail_msg("%s[%zu] differs (%s)\nrepro: %s gate_up: element %d scaling %d layout %d/%d block %lld, down: %d %d "
             "%d/%d packed %d",
             got->p.tensor[i].name, at / (size_t)got->p.tensor[i].element, how, text, s->gate_up.element,
             s->gate_up.scaling, s->gate_up.layout, s->gate_up.scales_layout, (long long)s->gate_up.block,
             s->down.element, s->down.scaling, s->down.layout, s->down.scales_layout, s->packed);
  }
}

/* Plain on one thread against quantised in some way. */
static void check(const struct problem_options *o, const struct storage *s) {
  struct layer want, got;
  uint64_t rng = o->seed;
  moe_context one = {.num_threads = 1};
  layer_open(&want, o, s, 0);
  run(&want, &one, 0, 0);
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!test_use_isa(isa)) continue;
    struct test_pool pool = {.seed = test_random(&rng)};
    moe_context ctx = {.parallel_for = test_pool_parallel_for, .parallel_for_user = &pool};
    ctx.num_threads = (int32_t)test_random_range(&rng, 1, 3),
    ctx.schedule = (moe_schedule)test_random_range(&rng, 0, 2);
    layer_open(&got, o, s, 0);
    run(&got, &ctx, 1, s->packed);
    assert_same(&want, &got, s, moe_isa_name((moe_isa)isa));
    layer_close(&got);
  }
  test_use_best_isa();
  layer_close(&want);
}

/* ------------------------------------------------------------------------------------------------------------ tests */

static struct problem_options shape(uint64_t seed, moe_dtype dtype, int64_t H, int64_t I) {
  struct problem_options o = problem_options_random(seed, dtype);
  o.H = H, o.I = I;
  if (H * I > 20000) o.E = 2, o.K = 1, o.T = 5, o.B = 4;
  o.empty_expert = o.tiny_rows = o.nan_row = 0;
  problem_options_settle(&o);
  return o;
}

static const int64_t odd[] = {1, 2, 7, 31, 33, 40, 64, 65, 100, 129, 160, 200, 260, 300};

/* Every layout, placement and element; PLAIN in odd shapes. */
static void test_mx(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 40 + (uint64_t)dtype;
  const int64_t rounds = 2, step = test_cases(1, 7);
  for (int64_t i = 0; i < LAYOUTS * PLACEMENTS * ELEMENTS * rounds; i += step) {
    struct storage s = {.packed = test_random_chance(&rng, 3), .normal = test_random_chance(&rng, 2)};
    s.sunk = dtype != MOE_DTYPE_FP16 && test_random_chance(&rng, 3);
    s.gate_up.layout = s.down.layout = (moe_mx_layout)(i % LAYOUTS);
    s.gate_up.scales_layout = s.down.scales_layout = (moe_mx_scales)(i / LAYOUTS % PLACEMENTS);
    s.gate_up.element = s.down.element = (moe_element)(i / LAYOUTS / PLACEMENTS % ELEMENTS);
    const moe_mx_layout layout = s.gate_up.layout;
    if (!mx_placeable(layout, s.gate_up.scales_layout)) continue;
    if ((layout == MOE_MX_LAYOUT_GPT_OSS || layout == MOE_MX_LAYOUT_GGML) && s.down.element != MOE_ELEMENT_E2M1)
      continue;
    int64_t H = odd[test_random_range(&rng, 0, 13)], I = odd[test_random_range(&rng, 0, 13)];
    if (layout != MOE_MX_LAYOUT_PLAIN) H = 32 * test_random_range(&rng, 1, 9), I = 32 * test_random_range(&rng, 1, 9);
    if (mx_is_x4(layout)) H = 512 * test_random_range(&rng, 1, 2), I = 4 * test_random_range(&rng, 1, 20);
    const struct problem_options o = shape(9000 + (uint64_t)i, dtype, H, I);
    check(&o, &s);
  }
}

/* Rows on both sides of where weights are packed instead of being multiplied as they stream past; whole panels, lines
   of codes and groups, and parts of them. */
static void test_row_counts(void **state) {
  static const int64_t rows[] = {1, 3, 32, 33, 70}, lengths[] = {64, 96, 128, 256, 40, 300};
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (int64_t n = 0; n < test_cases(60, 12); n++) {
    const int64_t i = n * 7 % 60;
    struct storage s = {.normal = n % 2 == 1, .sunk = dtype != MOE_DTYPE_FP16 && n % 3 != 0};
    s.gate_up.element = s.down.element = i % 2 ? MOE_ELEMENT_E4M3FN : MOE_ELEMENT_E2M1;
    if (i % 3 == 2) s.gate_up.scaling = s.down.scaling = MOE_WEIGHT_STATIC, s.powers = 1;
    if (i % 3 == 2) s.gate_up.element = s.down.element = i % 2 ? MOE_ELEMENT_E4M3FN : MOE_ELEMENT_E4M3;
    struct problem_options o = shape(9800 + (uint64_t)i, dtype, lengths[i / 10], lengths[(i / 5 + 3) % 6]);
    o.E = o.K = 1, o.T = rows[i % 5], o.B = 8;
    if (s.powers) o.layer.activation = MOE_ACT_RELU;
    problem_options_settle(&o);
    check(&o, &s);
  }
}

/* BLOCK, and scales that multiply sums: powers of two, so that it does not matter when, unless something is
   subnormal. */
static void test_float_scales(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  static const int64_t blocks[] = {0, 1, 3, 32, 128}, repeats[] = {0, 1, 128};
  uint64_t rng = 50 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(40, 8); i++) {
    struct storage s = {.packed = test_random_chance(&rng, 3)};
    s.gate_up.scaling = (moe_weight_scaling)(1 + i % 5), s.down.scaling = (moe_weight_scaling)(1 + i / 5 % 5);
    s.gate_up.block = s.down.block = blocks[i % 5], s.gate_up.repeat = s.down.repeat = repeats[i % 3];
    s.gate_up.element = s.down.element = (moe_element)(i % 3);
    s.powers = dtype == MOE_DTYPE_FP16 || s.gate_up.scaling != MOE_WEIGHT_BLOCK || s.down.scaling != MOE_WEIGHT_BLOCK;
    struct problem_options o =
        shape(9500 + (uint64_t)i, dtype, odd[test_random_range(&rng, 0, 13)], odd[test_random_range(&rng, 0, 13)]);
    if (s.powers) o.layer.activation = i % 2 ? MOE_ACT_RELU : MOE_ACT_IDENTITY;
    if (dtype == MOE_DTYPE_FP16 && s.gate_up.element == MOE_ELEMENT_E5M2) continue; /* fp16 does not hold 4 * 57344 */
    check(&o, &s);
  }
}

/* code*scale is a binary32 product whatever bf16 products do with subnormals: of scales below 2^-126, and where it
   rounds to 2^-126 from below. */
static void test_tiny_scales(void **state) {
  uint64_t rng = 8;
  (void)state;
  for (int i = 0; i < 8; i++) {
    struct storage s = {.packed = i & 1, .tiny = 1 + i / 2 % 2};
    s.gate_up.scaling = s.down.scaling = MOE_WEIGHT_BLOCK;
    s.gate_up.element = s.down.element = (moe_element)(i % 3);
    s.gate_up.block = s.down.block = i < 4 ? 3 : 64;
    const int64_t H = odd[test_random_range(&rng, 0, 13)], I = odd[test_random_range(&rng, 0, 13)];
    struct problem_options o = shape(9700 + (uint64_t)i, MOE_DTYPE_BF16, H, I);
    o.save_gate_up = 1, o.checkpoint_dtype = MOE_DTYPE_F32, o.layer.activation = MOE_ACT_IDENTITY;
    check(&o, &s);
  }
}

/* Any scales, after the sum: what the checkpoint of the bare codes holds, times the scale, once. */
static void test_scaled_sums(void **state) {
  (void)state;
  for (int64_t i = 0; i < test_cases(60, 12); i++) {
    static const moe_weight_scaling after[] = {MOE_WEIGHT_STATIC, MOE_WEIGHT_COLUMN, MOE_WEIGHT_STATIC_PER_EXPERT,
                                               MOE_WEIGHT_COLUMN_PER_EXPERT};
    struct storage s = {.packed = (int)(i & 1)};
    s.gate_up.scaling = s.down.scaling = after[i % 4];
    struct problem_options o = shape(9700 + (uint64_t)i, MOE_DTYPE_F32, odd[i % 14], odd[i * 5 % 14]);
    o.expert_bias = 0, o.save_gate_up = 1, o.checkpoint_dtype = MOE_DTYPE_F32;
    o.layer.clamp = 0, o.layer.affinity_mode = MOE_AFFINITY_NO_SCALE;
    problem_options_settle(&o);
    struct layer want, got;
    moe_context ctx = {.num_threads = 1};
    layer_open(&want, &o, &s, 1), layer_open(&got, &o, &s, 1);
    run(&want, &ctx, 0, 0), run(&got, &ctx, 1, s.packed);
    const float *a = (const float *)(const void *)want.p.tensor[PT_GATE_UP_CHECKPOINT].data;
    const float *b = (const float *)(const void *)got.p.tensor[PT_GATE_UP_CHECKPOINT].data;
    const int32_t *expert = (const int32_t *)(const void *)got.p.tensor[PT_BLOCK_EXPERT].data;
    for (int64_t j = 0; j < got.p.tensor[PT_GATE_UP_CHECKPOINT].count; j++) {
      const int64_t column = j / o.B % o.I, part = j / o.B / o.I % 2, block = j / o.B / o.I / 2;
      const int64_t e = o.dropping ? block : expert[block] < o.E ? expert[block] : 0;
      const float expected = a[j] * quantized_scale(&got.gate_up, e, 0, part, column);
      if (memcmp(&expected, &b[j], 4) != 0)
        fail_msg("case %lld scaling %d: checkpoint[%lld]", (long long)i, s.down.scaling, (long long)j);
    }
    layer_close(&want), layer_close(&got);
  }
}

/* Any scales, backward: w = code*scale rounded. The checkpoint comes from elsewhere. */
static void test_scaled_backward(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (int64_t i = 0; i < test_cases(30, 6); i++) {
    struct storage s = {.powers = dtype == MOE_DTYPE_FP16};
    s.gate_up.scaling = (moe_weight_scaling)(1 + i % 5), s.down.scaling = (moe_weight_scaling)(1 + i / 5 % 5);
    struct problem_options o = shape(9800 + (uint64_t)i, dtype, odd[i % 14], odd[i * 5 % 14]);
    o.save_gate_up = 1;
    problem_options_settle(&o);
    struct layer want, got;
    moe_context ctx = {.num_threads = 1};
    layer_open(&want, &o, &s, 0), layer_open(&got, &o, &s, 0);
    run(&want, &ctx, 0, 0);
    for (int op = 0; op <= PROBLEM_BACKWARD; op++) {
      struct problem_args args;
      problem_make_args(&got.p, &args);
      if (op == PROBLEM_BACKWARD) give_quantized(&got, &args.backward.layer);
      call(&got, &ctx, (enum problem_op)op, &args);
    }
    assert_same(&want, &got, &s, "backward");
    layer_close(&want), layer_close(&got);
  }
}

/* Every code under every scale: an expert per scale byte, a column per code, hidden states that pick one row of K. As
   weights stream past, and packed. */
enum { PAIR_EXPERTS = 256, PAIR_H = 32, PAIR_ROWS = 33 };

static void open_pairs(const struct element *f, struct quantized *q, struct quantized *down) {
  uint64_t rng = 3;
  const int64_t I = f->bits == 8 ? 256 : 16;
  *q = (struct quantized){.weight = {.element = f->id}, .E = PAIR_EXPERTS, .K = PAIR_H, .parts = 2, .columns = I};
  *down = (struct quantized){.weight = {.element = f->id}, .E = PAIR_EXPERTS, .K = I, .parts = 1, .columns = PAIR_H};
  quantized_make(q, &rng, 0, 0, 0, 1);
  quantized_make(down, &rng, 127, 127, 0, 1);
  guard_free(&q->codes), guard_free(&q->scales);
  for (int64_t i = 0; i < PAIR_EXPERTS * 2 * I * PAIR_H; i++)
    q->table.code[i] = (uint8_t)(i % PAIR_H == 5 ? i / PAIR_H % I : 0);
  for (int64_t i = 0; i < PAIR_EXPERTS * 2 * I; i++) q->table.scale[i] = (uint8_t)(i / (2 * I));
  quantized_store(q, 1);
}

/* What the f32 checkpoint should hold: a sum from +0; bf16 products take subnormals as zero. */
static uint32_t pair_wanted(const struct quantized *q, int64_t i, moe_dtype dtype) {
  const int64_t I = q->columns;
  const uint32_t bits = bits_of(quantized_value(q, i / (2 * I), 5, i / I % 2, i % I)), magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fc00000u;
  if (magnitude == 0 || (magnitude < 0x00800000u && dtype == MOE_DTYPE_BF16)) return 0;
  return bits;
}

static void check_pairs(const struct quantized *q, const struct quantized *down, moe_dtype dtype, int64_t rows) {
  static int32_t ids[PAIR_EXPERTS * PAIR_ROWS], experts[PAIR_EXPERTS];
  static uint32_t x32[PAIR_EXPERTS][PAIR_H], output[PAIR_EXPERTS][PAIR_H];
  static uint16_t x16[PAIR_EXPERTS][PAIR_H];
  const int f32 = dtype == MOE_DTYPE_F32;
  const int64_t I = q->columns, count = PAIR_EXPERTS * rows * 2 * I;
  float *checkpoint = calloc((size_t)count, 4);
  for (int t = 0; t < PAIR_EXPERTS; t++) experts[t] = t, x32[t][5] = 0x3f800000u, x16[t][5] = 0x3f80u;
  for (int i = 0; i < PAIR_EXPERTS * rows; i++) ids[i] = (int32_t)(i / rows);
  moe_blockwise_mm_fwd_args args = {.layer = {.T = PAIR_EXPERTS,
                                              .H = PAIR_H,
                                              .I = I,
                                              .E = PAIR_EXPERTS,
                                              .N = PAIR_EXPERTS,
                                              .B = rows,
                                              .hidden_states = f32 ? (void *)x32 : (void *)x16,
                                              .quantized_gate_up_weight = &q->weight,
                                              .quantized_down_weight = &down->weight,
                                              .token_position_to_id = ids,
                                              .block_to_expert = experts,
                                              .checkpoint_dtype = MOE_DTYPE_F32,
                                              .config = {.affinity_mode = MOE_AFFINITY_NO_SCALE}},
                                    .gate_up_activations_T = checkpoint,
                                    .output = output};
  moe_context ctx = {.num_threads = 1};
  assert_int_equal((f32 ? moe_blockwise_mm_fwd_f32_workspace_size
                        : moe_blockwise_mm_fwd_bf16_workspace_size)(&ctx, &args, &args.workspace_bytes),
                   MOE_OK);
  args.workspace = malloc(args.workspace_bytes);
  assert_int_equal((f32 ? moe_blockwise_mm_fwd_f32 : moe_blockwise_mm_fwd_bf16)(&ctx, &args), MOE_OK);
  for (int64_t i = 0; i < count; i++) { /* [expert, part, I, rows] */
    const int64_t pair = i / rows;
    const uint32_t wanted = pair_wanted(q, pair, dtype);
    if (bits_of(checkpoint[i]) != wanted)
      fail_msg("%s isa %s dtype %d rows %lld: code %lld scale %lld: %08x, not %08x", q->format->name,
               moe_isa_name(moe_isa_active()), (int)dtype, (long long)rows, (long long)(pair % I),
               (long long)(pair / (2 * I)), (unsigned)bits_of(checkpoint[i]), (unsigned)wanted);
  }
  free(args.workspace), free(checkpoint);
}

static void test_pairs(void **state) {
  (void)state;
  for (int f = 0; f < ELEMENTS; f++) {
    struct quantized q, down;
    open_pairs(&elements[f], &q, &down);
    for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
      if (!test_use_isa(isa)) continue;
      for (int64_t rows = 1; rows <= PAIR_ROWS; rows += PAIR_ROWS - 1) {
        check_pairs(&q, &down, MOE_DTYPE_F32, rows);
        check_pairs(&q, &down, MOE_DTYPE_BF16, rows);
      }
    }
    quantized_free(&q), quantized_free(&down);
  }
  test_use_best_isa();
}

/* ------------------------------------------------------------------------------------------------------- bad input */

static void refuse(struct layer *l, const struct problem_args *args, enum problem_op op, moe_status status,
                   const char *word) {
  struct problem_args own = *args;
  moe_context ctx = {0};
  char before[64];
  own.forward.layer.gate_up_proj_weight = own.forward.layer.down_proj_weight = NULL;
  void *workspace = malloc(1 << 24);
  assert_non_null(workspace);
  problem_set_workspace(op, &own, workspace, 1 << 24);
  memcpy(before, l->p.tensor[PT_OUTPUT].data, sizeof before);
  const moe_status got = problem_call(op, &ctx, &own);
  free(workspace);
  if (got != status || !strstr(ctx.message, word))
    fail_msg("%s instead of %s: \"%s\" does not name %s", moe_status_str(got), moe_status_str(status), ctx.message,
             word);
  assert_memory_equal(before, l->p.tensor[PT_OUTPUT].data, sizeof before);
}

/* One field of the weight for gate and up is wrong. */
#define REFUSE(assignment, status, word)                           \
  do {                                                             \
    l.gate_up.weight = good;                                       \
    l.gate_up.weight.assignment;                                   \
    refuse(&l, &args, PROBLEM_FORWARD, MOE_ERROR_##status, word);  \
    refuse(&l, &args, PROBLEM_BACKWARD, MOE_ERROR_##status, word); \
  } while (0)

static void open_bad(struct layer *l, struct problem_args *args, moe_weight_scaling scaling, moe_mx_layout layout) {
  struct storage s = {.gate_up = {.scaling = scaling, .layout = layout}, .powers = 1};
  struct problem_options o = shape(3, MOE_DTYPE_F32, 512, 32);
  o.save_gate_up = 1;
  problem_options_settle(&o);
  layer_open(l, &o, &s, 0);
  moe_context ctx = {.num_threads = 1};
  run(l, &ctx, 0, 0);
  problem_make_args(&l->p, args);
  give_quantized(l, &args->forward.layer), give_quantized(l, &args->backward.layer);
}

static void test_bad_mx(void **state) {
  (void)state;
  struct layer l;
  struct problem_args args;
  open_bad(&l, &args, MOE_WEIGHT_MX, MOE_MX_LAYOUT_NKI_STRIDED_X4);
  const moe_quantized_weight good = l.gate_up.weight;
  REFUSE(codes = NULL, NULL_ARGUMENT, "quantized_gate_up_weight->codes");
  REFUSE(scales = NULL, NULL_ARGUMENT, "quantized_gate_up_weight->scales");
  REFUSE(codes = (const char *)good.codes + 1, MISALIGNED, "quantized_gate_up_weight->codes");
  REFUSE(element = (moe_element)9, INVALID_OPTION, "element");
  REFUSE(scaling = (moe_weight_scaling)-1, INVALID_OPTION, "scaling");
  REFUSE(layout = (moe_mx_layout)99, INVALID_OPTION, "layout");
  REFUSE(scales_layout = MOE_MX_SCALES_TILED_128X4, INVALID_OPTION, "scales_layout");
  REFUSE(scales_layout = (moe_mx_scales)77, INVALID_OPTION, "scales_layout");
  REFUSE(layout = MOE_MX_LAYOUT_GGML, INVALID_OPTION, "element_bits");
  l.gate_up.weight = good;
  l.gate_up.weight.codes = l.p.tensor[PT_OUTPUT].data;
  refuse(&l, &args, PROBLEM_FORWARD, MOE_ERROR_OVERLAP, "output");
  l.gate_up.weight.codes = l.p.tensor[PT_HIDDEN_GRAD].data;
  refuse(&l, &args, PROBLEM_BACKWARD, MOE_ERROR_OVERLAP, "hidden_states_grad");
  l.gate_up.weight = good;
  args.forward.layer.I = args.backward.layer.I = 30; /* not this layout's, for down is in rows */
  l.down.weight.layout = MOE_MX_LAYOUT_NKI_WRAPX;
  refuse(&l, &args, PROBLEM_FORWARD, MOE_ERROR_INVALID_SHAPE, "K");
  layer_close(&l);
}

static void test_bad_scales(void **state) {
  (void)state;
  struct layer l;
  struct problem_args args;
  open_bad(&l, &args, MOE_WEIGHT_BLOCK, MOE_MX_LAYOUT_PLAIN);
  const moe_quantized_weight good = l.gate_up.weight;
  float *scale = (float *)(void *)l.gate_up.scales.data;
  REFUSE(element = MOE_ELEMENT_E2M1, INVALID_OPTION, "element");
  REFUSE(block = -1, INVALID_SHAPE, "block");
  REFUSE(repeat = -1, INVALID_SHAPE, "repeat");
  REFUSE(repeat = INT64_MAX / 2, OVERFLOW, "quantized_gate_up_weight->scales");
  REFUSE(scales = (const char *)good.scales - 1, MISALIGNED, "quantized_gate_up_weight->scales");
  scale[1] = float_of(0x7fc00000u);
  REFUSE(element = MOE_ELEMENT_E4M3FN, INVALID_OPTION, "quantized_gate_up_weight->scales");
  scale[1] = float_of(0x7f800000u);
  REFUSE(element = MOE_ELEMENT_E4M3FN, INVALID_OPTION, "quantized_gate_up_weight->scales");
  layer_close(&l);
}

/* ----------------------------------------------------------------------------------------------------- the MX specs */

static void test_specs(void **state) {
  (void)state;
  for (int spec = MOE_CTE_SHARD_ON_BLOCK_MX; spec <= MOE_CTE_SHARD_ON_I_MX_HYBRID; spec++)
    for (int skip_token = 0; skip_token < 2; skip_token++) {
      struct storage s = {.gate_up = {.layout = MOE_MX_LAYOUT_NKI_STRIDED_X4},
                          .down = {.layout = MOE_MX_LAYOUT_NKI_STRIDED_X4}};
      struct problem_options o = shape(60, MOE_DTYPE_BF16, 512, 64);
      o.skip_token = skip_token, o.device_output_shape = o.accumulate_output = o.not_accumulating = o.dropping = 0;
      o.spec = MOE_CTE_SHARD_ON_BLOCK, o.no_conditions = 0;
      problem_options_settle(&o);
      struct layer l;
      moe_context ctx = {.num_threads = 1};
      layer_open(&l, &o, &s, 0);
      run(&l, &ctx, 1, 0);
      const int64_t row = o.H * 2, rows = spec == MOE_CTE_SHARD_ON_BLOCK_MX ? 2 * o.T : o.T + !skip_token;
      unsigned char *output = malloc((size_t)(rows * row)), *zero = calloc((size_t)(rows * row), 1);
      struct problem_args args;
      problem_make_args(&l.p, &args);
      args.forward.spec = (moe_cte_spec)spec, args.forward.device_output_shape = 1, args.forward.output = output;
      give_quantized(&l, &args.forward.layer);
      call(&l, &ctx, PROBLEM_FORWARD, &args);
      assert_memory_equal(output, l.p.tensor[PT_OUTPUT].data, (size_t)(o.T * row));
      assert_memory_equal(output + o.T * row, zero, (size_t)((rows - o.T) * row));
      args.forward.layer.quantized_down_weight = NULL;
      args.forward.layer.down_proj_weight = l.p.tensor[PT_DOWN_WEIGHT].data;
      assert_int_equal(problem_call(PROBLEM_FORWARD, &ctx, &args), MOE_ERROR_INVALID_OPTION);
      assert_non_null(strstr(ctx.message, "spec"));
      if (spec == MOE_CTE_SHARD_ON_I_MX_HYBRID) {
        give_quantized(&l, &args.forward.layer);
        args.forward.layer.conditions = NULL;
        assert_int_equal(problem_call(PROBLEM_FORWARD, &ctx, &args), MOE_ERROR_NULL_ARGUMENT);
      }
      free(output), free(zero);
      layer_close(&l);
    }
}

/* A weight whose scales multiply sums, packed: the scales are wanted beside it. */
static void test_packed_alone(void **state) {
  (void)state;
  struct storage s = {.gate_up = {.scaling = MOE_WEIGHT_COLUMN}, .down = {.scaling = MOE_WEIGHT_STATIC}};
  const struct problem_options o = shape(61, MOE_DTYPE_BF16, 40, 48);
  struct layer l;
  moe_context ctx = {.num_threads = 1};
  layer_open(&l, &o, &s, 0);
  run(&l, &ctx, 1, 1);
  struct problem_args args;
  problem_make_args(&l.p, &args);
  void *gate_up = pack_one(&ctx, &l, &l.gate_up, &args.forward.layer.packed_gate_up_bytes);
  args.forward.layer.packed_gate_up_weight = gate_up;
  refuse(&l, &args, PROBLEM_FORWARD, MOE_ERROR_NULL_ARGUMENT, "down_proj_weight");
  args.forward.layer.quantized_down_weight = &l.down.weight;
  refuse(&l, &args, PROBLEM_FORWARD, MOE_ERROR_INVALID_OPTION, "packed_gate_up_weight");
  moe_pack_weights_args pack_args = {
      .layout = MOE_PACK_GROUPED, .E = 1, .rows = 8, .columns = 8, .quantized = &l.down.weight};
  size_t bytes;
  assert_int_equal(moe_pack_weights_bf16_size(&ctx, &pack_args, &bytes), MOE_ERROR_UNSUPPORTED);
  free(gate_up);
  layer_close(&l);
}

int main(void) {
  static moe_dtype f32 = MOE_DTYPE_F32, bf16 = MOE_DTYPE_BF16, fp16 = MOE_DTYPE_FP16;
#define PER_DTYPE(test)                                                               \
  {#test " f32", test, NULL, NULL, &f32}, {#test " bf16", test, NULL, NULL, &bf16}, { \
#test " fp16", test, NULL, NULL, &fp16                                            \
  }
  const struct CMUnitTest tests[] = {
      PER_DTYPE(test_mx),
      PER_DTYPE(test_row_counts),
      PER_DTYPE(test_float_scales),
      PER_DTYPE(test_scaled_backward),
      cmocka_unit_test(test_scaled_sums),
      cmocka_unit_test(test_tiny_scales),
      cmocka_unit_test(test_pairs),
      cmocka_unit_test(test_bad_mx),
      cmocka_unit_test(test_bad_scales),
      cmocka_unit_test(test_specs),
      cmocka_unit_test(test_packed_alone),
  };
  return cmocka_run_group_tests_name("quantized", tests, NULL, NULL);
}
