/* layer_parts.h: a moe_layer with a router, a shared expert, scales and identity experts, its tensors and its calls, by
   type. Numbers fill the whole significand, so that the order of a sum shows. */
#ifndef MOE_TEST_LAYER_PARTS_H
#define MOE_TEST_LAYER_PARTS_H

#include "orders.h"
#include "test.h"

typedef moe_status parts_forward(moe_context *, const moe_layer *, void *, void *);
typedef moe_status parts_backward(moe_context *, const moe_layer *, const void *, const void *,
                                  const moe_layer_grads *);

static const struct parts_calls {
  parts_forward *forward;
  parts_backward *backward;
  moe_status (*saved_bytes)(moe_context *, const moe_layer *, size_t *);
  moe_status (*forward_size)(moe_context *, const moe_layer *, size_t *);
  moe_status (*backward_size)(moe_context *, const moe_layer *, const void *, size_t *);
  moe_status (*router)(moe_context *, const moe_router_topk_args *);
  moe_status (*router_bwd)(moe_context *, const moe_router_topk_bwd_args *);
} parts_calls[] = {
#define PARTS_CALLS(name, type, NAME)                               \
  [MOE_DTYPE_##NAME] = {moe_layer_forward_##name,                   \
                        moe_layer_backward_##name,                  \
                        moe_layer_saved_bytes_##name,               \
                        moe_layer_forward_##name##_workspace_size,  \
                        moe_layer_backward_##name##_workspace_size, \
                        moe_router_topk_##name,                     \
                        moe_router_topk_bwd_##name},
    MOE_DTYPE_LIST(PARTS_CALLS)
#undef PARTS_CALLS
};

static inline void *parts_take(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static inline void parts_give(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }

/* n numbers in [-width, width]. */
static inline void *parts_numbers(moe_dtype dtype, int64_t n, double width, uint64_t *s) {
  float *x = malloc((size_t)n * sizeof *x + 4);
  void *to = malloc((size_t)n * moe_dtype_size(dtype) + 4);
  for (int64_t i = 0; i < n; i++) x[i] = (float)((double)test_random_range(s, -(1 << 23), 1 << 23) * 0x1p-23 * width);
  if (n) assert_int_equal(test_from_f32(dtype, to, x, n), MOE_OK);
  free(x);
  return to;
}

static inline void *parts_copy(const void *from, int64_t n, int64_t size) {
  void *to = malloc((size_t)(n * size) + 4);
  return memcpy(to, from, (size_t)(n * size));
}

/* Both with a workspace of exactly the size that is asked for, full of NaN. */
static inline void parts_run_forward(moe_dtype dtype, moe_context *ctx, moe_layer l, void *y, void *saved) {
  assert_int_equal(parts_calls[dtype].forward_size(ctx, &l, &l.workspace_bytes), MOE_OK);
  l.workspace = memset(malloc(l.workspace_bytes), 0xff, l.workspace_bytes);
  if (parts_calls[dtype].forward(ctx, &l, y, saved) != MOE_OK) fail_msg("%s", ctx->message);
  free(l.workspace);
}

static inline void parts_run_backward(moe_dtype dtype, moe_context *ctx, moe_layer l, const void *saved, const void *dy,
                                      const moe_layer_grads *grads) {
  assert_int_equal(parts_calls[dtype].backward_size(ctx, &l, saved, &l.workspace_bytes), MOE_OK);
  l.workspace = memset(malloc(l.workspace_bytes), 0xff, l.workspace_bytes);
  if (parts_calls[dtype].backward(ctx, &l, saved, dy, grads) != MOE_OK) fail_msg("%s", ctx->message);
  free(l.workspace);
}

#endif /* MOE_TEST_LAYER_PARTS_H */
