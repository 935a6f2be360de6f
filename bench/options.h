/* The command line. */
#ifndef MOE_BENCH_OPTIONS_H
#define MOE_BENCH_OPTIONS_H

enum { BENCH_OPS_MAX = 32 };

typedef struct bench_options {
  const bench_op *op[BENCH_OPS_MAX];
  int ops;
  const bench_dtype *dtype;
  const char *weights_name, *isa;
  const bench_weights *weights;
  bench_shape shape;
  int threads, repeats, warm, json, sweep, suite;
  double skew;
  int64_t B;
} bench_options;

/* Operations that are asked for by one word. */
static const struct {
  const char *name, *ops;
} bench_groups[] = {{"all", "fwd,bwd"}, {"convert", "quantize,dequantize"}};

static void bench_usage(FILE *out) {
  fputs(
      "usage: moe_bench [--op OP,..] [--dtype bf16|fp16|f32] [--weights TYPE] [--shape T,H,I,E,K] [--threads N]\n"
      "                 [--isa scalar|avx2|avx512|avx512bf16] [--skew S] [--block B] [--repeats N] [--warm] [--json]\n"
      "       moe_bench --sweep | --suite [the options above]\n"
      "OP: fwd, bwd, layer_fwd, layer_bwd (the same from top-k ids), dx (bwd without weight gradients),\n"
      "    decode (a forward of few tokens), route, quantize, dequantize, gemm, pack,\n"
      "    grouped, grouped_dx, grouped_dw (the first product from weights as they are stored, and its gradients),\n"
      "    mlp_fwd, mlp_bwd; all (fwd and bwd, the default), convert (quantize and dequantize)\n"
      "  --weights  how the experts' weights are stored: the dtype's own name, mxfp4, mxfp8, mxfp8_e5m2, fp8, "
      "fp8_block,\n"
      "             mxfp4_gpt_oss, mxfp4_ggml, mxfp4_x4, mxfp8_x4, mxfp6, mxint8, nvfp4, int8, int4,\n"
      "             uint4 (with zero points)\n"
      "  --threads  all processors by default\n"
      "  --skew     this share of the tokens has expert 0 among its K\n"
      "  --block    rows per block, 128 by default, fewer where there are fewer tokens\n"
      "  --repeats  runs per case; by default 5 and as many more as fit into a second\n"
      "  --warm     leave the caches as the run before left them\n"
      "  --json     one object per line and case\n"
      "  --sweep    time per flop over token and expert counts, of fwd unless --op says bwd\n"
      "  --suite    the layers of real models; writes moe_bench.svg, a roofline plot\n",
      out);
}

/* Ends the program: 2 is for a command line that cannot be followed. */
_Noreturn static void bench_refuse(const char *what, const char *why) {
  fprintf(stderr, "moe_bench: %s: %s\n", what, why);
  exit(2);
}

static void bench_parse_shape(bench_options *o, const char *text) {
  long long v[5];
  char more;
  if (sscanf(text, "%lld,%lld,%lld,%lld,%lld%c", &v[0], &v[1], &v[2], &v[3], &v[4], &more) != 5)
    bench_refuse(text, "a shape is five numbers, T,H,I,E,K");
  o->shape = (bench_shape){v[0], v[1], v[2], v[3], v[4]};
  for (int i = 0; i < 5; i++)
    if (v[i] < 1 || v[i] > INT32_MAX) bench_refuse(text, "every size is at least 1");
  if (v[4] > v[3]) bench_refuse(text, "K is at most E");
}

/* Names between commas, of operations or groups. */
static void bench_add_ops(bench_options *o, const char *names) {
  char name[32];
  for (int length; *names; names += length + (names[length] == ',')) {
    const char *group = NULL;
    length = (int)strcspn(names, ",");
    snprintf(name, sizeof name, "%.*s", length, names);
    for (size_t i = 0; i < sizeof bench_groups / sizeof *bench_groups; i++)
      if (strcmp(bench_groups[i].name, name) == 0) group = bench_groups[i].ops;
    const bench_op *op = bench_op_named(name);
    if (!op && !group) bench_refuse(name, "no such operation");
    if (o->ops + !group > BENCH_OPS_MAX) bench_refuse(names, "too many operations");
    if (group) bench_add_ops(o, group);
    else o->op[o->ops++] = op;
  }
}

