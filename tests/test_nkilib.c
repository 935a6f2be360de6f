/* test_nkilib: the arguments of nki-library's newer kernels: the checkpoint of the scaled intermediate, valid tokens,
   sums rounded after every block, gradients into the caller's buffers, and hints. (Static input scales: see
   test_mx_operands.) */
#include "support/test.h"

#include "reference/bounded_layer.h"
#include "support/extras.h"
#include "support/guard.h"
#include "support/mx_cases.h"

/* ------------------------------------------------------------------------------------------------------------ calls */

static moe_status try_with(const struct problem *p, enum problem_op op, struct problem_args *args, int32_t threads) {
  struct test_pool pool = {.seed = p->o.seed + (uint64_t)threads};
  moe_context ctx = {.num_threads = threads, .schedule = (moe_schedule)(threads % 3),
                     .parallel_for = test_pool_parallel_for, .parallel_for_user = &pool};
  size_t bytes = 0;
  moe_status status = problem_workspace_size(op, &ctx, args, &bytes);
  if (status == MOE_OK) { /* exactly so many bytes, full of NaN */
    struct guarded g = guard_alloc(bytes, threads % 2 ? GUARD_AFTER : GUARD_BEFORE);
    assert_non_null(g.data);
    memset(g.data, 0xff, bytes);
    problem_set_workspace(op, args, g.data, bytes);
    status = problem_call(op, &ctx, args);
    guard_free(&g);
  }
  if (status != MOE_OK) print_message("%s: %s\n", problem_op_name(op), ctx.message);
  return status;
}

static void call_with(const struct problem *p, enum problem_op op, struct problem_args *args, int32_t threads) {
  char text[700];
  if (try_with(p, op, args, threads) == MOE_OK) return;
  describe(p, text, sizeof text);
  fail_msg("repro: %s", text);
}

/* Random options of everything, routed. */
static void open_random(struct problem *p, int64_t i, moe_dtype dtype, uint64_t *rng) {
  struct problem_options o = problem_options_random(90000 + (uint64_t)i, dtype);
  o.nan_row = o.tiny_rows = 0;
  if (i % 4 == 3) o.mx = all_operands(rng);
  o.mx.activations.cast |= MOE_CAST_SATURATE, o.mx.weights.cast |= MOE_CAST_SATURATE; /* no NaN */
  problem_options_settle(&o);
  assert_true(problem_open(p, &o, NULL, NULL));
  call(p, PROBLEM_ROUTER), call(p, PROBLEM_ROUTE_BLOCKS);
  if (i % 2) shuffle_blocks(p, rng);
}

static void step(struct problem *p, const struct extras *x, int32_t threads) {
  for (int op = PROBLEM_FORWARD; op <= PROBLEM_BACKWARD; op++) {
    struct problem_args args;
    problem_make_args(p, &args);
    extras_give(x, &args);
    call_with(p, (enum problem_op)op, &args, threads);
  }
}

static void expect_step(const struct problem *p, const struct problem *q, const char *what) {
  expect_same_outputs(p, q, PROBLEM_FORWARD, what), expect_same_outputs(p, q, PROBLEM_BACKWARD, what);
}

/* --------------------------------------------------------------------------- the scaled intermediate, as a checkpoint */

/* a*m of a row from g and u, which are exact. */
static bounded scaled_of(const moe_layer_config *o, double g, double u, double a) {
  bounded m = bounded_act(o, bounded_exact(o->skip_gate ? u : g));
  if (!o->skip_gate) m = bounded_mul(m, bounded_add(bounded_exact(u), bounded_exact((double)o->up_offset)));
  return ref_scales_output(o) ? bounded_mul(m, bounded_exact(a)) : m;
}

