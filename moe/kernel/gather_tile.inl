/* The tile that gathers: of the next rows, as many elements become floats, side by side, as there are k beside the
   first of its columns. Loads, conversions and stores hide behind the products. One for all formats, like
   pack_tile.inl. */

MOE_INLINE void MOE_K(gather_elements)(moe_dtype dtype, char *to, const char *from, const char *behind, int64_t k) {
  switch (dtype) {
#define MOE_GATHER_ELEMENTS_(name, type, NAME) \
  case MOE_DTYPE_##NAME: MOE_CAT(moe_gather_elements_##name##_, MOE_ISA)(to, from, behind, k); break;
    default:
      MOE_DTYPE_LIST(MOE_GATHER_ELEMENTS_)
#undef MOE_GATHER_ELEMENTS_
  }
}

/* A row at a time beside every other pair: all at once they would hold the products up. */
MOE_INLINE void MOE_K(gather_tile_columns)(const moe_tile_ *t, moe_tile_at_ *at) {
  MOE_V(f) acc[MOE_TILE_ROWS][MOE_TILE_VECTORS];
  const char *row = at->row, *later[2 * MOE_TILE_ROWS];
  const float *panel = (const float *)t->panel;
  const moe_dtype dtype = t->dtype;
  char *to = t->gathered + (t->rows - at->rows) * MOE_PIECE_BYTES;
  moe_tile_later_(t, at, later);
  MOE_K(tile_begin)(MOE_TILE_ROWS, at->c, t->add, acc);
  for (int64_t k = 0; k < t->k; k += MOE_GATHER_K_)
    for (int64_t p = 0; p < MOE_GATHER_K_ / 2; p++, row += 8, panel += 2 * MOE_PANEL) {
      const int64_t i = p / 2;
      MOE_K(tile_fetch_beside)(at);
      if (p % 2 == 0 && i < MOE_TILE_ROWS)
        MOE_K(gather_elements)(dtype, to + i * MOE_PIECE_BYTES, later[i], later[MOE_TILE_ROWS + i], k);
      MOE_OPAQUE_POINTER(row);
      MOE_K(tile_pairs)(MOE_TILE_ROWS, 0, 1, row, panel, 0, acc);
    }
  MOE_K(tile_end)(MOE_TILE_ROWS, at->c, acc);
}

MOE_FN void MOE_K(gather_tile)(const moe_tile_ *t) {
  for (moe_tile_at_ at = moe_tile_first_(t); at.rows > 0; moe_tile_move_(t, MOE_PIECE_BYTES, &at)) {
    moe_tile_beside_(t, MOE_PIECE_BYTES, &at);
    MOE_K(tile_fetch_share)(&at, 0);
    MOE_K(gather_tile_columns)(t, &at);
    if (MOE_K(tile_parts) > 1) MOE_K(tile_in_parts)(t, &at, MOE_TILE_VECTORS * MOE_W);
  }
}
