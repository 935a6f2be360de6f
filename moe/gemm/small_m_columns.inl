/* Small-m products with columns of B that lie side by side (see moe_small_m_columns_): squares of words are transposed
   in registers and multiplied with all rows of A from there. MOE_SMALL_M_PAIRS: a word is a pair of bf16 for dot
   products; else it is a float or, where elements are the upper 16 bits of floats, two. */

/* A square's words to transpose: in `room`, or where they lie; `stride` bytes from column to column. */
MOE_INLINE const char *MOE_K(column_words)(const moe_small_m_columns_ *s, const char *src, int64_t *stride,
                                           float *room) {
#if !MOE_SMALL_M_PAIRS
  switch (s->dtype) {
#define MOE_COLUMN_WORDS_(name, type, NAME) \
  case MOE_DTYPE_##NAME: return MOE_CAT(moe_column_words_##name##_, MOE_ISA)(src, stride, room);
    default: MOE_DTYPE_LIST(MOE_COLUMN_WORDS_)
#undef MOE_COLUMN_WORDS_
  }
#endif
  (void)s, (void)stride, (void)room;
  return src;
}

/* Adds a square's q-th word to a row's sums in the order of the numeric contract: of two floats the odd one comes
   first. */
MOE_INLINE MOE_V(f) MOE_K(column_word)(int uppers, const MOE_V(i) * square, int64_t q, const char *x, MOE_V(f) sum) {
#if MOE_SMALL_M_PAIRS
  (void)uppers;
  return MOE_K(dot2)(MOE_V(set1i)(moe_loadi_scalar(x + 4 * q)), square[q], sum);
#else
  const float *at = (const float *)(const void *)x;
  if (!uppers) return MOE_V(fma)(MOE_V(set1)(at[q ^ 1]), MOE_V(castf)(square[q ^ 1]), sum);
  const MOE_V(i) odd = MOE_V(andi)(square[q], MOE_V(set1i)(0xffff0000u)), even = MOE_V(slli)(square[q], 16);
  sum = MOE_V(fma)(MOE_V(set1)(at[2 * q + 1]), MOE_V(castf)(odd), sum);
  return MOE_V(fma)(MOE_V(set1)(at[2 * q]), MOE_V(castf)(even), sum);
#endif
}

/* A square of which not all columns or not all words are there. */
MOE_FN void MOE_K(column_edge)(int uppers, const moe_small_m_columns_ *s, const char *src, int64_t n, int64_t k,
                               const char *x, float *c) {
  float rows[MOE_W * MOE_W], room[MOE_W * MOE_W];
  MOE_V(i) square[MOE_W];
  const int64_t words = MOE_SMALL_M_PAIRS || uppers ? (k + 1) / 2 : moe_even_(k);
  int64_t stride = 4 * MOE_W;
  memset(rows, 0, sizeof rows);
  for (int64_t i = 0; i < n; i++) memcpy(rows + i * MOE_W, src + i * s->stride, (size_t)(k * s->size));
  const char *from = MOE_K(column_words)(s, (const char *)rows, &stride, room);
  MOE_V(transpose_tile)(square, 4 * MOE_W, from, stride, MOE_W, MOE_W);
  for (int64_t r = 0; r < s->rows; r++, x += s->x_stride, c += MOE_NR) {
    MOE_V(f) sum = MOE_V(load)(c);
    for (int64_t q = 0; q < words; q++) sum = MOE_K(column_word)(uppers, square, q, x, sum);
    MOE_V(store)(c, sum);
  }
}

MOE_INLINE void MOE_K(column_products)(int uppers, const moe_small_m_columns_ *s, const MOE_V(i) * square,
                                       const char *x, float *c) {
  for (int64_t r = 0; r < s->rows; r++, x += s->x_stride, c += MOE_NR) {
    MOE_V(f) sum = MOE_V(load)(c);
    MOE_UNROLL
    for (int q = 0; q < MOE_W; q++) sum = MOE_K(column_word)(uppers, square, q, x, sum);
    MOE_V(store)(c, sum);
  }
}

MOE_FN void MOE_K(small_m_columns)(const moe_small_m_columns_ *s) {
  const int uppers = !MOE_SMALL_M_PAIRS && MOE_IS_UPPER_(s->dtype);
  const int deep = MOE_SMALL_M_PAIRS || uppers ? 2 * MOE_W : MOE_W;
  const int64_t bytes = deep * s->size;
  moe_prefetch_at_ fetch = *s->fetch;
  for (int64_t j = 0; j < s->n; j += MOE_W) {
    const char *src = s->base + j * s->stride, *x = s->x;
    const int64_t n = moe_min_(MOE_W, s->n - j);
    float *c = s->c + j;
    for (int64_t k = s->k; k > 0; k -= deep, src += bytes, x += uppers ? 8 * MOE_W : 4 * MOE_W) {
      float room[MOE_W * MOE_W];
      int64_t stride = s->stride;
      moe_prefetch_some_(&fetch, MOE_W * bytes / 64);
      if (n < MOE_W || k < deep) {
        MOE_K(column_edge)(uppers, s, src, n, moe_min_(k, deep), x, c);
        continue;
      }
      MOE_V(i) square[MOE_W];
      const char *from = MOE_K(column_words)(s, src, &stride, room);
      MOE_V(load_columns)(from, stride, square);
      if (uppers) MOE_K(column_products)(1, s, square, x, c);
      else MOE_K(column_products)(0, s, square, x, c);
    }
  }
  *s->fetch = fetch;
}
