/* Stage: sums over a token's experts. For every chunk of tokens and panel of hidden columns one worker walks the chunk's
   rows in block order, multiplies them with their expert's panel and adds into the chunk's outputs; nobody else touches
   these, so the order of every sum is fixed. Serves the forward's down projection and the backward's gradient of the
   hidden states. */
#ifndef MOE_LAYER_COMBINE_H
#define MOE_LAYER_COMBINE_H

/* Rows of one expert on their way into sums. */
typedef struct moe_combine_rows_ {
  int64_t expert, rows;
  const int32_t *row;
  int32_t token[MOE_MC]; /* of the chunk: whose sum */
  float affinity[MOE_MC];
} moe_combine_rows_;

typedef struct moe_combine_ {
  const moe_blockwise_ *call;
  float *products; /* [rows,H], already multiplied, or NULL: left times right */
  moe_rows_ a;     /* [rows,...] inner type */
  int64_t from;    /* first element of a left row that takes part */
  int64_t k;       /* how many do */
  void (*b)(const struct moe_combine_ *stage, int64_t expert, moe_b_ *b); /* all panels of an expert */
  /* Adds the summands' products c, 64 apart, to their sums; may change c. h0, n: which columns. */
  void (*add)(const struct moe_combine_ *stage, const moe_combine_rows_ *summands, int64_t h0, int64_t n, float *c,
              float *sum);
  char *output; /* row t at output + t*stride, or NULL: only add's side effects are wanted */
  int64_t stride;
  int accumulate;
  void *user; /* what add needs besides */
} moe_combine_;

/* Outputs that a worker sums up at a time, those of a chunk of tokens and of some panels, and products of as many panels,
   at most: the more panels, the less often rows are gathered. Fewer for binary32 products, beside which that takes
   little time. */
enum { MOE_COMBINE_FLOATS_BF16_ = 3 << 18, MOE_COMBINE_FLOATS_F32_ = 5 << 16 };

MOE_FN int64_t moe_combine_panels_(const moe_blockwise_ *call) { return moe_ceil_div_(call->layer.H, MOE_NR); }

/* Floats of a panel's sums and products: few tokens seldom have more rows of an expert. */
MOE_FN int64_t moe_combine_panel_floats_(const moe_blockwise_ *call) {
  const int64_t tokens = call->plan.chunk_rows;
  return tokens * MOE_NR + MOE_C_FLOATS_(moe_min_(tokens, MOE_MC));
}

/* Into how many items a chunk's panels divide: as many for every worker, if it can be. */
MOE_FN int64_t moe_combine_parts_(const moe_blockwise_ *call, int64_t workers) {
  const int64_t floats = call->group.panel == MOE_PANEL_F32 ? MOE_COMBINE_FLOATS_F32_ : MOE_COMBINE_FLOATS_BF16_;
  const int64_t fit = moe_max_(1, floats / moe_combine_panel_floats_(call));
  const int64_t panels = moe_combine_panels_(call), chunks = call->plan.chunks;
  int64_t parts = moe_ceil_div_(panels, moe_panels_per_item_(workers, chunks, panels, fit));
  while (parts < panels && chunks * parts % workers != 0) parts++;
  return parts;
}

/* The panels of an item, at most; floats of their sums; and of these and products of as many panels. */
MOE_FN int64_t moe_combine_item_panels_(const moe_blockwise_ *call, int64_t workers) {
  return moe_ceil_div_(moe_combine_panels_(call), moe_combine_parts_(call, workers));
}
MOE_FN int64_t moe_combine_sum_floats_(const moe_blockwise_ *call, int64_t workers) {
  return moe_combine_item_panels_(call, workers) * call->plan.chunk_rows * MOE_NR;
}
MOE_FN int64_t moe_combine_floats_(const moe_blockwise_ *call, int64_t workers) {
  return moe_combine_item_panels_(call, workers) * moe_combine_panel_floats_(call);
}

MOE_FN int64_t moe_combine_items_(const moe_blockwise_ *call) {
  return call->plan.chunks * moe_combine_parts_(call, call->group.workers);
}

/* The chunk of tokens and the panels of an item. */
typedef struct moe_chunk_item_ {
  int64_t chunk, panel, panels;
} moe_chunk_item_;

