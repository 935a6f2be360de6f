/* The vocabulary in portable C: vectors of one element. It defines what the other instruction sets must equal, bit for
   bit.

   Every instruction set provides, with its own suffix:
     MOE_W_<isa>                     elements in a vector
     moe_f_<isa>, moe_i_<isa>, moe_m_<isa>   vectors of binary32, of 32-bit integers, and comparison masks
     load/store, loadn/storen        W elements, or the first n < W (the rest reads as 0 and is not touched)
     load_bf16 load_fp16, store_*    the same with conversion; *_f32 are synonyms of the plain ones
     store_uppers                    two vectors side by side as bf16
     loadi, loadu16/loadu16n, storei       32-bit words, 16-bit words zero-extended
     storei_past                     the same past the caches, to a multiple of a vector's size: see moe_cpu_clean_
     gather                          W 32-bit words, `stride` bytes apart, their bytes from the least significant on
     set1 set1i add sub mul div fma sqrt      IEEE; fma(a,b,c) = a*b+c rounded once
     min max                         a < b ? a : b and a > b ? a : b: a NaN in b is returned
     lt select                       a < b; select(m,a,b) = m ? a : b
     addi subi andi ori slli srli casti castf
     sllv srlv srav                  the same shifts by lanes that are all the same
     anyi topi                       whether a bit is set; the largest, unsigned
     lti maxi selecti                a < b and the larger, signed; select for integers
     min2x16 max2x16 sub2x16         of the upper and of the lower 16 bits, unsigned: the smaller; the larger; the
     subs2x16 srl2x16                difference; the same, or 0 where b is larger; shifted
     lt2x16                          likewise: all ones where a < b, both below 0x8000
     lookup2x16                      likewise: entry (below 16) of 16 bytes; above it, in the upper byte, entry 0
     mux                             the bits of a where m has ones, of b, which has none there, elsewhere
     loadu8 loadu8n store8 store8n   8-bit words, zero-extended and truncated
     loadu4 loadu4n store4 store4n   the same of two 4-bit words per byte, the even one low, from word `at` on, a
                                     multiple of W; what is stored is below 16, also in the lane that shares a byte
     e2m1                            the values of codes; bits above the fourth are ignored
     e2m1x4 (vectors only)           four codes of each lane of four vectors, from bit 0 or 16 on: of vector v, x[4*i+v]
                                     becomes the values of the i-th
     load2_*, store2_*               2W elements, the even ones in one vector, the odd ones in another; beside them a
                                     word per pair with their signs in bits 15 and 31, which load2 returns (its other
                                     bits may be set) and store2 adds (they may not). What is stored is no NaN
     load2x16 store2x16              2W 16-bit words, two in a lane
     store32x8 store32x4             32 words of 8 or 4 bits: 16-bit words, two in a lane of 16/W vectors, below 128 or
                                     8, with the signs (bit 15) of as many others
     load2x8                         2W 8-bit words, sign-extended to 16 bits, two in a lane
     lookup32x4                      stores 32 words of 16 bits: entries of a table of 16, by as many 4-bit words
     scalef                          a*2^n rounded once, n whole, from -150 to 128; or both NaNs
     sum16                           of 16 floats, i and i+8 added, then i and i+4, and so on
     fma_onto                        fma for sums that stay in registers: the result takes the place of c
     fma_exact                       fma where a*b is exact: it may be rounded
     canon                           NaN becomes the canonical NaN
     bf16_round                      a number's bits, rounded to bf16 in the upper half; the lower is left as it falls
     largest2x16                     lane i: the largest upper and lower words of vector i of W, which are used up
     load_columns                    vector j: word j of each of W rows, `stride` bytes apart
   and, where MOE_PACKED_A is 1:
     round2 halve2                   two vectors side by side as bf16, as fp16; neither has a NaN
     any_nan4                        whether any of four vectors has one */
#ifndef MOE_SIMD_SCALAR_H
#define MOE_SIMD_SCALAR_H

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
MOE_INLINE float moe_fma_scalar(float a, float b, float c) { return fmaf(a, b, c); }
/* Where that is no instruction: the sum in double, rounded to float, is rounded once unless it lies half-way between
   two floats. Its bits show whether it does, but for subnormal floats. */
