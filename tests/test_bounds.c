/* Random fills: every element of every output of the layer lies within the bound that the numeric contract in moe.h
   gives it, computed beside its value in double (reference/bounded.h). The largest error/bound of each output is
   printed, so that a bound too wide to ever fail shows. */
#include "reference/bounded_layer.h"
#include "support/arena.h"
#include "support/cases.h"
#include "support/pool.h"
#include "support/test.h"

enum { OUTPUT = TEST_GRADIENTS, GATE_UP, DOWN, TENSORS };
static const char *const forward_name[] = {"output", "gate_up_activations_T", "down_activations"};

/* The largest error/bound by the function's dtype, the tensor, and whether the tensor is narrower than float: the half
   unit of a narrow store hides all else. */
static double worst[1 + TEST_DTYPES][TENSORS][2];

/* A case, what its inputs hold, and the bounded results. */
typedef struct fixture {
  test_case c;
  bounded_layer layer;
  test_arena arena;
  double *dy;
  bounded_rows rows;
  bounded *y;
  rows_f64 stored;
  bounded_grads grad;
  bounded_unit *unit;
  moe_isa isa;
  int32_t threads;
} fixture;

/* ---------------------------------------------------------------------------------------------------------- fixture */

static void fixture_layout(fixture *x) {
  const moe_blockwise_layer *l = &x->c.layer;
  test_arena *at = &x->arena;
  int64_t tokens = l->T * l->H, wgu = l->E * l->H * 2 * l->I, wd = l->E * l->I * l->H, bgu = l->E * 2 * l->I,
          bd = l->E * l->H;
  int64_t rows = l->N * l->B;
  x->layer.in.x = test_carve(at, tokens, sizeof(double)),
  x->layer.in.affinity = test_carve(at, l->T * l->E, sizeof(double));
  x->layer.in.wgu = test_carve(at, wgu, sizeof(double)), x->layer.in.wd = test_carve(at, wd, sizeof(double));
  x->layer.in.bgu = test_carve(at, bgu, sizeof(double)), x->layer.in.bd = test_carve(at, bd, sizeof(double));
  x->dy = test_carve(at, tokens, sizeof(double)), x->y = test_carve(at, tokens, sizeof(bounded));
  x->rows.g = test_carve(at, rows * l->I, sizeof(bounded)), x->rows.u = test_carve(at, rows * l->I, sizeof(bounded));
  x->rows.m = test_carve(at, rows * l->I, sizeof(bounded)), x->rows.d = test_carve(at, rows * l->H, sizeof(bounded));
  x->stored.g = test_carve(at, rows * l->I, sizeof(double)), x->stored.u = test_carve(at, rows * l->I, sizeof(double));
  x->stored.m = x->stored.g; /* not read */
  x->stored.d = test_carve(at, rows * l->H, sizeof(double));
  x->grad.x = test_carve(at, tokens, sizeof(bounded)), x->grad.affinity = test_carve(at, l->T * l->E, sizeof(bounded));
  x->grad.wgu = test_carve(at, wgu, sizeof(bounded_sum)), x->grad.wd = test_carve(at, wd, sizeof(bounded_sum));
  x->grad.bgu = test_carve(at, bgu, sizeof(bounded_sum)), x->grad.bd = test_carve(at, bd, sizeof(bounded_sum));
  x->unit = test_carve(at, l->I, sizeof(bounded_unit));
}

static void load(double *to, const test_tensor *from) {
  for (int64_t i = 0; i < from->count; ++i) to[i] = test_tensor_get(from, i);
}

