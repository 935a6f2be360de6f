/* The floating-point environment: every lane works in round-to-nearest with gradual underflow and gives the caller's modes
   back. moe_flush_* is the mode in which plain fused multiply-adds behave as a bf16 dot product does (numeric contract 1). */
#ifndef MOE_ISA_FPENV_H
#define MOE_ISA_FPENV_H

#if MOE_X86
typedef unsigned moe_fpenv_;
MOE_INLINE moe_fpenv_ moe_fpenv_enter_(void) {
  unsigned saved = _mm_getcsr();
  _mm_setcsr(0x1f80u);
  return saved;
}
MOE_INLINE void moe_fpenv_leave_(moe_fpenv_ saved) { _mm_setcsr(saved | (_mm_getcsr() & 0x3fu)); }
MOE_INLINE void moe_flush_on_(void) { _mm_setcsr(0x9fc0u); }
MOE_INLINE void moe_flush_off_(void) { _mm_setcsr(0x1f80u); }
#elif defined(__aarch64__)
typedef uint64_t moe_fpenv_;
MOE_INLINE moe_fpenv_ moe_fpenv_enter_(void) {
  uint64_t saved;
  __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
  __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
  return saved;
}
MOE_INLINE void moe_fpenv_leave_(moe_fpenv_ saved) { __asm__ volatile("msr fpcr, %0" : : "r"(saved) : "memory"); }
#else
typedef int moe_fpenv_;
MOE_INLINE moe_fpenv_ moe_fpenv_enter_(void) { return 0; }
MOE_INLINE void moe_fpenv_leave_(moe_fpenv_ saved) { (void)saved; }
#endif

#endif
