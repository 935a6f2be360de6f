/* Grouped products, and weights packed ahead of time. Integers small enough that every sum is exact, int64 as the
   oracle: forward, dx and dw, all permutations, types, instruction sets and thread counts, prepacked or not; then
   prepacked weights through the whole blockwise layer, to the bit, on random data. */
#include "support/test.h"

#include "support/cases.h"
#include "support/fill.h"
#include "support/grouped.h"
#include "support/pack.h"
#include "support/pool.h"

typedef struct grouped {
  uint64_t seed;
  moe_dtype dtype;
  int isa, threads;
  moe_grouped_gemm_args args;
  int64_t total;
  test_tensor x, w, dy, y, dx, dw, start;
  int32_t *sizes, *gather;
  float *weights;
} grouped;

static void fail_at(const grouped *g, const char *what, int64_t i) {
  fail_msg(
      "%s[%lld] | seed 0x%llx dtype %s isa %s threads %d tokens %lld topk %lld E %lld N %lld K %lld permute x %d y %d",
      what, (long long)i, (unsigned long long)g->seed, test_dtype_name(g->dtype), moe_isa_name((moe_isa)g->isa),
      g->threads, (long long)g->args.num_tokens, (long long)g->args.topk, (long long)g->args.E, (long long)g->args.N,
      (long long)g->args.K, g->args.permute_x, g->args.permute_y);
}

/* ------------------------------------------------------------------------------------------------------------ cases */

static void grouped_routing(grouped *g, uint64_t *rng) {
  const int64_t E = g->args.E;
  g->sizes = (int32_t *)calloc((size_t)E, sizeof *g->sizes);
  g->gather = (int32_t *)malloc((size_t)g->total * sizeof *g->gather);
  g->weights = (float *)malloc((size_t)g->total * sizeof *g->weights);
  const int64_t placed = test_with(rng, 0.3) ? test_random_range(rng, 0, g->total) : g->total;
  for (int64_t i = 0; i < placed; ++i) g->sizes[test_random_range(rng, 0, E - 1)]++;
  for (int64_t i = 0; i < g->total; ++i)
    g->gather[i] = (int32_t)i, g->weights[i] = (float)test_random_range(rng, -2, 2);
  for (int64_t i = g->total - 1; i > 0; --i) {
    const int64_t j = test_random_range(rng, 0, i);
    const int32_t swap = g->gather[i];
    g->gather[i] = g->gather[j], g->gather[j] = swap;
  }
}

static void grouped_random_shape(moe_grouped_gemm_args *a, uint64_t *rng) {
  a->num_tokens = test_random_range(rng, 1, 40), a->topk = test_random_range(rng, 1, 4),
  a->E = test_random_range(rng, 1, 6);
  a->N = test_random_range(rng, 1, 140), a->K = test_random_range(rng, 1, 300);
}

/* Of a random shape, unless `rows` says how many rows one expert has: then its columns are whole panels. */
static grouped grouped_of(uint64_t seed, moe_dtype dtype, int64_t rows) {
  grouped g = {.seed = seed, .dtype = dtype};
  uint64_t rng = seed;
  moe_grouped_gemm_args *a = &g.args;
  grouped_random_shape(a, &rng);
  if (rows > 0) a->num_tokens = rows, a->topk = a->E = 1, a->N = 66, a->K = 128;
  a->permute_x = test_with(&rng, 0.4), a->permute_y = !a->permute_x && test_with(&rng, 0.5);
  a->accumulate = test_with(&rng, 0.3) ? MOE_ACCUMULATE_DW : 0;
  a->weight_grad_dtype = test_with(&rng, 0.5) ? MOE_DTYPE_F32 : MOE_DTYPE_DEFAULT;
  g.total = a->num_tokens * a->topk;
  grouped_routing(&g, &rng);
  g.x = test_tensor_new(dtype, (a->permute_x ? a->num_tokens : g.total) * a->K),
  g.w = test_tensor_new(dtype, a->E * a->N * a->K);
  g.dy = test_tensor_new(dtype, g.total * a->N), g.y = test_tensor_new(dtype, g.total * a->N),
  g.dx = test_tensor_new(dtype, g.total * a->K);
  g.dw = test_tensor_new(a->weight_grad_dtype ? a->weight_grad_dtype : dtype, a->E * a->N * a->K),
  g.start = test_tensor_new(g.dw.dtype, g.dw.count);
  test_fill_integers(&g.x, &rng, 0.5, 4), test_fill_integers(&g.w, &rng, 0.5, 4),
      test_fill_integers(&g.dy, &rng, 0.5, 4);
  test_fill_integers(&g.start, &rng, 0.5, 8);
  a->m_sizes = g.sizes, a->gather_indices = g.gather, a->X = g.x.data, a->W = g.w.data, a->dY = g.dy.data;
  a->Y = g.y.data, a->dX = g.dx.data, a->dW = g.dw.data,
  a->topk_weights = a->permute_y && test_with(&rng, 0.5) ? g.weights : NULL;
  return g;
}

