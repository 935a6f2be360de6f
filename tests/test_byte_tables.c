/* test_byte_tables: products with codes of 8 bits, which CPUs with AVX-512 VBMI look up, have the same bits as with the
   bf16 weights that these stand for, whichever blocks share a scale and wherever they begin: forward and backward, few
   rows and many, both orders, every code under every kind of scale. */
#include "support/test.h"

#include <math.h>

#include "support/fill.h"
#include "support/quantized.h"

typedef struct shape {
  int64_t rows, N, K;
  moe_quantized_weight weight;
  int every; /* 1 to 3: a column per code, but for 2 not only numbers; scales of all kinds */
} shape;

/* One, others, subnormal products, overflow, zeros. */
static const float scales[] = {1.0f,       0.37f,     -1.7f,           0x1.8p-120f, 0x1.6p-131f, -0x1p-149f,
                               0x1.8p125f, -0x1p119f, 0x1.fffffep127f, 0.0f,        -0.0f,       0x1.234567p3f};

static void make(struct quantized *q, const shape *s, uint64_t *rng) {
  *q = (struct quantized){.weight = s->weight, .E = 1, .K = s->K, .parts = 1, .columns = s->N};
  quantized_open(q);
  for (int64_t i = 0; i < quantized_count(q); i++) {
    const int negative = test_random_chance(rng, 2), magnitude = (int)test_random_range(rng, 0, q->format->last);
    const int signless = magnitude == 0 && q->format->nan == 0x80;
    if (s->every == 2) q->table.code[i] = (uint8_t)(i / s->K % (q->format->last + 1)); /* so that sums are numbers */
    else q->table.code[i] = (uint8_t)(s->every ? i / s->K : magnitude | (negative && !signless) << 7);
  }
  for (int64_t i = 0; i < quantized_groups(q); i++) { /* those that are added to exponents; the least plain one; all */
    q->table.scale[i] = (uint8_t)(s->every < 3 ? test_random_range(rng, 32, s->every == 2 ? 140 : 239) : i * 85 % 256);
    if (s->every == 2 && i % 2) q->table.scale[i] = 16;
  }
  for (int64_t i = 0; i < quantized_scale_count(q); i++) {
    quantized_random_scale(q, i, rng, 0);
    if (!s->every || s->weight.scaling != MOE_WEIGHT_BLOCK) continue;
    if (s->weight.scales_type == MOE_SCALES_E8M0) quantized_set_scale(q, i, (uint32_t)(i * 85 % 256));
    if (s->weight.scales_type == MOE_SCALES_F32)
      quantized_set_scale(q, i, bits_of(scales[i % (int64_t)(sizeof scales / sizeof *scales)]));
  }
  quantized_store(q, (int)(s->N & 1));
}

static void run(moe_grouped_gemm_args *args, int backward, int64_t threads) {
  moe_context ctx = {.num_threads = (int32_t)threads};
  const moe_status size = backward ? moe_grouped_gemm_dx_bf16_workspace_size(&ctx, args, &args->workspace_bytes)
                                   : moe_grouped_gemm_bf16_workspace_size(&ctx, args, &args->workspace_bytes);
  assert_int_equal(size, MOE_OK);
  struct guarded workspace = guard_alloc(args->workspace_bytes, GUARD_AFTER);
  assert_non_null(workspace.data);
  args->workspace = memset(workspace.data, 0xff, args->workspace_bytes);
  const moe_status status = backward ? moe_grouped_gemm_dx_bf16(&ctx, args) : moe_grouped_gemm_bf16(&ctx, args);
  if (status != MOE_OK) fail_msg("%s", ctx.message);
  guard_free(&workspace);
}

