/* test_formats: codes of 6 bits and integers, and groups of a row under scales of any type. Values of all codes by
   hand; moe_quantize_group, moe_dequantize_group and MXINT8 to the bit against their definitions in moe.h, written down
   a second time; the layer from such weights; bad input. */
#include "support/test.h"

#include <math.h>

#include "support/mx_quantize_oracle.h"
#include "support/pool.h"
#include "support/quantized.h"

/* -------------------------------------------------------------------------------------------------- values by hand */

static const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
static const double e2m3[] = {0,     0.125, 0.25,  0.375, 0.5,   0.625, 0.75, 0.875, 1,    1.125, 1.25,
                              1.375, 1.5,   1.625, 1.75,  1.875, 2,     2.25, 2.5,   2.75, 3,     3.25,
                              3.5,   3.75,  4,     4.5,   5,     5.5,   6,    6.5,   7,    7.5};
static const double e3m2[] = {0,     0.0625, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.4375, 0.5, 0.625, 0.75,
                              0.875, 1,      1.25,  1.5,    1.75, 2,      2.5,   3,      3.5, 4,     5,
                              6,     7,      8,     10,     12,   14,     16,    20,     24,  28};

/* Every code under the scale 1, in a group. */
static void decode_group(moe_element element, const uint8_t *codes, int64_t n, const uint8_t *zero, float *x) {
  const float one = 1;
  const moe_dequantize_group_args d = {.element = element,
                                       .rows = 1,
                                       .columns = n,
                                       .group = n,
                                       .codes = codes,
                                       .scales = &one,
                                       .zero_points = zero,
                                       .plain = x};
  assert_int_equal(moe_dequantize_group(NULL, &d), MOE_OK);
}

static void test_values(void **state) {
  (void)state;
  uint8_t codes[256];
  float x[256];
  for (int c = 0; c < 16; c++) codes[c / 2] = (uint8_t)(c % 2 ? codes[c / 2] | c << 4 : c);
  decode_group(MOE_ELEMENT_E2M1, codes, 16, NULL, x);
  for (int c = 0; c < 16; c++) assert_int_equal(bits_of(x[c]), bits_of((float)(c < 8 ? e2m1[c] : -e2m1[c - 8])));
  decode_group(MOE_ELEMENT_INT4, codes, 16, NULL, x);
  for (int c = 0; c < 16; c++) assert_true(x[c] == (float)(c < 8 ? c : c - 16));
  decode_group(MOE_ELEMENT_UINT4, codes, 16, NULL, x);
  for (int c = 0; c < 16; c++) assert_true(x[c] == (float)(c - 8));
  for (int zero = 0; zero < 256; zero += 5) {
    const uint8_t point = (uint8_t)zero;
    decode_group(MOE_ELEMENT_UINT4, codes, 16, &point, x);
    for (int c = 0; c < 16; c++) assert_true(x[c] == (float)(c - zero));
  }
  for (int c = 0; c < 64; c += 4) { /* four codes in three bytes, the first lowest */
    uint8_t *at = codes + c / 4 * 3;
    at[0] = (uint8_t)(c | (c + 1) << 6), at[1] = (uint8_t)((c + 1) >> 2 | (c + 2) << 4);
    at[2] = (uint8_t)((c + 2) >> 4 | (c + 3) << 2);
  }
  assert_int_equal(moe_e2m3_to_f32(NULL, x, codes, 64), MOE_OK);
  for (int c = 0; c < 64; c++) assert_int_equal(bits_of(x[c]), bits_of((float)(c < 32 ? e2m3[c] : -e2m3[c - 32])));
  decode_group(MOE_ELEMENT_E3M2, codes, 64, NULL, x);
  for (int c = 0; c < 64; c++) assert_int_equal(bits_of(x[c]), bits_of((float)(c < 32 ? e3m2[c] : -e3m2[c - 32])));
  for (int c = 0; c < 256; c++) codes[c] = (uint8_t)c;
  decode_group(MOE_ELEMENT_INT8, codes, 256, NULL, x);
  for (int c = 0; c < 256; c++) assert_true(x[c] == (float)(c < 128 ? c : c - 256));
  uint8_t scales[8];
  memset(scales, 130, sizeof scales);
  const moe_dequantize_mx_args mx = {
      .element = MOE_ELEMENT_MXINT8, .rows = 1, .columns = 256, .codes = codes, .scales = scales, .plain = x};
  assert_int_equal(moe_dequantize_mx(NULL, &mx), MOE_OK);
  for (int c = 0; c < 256; c++) assert_true(x[c] == (float)(c < 128 ? c : c - 256) / 8);
}

/* A tensor of NVFP4 by hand: the largest number 5376 = 6*448*2 makes the global scale 2; then a group's scale is
   amax/12, and its codes x/(2*scale). */
