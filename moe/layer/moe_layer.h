/* moe_layer_*: the blockwise layer's stages on rows that come from pairs of tokens and experts. */
#ifndef MOE_LAYER_MOE_LAYER_H
#define MOE_LAYER_MOE_LAYER_H

/* The shared expert's gate is a router of one expert. */
typedef struct moe_face_gate_ {
  moe_router_ forward;
  moe_router_topk_args args;
  int32_t tokens; /* rows of the shared expert */
} moe_face_gate_;

/* What a call needs where there is a shared expert: on the stack only then. */
typedef struct moe_face_shared_forward_ {
  moe_forward_ forward;
  moe_blockwise_mm_fwd_args args;
  moe_face_gate_ gate;
} moe_face_shared_forward_;

typedef struct moe_face_shared_backward_ {
  moe_backward_ backward;
  moe_blockwise_mm_bwd_args args;
  moe_face_gate_ gate;
  moe_router_bwd_ gate_backward;
  moe_router_topk_bwd_args gate_args;
} moe_face_shared_backward_;

/* The blockwise layer's arguments are made from the caller's. */
typedef struct moe_face_forward_ {
  const moe_layer *layer;
  const moe_pairs_ *pairs;
  moe_forward_ forward;
  moe_blockwise_mm_fwd_args args;
  moe_router_ router;
  moe_router_topk_args router_args;
  moe_face_shared_forward_ *shared;
  void *y, *saved;
} moe_face_forward_;

typedef struct moe_face_backward_ {
  const moe_layer *layer;
  const moe_pairs_ *pairs;
  moe_backward_ backward;
  moe_blockwise_mm_bwd_args args;
  moe_router_bwd_ router;
  moe_router_topk_bwd_args router_args;
  moe_face_shared_backward_ *shared;
  int routed; /* the router's gradients are wanted */
  const void *saved, *y_grad;
  const moe_layer_grads *grads;
} moe_face_backward_;

/* -------------------------------------------------------------------------------------------------------- arguments */

/* The blockwise layer whose slots are pairs. */
MOE_FN moe_status moe_face_layer_(moe_context *ctx, const moe_layer *l, moe_blockwise_layer *to) {
  MOE_TRY(moe_check_positive_(ctx, "K", l->K));
  if (l->identity_experts < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "identity_experts", "is negative");
  if (l->identity_experts >= INT32_MAX - l->E)
    return moe_fail_(ctx, MOE_ERROR_OVERFLOW, "identity_experts", "and E do not fit in 32-bit ids");
  if (l->expert_scale && !moe_post_scaled_(&l->config))
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "config.affinity_mode",
                     "must be POST_SCALE or ON_I with expert_scale");
  if (l->recompute > 3u)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "recompute", "has bits that are no part of saved");
  MOE_TRY(moe_check_flag_(ctx, "keep_results", l->keep_results));
  if (l->keep_results && l->config.affinity_mode == MOE_AFFINITY_ON_I)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "keep_results", "has nothing to keep with ON_I");
  if (l->shared && l->shared->orders.per_expert)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "shared->orders.per_expert", "must be 0: there is one expert");
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

/* The same of the shared expert, which has all tokens. */
MOE_FN void moe_face_shared_layer_(const moe_layer *l, moe_blockwise_layer *to) {
  const moe_shared_expert *shared = l->shared;
  *to = (moe_blockwise_layer){.T = l->T,
                              .H = l->H,
                              .I = shared->I,
                              .E = 1,
                              .N = l->T,
                              .B = 1,
                              .hidden_states = l->x,
                              .gate_up_proj_weight = shared->gate_up,
                              .down_proj_weight = shared->down,
                              .up_proj_weight = shared->up,
                              .orders = shared->orders,
                              .packed_gate_up_proj_weight = shared->packed_gate_up,
                              .packed_down_proj_weight = shared->packed_down,
                              .packed_gate_up_proj_weight_bytes = shared->packed_gate_up_bytes,
                              .packed_down_proj_weight_bytes = shared->packed_down_bytes,
                              .quantized_gate_up_proj_weight = shared->quantized_gate_up,
                              .quantized_down_proj_weight = shared->quantized_down,
                              .gate_and_up_proj_bias = shared->gate_up_bias,
                              .down_proj_bias = shared->down_bias,
                              .checkpoint_dtype = l->saved_dtype,
                              .config = l->config,
                              .mx = l->mx};
  to->config.affinity_mode = shared->gate ? MOE_AFFINITY_POST_SCALE : MOE_AFFINITY_NO_SCALE;
  to->mx.gate_up_in_scale = to->mx.down_in_scale = NULL;
}

