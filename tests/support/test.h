/* test.h: cmocka with what it wants included first, and the few things every test here needs. */
#ifndef MOE_TEST_TEST_H
#define MOE_TEST_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dtype.h"
#include "moe.h"
#include "random.h"

/* MOE_TEST_QUICK=1 (sanitizer builds) divides the number of cases. */
static inline int64_t test_cases(int64_t full, int64_t quick) { return getenv("MOE_TEST_QUICK") ? quick : full; }

/* Switches to exactly this instruction set; 0 when the CPU lacks it. */
static inline int test_use_isa(int isa) {
  return moe_isa_supported((moe_isa)isa) && moe_isa_limit((moe_isa)isa) == MOE_OK;
}

/* The same for cases that take the scalar one long: where they are to be few, it is left out. */
static inline int test_use_quick_isa(int isa) {
  return test_cases(1, isa != MOE_ISA_SCALAR) && test_use_isa(isa);
}

static inline void test_use_best_isa(void) { (void)moe_isa_limit((moe_isa)(TEST_ISA_COUNT - 1)); }

/* A type as a test's state. */
static inline void *test_dtype_state(moe_dtype dtype) {
  static moe_dtype all[1 + TEST_DTYPES];
  all[dtype] = dtype;
  return &all[dtype];
}

/* In a list of tests: the same one for every type, which *state points to. */
#define TEST_OF_DTYPE(test, name, NAME) \
  { #test " " #name, test, NULL, NULL, test_dtype_state(MOE_DTYPE_##NAME) }
#define EACH_DTYPE(test)           \
  TEST_OF_DTYPE(test, f32, F32),   \
  TEST_OF_DTYPE(test, bf16, BF16), \
  TEST_OF_DTYPE(test, fp16, FP16)

#endif /* MOE_TEST_TEST_H */
