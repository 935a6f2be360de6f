/* mx_oracle.h: the layouts of moe_mx_layout written down a second time, from their definitions: each walks its own axes
   in storage order, appends one byte after the other, and asks a table [E,parts,columns,K] of codes what to put
   there. */
#ifndef MOE_TEST_MX_ORACLE_H
#define MOE_TEST_MX_ORACLE_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "moe.h"

typedef struct mx_tensor {
  int64_t E, K, parts, columns;
  int bits;
  uint8_t *code, *scale; /* [E,parts,columns,K] one code per byte, by position; [E,parts,columns,ceil(K/32)] */
} mx_tensor;

typedef struct mx_bytes {
  uint8_t *data;
  size_t count, room;
} mx_bytes;

static inline void mx_append(mx_bytes *b, const void *data, size_t count) {
  if (b->count + count > b->room) {
    b->room = 2 * (b->count + count) + 64;
    b->data = (uint8_t *)realloc(b->data, b->room);
    if (b->data == NULL) abort();
  }
  memcpy(b->data + b->count, data, count);
  b->count += count;
}
static inline void mx_append_byte(mx_bytes *b, int byte) {
  const uint8_t value = (uint8_t)byte;
  mx_append(b, &value, 1);
}

/* 0 beyond the end of K. */
static inline int mx_code(const mx_tensor *t, int64_t e, int64_t part, int64_t column, int64_t n) {
  return n < t->K ? t->code[((e * t->parts + part) * t->columns + column) * t->K + n] : 0;
}
static inline int mx_scale(const mx_tensor *t, int64_t e, int64_t part, int64_t column, int64_t g) {
  const int64_t G = (t->K + 31) / 32;
  return g < G ? t->scale[((e * t->parts + part) * t->columns + column) * G + g] : 0;
}

/* A word of four positions as a number. */
static inline void mx_append_word(mx_bytes *b, const mx_tensor *t, int64_t e, int64_t part, int64_t column, int64_t n) {
  uint32_t word = 0;
  for (int q = 3; q >= 0; q--) word = (word << t->bits) | (uint32_t)mx_code(t, e, part, column, n + q);
  const uint16_t half = (uint16_t)word;
  if (t->bits == 4) mx_append(b, &half, sizeof half);
  else mx_append(b, &word, sizeof word);
}

/* ------------------------------------------------------------------------------------------------------------ rules */

static inline int mx_is_x4(moe_mx_layout l) {
  return l == MOE_MX_LAYOUT_NKI_STRIDED_X4 || l == MOE_MX_LAYOUT_NKI_CONTIGUOUS_X4;
}
static inline int mx_is_rows(moe_mx_layout l) { return l == MOE_MX_LAYOUT_PLAIN || l == MOE_MX_LAYOUT_GPT_OSS; }
static inline int mx_is_nki(moe_mx_layout l) {
  return mx_is_x4(l) || l == MOE_MX_LAYOUT_NKI_WRAPX || l == MOE_MX_LAYOUT_NKI_WRAPX_WHOLE ||
         l == MOE_MX_LAYOUT_NKI_1X32;
}
static inline int mx_is_of_e2m1(moe_mx_layout l) { return l == MOE_MX_LAYOUT_GPT_OSS || l == MOE_MX_LAYOUT_GGML; }

/* Whether scales of a layout may be placed so. */
static inline int mx_placeable(moe_mx_layout l, moe_mx_scales scales) {
  if (scales == MOE_MX_SCALES_NKI_OVERSIZED) return mx_is_nki(l);
  if (scales == MOE_MX_SCALES_NKI_PACKED) return mx_is_nki(l) && !mx_is_x4(l);
  return scales != MOE_MX_SCALES_TILED_128X4 || mx_is_rows(l);
}

/* Whether a weight may be stored so. */
static inline int mx_storable(moe_mx_layout l, moe_mx_scales scales, int bits, int64_t parts, int64_t K) {
  if (!mx_placeable(l, scales)) return 0;
  if (bits != 4 && mx_is_of_e2m1(l)) return 0;
  if (bits == 6 && l != MOE_MX_LAYOUT_PLAIN) return 0;
  if (mx_is_x4(l)) return K % (parts == 2 ? 512 : 4) == 0;
  return l == MOE_MX_LAYOUT_PLAIN || K % 32 == 0;
}

/* ----------------------------------------------------------------------------------------------------------- codes */

