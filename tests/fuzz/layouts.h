/* layouts.h: the converters of layouts, against support/mx_oracle.h, and there and back. */
#ifndef MOE_FUZZ_LAYOUTS_H
#define MOE_FUZZ_LAYOUTS_H

#include "call.h"
#include "support/mx_check.h"

static moe_status fuzz_convert_layout(moe_context *ctx, const void *args) {
  return moe_mx_layout_convert(ctx, (const moe_mx_layout_args *)args);
}

/* Back to where it came from and there again gives the same bytes. */
static void fuzz_layout_back(const fuzz_call *c, const moe_mx_layout_args *there) {
  const moe_mx_layout_bytes *bytes = &there->bytes;
  moe_mx_layout_args back = *there, again = *there;
  uint8_t *codes = mx_buffer(bytes->codes_in, 1), *scales = mx_buffer(bytes->scales_in, 1);
  uint8_t *codes_again = mx_buffer(bytes->codes_out, 2), *scales_again = mx_buffer(bytes->scales_out, 2);
  back.from = there->to, back.scales_from = there->scales_to, back.to = there->from,
  back.scales_to = there->scales_from;
  back.codes_in = there->codes_out, back.scales_in = there->scales_out, back.codes_out = codes,
  back.scales_out = scales;
  memset(&back.bytes, 0, sizeof back.bytes);
  again.codes_in = codes, again.scales_in = scales, again.codes_out = codes_again, again.scales_out = scales_again;
  if (moe_mx_layout_convert(c->ctx, &back) != MOE_OK || moe_mx_layout_convert(c->ctx, &again) != MOE_OK)
    fuzz_fail("moe_mx_layout_convert back", c->ctx);
  if (memcmp(codes_again, there->codes_out, bytes->codes_out) != 0 ||
      (scales_again && memcmp(scales_again, there->scales_out, bytes->scales_out) != 0))
    fuzz_fail("a layout came back changed", c->ctx);
  free(codes), free(scales), free(codes_again), free(scales_again);
}

static void fuzz_permutation(moe_context *ctx, const moe_mx_layout_args *a) {
  int64_t *got = (int64_t *)malloc((size_t)a->K * 8), *want = (int64_t *)malloc((size_t)a->K * 8);
  if (got == NULL || want == NULL) abort();
  if (moe_nki_x4_permutation(ctx, a->from, a->parts, a->K, got) != MOE_OK) fuzz_fail("moe_nki_x4_permutation", ctx);
  mx_order(a->from, a->parts, a->K, want);
  if (memcmp(got, want, (size_t)a->K * 8) != 0) fuzz_fail("moe_nki_x4_permutation is wrong", ctx);
  free(got), free(want);
}

static void fuzz_layout_run(fuzz_call *c, moe_mx_layout_args *a) {
  const int64_t word = a->element_bits / 2;
  const int64_t align_in = mx_is_nki(a->from) ? word : 1, align_out = mx_is_nki(a->to) ? word : 1;
  fuzz_tensor_of(c, &a->codes_in, 0, (int64_t)a->bytes.codes_in / align_in, align_in);
  fuzz_tensor_of(c, &a->scales_in, 0, (int64_t)a->bytes.scales_in, 1);
  fuzz_tensor_of(c, &a->codes_out, 1, (int64_t)a->bytes.codes_out / align_out, align_out);
  fuzz_tensor_of(c, &a->scales_out, 1, (int64_t)a->bytes.scales_out, 1);
  if (!fuzz_open(c)) return;
  fuzz_spoil(c);
  if (fuzz_pick(c->in, 32) == 0 && a->bytes.codes_out > 1) a->bytes.codes_out--, c->in->legal = 0;
  if (fuzz_run(c, "moe_mx_layout_convert", fuzz_convert_layout, a)) fuzz_layout_back(c, a);
  fuzz_close(c);
}

