/* test_bits: "the same bits from every instruction set and thread count", in one process: random training steps
   (router, losses, route_blocks, forward, backward) against the scalar kernels on one thread, to the bit. */
#include "support/test.h"

#include <fenv.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "support/pool.h"
#include "support/problem.h"
#include "support/tokens.h"

/* Flush-to-zero and denormals-are-zero, where the machine has such modes. Returns whether they are now on. */
static int test_flush_subnormals(int on) {
#if defined(__SSE2__)
  _mm_setcsr((_mm_getcsr() & ~0x8040u) | (on ? 0x8040u : 0u));
  return on;
#else
  (void)on;
  return 0;
#endif
}

static int test_flushes_subnormals(void) {
#if defined(__SSE2__)
  return (_mm_getcsr() & 0x8040u) == 0x8040u;
#else
  return 0;
#endif
}

enum pool_kind { POOL_NONE, POOL_RANDOM_ORDER, POOL_THREADS, POOL_KINDS };

struct variant {
  int isa;
  int32_t threads;
  moe_schedule schedule;
  enum pool_kind pool;
};

static const int32_t thread_counts[] = {1, 2, 3, 8, 64};
enum { THREAD_COUNTS = 5, SCHEDULES = 3, VARIANTS = TEST_ISA_COUNT * THREAD_COUNTS * SCHEDULES * POOL_KINDS };

static struct variant variant_number(int64_t n) {
  struct variant v;
  v.isa = (int)(n % TEST_ISA_COUNT);
  v.threads = thread_counts[n / TEST_ISA_COUNT % THREAD_COUNTS];
  v.schedule = (moe_schedule)(n / TEST_ISA_COUNT / THREAD_COUNTS % SCHEDULES);
  v.pool = (enum pool_kind)(n / TEST_ISA_COUNT / THREAD_COUNTS / SCHEDULES % POOL_KINDS);
  return v;
}

/* Runs the whole step in the given way. Fails the test, with a repro line, when an operation does. */
static void run_variant(struct problem *p, struct variant v) {
  struct test_pool pool = {.seed = p->o.seed + (uint64_t)v.threads};
  moe_context ctx = {.num_threads = v.threads, .schedule = v.schedule};
  if (v.pool != POOL_NONE) {
    ctx.parallel_for = v.pool == POOL_THREADS ? test_pool_parallel_for : test_serial_parallel_for;
    ctx.parallel_for_user = &pool;
  }
  enum problem_op op;
  if (problem_run_all(p, &ctx, &op) == MOE_OK) return;
  char text[400];
  problem_describe(p, &ctx, text, sizeof text);
  fail_msg("%s: %s %s\nrepro: %s", problem_op_name(op), moe_status_str(ctx.status), ctx.message, text);
}

static void assert_same(const struct problem *reference, const struct problem *p, struct variant v) {
  for (int i = 0; i < PT_COUNT; i++) {
    const struct problem_tensor *t = &p->tensor[i];
    int64_t at = first_difference(t->data, reference->tensor[i].data, problem_tensor_bytes(p, i));
    if (at < 0) continue;
    char text[400];
    problem_describe(p, NULL, text, sizeof text);
    fail_msg("%s[%lld] of %lld differs from scalar on one thread\nrepro: %s pool=%d num_threads=%d schedule=%d",
             t->name, (long long)(at / t->element), (long long)t->count, text, (int)v.pool, (int)v.threads,
             (int)v.schedule);
  }
}

static void check_variants(const struct problem_options *o, int64_t first, int64_t count, int64_t step) {
  struct problem reference, p;
  assert_true(problem_open(&reference, o, NULL, NULL) && problem_open(&p, o, NULL, NULL));
  assert_true(test_use_isa(MOE_ISA_SCALAR));
  run_variant(&reference, (struct variant){.isa = MOE_ISA_SCALAR, .threads = 1});
  for (int64_t n = 0; n < count; n++) {
    struct variant v = variant_number((first + n * step) % VARIANTS);
    if (!test_use_isa(v.isa)) continue;
    run_variant(&p, v);
    assert_same(&reference, &p, v);
  }
  test_use_best_isa();
  problem_close(&reference, NULL, NULL);
  problem_close(&p, NULL, NULL);
}

/* Many problems, each in a few of the 180 ways; the step is coprime to their number, so all get their turn. */
static void test_random_problems(void **state) {
  moe_dtype dtype = *(const moe_dtype *)*state;
  int64_t problems = test_cases(200, 6);
  for (int64_t i = 0; i < problems; i++) {
    struct problem_options o = problem_options_random(1000 + (uint64_t)i, dtype);
    check_variants(&o, i * 7, 8, 67);
  }
}

