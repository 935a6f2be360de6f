/* Stage: weight gradients, dW[e] = sum over the expert's rows of x[row]^T y[row]. A is x transposed, B is y. B is
   packed from the rows as they lie; A is packed as a panel as well or, where no micro-kernel takes that, transposed
   into rows. The contraction runs over all rows in block order, so that every sum is formed at once. */
#ifndef MOE_LAYER_WEIGHT_GRAD_H
#define MOE_LAYER_WEIGHT_GRAD_H

enum {
  MOE_GRAD_PANELS = 12, /* panels of B at a time, which share what is packed of A, */
  MOE_GRAD_ROWS = 4096  /* as long as panels x rows is at most this: they stay in cache */
};

typedef struct moe_grad_operand_ {
  moe_rows_ rows;          /* row r of the group */
  moe_panel_major_ panels; /* or the rows panel by panel, if this has a base */
  moe_dtype dtype;
  /* Loads n columns from `column` on of rows [row, row+rows) of the group as floats, 64 apart; source: where from. Rows
     are then what is prefetched, if they have a base. Or NULL. */
  void (*load)(const void *source, int64_t row, int64_t rows, int64_t column, int64_t n, float *x);
  const void *source;
  const moe_mx_round_ *round; /* along an expert's rows; or NULL */
} moe_grad_operand_;

typedef struct moe_weight_grad_ {
  const moe_group_ *group;
  moe_grad_operand_ x, y;
  int64_t m, n;           /* dW[e] is [m, skip+n], */
  int64_t m_from, m_to;   /*   of which these rows are formed */
  int64_t skip;           /* leading columns of dW without a gradient, which become 0 */
  int64_t x_from, y_from; /* the columns of x and y that dW's first row and first column with a gradient are of */
  int64_t panels_of_item; /* of B */
  const int32_t *slot;    /* NULL, or each row's: a block's rows are contracted at a time, and dW rounded after them */
  int64_t B, row;         /* rows of a block; the expert's row from which on is contracted */
  char *output;           /* expert 0's dW, or */
  int each;               /*   1: an array of pointers to every expert's */
  int64_t offset;         /* bytes to its first row that is of x's column x_from */
  int64_t expert_bytes, row_bytes; /* from expert to expert, unless each, and from row to row; 0: dW is dense */
  moe_dtype dtype;
  int accumulate;
} moe_weight_grad_;

/* Bytes of one panel of C, and of `panels` panels of B, of `rows` rows in all, with theirs. */
enum { MOE_GRAD_C_BYTES_ = MOE_C_FLOATS_(MOE_NR) * 4 };
MOE_FN int64_t moe_weight_grad_panels_bytes_(const moe_group_ *group, int64_t panels, int64_t rows) {
  const int64_t even = moe_add_(rows, panels); /* each panel may round its rows up */
  return moe_add_(panels * MOE_GRAD_C_BYTES_, moe_panel_bytes_(group->panel, even));
}

/* What a worker needs of these, for at most so many rows and columns of y. */
MOE_FN int64_t moe_weight_grad_bytes_(const moe_group_ *group, int64_t rows, int64_t columns) {
  const int64_t panels = moe_min_(MOE_GRAD_PANELS, moe_ceil_div_(columns, MOE_NR));
  return moe_weight_grad_panels_bytes_(group, panels, moe_max_(rows, moe_min_(MOE_GRAD_ROWS, moe_mul_(rows, panels))));
}

/* How many of `panels` panels of B, of so many rows, to take at a time: equal parts, larger ones if they fit where
   other stages have C. */
MOE_FN int64_t moe_weight_grad_panels_(const moe_group_ *group, int64_t rows, int64_t panels) {
  const int64_t share = moe_min_(MOE_GRAD_PANELS, MOE_GRAD_ROWS / moe_max_(1, rows));
  const int64_t usual = MOE_NC_PANELS * MOE_C_FLOATS_((int64_t)MOE_MC) * 4;
  const int64_t room = moe_min_(usual, group->room - moe_a_packed_bytes_(group, MOE_NR, 1));
  const int64_t fit = room / moe_weight_grad_panels_bytes_(group, 1, rows);
  return moe_equal_part_(panels, moe_max_(1, moe_min_(group->kernels->blocking->nc_panels, moe_max_(share, fit))));
}

/* ---------------------------------------------------------------------------------------------------------- operands
   */

/* An expert's rows of an operand from row `first` of the expert and its column `from` on; panel by panel only up to the
   next panel. */
