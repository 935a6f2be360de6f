/* One function per operation makes the table of its tensors: names, memory, sizes, types, what they are. Binding,
   checking, reading back and comparing all go by it. */
#ifndef MOE_NEURON_DESCRIBE_H
#define MOE_NEURON_DESCRIBE_H

typedef enum moe_neuron_kind_ {
  MOE_NEURON_FORWARD_,
  MOE_NEURON_BACKWARD_,
  MOE_NEURON_GROUPED_,
  MOE_NEURON_GROUPED_DX_,
  MOE_NEURON_GROUPED_DW_
} moe_neuron_kind_;

/* A call, and what it is described to. */
typedef struct moe_neuron_call_ {
  moe_neuron_kind_ kind;
  moe_dtype dtype;
  const moe_neuron_options *options;
  moe_neuron_table *table;
} moe_neuron_call_;

MOE_FN moe_nrt_dtype moe_neuron_dtype_(moe_dtype dtype) {
  switch (dtype) {
    case MOE_DTYPE_BF16: return MOE_NRT_DTYPE_BFLOAT16;
    case MOE_DTYPE_FP16: return MOE_NRT_DTYPE_FLOAT16;
    default: return MOE_NRT_DTYPE_FLOAT32;
  }
}

/* ----------------------------------------------------------------------------------------------------- adding a row */

/* A shape: how many axes, then the axes. */
#define MOE_NEURON_SHAPE_(...) \
  ((const int64_t[]){sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t), __VA_ARGS__})

/* Adds a tensor. Its size cannot overflow: that has been checked. */
MOE_FN moe_neuron_operand *moe_neuron_add_(moe_neuron_call_ *call, const char *name, const void *data,
                                           moe_nrt_dtype dtype, const int64_t *shape) {
  moe_neuron_operand *operand = &call->table->operand[call->table->count++];
  memset(operand, 0, sizeof *operand);
  operand->name = name;
  operand->data = (void *)(uintptr_t)data;
  operand->dtype = dtype;
  operand->bytes = moe_neuron_dtype_bytes_(dtype);
  for (operand->ndim = 0; operand->ndim < shape[0]; operand->ndim++) {
    operand->shape[operand->ndim] = shape[operand->ndim + 1];
    operand->bytes *= (size_t)shape[operand->ndim + 1];
  }
  return operand;
}

/* Lets the NEFF's tensor have one row more: of its last axis. */
MOE_FN void moe_neuron_pad_row_(moe_neuron_operand *operand) {
  operand->padding = (size_t)operand->shape[operand->ndim - 1] * moe_neuron_dtype_bytes_(operand->dtype);
}

/* Adds one of floats, `dtype` or by default the function's type; or an output of them, which can be compared. */
MOE_FN moe_neuron_operand *moe_neuron_add_float_(moe_neuron_call_ *call, const char *name, const void *data,
                                                 moe_dtype dtype, const int64_t *shape) {
  const moe_dtype type = dtype == MOE_DTYPE_DEFAULT ? call->dtype : dtype;
  moe_neuron_operand *operand = moe_neuron_add_(call, name, data, moe_neuron_dtype_(type), shape);
  operand->elements = type;
  return operand;
}
MOE_FN moe_neuron_operand *moe_neuron_add_output_(moe_neuron_call_ *call, const char *name, void *data, moe_dtype dtype,
                                                  const int64_t *shape) {
  moe_neuron_operand *operand = moe_neuron_add_float_(call, name, data, dtype, shape);
  operand->use = MOE_NEURON_OUTPUT;
  operand->rows = 1;
  operand->row = operand->step = (int64_t)(operand->bytes / moe_dtype_size(operand->elements));
  return operand;
}

/* ------------------------------------------------------------------------------------------------ quantised tensors */

MOE_FN moe_nrt_dtype moe_neuron_element_(moe_element element) {
  switch (element) {
    case MOE_ELEMENT_E4M3FN:
    case MOE_ELEMENT_E4M3: return MOE_NRT_DTYPE_FP8_E4;
    case MOE_ELEMENT_E5M2: return MOE_NRT_DTYPE_FP8_E5;
    default: return MOE_NRT_DTYPE_UINT8;
  }
}

