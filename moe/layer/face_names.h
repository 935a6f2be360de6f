/* moe_layer_* runs the blockwise layer and routers: what their arguments are called in its own, for error messages; and
   their tensors, as far as there are any, in its list. */
#ifndef MOE_LAYER_FACE_NAMES_H
#define MOE_LAYER_FACE_NAMES_H

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
    {"down_activations", "saved"},
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

/* Writes what `from` begins with under the caller's name, in a scope; `from` may go on behind the name. */
MOE_FN void moe_face_name_(char *to, size_t room, const char *scope, const char *const (*names)[2], size_t count,
                           const char *from) {
  const size_t length = strcspn(from, " -");
  const char *name = NULL;
  for (size_t i = 0; i < count && !name; i++)
    if (strlen(names[i][0]) == length && memcmp(names[i][0], from, length) == 0) name = names[i][1];
  const char *part[] = {scope, name ? name : "", name ? from + length : from};
  size_t at = 0;
  for (int i = 0; i < 3; i++)
    for (const char *c = part[i]; *c && at + 1 < room; c++) to[at++] = *c;
  to[at] = 0;
}

/* Lets the message begin with the caller's name of the argument. */
MOE_FN moe_status moe_face_rename_(moe_context *ctx, moe_status status, const char *scope,
                                   const char *const (*names)[2], size_t count) {
  if (status == MOE_OK || !ctx) return status;
  char message[sizeof ctx->message];
  memcpy(message, ctx->message, sizeof message);
  moe_face_name_(ctx->message, sizeof message, scope, names, count, message);
  return status;
}

enum { MOE_FACE_NAMES_ = sizeof moe_face_names_ / sizeof *moe_face_names_ };
MOE_FN moe_status moe_face_status_(moe_context *ctx, moe_status status, const char *scope) {
  return moe_face_rename_(ctx, status, scope, moe_face_names_, MOE_FACE_NAMES_);
}

/* The tensors of the shared expert and of the router; what they take from the layer has no name of its own. */
static const char *const moe_face_parts_[][2] = {
    {"gate_up_proj_weight", "shared->gate_up"},
    {"down_proj_weight", "shared->down"},
    {"up_proj_weight", "shared->up"},
    {"gate_and_up_proj_bias", "shared->gate_up_bias"},
    {"down_proj_bias", "shared->down_bias"},
    {"packed_gate_up_proj_weight", "shared->packed_gate_up"},
    {"packed_down_proj_weight", "shared->packed_down"},
    {"quantized_gate_up_proj_weight->codes", "shared->quantized_gate_up->codes"},
    {"quantized_gate_up_proj_weight->scales", "shared->quantized_gate_up->scales"},
    {"quantized_gate_up_proj_weight->global_scale", "shared->quantized_gate_up->global_scale"},
    {"quantized_gate_up_proj_weight->zero_points", "shared->quantized_gate_up->zero_points"},
    {"quantized_down_proj_weight->codes", "shared->quantized_down->codes"},
    {"quantized_down_proj_weight->scales", "shared->quantized_down->scales"},
    {"quantized_down_proj_weight->global_scale", "shared->quantized_down->global_scale"},
    {"quantized_down_proj_weight->zero_points", "shared->quantized_down->zero_points"},
    {"gate_up_activations_T", "saved"},
    {"gate_up_proj_weight_grad", "grads.shared->gate_up"},
    {"down_proj_weight_grad", "grads.shared->down"},
    {"up_proj_weight_grad", "grads.shared->up"},
    {"gate_and_up_proj_bias_grad", "grads.shared->gate_up_bias"},
    {"down_proj_bias_grad", "grads.shared->down_bias"},
    {"router_weight", "router->router_weight"},
    {"router_bias", "router->router_bias"},
    {"selection_bias", "router->selection_bias"},
    {"token_mask", "router->token_mask"},
    {"router_logits", "router->router_logits"},
    {"expert_weights", "router->expert_weights"},
    {"expert_index", "router->expert_index"},
    {"router_logits_grad", "grads.router_logits"},
    {"router_weight_grad", "grads.router_weight"},
    {"router_bias_grad", "grads.router_bias"},
    {"hidden_states", NULL},
    {"expert_affinities_masked", NULL},
    {"token_position_to_id", NULL},
    {"block_to_expert", NULL},
    {"output", NULL},
    {"output_hidden_states_grad", NULL},
    {"hidden_states_grad", NULL},
    {"expert_weights_grad", NULL},
};

/* Adds the tensors that are there, or must be, to the list. */
MOE_FN void moe_face_append_(const moe_tensors_ *part, moe_tensors_ *tensors) {
  for (int i = 0; i < part->count; i++) {
    moe_tensor_ t = part->tensor[i];
    if (!t.data && (t.role == MOE_INPUT_OPTIONAL || t.role == MOE_OUTPUT_OPTIONAL)) continue;
    for (size_t n = 0; n < sizeof moe_face_parts_ / sizeof *moe_face_parts_; n++)
      if (strcmp(moe_face_parts_[n][0], part->tensor[i].name) == 0) t.name = moe_face_parts_[n][1];
    if (t.name) tensors->tensor[tensors->count++] = t;
  }
}

/* Takes those that are not there from the list. */
MOE_FN void moe_face_shorten_(moe_tensors_ *tensors) {
  int count = 0;
  uint64_t each = 0;
  for (int i = 0; i < tensors->count; i++) {
    const moe_tensor_ t = tensors->tensor[i];
    if (!t.data && (t.role == MOE_INPUT_OPTIONAL || t.role == MOE_OUTPUT_OPTIONAL)) continue;
    each |= (tensors->each >> i & 1) << count;
    tensors->tensor[count++] = t;
  }
  tensors->count = count, tensors->each = each;
}

#endif
