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

MOE_INLINE MOE_V(i) MOE_KC(row_scale)(const uint8_t *scale, int64_t i, int64_t n) {
  return MOE_V(set1i)(!scale || i >= n ? 127u : scale[i / 32]);
}

/* A whole row in the plain way; 0 where that does not do. */
MOE_INLINE int MOE_KC(pack_plain_row)(float *p, const moe_codes_ *c, const uint8_t *row, const uint8_t *scale,
                                      const moe_element_format_ *format) {
  MOE_V(i) outside = MOE_V(set1i)(0u);
  if (MOE_W == 1) return 0;
  for (int64_t part = 0; part < c->width; part += 32) {
    const uint32_t byte = scale ? scale[part / 32] : 127u;
    if (!MOE_PLAIN_SCALE_(byte)) return 0;
    MOE_UNROLL
    for (int64_t i = 0; i < 32; i += MOE_W) {
      const MOE_V(i) codes = MOE_CODES_BITS == 4 ? MOE_V(loadu4)(row, part + i) : MOE_V(loadu8)(row + part + i);
      MOE_V(store)(p + part + i, MOE_PLAIN(codes, 0, MOE_V(set1i)(byte), format));
    }
    if (MOE_CODES_BITS == 8) outside = MOE_V(ori)(outside, MOE_K(outside_fp8_row)(row + part, format));
  }
  return MOE_CODES_BITS == 4 || !MOE_K(special_fp8)(outside);
}

MOE_FN void MOE_KC(pack_codes_rows)(float *panel, const moe_codes_ *c) {
  const moe_element_format_ format = *c->format; /* nothing that is stored can change it */
  for (int64_t r = 0; r < c->k; r++) {
    const uint8_t *row = c->codes + r * c->stride, *scale = c->scale ? c->scale + r * c->scale_stride : NULL;
    float *p = panel + r * MOE_PANEL + c->col;
    const int64_t n = c->n;
    if (n == c->width && MOE_KC(pack_plain_row)(p, c, row, scale, &format)) continue;
    for (int64_t i = 0; i < c->width; i += MOE_W)
      MOE_V(store)
      (p + i, MOE_SCALED(MOE_KC(row_codes)(row, i, n), 0, MOE_KC(row_scale)(scale, i, n), &format));
  }
}

/* A panel row of `width` columns from n words of four codes each, of which that from bit `shift` on is wanted; scale
   bytes side by side. */
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

/* W words of each of W columns, of which `left` codes and `n` columns are there, as if they lay side by side. */
MOE_FN void MOE_KC(copy_columns)(uint8_t *to, const moe_codes_ *c, const uint8_t *column, int64_t left, int64_t n) {
  enum { run = 4 * MOE_CODES_BITS };
  const int64_t bytes = moe_min_(4 * MOE_W, (left * MOE_CODES_BITS + 7) / 8);
  memset(to, 0, 4 * MOE_W * MOE_W);
  for (int64_t i = 0; i < moe_min_(n, MOE_W); i++, column += c->stride, to += 4 * MOE_W)
    for (int64_t b = 0; b < bytes; b += run)
      memcpy(to + b, column + b / run * c->group, (size_t)moe_min_(run, bytes - b));
}

/* Where the first code of word w of a column belongs; the next is `odd` further on, and the pair after these `pair`. */
MOE_INLINE int64_t MOE_KC(word_k)(int split, int64_t w) {
  return split ? w / 4 * 32 + w % 4 * 4 : w * (32 / MOE_CODES_BITS);
}

/* The scale bytes, in order, of up to four groups from g on for every lane's column; 1 for what is not there. */
MOE_INLINE MOE_V(i) MOE_KC(scale_words)(const moe_codes_ *c, int64_t col, int64_t g, int64_t groups) {
  const int64_t n = moe_min_(MOE_W, c->n - col), last = (c->k + 31) / 32 - 4;
  const uint32_t mask = groups < 4 ? (1u << 8 * groups) - 1u : ~0u;
  uint32_t word[MOE_W];
  if (!c->scale) return MOE_V(set1i)(0x7f7f7f7fu);
  const uint8_t *scale = c->scale + col * c->scale_stride;
  if (MOE_W > 1 && n == MOE_W && last >= 0 && c->scale_group == 1) { /* four bytes of a column are read */
    const int64_t from = moe_min_(g, last);
    const MOE_V(i) bytes = MOE_V(srli)(MOE_V(gather)(scale + from, c->scale_stride), (int)(8 * (g - from)));
    return MOE_V(ori)(MOE_V(andi)(bytes, MOE_V(set1i)(mask)), MOE_V(set1i)(0x7f7f7f7fu & ~mask));
  }
  scale += g * c->scale_group;
  for (int64_t i = 0; i < MOE_W; i++, scale += c->scale_stride) {
    word[i] = 0x7f7f7f7fu;
    for (int64_t b = 0; b < groups && i < n; b++) word[i] ^= (0x7fu ^ (uint32_t)scale[b * c->scale_group]) << (8 * b);
  }
  return MOE_V(loadi)(word);
}

/* The scale bytes of word w. */
MOE_INLINE MOE_V(i) MOE_KC(word_scale)(MOE_V(i) scales, int64_t w) {
  return MOE_V(andi)(MOE_V(srli)(scales, (int)(w / MOE_CODES_BITS * 8)), MOE_V(set1i)(255u));
}

