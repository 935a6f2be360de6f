/* The core vocabulary (see core_scalar.h) for AVX-512 F, BW, VL, DQ: vectors of sixteen. */
#ifndef MOE_SIMD_CORE_AVX512_H
#define MOE_SIMD_CORE_AVX512_H

enum { MOE_W_avx512 = 16 };
typedef __m512 moe_f_avx512;
typedef __m512i moe_i_avx512;
typedef __mmask16 moe_m_avx512;

MOE_INLINE __m512i moe_casti_avx512(__m512 x) { return _mm512_castps_si512(x); }
MOE_INLINE __m512 moe_castf_avx512(__m512i x) { return _mm512_castsi512_ps(x); }
MOE_INLINE __m512 moe_set1_avx512(float x) { return _mm512_set1_ps(x); }
MOE_INLINE __m512i moe_set1i_avx512(uint32_t x) { return _mm512_set1_epi32((int)x); }
MOE_INLINE __m512 moe_add_avx512(__m512 a, __m512 b) { return a + b; }
MOE_INLINE __m512 moe_sub_avx512(__m512 a, __m512 b) { return a - b; }
MOE_INLINE __m512 moe_mul_avx512(__m512 a, __m512 b) {
  __m512 product = a * b;
  MOE_OPAQUE(product);
  return product;
}
MOE_INLINE __m512 moe_div_avx512(__m512 a, __m512 b) { return a / b; }
MOE_INLINE __m512 moe_fma_avx512(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
MOE_INLINE __m512 moe_fma_onto_avx512(__m512 a, __m512 b, __m512 c) { return moe_fma_avx512(a, b, c); }
MOE_INLINE __m512 moe_scalef_avx512(__m512 a, __m512 n) { return _mm512_scalef_ps(a, n); }
MOE_INLINE __m512 moe_sqrt_avx512(__m512 a) { return _mm512_sqrt_ps(a); }
MOE_INLINE __mmask16 moe_lt_avx512(__m512 a, __m512 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
MOE_INLINE __m512 moe_select_avx512(__mmask16 m, __m512 a, __m512 b) { return _mm512_mask_blend_ps(m, b, a); }
MOE_INLINE __m512 moe_min_avx512(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }
MOE_INLINE __m512 moe_max_avx512(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
MOE_INLINE __m512i moe_addi_avx512(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
MOE_INLINE __m512i moe_subi_avx512(__m512i a, __m512i b) { return _mm512_sub_epi32(a, b); }
MOE_INLINE __m512i moe_andi_avx512(__m512i a, __m512i b) { return _mm512_and_si512(a, b); }
MOE_INLINE __m512i moe_ori_avx512(__m512i a, __m512i b) { return _mm512_or_si512(a, b); }
MOE_INLINE __m512i moe_slli_avx512(__m512i a, int n) { return _mm512_slli_epi32(a, (unsigned)n); }
MOE_INLINE __m512i moe_srli_avx512(__m512i a, int n) { return _mm512_srli_epi32(a, (unsigned)n); }
MOE_INLINE __m512i moe_srav_avx512(__m512i a, __m512i n) { return _mm512_srav_epi32(a, n); }
MOE_INLINE __m512i moe_sllv_avx512(__m512i a, __m512i n) { return _mm512_sllv_epi32(a, n); }
MOE_INLINE __m512i moe_srlv_avx512(__m512i a, __m512i n) { return _mm512_srlv_epi32(a, n); }
MOE_INLINE __m512i moe_mux_avx512(__m512i m, __m512i a, __m512i b) { return _mm512_ternarylogic_epi32(m, a, b, 0xca); }
MOE_INLINE __mmask16 moe_lti_avx512(__m512i a, __m512i b) { return _mm512_cmpgt_epi32_mask(b, a); }
MOE_INLINE __m512i moe_selecti_avx512(__mmask16 m, __m512i a, __m512i b) { return _mm512_mask_blend_epi32(m, b, a); }
MOE_INLINE __m512i moe_maxi_avx512(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }

MOE_INLINE uint32_t moe_topi_avx512(__m512i a) { return _mm512_reduce_max_epu32(a); }
MOE_INLINE __m512 moe_canon_avx512(__m512 x) {
  __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
  __mmask16 nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
  return _mm512_castsi512_ps(_mm512_mask_blend_epi32(nan, _mm512_castps_si512(x), _mm512_set1_epi32(0x7fc00000)));
}

MOE_INLINE __mmask16 moe_first_avx512(int64_t n) { return (__mmask16)((1u << n) - 1u); }

MOE_INLINE __m512 moe_load_avx512(const void *p) { return _mm512_loadu_ps(p); }
MOE_INLINE float moe_sum16_avx512(const float *x) { return moe_sum16_avx2(x); }
MOE_INLINE __m512 moe_loadn_avx512(const void *p, int64_t n) { return _mm512_maskz_loadu_ps(moe_first_avx512(n), p); }
MOE_INLINE void moe_store_avx512(void *p, __m512 x) { _mm512_storeu_ps(p, x); }
MOE_INLINE void moe_storen_avx512(void *p, __m512 x, int64_t n) { _mm512_mask_storeu_ps(p, moe_first_avx512(n), x); }
MOE_INLINE __m512i moe_loadi_avx512(const void *p) { return _mm512_loadu_si512(p); }
MOE_INLINE void moe_storei_avx512(void *p, __m512i x) { _mm512_storeu_si512(p, x); }
/* Stores bytes [from, to) of a line, even numbers. */
MOE_INLINE void moe_storei_part_avx512(void *line, __m512i x, int64_t from, int64_t to) {
  _mm512_mask_storeu_epi16(line, (__mmask32)(((uint64_t)1 << to / 2) - ((uint64_t)1 << from / 2)), x);
}
/* The last `bytes` bytes of `before`, an even number below 64, followed by the first ones of x. */
MOE_INLINE __m512i moe_shift_in_avx512(__m512i before, __m512i x, int64_t bytes) {
  const __m512i order = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12,
                                         11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_permutex2var_epi16(before, _mm512_add_epi16(order, _mm512_set1_epi16((short)(32 - bytes / 2))), x);
}
MOE_INLINE void moe_storei_nt_avx512(void *p, __m512i x) { _mm512_stream_si512((__m512i *)p, x); }
MOE_INLINE __m256i moe_load16_avx512(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
MOE_INLINE __m256i moe_load16n_avx512(const void *p, int64_t n) {
  return _mm256_maskz_loadu_epi16(moe_first_avx512(n), p);
}
MOE_INLINE __m512i moe_loadu16_avx512(const void *p) { return _mm512_cvtepu16_epi32(moe_load16_avx512(p)); }
MOE_INLINE __m512i moe_loadu16n_avx512(const void *p, int64_t n) {
  return _mm512_cvtepu16_epi32(moe_load16n_avx512(p, n));
}

/* ------------------------------------------------------------------------------------------------------ conversions */

MOE_INLINE __m512 moe_bf16_decode_avx512(__m256i h) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

/* In integers, because VCVTNEPS2BF16 flushes subnormals. */
MOE_INLINE __m512i moe_bf16_round_avx512(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), half = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  return _mm512_mask_sub_epi32(half, odd, half, _mm512_set1_epi32(-1));
}
MOE_INLINE __m256i moe_bf16_encode_avx512(__m512 x) {
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(moe_bf16_round_avx512(moe_canon_avx512(x)), 16));
}

/* Masked, because gcc's plain form is a macro with a sign conversion at -O0. */
MOE_INLINE __m256i moe_fp16_round_avx512(__m512 x) {
  return _mm512_maskz_cvtps_ph((__mmask16)0xffff, x, _MM_FROUND_TO_NEAREST_INT);
}
MOE_INLINE __m256i moe_fp16_encode_avx512(__m512 x) { return moe_fp16_round_avx512(moe_canon_avx512(x)); }

MOE_INLINE __m512 moe_load_f32_avx512(const void *p) { return moe_load_avx512(p); }
MOE_INLINE __m512 moe_loadn_f32_avx512(const void *p, int64_t n) { return moe_loadn_avx512(p, n); }
MOE_INLINE __m512 moe_load_bf16_avx512(const void *p) { return moe_bf16_decode_avx512(moe_load16_avx512(p)); }
MOE_INLINE __m512 moe_loadn_bf16_avx512(const void *p, int64_t n) {
  return moe_bf16_decode_avx512(moe_load16n_avx512(p, n));
}
MOE_INLINE __m512 moe_load_fp16_avx512(const void *p) {
  __m512 x = _mm512_cvtph_ps(moe_load16_avx512(p));
  MOE_OPAQUE(x); /* clang 14 would keep 16-bit elements instead, and load them one by one */
  return x;
}
MOE_INLINE __m512 moe_loadn_fp16_avx512(const void *p, int64_t n) { return _mm512_cvtph_ps(moe_load16n_avx512(p, n)); }

MOE_INLINE void moe_store_f32_avx512(void *p, __m512 x) { moe_store_avx512(p, moe_canon_avx512(x)); }
MOE_INLINE void moe_storen_f32_avx512(void *p, __m512 x, int64_t n) { moe_storen_avx512(p, moe_canon_avx512(x), n); }
MOE_INLINE void moe_store_bf16_avx512(void *p, __m512 x) {
  _mm256_storeu_si256((__m256i *)p, moe_bf16_encode_avx512(x));
}
MOE_INLINE __m512i moe_round2_avx512(__m512 a, __m512 b) {
  const __m512i first = _mm512_srli_epi32(moe_bf16_round_avx512(a), 16);
  const __m512i order = _mm512_packus_epi32(first, _mm512_srli_epi32(moe_bf16_round_avx512(b), 16));
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), order);
}
MOE_INLINE void moe_store_uppers_avx512(void *p, __m512 a, __m512 b) {
  const __mmask16 nan_a = _mm512_fpclass_ps_mask(a, 0x81), nan_b = _mm512_fpclass_ps_mask(b, 0x81); /* NaN */
  if (!_mm512_kortestz(nan_a, nan_b)) {
    a = moe_canon_avx512(a);
    b = moe_canon_avx512(b);
  }
  _mm512_storeu_si512(p, moe_round2_avx512(a, b));
}
MOE_INLINE void moe_storen_bf16_avx512(void *p, __m512 x, int64_t n) {
  _mm256_mask_storeu_epi16(p, moe_first_avx512(n), moe_bf16_encode_avx512(x));
}
MOE_INLINE void moe_store_fp16_avx512(void *p, __m512 x) {
  _mm256_storeu_si256((__m256i *)p, moe_fp16_encode_avx512(x));
}
MOE_INLINE void moe_storen_fp16_avx512(void *p, __m512 x, int64_t n) {
  _mm256_mask_storeu_epi16(p, moe_first_avx512(n), moe_fp16_encode_avx512(x));
}

MOE_INLINE void moe_load_columns_avx512(const void *p, int64_t stride, __m512i v[16]) {
  const char *row = (const char *)p;
  __m512i half[16]; /* half[8b+4h+r]: words 8b..8b+7 of rows 8h+r and 8h+r+4, placed by loads */
  MOE_UNROLL
  for (int r = 0; r < 8; r++, row += r == 4 ? 5 * stride : stride) {
    MOE_OPAQUE_POINTER(row);
    const __m256i *first = (const __m256i *)(const void *)row;
    const __m256i *fifth = (const __m256i *)(const void *)(row + 4 * stride);
    MOE_UNROLL
    for (int b = 0; b < 2; b++)
      half[8 * b + r] =
          _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(first + b)), _mm256_loadu_si256(fifth + b), 1);
  }
  MOE_UNROLL
  for (int b = 0; b < 16; b += 8) {
    __m512i four[8];
    MOE_UNROLL
    for (int h = 0; h < 8; h += 4) {
      const __m512i *in = half + b + h;
      const __m512i low = _mm512_unpacklo_epi32(in[0], in[1]), high = _mm512_unpackhi_epi32(in[0], in[1]);
      const __m512i low2 = _mm512_unpacklo_epi32(in[2], in[3]), high2 = _mm512_unpackhi_epi32(in[2], in[3]);
      four[h] = _mm512_unpacklo_epi64(low, low2);
      four[h + 1] = _mm512_unpackhi_epi64(low, low2);
      four[h + 2] = _mm512_unpacklo_epi64(high, high2);
      four[h + 3] = _mm512_unpackhi_epi64(high, high2);
    }
    MOE_UNROLL
    for (int w = 0; w < 4; w++) {
      v[b + w] = _mm512_shuffle_i32x4(four[w], four[4 + w], 0x88);
      v[b + 4 + w] = _mm512_shuffle_i32x4(four[w], four[4 + w], 0xdd);
    }
  }
}

MOE_INLINE __m512i moe_halve2_avx512(__m512 a, __m512 b) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(moe_fp16_round_avx512(a)), moe_fp16_round_avx512(b), 1);
}
MOE_INLINE int moe_any_nan4_avx512(const __m512 *x) {
  const __mmask16 first = _mm512_cmp_ps_mask(x[0], x[1], _CMP_UNORD_Q);
  return !_mm512_kortestz(first, _mm512_cmp_ps_mask(x[2], x[3], _CMP_UNORD_Q));
}

#endif
