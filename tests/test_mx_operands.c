/* test_mx_operands: products whose operands are rounded to MX (moe_blockwise_layer.mx) against the same products of operands
   rounded beforehand by the definitions of support/mx_quantize_oracle.h; the same bits everywhere; bad input. */
#include "support/test.h"

#include <math.h>

#include "support/mx_quantize_oracle.h"
#include "support/pool.h"
#include "support/problem.h"

/* n elements, `stride` apart, to their MX values; index: which element stands at a position, or NULL. */
static void round_line(const moe_mx_rounding *r, float *x, int64_t stride, int64_t n, const int64_t *index) {
  const struct element *f = &elements[r->element];
  float *line = malloc((size_t)n * sizeof *line);
  uint8_t *codes = malloc((size_t)n), *scales = malloc((size_t)(n + 31) / 32);
  assert_true(line && codes && scales);
  for (int64_t i = 0; i < n; i++) line[i] = x[(index ? index[i] : i) * stride];
  mx_quantize_line(f, (int)r->scale_rule, r->cast, line, n, codes, scales);
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = mx_dequantized(f, scales[i / 32], element_get(f, codes, i));
    x[(index ? index[i] : i) * stride] = float_of(bits);
  }
  free(line), free(codes), free(scales);
}

static moe_mx_rounding random_rounding(uint64_t *rng) {
  moe_mx_rounding r = {.enabled = 1};
  r.element = (moe_element)test_random_range(rng, 0, ELEMENTS - 1);
  r.scale_rule = (moe_scale_rule)test_random_range(rng, 0, MOE_SCALE_NEAREST);
  r.cast = (uint32_t)test_random_range(rng, 0, 3) | MOE_CAST_SATURATE;
  return r;
}

static float *to_f32(moe_dtype dtype, const void *from, int64_t n) {
  float *x = malloc((size_t)n * sizeof *x);
  assert_non_null(x);
  if (dtype == MOE_DTYPE_F32) memcpy(x, from, (size_t)n * sizeof *x);
  if (dtype == MOE_DTYPE_BF16) assert_int_equal(moe_bf16_to_f32(NULL, x, from, n), MOE_OK);
  if (dtype == MOE_DTYPE_FP16) assert_int_equal(moe_fp16_to_f32(NULL, x, from, n), MOE_OK);
  return x;
}

static void from_f32(moe_dtype dtype, void *to, float *x, int64_t n) {
  if (dtype == MOE_DTYPE_F32) memcpy(to, x, (size_t)n * sizeof *x);
  if (dtype == MOE_DTYPE_BF16) assert_int_equal(moe_bf16_from_f32(NULL, to, x, n), MOE_OK);
  if (dtype == MOE_DTYPE_FP16) assert_int_equal(moe_fp16_from_f32(NULL, to, x, n), MOE_OK);
  free(x);
}

static void call(const struct problem *p, moe_context *ctx, enum problem_op op, struct problem_args *args) {
  size_t bytes = 0;
  assert_int_equal(problem_workspace_size(op, ctx, args, &bytes), MOE_OK);
  void *workspace = malloc(bytes);
  assert_non_null(workspace);
  problem_set_workspace(op, args, workspace, bytes);
  if (problem_call(op, ctx, args) != MOE_OK) {
    char text[400];
    problem_describe(p, ctx, text, sizeof text);
    fail_msg("%s: %s | %s", problem_op_name(op), ctx->message, text);
  }
  free(workspace);
}

static void run(struct problem *p, moe_context *ctx, const moe_mx_operands *forward, const moe_mx_operands *backward) {
  for (int op = 0; op <= PROBLEM_BACKWARD; op++) {
    struct problem_args args;
    problem_make_args(p, &args);
    if (forward) args.forward.layer.mx = *forward;
    if (backward) args.backward.layer.mx = *backward;
    call(p, ctx, (enum problem_op)op, &args);
  }
}

