/* The vocabulary of formats, in portable C (see core_scalar.h): bytes, 4-bit codes, 16-bit words two in an element.

   Every instruction set provides:
     anyi                            whether a bit is set
     fma_exact                       fma where a*b is exact: rounding it, too, changes nothing
     gather                          W 32-bit words, `stride` bytes apart, the least significant byte first
     loadu8 loadu8n store8 store8n   8-bit words, zero-extended and truncated; n as in loadn
     loadu4 loadu4n store4 store4n   the same of 4-bit words, two in a byte, the even one low, from word `at` on, a
                                     multiple of W. What is stored is below 16, also the word that completes a byte
     load_groups (vectors only)      vector j: word j of four of each of W rows, `stride` bytes apart
     load_e2m1 store_e2m1            (vectors only) 16 bytes of each of W columns of e2m1 codes, `stride` apart, to rows
                                     of words, `pitch` apart, as small_m_mx.inl takes them. split: see moe_codes_
     e2m1_values lookup16 (AVX-512)  the 16 values of e2m1; those of codes, bits above the fourth are ignored
     e2m1                            the values of codes; bits above the fourth are ignored
     loads8 (vectors only)           8-bit words, sign-extended
     e2m1x32 (vectors only)          the codes of 16 bytes, low nibbles first, times a power of two, as vectors
     e2m1_row (vectors only)         the same in order
     e2m1x4 (vectors only)           four codes of each element of four vectors, from bit 0 or 16 on: x[4*i+v] becomes
                                     the values of the i-th of vector v
     load2x16 store2x16              2W 16-bit words, two in an element
     load2x8                         2W 8-bit words, sign-extended to 16 bits, two in an element
     min2x16 max2x16 sub2x16         of the upper and of the lower 16 bits, unsigned: the smaller; the larger; the
     subs2x16 srl2x16                difference; the same, or 0 where b is larger; shifted
     lt2x16                          likewise: all ones where a < b, both below 0x8000
     lookup2x16                      likewise: entry (below 16) of 16 bytes; above it, in the upper byte, entry 0
     largest2x16 (vectors only)      element i: the largest upper and lower words of vector i of W, all overwritten
     store32x8 store32x4             32 words of 8 or 4 bits: 16-bit words below 128 or 8, two in an element of 16/W
                                     vectors, with the signs (bit 15) of as many others
     store_words8                    (vectors only) the same of 8 bits, of two vectors, and as many signs
     nibble_pairs store_pairs        (vectors only) the same of 4 bits: two vectors at a time, then two such pairs
     lookup32x4                      stores 32 words of 16 bits: entries of a table of 16, by as many 4-bit words
     load2_f32 load2_bf16, store2_*  2W elements, the even ones in one vector, the odd in another (bf16: vectors only).
                                     load2 also returns their signs in bits 15 and 31 of a word for each pair, whose
                                     other bits are undefined. store2 adds such signs, the other bits 0; no element is
                                     a NaN
     split (vectors only)            load2_f32 of two vectors */
#ifndef MOE_SIMD_QUANT_SCALAR_H
#define MOE_SIMD_QUANT_SCALAR_H

MOE_INLINE int moe_anyi_scalar(uint32_t a) { return a != 0; }
MOE_INLINE float moe_fma_exact_scalar(float a, float b, float c) { return moe_mul_scalar(a, b) + c; }
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
MOE_INLINE uint32_t moe_gather_scalar(const uint8_t *p, int64_t stride) {
  (void)stride;
  return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}
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

/* As loadn: never reached with 0 < n < 1. */
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

MOE_INLINE uint32_t moe_load2_f32_scalar(const void *p, float *even, float *odd) {
  *even = moe_load_scalar(p);
  *odd = moe_load_scalar((const float *)p + 1);
  return moe_mux_scalar(0xffffu, moe_casti_scalar(*even) >> 16, moe_casti_scalar(*odd));
}
MOE_INLINE void moe_store2_f32_scalar(void *p, float even, float odd, uint32_t signs) {
  moe_storei_scalar(p, moe_casti_scalar(even) | signs << 16);
  moe_storei_scalar((float *)p + 1, moe_casti_scalar(odd) | (signs & 0x80000000u));
}

#endif
