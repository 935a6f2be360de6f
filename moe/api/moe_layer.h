/* The layer as a trainer calls it: from the router's top-k to outputs and gradients, two calls. */
#ifndef MOE_API_MOE_LAYER_H
#define MOE_API_MOE_LAYER_H

#include "layer.h"
#include "router.h"

#include "begin.h"

/* An expert that every token has, together with those of its top-k: a dense one of its own width I. With its gate its
   result is multiplied by w = 1/(1+exp(-<x,gate>)) (Qwen2-MoE), else by 1 (DeepSeek). Several without a gate are one:
   their I is the sum of theirs. Activation, limits and rounded operands are the layer's, but mx.*_in_scale, which
   only its own experts have. A tensor is as the layer's of the same name with E = 1. */
typedef struct moe_shared_expert {
  int64_t I;                  /* intermediate size */
  const void *gate_up, *down; /* [H,2,I] and [I,H], or as `orders` say */
  const void *up;             /* with orders.up_apart */
  moe_weight_orders orders;
  const void *packed_gate_up, *packed_down; /* (optional, each): packed with E = 1 */
  size_t packed_gate_up_bytes, packed_down_bytes;
  const moe_quantized_weight *quantized_gate_up, *quantized_down; /* (optional, each) */
  const void *gate_up_bias;   /* [2,I] (optional) */
  const void *down_bias;      /* [H] (optional) */
  const void *gate;           /* [H] (optional) */
} moe_shared_expert;

/* Outputs, each as the weight of its name, the gate's only where there is one; any may be NULL. Their type and whether
   they are accumulated is as the layer's own of the same name; the gate's as the router's weight's. */
typedef struct moe_shared_expert_grads {
  void *gate_up, *down, *up, *gate_up_bias, *down_bias, *gate;
} moe_shared_expert_grads;

/* What `saved` does not keep, and the backward computes again: bits of moe_layer.recompute. */
enum { MOE_RECOMPUTE_EXPERTS = 1, MOE_RECOMPUTE_SHARED = 2 };

/* The same function as the blockwise layer's, to the bit, where its blocks are the experts in ascending order and their
   tokens are: every sum over experts, and every gradient that sums an expert's tokens, is in that order. There are no
   blocks, no padding and no affinities [T,E]; what is kept for the backward is rows. A token's sums are over its
   experts in ascending order, then the shared expert, then identity experts by k. All of it is input, but what the
   router writes. */
typedef struct moe_layer {
  int64_t T, H, I, E, K;      /* tokens, hidden size, intermediate size, experts, experts per token */
  const void *x;              /* [T,H] */
  int64_t identity_experts;   /* how many ids, from E on, are of experts that do nothing: y += w*x, w of topk_weights, 1
                                 with NO_SCALE */
  const moe_router_topk_args *router; /* (optional): chooses the experts. It takes x and the layer's T, H and K; its E
                                 is E + identity_experts, and its own T, H, E, K, hidden_states and workspace are not
                                 read. Its router_logits, expert_index and expert_weights are outputs of the forward,
                                 as moe_router_topk says, and inputs of the backward */
  const int32_t *topk_index;  /* [T,K]: the experts of a token; -1: none. One may occur twice: both count. Not read with
                                 a router, nor are: */
  const float *topk_weights;  /* [T,K]: the affinities of these pairs. Not read with NO_SCALE, and may then be NULL */
  const float *expert_scale;  /* [E] (optional): an expert's results are multiplied by it: its pairs' affinities are, in
                                 binary32, first. POST_SCALE and ON_I only */
  const moe_shared_expert *shared; /* (optional) */

  /* Weights. A quantised one is read in place of the plain one, which may then be NULL; so is a packed one, in the
     forward. */
  const void *gate_up, *down; /* [E,H,2,I] and [E,I,H], or as `orders` say */
  const void *up;             /* with orders.up_apart: up; gate_up is then the gate */
  moe_weight_orders orders;   /* of plain weights and of all weights' gradients */
  const void *packed_gate_up; /* (optional): MOE_PACK_GATE_UP, with skip_gate MOE_PACK_UP */
  const void *packed_down;    /* (optional): MOE_PACK_DOWN */
  size_t packed_gate_up_bytes, packed_down_bytes;
  const moe_quantized_weight *quantized_gate_up, *quantized_down; /* (optional, each) */
  const void *gate_up_bias;   /* [E,2,I] (optional) */
  const void *down_bias;      /* [E,H] (optional) */

  const moe_quantized_activation *quantized_x; /* (optional): read in place of x */
  moe_dtype saved_dtype;      /* in which g and u are kept; DEFAULT = the function's suffix */
  uint32_t recompute;         /* MOE_RECOMPUTE_* bits: what is not kept in `saved`. The same in both calls */
  int keep_results;           /* 1: `saved` also keeps the pairs' results d, the backward must be given it, and forms
                                 topk_weights' gradient as MOE_AFFINITY_OPTION_ON_H does. The same in both calls; not
                                 with the affinity mode ON_I */
  moe_layer_config config;
  moe_mx_operands mx;
  uint32_t accumulate;        /* of the forward: MOE_ACCUMULATE_OUTPUT, y is added to */
  void *workspace;            /* (optional with an allocator) */
  size_t workspace_bytes;
} moe_layer;

