/* The analytic backward of the reference, which the other tests hold the library to, against complex step derivatives
   of its forward: Im L(p + ih)/h with h = 1e-150 has no cancellation and no truncation error worth the name, so both
   sides agree to rounding. L = <dY, layer(x, router(x))> + load balance loss + z-loss with a random dY; every parameter
   tensor is checked entry by entry, the router's logits among them. */
#include "reference/complex.h"
#include "support/cases.h"
#include "support/test.h"

enum { CONFIGURATIONS = 3000, ENTRIES = 24 }; /* ENTRIES: the most that are checked of one tensor in one
                                                 configuration */

#define STEP 1e-150
#define TOLERANCE 1e-12 /* of the tensor's largest gradient, see scale_of */

/* The parameters lie one behind the other in one array. */
enum { X, AFFINITY, WGU, WD, BGU, BD, ROUTER_WEIGHT, ROUTER_BIAS, LOGITS, PARAMETERS };
static const char *const parameter_name[] = {"hidden_states", "affinities",   "gate_up_weight",
                                             "down_weight",   "gate_up_bias", "down_bias",
                                             "router_weight", "router_bias",  "router_logits"};

typedef struct problem {
  test_case c; /* shape, options and routing; its tensors are not used */
  moe_router_config router;
  moe_router_loss_args balance, z_loss;
  uint8_t mask[8];
  int64_t begin[PARAMETERS + 1];
  double *value, *grad, *dy;
  double largest_affinity_grad;
} problem;

/* ----------------------------------------------------------------------------------------------- the loss, complex */

static tensors_c64 complex_tensors(const problem *p, double complex *value) {
  const int64_t *at = p->begin;
  return (tensors_c64){value + at[X], value + at[AFFINITY], value + at[WGU], value + at[WD],
                       p->c.layer.gate_and_up_proj_bias ? value + at[BGU] : NULL,
                       p->c.layer.down_proj_bias ? value + at[BD] : NULL};
}

static double complex loss_complex(const problem *p, double complex *value) {
  const moe_blockwise_layer *l = &p->c.layer;
  int64_t T = l->T, H = l->H, E = l->E, K = p->c.K, rows = l->N * l->B;
  double complex *room = calloc((size_t)(2 * T * E + 2 * E + K + T * H + rows * (3 * l->I + H)), sizeof *room);
  double complex *z = room, *affinity = z + T * E, *s = affinity + T * E, *w = s + 2 * E, *y = w + K, *row = y + T * H;
  rows_c64 layer_rows = {row, row + rows * l->I, row + 2 * rows * l->I, row + 3 * rows * l->I};
  tensors_c64 tensors = complex_tensors(p, value);
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t e = 0; e < E; ++e) {
      z[t * E + e] = value[p->begin[LOGITS] + t * E + e] + value[p->begin[ROUTER_BIAS] + e];
      for (int64_t h = 0; h < H; ++h) z[t * E + e] += tensors.x[t * H + h] * value[p->begin[ROUTER_WEIGHT] + h * E + e];
      affinity[t * E + e] = tensors.affinity[t * E + e];
    }
    router_weights_c64(&p->router, E, K, z + t * E, p->c.chosen + t * K, s, w);
    for (int64_t k = 0; k < K; ++k)
      if (p->c.chosen[t * K + k] >= 0) affinity[t * E + p->c.chosen[t * K + k]] += w[k];
  }
  tensors.affinity = affinity;
  layer_fwd_c64(l, p->c.not_accumulating, &tensors, &layer_rows, y);
  double complex loss = load_balance_loss_c64(&p->balance, z, s, NULL) + z_loss_c64(&p->z_loss, z, s, NULL);
  for (int64_t i = 0; i < T * H; ++i) loss += p->dy[i] * y[i];
  free(room);
  return loss;
}

/* ------------------------------------------------------------------------------------------ the gradient, analytic */

static tensors_f64 real_tensors(const problem *p, double *value, int with_all) {
  const int64_t *at = p->begin;
  return (tensors_f64){value + at[X], value + at[AFFINITY], value + at[WGU], value + at[WD],
                       with_all || p->c.layer.gate_and_up_proj_bias ? value + at[BGU] : NULL,
                       with_all || p->c.layer.down_proj_bias ? value + at[BD] : NULL};
}

