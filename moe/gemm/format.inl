/* What each storage format provides: rows to and from float, rows packed into f32 panels, its loads within the kernels
   that are one for all formats. Included once per format. */

MOE_INLINE void MOE_KF(load_one)(float *dst, const char *src, int64_t n) {
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE);
  int64_t i = 0;
  for (; i + MOE_W <= n; i += MOE_W) MOE_V(store)(dst + i, MOE_VF(load)(src + i * size));
  if (i < n) MOE_V(storen)(dst + i, MOE_VF(loadn)(src + i * size, n - i), n - i);
}

MOE_FN void MOE_KF(load_rows)(float *dst, int64_t pitch, const moe_rows_ *src, int64_t rows, int64_t n) {
  for (int64_t i = 0; i < rows; i++, dst += pitch) MOE_KF(load_one)(dst, moe_row_(src, i), n);
}

MOE_INLINE void MOE_KF(store_one)(char *dst, const float *src, int64_t n) {
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE);
  int64_t i = 0;
  for (; MOE_FORMAT_UPPER && i + 2 * MOE_W <= n; i += 2 * MOE_W)
    MOE_V(store_uppers)(dst + i * size, MOE_V(load)(src + i), MOE_V(load)(src + i + MOE_W));
  for (; i + MOE_W <= n; i += MOE_W) MOE_VF(store)(dst + i * size, MOE_V(load)(src + i));
  if (i < n) MOE_VF(storen)(dst + i * size, MOE_V(loadn)(src + i, n - i), n - i);
}

MOE_FN void MOE_KF(store_rows)(void *dst, int64_t stride, const int32_t *index, const float *src, int64_t rows,
                               int64_t n) {
  char *row = (char *)dst;
  for (int64_t i = 0; i < rows; i++, row += stride, src += MOE_NR)
    MOE_KF(store_one)(index ? (char *)dst + index[i] * stride : row, src, n);
}

MOE_FN uint32_t MOE_KF(magnitude)(const void *x, int64_t n) {
  if (sizeof(MOE_FORMAT_TYPE) == 4) return MOE_V(topi)(MOE_K(largest)((const char *)x, n, 4));
  uint16_t most[2] = {(uint16_t)MOE_K(largest_u16)(x, n), 0};
  return MOE_V(topi)(MOE_V(casti)(MOE_VF(loadn)((const char *)most, 1)));
}

/* Whole rows of `vectors` vectors each, the loop over them unrolled. */
MOE_INLINE void MOE_KF(pack_whole)(float *p, const moe_rows_ *rows, int64_t k, int vectors) {
  for (int64_t r = 0; r < k; r++, p += MOE_NR) {
    const char *src = moe_row_(rows, r);
    MOE_UNROLL
    for (int j = 0; j < vectors; j++)
      MOE_V(store)(p + j * MOE_W, MOE_VF(load)(src + j * MOE_W * (int64_t)sizeof(MOE_FORMAT_TYPE)));
  }
}

/* Columns [col, col+width) of an f32 panel from k rows; whole vectors of 32 or 64 columns first. */
MOE_FN void MOE_KF(pack_rows)(void *panel, int64_t col, int64_t width, const moe_rows_ *rows, int64_t k, int64_t n) {
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE), full = n / MOE_W * MOE_W;
  float *p = (float *)panel + col;
  int64_t r = 0;
  if (n == width && MOE_W > 1) {
    if (width == MOE_NR) MOE_KF(pack_whole)(p, rows, k, MOE_NR / MOE_W);
    else MOE_KF(pack_whole)(p, rows, k, MOE_NR / 2 / MOE_W);
    r = k;
    p += k * MOE_NR;
  }
  for (; r < k + (k & 1); r++, p += MOE_NR) {
    int64_t i = 0;
    if (r < k) {
      const char *src = moe_row_(rows, r);
      for (; i < full; i += MOE_W) MOE_V(store)(p + i, MOE_VF(load)(src + i * size));
      if (i < n) {
        MOE_V(store)(p + i, MOE_VF(loadn)(src + i * size, n - i));
        i += MOE_W;
      }
    }
    for (; i < width; i += MOE_W) MOE_V(store)(p + i, MOE_V(set1)(0.0f));
  }
}

/* Up to MOE_GROUPS_SOME_ groups of 32 codes, decoded to bf16 first; returns how many. */
MOE_INLINE int64_t MOE_KF(from_u16)(char *to, const uint8_t *codes, const uint8_t *scales, int64_t groups,
                                    const moe_numbers_ *q) {
  moe_bf16 u16[MOE_GROUPS_SOME_ * 32];
  const int64_t n = MOE_K(u16_back)((char *)u16, codes, scales, groups, q);
  for (int64_t i = 0; i < 32 * n; i += MOE_W, to += MOE_W * (int64_t)sizeof(MOE_FORMAT_TYPE))
    MOE_VF(store)(to, MOE_V(load_bf16)(u16 + i));
  return n;
}

