/* Panels of bf16 pairs and the product tile that consumes them, for an instruction set with a bf16 dot product beside a
   vocabulary whose f32 tile is as wide as a panel. Where that does two fused multiply-adds per pair of k, this does one
   dot product, to the same bits. And the f32 tile across, whose sums it rounds by its own instruction. */

MOE_INLINE MOE_V(i) MOE_K(join)(MOE_V(i) even, MOE_V(i) odd) { return MOE_V(ori)(even, MOE_V(slli)(odd, 16)); }

MOE_INLINE void MOE_K(pack_whole_pairs)(uint32_t *p, const moe_rows_ *rows, int64_t pairs, int vectors) {
  for (int64_t r = 0; r < pairs; r++, p += MOE_PANEL) {
    const char *even = moe_row_(rows, 2 * r), *odd = moe_row_(rows, 2 * r + 1);
    MOE_UNROLL
    for (int j = 0; j < vectors; j++)
      MOE_V(storei)
      (p + j * MOE_W, MOE_K(join)(MOE_V(loadu16)(even + 2 * j * MOE_W), MOE_V(loadu16)(odd + 2 * j * MOE_W)));
  }
}

/* The pair panel's columns [col, col+width) from k rows of bf16; whole parts, of 32 or 64 columns, the quick way. */
MOE_FN void MOE_K(pack_rows_pairs)(void *panel, int64_t col, int64_t width, const moe_rows_ *rows, int64_t k,
                                   int64_t n) {
  uint32_t *p = (uint32_t *)panel + col;
  const MOE_V(i) zero = MOE_V(set1i)(0u);
  int64_t done = 0;
  if (n == width) {
    if (width == MOE_PANEL) MOE_K(pack_whole_pairs)(p, rows, k / 2, MOE_PANEL / MOE_W);
    else MOE_K(pack_whole_pairs)(p, rows, k / 2, MOE_PANEL / 2 / MOE_W);
    done = k / 2 * 2;
    p += done / 2 * MOE_PANEL;
  }
  for (int64_t r = done; r < k; r += 2, p += MOE_PANEL) {
    const char *even = moe_row_(rows, r), *odd = r + 1 < k ? moe_row_(rows, r + 1) : NULL;
    int64_t i = 0;
    for (; i + MOE_W <= n; i += MOE_W)
      MOE_V(storei)(p + i, MOE_K(join)(MOE_V(loadu16)(even + 2 * i), odd ? MOE_V(loadu16)(odd + 2 * i) : zero));
    if (i < n) {
      const MOE_V(i) beside = odd ? MOE_V(loadu16n)(odd + 2 * i, n - i) : zero;
      MOE_V(storei)(p + i, MOE_K(join)(MOE_V(loadu16n)(even + 2 * i, n - i), beside));
      i += MOE_W;
    }
    for (; i < width; i += MOE_W) MOE_V(storei)(p + i, zero);
  }
}

/* The upper halves of floats. */
MOE_INLINE MOE_V(i) MOE_K(join_uppers)(MOE_V(f) even, MOE_V(f) odd) {
  return MOE_V(mux)(MOE_V(set1i)(0xffffu), MOE_V(srli)(MOE_V(casti)(even), 16), MOE_V(casti)(odd));
}

MOE_FN void MOE_K(pair_panel)(void *pairs, const float *panel, int64_t k) {
  uint32_t *p = (uint32_t *)pairs;
  for (int64_t r = 0; r < k; r += 2, p += MOE_PANEL, panel += 2 * MOE_PANEL)
    for (int j = 0; j < MOE_PANEL; j += MOE_W)
      MOE_V(storei)(p + j, MOE_K(join_uppers)(MOE_V(load)(panel + j), MOE_V(load)(panel + MOE_PANEL + j)));
}

MOE_SCHEDULED_BEGIN
#include "across_tile.inl"

/* Where cores share their way to memory, Zen 4 drops much of what is fetched for the second level: where there is time,
   it is asked for again, for the first one. */
MOE_INLINE void MOE_K(tile_fetch_pair)(moe_tile_at_ *at) {
  if (at->fetch.back) __builtin_prefetch(at->fetch.at + at->fetch.back, 0, 3);
  moe_tile_fetch_(at, 4, MOE_PIECE_BYTES);
}

/* One pair of k, of rows a piece apart or, `across`, of a panel's columns. If it is the last, each row ends as soon as
   its sums are done (see tile_row_end): stores in one block would keep the products of the next tile waiting. */
MOE_INLINE void MOE_K(tile_pair)(int rows, int across, const char *row, const MOE_V(i) *b, const moe_tile_ *t,
                                 const moe_tile_at_ *at, int last, char *lines,
                                 MOE_V(f) acc[MOE_TILE_ROWS][MOE_PANEL / MOE_W]) {
  MOE_UNROLL
  for (int i = 0; i < rows; i++) {
    MOE_V(i) a = MOE_V(set1i)(moe_loadi_scalar(row + i * (across ? 4 : MOE_PIECE_BYTES)));
    MOE_UNROLL
    for (int j = 0; j < MOE_PANEL / MOE_W; j++) acc[i][j] = MOE_K(dot2)(a, b[j], acc[i][j]);
    if (last) MOE_K(tile_row_end)(t, at, i, lines, acc[i]);
  }
}