static void assert_same(const struct problem *want, const struct problem *got, int from, const char *how) {
  for (int i = from; i < PT_COUNT; i++) {
    const unsigned char *a = want->tensor[i].data, *b = got->tensor[i].data;
    if (memcmp(a, b, problem_tensor_bytes(got, i)) == 0) continue;
    size_t at = 0;
    while (a[at] == b[at]) at++;
    char text[400];
    problem_describe(got, NULL, text, sizeof text);
    fail_msg("%s[%zu] differs (%s) | %s", got->tensor[i].name, at / (size_t)got->tensor[i].element, how, text);
  }
}

static struct problem_options options(uint64_t seed, moe_dtype dtype, int64_t H, int64_t I) {
  struct problem_options o = problem_options_random(seed, dtype);
  o.H = H, o.I = I, o.nan_row = o.tiny_rows = 0;
  if (H * I > 20000) o.E = 2, o.K = 1, o.T = 5, o.B = 4;
  o.empty_expert = 0;
  problem_options_settle(&o);
  return o;
}

static const int64_t sizes[] = {1, 5, 31, 32, 33, 40, 64, 100, 130, 160, 200, 300};
enum { SIZES = sizeof sizes / sizeof *sizes };

/* ---------------------------------------------------------------------------------------------------------- weights */

/* Gate and up [E,H,2,I] and down [E,I,H], along the axis that the forward contracts, or the backward. */
static void round_weights(struct problem *p, const moe_mx_rounding *r, int backward) {
  const struct problem_options *o = &p->o;
  const int64_t n = o->E * o->H * o->I;
  float *gate_up = to_f32(o->dtype, p->tensor[PT_GATE_UP_WEIGHT].data, 2 * n);
  float *down = to_f32(o->dtype, p->tensor[PT_DOWN_WEIGHT].data, n);
  for (int64_t e = 0; e < o->E; e++) {
    float *g = gate_up + e * o->H * 2 * o->I, *d = down + e * o->I * o->H;
    for (int64_t c = 0; c < 2 * o->I && !backward; c++) round_line(r, g + c, 2 * o->I, o->H, NULL);
    for (int64_t h = 0; h < o->H && !backward; h++) round_line(r, d + h, o->H, o->I, NULL);
    for (int64_t row = 0; row < 2 * o->H && backward; row++) round_line(r, g + row * o->I, 1, o->I, NULL);
    for (int64_t i = 0; i < o->I && backward; i++) round_line(r, d + i * o->H, 1, o->H, NULL);
  }
  from_f32(o->dtype, p->tensor[PT_GATE_UP_WEIGHT].data, gate_up, 2 * n);
  from_f32(o->dtype, p->tensor[PT_DOWN_WEIGHT].data, down, n);
}

static void test_weights(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 7 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(60, 6); i++) {
    moe_mx_operands mx = {.weights = random_rounding(&rng)};
    if (dtype == MOE_DTYPE_FP16) mx.weights.element = MOE_ELEMENT_E2M1, mx.weights.scale_rule = MOE_SCALE_OCP_FLOOR;
    struct problem_options o = options(200 + (uint64_t)i, dtype, sizes[test_random_range(&rng, 0, SIZES - 1)],
                                       sizes[test_random_range(&rng, 0, SIZES - 1)]);
    const int backward = (int)(i & 1);
    o.save_gate_up = 1;
    problem_options_settle(&o);
    struct problem want, got;
    moe_context ctx = {.num_threads = 1};
    assert_true(problem_open(&want, &o, NULL, NULL) && problem_open(&got, &o, NULL, NULL));
    problem_fill(&want), problem_fill(&got);
    run(&got, &ctx, backward ? NULL : &mx, backward ? &mx : NULL);
    if (!backward) round_weights(&want, &mx.weights, 0);
    run(&want, &ctx, NULL, NULL);
    if (backward) {
      struct problem_args args;
      problem_make_args(&want, &args);
      round_weights(&want, &mx.weights, 1);
      problem_fill(&got), problem_fill(&want);
      run(&got, &ctx, NULL, &mx);
      for (int op = 0; op < PROBLEM_BACKWARD; op++) problem_make_args(&want, &args), call(&want, &ctx, (enum problem_op)op, &args);
      round_weights(&want, &mx.weights, 1);
      problem_make_args(&want, &args);
      call(&want, &ctx, PROBLEM_BACKWARD, &args);
      assert_same(&want, &got, PT_GATE_UP_CHECKPOINT, "backward");
    } else {
      for (int t = PT_GATE_UP_CHECKPOINT; t <= PT_OUTPUT; t++)
        if (memcmp(want.tensor[t].data, got.tensor[t].data, problem_tensor_bytes(&got, t)) != 0)
          fail_msg("%s differs, case %lld", got.tensor[t].name, (long long)i);
    }
    problem_close(&want, NULL, NULL), problem_close(&got, NULL, NULL);
  }
}