#if MOE_VECTORS
/* A micro-kernel's columns of a row `offset` bytes on, half of a panel's at each of src, for ukernel_pack_b.inl. */
MOE_INLINE void MOE_KF(pack_b_load)(const char *const src[2], int64_t offset, int64_t prefetch, MOE_V(f) * b) {
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE), half = MOE_NR / 2;
  MOE_UNROLL
  for (int j = 0; j < MOE_NR_VECTORS; j++) {
    const char *from = src[j * MOE_W / half] + j * MOE_W % half * size + offset;
    b[j] = MOE_VF(load)(from);
    if (j * MOE_W * size % 64 == 0) __builtin_prefetch(from + prefetch, 0, 2);
  }
}

/* MOE_W words of each of as many columns, for small_m_columns.inl. */
MOE_INLINE const char *MOE_KF(column_words)(const char *src, int64_t *stride, float *room) {
  if (MOE_FORMAT_UPPER || sizeof(MOE_FORMAT_TYPE) == 4) return src;
  for (int i = 0; i < MOE_W; i++, src += *stride) MOE_V(store)(room + i * MOE_W, MOE_VF(load)(src));
  *stride = 4 * MOE_W;
  return (const char *)room;
}

/* The next vectors of B, row by row, for small_m_rows.inl. */
MOE_INLINE void MOE_KF(small_m_load)(const moe_small_m_ *s, const char *src, MOE_V(f) * b) {
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE);
  MOE_K(small_m_prefetch)(MOE_K(small_m_deep), MOE_K(small_m_wide) * (int)size, s, src);
  MOE_UNROLL
  for (int q = 0; q < MOE_K(small_m_deep); q++, src += s->stride, b += MOE_K(small_m_vectors)) {
    MOE_OPAQUE_POINTER(src);
    MOE_UNROLL
    for (int v = 0; v < MOE_K(small_m_vectors); v++) b[v] = MOE_VF(load)(src + v * MOE_W * size);
  }
}

#if MOE_SMALL_M_ONE_DEEP
/* One row's products of elements x with as many rows of B, the odd one of two first, for small_m_one.inl. */
MOE_INLINE void MOE_KF(small_m_one)(const moe_small_m_ *s, const char *src, const MOE_V(f) * x, float *c) {
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE);
  MOE_V(f) sum[MOE_K(small_m_vectors)];
  if (size < 4) MOE_K(small_m_prefetch)(MOE_SMALL_M_ONE_DEEP, MOE_K(small_m_wide) * (int)size, s, src);
  MOE_UNROLL
  for (int v = 0; v < MOE_K(small_m_vectors); v++) sum[v] = MOE_V(load)(c + v * MOE_W);
  MOE_UNROLL
  for (int q = 0; q < MOE_SMALL_M_ONE_DEEP; q++) {
    const char *row = src + (q ^ 1) * s->stride;
    MOE_UNROLL
    for (int v = 0; v < MOE_K(small_m_vectors); v++)
      sum[v] = MOE_V(fma)(x[q ^ 1], MOE_VF(load)(row + v * MOE_W * size), sum[v]);
  }
  MOE_UNROLL
  for (int v = 0; v < MOE_K(small_m_vectors); v++) MOE_V(store)(c + v * MOE_W, sum[v]);
}
#else
/* Two rows of B, for small_m_two.inl. Where prefetches are dropped more of them are made: the less arithmetic a line
   takes, the more are dropped. */
MOE_INLINE void MOE_KF(small_m_load_two)(const moe_small_m_ *s, const char *src, int64_t l1_distance, int drops,
                                         MOE_V(f) * above, MOE_V(f) * below) {
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE), stride = s->stride, prefetch = s->prefetch;
  const int64_t next = s->contiguous ? MOE_PREFETCH_REPEAT_BYTES : stride;
  MOE_UNROLL
  for (int i = 0; i < MOE_K(small_m_wide) * (int)sizeof(MOE_FORMAT_TYPE); i += 64) {
    __builtin_prefetch(src + prefetch + i, 0, 2);
    __builtin_prefetch(src + prefetch + stride + i, 0, 2);
    __builtin_prefetch(src + l1_distance + i, 0, 3);
    __builtin_prefetch(src + l1_distance + stride + i, 0, 3);
    if (!drops) continue;
    MOE_UNROLL
    for (int again = 1; again <= 4 - 64 / (size * MOE_W); again++) {
      __builtin_prefetch(src + prefetch + again * next + i, 0, 2);
      __builtin_prefetch(src + prefetch + again * next + stride + i, 0, 2);
    }
  }
  MOE_UNROLL
  for (int v = 0; v < MOE_K(small_m_vectors); v++) {
    below[v] = MOE_VF(load)(src + stride + v * MOE_W * size);
    above[v] = MOE_VF(load)(src + v * MOE_W * size);
  }
}
#endif
#endif