/* It is what g and u, before they are rounded, give in double; 0 where no row is. */
static void test_scaled_values(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 1 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(150, 15); i++) {
    struct problem p;
    open_random(&p, i, dtype, &rng);
    const int64_t I = p.o.I, B = p.o.B;
    test_tensor g_u = test_tensor_new(MOE_DTYPE_F32, p.N * 2 * I * B), affinity = problem_typed(&p, PT_AFFINITIES);
    test_tensor scaled = test_tensor_new(test_dtype_number(i), p.N * I * B);
    for (int64_t j = 0; j < scaled.count; j++) test_tensor_set(&scaled, j, 7);
    struct problem_args args;
    use_isa_number(i);
    for (int pass = 0; pass < 2; pass++) { /* g and u in binary32; then a*m in any type */
      problem_make_args(&p, &args);
      args.forward.layer.checkpoint_dtype = pass ? scaled.dtype : MOE_DTYPE_F32;
      args.forward.gate_up_activations_T = pass ? NULL : g_u.data;
      args.forward.down_activations = NULL;
      args.forward.scaled_intermediate_checkpoint_T = pass ? scaled.data : NULL;
      call_with(&p, PROBLEM_FORWARD, &args, 1 + (int32_t)(i % 3));
    }
    const moe_blockwise_layer *l = &args.forward.layer;
    for (int64_t j = 0; j < scaled.count; j++) {
      const int64_t b = j / (I * B), column = j / B % I, r = j % B;
      const int64_t e = p.o.dropping ? b : ref_block_expert(l, b), t = ref_row_token(l, b, r);
      const int row = e >= 0 && (!l->conditions || l->conditions[b]) && ref_row_counts(l, p.o.not_accumulating, b, r);
      const double a = row && p.o.layer.affinity_mode != MOE_AFFINITY_NO_SCALE
                           ? test_tensor_get(&affinity, t * p.o.E + e) : 1;
      const bounded want = row ? scaled_of(&p.o.layer, test_tensor_get(&g_u, ((b * 2 + 0) * I + column) * B + r),
                                           test_tensor_get(&g_u, ((b * 2 + 1) * I + column) * B + r), a)
                               : bounded_exact(0);
      const double got = test_tensor_get(&scaled, j);
      if (!bounded_holds(scaled.dtype, row ? bounded_round(scaled.dtype, want) : want, got))
        print_message("%.9g, not %.9g\n", got, want.v), fail_at(&p, PT_GATE_UP_CHECKPOINT, j, "a*m in double");
    }
    test_tensor_free(&g_u), test_tensor_free(&scaled);
    close_problem(&p);
  }
  test_use_best_isa();
}

/* With checkpoints in binary32 the backward has the same bits from it; and it is read: dWd is linear in it. */
static void test_scaled_input(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 2 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(120, 12); i++) {
    struct problem p, q;
    struct extras x;
    struct problem_args args;
    open_random(&p, i, dtype, &rng);
    p.o.checkpoint_dtype = MOE_DTYPE_F32;
    p.o.weight_grad_dtype = i % 3 ? MOE_DTYPE_F32 : p.o.weight_grad_dtype;
    struct problem_options o = p.o;
    close_problem(&p);
    assert_true(problem_open(&p, &o, NULL, NULL));
    call(&p, PROBLEM_ROUTER), call(&p, PROBLEM_ROUTE_BLOCKS);
    do x = extras_random(&p, &rng);
    while (!x.scaled);
    use_isa_number(i);
    open_copy(&q, &p, &p.o.mx);
    step(&p, &x, 1 + (int32_t)(i % 5));
    struct extras without = x;
    without.scaled = NULL;
    step(&q, &without, 2);
    expect_step(&p, &q, "that without the checkpoint");
    /* twice as much */
    test_tensor saved = {MOE_DTYPE_F32, x.count, x.scaled}, down = problem_typed(&p, PT_DOWN_WEIGHT_GRAD);
    for (int64_t j = 0; j < x.count; j++) test_tensor_set(&saved, j, 2 * test_tensor_get(&saved, j));
    problem_make_args(&p, &args);
    extras_give(&x, &args);
    args.backward.accumulate = 0;
    args.backward.scaled_intermediate_checkpoint_T = NULL;
    call_with(&p, PROBLEM_BACKWARD, &args, 1);
    test_tensor before = test_tensor_new(down.dtype, down.count);
    memcpy(before.data, down.data, test_tensor_bytes(&down));
    args.backward.scaled_intermediate_checkpoint_T = x.scaled;
    call_with(&p, PROBLEM_BACKWARD, &args, 3);
    for (int64_t j = 0; j < down.count; j++) {
      const double one = test_tensor_get(&before, j), two = test_tensor_get(&down, j);
      if (fabs(one) > 0x1p-10 && fabs(one) < 0x1p14 && two != 2 * one)
        fail_at(&p, PT_DOWN_WEIGHT_GRAD, j, "twice that of half the checkpoint");
    }
    test_tensor_free(&before), free(x.scaled);
    close_problem(&p), close_problem(&q);
  }
  test_use_best_isa();
}

