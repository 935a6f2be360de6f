/* Quantised weights as B: their panels are decoded, or few rows are multiplied with codes that are not packed. */
#ifndef MOE_QUANT_WEIGHT_B_H
#define MOE_QUANT_WEIGHT_B_H

/* The tile of panel p: the columns of a part, or elements, k of the contraction from `from` on. */
MOE_FN moe_weight_tile_ moe_b_tile_(const moe_b_ *b, const moe_kernels *kernels, int64_t p, int64_t part, int64_t from,
                                    int64_t k) {
  const moe_quantized_ *q = (const moe_quantized_ *)b->source;
  const int64_t width = moe_b_width_(b);
  moe_weight_tile_ tile = {0};
  tile.q = q, tile.kernels = kernels, tile.expert = b->expert, tile.part = q->part + part;
  tile.column = p * width, tile.count = moe_b_columns_(b, p, 1);
  tile.element = from, tile.elements = k;
  tile.col = part * width, tile.width = width;
  return tile;
}
MOE_FN moe_weight_tile_ moe_b_tile_transposed_(const moe_b_ *b, const moe_kernels *kernels, int64_t p, int64_t from,
                                               int64_t end) {
  const moe_quantized_ *q = (const moe_quantized_ *)b->source;
  const int64_t columns = q->tensor.columns, part = from / columns;
  moe_weight_tile_ tile = {0};
  tile.q = q, tile.kernels = kernels, tile.expert = b->expert, tile.part = q->part + part;
  tile.column = from % columns, tile.count = moe_min_(end, (part + 1) * columns) - from;
  tile.element = p * MOE_NR, tile.elements = moe_b_columns_(b, p, 1);
  tile.width = MOE_NR, tile.transposed = 1;
  return tile;
}

MOE_FN int moe_quantized_decode_(const moe_b_ *b, const moe_kernels *kernels, moe_panel_kind_ kind, int64_t p,
                                 int64_t from, int64_t k, char *panel) {
  for (int64_t part = 0; part < b->parts; part++) {
    const moe_weight_tile_ tile = moe_b_tile_(b, kernels, p, part, from, k);
    if (!moe_tile_pack_(&tile, kind, panel)) return 0;
  }
  if (kind == MOE_PANEL_F32) moe_panel_even_(k, panel);
  return 1;
}

/* The contraction may continue in the next part. */
MOE_FN int moe_quantized_decode_transposed_(const moe_b_ *b, const moe_kernels *kernels, moe_panel_kind_ kind,
                                            int64_t p, int64_t from, int64_t k, char *panel) {
  const int64_t row = kind == MOE_PANEL_F32 ? MOE_NR_BYTES_ : MOE_NR_BYTES_ / 2;
  for (int64_t at = from, n; at < from + k; at += n) {
    const moe_weight_tile_ tile = moe_b_tile_transposed_(b, kernels, p, at, from + k);
    n = tile.count;
    if (!moe_tile_pack_(&tile, kind, panel + (at - from) * row)) return 0;
  }
  if (kind == MOE_PANEL_F32) moe_panel_even_(k, panel);
  return 1;
}

/* Tables of rows of codes: one for all columns or, where codes are scaled, one for each block. */
MOE_FN int64_t moe_quantized_tables_(const moe_b_ *b, const moe_kernels *kernels, int64_t p, int64_t from,
                                     moe_small_m_ *s) {
  const moe_quantized_ *q = (const moe_quantized_ *)b->source;
  moe_weight_tile_ tile = moe_b_tile_(b, kernels, p, 0, from, s->k);
  moe_byte_table_ *table = s->tables;
  if (!b->in_tables) {
    s->table_columns = s->n;
    kernels->quant->byte_table(table, q->value, 1.0f, 0);
    return s->k;
  }
  tile.count = s->n;
  s->table_columns = q->block_n;
  s->table_first = (q->weight->first_column + tile.column) % q->block_n;
  s->part_tables = moe_ceil_div_(s->table_first + s->n, q->block_n);
  const moe_fpenv_ saved = moe_fpenv_enter_();
  for (int64_t part = 0; part < b->parts; part++)
    for (int64_t i = 0; i < s->n; i += moe_tile_left_n_(&tile, i))
      kernels->quant->byte_table(table++, q->value,
                                 moe_quantized_scale_(q, kernels, b->expert, q->part + part, tile.column + i, from), 0);
  moe_fpenv_restore_(saved);
  return moe_tile_left_k_(&tile, 0);
}

/* The columns of half a panel, as pack_bytes_columns takes them. */
MOE_FN moe_weight_tile_ moe_quantized_half_(const moe_b_ *b, const moe_kernels *kernels, int64_t p, int64_t half,
                                            moe_codes_ *codes) {
  const int64_t n = MOE_NR / 2, part = b->parts == 2 ? half : 0, skip = b->parts == 2 ? 0 : half * n;
  moe_weight_tile_ tile = moe_b_tile_(b, kernels, p, part, 0, b->k);
  tile.column += skip, tile.count = moe_max_(0, moe_min_(n, tile.count - skip));
  tile.col = half * n, tile.width = n;
  *codes = moe_tile_scaled_codes_(&tile);
  codes->prefetch = moe_b_width_(b) * codes->stride;
  return tile;
}

/* Columns of codes that are looked up: as many elements at a time as share the tables of the panel's first and last
   32 columns. */
