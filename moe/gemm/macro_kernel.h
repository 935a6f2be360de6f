/* Rows times a group of panels, each 64 columns of a B: the loop around the tile. It walks k in pieces
   (piece.h) and multiplies every panel's with all rows, so that weights are read once, for one row or hundreds. A few
   rows are multiplied with the weights as they stream past, unpacked. */
#ifndef MOE_GEMM_MACRO_KERNEL_H
#define MOE_GEMM_MACRO_KERNEL_H

enum {
  MOE_NC_PANELS_MAX = 128, /* panels at a time, of however few rows */
  /* Products that are added to as weights stream past: fewer would fit a first-level cache, but end memory's runs
     sooner, which costs more (measured). */
  MOE_SMALL_M_C_FLOATS_ = 16384,
  MOE_SMALL_M_PREFETCH_BYTES_ = 16384 /* bytes that are under way from memory meanwhile */
};

/* Whether plain weights stream by dot products. */
MOE_FN int moe_small_m_is_bf16_(const moe_kernels *kernels, moe_product_ product, moe_dtype dtype) {
  return kernels->gemm->small_m_bf16 && product == MOE_PRODUCT_BF16 && dtype == MOE_DTYPE_BF16;
}

/* How a product is formed: panel by panel or, of so few rows that reading the B is most of the work, as it
   streams past. */
typedef enum moe_algorithm_ {
  MOE_ALGORITHM_PACKED_,
  MOE_ALGORITHM_SMALL_M_ROWS_, /* its rows stream, and fetch for themselves what comes next, in another product as well */
  MOE_ALGORITHM_SMALL_M_COLUMNS_, /* its columns do, and turn */
  MOE_ALGORITHM_SMALL_M_CODES_    /* it streams itself while it unpacks */
} moe_algorithm_;

/* The last two want rows whole: kept. */
MOE_FN moe_algorithm_ moe_algorithm_of_(const moe_kernels *kernels, moe_product_ product, const moe_a_ *a,
                                        const moe_b_ *b) {
  const int few_of_codes = a->rows <= kernels->gemm->blocking.small_m_codes_rows;
  if (!kernels->gemm->small_m) return MOE_ALGORITHM_PACKED_;
  if (b->format) return few_of_codes ? MOE_ALGORITHM_SMALL_M_ROWS_ : MOE_ALGORITHM_PACKED_;
  if (b->decode) return few_of_codes && b->small_m && a->keep ? MOE_ALGORITHM_SMALL_M_CODES_ : MOE_ALGORITHM_PACKED_;
  if (a->keep && moe_small_m_takes_columns_(kernels, product, b, a->rows)) return MOE_ALGORITHM_SMALL_M_COLUMNS_;
  if (b->panel || b->transposed) return MOE_ALGORITHM_PACKED_;
  const int pairs = moe_small_m_is_bf16_(kernels, product, b->dtype);
  const int64_t few = pairs ? MOE_SMALL_M_BF16 : kernels->gemm->blocking.small_m_plain_rows[b->dtype];
  return a->rows <= few ? MOE_ALGORITHM_SMALL_M_ROWS_ : MOE_ALGORITHM_PACKED_;
}

/* How many panels to multiply with so many rows at a time: as many as `floats` hold the products of. Memory is then
   read in longer runs, and rows are gathered less often. */
MOE_FN int64_t moe_panels_at_once_(int64_t floats, int64_t rows) {
  return moe_min_(MOE_NC_PANELS_MAX, floats / MOE_C_FLOATS_(rows));
}

MOE_FN int moe_stores_panels_(const moe_gemm_ *m) { return m->results && m->results->store_panel; }

/* Panel p's products. */
MOE_FN float *moe_c_at_(const moe_gemm_ *m, int64_t p) { return m->c + p * MOE_C_FLOATS_(m->a->rows); }

/* Where they are formed: of whole k, where each panel's leave before the next, in one place, which stays in cache. */
MOE_FN float *moe_kc_block_c_(const moe_gemm_ *m, const moe_kc_block_ *block, int64_t p) {
  return moe_c_at_(m, moe_stores_panels_(m) && block->n == m->b->k ? 0 : p);
}

/* Panel p's products c leave, if they do: from the cache they are still in. */
MOE_FN void moe_store_panel_(const moe_gemm_ *m, int64_t p, float *c) {
  if (!moe_stores_panels_(m)) return;
  const moe_fpenv_ saved = moe_fpenv_enter_();
  m->results->store_panel(m->results->arg, p, c);
  moe_fpenv_restore_(saved);
}

