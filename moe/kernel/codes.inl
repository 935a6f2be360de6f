/* What packing codes of narrow elements takes: fp8 to float by the format's constants, and E8M0 scales. Exact, and without
   subnormal operands: fit for use in any floating-point mode. */

/* Codes have no bits above the sign. */
MOE_INLINE MOE_V(f) MOE_K(fp8)(MOE_V(i) codes, const moe_fp8_ *f) {
  const MOE_V(i) magnitude = MOE_V(andi)(codes, MOE_V(set1i)(127u)), magic = MOE_V(set1i)(f->magic);
  const MOE_V(i) sign = MOE_V(slli)(MOE_V(subi)(codes, magnitude), 24);
  const MOE_V(f) tiny = MOE_V(sub)(MOE_V(castf)(MOE_V(ori)(magnitude, magic)), MOE_V(castf)(magic));
  MOE_V(i) x = MOE_V(addi)(MOE_V(slli)(magnitude, f->shift), MOE_V(set1i)(f->rebias));
  x = MOE_V(selecti)(MOE_V(lti)(magnitude, MOE_V(set1i)(f->fraction)), MOE_V(casti)(tiny), x);
  x = MOE_V(selecti)(MOE_V(lti)(magnitude, MOE_V(set1i)(f->infinity)), x, MOE_V(set1i)(0x7f800000u));
  x = MOE_V(ori)(x, sign);
  x = MOE_V(selecti)(MOE_V(lti)(magnitude, MOE_V(set1i)(f->nan)), x, MOE_V(set1i)(0x7fc00000u));
  return MOE_V(castf)(x);
}

/* 2^(byte-127) as two factors, for their product may be subnormal; NaN for 255. */
MOE_INLINE void MOE_K(e8m0)(MOE_V(i) byte, MOE_V(f) factor[2]) {
  const MOE_V(i) half = MOE_V(srli)(byte, 1);
  const MOE_V(i) first = MOE_V(slli)(MOE_V(addi)(half, MOE_V(set1i)(64u)), 23);
  const MOE_V(i) second = MOE_V(slli)(MOE_V(addi)(MOE_V(subi)(byte, half), MOE_V(set1i)(63u)), 23);
  const MOE_V(m) number = MOE_V(lti)(byte, MOE_V(set1i)(255u));
  factor[0] = MOE_V(castf)(MOE_V(selecti)(number, first, MOE_V(set1i)(0x7fc00000u)));
  factor[1] = MOE_V(castf)(second);
}

MOE_INLINE MOE_V(f) MOE_K(scaled)(MOE_V(f) x, const MOE_V(f) factor[2]) {
  return MOE_V(mul)(MOE_V(mul)(x, factor[0]), factor[1]);
}

#define MOE_CODES_BITS 4
#define MOE_DECODE(codes, f) MOE_V(e2m1)(codes)
#include "pack_codes.inl"
#undef MOE_CODES_BITS
#undef MOE_DECODE

#define MOE_CODES_BITS 8
#define MOE_DECODE(codes, f) MOE_K(fp8)(MOE_V(andi)(codes, MOE_V(set1i)(255u)), f)
#include "pack_codes.inl"
#undef MOE_CODES_BITS
#undef MOE_DECODE
