/* Small-m products of bf16 by dot products of pairs of k: half the arithmetic of small_m_rows.inl, to the same bits. B
   is prefetched in the order it lies in, which memory sends fastest. A prefetch is dropped while too many are pending,
   so everything is prefetched several times (one row on one Zen 4 core, share of the rate of reading alone: once 0.75,
   twice 0.86, three times 0.94, four times 0.97). */

enum {
  MOE_K(strip) = MOE_NR / 2, /* columns at a time */
  MOE_K(strip_deep) = 8,     /* of so many rows of B, */
  MOE_K(strip_flat) = 4,     /*   or so many where sums, which move more often then, */
  MOE_K(strip_few) = 2,      /*   are less than what is in flight from memory: up to so many rows */
  MOE_K(strip_tries) = 4     /* times that a line is prefetched, at most */
};

/* The pairs of k from `from` on of all rows. */
MOE_INLINE void MOE_K(strip_rows)(int deep, const moe_small_m_ *s, int64_t from, uint32_t *pairs) {
  const float *x = s->x + from;
  for (int64_t r = 0; r < s->rows; r++, x += s->x_stride)
    for (int q = 0; q < deep; q += 2, pairs++)
      *pairs = moe_loadi_scalar(x + q) >> 16 | (moe_loadi_scalar(x + q + 1) & 0xffff0000u);
}

/* All rows of A times a strip. */
MOE_INLINE void MOE_K(strip_multiply)(int deep, const moe_small_m_ *s, const char *src, const uint32_t *pairs,
                                      float *c) {
  MOE_V(i) b[MOE_K(strip_deep) / 2][MOE_K(strip) / MOE_W];
  MOE_UNROLL
  for (int q = 0; q < deep; q += 2, src += 2 * s->stride)
    MOE_K(pair_rows)(MOE_V(loadi)(src), MOE_V(loadi)(src + s->stride), b[q / 2]);
  for (int64_t r = 0; r < s->rows; r++, c += MOE_NR) {
    MOE_V(f) low = MOE_V(load)(c), high = MOE_V(load)(c + MOE_W);
    MOE_UNROLL
    for (int q = 0; q < deep / 2; q++, pairs++) {
      const MOE_V(i) a = MOE_V(set1i)(*pairs);
      low = MOE_K(dot2)(a, b[q][0], low);
      high = MOE_K(dot2)(a, b[q][1], high);
    }
    MOE_V(store)(c, low);
    MOE_V(store)(c + MOE_W, high);
  }
}

/* `deep` lines of what comes next, and of what lies `again` bytes behind each. */
MOE_INLINE void MOE_K(strip_prefetch)(int deep, int tries, const char *from, int64_t again) {
  MOE_UNROLL
  for (int i = 0; i < MOE_K(strip_tries); i++, from += again)
    if (i < tries) {
      MOE_UNROLL
      for (int q = 0; q < deep; q++) __builtin_prefetch(from + 64 * q, 0, 2);
    }
}

/* All rows of A times `deep` rows of B. Meanwhile as many later ones are prefetched, row after row: all of them or,
   where parts are not contiguous, one part's, again with the row before. What then exceeds a row's end takes lines
   behind it for the next one's first, which have been prefetched with the row at hand. (To end exactly takes 2 to 7 %
   longer: measured.) */
MOE_INLINE void MOE_K(strip_of_rows)(int deep, int tries, const moe_small_m_ *s, int64_t from) {
  const int64_t wide = MOE_K(strip), width = MOE_NR / s->parts, run = s->n * s->size, stride = s->stride;
  const int contiguous = s->contiguous;
  const char *next = s->base[0] + (from + deep) * stride;
  uint32_t pairs[MOE_SMALL_M_BF16 * MOE_K(strip_deep) / 2];
  MOE_K(strip_rows)(deep, s, from, pairs);
  for (int64_t part = 0; part < s->parts; part++) {
    float *c = s->c + part * width;
    int64_t left = run; /* bytes of the row that is prefetched */
    if (!contiguous) next = s->base[part] + (from + deep) * stride;
    for (int64_t j = 0; j < s->n; j += wide, c = moe_small_m_c_(s, c, j, wide, width), next += 64 * deep) {
      const char *src = s->base[part] + from * stride + j * s->size;
      if (contiguous) {
        MOE_K(strip_prefetch)(deep, tries, next, MOE_PREFETCH_REPEAT_BYTES);
      } else {
        MOE_K(strip_prefetch)(deep, tries, next, stride);
        if ((left -= 64 * deep) <= 0) next += stride - run, left += run;
      }
      if (s->n - j >= wide) MOE_K(strip_multiply)(deep, s, src, pairs, c);
      else MOE_V(small_m_rest)(s, src, deep, s->n - j, s->x + from, c);
    }
  }
}

/* Returns what is left of k. */
MOE_INLINE int64_t MOE_K(strips)(int deep, int tries, const moe_small_m_ *s) {
  int64_t from = 0;
  for (; from + deep <= s->k; from += deep) MOE_K(strip_of_rows)(deep, tries, s, from);
  return s->k - from;
}

/* The fewer rows, the more often lines are prefetched. */
MOE_FN void MOE_K(small_m_bf16)(const moe_small_m_ *s) {
  moe_small_m_ rest = *s;
  if (s->rows <= MOE_K(strip_few)) rest.k = MOE_K(strips)(MOE_K(strip_flat), MOE_K(strip_tries) + 1 - (int)s->rows, s);
  else rest.k = MOE_K(strips)(MOE_K(strip_deep), 2, s);
  rest.x += s->k - rest.k;
  for (int64_t part = 0; part < s->parts; part++) rest.base[part] += (s->k - rest.k) * s->stride;
  if (rest.k > 0) MOE_V(small_m)(&rest);
}
