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

static inline const char *test_dtype_name(moe_dtype dtype) {
  static const char *const names[] = {"default",
#define TEST_NAME_(name, type, NAME) #name,
                                      MOE_DTYPE_LIST(TEST_NAME_)
#undef TEST_NAME_
  };
  return names[dtype];
}

/* Significant bits, and the exponent of the last bit of a subnormal. */
static inline int test_dtype_digits(moe_dtype dtype) {
  return dtype == MOE_DTYPE_F32 ? 24 : dtype == MOE_DTYPE_BF16 ? 8 : 11;
}
static inline int test_dtype_tiny(moe_dtype dtype) {
  return dtype == MOE_DTYPE_F32 ? -149 : dtype == MOE_DTYPE_BF16 ? -133 : -24;
}
static inline double test_dtype_max(moe_dtype dtype) {
  return dtype == MOE_DTYPE_F32 ? 0x1.fffffep127 : dtype == MOE_DTYPE_BF16 ? 0x1.fep127 : 65504.0;
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

static inline double test_fp16_decode(uint16_t bits) {
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                     : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                    : ldexp(fraction, -24);
  return bits & 0x8000 ? -magnitude : magnitude;
}

static inline uint16_t test_fp16_encode(double x) { /* x: a value of the format */
  unsigned sign = signbit(x) ? 0x8000u : 0u;
  double magnitude = fabs(x);
  if (isnan(x)) return 0x7e00;
  if (isinf(x)) return (uint16_t)(sign | 0x7c00);
  if (magnitude < 0x1p-14) return (uint16_t)(sign | (unsigned)ldexp(magnitude, 24));
  int exponent = ilogb(magnitude);
  return (uint16_t)(sign | ((unsigned)(exponent + 15) << 10) | ((unsigned)ldexp(magnitude, 10 - exponent) - 1024u));
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
  uint16_t bits = ((const uint16_t *)tensor->data)[i];
  if (tensor->dtype == MOE_DTYPE_FP16) return test_fp16_decode(bits);
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return (double)value;
}

/* Stores x rounded to nearest even. */
static inline void test_tensor_set(test_tensor *tensor, int64_t i, double x) {
  double rounded = test_dtype_round(tensor->dtype, x);
  if (tensor->dtype == MOE_DTYPE_F32) {
    ((float *)tensor->data)[i] = (float)rounded;
  } else if (tensor->dtype == MOE_DTYPE_FP16) {
    ((uint16_t *)tensor->data)[i] = test_fp16_encode(rounded);
  } else {
    float value = (float)rounded;
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    ((uint16_t *)tensor->data)[i] = (uint16_t)(wide >> 16);
  }
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
