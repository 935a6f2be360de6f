/* test_mx_operands: moe_blockwise_layer.mx against the layer written out with operands rounded by the oracle, the same
   everywhere, in the workspace that it asks for; to the bit. */
#include "support/test.h"

#include "support/guard.h"
#include "support/mx_cases.h"

enum { LAYOUTS = MOE_MX_LAYOUT_COUNT_ };

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
    o.mx = (moe_mx_operands){.activations = rounding_number(i), .weights = rounding_number(i),
                             .gradients = rounding_number(i), .weight_grads = 1};
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

/* Every expert's x, m or both rounded under the expert's own scale, from a hundredth of what fits to a hundred times.
   Without a checkpoint the backward computes g and u again, to the same bits. */
static void test_static_scales(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 36 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(60, 8); i++) {
    struct problem_options o = plain_options(65000 + (uint64_t)i, dtype, 20 + i, 90 - i);
    float scale[2][8];
    o.E = 4;
    problem_options_settle(&o);
    for (int e = 0; e < 16; e++)
      scale[e / 8][e % 8] = (float)ldexp(1 + test_unit(&rng), (int)test_random_range(&rng, -14, -2));
    o.mx = operands(&rng, 1 | (i / 3 % 8) << 1);
    o.mx.activations.element = element_wide(i);
    if (i % 3 != 1) o.mx.gate_up_in_scale = scale[0];
    if (i % 3 != 2) o.mx.down_in_scale = scale[1];
    if (i % 20 == 19) o.H = 512, o.I = 36, o.mx.activation_layout = MOE_MX_LAYOUT_NKI_STRIDED_X4;
    struct problem p, q;
    use_isa_number(i);
    open_routed(&p, &o, &rng, i % 5 == 1);
    check_by_hand(&p);
    open_copy(&q, &p, &o.mx);
    q.o.save_gate_up = 0;
    problem_options_settle(&q.o);
    call(&q, PROBLEM_BACKWARD);
    expect_same_outputs(&q, &p, PROBLEM_BACKWARD, "that with a checkpoint");
    close_problem(&p), close_problem(&q);
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
      EACH_DTYPE(test_static_scales),
      EACH_DTYPE(test_rows), EACH_DTYPE(test_bits), EACH_DTYPE(test_nan_stays), EACH_DTYPE(test_workspace),
  };
  return cmocka_run_group_tests_name("mx operands", tests, NULL, NULL);
}
