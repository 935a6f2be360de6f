/* What a product is made of. C = A*B is formed 64 columns at a time: B as a packed panel of 64 columns, A as rows, of
   which product.h gathers a cache-sized piece at a time from where they lie. Panels come in two kinds:
     MOE_PANEL_F32    float [K][64], K rounded up to even
     MOE_PANEL_PAIRS  bf16 [K/2][64][2]: two k side by side, for instructions that take a dot product of bf16 pairs */
#ifndef MOE_GEMM_MATRIX_H
#define MOE_GEMM_MATRIX_H

enum {
  MOE_NR = 64,               /* columns of a panel */
  MOE_NR_BYTES_ = 4 * MOE_NR /* bytes of a row of as many words */
};

typedef enum moe_panel_kind_ { MOE_PANEL_F32, MOE_PANEL_PAIRS, MOE_PANEL_KINDS_ } moe_panel_kind_;

MOE_INLINE int64_t moe_even_(int64_t k) { return k + (k & 1); }

/* Rows of a matrix: row k is at base + (index ? index[k] : k) * stride bytes. */
typedef struct moe_rows_ {
  const char *base;
  int64_t stride;
  const int32_t *index;
} moe_rows_;

MOE_INLINE const char *moe_row_(const moe_rows_ *rows, int64_t k) {
  return rows->base + (rows->index ? (int64_t)rows->index[k] : k) * rows->stride;
}

/* The rows from `first` on. */
MOE_INLINE moe_rows_ moe_rows_from_(const moe_rows_ *rows, int64_t first) {
  moe_rows_ part = *rows;
  if (part.index)
    part.index += first;
  else
    part.base += first * part.stride;
  return part;
}

/* Rows of n elements to rows of float, `pitch` apart, and back, from rows 64 apart; there row i goes to row index[i],
   if there is an index. */
typedef void (*moe_load_rows_fn_)(float *dst, int64_t pitch, const moe_rows_ *src, int64_t rows, int64_t n);
typedef void (*moe_store_rows_fn_)(void *dst, int64_t stride, const int32_t *index, const float *src, int64_t rows,
                                   int64_t n);

/* Where whole panels' sums leave for as they are, rounded: row i for base + i * stride. NULL: nowhere. past: past the
   caches, which only across_tile can. It takes bf16 not to be subnormal in either case. */
typedef struct moe_place_ {
  char *base;
  int64_t stride; /* in bytes */
  moe_dtype dtype;
  int nt;
  /* By non-temporal stores, where panels are not whole lines: room for 64 bytes for each row, the last of the panel before,
     which fill lines together with the next one's; and whether this panel is the first, the last. NULL: they are. */
  char *carry;
  int begins, ends;
} moe_place_;

/* That of an element further on. */
MOE_INLINE moe_place_ moe_place_at_(const moe_place_ *place, int64_t row, int64_t column) {
  moe_place_ at = *place;
  if (at.base) at.base += row * at.stride + column * moe_dtype_bytes_(at.dtype);
  if (at.carry) at.carry += row * 64;
  return at;
}

#endif
