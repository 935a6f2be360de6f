/* Stage: sums over a token's experts. For every chunk of tokens and panel of hidden columns one lane walks the chunk's
   rows in block order, multiplies them with their expert's panel and adds into the chunk's outputs; nobody else touches
   these, so the order of every sum is fixed. Serves the forward's down projection and the backward's gradient of the
   hidden states. */
#ifndef MOE_LAYER_COMBINE_H
#define MOE_LAYER_COMBINE_H

/* Rows of one expert on their way into sums. */
typedef struct moe_summands_ {
  int64_t expert, rows;
  const int32_t *row;
  int32_t token[MOE_ROWS_MAX]; /* of the chunk: whose sum */
  float affinity[MOE_ROWS_MAX];
} moe_summands_;

typedef struct moe_combine_ {
  const moe_blockwise_ *call;
  float *products; /* [rows,H], already multiplied, or NULL: left times right */
  moe_rows_ left;  /* [rows,...] inner type */
  int64_t from;    /* first element of a left row that takes part */
  int64_t k;       /* how many do */
  moe_right_ (*right)(const struct moe_combine_ *stage, int64_t expert); /* all panels of an expert */
  /* Adds the summands' products c, 64 apart, to their sums; may change c. h0, n: which columns. */
  void (*add)(const struct moe_combine_ *stage, const moe_summands_ *summands, int64_t h0, int64_t n, float *c,
              float *sum);
  char *output; /* row t at output + t*stride, or NULL: only add's side effects are wanted */
  int64_t stride;
  int accumulate;
  void *user; /* what add needs besides */
} moe_combine_;

/* Outputs that a lane sums up at a time, those of a chunk of tokens and of some panels, and products of as many panels,
   at most: the more panels, the less often rows are gathered. Fewer for binary32 products, beside which that takes
   little time. */
enum { MOE_COMBINE_PAIRS_ = 3 << 18, MOE_COMBINE_F32_ = 5 << 16 };

MOE_FN int64_t moe_combine_panels_(const moe_blockwise_ *call) { return moe_ceil_div_(call->layer.H, MOE_PANEL); }

/* Floats of a panel's sums and products: few tokens seldom have more rows of an expert. */
MOE_FN int64_t moe_combine_panel_(const moe_blockwise_ *call) {
  const int64_t tokens = call->plan.chunk_rows;
  return tokens * MOE_PANEL + MOE_PRODUCTS_FLOATS_(moe_min_(tokens, MOE_ROWS_MAX));
}

/* Into how many items a chunk's panels divide: as many for every lane, if it can be. */
MOE_FN int64_t moe_combine_parts_(const moe_blockwise_ *call, int64_t lanes) {
  const int64_t floats = call->group.panel == MOE_PANEL_F32 ? MOE_COMBINE_F32_ : MOE_COMBINE_PAIRS_;
  const int64_t fit = moe_max_(1, floats / moe_combine_panel_(call));
  const int64_t panels = moe_combine_panels_(call), chunks = call->plan.chunks;
  int64_t parts = moe_ceil_div_(panels, moe_panels_per_item_(lanes, chunks, panels, fit));
  while (parts < panels && chunks * parts % lanes != 0) parts++;
  return parts;
}

/* The panels of an item, at most; floats of their sums; and of these and products of as many panels. */
MOE_FN int64_t moe_combine_most_(const moe_blockwise_ *call, int64_t lanes) {
  return moe_ceil_div_(moe_combine_panels_(call), moe_combine_parts_(call, lanes));
}
MOE_FN int64_t moe_combine_sums_(const moe_blockwise_ *call, int64_t lanes) {
  return moe_combine_most_(call, lanes) * call->plan.chunk_rows * MOE_PANEL;
}
MOE_FN int64_t moe_combine_floats_(const moe_blockwise_ *call, int64_t lanes) {
  return moe_combine_most_(call, lanes) * moe_combine_panel_(call);
}

MOE_FN int64_t moe_combine_items_(const moe_blockwise_ *call) {
  return call->plan.chunks * moe_combine_parts_(call, call->group.lanes);
}

/* The chunk of tokens and the panels of an item. */
typedef struct moe_patch_ {
  int64_t chunk, panel, panels;
} moe_patch_;