MOE_FN void moe_quantized_small_m_bytes_(const moe_b_ *b, const moe_kernels *kernels, int64_t p, moe_small_m_ *s) {
  const moe_quantized_ *q = (const moe_quantized_ *)b->source;
  moe_byte_table_ *table = (moe_byte_table_ *)(void *)s->panel;
  moe_codes_ codes[2];
  moe_weight_tile_ tile[2];
  for (int64_t h = 0; h < 2; h++)
    tile[h] = moe_quantized_half_(b, kernels, p, h, codes + h), codes[h].table = table + h;
  s->parts = 2;
  moe_codes_prefetch_ walk = moe_codes_prefetch_of_(s, codes, 8, moe_ceil_div_(b->k, 64) * 2);
  for (int64_t from = 0; from < b->k; from += s->k) {
    s->k = b->in_tables ? moe_tile_left_k_(tile, from) : b->k;
    const moe_fpenv_ saved = moe_fpenv_enter_();
    for (int64_t h = 0; h < 2 && tile[h].count > 0; h++)
      kernels->quant->byte_table(
          table + h, q->value,
          b->in_tables ? moe_quantized_scale_(q, kernels, b->expert, tile[h].part, tile[h].column, from) : 1.0f, 0);
    moe_fpenv_restore_(saved);
    for (int64_t h = 0; h < 2; h++) codes[h].k = s->k;
    kernels->quant->small_m_bytes_columns[s->product](s, codes, &walk);
    for (int64_t h = 0; h < 2; h++) codes[h].codes += s->k;
    s->x += s->k;
  }
}

/* Layouts of contiguous columns, over all of K. */
MOE_FN void moe_quantized_small_m_(const moe_b_ *b, const moe_kernels *kernels, int64_t p, moe_small_m_ *small_m) {
  const moe_quantized_ *q = (const moe_quantized_ *)b->source;
  moe_codes_ codes[2];
  if (!q->words && kernels->quant->byte_table) {
    moe_quantized_small_m_bytes_(b, kernels, p, small_m);
    return;
  }
  for (int64_t part = 0; part < b->parts; part++) {
    const moe_weight_tile_ tile = moe_b_tile_(b, kernels, p, part, 0, b->k);
    codes[part] = q->words ? moe_tile_columns_(&tile, NULL) : moe_tile_scaled_codes_(&tile);
    codes[part].prefetch = tile.width * codes[part].stride;
  }
  small_m->parts = b->parts;
  kernels->quant->small_m_codes[moe_wide_(&q->format)](small_m, codes);
}

/* Where it is in memory, unless its columns are not contiguous. */
MOE_FN void moe_quantized_place_(const moe_quantized_ *q, int transposed, moe_b_ *b) {
  const moe_mx_tensor_ *s = &q->tensor;
  if (moe_mx_is_nki_(s->layout) || (q->words && s->code.column < s->code.group)) return;
  b->group = s->code.group;
  b->transposed = q->by_columns != transposed;
  b->stride = q->by_columns ? s->code.column : s->parts * s->columns;
  for (int64_t p = 0; p < s->parts - q->part; p++) {
    const moe_mx_at_ at = {b->expert, q->part + p, 0, 0, NULL};
    const int64_t plain = b->expert * s->K * s->parts * s->columns + at.part * s->columns;
    b->base[p] = (const char *)(q->by_columns ? moe_mx_group_codes_(s, &at) : s->codes + plain);
  }
  if (transposed && b->base[1]) b->k_second = s->columns;
}

enum { MOE_TABLES_MAX_ = 128 }; /* that there is room for in a gemm's b_buffer */
#if MOE_X86
_Static_assert(MOE_TABLES_MAX_ * sizeof(moe_byte_table_) <= MOE_KC_BYTES_avx512 * MOE_NR, "b_buffer holds the tables");
#endif

/* Whether few rows can look its scaled codes up: blocks begin where half a panel and a pair of k do. */
MOE_FN int moe_quantized_in_tables_(const moe_quantized_ *q) {
  const moe_quantized_weight *w = q->weight;
  return w->scaling == MOE_WEIGHT_BLOCK && q->type == MOE_DTYPE_BF16 && q->block_k % 2 == 0 && w->first_k % 2 == 0 &&
         q->block_n % (MOE_NR / 2) == 0 && w->first_column % (MOE_NR / 2) == 0;
}

/* The weight's columns, contracted over K; or, transposed, columns along K, contracted over the columns of all
   parts. */
MOE_FN void moe_quantized_b_(const moe_quantized_ *q, int64_t expert, int transposed, moe_b_ *b) {
  const int64_t parts = q->tensor.parts - q->part, columns = q->tensor.columns;
  memset(b, 0, sizeof *b);
  b->parts = transposed ? 1 : parts;
  b->n = transposed ? q->tensor.K : columns;
  b->k = transposed ? parts * columns : q->tensor.K;
  b->decode = transposed ? moe_quantized_decode_transposed_ : moe_quantized_decode_;
  const int after = moe_weight_scaled_after_(q->weight),
            own = !moe_mx_is_nki_(q->tensor.layout) && q->tensor.scales == MOE_MX_SCALES_OWN;
  b->in_tables = moe_quantized_in_tables_(q);
  if (!transposed && (q->words ? own : (after || b->in_tables) && q->by_columns)) b->small_m = moe_quantized_small_m_;
  if (!transposed && (after || b->in_tables) && !q->by_columns) {
    b->format = &q->format;
    b->tables = moe_quantized_tables_;
    b->table_panels = b->in_tables ? (MOE_TABLES_MAX_ / parts - 2) * q->block_n / moe_b_width_(b) : MOE_NC_PANELS_MAX;
  }
  b->source = q;
  b->expert = expert;
  moe_quantized_place_(q, transposed, b);
}

#endif
