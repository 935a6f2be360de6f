/* The floating-point environment. Every worker rounds to nearest, with gradual underflow, and restores the caller's
   modes. After moe_flush_on_ fused multiply-adds treat denormals as a bf16 dot product does (numeric contract 1). */
#ifndef MOE_BASE_FPENV_H
#define MOE_BASE_FPENV_H

#if MOE_X86
typedef uint32_t moe_fpenv_;
MOE_INLINE void moe_fpenv_set_(uint32_t mode) { __asm__ volatile("ldmxcsr %0" : : "m"(mode) : "memory"); }
MOE_INLINE uint32_t moe_fpenv_get_(void) {
  uint32_t mode;
  __asm__ volatile("stmxcsr %0" : "=m"(mode) : : "memory");
  return mode;
}
MOE_INLINE moe_fpenv_ moe_fpenv_enter_(void) {
  const uint32_t saved = moe_fpenv_get_();
  moe_fpenv_set_(0x1f80u);
  return saved;
}
MOE_INLINE void moe_fpenv_restore_(moe_fpenv_ saved) {
  moe_fpenv_set_(saved | (moe_fpenv_get_() & 0x3fu));
} /* flags stay raised */
MOE_INLINE void moe_flush_on_(void) { moe_fpenv_set_(0x9fc0u); }
MOE_INLINE void moe_flush_off_(void) { moe_fpenv_set_(0x1f80u); }
#elif defined(__aarch64__)
typedef uint64_t moe_fpenv_;
MOE_INLINE moe_fpenv_ moe_fpenv_enter_(void) {
  uint64_t saved;
  __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
  __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
  return saved;
}
MOE_INLINE void moe_fpenv_restore_(moe_fpenv_ saved) { __asm__ volatile("msr fpcr, %0" : : "r"(saved) : "memory"); }
#else
typedef int moe_fpenv_;
MOE_INLINE moe_fpenv_ moe_fpenv_enter_(void) { return 0; }
MOE_INLINE void moe_fpenv_restore_(moe_fpenv_ saved) { (void)saved; }
#endif

/* Tests bits that the compiler cannot trace back to a float: under -ffast-math it takes every float to be finite. */
MOE_INLINE int moe_is_finite_(const float *value) {
  uint32_t bits;
  memcpy(&bits, value, 4);
#ifdef __clang__
  __asm__("" : "+r"(bits));
#endif
  return (bits & 0x7f800000u) != 0x7f800000u;
}

#endif
