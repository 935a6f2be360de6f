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
  moe_neuron_loaded_ gate_up, down;
  moe_neuron_weight_ gate_up_grad, down_grad; /* how gradients are stored */
  int64_t *last;                      /* [T] the last block that holds the token, with not_accumulating; NULL without */
  int64_t *rows, *blocks;             /* [E] of each expert */
  int32_t *terms;                     /* [T] how many rows a token has had */
  moe_neuron_values_ gu;              /* [2,I]: g, u, within their limits; then the gradients dg, du */
  moe_neuron_values_ m;               /* [I]: with ON_I scaled */
  moe_neuron_values_ dm;              /* [I]: dY*Wd^T */
  moe_neuron_values_ h;               /* [H] */
  moe_neuron_unit_ *unit;             /* [I] */
  double *size;                       /* [2,H]: sums of a product */
  moe_neuron_round_ round_x, round_m; /* with mx.activations */
  float *rounded, *rounded_e;         /* [H] or [I] */
} moe_neuron_layer_;

/* A row: block, place in it, token, expert, affinity. */
typedef struct moe_neuron_row_ {
  int64_t b, r, t, e;
  double a;
} moe_neuron_row_;

/* ---------------------------------------------------------------------------------------------------------- one row */

/* x as products take it: rounded alike by all. */
MOE_FN const float *moe_neuron_row_of_x_(moe_neuron_layer_ *y, const moe_neuron_row_ *row) {
  const moe_mx_operands *mx = &y->l->mx;
  const float *x = y->x + row->t * y->l->H;
  if (!mx->activations.enabled) return x;
  memcpy(y->rounded, x, (size_t)y->l->H * sizeof *x);
  memset(y->rounded_e, 0, (size_t)y->l->H * sizeof *x);
  moe_neuron_round_row_(&mx->activations, &y->round_x, mx->gate_up_in_scale ? mx->gate_up_in_scale[row->e] : 0,
                        y->rounded, y->rounded_e);
  return y->rounded;
}

/* m as the product takes it, in place. */
MOE_FN void moe_neuron_round_m_(moe_neuron_layer_ *y, const moe_neuron_row_ *row) {
  const moe_mx_operands *mx = &y->l->mx;
  const int64_t I = y->l->I;
  if (!mx->activations.enabled) return;
  for (int64_t i = 0; i < I; i++) {
    y->rounded[i] = (float)y->m.v[i];
    y->rounded_e[i] = (float)((y->m.e[i] + MOE_NEURON_U_ * fabs(y->m.v[i])) * (1 + 0x1p-22));
  }
  moe_neuron_round_row_(&mx->activations, &y->round_m, mx->down_in_scale ? mx->down_in_scale[row->e] : 0, y->rounded,
                        y->rounded_e);
  for (int64_t i = 0; i < I; i++) y->m.v[i] = (double)y->rounded[i], y->m.e[i] = (double)y->rounded_e[i];
}