/* All rows times panel p: at once, but for tiles that pack, gather or turn. After the last piece the products leave. */
MOE_FN void moe_multiply_panel_(const moe_gemm_ *m, moe_kc_block_ *block, int64_t p) {
  const moe_a_ *a = m->a;
  const moe_panel_kind_ kind = m->kernels->gemm->panel[m->product];
  const moe_ukernel_fn_ usual =
      a->packed ? m->kernels->gemm->ukernel_packed_a[kind] : m->kernels->gemm->ukernel[m->product];
  float *c = moe_kc_block_c_(m, block, p);
  moe_ukernel_ ukernel;
  ukernel.k = block->n;
  ukernel.add = block->from > 0;
  ukernel.prefetches = block->prefetches;
  const moe_place_ to = moe_panel_to_(m, block, p);
  ukernel.store = m->kernels->vec->store_rows[to.dtype];
  moe_ukernel_fn_ multiply = moe_ukernel_panel_(m, block, p, usual, &ukernel);
  for (int64_t i = 0; i < a->rows; i += ukernel.rows, multiply = usual) {
    const int64_t rest = a->rows - i;
    ukernel.rows = multiply == usual ? rest : MOE_MR;
    ukernel.c = c + i * MOE_NR;
    ukernel.row = block->a_packed + i * block->pitch;
    ukernel.to = moe_place_at_(&to, i, 0);
    if (p == 0 && moe_packs_a_(a))
      multiply = moe_pack_a_ukernel_(m, block, i, &ukernel, multiply);
    else
      multiply = moe_transpose_ukernel_(m, block, p, i, &ukernel, multiply);
    const int last = ukernel.rows >= rest;
    ukernel.a_next = last ? block->a_packed : ukernel.row + ukernel.rows * block->pitch;
    ukernel.c_next =
        last ? moe_kc_block_c_(m, block, moe_panel_after_(m, block, p, 1).p) : ukernel.c + ukernel.rows * MOE_NR;
    multiply(&ukernel);
  }
  if (block->more == 0 && !to.base) moe_store_panel_(m, p, c);
  moe_b_buffers_move_(block->packing, block->transposes * block->n / MOE_TRANSPOSE_TILES_);
}

/* All rows times a B that unpacks itself. */
MOE_FN void moe_small_m_decoding_(const moe_gemm_ *m) {
  const moe_a_ *a = m->a;
  const int64_t size = moe_kc_of_(m, MOE_PANEL_F32);
  const int64_t row = moe_ceil_div_(m->b->k, size) * size;
  float *x = (float *)(void *)a->a_packed;
  if (!a->cached) m->kernels->vec->load_rows[a->dtype](x, row, &a->place, a->rows, m->b->k);
  for (int64_t p = 0; p < moe_b_panels_(m->b); p++) {
    const moe_b_ one = moe_b_part_(m->b, p, 1);
    moe_small_m_ s = {0};
    s.x = x;
    s.x_stride = row;
    s.rows = a->rows;
    s.k = m->b->k;
    s.c = moe_c_at_(m, p);
    one.small_m(&one, m->kernels, &s);
  }
}

/* By the kernel for what the columns are. */
MOE_FN void moe_small_m_with_(const moe_gemm_ *m, const moe_small_m_ *s) {
  const moe_kernels *kernels = m->kernels;
  if (s->format)
    kernels->quant->small_m_fp8(s);
  else if (moe_small_m_is_bf16_(kernels, m->product, s->dtype))
    kernels->gemm->small_m_bf16(s);
  else
    kernels->gemm->small_m(s);
}

