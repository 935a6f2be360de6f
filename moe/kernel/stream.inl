/* A few rows times columns that are read once (see moe_stream_): every stored element is converted once and multiplied
   with all rows, whose sums wait in cache. Included once per format, which provides stream_load. */

/* n columns, at most two vectors, over k rows, the first of them at `src`: MOE_TILE_VECTORS pairs, or with `pairs` = 1
   what is left. */
MOE_INLINE void MOE_KF(stream_columns)(const moe_stream_ *s, int pairs, int64_t k, int64_t n, const char *src,
                                       const float *x, float *c) {
  MOE_V(f) b[4 * MOE_TILE_VECTORS];
  MOE_KF(stream_load)(s, pairs, k, n, src, b);
  for (int q = 0; q < 2 * pairs; q++)
    for (int64_t i = 0; i < n * (int64_t)sizeof(MOE_FORMAT_TYPE); i += 64)
      __builtin_prefetch(src + q * s->stride + s->ahead + i);
  MOE_K(stream_products)(s, pairs, 2, k, b, x, c);
}

MOE_INLINE void MOE_KF(stream_rows)(const moe_stream_ *s, int pairs, int64_t k, int64_t from) {
  const int64_t width = MOE_PANEL / s->parts, size = (int64_t)sizeof(MOE_FORMAT_TYPE);
  for (int64_t part = 0; part < s->parts; part++) {
    const char *src = s->base[part] + from * s->stride;
    for (int64_t j = 0; j < s->n; j += 2 * MOE_W, src += 2 * MOE_W * size) {
      float *c = s->c + j / width * s->c_stride + part * width + j % width;
      MOE_KF(stream_columns)(s, pairs, k, moe_min_(2 * MOE_W, s->n - j), src, s->x + from, c);
    }
  }
}

MOE_FN void MOE_KF(stream)(const moe_stream_ *s) {
  int64_t from = 0;
  for (; from + 2 * MOE_TILE_VECTORS <= s->k; from += 2 * MOE_TILE_VECTORS)
    MOE_KF(stream_rows)(s, MOE_TILE_VECTORS, 2 * MOE_TILE_VECTORS, from);
  for (; from < s->k; from += 2) MOE_KF(stream_rows)(s, 1, s->k - from, from);
}
