/* The dense gated MLP of MXFP8 operands, forward and backward, and the product that it is made of: the interface of
   nki-library's mlp_bwd_mxfp8 and matmul_mxfp8, with their names. */
#ifndef MOE_API_MLP_H
#define MOE_API_MLP_H

#include "layer.h"

#include "begin.h"

/* --------------------------------------------------------------------------------------------------------- operands */

/* An operand [F,K] of a product that contracts K. Products take bf16 values rounded to MX in groups of 32 along K: what
   moe_dequantize_mx makes of what moe_quantize_mx makes of them. An operand is one of
     plain            data is bf16 [F,K]
     swizzled         data is bf16 [K/4,F,4]: the positions of layout, as in NKI_WRAPX*, 1X32, but values for codes
     fp8, swizzled    data is codes as layout has them, with scales
     fp8              data is codes as moe_quantize_mx writes them, with scales: the PLAIN layout
   fp8 operands are multiplied as they are, and need not have been quantised by the same rule. Where the other axis is
   contracted, they are decoded to bf16, and that is rounded.
   Source: semantics of nkilib's mlp_bwd_mxfp8: *_scales, *_is_swizzled. */
typedef struct moe_mxfp8_operand {
  const void *data;            /* NULL: the operand is not given */
  const uint8_t *scales;       /* NULL: data is bf16 */
  int is_swizzled;
  moe_mx_scales scales_layout; /* read with scales. OWN, or with is_swizzled NKI_OVERSIZED, NKI_PACKED */
} moe_mxfp8_operand;

/* How operands are rounded. */
typedef struct moe_mxfp8_format {
  moe_element element;       /* E4M3FN, E5M2 or E4M3. Numbers that are too large become the largest */
  int use_scale_rule;        /* 0: NKI_ALT, which is the device's; 1: scale_rule is read */
  moe_scale_rule scale_rule;
  moe_mx_layout layout;      /* which elements are a group, and how swizzled operands lie: PLAIN or NKI_1X32, 32 in
                                succession; NKI_WRAPX, NKI_WRAPX_WHOLE, for which every contracted axis must be a
                                multiple of 32. The device's swizzle is NKI_WRAPX. No operand is swizzled under PLAIN */
} moe_mxfp8_format;

/* ---------------------------------------------------------------------------------------------------------- product */

/* output = a*b^T, one chain of fused multiply-adds per element (contract 1), rounded once.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, OVERFLOW, MISALIGNED, OVERLAP, WORKSPACE, OUT_OF_MEMORY.
   Source: semantics of nkilib's matmul_mxfp8. */
typedef struct moe_matmul_mxfp8_args {
  int64_t M, N, K;        /* M and K from 0: sums of nothing are 0 */
  moe_mxfp8_format format;
  moe_mxfp8_operand a, b; /* [M,K], [N,K] */
  void *output;           /* [M,N] output, output_dtype */
  moe_dtype output_dtype; /* DEFAULT = BF16 */
  void *workspace;        /* (optional with an allocator) */
  size_t workspace_bytes;
} moe_matmul_mxfp8_args;

/* -------------------------------------------------------------------------------------------------------------- MLP */

/* What nki-library's kernels are told about how to work. It is checked, and changes nothing here. */
typedef struct moe_mlp_hints {
  int64_t tiles[5][3]; /* recompute, phases 1 to 4: tiles of a block along M, N, K; 0 = the device's default */
  int spill_reload, use_scale_packing, run_with_lnc2;
} moe_mlp_hints;

/* What all functions of the MLP are told. */
typedef struct moe_mlp_mxfp8 {
  int64_t S, H, I;          /* tokens, from 0; hidden size, intermediate size */
  moe_mxfp8_format format;
  moe_layer_config config;  /* skip_gate and affinity_mode must be 0 */
  int unrounded_gate_act;   /* 1: a gate_act that is computed is used in binary32, as in the layer. 0: it is rounded to
                               bf16, as a given one is, so that what is given never matters to a result */
  moe_mlp_hints hints;
} moe_mlp_mxfp8;

/* gate_pre = X*Wg^T and up = X*Wu^T, clamped, then rounded to bf16; gate_act = act(gate_pre), rounded; hidden =
   gate_act*(up + up_offset), rounded; output = hidden*Wd^T, rounded. Any of the four that is not NULL is saved, for the
   backward. Of the tokens those from row_base on are computed, row_count of them: calls for other rows write other
   memory, and give the same bits as one call for all.
   Errors: as moe_matmul_mxfp8. */
typedef struct moe_mlp_fwd_mxfp8_args {
  moe_mlp_mxfp8 mlp;
  int64_t row_base, row_count;       /* of the tokens; row_count 0: all from row_base on */
  moe_mxfp8_operand hidden_states;   /* [S,H]: X */
  moe_mxfp8_operand gate_up_weights; /* [2I,H]: Wg, then Wu */
  moe_mxfp8_operand down_weight;     /* [H,I]: Wd */
  void *gate_pre, *gate_act, *up, *hidden; /* [S,I] bf16 outputs (optional, each) */
  void *output;                      /* [S,H] bf16 output */
  void *workspace;                   /* (optional with an allocator) */
  size_t workspace_bytes;
} moe_mlp_fwd_mxfp8_args;

