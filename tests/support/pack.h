/* pack.h: weights packed ahead of time, of any type. */
#ifndef MOE_TEST_PACK_H
#define MOE_TEST_PACK_H

#include <stdlib.h>

#include "moe.h"

/* moe_pack_weights_*, or with `bytes` its size. */
static inline moe_status test_pack(moe_context *ctx, moe_dtype dtype, const moe_pack_weights_args *args,
                                   size_t *bytes) {
  switch (dtype) {
    case MOE_DTYPE_F32: return bytes ? moe_pack_weights_f32_size(ctx, args, bytes) : moe_pack_weights_f32(ctx, args);
    case MOE_DTYPE_BF16: return bytes ? moe_pack_weights_bf16_size(ctx, args, bytes) : moe_pack_weights_bf16(ctx, args);
    default: return bytes ? moe_pack_weights_fp16_size(ctx, args, bytes) : moe_pack_weights_fp16(ctx, args);
  }
}

/* Into memory of the right size, for the caller to free. */
static inline moe_status test_pack_new(moe_context *ctx, moe_dtype dtype, moe_pack_weights_args *args) {
  const moe_status status = test_pack(ctx, dtype, args, &args->packed_bytes);
  if (status != MOE_OK) return status;
  args->packed = aligned_alloc(64, (args->packed_bytes + 63) / 64 * 64);
  return args->packed ? test_pack(ctx, dtype, args, NULL) : MOE_ERROR_OUT_OF_MEMORY;
}

#endif /* MOE_TEST_PACK_H */
