/* A's rows, or a panel's columns, side by side as the micro-kernels take them. */
#ifndef MOE_GEMM_PACK_A_H
#define MOE_GEMM_PACK_A_H

/* Elements [from, from+n) of rows [first, first+rows), a kc block apart, in the panel's type; an odd n rounded up. The
   rows after them are prefetched: they are packed next. */
MOE_FN void moe_pack_a_(const moe_kernels *kernels, moe_panel_kind_ kind, const moe_a_ *a, int64_t from, int64_t n,
                        int64_t first, int64_t rows, char *to) {
  moe_rows_ part = moe_rows_from_(&a->place, first);
  const int64_t pitch = kernels->blocking->kc_bytes[kind], size = kind == MOE_PANEL_F32 ? 4 : 2;
  const int64_t bytes = n * moe_dtype_bytes_(a->dtype), later = moe_min_(2 * rows, a->rows - first);
  part.base += from * moe_dtype_bytes_(a->dtype);
  for (int64_t i = rows; i < later; i++)
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(moe_row_(&part, i) + at, 0, 3);
  if (kind == MOE_PANEL_F32) kernels->vec->load_rows[a->dtype]((float *)(void *)to, pitch / size, &part, rows, n);
  for (int64_t i = 0; i < rows && kind == MOE_PANEL_PAIRS; i++)
    memcpy(to + i * pitch, moe_row_(&part, i), (size_t)(n * size));
  for (int64_t i = 0; i < rows && n % 2; i++) memset(to + i * pitch + n * size, 0, (size_t)size);
}

/* n columns of a panel of k as rows, `pitch` bytes apart and with room for 64: the panel is read, and the rows are
   written, a vector beyond. */
MOE_FN void moe_transpose_panel_(const moe_kernels *kernels, moe_panel_kind_ kind, const char *panel, int64_t k,
                                 int64_t n, char *rows, int64_t pitch) {
  const int64_t words = kind == MOE_PANEL_F32 ? moe_even_(k) : moe_even_(k) / 2;
  for (int64_t at = 0; at < words; at += MOE_NR)
    kernels->vec->transpose_words(rows + at * 4, pitch, panel + at * MOE_NR_BYTES_, MOE_NR_BYTES_,
                                  moe_min_(MOE_NR, words - at), n);
}

#endif
