/* The loops around the micro-kernel: over kc blocks of the contraction, and in each over B's panels, all rows of A
   times a panel. A's rows are packed with the first panel of a kc block, a panel of B within its first micro-kernel
   where that can be, so that weights are read once, for few rows or hundreds. */
#ifndef MOE_GEMM_MACRO_KERNEL_H
#define MOE_GEMM_MACRO_KERNEL_H

/* Where the products of panel p are stored by the micro-kernels of this kc block, if they are. */
MOE_FN void moe_panel_to_(const moe_gemm_ *g, const moe_kc_block_ *block, int64_t p, moe_place_ *to) {
  const int64_t width = moe_b_width_(g->b), end = (g->panel + p + 1) * width;
  memset(to, 0, sizeof *to);
  if (block->next_k > 0 || !g->epilogue || end > g->b->n) return;
  *to = g->epilogue->to;
  moe_place_move_(to, 0, p * MOE_NR);
  to->begins = p == 0;
  to->ends = p + 1 == g->panels || end + width > g->b->n;
}

/* Where panel p's products are formed: over a whole k, and where each panel's are stored before the next, in one place,
   which stays in cache. */
MOE_FN float *moe_panel_c_(const moe_gemm_ *g, const moe_kc_block_ *block, int64_t p) {
  return moe_c_at_(g, moe_stores_panels_(g) && block->k == g->b->k ? 0 : p);
}

/* Whether the first micro-kernel can pack panel p while it multiplies: whole columns that lie as they are read, in one
   part of the contraction. */
MOE_FN int moe_packs_b_in_ukernel_(const moe_gemm_ *g, const moe_kc_block_ *block, int64_t p) {
  const moe_b_ *b = g->b;
  if (!g->kernels->gemm->ukernel_pack_b[moe_gemm_kind_(g)]) return 0;
  if (moe_b_second_(b, block->from) != moe_b_second_(b, block->from + block->k - 1)) return 0;
  return !b->decode && !b->transposed && moe_b_columns_(b, p, 1) == moe_b_width_(b) && block->k % 2 == 0 &&
         g->a->rows >= MOE_MR;
}

/* How far from panel p the next one lies that a micro-kernel packs, or 0. What was prefetched a kc block ago may have
   left the second-level cache since. */
MOE_FN int64_t moe_pack_b_distance_(const moe_gemm_ *g, const moe_kc_block_ *block, int64_t p) {
  const int64_t width = moe_b_width_(g->b) * moe_dtype_bytes_(g->b->dtype), last = g->panels - 1;
  if (p < last) return width;
  return block->next_k > 0 ? block->k * g->b->stride - last * width : 0;
}

/* Lets the micro-kernel find panel p, packed now if it must be. Returns what multiplies the first rows: it may be what
   packs. */
MOE_FN moe_ukernel_fn_ moe_ukernel_panel_(const moe_gemm_ *g, const moe_kc_block_ *block, int64_t p,
                                          moe_ukernel_fn_ usual, moe_ukernel_ *u) {
  const moe_panel_kind_ kind = moe_gemm_kind_(g);
  const moe_b_ *b = g->b;
  const int64_t panel = g->panel + p;
  if (b->panel) {
    u->panel = b->panel + panel * b->panel_bytes + moe_panel_bytes_(kind, block->from);
    return usual;
  }
  u->panel = g->b_buffer;
  if (!moe_packs_b_in_ukernel_(g, block, panel)) {
    moe_pack_b_(g->kernels, kind, b, panel, block->from, block->k, g->b_buffer);
    return usual;
  }
  u->base[0] = moe_b_from_(b, 0, panel, block->from);
  u->base[1] =
      b->parts == 2 ? moe_b_from_(b, 1, panel, block->from) : u->base[0] + MOE_NR / 2 * moe_dtype_bytes_(b->dtype);
  u->dtype = b->dtype;
  u->stride = b->stride;
  u->packed = g->b_buffer;
  u->prefetch = moe_pack_b_distance_(g, block, p);
  return g->kernels->gemm->ukernel_pack_b[kind];
}

/* How many of the `rest` rows a micro-kernel call takes: all, where nothing is to be packed before they are
   multiplied. */
