/* The bounds of moe_neuron.h's reports on grouped GEMM and on products of MXFP8 operands. The "device" is written out
   here: it sums in another order, and rounds more or less than the CPU does. Every element is within its bound, and
   what a kernel gets wrong is not. */
#include "support/mlp.h"

#include "moe/moe_neuron.h"
#include "support/cases.h"
#include "support/test.h"

static moe_context ctx = {.allocate = test_allocate, .release = test_release};

/* As a tensor of that type holds it. */
static float held(moe_dtype dtype, double x) { return (float)test_dtype_round(dtype, x); }

static double widest; /* the largest part of a bound that was taken */

static void judge(const moe_neuron_report *report, moe_status status, int right, const char *what, uint64_t seed) {
  char text[4096];
  if (status != MOE_OK) fail_msg("%s: %s", moe_status_str(status), ctx.message);
  moe_neuron_report_text(report, text, sizeof text);
  if (report->agree != right) fail_msg("%s, seed %llu:\n%s", what, (unsigned long long)seed, text);
  for (int32_t i = 0; i < report->count && right; i++)
    if (report->tensor[i].bound > 0) widest = fmax(widest, report->tensor[i].error / report->tensor[i].bound);
}

/* ----------------------------------------------------------------------------------------------------- grouped GEMM */

enum { TOKENS = 9, TOPK = 3, EXPERTS = 4, N_ = 11, K_ = 37, TOTAL = TOKENS * TOPK, PADDING = 2 };

typedef struct grouped {
  moe_dtype dtype;
  uint64_t seed;
  test_tensor x, w, bias, dy, weights, y[2], dx[2], dot[2], dw[2], bias_grad[2];
  int32_t sizes[EXPERTS], gather[TOTAL];
  uint8_t codes[EXPERTS * N_ * K_];
  float values[EXPERTS * N_ * K_], scales[EXPERTS * N_]; /* of quantised weights */
  moe_quantized_weight quantized;
  moe_grouped_gemm_args args[2];
} grouped;

enum { RIGHT, NO_BIAS, NO_WEIGHT, OTHER_ORDER, SLOT_DROPPED, ACCUMULATION_DROPPED, WRONG };
static const char *const wrong_name[] = {"right", "no bias", "no weights", "other order", "a slot dropped",
                                         "accumulation dropped"};

