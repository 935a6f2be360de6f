/* Bounds of the layer, forward and backward. */
#ifndef MOE_NEURON_BOUND_LAYER_H
#define MOE_NEURON_BOUND_LAYER_H

/* Values, each with its e. */
typedef struct moe_neuron_values_ {
  double *v, *e;
} moe_neuron_values_;

typedef struct moe_neuron_layer_ {
  moe_neuron_bounds_ *bounds;
  const moe_blockwise_layer *l;
  const moe_blockwise_mm_bwd_args *backward; /* NULL: forward */
  moe_dtype checkpoint_dtype;
  const float *x, *affinity, *gate_up_bias, *down_bias, *dy;
  moe_neuron_weight_ gate_up, down;
  int64_t *last;          /* [T] the last block that holds the token, with not_accumulating; NULL without */
  int64_t *rows, *blocks; /* [E] of each expert */
  int32_t *terms;         /* [T] how many rows a token has had */
  float *sum;             /* [T,H] magnitudes of what is summed over experts */
  moe_neuron_values_ gu;  /* [2,I]: g, u, within their limits; then the gradients dg, du */
  moe_neuron_values_ m;   /* [I]: with ON_I scaled */
  moe_neuron_values_ dm;  /* [I]: dY*Wd^T */
  moe_neuron_values_ h;   /* [H] */
  double *act, *act_grad; /* [2,I]: act(g) and act'(g), then their errors */
  double *size;           /* [2,H]: sums of a product */
} moe_neuron_layer_;

/* A row: block, place in it, token, expert, affinity. */
typedef struct moe_neuron_row_ {
  int64_t b, r, t, e;
  double a;
} moe_neuron_row_;

/* ------------------------------------------------------------------------------------------------------- activation */

/* act(x) and act'(x). */
MOE_FN void moe_neuron_act_(const moe_layer_config *c, double x, double *f, double *df) {
  const int swish = c->activation == MOE_ACT_SWISH;
  const double alpha = c->alpha != 0 ? (double)c->alpha : swish ? 1.702 : 1, s = 1 / (1 + exp(-alpha * x));
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
    default: break;
  }
}

/* The errors of both where x is within e: largest slopes, times e, and what the activation itself adds. */
MOE_FN void moe_neuron_act_error_(const moe_neuron_layer_ *y, double x, double e, double *ef, double *edf) {
  const moe_layer_config *c = &y->l->config;
  const double alpha = c->alpha != 0 ? fabs((double)c->alpha) : c->activation == MOE_ACT_SWISH ? 1.702 : 1;
  double slope = 1.13, curve = 0.85;
  switch (c->activation) {
    case MOE_ACT_SILU:
    case MOE_ACT_SWISH: slope = 1.1, curve = alpha / 2; break;
    case MOE_ACT_RELU: slope = 1, curve = 0; break;
    case MOE_ACT_SQUARED_RELU: slope = 2 * (fabs(x) + e), curve = 2; break;
    case MOE_ACT_IDENTITY: slope = 1, curve = 0; break;
    default: break;
  }
  const double size = c->activation == MOE_ACT_SQUARED_RELU ? x * x : fabs(x);
  *ef = slope * e + y->bounds->activation * size;
  *edf = curve * e + y->bounds->activation * (c->activation == MOE_ACT_SQUARED_RELU ? fabs(x) : 1);
  if (c->activation == MOE_ACT_RELU && fabs(x) <= e) *edf = 1;
}

/* ---------------------------------------------------------------------------------------------------------- one row */

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