/* The gradients. Any pointer may be NULL: that one is not computed. */
typedef struct moe_layer_grads {
  void *x;                    /* [T,H] output */
  float *topk_weights;        /* [T,K] output; 0 for pairs without an expert, and with NO_SCALE */
  float *expert_scale;        /* [E] output; as the weights' gradients, only where there is one */
  float *router_logits;       /* [T,E + identity_experts] output, with a router, as are the next two. See
                                 moe_router_topk_bwd_args: what auxiliary losses put there goes on if accumulated */
  void *router_weight;        /* [H,E + identity_experts] output, weight_dtype */
  void *router_bias;          /* [E + identity_experts] output, weight_dtype */
  const moe_shared_expert_grads *shared;
  void *gate_up, *down, *up;  /* outputs, as the weights; weight_dtype. up: with orders.up_apart */
  void *gate_up_bias;         /* [E,2,I] output, weight_dtype */
  void *down_bias;            /* [E,H] output, weight_dtype */
  moe_dtype weight_dtype;     /* DEFAULT = the function's suffix */
  uint32_t accumulate;        /* MOE_ACCUMULATE_HIDDEN_STATES_GRAD of x, _AFFINITIES_GRAD of topk_weights and
                                 expert_scale, _{GATE_UP,DOWN}_{WEIGHT,BIAS}_GRAD, _ROUTER_{LOGITS,WEIGHT,BIAS}_GRAD */
} moe_layer_grads;

/* moe_layer_forward_<suffix>: y [T,H] is the layer of x. saved (optional): moe_layer_saved_bytes_<suffix> bytes,
   aligned to an element, which the backward reads: g and u of every pair and of the shared expert, and what
   keep_results says.
   moe_layer_backward_<suffix>: the gradients, given y_grad [T,H]. Where saved is NULL, all that it would keep is
   computed again, to the same bits. topk_weights' gradient is formed as MOE_AFFINITY_OPTION_ON_I does, times
   expert_scale; of identity experts it is <dY,x>. expert_scale's is the sum of an expert's pairs' w*dA, formed in
   double. With a router topk_weights' gradient goes on to the logits, the router's weight and bias, and x, as the calls
   moe_layer_backward and moe_router_topk_bwd do one after the other: the router's part of x's gradient is added to what
   is stored already. So is then the gate's of the shared expert, which is a router of one expert with sigmoid scores.
   The rest is as moe_blockwise_mm_fwd and _bwd say. What each needs of workspace depends on whether saved is NULL, on
   which gradients are given (workspace_size supposes all) and on this context's num_threads; it can be asked for before
   there are tensors.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (also a packed weight of another shape), INVALID_OPTION, INVALID_INDEX,
   OVERFLOW, MISALIGNED, OVERLAP, WORKSPACE, OUT_OF_MEMORY, UNSUPPORTED (weights packed for another instruction set). */
#define MOE_DECLARE_LAYER_(name, type, NAME)                                                                       \
  MOE_API moe_status moe_layer_forward_##name(moe_context *ctx, const moe_layer *layer, void *y, void *saved);     \
  MOE_API moe_status moe_layer_backward_##name(moe_context *ctx, const moe_layer *layer, const void *saved,        \
                                               const void *y_grad, const moe_layer_grads *grads);                  \
  MOE_API moe_status moe_layer_saved_bytes_##name(moe_context *ctx, const moe_layer *layer, size_t *bytes);        \
  MOE_API moe_status moe_layer_forward_##name##_workspace_size(moe_context *ctx, const moe_layer *layer,           \
                                                               size_t *bytes);                                     \
  MOE_API moe_status moe_layer_backward_##name##_workspace_size(moe_context *ctx, const moe_layer *layer,          \
                                                                const void *saved, size_t *bytes);
MOE_DTYPE_LIST(MOE_DECLARE_LAYER_)
#undef MOE_DECLARE_LAYER_

#include "end.h"

#endif
