/* Stages: the gradients that are no matrix products: of the affinities and of the down bias. */
#ifndef MOE_LAYER_SMALL_GRADS_H
#define MOE_LAYER_SMALL_GRADS_H

typedef struct moe_small_grads_ {
  const moe_blockwise_ *call;
  const char *output_grad; /* dY [T,H] */
  const char *x;           /* [T,H], for identity experts */
  const float *dot;        /* [rows, dots]: parts of dA, to be added; NULL: all dA are 0 */
  int64_t dots;
  const char *down_checkpoint; /* [N,B,H]: dA = <dY, d> instead, or NULL */
  int bias_term;               /* dA also has the part <dY, b_d> */
  char *affinity_grad;         /* [T*E], of pairs [T*K]; or NULL */
  float *scale_grad;           /* [E], of pairs; or NULL */
  char *down_bias_grad;        /* [E,H], or NULL */
  moe_dtype bias_dtype;
  uint32_t accumulate;
} moe_small_grads_;

/* The dot product (numeric contract 4) of two stored rows. */
MOE_FN float moe_dot_rows_(const moe_kernels *kernels, moe_dtype a_dtype, const char *a, moe_dtype b_dtype,
                           const char *b, int64_t n) {
  float sum = 0.0f, x[MOE_NR], y[MOE_NR];
  for (int64_t i = 0; i < n; i += MOE_NR) {
    const int64_t count = moe_min_(MOE_NR, n - i);
    moe_load_row_(kernels->vec, a_dtype, x, a + i * moe_dtype_bytes_(a_dtype), count);
    moe_load_row_(kernels->vec, b_dtype, y, b + i * moe_dtype_bytes_(b_dtype), count);
    sum = sum + kernels->vec->dot(x, y, count);
  }
  return sum;
}

MOE_FN float moe_affinity_grad_row_(const moe_small_grads_ *stage, int64_t expert, int64_t row) {
  const moe_blockwise_ *call = stage->call;
  const moe_blockwise_layer *l = &call->layer;
  const char *output_grad = stage->output_grad + call->plan.token[row] * l->H * call->size;
  if (stage->down_checkpoint)
    return moe_dot_rows_(call->group.kernels, call->dtype, output_grad, call->checkpoint_dtype,
                         stage->down_checkpoint + call->plan.slot[row] * l->H * call->checkpoint_size, l->H);
  float sum = 0.0f;
  for (int64_t i = 0; i < stage->dots && stage->dot; i++) sum = sum + stage->dot[row * stage->dots + i];
  if (stage->bias_term)
    sum = sum + moe_dot_rows_(call->group.kernels, call->dtype, output_grad, call->dtype,
                              (const char *)l->down_proj_bias + expert * l->H * call->size, l->H);
  return sum;
}

/* Those of identity experts' pairs, <dY, x>. Without affinities they are 0. */
MOE_FN void moe_affinity_grad_identities_(const moe_small_grads_ *stage) {
  const moe_blockwise_ *call = stage->call;
  const moe_pairs_ *pairs = &call->plan.pairs;
  const int64_t row = call->layer.H * call->size;
  for (int64_t i = 0; i < call->layer.T * pairs->K && pairs->topk_weights && stage->affinity_grad; i++) {
    const int64_t at = i / pairs->K * row;
    if (!moe_pair_is_identity_(pairs, call->layer.E, i)) continue;
    float grad = moe_dot_rows_(call->group.kernels, call->dtype, stage->output_grad + at, call->dtype, stage->x + at,
                               call->layer.H);
    moe_store_sum_(call->group.kernels, stage->affinity_grad + i * 4, MOE_DTYPE_F32, &grad, 1,
                   (stage->accumulate & MOE_ACCUMULATE_AFFINITIES_GRAD) != 0);
  }
}

