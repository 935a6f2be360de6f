/* A few rows of A times rows of codes under scale bytes, which are read as they lie (see moe_small_m_): groups of 32
   columns of small_m_deep rows of B are decoded in registers and multiplied with all rows of A. Of codes of 4 bits the
   low nibbles of 16 bytes become floats first, and sums stay in that order up to the last row of B. Included for codes
   of 4 and of 8 bits and, with MOE_DOT, for dot products of pairs, whose columns are in order. */

#define MOE_VC(name) MOE_CAT(MOE_CAT(moe_##name##_, MOE_CODES_BITS), MOE_CAT(_, MOE_VOCABULARY))

#if MOE_DOT
/* A group of all rows of B times all rows of A. */
MOE_INLINE void MOE_KC(code_rows_group)(const moe_small_m_ *s, const uint8_t *src, const moe_row_scales_ *t, int64_t i,
                                        const float *x, float *c) {
  enum { pairs = MOE_V(small_m_deep) / 2 };
  MOE_V(i) b[2 * pairs];
  const uint32_t *a = t->pairs;
  const moe_element_format_ f = *s->format; /* a copy, which no store can change */
  (void)x;
  MOE_UNROLL
  for (int q = 0; q < pairs; q++, src += 2 * s->stride)
    MOE_KC(row_pairs)(src, src + s->stride, t->scale[q][i], s->split, &f, b + 2 * q);
  for (int64_t r = 0; r < s->rows; r++, a += pairs, c += MOE_NR) {
    MOE_V(f) low = MOE_V(load)(c), high = MOE_V(load)(c + MOE_W);
    MOE_UNROLL
    for (int q = 0; q < pairs; q++) {
      low = MOE_K(dot2)(MOE_V(set1i)(a[q]), b[2 * q], low);
      high = MOE_K(dot2)(MOE_V(set1i)(a[q]), b[2 * q + 1], high);
    }
    MOE_V(store)(c, low);
    MOE_V(store)(c + MOE_W, high);
  }
}
#else
/* Codes [g*32, g*32+32) of a row, of any kind, as far as they are there, or the even ones first. */
MOE_FN void MOE_KC(code_row_any)(const moe_small_m_ *s, int64_t row, int64_t g, int even_first, float *to) {
  float panel[MOE_NR];
  moe_codes_ codes = {0};
  codes.format = s->format;
  codes.codes = (const uint8_t *)s->base[0] + row * s->stride + g * s->group;
  codes.scale = s->scale + row * s->scale_stride + g * s->scale_group;
  codes.width = 32, codes.k = 1;
  codes.n = moe_min_(32, s->n - g * 32);
  MOE_KC(pack_codes_rows)(panel, &codes);
  for (int i = 0; i < 32; i++) to[even_first ? i % 2 * 16 + i / 2 : i] = panel[i];
}

/* All rows of A times k rows of such a group. */
MOE_FN void MOE_KC(code_rows_any)(const moe_small_m_ *s, int64_t row, int64_t k, int64_t g, int even_first, float *c) {
  float rows[MOE_K(small_m_deep) * MOE_K(small_m_wide)] = {0};
  for (int64_t r = 0; r < k; r++) MOE_KC(code_row_any)(s, row + r, g, even_first, rows + r * MOE_K(small_m_wide));
  MOE_K(small_m_floats)(s, k, rows, s->x + row, c);
}

/* Whether `bytes` contiguous codes of each row are all normal numbers. */
MOE_FN int MOE_KC(code_rows_normal)(const moe_small_m_ *s, const uint8_t *src, int64_t bytes) {
  const moe_element_format_ f = *s->format;
  MOE_V(i) outside = MOE_V(set1i)(0u);
  for (int q = 0; q < MOE_K(small_m_deep); q++, src += s->stride) {
    for (int64_t at = 0; at + 4 * MOE_W <= bytes; at += 4 * MOE_W)
      outside = MOE_V(ori)(outside, MOE_K(outside_fp8)(MOE_V(loadi)(src + at), &f));
    if (bytes < 4 * MOE_W) outside = MOE_V(ori)(outside, MOE_K(outside_fp8_row)(src, &f));
  }
  return !MOE_K(special_fp8)(outside);
}

/* 32 codes of a row, by the plain form. */
MOE_INLINE void MOE_KC(code_row)(const uint8_t *src, uint32_t scale, const moe_element_format_ *f, MOE_V(f) * b) {
#if MOE_CODES_BITS == 4
  (void)f;
  MOE_V(e2m1x32)(src, MOE_V(castf)(MOE_V(set1i)(scale)), b);
#else
  const MOE_V(i) exponent = MOE_V(set1i)(scale + f->rebias - (127u << 23));
  MOE_UNROLL
  for (int v = 0; v < MOE_K(small_m_vectors); v++)
    b[v] = MOE_K(signed_fp8)(MOE_V(loads8)(src + v * MOE_W), exponent, f);
#endif
}

