/* moe_layer_*: the blockwise layer's stages on rows that come from pairs of tokens and experts. */
#ifndef MOE_LAYER_MOE_LAYER_H
#define MOE_LAYER_MOE_LAYER_H

/* A call. The blockwise layer's arguments are made from the caller's; its state comes first, so that its functions take
   this for theirs. */
typedef struct moe_face_forward_ {
  moe_forward_ forward;
  moe_blockwise_mm_fwd_args args;
  const moe_pairs_ *pairs;
  void *y, *saved;
} moe_face_forward_;

typedef struct moe_face_backward_ {
  moe_backward_ backward;
  moe_blockwise_mm_bwd_args args;
  const moe_pairs_ *pairs;
  const void *saved, *y_grad;
  const moe_layer_grads *grads;
} moe_face_backward_;

/* ----------------------------------------------------------------------------------------------------------- errors */

/* What the blockwise layer names otherwise. */
static const char *const moe_face_names_[][2] = {
    {"args", "layer"},
    {"hidden_states", "x"},
    {"quantized_hidden_states", "quantized_x"},
    {"gate_up_proj_weight", "gate_up"},
    {"down_proj_weight", "down"},
    {"up_proj_weight", "up"},
    {"gate_and_up_proj_bias", "gate_up_bias"},
    {"down_proj_bias", "down_bias"},
    {"packed_gate_up_proj_weight", "packed_gate_up"},
    {"packed_down_proj_weight", "packed_down"},
    {"quantized_gate_up_proj_weight", "quantized_gate_up"},
    {"quantized_down_proj_weight", "quantized_down"},
    {"gate_up_activations_T", "saved"},
    {"checkpoint_dtype", "saved_dtype"},
    {"output", "y"},
    {"output_hidden_states_grad", "y_grad"},
    {"hidden_states_grad", "grads.x"},
    {"expert_affinities_masked_grad", "grads.topk_weights"},
    {"gate_up_proj_weight_grad", "grads.gate_up"},
    {"down_proj_weight_grad", "grads.down"},
    {"up_proj_weight_grad", "grads.up"},
    {"gate_and_up_proj_bias_grad", "grads.gate_up_bias"},
    {"down_proj_bias_grad", "grads.down_bias"},
    {"weight_grad_dtype", "grads.weight_dtype"},
};

/* Lets the message begin with the caller's name of the argument. */
MOE_FN moe_status moe_face_rename_(moe_context *ctx, moe_status status, const char *const (*names)[2], size_t count) {
  if (status == MOE_OK || !ctx) return status;
  char *message = ctx->message;
  const size_t length = strcspn(message, " -"), rest = strlen(message + length) + 1;
  for (size_t i = 0; i < count; i++) {
    const char *from = names[i][0], *to = names[i][1];
    if (strlen(from) != length || memcmp(from, message, length) != 0) continue;
    if (strlen(to) + rest > sizeof ctx->message) break;
    memmove(message + strlen(to), message + length, rest);
    memcpy(message, to, strlen(to));
    break;
  }
  return status;
}

MOE_FN moe_status moe_face_status_(moe_context *ctx, moe_status status) {
  return moe_face_rename_(ctx, status, moe_face_names_, sizeof moe_face_names_ / sizeof *moe_face_names_);
}

/* -------------------------------------------------------------------------------------------------------- arguments */

/* The blockwise layer whose slots are pairs. */
MOE_FN moe_status moe_face_layer_(moe_context *ctx, const moe_layer *l, moe_blockwise_layer *to) {
  MOE_TRY(moe_check_positive_(ctx, "K", l->K));
  if (l->identity_experts < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "identity_experts", "is negative");
  if (l->identity_experts >= INT32_MAX - l->E)
    return moe_fail_(ctx, MOE_ERROR_OVERFLOW, "identity_experts", "and E do not fit in 32-bit ids");
  const int64_t pairs = moe_mul_(l->T, l->K);
  if (l->T > 0 && (pairs < 0 || pairs >= INT32_MAX))
    return moe_fail_(ctx, MOE_ERROR_OVERFLOW, "K", "times T does not fit in 32-bit positions");
  *to = (moe_blockwise_layer){.T = l->T,
                              .H = l->H,
                              .I = l->I,
                              .E = l->E,
                              .N = pairs,
                              .B = 1,
                              .hidden_states = l->x,
                              .quantized_hidden_states = l->quantized_x,
                              .gate_up_proj_weight = l->gate_up,
                              .down_proj_weight = l->down,
                              .up_proj_weight = l->up,
                              .orders = l->orders,
                              .packed_gate_up_proj_weight = l->packed_gate_up,
                              .packed_down_proj_weight = l->packed_down,
                              .packed_gate_up_proj_weight_bytes = l->packed_gate_up_bytes,
                              .packed_down_proj_weight_bytes = l->packed_down_bytes,
                              .quantized_gate_up_proj_weight = l->quantized_gate_up,
                              .quantized_down_proj_weight = l->quantized_down,
                              .gate_and_up_proj_bias = l->gate_up_bias,
                              .down_proj_bias = l->down_bias,
                              .checkpoint_dtype = l->saved_dtype,
                              .config = l->config,
                              .mx = l->mx};
  return MOE_OK;
}

