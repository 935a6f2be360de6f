/* Exact fills: the inputs are integers, so small and sparse that every product, every partial sum in whatever order and
   every intermediate is an integer below 2^24 (operands of products: at most 256, so that bfloat16 holds them too). The
   oracle is int64 arithmetic, rounded once, in integers, where the library stores. Whatever the element type,
   instruction set and thread count, not one bit may differ. */
#include "reference/integer.h"
#include "support/arena.h"
#include "support/cases.h"
#include "support/pool.h"
#include "support/test.h"

enum { OPERAND_LIMIT = 256 };
static const int32_t thread_counts[] = {1, 2, 3, 8};

/* A case and its oracle. */
typedef struct exact {
  test_case c;
  test_arena arena;
  tensors_i64 in, grad;
  rows_i64 rows, grad_rows;
  int64_t *y, *dy;
} exact;

static tensors_i64 carve_tensors(test_arena *at, const moe_blockwise_layer *l) {
  size_t size = sizeof(int64_t);
  return (tensors_i64){test_carve(at, l->T * l->H, size),       test_carve(at, l->T * l->E, size),
                       test_carve(at, l->E * l->H * 2 * l->I, size), test_carve(at, l->E * l->I * l->H, size),
                       test_carve(at, l->E * 2 * l->I, size),   test_carve(at, l->E * l->H, size)};
}

static rows_i64 carve_rows(test_arena *at, const moe_blockwise_layer *l) {
  int64_t rows = l->N * l->B;
  size_t size = sizeof(int64_t);
  return (rows_i64){test_carve(at, rows * l->I, size), test_carve(at, rows * l->I, size),
                    test_carve(at, rows * l->I, size), test_carve(at, rows * l->H, size)};
}

static void exact_layout(exact *x) {
  const moe_blockwise_layer *l = &x->c.layer;
  x->in = carve_tensors(&x->arena, l), x->grad = carve_tensors(&x->arena, l);
  x->rows = carve_rows(&x->arena, l), x->grad_rows = carve_rows(&x->arena, l);
  x->y = test_carve(&x->arena, l->T * l->H, sizeof *x->y), x->dy = test_carve(&x->arena, l->T * l->H, sizeof *x->dy);
}

static void load(int64_t *to, const test_tensor *from) {
  for (int64_t i = 0; i < from->count; ++i) to[i] = (int64_t)test_tensor_get(from, i);
}

/* ------------------------------------------------------------------------------------------------------------- fill */

static void exact_options(test_case *c) {
  uint64_t *rng = &c->rng;
  moe_layer_config *o = &c->layer.config;
  static const moe_activation activations[] = {MOE_ACT_IDENTITY, MOE_ACT_RELU, MOE_ACT_SQUARED_RELU};
  o->activation = activations[test_random_range(rng, 0, 2)];
  o->up_offset = (float)test_random_range(rng, -1, 1);
  o->gate_clamp_upper_limit = (float)test_random_range(rng, 1, 4),
  o->gate_clamp_lower_limit = (float)test_random_range(rng, -4, 0);
  o->up_clamp_upper_limit = (float)test_random_range(rng, 1, 4),
  o->up_clamp_lower_limit = (float)test_random_range(rng, -4, 0);
}

static int64_t largest_exact(moe_dtype dtype) {
  return dtype == MOE_DTYPE_F32 ? 65535 : (1 << test_dtype_digits(dtype)) - 1;
}

/* Operands are at most 256, weights and dY at most 2, so that with H, I <= 70 the largest sums, d <= 2*256*I + 255 and
   dA <= 2*d*H or 256*(2*2*H)*I, stay below 2^24. The down bias and what outputs are added to are as large as their
   types hold exactly: those sums are the ones that storing has to round. */
static void exact_fill(exact *x, double thinning) {
  test_case *c = &x->c;
  const moe_blockwise_layer *l = &c->layer;
  double over_h = fmin(1, 3 / sqrt((double)l->H)) * thinning, over_i = fmin(1, 3 / sqrt((double)l->I)) * thinning;
  test_fill_integers(&c->x, &c->rng, over_h, 2);
  test_fill_integers(&c->wgu, &c->rng, over_h, 2);
  test_fill_integers(&c->wd, &c->rng, over_i, 2);
  test_fill_integers(&c->dy, &c->rng, over_h, 2);
  test_fill_integers(&c->bgu, &c->rng, 0.5, 2);
  test_fill_integers(&c->bd, &c->rng, 0.7, 255);
  test_fill_integers(&c->affinity, &c->rng, 0.9, 2);
  test_fill_integers(&c->y_start, &c->rng, 0.9, largest_exact(c->y.dtype));
  for (int i = 0; i < TEST_GRADIENTS; ++i)
    test_fill_integers(&c->grad_start[i], &c->rng, 0.9, largest_exact(c->grad[i].dtype));
  test_tensor *from[] = {&c->x, &c->affinity, &c->wgu, &c->wd, &c->bgu, &c->bd};
  int64_t *to[] = {x->in.x, x->in.affinity, x->in.wgu, x->in.wd, x->in.bgu, x->in.bd};
  for (int i = 0; i < TEST_GRADIENTS; ++i) load(to[i], from[i]);
  load(x->dy, &c->dy);
}