/* ------------------------------------------------------------------------------------------ the whole chain, bit by bit */

/* A layer whose intermediates can be had from grouped products: up only, identity, no affinities, one expert per token. */
struct chain {
  moe_dtype dtype;
  int64_t T, H, I;
  int32_t sizes[4]; /* tokens of each expert; tokens are sorted by expert */
  moe_mx_operands mx;
  float *x, *wu, *wd, *dy; /* [T,H], [E,H,I], [E,I,H], [T,H]; values of the type */
};
enum { CHAIN_EXPERTS = 4 };

static float *random_values(uint64_t *rng, moe_dtype dtype, int64_t n) {
  float *x = malloc((size_t)n * sizeof *x);
  uint16_t *narrow = malloc((size_t)n * 2);
  assert_true(x && narrow);
  for (int64_t i = 0; i < n; i++)
    x[i] = (float)((int64_t)(test_random(rng) >> 40) - (1 << 23)) * 0x1p-23f * (float)(1 << test_random_range(rng, 0, 4));
  if (dtype == MOE_DTYPE_BF16) assert_int_equal(moe_bf16_from_f32(NULL, narrow, x, n), MOE_OK), assert_int_equal(moe_bf16_to_f32(NULL, x, narrow, n), MOE_OK);
  free(narrow);
  return x;
}

/* The values of the type, in memory of its size. */
static void *typed(moe_dtype dtype, const float *x, int64_t n) {
  void *to = malloc((size_t)n * 4);
  float *copy = malloc((size_t)n * sizeof *copy);
  assert_true(to && copy);
  memcpy(copy, x, (size_t)n * sizeof *copy);
  from_f32(dtype, to, copy, n);
  return to;
}

static float *copy_of(const float *x, int64_t n) {
  float *copy = malloc((size_t)n * sizeof *copy);
  assert_non_null(copy);
  memcpy(copy, x, (size_t)n * sizeof *copy);
  return copy;
}

/* Y[pos] = X[pos]*W[e]^T, W [E,N,K]; dW = A^T B, [E,N,K], A [T,N], B [T,K]. Rounded to the type on storing. */
static float *grouped(const struct chain *c, const float *x, const float *w, int64_t N, int64_t K) {
  void *tx = typed(c->dtype, x, c->T * K), *tw = typed(c->dtype, w, CHAIN_EXPERTS * N * K), *ty = malloc((size_t)(c->T * N * 4));
  char workspace[1 << 10];
  moe_grouped_gemm_args args = {.num_tokens = c->T, .topk = 1, .E = CHAIN_EXPERTS, .N = N, .K = K, .m_sizes = c->sizes, .X = tx, .W = tw, .Y = ty};
  (void)workspace;
  const int bf16 = c->dtype == MOE_DTYPE_BF16;
  moe_context ctx = {.num_threads = 1};
  assert_int_equal((bf16 ? moe_grouped_gemm_bf16_workspace_size : moe_grouped_gemm_f32_workspace_size)(&ctx, &args, &args.workspace_bytes), MOE_OK);
  args.workspace = malloc(args.workspace_bytes);
  assert_int_equal((bf16 ? moe_grouped_gemm_bf16 : moe_grouped_gemm_f32)(&ctx, &args), MOE_OK);
  float *y = to_f32(c->dtype, ty, c->T * N);
  free(args.workspace), free(tx), free(tw), free(ty);
  return y;
}