/* What `saved` holds, in order: g and u of the top-k's pairs, the pairs' results, g and u of the shared expert. */
enum { MOE_SAVED_EXPERTS_, MOE_SAVED_RESULTS_, MOE_SAVED_SHARED_, MOE_SAVED_END_ };

MOE_FN int64_t moe_face_saved_part_(const moe_layer *l, moe_dtype dtype, int part) {
  const int64_t size = moe_dtype_bytes_(moe_or_(l->saved_dtype, dtype)), pairs = moe_mul_(l->T, l->K);
  if (part == MOE_SAVED_EXPERTS_) return l->recompute & MOE_RECOMPUTE_EXPERTS ? 0 : moe_mul4_(pairs, 2, l->I, size);
  if (part == MOE_SAVED_RESULTS_) return l->keep_results ? moe_mul3_(pairs, l->H, size) : 0;
  return !l->shared || l->recompute & MOE_RECOMPUTE_SHARED ? 0 : moe_mul4_(l->T, 2, l->shared->I, size);
}

/* Where a part begins; after all: how many bytes. */
MOE_FN int64_t moe_face_saved_from_(const moe_layer *l, moe_dtype dtype, int part) {
  int64_t bytes = 0;
  for (int i = 0; i < part; i++) bytes = moe_add_(bytes, moe_face_saved_part_(l, dtype, i));
  return bytes;
}

/* A part in `saved`, or NULL. */
MOE_FN void *moe_face_saved_at_(const moe_layer *l, moe_dtype dtype, const void *saved, int part) {
  const int64_t from = moe_face_saved_from_(l, dtype, part);
  return saved && moe_face_saved_part_(l, dtype, part) ? (void *)((uintptr_t)saved + (uintptr_t)moe_max_(0, from))
                                                       : NULL;
}

/* Instead of the tensors that tell of blocks those that tell of pairs. chosen: 1: a router has done so; 2: it will. */
MOE_FN void moe_face_list_(const moe_pairs_ *pairs, int chosen, moe_blockwise_ *call, moe_tensors_ *tensors) {
  const moe_blockwise_layer *l = &call->layer;
  const int64_t all = moe_mul3_(l->T, pairs->K, 4);
  const int sorted = pairs->sorted, scaled = l->config.affinity_mode != MOE_AFFINITY_NO_SCALE;
  moe_tensor_ *tensor = tensors->tensor;
  call->plan.pairs = *pairs;
  if (!scaled) call->plan.pairs.topk_weights = NULL;
  tensor[MOE_LAYER_AFFINITIES_] =
      (moe_tensor_){chosen ? "router->expert_weights" : "topk_weights", call->plan.pairs.topk_weights, all, 4,
                    scaled && !sorted ? MOE_INPUT : MOE_INPUT_OPTIONAL};
  tensor[MOE_LAYER_IDS_] =
      (moe_tensor_){chosen ? "router->expert_index" : "topk_index", pairs->topk_index, all, 4, MOE_INPUT};
  tensor[MOE_LAYER_BLOCKS_].role = MOE_INPUT_OPTIONAL;
  if (chosen > 1) {
    tensor[MOE_LAYER_AFFINITIES_].data = tensor[MOE_LAYER_IDS_].data = call->plan.pairs.topk_index = NULL;
    tensor[MOE_LAYER_AFFINITIES_].role = tensor[MOE_LAYER_IDS_].role = MOE_INPUT_OPTIONAL;
  }
  const moe_tensor_ scale[] = {{"expert_scale", pairs->scale, moe_mul_(l->E, 4), 4, MOE_INPUT_OPTIONAL}};
  MOE_LIST_(tensors, scale);
  if (!sorted) return;
  tensor[MOE_LAYER_IDS_] = (moe_tensor_){"m_sizes", pairs->m_sizes, moe_mul_(l->E, 4), 4, MOE_INPUT};
  tensor[MOE_LAYER_BLOCKS_] = (moe_tensor_){"gather_indices", pairs->gather_indices, all, 4, MOE_INPUT_OPTIONAL};
}

