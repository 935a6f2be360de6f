/* Groups of 32 bf16 to codes in 16-bit lanes. Under a scale that is a power of two, dividing moves an exponent and
   rounding drops the last bits of a fraction that is short already: no float is needed, and twice as many elements fit
   into a vector. For vectors only, ties to even, and codes that all have a sign. */

/* Magnitudes to fp8 codes whose fraction is `shift` bits shorter, unbounded; marks the lanes that would be subnormal
   codes, which are left as they fall. `zero`: exponent 0 of the code, in its place. */
MOE_INLINE MOE_V(i) MOE_K(halves_wide)(MOE_V(i) magnitude, MOE_V(i) zero, int shift, MOE_V(i) *marks) {
  const uint32_t deep = (uint32_t)(7 - shift) << 7; /* what is further below rounds to zero */
  const MOE_V(i) above = MOE_V(sub2x16)(magnitude, MOE_V(subi)(zero, MOE_V(set1i)(deep * 0x00010001u)));
  const MOE_V(i) number = MOE_V(subs2x16)(magnitude, zero);
  const MOE_V(i) odd = MOE_V(andi)(MOE_V(srli)(number, shift), MOE_V(set1i)(0x00010001u));
  const MOE_V(i) half = MOE_V(set1i)(((1u << (shift - 1)) - 1) * 0x00010001u);
  *marks = MOE_V(ori)(*marks, MOE_V(subs2x16)(MOE_V(set1i)((deep + 127) * 0x00010001u), above));
  return MOE_V(srl2x16)(MOE_V(addi)(MOE_V(addi)(number, odd), half), shift);
}

/* Magnitudes to e2m1 codes, none left out. From half of the least code on, every 64 steps of bf16 end at a code or
   between two; what is added, by entry, makes 64 of the code and 2 from where it begins. */
MOE_INLINE MOE_V(i) MOE_K(halves_narrow)(MOE_V(i) magnitude, MOE_V(i) zero) {
  static const uint8_t add[16] = {191, 128, 64, 64, 31, 32, 31, 32, 31, 32, 31, 32, 31, 32, 31, 32};
  const MOE_V(i) number = MOE_V(subs2x16)(magnitude, MOE_V(subi)(zero, MOE_V(set1i)(128 * 0x00010001u)));
  const MOE_V(i) sum = MOE_V(addi)(number, MOE_V(lookup2x16)(add, MOE_V(srl2x16)(number, 6)));
  return MOE_V(subi)(MOE_V(srl2x16)(sum, 6), MOE_V(set1i)(0x00020002u));
}

/* Groups [g, n) of some, up to the first that is not for here, whose codes are then left as they fall; returns where
   it stopped. */
MOE_INLINE int64_t MOE_K(halves_run)(uint8_t *codes, const char *from, const moe_some_groups_ *some, int64_t g,
                                     int64_t n, const moe_numbers_ *q, int wide) {
  const MOE_V(i) most = MOE_V(set1i)(q->most * 0x00010001u), magnitudes = MOE_V(set1i)(0x7fff7fffu);
  const int64_t step = wide ? 32 : 16;
  const int shift = (int)q->shift - 16;
  for (; g < n && !some->aside[g]; g++) {
    const MOE_V(i) zero = MOE_V(set1i)(some->zero[g]);
    MOE_V(i) marks = MOE_V(set1i)(0u), x[16 / MOE_W], code[16 / MOE_W];
    __builtin_prefetch(from + 64 * (g + q->ahead));
    __builtin_prefetch(codes + step * (g + q->ahead), 1);
    MOE_UNROLL_FEW
    for (int i = 0; i < 16 / MOE_W; i++) {
      x[i] = MOE_V(load2x16)(from + 64 * g + 4 * MOE_W * i);
      const MOE_V(i) magnitude = MOE_V(andi)(x[i], magnitudes);
      code[i] = wide ? MOE_K(halves_wide)(magnitude, zero, shift, &marks) : MOE_K(halves_narrow)(magnitude, zero);
      code[i] = MOE_V(min2x16)(code[i], most);
    }
    if (wide) MOE_V(store32x8)(codes + step * g, code, x);
    else MOE_V(store32x4)(codes + step * g, code, x);
    if (wide && MOE_V(anyi)(marks)) return g;
  }
  return g;
}

MOE_INLINE int64_t MOE_K(quantize_halves)(uint8_t *codes, const char *from, const moe_some_groups_ *some, int64_t g,
                                          int64_t n, const moe_numbers_ *q) {
  return q->wide ? MOE_K(halves_run)(codes, from, some, g, n, q, 1) : MOE_K(halves_run)(codes, from, some, g, n, q, 0);
}
