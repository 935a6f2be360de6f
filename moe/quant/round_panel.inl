/* An f32 panel rounded to MX where it lies: a group is a column of k <= 32 rows. */

enum { MOE_K(round_panel_vectors) = MOE_NR / MOE_W };

/* Where an element's exponent is e, rounding to `fraction` bits is adding 2^(e+23-fraction) and subtracting it again.
   Returns 0, and does nothing, unless every column is zeros or is large and small enough that all of this is exact. */
MOE_FN int MOE_K(round_panel)(float *panel, int64_t k, const moe_numbers_ *q) {
  const MOE_V(i) magnitudes = MOE_V(set1i)(0x7fffffffu), exponents = MOE_V(set1i)(0x7f800000u);
  const MOE_V(i) least = MOE_V(set1i)(0x18000000u), most = MOE_V(set1i)(0x70000000u), zero = MOE_V(set1i)(0u);
  const MOE_V(i) up = MOE_V(set1i)((uint32_t)q->format.shift << 23);
  const uint32_t top = (q->format.max << q->format.shift) + q->format.rebias; /* bits of the largest element */
  MOE_V(i) amax[MOE_K(round_panel_vectors)], others = zero;
  if (q->general || q->away || q->most != q->format.max) return 0;
  for (int j = 0; j < MOE_K(round_panel_vectors); j++) {
    MOE_V(i) m = zero;
    for (int64_t i = 0; i < k; i++)
      m = MOE_V(maxi)(m, MOE_V(andi)(MOE_V(loadi)(panel + i * MOE_NR + j * MOE_W), magnitudes));
    others = MOE_V(ori)(others, MOE_V(selecti)(MOE_V(lti)(m, least), m, zero));
    others = MOE_V(ori)(others, MOE_V(selecti)(MOE_V(lti)(most, m), m, zero));
    amax[j] = m;
  }
  if (MOE_V(topi)(others) != 0) return 0;
  for (int j = 0; j < MOE_K(round_panel_vectors); j++) {
    MOE_V(i) byte = MOE_V(srli)(MOE_V(addi)(amax[j], MOE_V(set1i)(q->rule.round)), 23);
    byte = MOE_V(maxi)(MOE_V(addi)(byte, MOE_V(set1i)((uint32_t)q->rule.offset)), MOE_V(set1i)(32u));
    const MOE_V(i) normal = MOE_V(slli)(MOE_V(addi)(byte, MOE_V(set1i)((uint32_t)(1 - q->format.bias))), 23);
    const MOE_V(f) largest = MOE_V(castf)(MOE_V(addi)(MOE_V(slli)(byte, 23), MOE_V(set1i)(top - (127u << 23))));
    for (float *at = panel + j * MOE_W, *end = at + k * MOE_NR; at < end; at += MOE_NR) {
      const MOE_V(i) x = MOE_V(loadi)(at), m = MOE_V(andi)(x, magnitudes);
      const MOE_V(f) c = MOE_V(castf)(MOE_V(addi)(MOE_V(maxi)(MOE_V(andi)(m, exponents), normal), up));
      const MOE_V(f) y = MOE_V(sub)(MOE_V(add)(MOE_V(castf)(m), c), c);
      MOE_V(storei)(at, MOE_V(ori)(MOE_V(casti)(MOE_V(min)(y, largest)), MOE_V(subi)(x, m)));
    }
  }
  return 1;
}