/* g and u from x: as they are stored in a checkpoint, before rounding. */
MOE_FN void moe_neuron_gate_up_(moe_neuron_layer_ *y, const moe_neuron_row_ *row) {
  const moe_blockwise_layer *l = y->l;
  const int64_t n = 2 * l->I;
  const float *w = moe_neuron_expert_(&y->gate_up, row->e);
  const double a = l->config.affinity_mode == MOE_AFFINITY_PRE_SCALE ? row->a : 1,
               gamma = moe_neuron_gamma_(y->bounds, l->H);
  memset(y->gu.v, 0, (size_t)n * sizeof *y->gu.v), memset(y->gu.e, 0, (size_t)n * sizeof *y->gu.e);
  for (int64_t h = 0; h < l->H; h++) {
    const double x = (double)y->x[row->t * l->H + h];
    for (int64_t j = 0; j < n; j++) {
      const double p = x * (double)w[h * n + j];
      y->gu.v[j] += p, y->gu.e[j] += fabs(p);
    }
  }
  for (int64_t j = 0; j < n; j++) {
    const double b = y->gate_up_bias ? (double)y->gate_up_bias[row->e * n + j] : 0, v = a * y->gu.v[j] + b;
    double lower, upper;
    moe_neuron_limits_(&l->config, j >= l->I, MOE_DTYPE_F32, &lower, &upper);
    y->gu.e[j] = fabs(a) * y->gu.e[j] * (gamma + MOE_NEURON_U_) + 2 * MOE_NEURON_U_ * (fabs(v) + fabs(b));
    y->gu.v[j] = fmax(fmin(v, upper), lower);
    if (l->config.skip_gate && j < l->I) y->gu.v[j] = y->gu.e[j] = 0;
  }
}

/* m from g and u. What a kernel keeps of these it may round. */
MOE_FN void moe_neuron_glu_(moe_neuron_layer_ *y, double a) {
  const moe_layer_config *c = &y->l->config;
  const int64_t I = y->l->I;
  const double s = y->bounds->operand;
  for (int64_t i = 0; i < I; i++) {
    const int64_t at = c->skip_gate ? I + i : i;
    const double up = c->skip_gate ? 1 : y->gu.v[I + i] + (double)c->up_offset;
    const double eup = c->skip_gate ? 0 : y->gu.e[I + i] + s * fabs(y->gu.v[I + i]) + MOE_NEURON_U_ * fabs(up);
    moe_neuron_act_(c, y->gu.v[at], y->act + i, y->act_grad + i);
    moe_neuron_act_error_(y, y->gu.v[at], y->gu.e[at] + s * fabs(y->gu.v[at]), y->act + I + i, y->act_grad + I + i);
    y->m.v[i] = a * y->act[i] * up;
    y->m.e[i] = fabs(a) * moe_neuron_product_(y->act[i], y->act[I + i], up, eup);
    y->m.e[i] += y->bounds->roundings * (fabs(y->m.v[i]) + y->m.e[i]);
  }
}

/* v[h] = x*W over n rows of H columns, and its e, for operands with errors. */
MOE_FN void moe_neuron_times_(moe_neuron_layer_ *y, const moe_neuron_values_ *x, const float *w, int64_t n, int64_t H,
                              moe_neuron_values_ *to) {
  const double gamma = moe_neuron_gamma_(y->bounds, n);
  double *const size = y->size, *const square = y->size + H;
  memset(to->v, 0, (size_t)H * sizeof *to->v), memset(to->e, 0, (size_t)H * sizeof *to->e);
  memset(size, 0, (size_t)(2 * H) * sizeof *size);
  for (int64_t i = 0; i < n; i++)
    for (int64_t h = 0; h < H; h++) {
      const double p = x->v[i] * (double)w[i * H + h], e = x->e[i] * fabs((double)w[i * H + h]);
      to->v[h] += p, to->e[h] += e;
      size[h] += fabs(p), square[h] += e * e;
    }
  for (int64_t h = 0; h < H; h++)
    to->e[h] = (1 + gamma) * moe_neuron_carried_(y->bounds, to->e[h], square[h]) + gamma * size[h];
}

/* v[i] = <x, row i of W>, n rows of H columns. */
MOE_FN void moe_neuron_times_transposed_(const moe_neuron_bounds_ *bounds, const moe_neuron_values_ *x, const float *w,
                                         int64_t n, int64_t H, moe_neuron_values_ *to) {
  const double gamma = moe_neuron_gamma_(bounds, H);
  for (int64_t i = 0; i < n; i++) {
    double v = 0, sum = 0, square = 0, size = 0;
    for (int64_t h = 0; h < H; h++) {
      const double p = x->v[h] * (double)w[i * H + h], e = x->e[h] * fabs((double)w[i * H + h]);
      v += p, sum += e, size += fabs(p), square += e * e;
    }
    to->v[i] = v, to->e[i] = (1 + gamma) * moe_neuron_carried_(bounds, sum, square) + gamma * size;
  }
}

