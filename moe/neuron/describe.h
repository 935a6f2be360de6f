/* One function per operation makes the table of its tensors: names, memory, sizes, types, what they are. Binding,
   checking, reading back and comparing all go by it. */
#ifndef MOE_NEURON_DESCRIBE_H
#define MOE_NEURON_DESCRIBE_H

/* -------------------------------------------------------------------------------------------------------- the layer */

MOE_FN moe_dtype moe_neuron_affinity_dtype_(const moe_blockwise_layer *l) {
  return l->affinity_dtype == MOE_DTYPE_DEFAULT ? MOE_DTYPE_F32 : l->affinity_dtype;
}

/* That no id is out of range: on the device that is found by a fault. */
MOE_FN moe_status moe_neuron_check_ids_(moe_context *ctx, const moe_blockwise_layer *l, int dropping) {
  const int32_t padding = l->skip_token ? -1 : (int32_t)l->T;
  if (l->num_valid_tokens && (*l->num_valid_tokens < 0 || *l->num_valid_tokens > l->T))
    return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_INDEX, "num_valid_tokens must be from 0 to T");
  for (int64_t i = 0; i < l->N * l->B && l->token_position_to_id; i++)
    if (l->token_position_to_id[i] != padding && (l->token_position_to_id[i] < 0 || l->token_position_to_id[i] >= l->T))
      return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_INDEX, "token_position_to_id has %d at %lld, which is no token",
                              (int)l->token_position_to_id[i], (long long)i);
  for (int64_t b = 0; b < l->N && l->block_to_expert && !dropping; b++)
    if (l->block_to_expert[b] < 0 || l->block_to_expert[b] > l->E)
      return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_INDEX, "block_to_expert has %d at %lld, which is no expert",
                              (int)l->block_to_expert[b], (long long)b);
  return MOE_OK;
}

MOE_FN moe_status moe_neuron_add_layer_(moe_context *ctx, moe_neuron_call_ *call, const moe_blockwise_layer *l,
                                        int dropping, int mx_bias) {
  const moe_neuron_weight_ gate_up = moe_neuron_gate_up_weight_(l, call->dtype);
  const moe_neuron_weight_ down = moe_neuron_down_weight_(l, call->dtype);
  const moe_mx_rounding *rounding[] = {&l->mx.activations, &l->mx.weights, &l->mx.gradients};
  moe_neuron_operand *o;
  for (int i = 0; i < 3; i++)
    if (rounding[i]->enabled && rounding[i]->element >= MOE_ELEMENT_MXINT8)
      return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED, "mx rounds to an element that Trainium's kernels do not take");
  MOE_NEURON_TRY_(moe_neuron_check_ids_(ctx, l, dropping));
  moe_neuron_add_hidden_(call, "hidden_states", "hidden_states_scale", l->hidden_states, l->quantized_hidden_states,
                         l->T, l->H);
  o = moe_neuron_add_float_(call, "expert_affinities_masked", l->expert_affinities_masked,
                            moe_neuron_affinity_dtype_(l), MOE_NEURON_SHAPE_(l->T, l->E));
  moe_neuron_pad_row_(o);
  o->zero_if_absent = l->config.affinity_mode == MOE_AFFINITY_NO_SCALE;
  MOE_NEURON_TRY_(moe_neuron_add_weight_(ctx, call, &gate_up));
  MOE_NEURON_TRY_(moe_neuron_add_weight_(ctx, call, &down));
  o = moe_neuron_add_float_(call, "gate_and_up_proj_bias", l->gate_and_up_proj_bias, MOE_DTYPE_DEFAULT,
                            MOE_NEURON_SHAPE_(l->E, 2, l->I));
  o->use = MOE_NEURON_WEIGHT, o->zero_if_absent = 1;
  if (mx_bias && l->gate_and_up_proj_bias) {
    const moe_nki_vector_args vector = {
        .kind = MOE_NKI_GATE_UP_BIAS, .dtype = o->elements, .to_nki = 1, .E = l->E, .length = l->I};
    size_t in;
    MOE_NEURON_TRY_(moe_nki_vector_size(ctx, &vector, &in, &o->bytes));
    o->order = MOE_NEURON_ORDER_GATE_UP_BIAS;
  }
  o = moe_neuron_add_float_(call, "down_proj_bias", l->down_proj_bias, MOE_DTYPE_DEFAULT,
                            MOE_NEURON_SHAPE_(l->E, l->H));
  o->use = MOE_NEURON_WEIGHT, o->zero_if_absent = 1;
  moe_neuron_add_(call, "token_position_to_id", l->token_position_to_id, MOE_NRT_DTYPE_INT32,
                  MOE_NEURON_SHAPE_(l->N * l->B));
  if (!dropping)
    moe_neuron_add_(call, "block_to_expert", l->block_to_expert, MOE_NRT_DTYPE_INT32, MOE_NEURON_SHAPE_(l->N));
  o = moe_neuron_add_(call, "conditions", l->conditions, MOE_NRT_DTYPE_INT32, MOE_NEURON_SHAPE_(l->N));
  o->padding = 8, o->optional = 1;
  moe_neuron_add_(call, "num_valid_tokens", l->num_valid_tokens, MOE_NRT_DTYPE_INT32, MOE_NEURON_SHAPE_(1))->optional =
      1;
  moe_neuron_add_float_(call, "gate_up_in_scale", l->mx.gate_up_in_scale, MOE_DTYPE_F32, MOE_NEURON_SHAPE_(l->E))
      ->optional = 1;
  moe_neuron_add_float_(call, "down_in_scale", l->mx.down_in_scale, MOE_DTYPE_F32, MOE_NEURON_SHAPE_(l->E))->optional =
      1;
  return MOE_OK;
}

