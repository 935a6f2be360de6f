/* Weights packed once. For weights that do not change, products then pack nothing. */
#ifndef MOE_API_PACK_H
#define MOE_API_PACK_H

#include "layer.h"

#include "begin.h"

/* Which weight is packed. */
typedef enum moe_pack_layout {
  MOE_PACK_GATE_UP = 0, /* gate_up_proj_weight [E,H,2,I]: rows H, columns I */
  MOE_PACK_UP = 1,      /* the same, of which layers with skip_gate read the up projection only */
  MOE_PACK_DOWN = 2,    /* down_proj_weight [E,I,H]: rows I, columns H; grouped GEMM's W [E,K,N]: rows K, columns N */
  MOE_PACK_GROUPED = 3, /* W [E,N,K] of grouped GEMM: rows N, columns K */
  MOE_PACK_COUNT_
} moe_pack_layout;

/* Writes a weight in the order in which micro-kernels read it. Results are to the bit those of the plain weight. What
   is packed is for one element type and for the instruction set in use: a call with another one returns UNSUPPORTED. Of
   a quantised weight the values that the forward (with backward: dx) multiplies are packed. A call that is given them
   must be given the quantised weight as well, for its scales.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION (also backward of GATE_UP and UP), OVERFLOW, MISALIGNED,
   OVERLAP, WORKSPACE (packed_bytes is too small). */
typedef struct moe_pack_weights_args {
  moe_pack_layout layout;
  int backward;                                 /* 1: of DOWN and GROUPED, for the dx of grouped GEMM */
  int64_t E, rows, columns;
  const void *weight;                           /* [E,rows,2,columns], or [E,rows,columns] of DOWN and GROUPED; or as
                                                   the orders say, but for GROUPED */
  const void *up_weight;                        /* with orders.up_apart: up; weight is then the gate, unread for UP */
  moe_weight_orders orders;                     /* of the plain weight */
  const moe_quantized_weight *quantized_weight; /* (optional): read in place of weight */
  void *packed;                                 /* output of packed_bytes bytes, aligned to 64 bytes */
  size_t packed_bytes;
} moe_pack_weights_args;

/* moe_pack_weights_<suffix>, and how many bytes `packed` must have. */
#define MOE_DECLARE_PACK_(name, type, NAME)                                                              \
  MOE_API moe_status moe_pack_weights_##name(moe_context *ctx, const moe_pack_weights_args *args);       \
  MOE_API moe_status moe_pack_weights_##name##_size(moe_context *ctx, const moe_pack_weights_args *args, \
                                                    size_t *bytes);
MOE_DTYPE_LIST(MOE_DECLARE_PACK_)
#undef MOE_DECLARE_PACK_

#include "end.h"

#endif
