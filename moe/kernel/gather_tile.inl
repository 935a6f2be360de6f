/* The tile that gathers: of the next tile's rows, as many elements become floats, side by side, as there are k beside
   the first of its columns. Loads, conversions and stores hide behind the products. Included for f32 and bf16; fp16 is
   not worth what it takes to compile. */

MOE_INLINE void MOE_KF(gather_tile_columns)(const moe_tile_ *t, moe_tile_lines_ *lines) {
  MOE_V(f) acc[MOE_TILE_ROWS][MOE_TILE_VECTORS];
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE);
  MOE_K(tile_begin)(MOE_TILE_ROWS, t->c, t->add, acc);
  for (int64_t at = 0; at < t->k; at += MOE_W) {
    MOE_UNROLL
    for (int i = 0; i < MOE_TILE_ROWS; i++) {
      const MOE_V(f) x = MOE_VF(load)(t->later[i] + at * size);
      MOE_V(store)((float *)(void *)(t->gathered + i * MOE_PIECE_BYTES) + at, x);
      __builtin_prefetch(t->later[MOE_TILE_ROWS + i] + at * size, 0, 3);
    }
    for (int64_t p = 0; p < MOE_W; p++) { /* of each pair the odd one first; one at a time compiles faster */
      const char *row = t->row + (at + (p ^ 1)) * 4;
      const float *panel = (const float *)t->panel + (at + (p ^ 1)) * MOE_PANEL;
      MOE_V(f) b[MOE_TILE_VECTORS];
      if (p % 2 == 0) MOE_K(tile_fetch_beside)(lines);
      MOE_OPAQUE_POINTER(row);
      MOE_UNROLL
      for (int j = 0; j < MOE_TILE_VECTORS; j++) b[j] = MOE_V(load)(panel + j * MOE_W);
      MOE_K(tile_step)(MOE_TILE_ROWS, row, MOE_PIECE_BYTES, b, 0, acc);
    }
  }
  MOE_K(tile_end)(MOE_TILE_ROWS, t->c, acc);
}

MOE_FN void MOE_KF(gather_tile)(const moe_tile_ *t) {
  moe_tile_lines_ lines = moe_tile_lines_of_(t);
  MOE_K(tile_fetch_share)(t, 0, &lines);
  MOE_KF(gather_tile_columns)(t, &lines);
  if (MOE_K(tile_parts) > 1) MOE_K(tile_from)(t, MOE_TILE_VECTORS * MOE_W);
}
