/* test_mx_operands: moe_blockwise_layer.mx against the layer written out with operands rounded by the oracle, and
   against the library's own calls on operands that the oracle rounded beforehand; to the bit. */
#include "support/test.h"

#include "support/guard.h"
#include "support/mx_cases.h"
#include "support/pack.h"

enum { DTYPES = 3, LAYOUTS = MOE_MX_LAYOUT_GGML + 1 };

/* ------------------------------------------------------------------------------------------------ the layer by hand */

static void check_by_hand(struct problem *p) {
  const struct oracle_layer l = oracle_layer_of(p);
  call(p, PROBLEM_FORWARD);
  const struct oracle_forward forward = oracle_forward_of(&l);
  expect(p, PT_GATE_UP_CHECKPOINT, forward.gate_up);
  expect(p, PT_OUTPUT, forward.output);
  call(p, PROBLEM_BACKWARD);
  const struct oracle_backward backward = oracle_backward_of(&l);
  expect(p, PT_HIDDEN_GRAD, backward.hidden);
  expect(p, PT_GATE_UP_BIAS_GRAD, backward.gate_up_bias);
  expect(p, PT_GATE_UP_WEIGHT_GRAD, backward.gate_up);
  expect(p, PT_DOWN_WEIGHT_GRAD, backward.down);
  oracle_release();
}

/* Which operands: bit 0 activations, 1 weights, 2 gradients, 3 weight_grads. */
static moe_mx_operands operands(uint64_t *rng, int64_t which) {
  moe_mx_operands mx = all_operands(rng);
  mx.activations.enabled = (which & 1) != 0;
  mx.weights.enabled = (which & 2) != 0;
  mx.gradients.enabled = (which & 4) != 0;
  mx.weight_grads = (which & 8) != 0;
  return mx;
}

static void test_by_hand(void **state) {
  static const int64_t hidden[] = {64, 1, 33, 100, 31, 160, 32, 257};
  static const int64_t intermediate[] = {5, 33, 40, 100, 130, 300, 32, 64};
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 31 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(60, 8); i++) {
    struct problem_options o =
        plain_options(60000 + (uint64_t)i, dtype, hidden[test_random_range(&rng, 0, 7)], intermediate[i % 8]);
    o.mx = operands(&rng, i % 3 == 0 ? 15 : i / 3 % 16);
    struct problem p;
    use_isa_number(i);
    open_routed(&p, &o, &rng, i % 5 == 1);
    check_by_hand(&p);
    close_problem(&p);
  }
  test_use_best_isa();
}

/* Every element under every rule and cast. */
static void test_every_rounding(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 32 + (uint64_t)dtype;
  for (int64_t i = 0; i < ELEMENTS * RULES * CASTS; i += test_cases(1, 13)) {
    struct problem_options o = plain_options(61000 + (uint64_t)i, dtype, 40, 37);
    o.T = 20;
    o.mx = (moe_mx_operands){rounding_number(i), rounding_number(i), rounding_number(i), 1, MOE_MX_LAYOUT_PLAIN};
    struct problem p;
    use_isa_number(i);
    open_routed(&p, &o, &rng, test_random_chance(&rng, 4));
    check_by_hand(&p);
    close_problem(&p);
  }
  test_use_best_isa();
}

/* Few rows for many experts, and hundreds for one: the products' other paths. */
static void test_long_shapes(void **state) {
  static const int64_t shape[][6] = {/* T, H, I, E, K, B */
                                     {5, 330, 40, 12, 4, 2}, {430, 70, 20, 1, 1, 100}, {26, 600, 70, 3, 2, 8},
                                     {33, 7, 530, 3, 2, 16}, {2100, 9, 34, 2, 1, 700}, {20, 530, 6, 4, 2, 5}};
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 33 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(6, 1); i++) {
    const int64_t *s = shape[i];
    struct problem_options o = plain_options(62000 + (uint64_t)i, dtype, s[1], s[2]);
    o.T = s[0], o.E = s[3], o.K = s[4], o.B = s[5];
    o.mx = all_operands(&rng);
    problem_options_settle(&o);
    struct problem p;
    use_isa_number(i + (int64_t)dtype);
    open_routed(&p, &o, &rng, 0);
    check_by_hand(&p);
    close_problem(&p);
  }
  test_use_best_isa();
}