MOE_FN moe_rows_ moe_weight_grad_rows_(const moe_weight_grad_ *stage, const moe_grad_operand_ *operand, int64_t expert,
                                       int64_t first, int64_t from) {
  const int64_t row = stage->group->first[expert] + stage->row + first, size = moe_dtype_bytes_(operand->dtype);
  moe_rows_ rows = moe_rows_from_(&operand->rows, row);
  rows.base += from * size;
  if (operand->panels.base)
    rows = (moe_rows_){moe_panel_major_at_(stage->group, &operand->panels, expert, row, from / MOE_NR, size),
                       MOE_NR * size, NULL};
  return rows;
}

/* `count` rows of n <= 64 columns as a packed panel. */
MOE_FN void moe_weight_grad_pack_rows_(const moe_weight_grad_ *stage, const moe_grad_operand_ *operand,
                                       const moe_rows_ *rows, int64_t count, int64_t n, char *panel) {
  const moe_kernels *kernels = stage->group->kernels;
  const moe_panel_kind_ kind = stage->group->panel;
  if (operand->round) moe_mx_round_rows_(kernels, operand->round, rows, operand->dtype, count, n, kind, panel);
  else kernels->gemm->pack_rows[kind][operand->dtype](panel, 0, MOE_NR, rows, count, n);
}

/* The same of an expert's rows from row `first` of the contraction on. */
MOE_FN void moe_weight_grad_pack_(const moe_weight_grad_ *stage, const moe_grad_operand_ *operand, int64_t expert,
                                  int64_t first, int64_t count, int64_t from, int64_t n, char *panel) {
  const moe_rows_ rows = moe_weight_grad_rows_(stage, operand, expert, first, from);
  moe_weight_grad_pack_rows_(stage, operand, &rows, count, n, panel);
}

/* The same of rows that are loaded, as many as a group of MX has at a time, into the second half of `room`. */
MOE_FN void moe_weight_grad_load_(const moe_weight_grad_ *stage, const moe_grad_operand_ *x, int64_t expert,
                                  int64_t first, int64_t count, int64_t from, int64_t n, char *panel, char *room) {
  const moe_kernels *kernels = stage->group->kernels;
  float *loaded = (float *)(void *)(room + moe_b_buffer_bytes_(kernels, stage->group->panel) / 2);
  char *stored = (char *)(loaded + MOE_MX_GROUP_ * MOE_NR);
  const moe_rows_ rows = {stored, MOE_NR * moe_dtype_bytes_(x->dtype), NULL};
  for (int64_t at = 0, some; at < count; at += some) {
    some = moe_min_(MOE_MX_GROUP_, count - at);
    x->load(x->source, stage->group->first[expert] + stage->row + first + at, some, from, n, loaded);
    kernels->vec->store_rows[x->dtype](stored, rows.stride, NULL, loaded, some, n);
    moe_weight_grad_pack_rows_(stage, x, &rows, some, n, panel + moe_panel_bytes_(stage->group->panel, at));
  }
}

/* The same of either kind. */
MOE_FN void moe_weight_grad_operand_(const moe_weight_grad_ *stage, const moe_grad_operand_ *operand, int64_t expert,
                                     int64_t first, int64_t count, int64_t from, int64_t n, char *panel, char *room) {
  if (operand->load) moe_weight_grad_load_(stage, operand, expert, first, count, from, n, panel, room);
  else moe_weight_grad_pack_(stage, operand, expert, first, count, from, n, panel);
}

/* The memory that they are read from. */
MOE_FN void moe_weight_grad_reads_(const moe_weight_grad_ *stage, const moe_grad_operand_ *operand, int64_t expert,
                                   int64_t first, int64_t count, int64_t from, int64_t n, moe_prefetch_ *prefetch) {
  const moe_rows_ rows = moe_weight_grad_rows_(stage, operand, expert, first, from);
  if (operand->load && !operand->rows.base) count = 0;
  moe_prefetch_rows_(prefetch, rows.base, NULL, rows.index, rows.stride, count, n * moe_dtype_bytes_(operand->dtype));
}

/* Packs A: a panel or, transposed while they are in the first-level cache, rows. They are rounded as everywhere, not in
   the mode of bf16 products. */