/* Few problems in all 180 ways (quickly: in 18 of them), in shapes of several tiles. */
static void test_all_variants(void **state) {
  moe_dtype dtype = *(const moe_dtype *)*state;
  int64_t problems = test_cases(2, 1);
  for (int64_t i = 0; i < problems; i++) {
    struct problem_options o = problem_options_random(5000 + (uint64_t)i, dtype);
    o.T = 70 + 13 * i, o.H = 67 + 31 * i, o.I = 40 + 29 * i, o.E = 5, o.K = 2, o.B = 12 + 7 * i;
    o.empty_expert = o.dropping = 0;
    problem_options_settle(&o);
    check_variants(&o, 0, test_cases(VARIANTS, VARIANTS / 10), test_cases(1, 11));
  }
}

/* Shapes longer than the library's pieces, each in some of the 180 ways. */
static void test_long_shapes(void **state) {
  moe_dtype dtype = *(const moe_dtype *)*state;
  for (int64_t i = 0; i < test_cases(PROBLEM_LONG_SHAPES, 3); i++) {
    struct problem_options o = problem_options_long(7000 + (uint64_t)i, dtype, (int)(i % PROBLEM_LONG_SHAPES));
    check_variants(&o, i * 7, test_cases(8, 2), 67);
  }
}

/* None to three rows of most experts, whose weights stream past: whole strips of columns with elements left over. What
   is seen are the sums, as floats. */
static void test_few_rows(void **state) {
  static const int64_t sides[][2] = {{77, 96}, {96, 70}, {160, 64}};
  moe_dtype dtype = *(const moe_dtype *)*state;
  for (int64_t i = 0; i < 3; i++) {
    struct problem_options o = problem_options_random(8000 + (uint64_t)i, dtype);
    o.T = 12, o.H = sides[i][0], o.I = sides[i][1], o.E = 30, o.K = 2, o.B = 4;
    o.empty_expert = o.dropping = 0;
    o.save_gate_up = o.save_down = 1, o.checkpoint_dtype = MOE_DTYPE_F32;
    problem_options_settle(&o);
    check_variants(&o, i * 7, test_cases(16, 8), 67);
  }
}

/* A few rows of most experts and many of the last one, whose gate and up take longer than all that another thread finds
   to do before it comes to that expert's down projection. */
static void test_down_after_gate_up(void **state) {
  moe_dtype dtype = *(const moe_dtype *)*state;
  for (int64_t i = 0; i < test_cases(20, 4); i++) {
    struct problem_options o = problem_options_random(50000 + (uint64_t)i, dtype);
    struct test_pool pool = {.seed = (uint64_t)i};
    struct problem reference, p;
    o.T = 127, o.H = 300, o.I = 260, o.E = 8, o.K = 1, o.B = 16;
    o.layer.affinity_mode = MOE_AFFINITY_POST_SCALE;
    open_independent(&reference, o);
    int32_t *experts = (int32_t *)(void *)reference.tensor[PT_EXPERT_INDEX].data;
    for (int64_t t = 0; t < o.T; t++) experts[t] = (int32_t)(t < 7 ? t : 7);
    moe_context serial = {0};
    moe_context ctx = {.parallel_for = test_pool_parallel_for, .parallel_for_user = &pool, .num_threads = 2};
    assert_int_equal(problem_run(&reference, &serial, PROBLEM_ROUTE_BLOCKS), MOE_OK);
    assert_true(problem_open(&p, &reference.o, NULL, NULL));
    for (int j = 0; j < PT_COUNT; j++)
      memcpy(p.tensor[j].data, reference.tensor[j].data, problem_tensor_bytes(&p, j));
    assert_int_equal(problem_run(&reference, &serial, PROBLEM_FORWARD), MOE_OK);
    assert_int_equal(problem_run(&p, &ctx, PROBLEM_FORWARD), MOE_OK);
    assert_same(&reference, &p, (struct variant){.threads = 2, .pool = POOL_THREADS});
    problem_close(&reference, NULL, NULL);
    problem_close(&p, NULL, NULL);
  }
}

/* Columns of sums divide among threads into parts of which some are wider: 23 panels into 8 and 12. */
static void test_column_parts(void **state) {
  moe_dtype dtype = *(const moe_dtype *)*state;
  for (int threads = 2; threads <= 3; threads++) {
    struct problem_options o = problem_options_random(60000, dtype);
    struct test_pool pool = {.seed = (uint64_t)threads};
    struct problem reference, p;
    enum problem_op op;
    o.T = 30, o.H = 64 * 22 + 5, o.I = 40, o.E = 3, o.K = 2, o.B = 16;
    open_independent(&reference, o);
    assert_true(problem_open(&p, &reference.o, NULL, NULL));
    moe_context serial = {0};
    moe_context ctx = {.parallel_for = test_pool_parallel_for, .parallel_for_user = &pool, .num_threads = threads};
    assert_int_equal(problem_run_all(&reference, &serial, &op), MOE_OK);
    assert_int_equal(problem_run_all(&p, &ctx, &op), MOE_OK);
    assert_same(&reference, &p, (struct variant){.threads = threads, .pool = POOL_THREADS});
    problem_close(&reference, NULL, NULL);
    problem_close(&p, NULL, NULL);
  }
}

