/* A few rows of A times columns of MX codes, over all of k. Weights are not scaled: the chain of products takes bare
   codes, and its sum is in units of a group's scale. From group to group it is multiplied by a power of two. That is
   exact, and all products and sums round as those of scaled weights do, unless one of them is subnormal or overflows:
   see mx_range. Where one may, small_m_codes.inl is used. A group of all columns is decoded to bf16 pairs, to be
   multiplied with all rows; of e2m1 AVX-512 looks floats up while it multiplies. With MOE_GEMM_DOT products are dot
   products of pairs. */

enum {
  MOE_K(mx_vectors) = MOE_NR / MOE_W,
  MOE_K(mx_steps) = MOE_GEMM_DOT ? MOE_MX_PAIRS_ : 2 * MOE_MX_PAIRS_ /* elements of x in a group */
};
#if MOE_GEMM_DOT
typedef uint32_t MOE_K(mx_x); /* a pair of k of a row of A */
#else
typedef float MOE_K(mx_x);
#endif

/* Some groups of a panel. */
typedef struct MOE_K(mx_) {
  MOE_LINE_ALIGNED uint32_t word[MOE_MX_PAIRS_ * MOE_NR];     /* a group */
  float factor[MOE_MX_SOME_ + 1][MOE_NR];                     /* to each group's unit, and to 1 */
  MOE_V(i) least[MOE_K(mx_vectors)], most[MOE_K(mx_vectors)]; /* scale bytes so far, two in a word, and that of 1 */
  const uint8_t *base[MOE_K(mx_vectors)];                     /* the first column of each vector */
  int64_t stride, group, column, next, first, groups;         /* next: from a column to that of the next panel */
  int period, split, wide;                                    /* period: groups in a line */
  const moe_byte_table_ *values;
} MOE_K(mx);

/* How far apart scale bytes that a column has, and 127, may be, or below 0: rows of A do not permit any. Say codes are
   multiples of 2^c below 2^d, and exponents of x from l to m; 0 is among them. Then products in units of a group's
   scale, and their sums, are multiples of 2^(l-7+c-range), since bf16 has 8 bits: none is subnormal if that is at least
   2^-126. (An f32 x has 24 bits, but f32 products may be subnormal: they are exact down to 2^-149.) And k of them are
   below 2^128 if k*2^(m+1+d+range) is not more. With 1 among units and x, this holds of scaled weights and sums, too.
   An x that is not normal has no range. */
MOE_FN int64_t MOE_K(mx_range)(const moe_small_m_ *s, const moe_element_format_ *f) {
  const int from = 1 - f->bias - f->fraction, to = (int)(f->max >> f->fraction) - f->bias + 1;
  const MOE_V(i) none = MOE_V(set1i)(0u), top = MOE_V(set1i)(0x7f800000u), one = MOE_V(set1i)(0x3f800000u);
  MOE_V(i) most = one, below = one; /* below: of 2^128 in bits */
  int64_t depth = 0;
  for (int64_t r = 0; r < s->rows; r++)
    for (int64_t i = 0; i < s->k; i += MOE_W) {
      const MOE_V(i) bits = MOE_V(casti)(MOE_V(load)(s->x + r * s->x_stride + i));
      const MOE_V(i) x = MOE_V(andi)(bits, MOE_V(set1i)(0x7fffffffu));
      most = MOE_V(maxi)(most, x);
      below = MOE_V(maxi)(below, MOE_V(selecti)(MOE_V(lti)(none, x), MOE_V(subi)(top, x), none));
    }
  while (s->k > (int64_t)1 << depth) depth++;
  const int64_t x_least = (int64_t)((0x7f800000u - MOE_V(topi)(below)) >> 23) - 127;
  const int64_t x_most = (int64_t)(MOE_V(topi)(most) >> 23) - 127;
  return moe_min_(119 + x_least + from, 127 - x_most - to - depth);
}

