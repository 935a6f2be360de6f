/* The operands of a product C = A*B: rows of A, wherever they lie, and columns of B, packed, plain or to be decoded. */
#ifndef MOE_GEMM_OPERAND_H
#define MOE_GEMM_OPERAND_H

/* Bytes of a packed panel of k rows. */
MOE_FN int64_t moe_panel_bytes_(moe_panel_kind_ kind, int64_t k) {
  return moe_mul3_(moe_add_(k, k & 1), MOE_NR, kind == MOE_PANEL_F32 ? 4 : 2);
}

/* Rounds an odd k up: the row behind it of an f32 panel becomes zero. */
MOE_FN void moe_panel_even_(int64_t k, char *panel) {
  if (k % 2) memset(panel + k * MOE_NR_BYTES_, 0, MOE_NR_BYTES_);
}

/* ---------------------------------------------------------------------------------------------------------------- A */

typedef struct moe_a_ {
  moe_rows_ place; /* of each row's first element */
  int64_t rows;
  moe_dtype dtype;
  char *buffer;     /* room for the rows packed: kc blocks of all rows one after the other, or one block at a time */
  int keep, cached; /* keep: one after the other; cached: all of them are packed already */
  /* Instead of place and dtype: packs elements [from, from+k) of all rows or, with is_panel, makes a panel whose
     columns they are. `room`: for a kc block of a panel. */
  int is_panel;
  void (*pack)(const struct moe_a_ *a, const moe_kernels *kernels, int64_t from, int64_t k, char *to, char *room);
  /* With pack: the memory that those are read from, which is prefetched a kc block early. */
  void (*reads)(const struct moe_a_ *a, int64_t from, int64_t k, moe_prefetch_ *prefetch);
  const void *source; /* what these need: the tensor, whose rows, and the first column */
  int64_t expert, column;
} moe_a_;

/* Rows [first, first+count) of a matrix, from element `from` on. */
MOE_FN void moe_a_from_rows_(moe_a_ *a, const moe_rows_ *rows, int64_t first, int64_t count, moe_dtype dtype,
                             int64_t from, char *buffer) {
  memset(a, 0, sizeof *a);
  a->rows = count;
  a->dtype = dtype;
  a->buffer = buffer;
  a->place = moe_rows_from_(rows, first);
  a->place.base += from * moe_dtype_bytes_(dtype);
}

/* ---------------------------------------------------------------------------------------------------------------- B */

/* Columns of k elements each, in panels of MOE_NR: packed ones, panel_bytes apart, or where they lie in memory.
   Untransposed, element (k, n) of part p is at base[p] + k*stride, n elements on, and a panel takes MOE_NR/parts
   columns of each part; transposed, column n is contiguous at base[p] + n*stride. With k_second there is one part,
   which goes on at base[1] from k = k_second on. Elements that are no moe_dtype are decoded: they may lie so, or
   somewhere else with no base. */
typedef struct moe_b_ {
  const char *panel; /* or NULL */
  int64_t panel_bytes;
  int in_cache; /* the panels are, and need no prefetching */
  const char *base[2];
  int64_t parts, stride, n; /* n: columns of each part */
  int transposed;
  moe_dtype dtype;
  int64_t group; /* bytes of 32 elements side by side */
  int64_t k, k_second;
  /* Instead of dtype: makes elements [from, from+k), at most MOE_DECODE_K_, of panel p's columns a panel, an odd k
     rounded up. In bf16 products all values must be bf16's, or subnormal. Returns 0, and makes nothing of use, where
     it cannot make that kind; an f32 panel it always can. */
  int (*decode)(const struct moe_b_ *b, const moe_kernels *kernels, moe_panel_kind_ kind, int64_t p, int64_t from,
                int64_t k, char *panel);
  /* (optional) What is decoded is rows of these codes: unscaled, with `tables`, or */
  const moe_element_format_ *format;
  const uint8_t *scale[2];           /*   with a scale byte for 32 of them, rows scale_stride and groups scale_group */
  int64_t scale_stride, scale_group; /*   bytes apart. 32 codes of 4 bits are in order or, with `split`, have j+16 in */
  int split;                         /*   the byte of j */
  /* (optional, with format) Where kernels look codes up: lets small_m find the tables of its columns, from panel p on,
     and elements from `from` on. Returns for how many elements they are the same. At most table_panels panels at a
     time. in_tables: without tables codes, of rows or columns, must be decoded. */
  int64_t (*tables)(const struct moe_b_ *b, const moe_kernels *kernels, int64_t p, int64_t from, moe_small_m_ *small_m);
  int64_t table_panels;
  int in_tables;
  /* (optional) Adds a few rows' products with panel p's columns, all of k, while it decodes them. */
  void (*small_m)(const struct moe_b_ *b, const moe_kernels *kernels, int64_t p, moe_small_m_ *small_m);
  const void *source; /* what these need: the weight, and whose */
  int64_t expert;
} moe_b_;