static grouped grouped_new(uint64_t seed, moe_dtype dtype) { return grouped_of(seed, dtype, 0); }

static void grouped_free(grouped *g) {
  test_tensor *all[] = {&g->x, &g->w, &g->dy, &g->y, &g->dx, &g->dw, &g->start};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) test_tensor_free(all[i]);
  free(g->sizes), free(g->gather), free(g->weights);
}

/* ----------------------------------------------------------------------------------------------------------- oracle */

static int64_t integer_at(const test_tensor *tensor, int64_t i) { return (int64_t)test_tensor_get(tensor, i); }

/* The expert of a sorted position, E for none. */
static int64_t expert_of(const grouped *g, int64_t pos) {
  for (int64_t e = 0, end = 0; e < g->args.E; ++e)
    if (pos < (end += g->sizes[e])) return e;
  return g->args.E;
}
static int64_t x_row(const grouped *g, int64_t pos) { return g->args.permute_x ? g->gather[pos] / g->args.topk : pos; }
static int64_t y_row(const grouped *g, int64_t pos) { return g->args.permute_y ? g->gather[pos] : pos; }
static int64_t weight_of(const grouped *g, int64_t pos) {
  return g->args.topk_weights ? (int64_t)g->weights[y_row(g, pos)] : 1;
}
static int64_t dx_row(const grouped *g, int64_t pos) { return g->args.permute_x ? g->gather[pos] : pos; }

static void expect(const grouped *g, const char *what, const test_tensor *got, int64_t i, int64_t want) {
  if (test_tensor_get(got, i) != test_dtype_round(got->dtype, (double)want)) fail_at(g, what, i);
}

static void check_rows(const grouped *g) {
  const int64_t N = g->args.N, K = g->args.K;
  for (int64_t pos = 0; pos < g->total; ++pos) {
    const int64_t e = expert_of(g, pos), none = e == g->args.E;
    for (int64_t n = 0; n < N; ++n) {
      int64_t sum = 0;
      for (int64_t k = 0; k < K && !none; ++k)
        sum += integer_at(&g->x, x_row(g, pos) * K + k) * integer_at(&g->w, (e * N + n) * K + k);
      expect(g, "Y", &g->y, y_row(g, pos) * N + n, sum * weight_of(g, pos));
    }
    for (int64_t k = 0; k < K; ++k) {
      int64_t sum = 0;
      for (int64_t n = 0; n < N && !none; ++n)
        sum += integer_at(&g->dy, y_row(g, pos) * N + n) * integer_at(&g->w, (e * N + n) * K + k);
      expect(g, "dX", &g->dx, dx_row(g, pos) * K + k, sum * weight_of(g, pos));
    }
  }
}

static void check_weights(const grouped *g) {
  const int64_t N = g->args.N, K = g->args.K;
  int64_t *sum = (int64_t *)calloc((size_t)g->dw.count, sizeof *sum);
  for (int64_t i = 0; i < g->dw.count && g->args.accumulate; ++i) sum[i] = integer_at(&g->start, i);
  for (int64_t pos = 0; pos < g->total; ++pos) {
    const int64_t e = expert_of(g, pos);
    for (int64_t i = 0; i < N * K && e < g->args.E; ++i)
      sum[e * N * K + i] += weight_of(g, pos) * integer_at(&g->dy, y_row(g, pos) * N + i / K) *
                            integer_at(&g->x, x_row(g, pos) * K + i % K);
  }
  for (int64_t i = 0; i < g->dw.count; ++i) expect(g, "dW", &g->dw, i, sum[i]);
  free(sum);
}

