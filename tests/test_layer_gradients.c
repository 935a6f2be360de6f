/* test_layer_gradients: every gradient of moe_layer_backward_f32 against complex step derivatives of the layer's
   mathematics in double: L = <dY, layer(x)>, router, scales, shared expert with its gate, identity experts and biases.
   The library computes in binary32, so both agree to the roundings of the longest path, relative to the largest
   gradient of all: parameters are about 1, so that it is as large as the terms of any sum. */
#include "reference/complex.h"
#include "support/layer_parts.h"

enum { CONFIGURATIONS = 2000 };
enum { X, ROUTER, ROUTER_BIAS, WGU, WD, BGU, BD, SCALE, SWGU, SWD, SBGU, SBD, GATE, TOPK, PARAMETERS };
static const char *const name[] = {"x",
                                   "router_weight",
                                   "router_bias",
                                   "gate_up",
                                   "down",
                                   "gate_up_bias",
                                   "down_bias",
                                   "expert_scale",
                                   "shared->gate_up",
                                   "shared->down",
                                   "shared->gate_up_bias",
                                   "shared->down_bias",
                                   "shared->gate",
                                   "topk_weights"};

typedef struct net {
  int64_t T, H, I, S, E, N, K;
  moe_layer l;
  moe_shared_expert shared;
  moe_router_topk_args router;
  int64_t begin[PARAMETERS + 1];
  float *value, *grad, *dy;
  double *loss_grad; /* by complex step */
  int has[PARAMETERS];
  int32_t *index;
} net;

/* ---------------------------------------------------------------------------------------------- the loss, complex */

typedef struct expert {
  int64_t I;
  const double complex *wgu, *wd, *bgu, *bd; /* bgu, bd: or NULL */
} expert;

/* y [H] += a*(m*Wd + bd)*scale, or with the input scaled. */
static void add_expert(const moe_layer_config *o, int64_t H, const expert *e, const double complex *x, double complex a,
                       double complex *y) {
  const int pre = ref_scales_input(o), after = ref_scales_output(o);
  double complex m[64];
  for (int64_t i = 0; i < e->I; i++) {
    double complex part[2] = {0, 0};
    for (int64_t h = 0; h < H; h++)
      for (int p = 0; p < 2; p++) part[p] += x[h] * e->wgu[(h * 2 + p) * e->I + i];
    for (int p = 0; p < 2; p++) part[p] = (pre ? a : 1) * part[p] + (e->bgu ? e->bgu[p * e->I + i] : 0);
    m[i] = intermediate_c64(o, clamp_c64(part[0], o->clamp & MOE_CLAMP_GATE_UPPER, o->gate_clamp_upper_limit, 0, 0),
                            clamp_c64(part[1], o->clamp & MOE_CLAMP_UP_UPPER, o->up_clamp_upper_limit,
                                      o->clamp & MOE_CLAMP_UP_LOWER, o->up_clamp_lower_limit));
  }
  for (int64_t h = 0; h < H; h++) {
    double complex d = e->bd ? e->bd[h] : 0;
    for (int64_t i = 0; i < e->I; i++) d += m[i] * e->wd[i * H + h];
    y[h] += (after ? a : 1) * d;
  }
}

