/* The operands of a product: rows wherever they lie, and columns packed, plain or unpacking themselves. */
#ifndef MOE_KERNEL_OPERANDS_H
#define MOE_KERNEL_OPERANDS_H

/* Bytes of a packed panel of k rows. */
MOE_FN int64_t moe_panel_bytes_(moe_panel_kind_ kind, int64_t k) {
  return moe_mul3_(moe_add_(k, k & 1), MOE_PANEL, kind == MOE_PANEL_F32 ? 4 : 2);
}

/* Rounds an odd k up: an f32 panel's row behind it becomes zero. */
MOE_FN void moe_panel_even_(int64_t k, char *panel) {
  if (k % 2) memset(panel + k * MOE_SQUARE_, 0, MOE_SQUARE_);
}

/* ----------------------------------------------------------------------------------------------------- left operand */

typedef struct moe_left_ {
  moe_rows_ place; /* of each row's first element */
  int64_t rows;
  moe_dtype dtype;
  /* Room for the rows gathered: a piece of all rows after the other (`keep`), or one piece at a time; `held`: all
     pieces are there already. */
  char *gathered;
  int keep, held;
  /* Instead of place and dtype: makes elements [from, from+k) of all rows a gathered piece or, `across`, a panel whose
     columns they are. `room`: for a piece of a panel. */
  int across;
  void (*gather)(const struct moe_left_ *left, const moe_kernels *kernels, int64_t from, int64_t k, char *to,
                 char *room);
  /* With gather: the memory that those are read from, which is fetched a piece ahead. */
  moe_ahead_ (*reads)(const struct moe_left_ *left, int64_t from, int64_t k);
  const void *source;     /* what these need: the tensor, */
  int64_t expert, column; /*   whose rows, and the first column */
} moe_left_;

/* Rows [first, first+count) of a matrix, from element `from` on. */
MOE_FN void moe_left_from_rows_(moe_left_ *left, const moe_rows_ *rows, int64_t first, int64_t count, moe_dtype dtype,
                                int64_t from, char *gathered) {
  const int64_t size = moe_dtype_bytes_(dtype);
  memset(left, 0, sizeof *left);
  left->rows = count;
  left->dtype = dtype;
  left->gathered = gathered;
  left->place = moe_rows_from_(rows, first);
  left->place.base += from * size;
}

/* n columns of a panel of k as rows, `pitch` bytes apart and with room for 64: the panel is read, and the rows are
   written, a vector beyond. */
MOE_FN void moe_turn_panel_(const moe_kernels *kernels, moe_panel_kind_ kind, const char *panel, int64_t k, int64_t n,
                            char *rows, int64_t pitch) {
  const int64_t words = kind == MOE_PANEL_F32 ? moe_even_(k) : moe_even_(k) / 2;
  for (int64_t at = 0; at < words; at += MOE_PANEL)
    kernels->transpose_tile(rows + at * 4, pitch, panel + at * MOE_SQUARE_, MOE_SQUARE_,
                            moe_min_(MOE_PANEL, words - at), n);
}

/* ---------------------------------------------------------------------------------------------------- right operand */

/* Columns of k elements each: packed panels of 64, panel_bytes apart, or where they lie in memory. Untransposed,
   element (k, n) of part p is at base[p] + k*stride, n elements on, and a panel takes 64/parts columns of each part;
   transposed, column n is contiguous at base[p] + n*stride. Elements that are no moe_dtype unpack themselves: they may
   lie so, or somewhere else with no base; or with one part that goes on at base[1] from k = turn on. */
