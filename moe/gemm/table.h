/* The kernels of products, and their operands. */
#ifndef MOE_GEMM_TABLE_H
#define MOE_GEMM_TABLE_H

/* Panel columns [col, col+width) from K rows of n <= width elements; the rest of the columns becomes zero. */
typedef void (*moe_pack_rows_fn_)(void *panel, int64_t col, int64_t width, const moe_rows_ *rows, int64_t k, int64_t n);
/* A few rows of A times many columns of B that are read once, in the order they lie in: k rows of B, `stride` bytes
   apart, of n elements in each part. Column j of part p belongs to panel j / (64/parts): its sum for row i is at
   c[panel * c_stride + 64*i + 64/parts*p + j % (64/parts)], and is added to. */
typedef struct moe_small_m_ {
  const moe_element_format_ *format; /* of codes, or NULL: of dtype, */
  moe_dtype dtype;
  moe_load_rows_fn_ load; /*   and what loads those */
  moe_product_ product;   /* of codes: as what sums round */
  int64_t size;           /* bytes of an element */
  const float *x;         /* element q of row i at x[i * x_stride + q] */
  int64_t rows, x_stride, k;
  const char *base[2];
  int64_t parts, stride, n, prefetch; /* prefetch: how many bytes further on, eight rows or more */
  int contiguous;                     /* rows follow each other in memory, with all parts */
  int repeats_prefetches;             /* the core drops prefetches while too many are in flight */
  int64_t two_rows;                   /* up to so many rows are multiplied with two rows of columns at a time */
  const uint8_t *scale;               /* of codes that have scale bytes: see moe_b_, */
  int64_t scale_stride, scale_group, group;
  int split, ends; /*   and whether no rows of B follow */
  float *c;
  int64_t c_stride;
  float *panel; /* of codes: room for MOE_DECODE_K_ rows of a panel */
  /* Of codes that are looked up: tables of the first columns of each part, part_tables apart. One is for table_columns
     columns, of which the first one is number table_first: multiples of 32, or all. */
  moe_byte_table_ *tables;
  int64_t part_tables, table_columns, table_first;
  int looked; /* small_m_mx has found out of x: */
  int64_t unit_range;
} moe_small_m_;

/* A few rows of A times n columns of k elements each that are read once: a column's lie side by side, the next one's
   `stride` bytes on. Column j's sum for row i is at c[64*i + j], and is added to. */
typedef struct moe_small_m_columns_ {
  const char *base;
  int64_t stride, size, n, k; /* size: bytes of an element */
  moe_dtype dtype;
  const char *x; /* A's rows packed, x_stride bytes apart */
  int64_t x_stride, rows;
  float *c;
  moe_prefetch_at_ *fetch; /* as many lines are prefetched as are read */
} moe_small_m_columns_;

/* Where the sums of a part's columns from j on are, if those of the `wide` columns before are at c: `width` columns of
   it lie side by side in a panel. */
MOE_INLINE float *moe_small_m_c_(const moe_small_m_ *s, float *c, int64_t j, int64_t wide, int64_t width) {
  return c + wide + (j & (width - 1) ? 0 : s->c_stride - width);
}

typedef struct moe_gemm_table_ {
  moe_blocking_ blocking;
  moe_panel_kind_ panel[MOE_PRODUCTS_]; /* the kind of panel each product takes */
  int bf16_by_mode; /* ukernel[MOE_PRODUCT_BF16] relies on the flushing mode of the floating-point environment */
  moe_ukernel_fn_ ukernel[MOE_PRODUCTS_];
  moe_pack_rows_fn_ pack_rows[MOE_PANEL_KINDS_][MOE_DTYPE_COUNT_];
  /* An f32 panel, or half of one, from n columns, 64 or 32, of k elements of 2 bytes each, `stride` bytes apart, of
     which whole vectors are read; or NULL. */
  void (*transpose_u16[MOE_DTYPE_COUNT_])(float *panel, const void *columns, int64_t stride, int64_t n, int64_t k);
  void (*pair_panel)(void *pairs, const float *panel, int64_t k); /* if there are pairs: those of an f32 panel */
  /* Packs B while it multiplies: MOE_MR rows, an even k, of any dtype, of pairs bf16 only; or NULL. */
  moe_ukernel_fn_ ukernel_pack_b[MOE_PANEL_KINDS_];
  /* Packed A times packed B: A is a panel, too, row i its column i, and the sums can be stored at once; or NULL. */
  moe_ukernel_fn_ ukernel_packed_a[MOE_PANEL_KINDS_];
  /* Nothing is packed. Of a dtype; or NULL. bf16 products rely on the flushing mode. */
  void (*small_m)(const moe_small_m_ *small_m);
  void (*small_m_bf16)(const moe_small_m_ *small_m);                           /* of bf16, in bf16 products; or NULL */
  void (*small_m_columns[MOE_PRODUCTS_])(const moe_small_m_columns_ *columns); /* of a dtype, of pairs bf16; or NULL */
} moe_gemm_table_;

#endif
