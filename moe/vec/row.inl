/* Operations on rows of float. */

MOE_INLINE void MOE_K(add_one)(float *sum, const float *x, const float *bias, float scale, int64_t n) {
  const MOE_V(f) s = MOE_V(set1)(scale);
  int64_t i = 0;
  for (; i + MOE_W <= n; i += MOE_W) {
    MOE_V(f) v = MOE_V(load)(x + i);
    if (bias) v = MOE_V(add)(v, MOE_V(load)(bias + i));
    MOE_V(store)(sum + i, MOE_V(add)(MOE_V(load)(sum + i), MOE_V(mul)(v, s)));
  }
  if (i < n) {
    MOE_V(f) v = MOE_V(loadn)(x + i, n - i);
    if (bias) v = MOE_V(add)(v, MOE_V(loadn)(bias + i, n - i));
    MOE_V(storen)(sum + i, MOE_V(add)(MOE_V(loadn)(sum + i, n - i), MOE_V(mul)(v, s)), n - i);
  }
}

MOE_FN void MOE_K(add_scaled)(float *sum, const float *x, float scale, int64_t n) {
  MOE_K(add_one)(sum, x, NULL, scale, n);
}

MOE_FN void MOE_K(add_rows)(float *sum, const int32_t *to, const float *x, const float *bias, const float *scale,
                            int64_t rows, int64_t n) {
  enum { prefetch = 8 }; /* rows: sums may no longer be in the second-level cache */
  for (int64_t i = to ? -prefetch : 0; i < rows; i++) {
    if (to && i + prefetch < rows)
      for (int64_t j = 0; j < n; j += 16) __builtin_prefetch(sum + to[i + prefetch] * (int64_t)MOE_NR + j, 1, 3);
    if (i < 0) continue;
    MOE_K(add_one)(sum + (to ? to[i] * (int64_t)MOE_NR : 0), x + i * MOE_NR, bias, scale ? scale[i] : 1.0f, n);
  }
}

/* Numeric contract 4: what sums of 4 vectors lack is gathered and, from the term after MOE_LONG_SUM on, added with the
   next term. An infinity lacks nothing. */
MOE_FN void MOE_K(add_long)(float *sum, float *low, const float *x, int64_t stride, const float *scale, int64_t before,
                            int64_t rows, int64_t n) {
  enum { some = 4 };
  const MOE_V(f) zero = MOE_V(set1)(0.0f), infinity = MOE_V(castf)(MOE_V(set1i)(0x7f800000u));
  for (int64_t i = 0; i < n; i += some * MOE_W) {
    MOE_V(f) s[some], lacks[some];
    int64_t left[some];
    MOE_UNROLL
    for (int j = 0; j < some; j++) {
      left[j] = moe_max_(0, moe_min_(MOE_W, n - i - j * MOE_W));
      s[j] = MOE_V(loadn)(sum + i + j * MOE_W, left[j]), lacks[j] = MOE_V(loadn)(low + i + j * MOE_W, left[j]);
    }
    for (int64_t r = 0; r < rows; r++) {
      const int late = before + r >= MOE_LONG_SUM;
      const MOE_V(f) factor = MOE_V(set1)(scale ? scale[r] : 1.0f);
      MOE_UNROLL
      for (int j = 0; j < some; j++) {
        MOE_V(f) term = MOE_V(mul)(MOE_V(loadn)(x + r * stride + i + j * MOE_W, left[j]), factor);
        if (late) term = MOE_V(add)(term, lacks[j]);
        const MOE_V(f) now = MOE_V(add)(s[j], term);
        term = MOE_V(sub)(term, MOE_V(sub)(now, s[j]));
        term = MOE_V(select)(MOE_V(lt)(MOE_K(abs)(now), infinity), term, zero);
        lacks[j] = late ? term : MOE_V(add)(lacks[j], term);
        s[j] = now;
      }
    }
    MOE_UNROLL
    for (int j = 0; j < some; j++)
      MOE_V(storen)(sum + i + j * MOE_W, s[j], left[j]), MOE_V(storen)(low + i + j * MOE_W, lacks[j], left[j]);
  }
}

