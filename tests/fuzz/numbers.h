/* numbers.h: plain tensors as floats, and random numbers of an element. */
#ifndef MOE_FUZZ_NUMBERS_H
#define MOE_FUZZ_NUMBERS_H

#include "call.h"
#include "support/dtype.h"
#include "support/mx_quantize_oracle.h"

static moe_dtype fuzz_or_f32(moe_dtype dtype) { return dtype == MOE_DTYPE_DEFAULT ? MOE_DTYPE_F32 : dtype; }

static float *fuzz_as_floats(moe_dtype dtype, const void *data, int64_t n) {
  float *x = (float *)fuzz_memory(n * 4);
  if (fuzz_or_f32(dtype) == MOE_DTYPE_F32)
    (void)moe_f32_to_f32(NULL, x, (const float *)data, n);
  else
    (void)test_to_f32(dtype, x, data, n);
  return x;
}

static void fuzz_from_floats(moe_dtype dtype, void *data, const float *x, int64_t n) {
  if (fuzz_or_f32(dtype) == MOE_DTYPE_F32)
    (void)moe_f32_from_f32(NULL, (float *)data, x, n);
  else
    (void)test_from_f32(dtype, data, x, n);
}

/* Random numbers of an element, and its largest at every `step` from the first. */
static void fuzz_numbers(fuzz_call *c, const struct element *f, uint8_t *codes, int64_t n, int64_t step) {
  for (int64_t i = 0; i < n; i++) {
    const uint64_t r = test_random(&c->rng);
    const int magnitude = i % step == 0 ? f->last : (int)(r % (uint64_t)(f->last + 1));
    const int negative = r >> 63 && (magnitude > 0 || f->nan != 0x80); /* where -0 is no number */
    element_put(f, codes, i, magnitude | negative << (f->bits - 1));
  }
}

#endif /* MOE_FUZZ_NUMBERS_H */