static void grouped_new(grouped *g, moe_dtype dtype, uint64_t seed) {
  memset(g, 0, sizeof *g);
  g->dtype = dtype, g->seed = seed;
  const struct {
    test_tensor *t;
    moe_dtype dtype;
    int64_t n;
  } list[] = {{&g->x, dtype, TOTAL * K_}, {&g->w, dtype, EXPERTS * N_ * K_}, {&g->bias, dtype, EXPERTS * N_},
              {&g->dy, dtype, TOTAL * N_}, {&g->weights, MOE_DTYPE_F32, TOTAL}, {&g->y[0], dtype, TOTAL * N_},
              {&g->dx[0], dtype, TOTAL * K_}, {&g->dot[0], MOE_DTYPE_F32, TOTAL},
              {&g->dw[0], dtype, EXPERTS * N_ * K_}, {&g->bias_grad[0], dtype, EXPERTS * N_}};
  for (int i = 0; i < 10; i++)
    for (int d = 0; d < (i < 5 ? 1 : 2); d++) {
      uint64_t rng = seed + (uint64_t)i; /* outputs begin alike */
      list[i].t[d] = test_tensor_new(list[i].dtype, list[i].n);
      test_fill_uniform(&list[i].t[d], &rng, 2);
    }
  const int32_t sizes[EXPERTS] = {8, 0, 6, TOTAL - PADDING - 14};
  memcpy(g->sizes, sizes, sizeof sizes);
  for (int i = 0; i < TOTAL; i++) g->gather[i] = i < TOTAL - PADDING ? (i * 10 + 4) % TOTAL : -1;
  const uint64_t random = test_random(&seed);
  for (int d = 0; d < 2; d++)
    g->args[d] = (moe_grouped_gemm_args){.num_tokens = TOKENS, .topk = TOPK, .E = EXPERTS, .N = N_, .K = K_,
        .m_sizes = g->sizes, .gather_indices = g->gather, .permute_x = random % 3 == 1, .permute_y = random % 3 == 2,
        .sum_topk = random % 3 == 1 && (random >> 8 & 1), .weight_order = (moe_grouped_order)(random >> 9 & 1),
        .topk_mode = (moe_topk_mode)(random >> 10 & 1), .X = g->x.data, .W = g->w.data, .bias = g->bias.data,
        .dY = g->dy.data, .topk_weights = random >> 11 & 1 ? g->weights.data : NULL, .Y = g->y[d].data,
        .dX = g->dx[d].data, .topk_weights_grad = g->dot[d].data, .dW = g->dw[d].data,
        .bias_grad = g->bias_grad[d].data, .accumulate = random >> 12 & 1 ? MOE_ACCUMULATE_Y | MOE_ACCUMULATE_DX |
            MOE_ACCUMULATE_DW | MOE_ACCUMULATE_BIAS_GRAD | MOE_ACCUMULATE_TOPK_WEIGHTS_GRAD : 0};
  if (random >> 13 & 3) return;
  g->quantized = (moe_quantized_weight){.element = MOE_ELEMENT_E4M3FN, .scaling = MOE_WEIGHT_COLUMN_PER_EXPERT,
      .codes = g->codes, .scales = g->scales};
  for (int i = 0; i < EXPERTS * N_ * K_; i++) g->codes[i] = (uint8_t)(test_random(&seed) & 0xbf);
  for (int i = 0; i < EXPERTS * N_; i++) g->scales[i] = 0.3f + (float)test_unit(&seed);
  (void)moe_e4m3fn_to_f32(NULL, g->values, g->codes, EXPERTS * N_ * K_);
  g->args[0].quantized_W = g->args[1].quantized_W = &g->quantized;
}

static void grouped_free(grouped *g) {
  test_tensor *all[] = {&g->x, &g->w, &g->bias, &g->dy, &g->weights, g->y, g->dx, g->dot, g->dw, g->bias_grad};
  for (int i = 0; i < 10; i++)
    for (int d = 0; d < (i < 5 ? 1 : 2); d++) test_tensor_free(&all[i][d]);
}

static double weight_at(const grouped *g, int wrong, int64_t e, int64_t n, int64_t k) {
  const int ekn = (g->args[0].weight_order == MOE_GROUPED_EKN) != (wrong == OTHER_ORDER);
  const int64_t at = ekn ? (e * K_ + k) * N_ + n : (e * N_ + n) * K_ + k;
  if (!g->args[0].quantized_W) return test_tensor_get(&g->w, at);
  return (double)g->values[at] * (double)g->scales[e * N_ + n]; /* not rounded */
}

/* Stores a result, rounded before it is added to what is there. */
static void put(const grouped *g, int wrong, test_tensor *to, int64_t at, double x, int adds) {
  const double before = adds && wrong != ACCUMULATION_DROPPED ? test_tensor_get(to, at) : 0;
  test_tensor_set(to, at, before + held(to->dtype == MOE_DTYPE_F32 ? MOE_DTYPE_F32 : g->dtype, x));
}

