/* The layer over blocks of rows, forward and backward: the interface of nki-library's moe_cte and blockwise_mm_bwd,
   with their names. moe_route_blocks makes the blocks. */
#ifndef MOE_API_BLOCKWISE_H
#define MOE_API_BLOCKWISE_H

#include "layer.h"

#include "begin.h"

/* ------------------------------------------------------------------------------------------------------- the layer */

/* What the forward and the backward are both told. All of it is input. */
typedef struct moe_blockwise_layer {
  int64_t T, H, I, E, N, B; /* tokens, hidden size, intermediate size, experts, blocks, rows of a block; T, N from 0 */
  int64_t max_rows;         /* at most so many of the N*B rows hold a token, T*K say: then the workspace is for so many,
                               and more are an INVALID_INDEX; 0 = N*B */

  /* Tokens. */
  const void *hidden_states;            /* [T,H] (row T, if there is one, is not read) */
  const moe_quantized_activation *quantized_hidden_states; /* (optional): read in place of hidden_states */
  const void *expert_affinities_masked; /* [T*E]: of token t and expert e at t*E+e (row T is not read); affinity_dtype.
                                           Not read with NO_SCALE, and may then be NULL */
  moe_dtype affinity_dtype;             /* of the affinities and their gradient; DEFAULT = F32 */

  /* Weights. A quantised one is read in place of the plain one, which may then be NULL; gradients are those of the
     weight that it stands for. So is a packed one (moe_pack_weights), in the forward; the backward reads none. */
  const void *gate_up_proj_weight;           /* [E,H,2,I], gate, then up; or as `orders` say */
  const void *down_proj_weight;              /* [E,I,H], likewise */
  const void *up_proj_weight;                /* with orders.up_apart: up; gate_up_proj_weight is then the gate */
  moe_weight_orders orders;                  /* of plain weights and of all weights' gradients */
  const void *packed_gate_up_proj_weight;    /* (optional): MOE_PACK_GATE_UP, with skip_gate MOE_PACK_UP */
  const void *packed_down_proj_weight;       /* (optional): MOE_PACK_DOWN */
  size_t packed_gate_up_proj_weight_bytes, packed_down_proj_weight_bytes;
  const moe_quantized_weight *quantized_gate_up_proj_weight, *quantized_down_proj_weight; /* (optional, each) */
  const void *gate_and_up_proj_bias;         /* [E,2,I] (optional) */
  const void *down_proj_bias;                /* [E,H] (optional) */

  /* Blocks. */
  const int32_t *token_position_to_id; /* [N*B]: the token of row r of block b at b*B+r; padding rows: see skip_token */
  const int32_t *block_to_expert;      /* [N]; E: the block does nothing. Not read where block e is expert e's */
  const int32_t *conditions;           /* [N] or longer (optional): 1, or 0 for a block that does nothing */
  int skip_token;                      /* padding rows have id T (0) or -1 (1) */
  const int32_t *num_valid_tokens;     /* [1] (optional), 0 to T: tokens from this one on are padding; NULL = T */

  moe_dtype checkpoint_dtype;   /* of gate_up_activations_T, down_activations and scaled_intermediate_checkpoint_T;
                                   DEFAULT = the function's suffix */
  moe_dtype accumulation_dtype; /* of sums over blocks: output, gradients of hidden states and weights. DEFAULT, F32:
                                   binary32, rounded once. The function's suffix: rounded to the tensor's type after
                                   every block, as on the device. No other */
  moe_layer_config config;
  moe_mx_operands mx;
} moe_blockwise_layer;

/* ------------------------------------------------------------------------------------ what the device's kernels ask */

typedef enum moe_shard_option { /* how the device divides the work */
  MOE_SHARD_ON_HIDDEN = 0,
  MOE_SHARD_ON_INTERMEDIATE = 1,
  MOE_SHARD_AUTO = 2,
  MOE_SHARD_COUNT_
} moe_shard_option;

