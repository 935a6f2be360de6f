/* test_mx_operands: moe_blockwise_layer.mx against the layer written out with operands rounded by the oracle, and against the
   library's own calls on operands that the oracle rounded beforehand; to the bit. */
#include "support/test.h"

#include "support/guard.h"
#include "support/mx_layer_oracle.h"
#include "support/pool.h"

enum { RULES = MOE_SCALE_NEAREST + 1, CASTS = 4, DTYPES = 3, LAYOUTS = MOE_MX_LAYOUT_GGML + 1 };

/* ------------------------------------------------------------------------------------------------------------ cases */

static moe_mx_rounding rounding_number(int64_t n) {
  return (moe_mx_rounding){1, (moe_element)(n % ELEMENTS), (moe_scale_rule)(n / ELEMENTS % RULES),
                           (uint32_t)(n / ELEMENTS / RULES % CASTS)};
}

static moe_mx_rounding random_rounding(uint64_t *rng) {
  return rounding_number(test_random_range(rng, 0, ELEMENTS * RULES * CASTS - 1));
}

static moe_mx_operands all_operands(uint64_t *rng) {
  return (moe_mx_operands){random_rounding(rng), random_rounding(rng), random_rounding(rng), 1, MOE_MX_LAYOUT_PLAIN};
}

/* What the oracle's layer knows, in a shape of the test's own. */
static struct problem_options plain_options(uint64_t seed, moe_dtype dtype, int64_t H, int64_t I) {
  struct problem_options o = problem_options_random(seed, dtype);
  o.H = H, o.I = I;
  o.save_gate_up = 1;
  o.layer.clamp = 0;
  o.capacity = 0;
  o.accumulate = 0;
  o.dropping = o.not_accumulating = o.accumulate_output = o.device_output_shape = o.save_down = o.nan_row = 0;
  o.empty_expert = o.token_mask = 0;
  problem_options_settle(&o);
  return o;
}

static void describe(const struct problem *p, char *text, size_t bytes) {
  const moe_mx_operands *mx = &p->o.mx;
  problem_describe(p, NULL, text, bytes);
  const size_t n = strlen(text);
  const moe_mx_rounding *r[] = {&mx->activations, &mx->weights, &mx->gradients};
  snprintf(text + n, bytes - n, " mx={%d %d %d %u | %d %d %d %u | %d %d %d %u} weight_grads=%d layout=%d skip_gate=%d",
           r[0]->enabled, (int)r[0]->element, (int)r[0]->scale_rule, r[0]->cast, r[1]->enabled, (int)r[1]->element,
           (int)r[1]->scale_rule, r[1]->cast, r[2]->enabled, (int)r[2]->element, (int)r[2]->scale_rule, r[2]->cast,
           mx->weight_grads, (int)mx->activation_layout, p->o.layer.skip_gate);
}

static void call(struct problem *p, enum problem_op op) {
  struct test_pool pool = {.seed = p->o.seed};
  moe_context ctx = {.num_threads = (int32_t)(1 + p->o.seed % 3),
                     .parallel_for = test_serial_parallel_for,
                     .parallel_for_user = &pool};
  char text[700];
  if (problem_run(p, &ctx, op) == MOE_OK) return;
  describe(p, text, sizeof text);
  fail_msg("%s: %s\nrepro: %s", problem_op_name(op), ctx.message, text);
}

static void fail_at(const struct problem *p, int id, int64_t i, const char *what) {
  char text[700];
  describe(p, text, sizeof text);
  fail_msg("%s[%lld] differs from %s\nrepro: %s", p->tensor[id].name, (long long)i, what, text);
}

/* A tensor has the bits of these floats, rounded once. */
static void expect(const struct problem *p, int id, const float *floats) {
  const test_tensor actual = problem_typed(p, id);
  test_tensor want = test_tensor_new(actual.dtype, actual.count);
  for (int64_t i = 0; i < want.count; i++) oracle_put(&want, i, floats[i]);
  const int64_t at = test_tensor_differs(&actual, &want);
  if (at >= 0) {
    print_message("%.9g, not %.9g\n", test_tensor_get(&actual, at), test_tensor_get(&want, at));
    fail_at(p, id, at, "the oracle's");
  }
  test_tensor_free(&want);
}

