/* Narrow elements to float and back. Codes are in 32-bit elements of vectors, where they begin at bit `at`; scaled ones
   are multiplied by the power of two of an E8M0 byte. Decoding is exact and has no subnormal operands, so it may be
   used in any floating-point mode. The plain_* forms are faster: they take scale bytes that MOE_PLAIN_SCALE_ admits
   and, of fp8, codes of normal numbers. */

/* Rounds to nearest, ties to even. For ties away from zero, the last bit of every float is set: this moves midpoints
   up, and no other float across one. For ties toward zero, 1 is taken from it first, which moves midpoints down. */
MOE_INLINE MOE_V(i) MOE_K(encode)(MOE_V(f) x, const moe_element_format_ *f, const moe_cast_ *cast) {
  const MOE_V(i) bits = MOE_V(casti)(x), given = MOE_V(andi)(bits, MOE_V(set1i)(0x7fffffffu));
  const MOE_V(i) none = MOE_V(set1i)(0u), less = MOE_V(maxi)(MOE_V(subi)(given, MOE_V(set1i)(cast->to_zero)), none);
  const MOE_V(i) magnitude = MOE_V(ori)(less, MOE_V(set1i)(cast->away | cast->to_zero)), magic = MOE_V(set1i)(f->magic);
  const MOE_V(i) odd = MOE_V(andi)(MOE_V(srli)(magnitude, f->shift), MOE_V(set1i)(1u));
  MOE_V(i) sign = MOE_V(slli)(MOE_V(srli)(bits, 31), f->sign);
  const MOE_V(f) tiny = MOE_V(add)(MOE_V(castf)(magnitude), MOE_V(castf)(magic));
  const MOE_V(m) subnormal = MOE_V(lti)(magnitude, MOE_V(set1i)(f->rebias + (1u << 23)));
  const uint32_t below_half = (1u << (f->shift - 1)) - 1u;
  MOE_V(i) code = MOE_V(addi)(MOE_V(addi)(magnitude, odd), MOE_V(set1i)(below_half - f->rebias));
  code = MOE_V(selecti)(subnormal, MOE_V(subi)(MOE_V(casti)(tiny), magic), MOE_V(srli)(code, f->shift));
  code = MOE_V(selecti)(MOE_V(lti)(MOE_V(set1i)(f->max), code), MOE_V(set1i)(cast->overflow), code);
  code = MOE_V(selecti)(MOE_V(lti)(MOE_V(set1i)(0x7f7fffffu), given), MOE_V(set1i)(cast->infinity), code);
  if (f->nan_is_minus_zero || cast->to_zero) sign = MOE_V(selecti)(MOE_V(lti)(none, code), sign, none);
  /* A NaN from overflow has no sign. */
  const MOE_V(i) keep = MOE_V(set1i)(f->nan != 0 && f->infinity == 0 ? 0u : ~0u);
  code = MOE_V(ori)(code, MOE_V(selecti)(MOE_V(lti)(MOE_V(set1i)(f->max), code), MOE_V(andi)(sign, keep), sign));
  return MOE_V(selecti)(MOE_V(lti)(MOE_V(set1i)(0x7f800000u), given), MOE_V(set1i)(f->nan), code);
}

/* By two factors, because their product may be subnormal. Byte 255 is NaN. */
MOE_INLINE_LARGE MOE_V(f) MOE_K(times_e8m0)(MOE_V(f) x, MOE_V(i) byte) {
  const MOE_V(i) half = MOE_V(srli)(byte, 1);
  const MOE_V(i) first = MOE_V(slli)(MOE_V(addi)(half, MOE_V(set1i)(64u)), 23);
  const MOE_V(i) second = MOE_V(slli)(MOE_V(addi)(MOE_V(subi)(byte, half), MOE_V(set1i)(63u)), 23);
  const MOE_V(m) number = MOE_V(lti)(byte, MOE_V(set1i)(255u));
  x = MOE_V(mul)(x, MOE_V(castf)(MOE_V(selecti)(number, first, MOE_V(set1i)(0x7fc00000u))));
  return MOE_V(mul)(x, MOE_V(castf)(second));
}

MOE_INLINE MOE_V(f) MOE_K(scaled_e2m1)(MOE_V(i) word, int at, MOE_V(i) byte, const moe_element_format_ *f) {
  (void)f;
  return MOE_K(times_e8m0)(MOE_V(e2m1)(MOE_V(srli)(word, at)), byte);
}

