/* Small-m products for one row of A, whose sums stay in registers for MOE_SMALL_M_ONE_DEEP rows of B: little arithmetic
   stands between two lines from memory. Floats come faster without software prefetches (measured: Zen 3). Not for
   codes. */

/* small_m_wide columns of each row of B. */
MOE_INLINE void MOE_K(small_m_one)(const moe_small_m_ *s, const char *src, const MOE_V(f) * x, float *c) {
  switch (s->dtype) {
#define MOE_SMALL_M_ONE_(name, type, NAME) \
  case MOE_DTYPE_##NAME: MOE_CAT(moe_small_m_one_##name##_, MOE_ISA)(s, src, x, c); break;
    default: MOE_DTYPE_LIST(MOE_SMALL_M_ONE_)
#undef MOE_SMALL_M_ONE_
  }
}

/* Returns how many of the k rows of B were multiplied. */
MOE_FN int64_t MOE_K(small_m_first)(const moe_small_m_ *s) {
  const int64_t wide = MOE_K(small_m_wide), width = MOE_NR / s->parts;
  int64_t from = 0;
  if (s->rows > 1 || s->n % wide != 0) return 0;
  for (; from + MOE_SMALL_M_ONE_DEEP <= s->k; from += MOE_SMALL_M_ONE_DEEP) {
    MOE_V(f) x[MOE_SMALL_M_ONE_DEEP];
    for (int q = 0; q < MOE_SMALL_M_ONE_DEEP; q++) x[q] = MOE_V(set1)(s->x[from + q]);
    for (int64_t part = 0; part < s->parts; part++) {
      const char *src = s->base[part] + from * s->stride;
      float *c = s->c + part * width;
      for (int64_t j = 0; j < s->n; j += wide, src += wide * s->size, c = moe_small_m_c_(s, c, j, wide, width))
        MOE_K(small_m_one)(s, src, x, c);
    }
  }
  return from;
}
