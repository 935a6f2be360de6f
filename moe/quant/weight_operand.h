/* Panels of quantised weights. In the forward a panel's columns are the weight's own and the contraction runs over K;
   in the backward it runs over the weight's columns, gate before up, and the panel's columns are elements along K. */
#ifndef MOE_QUANT_WEIGHT_OPERAND_H
#define MOE_QUANT_WEIGHT_OPERAND_H

/* Columns [col, col+width) of a panel of k rows; `count` columns of a part of a weight, from `column` on, times
   `elements` along K, from `element` on: one of these numbers is k, the other is the panel's n. */
typedef struct moe_weight_patch_ {
  const moe_quantized_ *q;
  const moe_kernels *kernels;
  int64_t expert, part, column, count, element, elements, col, width;
  int transposed; /* 1: the panel's columns are elements (backward) */
} moe_weight_patch_;

MOE_FN moe_codes_ moe_patch_codes_(const moe_weight_patch_ *p) {
  moe_codes_ codes = {0};
  codes.format = &p->q->format;
  codes.col = p->col;
  codes.width = p->width;
  codes.n = p->transposed ? p->elements : p->count;
  codes.k = p->transposed ? p->count : p->elements;
  return codes;
}

/* --------------------------------------------------------------------------------------------------------------- MX */

enum { MOE_PATCH_WORDS_ = 32 };

/* Trainium's layouts: of an element of K the words of all columns lie side by side, those of the next element
   elsewhere. Some elements' words: where they are, from which bit on, and their scale bytes. */
typedef struct moe_patch_words_ {
  const uint8_t *codes[MOE_PATCH_WORDS_], *scale[MOE_PATCH_WORDS_];
  uint8_t shift[MOE_PATCH_WORDS_];
} moe_patch_words_;

/* Of elements [from, from+n) of the patch: they are prefetched. */
MOE_FN void moe_patch_find_words_(const moe_weight_patch_ *p, int64_t from, int64_t n, moe_patch_words_ *words) {
  const moe_mx_side_ *s = &p->q->side;
  const int64_t word = s->bits / 2;
  moe_mx_at_ at = {p->expert, p->part, p->column, -1, NULL};
  for (int64_t e = 0; e < n; e++) {
    const int64_t position = moe_mx_position_(s->layout, s->parts, s->K, p->element + from + e);
    const int64_t before = at.group;
    at.group = position / MOE_MX_GROUP_;
    words->codes[e] = s->codes + moe_nki_word_at_(s, &at, position / MOE_MX_WORD_) * word;
    words->scale[e] = at.group == before ? words->scale[e - 1] : moe_mx_scale_at_(s, &at);
    words->shift[e] = (uint8_t)(position % MOE_MX_WORD_ * s->bits);
    for (int64_t byte = 0; byte < p->count * word; byte += 64) __builtin_prefetch(words->codes[e] + byte);
  }
}

/* Not inlined: its caller has more on the stack for other layouts. */
MOE_FN __attribute__((noinline)) void moe_patch_pack_words_(const moe_weight_patch_ *p, float *panel) {
  moe_patch_words_ some[2]; /* at hand, and next */
  moe_patch_find_words_(p, 0, moe_min_(MOE_PATCH_WORDS_, p->elements), &some[0]);
  for (int64_t from = 0, now = 0; from < p->elements; from += MOE_PATCH_WORDS_, now = 1 - now) {
    const int64_t left = p->elements - from, more = moe_min_(MOE_PATCH_WORDS_, left - MOE_PATCH_WORDS_);
    const moe_patch_words_ *words = &some[now];
    moe_patch_find_words_(p, from + MOE_PATCH_WORDS_, more, &some[1 - now]);
    for (int64_t e = 0; e < moe_min_(MOE_PATCH_WORDS_, left); e++)
      p->kernels->quant->pack_words_row[moe_wide_(&p->q->format)](panel + (from + e) * MOE_NR + p->col, words->codes[e],
                                                           words->shift[e], words->scale[e], p->count, p->width,
                                                           &p->q->format);
  }
}

enum { MOE_PATCH_SCALES_ = MOE_DECODE_K_ / MOE_MX_GROUP_ * MOE_NR };

