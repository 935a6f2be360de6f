/* Stage: weight gradients, dW[e] = sum over the expert's rows of x[row]^T y[row]. Both operands are taken straight
   from where their rows lie, y as panels, x as a panel as well or, where the tile does not take that, turned into rows;
   the contraction runs over rows in block order, whole, so nothing is added up twice. */
#ifndef MOE_LAYER_WEIGHT_GRAD_H
#define MOE_LAYER_WEIGHT_GRAD_H

enum {
  MOE_GRAD_PANELS = 12, /* panels of y at a time, so that packing x is paid once for all of them, */
  MOE_GRAD_ROWS = 4096  /* as long as (panels) x (rows) is at most this: they share the cache */
};

typedef struct moe_weight_grad_ {
  const moe_group_ *group;
  moe_rows_ x, y;            /* row r of expert e is row first[e]+r, by token where index is set */
  moe_panel_major_ x_panels; /* or x panel by panel, where this has a base */
  moe_dtype x_dtype, y_dtype;
  const moe_mx_round_ *x_round, *y_round; /* along an expert's rows, or NULL */
  int64_t m, n;                           /* dW[e] is [m, blank+n], */
  int64_t m_from, m_to;                   /*   of which these rows are formed */
  int64_t blank;                          /* leading columns of dW that get no gradient; y starts behind them, too */
  int64_t wide;                           /* panels of y that an item covers */
  char *output;
  moe_dtype dtype;
  int accumulate;
} moe_weight_grad_;

/* Bytes of one panel's products, and of `panels` panels of y of `rows` rows in all with theirs. */
enum { MOE_GRAD_C_BYTES_ = MOE_C_FLOATS_(MOE_NR) * 4 };
MOE_FN int64_t moe_weight_grad_panels_bytes_(const moe_group_ *group, int64_t panels, int64_t rows) {
  const int64_t even = moe_add_(rows, panels); /* each may round its rows up */
  return moe_add_(panels * MOE_GRAD_C_BYTES_, moe_panel_bytes_(group->panel, even));
}

/* What a worker needs for this, of all rows there can be and y of at most so many columns. */
MOE_FN int64_t moe_weight_grad_bytes_(const moe_group_ *group, int64_t rows, int64_t columns) {
  const int64_t panels = moe_min_(MOE_GRAD_PANELS, moe_ceil_div_(columns, MOE_NR));
  return moe_weight_grad_panels_bytes_(group, panels, moe_max_(rows, moe_min_(MOE_GRAD_ROWS, moe_mul_(rows, panels))));
}

/* How many of `panels` panels of y, of so many rows, at a time, in equal parts: or more, as long as they fit where
   other stages have their products. */
MOE_FN int64_t moe_weight_grad_panels_(const moe_group_ *group, int64_t rows, int64_t panels) {
  const int64_t share = moe_min_(MOE_GRAD_PANELS, MOE_GRAD_ROWS / moe_max_(1, rows));
  const int64_t few = MOE_NC_PANELS * MOE_C_FLOATS_((int64_t)MOE_MC) * 4;
  const int64_t room = moe_min_(few, group->room - moe_a_packed_bytes_(group, MOE_NR, 1));
  const int64_t fit = room / moe_weight_grad_panels_bytes_(group, 1, rows);
  return moe_equal_part_(panels, moe_max_(1, moe_max_(share, fit)));
}

/* Columns [from,...) of the expert's rows of an operand; of x panel by panel up to the next panel. */
MOE_FN moe_rows_ moe_weight_grad_part_(const moe_weight_grad_ *stage, const moe_rows_ *operand, moe_dtype dtype,
                                       int64_t expert, int64_t from) {
  const int64_t first = stage->group->first[expert], size = moe_dtype_bytes_(dtype);
  moe_rows_ part = moe_rows_from_(operand, first);
  part.base += from * size;
  if (operand != &stage->x || !stage->x_panels.base) return part;
  part.base = moe_panel_major_at_(stage->group, &stage->x_panels, expert, first, from / MOE_NR, size);
  part.stride = MOE_NR * size;
  return part;
}

/* n <= 64 columns of rows, rounded or not, as a packed panel. */
MOE_FN void moe_weight_grad_pack_(const moe_group_ *group, const moe_mx_round_ *round, const moe_rows_ *rows,
                                  moe_dtype dtype, int64_t count, int64_t n, char *panel) {
  if (round)
    moe_mx_round_rows_(group->kernels, round, rows, dtype, count, n, group->panel, panel);
  else
    group->kernels->gemm->pack_rows[group->panel][dtype](panel, 0, MOE_NR, rows, count, n);
}

