/* The operands of a product: rows wherever they lie, and columns packed, plain or unpacking themselves. */
#ifndef MOE_GEMM_OPERAND_H
#define MOE_GEMM_OPERAND_H

/* Bytes of a packed panel of k rows. */
MOE_FN int64_t moe_panel_bytes_(moe_panel_kind_ kind, int64_t k) {
  return moe_mul3_(moe_add_(k, k & 1), MOE_NR, kind == MOE_PANEL_F32 ? 4 : 2);
}

/* Rounds an odd k up: an f32 panel's row behind it becomes zero. */
MOE_FN void moe_panel_even_(int64_t k, char *panel) {
  if (k % 2) memset(panel + k * MOE_NR_BYTES_, 0, MOE_NR_BYTES_);
}

/* ----------------------------------------------------------------------------------------------------- A */

typedef struct moe_a_ {
  moe_rows_ place; /* of each row's first element */
  int64_t rows;
  moe_dtype dtype;
  /* Room for the rows gathered: a piece of all rows after the other (`keep`), or one piece at a time; `held`: all
     pieces are there already. */
  char *a_packed;
  int keep, cached;
  /* Instead of place and dtype: makes elements [from, from+k) of all rows a gathered piece or, `across`, a panel whose
     columns they are. `room`: for a piece of a panel. */
  int packed;
  void (*gather)(const struct moe_a_ *a, const moe_kernels *kernels, int64_t from, int64_t k, char *to, char *room);
  /* With gather: the memory that those are read from, which is fetched a piece ahead. */
  moe_prefetch_ (*reads)(const struct moe_a_ *a, int64_t from, int64_t k);
  const void *source;     /* what these need: the tensor, */
  int64_t expert, column; /*   whose rows, and the first column */
} moe_a_;

/* Rows [first, first+count) of a matrix, from element `from` on. */
MOE_FN void moe_a_from_rows_(moe_a_ *a, const moe_rows_ *rows, int64_t first, int64_t count, moe_dtype dtype,
                             int64_t from, char *a_packed) {
  const int64_t size = moe_dtype_bytes_(dtype);
  memset(a, 0, sizeof *a);
  a->rows = count;
  a->dtype = dtype;
  a->a_packed = a_packed;
  a->place = moe_rows_from_(rows, first);
  a->place.base += from * size;
}

/* n columns of a panel of k as rows, `pitch` bytes apart and with room for 64: the panel is read, and the rows are
   written, a vector beyond. */
MOE_FN void moe_transpose_panel_(const moe_kernels *kernels, moe_panel_kind_ kind, const char *panel, int64_t k,
                                 int64_t n, char *rows, int64_t pitch) {
  const int64_t words = kind == MOE_PANEL_F32 ? moe_even_(k) : moe_even_(k) / 2;
  for (int64_t at = 0; at < words; at += MOE_NR)
    kernels->vec->transpose_words(rows + at * 4, pitch, panel + at * MOE_NR_BYTES_, MOE_NR_BYTES_,
                                  moe_min_(MOE_NR, words - at), n);
}

/* ---------------------------------------------------------------------------------------------------- B */

/* Columns of k elements each: packed panels of 64, panel_bytes apart, or where they lie in memory. Untransposed,
   element (k, n) of part p is at base[p] + k*stride, n elements on, and a panel takes 64/parts columns of each part;
   transposed, column n is contiguous at base[p] + n*stride. Elements that are no moe_dtype unpack themselves: they may
   lie so, or somewhere else with no base; or with one part that goes on at base[1] from k = turn on. */