static void expect_same(const struct problem *p, const struct problem *q, int id, const char *what) {
  const test_tensor a = problem_typed(p, id), b = problem_typed(q, id);
  const int64_t at = test_tensor_differs(&a, &b);
  if (at >= 0) fail_at(p, id, at, what);
}

static void expect_same_outputs(const struct problem *p, const struct problem *q, enum problem_op op, const char *what) {
  for (int id = 0; id < PT_COUNT; id++)
    if (p->tensor[id].writers & (1u << op)) expect_same(p, q, id, what);
}

/* Magnitudes further apart, so that groups differ in scale; `odd`: infinities, NaN and numbers at the end of the range. */
static void spread(struct problem *p, int id, uint64_t *rng, int odd) {
  test_tensor t = problem_typed(p, id);
  for (int64_t i = 0; i < t.count; i++) {
    const double x = test_tensor_get(&t, i);
    if (test_random_chance(rng, 16)) test_tensor_set(&t, i, ldexp(x, (int)test_random_range(rng, -4, 6)));
    if (!odd || !test_random_chance(rng, 400)) continue;
    const double end = test_dtype_max(t.dtype);
    const double values[] = {HUGE_VAL, -HUGE_VAL, (double)NAN, end, -end, 0.97 * end, 0.5 * end};
    test_tensor_set(&t, i, values[test_random_range(rng, 0, 6)]);
  }
}

static void spread_all(struct problem *p, uint64_t *rng, int odd) {
  static const int id[] = {PT_HIDDEN_STATES, PT_GATE_UP_WEIGHT, PT_DOWN_WEIGHT, PT_OUTPUT_GRAD};
  for (size_t i = 0; i < sizeof id / sizeof *id; i++) spread(p, id[i], rng, odd && test_random_chance(rng, 2));
}

static void swap_bytes(void *a, void *b, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) {
    unsigned char *x = (unsigned char *)a + i, *y = (unsigned char *)b + i, kept = *x;
    *x = *y, *y = kept;
  }
}

/* An expert's blocks need not be neighbours, nor in the order of experts. */
static void shuffle_blocks(struct problem *p, uint64_t *rng) {
  static const int id[] = {PT_TOKEN_IDS, PT_BLOCK_EXPERT, PT_CONDITIONS};
  for (int64_t b = p->N - 1; b > 0; b--) {
    const int64_t other = test_random_range(rng, 0, b);
    for (int i = 0; i < 3 && other != b; i++) {
      const size_t bytes = i == 0 ? 4 * (size_t)p->o.B : 4;
      swap_bytes(p->tensor[id[i]].data + (size_t)b * bytes, p->tensor[id[i]].data + (size_t)other * bytes, bytes);
    }
  }
}

static void open_routed(struct problem *p, const struct problem_options *o, uint64_t *rng, int odd) {
  assert_true(problem_open(p, o, NULL, NULL));
  call(p, PROBLEM_ROUTER);
  call(p, PROBLEM_ROUTE_BLOCKS);
  shuffle_blocks(p, rng);
  spread_all(p, rng, odd);
}

/* The same tensors under other options. */
static void open_copy(struct problem *q, const struct problem *p, const moe_mx_operands *mx) {
  struct problem_options o = p->o;
  o.mx = *mx;
  assert_true(problem_open(q, &o, NULL, NULL));
  for (int id = 0; id < PT_COUNT; id++) memcpy(q->tensor[id].data, p->tensor[id].data, problem_tensor_bytes(p, id));
}

static void copy_tensor(struct problem *q, const struct problem *p, int id) {
  memcpy(q->tensor[id].data, p->tensor[id].data, problem_tensor_bytes(p, id));
}

static void close_problem(struct problem *p) { problem_close(p, NULL, NULL); }

/* A tensor [outer,n,inner] rounded along n by the oracle. */
static void round_tensor(struct problem *p, int id, const moe_mx_rounding *r, int64_t outer, int64_t n, int64_t inner,
                         const int64_t *index) {
  test_tensor t = problem_typed(p, id);
  float *x = problem_floats(p, id);
  oracle_round(r, t.dtype, x, outer, n, inner, index);
  for (int64_t i = 0; i < t.count; i++) oracle_put(&t, i, x[i]);
  oracle_release();
}

