/* Grouped products: rows sorted by expert, each group times its own expert's weights, 64 columns at a time. What the
   blockwise layer and the grouped GEMM share: the groups, the order of work items, and every worker's scratch memory. */
#ifndef MOE_LAYER_GROUP_H
#define MOE_LAYER_GROUP_H

typedef struct moe_group_ {
  const moe_kernels *kernels;
  moe_product_ product;
  moe_panel_kind_ panel;
  int64_t E;
  const int64_t *first; /* [E+1]: expert e owns rows first[e] .. first[e+1] */
  int64_t from, to;     /* the experts that stages are about: all, or some of them at a time */
  int in_shares;        /* see moe_in_shares_ */
  int64_t workers;
  char *scratch;               /* workers x lane_bytes */
  int64_t scratch_bytes, room; /* room: see moe_scratch_ */
  int64_t panels;              /* whose products rows that are gathered whole leave room for */
} moe_group_;

enum { MOE_A_PACKED_BYTES_MAX_ = 3 << 18 }; /* rows gathered whole, at most: beside the products they stay in cache */

/* A worker's scratch memory: a packed piece and, in `room` bytes, rows gathered, their products and partial outputs. */
typedef struct moe_scratch_ {
  char *b_buffer; /* see moe_gemm_ */
  moe_cached_ *cached;
  char *a_packed;   /* see moe_a_ */
  float *c;         /* products, see moe_gemm_, */
  int64_t products; /*   so many floats */
  float *sum;       /* last: the stage's own, */
  int64_t sums;     /*   so many */
} moe_scratch_;

MOE_FN void moe_group_init_(moe_group_ *group, moe_dtype dtype, int64_t E) {
  memset(group, 0, sizeof *group);
  group->kernels = moe_kernels_();
  group->product = dtype == MOE_DTYPE_BF16 ? MOE_PRODUCT_BF16 : MOE_PRODUCT_F32;
  group->panel = group->kernels->gemm->panel[group->product];
  group->E = group->to = E;
}

MOE_FN int64_t moe_group_rows_(const moe_group_ *group, int64_t expert) {
  return group->first[expert + 1] - group->first[expert];
}

MOE_FN int64_t moe_group_all_rows_(const moe_group_ *group) {
  return group->first[group->to] - group->first[group->from];
}

/* Columns of the group's rows that lie panel by panel, [expert][panel][row][64]: `panels` panels from `panel` on. */
typedef struct moe_panel_major_ {
  char *base;
  int64_t panel, panels;
} moe_panel_major_;

/* An expert's row `row` of the group, of that panel; elements have `size` bytes. */
MOE_FN char *moe_panel_major_at_(const moe_group_ *group, const moe_panel_major_ *x, int64_t expert, int64_t row,
                                 int64_t panel, int64_t size) {
  const int64_t before = (group->first[expert] - group->first[group->from]) * x->panels,
                panels = (panel - x->panel) * moe_group_rows_(group, expert);
  return x->base + (before + panels + row - group->first[expert]) * MOE_NR * size;
}

/* ---------------------------------------------------------------------------------------------------- worker scratch */

/* Bytes of rows of k elements, gathered, and of two rows more (see moe_ukernel_). A few rows may be gathered as float,
   which takes no more: up to `rows_short`, four bytes and more are an element's share of a piece. */
MOE_FN int64_t moe_a_packed_bytes_(const moe_group_ *group, int64_t rows, int64_t k) {
  const int64_t blocks =
      moe_mul_(rows, moe_ceil_div_(k, moe_kc_max_(&group->kernels->gemm->blocking, group->panel, rows)));
  return moe_mul_(moe_add_(blocks, 2), group->kernels->gemm->blocking.kc_bytes[group->panel]);
}

/* Floats that sums take: whole lines. */
MOE_FN int64_t moe_whole_lines_(int64_t sums) { return moe_add_(sums, -sums & 15); }

/* One worker's layout; the arena only adds up when it has no memory. */
MOE_FN void moe_scratch_layout_(const moe_group_ *group, moe_arena_ *arena, moe_scratch_ *scratch) {
  memset(scratch, 0, sizeof *scratch);
  scratch->b_buffer = (char *)moe_take_(arena, moe_b_buffer_bytes_(group->kernels, group->panel));
  scratch->a_packed = (char *)moe_take_(arena, group->room);
}

/* What workers are asked for: at most so many rows and so long operands and results there are. */
typedef struct moe_scratch_needs_ {
  int64_t rows, longest;
  int64_t panels; /* whose products with MOE_MC rows find room, beside so many sums */
  int64_t sums;
  int64_t floats;     /* for products and sums, at least */
  int64_t grad_bytes; /* for weight gradients, beside a panel of rows, at least */
} moe_scratch_needs_;

/* Bytes for so many rows of k elements each, for their products with so many panels, and more floats or, if that is
   more, `least`. */