/* Instead of the tensors that tell of blocks those that tell of pairs. */
MOE_FN void moe_face_list_(const moe_pairs_ *pairs, moe_blockwise_ *call, moe_tensors_ *tensors) {
  const moe_blockwise_layer *l = &call->layer;
  const int64_t all = moe_mul3_(l->T, pairs->K, 4);
  const int sorted = pairs->sorted, scaled = l->config.affinity_mode != MOE_AFFINITY_NO_SCALE;
  moe_tensor_ *tensor = tensors->tensor;
  call->plan.pairs = *pairs;
  if (!scaled) call->plan.pairs.topk_weights = NULL;
  tensor[MOE_LAYER_AFFINITIES_] = (moe_tensor_){"topk_weights", call->plan.pairs.topk_weights, all, 4,
                                                scaled && !sorted ? MOE_INPUT : MOE_INPUT_OPTIONAL};
  tensor[MOE_LAYER_IDS_] = (moe_tensor_){"topk_index", pairs->topk_index, all, 4, MOE_INPUT};
  tensor[MOE_LAYER_BLOCKS_].role = MOE_INPUT_OPTIONAL;
  if (!sorted) return;
  tensor[MOE_LAYER_IDS_] = (moe_tensor_){"m_sizes", pairs->m_sizes, moe_mul_(l->E, 4), 4, MOE_INPUT};
  tensor[MOE_LAYER_BLOCKS_] = (moe_tensor_){"gather_indices", pairs->gather_indices, all, 4, MOE_INPUT_OPTIONAL};
}

MOE_FN moe_status moe_face_forward_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_face_forward_ *face = (moe_face_forward_ *)state;
  const moe_layer *l = (const moe_layer *)call->args;
  moe_blockwise_mm_fwd_args *args = &face->args;
  const moe_call_ inner = {.args = args, .dtype = call->dtype};
  MOE_TRY(moe_face_layer_(ctx, l, &args->layer));
  args->accumulate = l->accumulate;
  args->gate_up_activations_T = face->saved;
  args->output = face->y;
  MOE_TRY(moe_forward_check_(ctx, &face->forward, &inner, tensors));
  moe_face_list_(face->pairs, &face->forward.call, tensors);
  return MOE_OK;
}

MOE_FN moe_status moe_face_backward_check_(moe_context *ctx, void *state, const moe_call_ *call,
                                           moe_tensors_ *tensors) {
  moe_face_backward_ *face = (moe_face_backward_ *)state;
  const moe_layer *l = (const moe_layer *)call->args;
  const moe_layer_grads *grads = face->grads;
  moe_blockwise_mm_bwd_args *args = &face->args;
  const moe_call_ inner = {.args = args, .dtype = call->dtype};
  if (!grads) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "grads", "is NULL");
  MOE_TRY(moe_face_layer_(ctx, l, &args->layer));
  args->gate_up_activations_T = face->saved;
  args->output_hidden_states_grad = face->y_grad;
  args->affinity_option = MOE_AFFINITY_OPTION_ON_I;
  args->hidden_states_grad = grads->x;
  args->expert_affinities_masked_grad = grads->topk_weights;
  args->gate_up_proj_weight_grad = grads->gate_up;
  args->down_proj_weight_grad = grads->down;
  args->up_proj_weight_grad = grads->up;
  args->gate_and_up_proj_bias_grad = grads->gate_up_bias;
  args->down_proj_bias_grad = grads->down_bias;
  args->weight_grad_dtype = grads->weight_dtype;
  args->accumulate = grads->accumulate;
  MOE_TRY(moe_backward_check_(ctx, &face->backward, &inner, tensors));
  moe_face_list_(face->pairs, &face->backward.call, tensors);
  for (int i = 0; i < tensors->count; i++)
    if (strcmp(tensors->tensor[i].name, "expert_affinities_masked_grad") == 0)
      tensors->tensor[i].bytes = moe_mul3_(l->T, l->K, 4);
  return MOE_OK;
}

/* ------------------------------------------------------------------------------------------------------- operations */

static const moe_op_ moe_face_forward_op_ = {moe_face_forward_check_, moe_forward_layout_, moe_forward_run_,
                                             moe_forward_check_contents_, NULL};
static const moe_op_ moe_face_backward_op_ = {moe_face_backward_check_, moe_backward_layout_, moe_backward_run_,
                                              moe_backward_check_contents_, NULL};