/* ------------------------------------------------------------------------------------------------------------ calls */

static void check_case(grouped *g) {
  struct test_pool pool = {.seed = g->seed};
  moe_context ctx = {.parallel_for = test_pool_parallel_for,
                     .parallel_for_user = &pool,
                     .num_threads = g->threads,
                     .allocate = test_allocate,
                     .release = test_release};
  test_tensor_copy(&g->dw, &g->start);
  for (int op = 0; op < 3; ++op)
    if (grouped_call[g->dtype][op](&ctx, &g->args) != MOE_OK) fail_at(g, ctx.message, op);
  check_rows(g);
  check_weights(g);
  moe_pack_weights_args packing = {
      .layout = MOE_PACK_GROUPED, .E = g->args.E, .rows = g->args.N, .columns = g->args.K, .weight = g->w.data};
  if (test_pack_new(&ctx, g->dtype, &packing) != MOE_OK) fail_at(g, ctx.message, 0);
  moe_grouped_gemm_args packed = g->args;
  packed.W = NULL, packed.packed_W = packing.packed, packed.packed_W_bytes = packing.packed_bytes;
  memset(g->y.data, 0x5a, test_tensor_bytes(&g->y));
  if (grouped_call[g->dtype][0](&ctx, &packed) != MOE_OK) fail_at(g, ctx.message, 3);
  check_rows(g);
  free(packing.packed);
}

static void test_grouped_exact(void **state) {
  (void)state;
  const uint64_t seed = test_seed(1);
  static const int threads[] = {1, 2, 3, 8};
  int64_t cases = 0;
  for (int64_t n = 0; n < test_cases(45, 9); ++n) {
    grouped g = grouped_new(test_case_seed(seed, (uint64_t)n), test_dtype_number(n));
    for (g.isa = 0; g.isa < TEST_ISA_COUNT; ++g.isa)
      for (size_t i = 0; test_use_isa(g.isa) && i < sizeof threads / sizeof *threads; ++i, ++cases) {
        g.threads = threads[i];
        check_case(&g);
      }
    grouped_free(&g);
  }
  test_use_best_isa();
  print_message("%d cases\n", (int)cases);
}

/* Plain weights stream past a few rows, and are packed by the first tile of more: on both sides of either bound. */
static void test_row_counts(void **state) {
  (void)state;
  static const int64_t rows[] = {5, 6, 7, 10, 11, 12, 13, 15, 16, 20, 21, 24, 25, 33};
  for (size_t n = 0; n < sizeof rows / sizeof *rows; ++n)
    for (int dtype = MOE_DTYPE_F32; dtype <= TEST_DTYPES; ++dtype) {
      grouped g = grouped_of(test_case_seed(test_seed(1), n), (moe_dtype)dtype, rows[n]);
      for (g.isa = 0, g.threads = 1; g.isa < TEST_ISA_COUNT; ++g.isa)
        if (test_use_isa(g.isa)) check_case(&g);
      grouped_free(&g);
    }
  test_use_best_isa();
}

/* A blob for another shape, type, layout or instruction set is refused, and so is a truncated one. */
static void test_packed_checks(void **state) {
  (void)state;
  grouped g = grouped_new(test_seed(1), MOE_DTYPE_BF16);
  moe_context ctx = {.allocate = test_allocate, .release = test_release};
  moe_pack_weights_args packing = {
      .layout = MOE_PACK_GROUPED, .E = g.args.E, .rows = g.args.N, .columns = g.args.K, .weight = g.w.data};
  assert_int_equal(test_pack_new(&ctx, MOE_DTYPE_BF16, &packing), MOE_OK);
  moe_grouped_gemm_args a = g.args;
  a.W = NULL, a.packed_W = packing.packed, a.packed_W_bytes = packing.packed_bytes - 1;
  assert_int_equal(moe_grouped_gemm_bf16(&ctx, &a), MOE_ERROR_INVALID_SHAPE);
  assert_non_null(strstr(ctx.message, "packed_W"));
  a.packed_W_bytes = packing.packed_bytes;
  assert_int_equal(moe_grouped_gemm_fp16(&ctx, &a), MOE_ERROR_INVALID_SHAPE);
  if (moe_isa_supported(MOE_ISA_AVX512BF16)) {
    size_t floats;
    assert_int_equal(moe_isa_limit(MOE_ISA_AVX512), MOE_OK);
    assert_int_equal(moe_pack_weights_bf16_size(&ctx, &packing, &floats), MOE_OK);
    if (floats != packing.packed_bytes) /* not with MOE_PREFER_FMA */
      assert_int_equal(moe_grouped_gemm_bf16(&ctx, &a), MOE_ERROR_UNSUPPORTED);
    test_use_best_isa();
  }
  ((uint32_t *)packing.packed)[1] = MOE_PACK_DOWN;
  assert_int_equal(moe_grouped_gemm_bf16(&ctx, &a), MOE_ERROR_INVALID_SHAPE);
  free(packing.packed);
  grouped_free(&g);
}

