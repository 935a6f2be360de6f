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

/* ------------------------------------------------------------------------------------------- checkpoints, shards */

/* What the forward saves is what the backward computes: the same gradients with any of the four, and with none. */
static void test_checkpoints(void **state) {
  (void)state;
  uint64_t rng = 74;
  for (int64_t i = 0; i < test_cases(8, 2); i++) {
    struct mlp_case c;
    open_case(&c, &rng, i, 70);
    c.m.unrounded_gate_act = 0;
    const int64_t n = c.m.S * c.m.I;
    struct mlp_oracle o = {0};
    backward_oracle(&c, NULL, &o);
    inputs = 0;
    moe_mlp_fwd_mxfp8_args forward = forward_args(&c);
    forward.gate_pre = output_bytes(n, 2), forward.gate_act = output_bytes(n, 2);
    forward.up = output_bytes(n, 2), forward.hidden = output_bytes(n, 2);
    CALL(&c, moe_mlp_fwd_mxfp8, &forward);
    for (int given = 0; given < 16; given++) {
      moe_mlp_bwd_mxfp8_args args = backward_args(&c);
      args.gate_pre = given & 1 ? forward.gate_pre : NULL, args.gate_act = given & 2 ? forward.gate_act : NULL;
      args.up = given & 4 ? forward.up : NULL, args.hidden = given & 8 ? forward.hidden : NULL;
      CALL(&c, moe_mlp_bwd_mxfp8, &args);
      expect_grads(&c, &args, &o);
    }
    close_case();
  }
}

/* Rows of shard number `shard` of `rows`. */
static void set_shard(moe_mlp_bwd_mxfp8_args *args, int64_t shards, int64_t shard, int64_t rows) {
  assert_int_equal(moe_program_sharding_info(NULL, shards, shard, rows, &args->row_base, &args->row_count), MOE_OK);
}

#define CALL_SHARDS(c, function, args, shards, rows)      \
  for (int64_t shard_ = 0; shard_ < (shards); shard_++) { \
    set_shard(args, shards, ((shards)-1) - shard_, rows); \
    CALL(c, function, args);                              \
  }

/* The backward phase by phase, each by so many shards, the last one first. */
static void test_shards(void **state) {
  static const int64_t all[] = {1, 2, 3, 8};
  (void)state;
  uint64_t rng = 75;
  for (int64_t i = 0; i < test_cases(48, 8); i++) {
    const int64_t shards = all[i % 4];
    struct mlp_case c;
    open_case(&c, &rng, i, i % 8 == 0 ? 200 : 50);
    const int64_t S = c.m.S, H = c.m.H, I = c.m.I, n = S * I;
    struct mlp_oracle o = {0};
    backward_oracle(&c, NULL, &o);
    o.output = forward_oracle(&c).output;
    inputs = mlp_memory.guarded_count;
    moe_mlp_fwd_mxfp8_args forward = forward_args(&c);
    for (int64_t shard = 0; shard < shards; shard++) {
      assert_int_equal(moe_program_sharding_info(NULL, shards, shard, S, &forward.row_base, &forward.row_count),
                       MOE_OK);
      CALL(&c, moe_mlp_fwd_mxfp8, &forward);
    }
    expect_bf16(&c, "output", forward.output, o.output, S * H);
    moe_mlp_bwd_mxfp8_args args = backward_args(&c);
    args.gate_pre_scratch = output_bytes(n, 2), args.up_scratch = output_bytes(n, 2);
    if (i % 3 == 0) args.gate_act_scratch = output_bytes(n, 2);
    if (i % 3 == 1) args.hidden_scratch = output_bytes(n, 2);
    CALL_SHARDS(&c, moe_mlp_bwd_mxfp8_recompute, &args, shards, S);
    args.gate_pre = args.gate_pre_scratch, args.up = args.up_scratch;
    if (!c.m.unrounded_gate_act) args.gate_act = args.gate_act_scratch;
    args.hidden = args.hidden_scratch;
    args.d_gate = output_bytes(n, 2), args.d_up = output_bytes(n, 2);
    if (i % 2) args.d_gate_up_T = output_bytes(2 * n, 2);
    CALL_SHARDS(&c, moe_mlp_bwd_mxfp8_phase1, &args, shards, S);
    CALL_SHARDS(&c, moe_mlp_bwd_mxfp8_phase2, &args, shards, S);
    CALL_SHARDS(&c, moe_mlp_bwd_mxfp8_phase3, &args, shards, 2 * I);
    CALL_SHARDS(&c, moe_mlp_bwd_mxfp8_phase4, &args, shards, H);
    expect_grads(&c, &args, &o);
    close_case();
  }
}

