/* Columns of B as packed panels. */
#ifndef MOE_GEMM_PACK_B_H
#define MOE_GEMM_PACK_B_H

enum { MOE_COPY_WORDS_ = 16 }; /* words of each column that are copied at a time, where they must be */

/* Columns of k elements side by side, of one part or two: n of each, `stride` bytes apart from base[part] on. */
typedef struct moe_columns_ {
  const char *base[2];
  int64_t parts, stride, n;
} moe_columns_;

/* At most so many elements of each column, as in moe_pack_columns_, through rows of words: converted, or with zeros for
   what is not there. */
MOE_FN void moe_pack_copied_columns_(const moe_kernels *kernels, moe_panel_kind_ kind, moe_dtype dtype, char *panel,
                                     const moe_columns_ *columns, int64_t from, int64_t k) {
  const int paired = kind == MOE_PANEL_PAIRS || kernels->gemm->transpose_u16[dtype];
  const int64_t words = paired ? (k + 1) / 2 : moe_even_(k), pitch = MOE_COPY_WORDS_ * 4;
  const int64_t size = moe_dtype_bytes_(dtype), width = MOE_NR / columns->parts;
  float rows[MOE_NR * MOE_COPY_WORDS_] = {0};
  for (int64_t part = 0; part < columns->parts; part++) {
    const moe_rows_ own = {columns->base[part] + from * size, columns->stride, NULL};
    float *to = rows + part * width * MOE_COPY_WORDS_;
    if (!paired && dtype != MOE_DTYPE_F32) kernels->vec->load_rows[dtype](to, MOE_COPY_WORDS_, &own, columns->n, k);
    else
      for (int64_t i = 0; i < columns->n; i++) memcpy(to + i * MOE_COPY_WORDS_, moe_row_(&own, i), (size_t)(k * size));
  }
  if (paired && kind == MOE_PANEL_F32) {
    kernels->gemm->transpose_u16[dtype]((float *)(void *)panel, rows, pitch, MOE_NR, k);
  } else if (words == MOE_COPY_WORDS_) {
    kernels->vec->transpose_words(panel, MOE_NR_BYTES_, rows, pitch, MOE_NR, words);
  } else {
    float square[MOE_COPY_WORDS_ * MOE_COPY_WORDS_]; /* whole vectors are written */
    for (int64_t at = 0; at < MOE_NR; at += MOE_COPY_WORDS_) {
      kernels->vec->transpose_words(square, pitch, rows + at * MOE_COPY_WORDS_, pitch, MOE_COPY_WORDS_, words);
      for (int64_t i = 0; i < words; i++)
        memcpy(panel + i * MOE_NR_BYTES_ + 4 * at, square + i * MOE_COPY_WORDS_, (size_t)pitch);
    }
  }
}

/* A panel from columns of k elements, at most 64 in all parts; the rest becomes zero. Elements are transposed as words,
   so those of 2 bytes two at a time, in the order that pairs have. Only bf16 becomes pairs. */
MOE_FN void moe_pack_columns_(const moe_kernels *kernels, moe_panel_kind_ kind, moe_dtype dtype, void *panel,
                              const moe_columns_ *columns, int64_t k) {
  const int paired = kind == MOE_PANEL_PAIRS || kernels->gemm->transpose_u16[dtype];
  const int plain = paired || dtype == MOE_DTYPE_F32; /* words are as they lie */
  const int64_t size = moe_dtype_bytes_(dtype), per_word = paired ? 2 : 1, width = MOE_NR / columns->parts;
  for (int64_t at = 0, count; at < k; at += count) {
    char *to = (char *)panel + moe_panel_bytes_(kind, at);
    const int whole = plain && columns->n == width && k - at >= per_word * MOE_NR;
    count = moe_min_(k - at, per_word * (whole ? MOE_NR : MOE_COPY_WORDS_));
    if (!whole) moe_pack_copied_columns_(kernels, kind, dtype, to, columns, at, count);
    for (int64_t part = 0; part < columns->parts && whole; part++, to += width * 4) {
      const char *from = columns->base[part] + at * size;
      if (paired && kind == MOE_PANEL_F32)
        kernels->gemm->transpose_u16[dtype]((float *)(void *)to, from, columns->stride, width, count);
      else kernels->vec->transpose_words(to, MOE_NR_BYTES_, from, columns->stride, width, MOE_NR);
    }
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

/* Elements [from, from+k) of panel p of plain columns, all of one part where the contraction goes on in a second. */
MOE_FN void moe_pack_plain_b_(const moe_kernels *kernels, moe_panel_kind_ kind, const moe_b_ *b, int64_t p,
                              int64_t from, int64_t k, void *panel) {
  const int64_t width = moe_b_width_(b), n = moe_b_columns_(b, p, 1);
  if (b->transposed) {
    const moe_columns_ columns = {
        {moe_b_from_(b, 0, p, from), b->parts == 2 ? moe_b_from_(b, 1, p, from) : NULL}, b->parts, b->stride, n};
    moe_pack_columns_(kernels, kind, b->dtype, panel, &columns, k);
    return;
  }
  for (int64_t part = 0; part < b->parts; part++) {
    const moe_rows_ rows = {moe_b_from_(b, part, p, from), b->stride, NULL};
    kernels->gemm->pack_rows[kind][b->dtype](panel, width * part, width, &rows, k, n);
  }
}

/* Packs two elements, the last of the first part and the first of the second, that are a pair. */
MOE_FN __attribute__((noinline)) void moe_pack_pair_(const moe_kernels *kernels, moe_panel_kind_ kind, const moe_b_ *b,
                                                     int64_t p, void *pair) {
  float rows[3 * MOE_NR]; /* each is rounded up to two */
  moe_pack_plain_b_(kernels, MOE_PANEL_F32, b, p, b->k_second - 1, 1, rows);
  moe_pack_plain_b_(kernels, MOE_PANEL_F32, b, p, b->k_second, 1, rows + MOE_NR);
  if (kind == MOE_PANEL_PAIRS) kernels->gemm->pair_panel(pair, rows, 2);
  else memcpy(pair, rows, 2 * MOE_NR_BYTES_);
}

/* Elements [from, from+k) of panel p. */
MOE_FN void moe_pack_b_(const moe_kernels *kernels, moe_panel_kind_ kind, const moe_b_ *b, int64_t p, int64_t from,
                        int64_t k, void *panel) {
  const int64_t row = kind == MOE_PANEL_F32 ? MOE_NR_BYTES_ : MOE_NR_BYTES_ / 2;
  int64_t first = moe_b_run_(b, from, k);
  if (b->decode) {
    moe_decode_b_(kernels, kind, b, p, from, k, (char *)panel);
    return;
  }
  const int pair = first < k && first % 2;
  if (first > pair) moe_pack_plain_b_(kernels, kind, b, p, from, first - pair, panel);
  if (pair) moe_pack_pair_(kernels, kind, b, p, (char *)panel + (first - 1) * row);
  first += pair;
  if (first < k) moe_pack_plain_b_(kernels, kind, b, p, from + first, k - first, (char *)panel + first * row);
}

#endif
