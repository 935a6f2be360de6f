/* Rows of codes to and from float, and codes to f32 panels (see moe_codes_). Included for codes of 4 and of 8 bits. */

/* Codes [i, i+W) of a row of n. */
MOE_INLINE MOE_V(i) MOE_KC(row_codes)(const uint8_t *row, int64_t i, int64_t n) {
  if (i >= n) return MOE_V(set1i)(0u);
  if (MOE_CODES_BITS == 4) return n - i >= MOE_W ? MOE_V(loadu4)(row, i) : MOE_V(loadu4n)(row, i, n - i);
  return n - i >= MOE_W ? MOE_V(loadu8)(row + i) : MOE_V(loadu8n)(row + i, n - i);
}

MOE_FN void MOE_KC(load_codes)(float *dst, const uint8_t *src, int64_t n, const moe_element_format_ *format) {
  const moe_element_format_ f = *format; /* a copy, which no store can change */
  for (int64_t i = 0; i < n; i += MOE_W) {
    const MOE_V(i) codes = MOE_KC(row_codes)(src, i, n);
    const MOE_V(f) x = MOE_CODES_BITS == 4 ? MOE_V(e2m1)(codes) : MOE_K(fp8)(codes, 0, &f);
    if (n - i >= MOE_W) MOE_V(store)(dst + i, x);
    else MOE_V(storen)(dst + i, x, n - i);
  }
}

MOE_FN void MOE_KC(store_codes)(uint8_t *dst, const float *src, int64_t n, const moe_element_format_ *format,
                                const moe_cast_ *cast) {
  const moe_element_format_ f = *format;
  const moe_cast_ how = *cast;
  for (int64_t i = 0; i < n; i += MOE_W) {
    const int64_t left = n - i;
    const MOE_V(i) codes = MOE_K(encode)(left >= MOE_W ? MOE_V(load)(src + i) : MOE_V(loadn)(src + i, left), &f, &how);
    if (MOE_CODES_BITS == 4 && left >= MOE_W) MOE_V(store4)(dst, i, codes);
    else if (MOE_CODES_BITS == 4) MOE_V(store4n)(dst, i, codes, left);
    else if (left >= MOE_W) MOE_V(store8)(dst + i, codes);
    else MOE_V(store8n)(dst + i, codes, left);
  }
}

MOE_INLINE MOE_V(i) MOE_KC(row_scale)(const uint8_t *scale, int64_t i, int64_t n) {
  return MOE_V(set1i)(!scale || i >= n ? 127u : scale[i / 32]);
}

/* 32 columns of a row by the plain form. */
MOE_INLINE_LARGE void MOE_KC(plain_part)(MOE_V(f) * x, const uint8_t *row, int64_t at, uint32_t byte,
                                         const moe_element_format_ *format) {
#if MOE_CODES_BITS == 4 && MOE_VECTORS
  (void)format;
  MOE_V(e2m1_row)(row + at / 2, MOE_V(castf)(MOE_V(set1i)(byte << 23)), x);
#else
  MOE_UNROLL
  for (int64_t i = 0; i < 32; i += MOE_W) {
    const MOE_V(i) codes = MOE_CODES_BITS == 4 ? MOE_V(loadu4)(row, at + i) : MOE_V(loadu8)(row + at + i);
    x[i / MOE_W] = MOE_PLAIN(codes, 0, MOE_V(set1i)(byte), format);
  }
#endif
}

/* A whole row by the plain form. Returns 0 where that does not apply. */
MOE_INLINE int MOE_KC(pack_plain_row)(float *p, const moe_codes_ *c, const uint8_t *row, const uint8_t *scale,
                                      const moe_element_format_ *format) {
  MOE_V(i) outside = MOE_V(set1i)(0u);
  if (MOE_W == 1) return 0;
  for (int64_t part = 0; part < c->width; part += 32) {
    const uint32_t byte = scale ? scale[part / 32] : 127u;
    MOE_V(f) x[32 / MOE_W];
    if (!MOE_PLAIN_SCALE_(byte)) return 0;
    MOE_KC(plain_part)(x, row, part, byte, format);
    MOE_UNROLL
    for (int i = 0; i < 32 / MOE_W; i++) MOE_V(store)(p + part + i * MOE_W, x[i]);
    if (MOE_CODES_BITS == 8) outside = MOE_V(ori)(outside, MOE_K(outside_fp8_row)(row + part, format));
  }
  return MOE_CODES_BITS == 4 || !MOE_K(special_fp8)(outside);
}

MOE_FN void MOE_KC(pack_codes_rows)(float *panel, const moe_codes_ *c) {
  const moe_element_format_ format = *c->format; /* a copy, which no store can change */
  for (int64_t r = 0; r < c->k; r++) {
    const uint8_t *row = c->codes + r * c->stride, *scale = c->scale ? c->scale + r * c->scale_stride : NULL;
    float *p = panel + r * MOE_NR + c->col;
    const int64_t n = c->n;
    if (n == c->width && MOE_KC(pack_plain_row)(p, c, row, scale, &format)) continue;
    for (int64_t i = 0; i < c->width; i += MOE_W) MOE_V(store)
    (p + i, MOE_SCALED(MOE_KC(row_codes)(row, i, n), 0, MOE_KC(row_scale)(scale, i, n), &format));
  }
}

/* `width` columns of a panel's row from n words of four codes each: the codes from bit `shift` on, times contiguous
   scale bytes. */
