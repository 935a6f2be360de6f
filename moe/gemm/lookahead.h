/* Lookahead: which memory is prefetched while a micro-kernel multiplies. */
#ifndef MOE_GEMM_LOOKAHEAD_H
#define MOE_GEMM_LOOKAHEAD_H

/* Of how many panels k elements are prefetched at most, to be multiplied with so many rows: what the second-level cache
   holds besides what is multiplied; two with many rows, whose products fill that cache and give memory time enough. Of
   columns that lie far apart, which may share few sets of it, one. Panels that are in cache make room for something
   else. */
MOE_FN int64_t moe_panels_prefetched_(const moe_blocking_ *blocking, moe_panel_kind_ kind, const moe_b_ *b,
                                      int64_t panels, int64_t k, int64_t rows) {
  if (b->in_cache) return panels;
  if (b->transposed) return 1;
  const int64_t bytes = b->panel ? moe_panel_bytes_(kind, k) : k * MOE_NR * b->group / 32;
  const int64_t fit = moe_max_(1, blocking->prefetch_bytes / moe_max_(1, bytes));
  return rows > MOE_MC_MANY ? moe_min_(2, fit) : fit;
}

/* In how many runs of panels, as equal as can be, one is prefetched while the one before is multiplied: a short one
   would have to prefetch as much as all others in less time. */
MOE_FN int64_t moe_prefetch_runs_(const moe_blocking_ *blocking, moe_panel_kind_ kind, const moe_b_ *b, int64_t panels,
                                  int64_t k, int64_t rows) {
  return moe_ceil_div_(panels, moe_panels_prefetched_(blocking, kind, b, panels, k, rows));
}

/* The first panel of a run. */
MOE_FN int64_t moe_run_first_(int64_t panels, int64_t runs, int64_t run) { return run * panels / runs; }

/* What a micro-kernel's rows are told to prefetch. It is called with wide vector registers in use, where moves of narrow
   vectors are slow: so it stands here, where code is compiled without them (impl.h). */