/* The patch as pack_codes_columns takes it; `scale` holds scales that do not lie as OWN says. */
MOE_FN moe_codes_ moe_patch_columns_(const moe_weight_patch_ *p, uint8_t *scale) {
  const moe_mx_side_ *s = &p->q->side;
  moe_mx_at_ at = {p->expert, p->part, p->column, p->element / MOE_MX_GROUP_, NULL};
  moe_codes_ codes = moe_patch_codes_(p);
  codes.codes = moe_mx_group_codes_(s, &at);
  codes.stride = moe_mx_column_bytes_(s);
  codes.group = moe_mx_group_bytes_(s);
  codes.split = s->layout == MOE_MX_LAYOUT_GGML;
  codes.scale = moe_mx_scale_at_(s, &at);
  codes.scale_stride = moe_mx_column_scales_(s);
  codes.scale_group = moe_mx_group_scales_(s);
  if (s->scales == MOE_MX_SCALES_OWN && !(p->transposed && codes.split)) return codes;
  codes.scale = scale;
  codes.scale_stride = moe_ceil_div_(p->elements, MOE_MX_GROUP_);
  codes.scale_group = 1;
  for (int64_t g = 0; g < codes.scale_stride; g++, at.group++)
    for (int64_t c = 0; c < p->count; c++) {
      at.column = p->column + c;
      scale[c * codes.scale_stride + g] = *moe_mx_scale_at_(s, &at);
    }
  return codes;
}

/* Forward. */
MOE_FN void moe_patch_pack_down_(const moe_weight_patch_ *p, float *panel) {
  const moe_mx_side_ *s = &p->q->side;
  uint8_t scale[MOE_PATCH_SCALES_];
  if (moe_mx_is_nki_(s->layout)) {
    moe_patch_pack_words_(p, panel);
    return;
  }
  const moe_codes_ codes = moe_patch_columns_(p, scale);
  p->kernels->quant->pack_codes_columns[moe_wide_(&p->q->format)](panel, &codes);
}

/* Words as in the forward: of the patch's columns [at, at+n), elements [from, from+count), zero where there are none. */
MOE_FN void moe_patch_pack_some_words_(const moe_weight_patch_ *p, int64_t at, int64_t n, int64_t from, int64_t count,
                                       float *panel) {
  moe_weight_patch_ part = *p;
  part.column += at, part.count = n;
  part.element += from, part.elements = moe_max_(0, moe_min_(count, p->elements - from));
  moe_patch_pack_words_(&part, panel);
  for (int64_t e = part.elements; e < count; e++) memset(panel + e * MOE_NR, 0, MOE_NR_BYTES_);
}

enum { MOE_HALF_ = MOE_NR / 2 };

/* A square of 64 by 64, in place, a quarter at a time. */
MOE_FN void moe_transpose_square_(const moe_kernels *kernels, float *square, float *room) {
  for (int64_t i = 0; i < 2; i++)
    for (int64_t j = 0; j <= i; j++) {
      float *lower = square + (i * MOE_NR + j) * MOE_HALF_, *upper = square + (j * MOE_NR + i) * MOE_HALF_;
      kernels->vec->transpose_words(room, MOE_HALF_ * 4, lower, MOE_NR_BYTES_, MOE_HALF_, MOE_HALF_);
      if (i != j) kernels->vec->transpose_words(lower, MOE_NR_BYTES_, upper, MOE_NR_BYTES_, MOE_HALF_, MOE_HALF_);
      for (int64_t r = 0; r < MOE_HALF_; r++) memcpy(upper + r * MOE_NR, room + r * MOE_HALF_, MOE_HALF_ * sizeof *room);
    }
}

/* Fewer than 64 of the columns, from `at` on. */
MOE_FN void moe_patch_pack_few_words_(const moe_weight_patch_ *p, int64_t at, int64_t n, float *panel, float *rows) {
  const int64_t whole = n - n % 16; /* of all vectors */
  for (int64_t e = 0; e < MOE_NR; e += MOE_HALF_) {
    moe_patch_pack_some_words_(p, at, n, e, MOE_HALF_, rows);
    p->kernels->vec->transpose_words(panel + e, MOE_NR_BYTES_, rows, MOE_NR_BYTES_, MOE_HALF_, whole);
    for (int64_t j = whole; j < n; j++)
      for (int64_t i = 0; i < MOE_HALF_; i++) memcpy(panel + j * MOE_NR + e + i, rows + i * MOE_NR + j, sizeof *panel);
  }
}

/* Backward, of words: 64 of the weight's columns at a time, transposed. */
MOE_FN void moe_patch_pack_words_transposed_(const moe_weight_patch_ *p, float *panel) {
  float room[MOE_HALF_ * MOE_NR];
  for (int64_t at = 0, n; at < p->count; at += n, panel += n * MOE_NR) {
    n = moe_min_(MOE_NR, p->count - at);
    if (n < MOE_NR) {
      moe_patch_pack_few_words_(p, at, n, panel, room);
      continue;
    }
    moe_patch_pack_some_words_(p, at, n, 0, MOE_NR, panel);
    moe_transpose_square_(p->kernels, panel, room);
  }
}

