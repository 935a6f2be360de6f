/* Stores of results, to memory that is seldom in cache: rounded once, or added to what is there. */
#ifndef MOE_VEC_STORE_H
#define MOE_VEC_STORE_H

/* Prefetches rows of `bytes` each that will be written next. Inlined: see moe_prefetch_now_. */
MOE_INLINE void moe_prefetch_to_write_(const char *at, int64_t stride, const int32_t *index, int64_t rows,
                                       int64_t bytes) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + (index ? index[i] : i) * stride + b, 1);
}

/* Arrays of so many bytes are stored non-temporally, a chunk at a time: no cache would keep them until they are read.
   */
#ifndef MOE_NT_MIN_BYTES
#define MOE_NT_MIN_BYTES (1 << 25)
#endif
enum { MOE_NT_CHUNK_ = 1 << 12 };

enum { MOE_STORE_ROWS_AT_ONCE = 16 }; /* rows that are stored while as many are prefetched */

/* store_rows with prefetches. */
MOE_FN void moe_store_rows_prefetched_(const moe_kernels *kernels, moe_dtype dtype, char *dst, int64_t stride,
                                       const int32_t *index, const float *src, int64_t rows, int64_t n) {
  const int64_t bytes = n * moe_dtype_bytes_(dtype);
  moe_prefetch_to_write_(dst, stride, index, moe_min_(rows, MOE_STORE_ROWS_AT_ONCE), bytes);
  for (int64_t now; rows > 0; rows -= now, src += now * MOE_NR) {
    now = moe_min_(rows, MOE_STORE_ROWS_AT_ONCE);
    char *next = index ? dst : dst + now * stride;
    const int32_t *next_index = index ? index + now : NULL;
    moe_prefetch_to_write_(next, stride, next_index, moe_min_(rows - now, MOE_STORE_ROWS_AT_ONCE), bytes);
    kernels->vec->store_rows[dtype](dst, stride, index, src, now, n);
    dst = next;
    index = next_index;
  }
}

/* store_rows by non-temporal stores. */
MOE_FN void moe_store_rows_nt_(const moe_kernels *kernels, moe_dtype dtype, char *dst, int64_t stride, const float *src,
                               int64_t rows, int64_t n) {
  const int64_t bytes = n * moe_dtype_bytes_(dtype);
  for (int64_t i = 0, now; i < rows; i += now, src += now * MOE_NR) {
    MOE_LINE_ALIGNED char chunk[MOE_STORE_ROWS_AT_ONCE * MOE_NR_BYTES_];
    now = moe_min_(rows - i, MOE_STORE_ROWS_AT_ONCE);
    kernels->vec->store_rows[dtype](chunk, bytes, NULL, src, now, n);
    for (int64_t r = 0; r < now; r++, dst += stride) kernels->vec->copy_nt(dst, chunk + r * bytes, bytes);
  }
}

/* sum += the rows stored, of which row i is index[i], if there is an index. */
MOE_FN void moe_add_stored_(const moe_kernels *kernels, float *sum, const char *stored, int64_t stride,
                            const int32_t *index, moe_dtype dtype, int64_t rows, int64_t n) {
  for (int64_t i = 0; i < rows; i++) {
    float old[MOE_NR];
    moe_load_row_(kernels->vec, dtype, old, stored + (index ? index[i] : i) * stride, n);
    kernels->vec->add_scaled(sum + i * MOE_NR, old, 1.0f, n);
  }
}

/* Rows of dst = sums, or dst += sums, rounded once. Sums have stride 64; they may be overwritten. */
MOE_FN void moe_store_sums_(const moe_kernels *kernels, char *dst, int64_t stride, moe_dtype dtype, float *sum,
                            int64_t rows, int64_t n, int accumulate) {
  if (accumulate) moe_add_stored_(kernels, sum, dst, stride, NULL, dtype, rows, n);
  moe_store_rows_prefetched_(kernels, dtype, dst, stride, NULL, sum, rows, n);
}

MOE_FN void moe_store_sum_(const moe_kernels *kernels, char *dst, moe_dtype dtype, float *sum, int64_t n,
                           int accumulate) {
  moe_store_sums_(kernels, dst, 0, dtype, sum, 1, n, accumulate);
}

/* x rounded to a type or, with `toward` 1 or -1, the type's next number above or below that. Floats are what they are. */
MOE_FN float moe_round_toward_(const moe_kernels *kernels, moe_dtype dtype, float x, int toward) {
  uint16_t bits;
  if (dtype == MOE_DTYPE_F32) return x;
  moe_store_row_(kernels->vec, dtype, &bits, &x, 1);
  if (toward && (bits & 0x7fffu) == 0) bits = toward > 0 ? 0x0001u : 0x8001u;
  else if (toward) bits = (uint16_t)(bits + (bits >> 15 == (toward < 0) ? 1 : -1));
  moe_load_row_(kernels->vec, dtype, &x, &bits, 1);
  return x;
}

/* A row of pre-activations between lower and upper of which some, rounded to a type, would have activations on the other
   side of their limit: these become the number next to it on their own. */
MOE_FN void moe_keep_side_(const moe_kernels *kernels, moe_dtype dtype, const moe_glu_ *glu, float lower, float upper,
                           float *x, int64_t n) {
  const float limit = glu->activation_upper;
  float rounded[MOE_NR], own[MOE_NR], others[MOE_NR];
  moe_store_row_(kernels->vec, dtype, own, x, n);
  moe_load_row_(kernels->vec, dtype, rounded, own, n);
  kernels->vec->activate(glu, x, own, NULL, n);
  kernels->vec->activate(glu, rounded, others, NULL, n);
  for (int64_t i = 0; i < n; i++)
    if ((own[i] < limit) != (others[i] < limit) && lower < x[i] && x[i] < upper)
      x[i] = moe_round_toward_(kernels, dtype, x[i], rounded[i] < x[i] ? 1 : -1);
}

/* The backward judges by stored pre-activations what is limited. Those inside their limits that would be rounded to one
   become the next number inside. Rows of x have stride 64; up: whether they are those of up. */
MOE_FN void moe_keep_inside_(const moe_kernels *kernels, moe_dtype dtype, const moe_glu_ *glu, int up, float *x,
                             int64_t rows, int64_t n) {
  const uint32_t on = glu->clamp >> (up ? 2 : 0);
  const float infinity = moe_castf_scalar(0x7f800000u);
  float upper = infinity, below = infinity, lower = -infinity, above = -infinity;
  if (dtype == MOE_DTYPE_F32) return;
  if (on & 1u) upper = up ? glu->up_upper : glu->gate_upper, below = moe_round_toward_(kernels, dtype, upper, -1);
  if (on & 2u) lower = up ? glu->up_lower : glu->gate_lower, above = moe_round_toward_(kernels, dtype, lower, 1);
  if (up == (glu->skip_gate != 0) && (glu->clamp & MOE_CLAMP_ACTIVATION_UPPER))
    for (int64_t r = 0; r < rows; r++) moe_keep_side_(kernels, dtype, glu, lower, upper, x + r * MOE_NR, n);
  if (on & 3u) kernels->vec->keep_inside(x, upper, below, lower, above, rows, n);
}

/* The limits as a type has them. */
MOE_FN void moe_round_limits_(const moe_kernels *kernels, moe_dtype dtype, moe_glu_ *glu) {
  float *limit[4] = {&glu->gate_upper, &glu->gate_lower, &glu->up_upper, &glu->up_lower};
  for (int i = 0; i < 4; i++)
    if (glu->clamp >> i & 1u) *limit[i] = moe_round_toward_(kernels, dtype, *limit[i], 0);
}

#endif
