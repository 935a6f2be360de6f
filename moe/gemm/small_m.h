/* Products of a few rows, for which reading B is most of the work: nothing of B is packed. Its rows, its columns or its
   codes are multiplied with all rows of A as they come from memory, and the sums wait in cache. */
#ifndef MOE_GEMM_SMALL_M_H
#define MOE_GEMM_SMALL_M_H

enum {
  /* Products that are added to while weights are read: fewer would fit a first-level cache, but end memory's runs
     sooner, which costs more (measured). */
  MOE_SMALL_M_C_FLOATS_ = 16384,
  MOE_SMALL_M_PREFETCH_BYTES_ = 16384 /* that are in flight from memory meanwhile */
};

typedef enum moe_algorithm_ {
  MOE_ALGORITHM_PACKED_,
  MOE_ALGORITHM_SMALL_M_ROWS_,    /* prefetches for itself, in the next product as well */
  MOE_ALGORITHM_SMALL_M_COLUMNS_, /* columns are transposed in registers */
  MOE_ALGORITHM_SMALL_M_CODES_    /* codes are decoded in registers */
} moe_algorithm_;

/* Whether plain weights are multiplied by dot products. */
MOE_FN int moe_small_m_is_bf16_(const moe_kernels *kernels, moe_product_ product, moe_dtype dtype) {
  return kernels->gemm->small_m_bf16 && product == MOE_PRODUCT_BF16 && dtype == MOE_DTYPE_BF16;
}

/* Whether rows are few enough for columns that are transposed. */
MOE_FN int moe_small_m_takes_columns_(const moe_kernels *kernels, moe_product_ product, const moe_b_ *b, int64_t rows) {
  return kernels->gemm->small_m_columns[product] && rows <= kernels->blocking->small_m_columns_rows[b->dtype] &&
         moe_b_transposes_(b) && !b->k_second;
}

/* For so many rows of A; keep: they are packed whole, which the last two want. */
MOE_FN moe_algorithm_ moe_algorithm_of_(const moe_kernels *kernels, moe_product_ product, const moe_b_ *b, int64_t rows,
                                        int keep) {
  const moe_blocking_ *blocking = kernels->blocking;
  const int few_of_codes = rows <= blocking->small_m_codes_rows,
            looked_up = !b->in_tables || kernels->quant->byte_table;
  if (!kernels->gemm->small_m) return MOE_ALGORITHM_PACKED_;
  if (b->format && looked_up) return few_of_codes ? MOE_ALGORITHM_SMALL_M_ROWS_ : MOE_ALGORITHM_PACKED_;
  if (b->decode)
    return few_of_codes && b->small_m && keep && looked_up ? MOE_ALGORITHM_SMALL_M_CODES_ : MOE_ALGORITHM_PACKED_;
  if (keep && moe_small_m_takes_columns_(kernels, product, b, rows)) return MOE_ALGORITHM_SMALL_M_COLUMNS_;
  if (b->panel || b->transposed || b->k_second) return MOE_ALGORITHM_PACKED_;
  const int bf16 = moe_small_m_is_bf16_(kernels, product, b->dtype);
  const int64_t few = bf16 ? blocking->small_m_bf16_rows : blocking->small_m_plain_rows[b->dtype];
  return rows <= few ? MOE_ALGORITHM_SMALL_M_ROWS_ : MOE_ALGORITHM_PACKED_;
}

/* ------------------------------------------------------------------------------------------------------------- rows */

/* By the kernel for what the rows of B are. */
MOE_FN void moe_small_m_with_(const moe_gemm_ *g, const moe_small_m_ *s) {
  if (s->tables) g->kernels->quant->small_m_bytes[s->product](s);
  else if (s->format) g->kernels->quant->small_m_fp8(s);
  else if (moe_small_m_is_bf16_(g->kernels, g->product, s->dtype)) g->kernels->gemm->small_m_bf16(s);
  else g->kernels->gemm->small_m(s);
}

/* The same of a kc block from panel p on; codes that are looked up, as many elements at a time as share tables. */
MOE_FN void moe_small_m_some_rows_(const moe_gemm_ *g, const moe_kc_block_ *block, int64_t p, moe_small_m_ *s) {
  const moe_b_ *b = g->b;
  const int looked_up = b->tables && g->kernels->quant->byte_table;
  if (looked_up) s->tables = (moe_byte_table_ *)(void *)g->b_buffer;
  for (int64_t at = 0; at < block->k; at += s->k) {
    s->x = (const float *)(const void *)block->a + at;
    s->k = block->k - at;
    for (int64_t part = 0; part < b->parts; part++)
      s->base[part] = moe_b_at_(b, part, p) + (block->from + at) * b->stride;
    if (looked_up) s->k = b->tables(b, g->kernels, p, block->from + at, s);
    moe_small_m_with_(g, s);
  }
}