/* A term of a token's sum over experts. */
MOE_FN void moe_neuron_term_(moe_neuron_layer_ *y, int64_t t, float *bound, double a) {
  const int64_t H = y->l->H;
  for (int64_t h = 0; h < H; h++) {
    const double v = fabs(a * y->h.v[h]), e = fabs(a) * y->h.e[h];
    moe_neuron_more_(bound + t * H + h, e + (y->bounds->operand + 2 * MOE_NEURON_U_) * (v + e));
    moe_neuron_more_(y->sum + t * H + h, v + e);
  }
}

/* ---------------------------------------------------------------------------------------------------------- forward */

MOE_FN void moe_neuron_forward_row_(moe_neuron_layer_ *y, const moe_neuron_row_ *row) {
  const moe_blockwise_layer *l = y->l;
  const moe_affinity_mode mode = l->config.affinity_mode;
  float *output = moe_neuron_bound_of_(y->bounds, "output"),
        *down = moe_neuron_bound_of_(y->bounds, "down_activations"),
        *gate_up = moe_neuron_bound_of_(y->bounds, "gate_up_activations_T");
  float *scaled = moe_neuron_bound_of_(y->bounds, "scaled_intermediate_checkpoint_T");
  const int post = mode == MOE_AFFINITY_POST_SCALE;
  moe_neuron_gate_up_(y, row);
  for (int64_t j = 0; j < 2 * l->I && gate_up; j++)
    moe_neuron_more_(gate_up + (row->b * 2 * l->I + j) * l->B + row->r, y->gu.e[j]);
  if (!output && !down && !scaled) return;
  moe_neuron_glu_(y, mode == MOE_AFFINITY_ON_I ? row->a : 1);
  for (int64_t i = 0; i < l->I && scaled; i++)
    moe_neuron_more_(scaled + (row->b * l->I + i) * l->B + row->r, (post ? fabs(row->a) : 1) * y->m.e[i]);
  moe_neuron_times_(y, &y->m, moe_neuron_expert_(&y->down, row->e), l->I, l->H, &y->h);
  for (int64_t h = 0; h < l->H; h++) {
    const double b = y->down_bias ? (double)y->down_bias[row->e * l->H + h] : 0;
    y->h.v[h] += mode == MOE_AFFINITY_ON_I ? row->a * b : b;
    y->h.e[h] += 2 * MOE_NEURON_U_ * (fabs(y->h.v[h]) + fabs(b) * fmax(1, fabs(row->a)));
    if (down) moe_neuron_more_(down + (row->b * l->B + row->r) * l->H + h, y->h.e[h]);
  }
  if (output) moe_neuron_term_(y, row->t, output, post ? row->a : 1);
}

/* --------------------------------------------------------------------------------------------------------- backward */

/* g and u from the checkpoint; what was computed again was rounded as that is. */
MOE_FN void moe_neuron_load_gate_up_(moe_neuron_layer_ *y, const moe_neuron_row_ *row) {
  const moe_blockwise_layer *l = y->l;
  const void *saved = y->backward->gate_up_activations_T;
  if (!saved) moe_neuron_gate_up_(y, row);
  for (int64_t j = 0; j < 2 * l->I; j++) {
    float v;
    if (!saved) {
      y->gu.e[j] += moe_neuron_unit_(y->checkpoint_dtype) * (fabs(y->gu.v[j]) + y->gu.e[j]);
      continue;
    }
    moe_neuron_widen_(y->checkpoint_dtype, saved, (row->b * 2 * l->I + j) * l->B + row->r, 1, &v);
    y->gu.v[j] = (double)v, y->gu.e[j] = 0;
  }
}

