/* The f32 micro-kernel of packed A times packed B, for weight gradients: rows of A are columns of a panel. */

#include "ukernel_store.inl"

/* The rows at hand; lines: room for them rounded, or NULL. */
MOE_INLINE_LARGE void MOE_K(packed_a_rows)(int rows, const moe_ukernel_ *t, moe_ukernel_at_ *at, char *lines,
                                           moe_nt_ *nt) {
  MOE_V(f) acc[MOE_MR][MOE_NR / MOE_W];
  const float *panel = (const float *)t->panel;
  const char *row = at->row;
  MOE_V(ukernel_begin)(rows, at->c, t->add, acc);
  for (int64_t p = (t->k + 1) / 2; p > 0; p--, row += 2 * MOE_NR_BYTES_, panel += 2 * MOE_NR) {
    MOE_V(ukernel_prefetch_step)(at);
    if (nt->left > 0) MOE_K(ukernel_line_nt)(nt);
    MOE_OPAQUE_POINTER(row);
    MOE_V(ukernel_pairs)(rows, 1, 1, row, panel, acc);
  }
  MOE_K(ukernel_lines_nt)(nt);
  MOE_UNROLL
  for (int i = 0; i < rows; i++) MOE_K(ukernel_row_end)(t, at, i, lines, acc[i]);
}

MOE_FN void MOE_K(ukernel_packed_a_f32)(const moe_ukernel_ *t) {
  MOE_LINE_ALIGNED char lines[MOE_MR * MOE_NR_BYTES_];
  moe_nt_ nt = {0};
  for (moe_ukernel_at_ at = moe_ukernel_first_(t); at.rows > 0; moe_ukernel_move_(t, 4, &at)) {
    moe_ukernel_prefetch_begin_(t, 4, &at);
    if (at.now <= 4) MOE_K(packed_a_rows)(4, t, &at, NULL, &nt);
    else MOE_K(packed_a_rows)(MOE_MR, t, &at, at.to && t->to.nt ? lines : NULL, &nt);
    MOE_K(ukernel_store)(t, &at, at.now <= 4, lines, &nt);
  }
  MOE_K(ukernel_lines_nt)(&nt);
}