/* A kc block of B, as many columns at a time as keep their products in cache. */
MOE_FN void moe_small_m_block_(const moe_gemm_ *g, const moe_kc_block_ *block) {
  const moe_b_ *b = g->b;
  const moe_core_ *core = g->kernels->core;
  const int64_t rows = g->a->rows, fit = moe_max_(1, MOE_SMALL_M_C_FLOATS_ / (rows * MOE_NR)),
                most = b->tables ? moe_min_(fit, b->table_panels) : fit;
  for (int64_t p = 0; p < g->panels; p += most) {
    const int64_t n = moe_b_columns_(b, g->panel + p, moe_min_(most, g->panels - p)),
                  run = b->parts * n * b->group / 32;
    moe_small_m_ s = {0};
    s.format = b->format;
    s.dtype = b->dtype;
    s.load = g->kernels->vec->load_rows[b->dtype];
    s.size = b->group / 32;
    s.contiguous = b->stride == run && (b->parts == 1 || b->base[1] - b->base[0] == run / 2);
    s.repeats_prefetches = core->drops_prefetches;
    s.two_rows = s.size < 4 ? core->small_m_two_rows_16bit : core->small_m_two_rows;
    s.product = g->product;
    s.x_stride = block->a_stride / 4;
    s.rows = rows;
    s.parts = b->parts;
    s.stride = b->stride;
    s.n = n;
    s.prefetch = moe_max_(8, MOE_SMALL_M_PREFETCH_BYTES_ / run) * b->stride;
    s.c_stride = MOE_C_FLOATS_(rows);
    s.c = moe_c_at_(g, p);
    moe_small_m_some_rows_(g, block, g->panel + p, &s);
  }
}

MOE_FN void moe_small_m_all_rows_(const moe_gemm_ *g) {
  const int64_t kc = moe_gemm_kc_(g, MOE_PANEL_F32);
  for (int64_t from = 0; from < g->b->k; from += kc) {
    moe_kc_block_ block;
    moe_kc_block_at_(g, MOE_PANEL_F32, kc, from, &block);
    if (!g->a->cached) moe_pack_a_(g->kernels, MOE_PANEL_F32, g->a, from, block.k, 0, g->a->rows, block.a);
    moe_small_m_block_(g, &block);
  }
}

/* ---------------------------------------------------------------------------------------------------------- columns */

/* Elements of each column at a time: kc blocks that long, as equally many as can be. */
MOE_FN int64_t moe_small_m_columns_k_(const moe_b_ *b, int64_t kc) {
  const int64_t most = MOE_SMALL_M_COLUMN_BYTES / (kc * moe_dtype_bytes_(b->dtype));
  return moe_min_(b->k, kc * moe_equal_part_(moe_ceil_div_(b->k, kc), moe_max_(1, most)));
}

/* What is prefetched while k elements from `from` on of a part's columns before column j are multiplied: those of the
   next columns or, if there are none, of the next part's, of the first ones' next elements, or what is read after this
   product. */
MOE_FN void moe_small_m_columns_prefetch_(const moe_gemm_ *g, int64_t part, int64_t j, int64_t from, int64_t k,
                                          moe_prefetch_at_ *prefetch) {
  const moe_b_ *b = g->b;
  const int64_t size = moe_dtype_bytes_(b->dtype), end = moe_b_columns_(b, g->panel, g->panels);
  const int last = j >= end && part + 1 == b->parts, done = last && from + k >= b->k;
  const char *at = moe_b_at_(b, last ? 0 : part + (j >= end), g->panel) + (last ? from + k : from) * size +
                   (j >= end ? 0 : j * b->stride);
  moe_prefetch_block_ fetch = moe_prefetch_block_rows_(at, b->stride, moe_lines_(at, b->stride, k * size));
  if (done) fetch = (moe_prefetch_block_){(const char *)g->c, 1, 0, 0}; /* a line that is there */
  if (done && g->next && g->next->block.at)
    fetch = moe_prefetch_block_rows_(g->next->block.at, g->next->stride, g->next->lines);
  *prefetch = moe_prefetch_begin_(&fetch);
}

