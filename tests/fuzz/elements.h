/* elements.h: rows of floats to and from every type and narrow element, and E8M0. */
#ifndef MOE_FUZZ_ELEMENTS_H
#define MOE_FUZZ_ELEMENTS_H

#include "call.h"

/* X(suffix, type, bits, what the conversion from float takes last): what floats are converted to and from. */
#define FUZZ_CAST_ , a->cast
#define FUZZ_CONVERSIONS(X)         \
  X(f32, float, 32, )               \
  X(bf16, moe_bf16, 16, )           \
  X(fp16, moe_fp16, 16, )           \
  X(e4m3fn, uint8_t, 8, FUZZ_CAST_) \
  X(e4m3, uint8_t, 8, FUZZ_CAST_)   \
  X(e5m2, uint8_t, 8, FUZZ_CAST_)   \
  X(e2m1, uint8_t, 4, FUZZ_CAST_)   \
  X(e8m0, uint8_t, 8, )

enum {
#define FUZZ_KIND(name, type, bits, cast) FUZZ_KIND_##name,
  FUZZ_CONVERSIONS(FUZZ_KIND)
#undef FUZZ_KIND
      FUZZ_KINDS
};

typedef struct fuzz_conversion {
  int kind; /* FUZZ_KIND_ */
  int back; /* 1: to float */
  void *dst;
  const void *src;
  int64_t n;
  uint32_t cast;
} fuzz_conversion;

static int fuzz_conversion_bits(int kind) {
#define FUZZ_BITS(name, type, bits, cast) bits,
  static const int bits[] = {FUZZ_CONVERSIONS(FUZZ_BITS)};
#undef FUZZ_BITS
  return bits[kind];
}

static moe_status fuzz_convert(moe_context *ctx, const void *args) {
  const fuzz_conversion *a = (const fuzz_conversion *)args;
  int kind = a->kind;
#define FUZZ_CONVERT(name, type, bits, cast)                                               \
  if (kind-- == 0)                                                                         \
    return a->back ? moe_##name##_to_f32(ctx, (float *)a->dst, (const type *)a->src, a->n) \
                   : moe_##name##_from_f32(ctx, (type *)a->dst, (const float *)a->src, a->n cast);
  FUZZ_CONVERSIONS(FUZZ_CONVERT)
#undef FUZZ_CONVERT
  return MOE_ERROR_UNSUPPORTED;
}

/* What a conversion made is left alone by going back and there again. */
static void fuzz_elements_again(const fuzz_call *c, const fuzz_conversion *there) {
  const fuzz_tensor *src = &c->tensor[0], *dst = &c->tensor[1];
  uint8_t *middle = fuzz_memory(src->bytes), *again = fuzz_memory(dst->bytes);
  fuzz_conversion back = *there, forth = *there;
  back.back = !there->back, back.src = dst->data, back.dst = middle;
  back.cast &= ~(uint32_t)MOE_CAST_SATURATE;
  forth.src = middle, forth.dst = again;
  if (fuzz_convert(c->ctx, &back) != MOE_OK || fuzz_convert(c->ctx, &forth) != MOE_OK) fuzz_fail("back", c->ctx);
  if (memcmp(again, dst->data, (size_t)dst->bytes) != 0) fuzz_fail("converted another way the second time", c->ctx);
  free(middle), free(again);
}

static void fuzz_elements(fuzz_input *in, moe_context *ctx) {
  fuzz_call c = fuzz_call_of(in, ctx);
  fuzz_conversion a;
  memset(&a, 0, sizeof a);
  a.kind = fuzz_pick(in, FUZZ_KINDS), a.back = fuzz_pick(in, 2);
  const int bits = fuzz_conversion_bits(a.kind), element = bits <= 8 && a.kind != FUZZ_KIND_e8m0;
  if (element && !a.back) a.cast = fuzz_cast(in);
  a.n = fuzz_length(in, 0, 300, 1);
  const int64_t narrow = bits < 8 ? a.n / 8 * bits + (a.n % 8 * bits + 7) / 8 : a.n, size = bits > 8 ? bits / 8 : 1;
  fuzz_tensor_of(&c, &a.src, 0, a.back ? narrow : a.n, a.back ? size : 4);
  fuzz_tensor_of(&c, &a.dst, 1, a.back ? a.n : narrow, a.back ? 4 : size);
  if (!fuzz_open(&c)) return;
  if (!a.back) fuzz_floats(&c, MOE_DTYPE_F32, &c.tensor[0]);
  fuzz_spoil(&c);
  if (fuzz_run(&c, "conversion", fuzz_convert, &a)) fuzz_elements_again(&c, &a);
  fuzz_close(&c);
}

#endif /* MOE_FUZZ_ELEMENTS_H */
