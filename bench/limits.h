/* The machine's own limits, measured in the same run as everything else and per thread count: arithmetic peaks of the
   instruction set in use and the read bandwidth of memory. */
#ifndef MOE_BENCH_LIMITS_H
#define MOE_BENCH_LIMITS_H

typedef struct bench_limits {
  double fma;  /* GFLOP/s of binary32 fused multiply-adds (scalar: multiplies and adds) */
  double dot;  /* GFLOP/s of bf16 dot products, 0 where there are none */
  double read; /* GB/s */
} bench_limits;

/* Ways to read: in how many places at once, and how many bytes ahead the prefetch runs (0: the hardware's alone). */
typedef struct bench_reader {
  int streams;
  int64_t ahead;
} bench_reader;

/* The threads, and memory several times larger than the caches: what the read probe reads, and what empties the caches
   before a run. */
typedef struct bench_machine {
  pool threads;
  char *memory;
  int64_t bytes;
  bench_reader reader; /* the fastest found */
} bench_machine;

enum { BENCH_LINE = 64, BENCH_AHEAD_MAX = 1 << 14 };

static double bench_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Zeroed memory in large pages where the system has them: probe and tensors alike. NULL when there is not enough. */
static void *bench_pages(int64_t bytes) {
  const size_t page = (size_t)1 << 21, align = (size_t)bytes < page ? BENCH_LINE : page;
  const size_t size = ((size_t)bytes + align) / align * align;
  void *p = aligned_alloc(align, size);
  if (!p) return NULL;
#ifdef MADV_HUGEPAGE
  if (align == page) (void)madvise(p, size, MADV_HUGEPAGE);
#endif
  return memset(p, 0, size);
}

/* Units per second over all tasks, the best of a few runs: a limit is what the machine can do, not what it did on
   average. */
static double bench_rate(bench_machine *m, int tasks, moe_task task, void *arg, double units, int runs) {
  double best = 0;
  for (int i = 0; i < runs; i++) {
    const double start = bench_now();
    pool_run(&m->threads, tasks, task, arg);
    const double rate = units * (double)tasks / (bench_now() - start);
    if (rate > best) best = rate;
  }
  return best;
}

/* Units per second that are kept up for about so many seconds, `units` of them in each thread's task. */
static double bench_sustained(bench_machine *m, moe_task task, void *arg, double units, double seconds) {
  const double start = bench_now();
  double done = 0;
  do {
    pool_run(&m->threads, m->threads.threads, task, arg);
    done += units * m->threads.threads;
  } while (bench_now() - start < seconds);
  return done / (bench_now() - start);
}

/* ---------------------------------------------------------------------------------------------------------- arithmetic
   Inline assembly keeps the accumulators in registers. */

/* A loop of nothing but what the peak counts, and how often a task goes round it. */
typedef struct bench_loop {
  void (*spin)(int64_t turns); /* NULL: there is none */
  double flops;                /* of a turn */
} bench_loop;
enum { BENCH_TURNS = 500000 };

#if defined(__x86_64__)
#define BENCH_12(X) X("0") X("1") X("2") X("3") X("4") X("5") X("6") X("7") X("8") X("9") X("10") X("11")
#define BENCH_24(X) \
  BENCH_12(X) X("12") X("13") X("14") X("15") X("16") X("17") X("18") X("19") X("20") X("21") X("22") X("23")
#define BENCH_XMM(i)     "mulps %%xmm15, %%xmm" i "\n\taddps %%xmm15, %%xmm" i "\n\t"
#define BENCH_YMM(i)     "vfmadd231ps %%ymm14, %%ymm15, %%ymm" i "\n\t"
#define BENCH_ZMM(i)     "vfmadd231ps %%zmm30, %%zmm31, %%zmm" i "\n\t"
#define BENCH_DOT(i)     "vdpbf16ps %%zmm30, %%zmm31, %%zmm" i "\n\t"
#define BENCH_CLEAR      "vzeroall\n\t"
#define BENCH_CLEAR_HIGH "vpxord %%zmm30, %%zmm30, %%zmm30\n\tvpxord %%zmm31, %%zmm31, %%zmm31\n\t"
#define BENCH_CLOBBER                                                                                              \
  "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", \
      "xmm13", "xmm14", "xmm15"