static void test_nvfp4_by_hand(void **state) {
  (void)state;
  const float x[32] = {5376, -5376, 4480, 2688, 448, 449, -224, 225, 672, 1344, -896, -1, 3000, 4000, 0,    1e-30f,
                       12,   11,    10,   9.5f, -9,  7,   6,    5,   4,   3,    2.5f, 2,  1.5f, 1,    0.5f, -0.25f};
  const uint8_t want[16] = {0xf7, 0x56, 0x11, 0x18, 0x32, 0x8a, 0x65, 0x00,
                            0x77, 0x66, 0x6e, 0x45, 0x34, 0x22, 0x12, 0x80};
  uint8_t codes[16], scales[2];
  float global = -1;
  const moe_quantize_group_args q = {.element = MOE_ELEMENT_E2M1,
                                     .scales_type = MOE_SCALES_E4M3FN,
                                     .rows = 1,
                                     .columns = 32,
                                     .group = 16,
                                     .plain = x,
                                     .codes = codes,
                                     .scales = scales,
                                     .global_scale = &global};
  assert_int_equal(moe_quantize_group(NULL, &q), MOE_OK);
  assert_true(global == 2);
  assert_int_equal(scales[0], 0x7e); /* 448 */
  assert_int_equal(scales[1], 0x38); /* 1 */
  for (int i = 0; i < 16; i++)
    if (codes[i] != want[i]) fail_msg("byte %d: %02x, not %02x", i, codes[i], want[i]);
}

/* ggml takes the first of its 16 values, doubled, that is nearest: MOE_CAST_HALF_TO_ZERO. */
static void test_ggml_ties(void **state) {
  (void)state;
  static const int values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  for (int i = -1000; i <= 1001; i++) {
    const float x = i == 1001 ? (float)NAN : (float)i / 128;
    int best = 0;
    uint8_t code;
    for (int c = 1; c < 16; c++)
      if (fabs(values[c] - 2 * (double)x) < fabs(values[best] - 2 * (double)x)) best = c;
    assert_int_equal(moe_e2m1_from_f32(NULL, &code, &x, 1, MOE_CAST_HALF_TO_ZERO), MOE_OK);
    if (code != best) fail_msg("%a: code %d, not %d", (double)x, code, best);
  }
}

/* From -3 to 12 in steps of 1: the scale is 12/15 + 3/15, which is 1, and codes are x + 3. And a group so wide that
   high - low is infinite. */
static void test_zero_points_by_hand(void **state) {
  (void)state;
  float x[32], back[32], scales[2];
  uint8_t codes[16], zeros[2];
  for (int i = 0; i < 16; i++) x[i] = (float)(i - 3), x[16 + i] = (float)(i - 7) * 0x1p124f;
  const moe_quantize_group_args q = {.element = MOE_ELEMENT_UINT4,
                                     .rows = 2,
                                     .columns = 16,
                                     .group = 16,
                                     .plain = x,
                                     .codes = codes,
                                     .scales = scales,
                                     .zero_points = zeros};
  const moe_dequantize_group_args d = {.element = MOE_ELEMENT_UINT4,
                                       .rows = 2,
                                       .columns = 16,
                                       .group = 16,
                                       .codes = codes,
                                       .scales = scales,
                                       .zero_points = zeros,
                                       .plain = back};
  x[16] = -0x1.8p127f, x[31] = 0x1.8p127f;
  assert_int_equal(moe_quantize_group(NULL, &q), MOE_OK);
  assert_int_equal(moe_dequantize_group(NULL, &d), MOE_OK);
  assert_true(scales[0] == 1 && zeros[0] == 3);
  for (int i = 0; i < 8; i++) assert_int_equal(codes[i], 2 * i | (2 * i + 1) << 4);
  assert_memory_equal(x, back, 16 * sizeof *x);
  assert_true(isfinite(scales[1]) && fabsf(scales[1] / 0x1p127f - 0.2f) < 1e-6f);
  assert_int_equal(codes[8] & 15, 0);
  assert_int_equal(codes[15] >> 4, 15);
}

/* ---------------------------------------------------------------------------------------------------------- groups */

struct group {
  moe_quantize_group_args q;
  const struct element *f;
  int64_t groups, stride, count;
  float *x;               /* plain, as floats */
  struct quantized types; /* for its scales' storage */
  struct guarded codes, scales, zeros;
  uint8_t *want_codes, *want_zeros;
  float global;
};

static int rounded(double x, uint32_t cast, int most) {
  const double up = cast & MOE_CAST_HALF_AWAY      ? floor(fabs(x) + 0.5)
                    : cast & MOE_CAST_HALF_TO_ZERO ? ceil(fabs(x) - 0.5)
                                                   : rint(fabs(x));
  const int magnitude = isnan(x) ? 0 : up > most ? most : (int)up;
  return x < 0 ? -magnitude : magnitude;
}

