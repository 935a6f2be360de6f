/* test_mlp: moe_matmul_mxfp8, moe_mlp_fwd_mxfp8, moe_mlp_bwd_mxfp8 and its phases against the MLP written out, to the
   bit: every state of operands, checkpoints, transposes given or not, shards; in guarded memory and a workspace of the
   size asked for, full of NaN. */
#include "support/test.h"

#include "support/mlp.h"

/* ------------------------------------------------------------------------------------------------------------- cases */

struct mlp_case {
  moe_mlp_mxfp8 m;
  moe_context ctx;
  struct test_pool pool;
  int64_t number;
  struct mlp_operand x, gate_up, down, dy, x_T, dy_T, gate_T, up_T, down_T;
};

static moe_mxfp8_format random_format(uint64_t *rng) {
  static const moe_element element[] = {MOE_ELEMENT_E4M3FN, MOE_ELEMENT_E5M2, MOE_ELEMENT_E4M3};
  static const moe_mx_layout layout[] = {MOE_MX_LAYOUT_PLAIN, MOE_MX_LAYOUT_NKI_1X32, MOE_MX_LAYOUT_NKI_WRAPX,
                                         MOE_MX_LAYOUT_NKI_WRAPX_WHOLE};
  return (moe_mxfp8_format){element[test_random_range(rng, 0, 2)], test_random_chance(rng, 3),
                            (moe_scale_rule)test_random_range(rng, 0, MOE_SCALE_COUNT_ - 1),
                            layout[test_random_range(rng, 0, 3)]};
}

static moe_layer_config random_config(uint64_t *rng) {
  moe_layer_config c = {.activation = (moe_activation)test_random_range(rng, 0, MOE_ACT_COUNT_ - 1)};
  if (test_random_chance(rng, 2)) c.clamp = (uint32_t)test_random_range(rng, 0, 15);
  c.gate_clamp_upper_limit = 1.3f, c.gate_clamp_lower_limit = -0.9f;
  c.up_clamp_upper_limit = 0.7f, c.up_clamp_lower_limit = -1.1f;
  if (test_random_chance(rng, 3)) c.up_offset = 1.0f;
  if (test_random_chance(rng, 3)) c.alpha = 1.5f;
  return c;
}

static int64_t random_size(uint64_t *rng, const moe_mxfp8_format *f, int64_t most) {
  const int wrapped = f->layout == MOE_MX_LAYOUT_NKI_WRAPX || f->layout == MOE_MX_LAYOUT_NKI_WRAPX_WHOLE;
  const int64_t n = test_random_range(rng, 1, most);
  return wrapped || test_random_chance(rng, 3) ? (n + 31) / 32 * 32 : n;
}

static int random_state(uint64_t *rng, int64_t K) {
  const int state = (int)test_random_range(rng, 0, MLP_STATES - 1);
  return K % 32 != 0 && (state == MLP_SWIZZLED || state == MLP_FP8_SWIZZLED) ? MLP_PLAIN : state;
}

/* An operand in a state of its own; absent, it is what is made of the values of another. */
static struct mlp_operand random_operand(uint64_t *rng, const struct mlp_case *c, const float *values, int64_t F,
                                         int64_t K, int given) {
  const int state = given ? random_state(rng, K) : MLP_PLAIN;
  struct mlp_operand o = mlp_operand(&c->m.format, values, F, K, state, (moe_mx_scales)test_random_range(rng, 0, 3));
  if (!given) o.given.data = NULL;
  return o;
}

static struct mlp_operand random_transpose(uint64_t *rng, const struct mlp_case *c, const struct mlp_operand *of,
                                           int given) {
  return random_operand(rng, c, mlp_transposed(of->values, of->F, of->K), of->K, of->F, given);
}