#define BENCH_LOOP(clear, body, end) \
  __asm__ volatile(clear "1:\n\t" body "dec %0\n\tjnz 1b\n\t" end : "+r"(n) : : BENCH_CLOBBER)

static void bench_spin_xmm(int64_t n) { BENCH_LOOP("xorps %%xmm15, %%xmm15\n\t", BENCH_12(BENCH_XMM), ""); }
static void bench_spin_ymm(int64_t n) { BENCH_LOOP(BENCH_CLEAR, BENCH_12(BENCH_YMM), "vzeroupper"); }
static void bench_spin_zmm(int64_t n) { BENCH_LOOP(BENCH_CLEAR BENCH_CLEAR_HIGH, BENCH_24(BENCH_ZMM), "vzeroupper"); }
static void bench_spin_dot(int64_t n) { BENCH_LOOP(BENCH_CLEAR BENCH_CLEAR_HIGH, BENCH_24(BENCH_DOT), "vzeroupper"); }

static bench_loop bench_loop_of(int dot) {
  static const bench_loop none = {NULL, 0}, xmm = {bench_spin_xmm, 12 * 8}, ymm = {bench_spin_ymm, 12 * 16},
                          zmm = {bench_spin_zmm, 24 * 32}, pairs = {bench_spin_dot, 24 * 64};
  const moe_isa isa = moe_isa_active();
  if (dot) return isa == MOE_ISA_AVX512BF16 ? pairs : none;
  return isa == MOE_ISA_SCALAR ? xmm : isa == MOE_ISA_AVX2 ? ymm : zmm;
}
#else
static bench_loop bench_loop_of(int dot) {
  const bench_loop none = {NULL, 0};
  return (void)dot, none;
}
#endif

static void bench_loop_task(void *arg, int64_t index) {
  const bench_loop *loop = (const bench_loop *)arg;
  (void)index;
  loop->spin(BENCH_TURNS);
}

/* GFLOP/s of FMAs or dot products: the best of `runs`, and for about `seconds` without a break, which leaves in what
   others take of the cores. 0 where there are none. */
static double bench_peak(bench_machine *m, int tasks, int dot, int runs) {
  bench_loop loop = bench_loop_of(dot);
  if (!loop.spin) return 0;
  return bench_rate(m, tasks, bench_loop_task, &loop, loop.flops * BENCH_TURNS, runs) * 1e-9;
}
static double bench_peak_kept_up(bench_machine *m, int dot, double seconds) {
  bench_loop loop = bench_loop_of(dot);
  if (!loop.spin) return 0;
  return bench_sustained(m, bench_loop_task, &loop, loop.flops * BENCH_TURNS, seconds) * 1e-9;
}

/* ----------------------------------------------------------------------------------------------------------- memory */

static const bench_reader bench_readers[] = {{1, 0},    {1, 4096}, {2, 0}, {2, 1024}, {2, 8192}, {4, 256},
                                             {4, 1024}, {4, 4096}, {8, 0}, {8, 256},  {8, 1024}, {8, 4096}};

typedef struct bench_read {
  const char *memory;
  int64_t bytes; /* of a task */
  bench_reader reader;
  volatile uint64_t sink[POOL_MAX];
} bench_read;

/* Bytes of a stream. Streams a power of two apart would get into each other's way, in caches and in memory. */
static int64_t bench_stream_bytes(const bench_read *read) {
  const int64_t whole = read->bytes / read->reader.streams;
  return (read->reader.streams > 1 ? whole - 37 * 4096 : whole) / BENCH_LINE * BENCH_LINE;
}