typedef struct moe_right_ {
  const char *panel; /* or NULL */
  int64_t panel_bytes;
  int in_cache; /* the panels are, and need no fetching */
  const char *base[2];
  int64_t parts, stride, n; /* n: columns of each part */
  int transposed;
  moe_dtype dtype;
  int64_t group; /* bytes of 32 elements side by side */
  int64_t k, turn; /* turn: see above, or 0 */
  /* Instead of dtype: makes elements [from, from+k), at most MOE_UNPACK_, of at most one panel's columns a panel, an
     odd k rounded up. In bf16 products all values must be bf16's, or subnormal. Returns 0, and does nothing, where it
     cannot make that kind; an f32 panel it always can. */
  int (*unpack)(const struct moe_right_ *right, const moe_kernels *kernels, moe_panel_kind_ kind, int64_t from,
                int64_t k, char *panel);
  const moe_element_format_ *format; /* (optional) What unpacks itself is rows of these codes, unscaled */
  /* (optional) Adds a few rows' products with one panel's columns, all of k, while it unpacks them. */
  void (*stream)(const struct moe_right_ *right, const moe_kernels *kernels, moe_stream_ *stream);
  const void *source;     /* what these need: the weight, */
  int64_t expert, column; /*   whose, and the first column of each part */
} moe_right_;

/* One part's columns of a panel. */
MOE_FN int64_t moe_right_width_(const moe_right_ *right) { return right->parts == 2 ? MOE_PANEL / 2 : MOE_PANEL; }
/* By constants: it is asked beside every panel. */
MOE_FN int64_t moe_right_panels_(const moe_right_ *right) {
  return right->parts == 2 ? moe_ceil_div_(right->n, MOE_PANEL / 2) : moe_ceil_div_(right->n, MOE_PANEL);
}

/* Panels [first, first+count), as far as there are any. */
MOE_FN moe_right_ moe_right_part_(const moe_right_ *right, int64_t first, int64_t count) {
  const int64_t width = moe_right_width_(right), at = first * width;
  moe_right_ part = *right;
  part.n = moe_min_(count * width, right->n - at);
  part.column += at;
  if (right->panel) part.panel += first * right->panel_bytes;
  for (int p = 0; p < 2 && right->base[p]; p++)
    part.base[p] += right->transposed ? at * right->stride : at * right->group / 32;
  return part;
}

/* A matrix whose rows are the columns: column n contiguous at base + n*stride. */
MOE_FN moe_right_ moe_right_transposed_(const char *base, int64_t stride, int64_t n, moe_dtype dtype, int64_t k) {
  moe_right_ right = {0};
  right.base[0] = base;
  right.parts = right.transposed = 1;
  right.stride = stride;
  right.n = n;
  right.dtype = dtype;
  right.group = 32 * moe_dtype_bytes_(dtype);
  right.k = k;
  return right;
}

/* n columns in packed panels of `bytes` each, in cache. */
MOE_FN moe_right_ moe_right_packed_(const void *first, int64_t bytes, int64_t n, int64_t k) {
  moe_right_ right = {0};
  right.panel = (const char *)first;
  right.panel_bytes = bytes;
  right.in_cache = 1;
  right.parts = 1;
  right.n = n;
  right.k = k;
  return right;
}

MOE_FN void moe_unpack_right_(const moe_kernels *kernels, moe_panel_kind_ kind, const moe_right_ *right, int64_t from,
                              int64_t k, char *panel) {
  float piece[MOE_UNPACK_ * MOE_PANEL];
  for (int64_t at = 0; at < k; at += MOE_UNPACK_) {
    const int64_t n = moe_min_(MOE_UNPACK_, k - at);
    char *to = panel + moe_panel_bytes_(kind, at);
    if (right->unpack(right, kernels, kind, from + at, n, to)) continue;
    right->unpack(right, kernels, MOE_PANEL_F32, from + at, n, (char *)piece);
    kernels->pair_panel(to, piece, n);
  }
}

/* A panel from n <= 64 columns, each of k elements side by side, `stride` bytes apart; the rest becomes zero. Elements
   turn as words, so those of 2 bytes two at a time, in the order that pairs have. Only bf16 becomes pairs. */
