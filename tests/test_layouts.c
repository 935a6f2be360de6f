/* test_layouts: every layout of MX weights into every other, against definitions written a second time
   (support/mx_oracle.h): all bytes, padding 0 out and ignored in; permutations; biases and scale vectors; bad input. */
#include "support/test.h"

#include "support/mx_check.h"
#include "support/pool.h"

enum { LAYOUTS = MOE_MX_LAYOUT_COUNT_, PLACEMENTS = MOE_MX_SCALES_COUNT_ };

/* Short rows, partial tiles, remainders of 384 and others, more than one packed group of scales. */
static const int64_t lengths[] = {1,   3,   4,   31,  32,  64,  96,  100, 128,  160,  188,  192,  384,
                                  416, 500, 512, 544, 700, 896, 928, 1024, 1152, 1536, 2080, 2560, 2944};
enum { LENGTHS = sizeof lengths / sizeof *lengths };

static void describe(const moe_mx_layout_args *a, const moe_context *ctx, const char *what) {
  fail_msg("%s (%s) | from %d/%d to %d/%d bits %d parts %d E %lld K %lld columns %lld logical %d threads %d", what,
           ctx->message, a->from, a->scales_from, a->to, a->scales_to, a->element_bits, a->parts, (long long)a->E,
           (long long)a->K, (long long)a->columns, a->logical_order, ctx->num_threads);
}

static void check(moe_mx_layout_args *a, uint64_t *rng) {
  struct test_pool pool = {.seed = test_random(rng)};
  moe_context ctx = {.parallel_for = test_pool_parallel_for,
                     .parallel_for_user = &pool,
                     .num_threads = (int32_t)test_random_range(rng, 1, 5)};
  ctx.schedule = (moe_schedule)test_random_range(rng, 0, 2);
  a->E = test_random_range(rng, 1, 3);
  a->columns = test_random_chance(rng, 4) ? test_random_range(rng, 60, 140) : test_random_range(rng, 1, 9);
  moe_mx_layout_bytes bytes;
  if (mx_convertible(a)) {
    const char *wrong = mx_check(&ctx, a, test_random(rng));
    if (wrong) describe(a, &ctx, wrong);
  } else if (moe_mx_layout_size(&ctx, a, &bytes) == MOE_OK) {
    describe(a, &ctx, "accepted");
  }
}

static void test_every_pair(void **state) {
  (void)state;
  uint64_t rng = 11;
  const int64_t tries = test_cases(4, 1);
  for (int i = 0; i < LAYOUTS * PLACEMENTS * LAYOUTS * PLACEMENTS * 8; i++) {
    moe_mx_layout_args a = {.from = (moe_mx_layout)(i / 8 % LAYOUTS), .to = (moe_mx_layout)(i / 8 / LAYOUTS % LAYOUTS)};
    a.scales_from = (moe_mx_scales)(i / 8 / LAYOUTS / LAYOUTS % PLACEMENTS);
    a.scales_to = (moe_mx_scales)(i / 8 / LAYOUTS / LAYOUTS / PLACEMENTS);
    a.element_bits = i & 1 ? 4 : 8, a.parts = i & 2 ? 1 : 2, a.logical_order = i >> 2 & 1;
    for (int64_t n = 0; n < tries; n++) {
      a.K = lengths[test_random_range(&rng, 0, LENGTHS - 1)];
      check(&a, &rng);
    }
  }
}

/* Every length, or every fifth by turns, between PLAIN and each. */
static void test_every_length(void **state) {
  (void)state;
  uint64_t rng = 12;
  const int step = (int)test_cases(1, 5);
  for (int i = 0; i < LAYOUTS * PLACEMENTS * 16; i++)
    for (int n = i % step; n < LENGTHS; n += step) {
      const moe_mx_layout other = (moe_mx_layout)(i / 16 % LAYOUTS);
      const moe_mx_scales scales = (moe_mx_scales)(i / 16 / LAYOUTS);
      moe_mx_layout_args a = {.from = MOE_MX_LAYOUT_PLAIN, .to = other, .scales_to = scales};
      if (i & 8) a.from = other, a.scales_from = scales, a.to = MOE_MX_LAYOUT_PLAIN, a.scales_to = MOE_MX_SCALES_OWN;
      a.element_bits = i & 1 ? 4 : 8, a.parts = i & 2 ? 1 : 2, a.logical_order = i >> 2 & 1, a.K = lengths[n];
      check(&a, &rng);
    }
}