/* One word of every line: memory sends whole lines whichever word is asked for. */
static void bench_read_task(void *arg, int64_t index) {
  bench_read *read = (bench_read *)arg;
  const bench_reader r = read->reader;
  const int64_t stride = bench_stream_bytes(read);
  const char *begin = read->memory + index * read->bytes;
  uint64_t sum = 0;
  for (int64_t i = 0; i < stride; i += BENCH_LINE)
    for (int s = 0; s < r.streams; s++) {
      const char *line = begin + s * stride + i;
      uint64_t word;
      __builtin_prefetch(line + r.ahead, 0, 3);
      memcpy(&word, line, sizeof word);
      sum += word;
    }
  read->sink[index] = sum;
}

static double bench_read_rate(bench_machine *m, int tasks, bench_reader reader, int runs) {
  bench_read read = {.memory = m->memory, .bytes = m->bytes / tasks / BENCH_LINE * BENCH_LINE, .reader = reader};
  const double bytes = (double)(bench_stream_bytes(&read) * reader.streams);
  return bench_rate(m, tasks, bench_read_task, &read, bytes, runs) * 1e-9;
}

/* The way that reads fastest is kept. */
static double bench_read_peak(bench_machine *m, int tasks) {
  double best = 0;
  for (size_t i = 0; i < sizeof bench_readers / sizeof *bench_readers; i++) {
    const double rate = bench_read_rate(m, tasks, bench_readers[i], 1);
    if (rate > best) best = rate, m->reader = bench_readers[i];
  }
  const double again = bench_read_rate(m, tasks, m->reader, 4);
  return again > best ? again : best;
}

/* ---------------------------------------------------------------------------------------------------------- machine */

/* Four times the last-level cache where the system tells, 512 MiB at least, 4 GiB at most. */
static int64_t bench_memory_bytes(void) {
  const int64_t least = (int64_t)1 << 29, most = (int64_t)1 << 32;
  int64_t bytes = least;
#ifdef _SC_LEVEL3_CACHE_SIZE
  bytes = 4 * (int64_t)sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
  return bytes < least ? least : bytes > most ? most : bytes;
}

static void bench_machine_start(bench_machine *m, int threads) {
  pool_start(&m->threads, threads);
  m->bytes = bench_memory_bytes();
  m->reader = bench_readers[0];
  m->memory = (char *)bench_pages(m->bytes + BENCH_AHEAD_MAX);
  if (!m->memory) {
    fprintf(stderr, "moe_bench: not enough memory to measure its bandwidth (%lld bytes)\n", (long long)m->bytes);
    exit(1);
  }
}

static void *bench_allocate(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void bench_release(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }

static moe_context bench_context(bench_machine *m) {
  const moe_context ctx = {.parallel_for = pool_run,
                           .parallel_for_user = &m->threads,
                           .num_threads = m->threads.threads,
                           .allocate = bench_allocate,
                           .release = bench_release};
  return ctx;
}

static void bench_machine_stop(bench_machine *m) {
  pool_stop(&m->threads);
  free(m->memory);
}

static void bench_measure_arithmetic(bench_machine *m, int tasks, int runs, bench_limits *limits) {
  limits->fma = bench_peak(m, tasks, 0, runs);
  limits->dot = bench_peak(m, tasks, 1, runs);
}

/* The best that was seen. */
static bench_limits bench_measure_limits(bench_machine *m, int tasks) {
  bench_limits limits = {0};
  bench_measure_arithmetic(m, tasks, 32, &limits);
  limits.read = bench_read_peak(m, tasks);
  return limits;
}

/* Afterwards the caches hold nothing of a layer. Returns the rate at which memory was read meanwhile. */
static double bench_empty_caches(bench_machine *m) { return bench_read_rate(m, m->threads.threads, m->reader, 1); }

/* What the machine can do right now, and empty caches, unless they are to stay warm. */
static bench_limits bench_limits_now(bench_machine *m, int warm, bench_limits best) {
  bench_limits limits = best;
  if (!warm) limits.read = bench_empty_caches(m);
  bench_measure_arithmetic(m, m->threads.threads, 2, &limits);
  return limits;
}

#endif
