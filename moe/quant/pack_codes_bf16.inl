/* Codes to panels of bf16 pairs (see moe_codes_): of the floats of an f32 panel the upper 16 bits. Included for codes
   of 4 and of 8 bits; what the plain forms do not apply to goes through an f32 panel. */

#define MOE_VC(name) MOE_CAT(MOE_CAT(moe_##name##_, MOE_CODES_BITS), MOE_CAT(_, MOE_VOCABULARY))

/* W columns from `col` on, of up to a block of codes from `at` on, of any kind. */
MOE_FN void MOE_KC(pack_pairs_any)(uint32_t *p, const moe_codes_ *c, int64_t col, int64_t at) {
  float panel[MOE_DECODE_PAIRS_K_ * MOE_NR];
  moe_codes_ block = *c;
  block.codes += col * c->stride + at / 32 * c->group;
  if (c->scale) block.scale += col * c->scale_stride + at / 32 * c->scale_group;
  block.col = 0;
  block.width = MOE_W;
  block.n = moe_max_(0, moe_min_(MOE_W, c->n - col));
  for (const int64_t end = moe_min_(at + MOE_VC(codes), c->k); at < end; at += block.k) {
    block.k = moe_min_(MOE_DECODE_PAIRS_K_, end - at);
    MOE_VC(pack_codes_columns)(panel, &block);
    if (block.k % 2) MOE_V(store)(panel + block.k * MOE_NR, MOE_V(set1)(0.0f));
    for (int64_t r = 0; r < block.k; r += 2, p += MOE_NR) {
      const float *even = panel + r * MOE_NR;
      MOE_V(storei)(p, MOE_K(join_uppers)(MOE_V(load)(even), MOE_V(load)(even + MOE_NR)));
    }
    block.codes += c->group;
    if (c->scale) block.scale += c->scale_group;
  }
}

/* A word of codes of each column by the plain form. */
MOE_INLINE void MOE_KC(pairs_of_word)(MOE_V(i) word, MOE_V(i) byte, const moe_element_format_ *f, MOE_V(i) * x) {
#if MOE_CODES_BITS == 4
  const MOE_V(i) both = MOE_V(ori)(MOE_V(slli)(byte, 7), MOE_V(slli)(byte, 23));
  (void)f;
  MOE_K(word_pairs)(word, MOE_V(sub2x16)(both, MOE_V(set1i)(0x3f803f80u)), x);
#else
  MOE_UNROLL
  for (int code = 0; code < 4; code += 2)
    x[code / 2] = MOE_K(join_uppers)(MOE_PLAIN(word, code * 8, byte, f), MOE_PLAIN(word, (code + 1) * 8, byte, f));
#endif
}

MOE_FN void MOE_KC(pack_pairs_columns)(void *pairs, const moe_codes_ *c) {
  enum { per_word = 32 / MOE_CODES_BITS };
  const moe_element_format_ format = *c->format; /* a copy, which no store can change */
  for (int64_t col = 0; col < c->width; col += MOE_W) {
    for (int64_t at = 0; at < c->k; at += MOE_VC(codes)) {
      uint32_t *p = (uint32_t *)pairs + at / 2 * MOE_NR + c->col + col;
      MOE_V(i) words[MOE_W], scales;
      if (MOE_V(load_words)(c, col, at, words, &scales) || MOE_VC(codes_special)(words, &format)) {
        MOE_KC(pack_pairs_any)(p, c, col, at);
        continue;
      }
      for (int j = 0; j < MOE_W; j++) {
        const MOE_V(i) byte = MOE_VC(word_scale)(scales, j);
        MOE_V(i) x[per_word / 2];
        MOE_KC(pairs_of_word)(words[j], byte, &format, x);
        MOE_UNROLL
        for (int q = 0; q < per_word / 2; q++, p += MOE_NR) MOE_V(storei)(p, x[q]);
      }
    }
  }
}

/* Two whole rows by the plain form. Returns 0 where that does not apply. */
MOE_INLINE int MOE_KC(pack_plain_pair)(uint32_t *p, const moe_codes_ *c, const uint8_t *row, const uint8_t *scale,
                                       const moe_element_format_ *format) {
  const uint8_t *next = row + c->stride;
  MOE_V(i) outside = MOE_V(set1i)(0u);
  for (int64_t part = 0; part < c->width; part += 32) {
    const uint32_t even_byte = scale ? scale[part / 32] : 127u;
    const uint32_t odd_byte = scale ? scale[c->scale_stride + part / 32] : 127u;
    const uint32_t exponents = ((even_byte - 127u) << 7 & 0xffffu) | (odd_byte - 127u) << 23;
    MOE_V(i) x[2];
    if (!MOE_PLAIN_SCALE_(even_byte) || !MOE_PLAIN_SCALE_(odd_byte)) return 0;
    MOE_KC(row_pairs)(row + part * MOE_CODES_BITS / 8, next + part * MOE_CODES_BITS / 8, exponents, 0, format, x);
    MOE_V(storei)(p + part, x[0]);
    MOE_V(storei)(p + part + MOE_W, x[1]);
    if (MOE_CODES_BITS == 4) continue;
    const MOE_V(i) both = MOE_K(join)(MOE_V(loadu16)(row + part), MOE_V(loadu16)(next + part));
    outside = MOE_V(ori)(outside, MOE_V(outside_fp8)(both, format));
  }
  return MOE_CODES_BITS == 4 || !MOE_V(special_fp8)(outside);
}

/* One or two rows of codes of any kind. Not inlined, so that the fast path does not clear `rows`. */
MOE_FN __attribute__((noinline)) void MOE_KC(pack_pair_any)(uint32_t *p, const moe_codes_ *pair) {
  float rows[2 * MOE_NR] = {0};
  MOE_VC(pack_codes_rows)(rows, pair);
  for (int64_t i = 0; i < pair->width; i += MOE_W)
    MOE_V(storei)(p + i, MOE_K(join_uppers)(MOE_V(load)(rows + i), MOE_V(load)(rows + MOE_NR + i)));
}

MOE_FN void MOE_KC(pack_pairs_rows)(void *pairs, const moe_codes_ *c) {
  const moe_element_format_ format = *c->format; /* a copy, which no store can change */
  uint32_t *p = (uint32_t *)pairs + c->col;
  moe_codes_ pair = *c;
  pair.col = 0;
  for (int64_t r = 0; r < c->k; r += 2, p += MOE_NR) {
    pair.codes = c->codes + r * c->stride;
    if (c->scale) pair.scale = c->scale + r * c->scale_stride;
    pair.k = moe_min_(2, c->k - r);
    if (pair.k == 2 && c->n == c->width && MOE_KC(pack_plain_pair)(p, c, pair.codes, pair.scale, &format)) continue;
    MOE_KC(pack_pair_any)(p, &pair);
  }
}

#undef MOE_VC
