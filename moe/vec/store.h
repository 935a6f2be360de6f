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

#endif
