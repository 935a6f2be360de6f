/* quantize.h: whole tensors to and from MX and scaled elements: against the oracles, and back. */
#ifndef MOE_FUZZ_QUANTIZE_H
#define MOE_FUZZ_QUANTIZE_H

#include "call.h"
#include "support/mx_quantize_oracle.h"

enum { FUZZ_ORACLE_MOST = 4096 };

static moe_status fuzz_quantize_mx(moe_context *ctx, const void *args) {
  return moe_quantize_mx(ctx, (const moe_quantize_mx_args *)args);
}
static moe_status fuzz_dequantize_mx(moe_context *ctx, const void *args) {
  return moe_dequantize_mx(ctx, (const moe_dequantize_mx_args *)args);
}
static moe_status fuzz_quantize_scaled(moe_context *ctx, const void *args) {
  return moe_quantize_scaled(ctx, (const moe_quantize_scaled_args *)args);
}
static moe_status fuzz_dequantize_scaled(moe_context *ctx, const void *args) {
  return moe_dequantize_scaled(ctx, (const moe_dequantize_scaled_args *)args);
}

static moe_dtype fuzz_or_f32(moe_dtype dtype) { return dtype == MOE_DTYPE_DEFAULT ? MOE_DTYPE_F32 : dtype; }

static float *fuzz_as_floats(moe_dtype dtype, const void *data, int64_t n) {
  float *x = (float *)fuzz_memory(n * 4);
  if (dtype == MOE_DTYPE_BF16)
    (void)moe_bf16_to_f32(NULL, x, (const moe_bf16 *)data, n);
  else if (dtype == MOE_DTYPE_FP16)
    (void)moe_fp16_to_f32(NULL, x, (const moe_fp16 *)data, n);
  else
    (void)moe_f32_to_f32(NULL, x, (const float *)data, n);
  return x;
}

static void fuzz_from_floats(moe_dtype dtype, void *data, const float *x, int64_t n) {
  if (dtype == MOE_DTYPE_BF16)
    (void)moe_bf16_from_f32(NULL, (moe_bf16 *)data, x, n);
  else if (dtype == MOE_DTYPE_FP16)
    (void)moe_fp16_from_f32(NULL, (moe_fp16 *)data, x, n);
  else
    (void)moe_f32_from_f32(NULL, (float *)data, x, n);
}

/* -------------------------------------------------------------------------------------------------------------- MX */

/* Both directions' arguments, of one tensor. */
typedef struct fuzz_mx_pair {
  moe_quantize_mx_args to;
  moe_dequantize_mx_args from;
  int64_t lines, length, code_stride, groups, size;
} fuzz_mx_pair;

static fuzz_mx_pair fuzz_mx_pair_of(fuzz_input *in) {
  fuzz_mx_pair p;
  memset(&p, 0, sizeof p);
  p.from.element = (moe_element)fuzz_enum(in, ELEMENTS), p.from.dtype = (moe_dtype)fuzz_enum(in, 4);
  p.from.transposed = fuzz_enum(in, 2);
  p.from.rows = fuzz_length(in, 1, 40, 33), p.from.columns = fuzz_length(in, 1, 40, 33);
  p.to.element = p.from.element, p.to.dtype = p.from.dtype, p.to.transposed = p.from.transposed;
  p.to.rows = p.from.rows, p.to.columns = p.from.columns;
  p.lines = p.from.transposed ? p.from.columns : p.from.rows;
  p.length = p.from.transposed ? p.from.rows : p.from.columns;
  p.groups = fuzz_ceil(p.length, 32), p.code_stride = p.length, p.size = 4;
  if (!in->legal) return p;
  if (elements[p.from.element].bits == 4) p.code_stride = fuzz_ceil(p.length, 2);
  p.size = (int64_t)moe_dtype_size(fuzz_or_f32(p.from.dtype));
  return p;
}

static void fuzz_mx_tensors(fuzz_call *c, fuzz_mx_pair *p, int decode) {
  const int64_t plain = fuzz_times(p->from.rows, p->from.columns);
  fuzz_tensor_of(c, decode ? (void *)&p->from.plain : (void *)&p->to.plain, decode, plain, p->size);
  fuzz_tensor_of(c, decode ? (void *)&p->from.codes : (void *)&p->to.codes, !decode,
                 fuzz_times(p->lines, p->code_stride), 1);
  fuzz_tensor_of(c, decode ? (void *)&p->from.scales : (void *)&p->to.scales, !decode, fuzz_times(p->lines, p->groups),
                 1);
}

