/* Bounds of products of MXFP8 operands, and of the MLP that is made of them. What is given is rounded to MX alike by
   all; what was computed has an error, and may be rounded to whatever the ends of its interval are, under every scale
   that its group may have. */
#ifndef MOE_NEURON_BOUND_MLP_H
#define MOE_NEURON_BOUND_MLP_H

/* Values, each with its e. */
typedef struct moe_neuron_matrix_ {
  int64_t rows, columns;
  float *v, *e;
} moe_neuron_matrix_;

typedef struct moe_neuron_mlp_ {
  moe_context *ctx;
  moe_neuron_bounds_ *bounds;
  const moe_layer_config *config;
  moe_mx_rounding round;
  moe_mx_layout layout;
  int64_t S, H, I;
} moe_neuron_mlp_;

/* --------------------------------------------------------------------------------------------------------- matrices */

MOE_FN moe_status moe_neuron_matrix_new_(moe_context *ctx, moe_neuron_bounds_ *bounds, int64_t rows, int64_t columns,
                                         moe_neuron_matrix_ *m) {
  m->rows = rows, m->columns = columns;
  m->v = (float *)moe_neuron_take_(&bounds->scratch, moe_mul_(2, moe_mul_(rows, columns)), sizeof *m->v);
  if (!m->v) return moe_neuron_no_memory_(ctx);
  m->e = m->v + rows * columns;
  return MOE_OK;
}

/* Rows [first, first+rows) of m, transposed. */
MOE_FN moe_status moe_neuron_transposed_(moe_context *ctx, moe_neuron_bounds_ *bounds, const moe_neuron_matrix_ *m,
                                         int64_t first, int64_t rows, moe_neuron_matrix_ *to) {
  MOE_NEURON_TRY_(moe_neuron_matrix_new_(ctx, bounds, m->columns, rows, to));
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < m->columns; j++) {
      to->v[j * rows + i] = m->v[(first + i) * m->columns + j];
      to->e[j * rows + i] = m->e[(first + i) * m->columns + j];
    }
  return MOE_OK;
}

/* to = a*b^T (optional), of a sum of n products in all; and its bounds are added to out's (optional) from row `first`
   on. */
MOE_FN void moe_neuron_multiply_(moe_neuron_bounds_ *bounds, const moe_neuron_matrix_ *a, const moe_neuron_matrix_ *b,
                                 int64_t n, moe_neuron_matrix_ *to, moe_neuron_out_ *out, int64_t first) {
  const double gamma = moe_neuron_gamma_(bounds, n);
  const int64_t K = a->columns;
  for (int64_t i = 0; i < a->rows; i++)
    for (int64_t j = 0; j < b->rows; j++) {
      const float *x = a->v + i * K, *ex = a->e + i * K, *y = b->v + j * K, *ey = b->e + j * K;
      double v = 0, size = 0, sum = 0, square = 0;
      for (int64_t k = 0; k < K; k++) {
        const double p = (double)x[k] * (double)y[k];
        const double e = moe_neuron_product_((double)x[k], (double)ex[k], (double)y[k], (double)ey[k]);
        v += p, size += fabs(p), sum += e, square += e * e;
      }
      const double e = (1 + gamma) * moe_neuron_carried_(bounds, sum, square) + gamma * size;
      if (out) moe_neuron_add_bound_(bounds, out, (first + i) * b->rows + j, size + sum, e);
      if (!to) continue;
      to->v[i * b->rows + j] = (float)v;
      moe_neuron_more_(&to->e[i * b->rows + j], e + MOE_NEURON_U_ * fabs(v));
    }
}

/* Rounds rows along their elements. */
MOE_FN moe_status moe_neuron_mx_round_(const moe_neuron_mlp_ *p, moe_neuron_matrix_ *m) {
  const int64_t K = m->columns;
  moe_neuron_round_ r;
  MOE_NEURON_TRY_(moe_neuron_round_new_(p->ctx, p->bounds, p->layout, 1, K, &r));
  for (int64_t i = 0; i < m->rows; i++) moe_neuron_round_row_(&p->round, &r, 0, m->v + i * K, m->e + i * K);
  return MOE_OK;
}