/* Values of about 1 after each product; with `tiny`, products around the subnormal range. */
static void fixture_fill(fixture *x) {
  test_case *c = &x->c;
  const moe_blockwise_layer *l = &c->layer;
  double tiny = !test_dtype_narrow(c->dtype) && test_with(&c->rng, 0.1) ? 0x1p-64 : 1;
  test_fill_uniform(&c->x, &c->rng, 2 * tiny), test_fill_uniform(&c->dy, &c->rng, 2 * tiny);
  test_fill_uniform(&c->wgu, &c->rng, 2 * tiny / sqrt((double)l->H)),
      test_fill_uniform(&c->wd, &c->rng, 2 * tiny / sqrt((double)l->I));
  test_fill_uniform(&c->bgu, &c->rng, 0.5 * tiny), test_fill_uniform(&c->bd, &c->rng, 0.5 * tiny);
  test_fill_uniform(&c->affinity, &c->rng, 1);
  test_fill_uniform(&c->y_start, &c->rng, tiny);
  for (int i = 0; i < TEST_GRADIENTS; ++i) test_fill_uniform(&c->grad_start[i], &c->rng, tiny);
}

static void fixture_new(fixture *x, uint64_t seed, moe_dtype dtype, const test_limits *most) {
  memset(x, 0, sizeof *x);
  test_case *c = &x->c;
  c->seed = c->rng = seed;
  test_case_options(c, dtype, most);
  test_case_real_activation(c);
  test_route_case(c);
  test_case_allocate(c);
  fixture_fill(x);
  fixture_layout(x);
  test_arena_allocate(&x->arena);
  fixture_layout(x);
  load(x->layer.in.x, &c->x), load(x->layer.in.affinity, &c->affinity), load(x->layer.in.wgu, &c->wgu);
  load(x->layer.in.wd, &c->wd), load(x->layer.in.bgu, &c->bgu), load(x->layer.in.bd, &c->bd), load(x->dy, &c->dy);
  if (!c->layer.gate_and_up_proj_bias) x->layer.in.bgu = NULL;
  if (!c->layer.down_proj_bias) x->layer.in.bd = NULL;
  x->layer.l = &c->layer, x->layer.dtype = dtype;
  x->threads = (int32_t)test_random_range(&c->rng, 1, 4);
}

static void fixture_free(fixture *x) {
  test_case_free(&x->c);
  test_arena_free(&x->arena);
}

/* ----------------------------------------------------------------------------------------------------------- checks */

/* One element, `want` being what is stored before its rounding to the tensor's type. */
static void check_element(const fixture *x, int which, const test_tensor *tensor, int64_t i, bounded want) {
  bounded rounded = bounded_round(tensor->dtype, want);
  double got = test_tensor_get(tensor, i);
  if (!bounded_holds(tensor->dtype, rounded, got)) {
    char text[768];
    fail_msg("%s[%d] is %.9g, not within %.3g of %.9g | %s",
             which < TEST_GRADIENTS ? test_gradient_name[which] : forward_name[which - OUTPUT], (int)i, got, rounded.e,
             want.v, test_case_describe(&x->c, x->isa, x->threads, text));
  }
  double ratio = isinf(got) ? 0 : fabs(got - rounded.v) / rounded.e,
         *most = &worst[x->c.dtype][which][tensor->dtype != MOE_DTYPE_F32];
  *most = fmax(*most, ratio);
}

/* Whether what would be stored as a limit though it may be inside is stored as the next number inside. */
static int next_inside(moe_dtype dtype, bounded want, double limit, int upper, double got) {
  const double side = upper ? 1 : -1, stored = test_dtype_round(dtype, limit);
  const double most = fmin(side * want.v + want.e, side * limit); /* the nearest to the limit that it may be */
  return dtype != MOE_DTYPE_F32 && side * want.v - want.e < side * limit &&
         test_dtype_round(dtype, side * most) == stored && side * got < side * stored &&
         (test_dtype_round(dtype, (got + stored) / 2) == got || test_dtype_round(dtype, (got + stored) / 2) == stored);
}