/* The same from a packed panel, while memory is fetched. */
MOE_INLINE void MOE_K(tile_packed)(int rows, int across, const char *row, const uint32_t *panel, const moe_tile_ *t,
                                   int last, char *lines, moe_tile_at_ *at,
                                   MOE_V(f) acc[MOE_TILE_ROWS][MOE_PANEL / MOE_W]) {
  MOE_V(i) b[MOE_PANEL / MOE_W];
  MOE_K(tile_fetch_pair)(at);
  MOE_UNROLL
  for (int j = 0; j < MOE_PANEL / MOE_W; j++) b[j] = MOE_V(loadi)(panel + j * MOE_W);
  MOE_K(tile_pair)(rows, across, row, b, t, at, last, lines, acc);
}

/* past: with `across`, the rows before, on their way. */
MOE_INLINE void MOE_K(tile_pairs_rows)(int rows, int across, const moe_tile_ *t, moe_tile_at_ *at, char *lines,
                                       moe_past_ *past) {
  MOE_V(f) acc[MOE_TILE_ROWS][MOE_PANEL / MOE_W];
  const uint32_t *panel = (const uint32_t *)t->panel;
  const char *row = at->row;
  MOE_V(tile_begin)(rows, at->c, t->add, acc);
  for (int64_t p = (t->k + 1) / 2; p > 1; p--, row += across ? MOE_SQUARE_ : 4, panel += MOE_PANEL) {
    if (across && past->left > 0) MOE_K(tile_line_past)(past);
    MOE_OPAQUE_POINTER(row);
    MOE_K(tile_packed)(rows, across, row, panel, t, 0, NULL, at, acc);
  }
  if (across) MOE_K(tile_lines_past)(past);
  if (across && lines) MOE_K(tile_packed)(rows, across, row, panel, t, 1, lines, at, acc);
  else MOE_K(tile_packed)(rows, across, row, panel, t, 1, NULL, at, acc);
}

MOE_FN void MOE_K(tile_pairs)(const moe_tile_ *t) {
  for (moe_tile_at_ at = moe_tile_first_(t); at.rows > 0; moe_tile_next_(t, MOE_PIECE_BYTES, &at)) {
    moe_tile_beside_(t, MOE_PIECE_BYTES, &at);
    switch (at.now) {
      case 1:
      case 2: MOE_K(tile_pairs_rows)(2, 0, t, &at, NULL, NULL); break;
      case 3:
      case 4: MOE_K(tile_pairs_rows)(4, 0, t, &at, NULL, NULL); break;
      default: MOE_K(tile_pairs_rows)(MOE_TILE_ROWS, 0, t, &at, NULL, NULL); break;
    }
  }
}

MOE_FN void MOE_K(across_tile_pairs)(const moe_tile_ *t) {
  MOE_LINE_ALIGNED char lines[MOE_TILE_ROWS * MOE_SQUARE_];
  moe_past_ past = {0};
  for (moe_tile_at_ at = moe_tile_first_(t); at.rows > 0; moe_tile_move_(t, 4, &at)) {
    moe_tile_beside_(t, 4, &at);
    if (at.now <= 4) MOE_K(tile_pairs_rows)(4, 1, t, &at, NULL, &past);
    else MOE_K(tile_pairs_rows)(MOE_TILE_ROWS, 1, t, &at, at.to && t->to.past ? lines : NULL, &past);
    MOE_K(tile_store)(t, &at, at.now <= 4, lines, &past);
  }
  MOE_K(tile_lines_past)(&past);
}

/* Like pack_tile.inl. */
MOE_FN void MOE_K(pack_tile_pairs)(const moe_tile_ *t) {
  MOE_V(f) acc[MOE_TILE_ROWS][MOE_PANEL / MOE_W];
  const int64_t stride = t->stride, ahead = t->ahead;
  uint32_t *panel = (uint32_t *)t->packed;
  moe_tile_at_ at = moe_tile_first_(t);
  const char *src[2] = {t->base[0], t->base[1]}, *row = t->row;
  moe_tile_beside_(t, MOE_PIECE_BYTES, &at);
  MOE_V(tile_begin)(MOE_TILE_ROWS, t->c, t->add, acc);
  for (int64_t p = t->k / 2; p > 0; p--, row += 4, panel += MOE_PANEL) {
    MOE_V(i) b[MOE_PANEL / MOE_W];
    MOE_OPAQUE_POINTER(row);
    MOE_K(tile_fetch_pair)(&at);
    MOE_UNROLL
    for (int j = 0; j < MOE_PANEL / MOE_W; j++) {
      const char *even = src[j * MOE_W / (MOE_PANEL / 2)] + j * MOE_W % (MOE_PANEL / 2) * 2;
      b[j] = MOE_K(join)(MOE_V(loadu16)(even), MOE_V(loadu16)(even + stride));
      MOE_V(storei)(panel + j * MOE_W, b[j]);
      if (j * MOE_W * 2 % 64 == 0) {
        __builtin_prefetch(even + ahead, 0, 2);
        __builtin_prefetch(even + stride + ahead, 0, 2);
      }
    }
    MOE_K(tile_pair)(MOE_TILE_ROWS, 0, row, b, t, &at, 0, NULL, acc);
    src[0] += 2 * stride;
    src[1] += 2 * stride;
  }
  MOE_V(tile_end)(MOE_TILE_ROWS, t->c, acc);
  moe_tile_leave_(t, &at);
}