/* ----------------------------------------------------------------------------------------------------- valid tokens */

/* As if the ids from there on were the padding id; their rows of the output and of dX are 0. */
static void test_valid_tokens(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 3 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(120, 12); i++) {
    struct problem p, q;
    open_random(&p, i, dtype, &rng);
    open_copy(&q, &p, &p.o.mx);
    struct extras x = extras_random(&p, &rng);
    q.o.mx = p.o.mx;
    x.limited = 1;
    x.valid = i % 10 == 0 ? 0 : i % 10 == 1 ? (int32_t)p.o.T : x.valid;
    struct extras all = x;
    all.limited = 0;
    int32_t *ids = (int32_t *)(void *)q.tensor[PT_TOKEN_IDS].data;
    int64_t rows = 0;
    for (int64_t j = 0; j < extras_rows(&q); j++) {
      if (ids[j] >= x.valid && ids[j] < q.o.T) ids[j] = q.o.skip_token ? -1 : (int32_t)q.o.T;
      rows += ids[j] >= 0 && ids[j] < q.o.T;
    }
    use_isa_number(i);
    for (int op = PROBLEM_FORWARD; op <= PROBLEM_BACKWARD; op++) {
      struct problem_args args, twin;
      problem_make_args(&p, &args), problem_make_args(&q, &twin);
      extras_give(&x, &args), extras_give(&all, &twin);
      args.forward.layer.max_rows = args.backward.layer.max_rows = rows ? rows : 1;
      call_with(&p, (enum problem_op)op, &args, 1 + (int32_t)(i % 4));
      call_with(&q, (enum problem_op)op, &twin, 1);
    }
    expect_step(&p, &q, "that with padding ids");
    const int id[] = {PT_OUTPUT, PT_HIDDEN_GRAD};
    for (int j = 0; j < 2; j++) {
      const int added = j ? (p.o.accumulate & MOE_ACCUMULATE_HIDDEN_STATES_GRAD) != 0
                          : p.o.accumulate_output || p.o.device_output_shape;
      const test_tensor t = problem_typed(&p, id[j]);
      for (int64_t k = x.valid * p.o.H; k < p.o.T * p.o.H && !added; k++)
        if (test_tensor_get(&t, k) != 0) fail_at(&p, id[j], k, "0");
    }
    free(x.scaled);
    close_problem(&p), close_problem(&q);
  }
  test_use_best_isa();
}

/* ------------------------------------------------------------------------------------ sums rounded after every block */

/* One layer of integers, of which all products and their operands are exact, and sums over blocks are not: ReLU's
   neighbour identity, up only. */
enum { ST = 23, SH = 9, SI = 7, SE = 3, SK = 2, SB = 4, SN = 20 };
struct sums {
  double x[ST][SH], up[SE][SH][SI], down[SE][SI][SH], dy[ST][SH], a[ST][SE];
  double y[ST][SH], dx[ST][SH], dup[SE][SH][SI], ddown[SE][SI][SH];
  int32_t ids[SN][SB], expert[SN];
};

static double small(uint64_t *rng, int64_t most) { return (double)test_random_range(rng, -most, most); }

/* What is there, plus a block's products; rounded, but in _f32 functions, which round once. */
static void add_block(double *sum, double term, moe_dtype dtype) {
  *sum = dtype == MOE_DTYPE_DEFAULT ? *sum + term : test_dtype_round(dtype, *sum + term);
}

