/* The vocabulary of formats (see quant_scalar.h) for AVX2. */
#ifndef MOE_SIMD_QUANT_AVX2_H
#define MOE_SIMD_QUANT_AVX2_H

MOE_INLINE __m256 moe_fma_exact_avx2(__m256 a, __m256 b, __m256 c) { return moe_fma_avx2(a, b, c); }
MOE_INLINE __m256i moe_min2x16_avx2(__m256i a, __m256i b) { return _mm256_min_epu16(a, b); }
MOE_INLINE __m256i moe_max2x16_avx2(__m256i a, __m256i b) { return _mm256_max_epu16(a, b); }
MOE_INLINE __m256i moe_sub2x16_avx2(__m256i a, __m256i b) { return _mm256_sub_epi16(a, b); }
MOE_INLINE __m256i moe_lt2x16_avx2(__m256i a, __m256i b) { return _mm256_cmpgt_epi16(b, a); }
MOE_INLINE __m256i moe_subs2x16_avx2(__m256i a, __m256i b) { return _mm256_subs_epu16(a, b); }
MOE_INLINE __m256i moe_srl2x16_avx2(__m256i a, int n) { return _mm256_srli_epi16(a, n); }
MOE_INLINE __m256i moe_lookup2x16_avx2(const uint8_t *table, __m256i entry) {
  const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
  return _mm256_shuffle_epi8(bytes, entry);
}
MOE_INLINE int moe_anyi_avx2(__m256i a) { return !_mm256_testz_si256(a, a); }
MOE_INLINE __m256i moe_gather_avx2(const uint8_t *p, int64_t stride) {
  int32_t word[8]; /* inserted one by one: a vector load would wait for the stores */
  for (int i = 0; i < 8; i++) memcpy(word + i, p + i * stride, 4);
  return _mm256_setr_epi32(word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7]);
}

