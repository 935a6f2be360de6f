/* The core of the vocabulary, in portable C: vectors of one element. Products and elementwise kernels are written in
   it; formats also use quant_<isa>.h. It defines what the other instruction sets must equal, bit for bit.

   Every instruction set provides, with its own suffix:
     MOE_W_<isa>                     elements in a vector
     moe_f_<isa>, moe_i_<isa>, moe_m_<isa>   vectors of binary32, of 32-bit integers, and comparison masks
     set1 set1i casti castf          equal elements; the same bits as another type
     load store, loadn storen        W elements, or the first n < W: the rest reads as 0 and is not written
     load_bf16 load_fp16, store_*    the same with conversion; *_f32 store a canonical NaN
     store_uppers                    two vectors, one after the other, as bf16
     loadi storei, loadu16 loadu16n  32-bit words; 16-bit words, zero-extended
     storei_nt                       non-temporal, to a multiple of a vector's size: see moe_cpu_clean_
     load_columns                    vector j: word j of each of W rows, `stride` bytes apart
     add sub mul div fma sqrt        IEEE; fma(a,b,c) = a*b+c rounded once
     fma_onto                        fma for sums that stay in registers: the result replaces c
     scalef                          a*2^n rounded once, n whole, from -150 to 128; or both NaNs
     min max                         a < b ? a : b and a > b ? a : b: a NaN in b is returned
     lt select                       a < b; select(m,a,b) = m ? a : b
     addi subi andi ori slli srli    of integers
     sllv srlv srav                  shifts by a vector of equal elements
     lti maxi selecti                a < b and the larger, signed; select for integers
     topi                            the largest element, unsigned
     mux                             the bits of a where m has ones, and those of b, which has none there, elsewhere
     sum16                           of 16 floats: adds i and i+8, then i and i+4, and so on
     canon                           NaN becomes the canonical NaN
     bf16_round                      a number's bits, rounded to bf16 in the upper 16; the lower 16 are undefined
   and, where MOE_PACKED_A is 1:
     round2 halve2                   two vectors, one after the other, as bf16, as fp16; neither has a NaN
     any_nan4                        whether any of four vectors has one
     storei_part shift_in            see core_avx512.h */
#ifndef MOE_SIMD_CORE_SCALAR_H
#define MOE_SIMD_CORE_SCALAR_H

enum { MOE_W_scalar = 1 };
typedef float moe_f_scalar;
typedef uint32_t moe_i_scalar;
typedef int moe_m_scalar;

