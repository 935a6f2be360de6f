/* Columns of B as packed panels. */
#ifndef MOE_GEMM_PACK_B_H
#define MOE_GEMM_PACK_B_H

/* A panel from n <= 64 columns, each of k elements side by side, `stride` bytes apart; the rest becomes zero. Elements
   are transposed as words, so those of 2 bytes two at a time, in the order that pairs have. Only bf16 becomes pairs. */
MOE_FN void moe_pack_columns_(const moe_kernels *kernels, moe_panel_kind_ kind, moe_dtype dtype, void *panel,
                              const char *src, int64_t stride, int64_t k, int64_t n) {
  const int paired = kind == MOE_PANEL_PAIRS || kernels->gemm->transpose_u16[dtype];
  const int64_t size = moe_dtype_bytes_(dtype), step = paired ? 2 * MOE_NR : MOE_NR;
  float rows[MOE_NR * MOE_NR], padded[MOE_NR * MOE_NR];
  for (int64_t at = 0; at < k; at += step) {
    const int64_t left = moe_min_(step, k - at), words = paired ? (left + 1) / 2 : moe_even_(left);
    const int plain = paired || dtype == MOE_DTYPE_F32;
    char *to = (char *)panel + moe_panel_bytes_(kind, at);
    moe_rows_ columns = {src + at * size, stride, NULL};
    const int whole = left == step && n == MOE_NR;
    if (!plain || !whole) {
      if (!whole) memset(rows, 0, sizeof rows);
      if (!plain) kernels->vec->load_rows[dtype](rows, MOE_NR, &columns, n, left);
      for (int64_t i = 0; i < n && plain; i++) memcpy(rows + i * MOE_NR, moe_row_(&columns, i), (size_t)(left * size));
      columns.base = (const char *)rows, columns.stride = MOE_NR_BYTES_;
    }
    if (paired && kind == MOE_PANEL_F32) {
      kernels->gemm->transpose_u16[dtype]((float *)(void *)to, columns.base, columns.stride, left);
      continue;
    }
    char *square = left < step ? (char *)padded : to;
    kernels->vec->transpose_words(square, MOE_NR_BYTES_, columns.base, columns.stride, MOE_NR, words);
    if (square != to) memcpy(to, padded, (size_t)(words * MOE_NR_BYTES_));
  }
}

MOE_FN void moe_decode_b_(const moe_kernels *kernels, moe_panel_kind_ kind, const moe_b_ *b, int64_t p, int64_t from,
                          int64_t k, char *panel) {
  float decoded[MOE_DECODE_K_ * MOE_NR];
  for (int64_t at = 0; at < k; at += MOE_DECODE_K_) {
    const int64_t n = moe_min_(MOE_DECODE_K_, k - at);
    char *to = panel + moe_panel_bytes_(kind, at);
    if (b->decode(b, kernels, kind, p, from + at, n, to)) continue;
    b->decode(b, kernels, MOE_PANEL_F32, p, from + at, n, (char *)decoded);
    kernels->gemm->pair_panel(to, decoded, n);
  }
}

/* Elements [from, from+k) of panel p. */
MOE_FN void moe_pack_b_(const moe_kernels *kernels, moe_panel_kind_ kind, const moe_b_ *b, int64_t p, int64_t from,
                        int64_t k, void *panel) {
  const int64_t width = moe_b_width_(b), n = moe_b_columns_(b, p, 1);
  if (b->decode) {
    moe_decode_b_(kernels, kind, b, p, from, k, (char *)panel);
    return;
  }
  if (b->transposed) {
    moe_pack_columns_(kernels, kind, b->dtype, panel, moe_b_at_(b, 0, p) + from * moe_dtype_bytes_(b->dtype), b->stride,
                      k, n);
    return;
  }
  for (int64_t part = 0; part < b->parts; part++) {
    const moe_rows_ rows = {moe_b_at_(b, part, p) + from * b->stride, b->stride, NULL};
    kernels->gemm->pack_rows[kind][b->dtype](panel, width * part, width, &rows, k, n);
  }
}

#endif
