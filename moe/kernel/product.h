/* Rows times a group of panels, each 64 columns of a right operand: the loop around the tile. It walks k in pieces whose packed
   panel fits the first-level cache: packs a piece of every panel, gathers the rows' piece side by side (converted where the
   panel's type asks for it), multiplies, and meanwhile has the next piece's memory fetched; so weights are read once, whether
   there is one row or hundreds. */
#ifndef MOE_KERNEL_PRODUCT_H
#define MOE_KERNEL_PRODUCT_H

enum { MOE_PIECE_F32_ = 128, MOE_PIECE_PAIRS_ = 256 }; /* k per piece: 32 KiB of panel */

/* Bytes of a packed piece, of a row's part in it (of either kind), and of one panel's products. */
#define MOE_PIECE_BYTES_ ((int64_t)MOE_PIECE_F32_ * MOE_PANEL * 4)
#define MOE_PIECE_ROW_BYTES_ ((int64_t)MOE_PIECE_F32_ * 4)
#define MOE_PRODUCTS_FLOATS_ ((int64_t)(MOE_ROWS_MAX + 16) * MOE_PANEL) /* room for whole vectors of rows */

MOE_INLINE int64_t moe_even_(int64_t k) { return k + (k & 1); }

/* Bytes of a packed panel of k rows. */
MOE_FN int64_t moe_panel_bytes_(moe_panel_kind_ kind, int64_t k) {
  return moe_mul3_(moe_add_(k, k & 1), MOE_PANEL, kind == MOE_PANEL_F32 ? 4 : 2);
}

/* ------------------------------------------------------------------------------------------------------ left operand */

typedef struct moe_left_ {
  const char *row[MOE_ROWS_MAX]; /* first element of each row */
  int64_t rows, step;            /* bytes from a pair of elements to the next: see moe_tile_fn_ */
  moe_dtype dtype;
} moe_left_;

/* Rows [first, first+count) of a matrix, from element `from` on. */
MOE_FN void moe_left_from_rows_(moe_left_ *left, const moe_rows_ *rows, int64_t first, int64_t count, moe_dtype dtype, int64_t from) {
  const int64_t size = moe_dtype_bytes_(dtype);
  left->rows = count;
  left->dtype = dtype;
  left->step = 2 * size;
  for (int64_t i = 0; i < count; i++) left->row[i] = moe_row_(rows, first + i) + from * size;
}

/* The first `rows` columns of a packed panel as rows. */
MOE_FN void moe_left_from_panel_(moe_left_ *left, moe_panel_kind_ kind, const void *panel, int64_t rows) {
  left->rows = rows;
  left->dtype = kind == MOE_PANEL_F32 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
  left->step = kind == MOE_PANEL_F32 ? 2 * MOE_PANEL * 4 : MOE_PANEL * 4;
  for (int64_t i = 0; i < rows; i++) left->row[i] = (const char *)panel + i * 4;
}

/* ----------------------------------------------------------------------------------------------------- right operand */

/* Up to 64 columns of k elements: packed already, or where they lie in memory. Untransposed, element (k, n) of part p is at
   base[p] + k*stride, n elements on, and part p fills the panel's columns from 64/parts * p; transposed (one part), column n
   is contiguous at base[0] + n*stride. */
typedef struct moe_right_ {
  const void *panel; /* or NULL */
  int fetch;         /* the panel comes from memory, not from cache */
  const char *base[2];
  int64_t parts, stride, n; /* n: columns of each part */
  int transposed;
  moe_dtype dtype;
  int64_t k;
} moe_right_;

/* A panel from n columns that are contiguous in memory, stride bytes apart: 64 of them at a time are converted as rows, which
   are then transposed. Pairs of bf16 lie side by side already and move as words. */
