/* mx.h: whole tensors to and from MX, against the oracle, and back. */
#ifndef MOE_FUZZ_MX_H
#define MOE_FUZZ_MX_H

#include "numbers.h"

enum { FUZZ_ORACLE_MOST = 4096 };

static moe_status fuzz_quantize_mx(moe_context *ctx, const void *args) {
  return moe_quantize_mx(ctx, (const moe_quantize_mx_args *)args);
}
static moe_status fuzz_dequantize_mx(moe_context *ctx, const void *args) {
  return moe_dequantize_mx(ctx, (const moe_dequantize_mx_args *)args);
}

/* Both directions' arguments, of one tensor. */
typedef struct fuzz_mx_pair {
  moe_quantize_mx_args to;
  moe_dequantize_mx_args from;
  int64_t lines, length, code_stride, groups, size;
} fuzz_mx_pair;

static fuzz_mx_pair fuzz_mx_pair_of(fuzz_input *in) {
  fuzz_mx_pair p;
  memset(&p, 0, sizeof p);
  p.from.element = fuzz_element(in), p.from.dtype = (moe_dtype)fuzz_enum(in, 1 + TEST_DTYPES);
  p.from.transposed = fuzz_enum(in, 2);
  p.from.rows = fuzz_length(in, 0, 100, 13), p.from.columns = fuzz_length(in, 0, 100, 13);
  p.to.element = p.from.element, p.to.dtype = p.from.dtype, p.to.transposed = p.from.transposed;
  p.to.rows = p.from.rows, p.to.columns = p.from.columns;
  p.lines = p.from.transposed ? p.from.columns : p.from.rows;
  p.length = p.from.transposed ? p.from.rows : p.from.columns;
  p.groups = fuzz_ceil(p.length, 32), p.code_stride = p.length, p.size = 4;
  if (!in->legal) return p;
  p.code_stride = element_bytes(&elements[p.from.element], p.length);
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
  if (!decode) p.to.scale_rule = (moe_scale_rule)fuzz_enum(in, MOE_SCALE_COUNT_), p.to.cast = fuzz_cast(in);
  fuzz_mx_tensors(&c, &p, decode);
  if (!fuzz_open(&c)) return;
  if (!decode) fuzz_floats(&c, p.to.dtype, &c.tensor[0]);
  fuzz_spoil(&c);
  if (fuzz_run(&c, decode ? "moe_dequantize_mx" : "moe_quantize_mx", decode ? fuzz_dequantize_mx : fuzz_quantize_mx,
               decode ? (const void *)&p.from : (const void *)&p.to) &&
      p.lines * p.length <= FUZZ_ORACLE_MOST && p.lines <= FUZZ_ORACLE_MOST &&
      !(decode ? fuzz_mx_decoded(&p, c.tensor[0].data) : fuzz_mx_right(&p)))
    fuzz_fail("not as the oracle says", ctx);
  fuzz_close(&c);
}

/* Groups that hold the largest number quantise to themselves by every rule that wants no scale above it. */
static void fuzz_mx_back(fuzz_input *in, moe_context *ctx) {
  static const moe_scale_rule rules[] = {MOE_SCALE_OCP_FLOOR, MOE_SCALE_ROUND_UP, MOE_SCALE_EVEN, MOE_SCALE_NEAREST};
  fuzz_call c = fuzz_call_of(in, ctx), back = c;
  fuzz_mx_pair p = fuzz_mx_pair_of(in);
  p.to.scale_rule = rules[fuzz_pick(in, 4)], p.to.cast = fuzz_cast(in);
  p.to.cast &= ~(uint32_t)MOE_CAST_HALF_TO_ZERO; /* -0 is to stay */
  fuzz_mx_tensors(&c, &p, 1), fuzz_mx_tensors(&back, &p, 0);
  if (!in->legal || p.lines * p.length == 0 || test_dtype_narrow(p.from.dtype) || !fuzz_open(&c)) return;
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

#endif /* MOE_FUZZ_MX_H */
