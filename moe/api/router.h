/* The router: scores and the choice of experts, its backward, auxiliary losses, and sorting tokens into blocks. */
#ifndef MOE_API_ROUTER_H
#define MOE_API_ROUTER_H

#include "context.h"

#include "begin.h"

/* --------------------------------------------------------------------------------------------------------- router */

/* From a logit z to a score. */
typedef enum moe_score_function {
  MOE_SCORE_SOFTMAX = 0,
  MOE_SCORE_SIGMOID = 1,       /* 1/(1+exp(-z)) */
  MOE_SCORE_SQRT_SOFTPLUS = 2, /* sqrt(log(1+exp(z))); below z = -18 exp(z/2), which is within 2^-26 of it */
  MOE_SCORE_COUNT_
} moe_score_function;

/* Which comes first, score or top-k. This matters for softmax only: it is over the K selected logits or over all E. */
typedef enum moe_score_order {
  MOE_SCORE_AFTER_TOPK = 0,  /* top-k of the logits, then the scores of the K (nkilib: router_pre_norm=False) */
  MOE_SCORE_BEFORE_TOPK = 1, /* the scores of all E, then top-k */
  MOE_SCORE_ORDER_COUNT_
} moe_score_order;

/* With groups: what a group's value is. */
typedef enum moe_group_score {
  MOE_GROUP_SCORE_TOP2 = 0, /* the sum of its two largest selection values, or its only one (DeepSeek-V3) */
  MOE_GROUP_SCORE_MAX = 1,  /* its largest (DeepSeek-V2) */
  MOE_GROUP_SCORE_COUNT_
} moe_group_score;

typedef struct moe_router_config {
  moe_score_function score_function;
  moe_score_order score_order;
  int renormalize;             /* 1: the K weights are divided by their sum + renormalize_epsilon */
  float renormalize_epsilon;   /* 0 = none; Megatron uses 1e-20 */
  float routed_scaling_factor; /* the K weights are multiplied by it, last; 0 = 1 */
  int32_t num_groups;          /* group-limited selection: the E experts form num_groups equal groups, */
  int32_t topk_groups;         /*   and all K are chosen from the best topk_groups of these; 0 and 0 = off */
  moe_group_score group_score;
  float logit_softcap;         /* logits z act as logit_softcap*tanh(z/logit_softcap); 0 = they are as they are */
} moe_router_config;

/* The router's forward.
     z[t,e] = sum_h hidden_states[t,h]*router_weight[h,e] + router_bias[e], in binary32; or router_logits as given; from
              here on with the softcap, which router_logits do not have
     s      = the score of z, as config says
   The K experts with the largest selection values are chosen, in descending order. Among equal values the lower id
   comes first; NaN comes last. The selection value is z, which orders experts as s does. With a selection bias or
   groups it is s + selection_bias, where for softmax AFTER_TOPK s is z. The weights are s of the K experts,
   renormalised and scaled as config says. Sums over all experts run in ascending id, sums over the K in the order of
   selection. Masked tokens get expert_index -1 and weight 0.
   With indices_given nothing is selected: expert_index holds the experts (routing replay, hash layers), or -1 in a slot
   that has none, which gets weight 0 and has no part in any sum. An id may occur twice. Selection bias and groups have
   no say.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (K > E, K greater than the experts of topk_groups groups, E not divisible by
   num_groups), INVALID_OPTION, INVALID_INDEX (a given id outside [-1,E)), OVERFLOW, MISALIGNED, OVERLAP, WORKSPACE,
   OUT_OF_MEMORY.
   Sources: semantics of nkilib's router_topk and Megatron's topk_routing_with_score_function. */
typedef struct moe_router_topk_args {
  int64_t T, H, E, K;          /* tokens (from 0), hidden size, experts, experts per token */
  const void *hidden_states;   /* [T,H]; NULL: router_logits is an input, and H is not read */
  const void *router_weight;   /* [H,E], router_weight_dtype; not read without hidden_states */
  const void *router_bias;     /* [E] (optional), likewise */
  float *router_logits;        /* [T,E] output; an input where hidden_states is NULL */
  const float *selection_bias; /* [E] (optional): added for the selection only (e_score_correction_bias) */
  const uint8_t *token_mask;   /* [T] (optional): 0 = padding token */
  moe_router_config config;
  int32_t *expert_index;       /* [T,K] output; with indices_given an input, of which masked tokens' become -1 */
  float *expert_weights;       /* [T,K] output */
  int indices_given;           /* 1: expert_index is given */
  moe_dtype router_weight_dtype; /* of the router's weight and bias; DEFAULT = the function's suffix */
  void *workspace;             /* (optional with an allocator) */
  size_t workspace_bytes;
} moe_router_topk_args;

