/* Numbers with a bound: v is what exact arithmetic gives, and whatever the library's binary32 arithmetic gives lies
   within v +- e. Every bound is derived from the numeric contract in moe.h; none is chosen. The double arithmetic that
   v is computed in adds 2^-53 relative per operation: UNIT and SLACK hold room for that. */
#ifndef REFERENCE_BOUNDED_H
#define REFERENCE_BOUNDED_H

#include "reference/real.h"
#include "support/fill.h"

typedef struct bounded {
  double v, e;
} bounded;

#define BOUNDED_SLACK 0x1p-50
#define BOUNDED_UNIT (0x1p-24 + BOUNDED_SLACK) /* binary32 rounds to nearest: relative 2^-24 */
#define BOUNDED_TINY 0x1p-150                  /* and in its subnormal range absolute 2^-150 */
#define BOUNDED_NORMAL 0x1p-126 /* what is flushed in the expert products of _bf16 functions is smaller */

/* n roundings one upon the other: (1+u)^n - 1 <= n*u/(1-n*u) */
static inline double bounded_gamma(int64_t n) { return (double)n * BOUNDED_UNIT / (1 - (double)n * BOUNDED_UNIT); }

static inline bounded bounded_exact(double v) { return (bounded){v, 0}; }
static inline double bounded_top(bounded x) { return fabs(x.v) + x.e; }

/* Rounded to an element type: half a unit in the last place of the largest number x may be. */
static inline bounded bounded_round(moe_dtype dtype, bounded x) {
  double top = bounded_top(x);
  return (bounded){x.v, x.e + test_dtype_ulp(dtype, top) / 2 + top * BOUNDED_SLACK};
}
static inline bounded bounded_f32(bounded x) { return bounded_round(MOE_DTYPE_F32, x); }

static inline double bounded_product_error(bounded a, bounded b) { return fabs(a.v) * b.e + a.e * (fabs(b.v) + b.e); }
static inline bounded bounded_mul(bounded a, bounded b) {
  return bounded_f32((bounded){a.v * b.v, bounded_product_error(a, b)});
}
static inline bounded bounded_add(bounded a, bounded b) { return bounded_f32((bounded){a.v + b.v, a.e + b.e}); }

/* sum += term; what is added to nothing is not rounded. */
static inline bounded bounded_accumulate(bounded sum, bounded term) {
  return sum.v == 0 && sum.e == 0 ? term : bounded_add(sum, term);
}

/* a/b; b is known not to be 0. */
static inline bounded bounded_div(bounded a, bounded b) {
  double v = a.v / b.v;
  return bounded_f32((bounded){v, (a.e + fabs(v) * b.e) / (fabs(b.v) - b.e)});
}

/* limit(x) moves no further than x does. */
static inline bounded bounded_clamp(bounded x, int use_upper, float upper, int use_lower, float lower) {
  return (bounded){clamp_f64(x.v, use_upper, upper, use_lower, lower), x.e};
}

/* Whether an element as stored may be what x became. Beyond the type's largest number it is an infinity. */
static inline int bounded_holds(moe_dtype dtype, bounded x, double stored) {
  if (isinf(stored)) return test_dtype_round(dtype, copysign(1, stored) * x.v + x.e) == INFINITY;
  return fabs(stored - x.v) <= x.e;
}

/* ----------------------------------------------------------------------------------------------------- product sums */

/* A product sum while it is formed. magnitude: sum |a*b|; carried: what the operands' own bounds amount to. */
typedef struct bounded_sum {
  double v, magnitude, carried;
  int64_t terms;
} bounded_sum;

/* What flushing can take: a subnormal operand's whole product, and of every partial result what is below 2^-126. */
static inline double bounded_flushed(double a, double b) {
  return BOUNDED_NORMAL + (a < BOUNDED_NORMAL ? BOUNDED_NORMAL * b : 0) + (b < BOUNDED_NORMAL ? BOUNDED_NORMAL * a : 0);
}

static inline void bounded_sum_add(bounded_sum *sum, bounded a, bounded b, int flush) {
  double v = a.v * b.v, e = bounded_product_error(a, b);
  sum->v += v;
  sum->magnitude += fabs(v) + e;
  sum->carried += e;
  if (flush)
    sum->carried += bounded_flushed(fabs(a.v) - a.e, bounded_top(b)) + bounded_flushed(fabs(b.v) - b.e, bounded_top(a));
  sum->terms++;
}

/* As above with an exact b, the usual case. */
static inline void bounded_sum_weight(bounded_sum *sum, bounded a, double b, int flush) {
  bounded_sum_add(sum, a, bounded_exact(b), flush);
}

/* Every term passed through at most `depth` roundings on its way into the sum. */
static inline bounded bounded_sum_depth(const bounded_sum *sum, int64_t depth) {
  return (bounded){sum->v, sum->carried + bounded_gamma(depth) * sum->magnitude + (double)sum->terms * BOUNDED_TINY};
}

/* Contract 1: one chain of fused multiply-adds, the first term rounded once per later term and once itself. */
static inline bounded bounded_chain(const bounded_sum *sum) { return bounded_sum_depth(sum, sum->terms); }

/* Contract 4, dot products of two rows: 64 elements at a time in 16 chains of 4, added pairwise (4 levels); these
   segments in order. */
static inline bounded bounded_row_dot(const bounded_sum *sum) {
  int64_t n = sum->terms, chain = n < 64 ? (n + 15) / 16 : 4;
  return bounded_sum_depth(sum, chain + 4 + (n + 63) / 64);
}

/* ------------------------------------------------------------------------------------------------------ activations */

/* The largest |f'|, rounded up: silu 1.09984, at any alpha; gelu 1.12891; gelu_tanh 1.12899. */
static inline double bounded_act_slope(const moe_layer_config *o) {
  return o->activation == MOE_ACT_GELU || o->activation == MOE_ACT_GELU_TANH ? 1.13 : 1.1;
}

/* Contract 6, and a step of the argument by its bound. */
static inline bounded bounded_act(const moe_layer_config *o, bounded x) {
  double v = act_f64(o, x.v);
  switch (o->activation) {
    case MOE_ACT_IDENTITY:
    case MOE_ACT_RELU: return (bounded){v, x.e};
    case MOE_ACT_SQUARED_RELU: { /* 2|x| is the slope as far as x may reach */
      bounded positive = {fmax(x.v, 0), x.v + x.e > 0 ? x.e : 0};
      return bounded_mul(positive, positive);
    }
    default: return (bounded){v, bounded_act_slope(o) * x.e + MOE_ACT_ERROR * BOUNDED_UNIT * bounded_top(x) + 0x1p-140};
  }
}

/* The derivative at an exact argument: the backward starts from stored numbers, so that a kink is met or not met
   exactly. */
static inline bounded bounded_act_grad(const moe_layer_config *o, double x) {
  int smooth =
      o->activation != MOE_ACT_IDENTITY && o->activation != MOE_ACT_RELU && o->activation != MOE_ACT_SQUARED_RELU;
  return (bounded){act_grad_f64(o, x), smooth ? MOE_ACT_GRAD_ERROR * BOUNDED_UNIT + 0x1p-140 : 0};
}

#endif /* REFERENCE_BOUNDED_H */