/* Parts are as equal as can be, and the last ones narrower, so that workers end together. */
MOE_FN moe_chunk_item_ moe_combine_split_item_(const moe_blockwise_ *call, int64_t item) {
  const int64_t parts = moe_combine_parts_(call, call->group.workers), panels = moe_combine_panels_(call);
  const int64_t part = item / call->plan.chunks, wide = panels % parts;
  const moe_chunk_item_ patch = {item % call->plan.chunks, part * (panels / parts) + moe_min_(part, wide),
                                 panels / parts + (part < wide)};
  return patch;
}

/* The end of the run that row order[at] belongs to. */
MOE_FN int64_t moe_combine_run_end_(const moe_plan_ *plan, int64_t at, int64_t end) {
  const int32_t run = plan->run[plan->order[at]];
  while (at < end && plan->run[plan->order[at]] == run) at++;
  return at;
}

/* The weights of the run that row order[at] belongs to. */
MOE_FN void moe_combine_b_(const moe_combine_ *stage, int64_t at, moe_b_ *b) {
  const moe_plan_ *plan = &stage->call->plan;
  stage->b(stage, plan->run_expert[plan->run[plan->order[at]]], b);
}

/* What the run at order[at], before `end`, reads first. */
MOE_FN void moe_combine_run_reads_(const moe_combine_ *stage, int64_t at, int64_t end, const moe_chunk_item_ *patch,
                                   moe_prefetch_ *prefetch) {
  const int64_t rows = moe_combine_run_end_(&stage->call->plan, at, end) - at;
  moe_b_ b;
  moe_combine_b_(stage, at, &b);
  moe_b_reads_first_(stage->call->group.kernels, stage->call->group.product, &b, patch->panel,
                     moe_min_(patch->panels, MOE_NC_PANELS), rows, prefetch);
}

MOE_FN void moe_combine_reads_(void *arg, int64_t item, moe_prefetch_ *prefetch) {
  const moe_combine_ *stage = (const moe_combine_ *)arg;
  const moe_chunk_item_ patch = moe_combine_split_item_(stage->call, item);
  const int64_t *first = stage->call->plan.chunk_first + patch.chunk;
  if (first[0] < first[1]) moe_combine_run_reads_(stage, first[0], first[1], &patch, prefetch);
}

/* Rows order[at, at+rows), of one run, of a chunk. */
MOE_FN void moe_combine_rows_at_(const moe_combine_ *stage, int64_t chunk, int64_t at, int64_t rows,
                                 moe_combine_rows_ *summands) {
  const moe_plan_ *plan = &stage->call->plan;
  summands->expert = plan->run_expert[plan->run[plan->order[at]]];
  summands->rows = rows;
  summands->row = plan->order + at;
  for (int64_t i = 0; i < rows; i++) {
    summands->token[i] = (int32_t)(plan->token[summands->row[i]] - chunk * plan->chunk_rows);
    summands->affinity[i] = plan->affinity[summands->row[i]];
  }
}

/* Their products with panels from `panel` on, on their way into the worker's sums. */
typedef struct moe_combine_product_ {
  const moe_combine_ *stage;
  const moe_chunk_item_ *patch;
  const moe_combine_rows_ *summands;
  int64_t panel;
  float *sum;
} moe_combine_product_;

MOE_FN void moe_combine_epilogue_(void *arg, int64_t p, float *c) {
  const moe_combine_product_ *product = (const moe_combine_product_ *)arg;
  const moe_combine_ *stage = product->stage;
  const int64_t panel = product->panel + p, h0 = panel * MOE_NR;
  stage->add(stage, product->summands, h0, moe_min_(MOE_NR, stage->call->layer.H - h0), c,
             product->sum + (panel - product->patch->panel) * stage->call->plan.chunk_rows * MOE_NR);
}

/* Products that are there already: `count` panels of them leave by way of c. */
MOE_FN void moe_combine_add_stored_(moe_combine_product_ *product, float *c, int64_t count) {
  const moe_combine_rows_ *summands = product->summands;
  const int64_t H = product->stage->call->layer.H;
  for (int64_t p = 0; p < count; p++) {
    const int64_t h0 = (product->panel + p) * MOE_NR, n = moe_min_(MOE_NR, H - h0);
    for (int64_t i = 0; i < summands->rows; i++)
      memcpy(c + i * MOE_NR, product->stage->products + summands->row[i] * H + h0, (size_t)n * sizeof *c);
    moe_combine_epilogue_(product, p, c);
  }
}