/* Whether not all of them are plain. */
MOE_INLINE int MOE_KC(scales_special)(MOE_V(i) scales) {
  const MOE_V(i) upper = MOE_V(andi)(MOE_V(srli)(scales, 4), MOE_V(set1i)(0x0f0f0f0fu)); /* 0 or 15? */
  const MOE_V(i) plain = MOE_V(andi)(MOE_V(addi)(upper, MOE_V(set1i)(0x01010101u)), MOE_V(set1i)(0x0e0e0e0eu));
  const MOE_V(i) top = MOE_V(andi)(MOE_V(addi)(plain, MOE_V(set1i)(0x7f7f7f7fu)), MOE_V(set1i)(0x80808080u));
  return MOE_V(anyi)(MOE_V(subi)(MOE_V(set1i)(0x80808080u), top));
}

/* W columns of a panel from W words of each: all codes are there, and codes and scales plain. */
MOE_INLINE void MOE_KC(pack_plain_words)(float *p, const moe_codes_ *c, const MOE_V(i) *words, MOE_V(i) scales,
                                         const moe_element_format_ *format) {
  enum { per_word = 32 / MOE_CODES_BITS };
  const int64_t odd = c->split ? 16 * MOE_PANEL : MOE_PANEL, pair = c->split ? MOE_PANEL : 2 * MOE_PANEL;
  for (int64_t j = 0; j < MOE_W; j++) {
    float *to = p + MOE_KC(word_k)(c->split, j) * MOE_PANEL;
    const MOE_V(i) byte = MOE_KC(word_scale)(scales, j);
    MOE_UNROLL
    for (int lane = 0; lane < per_word; lane++)
      MOE_V(store)(to + lane / 2 * pair + lane % 2 * odd, MOE_PLAIN(words[j], lane * MOE_CODES_BITS, byte, format));
  }
}

/* The same of any, from word w on. */
MOE_INLINE void MOE_KC(pack_words)(float *p, const moe_codes_ *c, const MOE_V(i) *words, MOE_V(i) scales, int64_t w,
                                   const moe_element_format_ *format) {
  const int64_t odd = c->split ? 16 : 1, pair = c->split ? 1 : 2;
  for (int64_t j = 0; j < MOE_W && (w + j) / MOE_CODES_BITS * 32 < c->k; j++) {
    const MOE_V(i) byte = MOE_KC(word_scale)(scales, w % MOE_CODES_BITS + j);
    for (int lane = 0; lane < 32 / MOE_CODES_BITS; lane++) {
      const int64_t k = MOE_KC(word_k)(c->split, w + j) + lane / 2 * pair + lane % 2 * odd;
      if (k < c->k) MOE_V(store)(p + k * MOE_PANEL, MOE_SCALED(words[j], lane * MOE_CODES_BITS, byte, format));
    }
  }
}

/* Whether a word holds a code that wants the general way. */
MOE_INLINE int MOE_KC(codes_special)(const MOE_V(i) *words, const moe_element_format_ *f) {
  MOE_V(i) outside = MOE_V(set1i)(0u);
  for (int j = 0; j < MOE_W && MOE_CODES_BITS == 8; j++) outside = MOE_V(ori)(outside, MOE_K(outside_fp8)(words[j], f));
  return MOE_K(special_fp8)(outside);
}

enum { MOE_KC(codes) = MOE_W * 32 / MOE_CODES_BITS }; /* codes in W words */

/* Words of W columns from code `at` on, transposed, and their scales. Returns whether some are not there, or a scale
   wants the general way. */
MOE_FN int MOE_KC(load_words)(const moe_codes_ *c, int64_t col, int64_t at, MOE_V(i) *words, MOE_V(i) *scales) {
  const uint8_t *first = c->codes + at / 32 * c->group + at % 32 * MOE_CODES_BITS / 8 + col * c->stride;
  const int64_t end = moe_min_(c->k, at + MOE_KC(codes));
  int64_t stride = c->stride;
  uint8_t columns[4 * MOE_W * MOE_W];
  MOE_V(i) square[MOE_W];
  if (col + MOE_W > c->n || at + MOE_KC(codes) > c->k || c->group != 4 * MOE_CODES_BITS) {
    MOE_KC(copy_columns)(columns, c, first, c->k - at, c->n - col);
    first = columns, stride = 4 * MOE_W;
  }
  MOE_UNROLL
  for (int i = 0; i < MOE_W; i++, first += stride)
    square[i] = MOE_W > 1 ? MOE_V(loadi)(first) : MOE_V(gather)(first, 0);
  MOE_V(transpose)(square);
  MOE_UNROLL
  for (int i = 0; i < MOE_W; i++) words[i] = square[i];
  *scales = MOE_KC(scale_words)(c, col, at / 32, (end + 31) / 32 - at / 32);
  return MOE_W == 1 || at + MOE_KC(codes) > c->k || MOE_KC(scales_special)(*scales);
}

MOE_FN void MOE_KC(pack_codes_columns)(float *panel, const moe_codes_ *c) {
  const moe_element_format_ format = *c->format; /* nothing that is stored can change it */
  for (int64_t col = 0; col < c->width; col += MOE_W) {
    float *p = panel + c->col + col;
    for (int64_t at = 0; at < c->k; at += MOE_KC(codes)) {
      MOE_V(i) words[MOE_W], scales;
      if (MOE_KC(load_words)(c, col, at, words, &scales) || MOE_KC(codes_special)(words, &format))
        MOE_KC(pack_words)(p, c, words, scales, at * MOE_CODES_BITS / 32, &format);
      else
        MOE_KC(pack_plain_words)(p + at * MOE_PANEL, c, words, scales, &format);
    }
  }
}

#if MOE_BF16_BY_MODE
#include "stream_codes.inl"
#endif

#undef MOE_KC