/* All outputs of the device; a weight is multiplied as type `dtype` holds it, and what it is multiplied with, too. */
static void grouped_device(grouped *g, int wrong) {
  const moe_grouped_gemm_args *a = &g->args[1];
  const int adds = a->accumulate != 0, pre = a->topk_mode == MOE_TOPK_PRE;
  static double sums[TOKENS * K_], dw[EXPERTS * N_ * K_], db[EXPERTS * N_];
  memset(sums, 0, sizeof sums), memset(dw, 0, sizeof dw), memset(db, 0, sizeof db);
  for (int slot = 0; slot < TOTAL && !adds; slot++) { /* rows of padding */
    for (int n = 0; n < N_; n++) test_tensor_set(&g->y[1], slot * N_ + n, 0);
    for (int k = 0; k < K_ && !a->sum_topk; k++) test_tensor_set(&g->dx[1], slot * K_ + k, 0);
    test_tensor_set(&g->dot[1], slot, 0);
  }
  for (int e = 0, pos = 0; e < EXPERTS; e++)
    for (int end = pos + g->sizes[e]; pos < end; pos++) {
      const int64_t slot = g->gather[pos], xr = (a->permute_x ? slot / TOPK : pos) * K_;
      const int64_t yr = a->permute_y ? slot : pos, dr = a->permute_x ? slot : pos;
      const int weighs = a->topk_weights && wrong != NO_WEIGHT;
      const double w = weighs ? (double)held(g->dtype, test_tensor_get(&g->weights, slot)) : 1;
      double dot = 0;
      if (wrong == SLOT_DROPPED && slot == 7) continue;
      for (int n = 0; n < N_; n++) {
        double s = 0, b = wrong == NO_BIAS ? 0 : test_tensor_get(&g->bias, e * N_ + n);
        const double dy = test_tensor_get(&g->dy, yr * N_ + n);
        for (int k = K_ - 1; k >= 0; k--) {
          double x = test_tensor_get(&g->x, xr + k);
          if (pre && weighs) x = held(g->dtype, x * w);
          s += x * weight_at(g, wrong, e, n, k);
          dw[(e * N_ + n) * K_ + k] += dy * (weighs ? held(g->dtype, test_tensor_get(&g->x, xr + k) * w) : x);
        }
        const double y = pre || !weighs ? s + b : held(g->dtype, s + b) * w;
        put(g, wrong, &g->y[1], yr * N_ + n, y, adds);
        db[e * N_ + n] += pre || !weighs ? dy : held(g->dtype, dy * w);
      }
      for (int k = 0; k < K_; k++) {
        double d = 0, weighted = 0;
        for (int n = N_ - 1; n >= 0; n--) {
          const double dy = test_tensor_get(&g->dy, yr * N_ + n);
          d += dy * weight_at(g, wrong, e, n, k);
          weighted += (weighs ? held(g->dtype, dy * w) : dy) * weight_at(g, wrong, e, n, k);
        }
        dot += held(g->dtype, d) * test_tensor_get(&g->x, xr + k);
        if (a->sum_topk) sums[slot / TOPK * K_ + k] = held(g->dtype, sums[slot / TOPK * K_ + k] + weighted);
        else put(g, wrong, &g->dx[1], dr * K_ + k, weighted, adds);
      }
      for (int n = 0; n < N_ && !pre && wrong != NO_BIAS; n++)
        dot += test_tensor_get(&g->dy, yr * N_ + n) * test_tensor_get(&g->bias, e * N_ + n);
      put(g, wrong, &g->dot[1], slot, dot, adds);
    }
  for (int i = 0; i < TOKENS * K_ && a->sum_topk; i++) put(g, wrong, &g->dx[1], i, sums[i], adds);
  for (int e = 0; e < EXPERTS; e++)
    for (int n = 0; n < N_; n++) {
      const int ekn = a->weight_order == MOE_GROUPED_EKN;
      put(g, wrong, &g->bias_grad[1], e * N_ + n, db[e * N_ + n], adds);
      for (int k = 0; k < K_; k++)
        put(g, wrong, &g->dw[1], ekn ? (e * K_ + k) * N_ + n : (e * N_ + n) * K_ + k, dw[(e * N_ + n) * K_ + k], adds);
    }
}