MOE_INLINE __m256i moe_loadu8_avx2(const void *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
MOE_INLINE __m256i moe_loads8_avx2(const void *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
MOE_INLINE __m256i moe_loadu8n_avx2(const void *p, int64_t n) {
  uint8_t buffer[8] = {0};
  memcpy(buffer, p, (size_t)n);
  return moe_loadu8_avx2(buffer);
}
MOE_INLINE void moe_store8_avx2(void *p, __m256i x) {
  __m256i low = _mm256_and_si256(x, _mm256_set1_epi32(255));
  __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(words, words));
}
MOE_INLINE void moe_store8n_avx2(void *p, __m256i x, int64_t n) {
  uint8_t buffer[8];
  moe_store8_avx2(buffer, x);
  memcpy(p, buffer, (size_t)n);
}

MOE_INLINE __m256i moe_load2x16_avx2(const void *p) { return moe_loadi_avx2(p); }
MOE_INLINE void moe_store2x16_avx2(void *p, __m256i x) { moe_storei_avx2(p, x); }
/* Packed as the codes are: with the 128-bit blocks of the two vectors alternating. */
MOE_INLINE __m256i moe_signs_avx2(const __m256i *signs) {
  return _mm256_and_si256(_mm256_packs_epi16(signs[0], signs[1]), _mm256_set1_epi8(INT8_MIN));
}
MOE_INLINE void moe_store32x8_avx2(void *p, const __m256i *x, const __m256i *signs) {
  const __m256i bytes = _mm256_or_si256(_mm256_packus_epi16(x[0], x[1]), moe_signs_avx2(signs));
  moe_storei_avx2(p, _mm256_permute4x64_epi64(bytes, 0xd8));
}
MOE_INLINE __m256i moe_nibble_pairs_avx2(const __m256i *x, const __m256i *signs) {
  const __m256i sign = _mm256_srli_epi16(moe_signs_avx2(signs), 4);
  const __m256i bytes = _mm256_or_si256(_mm256_packus_epi16(x[0], x[1]), sign);
  return _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));
}
MOE_INLINE void moe_store32x4_avx2(void *p, const __m256i *x, const __m256i *signs) {
  const __m256i pairs = moe_nibble_pairs_avx2(x, signs), order = _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5);
  const __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(pairs, pairs), order);
  _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
}
MOE_INLINE void moe_store_words8_avx2(void *p, const __m256i *x, const __m256i *signs) {
  moe_store32x8_avx2(p, x, signs);
}
MOE_INLINE void moe_store_pairs_avx2(void *p, const __m256i *pairs) {
  const __m256i both = _mm256_packus_epi16(pairs[0], pairs[1]);
  moe_storei_avx2(p, _mm256_permutevar8x32_epi32(both, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}
/* Looks up lower and upper bytes apart: tables of both, each in both 128-bit blocks. */
MOE_INLINE void moe_lookup32x4_avx2(void *p, const void *entries, const uint16_t *table) {
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  const __m256i bytes = _mm256_shuffle_epi8(moe_loadi_avx2(table), order);
  const __m256i two = _mm256_cvtepu8_epi16(moe_load16_avx2(entries));
  const __m256i entry = _mm256_and_si256(_mm256_or_si256(two, _mm256_slli_epi16(two, 4)), _mm256_set1_epi8(15));
  const __m256i low = _mm256_shuffle_epi8(_mm256_permute4x64_epi64(bytes, 0x88), entry);
  const __m256i high = _mm256_shuffle_epi8(_mm256_permute4x64_epi64(bytes, 0xdd), entry);
  const __m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
  moe_storei_avx2(p, _mm256_permute2x128_si256(a, b, 0x20));
  moe_storei_avx2((char *)p + 32, _mm256_permute2x128_si256(a, b, 0x31));
}
MOE_INLINE __m256i moe_load2x8_avx2(const void *p) { return _mm256_cvtepi8_epi16(moe_load16_avx2(p)); }

/* Each byte is in a 64-bit element: shifted left by 28, its upper four bits are the second word's lowest. */
MOE_INLINE __m256i moe_nibbles_avx2(int32_t four) {
  __m256i bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
  return _mm256_and_si256(_mm256_or_si256(bytes, _mm256_slli_epi64(bytes, 28)), _mm256_set1_epi32(15));
}
MOE_INLINE int32_t moe_nibble_bytes_avx2(__m256i x) {
  __m256i bytes = _mm256_and_si256(_mm256_or_si256(x, _mm256_srli_epi64(x, 28)), _mm256_set1_epi64x(255));
  __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  words = _mm_packus_epi32(words, words);
  return _mm_cvtsi128_si32(_mm_packus_epi16(words, words));
}
MOE_INLINE __m256i moe_loadu4n_avx2(const void *p, int64_t at, int64_t n) {
  int32_t four = 0;
  memcpy(&four, (const char *)p + at / 2, (size_t)((n + 1) / 2));
  return moe_nibbles_avx2(four);
}
MOE_INLINE void moe_store4n_avx2(void *p, int64_t at, __m256i x, int64_t n) {
  int32_t four = moe_nibble_bytes_avx2(x);
  memcpy((char *)p + at / 2, &four, (size_t)((n + 1) / 2));
}
MOE_INLINE __m256i moe_loadu4_avx2(const void *p, int64_t at) { return moe_loadu4n_avx2(p, at, 8); }
MOE_INLINE void moe_store4_avx2(void *p, int64_t at, __m256i x) { moe_store4n_avx2(p, at, x, 8); }

MOE_INLINE __m256 moe_e2m1_avx2(__m256i codes) {
  const __m256 value = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28), _mm256_set1_epi32(INT32_MIN));
  return _mm256_or_ps(_mm256_permutevar8x32_ps(value, codes), _mm256_castsi256_ps(sign));
}

MOE_INLINE void moe_e2m1_row_avx2(const void *p, __m256 scale, __m256 *x) {
  MOE_UNROLL
  for (int i = 0; i < 4; i++) x[i] = moe_mul_avx2(moe_e2m1_avx2(moe_loadu4_avx2(p, i * 8)), scale);
}
MOE_INLINE void moe_e2m1x32_avx2(const void *p, __m256 scale, __m256 *x) {
  const __m256 value = moe_mul_avx2(_mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f), scale);
  const __m256i top = _mm256_set1_epi32(INT32_MIN);
  MOE_UNROLL
  for (int i = 0; i < 4; i++) {
    const __m256i codes = _mm256_srli_epi32(moe_loadu8_avx2((const char *)p + i % 2 * 8), i / 2 * 4);
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28), top);
    x[i] = _mm256_or_ps(_mm256_permutevar8x32_ps(value, codes), _mm256_castsi256_ps(sign));
  }
}