static inline void mx_codes_rows(mx_bytes *b, const mx_tensor *t, int interleaved) {
  for (int64_t e = 0; e < t->E; e++)
    for (int64_t row = 0; row < t->parts * t->columns; row++) {
      const int64_t part = interleaved ? row % t->parts : row / t->columns;
      const int64_t column = interleaved ? row / t->parts : row % t->columns;
      for (int64_t byte = 0; byte < (t->K * t->bits + 7) / 8; byte++) { /* its 8 bits, one by one */
        int value = 0;
        for (int64_t bit = 8 * byte; bit < 8 * byte + 8; bit++)
          value |= (mx_code(t, e, part, column, bit / t->bits) >> (bit % t->bits) & 1) << (bit - 8 * byte);
        mx_append_byte(b, value);
      }
    }
}

static inline void mx_codes_ggml(mx_bytes *b, const mx_tensor *t) {
  for (int64_t part = 0; part < t->parts; part++)
    for (int64_t e = 0; e < t->E; e++)
      for (int64_t column = 0; column < t->columns; column++)
        for (int64_t g = 0; g < t->K / 32; g++) {
          mx_append_byte(b, mx_scale(t, e, part, column, g));
          for (int j = 0; j < 16; j++)
            mx_append_byte(b,
                           mx_code(t, e, part, column, 32 * g + j) + 16 * mx_code(t, e, part, column, 32 * g + 16 + j));
        }
}

static inline void mx_codes_x4(mx_bytes *b, const mx_tensor *t) {
  const int64_t p_count = t->K >= 512 ? 128 : t->K / 4, tiles = (t->K + 511) / 512;
  for (int64_t e = 0; e < t->E; e++)
    for (int64_t p = 0; p < p_count; p++)
      for (int64_t part = 0; part < t->parts; part++)
        for (int64_t tile = 0; tile < tiles; tile++)
          for (int64_t column = 0; column < t->columns; column++)
            mx_append_word(b, t, e, part, column, 512 * tile + 4 * p);
}

static inline void mx_codes_kf(mx_bytes *b, const mx_tensor *t) {
  for (int64_t e = 0; e < t->E; e++)
    for (int64_t w = 0; w < t->K / 4; w++)
      for (int64_t f = 0; f < t->parts * t->columns; f++)
        mx_append_word(b, t, e, f / t->columns, f % t->columns, 4 * w);
}

static inline mx_bytes mx_codes(const mx_tensor *t, moe_mx_layout layout) {
  mx_bytes b = {NULL, 0, 0};
  switch (layout) {
    case MOE_MX_LAYOUT_PLAIN: mx_codes_rows(&b, t, 0); break;
    case MOE_MX_LAYOUT_GPT_OSS: mx_codes_rows(&b, t, 1); break;
    case MOE_MX_LAYOUT_GGML: mx_codes_ggml(&b, t); break;
    case MOE_MX_LAYOUT_NKI_STRIDED_X4:
    case MOE_MX_LAYOUT_NKI_CONTIGUOUS_X4: mx_codes_x4(&b, t); break;
    case MOE_MX_LAYOUT_NKI_WRAPX:
    case MOE_MX_LAYOUT_NKI_WRAPX_WHOLE:
    case MOE_MX_LAYOUT_NKI_1X32: mx_codes_kf(&b, t); break;
    case MOE_MX_LAYOUT_COUNT_: break;
  }
  return b;
}

/* ---------------------------------------------------------------------------------------------------------- scales */

/* Which dense scale row of 16 or more lies at this partition of an oversized tensor; -1 for none. */
static inline int64_t mx_oversized_row(int64_t partition) {
  return partition % 32 < 4 ? partition / 32 * 4 + partition % 32 : -1;
}

static inline void mx_scales_x4(mx_bytes *b, const mx_tensor *t, int oversized) {
  const int64_t p_count = t->K >= 512 ? 128 : t->K / 4, tiles = (t->K + 511) / 512;
  for (int64_t e = 0; e < t->E; e++)
    for (int64_t p = 0; p < (oversized ? p_count : (p_count + 7) / 8); p++)
      for (int64_t part = 0; part < t->parts; part++)
        for (int64_t tile = 0; tile < tiles; tile++)
          for (int64_t column = 0; column < t->columns; column++) {
            const int64_t s = oversized ? mx_oversized_row(p) : p;
            mx_append_byte(b, s >= 0 && s < 16 ? mx_scale(t, e, part, column, 16 * tile + s) : 0);
          }
}

/* Packed: 128 rows hold four tiles of 16 scales. */
static inline int64_t mx_packed_row(int64_t row) {
  const int64_t in_quadrant = row % 32, quadrant = row % 128 / 32;
  return in_quadrant < 16 ? (row / 128 * 4 + in_quadrant / 4) * 16 + quadrant * 4 + in_quadrant % 4 : -1;
}

