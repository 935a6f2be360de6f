/* test_orders: weights in every order, whole or expert by expert, gate and up together or apart, plain or packed, give
   the bits of the default order, forward and backward; and what no order may be is refused. */
#include "support/extras.h"
#include "support/orders.h"
#include "support/pool.h"
#include "support/problem.h"
#include "support/test.h"

enum { CONFIGURATIONS = 56 };

struct weights {
  struct ordered gate_up, down, gate_up_grad, down_grad;
};

static struct ordered ordered_of(const moe_weight_orders *orders, const struct problem *p, int down, int id) {
  const struct problem_options *o = &p->o;
  struct ordered w = {.order = down ? orders->down : orders->gate_up,
                      .apart = orders->up_apart,
                      .per_expert = orders->per_expert,
                      .E = o->E,
                      .K = down ? o->I : o->H,
                      .parts = down ? 1 : 2,
                      .n = down ? o->H : o->I,
                      .size = p->tensor[id].element};
  ordered_open(&w);
  ordered_copy(&w, p->tensor[id].data, 0);
  return w;
}

static void use_weights(struct problem_args *args, const struct weights *w, const moe_weight_orders *orders,
                        const moe_layer_config *config) {
  moe_blockwise_layer *layers[2] = {&args->forward.layer, &args->backward.layer};
  for (int i = 0; i < 2; i++) {
    moe_blockwise_layer *l = layers[i];
    l->orders = *orders;
    l->gate_up_proj_weight = config->skip_gate && orders->up_apart ? NULL : ordered_tensor(&w->gate_up, 0);
    l->up_proj_weight = orders->up_apart ? ordered_tensor(&w->gate_up, 1) : NULL;
    l->down_proj_weight = ordered_tensor(&w->down, 0);
  }
  args->backward.gate_up_proj_weight_grad = ordered_tensor(&w->gate_up_grad, 0);
  args->backward.up_proj_weight_grad = orders->up_apart ? ordered_tensor(&w->gate_up_grad, 1) : NULL;
  args->backward.down_proj_weight_grad = ordered_tensor(&w->down_grad, 0);
}

#define PACK(name, type, NAME)                                                                      \
  static moe_status pack_##name(moe_context *ctx, const moe_pack_weights_args *a, size_t *bytes) {  \
    return bytes ? moe_pack_weights_##name##_size(ctx, a, bytes) : moe_pack_weights_##name(ctx, a); \
  }
MOE_DTYPE_LIST(PACK)
#undef PACK

static moe_status pack(moe_dtype dtype, moe_context *ctx, const moe_pack_weights_args *a, size_t *bytes) {
  switch (dtype) {
#define PACK_CASE(name, type, NAME) \
  case MOE_DTYPE_##NAME: return pack_##name(ctx, a, bytes);
    MOE_DTYPE_LIST(PACK_CASE)
#undef PACK_CASE
    default: abort();
  }
}

/* Packs a weight in its order; the bytes must be those of the default order. Returns it in a multiple of 64. */
static void *packed_of(const struct problem *p, moe_context *ctx, const struct weights *w,
                       const moe_weight_orders *orders, int down, size_t *bytes) {
  const struct problem_options *o = &p->o;
  moe_pack_weights_args args = {.layout = down                 ? MOE_PACK_DOWN
                                          : o->layer.skip_gate ? MOE_PACK_UP
                                                               : MOE_PACK_GATE_UP,
                                .E = o->E,
                                .rows = down ? o->I : o->H,
                                .columns = down ? o->H : o->I,
                                .weight = p->tensor[down ? PT_DOWN_WEIGHT : PT_GATE_UP_WEIGHT].data};
  assert_int_equal(pack(o->dtype, ctx, &args, bytes), MOE_OK);
  const size_t room = (*bytes + 63) / 64 * 64;
  unsigned char *plain = aligned_alloc(64, room), *own = aligned_alloc(64, room);
  args.packed_bytes = *bytes;
  args.packed = plain;
  assert_int_equal(pack(o->dtype, ctx, &args, NULL), MOE_OK);
  args.packed = own;
  args.orders = *orders;
  args.weight = ordered_tensor(down ? &w->down : &w->gate_up, 0);
  args.up_weight = orders->up_apart && !down ? ordered_tensor(&w->gate_up, 1) : NULL;
  if (args.up_weight && o->layer.skip_gate) args.weight = NULL;
  assert_int_equal(pack(o->dtype, ctx, &args, NULL), MOE_OK);
  assert_memory_equal(plain, own, *bytes);
  free(plain);
  return own;
}