/* ----------------------------------------------------------------------------------------------------------- oracle */

static int within_operand_limit(const int64_t *value, int64_t count, int64_t factor) {
  for (int64_t i = 0; i < count; ++i)
    if (llabs(value[i] * factor) > OPERAND_LIMIT) return 0;
  return 1;
}

/* The oracle's results, from inputs to gradients; 0 when an intermediate is too large to be exact everywhere. The
   backward starts, as the library's does, from the checkpoints as they are stored. */
static int exact_solve(exact *x) {
  test_case *c = &x->c;
  const moe_blockwise_layer *l = &c->layer;
  int64_t rows = l->N * l->B, factor = 2; /* a*m, a*dg: |a| <= 2 */
  int digits = test_dtype_digits(l->checkpoint_dtype);
  tensors_i64 in = x->in;
  rows_i64 stored = x->rows;
  if (!l->gate_and_up_proj_bias) in.bgu = NULL;
  if (!l->down_proj_bias) in.bd = NULL;
  layer_fwd_i64(l, c->not_accumulating, &in, &x->rows, x->y);
  if (!within_operand_limit(x->rows.m, rows * l->I, factor)) return 0;
  for (int64_t i = 0; i < rows * l->I; ++i) {
    stored.g[i] = ref_round_i64(stored.g[i], digits), stored.u[i] = ref_round_i64(stored.u[i], digits);
    stored.m[i] = intermediate_i64(&l->config, stored.g[i], stored.u[i]);
  }
  if (!within_operand_limit(stored.m, rows * l->I, factor)) return 0;
  for (int64_t i = 0; i < rows * l->H; ++i) stored.d[i] = ref_round_i64(stored.d[i], digits);
  if (!c->keep_down_checkpoint || c->affinity_option == MOE_AFFINITY_OPTION_ON_I) stored.d = NULL;
  layer_bwd_i64(l, c->not_accumulating, &in, &stored, x->dy, &x->grad, &x->grad_rows);
  return within_operand_limit(x->grad_rows.g, rows * l->I, factor) &&
         within_operand_limit(x->grad_rows.u, rows * l->I, factor);
}

static void exact_free(exact *x) {
  test_case_free(&x->c);
  test_arena_free(&x->arena);
}

/* The case of a seed: fills thinner and thinner until all is exact. Returns 0 when even the thinnest is not. */
static int exact_new(exact *x, uint64_t seed, moe_dtype dtype) {
  static const test_limits small = {8, 20, 20, 5, 3, 5}, large = {40, 70, 70, 9, 4, 20}, wide = {12, 10, 420, 6, 3, 6};
  memset(x, 0, sizeof *x);
  test_case *c = &x->c;
  c->seed = c->rng = seed;
  test_case_options(c, dtype, test_with(&c->rng, 0.07) ? &large : test_with(&c->rng, 0.12) ? &wide : &small);
  exact_options(c);
  test_route_case(c);
  test_case_allocate(c);
  c->recompute = test_with(&c->rng, 0.25);
  exact_layout(x);
  test_arena_allocate(&x->arena);
  exact_layout(x);
  for (double thinning = 1; thinning > 0.02; thinning *= 0.8) {
    memset(x->arena.memory, 0, x->arena.used);
    exact_fill(x, thinning);
    if (exact_solve(x)) return 1;
  }
  exact_free(x);
  return 0;
}

/* ----------------------------------------------------------------------------------------------------------- checks */

struct run {
  exact *x;
  moe_isa isa;
  int32_t threads;
};

static void report(const struct run *run, const char *tensor, int64_t i, double got, double want) {
  char text[768];
  fail_msg("%s[%d] is %.9g, not %.9g | %s", tensor, (int)i, got, want,
           test_case_describe(&run->x->c, run->isa, run->threads, text));
}

