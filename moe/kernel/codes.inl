/* Codes in the lanes' bits from `at` on, times the power of two that the lanes' E8M0 bytes say. All of it is exact, and without
   subnormal operands: fit for use in any floating-point mode. The plain forms are for scales that MOE_PLAIN_SCALE_ names and,
   in fp8, codes of normal numbers. */

/* Two factors, for their product may be subnormal; NaN for 255. */
MOE_INLINE MOE_V(f) MOE_K(times_e8m0)(MOE_V(f) x, MOE_V(i) byte) {
  const MOE_V(i) half = MOE_V(srli)(byte, 1);
  const MOE_V(i) first = MOE_V(slli)(MOE_V(addi)(half, MOE_V(set1i)(64u)), 23);
  const MOE_V(i) second = MOE_V(slli)(MOE_V(addi)(MOE_V(subi)(byte, half), MOE_V(set1i)(63u)), 23);
  const MOE_V(m) number = MOE_V(lti)(byte, MOE_V(set1i)(255u));
  x = MOE_V(mul)(x, MOE_V(castf)(MOE_V(selecti)(number, first, MOE_V(set1i)(0x7fc00000u))));
  return MOE_V(mul)(x, MOE_V(castf)(second));
}

MOE_INLINE MOE_V(f) MOE_K(scaled_e2m1)(MOE_V(i) word, int at, MOE_V(i) byte, const moe_fp8_ *f) {
  (void)f;
  return MOE_K(times_e8m0)(MOE_V(e2m1)(MOE_V(srli)(word, at)), byte);
}

MOE_INLINE MOE_V(f) MOE_K(plain_e2m1)(MOE_V(i) word, int at, MOE_V(i) byte, const moe_fp8_ *f) {
  (void)f;
  return MOE_V(mul)(MOE_V(e2m1)(MOE_V(srli)(word, at)), MOE_V(castf)(MOE_V(slli)(byte, 23)));
}

MOE_INLINE MOE_V(f) MOE_K(scaled_fp8)(MOE_V(i) word, int at, MOE_V(i) byte, const moe_fp8_ *f) {
  const MOE_V(i) magnitude = MOE_V(andi)(MOE_V(srli)(word, at), MOE_V(set1i)(127u)), magic = MOE_V(set1i)(f->magic);
  const MOE_V(i) sign = MOE_V(andi)(MOE_V(slli)(word, 24 - at), MOE_V(set1i)(0x80000000u));
  const MOE_V(f) tiny = MOE_V(sub)(MOE_V(castf)(MOE_V(ori)(magnitude, magic)), MOE_V(castf)(magic));
  MOE_V(i) x = MOE_V(addi)(MOE_V(slli)(magnitude, f->shift), MOE_V(set1i)(f->rebias));
  x = MOE_V(selecti)(MOE_V(lti)(magnitude, MOE_V(set1i)(f->fraction)), MOE_V(casti)(tiny), x);
  x = MOE_V(selecti)(MOE_V(lti)(magnitude, MOE_V(set1i)(f->infinity)), x, MOE_V(set1i)(0x7f800000u));
  x = MOE_V(ori)(x, sign);
  x = MOE_V(selecti)(MOE_V(lti)(magnitude, MOE_V(set1i)(f->nan)), x, MOE_V(set1i)(0x7fc00000u));
  return MOE_K(times_e8m0)(MOE_V(castf)(x), byte);
}

/* Sign and magnitude are brought to their places in one shift; bias and scale are one sum. */
MOE_INLINE MOE_V(f) MOE_K(plain_fp8)(MOE_V(i) word, int at, MOE_V(i) byte, const moe_fp8_ *f) {
  const MOE_V(i) exponent = MOE_V(addi)(MOE_V(slli)(byte, 23), MOE_V(set1i)(f->rebias - (127u << 23)));
  const MOE_V(i) placed = MOE_V(srai)(MOE_V(slli)(word, 24 - at), 24 - f->shift);
  return MOE_V(castf)(MOE_V(addi)(MOE_V(andi)(placed, MOE_V(set1i)(0x80000000u | 127u << f->shift)), exponent));
}

#define MOE_CODES_BITS 4
#define MOE_SCALED MOE_K(scaled_e2m1)
#define MOE_PLAIN MOE_K(plain_e2m1)
#include "pack_codes.inl"
#undef MOE_CODES_BITS
#undef MOE_SCALED
#undef MOE_PLAIN

#define MOE_CODES_BITS 8
#define MOE_SCALED MOE_K(scaled_fp8)
#define MOE_PLAIN MOE_K(plain_fp8)
#include "pack_codes.inl"
#undef MOE_CODES_BITS
#undef MOE_SCALED
#undef MOE_PLAIN
