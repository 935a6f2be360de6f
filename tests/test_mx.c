/* test_mx: moe_quantize_mx and moe_dequantize_mx, bit for bit against the definitions in moe.h computed in double,
   where quotients by powers of two are exact: all rules, casts, elements and types, both orientations, lengths 1 to
   100 and some long ones, subnormals, infinities, NaN, amax around every threshold; all pairs of scale and code. */
#include "support/test.h"

#include "support/mx_quantize_oracle.h"
#include "support/pool.h"

enum { RULES = MOE_SCALE_COUNT_, CASTS = 6, TYPES = 1 + TEST_DTYPES, GUARD = 16 };

/* ----------------------------------------------------------------------------------------------------------- inputs */

/* Magnitudes at which some rule changes its mind, or next to one. */
static float threshold(uint64_t *rng, int exponent) {
  static const double at[] = {1,
                              1.25,
                              1.5,
                              1.75,
                              1.875,
                              1.9375,
                              1.96875,
                              1.4142135623730951,
                              1.2374368670764582,
                              1.0606601717798213,
                              1.3258252147247767};
  const float x = (float)ldexp(at[test_random_range(rng, 0, 10)], exponent);
  const uint32_t bits = bits_of(x);
  return float_of(bits + (uint32_t)test_random_range(rng, bits ? -1 : 0, 1));
}

static float number(uint64_t *rng, int kind, int exponent) {
  const uint32_t random = (uint32_t)(test_random(rng) >> 32), sign = random & 0x80000000u;
  if (kind == 0) return float_of((random & 0x7f800000u) == 0x7f800000u ? random & 0x807fffffu : random); /* any */
  if (kind == 1) return float_of(random & 0x80000fffu);                                                  /* subnormal */
  if (kind == 2) return float_of(sign);
  const int below = (int)test_random_range(rng, 0, 19);
  if (below > 17) return float_of(sign);
  return float_of(bits_of((float)ldexp(1 + (double)(random & 0x7fffffu) * 0x1p-23, exponent - 1 - below)) | sign);
}

/* Groups of 32 along rows or, transposed, columns, each of one kind. dtype's values only. */
static void fill(float *x, int64_t lines, int64_t length, uint64_t *rng, int specials) {
  for (int64_t line = 0; line < lines; line++)
    for (int64_t g = 0; g < length; g += 32) {
      const int kind = (int)test_random_range(rng, 0, 9), exponent = (int)test_random_range(rng, -149, 127);
      const int64_t end = length - g < 32 ? length - g : 32;
      float *group = x + line * length + g;
      for (int64_t i = 0; i < end; i++) group[i] = number(rng, kind, exponent);
      if (kind > 2) group[test_random_range(rng, 0, end - 1)] = threshold(rng, exponent);
      if (specials && test_random_chance(rng, 4)) group[test_random_range(rng, 0, end - 1)] = float_of(0x7f800000u);
      if (specials && test_random_chance(rng, 4)) group[test_random_range(rng, 0, end - 1)] = float_of(0xff812345u);
    }
}

/* ----------------------------------------------------------------------------------------------------------- checks */

struct buffers {
  float *x, *back; /* lines in order; plain is x, or its transpose, in dtype */
  void *plain, *plain_back;
  uint8_t *codes, *scales, *codes_want, *scales_want;
  int64_t code_bytes, scale_bytes;
};

static void to_dtype(moe_dtype dtype, void *dst, const float *src, int64_t n) {
  assert_int_equal(test_from_f32(dtype, dst, src, n), MOE_OK);
}

static void from_dtype(moe_dtype dtype, float *dst, const void *src, int64_t n) {
  assert_int_equal(test_to_f32(dtype, dst, src, n), MOE_OK);
}

static void transpose(float *dst, const float *src, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++) dst[j * rows + i] = src[i * columns + j];
}

static void *take(int64_t bytes) {
  void *memory = malloc((size_t)bytes);
  assert_non_null(memory);
  memset(memory, 0x5a, (size_t)bytes);
  return memory;
}

