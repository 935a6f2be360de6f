/* test_scaled: moe_quantize_scaled and moe_dequantize_scaled, to the bit, against the definition in moe.h written down
   a second time, element by element; bad input. */
#include "support/test.h"

#include <math.h>

#include "support/element_oracle.h"
#include "support/pool.h"

struct scaled_case {
  moe_quantize_scaled_args q;
  const struct element *f;
  int exponent; /* 0: numbers of many sizes; else see fill_every */
  int64_t block_rows, block_columns, across, count, blocks;
  float *x, *scales, *back;
  uint8_t *codes;
  void *plain, *plain_back;
};

static void convert(moe_dtype dtype, void *to, const float *x, int64_t n) {
  assert_int_equal(test_from_f32(dtype, to, x, n), MOE_OK);
}

static void widen(moe_dtype dtype, float *x, const void *from, int64_t n) {
  assert_int_equal(test_to_f32(dtype, x, from, n), MOE_OK);
}

/* Numbers of many sizes, a few that are none, blocks of zeros. */
static void fill(struct scaled_case *c, uint64_t *rng) {
  for (int64_t i = 0; i < c->count; i++) {
    c->x[i] = (float)ldexp((double)(int64_t)test_random(rng), (int)test_random_range(rng, -80, -58));
    if (test_random_chance(rng, 9)) c->x[i] = 0;
    if (test_random_chance(rng, 200)) c->x[i] = test_random_chance(rng, 2) ? (float)INFINITY : (float)NAN;
    if (i / c->q.columns % 7 == 3 && c->block_rows < 4) c->x[i] = test_random_chance(rng, 30) ? 0x1p-149f : 0;
  }
  convert(c->q.dtype, c->plain, c->x, c->count);
  widen(c->q.dtype, c->x, c->plain, c->count);
}

/* In a row every bf16 from one of that exponent on down, whichever sign; other fractions in other rows. */
static void fill_every(struct scaled_case *c) {
  for (int64_t i = 0; i < c->count; i++) {
    const int64_t row = i / c->q.columns, top = c->exponent * 128 + row * 37 % 128, bits = top - i % c->q.columns;
    c->x[i] = float_of((uint32_t)(bits > 0 ? bits : 0) << 16 | (uint32_t)(i % 2) << 31);
  }
  convert(c->q.dtype, c->plain, c->x, c->count);
}

static int64_t block_of(const struct scaled_case *c, int64_t i) {
  return i / c->q.columns / c->block_rows * c->across + i % c->q.columns / c->block_columns;
}

static void want_scales(const struct scaled_case *c, float *scales) {
  float *amax = calloc((size_t)c->blocks, sizeof *amax);
  assert_non_null(amax);
  for (int64_t i = 0; i < c->count; i++)
    if (isfinite(c->x[i])) amax[block_of(c, i)] = fmaxf(amax[block_of(c, i)], fabsf(c->x[i]));
  for (int64_t b = 0; b < c->blocks; b++) {
    const volatile float quotient = amax[b] / (float)c->f->largest;
    scales[b] = amax[b] == 0 ? 1.0f : fmaxf(quotient, 0x1p-126f);
  }
  free(amax);
}

static void check_codes(const struct scaled_case *c, const float *scales) {
  const uint32_t cast = c->q.cast;
  for (int64_t i = 0; i < c->count; i++) {
    const volatile float inverse = 1.0f / scales[block_of(c, i)], product = c->x[i] * inverse;
    const int special = !isfinite(c->x[i]);
    const int code =
        element_code(c->f, bits_of(special ? c->x[i] : product), special ? cast & ~(uint32_t)MOE_CAST_SATURATE : cast);
    if (memcmp(&scales[block_of(c, i)], &c->scales[block_of(c, i)], 4) != 0 || code != c->codes[i])
      fail_msg("%s isa %s %lldx%lld blocks %lldx%lld at %lld: scale %a, not %a; code %d, not %d", c->f->name,
               moe_isa_name(moe_isa_active()), (long long)c->q.rows, (long long)c->q.columns,
               (long long)c->q.block_rows, (long long)c->q.block_columns, (long long)i,
               (double)c->scales[block_of(c, i)], (double)scales[block_of(c, i)], c->codes[i], code);
  }
}