/* dg and du in place of g and u. Where it cannot be told whether a limit was met, all of the gradient is in doubt. */
MOE_FN void moe_neuron_gate_up_grad_(moe_neuron_layer_ *y, double a) {
  const moe_layer_config *c = &y->l->config;
  const int64_t I = y->l->I;
  const double s = y->bounds->operand;
  for (int64_t i = 0; i < I; i++) {
    const double dm = a * y->dm.v[i], edm = fabs(a) * y->dm.e[i] + s * fabs(dm);
    const double up = y->gu.v[I + i] + (double)c->up_offset, eup = y->gu.e[I + i] + s * fabs(y->gu.v[I + i]);
    const double slope = dm * y->act_grad[i], eslope = moe_neuron_product_(dm, edm, y->act_grad[i], y->act_grad[I + i]);
    const double value[2] = {c->skip_gate ? 0 : slope * up, c->skip_gate ? slope : dm * y->act[i]};
    const double error[2] = {c->skip_gate ? 0 : moe_neuron_product_(slope, eslope, up, eup),
                             c->skip_gate ? eslope : moe_neuron_product_(dm, edm, y->act[i], y->act[I + i])};
    for (int part = 0; part < 2; part++) {
      const int64_t at = part * I + i;
      const double x = y->gu.v[at], ex = y->gu.e[at], v = value[part];
      double lower, upper, e = error[part];
      moe_neuron_limits_(c, part, y->checkpoint_dtype, &lower, &upper);
      const int doubt = ex > 0 && !(x + ex < upper && x - ex > lower), open = x < upper && x > lower;
      e += y->bounds->roundings * (fabs(v) + e) + (doubt ? fabs(v) : 0);
      y->gu.v[at] = open || doubt ? v : 0, y->gu.e[at] = open || doubt ? e : 0;
    }
  }
}

/* Adds an expert's row to a gradient: n terms f*|x| with values v and errors e of their own. */
MOE_FN void moe_neuron_contract_(const moe_neuron_layer_ *y, const moe_neuron_row_ *row, const char *name, int64_t at,
                                 int64_t n, double f, const double *v, const double *e) {
  const moe_neuron_bounds_ *b = y->bounds;
  const int32_t output = moe_neuron_output_(b, name);
  const double sums = moe_neuron_gamma_(b, y->rows[row->e]) +
                      b->operand * moe_neuron_times_rounded_(b, y->blocks[row->e]); /* partial sums are rounded */
  for (int64_t j = 0; j < n; j++) {
    const double error = f * (e[j] + 2 * b->operand * (v[j] + e[j]));
    moe_neuron_more_(b->of[output] + at + j, f * sums * (v[j] + e[j]));
    moe_neuron_more_(b->square[output] + at + j, error * error);
  }
}

/* dWgu and its bias, dWd and its bias: an expert's rows are contracted, block by block. */
MOE_FN void moe_neuron_weight_grads_(moe_neuron_layer_ *y, const moe_neuron_row_ *row, double a_x, double a_m) {
  const moe_blockwise_layer *l = y->l;
  const int64_t n = 2 * l->I;
  const float *x = y->x + row->t * l->H, *dy = y->dy + row->t * l->H;
  for (int64_t j = 0; j < n; j++) y->gu.v[j] = fabs(y->gu.v[j]);
  for (int64_t h = 0; h < l->H; h++) y->h.v[h] = fabs((double)dy[h]), y->h.e[h] = 0;
  for (int64_t h = 0; h < l->H && moe_neuron_bound_of_(y->bounds, "gate_up_proj_weight_grad"); h++)
    moe_neuron_contract_(y, row, "gate_up_proj_weight_grad", (row->e * l->H + h) * n, n, fabs(a_x * (double)x[h]),
                         y->gu.v, y->gu.e);
  for (int64_t i = 0; i < l->I && moe_neuron_bound_of_(y->bounds, "down_proj_weight_grad"); i++) {
    const double m = fabs(y->m.v[i]) + y->m.e[i];
    for (int64_t h = 0; h < l->H; h++) y->h.e[h] = m > 0 ? y->h.v[h] * y->m.e[i] / m : 0;
    moe_neuron_contract_(y, row, "down_proj_weight_grad", (row->e * l->I + i) * l->H, l->H, fabs(a_m) * m, y->h.v,
                         y->h.e);
  }
  if (moe_neuron_bound_of_(y->bounds, "gate_and_up_proj_bias_grad"))
    moe_neuron_contract_(y, row, "gate_and_up_proj_bias_grad", row->e * n, n, 1, y->gu.v, y->gu.e);
  memset(y->h.e, 0, (size_t)l->H * sizeof *y->h.e);
  if (moe_neuron_bound_of_(y->bounds, "down_proj_bias_grad"))
    moe_neuron_contract_(y, row, "down_proj_bias_grad", row->e * l->H, l->H, fabs(a_m), y->h.v, y->h.e);
}

