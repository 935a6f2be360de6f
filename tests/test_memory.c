/* test_memory: what the library reads and writes. Every tensor and the workspace lie against an inaccessible page,
   inputs are write-protected, the workspace is exactly as large as asked for and full of NaN; experts without tokens
   have inaccessible weights; poison in a row, in padding or in what must not be read stays where it is. */
#include "support/test.h"

#include <signal.h>

#include "support/guard.h"
#include "support/pool.h"
#include "support/problem.h"

struct guarded_problem {
  struct problem p;
  enum guard_side side;
  struct guarded tensor[PT_COUNT], workspace;
};

/* ------------------------------------------------------------------------------------------- faults become failures */

static sigjmp_buf fault_jump;
static const void *volatile fault_address;

static void on_fault(int signal_number, siginfo_t *info, void *context) {
  (void)signal_number, (void)context;
  fault_address = info->si_addr;
  siglongjmp(fault_jump, 1);
}

/* cmocka has set a handler of its own around every test: this one is for as long as a test wants it. */
static void catch_faults(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  assert_int_equal(sigaction(SIGSEGV, &action, NULL) | sigaction(SIGBUS, &action, NULL), 0);
}

static void fail_for_fault(const struct guarded_problem *g, const moe_context *ctx, const char *op) {
  const char *name = "memory of nobody";
  char text[400];
  if (guard_owns(&g->workspace, fault_address)) name = "workspace";
  for (int i = 0; i < PT_COUNT; i++)
    if (guard_owns(&g->tensor[i], fault_address)) name = g->p.tensor[i].name;
  problem_describe(&g->p, ctx, text, sizeof text);
  fail_msg("%s: forbidden access to %s\nrepro: side=%s %s", op, name, g->side == GUARD_AFTER ? "after" : "before",
           text);
}

/* ------------------------------------------------------------------------------------------------ guarded problems */

static void *allocate_guarded(void *user, int tensor, size_t bytes) {
  struct guarded_problem *g = user;
  g->tensor[tensor] = guard_alloc(bytes, g->side);
  return g->tensor[tensor].data;
}

static void release_guarded(void *user, int tensor, void *memory) {
  struct guarded_problem *g = user;
  (void)memory;
  guard_free(&g->tensor[tensor]);
}

static void open_guarded(struct guarded_problem *g, const struct problem_options *o, enum guard_side side) {
  memset(g, 0, sizeof *g);
  g->side = side;
  catch_faults();
  assert_true(problem_open(&g->p, o, allocate_guarded, g));
}

static void close_guarded(struct guarded_problem *g) { problem_close(&g->p, release_guarded, g); }

/* One operation: its inputs read-only, its workspace exact, full of NaN and against a guard page. */
static void run_guarded(struct guarded_problem *g, moe_context *ctx, enum problem_op op) {
  struct problem_args args;
  size_t bytes = 0;
  problem_make_args(&g->p, &args);
  moe_status status = problem_workspace_size(op, ctx, &args, &bytes);
  g->workspace = guard_alloc(bytes, g->side);
  assert_non_null(g->workspace.data);
  memset(g->workspace.data, 0xff, bytes);
  problem_set_workspace(op, &args, g->workspace.data, bytes);
  for (int i = 0; i < PT_COUNT; i++)
    if (!(g->p.tensor[i].writers & (1u << op))) guard_protect(&g->tensor[i], PROT_READ);
  if (sigsetjmp(fault_jump, 1) != 0) fail_for_fault(g, ctx, problem_op_name(op));
  if (status == MOE_OK) status = problem_call(op, ctx, &args);
  for (int i = 0; i < PT_COUNT; i++) guard_protect(&g->tensor[i], PROT_READ | PROT_WRITE);
  guard_free(&g->workspace);
  if (status != MOE_OK) fail_msg("%s: %s", problem_op_name(op), ctx->message);
}

static int same_tensor(const struct problem *a, const struct problem *b, int i) {
  return memcmp(a->tensor[i].data, b->tensor[i].data, problem_tensor_bytes(a, i)) == 0;
}

static void assert_same_problem(const struct problem *a, const struct problem *b, const char *what) {
  char text[400];
  problem_describe(a, NULL, text, sizeof text);
  for (int i = 0; i < PT_COUNT; i++)
    if (!same_tensor(a, b, i)) fail_msg("%s changes %s\nrepro: %s", what, a->tensor[i].name, text);
}

