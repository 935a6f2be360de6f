/* The vocabulary of formats for AVX-512 with VBMI, where bytes are looked up 64 at a time: what kernels_vbmi.inl needs
   besides quant_avx512.h. */
#ifndef MOE_SIMD_QUANT_AVX512VBMI_H
#define MOE_SIMD_QUANT_AVX512VBMI_H

/* Of 32 words the lower bytes, and the upper ones. */
MOE_INLINE void moe_store_bytes_avx512vbmi(void *low, void *high, __m512i words) {
  _mm256_storeu_si256((__m256i *)low, _mm512_cvtepi16_epi8(words));
  _mm256_storeu_si256((__m256i *)high, _mm512_cvtepi16_epi8(_mm512_srli_epi16(words, 8)));
}

/* A table in registers: lower bytes, upper bytes, the bit of signs, and the order in which pair_codes takes columns. */
enum { moe_table_vectors_avx512vbmi = 6 };
MOE_INLINE void moe_load_table_avx512vbmi(const moe_byte_table_ *bytes, __m512i *table) {
  __m512i sign = _mm512_set1_epi8((char)0x80);
  __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  MOE_IN_REGISTER(sign);
  MOE_IN_REGISTER(order);
  MOE_UNROLL
  for (int i = 0; i < 4; i++) table[i] = _mm512_loadu_si512((i < 2 ? bytes->low : bytes->high) + i % 2 * 64);
  table[4] = sign;
  table[5] = order;
}

/* The bf16 of 64 codes. Codes of 2i and 2i+1 become a word: pairs[0] has those of the first eight bytes of each 16,
   pairs[1] the others. */
MOE_INLINE void moe_lookup_pairs_avx512vbmi(const __m512i *table, int nan_is_minus_zero, __m512i codes,
                                            __m512i *pairs) {
  __m512i low = _mm512_permutex2var_epi8(table[0], codes, table[1]);
  __m512i high = _mm512_permutex2var_epi8(table[2], codes, table[3]);
  high = _mm512_ternarylogic_epi64(high, codes, table[4], 0x78); /* high ^ (codes & sign) */
  if (nan_is_minus_zero) {
    const __mmask64 nan = _mm512_cmpeq_epi8_mask(codes, table[4]);
    low = _mm512_mask_mov_epi8(low, nan, _mm512_set1_epi8((char)0xc0));
    high = _mm512_mask_mov_epi8(high, nan, _mm512_set1_epi8(0x7f));
  }
  pairs[0] = _mm512_unpacklo_epi8(low, high);
  pairs[1] = _mm512_unpackhi_epi8(low, high);
}

/* Adds to 16-bit words that are odd. */
MOE_INLINE __m512i moe_add_scale_avx512vbmi(__m512i words, __m512i scale) {
  return _mm512_mask_add_epi16(words, _mm512_test_epi16_mask(words, _mm512_set1_epi16(1)), words, scale);
}

/* Two rows of codes side by side, of which n are there: looked up, codes[0] has columns 0 to 15 and 16 to 31, codes[1]
   the next ones. */
MOE_INLINE void moe_pair_codes_avx512vbmi(const __m512i *table, const void *even, const void *odd, int64_t n,
                                          __m512i *codes) {
  const __mmask64 there = ~(__mmask64)0 >> (64 - n);
  const __m512i above = n == 64 ? _mm512_loadu_si512(even) : _mm512_maskz_loadu_epi8(there, even);
  const __m512i below = n == 64 ? _mm512_loadu_si512(odd) : _mm512_maskz_loadu_epi8(there, odd);
  const __m512i first = _mm512_permutexvar_epi32(table[5], above), second = _mm512_permutexvar_epi32(table[5], below);
  codes[0] = _mm512_unpacklo_epi8(first, second);
  codes[1] = _mm512_unpackhi_epi8(first, second);
}

/* Four codes of each of 16 columns: looked up, the first two of all columns, and the others. */
MOE_INLINE __m512i moe_pair_words_avx512vbmi(__m512i words) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  return _mm512_shuffle_epi8(words, _mm512_broadcast_i32x4(order));
}

/* Codes to rows of bf16 pairs, `pitch` apart: e2m1, by load_groups; fp8, by load_twos. A word's five lower bits look the value of an e2m1 code up. */
MOE_INLINE void moe_store_e2m1_avx512vbmi(uint32_t *to, int64_t pitch, const __m512i *words, int split) {
  const __m512i value = moe_e2m1_words_avx512();
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
                                         const moe_byte_table_ *values) {
  __m512i table[moe_table_vectors_avx512vbmi], pairs[2];
  moe_load_table_avx512vbmi(values, table);
  MOE_UNROLL
  for (int i = 0; i < 4; i++, to += 2 * pitch) {
    moe_lookup_pairs_avx512vbmi(table, 0, words[i], pairs);
    moe_storei_avx512(to, pairs[0]);
    moe_storei_avx512(to + pitch, pairs[1]);
  }
}

#endif
