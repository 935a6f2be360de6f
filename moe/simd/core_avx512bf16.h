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

/* The values of e2m1 codes 2q and 2q+1 of eight in each element. A word's lower five bits look them up. */
MOE_INLINE __m512i moe_e2m1_pair_of_avx512bf16(__m512i codes, int q) {
  const __m512i value =
      _mm512_set_epi32((int)0xc0c0c080, (int)0xc040c000, (int)0xbfc0bf80, (int)0xbf008000, 0x40c04080, 0x40404000,
                       0x3fc03f80, 0x3f000000, (int)0xc0c0c080, (int)0xc040c000, (int)0xbfc0bf80, (int)0xbf008000,
                       0x40c04080, 0x40404000, 0x3fc03f80, 0x3f000000);
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13));
  const __m512i upper = _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15));
  const __m512i both = _mm512_shuffle_epi8(codes, q / 2 ? upper : order);
  const __m512i shift = _mm512_set1_epi32(q % 2 ? 0x000c0008 : 0x00040000);
  return _mm512_permutexvar_epi16(_mm512_srlv_epi16(both, shift), value);
}

#endif