MOE_FN void MOE_K(scale_row)(float *x, float scale, int64_t n) {
  for (int64_t i = 0; i < n; i += MOE_W) {
    const int64_t left = moe_min_(n - i, MOE_W);
    MOE_V(storen)(x + i, MOE_V(mul)(MOE_V(loadn)(x + i, left), MOE_V(set1)(scale)), left);
  }
}

MOE_FN void MOE_K(multiply_row)(float *x, const float *y, int64_t n) {
  int64_t i = 0;
  for (; i + MOE_W <= n; i += MOE_W) MOE_V(store)(x + i, MOE_V(mul)(MOE_V(load)(x + i), MOE_V(load)(y + i)));
  if (i < n) MOE_V(storen)(x + i, MOE_V(mul)(MOE_V(loadn)(x + i, n - i), MOE_V(loadn)(y + i, n - i)), n - i);
}

MOE_FN void MOE_K(scale_to_bf16)(float *panel, const float *scale, int64_t rows, int64_t n) {
  for (int64_t j = 0; j < n; j += MOE_W) {
    const MOE_V(f) factor = MOE_V(loadn)(scale + j, moe_min_(MOE_W, n - j));
    float *x = panel + j;
    for (int64_t r = 0; r < rows; r++, x += MOE_NR) {
      const MOE_V(i) bits = MOE_V(bf16_round)(MOE_V(canon)(MOE_V(mul)(MOE_V(load)(x), factor)));
      MOE_V(store)(x, MOE_V(castf)(MOE_V(andi)(bits, MOE_V(set1i)(0xffff0000u))));
    }
  }
}

/* Numeric contract 4: of each 64 columns 16 interleaved chains, added pairwise; the sums of 64 in order. */
MOE_FN float MOE_K(dot)(const float *a, const float *b, int64_t n) {
  float sum = 0.0f;
  for (int64_t from = 0; from < n; from += MOE_NR) {
    float chains[MOE_DOT_CHAINS] = {0};
    const int64_t to = moe_min_(n, from + MOE_NR);
    for (int64_t i = from; i < to; i += MOE_W) {
      const int64_t left = moe_min_(to - i, MOE_W);
      MOE_K(chain)(chains, i, MOE_V(loadn)(a + i, left), MOE_V(loadn)(b + i, left));
    }
    sum = sum + MOE_V(sum16)(chains);
  }
  return sum;
}

/* The larger magnitudes of two vectors' elements, of 4 or 2 bytes; those of n elements. */
MOE_INLINE MOE_V(i) MOE_K(larger)(MOE_V(i) most, const char *from, int size) {
  return size == 2 ? MOE_V(max2x16)(most, MOE_V(andi)(MOE_V(load2x16)(from), MOE_V(set1i)(0x7fff7fffu)))
                   : MOE_V(maxi)(most, MOE_V(andi)(MOE_V(loadi)(from), MOE_V(set1i)(0x7fffffffu)));
}
MOE_INLINE MOE_V(i) MOE_K(largest)(const char *from, int64_t n, int size) {
  enum { step = 4 * MOE_W, some = 4 };
  MOE_V(i) most = MOE_V(set1i)(0u);
  char few[step] = {0};
  int64_t left = n * size;
  if (left < step) /* % says so to a compiler that does not optimise */
    return memcpy(few, from, (size_t)left % step), MOE_K(larger)(most, few, size);
  for (; left >= some * step; left -= some * step, from += some * step) {
    MOE_UNROLL
    for (int j = 0; j < some; j++) most = MOE_K(larger)(most, from + j * step, size);
  }
  for (; left >= step; left -= step, from += step) most = MOE_K(larger)(most, from, size);
  return left > 0 ? MOE_K(larger)(most, from + left - step, size) : most; /* some of them again */
}

/* Of elements of two bytes, as bits. */
MOE_FN uint32_t MOE_K(largest_u16)(const void *x, int64_t n) {
  const MOE_V(i) most = MOE_K(largest)((const char *)x, n, 2);
  return MOE_V(topi)(MOE_V(andi)(MOE_V(max2x16)(most, MOE_V(srli)(most, 16)), MOE_V(set1i)(0xffffu)));
}

/* dst[j][i] = src[i][j] for i < rows, j < cols. Whole vectors are moved, so up to a vector more of both is read and
   written. Squares follow each other along the rows with the longer stride, which may share few sets of a cache. u16 >
   0: each word holds two 16-bit elements; the lower and the upper one become the upper 16 bits of a float each, in rows
   of their own: u16 rows, rounded up to even. */