static void test_permutation(void **state) {
  (void)state;
  moe_context ctx = {0};
  for (int l = 0; l < LAYOUTS; l++)
    for (int parts = 1; parts <= 2; parts++)
      for (int n = 0; n < LENGTHS; n++) {
        const moe_mx_layout_args a = {.element_bits = 4, .parts = parts, .K = lengths[n]};
        int64_t got[2944], want[2944], seen[2944] = {0};
        const int fits = mx_storable((moe_mx_layout)l, MOE_MX_SCALES_OWN, a.element_bits, a.parts, a.K);
        assert_int_equal(moe_nki_x4_permutation(&ctx, (moe_mx_layout)l, parts, a.K, got),
                         fits ? MOE_OK : MOE_ERROR_INVALID_SHAPE);
        if (!fits) continue;
        mx_order((moe_mx_layout)l, parts, a.K, want);
        assert_memory_equal(got, want, (size_t)a.K * sizeof *got);
        for (int64_t i = 0; i < a.K; i++) seen[got[i]]++;
        for (int64_t i = 0; i < a.K; i++) assert_int_equal(seen[i], 1);
      }
  int64_t index[4];
  assert_int_equal(moe_nki_x4_permutation(&ctx, (moe_mx_layout)LAYOUTS, 1, 4, index), MOE_ERROR_INVALID_OPTION);
  assert_int_equal(moe_nki_x4_permutation(&ctx, MOE_MX_LAYOUT_PLAIN, 3, 4, index), MOE_ERROR_INVALID_OPTION);
  assert_int_equal(moe_nki_x4_permutation(&ctx, MOE_MX_LAYOUT_PLAIN, 1, 0, index), MOE_ERROR_INVALID_SHAPE);
  assert_int_equal(moe_nki_x4_permutation(&ctx, MOE_MX_LAYOUT_PLAIN, 1, 4, NULL), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(moe_nki_x4_permutation(&ctx, MOE_MX_LAYOUT_PLAIN, 1, INT64_MAX, index), MOE_ERROR_OVERFLOW);
}

/* By hand: what a reader of the table in moe.h expects of a few bytes. */
static void test_known_bytes(void **state) {
  (void)state;
  uint8_t plain[64], scales[4] = {120, 121, 122, 123}, blocks[68], out_scales[4], back[64];
  /* Element k of a row is k % 16. */
  for (int i = 0; i < 64; i++) plain[i] = (uint8_t)((2 * i) % 16 + 16 * ((2 * i + 1) % 16));
  moe_mx_layout_args a = {.from = MOE_MX_LAYOUT_PLAIN,
                          .to = MOE_MX_LAYOUT_GGML,
                          .element_bits = 4,
                          .parts = 1,
                          .E = 1,
                          .K = 64,
                          .columns = 2,
                          .codes_in = plain,
                          .scales_in = scales,
                          .codes_out = blocks};
  assert_int_equal(moe_mx_layout_convert(NULL, &a), MOE_OK);
  for (int b = 0; b < 4; b++) {
    assert_int_equal(blocks[17 * b], 120 + b);
    for (int j = 0; j < 16; j++) assert_int_equal(blocks[17 * b + 1 + j], j * 17);
  }
  uint16_t words[32];
  a.to = MOE_MX_LAYOUT_NKI_STRIDED_X4, a.codes_out = words, a.scales_out = out_scales, a.logical_order = 1;
  assert_int_equal(moe_mx_layout_convert(NULL, &a), MOE_OK);
  for (unsigned p = 0; p < 16; p++) assert_int_equal(words[2 * p], p * 0x1111u); /* lanes 16 elements apart */
  assert_int_equal(out_scales[0], 120), assert_int_equal(out_scales[1], 122); /* [2,1,2]: rows are groups */
  a.to = MOE_MX_LAYOUT_NKI_1X32, a.logical_order = 0;
  assert_int_equal(moe_mx_layout_convert(NULL, &a), MOE_OK);
  assert_int_equal(words[0], 0x3210), assert_int_equal(words[3], 0x7654);
  a.from = MOE_MX_LAYOUT_PLAIN, a.to = MOE_MX_LAYOUT_GPT_OSS, a.parts = 2, a.columns = 1, a.codes_out = back;
  assert_int_equal(moe_mx_layout_convert(NULL, &a), MOE_OK);
  assert_memory_equal(back, plain, 64); /* one column: gate row 0, up row 1 */
}

/* --------------------------------------------------------------------------------------------------------- vectors */

/* [E,2,I] as [E,P,2,tiles,4], or [E,H] as [E,128,H/128], walking the device's axes. -1 is padding. */
static int64_t vector_element(const moe_nki_vector_args *a, int64_t i) {
  if (a->kind == MOE_NKI_DOWN_SCALE) {
    const int64_t c = i % (a->length / 128), p = i / (a->length / 128) % 128, e = i / a->length;
    return e * a->length + c * 128 + p;
  }
  const int64_t tiles = (a->length + 511) / 512, P = a->length >= 512 ? 128 : a->length / 4;
  const int64_t q = i % 4, t = i / 4 % tiles, g = i / 4 / tiles % 2, p = i / 8 / tiles % P, e = i / 8 / tiles / P;
  const int64_t R = a->length - 512 * t < 512 ? a->length - 512 * t : 512;
  return p < R / 4 ? (e * 2 + g) * a->length + 512 * t + q * (R / 4) + p : -1;
}

static void check_vector(moe_nki_vector_args a) {
  const int64_t size = (int64_t)moe_dtype_size(a.dtype);
  uint64_t rng = 77;
  size_t in_bytes, out_bytes;
  moe_context ctx = {0};
  a.to_nki = 1;
  assert_int_equal(moe_nki_vector_size(&ctx, &a, &in_bytes, &out_bytes), MOE_OK);
  uint8_t *plain = malloc(in_bytes), *device = malloc(out_bytes), *back = malloc(in_bytes);
  for (size_t i = 0; i < in_bytes; i++) plain[i] = (uint8_t)test_random(&rng), back[i] = 0x5a;
  memset(device, 0x5a, out_bytes);
  a.in = plain, a.out = device;
  assert_int_equal(moe_nki_vector_convert(&ctx, &a), MOE_OK);
  for (int64_t i = 0; i < (int64_t)out_bytes / size; i++) {
    static const uint8_t zero[4];
    const int64_t k = vector_element(&a, i);
    assert_memory_equal(device + i * size, k < 0 ? zero : plain + k * size, (size_t)size);
    if (k < 0) memset(device + i * size, 0xff, (size_t)size);
  }
  a.to_nki = 0, a.in = device, a.out = back;
  size_t bytes[2];
  assert_int_equal(moe_nki_vector_size(&ctx, &a, &bytes[0], &bytes[1]), MOE_OK);
  assert_true(bytes[0] == out_bytes && bytes[1] == in_bytes);
  assert_int_equal(moe_nki_vector_convert(&ctx, &a), MOE_OK);
  assert_memory_equal(back, plain, in_bytes);
  free(plain), free(device), free(back);
}

static void test_vectors(void **state) {
  (void)state;
  for (int dtype = MOE_DTYPE_F32; dtype <= TEST_DTYPES; dtype++)
    for (int n = 0; n < LENGTHS; n++)
      for (int kind = 0; kind < 2; kind++) {
        if (lengths[n] % (kind ? 128 : 4) != 0) continue;
        check_vector((moe_nki_vector_args){
            .kind = (moe_nki_vector)kind, .dtype = (moe_dtype)dtype, .E = 3, .length = lengths[n]});
      }
}

/* ---------------------------------------------------------------------------------------------------------- errors */

static uint16_t error_in[4096], error_out[4096];
static uint8_t error_scales_in[512], error_scales_out[512];

static moe_mx_layout_args error_args(void) {
  return (moe_mx_layout_args){.from = MOE_MX_LAYOUT_PLAIN,
                              .to = MOE_MX_LAYOUT_NKI_STRIDED_X4,
                              .element_bits = 4,
                              .parts = 1,
                              .E = 1,
                              .K = 64,
                              .columns = 4,
                              .codes_in = error_in,
                              .scales_in = error_scales_in,
                              .codes_out = error_out,
                              .scales_out = error_scales_out};
}

static void refused(moe_mx_layout_args a, moe_status status, const char *word) {
  moe_context ctx = {0};
  assert_int_equal(moe_mx_layout_convert(&ctx, &a), status);
  assert_int_equal(ctx.status, status);
  if (!strstr(ctx.message, word) || strlen(ctx.message) < strlen(word) + 4)
    fail_msg("\"%s\" does not name \"%s\"", ctx.message, word);
  assert_int_equal(moe_mx_layout_convert(NULL, &a), status);
  for (size_t i = 0; i < sizeof error_out / sizeof *error_out; i++) assert_int_equal(error_out[i], 0);
  for (size_t i = 0; i < sizeof error_scales_out; i++) assert_int_equal(error_scales_out[i], 0);
}

#define REFUSED(STATUS, word, ...)                 \
  do {                                             \
    moe_mx_layout_args a = error_args();           \
    __VA_ARGS__;                                   \
    refused(a, MOE_ERROR_##STATUS, word);          \
  } while (0)

static void test_errors_of_conversion(void **state) {
  (void)state;
  REFUSED(NULL_ARGUMENT, "codes_in", a.codes_in = NULL);
  REFUSED(NULL_ARGUMENT, "scales_in", a.scales_in = NULL);
  REFUSED(NULL_ARGUMENT, "codes_out", a.codes_out = NULL);
  REFUSED(NULL_ARGUMENT, "scales_out", a.scales_out = NULL);
  REFUSED(INVALID_OPTION, "from", a.from = (moe_mx_layout)LAYOUTS);
  REFUSED(INVALID_OPTION, "to", a.to = (moe_mx_layout)-1);
  REFUSED(INVALID_OPTION, "scales_from", a.scales_from = (moe_mx_scales)PLACEMENTS);
  REFUSED(INVALID_OPTION, "scales_to", a.scales_to = MOE_MX_SCALES_NKI_PACKED);
  REFUSED(INVALID_OPTION, "scales_to", a.scales_to = MOE_MX_SCALES_TILED_128X4);
  REFUSED(INVALID_OPTION, "scales_from", a.scales_from = MOE_MX_SCALES_NKI_OVERSIZED);
  REFUSED(INVALID_OPTION, "element_bits", a.element_bits = 6);
  REFUSED(INVALID_OPTION, "element_bits", a.element_bits = 8, a.to = MOE_MX_LAYOUT_GGML);
  REFUSED(INVALID_OPTION, "parts", a.parts = 3);
  REFUSED(INVALID_OPTION, "logical_order", a.logical_order = 2);
  REFUSED(INVALID_OPTION, "logical_order", a.logical_order = 1, a.to = MOE_MX_LAYOUT_GPT_OSS);
  REFUSED(INVALID_SHAPE, "E", a.E = 0);
  REFUSED(INVALID_SHAPE, "K", a.K = -64);
  REFUSED(INVALID_SHAPE, "columns", a.columns = 0);
  REFUSED(INVALID_SHAPE, "K", a.K = 63);
  REFUSED(INVALID_SHAPE, "K", a.parts = 2);
  REFUSED(INVALID_SHAPE, "K", a.K = 36, a.to = MOE_MX_LAYOUT_NKI_WRAPX);
  REFUSED(INVALID_SHAPE, "K", a.K = 36, a.to = MOE_MX_LAYOUT_GGML);
  REFUSED(INVALID_SHAPE, "bytes.codes_in", a.bytes.codes_in = 127);
  REFUSED(INVALID_SHAPE, "bytes.scales_in", a.bytes.scales_in = 7);
  REFUSED(INVALID_SHAPE, "bytes.codes_out", a.bytes.codes_out = 127);
  REFUSED(INVALID_SHAPE, "bytes.scales_out", a.bytes.scales_out = 7);
  REFUSED(UNSUPPORTED, "to", a.from = MOE_MX_LAYOUT_NKI_CONTIGUOUS_X4);
  REFUSED(OVERFLOW, "codes_in", a.E = INT64_MAX);
  REFUSED(OVERFLOW, "codes_in", a.columns = INT64_MAX);
  REFUSED(OVERFLOW, "codes_in", a.K = INT64_MAX - 3);
  REFUSED(MISALIGNED, "codes_out", a.codes_out = (uint8_t *)error_out + 1);
  REFUSED(MISALIGNED, "codes_out", a.element_bits = 8, a.codes_out = (uint8_t *)error_out + 2);
  REFUSED(MISALIGNED, "codes_in", a.to = a.from, a.from = MOE_MX_LAYOUT_NKI_1X32, a.codes_in = (uint8_t *)error_in + 1);
  REFUSED(OVERLAP, "codes_out", a.codes_in = error_out);
  REFUSED(OVERLAP, "codes_out", a.codes_in = error_out + 63);
  REFUSED(OVERLAP, "scales_out", a.scales_in = error_scales_out + 7);
  REFUSED(OVERLAP, "codes_out", a.scales_out = (uint8_t *)error_out + 127);
}

static void test_errors_of_sizes_and_vectors(void **state) {
  (void)state;
  moe_context ctx = {0};
  moe_mx_layout_bytes bytes;
  moe_mx_layout_args a = error_args();
  float x[256] = {0}, y[256] = {0};
  size_t in, out;
  assert_int_equal(moe_mx_layout_convert(&ctx, NULL), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(moe_mx_layout_size(&ctx, NULL, &bytes), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(moe_mx_layout_size(&ctx, &a, NULL), MOE_ERROR_NULL_ARGUMENT);
  moe_context bad = {.num_threads = -1};
  assert_int_equal(moe_mx_layout_convert(&bad, &a), MOE_ERROR_INVALID_OPTION);
  const moe_nki_vector_args good = {.dtype = MOE_DTYPE_F32, .to_nki = 1, .E = 1, .length = 128, .in = x, .out = y};
  moe_nki_vector_args v;
#define VECTOR(STATUS, ...) \
  v = good, __VA_ARGS__, assert_int_equal(moe_nki_vector_convert(&ctx, &v), MOE_ERROR_##STATUS)
  VECTOR(NULL_ARGUMENT, v.in = NULL);
  VECTOR(NULL_ARGUMENT, v.out = NULL);
  VECTOR(INVALID_OPTION, v.kind = MOE_NKI_COUNT_);
  VECTOR(INVALID_OPTION, v.dtype = MOE_DTYPE_DEFAULT);
  VECTOR(INVALID_OPTION, v.dtype = (moe_dtype)9);
  VECTOR(INVALID_OPTION, v.to_nki = 2);
  VECTOR(INVALID_SHAPE, v.E = 0);
  VECTOR(INVALID_SHAPE, v.length = 126);
  VECTOR(INVALID_SHAPE, v.length = 64, v.kind = MOE_NKI_DOWN_SCALE);
  VECTOR(OVERFLOW, v.E = INT64_MAX);
  VECTOR(MISALIGNED, v.in = (char *)x + 2);
  VECTOR(OVERLAP, v.out = x + 255);
  assert_int_equal(moe_nki_vector_convert(&ctx, NULL), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(moe_nki_vector_size(&ctx, &good, NULL, &out), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(moe_nki_vector_size(&ctx, &good, &in, NULL), MOE_ERROR_NULL_ARGUMENT);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_pair),
      cmocka_unit_test(test_every_length),
      cmocka_unit_test(test_permutation),
      cmocka_unit_test(test_known_bytes),
      cmocka_unit_test(test_vectors),
      cmocka_unit_test(test_errors_of_conversion),
      cmocka_unit_test(test_errors_of_sizes_and_vectors),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