static void run_plain(struct problem *p) {
  moe_context ctx = {0};
  enum problem_op op;
  if (problem_run_all(p, &ctx, &op) != MOE_OK) fail_msg("%s: %s", problem_op_name(op), ctx.message);
}

static void check_guards(moe_dtype dtype, enum guard_side side) {
  int64_t problems = test_cases(120, 6);
  for (int64_t i = -test_cases(PROBLEM_LONG_SHAPES, 2); i < problems; i++) {
    struct problem_options o = i < 0 ? problem_options_long((uint64_t)-i, dtype, (int)(-1 - i))
                                     : problem_options_random(40000 + (uint64_t)i, dtype);
    struct problem plain;
    struct guarded_problem g;
    o.empty_expert = 0;
    assert_true(problem_open(&plain, &o, NULL, NULL));
    run_plain(&plain);
    open_guarded(&g, &o, side);
    for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
      moe_context ctx = {.num_threads = (int32_t)(i < 0 ? 2 : i % 3 + 1)};
      if (!(i < 0 ? test_use_quick_isa(isa) : test_use_isa(isa))) continue;
      problem_fill(&g.p);
      for (int op = 0; op < PROBLEM_OP_COUNT; op++) run_guarded(&g, &ctx, (enum problem_op)op);
      assert_same_problem(&g.p, &plain, "where memory lies, or what a workspace held before,");
    }
    test_use_best_isa();
    close_guarded(&g);
    problem_close(&plain, NULL, NULL);
  }
}

static void test_page_after(void **state) { check_guards(*(const moe_dtype *)*state, GUARD_AFTER); }
static void test_page_before(void **state) { check_guards(*(const moe_dtype *)*state, GUARD_BEFORE); }

/* ------------------------------------------------------------------------------------------------ products and sums */

/* A lane's products and sums share its memory: as many panels at a time as there can be beside many outputs, and beside
   the sums of biases, give what sixteen lanes give, whose items are of one or two panels. */
static void test_products_and_sums(void **state) {
  static const int64_t shape[2][3] = {{384, 4096, 32}, {200, 64, 5888}}; /* T, H, I */
  for (int i = 0; i < 2; i++) {
    struct problem_options o = problem_options_random(90000 + (uint64_t)i, *(const moe_dtype *)*state);
    struct problem one, many;
    enum problem_op op;
    moe_context ctx = {.num_threads = 16};
    o.T = shape[i][0], o.H = shape[i][1], o.I = shape[i][2], o.E = o.K = 1, o.B = 100;
    o.dropping = o.empty_expert = o.nan_row = 0, o.expert_bias = 1;
    problem_options_settle(&o);
    assert_true(problem_open(&one, &o, NULL, NULL) && problem_open(&many, &o, NULL, NULL));
    run_plain(&one);
    if (problem_run_all(&many, &ctx, &op) != MOE_OK) fail_msg("%s: %s", problem_op_name(op), ctx.message);
    assert_same_problem(&many, &one, "how many panels an item has");
    problem_close(&one, NULL, NULL);
    problem_close(&many, NULL, NULL);
  }
}

/* --------------------------------------------------------------------------------------------------- empty experts */

/* Expert e's part of a [E,...] tensor. */
static unsigned char *expert_part(const struct problem *p, int id, int64_t e, size_t *bytes) {
  *bytes = problem_tensor_bytes(p, id) / (size_t)p->o.E;
  return p->tensor[id].data + (size_t)e * *bytes;
}

static void poison_expert(const struct problem *p, int id, int64_t e) {
  size_t bytes;
  unsigned char *part = expert_part(p, id, e, &bytes);
  memset(part, 0xff, bytes);
}

static void assert_zero_part(const struct problem *p, int id, int64_t e) {
  size_t bytes;
  const unsigned char *part = expert_part(p, id, e, &bytes);
  for (size_t i = 0; i < bytes; i++)
    if (part[i] != 0)
      fail_msg("%s of an expert without tokens is not 0\nrepro: seed=%llu", p->tensor[id].name,
               (unsigned long long)p->o.seed);
}

