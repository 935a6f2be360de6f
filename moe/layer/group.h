/* Rows grouped by expert, each group multiplied with its own expert's weights, 64 columns at a time. What the blockwise
   layer and the grouped GEMM share: the groups and every worker's scratch memory. */
#ifndef MOE_LAYER_GROUP_H
#define MOE_LAYER_GROUP_H

typedef struct moe_group_ {
  const moe_kernels *kernels;
  moe_product_ product;
  moe_panel_kind_ panel;
  int64_t E;
  const int64_t *first; /* [E+1]: expert e owns rows first[e] .. first[e+1] */
  int64_t from, to;     /* the experts that stages compute: all, or some of them at a time */
  int in_shares;        /* see moe_in_shares_ */
  int64_t workers;
  char *scratch;                /* workers x scratch_bytes */
  int64_t scratch_bytes, room;  /* room: of these, the bytes that packed A, C and sums share */
  int64_t panels;               /* A is packed whole only where C of so many panels has room as well */
  moe_kernels tuned;            /* the kernels, with: */
  moe_blocking_ tuned_blocking; /* see moe_group_tune_ */
} moe_group_;

enum { MOE_A_PACKED_BYTES_MAX_ = 3 << 18 }; /* of A packed whole: it stays in cache together with C */

/* A worker's scratch memory. */
typedef struct moe_scratch_ {
  char *b_buffer; /* see moe_gemm_ */
  moe_cached_ *cached;
  char *a_packed; /* see moe_a_; here the room begins */
  float *c;       /* see moe_gemm_ */
  int64_t c_floats;
  float *sum; /* the stage's own, at the end of the room */
  int64_t sum_floats;
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

/* How many experts have rows. */
MOE_FN int64_t moe_group_experts_(const moe_group_ *group) {
  int64_t experts = 0;
  for (int64_t e = group->from; e < group->to; e++) experts += moe_group_rows_(group, e) > 0;
  return experts;
}

/* Whether experts have a few rows each. */
MOE_FN int moe_group_small_m_(const moe_group_ *group) {
  return moe_group_all_rows_(group) <= MOE_SMALL_M_MAX * moe_group_experts_(group);
}

/* Columns of the group's rows stored panel by panel, [expert][panel][row][64]: `panels` panels from `panel` on. */
typedef struct moe_panel_major_ {
  char *base;
  int64_t panel, panels;
} moe_panel_major_;

/* Where row `row` of the group, which is the expert's, begins in a panel; elements have `size` bytes. */
MOE_FN char *moe_panel_major_at_(const moe_group_ *group, const moe_panel_major_ *x, int64_t expert, int64_t row,
                                 int64_t panel, int64_t size) {
  const int64_t before = (group->first[expert] - group->first[group->from]) * x->panels,
                panels = (panel - x->panel) * moe_group_rows_(group, expert);
  return x->base + (before + panels + row - group->first[expert]) * MOE_NR * size;
}

/* ---------------------------------------------------------------------------------------------------- worker scratch
   */

/* Bytes of rows of k elements packed, and of two rows more (see moe_ukernel_). Small-m kernels may pack them as float,
   which takes no more: up to kc_short_rows rows, an element has four bytes of a kc block. */
MOE_FN int64_t moe_a_packed_bytes_(const moe_group_ *group, int64_t rows, int64_t k) {
  const moe_blocking_ *blocking = group->kernels->blocking;
  const int64_t blocks = moe_mul_(rows, moe_ceil_div_(k, moe_kc_max_(blocking, group->panel, rows)));
  return moe_mul_(moe_add_(blocks, 2), blocking->kc_bytes[group->panel]);
}

/* So many floats, rounded up to cache lines. */
MOE_FN int64_t moe_whole_lines_(int64_t floats) { return moe_add_(floats, -floats & 15); }

/* What a call asks of a worker's scratch memory. */
typedef struct moe_scratch_needs_ {
  int64_t rows, longest; /* at most so many rows, and so many elements of a row of A or C */
  int64_t panels, sums;  /* C of MOE_MC rows and so many panels, together with so many sums */
  int64_t floats;        /* C and sums together, at least */
  int64_t grad_bytes;    /* B and C of a weight gradient, at least */
} moe_scratch_needs_;

/* Bytes of A packed and of C, for so many rows of k elements and so many panels, with more floats or, if that is more,
   of A and `least` floats. */
MOE_FN int64_t moe_scratch_room_(const moe_group_ *group, int64_t rows, int64_t k, int64_t panels, int64_t more,
                                 int64_t least) {
  const int64_t c = moe_add_(moe_mul_(panels, MOE_C_FLOATS_(rows)), more);
  const int64_t floats = c < 0 ? -1 : moe_whole_lines_(moe_max_(c, least));
  return moe_add_(moe_a_packed_bytes_(group, rows, k), moe_mul_(floats, 4));
}

/* All workers' memory: each has room for a kc block of MOE_MC rows and C of a few panels or, if that is less, for all
   of A and C. The parts are whole cache lines. */
MOE_FN void moe_scratch_layout_all_(moe_group_ *group, moe_arena_ *arena, int64_t workers,
                                    const moe_scratch_needs_ *needs) {
  const int64_t panels = moe_ceil_div_(needs->longest, MOE_NR), rows = moe_min_(needs->rows, MOE_MC),
                more = moe_max_(needs->sums, needs->floats),
                usual = moe_scratch_room_(group, MOE_MC, 1, needs->panels, needs->sums, needs->floats),
                all = moe_scratch_room_(group, rows, needs->longest, panels, more, 0),
                room = all < 0 ? usual : moe_min_(usual, all),
                grads = moe_add_(moe_a_packed_bytes_(group, MOE_NR, 1), needs->grad_bytes);
  group->workers = workers;
  group->room = room < 0 || grads < 0 ? -1 : moe_max_(room, grads);
  group->panels = moe_min_(MOE_NC_PANELS, panels);
  group->scratch_bytes = moe_add_(moe_b_buffer_bytes_(group->kernels, group->panel), group->room);
  group->scratch = (char *)moe_take_(arena, moe_mul_(workers, group->scratch_bytes));
}

/* What two calls in one ask for. */
MOE_FN moe_scratch_needs_ moe_scratch_needs_max_(const moe_scratch_needs_ *a, const moe_scratch_needs_ *b) {
  return (moe_scratch_needs_){moe_max_(a->rows, b->rows),     moe_max_(a->longest, b->longest),
                              moe_max_(a->panels, b->panels), moe_max_(a->sums, b->sums),
                              moe_max_(a->floats, b->floats), moe_max_(a->grad_bytes, b->grad_bytes)};
}

/* Lets a group's stages work in another's scratch memory. */
MOE_FN void moe_group_share_scratch_(moe_group_ *group, const moe_group_ *other) {
  group->workers = other->workers, group->room = other->room, group->panels = other->panels;
  group->scratch = other->scratch, group->scratch_bytes = other->scratch_bytes;
}

/* How A packed and C divide the room that sums do not take. */
typedef struct moe_scratch_sizes_ {
  int keep; /* A is packed whole, not a kc block at a time */
  int64_t a_bytes, c_floats;
} moe_scratch_sizes_;

MOE_FN moe_scratch_sizes_ moe_scratch_divide_(const moe_group_ *group, int64_t rows, int64_t k, int64_t sums) {
  const int64_t whole = moe_a_packed_bytes_(group, rows, k),
                others = group->panels * MOE_C_FLOATS_(rows) + moe_whole_lines_(sums);
  moe_scratch_sizes_ sizes;
  sizes.keep = whole >= 0 && whole <= moe_min_(MOE_A_PACKED_BYTES_MAX_, group->room - others * 4);
  sizes.a_bytes = sizes.keep ? whole : moe_a_packed_bytes_(group, rows, 1);
  sizes.c_floats = moe_min_(MOE_C_FLOATS_MAX_, (group->room - sizes.a_bytes) / 4 - moe_whole_lines_(sums));
  return sizes;
}

/* The worker's, for an item of a stage that wants so many sums. The owner is the stage, or NULL if it packs A by
   itself: rows that another owner has packed are forgotten. */
MOE_FN void moe_scratch_at_(const moe_group_ *group, moe_worker_ *worker, const void *owner, int64_t sums,
                            moe_scratch_ *scratch) {
  const moe_cached_ none = {owner, 0, 0};
  memset(scratch, 0, sizeof *scratch);
  scratch->b_buffer = group->scratch + worker->index * group->scratch_bytes;
  scratch->a_packed = scratch->b_buffer + moe_b_buffer_bytes_(group->kernels, group->panel);
  scratch->sum = (float *)(void *)(scratch->a_packed + group->room) - moe_whole_lines_(sums);
  scratch->sum_floats = sums;
  if (worker->cached.owner != owner) worker->cached = none;
  scratch->cached = &worker->cached;
}

/* Elements [from, from+k) of rows [first, first+count) as A, and the room for C. Rows that the worker has just
   multiplied, even in its last item, are not packed again. */
MOE_FN void moe_scratch_a_(const moe_group_ *group, moe_scratch_ *scratch, const moe_rows_ *rows, int64_t first,
                           int64_t count, moe_dtype dtype, int64_t from, int64_t k, moe_a_ *a) {
  const moe_scratch_sizes_ sizes = moe_scratch_divide_(group, count, k, scratch->sum_floats);
  moe_a_from_rows_(a, rows, first, count, dtype, from, scratch->a_packed);
  a->keep = sizes.keep;
  a->cached = a->keep && scratch->cached->first == first && scratch->cached->count == count;
  scratch->cached->first = first;
  scratch->cached->count = a->keep ? count : 0;
  scratch->c = (float *)(void *)(scratch->a_packed + sizes.a_bytes);
  scratch->c_floats = sizes.c_floats;
}

/* ---------------------------------------------------------------------------------------------------------- division
   */

/* How many of so many rows to multiply at a time: equal parts of at most mc. */
MOE_FN int64_t moe_rows_at_once_(const moe_blocking_ *blocking, int64_t rows) {
  return moe_equal_part_(rows, blocking->mc);
}

/* How many panels a work item takes: up to `most`, while each of several workers still gets a few items; there are
   `others` times as many. Results do not depend on it. */
MOE_FN int64_t moe_panels_per_item_(const moe_blocking_ *blocking, int64_t workers, int64_t others, int64_t panels,
                                    int64_t most) {
  int64_t n = moe_min_(most, panels);
  while (workers > 1 && n > 1 && others * moe_ceil_div_(panels, n) < blocking->items_per_worker * workers)
    n = moe_ceil_div_(n, 2);
  return n;
}

#endif
