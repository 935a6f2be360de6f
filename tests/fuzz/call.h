/* call.h: one call with its tensors, each in memory of exactly its size. A legal call must succeed and write the same
   bytes whatever the instruction set, threads and schedule, and whatever lay in the outputs before; any other must be
   refused in a sentence and write nothing. */
#ifndef MOE_FUZZ_CALL_H
#define MOE_FUZZ_CALL_H

#include "input.h"
#include "support/dtype.h"
#include "support/random.h"

enum { FUZZ_TENSORS = 28, FUZZ_MOST_BYTES = 1 << 18 };

typedef struct fuzz_tensor {
  void *field; /* the pointer in the arguments */
  uint8_t *data, *kept;
  int64_t bytes, align;
  int output;
} fuzz_tensor;

typedef struct fuzz_call {
  fuzz_input *in;
  moe_context *ctx;
  uint64_t rng;
  int count;
  fuzz_tensor tensor[FUZZ_TENSORS];
} fuzz_call;

static inline fuzz_call fuzz_call_of(fuzz_input *in, moe_context *ctx) {
  fuzz_call c;
  memset(&c, 0, sizeof c);
  c.in = in, c.ctx = ctx, c.rng = fuzz_take(in, 2);
  return c;
}

static inline void fuzz_point(void *field, const void *to) { memcpy(field, &to, sizeof to); }

/* `field` is the address of a pointer in the arguments. */
static inline void fuzz_tensor_of(fuzz_call *c, void *field, int output, int64_t count, int64_t align) {
  const fuzz_tensor tensor = {field, NULL, NULL, fuzz_times(count, align), align, output};
  if (tensor.bytes < 0) c->in->legal = 0;
  c->tensor[c->count++] = tensor;
}

/* ---------------------------------------------------------------------------------------------------------- memory */

static inline uint8_t *fuzz_memory(int64_t bytes) {
  uint8_t *memory = (uint8_t *)malloc(bytes ? (size_t)bytes : 1);
  if (memory == NULL) abort();
  return memory;
}

static inline void fuzz_close(fuzz_call *c) {
  for (int i = 0; i < c->count; i++) free(c->tensor[i].data), free(c->tensor[i].kept);
  c->count = 0;
}

/* Makes all tensors, of random bytes: 0 where the call is legal but too large to be made. */
static inline int fuzz_open(fuzz_call *c) {
  int64_t sum = 0;
  for (int i = 0; i < c->count && c->in->legal; i++)
    if (c->tensor[i].bytes > FUZZ_MOST_BYTES || (sum += c->tensor[i].bytes) > FUZZ_MOST_BYTES) return c->count = 0;
  for (int i = 0; i < c->count; i++) {
    fuzz_tensor *t = &c->tensor[i];
    if (!c->in->legal) t->bytes = 64;
    t->data = fuzz_memory(t->bytes), t->kept = fuzz_memory(t->bytes);
    for (int64_t j = 0; j < t->bytes; j++) t->data[j] = (uint8_t)test_random(&c->rng);
    fuzz_point(t->field, t->data);
  }
  return 1;
}

/* Seldom: a pointer that is missing, misaligned, or into another tensor. */
static inline void fuzz_spoil(fuzz_call *c) {
  const int kind = fuzz_pick(c->in, 32), i = fuzz_pick(c->in, c->count), j = fuzz_pick(c->in, c->count);
  const fuzz_tensor *t = &c->tensor[i], *other = &c->tensor[j];
  if (t->bytes == 0) return;
  if (kind == 0)
    fuzz_point(t->field, NULL);
  else if (kind == 1 && t->align > 1)
    fuzz_point(t->field, t->data + 1);
  else if (kind == 2 && i != j && other->bytes > 0 && (t->output || other->output))
    fuzz_point(t->field, other->data + (int64_t)(fuzz_take(c->in, 2) % (uint64_t)other->bytes));
  else
    return;
  c->in->legal = 0;
}