MOE_INLINE MOE_V(f) MOE_K(plain_e2m1)(MOE_V(i) word, int at, MOE_V(i) byte, const moe_element_format_ *f) {
  (void)f;
  return MOE_V(mul)(MOE_V(e2m1)(MOE_V(srli)(word, at)), MOE_V(castf)(MOE_V(slli)(byte, 23)));
}

MOE_INLINE_LARGE MOE_V(f) MOE_K(fp8)(MOE_V(i) word, int at, const moe_element_format_ *f) {
  const MOE_V(i) magnitude = MOE_V(andi)(MOE_V(srli)(word, at), MOE_V(set1i)(127u)), magic = MOE_V(set1i)(f->magic);
  const MOE_V(i) sign = MOE_V(andi)(MOE_V(slli)(word, 24 - at), MOE_V(set1i)(0x80000000u));
  const MOE_V(f) tiny = MOE_V(sub)(MOE_V(castf)(MOE_V(ori)(magnitude, magic)), MOE_V(castf)(magic));
  MOE_V(i) x = MOE_V(addi)(MOE_V(slli)(magnitude, f->shift), MOE_V(set1i)(f->rebias));
  x = MOE_V(selecti)(MOE_V(lti)(magnitude, MOE_V(set1i)(f->first_normal)), MOE_V(casti)(tiny), x);
  x = MOE_V(selecti)(MOE_V(lti)(magnitude, MOE_V(set1i)(f->first_infinity)), x, MOE_V(set1i)(0x7f800000u));
  x = MOE_V(ori)(x, sign);
  x = MOE_V(selecti)(MOE_V(lti)(magnitude, MOE_V(set1i)(f->first_nan)), x, MOE_V(set1i)(0x7fc00000u));
  if (f->nan_is_minus_zero) {
    const MOE_V(i) none = MOE_V(set1i)(0u), minus = MOE_V(subi)(none, MOE_V(srli)(sign, 31));
    x = MOE_V(selecti)(MOE_V(lti)(none, magnitude), x, MOE_V(andi)(minus, MOE_V(set1i)(0x7fc00000u)));
  }
  return MOE_V(castf)(x);
}

MOE_INLINE MOE_V(f) MOE_K(scaled_fp8)(MOE_V(i) word, int at, MOE_V(i) byte, const moe_element_format_ *f) {
  return MOE_K(times_e8m0)(MOE_K(fp8)(word, at, f), byte);
}

/* One shift moves sign and magnitude to their places; bias and scale are added as one number. */
MOE_INLINE_LARGE MOE_V(f) MOE_K(plain_fp8)(MOE_V(i) word, int at, MOE_V(i) byte, const moe_element_format_ *f) {
  const MOE_V(i) exponent = MOE_V(addi)(MOE_V(slli)(byte, 23), MOE_V(set1i)(f->rebias - (127u << 23)));
  const MOE_V(i) placed = MOE_V(srav)(MOE_V(slli)(word, 24 - at), MOE_V(set1i)((uint32_t)(24 - f->shift)));
  return MOE_V(castf)(MOE_V(addi)(MOE_V(andi)(placed, MOE_V(set1i)(0x80000000u | 127u << f->shift)), exponent));
}

/* The same of sign-extended codes, under `exponent`, the sum of bias and scale. */
MOE_INLINE MOE_V(f) MOE_K(signed_fp8)(MOE_V(i) code, MOE_V(i) exponent, const moe_element_format_ *f) {
  const MOE_V(i) placed = MOE_V(sllv)(code, MOE_V(set1i)((uint32_t)f->shift));
  return MOE_V(castf)(MOE_V(addi)(MOE_V(andi)(placed, MOE_V(set1i)(0x80000000u | 127u << f->shift)), exponent));
}

/* The code of a finite float, without its sign and not saturated, in the lower 16 bits; the upper ones are undefined.
   Adding 2^shift times the float's power of two, or the least normal number's, rounds to nearest, ties to even: the
   last bits of the sum are the code's distance from that power. `big` is 2^shift, and its last bits hold the code's
   bias; the power's exponent is added at the end. */