static void sums_block(struct sums *s, int b, moe_dtype dtype, moe_dtype grad, int post) {
  const int e = s->expert[b];
  double dup[SH][SI] = {{0}}, ddown[SI][SH] = {{0}};
  for (int r = 0; r < SB && e < SE; r++) {
    const int t = s->ids[b][r];
    double u[SI] = {0}, du[SI] = {0};
    const double a = t < ST && post ? s->a[t][e] : 1;
    if (t >= ST) continue;
    for (int i = 0; i < SI; i++) {
      for (int h = 0; h < SH; h++) u[i] += s->x[t][h] * s->up[e][h][i], du[i] += a * s->dy[t][h] * s->down[e][i][h];
      for (int h = 0; h < SH; h++) dup[h][i] += s->x[t][h] * du[i], ddown[i][h] += a * u[i] * s->dy[t][h];
    }
    for (int h = 0; h < SH; h++) {
      double d = 0, dx = 0;
      for (int i = 0; i < SI; i++) d += u[i] * s->down[e][i][h], dx += du[i] * s->up[e][h][i];
      add_block(&s->y[t][h], a * d, dtype), add_block(&s->dx[t][h], dx, dtype);
    }
  }
  for (int i = 0; i < SI && e < SE; i++)
    for (int h = 0; h < SH; h++)
      add_block(&s->dup[e][h][i], dup[h][i], grad), add_block(&s->ddown[e][i][h], ddown[i][h], grad);
}

static void sums_fill(struct sums *s, uint64_t *rng, moe_dtype dtype, moe_dtype grad, int accumulate) {
  memset(s, 0, sizeof *s);
  const int scale = dtype == MOE_DTYPE_F32 ? 1000 : 1; /* binary32 rounds beyond 2^24 */
  for (int i = 0; i < ST * SH; i++) (&s->x[0][0])[i] = small(rng, 3), (&s->dy[0][0])[i] = small(rng, 3);
  for (int i = 0; i < SE * SH * SI; i++) (&s->up[0][0][0])[i] = small(rng, 7), (&s->down[0][0][0])[i] = small(rng, 9);
  for (int i = 0; i < ST * SE; i++) (&s->a[0][0])[i] = (double)(1 << test_random_range(rng, 0, 2)) / 4;
  for (int i = 0; i < ST * SH && accumulate; i++)
    (&s->y[0][0])[i] = test_dtype_round(dtype, scale * small(rng, 900)),
    (&s->dx[0][0])[i] = test_dtype_round(dtype, scale * small(rng, 900));
  for (int i = 0; i < SE * SH * SI && accumulate; i++)
    (&s->dup[0][0][0])[i] = test_dtype_round(grad, small(rng, 900)),
    (&s->ddown[0][0][0])[i] = test_dtype_round(grad, small(rng, 900));
  for (int b = 0; b < SN; b++) {
    s->expert[b] = (int32_t)test_random_range(rng, 0, 11) % (SE + 1);
    for (int r = 0; r < SB; r++) s->ids[b][r] = (int32_t)((b * 5 + r * 7 + b * b) % (ST + 1));
  }
}

static test_tensor sums_tensor(moe_dtype dtype, const double *x, int64_t n, int64_t run, int64_t blank) {
  test_tensor t = test_tensor_new(dtype, n + n / run * blank);
  for (int64_t i = 0; i < n; i++) test_tensor_set(&t, i / run * (run + blank) + blank + i % run, x[i]);
  return t;
}

static void sums_expect(const test_tensor *got, const double *x, int64_t n, int64_t run, int64_t blank,
                        const char *name) {
  for (int64_t i = 0; i < n; i++) {
    const double value = test_tensor_get(got, i / run * (run + blank) + blank + i % run);
    if (value != test_dtype_round(got->dtype, x[i])) fail_msg("%s[%d] is %.9g, not %.9g", name, (int)i, value, x[i]);
  }
}

