/* Random numbers, element formats and typed tensors for the tests. The formats are written here a second time, in plain
   arithmetic, so that the library's own conversions are never their own judge. */
#ifndef TEST_FILL_H
#define TEST_FILL_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moe.h"
#include "support/dtype.h"
#include "support/random.h"

/* ------------------------------------------------------------------------------------------------- random numbers */

static inline double test_unit(uint64_t *rng) { return (double)(test_random(rng) >> 11) * 0x1p-53; } /* [0,1) */
static inline double test_signed(uint64_t *rng) { return 2.0 * test_unit(rng) - 1.0; }
static inline int test_with(uint64_t *rng, double probability) { return test_unit(rng) < probability; }

/* MOE_TEST_SEED (decimal or 0x...), or the given default. */
static inline uint64_t test_seed(uint64_t fallback) {
  const char *text = getenv("MOE_TEST_SEED");
  return text && *text ? strtoull(text, NULL, 0) : fallback;
}

/* The seed of case number `index`: unrelated streams from neighbouring seeds. */
static inline uint64_t test_case_seed(uint64_t seed, uint64_t index) {
  uint64_t state = seed ^ (index * UINT64_C(0xd1342543de82ef95));
  return test_random(&state);
}

/* ------------------------------------------------------------------------------------------------ element formats */

static inline const char *test_dtype_name(moe_dtype dtype) { return test_dtypes[dtype].name; }

/* Significant bits, and the exponent of the last bit of a subnormal. */
static inline int test_dtype_digits(moe_dtype dtype) { return test_dtypes[dtype].fraction_bits + 1; }
static inline int test_dtype_tiny(moe_dtype dtype) {
  return 1 - test_dtype_bias(dtype) - test_dtypes[dtype].fraction_bits;
}
static inline double test_dtype_max(moe_dtype dtype) {
  return ldexp(2 - ldexp(1, -test_dtypes[dtype].fraction_bits), test_dtype_bias(dtype));
}

/* The distance between neighbouring numbers of the format at |x|. */
static inline double test_dtype_ulp(moe_dtype dtype, double x) {
  int exponent = test_dtype_tiny(dtype);
  if (x != 0 && isfinite(x)) {
    int own = ilogb(x) - test_dtype_digits(dtype) + 1;
    if (own > exponent) exponent = own;
  }
  return ldexp(1.0, exponent);
}

/* Round to nearest even in the format; beyond its range, infinity. */
static inline double test_dtype_round(moe_dtype dtype, double x) {
  if (!isfinite(x)) return x;
  double ulp = test_dtype_ulp(dtype, x), y = nearbyint(x / ulp) * ulp;
  return fabs(y) > test_dtype_max(dtype) ? copysign(INFINITY, x) : y;
}

static inline double test_dtype_decode(moe_dtype dtype, uint32_t bits) {
  const int digits = test_dtypes[dtype].fraction_bits;
  const uint32_t magnitude = bits & (test_dtype_sign(dtype) - 1), fraction = magnitude & ((1u << digits) - 1);
  const int exponent = (int)(magnitude >> digits), tiny = test_dtype_tiny(dtype);
  double value = exponent ? ldexp((double)(fraction | 1u << digits), exponent - 1 + tiny) : ldexp(fraction, tiny);
  if (magnitude >= test_dtype_infinity(dtype)) value = fraction ? NAN : INFINITY;
  return bits & test_dtype_sign(dtype) ? -value : value;
}

static inline uint32_t test_dtype_encode(moe_dtype dtype, double x) { /* x: a value of the type; NaN is canonical */
  const int digits = test_dtypes[dtype].fraction_bits, tiny = test_dtype_tiny(dtype);
  const uint32_t sign = signbit(x) ? test_dtype_sign(dtype) : 0, infinity = test_dtype_infinity(dtype);
  const double magnitude = fabs(x);
  if (isnan(x)) return infinity | infinity >> 1;
  if (isinf(x)) return sign | infinity;
  if (magnitude < ldexp(1, tiny + digits)) return sign | (uint32_t)ldexp(magnitude, -tiny);
  const int exponent = ilogb(magnitude);
  return sign | (((uint32_t)(exponent + test_dtype_bias(dtype) - 1) << digits) +
                 (uint32_t)ldexp(magnitude, digits - exponent));
}

/* ---------------------------------------------------------------------------------------------------------- tensors */

typedef struct test_tensor {
  moe_dtype dtype;
  int64_t count;
  void *data; /* exactly count elements */
} test_tensor;

static inline size_t test_tensor_bytes(const test_tensor *tensor) {
  return (size_t)tensor->count * moe_dtype_size(tensor->dtype);
}

static inline test_tensor test_tensor_new(moe_dtype dtype, int64_t count) {
  test_tensor tensor = {dtype, count, NULL};
  tensor.data = malloc(test_tensor_bytes(&tensor) + (count == 0));
  if (!tensor.data) abort();
  memset(tensor.data, 0x5a, test_tensor_bytes(&tensor)); /* finite in every format, and nobody stores it by chance */
  return tensor;
}

static inline void test_tensor_free(test_tensor *tensor) {
  free(tensor->data);
  tensor->data = NULL;
}

static inline double test_tensor_get(const test_tensor *tensor, int64_t i) {
  if (tensor->dtype == MOE_DTYPE_F32) return (double)((const float *)tensor->data)[i];
  return test_dtype_decode(tensor->dtype, ((const uint16_t *)tensor->data)[i]);
}

/* Stores x rounded to nearest even. */
static inline void test_tensor_set(test_tensor *tensor, int64_t i, double x) {
  const double rounded = test_dtype_round(tensor->dtype, x);
  if (tensor->dtype == MOE_DTYPE_F32)
    ((float *)tensor->data)[i] = (float)rounded;
  else
    ((uint16_t *)tensor->data)[i] = (uint16_t)test_dtype_encode(tensor->dtype, rounded);
}

static inline void test_tensor_zero(test_tensor *tensor) { memset(tensor->data, 0, test_tensor_bytes(tensor)); }

static inline void test_tensor_copy(test_tensor *to, const test_tensor *from) { /* same dtype and count */
  memcpy(to->data, from->data, test_tensor_bytes(from));
}

/* The index of the first element whose bits differ, -1 when none does. */
static inline int64_t test_tensor_differs(const test_tensor *a, const test_tensor *b) {
  size_t size = moe_dtype_size(a->dtype);
  if (memcmp(a->data, b->data, test_tensor_bytes(a)) == 0) return -1;
  for (int64_t i = 0; i < a->count; ++i)
    if (memcmp((const char *)a->data + (size_t)i * size, (const char *)b->data + (size_t)i * size, size) != 0) return i;
  return -1;
}

/* Uniform in [-scale,scale]. */
static inline void test_fill_uniform(test_tensor *tensor, uint64_t *rng, double scale) {
  for (int64_t i = 0; i < tensor->count; ++i) test_tensor_set(tensor, i, scale * test_signed(rng));
}

/* Integers in [-limit,limit], non-zero with the given probability. */
static inline void test_fill_integers(test_tensor *tensor, uint64_t *rng, double density, int64_t limit) {
  for (int64_t i = 0; i < tensor->count; ++i) {
    int64_t value = test_with(rng, density) ? test_random_range(rng, 1, limit) : 0;
    test_tensor_set(tensor, i, (double)(test_with(rng, 0.5) ? value : -value) + 0.0);
  }
}

#endif /* TEST_FILL_H */
