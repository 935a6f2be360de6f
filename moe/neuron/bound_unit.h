/* The gated unit and its gradient, one element at a time. */
#ifndef MOE_NEURON_BOUND_UNIT_H
#define MOE_NEURON_BOUND_UNIT_H

/* act(x), act'(x) and what they multiply, each with its error. */
typedef struct moe_neuron_unit_ {
  double act, slope, up, up_slope, m;
  double e_act, e_slope, e_up, e_up_slope, e_m;
} moe_neuron_unit_;

/* act(x) and act'(x). */
MOE_FN void moe_neuron_act_(const moe_layer_config *c, double x, double *f, double *df) {
  const int swish = c->activation == MOE_ACT_SWISH;
  const double alpha = c->alpha != 0 ? (double)c->alpha : swish ? 1.702 : 1, s = 1 / (1 + exp(-alpha * x));
  const double cap = c->alpha != 0 ? (double)c->alpha : 4, s1 = 1 / (1 + exp(-x));
  const double root = 0.79788456080286536, t = tanh(root * (x + 0.044715 * x * x * x));
  *f = x, *df = 1;
  switch (c->activation) {
    case MOE_ACT_SILU:
    case MOE_ACT_SWISH: *f = x * s, *df = s * (1 + alpha * x * (1 - s)); break;
    case MOE_ACT_GELU:
      *f = x / 2 * erfc(-x * 0.70710678118654752);
      *df = erfc(-x * 0.70710678118654752) / 2 + x * exp(-x * x / 2) * 0.39894228040143268;
      break;
    case MOE_ACT_GELU_TANH:
      *f = x / 2 * (1 + t), *df = (1 + t) / 2 + x / 2 * (1 - t * t) * root * (1 + 0.134145 * x * x);
      break;
    case MOE_ACT_RELU: *f = x > 0 ? x : 0, *df = x > 0; break;
    case MOE_ACT_SQUARED_RELU: *f = x > 0 ? x * x : 0, *df = x > 0 ? 2 * x : 0; break;
    case MOE_ACT_SITU: *f = cap * tanh(x / cap) * s1, *df = s1 / pow(cosh(x / cap), 2) + *f * (1 - s1); break;
    default: break;
  }
}

/* The errors of both where x is within e: largest slopes, times e, and what the activation itself adds. */
MOE_FN void moe_neuron_act_error_(const moe_neuron_bounds_ *bounds, const moe_layer_config *c, double x, double e,
                                  double *ef, double *edf) {
  const double alpha = c->alpha != 0 ? fabs((double)c->alpha) : c->activation == MOE_ACT_SWISH ? 1.702 : 1;
  double slope = 1.13, curve = 0.85;
  switch (c->activation) {
    case MOE_ACT_SILU:
    case MOE_ACT_SWISH: slope = 1.1, curve = alpha / 2; break;
    case MOE_ACT_RELU: slope = 1, curve = 0; break;
    case MOE_ACT_SQUARED_RELU: slope = 2 * (fabs(x) + e), curve = 2; break;
    case MOE_ACT_IDENTITY: slope = 1, curve = 0; break;
    case MOE_ACT_SITU: slope = 1.1, curve = 0.8 + (c->alpha != 0 ? 0.77 / fabs((double)c->alpha) : 0.2); break;
    default: break;
  }
  const double size = c->activation == MOE_ACT_SQUARED_RELU ? x * x : fabs(x);
  *ef = slope * e + bounds->activation * size;
  *edf = curve * e + bounds->activation * (c->activation == MOE_ACT_SQUARED_RELU ? fabs(x) : 1);
  if (c->activation == MOE_ACT_RELU && fabs(x) <= e) *edf = 1;
}

/* A limit as the type holds it; infinities stay. */
MOE_FN double moe_neuron_rounded_(moe_dtype dtype, double limit) {
  float f = (float)limit;
  moe_bf16 h;
  if (dtype == MOE_DTYPE_BF16) (void)moe_bf16_from_f32(NULL, &h, &f, 1), (void)moe_bf16_to_f32(NULL, &f, &h, 1);
  if (dtype == MOE_DTYPE_FP16) (void)moe_fp16_from_f32(NULL, &h, &f, 1), (void)moe_fp16_to_f32(NULL, &f, &h, 1);
  return (double)f;
}

/* The limits of part 0, the gate, or 1, up, as `dtype` holds them: infinite where there is none. */
MOE_FN void moe_neuron_limits_(const moe_layer_config *c, int part, moe_dtype dtype, double *lower, double *upper) {
  const uint32_t upper_bit = part ? MOE_CLAMP_UP_UPPER : MOE_CLAMP_GATE_UPPER;
  const uint32_t lower_bit = part ? MOE_CLAMP_UP_LOWER : MOE_CLAMP_GATE_LOWER;
  const float most = part ? c->up_clamp_upper_limit : c->gate_clamp_upper_limit;
  const float least = part ? c->up_clamp_lower_limit : c->gate_clamp_lower_limit;
  *upper = c->clamp & upper_bit ? moe_neuron_rounded_(dtype, (double)most) : INFINITY;
  *lower = c->clamp & lower_bit ? moe_neuron_rounded_(dtype, (double)least) : -INFINITY;
}

