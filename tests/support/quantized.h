/* quantized.h: a random quantised weight in any storage, made by the definitions of mx_oracle.h and element_oracle.h,
   and the values it stands for. Storage lies against guard pages. */
#ifndef MOE_TEST_QUANTIZED_H
#define MOE_TEST_QUANTIZED_H

#include "dtype.h"
#include "element_oracle.h"
#include "guard.h"
#include "mx_oracle.h"
#include "random.h"

struct quantized {
  moe_quantized_weight weight; /* filled in: what is no pointer; `global_scale` and `zero_points` ask for some */
  int64_t E, K, parts, columns;
  int by_columns; /* the codes' order under float scales, and that of blocks of scales, is as with out_in */
  const struct element *format;
  mx_tensor table; /* of MX: codes by position, scales; else codes by element */
  float *scale;    /* of the others */
  uint8_t *raw;    /* and as they are stored */
  float *global;   /* of each expert's parts */
  uint8_t *zero;   /* zero points */
  struct guarded codes, scales;
  int64_t *position; /* of each element along K */
};

static inline int64_t quantized_ceil(int64_t a, int64_t b) { return a / b + (a % b != 0); }
static inline int64_t quantized_block(const struct quantized *q) { return q->weight.block ? q->weight.block : 256; }
static inline int quantized_group(const struct quantized *q) { return q->weight.scaling == MOE_WEIGHT_GROUP; }
static inline int64_t quantized_block_columns(const struct quantized *q) {
  if (quantized_group(q)) return 1;
  return q->weight.block_columns ? q->weight.block_columns : quantized_block(q);
}
static inline int64_t quantized_first_column(const struct quantized *q) {
  return quantized_group(q) ? 0 : q->weight.first_column;
}
static inline int64_t quantized_down(const struct quantized *q) {
  return quantized_ceil(q->weight.first_k + q->K, quantized_block(q));
}
static inline int64_t quantized_across(const struct quantized *q) {
  return quantized_ceil(quantized_first_column(q) + q->columns, quantized_block_columns(q));
}
static inline int64_t quantized_repeat(const struct quantized *q) {
  return q->weight.scaling == MOE_WEIGHT_BLOCK && q->weight.repeat ? q->weight.repeat : 1;
}

static inline int64_t quantized_scale_count(const struct quantized *q) {
  switch (q->weight.scaling) {
    case MOE_WEIGHT_MX: return 1; /* unused; `block` and `repeat` may be anything */
    case MOE_WEIGHT_STATIC: return q->parts;
    case MOE_WEIGHT_COLUMN: return q->parts * q->columns;
    case MOE_WEIGHT_STATIC_PER_EXPERT: return q->E * q->parts;
    case MOE_WEIGHT_COLUMN_PER_EXPERT: return q->E * q->parts * q->columns;
    default: return q->E * quantized_down(q) * q->parts * quantized_across(q) * quantized_repeat(q);
  }
}

/* Which scale, and zero point, of blocks and groups. */
static inline int64_t quantized_scale_at(const struct quantized *q, int64_t e, int64_t k, int64_t part,
                                         int64_t column) {
  const int64_t down = quantized_down(q), across = quantized_across(q);
  const int64_t row = (q->weight.first_k + k) / quantized_block(q);
  const int64_t stripe = (quantized_first_column(q) + column) / quantized_block_columns(q);
  if (quantized_group(q)) return ((e * q->parts + part) * q->columns + column) * down + row;
  if (q->by_columns || q->weight.out_in)
    return (((e * q->parts + part) * across + stripe) * down + row) * quantized_repeat(q);
  return (((e * down + row) * q->parts + part) * across + stripe) * quantized_repeat(q);
}

