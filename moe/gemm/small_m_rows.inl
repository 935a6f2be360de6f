/* Small-m products with rows of B (see moe_small_m_): every element is converted once and multiplied with all rows of
   A, whose sums wait in cache. One kernel for codes, whose constants stay in registers, and one for all other formats.
   */

/* small_m_deep rows of small_m_wide columns as vectors, row by row; returns whether that was possible. */
MOE_INLINE int MOE_K(small_m_load)(int codes, const moe_small_m_ *s, const char *src, MOE_V(f) * b) {
  if (codes) return MOE_K(small_m_load_fp8)(s, src, b);
  switch (s->dtype) {
#define MOE_SMALL_M_LOAD_(name, type, NAME) \
  case MOE_DTYPE_##NAME: MOE_CAT(moe_small_m_load_##name##_, MOE_ISA)(s, src, b); break;
    default: MOE_DTYPE_LIST(MOE_SMALL_M_LOAD_)
#undef MOE_SMALL_M_LOAD_
  }
  return 1;
}

MOE_FN void MOE_CAT(moe_load_codes_8_, MOE_ISA)(float *dst, const uint8_t *src, int64_t n,
                                                const moe_element_format_ *format);

/* Any k rows of n columns. */
MOE_FN void MOE_K(small_m_rest)(const moe_small_m_ *s, const char *src, int64_t k, int64_t n, const float *x,
                                float *c) {
  const moe_rows_ from = {src, s->stride, NULL};
  float rows[MOE_K(small_m_deep) * MOE_K(small_m_wide)];
  memset(rows, 0, sizeof rows);
  if (!s->format) s->load(rows, MOE_K(small_m_wide), &from, k, n);
  for (int64_t r = 0; r < k && s->format; r++) MOE_CAT(moe_load_codes_8_, MOE_ISA)
  (rows + r * MOE_K(small_m_wide), (const uint8_t *)moe_row_(&from, r), n, s->format);
  MOE_K(small_m_floats)(s, k, rows, x, c);
}

/* All rows of A times the elements from `first` on. */
MOE_INLINE void MOE_K(small_m_from)(int codes, const moe_small_m_ *s, int64_t first) {
  const int64_t wide = MOE_K(small_m_wide), deep = MOE_K(small_m_deep);
  const int64_t width = MOE_NR / s->parts;
  for (int64_t from = first; from < s->k; from += deep)
    for (int64_t part = 0; part < s->parts; part++) {
      const int64_t k = moe_min_(deep, s->k - from), whole = k == deep ? s->n / wide * wide : 0;
      const char *src = s->base[part] + from * s->stride;
      const float *x = s->x + from;
      float *c = s->c + part * width;
      int64_t j = 0;
      for (; j < whole; j += wide, src += wide * s->size, c = moe_small_m_c_(s, c, j, wide, width)) {
        MOE_V(f) b[MOE_SMALL_M_VECTORS];
        if (MOE_K(small_m_load)(codes, s, src, b))
          MOE_K(small_m_products)(s, MOE_K(small_m_deep) / 2, MOE_K(small_m_vectors), MOE_K(small_m_deep), b, x, c);
        else MOE_K(small_m_rest)(s, src, MOE_K(small_m_deep), MOE_K(small_m_wide), x, c);
      }
      for (; j < s->n; j += wide, src += wide * s->size, c = moe_small_m_c_(s, c, j, wide, width))
        MOE_K(small_m_rest)(s, src, k, moe_min_(wide, s->n - j), x, c);
    }
}

MOE_FN void MOE_K(small_m_fp8)(const moe_small_m_ *s) { MOE_K(small_m_from)(1, s, 0); }

MOE_FN void MOE_K(small_m)(const moe_small_m_ *s) { MOE_K(small_m_from)(0, s, MOE_K(small_m_first)(s)); }