/* The stored code of a number, after scaling; `zero`: of UINT4. */
static int wanted_code(const struct group *g, float given, float scaled, int zero) {
  const int bits = g->f->bits, special = !isfinite(given);
  const uint32_t cast = special ? g->q.cast & ~(uint32_t)MOE_CAST_SATURATE : g->q.cast;
  if ((int)g->f->id < ELEMENTS) return element_code(g->f, bits_of(special ? given : scaled), cast);
  const int v = rounded((double)scaled, g->q.cast, bits == 8 ? 127 : 15), half = 1 << (bits - 1);
  if (g->f->id == MOE_ELEMENT_UINT4) return v + zero < 0 ? 0 : v + zero > 15 ? 15 : v + zero;
  return (v < -half ? -half : v >= half ? half - 1 : v) & (2 * half - 1);
}

/* The bits of a scale of some type, nearest to x > 0; of E8M0 not below. */
static uint32_t wanted_scale(moe_scales_type type, float x) {
  uint32_t low = 0, high = 0x7bff;
  if (isnan(x))
    return type == MOE_SCALES_F32    ? 0x7fc00000u
           : type == MOE_SCALES_BF16 ? 0x7fc0u
           : type == MOE_SCALES_FP16 ? 0x7e00u
           : type == MOE_SCALES_E8M0 ? 255u
                                     : 0x7fu;
  switch (type) {
    case MOE_SCALES_F32: return bits_of(x);
    case MOE_SCALES_BF16: return (bits_of(x) + 0x7fffu + (bits_of(x) >> 16 & 1)) >> 16;
    case MOE_SCALES_E4M3FN: return (uint32_t)element_code(&elements[MOE_ELEMENT_E4M3FN], bits_of(x), MOE_CAST_SATURATE);
    case MOE_SCALES_E8M0:
      while (ldexp(1, (int)low - 127) < (double)x) low++;
      return low;
    default: break;
  }
  while (low < high) { /* up to the first whose midpoint with the next is not below x */
    const uint32_t middle = (low + high) / 2;
    const double a = (double)quantized_scale_decoded(type, middle),
                 b = (double)quantized_scale_decoded(type, middle + 1);
    const double half = middle == 0x7bff ? INFINITY : 0.5 * (a + b);
    if ((double)x > half || ((double)x == half && middle & 1)) low = middle + 1;
    else high = middle;
  }
  return low;
}

static float at_least(float x) { return fmaxf(x, 0x1p-126f); }

static void wanted_global(struct group *g) {
  float amax = 0;
  for (int64_t i = 0; i < g->count; i++)
    if (isfinite(g->x[i])) amax = fmaxf(amax, fabsf(g->x[i]));
  const volatile float all = (float)g->f->largest * 448.0f, quotient = amax / all;
  g->global = amax == 0 ? 1 : at_least(quotient);
}

/* One group: its scale, zero point and codes. */
static void wanted_group(struct group *g, int64_t row, int64_t at) {
  const int64_t from = at * g->q.group, to = from + g->q.group < g->q.columns ? from + g->q.group : g->q.columns;
  const int64_t index = row * g->groups + at;
  float amax = 0, low = 0, high = 0;
  int special = 0, zero = 8;
  for (int64_t i = from; i < to; i++) {
    const float x = g->x[row * g->q.columns + i];
    if (!isfinite(x)) special = 1;
    else amax = fmaxf(amax, fabsf(x)), low = fminf(low, x), high = fmaxf(high, x);
  }
  if (!g->q.scales_given) {
    const volatile float a = high / 15, b = low / 15, wide = a - b, plain = amax / (float)g->f->largest;
    const volatile float own = g->q.zero_points ? wide : plain, quotient = g->q.global_scale ? own / g->global : own;
    float scale = amax == 0 ? 1 : at_least(quotient);
    if (special && g->f->nan < 0) scale = NAN;
    quantized_set_scale(&g->types, index, wanted_scale(g->q.scales_type, scale));
  }
  const volatile float s = g->q.global_scale ? g->types.scale[index] * g->global : g->types.scale[index],
                       inverse = 1 / s;
  const float factor = s > 0 ? fminf(inverse, 0x1p127f) : 0;
  if (g->q.zero_points && !g->q.scales_given) {
    const volatile float point = -low * factor;
    g->want_zeros[index] = (uint8_t)rounded((double)point, g->q.cast, 15);
  }
  if (g->q.zero_points) zero = g->want_zeros[index];
  for (int64_t i = from; i < to; i++) {
    const float x = g->x[row * g->q.columns + i];
    const volatile float scaled = x * factor;
    const int code = factor > 0 ? wanted_code(g, x, scaled, zero) : wanted_code(g, 0, 0, zero);
    uint8_t *line = g->want_codes + row * g->stride;
    for (int64_t b = 0; b < g->f->bits; b++) {
      const int64_t bit = i * g->f->bits + b;
      line[bit / 8] = (uint8_t)(line[bit / 8] | (code >> b & 1) << bit % 8);
    }
  }
}