static void check_back(struct scaled_case *c, moe_context *ctx) {
  const moe_dequantize_scaled_args d = {.element = c->q.element,
                                        .dtype = c->q.dtype,
                                        .rows = c->q.rows,
                                        .columns = c->q.columns,
                                        .block_rows = c->q.block_rows,
                                        .block_columns = c->q.block_columns,
                                        .codes = c->codes,
                                        .scales = c->scales,
                                        .plain = c->plain_back};
  const size_t bytes = (size_t)c->count * (c->q.dtype == MOE_DTYPE_DEFAULT ? 4 : moe_dtype_size(c->q.dtype));
  assert_int_equal(moe_dequantize_scaled(ctx, &d), MOE_OK);
  for (int64_t i = 0; i < c->count; i++) {
    const volatile float product = float_of(element_decoded(c->f, c->codes[i])) * c->scales[block_of(c, i)];
    c->back[i] = isnan(product) ? float_of(0x7fc00000u) : product;
  }
  convert(c->q.dtype, c->plain, c->back, c->count);
  assert_memory_equal(c->plain, c->plain_back, bytes);
}

static void check(struct scaled_case *c, uint64_t *rng, int given) {
  struct test_pool pool = {.seed = test_random(rng)};
  moe_context ctx = {.parallel_for = test_pool_parallel_for, .parallel_for_user = &pool};
  ctx.num_threads = (int32_t)test_random_range(rng, 1, 5);
  c->block_rows = c->q.block_rows ? c->q.block_rows : c->q.rows;
  c->block_columns = c->q.block_columns ? c->q.block_columns : c->q.columns;
  c->across = (c->q.columns + c->block_columns - 1) / c->block_columns;
  c->count = c->q.rows * c->q.columns, c->blocks = (c->q.rows + c->block_rows - 1) / c->block_rows * c->across;
  const size_t n = (size_t)c->count;
  c->x = malloc(n * 4), c->back = malloc(n * 4), c->plain = malloc(n * 4), c->plain_back = malloc(n * 4);
  c->codes = malloc(n), c->scales = malloc((size_t)c->blocks * 4);
  float *scales = malloc((size_t)c->blocks * 4);
  assert_true(c->x && c->back && c->plain && c->plain_back && c->codes && c->scales && scales);
  if (c->exponent) fill_every(c);
  else fill(c, rng);
  want_scales(c, scales);
  if (given)
    for (int64_t b = 0; b < c->blocks; b++)
      scales[b] = c->scales[b] = scales[b] * (float)test_random_range(rng, 1, 3) * 0.4f;
  c->f = &elements[c->q.element];
  c->q.scales_given = given, c->q.plain = c->plain, c->q.codes = c->codes, c->q.scales = c->scales;
  assert_int_equal(moe_quantize_scaled(&ctx, &c->q), MOE_OK);
  check_codes(c, scales);
  check_back(c, &ctx);
  free(c->x), free(c->back), free(c->plain), free(c->plain_back), free(c->codes), free(c->scales), free(scales);
}

static void test_blocks(void **state) {
  (void)state;
  static const int64_t blocks[] = {0, 1, 2, 7, 32, 33, 128, 256}, sizes[] = {1, 2, 9, 31, 64, 130, 300, 1030, 2100};
  uint64_t rng = 5;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (int64_t i = 0; i < test_cases(300, 40) && test_use_isa(isa); i++) {
      struct scaled_case c = {.q = {.element = element_wide(i),
                                    .cast = (uint32_t)(i / 3 % 4),
                                    .dtype = (moe_dtype)(i % (1 + TEST_DTYPES))}};
      c.f = &elements[c.q.element];
      c.q.rows = sizes[test_random_range(&rng, 0, 5)], c.q.columns = sizes[test_random_range(&rng, 0, 8)];
      c.q.block_rows = blocks[test_random_range(&rng, 0, 7)], c.q.block_columns = blocks[test_random_range(&rng, 0, 7)];
      check(&c, &rng, test_random_chance(&rng, 3));
    }
  test_use_best_isa();
}