static moe_status run(struct problem_args *args, moe_context *ctx, enum problem_op op) {
  size_t bytes = 0;
  moe_status status = problem_workspace_size(op, ctx, args, &bytes);
  if (status != MOE_OK) return status;
  void *workspace = malloc(bytes);
  memset(workspace, 0xff, bytes);
  problem_set_workspace(op, args, workspace, bytes);
  status = problem_call(op, ctx, args);
  free(workspace);
  return status;
}

/* Copies what the layer writes, to `to` or back. */
static void copy_outputs(const struct problem *p, unsigned char **to, int back) {
  for (int i = 0; i < PT_COUNT; i++) {
    if (!(p->tensor[i].writers & (1u << PROBLEM_FORWARD | 1u << PROBLEM_BACKWARD))) continue;
    const size_t bytes = problem_tensor_bytes(p, i);
    if (!to[i]) to[i] = malloc(bytes ? bytes : 1);
    memcpy(back ? p->tensor[i].data : to[i], back ? to[i] : p->tensor[i].data, bytes);
  }
}

static void check_outputs(const struct problem *p, unsigned char **expected, const moe_weight_orders *orders,
                          const moe_context *ctx) {
  for (int i = 0; i < PT_COUNT; i++) {
    if (!expected[i] || memcmp(expected[i], p->tensor[i].data, problem_tensor_bytes(p, i)) == 0) continue;
    char text[512];
    problem_describe(p, ctx, text, sizeof text);
    fail_msg("%s differs: orders %d %d apart %d per expert %d skip_gate %d | %s", p->tensor[i].name,
             (int)orders->gate_up, (int)orders->down, orders->up_apart, orders->per_expert, p->o.layer.skip_gate, text);
  }
}

/* The layer in other orders, `with_packed` in the forward. Outputs in the problem are those of before. */
static void run_ordered(struct problem *p, moe_context *ctx, const struct extras *extras,
                        const moe_weight_orders *orders, int with_packed) {
  struct weights w = {ordered_of(orders, p, 0, PT_GATE_UP_WEIGHT), ordered_of(orders, p, 1, PT_DOWN_WEIGHT),
                      ordered_of(orders, p, 0, PT_GATE_UP_WEIGHT_GRAD), ordered_of(orders, p, 1, PT_DOWN_WEIGHT_GRAD)};
  struct problem_args args;
  problem_make_args(p, &args);
  extras_give(extras, &args);
  use_weights(&args, &w, orders, &p->o.layer);
  void *packed[2] = {NULL, NULL};
  if (with_packed) {
    moe_blockwise_layer *l = &args.forward.layer;
    l->packed_gate_up_proj_weight = packed[0] = packed_of(p, ctx, &w, orders, 0, &l->packed_gate_up_proj_weight_bytes);
    l->packed_down_proj_weight = packed[1] = packed_of(p, ctx, &w, orders, 1, &l->packed_down_proj_weight_bytes);
    l->gate_up_proj_weight = l->up_proj_weight = l->down_proj_weight = NULL;
  }
  assert_int_equal(run(&args, ctx, PROBLEM_FORWARD), MOE_OK);
  assert_int_equal(run(&args, ctx, PROBLEM_BACKWARD), MOE_OK);
  ordered_copy(&w.gate_up_grad, p->tensor[PT_GATE_UP_WEIGHT_GRAD].data, 1);
  ordered_copy(&w.down_grad, p->tensor[PT_DOWN_WEIGHT_GRAD].data, 1);
  free(packed[0]), free(packed[1]);
  ordered_close(&w.gate_up), ordered_close(&w.down), ordered_close(&w.gate_up_grad), ordered_close(&w.down_grad);
}

