/* Panels of bf16 pairs and the micro-kernels that multiply them, for an instruction set with a bf16 dot product. Where
   f32 kernels take two fused multiply-adds per pair of k, these take one dot product, to the same bits. The rest is the
   vocabulary's. */

MOE_INLINE MOE_V(i) MOE_K(join)(MOE_V(i) even, MOE_V(i) odd) { return MOE_V(ori)(even, MOE_V(slli)(odd, 16)); }

MOE_INLINE void MOE_K(pack_whole_pairs)(uint32_t *p, const moe_rows_ *rows, int64_t pairs, int vectors) {
  for (int64_t r = 0; r < pairs; r++, p += MOE_NR) {
    const char *even = moe_row_(rows, 2 * r), *odd = moe_row_(rows, 2 * r + 1);
    MOE_UNROLL
    for (int j = 0; j < vectors; j++) MOE_V(storei)
    (p + j * MOE_W, MOE_K(join)(MOE_V(loadu16)(even + 2 * j * MOE_W), MOE_V(loadu16)(odd + 2 * j * MOE_W)));
  }
}

/* The pair panel's columns [col, col+width) from k rows of bf16; whole parts, of 32 or 64 columns, first. */
MOE_FN void MOE_K(pack_rows_pairs)(void *panel, int64_t col, int64_t width, const moe_rows_ *rows, int64_t k,
                                   int64_t n) {
  uint32_t *p = (uint32_t *)panel + col;
  const MOE_V(i) zero = MOE_V(set1i)(0u);
  int64_t done = 0;
  if (n == width) {
    if (width == MOE_NR) MOE_K(pack_whole_pairs)(p, rows, k / 2, MOE_NR / MOE_W);
    else MOE_K(pack_whole_pairs)(p, rows, k / 2, MOE_NR / 2 / MOE_W);
    done = k / 2 * 2;
    p += done / 2 * MOE_NR;
  }
  for (int64_t r = done; r < k; r += 2, p += MOE_NR) {
    const char *even = moe_row_(rows, r), *odd = r + 1 < k ? moe_row_(rows, r + 1) : NULL;
    int64_t i = 0;
    for (; i + MOE_W <= n; i += MOE_W)
      MOE_V(storei)(p + i, MOE_K(join)(MOE_V(loadu16)(even + 2 * i), odd ? MOE_V(loadu16)(odd + 2 * i) : zero));
    if (i < n) {
      const MOE_V(i) odd_row = odd ? MOE_V(loadu16n)(odd + 2 * i, n - i) : zero;
      MOE_V(storei)(p + i, MOE_K(join)(MOE_V(loadu16n)(even + 2 * i, n - i), odd_row));
      i += MOE_W;
    }
    for (; i < width; i += MOE_W) MOE_V(storei)(p + i, zero);
  }
}

/* The upper 16 bits of floats. */
MOE_INLINE MOE_V(i) MOE_K(join_uppers)(MOE_V(f) even, MOE_V(f) odd) {
  return MOE_V(mux)(MOE_V(set1i)(0xffffu), MOE_V(srli)(MOE_V(casti)(even), 16), MOE_V(casti)(odd));
}

MOE_FN void MOE_K(pair_panel)(void *pairs, const float *panel, int64_t k) {
  uint32_t *p = (uint32_t *)pairs;
  for (int64_t r = 0; r < k; r += 2, p += MOE_NR, panel += 2 * MOE_NR)
    for (int j = 0; j < MOE_NR; j += MOE_W)
      MOE_V(storei)(p + j, MOE_K(join_uppers)(MOE_V(load)(panel + j), MOE_V(load)(panel + MOE_NR + j)));
}

#include "ukernel_store.inl"

/* Where cores share the path to memory, Zen 4 drops many prefetches for the second level: where there is time, they are
   made again, for the first one. */
