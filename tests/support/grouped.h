/* grouped.h: the grouped products by type and operation: forward, dX, dW. */
#ifndef MOE_TEST_GROUPED_H
#define MOE_TEST_GROUPED_H

#include "moe.h"

typedef moe_status (*grouped_fn)(moe_context *ctx, const moe_grouped_gemm_args *args);

static const grouped_fn grouped_call[][3] = {{NULL, NULL, NULL},
#define TEST_ROW_(name, type, NAME) {moe_grouped_gemm_##name, moe_grouped_gemm_dx_##name, moe_grouped_gemm_dw_##name},
                                             MOE_DTYPE_LIST(TEST_ROW_)
#undef TEST_ROW_
};

typedef moe_status (*grouped_size_fn)(moe_context *ctx, const moe_grouped_gemm_args *args, size_t *bytes);

static const grouped_size_fn grouped_size[][3] = {
    {NULL, NULL, NULL},
#define TEST_ROW_(name, type, NAME)                                                         \
  {moe_grouped_gemm_##name##_workspace_size, moe_grouped_gemm_dx_##name##_workspace_size,   \
   moe_grouped_gemm_dw_##name##_workspace_size},
    MOE_DTYPE_LIST(TEST_ROW_)
#undef TEST_ROW_
};

#endif /* MOE_TEST_GROUPED_H */
