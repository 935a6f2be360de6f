/* Stage: sums over a token's experts. For a chunk of tokens and some panels of hidden columns, one worker takes the
   chunk's rows in block order, multiplies each run with its expert's panels and adds the products to the tokens' sums.
   No other worker touches these, so that the order of every sum is fixed. Used for the forward's down projection and
   the backward's gradient of the hidden states. */
#ifndef MOE_LAYER_COMBINE_H
#define MOE_LAYER_COMBINE_H

/* Rows of one expert whose products are to be added. */
typedef struct moe_combine_rows_ {
  int64_t expert, rows;
  const int32_t *row;
  int32_t token[MOE_MC]; /* counted from the chunk's first: whose sum */
  float affinity[MOE_MC];
} moe_combine_rows_;

typedef struct moe_combine_ {
  const moe_blockwise_ *call;
  const struct moe_combine_ *then; /* (optional) what is added next, of the same tokens and panels */
  float *products;                 /* [rows,H]: the products, if another stage has formed them; else NULL: A times B */
  moe_rows_ a;                     /* [rows,...] inner type, */
  int64_t from, k;                 /*   of which elements [from, from+k) are multiplied */
  void (*b)(const void *call, int64_t expert, moe_b_ *b); /* all panels of an expert */
  /* Adds the rows' products c, 64 apart, of columns [h0, h0+n) to their tokens' sums; may change c. */
  void (*add)(const struct moe_combine_ *stage, const moe_combine_rows_ *rows, int64_t h0, int64_t n, float *c,
              float *sum);
  char *output;   /* token t at output + t*stride; NULL: only what else `add` does is wanted */
  int64_t stride; /* this and the next two: not of `then` */
  int accumulate;
  const char *through; /* [T,H], of the function's type: what identity experts add */
  void *user;          /* for `add` */
} moe_combine_;

/* Floats of sums, of a chunk of tokens and some panels, and of C of as many panels that a worker holds at most. With
   more panels A is packed less often, which for f32 takes little time compared with the products. */
enum { MOE_COMBINE_FLOATS_BF16_ = 3 << 18, MOE_COMBINE_FLOATS_F32_ = 5 << 16 };

MOE_FN int64_t moe_combine_panels_(const moe_blockwise_ *call) { return moe_ceil_div_(call->layer.H, MOE_NR); }

/* Floats of a panel's sums and C. A few tokens seldom have more rows of one expert. */
MOE_FN int64_t moe_combine_panel_floats_(const moe_blockwise_ *call) {
  const int64_t tokens = call->plan.chunk_tokens;
  return tokens * MOE_NR + MOE_C_FLOATS_(moe_min_(tokens, MOE_MC));
}

/* Into how many items a chunk's panels divide: as many for every worker, if that is possible. */
MOE_FN int64_t moe_combine_parts_(const moe_blockwise_ *call, int64_t workers) {
  const int64_t floats = call->group.panel == MOE_PANEL_F32 ? MOE_COMBINE_FLOATS_F32_ : MOE_COMBINE_FLOATS_BF16_;
  const int64_t fit = moe_max_(1, floats / moe_combine_panel_floats_(call));
  const int64_t panels = moe_combine_panels_(call), chunks = call->plan.chunks;
  int64_t parts =
      moe_ceil_div_(panels, moe_panels_per_item_(call->group.kernels->blocking, workers, chunks, panels, fit));
  while (parts < panels && chunks * parts % workers != 0) parts++;
  return parts;
}

/* The panels of an item, at most; floats of their sums; and of their sums and C. */
MOE_FN int64_t moe_combine_item_panels_(const moe_blockwise_ *call, int64_t workers) {
  return moe_ceil_div_(moe_combine_panels_(call), moe_combine_parts_(call, workers));
}
MOE_FN int64_t moe_combine_sum_floats_(const moe_blockwise_ *call, int64_t workers) {
  return moe_combine_item_panels_(call, workers) * call->plan.chunk_tokens * MOE_NR;
}
MOE_FN int64_t moe_combine_floats_(const moe_blockwise_ *call, int64_t workers) {
  return moe_combine_item_panels_(call, workers) * moe_combine_panel_floats_(call);
}

MOE_FN int64_t moe_combine_items_(const moe_blockwise_ *call) {
  return call->plan.chunks * moe_combine_parts_(call, call->group.workers);
}

