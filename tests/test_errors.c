/* test_errors: every malformed argument of tests/support/error_cases.h, one test each, for every dtype: the right
   status, a sentence that names the argument, and not a byte of any tensor changed. Then contexts, allocators,
   conversions, activations, workspace sizes and the status names. */
#include "support/test.h"

#include <math.h>

#include "support/problem.h"

enum change { SET_VALUE, SET_FLOAT, SHIFT_POINTER, OVERLAY_POINTER, STORE_INT32, DECREMENT };

struct error_case {
  const char *path;
  size_t offset, size; /* of the field in struct problem_args */
  enum change change;
  int64_t value;
  double real;
  size_t other; /* OVERLAY_POINTER: offset of the other pointer */
  int prefix;   /* belongs to the case after it */
  moe_status status;
  const char *word; /* NULL = the last part of the path */
  const char *onto; /* OVERLAY_POINTER: path of the other pointer, which may be named instead */
};

#define FIELD(path) #path, offsetof(struct problem_args, path), sizeof(((struct problem_args *)0)->path)
#define BEFORE(path, value) {FIELD(path), SET_VALUE, value, 0, 0, 1, MOE_OK, NULL, NULL},
#define SETX(path, value, STATUS, word) {FIELD(path), SET_VALUE, value, 0, 0, 0, MOE_ERROR_##STATUS, word, NULL},
#define SET(path, value, STATUS) SETX(path, value, STATUS, NULL)
#define SETF(path, value, STATUS) {FIELD(path), SET_FLOAT, 0, (double)(value), 0, 0, MOE_ERROR_##STATUS, NULL, NULL},
#define NULLED(path) SETX(path, 0, NULL_ARGUMENT, NULL)
#define ABSENT(path) SETX(path, 0, WORKSPACE, NULL)
#define SHIFTED(path) {FIELD(path), SHIFT_POINTER, 0, 0, 0, 0, MOE_ERROR_MISALIGNED, NULL, NULL},
#define OVERLAID(path, onto) \
  {FIELD(path), OVERLAY_POINTER, 0, 0, offsetof(struct problem_args, onto), 0, MOE_ERROR_OVERLAP, NULL, #onto},
#define STORED(path, index, id) {FIELD(path), STORE_INT32, id, 0, index, 0, MOE_ERROR_INVALID_INDEX, NULL, NULL},
#define LESS(path) {FIELD(path), DECREMENT, 0, 0, 0, 0, MOE_ERROR_WORKSPACE, NULL, NULL},

static const struct error_case error_cases[] = {
#include "support/error_cases.h"
};
enum { CASES = sizeof error_cases / sizeof *error_cases };

/* --------------------------------------------------------------------------------------------------- a valid call */

static struct problem_options valid_options(moe_dtype dtype) {
  struct problem_options o = {.seed = 1, .dtype = dtype, .T = 6, .H = 8, .I = 8, .E = 4, .K = 2, .B = 4};
  o.router_bias = o.selection_bias = o.token_mask = o.expert_bias = o.save_gate_up = o.save_down = 1;
  o.affinity_dtype = o.weight_grad_dtype = MOE_DTYPE_F32;
  return o;
}

/* A tensor laid onto a shorter one must not reach a third. */
static void *allocate_apart(void *user, int tensor, size_t bytes) {
  (void)user, (void)tensor;
  return malloc(bytes + (1 << 14));
}

static enum problem_op op_of_path(const char *path) {
  static const char *const prefix[] = {"router.",  "load_balance.", "z_loss.",         "route.",
                                       "forward.", "backward.",     "router_backward."};
  for (int op = 0; op < PROBLEM_OP_COUNT; op++)
    if (strncmp(path, prefix[op], strlen(prefix[op])) == 0) return (enum problem_op)op;
  fail_msg("no operation for %s", path);
  return PROBLEM_OP_COUNT;
}

static void copy_tensors(struct problem *to, const struct problem *from) {
  for (int i = 0; i < PT_COUNT; i++) memcpy(to->tensor[i].data, from->tensor[i].data, problem_tensor_bytes(from, i));
}

static void assert_untouched(const struct problem *p, const struct problem *before, const char *path) {
  for (int i = 0; i < PT_COUNT; i++)
    if (memcmp(p->tensor[i].data, before->tensor[i].data, problem_tensor_bytes(p, i)) != 0)
      fail_msg("repro: %s dtype=%s: %s was written to", path, problem_dtype_name(p->o.dtype), p->tensor[i].name);
}

static void set_integer(void *field, size_t size, int64_t value) {
  int32_t narrow = (int32_t)(uint32_t)value;
  memcpy(field, size == 8 ? (const void *)&value : (const void *)&narrow, size);
}

static void apply(const struct error_case *c, struct problem_args *args) {
  unsigned char *field = (unsigned char *)args + c->offset, *pointer, *other;
  float real = (float)c->real;
  int32_t *ids, id = (int32_t)c->value;
  size_t bytes;
  memcpy(&pointer, field, sizeof pointer < c->size ? sizeof pointer : c->size);
  switch (c->change) {
    case SET_VALUE: set_integer(field, c->size, c->value); return;
    case SET_FLOAT: memcpy(field, &real, sizeof real); return;
    case SHIFT_POINTER: pointer++; break;
    case OVERLAY_POINTER:
      memcpy(&other, (unsigned char *)args + c->other, sizeof other);
      pointer = other + 8; /* inside even the smallest, and aligned for every type */
      break;
    case STORE_INT32:
      ids = (int32_t *)(void *)pointer;
      ids[c->other] = id;
      return;
    case DECREMENT:
      memcpy(&bytes, field, sizeof bytes);
      bytes--;
      memcpy(field, &bytes, sizeof bytes);
      return;
  }
  memcpy(field, &pointer, sizeof pointer);
}

static const char *last_part(const char *path) { return strrchr(path, '.') + 1; }

/* Case number n (with the prefixes in front of it) on a problem whose tensors are as in `before`. */
static void check_case(const struct error_case *c, struct problem *p, struct problem *before) {
  enum problem_op op = op_of_path(c->path);
  struct problem_args args;
  moe_context ctx = {.status = MOE_OK};
  size_t bytes;
  problem_make_args(p, &args);
  assert_int_equal(problem_workspace_size(op, &ctx, &args, &bytes), MOE_OK);
  void *workspace = malloc(bytes + 1);
  assert_non_null(workspace);
  problem_set_workspace(op, &args, workspace, bytes);
  const struct error_case *first = c;
  while (first > error_cases && first[-1].prefix) first--;
  for (; first <= c; first++) apply(first, &args);
  copy_tensors(before, p);

  const char *dtype = problem_dtype_name(p->o.dtype), *word = c->word ? c->word : last_part(c->path);
  moe_status status = problem_call(op, &ctx, &args);
  if (status != c->status)
    fail_msg("repro: %s dtype=%s: %s (%s) instead of %s", c->path, dtype, moe_status_str(status), ctx.message,
             moe_status_str(c->status));
  assert_int_equal(ctx.status, status);
  if (c->onto != NULL && strstr(ctx.message, word) == NULL) word = last_part(c->onto);
  if (strstr(ctx.message, word) == NULL || strlen(ctx.message) < strlen(word) + 4)
    fail_msg("repro: %s dtype=%s: \"%s\" does not name \"%s\"", c->path, dtype, ctx.message, word);
  assert_untouched(p, before, c->path);
  assert_int_equal(problem_call(op, NULL, &args), status);
  assert_untouched(p, before, c->path);
  free(workspace);
}

static void test_case(void **state) {
  const struct error_case *c = *state;
  for (int dtype = MOE_DTYPE_F32; dtype <= TEST_DTYPES; dtype++) {
    struct problem_options o = valid_options((moe_dtype)dtype);
    struct problem p, before;
    moe_context ctx = {.status = MOE_OK};
    enum problem_op op;
    assert_true(problem_open(&p, &o, allocate_apart, NULL) && problem_open(&before, &o, NULL, NULL));
    if (problem_run_all(&p, &ctx, &op) != MOE_OK) fail_msg("the valid call failed: %s", ctx.message);
    check_case(c, &p, &before);
    problem_close(&p, NULL, NULL);
    problem_close(&before, NULL, NULL);
  }
}

/* ----------------------------------------------------------------------------------- contexts, allocators, sizes */

static void *no_memory(void *user, size_t bytes) {
  (void)bytes;
  ++*(int *)user;
  return NULL;
}

static void *some_memory(void *user, size_t bytes) {
  ++*(int *)user;
  return malloc(bytes);
}

static void release_memory(void *user, void *memory, size_t bytes) {
  (void)bytes;
  --*(int *)user;
  free(memory);
}

/* The operations that want a workspace, without one, under the given context. */
static void check_context(moe_context *ctx, moe_status expected, const char *word) {
  static const enum problem_op ops[] = {PROBLEM_FORWARD, PROBLEM_BACKWARD};
  struct problem_options o = valid_options(MOE_DTYPE_BF16);
  struct problem p, before;
  moe_context plain = {0};
  enum problem_op op;
  assert_true(problem_open(&p, &o, NULL, NULL) && problem_open(&before, &o, NULL, NULL));
  assert_int_equal(problem_run_all(&p, &plain, &op), MOE_OK);
  for (int i = 0; i < 2; i++) {
    struct problem_args args;
    problem_make_args(&p, &args);
    copy_tensors(&before, &p);
    assert_int_equal(problem_call(ops[i], ctx, &args), expected);
    assert_int_equal(ctx->status, expected);
    assert_non_null(strstr(ctx->message, word));
    if (expected != MOE_OK) assert_untouched(&p, &before, "context");
  }
  problem_close(&p, NULL, NULL);
  problem_close(&before, NULL, NULL);
}

static void test_contexts(void **state) {
  (void)state;
  int calls = 0;
  check_context(&(moe_context){.num_threads = -1}, MOE_ERROR_INVALID_OPTION, "num_threads");
  check_context(&(moe_context){.schedule = MOE_SCHEDULE_COUNT_}, MOE_ERROR_INVALID_OPTION, "schedule");
  check_context(&(moe_context){.allocate = some_memory, .allocator_user = &calls}, MOE_ERROR_NULL_ARGUMENT, "release");
  check_context(&(moe_context){.release = release_memory}, MOE_ERROR_NULL_ARGUMENT, "allocate");
  assert_int_equal(calls, 0);
}

static void test_allocators(void **state) {
  (void)state;
  int calls = 0;
  moe_context failing = {.allocate = no_memory, .release = release_memory, .allocator_user = &calls};
  check_context(&failing, MOE_ERROR_OUT_OF_MEMORY, "workspace");
  assert_int_equal(calls, 2); /* asked, and nothing released */
  calls = 0;
  moe_context working = {.allocate = some_memory, .release = release_memory, .allocator_user = &calls};
  check_context(&working, MOE_OK, "");
  assert_int_equal(calls, 0); /* all released */
  assert_string_equal(working.message, "");
}

static void test_null_args(void **state) {
  (void)state;
  moe_context ctx = {0};
  assert_int_equal(moe_router_topk_f32(&ctx, NULL), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(moe_router_topk_bwd_bf16(&ctx, NULL), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(moe_router_load_balance_loss(&ctx, NULL), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(moe_router_z_loss(&ctx, NULL), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(moe_route_blocks(&ctx, NULL), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(moe_blockwise_mm_fwd_fp16(&ctx, NULL), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(moe_blockwise_mm_bwd_f32(NULL, NULL), MOE_ERROR_NULL_ARGUMENT);
  assert_non_null(strstr(ctx.message, "args"));
}

static void test_workspace_sizes(void **state) {
  (void)state;
  static const enum problem_op ops[] = {PROBLEM_ROUTER, PROBLEM_ROUTE_BLOCKS, PROBLEM_FORWARD, PROBLEM_BACKWARD,
                                        PROBLEM_ROUTER_BACKWARD};
  struct problem_options o = valid_options(MOE_DTYPE_F32);
  struct problem nothing = {.o = o, .N = 8}; /* "tensors are not read, and may be NULL" */
  moe_context ctx = {0};
  for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
    struct problem_args args;
    size_t bytes = 12345;
    problem_make_args(&nothing, &args);
    if (ops[i] != PROBLEM_ROUTER && ops[i] != PROBLEM_ROUTER_BACKWARD)
      assert_int_equal(problem_workspace_size(ops[i], &ctx, &args, &bytes), MOE_OK);
    assert_int_equal(problem_workspace_size(ops[i], &ctx, &args, NULL), MOE_ERROR_NULL_ARGUMENT);
    assert_non_null(strstr(ctx.message, "bytes"));
    args.router.T = args.route.T = args.forward.layer.T = args.backward.layer.T = args.router_backward.T = -1;
    bytes = 12345;
    assert_int_equal(problem_workspace_size(ops[i], &ctx, &args, &bytes), MOE_ERROR_INVALID_SHAPE);
    assert_int_equal(bytes, 12345);
    args.router.E = args.route.E = args.forward.layer.I = args.backward.layer.I = args.router_backward.E = INT64_MAX;
    args.router.T = args.route.T = args.forward.layer.T = args.backward.layer.T = args.router_backward.T = 6;
    assert_int_equal(problem_workspace_size(ops[i], &ctx, &args, &bytes), MOE_ERROR_OVERFLOW);
    assert_int_equal(bytes, 12345);
  }
}

/* ------------------------------------------------------------------------------------------- arrays, names, counts */

static void assert_error(moe_status status, moe_status expected, const moe_context *ctx, const char *word) {
  assert_int_equal(status, expected);
  assert_int_equal(ctx->status, expected);
  if (strstr(ctx->message, word) == NULL) fail_msg("\"%s\" does not name \"%s\"", ctx->message, word);
}

static void test_arrays(void **state) {
  (void)state;
  moe_context ctx = {0};
  float x[8] = {1, 2, 3, 4, 5, 6, 7, 8}, y[8] = {0};
  uint16_t h[16] = {0};
  float *odd = (float *)(void *)((char *)y + 2);
  assert_error(moe_bf16_from_f32(&ctx, NULL, x, 8), MOE_ERROR_NULL_ARGUMENT, &ctx, "dst");
  assert_error(moe_bf16_from_f32(&ctx, h, NULL, 8), MOE_ERROR_NULL_ARGUMENT, &ctx, "src");
  assert_error(moe_fp16_from_f32(&ctx, h, x, -1), MOE_ERROR_INVALID_SHAPE, &ctx, "n");
  assert_error(moe_fp16_from_f32(&ctx, h, x, INT64_MAX), MOE_ERROR_OVERFLOW, &ctx, "src");
  assert_error(moe_fp16_to_f32(&ctx, odd, h, 4), MOE_ERROR_MISALIGNED, &ctx, "dst");
  const moe_bf16 *odd_half = (const moe_bf16 *)(const void *)((char *)h + 1);
  assert_error(moe_bf16_to_f32(&ctx, y, odd_half, 4), MOE_ERROR_MISALIGNED, &ctx, "src");
  assert_error(moe_f32_from_f32(&ctx, x + 1, x, 4), MOE_ERROR_OVERLAP, &ctx, "dst");
  moe_status status = moe_activation_f32(&ctx, MOE_ACT_COUNT_, 0, x, y, NULL, 8);
  assert_error(status, MOE_ERROR_INVALID_OPTION, &ctx, "activation");
  assert_error(moe_activation_f32(&ctx, MOE_ACT_SILU, NAN, x, y, NULL, 8), MOE_ERROR_INVALID_OPTION, &ctx, "alpha");
  assert_error(moe_activation_f32(&ctx, MOE_ACT_SILU, 0, NULL, y, NULL, 8), MOE_ERROR_NULL_ARGUMENT, &ctx, "x");
  assert_error(moe_activation_f32(&ctx, MOE_ACT_SILU, 0, x, y, NULL, -8), MOE_ERROR_INVALID_SHAPE, &ctx, "n");
  assert_error(moe_activation_f32(&ctx, MOE_ACT_SILU, 0, x, odd, NULL, 4), MOE_ERROR_MISALIGNED, &ctx, "y");
  assert_error(moe_activation_f32(&ctx, MOE_ACT_SILU, 0, x, y, y + 4, 8), MOE_ERROR_OVERLAP, &ctx, "y");
  for (int i = 0; i < 8; i++) assert_true(y[i] == 0.0f && h[i] == 0 && x[i] == (float)(i + 1));
  assert_int_equal(moe_bf16_from_f32(NULL, h, x, 8), MOE_OK);
  assert_int_equal(moe_isa_limit((moe_isa)99), MOE_ERROR_INVALID_OPTION);
}

static void test_names(void **state) {
  (void)state;
  assert_string_equal(moe_status_str(MOE_ERROR_OVERLAP), "MOE_ERROR_OVERLAP");
  assert_string_equal(moe_isa_name(MOE_ISA_AVX512BF16), "avx512bf16");
  assert_string_equal(moe_isa_name((moe_isa)77), "unknown");
  for (int i = -1; i <= 0 MOE_STATUS_LIST(TEST_ONE_); i++) {
    assert_non_null(moe_status_str((moe_status)i));
    assert_non_null(moe_status_text((moe_status)i));
  }
  assert_int_equal(moe_dtype_size(MOE_DTYPE_F32), 4);
  assert_int_equal(moe_dtype_size(MOE_DTYPE_BF16), 2);
  assert_int_equal(moe_dtype_size(MOE_DTYPE_DEFAULT), 0);
  assert_int_equal(moe_dtype_size((moe_dtype)99), 0);
}

/* A token's layer within the device's limits, then each time with one thing that the spec's kernel does not do. */
static void check_limit(const moe_blockwise_mm_fwd_args *args, moe_schedule schedule, const char *word) {
  moe_context ctx = {.schedule = schedule};
  assert_int_equal(moe_blockwise_mm_fwd_bf16(&ctx, args), word ? MOE_ERROR_DEVICE_LIMIT : MOE_OK);
  if (word) assert_non_null(strstr(ctx.message, word));
}

static void test_device_limits(void **state) {
  enum { H = 512, I = 2048, E = 8, B = 256 };
  (void)state;
  moe_bf16 *weight = calloc(3 * E * H * I, sizeof *weight), *x = calloc(2 * H, sizeof *x);
  moe_bf16 *saved = calloc(2 * I * B, sizeof *saved);
  float affinities[E] = {1};
  int32_t ids[2 * B], experts[2] = {0, E}, conditions[2] = {0, 1};
  for (int i = 0; i < 2 * B; i++) ids[i] = i != 0;
  const moe_blockwise_mm_fwd_args valid = {
      .layer = {.T = 1, .H = H, .I = I, .E = E, .N = 1, .B = B, .max_rows = 1, .hidden_states = x,
                .expert_affinities_masked = affinities, .gate_up_proj_weight = weight,
                .down_proj_weight = weight + 2 * E * H * I, .token_position_to_id = ids, .block_to_expert = experts},
      .device = {.check_limits = 1}, .output = x + H};
  moe_blockwise_mm_fwd_args args = valid;
  assert_int_equal(moe_blockwise_mm_fwd_bf16_workspace_size(NULL, &valid, &args.workspace_bytes), MOE_OK);
  args.workspace = malloc(args.workspace_bytes);
  check_limit(&args, MOE_SCHEDULE_PING_PONG, NULL);
  check_limit(&args, MOE_SCHEDULE_HI_LO, "ctx.schedule");
  args.hints = (moe_nkilib_hints){.skip_weight = 1, .pre_scale_delayed = 1};
  check_limit(&args, MOE_SCHEDULE_PING_PONG, NULL); /* of what is not scaled */
  args.layer.config.affinity_mode = MOE_AFFINITY_PRE_SCALE;
  check_limit(&args, MOE_SCHEDULE_PING_PONG, "hints.pre_scale_delayed");
  args.device.spec = MOE_CTE_SHARD_ON_I;
  check_limit(&args, MOE_SCHEDULE_PING_PONG, "hints.skip_weight");
  args.hints.skip_weight = 0;
  check_limit(&args, MOE_SCHEDULE_HI_LO, NULL);
  args.device.spec = MOE_CTE_SHARD_ON_I_HYBRID, args.layer.N = 2, args.layer.conditions = conditions;
  check_limit(&args, MOE_SCHEDULE_PING_PONG, "conditions");
  args.layer.N = 1, args.gate_up_activations_T = saved;
  check_limit(&args, MOE_SCHEDULE_PING_PONG, "gate_up_activations_T");
  args.gate_up_activations_T = NULL, args.scaled_intermediate_checkpoint_T = saved;
  check_limit(&args, MOE_SCHEDULE_PING_PONG, "scaled_intermediate_checkpoint_T");
  args.layer.B = 128;
  check_limit(&args, MOE_SCHEDULE_PING_PONG, "B");
  args.device.check_limits = 0;
  check_limit(&args, MOE_SCHEDULE_PING_PONG, NULL);
  free(weight), free(x), free(saved), free(args.workspace);
}

static void test_blocks_count(void **state) {
  (void)state;
  assert_int_equal(moe_route_blocks_count(0, 4, 2, 4), 0);
  assert_int_equal(moe_route_blocks_count(4, -1, 2, 4), 0);
  assert_int_equal(moe_route_blocks_count(4, 4, 0, 4), 0);
  assert_int_equal(moe_route_blocks_count(4, 4, 2, 0), 0);
  assert_int_equal(moe_route_blocks_count(INT64_MAX, 4, 2, 4), 0);
  assert_int_equal(moe_route_blocks_count(1000, 8, 2, 64), (2000 - 7 + 63) / 64 + 7);
  assert_int_equal(moe_route_blocks_count(1, 8, 2, 64), 2);
  assert_int_equal(moe_route_blocks_count(1, 1, 1, 64), 1);
}

int main(void) {
  static struct CMUnitTest tests[CASES + 16] = {
      cmocka_unit_test(test_contexts),        cmocka_unit_test(test_allocators), cmocka_unit_test(test_null_args),
      cmocka_unit_test(test_workspace_sizes), cmocka_unit_test(test_arrays),     cmocka_unit_test(test_names),
      cmocka_unit_test(test_blocks_count),    cmocka_unit_test(test_device_limits),
  };
  static char names[CASES][96];
  size_t count = 8;
  for (int i = 0; i < CASES; i++) {
    if (error_cases[i].prefix) continue;
    const struct error_case *c = &error_cases[i];
    snprintf(names[i], sizeof names[i], "%s %s (case %d)", c->path, moe_status_str(c->status), i);
    tests[count++] = (struct CMUnitTest){names[i], test_case, NULL, NULL, (void *)(uintptr_t)c};
  }
  return _cmocka_run_group_tests("errors", tests, count, NULL, NULL);
}