/* z and the affinities that the router adds to. room: [2E + K]. */
static void router_forward(const problem *p, double *z, double *affinity, double *room) {
  int64_t T = p->c.layer.T, H = p->c.layer.H, E = p->c.layer.E, K = p->c.K;
  const double *x = p->value + p->begin[X], *weight = p->value + p->begin[ROUTER_WEIGHT];
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t e = 0; e < E; ++e) {
      z[t * E + e] = p->value[p->begin[LOGITS] + t * E + e] + p->value[p->begin[ROUTER_BIAS] + e];
      for (int64_t h = 0; h < H; ++h) z[t * E + e] += x[t * H + h] * weight[h * E + e];
      affinity[t * E + e] = p->value[p->begin[AFFINITY] + t * E + e];
    }
    router_weights_f64(&p->router, E, K, z + t * E, p->c.chosen + t * K, room, room + 2 * E);
    for (int64_t k = 0; k < K; ++k)
      if (p->c.chosen[t * K + k] >= 0) affinity[t * E + p->c.chosen[t * K + k]] += room[2 * E + k];
  }
}

/* From the affinities' gradient and the losses to the logits, the router's parameters and x. */
static void router_backward(problem *p, const double *z, double *room) {
  int64_t T = p->c.layer.T, H = p->c.layer.H, E = p->c.layer.E, K = p->c.K;
  const int64_t *at = p->begin;
  double *dz = p->grad + at[LOGITS], *dw = room + 2 * E;
  load_balance_loss_f64(&p->balance, z, room, dz);
  z_loss_f64(&p->z_loss, z, room, dz);
  for (int64_t t = 0; t < T; ++t) {
    const int32_t *chosen = p->c.chosen + t * K;
    for (int64_t k = 0; k < K; ++k) dw[k] = chosen[k] < 0 ? 1e30 : p->grad[at[AFFINITY] + t * E + chosen[k]];
    router_weights_bwd_f64(&p->router, E, K, z + t * E, chosen, dw, room, room + E, dz + t * E);
    for (int64_t e = 0; e < E; ++e) {
      p->grad[at[ROUTER_BIAS] + e] += dz[t * E + e];
      for (int64_t h = 0; h < H; ++h) {
        p->grad[at[ROUTER_WEIGHT] + h * E + e] += p->value[at[X] + t * H + h] * dz[t * E + e];
        p->grad[at[X] + t * H + h] += dz[t * E + e] * p->value[at[ROUTER_WEIGHT] + h * E + e];
      }
    }
  }
}

static void gradient_analytic(problem *p) {
  const moe_blockwise_layer *l = &p->c.layer;
  int64_t T = l->T, E = l->E, rows = l->N * l->B;
  double *memory = calloc((size_t)(2 * T * E + 2 * E + p->c.K + T * l->H + rows * (6 * l->I + l->H)), sizeof *memory);
  double *z = memory, *affinity = z + T * E, *room = affinity + T * E, *y = room + 2 * E + p->c.K, *row = y + T * l->H;
  double *d = row + 6 * rows * l->I;
  rows_f64 values = {row, row + rows * l->I, row + 2 * rows * l->I, d};
  rows_f64 grads = {row + 3 * rows * l->I, row + 4 * rows * l->I, row + 5 * rows * l->I, NULL};
  tensors_f64 tensors = real_tensors(p, p->value, 0), gradient = real_tensors(p, p->grad, 1);
  router_forward(p, z, affinity, room);
  tensors.affinity = affinity;
  layer_fwd_f64(l, p->c.not_accumulating, &tensors, &values, y);
  if (p->c.affinity_option == MOE_AFFINITY_OPTION_ON_I) values.d = NULL;
  layer_bwd_f64(l, p->c.not_accumulating, &tensors, &values, p->dy, &gradient, &grads);
  router_backward(p, z, room);
  free(memory);
}

/* ----------------------------------------------------------------------------------------------------------- checks */

static void problem_new(problem *p, uint64_t seed) {
  static const test_limits most = {6, 5, 5, 4, 3, 3};
  memset(p, 0, sizeof *p);
  test_case *c = &p->c;
  c->seed = c->rng = seed;
  test_case_options(c, MOE_DTYPE_F32, &most);
  test_case_real_activation(c);
  test_route_case(c);
  test_case_allocate(c);
  const moe_blockwise_layer *l = &c->layer;
  int64_t size[PARAMETERS] = {
      l->T * l->H, l->T * l->E, l->E * l->H * 2 * l->I, l->E * l->I * l->H, l->E * 2 * l->I, l->E * l->H, l->H * l->E,
      l->E,        l->T * l->E};
  for (int i = 0; i < PARAMETERS; ++i) p->begin[i + 1] = p->begin[i] + size[i];
  p->value = calloc((size_t)p->begin[PARAMETERS], sizeof *p->value);
  p->grad = calloc((size_t)p->begin[PARAMETERS], sizeof *p->grad);
  p->dy = calloc((size_t)(l->T * l->H), sizeof *p->dy);
  for (int64_t i = 0; i < p->begin[PARAMETERS]; ++i) p->value[i] = 1.5 * test_signed(&c->rng);
  for (int64_t i = 0; i < l->T * l->H; ++i) p->dy[i] = test_signed(&c->rng);
  for (int64_t t = 0; t < l->T; ++t) p->mask[t] = test_with(&c->rng, 0.8) ? 1 : 0;
  p->router = test_router_config(&c->rng);
  p->balance = (moe_router_loss_args){.T = l->T,
                                      .E = l->E,
                                      .K = c->K,
                                      .coefficient = (float)test_unit(&c->rng),
                                      .score_function =
                                          (moe_score_function)test_random_range(&c->rng, 0, MOE_SCORE_COUNT_ - 1),
                                      .expert_index = c->chosen,
                                      .token_mask = test_with(&c->rng, 0.5) ? p->mask : NULL};
  p->z_loss = p->balance;
  p->z_loss.coefficient = (float)test_unit(&c->rng);
}

