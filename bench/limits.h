/* The machine's own limits, measured in the same run as everything else: arithmetic peaks per instruction set and the read
   bandwidth of memory, per thread count. The arithmetic probes keep their accumulators in registers by inline assembly. */
#ifndef MOE_BENCH_LIMITS_H
#define MOE_BENCH_LIMITS_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct bench_limits {
  double fma;  /* GFLOP/s of binary32 fused multiply-adds with the instruction set in use, all threads */
  double dot;  /* GFLOP/s of bf16 dot products, 0 where there are none */
  double read; /* GB/s */
} bench_limits;

static double bench_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#if defined(__x86_64__)
#define BENCH_12(X) X("0") X("1") X("2") X("3") X("4") X("5") X("6") X("7") X("8") X("9") X("10") X("11")
#define BENCH_24(X) BENCH_12(X) X("12") X("13") X("14") X("15") X("16") X("17") X("18") X("19") X("20") X("21") X("22") X("23")
#define BENCH_XMM(i) "mulps %%xmm15, %%xmm" i "\n\taddps %%xmm15, %%xmm" i "\n\t"
#define BENCH_YMM(i) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" i "\n\t"
#define BENCH_ZMM(i) "vfmadd231ps %%zmm30, %%zmm31, %%zmm" i "\n\t"
#define BENCH_DOT(i) "vdpbf16ps %%zmm30, %%zmm31, %%zmm" i "\n\t"
#define BENCH_CLEAR "vzeroall\n\t"
#define BENCH_CLEAR_HIGH "vpxord %%zmm30, %%zmm30, %%zmm30\n\tvpxord %%zmm31, %%zmm31, %%zmm31\n\t"
#define BENCH_CLOBBER                                                                                                       \
  "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", \
      "xmm14", "xmm15"
#define BENCH_LOOP(clear, body, end) __asm__ volatile(clear "1:\n\t" body "dec %0\n\tjnz 1b\n\t" end : "+r"(n) : : BENCH_CLOBBER)

static void bench_spin_xmm(int64_t n) { BENCH_LOOP("xorps %%xmm15, %%xmm15\n\t", BENCH_12(BENCH_XMM), ""); }
static void bench_spin_ymm(int64_t n) { BENCH_LOOP(BENCH_CLEAR, BENCH_12(BENCH_YMM), "vzeroupper"); }
static void bench_spin_zmm(int64_t n) { BENCH_LOOP(BENCH_CLEAR BENCH_CLEAR_HIGH, BENCH_24(BENCH_ZMM), "vzeroupper"); }
static void bench_spin_dot(int64_t n) { BENCH_LOOP(BENCH_CLEAR BENCH_CLEAR_HIGH, BENCH_24(BENCH_DOT), "vzeroupper"); }
#endif

/* ------------------------------------------------------------------------------------------------------------ probes */

typedef struct bench_probe {
  void (*spin)(int64_t turns);
  int64_t turns;
  const char *memory;
  int64_t bytes; /* per task */
  volatile uint64_t sink[64];
} bench_probe;

static void bench_spin_task(void *arg, int64_t index) {
  const bench_probe *probe = (const bench_probe *)arg;
  (void)index;
  probe->spin(probe->turns);
}

static void bench_read_task(void *arg, int64_t index) {
  bench_probe *probe = (bench_probe *)arg;
  const char *p = probe->memory + index * probe->bytes;
  uint64_t sum[8] = {0};
  for (int64_t i = 0; i + 64 <= probe->bytes; i += 64) {
    uint64_t word[8];
    memcpy(word, p + i, 64);
    for (int j = 0; j < 8; j++) sum[j] += word[j];
  }
  for (int j = 1; j < 8; j++) sum[0] += sum[j];
  probe->sink[index % 64] = sum[0];
}

/* Units per second over all threads, the best of a few runs: a limit is what the machine can do, not what it did on average. */
static double bench_rate(pool *threads, bench_probe *probe, moe_task task, double units) {
  double best = 0;
  for (int i = 0; i < 6; i++) {
    const double start = bench_now();
    pool_run(threads, threads->threads, task, probe);
    const double rate = units * (double)threads->threads / (bench_now() - start);
    if (rate > best) best = rate;
  }
  return best;
}

static double bench_peak(pool *threads, void (*spin)(int64_t), double flops) {
  bench_probe probe = {0};
  probe.spin = spin;
  probe.turns = 2000000;
  return bench_rate(threads, &probe, bench_spin_task, flops * (double)probe.turns) * 1e-9;
}

static double bench_read(pool *threads) {
  bench_probe probe = {0};
  probe.bytes = (int64_t)256 << 20;
  char *memory = (char *)malloc((size_t)(probe.bytes * threads->threads));
  if (!memory) return 0;
  memset(memory, 1, (size_t)(probe.bytes * threads->threads));
  probe.memory = memory;
  const double rate = bench_rate(threads, &probe, bench_read_task, (double)probe.bytes) * 1e-9;
  free(memory);
  return rate;
}

static bench_limits bench_measure_limits(pool *threads) {
  bench_limits limits = {0};
#if defined(__x86_64__)
  const moe_isa isa = moe_isa_active();
  if (isa == MOE_ISA_SCALAR) limits.fma = bench_peak(threads, bench_spin_xmm, 12 * 8);
  if (isa == MOE_ISA_AVX2) limits.fma = bench_peak(threads, bench_spin_ymm, 12 * 16);
  if (isa >= MOE_ISA_AVX512) limits.fma = bench_peak(threads, bench_spin_zmm, 24 * 32);
  if (isa >= MOE_ISA_AVX512BF16) limits.dot = bench_peak(threads, bench_spin_dot, 24 * 64);
#endif
  limits.read = bench_read(threads);
  return limits;
}

#endif