MOE_INLINE void MOE_K(ukernel_prefetch_pair)(moe_ukernel_at_ *at) {
  if (at->fetch.back) __builtin_prefetch(at->fetch.at + at->fetch.back, 0, 3);
  moe_ukernel_prefetch_(at, 4, MOE_KC_BYTES);
}

/* One pair of k; `packed`: A is a panel. If it is the last, each row ends once its sums are done (see
   ukernel_row_end): stores in one block would keep the products of the next rows waiting. */
MOE_INLINE void MOE_K(ukernel_pair)(int rows, int packed, const char *row, const MOE_V(i) * b, const moe_ukernel_ *t,
                                    const moe_ukernel_at_ *at, int last, char *lines,
                                    MOE_V(f) acc[MOE_MR][MOE_NR / MOE_W]) {
  MOE_UNROLL
  for (int i = 0; i < rows; i++) {
    MOE_V(i) a = MOE_V(set1i)(moe_loadi_scalar(row + i * (packed ? 4 : MOE_KC_BYTES)));
    MOE_UNROLL
    for (int j = 0; j < MOE_NR / MOE_W; j++) acc[i][j] = MOE_K(dot2)(a, b[j], acc[i][j]);
    if (last) MOE_K(ukernel_row_end)(t, at, i, lines, acc[i]);
  }
}

/* The same from a packed panel, with prefetches. */
MOE_INLINE_LARGE void MOE_K(ukernel_packed)(int rows, int packed, const char *row, const uint32_t *panel,
                                            const moe_ukernel_ *t, int last, char *lines, moe_ukernel_at_ *at,
                                            MOE_V(f) acc[MOE_MR][MOE_NR / MOE_W]) {
  MOE_V(i) b[MOE_NR / MOE_W];
  MOE_K(ukernel_prefetch_pair)(at);
  MOE_UNROLL
  for (int j = 0; j < MOE_NR / MOE_W; j++) b[j] = MOE_V(loadi)(panel + j * MOE_W);
  MOE_K(ukernel_pair)(rows, packed, row, b, t, at, last, lines, acc);
}

/* nt: with `packed`, the rows before, which are still being stored. */
MOE_INLINE_LARGE void MOE_K(ukernel_bf16_rows)(int rows, int packed, const moe_ukernel_ *t, moe_ukernel_at_ *at,
                                               char *lines, moe_nt_ *nt) {
  MOE_V(f) acc[MOE_MR][MOE_NR / MOE_W];
  const uint32_t *panel = (const uint32_t *)t->panel;
  const char *row = at->row;
  MOE_V(ukernel_begin)(rows, at->c, t->add, acc);
  for (int64_t p = (t->k + 1) / 2; p > 1; p--, row += packed ? MOE_NR_BYTES_ : 4, panel += MOE_NR) {
    if (packed && nt->left > 0) MOE_K(ukernel_line_nt)(nt);
    MOE_OPAQUE_POINTER(row);
    MOE_K(ukernel_packed)(rows, packed, row, panel, t, 0, NULL, at, acc);
  }
  if (packed) MOE_K(ukernel_lines_nt)(nt);
  if (packed && lines) MOE_K(ukernel_packed)(rows, packed, row, panel, t, 1, lines, at, acc);
  else MOE_K(ukernel_packed)(rows, packed, row, panel, t, 1, NULL, at, acc);
}

MOE_FN void MOE_K(ukernel_pairs)(const moe_ukernel_ *t) {
  for (moe_ukernel_at_ at = moe_ukernel_first_(t); at.rows > 0; moe_ukernel_next_(t, MOE_KC_BYTES, &at)) {
    moe_ukernel_prefetch_begin_(t, MOE_KC_BYTES, &at);
    switch (at.now) {
      case 1:
      case 2: MOE_K(ukernel_bf16_rows)(2, 0, t, &at, NULL, NULL); break;
      case 3:
      case 4: MOE_K(ukernel_bf16_rows)(4, 0, t, &at, NULL, NULL); break;
      default: MOE_K(ukernel_bf16_rows)(MOE_MR, 0, t, &at, NULL, NULL); break;
    }
  }
}

