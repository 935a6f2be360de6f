/* Columns of B as packed panels. */
#ifndef MOE_GEMM_PACK_B_H
#define MOE_GEMM_PACK_B_H

enum { MOE_COPY_WORDS_ = 16 }; /* words of each column that are copied at a time, where they must be */

/* At most so many of n columns, as in moe_pack_columns_, through rows of words: converted, or with zeros for what is
   not there. */
MOE_FN void moe_pack_copied_columns_(const moe_kernels *kernels, moe_panel_kind_ kind, moe_dtype dtype, char *panel,
                                     const moe_rows_ *columns, int64_t k, int64_t n) {
  const int paired = kind == MOE_PANEL_PAIRS || kernels->gemm->transpose_u16[dtype];
  const int64_t words = paired ? (k + 1) / 2 : moe_even_(k), pitch = MOE_COPY_WORDS_ * 4;
  float rows[MOE_NR * MOE_COPY_WORDS_] = {0}, transposed[MOE_COPY_WORDS_ * MOE_NR];
  if (!paired && dtype != MOE_DTYPE_F32) kernels->vec->load_rows[dtype](rows, MOE_COPY_WORDS_, columns, n, k);
  else
    for (int64_t i = 0; i < n; i++)
      memcpy(rows + i * MOE_COPY_WORDS_, moe_row_(columns, i), (size_t)(k * moe_dtype_bytes_(dtype)));
  if (paired && kind == MOE_PANEL_F32) {
    kernels->gemm->transpose_u16[dtype]((float *)(void *)panel, rows, pitch, k);
  } else if (words == MOE_COPY_WORDS_) {
    kernels->vec->transpose_words(panel, MOE_NR_BYTES_, rows, pitch, MOE_NR, words);
  } else {
    kernels->vec->transpose_words(transposed, MOE_NR_BYTES_, rows, pitch, MOE_NR, words);
    memcpy(panel, transposed, (size_t)(words * MOE_NR_BYTES_));
  }
}

/* A panel from n <= 64 columns, each of k elements side by side, `stride` bytes apart; the rest becomes zero. Elements
   are transposed as words, so those of 2 bytes two at a time, in the order that pairs have. Only bf16 becomes pairs. */
MOE_FN void moe_pack_columns_(const moe_kernels *kernels, moe_panel_kind_ kind, moe_dtype dtype, void *panel,
                              const char *src, int64_t stride, int64_t k, int64_t n) {
  const int paired = kind == MOE_PANEL_PAIRS || kernels->gemm->transpose_u16[dtype];
  const int plain = paired || dtype == MOE_DTYPE_F32; /* words are as they lie */
  const int64_t size = moe_dtype_bytes_(dtype), per_word = paired ? 2 : 1;
  for (int64_t at = 0, count; at < k; at += count) {
    char *to = (char *)panel + moe_panel_bytes_(kind, at);
    const moe_rows_ columns = {src + at * size, stride, NULL};
    const int whole = plain && n == MOE_NR && k - at >= per_word * MOE_NR;
    count = moe_min_(k - at, per_word * (whole ? MOE_NR : MOE_COPY_WORDS_));
    if (!whole) moe_pack_copied_columns_(kernels, kind, dtype, to, &columns, count, n);
    else if (paired && kind == MOE_PANEL_F32)
      kernels->gemm->transpose_u16[dtype]((float *)(void *)to, columns.base, stride, count);
    else kernels->vec->transpose_words(to, MOE_NR_BYTES_, columns.base, stride, MOE_NR, MOE_NR);
  }
}

/* Pairs of what can be decoded to float only. Not inlined: moe_decode_b_ may call itself, and the stack is small. */
MOE_FN __attribute__((noinline)) void moe_decode_pairs_(const moe_kernels *kernels, const moe_b_ *b, int64_t p,
                                                        int64_t from, int64_t k, char *pairs) {
  float decoded[MOE_DECODE_PAIRS_K_ * MOE_NR];
  for (int64_t at = 0; at < k; at += MOE_DECODE_PAIRS_K_) {
    const int64_t n = moe_min_(MOE_DECODE_PAIRS_K_, k - at);
    b->decode(b, kernels, MOE_PANEL_F32, p, from + at, n, (char *)decoded);
    kernels->gemm->pair_panel(pairs + moe_panel_bytes_(MOE_PANEL_PAIRS, at), decoded, n);
  }
}

MOE_FN void moe_decode_b_(const moe_kernels *kernels, moe_panel_kind_ kind, const moe_b_ *b, int64_t p, int64_t from,
                          int64_t k, char *panel) {
  for (int64_t at = 0; at < k; at += MOE_DECODE_K_) {
    const int64_t n = moe_min_(MOE_DECODE_K_, k - at);
    char *to = panel + moe_panel_bytes_(kind, at);
    if (!b->decode(b, kernels, kind, p, from + at, n, to)) moe_decode_pairs_(kernels, b, p, from + at, n, to);
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
