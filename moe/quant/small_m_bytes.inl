/* A few rows of A times codes of 8 bits that are looked up: some of them at a time become pairs in cache, which are
   multiplied with all rows. With MOE_GEMM_DOT by dot products. */

/* Words of x for an element of b's pairs, and for d elements. */
enum {
  MOE_K(x_per_pair) = MOE_GEMM_DOT ? 1 : 2,
  MOE_K(x_rest) = MOE_W,                                      /* words that may be written behind x */
  MOE_K(bytes_deep) = 8,                                      /* rows of codes at a time, */
  MOE_K(x_pitch) = MOE_K(bytes_deep) / 2 * MOE_K(x_per_pair), /*   and words of x for them */
  MOE_K(sums) = MOE_NR / MOE_W
};

/* d elements of all rows of A from `from` on, an odd d rounded up: floats, or pairs. */
MOE_INLINE void MOE_K(x_words)(const moe_small_m_ *s, int64_t from, int64_t d, int64_t pitch, uint32_t *x) {
  const float *src = s->x + from;
  for (int64_t r = 0; r < s->rows; r++, src += s->x_stride, x += pitch)
    for (int64_t i = 0; i < d; i += MOE_W) {
      const MOE_V(f) some = MOE_V(loadn)(src + i, moe_min_(MOE_W, d - i));
      if (MOE_GEMM_DOT) MOE_V(store_bf16)(x + i / 2, some);
      else MOE_V(store)(x + i, some);
    }
}

/* `rows` rows of A times a row of pairs. */
MOE_INLINE void MOE_K(x_times_pair)(int rows, const MOE_V(i) * pairs, const uint32_t *x, int64_t pitch,
                                    MOE_V(f) (*sum)[MOE_K(sums)]) {
  MOE_UNROLL
  for (int v = 0; v < MOE_K(sums); v++) {
#if MOE_GEMM_DOT
    MOE_UNROLL
    for (int r = 0; r < rows; r++) sum[r][v] = MOE_K(dot2)(MOE_V(set1i)(x[r * pitch]), pairs[v], sum[r][v]);
#else
    const float *at = (const float *)(const void *)x;
    const MOE_V(f) even = MOE_V(castf)(MOE_V(slli)(pairs[v], 16));
    const MOE_V(f) odd = MOE_V(castf)(MOE_V(andi)(pairs[v], MOE_V(set1i)(0xffff0000u)));
    MOE_UNROLL
    for (int r = 0; r < rows; r++) sum[r][v] = MOE_V(fma)(MOE_V(set1)(at[r * pitch + 1]), odd, sum[r][v]);
    MOE_UNROLL
    for (int r = 0; r < rows; r++) sum[r][v] = MOE_V(fma)(MOE_V(set1)(at[r * pitch]), even, sum[r][v]);
#endif
  }
}

/* The sums of `rows` rows, those of the second half of the columns at `second`: loaded, or stored. */
MOE_INLINE void MOE_K(move_sums)(int store, int rows, float *c, float *second, MOE_V(f) (*sum)[MOE_K(sums)]) {
  MOE_UNROLL
  for (int r = 0; r < rows; r++) {
    MOE_UNROLL
    for (int v = 0; v < MOE_K(sums); v++) {
      float *at = (v < MOE_K(sums) / 2 ? c : second) + r * MOE_NR + v % (MOE_K(sums) / 2) * MOE_W;
      if (store) MOE_V(store)(at, sum[r][v]);
      else sum[r][v] = MOE_V(load)(at);
    }
  }
}

/* `rows` rows of A times n > 0 rows of pairs. */
MOE_INLINE void MOE_K(x_times_pairs)(int rows, int64_t n, const uint32_t *b, const uint32_t *x, int64_t pitch, float *c,
                                     float *second) {
  MOE_V(f) sum[4][MOE_K(sums)];
  MOE_K(move_sums)(0, rows, c, second, sum);
  do {
    MOE_V(i) pairs[MOE_K(sums)];
    MOE_UNROLL
    for (int v = 0; v < MOE_K(sums); v++) pairs[v] = MOE_V(loadi)(b + v * MOE_W);
    MOE_K(x_times_pair)(rows, pairs, x, pitch, sum);
    b += MOE_NR, x += MOE_K(x_per_pair);
  } while (--n > 0);
  MOE_K(move_sums)(1, rows, c, second, sum);
}

/* All rows. */
MOE_FN __attribute__((noinline)) void MOE_K(times_pairs)(int64_t rows, int64_t n, const uint32_t *b, const uint32_t *x,
                                                         int64_t pitch, float *c, float *second) {
  for (; rows >= 4; rows -= 4, x += 4 * pitch, c += 4 * MOE_NR, second += 4 * MOE_NR)
    MOE_K(x_times_pairs)(4, n, b, x, pitch, c, second);
  if (rows & 2) MOE_K(x_times_pairs)(2, n, b, x, pitch, c, second);
  if (rows & 2) x += 2 * pitch, c += 2 * MOE_NR, second += 2 * MOE_NR;
  if (rows & 1) MOE_K(x_times_pairs)(1, n, b, x, pitch, c, second);
}

