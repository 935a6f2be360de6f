/* Stage: weight gradients, dW[e] = sum over the expert's rows of x[row]^T y[row]. Both operands are packed straight from where
   their rows lie; the contraction runs over rows in block order, whole, so nothing is added up twice. */
#ifndef MOE_LAYER_WEIGHT_GRAD_H
#define MOE_LAYER_WEIGHT_GRAD_H

enum {
  MOE_GRAD_PANELS = 4,         /* panels of y an item covers, so that packing x is paid once for all of them */
  MOE_GRAD_ROWS = 4096         /* (panels at a time) x (rows) stays at or below this: they share the cache */
};

typedef struct moe_weight_grad_ {
  const moe_blockwise_ *call;
  moe_rows_ x, y;           /* row r of expert e is row first[e]+r, by token where index is set */
  moe_dtype x_dtype, y_dtype;
  int64_t m, n;             /* dW[e] is [m, blank+n] */
  int64_t blank;            /* leading columns of dW that get no gradient; y starts behind them, too */
  char *output;
  moe_dtype dtype;
  int accumulate;
} moe_weight_grad_;

MOE_FN int64_t moe_weight_grad_panels_(int64_t rows) {
  return moe_max_(1, moe_min_(MOE_GRAD_PANELS, MOE_GRAD_ROWS / moe_max_(1, rows)));
}

MOE_FN int64_t moe_weight_grad_panel_bytes_(const moe_blockwise_ *call, int64_t rows) {
  const int64_t most = moe_max_(rows, moe_min_(MOE_GRAD_ROWS, moe_mul_(rows, MOE_GRAD_PANELS)));
  return moe_panel_bytes_(call->panel, moe_add_(most, MOE_GRAD_PANELS)); /* each panel may round its rows up to even */
}

MOE_FN int64_t moe_weight_grad_items_(const moe_weight_grad_ *stage) {
  return stage->output ? stage->call->layer.E * moe_ceil_div_(stage->n, MOE_GRAD_PANELS * MOE_PANEL) : 0;
}

/* Columns [from, from+n) of the expert's rows as a packed panel. */
MOE_FN void moe_weight_grad_pack_(const moe_weight_grad_ *stage, const moe_rows_ *operand, moe_dtype dtype, int64_t expert, int64_t from, int64_t n, void *panel) {
  const moe_blockwise_ *call = stage->call;
  const int64_t first = call->plan.first[expert], rows = call->plan.first[expert + 1] - first;
  moe_rows_ part = *operand;
  part.base += from * moe_dtype_bytes_(dtype);
  if (part.index) part.index += first;
  else part.base += first * part.stride;
  call->kernels.pack_rows[call->panel][dtype](panel, 0, MOE_PANEL, &part, rows, n);
}

/* dW rows [m0, m0+rows) x 64 columns at n0 from the products in c. */
MOE_FN void moe_weight_grad_store_(const moe_weight_grad_ *stage, int64_t expert, int64_t m0, int64_t rows, int64_t n0, int64_t n, float *c) {
  const int64_t size = moe_dtype_bytes_(stage->dtype), width = stage->blank + stage->n;
  for (int64_t i = 0; i < rows; i++) {
    char *dst = stage->output + ((expert * stage->m + m0 + i) * width + stage->blank + n0) * size;
    moe_store_sum_(stage->call, dst, stage->dtype, c + i * MOE_PANEL, n, stage->accumulate);
    if (n0 == 0 && stage->blank && !stage->accumulate) memset(dst - stage->blank * size, 0, (size_t)(stage->blank * size));
  }
}

MOE_FN void moe_weight_grad_columns_(const moe_weight_grad_ *stage, const moe_lane_ *lane, int64_t expert, int64_t n0, int64_t panels) {
  const moe_blockwise_ *call = stage->call;
  const int64_t rows = call->plan.first[expert + 1] - call->plan.first[expert], bytes = moe_panel_bytes_(call->panel, rows);
  for (int64_t j = 0; j < panels; j++) {
    const int64_t at = n0 + j * MOE_PANEL;
    moe_weight_grad_pack_(stage, &stage->y, stage->y_dtype, expert, stage->blank + at, moe_min_(MOE_PANEL, stage->n - at), lane->panel + j * bytes);
  }
  for (int64_t m0 = 0; m0 < stage->m; m0 += MOE_PANEL) {
    const int64_t count = moe_min_(MOE_PANEL, stage->m - m0);
    moe_left_ left;
    moe_weight_grad_pack_(stage, &stage->x, stage->x_dtype, expert, m0, count, lane->left);
    moe_left_from_panel_(&left, call->panel, lane->left, count);
    for (int64_t j = 0; j < panels; j++) {
      const int64_t at = n0 + j * MOE_PANEL;
      moe_multiply_panel_(&call->kernels, call->product, &left, moe_even_(rows), lane->panel + j * bytes, lane->c, lane->piece);
      moe_weight_grad_store_(stage, expert, m0, count, at, moe_min_(MOE_PANEL, stage->n - at), lane->c);
    }
  }
}

/* An expert without rows still gets its gradient, zero. */
MOE_FN void moe_weight_grad_item_(void *arg, int64_t item, int64_t lane_index) {
  const moe_weight_grad_ *stage = (const moe_weight_grad_ *)arg;
  const moe_lane_ lane = moe_lane_at_(stage->call, lane_index);
  const int64_t width = MOE_GRAD_PANELS * MOE_PANEL, groups = moe_ceil_div_(stage->n, width);
  int64_t expert, group;
  moe_split_item_(stage->call, item, groups, &expert, &group);
  const int64_t rows = stage->call->plan.first[expert + 1] - stage->call->plan.first[expert];
  const int64_t step = moe_weight_grad_panels_(rows), end = moe_min_(stage->n, (group + 1) * width);
  for (int64_t n0 = group * width; n0 < end; n0 += step * MOE_PANEL)
    moe_weight_grad_columns_(stage, &lane, expert, n0, moe_min_(step, moe_ceil_div_(end - n0, MOE_PANEL)));
}

#endif
