/* A few rows of A times the columns that pack_codes_columns takes, over all of k, without a panel: codes of a few
   vectors of columns at a time are decoded and multiplied in registers. Included for codes of 4 and of 8 bits. */

enum {
  MOE_KC(vectors) = 4,                                 /* of columns: so many sums hide the latency of products */
  MOE_KC(deep) = MOE_SMALL_M_VECTORS / MOE_KC(vectors) /* codes of each column at a time */
};

/* MOE_KC(deep) codes of every column, from bit `at` of its word on. */
MOE_INLINE void MOE_KC(small_m_step)(const moe_small_m_ *s, const MOE_V(i) * words, const MOE_V(i) * byte, int at,
                                     const moe_element_format_ *format, const float *x, float *c) {
  MOE_V(f) b[MOE_SMALL_M_VECTORS];
  if (MOE_CODES_BITS == 4) MOE_V(e2m1x4)(words, at, b);
  MOE_UNROLL
  for (int i = 0; i < MOE_SMALL_M_VECTORS; i++) {
    const int v = i % MOE_KC(vectors), q = i / MOE_KC(vectors);
    b[i] = MOE_CODES_BITS == 4 ? MOE_V(mul)(b[i], MOE_V(castf)(MOE_V(slli)(byte[v], 23)))
                               : MOE_K(plain_fp8)(words[v], at + q * 8, byte[v], format);
  }
  MOE_K(small_m_products)(s, MOE_KC(deep) / 2, MOE_KC(vectors), MOE_KC(deep), b, x, c);
}

MOE_INLINE void MOE_KC(small_m_words)(const moe_small_m_ *s, MOE_V(i) (*words)[MOE_W], const MOE_V(i) * scales,
                                      const moe_element_format_ *format, moe_codes_prefetch_ *walk, const float *x,
                                      float *c) {
  const moe_element_format_ f = *format; /* a copy, which no store can change */
  for (int64_t w = 0; w < MOE_W; w++) {
    if (walk) moe_codes_prefetch_next_(walk);
    MOE_V(i) word[MOE_KC(vectors)], byte[MOE_KC(vectors)], outside = MOE_V(set1i)(0u);
    MOE_UNROLL
    for (int v = 0; v < MOE_KC(vectors); v++) {
      word[v] = words[v][w];
      byte[v] = MOE_KC(word_scale)(scales[v], w);
      if (MOE_CODES_BITS == 8) outside = MOE_V(ori)(outside, MOE_K(outside_fp8)(word[v], &f));
    }
    if (MOE_CODES_BITS == 8 && MOE_K(special_fp8)(outside)) {
      MOE_K(small_m_fp8_words)(s, words[0] + w, MOE_W, scales, (int)(w / MOE_CODES_BITS * 8), format, x, c);
      x += MOE_KC(deep);
      continue;
    }
    MOE_UNROLL
    for (int at = 0; at < 32; at += MOE_KC(deep) * MOE_CODES_BITS, x += MOE_KC(deep))
      MOE_KC(small_m_step)(s, word, byte, at, &f, x, c);
  }
}

/* Codes [at, at+k) of all parts, decoded to a panel. */
MOE_FN void MOE_KC(small_m_panel)(const moe_small_m_ *s, const moe_codes_ *codes, int64_t at, int64_t k) {
  float *panel = s->panel;
  moe_small_m_ small_m = *s;
  for (int64_t p = 0; p < s->parts; p++) {
    moe_codes_ part = codes[p];
    part.codes += at / 32 * part.group + at % 32 * MOE_CODES_BITS / 8;
    if (part.scale) part.scale += at / 32 * part.scale_group;
    part.k = k;
    MOE_KC(pack_codes_columns)(panel, &part);
  }
  small_m.x += at;
  small_m.k = k;
  small_m.base[0] = (const char *)panel;
  small_m.parts = 1;
  small_m.stride = MOE_NR * (int64_t)sizeof *panel;
  small_m.n = MOE_NR;
  small_m.format = NULL;
  small_m.dtype = MOE_DTYPE_F32;
  small_m.load = MOE_CAT(moe_load_rows_f32_, MOE_ISA);
  small_m.size = (int64_t)sizeof *panel;
  small_m.prefetch = 0;
  MOE_K(small_m)(&small_m);
}

/* Codes [at, at+MOE_KC(codes)) of all parts. Returns 0, and does nothing, if some are missing or a scale is not
   plain. */
MOE_FN int MOE_KC(small_m_plain)(const moe_small_m_ *s, const moe_codes_ *codes, int64_t at,
                                 const moe_element_format_ *format, moe_codes_prefetch_ *walk) {
  MOE_V(i) words[MOE_NR / MOE_W][MOE_W], scales[MOE_NR / MOE_W];
  for (int64_t p = 0; p < s->parts; p++) {
    if (codes[p].split || codes[p].n < codes[p].width) return 0;
    for (int64_t col = 0; col < codes[p].width; col += MOE_W) {
      const int64_t v = (codes[p].col + col) / MOE_W;
      if (MOE_K(load_words)(codes + p, col, at, words[v], scales + v)) return 0;
    }
  }
  for (int64_t v = 0; v < MOE_NR / MOE_W; v += MOE_KC(vectors))
    MOE_KC(small_m_words)(s, words + v, scales + v, format, v == 0 ? walk : NULL, s->x + at, s->c + v * MOE_W);
  return 1;
}

MOE_FN void MOE_KC(small_m_codes)(const moe_small_m_ *s, const moe_codes_ *codes, int64_t from) {
  const moe_element_format_ format = *codes->format; /* a copy, which no store can change */
  moe_codes_prefetch_ walk = moe_codes_prefetch_of_(s, codes, moe_ceil_div_(s->k, MOE_KC(codes)) * MOE_W);
  for (int64_t at = from; at < s->k; at += MOE_KC(codes))
    if (!MOE_KC(small_m_plain)(s, codes, at, &format, &walk))
      MOE_KC(small_m_panel)(s, codes, at, moe_min_(MOE_KC(codes), s->k - at));
}