static void test_sums_in_double(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 4 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(40, 8); i++) {
    const moe_dtype grad = i % 4 == 3 ? test_dtype_number(i / 4) : dtype;
    const int post = (int)(i & 1), accumulate = i % 3 == 2;
    struct sums s;
    sums_fill(&s, &rng, dtype, grad, accumulate);
    test_tensor x = sums_tensor(dtype, s.x[0], ST * SH, SH, 0), dy = sums_tensor(dtype, s.dy[0], ST * SH, SH, 0);
    test_tensor wgu = sums_tensor(dtype, s.up[0][0], SE * SH * SI, SI, SI);
    test_tensor wd = sums_tensor(dtype, s.down[0][0], SE * SI * SH, SH, 0);
    test_tensor y = sums_tensor(dtype, s.y[0], ST * SH, SH, 0), dx = sums_tensor(dtype, s.dx[0], ST * SH, SH, 0);
    test_tensor dwgu = sums_tensor(grad, s.dup[0][0], SE * SH * SI, SI, SI);
    test_tensor dwd = sums_tensor(grad, s.ddown[0][0], SE * SI * SH, SH, 0);
    test_tensor a = sums_tensor(MOE_DTYPE_F32, s.a[0], ST * SE, SE, 0);
    struct test_pool pool = {.seed = (uint64_t)i};
    moe_context ctx = {.num_threads = 1 + (int32_t)(i % 4), .parallel_for = test_pool_parallel_for,
                       .parallel_for_user = &pool, .allocate = oracle_allocate, .release = oracle_free};
    struct problem_args args = {.dtype = dtype};
    args.forward = (moe_blockwise_mm_fwd_args){
        .layer = {.T = ST, .H = SH, .I = SI, .E = SE, .N = SN, .B = SB, .hidden_states = x.data,
                  .expert_affinities_masked = a.data, .gate_up_proj_weight = wgu.data, .down_proj_weight = wd.data,
                  .token_position_to_id = s.ids[0], .block_to_expert = s.expert, .accumulation_dtype = dtype,
                  .config = {.activation = MOE_ACT_IDENTITY, .skip_gate = 1,
                             .affinity_mode = post ? MOE_AFFINITY_POST_SCALE : MOE_AFFINITY_NO_SCALE}},
        .accumulate = accumulate ? MOE_ACCUMULATE_OUTPUT : 0, .output = y.data};
    args.backward = (moe_blockwise_mm_bwd_args){
        .layer = args.forward.layer, .output_hidden_states_grad = dy.data, .hidden_states_grad = dx.data,
        .gate_up_proj_weight_grad = dwgu.data, .down_proj_weight_grad = dwd.data, .weight_grad_dtype = grad,
        .accumulate = accumulate ? MOE_ACCUMULATE_HIDDEN_STATES_GRAD | MOE_ACCUMULATE_GATE_UP_WEIGHT_GRAD |
                                       MOE_ACCUMULATE_DOWN_WEIGHT_GRAD : 0};
    use_isa_number(i);
    assert_int_equal(problem_call(PROBLEM_FORWARD, &ctx, &args), MOE_OK);
    assert_int_equal(problem_call(PROBLEM_BACKWARD, &ctx, &args), MOE_OK);
    const int by_block = dtype != MOE_DTYPE_F32;
    for (int b = 0; b < SN; b++) sums_block(&s, b, by_block ? dtype : 0, by_block ? grad : 0, post);
    sums_expect(&y, s.y[0], ST * SH, SH, 0, "output"), sums_expect(&dx, s.dx[0], ST * SH, SH, 0, "hidden_states_grad");
    sums_expect(&dwgu, s.dup[0][0], SE * SH * SI, SI, SI, "gate_up_proj_weight_grad");
    sums_expect(&dwd, s.ddown[0][0], SE * SI * SH, SH, 0, "down_proj_weight_grad");
    test_tensor *all[] = {&x, &dy, &wgu, &wd, &y, &dx, &dwgu, &dwd, &a};
    for (int j = 0; j < 9; j++) test_tensor_free(all[j]);
  }
  test_use_best_isa();
}