/* n <= 64 columns of y as a panel. */
MOE_FN void moe_weight_grad_b_(const moe_weight_grad_ *stage, int64_t expert, int64_t from, int64_t n, char *panel) {
  const moe_rows_ part = moe_weight_grad_part_(stage, &stage->y, stage->y_dtype, expert, from);
  moe_weight_grad_pack_(stage->group, stage->y_round, &part, stage->y_dtype, moe_group_rows_(stage->group, expert), n,
                        panel);
}

/* Columns of x as A: a panel where the micro-kernel takes that, else transposed while they are in the first-level cache;
   rounded as everywhere, not in the product's mode. */
MOE_FN void moe_weight_grad_pack_a_(const moe_a_ *a, const moe_kernels *kernels, int64_t from, int64_t k, char *to,
                                    char *room) {
  const moe_weight_grad_ *stage = (const moe_weight_grad_ *)a->source;
  const moe_rows_ all = moe_weight_grad_part_(stage, &stage->x, stage->x_dtype, a->expert, a->column);
  const moe_panel_kind_ kind = stage->group->panel;
  const int64_t per_word = kind == MOE_PANEL_F32 ? 1 : 2, step = per_word * MOE_NR;
  const moe_fpenv_ saved = moe_fpenv_enter_();
  for (int64_t at = 0; at < k; at += step) {
    const moe_rows_ part = moe_rows_from_(&all, from + at);
    const int64_t count = moe_min_(step, k - at);
    char *panel = a->is_panel ? to + moe_panel_bytes_(kind, at) : room;
    moe_weight_grad_pack_(stage->group, stage->x_round, &part, stage->x_dtype, count, a->rows, panel);
    if (a->is_panel) continue;
    moe_transpose_panel_(kernels, kind, room, count, a->rows, to + at / per_word * 4,
                         kernels->gemm->blocking.kc_bytes[kind]);
  }
  moe_fpenv_restore_(saved);
}

/* The memory that rows [first, first+rows) of an operand's columns [from, from+n) are read from. */
MOE_FN void moe_weight_grad_reads_(const moe_weight_grad_ *stage, const moe_rows_ *operand, moe_dtype dtype,
                                   int64_t expert, int64_t from, int64_t n, int64_t first, int64_t rows,
                                   moe_prefetch_ *prefetch) {
  const moe_rows_ all = moe_weight_grad_part_(stage, operand, dtype, expert, from);
  const moe_rows_ part = moe_rows_from_(&all, first);
  moe_prefetch_rows_(prefetch, part.base, NULL, part.index, part.stride, rows, n * moe_dtype_bytes_(dtype));
}

MOE_FN void moe_weight_grad_a_reads_(const moe_a_ *a, int64_t from, int64_t k, moe_prefetch_ *prefetch) {
  const moe_weight_grad_ *stage = (const moe_weight_grad_ *)a->source;
  moe_weight_grad_reads_(stage, &stage->x, stage->x_dtype, a->expert, a->column, a->rows, from, k, prefetch);
}

MOE_FN void moe_weight_grad_a_(const moe_weight_grad_ *stage, const moe_scratch_ *scratch, int64_t expert, int64_t from,
                               int64_t n, moe_a_ *a) {
  memset(a, 0, sizeof *a);
  a->rows = n;
  a->buffer = scratch->a_packed;
  a->is_panel = stage->group->kernels->gemm->ukernel_packed_a[stage->group->panel] != NULL;
  a->pack = moe_weight_grad_pack_a_;
  a->reads = moe_weight_grad_a_reads_;
  a->source = stage;
  a->expert = expert;
  a->column = from;
}

MOE_FN char *moe_weight_grad_at_(const moe_weight_grad_ *stage, int64_t expert, int64_t m0, int64_t n0) {
  return stage->output +
         ((expert * stage->m + m0) * (stage->blank + stage->n) + stage->blank + n0) * moe_dtype_bytes_(stage->dtype);
}

/* dW rows [m0, m0+rows) x `panels` panels' columns at n0; of whole panels that leave by non-temporal stores only the lines
   that are not theirs alone, which they begin and end within. */
MOE_FN void moe_weight_grad_writes_(const moe_weight_grad_ *stage, int64_t expert, int64_t m0, int64_t rows, int64_t n0,
                                    int64_t panels, int nt, moe_prefetch_ *prefetch) {
  const int64_t size = moe_dtype_bytes_(stage->dtype), stride = (stage->blank + stage->n) * size;
  const int64_t n = moe_min_(panels * MOE_NR, stage->n - n0), end = n / MOE_NR * MOE_NR;
  const char *first = moe_weight_grad_at_(stage, expert, m0, n0);
  if (nt)
    moe_prefetch_rows_(prefetch, first, first + end * size, NULL, stride, rows, moe_max_(1, (n - end) * size));
  else
    moe_prefetch_rows_(prefetch, first, NULL, NULL, stride, rows, n * size);
}