MOE_FN void moe_weight_grad_pack_a_(const moe_a_ *a, const moe_kernels *kernels, int64_t from, int64_t k, char *to,
                                    char *room) {
  const moe_weight_grad_ *stage = (const moe_weight_grad_ *)a->source;
  const moe_panel_kind_ kind = stage->group->panel;
  const int64_t per_word = kind == MOE_PANEL_F32 ? 1 : 2, step = per_word * MOE_NR;
  const moe_fpenv_ saved = moe_fpenv_enter_();
  for (int64_t at = 0; at < k; at += step) {
    const int64_t count = moe_min_(step, k - at);
    char *panel = a->is_panel ? to + moe_panel_bytes_(kind, at) : room;
    const int64_t column = stage->x_from + a->column;
    moe_weight_grad_operand_(stage, &stage->x, a->expert, from + at, count, column, a->rows, panel, room);
    if (a->is_panel) continue;
    moe_transpose_panel_(kernels, kind, room, count, a->rows, to + at / per_word * 4,
                         kernels->blocking->kc_bytes[kind]);
  }
  moe_fpenv_restore_(saved);
}

MOE_FN void moe_weight_grad_a_reads_(const moe_a_ *a, int64_t from, int64_t k, moe_prefetch_ *prefetch) {
  const moe_weight_grad_ *stage = (const moe_weight_grad_ *)a->source;
  moe_weight_grad_reads_(stage, &stage->x, a->expert, from, k, stage->x_from + a->column, a->rows, prefetch);
}

/* Columns [from, from+n) of x as A. */
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

/* ------------------------------------------------------------------------------------------------------------ stores
   */

MOE_FN char *moe_weight_grad_at_(const moe_weight_grad_ *stage, int64_t expert, int64_t m0, int64_t n0) {
  char *output =
      stage->each ? ((char *const *)(void *)stage->output)[expert] : stage->output + expert * stage->expert_bytes;
  return output + stage->offset + m0 * stage->row_bytes + (stage->skip + n0) * moe_dtype_bytes_(stage->dtype);
}

/* Whether dW is the products and nothing else. */
MOE_FN int moe_weight_grad_overwrites_(const moe_weight_grad_ *stage) { return !stage->accumulate && !stage->skip; }

/* Whether micro-kernels store whole panels of dW. */
MOE_FN int moe_weight_grad_by_ukernel_(const moe_weight_grad_ *stage) {
  return stage->group->kernels->gemm->ukernel_packed_a[stage->group->panel] && moe_weight_grad_overwrites_(stage) &&
         moe_ukernel_rounds_to_(stage->dtype, stage->group->product);
}

/* Whether the rows of dW are whole cache lines. */
MOE_FN int moe_weight_grad_whole_lines_(const moe_weight_grad_ *stage) {
  const uintptr_t lines =
      (uintptr_t)stage->output | (uintptr_t)(stage->offset | stage->expert_bytes | stage->row_bytes);
  return !stage->each && lines % 64 == 0 && stage->n * moe_dtype_bytes_(stage->dtype) % 64 == 0;
}

/* Whether dW, a large array, is stored by non-temporal stores: by micro-kernels, or in whole lines. */
MOE_FN int moe_weight_grad_nt_(const moe_weight_grad_ *stage) {
  const int can =
      moe_weight_grad_by_ukernel_(stage) || (moe_weight_grad_overwrites_(stage) && moe_weight_grad_whole_lines_(stage));
  return can && stage->group->E * stage->m * stage->n * moe_dtype_bytes_(stage->dtype) >= MOE_NT_MIN_BYTES;
}

/* Whether it is so in whole lines, none of which is read first. */
MOE_FN int moe_weight_grad_nt_lines_(const moe_weight_grad_ *stage) {
  return moe_weight_grad_nt_(stage) && moe_weight_grad_whole_lines_(stage);
}

/* What is prefetched of rows [m0, m0+rows) and `panels` panels' columns from n0 on. Of whole panels with non-temporal
   stores only the lines at both ends, which hold something else as well. */
MOE_FN void moe_weight_grad_writes_(const moe_weight_grad_ *stage, int64_t expert, int64_t m0, int64_t rows, int64_t n0,
                                    int64_t panels, moe_prefetch_ *prefetch) {
  const int64_t size = moe_dtype_bytes_(stage->dtype), stride = stage->row_bytes;
  const int64_t n = moe_min_(panels * MOE_NR, stage->n - n0), end = n / MOE_NR * MOE_NR;
  const char *first = moe_weight_grad_at_(stage, expert, m0, n0);
  if (moe_weight_grad_nt_lines_(stage)) rows = 0;
  if (moe_weight_grad_nt_(stage))
    moe_prefetch_rows_(prefetch, first, first + end * size, NULL, stride, rows, moe_max_(1, (n - end) * size));
  else moe_prefetch_rows_(prefetch, first, NULL, NULL, stride, rows, n * size);
}

