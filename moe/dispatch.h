/* Which table is in use: one atomic word, the library's only mutable state. */
#ifndef MOE_DISPATCH_H
#define MOE_DISPATCH_H

/* 0: not looked yet; else the best instruction set there is + 1 and, MOE_ISA_ASKED_ times, the one that the user asked
   for + 1 or 0. */
static atomic_int moe_isa_word_;
enum { MOE_ISA_ASKED_ = 256 };

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

/* AMD's cores drop fetches while too many are under way; Intel's wait until there is room. */
MOE_FN int moe_drops_prefetches_(void) { return !moe_cpu_is_intel_(); }

/* AMD's cores store half a vector where they load and multiply a whole one. */
MOE_FN int moe_half_width_stores_(void) { return !moe_cpu_is_intel_(); }

MOE_FN void moe_fill_table_(moe_kernels *t, moe_isa isa, int dot) {
  memset(t, 0, sizeof *t);
  moe_fill_table_scalar(t);
#if MOE_X86
  if (isa >= MOE_ISA_AVX2) moe_fill_table_avx2(t);
  if (isa >= MOE_ISA_AVX512) moe_fill_table_avx512(t);
  if (isa >= MOE_ISA_AVX512BF16) moe_fill_table_avx512bf16(t, dot);
#else
  (void)dot;
#endif
  t->drops_prefetches = moe_drops_prefetches_();
  t->half_width_stores = moe_half_width_stores_();
  t->isa = isa;
}

/* The best instruction set, and the one asked for or -1. The CPU is asked once: CPUID is slow under a hypervisor. */
MOE_FN int moe_isa_best_(int *asked) {
  int word = atomic_load_explicit(&moe_isa_word_, memory_order_relaxed);
  if (word == 0) {
    word = (int)moe_cpu_best_() + 1;
    atomic_store_explicit(&moe_isa_word_, word, memory_order_relaxed);
  }
  *asked = word / MOE_ISA_ASKED_ - 1;
  return word % MOE_ISA_ASKED_ - 1;
}

moe_isa moe_isa_active(void) {
  int asked;
  const int best = moe_isa_best_(&asked);
  return (moe_isa)(asked < 0 ? best : asked);
}

/* A call fills its own table, on its stack, and keeps it to its end: moe_isa_limit cannot change a call under way. */
MOE_FN moe_kernels moe_kernels_(void) {
  int asked;
  const int best = moe_isa_best_(&asked);
  moe_kernels t;
  moe_fill_table_(&t, (moe_isa)(asked < 0 ? best : asked), moe_dot_products_(asked));
  return t;
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
  return (int)isa >= 0 && (int)isa <= moe_isa_best_(&asked);
}

moe_status moe_isa_limit(moe_isa isa) {
  if ((int)isa < 0 || isa > MOE_ISA_AVX512BF16) return MOE_ERROR_INVALID_OPTION;
  int asked;
  const int best = moe_isa_best_(&asked);
  atomic_store_explicit(&moe_isa_word_, best + 1 + ((int)moe_min_(best, isa) + 1) * MOE_ISA_ASKED_,
                        memory_order_relaxed);
  return MOE_OK;
}

#endif
