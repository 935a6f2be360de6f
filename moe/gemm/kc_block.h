/* A product's operands, and a piece of their k on its way: which tile multiplies what, and what it does beside. A
   piece's packed panel stays in cache. Beside the first panel the rows are gathered side by side, in the panel's type,
   a tile's at a time and where it can be within the tile before. Every panel is packed, where it can be within its
   first tile or, if its columns are to turn, within the last ones of the panel before. The next piece's memory is
   fetched meanwhile. */
#ifndef MOE_GEMM_KC_BLOCK_H
#define MOE_GEMM_KC_BLOCK_H

enum { MOE_TRANSPOSE_AFTER_ = 5 }; /* tiles beside which a panel is fetched before it turns */

/* Floats of one panel's products; and of all, at most. */
#define MOE_C_FLOATS_(rows) (((rows) + 16) * MOE_NR) /* room for whole vectors of rows */
#define MOE_C_FLOATS_MAX_   (MOE_NC_PANELS_WIDE * MOE_C_FLOATS_((int64_t)MOE_MC))

/* Where products go. */
typedef struct moe_epilogue_ {
  const moe_prefetch_ *into; /* fetched meanwhile, or NULL */
  /* Takes panel p's products c, which it may change, as soon as they are whole; rounding is as everywhere. NULL: they
     stay. */
  void (*store_panel)(void *arg, int64_t p, float *c);
  /* Instead of `into`, or NULL: what that reads, which is fetched beside the panel's tiles of the last piece. */
  moe_prefetch_ (*reads)(void *arg, int64_t p);
  void *arg;
  /* Instead of `leave`, where the first panel's columns leave for and those of the others beside them, if they are
     whole and k > 0: as soon as a tile's rows are. */
  moe_place_ to;
} moe_epilogue_;

MOE_FN moe_epilogue_ moe_epilogue_store_(void (*store_panel)(void *arg, int64_t p, float *c), void *arg) {
  moe_epilogue_ results = {0};
  results.store_panel = store_panel;
  results.arg = arg;
  return results;
}

typedef struct moe_gemm_ {
  const moe_kernels *kernels;
  moe_product_ product;
  const moe_a_ *a;
  const moe_b_ *b;              /* at most moe_panels_at_once_ */
  float *c;                     /* panel p's products [left.rows][64] at p * MOE_C_FLOATS_(left.rows), if they
                                  stay */
  char *b_buffer;               /* moe_b_buffers_bytes_, unless both operands are as the tile takes them */
  const moe_prefetch_ *next;    /* what will be read after this product, or NULL */
  const moe_epilogue_ *results; /* or NULL: the products stay in c */
} moe_gemm_;

/* Elements [from, from+n) of rows [first, first+rows), side by side, in the panel's type; an odd n rounded up. */
MOE_FN void moe_pack_a_(const moe_gemm_ *m, moe_panel_kind_ kind, int64_t from, int64_t n, int64_t first, int64_t rows,
                        char *to) {
  moe_rows_ part = moe_rows_from_(&m->a->place, first);
  const int64_t pitch = m->kernels->gemm->blocking.kc_bytes[kind], size = kind == MOE_PANEL_F32 ? 4 : 2;
  part.base += from * moe_dtype_bytes_(m->a->dtype);
  if (kind == MOE_PANEL_F32) m->kernels->vec->load_rows[m->a->dtype]((float *)(void *)to, pitch / size, &part, rows, n);
  for (int64_t i = 0; i < rows && kind == MOE_PANEL_PAIRS; i++)
    memcpy(to + i * pitch, moe_row_(&part, i), (size_t)(n * size));
  for (int64_t i = 0; i < rows && n % 2; i++) memset(to + i * pitch + n * size, 0, (size_t)size);
}

/* Where panels are packed: one after the other in the same place or, where the tiles of one turn the next, by turns. */
typedef struct moe_b_buffers_ {
  char *here, *next;    /* next: or NULL */
  int64_t transposed_k; /* k of the panel here that the tiles before have turned, if need be still to be converted */
} moe_b_buffers_;