static void check_empty_expert(const struct problem_options *o, int64_t empty) {
  static const int weights[] = {PT_GATE_UP_WEIGHT, PT_DOWN_WEIGHT}, biases[] = {PT_GATE_UP_BIAS, PT_DOWN_BIAS};
  static const int gradients[] = {PT_GATE_UP_WEIGHT_GRAD, PT_DOWN_WEIGHT_GRAD, PT_GATE_UP_BIAS_GRAD, PT_DOWN_BIAS_GRAD};
  struct guarded_problem g;
  struct test_pool pool = {.seed = o->seed};
  moe_context ctx = {.num_threads = 3, .parallel_for = test_serial_parallel_for, .parallel_for_user = &pool};
  open_guarded(&g, o, GUARD_BEFORE);
  if (problem_run(&g.p, &ctx, PROBLEM_ROUTER) != MOE_OK || problem_run(&g.p, &ctx, PROBLEM_ROUTE_BLOCKS) != MOE_OK)
    fail_msg("routing: %s", ctx.message);
  for (int i = 0; i < 4; i++) poison_expert(&g.p, gradients[i], empty);
  for (int i = 0; i < 2; i++) poison_expert(&g.p, biases[i], empty);
  for (int i = 0; i < 2; i++) {
    size_t bytes;
    unsigned char *part = expert_part(&g.p, weights[i], empty, &bytes);
    assert_int_equal(mprotect(part, bytes, PROT_NONE), 0);
  }
  if (sigsetjmp(fault_jump, 1) != 0) fail_for_fault(&g, &ctx, "expert without tokens");
  if (problem_run(&g.p, &ctx, PROBLEM_FORWARD) != MOE_OK) fail_msg("forward: %s", ctx.message);
  if (problem_run(&g.p, &ctx, PROBLEM_BACKWARD) != MOE_OK) fail_msg("backward: %s", ctx.message);
  for (int i = 0; i < 4; i++) assert_zero_part(&g.p, gradients[i], empty);
  for (int i = 0; i < 2; i++) guard_protect(&g.tensor[weights[i]], PROT_READ | PROT_WRITE);
  close_guarded(&g);
}

/* Sizes such that an expert's weights are whole pages; first, middle and last expert. */
static void test_empty_expert(void **state) {
  moe_dtype dtype = *(const moe_dtype *)*state;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!test_use_isa(isa)) continue;
    for (int64_t i = 0; i < test_cases(24, 6); i++) {
      struct problem_options o = problem_options_random(50000 + (uint64_t)i, dtype);
      o.H = 64, o.I = 32, o.E = 5, o.K = 2, o.accumulate = 0, o.expert_bias = 1, o.nan_row = 0;
      o.router.num_groups = 0, o.router.topk_groups = 0;
      o.empty_expert = (int)(i % 3 * 2) + 1;
      problem_options_settle(&o);
      check_empty_expert(&o, o.empty_expert - 1);
    }
  }
  test_use_best_isa();
}

/* ----------------------------------------------------------------------------------------------------------- poison */

/* Runs routing, forward and backward without the losses, which join all tokens. */
static void run_without_losses(const struct problem *p) {
  static const enum problem_op ops[] = {PROBLEM_ROUTER, PROBLEM_ROUTE_BLOCKS, PROBLEM_FORWARD, PROBLEM_BACKWARD,
                                        PROBLEM_ROUTER_BACKWARD};
  moe_context ctx = {.num_threads = 2};
  for (int i = 0; i < 5; i++)
    if (problem_run(p, &ctx, ops[i]) != MOE_OK) fail_msg("%s: %s", problem_op_name(ops[i]), ctx.message);
}

static void assert_rows_same(const struct problem *a, const struct problem *b, int64_t except, const char *what) {
  static const int rows[] = {PT_LOGITS,      PT_EXPERT_INDEX,    PT_EXPERT_WEIGHTS,    PT_OUTPUT,
                             PT_HIDDEN_GRAD, PT_AFFINITIES_GRAD, PT_ROUTER_HIDDEN_GRAD};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    size_t bytes = problem_tensor_bytes(a, rows[i]) / (size_t)a->o.T;
    for (int64_t t = 0; t < a->o.T; t++) {
      size_t at = (size_t)t * bytes;
      if (t == except || memcmp(a->tensor[rows[i]].data + at, b->tensor[rows[i]].data + at, bytes) == 0) continue;
      char text[400];
      problem_describe(a, NULL, text, sizeof text);
      fail_msg("%s changes token %lld of %s\nrepro: %s", what, (long long)t, a->tensor[rows[i]].name, text);
    }
  }
}

static struct problem_options independent_options(uint64_t seed, moe_dtype dtype) {
  struct problem_options o = problem_options_random(seed, dtype);
  o.dropping = o.accumulate_output = o.device_output_shape = o.not_accumulating = o.empty_expert = o.nan_row = 0;
  o.accumulate = 0;
  o.capacity = 0;
  problem_options_settle(&o);
  return o;
}