static void check_back(moe_context *ctx, const struct element *f, const moe_quantize_mx_args *q, struct buffers *b,
                       int64_t lines, int64_t length) {
  const int64_t n = lines * length, stride = b->code_bytes / lines, groups = b->scale_bytes / lines;
  const int64_t size = q->dtype == MOE_DTYPE_DEFAULT ? 4 : (int64_t)moe_dtype_size(q->dtype);
  const moe_dequantize_mx_args d = {.element = f->id,
                                    .dtype = q->dtype,
                                    .rows = q->rows,
                                    .columns = q->columns,
                                    .transposed = q->transposed,
                                    .codes = b->codes,
                                    .scales = b->scales,
                                    .plain = b->plain_back};
  assert_int_equal(moe_dequantize_mx(ctx, &d), MOE_OK);
  for (int64_t i = 0; i < n; i++) {
    const int64_t line = i / length, at = i % length;
    b->x[i] =
        float_of(mx_dequantized(f, b->scales[line * groups + at / 32], element_get(f, b->codes + line * stride, at)));
  }
  if (q->transposed)
    transpose(b->back, b->x, lines, length);
  else
    memcpy(b->back, b->x, (size_t)n * sizeof *b->x);
  to_dtype(q->dtype, b->plain, b->back, n);
  assert_memory_equal(b->plain_back, b->plain, (size_t)(n * size));
  for (int i = 0; i < GUARD; i++) assert_int_equal(((uint8_t *)b->plain_back)[n * size + i], 0x5a);
}

/* Quantises lines of one length, and back. */
static void check(const struct element *f, moe_quantize_mx_args *q, int64_t lines, int64_t length, uint64_t *rng) {
  struct test_pool pool = {.seed = test_random(rng)};
  moe_context ctx = {.parallel_for = test_pool_parallel_for,
                     .parallel_for_user = &pool,
                     .num_threads = (int32_t)test_random_range(rng, 1, 3)};
  const int64_t n = lines * length, stride = element_bytes(f, length), groups = (length + 31) / 32;
  struct buffers b = {
      .x = take(4 * n), .back = take(4 * n), .plain = take(4 * n + GUARD), .plain_back = take(4 * n + GUARD)};
  b.code_bytes = lines * stride, b.scale_bytes = lines * groups;
  b.codes = take(b.code_bytes + GUARD), b.codes_want = take(b.code_bytes + GUARD);
  b.scales = take(b.scale_bytes + GUARD), b.scales_want = take(b.scale_bytes + GUARD);
  fill(b.x, lines, length, rng, test_random_chance(rng, 3));
  to_dtype(q->dtype, b.plain, b.x, n);
  from_dtype(q->dtype, b.x, b.plain, n);
  for (int64_t line = 0; line < lines; line++)
    mx_quantize_line(f, (int)q->scale_rule, q->cast, b.x + line * length, length, b.codes_want + line * stride,
                     b.scales_want + line * groups);
  if (q->transposed) {
    transpose(b.back, b.x, lines, length);
    to_dtype(q->dtype, b.plain, b.back, n);
  }
  q->element = f->id, q->plain = b.plain, q->codes = b.codes, q->scales = b.scales;
  q->rows = q->transposed ? length : lines, q->columns = q->transposed ? lines : length;
  assert_int_equal(moe_quantize_mx(&ctx, q), MOE_OK);
  if (memcmp(b.scales, b.scales_want, (size_t)b.scale_bytes + GUARD) != 0 ||
      memcmp(b.codes, b.codes_want, (size_t)b.code_bytes + GUARD) != 0)
    fail_msg("repro: %s isa=%s rule=%d cast=%u dtype=%d transposed=%d lines=%lld length=%lld: %s differ", f->name,
             moe_isa_name(moe_isa_active()), (int)q->scale_rule, (unsigned)q->cast, (int)q->dtype, q->transposed,
             (long long)lines, (long long)length,
             memcmp(b.scales, b.scales_want, (size_t)b.scale_bytes) != 0 ? "scales" : "codes");
  check_back(&ctx, f, q, &b, lines, length);
  free(b.x), free(b.back), free(b.plain), free(b.plain_back), free(b.codes), free(b.codes_want), free(b.scales),
      free(b.scales_want);
}