/* --------------------------------------------------------------------------------------------------------- operands */

/* fp8 codes [F,K] in their layout, decoded. */
MOE_FN moe_status moe_neuron_decode_(const moe_neuron_mlp_ *p, const moe_mxfp8_operand *x, moe_neuron_matrix_ *m) {
  const moe_quantized_weight quantized = {.element = p->round.element,
                                          .layout = x->is_swizzled ? p->layout : MOE_MX_LAYOUT_PLAIN,
                                          .scales_layout = x->scales_layout,
                                          .codes = x->data,
                                          .scales = x->scales};
  const moe_neuron_weight_ weight = {.quantized = &quantized, .E = 1, .K = m->columns, .parts = 1, .columns = m->rows};
  moe_neuron_loaded_ loaded;
  MOE_NEURON_TRY_(moe_neuron_loaded_new_(p->ctx, p->bounds, weight, &loaded));
  const float *values = moe_neuron_expert_(&loaded, 0);
  for (int64_t i = 0; i < m->rows; i++)
    for (int64_t k = 0; k < m->columns; k++) m->v[i * m->columns + k] = values[k * m->rows + i];
  return MOE_OK;
}

/* An operand's values [F,K]. */
MOE_FN moe_status moe_neuron_mx_values_(const moe_neuron_mlp_ *p, const char *name, const moe_mxfp8_operand *x,
                                        int64_t F, int64_t K, moe_neuron_matrix_ *to) {
  if (!x->data) return moe_neuron_null_(p->ctx, name);
  MOE_NEURON_TRY_(moe_neuron_matrix_new_(p->ctx, p->bounds, F, K, to));
  if (x->scales) return moe_neuron_decode_(p, x, to);
  if (!x->is_swizzled) return moe_neuron_widen_(MOE_DTYPE_BF16, x->data, 0, F * K, to->v), MOE_OK;
  int64_t *index = (int64_t *)moe_neuron_take_(&p->bounds->scratch, K, sizeof *index);
  if (!index) return moe_neuron_no_memory_(p->ctx);
  MOE_NEURON_TRY_(moe_neuron_positions_(p->ctx, p->layout, 1, K, index));
  for (int64_t n = 0; n < K; n++)
    for (int64_t i = 0; i < F; i++)
      moe_neuron_widen_(MOE_DTYPE_BF16, x->data, (n / 4 * F + i) * 4 + n % 4, 1, &to->v[i * K + index[n]]);
  return MOE_OK;
}

/* An operand [F,K] of a product, rounded along K. */
MOE_FN moe_status moe_neuron_mx_operand_(const moe_neuron_mlp_ *p, const char *name, const moe_mxfp8_operand *x,
                                         int64_t F, int64_t K, moe_neuron_matrix_ *to) {
  MOE_NEURON_TRY_(moe_neuron_mx_values_(p, name, x, F, K, to));
  return x->scales ? MOE_OK : moe_neuron_mx_round_(p, to);
}

/* The same or, where it is not given, rows [first, first+K) of `other`, of which there are `all`, transposed. */
MOE_FN moe_status moe_neuron_mx_either_(const moe_neuron_mlp_ *p, const moe_mxfp8_operand *x, const char *name,
                                        const moe_mxfp8_operand *other, int64_t first, int64_t all, int64_t F,
                                        int64_t K, moe_neuron_matrix_ *to) {
  moe_neuron_matrix_ values;
  if (x->data) return moe_neuron_mx_operand_(p, name, x, F, K, to);
  MOE_NEURON_TRY_(moe_neuron_mx_values_(p, name, other, all, F, &values));
  MOE_NEURON_TRY_(moe_neuron_transposed_(p->ctx, p->bounds, &values, first, K, to));
  return moe_neuron_mx_round_(p, to);
}

/* ---------------------------------------------------------------------------------------------------------- product */

MOE_FN moe_neuron_mlp_ moe_neuron_mlp_of_(moe_context *ctx, moe_neuron_bounds_ *bounds,
                                          const moe_mxfp8_format *format) {
  const moe_mx_rounding round = {.enabled = 1,
                                 .element = format->element,
                                 .scale_rule = format->use_scale_rule ? format->scale_rule : MOE_SCALE_NKI_ALT,
                                 .cast = MOE_CAST_SATURATE};
  return (moe_neuron_mlp_){.ctx = ctx, .bounds = bounds, .round = round, .layout = format->layout};
}

