/* A few rows times columns that are read once (see moe_stream_): every stored element is converted once and multiplied with
   all rows, whose sums wait in cache. Included once per format. */

/* Two vectors of columns over `k` rows, 1, 2 or 4, the first of them at `src`; the last n < 2 vectors are taken in part. */
MOE_INLINE void MOE_KF(stream_columns)(const moe_stream_ *s, int k, int64_t n, const char *src, const float *x, float *c) {
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE);
  const int whole = n == 2 * MOE_W;
  MOE_V(f) b[4][2];
  MOE_UNROLL
  for (int q = 0; q < k; q++) {
    MOE_UNROLL
    for (int v = 0; v < 2; v++) {
      const char *at = src + q * s->stride + v * MOE_W * size;
      const int64_t left = n - v * MOE_W;
      b[q][v] = whole || left >= MOE_W ? MOE_VF(load)(at) : left > 0 ? MOE_VF(loadn)(at, left) : MOE_V(set1)(0.0f);
    }
    for (int64_t i = 0; i < n * size; i += 64) __builtin_prefetch(src + q * s->stride + s->ahead + i);
  }
  for (int64_t r = 0; r < s->rows; r++, x += s->x_stride, c += MOE_PANEL) {
    MOE_V(f) sum[2] = {MOE_V(load)(c), MOE_V(load)(c + MOE_W)};
    MOE_UNROLL
    for (int q = 0; q < k; q += 2) {
      /* The missing odd element of the last pair is a zero in both operands. */
      const MOE_V(f) even = MOE_V(set1)(x[q]), odd = MOE_V(set1)(q + 1 < k ? x[q + 1] : 0.0f);
      MOE_UNROLL
      for (int v = 0; v < 2; v++) {
        sum[v] = MOE_V(fma)(odd, q + 1 < k ? b[q + 1][v] : MOE_V(set1)(0.0f), sum[v]);
        sum[v] = MOE_V(fma)(even, b[q][v], sum[v]);
      }
    }
    MOE_V(store)(c, sum[0]);
    MOE_V(store)(c + MOE_W, sum[1]);
  }
}

MOE_INLINE void MOE_KF(stream_rows)(const moe_stream_ *s, int k, int64_t from) {
  const int64_t width = MOE_PANEL / s->parts, size = (int64_t)sizeof(MOE_FORMAT_TYPE);
  for (int64_t part = 0; part < s->parts; part++) {
    const char *src = s->base[part] + from * s->stride;
    for (int64_t j = 0; j < s->n; j += 2 * MOE_W, src += 2 * MOE_W * size) {
      float *c = s->c + j / width * s->c_stride + part * width + j % width;
      const int64_t n = s->n - j;
      if (n >= 2 * MOE_W) MOE_KF(stream_columns)(s, k, 2 * MOE_W, src, s->x + from, c);
      else MOE_KF(stream_columns)(s, k, n, src, s->x + from, c);
    }
  }
}

MOE_FN void MOE_KF(stream)(const moe_stream_ *s) {
  int64_t from = 0;
  for (; from + 4 <= s->k; from += 4) MOE_KF(stream_rows)(s, 4, from);
  if (from + 2 <= s->k) {
    MOE_KF(stream_rows)(s, 2, from);
    from += 2;
  }
  if (from < s->k) MOE_KF(stream_rows)(s, 1, from);
}
