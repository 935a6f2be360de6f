/* Groups of 32 elements of one storage format to codes and back, where all are numbers: the usual case. Two neighbours
   lie in the same lane of two vectors, as two bf16 do in a word. Included for each format. */

/* What groups are to be multiplied by, and their scale bytes, up to the first that is not encoded here. */
MOE_INLINE int64_t MOE_KF(group_factors)(float *factor, uint8_t *scales, const char *from, int64_t groups,
                                         const moe_numbers_ *q) {
  for (int64_t g = 0; g < groups; g++, from += 32 * (int64_t)sizeof(MOE_FORMAT_TYPE)) {
    factor[g] = q->factor;
    if (q->known) continue;
    const uint32_t amax = MOE_VF(top32)(from);
    if (amax >= 0x7f800000u) return g;
    if (scales) {
      const int32_t byte = (int32_t)((amax + q->rule.round) >> 23) + q->rule.offset;
      const uint32_t scale = byte < 0 ? 0u : (uint32_t)byte;
      scales[g] = (uint8_t)scale;
      factor[g] = moe_castf_scalar((254u - scale) << 23);
    }
    if (q->bounded && moe_casti_scalar(moe_mul_scalar(moe_castf_scalar(amax), factor[g])) > q->limit) return g;
  }
  return groups;
}

MOE_FN int64_t MOE_KF(quantize_groups)(uint8_t *codes, uint8_t *scales, const void *x, int64_t groups,
                                       const moe_numbers_ *numbers) {
  enum { some = 16 }; /* their scales are found before they are encoded: neither has to wait for the other */
  const moe_numbers_ q = *numbers; /* nothing that is stored can change it */
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE), step = q.wide ? 32 : 16;
  const MOE_V(i) place = MOE_V(set1i)(q.sign), down = MOE_V(set1i)(q.sign_shift);
  const char *from = (const char *)x;
  for (int64_t at = 0; at < groups; at += some) {
    float factor[some];
    const int64_t count = moe_min_(some, groups - at);
    const int64_t n = MOE_KF(group_factors)(factor, scales ? scales + at : NULL, from, count, &q);
    for (int64_t g = 0; g < n; g++, from += 32 * size, codes += step) {
      const MOE_V(f) scale = MOE_V(set1)(factor[g]);
      for (int64_t line = 0; line < 32 * size; line += 64) __builtin_prefetch(from + line + 32 * size * q.ahead);
      __builtin_prefetch(codes + step * q.ahead, 1);
      for (int i = 0; i < 16; i += MOE_W) {
        MOE_V(f) even, odd;
        const MOE_V(i) signs = MOE_VF(load2)(from + 2 * i * size, &even, &odd);
        const MOE_V(i) low = MOE_K(number)(MOE_V(mul)(even, scale), &q);
        const MOE_V(i) high = MOE_V(slli)(MOE_K(number)(MOE_V(mul)(odd, scale), &q), 16);
        const MOE_V(i) magnitudes = MOE_V(mux)(MOE_V(set1i)(0xffffu), low, high);
        const MOE_V(i) bounded = MOE_V(min2x16)(magnitudes, MOE_V(set1i)(q.most * 0x00010001u));
        const MOE_V(i) both = MOE_V(mux)(place, MOE_V(srlv)(signs, down), bounded);
        if (q.wide) MOE_V(store2x8)(codes + 2 * i, both);
        else MOE_V(store8)(codes + i, MOE_V(ori)(both, MOE_V(srli)(both, 12)));
      }
    }
    if (n < count) return at + n;
  }
  return groups;
}

MOE_FN int64_t MOE_KF(dequantize_groups)(void *x, const uint8_t *codes, const uint8_t *scales, int64_t groups,
                                         const moe_numbers_ *numbers) {
  const moe_numbers_ q = *numbers;
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE), step = q.wide ? 32 : 16;
  const MOE_V(i) place = MOE_V(set1i)(q.sign);
  char *to = (char *)x;
  MOE_V(f) factor = MOE_V(set1)(q.factor);
  for (int64_t g = 0; g < groups; g++, to += 32 * size, codes += step) {
    __builtin_prefetch(codes + step * q.ahead);
    for (int64_t line = 0; line < 32 * size; line += 64) __builtin_prefetch(to + line + 32 * size * q.ahead, 1);
    /* bf16 holds every element under such a scale. */
    const int exact = MOE_FORMAT_UPPER && scales && MOE_PLAIN_SCALE_(scales[g]);
    if (scales) {
      if (scales[g] == 0 || scales[g] == 255) return g;
      factor = MOE_V(castf)(MOE_V(set1i)((uint32_t)scales[g] << 23));
    }
    if (q.wide && MOE_K(special_codes)(codes, &q)) return g;
    for (int i = 0; i < 16; i += MOE_W) {
      MOE_V(f) even, odd;
      MOE_V(i) signs = MOE_V(set1i)(0u);
      if (q.wide) {
        const MOE_V(i) both = MOE_V(load2x8)(codes + 2 * i);
        even = MOE_K(magnitude_of)(MOE_V(sllv)(both, MOE_V(set1i)(q.shift)), &q);
        odd = MOE_K(magnitude_of)(MOE_V(sllv)(both, MOE_V(set1i)(q.shift - 16)), &q);
        signs = MOE_V(slli)(MOE_V(andi)(both, place), 8);
      } else {
        const MOE_V(i) both = MOE_V(loadu8)(codes + i);
        even = MOE_V(e2m1)(both);
        odd = MOE_V(e2m1)(MOE_V(srli)(both, 4));
      }
      even = MOE_V(mul)(even, factor);
      odd = MOE_V(mul)(odd, factor);
      if (exact) MOE_V(store2_upper)(to + 2 * i * size, even, odd, signs);
      else MOE_VF(store2)(to + 2 * i * size, even, odd, signs);
    }
  }
  return groups;
}