/* The scales of a weight with float scales; see moe_weight_scaling. */
MOE_FN void moe_neuron_add_scales_(moe_neuron_call_ *call, const char *name, const moe_quantized_weight *w, int64_t E,
                                   int64_t K, int64_t parts, int64_t columns) {
  const int64_t block = w->block ? w->block : 256, repeat = w->repeat ? w->repeat : 1;
  const int per_expert = w->scaling == MOE_WEIGHT_STATIC_PER_EXPERT || w->scaling == MOE_WEIGHT_COLUMN_PER_EXPERT;
  const int per_column = w->scaling == MOE_WEIGHT_COLUMN || w->scaling == MOE_WEIGHT_COLUMN_PER_EXPERT;
  moe_neuron_operand *scales;
  if (w->scaling == MOE_WEIGHT_BLOCK)
    scales = moe_neuron_add_float_(
        call, name, w->scales, MOE_DTYPE_F32,
        MOE_NEURON_SHAPE_(E, moe_ceil_div_(K, block), parts, moe_ceil_div_(columns, block), repeat));
  else
    scales = moe_neuron_add_float_(call, name, w->scales, MOE_DTYPE_F32,
                                   MOE_NEURON_SHAPE_(per_expert ? E : 1, parts, per_column ? columns : 1));
  scales->use = MOE_NEURON_WEIGHT;
  if (call->options->nki_down_scale && per_column && parts == 1) scales->order = MOE_NEURON_ORDER_DOWN_SCALE;
}

/* A weight as it is stored: codes, and scales under a name of their own. MX codes are words. */
MOE_FN moe_status moe_neuron_add_quantized_(moe_context *ctx, moe_neuron_call_ *call, const char *name,
                                            const char *scales_name, const moe_quantized_weight *w, int64_t E,
                                            int64_t K, int32_t parts, int64_t columns) {
  const int32_t bits = w->element == MOE_ELEMENT_E2M1 ? 4 : 8;
  moe_neuron_operand *codes;
  if (w->scaling != MOE_WEIGHT_MX) {
    codes =
        moe_neuron_add_(call, name, w->codes, moe_neuron_element_(w->element), MOE_NEURON_SHAPE_(E, K, parts, columns));
    codes->use = MOE_NEURON_WEIGHT;
    moe_neuron_add_scales_(call, scales_name, w, E, K, parts, columns);
    return MOE_OK;
  }
  if (w->layout < MOE_MX_LAYOUT_NKI_STRIDED_X4 || w->layout > MOE_MX_LAYOUT_NKI_1X32)
    return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED,
                            "%s is in no layout of Trainium: convert it by moe_mx_layout_convert", name);
  const moe_mx_layout_args layout = {.from = w->layout,
                                     .to = w->layout,
                                     .scales_from = w->scales_layout,
                                     .scales_to = w->scales_layout,
                                     .element_bits = bits,
                                     .parts = parts,
                                     .E = E,
                                     .K = K,
                                     .columns = columns};
  moe_mx_layout_bytes bytes;
  MOE_NEURON_TRY_(moe_mx_layout_size(ctx, &layout, &bytes));
  codes = moe_neuron_add_(call, name, w->codes, bits == 4 ? MOE_NRT_DTYPE_UINT16 : MOE_NRT_DTYPE_UINT32,
                          MOE_NEURON_SHAPE_((int64_t)bytes.codes_in / (bits / 2)));
  codes->use = MOE_NEURON_WEIGHT;
  moe_neuron_add_(call, scales_name, w->scales, MOE_NRT_DTYPE_UINT8, MOE_NEURON_SHAPE_((int64_t)bytes.scales_in))->use =
      MOE_NEURON_WEIGHT;
  return MOE_OK;
}

/* A [T,H] tensor, plain or quantised; the device's may have a row T. */
MOE_FN void moe_neuron_add_hidden_(moe_neuron_call_ *call, const char *name, const char *scales_name, const void *plain,
                                   const moe_quantized_activation *a, int64_t T, int64_t H) {
  moe_neuron_operand *operand;
  if (!a) {
    operand = moe_neuron_add_float_(call, name, plain, MOE_DTYPE_DEFAULT, MOE_NEURON_SHAPE_(T, H));
    moe_neuron_pad_row_(operand);
    return;
  }
  const int64_t columns = a->element == MOE_ELEMENT_E2M1 ? moe_ceil_div_(H, 2) : H;
  operand = moe_neuron_add_(call, name, a->codes, moe_neuron_element_(a->element), MOE_NEURON_SHAPE_(T, columns));
  moe_neuron_pad_row_(operand);
  const int64_t rows = !a->float_scales ? T : a->block_rows ? moe_ceil_div_(T, a->block_rows) : 1;
  const int64_t groups = !a->float_scales   ? moe_ceil_div_(H, 32)
                         : a->block_columns ? moe_ceil_div_(H, a->block_columns)
                                            : 1;
  operand = moe_neuron_add_(call, scales_name, a->scales, a->float_scales ? MOE_NRT_DTYPE_FLOAT32 : MOE_NRT_DTYPE_UINT8,
                            MOE_NEURON_SHAPE_(rows, groups));
  if (rows == T) moe_neuron_pad_row_(operand);
}