/* -------------------------------------------------------------------------------------------------- bad arguments */

enum { BAD_ARGUMENTS = 22 };

/* Spoils one thing; returns the status that must follow and what the message must name. */
static moe_status spoil(int which, moe_grouped_gemm_args *a, int32_t *sizes, int32_t *gather, const char **name) {
  switch (which) {
    case 0: return a->num_tokens = -1, *name = "num_tokens", MOE_ERROR_INVALID_SHAPE;
    case 1: return a->topk = -1, *name = "topk", MOE_ERROR_INVALID_SHAPE;
    case 2: return a->E = 0, *name = "E", MOE_ERROR_INVALID_SHAPE;
    case 3: return a->N = 0, *name = "N", MOE_ERROR_INVALID_SHAPE;
    case 4: return a->K = -5, *name = "K", MOE_ERROR_INVALID_SHAPE;
    case 5: return a->num_tokens = INT32_MAX - 1, a->topk = 2, *name = "num_tokens", MOE_ERROR_OVERFLOW;
    case 6: return a->K = INT64_MAX, *name = "X", MOE_ERROR_OVERFLOW;
    case 7: return a->permute_x = a->permute_y = 1, *name = "permute_x", MOE_ERROR_INVALID_OPTION;
    case 8: return a->permute_y = 2, *name = "permute_y", MOE_ERROR_INVALID_OPTION;
    case 9: return a->weight_grad_dtype = (moe_dtype)9, *name = "weight_grad_dtype", MOE_ERROR_INVALID_OPTION;
    case 10: return a->accumulate = MOE_ACCUMULATE_OUTPUT, *name = "accumulate", MOE_ERROR_INVALID_OPTION;
    case 11: return a->topk_mode = MOE_TOPK_COUNT_, *name = "topk_mode", MOE_ERROR_INVALID_OPTION;
    case 12: return a->m_sizes = NULL, *name = "m_sizes", MOE_ERROR_NULL_ARGUMENT;
    case 13: return a->X = NULL, *name = "X", MOE_ERROR_NULL_ARGUMENT;
    case 14: return a->W = NULL, *name = "W", MOE_ERROR_NULL_ARGUMENT;
    case 15:
      return a->permute_y = !a->permute_x, a->gather_indices = NULL, *name = "gather_indices", MOE_ERROR_NULL_ARGUMENT;
    case 16: return a->X = (const char *)a->X + 1, *name = "X", MOE_ERROR_MISALIGNED;
    case 17: return a->Y = (void *)(uintptr_t)a->X, *name = "Y", MOE_ERROR_OVERLAP;
    case 18: return sizes[0] = -1, *name = "m_sizes", MOE_ERROR_INVALID_SHAPE;
    case 19: return sizes[0] = 1000, *name = "m_sizes", MOE_ERROR_INVALID_SHAPE;
    case 20: return gather[0] = (int32_t)(a->num_tokens * a->topk), *name = "gather_indices", MOE_ERROR_INVALID_INDEX;
    default: return a->workspace = gather, a->workspace_bytes = 0, *name = "workspace_bytes", MOE_ERROR_WORKSPACE;
  }
}

