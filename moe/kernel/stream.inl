/* A few rows times columns that are read once (see moe_stream_): every stored element is converted once and multiplied
   with all rows, whose sums wait in cache. Included once per format, which provides stream_few (which may take
   none), stream_load (which may decline) and stream_row. */

/* k rows of n columns, any. */
MOE_FN void MOE_KF(stream_rest)(const moe_stream_ *s, const char *src, int64_t k, int64_t n, const float *x, float *c) {
  float rows[MOE_K(stream_deep) * MOE_K(stream_wide)];
  memset(rows, 0, sizeof rows);
  for (int64_t r = 0; r < k; r++)
    MOE_KF(stream_row)(s, rows + r * MOE_K(stream_wide), src + r * s->stride, n);
  MOE_K(stream_floats)(s, k, rows, x, c);
}

/* stream_deep rows of stream_wide columns. What lies ahead of them is fetched into the second-level cache, which takes
   more at a time than the first. */
MOE_INLINE void MOE_KF(stream_whole)(const moe_stream_ *s, const char *src, const float *x, float *c) {
  MOE_V(f) b[MOE_STREAM_VECTORS];
  const int plain = MOE_KF(stream_load)(s, src, b);
  const char *ahead = src + s->ahead;
  MOE_UNROLL
  for (int q = 0; q < MOE_K(stream_deep); q++, ahead += s->stride)
    for (int64_t i = 0; i < MOE_K(stream_wide) * (int64_t)sizeof(MOE_FORMAT_TYPE); i += 64)
      __builtin_prefetch(ahead + i, 0, 2);
  if (plain) MOE_K(stream_products)(s, MOE_K(stream_deep) / 2, MOE_K(stream_vectors), MOE_K(stream_deep), b, x, c);
  else MOE_KF(stream_rest)(s, src, MOE_K(stream_deep), MOE_K(stream_wide), x, c);
}

MOE_FN void MOE_KF(stream)(const moe_stream_ *s) {
  const int64_t wide = MOE_K(stream_wide), deep = MOE_K(stream_deep), size = (int64_t)sizeof(MOE_FORMAT_TYPE);
  const int64_t width = MOE_PANEL / s->parts;
  for (int64_t from = MOE_KF(stream_few)(s); from < s->k; from += deep)
    for (int64_t part = 0; part < s->parts; part++) {
      float *c = s->c + part * width;
      for (int64_t j = 0; j < s->n; j += wide, c = moe_stream_sums_(s, c, j, wide, width)) {
        const int64_t k = moe_min_(deep, s->k - from), n = moe_min_(wide, s->n - j);
        const char *src = s->base[part] + from * s->stride + j * size;
        if (k == deep && n == wide) MOE_KF(stream_whole)(s, src, s->x + from, c);
        else MOE_KF(stream_rest)(s, src, k, n, s->x + from, c);
      }
    }
}