/* The i-th of four codes of a and of b, from bit 0 or 16 of each element on: x[4*i] and x[4*i+1]. Values are looked up
   as bf16, lower and upper bytes apart. */
MOE_INLINE void moe_e2m1_pair_avx2(__m256i a, __m256i b, int at, __m256 *x) {
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  const __m256i upper = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, -128, -65, -65, -65, -64, -64, -64, -64));
  const __m256i lower =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64));
  const __m256i nibble = _mm256_set1_epi8(15), odd = _mm256_set1_epi32((int)0xffff0000u);
  const __m256i words = at ? _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xaa)
                           : _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
  const __m256i bytes = _mm256_shuffle_epi8(words, order);
  MOE_UNROLL
  for (int q = 0; q < 2; q++) {
    const __m256i codes = _mm256_and_si256(_mm256_srli_epi32(bytes, 4 * q), nibble);
    const __m256i low = _mm256_shuffle_epi8(lower, codes), high = _mm256_shuffle_epi8(upper, codes);
    const __m256i first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
    x[4 * q] = _mm256_castsi256_ps(_mm256_slli_epi32(first, 16));
    x[4 * q + 1] = _mm256_castsi256_ps(_mm256_and_si256(first, odd));
    x[4 * q + 8] = _mm256_castsi256_ps(_mm256_slli_epi32(second, 16));
    x[4 * q + 9] = _mm256_castsi256_ps(_mm256_and_si256(second, odd));
  }
}
MOE_INLINE void moe_e2m1x4_avx2(const __m256i *words, int at, __m256 *x) {
  moe_e2m1_pair_avx2(words[0], words[1], at, x);
  moe_e2m1_pair_avx2(words[2], words[3], at, x + 2);
}

/* 16 bytes of each of eight columns, a column's next to that of the fourth column on. */
MOE_INLINE void moe_load_halves_avx2(const uint8_t *p, int64_t stride, __m256i *x) {
  MOE_UNROLL
  for (int i = 0; i < 4; i++, p += stride) {
    __m256i row =
        _mm256_inserti128_si256(_mm256_castsi128_si256(moe_load16_avx2(p)), moe_load16_avx2(p + 4 * stride), 1);
    MOE_IN_REGISTER(row); /* see load_quarters_avx512 */
    x[i] = row;
  }
}
MOE_INLINE void moe_load_groups_avx2(const uint8_t *p, int64_t stride, __m256i *words) {
  __m256i x[4];
  moe_load_halves_avx2(p, stride, x);
  const __m256i low = _mm256_unpacklo_epi32(x[0], x[1]), high = _mm256_unpackhi_epi32(x[0], x[1]);
  const __m256i low2 = _mm256_unpacklo_epi32(x[2], x[3]), high2 = _mm256_unpackhi_epi32(x[2], x[3]);
  words[0] = _mm256_unpacklo_epi64(low, low2);
  words[1] = _mm256_unpackhi_epi64(low, low2);
  words[2] = _mm256_unpacklo_epi64(high, high2);
  words[3] = _mm256_unpackhi_epi64(high, high2);
}

