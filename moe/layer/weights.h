/* The weights of a blockwise layer as B, plain, packed or quantised. Forward: columns of gate and up over H, columns of
   down over I. Backward: columns along I over H (down), columns along H over both I (gate and up). Each function's
   first argument is a moe_blockwise_. */
#ifndef MOE_LAYER_WEIGHTS_H
#define MOE_LAYER_WEIGHTS_H

/* The tensor in which the first part that is used lies. */
MOE_FN const void *moe_weights_gate_up_plain_(const moe_blockwise_ *call) {
  const moe_blockwise_layer *l = &call->layer;
  return l->orders.up_apart && call->glu.skip_gate ? l->up_proj_weight : l->gate_up_proj_weight;
}

MOE_FN void moe_weights_gate_up_as_given_(const void *arg, int64_t expert, moe_b_ *b) {
  const moe_blockwise_ *call = (const moe_blockwise_ *)arg;
  moe_weight_b_(&call->gate_up, moe_weights_gate_up_plain_(call), call->layer.packed_gate_up_proj_weight, expert, b);
}

MOE_FN void moe_weights_down_as_given_(const void *arg, int64_t expert, moe_b_ *b) {
  const moe_blockwise_ *call = (const moe_blockwise_ *)arg;
  moe_weight_b_(&call->down, call->layer.down_proj_weight, call->layer.packed_down_proj_weight, expert, b);
}

MOE_FN void moe_weights_down_transposed_as_given_(const void *arg, int64_t expert, moe_b_ *b) {
  const moe_blockwise_ *call = (const moe_blockwise_ *)arg;
  if (call->down.quantized.weight) moe_quantized_b_(&call->down.quantized, expert, 1, b);
  else moe_plain_b_of_(&call->down, call->layer.down_proj_weight, expert, 1, b);
}

/* With skip_gate up only. */
MOE_FN void moe_weights_gate_up_transposed_as_given_(const void *arg, int64_t expert, moe_b_ *b) {
  const moe_blockwise_ *call = (const moe_blockwise_ *)arg;
  if (call->gate_up.quantized.weight) moe_quantized_b_(&call->gate_up.quantized, expert, 1, b);
  else moe_plain_b_of_(&call->gate_up, moe_weights_gate_up_plain_(call), expert, 1, b);
}

/* Rounded to MX if that is wanted; a quantised weight is already, along the forward's contraction. */
MOE_FN void moe_weights_gate_up_(const void *arg, int64_t expert, moe_b_ *b) {
  const moe_blockwise_ *call = (const moe_blockwise_ *)arg;
  moe_weights_gate_up_as_given_(call, expert, b);
  if (!call->gate_up.quantized.weight) moe_rounded_b_(&call->rounded_gate_up, expert, b);
}

MOE_FN void moe_weights_down_(const void *arg, int64_t expert, moe_b_ *b) {
  const moe_blockwise_ *call = (const moe_blockwise_ *)arg;
  moe_weights_down_as_given_(call, expert, b);
  if (!call->down.quantized.weight) moe_rounded_b_(&call->rounded_down, expert, b);
}

MOE_FN void moe_weights_down_transposed_(const void *arg, int64_t expert, moe_b_ *b) {
  const moe_blockwise_ *call = (const moe_blockwise_ *)arg;
  moe_weights_down_transposed_as_given_(call, expert, b);
  moe_rounded_b_(&call->rounded_down_transposed, expert, b);
}

MOE_FN void moe_weights_gate_up_transposed_(const void *arg, int64_t expert, moe_b_ *b) {
  const moe_blockwise_ *call = (const moe_blockwise_ *)arg;
  moe_weights_gate_up_transposed_as_given_(call, expert, b);
  moe_rounded_b_(&call->rounded_gate_up_transposed, expert, b);
}

/* The elements of a quantised weight are floats. The call must not move afterwards. */
MOE_FN void moe_weights_resolve_(moe_blockwise_ *call) {
  const moe_mx_round_ *round = &call->round_weights;
  const int64_t H = call->layer.H, I = call->layer.I;
  const moe_dtype gate_up = call->gate_up.quantized.weight ? MOE_DTYPE_F32 : call->dtype;
  const moe_dtype down = call->down.quantized.weight ? MOE_DTYPE_F32 : call->dtype;
  call->rounded_gate_up = (moe_rounded_){round, moe_weights_gate_up_as_given_, call, H, gate_up};
  call->rounded_down = (moe_rounded_){round, moe_weights_down_as_given_, call, I, down};
  call->rounded_down_transposed = (moe_rounded_){round, moe_weights_down_transposed_as_given_, call, H, down};
  call->rounded_gate_up_transposed = (moe_rounded_){round, moe_weights_gate_up_transposed_as_given_, call, I, gate_up};
}

#endif
