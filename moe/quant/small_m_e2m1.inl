/* A few rows of A times columns of e2m1 codes under scale bytes, over all of k. Weights are not scaled: the chain of
   products takes bare codes, and its sum is in units of a group's scale. From group to group it is multiplied by a
   power of two. That is exact, and all products and sums round as those of scaled weights do, unless one of them is
   subnormal or overflows. None does where scale bytes and rows of A are within the bounds of table.h, since each is a
   multiple of the least product; beyond these small_m_codes.inl is used. With MOE_DOT products are dot products of
   pairs. */

#if MOE_DOT
typedef uint32_t MOE_K(e2m1_x); /* a pair of k of a row of A */
#else
typedef float MOE_K(e2m1_x);
#endif

enum {
  MOE_K(e2m1_rows_max) = MOE_DOT ? 8 : 4,                  /* of A: for more it takes longer than small_m_codes.inl */
  MOE_K(e2m1_vectors) = MOE_NR / MOE_W,                    /* of columns: their sums hide the latency of products */
  MOE_K(e2m1_steps) = MOE_DOT ? 16 : 32,                   /* elements of x in a group, */
  MOE_K(e2m1_pitch) = MOE_E2M1_GROUPS_ * MOE_K(e2m1_steps) /*   and from row to row */
};

/* Some groups of a panel. */
typedef struct MOE_K(e2m1_groups_) {
  MOE_V(f) factor[MOE_E2M1_GROUPS_ + 1][MOE_K(e2m1_vectors)]; /* to each group's unit, and to 1 */
  MOE_K(e2m1_x) x[MOE_E2M1_ROWS_ * MOE_K(e2m1_pitch)];
  const uint8_t *base[MOE_K(e2m1_vectors)]; /* the first column of each vector */
  int64_t stride, group, groups;
  int split;
  moe_codes_prefetch_ walk;
} MOE_K(e2m1_groups);

/* The factors of vector v, which begins with column `col` of a part, from group g on. Returns whether all scale bytes
   are plain units. */
MOE_FN int MOE_K(e2m1_factors)(MOE_K(e2m1_groups) * t, int64_t v, const moe_codes_ *c, int64_t col, int64_t g) {
  const uint8_t *scale = c->scale + col * c->scale_stride + g * c->scale_group;
  MOE_V(i) words[4], before = MOE_V(set1i)(127u), outside = MOE_V(set1i)(0u);
  uint8_t bytes[MOE_W * MOE_E2M1_GROUPS_] = {0};
  int64_t stride = c->scale_stride;
  if (c->scale_group != 1 || t->groups < MOE_E2M1_GROUPS_) {
    for (int64_t i = 0; i < MOE_W; i++, scale += stride)
      for (int64_t b = 0; b < t->groups; b++) bytes[i * MOE_E2M1_GROUPS_ + b] = scale[b * c->scale_group];
    scale = bytes, stride = MOE_E2M1_GROUPS_;
  }
  MOE_V(load_groups)(scale, stride, 0, words);
  for (int64_t b = 0; b < t->groups; b++) {
    const MOE_V(i) at = MOE_V(set1i)((uint32_t)(b % 4 * 8));
    const MOE_V(i) byte = MOE_V(andi)(MOE_V(srlv)(words[b / 4], at), MOE_V(set1i)(255u));
    const MOE_V(i) exponent = MOE_V(addi)(MOE_V(subi)(before, byte), MOE_V(set1i)(127u));
    outside = MOE_V(ori)(outside, MOE_V(subi)(byte, MOE_V(set1i)(MOE_UNIT_LEAST_)));
    outside = MOE_V(ori)(outside, MOE_V(subi)(MOE_V(set1i)(MOE_UNIT_MOST_), byte));
    t->factor[b][v] = MOE_V(castf)(MOE_V(slli)(exponent, 23));
    before = byte;
  }
  t->factor[t->groups][v] = MOE_V(castf)(MOE_V(slli)(before, 23));
  return !MOE_V(anyi)(MOE_V(srli)(outside, 31));
}