/* n scale bytes of a column, `group` apart, to contiguous memory. */
MOE_INLINE void MOE_K(mx_copy_scales)(uint8_t *to, const uint8_t *scale, int64_t group, int64_t n) {
  int64_t b = 0;
  for (; b + 4 <= n; b += 4) {
    MOE_UNROLL
    for (int i = 0; i < 4; i++, scale += group) to[b + i] = *scale;
  }
  for (; b < n; b++, scale += group) to[b] = *scale;
}

/* The scale bytes of vector v, which begins with column `col` of a part, from the first group on: words[i] has those of
   the i-th four. Missing ones are 127. */
MOE_FN void MOE_K(mx_scales)(const MOE_K(mx) * t, const moe_codes_ *c, int64_t col, MOE_V(i) * words) {
  const uint8_t *scale = c->scale + col * c->scale_stride + t->first * c->scale_group;
  const int64_t next = c->width * c->scale_stride;
  uint8_t bytes[MOE_W * MOE_MX_SOME_];
  int64_t stride = c->scale_stride;
  if (c->scale_group == 1)
    for (int64_t i = 0; i < MOE_W; i++) __builtin_prefetch(scale + next + i * stride);
  if (c->scale_group != 1 || t->groups < MOE_MX_SOME_) {
    memset(bytes, 127, sizeof bytes);
    for (int64_t i = 0; i < MOE_W; i++, scale += stride)
      MOE_K(mx_copy_scales)(bytes + i * MOE_MX_SOME_, scale, c->scale_group, t->groups);
    scale = bytes, stride = MOE_MX_SOME_;
  }
  MOE_V(load_groups)(scale, stride, words);
}

/* The factors of vector v. Returns whether scale bytes are in range. */
MOE_FN int MOE_K(mx_factors)(MOE_K(mx) * t, int64_t v, const moe_codes_ *c, int64_t col, int64_t range) {
  const MOE_V(i) one = MOE_V(set1i)(127u << 23), mask = MOE_V(set1i)(255u << 23), both = MOE_V(set1i)(0x00ff00ffu);
  MOE_V(i) words[MOE_MX_SOME_ / 4], before = one, least = t->least[v], most = t->most[v];
  MOE_K(mx_scales)(t, c, col, words);
  float *factor = t->factor[0] + v * MOE_W;
  for (int64_t b = 0; b < MOE_MX_SOME_ / 4; b++) {
    const MOE_V(i) even = MOE_V(andi)(words[b], both), odd = MOE_V(andi)(MOE_V(srli)(words[b], 8), both);
    least = MOE_V(min2x16)(least, MOE_V(min2x16)(even, odd));
    most = MOE_V(max2x16)(most, MOE_V(max2x16)(even, odd));
    MOE_UNROLL
    for (int i = 0; i < 4; i++, factor += MOE_NR) {
      const MOE_V(i) placed = i < 3 ? MOE_V(slli)(words[b], 23 - 8 * i) : MOE_V(srli)(words[b], 1);
      const MOE_V(i) unit = MOE_V(andi)(placed, mask);
      MOE_V(storei)(factor, MOE_V(addi)(MOE_V(subi)(before, unit), one));
      before = unit;
    }
  }
  MOE_V(storei)(factor, before);
  t->least[v] = least, t->most[v] = most;
  least = MOE_V(min2x16)(MOE_V(andi)(least, MOE_V(set1i)(0xffffu)), MOE_V(srli)(least, 16));
  most = MOE_V(max2x16)(MOE_V(andi)(most, MOE_V(set1i)(0xffffu)), MOE_V(srli)(most, 16));
  const MOE_V(i) over = MOE_V(addi)(MOE_V(set1i)((uint32_t)range), MOE_V(subi)(least, most));
  return !MOE_V(anyi)(MOE_V(srli)(over, 31));
}