/* output as device.output_shape says: see there. */
MOE_FN void moe_neuron_add_forward_output_(moe_neuron_call_ *call, const moe_blockwise_mm_fwd_args *args) {
  const moe_blockwise_layer *l = &args->layer;
  const moe_cte_spec spec = args->device.spec;
  const int shaped = args->device.output_shape, accumulates = args->accumulate != 0;
  const int64_t slots = shaped && spec == MOE_CTE_SHARD_ON_BLOCK && !args->not_accumulating ? 2 : 1;
  const int64_t planes = shaped && spec == MOE_CTE_SHARD_ON_BLOCK_MX ? 2 : 1;
  const int padding_row = shaped && slots == 1 && planes == 1 && spec != MOE_CTE_SHARD_ON_BLOCK && !l->skip_token;
  moe_neuron_operand *o = moe_neuron_add_result_(call, accumulates, NULL, "output", args->output, MOE_DTYPE_DEFAULT,
                                                 MOE_NEURON_SHAPE_(planes, l->T + padding_row, slots, l->H));
  o->alias = "output_hidden_states";
  o->rows = l->T, o->row = l->H, o->step = slots * l->H;
  if (!shaped) moe_neuron_pad_rows_(o, accumulates);
}

MOE_FN int moe_neuron_mx_spec_(moe_cte_spec spec) { return spec >= MOE_CTE_SHARD_ON_BLOCK_MX; }

MOE_FN moe_status moe_neuron_describe_forward_(moe_context *ctx, const void *arguments, moe_neuron_call_ *call) {
  const moe_blockwise_mm_fwd_args *args = (const moe_blockwise_mm_fwd_args *)arguments;
  const moe_blockwise_layer *l = &args->layer;
  MOE_NEURON_TRY_(moe_neuron_add_layer_(ctx, call, l, args->device.spec == MOE_CTE_SHARD_ON_I_DROPPING,
                                        moe_neuron_mx_spec_(args->device.spec)));
  moe_neuron_add_output_(call, "gate_up_activations_T", args->gate_up_activations_T, l->checkpoint_dtype,
                         MOE_NEURON_SHAPE_(l->N, 2, l->I, l->B))
      ->alias = "gate_up_proj_act_checkpoint_T";
  moe_neuron_add_output_(call, "down_activations", args->down_activations, l->checkpoint_dtype,
                         MOE_NEURON_SHAPE_(l->N, l->B, l->H))
      ->alias = "down_proj_act_checkpoint";
  moe_neuron_add_output_(call, "scaled_intermediate_checkpoint_T", args->scaled_intermediate_checkpoint_T,
                         l->checkpoint_dtype, MOE_NEURON_SHAPE_(l->N, l->I, l->B));
  moe_neuron_add_forward_output_(call, args);
  return MOE_OK;
}

