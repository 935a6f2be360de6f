/* What the small-m kernels share: steps of a few rows of half a panel of B. */

enum { MOE_K(small_m_wide) = MOE_NR / 2, MOE_K(small_m_vectors) = MOE_K(small_m_wide) / MOE_W };
enum { MOE_K(small_m_deep) = MOE_SMALL_M_VECTORS / MOE_K(small_m_vectors) };

/* The next `deep` rows of `bytes` bytes are prefetched into the second-level cache, which takes more at a time than the
   first. */
MOE_INLINE void MOE_K(small_m_prefetch)(int deep, int bytes, const moe_small_m_ *s, const char *src) {
  src += s->prefetch;
  MOE_UNROLL
  for (int q = 0; q < deep; q++, src += s->stride) {
    MOE_UNROLL
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(src + i, 0, 2);
  }
}

/* All rows of A times `pairs` pairs of elements, of which k are there, of `vectors` vectors of columns: element q of
   vector v is b[q * vectors + v]. */
MOE_INLINE void MOE_K(small_m_products)(const moe_small_m_ *s, int pairs, int vectors, int64_t k, const MOE_V(f) * b,
                                        const float *x, float *c) {
  for (int64_t r = 0; r < s->rows; r++, x += s->x_stride, c += MOE_NR) {
    MOE_V(f) sum[4];
    MOE_UNROLL
    for (int v = 0; v < vectors; v++) sum[v] = MOE_V(load)(c + v * MOE_W);
    MOE_UNROLL
    for (int q = 0; q < 2 * pairs; q += 2) {
      /* The missing odd element of the last pair is a zero in both operands. */
      const MOE_V(f) even = MOE_V(set1)(x[q]), odd = MOE_V(set1)(q + 1 < k ? x[q + 1] : 0.0f);
      MOE_UNROLL
      for (int v = 0; v < vectors; v++) sum[v] = MOE_V(fma)(odd, b[(q + 1) * vectors + v], sum[v]);
      MOE_UNROLL
      for (int v = 0; v < vectors; v++) sum[v] = MOE_V(fma)(even, b[q * vectors + v], sum[v]);
    }
    MOE_UNROLL
    for (int v = 0; v < vectors; v++) MOE_V(store)(c + v * MOE_W, sum[v]);
  }
}

/* The same for k rows of small_m_wide columns that are floats already. */
MOE_FN void MOE_K(small_m_floats)(const moe_small_m_ *s, int64_t k, const float *rows, const float *x, float *c) {
  for (; k > 0; k -= 2, rows += 2 * MOE_K(small_m_wide), x += 2) {
    MOE_V(f) b[2 * MOE_K(small_m_vectors)];
    MOE_UNROLL
    for (int i = 0; i < 2 * MOE_K(small_m_vectors); i++) b[i] = MOE_V(load)(rows + i * MOE_W);
    MOE_K(small_m_products)(s, 1, MOE_K(small_m_vectors), k, b, x, c);
  }
}