/* NaN in one token's input, or in its output gradient, shows in that token's rows only. */
static void test_nan_stays_in_its_row(void **state) {
  moe_dtype dtype = *(const moe_dtype *)*state;
  for (int64_t i = 0; i < test_cases(150, 10); i++) {
    struct problem_options o = independent_options(60000 + (uint64_t)i, dtype);
    struct problem clean, poisoned;
    assert_true(problem_open(&clean, &o, NULL, NULL) && problem_open(&poisoned, &o, NULL, NULL));
    int64_t row = i % o.T;
    int id = i % 2 ? PT_OUTPUT_GRAD : PT_HIDDEN_STATES;
    size_t bytes = problem_tensor_bytes(&poisoned, id) / (size_t)o.T;
    memset(poisoned.tensor[id].data + (size_t)row * bytes, 0xff, bytes);
    run_without_losses(&clean);
    run_without_losses(&poisoned);
    assert_rows_same(&clean, &poisoned, row, "NaN in another token");
    problem_close(&clean, NULL, NULL);
    problem_close(&poisoned, NULL, NULL);
  }
}

/* Neither the block size nor extra blocks nor what the padding row's affinity holds changes a token's results. */
static void test_padding_changes_nothing(void **state) {
  moe_dtype dtype = *(const moe_dtype *)*state;
  for (int64_t i = 0; i < test_cases(150, 10); i++) {
    struct problem_options o = independent_options(70000 + (uint64_t)i, dtype);
    struct problem p, other;
    assert_true(problem_open(&p, &o, NULL, NULL));
    run_without_losses(&p);
    if (!o.skip_token) { /* the padding row T of the affinities is not read: NaN there */
      size_t row = (size_t)o.E * (size_t)p.tensor[PT_AFFINITIES].element;
      memset(p.tensor[PT_AFFINITIES].data + (size_t)o.T * row, 0xff, row);
    }
    assert_int_equal(problem_run(&p, NULL, PROBLEM_FORWARD) | problem_run(&p, NULL, PROBLEM_BACKWARD), MOE_OK);
    o.B = i % 29 + 1;
    o.extra_blocks = i % 4;
    o.skip_token = !o.skip_token;
    assert_true(problem_open(&other, &o, NULL, NULL));
    run_without_losses(&other);
    assert_rows_same(&p, &other, -1, "another amount of padding");
    problem_close(&p, NULL, NULL);
    problem_close(&other, NULL, NULL);
  }
}

/* skip_gate: gate weights and biases are never read, so NaN in them changes nothing. */
static void test_skipped_gate_is_not_read(void **state) {
  moe_dtype dtype = *(const moe_dtype *)*state;
  for (int64_t i = 0; i < test_cases(40, 6); i++) {
    struct problem_options o = independent_options(80000 + (uint64_t)i, dtype);
    struct problem clean, poisoned;
    o.layer.skip_gate = 1;
    o.expert_bias = 1;
    o.save_gate_up = 0; /* what its gate half then holds is nobody's business */
    assert_true(problem_open(&clean, &o, NULL, NULL) && problem_open(&poisoned, &o, NULL, NULL));
    size_t half = (size_t)o.I * (size_t)poisoned.tensor[PT_GATE_UP_WEIGHT].element;
    for (int64_t row = 0; row < o.E * o.H; row++)
      memset(poisoned.tensor[PT_GATE_UP_WEIGHT].data + (size_t)row * 2 * half, 0xff, half);
    for (int64_t e = 0; e < o.E; e++) memset(poisoned.tensor[PT_GATE_UP_BIAS].data + (size_t)e * 2 * half, 0xff, half);
    run_without_losses(&clean);
    run_without_losses(&poisoned);
    assert_rows_same(&clean, &poisoned, -1, "NaN in the weights of a skipped gate");
    assert_true(same_tensor(&clean, &poisoned, PT_GATE_UP_WEIGHT_GRAD));
    assert_true(same_tensor(&clean, &poisoned, PT_DOWN_WEIGHT_GRAD));
    problem_close(&clean, NULL, NULL);
    problem_close(&poisoned, NULL, NULL);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      EACH_DTYPE(test_page_after),           EACH_DTYPE(test_page_before),
      EACH_DTYPE(test_products_and_sums),
      EACH_DTYPE(test_empty_expert),         EACH_DTYPE(test_nan_stays_in_its_row),
      EACH_DTYPE(test_padding_changes_nothing), EACH_DTYPE(test_skipped_gate_is_not_read),
  };
  return cmocka_run_group_tests_name("memory", tests, NULL, NULL);
}