/* What the forward kept. */
MOE_FN void moe_neuron_add_checkpoints_(moe_neuron_call_ *call, const moe_blockwise_mm_bwd_args *args) {
  const moe_blockwise_layer *l = &args->layer;
  moe_neuron_operand *o = moe_neuron_add_float_(call, "gate_up_activations_T", args->gate_up_activations_T,
                                                l->checkpoint_dtype, MOE_NEURON_SHAPE_(l->N, 2, l->I, l->B));
  o->alias = "gate_up_proj_act_checkpoint_T", o->optional = 1;
  o = moe_neuron_add_float_(call, "down_activations", args->down_activations, l->checkpoint_dtype,
                            MOE_NEURON_SHAPE_(l->N, l->B, l->H));
  o->alias = "down_proj_act_checkpoint", o->optional = 1;
  o = moe_neuron_add_float_(call, "scaled_intermediate_checkpoint_T", args->scaled_intermediate_checkpoint_T,
                            l->checkpoint_dtype, MOE_NEURON_SHAPE_(l->N, l->I, l->B));
  o->optional = 1;
}

MOE_FN void moe_neuron_add_gradients_(moe_neuron_call_ *call, const moe_blockwise_mm_bwd_args *args) {
  const moe_blockwise_layer *l = &args->layer;
  const moe_neuron_weight_ gate_up = moe_neuron_gate_up_weight_(l, call->dtype);
  const moe_neuron_weight_ down = moe_neuron_down_weight_(l, call->dtype);
  const moe_dtype dtype = args->weight_grad_dtype;
#define MOE_NEURON_ADDS_(NAME) ((args->accumulate & MOE_ACCUMULATE_##NAME##_GRAD) != 0)
  moe_neuron_pad_rows_(moe_neuron_add_result_(call, MOE_NEURON_ADDS_(HIDDEN_STATES), "hidden_states_grad_out",
                                              "hidden_states_grad", args->hidden_states_grad, MOE_DTYPE_DEFAULT,
                                              MOE_NEURON_SHAPE_(l->T, l->H)),
                       MOE_NEURON_ADDS_(HIDDEN_STATES));
  moe_neuron_pad_rows_(moe_neuron_add_result_(call, MOE_NEURON_ADDS_(AFFINITIES), "expert_affinities_masked_grad_out",
                                              "expert_affinities_masked_grad", args->expert_affinities_masked_grad,
                                              moe_neuron_affinity_dtype_(l), MOE_NEURON_SHAPE_(l->T, l->E)),
                       MOE_NEURON_ADDS_(AFFINITIES));
  moe_neuron_add_weight_grad_(call, &gate_up, MOE_NEURON_ADDS_(GATE_UP_WEIGHT), "gate_up_proj_weight_grad_out",
                              "gate_up_proj_weight_grad", args->gate_up_proj_weight_grad, dtype);
  if (gate_up.apart)
    moe_neuron_add_weight_grad_(call, &gate_up, MOE_NEURON_ADDS_(GATE_UP_WEIGHT), "up_proj_weight_grad_out",
                                "up_proj_weight_grad", args->up_proj_weight_grad, dtype);
  moe_neuron_add_weight_grad_(call, &down, MOE_NEURON_ADDS_(DOWN_WEIGHT), "down_proj_weight_grad_out",
                              "down_proj_weight_grad", args->down_proj_weight_grad, dtype);
  moe_neuron_add_result_(call, MOE_NEURON_ADDS_(GATE_UP_BIAS), NULL, "gate_and_up_proj_bias_grad",
                         args->gate_and_up_proj_bias_grad, dtype, MOE_NEURON_SHAPE_(l->E, 2, l->I));
  moe_neuron_add_result_(call, MOE_NEURON_ADDS_(DOWN_BIAS), NULL, "down_proj_bias_grad", args->down_proj_bias_grad,
                         dtype, MOE_NEURON_SHAPE_(l->E, l->H));
#undef MOE_NEURON_ADDS_
}

MOE_FN moe_status moe_neuron_describe_backward_(moe_context *ctx, const void *arguments, moe_neuron_call_ *call) {
  const moe_blockwise_mm_bwd_args *args = (const moe_blockwise_mm_bwd_args *)arguments;
  const moe_blockwise_layer *l = &args->layer;
  MOE_NEURON_TRY_(moe_neuron_add_layer_(ctx, call, l, args->kernel_type == MOE_KERNEL_DROPPING, 0));
  moe_neuron_add_checkpoints_(call, args);
  moe_neuron_add_hidden_(call, "output_hidden_states_grad", "output_hidden_states_grad_scale",
                         args->output_hidden_states_grad, args->quantized_output_hidden_states_grad, l->T, l->H);
  moe_neuron_add_gradients_(call, args);
  return MOE_OK;
}

