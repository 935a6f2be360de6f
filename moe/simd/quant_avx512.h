/* The vocabulary of formats (see quant_scalar.h) for AVX-512. */
#ifndef MOE_SIMD_QUANT_AVX512_H
#define MOE_SIMD_QUANT_AVX512_H

MOE_INLINE __m512 moe_fma_exact_avx512(__m512 a, __m512 b, __m512 c) { return moe_fma_avx512(a, b, c); }
MOE_INLINE __m512i moe_min2x16_avx512(__m512i a, __m512i b) { return _mm512_min_epu16(a, b); }
MOE_INLINE __m512i moe_max2x16_avx512(__m512i a, __m512i b) { return _mm512_max_epu16(a, b); }
MOE_INLINE __m512i moe_sub2x16_avx512(__m512i a, __m512i b) { return _mm512_sub_epi16(a, b); }
MOE_INLINE __m512i moe_lt2x16_avx512(__m512i a, __m512i b) { return _mm512_movm_epi16(_mm512_cmplt_epi16_mask(a, b)); }
MOE_INLINE __m512i moe_subs2x16_avx512(__m512i a, __m512i b) { return _mm512_subs_epu16(a, b); }
MOE_INLINE __m512i moe_srl2x16_avx512(__m512i a, int n) { return _mm512_srl_epi16(a, _mm_cvtsi32_si128(n)); }
MOE_INLINE __m512i moe_lookup2x16_avx512(const uint8_t *table, __m512i entry) {
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
  return _mm512_shuffle_epi8(bytes, entry);
}
MOE_INLINE int moe_anyi_avx512(__m512i a) { return _mm512_test_epi32_mask(a, a) != 0; }
MOE_INLINE __m512i moe_gather_avx512(const uint8_t *p, int64_t stride) {
  const __m256i low = moe_gather_avx2(p, stride), high = moe_gather_avx2(p + 8 * stride, stride);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

MOE_INLINE __m512i moe_loadu8_avx512(const void *p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}
MOE_INLINE __m512i moe_loads8_avx512(const void *p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
}
MOE_INLINE __m512i moe_loadu8n_avx512(const void *p, int64_t n) {
  return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(moe_first_avx512(n), p));
}
MOE_INLINE void moe_store8_avx512(void *p, __m512i x) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(x)); }
MOE_INLINE void moe_store8n_avx512(void *p, __m512i x, int64_t n) {
  _mm_mask_storeu_epi8(p, moe_first_avx512(n), _mm512_cvtepi32_epi8(x));
}