static inline float quantized_scale(const struct quantized *q, int64_t e, int64_t k, int64_t part, int64_t column) {
  switch (q->weight.scaling) {
    case MOE_WEIGHT_STATIC: return q->scale[part];
    case MOE_WEIGHT_COLUMN: return q->scale[part * q->columns + column];
    case MOE_WEIGHT_STATIC_PER_EXPERT: return q->scale[e * q->parts + part];
    case MOE_WEIGHT_COLUMN_PER_EXPERT: return q->scale[(e * q->parts + part) * q->columns + column];
    default: {
      const float scale = q->scale[quantized_scale_at(q, e, k, part, column)];
      return q->weight.global_scale ? scale * q->global[e * q->parts + part] : scale;
    }
  }
}

static inline float quantized_code_value(const struct quantized *q, int64_t e, int64_t k, int64_t part,
                                         int64_t column) {
  const int64_t n = q->position[k];
  const int code = mx_code(&q->table, e, part, column, n);
  if (q->weight.zero_points)
    return (float)integer_value(q->format, code, q->zero[quantized_scale_at(q, e, k, part, column)]);
  return float_of(element_decoded(q->format, code));
}

/* code*scale in binary32; an E8M0 scale of 255 is NaN. */
static inline float quantized_value(const struct quantized *q, int64_t e, int64_t k, int64_t part, int64_t column) {
  const float code = quantized_code_value(q, e, k, part, column);
  if (q->weight.scaling != MOE_WEIGHT_MX) return code * quantized_scale(q, e, k, part, column);
  const int byte = mx_scale(&q->table, e, part, column, q->position[k] / 32);
  return byte == 255 ? float_of(0x7fc00000u) : (float)ldexp((double)code, byte - 127);
}

static inline size_t quantized_scale_size(const struct quantized *q) {
  static const size_t size[] = {4, 2, 2, 1, 1};
  return q->weight.scaling == MOE_WEIGHT_BLOCK || quantized_group(q) ? size[q->weight.scales_type] : 4;
}

/* The scale that is stored as some bits, by definition. */
static inline float quantized_scale_decoded(moe_scales_type type, uint32_t bits) {
  const int exponent = (int)(bits >> 10 & 31), fraction = (int)(bits & 1023);
  if (type == MOE_SCALES_F32) return float_of(bits);
  if (type == MOE_SCALES_BF16) return float_of(bits << 16);
  if (type == MOE_SCALES_E4M3FN) return float_of(element_decoded(&elements[MOE_ELEMENT_E4M3FN], (int)bits));
  if (type == MOE_SCALES_E8M0) return bits == 255 ? float_of(0x7fc00000u) : (float)ldexp(1, (int)bits - 127);
  if (exponent == 31) return float_of(fraction ? 0x7fc00000u : 0x7f800000u);
  return (float)ldexp(exponent ? 1024 + fraction : fraction, (exponent ? exponent : 1) - 25) * (bits >> 15 ? -1 : 1);
}

static inline void quantized_set_scale(struct quantized *q, int64_t i, uint32_t bits) {
  const size_t size = quantized_scale_size(q);
  const uint16_t half = (uint16_t)bits;
  const uint8_t byte = (uint8_t)bits;
  memcpy(q->raw + (size_t)i * size, size == 4 ? (const void *)&bits : size == 2 ? (const void *)&half : &byte, size);
  q->scale[i] = quantized_scale_decoded(size == 4 ? MOE_SCALES_F32 : q->weight.scales_type, bits);
}

/* About 1/4 to 4; powers of two, or any. */
static inline void quantized_random_scale(struct quantized *q, int64_t i, uint64_t *rng, int powers) {
  const uint32_t exponent = (uint32_t)test_random_range(rng, -2, 1), any = (uint32_t)(test_random(rng) >> 40);
  switch (quantized_scale_size(q) == 4 ? MOE_SCALES_F32 : q->weight.scales_type) {
    case MOE_SCALES_BF16: quantized_set_scale(q, i, (127 + exponent) << 7 | (powers ? 0 : any & 127)); break;
    case MOE_SCALES_FP16: quantized_set_scale(q, i, (15 + exponent) << 10 | (powers ? 0 : any & 1023)); break;
    case MOE_SCALES_E4M3FN: quantized_set_scale(q, i, (7 + exponent) << 3 | (powers ? 0 : any & 7)); break;
    case MOE_SCALES_E8M0: quantized_set_scale(q, i, 127 + exponent); break;
    default: quantized_set_scale(q, i, (127 + exponent) << 23 | (powers ? 0 : any & 0x7fffff)); break;
  }
}