MOE_FN int64_t moe_scratch_room_(const moe_group_ *group, int64_t rows, int64_t k, int64_t panels, int64_t more,
                                 int64_t least) {
  const int64_t products = moe_add_(moe_mul_(panels, MOE_C_FLOATS_(rows)), more);
  const int64_t floats = products < 0 ? -1 : moe_whole_lines_(moe_max_(products, least));
  return moe_add_(moe_a_packed_bytes_(group, rows, k), moe_mul_(floats, 4));
}

/* What all workers need: room for a piece of as many rows as are ever gathered and the products of a few panels or, if
   that is less, for all there is. */
MOE_FN void moe_scratch_layout_all_(moe_group_ *group, moe_arena_ *arena, int64_t workers,
                                    const moe_scratch_needs_ *needs) {
  moe_arena_ one = {NULL, 0};
  moe_scratch_ scratch;
  const int64_t panels = moe_ceil_div_(needs->longest, MOE_NR), rows = moe_min_(needs->rows, MOE_MC),
                most = moe_max_(needs->sums, needs->floats),
                usual = moe_scratch_room_(group, MOE_MC, 1, needs->panels, needs->sums, needs->floats),
                all = moe_scratch_room_(group, rows, needs->longest, panels, most, 0),
                room = all < 0 ? usual : moe_min_(usual, all),
                grads = moe_add_(moe_a_packed_bytes_(group, MOE_NR, 1), needs->grad_bytes);
  group->workers = workers;
  group->room = room < 0 || grads < 0 ? -1 : moe_max_(room, grads);
  group->panels = moe_min_(MOE_NC_PANELS, panels);
  moe_scratch_layout_(group, &one, &scratch);
  group->scratch_bytes = one.used;
  group->scratch = (char *)moe_take_(arena, moe_mul_(workers, one.used));
}

/* What rows of k elements get of a worker's room, beside so many sums. */
typedef struct moe_scratch_sizes_ {
  int whole;        /* they are gathered whole, not a piece at a time: products of a few panels find room beside them */
  int64_t a_packed; /* bytes of them */
  int64_t products; /* floats */
} moe_scratch_sizes_;

MOE_FN moe_scratch_sizes_ moe_scratch_divide_(const moe_group_ *group, int64_t rows, int64_t k, int64_t sums) {
  const int64_t whole = moe_a_packed_bytes_(group, rows, k),
                others = group->panels * MOE_C_FLOATS_(rows) + moe_whole_lines_(sums);
  moe_scratch_sizes_ share;
  share.whole = whole >= 0 && whole <= moe_min_(MOE_A_PACKED_BYTES_MAX_, group->room - others * 4);
  share.a_packed = share.whole ? whole : moe_a_packed_bytes_(group, rows, 1);
  share.products = moe_min_(MOE_C_FLOATS_MAX_, (group->room - share.a_packed) / 4 - moe_whole_lines_(sums));
  return share;
}

/* The worker at an item of a stage, which asks for so many sums; `of`: the stage, or NULL if it uses the room in its own
   way. What another one has left there is held no longer. */
MOE_FN void moe_scratch_at_(const moe_group_ *group, moe_worker_ *worker, const void *of, int64_t sums,
                            moe_scratch_ *scratch) {
  moe_arena_ arena = {group->scratch + worker->index * group->scratch_bytes, 0};
  const moe_cached_ none = {of, 0, 0};
  moe_scratch_layout_(group, &arena, scratch);
  if (worker->cached.owner != of) worker->cached = none;
  scratch->cached = &worker->cached;
  scratch->sums = sums;
  scratch->sum = (float *)(void *)(scratch->a_packed + group->room) - moe_whole_lines_(sums);
}

/* Rows [first, first+count) as A, elements [from, from+k), and where its products go; multiplied again right
   away, even by the worker's next item, they are not gathered again. */
MOE_FN void moe_scratch_a_(const moe_group_ *group, moe_scratch_ *scratch, const moe_rows_ *rows, int64_t first,
                           int64_t count, moe_dtype dtype, int64_t from, int64_t k, moe_a_ *a) {
  moe_a_from_rows_(a, rows, first, count, dtype, from, scratch->a_packed);
  const moe_scratch_sizes_ share = moe_scratch_divide_(group, count, k, scratch->sums);
  a->keep = share.whole;
  a->cached = a->keep && scratch->cached->first == first && scratch->cached->count == count;
  scratch->cached->first = first;
  scratch->cached->count = a->keep ? count : 0;
  scratch->c = (float *)(void *)(scratch->a_packed + share.a_packed);
  scratch->products = share.products;
}

/* left * right, at most moe_panels_at_once_ of them, to `results` or, NULL, the worker's products; `next` is fetched
   meanwhile. */