/* 16 bytes of W columns, and what becomes of them. */
MOE_INLINE void MOE_K(mx_load)(int wide, const MOE_K(mx) * t, const uint8_t *p, MOE_V(i) * words) {
#if MOE_BYTE_TABLES
  if (wide) MOE_V(load_twos)(p, t->stride, words);
#endif
  if (!wide) MOE_V(load_e2m1)(p, t->stride, t->split, words);
}
MOE_INLINE void MOE_K(mx_store)(int wide, const MOE_K(mx) * t, uint32_t *to, const MOE_V(i) * words) {
#if MOE_BYTE_TABLES
  if (wide) MOE_B(store_fp8)(to, MOE_NR, words, t->values);
  else MOE_B(store_e2m1)(to, MOE_NR, words, t->split);
#else
  (void)wide;
  MOE_V(store_e2m1)(to, MOE_NR, words, t->split);
#endif
}

/* All columns, from bytes `at` on. Some vectors are loaded before one is stored: a load waits for stores before it
   whose addresses have the same last 12 bits. */
MOE_INLINE void MOE_K(mx_decode)(int wide, const MOE_K(mx) * t, int64_t at, uint32_t *to) {
  enum { some = MOE_W > 8 ? 4 : 2 };
  for (int64_t v = 0; v < MOE_K(mx_vectors); v += some) {
    MOE_V(i) words[some][4];
    MOE_UNROLL
    for (int i = 0; i < some; i++) MOE_K(mx_load)(wide, t, t->base[v + i] + at, words[i]);
    MOE_UNROLL
    for (int i = 0; i < some; i++) MOE_K(mx_store)(wide, t, to + (v + i) * MOE_W, words[i]);
  }
}

/* Group g. */
#if MOE_BYTE_TABLES
MOE_FN __attribute__((noinline)) void MOE_K(mx_decode_8)(MOE_K(mx) * t, int64_t at, uint32_t *to) {
  MOE_K(mx_decode)(1, t, at, to);
}
#endif
#if MOE_GEMM_DOT || !MOE_BYTE_TABLES
MOE_FN __attribute__((noinline)) void MOE_K(mx_decode_4)(MOE_K(mx) * t, int64_t at, uint32_t *to) {
  MOE_K(mx_decode)(0, t, at, to);
}
#endif
MOE_FN void MOE_K(mx_decode_group)(MOE_K(mx) * t, int64_t g) {
#if MOE_BYTE_TABLES
  if (t->wide) {
    MOE_K(mx_decode_8)(t, g * t->group, t->word);
    MOE_K(mx_decode_8)(t, g * t->group + 16, t->word + MOE_MX_PAIRS_ / 2 * MOE_NR);
  }
#endif
#if MOE_GEMM_DOT || !MOE_BYTE_TABLES
  if (!t->wide) MOE_K(mx_decode_4)(t, g * t->group, t->word);
#endif
}

/* Lines are prefetched in the order in which they are read, which memory sends fastest. */
MOE_FN void MOE_K(mx_prefetch)(const MOE_K(mx) * t, int64_t g) {
  const int64_t at = g * t->group + MOE_MX_PREFETCH_, from = at < t->column ? at : at - t->column + t->next;
  for (int64_t v = 0; v < MOE_K(mx_vectors); v++) {
    const uint8_t *line = t->base[v] + from;
    if (((int)(g + v) & (t->period - 1)) == 0)
      for (int64_t i = 0; i < MOE_W; i++, line += t->stride) __builtin_prefetch(line);
  }
}

/* Element q of four that are in two rows of words: pairs; in AVX2 of every other element; or in one row: e2m1 codes,
   from bit at[q] on. */
#if MOE_VN(MX_LOOKUP) && !MOE_BYTE_TABLES
enum { MOE_K(mx_step_rows) = 1 };
MOE_INLINE MOE_V(f) MOE_K(mx_element)(const uint32_t *b, int q, const MOE_V(i) * at, MOE_V(f) values) {
  const MOE_V(i) word = MOE_V(loadi)(b);
  return MOE_V(lookup16)(values, q ? MOE_V(srlv)(word, at[q]) : word);
}
#else
enum { MOE_K(mx_step_rows) = 2 };
MOE_INLINE MOE_V(f) MOE_K(mx_element)(const uint32_t *b, int q, const MOE_V(i) * at, MOE_V(f) values) {
  const int row = MOE_W > 8 ? q / 2 : q % 2, upper = MOE_W > 8 ? q % 2 : q / 2;
  const MOE_V(i) word = MOE_V(loadi)(b + row * MOE_NR);
  (void)at, (void)values;
  return MOE_V(castf)(upper ? MOE_V(andi)(word, MOE_V(set1i)(0xffff0000u)) : MOE_V(slli)(word, 16));
}
#endif