/* Groups of the elements that a weight's groups hold in the device's layouts. */
static void test_layouts(void **state) {
  static const int64_t shape[LAYOUTS][3][2] = {
      {{1, 1}, {70, 33}, {33, 70}},    {{512, 4}, {1024, 36}, {512, 516}}, {{512, 4}, {512, 36}, {1024, 12}},
      {{32, 384}, {384, 64}, {96, 896}}, {{32, 384}, {384, 64}, {96, 896}},  {{32, 64}, {160, 32}, {96, 96}},
      {{32, 64}, {160, 32}, {96, 96}}, {{32, 64}, {160, 32}, {96, 96}}};
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 34 + (uint64_t)dtype;
  for (int64_t i = 0; i < LAYOUTS * 3; i += test_cases(1, 4)) {
    const int64_t *s = shape[i / 3][i % 3];
    struct problem_options o = plain_options(63000 + (uint64_t)i, dtype, s[0], s[1]);
    o.T = 12, o.E = s[0] > 500 ? 1 : 2;
    o.mx = all_operands(&rng);
    o.mx.activation_layout = (moe_mx_layout)(i / 3);
    problem_options_settle(&o);
    struct problem p;
    use_isa_number(i);
    open_routed(&p, &o, &rng, 0);
    check_by_hand(&p);
    close_problem(&p);
  }
  test_use_best_isa();
}

/* Experts with these many rows each, an expert's in several blocks. */
static void test_rows(void **state) {
  static const int64_t rows[] = {33, 0, 100, 1, 31, 32};
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 35 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(12, 2); i++) {
    struct problem_options o = plain_options(64000 + (uint64_t)i, dtype, 20 + i * 11, 70 - i * 5);
    o.T = 197, o.E = 6, o.K = 1, o.B = 7 + 3 * i, o.router.num_groups = 0;
    o.mx = operands(&rng, 12 + i % 4);
    problem_options_settle(&o);
    struct problem p;
    use_isa_number(i);
    assert_true(problem_open(&p, &o, NULL, NULL));
    int32_t *index = (int32_t *)(void *)p.tensor[PT_EXPERT_INDEX].data;
    for (int64_t e = 0, t = 0; e < 6; e++)
      for (int64_t r = 0; r < rows[e]; r++, t++) index[t * 37 % 197] = (int32_t)e;
    call(&p, PROBLEM_ROUTE_BLOCKS);
    shuffle_blocks(&p, &rng);
    spread_all(&p, &rng, i % 3 == 2);
    check_by_hand(&p);
    close_problem(&p);
  }
  test_use_best_isa();
}

/* ----------------------------------------------------------------------- the library on operands rounded beforehand */

static const moe_mx_operands no_operands;

/* Everything that problem_options_random turns on, in shapes with groups of all lengths. */
static struct problem_options any_options(uint64_t seed, moe_dtype dtype, uint64_t *rng) {
  static const int64_t hidden[] = {1, 31, 32, 33, 64, 95, 130, 256};
  static const int64_t intermediate[] = {5, 33, 40, 100, 130, 300, 32, 63};
  struct problem_options o = problem_options_random(seed, dtype);
  o.H = hidden[test_random_range(rng, 0, 7)], o.I = intermediate[test_random_range(rng, 0, 7)];
  problem_options_settle(&o);
  return o;
}

static void round_weights(struct problem *q, const moe_mx_rounding *r, int backward) {
  const struct problem_options *o = &q->o;
  if (backward) {
    round_tensor(q, PT_GATE_UP_WEIGHT, r, o->E * o->H * 2, o->I, 1, NULL);
    round_tensor(q, PT_DOWN_WEIGHT, r, o->E * o->I, o->H, 1, NULL);
  } else {
    round_tensor(q, PT_GATE_UP_WEIGHT, r, o->E, o->H, 2 * o->I, NULL);
    round_tensor(q, PT_DOWN_WEIGHT, r, o->E, o->I, o->H, NULL);
  }
}

