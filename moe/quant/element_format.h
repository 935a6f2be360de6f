/* What a narrow element is, and an E8M0 scale byte. */
#ifndef MOE_QUANT_ELEMENT_FORMAT_H
#define MOE_QUANT_ELEMENT_FORMAT_H

/* A narrow element format: see MOE_ELEMENT_LIST; and what follows from it for decoding. */
typedef struct moe_element_format_ {
  int bits, fraction, bias;
  uint32_t max, infinity, nan;                      /* codes; 0: there is none */
  uint32_t first_normal, first_infinity, first_nan; /* the smallest such magnitudes */
  int shift;                                        /* from a code's fraction to a float's */
  uint32_t rebias;                                  /* to add to a float's bits, for the exponent */
  uint32_t magic;                                   /* a float whose last bit is the smallest subnormal */
  int nan_is_minus_zero;                            /* the code that would be -0 is NaN */
  /* Codes of 6 bits and integers are not stored as kernels take them, which is as bytes of sign and magnitude. */
  int packed;
  int sign; /* the sign's bit in what kernels take */
  int zero; /* the code of 0 of integers, once `flip` has made it count from the least number on; 0: not an integer */
  uint32_t flip;
} moe_element_format_;

/* What kernels rely on: 8 or 6 bits, or e2m1; behind the numbers infinity, if there is one, then NaN, which without
   infinity is the last code, or that of -0; emax of at least 2. */
#define MOE_ELEMENT_FITS_(name, NAME, bits, fraction, bias, max, infinity, nan)                             \
  _Static_assert(((bits) == 8 || (bits) == 6 || MOE_ELEMENT_##NAME == MOE_ELEMENT_E2M1) &&                  \
                     ((max) >> (fraction)) >= (bias) + 2 && ((infinity) == 0 || (infinity) == (max) + 1) && \
                     ((nan) == 0 || ((infinity) ? (nan) > (infinity) : (nan) == 127 || (nan) == 128)),      \
                 #name " does not fit the kernels");
MOE_ELEMENT_LIST(MOE_ELEMENT_FITS_)
#undef MOE_ELEMENT_FITS_

MOE_FN moe_element_format_ moe_element_format_of_(moe_element element) {
#define MOE_ELEMENT_FORMAT_(name, NAME, bits, fraction, bias, max, infinity, nan) \
  {bits, fraction, bias, max, infinity, nan, 0, 0, 0, 0, 0, 0, 0, (bits) == 6, (bits) == 4 ? 3 : 7, 0, 0},
  /* Integers are all subnormal. */
#define MOE_INTEGER_FORMAT_(NAME, bits, unit, max, flip) \
  {bits, 7, -6 - (unit), max, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 7, 1 << ((bits)-1), flip},
  static const moe_element_format_ formats[] = {MOE_ELEMENT_LIST(MOE_ELEMENT_FORMAT_)
                                                    MOE_INTEGER_LIST(MOE_INTEGER_FORMAT_)};
#undef MOE_ELEMENT_FORMAT_
#undef MOE_INTEGER_FORMAT_
  moe_element_format_ f = formats[element]; /* and what follows from it */
  f.first_normal = 1u << f.fraction;
  f.first_infinity = f.max + 1;
  f.first_nan = (f.infinity ? f.infinity : f.max) + 1;
  f.nan_is_minus_zero = f.nan == 128;
  f.shift = 23 - f.fraction;
  f.rebias = (uint32_t)(127 - f.bias) << 23;
  f.magic = (uint32_t)(127 + 1 - f.bias - f.fraction + 23) << 23;
  return f;
}

/* The index of the kernels for codes of 4 and of 8 bits. */
MOE_INLINE int moe_wide_(const moe_element_format_ *format) { return format->sign == 7; }

/* Bytes of n codes; n < 0: an overflow, which stays one. */
MOE_INLINE int64_t moe_element_bytes_(int64_t n, int64_t bits) {
  return bits == 8 || n < 0 ? n : n / 8 * bits + (n % 8 * bits + 7) / 8;
}

/* The bf16 values of the magnitudes of a format of 8 bits, byte by byte. A code's sign flips the value's. */
enum { MOE_BYTE_VALUES_ = 128 };
typedef struct moe_byte_table_ {
  uint8_t low[MOE_BYTE_VALUES_], high[MOE_BYTE_VALUES_];
} moe_byte_table_;

/* A scale byte as the bits of a float. */
MOE_INLINE uint32_t moe_e8m0_bits_(uint32_t byte) {
  return byte == 255 ? 0x7fc00000u : byte == 0 ? 0x00400000u : byte << 23;
}

#endif
