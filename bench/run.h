/* Times one case and says how far from the machine's limit it is. */
#ifndef MOE_BENCH_RUN_H
#define MOE_BENCH_RUN_H

/* What all cases of one run share. */
typedef struct bench_setting {
  bench_machine machine;
  bench_limits limits; /* of all threads, the best seen */
  moe_context ctx;
  const bench_dtype *dtype;
  const bench_weights *weights;
  int64_t B;
  double skew;
  int repeats; /* 0: BENCH_RUNS and as many more as fit into BENCH_SECONDS */
  int warm, json;
} bench_setting;

typedef struct bench_result {
  const bench_op *op;
  bench_shape shape;
  double seconds, low, high; /* median, least, most */
  double flops, bytes;
  double limit;     /* seconds, the median */
  double share;     /* of the limit that was reached, the median */
  double tile, loop; /* share of the peak that the product tile kept up in cache right after, and the peak's own loop:
                        medians; both 0 where memory is the limit */
  double workspace; /* share of the tensors' bytes */
  double conversion; /* bytes per second at which quantised weights become operands in cache, or 0: not measured; */
  double converted;  /*   share of it that was reached; medians */
} bench_result;

enum { BENCH_RUNS = 5, BENCH_RUNS_MAX = 63 };
#define BENCH_SECONDS 1.0