enum { MOE_COMBINE_PREFETCH_ROWS_ = 4 }; /* rows whose products, if they are there already, are fetched ahead */

/* Other cores' caches hold most of them: the patch's, of rows order[at, end), are fetched. Returns end. */
MOE_FN int64_t moe_combine_prefetch_(const moe_combine_ *stage, int64_t at, int64_t end, const moe_chunk_item_ *patch) {
  for (; at < end && stage->products; at++) {
    const float *row = stage->products + stage->call->plan.order[at] * stage->call->layer.H;
    for (int64_t p = 0; p < patch->panels * MOE_NR; p += 64 / (int64_t)sizeof *row)
      __builtin_prefetch(row + patch->panel * MOE_NR + p, 0, 3);
  }
  return end;
}

/* One run's rows [at,end) of order, added into the worker's sums. */
MOE_FN void moe_combine_run_(const moe_combine_ *stage, moe_scratch_ *scratch, int64_t at, int64_t end,
                             const moe_chunk_item_ *patch, const moe_prefetch_ *next) {
  const moe_blockwise_ *call = stage->call;
  const moe_rows_ rows = {stage->a.base, stage->a.stride, call->plan.order};
  const int64_t step = moe_rows_at_once_(end - at), last = patch->panel + patch->panels;
  moe_b_ b;
  moe_combine_b_(stage, at, &b);
  for (; at < end; at += step) {
    moe_a_ a;
    moe_combine_rows_ summands;
    moe_scratch_a_(&call->group, scratch, &rows, at, moe_min_(step, end - at), call->inner_dtype, stage->from, stage->k,
                   &a);
    moe_combine_rows_at_(stage, patch->chunk, at, a.rows, &summands);
    for (int64_t panel = patch->panel, count; panel < last; panel += count) {
      moe_combine_product_ product = {stage, patch, &summands, panel, scratch->sum};
      moe_epilogue_ epilogue;
      moe_epilogue_init_(&epilogue, moe_combine_epilogue_, &product);
      count = moe_min_(moe_panels_at_once_(scratch->products, a.rows), last - panel);
      if (stage->products)
        moe_combine_add_stored_(&product, scratch->c, count);
      else
        moe_group_multiply_(&call->group, scratch, &a, &b, panel, count, panel + count == last ? next : NULL,
                            &epilogue);
    }
  }
}

MOE_FN void moe_combine_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_combine_ *stage = (const moe_combine_ *)arg;
  const moe_blockwise_ *call = stage->call;
  const moe_plan_ *plan = &call->plan;
  moe_scratch_ scratch;
  moe_scratch_at_(&call->group, worker, stage, moe_combine_sum_floats_(call, call->group.workers), &scratch);
  const moe_chunk_item_ patch = moe_combine_split_item_(call, item);
  const int64_t t0 = patch.chunk * plan->chunk_rows, tokens = moe_min_(plan->chunk_rows, call->layer.T - t0),
                end = plan->chunk_first[patch.chunk + 1];
  for (int64_t p = 0; p < patch.panels; p++)
    memset(scratch.sum + p * plan->chunk_rows * MOE_NR, 0, (size_t)(tokens * MOE_NR) * sizeof *scratch.sum);
  for (int64_t at = plan->chunk_first[patch.chunk], fetched = at, run_end; at < end; at = run_end) {
    run_end = moe_combine_run_end_(plan, at, end);
    fetched = moe_combine_prefetch_(stage, fetched, moe_min_(end, run_end + MOE_COMBINE_PREFETCH_ROWS_), &patch);
    moe_prefetch_ next;
    if (run_end < end)
      moe_combine_run_reads_(stage, run_end, end, &patch, &next);
    else
      moe_next_reads_(worker, &next);
    moe_combine_run_(stage, &scratch, at, run_end, &patch, &next);
  }
  for (int64_t p = 0; p < patch.panels && stage->output; p++) {
    const int64_t h0 = (patch.panel + p) * MOE_NR, n = moe_min_(MOE_NR, call->layer.H - h0);
    moe_store_sums_(call->group.kernels, stage->output + t0 * stage->stride + h0 * call->size, stage->stride,
                    call->dtype, scratch.sum + p * plan->chunk_rows * MOE_NR, tokens, n, stage->accumulate);
  }
}

#endif
