/* Decodes tiles of quantised weights into panels. In the forward the columns of a panel are the weight's columns, and
   the contraction is over K; in the backward (transposed) the columns of a panel are elements along K, and the
   contraction is over the weight's columns, gate before up. */
#ifndef MOE_QUANT_WEIGHT_TILE_H
#define MOE_QUANT_WEIGHT_TILE_H

/* `count` columns of a part of a weight, from `column` on, times `elements` along K, from `element` on. They become
   columns [col, col+width) of a panel of k rows: `elements` rows or, transposed, `count`. */
typedef struct moe_weight_tile_ {
  const moe_quantized_ *q;
  const moe_kernels *kernels;
  int64_t expert, part, column, count, element, elements, col, width;
  int transposed;
} moe_weight_tile_;

MOE_FN moe_codes_ moe_tile_codes_(const moe_weight_tile_ *p) {
  moe_codes_ codes = {0};
  codes.format = &p->q->format;
  codes.col = p->col;
  codes.width = p->width;
  codes.n = p->transposed ? p->elements : p->count;
  codes.k = p->transposed ? p->count : p->elements;
  return codes;
}

/* --------------------------------------------------------------------------------------------------------------- MX */

enum { MOE_TILE_WORDS_ = 64 };

/* In Trainium's layouts the words of all columns are contiguous for an element of K, but not those of the next element.
   Of some elements: where the words are, at which bit of them, and where the scale bytes. */
typedef struct moe_tile_words_ {
  const uint8_t *codes[MOE_TILE_WORDS_], *scale[MOE_TILE_WORDS_];
  uint8_t shift[MOE_TILE_WORDS_];
} moe_tile_words_;

/* Finds the words of elements [from, from+n) of the tile, and prefetches them. */
MOE_FN void moe_tile_find_words_(const moe_weight_tile_ *p, int64_t from, int64_t n, moe_tile_words_ *words) {
  const moe_mx_tensor_ *s = &p->q->tensor;
  const int64_t word = s->bits / 2;
  moe_mx_at_ at = {p->expert, p->part, p->column, -1, NULL};
  for (int64_t e = 0; e < n; e++) {
    const int64_t position = moe_mx_axis_(s->layout, s->parts, s->K, p->element + from + e, 1);
    const int64_t before = at.group;
    at.group = position / MOE_MX_GROUP_;
    words->codes[e] = s->codes + moe_nki_word_at_(s, &at, position / MOE_MX_WORD_) * word;
    words->scale[e] = at.group == before ? words->scale[e - 1] : moe_mx_scale_at_(s, &at);
    words->shift[e] = (uint8_t)(position % MOE_MX_WORD_ * s->bits);
    for (int64_t byte = 0; byte < p->count * word; byte += 64) __builtin_prefetch(words->codes[e] + byte);
  }
}

/* Not inlined: the caller has buffers for other layouts on the stack. */
MOE_FN __attribute__((noinline)) void moe_tile_pack_words_(const moe_weight_tile_ *p, float *panel) {
  moe_tile_words_ words;
  for (int64_t from = 0, n; from < p->elements; from += n) {
    n = moe_min_(MOE_TILE_WORDS_, p->elements - from);
    moe_tile_find_words_(p, from, n, &words);
    for (int64_t e = 0; e < n; e++)
      p->kernels->quant->pack_words_row[moe_wide_(&p->q->format)](panel + (from + e) * MOE_NR + p->col, words.codes[e],
                                                                  words.shift[e], words.scale[e], p->count, p->width,
                                                                  &p->q->format);
  }
}

enum { MOE_TILE_SCALES_ = MOE_DECODE_K_ / MOE_MX_GROUP_ * MOE_NR };

