/* The layer on blocks of rows: the interface of nki-library's moe_cte and blockwise_mm_bwd. */
#ifndef MOE_API_BLOCKWISE_H
#define MOE_API_BLOCKWISE_H

#include "layer.h"

#include "begin.h"

/* What forward and backward share, so that they cannot disagree. */
typedef struct moe_blockwise_layer {
  int64_t T, H, I, E, N, B;             /* tokens, hidden, intermediate, experts, blocks, rows per block; all from 1 */
  int64_t max_rows;                     /* (optional) at most so many of the N*B rows hold a token, T*K say: the
                                           workspace is for so many, and more are an INVALID_INDEX */
  const void *hidden_states;            /* [T,H] (a padding row T, if there is one, is not read) */
  const moe_quantized_activation *quantized_hidden_states; /* (optional): in place of hidden_states, then not read */
  const void *expert_affinities_masked; /* [T*E] at t*E+e (row T is not read); NULL only with NO_SCALE */
  moe_dtype affinity_dtype;             /* of the affinities and their gradient */
  const void *gate_up_proj_weight;      /* [E,H,2,I]: gate, then up (forward: optional beside its packed form) */
  const void *down_proj_weight;         /* [E,I,H] (likewise) */
  const void *packed_gate_up_proj_weight;    /* (optional): from moe_pack_weights with MOE_PACK_GATE_UP, or MOE_PACK_UP
                                                */
  const void *packed_down_proj_weight;       /* (optional): MOE_PACK_DOWN. The backward reads neither */
  size_t packed_gate_up_proj_weight_bytes, packed_down_proj_weight_bytes;
  const moe_quantized_weight *quantized_gate_up_proj_weight; /* (optional): in place of gate_up_proj_weight, which is
                                                                not */
  const moe_quantized_weight *quantized_down_proj_weight;    /* read; likewise. Gradients: of the weight it stands for
                                                                */
  const void *gate_and_up_proj_bias;    /* [E,2,I] (optional) */
  const void *down_proj_bias;           /* [E,H] (optional) */
  const int32_t *token_position_to_id;  /* [N*B]: token of row r of block b at b*B+r */
  const int32_t *block_to_expert;       /* [N]; E = the block does nothing. NULL with dropping: block e is expert e */
  const int32_t *conditions;            /* [N] or longer (optional): blocks with 0 do nothing */
  int skip_token;                       /* padding rows have id T (0) or -1 (1) */
  moe_dtype checkpoint_dtype;           /* of both activation checkpoints */
  moe_layer_config config;
  moe_mx_operands mx;
} moe_blockwise_layer;

typedef enum moe_shard_option { /* how the device divides the work */
  MOE_SHARD_ON_HIDDEN = 0,
  MOE_SHARD_ON_INTERMEDIATE = 1,
  MOE_SHARD_AUTO = 2,
  MOE_SHARD_COUNT_
} moe_shard_option;

/* What nki-library's callers tell its kernels, and what changes nothing here. Zero is the default. */
typedef struct moe_nkilib_hints {
  int skip_weight;               /* weights are read once per expert anyway, not once per block */
  int pre_scale_delayed;         /* PRE_SCALE is meant as PRE_SCALE_DELAYED: here both scale after the product */
  moe_shard_option shard_option;
  int64_t block_tile_size;       /* 0, or a divisor of B */
} moe_nkilib_hints;

/* The seven moe_cte implementations, by their own values. They compute the same function; here they choose how work is
   ordered, which metadata is read, and what check_limits checks. The MX ones need quantised weights. */
typedef enum moe_cte_spec {
  MOE_CTE_SHARD_ON_BLOCK = 0,
  MOE_CTE_SHARD_ON_I = 1,
  MOE_CTE_SHARD_ON_I_HYBRID = 2,   /* conditions required */
  MOE_CTE_SHARD_ON_I_DROPPING = 3, /* N = E, block e is expert e; block_to_expert is not read */
  MOE_CTE_SHARD_ON_BLOCK_MX = 4,
  MOE_CTE_SHARD_ON_I_MX = 5,
  MOE_CTE_SHARD_ON_I_MX_HYBRID = 6,
  MOE_CTE_COUNT_
} moe_cte_spec;

/* The device kernel that a call stands in for. Zero is the default. */
typedef struct moe_nkilib_device {
  moe_cte_spec spec;
  int check_limits; /* 1: refuse with DEVICE_LIMIT what the spec's device kernel cannot do */
  int output_shape; /* 0: output is [T,H]. 1: as the spec's device kernel: SHARD_ON_BLOCK [T,2,H] (slot 1 zero) or, not
                       accumulating, [T,H]; SHARD_ON_BLOCK_MX [2,T,H] (second half zero); the others [T+1,H] (row T
                       zero), with skip_token [T,H] */
} moe_nkilib_device;

/* Forward. For each block with expert e, each row with token t, a = affinity[t,e]:
     g = x*Wg, u = x*Wu; with PRE_SCALE g,u *= a; g,u += bias; g,u = max(min(g, upper), lower)
     [gate_up_activations_T]  m = act(g)*(u+up_offset); with ON_I m *= a
     d = m*Wd + b_d           [down_activations]
     output[t] += a*d         (POST_SCALE; d otherwise, with ON_I the bias is a*b_d)
   in binary32, in block order, rounded once on storing. Tokens in no block get 0. Source: nkilib moe_cte.
   With not_accumulating a token's output is that of the last block that names it.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, INVALID_INDEX, OVERFLOW, MISALIGNED, OVERLAP, WORKSPACE,
   OUT_OF_MEMORY, UNSUPPORTED (weights packed for another instruction set), DEVICE_LIMIT. An MX spec without both
   weights quantised to MX is an INVALID_OPTION. */
