/* test_quantized: experts from quantised weights give the same bits, outputs and gradients, as the same experts from
   the plain weights that these stand for, whatever the storage; scales that multiply sums; prepacking. What is refused:
   test_quantized_input. */
#include "support/quantized_layer.h"

#include <math.h>

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

static const int64_t odd[] = {1, 2, 7, 31, 33, 40, 64, 65, 100, 129, 160, 200, 260, 300};

/* Every layout, placement and element; PLAIN in odd shapes. */
static void test_mx(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 40 + (uint64_t)dtype;
  const int64_t rounds = 2, step = test_cases(1, 23);
  for (int64_t i = 0; i < LAYOUTS * PLACEMENTS * (ELEMENTS + 1) * rounds; i += step) {
    struct storage s = {.packed = test_random_chance(&rng, 3), .normal = test_random_chance(&rng, 2)};
    s.sunk = !test_dtype_narrow(dtype) && test_random_chance(&rng, 3);
    s.gate_up.layout = s.down.layout = (moe_mx_layout)(i % LAYOUTS);
    s.gate_up.scales_layout = s.down.scales_layout = (moe_mx_scales)(i / LAYOUTS % PLACEMENTS);
    s.gate_up.element = s.down.element = (moe_element)(i / LAYOUTS / PLACEMENTS % (ELEMENTS + 1)); /* and MXINT8 */
    const moe_mx_layout layout = s.gate_up.layout;
    if (!mx_placeable(layout, s.gate_up.scales_layout)) continue;
    if (test_dtype_narrow(dtype) && s.down.element == MOE_ELEMENT_E5M2FNUZ) continue; /* fp16 does not hold all */
    if (mx_is_of_e2m1(layout) && s.down.element != MOE_ELEMENT_E2M1) continue;
    if (!quantized_storable(&s.down, 1, 32 * 16)) continue;
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
  static const int64_t rows[] = {1, 3, 16, 17, 32, 33, 70}, lengths[] = {64, 96, 128, 256, 40, 300};
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (int64_t n = 0; n < test_cases(84, 14); n++) {
    const int64_t i = n * 5 % 84;
    struct storage s = {.normal = n % 2 == 1, .sunk = !test_dtype_narrow(dtype) && n % 3 != 0};
    s.gate_up.element = s.down.element = i % 2 ? MOE_ELEMENT_E4M3FN : MOE_ELEMENT_E2M1;
    if (i % 3 == 2) s.gate_up.scaling = s.down.scaling = MOE_WEIGHT_STATIC, s.powers = 1;
    if (i % 3 == 2) s.gate_up.element = s.down.element = i % 2 ? MOE_ELEMENT_E4M3FN : MOE_ELEMENT_E4M3;
    struct problem_options o = shape(9800 + (uint64_t)i, dtype, lengths[i / 14], lengths[(i / 7 + 3) % 6]);
    o.E = o.K = 1, o.T = rows[i % 7], o.B = 8;
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
    s.gate_up.element = s.down.element = element_wide(i);
    s.gate_up.out_in = (int)(i / 2 % 2), s.down.out_in = (int)(i % 2);
    s.powers = test_dtype_narrow(dtype) || s.gate_up.scaling != MOE_WEIGHT_BLOCK || s.down.scaling != MOE_WEIGHT_BLOCK;
    struct problem_options o =
        shape(9500 + (uint64_t)i, dtype, odd[test_random_range(&rng, 0, 13)], odd[test_random_range(&rng, 0, 13)]);
    if (s.powers) o.layer.activation = i % 2 ? MOE_ACT_RELU : MOE_ACT_IDENTITY;
    /* fp16 does not hold 4 * 57344 */
    if (test_dtype_narrow(dtype) && elements[s.gate_up.element].largest > 50000) continue;
    check(&o, &s);
  }
}

/* Any element, scale and length of a group; blocks of any shape; slices that begin anywhere. */
static moe_quantized_weight random_blocks(uint64_t *rng, int64_t i, int fp16) {
  static const int64_t lengths[] = {1, 2, 5, 16, 32, 48, 64, 128, 300};
  static const float some;
  moe_quantized_weight w = {.scaling = i % 3 ? MOE_WEIGHT_GROUP : MOE_WEIGHT_BLOCK};
  do w.element = (moe_element)test_random_range(rng, 0, ELEMENTS + INTEGERS - 1);
  while (!quantized_storable(&w, 1, 1) || (fp16 && element_of(w.element)->largest > 50000));
  w.block = lengths[test_random_range(rng, 0, 8)], w.block_columns = lengths[test_random_range(rng, 0, 8)];
  w.first_k = test_random_range(rng, 0, (int)w.block - 1);
  w.out_in = test_random_chance(rng, 2);
  if (w.scaling == MOE_WEIGHT_BLOCK) w.first_column = test_random_range(rng, 0, (int)w.block_columns - 1);
  else w.first_column = -7; /* not read */
  w.scales_type = (moe_scales_type)test_random_range(rng, 0, MOE_SCALES_COUNT_ - 1);
  if (w.scaling == MOE_WEIGHT_GROUP && test_random_chance(rng, 2)) w.global_scale = &some;
  if (w.element == MOE_ELEMENT_UINT4 && test_random_chance(rng, 2)) w.zero_points = (const uint8_t *)&some;
  return w;
}

static void test_blocks(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 70 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(60, 12); i++) {
    struct storage s = {.packed = test_random_chance(&rng, 3), .powers = test_dtype_narrow(dtype)};
    s.gate_up = random_blocks(&rng, i, test_dtype_narrow(dtype));
    s.down = random_blocks(&rng, i / 3, test_dtype_narrow(dtype));
    struct problem_options o =
        shape(9600 + (uint64_t)i, dtype, odd[test_random_range(&rng, 0, 13)], odd[test_random_range(&rng, 0, 13)]);
    if (s.powers) o.layer.activation = i % 2 ? MOE_ACT_RELU : MOE_ACT_IDENTITY;
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
    s.gate_up.element = s.down.element = element_wide(i);
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
    struct storage s = {.powers = test_dtype_narrow(dtype)};
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

static void open_pairs(const struct element *f, int group, int64_t block, struct quantized *q, struct quantized *down) {
  uint64_t rng = 3;
  const int zero = f->id == MOE_ELEMENT_UINT4 ? 8 : 0;
  const int64_t I = 1 << f->bits;
  *q = (struct quantized){.weight = {.element = f->id}, .E = PAIR_EXPERTS, .K = PAIR_H, .parts = 2, .columns = I};
  *down = (struct quantized){.weight = {.element = f->id}, .E = PAIR_EXPERTS, .K = I, .parts = 1, .columns = PAIR_H};
  if (group) q->weight.scaling = down->weight.scaling = MOE_WEIGHT_GROUP, q->weight.block = down->weight.block = block;
  if (group) q->weight.scales_type = down->weight.scales_type = (moe_scales_type)group;
  quantized_make(q, &rng, 0, 0, 0, 1);
  quantized_make(down, &rng, 127, 127, 0, 1);
  guard_free(&q->codes), guard_free(&q->scales);
  for (int64_t i = 0; i < PAIR_EXPERTS * 2 * I * PAIR_H; i++)
    q->table.code[i] = (uint8_t)(i % PAIR_H == 5 ? i / PAIR_H % I : zero);
  for (int64_t i = 0; i < PAIR_EXPERTS * 2 * I; i++) q->table.scale[i] = (uint8_t)(i / (2 * I));
  const int64_t each = 2 * I * (PAIR_H / block); /* scales of an expert */
  for (int64_t i = 0; i < PAIR_EXPERTS * each && group; i++) quantized_set_scale(q, i, (uint32_t)(i / each));
  quantized_store(q, 1);
}

/* What the f32 checkpoint should hold: a sum from +0; bf16 products take bf16, and subnormals as zero. */
static uint32_t pair_wanted(const struct quantized *q, int64_t i, moe_dtype dtype) {
  const int64_t I = q->columns;
  const uint32_t given = bits_of(quantized_value(q, i / (2 * I), 5, i / I % 2, i % I));
  const int round = dtype == MOE_DTYPE_BF16 && (given & 0x7fffffffu) < 0x7f800000u;
  const uint32_t bits = round ? (given + 0x7fffu + (given >> 16 & 1)) & 0xffff0000u : given;
  const uint32_t magnitude = bits & 0x7fffffffu;
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
                                              .quantized_gate_up_proj_weight = &q->weight,
                                              .quantized_down_proj_weight = &down->weight,
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
  for (int i = 0; i < 3 * (ELEMENTS + INTEGERS); i += (int)test_cases(1, 4)) {
    static const int scales[] = {0, MOE_SCALES_E4M3FN, MOE_SCALES_E8M0}; /* 0: MX */
    const moe_quantized_weight w = {.element = (moe_element)(i / 3),
                                    .scaling = i % 3 ? MOE_WEIGHT_GROUP : MOE_WEIGHT_MX};
    struct quantized q, down;
    if (!quantized_storable(&w, 1, PAIR_H)) continue;
    if (i % 3 && i / 3 % 3 && element_of(w.element)->bits == 8 && w.element != MOE_ELEMENT_INT8)
      continue; /* too many */
    open_pairs(element_of(w.element), scales[i % 3], i % 2 ? PAIR_H : 8, &q, &down); /* one run, or a word of them */
    for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
      if (!test_use_quick_isa(isa) || (i % 3 && isa == MOE_ISA_SCALAR)) continue;
      for (int64_t rows = 1; rows <= PAIR_ROWS; rows += PAIR_ROWS - 1) {
        check_pairs(&q, &down, MOE_DTYPE_F32, rows);
        check_pairs(&q, &down, MOE_DTYPE_BF16, rows);
      }
    }
    quantized_free(&q), quantized_free(&down);
  }
  test_use_best_isa();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      EACH_DTYPE(test_mx),
      EACH_DTYPE(test_row_counts),
      EACH_DTYPE(test_float_scales),
      EACH_DTYPE(test_blocks),
      EACH_DTYPE(test_scaled_backward),
      cmocka_unit_test(test_scaled_sums),
      cmocka_unit_test(test_tiny_scales),
      cmocka_unit_test(test_pairs),
  };
  return cmocka_run_group_tests_name("quantized", tests, NULL, NULL);
}
