/* input.h: choices out of the fuzzer's bytes, which are zeros once they are used up. */
#ifndef MOE_FUZZ_INPUT_H
#define MOE_FUZZ_INPUT_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moe.h"

typedef struct fuzz_input {
  const uint8_t *data;
  size_t size, at;
  int legal; /* until something was chosen that no call takes */
} fuzz_input;

static inline void fuzz_fail(const char *what, const moe_context *ctx) {
  fprintf(stderr, "%s: %s\n", what, ctx->message);
  abort();
}

static inline uint64_t fuzz_take(fuzz_input *in, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; i++) value |= (uint64_t)(in->at < in->size ? in->data[in->at++] : 0) << (8 * i);
  return value;
}

static inline int fuzz_pick(fuzz_input *in, int count) { return (int)(fuzz_take(in, 1) % (uint64_t)count); }

/* Of an enum's values 0 to count-1, seldom another. */
static inline int fuzz_enum(fuzz_input *in, int count) {
  const int byte = (int)fuzz_take(in, 1);
  if (byte < 254) return byte % count;
  in->legal = 0;
  return byte == 254 ? -1 : count;
}

/* Any int64_t now and then. */
static inline int64_t fuzz_length(fuzz_input *in, int64_t least, int64_t most, int64_t step) {
  const int kind = (int)fuzz_take(in, 1);
  const int64_t length =
      kind >= 252 ? (int64_t)fuzz_take(in, 8) : (1 + (int64_t)fuzz_take(in, 2) % most) * (kind & 1 ? step : 1);
  if (length < least) in->legal = 0;
  return length;
}

/* A floating-point element, or one that nothing takes but groups. */
static inline moe_element fuzz_element(fuzz_input *in) {
  const moe_element element = (moe_element)fuzz_enum(in, MOE_ELEMENT_MXINT8);
  return element == MOE_ELEMENT_MXINT8 ? MOE_ELEMENT_INT8 : element;
}

static inline uint32_t fuzz_cast(fuzz_input *in) { return (uint32_t)fuzz_enum(in, 6); }

/* -1 for what does not fit. */
static inline int64_t fuzz_times(int64_t a, int64_t b) {
  if (a < 0 || b < 0 || (b > 0 && a > INT64_MAX / b)) return -1;
  return a * b;
}

static inline int64_t fuzz_ceil(int64_t a, int64_t b) { return a / b + (a % b != 0); }

#endif /* MOE_FUZZ_INPUT_H */
