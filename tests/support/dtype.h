/* dtype.h: the element types by their definitions, which share no code with the library: IEEE's, with so many bits. A
   type that is added to MOE_DTYPE_LIST gets a row here, and is then in every test of all types. */
#ifndef TEST_DTYPE_H
#define TEST_DTYPE_H

#include <stdint.h>
#include <string.h>

#include "moe.h"

#define TEST_ONE_(...) +1
enum {
  TEST_ISA_COUNT = 0 MOE_ISA_LIST(TEST_ONE_),
  TEST_DTYPES = 0 MOE_DTYPE_LIST(TEST_ONE_) /* from 1 on; MOE_DTYPE_DEFAULT is 0 */
};

/* The types in turn. */
static inline moe_dtype test_dtype_number(int64_t n) { return (moe_dtype)(MOE_DTYPE_F32 + n % TEST_DTYPES); }

struct test_dtype {
  const char *name;
  int exponent_bits, fraction_bits;
};
static const struct test_dtype test_dtypes[] = {
    {"default", 8, 23},
    {"f32", 8, 23},
    {"bf16", 8, 7},
    {"fp16", 5, 10},
};
_Static_assert(sizeof test_dtypes / sizeof *test_dtypes == 1 + TEST_DTYPES, "an element type has no row here");

static inline int test_dtype_bias(moe_dtype dtype) { return (1 << (test_dtypes[dtype].exponent_bits - 1)) - 1; }
/* Whether its range is less than binary32's. Fuzzers ask for values that are no type, too. */
static inline int test_dtype_narrow(moe_dtype dtype) {
  return (int)dtype >= 0 && (int)dtype <= TEST_DTYPES && test_dtypes[dtype].exponent_bits < 8;
}
/* The bits of infinity and of a sign. */
static inline uint32_t test_dtype_infinity(moe_dtype dtype) {
  const struct test_dtype *d = &test_dtypes[dtype];
  return ((1u << d->exponent_bits) - 1) << d->fraction_bits;
}
static inline uint32_t test_dtype_sign(moe_dtype dtype) {
  return 1u << (test_dtypes[dtype].exponent_bits + test_dtypes[dtype].fraction_bits);
}

/* Between floats and a type, by the library; f32 as it is. Not for tests of conversions. */
static inline moe_status test_from_f32(moe_dtype dtype, void *to, const float *x, int64_t n) {
  if (dtype == MOE_DTYPE_F32 || dtype == MOE_DTYPE_DEFAULT) return memcpy(to, x, (size_t)n * sizeof *x), MOE_OK;
  switch (dtype) {
#define TEST_FROM_(name, type, NAME) \
  case MOE_DTYPE_##NAME: return moe_##name##_from_f32(NULL, (type *)to, x, n);
    MOE_DTYPE_LIST(TEST_FROM_)
#undef TEST_FROM_
    default: return MOE_ERROR_INVALID_OPTION;
  }
}
static inline moe_status test_to_f32(moe_dtype dtype, float *x, const void *from, int64_t n) {
  if (dtype == MOE_DTYPE_F32 || dtype == MOE_DTYPE_DEFAULT) return memcpy(x, from, (size_t)n * sizeof *x), MOE_OK;
  switch (dtype) {
#define TEST_TO_(name, type, NAME) \
  case MOE_DTYPE_##NAME: return moe_##name##_to_f32(NULL, x, (const type *)from, n);
    MOE_DTYPE_LIST(TEST_TO_)
#undef TEST_TO_
    default: return MOE_ERROR_INVALID_OPTION;
  }
}

#endif /* TEST_DTYPE_H */