static void fail_group(const struct group *g, const char *what, int64_t at) {
  fail_msg("%s, %s[%lld]: %s scales %d cast %u dtype %d, %lldx%lld by %lld, given %d %d, global %d, zero points %d",
           moe_isa_name(moe_isa_active()), what, (long long)at, g->f->name, (int)g->q.scales_type, (unsigned)g->q.cast,
           (int)g->q.dtype, (long long)g->q.rows, (long long)g->q.columns, (long long)g->q.group, g->q.scales_given,
           g->q.global_scale_given, g->q.global_scale != NULL, g->q.zero_points != NULL);
}

static void compare(const struct group *g, const char *what, const void *want, const void *got, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i++)
    if (((const uint8_t *)want)[i] != ((const uint8_t *)got)[i]) fail_group(g, what, i);
}

/* And back, to every type. */
static void check_back(const struct group *g, moe_context *ctx) {
  float *x = malloc((size_t)g->count * 4 + 4);
  void *want = calloc((size_t)g->count + 1, 4), *got = calloc((size_t)g->count + 1, 4);
  for (int64_t i = 0; i < g->count; i++) {
    const int64_t row = i / g->q.columns, column = i % g->q.columns, index = row * g->groups + column / g->q.group;
    const uint8_t *line = g->want_codes + row * g->stride;
    int code = 0;
    for (int64_t b = 0, bit = column * g->f->bits; b < g->f->bits; b++, bit++)
      code |= (line[bit / 8] >> bit % 8 & 1) << b;
    const volatile float s = g->q.global_scale ? g->types.scale[index] * g->global : g->types.scale[index];
    const float value = (int)g->f->id < ELEMENTS
                            ? float_of(element_decoded(g->f, code))
                            : (float)integer_value(g->f, code, g->q.zero_points ? g->want_zeros[index] : 8);
    const volatile float product = value * s;
    x[i] = isnan(product) ? float_of(0x7fc00000u) : product;
  }
  for (int dtype = 0; dtype <= TEST_DTYPES; dtype++) {
    const moe_dequantize_group_args d = {.element = g->f->id,
                                         .scales_type = g->q.scales_type,
                                         .dtype = (moe_dtype)dtype,
                                         .rows = g->q.rows,
                                         .columns = g->q.columns,
                                         .group = g->q.group,
                                         .codes = g->codes.data,
                                         .scales = g->scales.data,
                                         .global_scale = g->q.global_scale,
                                         .zero_points = g->q.zero_points,
                                         .plain = got};
    assert_int_equal(test_from_f32((moe_dtype)dtype, want, x, g->count), MOE_OK);
    assert_int_equal(moe_dequantize_group(ctx, &d), MOE_OK);
    compare(g, "plain", want, got, g->count * (dtype ? (int64_t)moe_dtype_size((moe_dtype)dtype) : 4));
  }
  free(x), free(want), free(got);
}

static void fill_group(struct group *g, uint64_t *rng, void *plain) {
  const int wide = test_random_chance(rng, 2);
  for (int64_t i = 0; i < g->count; i++) {
    const int64_t row = i / g->q.columns, at = i % g->q.columns / g->q.group;
    const int exponent = wide ? (int)((row * 7 + at * 5) % 40) - 80 : -62; /* of the group */
    g->x[i] = (float)ldexp((double)(int64_t)test_random(rng), exponent - (int)test_random_range(rng, 0, 4));
    if (test_random_chance(rng, 9)) g->x[i] = 0;
    if (test_random_chance(rng, 4))
      g->x[i] = (float)ldexp((double)test_random_range(rng, -30, 30), exponent + 58); /* ties */
    if (at % 5 == 2) g->x[i] = 0;
    if (test_random_chance(rng, 300)) g->x[i] = test_random_chance(rng, 2) ? (float)INFINITY : (float)NAN;
    if (at % 7 == 3) g->x[i] = (float)ldexp((double)(i % 9), -148);
  }
  assert_int_equal(test_from_f32(g->q.dtype, plain, g->x, g->count), MOE_OK);
  assert_int_equal(test_to_f32(g->q.dtype, g->x, plain, g->count), MOE_OK);
}