/* The router's backward, for the experts that the forward chose. With dw[t,k] the gradient of expert_weights, dz that
   of the logits:
     dw                 = expert_weights_grad or, where that is NULL, expert_affinities_masked_grad[t,expert_index[t,k]]
     router_logits_grad = dz, or router_logits_grad + dz where accumulated; the products below take the sum
     router_weight_grad = hidden_states^T dz, router_bias_grad = sum_t dz, hidden_states_grad = dz router_weight^T
   So gradients of auxiliary losses that router_logits_grad holds before the call reach the other outputs if it is
   accumulated. A slot with expert_index -1 has no part in any sum, whatever dw is there: a token without experts adds
   nothing. Slots with the same expert count one by one: their parts of dz are added. The selection bias gets no
   gradient.
   Errors: as moe_router_topk; INVALID_INDEX for an expert_index outside [-1,E). */
typedef struct moe_router_topk_bwd_args {
  int64_t T, H, E, K;                        /* as in the forward */
  const void *hidden_states;                 /* [T,H]; read for router_weight_grad only */
  const void *router_weight;                 /* [H,E], router_weight_dtype; read for hidden_states_grad only */
  const float *router_logits;                /* [T,E] */
  const int32_t *expert_index;               /* [T,K], as the forward wrote or was given it */
  moe_router_config config;                  /* as in the forward */
  const float *expert_weights_grad;          /* [T,K], or NULL and: */
  const void *expert_affinities_masked_grad; /* [T,E], affinity_dtype (row T, if there is one, is not read) */
  moe_dtype affinity_dtype;                  /* DEFAULT = F32 */
  float *router_logits_grad;                 /* [T,E] output */
  void *router_weight_grad;                  /* [H,E] output (optional), weight_grad_dtype */
  void *router_bias_grad;                    /* [E] output (optional), weight_grad_dtype */
  void *hidden_states_grad;                  /* [T,H] output (optional) */
  moe_dtype router_weight_dtype;             /* DEFAULT = the function's suffix */
  moe_dtype weight_grad_dtype;               /* DEFAULT = the function's suffix */
  uint32_t accumulate;                       /* MOE_ACCUMULATE_ROUTER_{LOGITS,WEIGHT,BIAS}_GRAD, HIDDEN_STATES_GRAD */
  void *workspace;                           /* (optional with an allocator) */
  size_t workspace_bytes;
} moe_router_topk_bwd_args;

/* moe_router_topk_<suffix>, moe_router_topk_bwd_<suffix>, and how many bytes of workspace each needs with these args
   and this context's num_threads. A size can be asked for before there are tensors; for the backward H = 0 then means
   that no products are wanted. */
#define MOE_DECLARE_ROUTER_(name, type, NAME)                                                            \
  MOE_API moe_status moe_router_topk_##name(moe_context *ctx, const moe_router_topk_args *args);         \
  MOE_API moe_status moe_router_topk_##name##_workspace_size(                                            \
      moe_context *ctx, const moe_router_topk_args *args, size_t *bytes);                                \
  MOE_API moe_status moe_router_topk_bwd_##name(moe_context *ctx, const moe_router_topk_bwd_args *args); \
  MOE_API moe_status moe_router_topk_bwd_##name##_workspace_size(                                        \
      moe_context *ctx, const moe_router_topk_bwd_args *args, size_t *bytes);
MOE_DTYPE_LIST(MOE_DECLARE_ROUTER_)
#undef MOE_DECLARE_ROUTER_

/* ------------------------------------------------------------------------------------------------ auxiliary losses */

/* Both write *loss and add its gradient to router_logits_grad, where that is given. Tokens whose mask is 0 count
   neither in the loss nor in the counts n_e nor in the number of tokens T'. With T' = 0 the loss is 0.
     load balance   c*E/(K*T'^2) * sum_e n_e * sum_t p[t,e]
                    n_e = slots whose expert is e, which has no gradient; p = the softmax over all E, or the sigmoid or
                    square-root-softplus scores divided by their sum
     z-loss         c/T' * sum_t (log sum_e exp z[t,e])^2
   Where tokens are spread over calls or ranks, expert_counts are n_e and total_tokens is T' of all of them: the losses
   then add up to the loss of all, and the gradients are its gradients. With sequence_first the load balance loss is the
   mean of the losses of S sequences of tokens, of those that have a token that counts (DeepSeek-V3's sequence-wise
   loss). With logit_softcap z are the logits as the router's config caps them.
   Sums over tokens run in ascending t, compensated (contract 4), those of a token in ascending e or, of more than 16
   experts, as contract 4's dot products, 64 experts at a time in order; the factor c*E/(K*T'^2) is multiplied with n_e
   first; it is divided by the number of sequences. The z-loss reads neither K nor expert_index nor score_function nor
   what is told of counts and sequences. There is no workspace.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, INVALID_INDEX, OVERFLOW, MISALIGNED, OVERLAP.
   Sources: Switch Transformer and Megatron (load balance), ST-MoE (z-loss). */