/* ---------------------------------------------------------------------------------------------------------- routers */

/* The router's arguments; x is known when it runs. */
MOE_FN moe_router_topk_args moe_face_router_args_(const moe_layer *l) {
  moe_router_topk_args args = *l->router;
  args.T = l->T, args.H = l->H, args.E = l->E + l->identity_experts, args.K = l->K, args.hidden_states = NULL;
  return args;
}

MOE_FN moe_status moe_face_router_check_(moe_context *ctx, moe_face_forward_ *s, moe_dtype dtype,
                                         moe_tensors_ *tensors) {
  const moe_call_ inner = {.args = &s->router_args, .dtype = dtype, .query = 1};
  moe_tensors_ part = {0};
  s->router_args = moe_face_router_args_(s->layer);
  MOE_TRY(moe_face_status_(ctx, moe_router_check_(ctx, &s->router, &inner, &part), "router->"));
  moe_face_append_(&part, tensors);
  return MOE_OK;
}

/* The shared expert's pairs, and its gate, if it has one. */
MOE_FN moe_status moe_face_gate_check_(moe_context *ctx, moe_face_gate_ *gate, const moe_layer *l, moe_dtype dtype,
                                       moe_pairs_ *pairs, moe_tensors_ *tensors) {
  const moe_call_ inner = {.args = &gate->args, .dtype = dtype, .query = 1};
  const int64_t size = moe_dtype_bytes_(dtype);
  const moe_tensor_ weight[] = {{"shared->gate", l->shared->gate, moe_mul_(l->H, size), size, MOE_INPUT_OPTIONAL}};
  moe_tensors_ part = {0};
  gate->tokens = (int32_t)l->T;
  *pairs = (moe_pairs_){.K = 1, .sorted = 1, .m_sizes = &gate->tokens};
  if (!l->shared->gate) return MOE_OK;
  gate->args = (moe_router_topk_args){.T = l->T,
                                      .H = l->H,
                                      .E = 1,
                                      .K = 1,
                                      .router_weight = l->shared->gate,
                                      .config = {.score_function = MOE_SCORE_SIGMOID}};
  MOE_LIST_(tensors, weight);
  return moe_router_check_(ctx, &gate->forward, &inner, &part);
}

MOE_FN void moe_face_gate_layout_(moe_face_gate_ *gate, moe_pairs_ *pairs, moe_arena_ *arena, int64_t workers) {
  moe_router_topk_args *args = &gate->args;
  const int64_t bytes = moe_mul_(args->T, 4);
  if (!args->router_weight) return;
  args->router_logits = (float *)moe_take_(arena, bytes);
  args->expert_index = (int32_t *)moe_take_(arena, bytes);
  pairs->topk_weights = args->expert_weights = (float *)moe_take_(arena, bytes);
  moe_router_layout_(&gate->forward, arena, workers);
}

/* Runs it, of x [T,H]. */
MOE_FN void moe_face_gate_run_(moe_context *ctx, moe_face_gate_ *gate, const char *x) {
  gate->args.hidden_states = x;
  if (gate->args.router_weight) moe_router_run_(ctx, &gate->forward);
}

/* ---------------------------------------------------------------------------------------------------------- forward */

MOE_FN moe_status moe_face_shared_check_(moe_context *ctx, moe_face_forward_ *s, moe_dtype dtype,
                                         moe_tensors_ *tensors) {
  moe_face_shared_forward_ *shared = s->shared;
  const moe_call_ inner = {.args = &shared->args, .dtype = dtype};
  moe_tensors_ part = {0};
  s->forward.shared = &shared->forward;
  moe_face_shared_layer_(s->layer, &shared->args.layer);
  shared->args.gate_up_activations_T = moe_face_saved_at_(s->layer, dtype, s->saved, MOE_SAVED_SHARED_);
  MOE_TRY(moe_face_status_(ctx, moe_forward_check_(ctx, &shared->forward, &inner, &part), "shared->"));
  moe_face_append_(&part, tensors);
  return moe_face_gate_check_(ctx, &shared->gate, s->layer, dtype, &shared->forward.call.plan.pairs, tensors);
}