/* Backward, of ggml's blocks: their codes in order, some columns at a time. */
MOE_FN void moe_patch_pack_blocks_(const moe_weight_patch_ *p, const moe_codes_ *all, float *panel) {
  enum { columns = 32, line = MOE_NR / 2 };
  uint8_t ordered[columns * line];
  moe_codes_ codes = *all;
  codes.codes = ordered, codes.stride = line, codes.group = MOE_MX_GROUP_ / 2, codes.split = 0;
  for (int64_t at = 0; at < p->count; at += columns, codes.scale += columns * codes.scale_stride) {
    codes.k = moe_min_(columns, p->count - at);
    for (int64_t c = 0; c < codes.k; c++)
      for (int64_t g = 0; g < codes.scale_stride; g++) {
        const uint8_t *from = all->codes + (at + c) * all->stride + g * all->group;
        uint8_t *to = ordered + c * line + g * codes.group;
        for (int i = 0; i < 8; i++, from += 2) {
          to[i] = (uint8_t)((from[0] & 15) | from[1] << 4);
          to[i + 8] = (uint8_t)(from[0] >> 4 | (from[1] & 240));
        }
      }
    p->kernels->quant->pack_codes_rows[0](panel + at * MOE_NR, &codes);
  }
}

/* Backward, of what lies in columns, which are the panel's rows. */
MOE_FN void moe_patch_pack_rows_(const moe_weight_patch_ *p, float *panel) {
  uint8_t scale[MOE_PATCH_SCALES_];
  const moe_codes_ codes = moe_patch_columns_(p, scale);
  if (codes.split)
    moe_patch_pack_blocks_(p, &codes, panel);
  else
    p->kernels->quant->pack_codes_rows[moe_wide_(&p->q->format)](panel, &codes);
}

MOE_FN void moe_patch_pack_mx_(const moe_weight_patch_ *p, float *panel) {
  if (!p->transposed)
    moe_patch_pack_down_(p, panel);
  else if (moe_mx_is_nki_(p->q->side.layout))
    moe_patch_pack_words_transposed_(p, panel);
  else
    moe_patch_pack_rows_(p, panel);
}

/* ----------------------------------------------------------------------------------------------------- float scales */

/* The scales of the patch's row r. */
MOE_FN void moe_patch_row_scales_(const moe_weight_patch_ *p, int64_t r, float *scale) {
  const moe_quantized_ *q = p->q;
  const int64_t n = p->transposed ? p->elements : p->count, first = p->transposed ? p->element : p->column;
  for (int64_t i = 0, end; i < n; i = end) {
    const int64_t column = p->transposed ? p->column + r : first + i,
                  element = p->transposed ? first + i : p->element + r;
    const float value = moe_quantized_scale_(q, p->expert, p->part, column, element);
    end = q->weight->scaling == MOE_WEIGHT_BLOCK ? moe_min_(n, ((first + i) / q->block + 1) * q->block - first) : n;
    for (int64_t j = i; j < end; j++) scale[j] = value;
  }
}

/* Of how many of its `rows` rows, from r on, the scales are the same. */
MOE_FN int64_t moe_patch_same_scales_(const moe_weight_patch_ *p, int64_t r, int64_t rows) {
  const int64_t at = (p->transposed ? p->column : p->element) + r;
  switch (p->q->weight->scaling) {
    case MOE_WEIGHT_BLOCK: return moe_min_(rows - r, p->q->block - at % p->q->block);
    case MOE_WEIGHT_STATIC:
    case MOE_WEIGHT_STATIC_PER_EXPERT: return rows - r;
    default: return 1;
  }
}

/* Products may be under way in a mode that flushes subnormals, which these are not to meet. */
MOE_FN void moe_patch_scale_rows_(const moe_weight_patch_ *p, int64_t k, int64_t n, float *panel) {
  const int bf16 = p->q->type == MOE_DTYPE_BF16;
  const moe_fpenv_ saved = moe_fpenv_enter_();
  float scale[MOE_NR];
  for (int64_t r = 0, same; r < k; r += same) {
    float *rows = panel + r * MOE_NR;
    same = moe_patch_same_scales_(p, r, k);
    moe_patch_row_scales_(p, r, scale);
    if (bf16)
      p->kernels->quant->scale_to_bf16(rows, scale, same, n);
    else
      for (int64_t i = 0; i < same; i++) p->kernels->vec->multiply_row(rows + i * MOE_NR, scale, n);
  }
  moe_fpenv_restore_(saved);
}

