/* The tile that packs: a whole tile of rows times columns where they lie, which become the panel for the rows that
   follow. Stores and conversions hide behind the products. Included once per format. */

/* Columns [col, col + MOE_TILE_VECTORS * MOE_W) of MOE_TILE_ROWS rows times what becomes the panel on the way. */
MOE_INLINE void MOE_KF(pack_tile_columns)(const moe_tile_ *t, int64_t col) {
  MOE_V(f) acc[MOE_TILE_ROWS][MOE_TILE_VECTORS], b[MOE_TILE_VECTORS];
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE), half = MOE_PANEL / 2, step = t->step, stride = t->stride;
  float *panel = t->packed + col;
  const char *fetch = t->fetch.at, *soon = t->soon, *src[MOE_TILE_VECTORS];
  int64_t at = 0;
  MOE_UNROLL
  for (int j = 0; j < MOE_TILE_VECTORS; j++) {
    const int64_t column = col + j * MOE_W;
    src[j] = t->base[column / half] + column % half * size;
  }
  MOE_K(tile_begin)(MOE_TILE_ROWS, t->c + col, t->add, acc);
  for (int64_t left = t->k / 2; left > 0; left -= t->fetch.run, fetch += t->fetch.skip) {
    for (int64_t p = moe_min_(left, t->fetch.run); p > 0; p--, at += step, panel += 2 * MOE_PANEL) {
      __builtin_prefetch(fetch, 0, 2);
      fetch += t->fetch.stride;
      __builtin_prefetch(soon, 0, 3);
      soon += 64;
      MOE_UNROLL
      for (int odd = 1; odd >= 0; odd--) {
        MOE_UNROLL
        for (int j = 0; j < MOE_TILE_VECTORS; j++) {
          b[j] = MOE_VF(load)(src[j] + odd * stride);
          MOE_V(store)(panel + odd * MOE_PANEL + j * MOE_W, b[j]);
        }
        MOE_K(tile_step)(MOE_TILE_ROWS, t->row, at + odd * step / 2, b, 0, acc);
      }
      MOE_UNROLL
      for (int j = 0; j < MOE_TILE_VECTORS; j++) src[j] += 2 * stride;
    }
  }
  MOE_K(tile_end)(MOE_TILE_ROWS, t->c + col, acc);
}

MOE_FN void MOE_KF(pack_tile)(const moe_tile_ *t) {
  for (int j = 0; j < MOE_PANEL; j += MOE_TILE_VECTORS * MOE_W) MOE_KF(pack_tile_columns)(t, j);
}
