/* What all micro-kernels share: their arguments, the rows at hand, prefetching, non-temporal stores. */
#ifndef MOE_GEMM_UKERNEL_H
#define MOE_GEMM_UKERNEL_H

enum {
  MOE_MR = 6, /* rows of A in registers */
  /* The last seven or eight are four and the rest: two rows take as long as three (measured). */
  MOE_MR_LAST_ = MOE_MR + 2
};

/* What micro-kernels prefetch: each takes a step of `b` and, once that is done, of `into`; and its share, as one of
   `ukernels`, of `bytes` bytes of each of `count` rows, which are more than hardware prefetchers can follow. */
typedef struct moe_prefetches_ {
  moe_prefetch_ b, into;
  moe_rows_ rows;
  int64_t bytes, row, count; /* row: the next one */
  int64_t ukernels, due;     /* due: `ukernels` for every row that is to be prefetched by now */
} moe_prefetches_;

/* One micro-kernel on. Returns whether there is a step to take. */
MOE_INLINE int moe_prefetches_next_(moe_prefetches_ *prefetches) {
  prefetches->due += prefetches->count;
  return prefetches->due >= prefetches->ukernels || prefetches->b.block.at || prefetches->into.block.at;
}

/* The step, as moe_prefetch_step_: see lookahead.h. */
MOE_FN __attribute__((noinline)) int64_t moe_prefetches_step_(moe_prefetches_ *prefetches, moe_prefetch_block_ *fetch);

/* `rows` rows times a panel, MOE_MR at a time, over k > 0 elements, an odd k rounded up as rows and panel are:
   c[i][0..64) += row i * panel. A row's elements lie side by side, of the panel's type, and the next row kc_bytes on.
   One or two may be multiplied as three, or an odd number as one more: those beyond the last may be anything, but there
   is room for them, in c as well. Meanwhile `prefetches` is brought into the second-level cache; where the panel's
   columns are not walked in parts (nr_parts is 1) a line for every pair of k, and into the first-level cache a share of
   what the next MOE_MR take as well: their rows and sums. */
typedef struct moe_ukernel_ {
  const char *row; /* the first */
  int64_t rows, k;
  const void *panel;
  float *c;
  int add;                     /* 0: c starts at +0 */
  moe_prefetches_ *prefetches; /* or NULL */
  const char *a_next;          /* rows that are multiplied after the last, and their sums */
  const float *c_next;
  /* For ukernel_pack_b, which takes MOE_MR rows and makes the panel meanwhile: columns [32p, 32p+32) of row k lie at
     base[p] + k*stride, of dtype; what is packed next, `prefetch` bytes on, is prefetched. */
  const char *base[2];
  int64_t stride, prefetch;
  moe_dtype dtype;
  void *packed;
  moe_place_ to;            /* where the sums are stored, whatever c then holds; nowhere: they stay in c */
  moe_store_rows_fn_ store; /*   as its type */
} moe_ukernel_;
typedef void (*moe_ukernel_fn_)(const moe_ukernel_ *ukernel);

/* Whether ukernel_packed_a stores sums of such products as dtype. To bf16 it rounds what is not subnormal, which sums
   of bf16 products never are. */
MOE_INLINE int moe_ukernel_rounds_to_(moe_dtype dtype, moe_product_ product) {
  return dtype == MOE_DTYPE_F32 || dtype == MOE_DTYPE_FP16 || (dtype == MOE_DTYPE_BF16 && product == MOE_PRODUCT_BF16);
}

/* Bytes of a row of a panel where it is stored: see moe_ukernel_rounds_to_. */
MOE_INLINE int64_t moe_ukernel_to_bytes_(const moe_ukernel_ *t) {
  return MOE_NR * (t->to.dtype == MOE_DTYPE_F32 ? 4 : 2);
}

/* Rows that are stored non-temporally, a line at a time between the next rows' products: all at once they would take up
   the fill buffers. */
typedef struct moe_nt_ {
  const char *from;     /* the next line, and where it goes */
  char *to, *row;       /* row: somewhere in the first line of its row that goes */
  int64_t stride, skip; /* bytes from row to row where they go; between them where they come from */
  int64_t run;          /* lines of a row */
  int64_t in_row, left; /* lines that are left of the row, and of all */
} moe_nt_;