typedef enum moe_quantization_type { /* nkilib's QuantizationType */
  MOE_QUANTIZATION_NONE = 0,
  MOE_QUANTIZATION_STATIC = 1, /* weights are quantised STATIC or STATIC_PER_EXPERT */
  MOE_QUANTIZATION_ROW = 2,    /* COLUMN or COLUMN_PER_EXPERT */
  MOE_QUANTIZATION_MX = 3,
  MOE_QUANTIZATION_STATIC_MX = 4, /* as STATIC; activations under mx.gate_up_in_scale and mx.down_in_scale */
  MOE_QUANTIZATION_ROW_MX = 5,    /* as ROW; hidden states with a scale per token */
  MOE_QUANTIZATION_COUNT_
} moe_quantization_type;

/* How a phase of the device's MXFP8 kernels divides its product. */
typedef struct moe_nkilib_phase {
  int64_t tiles_in_block_m, tiles_in_block_n, tiles_in_block_k; /* 0 = the kernel's own */
  int spill_reload;         /* 1: quantised tiles are kept in memory, and read again */
  int enable_scale_packing; /* 1: their scales are packed */
} moe_nkilib_phase;

/* What nki-library's kernels are told about how to work. Here none of it changes a result or how it is computed; it is
   checked, and device.check_limits looks at it. */
typedef struct moe_nkilib_hints {
  int skip_weight;       /* 1: do not read the weights again for a block of the same expert. They never are, here */
  int pre_scale_delayed; /* 1: PRE_SCALE stands for PRE_SCALE_DELAYED. Both scale after the product, here */
  moe_shard_option shard_option;
  int64_t block_tile_size; /* 0, or a divisor of B */
  /* Of ShardOnBlockConfig. */
  int use_packed_scales;                   /* 1: scales are packed: here the weight's scales_layout says so */
  int non_overlapping_shards;              /* 1: cores write to outputs of their own. Workers always do, here */
  moe_dtype weight_dtype;                  /* of plain weights: DEFAULT, or the function's suffix */
  int64_t top_k;                           /* 0, or 1 to E */
  int64_t ep_degree;                       /* ranks that share the experts; 0 = not said. E is a rank's own */
  moe_quantization_type quantization_type; /* NONE = not said; another must be what the weights are */
  /* Of blockwise_mm_bwd_mxfp8: phases 1 to 4; the first two are the forward's gate_up_config and down_config. */
  moe_nkilib_phase phase[4];
} moe_nkilib_hints;

/* The seven implementations of moe_cte. They compute the same function, from different inputs. */
typedef enum moe_cte_spec {
  MOE_CTE_SHARD_ON_BLOCK = 0,
  MOE_CTE_SHARD_ON_I = 1,
  MOE_CTE_SHARD_ON_I_HYBRID = 2,    /* conditions must be given */
  MOE_CTE_SHARD_ON_I_DROPPING = 3,  /* N = E, and block e is expert e's: block_to_expert is not read */
  MOE_CTE_SHARD_ON_BLOCK_MX = 4,    /* this and the next two: both weights must be quantised to MX */
  MOE_CTE_SHARD_ON_I_MX = 5,
  MOE_CTE_SHARD_ON_I_MX_HYBRID = 6, /* conditions must be given */
  MOE_CTE_COUNT_
} moe_cte_spec;

/* The implementation that a call stands in for. */
typedef struct moe_nkilib_device {
  moe_cte_spec spec;
  int check_limits; /* 1: what that implementation cannot do on the device is a DEVICE_LIMIT */
  int output_shape; /* 0: output is [T,H]. 1: it is as that implementation writes it; what is not a token's row is 0:
                       SHARD_ON_BLOCK [T,2,H], tokens at 0 of the second axis, with not_accumulating [T,H];
                       SHARD_ON_BLOCK_MX [2,T,H], tokens at 0 of the first one; others [T+1,H], with skip_token [T,H] */
} moe_nkilib_device;

/* --------------------------------------------------------------------------------------------------------- forward */

