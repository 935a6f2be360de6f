/* A Mixture-of-Experts MLP on sorted slots: two grouped products with the gated unit between them, in one call. The
   names are those of Unsloth's grouped GEMM, as in grouped.h. */
#ifndef MOE_API_GROUPED_MLP_H
#define MOE_API_GROUPED_MLP_H

#include "layer.h"

#include "begin.h"

/* The slots are sorted as for moe_grouped_gemm: gather_indices[pos], of expert e, is slot token*topk + k. With w the
   weight of a slot, 1 without topk_weights,
     m = act(X[token]*gate_up[e,0]^T)*(X[token]*gate_up[e,1]^T + up_offset), Y[token] += w*(m*down[e]^T)
   with biases and limits as in moe_blockwise_mm_fwd. A token's sum is in the order of positions, and to the bit that of
   the blockwise layer where that order is the same. No permuted rows are formed. Positions beyond those of m_sizes are
   not read: gather_indices may hold anything there. */
typedef struct moe_grouped_mlp_args {
  int64_t num_tokens, topk, E, H, I; /* tokens, experts per token, experts, hidden and intermediate size */
  const int32_t *m_sizes;            /* [E]: slots of an expert */
  const int32_t *gather_indices;     /* [num_tokens*topk]: each slot at most once; NULL: position is slot */
  const float *topk_weights;         /* [num_tokens*topk], by slot (optional) */
  const void *X;                     /* [num_tokens,H] */
  const void *gate_up;               /* [E,2I,H]: gate's rows, then up's */
  const void *down;                  /* [E,H,I] */
  const void *gate_up_bias;          /* [E,2I] (optional) */
  const void *down_bias;             /* [E,H] (optional) */
  moe_layer_config config;           /* affinity_mode: 0, POST_SCALE, or ON_I */
  void *saved;                       /* (optional): num_tokens*topk*2*I elements, output of the forward, input of the
                                        backward, which without it computes them again */
  void *Y;                           /* forward: [num_tokens,H] output */
  const void *dY;                    /* backward: [num_tokens,H] */
  void *dX;                          /* backward: [num_tokens,H] output (optional, as all that follow) */
  float *dtopk_weights;              /* [num_tokens*topk] output; 0 at slots that are at no position */
  void *dgate_up, *ddown;            /* [E,2I,H], [E,H,I] outputs, weight_grad_dtype */
  void *dgate_up_bias, *ddown_bias;  /* [E,2I], [E,H] outputs, weight_grad_dtype */
  moe_dtype weight_grad_dtype;       /* DEFAULT = the function's suffix */
  uint32_t accumulate;               /* of the forward MOE_ACCUMULATE_OUTPUT, of the backward as moe_layer_grads */
  void *workspace;                   /* (optional with an allocator) */
  size_t workspace_bytes;
} moe_grouped_mlp_args;

/* moe_grouped_mlp_<suffix>, moe_grouped_mlp_bwd_<suffix>, and how many bytes of workspace each needs with these args
   and this context's num_threads.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (negative m_sizes; more slots than there are), INVALID_OPTION, INVALID_INDEX (a
   slot out of range, or named twice), OVERFLOW, MISALIGNED, OVERLAP, WORKSPACE, OUT_OF_MEMORY. */
#define MOE_DECLARE_GROUPED_MLP_(name, type, NAME)                                                       \
  MOE_API moe_status moe_grouped_mlp_##name(moe_context *ctx, const moe_grouped_mlp_args *args);         \
  MOE_API moe_status moe_grouped_mlp_##name##_workspace_size(moe_context *ctx,                           \
                                                             const moe_grouped_mlp_args *args, size_t *bytes); \
  MOE_API moe_status moe_grouped_mlp_bwd_##name(moe_context *ctx, const moe_grouped_mlp_args *args);     \
  MOE_API moe_status moe_grouped_mlp_bwd_##name##_workspace_size(moe_context *ctx,                       \
                                                                 const moe_grouped_mlp_args *args, size_t *bytes);
MOE_DTYPE_LIST(MOE_DECLARE_GROUPED_MLP_)
#undef MOE_DECLARE_GROUPED_MLP_

#include "end.h"

#endif