/* min(act, limit): where it cannot be told on which side act is, all of the slope is in doubt. */
MOE_FN void moe_neuron_limit_act_(const moe_layer_config *c, moe_neuron_unit_ *unit) {
  const double limit = (double)c->activation_clamp_upper_limit;
  if (!(c->clamp & MOE_CLAMP_ACTIVATION_UPPER) || unit->act + unit->e_act < limit) return;
  const int above = unit->act - unit->e_act >= limit;
  unit->act = fmin(unit->act, limit);
  unit->e_slope = above ? 0 : unit->e_slope + fabs(unit->slope);
  if (above) unit->slope = unit->e_act = 0;
}

/* What u acts as, with the softcap, and the slope of that. */
MOE_FN void moe_neuron_up_(const moe_neuron_bounds_ *bounds, const moe_layer_config *c, double u, double e,
                           moe_neuron_unit_ *unit) {
  const double cap = (double)c->up_softcap;
  unit->up = u, unit->e_up = e, unit->up_slope = 1, unit->e_up_slope = 0;
  if (cap > 0) {
    const double t = tanh(u / cap);
    unit->up = cap * t, unit->up_slope = 1 - t * t;
    unit->e_up += bounds->activation * fabs(unit->up);
    unit->e_up_slope = 0.77 / cap * e + bounds->activation;
  }
  unit->up += (double)c->up_offset, unit->e_up += MOE_NEURON_U_ * fabs(unit->up);
}

/* m = a*act*up. */
MOE_FN void moe_neuron_finish_unit_(const moe_neuron_bounds_ *bounds, double a, moe_neuron_unit_ *unit) {
  unit->m = a * unit->act * unit->up;
  unit->e_m = fabs(a) * moe_neuron_product_(unit->act, unit->e_act, unit->up, unit->e_up);
  unit->e_m += bounds->roundings * (fabs(unit->m) + unit->e_m);
}

/* All of it from g, u and their errors. What a kernel keeps of these it may round. */
MOE_FN moe_neuron_unit_ moe_neuron_glu_(const moe_neuron_bounds_ *bounds, const moe_layer_config *c, const double x[2],
                                        const double e[2], double a) {
  moe_neuron_unit_ unit = {.up = 1};
  const int part = c->skip_gate ? 1 : 0;
  const double s = bounds->operand;
  moe_neuron_act_(c, x[part], &unit.act, &unit.slope);
  moe_neuron_act_error_(bounds, c, x[part], e[part] + s * fabs(x[part]), &unit.e_act, &unit.e_slope);
  moe_neuron_limit_act_(c, &unit);
  if (!c->skip_gate) moe_neuron_up_(bounds, c, x[1], e[1] + s * fabs(x[1]), &unit);
  moe_neuron_finish_unit_(bounds, a, &unit);
  return unit;
}

/* dg and du in place of g and u, from dm. Where it cannot be told whether a limit, as `dtype` holds it, was met, all of
   the gradient is in doubt. */
MOE_FN void moe_neuron_glu_grad_(const moe_neuron_bounds_ *bounds, const moe_layer_config *c, moe_dtype dtype,
                                 const moe_neuron_unit_ *unit, double dm, double e_dm, double x[2], double e[2]) {
  const double slope = dm * unit->slope, e_slope = moe_neuron_product_(dm, e_dm, unit->slope, unit->e_slope);
  const double du = dm * unit->act, e_du = moe_neuron_product_(dm, e_dm, unit->act, unit->e_act);
  const double v[2] = {c->skip_gate ? 0 : slope * unit->up, c->skip_gate ? slope : du * unit->up_slope};
  const double ev[2] = {c->skip_gate ? 0 : moe_neuron_product_(slope, e_slope, unit->up, unit->e_up),
                        c->skip_gate ? e_slope : moe_neuron_product_(du, e_du, unit->up_slope, unit->e_up_slope)};
  for (int part = 0; part < 2; part++) {
    double lower, upper;
    moe_neuron_limits_(c, part, dtype, &lower, &upper);
    const int doubt = e[part] > 0 && !(x[part] + e[part] < upper && x[part] - e[part] > lower);
    const int open = x[part] < upper && x[part] > lower;
    const double more = bounds->roundings * (fabs(v[part]) + ev[part]) + (doubt ? fabs(v[part]) : 0);
    x[part] = open || doubt ? v[part] : 0, e[part] = open || doubt ? ev[part] + more : 0;
  }
}

#endif