static moe_mx_operands random_mx(uint64_t *s) {
  moe_mx_operands mx = {0};
  moe_mx_rounding *each[3] = {&mx.activations, &mx.weights, &mx.gradients};
  for (int i = 0; i < 3; i++)
    *each[i] = (moe_mx_rounding){.enabled = test_random_chance(s, 2),
                                 .element = (moe_element)test_random_range(s, 0, 3),
                                 .cast = MOE_CAST_SATURATE};
  mx.weight_grads = test_random_chance(s, 2);
  return mx;
}

static void check_problem(const struct problem_options *o, uint64_t seed, int orders_count) {
  struct test_pool pool = {.seed = seed};
  moe_context ctx = {
      .num_threads = (int32_t)(seed % 4), .parallel_for = test_serial_parallel_for, .parallel_for_user = &pool};
  unsigned char *before[PT_COUNT] = {NULL}, *expected[PT_COUNT] = {NULL};
  struct problem p;
  assert_true(problem_open(&p, o, NULL, NULL));
  for (int op = 0; op <= PROBLEM_ROUTE_BLOCKS; op++)
    assert_int_equal(problem_run(&p, &ctx, (enum problem_op)op), MOE_OK);
  copy_outputs(&p, before, 0);
  uint64_t s = seed + 7;
  struct extras extras = {.hints = o->hints};
  struct problem_args args;
  if (seed % 2) extras = extras_random(&p, &s);
  problem_make_args(&p, &args);
  extras_give(&extras, &args);
  assert_int_equal(run(&args, &ctx, PROBLEM_FORWARD), MOE_OK);
  assert_int_equal(run(&args, &ctx, PROBLEM_BACKWARD), MOE_OK);
  copy_outputs(&p, expected, 0);
  for (int i = 0; i < orders_count; i++) {
    const moe_weight_orders orders = test_random_orders(&s);
    copy_outputs(&p, before, 1);
    run_ordered(&p, &ctx, &extras, &orders, !o->mx.weights.enabled && test_random_chance(&s, 3));
    check_outputs(&p, expected, &orders, &ctx);
  }
  for (int i = 0; i < PT_COUNT; i++) free(before[i]), free(expected[i]);
  free(extras.scaled);
  problem_close(&p, NULL, NULL);
}

static void same_bits(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  const int64_t cases = test_cases(CONFIGURATIONS, CONFIGURATIONS / 8);
  for (int64_t i = 0; i < cases; i++) {
    if (!test_use_isa((int)(i % TEST_ISA_COUNT))) continue;
    uint64_t s = (uint64_t)i;
    struct problem_options o = problem_options_random((uint64_t)i, dtype);
    if (i % 3 == 1) o.H = test_random_range(&s, 60, 300), o.I = test_random_range(&s, 60, 300), o.T = 24;
    if (i % 5 == 1) o.mx = random_mx(&s);
    problem_options_settle(&o);
    check_problem(&o, (uint64_t)i, 3);
  }
  test_use_best_isa();
}

static void same_bits_of_long_shapes(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (int kind = 0; kind < PROBLEM_LONG_SHAPES && test_use_quick_isa(isa); kind++) {
      if ((kind + isa + (int)dtype) % 5 || (isa == MOE_ISA_SCALAR && kind % 4 != 0)) continue;
      const struct problem_options o = problem_options_long((uint64_t)(kind + isa), dtype, kind);
      check_problem(&o, (uint64_t)kind + 1, 1);
    }
  test_use_best_isa();
}

/* ---------------------------------------------------------------------------------------------------------- refused */

static void expect(moe_status status, const char *begins, moe_context *ctx, struct problem_args *args,
                   enum problem_op op) {
  assert_int_equal(run(args, ctx, op), status);
  if (strncmp(ctx->message, begins, strlen(begins)) != 0) fail_msg("\"%s\" instead of %s", ctx->message, begins);
}