static float *grouped_dw(const struct chain *c, const float *a, int64_t N, const float *b, int64_t K) {
  void *ta = typed(c->dtype, a, c->T * N), *tb = typed(c->dtype, b, c->T * K), *tw = malloc((size_t)(CHAIN_EXPERTS * N * K * 4));
  moe_grouped_gemm_args args = {.num_tokens = c->T, .topk = 1, .E = CHAIN_EXPERTS, .N = N, .K = K, .m_sizes = c->sizes, .X = tb, .dY = ta, .dW = tw};
  const int bf16 = c->dtype == MOE_DTYPE_BF16;
  moe_context ctx = {.num_threads = 1};
  assert_int_equal((bf16 ? moe_grouped_gemm_dw_bf16_workspace_size : moe_grouped_gemm_dw_f32_workspace_size)(&ctx, &args, &args.workspace_bytes), MOE_OK);
  args.workspace = malloc(args.workspace_bytes);
  assert_int_equal((bf16 ? moe_grouped_gemm_dw_bf16 : moe_grouped_gemm_dw_f32)(&ctx, &args), MOE_OK);
  float *w = to_f32(c->dtype, tw, CHAIN_EXPERTS * N * K);
  free(args.workspace), free(ta), free(tb), free(tw);
  return w;
}

static float *swapped(const float *w, int64_t rows, int64_t columns) { /* [E,rows,columns] to [E,columns,rows] */
  float *to = malloc((size_t)(CHAIN_EXPERTS * rows * columns) * sizeof *to);
  assert_non_null(to);
  for (int64_t e = 0; e < CHAIN_EXPERTS; e++)
    for (int64_t i = 0; i < rows * columns; i++)
      to[e * rows * columns + i % columns * rows + i / columns] = w[e * rows * columns + i];
  return to;
}

/* Rows rounded along themselves, or down each expert's. */
static float *rounded_rows(const struct chain *c, const moe_mx_rounding *r, const float *x, int64_t n, int parts) {
  float *to = copy_of(x, c->T * n);
  int64_t *index = malloc((size_t)n * sizeof *index);
  assert_int_equal(moe_nki_x4_permutation(NULL, c->mx.activation_layout, parts, n, index), MOE_OK);
  for (int64_t t = 0; t < c->T && r->enabled; t++) round_line(r, to + t * n, 1, n, r == &c->mx.activations ? index : NULL);
  free(index);
  return to;
}

static float *rounded_down(const struct chain *c, const moe_mx_rounding *r, const float *x, int64_t n) {
  float *to = copy_of(x, c->T * n);
  int64_t first = 0;
  for (int e = 0; e < CHAIN_EXPERTS; first += c->sizes[e++])
    for (int64_t j = 0; j < n && c->mx.weight_grads && c->sizes[e] > 0; j++) round_line(r, to + first * n + j, n, c->sizes[e], NULL);
  return to;
}

static void compare(const struct chain *c, const char *what, float *want, const void *got, int64_t n) {
  float *g = to_f32(c->dtype, got, n);
  for (int64_t i = 0; i < n; i++)
    if (memcmp(want + i, g + i, 4) != 0)
      fail_msg("%s[%lld]: %a, not %a | isa %s dtype %d T %lld H %lld I %lld elements %d %d weight_grads %d layout %d", what,
               (long long)i, (double)g[i], (double)want[i], moe_isa_name(moe_isa_active()), (int)c->dtype, (long long)c->T,
               (long long)c->H, (long long)c->I, (int)c->mx.activations.element, (int)c->mx.gradients.element,
               c->mx.weight_grads, (int)c->mx.activation_layout);
  free(g), free(want);
}

struct chain_out {
  void *y, *dx, *dwgu, *dwd;
};