/* It is as if every block were a call of its own that adds to what the blocks before it gave. */
static void test_sums_by_block(void **state) {
  static const int summed[] = {PT_OUTPUT, PT_HIDDEN_GRAD, PT_GATE_UP_WEIGHT_GRAD, PT_DOWN_WEIGHT_GRAD};
  const uint32_t bits = MOE_ACCUMULATE_HIDDEN_STATES_GRAD | MOE_ACCUMULATE_GATE_UP_WEIGHT_GRAD |
                        MOE_ACCUMULATE_DOWN_WEIGHT_GRAD;
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 5 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(60, 6); i++) {
    struct problem p, q;
    open_random(&p, i, dtype, &rng);
    p.o.not_accumulating = 0, p.o.accumulate = (uint32_t)test_random(&rng) & 63u;
    open_copy(&q, &p, &p.o.mx);
    struct extras x = {.accumulation_dtype = dtype, .hints = p.o.hints};
    int32_t *conditions = (int32_t *)calloc((size_t)p.N + 1, 4);
    use_isa_number(i);
    for (int op = PROBLEM_FORWARD; op <= PROBLEM_BACKWARD; op++) {
      struct problem_args args;
      problem_make_args(&p, &args);
      extras_give(&x, &args);
      call_with(&p, (enum problem_op)op, &args, 1 + (int32_t)(i % 4));
      for (int64_t b = 0; b < p.N; b++) {
        problem_make_args(&q, &args);
        memset(conditions, 0, ((size_t)p.N + 1) * 4);
        conditions[b] = p.o.no_conditions || ((int32_t *)(void *)p.tensor[PT_CONDITIONS].data)[b];
        args.forward.layer.conditions = args.backward.layer.conditions = conditions;
        args.forward.gate_up_activations_T = args.forward.down_activations = NULL;
        if (op == PROBLEM_BACKWARD) { /* all rows' checkpoints, which only p's call has written */
          args.backward.gate_up_activations_T = p.o.save_gate_up ? p.tensor[PT_GATE_UP_CHECKPOINT].data : NULL;
          args.backward.down_activations = p.o.save_down ? p.tensor[PT_DOWN_CHECKPOINT].data : NULL;
        }
        if (b > 0) args.forward.accumulate = p.o.device_output_shape ? 0 : MOE_ACCUMULATE_OUTPUT;
        if (b > 0) args.backward.accumulate |= bits;
        if (op == PROBLEM_BACKWARD || !p.o.device_output_shape) call_with(&q, (enum problem_op)op, &args, 1);
      }
    }
    for (int k = p.o.device_output_shape; k < 4; k++) {
      const test_tensor a = problem_typed(&p, summed[k]), b = problem_typed(&q, summed[k]);
      for (int64_t j = 0; j < a.count; j++) {
        const double one = test_tensor_get(&a, j), two = test_tensor_get(&b, j); /* -0 is 0 here */
        if (one != two && !(isnan(one) && isnan(two))) fail_at(&p, summed[k], j, "a call for every block");
      }
    }
    free(conditions);
    close_problem(&p), close_problem(&q);
  }
  test_use_best_isa();
}

/* ------------------------------------------------------------------------------- gradients into the caller's buffers */

/* Each bit adds to its own output, and to no other: in binary32, old + gradient, rounded once. */
static void test_grad_out(void **state) {
  static const struct {
    uint32_t bit;
    int id; /* nkilib: hidden_states_grad_out, expert_affinities_masked_grad_out, gate_up_proj_weight_grad_out,
               down_proj_weight_grad_out; and the biases' */
  } out[] = {{MOE_ACCUMULATE_HIDDEN_STATES_GRAD, PT_HIDDEN_GRAD},
             {MOE_ACCUMULATE_AFFINITIES_GRAD, PT_AFFINITIES_GRAD},
             {MOE_ACCUMULATE_GATE_UP_WEIGHT_GRAD, PT_GATE_UP_WEIGHT_GRAD},
             {MOE_ACCUMULATE_DOWN_WEIGHT_GRAD, PT_DOWN_WEIGHT_GRAD},
             {MOE_ACCUMULATE_GATE_UP_BIAS_GRAD, PT_GATE_UP_BIAS_GRAD},
             {MOE_ACCUMULATE_DOWN_BIAS_GRAD, PT_DOWN_BIAS_GRAD}};
  uint64_t rng = 6;
  (void)state;
  for (int64_t i = 0; i < test_cases(64, 16); i++) {
    struct problem p, q, old;
    open_random(&p, i, MOE_DTYPE_F32, &rng);
    struct problem_options o = p.o;
    o.affinity_dtype = o.weight_grad_dtype = MOE_DTYPE_F32, o.accumulate = 0;
    close_problem(&p);
    assert_true(problem_open(&p, &o, NULL, NULL));
    call(&p, PROBLEM_ROUTER), call(&p, PROBLEM_ROUTE_BLOCKS), call(&p, PROBLEM_FORWARD);
    open_copy(&q, &p, &o.mx), open_copy(&old, &p, &o.mx);
    struct problem_args args;
    problem_make_args(&p, &args);
    call_with(&p, PROBLEM_BACKWARD, &args, 1);
    problem_make_args(&q, &args);
    args.backward.accumulate = (uint32_t)i & 63u;
    call_with(&q, PROBLEM_BACKWARD, &args, 2);
    for (int k = 0; k < 6; k++) {
      const test_tensor plain = problem_typed(&p, out[k].id), sum = problem_typed(&q, out[k].id);
      const test_tensor before = problem_typed(&old, out[k].id);
      for (int64_t j = 0; j < sum.count; j++) {
        const double add = (uint64_t)i & out[k].bit ? test_tensor_get(&before, j) : 0;
        const double want = (double)(float)(test_tensor_get(&plain, j) + add), got = test_tensor_get(&sum, j);
        if (got != want && !isnan(want)) fail_at(&q, out[k].id, j, "old + gradient");
      }
    }
    close_problem(&p), close_problem(&q), close_problem(&old);
  }
}