static void refused(void **state) {
  (void)state;
  struct problem_options o = problem_options_random(3, MOE_DTYPE_F32);
  o.E = 3, o.layer.skip_gate = 0, o.dropping = o.device_output_shape = 0;
  problem_options_settle(&o);
  moe_context ctx = {0};
  struct problem p;
  assert_true(problem_open(&p, &o, NULL, NULL));
  for (int op = 0; op <= PROBLEM_FORWARD; op++) assert_int_equal(problem_run(&p, &ctx, (enum problem_op)op), MOE_OK);
  const moe_weight_orders orders = {.up_apart = 1, .per_expert = 1};
  struct weights w = {ordered_of(&orders, &p, 0, PT_GATE_UP_WEIGHT), ordered_of(&orders, &p, 1, PT_DOWN_WEIGHT),
                      ordered_of(&orders, &p, 0, PT_GATE_UP_WEIGHT_GRAD),
                      ordered_of(&orders, &p, 1, PT_DOWN_WEIGHT_GRAD)};
  struct problem_args usual, args;
  problem_make_args(&p, &usual);
  use_weights(&usual, &w, &orders, &o.layer);
#define EXPECT(status, begins, op, ...) \
  args = usual;                         \
  __VA_ARGS__;                          \
  expect(MOE_ERROR_##status, begins, &ctx, &args, PROBLEM_##op)
  EXPECT(INVALID_OPTION, "orders.gate_up", FORWARD, args.forward.layer.orders.gate_up = MOE_ORDER_COUNT_);
  EXPECT(INVALID_OPTION, "orders.down", BACKWARD, args.backward.layer.orders.down = (moe_weight_order)-1);
  EXPECT(INVALID_OPTION, "orders.down", FORWARD, args.forward.layer.orders.down = MOE_ORDER_INTERLEAVED);
  EXPECT(INVALID_OPTION, "orders.up_apart", FORWARD, args.forward.layer.orders.gate_up = MOE_ORDER_INTERLEAVED);
  EXPECT(INVALID_OPTION, "orders.up_apart", FORWARD, args.forward.layer.orders.up_apart = 2);
  EXPECT(INVALID_OPTION, "orders.per_expert", BACKWARD, args.backward.layer.orders.per_expert = 2);
  EXPECT(NULL_ARGUMENT, "up_proj_weight", FORWARD, args.forward.layer.up_proj_weight = NULL);
  EXPECT(NULL_ARGUMENT, "gate_up_proj_weight", BACKWARD, args.backward.layer.gate_up_proj_weight = NULL);
  EXPECT(MISALIGNED, "up_proj_weight", FORWARD,
         args.forward.layer.up_proj_weight = (const char *)args.forward.layer.up_proj_weight + 1);
  void *last = w.down.expert[0][2], *grad = w.down_grad.expert[0][2];
  w.down.expert[0][2] = NULL;
  EXPECT(NULL_ARGUMENT, "down_proj_weight", FORWARD, (void)0);
  w.down.expert[0][2] = (char *)last + 1;
  EXPECT(MISALIGNED, "down_proj_weight", BACKWARD, (void)0);
  w.down.expert[0][2] = grad;
  EXPECT(OVERLAP, "down_proj_weight_grad", BACKWARD, (void)0);
  w.down.expert[0][2] = last;
  w.down_grad.expert[0][2] = NULL;
  EXPECT(NULL_ARGUMENT, "down_proj_weight_grad", BACKWARD, (void)0);
  w.down_grad.expert[0][2] = w.down_grad.expert[0][0];
  EXPECT(OVERLAP, "down_proj_weight_grad", BACKWARD, (void)0);
  w.down_grad.expert[0][2] = grad;
  assert_int_equal(run(&usual, &ctx, PROBLEM_BACKWARD), MOE_OK);
  ordered_close(&w.gate_up), ordered_close(&w.down), ordered_close(&w.gate_up_grad), ordered_close(&w.down_grad);
  problem_close(&p, NULL, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      EACH_DTYPE(same_bits),
      EACH_DTYPE(same_bits_of_long_shapes),
      cmocka_unit_test(refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