static void problem_free(problem *p) {
  free(p->value), free(p->grad), free(p->dy);
  test_case_free(&p->c);
}

/* What 1e-12 is relative to: the tensor's largest gradient, but never less than 1/100 of the largest of all tensors
   (the entries of a tensor may all be differences of the larger numbers that another tensor's gradient consists of; a
   softmax over one expert has gradient 0 only up to rounding). */
static double scale_of(const problem *p, int parameter) {
  double own = 0, all = 0;
  for (int64_t i = 0; i < p->begin[PARAMETERS]; ++i) all = fmax(all, fabs(p->grad[i]));
  for (int64_t i = p->begin[parameter]; i < p->begin[parameter + 1]; ++i) own = fmax(own, fabs(p->grad[i]));
  return fmax(own, all / 100);
}

/* The largest relative difference seen, over a sample of the entries of each tensor. */
static double check_problem(problem *p, double complex *value) {
  double worst = 0;
  for (int64_t i = 0; i < p->begin[PARAMETERS]; ++i) value[i] = p->value[i];
  for (int parameter = 0; parameter < PARAMETERS; ++parameter) {
    int64_t begin = p->begin[parameter], count = p->begin[parameter + 1] - begin,
            step = (count + ENTRIES - 1) / ENTRIES;
    double scale = scale_of(p, parameter);
    for (int64_t i = step > 1 ? test_random_range(&p->c.rng, 0, step - 1) : 0; i < count; i += step) {
      double analytic = p->grad[begin + i];
      value[begin + i] = ref_complex(p->value[begin + i], STEP);
      double derivative = cimag(loss_complex(p, value)) / STEP;
      value[begin + i] = p->value[begin + i];
      int without =
          (parameter == BGU && !p->c.layer.gate_and_up_proj_bias) || (parameter == BD && !p->c.layer.down_proj_bias);
      double difference = without ? 0 : fabs(analytic - derivative); /* an absent bias is 0, and not a parameter of L */
      if (!(difference <= TOLERANCE * scale)) {
        char text[768];
        fail_msg("d/d%s[%d]: analytic %.17g, complex step %.17g, scale %g | score %d order %d renormalize %d | %s",
                 parameter_name[parameter], (int)i, analytic, derivative, scale, (int)p->router.score_function,
                 (int)p->router.score_order, p->router.renormalize,
                 test_case_describe(&p->c, MOE_ISA_SCALAR, 1, text));
      }
      if (scale > 0) worst = fmax(worst, difference / scale);
    }
  }
  return worst;
}

static void test_analytic_gradients(void **state) {
  (void)state;
  uint64_t seed = test_seed(1);
  double worst = 0;
  unsigned seen_activations = 0, seen_modes = 0, seen_scores = 0;
  for (uint64_t n = 0; n < CONFIGURATIONS; ++n) {
    problem p;
    problem_new(&p, test_case_seed(seed, n));
    gradient_analytic(&p);
    double complex *value = malloc((size_t)p.begin[PARAMETERS] * sizeof *value);
    worst = fmax(worst, check_problem(&p, value));
    seen_activations |= 1u << p.c.layer.config.activation;
    seen_modes |= 1u << p.c.layer.config.affinity_mode;
    seen_scores |= 1u << ((int)p.router.score_function * 4 + (int)p.router.score_order * 2 + p.router.renormalize);
    free(value);
    problem_free(&p);
  }
  assert_int_equal(seen_activations, (1 << MOE_ACT_COUNT_) - 1);
  assert_int_equal(seen_modes, (1 << MOE_AFFINITY_COUNT_) - 1);
  assert_int_equal(seen_scores, 0xfff);
  print_message("%d configurations, worst relative difference %.2g\n", CONFIGURATIONS, worst);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_analytic_gradients)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
