/* mx_check.h: one conversion against the oracle, in buffers of exactly the right size. */
#ifndef MOE_TEST_MX_CHECK_H
#define MOE_TEST_MX_CHECK_H

#include "mx_oracle.h"
#include "random.h"

/* Whether two NKI layouts group the same elements, by their definitions. */
static inline int mx_same_groups(const moe_mx_layout_args *a) {
  int64_t *x = (int64_t *)malloc((size_t)a->K * 2 * sizeof *x), *y = x + a->K;
  if (x == NULL) abort();
  mx_order(a->from, a->parts, a->K, x), mx_order(a->to, a->parts, a->K, y);
  const int same = memcmp(x, y, (size_t)a->K * sizeof *x) == 0;
  free(x);
  return same;
}

/* Whether there is such a conversion, if every field is a value of its type and K is not too long to look at. */
static inline int mx_convertible(const moe_mx_layout_args *a) {
  const int plain =
      a->from == MOE_MX_LAYOUT_PLAIN ? mx_is_nki(a->to) : a->to == MOE_MX_LAYOUT_PLAIN && mx_is_nki(a->from);
  if (!mx_storable(a->from, a->scales_from, a->element_bits, a->parts, a->K)) return 0;
  if (!mx_storable(a->to, a->scales_to, a->element_bits, a->parts, a->K)) return 0;
  if (a->logical_order && !plain) return 0;
  return !mx_is_nki(a->from) || !mx_is_nki(a->to) || mx_same_groups(a);
}

static inline mx_tensor mx_tensor_new(const moe_mx_layout_args *a) {
  mx_tensor t = {a->E, a->K, a->parts, a->columns, a->element_bits, NULL, NULL};
  const int64_t rows = a->E * a->parts * a->columns;
  t.code = (uint8_t *)malloc((size_t)(rows * a->K));
  t.scale = (uint8_t *)malloc((size_t)(rows * ((a->K + 31) / 32)));
  if (t.code == NULL || t.scale == NULL) abort();
  return t;
}

static inline void mx_tensor_free(mx_tensor *t) { free(t->code), free(t->scale); }

static inline void mx_tensor_fill(mx_tensor *t, uint64_t *rng, int random) {
  const int64_t rows = t->E * t->parts * t->columns;
  for (int64_t i = 0; i < rows * t->K; i++)
    t->code[i] = (uint8_t)((random ? test_random(rng) : 255) & ((1u << t->bits) - 1u));
  for (int64_t i = 0; i < rows * ((t->K + 31) / 32); i++) t->scale[i] = (uint8_t)(random ? test_random(rng) : 255);
}

/* The same weight with its codes in logical order. */
static inline mx_tensor mx_tensor_logical(const moe_mx_layout_args *a, const mx_tensor *t) {
  const moe_mx_layout nki = a->from == MOE_MX_LAYOUT_PLAIN ? a->to : a->from;
  mx_tensor logical = mx_tensor_new(a);
  int64_t *index = (int64_t *)malloc((size_t)a->K * sizeof *index);
  if (index == NULL) abort();
  mx_order(nki, a->parts, a->K, index);
  for (int64_t i = 0; i < a->E * a->parts * a->columns * a->K; i++)
    logical.code[i / a->K * a->K + (a->logical_order ? index[i % a->K] : i % a->K)] = t->code[i];
  memcpy(logical.scale, t->scale, (size_t)(a->E * a->parts * a->columns * ((a->K + 31) / 32)));
  free(index);
  return logical;
}

/* Puts random bits where a tensor of ones has none. */
static inline void mx_spoil(mx_bytes *b, const mx_bytes *ones, uint64_t *rng) {
  for (size_t i = 0; i < b->count; i++) b->data[i] |= (uint8_t)(test_random(rng) & (uint8_t)~ones->data[i]);
}

/* An exact-sized buffer of one value; NULL for no bytes. */
static inline uint8_t *mx_buffer(size_t bytes, int value) {
  uint8_t *buffer = bytes ? (uint8_t *)malloc(bytes) : NULL;
  if (bytes && buffer == NULL) abort();
  if (bytes) memset(buffer, value, bytes);
  return buffer;
}

static inline uint8_t *mx_buffer_of(const mx_bytes *b) {
  uint8_t *buffer = mx_buffer(b->count, 0);
  if (b->count) memcpy(buffer, b->data, b->count);
  return buffer;
}

static inline int mx_differ(const uint8_t *got, const mx_bytes *want) {
  return want->count && memcmp(got, want->data, want->count) != 0;
}

/* Converts random tensors of the shape in `shape` (whose pointers do not matter): NULL, or what was wrong. */
static inline const char *mx_check(moe_context *ctx, const moe_mx_layout_args *shape, uint64_t seed) {
  moe_mx_layout_args a = *shape;
  const char *wrong = NULL;
  mx_tensor t = mx_tensor_new(&a), ones = mx_tensor_new(&a);
  mx_tensor_fill(&t, &seed, 1), mx_tensor_fill(&ones, &seed, 0);
  mx_tensor logical = mx_tensor_logical(&a, &t);
  mx_bytes codes_in = mx_codes(a.from == MOE_MX_LAYOUT_PLAIN ? &logical : &t, a.from),
           scales_in = mx_scales(&t, a.from, a.scales_from);
  mx_bytes codes_ones = mx_codes(&ones, a.from), scales_ones = mx_scales(&ones, a.from, a.scales_from);
  const mx_bytes codes_want = mx_codes(a.to == MOE_MX_LAYOUT_PLAIN ? &logical : &t, a.to),
                 scales_want = mx_scales(&t, a.to, a.scales_to);
  mx_spoil(&codes_in, &codes_ones, &seed), mx_spoil(&scales_in, &scales_ones, &seed);
  uint8_t *in = mx_buffer_of(&codes_in), *in_scales = mx_buffer_of(&scales_in);
  if (moe_mx_layout_size(ctx, &a, &a.bytes) != MOE_OK) wrong = "moe_mx_layout_size failed";
  else if (a.bytes.codes_in != codes_in.count || a.bytes.scales_in != scales_in.count) wrong = "sizes of the input";
  else if (a.bytes.codes_out != codes_want.count || a.bytes.scales_out != scales_want.count)
    wrong = "sizes of the output";
  for (int fill = 0x5a; fill <= 0xa5 && !wrong; fill += 0xa5 - 0x5a) {
    uint8_t *out = mx_buffer(codes_want.count, fill), *out_scales = mx_buffer(scales_want.count, fill);
    a.codes_in = in, a.scales_in = in_scales, a.codes_out = out, a.scales_out = out_scales;
    if (moe_mx_layout_convert(ctx, &a) != MOE_OK) wrong = "moe_mx_layout_convert failed";
    else if (mx_differ(out, &codes_want)) wrong = "codes";
    else if (mx_differ(out_scales, &scales_want)) wrong = "scales";
    else if (mx_differ(in, &codes_in) || mx_differ(in_scales, &scales_in)) wrong = "the input was written to";
    free(out), free(out_scales);
  }
  free(codes_in.data), free(scales_in.data), free(codes_ones.data), free(scales_ones.data);
  free(codes_want.data), free(scales_want.data), free(in), free(in_scales);
  mx_tensor_free(&t), mx_tensor_free(&ones), mx_tensor_free(&logical);
  return wrong;
}

#endif /* MOE_TEST_MX_CHECK_H */