/* Whether the rows of A are plain. */
MOE_FN int MOE_K(e2m1_takes_rows)(const moe_small_m_ *s) {
  MOE_V(i) outside = MOE_V(set1i)(0u);
  for (int64_t r = 0; r < s->rows; r++)
    for (int64_t i = 0; i + MOE_W <= s->k; i += MOE_W) {
      const MOE_V(i) bits = MOE_V(casti)(MOE_V(load)(s->x + r * s->x_stride + i));
      const MOE_V(i) x = MOE_V(andi)(bits, MOE_V(set1i)(0x7fffffffu));
      const MOE_V(i) less = MOE_V(subi)(x, MOE_V(set1i)(MOE_UNIT_X_LEAST_ << 23)),
                     minus = MOE_V(subi)(MOE_V(set1i)(0u), x);
      outside = MOE_V(ori)(
          outside, MOE_V(ori)(MOE_V(andi)(less, minus), MOE_V(subi)(MOE_V(set1i)((MOE_UNIT_X_MOST_ << 23) - 1u), x)));
    }
  return !MOE_V(anyi)(MOE_V(srli)(outside, 31));
}

/* Up to MOE_E2M1_ROWS_ rows from `first` on, of which the last stands in for those that are missing. */
MOE_FN void MOE_K(e2m1_load_x)(MOE_K(e2m1_groups) * t, const moe_small_m_ *s, int64_t first, int64_t at) {
  MOE_K(e2m1_x) *to = t->x;
  for (int64_t r = 0; r < MOE_E2M1_ROWS_; r++, to += MOE_K(e2m1_pitch)) {
    const float *from = s->x + moe_min_(first + r, s->rows - 1) * s->x_stride + at;
#if MOE_DOT
    for (int64_t i = 0; i < t->groups * 32; i += 2 * MOE_W)
      MOE_V(store_uppers)(to + i / 2, MOE_V(load)(from + i), MOE_V(load)(from + i + MOE_W));
#else
    memcpy(to, from, (size_t)(t->groups * 32) * sizeof *to);
#endif
  }
}

/* Pair q of eight codes of a vector of columns times some rows. */
MOE_INLINE void MOE_K(e2m1_pair)(int rows, MOE_V(i) word, int q, const MOE_K(e2m1_x) * x, MOE_V(f) * sum) {
#if MOE_DOT
  const MOE_V(i) b = MOE_K(e2m1_pair_of)(word, q);
  MOE_UNROLL
  for (int r = 0; r < rows; r++) sum[r] = MOE_K(dot2)(MOE_V(set1i)(x[r * MOE_K(e2m1_pitch) + q]), b, sum[r]);
#else
  const MOE_V(f) even = MOE_V(e2m1)(MOE_V(srli)(word, 8 * q)), odd = MOE_V(e2m1)(MOE_V(srli)(word, 8 * q + 4));
  MOE_UNROLL
  for (int r = 0; r < rows; r++) sum[r] = MOE_V(fma)(MOE_V(set1)(x[r * MOE_K(e2m1_pitch) + 2 * q + 1]), odd, sum[r]);
  MOE_UNROLL
  for (int r = 0; r < rows; r++) sum[r] = MOE_V(fma)(MOE_V(set1)(x[r * MOE_K(e2m1_pitch) + 2 * q]), even, sum[r]);
#endif
}

/* The codes of group g of all vectors. Not inlined, which would take long to compile. */
MOE_FN __attribute__((noinline)) void MOE_K(e2m1_load)(MOE_K(e2m1_groups) * t, int64_t g, MOE_V(i) (*words)[4]) {
  for (int64_t v = 0; v < MOE_K(e2m1_vectors); v++) {
    moe_codes_prefetch_next_(&t->walk);
    MOE_V(load_groups)(t->base[v] + g * t->group, t->stride, t->split, words[v]);
  }
}