MOE_INLINE __m512i moe_load2x16_avx512(const void *p) { return moe_loadi_avx512(p); }
MOE_INLINE void moe_store2x16_avx512(void *p, __m512i x) { moe_storei_avx512(p, x); }
MOE_INLINE void moe_store32x8_avx512(void *p, const __m512i *x, const __m512i *signs) {
  const __m512i both = moe_mux_avx512(_mm512_set1_epi16(0x80), _mm512_srli_epi16(*signs, 8), *x);
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi16_epi8(both));
}
MOE_INLINE void moe_store32x4_avx512(void *p, const __m512i *x, const __m512i *signs) {
  const __m512i both = moe_mux_avx512(_mm512_set1_epi16(8), _mm512_srli_epi16(*signs, 12), *x);
  const __m512i pairs = _mm512_madd_epi16(both, _mm512_set1_epi32(0x00100001));
  _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(pairs));
}
/* Packed with the 128-bit blocks of the two vectors alternating. */
MOE_INLINE __m512i moe_bytes_avx512(const __m512i *x) { return _mm512_packus_epi16(x[0], x[1]); }
MOE_INLINE void moe_store_words8_avx512(void *p, const __m512i *x, const __m512i *signs) {
  const __m512i sign = _mm512_packs_epi16(signs[0], signs[1]);
  const __m512i both = moe_mux_avx512(_mm512_set1_epi8(INT8_MIN), sign, moe_bytes_avx512(x));
  moe_storei_avx512(p, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), both));
}
MOE_INLINE __m512i moe_nibble_pairs_avx512(const __m512i *x, const __m512i *signs) {
  const __m512i sign = _mm512_srli_epi16(_mm512_packs_epi16(signs[0], signs[1]), 4);
  const __m512i both = moe_mux_avx512(_mm512_set1_epi8(8), sign, moe_bytes_avx512(x));
  return _mm512_maddubs_epi16(both, _mm512_set1_epi16(0x1001));
}
MOE_INLINE void moe_store_pairs_avx512(void *p, const __m512i *pairs) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  moe_storei_avx512(p, _mm512_permutexvar_epi32(order, moe_bytes_avx512(pairs)));
}
MOE_INLINE void moe_lookup32x4_avx512(void *p, const void *entries, const uint16_t *table) {
  const __m512i two = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)entries));
  const __m512i entry =
      _mm512_and_si512(_mm512_or_si512(two, _mm512_slli_epi32(two, 12)), _mm512_set1_epi32(0x000f000f));
  const __m256i words = _mm256_loadu_si256((const __m256i *)table);
  moe_storei_avx512(p, _mm512_permutexvar_epi16(entry, _mm512_castsi256_si512(words)));
}
MOE_INLINE __m512i moe_load2x8_avx512(const void *p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
}

/* Each byte is in a 64-bit element: shifted left by 28, its upper four bits are the second word's lowest. */
MOE_INLINE __m512i moe_loadu4n_avx512(const void *p, int64_t at, int64_t n) {
  __m128i packed = _mm_maskz_loadu_epi8(moe_first_avx512((n + 1) / 2), (const char *)p + at / 2);
  __m512i bytes = _mm512_cvtepu8_epi64(packed);
  return _mm512_and_si512(_mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28)), _mm512_set1_epi32(15));
}
MOE_INLINE void moe_store4n_avx512(void *p, int64_t at, __m512i x, int64_t n) {
  __m128i bytes = _mm512_cvtepi64_epi8(_mm512_or_si512(x, _mm512_srli_epi64(x, 28)));
  _mm_mask_storeu_epi8((char *)p + at / 2, moe_first_avx512((n + 1) / 2), bytes);
}
MOE_INLINE __m512i moe_loadu4_avx512(const void *p, int64_t at) { return moe_loadu4n_avx512(p, at, 16); }
MOE_INLINE void moe_store4_avx512(void *p, int64_t at, __m512i x) { moe_store4n_avx512(p, at, x, 16); }

MOE_INLINE __m512 moe_e2m1_values_avx512(void) {
  return _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f,
                        -6.0f);
}
MOE_INLINE __m512 moe_lookup16_avx512(__m512 values, __m512i codes) { return _mm512_permutexvar_ps(codes, values); }
MOE_INLINE __m512 moe_e2m1_avx512(__m512i codes) { return moe_lookup16_avx512(moe_e2m1_values_avx512(), codes); }

/* Two of each value as bf16. Five bits of a word look one up, the fifth of which does not matter. */
MOE_INLINE __m512i moe_e2m1_words_avx512(void) {
  return _mm512_set_epi32((int)0xc0c0c080, (int)0xc040c000, (int)0xbfc0bf80, (int)0xbf008000, 0x40c04080, 0x40404000,
                          0x3fc03f80, 0x3f000000, (int)0xc0c0c080, (int)0xc040c000, (int)0xbfc0bf80, (int)0xbf008000,
                          0x40c04080, 0x40404000, 0x3fc03f80, 0x3f000000);
}

