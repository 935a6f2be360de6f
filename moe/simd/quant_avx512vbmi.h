/* The vocabulary of formats for AVX-512 with VBMI, where bytes are looked up 64 at a time: what kernels_vbmi.inl needs
   besides quant_avx512.h. */
#ifndef MOE_SIMD_QUANT_AVX512VBMI_H
#define MOE_SIMD_QUANT_AVX512VBMI_H

/* Of 32 words the lower bytes, and the upper ones. */
MOE_INLINE void moe_store_bytes_avx512vbmi(void *low, void *high, __m512i words) {
  _mm256_storeu_si256((__m256i *)low, _mm512_cvtepi16_epi8(words));
  _mm256_storeu_si256((__m256i *)high, _mm512_cvtepi16_epi8(_mm512_srli_epi16(words, 8)));
}

/* Codes to rows of bf16 pairs, `pitch` apart: e2m1, by load_groups; fp8, by load_twos and the lower and the upper bytes
   of magnitudes. A word's five lower bits look the value of an e2m1 code up. */
MOE_INLINE void moe_store_e2m1_avx512vbmi(uint32_t *to, int64_t pitch, const __m512i *words, int split) {
  const __m512i value =
      _mm512_set_epi32((int)0xc0c0c080, (int)0xc040c000, (int)0xbfc0bf80, (int)0xbf008000, 0x40c04080, 0x40404000,
                       0x3fc03f80, 0x3f000000, (int)0xc0c0c080, (int)0xc040c000, (int)0xbfc0bf80, (int)0xbf008000,
                       0x40c04080, 0x40404000, 0x3fc03f80, 0x3f000000);
  const __m512i first = _mm512_set1_epi64(split ? 0x0028002000080000 : 0x0024002000040000);
  const __m512i step = _mm512_set1_epi8(split ? 16 : 8), step2 = _mm512_set1_epi8(split ? 4 : 16);
  const int64_t second = split ? 8 * pitch : 2 * pitch, word = split ? 2 * pitch : 4 * pitch;
  const __m512i at[4] = {first, _mm512_add_epi8(first, step), _mm512_add_epi8(first, step2),
                         _mm512_add_epi8(_mm512_add_epi8(first, step), step2)};
  MOE_UNROLL
  for (int i = 0; i < 4; i++, to += word) {
    MOE_UNROLL
    for (int j = 0; j < 4; j++)
      moe_storei_avx512(to + j / 2 * second + j % 2 * pitch,
                        _mm512_permutexvar_epi16(_mm512_multishift_epi64_epi8(at[j], words[i]), value));
  }
}
MOE_INLINE void moe_store_fp8_avx512vbmi(uint32_t *to, int64_t pitch, const __m512i *words,
                                         const uint8_t (*values)[128]) {
  __m512i table[4];
  MOE_UNROLL
  for (int i = 0; i < 4; i++) table[i] = moe_loadi_avx512(values[0] + 64 * i);
  MOE_UNROLL
  for (int i = 0; i < 4; i++, to += 2 * pitch) {
    const __m512i lower = _mm512_permutex2var_epi8(table[0], words[i], table[1]);
    const __m512i upper = _mm512_permutex2var_epi8(table[2], words[i], table[3]);
    const __m512i both = _mm512_ternarylogic_epi32(upper, words[i], _mm512_set1_epi8((char)0x80), 0xf8); /* a | b&c */
    moe_storei_avx512(to, _mm512_unpacklo_epi8(lower, both));
    moe_storei_avx512(to + pitch, _mm512_unpackhi_epi8(lower, both));
  }
}

#endif
