/* The tile that packs: a whole tile of rows times columns where they lie, which become the panel for the rows that
   follow. Stores and conversions hide behind the products. One for all formats, whose loads it chooses by the way: a
   tile for each would take long to compile. */

/* The next of k, and what is packed later fetched. */
MOE_INLINE void MOE_K(tile_load)(moe_dtype dtype, const char *const src[2], int64_t offset, int64_t ahead,
                                 MOE_V(f) *b) {
  switch (dtype) {
#define MOE_TILE_LOAD_(name, type, NAME) \
  case MOE_DTYPE_##NAME: MOE_CAT(moe_tile_load_##name##_, MOE_ISA)(src, offset, ahead, b); break;
    default:
      MOE_DTYPE_LIST(MOE_TILE_LOAD_)
#undef MOE_TILE_LOAD_
  }
}

/* Columns [col, col + MOE_TILE_VECTORS * MOE_W) of MOE_TILE_ROWS rows times what becomes the panel on the way. */
MOE_INLINE void MOE_K(pack_tile_columns)(const moe_tile_ *t, moe_tile_at_ *at, int64_t col) {
  MOE_V(f) acc[MOE_TILE_ROWS][MOE_TILE_VECTORS], b[MOE_TILE_VECTORS];
  const int64_t half = MOE_PANEL / 2, stride = t->stride, ahead = t->ahead;
  float *panel = (float *)t->packed + col;
  const char *src[2] = {t->base[col / half] + col % half * moe_dtype_bytes_(t->dtype), t->base[1]};
  const char *row = t->row;
  float *c = t->c + col;
  const moe_dtype dtype = t->dtype;
  MOE_OPAQUE_POINTER(c);
  MOE_K(tile_begin)(MOE_TILE_ROWS, c, t->add, acc);
  for (int64_t p = t->k / 2; p > 0; p--, row += 8, panel += 2 * MOE_PANEL) {
    MOE_K(tile_fetch_beside)(at);
    MOE_OPAQUE_POINTER(row);
    MOE_UNROLL
    for (int odd = 1; odd >= 0; odd--) {
      MOE_K(tile_load)(dtype, src, odd * stride, ahead, b);
      MOE_UNROLL
      for (int j = 0; j < MOE_TILE_VECTORS; j++) MOE_V(store)(panel + odd * MOE_PANEL + j * MOE_W, b[j]);
      MOE_K(tile_step)(MOE_TILE_ROWS, row + odd * 4, MOE_PIECE_BYTES, b, acc);
    }
    src[0] += 2 * stride;
    src[1] += 2 * stride;
  }
  MOE_K(tile_end)(MOE_TILE_ROWS, c, acc);
}

MOE_FN void MOE_K(pack_tile)(const moe_tile_ *t) {
  moe_tile_at_ at = moe_tile_first_(t);
  moe_tile_beside_(t, MOE_PIECE_BYTES, &at);
  for (int j = 0; j < MOE_PANEL; j += MOE_TILE_VECTORS * MOE_W) {
    MOE_K(tile_fetch_share)(&at, j);
    MOE_K(pack_tile_columns)(t, &at, j);
  }
  moe_tile_leave_(t, &at);
}