/* k elements from `from` on of a part's columns from j on, kc block by kc block. */
MOE_FN void moe_small_m_some_columns_(const moe_gemm_ *g, int64_t kc, int64_t part, int64_t j, int64_t from,
                                      int64_t k) {
  const moe_b_ *b = g->b;
  const int64_t width = moe_b_width_(b);
  moe_prefetch_at_ fetch;
  moe_small_m_columns_ s = {0};
  moe_small_m_columns_prefetch_(g, part, j + MOE_SMALL_M_COLUMNS_AT_ONCE, from, k, &fetch);
  s.stride = b->stride;
  s.size = moe_dtype_bytes_(b->dtype);
  s.n = moe_min_(MOE_SMALL_M_COLUMNS_AT_ONCE, moe_b_columns_(b, g->panel, g->panels) - j);
  s.dtype = b->dtype;
  s.rows = g->a->rows;
  s.c = moe_c_at_(g, j / width) + part * width + j % width;
  s.fetch = &fetch;
  for (const int64_t end = from + k; from < end; from += s.k) {
    moe_kc_block_ block;
    moe_kc_block_at_(g, moe_gemm_kind_(g), kc, from, &block);
    s.base = moe_b_at_(b, part, g->panel) + j * b->stride + from * s.size;
    s.k = block.k;
    s.x = block.a;
    s.x_stride = block.a_stride;
    g->kernels->gemm->small_m_columns[g->product](&s);
  }
}

/* Some columns at a time, which memory sends one after the other. */
MOE_FN void moe_small_m_all_columns_(const moe_gemm_ *g) {
  const moe_panel_kind_ kind = moe_gemm_kind_(g);
  const int64_t kc = moe_gemm_kc_(g, kind), k = g->b->k, deep = moe_small_m_columns_k_(g->b, kc);
  const int64_t n = moe_b_columns_(g->b, g->panel, g->panels);
  for (int64_t from = 0; from < k && !g->a->cached; from += kc) {
    moe_kc_block_ block;
    moe_kc_block_at_(g, kind, kc, from, &block);
    moe_pack_a_(g->kernels, kind, g->a, from, block.k, 0, g->a->rows, block.a);
  }
  for (int64_t from = 0; from < k; from += deep)
    for (int64_t part = 0; part < g->b->parts; part++)
      for (int64_t j = 0; j < n; j += MOE_SMALL_M_COLUMNS_AT_ONCE)
        moe_small_m_some_columns_(g, kc, part, j, from, moe_min_(deep, k - from));
}

/* ------------------------------------------------------------------------------------------------------------ codes */

MOE_FN void moe_small_m_all_codes_(const moe_gemm_ *g) {
  const moe_a_ *a = g->a;
  const int64_t kc = moe_gemm_kc_(g, MOE_PANEL_F32), row = moe_ceil_div_(g->b->k, kc) * kc;
  float *x = (float *)(void *)a->buffer;
  if (!a->cached) g->kernels->vec->load_rows[a->dtype](x, row, &a->place, a->rows, g->b->k);
  for (int64_t p = 0; p < g->panels; p++) {
    moe_small_m_ s = {0};
    s.x = x;
    s.x_stride = row;
    s.rows = a->rows;
    s.k = g->b->k;
    s.c = moe_c_at_(g, p);
    s.panel = (float *)(void *)g->b_buffer;
    s.product = g->product;
    g->b->small_m(g->b, g->kernels, g->panel + p, &s);
  }
}

/* What a product of panels [p, p+panels) with so many rows reads first. */
MOE_FN void moe_b_reads_first_(const moe_kernels *kernels, moe_product_ product, const moe_b_ *b, int64_t p,
                               int64_t panels, int64_t rows, moe_prefetch_ *prefetch) {
  const moe_blocking_ *blocking = kernels->blocking;
  const moe_panel_kind_ kind = kernels->gemm->panel[product];
  const int64_t kc = moe_kc_(blocking, kind, rows, b->k), k = moe_min_(kc, b->k);
  const int64_t first = moe_run_first_(panels, moe_prefetch_runs_(blocking, kind, b, panels, k, rows), 1);
  if (moe_small_m_takes_columns_(kernels, product, b, rows))
    moe_prefetch_rows_(prefetch, moe_b_at_(b, 0, p), NULL, NULL, b->stride,
                       moe_min_(moe_b_columns_(b, p, panels), MOE_SMALL_M_COLUMNS_AT_ONCE),
                       moe_small_m_columns_k_(b, kc) * moe_dtype_bytes_(b->dtype));
  else moe_b_reads_(b, kind, p, first, 0, k, prefetch);
}

MOE_FN void moe_multiply_small_m_(const moe_gemm_ *g, moe_algorithm_ algorithm) {
  if (algorithm == MOE_ALGORITHM_SMALL_M_COLUMNS_) moe_small_m_all_columns_(g);
  else if (algorithm == MOE_ALGORITHM_SMALL_M_CODES_) moe_small_m_all_codes_(g);
  else moe_small_m_all_rows_(g);
}

#endif
