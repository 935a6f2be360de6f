/* Loads words of codes, of 4 or of 8 bits, from columns that are contiguous in memory (see moe_codes_), and the
   columns' scale bytes. */

/* Copies W words of each of W columns to contiguous memory. There are `left` codes in each and `n` columns; the rest
   becomes zero. */
MOE_FN void MOE_K(copy_columns)(uint8_t *to, const moe_codes_ *c, const uint8_t *column, int64_t left, int64_t n) {
  const int64_t bits = c->format->bits, run = 4 * bits, bytes = moe_min_(4 * MOE_W, (left * bits + 7) / 8);
  memset(to, 0, 4 * MOE_W * MOE_W);
  for (int64_t i = 0; i < moe_min_(n, MOE_W); i++, column += c->stride, to += 4 * MOE_W)
    for (int64_t b = 0; b < bytes; b += run)
      memcpy(to + b, column + b / run * c->group, (size_t)moe_min_(run, bytes - b));
}

/* The scale bytes of up to four groups from g on, for each of W columns; 127, the byte of 1, for what is missing. */
MOE_INLINE MOE_V(i) MOE_K(scale_words)(const moe_codes_ *c, int64_t col, int64_t g, int64_t groups) {
  const int64_t n = moe_min_(MOE_W, c->n - col), last = (c->k + 31) / 32 - 4;
  const uint32_t mask = groups < 4 ? (1u << 8 * groups) - 1u : ~0u;
  uint32_t word[MOE_W];
  if (!c->scale) return MOE_V(set1i)(0x7f7f7f7fu);
  const uint8_t *scale = c->scale + col * c->scale_stride;
  if (MOE_W > 1 && n == MOE_W && last >= 0 && c->scale_group == 1) { /* four bytes of each column are read */
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

/* Whether a scale byte is not plain. */
MOE_INLINE int MOE_K(scales_special)(MOE_V(i) scales) {
  const MOE_V(i) upper = MOE_V(andi)(MOE_V(srli)(scales, 4), MOE_V(set1i)(0x0f0f0f0fu)); /* not plain: 0 and 15 */
  const MOE_V(i) plain = MOE_V(andi)(MOE_V(addi)(upper, MOE_V(set1i)(0x01010101u)), MOE_V(set1i)(0x0e0e0e0eu));
  const MOE_V(i) top = MOE_V(andi)(MOE_V(addi)(plain, MOE_V(set1i)(0x7f7f7f7fu)), MOE_V(set1i)(0x80808080u));
  return MOE_V(anyi)(MOE_V(subi)(MOE_V(set1i)(0x80808080u), top));
}

/* W words of each of W columns from code `at` on, transposed (word j of all columns in words[j]), and the columns'
   scales. Returns whether the general path is needed: codes are missing, or a scale is not plain. */
MOE_FN int MOE_K(load_words)(const moe_codes_ *c, int64_t col, int64_t at, MOE_V(i) * words, MOE_V(i) * scales) {
  const int64_t bits = c->format->bits, end = at + (bits == 4 ? 8 : 4) * MOE_W;
  const uint8_t *first = c->codes + at / 32 * c->group + at % 32 * bits / 8 + col * c->stride;
  int64_t stride = c->stride;
  uint8_t columns[4 * MOE_W * MOE_W];
  if (col + MOE_W > c->n || end > c->k || c->group != 4 * bits) {
    MOE_K(copy_columns)(columns, c, first, c->k - at, c->n - col);
    first = columns, stride = 4 * MOE_W;
  }
  if (MOE_W > 1) MOE_V(load_columns)((const char *)first, stride, words);
  else words[0] = MOE_V(gather)(first, 0);
  *scales = MOE_K(scale_words)(c, col, at / 32, (moe_min_(c->k, end) + 31) / 32 - at / 32);
  return MOE_W == 1 || end > c->k || MOE_K(scales_special)(*scales);
}