MOE_FN void MOE_K(ukernel_packed_a_bf16)(const moe_ukernel_ *t) {
  MOE_LINE_ALIGNED char lines[MOE_MR * MOE_NR_BYTES_];
  moe_nt_ nt = {0};
  for (moe_ukernel_at_ at = moe_ukernel_first_(t); at.rows > 0; moe_ukernel_move_(t, 4, &at)) {
    moe_ukernel_prefetch_begin_(t, 4, &at);
    if (at.now <= 4) MOE_K(ukernel_bf16_rows)(4, 1, t, &at, NULL, &nt);
    else MOE_K(ukernel_bf16_rows)(MOE_MR, 1, t, &at, at.to && t->to.nt ? lines : NULL, &nt);
    MOE_K(ukernel_store)(t, &at, at.now <= 4, lines, &nt);
  }
  MOE_K(ukernel_lines_nt)(&nt);
}

/* Like ukernel_pack_b.inl. */
MOE_FN void MOE_K(ukernel_pack_b_bf16)(const moe_ukernel_ *t) {
  MOE_V(f) acc[MOE_MR][MOE_NR / MOE_W];
  const int64_t stride = t->stride, prefetch = t->prefetch;
  uint32_t *panel = (uint32_t *)t->packed;
  moe_ukernel_at_ at = moe_ukernel_first_(t);
  const char *src[2] = {t->base[0], t->base[1]}, *row = t->row;
  moe_ukernel_prefetch_begin_(t, MOE_KC_BYTES, &at);
  MOE_V(ukernel_begin)(MOE_MR, t->c, t->add, acc);
  for (int64_t p = t->k / 2; p > 0; p--, row += 4, panel += MOE_NR) {
    MOE_V(i) b[MOE_NR / MOE_W];
    MOE_OPAQUE_POINTER(row);
    MOE_K(ukernel_prefetch_pair)(&at);
    MOE_UNROLL
    for (int j = 0; j < MOE_NR / MOE_W; j++) {
      const char *even = src[j * MOE_W / (MOE_NR / 2)] + j * MOE_W % (MOE_NR / 2) * 2;
      b[j] = MOE_K(join)(MOE_V(loadu16)(even), MOE_V(loadu16)(even + stride));
      MOE_V(storei)(panel + j * MOE_W, b[j]);
      if (j * MOE_W * 2 % 64 == 0) {
        __builtin_prefetch(even + prefetch, 0, 2);
        __builtin_prefetch(even + stride + prefetch, 0, 2);
      }
    }
    MOE_K(ukernel_pair)(MOE_MR, 0, row, b, t, &at, 0, NULL, acc);
    src[0] += 2 * stride;
    src[1] += 2 * stride;
  }
  MOE_V(ukernel_end)(MOE_MR, t->c, acc);
  moe_ukernel_store_(t, &at);
}

#define MOE_SMALL_M_PAIRS 1
#include "small_m_columns.inl"
#undef MOE_SMALL_M_PAIRS

#include "small_m_bf16.inl"

#define MOE_CODES_BITS 4
#define MOE_PLAIN      MOE_V(plain_e2m1)
#include "../quant/pack_codes_bf16.inl"
#undef MOE_CODES_BITS
#undef MOE_PLAIN

#define MOE_CODES_BITS 8
#define MOE_PLAIN      MOE_V(plain_fp8)
#include "../quant/pack_codes_bf16.inl"
#undef MOE_CODES_BITS
#undef MOE_PLAIN

#define MOE_GEMM_DOT   0
#define MOE_GEMM_TABLE moe_gemm_table_fma
#include "table.inl"
#undef MOE_GEMM_TABLE
#undef MOE_GEMM_DOT
#define MOE_GEMM_DOT   1
#define MOE_GEMM_TABLE moe_gemm_table
#include "table.inl"
#undef MOE_GEMM_TABLE
#undef MOE_GEMM_DOT