/* ------------------------------------------------------------------------------------------------------------- hints */

static void test_hints(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 7 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(20, 4); i++) {
    struct problem p, q;
    open_random(&p, i, dtype, &rng);
    open_copy(&q, &p, &p.o.mx);
    struct extras x = extras_random(&p, &rng), none = x;
    memset(&none.hints, 0, sizeof none.hints);
    q.o.mx = p.o.mx;
    step(&p, &x, 1), step(&q, &none, 1);
    expect_step(&p, &q, "that without hints");
    free(x.scaled);
    close_problem(&p), close_problem(&q);
  }
}

/* quantization_type names what both weights are, and nothing else. */
static void test_quantization_type(void **state) {
  static const moe_quantization_type is[MOE_WEIGHT_COUNT_][2] = {
      [MOE_WEIGHT_MX] = {MOE_QUANTIZATION_MX, MOE_QUANTIZATION_MX},
      [MOE_WEIGHT_STATIC] = {MOE_QUANTIZATION_STATIC, MOE_QUANTIZATION_STATIC_MX},
      [MOE_WEIGHT_COLUMN] = {MOE_QUANTIZATION_ROW, MOE_QUANTIZATION_ROW_MX},
      [MOE_WEIGHT_STATIC_PER_EXPERT] = {MOE_QUANTIZATION_STATIC, MOE_QUANTIZATION_STATIC_MX},
      [MOE_WEIGHT_COLUMN_PER_EXPERT] = {MOE_QUANTIZATION_ROW, MOE_QUANTIZATION_ROW_MX}};
  static const uint8_t codes[2048];
  static const float scales[64];
  struct problem p;
  uint64_t rng = 8;
  struct problem_options o = plain_options(95000, MOE_DTYPE_F32, 12, 8);
  (void)state;
  o.E = 2, o.K = 1, o.mx = (moe_mx_operands){0}, o.router.num_groups = 0;
  problem_options_settle(&o);
  open_routed(&p, &o, &rng, 0);
  for (int scaling = -1; scaling < MOE_WEIGHT_COUNT_; scaling++)
    for (int type = 0; type < MOE_QUANTIZATION_COUNT_; type++) {
      const moe_quantized_weight w = {.element = MOE_ELEMENT_E4M3FN,
                                      .scaling = (moe_weight_scaling)(scaling < 0 ? 0 : scaling),
                                      .block = 32,
                                      .codes = codes,
                                      .scales = scales};
      moe_context ctx = {.allocate = oracle_allocate, .release = oracle_free};
      struct problem_args args;
      problem_make_args(&p, &args);
      if (scaling >= 0) args.forward.layer.quantized_gate_up_proj_weight = &w;
      if (scaling >= 0) args.forward.layer.quantized_down_proj_weight = &w;
      args.forward.hints.quantization_type = (moe_quantization_type)type;
      const int fits = type == 0 || (scaling >= 0 && (type == (int)is[scaling][0] || type == (int)is[scaling][1]));
      assert_int_equal(problem_call(PROBLEM_FORWARD, &ctx, &args), fits ? MOE_OK : MOE_ERROR_INVALID_OPTION);
      if (!fits) assert_non_null(strstr(ctx.message, "hints.quantization_type"));
    }
  close_problem(&p);
}