static void test_weights_beforehand(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 41 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(30, 4); i++) {
    struct problem_options o = any_options(70000 + (uint64_t)i, dtype, &rng);
    o.save_gate_up = 1;
    o.mx.weights = random_rounding(&rng);
    struct problem p, q;
    use_isa_number(i);
    open_routed(&p, &o, &rng, i % 4 == 0);
    open_copy(&q, &p, &no_operands);
    round_weights(&q, &o.mx.weights, 0);
    call(&p, PROBLEM_FORWARD), call(&q, PROBLEM_FORWARD);
    expect_same_outputs(&p, &q, PROBLEM_FORWARD, "that of weights rounded beforehand");
    copy_tensor(&q, &p, PT_GATE_UP_WEIGHT), copy_tensor(&q, &p, PT_DOWN_WEIGHT);
    round_weights(&q, &o.mx.weights, 1);
    call(&p, PROBLEM_BACKWARD), call(&q, PROBLEM_BACKWARD);
    expect_same_outputs(&p, &q, PROBLEM_BACKWARD, "that of weights rounded beforehand");
    close_problem(&p), close_problem(&q);
  }
  test_use_best_isa();
}

static void test_hidden_states_beforehand(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 42 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(20, 3); i++) {
    struct problem_options o = any_options(71000 + (uint64_t)i, dtype, &rng);
    o.save_gate_up = 1;
    o.mx.activations = random_rounding(&rng);
    struct problem p, q;
    use_isa_number(i);
    open_routed(&p, &o, &rng, i % 4 == 0);
    open_copy(&q, &p, &no_operands);
    round_tensor(&q, PT_HIDDEN_STATES, &o.mx.activations, o.T, o.H, 1, NULL);
    call(&p, PROBLEM_FORWARD), call(&q, PROBLEM_FORWARD);
    expect_same(&p, &q, PT_GATE_UP_CHECKPOINT, "that of hidden states rounded beforehand");
    close_problem(&p), close_problem(&q);
  }
  test_use_best_isa();
}

/* Without weight_grads, dY is rounded on its way to dm0 only, and dg, du on theirs to dX. */
static void test_gradients_apart(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 43 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(30, 5); i++) {
    struct problem_options o = any_options(72000 + (uint64_t)i, dtype, &rng);
    const moe_affinity_mode mode = o.layer.affinity_mode;
    const int pre = mode == MOE_AFFINITY_PRE_SCALE || mode == MOE_AFFINITY_PRE_SCALE_DELAYED;
    o.mx.gradients = random_rounding(&rng);
    struct problem p, plain, rounded;
    use_isa_number(i);
    open_routed(&p, &o, &rng, i % 4 == 0);
    call(&p, PROBLEM_FORWARD);
    open_copy(&plain, &p, &no_operands), open_copy(&rounded, &p, &no_operands);
    round_tensor(&rounded, PT_OUTPUT_GRAD, &o.mx.gradients, o.T, o.H, 1, NULL);
    call(&p, PROBLEM_BACKWARD), call(&plain, PROBLEM_BACKWARD), call(&rounded, PROBLEM_BACKWARD);
    expect_same(&p, &plain, PT_DOWN_WEIGHT_GRAD, "that of plain operands");
    expect_same(&p, &plain, PT_DOWN_BIAS_GRAD, "that of plain operands");
    expect_same(&p, &rounded, PT_GATE_UP_WEIGHT_GRAD, "that of a rounded output gradient");
    expect_same(&p, &rounded, PT_GATE_UP_BIAS_GRAD, "that of a rounded output gradient");
    if (o.save_down && o.affinity_option == MOE_AFFINITY_OPTION_ON_H)
      expect_same(&p, &plain, PT_AFFINITIES_GRAD, "that of plain operands");
    else if (!pre && !o.expert_bias)
      expect_same(&p, &rounded, PT_AFFINITIES_GRAD, "that of a rounded output gradient");
    close_problem(&p), close_problem(&plain), close_problem(&rounded);
  }
  test_use_best_isa();
}

