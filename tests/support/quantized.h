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
  moe_quantized_weight weight; /* filled in: element, scaling, layout, scales_layout, block, repeat */
  int64_t E, K, parts, columns;
  int by_columns; /* codes under float scales, and blocks of scales, are [E,columns,K]; one part */
  const struct element *format;
  mx_tensor table; /* of MX: codes by position, scales; else codes by element */
  float *scale;    /* of the others */
  struct guarded codes, scales;
  int64_t *position; /* of each element along K */
};

static inline int64_t quantized_ceil(int64_t a, int64_t b) { return a / b + (a % b != 0); }
static inline int64_t quantized_block(const struct quantized *q) { return q->weight.block ? q->weight.block : 256; }
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
    default:
      return q->E * quantized_ceil(q->K, quantized_block(q)) * q->parts *
             quantized_ceil(q->columns, quantized_block(q)) * quantized_repeat(q);
  }
}

static inline float quantized_scale(const struct quantized *q, int64_t e, int64_t k, int64_t part, int64_t column) {
  const int64_t block = quantized_block(q), down = quantized_ceil(q->K, block),
                across = quantized_ceil(q->columns, block);
  switch (q->weight.scaling) {
    case MOE_WEIGHT_STATIC: return q->scale[part];
    case MOE_WEIGHT_COLUMN: return q->scale[part * q->columns + column];
    case MOE_WEIGHT_STATIC_PER_EXPERT: return q->scale[e * q->parts + part];
    case MOE_WEIGHT_COLUMN_PER_EXPERT: return q->scale[(e * q->parts + part) * q->columns + column];
    default:
      if (q->by_columns) return q->scale[((e * across + column / block) * down + k / block) * quantized_repeat(q)];
      return q->scale[(((e * down + k / block) * q->parts + part) * across + column / block) * quantized_repeat(q)];
  }
}

static inline float quantized_code_value(const struct quantized *q, int64_t e, int64_t k, int64_t part,
                                         int64_t column) {
  const int64_t n = q->position[k];
  return float_of(element_decoded(q->format, mx_code(&q->table, e, part, column, n)));
}

/* code*scale in binary32; an E8M0 scale of 255 is NaN. */
static inline float quantized_value(const struct quantized *q, int64_t e, int64_t k, int64_t part, int64_t column) {
  const float code = quantized_code_value(q, e, k, part, column);
  if (q->weight.scaling != MOE_WEIGHT_MX) return code * quantized_scale(q, e, k, part, column);
  const int byte = mx_scale(&q->table, e, part, column, q->position[k] / 32);
  return byte == 255 ? float_of(0x7fc00000u) : (float)ldexp((double)code, byte - 127);
}

static inline void quantized_put(struct guarded *to, const void *from, size_t bytes, int side) {
  *to = guard_alloc(bytes, side ? GUARD_AFTER : GUARD_BEFORE);
  if (to->data == NULL) abort();
  if (bytes) memcpy(to->data, from, bytes);
}

static inline void quantized_store(struct quantized *q, int side) {
  if (q->weight.scaling == MOE_WEIGHT_MX) {
    mx_bytes codes = mx_codes(&q->table, q->weight.layout);
    mx_bytes scales = mx_scales(&q->table, q->weight.layout, q->weight.scales_layout);
    quantized_put(&q->codes, codes.data, codes.count, side);
    quantized_put(&q->scales, scales.data, scales.count, side);
    free(codes.data), free(scales.data);
  } else {
    const int64_t n = q->E * q->K * q->parts * q->columns;
    uint8_t *codes = malloc((size_t)n);
    if (codes == NULL) abort();
    for (int64_t i = 0; i < n; i++) {
      const int64_t column = i % q->columns, part = i / q->columns % q->parts, k = i / q->columns / q->parts % q->K;
      const int64_t e = i / q->columns / q->parts / q->K;
      codes[q->by_columns ? (e * q->columns + column) * q->K + k : i] = (uint8_t)mx_code(&q->table, e, part, column, k);
    }
    quantized_put(&q->codes, codes, (size_t)n, side);
    quantized_put(&q->scales, q->scale, (size_t)quantized_scale_count(q) * 4, side);
    free(codes);
  }
  q->weight.codes = q->codes.data;
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
  q->format = &elements[q->weight.element];
  q->table = (mx_tensor){q->E,
                         q->K,
                         q->parts,
                         q->columns,
                         q->format->bits,
                         malloc((size_t)n),
                         malloc((size_t)quantized_groups(q))};
  q->position = malloc((size_t)q->K * sizeof *q->position);
  q->scale = malloc((size_t)quantized_scale_count(q) * sizeof *q->scale);
  int64_t *order = malloc((size_t)q->K * sizeof *order);
  if (!q->table.code || !q->table.scale || !q->position || !q->scale || !order) abort();
  mx_order(q->weight.scaling == MOE_WEIGHT_MX ? q->weight.layout : MOE_MX_LAYOUT_PLAIN, q->parts, q->K, order);
  for (int64_t i = 0; i < q->K; i++) q->position[order[i]] = i;
  free(order);
}

/* Codes are numbers; E8M0 bytes lie in [low, high], float scales between 1/4 and 4, powers of two or any. */
static inline void quantized_make(struct quantized *q, uint64_t *rng, int low, int high, int powers, int side) {
  quantized_open(q);
  for (int64_t i = 0; i < quantized_count(q); i++) {
    const int magnitude = (int)test_random_range(rng, 0, q->format->last);
    const int negative = (int)(test_random(rng) >> 63), signless = magnitude == 0 && q->format->nan == 0x80;
    q->table.code[i] = (uint8_t)(magnitude | (negative && !signless) << (q->format->bits - 1));
  }
  for (int64_t i = 0; i < quantized_groups(q); i++) q->table.scale[i] = (uint8_t)test_random_range(rng, low, high);
  for (int64_t i = 0; q->weight.scaling != MOE_WEIGHT_MX && i < quantized_scale_count(q); i++) {
    const double any = (double)(test_random(rng) >> 11) * 0x1p-53;
    q->scale[i] = (float)ldexp(powers ? 1 : 1 + any, (int)test_random_range(rng, -2, 1));
  }
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

static inline void quantized_free(struct quantized *q) {
  free(q->table.code), free(q->table.scale), free(q->scale), free(q->position);
  guard_free(&q->codes), guard_free(&q->scales);
}

#endif /* MOE_TEST_QUANTIZED_H */
