/* Where data is in each layout of moe_mx_layout: the 32 codes of a group, its scale, and which element of the
   contraction axis a position is. Codes travel between layouts as 32 bytes, one code each. */
#ifndef MOE_QUANT_MX_LAYOUT_MAP_H
#define MOE_QUANT_MX_LAYOUT_MAP_H

enum { MOE_MX_GROUP_ = 32, MOE_MX_TILE_ = 512, MOE_MX_WORD_ = 4, MOE_GGML_BLOCK_ = 17 };

/* Codes, or scale bytes, of a layout in which the codes of a group are contiguous: from one to the next in bytes. */
typedef struct moe_mx_strides_ {
  int64_t first, expert, part, column, group;
  int64_t plane; /* bytes of one part of one expert */
} moe_mx_strides_;

/* One tensor in one layout. */
typedef struct moe_mx_tensor_ {
  moe_mx_layout layout;
  moe_mx_scales scales;
  int bits;
  int64_t E, K, parts, columns;
  int64_t groups, tiles, partitions; /* per row: groups of 32, tiles of 512; p_I of the x4 layouts */
  int logical;                       /* rows in logical order: position n is at moe_mx_at_.element[n % 32] */
  moe_mx_strides_ code, own;         /* unless the layout is NKI's: codes; scales, if placed as OWN says */
  int split, scales_within;          /* a byte has elements j and j+16 of a group; scales are among the codes */
  uint8_t *codes, *scale;
} moe_mx_tensor_;

/* One group of one column. */
typedef struct moe_mx_at_ {
  int64_t expert, part, column, group;
  const int64_t *element;
} moe_mx_at_;

typedef struct moe_mx_bytes_ {
  int64_t codes, scales; /* < 0: overflow */
} moe_mx_bytes_;

MOE_FN int moe_mx_is_x4_(moe_mx_layout layout) {
  return layout == MOE_MX_LAYOUT_NKI_STRIDED_X4 || layout == MOE_MX_LAYOUT_NKI_CONTIGUOUS_X4;
}

MOE_FN int moe_mx_is_kf_(moe_mx_layout layout) {
  return layout == MOE_MX_LAYOUT_NKI_WRAPX || layout == MOE_MX_LAYOUT_NKI_WRAPX_WHOLE ||
         layout == MOE_MX_LAYOUT_NKI_1X32;
}

MOE_FN int moe_mx_is_nki_(moe_mx_layout layout) { return moe_mx_is_x4_(layout) || moe_mx_is_kf_(layout); }

MOE_FN int64_t moe_nki_partitions_(int64_t length) { return moe_min_(length, MOE_MX_TILE_) / MOE_MX_WORD_; }

/* The element at position n of an axis in tiles, in which each word has an element of every quarter of the tile; or,
   with `inverse`, the position of element n. */
MOE_FN int64_t moe_nki_tile_at_(int64_t length, int64_t n, int inverse) {
  const int64_t start = n / MOE_MX_TILE_ * MOE_MX_TILE_, m = n - start;
  const int64_t quarter = moe_min_(MOE_MX_TILE_, length - start) / MOE_MX_WORD_;
  return inverse ? start + m % quarter * MOE_MX_WORD_ + m / quarter
                 : start + m % MOE_MX_WORD_ * quarter + m / MOE_MX_WORD_;
}

/* The element at position n of the contraction axis; or, with `inverse`, the position of element n. */
MOE_INLINE int64_t moe_mx_axis_(moe_mx_layout layout, int64_t parts, int64_t K, int64_t n, int inverse) {
  const int64_t start = n / MOE_MX_TILE_ * MOE_MX_TILE_, m = n - start, quarter = K / MOE_MX_WORD_;
  switch (layout) {
    case MOE_MX_LAYOUT_NKI_STRIDED_X4:
      if (parts == 1) return moe_nki_tile_at_(K, n, inverse);
      return inverse ? n % quarter * MOE_MX_WORD_ + n / quarter : n % MOE_MX_WORD_ * quarter + n / MOE_MX_WORD_;
    case MOE_MX_LAYOUT_NKI_WRAPX: /* a remainder of 384 is a tile of 256 and one of 128; all others are one tile */
      if (K - start != 384) return moe_nki_tile_at_(K, n, inverse);
      return m < 256 ? start + moe_nki_tile_at_(256, m, inverse)
                     : start + 256 + moe_nki_tile_at_(128, m - 256, inverse);
    case MOE_MX_LAYOUT_NKI_WRAPX_WHOLE: return moe_nki_tile_at_(K, n, inverse);
    default: return n;
  }
}