MOE_INLINE MOE_V(i) MOE_K(number)(MOE_V(f) x, const moe_numbers_ *q) {
  const MOE_V(i) magnitude = MOE_V(mux)(MOE_V(set1i)(0x7fffffffu ^ q->away), MOE_V(casti)(x), MOE_V(set1i)(q->away));
  const MOE_V(f) normal = MOE_V(max)(MOE_V(castf)(magnitude), MOE_V(castf)(MOE_V(set1i)(q->least)));
  const MOE_V(i) power = MOE_V(andi)(MOE_V(casti)(normal), MOE_V(set1i)(0x7f800000u));
  const MOE_V(f) big = MOE_V(castf)(MOE_V(set1i)(q->big));
  const MOE_V(f) sum = MOE_V(fma_exact)(MOE_V(castf)(power), big, MOE_V(castf)(magnitude));
  return MOE_V(addi)(MOE_V(casti)(sum), MOE_V(srlv)(power, MOE_V(set1i)((uint32_t)q->format.shift)));
}

/* The signs of codes in 16-bit elements, but not those of NaN. As NaN is the largest code, 2 * nan - code has bit 7 set
   for all others. */
MOE_INLINE MOE_V(i) MOE_K(without_nan_signs)(MOE_V(i) signs, MOE_V(i) codes, MOE_V(i) nan) {
  return MOE_V(andi)(signs, MOE_V(slli)(MOE_V(subi)(MOE_V(addi)(nan, nan), codes), 8));
}

/* Encodes a group of 32 finite floats whose products with the factor are at most MOE_SUM_LIMIT_. */
MOE_FN void MOE_K(quantize_one)(uint8_t *codes, const float *x, float factor, const moe_numbers_ *q) {
  const MOE_V(i) most = MOE_V(set1i)(q->most * 0x00010001u);
  const MOE_V(f) scale = MOE_V(set1)(factor);
  MOE_V(i) code[16 / MOE_W], signs[16 / MOE_W];
  for (int i = 0; i < 16 / MOE_W; i++) {
    MOE_V(f) even, odd;
    signs[i] = MOE_V(load2_f32)(x + 2 * MOE_W * i, &even, &odd);
    const MOE_V(i) low = MOE_K(number)(MOE_V(mul)(even, scale), q);
    const MOE_V(i) high = MOE_V(slli)(MOE_K(number)(MOE_V(mul)(odd, scale), q), 16);
    code[i] = MOE_V(min2x16)(MOE_V(mux)(MOE_V(set1i)(0xffffu), low, high), most);
    if (q->drop) signs[i] = MOE_K(without_nan_signs)(signs[i], code[i], most);
  }
  if (q->wide) MOE_V(store32x8)(codes, code, signs);
  else MOE_V(store32x4)(codes, code, signs);
}

/* The float of a magnitude whose bits are at their place in a float. With the bias corrected, x is right for normal
   numbers and 2 * x - least for subnormal ones; the right one is the smaller. */
MOE_INLINE MOE_V(f) MOE_K(magnitude_of)(MOE_V(i) placed, const moe_numbers_ *q) {
  const MOE_V(i) magnitude = MOE_V(andi)(placed, MOE_V(set1i)(127u << q->format.shift));
  const MOE_V(f) x = MOE_V(castf)(MOE_V(addi)(magnitude, MOE_V(set1i)(q->format.rebias)));
  const MOE_V(f) minus_least = MOE_V(castf)(MOE_V(set1i)(q->least | 0x80000000u));
  return MOE_V(min)(x, MOE_V(fma_exact)(x, MOE_V(set1)(2.0f), minus_least));
}

/* Whether a group's 32 codes hold an infinity or a NaN. */
MOE_INLINE int MOE_K(special_codes)(const uint8_t *codes, const moe_numbers_ *q) {
  MOE_V(i) any = MOE_V(set1i)(0u);
  for (int i = 0; i < 16; i += MOE_W) {
    const MOE_V(i) magnitude = MOE_V(andi)(MOE_V(load2x8)(codes + 2 * i), MOE_V(set1i)(0x007f007fu));
    any = MOE_V(ori)(any, MOE_V(addi)(magnitude, MOE_V(set1i)((128u - q->format.first_infinity) * 0x00010001u)));
  }
  return MOE_V(anyi)(MOE_V(andi)(any, MOE_V(set1i)(0x00800080u)));
}