typedef struct moe_b_ {
  const char *panel; /* or NULL */
  int64_t panel_bytes;
  int in_cache; /* the panels are, and need no fetching */
  const char *base[2];
  int64_t parts, stride, n; /* n: columns of each part */
  int transposed;
  moe_dtype dtype;
  int64_t group;       /* bytes of 32 elements side by side */
  int64_t k, k_second; /* turn: see above, or 0 */
  /* Instead of dtype: makes elements [from, from+k), at most MOE_DECODE_K_, of at most one panel's columns a panel, an
     odd k rounded up. In bf16 products all values must be bf16's, or subnormal. Returns 0, and does nothing, where it
     cannot make that kind; an f32 panel it always can. */
  int (*decode)(const struct moe_b_ *b, const moe_kernels *kernels, moe_panel_kind_ kind, int64_t from, int64_t k,
                char *panel);
  const moe_element_format_ *format; /* (optional) What unpacks itself is rows of these codes, unscaled */
  /* (optional) Adds a few rows' products with one panel's columns, all of k, while it unpacks them. */
  void (*small_m)(const struct moe_b_ *b, const moe_kernels *kernels, moe_small_m_ *small_m);
  const void *source;     /* what these need: the weight, */
  int64_t expert, column; /*   whose, and the first column of each part */
} moe_b_;

/* One part's columns of a panel. */
MOE_FN int64_t moe_b_width_(const moe_b_ *b) { return b->parts == 2 ? MOE_NR / 2 : MOE_NR; }
/* By constants: it is asked beside every panel. */
MOE_FN int64_t moe_b_panels_(const moe_b_ *b) {
  return b->parts == 2 ? moe_ceil_div_(b->n, MOE_NR / 2) : moe_ceil_div_(b->n, MOE_NR);
}

/* Panels [first, first+count), as far as there are any. */
MOE_FN moe_b_ moe_b_part_(const moe_b_ *b, int64_t first, int64_t count) {
  const int64_t width = moe_b_width_(b), at = first * width;
  moe_b_ part = *b;
  part.n = moe_min_(count * width, b->n - at);
  part.column += at;
  if (b->panel) part.panel += first * b->panel_bytes;
  for (int p = 0; p < 2 && b->base[p]; p++) part.base[p] += b->transposed ? at * b->stride : at * b->group / 32;
  return part;
}

/* A matrix whose rows are the columns: column n contiguous at base + n*stride. */
MOE_FN moe_b_ moe_b_transposed_(const char *base, int64_t stride, int64_t n, moe_dtype dtype, int64_t k) {
  moe_b_ b = {0};
  b.base[0] = base;
  b.parts = b.transposed = 1;
  b.stride = stride;
  b.n = n;
  b.dtype = dtype;
  b.group = 32 * moe_dtype_bytes_(dtype);
  b.k = k;
  return b;
}

/* n columns in packed panels of `bytes` each, in cache. */
MOE_FN moe_b_ moe_b_packed_(const void *first, int64_t bytes, int64_t n, int64_t k) {
  moe_b_ b = {0};
  b.panel = (const char *)first;
  b.panel_bytes = bytes;
  b.in_cache = 1;
  b.parts = 1;
  b.n = n;
  b.k = k;
  return b;
}

MOE_FN void moe_decode_b_(const moe_kernels *kernels, moe_panel_kind_ kind, const moe_b_ *b, int64_t from, int64_t k,
                          char *panel) {
  float decoded[MOE_DECODE_K_ * MOE_NR];
  for (int64_t at = 0; at < k; at += MOE_DECODE_K_) {
    const int64_t n = moe_min_(MOE_DECODE_K_, k - at);
    char *to = panel + moe_panel_bytes_(kind, at);
    if (b->decode(b, kernels, kind, from + at, n, to)) continue;
    b->decode(b, kernels, MOE_PANEL_F32, from + at, n, (char *)decoded);
    kernels->gemm->pair_panel(to, decoded, n);
  }
}

/* A panel from n <= 64 columns, each of k elements side by side, `stride` bytes apart; the rest becomes zero. Elements
   turn as words, so those of 2 bytes two at a time, in the order that pairs have. Only bf16 becomes pairs. */