/* What depends on the function's type, and what a tensor holds; nothing is written. */
static void test_refused(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  const struct problem_options o = plain_options(95500, dtype, 12, 8);
  uint64_t rng = 10;
  struct problem p, before;
  open_routed(&p, &o, &rng, 0);
  call(&p, PROBLEM_FORWARD);
  open_copy(&before, &p, &o.mx);
  for (int op = PROBLEM_FORWARD; op <= PROBLEM_BACKWARD; op++)
    for (int64_t i = 0; i < 2 * TEST_DTYPES + 4; i++) {
      const int32_t valid[4] = {-1, (int32_t)o.T + 1, INT32_MIN, INT32_MAX};
      const moe_dtype type = test_dtype_number(i);
      moe_context ctx = {.allocate = oracle_allocate, .release = oracle_free};
      struct problem_args args;
      problem_make_args(&p, &args);
      struct extras x = {.hints = o.hints, .limited = i >= 2 * TEST_DTYPES};
      if (x.limited) x.valid = valid[i - 2 * TEST_DTYPES];
      else if (i < TEST_DTYPES) x.accumulation_dtype = type;
      else x.hints.weight_dtype = type;
      extras_give(&x, &args);
      const int good = !x.limited && (type == dtype || (i < TEST_DTYPES && type == MOE_DTYPE_F32));
      const moe_status status = problem_call((enum problem_op)op, &ctx, &args);
      if (good) {
        assert_int_equal(status, MOE_OK);
        for (int id = 0; id < PT_COUNT; id++) copy_tensor(&p, &before, id);
        continue;
      }
      assert_int_equal(status, x.limited ? MOE_ERROR_INVALID_INDEX : MOE_ERROR_INVALID_OPTION);
      assert_non_null(strstr(ctx.message, x.limited ? "num_valid_tokens" : i < TEST_DTYPES ? "accumulation_dtype"
                                                                                           : "hints.weight_dtype"));
      for (int id = 0; id < PT_COUNT; id++) expect_same(&p, &before, id, "that before an error");
    }
  close_problem(&p), close_problem(&before);
}

/* ----------------------------------------------------------------------------------------- the same bits everywhere */

static void test_bits(void **state) {
  static const int32_t threads[] = {1, 2, 3, 7};
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 9 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(60, 6); i++) {
    struct problem p, q;
    const struct problem_options o =
        i % 6 == 5 ? problem_options_long(96000 + (uint64_t)i, dtype, (int)(i / 6 % PROBLEM_LONG_SHAPES))
                   : problem_options_random(96000 + (uint64_t)i, dtype);
    assert_true(problem_open(&p, &o, NULL, NULL));
    if (i % 3 == 0) p.o.mx = all_operands(&rng);
    call(&p, PROBLEM_ROUTER), call(&p, PROBLEM_ROUTE_BLOCKS);
    struct extras x = extras_random(&p, &rng), y = x;
    if (x.scaled) y.scaled = (unsigned char *)calloc((size_t)x.count, (size_t)x.element);
    open_copy(&q, &p, &p.o.mx);
    assert_true(test_use_isa(MOE_ISA_SCALAR));
    struct problem fresh;
    open_copy(&fresh, &p, &p.o.mx);
    step(&p, &x, 1);
    for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
      if (!test_use_isa(isa)) continue;
      for (int id = 0; id < PT_COUNT; id++) copy_tensor(&q, &fresh, id);
      step(&q, &y, threads[(i + isa) % 4]);
      expect_step(&q, &p, "scalar's on one thread");
      if (x.scaled && memcmp(x.scaled, y.scaled, (size_t)(x.count * x.element)) != 0)
        fail_at(&q, PT_GATE_UP_CHECKPOINT, 0, "scalar's a*m");
    }
    free(x.scaled), free(y.scaled);
    close_problem(&p), close_problem(&q), close_problem(&fresh);
  }
  test_use_best_isa();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      EACH_DTYPE(test_scaled_values), EACH_DTYPE(test_scaled_input),  EACH_DTYPE(test_valid_tokens),
      EACH_DTYPE(test_sums_in_double), TEST_OF_DTYPE(test_sums_by_block, bf16, BF16),
      TEST_OF_DTYPE(test_sums_by_block, fp16, FP16), cmocka_unit_test(test_grad_out),
      EACH_DTYPE(test_hints), cmocka_unit_test(test_quantization_type), EACH_DTYPE(test_refused),
      EACH_DTYPE(test_bits),
  };
  return cmocka_run_group_tests_name("nkilib", tests, NULL, NULL);
}