/* The affinity's gradient by whichever formula; h holds dX before it is scaled. */
MOE_FN double moe_neuron_affinity_grad_(const moe_neuron_layer_ *y, const moe_neuron_row_ *row) {
  const moe_blockwise_layer *l = y->l;
  const moe_blockwise_mm_bwd_args *args = y->backward;
  const moe_affinity_mode mode = l->config.affinity_mode;
  const double s = y->bounds->operand;
  const double on_h_sum = moe_neuron_gamma_(y->bounds, l->H), sums = moe_neuron_gamma_(y->bounds, l->I + l->H);
  const int on_h =
      mode == MOE_AFFINITY_POST_SCALE && args->affinity_option == MOE_AFFINITY_OPTION_ON_H && args->down_activations;
  double e = 0, sum = 0, square = 0;
  if (mode == MOE_AFFINITY_NO_SCALE) return 0;
  for (int64_t h = 0; h < l->H && mode == MOE_AFFINITY_PRE_SCALE; h++) {
    const double x = fabs((double)y->x[row->t * l->H + h]), term = x * (y->h.e[h] + s * fabs(y->h.v[h]));
    e += on_h_sum * x * (fabs(y->h.v[h]) + y->h.e[h]), sum += term, square += term * term;
  }
  for (int64_t h = 0; h < l->H && mode != MOE_AFFINITY_PRE_SCALE; h++) {
    float d = 0;
    if (on_h)
      moe_neuron_widen_(y->checkpoint_dtype, args->down_activations, (row->b * l->B + row->r) * l->H + h, 1, &d);
    else if (y->down_bias) d = y->down_bias[row->e * l->H + h];
    const double p = fabs((double)y->dy[row->t * l->H + h] * (double)d);
    e += sums * p, sum += s * p, square += s * p * s * p;
  }
  for (int64_t i = 0; i < l->I && mode != MOE_AFFINITY_PRE_SCALE && !on_h; i++) {
    const double p = fabs(y->dm.v[i] * y->m.v[i]);
    const double term = moe_neuron_product_(y->dm.v[i], y->dm.e[i], y->m.v[i], y->m.e[i]) + s * p;
    e += sums * (p + term), sum += term, square += term * term;
  }
  return e + moe_neuron_carried_(y->bounds, sum, square);
}

MOE_FN void moe_neuron_backward_row_(moe_neuron_layer_ *y, const moe_neuron_row_ *row) {
  const moe_blockwise_layer *l = y->l;
  const moe_affinity_mode mode = l->config.affinity_mode;
  const int post = mode == MOE_AFFINITY_POST_SCALE || mode == MOE_AFFINITY_ON_I, pre = mode == MOE_AFFINITY_PRE_SCALE;
  float *dx = moe_neuron_bound_of_(y->bounds, "hidden_states_grad"),
        *da = moe_neuron_bound_of_(y->bounds, "expert_affinities_masked_grad");
  moe_neuron_load_gate_up_(y, row);
  moe_neuron_glu_(y, 1);
  for (int64_t h = 0; h < l->H; h++) {
    y->h.v[h] = (double)y->dy[row->t * l->H + h];
    y->h.e[h] = 2 * y->bounds->operand * fabs(y->h.v[h]); /* a*dY may be rounded */
  }
  moe_neuron_times_transposed_(y->bounds, &y->h, moe_neuron_expert_(&y->down, row->e), l->I, l->H, &y->dm);
  moe_neuron_gate_up_grad_(y, post ? row->a : 1);
  if (dx || (da && pre)) {
    const float *w = moe_neuron_expert_(&y->gate_up, row->e);
    moe_neuron_times_transposed_(y->bounds, &y->gu, w, l->H, 2 * l->I, &y->h);
  }
  if (dx) moe_neuron_term_(y, row->t, dx, pre ? row->a : 1);
  if (da) moe_neuron_more_(da + row->t * l->E + row->e, moe_neuron_affinity_grad_(y, row));
  moe_neuron_weight_grads_(y, row, pre ? row->a : 1, post ? row->a : 1);
}

