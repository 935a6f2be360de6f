/* The router: scores and selection, its backward, auxiliary losses, and routing into blocks. */
#ifndef MOE_API_ROUTER_H
#define MOE_API_ROUTER_H

#include "context.h"

#include "begin.h"

/* --------------------------------------------------------------------------------------------------------- router */

typedef enum moe_score_function {
  MOE_SCORE_SOFTMAX = 0,
  MOE_SCORE_SIGMOID = 1,      /* 1/(1+exp(-z)) */
  MOE_SCORE_SQRT_SOFTPLUS = 2, /* sqrt(log(1+exp(z))), below z = -18 computed as exp(z/2), the same within 2^-26 */
  MOE_SCORE_COUNT_
} moe_score_function;

/* Which of the two comes first matters for softmax only: over the K selected logits, or over all E. */
typedef enum moe_score_order {
  MOE_SCORE_AFTER_TOPK = 0, /* top-k on the logits, then the score of the K values (nkilib router_pre_norm=False) */
  MOE_SCORE_BEFORE_TOPK = 1, /* score all E, then top-k */
  MOE_SCORE_ORDER_COUNT_
} moe_score_order;

typedef struct moe_router_config {
  moe_score_function score_function;
  moe_score_order score_order;
  int renormalize;               /* 1: divide the K weights by (their sum + renormalize_epsilon) */
  float renormalize_epsilon;     /* 0 = none; Megatron uses 1e-20 */
  float routed_scaling_factor;   /* multiplies the K weights last; 0 = 1 */
  int32_t num_groups;            /* group-limited selection: E in num_groups equal groups, of which only */
  int32_t topk_groups;           /*   the best topk_groups stay; 0 and 0 = off */
} moe_router_config;

/* logits z[t,e] = sum_h x[t,h]*W[h,e] + b[e] in binary32, or as given. Scores s = score_function(z) as configured. The
   K experts with the largest selection value are taken in descending order; ties go to the lower id, NaN comes last.
   The selection value is z, which orders as s does; with a selection bias or groups it is s (+ selection_bias), where a
   softmax AFTER_TOPK has z for s. A group's value is the sum of its two largest selection values, or its only one.
   Weights w = s at the K experts, renormalised and scaled. Sums run in ascending expert id (all E) or selection order
   (K). Masked tokens get expert_index -1 and weight 0. Formulas: semantics of nkilib router_topk and Megatron
   topk_routing_with_score_function.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (K > E, K > selectable experts, E not divisible by num_groups), INVALID_OPTION,
   MISALIGNED, OVERLAP, OVERFLOW, WORKSPACE. */
typedef struct moe_router_topk_args {
  int64_t T, H, E, K;
  const void *hidden_states;     /* [T,H]; NULL = router_logits is the input (H is then ignored) */
  const void *router_weight;     /* [H,E], with hidden_states */
  const void *router_bias;       /* [E] (optional), with hidden_states */
  float *router_logits;          /* [T,E] output, or the input when hidden_states is NULL */
  const float *selection_bias;   /* [E] (optional), added for selection only (e_score_correction_bias) */
  const uint8_t *token_mask;     /* [T] (optional), 0 = padding token */
  moe_router_config config;
  int32_t *expert_index;         /* [T,K] output */
  float *expert_weights;         /* [T,K] output */
  void *workspace;               /* (optional with an allocator) */
  size_t workspace_bytes;
} moe_router_topk_args;

/* Gradient of moe_router_topk with the selection held fixed. dw comes either as expert_weights_grad [T,K] or gathered
   from expert_affinities_masked_grad [T,E], which is not read beside expert_weights_grad. Slots with expert_index -1
   are absent from every sum, whatever dw holds there, so a token with no others adds nothing to router_logits_grad.
   router_logits_grad[t,e] = (accumulate ? router_logits_grad : 0) + d/dz. Then router_weight_grad = X^T dz,
   router_bias_grad = sum_t dz, hidden_states_grad = dz W^T, each where asked for, with dz the finished
   router_logits_grad, so that auxiliary losses added before this call (accumulate & MOE_ACCUMULATE_ROUTER_LOGITS_GRAD)
   flow through. The selection bias gets none. Errors as moe_router_topk, INVALID_INDEX for an expert_index outside
   [-1,E). */
typedef struct moe_router_topk_bwd_args {
  int64_t T, H, E, K;
  const void *hidden_states;                 /* [T,H], needed for router_weight_grad */
  const void *router_weight;                 /* [H,E], needed for hidden_states_grad */
  const float *router_logits;                /* [T,E] */
  const int32_t *expert_index;               /* [T,K] of the forward */
  moe_router_config config;                  /* of the forward */
  const float *expert_weights_grad;                 /* [T,K], or NULL and: */
  const void *expert_affinities_masked_grad; /* [T,E] (a last row T is not read) */
  moe_dtype affinity_dtype;                  /* of expert_affinities_masked_grad */
  float *router_logits_grad;                        /* [T,E] output */
  void *router_weight_grad;                  /* [H,E] output (optional), weight_grad_dtype */
  void *router_bias_grad;                    /* [E] output (optional), weight_grad_dtype */
  void *hidden_states_grad;                  /* [T,H] output (optional) */
  moe_dtype weight_grad_dtype;
  uint32_t accumulate;                       /* MOE_ACCUMULATE_* bits of the outputs to add to; others are
                                                overwritten */
  void *workspace;
  size_t workspace_bytes;
} moe_router_topk_bwd_args;

