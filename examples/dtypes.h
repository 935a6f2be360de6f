/* dtypes.h: the library's functions by element type. Needs moe.h and text.h. */
#ifndef EXAMPLE_DTYPES_H
#define EXAMPLE_DTYPES_H

typedef struct dtype_ops {
  const char *name;
  size_t size;
  float loss_scale; /* half precision needs its gradients lifted out of the subnormals */
  int mxfp8;        /* operands of the experts' products are rounded */
  moe_status (*narrow)(moe_context *ctx, void *dst, const float *src, int64_t n);
  moe_status (*widen)(moe_context *ctx, float *dst, const void *src, int64_t n);
  moe_status (*saved_bytes)(moe_context *ctx, const moe_layer *layer, size_t *bytes);
  moe_status (*forward)(moe_context *ctx, const moe_layer *layer, void *y, void *saved);
  moe_status (*backward)(moe_context *ctx, const moe_layer *layer, const void *saved, const void *y_grad,
                         const moe_layer_grads *grads);
} dtype_ops;

#define DEFINE_CONVERSIONS(name, type, NAME)                                                  \
  static moe_status narrow_##name(moe_context *ctx, void *dst, const float *src, int64_t n) { \
    return moe_##name##_from_f32(ctx, dst, src, n);                                           \
  }                                                                                           \
  static moe_status widen_##name(moe_context *ctx, float *dst, const void *src, int64_t n) {  \
    return moe_##name##_to_f32(ctx, dst, src, n);                                             \
  }
MOE_DTYPE_LIST(DEFINE_CONVERSIONS)

#define DTYPE_OPS(text, mxfp8, name, type, NAME)                                                  \
  {text, sizeof(type), MOE_DTYPE_##NAME == MOE_DTYPE_FP16 ? 4096.0f : 1.0f, mxfp8, narrow_##name, \
   widen_##name, moe_layer_saved_bytes_##name, moe_layer_forward_##name, moe_layer_backward_##name},
#define DTYPE_ENTRY(name, type, NAME) DTYPE_OPS(#name, 0, name, type, NAME)
static const dtype_ops DTYPES[] = {MOE_DTYPE_LIST(DTYPE_ENTRY) DTYPE_OPS("mxfp8", 1, bf16, moe_bf16, BF16)};

static const dtype_ops *find_dtype(const char *name) {
  size_t i = 0, count = sizeof DTYPES / sizeof *DTYPES;
  while (i < count && strcmp(DTYPES[i].name, name)) i++;
  if (i == count) die(2, "--dtype must be bf16, fp16, f32 or mxfp8, not \"%s\"", name);
  return &DTYPES[i];
}

#endif
