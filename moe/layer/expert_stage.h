/* A stage that multiplies every expert's rows with the expert's own weights: gate and up, back through down, grouped
   GEMM. Its work items are an expert and a few panels of columns. */
#ifndef MOE_LAYER_EXPERT_STAGE_H
#define MOE_LAYER_EXPERT_STAGE_H

/* The products of an expert's rows [first, first+rows) with one of its panels, of n columns of each part. */
typedef struct moe_expert_c_ {
  int64_t expert, first, rows;
  int64_t panel, within, n; /* within: counted from the work item's first */
  float *c, *sum;           /* sum: the item's own, see moe_expert_stage_ */
} moe_expert_c_;

typedef struct moe_expert_stage_ {
  const moe_group_ *group;
  moe_rows_ a; /* row r of the group */
  moe_dtype a_dtype;
  void (*b)(const void *arg, int64_t expert, moe_b_ *b); /* all panels of an expert */
  void (*store_panel)(void *arg, const moe_expert_c_ *products);
  /* (optional) What that reads; c is not known */
  void (*reads)(const void *arg, const moe_expert_c_ *products, moe_prefetch_ *prefetch);
  int64_t sums; /* floats that an item keeps in `sum` */
  /* (optional) Before and after all rows of an item. */
  void (*begin)(void *arg, moe_item_ span, float *sum);
  void (*end)(void *arg, moe_item_ span, float *sum);
  void *arg;
  moe_place_ to; /* (optional) For row 0 of the group; `leave` then is for those of a panel that is not whole */
  int64_t k;
  moe_split_ split;
} moe_expert_stage_;

/* The group's rows must be known. */
MOE_FN void moe_expert_stage_start_(moe_expert_stage_ *stage, int64_t panels, int64_t k) {
  stage->k = k;
  stage->split = moe_group_split_(stage->group, panels, k, stage->sums);
}

MOE_FN void moe_expert_stage_first_reads_(void *arg, int64_t item, moe_prefetch_ *prefetch) {
  const moe_expert_stage_ *stage = (const moe_expert_stage_ *)arg;
  const moe_item_ span = moe_split_item_(&stage->split, item);
  const int64_t rows = moe_group_rows_(stage->group, span.expert);
  if (rows == 0) return; /* an expert without rows is never read */
  moe_b_ b;
  stage->b(stage->arg, span.expert, &b);
  moe_b_reads_first_(stage->group->kernels, stage->group->product, &b, span.first, moe_min_(span.count, MOE_NC_PANELS),
                     rows, prefetch);
}

/* A product of the stage, for its epilogue. */
typedef struct moe_expert_product_ {
  const moe_expert_stage_ *stage;
  const moe_b_ *b;
  moe_expert_c_ products; /* of the first panel */
} moe_expert_product_;

/* Those of panel p; c may be unknown yet. */
MOE_FN void moe_expert_stage_c_(const moe_expert_product_ *product, int64_t p, float *c, moe_expert_c_ *products) {
  *products = product->products;
  products->panel += p;
  products->within += p;
  products->n = moe_b_columns_(product->b, products->panel, 1);
  products->c = c;
}

MOE_FN void moe_expert_stage_epilogue_(void *arg, int64_t p, float *c) {
  const moe_expert_product_ *product = (const moe_expert_product_ *)arg;
  moe_expert_c_ products;
  moe_expert_stage_c_(product, p, c, &products);
  product->stage->store_panel(product->stage->arg, &products);
}

MOE_FN void moe_expert_stage_reads_(void *arg, int64_t p, moe_prefetch_ *prefetch) {
  const moe_expert_product_ *product = (const moe_expert_product_ *)arg;
  moe_expert_c_ products;
  moe_expert_stage_c_(product, p, NULL, &products);
  product->stage->reads(product->stage->arg, &products, prefetch);
}

/* Rows [first, first+a.rows) of an expert times the panels of an item. */
MOE_FN void moe_expert_stage_rows_(const moe_expert_stage_ *stage, const moe_scratch_ *scratch, moe_a_ *a,
                                   const moe_b_ *b, int64_t first, const moe_item_ *span, const moe_prefetch_ *next) {
  const int64_t most = moe_panels_at_once_(scratch->products, a->rows), end = span->first + span->count;
  for (int64_t panel = span->first, count; panel < end; panel += count) {
    count = moe_min_(most, end - panel);
    moe_expert_product_ product = {
        stage, b, {span->expert, first, a->rows, panel, panel - span->first, 0, NULL, scratch->sum}};
    moe_epilogue_ epilogue;
    moe_epilogue_init_(&epilogue, moe_expert_stage_epilogue_, &product);
    if (stage->reads) epilogue.reads = moe_expert_stage_reads_;
    epilogue.to = stage->to;
    moe_place_move_(&epilogue.to, first, panel * MOE_NR);
    moe_group_multiply_(stage->group, scratch, a, b, panel, count, panel + count == end ? next : NULL, &epilogue);
  }
}

MOE_FN void moe_expert_stage_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_expert_stage_ *stage = (const moe_expert_stage_ *)arg;
  moe_scratch_ scratch;
  moe_scratch_at_(stage->group, worker, stage, stage->sums, &scratch);
  const moe_item_ span = moe_split_item_(&stage->split, item);
  int64_t first = stage->group->first[span.expert];
  const int64_t end = stage->group->first[span.expert + 1],
                step = moe_rows_at_once_(moe_group_rows_(stage->group, span.expert));
  moe_prefetch_ next;
  moe_b_ b;
  moe_next_reads_(worker, &next);
  if (first < end) stage->b(stage->arg, span.expert, &b);
  if (stage->begin) stage->begin(stage->arg, span, scratch.sum);
  for (; first < end; first += step) {
    const int64_t rows = moe_min_(step, end - first);
    moe_a_ a;
    moe_scratch_a_(stage->group, &scratch, &stage->a, first, rows, stage->a_dtype, 0, stage->k, &a);
    moe_expert_stage_rows_(stage, &scratch, &a, &b, first, &span, &next);
  }
  if (stage->end) stage->end(stage->arg, span, scratch.sum);
}

/* Whether rows are so few that the kernels prefetch for themselves, for the next item as well. */
MOE_FN int moe_expert_stage_small_m_(const moe_expert_stage_ *stage) {
  if (moe_group_experts_(stage->group) == 0 || !moe_group_small_m_(stage->group)) return 0;
  moe_b_ any;
  stage->b(stage->arg, 0, &any);
  return moe_algorithm_of_(stage->group->kernels, stage->group->product, &any, 1, 0) == MOE_ALGORITHM_SMALL_M_ROWS_;
}

MOE_FN moe_work_ moe_expert_stage_work_(moe_expert_stage_ *stage) {
  const moe_work_ work = {moe_split_items_(&stage->split), moe_expert_stage_item_, stage,
                          moe_expert_stage_small_m_(stage) ? NULL : moe_expert_stage_first_reads_};
  return work;
}

#endif