MOE_FN int64_t moe_b_buffers_bytes_(const moe_kernels *kernels, moe_panel_kind_ kind) {
  return kernels->gemm->blocking.kc_bytes[kind] * MOE_NR * (kernels->gemm->ukernel_transpose[kind] ? 2 : 1);
}

/* What turns into upper halves finds the lower ones zero, and only such floats are packed beside it. */
MOE_FN moe_b_buffers_ moe_b_buffers_begin_(const moe_gemm_ *m, moe_panel_kind_ kind) {
  moe_b_buffers_ packing = {m->b_buffer, NULL, 0};
  if (!moe_b_transposes_(m->b) || m->a->packed || !m->kernels->gemm->ukernel_transpose[kind]) return packing;
  if (m->a->rows < (MOE_TRANSPOSE_AFTER_ + MOE_TRANSPOSE_PARTS_) * MOE_MR) return packing;
  packing.next = m->b_buffer + m->kernels->gemm->blocking.kc_bytes[kind] * MOE_NR;
  if (moe_is_upper_(m->b->dtype)) memset(m->b_buffer, 0, (size_t)moe_b_buffers_bytes_(m->kernels, kind));
  return packing;
}

/* On to the next panel, so many of whose k have turned. */
MOE_FN void moe_b_buffers_move_(moe_b_buffers_ *packing, int64_t transposed_k) {
  char *here = packing->here;
  packing->transposed_k = transposed_k;
  if (transposed_k == 0) return;
  packing->here = packing->next;
  packing->next = here;
}

/* A piece of k on its way: elements [from, from+n), then `more`. */
typedef struct moe_kc_block_ {
  int64_t from, n, more;
  char *a_packed; /* the rows, `pitch` bytes apart (of a panel, its columns) */
  int64_t pitch;
  moe_prefetches_ *prefetches;
  moe_b_buffers_ *packing;
  int64_t transposes; /* tiles of the panel at hand that turn the next one */
  int64_t runs, run;  /* see moe_prefetch_runs_; run: the next */
  int64_t ready;      /* rows that are gathered */
} moe_kc_block_;

/* Elements of a piece. Rows that gather themselves meet panels that are packed: nothing asks for short ones. */
MOE_FN int64_t moe_kc_of_(const moe_gemm_ *m, moe_panel_kind_ kind) {
  return moe_kc_(m->kernels, kind, m->a->gather ? MOE_MC : m->a->rows, m->b->k);
}

/* The piece from `from` on, and where its rows lie gathered. */
MOE_FN moe_kc_block_ moe_kc_block_begin_(const moe_gemm_ *m, moe_panel_kind_ kind, int64_t from) {
  const moe_a_ *a = m->a;
  const int64_t size = moe_kc_of_(m, kind), rest = m->b->k - from;
  moe_kc_block_ block = {0};
  block.from = from;
  block.n = moe_min_(size, rest);
  block.more = moe_min_(size, rest - block.n);
  block.pitch = a->packed ? 4 : m->kernels->gemm->blocking.kc_bytes[kind];
  block.a_packed = a->a_packed + (a->keep ? from / size * a->rows * block.pitch : 0);
  return block;
}

/* A panel's elements [from, from+k); k 0: there is none. */
typedef struct moe_panel_at_ {
  int64_t p, from, k;
} moe_panel_at_;

/* What is multiplied `count` panels after p: if there are no more, the next piece's first. */
MOE_FN moe_panel_at_ moe_panel_after_(const moe_gemm_ *m, const moe_kc_block_ *block, int64_t p, int64_t count) {
  const moe_panel_at_ here = {p + count, block->from, block->n}, then = {0, block->from + block->n, block->more};
  return p + count < moe_b_panels_(m->b) ? here : then;
}

/* Whether the rows are gathered beside the first panel. */
MOE_FN int moe_packs_a_(const moe_a_ *a) { return !a->cached && !a->gather; }