/* The library's call: blocks of 7 rows. */
static void chain_call(const struct chain *c, struct chain_out *out) {
  enum { B = 7 };
  int32_t ids[512], experts[64];
  int64_t N = 0, t = 0;
  for (int e = 0; e < CHAIN_EXPERTS; e++)
    for (int left = c->sizes[e]; left > 0; left -= B, N++) {
      experts[N] = e;
      for (int r = 0; r < B; r++) ids[N * B + r] = r < left ? (int32_t)t++ : (int32_t)c->T;
    }
  float *wgu = calloc((size_t)(CHAIN_EXPERTS * c->H * 2 * c->I), sizeof *wgu);
  for (int64_t i = 0; i < CHAIN_EXPERTS * c->H * c->I; i++) wgu[(i / c->I * 2 + 1) * c->I + i % c->I] = c->wu[i];
  void *x = typed(c->dtype, c->x, c->T * c->H), *w1 = typed(c->dtype, wgu, CHAIN_EXPERTS * c->H * 2 * c->I);
  void *w2 = typed(c->dtype, c->wd, CHAIN_EXPERTS * c->I * c->H), *dy = typed(c->dtype, c->dy, c->T * c->H);
  const moe_blockwise_layer layer = {.T = c->T, .H = c->H, .I = c->I, .E = CHAIN_EXPERTS, .N = N, .B = B, .hidden_states = x,
      .gate_up_proj_weight = w1, .down_proj_weight = w2, .token_position_to_id = ids, .block_to_expert = experts, .mx = c->mx,
      .config = {.activation = MOE_ACT_IDENTITY, .skip_gate = 1, .affinity_mode = MOE_AFFINITY_NO_SCALE}};
  out->y = malloc((size_t)(c->T * c->H * 4)), out->dx = malloc((size_t)(c->T * c->H * 4));
  out->dwgu = malloc((size_t)(CHAIN_EXPERTS * c->H * 2 * c->I * 4)), out->dwd = malloc((size_t)(CHAIN_EXPERTS * c->H * c->I * 4));
  moe_blockwise_mm_fwd_args fwd = {.layer = layer, .output = out->y};
  moe_blockwise_mm_bwd_args bwd = {.layer = layer, .output_hidden_states_grad = dy, .hidden_states_grad = out->dx,
      .gate_up_proj_weight_grad = out->dwgu, .down_proj_weight_grad = out->dwd};
  const int bf16 = c->dtype == MOE_DTYPE_BF16;
  moe_context ctx = {.num_threads = 1};
  assert_int_equal((bf16 ? moe_blockwise_mm_fwd_bf16_workspace_size : moe_blockwise_mm_fwd_f32_workspace_size)(&ctx, &fwd, &fwd.workspace_bytes), MOE_OK);
  assert_int_equal((bf16 ? moe_blockwise_mm_bwd_bf16_workspace_size : moe_blockwise_mm_bwd_f32_workspace_size)(&ctx, &bwd, &bwd.workspace_bytes), MOE_OK);
  fwd.workspace = malloc(fwd.workspace_bytes), bwd.workspace = malloc(bwd.workspace_bytes);
  assert_int_equal((bf16 ? moe_blockwise_mm_fwd_bf16 : moe_blockwise_mm_fwd_f32)(&ctx, &fwd), MOE_OK);
  assert_int_equal((bf16 ? moe_blockwise_mm_bwd_bf16 : moe_blockwise_mm_bwd_f32)(&ctx, &bwd), MOE_OK);
  free(fwd.workspace), free(bwd.workspace), free(x), free(w1), free(w2), free(dy), free(wgu);
}

