/* mx_cases.h: problems whose operands are rounded to MX: random ones, how they are called, compared and described. */
#ifndef MOE_TEST_MX_CASES_H
#define MOE_TEST_MX_CASES_H

#include "mx_layer_oracle.h"
#include "pool.h"
#include "test.h"

enum { RULES = MOE_SCALE_COUNT_, CASTS = 4 };

static inline moe_mx_rounding rounding_number(int64_t n) {
  return (moe_mx_rounding){1, (moe_element)(n % ELEMENTS), (moe_scale_rule)(n / ELEMENTS % RULES),
                           (uint32_t)(n / ELEMENTS / RULES % CASTS)};
}

static inline moe_mx_rounding random_rounding(uint64_t *rng) {
  return rounding_number(test_random_range(rng, 0, ELEMENTS * RULES * CASTS - 1));
}

static inline moe_mx_operands all_operands(uint64_t *rng) {
  return (moe_mx_operands){random_rounding(rng), random_rounding(rng), random_rounding(rng), 1, MOE_MX_LAYOUT_PLAIN,
                           NULL, NULL};
}

/* What the oracle's layer knows, in a shape of the test's own. */
static inline struct problem_options plain_options(uint64_t seed, moe_dtype dtype, int64_t H, int64_t I) {
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

static inline void describe(const struct problem *p, char *text, size_t bytes) {
  const moe_mx_operands *mx = &p->o.mx;
  problem_describe(p, NULL, text, bytes);
  const size_t n = strlen(text);
  const moe_mx_rounding *r[] = {&mx->activations, &mx->weights, &mx->gradients};
  snprintf(text + n, bytes - n, " mx={%d %d %d %u | %d %d %d %u | %d %d %d %u} weight_grads=%d layout=%d skip_gate=%d",
           r[0]->enabled, (int)r[0]->element, (int)r[0]->scale_rule, r[0]->cast, r[1]->enabled, (int)r[1]->element,
           (int)r[1]->scale_rule, r[1]->cast, r[2]->enabled, (int)r[2]->element, (int)r[2]->scale_rule, r[2]->cast,
           mx->weight_grads, (int)mx->activation_layout, p->o.layer.skip_gate);
}

static inline void call(struct problem *p, enum problem_op op) {
  struct test_pool pool = {.seed = p->o.seed};
  moe_context ctx = {.num_threads = (int32_t)(1 + p->o.seed % 3),
                     .parallel_for = test_serial_parallel_for,
                     .parallel_for_user = &pool};
  char text[700];
  if (problem_run(p, &ctx, op) == MOE_OK) return;
  describe(p, text, sizeof text);
  fail_msg("%s: %s\nrepro: %s", problem_op_name(op), ctx.message, text);
}

static inline void fail_at(const struct problem *p, int id, int64_t i, const char *what) {
  char text[700];
  describe(p, text, sizeof text);
  fail_msg("%s[%lld] differs from %s\nrepro: %s", p->tensor[id].name, (long long)i, what, text);
}

/* A tensor has the bits of these floats, rounded once. */
static inline void expect(const struct problem *p, int id, const float *floats) {
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

static inline void expect_same(const struct problem *p, const struct problem *q, int id, const char *what) {
  const unsigned char *a = p->tensor[id].data, *b = q->tensor[id].data;
  int64_t at = 0;
  if (memcmp(a, b, problem_tensor_bytes(p, id)) == 0) return;
  while (a[at] == b[at]) at++;
  fail_at(p, id, at / p->tensor[id].element, what);
}

static inline void expect_same_outputs(const struct problem *p, const struct problem *q, enum problem_op op,
                                const char *what) {
  for (int id = 0; id < PT_COUNT; id++)
    if (p->tensor[id].writers & (1u << op)) expect_same(p, q, id, what);
}

/* Magnitudes so far apart that it shows which of them share a scale, some tiny; `odd`: infinities, NaN and numbers at
   the end of the range. */
static inline void spread(struct problem *p, int id, uint64_t *rng, int odd) {
  test_tensor t = problem_typed(p, id);
  const int most = test_dtype_narrow(t.dtype) ? 8 : 12;
  const double end = test_dtype_max(t.dtype), values[] = {HUGE_VAL, -HUGE_VAL, (double)NAN, end, -end, 0.97 * end};
  for (int64_t i = 0; i < t.count; i++)
    if (test_random_chance(rng, 40))
      test_tensor_set(&t, i, ldexp(test_tensor_get(&t, i), (int)test_random_range(rng, -6, most)));
  const int64_t tiny = test_random_chance(rng, 5) && !test_dtype_narrow(t.dtype) ? t.count / 3 : 0;
  for (int64_t i = 0; i < tiny; i++) test_tensor_set(&t, i + tiny, ldexp(test_tensor_get(&t, i + tiny), -118));
  for (int i = 0; i < 4 && odd; i++) /* few: one in a weight spoils all rows of its expert */
    test_tensor_set(&t, test_random_range(rng, 0, t.count - 1), values[test_random_range(rng, 0, 5)]);
}

static inline void spread_all(struct problem *p, uint64_t *rng, int odd) {
  static const int id[] = {PT_HIDDEN_STATES, PT_GATE_UP_WEIGHT, PT_DOWN_WEIGHT, PT_OUTPUT_GRAD};
  for (size_t i = 0; i < sizeof id / sizeof *id; i++) spread(p, id[i], rng, odd && test_random_chance(rng, 2));
}

static inline void swap_bytes(void *a, void *b, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) {
    unsigned char *x = (unsigned char *)a + i, *y = (unsigned char *)b + i, kept = *x;
    *x = *y, *y = kept;
  }
}

/* An expert's blocks need not be neighbours, nor in the order of experts. */
static inline void shuffle_blocks(struct problem *p, uint64_t *rng) {
  static const int id[] = {PT_TOKEN_IDS, PT_BLOCK_EXPERT, PT_CONDITIONS};
  for (int64_t b = p->N - 1; b > 0 && !p->o.dropping; b--) {
    const int64_t other = test_random_range(rng, 0, b);
    for (int i = 0; i < 3 && other != b; i++) {
      const size_t bytes = i == 0 ? 4 * (size_t)p->o.B : 4;
      swap_bytes(p->tensor[id[i]].data + (size_t)b * bytes, p->tensor[id[i]].data + (size_t)other * bytes, bytes);
    }
  }
}

static inline void open_routed(struct problem *p, const struct problem_options *o, uint64_t *rng, int odd) {
  assert_true(problem_open(p, o, NULL, NULL));
  call(p, PROBLEM_ROUTER);
  call(p, PROBLEM_ROUTE_BLOCKS);
  shuffle_blocks(p, rng);
  spread_all(p, rng, odd);
}

/* The same tensors under other options. */
static inline void open_copy(struct problem *q, const struct problem *p, const moe_mx_operands *mx) {
  struct problem_options o = p->o;
  o.mx = *mx;
  assert_true(problem_open(q, &o, NULL, NULL));
  for (int id = 0; id < PT_COUNT; id++) memcpy(q->tensor[id].data, p->tensor[id].data, problem_tensor_bytes(p, id));
}

static inline void copy_tensor(struct problem *q, const struct problem *p, int id) {
  memcpy(q->tensor[id].data, p->tensor[id].data, problem_tensor_bytes(p, id));
}

static inline void close_problem(struct problem *p) { problem_close(p, NULL, NULL); }

/* A tensor [outer,n,inner] rounded along n by the oracle. */
static inline void round_tensor(struct problem *p, int id, const moe_mx_rounding *r, int64_t outer, int64_t n,
                                int64_t inner, const int64_t *index) {
  test_tensor t = problem_typed(p, id);
  float *x = problem_floats(p, id);
  oracle_round(r, t.dtype, x, outer, n, inner, index);
  for (int64_t i = 0; i < t.count; i++) oracle_put(&t, i, x[i]);
  oracle_release();
}

static inline void use_isa_number(int64_t n) {
  for (int isa = (int)(n % TEST_ISA_COUNT); isa >= 0; isa--)
    if (test_use_isa(isa)) return;
}

#endif /* MOE_TEST_MX_CASES_H */
