/* A few rows times one packed panel: the loop around the tile. Rows whose type is not the panel's are converted on the way,
   a cache-sized piece of k at a time. */
#ifndef MOE_KERNEL_PRODUCT_H
#define MOE_KERNEL_PRODUCT_H

/* Scratch of one product: converted rows. */
#define MOE_PRODUCT_SCRATCH_ ((int64_t)MOE_ROWS_MAX * MOE_PIECE_F32_ * 4)

enum { MOE_PIECE_F32_ = 128, MOE_PIECE_PAIRS_ = 256 }; /* k per piece: 32 KiB of panel */

MOE_INLINE int64_t moe_even_(int64_t k) { return k + (k & 1); }

/* Bytes of a packed panel of k rows. */
MOE_FN int64_t moe_panel_bytes_(moe_panel_kind_ kind, int64_t k) {
  return moe_mul3_(moe_even_(k), MOE_PANEL, kind == MOE_PANEL_F32 ? 4 : 2);
}

typedef struct moe_left_ {
  const char *row[MOE_ROWS_MAX]; /* first element of each row */
  int64_t rows, step;            /* bytes from a pair of elements to the next: see moe_tile_fn_ */
  moe_dtype dtype;
} moe_left_;

/* The columns [first, first+rows) of a packed panel as rows. */
MOE_FN void moe_left_from_panel_(moe_left_ *left, moe_panel_kind_ kind, const void *panel, int64_t rows) {
  left->rows = rows;
  left->dtype = kind == MOE_PANEL_F32 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
  left->step = kind == MOE_PANEL_F32 ? 2 * MOE_PANEL * 4 : MOE_PANEL * 4;
  for (int64_t i = 0; i < rows; i++) left->row[i] = (const char *)panel + i * 4;
}

/* c[rows][64] = left * panel over k elements. */
MOE_FN void moe_multiply_panel_(const moe_kernels *kernels, moe_product_ product, const moe_left_ *left, int64_t k, const void *panel, float *c,
                         float *scratch) {
  const moe_panel_kind_ kind = kernels->panel[product];
  const int direct = kind == MOE_PANEL_PAIRS ? left->dtype == MOE_DTYPE_BF16 : left->dtype == MOE_DTYPE_F32;
  const int64_t piece = kind == MOE_PANEL_F32 ? MOE_PIECE_F32_ : MOE_PIECE_PAIRS_;
  const int64_t panel_row = MOE_PANEL * (kind == MOE_PANEL_F32 ? 4 : 2);
  const char *row[MOE_ROWS_MAX];
  memset(c, 0, (size_t)(left->rows * MOE_PANEL) * sizeof *c);
#if MOE_X86
  const int by_mode = product == MOE_PRODUCT_BF16 && kernels->bf16_by_mode;
  if (by_mode) moe_flush_on_();
#endif
  for (int64_t from = 0; from < k; from += piece) {
    const int64_t n = moe_min_(piece, k - from);
    for (int64_t i = 0; i < left->rows; i++) {
      row[i] = left->row[i] + from / 2 * left->step;
      if (direct) continue;
      kernels->load_row[left->dtype](scratch + i * piece, row[i], n);
      row[i] = (const char *)(scratch + i * piece);
    }
    for (int64_t i = 0; i < left->rows; i += MOE_TILE_ROWS)
      kernels->tile[product]((int)moe_min_(MOE_TILE_ROWS, left->rows - i), row + i, direct ? left->step : 8, n,
                             (const char *)panel + from * panel_row, c + i * MOE_PANEL);
  }
#if MOE_X86
  if (by_mode) moe_flush_off_();
#endif
}

#endif