MOE_FN void moe_group_multiply_(const moe_group_ *group, const moe_scratch_ *scratch, moe_a_ *a, const moe_b_ *b,
                                int64_t panel, int64_t panels, const moe_prefetch_ *next,
                                const moe_epilogue_ *epilogue) {
  const moe_gemm_ g = {group->kernels, group->product,    a,    b,       panel, panels,
                       scratch->c,     scratch->b_buffer, next, epilogue};
  moe_multiply_(&g);
  a->cached = a->keep;
}

/* How many rows to take at a time of those that are left: as equal parts as fit. */
MOE_FN int64_t moe_rows_at_once_(int64_t rows) { return moe_equal_part_(rows, MOE_MC); }

/* How many panels a work item takes: up to `most`, while every one of several workers still finds a few items. Results do
   not depend on it. */
MOE_FN int64_t moe_panels_per_item_(int64_t workers, int64_t others, int64_t panels, int64_t most) {
  int64_t n = moe_min_(most, panels);
  while (workers > 1 && n > 1 && others * moe_ceil_div_(panels, n) < 4 * workers) n = moe_ceil_div_(n, 2);
  return n;
}

MOE_FN int64_t moe_group_experts_(const moe_group_ *group) {
  int64_t used = 0;
  for (int64_t e = group->from; e < group->to; e++) used += group->first[e + 1] > group->first[e];
  return used;
}

/* Whether the experts at work have a few rows each. */
MOE_FN int moe_group_small_m_(const moe_group_ *group) {
  return moe_group_all_rows_(group) <= MOE_SMALL_M_MAX * moe_group_experts_(group);
}

/* The panels of one item of a stage over experts. */
typedef struct moe_item_ {
  int64_t expert, first, count;
} moe_item_;

/* How `panels` panels, from `panel` on, of experts [from,to) divide into items: `per_item` at a time, those of the
   experts from `last` on `fewer`, so that workers end together. */
typedef struct moe_split_ {
  int64_t from, last, to;
  int64_t panel, panels, per_item, fewer;
} moe_split_;

/* Where rows are so few that reading weights is all the work: items as wide as can be, whose columns memory sends from
   end to end. All take the same time, so that workers share what is left of the experts when each has as many. */
MOE_FN void moe_group_split_few_(const moe_group_ *group, moe_split_ *split) {
  const int64_t parts = moe_ceil_div_(split->panels, MOE_NC_PANELS_MAX);
  split->per_item = moe_ceil_div_(split->panels, parts);
  split->fewer = moe_ceil_div_(split->panels, moe_ceil_div_(parts, group->workers) * group->workers);
  for (int64_t left = moe_group_experts_(group) % group->workers; left > 0;
       left -= moe_group_rows_(group, split->last) > 0)
    split->last--;
}

/* An item of rows of k elements, with so many sums, takes as many panels as are multiplied at a time or, of a few rows,
   as many as can ever be. Workers whose shares are known beforehand get items that are alike. */
MOE_FN moe_split_ moe_group_split_(const moe_group_ *group, int64_t panels, int64_t k, int64_t sums) {
  const int few = moe_group_small_m_(group);
  const int64_t used = moe_group_experts_(group), all = moe_group_all_rows_(group);
  moe_split_ split = {group->from, group->to, group->to, 0, panels, 0, 1};
  if (all <= MOE_SMALL_M_TWO_ROWS * used && !group->in_shares) {
    moe_group_split_few_(group, &split);
    return split;
  }
  const int64_t rows = moe_rows_at_once_(moe_ceil_div_(all, moe_max_(1, used)));
  const moe_scratch_sizes_ share = moe_scratch_divide_(group, rows, k, sums);
  const int64_t most = few ? MOE_NC_PANELS_MAX : moe_panels_at_once_(share.products, rows);
  split.per_item = moe_panels_per_item_(group->workers, used, panels, moe_equal_part_(panels, most));
  const int64_t last = moe_ceil_div_(group->workers * split.per_item, moe_max_(1, panels));
  if (few || group->in_shares || group->workers == 1 || last > (group->to - group->from) / 4) return split;
  split.last -= last;
  split.fewer = moe_ceil_div_(split.per_item, 4);
  return split;
}

/* Items of the experts up to `last`, and in all. */
MOE_FN int64_t moe_split_before_(const moe_split_ *split) {
  return (split->last - split->from) * moe_ceil_div_(split->panels, split->per_item);
}
MOE_FN int64_t moe_split_items_(const moe_split_ *split) {
  return moe_split_before_(split) + (split->to - split->last) * moe_ceil_div_(split->panels, split->fewer);
}

MOE_FN moe_item_ moe_split_item_(const moe_split_ *split, int64_t item) {
  const int64_t before = moe_split_before_(split);
  const int64_t at = item < before ? item : item - before, count = item < before ? split->per_item : split->fewer;
  const int64_t parts = moe_ceil_div_(split->panels, count);
  moe_item_ span = {(item < before ? split->from : split->last) + at / parts, at % parts * count, 0};
  span.count = moe_min_(count, split->panels - span.first);
  span.first += split->panel;
  return span;
}

#endif