/* Parts are as equal as can be, and the last ones narrower, so that lanes end together. */
MOE_FN moe_patch_ moe_combine_patch_(const moe_blockwise_ *call, int64_t item) {
  const int64_t parts = moe_combine_parts_(call, call->group.lanes), panels = moe_combine_panels_(call);
  const int64_t part = item / call->plan.chunks, wide = panels % parts;
  const moe_patch_ patch = {item % call->plan.chunks, part * (panels / parts) + moe_min_(part, wide),
                            panels / parts + (part < wide)};
  return patch;
}

/* The end of the run that row order[at] belongs to. */
MOE_FN int64_t moe_combine_run_end_(const moe_plan_ *plan, int64_t at, int64_t end) {
  const int32_t run = plan->run[plan->order[at]];
  while (at < end && plan->run[plan->order[at]] == run) at++;
  return at;
}

/* `count` of the patch's panels of the weights of the run that row order[at] belongs to. */
MOE_FN moe_right_ moe_combine_right_(const moe_combine_ *stage, int64_t at, int64_t panel, int64_t count) {
  const moe_plan_ *plan = &stage->call->plan;
  const moe_right_ all = stage->right(stage, plan->run_expert[plan->run[plan->order[at]]]);
  return moe_right_part_(&all, panel, count);
}

/* What the run at order[at], before `end`, reads first. */
MOE_FN moe_ahead_ moe_combine_run_ahead_(const moe_combine_ *stage, int64_t at, int64_t end, const moe_patch_ *patch) {
  const int64_t rows = moe_combine_run_end_(&stage->call->plan, at, end) - at;
  const moe_right_ right = moe_combine_right_(stage, at, patch->panel, moe_min_(patch->panels, MOE_PANELS_LEAST));
  return moe_right_first_(&stage->call->group.kernels, stage->call->group.product, &right, rows);
}

MOE_FN void moe_combine_ahead_(void *arg, int64_t item, moe_ahead_ *ahead) {
  const moe_combine_ *stage = (const moe_combine_ *)arg;
  const moe_patch_ patch = moe_combine_patch_(stage->call, item);
  const int64_t *first = stage->call->plan.chunk_first + patch.chunk;
  if (first[0] < first[1]) *ahead = moe_combine_run_ahead_(stage, first[0], first[1], &patch);
}

/* Rows order[at, at+rows), of one run, of a chunk. */
MOE_FN void moe_combine_summands_(const moe_combine_ *stage, int64_t chunk, int64_t at, int64_t rows,
                                  moe_summands_ *summands) {
  const moe_plan_ *plan = &stage->call->plan;
  summands->expert = plan->run_expert[plan->run[plan->order[at]]];
  summands->rows = rows;
  summands->row = plan->order + at;
  for (int64_t i = 0; i < rows; i++) {
    summands->token[i] = (int32_t)(plan->token[summands->row[i]] - chunk * plan->chunk_rows);
    summands->affinity[i] = plan->affinity[summands->row[i]];
  }
}

/* Their products with panels from `panel` on, on their way into the lane's sums. */
typedef struct moe_combine_leaving_ {
  const moe_combine_ *stage;
  const moe_patch_ *patch;
  const moe_summands_ *summands;
  int64_t panel;
  float *sum;
} moe_combine_leaving_;

MOE_FN void moe_combine_leave_(void *arg, int64_t p, float *c) {
  const moe_combine_leaving_ *leaving = (const moe_combine_leaving_ *)arg;
  const moe_combine_ *stage = leaving->stage;
  const int64_t panel = leaving->panel + p, h0 = panel * MOE_PANEL;
  stage->add(stage, leaving->summands, h0, moe_min_(MOE_PANEL, stage->call->layer.H - h0), c,
             leaving->sum + (panel - leaving->patch->panel) * stage->call->plan.chunk_rows * MOE_PANEL);
}

/* Products that are there already: `count` panels of them leave by way of c. */
MOE_FN void moe_combine_take_(moe_combine_leaving_ *leaving, float *c, int64_t count) {
  const moe_summands_ *summands = leaving->summands;
  const int64_t H = leaving->stage->call->layer.H;
  for (int64_t p = 0; p < count; p++) {
    const int64_t h0 = (leaving->panel + p) * MOE_PANEL, n = moe_min_(MOE_PANEL, H - h0);
    for (int64_t i = 0; i < summands->rows; i++)
      memcpy(c + i * MOE_PANEL, leaving->stage->products + summands->row[i] * H + h0, (size_t)n * sizeof *c);
    moe_combine_leave_(leaving, p, c);
  }
}

