/* Rows of a matrix, contiguous or gathered, and the type of the functions that convert them. */
#ifndef MOE_VEC_ROWS_H
#define MOE_VEC_ROWS_H

enum {
  MOE_NR = 64,                /* columns of a B panel; also the stride of rows of floats in scratch memory */
  MOE_NR_BYTES_ = 4 * MOE_NR, /* bytes of a row of as many words */
  MOE_LONG_SUM = 64,          /* terms of a sum over tokens before it is compensated (numeric contract 4) */
  MOE_DOT_CHAINS = 16         /* chains of a dot product of two rows (numeric contract 4) */
};

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
  if (part.index) part.index += first;
  else part.base += first * part.stride;
  return part;
}

/* Convert rows of n elements to rows of floats with stride `pitch`, and back from rows with stride 64. Row i is stored
   in row index[i], if there is an index. */
typedef void (*moe_load_rows_fn_)(float *dst, int64_t pitch, const moe_rows_ *src, int64_t rows, int64_t n);
typedef void (*moe_store_rows_fn_)(void *dst, int64_t stride, const int32_t *index, const float *src, int64_t rows,
                                   int64_t n);

#endif
