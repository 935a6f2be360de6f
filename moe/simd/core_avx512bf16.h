/* AVX-512 BF16: the vocabulary is avx512's; this adds the dot product of bf16 pairs. The conversion to bf16 flushes
   subnormals, so it is used only where there are none. */
#ifndef MOE_SIMD_CORE_AVX512BF16_H
#define MOE_SIMD_CORE_AVX512BF16_H

/* For each 32-bit element: fma(a.lo, b.lo, fma(a.hi, b.hi, c)), subnormals in and out taken as zero. */
MOE_INLINE __m512 moe_dot2_avx512bf16(__m512i a, __m512i b, __m512 c) {
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}

/* avx512's round2, of elements that are not subnormal. */
MOE_INLINE __m512i moe_round2_avx512bf16(__m512 a, __m512 b) { return (__m512i)_mm512_cvtne2ps_pbh(b, a); }

/* Two rows of 32 bf16 as pairs. */
MOE_INLINE void moe_pair_rows_avx512bf16(__m512i even, __m512i odd, __m512i *pairs) {
  const __m512i low =
      _mm512_setr_epi32(0x00200000, 0x00210001, 0x00220002, 0x00230003, 0x00240004, 0x00250005, 0x00260006, 0x00270007,
                        0x00280008, 0x00290009, 0x002a000a, 0x002b000b, 0x002c000c, 0x002d000d, 0x002e000e, 0x002f000f);
  pairs[0] = _mm512_permutex2var_epi16(even, low, odd);
  pairs[1] = _mm512_permutex2var_epi16(even, _mm512_add_epi16(low, _mm512_set1_epi16(16)), odd);
}

/* Two of each value of e2m1. Five bits of a word look one up, the fifth of which does not matter. */
MOE_INLINE __m512i moe_e2m1_values_avx512bf16(void) {
  return _mm512_set_epi32((int)0xc0c0c080, (int)0xc040c000, (int)0xbfc0bf80, (int)0xbf008000, 0x40c04080, 0x40404000,
                          0x3fc03f80, 0x3f000000, (int)0xc0c0c080, (int)0xc040c000, (int)0xbfc0bf80, (int)0xbf008000,
                          0x40c04080, 0x40404000, 0x3fc03f80, 0x3f000000);
}

/* The values of the e2m1 codes that words begin with, times powers of two: `by` is added to exponents, not to zeros. */
MOE_INLINE __m512i moe_e2m1_scaled_avx512bf16(__m512i codes, __m512i by) {
  const __m512i bare = _mm512_permutexvar_epi16(codes, moe_e2m1_values_avx512bf16());
  return _mm512_mask_add_epi16(bare, _mm512_test_epi16_mask(codes, _mm512_set1_epi16(7)), bare, by);
}

/* Two rows of 32 e2m1 codes as pairs, times powers of two: `exponents` are what is added for the even and for the odd
   row. With `split` a byte has the codes of columns j and j+16. */
MOE_INLINE void moe_row_pairs_4_avx512bf16(const void *even, const void *odd, uint32_t exponents, int split,
                                           const moe_element_format_ *f, __m512i *x) {
  const __m512i in_order =
      _mm512_setr_epi32(0x00080000, 0x00080000, 0x00080000, 0x00080000, 0x00090001, 0x00090001, 0x00090001, 0x00090001,
                        0x000a0002, 0x000a0002, 0x000a0002, 0x000a0002, 0x000b0003, 0x000b0003, 0x000b0003, 0x000b0003);
  const __m512i by_bytes =
      _mm512_setr_epi32(0x00080000, 0x00080000, 0x00090001, 0x00090001, 0x000a0002, 0x000a0002, 0x000b0003, 0x000b0003,
                        0x000c0004, 0x000c0004, 0x000d0005, 0x000d0005, 0x000e0006, 0x000e0006, 0x000f0007, 0x000f0007);
  const __m512i nibbles = _mm512_set4_epi32(0x000c000c, 0x00080008, 0x00040004, 0),
                bytes = _mm512_set4_epi32(0x00080008, 0, 0x00080008, 0);
  const __m512i word = split ? by_bytes : in_order, shift = split ? bytes : nibbles;
  const __m512i next = _mm512_set1_epi16(split ? 0 : 4), further = _mm512_set1_epi16(split ? 4 : 0);
  const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)even)),
                                               _mm_loadu_si128((const __m128i *)odd), 1);
  const __m512i all = _mm512_castsi256_si512(both), by = _mm512_set1_epi32((int)exponents);
  (void)f;
  const __m512i low = _mm512_permutexvar_epi16(word, all),
                high = _mm512_permutexvar_epi16(_mm512_add_epi16(word, next), all);
  x[0] = moe_e2m1_scaled_avx512bf16(_mm512_srlv_epi16(low, shift), by);
  x[1] = moe_e2m1_scaled_avx512bf16(_mm512_srlv_epi16(high, _mm512_add_epi16(shift, further)), by);
}

/* Eight e2m1 codes of a column in each element, as four pairs. */
MOE_INLINE void moe_word_pairs_avx512bf16(__m512i codes, __m512i by, __m512i *x) {
  const __m512i low = _mm512_set4_epi32(0x0d0c0d0c, 0x09080908, 0x05040504, 0x01000100),
                high = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  MOE_UNROLL
  for (int q = 0; q < 4; q++)
    x[q] = moe_e2m1_scaled_avx512bf16(_mm512_srlv_epi16(_mm512_shuffle_epi8(codes, q / 2 ? high : low),
                                                        _mm512_set1_epi32(q % 2 ? 0x000c0008 : 0x00040000)),
                                      by);
}

/* The same of normal fp8 codes, in order. */
MOE_INLINE void moe_row_pairs_8_avx512bf16(const void *even, const void *odd, uint32_t exponents, int split,
                                           const moe_element_format_ *f, __m512i *x) {
  (void)split;
  const __m128i shift = _mm_cvtsi32_si128(f->shift - 16);
  const __m512i mask = _mm512_set1_epi16((short)(0x8000 | 127 << (f->shift - 16)));
  const __m512i bias = _mm512_set1_epi16((short)(f->rebias >> 16)), by = _mm512_set1_epi32((int)exponents);
  const __m512i low = _mm512_and_si512(_mm512_sll_epi16(moe_load2x8_avx512(even), shift), mask),
                high = _mm512_and_si512(_mm512_sll_epi16(moe_load2x8_avx512(odd), shift), mask);
  moe_pair_rows_avx512bf16(low, high, x);
  MOE_UNROLL
  for (int i = 0; i < 2; i++) x[i] = _mm512_add_epi16(x[i], _mm512_add_epi16(bias, by));
}

#endif