/* Four elements of four vectors of columns times some rows. */
MOE_INLINE void MOE_K(mx_step)(int rows, const uint32_t *b, const MOE_V(i) * codes_at, MOE_V(f) values,
                               const MOE_K(mx_x) * x, int64_t pitch, MOE_V(f) (*sum)[4]) {
#if MOE_GEMM_DOT
  (void)codes_at, (void)values;
  MOE_UNROLL
  for (int q = 0; q < 2; q++) {
    MOE_UNROLL
    for (int i = 0; i < 4 * rows; i++)
      sum[i / 4][i % 4] = MOE_K(dot2)(MOE_V(set1i)(x[i / 4 * pitch + q]), MOE_V(loadi)(b + q * MOE_NR + i % 4 * MOE_W),
                                      sum[i / 4][i % 4]);
  }
#else
  MOE_UNROLL
  for (int i = 0; i < 4; i++) {
    const int q = i ^ 1; /* the odd one first */
    MOE_V(f) w[4];
    if (MOE_W == 8) MOE_OPAQUE_POINTER(b);
    MOE_UNROLL
    for (int v = 0; v < 4; v++) w[v] = MOE_K(mx_element)(b + v * MOE_W, q, codes_at, values);
    MOE_UNROLL
    for (int r = 0; r < rows; r++) {
      const MOE_V(f) at = MOE_V(set1)(x[r * pitch + q]);
      MOE_UNROLL
      for (int v = 0; v < 4; v++) sum[r][v] = MOE_V(fma)(at, w[v], sum[r][v]);
    }
  }
#endif
}

/* A group times some rows. */
MOE_INLINE void MOE_K(mx_rows)(int rows, const MOE_K(mx) * t, const float *factor, const MOE_K(mx_x) * x, int64_t pitch,
                               float *c) {
#if MOE_VN(MX_LOOKUP) && !MOE_BYTE_TABLES
  MOE_V(f) values = MOE_V(e2m1_values)();
  MOE_V(i) codes_at[4];
  MOE_IN_REGISTER(values);
  MOE_UNROLL
  for (int q = 0; q < 4; q++) codes_at[q] = MOE_V(set1i)((uint32_t)q * (t->split ? 8u : 4u));
#else
  const MOE_V(f) values = MOE_V(set1)(0.0f);
  const MOE_V(i) *const codes_at = NULL;
#endif
  for (int64_t col = 0; col < MOE_NR; col += 4 * MOE_W) {
    MOE_V(f) sum[MOE_VN(MX_ROWS)][4];
    const uint32_t *b = t->word + col;
    const MOE_K(mx_x) *at = x, *end = x + MOE_K(mx_steps);
    MOE_UNROLL
    for (int i = 0; i < 4 * rows; i++)
      sum[i / 4][i % 4] =
          MOE_V(mul)(MOE_V(load)(c + i / 4 * MOE_NR + col + i % 4 * MOE_W), MOE_V(load)(factor + col + i % 4 * MOE_W));
    MOE_OPAQUE_POINTER(end); /* the loop is not unrolled */
    for (; at < end; at += MOE_K(mx_steps) / (MOE_MX_PAIRS_ / 2), b += MOE_K(mx_step_rows) * MOE_NR)
      MOE_K(mx_step)(rows, b, codes_at, values, at, pitch, sum);
    MOE_UNROLL
    for (int i = 0; i < 4 * rows; i++) MOE_V(store)(c + i / 4 * MOE_NR + col + i % 4 * MOE_W, sum[i / 4][i % 4]);
  }
}

