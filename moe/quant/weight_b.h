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
  if (kind == MOE_PANEL_PAIRS && !moe_quantized_as_pairs_((const moe_quantized_ *)b->source, 0)) return 0;
  for (int64_t part = 0; part < b->parts; part++) {
    const moe_weight_tile_ tile = moe_b_tile_(b, kernels, p, part, from, k);
    moe_tile_pack_(&tile, kind, panel);
  }
  if (kind == MOE_PANEL_F32) moe_panel_even_(k, panel);
  return 1;
}

/* The contraction may continue in the next part. */
MOE_FN int moe_quantized_decode_transposed_(const moe_b_ *b, const moe_kernels *kernels, moe_panel_kind_ kind,
                                            int64_t p, int64_t from, int64_t k, char *panel) {
  if (kind == MOE_PANEL_PAIRS && !moe_quantized_as_pairs_((const moe_quantized_ *)b->source, 1)) return 0;
  const int64_t row = kind == MOE_PANEL_F32 ? MOE_NR_BYTES_ : MOE_NR_BYTES_ / 2;
  for (int64_t at = from, n; at < from + k; at += n) {
    const moe_weight_tile_ tile = moe_b_tile_transposed_(b, kernels, p, at, from + k);
    n = tile.count;
    moe_tile_pack_(&tile, kind, panel + (at - from) * row);
  }
  if (kind == MOE_PANEL_F32) moe_panel_even_(k, panel);
  return 1;
}

/* Layouts of contiguous columns, over all of K. */
MOE_FN void moe_quantized_small_m_(const moe_b_ *b, const moe_kernels *kernels, int64_t p, moe_small_m_ *small_m) {
  const moe_quantized_ *q = (const moe_quantized_ *)b->source;
  moe_codes_ codes[2];
  for (int64_t part = 0; part < b->parts; part++) {
    const moe_weight_tile_ tile = moe_b_tile_(b, kernels, p, part, 0, b->k);
    codes[part] = q->words ? moe_tile_columns_(&tile, NULL) : moe_tile_scaled_codes_(&tile);
  }
  small_m->parts = b->parts;
  const int wide = moe_wide_(&q->format);
  int64_t done = 0;
  if (q->words && kernels->quant->small_m_mx[wide][small_m->product])
    done = kernels->quant->small_m_mx[wide][small_m->product](small_m, codes);
  if (done < b->k) kernels->quant->small_m_codes[wide](small_m, codes, done);
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
  if (!transposed && (q->words ? own : after && q->by_columns)) b->small_m = moe_quantized_small_m_;
  if (!transposed && after && !q->by_columns) b->format = &q->format;
  b->source = q;
  b->expert = expert;
  moe_quantized_place_(q, transposed, b);
}

#endif