MOE_FN int64_t moe_mx_element_(moe_mx_layout layout, int64_t parts, int64_t K, int64_t position) {
  return moe_mx_axis_(layout, parts, K, position, 0);
}

/* Whether all codes of a column are contiguous and in order, and its scale bytes. */
MOE_FN int moe_mx_in_rows_(const moe_mx_tensor_ *s) {
  return !s->split && s->code.group == MOE_MX_GROUP_ * s->bits / 8 && s->own.group == 1;
}

MOE_FN int64_t moe_mx_offset_(const moe_mx_strides_ *m, const moe_mx_at_ *at) {
  return m->first + at->expert * m->expert + at->part * m->part + at->column * m->column + at->group * m->group;
}

MOE_FN int64_t moe_mx_rows_(const moe_mx_tensor_ *s) { return moe_mul_(s->parts, s->columns); }

/* Rows of the scale tensor of one expert, where the row is a partition (NKI layouts). */
MOE_FN int64_t moe_nki_scale_rows_(const moe_mx_tensor_ *s) {
  const int64_t words = s->K / MOE_MX_WORD_;
  if (s->scales == MOE_MX_SCALES_NKI_OVERSIZED) return moe_mx_is_x4_(s->layout) ? s->partitions : words;
  if (s->scales == MOE_MX_SCALES_NKI_PACKED) return moe_mul_(moe_ceil_div_(s->K, 4 * MOE_MX_TILE_), 128);
  return moe_mx_is_x4_(s->layout) ? moe_ceil_div_(s->partitions, 8) : s->groups;
}

/* -------------------------------------------------------------------------------------------------------- addresses */

/* The index of a column's row among those of its expert. */
MOE_FN int64_t moe_mx_row_(const moe_mx_tensor_ *s, const moe_mx_at_ *at) {
  if (s->layout == MOE_MX_LAYOUT_GPT_OSS) return at->column * s->parts + at->part;
  return at->part * s->columns + at->column;
}

/* Four scale rows to a quadrant of 32 partitions. */
MOE_FN int64_t moe_nki_quadrant_(int64_t row) { return row / 4 * 32 + row % 4; }

/* The element (word or scale) of partition p, tile t in [E,count,parts,tiles,columns]. */
MOE_FN int64_t moe_nki_at_(const moe_mx_tensor_ *s, const moe_mx_at_ *at, int64_t count, int64_t p, int64_t tiles,
                           int64_t t) {
  return (((at->expert * count + p) * s->parts + at->part) * tiles + t) * s->columns + at->column;
}

MOE_FN int64_t moe_nki_word_at_(const moe_mx_tensor_ *s, const moe_mx_at_ *at, int64_t word) {
  if (moe_mx_is_x4_(s->layout)) return moe_nki_at_(s, at, s->partitions, word % 128, s->tiles, word / 128);
  return moe_nki_at_(s, at, s->K / MOE_MX_WORD_, word, 1, 0);
}

MOE_FN uint8_t *moe_mx_scale_at_(const moe_mx_tensor_ *s, const moe_mx_at_ *at) {
  const int64_t g = at->group, t = g / 16, r = g % 16, count = moe_nki_scale_rows_(s);
  const int oversized = s->scales == MOE_MX_SCALES_NKI_OVERSIZED;
  if (s->scales_within) return s->codes + moe_mx_offset_(&s->own, at);
  if (s->scales == MOE_MX_SCALES_TILED_128X4) {
    const int64_t row = moe_mx_row_(s, at), across = moe_ceil_div_(s->groups, 4);
    const int64_t down = moe_ceil_div_(moe_mx_rows_(s), 128);
    const int64_t tile = (at->expert * down + row / 128) * across + g / 4;
    return s->scale + tile * 512 + row % 32 * 16 + row / 32 % 4 * 4 + g % 4;
  }
  if (s->scales == MOE_MX_SCALES_NKI_PACKED)
    return s->scale + moe_nki_at_(s, at, count, t / 4 * 128 + t % 4 * 4 + moe_nki_quadrant_(r), 1, 0);
  if (moe_mx_is_x4_(s->layout))
    return s->scale + moe_nki_at_(s, at, count, oversized ? moe_nki_quadrant_(r) : r, s->tiles, t);
  if (moe_mx_is_kf_(s->layout)) return s->scale + moe_nki_at_(s, at, count, oversized ? moe_nki_quadrant_(g) : g, 1, 0);
  return s->scale + moe_mx_offset_(&s->own, at);
}