/* ----------------------------------------------------------------------------------------------------- grouped GEMM */

/* That no size or slot is out of range; padding's may be -1. */
MOE_FN moe_status moe_neuron_check_groups_(moe_context *ctx, const moe_grouped_gemm_args *args, int64_t total) {
  int64_t rows = 0;
  for (int64_t e = 0; e < args->E && args->m_sizes; e++) {
    if (args->m_sizes[e] < 0) return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "m_sizes has a negative count");
    rows += args->m_sizes[e];
  }
  if (rows > total)
    return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "m_sizes adds up to more than num_tokens*topk");
  for (int64_t i = 0; i < total && args->gather_indices; i++)
    if (args->gather_indices[i] < (i < rows ? 0 : -1) || args->gather_indices[i] >= total)
      return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_INDEX, "gather_indices has %d at %lld, which is no slot",
                              (int)args->gather_indices[i], (long long)i);
  return MOE_OK;
}

/* What each of the three reads, then what it writes. topk_weights_grad takes X and the bias as well. */
MOE_FN moe_status moe_neuron_describe_grouped_(moe_context *ctx, const void *arguments, moe_neuron_call_ *call) {
  const moe_grouped_gemm_args *a = (const moe_grouped_gemm_args *)arguments;
  const int forward = call->kind == MOE_NEURON_GROUPED_, dx = call->kind == MOE_NEURON_GROUPED_DX_,
            dw = !forward && !dx;
  const int64_t total = a->num_tokens * a->topk;
  const moe_neuron_weight_ w = moe_neuron_grouped_weight_(a, call->dtype);
  moe_neuron_operand *o;
  MOE_NEURON_TRY_(moe_neuron_check_groups_(ctx, a, total));
#define MOE_NEURON_ADDS_(NAME) ((a->accumulate & MOE_ACCUMULATE_##NAME) != 0)
  moe_neuron_add_(call, "m_sizes", a->m_sizes, MOE_NRT_DTYPE_INT32, MOE_NEURON_SHAPE_(a->E));
  o = moe_neuron_add_(call, "gather_indices", a->gather_indices, MOE_NRT_DTYPE_INT32, MOE_NEURON_SHAPE_(total));
  o->optional = !a->permute_x && !a->permute_y;
  if (!dx || a->topk_weights_grad)
    moe_neuron_add_float_(call, "X", a->X, MOE_DTYPE_DEFAULT,
                          MOE_NEURON_SHAPE_(a->permute_x ? a->num_tokens : total, a->K));
  if (!dw) MOE_NEURON_TRY_(moe_neuron_add_weight_(ctx, call, &w));
  if (forward || (dx && a->topk_weights_grad)) {
    o = moe_neuron_add_float_(call, "bias", a->bias, MOE_DTYPE_DEFAULT, MOE_NEURON_SHAPE_(a->E, a->N));
    o->use = MOE_NEURON_WEIGHT, o->zero_if_absent = 1;
  }
  if (!forward) moe_neuron_add_float_(call, "dY", a->dY, MOE_DTYPE_DEFAULT, MOE_NEURON_SHAPE_(total, a->N));
  moe_neuron_add_float_(call, "topk_weights", a->topk_weights, MOE_DTYPE_F32, MOE_NEURON_SHAPE_(total))->optional = 1;
  if (forward)
    moe_neuron_add_result_(call, MOE_NEURON_ADDS_(Y), NULL, "Y", a->Y, MOE_DTYPE_DEFAULT,
                           MOE_NEURON_SHAPE_(total, a->N));
  if (dx) {
    moe_neuron_add_result_(call, MOE_NEURON_ADDS_(DX), NULL, "dX", a->dX, MOE_DTYPE_DEFAULT,
                           MOE_NEURON_SHAPE_(a->sum_topk ? a->num_tokens : total, a->K));
    moe_neuron_add_result_(call, MOE_NEURON_ADDS_(TOPK_WEIGHTS_GRAD), NULL, "topk_weights_grad", a->topk_weights_grad,
                           MOE_DTYPE_F32, MOE_NEURON_SHAPE_(total));
  }
  if (dw) {
    moe_neuron_add_weight_grad_(call, &w, MOE_NEURON_ADDS_(DW), NULL, "dW", a->dW, a->weight_grad_dtype);
    moe_neuron_add_result_(call, MOE_NEURON_ADDS_(BIAS_GRAD), NULL, "bias_grad", a->bias_grad, a->weight_grad_dtype,
                           MOE_NEURON_SHAPE_(a->E, a->N));
  }
#undef MOE_NEURON_ADDS_
  return MOE_OK;
}