#define MOE_DECLARE_ROUTER_(name, type, NAME)                                                            \
  MOE_API moe_status moe_router_topk_##name(moe_context *ctx, const moe_router_topk_args *args);         \
  MOE_API moe_status moe_router_topk_##name##_workspace_size(                                            \
      moe_context *ctx, const moe_router_topk_args *args, size_t *bytes);                                \
  MOE_API moe_status moe_router_topk_bwd_##name(moe_context *ctx, const moe_router_topk_bwd_args *args); \
  MOE_API moe_status moe_router_topk_bwd_##name##_workspace_size(                                        \
      moe_context *ctx, const moe_router_topk_bwd_args *args, size_t *bytes);
MOE_DTYPE_LIST(MOE_DECLARE_ROUTER_)
#undef MOE_DECLARE_ROUTER_

/* Auxiliary losses. Both write *loss and, when router_logits_grad is given, ADD their gradient to it. Tokens whose mask
   is 0 leave the loss, the counts and the token count T' alike. T' = 0 gives loss 0. load balance (Switch, Megatron):
   c*E/(K*T'^2) * sum_e n_e * sum_t p[t,e]; n_e = slots routed to e (a constant), p = softmax over all E, or the sigmoid
   / sqrt-softplus scores divided by their sum. z-loss: c * mean_t (log sum_e exp z[t,e])^2. Sums over tokens run in
   ascending t, a token's over ascending e, with E/(K*T'^2) folded into n_e. The z-loss reads neither K, expert_index
   nor score_function. No workspace; about 60 KiB of stack. Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION,
   INVALID_INDEX, MISALIGNED, OVERLAP. */
typedef struct moe_router_loss_args {
  int64_t T, E, K;
  float coefficient;                 /* c */
  moe_score_function score_function; /* load balance only */
  const float *router_logits;        /* [T,E] */
  const int32_t *expert_index;       /* [T,K], load balance only; -1 = dropped slot */
  const uint8_t *token_mask;         /* [T] (optional) */
  float *loss;                       /* output, one value */
  float *router_logits_grad;                /* [T,E] (optional) */
} moe_router_loss_args;
MOE_API moe_status moe_router_load_balance_loss(moe_context *ctx, const moe_router_loss_args *args);
MOE_API moe_status moe_router_z_loss(moe_context *ctx, const moe_router_loss_args *args);

/* --------------------------------------------------------------------------------------------- routing into blocks */

typedef enum moe_drop_policy {
  MOE_DROP_BY_POSITION = 0, /* beyond capacity, the later tokens are dropped */
  MOE_DROP_BY_WEIGHT = 1,   /* the smallest weights are dropped (ties: the later tokens) */
  MOE_DROP_COUNT_
} moe_drop_policy;

/* Blocks that always suffice for a dropless routing: ceil((T*K - (E-1)) / B) + E-1, never less than 1 (with T*K < E it
   is T*K). 0 when an argument is not positive or the count overflows. */
MOE_API int64_t moe_route_blocks_count(int64_t T, int64_t E, int64_t K, int64_t B);

/* Experts in order, an expert's tokens ascending, ceil(n_e/B) blocks each, tail rows padded; blocks left over go to
   expert E-1, all rows padding, condition 0. With capacity > 0 an expert keeps at most that many tokens. With
   block_per_expert (the dropping layer) N = E, block e is expert e, and capacity defaults to B, its largest value. A
   NaN weight is dropped first. Dropped pairs get affinity 0.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (N too small for this routing), INVALID_OPTION, INVALID_INDEX (an id outside
   [-1,E), or one expert twice for a token), MISALIGNED, OVERLAP, OVERFLOW, WORKSPACE. */
typedef struct moe_route_blocks_args {
  int64_t T, E, K, B, N;
  const int32_t *expert_index;    /* [T,K]; -1 = no expert in this slot */
  const float *expert_weights;    /* [T,K] */
  int skip_token;                 /* padding rows: 0 = id T, affinities have a zero row T; 1 = id -1 */
  int64_t capacity;               /* 0 = dropless */
  moe_drop_policy drop_policy;
  int block_per_expert;
  moe_dtype affinity_dtype;       /* DEFAULT = F32 */
  void *expert_affinities_masked; /* [(T+1)*E], with skip_token [T*E]; output */
  int32_t *token_position_to_id;  /* [N*B] output */
  int32_t *block_to_expert;       /* [N] output */
  int32_t *conditions;            /* [N+1] output (optional): 1 for blocks with a token, then 0 */
  int64_t *tokens_per_expert;     /* [E] output (optional): before dropping */
  void *workspace;
  size_t workspace_bytes;
} moe_route_blocks_args;
MOE_API moe_status moe_route_blocks(moe_context *ctx, const moe_route_blocks_args *args);
MOE_API moe_status moe_route_blocks_workspace_size(moe_context *ctx, const moe_route_blocks_args *args, size_t *bytes);

#include "end.h"

#endif