MOE_FN moe_status moe_face_forward_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_face_forward_ *s = (moe_face_forward_ *)state;
  const moe_layer *l = s->layer = (const moe_layer *)call->args;
  moe_blockwise_mm_fwd_args *args = &s->args;
  const moe_call_ inner = {.args = args, .dtype = call->dtype};
  MOE_TRY(moe_face_layer_(ctx, l, &args->layer));
  args->accumulate = l->accumulate;
  args->gate_up_activations_T = moe_face_saved_at_(l, call->dtype, s->saved, MOE_SAVED_EXPERTS_);
  args->down_activations = moe_face_saved_at_(l, call->dtype, s->saved, MOE_SAVED_RESULTS_);
  args->output = s->y;
  MOE_TRY(moe_forward_check_(ctx, &s->forward, &inner, tensors));
  moe_face_list_(s->pairs, l->router ? 2 : 0, &s->forward.call, tensors);
  moe_face_shorten_(tensors);
  if (l->router) MOE_TRY(moe_face_router_check_(ctx, s, call->dtype, tensors));
  return l->shared ? moe_face_shared_check_(ctx, s, call->dtype, tensors) : MOE_OK;
}

MOE_FN moe_status moe_face_forward_check_contents_(moe_context *ctx, const void *state) {
  const moe_face_forward_ *s = (const moe_face_forward_ *)state;
  MOE_TRY(moe_forward_check_contents_(ctx, &s->forward));
  if (s->layer->router) MOE_TRY(moe_face_status_(ctx, moe_router_check_contents_(ctx, &s->router), "router->"));
  return s->shared ? moe_face_status_(ctx, moe_forward_check_contents_(ctx, &s->shared->forward), "shared->") : MOE_OK;
}

MOE_FN void moe_face_forward_layout_(void *state, moe_arena_ *arena, int64_t workers) {
  moe_face_forward_ *s = (moe_face_forward_ *)state;
  moe_forward_layout_(&s->forward, arena, workers);
  if (s->layer->router) moe_router_layout_(&s->router, arena, workers);
  if (s->shared) moe_face_gate_layout_(&s->shared->gate, &s->shared->forward.call.plan.pairs, arena, workers);
}

MOE_FN moe_status moe_face_forward_run_(moe_context *ctx, void *state) {
  moe_face_forward_ *s = (moe_face_forward_ *)state;
  const char *x = moe_forward_x_(ctx, &s->forward);
  s->router_args.hidden_states = x;
  if (s->layer->router) moe_router_run_(ctx, &s->router);
  if (s->shared) moe_face_gate_run_(ctx, &s->shared->gate, x);
  s->forward.call.plan.pairs.topk_index = s->pairs->topk_index;
  return moe_forward_run_x_(ctx, &s->forward, x);
}

/* --------------------------------------------------------------------------------------------------------- backward */

enum {
  MOE_FACE_ROUTER_BITS_ =
      MOE_ACCUMULATE_ROUTER_LOGITS_GRAD | MOE_ACCUMULATE_ROUTER_WEIGHT_GRAD | MOE_ACCUMULATE_ROUTER_BIAS_GRAD
};

/* The gradients of a router that ran with `chosen`; weight, bias, logits: or NULL. */
MOE_FN void moe_face_router_bwd_args_(const moe_face_backward_ *s, const moe_router_topk_args *chosen, float *logits,
                                      void *weight, void *bias, moe_router_topk_bwd_args *args) {
  *args = (moe_router_topk_bwd_args){.T = chosen->T,
                                     .H = chosen->H,
                                     .E = chosen->E,
                                     .K = chosen->K,
                                     .router_weight = chosen->router_weight,
                                     .router_logits = chosen->router_logits,
                                     .expert_index = chosen->expert_index,
                                     .config = chosen->config,
                                     .router_logits_grad = logits,
                                     .router_weight_grad = weight,
                                     .router_bias_grad = bias,
                                     .hidden_states_grad = s->grads->x,
                                     .router_weight_dtype = chosen->router_weight_dtype,
                                     .weight_grad_dtype = s->grads->weight_dtype,
                                     .accumulate = s->grads->accumulate & MOE_FACE_ROUTER_BITS_};
  if (!logits) args->accumulate &= ~(uint32_t)MOE_ACCUMULATE_ROUTER_LOGITS_GRAD;
  args->accumulate |= MOE_ACCUMULATE_HIDDEN_STATES_GRAD; /* the layer's part is there */
}