/* A product, for its epilogue: rows [m0, m0+rows), columns from n0 on. */
typedef struct moe_weight_grad_product_ {
  const moe_weight_grad_ *stage;
  int64_t expert, m0, rows, n0;
} moe_weight_grad_product_;

/* Stores a panel. What is read has been prefetched. */
MOE_FN void moe_weight_grad_epilogue_(void *arg, int64_t p, float *c) {
  const moe_weight_grad_product_ *product = (const moe_weight_grad_product_ *)arg;
  const moe_weight_grad_ *stage = product->stage;
  const moe_kernels *kernels = stage->group->kernels;
  const int64_t n0 = product->n0 + p * MOE_NR, n = moe_min_(MOE_NR, stage->n - n0), rows = product->rows;
  const int64_t size = moe_dtype_bytes_(stage->dtype), stride = stage->row_bytes;
  char *dst = moe_weight_grad_at_(stage, product->expert, product->m0, n0);
  if (stage->accumulate) moe_add_stored_(kernels, c, dst, stride, NULL, stage->dtype, rows, n);
  if (moe_weight_grad_nt_lines_(stage)) {
    moe_store_rows_nt_(kernels, stage->dtype, dst, stride, c, rows, n);
    return;
  }
  kernels->vec->store_rows[stage->dtype](dst, stride, NULL, c, rows, n);
  for (int64_t i = 0; i < rows && n0 == 0 && stage->skip && !stage->accumulate; i++)
    memset(dst + i * stride - stage->skip * size, 0, (size_t)(stage->skip * size));
}

/* ------------------------------------------------------------------------------------------------------------- items
   */

/* Rows of dW from a.column on, `panels` panels of columns from n0 on; `next` is read after them. */
MOE_FN void moe_weight_grad_multiply_(const moe_weight_grad_ *stage, const moe_scratch_ *scratch, const moe_a_ *a,
                                      const moe_b_ *b, int64_t n0, int64_t panels, const moe_prefetch_ *next) {
  const int nt = moe_weight_grad_nt_(stage), carries = nt && !moe_weight_grad_whole_lines_(stage);
  MOE_LINE_ALIGNED char carry[MOE_NR * 64];
  moe_weight_grad_product_ product = {stage, a->expert, a->column, a->rows, n0};
  moe_prefetch_ into;
  moe_epilogue_ epilogue;
  moe_weight_grad_writes_(stage, a->expert, a->column, a->rows, n0, panels, &into);
  moe_epilogue_init_(&epilogue, moe_weight_grad_epilogue_, &product);
  epilogue.into = &into;
  if (moe_weight_grad_by_ukernel_(stage))
    epilogue.to = (moe_place_){.base = moe_weight_grad_at_(stage, a->expert, a->column, n0),
                               .stride = stage->row_bytes,
                               .dtype = stage->dtype,
                               .nt = nt,
                               .carry = carries ? carry : NULL};
  const moe_gemm_ gemm = {
      stage->group->kernels, stage->group->product, a, b, 0, panels, scratch->c, scratch->b_buffer, next, &epilogue};
  moe_multiply_(&gemm);
}

/* All rows of dW, `panels` panels of columns from n0 on, over k rows of the expert. B is packed behind C. */
MOE_FN void moe_weight_grad_columns_(const moe_weight_grad_ *stage, const moe_scratch_ *scratch, int64_t expert,
                                     int64_t k, int64_t n0, int64_t panels, const moe_prefetch_ *next) {
  const int64_t bytes = moe_panel_bytes_(stage->group->panel, k);
  const int64_t kc = moe_kc_(stage->group->kernels->blocking, stage->group->panel, MOE_MC, k);
  char *packed = (char *)scratch->c + panels * MOE_GRAD_C_BYTES_;
  moe_a_ a, a_next;
  moe_b_ b;
  for (int64_t j = 0; j < panels; j++) {
    const int64_t at = n0 + j * MOE_NR;
    moe_weight_grad_operand_(stage, &stage->y, expert, 0, k, stage->y_from + at, moe_min_(MOE_NR, stage->n - at),
                             packed + j * bytes, scratch->b_buffer);
  }
  moe_b_packed_(&b, packed, bytes, moe_min_(panels * MOE_NR, stage->n - n0), k);
  moe_weight_grad_a_(stage, scratch, expert, stage->m_from, moe_min_(MOE_NR, stage->m_to - stage->m_from), &a_next);
  for (int64_t m0 = stage->m_from; m0 < stage->m_to; m0 += MOE_NR) {
    moe_prefetch_ reads = *next;
    a = a_next;
    moe_weight_grad_a_(stage, scratch, expert, m0 + MOE_NR, moe_min_(MOE_NR, stage->m_to - m0 - MOE_NR), &a_next);
    if (a_next.rows > 0) a_next.reads(&a_next, 0, moe_min_(k, kc), &reads);
    moe_weight_grad_multiply_(stage, scratch, &a, &b, n0, panels, &reads);
  }
}