/* ------------------------------------------------------------------------------------------------- the MLP of MXFP8 */

/* An operand [F,K]: values, or words and scales. */
MOE_FN moe_status moe_neuron_add_mx_(moe_context *ctx, moe_neuron_call_ *call, const char *name, const char *alias,
                                     const char *scales_name, const char *scales_alias, const moe_mxfp8_operand *x,
                                     int64_t F, int64_t K) {
  const int64_t rows = x->scales_layout == MOE_MX_SCALES_NKI_OVERSIZED ? K / 4
                       : x->scales_layout == MOE_MX_SCALES_NKI_PACKED  ? moe_ceil_div_(K, 2048) * 128
                                                                       : K / 32;
  moe_neuron_operand *o;
  if (x->scales && !x->is_swizzled)
    return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED,
                            "%s is in no layout of Trainium: convert it by moe_mx_layout_convert", name);
  if (x->scales) o = moe_neuron_add_(call, name, x->data, MOE_NRT_DTYPE_UINT32, MOE_NEURON_SHAPE_(K / 4, F));
  else if (x->is_swizzled)
    o = moe_neuron_add_(call, name, x->data, MOE_NRT_DTYPE_BFLOAT16, MOE_NEURON_SHAPE_(K / 4, 4 * F));
  else o = moe_neuron_add_(call, name, x->data, MOE_NRT_DTYPE_BFLOAT16, MOE_NEURON_SHAPE_(F, K));
  o->alias = alias, o->optional = 1;
  o->use = strstr(name, "weight") ? MOE_NEURON_WEIGHT : MOE_NEURON_INPUT;
  if (!x->scales) return MOE_OK;
  o = moe_neuron_add_(call, scales_name, x->scales, MOE_NRT_DTYPE_UINT8, MOE_NEURON_SHAPE_(rows, F));
  o->alias = scales_alias, o->optional = 1, o->use = o[-1].use;
  return MOE_OK;
}
#define MOE_NEURON_ADD_MX_(field, alias, scales_alias, F, K) \
  MOE_NEURON_TRY_(moe_neuron_add_mx_(ctx, call, #field, alias, #field "_scales", scales_alias, &args->field, F, K))

MOE_FN moe_status moe_neuron_describe_matmul_(moe_context *ctx, const void *arguments, moe_neuron_call_ *call) {
  const moe_matmul_mxfp8_args *args = (const moe_matmul_mxfp8_args *)arguments;
  MOE_NEURON_ADD_MX_(a, NULL, NULL, args->M, args->K);
  MOE_NEURON_ADD_MX_(b, NULL, NULL, args->N, args->K);
  moe_neuron_add_output_(call, "output", args->output, args->output_dtype, MOE_NEURON_SHAPE_(args->M, args->N));
  return MOE_OK;
}

MOE_FN moe_status moe_neuron_describe_mlp_forward_(moe_context *ctx, const void *arguments, moe_neuron_call_ *call) {
  const moe_mlp_fwd_mxfp8_args *args = (const moe_mlp_fwd_mxfp8_args *)arguments;
  const int64_t S = args->mlp.S, H = args->mlp.H, I = args->mlp.I;
  if (args->row_base || args->row_count)
    return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED, "row_base and row_count must be 0: a kernel computes all rows");
  MOE_NEURON_ADD_MX_(hidden_states, "hidden", "hidden_scales", S, H);
  MOE_NEURON_ADD_MX_(gate_up_weights, NULL, "gate_up_scales", 2 * I, H);
  MOE_NEURON_ADD_MX_(down_weight, "down_weights", "down_scales", H, I);
#define MOE_NEURON_ADD_SAVED_(field) \
  moe_neuron_add_output_(call, #field, args->field, MOE_DTYPE_BF16, MOE_NEURON_SHAPE_(S, I))->alias = "save_" #field
  MOE_NEURON_ADD_SAVED_(gate_pre);
  MOE_NEURON_ADD_SAVED_(gate_act);
  MOE_NEURON_ADD_SAVED_(up);
  MOE_NEURON_ADD_SAVED_(hidden);
#undef MOE_NEURON_ADD_SAVED_
  moe_neuron_add_output_(call, "output", args->output, MOE_DTYPE_BF16, MOE_NEURON_SHAPE_(S, H));
  return MOE_OK;
}

/* What is computed for want of a checkpoint, and gradients. */
MOE_FN void moe_neuron_add_mlp_results_(moe_neuron_call_ *call, const moe_mlp_bwd_mxfp8_args *args) {
  const int64_t S = args->mlp.S, H = args->mlp.H, I = args->mlp.I;
  const moe_dtype dtype = args->weight_grad_dtype;
#define MOE_NEURON_ADD_(field, checkpoint) \
  moe_neuron_add_output_(call, #field, checkpoint ? NULL : args->field, MOE_DTYPE_BF16, MOE_NEURON_SHAPE_(S, I))
  MOE_NEURON_ADD_(gate_pre_scratch, args->gate_pre);
  MOE_NEURON_ADD_(gate_act_scratch, args->gate_act);
  MOE_NEURON_ADD_(up_scratch, args->up);
  MOE_NEURON_ADD_(hidden_scratch, args->hidden);
  MOE_NEURON_ADD_(d_gate, NULL);
  MOE_NEURON_ADD_(d_up, NULL);
#undef MOE_NEURON_ADD_
  moe_neuron_add_output_(call, "d_gate_up_T", args->d_gate_up_T, MOE_DTYPE_BF16, MOE_NEURON_SHAPE_(2 * I, S));
  moe_neuron_add_output_(call, "hidden_states_grad", args->hidden_states_grad, MOE_DTYPE_BF16, MOE_NEURON_SHAPE_(S, H));
  moe_neuron_add_result_(call, (args->accumulate & MOE_ACCUMULATE_GATE_UP_WEIGHT_GRAD) != 0, NULL,
                         "gate_up_weight_grad", args->gate_up_weight_grad, dtype, MOE_NEURON_SHAPE_(2 * I, H));
  moe_neuron_add_result_(call, (args->accumulate & MOE_ACCUMULATE_DOWN_WEIGHT_GRAD) != 0, NULL, "down_weight_grad",
                         args->down_weight_grad, dtype, MOE_NEURON_SHAPE_(H, I))
      ->alias = "down_proj_weight_grad";
}

MOE_FN moe_status moe_neuron_describe_mlp_backward_(moe_context *ctx, const void *arguments, moe_neuron_call_ *call) {
  const moe_mlp_bwd_mxfp8_args *args = (const moe_mlp_bwd_mxfp8_args *)arguments;
  const int64_t S = args->mlp.S, H = args->mlp.H, I = args->mlp.I;
  MOE_NEURON_ADD_MX_(output_grad, NULL, NULL, S, H);
  MOE_NEURON_ADD_MX_(hidden_states, NULL, NULL, S, H);
  MOE_NEURON_ADD_MX_(gate_up_weights, NULL, NULL, 2 * I, H);
  MOE_NEURON_ADD_MX_(gate_weight_T, NULL, NULL, H, I);
  MOE_NEURON_ADD_MX_(up_weight_T, NULL, NULL, H, I);
  MOE_NEURON_ADD_MX_(down_weight, NULL, NULL, H, I);
  MOE_NEURON_ADD_MX_(down_weight_T, "down_proj_weight", NULL, I, H);
  MOE_NEURON_ADD_MX_(hidden_states_T, NULL, NULL, H, S);
  MOE_NEURON_ADD_MX_(output_grad_T, NULL, NULL, H, S);
  MOE_NEURON_ADD_MX_(hidden_T, "intermediate_T", NULL, I, S);
#define MOE_NEURON_ADD_(field, name)                                                                                   \
  do {                                                                                                                 \
    moe_neuron_operand *o = moe_neuron_add_float_(call, #field, args->field, MOE_DTYPE_BF16, MOE_NEURON_SHAPE_(S, I)); \
    o->alias = name, o->optional = 1;                                                                                  \
  } while (0)
  MOE_NEURON_ADD_(gate_pre, NULL);
  MOE_NEURON_ADD_(gate_act, NULL);
  MOE_NEURON_ADD_(up, NULL);
  MOE_NEURON_ADD_(hidden, "intermediate");
#undef MOE_NEURON_ADD_
  moe_neuron_add_mlp_results_(call, args);
  return MOE_OK;
}
#undef MOE_NEURON_ADD_MX_

#endif