MOE_FN void moe_pack_columns_(const moe_kernels *kernels, moe_panel_kind_ kind, moe_dtype dtype, void *panel, const char *src, int64_t stride,
                              int64_t k, int64_t n) {
  const int64_t per_row = kind == MOE_PANEL_PAIRS ? 2 : 1; /* elements of k in a row of the panel */
  const int64_t size = moe_dtype_bytes_(dtype), rows = moe_even_(k) / per_row;
  float tile[MOE_PANEL * MOE_PANEL], last[MOE_PANEL * MOE_PANEL];
  for (int64_t r = 0; r < rows; r += MOE_PANEL) {
    const int64_t count = moe_min_(MOE_PANEL, rows - r), elements = moe_min_(k - r * per_row, count * per_row);
    if (elements < MOE_PANEL * per_row || n < MOE_PANEL) memset(tile, 0, sizeof tile);
    for (int64_t col = 0; col < n; col++) {
      const char *column = src + col * stride + r * per_row * size;
      if (kind == MOE_PANEL_PAIRS) memcpy(tile + col * MOE_PANEL, column, (size_t)(elements * size));
      else kernels->load_row[dtype](tile + col * MOE_PANEL, column, elements);
    }
    /* A last part smaller than a tile must not write past the panel. */
    char *to = (char *)panel + r * MOE_PANEL * 4;
    kernels->transpose_tile(count == MOE_PANEL ? (void *)to : (void *)last, tile, MOE_PANEL, count);
    if (count < MOE_PANEL) memcpy(to, last, (size_t)(count * MOE_PANEL * 4));
  }
}

/* Elements [from, from+k) of the right operand as a panel. */
MOE_FN void moe_pack_right_(const moe_kernels *kernels, moe_panel_kind_ kind, const moe_right_ *right, int64_t from, int64_t k, void *panel) {
  if (right->transposed) {
    moe_pack_columns_(kernels, kind, right->dtype, panel, right->base[0] + from * moe_dtype_bytes_(right->dtype), right->stride, k, right->n);
    return;
  }
  for (int64_t p = 0; p < right->parts; p++) {
    const moe_rows_ rows = {right->base[p] + from * right->stride, right->stride, NULL};
    kernels->pack_rows[kind][right->dtype](panel, MOE_PANEL / right->parts * p, MOE_PANEL / right->parts, &rows, k, right->n);
  }
}

/* The memory that elements [from, from+k) of a group of panels, side by side, will be read from. */
MOE_FN moe_ahead_ moe_right_ahead_(moe_panel_kind_ kind, const moe_right_ *right, int64_t panels, int64_t from, int64_t k) {
  enum { STRETCH = 1024 };
  moe_ahead_ ahead = {{NULL, NULL}, NULL, 0, 0, 0, 0, 0};
  const int64_t size = moe_dtype_bytes_(right->dtype);
  int64_t n = 0;
  for (int64_t p = 0; p < panels; p++) n += right[p].n;
  if (right->panel) {
    ahead.base[0] = (const char *)right->panel + moe_panel_bytes_(kind, from);
    ahead.stride = ahead.bytes = STRETCH;
    ahead.rows = right->fetch ? moe_panel_bytes_(kind, k) / STRETCH : 0;
    return ahead;
  }
  ahead.base[0] = right->base[0] + from * (right->transposed ? size : right->stride);
  if (right->parts == 2) ahead.base[1] = right->base[1] + from * right->stride;
  ahead.stride = right->stride;
  ahead.rows = right->transposed ? n : k;
  ahead.bytes = (right->transposed ? k : n) * size;
  return ahead;
}

MOE_FN int64_t moe_piece_(const moe_kernels *kernels, moe_product_ product) {
  return kernels->panel[product] == MOE_PANEL_F32 ? MOE_PIECE_F32_ : MOE_PIECE_PAIRS_;
}

/* What a product with a group of panels reads first. */
MOE_FN moe_ahead_ moe_right_first_(const moe_kernels *kernels, moe_product_ product, const moe_right_ *right, int64_t panels) {
  return moe_right_ahead_(kernels->panel[product], right, panels, 0, moe_min_(moe_piece_(kernels, product), right->k));
}

/* ---------------------------------------------------------------------------------------------------------- product */

typedef struct moe_operands_ {
  const moe_kernels *kernels;
  moe_product_ product;
  const moe_left_ *left;
  const moe_right_ *right; /* [panels] */
  int64_t panels;
  float *c;       /* panel p's products [left.rows][64] at p * MOE_PRODUCTS_FLOATS_; output */
  char *pieces;   /* panels * MOE_PIECE_BYTES_, unless right.panel */
  char *gathered; /* left.rows * MOE_PIECE_ROW_BYTES_, unless the left operand is a packed panel */
  const moe_ahead_ *next; /* what will be read after this product, or NULL */
} moe_operands_;