MOE_FN moe_status moe_neuron_bound_matmul_(moe_context *ctx, const void *arguments, moe_neuron_bounds_ *bounds) {
  const moe_matmul_mxfp8_args *args = (const moe_matmul_mxfp8_args *)arguments;
  const moe_neuron_mlp_ p = moe_neuron_mlp_of_(ctx, bounds, &args->format);
  moe_neuron_matrix_ a, b;
  MOE_NEURON_TRY_(moe_neuron_mx_operand_(&p, "a", &args->a, args->M, args->K, &a));
  MOE_NEURON_TRY_(moe_neuron_mx_operand_(&p, "b", &args->b, args->N, args->K, &b));
  moe_neuron_multiply_(bounds, &a, &b, args->K, NULL, moe_neuron_out_of_(bounds, "output"), 0);
  return MOE_OK;
}

/* --------------------------------------------------------------------------------------------------------- the unit */

/* The [S,I] tensors: names under which they are compared, and checkpoints, which may be NULL. */
typedef struct moe_neuron_checkpoints_ {
  const char *name[4];
  const void *given[4]; /* gate_pre, up, gate_act, hidden */
} moe_neuron_checkpoints_;

/* gate_pre (part 0) or up: given, or columns of X*Wg^T, X*Wu^T. */
MOE_FN moe_status moe_neuron_mlp_part_(const moe_neuron_mlp_ *p, const moe_mxfp8_operand *x,
                                       const moe_mxfp8_operand *weights, int part, const void *given,
                                       moe_neuron_matrix_ *to) {
  moe_neuron_matrix_ a, b;
  double lower, upper;
  MOE_NEURON_TRY_(moe_neuron_matrix_new_(p->ctx, p->bounds, p->S, p->I, to));
  if (given) return moe_neuron_widen_(MOE_DTYPE_BF16, given, 0, p->S * p->I, to->v), MOE_OK;
  MOE_NEURON_TRY_(moe_neuron_mx_operand_(p, "hidden_states", x, p->S, p->H, &a));
  MOE_NEURON_TRY_(moe_neuron_mx_operand_(p, "gate_up_weights", weights, 2 * p->I, p->H, &b));
  b.rows = p->I, b.v += part * p->I * p->H, b.e += part * p->I * p->H;
  moe_neuron_multiply_(p->bounds, &a, &b, p->H, to, NULL, 0);
  moe_neuron_limits_(p->config, part, MOE_DTYPE_F32, &lower, &upper);
  for (int64_t i = 0; i < p->S * p->I; i++) to->v[i] = (float)fmax(fmin((double)to->v[i], upper), lower);
  return MOE_OK;
}

/* Adds a matrix's e to an output's bounds. */
MOE_FN void moe_neuron_mlp_out_(const moe_neuron_mlp_ *p, const char *name, const moe_neuron_matrix_ *m, int transposed,
                                int64_t first) {
  moe_neuron_out_ *out = name ? moe_neuron_out_of_(p->bounds, name) : NULL;
  for (int64_t i = 0; i < m->rows && out; i++)
    for (int64_t j = 0; j < m->columns; j++)
      moe_neuron_more_(out->e + (transposed ? (first + j) * m->rows + i : i * m->columns + j),
                       (double)m->e[i * m->columns + j]);
}

/* gate_pre or up is kept as bf16, or is not. */
MOE_FN void moe_neuron_mlp_keep_(const moe_neuron_mlp_ *p, const char *name, const void *given,
                                 moe_neuron_matrix_ *part) {
  moe_neuron_mlp_out_(p, name, part, 0, 0);
  for (int64_t i = 0; i < p->S * p->I && !given; i++)
    moe_neuron_more_(&part->e[i],
                     moe_neuron_unit_of_(MOE_DTYPE_BF16) * (fabs((double)part->v[i]) + (double)part->e[i]));
}