static int bench_compare(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static int bench_peak_is_dot(const bench_setting *set, const bench_op *op, bench_limits l) {
  return op->dot && set->dtype->dtype == MOE_DTYPE_BF16 && l.dot > l.fma;
}

static double bench_peak_flops(const bench_setting *set, const bench_op *op, bench_limits l) {
  return bench_peak_is_dot(set, op, l) ? l.dot : l.fma;
}

/* The roofline: at best the arithmetic or the memory is busy all the time. */
static double bench_limit_seconds(const bench_setting *set, const bench_result *r, bench_limits l) {
  const double peak = bench_peak_flops(set, r->op, l), read = l.read;
  const double by_flops = peak > 0 ? r->flops / peak * 1e-9 : 0, by_bytes = read > 0 ? r->bytes / read * 1e-9 : 0;
  return by_flops > by_bytes ? by_flops : by_bytes;
}

/* What the tile keeps up of the peak that `limit` seconds stand for, and what the peak's own loop does; 0 where memory
   is the limit. */
static void bench_kept_up(bench_setting *set, const bench_result *r, double limit, double seconds, double *tile,
                          double *loop) {
  const double peak = bench_peak_flops(set, r->op, set->limits), share = 1e9 * limit / r->flops;
  *tile = *loop = 0;
  if (peak <= 0 || r->flops / peak < r->bytes / set->limits.read) return;
  *tile = bench_tile_rate(&set->machine, set->dtype->dtype, seconds) * share;
  *loop = bench_peak_kept_up(&set->machine, bench_peak_is_dot(set, r->op, set->limits), seconds) * share;
}

static double bench_median(double *x, int n) {
  qsort(x, (size_t)n, sizeof *x, bench_compare);
  return x[n / 2];
}

/* What the kernels' converting of codes allows, where a few tokens meet quantised weights: the same operation in every
   thread, each on one expert whose weights stay in its core's own cache. */
typedef struct bench_converter {
  moe_context ctx;
  bench_layer layer[POOL_MAX];
  moe_status (*run)(moe_context *ctx, const bench_layer *layer); /* NULL: does not apply */
  double bytes;                                                  /* of a thread's layer */
} bench_converter;

enum { BENCH_CONVERSIONS = 8 }; /* at a time */

static void bench_converter_start(bench_converter *c, const bench_setting *set, const bench_op *op, bench_shape shape) {
  enum { cached = 768 << 10 };
  c->run = NULL;
  if (!set->weights->name || strncmp(op->name, "decode", 6) != 0) return;
  const int64_t fit = cached * 8 / bench_weights_bits(&set->weights->as) / (3 * shape.H) / 128 * 128;
  shape.T = shape.E = shape.K = 1;
  shape.I = fit < 128 ? 128 : fit; /* whole lines of codes */
  c->ctx = set->ctx;
  c->ctx.parallel_for = NULL;
  for (int i = 0; i < set->machine.threads.threads; i++)
    c->layer[i] = bench_make(&c->ctx, shape, set->dtype, set->weights, set->B, 0, op->parts);
  c->run = op->run;
  c->bytes = op->bytes(&c->layer[0]);
}

static void bench_converter_stop(bench_converter *c, const bench_setting *set) {
  for (int i = 0; c->run && i < set->machine.threads.threads; i++) bench_free(&c->layer[i]);
}

static void bench_converter_task(void *arg, int64_t index) {
  bench_converter *c = (bench_converter *)arg;
  moe_context ctx = c->ctx;
  for (int i = 0; i < BENCH_CONVERSIONS; i++) bench_expect(&ctx, c->run(&ctx, &c->layer[index]));
}

/* Bytes per second right now: the best of a few, of which the first fills the caches. */
static double bench_converter_rate(bench_setting *set, bench_converter *c) {
  if (!c->run) return 0;
  return bench_rate(&set->machine, set->machine.threads.threads, bench_converter_task, c,
                    BENCH_CONVERSIONS * c->bytes, 4);
}

/* The roofline assumes that operands come from memory. Left warm, a layer smaller than the last-level cache would be
   read from there (which may be hundreds of megabytes, shared with strangers), as it never is between the other layers
   of a model. So every run finds empty caches, unless --warm asks otherwise. The first run is not counted.

   A machine's speed drifts, by a fifth and more where its cores are shared: every run is held against what the machine
   could do right before and after it. What the product tile makes of the peak in cache is told beside it, and what
   the peak's own loop does: the limit is the best of short readings, and others take time in between. */
static void bench_time(bench_setting *set, const bench_layer *layer, bench_converter *converter, bench_result *result) {
  double seconds[BENCH_RUNS_MAX], limit[BENCH_RUNS_MAX], share[BENCH_RUNS_MAX], total = 0;
  double tile[BENCH_RUNS_MAX], loop[BENCH_RUNS_MAX];
  double conversion[BENCH_RUNS_MAX], converted[BENCH_RUNS_MAX];
  int runs = 0;
  bench_limits after = {0};
  for (int i = -1; i < BENCH_RUNS_MAX; i++) {
    const double conversion_before = bench_converter_rate(set, converter);
    const bench_limits before = bench_limits_now(&set->machine, set->warm, set->limits);
    const double start = bench_now();
    bench_expect(&set->ctx, result->op->run(&set->ctx, layer));
    const double taken = bench_now() - start;
    after = before;
    bench_measure_arithmetic(&set->machine, set->machine.threads.threads, 2, &after);
    if (i < 0) continue;
    seconds[runs] = taken, total += taken;
    limit[runs] = 0.5 * (bench_limit_seconds(set, result, before) + bench_limit_seconds(set, result, after));
    share[runs] = limit[runs] / taken;
    bench_kept_up(set, result, limit[runs], 0.25 * fmin(taken, BENCH_SECONDS), tile + runs, loop + runs);
    conversion[runs] = 0.5 * (conversion_before + bench_converter_rate(set, converter));
    converted[runs] = conversion[runs] > 0 ? result->bytes / conversion[runs] / taken : 0;
    runs++;
    if (set->repeats > 0 ? runs >= set->repeats : runs >= BENCH_RUNS && total >= BENCH_SECONDS) break;
  }
  result->seconds = bench_median(seconds, runs), result->low = seconds[0], result->high = seconds[runs - 1];
  result->limit = bench_median(limit, runs), result->share = bench_median(share, runs);
  result->tile = bench_median(tile, runs), result->loop = bench_median(loop, runs);
  result->conversion = bench_median(conversion, runs), result->converted = bench_median(converted, runs);
}

static bench_result bench_case(bench_setting *set, const bench_op *op, bench_shape shape) {
  bench_layer layer = bench_make(&set->ctx, shape, set->dtype, set->weights, set->B, set->skew, op->parts);
  bench_result result = {.op = op, .shape = shape, .flops = op->flops(&layer), .bytes = op->bytes(&layer)};
  result.workspace = (double)layer.workspace_bytes / (double)layer.bytes;
  bench_converter converter;
  bench_converter_start(&converter, set, op, shape);
  bench_time(set, &layer, &converter, &result);
  bench_converter_stop(&converter, set);
  bench_free(&layer);
  return result;
}

static double bench_percent(const bench_result *r) { return 100 * r->share; }

static const char *bench_weights_name(const bench_setting *set) {
  return set->weights->name ? set->weights->name : set->dtype->name;
}

static void bench_print_json(const bench_setting *set, const bench_result *r) {
  const bench_shape s = r->shape;
  printf("{\"op\": \"%s\", \"dtype\": \"%s\", \"weights\": \"%s\", \"isa\": \"%s\", ", r->op->name, set->dtype->name,
         bench_weights_name(set), moe_isa_name(moe_isa_active()));
  printf("\"T\": %lld, \"H\": %lld, \"I\": %lld, \"E\": %lld, \"K\": %lld, \"threads\": %d, ", (long long)s.T,
         (long long)s.H, (long long)s.I, (long long)s.E, (long long)s.K, set->machine.threads.threads);
  printf(
      "\"seconds\": %.6g, \"gflops\": %.4g, \"gbytes\": %.4g, \"limit_seconds\": %.6g, \"percent_of_limit\": %.4g",
      r->seconds, r->flops / r->seconds * 1e-9, r->bytes / r->seconds * 1e-9, r->limit, bench_percent(r));
  if (r->tile > 0) printf(", \"tile_percent\": %.4g, \"loop_percent\": %.4g", 100 * r->tile, 100 * r->loop);
  if (r->conversion > 0)
    printf(", \"conversion_gbytes\": %.4g, \"percent_of_conversion\": %.4g", r->conversion * 1e-9, 100 * r->converted);
  printf("}\n");
}

static void bench_print_line(const bench_setting *set, const bench_result *r) {
  const bench_shape s = r->shape;
  printf("%-6s %-4s %s T=%lld H=%lld I=%lld E=%lld K=%lld: %.3f ms (%.3f .. %.3f), ", r->op->name, set->dtype->name,
         bench_weights_name(set), (long long)s.T, (long long)s.H, (long long)s.I, (long long)s.E, (long long)s.K,
         r->seconds * 1e3, r->low * 1e3, r->high * 1e3);
  if (r->flops > 0) printf("%.1f GFLOP/s, ", r->flops / r->seconds * 1e-9);
  printf("%.1f GB/s, %.1f %% of the limit", r->bytes / r->seconds * 1e-9, bench_percent(r));
  if (r->tile > 0)
    printf(" (the tile in cache: %.1f %%, the peak's own loop: %.1f %%)", 100 * r->tile, 100 * r->loop);
  if (r->conversion > 0)
    printf(", %.1f %% of what converting in cache allows (%.1f GB/s)", 100 * r->converted, r->conversion * 1e-9);
  if (r->workspace > 0) printf(", workspace %.1f %% of the tensors", 100 * r->workspace);
  printf("\n");
}

static void bench_print(const bench_setting *set, const bench_result *r) {
  if (set->json)
    bench_print_json(set, r);
  else
    bench_print_line(set, r);
  fflush(stdout);
}

/* Says on stderr what is running: on a terminal in one line, which bench_progress_end clears. */
static void bench_progress(int at, int of, const char *what, const char *of_what) {
  fprintf(stderr, isatty(STDERR_FILENO) ? "[%d/%d] %s, %s\033[K\r" : "[%d/%d] %s, %s\n", at, of, what, of_what);
}

static void bench_progress_end(void) {
  if (isatty(STDERR_FILENO)) fputs("\033[K", stderr);
}

static void bench_print_limits(FILE *out, int threads, bench_limits limits) {
  fprintf(out, "limits of %s, %d thread%s: fma %.1f GFLOP/s, ", moe_isa_name(moe_isa_active()), threads,
          threads > 1 ? "s" : "", limits.fma);
  if (limits.dot > 0) fprintf(out, "bf16 dot %.1f GFLOP/s, ", limits.dot);
  fprintf(out, "read %.1f GB/s\n", limits.read);
}

#endif