/* Floats whose groups mean something: exponents close together, seldom infinities and NaN. */
static inline void fuzz_floats(fuzz_call *c, moe_dtype dtype, const fuzz_tensor *t) {
  const int kind = fuzz_pick(c->in, 8), exponent = (int)fuzz_take(c->in, 1), special = kind & 4;
  for (int64_t i = 0; i < t->bytes / t->align && kind != 0; i++) {
    const uint64_t r = test_random(&c->rng);
    uint32_t bits = (uint32_t)(r & 0x807fffffu) | (uint32_t)(exponent + (int)(r >> 32 & 7)) % 255u << 23;
    if (special && r >> 58 == 0) bits |= r >> 40 & 1 ? 0x7fc00000u : 0x7f800000u;
    if (kind & 1) bits &= 0xfff00000u;
    const uint16_t half = test_dtype_narrow(dtype) ? (uint16_t)r : (uint16_t)(bits >> 16);
    if (t->align == 4)
      memcpy(t->data + 4 * i, &bits, 4);
    else
      memcpy(t->data + 2 * i, &half, 2);
  }
}

/* ----------------------------------------------------------------------------------------------------------- calls */

typedef moe_status (*fuzz_function)(moe_context *ctx, const void *args);

static inline void fuzz_vary(fuzz_input *in, moe_context *ctx) {
  const int choice = (int)fuzz_take(in, 1);
  (void)moe_isa_limit((moe_isa)(choice & 3));
  ctx->num_threads = 1 + (choice >> 2 & 3);
  ctx->schedule = (moe_schedule)((choice >> 4) % 3);
}

static inline void fuzz_fill_outputs(fuzz_call *c, int value) {
  for (int i = 0; i < c->count; i++)
    if (c->tensor[i].output && c->tensor[i].bytes) memset(c->tensor[i].data, value, (size_t)c->tensor[i].bytes);
}

static inline void fuzz_keep(fuzz_call *c) {
  for (int i = 0; i < c->count; i++) memcpy(c->tensor[i].kept, c->tensor[i].data, (size_t)c->tensor[i].bytes);
}

/* Whether inputs, or outputs, are as they were kept. */
static inline int fuzz_unchanged(const fuzz_call *c, int output) {
  for (int i = 0; i < c->count; i++)
    if (c->tensor[i].output == output && memcmp(c->tensor[i].kept, c->tensor[i].data, (size_t)c->tensor[i].bytes) != 0)
      return 0;
  return 1;
}

static inline void fuzz_judge(moe_context *ctx, moe_status status, int legal, const char *what) {
  if (legal && status != MOE_OK) fprintf(stderr, "refused: "), fuzz_fail(what, ctx);
  if (!legal && status == MOE_OK) fprintf(stderr, "not refused: "), fuzz_fail(what, ctx);
  if (status != ctx->status) fprintf(stderr, "another status in the context: "), fuzz_fail(what, ctx);
  if ((status != MOE_OK) != (strlen(ctx->message) > 8)) fprintf(stderr, "message: "), fuzz_fail(what, ctx);
}

/* Whether it succeeded. */
static inline int fuzz_run(fuzz_call *c, const char *what, fuzz_function run, const void *args) {
  fuzz_fill_outputs(c, 0x5a);
  fuzz_keep(c);
  fuzz_vary(c->in, c->ctx);
  fuzz_judge(c->ctx, run(c->ctx, args), c->in->legal, what);
  if (!fuzz_unchanged(c, 0)) fuzz_fail("an input was written to", c->ctx);
  if (!c->in->legal && !fuzz_unchanged(c, 1)) fuzz_fail("an output of a refused call was written to", c->ctx);
  if (!c->in->legal) return 0;
  fuzz_keep(c);
  fuzz_fill_outputs(c, 0xa5);
  fuzz_vary(c->in, c->ctx);
  fuzz_judge(c->ctx, run(c->ctx, args), 1, what);
  if (!fuzz_unchanged(c, 0) || !fuzz_unchanged(c, 1)) fuzz_fail("other bytes the second time", c->ctx);
  return 1;
}

#endif /* MOE_FUZZ_CALL_H */