MOE_FN void MOE_KC(pack_words_row)(float *p, const uint8_t *words, int shift, const uint8_t *scale, int64_t n,
                                   int64_t width, const moe_element_format_ *format) {
  enum { size = MOE_CODES_BITS / 2 };
  for (int64_t i = 0; i < width; i += MOE_W) {
    const int64_t left = n - i;
    MOE_V(i) word = MOE_V(set1i)(0u), byte = word;
    if (left >= MOE_W) {
      word = size == 2 ? MOE_V(loadu16)(words + i * size) : MOE_V(loadi)(words + i * size);
      byte = MOE_V(loadu8)(scale + i);
    } else if (left > 0) {
      word = size == 2 ? MOE_V(loadu16n)(words + i * size, left) : MOE_V(casti)(MOE_V(loadn)(words + i * size, left));
      byte = MOE_V(loadu8n)(scale + i, left);
    }
    const MOE_V(i) code = MOE_V(srlv)(word, MOE_V(set1i)((uint32_t)shift));
    MOE_V(i) special = MOE_V(subi)(byte, MOE_V(set1i)(16u)); /* see MOE_PLAIN_SCALE_ */
    special = MOE_V(ori)(special, MOE_V(subi)(MOE_V(set1i)(239u), byte));
    special = MOE_V(srli)(special, 31);
    if (MOE_CODES_BITS == 8)
      special = MOE_V(ori)(special, MOE_V(andi)(MOE_K(outside_fp8)(word, format), MOE_V(set1i)(0x80808080u)));
    if (MOE_V(anyi)(special)) MOE_V(store)(p + i, MOE_SCALED(code, 0, byte, format));
    else MOE_V(store)(p + i, MOE_PLAIN(code, 0, byte, format));
  }
}

/* The row of a panel in which the first code of word w of a column belongs. */
MOE_INLINE int64_t MOE_KC(word_k)(int split, int64_t w) {
  return split ? w / 4 * 32 + w % 4 * 4 : w * (32 / MOE_CODES_BITS);
}

/* The scale bytes of word w. */
MOE_INLINE MOE_V(i) MOE_KC(word_scale)(MOE_V(i) scales, int64_t w) {
  return MOE_V(andi)(MOE_V(srli)(scales, (int)(w / MOE_CODES_BITS * 8)), MOE_V(set1i)(255u));
}

/* W columns of a panel from W words of each, by the plain form. A pair of codes goes to rows `odd` apart, the next pair
   `pair` rows further on. */
MOE_INLINE_LARGE void MOE_KC(pack_plain_words)(float *p, const moe_codes_ *c, const MOE_V(i) * words, MOE_V(i) scales,
                                               const moe_element_format_ *format) {
  enum { per_word = 32 / MOE_CODES_BITS };
  const int64_t odd = c->split ? 16 * MOE_NR : MOE_NR, pair = c->split ? MOE_NR : 2 * MOE_NR;
  for (int64_t j = 0; j < MOE_W; j++) {
    float *to = p + MOE_KC(word_k)(c->split, j) * MOE_NR;
    const MOE_V(i) byte = MOE_KC(word_scale)(scales, j);
    MOE_UNROLL
    for (int code = 0; code < per_word; code++)
      MOE_V(store)(to + code / 2 * pair + code % 2 * odd, MOE_PLAIN(words[j], code * MOE_CODES_BITS, byte, format));
  }
}

/* The same by the general path, from word w on, as far as there are codes. */
MOE_INLINE_LARGE void MOE_KC(pack_words)(float *p, const moe_codes_ *c, const MOE_V(i) * words, MOE_V(i) scales,
                                         int64_t w, const moe_element_format_ *format) {
  const int64_t odd = c->split ? 16 : 1, pair = c->split ? 1 : 2;
  for (int64_t j = 0; j < MOE_W && (w + j) / MOE_CODES_BITS * 32 < c->k; j++) {
    const MOE_V(i) byte = MOE_KC(word_scale)(scales, w % MOE_CODES_BITS + j);
    for (int code = 0; code < 32 / MOE_CODES_BITS; code++) {
      const int64_t k = MOE_KC(word_k)(c->split, w + j) + code / 2 * pair + code % 2 * odd;
      if (k < c->k) MOE_V(store)(p + k * MOE_NR, MOE_SCALED(words[j], code * MOE_CODES_BITS, byte, format));
    }
  }
}

/* Whether a code is not a normal number. */
MOE_INLINE int MOE_KC(codes_special)(const MOE_V(i) * words, const moe_element_format_ *f) {
  MOE_V(i) outside = MOE_V(set1i)(0u);
  for (int j = 0; j < MOE_W && MOE_CODES_BITS == 8; j++) outside = MOE_V(ori)(outside, MOE_K(outside_fp8)(words[j], f));
  return MOE_K(special_fp8)(outside);
}

enum { MOE_KC(codes) = MOE_W * 32 / MOE_CODES_BITS }; /* codes in W words */

MOE_FN void MOE_KC(pack_codes_columns)(float *panel, const moe_codes_ *c) {
  const moe_element_format_ format = *c->format; /* a copy, which no store can change */
  for (int64_t col = 0; col < c->width; col += MOE_W) {
    float *p = panel + c->col + col;
    for (int64_t at = 0; at < c->k; at += MOE_KC(codes)) {
      MOE_V(i) words[MOE_W], scales;
      if (MOE_K(load_words)(c, col, at, words, &scales) || MOE_KC(codes_special)(words, &format))
        MOE_KC(pack_words)(p, c, words, scales, at * MOE_CODES_BITS / 32, &format);
      else MOE_KC(pack_plain_words)(p + at * MOE_NR, c, words, scales, &format);
    }
  }
}