/* A work item. */
typedef struct moe_chunk_item_ {
  int64_t chunk, panel, panels;
} moe_chunk_item_;

/* Items differ by at most one panel, and the narrower ones come last, so that workers finish together. */
MOE_FN void moe_combine_split_item_(const moe_blockwise_ *call, int64_t index, moe_chunk_item_ *item) {
  const int64_t parts = moe_combine_parts_(call, call->group.workers), panels = moe_combine_panels_(call);
  const int64_t part = index / call->plan.chunks, wider = panels % parts;
  item->chunk = index % call->plan.chunks;
  item->panel = part * (panels / parts) + moe_min_(part, wider);
  item->panels = panels / parts + (part < wider);
}

/* The end of the run that row order[at] belongs to. */
MOE_FN int64_t moe_combine_run_end_(const moe_plan_ *plan, int64_t at, int64_t end) {
  const int32_t run = plan->run[plan->order[at]];
  while (at < end && plan->run[plan->order[at]] == run) at++;
  return at;
}

MOE_FN int64_t moe_combine_expert_(const moe_plan_ *plan, int64_t at) {
  return plan->run_expert[plan->run[plan->order[at]]];
}

/* What the run at order[at], before `end`, reads first. */
MOE_FN void moe_combine_run_reads_(const moe_combine_ *stage, int64_t at, int64_t end, const moe_chunk_item_ *item,
                                   moe_prefetch_ *prefetch) {
  const moe_blockwise_ *call = stage->call;
  moe_b_ b;
  stage->b(call, moe_combine_expert_(&call->plan, at), &b);
  moe_b_reads_first_(call->group.kernels, call->group.product, &b, item->panel, moe_min_(item->panels, MOE_NC_PANELS),
                     moe_combine_run_end_(&call->plan, at, end) - at, prefetch);
}

MOE_FN void moe_combine_reads_(void *arg, int64_t index, moe_prefetch_ *prefetch) {
  const moe_combine_ *stage = (const moe_combine_ *)arg;
  moe_chunk_item_ item;
  moe_combine_split_item_(stage->call, index, &item);
  const int64_t *first = stage->call->plan.chunk_first + item.chunk;
  if (first[0] < first[1]) moe_combine_run_reads_(stage, first[0], first[1], &item, prefetch);
}

/* Rows order[at, at+count), of one run and one chunk. */
MOE_FN void moe_combine_rows_at_(const moe_plan_ *plan, int64_t chunk, int64_t at, int64_t count,
                                 moe_combine_rows_ *rows) {
  rows->expert = moe_combine_expert_(plan, at);
  rows->rows = count;
  rows->row = plan->order + at;
  for (int64_t i = 0; i < count; i++) {
    rows->token[i] = (int32_t)(plan->token[rows->row[i]] - chunk * plan->chunk_tokens);
    rows->affinity[i] = plan->affinity[rows->row[i]];
  }
}

/* Their products with panels from `panel` on, for the epilogue; sum: of that panel. */
typedef struct moe_combine_product_ {
  const moe_combine_ *stage;
  const moe_combine_rows_ *rows;
  int64_t panel;
  float *sum;
} moe_combine_product_;

MOE_FN void moe_combine_epilogue_(void *arg, int64_t p, float *c) {
  const moe_combine_product_ *product = (const moe_combine_product_ *)arg;
  const moe_combine_ *stage = product->stage;
  const int64_t h0 = (product->panel + p) * MOE_NR;
  stage->add(stage, product->rows, h0, moe_min_(MOE_NR, stage->call->layer.H - h0), c,
             product->sum + p * stage->call->plan.chunk_tokens * MOE_NR);
}

/* Instead of a multiplication: `count` panels of products that another stage has formed, copied to c. */
MOE_FN void moe_combine_add_stored_(moe_combine_product_ *product, float *c, int64_t count) {
  const moe_combine_rows_ *rows = product->rows;
  const int64_t H = product->stage->call->layer.H;
  for (int64_t p = 0; p < count; p++) {
    const int64_t h0 = (product->panel + p) * MOE_NR, n = moe_min_(MOE_NR, H - h0);
    for (int64_t i = 0; i < rows->rows; i++)
      memcpy(c + i * MOE_NR, product->stage->products + rows->row[i] * H + h0, (size_t)n * sizeof *c);
    moe_combine_epilogue_(product, p, c);
  }
}

enum { MOE_COMBINE_PREFETCH_ROWS_ = 4 }; /* how many rows early such products are prefetched */