MOE_FN moe_codes_ moe_patch_scaled_codes_(const moe_weight_patch_ *p) {
  const moe_mx_side_ *s = &p->q->side;
  moe_codes_ codes = moe_patch_codes_(p);
  codes.stride = s->parts * s->columns;
  codes.group = MOE_MX_GROUP_;
  codes.codes = s->codes + (p->expert * s->K + p->element) * codes.stride + p->part * s->columns + p->column;
  return codes;
}

MOE_FN void moe_patch_pack_scaled_(const moe_weight_patch_ *p, float *panel) {
  const moe_codes_ codes = moe_patch_scaled_codes_(p);
  if (p->transposed)
    p->kernels->quant->pack_codes_columns[1](panel, &codes);
  else
    p->kernels->quant->pack_codes_rows[1](panel, &codes);
  if (!p->transposed && moe_weight_scaled_after_(p->q->weight)) return;
  moe_patch_scale_rows_(p, codes.k, codes.n, panel + p->col);
}

/* ------------------------------------------------------------------------------------------------------------ pairs */

/* Whether codes become pairs as they are: they lie in rows or columns, no float scale comes in between and, where a
   contraction goes on in the next part, no pair is of both. */
MOE_FN int moe_quantized_as_pairs_(const moe_quantized_ *q, int transposed) {
  const moe_mx_side_ *s = &q->side;
  if (q->weight->scaling != MOE_WEIGHT_MX) return !transposed && moe_weight_scaled_after_(q->weight);
  if (transposed && s->columns % 2) return 0;
  return !moe_mx_is_nki_(s->layout) && s->layout != MOE_MX_LAYOUT_GGML && s->scales == MOE_MX_SCALES_OWN;
}

MOE_FN void moe_patch_pack_pairs_(const moe_weight_patch_ *p, void *pairs) {
  const int mx = p->q->weight->scaling == MOE_WEIGHT_MX, wide = moe_wide_(&p->q->format);
  const moe_codes_ codes = mx ? moe_patch_columns_(p, NULL) : moe_patch_scaled_codes_(p);
  (mx != p->transposed ? p->kernels->quant->pack_pairs_columns : p->kernels->quant->pack_pairs_rows)[wide](pairs,
                                                                                                           &codes);
}

MOE_FN void moe_patch_pack_(const moe_weight_patch_ *p, moe_panel_kind_ kind, char *panel) {
  if (kind == MOE_PANEL_PAIRS)
    moe_patch_pack_pairs_(p, panel);
  else if (p->q->weight->scaling == MOE_WEIGHT_MX)
    moe_patch_pack_mx_(p, (float *)(void *)panel);
  else
    moe_patch_pack_scaled_(p, (float *)(void *)panel);
}

/* ------------------------------------------------------------------------------------------------------ as operands */

/* The patch of panel p: one part's columns, or elements, contracted from `from` on. */
MOE_FN moe_weight_patch_ moe_b_patch_(const moe_b_ *b, const moe_kernels *kernels, int64_t p, int64_t part,
                                      int64_t from, int64_t k) {
  const moe_quantized_ *q = (const moe_quantized_ *)b->source;
  const int64_t width = moe_b_width_(b);
  const moe_weight_patch_ patch = {.q = q,
                                   .kernels = kernels,
                                   .expert = b->expert,
                                   .part = q->part + part,
                                   .column = p * width,
                                   .count = moe_b_columns_(b, p, 1),
                                   .element = from,
                                   .elements = k,
                                   .col = part * width,
                                   .width = width};
  return patch;
}
MOE_FN moe_weight_patch_ moe_b_patch_transposed_(const moe_b_ *b, const moe_kernels *kernels, int64_t p, int64_t from,
                                                 int64_t end) {
  const moe_quantized_ *q = (const moe_quantized_ *)b->source;
  const int64_t columns = q->side.columns, part = from / columns;
  const moe_weight_patch_ patch = {.q = q,
                                   .kernels = kernels,
                                   .expert = b->expert,
                                   .part = q->part + part,
                                   .column = from % columns,
                                   .count = moe_min_(end, (part + 1) * columns) - from,
                                   .element = p * MOE_NR,
                                   .elements = moe_b_columns_(b, p, 1),
                                   .width = MOE_NR,
                                   .transposed = 1};
  return patch;
}