MOE_FN void MOE_K(transpose_words)(char *dst, int64_t dst_stride, const char *src, int64_t stride, int64_t rows,
                                   int64_t cols, int64_t u16) {
  const int along_dst = dst_stride > stride;
  const int64_t lines = along_dst ? cols : rows, length = along_dst ? rows : cols;
  for (int64_t line = 0; line < lines; line += MOE_W)
    for (int64_t at = 0; at < length; at += MOE_W) {
      const int64_t i = along_dst ? at : line, j = along_dst ? line : at;
      char *d = dst + j * dst_stride + 4 * i;
      MOE_V(i) square[MOE_W];
      MOE_V(load_columns)(src + i * stride + 4 * j, stride, square);
      MOE_UNROLL
      for (int64_t r = 0; r < MOE_W; r++, d += dst_stride) {
        if (u16 > 0 && 2 * (j + r) >= u16) break;
        MOE_V(storei)(d, u16 > 0 ? MOE_V(slli)(square[r], 16) : square[r]);
        if (u16 > 0) MOE_V(storei)(d + dst_stride / 2, MOE_V(andi)(square[r], MOE_V(set1i)(0xffff0000u)));
      }
    }
}

MOE_FN void MOE_K(transpose_tile)(void *dst, int64_t dst_stride, const void *src, int64_t stride, int64_t rows,
                                  int64_t cols) {
  MOE_K(transpose_words)((char *)dst, dst_stride, (const char *)src, stride, rows, cols, 0);
}

/* Transposes bf16 columns two k at a time, which a word holds, the even one in its lower 16 bits. */
MOE_FN void MOE_K(transpose_u16)(float *panel, const void *columns, int64_t stride, int64_t n, int64_t k) {
  MOE_K(transpose_words)((char *)panel, 2 * MOE_NR_BYTES_, (const char *)columns, stride, n, (k + 1) / 2, k);
}

/* The same of fp16. Even and odd columns are transposed in a square each; their lower and their upper 16 bits, joined,
   are rows of the panel. */
MOE_FN void MOE_K(transpose_fp16)(float *panel, const void *columns, int64_t stride, int64_t count, int64_t k) {
  const MOE_V(i) upper = MOE_V(set1i)(0xffff0000u);
  for (int64_t n = 0; n < count; n += 2 * MOE_W)
    for (int64_t at = 0; at < k; at += 2 * MOE_W) {
      const char *from = (const char *)columns + n * stride + at * 2;
      float *to = panel + at * MOE_NR + n;
      MOE_V(i) column[2][MOE_W], u16[2];
      for (int odd = 0; odd < 2; odd++) MOE_V(load_columns)(from + odd * stride, 2 * stride, column[odd]);
      for (int r = 0; r < MOE_W; r++, to += 2 * MOE_NR) {
        if (at + 2 * r >= k) break;
        MOE_V(storei)(u16, MOE_V(mux)(MOE_V(set1i)(0xffffu), column[0][r], MOE_V(slli)(column[1][r], 16)));
        MOE_V(storei)(u16 + 1, MOE_V(mux)(upper, column[1][r], MOE_V(srli)(column[0][r], 16)));
        for (int i = 0; i < 4; i++) MOE_V(store)
        (to + i / 2 * MOE_NR + i % 2 * MOE_W, MOE_V(load_fp16)((const char *)u16 + i * 2 * MOE_W));
      }
    }
}

/* memcpy by non-temporal stores where cache lines are written in whole. */
MOE_FN void MOE_K(copy_nt)(void *dst, const void *src, int64_t bytes) {
  char *to = (char *)dst;
  const char *from = (const char *)src;
  const int64_t first = moe_min_(bytes, -(int64_t)(uintptr_t)to & 63), lines = (bytes - first) / 64 * 64;
  memcpy(to, from, (size_t)first);
  to += first, from += first;
  for (int64_t i = 0; i < lines; i += 4 * MOE_W) MOE_V(storei_nt)(to + i, MOE_V(loadi)(from + i));
  memcpy(to + lines, from + lines, (size_t)(bytes - first - lines));
}