static void check_gate_up(const fixture *x, int64_t i, int up, bounded want) {
  const moe_layer_config *o = &x->c.layer.config;
  const double got = test_tensor_get(&x->c.gate_up, i);
  const float limit[4] = {o->gate_clamp_upper_limit, o->gate_clamp_lower_limit, o->up_clamp_upper_limit,
                          o->up_clamp_lower_limit};
  for (int j = 2 * up; j < 2 * up + 2; ++j)
    if (o->clamp >> j & 1 && next_inside(x->c.gate_up.dtype, want, (double)limit[j], j % 2 == 0, got)) return;
  check_element(x, GATE_UP, &x->c.gate_up, i, want);
}

static void check_forward(const fixture *x) {
  const test_case *c = &x->c;
  const moe_blockwise_layer *l = &c->layer;
  for (int64_t i = 0; i < c->y.count; ++i) {
    bounded start = bounded_exact(test_tensor_get(&c->y_start, i));
    check_element(x, OUTPUT, &c->y, i, c->accumulate_output ? bounded_add(x->y[i], start) : x->y[i]);
  }
  for (int64_t b = 0; b < l->N; ++b)
    for (int64_t i = 0; i < 2 * l->I; ++i)
      for (int64_t r = 0; r < l->B; ++r) {
        const bounded *row = i < l->I ? x->rows.g : x->rows.u;
        check_gate_up(x, (b * 2 * l->I + i) * l->B + r, i >= l->I, row[(b * l->B + r) * l->I + i % l->I]);
      }
  for (int64_t i = 0; i < c->down.count && c->keep_down_checkpoint; ++i)
    check_element(x, DOWN, &c->down, i, x->rows.d[i]);
}

static void check_gradient(const fixture *x, int which, int64_t i, bounded want) {
  if (x->c.accumulate >> which & 1)
    want = bounded_add(want, bounded_exact(test_tensor_get(&x->c.grad_start[which], i)));
  check_element(x, which, &x->c.grad[which], i, want);
}

static void check_backward(const fixture *x) {
  const bounded *direct[TEST_GRADIENTS] = {x->grad.x, x->grad.affinity};
  const bounded_sum *chains[TEST_GRADIENTS] = {NULL, NULL, x->grad.wgu, x->grad.wd, x->grad.bgu, x->grad.bd};
  for (int which = 0; which < TEST_GRADIENTS; ++which)
    for (int64_t i = 0; i < x->c.grad[which].count && !(x->c.omit >> which & 1); ++i)
      check_gradient(x, which, i, direct[which] ? direct[which][i] : bounded_chain(&chains[which][i]));
}

/* What the library stored in its checkpoints is the backward reference's exact input. */
static void load_checkpoints(fixture *x) {
  const moe_blockwise_layer *l = &x->c.layer;
  for (int64_t b = 0; b < l->N; ++b)
    for (int64_t i = 0; i < l->I; ++i)
      for (int64_t r = 0; r < l->B; ++r) {
        int64_t row = (b * l->B + r) * l->I + i;
        x->stored.g[row] = test_tensor_get(&x->c.gate_up, ((b * 2 + 0) * l->I + i) * l->B + r);
        x->stored.u[row] = test_tensor_get(&x->c.gate_up, ((b * 2 + 1) * l->I + i) * l->B + r);
      }
  if (x->c.keep_down_checkpoint) load(x->stored.d, &x->c.down);
  if (!x->c.keep_down_checkpoint || x->c.affinity_option == MOE_AFFINITY_OPTION_ON_I) x->stored.d = NULL;
}

static void run(fixture *x, int backward) {
  struct test_pool pool = {.seed = x->c.seed};
  moe_context ctx = {.parallel_for = test_pool_parallel_for,
                     .parallel_for_user = &pool,
                     .num_threads = x->threads,
                     .schedule = x->c.schedule,
                     .allocate = test_allocate,
                     .release = test_release};
  char text[768];
  moe_status status = backward ? test_case_backward(&x->c, &ctx) : test_case_forward(&x->c, &ctx);
  if (status != MOE_OK)
    fail_msg("%s: %s | %s", moe_status_str(status), ctx.message, test_case_describe(&x->c, x->isa, x->threads, text));
}