MOE_FN void moe_pack_columns_(const moe_kernels *kernels, moe_panel_kind_ kind, moe_dtype dtype, void *panel,
                              const char *src, int64_t stride, int64_t k, int64_t n) {
  const int paired = kind == MOE_PANEL_PAIRS || kernels->turn_halves[dtype];
  const int64_t size = moe_dtype_bytes_(dtype), step = paired ? 2 * MOE_PANEL : MOE_PANEL;
  float rows[MOE_PANEL * MOE_PANEL], turned[MOE_PANEL * MOE_PANEL];
  for (int64_t at = 0; at < k; at += step) {
    const int64_t left = moe_min_(step, k - at), words = paired ? (left + 1) / 2 : moe_even_(left);
    const int plain = paired || dtype == MOE_DTYPE_F32;
    char *to = (char *)panel + moe_panel_bytes_(kind, at);
    moe_rows_ columns = {src + at * size, stride, NULL};
    const int whole = left == step && n == MOE_PANEL;
    if (!plain || !whole) {
      if (!whole) memset(rows, 0, sizeof rows);
      if (!plain) kernels->load_rows[dtype](rows, MOE_PANEL, &columns, n, left);
      for (int64_t i = 0; i < n && plain; i++)
        memcpy(rows + i * MOE_PANEL, moe_row_(&columns, i), (size_t)(left * size));
      columns.base = (const char *)rows, columns.stride = MOE_SQUARE_;
    }
    if (paired && kind == MOE_PANEL_F32) {
      kernels->turn_halves[dtype]((float *)(void *)to, columns.base, columns.stride, left);
      continue;
    }
    char *square = left < step ? (char *)turned : to;
    kernels->transpose_tile(square, MOE_SQUARE_, columns.base, columns.stride, MOE_PANEL, words);
    if (square != to) memcpy(to, turned, (size_t)(words * MOE_SQUARE_));
  }
}

/* Elements [from, from+k) of the right operand as a panel. */
MOE_FN void moe_pack_right_(const moe_kernels *kernels, moe_panel_kind_ kind, const moe_right_ *right, int64_t from,
                            int64_t k, void *panel) {
  if (right->unpack) {
    moe_unpack_right_(kernels, kind, right, from, k, (char *)panel);
    return;
  }
  if (right->transposed) {
    moe_pack_columns_(kernels, kind, right->dtype, panel, right->base[0] + from * moe_dtype_bytes_(right->dtype),
                      right->stride, k, right->n);
    return;
  }
  const int64_t width = moe_right_width_(right);
  for (int64_t p = 0; p < right->parts; p++) {
    const moe_rows_ rows = {right->base[p] + from * right->stride, right->stride, NULL};
    kernels->pack_rows[kind][right->dtype](panel, width * p, width, &rows, k, right->n);
  }
}

/* The memory that elements [from, from+k) will be read from, as far as it is known. */
MOE_FN moe_ahead_ moe_right_ahead_(moe_panel_kind_ kind, const moe_right_ *right, int64_t from, int64_t k) {
  const int second = right->turn > 0 && from >= right->turn;
  const int64_t at = second ? from - right->turn : from;
  const int64_t begin = right->transposed ? at * right->group / 32 : at * right->stride;
  const moe_ahead_ none = {0};
  if (right->in_cache) return none;
  if (right->panel)
    return moe_ahead_rows_(right->panel + moe_panel_bytes_(kind, from), NULL, NULL, right->panel_bytes,
                           moe_right_panels_(right), moe_panel_bytes_(kind, k));
  if (!right->base[second]) return none;
  return moe_ahead_rows_(right->base[second] + begin, right->parts == 2 ? right->base[1] + begin : NULL, NULL,
                         right->stride, right->transposed ? right->n : k,
                         (right->transposed ? k : right->n) * right->group / 32);
}

/* Elements of a piece at most, of so many rows. Up to `rows_short`, where packing is a good part of the work, half as
   many: what is packed and multiplied stays closer. With more rows a panel comes from the second-level cache as fast
   as it is used, and sums move half as often. */
MOE_FN int64_t moe_piece_most_(const moe_kernels *kernels, moe_panel_kind_ kind, int64_t rows) {
  const int64_t whole = kernels->piece_bytes[kind] / (kind == MOE_PANEL_F32 ? 4 : 2);
  return rows <= kernels->rows_short[kind] ? whole / 2 : whole;
}

