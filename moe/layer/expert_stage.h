/* A stage that multiplies every expert's rows with the expert's own weights: gate and up, back through down, grouped
   GEMM. A work item is an expert and a few panels of its columns. */
#ifndef MOE_LAYER_EXPERT_STAGE_H
#define MOE_LAYER_EXPERT_STAGE_H

/* ------------------------------------------------------------------------------------------------------- work items */

typedef struct moe_item_ {
  int64_t expert, panel, panels;
} moe_item_;

/* How `panels` panels, from `panel` on, of experts [from, to) divide into items: per_item at a time or, for the experts
   from `tail` on, tail_per_item, so that workers finish together. */
typedef struct moe_split_ {
  int64_t from, tail, to;
  int64_t panel, panels, per_item, tail_per_item;
} moe_split_;

/* With so few rows reading weights is all the work: items are as wide as can be, so that memory is read from end to
   end. All take the same time. The experts that remain when each worker has had as many are shared by all workers. */
MOE_FN void moe_split_small_m_(const moe_group_ *group, moe_split_ *split) {
  const int64_t parts = moe_ceil_div_(split->panels, MOE_NC_PANELS_MAX);
  split->per_item = moe_ceil_div_(split->panels, parts);
  split->tail_per_item = moe_ceil_div_(split->panels, moe_ceil_div_(parts, group->workers) * group->workers);
  for (int64_t rest = moe_group_experts_(group) % group->workers; rest > 0;
       rest -= moe_group_rows_(group, split->tail) > 0)
    split->tail--;
}

/* For rows of k elements, and so many sums per item. An item takes as many panels as are multiplied at a time or, with
   few rows, as many as ever can be. Workers whose shares are fixed beforehand get items of equal size. */
MOE_FN void moe_split_init_(const moe_group_ *group, int64_t panels, int64_t k, int64_t sums, moe_split_ *split) {
  const int small_m = moe_group_small_m_(group);
  const int64_t experts = moe_group_experts_(group), all = moe_group_all_rows_(group);
  *split = (moe_split_){group->from, group->to, group->to, 0, panels, 0, 1};
  if (all <= MOE_SMALL_M_TWO_ROWS * experts && !group->in_shares) {
    moe_split_small_m_(group, split);
    return;
  }
  const moe_blocking_ *blocking = group->kernels->blocking;
  const int64_t rows = moe_rows_at_once_(blocking, moe_ceil_div_(all, moe_max_(1, experts)));
  const int64_t floats = moe_scratch_divide_(group, rows, k, sums).c_floats,
                most = small_m ? blocking->nc_panels : moe_panels_at_once_(blocking, floats, rows);
  split->per_item = moe_panels_per_item_(blocking, group->workers, experts, panels, moe_equal_part_(panels, most));
  const int64_t tail = moe_ceil_div_(group->workers * split->per_item, moe_max_(1, panels));
  if (small_m || group->in_shares || group->workers == 1 || tail > (group->to - group->from) / 4) return;
  split->tail -= tail;
  split->tail_per_item = moe_ceil_div_(split->per_item, 4);
}

/* Items before the tail, and in all. */
MOE_FN int64_t moe_split_before_tail_(const moe_split_ *split) {
  return (split->tail - split->from) * moe_ceil_div_(split->panels, split->per_item);
}
MOE_FN int64_t moe_split_items_(const moe_split_ *split) {
  return moe_split_before_tail_(split) + (split->to - split->tail) * moe_ceil_div_(split->panels, split->tail_per_item);
}

MOE_FN void moe_split_item_(const moe_split_ *split, int64_t index, moe_item_ *item) {
  const int64_t before = moe_split_before_tail_(split);
  const int tail = index >= before;
  const int64_t at = tail ? index - before : index, per_item = tail ? split->tail_per_item : split->per_item;
  const int64_t parts = moe_ceil_div_(split->panels, per_item), first = at % parts * per_item;
  item->expert = (tail ? split->tail : split->from) + at / parts;
  item->panel = split->panel + first;
  item->panels = moe_min_(per_item, split->panels - first);
}

/* ------------------------------------------------------------------------------------------------------------ stage */

/* The products c of an expert's rows [first, first+rows) with one of its panels, of n columns of each part. */
typedef struct moe_expert_c_ {
  int64_t expert, first, rows, panel, n;
  float *c, *sum; /* sum: the panel's own in this item, see moe_expert_stage_ */
  float *room;    /* of the item, for store_panel */
} moe_expert_c_;

typedef struct moe_expert_stage_ {
  const moe_group_ *group;
  moe_rows_ a; /* row r of the group */
  moe_dtype a_dtype;
  void (*b)(const void *arg, int64_t expert, moe_b_ *b); /* all panels of an expert; arg: weights */
  const void *weights;
  void (*store_panel)(void *arg, const moe_expert_c_ *products);
  /* (optional) What that reads, to be prefetched; c is not known. */
  void (*reads)(const void *arg, const moe_expert_c_ *products, moe_prefetch_ *prefetch);
  int64_t panel_sums; /* floats per panel in which an item adds up over its expert's rows, from zero */
  void (*store_sums)(void *arg, int64_t expert, int64_t panel, float *sum); /* after all rows, where there are sums */
  int64_t room_floats;                                                      /* that store_panel works in */
  void *arg;
  /* (optional) Where row 0 of the group is stored; store_panel then gets the panels that are not whole. */
  moe_place_ to;
  int64_t k;
  int64_t sums; /* floats of an item's sums and room, at most */
  moe_split_ split;
} moe_expert_stage_;