static void check_group(struct group *g, uint64_t *rng) {
  struct test_pool pool = {.seed = test_random(rng)};
  moe_context ctx = {.parallel_for = test_pool_parallel_for, .parallel_for_user = &pool};
  ctx.num_threads = (int32_t)test_random_range(rng, 1, 4);
  const enum guard_side side = test_random_chance(rng, 2) ? GUARD_AFTER : GUARD_BEFORE;
  g->count = g->q.rows * g->q.columns, g->groups = (g->q.columns + g->q.group - 1) / g->q.group;
  g->stride = (g->q.columns * g->f->bits + 7) / 8;
  const int64_t scales = g->q.rows * g->groups;
  g->types = (struct quantized){.weight = {.scaling = MOE_WEIGHT_BLOCK, .scales_type = g->q.scales_type}};
  const size_t size = quantized_scale_size(&g->types);
  g->types.scale = malloc((size_t)scales * 4), g->types.raw = malloc((size_t)scales * size);
  g->x = malloc((size_t)g->count * 4), g->want_codes = calloc((size_t)(g->q.rows * g->stride), 1);
  g->want_zeros = malloc((size_t)scales);
  void *plain = malloc((size_t)g->count * 4);
  g->codes = guard_alloc((size_t)(g->q.rows * g->stride), side), g->scales = guard_alloc((size_t)scales * size, side);
  g->zeros = guard_alloc((size_t)scales, side);
  fill_group(g, rng, plain);
  float global = g->global;
  if (g->q.global_scale) g->q.global_scale = &global;
  if (g->q.global_scale && !g->q.global_scale_given) wanted_global(g);
  for (int64_t i = 0; i < scales && g->q.scales_given; i++) {
    quantized_random_scale(&g->types, i, rng, 0), g->want_zeros[i] = (uint8_t)test_random_range(rng, 0, 15);
    if (g->q.scales_type == MOE_SCALES_E4M3FN && i % 5 == 0)
      quantized_set_scale(&g->types, i, (uint32_t)(i * 29 % 127));
  }
  if (g->q.scales_given) memcpy(g->scales.data, g->types.raw, (size_t)scales * size);
  for (int64_t i = 0; i < scales; i++) {
    g->zeros.data[i] = g->want_zeros[i];
    wanted_group(g, i / g->groups, i % g->groups);
  }
  if (g->q.zero_points) g->q.zero_points = g->zeros.data;
  g->q.plain = plain, g->q.codes = g->codes.data, g->q.scales = g->scales.data;
  memset(g->codes.data, 0x5a, (size_t)(g->q.rows * g->stride));
  if (moe_quantize_group(&ctx, &g->q) != MOE_OK) fail_group(g, ctx.message, -1);
  if (g->q.global_scale) compare(g, "global_scale", &g->global, &global, 4);
  compare(g, "scales", g->types.raw, g->scales.data, scales * (int64_t)size);
  if (g->q.zero_points) compare(g, "zero_points", g->want_zeros, g->zeros.data, scales);
  compare(g, "codes", g->want_codes, g->codes.data, g->q.rows * g->stride);
  check_back(g, &ctx);
  free(g->types.scale), free(g->types.raw), free(g->x), free(g->want_codes), free(g->want_zeros), free(plain);
  guard_free(&g->codes), guard_free(&g->scales), guard_free(&g->zeros);
}

static void test_groups(void **state) {
  (void)state;
  static const int64_t lengths[] = {1, 2, 5, 16, 31, 32, 64, 65, 128, 700}, columns[] = {1, 15, 16, 33, 128, 257, 640};
  static const uint32_t casts[] = {0, MOE_CAST_SATURATE, MOE_CAST_HALF_AWAY, MOE_CAST_HALF_TO_ZERO | MOE_CAST_SATURATE};
  static uint8_t some;
  uint64_t rng = 12;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (int64_t i = 0; i < test_cases(400, 60) && test_use_isa(isa); i++) {
      struct group g = {.global = (float)ldexp(1.3, (int)test_random_range(&rng, -9, 3))};
      do g.f = element_of((moe_element)(i % (ELEMENTS + INTEGERS)));
      while (g.f->id == MOE_ELEMENT_MXINT8 && ++i);
      g.q = (moe_quantize_group_args){.element = g.f->id, .scales_type = (moe_scales_type)(i / 12 % MOE_SCALES_COUNT_)};
      g.q.cast = casts[test_random_range(&rng, 0, 3)], g.q.dtype = (moe_dtype)test_random_range(&rng, 0, TEST_DTYPES);
      g.q.rows = test_random_range(&rng, 1, 9), g.q.columns = columns[test_random_range(&rng, 0, 6)];
      g.q.group = lengths[test_random_range(&rng, 0, 9)];
      g.q.scales_given = test_random_chance(&rng, 4);
      if (test_random_chance(&rng, 2)) g.q.global_scale = &g.global;
      g.q.global_scale_given = g.q.scales_given || g.q.scales_type != MOE_SCALES_E4M3FN || test_random_chance(&rng, 2);
      if (g.f->id == MOE_ELEMENT_UINT4 && test_random_chance(&rng, 2)) g.q.zero_points = &some;
      check_group(&g, &rng);
    }
  test_use_best_isa();
}