static double complex loss(const net *n, const double complex *v) {
  const int64_t *at = n->begin, H = n->H, experts = n->E + n->N;
  const moe_layer_config *o = &n->l.config;
  moe_layer_config of_shared = *o;
  double complex sum = 0;
  of_shared.affinity_mode = n->has[GATE] ? MOE_AFFINITY_POST_SCALE : MOE_AFFINITY_NO_SCALE;
  for (int64_t t = 0; t < n->T; t++) {
    const double complex *x = v + at[X] + t * H;
    double complex y[16] = {0}, z[16] = {0}, s[16], w[8], gate = 0;
    for (int64_t e = 0; e < experts; e++) {
      z[e] = n->has[ROUTER_BIAS] ? v[at[ROUTER_BIAS] + e] : 0;
      for (int64_t h = 0; h < H; h++) z[e] += x[h] * v[at[ROUTER] + h * experts + e];
    }
    if (n->l.router) router_weights_c64(&n->router.config, experts, n->K, z, n->index + t * n->K, s, w);
    for (int64_t k = 0; k < n->K; k++) w[k] = (n->l.router ? w[k] : 0) + v[at[TOPK] + t * n->K + k];
    for (int64_t k = 0; k < n->K; k++) {
      const int32_t e = n->index[t * n->K + k];
      const expert one = {n->I, v + at[WGU] + e * H * 2 * n->I, v + at[WD] + e * n->I * H,
                          n->has[BGU] ? v + at[BGU] + e * 2 * n->I : NULL, n->has[BD] ? v + at[BD] + e * H : NULL};
      const double complex a = n->has[SCALE] && e < n->E ? w[k] * v[at[SCALE] + e] : w[k];
      if (e < n->E) add_expert(o, H, &one, x, a, y);
      for (int64_t h = 0; h < H && e >= n->E; h++) y[h] += o->affinity_mode == MOE_AFFINITY_NO_SCALE ? x[h] : a * x[h];
    }
    for (int64_t h = 0; h < H; h++) gate += x[h] * v[at[GATE] + h];
    const expert also = {n->S, v + at[SWGU], v + at[SWD], n->has[SBGU] ? v + at[SBGU] : NULL,
                         n->has[SBD] ? v + at[SBD] : NULL};
    if (n->S) add_expert(&of_shared, H, &also, x, 1 / (1 + cexp(-gate)), y);
    for (int64_t h = 0; h < H; h++) sum += (double)n->dy[t * H + h] * y[h];
  }
  return sum;
}

/* ---------------------------------------------------------------------------------------------------------- a case */

static void make(net *n, uint64_t seed) {
  uint64_t rng = seed * 977 + 3, *s = &rng;
  memset(n, 0, sizeof *n);
  n->T = test_random_range(s, 1, 5), n->H = test_random_range(s, 1, 6), n->I = test_random_range(s, 1, 5);
  n->S = test_random_chance(s, 4) ? 0 : test_random_range(s, 1, 6);
  n->E = test_random_range(s, 1, 4), n->N = test_random_range(s, 0, 2), n->K = n->E > 1 ? 2 : 1;
  const int64_t experts = n->E + n->N, H = n->H;
  const int64_t size[PARAMETERS] = {n->T * H,        H * experts, experts, n->E * H * 2 * n->I, n->E * n->I * H,
                                    n->E * 2 * n->I, n->E * H,    n->E,    H * 2 * n->S,        n->S * H,
                                    2 * n->S,        H,           H,       n->T * n->K};
  for (int i = 0; i < PARAMETERS; i++) n->begin[i + 1] = n->begin[i] + size[i], n->has[i] = 1;
  const int64_t all = n->begin[PARAMETERS];
  n->value = parts_numbers(MOE_DTYPE_F32, all, 1.5, s), n->dy = parts_numbers(MOE_DTYPE_F32, n->T * H, 1, s);
  n->grad = parts_numbers(MOE_DTYPE_F32, all, 1, s);
  n->loss_grad = calloc((size_t)all, sizeof *n->loss_grad);
  moe_layer_config *o = &n->l.config;
  o->activation = (moe_activation)test_random_range(s, 0, MOE_ACT_COUNT_ - 1);
  o->affinity_mode = (moe_affinity_mode)test_random_range(s, 0, MOE_AFFINITY_COUNT_ - 1);
  o->up_offset = test_random_chance(s, 3) ? 1.0f : 0.0f, o->skip_gate = test_random_chance(s, 6);
  const uint32_t clamps = MOE_CLAMP_GATE_UPPER | MOE_CLAMP_UP_UPPER | MOE_CLAMP_UP_LOWER;
  o->clamp = test_random_chance(s, 2) ? (uint32_t)test_random(s) & clamps : 0;
  o->gate_clamp_upper_limit = 0.9f, o->up_clamp_upper_limit = 0.7f, o->up_clamp_lower_limit = -0.8f;
  n->has[SCALE] = (o->affinity_mode == MOE_AFFINITY_POST_SCALE || o->affinity_mode == MOE_AFFINITY_ON_I) &&
                  test_random_chance(s, 2);
  n->has[BGU] = n->has[BD] = test_random_chance(s, 2), n->has[ROUTER_BIAS] = test_random_chance(s, 2);
  for (int i = SWGU; i <= GATE; i++) n->has[i] = n->S > 0;
  n->has[SBGU] = n->has[SBD] = n->S && test_random_chance(s, 2), n->has[GATE] = n->S && test_random_chance(s, 2);
  if (o->skip_gate) o->clamp &= ~(uint32_t)MOE_CLAMP_GATE_UPPER;
  n->has[ROUTER] = test_random_chance(s, 3) ? 0 : 1, n->has[TOPK] = 1; /* with a router added to its weights, and 0 */
  for (int64_t i = n->begin[TOPK]; i < all && n->has[ROUTER]; i++) n->value[i] = 0;
  n->has[ROUTER_BIAS] &= n->has[ROUTER];
  n->router.config.score_function = (moe_score_function)test_random_range(s, 0, MOE_SCORE_COUNT_ - 1);
  n->router.config.score_order = (moe_score_order)test_random_range(s, 0, 1);
  n->router.config.renormalize = test_random_chance(s, 2);
  n->router.config.routed_scaling_factor = test_random_chance(s, 2) ? 2.5f : 0.0f;
}