/* Checks the router's backward, of which the inputs are as the forward's checks have them. */
MOE_FN moe_status moe_face_router_bwd_check_(moe_context *ctx, moe_face_backward_ *s, const moe_call_ *call,
                                             moe_tensors_ *tensors) {
  const moe_layer_grads *grads = s->grads;
  const moe_call_ inner = {.args = &s->router_args, .dtype = call->dtype, .query = call->query};
  moe_tensors_ part = {0};
  const moe_router_topk_args chosen = moe_face_router_args_(s->layer);
  moe_face_router_bwd_args_(s, &chosen, grads->router_logits, grads->router_weight, grads->router_bias,
                            &s->router_args);
  s->routed = call->query || grads->x || grads->router_weight || grads->router_bias || grads->router_logits;
  MOE_TRY(moe_face_status_(ctx, moe_router_bwd_check_(ctx, &s->router, &inner, &part), "router->"));
  for (int i = 0; i < part.count; i++)
    if (strcmp(part.tensor[i].name, "router_logits_grad") == 0) part.tensor[i].role = MOE_OUTPUT_OPTIONAL;
  moe_face_append_(&part, tensors);
  return MOE_OK;
}

MOE_FN void moe_face_shared_bwd_args_(moe_face_backward_ *s, moe_dtype dtype) {
  static const moe_shared_expert_grads none = {0};
  const moe_shared_expert_grads *grads = s->grads->shared ? s->grads->shared : &none;
  moe_blockwise_mm_bwd_args *args = &s->shared->args;
  moe_face_shared_layer_(s->layer, &args->layer);
  args->gate_up_activations_T = moe_face_saved_at_(s->layer, dtype, s->saved, MOE_SAVED_SHARED_);
  args->affinity_option = MOE_AFFINITY_OPTION_ON_I;
  args->gate_up_proj_weight_grad = grads->gate_up;
  args->down_proj_weight_grad = grads->down;
  args->up_proj_weight_grad = grads->up;
  args->gate_and_up_proj_bias_grad = grads->gate_up_bias;
  args->down_proj_bias_grad = grads->down_bias;
  args->weight_grad_dtype = s->grads->weight_dtype;
  args->accumulate = s->args.accumulate & ~(uint32_t)MOE_ACCUMULATE_AFFINITIES_GRAD;
}

/* The shared expert, its gate, and the gate's backward. */
MOE_FN moe_status moe_face_shared_bwd_check_(moe_context *ctx, moe_face_backward_ *s, const moe_call_ *call,
                                             moe_tensors_ *tensors) {
  moe_face_shared_backward_ *shared = s->shared;
  const moe_call_ inner = {.args = &shared->args, .dtype = call->dtype},
                  gate = {.args = &shared->gate_args, .dtype = call->dtype, .query = call->query};
  moe_tensors_ part = {0};
  s->backward.shared = &shared->backward;
  moe_face_shared_bwd_args_(s, call->dtype);
  MOE_TRY(moe_face_status_(ctx, moe_backward_check_(ctx, &shared->backward, &inner, &part), "shared->"));
  moe_face_append_(&part, tensors);
  moe_pairs_ *pairs = &shared->backward.call.plan.pairs;
  MOE_TRY(moe_face_gate_check_(ctx, &shared->gate, s->layer, call->dtype, pairs, tensors));
  if (!s->layer->shared->gate) return MOE_OK;
  void *grad = s->grads->shared ? s->grads->shared->gate : NULL;
  const int64_t size = moe_dtype_bytes_(shared->backward.weight_grad_dtype);
  const moe_tensor_ own[] = {{"grads.shared->gate", grad, moe_mul_(s->layer->H, size), size, MOE_OUTPUT_OPTIONAL}};
  MOE_LIST_(tensors, own);
  moe_face_router_bwd_args_(s, &shared->gate.args, NULL, grad, NULL, &shared->gate_args);
  part.count = 0;
  return moe_router_bwd_check_(ctx, &shared->gate_backward, &gate, &part);
}