MOE_FN int moe_quantized_decode_(const moe_b_ *b, const moe_kernels *kernels, moe_panel_kind_ kind, int64_t p,
                                 int64_t from, int64_t k, char *panel) {
  if (kind == MOE_PANEL_PAIRS && !moe_quantized_as_pairs_((const moe_quantized_ *)b->source, 0)) return 0;
  for (int64_t part = 0; part < b->parts; part++) {
    const moe_weight_patch_ patch = moe_b_patch_(b, kernels, p, part, from, k);
    moe_patch_pack_(&patch, kind, panel);
  }
  if (kind == MOE_PANEL_F32) moe_panel_even_(k, panel);
  return 1;
}

/* The contraction may pass from one part to the next within a piece. */
MOE_FN int moe_quantized_decode_transposed_(const moe_b_ *b, const moe_kernels *kernels, moe_panel_kind_ kind,
                                            int64_t p, int64_t from, int64_t k, char *panel) {
  if (kind == MOE_PANEL_PAIRS && !moe_quantized_as_pairs_((const moe_quantized_ *)b->source, 1)) return 0;
  const int64_t row = kind == MOE_PANEL_F32 ? MOE_NR_BYTES_ : MOE_NR_BYTES_ / 2;
  for (int64_t at = from, n; at < from + k; at += n) {
    const moe_weight_patch_ patch = moe_b_patch_transposed_(b, kernels, p, at, from + k);
    n = patch.count;
    moe_patch_pack_(&patch, kind, panel + (at - from) * row);
  }
  if (kind == MOE_PANEL_F32) moe_panel_even_(k, panel);
  return 1;
}

/* MX whose elements of K lie side by side, over all of K. */
MOE_FN void moe_quantized_small_m_(const moe_b_ *b, const moe_kernels *kernels, int64_t p, moe_small_m_ *small_m) {
  const moe_quantized_ *q = (const moe_quantized_ *)b->source;
  moe_codes_ codes[2];
  for (int64_t part = 0; part < b->parts; part++) {
    const moe_weight_patch_ patch = moe_b_patch_(b, kernels, p, part, 0, b->k);
    codes[part] = moe_patch_columns_(&patch, NULL);
    codes[part].prefetch = patch.width * codes[part].stride;
  }
  small_m->parts = b->parts;
  kernels->quant->small_m_codes[moe_wide_(&q->format)](small_m, codes);
}

/* Where it lies, unless the words of its columns lie scattered. */
MOE_FN void moe_quantized_place_(const moe_quantized_ *q, int transposed, moe_b_ *b) {
  const moe_mx_side_ *s = &q->side;
  const int mx = q->weight->scaling == MOE_WEIGHT_MX;
  if (mx && moe_mx_is_nki_(s->layout)) return;
  b->group = mx ? moe_mx_group_bytes_(s) : MOE_MX_GROUP_;
  b->transposed = mx != transposed;
  b->stride = mx ? moe_mx_column_bytes_(s) : s->parts * s->columns;
  for (int64_t p = 0; p < s->parts - q->part; p++) {
    const moe_mx_at_ at = {b->expert, q->part + p, 0, 0, NULL};
    const int64_t plain = b->expert * s->K * b->stride + at.part * s->columns;
    b->base[p] = (const char *)(mx ? moe_mx_group_codes_(s, &at) : s->codes + plain);
  }
  if (transposed && b->base[1]) b->k_second = s->columns;
}

/* The weight's columns, contracted over K; and its transpose: columns along K, contracted over the columns of all
   parts. */
MOE_FN void moe_quantized_b_(const moe_quantized_ *q, int64_t expert, int transposed, moe_b_ *b) {
  const int64_t parts = q->side.parts - q->part, columns = q->side.columns;
  memset(b, 0, sizeof *b);
  b->parts = transposed ? 1 : parts;
  b->n = transposed ? q->side.K : columns;
  b->k = transposed ? parts * columns : q->side.K;
  b->decode = transposed ? moe_quantized_decode_transposed_ : moe_quantized_decode_;
  if (!transposed && moe_is_mx_(q->weight) && !moe_mx_is_nki_(q->side.layout) && q->side.scales == MOE_MX_SCALES_OWN)
    b->small_m = moe_quantized_small_m_;
  if (!transposed && moe_weight_scaled_after_(q->weight)) b->format = &q->format;
  b->source = q;
  b->expert = expert;
  moe_quantized_place_(q, transposed, b);
}

#endif