/* The group's rows must be known. */
MOE_FN void moe_expert_stage_start_(moe_expert_stage_ *stage, int64_t panels, int64_t k) {
  stage->k = k;
  stage->sums = moe_min_(MOE_NC_PANELS_MAX, panels) * stage->panel_sums + stage->room_floats;
  moe_split_init_(stage->group, panels, k, stage->sums, &stage->split);
}

MOE_FN void moe_expert_stage_first_reads_(void *arg, int64_t index, moe_prefetch_ *prefetch) {
  const moe_expert_stage_ *stage = (const moe_expert_stage_ *)arg;
  moe_item_ item;
  moe_b_ b;
  moe_split_item_(&stage->split, index, &item);
  const int64_t rows = moe_group_rows_(stage->group, item.expert);
  if (rows == 0) return; /* an expert without rows is never read */
  stage->b(stage->weights, item.expert, &b);
  moe_b_reads_first_(stage->group->kernels, stage->group->product, &b, item.panel, moe_min_(item.panels, MOE_NC_PANELS),
                     rows, prefetch);
}

/* A product of the stage, for its epilogue. */
typedef struct moe_expert_product_ {
  const moe_expert_stage_ *stage;
  const moe_b_ *b;
  moe_expert_c_ first; /* of its first panel */
} moe_expert_product_;

MOE_FN void moe_expert_stage_c_(const moe_expert_product_ *product, int64_t p, float *c, moe_expert_c_ *products) {
  *products = product->first;
  products->panel += p;
  products->n = moe_b_columns_(product->b, products->panel, 1);
  products->c = c;
  products->sum += p * product->stage->panel_sums;
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
                                   const moe_b_ *b, int64_t first, const moe_item_ *item, const moe_prefetch_ *next) {
  const moe_group_ *group = stage->group;
  const int64_t most = moe_panels_at_once_(group->kernels->blocking, scratch->c_floats, a->rows),
                end = item->panel + item->panels;
  for (int64_t panel = item->panel, count; panel < end; panel += count) {
    count = moe_min_(most, end - panel);
    float *sum = scratch->sum + (panel - item->panel) * stage->panel_sums;
    moe_expert_product_ product = {
        stage, b, {item->expert, first, a->rows, panel, 0, NULL, sum, scratch->sum + stage->sums - stage->room_floats}};
    moe_epilogue_ epilogue;
    moe_epilogue_init_(&epilogue, moe_expert_stage_epilogue_, &product);
    if (stage->reads) epilogue.reads = moe_expert_stage_reads_;
    epilogue.to = stage->to;
    moe_place_move_(&epilogue.to, first, panel * MOE_NR);
    const moe_prefetch_ *after = panel + count == end ? next : NULL;
    const moe_gemm_ gemm = {group->kernels, group->product,    a,     b,        panel, count,
                            scratch->c,     scratch->b_buffer, after, &epilogue};
    moe_multiply_(&gemm);
    a->cached = a->keep;
  }
}

MOE_FN void moe_expert_stage_item_(void *arg, int64_t index, moe_worker_ *worker) {
  const moe_expert_stage_ *stage = (const moe_expert_stage_ *)arg;
  const moe_group_ *group = stage->group;
  moe_item_ item;
  moe_scratch_ scratch;
  moe_prefetch_ next;
  moe_b_ b;
  moe_split_item_(&stage->split, index, &item);
  moe_scratch_at_(group, worker, stage, stage->sums, &scratch);
  moe_next_reads_(worker, &next);
  const int64_t first = group->first[item.expert], rows = moe_group_rows_(group, item.expert);
  const int64_t step = moe_rows_at_once_(group->kernels->blocking, rows);
  if (rows > 0) stage->b(stage->weights, item.expert, &b);
  memset(scratch.sum, 0, (size_t)(item.panels * stage->panel_sums) * sizeof *scratch.sum);
  for (int64_t at = 0; at < rows; at += step) {
    moe_a_ a;
    moe_scratch_a_(group, &scratch, &stage->a, first + at, moe_min_(step, rows - at), stage->a_dtype, 0, stage->k, &a);
    moe_expert_stage_rows_(stage, &scratch, &a, &b, first + at, &item, &next);
  }
  for (int64_t p = 0; p < item.panels && stage->panel_sums; p++)
    stage->store_sums(stage->arg, item.expert, item.panel + p, scratch.sum + p * stage->panel_sums);
}

/* Whether the small-m kernels multiply, which prefetch for themselves, for the next item as well. */
MOE_FN int moe_expert_stage_small_m_(const moe_expert_stage_ *stage) {
  if (moe_group_experts_(stage->group) == 0 || !moe_group_small_m_(stage->group)) return 0;
  moe_b_ any;
  stage->b(stage->weights, 0, &any);
  return moe_algorithm_of_(stage->group->kernels, stage->group->product, &any, 1, 0) == MOE_ALGORITHM_SMALL_M_ROWS_;
}

MOE_FN moe_work_ moe_expert_stage_work_(moe_expert_stage_ *stage) {
  const moe_work_ work = {moe_split_items_(&stage->split), moe_expert_stage_item_, stage,
                          moe_expert_stage_small_m_(stage) ? NULL : moe_expert_stage_first_reads_};
  return work;
}

#endif
