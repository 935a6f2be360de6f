/* The machine's own limits, measured in the same run as everything else: arithmetic peaks per instruction set and the read
   bandwidth of memory. The probes keep their accumulators in registers by inline assembly. */
#ifndef MOE_BENCH_LIMITS_H
#define MOE_BENCH_LIMITS_H

#include <stdint.h>
#include <stdlib.h>
#include <time.h>

static double bench_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#if defined(__x86_64__)
#define BENCH_12(X) X("0") X("1") X("2") X("3") X("4") X("5") X("6") X("7") X("8") X("9") X("10") X("11")
#define BENCH_24(X) BENCH_12(X) X("12") X("13") X("14") X("15") X("16") X("17") X("18") X("19") X("20") X("21") X("22") X("23")
#define BENCH_YMM(i) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" i "\n\t"
#define BENCH_ZMM(i) "vfmadd231ps %%zmm30, %%zmm31, %%zmm" i "\n\t"
#define BENCH_DOT(i) "vdpbf16ps %%zmm30, %%zmm31, %%zmm" i "\n\t"
#define BENCH_LOOP(body) __asm__ volatile("vzeroall\n\t1:\n\t" body "dec %0\n\tjnz 1b\n\tvzeroupper" : "+r"(n) : : "cc", "memory")

static void bench_spin_ymm(int64_t n) { BENCH_LOOP(BENCH_12(BENCH_YMM)); }
static void bench_spin_zmm(int64_t n) { BENCH_LOOP("vpxord %%zmm30, %%zmm30, %%zmm30\n\tvpxord %%zmm31, %%zmm31, %%zmm31\n\t" BENCH_24(BENCH_ZMM)); }
static void bench_spin_dot(int64_t n) { BENCH_LOOP("vpxord %%zmm30, %%zmm30, %%zmm30\n\tvpxord %%zmm31, %%zmm31, %%zmm31\n\t" BENCH_24(BENCH_DOT)); }
#endif

/* GFLOP/s of one core: the best of several short runs. */
static double bench_peak(void (*spin)(int64_t), double flops_per_turn) {
  double best = 0;
  for (int i = 0; i < 5; i++) {
    const int64_t turns = 1000000;
    const double start = bench_now();
    spin(turns);
    const double rate = flops_per_turn * (double)turns / (bench_now() - start) * 1e-9;
    if (rate > best) best = rate;
  }
  return best;
}

#endif