typedef struct moe_router_loss_args {
  int64_t T, E, K;
  float coefficient;                 /* c; finite */
  moe_score_function score_function; /* load balance only */
  const float *router_logits;        /* [T,E] */
  const int32_t *expert_index;       /* [T,K], load balance only; -1 = a slot without an expert. Not read, and may be
                                        NULL, with expert_counts */
  const uint8_t *token_mask;         /* [T] (optional): 0 = padding token */
  float *loss;                       /* [1] output */
  float *router_logits_grad;         /* [T,E] (optional): added to */
  float logit_softcap;               /* as in the router's config */
  int64_t total_tokens;              /* T', where it is given; 0 = the tokens of this call */
  const int64_t *expert_counts;      /* [E] (optional): n_e; not with sequence_first, nor is total_tokens */
  int64_t S;                         /* sequences */
  const int64_t *sequence_first;     /* [S+1] (optional): tokens sequence_first[s] to sequence_first[s+1]-1 are sequence
                                        s; from 0 to T, not descending */
} moe_router_loss_args;
MOE_API moe_status moe_router_load_balance_loss(moe_context *ctx, const moe_router_loss_args *args);
MOE_API moe_status moe_router_z_loss(moe_context *ctx, const moe_router_loss_args *args);

/* The bias update of balancing without a loss, which is added for the selection only: experts with fewer tokens than
   the mean get more, those with more get less. Counts are compared exactly.
     selection_bias[e] += rate * sign(sum_i expert_counts[i] - E*expert_counts[e]); with `centered` the mean of all
                          signs is taken from each first
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION (also a negative count), OVERFLOW, MISALIGNED, OVERLAP.
   Sources: DeepSeek-V3, Megatron; torchtitan (centered). */
typedef struct moe_router_bias_update_args {
  int64_t E;
  float rate;                   /* finite; DeepSeek-V3: 0.001 */
  int centered;                 /* 1: the biases' sum stays */
  const int64_t *expert_counts; /* [E]: tokens of each expert since the last update, of all ranks */
  float *selection_bias;        /* [E] is added to */
} moe_router_bias_update_args;
MOE_API moe_status moe_router_bias_update(moe_context *ctx, const moe_router_bias_update_args *args);

/* --------------------------------------------------------------------------------------------- sorting into blocks */

/* Which (token, expert) pairs are dropped where an expert has more than its capacity. */
typedef enum moe_drop_policy {
  MOE_DROP_BY_POSITION = 0, /* those of the last tokens */
  MOE_DROP_BY_WEIGHT = 1,   /* those of the smallest weights, NaN first; of equal ones the last tokens' */
  MOE_DROP_COUNT_
} moe_drop_policy;

/* Blocks that suffice for any dropless routing: ceil((T*K - (E-1)) / B) + E-1, or T*K if that is less than E: 0
   without tokens. 0 also if an argument is not positive or the count overflows. */
MOE_API int64_t moe_route_blocks_count(int64_t T, int64_t E, int64_t K, int64_t B);

/* Sorts (token, expert) pairs into blocks of B rows, each block of one expert: experts in ascending order, an expert's
   tokens in ascending order, ceil(n_e/B) blocks each. The rest of an expert's last block is padding rows. Blocks that
   are not needed belong to expert E-1, hold padding rows only and have condition 0. Dropped pairs get affinity 0.
   An expert that several slots of a token name is one pair, with one row: its weight is the sum of theirs, in order, in
   binary32. The pair's affinity gradient is the gradient of each slot's weight, and moe_router_topk_bwd takes it so.
   (With NO_SCALE the pair's result is added once, with PRE_SCALE x is scaled by the sum.)
   Errors: NULL_ARGUMENT, INVALID_SHAPE (K > E; N too small for this routing; with block_per_expert N != E or
   capacity > B), INVALID_OPTION, INVALID_INDEX (an id outside [-1,E)), OVERFLOW, MISALIGNED, OVERLAP, WORKSPACE,
   OUT_OF_MEMORY. */
typedef struct moe_route_blocks_args {
  int64_t T, E, K, B, N;          /* tokens, experts, experts per token, rows of a block, blocks; T and N from 0 */
  const int32_t *expert_index;    /* [T,K]; -1 = a slot without an expert */
  const float *expert_weights;    /* [T,K] */
  int skip_token;                 /* padding rows have 0: id T, and the affinities have a row T of zeros; 1: id -1 */
  int64_t capacity;               /* an expert's most tokens; 0 = no limit, B with block_per_expert */
  moe_drop_policy drop_policy;
  int block_per_expert;           /* 1: N = E, and block e is expert e's (the dropping layer) */
  moe_dtype affinity_dtype;       /* DEFAULT = F32 */
  void *expert_affinities_masked; /* [(T+1)*E], with skip_token [T*E] output, affinity_dtype: the weight of token t and
                                     expert e at t*E+e, or 0 */
  int32_t *token_position_to_id;  /* [N*B] output: the token of row r of block b at b*B+r */
  int32_t *block_to_expert;       /* [N] output */
  int32_t *conditions;            /* [N+1] output (optional): 1 for blocks with a token; the last one is 0 */
  int64_t *tokens_per_expert;     /* [E] output (optional): before dropping; a token counts once */
  void *workspace;                /* (optional with an allocator) */
  size_t workspace_bytes;
} moe_route_blocks_args;
MOE_API moe_status moe_route_blocks(moe_context *ctx, const moe_route_blocks_args *args);
MOE_API moe_status moe_route_blocks_workspace_size(moe_context *ctx, const moe_route_blocks_args *args, size_t *bytes);

#include "end.h"

#endif