/* Every scale byte with every code. */
static void test_every_scale(void **state) {
  (void)state;
  static uint8_t codes[256][256], scales[256];
  static float got[256][256];
  for (int i = 0; i < 65536; i++) codes[i / 256][i % 256] = (uint8_t)(i % 256), scales[i / 256] = (uint8_t)(i / 256);
  for (int i = 0; i < 2 * (ELEMENTS + INTEGERS) * TEST_ISA_COUNT; i++) {
    const struct element *f = element_of((moe_element)(i / 2 % (ELEMENTS + INTEGERS)));
    const moe_scales_type type = i % 2 ? MOE_SCALES_E4M3FN : MOE_SCALES_E8M0;
    const moe_dequantize_group_args d = {.element = f->id,
                                         .scales_type = type,
                                         .rows = 256,
                                         .columns = 2048 / f->bits,
                                         .group = 999,
                                         .codes = codes[0],
                                         .scales = scales,
                                         .plain = got};
    if (f->id == MOE_ELEMENT_MXINT8 || 2048 % f->bits || f->bits == 4 || !test_use_isa(i / 2 / (ELEMENTS + INTEGERS)))
      continue;
    assert_int_equal(moe_dequantize_group(NULL, &d), MOE_OK);
    for (int s = 0; s < 256; s++)
      for (int c = 0; c < 256; c++) {
        const volatile float product = float_of(element_decoded(f, c)) * quantized_scale_decoded(type, (uint32_t)s);
        const uint32_t want = isnan(product) ? 0x7fc00000u : bits_of(product);
        if (bits_of(got[s][c]) != want) fail_msg("%s scales %d: scale %d code %d", f->name, (int)type, s, c);
      }
  }
  test_use_best_isa();
}

/* ---------------------------------------------------------------------------------------------------------- MXINT8 */

static void test_mxint8(void **state) {
  (void)state;
  enum { ROWS = 7, COLUMNS = 143, GROUPS = 5 };
  static const uint32_t casts[] = {0, 1, 2, 3, 4, 5};
  const struct element *f = element_of(MOE_ELEMENT_MXINT8);
  static float x[ROWS * COLUMNS], back[ROWS][COLUMNS];
  static uint8_t codes[ROWS][COLUMNS], scales[ROWS][GROUPS], want[COLUMNS], byte[GROUPS];
  uint64_t rng = 3;
  for (int i = 0; i < 6 * MOE_SCALE_COUNT_ * TEST_ISA_COUNT; i++) {
    if (!test_use_isa(i / 6 / MOE_SCALE_COUNT_)) continue;
    for (int j = 0; j < ROWS * COLUMNS; j++) {
      const int exponent = j / COLUMNS == 6 ? 64 : (j / COLUMNS * 60 + j % COLUMNS / 32 * 2) - 230; /* of a group */
      x[j] = (float)ldexp((double)(int64_t)test_random(&rng), exponent - (int)test_random_range(&rng, 0, 5));
      if (test_random_chance(&rng, 3))
        x[j] = (float)ldexp((double)test_random_range(&rng, -255, 255), exponent + 55); /* ties */
      if (test_random_chance(&rng, 400)) x[j] = (float)NAN;
    }
    const moe_quantize_mx_args q = {.element = f->id,
                                    .scale_rule = (moe_scale_rule)(i / 6 % MOE_SCALE_COUNT_),
                                    .cast = casts[i % 6],
                                    .rows = ROWS,
                                    .columns = COLUMNS,
                                    .plain = x,
                                    .codes = codes[0],
                                    .scales = scales[0]};
    const moe_dequantize_mx_args d = {
        .element = f->id, .rows = ROWS, .columns = COLUMNS, .codes = codes[0], .scales = scales[0], .plain = back};
    assert_int_equal(moe_quantize_mx(NULL, &q), MOE_OK);
    assert_int_equal(moe_dequantize_mx(NULL, &d), MOE_OK);
    for (int r = 0; r < ROWS; r++) {
      mx_quantize_line(f, (int)q.scale_rule, q.cast, x + r * COLUMNS, COLUMNS, want, byte);
      if (memcmp(byte, scales[r], GROUPS) != 0)
        fail_msg("rule %d row %d: scale %d, not %d", (int)q.scale_rule, r, scales[r][0], byte[0]);
      for (int c = 0; c < COLUMNS; c++) {
        const int code = want[c] & 128 ? 256 - (want[c] & 127) : want[c];
        if (codes[r][c] != (uint8_t)code)
          fail_msg("rule %d cast %u [%d,%d]", (int)q.scale_rule, (unsigned)q.cast, r, c);
        assert_int_equal(bits_of(back[r][c]), mx_dequantized(f, byte[c / 32], codes[r][c]));
      }
    }
  }
  test_use_best_isa();
}

/* ------------------------------------------------------------------------------------------------------- the layer */

