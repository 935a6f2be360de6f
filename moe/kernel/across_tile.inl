/* The f32 tile both of whose operands are panels, for an instruction set whose tile is as wide as one: its rows are
   columns of a panel, and their sums may leave for good. */

/* The sums of `rows` rows. */
MOE_INLINE void MOE_K(across_sums)(int rows, const moe_tile_ *t, MOE_V(f) (*acc)[MOE_TILE_VECTORS]) {
  const float *panel = (const float *)t->panel;
  moe_tile_lines_ lines = moe_tile_lines_of_(t);
  const char *row = t->row;
  MOE_K(tile_begin)(rows, t->c, t->add, acc);
  for (int64_t p = (t->k + 1) / 2; p > 0; p--, row += 2 * MOE_SQUARE_, panel += 2 * MOE_PANEL) {
    MOE_K(tile_fetch_beside)(&lines);
    MOE_OPAQUE_POINTER(row);
    MOE_K(tile_pairs)(rows, 1, 1, row, panel, 0, acc);
  }
}

/* MOE_TILE_ROWS rows of products leave c while it is in the first-level cache. */
MOE_FN void MOE_K(tile_leave)(const moe_tile_ *t) {
  const int64_t bytes = MOE_PANEL * moe_dtype_bytes_(t->to_dtype);
  char rounded[MOE_TILE_ROWS * MOE_SQUARE_];
  t->store(t->past ? rounded : t->to, t->past ? bytes : t->to_stride, NULL, t->c, MOE_TILE_ROWS, MOE_PANEL);
  for (int64_t at = 0; at < MOE_TILE_ROWS * bytes && t->past; at += MOE_W * 4)
    MOE_V(storei_past)(t->to + at / bytes * t->to_stride + at % bytes, MOE_V(loadi)(rounded + at));
}

/* Floats past the caches, unless there is a NaN, which leaves as any does. Returns whether they have left. */
MOE_INLINE int MOE_K(tile_past)(const moe_tile_ *t, MOE_V(f) (*acc)[MOE_TILE_VECTORS]) {
  int nan = 0;
  if (!t->to || !t->past || t->to_dtype != MOE_DTYPE_F32) return 0;
  MOE_UNROLL
  for (int i = 0; i < MOE_TILE_ROWS; i++) nan |= MOE_V(any_nan4)(acc[i]);
  if (nan) return 0;
  MOE_UNROLL
  for (int i = 0; i < MOE_TILE_ROWS; i++) {
    MOE_UNROLL
    for (int j = 0; j < MOE_TILE_VECTORS; j++)
      MOE_V(storei_past)(t->to + i * t->to_stride + j * MOE_W * 4, MOE_V(casti)(acc[i][j]));
  }
  return 1;
}

MOE_FN void MOE_K(across_tile_f32)(const moe_tile_ *t) {
  MOE_V(f) acc[MOE_TILE_ROWS][MOE_TILE_VECTORS];
  if (t->rows <= 4) {
    MOE_K(across_sums)(4, t, acc);
    MOE_K(tile_end)(4, t->c, acc);
    return;
  }
  MOE_K(across_sums)(MOE_TILE_ROWS, t, acc);
  if (MOE_K(tile_past)(t, acc)) return;
  MOE_K(tile_end)(MOE_TILE_ROWS, t->c, acc);
  if (t->to) MOE_K(tile_leave)(t);
}