/* Where an element of a line lies in the plain tensor. */
static int64_t fuzz_mx_at(const fuzz_mx_pair *p, int64_t line, int64_t i) {
  return p->from.transposed ? i * p->lines + line : line * p->length + i;
}

static int fuzz_mx_right(const fuzz_mx_pair *p) {
  const struct element *f = &elements[p->to.element];
  float *plain = fuzz_as_floats(p->to.dtype, p->to.plain, p->lines * p->length),
        *x = (float *)fuzz_memory(p->length * 4);
  uint8_t *codes = fuzz_memory(p->code_stride), *scales = fuzz_memory(p->groups);
  int right = 1;
  for (int64_t line = 0; line < p->lines && right; line++) {
    for (int64_t i = 0; i < p->length; i++) x[i] = plain[fuzz_mx_at(p, line, i)];
    mx_quantize_line(f, (int)p->to.scale_rule, p->to.cast, x, p->length, codes, scales);
    right = memcmp(codes, p->to.codes + line * p->code_stride, (size_t)p->code_stride) == 0 &&
            memcmp(scales, p->to.scales + line * p->groups, (size_t)p->groups) == 0;
  }
  free(plain), free(x), free(codes), free(scales);
  return right;
}

static int fuzz_mx_decoded(const fuzz_mx_pair *p, const uint8_t *got) {
  const struct element *f = &elements[p->from.element];
  const int64_t n = p->lines * p->length;
  float *x = (float *)fuzz_memory(n * 4);
  uint8_t *want = fuzz_memory(n * p->size);
  for (int64_t line = 0; line < p->lines; line++)
    for (int64_t i = 0; i < p->length; i++) {
      const int code = element_get(f, p->from.codes + line * p->code_stride, i);
      x[fuzz_mx_at(p, line, i)] = float_of(mx_dequantized(f, p->from.scales[line * p->groups + i / 32], code));
    }
  fuzz_from_floats(p->from.dtype, want, x, n);
  const int right = memcmp(want, got, (size_t)(n * p->size)) == 0;
  free(x), free(want);
  return right;
}

static void fuzz_mx(fuzz_input *in, moe_context *ctx) {
  fuzz_call c = fuzz_call_of(in, ctx);
  const int decode = fuzz_pick(in, 2);
  fuzz_mx_pair p = fuzz_mx_pair_of(in);
  if (!decode) p.to.scale_rule = (moe_scale_rule)fuzz_enum(in, 6), p.to.cast = fuzz_cast(in);
  fuzz_mx_tensors(&c, &p, decode);
  if (!fuzz_open(&c)) return;
  if (!decode) fuzz_floats(&c, p.to.dtype, &c.tensor[0]);
  fuzz_spoil(&c);
  if (fuzz_run(&c, decode ? "moe_dequantize_mx" : "moe_quantize_mx", decode ? fuzz_dequantize_mx : fuzz_quantize_mx,
               decode ? (const void *)&p.from : (const void *)&p.to) &&
      p.lines * p.length <= FUZZ_ORACLE_MOST && !(decode ? fuzz_mx_decoded(&p, c.tensor[0].data) : fuzz_mx_right(&p)))
    fuzz_fail("not as the oracle says", ctx);
  fuzz_close(&c);
}

/* Random numbers of an element, and its largest at every `step` from the first. */
static void fuzz_numbers(fuzz_call *c, const struct element *f, uint8_t *codes, int64_t n, int64_t step) {
  for (int64_t i = 0; i < n; i++) {
    const uint64_t r = test_random(&c->rng);
    const int magnitude = i % step == 0 ? f->last : (int)(r % (uint64_t)(f->last + 1));
    element_put(f, codes, i, magnitude | (int)(r >> 63) << (f->bits - 1));
  }
}