MOE_FN void moe_pack_columns_(const moe_kernels *kernels, moe_panel_kind_ kind, moe_dtype dtype, void *panel,
                              const char *src, int64_t stride, int64_t k, int64_t n) {
  const int paired = kind == MOE_PANEL_PAIRS || kernels->gemm->transpose_u16[dtype];
  const int64_t size = moe_dtype_bytes_(dtype), step = paired ? 2 * MOE_NR : MOE_NR;
  float rows[MOE_NR * MOE_NR], padded[MOE_NR * MOE_NR];
  for (int64_t at = 0; at < k; at += step) {
    const int64_t left = moe_min_(step, k - at), words = paired ? (left + 1) / 2 : moe_even_(left);
    const int plain = paired || dtype == MOE_DTYPE_F32;
    char *to = (char *)panel + moe_panel_bytes_(kind, at);
    moe_rows_ columns = {src + at * size, stride, NULL};
    const int whole = left == step && n == MOE_NR;
    if (!plain || !whole) {
      if (!whole) memset(rows, 0, sizeof rows);
      if (!plain) kernels->vec->load_rows[dtype](rows, MOE_NR, &columns, n, left);
      for (int64_t i = 0; i < n && plain; i++) memcpy(rows + i * MOE_NR, moe_row_(&columns, i), (size_t)(left * size));
      columns.base = (const char *)rows, columns.stride = MOE_NR_BYTES_;
    }
    if (paired && kind == MOE_PANEL_F32) {
      kernels->gemm->transpose_u16[dtype]((float *)(void *)to, columns.base, columns.stride, left);
      continue;
    }
    char *square = left < step ? (char *)padded : to;
    kernels->vec->transpose_words(square, MOE_NR_BYTES_, columns.base, columns.stride, MOE_NR, words);
    if (square != to) memcpy(to, padded, (size_t)(words * MOE_NR_BYTES_));
  }
}

/* Elements [from, from+k) of the B as a panel. */
MOE_FN void moe_pack_b_(const moe_kernels *kernels, moe_panel_kind_ kind, const moe_b_ *b, int64_t from, int64_t k,
                        void *panel) {
  if (b->decode) {
    moe_decode_b_(kernels, kind, b, from, k, (char *)panel);
    return;
  }
  if (b->transposed) {
    moe_pack_columns_(kernels, kind, b->dtype, panel, b->base[0] + from * moe_dtype_bytes_(b->dtype), b->stride, k,
                      b->n);
    return;
  }
  const int64_t width = moe_b_width_(b);
  for (int64_t p = 0; p < b->parts; p++) {
    const moe_rows_ rows = {b->base[p] + from * b->stride, b->stride, NULL};
    kernels->gemm->pack_rows[kind][b->dtype](panel, width * p, width, &rows, k, b->n);
  }
}

/* The memory that elements [from, from+k) will be read from, as far as it is known. */
MOE_FN moe_prefetch_ moe_b_prefetch_(moe_panel_kind_ kind, const moe_b_ *b, int64_t from, int64_t k) {
  const int second = b->k_second > 0 && from >= b->k_second;
  const int64_t at = second ? from - b->k_second : from;
  const int64_t begin = b->transposed ? at * b->group / 32 : at * b->stride;
  const moe_prefetch_ none = {0};
  if (b->in_cache) return none;
  if (b->panel)
    return moe_prefetch_rows_(b->panel + moe_panel_bytes_(kind, from), NULL, NULL, b->panel_bytes, moe_b_panels_(b),
                              moe_panel_bytes_(kind, k));
  if (!b->base[second]) return none;
  return moe_prefetch_rows_(b->base[second] + begin, b->parts == 2 ? b->base[1] + begin : NULL, NULL, b->stride,
                            b->transposed ? b->n : k, (b->transposed ? k : b->n) * b->group / 32);
}

/* Elements of a piece at most, of so many rows. Up to `rows_short`, where packing is a good part of the work, half as
   many: what is packed and multiplied stays closer. With more rows a panel comes from the second-level cache as fast
   as it is used, and sums move half as often. */
MOE_FN int64_t moe_kc_max_(const moe_kernels *kernels, moe_panel_kind_ kind, int64_t rows) {
  const int64_t whole = kernels->gemm->blocking.kc_bytes[kind] / (kind == MOE_PANEL_F32 ? 4 : 2);
  return rows <= kernels->gemm->blocking.kc_short_rows[kind] ? whole / 2 : whole;
}

