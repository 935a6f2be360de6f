/* stored.h: random activations stored as codes and scales, and the values they stand for, by the definitions of
   element_oracle.h. Storage lies against guard pages. */
#ifndef MOE_TEST_STORED_H
#define MOE_TEST_STORED_H

#include "dtype.h"
#include "guard.h"
#include "mx_quantize_oracle.h"
#include "random.h"

/* A [rows,columns] tensor. */
struct stored {
  moe_quantized_activation a; /* filled in: element, float_scales, block_rows, block_columns */
  int64_t rows, columns;
  struct guarded codes, scales;
};

/* Rows and columns that share a scale. */
static inline int64_t stored_deep(const struct stored *s) {
  return !s->a.float_scales ? 1 : s->a.block_rows ? s->a.block_rows : s->rows;
}
static inline int64_t stored_wide(const struct stored *s) {
  return !s->a.float_scales ? 32 : s->a.block_columns ? s->a.block_columns : s->columns;
}
static inline int64_t stored_scale_at(const struct stored *s, int64_t row, int64_t column) {
  return row / stored_deep(s) * ((s->columns - 1) / stored_wide(s) + 1) + column / stored_wide(s);
}
static inline int64_t stored_line(const struct stored *s) { return (s->columns * elements[s->a.element].bits + 7) / 8; }

static inline struct guarded stored_room(int64_t bytes, int side) {
  const struct guarded g = guard_alloc((size_t)bytes, side ? GUARD_AFTER : GUARD_BEFORE);
  if (g.data == NULL) abort();
  return g;
}

/* Numbers and, seldom, any code; scales near 1. */
static inline void stored_make(struct stored *s, uint64_t *rng) {
  const struct element *f = &elements[s->a.element];
  const int64_t line = stored_line(s), scales = stored_scale_at(s, s->rows - 1, s->columns - 1) + 1;
  const int side = (int)test_random_range(rng, 0, 1);
  s->codes = stored_room(s->rows * line, side), s->scales = stored_room(scales * (s->a.float_scales ? 4 : 1), side);
  s->a.codes = s->codes.data, s->a.scales = s->scales.data;
  memset(s->codes.data, 0, (size_t)(s->rows * line));
  for (int64_t i = 0; i < s->rows * s->columns; i++) {
    const int sign = (int)test_random_range(rng, 0, 1) << (f->bits - 1);
    int code = sign | (int)test_random_range(rng, 0, f->last);
    if (test_random_chance(rng, 2000)) code = (int)test_random_range(rng, 0, (1 << f->bits) - 1);
    element_put(f, (uint8_t *)s->codes.data + i / s->columns * line, i % s->columns, code);
  }
  for (int64_t i = 0; i < scales; i++) {
    const double any = (double)(test_random(rng) >> 11) * 0x1p-53;
    const float scale = (float)ldexp(1 + any, (int)test_random_range(rng, -6, 0));
    if (s->a.float_scales)
      memcpy(s->scales.data + 4 * i, &scale, 4);
    else
      s->scales.data[i] = test_random_chance(rng, 500) ? 255 : (unsigned char)test_random_range(rng, 118, 127);
  }
}

static inline void stored_free(struct stored *s) { guard_free(&s->codes), guard_free(&s->scales); }

static inline float stored_value(const struct stored *s, int64_t row, int64_t column) {
  const struct element *f = &elements[s->a.element];
  const uint8_t *line = s->a.codes + row * stored_line(s);
  const int code = element_get(f, line, column);
  const int64_t at = stored_scale_at(s, row, column);
  float scale;
  if (!s->a.float_scales) return float_of(mx_dequantized(f, s->scales.data[at], code));
  memcpy(&scale, s->scales.data + 4 * at, 4);
  return float_of(element_decoded(f, code)) * scale;
}

/* All of them as a plain tensor of a type. */
static inline void stored_plain(const struct stored *s, moe_dtype dtype, void *to) {
  const int64_t n = s->rows * s->columns;
  float *x = malloc((size_t)n * sizeof *x);
  if (x == NULL) abort();
  for (int64_t i = 0; i < n; i++) x[i] = stored_value(s, i / s->columns, i % s->columns);
  if (test_from_f32(dtype, to, x, n) != MOE_OK) abort();
  free(x);
}

#endif /* MOE_TEST_STORED_H */