/* Groups that hold the largest number quantise to themselves by every rule that wants no scale above it. */
static void fuzz_mx_back(fuzz_input *in, moe_context *ctx) {
  static const moe_scale_rule rules[] = {MOE_SCALE_OCP_FLOOR, MOE_SCALE_ROUND_UP, MOE_SCALE_EVEN, MOE_SCALE_NEAREST};
  fuzz_call c = fuzz_call_of(in, ctx), back = c;
  fuzz_mx_pair p = fuzz_mx_pair_of(in);
  p.to.scale_rule = rules[fuzz_pick(in, 4)], p.to.cast = fuzz_cast(in);
  fuzz_mx_tensors(&c, &p, 1), fuzz_mx_tensors(&back, &p, 0);
  if (!in->legal || p.from.dtype == MOE_DTYPE_FP16 || !fuzz_open(&c)) return;
  for (int64_t line = 0; line < p.lines; line++)
    fuzz_numbers(&c, &elements[p.from.element], c.tensor[1].data + line * p.code_stride, p.length, 32);
  for (int64_t i = 0; i < c.tensor[2].bytes; i++) c.tensor[2].data[i] = (uint8_t)(40 + c.tensor[2].data[i] % 160);
  if (fuzz_run(&c, "moe_dequantize_mx", fuzz_dequantize_mx, &p.from) && fuzz_open(&back)) {
    memcpy(back.tensor[0].data, c.tensor[0].data, (size_t)c.tensor[0].bytes);
    (void)fuzz_run(&back, "moe_quantize_mx", fuzz_quantize_mx, &p.to);
    for (int i = 1; i < 3; i++)
      if (memcmp(back.tensor[i].data, c.tensor[i].data, (size_t)c.tensor[i].bytes) != 0)
        fuzz_fail("groups came back changed", ctx);
    fuzz_close(&back);
  }
  fuzz_close(&c);
}

/* ---------------------------------------------------------------------------------------------------------- scaled */

typedef struct fuzz_scaled_pair {
  moe_quantize_scaled_args to;
  moe_dequantize_scaled_args from;
  int64_t down, across, block_rows, block_columns, size; /* blocks; their sizes */
} fuzz_scaled_pair;

static fuzz_scaled_pair fuzz_scaled_pair_of(fuzz_input *in) {
  fuzz_scaled_pair p;
  memset(&p, 0, sizeof p);
  p.from.element = (moe_element)fuzz_enum(in, ELEMENTS), p.from.dtype = (moe_dtype)fuzz_enum(in, 4);
  p.from.rows = fuzz_length(in, 1, 40, 33), p.from.columns = fuzz_length(in, 1, 40, 33);
  p.from.block_rows = fuzz_pick(in, 3) ? fuzz_length(in, 0, 9, 16) : 0;
  p.from.block_columns = fuzz_pick(in, 3) ? fuzz_length(in, 0, 9, 16) : 0;
  p.to.element = p.from.element, p.to.dtype = p.from.dtype, p.to.rows = p.from.rows, p.to.columns = p.from.columns;
  p.to.block_rows = p.from.block_rows, p.to.block_columns = p.from.block_columns;
  p.down = p.across = 1, p.size = 4;
  if (in->legal && elements[p.from.element].bits != 8) in->legal = 0;
  if (!in->legal) return p;
  p.block_rows = p.from.block_rows ? p.from.block_rows : p.from.rows;
  p.block_columns = p.from.block_columns ? p.from.block_columns : p.from.columns;
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
  if (!c->in->legal || fuzz_pick(c->in, 8) != 0) return;
  memcpy(t->data + 4 * ((int64_t)fuzz_take(c->in, 2) % (t->bytes / 4)), &bad[fuzz_pick(c->in, 5)], 4);
  c->in->legal = 0;
}

static void fuzz_scaled(fuzz_input *in, moe_context *ctx) {
  fuzz_call c = fuzz_call_of(in, ctx);
  const int decode = fuzz_pick(in, 2);
  fuzz_scaled_pair p = fuzz_scaled_pair_of(in);
  if (!decode) p.to.cast = fuzz_cast(in), p.to.scales_given = fuzz_enum(in, 2);
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

/* Under powers of two numbers quantise to themselves: by given scales, and where a block holds the largest number by those
   found. */
static void fuzz_scaled_back(fuzz_input *in, moe_context *ctx) {
  fuzz_call c = fuzz_call_of(in, ctx), back = c;
  fuzz_scaled_pair p = fuzz_scaled_pair_of(in);
  p.to.scales_given = fuzz_pick(in, 2), p.to.cast = fuzz_cast(in);
  fuzz_scaled_tensors(&c, &p, 1), fuzz_scaled_tensors(&back, &p, 0);
  if (!in->legal || p.from.dtype == MOE_DTYPE_FP16 || !fuzz_open(&c)) return;
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

#endif /* MOE_FUZZ_QUANTIZE_H */