/* Activations have no part in a backward that has its checkpoint, and weight_grads alone rounds nothing. */
static void test_nothing_to_round(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 44 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(12, 2); i++) {
    struct problem_options o = any_options(73000 + (uint64_t)i, dtype, &rng);
    moe_mx_operands mx = {0};
    struct problem p, q;
    o.save_gate_up = 1;
    open_routed(&p, &o, &rng, 0);
    call(&p, PROBLEM_FORWARD);
    if (i % 2) mx.weight_grads = 1;
    else mx.activations = random_rounding(&rng);
    mx.gradients = (moe_mx_rounding){0, (moe_element)-1, (moe_scale_rule)77, 99}; /* off */
    open_copy(&q, &p, &mx);
    call(&p, PROBLEM_BACKWARD), call(&q, PROBLEM_BACKWARD);
    expect_same_outputs(&q, &p, PROBLEM_BACKWARD, "that of plain operands");
    close_problem(&p), close_problem(&q);
  }
}

static void test_recomputed(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 45 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(40, 5); i++) {
    struct problem_options o = any_options(74000 + (uint64_t)i, dtype, &rng);
    o.mx = all_operands(&rng);
    o.save_gate_up = 1;
    if (i % 4 == 0) o.H = 512, o.I = 36, o.mx.activation_layout = MOE_MX_LAYOUT_NKI_STRIDED_X4;
    struct problem p, q;
    use_isa_number(i);
    open_routed(&p, &o, &rng, i % 4 == 1);
    call(&p, PROBLEM_FORWARD);
    open_copy(&q, &p, &o.mx);
    q.o.save_gate_up = 0;
    call(&p, PROBLEM_BACKWARD), call(&q, PROBLEM_BACKWARD);
    expect_same_outputs(&q, &p, PROBLEM_BACKWARD, "that with its checkpoint");
    close_problem(&p), close_problem(&q);
  }
  test_use_best_isa();
}

/* ------------------------------------------------------------------------------------------------ quantised weights */

struct quantized_layer {
  moe_quantized_weight gate_up, down;
  void *packed[2];
  size_t packed_bytes[2];
};

/* [rows,columns] of every expert, in groups down its columns. */
static moe_quantized_weight quantize(const struct problem *p, int id, const moe_mx_rounding *r, int64_t rows,
                                     int64_t columns) {
  const test_tensor t = problem_typed(p, id);
  const int64_t line = elements[r->element].bits == 4 ? (rows + 1) / 2 : rows, groups = (rows + 31) / 32;
  uint8_t *codes = malloc((size_t)(p->o.E * columns * line)), *scales = malloc((size_t)(p->o.E * columns * groups));
  for (int64_t e = 0; e < p->o.E; e++) {
    const moe_quantize_mx_args args = {
        .element = r->element, .scale_rule = r->scale_rule, .cast = r->cast, .dtype = t.dtype,
        .rows = rows, .columns = columns, .transposed = 1, .codes = codes + e * columns * line,
        .scales = scales + e * columns * groups,
        .plain = (const char *)t.data + (size_t)(e * rows * columns) * moe_dtype_size(t.dtype)};
    assert_int_equal(moe_quantize_mx(NULL, &args), MOE_OK);
  }
  return (moe_quantized_weight){.element = r->element, .codes = codes, .scales = scales};
}

static void pack(const struct problem *p, struct quantized_layer *w, int down) {
  moe_pack_weights_args args = {.layout = down ? MOE_PACK_DOWN : p->o.layer.skip_gate ? MOE_PACK_UP : MOE_PACK_GATE_UP,
                                .E = p->o.E, .rows = down ? p->o.I : p->o.H, .columns = down ? p->o.H : p->o.I,
                                .quantized = down ? &w->down : &w->gate_up};
  assert_int_equal(test_pack_new(NULL, p->o.dtype, &args), MOE_OK);
  w->packed[down] = args.packed;
  w->packed_bytes[down] = args.packed_bytes;
}

static void free_quantized(struct quantized_layer *w) {
  free((void *)(uintptr_t)w->gate_up.codes), free((void *)(uintptr_t)w->gate_up.scales);
  free((void *)(uintptr_t)w->down.codes), free((void *)(uintptr_t)w->down.scales);
  free(w->packed[0]), free(w->packed[1]);
}

static void quantize_layer(moe_blockwise_layer *l, const struct quantized_layer *w) {
  l->gate_up_proj_weight = l->down_proj_weight = NULL;
  l->quantized_gate_up_weight = &w->gate_up, l->quantized_down_weight = &w->down;
  l->packed_gate_up_weight = w->packed[0], l->packed_down_weight = w->packed[1];
  l->packed_gate_up_bytes = w->packed_bytes[0], l->packed_down_bytes = w->packed_bytes[1];
}