/* For every block that does something, with expert e, and every row of it with a token t, x = hidden_states[t] and a =
   the affinity of t and e:
     g = x*Wg, u = x*Wu; with PRE_SCALE g *= a, u *= a; then g += b_g, u += b_u; then the limits (gate_up_activations_T)
     m = act(g)*(u + up_offset); with ON_I m *= a
     d = m*Wd + b_d, with ON_I m*Wd + a*b_d                                                           (down_activations)
     output[t] += a*d with POST_SCALE, else d
   The sum is formed in binary32, in block order, and rounded once. The output of a token in no block is 0. With
   not_accumulating it is not a sum, but the term of the last block that holds the token. With accumulation_dtype it is
   rounded after every term, and what is there already is its first one.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (also a packed weight of another shape, N != E with SHARD_ON_I_DROPPING),
   INVALID_OPTION (also an MX spec without MX weights, down_activations with ON_I), INVALID_INDEX, OVERFLOW, MISALIGNED,
   OVERLAP, WORKSPACE, OUT_OF_MEMORY, UNSUPPORTED (weights packed for another instruction set), DEVICE_LIMIT.
   Source: semantics of nkilib's moe_cte. */
typedef struct moe_blockwise_mm_fwd_args {
  moe_blockwise_layer layer;
  moe_nkilib_device device;
  moe_nkilib_hints hints;
  int not_accumulating;        /* 1: nkilib's is_tensor_update_accumulating=False */
  uint32_t accumulate;         /* MOE_ACCUMULATE_OUTPUT: the sums are added to output */
  void *gate_up_activations_T; /* [N,2,I,B] output (optional), checkpoint_dtype: g and u, for the backward. What is
                                  between the limits but would be rounded to one is stored as the next number inside,
                                  and likewise what would be rounded across the activation's limit: limits must be two
                                  steps of the type apart. 0 for blocks that do nothing, padding rows, rows that have no
                                  part in the output, and g with skip_gate */
  void *down_activations;      /* [N,B,H] output (optional), checkpoint_dtype: d, for the backward. 0 likewise. There is
                                  none with ON_I */
  void *scaled_intermediate_checkpoint_T; /* [N,I,B] output (optional), checkpoint_dtype: what the down weight's
                                  gradient multiplies, a*m with POST_SCALE and ON_I, else m; not rounded to MX. 0
                                  likewise */
  void *output;                /* [T,H] output, or as device.output_shape says */
  void *workspace;             /* (optional with an allocator) */
  size_t workspace_bytes;
} moe_blockwise_mm_fwd_args;

/* -------------------------------------------------------------------------------------------------------- backward */

/* How the affinities' gradient dA is computed with POST_SCALE and ON_I. d, m, dY: see the backward. */
typedef enum moe_affinity_option {
  MOE_AFFINITY_OPTION_ON_H = 0, /* <dY, d> of down_activations; as ON_I where that is NULL */
  MOE_AFFINITY_OPTION_ON_I = 1, /* <dY*Wd^T, m> + <dY, b_d>: needs no down_activations */
  MOE_AFFINITY_OPTION_COUNT_
} moe_affinity_option;

/* DROPPING: N = E, and block e is expert e's: block_to_expert is not read. */
typedef enum moe_kernel_type { MOE_KERNEL_DROPLESS = 0, MOE_KERNEL_DROPPING = 1, MOE_KERNEL_COUNT_ } moe_kernel_type;

