/* AVX-512 BF16: the vocabulary is avx512's; this adds the dot product of bf16 pairs. Other new operations stay unused
   because they flush subnormals where the numeric contract does not, except where there are none. */
#ifndef MOE_ISA_AVX512BF16_H
#define MOE_ISA_AVX512BF16_H

/* Per 32-bit lane: fma(a.lo, b.lo, fma(a.hi, b.hi, c)), subnormals in and out taken as zero. */
MOE_INLINE __m512 moe_dot2_avx512bf16(__m512i a, __m512i b, __m512 c) {
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}

/* avx512's round2, of what is not subnormal either. */
MOE_INLINE __m512i moe_round2_avx512bf16(__m512 a, __m512 b) { return (__m512i)_mm512_cvtne2ps_pbh(b, a); }

/* The first n bf16 as pairs in words, the rest zero. */
MOE_INLINE __m512i moe_loadi16n_avx512(const void *p, int64_t n) {
  return _mm512_maskz_loadu_epi16((__mmask32)(n >= 32 ? 0xffffffffu : (1u << n) - 1u), p);
}

#endif
