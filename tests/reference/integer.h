/* The reference in int64, for inputs and activations that stay integral: names end in _i64. */
#ifndef REFERENCE_INTEGER_H
#define REFERENCE_INTEGER_H

#include "reference/blocks.h"

static inline int64_t act_i64(const moe_layer_config *o, int64_t x) {
  int64_t positive = x > 0 ? x : 0;
  return o->activation == MOE_ACT_RELU ? positive : o->activation == MOE_ACT_SQUARED_RELU ? positive * positive : x;
}

static inline int64_t act_grad_i64(const moe_layer_config *o, int64_t x) {
  return o->activation == MOE_ACT_RELU ? x > 0 : o->activation == MOE_ACT_SQUARED_RELU ? (x > 0 ? 2 * x : 0) : 1;
}

/* v to the nearest integer of at most `digits` significant bits, ties to even. */
static inline int64_t ref_round_i64(int64_t v, int digits) {
  uint64_t magnitude = v < 0 ? (uint64_t)-v : (uint64_t)v;
  int shift = 0;
  while (magnitude >> shift >> digits) ++shift;
  if (shift) {
    uint64_t kept = magnitude >> shift, rest = magnitude & ((UINT64_C(1) << shift) - 1),
             half = UINT64_C(1) << (shift - 1);
    kept += rest > half || (rest == half && (kept & 1));
    magnitude = kept << shift;
  }
  return v < 0 ? -(int64_t)magnitude : (int64_t)magnitude;
}

#define REAL int64_t
#define REF(name) name##_i64
#define REF_PART(x) ((double)(x))
#include "reference/layer.inl"
#undef REAL
#undef REF
#undef REF_PART

#endif /* REFERENCE_INTEGER_H */
