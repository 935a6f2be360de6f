/* Codes as f32 panels (see moe_codes_). Included for codes of 4 and of 8 bits. */

#define MOE_KC(name) MOE_CAT(MOE_CAT(moe_##name##_, MOE_CODES_BITS), MOE_CAT(_, MOE_ISA))

/* Codes [i, i+W) of a row, of which `left` are there. */
MOE_INLINE MOE_V(f) MOE_KC(codes_row_part)(const moe_codes_ *c, const uint8_t *row, const uint8_t *scale, int64_t i, int64_t left) {
  MOE_V(f) factor[2];
  MOE_V(i) codes;
  if (MOE_CODES_BITS == 4) codes = left >= MOE_W ? MOE_V(loadu4)(row, i) : MOE_V(loadu4n)(row, i, left);
  else codes = left >= MOE_W ? MOE_V(loadu8)(row + i) : MOE_V(loadu8n)(row + i, left);
  const MOE_V(f) x = MOE_DECODE(codes, c->format);
  if (!scale) return x;
  if (!c->scale_each) MOE_K(e8m0)(MOE_V(set1i)(scale[i / 32]), factor);
  else MOE_K(e8m0)(left >= MOE_W ? MOE_V(loadu8)(scale + i) : MOE_V(loadu8n)(scale + i, left), factor);
  return MOE_K(scaled)(x, factor);
}

MOE_FN void MOE_KC(pack_codes_rows)(float *panel, const moe_codes_ *c) {
  for (int64_t r = 0; r < c->k + (c->k & 1); r++) {
    const uint8_t *row = c->codes + r * c->stride, *scale = c->scale ? c->scale + r * c->scale_stride : NULL;
    float *p = panel + r * MOE_PANEL + c->col;
    const int64_t n = r < c->k ? c->n : 0;
    for (int64_t i = 0; i < c->width; i += MOE_W)
      MOE_V(store)(p + i, i < n ? MOE_KC(codes_row_part)(c, row, scale, i, n - i) : MOE_V(set1)(0.0f));
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

/* Code `lane` of word w of a column. */
MOE_INLINE int64_t MOE_KC(codes_k)(int split, int64_t w, int lane) {
  if (!split) return w * (32 / MOE_CODES_BITS) + lane;
  return w / 4 * 32 + w % 4 * 4 + lane / 2 + lane % 2 * 16;
}

/* W columns of a panel from words [w, w+W) of each. */
MOE_INLINE void MOE_KC(pack_words)(float *p, const moe_codes_ *c, MOE_V(i) *words, const uint8_t *scale, int64_t w) {
  enum { per_word = 32 / MOE_CODES_BITS, words_per_group = MOE_CODES_BITS };
  const MOE_V(f) one = MOE_V(set1)(1.0f);
  MOE_V(f) factor[2] = {one, one};
  for (int64_t j = 0; j < MOE_W && (w + j) / words_per_group * 32 < c->k; j++) {
    if (scale && (j == 0 || (w + j) % words_per_group == 0))
      MOE_K(e8m0)(MOE_V(loadu8)(scale + (w + j) / words_per_group * MOE_PANEL), factor);
    MOE_UNROLL
    for (int lane = 0; lane < per_word; lane++) {
      const int64_t k = MOE_KC(codes_k)(c->split, w + j, lane);
      const MOE_V(f) x = MOE_DECODE(MOE_V(srli)(words[j], lane * MOE_CODES_BITS), c->format);
      if (k < c->k) MOE_V(store)(p + k * MOE_PANEL, scale ? MOE_K(scaled)(x, factor) : x);
    }
  }
}

MOE_FN void MOE_KC(pack_codes_columns)(float *panel, const moe_codes_ *c) {
  enum { per_word = 32 / MOE_CODES_BITS };
  for (int64_t col = 0; col < c->width; col += MOE_W) {
    float *p = panel + c->col + col;
    const uint8_t *scale = c->scale ? c->scale + c->col + col : NULL;
    for (int64_t at = 0; at < c->k; at += MOE_W * per_word) {
      const uint8_t *first = c->codes + at / 32 * c->group + at % 32 * MOE_CODES_BITS / 8;
      MOE_V(i) words[MOE_W];
      for (int i = 0; i < MOE_W; i++)
        words[i] = col + i < c->n ? MOE_KC(codes_words)(c, first + (col + i) * c->stride, c->k - at) : MOE_V(set1i)(0u);
      MOE_V(transpose)(words);
      MOE_KC(pack_words)(p, c, words, scale, at / per_word);
    }
    if (c->k & 1) MOE_V(store)(p + c->k * MOE_PANEL, MOE_V(set1)(0.0f));
  }
}

#undef MOE_KC
