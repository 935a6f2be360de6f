/* Sizes with overflow checks. A negative size means that it overflowed, and every operation on it gives one. */
#ifndef MOE_BASE_SIZE_H
#define MOE_BASE_SIZE_H

#define MOE_SIZE_MAX_ (INT64_MAX < PTRDIFF_MAX ? INT64_MAX : (int64_t)PTRDIFF_MAX)

MOE_INLINE int64_t moe_mul_(int64_t a, int64_t b) {
  int64_t r;
  return a < 0 || b < 0 || __builtin_mul_overflow(a, b, &r) || r > MOE_SIZE_MAX_ ? -1 : r;
}

MOE_INLINE int64_t moe_add_(int64_t a, int64_t b) {
  int64_t r;
  return a < 0 || b < 0 || __builtin_add_overflow(a, b, &r) || r > MOE_SIZE_MAX_ ? -1 : r;
}

MOE_INLINE int64_t moe_mul3_(int64_t a, int64_t b, int64_t c) { return moe_mul_(moe_mul_(a, b), c); }
MOE_INLINE int64_t moe_mul4_(int64_t a, int64_t b, int64_t c, int64_t d) { return moe_mul_(moe_mul3_(a, b, c), d); }
MOE_INLINE int64_t moe_ceil_div_(int64_t a, int64_t b) { return a / b + (a % b != 0); }
MOE_INLINE int64_t moe_min_(int64_t a, int64_t b) { return a < b ? a : b; }
MOE_INLINE int64_t moe_max_(int64_t a, int64_t b) { return a > b ? a : b; }

/* The largest of the equal parts, each at most `most`, that n is divided into. */
MOE_INLINE int64_t moe_equal_part_(int64_t n, int64_t most) {
  return n > 0 ? moe_ceil_div_(n, moe_ceil_div_(n, most)) : 0;
}

MOE_INLINE int64_t moe_dtype_bytes_(moe_dtype dtype) { return (int64_t)moe_dtype_size(dtype); }

/* Where each of n counts begins, and where all end; the counts become zero. */
MOE_FN void moe_prefix_sums_(int64_t *first, int64_t *count, int64_t n) {
  first[0] = 0;
  for (int64_t i = 0; i < n; i++) {
    first[i + 1] = first[i] + count[i];
    count[i] = 0;
  }
}

#endif