MOE_INLINE void MOE_KC(code_rows_group)(const moe_small_m_ *s, const uint8_t *src, const moe_row_scales_ *t, int64_t i,
                                        const float *x, float *c) {
  enum { deep = MOE_K(small_m_deep), vectors = MOE_K(small_m_vectors) };
  const moe_element_format_ f = *s->format; /* a copy, which no store can change */
  MOE_V(f) b[deep * vectors];
  MOE_UNROLL
  for (int q = 0; q < deep; q++, src += s->stride) MOE_KC(code_row)(src, t->scale[q][i], &f, b + q * vectors);
  MOE_K(small_m_products)(s, deep / 2, vectors, deep, b, x, c);
}
#endif

/* k rows of B from `row` on, MOE_ROW_GROUPS_ groups from g on. */
MOE_FN void MOE_KC(code_rows_some)(const moe_small_m_ *s, int64_t row, int64_t k, int64_t g, moe_row_scales_ *t) {
  const int64_t end = moe_min_(moe_ceil_div_(s->n, 32), g + MOE_ROW_GROUPS_);
  const int64_t whole = k == MOE_V(small_m_deep) ? moe_min_(s->n / 32, end) : 0;
  const uint8_t *src = (const uint8_t *)s->base[0] + row * s->stride + g * s->group;
  int normal = 1; /* the codes of this group of 8 bits, and of the one that shares a line with it */
  if (whole > g) {
    MOE_V(row_scales)(s, row, g, t);
#if MOE_DOT
    MOE_K(row_pairs_of)(s, row, t);
    MOE_K(row_pair_scales)(t);
#endif
  }
  for (int64_t i = 0; g < end; g++, i++, src += s->group) {
    float *c = s->c + g / 2 * s->c_stride + g % 2 * 32;
    if (i % (16 / MOE_CODES_BITS) == 0)
      for (int64_t q = 0; q < MOE_V(small_m_deep); q++) __builtin_prefetch(src + t->prefetch + q * s->stride, 0, 2);
    if (MOE_CODES_BITS == 8 && g < whole && g % 2 == 0)
      normal = MOE_VC(code_rows_normal)(s, src, g + 1 < whole ? 64 : 32);
    if (g < whole && (int32_t)t->outside[i] >= 0 && normal) MOE_KC(code_rows_group)(s, src, t, i, s->x + row, c);
    else MOE_VC(code_rows_any)(s, row, k, g, MOE_CODES_BITS == 4 && (!MOE_DOT || s->split), c);
  }
}

/* From codes of a row to those that are prefetched meanwhile, of groups from g on: `rows` rows further on, or in the
   next groups of the first rows or, after the last groups, the first ones of the rows behind these. */
MOE_FN int64_t MOE_KC(code_rows_distance)(const moe_small_m_ *s, int64_t row, int64_t g, int64_t rows) {
  const int64_t distance = rows * s->stride, run = MOE_ROW_GROUPS_ * s->group;
  if (row + rows < s->k) return distance;
  return (g + MOE_ROW_GROUPS_) * 32 < s->n ? distance - s->k * s->stride + run : distance - g * s->group;
}

/* Where not all sums fit into the first-level cache, some groups are gone through for all rows of B at a time. */
MOE_FN void MOE_KC(small_m_code_rows)(const moe_small_m_ *s) {
  const int many = s->rows * s->n > MOE_ROW_SUMS_;
  const int64_t rows = many ? s->k : MOE_V(small_m_deep), later = MOE_ROW_PREFETCH_ / (MOE_ROW_GROUPS_ * s->group);
  moe_row_scales_ t;
  for (int64_t from = 0; from < s->k; from += rows)
    for (int64_t g = 0; g * 32 < s->n; g += MOE_ROW_GROUPS_)
      for (int64_t row = from; row < moe_min_(s->k, from + rows); row += MOE_V(small_m_deep)) {
        t.prefetch = many ? MOE_KC(code_rows_distance)(s, row, g, later) : s->prefetch;
        MOE_KC(code_rows_some)(s, row, moe_min_(MOE_V(small_m_deep), s->k - row), g, &t);
      }
  if (MOE_CODES_BITS == 4 && !MOE_DOT && s->ends && !s->split) MOE_V(order_sums)(s);
}

#undef MOE_VC
