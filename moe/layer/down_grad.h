/* Stage: back through the down projection and the gated unit. For every expert and panel of intermediate columns,
   dm = dY*Wd^T, then dg, du, the rounded a*m that the weight gradient wants, bias gradients, and the panel's share of
   dA. */
#ifndef MOE_LAYER_DOWN_GRAD_H
#define MOE_LAYER_DOWN_GRAD_H

typedef struct moe_down_grad_ {
  const moe_blockwise_ *call;
  moe_glu_ glu;            /* limits rounded to the checkpoint's type */
  const char *output_grad; /* dY [T,H], as the product takes it */
  const void *checkpoint;  /* [N,2,I,B] */
  char *am;                /* [rows,I] inner type: a*m, or m where the affinity does not multiply it */
  char *pre;               /* [rows,2,I] inner type: gradients of the pre-activations */
  char *rounded;           /* the same rounded to MX, else NULL */
  char *scaled;            /* the same times the affinity (PRE_SCALE), else NULL */
  float *dot;              /* [rows, panels]: <dm, m> */
  char *bias_grad;         /* [E,2,I], or NULL */
  moe_dtype bias_dtype;
  int accumulate;
} moe_down_grad_;

MOE_FN int64_t moe_down_grad_panels_(const moe_blockwise_ *call) { return moe_ceil_div_(call->layer.I, MOE_PANEL); }

/* One half (0 gate, 1 up) of a row's pre-activation gradients: stored, stored scaled, and added to the bias
   gradient. */
MOE_FN void moe_down_grad_emit_(const moe_down_grad_ *stage, int64_t row, int64_t half, int64_t i0, int64_t n,
                                float *grad, float *bias_sum) {
  const moe_blockwise_ *call = stage->call;
  const int64_t at = ((row * 2 + half) * call->layer.I + i0) * call->inner_size;
  call->group.kernels.store_row[call->inner_dtype](stage->pre + at, grad, n);
  call->group.kernels.add_scaled(bias_sum + half * MOE_PANEL, grad, NULL, 1.0f, n);
  if (stage->rounded) {
    float operand[MOE_PANEL]; /* whole groups: panels begin at multiples of 32 */
    call->group.kernels.load_row[call->inner_dtype](operand, stage->pre + at, n);
    moe_mx_round_row_(&call->group.kernels, &call->round_gradients, operand, n);
    call->group.kernels.store_row[call->inner_dtype](stage->rounded + at, operand, n);
  }
  if (!stage->scaled) return;
  call->group.kernels.scale_row(grad, call->plan.affinity[row], n);
  call->group.kernels.store_row[call->inner_dtype](stage->scaled + at, grad, n);
}

/* gate, up, dm: this row's columns. */
MOE_FN void moe_down_grad_row_(const moe_down_grad_ *stage, int64_t row, int64_t i0, int64_t n, float *gate, float *up,
                               const float *dm, float *bias_sum) {
  const moe_blockwise_ *call = stage->call;
  float m[MOE_PANEL], dgate[MOE_PANEL], dup[MOE_PANEL];
  moe_glu_row_ glu_row = {0};
  glu_row.n = n;
  glu_row.gate = gate;
  glu_row.up = up;
  glu_row.m = m;
  glu_row.dm = dm;
  glu_row.dgate = dgate;
  glu_row.dup = dup;
  glu_row.scale = moe_post_scaled_(&call->layer.config) ? call->plan.affinity[row] : 1.0f;
  call->group.kernels.glu_backward(&stage->glu, &glu_row);
  stage->dot[row * moe_down_grad_panels_(call) + i0 / MOE_PANEL] = glu_row.dot;
  call->group.kernels.store_row[call->inner_dtype](stage->am + (row * call->layer.I + i0) * call->inner_size, m, n);
  if (!stage->glu.skip_gate) moe_down_grad_emit_(stage, row, 0, i0, n, dgate, bias_sum);
  moe_down_grad_emit_(stage, row, 1, i0, n, dup, bias_sum);
}