enum { MOE_COMBINE_AHEAD_ = 4 }; /* rows whose products, if they are there already, are fetched ahead */

/* Other cores' caches hold most of them: the patch's, of rows order[at, end), are fetched. Returns end. */
MOE_FN int64_t moe_combine_fetch_(const moe_combine_ *stage, int64_t at, int64_t end, const moe_patch_ *patch) {
  for (; at < end && stage->products; at++) {
    const float *row = stage->products + stage->call->plan.order[at] * stage->call->layer.H;
    for (int64_t p = 0; p < patch->panels * MOE_PANEL; p += 64 / (int64_t)sizeof *row)
      __builtin_prefetch(row + patch->panel * MOE_PANEL + p, 0, 3);
  }
  return end;
}

/* One run's rows [at,end) of order, added into the lane's sums. */
MOE_FN void moe_combine_run_(const moe_combine_ *stage, moe_lane_ *lane, int64_t at, int64_t end,
                             const moe_patch_ *patch, const moe_ahead_ *next) {
  const moe_blockwise_ *call = stage->call;
  const moe_rows_ rows = {stage->left.base, stage->left.stride, call->plan.order};
  const int64_t step = moe_rows_at_once_(end - at), last = patch->panel + patch->panels;
  for (; at < end; at += step) {
    moe_left_ left;
    moe_summands_ summands;
    moe_lane_left_(&call->group, lane, &rows, at, moe_min_(step, end - at), call->inner_dtype, stage->from, stage->k,
                   &left);
    moe_combine_summands_(stage, patch->chunk, at, left.rows, &summands);
    for (int64_t panel = patch->panel, count; panel < last; panel += count) {
      moe_combine_leaving_ leaving = {stage, patch, &summands, panel, lane->sum};
      const moe_results_ results = moe_results_leave_(moe_combine_leave_, &leaving);
      moe_right_ right = moe_combine_right_(stage, at, panel, last - panel);
      count = moe_min_(moe_panels_at_once_(lane->products, left.rows), last - panel);
      right = moe_right_part_(&right, 0, count);
      if (stage->products) moe_combine_take_(&leaving, lane->c, count);
      else moe_lane_multiply_(&call->group, lane, &left, &right, panel + count == last ? next : NULL, &results);
    }
  }
}

MOE_FN void moe_combine_item_(void *arg, int64_t item, moe_turn_ *turn) {
  const moe_combine_ *stage = (const moe_combine_ *)arg;
  const moe_blockwise_ *call = stage->call;
  const moe_plan_ *plan = &call->plan;
  moe_lane_ lane = moe_lane_at_(&call->group, turn, stage, moe_combine_sums_(call, call->group.lanes));
  const moe_patch_ patch = moe_combine_patch_(call, item);
  const int64_t t0 = patch.chunk * plan->chunk_rows, tokens = moe_min_(plan->chunk_rows, call->layer.T - t0),
                end = plan->chunk_first[patch.chunk + 1];
  for (int64_t p = 0; p < patch.panels; p++)
    memset(lane.sum + p * plan->chunk_rows * MOE_PANEL, 0, (size_t)(tokens * MOE_PANEL) * sizeof *lane.sum);
  for (int64_t at = plan->chunk_first[patch.chunk], fetched = at, run_end; at < end; at = run_end) {
    run_end = moe_combine_run_end_(plan, at, end);
    fetched = moe_combine_fetch_(stage, fetched, moe_min_(end, run_end + MOE_COMBINE_AHEAD_), &patch);
    const moe_ahead_ next = run_end < end ? moe_combine_run_ahead_(stage, run_end, end, &patch) : turn->ahead;
    moe_combine_run_(stage, &lane, at, run_end, &patch, &next);
  }
  for (int64_t p = 0; p < patch.panels && stage->output; p++) {
    const int64_t h0 = (patch.panel + p) * MOE_PANEL, n = moe_min_(MOE_PANEL, call->layer.H - h0);
    moe_store_sums_(&call->group.kernels, stage->output + t0 * stage->stride + h0 * call->size, stage->stride,
                    call->dtype, lane.sum + p * plan->chunk_rows * MOE_PANEL, tokens, n, stage->accumulate);
  }
}

#endif
