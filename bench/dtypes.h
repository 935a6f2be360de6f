/* One row per element type: what the library offers for it. */
#ifndef MOE_BENCH_DTYPES_H
#define MOE_BENCH_DTYPES_H

typedef struct bench_dtype {
  const char *name;
  moe_dtype dtype;
  moe_status (*fwd)(moe_context *ctx, const moe_blockwise_mm_fwd_args *args);
  moe_status (*fwd_workspace)(moe_context *ctx, const moe_blockwise_mm_fwd_args *args, size_t *bytes);
  moe_status (*bwd)(moe_context *ctx, const moe_blockwise_mm_bwd_args *args);
  moe_status (*bwd_workspace)(moe_context *ctx, const moe_blockwise_mm_bwd_args *args, size_t *bytes);
  moe_status (*layer_fwd)(moe_context *ctx, const moe_layer *layer, void *y, void *saved);
  moe_status (*layer_fwd_workspace)(moe_context *ctx, const moe_layer *layer, size_t *bytes);
  moe_status (*layer_bwd)(moe_context *ctx, const moe_layer *layer, const void *saved, const void *y_grad,
                          const moe_layer_grads *grads);
  moe_status (*layer_bwd_workspace)(moe_context *ctx, const moe_layer *layer, const void *saved, size_t *bytes);
  moe_status (*router)(moe_context *ctx, const moe_router_topk_args *args);
  moe_status (*pack)(moe_context *ctx, const moe_pack_weights_args *args);
  moe_status (*pack_size)(moe_context *ctx, const moe_pack_weights_args *args, size_t *bytes);
  moe_status (*gemm[3])(moe_context *ctx, const moe_grouped_gemm_args *args); /* forward, dx, dw */
  moe_status (*gemm_workspace[3])(moe_context *ctx, const moe_grouped_gemm_args *args, size_t *bytes);
} bench_dtype;

static const bench_dtype bench_dtypes[] = {
#define BENCH_ROW(name, type, NAME)                                                                    \
  {#name, MOE_DTYPE_##NAME, moe_blockwise_mm_fwd_##name, moe_blockwise_mm_fwd_##name##_workspace_size, \
   moe_blockwise_mm_bwd_##name, moe_blockwise_mm_bwd_##name##_workspace_size,                          \
   moe_layer_forward_##name, moe_layer_forward_##name##_workspace_size,                                \
   moe_layer_backward_##name, moe_layer_backward_##name##_workspace_size, moe_router_topk_##name,      \
   moe_pack_weights_##name, moe_pack_weights_##name##_size,                                             \
   {moe_grouped_gemm_##name, moe_grouped_gemm_dx_##name, moe_grouped_gemm_dw_##name},                   \
   {moe_grouped_gemm_##name##_workspace_size, moe_grouped_gemm_dx_##name##_workspace_size,              \
    moe_grouped_gemm_dw_##name##_workspace_size}},
    MOE_DTYPE_LIST(BENCH_ROW)
#undef BENCH_ROW
};

/* NULL when there is no such type. */
static const bench_dtype *bench_dtype_named(const char *name) {
  for (size_t i = 0; i < sizeof bench_dtypes / sizeof *bench_dtypes; i++)
    if (strcmp(bench_dtypes[i].name, name) == 0) return &bench_dtypes[i];
  return NULL;
}

static moe_status bench_from_f32(moe_context *ctx, moe_dtype dtype, void *dst, const float *src, int64_t n) {
  switch (dtype) {
#define BENCH_CASE(name, type, NAME) \
  case MOE_DTYPE_##NAME:             \
    return moe_##name##_from_f32(ctx, (type *)dst, src, n);
    MOE_DTYPE_LIST(BENCH_CASE)
#undef BENCH_CASE
  case MOE_DTYPE_DEFAULT:
    break;
  }
  return MOE_ERROR_INVALID_OPTION;
}

static moe_status bench_to_f32(moe_context *ctx, moe_dtype dtype, float *dst, const void *src, int64_t n) {
  switch (dtype) {
#define BENCH_CASE(name, type, NAME) \
  case MOE_DTYPE_##NAME:             \
    return moe_##name##_to_f32(ctx, dst, (const type *)src, n);
    MOE_DTYPE_LIST(BENCH_CASE)
#undef BENCH_CASE
  case MOE_DTYPE_DEFAULT:
    break;
  }
  return MOE_ERROR_INVALID_OPTION;
}

#endif