/* Elements of a piece of k, as equal ones as what tiles prepare allows: a short one would hide neither the sums that it
   moves nor what leaves beside it. */
MOE_FN int64_t moe_piece_(const moe_kernels *kernels, moe_panel_kind_ kind, int64_t rows, int64_t k) {
  const int64_t most = moe_piece_most_(kernels, kind, rows);
  return moe_min_(most, moe_ceil_div_(moe_part_(moe_max_(1, k), most), MOE_PREPARE_K_) * MOE_PREPARE_K_);
}

/* Of how many panels k elements are fetched ahead, at most, to be multiplied with so many rows: what the second-level
   cache holds beside what is multiplied; two with many rows, whose products fill that cache and leave memory time
   enough. Of columns that lie far apart, which may share few places in it, one. Panels that are in cache leave room
   for something else. */
MOE_FN int64_t moe_panels_ahead_(const moe_kernels *kernels, moe_panel_kind_ kind, const moe_right_ *right, int64_t k,
                                 int64_t rows) {
  if (right->in_cache) return moe_right_panels_(right);
  if (right->transposed) return 1;
  const int64_t bytes = right->panel ? moe_panel_bytes_(kind, k) : k * MOE_PANEL * right->group / 32;
  const int64_t fit = moe_max_(1, kernels->ahead_bytes / moe_max_(1, bytes));
  return rows > MOE_ROWS_MANY ? moe_min_(2, fit) : fit;
}

/* In how many runs of panels, as equal as can be, one is fetched while the one before is multiplied: a short one would
   have to fetch as much as all others in less time. */
MOE_FN int64_t moe_runs_ahead_(const moe_kernels *kernels, moe_panel_kind_ kind, const moe_right_ *right, int64_t k,
                               int64_t rows) {
  return moe_ceil_div_(moe_right_panels_(right), moe_panels_ahead_(kernels, kind, right, k, rows));
}

/* The first panel of a run. */
MOE_FN int64_t moe_run_first_(const moe_right_ *right, int64_t runs, int64_t run) {
  return run * moe_right_panels_(right) / runs;
}

/* Whether it is plain columns, which are to turn. */
MOE_FN int moe_right_turns_(const moe_right_ *right) { return right->transposed && !right->panel && !right->unpack; }

/* Whether rows are so few that these stream past, each turning on the way. */
MOE_FN int moe_streams_columns_(const moe_kernels *kernels, moe_product_ product, const moe_right_ *right,
                                int64_t rows) {
  const int few = 2 * rows <= kernels->columns_rows * moe_dtype_bytes_(right->dtype);
  return kernels->stream_columns[product] && few && moe_right_turns_(right);
}

/* Elements of each at a time: pieces of k that long, as equally many as can be. */
MOE_FN int64_t moe_columns_k_(const moe_right_ *right, int64_t piece) {
  const int64_t most = MOE_COLUMN_BYTES / (piece * moe_dtype_bytes_(right->dtype));
  return moe_min_(right->k, piece * moe_part_(moe_ceil_div_(right->k, piece), moe_max_(1, most)));
}

/* What a product of so many rows reads first. */
MOE_FN moe_ahead_ moe_right_first_(const moe_kernels *kernels, moe_product_ product, const moe_right_ *right,
                                   int64_t rows) {
  const moe_panel_kind_ kind = kernels->panel[product];
  const int64_t piece = moe_piece_(kernels, kind, rows, right->k), k = moe_min_(piece, right->k);
  if (moe_streams_columns_(kernels, product, right, rows))
    return moe_ahead_rows_(right->base[0], NULL, NULL, right->stride, moe_min_(right->n, MOE_COLUMNS),
                           moe_columns_k_(right, piece) * moe_dtype_bytes_(right->dtype));
  const moe_right_ first =
      moe_right_part_(right, 0, moe_run_first_(right, moe_runs_ahead_(kernels, kind, right, k, rows), 1));
  return moe_right_ahead_(kind, &first, 0, k);
}

#endif
