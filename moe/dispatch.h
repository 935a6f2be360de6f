/* Which kernels are in use: one atomic word, the library's only mutable state. */
#ifndef MOE_DISPATCH_H
#define MOE_DISPATCH_H

static const moe_core_ moe_core_intel_ = {0, 1, 1},
                       moe_core_other_ = {1, MOE_SMALL_M_TWO_ROWS, MOE_SMALL_M_TWO_ROWS_16BIT};

/* An entry for each instruction set, one for AVX512 where the CPU has VBMI, and one for AVX512BF16 whose bf16 products
   are fused multiply-adds. */
enum { MOE_KERNELS_VBMI_ = MOE_ISA_COUNT_, MOE_KERNELS_FMA_, MOE_KERNELS_COUNT_ };

/* X(core, entry, ISA, tables: of vec and router, of gemm, of quant). */
#if MOE_X86
#define MOE_KERNELS_LIST(X, core)                                         \
  X(core, MOE_ISA_SCALAR, SCALAR, scalar, scalar, scalar)                 \
  X(core, MOE_ISA_AVX2, AVX2, avx2, avx2, avx2)                           \
  X(core, MOE_ISA_AVX512, AVX512, avx512, avx512, avx512)                 \
  X(core, MOE_ISA_AVX512BF16, AVX512BF16, avx512, avx512bf16, avx512bf16) \
  X(core, MOE_KERNELS_VBMI_, AVX512, avx512, avx512, avx512vbmi)          \
  X(core, MOE_KERNELS_FMA_, AVX512BF16, avx512, fma_avx512bf16, avx512vbmi)
#else
#define MOE_KERNELS_LIST(X, core) X(core, MOE_ISA_SCALAR, SCALAR, scalar, scalar, scalar)
#endif

#define MOE_KERNELS_(core, entry, NAME, vocabulary, products, formats) \
  [entry] = {MOE_ISA_##NAME,                                           \
             &moe_core_##core##_,                                      \
             &moe_vec_table_##vocabulary,                              \
             &moe_gemm_table_##products,                               \
             &moe_gemm_table_##products.blocking,                      \
             &moe_quant_table_##formats,                               \
             &moe_router_table_##vocabulary},
static const moe_kernels moe_kernels_of_intel_[MOE_KERNELS_COUNT_] = {MOE_KERNELS_LIST(MOE_KERNELS_, intel)};
static const moe_kernels moe_kernels_of_others_[MOE_KERNELS_COUNT_] = {MOE_KERNELS_LIST(MOE_KERNELS_, other)};
#undef MOE_KERNELS_

/* 0: not looked yet; else a bit for each instruction set that the CPU has, bit MOE_KERNELS_VBMI_ if it has VBMI and,
   MOE_ISA_ASKED_ times, the one that the user asked for + 1, or 0. */
static atomic_int moe_isa_word_;
enum { MOE_ISA_ASKED_ = 1 << 16 };

/* Whether bf16 products are dot products where the instruction set has those. Intel's cores up to now issue one of them
   where they issue four fused multiply-adds of the same width: the f32 kernels give the same bits in half the time
   there, unless the instruction set was asked for. */
MOE_FN int moe_dot_products_(int asked) {
#ifdef MOE_PREFER_FMA
  (void)asked;
  return !MOE_PREFER_FMA;
#else
  return asked >= 0 || !moe_cpu_is_intel_();
#endif
}

/* The bits of moe_isa_word_, and the instruction set asked for or -1. The CPU is asked once: CPUID is slow under a
   hypervisor. */
MOE_FN int moe_isas_(int *asked) {
  int word = atomic_load_explicit(&moe_isa_word_, memory_order_relaxed);
  if (word == 0) {
    for (int isa = 0; isa < MOE_ISA_COUNT_; isa++) word |= moe_cpu_has_((moe_isa)isa) << isa;
    word |= moe_cpu_has_vbmi_() << MOE_KERNELS_VBMI_;
    atomic_store_explicit(&moe_isa_word_, word, memory_order_relaxed);
  }
  *asked = word / MOE_ISA_ASKED_ - 1;
  return word % MOE_ISA_ASKED_;
}

/* The best of these, up to one of them. */
MOE_FN int moe_isa_best_(int isas, int most) {
  while (most > 0 && !(isas >> most & 1)) most--;
  return most;
}

moe_isa moe_isa_active(void) {
  int asked;
  const int isas = moe_isas_(&asked);
  return (moe_isa)(asked < 0 ? moe_isa_best_(isas, MOE_ISA_COUNT_ - 1) : asked);
}

/* A call asks once and keeps the answer to its end: moe_isa_limit cannot change a call in flight. */
MOE_FN const moe_kernels *moe_kernels_(void) {
  int asked;
  const int isas = moe_isas_(&asked), isa = asked < 0 ? moe_isa_best_(isas, MOE_ISA_COUNT_ - 1) : asked;
  const moe_kernels *of = moe_cpu_is_intel_() ? moe_kernels_of_intel_ : moe_kernels_of_others_;
  if (isa == MOE_ISA_AVX512 && isas >> MOE_KERNELS_VBMI_ & 1) return of + MOE_KERNELS_VBMI_;
  return of + (isa == MOE_ISA_AVX512BF16 && !moe_dot_products_(asked) ? (int)MOE_KERNELS_FMA_ : isa);
}

const char *moe_isa_name(moe_isa isa) {
  switch (isa) {
#define MOE_ISA_CASE_(name, NAME) \
  case MOE_ISA_##NAME: return #name;
    MOE_ISA_LIST(MOE_ISA_CASE_)
#undef MOE_ISA_CASE_
  }
  return "unknown";
}

int moe_isa_supported(moe_isa isa) {
  int asked;
  return (int)isa >= 0 && (int)isa < MOE_ISA_COUNT_ && (moe_isas_(&asked) >> isa & 1);
}

moe_status moe_isa_limit(moe_isa isa) {
  if ((int)isa < 0 || (int)isa >= MOE_ISA_COUNT_) return MOE_ERROR_INVALID_OPTION;
  int asked;
  const int isas = moe_isas_(&asked);
  atomic_store_explicit(&moe_isa_word_, isas + (moe_isa_best_(isas, (int)isa) + 1) * MOE_ISA_ASKED_,
                        memory_order_relaxed);
  return MOE_OK;
}

#endif
