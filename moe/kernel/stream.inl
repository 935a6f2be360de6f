/* A few rows times columns that are read once (see moe_stream_): every stored element is converted once and multiplied
   with all rows, whose sums wait in cache. Included once per format, which provides stream_load and stream_row. */

enum { MOE_KF(stream_wide) = 2 * MOE_W, MOE_KF(stream_deep) = 2 * MOE_TILE_VECTORS };

/* stream_deep rows of stream_wide columns. */
MOE_INLINE void MOE_KF(stream_whole)(const moe_stream_ *s, const char *src, const float *x, float *c) {
  MOE_V(f) b[4 * MOE_TILE_VECTORS];
  MOE_KF(stream_load)(s, src, b);
  for (int q = 0; q < MOE_KF(stream_deep); q++)
    for (int64_t i = 0; i < MOE_KF(stream_wide) * (int64_t)sizeof(MOE_FORMAT_TYPE); i += 64)
      __builtin_prefetch(src + q * s->stride + s->ahead + i);
  MOE_K(stream_products)(s, MOE_TILE_VECTORS, 2, MOE_KF(stream_deep), b, x, c);
}

/* k rows of n columns where either are fewer. */
MOE_FN void MOE_KF(stream_rest)(const moe_stream_ *s, const char *src, int64_t k, int64_t n, const float *x, float *c) {
  float rows[MOE_KF(stream_deep) * MOE_KF(stream_wide)];
  memset(rows, 0, sizeof rows);
  for (int64_t r = 0; r < k; r++)
    MOE_KF(stream_row)(s, rows + r * MOE_KF(stream_wide), src + r * s->stride, n);
  MOE_K(stream_floats)(s, k, rows, x, c);
}

MOE_FN void MOE_KF(stream)(const moe_stream_ *s) {
  const int64_t wide = MOE_KF(stream_wide), deep = MOE_KF(stream_deep), size = (int64_t)sizeof(MOE_FORMAT_TYPE);
  const int64_t width = MOE_PANEL / s->parts;
  for (int64_t from = 0; from < s->k; from += deep)
    for (int64_t part = 0; part < s->parts; part++)
      for (int64_t j = 0; j < s->n; j += wide) {
        const int64_t k = moe_min_(deep, s->k - from), n = moe_min_(wide, s->n - j);
        const char *src = s->base[part] + from * s->stride + j * size;
        float *c = s->c + j / width * s->c_stride + part * width + j % width;
        if (k == deep && n == wide) MOE_KF(stream_whole)(s, src, s->x + from, c);
        else MOE_KF(stream_rest)(s, src, k, n, s->x + from, c);
      }
}