/* moe_layer_* from groups against the plain rows that they stand for, PyTorch's. */
static void check_layer(moe_element element, moe_scales_type type, int with_global) {
  enum { T = 6, H = 40, I = 56, E = 3, K = 2, BLOCK = 16 };
  static float plain[2][E * 2 * I * H], x[T * H], y[2][T][H], dy[T * H], dx[2][T][H], dw[2][T][K],
      workspace[2][1 << 19];
  static const int32_t index[T][K] = {{0, 1}, {2, 0}, {1, 2}, {0, -1}, {2, 2}, {1, 0}};
  static const float weights[T][K] = {{0.5f, 0.25f}, {1, 2}, {0.1f, 0.3f}, {1, 0}, {0.7f, 0.2f}, {0.4f, 0.6f}};
  struct quantized q[2] = {{.parts = 2, .K = H, .columns = I}, {.parts = 1, .K = I, .columns = H}};
  uint64_t rng = 5 + (uint64_t)element;
  moe_context ctx = {.num_threads = 2};
  for (int i = 0; i < T * H; i++) x[i] = (float)test_random_range(&rng, -99, 99) / 64, dy[i] = (float)(i % 13 - 6) / 8;
  for (int i = 0; i < 2; i++) {
    q[i].E = E;
    q[i].weight =
        (moe_quantized_weight){.element = element, .scaling = MOE_WEIGHT_GROUP, .scales_type = type, .block = BLOCK};
    if (with_global) q[i].weight.global_scale = weights[0];
    if (element == MOE_ELEMENT_UINT4) q[i].weight.zero_points = (const uint8_t *)workspace; /* they are made below */
    quantized_make(&q[i], &rng, 0, 0, 0, 1);
    for (int64_t row = 0; row < E * q[i].parts; row++) { /* a call for each global scale */
      const int64_t n = q[i].columns, groups = (q[i].K + BLOCK - 1) / BLOCK,
                    bytes = (q[i].K * q[i].format->bits + 7) / 8;
      const moe_dequantize_group_args d = {.element = element,
                                           .scales_type = type,
                                           .rows = n,
                                           .columns = q[i].K,
                                           .group = BLOCK,
                                           .codes = q[i].codes.data + row * n * bytes,
                                           .plain = plain[i] + row * n * q[i].K,
                                           .scales = q[i].scales.data +
                                                     row * n * groups * (int64_t)quantized_scale_size(&q[i]),
                                           .zero_points = element == MOE_ELEMENT_UINT4 ? q[i].zero + row * n * groups
                                                                                       : NULL,
                                           .global_scale = with_global ? q[i].global + row : NULL};
      assert_int_equal(moe_dequantize_group(&ctx, &d), MOE_OK);
    }
  }
  for (int stored = 0; stored < 2; stored++) {
    moe_layer l = {.T = T,
                   .H = H,
                   .I = I,
                   .E = E,
                   .K = K,
                   .x = x,
                   .topk_index = index[0],
                   .topk_weights = weights[0],
                   .gate_up = plain[0],
                   .down = plain[1],
                   .orders = {MOE_ORDER_OUT_IN, MOE_ORDER_OUT_IN, 0, 0},
                   .workspace = workspace,
                   .workspace_bytes = sizeof workspace};
    const moe_layer_grads grads = {.x = dx[stored], .topk_weights = dw[stored][0]};
    if (stored) l.gate_up = l.down = NULL, l.quantized_gate_up = &q[0].weight, l.quantized_down = &q[1].weight;
    if (moe_layer_forward_f32(&ctx, &l, y[stored], NULL) != MOE_OK) fail_msg("%s", ctx.message);
    if (moe_layer_backward_f32(&ctx, &l, NULL, dy, &grads) != MOE_OK) fail_msg("%s", ctx.message);
  }
  assert_memory_equal(y[0], y[1], sizeof y[0]);
  assert_memory_equal(dx[0], dx[1], sizeof dx[0]);
  assert_memory_equal(dw[0], dw[1], sizeof dw[0]);
  quantized_free(&q[0]), quantized_free(&q[1]);
}

static void test_layer(void **state) {
  (void)state;
  check_layer(MOE_ELEMENT_E2M1, MOE_SCALES_E4M3FN, 1);
  check_layer(MOE_ELEMENT_INT8, MOE_SCALES_F32, 0);
  check_layer(MOE_ELEMENT_INT4, MOE_SCALES_FP16, 0);
  check_layer(MOE_ELEMENT_UINT4, MOE_SCALES_BF16, 0);
  check_layer(MOE_ELEMENT_E3M2, MOE_SCALES_E8M0, 0);
  check_layer(MOE_ELEMENT_E4M3FN, MOE_SCALES_F32, 1);
}

/* ------------------------------------------------------------------------------------------------------- bad input */

