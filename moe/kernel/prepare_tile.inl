/* Tiles that prepare what is multiplied next, beside their products: loads, conversions and stores hide behind those.
   One for all formats, like pack_tile.inl. */

/* Of the next rows, as many elements become floats, side by side, as there are k beside the first of a tile's
   columns. */
MOE_INLINE void MOE_K(gather_elements)(moe_dtype dtype, char *to, const char *from, const char *behind, int64_t k) {
  switch (dtype) {
#define MOE_GATHER_ELEMENTS_(name, type, NAME) \
  case MOE_DTYPE_##NAME: MOE_CAT(moe_gather_elements_##name##_, MOE_ISA)(to, from, behind, k); break;
    default:
      MOE_DTYPE_LIST(MOE_GATHER_ELEMENTS_)
#undef MOE_GATHER_ELEMENTS_
  }
}

/* A column's elements, one by one: they take neither the units that multiply nor their registers. */
MOE_INLINE void MOE_K(turn_elements)(int size, char *to, const char *from) {
  MOE_UNROLL
  for (int e = 0; e < MOE_TURN_DEEP_; e++) memcpy(to + e * MOE_SQUARE_, from + e * size, (size_t)size);
}

/* turns: columns beside every pair; or else a row is gathered beside every other: all at once would hold the products
   up. */
MOE_INLINE void MOE_K(prepare_columns)(const moe_tile_ *t, moe_tile_at_ *at, int turns) {
  MOE_V(f) acc[MOE_TILE_ROWS][MOE_TILE_VECTORS];
  const char *row = at->row, *later[2 * MOE_TILE_ROWS];
  const float *panel = (const float *)t->panel;
  const moe_dtype dtype = t->dtype;
  char *to = t->gathered + (t->rows - at->rows) * MOE_PIECE_BYTES;
  moe_turning_ turning;
  if (turns) turning = moe_turning_begin_(t, at);
  else moe_tile_later_(t, at, later);
  MOE_K(tile_begin)(MOE_TILE_ROWS, at->c, t->add, acc);
  for (int64_t k = 0; k < t->k; k += MOE_PREPARE_K_) {
    for (int64_t p = 0; p < MOE_PREPARE_K_ / 2; p++, row += 8, panel += 2 * MOE_PANEL) {
      const int64_t i = p / 2;
      MOE_K(tile_fetch_beside)(at);
      if (turns) {
        if (turning.size == 2) MOE_K(turn_elements)(2, turning.to, turning.from);
        else MOE_K(turn_elements)(4, turning.to, turning.from);
        turning.from += turning.stride;
        turning.to += turning.step;
      } else if (p % 2 == 0 && i < MOE_TILE_ROWS) {
        MOE_K(gather_elements)(dtype, to + i * MOE_PIECE_BYTES, later[i], later[MOE_TILE_ROWS + i], k);
      }
      MOE_OPAQUE_POINTER(row);
      MOE_K(tile_pairs)(MOE_TILE_ROWS, 0, 1, row, panel, acc);
    }
    if (turns) moe_turning_move_(&turning);
  }
  MOE_K(tile_end)(MOE_TILE_ROWS, at->c, acc);
}

MOE_FN void MOE_K(gather_tile)(const moe_tile_ *t) {
  for (moe_tile_at_ at = moe_tile_first_(t); at.rows > 0; moe_tile_next_(t, MOE_PIECE_BYTES, &at)) {
    moe_tile_beside_(t, MOE_PIECE_BYTES, &at);
    MOE_K(tile_fetch_share)(&at, 0);
    MOE_K(prepare_columns)(t, &at, 0);
    if (MOE_K(tile_parts) > 1) MOE_K(tile_in_parts)(t, &at, MOE_TILE_VECTORS * MOE_W);
  }
}

#if MOE_TILE_ACROSS
MOE_FN void MOE_K(turn_tile)(const moe_tile_ *t) {
  for (moe_tile_at_ at = moe_tile_first_(t); at.rows > 0; moe_tile_next_(t, MOE_PIECE_BYTES, &at)) {
    moe_tile_beside_(t, MOE_PIECE_BYTES, &at);
    MOE_K(prepare_columns)(t, &at, 1);
  }
}
#endif
