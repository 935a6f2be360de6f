/* pack.h: weights packed ahead of time, of any type. */
#ifndef MOE_TEST_PACK_H
#define MOE_TEST_PACK_H

#include <stdlib.h>

#include "moe.h"

/* moe_pack_weights_*, or with `bytes` its size. */
static inline moe_status test_pack(moe_context *ctx, moe_dtype dtype, const moe_pack_weights_args *args,
                                   size_t *bytes) {
  switch (dtype) {
#define TEST_PACK_(name, type, NAME) \
  case MOE_DTYPE_##NAME:             \
    return bytes ? moe_pack_weights_##name##_size(ctx, args, bytes) : moe_pack_weights_##name(ctx, args);
    MOE_DTYPE_LIST(TEST_PACK_)
#undef TEST_PACK_
    default: return MOE_ERROR_INVALID_OPTION;
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