typedef struct moe_blockwise_mm_fwd_args {
  moe_blockwise_layer layer;
  moe_nkilib_device device;
  moe_nkilib_hints hints;
  int not_accumulating;        /* is_tensor_update_accumulating=False */
  uint32_t accumulate;         /* MOE_ACCUMULATE_OUTPUT: output += instead of output = */
  void *gate_up_activations_T; /* [N,2,I,B] output (optional): g and u after clamping; 0 in idle blocks, for padding and
                                  superseded rows, and in the gate half with skip_gate */
  void *down_activations;      /* [N,B,H] output (optional): d, bias included, affinity not (not with ON_I); 0
                                  likewise */
  void *output;
  void *workspace;
  size_t workspace_bytes;
} moe_blockwise_mm_fwd_args;

typedef enum moe_affinity_option {
  MOE_AFFINITY_OPTION_ON_H = 0, /* dA = <dY, down checkpoint>, or as ON_I where that is NULL */
  MOE_AFFINITY_OPTION_ON_I = 1, /* dA = <dY*Wd^T, m> + <dY, b_d>: needs no down checkpoint */
  MOE_AFFINITY_OPTION_COUNT_
} moe_affinity_option;

typedef enum moe_kernel_type { MOE_KERNEL_DROPLESS = 0, MOE_KERNEL_DROPPING = 1, MOE_KERNEL_COUNT_ } moe_kernel_type;

/* Backward of the above for dY = output_hidden_states_grad; g,u from the checkpoint, or recomputed to the same bits.
     m = act(g)*(u+up_offset), dm0 = dY*Wd^T, dm = a*dm0 (POST_SCALE, ON_I) or dm0
     dA[t,e] = as affinity_option says (POST_SCALE, ON_I); <dX', x> (PRE_SCALE); 0 (NO_SCALE)
     dg = dm*(u+up_offset)*act'(g)*[lower < g < upper], du = dm*act(g)*[lower < u < upper], limits rounded
          to checkpoint_dtype
     dX = dg*Wg^T + du*Wu^T, one product sum over 2I, times a with PRE_SCALE
     dWgu = x^T [dg|du] (times a with PRE_SCALE), dbgu = sum [dg|du], dWd = (a*m)^T dY, dbd = sum a*dY
          (a absent in NO/PRE_SCALE)
   A pair (t,e) that occurs twice sums. Any gradient pointer may be NULL: it is then not computed.
   With skip_gate the gate halves of the gradients are 0 (or left alone where accumulated).
   With not_accumulating, a token's earlier occurrences had no part in the output and get no gradient.
   Errors as the forward. */
typedef struct moe_blockwise_mm_bwd_args {
  moe_blockwise_layer layer;                /* as given to the forward */
  const void *gate_up_activations_T; /* [N,2,I,B] (NULL = recompute) */
  const void *down_activations;      /* [N,B,H] (optional) */
  const void *output_hidden_states_grad;     /* [T,H] */
  const moe_quantized_activation *quantized_output_hidden_states_grad; /* (optional): in its place */
  int not_accumulating;
  moe_nkilib_hints hints;
  moe_affinity_option affinity_option;
  moe_kernel_type kernel_type;               /* DROPPING: N = E, block e is expert e; block_to_expert is not read */
  void *hidden_states_grad;                  /* [T,H] */
  void *expert_affinities_masked_grad;       /* [T*E], affinity_dtype */
  void *gate_up_proj_weight_grad;            /* [E,H,2,I], weight_grad_dtype */
  void *down_proj_weight_grad;               /* [E,I,H], weight_grad_dtype */
  void *gate_and_up_proj_bias_grad;          /* [E,2,I], weight_grad_dtype */
  void *down_proj_bias_grad;                 /* [E,H], weight_grad_dtype */
  moe_dtype weight_grad_dtype;
  uint32_t accumulate;                       /* MOE_ACCUMULATE_* bits */
  void *workspace;
  size_t workspace_bytes;
} moe_blockwise_mm_bwd_args;

/* *bytes for the call with these args and this context's num_threads. Tensors are not read, and may be NULL. */
#define MOE_DECLARE_BLOCKWISE_(name, type, NAME)                                                           \
  MOE_API moe_status moe_blockwise_mm_fwd_##name(moe_context *ctx, const moe_blockwise_mm_fwd_args *args); \
  MOE_API moe_status moe_blockwise_mm_fwd_##name##_workspace_size(                                         \
      moe_context *ctx, const moe_blockwise_mm_fwd_args *args, size_t *bytes);                             \
  MOE_API moe_status moe_blockwise_mm_bwd_##name(moe_context *ctx, const moe_blockwise_mm_bwd_args *args); \
  MOE_API moe_status moe_blockwise_mm_bwd_##name##_workspace_size(                                         \
      moe_context *ctx, const moe_blockwise_mm_bwd_args *args, size_t *bytes);
MOE_DTYPE_LIST(MOE_DECLARE_BLOCKWISE_)
#undef MOE_DECLARE_BLOCKWISE_

#include "end.h"

#endif
