/* What each storage format must provide: rows to and from float, and rows packed into f32 panels. Included once per
   format. */

MOE_INLINE void MOE_KF(load_one)(float *dst, const char *src, int64_t n) {
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE);
  int64_t i = 0;
  for (; i + MOE_W <= n; i += MOE_W) MOE_V(store)(dst + i, MOE_VF(load)(src + i * size));
  if (i < n) MOE_V(storen)(dst + i, MOE_VF(loadn)(src + i * size, n - i), n - i);
}

MOE_FN void MOE_KF(load_rows)(float *dst, int64_t pitch, const moe_rows_ *src, int64_t rows, int64_t n) {
  for (int64_t i = 0; i < rows; i++, dst += pitch) MOE_KF(load_one)(dst, moe_row_(src, i), n);
}

MOE_INLINE void MOE_KF(store_one)(char *dst, const float *src, int64_t n) {
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE);
  int64_t i = 0;
  for (; MOE_FORMAT_UPPER && i + 2 * MOE_W <= n; i += 2 * MOE_W)
    MOE_V(store_uppers)(dst + i * size, MOE_V(load)(src + i), MOE_V(load)(src + i + MOE_W));
  for (; i + MOE_W <= n; i += MOE_W) MOE_VF(store)(dst + i * size, MOE_V(load)(src + i));
  if (i < n) MOE_VF(storen)(dst + i * size, MOE_V(loadn)(src + i, n - i), n - i);
}

MOE_FN void MOE_KF(store_rows)(void *dst, int64_t stride, const int32_t *index, const float *src, int64_t rows,
                               int64_t n) {
  char *row = (char *)dst;
  for (int64_t i = 0; i < rows; i++, row += stride, src += MOE_PANEL)
    MOE_KF(store_one)(index ? (char *)dst + index[i] * stride : row, src, n);
}

/* Magnitudes of a vector's bytes, one in each lane or, of 16 bits, two; the larger of two such; the largest of several
   vectors'. */
MOE_INLINE MOE_V(i) MOE_KF(magnitudes)(const char *from) {
  return sizeof(MOE_FORMAT_TYPE) == 2 ? MOE_V(andi)(MOE_V(load2x16)(from), MOE_V(set1i)(0x7fff7fffu))
                                      : MOE_V(andi)(MOE_V(loadi)(from), MOE_V(set1i)(0x7fffffffu));
}
MOE_INLINE MOE_V(i) MOE_KF(larger)(MOE_V(i) a, MOE_V(i) b) {
  return sizeof(MOE_FORMAT_TYPE) == 2 ? MOE_V(max2x16)(a, b) : MOE_V(maxi)(a, b);
}
MOE_INLINE MOE_V(i) MOE_KF(largest)(const char *from, int64_t vectors) {
  enum { step = 4 * MOE_W, some = 4 };
  MOE_V(i) most = MOE_V(set1i)(0u);
  int64_t i = 0;
  for (; i + some <= vectors; i += some, from += some * step) {
    MOE_UNROLL
    for (int j = 0; j < some; j++) most = MOE_KF(larger)(most, MOE_KF(magnitudes)(from + j * step));
  }
  for (; i < vectors; i++, from += step) most = MOE_KF(larger)(most, MOE_KF(magnitudes)(from));
  return most;
}

/* A lane's one or the larger of its two, as a float's bits. */
MOE_INLINE MOE_V(i) MOE_KF(largest_bits)(MOE_V(i) most) {
  MOE_V(f) even, odd;
  uint16_t half[2 * MOE_W];
  if (sizeof(MOE_FORMAT_TYPE) != 2) return most;
  MOE_V(store2x16)(half, MOE_V(max2x16)(most, MOE_V(srli)(most, 16)));
  MOE_VF(load2)(half, &even, &odd);
  return MOE_V(casti)(even);
}

MOE_FN uint32_t MOE_KF(magnitude)(const void *x, int64_t n) {
  const char *from = (const char *)x;
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE), in_vector = 4 * MOE_W / size, vectors = n / in_vector;
  MOE_V(i) most = MOE_KF(largest_bits)(MOE_KF(largest)(from, vectors));
  for (int64_t i = vectors * in_vector; i < n; i += MOE_W) {
    const MOE_V(f) v = n - i >= MOE_W ? MOE_VF(load)(from + i * size) : MOE_VF(loadn)(from + i * size, n - i);
    most = MOE_V(maxi)(most, MOE_V(andi)(MOE_V(casti)(v), MOE_V(set1i)(0x7fffffffu)));
  }
  return MOE_V(topi)(most);
}

/* Whole rows of `vectors` vectors each, the loop over them unrolled. */
MOE_INLINE void MOE_KF(pack_whole)(float *p, const moe_rows_ *rows, int64_t k, int vectors) {
  for (int64_t r = 0; r < k; r++, p += MOE_PANEL) {
    const char *src = moe_row_(rows, r);
    MOE_UNROLL
    for (int j = 0; j < vectors; j++)
      MOE_V(store)(p + j * MOE_W, MOE_VF(load)(src + j * MOE_W * (int64_t)sizeof(MOE_FORMAT_TYPE)));
  }
}

/* Columns [col, col+width) of an f32 panel from k rows; whole parts, of 32 or 64 columns, the quick way. */
MOE_FN void MOE_KF(pack_rows)(void *panel, int64_t col, int64_t width, const moe_rows_ *rows, int64_t k, int64_t n) {
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE), full = n / MOE_W * MOE_W;
  float *p = (float *)panel + col;
  int64_t r = 0;
  if (n == width && MOE_W > 1) {
    if (width == MOE_PANEL) MOE_KF(pack_whole)(p, rows, k, MOE_PANEL / MOE_W);
    else MOE_KF(pack_whole)(p, rows, k, MOE_PANEL / 2 / MOE_W);
    r = k;
    p += k * MOE_PANEL;
  }
  for (; r < k + (k & 1); r++, p += MOE_PANEL) {
    int64_t i = 0;
    if (r < k) {
      const char *src = moe_row_(rows, r);
      for (; i < full; i += MOE_W) MOE_V(store)(p + i, MOE_VF(load)(src + i * size));
      if (i < n) {
        MOE_V(store)(p + i, MOE_VF(loadn)(src + i * size, n - i));
        i += MOE_W;
      }
    }
    for (; i < width; i += MOE_W) MOE_V(store)(p + i, MOE_V(set1)(0.0f));
  }
}

#if MOE_BF16_BY_MODE
/* A stream's next vectors, row by row (see tile.inl), from `src` on; whether that was done. */
MOE_INLINE int MOE_KF(stream_load)(const moe_stream_ *s, const char *src, MOE_V(f) *b) {
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE);
  MOE_UNROLL
  for (int i = 0; i < MOE_STREAM_VECTORS; i++)
    b[i] = MOE_VF(load)(src + i / MOE_K(stream_vectors) * s->stride + i % MOE_K(stream_vectors) * MOE_W * size);
  return 1;
}

MOE_INLINE void MOE_KF(stream_row)(const moe_stream_ *s, float *dst, const char *src, int64_t n) {
  (void)s;
  MOE_KF(load_one)(dst, src, n);
}
#endif
