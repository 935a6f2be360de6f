/* Rows of codes to and from float, and codes as f32 panels (see moe_codes_). Included for codes of 4 and of 8 bits. */

#define MOE_KC(name) MOE_CAT(MOE_CAT(moe_##name##_, MOE_CODES_BITS), MOE_CAT(_, MOE_ISA))

/* Codes [i, i+W) of a row of n. */
MOE_INLINE MOE_V(i) MOE_KC(row_codes)(const uint8_t *row, int64_t i, int64_t n) {
  if (i >= n) return MOE_V(set1i)(0u);
  if (MOE_CODES_BITS == 4) return n - i >= MOE_W ? MOE_V(loadu4)(row, i) : MOE_V(loadu4n)(row, i, n - i);
  return n - i >= MOE_W ? MOE_V(loadu8)(row + i) : MOE_V(loadu8n)(row + i, n - i);
}

MOE_FN void MOE_KC(load_codes)(float *dst, const uint8_t *src, int64_t n, const moe_element_format_ *format) {
  const moe_element_format_ f = *format; /* nothing that is stored can change it */
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

MOE_INLINE MOE_V(i) MOE_KC(row_scales)(const moe_codes_ *c, const uint8_t *scale, int64_t i, int64_t n) {
  if (!scale || i >= n) return MOE_V(set1i)(127u);
  if (!c->scale_each) return MOE_V(set1i)(scale[i / 32]);
  return n - i >= MOE_W ? MOE_V(loadu8)(scale + i) : MOE_V(loadu8n)(scale + i, n - i);
}

/* A whole row in the plain way; 0 where that does not do. */
MOE_INLINE int MOE_KC(pack_plain_row)(float *p, const moe_codes_ *c, const uint8_t *row, const uint8_t *scale,
                                      const moe_element_format_ *format) {
  MOE_V(i) special = MOE_V(set1i)(0u);
  if (MOE_W == 1 || c->scale_each) return 0;
  for (int64_t part = 0; part < c->width; part += 32) {
    const uint32_t byte = scale ? scale[part / 32] : 127u;
    if (!MOE_PLAIN_SCALE_(byte)) return 0;
    MOE_UNROLL
    for (int64_t i = part; i < part + 32; i += MOE_W) {
      const MOE_V(i) codes = MOE_CODES_BITS == 4 ? MOE_V(loadu4)(row, i) : MOE_V(loadu8)(row + i);
      const MOE_V(i) magnitude = MOE_V(andi)(codes, MOE_V(set1i)(127u)); /* within [first_normal, first_infinity)? */
      const MOE_V(i) above = MOE_V(subi)(MOE_V(set1i)(format->first_infinity - 1), magnitude);
      const MOE_V(i) below = MOE_V(subi)(magnitude, MOE_V(set1i)(format->first_normal));
      MOE_V(store)(p + i, MOE_PLAIN(codes, 0, MOE_V(set1i)(byte), format));
      if (MOE_CODES_BITS == 8) special = MOE_V(ori)(special, MOE_V(ori)(above, below));
    }
  }
  return MOE_CODES_BITS == 4 || !MOE_V(anyi)(MOE_V(srli)(special, 31));
}

MOE_FN void MOE_KC(pack_codes_rows)(float *panel, const moe_codes_ *c) {
  const moe_element_format_ format = *c->format; /* nothing that is stored can change it */
  for (int64_t r = 0; r < c->k; r++) {
    const uint8_t *row = c->codes + r * c->stride, *scale = c->scale ? c->scale + r * c->scale_stride : NULL;
    float *p = panel + r * MOE_PANEL + c->col;
    const int64_t n = c->n;
    __builtin_prefetch(row + c->ahead);
    if (n == c->width && MOE_KC(pack_plain_row)(p, c, row, scale, &format)) continue;
    for (int64_t i = 0; i < c->width; i += MOE_W)
      MOE_V(store)
      (p + i, MOE_SCALED(MOE_KC(row_codes)(row, i, n), 0, MOE_KC(row_scales)(c, scale, i, n), &format));
  }
}

/* A word for every lane, from a column that has `left` codes more; lane 0 of a word is its least significant. */
MOE_INLINE MOE_V(i) MOE_KC(codes_words)(const moe_codes_ *c, const uint8_t *column, int64_t left) {
  enum { run = 4 * MOE_CODES_BITS };
  const int64_t bytes = moe_min_(4 * MOE_W, (left * MOE_CODES_BITS + 7) / 8);
  uint8_t word[4 * MOE_W] = {0};
  if (MOE_W > 1 && bytes == 4 * MOE_W && c->group == run) return MOE_V(loadi)(column);
  for (int64_t b = 0; b < bytes; b += run) memcpy(word + b, column + b / run * c->group, (size_t)moe_min_(run, bytes - b));
  if (MOE_W > 1) return MOE_V(loadi)(word);
  return MOE_V(set1i)((uint32_t)word[0] | (uint32_t)word[1] << 8 | (uint32_t)word[2] << 16 | (uint32_t)word[3] << 24);
}

/* Where the first code of word w of a column belongs; the next is `odd` further on, and the pair after these `pair`. */
MOE_INLINE int64_t MOE_KC(word_k)(int split, int64_t w) {
  return split ? w / 4 * 32 + w % 4 * 4 : w * (32 / MOE_CODES_BITS);
}

MOE_INLINE MOE_V(i) MOE_KC(word_scale)(const uint8_t *scale, int64_t w) {
  return scale ? MOE_V(loadu8)(scale + w / MOE_CODES_BITS * MOE_PANEL) : MOE_V(set1i)(127u);
}

/* W columns of a panel from words [w, w+W) of each: all codes are there, and codes and scales plain. */
MOE_INLINE void MOE_KC(pack_plain_words)(float *p, const moe_codes_ *c, const MOE_V(i) *words, const uint8_t *scale,
                                         int64_t w, const moe_element_format_ *format) {
  enum { per_word = 32 / MOE_CODES_BITS };
  const int64_t odd = c->split ? 16 * MOE_PANEL : MOE_PANEL, pair = c->split ? MOE_PANEL : 2 * MOE_PANEL;
  for (int64_t j = 0; j < MOE_W; j++) {
    float *to = p + MOE_KC(word_k)(c->split, w + j) * MOE_PANEL;
    const MOE_V(i) byte = MOE_KC(word_scale)(scale, w + j);
    MOE_UNROLL
    for (int lane = 0; lane < per_word; lane++)
      MOE_V(store)(to + lane / 2 * pair + lane % 2 * odd, MOE_PLAIN(words[j], lane * MOE_CODES_BITS, byte, format));
  }
}

/* The same of any. */
MOE_INLINE void MOE_KC(pack_words)(float *p, const moe_codes_ *c, const MOE_V(i) *words, const uint8_t *scale,
                                   int64_t w, const moe_element_format_ *format) {
  const int64_t odd = c->split ? 16 : 1, pair = c->split ? 1 : 2;
  for (int64_t j = 0; j < MOE_W && (w + j) / MOE_CODES_BITS * 32 < c->k; j++) {
    const MOE_V(i) byte = MOE_KC(word_scale)(scale, w + j);
    for (int lane = 0; lane < 32 / MOE_CODES_BITS; lane++) {
      const int64_t k = MOE_KC(word_k)(c->split, w + j) + lane / 2 * pair + lane % 2 * odd;
      if (k < c->k) MOE_V(store)(p + k * MOE_PANEL, MOE_SCALED(words[j], lane * MOE_CODES_BITS, byte, format));
    }
  }
}

/* Whether a word holds an infinity, a NaN, a subnormal or a zero. */
MOE_INLINE int MOE_KC(codes_special)(const MOE_V(i) *words, const moe_element_format_ *f) {
  const MOE_V(i) top = MOE_V(set1i)(0x80808080u), rest = MOE_V(set1i)(0x7f7f7f7fu);
  const MOE_V(i) above = MOE_V(set1i)((128u - f->first_infinity) * 0x01010101u);
  const MOE_V(i) below = MOE_V(set1i)((128u - f->first_normal) * 0x01010101u);
  MOE_V(i) any = MOE_V(set1i)(0u), all = top;
  if (MOE_CODES_BITS == 4) return 0;
  for (int j = 0; j < MOE_W; j++) {
    const MOE_V(i) magnitude = MOE_V(andi)(words[j], rest);
    any = MOE_V(ori)(any, MOE_V(addi)(magnitude, above));
    all = MOE_V(andi)(all, MOE_V(addi)(magnitude, below));
  }
  return MOE_V(anyi)(MOE_V(ori)(MOE_V(andi)(any, top), MOE_V(subi)(top, all)));
}

MOE_FN void MOE_KC(pack_codes_columns)(float *panel, const moe_codes_ *c) {
  enum { codes = MOE_W * 32 / MOE_CODES_BITS };
  const moe_element_format_ format = *c->format; /* nothing that is stored can change it */
  for (int64_t col = 0; col < c->width; col += MOE_W) {
    float *p = panel + c->col + col;
    const uint8_t *scale = c->scale ? c->scale + c->col + col : NULL;
    for (int64_t at = 0; at < c->k; at += codes) {
      const uint8_t *first = c->codes + at / 32 * c->group + at % 32 * MOE_CODES_BITS / 8;
      const int64_t w = at * MOE_CODES_BITS / 32;
      MOE_V(i) words[MOE_W];
      for (int64_t i = 0; i < MOE_W; i++) __builtin_prefetch(first + (col + i) * c->stride + c->ahead);
      for (int i = 0; i < MOE_W; i++)
        words[i] = col + i < c->n ? MOE_KC(codes_words)(c, first + (col + i) * c->stride, c->k - at) : MOE_V(set1i)(0u);
      MOE_V(transpose)(words);
      if (MOE_W == 1 || at + codes > c->k || !c->plain_scales || MOE_KC(codes_special)(words, &format))
        MOE_KC(pack_words)(p, c, words, scale, w, &format);
      else MOE_KC(pack_plain_words)(p, c, words, scale, w, &format);
    }
  }
}

#undef MOE_KC
