/* moe_bench: times the layer against this machine's own limits, measured in the same run.
     cc -O2 -I. bench/moe_bench.c -o moe_bench -lm && ./moe_bench
   A case's limit is its roofline time: max(flops / arithmetic peak, least bytes / read bandwidth). The peak for bf16 is
   the faster of dot products and fused multiply-adds, since both give the same bits. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#define MOE_IMPLEMENTATION
#include "moe.h"

#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "../examples/pool.h"
#include "dtypes.h"
#include "limits.h"
#include "tile.h"
#include "layer.h"
#include "weights.h"
#include "make.h"
#include "ops.h"
#include "run.h"
#include "options.h"
#include "models.h"
#include "roofline.h"
#include "suite.h"
#include "sweep.h"

static void bench_limit_isa(const char *name) {
#define BENCH_ONE(...) +1
  for (int i = 0; i < 0 MOE_ISA_LIST(BENCH_ONE); i++)
    if (strcmp(name, moe_isa_name((moe_isa)i)) == 0) {
      moe_isa_limit((moe_isa)i);
      if (moe_isa_active() != (moe_isa)i) bench_refuse(name, "this CPU lacks it");
      return;
    }
  bench_refuse(name, "no such instruction set");
}

static void bench_start(bench_setting *set, const bench_options *o) {
  bench_machine_start(&set->machine, o->threads);
  set->dtype = o->dtype, set->weights = o->weights, set->B = o->B, set->skew = o->skew;
  set->repeats = o->repeats, set->warm = o->warm, set->json = o->json;
  set->ctx = bench_context(&set->machine);
}

/* Of one thread, for comparison, and of all of them, which is what counts. The two also tell when others are using the
   processors: then every figure means little. */
static void bench_limits_of(bench_setting *set) {
  const int threads = set->machine.threads.threads;
  FILE *out = set->json ? stderr : stdout;
  const bench_limits one = bench_measure_limits(&set->machine, 1);
  bench_print_limits(out, 1, one);
  set->limits = threads > 1 ? bench_measure_limits(&set->machine, threads) : one;
  if (threads == 1) return;
  bench_print_limits(out, threads, set->limits);
  if (set->limits.fma < 0.7 * threads * one.fma)
    fprintf(stderr, "moe_bench: %d threads are only %.1f times as fast as one: a busy machine, or shared cores\n",
            threads, set->limits.fma / one.fma);
}

int main(int argc, char **argv) {
  static bench_setting set; /* zeroed; pool and context point into it */
  const bench_options o = bench_parse(argc, argv);
  if (o.isa) bench_limit_isa(o.isa);
  bench_start(&set, &o);
  bench_limits_of(&set);
  if (o.suite) bench_suite(&set);
  if (o.sweep) bench_sweep(&set, o.op[0]);
  for (int i = 0; i < o.ops && !o.suite && !o.sweep; i++) {
    const bench_result result = bench_case(&set, o.op[i], o.shape);
    bench_print(&set, &result);
  }
  bench_machine_stop(&set.machine);
  return 0;
}