/* Whether dW is the products, and nothing else. */
MOE_FN int moe_weight_grad_overwrites_(const moe_weight_grad_ *stage) { return !stage->accumulate && !stage->blank; }

/* Whether whole panels of dW leave within the tile. Sums of bf16 products have no subnormals, which the tile takes bf16
   not to have. */
MOE_FN int moe_weight_grad_by_ukernel_(const moe_weight_grad_ *stage) {
  const int can =
      stage->group->kernels->gemm->ukernel_packed_a[stage->group->panel] && moe_weight_grad_overwrites_(stage);
  const int fits = stage->dtype != MOE_DTYPE_BF16 || stage->group->product == MOE_PRODUCT_BF16;
  return can && fits;
}

/* Whether its rows are whole lines. */
MOE_FN int moe_weight_grad_whole_lines_(const moe_weight_grad_ *stage) {
  return (uintptr_t)stage->output % 64 == 0 && stage->n * moe_dtype_bytes_(stage->dtype) % 64 == 0;
}

/* Whether dW leaves by non-temporal stores, as an array does that none would keep: within the tile, or by whole lines. */
MOE_FN int moe_weight_grad_nt_(const moe_weight_grad_ *stage) {
  const int can =
      moe_weight_grad_by_ukernel_(stage) || (moe_weight_grad_overwrites_(stage) && moe_weight_grad_whole_lines_(stage));
  return can && stage->group->E * stage->m * stage->n * moe_dtype_bytes_(stage->dtype) >= MOE_NT_MIN_BYTES;
}

/* Whether it then does so by whole lines, none of which is read before. */
MOE_FN int moe_weight_grad_nt_lines_(const moe_weight_grad_ *stage) {
  return moe_weight_grad_nt_(stage) && moe_weight_grad_whole_lines_(stage);
}

/* A panel of them from its products; the product has fetched what is read. */
MOE_FN void moe_weight_grad_store_(const moe_weight_grad_ *stage, int64_t expert, int64_t m0, int64_t rows, int64_t n0,
                                   int64_t n, float *c) {
  const moe_kernels *kernels = stage->group->kernels;
  const int64_t size = moe_dtype_bytes_(stage->dtype), stride = (stage->blank + stage->n) * size;
  char *dst = moe_weight_grad_at_(stage, expert, m0, n0);
  if (stage->accumulate) moe_add_stored_(kernels, c, dst, stride, stage->dtype, rows, n);
  if (moe_weight_grad_nt_lines_(stage)) {
    moe_store_rows_nt_(kernels, stage->dtype, dst, stride, c, rows, n);
    return;
  }
  kernels->vec->store_rows[stage->dtype](dst, stride, NULL, c, rows, n);
  for (int64_t i = 0; i < rows && n0 == 0 && stage->blank && !stage->accumulate; i++)
    memset(dst + i * stride - stage->blank * size, 0, (size_t)(stage->blank * size));
}

/* Products on their way to dW. */
typedef struct moe_weight_grad_product_ {
  const moe_weight_grad_ *stage;
  int64_t expert, m0, rows, n0; /* n0: of the first panel */
} moe_weight_grad_product_;

MOE_FN void moe_weight_grad_epilogue_(void *arg, int64_t p, float *c) {
  const moe_weight_grad_product_ *product = (const moe_weight_grad_product_ *)arg;
  const int64_t at = product->n0 + p * MOE_NR, n = moe_min_(MOE_NR, product->stage->n - at);
  moe_weight_grad_store_(product->stage, product->expert, product->m0, product->rows, at, n, c);
}

/* dW rows [m0, m0+rows) of `panels` panels at n0; `next` is read after them. */
MOE_FN void moe_weight_grad_rows_(const moe_weight_grad_ *stage, const moe_scratch_ *scratch, moe_a_ *a, int64_t n0,
                                  int64_t panels, const moe_b_ *b, const moe_prefetch_ *next) {
  const int nt = moe_weight_grad_nt_(stage), unread = moe_weight_grad_nt_lines_(stage);
  const int64_t expert = a->expert, m0 = a->column;
  MOE_LINE_ALIGNED char carry[MOE_NR * 64];
  moe_weight_grad_product_ product = {stage, expert, m0, a->rows, n0};
  moe_prefetch_ into;
  moe_epilogue_ epilogue;
  moe_weight_grad_writes_(stage, expert, m0, unread ? 0 : a->rows, n0, panels, nt, &into);
  moe_epilogue_init_(&epilogue, moe_weight_grad_epilogue_, &product);
  epilogue.into = &into;
  if (moe_weight_grad_by_ukernel_(stage))
    epilogue.to = (moe_place_){.base = moe_weight_grad_at_(stage, expert, m0, n0),
                               .stride = stage->n * moe_dtype_bytes_(stage->dtype),
                               .dtype = stage->dtype,
                               .nt = nt,
                               .carry = nt && !unread ? carry : NULL};
  moe_group_multiply_(stage->group, scratch, a, b, 0, panels, next, &epilogue);
}