/* Prefetches the item's part of them, of rows order[at, end): most are in other cores' caches. Returns end. */
MOE_FN int64_t moe_combine_prefetch_(const moe_combine_ *stage, int64_t at, int64_t end, const moe_chunk_item_ *item) {
  for (; at < end && stage->products; at++) {
    const float *row = stage->products + stage->call->plan.order[at] * stage->call->layer.H;
    for (int64_t p = 0; p < item->panels * MOE_NR; p += 64 / (int64_t)sizeof *row)
      __builtin_prefetch(row + item->panel * MOE_NR + p, 0, 3);
  }
  return end;
}

/* Adds the products of one run, rows [at, end) of order, to the worker's sums. */
MOE_FN void moe_combine_run_(const moe_combine_ *stage, moe_scratch_ *scratch, int64_t at, int64_t end,
                             const moe_chunk_item_ *item, const moe_prefetch_ *next) {
  const moe_blockwise_ *call = stage->call;
  const moe_group_ *group = &call->group;
  const moe_rows_ order = {stage->a.base, stage->a.stride, call->plan.order};
  const int64_t step = moe_rows_at_once_(group->kernels->blocking, end - at), last = item->panel + item->panels;
  moe_b_ b;
  stage->b(call, moe_combine_expert_(&call->plan, at), &b);
  for (; at < end; at += step) {
    moe_a_ a;
    moe_combine_rows_ rows;
    moe_scratch_a_(group, scratch, &order, at, moe_min_(step, end - at), call->inner_dtype, stage->from, stage->k, &a);
    moe_combine_rows_at_(&call->plan, item->chunk, at, a.rows, &rows);
    for (int64_t panel = item->panel, count; panel < last; panel += count) {
      float *sum = scratch->sum + (panel - item->panel) * call->plan.chunk_tokens * MOE_NR;
      moe_combine_product_ product = {stage, &rows, panel, sum};
      moe_epilogue_ epilogue;
      count = moe_min_(moe_panels_at_once_(group->kernels->blocking, scratch->c_floats, a.rows), last - panel);
      if (stage->products) {
        moe_combine_add_stored_(&product, scratch->c, count);
        continue;
      }
      moe_epilogue_init_(&epilogue, moe_combine_epilogue_, &product);
      const moe_prefetch_ *after = panel + count == last ? next : NULL;
      const moe_gemm_ gemm = {group->kernels, group->product,    &a,    &b,       panel, count,
                              scratch->c,     scratch->b_buffer, after, &epilogue};
      moe_multiply_(&gemm);
      a.cached = a.keep;
    }
  }
}

/* Adds rows x + bias, times scale, to their tokens' sums; bias and scale may be NULL. Sums that are rounded after each
   block are after each row: a token has one in a block. */
MOE_FN void moe_combine_add_rows_(const moe_blockwise_ *call, const moe_combine_rows_ *rows, const float *x,
                                  const float *bias, const float *scale, int64_t n, float *sum) {
  const moe_vec_table_ *vec = call->group.kernels->vec;
  if (!call->rounds_sums) vec->add_rows(sum, rows->token, x, bias, scale, rows->rows, n);
  for (int64_t i = 0; i < rows->rows && call->rounds_sums; i++) {
    float *to = sum + rows->token[i] * MOE_NR, rounded[MOE_NR]; /* room for any type */
    vec->add_rows(to, NULL, x + i * MOE_NR, bias, scale ? scale + i : NULL, 1, n);
    moe_store_row_(vec, call->dtype, rounded, to, n);
    moe_load_row_(vec, call->dtype, to, rounded, n);
  }
}

/* An item's tokens' sums begin as zero or, if they are rounded after each block, as what they are added to. */
MOE_FN void moe_combine_begin_(const moe_combine_ *stage, const moe_chunk_item_ *item, int64_t tokens, float *sum) {
  const moe_blockwise_ *call = stage->call;
  const int64_t chunk_tokens = call->plan.chunk_tokens, t0 = item->chunk * chunk_tokens;
  for (int64_t p = 0; p < item->panels; p++, sum += chunk_tokens * MOE_NR) {
    const int64_t h0 = (item->panel + p) * MOE_NR;
    memset(sum, 0, (size_t)(tokens * MOE_NR) * sizeof *sum);
    if (stage->output && stage->accumulate && call->rounds_sums)
      moe_add_stored_(call->group.kernels, sum, stage->output + t0 * stage->stride + h0 * call->size, stage->stride,
                      NULL, call->dtype, tokens, moe_min_(MOE_NR, call->layer.H - h0));
  }
}