static void chain_check(const struct chain *c) {
  struct chain_out out;
  chain_call(c, &out);
  const moe_mx_operands *mx = &c->mx;
  float *x = rounded_rows(c, &mx->activations, c->x, c->H, 2);
  float *wut = swapped(c->wu, c->H, c->I), *wdt = swapped(c->wd, c->I, c->H);
  float *u = grouped(c, x, wut, c->I, c->H), *m = rounded_rows(c, &mx->activations, u, c->I, 1);
  compare(c, "output", grouped(c, m, wdt, c->H, c->I), out.y, c->T * c->H);
  float *dy = rounded_rows(c, &mx->gradients, c->dy, c->H, 2);
  float *du = grouped(c, dy, c->wd, c->I, c->H), *duq = rounded_rows(c, &mx->gradients, du, c->I, 1);
  compare(c, "hidden_states_grad", grouped(c, duq, c->wu, c->H, c->I), out.dx, c->T * c->H);
  float *xd = rounded_down(c, &mx->activations, c->x, c->H), *dud = rounded_down(c, &mx->gradients, du, c->I);
  float *md = rounded_down(c, &mx->activations, u, c->I), *dyd = rounded_down(c, &mx->gradients, c->dy, c->H);
  compare(c, "down_proj_weight_grad", grouped_dw(c, md, c->I, dyd, c->H), out.dwd, CHAIN_EXPERTS * c->I * c->H);
  float *up = grouped_dw(c, xd, c->H, dud, c->I), *all = calloc((size_t)(CHAIN_EXPERTS * c->H * 2 * c->I), sizeof *all);
  for (int64_t i = 0; i < CHAIN_EXPERTS * c->H * c->I; i++) all[(i / c->I * 2 + 1) * c->I + i % c->I] = up[i];
  compare(c, "gate_up_proj_weight_grad", all, out.dwgu, CHAIN_EXPERTS * c->H * 2 * c->I);
  float *own[] = {x, wut, wdt, u, m, dy, du, duq, xd, dud, md, dyd, up};
  for (size_t i = 0; i < sizeof own / sizeof *own; i++) free(own[i]);
  free(out.y), free(out.dx), free(out.dwgu), free(out.dwd);
}

static void test_chain(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  static const moe_mx_layout layouts[] = {MOE_MX_LAYOUT_PLAIN, MOE_MX_LAYOUT_NKI_STRIDED_X4, MOE_MX_LAYOUT_NKI_WRAPX, MOE_MX_LAYOUT_NKI_1X32};
  uint64_t rng = 17 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(40, 4); i++) {
    struct chain c = {.dtype = dtype, .sizes = {(int32_t)(i % 3 * 16), (int32_t)test_random_range(&rng, 1, 34), 0, 33}};
    c.T = c.sizes[0] + c.sizes[1] + c.sizes[2] + c.sizes[3];
    c.mx.activations = random_rounding(&rng), c.mx.gradients = random_rounding(&rng);
    c.mx.weight_grads = (int)(i & 1), c.mx.activation_layout = layouts[i % 4];
    c.H = sizes[test_random_range(&rng, 0, SIZES - 1)], c.I = sizes[test_random_range(&rng, 0, SIZES - 1)];
    if (c.mx.activation_layout != MOE_MX_LAYOUT_PLAIN) c.H = 512, c.I = 32 * test_random_range(&rng, 1, 5);
    c.x = random_values(&rng, dtype, c.T * c.H), c.dy = random_values(&rng, dtype, c.T * c.H);
    c.wu = random_values(&rng, dtype, CHAIN_EXPERTS * c.H * c.I), c.wd = random_values(&rng, dtype, CHAIN_EXPERTS * c.H * c.I);
    if (!test_use_isa((int)(i / 4 % TEST_ISA_COUNT))) test_use_best_isa();
    chain_check(&c);
    free(c.x), free(c.dy), free(c.wu), free(c.wd);
  }
  test_use_best_isa();
}

/* ------------------------------------------------------------------------------------------------ the same bits everywhere */

