/* The f32 tile both of whose operands are panels, for an instruction set whose tile is as wide as one: its rows are
   columns of a panel, and their sums may leave for good. Included again for one that only rounds otherwise (round2). */

/* Row i in the lines that it goes to: its bytes move up behind what the panel before has left of the first. A line that
   is not filled, where the first panel begins or the last one ends, is stored in part. */
MOE_INLINE void MOE_K(tile_carry)(const moe_tile_ *t, const moe_tile_at_ *at, int64_t i, char *line) {
  char *to = at->to + i * t->to.stride, *first = moe_line_of_(to), *carry = at->carry + i * 64;
  const int64_t begun = to - first, bytes = moe_tile_to_bytes_(t);
  MOE_V(i) before = MOE_V(loadi)(carry);
  for (int64_t j = 0; j < bytes; j += 64) {
    const MOE_V(i) own = MOE_V(loadi)(line + j);
    MOE_V(storei)(line + j, MOE_V(shift_in)(before, own, begun));
    before = own;
  }
  MOE_V(storei)(carry, before);
  if (t->to.begins) MOE_V(storei_part)(first, MOE_V(loadi)(line), begun, 64);
  if (t->to.ends) MOE_V(storei_part)(first + bytes, MOE_V(shift_in)(before, before, begun), 0, begun);
}

/* Row i's sums go to c or, to leave past the caches, rounded to `lines`; only a NaN takes the way over c. */
MOE_INLINE void MOE_K(tile_row_end)(const moe_tile_ *t, const moe_tile_at_ *at, int i, char *lines,
                                    const MOE_V(f) *sum) {
  float *c = at->c + i * MOE_PANEL;
  char *line = lines ? lines + i * moe_tile_to_bytes_(t) : NULL;
  if (!lines || MOE_V(any_nan4)(sum)) {
    MOE_UNROLL
    for (int j = 0; j < MOE_PANEL / MOE_W; j++) MOE_V(store)(c + j * MOE_W, sum[j]);
    if (lines) t->store(line, 0, NULL, c, 1, MOE_PANEL);
  } else {
    MOE_UNROLL
    for (int j = 0; j < MOE_PANEL / MOE_W; j++) {
      if (t->to.dtype == MOE_DTYPE_F32) MOE_V(storei)(line + j * MOE_W * 4, MOE_V(casti)(sum[j]));
      else if (j % 2 == 0)
        MOE_V(storei)
        (line + j * MOE_W * 2,
         t->to.dtype == MOE_DTYPE_BF16 ? MOE_K(round2)(sum[j], sum[j + 1]) : MOE_V(halve2)(sum[j], sum[j + 1]));
    }
  }
}

MOE_INLINE void MOE_K(tile_line_past)(moe_past_ *past) {
  MOE_V(storei_past)(past->to, MOE_V(loadi)(past->from));
  moe_past_move_(past);
}

/* The rest of what leaves, before other rows take its place. */
MOE_INLINE void MOE_K(tile_lines_past)(moe_past_ *past) {
  while (past->left > 0) MOE_K(tile_line_past)(past);
}

/* What is not to leave past the caches is stored while it is in the first; of what is, a line will leave at a time. The
   sums of a few rows are in c either way. */
MOE_INLINE void MOE_K(tile_store)(const moe_tile_ *t, const moe_tile_at_ *at, int few, char *lines, moe_past_ *past) {
  const int64_t rows = at->now, bytes = moe_tile_to_bytes_(t);
  if (!at->to) return;
  if (t->to.past) {
    if (few) t->store(lines, bytes, NULL, at->c, rows, MOE_PANEL);
    for (int64_t i = 0; i < rows && at->carry; i++) MOE_K(tile_carry)(t, at, i, lines + i * bytes);
    *past = moe_past_begin_(&t->to, lines, at->to, rows, bytes);
  } else {
    t->store(at->to, t->to.stride, NULL, at->c, rows, MOE_PANEL);
  }
}

/* The rows at hand; lines: NULL, or where they are to be left. */
MOE_INLINE void MOE_K(across_rows)(int rows, const moe_tile_ *t, moe_tile_at_ *at, char *lines, moe_past_ *past) {
  MOE_V(f) acc[MOE_TILE_ROWS][MOE_PANEL / MOE_W];
  const float *panel = (const float *)t->panel;
  const char *row = at->row;
  MOE_V(tile_begin)(rows, at->c, t->add, acc);
  for (int64_t p = (t->k + 1) / 2; p > 0; p--, row += 2 * MOE_SQUARE_, panel += 2 * MOE_PANEL) {
    MOE_V(tile_fetch_beside)(at);
    if (past->left > 0) MOE_K(tile_line_past)(past);
    MOE_OPAQUE_POINTER(row);
    MOE_V(tile_pairs)(rows, 1, 1, row, panel, acc);
  }
  MOE_K(tile_lines_past)(past);
  MOE_UNROLL
  for (int i = 0; i < rows; i++) MOE_K(tile_row_end)(t, at, i, lines, acc[i]);
}

MOE_FN void MOE_K(across_tile_f32)(const moe_tile_ *t) {
  MOE_LINE_ALIGNED char lines[MOE_TILE_ROWS * MOE_SQUARE_];
  moe_past_ past = {0};
  for (moe_tile_at_ at = moe_tile_first_(t); at.rows > 0; moe_tile_move_(t, 4, &at)) {
    moe_tile_beside_(t, 4, &at);
    if (at.now <= 4) MOE_K(across_rows)(4, t, &at, NULL, &past);
    else MOE_K(across_rows)(MOE_TILE_ROWS, t, &at, at.to && t->to.past ? lines : NULL, &past);
    MOE_K(tile_store)(t, &at, at.now <= 4, lines, &past);
  }
  MOE_K(tile_lines_past)(&past);
}