/* Those of an expert's pairs, and of its scale s: s*dA, and the sum of w*dA. */
MOE_FN void moe_affinity_grad_pairs_(const moe_small_grads_ *stage, int64_t expert) {
  const moe_blockwise_ *call = stage->call;
  const moe_kernels *kernels = call->group.kernels;
  const moe_plan_ *plan = &call->plan;
  const int accumulate = (stage->accumulate & MOE_ACCUMULATE_AFFINITIES_GRAD) != 0;
  double sum = 0; /* of products that are exact */
  for (int64_t row = plan->first[expert]; row < plan->first[expert + 1]; row++) {
    float grad = moe_affinity_grad_row_(stage, expert, row);
    sum = sum + (double)moe_pair_affinity_(&plan->pairs, plan->pair[row]) * (double)grad;
    if (plan->pairs.scale) grad = moe_mul_scalar(grad, plan->pairs.scale[expert]);
    if (stage->affinity_grad)
      moe_store_sum_(kernels, stage->affinity_grad + plan->pair[row] * 4, MOE_DTYPE_F32, &grad, 1, accumulate);
  }
  float rounded = (float)sum;
  if (stage->scale_grad)
    moe_store_sum_(kernels, (char *)(stage->scale_grad + expert), MOE_DTYPE_F32, &rounded, 1, accumulate);
}

/* Work item: one expert's column of the affinity gradient; pairs that occur twice are added before the one rounding. Or
   the gradients of the expert's pairs; after the last expert, of identity experts'. */
MOE_FN void moe_affinity_grad_item_(void *arg, int64_t expert, moe_worker_ *worker) {
  const moe_small_grads_ *stage = (const moe_small_grads_ *)arg;
  const moe_blockwise_ *call = stage->call;
  if (call->plan.pair) {
    if (expert == call->layer.E) moe_affinity_grad_identities_(stage);
    else moe_affinity_grad_pairs_(stage, expert);
    return;
  }
  const int64_t size = moe_dtype_bytes_(call->affinity_dtype), first = call->group.first[expert],
                end = call->group.first[expert + 1];
  const int accumulate = (stage->accumulate & MOE_ACCUMULATE_AFFINITIES_GRAD) != 0;
  moe_scratch_ scratch;
  moe_scratch_at_(&call->group, worker, NULL, call->layer.T, &scratch);
  float *column = scratch.sum;
  memset(column, 0, (size_t)call->layer.T * sizeof *column);
  for (int64_t row = first; row < end; row++)
    column[call->plan.token[row]] = column[call->plan.token[row]] + moe_affinity_grad_row_(stage, expert, row);
  for (int64_t t = 0; t < call->layer.T; t++)
    moe_store_sum_(call->group.kernels, stage->affinity_grad + (t * call->layer.E + expert) * size,
                   call->affinity_dtype, column + t, 1, accumulate);
}

/* Work item: 64 columns of one expert's down bias gradient, the sum of a*dY. */
MOE_FN void moe_down_bias_grad_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_small_grads_ *stage = (const moe_small_grads_ *)arg;
  const moe_blockwise_ *call = stage->call;
  const moe_blockwise_layer *l = &call->layer;
  const int scaled = moe_post_scaled_(&l->config);
  float sum[MOE_NR] = {0}, low[MOE_NR] = {0}, x[MOE_STORE_ROWS_AT_ONCE * MOE_NR];
  const int64_t panels = moe_ceil_div_(l->H, MOE_NR), expert = item / panels, h0 = item % panels * MOE_NR;
  const int64_t n = moe_min_(MOE_NR, l->H - h0), first = call->group.first[expert];
  const moe_rows_ dy = {stage->output_grad + h0 * call->size, l->H * call->size, call->plan.token};
  (void)worker;
  for (int64_t row = first, rows; row < call->group.first[expert + 1]; row += rows) {
    const moe_rows_ some = moe_rows_from_(&dy, row);
    rows = moe_min_(MOE_STORE_ROWS_AT_ONCE, call->group.first[expert + 1] - row);
    call->group.kernels->vec->load_rows[call->dtype](x, MOE_NR, &some, rows, n);
    call->group.kernels->vec->add_long(sum, low, x, MOE_NR, scaled ? call->plan.affinity + row : NULL, row - first,
                                       rows, n);
  }
  moe_store_sum_(call->group.kernels,
                 stage->down_bias_grad + (expert * l->H + h0) * moe_dtype_bytes_(stage->bias_dtype), stage->bias_dtype,
                 sum, n, (stage->accumulate & MOE_ACCUMULATE_DOWN_BIAS_GRAD) != 0);
}

#endif