MOE_FN void moe_face_backward_args_(moe_face_backward_ *s, moe_dtype dtype) {
  const moe_layer_grads *grads = s->grads;
  const moe_layer *l = s->layer;
  moe_blockwise_mm_bwd_args *args = &s->args;
  args->gate_up_activations_T = moe_face_saved_at_(l, dtype, s->saved, MOE_SAVED_EXPERTS_);
  args->down_activations = moe_face_saved_at_(l, dtype, s->saved, MOE_SAVED_RESULTS_);
  args->output_hidden_states_grad = s->y_grad;
  args->affinity_option = l->keep_results ? MOE_AFFINITY_OPTION_ON_H : MOE_AFFINITY_OPTION_ON_I;
  args->hidden_states_grad = grads->x;
  args->expert_affinities_masked_grad = grads->topk_weights;
  args->gate_up_proj_weight_grad = grads->gate_up;
  args->down_proj_weight_grad = grads->down;
  args->up_proj_weight_grad = grads->up;
  args->gate_and_up_proj_bias_grad = grads->gate_up_bias;
  args->down_proj_bias_grad = grads->down_bias;
  args->weight_grad_dtype = grads->weight_dtype;
  args->accumulate = grads->accumulate;
  if (l->router || (l->shared && l->shared->gate)) args->accumulate &= ~(uint32_t)MOE_FACE_ROUTER_BITS_;
}

MOE_FN moe_status moe_face_backward_check_(moe_context *ctx, void *state, const moe_call_ *call,
                                           moe_tensors_ *tensors) {
  moe_face_backward_ *s = (moe_face_backward_ *)state;
  const moe_layer *l = s->layer = (const moe_layer *)call->args;
  const moe_call_ inner = {.args = &s->args, .dtype = call->dtype};
  if (!s->grads) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "grads", "is NULL");
  if (l->keep_results && !s->saved && !call->query)
    return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "saved", "is NULL, but is to hold results");
  MOE_TRY(moe_face_layer_(ctx, l, &s->args.layer));
  moe_face_backward_args_(s, call->dtype);
  MOE_TRY(moe_backward_check_(ctx, &s->backward, &inner, tensors));
  s->backward.scale_grad = l->expert_scale ? s->grads->expert_scale : NULL;
  for (int i = 0; i < tensors->count; i++)
    if (strcmp(tensors->tensor[i].name, "expert_affinities_masked_grad") == 0)
      tensors->tensor[i].bytes = moe_mul3_(l->T, l->K, 4);
  moe_face_list_(s->pairs, l->router != NULL, &s->backward.call, tensors);
  const moe_tensor_ own[] = {{"grads.expert_scale", s->backward.scale_grad, moe_mul_(l->E, 4), 4, MOE_OUTPUT_OPTIONAL}};
  MOE_LIST_(tensors, own);
  moe_face_shorten_(tensors);
  if (l->router) MOE_TRY(moe_face_router_bwd_check_(ctx, s, call, tensors));
  return l->shared ? moe_face_shared_bwd_check_(ctx, s, call, tensors) : MOE_OK;
}

MOE_FN moe_status moe_face_backward_check_contents_(moe_context *ctx, const void *state) {
  const moe_face_backward_ *s = (const moe_face_backward_ *)state;
  if (s->layer->router) MOE_TRY(moe_face_status_(ctx, moe_router_bwd_check_contents_(ctx, &s->router), "router->"));
  MOE_TRY(moe_backward_check_contents_(ctx, &s->backward));
  return s->shared ? moe_face_status_(ctx, moe_backward_check_contents_(ctx, &s->shared->backward), "shared->")
                   : MOE_OK;
}