/* -------------------------------------------------------------------------------------------------------- the layer */

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
  const int plain_gate_up = !l->quantized_gate_up_proj_weight, plain_down = !l->quantized_down_proj_weight;
  moe_neuron_operand *o;
  MOE_NEURON_TRY_(moe_neuron_check_ids_(ctx, l, dropping));
  if ((l->packed_gate_up_proj_weight && !l->gate_up_proj_weight && plain_gate_up) ||
      (l->packed_down_proj_weight && !l->down_proj_weight && plain_down))
    return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED, "packed weights are for CPUs: give the plain ones");
  moe_neuron_add_hidden_(call, "hidden_states", "hidden_states_scale", l->hidden_states, l->quantized_hidden_states,
                         l->T, l->H);
  o = moe_neuron_add_float_(call, "expert_affinities_masked", l->expert_affinities_masked,
                            l->affinity_dtype == MOE_DTYPE_DEFAULT ? MOE_DTYPE_F32 : l->affinity_dtype,
                            MOE_NEURON_SHAPE_(l->T, l->E));
  moe_neuron_pad_row_(o);
  o->zero_if_absent = l->config.affinity_mode == MOE_AFFINITY_NO_SCALE;
  if (plain_gate_up)
    moe_neuron_add_float_(call, "gate_up_proj_weight", l->gate_up_proj_weight, MOE_DTYPE_DEFAULT,
                          MOE_NEURON_SHAPE_(l->E, l->H, 2, l->I))
        ->use = MOE_NEURON_WEIGHT;
  else
    MOE_NEURON_TRY_(moe_neuron_add_quantized_(ctx, call, "gate_up_proj_weight", "gate_up_proj_scale",
                                              l->quantized_gate_up_proj_weight, l->E, l->H, 2, l->I));
  if (plain_down)
    moe_neuron_add_float_(call, "down_proj_weight", l->down_proj_weight, MOE_DTYPE_DEFAULT,
                          MOE_NEURON_SHAPE_(l->E, l->I, l->H))
        ->use = MOE_NEURON_WEIGHT;
  else
    MOE_NEURON_TRY_(moe_neuron_add_quantized_(ctx, call, "down_proj_weight", "down_proj_scale",
                                              l->quantized_down_proj_weight, l->E, l->I, 1, l->H));
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
  const int shaped = args->device.output_shape;
  const int64_t slots = shaped && spec == MOE_CTE_SHARD_ON_BLOCK && !args->not_accumulating ? 2 : 1;
  const int64_t planes = shaped && spec == MOE_CTE_SHARD_ON_BLOCK_MX ? 2 : 1;
  const int padding_row = shaped && slots == 1 && planes == 1 && spec != MOE_CTE_SHARD_ON_BLOCK && !l->skip_token;
  moe_neuron_operand *o = moe_neuron_add_output_(call, "output", args->output, MOE_DTYPE_DEFAULT,
                                                 MOE_NEURON_SHAPE_(planes, l->T + padding_row, slots, l->H));
  o->rows = l->T, o->row = l->H, o->step = slots * l->H;
  if (!shaped) o->padding = (size_t)l->H * moe_dtype_size(o->elements);
}

MOE_FN int moe_neuron_mx_spec_(moe_cte_spec spec) { return spec >= MOE_CTE_SHARD_ON_BLOCK_MX; }