/* Columns of one part in a panel, by constants: it is asked for every panel. */
MOE_FN int64_t moe_b_width_(const moe_b_ *b) { return b->parts == 2 ? MOE_NR / 2 : MOE_NR; }
MOE_FN int64_t moe_b_panels_(const moe_b_ *b) {
  return b->parts == 2 ? moe_ceil_div_(b->n, MOE_NR / 2) : moe_ceil_div_(b->n, MOE_NR);
}

/* How many columns of each part there are in `count` panels from p on. */
MOE_FN int64_t moe_b_columns_(const moe_b_ *b, int64_t p, int64_t count) {
  const int64_t width = moe_b_width_(b);
  return moe_min_(count * width, b->n - p * width);
}

/* Where the columns of panel p lie, of a part that has a base. */
MOE_FN const char *moe_b_at_(const moe_b_ *b, int64_t part, int64_t p) {
  const int64_t at = p * moe_b_width_(b);
  return b->base[part] + (b->transposed ? at * b->stride : at * b->group / 32);
}

/* Whether element `from` of the contraction is in the second part; and where it lies in panel p. */
MOE_FN int moe_b_second_(const moe_b_ *b, int64_t from) { return b->k_second > 0 && from >= b->k_second; }
/* How many of the k elements from `from` on are in one part. */
MOE_FN int64_t moe_b_run_(const moe_b_ *b, int64_t from, int64_t k) {
  return b->k_second > from ? moe_min_(k, b->k_second - from) : k;
}
MOE_FN const char *moe_b_from_(const moe_b_ *b, int64_t part, int64_t p, int64_t from) {
  const int second = moe_b_second_(b, from);
  const int64_t at = second ? from - b->k_second : from;
  return moe_b_at_(b, second ? 1 : part, p) + (b->transposed ? at * b->group / 32 : at * b->stride);
}

/* n columns in packed panels of `bytes` each, in cache. */
MOE_FN void moe_b_packed_(moe_b_ *b, const void *first, int64_t bytes, int64_t n, int64_t k) {
  memset(b, 0, sizeof *b);
  b->panel = (const char *)first;
  b->panel_bytes = bytes;
  b->in_cache = 1;
  b->parts = 1;
  b->n = n;
  b->k = k;
}

/* Whether it is plain columns, which are to be transposed. */
MOE_FN int moe_b_transposes_(const moe_b_ *b) { return b->transposed && !b->panel && !b->decode; }

/* The memory that elements [from, from+k) of `count` panels from p on are read from, as far as it is known. */
MOE_FN void moe_b_reads_(const moe_b_ *b, moe_panel_kind_ kind, int64_t p, int64_t count, int64_t from, int64_t k,
                         moe_prefetch_ *prefetch) {
  const int64_t n = moe_b_columns_(b, p, count);
  memset(prefetch, 0, sizeof *prefetch);
  if (b->in_cache) return;
  if (b->panel) {
    moe_prefetch_rows_(prefetch, b->panel + p * b->panel_bytes + moe_panel_bytes_(kind, from), NULL, NULL,
                       b->panel_bytes, count, moe_panel_bytes_(kind, k));
    return;
  }
  if (!b->base[moe_b_second_(b, from)]) return;
  moe_prefetch_rows_(prefetch, moe_b_from_(b, 0, p, from), b->parts == 2 ? moe_b_from_(b, 1, p, from) : NULL, NULL,
                     b->stride, b->transposed ? n : k, (b->transposed ? k : n) * b->group / 32);
}

#endif