static void call_quantized(struct problem *p, enum problem_op op, const struct quantized_layer *w) {
  moe_context ctx = {.allocate = oracle_allocate, .release = oracle_free};
  struct problem_args args;
  problem_make_args(p, &args);
  quantize_layer(&args.forward.layer, w);
  quantize_layer(&args.backward.layer, w);
  if (problem_call(op, &ctx, &args) != MOE_OK) fail_msg("%s: %s", problem_op_name(op), ctx.message);
}

/* A quantised weight is the plain one rounded once; mx.weights rounds it again in the backward only. */
static void test_quantized(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 46 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(24, 4); i++) {
    struct problem_options o = any_options(75000 + (uint64_t)i, dtype, &rng);
    const moe_mx_rounding stored = random_rounding(&rng);
    struct quantized_layer w = {0};
    struct problem p, q;
    o.mx.weights = random_rounding(&rng);
    o.save_gate_up = 1;
    use_isa_number(i);
    open_routed(&p, &o, &rng, 0);
    w.gate_up = quantize(&p, PT_GATE_UP_WEIGHT, &stored, o.H, 2 * o.I);
    w.down = quantize(&p, PT_DOWN_WEIGHT, &stored, o.I, o.H);
    if (i % 2) pack(&p, &w, 0), pack(&p, &w, 1);
    open_copy(&q, &p, &no_operands);
    round_weights(&q, &stored, 0);
    call_quantized(&p, PROBLEM_FORWARD, &w), call(&q, PROBLEM_FORWARD);
    expect_same_outputs(&p, &q, PROBLEM_FORWARD, "that of the weight it stands for");
    if (i % 3 == 0) p.o.save_gate_up = 0; /* recomputed: as the forward */
    round_weights(&q, &o.mx.weights, 1);
    call_quantized(&p, PROBLEM_BACKWARD, &w), call(&q, PROBLEM_BACKWARD);
    expect_same_outputs(&p, &q, PROBLEM_BACKWARD, "that of the weight it stands for, rounded across");
    free_quantized(&w);
    close_problem(&p), close_problem(&q);
  }
  test_use_best_isa();
}

/* ----------------------------------------------------------------------------------------- the same bits everywhere */

static void run_step(struct problem *p, int32_t threads, moe_schedule schedule) {
  struct test_pool pool = {.seed = p->o.seed + (uint64_t)threads};
  moe_context ctx = {.num_threads = threads,
                     .schedule = schedule,
                     .parallel_for = test_pool_parallel_for,
                     .parallel_for_user = &pool};
  enum problem_op op;
  char text[700];
  if (problem_run_all(p, &ctx, &op) == MOE_OK) return;
  describe(p, text, sizeof text);
  fail_msg("%s: %s\nrepro: %s", problem_op_name(op), ctx.message, text);
}

static struct problem_options step_options(int64_t i, moe_dtype dtype, uint64_t *rng) {
  const uint64_t seed = 76000 + (uint64_t)i;
  struct problem_options o = i % 5 == 4 ? problem_options_long(seed, dtype, (int)(i / 5 % PROBLEM_LONG_SHAPES))
                                        : problem_options_random(seed, dtype);
  o.mx = operands(rng, i % 2 ? 15 : test_random_range(rng, 0, 15));
  if (i % 10 == 0) o.H = 512, o.I = 36, o.mx.activation_layout = MOE_MX_LAYOUT_NKI_STRIDED_X4;
  if (i % 10 == 3) o.H = 96, o.I = 64, o.mx.activation_layout = MOE_MX_LAYOUT_NKI_WRAPX;
  return o;
}

static void test_bits(void **state) {
  static const int32_t threads[] = {1, 2, 3, 7};
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 47 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(25, 4); i++) {
    const struct problem_options o = step_options(i, dtype, &rng);
    struct problem p, q;
    assert_true(problem_open(&p, &o, NULL, NULL) && problem_open(&q, &o, NULL, NULL));
    assert_true(test_use_isa(MOE_ISA_SCALAR));
    run_step(&p, 1, MOE_SCHEDULE_PING_PONG);
    for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
      const int64_t n = i + isa;
      if (!test_use_isa(isa)) continue;
      run_step(&q, threads[n % 4], (moe_schedule)(n % 3));
      for (int id = 0; id < PT_COUNT; id++) expect_same(&q, &p, id, "scalar's on one thread");
    }
    close_problem(&p), close_problem(&q);
  }
  test_use_best_isa();
}