static void check(const shape *s, uint64_t seed) {
  uint64_t rng = seed;
  struct quantized q;
  make(&q, s, &rng);
  const int32_t rows = (int32_t)s->rows;
  const int after = s->weight.scaling != MOE_WEIGHT_BLOCK && s->weight.scaling != MOE_WEIGHT_MX;
  test_tensor w = test_tensor_new(MOE_DTYPE_BF16, s->N * s->K), x = test_tensor_new(MOE_DTYPE_BF16, s->rows * s->K);
  test_tensor dy = test_tensor_new(MOE_DTYPE_BF16, s->rows * s->N);
  test_tensor out[2][2] = {{test_tensor_new(MOE_DTYPE_BF16, dy.count), test_tensor_new(MOE_DTYPE_BF16, dy.count)},
                           {test_tensor_new(MOE_DTYPE_BF16, x.count), test_tensor_new(MOE_DTYPE_BF16, x.count)}};
  assert_true(quantized_plain(&q, MOE_DTYPE_BF16, w.data, 0));
  for (int64_t i = 0; i < x.count; i++) test_tensor_set(&x, i, (double)test_random_range(&rng, -64, 63) + 0.5);
  for (int64_t i = 0; i < dy.count; i++) test_tensor_set(&dy, i, (double)test_random_range(&rng, -64, 63) + 0.5);
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!test_use_quick_isa(isa)) continue;
    for (int op = after; op < 2; op++) { /* what multiplies sums: backward only */
      for (int plain = 0; plain < 2; plain++) {
        moe_grouped_gemm_args args = {.num_tokens = rows,
                                      .topk = 1,
                                      .E = 1,
                                      .N = s->N,
                                      .K = s->K,
                                      .m_sizes = &rows,
                                      .X = x.data,
                                      .dY = dy.data,
                                      .weight_order = MOE_GROUPED_EKN};
        args.Y = out[0][plain].data, args.dX = out[1][plain].data;
        if (plain) args.W = w.data;
        else args.quantized_W = &q.weight;
        run(&args, op, 1 + isa % 2);
      }
      const int64_t at = test_tensor_differs(&out[op][0], &out[op][1]);
      if (at >= 0)
        fail_msg(
            "%s %s of %s, isa %s: %lld rows, N %lld K %lld, scaling %d, blocks %lldx%lld from %lld, %lld, out_in %d, "
            "scales %d, every %d: [%lld]",
            op ? "dX" : "Y", q.format->name, "codes", moe_isa_name((moe_isa)isa), (long long)s->rows, (long long)s->N,
            (long long)s->K, (int)s->weight.scaling, (long long)s->weight.block, (long long)s->weight.block_columns,
            (long long)s->weight.first_k, (long long)s->weight.first_column, s->weight.out_in,
            (int)s->weight.scales_type, s->every, (long long)at);
    }
  }
  test_use_best_isa();
  for (int i = 0; i < 4; i++) test_tensor_free(&out[i / 2][i % 2]);
  test_tensor_free(&w), test_tensor_free(&x), test_tensor_free(&dy);
  quantized_free(&q);
}

static const int64_t few_or_many[] = {1, 2, 3, 5, 8, 32, 33, 50};

/* A column per code. */
static void test_every_code(void **state) {
  (void)state;
  for (int64_t i = 0; i < test_cases(10 * element_wides(), element_wides()); i++) {
    shape s = {few_or_many[i % 8], 256, 20 + i % 3, {.scaling = MOE_WEIGHT_BLOCK}, 1};
    s.weight.element = element_wide(i % element_wides()), s.weight.out_in = (int)(i / 2 % 2);
    s.weight.block = i % 4 ? 4 : 32, s.weight.block_columns = i % 3 ? 32 : 64;
    s.weight.scales_type = i % 2 ? MOE_SCALES_E8M0 : MOE_SCALES_F32;
    if (i % 4 == 0) s.K = 70;
    check(&s, 100 + (uint64_t)i);
  }
}

/* Blocks of any shape that begin anywhere, of whole panels and vectors and others. */
static void test_blocks(void **state) {
  static const int64_t N[] = {64, 256, 300, 33, 96, 130, 31, 160}, K[] = {128, 130, 257, 64, 7, 300, 1, 200};
  static const int64_t block[][4] = {{128, 128, 0, 0}, {128, 128, 64, 32}, {64, 32, 2, 0},    {256, 256, 10, 96},
                                     {128, 128, 1, 0}, {128, 128, 0, 16},  {100, 96, 50, 64}, {32, 1, 0, 0}};
  uint64_t rng = 5;
  (void)state;
  for (int64_t i = 0; i < test_cases(160, 20); i++) {
    const int64_t *b = block[i % 8];
    shape s = {few_or_many[test_random_range(&rng, 0, 7)],
               N[test_random_range(&rng, 0, 7)],
               K[test_random_range(&rng, 0, 7)],
               {.scaling = MOE_WEIGHT_BLOCK},
               0};
    s.weight.block = b[0], s.weight.block_columns = b[1], s.weight.first_k = b[2], s.weight.first_column = b[3];
    s.weight.element = element_wide(test_random_range(&rng, 0, 9) % element_wides());
    s.weight.out_in = test_random_chance(&rng, 2);
    check(&s, 300 + (uint64_t)i);
  }
}

/* Scales of the whole weight and of columns, which the backward multiplies codes by. */
static void test_after(void **state) {
  (void)state;
  for (int64_t i = 0; i < test_cases(24, 6); i++) {
    shape s = {few_or_many[i % 8], 60 + 7 * i, 100 + 3 * i, {.scaling = (moe_weight_scaling)(1 + i % 2)}, 0};
    s.weight.scaling = i % 2 ? MOE_WEIGHT_STATIC : MOE_WEIGHT_COLUMN;
    s.weight.element = element_wide(i % element_wides()), s.weight.out_in = (int)(i / 2 % 2);
    check(&s, 600 + (uint64_t)i);
  }
}

static void test_mx(void **state) {
  (void)state;
  for (int64_t i = 0; i < test_cases(40, 10); i++) {
    shape s = {few_or_many[i % 4 == 3 ? i % 8 : 7], 256, 40 + 13 * i, {.scaling = MOE_WEIGHT_MX}, (int)(i % 4)};
    if (i % 4 == 0) s.N = 30 + 9 * i;
    s.weight.element = element_wide(2 * i % element_wides());
    check(&s, 700 + (uint64_t)i);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_code), cmocka_unit_test(test_blocks),
                                     cmocka_unit_test(test_after), cmocka_unit_test(test_mx)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
