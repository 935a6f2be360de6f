/* Grouped GEMM: products of rows sorted by expert, each with its expert's weights. The interface of Unsloth's grouped
   GEMM, with its names: here N is the weights' outputs and K the axis that products contract. */
#ifndef MOE_API_GROUPED_H
#define MOE_API_GROUPED_H

#include "context.h"
#include "quantize.h"

#include "begin.h"

/* The shape of W and dW, and of the codes of a quantised W with float scales. */
typedef enum moe_grouped_order {
  MOE_GROUPED_ENK = 0, /* [E,N,K]: Unsloth's, of torch.nn.Linear */
  MOE_GROUPED_EKN = 1, /* [E,K,N]: the layer's, and of gpt-oss and Llama 4 in transformers */
  MOE_GROUPED_ORDER_COUNT_
} moe_grouped_order;

/* Where topk_weights are multiplied: Unsloth's fuse_mul_post and fuse_mul_pre. */
typedef enum moe_topk_mode {
  MOE_TOPK_POST = 0, /* the result, bias included */
  MOE_TOPK_PRE = 1,  /* the row of X: the product sum is multiplied, which is the same, before the bias is added */
  MOE_TOPK_COUNT_
} moe_topk_mode;

/* The num_tokens*topk slots, token*topk + k, are sorted by expert: the first m_sizes[0] positions are expert 0's, the
   next m_sizes[1] expert 1's, and so on. gather_indices[pos] is the slot at position pos (a stable argsort of the
   slots' experts); without gather_indices it is pos. With e the expert of pos, x and dy its rows, b the bias of e or 0,
   w the topk weight of its slot or 1, s = x*W[e]^T and d = dy*W[e], each a sum in binary32:
     forward   Y = (s + b)*w        MOE_TOPK_PRE: s*w + b
     dx        dX = d*w             topk_weights_grad[slot] = <d,x> + <dy,b>      PRE: <d,x>
     dw        dW[e] = dY^T (w*X)   bias_grad[e] = sum of dy*w                    PRE: sum of dy
   w*x is a product in binary32, rounded to the function's type. Dot products are numeric contract 4's; bias_grad is
   summed in the order of positions.
                   row of X                      row of Y and dY        row of dX
     neither       pos                           pos                    pos
     permute_x     gather_indices[pos]/topk      pos                    gather_indices[pos]; with sum_topk the token's
     permute_y     pos                           gather_indices[pos]    pos
   So with permute_x X is [num_tokens,K], and dX has a row for each slot, to be summed over topk by the caller, unless
   sum_topk asks for [num_tokens,K]: with topk > 1 a sum from +0 over the token's slots, in their order, rounded once.
   The positions behind all experts' are padding: their slot may be -1, and any slot that none of the other positions
   has is padding, too. Rows of Y and dX, and elements of topk_weights_grad, of padding become 0, or stay as they are
   where they are accumulated; rows of X and dY are not read. Weights of an expert without rows are not read, and its dW
   and bias_grad are 0. There may be no tokens: tensors without elements may be NULL.
   quantized_W stands for W in forward and dx, as moe_quantized_weight says of the forward and the backward. Groups and
   blocks along K are those of the forward's contraction. An MX weight is one part with N columns, stored as its layout
   has that, whatever weight_order is; so is GROUP: codes [E,N,ceil(K*bits/8)]. With out_in the others are as of
   MOE_GROUPED_ENK, too. Scales:
     STATIC [1]   STATIC_PER_EXPERT [E]   COLUMN [N]   COLUMN_PER_EXPERT [E,N]
     BLOCK [E,ceil(N/block_columns),ceil(K/block),repeat], of MOE_GROUPED_EKN
           [E,ceil(K/block),ceil(N/block_columns),repeat]
     GROUP [E,N,ceil(K/block)], global_scale [E]
   packed_W is made by moe_pack_weights_*, of MOE_GROUPED_ENK as MOE_PACK_GROUPED, of MOE_GROUPED_EKN as MOE_PACK_DOWN
   with rows K and columns N; for dx with `backward`.
   Of Unsloth's other arguments NUM_SMS is ctx.num_threads; TMA, FLATTEN and block sizes have no counterpart.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (negative m_sizes; more rows than positions; packed_W of another shape),
   INVALID_OPTION (also both permutations; sum_topk without permute_x; float scales that are not finite), INVALID_INDEX
   (a slot outside [0,num_tokens*topk) that is not padding's -1; a slot named twice), OVERFLOW, MISALIGNED, OVERLAP,
   WORKSPACE, OUT_OF_MEMORY, UNSUPPORTED (packed_W for another instruction set).
   Source: semantics of Unsloth's grouped_gemm. */
typedef struct moe_grouped_gemm_args {
  int64_t num_tokens, topk, E, N, K; /* tokens (may be 0), experts per token, experts, outputs, contracted elements */
  const int32_t *m_sizes;        /* [E] */
  const int32_t *gather_indices; /* [num_tokens*topk]; may be NULL without a permutation */
  int permute_x, permute_y;      /* one at most is 1 */
  int sum_topk;                  /* dx with permute_x: 1: dX is [num_tokens,K] */
  moe_grouped_order weight_order;
  const void *X;                 /* forward, dw, dx with topk_weights_grad: [num_tokens*topk,K], with permute_x
                                    [num_tokens,K] */
  const void *W;                 /* forward, dx: [E,N,K] or as weight_order says; may be NULL with one of the next */
  const moe_quantized_weight *quantized_W; /* forward, dx (optional): read in place of W */
  const void *packed_W;          /* forward, dx (optional): read in place of both, but for scales */
  size_t packed_W_bytes;
  const void *bias;              /* forward, dx with topk_weights_grad: [E,N] (optional) */
  const void *dY;                /* dx, dw: [num_tokens*topk,N] */
  const float *topk_weights;     /* [num_tokens*topk] by slot (optional) */
  moe_topk_mode topk_mode;
  void *Y;                       /* forward: [num_tokens*topk,N] output */
  void *dX;                      /* dx: [num_tokens*topk,K] or, with sum_topk, [num_tokens,K] output */
  float *topk_weights_grad;      /* dx: [num_tokens*topk] by slot, output (optional) */
  void *dW;                      /* dw: as W, output, weight_grad_dtype */
  void *bias_grad;               /* dw: [E,N] output (optional), weight_grad_dtype */
  moe_dtype weight_grad_dtype;   /* DEFAULT = the function's suffix */
  uint32_t accumulate;           /* MOE_ACCUMULATE_ Y, DX, DW, BIAS_GRAD, TOPK_WEIGHTS_GRAD: added to */
  void *workspace;               /* (optional with an allocator) */
  size_t workspace_bytes;
} moe_grouped_gemm_args;

/* The forward moe_grouped_gemm_<suffix>, then moe_grouped_gemm_dx_<suffix> and moe_grouped_gemm_dw_<suffix>, which read
   and write the tensors marked with their names; and how many bytes of workspace each needs with these args and this
   context's num_threads, which can be asked for before there are tensors: only topk_weights_grad must be NULL or not as
   it will be. */
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