MOE_INLINE float moe_fma_onto_scalar(float a, float b, float c) {
#if defined(__FMA__) || !MOE_X86
  return moe_fma_scalar(a, b, c);
#else
  const double sum = (double)a * (double)b + (double)c;
  uint64_t bits;
  memcpy(&bits, &sum, 8);
  const int half_way = (bits & 0x1fffffffu) == 0x10000000u;
  const int subnormal = (bits << 1) - 1 < ((uint64_t)(1023 - 126) << 53) - 1;
  return half_way || subnormal ? moe_fma_scalar(a, b, c) : (float)sum;
#endif
}
MOE_INLINE float moe_fma_exact_scalar(float a, float b, float c) { return moe_mul_scalar(a, b) + c; }
MOE_INLINE float moe_sqrt_scalar(float a) { return sqrtf(a); }
MOE_INLINE int moe_nan_scalar(float x) { return moe_casti_scalar(x) << 1 > 0xff000000u; }
/* Where the rest of the program is compiled with -ffinite-math-only, gcc may take a NaN to be less, whatever the
   pragmas say. */
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
MOE_INLINE uint32_t moe_min2x16_scalar(uint32_t a, uint32_t b) {
  const uint32_t low = (a & 0xffffu) < (b & 0xffffu) ? a : b, high = a >> 16 < b >> 16 ? a : b;
  return moe_mux_scalar(0xffffu, low, high);
}
MOE_INLINE uint32_t moe_max2x16_scalar(uint32_t a, uint32_t b) { return a + b - moe_min2x16_scalar(a, b); }
MOE_INLINE uint32_t moe_sub2x16_scalar(uint32_t a, uint32_t b) {
  return moe_mux_scalar(0xffffu, a - b, (a & 0xffff0000u) - (b & 0xffff0000u));
}
MOE_INLINE uint32_t moe_subs2x16_scalar(uint32_t a, uint32_t b) { return a - moe_min2x16_scalar(a, b); }
MOE_INLINE uint32_t moe_lt2x16_scalar(uint32_t a, uint32_t b) {
  return ((a & 0xffffu) < (b & 0xffffu) ? 0xffffu : 0) | (a >> 16 < b >> 16 ? 0xffff0000u : 0);
}
MOE_INLINE uint32_t moe_srl2x16_scalar(uint32_t a, int n) { return a >> n & (0xffffu >> n) * 0x00010001u; }
MOE_INLINE uint32_t moe_lookup2x16_scalar(const uint8_t *table, uint32_t entry) {
  return table[entry & 15u] + ((uint32_t)table[entry >> 16 & 15u] << 16) + table[0] * 0x01000100u;
}
MOE_INLINE float moe_power_scalar(uint32_t n) { return moe_castf_scalar((n + 127u) << 23); }
MOE_INLINE float moe_scalef_scalar(float a, float n) {
  const float whole = 0x1.8p23f; /* its last place is 1: no conversion, which of a NaN is undefined */
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
MOE_INLINE int moe_anyi_scalar(uint32_t a) { return a != 0; }
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
    /* Below 2^-14: adding 0.5 puts the last fp16 subnormal bit at the last binary32 bit, rounding on the way. */
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
MOE_INLINE uint32_t moe_gather_scalar(const uint8_t *p, int64_t stride) {
  (void)stride;
  return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}
MOE_INLINE void moe_store_scalar(void *p, float x) { memcpy(p, &x, 4); }
MOE_INLINE void moe_storei_scalar(void *p, uint32_t x) { memcpy(p, &x, 4); }
MOE_INLINE void moe_storei_nt_scalar(void *p, uint32_t x) { moe_storei_scalar(p, x); }
MOE_INLINE void moe_storeu16_scalar(void *p, uint16_t x) { memcpy(p, &x, 2); }
MOE_INLINE uint32_t moe_loadu8_scalar(const void *p) { return *(const uint8_t *)p; }
MOE_INLINE void moe_store8_scalar(void *p, uint32_t x) { *(uint8_t *)p = (uint8_t)x; }
MOE_INLINE uint32_t moe_load2x16_scalar(const void *p) {
  return (uint32_t)((const uint16_t *)p)[0] | (uint32_t)((const uint16_t *)p)[1] << 16;
}
MOE_INLINE void moe_store2x16_scalar(void *p, uint32_t x) {
  for (int i = 0; i < 2; i++) ((uint16_t *)p)[i] = (uint16_t)(x >> 16 * i);
}
MOE_INLINE void moe_store32x8_scalar(void *p, const uint32_t *x, const uint32_t *signs) {
  for (int i = 0; i < 32; i++)
    ((uint8_t *)p)[i] = (uint8_t)(x[i / 2] >> i % 2 * 16 | (signs[i / 2] >> i % 2 * 16 >> 8 & 0x80u));
}
MOE_INLINE void moe_store32x4_scalar(void *p, const uint32_t *x, const uint32_t *signs) {
  for (int i = 0; i < 16; i++) {
    const uint32_t both = x[i] | (signs[i] >> 12 & 0x00080008u);
    ((uint8_t *)p)[i] = (uint8_t)(both | both >> 12);
  }
}
MOE_INLINE void moe_lookup32x4_scalar(void *p, const void *entries, const uint16_t *table) {
  for (int i = 0; i < 32; i++)
    moe_storeu16_scalar((char *)p + 2 * i, table[((const uint8_t *)entries)[i / 2] >> i % 2 * 4 & 15]);
}
MOE_INLINE uint32_t moe_load2x8_scalar(const void *p) {
  return ((uint32_t)((const int8_t *)p)[0] & 0xffffu) | (uint32_t)((const int8_t *)p)[1] << 16;
}
MOE_INLINE uint32_t moe_loadu4_scalar(const void *p, int64_t at) {
  return (uint32_t)((const uint8_t *)p)[at / 2] >> (at & 1) * 4 & 15u;
}
MOE_INLINE void moe_store4_scalar(void *p, int64_t at, uint32_t x) {
  uint8_t *byte = (uint8_t *)p + at / 2;
  *byte = (uint8_t)(at & 1 ? *byte | x << 4 : x);
}

/* A vector of one has no partial loads: these are never reached with 0 < n < 1. */
MOE_INLINE float moe_loadn_scalar(const void *p, int64_t n) { return n > 0 ? moe_load_scalar(p) : 0.0f; }
MOE_INLINE uint32_t moe_loadu16n_scalar(const void *p, int64_t n) { return n > 0 ? moe_loadu16_scalar(p) : 0u; }
MOE_INLINE void moe_storen_scalar(void *p, float x, int64_t n) {
  if (n > 0) moe_store_scalar(p, x);
}
MOE_INLINE uint32_t moe_loadu8n_scalar(const void *p, int64_t n) { return n > 0 ? moe_loadu8_scalar(p) : 0u; }
MOE_INLINE void moe_store8n_scalar(void *p, uint32_t x, int64_t n) {
  if (n > 0) moe_store8_scalar(p, x);
}
MOE_INLINE uint32_t moe_loadu4n_scalar(const void *p, int64_t at, int64_t n) {
  return n > 0 ? moe_loadu4_scalar(p, at) : 0u;
}
MOE_INLINE void moe_store4n_scalar(void *p, int64_t at, uint32_t x, int64_t n) {
  if (n > 0) moe_store4_scalar(p, at, x);
}

MOE_INLINE float moe_e2m1_scalar(uint32_t codes) {
  static const float value[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                  -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  return value[codes & 15u];
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

#define MOE_SCALAR_LOAD2_(name, type, NAME)                                                \
  MOE_INLINE uint32_t moe_load2_##name##_scalar(const void *p, float *even, float *odd) {  \
    *even = moe_load_##name##_scalar(p);                                                   \
    *odd = moe_load_##name##_scalar((const type *)p + 1);                                  \
    return moe_mux_scalar(0xffffu, moe_casti_scalar(*even) >> 16, moe_casti_scalar(*odd)); \
  }
MOE_DTYPE_LIST(MOE_SCALAR_LOAD2_)
#undef MOE_SCALAR_LOAD2_

#define MOE_SCALAR_STORE2_(name, type, NAME)                                                                   \
  MOE_INLINE void moe_store2_##name##_scalar(void *p, float even, float odd, uint32_t signs) {                 \
    moe_store_##name##_scalar(p, moe_castf_scalar(moe_casti_scalar(even) | signs << 16));                      \
    moe_store_##name##_scalar((type *)p + 1, moe_castf_scalar(moe_casti_scalar(odd) | (signs & 0x80000000u))); \
  }
MOE_DTYPE_LIST(MOE_SCALAR_STORE2_)
#undef MOE_SCALAR_STORE2_

MOE_INLINE uint32_t moe_largest2x16_scalar(uint32_t v[1]) { return v[0]; }
MOE_INLINE void moe_load_columns_scalar(const void *p, int64_t stride, uint32_t v[1]) {
  (void)stride;
  v[0] = moe_loadi_scalar(p);
}

/* --------------------------------------------------------------------------------------- the bf16 dot product's fma */

MOE_INLINE float moe_daz_scalar(float x) {
  uint32_t bits = moe_casti_scalar(x);
  return (bits & 0x7f800000u) == 0 ? moe_castf_scalar(bits & 0x80000000u) : x;
}

/* Whether a result is not 0 but may be one to flush. */
MOE_INLINE uint32_t moe_tiny_scalar(float x) { return (moe_casti_scalar(x) & 0x7fffffffu) - 1u < 0x00800000u; }

/* fma with subnormal operands taken as zero and subnormal results flushed. A result is subnormal when, rounded to 24
   bits with an unbounded exponent, it lies below 2^-126; fmaf has rounded at 2^-149 instead, so a result of exactly
   2^-126 may have come from 2^-126 - 2^-150, which must flush. The exact sum decides: a*b is exact in double, TwoSum
   gives the rest. */
MOE_FN float moe_fma_flush_scalar(float a, float b, float c) {
  a = moe_daz_scalar(a);
  b = moe_daz_scalar(b);
  float r = fmaf(a, b, moe_daz_scalar(c));
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
