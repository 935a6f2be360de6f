/* The weights of a blockwise layer as right operands, however they are given: columns of gate and up over H and of down
   over I in the forward, of down over H (columns along I) and of gate and up over both their I (columns along H) in the
   backward. */
#ifndef MOE_LAYER_WEIGHTS_H
#define MOE_LAYER_WEIGHTS_H

MOE_FN void moe_weights_gate_up_as_given_(const void *arg, int64_t expert, moe_b_ *b) {
  const moe_blockwise_ *call = (const moe_blockwise_ *)arg;
  moe_weight_b_(&call->gate_up, call->layer.gate_up_proj_weight, call->layer.packed_gate_up_weight, expert, b);
}

MOE_FN void moe_weights_down_as_given_(const void *arg, int64_t expert, moe_b_ *b) {
  const moe_blockwise_ *call = (const moe_blockwise_ *)arg;
  moe_weight_b_(&call->down, call->layer.down_proj_weight, call->layer.packed_down_weight, expert, b);
}

MOE_FN void moe_weights_down_transposed_as_given_(const void *arg, int64_t expert, moe_b_ *b) {
  const moe_blockwise_ *call = (const moe_blockwise_ *)arg;
  const moe_blockwise_layer *l = &call->layer;
  const int64_t stride = l->H * call->size;
  if (call->down.quantized.weight)
    moe_quantized_b_(&call->down.quantized, expert, 1, b);
  else
    moe_b_transposed_(b, (const char *)l->down_proj_weight + expert * l->I * stride, stride, l->I, call->dtype, l->H);
}

/* With skip_gate over up alone. */
MOE_FN void moe_weights_gate_up_transposed_as_given_(const void *arg, int64_t expert, moe_b_ *b) {
  const moe_blockwise_ *call = (const moe_blockwise_ *)arg;
  const moe_blockwise_layer *l = &call->layer;
  const int64_t stride = 2 * l->I * call->size, from = call->glu.skip_gate ? l->I : 0;
  if (call->gate_up.quantized.weight)
    moe_quantized_b_(&call->gate_up.quantized, expert, 1, b);
  else
    moe_b_transposed_(b, (const char *)l->gate_up_proj_weight + expert * l->H * stride + from * call->size, stride,
                      l->H, call->dtype, 2 * l->I - from);
}

/* A quantised weight is rounded already along the forward's contraction. */
MOE_FN void moe_weights_gate_up_(const moe_blockwise_ *call, int64_t expert, moe_b_ *b) {
  moe_weights_gate_up_as_given_(call, expert, b);
  if (!call->gate_up.quantized.weight) moe_rounded_b_(&call->rounded_gate_up, expert, b);
}

MOE_FN void moe_weights_down_(const moe_blockwise_ *call, int64_t expert, moe_b_ *b) {
  moe_weights_down_as_given_(call, expert, b);
  if (!call->down.quantized.weight) moe_rounded_b_(&call->rounded_down, expert, b);
}

MOE_FN void moe_weights_down_transposed_(const moe_blockwise_ *call, int64_t expert, moe_b_ *b) {
  moe_weights_down_transposed_as_given_(call, expert, b);
  moe_rounded_b_(&call->rounded_down_transposed, expert, b);
}

MOE_FN void moe_weights_gate_up_transposed_(const moe_blockwise_ *call, int64_t expert, moe_b_ *b) {
  moe_weights_gate_up_transposed_as_given_(call, expert, b);
  moe_rounded_b_(&call->rounded_gate_up_transposed, expert, b);
}

/* What a quantised weight stands for is a float. The call must stay where it is. */
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
