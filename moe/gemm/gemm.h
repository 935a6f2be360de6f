/* A product, C = A*B: what every algorithm for it is given. */
#ifndef MOE_GEMM_GEMM_H
#define MOE_GEMM_GEMM_H

/* Floats of one panel's products, with room for whole vectors of rows; and of all, at most. */
#define MOE_C_FLOATS_(rows) (((rows) + 16) * MOE_NR)
#define MOE_C_FLOATS_MAX_   (MOE_NC_PANELS_WIDE * MOE_C_FLOATS_((int64_t)MOE_MC))

typedef struct moe_gemm_ {
  const moe_kernels *kernels;
  moe_product_ product;
  const moe_a_ *a;
  const moe_b_ *b;
  int64_t panel, panels; /* panels of b, at most moe_panels_at_once_, from `panel` on */
  float *c;       /* panel p's products [a.rows][64] at p * MOE_C_FLOATS_(a.rows), if they stay: room for all of them */
  char *b_buffer; /* moe_b_buffer_bytes_, unless both operands are as the micro-kernel takes them */
  const moe_prefetch_ *next;     /* what will be read after this product, or NULL */
  const moe_epilogue_ *epilogue; /* or NULL: the products stay in c */
} moe_gemm_;

/* How many panels to multiply with so many rows at a time: as many as `floats` hold the products of. Memory is then
   read in longer runs, and A is packed less often. */
MOE_FN int64_t moe_panels_at_once_(const moe_blocking_ *blocking, int64_t floats, int64_t rows) {
  return moe_min_(blocking->nc_panels, floats / MOE_C_FLOATS_(rows));
}

MOE_FN int64_t moe_b_buffer_bytes_(const moe_kernels *kernels, moe_panel_kind_ kind) {
  return kernels->blocking->kc_bytes[kind] * MOE_NR;
}

MOE_FN moe_panel_kind_ moe_gemm_kind_(const moe_gemm_ *g) { return g->kernels->gemm->panel[g->product]; }

/* kc. Rows that pack themselves meet panels that are packed: nothing asks for short blocks. */
MOE_FN int64_t moe_gemm_kc_(const moe_gemm_ *g, moe_panel_kind_ kind) {
  return moe_kc_(g->kernels->blocking, kind, g->a->pack ? MOE_MC : g->a->rows, g->b->k);
}

/* Panel p's products. */
MOE_FN float *moe_c_at_(const moe_gemm_ *g, int64_t p) { return g->c + p * MOE_C_FLOATS_(g->a->rows); }

/* All become zero, those of a row behind an odd number of them as well: small-m kernels may take two at a time. */
MOE_FN void moe_clear_c_(const moe_gemm_ *g) {
  const int64_t rows = moe_even_(g->a->rows);
  for (int64_t p = 0; p < g->panels; p++) memset(moe_c_at_(g, p), 0, (size_t)(rows * MOE_NR) * sizeof *g->c);
}

MOE_FN int moe_stores_panels_(const moe_gemm_ *g) { return g->epilogue && g->epilogue->store_panel; }

/* Panel p's products c go to the epilogue, if there is one, from the cache they are still in. */
MOE_FN void moe_store_panel_(const moe_gemm_ *g, int64_t p, float *c) {
  if (!moe_stores_panels_(g)) return;
  const moe_fpenv_ saved = moe_fpenv_enter_();
  g->epilogue->store_panel(g->epilogue->arg, p, c);
  moe_fpenv_restore_(saved);
}

/* A kc block: elements [from, from+k) of the contraction, then next_k more. */
typedef struct moe_kc_block_ {
  int64_t from, k, next_k;
  char *a; /* A's rows packed, a_stride bytes apart; of a panel, its columns */
  int64_t a_stride;
} moe_kc_block_;

MOE_FN void moe_kc_block_at_(const moe_gemm_ *g, moe_panel_kind_ kind, int64_t kc, int64_t from, moe_kc_block_ *block) {
  const moe_a_ *a = g->a;
  const int64_t rest = g->b->k - from;
  block->from = from;
  block->k = moe_min_(kc, rest);
  block->next_k = moe_min_(kc, rest - block->k);
  block->a_stride = a->is_panel ? 4 : g->kernels->blocking->kc_bytes[kind];
  block->a = a->buffer + (a->keep ? from / kc * a->rows * block->a_stride : 0);
}

#endif