MOE_INLINE void MOE_K(e2m1_multiply)(int rows, MOE_K(e2m1_groups) * t, float *c) {
  MOE_V(f) sum[MOE_K(e2m1_vectors)][MOE_E2M1_ROWS_];
  const MOE_K(e2m1_x) *x = t->x;
  MOE_UNROLL
  for (int i = 0; i < MOE_K(e2m1_vectors) * rows; i++)
    sum[i / rows][i % rows] = MOE_V(load)(c + i % rows * MOE_NR + i / rows * MOE_W);
  for (int64_t g = 0; g < t->groups; g++, x += MOE_K(e2m1_steps)) {
    MOE_V(i) words[MOE_K(e2m1_vectors)][4];
    MOE_K(e2m1_load)(t, g, words);
    MOE_UNROLL
    for (int v = 0; v < MOE_K(e2m1_vectors); v++) {
      const MOE_K(e2m1_x) *at = x, *end = x + MOE_K(e2m1_steps);
      MOE_OPAQUE_POINTER(end); /* the loop is not unrolled, likewise */
      MOE_UNROLL
      for (int r = 0; r < rows; r++) sum[v][r] = MOE_V(mul)(sum[v][r], t->factor[g][v]);
      for (const MOE_V(i) *word = words[v]; at < end; word++, at += MOE_K(e2m1_steps) / 4) {
        MOE_UNROLL
        for (int q = 0; q < 4; q++) MOE_K(e2m1_pair)(rows, *word, q, at, sum[v]);
      }
    }
  }
  MOE_UNROLL
  for (int i = 0; i < MOE_K(e2m1_vectors) * rows; i++) MOE_V(store)
  (c + i % rows * MOE_NR + i / rows * MOE_W, MOE_V(mul)(sum[i / rows][i % rows], t->factor[t->groups][i / rows]));
}

/* Groups [g, g+t->groups) of all parts. Returns 0, and does nothing, if a scale is no plain unit. */
MOE_FN int MOE_K(e2m1_some)(MOE_K(e2m1_groups) * t, const moe_small_m_ *s, const moe_codes_ *codes, int64_t g) {
  int64_t v = 0;
  for (int64_t p = 0; p < s->parts; p++)
    for (int64_t col = 0; col < codes[p].width; col += MOE_W, v++) {
      if (!MOE_K(e2m1_factors)(t, v, codes + p, col, g)) return 0;
      t->base[v] = codes[p].codes + col * codes[p].stride + g * t->group;
    }
  for (int64_t r = 0; r < s->rows; r += MOE_E2M1_ROWS_) {
    float *c = s->c + r * MOE_NR;
    MOE_K(e2m1_load_x)(t, s, r, g * 32);
    if (s->rows - r == 1) MOE_K(e2m1_multiply)(1, t, c);
    else if (s->rows - r == 2) MOE_K(e2m1_multiply)(2, t, c);
    else MOE_K(e2m1_multiply)(MOE_E2M1_ROWS_, t, c);
  }
  return 1;
}

/* Returns for how many codes of each column this has been done: not for all where something is not as it takes it. */
MOE_FN int64_t MOE_K(small_m_e2m1)(moe_small_m_ *s, const moe_codes_ *codes) {
  const int64_t all = s->k / 32;
  MOE_K(e2m1_groups) t;
  if (s->rows > MOE_K(e2m1_rows_max) || s->k % 32 != 0 || s->k > 1 << 20) return 0;
  for (int64_t p = 0; p < s->parts; p++)
    if (codes[p].n < codes[p].width) return 0;
  if (s->plain_rows == 0) s->plain_rows = MOE_K(e2m1_takes_rows)(s) ? 1 : -1;
  if (s->plain_rows < 0) return 0;
  t.stride = codes->stride, t.group = codes->group, t.split = codes->split;
  t.walk = moe_codes_prefetch_of_(s, codes, moe_ceil_div_(s->rows, MOE_E2M1_ROWS_) * all * MOE_K(e2m1_vectors));
  for (int64_t g = 0; g < all; g += t.groups) {
    t.groups = moe_min_(MOE_E2M1_GROUPS_, all - g);
    if (!MOE_K(e2m1_some)(&t, s, codes, g)) return g * 32;
  }
  return s->k;
}