MOE_FN void moe_weight_grad_columns_(const moe_weight_grad_ *stage, const moe_scratch_ *scratch, int64_t expert,
                                     int64_t n0, int64_t panels, const moe_prefetch_ *next) {
  const int64_t k = moe_group_rows_(stage->group, expert), bytes = moe_panel_bytes_(stage->group->panel, k);
  const int64_t kc = moe_kc_(&stage->group->kernels->gemm->blocking, stage->group->panel, MOE_MC, k);
  char *y = (char *)scratch->c + panels * MOE_GRAD_C_BYTES_; /* behind their products */
  moe_a_ a, a_next;
  moe_b_ b;
  for (int64_t j = 0; j < panels; j++) {
    const int64_t at = n0 + j * MOE_NR;
    moe_weight_grad_b_(stage, expert, stage->blank + at, moe_min_(MOE_NR, stage->n - at), y + j * bytes);
  }
  moe_b_packed_(&b, y, bytes, moe_min_(panels * MOE_NR, stage->n - n0), k);
  moe_weight_grad_a_(stage, scratch, expert, stage->m_from, moe_min_(MOE_NR, stage->m_to - stage->m_from), &a_next);
  for (int64_t m0 = stage->m_from; m0 < stage->m_to; m0 += MOE_NR) {
    moe_prefetch_ reads = *next;
    a = a_next;
    moe_weight_grad_a_(stage, scratch, expert, m0 + MOE_NR, moe_min_(MOE_NR, stage->m_to - m0 - MOE_NR), &a_next);
    if (a_next.rows > 0) a_next.reads(&a_next, 0, moe_min_(k, kc), &reads);
    moe_weight_grad_rows_(stage, scratch, &a, n0, panels, &b, &reads);
  }
}

MOE_FN void moe_weight_grad_split_(const moe_weight_grad_ *stage, int64_t item, int64_t *expert, int64_t *n0) {
  const int64_t parts = moe_ceil_div_(stage->n, stage->wide * MOE_NR);
  *expert = stage->group->from + item / parts;
  *n0 = item % parts * stage->wide * MOE_NR;
}

MOE_FN void moe_weight_grad_item_reads_(void *arg, int64_t item, moe_prefetch_ *prefetch) {
  const moe_weight_grad_ *stage = (const moe_weight_grad_ *)arg;
  int64_t expert, n0;
  moe_weight_grad_split_(stage, item, &expert, &n0);
  moe_weight_grad_reads_(stage, &stage->y, stage->y_dtype, expert, stage->blank + n0,
                         moe_min_(stage->wide * MOE_NR, stage->n - n0), 0, moe_group_rows_(stage->group, expert),
                         prefetch);
}

/* An expert without rows still gets its gradient, zero. */
MOE_FN void moe_weight_grad_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_weight_grad_ *stage = (const moe_weight_grad_ *)arg;
  moe_scratch_ scratch;
  moe_scratch_at_(stage->group, worker, NULL, 0, &scratch);
  moe_prefetch_ next;
  int64_t expert, n0;
  moe_next_reads_(worker, &next);
  scratch.c = (float *)(void *)(scratch.a_packed + moe_a_packed_bytes_(stage->group, MOE_NR, 1));
  moe_weight_grad_split_(stage, item, &expert, &n0);
  const int64_t rows = moe_group_rows_(stage->group, expert);
  const int64_t end = moe_min_(stage->n, n0 + stage->wide * MOE_NR), panels = moe_ceil_div_(end - n0, MOE_NR);
  const int64_t step = moe_weight_grad_panels_(stage->group, rows, panels);
  for (; n0 < end; n0 += step * MOE_NR)
    moe_weight_grad_columns_(stage, &scratch, expert, n0, moe_min_(step, moe_ceil_div_(end - n0, MOE_NR)), &next);
}

/* The group's rows must be known. */
MOE_FN moe_work_ moe_weight_grad_work_(moe_weight_grad_ *stage) {
  const moe_group_ *group = stage->group;
  const int64_t panels = moe_ceil_div_(stage->n, MOE_NR), experts = group->to - group->from,
                rows = moe_ceil_div_(moe_group_all_rows_(group), experts);
  const moe_work_ none = {0, NULL, NULL, NULL};
  if (!stage->output) return none;
  stage->wide = moe_panels_per_item_(group->workers, experts, panels, moe_weight_grad_panels_(group, rows, panels));
  const moe_work_ work = {experts * moe_ceil_div_(panels, stage->wide), moe_weight_grad_item_, stage,
                          moe_weight_grad_item_reads_};
  return work;
}

#endif
