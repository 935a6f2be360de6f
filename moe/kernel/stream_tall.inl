/* The streams of stream.inl for so few rows that their sums stay in registers: an element is converted when its turn
   comes, and MOE_STREAM_TALL rows of columns are read side by side. Included once per format with a vector load. */

/* `rows` rows times MOE_STREAM_TALL rows of stream_wide columns. */
MOE_INLINE void MOE_KF(stream_tall)(int rows, const moe_stream_ *s, const char *src, const float *x, float *c,
                                    moe_fetch_at_ *ahead) {
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE);
  MOE_V(f) sum[MOE_STREAM_ROWS][MOE_K(stream_vectors)];
  MOE_UNROLL
  for (int r = 0; r < rows; r++) {
    MOE_UNROLL
    for (int v = 0; v < MOE_K(stream_vectors); v++) sum[r][v] = MOE_V(load)(c + r * MOE_PANEL + v * MOE_W);
  }
  for (int pair = 0; pair < MOE_STREAM_TALL; pair += 2, src += 2 * s->stride, x += 2) {
    MOE_UNROLL
    for (int odd = 1; odd >= 0; odd--) {
      const char *row = src + odd * s->stride;
      for (int64_t i = 0; i < MOE_K(stream_wide) * size; i += 64) moe_fetch_next_(ahead);
      MOE_UNROLL
      for (int v = 0; v < MOE_K(stream_vectors); v++) {
        const MOE_V(f) b = MOE_VF(load)(row + v * MOE_W * size);
        MOE_UNROLL
        for (int r = 0; r < rows; r++) sum[r][v] = MOE_V(fma)(MOE_V(set1)(x[r * s->x_stride + odd]), b, sum[r][v]);
      }
    }
  }
  MOE_UNROLL
  for (int r = 0; r < rows; r++) {
    MOE_UNROLL
    for (int v = 0; v < MOE_K(stream_vectors); v++) MOE_V(store)(c + r * MOE_PANEL + v * MOE_W, sum[r][v]);
  }
}

/* How many of the k rows of columns went so: all that make whole steps, or none. */
MOE_FN int64_t MOE_KF(stream_few)(const moe_stream_ *s) {
  const int64_t wide = MOE_K(stream_wide), size = (int64_t)sizeof(MOE_FORMAT_TYPE), width = MOE_PANEL / s->parts;
  int64_t from = 0;
  if (s->rows > MOE_STREAM_ROWS || s->n % wide != 0) return 0;
  for (; from + MOE_STREAM_TALL <= s->k; from += MOE_STREAM_TALL)
    for (int64_t part = 0; part < s->parts; part++) {
      moe_fetch_at_ ahead = moe_stream_fetch_(s, part, from, s->n * size);
      for (int64_t j = 0; j < s->n; j += wide) {
        const char *src = s->base[part] + from * s->stride + j * size;
        const float *x = s->x + from;
        float *c = s->c + j / width * s->c_stride + part * width + j % width;
        switch (s->rows) {
          case 1: MOE_KF(stream_tall)(1, s, src, x, c, &ahead); break;
          case 2: MOE_KF(stream_tall)(2, s, src, x, c, &ahead); break;
          default: MOE_KF(stream_tall)(MOE_STREAM_ROWS, s, src, x, c, &ahead); break;
        }
      }
    }
  return from;
}