/* The backward without the checkpoint gives the same bits as with it. */
static void check_recompute(fixture *x) {
  test_tensor kept[TEST_GRADIENTS];
  char text[768];
  for (int i = 0; i < TEST_GRADIENTS; ++i) {
    kept[i] = test_tensor_new(x->c.grad[i].dtype, x->c.grad[i].count);
    test_tensor_copy(&kept[i], &x->c.grad[i]);
  }
  x->c.recompute = 1;
  run(x, 1);
  for (int i = 0; i < TEST_GRADIENTS; ++i) {
    int64_t at = test_tensor_differs(&kept[i], &x->c.grad[i]);
    if (at >= 0)
      fail_msg("%s[%d] is %.9g with the checkpoint and %.9g recomputed | %s", test_gradient_name[i], (int)at,
               test_tensor_get(&kept[i], at), test_tensor_get(&x->c.grad[i], at),
               test_case_describe(&x->c, x->isa, x->threads, text));
    test_tensor_free(&kept[i]);
  }
  x->c.recompute = 0;
}

static int64_t check_case(uint64_t seed, moe_dtype dtype, const test_limits *most) {
  fixture x;
  int64_t cases = 0;
  fixture_new(&x, seed, dtype, most);
  bounded_layer_fwd(&x.layer, x.c.not_accumulating, &x.rows, x.y);
  for (int isa = 0; isa < TEST_ISA_COUNT; ++isa) {
    if (!test_use_isa(isa)) continue;
    x.isa = (moe_isa)isa;
    run(&x, 0);
    check_forward(&x);
    if (cases == 0) { /* the checkpoints of the others are the same bits: another test's business */
      load_checkpoints(&x);
      bounded_layer_bwd(&x.layer, x.c.not_accumulating, &x.stored, x.dy, &x.grad, x.unit);
    }
    run(&x, 1);
    check_backward(&x);
    check_recompute(&x);
    cases += 3;
  }
  fixture_free(&x);
  return cases;
}

/* ------------------------------------------------------------------------------------------------------------ tests */

static int64_t check_cases(uint64_t stream, int64_t count, const test_limits *most) {
  int64_t cases = 0;
  for (int64_t n = 0; n < count; ++n)
    cases += check_case(test_case_seed(test_seed(stream), (uint64_t)n), test_dtype_number(n), most);
  test_use_best_isa();
  return cases;
}

static void test_small_shapes(void **state) {
  static const test_limits most = {12, 20, 20, 5, 3, 6};
  (void)state;
  print_message("%d calls\n", (int)check_cases(1, test_cases(450, 45), &most));
}

static void test_odd_shapes(void **state) {
  static const test_limits most = {40, 90, 90, 9, 4, 20};
  (void)state;
  print_message("%d calls\n", (int)check_cases(2, test_cases(150, 9), &most));
}

static void test_large_shapes(void **state) {
  static const test_limits most = {30, 300, 150, 4, 2, 32};
  (void)state;
  print_message("%d calls\n", (int)check_cases(3, test_cases(12, 0), &most));
}

static void report_tightness(void) {
  for (int dtype = MOE_DTYPE_F32; dtype <= TEST_DTYPES; ++dtype) {
    print_message("largest error/bound, %s, as float / as a narrower type:\n", test_dtype_name((moe_dtype)dtype));
    for (int i = 0; i < TENSORS; ++i)
      print_message("  %-30s %.2f / %.2f\n", i < TEST_GRADIENTS ? test_gradient_name[i] : forward_name[i - OUTPUT],
                    worst[dtype][i][0], worst[dtype][i][1]);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_small_shapes), cmocka_unit_test(test_odd_shapes),
                                     cmocka_unit_test(test_large_shapes)};
  int failed = cmocka_run_group_tests(tests, NULL, NULL);
  report_tightness();
  return failed;
}
