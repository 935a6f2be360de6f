/* bits_hash: one 64-bit hash per (operation, dtype) over the results of random problems: router, losses, route_blocks,
   forward, backward and its router part, conversions and activations. Whatever the compiler, its flags, the instruction
   set, the number of threads and the byte order, the lines printed must be the same. Needs libc and libm only.

     bits_hash [--isa NAME] [--threads N] [--schedule N] [--large] [--more] [--probe]

   --more: of newer operations and options instead, a file of tests/support/hash_*.h each.
   --threads N with N > 1 hands the work out in a random order, to real threads where it is compiled with
   BITS_HASH_THREADS, to OpenMP's where it is compiled with -fopenmp. Exit code 77: this CPU lacks the ISA;
   --probe only asks that. */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE 1 /* mmap, with -std=c11 */
#endif
#ifndef BITS_HASH_THREADS
#define MOE_TEST_NO_THREADS
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/dtype.h"
#include "support/pool.h"
#include "support/problem.h"

struct settings {
  moe_context ctx;
  struct test_pool pool;
  int large;
};

static void fail(const char *what, const moe_context *ctx) {
  fprintf(stderr, "bits_hash: %s: %s %s\n", what, moe_status_str(ctx->status), ctx->message);
  exit(1);
}

/* Those of the plain output; the others are hashed by --more. */
enum { ACTIVATIONS = MOE_ACT_IDENTITY + 1 };

/* Adds the results of one problem to the hashes, one per operation. */
static void add_problem(struct settings *set, const struct problem_options *o, uint64_t *hash) {
  struct problem p;
  char text[400];
  if (!problem_open(&p, o, NULL, NULL)) exit(1);
  for (int op = 0; op < PROBLEM_OP_COUNT; op++) {
    if (problem_run(&p, &set->ctx, (enum problem_op)op) != MOE_OK) {
      problem_describe(&p, &set->ctx, text, sizeof text);
      fprintf(stderr, "bits_hash: repro: op=%s %s\n", problem_op_name((enum problem_op)op), text);
      fail("failed", &set->ctx);
    }
    hash[op] = problem_hash(&p, hash[op], (enum problem_op)op);
  }
  problem_close(&p, NULL, NULL);
}

/* Every activation with every affinity mode, the rest random; with --large also long shapes. */
static void hash_layers(struct settings *set, moe_dtype dtype) {
  uint64_t hash[PROBLEM_OP_COUNT] = {0};
  uint64_t seed = 1;
  for (int i = 0; i < 4 * ACTIVATIONS * PROBLEM_AFFINITY_MODES; i++) {
    struct problem_options o = problem_options_random(seed++, dtype);
    o.layer.activation = (moe_activation)(i % ACTIVATIONS);
    problem_affinity_mode(&o, i / ACTIVATIONS % PROBLEM_AFFINITY_MODES);
    problem_options_settle(&o);
    add_problem(set, &o, hash);
  }
  for (int kind = 0; kind < (set->large ? PROBLEM_LONG_SHAPES : 0); kind++) {
    struct problem_options o = problem_options_long(seed++, dtype, kind);
    o.nan_row = 0; /* one NaN would spread over all weight gradients and hide the rest */
    add_problem(set, &o, hash);
  }
  for (int op = 0; op < PROBLEM_OP_COUNT; op++)
    printf("%-16s %s %016llx\n", problem_op_name((enum problem_op)op), problem_dtype_name(dtype),
           (unsigned long long)hash[op]);
}

enum { ARRAY = 40001, RULES = MOE_SCALE_COUNT_ };

/* Floats of every exponent, special values included, as bits. */
static float *random_floats(void) {
  static float x[ARRAY];
  uint64_t seed = 7;
  for (int i = 0; i < ARRAY; i++) {
    uint32_t bits = (uint32_t)(test_random(&seed) >> 20);
    if (i % 3 == 0) bits = (bits & 0x80ffffffu) | 0x3b000000u | (bits >> 3 & 0x07000000u); /* 2^-9 to 2^7 */
    memcpy(&x[i], &bits, sizeof bits);
  }
  return x;
}