static void test_lengths(void **state) {
  const struct element *f = (const struct element *)*state;
  uint64_t rng = 21;
  const int64_t step = test_cases(1, 7);
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!test_use_isa(isa)) continue;
    for (int64_t i = 0; i < 100 * RULES * CASTS * TYPES * 2; i += step) {
      moe_quantize_mx_args q = {.scale_rule = (moe_scale_rule)(i / 100 % RULES),
                                .cast = (uint32_t)(i / 100 / RULES % CASTS)};
      q.dtype = (moe_dtype)(i / 100 / RULES / CASTS % TYPES), q.transposed = (int)(i / 100 / RULES / CASTS / TYPES);
      check(f, &q, test_random_range(&rng, 1, 5), i % 100 + 1, &rng);
    }
  }
  test_use_best_isa();
}

/* Lines of several strips and items, more lines than an item takes, odd lengths. */
static void test_large(void **state) {
  const struct element *f = (const struct element *)*state;
  static const int64_t shape[][2] = {{3, 65536 + 1063}, {1, 131073}, {700, 257}, {130, 1999}, {4000, 33}};
  uint64_t rng = 22;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!test_use_isa(isa)) continue;
    for (int i = 0; i < 5; i++)
      for (int transposed = 0; transposed < 2; transposed++) {
        moe_quantize_mx_args q = {
            .scale_rule = (moe_scale_rule)(i % RULES), .cast = MOE_CAST_SATURATE, .dtype = MOE_DTYPE_BF16};
        q.transposed = transposed;
        check(f, &q, shape[i][0], shape[i][1], &rng);
      }
  }
  test_use_best_isa();
}

/* So many elements that items are as large as they get, and lines of several: as every line by itself. */
static void test_items(void **state) {
  enum { ROWS = 130, COLUMNS = 131239, PERIOD = 4099 };
  const struct element *f = (const struct element *)*state;
  const int64_t n = (int64_t)ROWS * COLUMNS, groups = (COLUMNS + 31) / 32;
  const int64_t stride = element_bytes(f, COLUMNS);
  uint64_t rng = 23;
  uint16_t *x = take(2 * n), *back = take(2 * n), *line = take(2 * COLUMNS);
  uint8_t *codes = take(ROWS * stride), *scales = take(ROWS * groups), *code = take(stride), *scale = take(groups);
  for (int64_t i = 0; i < n; i++)
    x[i] = i < PERIOD ? (uint16_t)(0x3800 + (test_random(&rng) >> 32) % 0x800 * 17) : x[i - PERIOD];
  for (int isa = 1; isa < TEST_ISA_COUNT; isa++) {
    if (!test_use_isa(isa)) continue;
    moe_quantize_mx_args q = {.element = f->id,
                              .cast = MOE_CAST_SATURATE,
                              .dtype = MOE_DTYPE_BF16,
                              .rows = ROWS,
                              .columns = COLUMNS,
                              .plain = x,
                              .codes = codes,
                              .scales = scales};
    moe_dequantize_mx_args d = {.element = f->id,
                                .dtype = MOE_DTYPE_BF16,
                                .rows = ROWS,
                                .columns = COLUMNS,
                                .codes = codes,
                                .scales = scales,
                                .plain = back};
    assert_int_equal(moe_quantize_mx(NULL, &q), MOE_OK);
    assert_int_equal(moe_dequantize_mx(NULL, &d), MOE_OK);
    q.rows = d.rows = 1, q.codes = code, q.scales = scale, d.plain = line;
    for (int64_t r = 0; r < ROWS; r++) {
      q.plain = x + r * COLUMNS, d.codes = codes + r * stride, d.scales = scales + r * groups;
      assert_int_equal(moe_quantize_mx(NULL, &q), MOE_OK);
      assert_int_equal(moe_dequantize_mx(NULL, &d), MOE_OK);
      assert_memory_equal(code, d.codes, (size_t)stride);
      assert_memory_equal(scale, d.scales, (size_t)groups);
      assert_memory_equal(line, back + r * COLUMNS, 2 * COLUMNS);
    }
  }
  free(x), free(back), free(line), free(codes), free(scales), free(code), free(scale);
  test_use_best_isa();
}

