/* The layer as a trainer calls it: from the router's top-k to outputs and gradients, two calls. */
#ifndef MOE_API_MOE_LAYER_H
#define MOE_API_MOE_LAYER_H

#include "layer.h"

#include "begin.h"

/* The same function as the blockwise layer's, to the bit, where its blocks are the experts in ascending order and their
   tokens are: every sum over experts, and every gradient that sums an expert's tokens, is in that order. There are no
   blocks, no padding and no affinities [T,E]; what is kept for the backward is rows. All of it is input. */
typedef struct moe_layer {
  int64_t T, H, I, E, K;      /* tokens, hidden size, intermediate size, experts, experts per token */
  const void *x;              /* [T,H] */
  int64_t identity_experts;   /* how many ids, from E on, are of experts that do nothing: y += w*x, w of topk_weights, 1
                                 with NO_SCALE. These terms come last, a token's by k */
  const int32_t *topk_index;  /* [T,K]: the experts of a token; -1: none. One may occur twice: both count */
  const float *topk_weights;  /* [T,K]: the affinities of these pairs. Not read with NO_SCALE, and may then be NULL */

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
  void *gate_up, *down, *up;  /* outputs, as the weights; weight_dtype. up: with orders.up_apart */
  void *gate_up_bias;         /* [E,2,I] output, weight_dtype */
  void *down_bias;            /* [E,H] output, weight_dtype */
  moe_dtype weight_dtype;     /* DEFAULT = the function's suffix */
  uint32_t accumulate;        /* MOE_ACCUMULATE_{HIDDEN_STATES,AFFINITIES}_GRAD, of x and topk_weights, and
                                 MOE_ACCUMULATE_{GATE_UP,DOWN}_{WEIGHT,BIAS}_GRAD */
} moe_layer_grads;

/* moe_layer_forward_<suffix>: y [T,H] is the layer of x. saved (optional): moe_layer_saved_bytes_<suffix> bytes,
   aligned to an element, which the backward reads: g and u of every pair, [pairs,2,I] in the order of the sums.
   moe_layer_backward_<suffix>: the gradients, given y_grad [T,H]. Where saved is NULL, g and u are computed again, to
   the same bits. topk_weights' gradient is formed as MOE_AFFINITY_OPTION_ON_I does; of identity experts it is <dY,x>.
   The rest is as moe_blockwise_mm_fwd and _bwd say. What each needs of workspace depends on whether saved is NULL and
   on this context's num_threads; it can be asked for before there are tensors.
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
