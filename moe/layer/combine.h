/* Stage: sums over a token's experts. For every chunk of tokens and panel of hidden columns one lane walks the chunk's rows
   in block order, multiplies them with their expert's panel and adds into the chunk's outputs; nobody else touches these, so
   the order of every sum is fixed. Serves the forward's down projection and the backward's gradient of the hidden states. */
#ifndef MOE_LAYER_COMBINE_H
#define MOE_LAYER_COMBINE_H

typedef struct moe_combine_ {
  const moe_blockwise_ *call;
  moe_rows_ left; /* [rows,...] inner type */
  int64_t from; /* first element of a left row that takes part */
  /* An expert's weights for the columns from h0 on. */
  moe_right_ (*right)(const struct moe_combine_ *stage, int64_t expert, int64_t h0);
  /* Adds product row c of `row` into sum; may change c. h0, n: which columns. */
  void (*add_row)(const struct moe_combine_ *stage, int64_t row, int64_t h0, int64_t n, float *c, float *sum);
  char *output; /* row t at output + t*stride, or NULL: only add_row's side effects are wanted */
  int64_t stride;
  int accumulate;
  void *user; /* what add_row needs besides */
} moe_combine_;

MOE_FN int64_t moe_combine_items_(const moe_blockwise_ *call) { return call->plan.chunks * moe_ceil_div_(call->layer.H, MOE_PANEL); }

/* The end of the run that row order[at] belongs to. */
MOE_FN int64_t moe_combine_run_end_(const moe_plan_ *plan, int64_t at, int64_t end) {
  const int32_t run = plan->run[plan->order[at]];
  while (at < end && plan->run[plan->order[at]] == run) at++;
  return at;
}

/* The weights of the run that row order[at] belongs to. */
MOE_FN moe_right_ moe_combine_right_(const moe_combine_ *stage, int64_t at, int64_t h0) {
  const moe_plan_ *plan = &stage->call->plan;
  return stage->right(stage, plan->run_expert[plan->run[plan->order[at]]], h0);
}

MOE_FN moe_ahead_ moe_combine_run_ahead_(const moe_combine_ *stage, int64_t at, int64_t h0) {
  const moe_right_ right = moe_combine_right_(stage, at, h0);
  return moe_right_first_(&stage->call->group.kernels, stage->call->group.product, &right);
}

MOE_FN void moe_combine_ahead_(void *arg, int64_t item, moe_ahead_ *ahead) {
  const moe_combine_ *stage = (const moe_combine_ *)arg;
  const moe_plan_ *plan = &stage->call->plan;
  const int64_t chunk = item % plan->chunks;
  if (plan->chunk_first[chunk] < plan->chunk_first[chunk + 1])
    *ahead = moe_combine_run_ahead_(stage, plan->chunk_first[chunk], item / plan->chunks * MOE_PANEL);
}

/* One run's rows [at,end) of order, added into sum, whose first row is token t0's. */
MOE_FN void moe_combine_run_(const moe_combine_ *stage, const moe_lane_ *lane, int64_t at, int64_t end, int64_t h0, int64_t t0, const moe_ahead_ *next) {
  const moe_blockwise_ *call = stage->call;
  const moe_plan_ *plan = &call->plan;
  const moe_rows_ rows = {stage->left.base, stage->left.stride, plan->order};
  const moe_right_ right = moe_combine_right_(stage, at, h0);
  for (; at < end; at += MOE_ROWS_MAX) {
    moe_left_ left;
    moe_left_from_rows_(&left, &rows, at, moe_min_(MOE_ROWS_MAX, end - at), call->inner_dtype, stage->from);
    moe_lane_multiply_(&call->group, lane, &left, &right, next);
    for (int64_t i = 0; i < left.rows; i++) {
      const int64_t row = plan->order[at + i];
      stage->add_row(stage, row, h0, right.n, lane->c + i * MOE_PANEL, lane->sum + (plan->token[row] - t0) * MOE_PANEL);
    }
  }
}

MOE_FN void moe_combine_item_(void *arg, int64_t item, moe_turn_ *turn) {
  const moe_combine_ *stage = (const moe_combine_ *)arg;
  const moe_blockwise_ *call = stage->call;
  const moe_plan_ *plan = &call->plan;
  const moe_lane_ lane = moe_lane_at_(&call->group, turn->lane);
  const int64_t chunk = item % plan->chunks, h0 = item / plan->chunks * MOE_PANEL, n = moe_min_(MOE_PANEL, call->layer.H - h0);
  const int64_t t0 = chunk * MOE_CHUNK, tokens = moe_min_(MOE_CHUNK, call->layer.T - t0), end = plan->chunk_first[chunk + 1];
  memset(lane.sum, 0, (size_t)(tokens * MOE_PANEL) * sizeof *lane.sum);
  for (int64_t at = plan->chunk_first[chunk], run_end; at < end; at = run_end) {
    run_end = moe_combine_run_end_(plan, at, end);
    const moe_ahead_ next = run_end < end ? moe_combine_run_ahead_(stage, run_end, h0) : turn->ahead;
    moe_combine_run_(stage, &lane, at, run_end, h0, t0, &next);
  }
  for (int64_t t = 0; t < tokens && stage->output; t++)
    moe_store_sum_(&call->group.kernels, stage->output + (t0 + t) * stage->stride + h0 * call->size, call->dtype, lane.sum + t * MOE_PANEL, n, stage->accumulate);
}

#endif
