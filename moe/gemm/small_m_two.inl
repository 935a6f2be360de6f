/* Small-m products for so few rows of A that memory takes longer: two rows of B are read side by side from end to end,
   in the order that memory sends fastest. From the second-level cache they are prefetched into the first, too: products
   that wait for a load would hold up the prefetches behind it. Not for codes. */

/* small_m_wide columns of two rows of B; those `prefetch` and l1_distance bytes further on are prefetched. */
MOE_INLINE void MOE_K(small_m_load_two)(const moe_small_m_ *s, const char *src, int64_t l1_distance, int drops,
                                        MOE_V(f) * above, MOE_V(f) * below) {
  switch (s->dtype) {
#define MOE_SMALL_M_LOAD_(name, type, NAME)                                                     \
  case MOE_DTYPE_##NAME:                                                                        \
    MOE_CAT(moe_small_m_load_two_##name##_, MOE_ISA)(s, src, l1_distance, drops, above, below); \
    break;
    default: MOE_DTYPE_LIST(MOE_SMALL_M_LOAD_)
#undef MOE_SMALL_M_LOAD_
  }
}

/* The pair of elements from `from` on of each row of A times the two rows of B, the odd one first. `rows` is s->rows;
   where it is known to be one, its elements stay in registers. */
MOE_INLINE void MOE_K(small_m_two)(int64_t rows, const moe_small_m_ *s, int64_t from) {
  const int64_t wide = MOE_K(small_m_wide), size = s->size, width = MOE_NR / s->parts;
  const int64_t stride = s->stride, run = s->n * size;
  const int64_t reach = run <= 2 * MOE_SMALL_M_L1_BYTES ? run : MOE_SMALL_M_L1_BYTES;
  MOE_V(f) even = MOE_V(set1)(s->x[from]), odd = MOE_V(set1)(s->x[from + 1]);
  for (int64_t part = 0; part < s->parts; part++) {
    const char *src = s->base[part] + from * stride;
    float *c = s->c + part * width;
    int64_t j = 0, l1_distance = reach; /* of prefetches into the first-level cache; behind a row's last ones, in the
                                           next two rows */
    for (int64_t end = s->n - reach / size; j < s->n; end = s->n, l1_distance += 2 * stride - run)
      for (; j < end; src += wide * size, j += wide, c = moe_small_m_c_(s, c, j, wide, width)) {
        MOE_V(f) above[MOE_K(small_m_vectors)], below[MOE_K(small_m_vectors)];
        MOE_K(small_m_load_two)(s, src, l1_distance, rows == 1 && s->repeats_prefetches, above, below);
        const float *x = s->x + from;
        float *sum = c;
        for (int64_t r = 0; r < rows; r++, x += s->x_stride, sum += MOE_NR) {
          if (rows > 1) even = MOE_V(set1)(x[0]), odd = MOE_V(set1)(x[1]);
          MOE_UNROLL
          for (int v = 0; v < MOE_K(small_m_vectors); v++) {
            const MOE_V(f) sums = MOE_V(fma)(odd, below[v], MOE_V(load)(sum + v * MOE_W));
            MOE_V(store)(sum + v * MOE_W, MOE_V(fma)(even, above[v], sums));
          }
        }
      }
  }
}

/* Returns how many of the k rows of B were multiplied: all pairs, or none. */
MOE_FN int64_t MOE_K(small_m_first)(const moe_small_m_ *s) {
  int64_t from = 0;
  if (s->rows > s->two_rows || s->n % MOE_K(small_m_wide) != 0) return 0;
  for (; from + 2 <= s->k; from += 2)
    if (s->rows == 1) MOE_K(small_m_two)(1, s, from);
    else MOE_K(small_m_two)(s->rows, s, from);
  return from;
}