/* An item's expert and columns [n0, end). */
MOE_FN void moe_weight_grad_split_item_(const moe_weight_grad_ *stage, int64_t index, int64_t *expert, int64_t *n0,
                                        int64_t *end) {
  const int64_t width = stage->panels_of_item * MOE_NR, parts = moe_ceil_div_(stage->n, width);
  *expert = stage->group->from + index / parts;
  *n0 = index % parts * width;
  *end = moe_min_(stage->n, *n0 + width);
}

MOE_FN void moe_weight_grad_first_reads_(void *arg, int64_t index, moe_prefetch_ *prefetch) {
  const moe_weight_grad_ *stage = (const moe_weight_grad_ *)arg;
  int64_t expert, n0, end;
  moe_weight_grad_split_item_(stage, index, &expert, &n0, &end);
  moe_weight_grad_reads_(stage, &stage->y, expert, 0, moe_group_rows_(stage->group, expert), stage->y_from + n0,
                         stage->y.panels.base ? MOE_NR : end - n0, prefetch);
}

/* How many of an expert's rows, from stage->row on, are contracted at a time. */
MOE_FN int64_t moe_weight_grad_k_(const moe_weight_grad_ *stage, int64_t expert) {
  const int64_t rest = moe_group_rows_(stage->group, expert) - stage->row;
  if (!stage->slot || rest <= 0) return rest;
  const int32_t *slot = stage->slot + stage->group->first[expert] + stage->row;
  int64_t k = 1;
  while (k < rest && slot[k] / stage->B == slot[0] / stage->B) k++;
  return k;
}

/* An expert without rows still gets its gradient, zero. */
MOE_FN void moe_weight_grad_item_(void *arg, int64_t index, moe_worker_ *worker) {
  const moe_weight_grad_ *stage = (const moe_weight_grad_ *)arg;
  moe_weight_grad_ part = *stage;
  moe_scratch_ scratch;
  moe_prefetch_ next;
  int64_t expert, first, end;
  moe_scratch_at_(stage->group, worker, NULL, 0, &scratch);
  scratch.c = (float *)(void *)(scratch.a_packed + moe_a_packed_bytes_(stage->group, MOE_NR, 1));
  moe_next_reads_(worker, &next);
  moe_weight_grad_split_item_(stage, index, &expert, &first, &end);
  const int64_t rows = moe_group_rows_(stage->group, expert);
  const int64_t step = moe_weight_grad_panels_(stage->group, rows, moe_ceil_div_(end - first, MOE_NR));
  do {
    const int64_t k = moe_weight_grad_k_(&part, expert);
    for (int64_t n0 = first; n0 < end; n0 += step * MOE_NR)
      moe_weight_grad_columns_(&part, &scratch, expert, k, n0, moe_min_(step, moe_ceil_div_(end - n0, MOE_NR)), &next);
    part.row += k;
    part.accumulate = 1;
  } while (part.row < rows);
}

/* The group's rows must be known. */
MOE_FN moe_work_ moe_weight_grad_work_(moe_weight_grad_ *stage) {
  const moe_group_ *group = stage->group;
  const int64_t panels = moe_ceil_div_(stage->n, MOE_NR), experts = group->to - group->from,
                rows = moe_ceil_div_(moe_group_all_rows_(group), moe_max_(1, experts)),
                most = moe_weight_grad_panels_(group, rows, panels);
  const moe_work_ none = {0, NULL, NULL, NULL};
  if (!stage->output) return none;
  if (!stage->row_bytes) {
    stage->row_bytes = (stage->skip + stage->n) * moe_dtype_bytes_(stage->dtype);
    stage->expert_bytes = stage->m * stage->row_bytes;
  }
  stage->panels_of_item = moe_panels_per_item_(group->kernels->blocking, group->workers, experts, panels, most);
  const moe_work_ work = {experts * moe_ceil_div_(panels, stage->panels_of_item), moe_weight_grad_item_, stage,
                          moe_weight_grad_first_reads_};
  return work;
}

#endif