static void *parameter(const net *n, int i, int gradient) {
  return n->has[i] ? (gradient ? n->grad : n->value) + n->begin[i] : NULL;
}

/* The library's gradients; what it chose stays in index. */
static void run(net *n, uint64_t seed) {
  moe_context ctx = {.num_threads = 2, .allocate = parts_take, .release = parts_give};
  moe_layer *l = &n->l;
  float *logits = malloc((size_t)(n->T * (n->E + n->N)) * 4), *weights = malloc((size_t)(n->T * n->K) * 4);
  float *y = malloc((size_t)(n->T * n->H) * 4);
  n->index = malloc((size_t)(n->T * n->K) * 4);
  n->router.router_weight = parameter(n, ROUTER, 0), n->router.router_bias = parameter(n, ROUTER_BIAS, 0);
  n->router.router_logits = logits, n->router.expert_index = n->index, n->router.expert_weights = weights;
  l->T = n->T, l->H = n->H, l->I = n->I, l->E = n->E, l->K = n->K, l->identity_experts = n->N;
  if (n->has[ROUTER]) l->router = &n->router;
  l->topk_index = n->index, l->topk_weights = parameter(n, TOPK, 0);
  for (int64_t i = 0; i < n->T * n->K; i++) n->index[i] = (int32_t)(((uint64_t)i * 7 + seed) % (uint64_t)(n->E + n->N));
  l->x = parameter(n, X, 0), l->gate_up = parameter(n, WGU, 0), l->down = parameter(n, WD, 0);
  l->gate_up_bias = parameter(n, BGU, 0), l->down_bias = parameter(n, BD, 0), l->expert_scale = parameter(n, SCALE, 0);
  n->shared = (moe_shared_expert){.I = n->S,
                                  .gate_up = parameter(n, SWGU, 0),
                                  .down = parameter(n, SWD, 0),
                                  .gate_up_bias = parameter(n, SBGU, 0),
                                  .down_bias = parameter(n, SBD, 0),
                                  .gate = parameter(n, GATE, 0)};
  if (n->S) l->shared = &n->shared;
  const moe_shared_expert_grads also = {.gate_up = parameter(n, SWGU, 1),
                                        .down = parameter(n, SWD, 1),
                                        .gate_up_bias = parameter(n, SBGU, 1),
                                        .down_bias = parameter(n, SBD, 1),
                                        .gate = parameter(n, GATE, 1)};
  const moe_layer_grads grads = {.x = parameter(n, X, 1),
                                 .topk_weights = parameter(n, TOPK, 1),
                                 .expert_scale = parameter(n, SCALE, 1),
                                 .router_weight = parameter(n, ROUTER, 1),
                                 .router_bias = parameter(n, ROUTER_BIAS, 1),
                                 .gate_up = parameter(n, WGU, 1),
                                 .down = parameter(n, WD, 1),
                                 .gate_up_bias = parameter(n, BGU, 1),
                                 .down_bias = parameter(n, BD, 1),
                                 .shared = n->S ? &also : NULL};
  size_t bytes;
  l->keep_results = seed % 3 == 0 && l->config.affinity_mode != MOE_AFFINITY_ON_I;
  assert_int_equal(moe_layer_saved_bytes_f32(&ctx, l, &bytes), MOE_OK);
  void *saved = malloc(bytes + 1);
  if (moe_layer_forward_f32(&ctx, l, y, saved) || moe_layer_backward_f32(&ctx, l, saved, n->dy, &grads))
    fail_msg("%s", ctx.message);
  free(saved), free(logits), free(weights), free(y);
}