#define REFUSE(assignment, wanted, sentence)                                                    \
  do {                                                                                          \
    moe_quantize_group_args q = good;                                                           \
    q.assignment;                                                                               \
    assert_int_equal(moe_quantize_group(&ctx, &q), MOE_ERROR_##wanted);                         \
    if (strncmp(ctx.message, sentence, strlen(sentence)) != 0) fail_msg("\"%s\"", ctx.message); \
  } while (0)
#define REFUSE_BACK(assignment, wanted, sentence)                                               \
  do {                                                                                          \
    moe_dequantize_group_args d = fine;                                                         \
    d.assignment;                                                                               \
    assert_int_equal(moe_dequantize_group(&ctx, &d), MOE_ERROR_##wanted);                       \
    if (strncmp(ctx.message, sentence, strlen(sentence)) != 0) fail_msg("\"%s\"", ctx.message); \
  } while (0)

static void test_bad_input(void **state) {
  (void)state;
  float plain[12] = {1}, scales[6] = {1, 1, 1, 1, 1, 1}, global = 1;
  uint8_t codes[12] = {0}, zeros[6] = {0};
  moe_context ctx = {0};
  const moe_quantize_group_args good = {.element = MOE_ELEMENT_UINT4,
                                        .rows = 3,
                                        .columns = 4,
                                        .group = 2,
                                        .plain = plain,
                                        .codes = codes,
                                        .scales = scales};
  const moe_dequantize_group_args fine = {.element = MOE_ELEMENT_UINT4,
                                          .rows = 3,
                                          .columns = 4,
                                          .group = 2,
                                          .plain = plain,
                                          .codes = codes,
                                          .scales = scales};
  assert_int_equal(moe_quantize_group(&ctx, &good), MOE_OK);
  assert_int_equal(moe_dequantize_group(&ctx, &fine), MOE_OK);
  assert_int_equal(moe_quantize_group(&ctx, NULL), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(moe_dequantize_group(&ctx, NULL), MOE_ERROR_NULL_ARGUMENT);
  REFUSE(plain = NULL, NULL_ARGUMENT, "plain");
  REFUSE(codes = NULL, NULL_ARGUMENT, "codes");
  REFUSE(scales = NULL, NULL_ARGUMENT, "scales");
  REFUSE(rows = -1, INVALID_SHAPE, "rows is negative");
  REFUSE(columns = -1, INVALID_SHAPE, "columns is negative");
  REFUSE(group = 0, INVALID_SHAPE, "group must be at least 1");
  REFUSE(element = MOE_ELEMENT_MXINT8, INVALID_OPTION, "element cannot be MXINT8, which is for MX");
  REFUSE(element = (moe_element)(ELEMENTS + INTEGERS), INVALID_OPTION, "element is not one of");
  REFUSE(element = (moe_element)-1, INVALID_OPTION, "element is not one of");
  REFUSE(scales_type = MOE_SCALES_COUNT_, INVALID_OPTION, "scales_type is not one of");
  REFUSE(dtype = (moe_dtype)77, INVALID_OPTION, "dtype is not one of");
  REFUSE(cast = 8, INVALID_OPTION, "cast has unknown bits");
  REFUSE(scales_given = 2, INVALID_OPTION, "scales_given");
  REFUSE(global_scale_given = -1, INVALID_OPTION, "global_scale_given");
  REFUSE(global_scale = &global, INVALID_OPTION, "global_scale is computed for E4M3FN scales only");
  REFUSE(scales_given = 1; q.global_scale = &global, INVALID_OPTION, "global_scale_given must be 1");
  REFUSE(element = MOE_ELEMENT_INT4; q.zero_points = zeros, INVALID_OPTION, "zero_points are for UINT4 only");
  REFUSE(rows = INT64_MAX / 2, OVERFLOW, "plain");
  REFUSE(scales = (char *)scales + 1, MISALIGNED, "scales");
  REFUSE(codes = (uint8_t *)(void *)plain, OVERLAP, "codes");
  REFUSE(zero_points = codes + 1, OVERLAP, "codes");
  REFUSE_BACK(plain = NULL, NULL_ARGUMENT, "plain");
  REFUSE_BACK(codes = NULL, NULL_ARGUMENT, "codes");
  REFUSE_BACK(scales = NULL, NULL_ARGUMENT, "scales");
  REFUSE_BACK(group = -3, INVALID_SHAPE, "group must be at least 1");
  REFUSE_BACK(element = MOE_ELEMENT_MXINT8, INVALID_OPTION, "element cannot be MXINT8");
  REFUSE_BACK(element = MOE_ELEMENT_INT8; d.zero_points = zeros, INVALID_OPTION, "zero_points are for UINT4 only");
  REFUSE_BACK(rows = INT64_MAX / 2, OVERFLOW, "plain");
  const float bad[] = {0.0f, -1.0f, INFINITY, NAN};
  for (int i = 0; i < 4; i++) {
    global = bad[i];
    REFUSE(global_scale = &global; q.global_scale_given = 1, INVALID_OPTION, "global_scale must be");
    scales[5] = i == 0 ? -0x1p-149f : bad[i];
    REFUSE(scales_given = 1, INVALID_OPTION, "scales must");
  }
  const moe_quantize_group_args none = {.group = 1};
  assert_int_equal(moe_quantize_group(&ctx, &none), MOE_OK);
  global = -1;
  const moe_quantize_group_args no_rows = {
      .group = 1, .columns = 5, .scales_type = MOE_SCALES_E4M3FN, .global_scale = &global};
  assert_int_equal(moe_quantize_group(&ctx, &no_rows), MOE_OK);
  assert_true(global == 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_values),
      cmocka_unit_test(test_nvfp4_by_hand),
      cmocka_unit_test(test_zero_points_by_hand),
      cmocka_unit_test(test_ggml_ties),
      cmocka_unit_test(test_groups),
      cmocka_unit_test(test_every_scale),
      cmocka_unit_test(test_mxint8),
      cmocka_unit_test(test_layer),
      cmocka_unit_test(test_bad_input),
  };
  return cmocka_run_group_tests_name("formats", tests, NULL, NULL);
}