/* tensor == start + sum, rounded once to its element type. (start NULL: sum alone. The sign of a zero, which int64 does
   not have, is left to the tests that compare instruction sets with each other.) */
static void check_tensor(const struct run *run, const char *name, const test_tensor *tensor, const test_tensor *start,
                         const int64_t *sum) {
  for (int64_t i = 0; i < tensor->count; ++i) {
    int64_t exact_value = sum[i] + (start ? (int64_t)test_tensor_get(start, i) : 0);
    int64_t rounded = ref_round_i64(exact_value, test_dtype_digits(tensor->dtype));
    double want = test_dtype_round(tensor->dtype, (double)rounded), got = test_tensor_get(tensor, i);
    if (!(got == want)) report(run, name, i, got, want);
  }
}

/* The checkpoint's element of row r of block b; those of padding rows and idle blocks are 0. */
static void check_gate_up(const struct run *run) {
  const exact *x = run->x;
  const moe_blockwise_layer *l = &x->c.layer;
  for (int64_t b = 0; b < l->N; ++b)
    for (int64_t i = 0; i < 2 * l->I; ++i)
      for (int64_t r = 0; r < l->B; ++r) {
        const int64_t *row = i < l->I ? x->rows.g : x->rows.u;
        int64_t at = (b * 2 * l->I + i) * l->B + r;
        double want = (double)row[(b * l->B + r) * l->I + i % l->I], got = test_tensor_get(&x->c.gate_up, at);
        if (i < l->I && l->config.skip_gate) want = 0;
        if (!(got == want)) report(run, "gate_up_activations_T", at, got, want);
      }
}

static void check_forward(const struct run *run) {
  exact *x = run->x;
  check_tensor(run, "output", &x->c.y, x->c.accumulate_output ? &x->c.y_start : NULL, x->y);
  check_gate_up(run);
  if (x->c.keep_down_checkpoint) check_tensor(run, "down_activations", &x->c.down, NULL, x->rows.d);
}

static void check_backward(const struct run *run) {
  exact *x = run->x;
  const int64_t *want[TEST_GRADIENTS] = {x->grad.x, x->grad.affinity, x->grad.wgu, x->grad.wd, x->grad.bgu, x->grad.bd};
  for (int i = 0; i < TEST_GRADIENTS; ++i) {
    if (x->c.omit >> i & 1) continue;
    check_tensor(run, test_gradient_name[i], &x->c.grad[i], x->c.accumulate >> i & 1 ? &x->c.grad_start[i] : NULL,
                 want[i]);
  }
}

static void expect_ok(const struct run *run, moe_status status, const moe_context *ctx) {
  char text[768];
  if (status != MOE_OK)
    fail_msg("%s: %s | %s", moe_status_str(status), ctx->message,
             test_case_describe(&run->x->c, run->isa, run->threads, text));
}

/* Forward and backward at every thread count on the current instruction set. */
static int64_t check_threads(exact *x, moe_isa isa) {
  int64_t cases = 0;
  for (size_t i = 0; i < sizeof thread_counts / sizeof *thread_counts; ++i) {
    struct run run = {x, isa, thread_counts[i]};
    struct test_pool pool = {.seed = x->c.seed + i};
    moe_context ctx = {.parallel_for = run.threads > 1 ? test_pool_parallel_for : NULL, .parallel_for_user = &pool,
                       .num_threads = run.threads, .schedule = x->c.schedule,
                       .allocate = test_allocate, .release = test_release};
    expect_ok(&run, test_case_forward(&x->c, &ctx), &ctx);
    check_forward(&run);
    expect_ok(&run, test_case_backward(&x->c, &ctx), &ctx);
    check_backward(&run);
    cases += 2;
  }
  return cases;
}

static void test_exact_fills(void **state) {
  (void)state;
  uint64_t seed = test_seed(1);
  int64_t cases = 0, skipped = 0, problems = test_cases(1000, 50);
  for (int64_t n = 0; n < problems; ++n) {
    exact x;
    if (!exact_new(&x, test_case_seed(seed, (uint64_t)n), test_dtype_number(n))) {
      ++skipped;
      continue;
    }
    for (int isa = 0; isa < TEST_ISA_COUNT; ++isa)
      if (test_use_isa(isa)) cases += check_threads(&x, (moe_isa)isa);
    exact_free(&x);
  }
  test_use_best_isa();
  print_message("%d cases, %d of %d fills not exact\n", (int)cases, (int)skipped, (int)problems);
  assert_true(skipped * 20 < problems);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_exact_fills)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