/* Spreads memory ahead over tiles of k elements, each of which has room for a fetch for every pair of them. */
MOE_FN void moe_kc_block_pace_(const moe_gemm_ *m, moe_prefetch_ *prefetch, int64_t tiles, int64_t k) {
  moe_prefetch_pace_(prefetch, tiles, moe_max_(1, k / 2), m->kernels->gemm->blocking.nr_parts == 1);
}

/* The tile that gathers k elements of the next rows, or NULL. */
MOE_FN moe_ukernel_fn_ moe_packs_a_in_ukernel_(const moe_gemm_ *m, int64_t k) {
  return k % MOE_OVERLAP_K_ == 0 ? m->kernels->gemm->ukernel_pack_a[m->kernels->gemm->panel[m->product]] : NULL;
}

/* Gathers the first rows of the tile at hand, from i on, unless it has been done, and lets the ordinary tile gather
   those that follow while there are whole ones; otherwise it is to take no more. Returns what multiplies. */
MOE_FN moe_ukernel_fn_ moe_pack_a_ukernel_(const moe_gemm_ *m, moe_kc_block_ *block, int64_t i, moe_ukernel_ *ukernel,
                                           moe_ukernel_fn_ multiply) {
  const moe_panel_kind_ kind = m->kernels->gemm->panel[m->product];
  const int usual = multiply == m->kernels->gemm->ukernel[m->product];
  const int64_t rest = m->a->rows - i, first = usual && rest <= MOE_MR_LAST_ ? rest : moe_min_(MOE_MR, rest);
  const int64_t ready = moe_max_(i, block->ready), others = rest / MOE_MR - 1;
  const moe_ukernel_fn_ gathers = moe_packs_a_in_ukernel_(m, block->n);
  if (i + first > ready)
    moe_pack_a_(m, kind, block->from, block->n, ready, i + first - ready, block->a_packed + ready * block->pitch);
  ukernel->rows = first;
  if (!usual || others < 1 || !gathers) return multiply;
  ukernel->rows = others * MOE_MR;
  ukernel->later = moe_rows_from_(&m->a->place, i + MOE_MR);
  ukernel->later.base += block->from * moe_dtype_bytes_(m->a->dtype);
  ukernel->later_rows = rest - MOE_MR;
  ukernel->dtype = m->a->dtype;
  ukernel->a_packed = block->a_packed + (i + MOE_MR) * block->pitch;
  block->ready = i + ukernel->rows + MOE_MR;
  return gathers;
}

/* How many of panel p's tiles turn the next panel: of its k, which must be as many as those at hand, as many parts as
   there are whole tiles left for. */
MOE_FN int64_t moe_transpose_tiles_(const moe_gemm_ *m, const moe_kc_block_ *block, int64_t p) {
  if (!block->packing->next) return 0;
  const moe_panel_at_ next = moe_panel_after_(m, block, p, 1);
  const int gathers = p == 0 && moe_packs_a_(m->a), whole = (next.p + 1) * MOE_NR <= m->b->n;
  const int64_t tiles = m->a->rows / MOE_MR - MOE_TRANSPOSE_AFTER_;
  const int64_t parts = moe_min_(MOE_TRANSPOSE_PARTS_, tiles / MOE_TRANSPOSE_PARTS_);
  if (gathers || !whole || next.k != block->n || next.k % MOE_OVERLAP_K_ != 0) return 0;
  if (!moe_transposes_to_f32_(m->b->dtype) && parts < MOE_TRANSPOSE_PARTS_) return 0;
  return parts * MOE_TRANSPOSE_PARTS_;
}

/* Lets the last whole tiles turn the next panel, and the ordinary one multiply the rows before and the last few.
   Returns what multiplies those from i on. */