/* The tile as pack_codes_columns takes it. Scales that are not placed as OWN says are copied to `scale`. */
MOE_FN moe_codes_ moe_tile_columns_(const moe_weight_tile_ *p, uint8_t *scale) {
  const moe_mx_tensor_ *s = &p->q->tensor;
  moe_mx_at_ at = {p->expert, p->part, p->column, p->element / MOE_MX_GROUP_, NULL};
  moe_codes_ codes = moe_tile_codes_(p);
  codes.codes = moe_mx_group_codes_(s, &at);
  codes.stride = s->code.column;
  codes.group = s->code.group;
  codes.split = s->split;
  codes.scale = moe_mx_scale_at_(s, &at);
  codes.scale_stride = s->own.column;
  codes.scale_group = s->own.group;
  if (s->scales == MOE_MX_SCALES_OWN && (!p->transposed || moe_mx_in_rows_(s))) return codes;
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
MOE_FN void moe_tile_pack_columns_(const moe_weight_tile_ *p, float *panel) {
  const moe_mx_tensor_ *s = &p->q->tensor;
  uint8_t scale[MOE_TILE_SCALES_];
  if (moe_mx_is_nki_(s->layout)) {
    moe_tile_pack_words_(p, panel);
    return;
  }
  const moe_codes_ codes = moe_tile_columns_(p, scale);
  p->kernels->quant->pack_codes_columns[moe_wide_(&p->q->format)](panel, &codes);
}

/* As in the forward: elements [from, from+count) of the tile's columns [at, at+n), 0 where there is no element. */
MOE_FN void moe_tile_pack_some_words_(const moe_weight_tile_ *p, int64_t at, int64_t n, int64_t from, int64_t count,
                                      float *panel) {
  moe_weight_tile_ part = *p;
  part.column += at, part.count = n;
  part.element += from, part.elements = moe_max_(0, moe_min_(count, p->elements - from));
  moe_tile_pack_words_(&part, panel);
  for (int64_t e = part.elements; e < count; e++) memset(panel + e * MOE_NR, 0, MOE_NR_BYTES_);
}

enum { MOE_HALF_ = MOE_NR / 2, MOE_FEW_ROWS_ = MOE_HALF_ * MOE_HALF_ / MOE_NR };

/* Transposes a square of 64 by 64 in place, a quarter at a time. */
MOE_FN void moe_transpose_square_(const moe_kernels *kernels, float *square, float *room) {
  for (int64_t i = 0; i < 2; i++)
    for (int64_t j = 0; j <= i; j++) {
      float *lower = square + (i * MOE_NR + j) * MOE_HALF_, *upper = square + (j * MOE_NR + i) * MOE_HALF_;
      kernels->vec->transpose_words(room, MOE_HALF_ * 4, lower, MOE_NR_BYTES_, MOE_HALF_, MOE_HALF_);
      if (i != j) kernels->vec->transpose_words(lower, MOE_NR_BYTES_, upper, MOE_NR_BYTES_, MOE_HALF_, MOE_HALF_);
      for (int64_t r = 0; r < MOE_HALF_; r++)
        memcpy(upper + r * MOE_NR, room + r * MOE_HALF_, MOE_HALF_ * sizeof *room);
    }
}

/* Fewer than 64 columns, from `at` on, transposed, some elements at a time. */
MOE_FN void moe_tile_pack_few_words_(const moe_weight_tile_ *p, int64_t at, int64_t n, float *panel, float *rows) {
  const int64_t whole = n - n % 16; /* of whole vectors */
  for (int64_t e = 0; e < MOE_NR; e += MOE_FEW_ROWS_) {
    moe_tile_pack_some_words_(p, at, n, e, MOE_FEW_ROWS_, rows);
    p->kernels->vec->transpose_words(panel + e, MOE_NR_BYTES_, rows, MOE_NR_BYTES_, MOE_FEW_ROWS_, whole);
    for (int64_t j = whole; j < n; j++)
      for (int64_t i = 0; i < MOE_FEW_ROWS_; i++)
        memcpy(panel + j * MOE_NR + e + i, rows + i * MOE_NR + j, sizeof *panel);
  }
}

/* Backward, in Trainium's layouts: 64 of the weight's columns at a time are decoded and transposed. */
MOE_FN void moe_tile_pack_words_transposed_(const moe_weight_tile_ *p, float *panel) {
  float room[MOE_HALF_ * MOE_HALF_];
  for (int64_t at = 0, n; at < p->count; at += n, panel += n * MOE_NR) {
    n = moe_min_(MOE_NR, p->count - at);
    if (n < MOE_NR) {
      moe_tile_pack_few_words_(p, at, n, panel, room);
      continue;
    }
    moe_tile_pack_some_words_(p, at, n, 0, MOE_NR, panel);
    moe_transpose_square_(p->kernels, panel, room);
  }
}

/* Bytes of half elements j and j+16 of a group, in order. */
MOE_FN void moe_tile_unsplit_(uint8_t *to, const uint8_t *from) {
  for (int i = 0; i < 8; i++, from += 2) {
    to[i] = (uint8_t)((from[0] & 15) | from[1] << 4);
    to[i + 8] = (uint8_t)(from[0] >> 4 | (from[1] & 240));
  }
}

/* Backward, in layouts whose columns are not contiguous or not in order: the codes of some columns at a time are
   copied. */
MOE_FN void moe_tile_pack_groups_(const moe_weight_tile_ *p, const moe_codes_ *all, float *panel) {
  enum { columns = 32 };
  const int64_t bits = p->q->tensor.bits;
  uint8_t ordered[columns * MOE_NR];
  moe_codes_ codes = *all;
  codes.codes = ordered, codes.stride = MOE_NR, codes.group = MOE_MX_GROUP_ * bits / 8, codes.split = 0;
  for (int64_t at = 0; at < p->count; at += columns, codes.scale += columns * codes.scale_stride) {
    codes.k = moe_min_(columns, p->count - at);
    for (int64_t c = 0; c < codes.k; c++)
      for (int64_t g = 0; g < codes.scale_stride; g++) {
        const uint8_t *from = all->codes + (at + c) * all->stride + g * all->group;
        uint8_t *to = ordered + c * codes.stride + g * codes.group;
        if (all->split) moe_tile_unsplit_(to, from);
        else memcpy(to, from, (size_t)codes.group);
      }
    p->kernels->quant->pack_codes_rows[moe_wide_(&p->q->format)](panel + at * MOE_NR, &codes);
  }
}

/* Backward, in other layouts. */
MOE_FN void moe_tile_pack_rows_(const moe_weight_tile_ *p, float *panel) {
  uint8_t scale[MOE_TILE_SCALES_];
  const moe_codes_ codes = moe_tile_columns_(p, scale);
  if (moe_mx_in_rows_(&p->q->tensor)) p->kernels->quant->pack_codes_rows[moe_wide_(&p->q->format)](panel, &codes);
  else moe_tile_pack_groups_(p, &codes, panel);
}

MOE_FN void moe_tile_pack_mx_(const moe_weight_tile_ *p, float *panel) {
  if (!p->transposed) moe_tile_pack_columns_(p, panel);
  else if (moe_mx_is_nki_(p->q->tensor.layout)) moe_tile_pack_words_transposed_(p, panel);
  else moe_tile_pack_rows_(p, panel);
}

/* ------------------------------------------------------------------------------------------- scales of other blocks */

/* How many elements of the tile along K, or columns, from one on are left of a block. */
MOE_FN int64_t moe_tile_left_k_(const moe_weight_tile_ *p, int64_t i) {
  return moe_min_(p->elements - i, p->q->block_k - (p->q->weight->first_k + p->element + i) % p->q->block_k);
}
MOE_FN int64_t moe_tile_left_n_(const moe_weight_tile_ *p, int64_t i) {
  const int64_t first = p->q->block_n > 1 ? p->q->weight->first_column : 0;
  return moe_min_(p->count - i, p->q->block_n - (first + p->column + i) % p->q->block_n);
}

/* The scales of the tile's row r. */
MOE_FN void moe_tile_row_scales_(const moe_weight_tile_ *p, int64_t r, float *scale) {
  const moe_quantized_ *q = p->q;
  const int64_t n = p->transposed ? p->elements : p->count;
  for (int64_t i = 0, end; i < n; i = end) {
    const int64_t column = p->column + (p->transposed ? r : i), element = p->element + (p->transposed ? i : r);
    const float value = moe_quantized_scale_(q, p->kernels, p->expert, p->part, column, element);
    end = !q->blocked ? n : i + (p->transposed ? moe_tile_left_k_(p, i) : moe_tile_left_n_(p, i));
    for (int64_t j = i; j < end; j++) scale[j] = value;
  }
}

/* How many of the tile's `rows` rows, from r on, have the same scales. */
MOE_FN int64_t moe_tile_same_scales_(const moe_weight_tile_ *p, int64_t r, int64_t rows) {
  if (p->q->blocked) return p->transposed ? moe_tile_left_n_(p, r) : moe_tile_left_k_(p, r);
  switch (p->q->weight->scaling) {
    case MOE_WEIGHT_STATIC:
    case MOE_WEIGHT_STATIC_PER_EXPERT: return rows - r;
    default: return 1;
  }
}

/* Whether all elements of a row have one scale, and so many rows that a table pays. */
MOE_FN int moe_tile_shares_scales_(const moe_weight_tile_ *p) {
  const int64_t n = p->transposed ? p->elements : p->count, k = p->transposed ? p->count : p->elements;
  if (!p->q->blocked) return moe_tile_same_scales_(p, 0, k) == k;
  return (p->transposed ? moe_tile_left_k_(p, 0) : moe_tile_left_n_(p, 0)) == n &&
         (p->transposed ? p->q->block_n : p->q->block_k) >= MOE_KC_MULTIPLE;
}

/* The caller may be in a mode that flushes subnormals, which must not apply here. */
MOE_FN void moe_tile_scale_rows_(const moe_weight_tile_ *p, int64_t k, int64_t n, float *panel) {
  const int bf16 = p->q->type == MOE_DTYPE_BF16;
  const moe_fpenv_ saved = moe_fpenv_enter_();
  float scale[MOE_NR];
  for (int64_t r = 0, same; r < k; r += same) {
    float *rows = panel + r * MOE_NR;
    same = moe_tile_same_scales_(p, r, k);
    moe_tile_row_scales_(p, r, scale);
    if (bf16) p->kernels->quant->scale_to_bf16(rows, scale, same, n);
    else
      for (int64_t i = 0; i < same; i++) p->kernels->vec->multiply_row(rows + i * MOE_NR, scale, n);
  }
  moe_fpenv_restore_(saved);
}

MOE_FN moe_codes_ moe_tile_scaled_codes_(const moe_weight_tile_ *p) {
  const moe_mx_tensor_ *s = &p->q->tensor;
  moe_codes_ codes = moe_tile_codes_(p);
  codes.stride = p->q->by_columns ? s->code.column : s->parts * s->columns;
  codes.group = s->code.group;
  codes.codes =
      s->codes + (p->q->by_columns ? ((p->expert * s->parts + p->part) * s->columns + p->column) * codes.stride +
                                         p->element * s->bits / 8
                                   : (p->expert * s->K + p->element) * codes.stride + p->part * s->columns + p->column);
  return codes;
}

/* ------------------------------------------------------------------------- columns under scales that are not MX's */

enum { MOE_TILE_RUNS_ = 16, MOE_TILE_SOME_ = 32 };

/* How many of n elements are packed at a time: whole bytes of codes, and not too many runs. */
MOE_FN int64_t moe_tile_some_(const moe_weight_tile_ *p, int64_t n) {
  if (p->q->block_k < MOE_DECODE_K_ / (MOE_TILE_RUNS_ - 2)) return moe_min_(n, MOE_TILE_RUNS_);
  return p->q->format.bits == 6 ? moe_min_(n, MOE_TILE_SOME_) : n;
}

/* Copies numbers of `size` bytes, `runs` of each of n columns, `stride` bytes apart, to rows of MOE_NR, the rest 0. */
MOE_FN void moe_tile_gather_(uint8_t *to, const uint8_t *from, int64_t size, int64_t stride, int64_t n, int64_t runs) {
  if (n < MOE_NR) memset(to, 0, (size_t)(runs * MOE_NR * size));
  for (int64_t j = 0; j < n; j++, to += size, from += stride)
    for (int64_t r = 0; r < runs; r++) {
      if (size == 1) to[r * MOE_NR] = from[r];
      else if (size == 2) memcpy(to + r * MOE_NR * 2, from + r * 2, 2);
      else memcpy(to + r * MOE_NR * 4, from + r * 4, 4);
    }
}

/* The scales of the tile's runs, as floats. */
MOE_FN void moe_tile_load_scales_(const moe_weight_tile_ *p, int64_t index, int64_t runs, float *scale) {
  const moe_quantized_ *q = p->q;
  const moe_mx_tensor_ *s = &q->tensor;
  const int mx = moe_is_mx_(q->weight);
  const moe_scales_type type = mx ? MOE_SCALES_E8M0 : q->scales_type;
  const int64_t size = moe_scales_bytes_(type), n = runs * MOE_NR;
  const int64_t stride = mx ? s->own.column : moe_quantized_down_(q) * size;
  moe_mx_at_ at = {p->expert, p->part, p->column, p->element / MOE_MX_GROUP_, NULL};
  const uint8_t *from = mx ? moe_mx_scale_at_(s, &at) : (const uint8_t *)q->weight->scales + index * size;
  uint8_t stored[2 * MOE_TILE_RUNS_ * MOE_NR], *to = size == 4 ? (uint8_t *)scale : stored;
  const int own = !mx || s->scales == MOE_MX_SCALES_OWN;
  const moe_element_format_ e4m3fn = moe_element_format_of_(MOE_ELEMENT_E4M3FN);
  if (own && p->count % 16 == 0 && runs * size % 4 == 0 && type != MOE_SCALES_FP16) {
    memset(scale, 0, p->count < MOE_NR ? (size_t)n * sizeof *scale : 0);
    p->kernels->quant->load_scales(scale, from, stride, p->count, runs, type, &e4m3fn);
  } else {
    if (own) moe_tile_gather_(to, from, size, stride, p->count, runs);
    for (int64_t i = 0; i < n && !own; i++) {
      at.column = p->column + moe_min_(i % MOE_NR, p->count - 1), at.group = p->element / MOE_MX_GROUP_ + i / MOE_NR;
      stored[i] = *moe_mx_scale_at_(s, &at);
    }
    if (size < 4) moe_scales_load_(p->kernels, type, scale, stored, n);
  }
  if (q->weight->global_scale)
    p->kernels->vec->scale_row(scale, q->weight->global_scale[p->expert * s->parts + p->part], n);
}

/* What becomes of the code of 0: see moe_scaled_codes_. */
MOE_FN void moe_tile_load_zeros_(const moe_weight_tile_ *p, int64_t index, int64_t runs, float *zero) {
  const moe_element_format_ *f = &p->q->format;
  const uint8_t *given = p->q->weight->zero_points;
  uint8_t stored[MOE_TILE_RUNS_ * MOE_NR];
  if (given) moe_tile_gather_(stored, given + index, 1, moe_quantized_down_(p->q), p->count, runs);
  for (int64_t i = 0; i < (given ? runs : 1) * MOE_NR; i++)
    zero[i] = moe_castf_scalar(f->magic | (i % MOE_NR >= p->count ? f->flip : given ? stored[i] : (uint32_t)f->zero));
}

/* Codes of 6 bits, which become bytes as kernels take them. */
MOE_FN __attribute__((noinline)) void moe_tile_pack_six_(moe_scaled_codes_ *s, int64_t columns, int64_t elements,
                                                         float *panel, moe_pack_scaled_fn_ pack) {
  uint8_t bytes[MOE_NR * MOE_TILE_SOME_];
  moe_element_format_ f = *s->codes.format;
  f.bits = 8;
  for (int64_t j = 0; j < columns; j++)
    moe_six_to_bytes_(bytes + j * MOE_TILE_SOME_, s->codes.codes + j * s->codes.stride, elements);
  s->codes.codes = bytes, s->codes.stride = MOE_TILE_SOME_, s->codes.group = MOE_MX_GROUP_;
  s->codes.format = &f;
  pack(panel, s);
}

/* Some of the tile's columns, and elements of them. */
MOE_FN __attribute__((noinline)) void moe_tile_pack_part_(const moe_weight_tile_ *p, float *panel) {
  float scale[MOE_TILE_RUNS_ * MOE_NR], zero[MOE_TILE_RUNS_ * MOE_NR];
  const moe_quantized_ *q = p->q;
  const moe_quant_table_ *quant = p->kernels->quant;
  const moe_pack_scaled_fn_ pack = p->transposed ? quant->pack_scaled_rows : quant->pack_scaled_columns;
  const int mx = moe_is_mx_(q->weight), integer = q->format.zero > 0;
  const int64_t index = mx ? 0 : moe_quantized_scale_index_(q, p->expert, p->part, p->column, p->element);
  moe_scaled_codes_ s;
  s.codes = moe_tile_scaled_codes_(p);
  s.block = q->block_k, s.first = ((mx ? 0 : q->weight->first_k) + p->element) % q->block_k;
  const int64_t runs = (s.first + p->elements - 1) / s.block + 1;
  s.scale = scale, s.zero = integer ? zero : scale;
  s.zero_stride = q->weight->zero_points ? MOE_NR : 0;
  s.to_bf16 = q->type == MOE_DTYPE_BF16;
  moe_tile_load_scales_(p, index, runs, scale);
  if (integer) moe_tile_load_zeros_(p, index, runs, zero);
  if (q->format.bits == 6) moe_tile_pack_six_(&s, p->count, p->elements, panel, pack);
  else pack(panel, &s);
}

/* Groups, and MX of elements that its kernels do not take. */
MOE_FN void moe_tile_pack_runs_(const moe_weight_tile_ *p, float *panel) {
  const moe_fpenv_ saved = moe_fpenv_enter_();
  moe_weight_tile_ part = *p;
  for (int64_t at = 0; at < p->elements; at += part.elements) {
    part.elements = moe_tile_some_(p, p->elements - at);
    part.element = p->element + at;
    if (p->transposed) part.col = at, part.width = at + part.elements < p->elements ? part.elements : MOE_NR - at;
    for (int64_t c = 0; c < p->count; c += part.count) {
      part.column = p->column + c, part.count = moe_min_(MOE_NR, p->count - c);
      moe_tile_pack_part_(&part, panel + (p->transposed ? c : at) * MOE_NR);
    }
    part.count = p->count;
  }
  moe_fpenv_restore_(saved);
}

MOE_FN void moe_tile_pack_scaled_(const moe_weight_tile_ *p, float *panel) {
  const moe_codes_ codes = moe_tile_scaled_codes_(p);
  const int wide = moe_wide_(&p->q->format);
  if (moe_is_mx_(p->q->weight) || moe_is_group_(p->q->weight)) {
    moe_tile_pack_runs_(p, panel);
    return;
  }
  if (p->transposed != p->q->by_columns) p->kernels->quant->pack_codes_columns[wide](panel, &codes);
  else p->kernels->quant->pack_codes_rows[wide](panel, &codes);
  if (!p->transposed && moe_weight_scaled_after_(p->q->weight)) return;
  moe_tile_scale_rows_(p, codes.k, codes.n, panel + p->col);
}

/* ----------------------------------------------------------------------------------------------------------- tables */

/* Some rows, or columns, of codes that share a table: see moe_tile_pack_bytes_. */
MOE_FN int moe_tile_look_up_(const moe_weight_tile_ *p, moe_panel_kind_ kind, float scale, moe_codes_ *codes,
                             char *panel) {
  const moe_quant_table_ *quant = p->kernels->quant;
  moe_byte_table_ table;
  codes->table = &table;
  quant->byte_table(&table, p->q->value, scale, codes->scale != NULL);
  return (p->transposed != p->q->by_columns ? quant->pack_bytes_columns : quant->pack_bytes_rows)[kind](panel, codes);
}

/* MX. */
MOE_FN int moe_tile_pack_mx_bytes_(const moe_weight_tile_ *p, moe_panel_kind_ kind, char *panel) {
  uint8_t scale[MOE_TILE_SCALES_];
  if (moe_mx_is_nki_(p->q->tensor.layout) || !moe_mx_in_rows_(&p->q->tensor)) return 0;
  moe_codes_ codes = moe_tile_columns_(p, scale);
  return moe_tile_look_up_(p, kind, 1.0f, &codes, panel);
}

/* Codes that are looked up: MX or, under float scales, where some rows of the panel at a time share one scale, or none
   has one. Returns 0 where that is not so; what is written then is to be overwritten. */
MOE_FN int moe_tile_pack_bytes_(const moe_weight_tile_ *p, moe_panel_kind_ kind, char *panel) {
  const moe_quantized_ *q = p->q;
  const int scaled = p->transposed || !moe_weight_scaled_after_(q->weight);
  if (!p->kernels->quant->byte_table || q->format.packed || q->format.bits != 8 || moe_is_group_(q->weight)) return 0;
  if (q->words) return moe_tile_pack_mx_bytes_(p, kind, panel);
  if (scaled && (q->type != MOE_DTYPE_BF16 || !moe_tile_shares_scales_(p))) return 0;
  moe_codes_ codes = moe_tile_scaled_codes_(p);
  const moe_fpenv_ saved = moe_fpenv_enter_();
  const int64_t k = codes.k, row = MOE_NR_BYTES_ / (kind == MOE_PANEL_F32 ? 1 : 2),
                step = p->transposed != q->by_columns ? 1 : codes.stride;
  int64_t r = 0;
  for (; r < k; r += codes.k, codes.codes += codes.k * step) {
    const int64_t column = p->column + (p->transposed ? r : 0), element = p->element + (p->transposed ? 0 : r);
    codes.k = scaled ? moe_tile_same_scales_(p, r, k) : k;
    if (kind == MOE_PANEL_PAIRS && codes.k % 2 && r + codes.k < k) break;
    (void)moe_tile_look_up_(p, kind,
                            scaled ? moe_quantized_scale_(q, p->kernels, p->expert, p->part, column, element) : 1.0f,
                            &codes, panel + r * row);
  }
  moe_fpenv_restore_(saved);
  return r == k;
}

/* ------------------------------------------------------------------------------------------------------------ pairs */

/* Whether codes are decoded to pairs directly: rows or columns are contiguous, and no float scale is to be applied. */
MOE_FN int moe_quantized_as_pairs_(const moe_quantized_ *q, int transposed) {
  const moe_mx_tensor_ *s = &q->tensor;
  if (!q->words) return !transposed && moe_weight_scaled_after_(q->weight);
  return !moe_mx_is_nki_(s->layout) && moe_mx_in_rows_(s) && s->scales == MOE_MX_SCALES_OWN;
}

MOE_FN void moe_tile_pack_pairs_(const moe_weight_tile_ *p, void *pairs) {
  const int wide = moe_wide_(&p->q->format);
  const moe_codes_ codes = p->q->words ? moe_tile_columns_(p, NULL) : moe_tile_scaled_codes_(p);
  (p->q->by_columns != p->transposed ? p->kernels->quant->pack_pairs_columns
                                     : p->kernels->quant->pack_pairs_rows)[wide](pairs, &codes);
}

/* Returns 0 where it cannot make pairs: as_pairs says no or, if the contraction continues in the next part, a pair is
   in both. What is written then is to be overwritten. */
MOE_FN int moe_tile_pack_(const moe_weight_tile_ *p, moe_panel_kind_ kind, char *panel) {
  const int pairs = kind == MOE_PANEL_PAIRS;
  if (pairs && p->transposed && p->q->tensor.columns % 2) return 0;
  if (moe_tile_pack_bytes_(p, kind, panel)) return 1;
  if (pairs && !moe_quantized_as_pairs_(p->q, p->transposed)) return 0;
  if (pairs) moe_tile_pack_pairs_(p, panel);
  else if (p->q->words) moe_tile_pack_mx_(p, (float *)(void *)panel);
  else moe_tile_pack_scaled_(p, (float *)(void *)panel);
  return 1;
}

#endif
