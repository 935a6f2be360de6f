/* The tile that gathers: of the next tile's rows, as many elements become floats, side by side, as there are k beside
   the first of its columns. Loads, conversions and stores hide behind the products. Included for f32 and bf16; fp16 is
   not worth what it takes to compile. */

/* MOE_GATHER_K_ elements of row i, from `at` on. */
MOE_INLINE void MOE_KF(gather_elements)(const moe_tile_ *t, int64_t i, int64_t at) {
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE);
  const char *from = t->later[i] + at * size, *behind = t->later[MOE_TILE_ROWS + i] + at * size;
  float *to = (float *)(void *)(t->gathered + i * MOE_PIECE_BYTES) + at;
  MOE_UNROLL
  for (int64_t j = 0; j < MOE_GATHER_K_; j += MOE_W) {
    const MOE_V(f) x = MOE_VF(load)(from + j * size);
    MOE_V(store)(to + j, x);
    if (j * size % 64 == 0) __builtin_prefetch(behind + j * size, 0, 3);
  }
}

/* A row at a time beside every other pair: all at once they would hold the products up. */
MOE_INLINE void MOE_KF(gather_tile_columns)(const moe_tile_ *t, moe_tile_lines_ *lines) {
  MOE_V(f) acc[MOE_TILE_ROWS][MOE_TILE_VECTORS];
  const char *row = t->row;
  const float *panel = (const float *)t->panel;
  MOE_K(tile_begin)(MOE_TILE_ROWS, t->c, t->add, acc);
  for (int64_t at = 0; at < t->k; at += MOE_GATHER_K_)
    for (int64_t p = 0; p < MOE_GATHER_K_ / 2; p++, row += 8, panel += 2 * MOE_PANEL) {
      MOE_K(tile_fetch_beside)(lines);
      if (p % 2 == 0 && p < 2 * MOE_TILE_ROWS) MOE_KF(gather_elements)(t, p / 2, at);
      MOE_OPAQUE_POINTER(row);
      MOE_K(tile_pairs)(MOE_TILE_ROWS, 0, 1, row, panel, 0, acc);
    }
  MOE_K(tile_end)(MOE_TILE_ROWS, t->c, acc);
}

MOE_FN void MOE_KF(gather_tile)(const moe_tile_ *t) {
  moe_tile_lines_ lines = moe_tile_lines_of_(t);
  MOE_K(tile_fetch_share)(t, 0, &lines);
  MOE_KF(gather_tile_columns)(t, &lines);
  if (MOE_K(tile_parts) > 1) MOE_K(tile_from)(t, MOE_TILE_VECTORS * MOE_W);
}
