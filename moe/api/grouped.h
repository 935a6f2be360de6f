/* Grouped GEMM: the interface of Unsloth's. */
#ifndef MOE_API_GROUPED_H
#define MOE_API_GROUPED_H

#include "context.h"

#include "begin.h"

/* ---------------------------------------------------------------------------------------------------- grouped GEMM */

/* Products of rows sorted by expert, each with its expert's weights: Y = X*W[e]^T (the interface of Unsloth's grouped
   GEMM). The first m_sizes[0] of the num_tokens*topk sorted positions belong to expert 0, and so on;
   gather_indices[pos] is the slot token*topk+k that position pos holds (a stable argsort of the flattened expert ids).
                  row of X for pos       row of Y, dY for pos
     neither      pos                    pos
     permute_x    gather[pos]/topk       pos                     X is then [num_tokens,K]; dX row gather[pos]
     permute_y    pos                    gather[pos]
   dX[pos] = dY*W[e], with permute_x one row per slot, to be summed over topk by the caller; dW[e] = dY^T X.
   Rows at no position become 0; an expert without rows is not read and its dW is 0. Any N, K.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (negative m_sizes, or more rows than positions), INVALID_OPTION (both
   permutations), INVALID_INDEX, OVERFLOW, MISALIGNED, OVERLAP, WORKSPACE, OUT_OF_MEMORY. */
typedef struct moe_grouped_gemm_args {
  int64_t num_tokens, topk, E, N, K;
  const int32_t *m_sizes;        /* [E] */
  const int32_t *gather_indices; /* [num_tokens*topk]; required with a permutation */
  int permute_x, permute_y;
  const void *X;                 /* forward, dw */
  const void *W;                 /* [E,N,K]; forward (optional beside packed_W), dx */
  const void *packed_W;          /* forward (optional): from moe_pack_weights with MOE_PACK_GROUPED */
  size_t packed_W_bytes;
  const void *dY;                /* dx, dw: [num_tokens*topk,N] */
  const float *topk_weights;     /* [num_tokens*topk] by slot (optional): forward with permute_y multiplies rows */
  void *Y;                       /* forward: [num_tokens*topk,N] output */
  void *dX;                      /* dx: [num_tokens*topk,K] output */
  void *dW;                      /* dw: [E,N,K] output, weight_grad_dtype */
  moe_dtype weight_grad_dtype;
  uint32_t accumulate;           /* MOE_ACCUMULATE_DW: dW += */
  void *workspace;
  size_t workspace_bytes;
} moe_grouped_gemm_args;

#define MOE_DECLARE_GROUPED_(function)                                              \
  MOE_API moe_status function(moe_context *ctx, const moe_grouped_gemm_args *args); \
  MOE_API moe_status function##_workspace_size(moe_context *ctx, const moe_grouped_gemm_args *args, size_t *bytes);
#define MOE_DECLARE_GROUPED_OF_(name, type, NAME)  \
  MOE_DECLARE_GROUPED_(moe_grouped_gemm_##name)    \
  MOE_DECLARE_GROUPED_(moe_grouped_gemm_dx_##name) \
  MOE_DECLARE_GROUPED_(moe_grouped_gemm_dw_##name)
MOE_DTYPE_LIST(MOE_DECLARE_GROUPED_OF_)
#undef MOE_DECLARE_GROUPED_OF_
#undef MOE_DECLARE_GROUPED_

#include "end.h"

#endif