/* Adds the terms of identity experts, the last of every sum, a token's in its own order. */
MOE_FN void moe_combine_identities_(const moe_combine_ *stage, const moe_chunk_item_ *item, int64_t tokens,
                                    float *sum) {
  const moe_blockwise_ *call = stage->call;
  const moe_pairs_ *pairs = &call->plan.pairs;
  const int64_t t0 = item->chunk * call->plan.chunk_tokens, H = call->layer.H;
  for (int64_t i = 0; i < tokens * pairs->K && pairs->identities; i++) {
    const int64_t token = t0 + i / pairs->K, pair = t0 * pairs->K + i;
    for (int64_t p = 0; p < item->panels && moe_pair_is_identity_(pairs, call->layer.E, pair); p++) {
      const int64_t h0 = (item->panel + p) * MOE_NR, n = moe_min_(MOE_NR, H - h0);
      float x[MOE_NR];
      moe_load_row_(call->group.kernels->vec, call->dtype, x, stage->through + (token * H + h0) * call->size, n);
      call->group.kernels->vec->add_scaled(sum + (p * call->plan.chunk_tokens + token - t0) * MOE_NR, x,
                                           moe_pair_affinity_(pairs, pair), n);
    }
  }
}

/* Stores the sums of an item's tokens. */
MOE_FN void moe_combine_store_(const moe_combine_ *stage, const moe_chunk_item_ *item, int64_t tokens, float *sum) {
  const moe_blockwise_ *call = stage->call;
  const int64_t chunk_tokens = call->plan.chunk_tokens, t0 = item->chunk * chunk_tokens;
  for (int64_t p = 0; p < item->panels; p++, sum += chunk_tokens * MOE_NR) {
    const int64_t h0 = (item->panel + p) * MOE_NR, n = moe_min_(MOE_NR, call->layer.H - h0);
    moe_store_sums_(call->group.kernels, stage->output + t0 * stage->stride + h0 * call->size, stage->stride,
                    call->dtype, sum, tokens, n, stage->accumulate && !call->rounds_sums);
  }
}

/* Adds a stage's products to the sums. */
MOE_FN void moe_combine_chunk_(const moe_combine_ *stage, moe_worker_ *worker, moe_scratch_ *scratch,
                               const moe_chunk_item_ *item) {
  const moe_plan_ *plan = &stage->call->plan;
  const int64_t end = plan->chunk_first[item->chunk + 1];
  for (int64_t at = plan->chunk_first[item->chunk], prefetched = at, run_end; at < end; at = run_end) {
    moe_prefetch_ next;
    run_end = moe_combine_run_end_(plan, at, end);
    prefetched = moe_combine_prefetch_(stage, prefetched, moe_min_(end, run_end + MOE_COMBINE_PREFETCH_ROWS_), item);
    if (run_end < end) moe_combine_run_reads_(stage, run_end, end, item, &next);
    else moe_next_reads_(worker, &next);
    moe_combine_run_(stage, scratch, at, run_end, item, &next);
  }
}

MOE_FN void moe_combine_item_(void *arg, int64_t index, moe_worker_ *worker) {
  const moe_combine_ *stage = (const moe_combine_ *)arg;
  const moe_blockwise_ *call = stage->call;
  const int64_t chunk_tokens = call->plan.chunk_tokens, sums = moe_combine_sum_floats_(call, call->group.workers);
  moe_scratch_ scratch;
  moe_chunk_item_ item;
  moe_scratch_at_(&call->group, worker, stage, sums, &scratch);
  moe_combine_split_item_(call, index, &item);
  const int64_t tokens = moe_min_(chunk_tokens, call->layer.T - item.chunk * chunk_tokens);
  moe_combine_begin_(stage, &item, tokens, scratch.sum);
  moe_combine_chunk_(stage, worker, &scratch, &item);
  if (stage->then) {
    moe_scratch_at_(&call->group, worker, stage->then, sums, &scratch); /* it has packed nothing yet */
    moe_combine_chunk_(stage->then, worker, &scratch, &item);
  }
  moe_combine_identities_(stage, &item, tokens, scratch.sum);
  if (stage->output) moe_combine_store_(stage, &item, tokens, scratch.sum);
}

#endif