/* The rows' elements [from, from+n), side by side: rows a power of two apart would crowd a few sets of the cache. The same
   rows' next elements are fetched: there are more rows than streams a prefetcher can follow. */
MOE_FN void moe_gather_(const moe_operands_ *m, int64_t from, int64_t n, int64_t more) {
  const moe_left_ *left = m->left;
  const int64_t at = from / 2 * left->step, end = at + (n + more) / 2 * left->step;
  for (int64_t i = 0; i < left->rows; i++) {
    char *row = m->gathered + i * MOE_PIECE_ROW_BYTES_;
    for (int64_t b = at + n / 2 * left->step; b < end; b += 64) __builtin_prefetch(left->row[i] + b, 0, 2);
    if (m->kernels->panel[m->product] == MOE_PANEL_PAIRS) memcpy(row, left->row[i] + at, (size_t)(n * 2));
    else m->kernels->load_row[left->dtype]((float *)(void *)row, left->row[i] + at, n);
  }
}

/* All rows times n elements of one packed panel. */
MOE_FN void moe_multiply_piece_(const moe_operands_ *m, int64_t from, int64_t n, const void *panel, float *c, moe_ahead_ *ahead) {
  const moe_left_ *left = m->left;
  const int in_panel = left->step > 8;
  const int64_t step = in_panel ? left->step : m->kernels->panel[m->product] == MOE_PANEL_F32 ? 8 : 4;
  const char *row[MOE_TILE_ROWS];
  for (int64_t i = 0; i < left->rows; i += MOE_TILE_ROWS) {
    const int64_t rows = moe_min_(MOE_TILE_ROWS, left->rows - i);
    for (int64_t j = 0; j < rows; j++)
      row[j] = in_panel ? left->row[i + j] + from / 2 * step : m->gathered + (i + j) * MOE_PIECE_ROW_BYTES_;
    moe_ahead_step_(ahead);
    m->kernels->tile[m->product]((int)rows, row, step, n, panel, c + i * MOE_PANEL);
  }
}

/* c = left * right */
MOE_FN void moe_multiply_(const moe_operands_ *m) {
  const moe_panel_kind_ kind = m->kernels->panel[m->product];
  const int64_t piece = moe_piece_(m->kernels, m->product), k = m->right->k;
  const moe_ahead_ none = {{NULL, NULL}, NULL, 0, 0, 0, 0, 0};
  for (int64_t p = 0; p < m->panels; p++) memset(m->c + p * MOE_PRODUCTS_FLOATS_, 0, (size_t)(m->left->rows * MOE_PANEL) * sizeof *m->c);
#if MOE_X86
  const int by_mode = m->product == MOE_PRODUCT_BF16 && m->kernels->bf16_by_mode;
  if (by_mode) moe_flush_on_();
#endif
  for (int64_t from = 0; from < k; from += piece) {
    const int64_t n = moe_min_(piece, k - from), more = moe_max_(0, moe_min_(piece, k - from - n));
    moe_ahead_ ahead = more > 0 ? moe_right_ahead_(kind, m->right, m->panels, from + n, more) : m->next ? *m->next : none;
    moe_ahead_pace_(&ahead, m->panels * moe_ceil_div_(m->left->rows, MOE_TILE_ROWS));
    for (int64_t p = 0; p < m->panels; p++)
      if (!m->right[p].panel) moe_pack_right_(m->kernels, kind, &m->right[p], from, n, m->pieces + p * MOE_PIECE_BYTES_);
    if (m->left->step <= 8) moe_gather_(m, from, n, more);
    for (int64_t p = 0; p < m->panels; p++) {
      const char *panel = (const char *)m->right[p].panel;
      panel = panel ? panel + moe_panel_bytes_(kind, from) : m->pieces + p * MOE_PIECE_BYTES_;
      moe_multiply_piece_(m, from, n, panel, m->c + p * MOE_PRODUCTS_FLOATS_, &ahead);
    }
  }
#if MOE_X86
  if (by_mode) moe_flush_off_();
#endif
}

#endif