MOE_FN moe_status moe_neuron_describe_forward_(moe_context *ctx, const void *arguments, moe_neuron_call_ *call) {
  const moe_blockwise_mm_fwd_args *args = (const moe_blockwise_mm_fwd_args *)arguments;
  const moe_blockwise_layer *l = &args->layer;
  if (args->accumulate)
    return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED, "accumulate must be 0: a kernel overwrites its outputs");
  MOE_NEURON_TRY_(moe_neuron_add_layer_(ctx, call, l, args->device.spec == MOE_CTE_SHARD_ON_I_DROPPING,
                                        moe_neuron_mx_spec_(args->device.spec)));
  moe_neuron_add_output_(call, "gate_up_activations_T", args->gate_up_activations_T, l->checkpoint_dtype,
                         MOE_NEURON_SHAPE_(l->N, 2, l->I, l->B));
  moe_neuron_add_output_(call, "down_activations", args->down_activations, l->checkpoint_dtype,
                         MOE_NEURON_SHAPE_(l->N, l->B, l->H));
  moe_neuron_add_output_(call, "scaled_intermediate_checkpoint_T", args->scaled_intermediate_checkpoint_T,
                         l->checkpoint_dtype, MOE_NEURON_SHAPE_(l->N, l->I, l->B));
  moe_neuron_add_forward_output_(call, args);
  return MOE_OK;
}

/* A gradient; where it is accumulated, what it holds is an input as well, under nki-library's name for that. */
MOE_FN moe_neuron_operand *moe_neuron_add_gradient_(moe_neuron_call_ *call, const moe_blockwise_mm_bwd_args *args,
                                                    uint32_t bit, const char *name, const char *given, void *data,
                                                    moe_dtype dtype, const int64_t *shape) {
  if (args->accumulate & bit) moe_neuron_pad_row_(moe_neuron_add_float_(call, given, data, dtype, shape));
  return moe_neuron_add_output_(call, name, data, dtype, shape);
}

MOE_FN moe_status moe_neuron_describe_backward_(moe_context *ctx, const void *arguments, moe_neuron_call_ *call) {
  const moe_blockwise_mm_bwd_args *args = (const moe_blockwise_mm_bwd_args *)arguments;
  const moe_blockwise_layer *l = &args->layer;
  const moe_dtype affinity = l->affinity_dtype == MOE_DTYPE_DEFAULT ? MOE_DTYPE_F32 : l->affinity_dtype;
  const moe_dtype grad = args->weight_grad_dtype;
  moe_neuron_operand *o;
  if (args->accumulate & (MOE_ACCUMULATE_GATE_UP_BIAS_GRAD | MOE_ACCUMULATE_DOWN_BIAS_GRAD))
    return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED, "accumulate has a bias: a kernel overwrites its gradient");
  MOE_NEURON_TRY_(moe_neuron_add_layer_(ctx, call, l, args->kernel_type == MOE_KERNEL_DROPPING, 0));
  o = moe_neuron_add_float_(call, "gate_up_activations_T", args->gate_up_activations_T, l->checkpoint_dtype,
                            MOE_NEURON_SHAPE_(l->N, 2, l->I, l->B));
  o->alias = "gate_up_proj_act_checkpoint_T", o->optional = 1;
  o = moe_neuron_add_float_(call, "down_activations", args->down_activations, l->checkpoint_dtype,
                            MOE_NEURON_SHAPE_(l->N, l->B, l->H));
  o->alias = "down_proj_act_checkpoint", o->optional = 1;
  moe_neuron_add_float_(call, "scaled_intermediate_checkpoint_T", args->scaled_intermediate_checkpoint_T,
                        l->checkpoint_dtype, MOE_NEURON_SHAPE_(l->N, l->I, l->B))
      ->optional = 1;
  moe_neuron_add_hidden_(call, "output_hidden_states_grad", "output_hidden_states_grad_scale",
                         args->output_hidden_states_grad, args->quantized_output_hidden_states_grad, l->T, l->H);
  o = moe_neuron_add_gradient_(call, args, MOE_ACCUMULATE_HIDDEN_STATES_GRAD, "hidden_states_grad",
                               "hidden_states_grad_out", args->hidden_states_grad, MOE_DTYPE_DEFAULT,
                               MOE_NEURON_SHAPE_(l->T, l->H));
  moe_neuron_pad_row_(o);
  o = moe_neuron_add_gradient_(call, args, MOE_ACCUMULATE_AFFINITIES_GRAD, "expert_affinities_masked_grad",
                               "expert_affinities_masked_grad_out", args->expert_affinities_masked_grad, affinity,
                               MOE_NEURON_SHAPE_(l->T, l->E));
  moe_neuron_pad_row_(o);
  moe_neuron_add_gradient_(call, args, MOE_ACCUMULATE_GATE_UP_WEIGHT_GRAD, "gate_up_proj_weight_grad",
                           "gate_up_proj_weight_grad_out", args->gate_up_proj_weight_grad, grad,
                           MOE_NEURON_SHAPE_(l->E, l->H, 2, l->I));
  moe_neuron_add_gradient_(call, args, MOE_ACCUMULATE_DOWN_WEIGHT_GRAD, "down_proj_weight_grad",
                           "down_proj_weight_grad_out", args->down_proj_weight_grad, grad,
                           MOE_NEURON_SHAPE_(l->E, l->I, l->H));
  moe_neuron_add_output_(call, "gate_and_up_proj_bias_grad", args->gate_and_up_proj_bias_grad, grad,
                         MOE_NEURON_SHAPE_(l->E, 2, l->I));
  moe_neuron_add_output_(call, "down_proj_bias_grad", args->down_proj_bias_grad, grad, MOE_NEURON_SHAPE_(l->E, l->H));
  return MOE_OK;
}