static inline void quantized_put(struct guarded *to, const void *from, size_t bytes, int side) {
  *to = guard_alloc(bytes, side ? GUARD_AFTER : GUARD_BEFORE);
  if (to->data == NULL) abort();
  if (bytes) memcpy(to->data, from, bytes);
}

static inline void quantized_store(struct quantized *q, int side) {
  if (q->weight.scaling == MOE_WEIGHT_MX || quantized_group(q)) {
    const int group = quantized_group(q);
    mx_bytes codes = mx_codes(&q->table, group ? MOE_MX_LAYOUT_PLAIN : q->weight.layout), scales = {0};
    if (!group) scales = mx_scales(&q->table, q->weight.layout, q->weight.scales_layout);
    quantized_put(&q->codes, codes.data, codes.count, side);
    if (group) quantized_put(&q->scales, q->raw, (size_t)quantized_scale_count(q) * quantized_scale_size(q), side);
    else quantized_put(&q->scales, scales.data, scales.count, side);
    free(codes.data), free(scales.data);
  } else {
    const int64_t n = q->E * q->K * q->parts * q->columns;
    uint8_t *codes = malloc((size_t)n);
    if (codes == NULL) abort();
    for (int64_t i = 0; i < n; i++) {
      const int64_t column = i % q->columns, part = i / q->columns % q->parts, k = i / q->columns / q->parts % q->K;
      const int64_t e = i / q->columns / q->parts / q->K;
      const int64_t at = ((e * q->parts + part) * q->columns + column) * q->K + k;
      codes[q->by_columns || q->weight.out_in ? at : i] = (uint8_t)mx_code(&q->table, e, part, column, k);
    }
    quantized_put(&q->codes, codes, (size_t)n, side);
    quantized_put(&q->scales, q->raw, (size_t)quantized_scale_count(q) * quantized_scale_size(q), side);
    free(codes);
  }
  q->weight.codes = q->codes.data;
  if (q->weight.global_scale) q->weight.global_scale = q->global;
  if (q->weight.zero_points) q->weight.zero_points = q->zero;
  q->weight.scales =
      q->weight.scaling == MOE_WEIGHT_MX && q->weight.layout == MOE_MX_LAYOUT_GGML ? NULL : q->scales.data;
}

static inline int64_t quantized_count(const struct quantized *q) { return q->E * q->K * q->parts * q->columns; }
static inline int64_t quantized_groups(const struct quantized *q) {
  return q->E * q->parts * q->columns * quantized_ceil(q->K, 32);
}

/* Memory for codes and scales, and where each element lies. */
static inline void quantized_open(struct quantized *q) {
  const int64_t n = quantized_count(q);
  q->format = element_of(q->weight.element);
  q->table = (mx_tensor){
      q->E, q->K, q->parts, q->columns, q->format->bits, malloc((size_t)n), malloc((size_t)quantized_groups(q))};
  q->position = malloc((size_t)q->K * sizeof *q->position);
  q->scale = malloc((size_t)quantized_scale_count(q) * sizeof *q->scale);
  q->raw = calloc((size_t)quantized_scale_count(q), quantized_scale_size(q));
  q->global = malloc((size_t)(q->E * q->parts) * sizeof *q->global);
  q->zero = malloc((size_t)quantized_scale_count(q));
  int64_t *order = malloc((size_t)q->K * sizeof *order);
  if (!q->table.code || !q->table.scale || !q->position || !q->scale || !order || !q->raw || !q->global || !q->zero)
    abort();
  mx_order(q->weight.scaling == MOE_WEIGHT_MX ? q->weight.layout : MOE_MX_LAYOUT_PLAIN, q->parts, q->K, order);
  for (int64_t i = 0; i < q->K; i++) q->position[order[i]] = i;
  free(order);
}