MOE_INLINE void moe_e2m1_row_avx512(const void *p, __m512 scale, __m512 *x) {
  const __m512i word = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  const __m512i shift = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const __m512i codes = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)p));
  const __m512 scaled = moe_mul_avx512(moe_e2m1_values_avx512(), scale);
  const __m512i low = _mm512_permutexvar_epi32(word, codes),
                high = _mm512_permutexvar_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(2)), codes);
  x[0] = _mm512_permutexvar_ps(_mm512_srlv_epi32(low, shift), scaled);
  x[1] = _mm512_permutexvar_ps(_mm512_srlv_epi32(high, shift), scaled);
}
MOE_INLINE void moe_e2m1x32_avx512(const void *p, __m512 scale, __m512 *x) {
  const __m512 scaled = moe_mul_avx512(moe_e2m1_values_avx512(), scale);
  const __m512i bytes = moe_loadu8_avx512(p);
  x[0] = _mm512_permutexvar_ps(bytes, scaled);
  x[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), scaled);
}

MOE_INLINE void moe_e2m1x4_avx512(const __m512i *words, int at, __m512 *x) {
  MOE_UNROLL
  for (int i = 0; i < 16; i++) x[i] = moe_e2m1_avx512(_mm512_srli_epi32(words[i % 4], (unsigned)(at + i / 4 * 4)));
}

/* 16 bytes of each of 16 columns, a column's next to that of the fourth column on, a row. */
MOE_INLINE void moe_load_quarters_avx512(const uint8_t *p, int64_t stride, __m512i *x) {
  MOE_UNROLL
  for (int i = 0; i < 4; i++, p += stride) {
    __m512i row = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)p));
    row = _mm512_inserti32x4(row, _mm_loadu_si128((const __m128i *)(p + 4 * stride)), 1);
    row = _mm512_inserti32x4(row, _mm_loadu_si128((const __m128i *)(p + 8 * stride)), 2);
    row = _mm512_inserti32x4(row, _mm_loadu_si128((const __m128i *)(p + 12 * stride)), 3);
    MOE_IN_REGISTER(row); /* now: gcc would load all quarters first, and run out of registers */
    x[i] = row;
  }
}
MOE_INLINE void moe_load_groups_avx512(const uint8_t *p, int64_t stride, __m512i *words) {
  __m512i x[4];
  moe_load_quarters_avx512(p, stride, x);
  const __m512i low = _mm512_unpacklo_epi32(x[0], x[1]), high = _mm512_unpackhi_epi32(x[0], x[1]);
  const __m512i low2 = _mm512_unpacklo_epi32(x[2], x[3]), high2 = _mm512_unpackhi_epi32(x[2], x[3]);
  words[0] = _mm512_unpacklo_epi64(low, low2);
  words[1] = _mm512_unpackhi_epi64(low, low2);
  words[2] = _mm512_unpacklo_epi64(high, high2);
  words[3] = _mm512_unpackhi_epi64(high, high2);
}

MOE_INLINE void moe_load_twos_avx512(const uint8_t *p, int64_t stride, __m512i *words) {
  __m512i x[4];
  moe_load_quarters_avx512(p, stride, x);
  const __m512i low = _mm512_unpacklo_epi16(x[0], x[1]), high = _mm512_unpackhi_epi16(x[0], x[1]);
  const __m512i low2 = _mm512_unpacklo_epi16(x[2], x[3]), high2 = _mm512_unpackhi_epi16(x[2], x[3]);
  words[0] = _mm512_unpacklo_epi32(low, low2);
  words[1] = _mm512_unpackhi_epi32(low, low2);
  words[2] = _mm512_unpacklo_epi32(high, high2);
  words[3] = _mm512_unpackhi_epi32(high, high2);
}