static void test_sharding_info(void **state) {
  moe_context ctx = {0};
  int64_t base, count, next = 0;
  (void)state;
  for (int64_t shard = 0; shard < 8; shard++, next += count) {
    assert_int_equal(moe_program_sharding_info(&ctx, 8, shard, 13, &base, &count), MOE_OK);
    assert_int_equal(base, next);
    assert_true(count == 1 || count == 2);
  }
  assert_int_equal(next, 13);
  assert_int_equal(moe_program_sharding_info(&ctx, 0, 0, 13, &base, &count), MOE_ERROR_INVALID_SHAPE);
  assert_int_equal(moe_program_sharding_info(&ctx, 2, 0, -1, &base, &count), MOE_ERROR_INVALID_SHAPE);
  assert_int_equal(moe_program_sharding_info(&ctx, 2, 2, 13, &base, &count), MOE_ERROR_INVALID_INDEX);
  assert_int_equal(moe_program_sharding_info(&ctx, 2, -1, 13, &base, &count), MOE_ERROR_INVALID_INDEX);
  assert_string_equal(ctx.message, "shard is outside [0,num_shards)");
  assert_int_equal(moe_program_sharding_info(&ctx, 2, 1, 13, NULL, &count), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(moe_program_sharding_info(&ctx, 2, 1, 13, &base, NULL), MOE_ERROR_NULL_ARGUMENT);
}

/* ------------------------------------------------------------------------------------------------- the MoE layer */

/* One expert that has every token, with operands rounded alike: the same gradients. */
static void test_layer(void **state) {
  (void)state;
  uint64_t rng = 76;
  for (int64_t i = 0; i < test_cases(24, 4); i++) {
    struct mlp_case c = {.number = i};
    c.m = (moe_mlp_mxfp8){.S = test_random_range(&rng, 1, 90), .H = test_random_range(&rng, 1, 90)};
    c.m.I = test_random_range(&rng, 1, 90);
    c.m.format.element = test_random_chance(&rng, 2) ? MOE_ELEMENT_E5M2 : MOE_ELEMENT_E4M3FN;
    c.m.config = random_config(&rng);
    c.m.unrounded_gate_act = 1;
    const int64_t S = c.m.S, H = c.m.H, I = c.m.I;
    const float *gate_up = mlp_values(&rng, 2 * I * H, 0.3f), *down = mlp_values(&rng, H * I, 0.3f);
    c.x = random_operand(&rng, &c, mlp_values(&rng, S * H, 1.0f), S, H, 1);
    c.dy = random_operand(&rng, &c, mlp_values(&rng, S * H, 1.0f), S, H, 1);
    c.x.given = (moe_mxfp8_operand){mlp_bf16(c.x.values, S * H), NULL, 0, MOE_MX_SCALES_OWN};
    c.dy.given = (moe_mxfp8_operand){mlp_bf16(c.dy.values, S * H), NULL, 0, MOE_MX_SCALES_OWN};
    c.gate_up.given.data = mlp_bf16(gate_up, 2 * I * H), c.down.given.data = mlp_bf16(down, H * I);
    const float *g = mlp_values(&rng, S * I, 1.5f), *u = mlp_values(&rng, S * I, 1.5f);
    float *checkpoint = mlp_floats(2 * S * I), *affinity = mlp_floats(S);
    int32_t *ids = (int32_t *)(void *)mlp_floats(S), expert = 0;
    memcpy(checkpoint, mlp_transposed(g, S, I), (size_t)(S * I) * sizeof *g);
    memcpy(checkpoint + S * I, mlp_transposed(u, S, I), (size_t)(S * I) * sizeof *u);
    for (int64_t t = 0; t < S; t++) ids[t] = (int32_t)t, affinity[t] = 1.0f;
    open_context(&c, &rng);
    inputs = 0;
    const moe_mx_rounding rounding = {1, c.m.format.element, MOE_SCALE_NKI_ALT, MOE_CAST_SATURATE};
    moe_blockwise_mm_bwd_args layer = {
        .layer = {.T = S,
                  .H = H,
                  .I = I,
                  .E = 1,
                  .N = 1,
                  .B = S,
                  .hidden_states = c.x.given.data,
                  .expert_affinities_masked = affinity,
                  .token_position_to_id = ids,
                  .block_to_expert = &expert,
                  .gate_up_proj_weight = mlp_bf16(mlp_transposed(gate_up, 2 * I, H), 2 * I * H),
                  .down_proj_weight = mlp_bf16(mlp_transposed(down, H, I), H * I),
                  .config = c.m.config,
                  .mx = {rounding, rounding, rounding, 1, MOE_MX_LAYOUT_PLAIN}},
        .gate_up_activations_T = mlp_bf16(checkpoint, 2 * S * I),
        .output_hidden_states_grad = c.dy.given.data,
        .hidden_states_grad = output_bytes(S * H, 2),
        .gate_up_proj_weight_grad = output_bytes(2 * I * H, 2),
        .down_proj_weight_grad = output_bytes(I * H, 2)};
    CALL(&c, moe_blockwise_mm_bwd_bf16, &layer);
    moe_mlp_bwd_mxfp8_args args = backward_args(&c);
    args.gate_pre = mlp_bf16(g, S * I), args.up = mlp_bf16(u, S * I);
    CALL(&c, moe_mlp_bwd_mxfp8, &args);
    struct mlp_oracle o = {.hidden_grad = mlp_floats(S * H)};
    float *wgu = mlp_floats(2 * I * H), *wd = mlp_floats(I * H);
    assert_int_equal(moe_bf16_to_f32(NULL, o.hidden_grad, (const moe_bf16 *)layer.hidden_states_grad, S * H), MOE_OK);
    assert_int_equal(moe_bf16_to_f32(NULL, wgu, (const moe_bf16 *)layer.gate_up_proj_weight_grad, 2 * I * H), MOE_OK);
    assert_int_equal(moe_bf16_to_f32(NULL, wd, (const moe_bf16 *)layer.down_proj_weight_grad, I * H), MOE_OK);
    o.gate_up_grad = mlp_transposed(wgu, H, 2 * I), o.down_grad = mlp_transposed(wd, I, H);
    expect_grads(&c, &args, &o);
    close_case();
  }
}

/* ------------------------------------------------------------------------------------------------------------ errors */

static moe_context error_ctx;
static void expect_error(moe_status is, moe_status wanted, const char *message) {
  assert_string_equal(error_ctx.message, message);
  assert_int_equal(is, wanted);
}

#define REFUSED(change, status, message)                                             \
  do {                                                                               \
    moe_mlp_bwd_mxfp8_args args = valid;                                             \
    change;                                                                          \
    expect_error(moe_mlp_bwd_mxfp8(&error_ctx, &args), MOE_ERROR_##status, message); \
  } while (0)

static void test_errors(void **state) {
  static moe_bf16 t[16][64 * 64], out[6][64 * 64];
  static uint8_t scales[64 * 2 + 1];
  static char workspace[1 << 22];
  moe_mlp_bwd_mxfp8_args valid = {.mlp = {.S = 32, .H = 32, .I = 32},
                                  .output_grad = {.data = t[0]},
                                  .hidden_states = {.data = t[1]},
                                  .gate_up_weights = {.data = t[2]},
                                  .down_weight = {.data = t[3]},
                                  .hidden_states_grad = out[0],
                                  .gate_up_weight_grad = out[1],
                                  .down_weight_grad = out[2],
                                  .workspace = workspace,
                                  .workspace_bytes = sizeof workspace};
  (void)state;
  memset(out, 0x5a, sizeof out);
  REFUSED(args.mlp.S = -1, INVALID_SHAPE, "S must be at least 1");
  REFUSED(args.mlp.H = (int64_t)1 << 31, OVERFLOW, "H does not fit in 32-bit ids");
  REFUSED(args.mlp.I = -3, INVALID_SHAPE, "I must be at least 1");
  REFUSED(args.mlp.format.element = MOE_ELEMENT_E2M1, INVALID_OPTION, "format.element must have 8 bits");
  REFUSED(args.mlp.format.element = (moe_element)9, INVALID_OPTION, "format.element is not one of its enum's values");
  REFUSED(args.mlp.format.use_scale_rule = 2, INVALID_OPTION, "format.use_scale_rule must be 0 or 1");
  REFUSED((args.mlp.format.use_scale_rule = 1, args.mlp.format.scale_rule = (moe_scale_rule)9), INVALID_OPTION,
          "format.scale_rule is not one of its enum's values");
  REFUSED(args.mlp.format.layout = MOE_MX_LAYOUT_GGML, INVALID_OPTION,
          "format.layout must be PLAIN, NKI_WRAPX, its WHOLE or NKI_1X32");
  REFUSED((args.mlp.format.layout = MOE_MX_LAYOUT_NKI_WRAPX, args.mlp.S = 33), INVALID_SHAPE,
          "S must be a multiple of 32 in this layout");
  REFUSED(args.mlp.config.skip_gate = 1, INVALID_OPTION, "config.skip_gate must be 0 in an MLP");
  REFUSED(args.mlp.config.affinity_mode = MOE_AFFINITY_ON_I, INVALID_OPTION,
          "config.affinity_mode must be 0: an MLP has no affinities");
  REFUSED(args.mlp.config.clamp = 32, INVALID_OPTION, "config.clamp has bits that are no MOE_CLAMP_* flag");
  REFUSED(args.mlp.unrounded_gate_act = 2, INVALID_OPTION, "unrounded_gate_act must be 0 or 1");
  REFUSED(args.mlp.hints.spill_reload = -1, INVALID_OPTION, "hints.spill_reload must be 0 or 1");
  REFUSED(args.mlp.hints.use_scale_packing = 2, INVALID_OPTION, "hints.use_scale_packing must be 0 or 1");
  REFUSED(args.mlp.hints.run_with_lnc2 = 2, INVALID_OPTION, "hints.run_with_lnc2 must be 0 or 1");
  REFUSED(args.mlp.hints.tiles[4][2] = -1, INVALID_SHAPE, "hints.tiles has a negative count");
  REFUSED(args.row_count = 1, INVALID_SHAPE, "row_base and row_count must be 0: the phases take them");
  REFUSED(args.weight_grad_dtype = (moe_dtype)9, INVALID_OPTION, "weight_grad_dtype is not one of its enum's values");
  REFUSED(args.accumulate = MOE_ACCUMULATE_DW, INVALID_OPTION, "accumulate has bits that name no output of this call");
  REFUSED(args.output_grad.data = NULL, NULL_ARGUMENT, "output_grad is NULL");
  REFUSED(args.hidden_states.data = NULL, NULL_ARGUMENT, "hidden_states is NULL");
  REFUSED(args.gate_up_weights.data = NULL, NULL_ARGUMENT, "gate_up_weights is NULL");
  REFUSED(args.down_weight.data = NULL, NULL_ARGUMENT, "down_weight is NULL");
  REFUSED(args.output_grad.is_swizzled = 1, INVALID_OPTION, "output_grad cannot be swizzled under format.layout PLAIN");
  REFUSED(args.output_grad.is_swizzled = 2, INVALID_OPTION, "output_grad must be 0 or 1");
  REFUSED((args.mlp.format.layout = MOE_MX_LAYOUT_NKI_1X32, args.mlp.H = 31, args.down_weight_T.is_swizzled = 1),
          INVALID_SHAPE, "down_weight_T is swizzled, and its rows must be a multiple of 32");
  REFUSED((args.output_grad.scales = scales, args.output_grad.scales_layout = MOE_MX_SCALES_NKI_PACKED), INVALID_OPTION,
          "output_grad.scales is not a placement of scales in that layout");
  REFUSED((args.mlp.format.layout = MOE_MX_LAYOUT_NKI_WRAPX, args.hidden_states.is_swizzled = 1,
           args.hidden_states.scales = scales, args.hidden_states.data = (const char *)t[1] + 2),
          MISALIGNED, "hidden_states is not aligned to its element type");
  REFUSED(args.gate_pre = (const char *)t[5] + 1, MISALIGNED, "gate_pre is not aligned to its element type");
  REFUSED(args.d_gate = out[0], OVERLAP, "d_gate overlaps another tensor of this call");
  REFUSED(args.hidden_states_grad = t[1], OVERLAP, "hidden_states_grad overlaps another tensor of this call");
  REFUSED(args.workspace = NULL, WORKSPACE, "workspace is NULL and the context has no allocator");
  REFUSED(args.workspace_bytes = 100, WORKSPACE, "workspace_bytes is smaller than the workspace_size function says");
  moe_mlp_bwd_mxfp8_args args = valid;
  expect_error(moe_mlp_bwd_mxfp8_phase1(&error_ctx, &args), MOE_ERROR_NULL_ARGUMENT, "gate_pre is NULL");
  args.gate_pre = t[5], args.up = t[6];
  expect_error(moe_mlp_bwd_mxfp8_phase1(&error_ctx, &args), MOE_ERROR_NULL_ARGUMENT, "d_gate is NULL");
  expect_error(moe_mlp_bwd_mxfp8_phase2(&error_ctx, &args), MOE_ERROR_NULL_ARGUMENT, "d_gate is NULL");
  expect_error(moe_mlp_bwd_mxfp8_phase3(&error_ctx, &args), MOE_ERROR_NULL_ARGUMENT, "d_gate is NULL");
  args.up = NULL;
  expect_error(moe_mlp_bwd_mxfp8_phase4(&error_ctx, &args), MOE_ERROR_NULL_ARGUMENT, "up is NULL");
  args.up = t[6], args.down_weight_grad = NULL;
  expect_error(moe_mlp_bwd_mxfp8_phase4(&error_ctx, &args), MOE_ERROR_NULL_ARGUMENT, "down_weight_grad is NULL");
  args.row_base = 33;
  expect_error(moe_mlp_bwd_mxfp8_phase4(&error_ctx, &args), MOE_ERROR_INVALID_SHAPE,
               "row_base and row_count are no rows of the result");
  for (size_t i = 0; i < sizeof out / 2; i++) assert_int_equal(((const moe_bf16 *)out)[i], 0x5a5a);
  assert_int_equal(moe_mlp_bwd_mxfp8(&error_ctx, &valid), MOE_OK);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_matmul),   cmocka_unit_test(test_forward),
                                     cmocka_unit_test(test_backward), cmocka_unit_test(test_checkpoints),
                                     cmocka_unit_test(test_shards),   cmocka_unit_test(test_sharding_info),
                                     cmocka_unit_test(test_layer),    cmocka_unit_test(test_errors)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