/* All rows times a piece of the B, as many columns at a time as keep their products in cache. */
MOE_FN void moe_small_m_kc_block_(const moe_gemm_ *m, const moe_kc_block_ *block) {
  const moe_a_ *a = m->a;
  const int64_t panels = moe_b_panels_(m->b), most = moe_max_(1, MOE_SMALL_M_C_FLOATS_ / (a->rows * MOE_NR));
  for (int64_t p = 0; p < panels; p += most) {
    const moe_b_ b = moe_b_part_(m->b, p, most);
    const int64_t run = b.parts * b.n * b.group / 32;
    moe_small_m_ s = {0};
    s.format = b.format;
    s.dtype = b.dtype;
    s.load = m->kernels->vec->load_rows[b.dtype];
    s.size = b.group / 32;
    s.contiguous = b.stride == run && (b.parts == 1 || b.base[1] - b.base[0] == run / 2);
    s.drops = m->kernels->core->drops_prefetches;
    s.pair_rows = m->kernels->core->half_width_stores && s.size < 4
                      ? 2
                      : MOE_SMALL_M_TWO_ROWS; /* sums that leave would cost most */
    s.x = (const float *)(const void *)block->a_packed;
    s.x_stride = block->pitch / 4;
    s.rows = a->rows;
    s.k = block->n;
    for (int64_t part = 0; part < b.parts; part++) s.base[part] = b.base[part] + block->from * b.stride;
    s.parts = b.parts;
    s.stride = b.stride;
    s.n = b.n;
    s.prefetch = moe_max_(8, MOE_SMALL_M_PREFETCH_BYTES_ / run) * b.stride;
    s.c_stride = MOE_C_FLOATS_(a->rows);
    s.c = moe_c_at_(m, p);
    moe_small_m_with_(m, &s);
  }
}

/* Those of a row behind an odd number of them as well: streams may take two at a time. */
MOE_FN void moe_clear_products_(const moe_gemm_ *m) {
  const int64_t rows = moe_even_(m->a->rows);
  for (int64_t p = 0; p < moe_b_panels_(m->b); p++) memset(moe_c_at_(m, p), 0, (size_t)(rows * MOE_NR) * sizeof *m->c);
}

/* What is fetched while k elements from `from` on of the columns before column j stream: those of the next columns or,
   if there are none, the first ones' next elements or what is read after this product. */
MOE_FN moe_prefetch_at_ moe_small_m_columns_prefetch_(const moe_gemm_ *m, int64_t j, int64_t from, int64_t k) {
  const moe_b_ *b = m->b;
  const int64_t size = moe_dtype_bytes_(b->dtype);
  const int last = j >= b->n, done = last && from + k >= b->k;
  const char *at = b->base[0] + (last ? (from + k) * size : j * b->stride + from * size);
  moe_prefetch_block_ fetch = moe_prefetch_block_rows_(at, b->stride, moe_lines_(at, b->stride, k * size));
  if (done) fetch = (moe_prefetch_block_){(const char *)m->c, 1, 0, 0}; /* a line that is there */
  if (done && m->next && m->next->block.at)
    fetch = moe_prefetch_block_rows_(m->next->block.at, m->next->stride, m->next->lines);
  return moe_prefetch_begin_(&fetch);
}

/* All rows times k elements from `from` on of the columns from j on, piece by piece. */
MOE_FN void moe_small_m_some_columns_(const moe_gemm_ *m, int64_t j, int64_t from, int64_t k) {
  const moe_a_ *a = m->a;
  const moe_b_ *b = m->b;
  moe_prefetch_at_ fetch = moe_small_m_columns_prefetch_(m, j + MOE_SMALL_M_COLUMNS_AT_ONCE, from, k);
  moe_small_m_columns_ s = {0};
  s.stride = b->stride;
  s.size = moe_dtype_bytes_(b->dtype);
  s.n = moe_min_(MOE_SMALL_M_COLUMNS_AT_ONCE, b->n - j);
  s.dtype = b->dtype;
  s.rows = a->rows;
  s.c = moe_c_at_(m, j / MOE_NR) + j % MOE_NR;
  s.fetch = &fetch;
  for (const int64_t end = from + k; from < end; from += s.k) {
    const moe_kc_block_ block = moe_kc_block_begin_(m, m->kernels->gemm->panel[m->product], from);
    s.base = b->base[0] + j * b->stride + from * s.size;
    s.k = block.n;
    s.x = block.a_packed;
    s.x_stride = block.pitch;
    m->kernels->gemm->small_m_columns[m->product](&s);
  }
}