MOE_FN int64_t moe_ukernel_rows_(int packs_a, int packs_b, int64_t rest) {
  if (!packs_a && !packs_b) return rest;
  return !packs_b && rest <= MOE_MR_LAST_ ? rest : moe_min_(MOE_MR, rest);
}

/* All rows times panel p of this kc block. After the last kc block the products are stored. */
MOE_FN void moe_macro_panel_(const moe_gemm_ *g, const moe_kc_block_ *block, int64_t p, moe_prefetches_ *prefetches) {
  const moe_a_ *a = g->a;
  const moe_panel_kind_ kind = moe_gemm_kind_(g);
  const moe_ukernel_fn_ usual =
      a->is_panel ? g->kernels->gemm->ukernel_packed_a[kind] : g->kernels->gemm->ukernel[g->product];
  const int packs_a = p == 0 && moe_packs_a_(a);
  float *c = moe_panel_c_(g, block, p), *next_c = moe_panel_c_(g, block, moe_panel_after_(g, block, p, 1).p);
  moe_place_ to;
  moe_ukernel_ u;
  u.k = block->k;
  u.add = block->from > 0;
  u.prefetches = prefetches;
  moe_panel_to_(g, block, p, &to);
  u.store = g->kernels->vec->store_rows[to.dtype];
  moe_ukernel_fn_ multiply = moe_ukernel_panel_(g, block, p, usual, &u);
  for (int64_t i = 0; i < a->rows; i += u.rows, multiply = usual) {
    const int64_t rest = a->rows - i;
    u.rows = moe_ukernel_rows_(packs_a, multiply != usual, rest);
    u.row = block->a + i * block->a_stride;
    u.c = c + i * MOE_NR;
    u.to = to;
    moe_place_move_(&u.to, i, 0);
    if (packs_a) moe_pack_a_(g->kernels, kind, a, block->from, block->k, i, u.rows, block->a + i * block->a_stride);
    const int last = u.rows == rest;
    u.a_next = last ? block->a : u.row + u.rows * block->a_stride;
    u.c_next = last ? next_c : u.c + u.rows * MOE_NR;
    multiply(&u);
  }
  if (block->next_k == 0 && !to.base) moe_store_panel_(g, p, c);
}

MOE_FN void moe_multiply_packed_(const moe_gemm_ *g) {
  const moe_panel_kind_ kind = moe_gemm_kind_(g);
  const int64_t kc = moe_gemm_kc_(g, kind), k = g->b->k;
  moe_lookahead_ look;
  moe_lookahead_begin_(g, kc, &look);
  for (int64_t from = 0; from < k; from += kc) {
    moe_kc_block_ block;
    moe_kc_block_at_(g, kind, kc, from, &block);
    moe_lookahead_block_(g, &block, &look);
    if (g->a->pack) g->a->pack(g->a, g->kernels, from, block.k, block.a, g->b_buffer);
    for (int64_t p = 0; p < g->panels; p++) {
      moe_lookahead_panel_(g, &block, p, &look);
      moe_macro_panel_(g, &block, p, &look.prefetches);
    }
  }
}

/* C = A*B, by the algorithm for so many rows. */
MOE_FN void moe_multiply_(const moe_gemm_ *g) {
  const moe_algorithm_ algorithm = moe_algorithm_of_(g->kernels, g->product, g->b, g->a->rows, g->a->keep);
  const int small_m = algorithm != MOE_ALGORITHM_PACKED_;
#if MOE_X86
  const int by_mode = g->product == MOE_PRODUCT_BF16 && (small_m || g->kernels->gemm->bf16_by_mode);
  if (by_mode) moe_flush_on_();
#endif
  if (small_m || g->b->k == 0) moe_clear_c_(g);
  if (small_m) moe_multiply_small_m_(g, algorithm);
  else moe_multiply_packed_(g);
  for (int64_t p = 0; p < g->panels && (small_m || g->b->k == 0); p++) moe_store_panel_(g, p, moe_c_at_(g, p));
#if MOE_X86
  if (by_mode) moe_flush_off_();
#endif
}

#endif