/* Threads, and an instruction set, by the case's number. */
static void open_context(struct mlp_case *c, uint64_t *rng) {
  static const int32_t threads[] = {1, 2, 3, 7, 16};
  c->pool.seed = test_random(rng);
  c->ctx = (moe_context){.parallel_for = test_pool_parallel_for, .parallel_for_user = &c->pool};
  c->ctx.num_threads = threads[test_random_range(rng, 0, 4)];
  c->ctx.schedule = (moe_schedule)test_random_range(rng, 0, MOE_SCHEDULE_COUNT_ - 1);
  if (!test_use_isa((int)(c->number % TEST_ISA_COUNT))) test_use_best_isa();
}

static void open_case(struct mlp_case *c, uint64_t *rng, int64_t number, int64_t most) {
  memset(c, 0, sizeof *c);
  c->number = number;
  c->m.format = random_format(rng);
  c->m.config = random_config(rng);
  c->m.unrounded_gate_act = test_random_chance(rng, 3);
  c->m.hints = (moe_mlp_hints){{{8, 1, 8}, {8, 1, 8}, {0, 0, 0}, {4, 1, 8}, {4, 1, 8}}, 1, 1, 1};
  const int64_t S = c->m.S = random_size(rng, &c->m.format, most), H = c->m.H = random_size(rng, &c->m.format, most);
  const int64_t I = c->m.I = random_size(rng, &c->m.format, most);
  c->x = random_operand(rng, c, mlp_values(rng, S * H, 1.0f), S, H, 1);
  c->dy = random_operand(rng, c, mlp_values(rng, S * H, 1.0f), S, H, 1);
  c->gate_up = random_operand(rng, c, mlp_values(rng, 2 * I * H, 0.3f), 2 * I, H, 1);
  c->down = random_operand(rng, c, mlp_values(rng, H * I, 0.3f), H, I, 1);
  struct mlp_operand gate = c->gate_up, up = c->gate_up;
  gate.F = up.F = I, up.values += I * H;
  c->gate_T = random_transpose(rng, c, &gate, test_random_chance(rng, 2));
  c->up_T = random_transpose(rng, c, &up, test_random_chance(rng, 2));
  c->down_T = random_transpose(rng, c, &c->down, test_random_chance(rng, 2));
  c->x_T = random_transpose(rng, c, &c->x, test_random_chance(rng, 2));
  c->dy_T = random_transpose(rng, c, &c->dy, test_random_chance(rng, 2));
  open_context(c, rng);
}

static void close_case(void) {
  mlp_release();
  test_use_best_isa();
}

static void fail_case(const struct mlp_case *c, const char *what, int64_t at) {
  const moe_mxfp8_format *f = &c->m.format;
  fail_msg(
      "%s: element %lld, %s\nrepro: case=%lld S=%lld H=%lld I=%lld element=%d rule=%d/%d layout=%d act=%d clamp=%u "
      "isa=%s threads=%d",
      what, (long long)at, c->ctx.message, (long long)c->number, (long long)c->m.S, (long long)c->m.H,
      (long long)c->m.I, (int)f->element, f->use_scale_rule, (int)f->scale_rule, (int)f->layout,
      (int)c->m.config.activation, c->m.config.clamp, moe_isa_name(moe_isa_active()), (int)c->ctx.num_threads);
}

static void expect_bf16(const struct mlp_case *c, const char *what, const void *is, const float *wanted, int64_t n) {
  const moe_bf16 *x = (const moe_bf16 *)is;
  for (int64_t i = 0; i < n; i++) {
    moe_bf16 y;
    assert_int_equal(moe_bf16_from_f32(NULL, &y, wanted + i, 1), MOE_OK);
    if (x[i] != y) fail_case(c, what, i);
  }
}

