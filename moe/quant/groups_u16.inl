/* Groups of 32 codes to bf16 in 16-bit integers, two in each element of a vector; see groups_words.inl. For vectors only.
   Loops over fp8 are specialised for fractions of 2 and of 3 bits. */

/* Groups of 32 e2m1 codes to bf16, up to the first whose scale byte is not plain; returns how many. The scale is
   applied to the table of values, which are then looked up. */
MOE_INLINE_LARGE int64_t MOE_K(u16_from_e2m1)(char *to, const uint8_t *codes, const uint8_t *scales, int64_t groups,
                                              const moe_numbers_ *q) {
  static const uint16_t elements[32] = {0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                        0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
  static const uint16_t normal[32] = {0, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff,
                                      0, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff};
  int64_t g = 0;
  for (; g < groups && MOE_PLAIN_SCALE_(scales[g]); g++) {
    const MOE_V(i) down = MOE_V(set1i)(((127u - scales[g]) << 7 & 0xffffu) * 0x00010001u);
    uint16_t scaled[32];
    __builtin_prefetch(codes + 16 * (g + q->prefetch));
    __builtin_prefetch(to + 64 * (g + q->prefetch_to), 1);
    for (int i = 0; i < 16; i += 2 * MOE_W) {
      const MOE_V(i) less = MOE_V(andi)(MOE_V(load2x16)(normal + i), down);
      MOE_V(store2x16)(scaled + i, MOE_V(sub2x16)(MOE_V(load2x16)(elements + i), less));
    }
    MOE_V(lookup32x4)(to + 64 * g, codes + 16 * g, scaled);
  }
  return g;
}

/* The table for decoding under a factor, of the codes' fractions: what to add to a fraction, as bf16, to get its
   product with the factor's fraction is `base`, its difference for fraction 0, and the entry of `add`. */
MOE_INLINE moe_binade_ MOE_K(binade_back)(const moe_numbers_ *q) {
  const int shift = q->format.shift - 16;
  const MOE_V(f) factor = MOE_V(castf)(MOE_V(set1i)((moe_casti_scalar(q->factor) & 0x007fffffu) | 0x3f800000u));
  moe_binade_ binade = {{0}, 0};
  float fraction[16];
  uint16_t product[16];
  for (uint32_t i = 0; i < 16; i++) fraction[i] = moe_castf_scalar(0x3f800000u + ((i << shift & 127u) << 16));
  for (int i = 0; i < 16; i += MOE_W) MOE_V(store_bf16)(product + i, MOE_V(mul)(MOE_V(load)(fraction + i), factor));
  binade.base = product[0] - 0x3f80u;
  for (uint32_t i = 0; i < 16; i++) binade.add[i] = (uint8_t)(product[i] - product[0] - (i << shift & 127u));
  return binade;
}

/* A group of 32 fp8 codes to bf16. `zero` is what to add to a code to get the bf16's exponent; `binade` is the table
   under a factor, or NULL. `others`: some codes are not normal numbers. Subnormal codes are first replaced by the
   normal ones of the same value, q->below steps lower. */
MOE_INLINE_LARGE void MOE_K(u16_of_fp8)(char *to, const uint8_t *codes, uint32_t zero, const moe_binade_ *binade,
                                        int fraction, int others, const moe_numbers_ *q) {
  const MOE_V(i) magnitudes = MOE_V(set1i)(0x007f007fu), signs = MOE_V(set1i)(0x80008000u);
  const MOE_V(i) none = MOE_V(set1i)(0u), last = MOE_V(set1i)(0x000f000fu);
  const MOE_V(i) finite = MOE_V(set1i)((q->format.first_infinity - 1) * 0x00010001u);
  const MOE_V(i) number = MOE_V(set1i)((q->format.first_nan - 1) * 0x00010001u);
  const MOE_V(i) infinity = MOE_V(set1i)(0x7f807f80u), quiet = MOE_V(set1i)(0x00400040u);
  MOE_UNROLL_FEW
  for (int i = 0; i < 16; i += MOE_W) {
    const MOE_V(i) code = MOE_V(load2x8)(codes + 2 * i), magnitude = MOE_V(andi)(code, magnitudes);
    MOE_V(i) sign = code, step = MOE_V(addi)(magnitude, MOE_V(set1i)(zero * 0x00010001u)), x;
    if (others) step = MOE_V(subi)(step, MOE_V(lookup2x16)(q->below, MOE_V(min2x16)(magnitude, last)));
    x = MOE_V(slli)(step, 7 - fraction);
    if (binade) {
      const MOE_V(i) add = MOE_V(lookup2x16)(binade->add, MOE_V(andi)(step, last));
      x = MOE_V(addi)(MOE_V(addi)(x, MOE_V(set1i)(binade->base * 0x00010001u)), add);
    }
    if (others) {
      const MOE_V(i) infinite = MOE_V(lt2x16)(finite, magnitude), nan = MOE_V(lt2x16)(number, magnitude);
      x = MOE_V(andi)(x, MOE_V(lt2x16)(none, magnitude));
      x = MOE_V(ori)(MOE_V(subs2x16)(x, infinite), MOE_V(andi)(infinite, infinity));
      x = MOE_V(ori)(x, MOE_V(andi)(nan, quiet));
      sign = MOE_V(subs2x16)(code, nan);
    }
    MOE_V(store2x16)(to + 4 * i, MOE_V(mux)(signs, sign, x));
  }
}

/* Groups of 32 fp8 codes to bf16, up to the first whose scale byte could make a number subnormal or too large; returns
   how many. Four groups at a time are searched for codes that are not normal numbers: it stops at the first four that
   have some or, with `others`, that have none. Fewer than four count as having some. */
MOE_INLINE_LARGE int64_t MOE_K(u16_from_fp8)(char *to, const uint8_t *codes, const uint8_t *scales, uint32_t scale,
                                             int64_t groups, const moe_binade_ *binade, int fraction, int others,
                                             const moe_numbers_ *q) {
  const uint32_t unscaled = (q->format.rebias >> q->format.shift) - (127u << fraction);
  int64_t g = 0;
  for (; g < groups; g++) {
    if (scales) scale = scales[g];
    if (scale < MOE_SCALE_CLEAR_ || !MOE_PLAIN_SCALE_(scale)) break;
    if (g % 4 == 0 && (groups - g < 4 || MOE_K(others_fp8)(codes + 32 * g, &q->format)) != others) break;
    __builtin_prefetch(codes + 32 * (g + q->prefetch));
    __builtin_prefetch(to + 64 * (g + q->prefetch_to), 1);
    MOE_K(u16_of_fp8)(to + 64 * g, codes + 32 * g, unscaled + (scale << fraction), binade, fraction, others, q);
  }
  return g;
}

/* With others, of either fraction. Not inlined: long code for a rare case. */
MOE_FN __attribute__((noinline)) int64_t MOE_K(u16_from_others)(char *to, const uint8_t *codes, const uint8_t *scales,
                                                                uint32_t scale, int64_t groups,
                                                                const moe_binade_ *binade, const moe_numbers_ *q) {
  return MOE_K(u16_from_fp8)(to, codes, scales, scale, groups, binade, q->format.fraction, 1, q);
}

/* Alternates between groups without and with others. */
MOE_INLINE_LARGE int64_t MOE_K(u16_from_either)(char *to, const uint8_t *codes, const uint8_t *scales, uint32_t scale,
                                                int64_t groups, const moe_binade_ *binade, const moe_numbers_ *q) {
  const int fraction = q->format.fraction;
  if (fraction != 2 && fraction != 3) return 0;
  for (int64_t g = 0, others;; g += others) {
    const uint8_t *bytes = scales ? scales + g : NULL;
    if (fraction == 2) g += MOE_K(u16_from_fp8)(to + 64 * g, codes + 32 * g, bytes, scale, groups - g, binade, 2, 0, q);
    else g += MOE_K(u16_from_fp8)(to + 64 * g, codes + 32 * g, bytes, scale, groups - g, binade, 3, 0, q);
    bytes = scales ? scales + g : NULL;
    others = MOE_K(u16_from_others)(to + 64 * g, codes + 32 * g, bytes, scale, groups - g, binade, q);
    if (others == 0) return g;
  }
}

/* Groups of codes to bf16, up to the first that needs the general path; returns how many. */
MOE_FN int64_t MOE_K(u16_back)(char *to, const uint8_t *codes, const uint8_t *scales, int64_t groups,
                               const moe_numbers_ *q) {
  if (!q->wide) return MOE_K(u16_from_e2m1)(to, codes, scales, groups, q);
  if (scales) return MOE_K(u16_from_either)(to, codes, scales, 0, groups, NULL, q);
  /* The factor's exponent. Products may have the next one. */
  const uint32_t scale = moe_casti_scalar(q->factor) >> 23;
  if (scale < MOE_SCALE_CLEAR_ || !MOE_PLAIN_SCALE_(scale + 1)) return 0;
  const moe_binade_ binade = MOE_K(binade_back)(q);
  return MOE_K(u16_from_either)(to, codes, NULL, scale, groups, &binade, q);
}