/* Like gather_tile: copies a line of each of the next rows beside the products with as many k. */
MOE_INLINE void MOE_K(gather_tile_rows)(const moe_tile_ *t, moe_tile_at_ *at) {
  MOE_V(f) acc[MOE_TILE_ROWS][MOE_PANEL / MOE_W];
  const uint32_t *panel = (const uint32_t *)t->panel;
  const char *row = at->row, *later[2 * MOE_TILE_ROWS];
  char *to = t->gathered + (t->rows - at->rows) * MOE_PIECE_BYTES;
  moe_tile_later_(t, at, later);
  MOE_V(tile_begin)(MOE_TILE_ROWS, at->c, t->add, acc);
  for (int64_t k = 0; k < t->k * 2; k += MOE_W * 4)
    for (int p = 0; p < MOE_W; p++, row += 4, panel += MOE_PANEL) {
      const int i = p / 2;
      if (p % 2 == 0 && i < MOE_TILE_ROWS) {
        MOE_V(storei)(to + i * MOE_PIECE_BYTES + k, MOE_V(loadi)(later[i] + k));
        __builtin_prefetch(later[MOE_TILE_ROWS + i] + k, 0, 3);
      }
      MOE_OPAQUE_POINTER(row);
      MOE_K(tile_packed)(MOE_TILE_ROWS, 0, row, panel, t, 0, NULL, at, acc);
    }
  MOE_V(tile_end)(MOE_TILE_ROWS, at->c, acc);
}

MOE_FN void MOE_K(gather_tile_pairs)(const moe_tile_ *t) {
  for (moe_tile_at_ at = moe_tile_first_(t); at.rows > 0; moe_tile_next_(t, MOE_PIECE_BYTES, &at)) {
    moe_tile_beside_(t, MOE_PIECE_BYTES, &at);
    MOE_K(gather_tile_rows)(t, &at);
  }
}

MOE_SCHEDULED_END

MOE_QUICK_WIDE_BEGIN
#define MOE_COLUMN_PAIRS 1
#include "stream_columns.inl"
#undef MOE_COLUMN_PAIRS

#include "stream_pairs.inl"

#define MOE_CODES_BITS 4
#define MOE_PLAIN MOE_V(plain_e2m1)
#include "pack_codes_pairs.inl"
#undef MOE_CODES_BITS
#undef MOE_PLAIN

#define MOE_CODES_BITS 8
#define MOE_PLAIN MOE_V(plain_fp8)
#include "pack_codes_pairs.inl"
#undef MOE_CODES_BITS
#undef MOE_PLAIN
MOE_QUICK_END

/* Everything else is the vocabulary's table; all but the first if not by `dot` products. */
MOE_FN void MOE_K(fill_table)(moe_kernels *t, int dot) {
  t->across_tile[MOE_PANEL_F32] = MOE_K(across_tile_f32);
  if (!dot) return;
  t->panel[MOE_PRODUCT_BF16] = MOE_PANEL_PAIRS;
  t->piece_bytes[MOE_PANEL_PAIRS] = MOE_PIECE_BYTES;
  t->rows_short[MOE_PANEL_PAIRS] = MOE_ROWS_SHORT;
  t->tile[MOE_PRODUCT_BF16] = MOE_K(tile_pairs);
  t->bf16_by_mode = 0;
  t->pack_rows[MOE_PANEL_PAIRS][MOE_DTYPE_BF16] = MOE_K(pack_rows_pairs);
  t->pack_tile[MOE_PANEL_PAIRS] = MOE_K(pack_tile_pairs);
  t->gather_tile[MOE_PANEL_PAIRS] = MOE_K(gather_tile_pairs);
  t->across_tile[MOE_PANEL_PAIRS] = MOE_K(across_tile_pairs);
  t->stream_pairs = MOE_K(stream_pairs);
  t->stream_columns[MOE_PRODUCT_BF16] = MOE_K(stream_columns);
  t->pair_panel = MOE_K(pair_panel);
  t->pack_pairs_columns[0] = MOE_CAT(moe_pack_pairs_columns_4_, MOE_ISA);
  t->pack_pairs_columns[1] = MOE_CAT(moe_pack_pairs_columns_8_, MOE_ISA);
  t->pack_pairs_rows[0] = MOE_CAT(moe_pack_pairs_rows_4_, MOE_ISA);
  t->pack_pairs_rows[1] = MOE_CAT(moe_pack_pairs_rows_8_, MOE_ISA);
}
