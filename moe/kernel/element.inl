/* What each narrow element format must provide: its codes, in 32-bit lanes, to and from float, and rows of them. All
   of it follows from the constants of MOE_ELEMENT_LIST; included once per format. */

#define MOE_E(constant) MOE_CAT(MOE_CAT(MOE_ELEMENT_, constant), MOE_CAT(_, MOE_FORMAT))

/* A float whose last place is the format's smallest subnormal. */
#define MOE_ELEMENT_MAGIC ((uint32_t)(127 + 1 - MOE_E(BIAS) - MOE_E(FRACTION) + 23) << 23)

/* Exact, and without subnormal arithmetic: fit for use in any floating-point mode. Codes have no bits above the
   sign. */
MOE_INLINE MOE_V(f) MOE_KF(decode)(MOE_V(i) codes) {
  enum { place = MOE_E(BITS) - 1, shift = 23 - MOE_E(FRACTION) };
  const uint32_t rebias = (uint32_t)(127 - MOE_E(BIAS)) << 23;
  const MOE_V(i) magnitude = MOE_V(andi)(codes, MOE_V(set1i)((1u << place) - 1u));
  const MOE_V(i) sign = MOE_V(slli)(MOE_V(subi)(codes, magnitude), 31 - place), magic = MOE_V(set1i)(MOE_ELEMENT_MAGIC);
  const MOE_V(f) tiny = MOE_V(sub)(MOE_V(castf)(MOE_V(ori)(magnitude, magic)), MOE_V(castf)(magic));
  const MOE_V(m) subnormal = MOE_V(lti)(magnitude, MOE_V(set1i)(1u << MOE_E(FRACTION)));
  MOE_V(i) x = MOE_V(addi)(MOE_V(slli)(magnitude, shift), MOE_V(set1i)(rebias));
  x = MOE_V(selecti)(subnormal, MOE_V(casti)(tiny), x);
  if (MOE_E(INF_CODE) != 0) {
    const MOE_V(m) above = MOE_V(lti)(MOE_V(set1i)(MOE_E(MAX_CODE)), magnitude);
    x = MOE_V(selecti)(above, MOE_V(set1i)(0x7f800000u), x);
  }
  x = MOE_V(ori)(x, sign);
  if (MOE_E(NAN_CODE) != 0) {
    const MOE_V(m) nan = MOE_V(lti)(MOE_V(set1i)(MOE_E(INF_CODE) != 0 ? MOE_E(INF_CODE) : MOE_E(MAX_CODE)), magnitude);
    x = MOE_V(selecti)(nan, MOE_V(set1i)(0x7fc00000u), x);
  }
  return MOE_V(castf)(x);
}

/* Rounds to nearest, ties to even. To have them go away from zero, every float gets its last bit set: that takes
   those at a midpoint past it, and no other across one. */
MOE_INLINE MOE_V(i) MOE_KF(encode)(MOE_V(f) x, const moe_cast_ *cast) {
  enum { place = MOE_E(BITS) - 1, shift = 23 - MOE_E(FRACTION) };
  const uint32_t rebias = (uint32_t)(127 - MOE_E(BIAS)) << 23, below_half = (1u << (shift - 1)) - 1u;
  const MOE_V(i) bits = MOE_V(casti)(x), given = MOE_V(andi)(bits, MOE_V(set1i)(0x7fffffffu));
  const MOE_V(i) magnitude = MOE_V(ori)(given, MOE_V(set1i)(cast->away)), magic = MOE_V(set1i)(MOE_ELEMENT_MAGIC);
  const MOE_V(i) odd = MOE_V(andi)(MOE_V(srai)(magnitude, shift), MOE_V(set1i)(1u));
  const MOE_V(i) sign = MOE_V(andi)(MOE_V(srai)(bits, 31 - place), MOE_V(set1i)(1u << place));
  const MOE_V(f) tiny = MOE_V(add)(MOE_V(castf)(magnitude), MOE_V(castf)(magic));
  const MOE_V(m) subnormal = MOE_V(lti)(magnitude, MOE_V(set1i)(rebias + (1u << 23)));
  MOE_V(i) code = MOE_V(addi)(MOE_V(addi)(magnitude, odd), MOE_V(set1i)(below_half - rebias));
  code = MOE_V(selecti)(subnormal, MOE_V(subi)(MOE_V(casti)(tiny), magic), MOE_V(srai)(code, shift));
  code = MOE_V(selecti)(MOE_V(lti)(MOE_V(set1i)(MOE_E(MAX_CODE)), code), MOE_V(set1i)(cast->overflow), code);
  code = MOE_V(selecti)(MOE_V(lti)(MOE_V(set1i)(0x7f7fffffu), given), MOE_V(set1i)(cast->infinity), code);
  if (MOE_E(NAN_CODE) != 0 && MOE_E(INF_CODE) == 0) /* what overflowed to NaN has no sign */
    code = MOE_V(selecti)(MOE_V(lti)(MOE_V(set1i)(MOE_E(MAX_CODE)), code), code, MOE_V(ori)(code, sign));
  else code = MOE_V(ori)(code, sign);
  return MOE_V(selecti)(MOE_V(lti)(MOE_V(set1i)(0x7f800000u), given), MOE_V(set1i)(MOE_E(NAN_CODE)), code);
}

MOE_FN void MOE_KF(load_element)(float *dst, const uint8_t *src, int64_t n) {
  for (int64_t i = 0; i < n; i += MOE_W) {
    const int64_t left = n - i;
    MOE_V(i) codes;
    if (MOE_E(BITS) == 4) codes = left >= MOE_W ? MOE_V(loadu4)(src, i) : MOE_V(loadu4n)(src, i, left);
    else codes = left >= MOE_W ? MOE_V(loadu8)(src + i) : MOE_V(loadu8n)(src + i, left);
    const MOE_V(f) x = MOE_KF(decode)(codes);
    if (left >= MOE_W) MOE_V(store)(dst + i, x);
    else MOE_V(storen)(dst + i, x, left);
  }
}

MOE_FN void MOE_KF(store_element)(uint8_t *dst, const float *src, int64_t n, const moe_cast_ *cast) {
  for (int64_t i = 0; i < n; i += MOE_W) {
    const int64_t left = n - i;
    const MOE_V(i) codes = MOE_KF(encode)(left >= MOE_W ? MOE_V(load)(src + i) : MOE_V(loadn)(src + i, left), cast);
    if (MOE_E(BITS) == 4 && left >= MOE_W) MOE_V(store4)(dst, i, codes);
    else if (MOE_E(BITS) == 4) MOE_V(store4n)(dst, i, codes, left);
    else if (left >= MOE_W) MOE_V(store8)(dst + i, codes);
    else MOE_V(store8n)(dst + i, codes, left);
  }
}

#undef MOE_E
#undef MOE_ELEMENT_MAGIC
