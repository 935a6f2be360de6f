/* Stage: sums over a token's experts. For every chunk of tokens and panel of hidden columns one lane walks the chunk's rows
   in block order, multiplies them with their expert's panel and adds into the chunk's outputs; nobody else touches these, so
   the order of every sum is fixed. Serves the forward's down projection and the backward's gradient of the hidden states. */
#ifndef MOE_LAYER_COMBINE_H
#define MOE_LAYER_COMBINE_H

typedef struct moe_combine_ {
  const moe_blockwise_ *call;
  moe_rows_ left; /* [rows,...] inner type */
  int64_t from, k; /* elements [from, from+k) of a left row take part */
  void (*pack)(const struct moe_combine_ *stage, int64_t expert, int64_t h0, int64_t n, void *panel);
  /* Adds product row c of `row` into sum; may change c. h0, n: which columns. */
  void (*add_row)(const struct moe_combine_ *stage, int64_t row, int64_t h0, int64_t n, float *c, float *sum);
  char *output; /* row t at output + t*stride, or NULL: only add_row's side effects are wanted */
  int64_t stride;
  int accumulate;
  void *user; /* what pack and add_row need besides */
} moe_combine_;

MOE_FN int64_t moe_combine_items_(const moe_blockwise_ *call) { return call->plan.chunks * moe_ceil_div_(call->layer.H, MOE_PANEL); }

/* Rows order[at..] of one run, at most MOE_ROWS_MAX. */
MOE_FN int64_t moe_combine_group_(const moe_plan_ *plan, int64_t at, int64_t end) {
  int64_t n = 1;
  while (n < MOE_ROWS_MAX && at + n < end && plan->run[plan->order[at + n]] == plan->run[plan->order[at]]) n++;
  return n;
}

MOE_FN void moe_combine_item_(void *arg, int64_t item, int64_t lane_index) {
  const moe_combine_ *stage = (const moe_combine_ *)arg;
  const moe_blockwise_ *call = stage->call;
  const moe_plan_ *plan = &call->plan;
  const moe_lane_ lane = moe_lane_at_(call, lane_index);
  const int64_t chunk = item % plan->chunks, h0 = item / plan->chunks * MOE_PANEL, n = moe_min_(MOE_PANEL, call->layer.H - h0);
  const int64_t t0 = chunk * MOE_CHUNK, tokens = moe_min_(MOE_CHUNK, call->layer.T - t0), end = plan->chunk_first[chunk + 1];
  int32_t packed = -1;
  memset(lane.sum, 0, (size_t)(tokens * MOE_PANEL) * sizeof *lane.sum);
  for (int64_t at = plan->chunk_first[chunk], group; at < end; at += group) {
    const int32_t run = plan->run[plan->order[at]];
    const moe_rows_ rows = {stage->left.base, stage->left.stride, plan->order};
    moe_left_ left;
    group = moe_combine_group_(plan, at, end);
    if (run != packed) stage->pack(stage, plan->run_expert[run], h0, n, lane.panel);
    packed = run;
    moe_left_from_rows_(&left, &rows, at, group, call->inner_dtype, stage->from);
    moe_multiply_panel_(&call->kernels, call->product, &left, stage->k, lane.panel, lane.c, lane.piece);
    for (int64_t i = 0; i < group; i++) {
      const int64_t row = plan->order[at + i];
      stage->add_row(stage, row, h0, n, lane.c + i * MOE_PANEL, lane.sum + (plan->token[row] - t0) * MOE_PANEL);
    }
  }
  for (int64_t t = 0; t < tokens && stage->output; t++)
    moe_store_sum_(call, stage->output + (t0 + t) * stage->stride + h0 * call->size, call->dtype, lane.sum + t * MOE_PANEL, n, stage->accumulate);
}

#endif