/* Group g times all rows. */
MOE_FN void MOE_K(mx_multiply)(const MOE_K(mx) * t, const moe_small_m_ *s, int64_t g) {
  const float *factor = t->factor[g - t->first], *from = s->x + g * 2 * MOE_MX_PAIRS_;
  float *c = s->c;
#if MOE_GEMM_DOT
  enum { pitch = MOE_MX_PAIRS_ };
  uint32_t pairs[MOE_SMALL_M_MAX * pitch], *x = pairs;
  for (int64_t r = 0; r < s->rows; r++, from += s->x_stride)
    MOE_V(storei)(pairs + r * pitch, MOE_K(uppers2)(MOE_V(load)(from), MOE_V(load)(from + MOE_W)));
#else
  const float *x = from;
  const int64_t pitch = s->x_stride;
#endif
  for (int64_t left = s->rows, n; left > 0; left -= n, x += n * pitch, c += n * MOE_NR) {
    n = left < MOE_VN(MX_ROWS) ? 1 : MOE_VN(MX_ROWS);
    if (n == 1) MOE_K(mx_rows)(1, t, factor, x, pitch, c);
    else MOE_K(mx_rows)(MOE_VN(MX_ROWS), t, factor, x, pitch, c);
  }
}

/* Groups [first, first+groups) of all parts. Returns 0, and does nothing, if a scale byte is out of range. */
MOE_FN int MOE_K(mx_some)(MOE_K(mx) * t, const moe_small_m_ *s, const moe_codes_ *codes) {
  int64_t v = 0;
  for (int64_t p = 0; p < s->parts; p++)
    for (int64_t col = 0; col < codes[p].width; col += MOE_W, v++)
      if (!MOE_K(mx_factors)(t, v, codes + p, col, s->unit_range)) return 0;
  for (int64_t g = t->first; g < t->first + t->groups; g++) {
    MOE_K(mx_prefetch)(t, g);
    MOE_K(mx_decode_group)(t, g);
    MOE_K(mx_multiply)(t, s, g);
  }
  for (int64_t r = 0; r < s->rows; r++)
    for (int64_t i = 0; i < MOE_NR; i += MOE_W) {
      float *c = s->c + r * MOE_NR + i;
      MOE_V(store)(c, MOE_V(mul)(MOE_V(load)(c), MOE_V(load)(t->factor[t->groups] + i)));
    }
  return 1;
}

/* Returns for how many codes of each column this has been done: not for all where something is not as it takes it. */
MOE_FN int64_t MOE_K(small_m_mx)(moe_small_m_ *s, const moe_codes_ *codes) {
  const moe_element_format_ *f = codes->format;
  const int64_t all = s->k / 32;
  int64_t v = 0;
  MOE_K(mx) t;
  if (s->k % 32 != 0 || s->k > 1 << 20 || f->nan_is_minus_zero) return 0;
  if (!s->looked) s->unit_range = MOE_K(mx_range)(s, f), s->looked = 1;
  if (s->unit_range < 0) return 0;
  for (int64_t p = 0; p < s->parts; p++)
    if (codes[p].n < codes[p].width) return 0;
  t.stride = codes->stride, t.group = codes->group, t.split = codes->split, t.wide = f->bits == 8;
  t.column = all * t.group, t.next = codes->width * t.stride, t.period = t.wide ? 2 : 4, t.values = codes->table;
  for (int64_t p = 0; p < s->parts; p++)
    for (int64_t col = 0; col < codes[p].width; col += MOE_W, v++) {
      t.base[v] = codes[p].codes + col * t.stride;
      t.least[v] = t.most[v] = MOE_V(set1i)(0x007f007fu);
    }
  for (t.first = 0; t.first < all; t.first += t.groups) {
    t.groups = moe_min_(codes->scale_group == 1 ? MOE_MX_SOME_ : MOE_MX_APART_, all - t.first);
    if (!MOE_K(mx_some)(&t, s, codes)) return t.first * 32;
  }
  return s->k;
}
