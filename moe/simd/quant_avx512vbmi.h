/* The vocabulary of formats for AVX-512 with VBMI, where bytes are looked up 64 at a time: what kernels_vbmi.inl needs
   besides quant_avx512.h. */
#ifndef MOE_SIMD_QUANT_AVX512VBMI_H
#define MOE_SIMD_QUANT_AVX512VBMI_H

/* Of 32 words the lower bytes, and the upper ones. */
MOE_INLINE void moe_store_bytes_avx512vbmi(void *low, void *high, __m512i words) {
  _mm256_storeu_si256((__m256i *)low, _mm512_cvtepi16_epi8(words));
  _mm256_storeu_si256((__m256i *)high, _mm512_cvtepi16_epi8(_mm512_srli_epi16(words, 8)));
}

#endif