MOE_FN moe_ukernel_fn_ moe_transpose_ukernel_(const moe_gemm_ *m, const moe_kc_block_ *block, int64_t p, int64_t i,
                                              moe_ukernel_ *ukernel, moe_ukernel_fn_ multiply) {
  if (block->transposes == 0) return multiply;
  const int64_t rest = m->a->rows - i, before = moe_ukernels_before_last_(rest) - block->transposes;
  const moe_panel_at_ then = moe_panel_after_(m, block, p, 1);
  if (before < 0 || multiply != m->kernels->gemm->ukernel[m->product]) return multiply;
  ukernel->rows = (before > 0 ? before : block->transposes) * MOE_MR;
  if (before > 0) return multiply;
  const moe_b_ next = moe_b_part_(m->b, then.p, 1);
  ukernel->base[0] = next.base[0] + then.from * moe_dtype_bytes_(next.dtype);
  ukernel->stride = next.stride;
  ukernel->dtype = next.dtype;
  ukernel->packed = block->packing->next;
  return m->kernels->gemm->ukernel_transpose[m->kernels->gemm->panel[m->product]];
}

/* The rows whose next elements are fetched beside this piece's tiles: all, or those of the first three tiles, which no
   tile fetches. */
MOE_FN void moe_rows_prefetch_(const moe_gemm_ *m, const moe_kc_block_ *block) {
  const moe_a_ *a = m->a;
  const int64_t size = moe_dtype_bytes_(a->dtype);
  block->prefetches->row = block->prefetches->count = block->prefetches->due = 0;
  if (!moe_packs_a_(a) || block->more == 0) return;
  block->prefetches->rows = a->place;
  block->prefetches->rows.base += (block->from + block->n) * size;
  block->prefetches->bytes = block->more * size;
  block->prefetches->count = moe_packs_a_in_ukernel_(m, block->more) ? moe_min_(a->rows, 3 * MOE_MR) : a->rows;
}

/* Whether the first tile can pack one panel's piece while it multiplies: whole columns that lie as they are read. */
MOE_FN int moe_packs_b_in_ukernel_(const moe_gemm_ *m, const moe_b_ *one, const moe_kc_block_ *block) {
  if (!m->kernels->gemm->ukernel_pack_b[m->kernels->gemm->panel[m->product]]) return 0;
  return !one->decode && !one->transposed && one->n == moe_b_width_(one) && block->n % 2 == 0 && m->a->rows >= MOE_MR;
}

/* Lets the tile pack one panel's elements from `from` on. */
MOE_FN void moe_ukernel_source_(const moe_b_ *one, int64_t from, char *packed, moe_ukernel_ *ukernel) {
  const int64_t at = from * one->stride, width = moe_b_width_(one) * moe_dtype_bytes_(one->dtype);
  ukernel->base[0] = one->base[0] + at;
  ukernel->base[1] = one->parts == 2 ? one->base[1] + at : ukernel->base[0] + width / 2;
  ukernel->dtype = one->dtype;
  ukernel->stride = one->stride;
  ukernel->packed = packed;
}

/* How far from panel p the next one lies that a tile packs, or 0. What was fetched a piece ago may have left the
   second-level cache since. */
MOE_FN int64_t moe_pack_b_prefetch_(const moe_gemm_ *m, const moe_kc_block_ *block, int64_t p) {
  const moe_b_ *b = m->b;
  const int64_t width = moe_b_width_(b) * moe_dtype_bytes_(b->dtype), last = moe_b_panels_(b) - 1;
  if (p < last) return width;
  return block->more > 0 ? block->n * b->stride - last * width : 0;
}

/* A panel that has been turned as the B that it still is, to be converted where it is. */
MOE_FN moe_b_ moe_b_partly_packed_(const moe_b_ *b, char *panel) {
  moe_b_ partly = {0};
  partly.base[0] = panel;
  partly.parts = 1;
  partly.stride = MOE_NR_BYTES_;
  partly.dtype = b->dtype;
  return partly;
}

/* Whether what the panels' products meet as they leave is fetched beside this piece's tiles. It and what comes next
   then get half of the tiles each. */
MOE_FN int moe_epilogue_prefetches_(const moe_gemm_ *m, const moe_kc_block_ *block) {
  return block->more == 0 && m->results && m->results->reads;
}

