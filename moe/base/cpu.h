/* Which instruction sets this CPU, and this operating system, can run. */
#ifndef MOE_BASE_CPU_H
#define MOE_BASE_CPU_H

#if MOE_X86
#include <cpuid.h>

/* gcc 12's __builtin_cpu_supports does not know f16c: CPUID leaf 1, ECX bit 29. */
MOE_FN int moe_cpu_has_f16c_(void) {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1u) != 0;
}
#endif

/* Of AVX-512, VBMI. MOE_CPU_VBMI, if it is 0, takes it away from a CPU, so that tests see both on one machine. */
MOE_FN int moe_cpu_has_vbmi_(void) {
#if MOE_X86 && (!defined MOE_CPU_VBMI || MOE_CPU_VBMI)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512vbmi") != 0;
#else
  return 0;
#endif
}

MOE_FN int moe_cpu_has_(moe_isa isa) {
#if MOE_X86
  __builtin_cpu_init();
  switch (isa) {
    case MOE_ISA_SCALAR: return 1;
    case MOE_ISA_AVX2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && moe_cpu_has_f16c_();
    case MOE_ISA_AVX512:
      return moe_cpu_has_(MOE_ISA_AVX2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    case MOE_ISA_AVX512BF16:
      return moe_cpu_has_(MOE_ISA_AVX512) && moe_cpu_has_vbmi_() && __builtin_cpu_supports("avx512bf16");
  }
  return 0;
#else
  return isa == MOE_ISA_SCALAR;
#endif
}

/* MOE_CPU_INTEL, 0 or 1, decides it instead of the CPU, so that tests see both on one machine. */
MOE_FN int moe_cpu_is_intel_(void) {
#ifdef MOE_CPU_INTEL
  return MOE_CPU_INTEL;
#elif MOE_X86
  __builtin_cpu_init();
  return __builtin_cpu_is("intel") != 0;
#else
  return 0;
#endif
}

/* Ends a worker's use of vectors. Non-temporal stores become visible to other threads. And gcc below -O2 does not clear
   the upper parts of vector registers, which would make the caller's SSE code slow. */
MOE_FN __attribute__((noinline)) void moe_cpu_clean_(void) {
#if MOE_X86
  __asm__ volatile("sfence" ::: "memory");
  if (__builtin_cpu_supports("avx")) __asm__ volatile("vzeroupper");
#endif
}

#endif