MOE_INLINE void moe_load_e2m1_avx512(const uint8_t *p, int64_t stride, int split, __m512i *words) {
  (void)split;
  moe_load_groups_avx512(p, stride, words);
}
MOE_INLINE void moe_store_e2m1_avx512(uint32_t *to, int64_t pitch, const __m512i *words, int split) {
  const __m128i by = _mm_cvtsi32_si128(split ? 4 : 16);
  const int64_t word = split ? pitch : 2 * pitch, other = split ? 4 * pitch : pitch;
  MOE_UNROLL
  for (int i = 0; i < 4; i++, to += word) {
    moe_storei_avx512(to, words[i]);
    moe_storei_avx512(to + other, _mm512_srl_epi32(words[i], by));
  }
}

MOE_INLINE __m512i moe_split_avx512(__m512 a, __m512 b, __m512 *even, __m512 *odd) {
  const __m512i first = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  *even = _mm512_permutex2var_ps(a, first, b);
  *odd = _mm512_permutex2var_ps(a, _mm512_add_epi32(first, _mm512_set1_epi32(1)), b);
  return moe_mux_avx512(_mm512_set1_epi32(0xffff), _mm512_srli_epi32(_mm512_castps_si512(*even), 16),
                        _mm512_castps_si512(*odd));
}
MOE_INLINE __m512i moe_load2_f32_avx512(const void *p, __m512 *even, __m512 *odd) {
  return moe_split_avx512(moe_load_avx512(p), moe_load_avx512((const float *)p + 16), even, odd);
}
MOE_INLINE __m512i moe_load2_bf16_avx512(const void *p, __m512 *even, __m512 *odd) {
  const __m512i both = moe_loadi_avx512(p);
  *even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  *odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000u)));
  return both;
}

MOE_INLINE void moe_store2_f32_avx512(void *p, __m512 even, __m512 odd, __m512i signs) {
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i e = _mm512_or_si512(_mm512_castps_si512(even), _mm512_slli_epi32(signs, 16));
  const __m512i o = _mm512_or_si512(_mm512_castps_si512(odd), _mm512_slli_epi32(_mm512_srli_epi32(signs, 31), 31));
  moe_storei_avx512(p, _mm512_permutex2var_epi32(e, first, o));
  moe_storei_avx512((float *)p + 16, _mm512_permutex2var_epi32(e, _mm512_add_epi32(first, _mm512_set1_epi32(8)), o));
}
MOE_INLINE void moe_store2_bf16_avx512(void *p, __m512 even, __m512 odd, __m512i signs) {
  const __m512i low = _mm512_srli_epi32(moe_bf16_round_avx512(even), 16);
  const __m512i both = moe_mux_avx512(_mm512_set1_epi32(0xffff), low, moe_bf16_round_avx512(odd));
  moe_storei_avx512(p, _mm512_or_si512(both, signs));
}

/* Each step folds two vectors to half their width and puts the results into one. */
MOE_INLINE __m512i moe_largest2x16_avx512(__m512i v[16]) {
  const __m512i other = _mm512_setr_epi64(2, 3, 8, 9, 6, 7, 12, 13);
  MOE_UNROLL
  for (int i = 0; i < 8; i++)
    v[i] = _mm512_max_epu16(_mm512_mask_blend_epi64(0xf0, v[i], v[i + 8]), _mm512_shuffle_i64x2(v[i], v[i + 8], 0x4e));
  MOE_UNROLL
  for (int i = 0; i < 4; i++)
    v[i] = _mm512_max_epu16(_mm512_mask_blend_epi64(0xcc, v[i], v[i + 4]),
                            _mm512_permutex2var_epi64(v[i], other, v[i + 4]));
  MOE_UNROLL
  for (int i = 0; i < 2; i++)
    v[i] = _mm512_max_epu16(_mm512_mask_blend_epi64(0xaa, v[i], v[i + 2]), _mm512_alignr_epi8(v[i + 2], v[i], 8));
  return _mm512_max_epu16(_mm512_mask_blend_epi32(0xaaaa, v[0], v[1]),
                          _mm512_shuffle_epi32(_mm512_mask_blend_epi32(0xaaaa, v[1], v[0]), _MM_PERM_CDAB));
}

#endif
