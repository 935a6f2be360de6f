/* moe_bench: times the layer against this machine's own limits, measured in the same run.
     cc -O2 -I. bench/moe_bench.c -o moe_bench -lm && ./moe_bench
   A case's limit is its roofline time: max(flops / arithmetic peak, least bytes / read bandwidth). The peak for bf16 is the
   faster of dot products and fused multiply-adds, since both give the same bits. */
#define MOE_IMPLEMENTATION
#include "moe.h"

#include <getopt.h>
#include <stdio.h>

#include "../examples/pool.h"
#include "layer.h"
#include "limits.h"

typedef struct bench_options {
  const char *op, *dtype, *isa;
  bench_shape shape;
  int threads, json, repeats;
  double skew;
  int64_t B;
} bench_options;

static int compare_doubles(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

typedef struct bench_result {
  double seconds, low, high; /* median, minimum, maximum */
} bench_result;

static moe_status bench_once(moe_context *ctx, const char *op, bench_layer *layer) {
  if (strcmp(op, "bwd") == 0) return bench_backward(ctx, layer);
  if (strcmp(op, "route") == 0) return bench_route(ctx, layer);
  return bench_forward(ctx, layer, 0);
}

static bench_result bench_time(moe_context *ctx, const char *op, bench_layer *layer, int repeats) {
  double seconds[64];
  if (repeats > 64) repeats = 64;
  for (int i = -1; i < repeats; i++) { /* the first run warms up */
    const double start = bench_now();
    const moe_status status = bench_once(ctx, op, layer);
    if (status != MOE_OK) {
      fprintf(stderr, "moe_bench: %s: %s\n", moe_status_str(status), ctx->message);
      exit(1);
    }
    if (i >= 0) seconds[i] = bench_now() - start;
  }
  qsort(seconds, (size_t)repeats, sizeof *seconds, compare_doubles);
  const bench_result result = {seconds[repeats / 2], seconds[0], seconds[repeats - 1]};
  return result;
}

/* Flops of the products, and the bytes that must move: each weight of an expert in use once, activations, gradients. */
static double bench_flops(const char *op, bench_shape s) {
  const double forward = 6.0 * (double)s.T * (double)s.K * (double)s.H * (double)s.I;
  return strcmp(op, "route") == 0 ? 0 : strcmp(op, "bwd") == 0 ? 2 * forward : forward;
}

static double bench_bytes(const char *op, const bench_layer *layer) {
  const bench_shape s = layer->shape;
  int64_t used = 0;
  char *seen = (char *)calloc((size_t)s.E, 1);
  for (int64_t i = 0; i < s.T * s.K; i++) used += !seen[layer->index[i]], seen[layer->index[i]] = 1;
  free(seen);
  const double weights = 3.0 * (double)used * (double)s.H * (double)s.I * (double)layer->size;
  const double activations = 2.0 * (double)s.T * (double)s.H * (double)layer->size;
  const double gradients = 3.0 * (double)s.E * (double)s.H * (double)s.I * (double)layer->size;
  if (strcmp(op, "route") == 0) return (double)s.T * (double)(s.K * 8 + s.E * 4);
  return strcmp(op, "bwd") == 0 ? weights + gradients + 2 * activations : weights + activations;
}

static void bench_report(const bench_options *o, const bench_layer *layer, const bench_limits *limits, bench_result r) {
  const bench_shape s = layer->shape;
  const double flops = bench_flops(o->op, s), bytes = bench_bytes(o->op, layer);
  const double peak = layer->dtype == MOE_DTYPE_BF16 && limits->dot > limits->fma ? limits->dot : limits->fma;
  const double by_flops = peak > 0 ? flops / peak * 1e-9 : 0, by_bytes = limits->read > 0 ? bytes / limits->read * 1e-9 : 0;
  const double limit = by_flops > by_bytes ? by_flops : by_bytes;
  if (o->json) {
    printf("{\"op\": \"%s\", \"dtype\": \"%s\", \"weights\": \"%s\", \"isa\": \"%s\", \"T\": %lld, \"H\": %lld, \"I\": %lld, \"E\": %lld, \"K\": %lld, "
           "\"threads\": %d, \"seconds\": %.6g, \"gflops\": %.4g, \"gbytes\": %.4g, \"limit_seconds\": %.6g, \"percent_of_limit\": %.4g}\n",
           o->op, o->dtype, o->dtype, moe_isa_name(moe_isa_active()), (long long)s.T, (long long)s.H, (long long)s.I, (long long)s.E, (long long)s.K,
           o->threads, r.seconds, flops / r.seconds * 1e-9, bytes / r.seconds * 1e-9, limit, 100 * limit / r.seconds);
    return;
  }
  printf("%-5s %-4s T=%lld H=%lld I=%lld E=%lld K=%lld threads=%d: %.3f ms (%.3f .. %.3f), %.1f GFLOP/s, %.1f GB/s, %.1f %% of the limit", o->op, o->dtype,
         (long long)s.T, (long long)s.H, (long long)s.I, (long long)s.E, (long long)s.K, o->threads, r.seconds * 1e3, r.low * 1e3, r.high * 1e3,
         flops / r.seconds * 1e-9, bytes / r.seconds * 1e-9, 100 * limit / r.seconds);
  if (layer->dtype == MOE_DTYPE_BF16 && limits->dot > 0 && flops > 0) printf(" (%.1f %% of the bf16 dot limit)", 100 * flops / r.seconds * 1e-9 / limits->dot);
  printf(", workspace %.1f %% of the tensors\n", 100.0 * (double)layer->workspace_bytes / (double)layer->bytes);
}

static void usage(void) {
  fprintf(stderr, "usage: moe_bench [--op fwd|bwd|decode|route] [--dtype bf16|fp16|f32] [--shape T,H,I,E,K] [--threads N]\n"
                  "                 [--isa scalar|avx2|avx512|avx512bf16] [--skew S] [--block B] [--repeats N] [--json]\n");
  exit(2);
}

static bench_options parse(int argc, char **argv) {
  static const struct option known[] = {{"op", 1, 0, 'o'},    {"dtype", 1, 0, 'd'}, {"shape", 1, 0, 's'},   {"threads", 1, 0, 't'}, {"isa", 1, 0, 'i'},
                                        {"skew", 1, 0, 'k'},  {"block", 1, 0, 'b'}, {"repeats", 1, 0, 'r'}, {"json", 0, 0, 'j'},    {0, 0, 0, 0}};
  bench_options o = {.op = "all", .dtype = "bf16", .shape = {1024, 2048, 768, 16, 4}, .threads = 1, .repeats = 5, .B = 128};
  long long v[5];
  for (int c; (c = getopt_long(argc, argv, "", known, NULL)) != -1;) {
    switch (c) {
      case 'o': o.op = optarg; break;
      case 'd': o.dtype = optarg; break;
      case 's':
        if (sscanf(optarg, "%lld,%lld,%lld,%lld,%lld", &v[0], &v[1], &v[2], &v[3], &v[4]) != 5) usage();
        o.shape = (bench_shape){v[0], v[1], v[2], v[3], v[4]};
        break;
      case 't': o.threads = atoi(optarg); break;
      case 'i': o.isa = optarg; break;
      case 'k': o.skew = atof(optarg); break;
      case 'b': o.B = atoll(optarg); break;
      case 'r': o.repeats = atoi(optarg); break;
      case 'j': o.json = 1; break;
      default: usage();
    }
  }
  if (optind != argc || o.threads < 1 || o.repeats < 1 || o.B < 1 || o.shape.T < 1 || o.shape.H < 1 || o.shape.I < 1 || o.shape.E < 1 || o.shape.K < 1 ||
      o.shape.K > o.shape.E)
    usage();
  return o;
}

static moe_dtype bench_dtype(const char *name) {
#define BENCH_DTYPE(suffix, type, NAME) \
  if (strcmp(name, #suffix) == 0) return MOE_DTYPE_##NAME;
  MOE_DTYPE_LIST(BENCH_DTYPE)
  usage();
  return MOE_DTYPE_DEFAULT;
}

static void bench_limit_isa(const char *name) {
  for (int i = 0; i <= MOE_ISA_AVX512BF16; i++)
    if (strcmp(name, moe_isa_name((moe_isa)i)) == 0) {
      moe_isa_limit((moe_isa)i);
      if (moe_isa_active() != (moe_isa)i) fprintf(stderr, "moe_bench: this CPU lacks %s, using %s\n", name, moe_isa_name(moe_isa_active()));
      return;
    }
  usage();
}

static void bench_case(moe_context *ctx, const bench_options *o, const bench_limits *limits) {
  bench_layer layer = bench_make(ctx, o->shape, bench_dtype(o->dtype), o->B, o->skew, strcmp(o->op, "bwd") == 0);
  if (bench_route(ctx, &layer) != MOE_OK || (layer.checkpoint && bench_forward(ctx, &layer, 1) != MOE_OK)) {
    fprintf(stderr, "moe_bench: %s\n", ctx->message);
    exit(1);
  }
  bench_report(o, &layer, limits, bench_time(ctx, o->op, &layer, o->repeats));
  bench_free(&layer);
}

static void *bench_allocate(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void bench_release(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }

int main(int argc, char **argv) {
  bench_options o = parse(argc, argv);
  pool threads;
  if (o.isa) bench_limit_isa(o.isa);
  pool_start(&threads, o.threads);
  moe_context ctx = {.parallel_for = pool_run, .parallel_for_user = &threads, .num_threads = o.threads, .allocate = bench_allocate, .release = bench_release};
  const bench_limits limits = bench_measure_limits(&threads);
  if (!o.json)
    printf("%s, %d thread(s). Limits: fma %.1f GFLOP/s, bf16 dot %.1f GFLOP/s, read %.1f GB/s\n", moe_isa_name(moe_isa_active()), o.threads, limits.fma,
           limits.dot, limits.read);
  const char *all[] = {"fwd", "bwd"};
  if (strcmp(o.op, "all") != 0) all[0] = o.op;
  if (strcmp(all[0], "fwd") != 0 && strcmp(all[0], "bwd") != 0 && strcmp(all[0], "decode") != 0 && strcmp(all[0], "route") != 0) usage();
  for (int i = 0; i < (strcmp(o.op, "all") == 0 ? 2 : 1); i++) {
    bench_options one = o;
    one.op = all[i];
    bench_case(&ctx, &one, &limits);
  }
  pool_stop(&threads);
  return 0;
}
