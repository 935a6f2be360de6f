/* mx_quantize_oracle.h: groups of 32 under one scale, by the definitions in moe.h and in double, where quotients by
   powers of two are exact. */
#ifndef MOE_TEST_MX_QUANTIZE_ORACLE_H
#define MOE_TEST_MX_QUANTIZE_ORACLE_H

#include "element_oracle.h"

static inline int is_special(float x) { return (bits_of(x) & 0x7f800000u) == 0x7f800000u; }

static inline int mx_scale_byte(const struct element *f, int rule, double amax) {
  int exponent, emax, precision, s = 0;
  const double top = 2 * frexp(f->largest, &emax), m = 2 * frexp(amax, &exponent);
  emax--, exponent--;
  if (amax == 0) return 0;
  switch (rule) {
    case MOE_SCALE_OCP_FLOOR: s = exponent - emax; break;
    case MOE_SCALE_NKI_ALT: s = f->bits < 8 || (int)f->id >= ELEMENTS ? exponent - emax : exponent - (emax - 1); break;
    case MOE_SCALE_ROUND_UP:
      for (s = -200; amax > ldexp(f->largest, s); s++) continue;
      break;
    case MOE_SCALE_CEIL:
      for (s = -200; amax > ldexp(1, s); s++) continue;
      s -= emax;
      break;
    case MOE_SCALE_EVEN:
      precision = (int)f->id < ELEMENTS ? f->fraction_bits : f->fraction_bits - 1;
      (void)frexp(rint(ldexp(m, precision)), &s);
      s += exponent - precision - 1 - emax;
      break;
    default: s = exponent - emax + (int)floorl(log2l((long double)m / (long double)top) + 0.5L); break;
  }
  return s + 127 < 0 ? 0 : s + 127 > 254 ? 254 : s + 127;
}

static inline void mx_quantize_line(const struct element *f, int rule, uint32_t cast, const float *x, int64_t n,
                                    uint8_t *codes, uint8_t *scales) {
  for (int64_t g = 0; g < n; g += 32) {
    double amax = 0;
    int special = 0, end = (int)(n - g < 32 ? n - g : 32);
    for (int i = 0; i < end; i++) {
      if (is_special(x[g + i]))
        special = 1;
      else if (fabs((double)x[g + i]) > amax)
        amax = fabs((double)x[g + i]);
    }
    const int byte = special && f->nan < 0 ? 255 : mx_scale_byte(f, rule, amax);
    scales[g / 32] = (uint8_t)byte;
    for (int i = 0; i < end; i++) {
      const uint32_t bits = bits_of(x[g + i]);
      int code = 0;
      if (is_special(x[g + i]))
        code = element_code(f, bits, cast & ~(uint32_t)MOE_CAST_SATURATE);
      else if (byte != 255)
        code = element_of_number(f, (int)(bits >> 31), ldexp(fabs((double)x[g + i]), 127 - byte), cast);
      element_put(f, codes, g + i, byte == 255 ? 0 : code);
    }
  }
}

static inline uint32_t mx_dequantized(const struct element *f, int byte, int code) {
  const uint32_t bits = element_decoded(f, code);
  if (byte == 255 || (bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc00000u;
  if ((bits & 0x7fffffffu) == 0x7f800000u) return bits;
  return bits_of((float)ldexp((double)float_of(bits), byte - 127));
}

#endif
