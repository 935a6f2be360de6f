/* The tile that gathers: of the next rows, as many elements become floats, side by side, as there are k beside the
   first of its columns. Loads, conversions and stores hide behind the products. Included for f32 and bf16; fp16 is
   not worth what it takes to compile. */

/* MOE_GATHER_K_ elements, of those from k on, of a row at `from`, and as many fetched at `behind`. */
MOE_INLINE void MOE_KF(gather_elements)(char *to, const char *from, const char *behind, int64_t k) {
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE);
  MOE_UNROLL
  for (int64_t j = 0; j < MOE_GATHER_K_; j += MOE_W) {
    const MOE_V(f) x = MOE_VF(load)(from + (k + j) * size);
    MOE_V(store)(to + (k + j) * 4, x);
    if (j * size % 64 == 0) __builtin_prefetch(behind + (k + j) * size, 0, 3);
  }
}

/* A row at a time beside every other pair: all at once they would hold the products up. */
MOE_INLINE void MOE_KF(gather_tile_columns)(const moe_tile_ *t, moe_tile_at_ *at) {
  MOE_V(f) acc[MOE_TILE_ROWS][MOE_TILE_VECTORS];
  const char *row = at->row, *later[2 * MOE_TILE_ROWS];
  const float *panel = (const float *)t->panel;
  char *to = t->gathered + (t->rows - at->rows) * MOE_PIECE_BYTES;
  moe_tile_later_(t, at, later);
  MOE_K(tile_begin)(MOE_TILE_ROWS, at->c, t->add, acc);
  for (int64_t k = 0; k < t->k; k += MOE_GATHER_K_)
    for (int64_t p = 0; p < MOE_GATHER_K_ / 2; p++, row += 8, panel += 2 * MOE_PANEL) {
      const int64_t i = p / 2;
      MOE_K(tile_fetch_beside)(at);
      if (p % 2 == 0 && i < MOE_TILE_ROWS)
        MOE_KF(gather_elements)(to + i * MOE_PIECE_BYTES, later[i], later[MOE_TILE_ROWS + i], k);
      MOE_OPAQUE_POINTER(row);
      MOE_K(tile_pairs)(MOE_TILE_ROWS, 0, 1, row, panel, 0, acc);
    }
  MOE_K(tile_end)(MOE_TILE_ROWS, at->c, acc);
}

MOE_FN void MOE_KF(gather_tile)(const moe_tile_ *t) {
  for (moe_tile_at_ at = moe_tile_first_(t); at.rows > 0; moe_tile_move_(t, MOE_PIECE_BYTES, &at)) {
    moe_tile_beside_(t, MOE_PIECE_BYTES, &at);
    MOE_K(tile_fetch_share)(&at, 0);
    MOE_KF(gather_tile_columns)(t, &at);
    if (MOE_K(tile_parts) > 1) MOE_K(tile_in_parts)(t, &at, MOE_TILE_VECTORS * MOE_W);
  }
}