/* What is fetched beside the next run of panels, from p on: the following one or, after the last, the next piece's
   first, or what is read after this product. With panels that are in cache it is the A's next piece. Returns
   the run's end. */
MOE_FN int64_t moe_kc_block_prefetch_(const moe_gemm_ *m, moe_kc_block_ *block, int64_t p) {
  const moe_panel_kind_ kind = m->kernels->gemm->panel[m->product];
  const int64_t panels = moe_b_panels_(m->b), run = ++block->run % block->runs;
  const int64_t end = moe_run_first_(m->b, block->runs, block->run), first = moe_run_first_(m->b, block->runs, run);
  const moe_panel_at_ then = moe_panel_after_(m, block, p, end - p);
  const moe_b_ b = moe_b_part_(m->b, then.p, moe_run_first_(m->b, block->runs, run + 1) - first);
  const moe_prefetch_ none = {0};
  moe_prefetch_ *prefetch = &block->prefetches->prefetch;
  if (then.k > 0)
    *prefetch = m->a->reads ? m->a->reads(m->a, then.from, then.k) : moe_b_prefetch_(kind, &b, then.from, then.k);
  else
    *prefetch = m->next ? *m->next : none;
  const int64_t tiles = (end - p) * (block->prefetches->tiles / panels);
  const int64_t before = tiles - block->transposes;
  const int64_t half = moe_ceil_div_(tiles, 2);
  moe_kc_block_pace_(m, prefetch, moe_epilogue_prefetches_(m, block) ? moe_min_(before, half) : before, block->n);
  return end;
}

/* Where the sums of panel p leave for after this piece. */
MOE_FN moe_place_ moe_panel_to_(const moe_gemm_ *m, const moe_kc_block_ *block, int64_t p) {
  const moe_place_ nowhere = {0};
  const int whole = (p + 1) * moe_b_width_(m->b) <= m->b->n;
  if (block->more > 0 || !m->results || !whole) return nowhere;
  moe_place_ to = moe_place_at_(&m->results->to, 0, p * MOE_NR);
  to.begins = p == 0;
  to.ends = (p + 2) * moe_b_width_(m->b) > m->b->n;
  return to;
}

/* Lets the tile find the piece of panel p, if need be packed. Returns what multiplies first: it may be what packs. */
MOE_FN moe_ukernel_fn_ moe_ukernel_panel_(const moe_gemm_ *m, const moe_kc_block_ *block, int64_t p,
                                          moe_ukernel_fn_ usual, moe_ukernel_ *ukernel) {
  const moe_panel_kind_ kind = m->kernels->gemm->panel[m->product];
  if (m->b->panel) {
    ukernel->panel = m->b->panel + p * m->b->panel_bytes + moe_panel_bytes_(kind, block->from);
    return usual;
  }
  const moe_b_ one = moe_b_part_(m->b, p, 1);
  const moe_b_buffers_ *packing = block->packing;
  const int64_t transposed_k = packing->transposed_k;
  ukernel->panel = packing->here;
  if (transposed_k > 0 && !moe_transposes_to_f32_(one.dtype)) {
    const moe_b_ u16 = moe_b_partly_packed_(&one, packing->here);
    moe_ukernel_source_(&u16, 0, packing->here, ukernel);
    ukernel->prefetch = 0;
    return m->kernels->gemm->ukernel_pack_b[kind];
  }
  if (moe_packs_b_in_ukernel_(m, &one, block)) {
    moe_ukernel_source_(&one, block->from, packing->here, ukernel);
    ukernel->prefetch = moe_pack_b_prefetch_(m, block, p);
    return m->kernels->gemm->ukernel_pack_b[kind];
  }
  if (transposed_k < block->n)
    moe_pack_b_(m->kernels, kind, &one, block->from + transposed_k, block->n - transposed_k,
                packing->here + moe_panel_bytes_(kind, transposed_k));
  return usual;
}

#endif
