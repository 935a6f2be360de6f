/* Stage: for every expert and panel of intermediate columns, g = x*Wg, u = x*Wu, clamped, and m = act(g)*(u+offset). */
#ifndef MOE_LAYER_GATE_UP_H
#define MOE_LAYER_GATE_UP_H

typedef struct moe_gate_up_ {
  const moe_blockwise_ *call;
  char *m;          /* [rows,I] inner type, or NULL */
  void *checkpoint; /* [N,2,I,B], or NULL */
} moe_gate_up_;

/* Rows of m leave. */
MOE_FN void moe_gate_up_store_(const moe_blockwise_ *call, char *to, const moe_glu_rows_ *glu) {
  const moe_kernels *kernels = call->group.kernels;
  const int64_t stride = call->layer.I * call->inner_size;
  kernels->vec->store_rows[call->inner_dtype](to, stride, NULL, glu->m, glu->rows, glu->n);
  if (!call->round_activations.enabled || call->layer.mx.activation_layout != MOE_MX_LAYOUT_PLAIN) return;
  for (int64_t i = 0; i < glu->rows; i++, to += stride) { /* whole groups: panels begin at multiples of 32 */
    moe_load_row_(kernels->vec, call->inner_dtype, glu->m, to, glu->n);
    moe_mx_round_row_(kernels, &call->round_activations, glu->m, glu->n);
    moe_store_row_(kernels->vec, call->inner_dtype, to, glu->m, glu->n);
  }
}

/* The clamped pre-activations of rows [first,first+rows), which the gated unit has left in c. */
MOE_FN void moe_gate_up_save_(const moe_gate_up_ *stage, int64_t first, int64_t rows, int64_t i0, int64_t n,
                              const float *c) {
  const moe_blockwise_ *call = stage->call;
  const int64_t up = MOE_NR - call->gate_up.width;
  for (int64_t at = 0, run; at < rows; at += run) {
    run = moe_checkpoint_run_(call, first + at, first + rows);
    if (!call->glu.skip_gate)
      moe_checkpoint_store_(call, stage->checkpoint, first + at, run, 0, i0, n, c + at * MOE_NR);
    moe_checkpoint_store_(call, stage->checkpoint, first + at, run, 1, i0, n, c + at * MOE_NR + up);
  }
}

/* From products to m, for all rows of one panel. */
MOE_FN void moe_gate_up_panel_(const moe_gate_up_ *stage, int64_t expert, int64_t panel, int64_t n, int64_t first,
                               int64_t rows, float *c) {
  const moe_blockwise_ *call = stage->call;
  const moe_blockwise_layer *l = &call->layer;
  const int64_t width = call->gate_up.width,
                i0 = panel * width; /* gate and up columns share a panel: m is formed where both are */
  const float *affinity = call->plan.affinity + first;
  float gate_bias[MOE_NR], up_bias[MOE_NR], m[MOE_STORE_ROWS_AT_ONCE * MOE_NR];
  moe_glu_rows_ glu = {0};
  glu.n = n;
  glu.gate_bias = call->glu.skip_gate
                      ? NULL
                      : moe_load_optional_(call, l->gate_and_up_proj_bias, expert * 2 * l->I + i0, n, gate_bias);
  glu.up_bias = moe_load_optional_(call, l->gate_and_up_proj_bias, (expert * 2 + 1) * l->I + i0, n, up_bias);
  glu.m = m;
  for (int64_t i = 0; i < rows; i += MOE_STORE_ROWS_AT_ONCE) {
    glu.rows = moe_min_(MOE_STORE_ROWS_AT_ONCE, rows - i);
    glu.gate = c + i * MOE_NR;
    glu.up = glu.gate + MOE_NR - width;
    if (moe_pre_scaled_(&l->config)) glu.pre_scale = affinity + i;
    if (l->config.affinity_mode == MOE_AFFINITY_ON_I) glu.scale = affinity + i;
    char *to = stage->m ? stage->m + ((first + i) * l->I + i0) * call->inner_size : NULL;
    if (to) moe_prefetch_to_write_(to, l->I * call->inner_size, NULL, glu.rows, n * call->inner_size);
    call->group.kernels->vec->glu_forward(&call->glu, &glu);
    if (to) moe_gate_up_store_(call, to, &glu);
  }
  if (stage->checkpoint) moe_gate_up_save_(stage, first, rows, i0, n, c);
}

MOE_FN void moe_gate_up_b_(const void *arg, int64_t expert, moe_b_ *b) {
  moe_weights_gate_up_(((const moe_gate_up_ *)arg)->call, expert, b);
}

/* A quantised weight's scales that multiply product sums. */
MOE_FN void moe_gate_up_scale_(const moe_blockwise_ *call, int64_t expert, int64_t panel, int64_t n, int64_t rows,
                               float *c) {
  const int64_t width = call->gate_up.width;
  if (!moe_weight_scaled_after_(call->layer.quantized_gate_up_weight)) return;
  for (int64_t part = call->glu.skip_gate; part < 2; part++)
    for (int64_t i = 0; i < rows; i++)
      moe_quantized_scale_sums_(&call->gate_up.quantized, call->group.kernels, expert, part, panel * width, n,
                                c + i * MOE_NR + (part - call->glu.skip_gate) * width);
}

MOE_FN void moe_gate_up_epilogue_(void *arg, const moe_expert_c_ *p) {
  const moe_gate_up_ *stage = (const moe_gate_up_ *)arg;
  moe_gate_up_scale_(stage->call, p->expert, p->panel, p->n, p->rows, p->c);
  moe_gate_up_panel_(stage, p->expert, p->panel, p->n, p->first, p->rows, p->c);
}

MOE_FN void moe_gate_up_stage_(moe_gate_up_ *gate_up, moe_expert_stage_ *stage) {
  const moe_blockwise_ *call = gate_up->call;
  memset(stage, 0, sizeof *stage);
  stage->group = &call->group;
  stage->a = (moe_rows_){call->hidden, call->layer.H * call->size, call->plan.token};
  stage->a_dtype = call->dtype;
  stage->b = moe_gate_up_b_;
  stage->store_panel = moe_gate_up_epilogue_;
  stage->arg = gate_up;
  moe_expert_stage_start_(stage, call->gate_up.panels, call->layer.H);
}

#endif
