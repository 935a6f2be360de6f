/* Stage: for every expert and panel of intermediate columns, g = x*Wg, u = x*Wu, clamped, and m = act(g)*(u+offset). */
#ifndef MOE_LAYER_GATE_UP_H
#define MOE_LAYER_GATE_UP_H

typedef struct moe_gate_up_ {
  const moe_blockwise_ *call;
  char *m;          /* [rows,I] inner type, or NULL */
  void *checkpoint; /* [N,2,I,B], or NULL */
} moe_gate_up_;

MOE_FN int64_t moe_gate_up_per_item_(const moe_blockwise_ *call) {
  return moe_panels_per_item_(call->group.lanes, call->layer.E, call->gate_up.panels, MOE_PANELS_MAX);
}
MOE_FN int64_t moe_gate_up_items_(const moe_blockwise_ *call) {
  return call->layer.E * moe_ceil_div_(call->gate_up.panels, moe_gate_up_per_item_(call));
}

MOE_FN moe_span_ moe_gate_up_rights_(const moe_blockwise_ *call, int64_t item, moe_right_ right[MOE_PANELS_MAX]) {
  const moe_span_ span = moe_span_of_(&call->group, item, call->gate_up.panels, moe_gate_up_per_item_(call));
  for (int64_t p = 0; p < span.count; p++)
    right[p] = moe_weight_right_(&call->gate_up, call->layer.gate_up_proj_weight, call->layer.packed_gate_up_weight, span.expert, span.first + p);
  return span;
}

MOE_FN void moe_gate_up_row_(const moe_gate_up_ *stage, int64_t row, int64_t i0, int64_t n, moe_glu_row_ *glu_row) {
  const moe_blockwise_ *call = stage->call;
  const float a = call->plan.affinity[row];
  float m[MOE_PANEL];
  glu_row->m = m;
  glu_row->pre_scale = moe_pre_scaled_(&call->layer.config) ? a : 1.0f;
  glu_row->scale = call->layer.config.affinity_mode == MOE_AFFINITY_ON_I ? a : 1.0f;
  call->group.kernels.glu_forward(&call->glu, glu_row);
  if (stage->m) call->group.kernels.store_row[call->inner_dtype](stage->m + (row * call->layer.I + i0) * call->inner_size, m, n);
}

/* The clamped pre-activations of rows [first,first+rows), which the gated unit has left in c. */
MOE_FN void moe_gate_up_save_(const moe_gate_up_ *stage, int64_t first, int64_t rows, int64_t i0, int64_t n, const float *c) {
  const moe_blockwise_ *call = stage->call;
  const int64_t up = MOE_PANEL - call->gate_up.width;
  for (int64_t at = 0, run; at < rows; at += run) {
    run = moe_checkpoint_run_(call, first + at, first + rows);
    if (!call->glu.skip_gate) moe_checkpoint_store_(call, stage->checkpoint, first + at, run, 0, i0, n, c + at * MOE_PANEL);
    moe_checkpoint_store_(call, stage->checkpoint, first + at, run, 1, i0, n, c + at * MOE_PANEL + up);
  }
}

MOE_FN void moe_gate_up_ahead_(void *arg, int64_t item, moe_ahead_ *ahead) {
  const moe_blockwise_ *call = ((const moe_gate_up_ *)arg)->call;
  moe_right_ right[MOE_PANELS_MAX];
  const moe_span_ span = moe_gate_up_rights_(call, item, right);
  if (moe_group_rows_(&call->group, span.expert) == 0) return; /* an expert without rows is never read */
  *ahead = moe_right_first_(&call->group.kernels, call->group.product, right, span.count);
}

/* From products to m, for all rows of one panel. */
MOE_FN void moe_gate_up_panel_(const moe_gate_up_ *stage, int64_t expert, int64_t panel, int64_t n, int64_t first, int64_t rows, float *c) {
  const moe_blockwise_ *call = stage->call;
  const moe_blockwise_layer *l = &call->layer;
  const int64_t width = call->gate_up.width, i0 = panel * width; /* gate and up columns share a panel: m is formed where both are */
  float gate_bias[MOE_PANEL], up_bias[MOE_PANEL];
  moe_glu_row_ row = {0};
  row.n = n;
  row.gate_bias = call->glu.skip_gate ? NULL : moe_load_optional_(call, l->gate_and_up_proj_bias, expert * 2 * l->I + i0, n, gate_bias);
  row.up_bias = moe_load_optional_(call, l->gate_and_up_proj_bias, (expert * 2 + 1) * l->I + i0, n, up_bias);
  for (int64_t i = 0; i < rows; i++) {
    row.gate = c + i * MOE_PANEL;
    row.up = row.gate + MOE_PANEL - width;
    moe_gate_up_row_(stage, first + i, i0, n, &row);
  }
  if (stage->checkpoint) moe_gate_up_save_(stage, first, rows, i0, n, c);
}

MOE_FN void moe_gate_up_item_(void *arg, int64_t item, moe_turn_ *turn) {
  const moe_gate_up_ *stage = (const moe_gate_up_ *)arg;
  const moe_blockwise_ *call = stage->call;
  const moe_lane_ lane = moe_lane_at_(&call->group, turn->lane);
  const moe_rows_ hidden = {(const char *)call->layer.hidden_states, call->layer.H * call->size, call->plan.token};
  moe_right_ right[MOE_PANELS_MAX];
  const moe_span_ span = moe_gate_up_rights_(call, item, right);
  const int64_t end = call->group.first[span.expert + 1], step = moe_rows_at_once_(moe_group_rows_(&call->group, span.expert));
  for (int64_t first = call->group.first[span.expert]; first < end; first += step) {
    moe_left_ left;
    moe_left_from_rows_(&left, &hidden, first, moe_min_(step, end - first), call->dtype, 0);
    moe_lane_multiply_(&call->group, &lane, &left, right, span.count, &turn->ahead);
    for (int64_t p = 0; p < span.count; p++)
      moe_gate_up_panel_(stage, span.expert, span.first + p, right[p].n, first, left.rows, moe_lane_products_(&lane, p));
  }
}

#endif