/* -------------------------------------------------------------------------------------------------- groups of codes */

/* Words are integers: code 0 is the least significant, whatever the byte order. */
MOE_FN void moe_nki_load_(const moe_mx_tensor_ *s, const moe_mx_at_ *at, int64_t n, uint8_t *code) {
  for (int64_t w = 0; w < n / MOE_MX_WORD_; w++) {
    const int64_t index = moe_nki_word_at_(s, at, at->group * 8 + w);
    uint32_t word;
    if (s->bits == 4) {
      uint16_t u16;
      memcpy(&u16, s->codes + 2 * index, 2);
      word = u16;
    } else {
      memcpy(&word, s->codes + 4 * index, 4);
    }
    for (int q = 0; q < MOE_MX_WORD_; q++) code[4 * w + q] = (uint8_t)(word >> (q * s->bits) & ((1u << s->bits) - 1u));
  }
}

MOE_FN void moe_nki_store_(const moe_mx_tensor_ *s, const moe_mx_at_ *at, int64_t n, const uint8_t *code) {
  for (int64_t w = 0; w < n / MOE_MX_WORD_; w++) {
    const int64_t index = moe_nki_word_at_(s, at, at->group * 8 + w);
    uint32_t word = 0;
    for (int q = 0; q < MOE_MX_WORD_; q++) word |= (uint32_t)code[4 * w + q] << (q * s->bits);
    if (s->bits == 4) {
      const uint16_t u16 = (uint16_t)word;
      memcpy(s->codes + 2 * index, &u16, 2);
    } else {
      memcpy(s->codes + 4 * index, &word, 4);
    }
  }
}

/* In layouts that are not NKI's: where a group's codes begin. */
MOE_FN uint8_t *moe_mx_group_codes_(const moe_mx_tensor_ *s, const moe_mx_at_ *at) {
  return s->codes + moe_mx_offset_(&s->code, at);
}

/* Where the row of a column begins. */
MOE_FN uint8_t *moe_mx_row_codes_(const moe_mx_tensor_ *s, const moe_mx_at_ *at) {
  return moe_mx_group_codes_(s, at) - at->group * s->code.group;
}

/* The n codes of a group; code[n..31] are not written. */
MOE_FN void moe_mx_load_(const moe_mx_tensor_ *s, const moe_mx_at_ *at, int64_t n, uint8_t *code) {
  if (moe_mx_is_nki_(s->layout)) {
    moe_nki_load_(s, at, n, code);
    return;
  }
  const uint8_t *q = s->logical ? moe_mx_row_codes_(s, at) : moe_mx_group_codes_(s, at);
  for (int j = 0; j < 16 && s->split; j++) code[j] = q[j] & 15u, code[j + 16] = (uint8_t)(q[j] >> 4);
  for (int64_t j = 0; j < n && !s->split; j++) {
    const int64_t k = s->logical ? at->element[j] : j;
    code[j] = (uint8_t)(s->bits == 8 ? q[k] : q[k / 2] >> (k % 2 * 4) & 15);
  }
}

MOE_FN void moe_mx_store_(const moe_mx_tensor_ *s, const moe_mx_at_ *at, int64_t n, const uint8_t *code) {
  if (moe_mx_is_nki_(s->layout)) {
    moe_nki_store_(s, at, n, code);
    return;
  }
  uint8_t *q = s->logical ? moe_mx_row_codes_(s, at) : moe_mx_group_codes_(s, at);
  if (s->split) {
    for (int j = 0; j < 16; j++) q[j] = (uint8_t)(code[j] | code[j + 16] << 4);
  } else if (s->bits == 8) {
    for (int64_t j = 0; j < n; j++) q[s->logical ? at->element[j] : j] = code[j];
  } else if (s->logical) { /* bytes are 0 before */
    for (int64_t j = 0; j < n; j++) q[at->element[j] / 2] |= (uint8_t)(code[j] << (at->element[j] % 2 * 4));
  } else {
    for (int64_t j = 0; j < n; j += 2) q[j / 2] = (uint8_t)(code[j] | (j + 1 < n ? code[j + 1] << 4 : 0));
  }
}

#endif
