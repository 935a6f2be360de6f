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

/* The upper words of 32 floats, which are bf16. */
MOE_INLINE __m512i moe_uppers2_avx512bf16(__m512 a, __m512 b) {
  const __m512i order =
      _mm512_setr_epi32(0x00030001, 0x00070005, 0x000b0009, 0x000f000d, 0x00130011, 0x00170015, 0x001b0019, 0x001f001d,
                        0x00230021, 0x00270025, 0x002b0029, 0x002f002d, 0x00330031, 0x00370035, 0x003b0039, 0x003f003d);
  return _mm512_permutex2var_epi16(_mm512_castps_si512(a), order, _mm512_castps_si512(b));
}

#endif