/* Calls a function in exactly the workspace that it asks for. */
#define CALL(c, function, args)                                                                     \
  do {                                                                                              \
    size_t bytes_ = 0;                                                                              \
    (args)->workspace = NULL, (args)->workspace_bytes = 0;                                          \
    if (function##_workspace_size(&(c)->ctx, args, &bytes_) != MOE_OK) fail_case(c, #function, -1); \
    (args)->workspace = mlp_guarded(bytes_, 0xff), (args)->workspace_bytes = bytes_;                \
    protect(PROT_READ);                                                                             \
    (void)guard_protect(&mlp_memory.guarded[mlp_memory.guarded_count - 1], PROT_READ | PROT_WRITE); \
    const moe_status status_ = function(&(c)->ctx, args);                                           \
    if (status_ != MOE_OK) fail_case(c, #function, -1);                                             \
  } while (0)

/* Inputs are those that are guarded so far, when the first output is taken. */
static int inputs;
static void protect(int protection) {
  for (int i = 0; i < inputs; i++) (void)guard_protect(&mlp_memory.guarded[i], protection);
}

static void *output_bytes(int64_t n, int64_t size) { return mlp_guarded((size_t)(n * size), 0xff); }

/* ----------------------------------------------------------------------------------------------------------- product */

static void test_matmul(void **state) {
  (void)state;
  uint64_t rng = 71;
  for (int64_t i = 0; i < test_cases(160, 24); i++) {
    struct mlp_case c = {.number = i};
    c.m.format = random_format(&rng);
    const int64_t M = random_size(&rng, &c.m.format, i % 8 == 1 ? 400 : 70);
    const int64_t N = random_size(&rng, &c.m.format, i % 8 == 2 ? 400 : 140);
    const int64_t K = random_size(&rng, &c.m.format, i % 4 == 3 ? 1500 : 150);
    c.m.S = M, c.m.I = N, c.m.H = K;
    const struct mlp_operand a = random_operand(&rng, &c, mlp_values(&rng, M * K, 1.0f), M, K, 1);
    const struct mlp_operand b = random_operand(&rng, &c, mlp_values(&rng, N * K, 1.0f), N, K, 1);
    const float *wanted = mlp_product(a.rounded, M, b.rounded, N, K);
    inputs = mlp_memory.guarded_count;
    open_context(&c, &rng);
    moe_matmul_mxfp8_args args = {.M = M, .N = N, .K = K, .format = c.m.format, .a = a.given, .b = b.given};
    args.output_dtype = i % 2 ? MOE_DTYPE_F32 : MOE_DTYPE_DEFAULT;
    args.output = output_bytes(M * N, i % 2 ? 4 : 2);
    CALL(&c, moe_matmul_mxfp8, &args);
    if (i % 2 == 0) expect_bf16(&c, "output", args.output, wanted, M * N);
    for (int64_t j = 0; j < M * N && i % 2; j++)
      if (((const float *)args.output)[j] != wanted[j]) fail_case(&c, "output", j);
    close_case();
  }
}

/* ----------------------------------------------------------------------------------------------------------- forward */

static struct mlp_oracle forward_oracle(const struct mlp_case *c) {
  struct mlp_oracle o = {0};
  mlp_oracle_products(&c->m, &c->x, &c->gate_up, &o);
  mlp_oracle_unit(&c->m, &o);
  o.output = mlp_product(mlp_rounded(&c->m.format, c->m.format.layout, o.hidden, c->m.S, c->m.I), c->m.S,
                         c->down.rounded, c->m.H, c->m.I);
  return o;
}

static moe_mlp_fwd_mxfp8_args forward_args(const struct mlp_case *c) {
  return (moe_mlp_fwd_mxfp8_args){.mlp = c->m,
                                  .hidden_states = c->x.given,
                                  .gate_up_weights = c->gate_up.given,
                                  .down_weight = c->down.given,
                                  .output = output_bytes(c->m.S * c->m.H, 2)};
}

static void test_forward(void **state) {
  (void)state;
  uint64_t rng = 72;
  for (int64_t i = 0; i < test_cases(120, 20); i++) {
    struct mlp_case c;
    open_case(&c, &rng, i, i % 10 == 0 ? 300 : 70);
    const int64_t n = c.m.S * c.m.I;
    const struct mlp_oracle o = forward_oracle(&c);
    inputs = mlp_memory.guarded_count;
    moe_mlp_fwd_mxfp8_args args = forward_args(&c);
    const int saved = (int)test_random_range(&rng, 0, 15);
    if (saved & 1) args.gate_pre = output_bytes(n, 2);
    if (saved & 2) args.gate_act = output_bytes(n, 2);
    if (saved & 4) args.up = output_bytes(n, 2);
    if (saved & 8) args.hidden = output_bytes(n, 2);
    CALL(&c, moe_mlp_fwd_mxfp8, &args);
    if (saved & 1) expect_bf16(&c, "gate_pre", args.gate_pre, o.gate_pre, n);
    if (saved & 2) expect_bf16(&c, "gate_act", args.gate_act, o.gate_act, n);
    if (saved & 4) expect_bf16(&c, "up", args.up, o.up, n);
    if (saved & 8) expect_bf16(&c, "hidden", args.hidden, o.hidden, n);
    expect_bf16(&c, "output", args.output, o.output, c.m.S * c.m.H);
    close_case();
  }
}

/* ---------------------------------------------------------------------------------------------------------- backward */

/* What is in o already is a checkpoint; hidden_T NULL: it is not given. */
static void backward_oracle(const struct mlp_case *c, const struct mlp_operand *hidden_T, struct mlp_oracle *o) {
  const moe_mxfp8_format *f = &c->m.format;
  const int64_t S = c->m.S, H = c->m.H, I = c->m.I;
  mlp_oracle_products(&c->m, &c->x, &c->gate_up, o);
  mlp_oracle_unit(&c->m, o);
  mlp_oracle_grads(&c->m, mlp_product(c->dy.rounded, S, c->down_T.rounded, I, H), o);
  const float *dg = mlp_rounded(f, f->layout, o->d_gate, S, I), *du = mlp_rounded(f, f->layout, o->d_up, S, I);
  o->hidden_grad =
      mlp_product(mlp_joined(dg, du, S, I), S, mlp_joined(c->gate_T.rounded, c->up_T.rounded, H, I), H, 2 * I);
  o->gate_up_grad = mlp_product(mlp_rounded(f, f->layout, o->d_gate_up_T, 2 * I, S), 2 * I, c->x_T.rounded, H, S);
  const float *hidden = hidden_T ? hidden_T->rounded : mlp_rounded(f, f->layout, mlp_transposed(o->hidden, S, I), I, S);
  o->down_grad = mlp_product(c->dy_T.rounded, H, hidden, I, S);
}

static moe_mlp_bwd_mxfp8_args backward_args(const struct mlp_case *c) {
  const int64_t S = c->m.S, H = c->m.H, I = c->m.I;
  moe_mlp_bwd_mxfp8_args args = {.mlp = c->m,
                                 .output_grad = c->dy.given,
                                 .hidden_states = c->x.given,
                                 .gate_up_weights = c->gate_up.given,
                                 .gate_weight_T = c->gate_T.given,
                                 .up_weight_T = c->up_T.given,
                                 .down_weight = c->down.given,
                                 .down_weight_T = c->down_T.given,
                                 .hidden_states_T = c->x_T.given,
                                 .output_grad_T = c->dy_T.given};
  args.hidden_states_grad = output_bytes(S * H, 2);
  args.gate_up_weight_grad = output_bytes(2 * I * H, 2);
  args.down_weight_grad = output_bytes(H * I, 2);
  return args;
}

static void expect_grads(const struct mlp_case *c, const moe_mlp_bwd_mxfp8_args *args, const struct mlp_oracle *o) {
  const int64_t S = c->m.S, H = c->m.H, I = c->m.I;
  if (args->hidden_states_grad) expect_bf16(c, "hidden_states_grad", args->hidden_states_grad, o->hidden_grad, S * H);
  if (args->gate_up_weight_grad)
    expect_bf16(c, "gate_up_weight_grad", args->gate_up_weight_grad, o->gate_up_grad, 2 * I * H);
  if (args->down_weight_grad) expect_bf16(c, "down_weight_grad", args->down_weight_grad, o->down_grad, H * I);
  if (args->d_gate) expect_bf16(c, "d_gate", args->d_gate, o->d_gate, S * I);
  if (args->d_up) expect_bf16(c, "d_up", args->d_up, o->d_up, S * I);
  if (args->d_gate_up_T) expect_bf16(c, "d_gate_up_T", args->d_gate_up_T, o->d_gate_up_T, 2 * I * S);
  if (args->gate_pre_scratch && !args->gate_pre) expect_bf16(c, "gate_pre", args->gate_pre_scratch, o->gate_pre, S * I);
  if (args->gate_act_scratch && !args->gate_act) expect_bf16(c, "gate_act", args->gate_act_scratch, o->gate_act, S * I);
  if (args->up_scratch && !args->up) expect_bf16(c, "up", args->up_scratch, o->up, S * I);
  if (args->hidden_scratch && !args->hidden) expect_bf16(c, "hidden", args->hidden_scratch, o->hidden, S * I);
}

static void take_scratch(const struct mlp_case *c, uint64_t *rng, moe_mlp_bwd_mxfp8_args *args) {
  void **scratch[] = {&args->gate_pre_scratch, &args->gate_act_scratch, &args->up_scratch,
                      &args->hidden_scratch,   &args->d_gate,           &args->d_up,
                      &args->d_gate_up_T};
  for (int i = 0; i < 7; i++)
    if (test_random_chance(rng, 2)) *scratch[i] = output_bytes((i == 6 ? 2 : 1) * c->m.S * c->m.I, 2);
}

/* Any checkpoints, of any values; any transposes, any states, any scratch tensors, any results. */
static void test_backward(void **state) {
  (void)state;
  uint64_t rng = 73;
  for (int64_t i = 0; i < test_cases(200, 24); i++) {
    struct mlp_case c;
    open_case(&c, &rng, i, i % 10 == 0 ? 300 : 70);
    const int64_t n = c.m.S * c.m.I;
    struct mlp_oracle o = {0};
    if (test_random_chance(&rng, 2)) o.gate_pre = mlp_values(&rng, n, 1.5f);
    if (test_random_chance(&rng, 2)) o.gate_act = mlp_values(&rng, n, 1.5f);
    if (test_random_chance(&rng, 2)) o.up = mlp_values(&rng, n, 1.5f);
    if (test_random_chance(&rng, 2)) o.hidden = mlp_values(&rng, n, 1.5f);
    const moe_bf16 *gate_pre = o.gate_pre ? mlp_bf16(o.gate_pre, n) : NULL;
    const moe_bf16 *gate_act = o.gate_act ? mlp_bf16(o.gate_act, n) : NULL, *up = o.up ? mlp_bf16(o.up, n) : NULL;
    const moe_bf16 *hidden = o.hidden ? mlp_bf16(o.hidden, n) : NULL;
    struct mlp_operand hidden_T =
        random_operand(&rng, &c, mlp_values(&rng, n, 1.0f), c.m.I, c.m.S, test_random_chance(&rng, 3));
    backward_oracle(&c, hidden_T.given.data ? &hidden_T : NULL, &o);
    inputs = mlp_memory.guarded_count;
    moe_mlp_bwd_mxfp8_args args = backward_args(&c);
    args.gate_pre = gate_pre, args.gate_act = gate_act, args.up = up, args.hidden = hidden;
    args.hidden_T = hidden_T.given;
    take_scratch(&c, &rng, &args);
    if (test_random_chance(&rng, 5)) args.hidden_states_grad = NULL;
    if (test_random_chance(&rng, 5)) args.gate_up_weight_grad = NULL;
    if (test_random_chance(&rng, 5)) args.down_weight_grad = NULL;
    CALL(&c, moe_mlp_bwd_mxfp8, &args);
    expect_grads(&c, &args, &o);
    close_case();
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_matmul), cmocka_unit_test(test_forward),
                                     cmocka_unit_test(test_backward)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