/* Of four codes in an element: the top bit of each byte is set where plain_fp8 does not apply, because the magnitude is
   outside [first_normal, first_infinity). Other bits are undefined. */
MOE_INLINE MOE_V(i) MOE_K(outside_fp8)(MOE_V(i) four, const moe_element_format_ *f) {
  const MOE_V(i) magnitude = MOE_V(andi)(four, MOE_V(set1i)(0x7f7f7f7fu));
  const MOE_V(i) above = MOE_V(addi)(magnitude, MOE_V(set1i)((128u - f->first_infinity) * 0x01010101u));
  const MOE_V(i) below = MOE_V(subi)(MOE_V(set1i)((f->first_normal + 127u) * 0x01010101u), magnitude);
  return MOE_V(ori)(above, below);
}

/* The same of 32 contiguous codes: four in an element, or two and two of 0x40, which is normal. Not in scalar code. */
MOE_INLINE MOE_V(i) MOE_K(outside_fp8_row)(const uint8_t *codes, const moe_element_format_ *f) {
  if (4 * MOE_W == 32) return MOE_K(outside_fp8)(MOE_V(loadi)(codes), f);
  return MOE_K(outside_fp8)(MOE_V(ori)(MOE_V(loadu16)(codes), MOE_V(set1i)(0x40400000u)), f);
}

/* Whether outside_fp8 has marked a code. */
MOE_INLINE int MOE_K(special_fp8)(MOE_V(i) outside) {
  return MOE_V(anyi)(MOE_V(andi)(outside, MOE_V(set1i)(0x80808080u)));
}

/* Whether it marks one of 128. */
MOE_INLINE int MOE_K(others_fp8)(const uint8_t *codes, const moe_element_format_ *f) {
  MOE_V(i) outside = MOE_V(set1i)(0u);
  for (int i = 0; i < 128; i += 4 * MOE_W)
    outside = MOE_V(ori)(outside, MOE_K(outside_fp8)(MOE_V(loadi)(codes + i), f));
  return MOE_K(special_fp8)(outside);
}

#if MOE_VECTORS
/* The next vectors of B for small_m_rows.inl, from rows of fp8. Returns 0 if not all are right: a code is not
   normal. */
MOE_INLINE int MOE_K(small_m_load_fp8)(const moe_small_m_ *s, const char *src, MOE_V(f) * b) {
  const moe_element_format_ f = *s->format;
  MOE_V(i) outside = MOE_V(set1i)(0u);
  MOE_K(small_m_prefetch)(MOE_K(small_m_deep), MOE_K(small_m_wide), s, src);
  MOE_UNROLL
  for (int i = 0; i < MOE_SMALL_M_VECTORS; i++) {
    const char *at = src + i / MOE_K(small_m_vectors) * s->stride + i % MOE_K(small_m_vectors) * MOE_W;
    if (i % MOE_K(small_m_vectors) == 0) outside = MOE_V(ori)(outside, MOE_K(outside_fp8_row)((const uint8_t *)at, &f));
    b[i] = MOE_K(plain_fp8)(MOE_V(loadu8)(at), 0, MOE_V(set1i)(127u), &f);
  }
  return !MOE_K(special_fp8)(outside);
}

/* All rows of A times the four codes, of any kind, in words of four vectors of columns, which are `pitch` apart. Their
   scale bytes, all plain, begin at bit `at` of `scales`. */
MOE_FN void MOE_K(small_m_fp8_words)(const moe_small_m_ *s, const MOE_V(i) * words, int64_t pitch,
                                     const MOE_V(i) * scales, int at, const moe_element_format_ *f, const float *x,
                                     float *c) {
  MOE_V(f) b[MOE_SMALL_M_VECTORS];
  for (int i = 0; i < MOE_SMALL_M_VECTORS; i++) {
    const MOE_V(i) code = MOE_V(srlv)(words[i % 4 * pitch], MOE_V(set1i)((uint32_t)(i / 4 * 8)));
    const MOE_V(i) byte = MOE_V(andi)(MOE_V(srlv)(scales[i % 4], MOE_V(set1i)((uint32_t)at)), MOE_V(set1i)(255u));
    b[i] = MOE_V(mul)(MOE_K(fp8)(code, 0, f), MOE_V(castf)(MOE_V(slli)(byte, 23)));
  }
  MOE_K(small_m_products)(s, 2, 4, 4, b, x, c);
}
#endif