/* Elements of a piece of k, as equal ones as what tiles prepare allows: a short one would hide neither the sums that it
   moves nor what leaves beside it. */
MOE_FN int64_t moe_kc_(const moe_kernels *kernels, moe_panel_kind_ kind, int64_t rows, int64_t k) {
  const int64_t most = moe_kc_max_(kernels, kind, rows);
  return moe_min_(most, moe_ceil_div_(moe_part_(moe_max_(1, k), most), MOE_OVERLAP_K_) * MOE_OVERLAP_K_);
}

/* Of how many panels k elements are fetched ahead, at most, to be multiplied with so many rows: what the second-level
   cache holds beside what is multiplied; two with many rows, whose products fill that cache and leave memory time
   enough. Of columns that lie far apart, which may share few places in it, one. Panels that are in cache leave room
   for something else. */
MOE_FN int64_t moe_panels_prefetched_(const moe_kernels *kernels, moe_panel_kind_ kind, const moe_b_ *b, int64_t k,
                                      int64_t rows) {
  if (b->in_cache) return moe_b_panels_(b);
  if (b->transposed) return 1;
  const int64_t bytes = b->panel ? moe_panel_bytes_(kind, k) : k * MOE_NR * b->group / 32;
  const int64_t fit = moe_max_(1, kernels->gemm->blocking.prefetch_bytes / moe_max_(1, bytes));
  return rows > MOE_MC_MANY ? moe_min_(2, fit) : fit;
}

/* In how many runs of panels, as equal as can be, one is fetched while the one before is multiplied: a short one would
   have to fetch as much as all others in less time. */
MOE_FN int64_t moe_prefetch_runs_(const moe_kernels *kernels, moe_panel_kind_ kind, const moe_b_ *b, int64_t k,
                                  int64_t rows) {
  return moe_ceil_div_(moe_b_panels_(b), moe_panels_prefetched_(kernels, kind, b, k, rows));
}

/* The first panel of a run. */
MOE_FN int64_t moe_run_first_(const moe_b_ *b, int64_t runs, int64_t run) { return run * moe_b_panels_(b) / runs; }

/* Whether it is plain columns, which are to turn. */
MOE_FN int moe_b_transposes_(const moe_b_ *b) { return b->transposed && !b->panel && !b->decode; }

/* Whether rows are so few that these stream past, each turning on the way. */
MOE_FN int moe_small_m_takes_columns_(const moe_kernels *kernels, moe_product_ product, const moe_b_ *b, int64_t rows) {
  const int few = 2 * rows <= kernels->gemm->blocking.small_m_columns_rows * moe_dtype_bytes_(b->dtype);
  return kernels->gemm->small_m_columns[product] && few && moe_b_transposes_(b);
}

/* Elements of each at a time: pieces of k that long, as equally many as can be. */
MOE_FN int64_t moe_small_m_columns_k_(const moe_b_ *b, int64_t kc) {
  const int64_t most = MOE_SMALL_M_COLUMN_BYTES / (kc * moe_dtype_bytes_(b->dtype));
  return moe_min_(b->k, kc * moe_part_(moe_ceil_div_(b->k, kc), moe_max_(1, most)));
}

/* What a product of so many rows reads first. */
MOE_FN moe_prefetch_ moe_b_first_(const moe_kernels *kernels, moe_product_ product, const moe_b_ *b, int64_t rows) {
  const moe_panel_kind_ kind = kernels->gemm->panel[product];
  const int64_t kc = moe_kc_(kernels, kind, rows, b->k), k = moe_min_(kc, b->k);
  if (moe_small_m_takes_columns_(kernels, product, b, rows))
    return moe_prefetch_rows_(b->base[0], NULL, NULL, b->stride, moe_min_(b->n, MOE_SMALL_M_COLUMNS_AT_ONCE),
                              moe_small_m_columns_k_(b, kc) * moe_dtype_bytes_(b->dtype));
  const moe_b_ first = moe_b_part_(b, 0, moe_run_first_(b, moe_prefetch_runs_(kernels, kind, b, k, rows), 1));
  return moe_b_prefetch_(kind, &first, 0, k);
}

#endif