/* The gradients that go from one to another are in the workspace, where the caller has no use for them. */
MOE_FN void moe_face_backward_layout_(void *state, moe_arena_ *arena, int64_t workers) {
  moe_face_backward_ *s = (moe_face_backward_ *)state;
  moe_face_shared_backward_ *shared = s->shared;
  const int64_t tokens = moe_mul_(s->layer->T, 4);
  moe_backward_layout_(&s->backward, arena, workers);
  if (s->routed) {
    if (!s->grads->topk_weights)
      s->args.expert_affinities_masked_grad = moe_take_(arena, moe_mul_(s->layer->K, tokens));
    if (!s->grads->router_logits)
      s->router_args.router_logits_grad = (float *)moe_take_(arena, moe_mul_(s->router_args.E, tokens));
    moe_router_bwd_layout_(&s->router, arena, workers);
  }
  if (!shared) return;
  moe_face_gate_layout_(&shared->gate, &shared->backward.call.plan.pairs, arena, workers);
  if (!shared->gate_args.router_weight) return;
  shared->args.expert_affinities_masked_grad = moe_take_(arena, tokens);
  shared->gate_args.router_logits_grad = (float *)moe_take_(arena, tokens);
  moe_router_bwd_layout_(&shared->gate_backward, arena, workers);
}

MOE_FN moe_status moe_face_backward_run_(moe_context *ctx, void *state) {
  moe_face_backward_ *s = (moe_face_backward_ *)state;
  moe_face_shared_backward_ *shared = s->shared;
  const char *x = moe_backward_x_(ctx, &s->backward);
  if (shared) moe_face_gate_run_(ctx, &shared->gate, x);
  MOE_TRY(moe_backward_run_x_(ctx, &s->backward, x));
  s->router_args.hidden_states = x;
  s->router_args.expert_weights_grad = (const float *)s->args.expert_affinities_masked_grad;
  if (s->routed) MOE_TRY(moe_router_bwd_run_(ctx, &s->router));
  if (!shared || !shared->gate_args.router_weight) return MOE_OK;
  shared->gate_args.hidden_states = x;
  shared->gate_args.router_logits = shared->gate.args.router_logits;
  shared->gate_args.expert_index = shared->gate.args.expert_index;
  shared->gate_args.expert_weights_grad = (const float *)shared->args.expert_affinities_masked_grad;
  return moe_router_bwd_run_(ctx, &shared->gate_backward);
}

/* ------------------------------------------------------------------------------------------------------- operations */

static const moe_op_ moe_face_forward_op_ = {moe_face_forward_check_, moe_face_forward_layout_, moe_face_forward_run_,
                                             moe_face_forward_check_contents_, NULL};
static const moe_op_ moe_face_backward_op_ = {moe_face_backward_check_, moe_face_backward_layout_,
                                              moe_face_backward_run_, moe_face_backward_check_contents_, NULL};

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
  pairs.topk_index = l->router ? l->router->expert_index : l->topk_index;
  pairs.topk_weights = l->router ? l->router->expert_weights : l->topk_weights;
  pairs.scale = l->expert_scale;
  return pairs;
}

MOE_FN moe_status moe_face_forward_shared_(moe_context *ctx, moe_face_forward_ *state, const moe_call_ *call) {
  moe_face_shared_forward_ shared = {0};
  state->shared = &shared;
  return moe_op_run_(&moe_face_forward_op_, state, ctx, call);
}

/* `query`: asks for the bytes of the workspace. */
MOE_FN moe_status moe_face_run_forward_(moe_context *ctx, const moe_layer *l, const moe_pairs_ *pairs, void *y,
                                        void *saved, moe_dtype dtype, int query, size_t *bytes) {
  moe_face_forward_ state = {.pairs = pairs, .y = y, .saved = saved};
  const moe_call_ call = moe_face_call_(l, dtype, query, bytes);
  const moe_status status = l && l->shared ? moe_face_forward_shared_(ctx, &state, &call)
                                           : moe_op_run_(&moe_face_forward_op_, &state, ctx, &call);
  return moe_face_status_(ctx, status, "");
}

MOE_FN moe_status moe_face_backward_shared_(moe_context *ctx, moe_face_backward_ *state, const moe_call_ *call) {
  moe_face_shared_backward_ shared = {0};
  state->shared = &shared;
  return moe_op_run_(&moe_face_backward_op_, state, ctx, call);
}

MOE_FN moe_status moe_face_run_backward_(moe_context *ctx, const moe_layer *l, const moe_pairs_ *pairs,
                                         const void *saved, const void *y_grad, const moe_layer_grads *grads,
                                         moe_dtype dtype, int query, size_t *bytes) {
  moe_face_backward_ state = {.pairs = pairs, .saved = saved, .y_grad = y_grad, .grads = grads};
  const moe_call_ call = moe_face_call_(l, dtype, query, bytes);
  const moe_status status = l && l->shared ? moe_face_backward_shared_(ctx, &state, &call)
                                           : moe_op_run_(&moe_face_backward_op_, &state, ctx, &call);
  return moe_face_status_(ctx, status, "");
}