/* All fractions of a scale, all bf16 under it, from the largest code to far below the least. */
static void test_every_bf16(void **state) {
  (void)state;
  static const int exponents[] = {127, 38, 39, 40, 41, 228, 229, 230, 231, 254, 1, 129};
  uint64_t rng = 6;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (int i = 0; i < 4 * element_wides() && test_use_isa(isa); i++) {
      struct scaled_case c = {.exponent = exponents[i % 12]};
      c.q = (moe_quantize_scaled_args){.element = element_wide(i), .cast = (uint32_t)(i / 3 % 4), .block_rows = 1};
      c.q.dtype = MOE_DTYPE_BF16, c.q.rows = test_cases(128, 8), c.q.columns = 36 * 128;
      c.f = &elements[c.q.element];
      check(&c, &rng, 0);
    }
  test_use_best_isa();
}

/* Every code under scales of every size and many fractions, back to bf16. */
static void test_every_code(void **state) {
  (void)state;
  static const uint32_t exponents[] = {0, 1, 15, 31, 32, 33, 64, 127, 200, 237, 238, 239, 240, 241, 246, 254};
  enum { ROWS = 96, COLUMNS = 256 };
  static uint8_t codes[ROWS * COLUMNS];
  static float scales[ROWS], back[ROWS * COLUMNS], plain[ROWS * COLUMNS], plain_back[ROWS * COLUMNS];
  uint64_t rng = 7;
  for (int i = 0; i < ROWS * COLUMNS; i++) codes[i] = (uint8_t)(i % 256);
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (int64_t i = 0; i < element_wides() * 16 && test_use_isa(isa); i++) {
      struct scaled_case c = {.q = {.element = element_wide(i), .dtype = MOE_DTYPE_BF16, .block_rows = 1}};
      for (int r = 0; r < ROWS; r++)
        scales[r] = float_of(exponents[i / element_wides()] << 23 | (uint32_t)r % 8 << 20 |
                             (uint32_t)(test_random(&rng) >> 44));
      c.q.rows = ROWS, c.q.columns = COLUMNS, c.count = ROWS * COLUMNS;
      c.block_rows = c.across = 1, c.block_columns = COLUMNS;
      c.f = &elements[c.q.element], c.codes = codes, c.scales = scales;
      c.back = back, c.plain = plain, c.plain_back = plain_back;
      check_back(&c, NULL);
    }
  test_use_best_isa();
}

/* Scales that are powers of two: the least with which nothing saturates, also next to where it changes; and the codes
   that the same scales give when they are given. */
static void test_powers_of_two(void **state) {
  (void)state;
  enum { ROWS = 300, COLUMNS = 70 };
  static float plain[ROWS * COLUMNS], scales[ROWS];
  static uint8_t codes[2][ROWS * COLUMNS];
  uint64_t rng = 8;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (int64_t i = 0; i < element_wides() * 3 && test_use_isa(isa); i++) {
      const struct element *f = &elements[element_wide(i)];
      const float largest = float_of(bits_of((float)element_value(f, f->last)));
      for (int r = 0; r < ROWS; r++) { /* around largest * 2^k, and anywhere */
        const int k = (int)test_random_range(&rng, -149, 110);
        const uint32_t next = bits_of(ldexpf(largest, k)) + (uint32_t)test_random_range(&rng, -2, 2);
        const float most = float_of(r % 2 ? next & 0x7fffffffu : (uint32_t)test_random_range(&rng, 1, 0x7f7fffff));
        for (int c = 0; c < COLUMNS; c++) plain[r * COLUMNS + c] = most * ((float)(c % 9 - 4) / 5);
        plain[r * COLUMNS + (int)test_random_range(&rng, 0, COLUMNS - 1)] = r % 3 ? most : -most;
        if (r == 7) memset(plain + r * COLUMNS, 0, COLUMNS * sizeof *plain);
      }
      moe_context ctx = {0};
      moe_quantize_scaled_args q = {.element = element_wide(i),
                                    .rows = ROWS,
                                    .columns = COLUMNS,
                                    .block_rows = 1,
                                    .power_of_two_scales = 1,
                                    .plain = plain,
                                    .codes = codes[0],
                                    .scales = scales};
      assert_int_equal(moe_quantize_scaled(&ctx, &q), MOE_OK);
      for (int r = 0; r < ROWS; r++) {
        double amax = 0;
        int exponent;
        for (int c = 0; c < COLUMNS; c++) amax = fmax(amax, fabs((double)plain[r * COLUMNS + c]));
        assert_true(frexp((double)scales[r], &exponent) == 0.5);
        if (amax == 0) assert_true(scales[r] == 1);
        else {
          if (!((double)scales[r] * (double)largest >= amax))
            fail_msg("%s %a * %a, amax %a row %d isa %d", f->name, scales[r], largest, amax, r, isa);
          assert_true((double)scales[r] / 2 * (double)largest < amax || scales[r] == 0x1p-126f);
        }
      }
      q.scales_given = 1, q.codes = codes[1];
      assert_int_equal(moe_quantize_scaled(&ctx, &q), MOE_OK);
      assert_memory_equal(codes[0], codes[1], sizeof codes[0]);
    }
  test_use_best_isa();
}