/* All rows times columns that turn on the way, MOE_SMALL_M_COLUMNS_AT_ONCE at a time, which memory sends one after the other. */
MOE_FN void moe_small_m_all_columns_(const moe_gemm_ *m) {
  const moe_panel_kind_ kind = m->kernels->gemm->panel[m->product];
  const int64_t size = moe_kc_of_(m, kind), k = m->b->k, deep = moe_small_m_columns_k_(m->b, size);
  for (int64_t from = 0; from < k && !m->a->cached; from += size) {
    const moe_kc_block_ block = moe_kc_block_begin_(m, kind, from);
    moe_pack_a_(m, kind, from, block.n, 0, m->a->rows, block.a_packed);
  }
  for (int64_t from = 0; from < k; from += deep)
    for (int64_t j = 0; j < m->b->n; j += MOE_SMALL_M_COLUMNS_AT_ONCE)
      moe_small_m_some_columns_(m, j, from, moe_min_(deep, k - from));
}

/* All rows times rows of columns. */
MOE_FN void moe_small_m_all_rows_(const moe_gemm_ *m) {
  const int64_t size = moe_kc_of_(m, MOE_PANEL_F32);
  for (int64_t from = 0; from < m->b->k; from += size) {
    const moe_kc_block_ block = moe_kc_block_begin_(m, MOE_PANEL_F32, from);
    if (!m->a->cached) moe_pack_a_(m, MOE_PANEL_F32, from, block.n, 0, m->a->rows, block.a_packed);
    moe_small_m_kc_block_(m, &block);
  }
}

/* A few rows. */
MOE_FN void moe_multiply_small_m_(const moe_gemm_ *m, moe_algorithm_ algorithm) {
  moe_clear_products_(m);
  if (algorithm == MOE_ALGORITHM_SMALL_M_COLUMNS_)
    moe_small_m_all_columns_(m);
  else if (algorithm == MOE_ALGORITHM_SMALL_M_CODES_)
    moe_small_m_decoding_(m);
  else
    moe_small_m_all_rows_(m);
}

MOE_FN void moe_multiply_panels_(const moe_gemm_ *m) {
  const moe_a_ *a = m->a;
  const moe_b_ *b = m->b;
  const moe_panel_kind_ kind = m->kernels->gemm->panel[m->product];
  const int64_t size = moe_kc_of_(m, kind), k = b->k, panels = moe_b_panels_(b);
  const int64_t tiles = moe_ceil_div_(a->rows, MOE_MR);
  moe_b_buffers_ packing = moe_b_buffers_begin_(m, kind);
  moe_prefetches_ prefetches = {0};
  prefetches.tiles = panels * tiles;
  if (m->results && m->results->into) prefetches.into = *m->results->into;
  moe_kc_block_pace_(m, &prefetches.into, moe_ceil_div_(k, size) * panels * tiles, moe_min_(size, k));
  if (k == 0) moe_clear_products_(m);
  for (int64_t from = 0; from < k; from += size) {
    moe_kc_block_ block = moe_kc_block_begin_(m, kind, from);
    block.prefetches = &prefetches;
    block.packing = &packing;
    block.runs = moe_prefetch_runs_(m->kernels, kind, b, block.n, a->rows);
    moe_rows_prefetch_(m, &block);
    if (a->gather) a->gather(a, m->kernels, from, block.n, block.a_packed, m->b_buffer);
    for (int64_t p = 0, prefetch = 0; p < panels; p++) {
      block.transposes = moe_transpose_tiles_(m, &block, p);
      if (p == prefetch) prefetch = moe_kc_block_prefetch_(m, &block, p);
      if (moe_epilogue_prefetches_(m, &block)) {
        prefetches.into = m->results->reads(m->results->arg, p);
        moe_kc_block_pace_(m, &prefetches.into, moe_ceil_div_(tiles, 2), block.n);
      }
      moe_multiply_panel_(m, &block, p);
    }
  }
}

/* c = left * right */
MOE_FN void moe_multiply_(const moe_gemm_ *m) {
  const moe_algorithm_ algorithm = moe_algorithm_of_(m->kernels, m->product, m->a, m->b);
  const int small_m_any = algorithm != MOE_ALGORITHM_PACKED_;
#if MOE_X86
  const int by_mode = m->product == MOE_PRODUCT_BF16 && (small_m_any || m->kernels->gemm->bf16_by_mode);
  if (by_mode) moe_flush_on_();
#endif
  if (small_m_any)
    moe_multiply_small_m_(m, algorithm);
  else
    moe_multiply_panels_(m);
  for (int64_t p = 0; p < moe_b_panels_(m->b) && (small_m_any || m->b->k == 0); p++)
    moe_store_panel_(m, p, moe_c_at_(m, p));
#if MOE_X86
  if (by_mode) moe_flush_off_();
#endif
}

#endif