/* NaN and infinity in one token: no other's output changes. */
static void test_nan_stays(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 48 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(16, 4); i++) {
    struct problem_options o = plain_options(77000 + (uint64_t)i, dtype, 70, 40);
    o.T = 30;
    o.mx = all_operands(&rng);
    struct problem p, q;
    use_isa_number(i);
    open_routed(&p, &o, &rng, 0);
    open_copy(&q, &p, &o.mx);
    test_tensor x = problem_typed(&q, PT_HIDDEN_STATES), y = problem_typed(&q, PT_OUTPUT);
    test_tensor_set(&x, 11 * o.H + 3, (double)NAN), test_tensor_set(&x, 11 * o.H + 50, HUGE_VAL);
    call(&p, PROBLEM_FORWARD), call(&q, PROBLEM_FORWARD);
    assert_true(isnan(test_tensor_get(&y, 11 * o.H)));
    const size_t row = problem_tensor_bytes(&q, PT_OUTPUT) / (size_t)problem_output_rows(&o);
    memcpy(q.tensor[PT_OUTPUT].data + 11 * row, p.tensor[PT_OUTPUT].data + 11 * row, row);
    expect_same(&q, &p, PT_OUTPUT, "that without a NaN in token 11");
    close_problem(&p), close_problem(&q);
  }
  test_use_best_isa();
}

/* ----------------------------------------------------------------------------------------------------------- memory */

/* Exactly workspace_size bytes against an inaccessible page, full of NaN. */
static void test_workspace(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 49 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(40, 4); i++) {
    struct problem_options o = step_options(i, dtype, &rng);
    struct problem p, q;
    if (i % 5 != 4) o.mx = all_operands(&rng);
    use_isa_number(i);
    open_routed(&p, &o, &rng, 0);
    open_copy(&q, &p, &o.mx);
    for (int op = PROBLEM_FORWARD; op <= PROBLEM_BACKWARD; op++) {
      moe_context ctx = {.num_threads = (int32_t)(1 + i % 3)};
      struct problem_args args;
      size_t bytes = 0;
      problem_make_args(&q, &args);
      assert_int_equal(problem_workspace_size((enum problem_op)op, &ctx, &args, &bytes), MOE_OK);
      struct guarded g = guard_alloc(bytes, i % 2 ? GUARD_AFTER : GUARD_BEFORE);
      assert_non_null(g.data);
      memset(g.data, 0xff, bytes);
      problem_set_workspace((enum problem_op)op, &args, g.data, bytes - 1);
      assert_int_equal(problem_call((enum problem_op)op, &ctx, &args), MOE_ERROR_WORKSPACE);
      problem_set_workspace((enum problem_op)op, &args, g.data, bytes);
      assert_int_equal(problem_call((enum problem_op)op, &ctx, &args), MOE_OK);
      guard_free(&g);
      call(&p, (enum problem_op)op);
    }
    for (int id = 0; id < PT_COUNT; id++) expect_same(&q, &p, id, "that in other memory");
    close_problem(&p), close_problem(&q);
  }
  test_use_best_isa();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      EACH_DTYPE(test_by_hand), EACH_DTYPE(test_every_rounding), EACH_DTYPE(test_long_shapes), EACH_DTYPE(test_layouts),
      EACH_DTYPE(test_rows), EACH_DTYPE(test_weights_beforehand), EACH_DTYPE(test_hidden_states_beforehand),
      EACH_DTYPE(test_gradients_apart), EACH_DTYPE(test_nothing_to_round), EACH_DTYPE(test_recomputed),
      EACH_DTYPE(test_quantized), EACH_DTYPE(test_bits), EACH_DTYPE(test_nan_stays), EACH_DTYPE(test_workspace),
  };
  return cmocka_run_group_tests_name("mx operands", tests, NULL, NULL);
}