MOE_INLINE void moe_prefetches_rows_(moe_prefetches_ *prefetches) {
  for (; prefetches->due >= prefetches->ukernels && prefetches->row < prefetches->count;
       prefetches->due -= prefetches->ukernels) {
    const char *row = moe_row_(&prefetches->rows, prefetches->row++);
    for (int64_t at = 0; at < prefetches->bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
  }
  if (prefetches->row == prefetches->count) prefetches->count = prefetches->row = prefetches->due = 0;
}

MOE_FN __attribute__((noinline)) int64_t moe_prefetches_step_(moe_prefetches_ *prefetches, moe_prefetch_block_ *fetch) {
  moe_prefetches_rows_(prefetches);
  const int64_t fetches = moe_prefetch_step_(&prefetches->b, fetch);
  return fetches ? fetches : moe_prefetch_step_(&prefetches->into, fetch);
}

typedef struct moe_lookahead_ {
  moe_prefetches_ prefetches; /* what the micro-kernels take */
  int64_t runs, run, end;     /* run: the next one; end: the first panel behind the one at hand */
} moe_lookahead_;

/* Panel p's elements [from, from+k); k 0: there is none. */
typedef struct moe_panel_at_ {
  int64_t p, from, k;
} moe_panel_at_;

/* What is multiplied `count` panels after p: if there are no more, the next kc block's first. */
MOE_FN moe_panel_at_ moe_panel_after_(const moe_gemm_ *g, const moe_kc_block_ *block, int64_t p, int64_t count) {
  const moe_panel_at_ here = {p + count, block->from, block->k}, next = {0, block->from + block->k, block->next_k};
  return p + count < g->panels ? here : next;
}

/* Spreads a prefetch over micro-kernels of k elements, each of which has room for a line for every pair of them. */
MOE_FN void moe_lookahead_pace_(const moe_gemm_ *g, moe_prefetch_ *prefetch, int64_t ukernels, int64_t k) {
  moe_prefetch_pace_(prefetch, ukernels, moe_max_(1, k / 2), g->kernels->blocking->nr_parts == 1);
}

/* Whether A's rows are packed with the first panel. */
MOE_FN int moe_packs_a_(const moe_a_ *a) { return !a->cached && !a->pack; }

MOE_FN int64_t moe_ukernels_of_panel_(const moe_gemm_ *g) { return moe_ceil_div_(g->a->rows, MOE_MR); }

MOE_FN void moe_lookahead_begin_(const moe_gemm_ *g, int64_t kc, moe_lookahead_ *look) {
  moe_prefetches_ *prefetches = &look->prefetches;
  memset(look, 0, sizeof *look);
  prefetches->ukernels = g->panels * moe_ukernels_of_panel_(g);
  if (g->epilogue && g->epilogue->into) prefetches->into = *g->epilogue->into;
  moe_lookahead_pace_(g, &prefetches->into, moe_ceil_div_(g->b->k, kc) * prefetches->ukernels, moe_min_(kc, g->b->k));
}

/* At a kc block: the next one's rows of A are prefetched during this one. */
MOE_FN void moe_lookahead_block_(const moe_gemm_ *g, const moe_kc_block_ *block, moe_lookahead_ *look) {
  const moe_a_ *a = g->a;
  const int64_t size = moe_dtype_bytes_(a->dtype);
  moe_prefetches_ *prefetches = &look->prefetches;
  look->end = look->run = 0;
  look->runs = moe_prefetch_runs_(g->kernels->blocking, moe_gemm_kind_(g), g->b, g->panels, block->k, a->rows);
  prefetches->row = prefetches->count = prefetches->due = 0;
  if (!moe_packs_a_(a) || block->next_k == 0) return;
  prefetches->rows = a->place;
  prefetches->rows.base += (block->from + block->k) * size;
  prefetches->bytes = block->next_k * size;
  prefetches->count = a->rows;
}

/* Whether what the epilogue reads is prefetched during this kc block. It and what comes next then get half of the
   micro-kernels each. */
MOE_FN int moe_lookahead_epilogue_(const moe_gemm_ *g, const moe_kc_block_ *block) {
  return block->next_k == 0 && g->epilogue && g->epilogue->reads;
}

/* At the run of panels from p on: the following run is prefetched or, after the last, the next kc block's first, or
   what is read after this product. With panels that are in cache it is A's next kc block. */
MOE_FN void moe_lookahead_run_(const moe_gemm_ *g, const moe_kc_block_ *block, int64_t p, moe_lookahead_ *look) {
  const int64_t run = ++look->run % look->runs, first = moe_run_first_(g->panels, look->runs, run);
  moe_prefetch_ *b = &look->prefetches.b;
  look->end = moe_run_first_(g->panels, look->runs, look->run);
  const moe_panel_at_ next = moe_panel_after_(g, block, p, look->end - p);
  if (next.k > 0 && g->a->reads) g->a->reads(g->a, next.from, next.k, b);
  else if (next.k > 0)
    moe_b_reads_(g->b, moe_gemm_kind_(g), g->panel + next.p, moe_run_first_(g->panels, look->runs, run + 1) - first,
                 next.from, next.k, b);
  else if (g->next) *b = *g->next;
  else memset(b, 0, sizeof *b);
  const int64_t ukernels = (look->end - p) * moe_ukernels_of_panel_(g);
  moe_lookahead_pace_(g, b, moe_lookahead_epilogue_(g, block) ? moe_ceil_div_(ukernels, 2) : ukernels, block->k);
}

/* At panel p. */
MOE_FN void moe_lookahead_panel_(const moe_gemm_ *g, const moe_kc_block_ *block, int64_t p, moe_lookahead_ *look) {
  if (p == look->end) moe_lookahead_run_(g, block, p, look);
  if (!moe_lookahead_epilogue_(g, block)) return;
  g->epilogue->reads(g->epilogue->arg, p, &look->prefetches.into);
  moe_lookahead_pace_(g, &look->prefetches.into, moe_ceil_div_(moe_ukernels_of_panel_(g), 2), block->k);
}

#endif
