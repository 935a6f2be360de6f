/* fuzz_layouts: any arguments to every converter of layouts: what is accepted must agree with support/mx_oracle.h and stay
   inside buffers of exactly the right size; what is refused must say why. libFuzzer's entry; with -DFUZZ_MAIN a program
   that feeds it random bytes, "fuzz_layouts COUNT". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOE_IMPLEMENTATION
#include "moe.h"

#include "support/mx_check.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct fuzz_input {
  const uint8_t *data;
  size_t size, at;
} fuzz_input;

static uint64_t fuzz_take(fuzz_input *in, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; i++) value |= (uint64_t)(in->at < in->size ? in->data[in->at++] : 0) << (8 * i);
  return value;
}

/* Mostly small, sometimes anything at all. */
static int64_t fuzz_length(fuzz_input *in, int64_t most, int64_t step) {
  const int kind = (int)fuzz_take(in, 1);
  if (kind >= 248) return (int64_t)fuzz_take(in, 8);
  return (1 + (int64_t)fuzz_take(in, 2) % most) * (kind & 1 ? step : 1);
}

static int fuzz_enum(fuzz_input *in, int count) {
  const int value = (int)fuzz_take(in, 1);
  return value >= 250 ? value - 252 : value % count;
}

static void fuzz_fail(const char *what, const moe_context *ctx) {
  fprintf(stderr, "%s: %s\n", what, ctx->message);
  abort();
}

static int fuzz_small(int64_t a, int64_t most) { return a > 0 && a <= most; }

static void fuzz_mx(fuzz_input *in, moe_context *ctx) {
  moe_mx_layout_args a;
  moe_mx_layout_bytes bytes;
  memset(&a, 0, sizeof a);
  a.from = (moe_mx_layout)fuzz_enum(in, 8), a.to = (moe_mx_layout)fuzz_enum(in, 8);
  a.scales_from = (moe_mx_scales)fuzz_enum(in, 4), a.scales_to = (moe_mx_scales)fuzz_enum(in, 4);
  a.element_bits = fuzz_take(in, 1) & 1 ? 8 : 4, a.parts = 1 + fuzz_enum(in, 2), a.logical_order = fuzz_enum(in, 2);
  a.E = fuzz_length(in, 3, 1), a.columns = fuzz_length(in, 150, 1);
  const int64_t step = a.parts == 2 ? 512 : 32;
  a.K = fuzz_length(in, step == 512 ? 5 : 100, step);
  const moe_status status = moe_mx_layout_size(ctx, &a, &bytes);
  if (status != MOE_OK && strlen(ctx->message) < 8) fuzz_fail("refused without a sentence", ctx);
  if (status != MOE_OK || !fuzz_small(a.E, 3) || !fuzz_small(a.columns, 150) || !fuzz_small(a.K, 3200)) {
    if (status != MOE_OK && moe_mx_layout_convert(ctx, &a) == MOE_OK) fuzz_fail("converted what has no size", ctx);
    return;
  }
  const char *wrong = mx_check(ctx, &a, fuzz_take(in, 8));
  if (wrong) fuzz_fail(wrong, ctx);
  int64_t *got = (int64_t *)malloc((size_t)a.K * 16), *want = got + a.K;
  if (got == NULL) abort();
  if (moe_nki_x4_permutation(ctx, a.from, a.parts, a.K, got) != MOE_OK) fuzz_fail("moe_nki_x4_permutation", ctx);
  mx_order(a.from, a.parts, a.K, want);
  if (memcmp(got, want, (size_t)a.K * 8) != 0) fuzz_fail("moe_nki_x4_permutation is wrong", ctx);
  free(got);
}

/* There and back: both ways in buffers of exactly the right size. */
static void fuzz_vector(fuzz_input *in, moe_context *ctx) {
  moe_nki_vector_args a;
  size_t plain, device;
  memset(&a, 0, sizeof a);
  a.kind = (moe_nki_vector)fuzz_enum(in, 2), a.dtype = (moe_dtype)fuzz_enum(in, 4), a.to_nki = 1;
  a.E = fuzz_length(in, 3, 1), a.length = fuzz_length(in, 300, a.kind == MOE_NKI_DOWN_SCALE ? 128 : 4);
  const moe_status status = moe_nki_vector_size(ctx, &a, &plain, &device);
  if (status != MOE_OK && strlen(ctx->message) < 8) fuzz_fail("refused without a sentence", ctx);
  if (status != MOE_OK || plain > 1000000 || device > 1000000) return;
  uint64_t rng = fuzz_take(in, 8);
  uint8_t *x = mx_buffer(plain, 0), *y = mx_buffer(device, 0x5a), *back = mx_buffer(plain, 0xa5);
  for (size_t i = 0; i < plain; i++) x[i] = (uint8_t)test_random(&rng);
  a.in = x, a.out = y;
  if (moe_nki_vector_convert(ctx, &a) != MOE_OK) fuzz_fail("moe_nki_vector_convert", ctx);
  a.in = y, a.out = back, a.to_nki = 0;
  if (moe_nki_vector_convert(ctx, &a) != MOE_OK) fuzz_fail("moe_nki_vector_convert back", ctx);
  if (memcmp(back, x, plain) != 0) fuzz_fail("a vector came back changed", ctx);
  free(x), free(y), free(back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz_input in = {data, size, 0};
  moe_context ctx;
  memset(&ctx, 0, sizeof ctx);
  ctx.num_threads = 3;
  ctx.schedule = (moe_schedule)(fuzz_take(&in, 1) % 3);
  if (fuzz_take(&in, 1) % 8 == 0) fuzz_vector(&in, &ctx);
  else fuzz_mx(&in, &ctx);
  return 0;
}

#ifdef FUZZ_MAIN
int main(int argc, char **argv) {
  const long count = argc > 1 ? strtol(argv[1], NULL, 10) : 1000;
  uint64_t rng = 5;
  for (long i = 0; i < count; i++) {
    uint8_t data[64];
    for (size_t j = 0; j < sizeof data; j++) data[j] = (uint8_t)test_random(&rng);
    LLVMFuzzerTestOneInput(data, sizeof data);
  }
  printf("%ld inputs\n", count);
  return 0;
}
#endif