/* g and u from x: as they are stored in a checkpoint, before rounding. */
MOE_FN void moe_neuron_gate_up_(moe_neuron_layer_ *y, const moe_neuron_row_ *row) {
  const moe_blockwise_layer *l = y->l;
  const int64_t n = 2 * l->I;
  const float *w = moe_neuron_expert_(&y->gate_up, row->e), *row_x = moe_neuron_row_of_x_(y, row);
  const double a = l->config.affinity_mode == MOE_AFFINITY_PRE_SCALE ? row->a : 1,
               gamma = moe_neuron_gamma_(y->bounds, l->H) + y->gate_up.error;
  memset(y->gu.v, 0, (size_t)n * sizeof *y->gu.v), memset(y->gu.e, 0, (size_t)n * sizeof *y->gu.e);
  for (int64_t h = 0; h < l->H; h++) {
    const double x = (double)row_x[h];
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

/* m from g and u. */
MOE_FN void moe_neuron_glu_row_(moe_neuron_layer_ *y, double a) {
  const int64_t I = y->l->I;
  for (int64_t i = 0; i < I; i++) {
    const double x[2] = {y->gu.v[i], y->gu.v[I + i]}, e[2] = {y->gu.e[i], y->gu.e[I + i]};
    y->unit[i] = moe_neuron_glu_(y->bounds, &y->l->config, x, e, a);
    y->m.v[i] = y->unit[i].m, y->m.e[i] = y->unit[i].e_m;
  }
}

/* v[h] = x*W of the expert's K rows, and its e, for operands with errors. */
MOE_FN void moe_neuron_times_(moe_neuron_layer_ *y, const moe_neuron_values_ *x, moe_neuron_loaded_ *weight, int64_t e,
                              moe_neuron_values_ *to) {
  const int64_t n = weight->w.K, H = weight->w.columns;
  const float *w = moe_neuron_expert_(weight, e);
  const double gamma = moe_neuron_gamma_(y->bounds, n) + weight->error;
  double *const size = y->size, *const square = y->size + H;
  memset(to->v, 0, (size_t)H * sizeof *to->v), memset(to->e, 0, (size_t)H * sizeof *to->e);
  memset(size, 0, (size_t)(2 * H) * sizeof *size);
  for (int64_t i = 0; i < n; i++)
    for (int64_t h = 0; h < H; h++) {
      const double p = x->v[i] * (double)w[i * H + h], error = x->e[i] * fabs((double)w[i * H + h]);
      to->v[h] += p, to->e[h] += error;
      size[h] += fabs(p), square[h] += error * error;
    }
  for (int64_t h = 0; h < H; h++)
    to->e[h] = (1 + gamma) * moe_neuron_carried_(y->bounds, to->e[h], square[h]) + gamma * size[h];
}

/* v[k] = <x, row k of W>. */
MOE_FN void moe_neuron_times_transposed_(const moe_neuron_bounds_ *bounds, const moe_neuron_values_ *x,
                                         moe_neuron_loaded_ *weight, int64_t e, moe_neuron_values_ *to) {
  const int64_t n = weight->w.parts * weight->w.columns;
  const float *w = moe_neuron_expert_(weight, e);
  const double gamma = moe_neuron_gamma_(bounds, n) + weight->error;
  for (int64_t k = 0; k < weight->w.K; k++, w += n) {
    double v = 0, sum = 0, square = 0, size = 0;
    for (int64_t j = 0; j < n; j++) {
      const double p = x->v[j] * (double)w[j], error = x->e[j] * fabs((double)w[j]);
      v += p, sum += error, size += fabs(p), square += error * error;
    }
    to->v[k] = v, to->e[k] = (1 + gamma) * moe_neuron_carried_(bounds, sum, square) + gamma * size;
  }
}

/* A term of a token's sum over experts. */
MOE_FN void moe_neuron_term_(moe_neuron_layer_ *y, int64_t t, moe_neuron_out_ *out, double a) {
  const int64_t H = y->l->H;
  for (int64_t h = 0; h < H; h++) {
    const double v = fabs(a * y->h.v[h]), e = fabs(a) * y->h.e[h];
    moe_neuron_add_bound_(y->bounds, out, t * H + h, v + e, e + (y->bounds->operand + 2 * MOE_NEURON_U_) * (v + e));
  }
}

/* ---------------------------------------------------------------------------------------------------------- forward */

MOE_FN void moe_neuron_forward_row_(moe_neuron_layer_ *y, const moe_neuron_row_ *row) {
  const moe_blockwise_layer *l = y->l;
  const moe_affinity_mode mode = l->config.affinity_mode;
  const int post = mode == MOE_AFFINITY_POST_SCALE;
  moe_neuron_out_ *output = moe_neuron_out_of_(y->bounds, "output"),
                  *down = moe_neuron_out_of_(y->bounds, "down_activations"),
                  *gate_up = moe_neuron_out_of_(y->bounds, "gate_up_activations_T"),
                  *scaled = moe_neuron_out_of_(y->bounds, "scaled_intermediate_checkpoint_T");
  moe_neuron_gate_up_(y, row);
  for (int64_t j = 0; j < 2 * l->I && gate_up; j++)
    moe_neuron_more_(gate_up->e + (row->b * 2 * l->I + j) * l->B + row->r, y->gu.e[j]);
  if (!output && !down && !scaled) return;
  moe_neuron_glu_row_(y, mode == MOE_AFFINITY_ON_I ? row->a : 1);
  for (int64_t i = 0; i < l->I && scaled; i++)
    moe_neuron_more_(scaled->e + (row->b * l->I + i) * l->B + row->r, (post ? fabs(row->a) : 1) * y->m.e[i]);
  moe_neuron_round_m_(y, row);
  moe_neuron_times_(y, &y->m, &y->down, row->e, &y->h);
  for (int64_t h = 0; h < l->H; h++) {
    const double b = y->down_bias ? (double)y->down_bias[row->e * l->H + h] : 0;
    y->h.v[h] += mode == MOE_AFFINITY_ON_I ? row->a * b : b;
    y->h.e[h] += 2 * MOE_NEURON_U_ * (fabs(y->h.v[h]) + fabs(b) * fmax(1, fabs(row->a)));
    if (down) moe_neuron_more_(down->e + (row->b * l->B + row->r) * l->H + h, y->h.e[h]);
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
      y->gu.e[j] += moe_neuron_unit_of_(y->checkpoint_dtype) * (fabs(y->gu.v[j]) + y->gu.e[j]);
      continue;
    }
    moe_neuron_widen_(y->checkpoint_dtype, saved, (row->b * 2 * l->I + j) * l->B + row->r, 1, &v);
    y->gu.v[j] = (double)v, y->gu.e[j] = 0;
  }
}

/* dg and du in place of g and u. */
MOE_FN void moe_neuron_gate_up_grad_(moe_neuron_layer_ *y, double a) {
  const int64_t I = y->l->I;
  for (int64_t i = 0; i < I; i++) {
    const double dm = a * y->dm.v[i], e_dm = fabs(a) * y->dm.e[i] + y->bounds->operand * fabs(dm);
    double x[2] = {y->gu.v[i], y->gu.v[I + i]}, e[2] = {y->gu.e[i], y->gu.e[I + i]};
    moe_neuron_glu_grad_(y->bounds, &y->l->config, y->checkpoint_dtype, &y->unit[i], dm, e_dm, x, e);
    for (int part = 0; part < 2; part++) y->gu.v[part * I + i] = x[part], y->gu.e[part * I + i] = e[part];
  }
}

/* Adds an expert's row to a gradient, from `at` on, `stride` apart: n terms f*|x| with values v and errors e of their
   own. */
MOE_FN void moe_neuron_contract_(const moe_neuron_layer_ *y, const moe_neuron_row_ *row, moe_neuron_out_ *out,
                                 int64_t at, int64_t stride, int64_t n, double f, const double *v, const double *e) {
  moe_neuron_bounds_ *b = y->bounds;
  const double sums = moe_neuron_gamma_(b, y->rows[row->e]) +
                      b->operand * moe_neuron_times_rounded_(b, y->blocks[row->e]); /* partial sums are rounded */
  for (int64_t j = 0; j < n; j++) {
    const double size = f * (v[j] + e[j]);
    moe_neuron_add_bound_(b, out, at + j * stride, size, sums * size);
    moe_neuron_add_independent_(b, out, at + j * stride, f * (e[j] + 2 * b->operand * (v[j] + e[j])));
  }
}

/* dWgu: part 0 or 1 of the expert's rows. */
MOE_FN void moe_neuron_gate_up_weight_grad_(const moe_neuron_layer_ *y, const moe_neuron_row_ *row, int64_t part,
                                            double a) {
  const moe_neuron_weight_ *w = &y->gate_up_grad;
  moe_neuron_out_ *out =
      moe_neuron_out_of_(y->bounds, w->apart && part ? "up_proj_weight_grad" : "gate_up_proj_weight_grad");
  int64_t stride;
  for (int64_t h = 0; h < w->K && out; h++) {
    const int64_t at = moe_neuron_weight_row_(w, row->e, h, part, &stride), from = part * w->columns;
    moe_neuron_contract_(y, row, out, at, stride, w->columns, fabs(a * (double)y->x[row->t * w->K + h]), y->gu.v + from,
                         y->gu.e + from);
  }
}

/* dWd; h holds |dY|. */
MOE_FN void moe_neuron_down_weight_grad_(const moe_neuron_layer_ *y, const moe_neuron_row_ *row, double a) {
  const moe_neuron_weight_ *w = &y->down_grad;
  moe_neuron_out_ *out = moe_neuron_out_of_(y->bounds, "down_proj_weight_grad");
  int64_t stride;
  for (int64_t i = 0; i < w->K && out; i++) {
    const int64_t at = moe_neuron_weight_row_(w, row->e, i, 0, &stride);
    const double m = fabs(y->m.v[i]) + y->m.e[i];
    for (int64_t h = 0; h < w->columns; h++) y->h.e[h] = m > 0 ? y->h.v[h] * y->m.e[i] / m : 0;
    moe_neuron_contract_(y, row, out, at, stride, w->columns, fabs(a) * m, y->h.v, y->h.e);
  }
}

/* dWgu and its bias, dWd and its bias: an expert's rows are contracted, block by block. */
MOE_FN void moe_neuron_weight_grads_(const moe_neuron_layer_ *y, const moe_neuron_row_ *row, double a_x, double a_m) {
  const moe_blockwise_layer *l = y->l;
  const int64_t n = 2 * l->I;
  moe_neuron_out_ *gate_up_bias = moe_neuron_out_of_(y->bounds, "gate_and_up_proj_bias_grad"),
                  *down_bias = moe_neuron_out_of_(y->bounds, "down_proj_bias_grad");
  for (int64_t j = 0; j < n; j++) y->gu.v[j] = fabs(y->gu.v[j]);
  for (int64_t h = 0; h < l->H; h++) y->h.v[h] = fabs((double)y->dy[row->t * l->H + h]);
  for (int64_t part = 0; part < 2; part++) moe_neuron_gate_up_weight_grad_(y, row, part, a_x);
  moe_neuron_down_weight_grad_(y, row, a_m);
  if (gate_up_bias) moe_neuron_contract_(y, row, gate_up_bias, row->e * n, 1, n, 1, y->gu.v, y->gu.e);
  memset(y->h.e, 0, (size_t)l->H * sizeof *y->h.e);
  if (down_bias) moe_neuron_contract_(y, row, down_bias, row->e * l->H, 1, l->H, fabs(a_m), y->h.v, y->h.e);
}

/* The affinity's gradient by whichever formula; h holds dX before it is scaled. */
MOE_FN void moe_neuron_affinity_grad_(const moe_neuron_layer_ *y, const moe_neuron_row_ *row, moe_neuron_out_ *out) {
  const moe_blockwise_layer *l = y->l;
  const moe_blockwise_mm_bwd_args *args = y->backward;
  const moe_affinity_mode mode = l->config.affinity_mode;
  const double s = y->bounds->operand;
  const double on_h_sum = moe_neuron_gamma_(y->bounds, l->H), sums = moe_neuron_gamma_(y->bounds, l->I + l->H);
  const int on_h =
      mode == MOE_AFFINITY_POST_SCALE && args->affinity_option == MOE_AFFINITY_OPTION_ON_H && args->down_activations;
  double e = 0, sum = 0, square = 0, size = 0;
  if (mode == MOE_AFFINITY_NO_SCALE) return;
  for (int64_t h = 0; h < l->H && mode == MOE_AFFINITY_PRE_SCALE; h++) {
    const double x = fabs((double)y->x[row->t * l->H + h]), term = x * (y->h.e[h] + s * fabs(y->h.v[h]));
    size += x * (fabs(y->h.v[h]) + y->h.e[h]), sum += term, square += term * term;
  }
  e += on_h_sum * size;
  for (int64_t h = 0; h < l->H && mode != MOE_AFFINITY_PRE_SCALE; h++) {
    float d = 0;
    if (on_h)
      moe_neuron_widen_(y->checkpoint_dtype, args->down_activations, (row->b * l->B + row->r) * l->H + h, 1, &d);
    else if (y->down_bias) d = y->down_bias[row->e * l->H + h];
    const double p = fabs((double)y->dy[row->t * l->H + h] * (double)d);
    e += sums * p, size += p, sum += s * p, square += s * p * s * p;
  }
  for (int64_t i = 0; i < l->I && mode != MOE_AFFINITY_PRE_SCALE && !on_h; i++) {
    const double p = fabs(y->dm.v[i] * y->m.v[i]);
    const double term = moe_neuron_product_(y->dm.v[i], y->dm.e[i], y->m.v[i], y->m.e[i]) + s * p;
    e += sums * (p + term), size += p + term, sum += term, square += term * term;
  }
  moe_neuron_add_bound_(y->bounds, out, row->t * l->E + row->e, size, e + moe_neuron_carried_(y->bounds, sum, square));
}

MOE_FN void moe_neuron_backward_row_(moe_neuron_layer_ *y, const moe_neuron_row_ *row) {
  const moe_blockwise_layer *l = y->l;
  const moe_affinity_mode mode = l->config.affinity_mode;
  const int post = mode == MOE_AFFINITY_POST_SCALE || mode == MOE_AFFINITY_ON_I, pre = mode == MOE_AFFINITY_PRE_SCALE;
  moe_neuron_out_ *dx = moe_neuron_out_of_(y->bounds, "hidden_states_grad"),
                  *da = moe_neuron_out_of_(y->bounds, "expert_affinities_masked_grad");
  moe_neuron_load_gate_up_(y, row);
  moe_neuron_glu_row_(y, 1);
  for (int64_t h = 0; h < l->H; h++) {
    y->h.v[h] = (double)y->dy[row->t * l->H + h];
    y->h.e[h] = 2 * y->bounds->operand * fabs(y->h.v[h]); /* a*dY may be rounded */
  }
  moe_neuron_times_transposed_(y->bounds, &y->h, &y->down, row->e, &y->dm);
  moe_neuron_gate_up_grad_(y, post ? row->a : 1);
  if (dx || (da && pre)) moe_neuron_times_transposed_(y->bounds, &y->gu, &y->gate_up, row->e, &y->h);
  if (dx) moe_neuron_term_(y, row->t, dx, pre ? row->a : 1);
  if (da) moe_neuron_affinity_grad_(y, row, da);
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

MOE_FN moe_status moe_neuron_layer_round_(moe_context *ctx, moe_neuron_layer_ *y) {
  moe_neuron_bounds_ *b = y->bounds;
  const moe_blockwise_layer *l = y->l;
  const int64_t longest = moe_max_(l->H, l->I);
  if (!l->mx.activations.enabled) return MOE_OK;
  y->rounded = (float *)moe_neuron_take_(&b->scratch, 2 * longest, sizeof *y->rounded);
  if (!y->rounded) return moe_neuron_no_memory_(ctx);
  y->rounded_e = y->rounded + longest;
  MOE_NEURON_TRY_(moe_neuron_round_new_(ctx, b, l->mx.activation_layout, 2, l->H, &y->round_x));
  return moe_neuron_round_new_(ctx, b, l->mx.activation_layout, 1, l->I, &y->round_m);
}

MOE_FN moe_status moe_neuron_layer_new_(moe_context *ctx, moe_neuron_layer_ *y, int not_accumulating) {
  moe_neuron_bounds_ *b = y->bounds;
  const moe_blockwise_layer *l = y->l;
  y->checkpoint_dtype = l->checkpoint_dtype == MOE_DTYPE_DEFAULT ? b->dtype : l->checkpoint_dtype;
  y->x = moe_neuron_hidden_(b, l->hidden_states, l->quantized_hidden_states, l->T, l->H);
  y->affinity = moe_neuron_floats_(b, moe_neuron_affinity_dtype_(l), l->expert_affinities_masked, l->T * l->E);
  y->gate_up_bias = moe_neuron_floats_(b, b->dtype, l->gate_and_up_proj_bias, l->E * 2 * l->I);
  y->down_bias = moe_neuron_floats_(b, b->dtype, l->down_proj_bias, l->E * l->H);
  if (y->backward)
    y->dy = moe_neuron_hidden_(b, y->backward->output_hidden_states_grad,
                               y->backward->quantized_output_hidden_states_grad, l->T, l->H);
  y->last = not_accumulating ? (int64_t *)moe_neuron_take_(&b->scratch, l->T, sizeof *y->last) : NULL;
  y->rows = (int64_t *)moe_neuron_take_(&b->scratch, l->E, sizeof *y->rows);
  y->blocks = (int64_t *)moe_neuron_take_(&b->scratch, l->E, sizeof *y->blocks);
  y->terms = (int32_t *)moe_neuron_take_(&b->scratch, l->T, sizeof *y->terms);
  y->unit = (moe_neuron_unit_ *)moe_neuron_take_(&b->scratch, l->I, sizeof *y->unit);
  y->size = (double *)moe_neuron_take_(&b->scratch, 2 * l->H, sizeof *y->size);
  if (b->failed || (not_accumulating && !y->last) || !y->rows || !y->blocks || !y->terms || !y->unit || !y->size ||
      !moe_neuron_take_values_(b, &y->gu, 2 * l->I) || !moe_neuron_take_values_(b, &y->m, l->I) ||
      !moe_neuron_take_values_(b, &y->dm, l->I) || !moe_neuron_take_values_(b, &y->h, l->H))
    return moe_neuron_no_memory_(ctx);
  MOE_NEURON_TRY_(moe_neuron_layer_round_(ctx, y));
  y->gate_up_grad = moe_neuron_gate_up_weight_(l, b->dtype), y->down_grad = moe_neuron_down_weight_(l, b->dtype);
  MOE_NEURON_TRY_(moe_neuron_loaded_new_(ctx, b, y->gate_up_grad, &y->gate_up));
  return moe_neuron_loaded_new_(ctx, b, y->down_grad, &y->down);
}

/* What a sum over experts adds: partial sums may be rounded after each block. */
MOE_FN void moe_neuron_sums_(const moe_neuron_layer_ *y, moe_neuron_out_ *out) {
  const int64_t H = y->l->H;
  for (int64_t i = 0; i < y->l->T * H && out && out->size; i++)
    moe_neuron_more_(out->e + i, (y->bounds->operand + MOE_NEURON_U_) * y->terms[i / H] * (double)out->size[i]);
}

MOE_FN moe_status moe_neuron_bound_layer_(moe_context *ctx, moe_neuron_layer_ *y, int dropping, int not_accumulating) {
  MOE_NEURON_TRY_(moe_neuron_layer_new_(ctx, y, not_accumulating));
  moe_neuron_walk_(y, dropping, NULL);
  for (int64_t e = 0; e < y->l->E; e++) y->bounds->partial = moe_max_(y->bounds->partial, y->blocks[e]);
  moe_neuron_walk_(y, dropping, y->backward ? moe_neuron_backward_row_ : moe_neuron_forward_row_);
  for (int64_t t = 0; t < y->l->T; t++) y->bounds->partial = moe_max_(y->bounds->partial, y->terms[t]);
  moe_neuron_sums_(y, moe_neuron_out_of_(y->bounds, y->backward ? "hidden_states_grad" : "output"));
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