/* Global scales and zero points, where they are asked for. */
static inline void quantized_random_extras(struct quantized *q, uint64_t *rng, int powers) {
  for (int64_t i = 0; i < q->E * q->parts && q->weight.global_scale; i++)
    q->global[i] = (float)ldexp(powers ? 1 : 1 + (double)(test_random(rng) >> 11) * 0x1p-53, (int)(i % 3) - 1);
  for (int64_t i = 0; i < quantized_scale_count(q) && q->weight.zero_points; i++)
    q->zero[i] = (uint8_t)test_random_range(rng, 0, 15);
}

/* Codes are numbers; E8M0 bytes lie in [low, high], float scales between 1/4 and 4, powers of two or any. */
static inline void quantized_make(struct quantized *q, uint64_t *rng, int low, int high, int powers, int side) {
  quantized_open(q);
  for (int64_t i = 0; i < quantized_count(q); i++) {
    const int magnitude = (int)test_random_range(rng, 0, q->format->last);
    const int negative = (int)(test_random(rng) >> 63), signless = magnitude == 0 && q->format->nan == 0x80;
    q->table.code[i] = (uint8_t)(magnitude | (negative && !signless) << (q->format->bits - 1));
    if ((int)q->format->id >= ELEMENTS)
      q->table.code[i] = (uint8_t)(test_random(rng) >> 40 & ((1u << q->format->bits) - 1u));
  }
  for (int64_t i = 0; i < quantized_groups(q); i++) q->table.scale[i] = (uint8_t)test_random_range(rng, low, high);
  for (int64_t i = 0; q->weight.scaling != MOE_WEIGHT_MX && i < quantized_scale_count(q); i++)
    quantized_random_scale(q, i, rng, powers);
  quantized_random_extras(q, rng, powers);
  quantized_store(q, side);
}

/* What it stands for as a plain tensor [E,K,parts,columns] of a type; with codes_only without scales. 0: no memory. */
static inline int quantized_plain(const struct quantized *q, moe_dtype dtype, void *to, int codes_only) {
  const int64_t n = quantized_count(q);
  float *x = malloc((size_t)n * sizeof *x);
  if (x == NULL) return 0;
  for (int64_t i = 0; i < n; i++) {
    const int64_t column = i % q->columns, part = i / q->columns % q->parts, k = i / q->columns / q->parts % q->K;
    const int64_t e = i / q->columns / q->parts / q->K;
    x[i] = codes_only ? quantized_code_value(q, e, k, part, column) : quantized_value(q, e, k, part, column);
  }
  if (test_from_f32(dtype, to, x, n) != MOE_OK) abort();
  free(x);
  return 1;
}

/* Whether a weight may be stored so, as far as its element goes, and its layout. */
static inline int quantized_storable(const moe_quantized_weight *w, int64_t parts, int64_t K) {
  const int id = (int)w->element, bits = element_of(w->element)->bits;
  if (w->scaling == MOE_WEIGHT_GROUP) return id != MOE_ELEMENT_MXINT8;
  if (w->scaling != MOE_WEIGHT_MX) return id < ELEMENTS && bits == 8;
  if (id >= ELEMENTS && (id != MOE_ELEMENT_MXINT8 || w->layout != MOE_MX_LAYOUT_PLAIN)) return 0;
  return mx_storable(w->layout, w->scales_layout, bits, parts, K);
}

static inline void quantized_free(struct quantized *q) {
  free(q->table.code), free(q->table.scale), free(q->scale), free(q->position);
  free(q->raw), free(q->global), free(q->zero);
  guard_free(&q->codes), guard_free(&q->scales);
}

#endif /* MOE_TEST_QUANTIZED_H */