#define REFUSE(assignment, wanted, word)                                                    \
  do {                                                                                      \
    moe_quantize_scaled_args q = good;                                                      \
    q.assignment;                                                                           \
    assert_int_equal(moe_quantize_scaled(&ctx, &q), MOE_ERROR_##wanted);                    \
    if (!strstr(ctx.message, word)) fail_msg("\"%s\" does not name %s", ctx.message, word); \
  } while (0)

static void test_bad_input(void **state) {
  (void)state;
  float plain[12] = {1}, scales[12] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  uint8_t codes[12];
  moe_context ctx = {0};
  const moe_quantize_scaled_args good = {.rows = 3, .columns = 4, .plain = plain, .codes = codes, .scales = scales};
  assert_int_equal(moe_quantize_scaled(&ctx, &good), MOE_OK);
  assert_int_equal(moe_quantize_scaled(&ctx, NULL), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(moe_dequantize_scaled(&ctx, NULL), MOE_ERROR_NULL_ARGUMENT);
  REFUSE(plain = NULL, NULL_ARGUMENT, "plain");
  REFUSE(codes = NULL, NULL_ARGUMENT, "codes");
  REFUSE(scales = NULL, NULL_ARGUMENT, "scales");
  REFUSE(rows = -1, INVALID_SHAPE, "rows");
  REFUSE(columns = -1, INVALID_SHAPE, "columns");
  REFUSE(block_rows = -1, INVALID_SHAPE, "block_rows");
  REFUSE(block_columns = -1, INVALID_SHAPE, "block_columns");
  REFUSE(element = MOE_ELEMENT_E2M1, INVALID_OPTION, "element");
  REFUSE(element = (moe_element)17, INVALID_OPTION, "element");
  REFUSE(dtype = (moe_dtype)5, INVALID_OPTION, "dtype");
  REFUSE(cast = 8, INVALID_OPTION, "cast");
  REFUSE(scales_given = 2, INVALID_OPTION, "scales_given");
  REFUSE(power_of_two_scales = -1, INVALID_OPTION, "power_of_two_scales");
  REFUSE(rows = INT64_MAX / 2, OVERFLOW, "plain");
  REFUSE(scales = (float *)(void *)((char *)scales + 1), MISALIGNED, "scales");
  REFUSE(codes = (uint8_t *)(void *)plain, OVERLAP, "codes");
  const float bad[] = {0.0f, -1.0f, INFINITY, NAN};
  for (int i = 0; i < 4; i++) {
    scales[0] = bad[i];
    REFUSE(scales_given = 1, INVALID_OPTION, "scales");
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_blocks), cmocka_unit_test(test_every_bf16),
                                     cmocka_unit_test(test_every_code), cmocka_unit_test(test_powers_of_two),
                                     cmocka_unit_test(test_bad_input)};
  return cmocka_run_group_tests_name("scaled", tests, NULL, NULL);
}