/* `rows` rows of A times 8 rows of 64 codes, decoded in registers. -0 is no NaN. */
MOE_INLINE void MOE_K(x_times_codes)(int rows, const moe_codes_ *codes, const uint32_t *x, float *c, float *second) {
  MOE_V(i) table[MOE_B(table_vectors)], both[2], pairs[MOE_K(sums)];
  MOE_V(f) sum[2][MOE_K(sums)];
  const uint8_t *row = codes->codes;
  const int64_t stride = codes->stride;
  MOE_B(load_table)(codes->table, table);
  MOE_K(move_sums)(0, rows, c, second, sum);
  for (int q = 0; q < MOE_K(bytes_deep) / 2; q++, row += 2 * stride, x += MOE_K(x_per_pair)) {
    MOE_B(pair_codes)(table, row, row + stride, MOE_NR, both);
    MOE_B(lookup_pairs)(table, 0, both[0], pairs);
    MOE_B(lookup_pairs)(table, 0, both[1], pairs + 2);
    MOE_K(x_times_pair)(rows, pairs, x, MOE_K(x_pitch), sum);
  }
  MOE_K(move_sums)(1, rows, c, second, sum);
}

/* The sums of column j of a part. */
MOE_INLINE float *MOE_K(sums_at)(const moe_small_m_ *s, int64_t part, int64_t j) {
  const int64_t width = MOE_NR / s->parts;
  return s->c + j / width * s->c_stride + part * width + j % width;
}

/* d rows of codes times all rows; where some of the columns are not there, their sums are `none`. */
MOE_INLINE void MOE_K(small_m_some_bytes)(const moe_small_m_ *s, const moe_codes_ *codes, const uint32_t *x, float *c,
                                          float *second) {
  MOE_LINE_ALIGNED uint32_t b[MOE_K(bytes_deep) / 2 * MOE_NR];
  float none[MOE_SMALL_M_MAX * MOE_NR];
  if (codes->k == MOE_K(bytes_deep) && codes->n == MOE_NR && s->rows <= 2 && !codes->format->nan_is_minus_zero) {
    if (s->rows == 1) MOE_K(x_times_codes)(1, codes, x, c, second);
    else MOE_K(x_times_codes)(2, codes, x, c, second);
    return;
  }
  (void)MOE_B(pack_rows_pairs)(b, codes);
  if (codes->n <= MOE_NR / 2) second = (float *)memset(none, 0, (size_t)s->rows * MOE_NR_BYTES_);
  MOE_K(times_pairs)(s->rows, (codes->k + 1) / 2, b, x, MOE_K(x_pitch), c, second);
}

/* Rows of codes [from, from+d) of a part. */
MOE_INLINE void MOE_K(small_m_rows_of_bytes)(const moe_small_m_ *s, int64_t part, int64_t from, int64_t d,
                                             const uint32_t *x) {
  int64_t left = s->table_columns - s->table_first;
  moe_codes_ codes = {0};
  codes.format = s->format, codes.table = s->tables + part * s->part_tables;
  codes.codes = (const uint8_t *)s->base[part] + from * s->stride;
  codes.stride = s->stride, codes.width = MOE_NR, codes.k = d;
  for (int64_t j = 0; j < s->n; j += codes.n, codes.codes += codes.n, left -= codes.n) {
    if (left == 0) codes.table++, left = s->table_columns;
    codes.n = moe_min_(moe_min_(MOE_NR, left), s->n - j);
    for (int64_t r = 0; r < d; r++) __builtin_prefetch(codes.codes + r * s->stride + s->prefetch, 0, 2);
    MOE_K(small_m_some_bytes)(s, &codes, x, MOE_K(sums_at)(s, part, j), MOE_K(sums_at)(s, part, j + MOE_NR / 2));
  }
}

MOE_FN void MOE_K(small_m_bytes)(const moe_small_m_ *s) {
  uint32_t x[MOE_SMALL_M_MAX * MOE_K(x_pitch) + MOE_K(x_rest)];
  for (int64_t from = 0; from < s->k; from += MOE_K(bytes_deep)) {
    const int64_t d = moe_min_(MOE_K(bytes_deep), s->k - from);
    MOE_K(x_words)(s, from, d, MOE_K(x_pitch), x);
    for (int64_t part = 0; part < s->parts; part++) MOE_K(small_m_rows_of_bytes)(s, part, from, d, x);
  }
}

/* Elements [0, s->k) of the first and of the last 32 columns of a panel. */
MOE_FN void MOE_K(small_m_bytes_columns)(const moe_small_m_ *s, const moe_codes_ *codes, moe_codes_prefetch_ *walk) {
  enum { pitch = MOE_B(run) / 2 * MOE_K(x_per_pair) };
  MOE_LINE_ALIGNED uint32_t b[MOE_B(run) / 2 * MOE_NR];
  uint32_t x[MOE_SMALL_M_MAX * pitch + MOE_K(x_rest)];
  moe_codes_ some[2] = {codes[0], codes[1]};
  if (codes[1].n == 0) memset(b, 0, sizeof b);
  for (int64_t from = 0; from < s->k; from += MOE_B(run)) {
    const int64_t d = moe_min_(MOE_B(run), s->k - from);
    MOE_K(x_words)(s, from, d, pitch, x);
    for (int h = 0; h < 2; h++, moe_codes_prefetch_next_(walk)) {
      some[h].k = d;
      if (some[h].n > 0) (void)MOE_B(pack_columns_pairs)(b, some + h);
      some[h].codes += d;
    }
    MOE_K(times_pairs)(s->rows, (d + 1) / 2, b, x, pitch, s->c, s->c + MOE_NR / 2);
  }
}
