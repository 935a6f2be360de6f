/* The f32 product tile: MOE_TILE_ROWS x MOE_TILE_VECTORS accumulators stay in registers. The instruction set sets
   MOE_TILE_VECTORS (vectors side by side) to fit its register file; the panel's 64 columns are walked in that width. */

MOE_INLINE void MOE_K(tile_columns)(int rows, const char *const *row, int64_t step, int64_t k, const float *panel, float *c, int flush) {
  MOE_V(f) acc[MOE_TILE_ROWS][MOE_TILE_VECTORS];
  const int64_t half = step / 2;
  int64_t at = 0;
  MOE_UNROLL
  for (int i = 0; i < rows; i++) {
    MOE_UNROLL
    for (int j = 0; j < MOE_TILE_VECTORS; j++) acc[i][j] = MOE_V(load)(c + i * MOE_PANEL + j * MOE_W);
  }
  for (int64_t p = 0; p < k / 2; p++, at += step, panel += 2 * MOE_PANEL) {
    MOE_UNROLL
    for (int odd = 1; odd >= 0; odd--) {
      MOE_V(f) b[MOE_TILE_VECTORS];
      MOE_UNROLL
      for (int j = 0; j < MOE_TILE_VECTORS; j++) b[j] = MOE_V(load)(panel + odd * MOE_PANEL + j * MOE_W);
      MOE_UNROLL
      for (int i = 0; i < rows; i++) {
        MOE_V(f) a = MOE_V(set1)(moe_load_scalar(row[i] + at + odd * half));
        MOE_UNROLL
        for (int j = 0; j < MOE_TILE_VECTORS; j++) acc[i][j] = flush ? MOE_V(fma_flush)(a, b[j], acc[i][j]) : MOE_V(fma)(a, b[j], acc[i][j]);
      }
    }
  }
  if (k & 1) { /* the missing odd element of the last pair is a zero in both operands */
    MOE_V(f) zero = MOE_V(set1)(0.0f);
    MOE_UNROLL
    for (int i = 0; i < rows; i++) {
      MOE_V(f) a = MOE_V(set1)(moe_load_scalar(row[i] + at));
      MOE_UNROLL
      for (int j = 0; j < MOE_TILE_VECTORS; j++) {
        acc[i][j] = MOE_V(fma)(zero, zero, acc[i][j]);
        MOE_V(f) b = MOE_V(load)(panel + j * MOE_W);
        acc[i][j] = flush ? MOE_V(fma_flush)(a, b, acc[i][j]) : MOE_V(fma)(a, b, acc[i][j]);
      }
    }
  }
  MOE_UNROLL
  for (int i = 0; i < rows; i++) {
    MOE_UNROLL
    for (int j = 0; j < MOE_TILE_VECTORS; j++) MOE_V(store)(c + i * MOE_PANEL + j * MOE_W, acc[i][j]);
  }
}

MOE_INLINE void MOE_K(tile_any)(int rows, const char *const *row, int64_t step, int64_t k, const void *panel, float *c, int flush) {
  const float *b = (const float *)panel;
  if (MOE_W == 1) { /* nothing to gain from several rows */
    for (int i = 0; i < rows; i++)
      for (int j = 0; j < MOE_PANEL; j++) MOE_K(tile_columns)(1, row + i, step, k, b + j, c + i * MOE_PANEL + j, flush);
    return;
  }
  for (int j = 0; j < MOE_PANEL; j += MOE_TILE_VECTORS * MOE_W) {
    switch (rows) {
      case 1: MOE_K(tile_columns)(1, row, step, k, b + j, c + j, flush); break;
      case 2: MOE_K(tile_columns)(2, row, step, k, b + j, c + j, flush); break;
      case 3: MOE_K(tile_columns)(3, row, step, k, b + j, c + j, flush); break;
      case 4: MOE_K(tile_columns)(4, row, step, k, b + j, c + j, flush); break;
      case 5: MOE_K(tile_columns)(5, row, step, k, b + j, c + j, flush); break;
      default: MOE_K(tile_columns)(MOE_TILE_ROWS, row, step, k, b + j, c + j, flush); break;
    }
  }
}

MOE_FN void MOE_K(tile_f32)(int rows, const char *const *row, int64_t step, int64_t k, const void *panel, float *c) {
  MOE_K(tile_any)(rows, row, step, k, panel, c, 0);
}

#if !MOE_BF16_BY_MODE
MOE_FN void MOE_K(tile_flush)(int rows, const char *const *row, int64_t step, int64_t k, const void *panel, float *c) {
  MOE_K(tile_any)(rows, row, step, k, panel, c, 1);
}
#endif