/* ------------------------------------------------------------------------------------------------------------- walk */

/* The expert of block b; -1: it does nothing. */
MOE_FN int64_t moe_neuron_block_expert_(const moe_blockwise_layer *l, int dropping, int64_t b) {
  const int64_t e = dropping ? b : l->block_to_expert[b];
  return (l->conditions && !l->conditions[b]) || e >= l->E ? -1 : e;
}

/* Calls row() for every row that has a part in the output, in block order; with NULL counts them. */
MOE_FN void moe_neuron_walk_(moe_neuron_layer_ *y, int dropping,
                             void (*each)(moe_neuron_layer_ *y, const moe_neuron_row_ *row)) {
  const moe_blockwise_layer *l = y->l;
  const int64_t tokens = l->num_valid_tokens ? *l->num_valid_tokens : l->T;
  for (int64_t b = 0; b < l->N; b++) {
    const int64_t e = moe_neuron_block_expert_(l, dropping, b);
    if (e >= 0 && !each) y->blocks[e]++;
    for (int64_t r = 0; r < l->B && e >= 0; r++) {
      const int64_t t = l->token_position_to_id[b * l->B + r];
      if (t < 0 || t >= tokens) continue;
      if (!each) {
        y->rows[e]++;
        if (y->last) y->last[t] = b;
        continue;
      }
      if (y->last && y->last[t] != b) continue;
      const moe_neuron_row_ row = {b, r, t, e, y->affinity ? (double)y->affinity[t * l->E + e] : 1};
      y->terms[t]++;
      each(y, &row);
    }
  }
}

MOE_FN int moe_neuron_take_values_(moe_neuron_bounds_ *bounds, moe_neuron_values_ *values, int64_t n) {
  values->v = (double *)moe_neuron_take_(&bounds->scratch, n, sizeof(double));
  values->e = (double *)moe_neuron_take_(&bounds->scratch, n, sizeof(double));
  return values->v && values->e;
}

