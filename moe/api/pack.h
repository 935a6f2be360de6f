/* Weights packed once, for weights that do not change. */
#ifndef MOE_API_PACK_H
#define MOE_API_PACK_H

#include "quantize.h"

#include "begin.h"

/* ------------------------------------------------------------------------------------------------------- prepacking */

/* Weights in the layout the products consume, for weights that do not change: packing then costs nothing per call. The
   bits are those of the plain weights. The layout depends on the instruction set in use; a call that meets another
   one's layout returns MOE_ERROR_UNSUPPORTED. */
typedef enum moe_pack_layout {
  MOE_PACK_GATE_UP = 0, /* gate_up_proj_weight [E,H,2,I] */
  MOE_PACK_UP = 1,      /* the same, for layers with skip_gate: the up half only */
  MOE_PACK_DOWN = 2,    /* down_proj_weight [E,I,H] */
  MOE_PACK_GROUPED = 3, /* W [E,N,K] of moe_grouped_gemm */
  MOE_PACK_COUNT_
} moe_pack_layout;

/* Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, OVERFLOW, MISALIGNED, OVERLAP, WORKSPACE (packed_bytes too
   small). */
typedef struct moe_pack_weights_args {
  moe_pack_layout layout;
  int64_t E, rows, columns; /* of the tensor above: H,I or I,H or N,K */
  const void *weight;
  const moe_quantized_weight *quantized_weight; /* (optional) instead of weight, not of GROUPED. What is packed is w as
                                                   in the forward, so a call wants such a weight's float scales beside
                                                   it */
  void *packed;             /* output, aligned to 64 bytes */
  size_t packed_bytes;
} moe_pack_weights_args;

#define MOE_DECLARE_PACK_(name, type, NAME)                                                              \
  MOE_API moe_status moe_pack_weights_##name(moe_context *ctx, const moe_pack_weights_args *args);       \
  MOE_API moe_status moe_pack_weights_##name##_size(moe_context *ctx, const moe_pack_weights_args *args, \
                                                    size_t *bytes);
MOE_DTYPE_LIST(MOE_DECLARE_PACK_)
#undef MOE_DECLARE_PACK_

#include "end.h"

#endif