/* gate_act and hidden, and all that their gradients need. */
MOE_FN moe_status moe_neuron_mlp_unit_(const moe_neuron_mlp_ *p, const moe_neuron_checkpoints_ *saved,
                                       moe_neuron_matrix_ part[2], moe_neuron_unit_ *unit, moe_neuron_matrix_ *hidden) {
  moe_neuron_matrix_ act;
  for (int k = 0; k < 2; k++) moe_neuron_mlp_keep_(p, saved->name[k], saved->given[k], &part[k]);
  MOE_NEURON_TRY_(moe_neuron_matrix_new_(p->ctx, p->bounds, p->S, p->I, &act));
  MOE_NEURON_TRY_(moe_neuron_matrix_new_(p->ctx, p->bounds, p->S, p->I, hidden));
  for (int64_t i = 0; i < p->S * p->I; i++) {
    const double x[2] = {(double)part[0].v[i], (double)part[1].v[i]};
    const double e[2] = {(double)part[0].e[i], (double)part[1].e[i]};
    float given;
    unit[i] = moe_neuron_glu_(p->bounds, p->config, x, e, 1);
    if (saved->given[2]) {
      moe_neuron_widen_(MOE_DTYPE_BF16, saved->given[2], i, 1, &given);
      unit[i].act = (double)given, unit[i].e_act = 0;
      moe_neuron_finish_unit_(p->bounds, 1, &unit[i]);
    }
    act.e[i] = (float)(unit[i].e_act * (1 + 0x1p-22));
    hidden->v[i] = (float)unit[i].m,
    hidden->e[i] = (float)((unit[i].e_m + MOE_NEURON_U_ * fabs(unit[i].m)) * (1 + 0x1p-22));
    if (!saved->given[3]) continue;
    moe_neuron_widen_(MOE_DTYPE_BF16, saved->given[3], i, 1, &hidden->v[i]);
    hidden->e[i] = 0;
  }
  moe_neuron_mlp_out_(p, saved->name[2], &act, 0, 0), moe_neuron_mlp_out_(p, saved->name[3], hidden, 0, 0);
  return MOE_OK;
}

MOE_FN moe_status moe_neuron_bound_mlp_forward_(moe_context *ctx, const void *arguments, moe_neuron_bounds_ *bounds) {
  static const moe_neuron_checkpoints_ saved = {.name = {"gate_pre", "up", "gate_act", "hidden"}};
  const moe_mlp_fwd_mxfp8_args *args = (const moe_mlp_fwd_mxfp8_args *)arguments;
  moe_neuron_mlp_ p = moe_neuron_mlp_of_(ctx, bounds, &args->mlp.format);
  moe_neuron_matrix_ part[2], hidden, down;
  p.config = &args->mlp.config, p.S = args->mlp.S, p.H = args->mlp.H, p.I = args->mlp.I;
  moe_neuron_unit_ *unit = (moe_neuron_unit_ *)moe_neuron_take_(&bounds->scratch, moe_mul_(p.S, p.I), sizeof *unit);
  if (!unit) return moe_neuron_no_memory_(ctx);
  for (int k = 0; k < 2; k++)
    MOE_NEURON_TRY_(moe_neuron_mlp_part_(&p, &args->hidden_states, &args->gate_up_weights, k, NULL, &part[k]));
  MOE_NEURON_TRY_(moe_neuron_mlp_unit_(&p, &saved, part, unit, &hidden));
  MOE_NEURON_TRY_(moe_neuron_mx_round_(&p, &hidden));
  MOE_NEURON_TRY_(moe_neuron_mx_operand_(&p, "down_weight", &args->down_weight, p.H, p.I, &down));
  moe_neuron_multiply_(bounds, &hidden, &down, p.I, NULL, moe_neuron_out_of_(bounds, "output"), 0);
  return MOE_OK;
}

/* --------------------------------------------------------------------------------------------------------- backward */