/* A dtype left zero is float for affinities, from the routing to the router's backward, and the function's own type for
   checkpoints and weight gradients. */
static void test_default_dtypes(void **state) {
  moe_dtype dtype = *(const moe_dtype *)*state;
  for (int64_t i = 0; i < test_cases(60, 12); i++) {
    struct problem_options o = problem_options_random(95000 + (uint64_t)i, dtype);
    struct problem said, left;
    struct variant v = {.threads = 1};
    o.affinity_dtype = MOE_DTYPE_F32, o.checkpoint_dtype = o.weight_grad_dtype = dtype;
    o.direct_weights_grad = 0;
    assert_true(problem_open(&said, &o, NULL, NULL));
    o.affinity_dtype = o.checkpoint_dtype = o.weight_grad_dtype = MOE_DTYPE_DEFAULT;
    assert_true(problem_open(&left, &o, NULL, NULL));
    run_variant(&said, v), run_variant(&left, v);
    for (int t = 0; t < PT_COUNT; t++) {
      assert_int_equal(problem_tensor_bytes(&left, t), problem_tensor_bytes(&said, t));
      if (memcmp(left.tensor[t].data, said.tensor[t].data, problem_tensor_bytes(&said, t)) != 0)
        fail_msg("%s differs where dtypes are left zero\nrepro: seed=%lld", said.tensor[t].name, (long long)o.seed);
    }
    problem_close(&said, NULL, NULL);
    problem_close(&left, NULL, NULL);
  }
}

/* The hook is used, gets no more tasks than num_threads, and every index exactly once. */
struct counting_pool {
  int64_t calls, most;
};

static void counting_parallel_for(void *user, int64_t count, moe_task task, void *arg) {
  struct counting_pool *pool = user;
  pool->calls++;
  if (count > pool->most) pool->most = count;
  for (int64_t i = count - 1; i >= 0; i--) task(arg, i);
}

static void test_num_threads_is_the_most(void **state) {
  (void)state;
  struct problem_options o = problem_options_random(3, MOE_DTYPE_F32);
  o.T = 60, o.H = 40, o.I = 40, o.nan_row = 0;
  problem_options_settle(&o);
  struct problem p;
  assert_true(problem_open(&p, &o, NULL, NULL));
  for (size_t i = 1; i < THREAD_COUNTS; i++) {
    struct counting_pool pool = {0, 0};
    moe_context ctx = {
        .parallel_for = counting_parallel_for, .parallel_for_user = &pool, .num_threads = thread_counts[i]};
    enum problem_op op;
    assert_int_equal(problem_run_all(&p, &ctx, &op), MOE_OK);
    assert_true(pool.calls > 0);
    assert_in_range(pool.most, 2, thread_counts[i]);
  }
  problem_close(&p, NULL, NULL);
}

/* Contract 2: the caller's rounding and flush modes neither change a result nor are they changed. */
static void test_caller_modes(void **state) {
  static const int rounding[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
  (void)state;
  for (int64_t i = 0; i < test_cases(48, 12); i++) {
    struct problem_options o = problem_options_random(90000 + (uint64_t)i, test_dtype_number(i));
    struct variant v = variant_number(i * 41 % VARIANTS);
    struct problem reference, p;
    if (!moe_isa_supported(v.isa)) continue;
    assert_true(problem_open(&reference, &o, NULL, NULL) && problem_open(&p, &o, NULL, NULL));
    assert_true(test_use_isa(MOE_ISA_SCALAR));
    run_variant(&reference, (struct variant){.isa = MOE_ISA_SCALAR, .threads = 1});
    assert_true(test_use_isa(v.isa));
    fesetround(rounding[i / 3 % 4]);
    int flush = test_flush_subnormals(i % 2 == 1);
    run_variant(&p, v);
    int still = fegetround() == rounding[i / 3 % 4] && test_flushes_subnormals() == flush;
    fesetround(FE_TONEAREST);
    test_flush_subnormals(0);
    if (!still) fail_msg("the caller's modes changed\nrepro: seed=%lld", (long long)(90000 + i));
    assert_same(&reference, &p, v);
    test_use_best_isa();
    problem_close(&reference, NULL, NULL);
    problem_close(&p, NULL, NULL);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      EACH_DTYPE(test_random_problems), EACH_DTYPE(test_all_variants), EACH_DTYPE(test_long_shapes),
      EACH_DTYPE(test_column_parts),    EACH_DTYPE(test_down_after_gate_up), EACH_DTYPE(test_few_rows),
      EACH_DTYPE(test_default_dtypes),
      cmocka_unit_test(test_num_threads_is_the_most), cmocka_unit_test(test_caller_modes),
  };
  return cmocka_run_group_tests_name("bits", tests, NULL, NULL);
}