static void hash_arrays(struct settings *set) {
  static float y[ARRAY], dy[ARRAY];
  static uint16_t half[ARRAY];
  const float *x = random_floats();
  moe_context *ctx = &set->ctx;
  uint64_t h = 0;
  if (moe_bf16_from_f32(ctx, half, x, ARRAY) != MOE_OK) fail("moe_bf16_from_f32", ctx);
  h = problem_hash_bytes(h, half, ARRAY, 2);
  if (moe_bf16_to_f32(ctx, y, half, ARRAY) != MOE_OK) fail("moe_bf16_to_f32", ctx);
  printf("convert          bf16 %016llx\n", (unsigned long long)problem_hash_bytes(h, y, ARRAY, 4));
  if (moe_fp16_from_f32(ctx, half, x, ARRAY) != MOE_OK) fail("moe_fp16_from_f32", ctx);
  h = problem_hash_bytes(0, half, ARRAY, 2);
  if (moe_fp16_to_f32(ctx, y, half, ARRAY) != MOE_OK) fail("moe_fp16_to_f32", ctx);
  printf("convert          fp16 %016llx\n", (unsigned long long)problem_hash_bytes(h, y, ARRAY, 4));
  if (moe_f32_from_f32(ctx, y, x, ARRAY) != MOE_OK) fail("moe_f32_from_f32", ctx);
  printf("convert          f32 %016llx\n", (unsigned long long)problem_hash_bytes(0, y, ARRAY, 4));
  for (int activation = 0; activation < ACTIVATIONS; activation++) {
    if (moe_activation_f32(ctx, (moe_activation)activation, 0.0f, x, y, dy, ARRAY) != MOE_OK)
      fail("moe_activation_f32", ctx);
    h = problem_hash_bytes(problem_hash_bytes(0, y, ARRAY, 4), dy, ARRAY, 4);
    printf("activation %d     f32 %016llx\n", activation, (unsigned long long)h);
  }
}