/* d_gate and d_up in place of gate_pre and up. */
MOE_FN moe_status moe_neuron_mlp_phase1_(const moe_neuron_mlp_ *p, const moe_mlp_bwd_mxfp8_args *args,
                                         const moe_neuron_unit_ *unit, moe_neuron_matrix_ part[2]) {
  moe_neuron_matrix_ dy, down, dm;
  MOE_NEURON_TRY_(moe_neuron_mx_operand_(p, "output_grad", &args->output_grad, p->S, p->H, &dy));
  MOE_NEURON_TRY_(
      moe_neuron_mx_either_(p, &args->down_weight_T, "down_weight", &args->down_weight, 0, p->H, p->I, p->H, &down));
  MOE_NEURON_TRY_(moe_neuron_matrix_new_(p->ctx, p->bounds, p->S, p->I, &dm));
  moe_neuron_multiply_(p->bounds, &dy, &down, p->H, &dm, NULL, 0);
  for (int64_t i = 0; i < p->S * p->I; i++) {
    const double v = (double)dm.v[i], error = (double)dm.e[i] + p->bounds->operand * fabs(v);
    double x[2] = {(double)part[0].v[i], (double)part[1].v[i]}, e[2] = {(double)part[0].e[i], (double)part[1].e[i]};
    moe_neuron_glu_grad_(p->bounds, p->config, MOE_DTYPE_BF16, &unit[i], v, error, x, e);
    for (int k = 0; k < 2; k++)
      part[k].v[i] = (float)x[k], part[k].e[i] = (float)((e[k] + MOE_NEURON_U_ * fabs(x[k])) * (1 + 0x1p-22));
  }
  moe_neuron_mlp_out_(p, "d_gate", &part[0], 0, 0), moe_neuron_mlp_out_(p, "d_up", &part[1], 0, 0);
  for (int k = 0; k < 2; k++) moe_neuron_mlp_out_(p, "d_gate_up_T", &part[k], 1, k * p->I);
  return MOE_OK;
}

/* hidden_states_grad = d_gate*Wg + d_up*Wu. */
MOE_FN moe_status moe_neuron_mlp_phase2_(const moe_neuron_mlp_ *p, const moe_mlp_bwd_mxfp8_args *args,
                                         const moe_neuron_matrix_ part[2]) {
  const moe_mxfp8_operand *given[2] = {&args->gate_weight_T, &args->up_weight_T};
  moe_neuron_out_ *out = moe_neuron_out_of_(p->bounds, "hidden_states_grad");
  for (int k = 0; k < 2 && out; k++) {
    moe_neuron_matrix_ d, w;
    MOE_NEURON_TRY_(moe_neuron_matrix_new_(p->ctx, p->bounds, p->S, p->I, &d));
    memcpy(d.v, part[k].v, (size_t)(2 * p->S * p->I) * sizeof *d.v);
    MOE_NEURON_TRY_(moe_neuron_mx_round_(p, &d));
    MOE_NEURON_TRY_(moe_neuron_mx_either_(p, given[k], "gate_up_weights", &args->gate_up_weights, k * p->I, 2 * p->I,
                                          p->H, p->I, &w));
    moe_neuron_multiply_(p->bounds, &d, &w, 2 * p->I, NULL, out, 0);
  }
  return MOE_OK;
}

/* gate_up_weight_grad = [d_gate|d_up]^T X. */
MOE_FN moe_status moe_neuron_mlp_phase3_(const moe_neuron_mlp_ *p, const moe_mlp_bwd_mxfp8_args *args,
                                         const moe_neuron_matrix_ part[2]) {
  moe_neuron_out_ *all = moe_neuron_out_of_(p->bounds, "gate_up_weight_grad");
  moe_neuron_matrix_ x;
  if (!all) return MOE_OK;
  MOE_NEURON_TRY_(
      moe_neuron_mx_either_(p, &args->hidden_states_T, "hidden_states", &args->hidden_states, 0, p->S, p->H, p->S, &x));
  for (int64_t k = 0; k < 2; k++) {
    moe_neuron_matrix_ d;
    MOE_NEURON_TRY_(moe_neuron_transposed_(p->ctx, p->bounds, &part[k], 0, p->S, &d));
    MOE_NEURON_TRY_(moe_neuron_mx_round_(p, &d));
    moe_neuron_multiply_(p->bounds, &d, &x, p->S, NULL, all, k * p->I);
  }
  return MOE_OK;
}