/* Rows [first,first+rows), whose dm is in c; the pre-activations come from the checkpoint a tile at a time. */
MOE_FN void moe_down_grad_rows_(const moe_down_grad_ *stage, int64_t first, int64_t rows, int64_t i0, int64_t n,
                                const float *c, float *bias_sum) {
  float gate[MOE_PANEL * MOE_PANEL], up[MOE_PANEL * MOE_PANEL];
  for (int64_t at = 0, run; at < rows; at += run) {
    run = moe_checkpoint_run_(stage->call, first + at, first + rows);
    if (!stage->glu.skip_gate) moe_checkpoint_load_(stage->call, stage->checkpoint, first + at, run, 0, i0, n, gate);
    moe_checkpoint_load_(stage->call, stage->checkpoint, first + at, run, 1, i0, n, up);
    for (int64_t i = 0; i < run; i++)
      moe_down_grad_row_(stage, first + at + i, i0, n, gate + i * MOE_PANEL, up + i * MOE_PANEL,
                         c + (at + i) * MOE_PANEL, bias_sum);
  }
}

MOE_FN void moe_down_grad_store_bias_(const moe_down_grad_ *stage, int64_t expert, int64_t i0, int64_t n,
                                      float *bias_sum) {
  const int64_t size = moe_dtype_bytes_(stage->bias_dtype);
  for (int64_t half = 0; half < 2 && stage->bias_grad; half++)
    moe_store_sum_(&stage->call->group.kernels,
                   stage->bias_grad + ((expert * 2 + half) * stage->call->layer.I + i0) * size, stage->bias_dtype,
                   bias_sum + half * MOE_PANEL, n, stage->accumulate);
}

MOE_FN moe_right_ moe_down_grad_right_(const void *arg, int64_t expert) {
  return moe_weights_down_across_(((const moe_down_grad_ *)arg)->call, expert);
}

enum { MOE_BIAS_SUMS_ = 2 * MOE_PANEL }; /* floats per panel: gate, up */

MOE_FN void moe_down_grad_begin_(void *arg, moe_span_ span, float *sum) {
  (void)arg;
  memset(sum, 0, (size_t)(span.count * MOE_BIAS_SUMS_) * sizeof *sum);
}

MOE_FN void moe_down_grad_leave_(void *arg, const moe_products_ *products, const moe_span_ *span) {
  const moe_down_grad_ *stage = (const moe_down_grad_ *)arg;
  for (int64_t p = 0; p < products->panels; p++) {
    const int64_t panel = products->panel + p;
    moe_down_grad_rows_(stage, products->first, products->rows, panel * MOE_PANEL, moe_products_columns_(products, p),
                        moe_products_of_(products, p), products->sum + (panel - span->first) * MOE_BIAS_SUMS_);
  }
}

MOE_FN void moe_down_grad_end_(void *arg, moe_span_ span, float *sum) {
  const moe_down_grad_ *stage = (const moe_down_grad_ *)arg;
  for (int64_t p = 0; p < span.count; p++) {
    const int64_t i0 = (span.first + p) * MOE_PANEL;
    moe_down_grad_store_bias_(stage, span.expert, i0, moe_min_(MOE_PANEL, stage->call->layer.I - i0),
                              sum + p * MOE_BIAS_SUMS_);
  }
}

MOE_FN moe_expert_stage_ moe_down_grad_stage_(moe_down_grad_ *down_grad) {
  const moe_blockwise_ *call = down_grad->call;
  moe_expert_stage_ stage = {0};
  stage.group = &call->group;
  stage.left = (moe_rows_){down_grad->output_grad, call->layer.H * call->size, call->plan.token};
  stage.left_dtype = call->dtype;
  stage.right = moe_down_grad_right_;
  stage.leave = moe_down_grad_leave_;
  stage.begin = moe_down_grad_begin_;
  stage.end = moe_down_grad_end_;
  stage.arg = down_grad;
  moe_expert_stage_start_(&stage, moe_down_grad_panels_(call), call->layer.H);
  return stage;
}

#endif