MOE_FN moe_status moe_face_saved_bytes_(moe_context *ctx, const moe_layer *l, moe_dtype dtype, size_t *bytes) {
  moe_blockwise_layer layer;
  if (!l) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "layer", "is NULL");
  if (!bytes) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "bytes", "is NULL");
  MOE_TRY(moe_face_layer_(ctx, l, &layer));
  MOE_TRY(moe_face_status_(ctx, moe_check_layer_options_(ctx, &layer, dtype), ""));
  if (l->shared) {
    moe_face_shared_layer_(l, &layer);
    MOE_TRY(moe_face_status_(ctx, moe_check_layer_options_(ctx, &layer, dtype), "shared->"));
  }
  const int64_t n = moe_face_saved_from_(l, dtype, MOE_SAVED_END_);
  if (n < 0) return moe_fail_(ctx, MOE_ERROR_OVERFLOW, "saved", "of this shape overflows the address space");
  *bytes = (size_t)n;
  return moe_succeed_(ctx);
}

/* A call of moe_layer itself, whose pairs are top-k ids; or a question how many bytes it needs. */
MOE_FN moe_status moe_face_forward_call_(moe_context *ctx, const moe_layer *l, void *y, void *saved, moe_dtype dtype,
                                         int query, size_t *bytes) {
  const moe_pairs_ pairs = moe_face_pairs_(l);
  return moe_face_run_forward_(ctx, l, &pairs, y, saved, dtype, query, bytes);
}
MOE_FN moe_status moe_face_backward_call_(moe_context *ctx, const moe_layer *l, const void *saved, const void *y_grad,
                                          const moe_layer_grads *grads, moe_dtype dtype, int query, size_t *bytes) {
  const moe_pairs_ pairs = moe_face_pairs_(l);
  return moe_face_run_backward_(ctx, l, &pairs, saved, y_grad, grads, dtype, query, bytes);
}
static const moe_layer_grads moe_face_no_grads_ = {0};

#define MOE_DEFINE_LAYER_CALLS_(name, type, NAME)                                                       \
  moe_status moe_layer_forward_##name(moe_context *ctx, const moe_layer *layer, void *y, void *saved) { \
    return moe_face_forward_call_(ctx, layer, y, saved, MOE_DTYPE_##NAME, 0, NULL);                     \
  }                                                                                                     \
  moe_status moe_layer_backward_##name(moe_context *ctx, const moe_layer *layer, const void *saved,     \
                                       const void *y_grad, const moe_layer_grads *grads) {              \
    return moe_face_backward_call_(ctx, layer, saved, y_grad, grads, MOE_DTYPE_##NAME, 0, NULL);        \
  }
#define MOE_DEFINE_LAYER_SIZES_(name, type, NAME)                                                                    \
  moe_status moe_layer_saved_bytes_##name(moe_context *ctx, const moe_layer *layer, size_t *bytes) {                 \
    return moe_face_saved_bytes_(ctx, layer, MOE_DTYPE_##NAME, bytes);                                               \
  }                                                                                                                  \
  moe_status moe_layer_forward_##name##_workspace_size(moe_context *ctx, const moe_layer *layer, size_t *bytes) {    \
    return moe_face_forward_call_(ctx, layer, NULL, NULL, MOE_DTYPE_##NAME, 1, bytes);                               \
  }                                                                                                                  \
  moe_status moe_layer_backward_##name##_workspace_size(moe_context *ctx, const moe_layer *layer, const void *saved, \
                                                        size_t *bytes) {                                             \
    return moe_face_backward_call_(ctx, layer, saved, NULL, &moe_face_no_grads_, MOE_DTYPE_##NAME, 1, bytes);        \
  }
MOE_DTYPE_LIST(MOE_DEFINE_LAYER_CALLS_)
MOE_DTYPE_LIST(MOE_DEFINE_LAYER_SIZES_)
#undef MOE_DEFINE_LAYER_CALLS_
#undef MOE_DEFINE_LAYER_SIZES_

#endif