/* Quantised and back: every element with every rule, cast and orientation; and elements by themselves. */
static void hash_mx(struct settings *set) {
  static float y[ARRAY];
  static uint8_t codes[ARRAY], scales[ARRAY];
  const float *x = random_floats();
  moe_context *ctx = &set->ctx;
  for (int element = 0; element <= MOE_ELEMENT_E2M1; element++) {
    uint64_t h = 0;
    for (int i = 0; i < RULES * 4 * 2; i++) {
      const moe_quantize_mx_args q = {.element = (moe_element)element,
                                      .scale_rule = (moe_scale_rule)(i % RULES),
                                      .cast = (uint32_t)(i / RULES % 4),
                                      .rows = 121,
                                      .columns = 330,
                                      .transposed = i / (RULES * 4),
                                      .plain = x,
                                      .codes = codes,
                                      .scales = scales};
      const moe_dequantize_mx_args d = {.element = q.element,
                                        .rows = q.rows,
                                        .columns = q.columns,
                                        .transposed = q.transposed,
                                        .codes = codes,
                                        .scales = scales,
                                        .plain = y};
      memset(codes, 0, sizeof codes);
      memset(scales, 0, sizeof scales);
      if (moe_quantize_mx(ctx, &q) != MOE_OK) fail("moe_quantize_mx", ctx);
      h = problem_hash_bytes(problem_hash_bytes(h, codes, ARRAY, 1), scales, ARRAY, 1);
      if (moe_dequantize_mx(ctx, &d) != MOE_OK) fail("moe_dequantize_mx", ctx);
      h = problem_hash_bytes(h, y, q.rows * q.columns, 4);
    }
    printf("mx %d             f32 %016llx\n", element, (unsigned long long)h);
  }
#define HASH_ELEMENT(name, NAME, bits, fraction, bias, max, infinity, nan)                      \
  for (uint32_t cast = 0; cast < 4 && MOE_ELEMENT_##NAME <= MOE_ELEMENT_E2M1; cast++) {         \
    memset(codes, 0, sizeof codes);                                                             \
    if (moe_##name##_from_f32(ctx, codes, x, ARRAY, cast) != MOE_OK) fail("from_f32", ctx);     \
    if (moe_##name##_to_f32(ctx, y, codes, ARRAY) != MOE_OK) fail("to_f32", ctx);               \
    const uint64_t h = problem_hash_bytes(problem_hash_bytes(0, codes, ARRAY, 1), y, ARRAY, 4); \
    printf("element %d        " #name " %016llx\n", (int)cast, (unsigned long long)h);          \
  }
  MOE_ELEMENT_LIST(HASH_ELEMENT)
#undef HASH_ELEMENT
}

/* Random numbers of a quantised weight [E,K,parts,columns], as codes: words where the layout has words. */
static void make_codes(moe_quantized_weight *w, int words, uint8_t *codes, uint8_t *scales, int64_t count,
                       uint64_t *seed) {
  const uint32_t keep = w->element == MOE_ELEMENT_E2M1 ? 0xffffffffu : 0xbfbfbfbfu; /* no NaN */
  float scale[2048];
  for (int64_t i = 0; i < count; i += 4) {
    const uint32_t word = (uint32_t)(test_random(seed) >> 17) & keep;
    if (words) memcpy(codes + i, &word, 4); /* 8-bit elements: words are numbers, in this machine's order */
    else
      for (int j = 0; j < 4; j++) codes[i + j] = (uint8_t)(word >> 8 * j);
  }
  for (int64_t i = 0; i < 8192; i++) scales[i] = (uint8_t)test_random_range(seed, 118, 126);
  for (int i = 0; i < 2048; i++) scale[i] = (float)test_random_range(seed, 1, 9) * 0x1p-5f;
  if (w->scaling != MOE_WEIGHT_MX) memcpy(scales, scale, sizeof scale);
  w->codes = codes, w->scales = scales;
}

/* Forward and backward from quantised weights and, where codes are bytes, hidden states; some with operands rounded to
   MX. */
static void hash_quantized(struct settings *set, moe_dtype dtype) {
  static const moe_quantized_weight storage[] = {
      {.element = MOE_ELEMENT_E2M1},
      {.element = MOE_ELEMENT_E4M3FN},
      {.element = MOE_ELEMENT_E2M1, .layout = MOE_MX_LAYOUT_GPT_OSS},
      {.element = MOE_ELEMENT_E5M2, .layout = MOE_MX_LAYOUT_NKI_1X32},
      {.element = MOE_ELEMENT_E4M3, .layout = MOE_MX_LAYOUT_NKI_WRAPX},
      {.element = MOE_ELEMENT_E4M3FN, .scaling = MOE_WEIGHT_COLUMN_PER_EXPERT},
      {.element = MOE_ELEMENT_E5M2, .scaling = MOE_WEIGHT_BLOCK, .block = 32}};
  static uint8_t codes[2][1 << 16], scales[2][8192];
  enum { STORAGES = sizeof storage / sizeof *storage };
  for (int i = 0; i < STORAGES; i++) {
    struct problem_options o = problem_options_random(4000 + (uint64_t)i, dtype);
    struct problem p;
    moe_quantized_weight w[2] = {storage[i], storage[i]};
    uint64_t hash = 0, seed = (uint64_t)i;
    o.T = 20, o.H = 64, o.I = 96, o.E = 3, o.K = 2, o.B = 8, o.nan_row = o.tiny_rows = o.empty_expert = 0;
    o.mx.gradients.enabled = o.mx.activations.enabled = o.mx.weights.enabled = o.mx.weight_grads = i & 1;
    problem_options_settle(&o);
    if (!problem_open(&p, &o, NULL, NULL)) exit(1);
    const int words = storage[i].layout == MOE_MX_LAYOUT_NKI_1X32 || storage[i].layout == MOE_MX_LAYOUT_NKI_WRAPX;
    for (int j = 0; j < 2; j++) make_codes(&w[j], words, codes[j], scales[j], 1 << 16, &seed);
    const moe_quantized_activation x = {.element = storage[i].element,
                                        .float_scales = storage[i].scaling != MOE_WEIGHT_MX,
                                        .block_rows = 1,
                                        .codes = codes[1],
                                        .scales = scales[1]};
    for (int op = 0; op <= PROBLEM_BACKWARD; op++) {
      struct problem_args args;
      size_t bytes = 0;
      problem_make_args(&p, &args);
      args.forward.layer.quantized_gate_up_proj_weight = args.backward.layer.quantized_gate_up_proj_weight = &w[0];
      args.forward.layer.quantized_down_proj_weight = args.backward.layer.quantized_down_proj_weight = &w[1];
      if (!words) args.forward.layer.quantized_hidden_states = args.backward.layer.quantized_hidden_states = &x;
      if (problem_workspace_size((enum problem_op)op, &set->ctx, &args, &bytes) != MOE_OK) fail("quantized", &set->ctx);
      void *workspace = malloc(bytes + 1);
      problem_set_workspace((enum problem_op)op, &args, workspace, bytes);
      if (problem_call((enum problem_op)op, &set->ctx, &args) != MOE_OK) fail("quantized", &set->ctx);
      free(workspace);
      hash = problem_hash(&p, hash, (enum problem_op)op);
    }
    printf("quantized %d      %s %016llx\n", i, problem_dtype_name(dtype), (unsigned long long)hash);
    problem_close(&p, NULL, NULL);
  }
}

#include "support/hash_moe_layer.h"
#include "support/hash_layer_parts.h"
#include "support/hash_formats.h"
#include "support/hash_options.h"
#include "support/hash_router.h"
#include "support/hash_grouped.h"
#include "support/hash_mlp.h"
#include "support/hash_groups.h"

static int limit_isa(const char *name) {
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    if (strcmp(name, moe_isa_name((moe_isa)isa)) == 0)
      return moe_isa_supported((moe_isa)isa) && moe_isa_limit((moe_isa)isa) == MOE_OK;
  return 0;
}

int main(int argc, char **argv) {
  struct settings set = {.pool = {.seed = 99}};
  int more = 0;
  for (int i = 1; i < argc; i++) {
    const char *value = i + 1 < argc ? argv[i + 1] : "";
    if (strcmp(argv[i], "--large") == 0) {
      set.large = 1;
      continue;
    }
    if (strcmp(argv[i], "--more") == 0) {
      more = 1;
      continue;
    }
    if (strcmp(argv[i], "--probe") == 0) return 0;
    if (strcmp(argv[i], "--isa") == 0) {
      if (!limit_isa(value)) return 77;
    } else if (strcmp(argv[i], "--threads") == 0) {
      set.ctx.num_threads = (int32_t)strtol(value, NULL, 10);
    } else if (strcmp(argv[i], "--schedule") == 0) {
      set.ctx.schedule = (moe_schedule)strtol(value, NULL, 10);
    } else {
      fprintf(stderr, "usage: bits_hash [--isa NAME] [--threads N] [--schedule 0|1|2] [--large] [--more] [--probe]\n");
      return 2;
    }
    i++;
  }
#ifndef _OPENMP
#ifdef BITS_HASH_THREADS
  set.ctx.parallel_for = test_pool_parallel_for;
#else
  set.ctx.parallel_for = test_serial_parallel_for;
#endif
  set.ctx.parallel_for_user = &set.pool;
#endif
  if (more) {
    hash_formats(&set);
    hash_groups(&set);
    hash_mlp(&set);
    for (int dtype = MOE_DTYPE_F32; dtype <= TEST_DTYPES; dtype++) {
      hash_options(&set, (moe_dtype)dtype);
      hash_router(&set, (moe_dtype)dtype);
      hash_moe_layer(&set, (moe_dtype)dtype);
      hash_layer_parts(&set, (moe_dtype)dtype);
      hash_grouped(&set, (moe_dtype)dtype);
      hash_groups_layer(&set, (moe_dtype)dtype);
    }
    return 0;
  }
  hash_arrays(&set);
  hash_mx(&set);
  for (int dtype = MOE_DTYPE_F32; dtype <= TEST_DTYPES; dtype++) hash_layers(&set, (moe_dtype)dtype);
  for (int dtype = MOE_DTYPE_F32; dtype <= TEST_DTYPES; dtype++) hash_quantized(&set, (moe_dtype)dtype);
  return 0;
}