static void bench_parse_ops(bench_options *o, const char *names) {
  o->ops = 0;
  bench_add_ops(o, names);
  if (o->ops == 0) bench_refuse(names, "no operation");
}

static void bench_parse_dtype(bench_options *o, const char *name) {
  o->dtype = bench_dtype_named(name);
  if (!o->dtype) bench_refuse(name, "no such dtype");
}

static int64_t bench_parse_count(const char *text, int64_t most) {
  char *end;
  const long long value = strtoll(text, &end, 10);
  if (end == text || *end || value < 1 || value > most) bench_refuse(text, "not a number in the option's range");
  return value;
}

static double bench_parse_share(const char *text) {
  char *end;
  const double value = strtod(text, &end);
  if (end == text || *end || !(value >= 0 && value <= 1)) bench_refuse(text, "not a number from 0 to 1");
  return value;
}

static int bench_processors(void) {
  long count = 1;
#ifdef _SC_NPROCESSORS_ONLN
  count = sysconf(_SC_NPROCESSORS_ONLN);
#endif
  return count < 1 ? 1 : count > POOL_MAX ? POOL_MAX : (int)count;
}

static void bench_parse_option(bench_options *o, int c, const char *value) {
  switch (c) {
    case 'o': bench_parse_ops(o, value); break;
    case 'd': bench_parse_dtype(o, value); break;
    case 'w': o->weights_name = value; break;
    case 's': bench_parse_shape(o, value); break;
    case 't': o->threads = (int)bench_parse_count(value, POOL_MAX); break;
    case 'i': o->isa = value; break;
    case 'k': o->skew = bench_parse_share(value); break;
    case 'b': o->B = bench_parse_count(value, INT32_MAX); break;
    case 'r': o->repeats = (int)bench_parse_count(value, BENCH_RUNS_MAX); break;
    case 'a': o->warm = 1; break;
    case 'j': o->json = 1; break;
    case 'p': o->sweep = 1; break;
    case 'u': o->suite = 1; break;
    case 'h': bench_usage(stdout); exit(0);
    default: bench_usage(stderr); exit(2);
  }
}

static bench_options bench_parse(int argc, char **argv) {
  static const struct option known[] = {
      {"op", 1, 0, 'o'},   {"dtype", 1, 0, 'd'}, {"weights", 1, 0, 'w'}, {"shape", 1, 0, 's'},   {"threads", 1, 0, 't'},
      {"isa", 1, 0, 'i'},  {"skew", 1, 0, 'k'},  {"block", 1, 0, 'b'},   {"repeats", 1, 0, 'r'}, {"warm", 0, 0, 'a'},
      {"json", 0, 0, 'j'}, {"sweep", 0, 0, 'p'}, {"suite", 0, 0, 'u'},   {"help", 0, 0, 'h'},    {0, 0, 0, 0}};
  bench_options o = {.shape = {1024, 2048, 768, 16, 4}, .threads = bench_processors()};
  bench_parse_ops(&o, "all");
  bench_parse_dtype(&o, "bf16");
  for (int c; (c = getopt_long(argc, argv, "", known, NULL)) != -1;) bench_parse_option(&o, c, optarg);
  if (optind != argc) bench_refuse(argv[optind], "not an option");
  o.weights = bench_weights_named(o.weights_name ? o.weights_name : o.dtype->name, o.dtype);
  if (!o.weights) bench_refuse(o.weights_name, "no such storage of weights");
  if (o.sweep && !(o.op[0]->parts & BENCH_EXPERTS)) bench_refuse(o.op[0]->name, "the sweep is of fwd or bwd");
  return o;
}

#endif
