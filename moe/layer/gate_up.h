/* Stage: for every expert and panel of intermediate columns, g = x*Wg and u = x*Wu, clamped, and m = act(g)*(u+offset).
   Gate and up columns share a panel. */
#ifndef MOE_LAYER_GATE_UP_H
#define MOE_LAYER_GATE_UP_H

typedef struct moe_gate_up_ {
  const moe_blockwise_ *call;
  char *m;          /* [rows,I] inner type, or NULL */
  void *checkpoint; /* [N,2,I,B], or NULL */
  void *scaled;     /* [N,I,B], or NULL */
} moe_gate_up_;

/* Stores rows of m, rounded under the expert's scale, or to MX where panels hold whole groups of 32. */
MOE_FN void moe_gate_up_store_(const moe_blockwise_ *call, int64_t expert, char *to, const moe_glu_rows_ *glu) {
  const moe_kernels *kernels = call->group.kernels;
  const moe_mx_operands *mx = &call->layer.mx;
  const int64_t stride = call->layer.I * call->inner_size;
  kernels->vec->store_rows[call->inner_dtype](to, stride, NULL, glu->m, glu->rows, glu->n);
  if (!mx->activations.enabled || (!mx->down_in_scale && mx->activation_layout != MOE_MX_LAYOUT_PLAIN)) return;
  moe_mx_round_ round = call->round_activations;
  if (mx->down_in_scale) round.scale = mx->down_in_scale[expert];
  for (int64_t i = 0; i < glu->rows; i++, to += stride) {
    moe_load_row_(kernels->vec, call->inner_dtype, glu->m, to, glu->n);
    moe_mx_round_row_(kernels, &round, glu->m, glu->n);
    moe_store_row_(kernels->vec, call->inner_dtype, to, glu->m, glu->n);
  }
}

/* Saves the clamped pre-activations, which glu_forward has put into c; i0: the first column. */
MOE_FN void moe_gate_up_save_(const moe_gate_up_ *stage, const moe_expert_c_ *p, int64_t i0) {
  const moe_blockwise_ *call = stage->call;
  const int64_t up = MOE_NR - call->gate_up.width;
  for (int part = call->glu.skip_gate != 0; part < 2; part++)
    moe_keep_inside_(call->group.kernels, call->checkpoint_dtype, &call->glu, part, p->c + part * up, p->rows, p->n);
  for (int64_t at = 0, run; at < p->rows; at += run) {
    const float *c = p->c + at * MOE_NR;
    run = moe_checkpoint_run_(call, p->first + at, p->first + p->rows);
    if (!call->glu.skip_gate) moe_checkpoint_store_(call, stage->checkpoint, p->first + at, run, 2, 0, i0, p->n, c);
    moe_checkpoint_store_(call, stage->checkpoint, p->first + at, run, 2, 1, i0, p->n, c + up);
  }
}

/* Saves rows of a*m from `row` on; they are m, but with ON_I. */
MOE_FN void moe_gate_up_save_scaled_(const moe_gate_up_ *stage, int64_t row, int64_t i0, const moe_glu_rows_ *glu) {
  const moe_blockwise_ *call = stage->call;
  float am[2 * MOE_STORE_ROWS_AT_ONCE * MOE_NR]; /* whole squares are transposed, from any row */
  memcpy(am, glu->m, (size_t)(glu->rows * MOE_NR) * sizeof *am);
  for (int64_t i = 0; i < glu->rows && call->layer.config.affinity_mode == MOE_AFFINITY_POST_SCALE; i++)
    call->group.kernels->vec->scale_row(am + i * MOE_NR, call->plan.affinity[row + i], glu->n);
  for (int64_t at = 0, run; at < glu->rows; at += run) {
    run = moe_checkpoint_run_(call, row + at, row + glu->rows);
    moe_checkpoint_store_(call, stage->scaled, row + at, run, 1, 0, i0, glu->n, am + at * MOE_NR);
  }
}

/* Applies the scales of a quantised weight that multiply its products. */
MOE_FN void moe_gate_up_scale_(const moe_blockwise_ *call, const moe_expert_c_ *p) {
  const int64_t width = call->gate_up.width, skip = call->glu.skip_gate != 0;
  if (!moe_weight_scaled_after_(call->layer.quantized_gate_up_proj_weight)) return;
  for (int64_t part = skip; part < 2; part++)
    for (int64_t i = 0; i < p->rows; i++)
      moe_quantized_scale_sums_(&call->gate_up.quantized, call->group.kernels, p->expert, part, p->panel * width, p->n,
                                p->c + i * MOE_NR + (part - skip) * width);
}

MOE_FN void moe_gate_up_epilogue_(void *arg, const moe_expert_c_ *p) {
  const moe_gate_up_ *stage = (const moe_gate_up_ *)arg;
  const moe_blockwise_ *call = stage->call;
  const moe_blockwise_layer *l = &call->layer;
  const int64_t width = call->gate_up.width, i0 = p->panel * width, bias = p->expert * 2 * l->I + i0;
  const float *affinity = call->plan.affinity + p->first;
  float gate_bias[MOE_NR], up_bias[MOE_NR], m[MOE_STORE_ROWS_AT_ONCE * MOE_NR];
  moe_glu_rows_ glu = {0};
  moe_gate_up_scale_(call, p);
  glu.n = p->n;
  if (!call->glu.skip_gate) glu.gate_bias = moe_load_optional_(call, l->gate_and_up_proj_bias, bias, p->n, gate_bias);
  glu.up_bias = moe_load_optional_(call, l->gate_and_up_proj_bias, bias + l->I, p->n, up_bias);
  glu.m = m;
  for (int64_t i = 0; i < p->rows; i += MOE_STORE_ROWS_AT_ONCE) {
    glu.rows = moe_min_(MOE_STORE_ROWS_AT_ONCE, p->rows - i);
    glu.gate = p->c + i * MOE_NR;
    glu.up = glu.gate + MOE_NR - width;
    if (moe_pre_scaled_(&l->config)) glu.pre_scale = affinity + i;
    if (l->config.affinity_mode == MOE_AFFINITY_ON_I) glu.scale = affinity + i;
    char *to = stage->m ? stage->m + ((p->first + i) * l->I + i0) * call->inner_size : NULL;
    if (to) moe_prefetch_to_write_(to, l->I * call->inner_size, NULL, glu.rows, p->n * call->inner_size);
    call->group.kernels->vec->glu_forward(&call->glu, &glu);
    if (stage->scaled) moe_gate_up_save_scaled_(stage, p->first + i, i0, &glu);
    if (to) moe_gate_up_store_(call, p->expert, to, &glu);
  }
  if (stage->checkpoint) moe_gate_up_save_(stage, p, i0);
}

MOE_FN void moe_gate_up_stage_(moe_gate_up_ *gate_up, moe_expert_stage_ *stage) {
  const moe_blockwise_ *call = gate_up->call;
  memset(stage, 0, sizeof *stage);
  stage->group = &call->group;
  stage->a =
      (moe_rows_){call->hidden, call->layer.H * call->size, call->layer.mx.gate_up_in_scale ? NULL : call->plan.token};
  stage->a_dtype = call->dtype;
  stage->b = moe_weights_gate_up_;
  stage->weights = call;
  stage->store_panel = moe_gate_up_epilogue_;
  stage->arg = gate_up;
  moe_expert_stage_start_(stage, call->gate_up.panels, call->layer.H);
}

#endif