#define GROUPED(suffix)                                                                                              \
  {                                                                                                                  \
    moe_status status = dtype == MOE_DTYPE_F32    ? moe_grouped_gemm##suffix##_f32(&ctx, &g.args[0])                 \
                        : dtype == MOE_DTYPE_BF16 ? moe_grouped_gemm##suffix##_bf16(&ctx, &g.args[0])                \
                                                  : moe_grouped_gemm##suffix##_fp16(&ctx, &g.args[0]);               \
    if (status == MOE_OK)                                                                                            \
      status = dtype == MOE_DTYPE_F32                                                                                \
                   ? moe_neuron_compare_grouped_gemm##suffix##_f32(&ctx, &g.args[0], &g.args[1], NULL, &report)      \
               : dtype == MOE_DTYPE_BF16                                                                             \
                   ? moe_neuron_compare_grouped_gemm##suffix##_bf16(&ctx, &g.args[0], &g.args[1], NULL, &report)     \
                   : moe_neuron_compare_grouped_gemm##suffix##_fp16(&ctx, &g.args[0], &g.args[1], NULL, &report);    \
    agree &= report.agree;                                                                                           \
    if (wrong == RIGHT || status != MOE_OK) judge(&report, status, 1, "grouped" #suffix, seed);                      \
  }

static void test_grouped(void **state) {
  const moe_dtype dtype = *(moe_dtype *)*state;
  static grouped g;
  moe_neuron_report report;
  widest = 0;
  for (int64_t i = 0; i < test_cases(60, 20); i++)
    for (int wrong = RIGHT; wrong < WRONG; wrong++) {
      const uint64_t seed = 77 + (uint64_t)i;
      int agree = 1;
      grouped_new(&g, dtype, seed);
      grouped_device(&g, wrong);
      GROUPED() GROUPED(_dx) GROUPED(_dw)
      const int matters = wrong == NO_WEIGHT ? g.args[0].topk_weights != NULL
                                             : wrong != ACCUMULATION_DROPPED || g.args[0].accumulate;
      if (agree != !(wrong && matters)) fail_msg("%s, seed %llu", wrong_name[wrong], (unsigned long long)seed);
      grouped_free(&g);
    }
  print_message("%s: at most %.2f of a bound\n", test_dtype_name(dtype), widest);
  assert_true(widest > 0.02);
}

/* --------------------------------------------------------------------------------------------------- MXFP8 operands */

/* a [M,K] times b [N,K]^T, summed in double. */
static float *product(const float *a, int64_t M, const float *b, int64_t N, int64_t K) {
  float *c = mlp_floats(M * N);
  for (int64_t i = 0; i < M; i++)
    for (int64_t j = 0; j < N; j++) {
      double sum = 0;
      for (int64_t k = 0; k < K; k++) sum += (double)a[i * K + k] * (double)b[j * K + k];
      c[i * N + j] = (float)sum;
    }
  return c;
}

typedef struct mlp {
  moe_mlp_mxfp8 m;
  float *x, *gate_up, *down, *dy; /* bf16 values */
  int rounds;                     /* intermediates to bf16 */
  moe_mxfp8_format format;        /* the device's */
} mlp;

static float *rounded(const mlp *c, const float *x, int64_t F, int64_t K) {
  return mlp_rounded(&c->format, c->format.layout, x, F, K);
}
static float kept(const mlp *c, double x) { return c->rounds ? mlp_as_bf16((float)x) : (float)x; }
static double limited(double x, uint32_t clamp, uint32_t upper_bit, float upper, uint32_t lower_bit, float lower) {
  if (clamp & upper_bit) x = fmin(x, (double)upper);
  return clamp & lower_bit ? fmax(x, (double)lower) : x;
}
static double silu(double x) { return x / (1 + exp(-x)); }
static double silu_slope(double x) { return (1 + x * (1 - 1 / (1 + exp(-x)))) / (1 + exp(-x)); }

enum { MLP_RIGHT, MLP_RULE, MLP_NO_OFFSET, MLP_SWAPPED, MLP_WRONG };

/* SiLU with limits; tensors [S,I] and more, as bf16 outputs. */
static void mlp_device(mlp *c, int wrong, moe_mlp_fwd_mxfp8_args *fwd, moe_mlp_bwd_mxfp8_args *bwd) {
  const moe_layer_config *o = &c->m.config;
  const int64_t S = c->m.S, H = c->m.H, I = c->m.I, n = S * I;
  float *gate_up = c->gate_up;
  c->format = c->m.format;
  if (wrong == MLP_RULE) c->format.use_scale_rule = 1, c->format.scale_rule = MOE_SCALE_OCP_FLOOR;
  if (wrong == MLP_SWAPPED) {
    gate_up = mlp_floats(2 * I * H);
    for (int64_t i = 0; i < 2 * I * H; i++) gate_up[i] = c->gate_up[(i + I * H) % (2 * I * H)];
  }
  float *both = product(rounded(c, c->x, S, H), S, rounded(c, gate_up, 2 * I, H), 2 * I, H);
  float *g = mlp_floats(n), *u = mlp_floats(n), *act = mlp_floats(n), *m = mlp_floats(n), *dg = mlp_floats(n),
        *du = mlp_floats(n);
  float *dm = product(rounded(c, c->dy, S, H), S, rounded(c, mlp_transposed(c->down, H, I), I, H), I, H);
  const double offset = wrong == MLP_NO_OFFSET ? 0 : (double)o->up_offset;
  for (int64_t i = 0; i < n; i++) {
    const double x = (double)both[i / I * 2 * I + i % I], v = (double)both[i / I * 2 * I + I + i % I];
    g[i] = kept(c, limited(x, o->clamp, MOE_CLAMP_GATE_UPPER, o->gate_clamp_upper_limit, MOE_CLAMP_GATE_LOWER,
                           o->gate_clamp_lower_limit));
    u[i] = kept(c, limited(v, o->clamp, MOE_CLAMP_UP_UPPER, o->up_clamp_upper_limit, MOE_CLAMP_UP_LOWER,
                           o->up_clamp_lower_limit));
    const double most = o->clamp & MOE_CLAMP_ACTIVATION_UPPER ? (double)o->activation_clamp_upper_limit : INFINITY;
    const double slope = silu((double)g[i]) < most ? silu_slope((double)g[i]) : 0;
    act[i] = kept(c, fmin(silu((double)g[i]), most)), m[i] = kept(c, (double)act[i] * ((double)u[i] + offset));
    const int in_g = !(o->clamp & 15) || (g[i] < kept(c, (double)o->gate_clamp_upper_limit) &&
                                   g[i] > kept(c, (double)o->gate_clamp_lower_limit));
    const int in_u = !(o->clamp & 15) || (u[i] < kept(c, (double)o->up_clamp_upper_limit) &&
                                   u[i] > kept(c, (double)o->up_clamp_lower_limit));
    const double d = (double)kept(c, (double)dm[i]);
    dg[i] = in_g ? kept(c, d * ((double)u[i] + offset) * slope) : 0;
    du[i] = in_u ? kept(c, d * (double)act[i]) : 0;
  }
  float *gu_T = mlp_transposed(mlp_joined(dg, du, S, I), S, 2 * I);
  float *dx_g = product(rounded(c, dg, S, I), S, rounded(c, mlp_transposed(gate_up, I, H), H, I), H, I);
  float *dx_u = product(rounded(c, du, S, I), S, rounded(c, mlp_transposed(gate_up + I * H, I, H), H, I), H, I);
  for (int64_t i = 0; i < S * H; i++) dx_g[i] += dx_u[i];
  fwd->gate_pre = mlp_bf16(g, n), fwd->up = mlp_bf16(u, n), fwd->gate_act = mlp_bf16(act, n);
  fwd->hidden = mlp_bf16(m, n);
  fwd->output = mlp_bf16(product(rounded(c, m, S, I), S, rounded(c, c->down, H, I), H, I), S * H);
  bwd->gate_pre_scratch = fwd->gate_pre, bwd->up_scratch = fwd->up, bwd->gate_act_scratch = fwd->gate_act;
  bwd->hidden_scratch = fwd->hidden, bwd->d_gate = mlp_bf16(dg, n), bwd->d_up = mlp_bf16(du, n);
  bwd->d_gate_up_T = mlp_bf16(gu_T, 2 * n), bwd->hidden_states_grad = mlp_bf16(dx_g, S * H);
  bwd->gate_up_weight_grad = mlp_bf16(
      product(rounded(c, gu_T, 2 * I, S), 2 * I, rounded(c, mlp_transposed(c->x, S, H), H, S), H, S), 2 * I * H);
  bwd->down_weight_grad = mlp_bf16(product(rounded(c, mlp_transposed(c->dy, S, H), H, S), H,
                                           rounded(c, mlp_transposed(m, S, I), I, S), I, S), H * I);
}

static void *bytes_of(int64_t n) { return mlp_guarded((size_t)n * 2, 0xff); }

static void test_mlp(void **state) {
  (void)state;
  static const moe_mx_layout layout[] = {MOE_MX_LAYOUT_PLAIN, MOE_MX_LAYOUT_NKI_1X32, MOE_MX_LAYOUT_NKI_WRAPX};
  widest = 0;
  for (int64_t i = 0; i < test_cases(18, 6); i++)
    for (int wrong = MLP_RIGHT; wrong < MLP_WRONG; wrong++) {
      uint64_t seed = 900 + (uint64_t)i;
      const uint64_t random = test_random(&seed);
      moe_neuron_report report[2];
      mlp c = {.m = {.S = 64, .H = 96, .I = 64, .format = {.layout = layout[random % 3],
          .element = random >> 8 & 1 ? MOE_ELEMENT_E5M2 : MOE_ELEMENT_E4M3FN}}, .rounds = random >> 9 & 1};
      if (random >> 10 & 1)
        c.m.config = (moe_layer_config){.clamp = 15, .gate_clamp_upper_limit = 1.3f, .gate_clamp_lower_limit = -0.9f,
            .up_clamp_upper_limit = 0.7f, .up_clamp_lower_limit = -1.1f};
      c.m.config.up_offset = 1;
      if (random >> 11 & 1) c.m.config.clamp |= MOE_CLAMP_ACTIVATION_UPPER;
      c.m.config.activation_clamp_upper_limit = 0.1f;
      const int64_t S = c.m.S, H = c.m.H, I = c.m.I, n = S * I;
      c.x = mlp_values(&seed, S * H, 1), c.gate_up = mlp_values(&seed, 2 * I * H, 0.3f);
      c.down = mlp_values(&seed, H * I, 0.3f), c.dy = mlp_values(&seed, S * H, 1);
      const moe_mxfp8_operand x = {.data = mlp_bf16(c.x, S * H)}, gate_up = {.data = mlp_bf16(c.gate_up, 2 * I * H)},
                              down = {.data = mlp_bf16(c.down, H * I)}, dy = {.data = mlp_bf16(c.dy, S * H)};
      moe_mlp_fwd_mxfp8_args fwd[2] = {{.mlp = c.m, .hidden_states = x, .gate_up_weights = gate_up, .down_weight = down,
          .gate_pre = bytes_of(n), .up = bytes_of(n), .gate_act = bytes_of(n), .hidden = bytes_of(n),
          .output = bytes_of(S * H)}};
      moe_mlp_bwd_mxfp8_args bwd[2] = {{.mlp = c.m, .output_grad = dy, .hidden_states = x, .gate_up_weights = gate_up,
          .down_weight = down, .gate_pre_scratch = bytes_of(n), .up_scratch = bytes_of(n),
          .gate_act_scratch = bytes_of(n), .hidden_scratch = bytes_of(n), .d_gate = bytes_of(n), .d_up = bytes_of(n),
          .d_gate_up_T = bytes_of(2 * n), .hidden_states_grad = bytes_of(S * H),
          .gate_up_weight_grad = bytes_of(2 * I * H), .down_weight_grad = bytes_of(H * I)}};
      fwd[1] = fwd[0], bwd[1] = bwd[0];
      mlp_device(&c, wrong, &fwd[1], &bwd[1]);
      const moe_status status[2] = {moe_mlp_fwd_mxfp8(&ctx, &fwd[0]), moe_mlp_bwd_mxfp8(&ctx, &bwd[0])};
      assert_true(status[0] == MOE_OK && status[1] == MOE_OK);
      judge(&report[0], moe_neuron_compare_mlp_fwd_mxfp8(&ctx, &fwd[0], &fwd[1], NULL, &report[0]), !wrong, "fwd",
            (uint64_t)i * 10 + (uint64_t)wrong);
      judge(&report[1], moe_neuron_compare_mlp_bwd_mxfp8(&ctx, &bwd[0], &bwd[1], NULL, &report[1]), !wrong, "bwd",
            (uint64_t)i * 10 + (uint64_t)wrong);
      assert_int_equal(report[0].count, 5);
      assert_int_equal(report[1].count, 10);
      mlp_release();
    }
  print_message("mlp: at most %.2f of a bound\n", widest);
  assert_true(widest > 0.02);
}

/* --------------------------------------------------------------------------------- the layer of rounded operands */

enum { L_E = 3, L_B = 6, L_T = L_E * L_B, L_H = 96, L_I = 64 };
enum { LAYER_RIGHT, LAYER_RULE, LAYER_NO_SCALE, LAYER_PLAIN_WEIGHTS, LAYER_WRONG };

/* [F,K] rounded in groups or, where there is a scale, under that. */
static float *layer_rounded(const mlp *c, const moe_mx_rounding *r, const float *x, int64_t F, int64_t K, float scale) {
  if (!r->enabled) return (float *)(uintptr_t)x;
  if (scale <= 0) return rounded(c, x, F, K);
  float *y = mlp_floats(F * K);
  uint8_t *codes = (uint8_t *)mlp_floats(F * K);
  const moe_quantize_scaled_args to = {.element = r->element, .cast = r->cast, .rows = F, .columns = K,
      .scales_given = 1, .plain = x, .codes = codes, .scales = &scale};
  const moe_dequantize_scaled_args back = {.element = r->element, .rows = F, .columns = K, .codes = codes,
      .scales = &scale, .plain = y};
  assert_true(moe_quantize_scaled(NULL, &to) == MOE_OK && moe_dequantize_scaled(NULL, &back) == MOE_OK);
  return y;
}

/* Expert e's tokens, which are all of block e. */
static void layer_device(mlp *c, int wrong, const moe_blockwise_layer *l, int e, const float *x, const float *wgu,
                         const float *wd, const float *affinity, float *y) {
  const moe_mx_rounding none = {.enabled = 0}, *act = &l->mx.activations;
  const moe_mx_rounding *weights = wrong == LAYER_PLAIN_WEIGHTS ? &none : &l->mx.weights;
  const float in = l->mx.gate_up_in_scale && wrong != LAYER_NO_SCALE ? l->mx.gate_up_in_scale[e] : 0;
  const float down_in = l->mx.down_in_scale && wrong != LAYER_NO_SCALE ? l->mx.down_in_scale[e] : 0;
  const moe_mx_layout layout = c->format.layout;
  float *rows = layer_rounded(c, act, x, L_B, L_H, in), *m = mlp_floats(L_B * L_I);
  c->format.layout = MOE_MX_LAYOUT_PLAIN;
  float *gate_up = layer_rounded(c, weights, mlp_transposed(wgu, L_H, 2 * L_I), 2 * L_I, L_H, 0);
  float *down = layer_rounded(c, weights, mlp_transposed(wd, L_I, L_H), L_H, L_I, 0);
  c->format.layout = layout;
  float *both = product(rows, L_B, gate_up, 2 * L_I, L_H);
  for (int i = 0; i < L_B * L_I; i++) {
    const float *at = both + i / L_I * 2 * L_I + i % L_I;
    m[i] = kept(c, silu((double)at[0]) * (double)at[L_I]);
  }
  float *d = product(layer_rounded(c, act, m, L_B, L_I, down_in), L_B, down, L_H, L_I);
  for (int i = 0; i < L_B * L_H; i++) y[i] = d[i] * affinity[i / L_H * L_E + e];
}

static void test_layer_mx(void **state) {
  const int bf16 = *(moe_dtype *)*state == MOE_DTYPE_BF16;
  static const moe_mx_layout layout[] = {MOE_MX_LAYOUT_PLAIN, MOE_MX_LAYOUT_NKI_1X32, MOE_MX_LAYOUT_NKI_WRAPX};
  static const moe_element element[] = {MOE_ELEMENT_E4M3FN, MOE_ELEMENT_E5M2, MOE_ELEMENT_E2M1};
  static float in_scale[L_E] = {0.01f, 0.02f, 0.015f};
  int32_t ids[L_T], experts[L_E];
  int found[LAYER_WRONG] = {0};
  widest = 0;
  for (int i = 0; i < L_T; i++) ids[i] = i, experts[i / L_B] = i / L_B;
  for (int64_t i = 0; i < test_cases(45, 15); i++)
    for (int wrong = LAYER_RIGHT; wrong < LAYER_WRONG; wrong++) {
      uint64_t seed = 500 + (uint64_t)i;
      const uint64_t random = test_random(&seed);
      moe_neuron_report report;
      const int scaled = random >> 8 & 1;
      const moe_mx_rounding rule = {.enabled = 1, .element = element[random % (scaled ? 2 : 3)],
          .scale_rule = MOE_SCALE_OCP_FLOOR, .cast = MOE_CAST_SATURATE};
      float *x = mlp_values(&seed, L_T * L_H, 1), *wgu = mlp_values(&seed, L_E * L_H * 2 * L_I, 0.3f);
      float *wd = mlp_values(&seed, L_E * L_I * L_H, 0.3f), *y = mlp_floats(L_T * L_H), *a = mlp_floats(L_T * L_E);
      for (int k = 0; k < L_T; k++) a[k * L_E + k / L_B] = 0.5f + (float)test_unit(&seed);
      moe_blockwise_mm_fwd_args args[2] = {{.layer = {.T = L_T, .H = L_H, .I = L_I, .E = L_E, .N = L_E, .B = L_B,
          .hidden_states = bf16 ? (void *)mlp_bf16(x, L_T * L_H) : x, .expert_affinities_masked = a,
          .gate_up_proj_weight = bf16 ? (void *)mlp_bf16(wgu, L_E * L_H * 2 * L_I) : wgu,
          .down_proj_weight = bf16 ? (void *)mlp_bf16(wd, L_E * L_I * L_H) : wd, .token_position_to_id = ids,
          .block_to_expert = experts, .skip_token = 1, .mx = {.activations = rule,
          .activation_layout = layout[random >> 4 & 1 ? 2 : random % 2]}}, .output = mlp_floats(L_T * L_H)}};
      if (random >> 9 & 1) args[0].layer.mx.weights = rule;
      if (scaled) args[0].layer.mx.gate_up_in_scale = args[0].layer.mx.down_in_scale = in_scale;
      mlp c = {.rounds = bf16, .format = {.element = rule.element, .use_scale_rule = 1,
          .scale_rule = wrong == LAYER_RULE ? MOE_SCALE_CEIL : rule.scale_rule,
          .layout = args[0].layer.mx.activation_layout}};
      for (int e = 0; e < L_E; e++)
        layer_device(&c, wrong, &args[0].layer, e, x + e * L_B * L_H, wgu + e * L_H * 2 * L_I, wd + e * L_I * L_H,
                     a + e * L_B * L_E, y + e * L_B * L_H);
      args[1] = args[0];
      args[1].output = bf16 ? (void *)mlp_bf16(y, L_T * L_H) : y;
      moe_status status = bf16 ? moe_blockwise_mm_fwd_bf16(&ctx, &args[0]) : moe_blockwise_mm_fwd_f32(&ctx, &args[0]);
      if (status == MOE_OK)
        status = bf16 ? moe_neuron_compare_blockwise_mm_fwd_bf16(&ctx, &args[0], &args[1], NULL, &report)
                      : moe_neuron_compare_blockwise_mm_fwd_f32(&ctx, &args[0], &args[1], NULL, &report);
      if (wrong == LAYER_RIGHT || status != MOE_OK) judge(&report, status, 1, "layer", (uint64_t)i);
      found[wrong] += !report.agree;
      mlp_release();
    }
  print_message("layer: at most %.2f of a bound; found %d rules, %d scales, %d weights\n", widest, found[LAYER_RULE],
                found[LAYER_NO_SCALE], found[LAYER_PLAIN_WEIGHTS]);
  assert_true(widest > 0.02 && found[LAYER_RIGHT] == 0);
  assert_true(found[LAYER_RULE] > 2 && found[LAYER_NO_SCALE] > 2 && found[LAYER_PLAIN_WEIGHTS] > 2);
}

int main(void) {
  const struct CMUnitTest tests[] = {EACH_DTYPE(test_grouped), cmocka_unit_test(test_mlp),
      {"test_layer_mx f32", test_layer_mx, NULL, NULL, test_dtype_state(MOE_DTYPE_F32)},
      {"test_layer_mx bf16", test_layer_mx, NULL, NULL, test_dtype_state(MOE_DTYPE_BF16)}};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