static inline void mx_scales_kf(mx_bytes *b, const mx_tensor *t, moe_mx_scales scales) {
  int64_t rows = (t->K + 31) / 32;
  if (scales == MOE_MX_SCALES_NKI_OVERSIZED) rows = t->K / 4;
  if (scales == MOE_MX_SCALES_NKI_PACKED) rows = (t->K + 2047) / 2048 * 128;
  for (int64_t e = 0; e < t->E; e++)
    for (int64_t row = 0; row < rows; row++)
      for (int64_t f = 0; f < t->parts * t->columns; f++) {
        int64_t s = row;
        if (scales == MOE_MX_SCALES_NKI_OVERSIZED) s = mx_oversized_row(row);
        if (scales == MOE_MX_SCALES_NKI_PACKED) s = mx_packed_row(row);
        mx_append_byte(b, s >= 0 ? mx_scale(t, e, f / t->columns, f % t->columns, s) : 0);
      }
}

static inline void mx_scales_rows(mx_bytes *b, const mx_tensor *t, int interleaved, int tiled) {
  const int64_t rows = t->parts * t->columns, G = (t->K + 31) / 32, across = (G + 3) / 4;
  const int64_t count = tiled ? (rows + 127) / 128 * across * 512 : rows * G;
  for (int64_t e = 0; e < t->E; e++)
    for (int64_t i = 0; i < count; i++) {
      int64_t row = i / G, g = i % G;
      if (tiled) row = i / 512 / across * 128 + i % 16 / 4 * 32 + i % 512 / 16, g = i / 512 % across * 4 + i % 4;
      if (row >= rows) mx_append_byte(b, 0);
      else if (interleaved) mx_append_byte(b, mx_scale(t, e, row % t->parts, row / t->parts, g));
      else mx_append_byte(b, mx_scale(t, e, row / t->columns, row % t->columns, g));
    }
}

static inline mx_bytes mx_scales(const mx_tensor *t, moe_mx_layout layout, moe_mx_scales scales) {
  mx_bytes b = {NULL, 0, 0};
  switch (layout) {
    case MOE_MX_LAYOUT_PLAIN: mx_scales_rows(&b, t, 0, scales == MOE_MX_SCALES_TILED_128X4); break;
    case MOE_MX_LAYOUT_GPT_OSS: mx_scales_rows(&b, t, 1, scales == MOE_MX_SCALES_TILED_128X4); break;
    case MOE_MX_LAYOUT_GGML: break;
    case MOE_MX_LAYOUT_NKI_STRIDED_X4:
    case MOE_MX_LAYOUT_NKI_CONTIGUOUS_X4: mx_scales_x4(&b, t, scales == MOE_MX_SCALES_NKI_OVERSIZED); break;
    case MOE_MX_LAYOUT_NKI_WRAPX:
    case MOE_MX_LAYOUT_NKI_WRAPX_WHOLE:
    case MOE_MX_LAYOUT_NKI_1X32: mx_scales_kf(&b, t, scales); break;
    case MOE_MX_LAYOUT_COUNT_: break;
  }
  return b;
}

/* ----------------------------------------------------------------------------------------------------------- order */

static inline void mx_order_tile(int64_t *index, int64_t start, int64_t length) {
  for (int64_t q = 0; q < 4; q++)
    for (int64_t p = 0; p < length / 4; p++) index[start + 4 * p + q] = start + q * (length / 4) + p;
}

/* index[position] = element. */
static inline void mx_order(moe_mx_layout layout, int64_t parts, int64_t K, int64_t *index) {
  for (int64_t n = 0; n < K; n++) index[n] = n;
  if (layout == MOE_MX_LAYOUT_NKI_STRIDED_X4 && parts == 2) {
    for (int64_t q = 0; q < 4; q++)
      for (int64_t t = 0; t < K / 512; t++)
        for (int64_t p = 0; p < 128; p++) index[512 * t + 4 * p + q] = q * (K / 4) + t * 128 + p;
  } else if (layout == MOE_MX_LAYOUT_NKI_STRIDED_X4 || layout == MOE_MX_LAYOUT_NKI_WRAPX_WHOLE ||
             layout == MOE_MX_LAYOUT_NKI_WRAPX) {
    int64_t start = 0;
    for (; K - start >= 512; start += 512) mx_order_tile(index, start, 512);
    if (layout == MOE_MX_LAYOUT_NKI_WRAPX && K - start == 384) {
      mx_order_tile(index, start, 256);
      start += 256;
    }
    mx_order_tile(index, start, K - start);
  }
}

#endif /* MOE_TEST_MX_ORACLE_H */