static void use_isa_number(int64_t n) {
  for (int isa = (int)(n % TEST_ISA_COUNT); isa >= 0; isa--)
    if (test_use_isa(isa)) return;
}

/* ------------------------------------------------------------------------------------------------- the layer by hand */

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
  mx.activations.enabled = which & 1;
  mx.weights.enabled = which >> 1 & 1;
  mx.gradients.enabled = which >> 2 & 1;
  mx.weight_grads = which >> 3 & 1;
  return mx;
}

static void test_by_hand(void **state) {
  static const int64_t hidden[] = {64, 1, 33, 100, 31, 160, 32, 257}, intermediate[] = {5, 33, 40, 100, 130, 300, 32, 64};
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 31 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(128, 12); i++) {
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
    open_routed(&p, &o, &rng, i % 2 == 1);
    check_by_hand(&p);
    close_problem(&p);
  }
  test_use_best_isa();
}

/* Few rows for many experts, and hundreds for one: the products' other paths. */
static void test_long_shapes(void **state) {
  static const int64_t shape[][6] = {/* T, H, I, E, K, B */
                                     {5, 400, 40, 30, 4, 2}, {430, 70, 20, 1, 1, 100}, {26, 600, 70, 4, 2, 8},
                                     {33, 7, 530, 3, 2, 16}, {2100, 9, 34, 2, 1, 700}, {20, 530, 6, 4, 2, 5}};
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 33 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(12, 3); i++) {
    const int64_t *s = shape[i % 6];
    struct problem_options o = plain_options(62000 + (uint64_t)i, dtype, s[1], s[2]);
    o.T = s[0], o.E = s[3], o.K = s[4], o.B = s[5];
    o.mx = all_operands(&rng);
    problem_options_settle(&o);
    struct problem p;
    use_isa_number(i / 6 + i);
    open_routed(&p, &o, &rng, 0);
    check_by_hand(&p);
    close_problem(&p);
  }
  test_use_best_isa();
}

/* Groups of the elements that a weight's groups hold in the device's layouts. */
static void test_layouts(void **state) {
  static const int64_t shape[LAYOUTS][3][2] = {
      {{1, 1}, {70, 33}, {33, 70}},    {{512, 4}, {1024, 36}, {512, 516}}, {{512, 4}, {1024, 36}, {512, 516}},
      {{32, 384}, {384, 64}, {96, 896}}, {{32, 384}, {384, 64}, {96, 896}},  {{32, 64}, {160, 32}, {96, 96}},
      {{32, 64}, {160, 32}, {96, 96}}, {{32, 64}, {160, 32}, {96, 96}}};
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 34 + (uint64_t)dtype;
  for (int64_t i = 0; i < LAYOUTS * 3; i += test_cases(1, 5)) {
    const int64_t *s = shape[i / 3][i % 3];
    struct problem_options o = plain_options(63000 + (uint64_t)i, dtype, s[0], s[1]);
    o.T = 12, o.E = 2;
    o.mx = all_operands(&rng);
    o.mx.activation_layout = (moe_mx_layout)(i / 3);
    problem_options_settle(&o);
    struct problem p;
    use_isa_number(i);
    open_routed(&p, &o, &rng, i % 3 == 1);
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

int main(void) {
  static moe_dtype f32 = MOE_DTYPE_F32, bf16 = MOE_DTYPE_BF16, fp16 = MOE_DTYPE_FP16;
#define EACH_DTYPE(test)                                                                                   \
  {#test " f32", test, NULL, NULL, &f32}, {#test " bf16", test, NULL, NULL, &bf16}, {                      \
    #test " fp16", test, NULL, NULL, &fp16                                                                 \
  }
  const struct CMUnitTest tests[] = {
      EACH_DTYPE(test_by_hand), EACH_DTYPE(test_every_rounding), EACH_DTYPE(test_long_shapes), EACH_DTYPE(test_layouts),
      EACH_DTYPE(test_rows),
  };
  return cmocka_run_group_tests_name("mx operands", tests, NULL, NULL);
}