static double check(net *n, uint64_t seed) {
  const int64_t all = n->begin[PARAMETERS];
  double complex *v = malloc((size_t)all * sizeof *v);
  double largest = 0, worst = 0;
  for (int64_t i = 0; i < all; i++) v[i] = (double)n->value[i];
  for (int64_t i = 0; i < all; i++) {
    v[i] = ref_complex((double)n->value[i], 1e-150);
    n->loss_grad[i] = cimag(loss(n, v)) / 1e-150;
    v[i] = (double)n->value[i];
    largest = fmax(largest, fabs(n->loss_grad[i]));
  }
  /* Roundings one behind the other: over H there and back, over I and 2I, over tokens and experts; and the activation's
     error, its derivative's and the router's functions'. */
  const double roundings = (double)(2 * n->H + 3 * (n->I + n->S) + n->T * n->K + n->E + n->N) + MOE_ACT_ERROR +
                           MOE_ACT_GRAD_ERROR + 8,
               tolerance = roundings * 0x1p-24;
  for (int p = 0; p < PARAMETERS; p++) {
    for (int64_t i = n->begin[p]; i < n->begin[p + 1] && n->has[p]; i++) {
      const double error = fabs((double)n->grad[i] - n->loss_grad[i]);
      if (!(error <= tolerance * largest))
        fail_msg("d/d%s[%d]: %.9g, complex step %.9g, largest %g | case %d act %d mode %d skip %d clamp %u shared %d "
                 "gate %d",
                 name[p], (int)(i - n->begin[p]), (double)n->grad[i], n->loss_grad[i], largest, (int)seed,
                 (int)n->l.config.activation, (int)n->l.config.affinity_mode, n->l.config.skip_gate,
                 (unsigned)n->l.config.clamp, (int)n->S, n->has[GATE]);
      worst = fmax(worst, error / largest / tolerance);
    }
  }
  free(v);
  return worst;
}

static void by_complex_step(void **state) {
  (void)state;
  double worst = 0;
  unsigned modes = 0, acts = 0;
  for (uint64_t seed = 0; seed < CONFIGURATIONS; seed++) {
    net n;
    if (!test_use_isa((int)(seed % TEST_ISA_COUNT))) continue;
    make(&n, seed);
    run(&n, seed);
    worst = fmax(worst, check(&n, seed));
    modes |= 1u << n.l.config.affinity_mode, acts |= 1u << n.l.config.activation;
    free(n.value), free(n.grad), free(n.dy), free(n.loss_grad), free(n.index);
  }
  test_use_best_isa();
  assert_int_equal(modes, (1 << MOE_AFFINITY_COUNT_) - 1);
  assert_int_equal(acts, (1 << MOE_ACT_COUNT_) - 1);
  print_message("%d configurations, the largest error is %.2g of what is allowed\n", CONFIGURATIONS, worst);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(by_complex_step)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