/* ----------------------------------------------------------------------------------------------------- grouped GEMM */

/* That no size or slot is out of range. */
MOE_FN moe_status moe_neuron_check_groups_(moe_context *ctx, const moe_grouped_gemm_args *args, int64_t total) {
  int64_t rows = 0;
  for (int64_t e = 0; e < args->E && args->m_sizes; e++) {
    if (args->m_sizes[e] < 0) return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "m_sizes has a negative count");
    rows += args->m_sizes[e];
  }
  if (rows > total)
    return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "m_sizes adds up to more than num_tokens*topk");
  for (int64_t i = 0; i < total && args->gather_indices; i++)
    if (args->gather_indices[i] < 0 || args->gather_indices[i] >= total)
      return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_INDEX, "gather_indices has a slot outside [0,num_tokens*topk)");
  return MOE_OK;
}

MOE_FN moe_status moe_neuron_describe_grouped_(moe_context *ctx, const void *arguments, moe_neuron_call_ *call) {
  const moe_grouped_gemm_args *args = (const moe_grouped_gemm_args *)arguments;
  const int forward = call->kind == MOE_NEURON_GROUPED_, dx = call->kind == MOE_NEURON_GROUPED_DX_;
  const int dw = call->kind == MOE_NEURON_GROUPED_DW_;
  const int64_t total = args->num_tokens * args->topk;
  if (args->accumulate)
    return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED, "accumulate must be 0: a kernel overwrites its outputs");
  if (forward && args->packed_W && !args->W)
    return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED, "packed_W is for CPUs: give W");
  MOE_NEURON_TRY_(moe_neuron_check_groups_(ctx, args, total));
  moe_neuron_add_(call, "m_sizes", args->m_sizes, MOE_NRT_DTYPE_INT32, MOE_NEURON_SHAPE_(args->E));
  moe_neuron_add_(call, "gather_indices", args->gather_indices, MOE_NRT_DTYPE_INT32, MOE_NEURON_SHAPE_(total))
      ->optional = !args->permute_x && !args->permute_y;
  if (!dx)
    moe_neuron_add_float_(call, "X", args->X, MOE_DTYPE_DEFAULT,
                          MOE_NEURON_SHAPE_(args->permute_x ? args->num_tokens : total, args->K));
  if (!dw)
    moe_neuron_add_float_(call, "W", args->W, MOE_DTYPE_DEFAULT, MOE_NEURON_SHAPE_(args->E, args->N, args->K))->use =
        MOE_NEURON_WEIGHT;
  if (!forward) moe_neuron_add_float_(call, "dY", args->dY, MOE_DTYPE_DEFAULT, MOE_NEURON_SHAPE_(total, args->N));
  if (forward && args->topk_weights)
    moe_neuron_add_float_(call, "topk_weights", args->topk_weights, MOE_DTYPE_F32, MOE_NEURON_SHAPE_(total));
  if (forward) moe_neuron_add_output_(call, "Y", args->Y, MOE_DTYPE_DEFAULT, MOE_NEURON_SHAPE_(total, args->N));
  if (dx) moe_neuron_add_output_(call, "dX", args->dX, MOE_DTYPE_DEFAULT, MOE_NEURON_SHAPE_(total, args->K));
  if (dw)
    moe_neuron_add_output_(call, "dW", args->dW, args->weight_grad_dtype, MOE_NEURON_SHAPE_(args->E, args->N, args->K));
  return MOE_OK;
}

#endif
