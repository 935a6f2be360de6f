/* The core vocabulary (see core_scalar.h) for AVX2 + FMA + F16C: vectors of eight. */
#ifndef MOE_SIMD_CORE_AVX2_H
#define MOE_SIMD_CORE_AVX2_H

enum { MOE_W_avx2 = 8 };
typedef __m256 moe_f_avx2;
typedef __m256i moe_i_avx2;
typedef __m256 moe_m_avx2;

MOE_INLINE __m256i moe_casti_avx2(__m256 x) { return _mm256_castps_si256(x); }
MOE_INLINE __m256 moe_castf_avx2(__m256i x) { return _mm256_castsi256_ps(x); }
MOE_INLINE __m256 moe_set1_avx2(float x) { return _mm256_set1_ps(x); }
MOE_INLINE __m256i moe_set1i_avx2(uint32_t x) { return _mm256_set1_epi32((int)x); }
MOE_INLINE __m256 moe_add_avx2(__m256 a, __m256 b) { return a + b; }
MOE_INLINE __m256 moe_sub_avx2(__m256 a, __m256 b) { return a - b; }
MOE_INLINE __m256 moe_mul_avx2(__m256 a, __m256 b) {
  __m256 product = a * b;
  MOE_OPAQUE(product);
  return product;
}
MOE_INLINE __m256 moe_div_avx2(__m256 a, __m256 b) { return a / b; }
MOE_INLINE __m256 moe_fma_avx2(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
/* gcc would put the result in another register than c, and run out of registers. */
MOE_INLINE __m256 moe_fma_onto_avx2(__m256 a, __m256 b, __m256 c) {
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
  return c;
}
MOE_INLINE __m256 moe_power_avx2(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
MOE_INLINE __m256 moe_scalef_avx2(__m256 a, __m256 n) {
  const __m256i all = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(all, 1);
  return moe_mul_avx2(moe_mul_avx2(a, moe_power_avx2(half)), moe_power_avx2(_mm256_sub_epi32(all, half)));
}
MOE_INLINE __m256 moe_sqrt_avx2(__m256 a) { return _mm256_sqrt_ps(a); }
MOE_INLINE __m256 moe_lt_avx2(__m256 a, __m256 b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
MOE_INLINE __m256 moe_select_avx2(__m256 m, __m256 a, __m256 b) { return _mm256_blendv_ps(b, a, m); }
MOE_INLINE __m256 moe_min_avx2(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }
MOE_INLINE __m256 moe_max_avx2(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
MOE_INLINE __m256i moe_addi_avx2(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
MOE_INLINE __m256i moe_subi_avx2(__m256i a, __m256i b) { return _mm256_sub_epi32(a, b); }
MOE_INLINE __m256i moe_andi_avx2(__m256i a, __m256i b) { return _mm256_and_si256(a, b); }
MOE_INLINE __m256i moe_ori_avx2(__m256i a, __m256i b) { return _mm256_or_si256(a, b); }
MOE_INLINE __m256i moe_slli_avx2(__m256i a, int n) { return _mm256_slli_epi32(a, n); }
MOE_INLINE __m256i moe_srli_avx2(__m256i a, int n) { return _mm256_srli_epi32(a, n); }
MOE_INLINE __m256i moe_srav_avx2(__m256i a, __m256i n) { return _mm256_srav_epi32(a, n); }
MOE_INLINE __m256i moe_sllv_avx2(__m256i a, __m256i n) { return _mm256_sllv_epi32(a, n); }
MOE_INLINE __m256i moe_srlv_avx2(__m256i a, __m256i n) { return _mm256_srlv_epi32(a, n); }
MOE_INLINE __m256i moe_mux_avx2(__m256i m, __m256i a, __m256i b) { return _mm256_or_si256(_mm256_and_si256(m, a), b); }
MOE_INLINE __m256 moe_lti_avx2(__m256i a, __m256i b) { return _mm256_castsi256_ps(_mm256_cmpgt_epi32(b, a)); }
MOE_INLINE __m256i moe_selecti_avx2(__m256 m, __m256i a, __m256i b) {
  return _mm256_blendv_epi8(b, a, _mm256_castps_si256(m));
}
MOE_INLINE __m256i moe_maxi_avx2(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }

MOE_INLINE uint32_t moe_topi_avx2(__m256i a) {
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1)));
}
MOE_INLINE __m256 moe_canon_avx2(__m256 x) {
  __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
  __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  return _mm256_castsi256_ps(_mm256_blendv_epi8(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fc00000), nan));
}

/* Elements below n, as a mask for maskload. */
MOE_INLINE __m256i moe_first_avx2(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

MOE_INLINE __m256 moe_load_avx2(const void *p) { return _mm256_loadu_ps((const float *)p); }
MOE_INLINE float moe_sum8_avx2(__m256 x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
MOE_INLINE float moe_sum16_avx2(const float *x) { return moe_sum8_avx2(moe_load_avx2(x) + moe_load_avx2(x + 8)); }
MOE_INLINE __m256 moe_loadn_avx2(const void *p, int64_t n) {
  return _mm256_maskload_ps((const float *)p, moe_first_avx2(n));
}
MOE_INLINE void moe_store_avx2(void *p, __m256 x) { _mm256_storeu_ps((float *)p, x); }
MOE_INLINE void moe_storen_avx2(void *p, __m256 x, int64_t n) { _mm256_maskstore_ps((float *)p, moe_first_avx2(n), x); }
MOE_INLINE __m256i moe_loadi_avx2(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
MOE_INLINE void moe_storei_avx2(void *p, __m256i x) { _mm256_storeu_si256((__m256i *)p, x); }
MOE_INLINE void moe_storei_nt_avx2(void *p, __m256i x) { _mm256_stream_si256((__m256i *)p, x); }

/* AVX2 has no masked 16-bit moves: partial ones go through a buffer. */
MOE_INLINE __m128i moe_load16n_avx2(const void *p, int64_t n) {
  uint16_t buffer[8] = {0};
  memcpy(buffer, p, (size_t)n * 2);
  return _mm_loadu_si128((const __m128i *)buffer);
}
MOE_INLINE void moe_store16n_avx2(void *p, __m128i x, int64_t n) {
  uint16_t buffer[8];
  _mm_storeu_si128((__m128i *)buffer, x);
  memcpy(p, buffer, (size_t)n * 2);
}
MOE_INLINE __m128i moe_load16_avx2(const void *p) { return _mm_loadu_si128((const __m128i *)p); }
MOE_INLINE __m256i moe_loadu16_avx2(const void *p) { return _mm256_cvtepu16_epi32(moe_load16_avx2(p)); }
MOE_INLINE __m256i moe_loadu16n_avx2(const void *p, int64_t n) { return _mm256_cvtepu16_epi32(moe_load16n_avx2(p, n)); }

/* ------------------------------------------------------------------------------------------------------ conversions */

MOE_INLINE __m256 moe_bf16_decode_avx2(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

MOE_INLINE __m256i moe_bf16_round_avx2(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
}
MOE_INLINE __m128i moe_bf16_encode_avx2(__m256 x) {
  __m256i bits = _mm256_srli_epi32(moe_bf16_round_avx2(moe_canon_avx2(x)), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}

/* VCVTPS2PH keeps a NaN's sign, so the canonical NaN goes in. */
MOE_INLINE __m128i moe_fp16_encode_avx2(__m256 x) {
  return _mm256_cvtps_ph(moe_canon_avx2(x), _MM_FROUND_TO_NEAREST_INT);
}

MOE_INLINE __m256 moe_load_f32_avx2(const void *p) { return moe_load_avx2(p); }
MOE_INLINE __m256 moe_loadn_f32_avx2(const void *p, int64_t n) { return moe_loadn_avx2(p, n); }
MOE_INLINE __m256 moe_load_bf16_avx2(const void *p) { return moe_bf16_decode_avx2(moe_load16_avx2(p)); }
MOE_INLINE __m256 moe_loadn_bf16_avx2(const void *p, int64_t n) { return moe_bf16_decode_avx2(moe_load16n_avx2(p, n)); }
MOE_INLINE __m256 moe_load_fp16_avx2(const void *p) {
  __m256 x = _mm256_cvtph_ps(moe_load16_avx2(p));
  MOE_OPAQUE(x); /* clang 14 would keep 16-bit elements instead, and load them one by one */
  return x;
}
MOE_INLINE __m256 moe_loadn_fp16_avx2(const void *p, int64_t n) { return _mm256_cvtph_ps(moe_load16n_avx2(p, n)); }

MOE_INLINE void moe_store_f32_avx2(void *p, __m256 x) { moe_store_avx2(p, moe_canon_avx2(x)); }
MOE_INLINE void moe_storen_f32_avx2(void *p, __m256 x, int64_t n) { moe_storen_avx2(p, moe_canon_avx2(x), n); }
MOE_INLINE void moe_store_bf16_avx2(void *p, __m256 x) { _mm_storeu_si128((__m128i *)p, moe_bf16_encode_avx2(x)); }
MOE_INLINE void moe_storen_bf16_avx2(void *p, __m256 x, int64_t n) { moe_store16n_avx2(p, moe_bf16_encode_avx2(x), n); }
MOE_INLINE void moe_store_uppers_avx2(void *p, __m256 a, __m256 b) {
  const __m256i first = _mm256_srli_epi32(moe_bf16_round_avx2(moe_canon_avx2(a)), 16);
  const __m256i second = _mm256_srli_epi32(moe_bf16_round_avx2(moe_canon_avx2(b)), 16);
  _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8));
}
MOE_INLINE void moe_store_fp16_avx2(void *p, __m256 x) { _mm_storeu_si128((__m128i *)p, moe_fp16_encode_avx2(x)); }
MOE_INLINE void moe_storen_fp16_avx2(void *p, __m256 x, int64_t n) { moe_store16n_avx2(p, moe_fp16_encode_avx2(x), n); }

MOE_INLINE void moe_load_columns_avx2(const void *p, int64_t stride, __m256i v[8]) {
  __m256i four[8]; /* four[4b+r]: words 4b..4b+3 of rows r and r+4, placed by loads: shuffles are the bottleneck */
  const char *row = (const char *)p;
  MOE_UNROLL
  for (int r = 0; r < 4; r++, row += stride) {
    MOE_OPAQUE_POINTER(row);
    const __m128i *upper = (const __m128i *)(const void *)row;
    const __m128i *lower = (const __m128i *)(const void *)(row + 4 * stride);
    MOE_UNROLL
    for (int b = 0; b < 2; b++)
      four[4 * b + r] =
          _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(upper + b)), _mm_loadu_si128(lower + b), 1);
  }
  MOE_UNROLL
  for (int b = 0; b < 8; b += 4) {
    const __m256i low = _mm256_unpacklo_epi32(four[b], four[b + 1]), high = _mm256_unpackhi_epi32(four[b], four[b + 1]);
    const __m256i low2 = _mm256_unpacklo_epi32(four[b + 2], four[b + 3]);
    const __m256i high2 = _mm256_unpackhi_epi32(four[b + 2], four[b + 3]);
    v[b] = _mm256_unpacklo_epi64(low, low2);
    v[b + 1] = _mm256_unpackhi_epi64(low, low2);
    v[b + 2] = _mm256_unpacklo_epi64(high, high2);
    v[b + 3] = _mm256_unpackhi_epi64(high, high2);
  }
}

#endif
