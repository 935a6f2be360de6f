/* Stage: back through the down projection and the gated unit. For every expert and panel of intermediate columns,
   dm = dY*Wd^T, then dg, du, the rounded a*m that the weight gradient wants, bias gradients, and the panel's share of dA. */
#ifndef MOE_LAYER_DOWN_GRAD_H
#define MOE_LAYER_DOWN_GRAD_H

typedef struct moe_down_grad_ {
  const moe_blockwise_ *call;
  moe_glu_ glu;           /* limits rounded to the checkpoint's type */
  const char *output_grad; /* dY [T,H] */
  const void *checkpoint; /* [N,2,I,B] */
  char *am;               /* [rows,I] inner type: a*m, or m where the affinity does not multiply it */
  char *pre;              /* [rows,2,I] inner type: gradients of the pre-activations */
  char *scaled;           /* the same times the affinity (PRE_SCALE), else NULL */
  float *dot;             /* [rows, panels]: <dm, m> */
  char *bias_grad;        /* [E,2,I], or NULL */
  moe_dtype bias_dtype;
  int accumulate;
} moe_down_grad_;

MOE_FN int64_t moe_down_grad_panels_(const moe_blockwise_ *call) { return moe_ceil_div_(call->layer.I, MOE_PANEL); }

/* One half (0 gate, 1 up) of a row's pre-activation gradients: stored, stored scaled, and added to the bias gradient. */
MOE_FN void moe_down_grad_emit_(const moe_down_grad_ *stage, int64_t row, int64_t half, int64_t i0, int64_t n, float *grad, float *bias_sum) {
  const moe_blockwise_ *call = stage->call;
  const int64_t at = ((row * 2 + half) * call->layer.I + i0) * call->inner_size;
  call->group.kernels.store_row[call->inner_dtype](stage->pre + at, grad, n);
  call->group.kernels.add_scaled(bias_sum + half * MOE_PANEL, grad, NULL, 1.0f, n);
  if (!stage->scaled) return;
  call->group.kernels.scale_row(grad, call->plan.affinity[row], n);
  call->group.kernels.store_row[call->inner_dtype](stage->scaled + at, grad, n);
}

/* gate, up, dm: this row's columns. */
MOE_FN void moe_down_grad_row_(const moe_down_grad_ *stage, int64_t row, int64_t i0, int64_t n, float *gate, float *up, const float *dm,
                               float *bias_sum) {
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
MOE_FN void moe_down_grad_rows_(const moe_down_grad_ *stage, int64_t first, int64_t rows, int64_t i0, int64_t n, const float *c, float *bias_sum) {
  float gate[MOE_PANEL * MOE_PANEL], up[MOE_PANEL * MOE_PANEL];
  for (int64_t at = 0, run; at < rows; at += run) {
    run = moe_checkpoint_run_(stage->call, first + at, first + rows);
    if (!stage->glu.skip_gate) moe_checkpoint_load_(stage->call, stage->checkpoint, first + at, run, 0, i0, n, gate);
    moe_checkpoint_load_(stage->call, stage->checkpoint, first + at, run, 1, i0, n, up);
    for (int64_t i = 0; i < run; i++)
      moe_down_grad_row_(stage, first + at + i, i0, n, gate + i * MOE_PANEL, up + i * MOE_PANEL, c + (at + i) * MOE_PANEL, bias_sum);
  }
}

MOE_FN void moe_down_grad_store_bias_(const moe_down_grad_ *stage, int64_t expert, int64_t i0, int64_t n, float *bias_sum) {
  const int64_t size = moe_dtype_bytes_(stage->bias_dtype);
  for (int64_t half = 0; half < 2 && stage->bias_grad; half++)
    moe_store_sum_(&stage->call->group.kernels, stage->bias_grad + ((expert * 2 + half) * stage->call->layer.I + i0) * size, stage->bias_dtype,
                   bias_sum + half * MOE_PANEL, n, stage->accumulate);
}

/* Wd^T: the columns are intermediate, the contraction runs over hidden. */
MOE_FN moe_right_ moe_down_grad_right_(const moe_blockwise_ *call, int64_t expert, int64_t i0) {
  const moe_blockwise_layer *l = &call->layer;
  moe_right_ right = {0};
  right.transposed = 1;
  right.parts = 1;
  right.stride = l->H * call->size;
  right.base[0] = (const char *)l->down_proj_weight + (expert * l->I + i0) * right.stride;
  right.n = moe_min_(MOE_PANEL, l->I - i0);
  right.dtype = call->dtype;
  right.k = l->H;
  return right;
}

MOE_FN int64_t moe_down_grad_per_item_(const moe_blockwise_ *call) {
  return moe_panels_per_item_(call->group.lanes, call->layer.E, moe_down_grad_panels_(call), MOE_PANELS_MAX);
}
MOE_FN int64_t moe_down_grad_items_(const moe_blockwise_ *call) {
  return call->layer.E * moe_ceil_div_(moe_down_grad_panels_(call), moe_down_grad_per_item_(call));
}

MOE_FN moe_span_ moe_down_grad_rights_(const moe_blockwise_ *call, int64_t item, moe_right_ right[MOE_PANELS_MAX]) {
  const moe_span_ span = moe_span_of_(&call->group, item, moe_down_grad_panels_(call), moe_down_grad_per_item_(call));
  for (int64_t p = 0; p < span.count; p++) right[p] = moe_down_grad_right_(call, span.expert, (span.first + p) * MOE_PANEL);
  return span;
}

MOE_FN void moe_down_grad_ahead_(void *arg, int64_t item, moe_ahead_ *ahead) {
  const moe_blockwise_ *call = ((const moe_down_grad_ *)arg)->call;
  moe_right_ right[MOE_PANELS_MAX];
  const moe_span_ span = moe_down_grad_rights_(call, item, right);
  if (moe_group_rows_(&call->group, span.expert) == 0) return;
  *ahead = moe_right_first_(&call->group.kernels, call->group.product, right, span.count);
}

MOE_FN void moe_down_grad_item_(void *arg, int64_t item, moe_turn_ *turn) {
  const moe_down_grad_ *stage = (const moe_down_grad_ *)arg;
  const moe_blockwise_ *call = stage->call;
  const moe_lane_ lane = moe_lane_at_(&call->group, turn->lane);
  const moe_rows_ output_grad = {stage->output_grad, call->layer.H * call->size, call->plan.token};
  float bias_sum[MOE_PANELS_MAX][2 * MOE_PANEL] = {{0}};
  moe_right_ right[MOE_PANELS_MAX];
  const moe_span_ span = moe_down_grad_rights_(call, item, right);
  const int64_t end = call->group.first[span.expert + 1], step = moe_rows_at_once_(moe_group_rows_(&call->group, span.expert));
  for (int64_t first = call->group.first[span.expert]; first < end; first += step) {
    moe_left_ left;
    moe_left_from_rows_(&left, &output_grad, first, moe_min_(step, end - first), call->dtype, 0);
    moe_lane_multiply_(&call->group, &lane, &left, right, span.count, &turn->ahead);
    for (int64_t p = 0; p < span.count; p++)
      moe_down_grad_rows_(stage, first, left.rows, (span.first + p) * MOE_PANEL, right[p].n, moe_lane_products_(&lane, p), bias_sum[p]);
  }
  for (int64_t p = 0; p < span.count; p++) moe_down_grad_store_bias_(stage, span.expert, (span.first + p) * MOE_PANEL, right[p].n, bias_sum[p]);
}

#endif