MOE_FN moe_call_ moe_face_call_(const moe_layer *l, moe_dtype dtype, int query, size_t *bytes) {
  return (moe_call_){.args = l,
                     .dtype = dtype,
                     .query = query,
                     .answer = bytes,
                     .workspace = l ? l->workspace : NULL,
                     .workspace_bytes = l ? l->workspace_bytes : 0};
}

MOE_FN moe_pairs_ moe_face_pairs_(const moe_layer *l) {
  moe_pairs_ pairs = {0};
  if (!l) return pairs;
  pairs.K = l->K;
  pairs.identities = l->identity_experts;
  pairs.topk_index = l->topk_index;
  pairs.topk_weights = l->topk_weights;
  return pairs;
}

/* `query`: asks for the bytes of the workspace. */
MOE_FN moe_status moe_face_run_forward_(moe_context *ctx, const moe_layer *l, const moe_pairs_ *pairs, void *y,
                                        void *saved, moe_dtype dtype, int query, size_t *bytes) {
  moe_face_forward_ state = {.pairs = pairs, .y = y, .saved = saved};
  const moe_call_ call = moe_face_call_(l, dtype, query, bytes);
  return moe_face_status_(ctx, moe_op_run_(&moe_face_forward_op_, &state, ctx, &call));
}

MOE_FN moe_status moe_face_run_backward_(moe_context *ctx, const moe_layer *l, const moe_pairs_ *pairs,
                                         const void *saved, const void *y_grad, const moe_layer_grads *grads,
                                         moe_dtype dtype, int query, size_t *bytes) {
  moe_face_backward_ state = {.pairs = pairs, .saved = saved, .y_grad = y_grad, .grads = grads};
  const moe_call_ call = moe_face_call_(l, dtype, query, bytes);
  return moe_face_status_(ctx, moe_op_run_(&moe_face_backward_op_, &state, ctx, &call));
}

/* [pairs,2,I] of saved_dtype. */
MOE_FN moe_status moe_face_saved_bytes_(moe_context *ctx, const moe_layer *l, moe_dtype dtype, size_t *bytes) {
  moe_blockwise_layer layer;
  if (!l) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "layer", "is NULL");
  if (!bytes) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "bytes", "is NULL");
  MOE_TRY(moe_face_layer_(ctx, l, &layer));
  MOE_TRY(moe_face_status_(ctx, moe_check_layer_options_(ctx, &layer, dtype)));
  const int64_t size = moe_dtype_bytes_(moe_or_(l->saved_dtype, dtype)), n = moe_mul4_(l->T * l->K, 2, l->I, size);
  if (n < 0) return moe_fail_(ctx, MOE_ERROR_OVERFLOW, "saved", "of this shape overflows the address space");
  *bytes = (size_t)n;
  return moe_succeed_(ctx);
}

#define MOE_DEFINE_LAYER_(name, type, NAME)                                                                          \
  moe_status moe_layer_forward_##name(moe_context *ctx, const moe_layer *layer, void *y, void *saved) {              \
    const moe_pairs_ pairs = moe_face_pairs_(layer);                                                                 \
    return moe_face_run_forward_(ctx, layer, &pairs, y, saved, MOE_DTYPE_##NAME, 0, NULL);                           \
  }                                                                                                                  \
  moe_status moe_layer_backward_##name(moe_context *ctx, const moe_layer *layer, const void *saved,                  \
                                       const void *y_grad, const moe_layer_grads *grads) {                           \
    const moe_pairs_ pairs = moe_face_pairs_(layer);                                                                 \
    return moe_face_run_backward_(ctx, layer, &pairs, saved, y_grad, grads, MOE_DTYPE_##NAME, 0, NULL);              \
  }                                                                                                                  \
  moe_status moe_layer_saved_bytes_##name(moe_context *ctx, const moe_layer *layer, size_t *bytes) {                 \
    return moe_face_saved_bytes_(ctx, layer, MOE_DTYPE_##NAME, bytes);                                               \
  }                                                                                                                  \
  moe_status moe_layer_forward_##name##_workspace_size(moe_context *ctx, const moe_layer *layer, size_t *bytes) {    \
    const moe_pairs_ pairs = moe_face_pairs_(layer);                                                                 \
    return moe_face_run_forward_(ctx, layer, &pairs, NULL, NULL, MOE_DTYPE_##NAME, 1, bytes);                        \
  }                                                                                                                  \
  moe_status moe_layer_backward_##name##_workspace_size(moe_context *ctx, const moe_layer *layer, const void *saved, \
                                                        size_t *bytes) {                                             \
    const moe_pairs_ pairs = moe_face_pairs_(layer);                                                                 \
    const moe_layer_grads none = {0};                                                                                \
    return moe_face_run_backward_(ctx, layer, &pairs, saved, NULL, &none, MOE_DTYPE_##NAME, 1, bytes);               \
  }
MOE_DTYPE_LIST(MOE_DEFINE_LAYER_)
#undef MOE_DEFINE_LAYER_

#endif
