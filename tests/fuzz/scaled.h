/* scaled.h: whole tensors to and from scaled elements, and back. */
#ifndef MOE_FUZZ_SCALED_H
#define MOE_FUZZ_SCALED_H

#include "numbers.h"

static moe_status fuzz_quantize_scaled(moe_context *ctx, const void *args) {
  return moe_quantize_scaled(ctx, (const moe_quantize_scaled_args *)args);
}
static moe_status fuzz_dequantize_scaled(moe_context *ctx, const void *args) {
  return moe_dequantize_scaled(ctx, (const moe_dequantize_scaled_args *)args);
}

typedef struct fuzz_scaled_pair {
  moe_quantize_scaled_args to;
  moe_dequantize_scaled_args from;
  int64_t down, across, block_rows, block_columns, size; /* blocks; their sizes */
} fuzz_scaled_pair;

static fuzz_scaled_pair fuzz_scaled_pair_of(fuzz_input *in) {
  fuzz_scaled_pair p;
  memset(&p, 0, sizeof p);
  p.from.element = fuzz_element(in), p.from.dtype = (moe_dtype)fuzz_enum(in, 1 + TEST_DTYPES);
  p.from.rows = fuzz_length(in, 0, 100, 13), p.from.columns = fuzz_length(in, 0, 100, 13);
  p.from.block_rows = fuzz_pick(in, 3) ? fuzz_length(in, 0, 9, 16) : 0;
  p.from.block_columns = fuzz_pick(in, 3) ? fuzz_length(in, 0, 9, 16) : 0;
  p.to.element = p.from.element, p.to.dtype = p.from.dtype, p.to.rows = p.from.rows, p.to.columns = p.from.columns;
  p.to.block_rows = p.from.block_rows, p.to.block_columns = p.from.block_columns;
  p.down = p.across = 1, p.size = 4;
  if (in->legal && elements[p.from.element].bits != 8) in->legal = 0;
  if (!in->legal) return p;
  p.block_rows = p.from.block_rows ? p.from.block_rows : p.from.rows + !p.from.rows;
  p.block_columns = p.from.block_columns ? p.from.block_columns : p.from.columns + !p.from.columns;
  p.down = fuzz_ceil(p.from.rows, p.block_rows), p.across = fuzz_ceil(p.from.columns, p.block_columns);
  p.size = (int64_t)moe_dtype_size(fuzz_or_f32(p.from.dtype));
  return p;
}

static void fuzz_scaled_tensors(fuzz_call *c, fuzz_scaled_pair *p, int decode) {
  const int64_t plain = fuzz_times(p->from.rows, p->from.columns);
  fuzz_tensor_of(c, decode ? (void *)&p->from.plain : (void *)&p->to.plain, decode, plain, p->size);
  fuzz_tensor_of(c, decode ? (void *)&p->from.codes : (void *)&p->to.codes, !decode, plain, 1);
  fuzz_tensor_of(c, decode ? (void *)&p->from.scales : (void *)&p->to.scales, !decode && !p->to.scales_given,
                 fuzz_times(p->down, p->across), 4);
}

/* Scales as a caller may give them: finite, above 0. Powers of two between 2^-40 and 2^39 or any. */
static void fuzz_scales(fuzz_call *c, const fuzz_tensor *t, int powers) {
  for (int64_t i = 0; i < t->bytes / 4; i++) {
    const uint64_t r = test_random(&c->rng);
    const uint32_t any = (uint32_t)r & 0x7fffffu, exponent = 87 + (uint32_t)(r >> 32) % 80;
    const uint32_t bits = powers ? exponent << 23 : (1 + (uint32_t)(r >> 32) % 254) << 23 | any;
    memcpy(t->data + 4 * i, &bits, 4);
  }
}

/* Seldom a scale that may not be given. */
static void fuzz_spoil_scales(fuzz_call *c, const fuzz_tensor *t) {
  static const uint32_t bad[] = {0, 0x80000000u, 0x7f800000u, 0x7fc00000u, 0xbf800000u};
  if (!c->in->legal || t->bytes == 0 || fuzz_pick(c->in, 8) != 0) return;
  memcpy(t->data + 4 * ((int64_t)fuzz_take(c->in, 2) % (t->bytes / 4)), &bad[fuzz_pick(c->in, 5)], 4);
  c->in->legal = 0;
}

static void fuzz_scaled(fuzz_input *in, moe_context *ctx) {
  fuzz_call c = fuzz_call_of(in, ctx);
  const int decode = fuzz_pick(in, 2);
  fuzz_scaled_pair p = fuzz_scaled_pair_of(in);
  if (!decode) p.to.cast = fuzz_cast(in), p.to.scales_given = fuzz_enum(in, 2);
  if (!decode) p.to.power_of_two_scales = fuzz_enum(in, 2);
  fuzz_scaled_tensors(&c, &p, decode);
  if (!fuzz_open(&c)) return;
  if (!decode) fuzz_floats(&c, p.to.dtype, &c.tensor[0]);
  if (p.to.scales_given) fuzz_scales(&c, &c.tensor[2], 0), fuzz_spoil_scales(&c, &c.tensor[2]);
  fuzz_spoil(&c);
  (void)fuzz_run(&c, decode ? "moe_dequantize_scaled" : "moe_quantize_scaled",
                 decode ? fuzz_dequantize_scaled : fuzz_quantize_scaled,
                 decode ? (const void *)&p.from : (const void *)&p.to);
  fuzz_close(&c);
}

/* Under powers of two numbers quantise to themselves: by given scales, and where a block holds the largest number by
   those found. */
static void fuzz_scaled_back(fuzz_input *in, moe_context *ctx) {
  fuzz_call c = fuzz_call_of(in, ctx), back = c;
  fuzz_scaled_pair p = fuzz_scaled_pair_of(in);
  p.to.scales_given = fuzz_pick(in, 2), p.to.cast = fuzz_cast(in);
  p.to.cast &= ~(uint32_t)MOE_CAST_HALF_TO_ZERO; /* -0 is to stay */
  fuzz_scaled_tensors(&c, &p, 1), fuzz_scaled_tensors(&back, &p, 0);
  if (!in->legal || p.from.rows == 0 || p.from.columns == 0 || test_dtype_narrow(p.from.dtype) || !fuzz_open(&c)) return;
  const struct element *f = &elements[p.from.element];
  fuzz_numbers(&c, f, c.tensor[1].data, c.tensor[1].bytes, c.tensor[1].bytes);
  for (int64_t b = 0; b < p.down * p.across; b++)
    c.tensor[1].data[b / p.across * p.block_rows * p.from.columns + b % p.across * p.block_columns] = (uint8_t)f->last;
  fuzz_scales(&c, &c.tensor[2], 1);
  if (fuzz_run(&c, "moe_dequantize_scaled", fuzz_dequantize_scaled, &p.from) && fuzz_open(&back)) {
    memcpy(back.tensor[0].data, c.tensor[0].data, (size_t)c.tensor[0].bytes);
    if (p.to.scales_given) memcpy(back.tensor[2].data, c.tensor[2].data, (size_t)c.tensor[2].bytes);
    (void)fuzz_run(&back, "moe_quantize_scaled", fuzz_quantize_scaled, &p.to);
    for (int i = 1; i < 3; i++)
      if (memcmp(back.tensor[i].data, c.tensor[i].data, (size_t)c.tensor[i].bytes) != 0)
        fuzz_fail("blocks came back changed", ctx);
    fuzz_close(&back);
  }
  fuzz_close(&c);
}

#endif /* MOE_FUZZ_SCALED_H */