/* Elements q and q+2, then q+1 and q+3 of four: values are looked up as bf16, lower and upper bytes apart. */
MOE_INLINE void moe_e2m1_bytes_avx2(uint32_t *to, int64_t pitch, __m256i even, __m256i odd) {
  const __m256i upper = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, -128, -65, -65, -65, -64, -64, -64, -64));
  const __m256i lower =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64));
  MOE_UNROLL
  for (int q = 0; q < 2; q++, to += pitch) {
    const __m256i codes = _mm256_and_si256(q ? odd : even, _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(lower, codes), high = _mm256_shuffle_epi8(upper, codes);
    moe_storei_avx2(to, _mm256_unpacklo_epi8(low, high));
    moe_storei_avx2(to + 2 * pitch, _mm256_unpackhi_epi8(low, high));
  }
}
/* Bytes of half elements j and j+16: even ones, then odd ones. */
MOE_INLINE void moe_load_e2m1_avx2(const uint8_t *p, int64_t stride, int split, __m256i *words) {
  const __m256i apart =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  __m256i x[4];
  moe_load_halves_avx2(p, stride, x);
  if (split) {
    MOE_UNROLL
    for (int i = 0; i < 4; i++) x[i] = _mm256_shuffle_epi8(x[i], apart);
  }
  const __m256i low = _mm256_unpacklo_epi16(x[0], x[1]), high = _mm256_unpackhi_epi16(x[0], x[1]);
  const __m256i low2 = _mm256_unpacklo_epi16(x[2], x[3]), high2 = _mm256_unpackhi_epi16(x[2], x[3]);
  words[0] = _mm256_unpacklo_epi32(low, low2), words[1] = _mm256_unpackhi_epi32(low, low2);
  words[2] = _mm256_unpacklo_epi32(high, high2), words[3] = _mm256_unpackhi_epi32(high, high2);
}
MOE_INLINE void moe_store_e2m1_avx2(uint32_t *to, int64_t pitch, const __m256i *words, int split) {
  MOE_UNROLL
  for (int i = 0; i < 4; i++, to += 4 * pitch) {
    const __m256i high = _mm256_srli_epi32(words[i], 4);
    if (!split) moe_e2m1_bytes_avx2(to, pitch, words[i], high);
    else if (i < 2) moe_e2m1_bytes_avx2(to, pitch, words[i], words[i + 2]);
    else moe_e2m1_bytes_avx2(to, pitch, _mm256_srli_epi32(words[i - 2], 4), high);
  }
}

MOE_INLINE __m256i moe_split_avx2(__m256 a, __m256 b, __m256 *even, __m256 *odd) {
  const __m256i e = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)), 0xd8);
  const __m256i o = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)), 0xd8);
  *even = _mm256_castsi256_ps(e), *odd = _mm256_castsi256_ps(o);
  return _mm256_blend_epi16(o, _mm256_srli_epi32(e, 16), 0x55);
}
MOE_INLINE __m256i moe_load2_f32_avx2(const void *p, __m256 *even, __m256 *odd) {
  return moe_split_avx2(moe_load_avx2(p), moe_load_avx2((const float *)p + 8), even, odd);
}
MOE_INLINE __m256i moe_load2_bf16_avx2(const void *p, __m256 *even, __m256 *odd) {
  const __m256i both = moe_loadi_avx2(p);
  *even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
  *odd = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000u)));
  return both;
}

MOE_INLINE void moe_store2_f32_avx2(void *p, __m256 even, __m256 odd, __m256i signs) {
  const __m256i top = _mm256_set1_epi32(INT32_MIN);
  const __m256 e = _mm256_or_ps(even, _mm256_castsi256_ps(_mm256_slli_epi32(signs, 16)));
  const __m256 o = _mm256_or_ps(odd, _mm256_castsi256_ps(_mm256_and_si256(signs, top)));
  const __m256 low = _mm256_unpacklo_ps(e, o), high = _mm256_unpackhi_ps(e, o);
  moe_store_avx2(p, _mm256_permute2f128_ps(low, high, 0x20));
  moe_store_avx2((float *)p + 8, _mm256_permute2f128_ps(low, high, 0x31));
}
MOE_INLINE void moe_store2_bf16_avx2(void *p, __m256 even, __m256 odd, __m256i signs) {
  const __m256i low = _mm256_srli_epi32(moe_bf16_round_avx2(even), 16);
  moe_storei_avx2(p, _mm256_or_si256(_mm256_blend_epi16(moe_bf16_round_avx2(odd), low, 0x55), signs));
}

/* Each step folds two vectors to half their width and puts the results into one. */
MOE_INLINE __m256i moe_largest2x16_avx2(__m256i v[8]) {
  MOE_UNROLL
  for (int i = 0; i < 4; i++)
    v[i] = _mm256_max_epu16(_mm256_blend_epi32(v[i], v[i + 4], 0xf0), _mm256_permute2x128_si256(v[i], v[i + 4], 0x21));
  MOE_UNROLL
  for (int i = 0; i < 2; i++)
    v[i] = _mm256_max_epu16(_mm256_blend_epi32(v[i], v[i + 2], 0xcc), _mm256_alignr_epi8(v[i + 2], v[i], 8));
  return _mm256_max_epu16(_mm256_blend_epi32(v[0], v[1], 0xaa),
                          _mm256_shuffle_epi32(_mm256_blend_epi32(v[1], v[0], 0xaa), 0xb1));
}

#endif