MOE_FN moe_status moe_neuron_layer_new_(moe_context *ctx, moe_neuron_layer_ *y, int not_accumulating) {
  moe_neuron_bounds_ *b = y->bounds;
  const moe_blockwise_layer *l = y->l;
  int failed = 0;
  y->checkpoint_dtype = l->checkpoint_dtype == MOE_DTYPE_DEFAULT ? b->dtype : l->checkpoint_dtype;
  y->gate_up = (moe_neuron_weight_){.quantized = l->quantized_gate_up_proj_weight,
                                    .plain = l->gate_up_proj_weight,
                                    .dtype = b->dtype,
                                    .K = l->H,
                                    .parts = 2,
                                    .columns = l->I};
  y->down = (moe_neuron_weight_){.quantized = l->quantized_down_proj_weight,
                                 .plain = l->down_proj_weight,
                                 .dtype = b->dtype,
                                 .K = l->I,
                                 .parts = 1,
                                 .columns = l->H};
  y->x = moe_neuron_hidden_(b, l->hidden_states, l->quantized_hidden_states, l->T, l->H, &failed);
  y->affinity = moe_neuron_floats_(b, l->affinity_dtype == MOE_DTYPE_DEFAULT ? MOE_DTYPE_F32 : l->affinity_dtype,
                                   l->expert_affinities_masked, l->T * l->E, &failed);
  y->gate_up_bias = moe_neuron_floats_(b, b->dtype, l->gate_and_up_proj_bias, l->E * 2 * l->I, &failed);
  y->down_bias = moe_neuron_floats_(b, b->dtype, l->down_proj_bias, l->E * l->H, &failed);
  if (y->backward)
    y->dy = moe_neuron_hidden_(b, y->backward->output_hidden_states_grad,
                               y->backward->quantized_output_hidden_states_grad, l->T, l->H, &failed);
  y->last = not_accumulating ? (int64_t *)moe_neuron_take_(&b->scratch, l->T, sizeof *y->last) : NULL;
  y->rows = (int64_t *)moe_neuron_take_(&b->scratch, l->E, sizeof *y->rows);
  y->blocks = (int64_t *)moe_neuron_take_(&b->scratch, l->E, sizeof *y->blocks);
  y->terms = (int32_t *)moe_neuron_take_(&b->scratch, l->T, sizeof *y->terms);
  y->sum = (float *)moe_neuron_take_(&b->scratch, l->T * l->H, sizeof *y->sum);
  y->act = (double *)moe_neuron_take_(&b->scratch, 2 * l->I, sizeof *y->act);
  y->size = (double *)moe_neuron_take_(&b->scratch, 2 * l->H, sizeof *y->size);
  y->act_grad = (double *)moe_neuron_take_(&b->scratch, 2 * l->I, sizeof *y->act_grad);
  if (failed || (not_accumulating && !y->last) || !y->rows || !y->blocks || !y->terms || !y->sum || !y->act ||
      !y->act_grad || !y->size || !moe_neuron_take_values_(b, &y->gu, 2 * l->I) ||
      !moe_neuron_take_values_(b, &y->m, l->I) || !moe_neuron_take_values_(b, &y->dm, l->I) ||
      !moe_neuron_take_values_(b, &y->h, l->H))
    return moe_neuron_no_memory_(ctx);
  MOE_NEURON_TRY_(moe_neuron_weight_new_(ctx, b, &y->gate_up, l->E));
  return moe_neuron_weight_new_(ctx, b, &y->down, l->E);
}

/* What a sum over experts adds: partial sums may be rounded after each block. */
MOE_FN void moe_neuron_sums_(const moe_neuron_layer_ *y, float *bound) {
  const int64_t H = y->l->H;
  for (int64_t i = 0; i < y->l->T * H && bound; i++)
    moe_neuron_more_(bound + i, (y->bounds->operand + MOE_NEURON_U_) * y->terms[i / H] * (double)y->sum[i]);
}

MOE_FN moe_status moe_neuron_bound_layer_(moe_context *ctx, moe_neuron_layer_ *y, int dropping, int not_accumulating) {
  MOE_NEURON_TRY_(moe_neuron_layer_new_(ctx, y, not_accumulating));
  moe_neuron_walk_(y, dropping, NULL);
  moe_neuron_walk_(y, dropping, y->backward ? moe_neuron_backward_row_ : moe_neuron_forward_row_);
  moe_neuron_sums_(y, moe_neuron_bound_of_(y->bounds, y->backward ? "hidden_states_grad" : "output"));
  return MOE_OK;
}

MOE_FN moe_status moe_neuron_bound_forward_(moe_context *ctx, const void *arguments, moe_neuron_bounds_ *bounds) {
  const moe_blockwise_mm_fwd_args *args = (const moe_blockwise_mm_fwd_args *)arguments;
  moe_neuron_layer_ y = {.bounds = bounds, .l = &args->layer};
  return moe_neuron_bound_layer_(ctx, &y, args->device.spec == MOE_CTE_SHARD_ON_I_DROPPING, args->not_accumulating);
}

MOE_FN moe_status moe_neuron_bound_backward_(moe_context *ctx, const void *arguments, moe_neuron_bounds_ *bounds) {
  const moe_blockwise_mm_bwd_args *args = (const moe_blockwise_mm_bwd_args *)arguments;
  moe_neuron_layer_ y = {.bounds = bounds, .l = &args->layer, .backward = args};
  return moe_neuron_bound_layer_(ctx, &y, args->kernel_type == MOE_KERNEL_DROPPING, args->not_accumulating);
}

#endif