/* Every scale with every code, to every type. */
static void test_every_pair(void **state) {
  const struct element *f = (const struct element *)*state;
  static uint8_t codes[256 * 512 * 6 / 8], scales[256 * 16];
  static float x[256 * 512], actual[256 * 512], expected[256 * 512];
  const int columns = f->bits == 8 ? 256 : 512;
  for (int i = 0; i < (int)sizeof codes; i++) codes[i] = (uint8_t)i;
  for (int i = 0; i < 256 * columns / 32; i++) scales[i] = (uint8_t)(i / (columns / 32));
  for (int i = 0; i < 256 * columns; i++) x[i] = float_of(mx_dequantized(f, i / columns, element_get(f, codes, i)));
  moe_dequantize_mx_args d = {
      .element = f->id, .rows = 256, .columns = columns, .codes = codes, .scales = scales, .plain = actual};
  for (int i = 0; i < TYPES * TEST_ISA_COUNT; i++) {
    if (!test_use_isa(i / TYPES)) continue;
    d.dtype = (moe_dtype)(i % TYPES);
    memset(actual, 0x5a, sizeof actual);
    memset(expected, 0x5a, sizeof expected);
    to_dtype(d.dtype, expected, x, 256 * columns);
    assert_int_equal(moe_dequantize_mx(NULL, &d), MOE_OK);
    assert_memory_equal(actual, expected, sizeof actual);
  }
  test_use_best_isa();
}

/* Every bf16 down to where all codes are zero, neighbours in a group, beside a largest one of every exponent. */
static void test_every_bf16(void **state) {
  enum { EXPONENTS = 36, GROUPS = (EXPONENTS * 256 + 30) / 31 };
  static moe_bf16 plain[32 * GROUPS];
  static float x[32 * GROUPS];
  static uint8_t codes[32 * GROUPS], want[32 * GROUPS], scales[GROUPS], scales_want[GROUPS];
  static const uint32_t fraction[] = {0x00, 0x7f, 0x40, 0x61, 0x20, 0x03, 0x07}; /* the last are above 8 by NEAREST */
  const struct element *f = (const struct element *)*state;
  const size_t bytes = sizeof codes * (size_t)f->bits / 8;
  for (uint32_t i = 0; i < 255 * CASTS; i += (uint32_t)test_cases(1, 7)) {
    /* Casts come in turns of CASTS, fractions in runs of 5: each cast meets each fraction. */
    const uint32_t largest = (i / CASTS) << 7 | fraction[i / 5 % 7];
    uint32_t next = 2 * largest;
    for (int j = 0; j < 32 * GROUPS; j++) {
      const uint32_t bits = j % 32 == 0 ? largest : next / 2 | (next % 2) << 15;
      if (j % 32 > 0 && next > 0) next--;
      plain[j] = (moe_bf16){(uint16_t)bits};
      x[j] = float_of(bits << 16);
    }
    const moe_quantize_mx_args q = {.element = f->id,
                                    .scale_rule = (moe_scale_rule)(i % RULES),
                                    .cast = i % CASTS,
                                    .dtype = MOE_DTYPE_BF16,
                                    .rows = 1,
                                    .columns = 32 * GROUPS,
                                    .plain = plain,
                                    .codes = codes,
                                    .scales = scales};
    mx_quantize_line(f, (int)q.scale_rule, q.cast, x, q.columns, want, scales_want);
    for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
      if (!test_use_isa(isa)) continue;
      memset(codes, 0x5a, sizeof codes), memset(scales, 0x5a, sizeof scales);
      assert_int_equal(moe_quantize_mx(NULL, &q), MOE_OK);
      assert_memory_equal(scales, scales_want, sizeof scales);
      if (memcmp(codes, want, bytes) != 0)
        fail_msg("repro: %s isa=%s rule=%d cast=%u largest=0x%04x: codes differ", f->name,
                 moe_isa_name(moe_isa_active()), (int)q.scale_rule, (unsigned)q.cast, (unsigned)largest);
    }
  }
  test_use_best_isa();
}