static void test_bits_everywhere(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 27 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(40, 3); i++) {
    const moe_mx_operands mx = {.activations = random_rounding(&rng), .weights = random_rounding(&rng),
                                .gradients = random_rounding(&rng), .weight_grads = (int)(i & 1)};
    struct problem_options o = problem_options_random(700 + (uint64_t)i, dtype);
    struct problem want, got;
    moe_context one = {.num_threads = 1};
    assert_true(problem_open(&want, &o, NULL, NULL) && problem_open(&got, &o, NULL, NULL));
    problem_fill(&want);
    assert_true(test_use_isa(MOE_ISA_SCALAR));
    run(&want, &one, &mx, &mx);
    for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
      if (!test_use_isa(isa)) continue;
      struct test_pool pool = {.seed = test_random(&rng)};
      moe_context ctx = {.parallel_for = test_pool_parallel_for, .parallel_for_user = &pool};
      ctx.num_threads = (int32_t)test_random_range(&rng, 1, 7), ctx.schedule = (moe_schedule)test_random_range(&rng, 0, 2);
      problem_fill(&got);
      run(&got, &ctx, &mx, &mx);
      assert_same(&want, &got, 0, moe_isa_name((moe_isa)isa));
    }
    test_use_best_isa();
    problem_close(&want, NULL, NULL), problem_close(&got, NULL, NULL);
  }
}

/* ------------------------------------------------------------------------------------------------------- bad input */

static void test_bad_input(void **state) {
  (void)state;
  struct problem_options o = options(5, MOE_DTYPE_F32, 33, 20);
  struct problem p;
  moe_context ctx = {.num_threads = 1};
  assert_true(problem_open(&p, &o, NULL, NULL));
  problem_fill(&p);
  run(&p, &ctx, NULL, NULL);
  const struct { moe_mx_operands mx; moe_status status; const char *word; } bad[] = {
      {{.activations = {.enabled = 2}}, MOE_ERROR_INVALID_OPTION, "mx.activations"},
      {{.weights = {.element = (moe_element)9}}, MOE_ERROR_INVALID_OPTION, "mx.weights"},
      {{.gradients = {.scale_rule = (moe_scale_rule)6}}, MOE_ERROR_INVALID_OPTION, "mx.gradients"},
      {{.weights = {.cast = 8}}, MOE_ERROR_INVALID_OPTION, "cast"},
      {{.weight_grads = 3}, MOE_ERROR_INVALID_OPTION, "mx.weight_grads"},
      {{.activation_layout = (moe_mx_layout)8}, MOE_ERROR_INVALID_OPTION, "mx.activation_layout"},
      {{.activations = {.enabled = 1}, .activation_layout = MOE_MX_LAYOUT_NKI_WRAPX}, MOE_ERROR_INVALID_SHAPE, "K"},
      {{.weights = {.enabled = 1}}, MOE_ERROR_INVALID_OPTION, "mx.weights"}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    struct problem_args args;
    problem_make_args(&p, &args);
    args.forward.layer.mx = args.backward.layer.mx = bad[i].mx;
    if (i == sizeof bad / sizeof *bad - 1) args.forward.layer.packed_down_weight = p.tensor[PT_DOWN_WEIGHT].data;
    assert_int_equal(problem_call(PROBLEM_FORWARD, &ctx, &args), bad[i].status);
    if (!strstr(ctx.message, bad[i].word)) fail_msg("\"%s\" does not name %s", ctx.message, bad[i].word);
    if (i < sizeof bad / sizeof *bad - 1) assert_int_equal(problem_call(PROBLEM_BACKWARD, &ctx, &args), bad[i].status);
  }
  problem_close(&p, NULL, NULL);
}

int main(void) {
  static moe_dtype f32 = MOE_DTYPE_F32, bf16 = MOE_DTYPE_BF16, fp16 = MOE_DTYPE_FP16;
#define OF(test, dtype) {#test " " #dtype, test, NULL, NULL, &dtype}
  const struct CMUnitTest tests[] = {
      OF(test_weights, f32),         OF(test_weights, bf16),         OF(test_weights, fp16),
      OF(test_chain, f32),           OF(test_chain, bf16),           OF(test_bits_everywhere, f32),
      OF(test_bits_everywhere, bf16), OF(test_bits_everywhere, fp16), cmocka_unit_test(test_bad_input),
  };
  return cmocka_run_group_tests_name("mx_operands", tests, NULL, NULL);
}
