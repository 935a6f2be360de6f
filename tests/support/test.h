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

#include "moe.h"
#include "random.h"

enum { TEST_ISA_COUNT = MOE_ISA_AVX512BF16 + 1 };

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

static inline void test_use_best_isa(void) { (void)moe_isa_limit(MOE_ISA_AVX512BF16); }

/* A type as a test's state. */
static inline void *test_dtype_state(moe_dtype dtype) {
  static moe_dtype all[] = {MOE_DTYPE_DEFAULT, MOE_DTYPE_F32, MOE_DTYPE_BF16, MOE_DTYPE_FP16};
  return &all[dtype];
}

/* In a list of tests: the same one for every type, which *state points to. */
#define EACH_DTYPE(test)                                                \
  {#test " f32", test, NULL, NULL, test_dtype_state(MOE_DTYPE_F32)},    \
  {#test " bf16", test, NULL, NULL, test_dtype_state(MOE_DTYPE_BF16)},  \
  {#test " fp16", test, NULL, NULL, test_dtype_state(MOE_DTYPE_FP16)}

#endif /* MOE_TEST_TEST_H */