/* The gradients of the forward's output, given dY = output_hidden_states_grad. g and u come from gate_up_activations_T
   or, where that is NULL, are computed again, to the same bits. For every (token t, expert e) row:
     m    = act(g)*(u + up_offset), dm0 = dY*Wd^T, dm = a*dm0 with POST_SCALE and ON_I, else dm0
     dg   = dm*(u + up_offset)*act'(g), 0 unless g, in binary32, is between its limits; du = dm*act(g), likewise. At a
            limit the derivative is 0. The checkpoint tells: it holds a limit only where g or u is limited, and is on
            act(g)'s side of the activation's
     dX   = dg*Wg^T + du*Wu^T, one product sum over 2I; with PRE_SCALE times a
     dA   = as affinity_option says with POST_SCALE and ON_I; <dg*Wg^T + du*Wu^T, x> with PRE_SCALE; 0 with NO_SCALE
     dWgu = x^T [dg|du], with PRE_SCALE x^T [a*dg|a*du]; dbgu = sum [dg|du]
     dWd  = (a*m)^T dY, dbd = sum a*dY; without a with NO_SCALE and PRE_SCALE
   With scaled_intermediate_checkpoint_T a*m, without a with NO_SCALE and PRE_SCALE, is read from there for dWd, and not
   computed again. Its m comes from g and u before they were rounded to checkpoint_dtype: where that is F32, dWd has the
   same bits as without.
   With accumulation_dtype dX is rounded after every block's term, and dWgu and dWd are sums over the expert's blocks: a
   block's products are one product sum, which is added in binary32, and the sum rounded to the tensor's type. What is
   there already is the first term. Along rows, MX groups begin anew at every block.
   A pair (t,e) that occurs twice adds to its dA twice. Gradients that no row adds to are 0, such as an expert's without
   tokens. With skip_gate the gate's gradients are 0, or stay as they are where accumulated. With not_accumulating only
   rows that have a part in the output have gradients. Any gradient pointer may be NULL: that one is not computed.
   nkilib's skip_grad_initialization with its four buffers is MOE_ACCUMULATE_HIDDEN_STATES_GRAD for
   hidden_states_grad_out, _AFFINITIES_GRAD for expert_affinities_masked_grad_out, _GATE_UP_WEIGHT_GRAD for
   gate_up_proj_weight_grad_out and _DOWN_WEIGHT_GRAD for down_proj_weight_grad_out, each given as the gradient of its
   name; without, the buffers are the gradients and no bit is set.
   Errors: as the forward, but for DEVICE_LIMIT and UNSUPPORTED.
   Source: semantics of nkilib's blockwise_mm_bwd. */
typedef struct moe_blockwise_mm_bwd_args {
  moe_blockwise_layer layer;             /* as in the forward */
  const void *gate_up_activations_T;     /* [N,2,I,B] (optional), as the forward wrote it */
  const void *down_activations;          /* [N,B,H] (optional), as the forward wrote it */
  const void *scaled_intermediate_checkpoint_T; /* [N,I,B] (optional), as the forward wrote it */
  const void *output_hidden_states_grad; /* [T,H] */
  const moe_quantized_activation *quantized_output_hidden_states_grad; /* (optional): read in its place */
  moe_nkilib_hints hints;
  int not_accumulating;                  /* as in the forward */
  moe_affinity_option affinity_option;
  moe_kernel_type kernel_type;
  void *hidden_states_grad;              /* [T,H] output (optional) */
  void *expert_affinities_masked_grad;   /* [T*E] output (optional), affinity_dtype */
  void *gate_up_proj_weight_grad;        /* output (optional) in the weight's order, weight_grad_dtype */
  void *down_proj_weight_grad;           /* output (optional), likewise */
  void *up_proj_weight_grad;             /* with orders.up_apart: output (optional), likewise */
  void *gate_and_up_proj_bias_grad;      /* [E,2,I] output (optional), weight_grad_dtype */
  void *down_proj_bias_grad;             /* [E,H] output (optional), weight_grad_dtype */
  moe_dtype weight_grad_dtype;           /* DEFAULT = the function's suffix */
  uint32_t accumulate;                   /* MOE_ACCUMULATE_{HIDDEN_STATES,AFFINITIES}_GRAD and
                                            MOE_ACCUMULATE_{GATE_UP,DOWN}_{WEIGHT,BIAS}_GRAD */
  void *workspace;                       /* (optional with an allocator) */
  size_t workspace_bytes;
} moe_blockwise_mm_bwd_args;

/* moe_blockwise_mm_fwd_<suffix>, moe_blockwise_mm_bwd_<suffix>, and how many bytes of workspace each needs with these
   args and this context's num_threads. A size can be asked for before there are tensors: whether gate_up_activations_T
   and scaled_intermediate_checkpoint_T are NULL matters to the backward's, whether quantised tensors and
   mx.gate_up_in_scale are given to both. */
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