/* down_weight_grad = dY^T hidden. */
MOE_FN moe_status moe_neuron_mlp_phase4_(const moe_neuron_mlp_ *p, const moe_mlp_bwd_mxfp8_args *args,
                                         const moe_neuron_matrix_ *hidden) {
  moe_neuron_out_ *out = moe_neuron_out_of_(p->bounds, "down_weight_grad");
  moe_neuron_matrix_ dy, m;
  if (!out) return MOE_OK;
  MOE_NEURON_TRY_(
      moe_neuron_mx_either_(p, &args->output_grad_T, "output_grad", &args->output_grad, 0, p->S, p->H, p->S, &dy));
  if (args->hidden_T.data) {
    MOE_NEURON_TRY_(moe_neuron_mx_operand_(p, "hidden_T", &args->hidden_T, p->I, p->S, &m));
  } else {
    MOE_NEURON_TRY_(moe_neuron_transposed_(p->ctx, p->bounds, hidden, 0, p->S, &m));
    MOE_NEURON_TRY_(moe_neuron_mx_round_(p, &m));
  }
  moe_neuron_multiply_(p->bounds, &dy, &m, p->S, NULL, out, 0);
  return MOE_OK;
}

/* Whether any of the outputs is compared. */
MOE_FN int moe_neuron_any_out_(moe_neuron_bounds_ *bounds, const char *const *name, int n) {
  int any = 0;
  for (int i = 0; i < n; i++) any |= moe_neuron_out_of_(bounds, name[i]) != NULL;
  return any;
}

MOE_FN moe_status moe_neuron_bound_mlp_backward_(moe_context *ctx, const void *arguments, moe_neuron_bounds_ *bounds) {
  static const char *const first[] = {"d_gate", "d_up", "d_gate_up_T", "hidden_states_grad", "gate_up_weight_grad"};
  const moe_mlp_bwd_mxfp8_args *args = (const moe_mlp_bwd_mxfp8_args *)arguments;
  const moe_neuron_checkpoints_ saved = {
      .name = {"gate_pre_scratch", "up_scratch", "gate_act_scratch", "hidden_scratch"},
      .given = {args->gate_pre, args->up, args->gate_act, args->hidden}};
  moe_neuron_mlp_ p = moe_neuron_mlp_of_(ctx, bounds, &args->mlp.format);
  moe_neuron_matrix_ part[2], hidden;
  p.config = &args->mlp.config, p.S = args->mlp.S, p.H = args->mlp.H, p.I = args->mlp.I;
  const int grads = moe_neuron_any_out_(bounds, first, 5), given = args->hidden || args->hidden_T.data;
  const int down = moe_neuron_out_of_(bounds, "down_weight_grad") != NULL;
  if (grads || moe_neuron_any_out_(bounds, saved.name, 4) || (down && !given)) {
    moe_neuron_unit_ *unit = (moe_neuron_unit_ *)moe_neuron_take_(&bounds->scratch, moe_mul_(p.S, p.I), sizeof *unit);
    if (!unit) return moe_neuron_no_memory_(ctx);
    for (int k = 0; k < 2; k++)
      MOE_NEURON_TRY_(
          moe_neuron_mlp_part_(&p, &args->hidden_states, &args->gate_up_weights, k, saved.given[k], &part[k]));
    MOE_NEURON_TRY_(moe_neuron_mlp_unit_(&p, &saved, part, unit, &hidden));
    if (grads) MOE_NEURON_TRY_(moe_neuron_mlp_phase1_(&p, args, unit, part));
  } else if (down && args->hidden) {
    MOE_NEURON_TRY_(moe_neuron_matrix_new_(ctx, bounds, p.S, p.I, &hidden));
    moe_neuron_widen_(MOE_DTYPE_BF16, args->hidden, 0, p.S * p.I, hidden.v);
  }
  MOE_NEURON_TRY_(moe_neuron_mlp_phase2_(&p, args, part));
  MOE_NEURON_TRY_(moe_neuron_mlp_phase3_(&p, args, part));
  return moe_neuron_mlp_phase4_(&p, args, &hidden);
}

#endif