static void test_bad_arguments(void **state) {
  (void)state;
  moe_context ctx = {0};
  float x[64] = {0};
  uint8_t codes[64], scales[8];
  const moe_quantize_mx_args good = {.rows = 1, .columns = 64, .plain = x, .codes = codes, .scales = scales};
  const moe_dequantize_mx_args fine = {.rows = 1, .columns = 64, .plain = x, .codes = codes, .scales = scales};
#define REFUSED(field, value, status)                                  \
  do {                                                                 \
    moe_quantize_mx_args bad = good;                                   \
    bad.field = (value);                                               \
    assert_int_equal(moe_quantize_mx(&ctx, &bad), MOE_ERROR_##status); \
  } while (0)
#define REFUSED_BACK(field, value, status)                               \
  do {                                                                   \
    moe_dequantize_mx_args bad = fine;                                   \
    bad.field = (value);                                                 \
    assert_int_equal(moe_dequantize_mx(&ctx, &bad), MOE_ERROR_##status); \
  } while (0)
  REFUSED(element, (moe_element)(ELEMENTS + 1), INVALID_OPTION);
  REFUSED_BACK(element, (moe_element)-1, INVALID_OPTION);
  REFUSED(dtype, (moe_dtype)TYPES, INVALID_OPTION);
  REFUSED_BACK(dtype, (moe_dtype)TYPES, INVALID_OPTION);
  REFUSED(transposed, 2, INVALID_OPTION);
  REFUSED_BACK(transposed, -1, INVALID_OPTION);
  REFUSED(rows, -2, INVALID_SHAPE);
  REFUSED_BACK(rows, -1, INVALID_SHAPE);
  REFUSED(columns, -2, INVALID_SHAPE);
  REFUSED_BACK(columns, -1, INVALID_SHAPE);
  REFUSED(rows, INT64_MAX, OVERFLOW);
  REFUSED_BACK(columns, INT64_MAX, OVERFLOW);
  REFUSED(plain, NULL, NULL_ARGUMENT);
  REFUSED_BACK(plain, NULL, NULL_ARGUMENT);
  REFUSED(codes, NULL, NULL_ARGUMENT);
  REFUSED_BACK(codes, NULL, NULL_ARGUMENT);
  REFUSED(scales, NULL, NULL_ARGUMENT);
  REFUSED_BACK(scales, NULL, NULL_ARGUMENT);
  REFUSED(scales, codes + 63, OVERLAP);
  REFUSED_BACK(codes, (uint8_t *)x + 3, OVERLAP);
  REFUSED(plain, (char *)x + 2, MISALIGNED);
  REFUSED_BACK(plain, (char *)x + 2, MISALIGNED);
  REFUSED(scale_rule, (moe_scale_rule)RULES, INVALID_OPTION);
  REFUSED(cast, 8, INVALID_OPTION);
  REFUSED(cast, MOE_CAST_HALF_AWAY | MOE_CAST_HALF_TO_ZERO, INVALID_OPTION);
  assert_int_equal(moe_quantize_mx(&ctx, NULL), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(moe_dequantize_mx(&ctx, NULL), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(moe_quantize_mx(&ctx, &good), MOE_OK);
  assert_int_equal(moe_dequantize_mx(&ctx, &fine), MOE_OK);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      EACH_ELEMENT(test_every_pair), EACH_ELEMENT(test_every_bf16), EACH_ELEMENT(test_lengths),
      EACH_ELEMENT(test_large),      EACH_ELEMENT(test_items),      cmocka_unit_test(test_bad_arguments),
  };
  return cmocka_run_group_tests_name("mx", tests, NULL, NULL);
}