MOE_INLINE char *moe_line_of_(char *at) { return at - ((uintptr_t)at & 63); }

/* The line within which the first panel begins has been stored. */
MOE_INLINE moe_nt_ moe_nt_begin_(const moe_place_ *place, const char *lines, char *to, int64_t rows, int64_t bytes) {
  const int64_t skip = place->carry && place->begins ? 64 : 0, run = (bytes - skip) / 64;
  const moe_nt_ nt = {lines + skip, moe_line_of_(to) + skip, to + skip, place->stride, skip, run, run, rows * run};
  return nt;
}

MOE_INLINE void moe_nt_move_(moe_nt_ *nt) {
  nt->from += 64;
  nt->to += 64;
  nt->left--;
  if (--nt->in_row > 0) return;
  nt->in_row = nt->run;
  nt->from += nt->skip;
  nt->row += nt->stride;
  nt->to = moe_line_of_(nt->row);
}

/* The rows at hand and what is prefetched meanwhile. */
typedef struct moe_ukernel_at_ {
  const char *row;
  int64_t rows, now; /* rows: from here on; now: as many of them as are multiplied at once */
  float *c;
  char *to, *carry; /* or NULL */
  moe_prefetch_at_ fetch;
  int64_t fetches, left; /* prefetches: in all; left in the part at hand */
  const char *a_next, *next;
} moe_ukernel_at_;

/* How many of `rows` rows are multiplied at once. */
MOE_INLINE int64_t moe_ukernel_mr_(int64_t rows) {
  if (rows > MOE_MR_LAST_) return MOE_MR;
  return rows > MOE_MR ? MOE_MR_LAST_ / 2 : rows;
}

MOE_INLINE moe_ukernel_at_ moe_ukernel_first_(const moe_ukernel_ *t) {
  moe_ukernel_at_ at;
  at.row = t->row;
  at.rows = t->rows;
  at.now = moe_ukernel_mr_(at.rows);
  at.c = t->c;
  at.to = t->to.base;
  at.carry = t->to.carry;
  return at;
}

/* To the next rows, `pitch` bytes apart. */
MOE_INLINE void moe_ukernel_move_(const moe_ukernel_ *t, int64_t pitch, moe_ukernel_at_ *at) {
  at->row += at->now * pitch;
  if (at->carry) at->carry += at->now * 64;
  at->rows -= at->now;
  at->c += at->now * MOE_NR;
  if (at->to) at->to += at->now * t->to.stride;
  at->now = moe_ukernel_mr_(at->rows);
}

/* Sums are stored from c, which is in the first-level cache. */
MOE_INLINE void moe_ukernel_store_(const moe_ukernel_ *t, const moe_ukernel_at_ *at) {
  if (at->to) t->store(at->to, t->to.stride, NULL, at->c, at->now, MOE_NR);
}

/* After the products of the rows at hand. */
MOE_INLINE void moe_ukernel_next_(const moe_ukernel_ *t, int64_t pitch, moe_ukernel_at_ *at) {
  moe_ukernel_store_(t, at);
  moe_ukernel_move_(t, pitch, at);
}

/* What the rows at hand prefetch: a line that is in cache where nothing is to be. */
MOE_INLINE void moe_ukernel_prefetch_begin_(const moe_ukernel_ *t, int64_t pitch, moe_ukernel_at_ *at) {
  moe_prefetch_block_ fetch = {(const char *)t->panel, t->k, 0, 0};
  at->fetches = t->prefetches && moe_prefetches_next_(t->prefetches) ? moe_prefetches_step_(t->prefetches, &fetch) : 0;
  at->fetch = moe_prefetch_begin_(&fetch);
  const int last = at->rows <= at->now;
  at->a_next = last ? t->a_next : at->row + at->now * pitch;
  at->next = (const char *)(last ? t->c_next : at->c + at->now * MOE_NR);
}

/* The prefetches of one pair of k, which is `size` bytes of each row's kc bytes. */
MOE_INLINE void moe_ukernel_prefetch_(moe_ukernel_at_ *at, int64_t size, int64_t kc) {
  moe_prefetch_next_(&at->fetch);
  __builtin_prefetch(at->a_next, 0, 3);
  at->a_next += MOE_MR * size;
  __builtin_prefetch(at->next, 0, 3);
  at->next += MOE_MR * MOE_NR * 4 / (kc / size);
}

#endif
