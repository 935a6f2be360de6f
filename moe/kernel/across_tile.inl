/* The f32 tile both of whose operands are panels, for an instruction set whose tile is as wide as one: its rows are
   columns of a panel, and their sums may leave for good. Included again for one that only rounds otherwise (round2). */

/* Row i's sums go to c, or for good, past the caches; only a NaN takes the way over c. */
MOE_INLINE void MOE_K(tile_row_end)(const moe_tile_ *t, const moe_tile_at_ *at, int i, int leaves,
                                    const MOE_V(f) *sum) {
  float *c = at->c + i * MOE_PANEL;
  char *to = leaves ? at->to + i * t->to_stride : NULL;
  if (!leaves || MOE_V(any_nan4)(sum)) {
    MOE_UNROLL
    for (int j = 0; j < MOE_PANEL / MOE_W; j++) MOE_V(store)(c + j * MOE_W, sum[j]);
    if (leaves) t->store(to, 0, NULL, c, 1, MOE_PANEL);
    return;
  }
  MOE_UNROLL
  for (int j = 0; j < MOE_PANEL / MOE_W; j++) {
    if (t->to_dtype == MOE_DTYPE_F32) MOE_V(storei_past)(to + j * MOE_W * 4, MOE_V(casti)(sum[j]));
    else if (j % 2 == 0)
      MOE_V(storei_past)
      (to + j * MOE_W * 2,
       t->to_dtype == MOE_DTYPE_BF16 ? MOE_K(round2)(sum[j], sum[j + 1]) : MOE_V(halve2)(sum[j], sum[j + 1]));
  }
}

/* What is not to leave past the caches is stored while it is in the first. */
MOE_INLINE void MOE_K(tile_store)(const moe_tile_ *t, const moe_tile_at_ *at) {
  if (at->to && !t->past) t->store(at->to, t->to_stride, NULL, at->c, MOE_TILE_ROWS, MOE_PANEL);
}

/* The rows at hand, as soon as their sums are done. */
MOE_INLINE void MOE_K(across_rows)(int rows, const moe_tile_ *t, moe_tile_at_ *at, int leaves) {
  MOE_V(f) acc[MOE_TILE_ROWS][MOE_PANEL / MOE_W];
  const float *panel = (const float *)t->panel;
  const char *row = at->row;
  MOE_V(tile_begin)(rows, at->c, t->add, acc);
  for (int64_t p = (t->k + 1) / 2; p > 0; p--, row += 2 * MOE_SQUARE_, panel += 2 * MOE_PANEL) {
    MOE_V(tile_fetch_beside)(at);
    MOE_OPAQUE_POINTER(row);
    MOE_V(tile_pairs)(rows, 1, 1, row, panel, 0, acc);
  }
  MOE_UNROLL
  for (int i = 0; i < rows; i++) MOE_K(tile_row_end)(t, at, i, leaves, acc[i]);
}

MOE_FN void MOE_K(across_tile_f32)(const moe_tile_ *t) {
  for (moe_tile_at_ at = moe_tile_first_(t); at.rows > 0; moe_tile_move_(t, 4, &at)) {
    moe_tile_beside_(t, 4, &at);
    if (at.rows <= 4) MOE_K(across_rows)(4, t, &at, 0);
    else MOE_K(across_rows)(MOE_TILE_ROWS, t, &at, at.to && t->past);
    MOE_K(tile_store)(t, &at);
  }
}