/* The gradients of that, given dY. A tensor is rounded along the axis that a product contracts, so in each phase
   otherwise; gradients pass through the rounding unchanged.
     recompute  gate_pre = X*Wg^T, up = X*Wu^T (along H)                  where they are needed and NULL
                gate_act = act(gate_pre), hidden = gate_act*(up + up_offset)                    likewise
     phase 1    dm = dY*Wd (along H); d_gate = dm*(up + up_offset)*act'(gate_pre), 0 unless gate_pre is between its
                limits, rounded to bf16; d_up = dm*gate_act, likewise. gate_pre and up are what the forward went on
                with, rounded to bf16, and so are the limits here: at a limit the derivative is 0
     phase 2    hidden_states_grad = d_gate*Wg + d_up*Wu, one sum over 2I (along I, anew at up)
     phase 3    gate_up_weight_grad = [d_gate|d_up]^T X (along S)
     phase 4    down_weight_grad = dY^T hidden (along S)
   Operands named *_T are the transposes of others. Where one is not given it is made from the other:
     hidden_states_T from hidden_states, output_grad_T from output_grad, hidden_T from hidden, gate_weight_T and
     up_weight_T from gate_up_weights, down_weight_T from down_weight
   An operand is read, and must be given, only where something that is wanted needs it. */
typedef struct moe_mlp_bwd_mxfp8_args {
  moe_mlp_mxfp8 mlp;
  int64_t row_base, row_count;          /* in functions of a phase; see there */
  moe_mxfp8_operand output_grad;        /* [S,H]: dY */
  moe_mxfp8_operand hidden_states;      /* [S,H]: X */
  moe_mxfp8_operand gate_up_weights;    /* [2I,H] */
  moe_mxfp8_operand gate_weight_T, up_weight_T; /* [H,I] */
  moe_mxfp8_operand down_weight;        /* [H,I] */
  moe_mxfp8_operand down_weight_T;      /* [I,H] */
  moe_mxfp8_operand hidden_states_T, output_grad_T; /* [H,S] */
  moe_mxfp8_operand hidden_T;           /* [I,S] */
  const void *gate_pre, *gate_act, *up, *hidden;    /* [S,I] bf16 (optional, each): checkpoints */
  void *gate_pre_scratch, *gate_act_scratch, *up_scratch, *hidden_scratch; /* [S,I] bf16 outputs (optional, each): what
                                           is computed for want of a checkpoint. All that are given are written, unless
                                           the checkpoint is given as well */
  void *d_gate, *d_up;                  /* [S,I] bf16 outputs (optional, each) */
  void *d_gate_up_T;                    /* [2I,S] bf16 output (optional): both transposed */
  void *hidden_states_grad;             /* [S,H] bf16 output (optional) */
  void *gate_up_weight_grad;            /* [2I,H] output (optional), weight_grad_dtype */
  void *down_weight_grad;               /* [H,I] output (optional), weight_grad_dtype */
  moe_dtype weight_grad_dtype;          /* DEFAULT = BF16 */
  uint32_t accumulate;                  /* MOE_ACCUMULATE_{GATE_UP,DOWN}_WEIGHT_GRAD */
  void *workspace;                      /* (optional with an allocator) */
  size_t workspace_bytes;
} moe_mlp_bwd_mxfp8_args;

/* The forward; the backward; and the backward's phases one at a time, for callers that divide it. A phase computes rows
   [row_base, row_base+row_count) of its results (row_count 0: all from row_base on), which lie in whole tensors, and
   writes nothing else: calls for other rows may run at the same time. All rows of a phase must be there before the next.
     recompute, 1, 2  rows of S. recompute writes the scratch tensors. Phase 1 reads gate_pre and up, and gate_act if it
                      is given, and writes d_gate, d_up (both wanted) and d_gate_up_T. Phase 2 reads d_gate, d_up
     3                rows of 2I. It reads d_gate_up_T or, where that is NULL, d_gate and d_up
     4                rows of H. Where hidden_T and hidden are not given, it needs up, and gate_act or gate_pre
   Errors: as moe_matmul_mxfp8. row_base and row_count that are no rows of the result are an INVALID_SHAPE. */
#define MOE_MXFP8_LIST(X)                                    \
  X(moe_matmul_mxfp8, moe_matmul_mxfp8_args)                 \
  X(moe_mlp_fwd_mxfp8, moe_mlp_fwd_mxfp8_args)               \
  X(moe_mlp_bwd_mxfp8, moe_mlp_bwd_mxfp8_args)               \
  X(moe_mlp_bwd_mxfp8_recompute, moe_mlp_bwd_mxfp8_args)     \
  X(moe_mlp_bwd_mxfp8_phase1, moe_mlp_bwd_mxfp8_args)        \
  X(moe_mlp_bwd_mxfp8_phase2, moe_mlp_bwd_mxfp8_args)        \
  X(moe_mlp_bwd_mxfp8_phase3, moe_mlp_bwd_mxfp8_args)        \
  X(moe_mlp_bwd_mxfp8_phase4, moe_mlp_bwd_mxfp8_args)

/* Each, and how many bytes of workspace it needs with these args and this context's num_threads: which tensors are NULL,
   and in which state operands are, matters to it; what the others point to does not. */
#define MOE_DECLARE_MXFP8_(function, args_type)                          \
  MOE_API moe_status function(moe_context *ctx, const args_type *args);  \
  MOE_API moe_status function##_workspace_size(moe_context *ctx, const args_type *args, size_t *bytes);
MOE_MXFP8_LIST(MOE_DECLARE_MXFP8_)
#undef MOE_DECLARE_MXFP8_

/* Which of `rows` rows shard number `shard` of num_shards has: row_count of them from row_base on. Shards have all rows
   between them, and none twice; the first ones may have one more than the others. A shard may have none, at the end, and
   its calls then do nothing. Source: semantics of nkilib's get_program_sharding_info.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (num_shards < 1, rows < 0), INVALID_INDEX (shard outside [0,num_shards)). */
MOE_API moe_status moe_program_sharding_info(moe_context *ctx, int64_t num_shards, int64_t shard, int64_t rows,
                                             int64_t *row_base, int64_t *row_count);

#include "end.h"

#endif