static void fuzz_layouts(fuzz_input *in, moe_context *ctx) {
  fuzz_call c = fuzz_call_of(in, ctx);
  moe_mx_layout_args a;
  moe_mx_layout_bytes bytes;
  memset(&a, 0, sizeof a);
  a.from = (moe_mx_layout)fuzz_enum(in, MOE_MX_LAYOUT_COUNT_);
  a.to = (moe_mx_layout)fuzz_enum(in, MOE_MX_LAYOUT_COUNT_);
  a.scales_from = (moe_mx_scales)fuzz_enum(in, MOE_MX_SCALES_COUNT_);
  a.scales_to = (moe_mx_scales)fuzz_enum(in, MOE_MX_SCALES_COUNT_);
  a.element_bits = fuzz_pick(in, 2) ? 8 : 4, a.parts = 1 + fuzz_enum(in, 2), a.logical_order = fuzz_enum(in, 2);
  a.E = fuzz_length(in, 1, 3, 1), a.columns = fuzz_length(in, 1, 150, 1);
  a.K = a.parts == 2 ? fuzz_length(in, 1, 5, 512) : fuzz_length(in, 1, 100, 32);
  const int small = in->legal && a.E <= 3 && a.columns <= 150 && a.K <= 3200;
  if (small && !mx_convertible(&a)) in->legal = 0;
  const moe_status status = moe_mx_layout_size(ctx, &a, &bytes);
  if (small || !in->legal) fuzz_judge(ctx, status, in->legal, "moe_mx_layout_size");
  if (status != MOE_OK && moe_mx_layout_convert(ctx, &a) == MOE_OK) fuzz_fail("converted what has no size", ctx);
  if (status != MOE_OK || !small) return;
  fuzz_vary(in, ctx);
  const char *wrong = mx_check(ctx, &a, c.rng);
  if (wrong) fuzz_fail(wrong, ctx);
  fuzz_permutation(ctx, &a);
  a.bytes = bytes;
  fuzz_layout_run(&c, &a);
}

/* --------------------------------------------------------------------------------------------------------- vectors */

static moe_status fuzz_convert_vector(moe_context *ctx, const void *args) {
  return moe_nki_vector_convert(ctx, (const moe_nki_vector_args *)args);
}

static void fuzz_vector_back(const fuzz_call *c, const moe_nki_vector_args *there) {
  moe_nki_vector_args back = *there;
  uint8_t *plain = fuzz_memory(c->tensor[0].bytes);
  back.to_nki = 0, back.in = there->out, back.out = plain;
  if (moe_nki_vector_convert(c->ctx, &back) != MOE_OK) fuzz_fail("moe_nki_vector_convert back", c->ctx);
  if (memcmp(plain, there->in, (size_t)c->tensor[0].bytes) != 0) fuzz_fail("a vector came back changed", c->ctx);
  free(plain);
}

static void fuzz_vectors(fuzz_input *in, moe_context *ctx) {
  fuzz_call c = fuzz_call_of(in, ctx);
  moe_nki_vector_args a;
  size_t from = 0, to = 0;
  memset(&a, 0, sizeof a);
  a.kind = (moe_nki_vector)fuzz_enum(in, MOE_NKI_COUNT_), a.dtype = (moe_dtype)(fuzz_enum(in, TEST_DTYPES) + 1);
  a.to_nki = fuzz_enum(in, 2);
  const int64_t step = a.kind == MOE_NKI_DOWN_SCALE ? 128 : 4;
  a.E = fuzz_length(in, 1, 3, 1), a.length = fuzz_length(in, 1, 300, step);
  if (a.length % step != 0) in->legal = 0;
  const moe_status status = moe_nki_vector_size(ctx, &a, &from, &to);
  if (status == MOE_ERROR_OVERFLOW) in->legal = 0;
  fuzz_judge(ctx, status, in->legal, "moe_nki_vector_size");
  const int64_t size = in->legal ? (int64_t)moe_dtype_size(a.dtype) : 1;
  fuzz_tensor_of(&c, &a.in, 0, (int64_t)from / size, size);
  fuzz_tensor_of(&c, &a.out, 1, (int64_t)to / size, size);
  if (!fuzz_open(&c)) return;
  fuzz_spoil(&c);
  if (fuzz_run(&c, "moe_nki_vector_convert", fuzz_convert_vector, &a) && a.to_nki) fuzz_vector_back(&c, &a);
  fuzz_close(&c);
}

#endif /* MOE_FUZZ_LAYOUTS_H */