static void test_bad_arguments(void **state) {
  (void)state;
  for (int which = 0; which < BAD_ARGUMENTS; ++which) {
    grouped g = grouped_new(test_case_seed(test_seed(1), (uint64_t)which), MOE_DTYPE_BF16);
    moe_context ctx = {.allocate = test_allocate, .release = test_release};
    test_tensor before = test_tensor_new(g.y.dtype, g.y.count);
    test_tensor_copy(&before, &g.y);
    const char *name = NULL;
    const moe_status want = spoil(which, &g.args, g.sizes, g.gather, &name);
    const moe_status got = moe_grouped_gemm_bf16(&ctx, &g.args);
    if (got != want || !strstr(ctx.message, name))
      fail_msg("case %d: %s, \"%s\", wanted %s for %s", which, moe_status_str(got), ctx.message, moe_status_str(want),
               name);
    assert_int_equal(test_tensor_differs(&before, &g.y), -1);
    test_tensor_free(&before);
    grouped_free(&g);
  }
}

/* ------------------------------------------------------------------------------------------------- a packed layer */

static void pack_layer(moe_context *ctx, test_case *c) {
  moe_blockwise_layer *l = &c->layer;
  moe_pack_weights_args gate_up = {.layout = l->config.skip_gate ? MOE_PACK_UP : MOE_PACK_GATE_UP,
                                   .E = l->E,
                                   .rows = l->H,
                                   .columns = l->I,
                                   .weight = c->wgu.data};
  moe_pack_weights_args down = {
      .layout = MOE_PACK_DOWN, .E = l->E, .rows = l->I, .columns = l->H, .weight = c->wd.data};
  assert_int_equal(test_pack_new(ctx, c->dtype, &gate_up), MOE_OK);
  assert_int_equal(test_pack_new(ctx, c->dtype, &down), MOE_OK);
  l->gate_up_proj_weight = l->down_proj_weight = NULL;
  l->packed_gate_up_proj_weight = gate_up.packed, l->packed_gate_up_proj_weight_bytes = gate_up.packed_bytes;
  l->packed_down_proj_weight = down.packed, l->packed_down_proj_weight_bytes = down.packed_bytes;
}

static void check_layer(uint64_t seed, moe_dtype dtype, int isa) {
  static const test_limits most = {40, 150, 150, 6, 3, 20};
  test_case c = {.seed = seed, .rng = seed};
  moe_context ctx = {.allocate = test_allocate, .release = test_release, .num_threads = 2};
  test_case_options(&c, dtype, &most);
  test_case_real_activation(&c);
  test_route_case(&c);
  test_case_allocate(&c);
  test_tensor *random[] = {&c.x, &c.wgu, &c.wd, &c.bgu, &c.bd, &c.affinity, &c.y_start};
  for (size_t i = 0; i < sizeof random / sizeof *random; ++i) test_fill_uniform(random[i], &c.rng, 0.5);
  if (test_case_forward(&c, &ctx) != MOE_OK) fail_msg("%s", ctx.message);
  test_tensor plain = test_tensor_new(dtype, c.y.count);
  test_tensor_copy(&plain, &c.y);
  pack_layer(&ctx, &c);
  if (test_case_forward(&c, &ctx) != MOE_OK) fail_msg("%s", ctx.message);
  const int64_t differs = test_tensor_differs(&plain, &c.y);
  char text[768];
  if (differs >= 0) fail_msg("output[%lld] | %s", (long long)differs, test_case_describe(&c, (moe_isa)isa, 2, text));
  free((void *)(uintptr_t)c.layer.packed_gate_up_proj_weight), free((void *)(uintptr_t)c.layer.packed_down_proj_weight);
  test_tensor_free(&plain);
  test_case_free(&c);
}

static void test_packed_layer(void **state) {
  (void)state;
  const uint64_t seed = test_seed(1);
  for (int64_t n = 0; n < test_cases(120, 12); ++n)
    for (int isa = 0; isa < TEST_ISA_COUNT; ++isa)
      if (test_use_isa(isa)) check_layer(test_case_seed(seed, (uint64_t)n), test_dtype_number(n), isa);
  test_use_best_isa();
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_grouped_exact), cmocka_unit_test(test_row_counts),
                                     cmocka_unit_test(test_packed_checks), cmocka_unit_test(test_bad_arguments),
                                     cmocka_unit_test(test_packed_layer)};
  return cmocka_run_group_tests_name("grouped", tests, NULL, NULL);
}
