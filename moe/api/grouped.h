/* Grouped GEMM: products of rows sorted by expert, each with its expert's weights. The interface of Unsloth's grouped
   GEMM, with its names: here N is the weights' outputs and K the axis that products contract. */
#ifndef MOE_API_GROUPED_H
#define MOE_API_GROUPED_H

#include "context.h"

#include "begin.h"

/* The num_tokens*topk slots, token*topk + k, are sorted by expert: the first m_sizes[0] positions are expert 0's, the
   next m_sizes[1] expert 1's, and so on. gather_indices[pos] is the slot at position pos (a stable argsort of the
   slots' experts). With e the expert of pos:
     forward   Y[out]  = X[in]*W[e]^T, with topk_weights times that of slot gather_indices[pos]
     dx        dX[out] = dY*W[e]
     dw        dW[e]   = dY^T X
                   row of X                      row of Y and dY        row of dX
     neither       pos                           pos                    pos
     permute_x     gather_indices[pos]/topk      pos                    gather_indices[pos]
     permute_y     pos                           gather_indices[pos]    pos
   So with permute_x X is [num_tokens,K], and dX has a row for each slot, to be summed over topk by the caller. Rows of
   Y and dX that belong to no position become 0. Weights of an expert without rows are not read, and its dW is 0.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (negative m_sizes; more rows than positions; packed_W of another shape),
   INVALID_OPTION (also both permutations, topk_weights without permute_y), INVALID_INDEX, OVERFLOW, MISALIGNED,
   OVERLAP, WORKSPACE, OUT_OF_MEMORY, UNSUPPORTED (packed_W for another instruction set).
   Source: semantics of Unsloth's grouped_gemm. */
typedef struct moe_grouped_gemm_args {
  int64_t num_tokens, topk, E, N, K; /* tokens, experts per token, experts, rows and columns of W[e]; all from 1 */
  const int32_t *m_sizes;        /* [E] */
  const int32_t *gather_indices; /* [num_tokens*topk]; may be NULL without a permutation */
  int permute_x, permute_y;      /* one at most is 1 */
  const void *X;                 /* forward, dw: [num_tokens*topk,K], with permute_x [num_tokens,K] */
  const void *W;                 /* forward, dx: [E,N,K]; may be NULL in a forward with packed_W */
  const void *packed_W;          /* forward (optional): MOE_PACK_GROUPED, read in place of W */
  size_t packed_W_bytes;
  const void *dY;                /* dx, dw: [num_tokens*topk,N] */
  const float *topk_weights;     /* forward with permute_y: [num_tokens*topk] by slot (optional) */
  void *Y;                       /* forward: [num_tokens*topk,N] output */
  void *dX;                      /* dx: [num_tokens*topk,K] output */
  void *dW;                      /* dw: [E,N,K] output, weight_grad_dtype */
  moe_dtype weight_grad_dtype;   /* DEFAULT = the function's suffix */
  uint32_t accumulate;           /* MOE_ACCUMULATE_DW: dW is added to */
  void *workspace;               /* (optional with an allocator) */
  size_t workspace_bytes;
} moe_grouped_gemm_args;

/* The forward moe_grouped_gemm_<suffix>, then moe_grouped_gemm_dx_<suffix> and moe_grouped_gemm_dw_<suffix>, which read
   and write the tensors marked with their names; and how many bytes of workspace each needs with these args and this
   context's num_threads, which can be asked for before there are tensors. */
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