MOE_INLINE uint32_t moe_casti_scalar(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
MOE_INLINE float moe_castf_scalar(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

MOE_INLINE float moe_set1_scalar(float x) { return x; }
MOE_INLINE uint32_t moe_set1i_scalar(uint32_t x) { return x; }
MOE_INLINE float moe_add_scalar(float a, float b) { return a + b; }
MOE_INLINE float moe_sub_scalar(float a, float b) { return a - b; }
MOE_INLINE float moe_mul_scalar(float a, float b) {
  float product = a * b;
  MOE_OPAQUE(product);
  return product;
}
MOE_INLINE float moe_div_scalar(float a, float b) { return a / b; }
/* MinGW's fmaf rounds twice. A sum in double, rounded to odd (its last bit is set where it is not exact), rounds to
   float as the exact sum does. MOE_FMAF_IN_DOUBLE may be defined as 0 or 1, so that tests see both on one machine. */
#ifndef MOE_FMAF_IN_DOUBLE
#if defined(__MINGW32__) && !defined(__FMA__)
#define MOE_FMAF_IN_DOUBLE 1
#else
#define MOE_FMAF_IN_DOUBLE 0
#endif
#endif
#if MOE_FMAF_IN_DOUBLE
MOE_FN float moe_fmaf_(float a, float b, float c) {
  const double p = (double)a * (double)b, sum = p + (double)c, q = sum - p;
  const double rest = (p - (sum - q)) + ((double)c - q);
  uint64_t bits;
  memcpy(&bits, &sum, 8);
  const uint64_t even = ~bits & 1u;
  if (rest > 0.0) bits = sum > 0.0 ? bits + even : bits - even;
  if (rest < 0.0) bits = sum > 0.0 ? bits - even : bits + even;
  double odd;
  memcpy(&odd, &bits, 8);
  return (float)odd;
}
#else
#define moe_fmaf_ fmaf
#endif
MOE_INLINE float moe_fma_scalar(float a, float b, float c) { return moe_fmaf_(a, b, c); }
/* Without an instruction for it, the sum is formed in double. Rounding that to float is correct unless the sum is the
   midpoint of two floats, which its bits show, or the float is subnormal. */
MOE_INLINE float moe_fma_onto_scalar(float a, float b, float c) {
#if defined(__FMA__) || !MOE_X86
  return moe_fma_scalar(a, b, c);
#else
  const double sum = (double)a * (double)b + (double)c;
  uint64_t bits;
  memcpy(&bits, &sum, 8);
  const int midpoint = (bits & 0x1fffffffu) == 0x10000000u;
  const int subnormal = (bits << 1) - 1 < ((uint64_t)(1023 - 126) << 53) - 1;
  return midpoint || subnormal ? moe_fma_scalar(a, b, c) : (float)sum;
#endif
}
MOE_INLINE float moe_sqrt_scalar(float a) { return sqrtf(a); }
MOE_INLINE int moe_nan_scalar(float x) { return moe_casti_scalar(x) << 1 > 0xff000000u; }
/* Under -ffinite-math-only gcc may take a NaN to be less, whatever the pragmas say. */
MOE_INLINE int moe_lt_scalar(float a, float b) { return a < b && !moe_nan_scalar(a) && !moe_nan_scalar(b); }
MOE_INLINE float moe_select_scalar(int m, float a, float b) { return m ? a : b; }
MOE_INLINE float moe_min_scalar(float a, float b) { return moe_lt_scalar(a, b) ? a : b; }
MOE_INLINE float moe_max_scalar(float a, float b) { return moe_lt_scalar(b, a) ? a : b; }
MOE_INLINE uint32_t moe_addi_scalar(uint32_t a, uint32_t b) { return a + b; }
MOE_INLINE uint32_t moe_subi_scalar(uint32_t a, uint32_t b) { return a - b; }
MOE_INLINE uint32_t moe_andi_scalar(uint32_t a, uint32_t b) { return a & b; }
MOE_INLINE uint32_t moe_ori_scalar(uint32_t a, uint32_t b) { return a | b; }
MOE_INLINE uint32_t moe_slli_scalar(uint32_t a, int n) { return a << n; }
MOE_INLINE uint32_t moe_srli_scalar(uint32_t a, int n) { return a >> n; }
MOE_INLINE uint32_t moe_srav_scalar(uint32_t a, uint32_t n) { return a >> n | (a >> 31 ? ~(0xffffffffu >> n) : 0u); }
MOE_INLINE uint32_t moe_sllv_scalar(uint32_t a, uint32_t n) { return a << n; }
MOE_INLINE uint32_t moe_srlv_scalar(uint32_t a, uint32_t n) { return a >> n; }
MOE_INLINE uint32_t moe_mux_scalar(uint32_t m, uint32_t a, uint32_t b) { return (m & a) | (~m & b); }
MOE_INLINE float moe_power_scalar(uint32_t n) { return moe_castf_scalar((n + 127u) << 23); }
MOE_INLINE float moe_scalef_scalar(float a, float n) {
  const float whole = 0x1.8p23f; /* adding it rounds to an integer: converting a NaN would be undefined */
  const uint32_t all = moe_casti_scalar(n + whole) - moe_casti_scalar(whole), half = moe_srav_scalar(all, 1);
  return moe_mul_scalar(moe_mul_scalar(a, moe_power_scalar(half)), moe_power_scalar(all - half));
}
MOE_INLINE float moe_sum16_scalar(const float *x) {
  float sum[8];
  for (int i = 0; i < 8; i++) sum[i] = x[i] + x[i + 8];
  for (int apart = 4; apart > 0; apart /= 2)
    for (int i = 0; i < apart; i++) sum[i] = sum[i] + sum[i + apart];
  return sum[0];
}
MOE_INLINE int moe_lti_scalar(uint32_t a, uint32_t b) { return (a ^ 0x80000000u) < (b ^ 0x80000000u); }
MOE_INLINE uint32_t moe_selecti_scalar(int m, uint32_t a, uint32_t b) { return m ? a : b; }
MOE_INLINE uint32_t moe_topi_scalar(uint32_t a) { return a; }
MOE_INLINE uint32_t moe_maxi_scalar(uint32_t a, uint32_t b) { return moe_lti_scalar(a, b) ? b : a; }

MOE_INLINE float moe_canon_scalar(float x) { return moe_nan_scalar(x) ? moe_castf_scalar(0x7fc00000u) : x; }

/* ------------------------------------------------------------------------------------------------------ conversions */

MOE_INLINE float moe_bf16_decode_scalar(uint16_t h) { return moe_castf_scalar((uint32_t)h << 16); }

MOE_INLINE uint32_t moe_bf16_round_scalar(float x) {
  const uint32_t bits = moe_casti_scalar(x);
  return bits + 0x7fffu + (bits >> 16 & 1u);
}
MOE_INLINE uint16_t moe_bf16_encode_scalar(float x) {
  return (uint16_t)(moe_bf16_round_scalar(moe_canon_scalar(x)) >> 16);
}

MOE_INLINE float moe_fp16_decode_scalar(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return moe_castf_scalar(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return moe_castf_scalar(sign | ((magnitude << 13) + 0x38000000u));
  /* Subnormal: the integer times 2^-24, exact. */
  return moe_castf_scalar(sign | moe_casti_scalar((float)magnitude * 0x1p-24f));
}

MOE_INLINE uint16_t moe_fp16_encode_scalar(float x) {
  uint32_t bits = moe_casti_scalar(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7e00u;
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above round to infinity */
  if (magnitude < 0x38800000u) {
    /* Below 2^-14: adding 0.5 puts the last fp16 subnormal bit at the last binary32 bit, and rounds. */
    return (uint16_t)(sign | (moe_casti_scalar(moe_castf_scalar(magnitude) + 0.5f) - 0x3f000000u));
  }
  return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
}

MOE_INLINE float moe_load_scalar(const void *p) {
  float x;
  memcpy(&x, p, 4);
  return x;
}
MOE_INLINE uint32_t moe_loadi_scalar(const void *p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return x;
}
MOE_INLINE uint32_t moe_loadu16_scalar(const void *p) {
  uint16_t x;
  memcpy(&x, p, 2);
  return x;
}
MOE_INLINE void moe_store_scalar(void *p, float x) { memcpy(p, &x, 4); }
MOE_INLINE void moe_storei_scalar(void *p, uint32_t x) { memcpy(p, &x, 4); }
MOE_INLINE void moe_storei_nt_scalar(void *p, uint32_t x) { moe_storei_scalar(p, x); }
MOE_INLINE void moe_storeu16_scalar(void *p, uint16_t x) { memcpy(p, &x, 2); }

/* A vector of one has no partial loads: these are never reached with 0 < n < 1. */
MOE_INLINE float moe_loadn_scalar(const void *p, int64_t n) { return n > 0 ? moe_load_scalar(p) : 0.0f; }
MOE_INLINE uint32_t moe_loadu16n_scalar(const void *p, int64_t n) { return n > 0 ? moe_loadu16_scalar(p) : 0u; }
MOE_INLINE void moe_storen_scalar(void *p, float x, int64_t n) {
  if (n > 0) moe_store_scalar(p, x);
}

MOE_INLINE float moe_load_f32_scalar(const void *p) { return moe_load_scalar(p); }
MOE_INLINE float moe_loadn_f32_scalar(const void *p, int64_t n) { return moe_loadn_scalar(p, n); }
MOE_INLINE float moe_load_bf16_scalar(const void *p) { return moe_bf16_decode_scalar((uint16_t)moe_loadu16_scalar(p)); }
MOE_INLINE float moe_loadn_bf16_scalar(const void *p, int64_t n) { return n > 0 ? moe_load_bf16_scalar(p) : 0.0f; }
MOE_INLINE float moe_load_fp16_scalar(const void *p) { return moe_fp16_decode_scalar((uint16_t)moe_loadu16_scalar(p)); }
MOE_INLINE float moe_loadn_fp16_scalar(const void *p, int64_t n) { return n > 0 ? moe_load_fp16_scalar(p) : 0.0f; }

MOE_INLINE void moe_store_f32_scalar(void *p, float x) { moe_store_scalar(p, moe_canon_scalar(x)); }
MOE_INLINE void moe_storen_f32_scalar(void *p, float x, int64_t n) { moe_storen_scalar(p, moe_canon_scalar(x), n); }
MOE_INLINE void moe_store_bf16_scalar(void *p, float x) { moe_storeu16_scalar(p, moe_bf16_encode_scalar(x)); }
MOE_INLINE void moe_storen_bf16_scalar(void *p, float x, int64_t n) {
  if (n > 0) moe_store_bf16_scalar(p, x);
}
MOE_INLINE void moe_store_uppers_scalar(void *p, float a, float b) {
  moe_store_bf16_scalar(p, a);
  moe_store_bf16_scalar((char *)p + 2, b);
}
MOE_INLINE void moe_store_fp16_scalar(void *p, float x) { moe_storeu16_scalar(p, moe_fp16_encode_scalar(x)); }
MOE_INLINE void moe_storen_fp16_scalar(void *p, float x, int64_t n) {
  if (n > 0) moe_store_fp16_scalar(p, x);
}

MOE_INLINE void moe_load_columns_scalar(const void *p, int64_t stride, uint32_t v[1]) {
  (void)stride;
  v[0] = moe_loadi_scalar(p);
}

/* --------------------------------------------------------------------------------------- the bf16 dot product's fma */

MOE_INLINE float moe_daz_scalar(float x) {
  uint32_t bits = moe_casti_scalar(x);
  return (bits & 0x7f800000u) == 0 ? moe_castf_scalar(bits & 0x80000000u) : x;
}

/* Whether a result is not 0 and small enough that it may have to be flushed. */
MOE_INLINE uint32_t moe_tiny_scalar(float x) { return (moe_casti_scalar(x) & 0x7fffffffu) - 1u < 0x00800000u; }

/* fma with subnormal operands taken as zero and subnormal results flushed. A result is subnormal when, rounded to 24
   bits with an unbounded exponent, it lies below 2^-126; fmaf has rounded at 2^-149 instead, so a result of exactly
   2^-126 may have come from 2^-126 - 2^-150, which must flush. The exact sum decides: a*b is exact in double, TwoSum
   gives the rounding error. */
MOE_FN float moe_fma_flush_scalar(float a, float b, float c) {
  a = moe_daz_scalar(a);
  b = moe_daz_scalar(b);
  float r = moe_fmaf_(a, b, moe_daz_scalar(c));
  uint32_t magnitude = moe_casti_scalar(r) & 0x7fffffffu;
  if (magnitude == 0x00800000u) {
    double p = (double)a * (double)b, q = (double)moe_daz_scalar(c), s = p + q, t = s - p;
    double rest = (p - (s - t)) + (q - t), limit = 0x1p-126 - 0x1p-151;
    if (s < 0) {
      s = -s;
      rest = -rest;
    }
    if (s < limit || (s == limit && rest < 0)) magnitude = 0;
  }
  return magnitude < 0x00800000u ? moe_castf_scalar(moe_casti_scalar(r) & 0x80000000u) : r;
}

#endif
