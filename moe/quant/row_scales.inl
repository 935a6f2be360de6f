/* The scale bytes of rows of codes, and the order of their sums (see small_m_code_rows.inl). */

/* Of small_m_deep rows of B from `row` on, MOE_ROW_GROUPS_ groups from g on. */
MOE_FN void MOE_K(row_scales)(const moe_small_m_ *s, int64_t row, int64_t g, moe_row_scales_ *t) {
  const uint8_t *scale = s->scale + row * s->scale_stride + g * s->scale_group;
  const int64_t n = moe_min_(MOE_ROW_GROUPS_, moe_ceil_div_(s->n, 32) - g);
  const int64_t next = MOE_K(small_m_deep) * s->scale_stride;
  uint8_t bytes[MOE_ROW_GROUPS_] = {0};
  memset(t->outside, 0, sizeof t->outside);
  for (int q = 0; q < MOE_K(small_m_deep); q++, scale += s->scale_stride) {
    const int copied = n < MOE_ROW_GROUPS_ || s->scale_group != 1;
    for (int64_t i = 0; i < n && copied; i++) bytes[i] = scale[i * s->scale_group];
    __builtin_prefetch(scale + next);
    for (int64_t i = 0; i < MOE_ROW_GROUPS_; i += MOE_W) {
      const MOE_V(i) byte = MOE_V(loadu8)((copied ? bytes : scale) + i);
      const MOE_V(i) below = MOE_V(subi)(byte, MOE_V(set1i)(16u)), above = MOE_V(subi)(MOE_V(set1i)(239u), byte);
      MOE_V(storei)(t->outside + i, MOE_V(ori)(MOE_V(loadi)(t->outside + i), MOE_V(ori)(below, above)));
      MOE_V(storei)(t->scale[q] + i, MOE_V(slli)(byte, 23));
    }
  }
}

/* Sums of 32 columns each, the even ones first, in order. */
MOE_FN void MOE_K(order_sums)(const moe_small_m_ *s) {
  enum { half = 16 / MOE_W };
  for (int64_t j = 0; j < s->n; j += 32)
    for (int64_t r = 0; r < s->rows; r++) {
      float *c = s->c + j / MOE_NR * s->c_stride + j % MOE_NR + r * MOE_NR;
      MOE_V(f) sum[2 * half];
      MOE_UNROLL
      for (int v = 0; v < 2 * half; v++) sum[v] = MOE_V(load)(c + v * MOE_W);
      MOE_UNROLL
      for (int v = 0; v < half; v++) MOE_V(store2_f32)(c + 2 * v * MOE_W, sum[v], sum[v + half], MOE_V(set1i)(0u));
    }
}
