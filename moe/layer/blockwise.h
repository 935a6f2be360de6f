/* What the blockwise forward and backward share: validation and resolved types. */
#ifndef MOE_LAYER_BLOCKWISE_H
#define MOE_LAYER_BLOCKWISE_H

/* One call, its defaults resolved. */
typedef struct moe_blockwise_ {
  moe_group_ group;
  moe_blockwise_layer layer; /* block_to_expert NULL when block e is expert e */
  moe_dtype dtype, affinity_dtype, checkpoint_dtype;
  moe_dtype inner_dtype;                     /* of intermediates: contract 3 */
  int64_t size, inner_size, checkpoint_size; /* bytes of an element */
  moe_packed_ gate_up, down;                 /* how the weights divide into panels */
  moe_glu_ glu;
  moe_plan_ plan;
  moe_mx_round_ round_activations, round_weights, round_gradients;
  moe_rounded_ rounded_gate_up, rounded_down, rounded_down_transposed, rounded_gate_up_transposed; /* see weights.h */
  const char *hidden; /* hidden_states as the forward's products take them: [T,H], with gate_up_in_scale [rows,H] */
  int rounds_sums;    /* sums over blocks are rounded after each of them */
} moe_blockwise_;

MOE_FN int moe_pre_scaled_(const moe_layer_config *config) { return config->affinity_mode == MOE_AFFINITY_PRE_SCALE; }

/* The affinity multiplies the expert's output. */
MOE_FN int moe_post_scaled_(const moe_layer_config *config) {
  return config->affinity_mode == MOE_AFFINITY_POST_SCALE || config->affinity_mode == MOE_AFFINITY_ON_I;
}

/* ------------------------------------------------------------------------------------------------------ validation */

MOE_FN moe_status moe_check_config_(moe_context *ctx, const moe_layer_config *config) {
  const float limit[5] = {config->gate_clamp_upper_limit, config->gate_clamp_lower_limit, config->up_clamp_upper_limit,
                          config->up_clamp_lower_limit, config->activation_clamp_upper_limit};
  static const char *const name[5] = {"config.gate_clamp_upper_limit", "config.gate_clamp_lower_limit",
                                      "config.up_clamp_upper_limit", "config.up_clamp_lower_limit",
                                      "config.activation_clamp_upper_limit"};
  MOE_TRY(moe_check_enum_(ctx, "config.activation", (int)config->activation, MOE_ACT_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "config.affinity_mode", (int)config->affinity_mode, MOE_AFFINITY_COUNT_));
  MOE_TRY(moe_check_flag_(ctx, "config.skip_gate", config->skip_gate));
  MOE_TRY(moe_check_finite_(ctx, "config.alpha", &config->alpha));
  MOE_TRY(moe_check_finite_(ctx, "config.up_offset", &config->up_offset));
  MOE_TRY(moe_check_softcap_(ctx, "config.up_softcap", &config->up_softcap));
  if (config->clamp > 31u)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "config.clamp", "has bits that are no MOE_CLAMP_* flag");
  for (int i = 0; i < 5; i++)
    if (config->clamp >> i & 1u) MOE_TRY(moe_check_finite_(ctx, name[i], &limit[i]));
  return MOE_OK;
}

MOE_FN moe_status moe_check_mx_operands_(moe_context *ctx, const moe_blockwise_layer *layer) {
  const moe_mx_operands *mx = &layer->mx;
  MOE_TRY(moe_mx_round_check_(ctx, "mx.activations", &mx->activations));
  MOE_TRY(moe_mx_round_check_(ctx, "mx.weights", &mx->weights));
  MOE_TRY(moe_mx_round_check_(ctx, "mx.gradients", &mx->gradients));
  MOE_TRY(moe_check_flag_(ctx, "mx.weight_grads", mx->weight_grads));
  MOE_TRY(moe_check_enum_(ctx, "mx.activation_layout", (int)mx->activation_layout, MOE_MX_LAYOUT_COUNT_));
  if (mx->activations.enabled) {
    MOE_TRY(moe_mx_check_shape_(ctx, mx->activation_layout, 4, 2, layer->H));
    MOE_TRY(moe_mx_check_shape_(ctx, mx->activation_layout, 4, 1, layer->I));
  }
  if ((mx->gate_up_in_scale || mx->down_in_scale) &&
      (!mx->activations.enabled || moe_element_format_of_(mx->activations.element).bits != 8))
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, mx->gate_up_in_scale ? "mx.gate_up_in_scale" : "mx.down_in_scale",
                     "needs mx.activations enabled, with elements of 8 bits");
  return MOE_OK;
}

MOE_FN moe_status moe_check_layer_options_(moe_context *ctx, const moe_blockwise_layer *layer, moe_dtype dtype) {
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_count_or_none_(ctx, "T", layer->T));
  MOE_TRY(moe_check_positive_(ctx, "H", layer->H));
  MOE_TRY(moe_check_positive_(ctx, "I", layer->I));
  MOE_TRY(moe_check_count_(ctx, "E", layer->E));
  MOE_TRY(moe_check_count_or_none_(ctx, "N", layer->N));
  MOE_TRY(moe_check_count_(ctx, "B", layer->B));
  const int64_t slots = moe_mul_(layer->N, layer->B);
  if (slots < 0 || slots >= INT32_MAX)
    return moe_fail_(ctx, MOE_ERROR_OVERFLOW, "N", "times B does not fit in 32-bit positions");
  if (layer->max_rows < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "max_rows", "must not be negative");
  MOE_TRY(moe_check_enum_(ctx, "affinity_dtype", (int)layer->affinity_dtype, MOE_DTYPE_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "checkpoint_dtype", (int)layer->checkpoint_dtype, MOE_DTYPE_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "accumulation_dtype", (int)layer->accumulation_dtype, MOE_DTYPE_COUNT_));
  if (moe_or_(layer->accumulation_dtype, MOE_DTYPE_F32) != MOE_DTYPE_F32 && layer->accumulation_dtype != dtype)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "accumulation_dtype", "must be F32 or the function's type");
  MOE_TRY(moe_check_flag_(ctx, "skip_token", layer->skip_token));
  MOE_TRY(moe_check_orders_(ctx, &layer->orders));
  MOE_TRY(moe_check_mx_operands_(ctx, layer));
  MOE_TRY(moe_quantized_check_(ctx, layer->quantized_gate_up_proj_weight, 2, layer->H));
  MOE_TRY(moe_quantized_check_(ctx, layer->quantized_down_proj_weight, 1, layer->I));
  MOE_TRY(moe_quantized_activation_check_(ctx, "quantized_hidden_states", layer->quantized_hidden_states));
  return moe_check_config_(ctx, &layer->config);
}

/* Whether a weight is quantised as the hint says. */
MOE_FN int moe_is_quantization_(moe_quantization_type type, const moe_quantized_weight *w) {
  if (type == MOE_QUANTIZATION_NONE) return 1;
  if (!w) return 0;
  if (type == MOE_QUANTIZATION_MX) return w->scaling == MOE_WEIGHT_MX;
  if (type == MOE_QUANTIZATION_STATIC || type == MOE_QUANTIZATION_STATIC_MX)
    return w->scaling == MOE_WEIGHT_STATIC || w->scaling == MOE_WEIGHT_STATIC_PER_EXPERT;
  return w->scaling == MOE_WEIGHT_COLUMN || w->scaling == MOE_WEIGHT_COLUMN_PER_EXPERT;
}

MOE_FN moe_status moe_check_phase_(moe_context *ctx, const moe_nkilib_phase *phase) {
  if (phase->tiles_in_block_m < 0 || phase->tiles_in_block_n < 0 || phase->tiles_in_block_k < 0)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "hints.phase", "has a negative number of tiles");
  MOE_TRY(moe_check_flag_(ctx, "hints.phase.spill_reload", phase->spill_reload));
  return moe_check_flag_(ctx, "hints.phase.enable_scale_packing", phase->enable_scale_packing);
}

MOE_FN moe_status moe_check_hints_(moe_context *ctx, const moe_nkilib_hints *hints, const moe_blockwise_layer *layer,
                                   moe_dtype dtype) {
  MOE_TRY(moe_check_flag_(ctx, "hints.skip_weight", hints->skip_weight));
  MOE_TRY(moe_check_flag_(ctx, "hints.pre_scale_delayed", hints->pre_scale_delayed));
  MOE_TRY(moe_check_enum_(ctx, "hints.shard_option", (int)hints->shard_option, MOE_SHARD_COUNT_));
  if (hints->block_tile_size < 0 || (hints->block_tile_size > 0 && layer->B % hints->block_tile_size != 0))
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "hints.block_tile_size", "must be 0 or divide B");
  MOE_TRY(moe_check_flag_(ctx, "hints.use_packed_scales", hints->use_packed_scales));
  MOE_TRY(moe_check_flag_(ctx, "hints.non_overlapping_shards", hints->non_overlapping_shards));
  if (moe_or_(hints->weight_dtype, dtype) != dtype)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "hints.weight_dtype", "must be the function's type");
  if (hints->top_k < 0 || hints->top_k > layer->E)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "hints.top_k", "must be from 0 to E");
  if (hints->ep_degree < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "hints.ep_degree", "must not be negative");
  MOE_TRY(moe_check_enum_(ctx, "hints.quantization_type", (int)hints->quantization_type, MOE_QUANTIZATION_COUNT_));
  if (!moe_is_quantization_(hints->quantization_type, layer->quantized_gate_up_proj_weight) ||
      !moe_is_quantization_(hints->quantization_type, layer->quantized_down_proj_weight))
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "hints.quantization_type", "is not how both weights are quantised");
  for (int i = 0; i < 4; i++) MOE_TRY(moe_check_phase_(ctx, &hints->phase[i]));
  return MOE_OK;
}

/* Lists the layer's own tensors, before any other. */
enum { /* which of them */
       MOE_LAYER_AFFINITIES_ = 1,
       MOE_LAYER_GATE_UP_ = 2,
       MOE_LAYER_DOWN_ = 3,
       MOE_LAYER_IDS_ = 6,
       MOE_LAYER_BLOCKS_ = 7,
       MOE_LAYER_CONDITIONS_ = 8,
       MOE_LAYER_UP_ = 12
};

/* Bytes of a plain weight of so many parts, or of an expert's. */
MOE_FN int64_t moe_layer_weight_bytes_(const moe_blockwise_layer *l, int64_t parts, int64_t size) {
  return moe_mul_(moe_mul4_(l->orders.per_expert ? 1 : l->E, l->H, parts, l->I), size);
}
MOE_FN int64_t moe_layer_parts_(const moe_blockwise_layer *l) { return l->orders.up_apart ? 1 : 2; }

MOE_FN void moe_layer_list_(const moe_blockwise_ *call, int dropping, moe_tensors_ *tensors) {
  const moe_blockwise_layer *l = &call->layer;
  const int64_t size = call->size, affinity_size = moe_dtype_bytes_(call->affinity_dtype), slots = moe_mul_(l->N, l->B);
  const moe_role_ affinity_role = l->config.affinity_mode == MOE_AFFINITY_NO_SCALE ? MOE_INPUT_OPTIONAL : MOE_INPUT;
  const int apart = l->orders.up_apart;
  const int64_t gate_up_bytes = moe_layer_weight_bytes_(l, moe_layer_parts_(l), size);
  const moe_role_ expert_role = dropping ? MOE_INPUT_OPTIONAL : MOE_INPUT;
  const moe_tensor_ own[] = {
      {"hidden_states", l->hidden_states, moe_mul3_(l->T, l->H, size), size,
       l->quantized_hidden_states ? MOE_INPUT_OPTIONAL : MOE_INPUT},
      {"expert_affinities_masked", l->expert_affinities_masked, moe_mul3_(l->T, l->E, affinity_size), affinity_size,
       affinity_role},
      {"gate_up_proj_weight", l->gate_up_proj_weight, gate_up_bytes, size,
       l->quantized_gate_up_proj_weight || (apart && l->config.skip_gate) ? MOE_INPUT_OPTIONAL : MOE_INPUT},
      {"down_proj_weight", l->down_proj_weight, moe_layer_weight_bytes_(l, 1, size), size,
       l->quantized_down_proj_weight ? MOE_INPUT_OPTIONAL : MOE_INPUT},
      {"gate_and_up_proj_bias", l->gate_and_up_proj_bias, moe_mul4_(l->E, 2, l->I, size), size, MOE_INPUT_OPTIONAL},
      {"down_proj_bias", l->down_proj_bias, moe_mul3_(l->E, l->H, size), size, MOE_INPUT_OPTIONAL},
      {"token_position_to_id", l->token_position_to_id, moe_mul_(slots, 4), 4, MOE_INPUT},
      {"block_to_expert", dropping ? NULL : l->block_to_expert, moe_mul_(l->N, 4), 4, expert_role},
      {"conditions", l->conditions, moe_mul_(l->N, 4), 4, MOE_INPUT_OPTIONAL},
      {"num_valid_tokens", l->num_valid_tokens, 4, 4, MOE_INPUT_OPTIONAL},
      {"mx.gate_up_in_scale", l->mx.gate_up_in_scale, moe_mul_(l->E, 4), 4, MOE_INPUT_OPTIONAL},
      {"mx.down_in_scale", l->mx.down_in_scale, moe_mul_(l->E, 4), 4, MOE_INPUT_OPTIONAL},
      {"up_proj_weight", l->up_proj_weight, gate_up_bytes, size,
       apart && !l->quantized_gate_up_proj_weight ? MOE_INPUT : MOE_INPUT_OPTIONAL},
  };
  MOE_LIST_(tensors, own);
  tensors->experts = l->E;
  if (l->orders.per_expert) tensors->each = 1 << MOE_LAYER_GATE_UP_ | 1 << MOE_LAYER_DOWN_ | 1 << MOE_LAYER_UP_;
  MOE_QUANTIZED_LIST_(&call->gate_up.quantized, "quantized_gate_up_proj_weight", tensors);
  MOE_QUANTIZED_LIST_(&call->down.quantized, "quantized_down_proj_weight", tensors);
  moe_quantized_activation_list_(l->quantized_hidden_states, l->T, l->H, "quantized_hidden_states->codes",
                                 "quantized_hidden_states->scales", tensors);
}

/* An input scale of every expert. */
MOE_FN moe_status moe_check_in_scales_(moe_context *ctx, const char *name, const float *scale, int64_t E) {
  for (int64_t e = 0; e < E && scale; e++) {
    MOE_TRY(moe_check_finite_(ctx, name, scale + e));
    if (scale[e] <= 0) return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, name, "must be above 0");
  }
  return MOE_OK;
}

/* Checks what the tensors hold. */
MOE_FN moe_status moe_check_layer_scales_(moe_context *ctx, const moe_blockwise_ *call) {
  MOE_TRY(moe_check_in_scales_(ctx, "mx.gate_up_in_scale", call->layer.mx.gate_up_in_scale, call->layer.E));
  MOE_TRY(moe_check_in_scales_(ctx, "mx.down_in_scale", call->layer.mx.down_in_scale, call->layer.E));
  MOE_TRY(MOE_QUANTIZED_CHECK_SCALES_(ctx, &call->gate_up.quantized, "quantized_gate_up_proj_weight"));
  MOE_TRY(MOE_QUANTIZED_CHECK_SCALES_(ctx, &call->down.quantized, "quantized_down_proj_weight"));
  return moe_quantized_activation_check_scales_(ctx, call->layer.quantized_hidden_states, call->layer.T, call->layer.H,
                                                "quantized_hidden_states->scales");
}

/* ------------------------------------------------------------------------------------------------------ resolution */

/* Elements of the longest row of A or C. */
MOE_FN int64_t moe_layer_longest_(const moe_blockwise_layer *layer) {
  return moe_max_(layer->H, moe_mul_(layer->I, 2));
}

MOE_FN void moe_resolve_glu_(const moe_layer_config *config, moe_glu_ *glu) {
  *glu = (moe_glu_){config->activation,
                    moe_resolve_alpha_(config->activation, config->alpha),
                    config->up_offset,
                    config->skip_gate,
                    config->clamp,
                    config->gate_clamp_upper_limit,
                    config->gate_clamp_lower_limit,
                    config->up_clamp_upper_limit,
                    config->up_clamp_lower_limit,
                    config->activation_clamp_upper_limit,
                    config->up_softcap};
}

MOE_FN void moe_resolve_(moe_blockwise_ *call, const moe_blockwise_layer *layer, moe_dtype dtype, int dropping) {
  memset(call, 0, sizeof *call);
  moe_group_init_(&call->group, dtype, layer->E);
  call->layer = *layer;
  if (dropping) call->layer.block_to_expert = NULL;
  if (layer->quantized_hidden_states) call->layer.hidden_states = NULL;
  if (layer->quantized_gate_up_proj_weight || !layer->orders.up_apart) call->layer.up_proj_weight = NULL;
  if (layer->quantized_gate_up_proj_weight || (layer->orders.up_apart && layer->config.skip_gate))
    call->layer.gate_up_proj_weight = NULL;
  if (layer->quantized_down_proj_weight) call->layer.down_proj_weight = NULL;
  if (layer->config.affinity_mode == MOE_AFFINITY_NO_SCALE) call->layer.expert_affinities_masked = NULL;
  call->dtype = dtype;
  call->rounds_sums = moe_or_(layer->accumulation_dtype, MOE_DTYPE_F32) != MOE_DTYPE_F32;
  call->affinity_dtype = moe_or_(layer->affinity_dtype, MOE_DTYPE_F32);
  call->checkpoint_dtype = moe_or_(layer->checkpoint_dtype, dtype);
  call->inner_dtype = dtype == MOE_DTYPE_BF16 ? MOE_DTYPE_BF16 : MOE_DTYPE_F32;
  call->size = moe_dtype_bytes_(dtype);
  call->inner_size = moe_dtype_bytes_(call->inner_dtype);
  call->checkpoint_size = moe_dtype_bytes_(call->checkpoint_dtype);
  moe_resolve_glu_(&layer->config, &call->glu);
  moe_mx_round_init_(&call->round_activations, &layer->mx.activations);
  moe_mx_round_init_(&call->round_weights, &layer->mx.weights);
  moe_mx_round_init_(&call->round_gradients, &layer->mx.gradients);
  moe_packed_init_(&call->gate_up, layer->config.skip_gate ? MOE_PACK_UP : MOE_PACK_GATE_UP, 0, call->group.panel,
                   dtype, layer->E, layer->H, layer->I, layer->quantized_gate_up_proj_weight);
  moe_packed_init_(&call->down, MOE_PACK_DOWN, 0, call->group.panel, dtype, layer->E, layer->I, layer->H,
                   layer->quantized_down_proj_weight);
  moe_packed_order_(&call->gate_up, layer->orders.gate_up, &layer->orders, layer->up_proj_weight);
  moe_packed_order_(&call->down, layer->orders.down, &layer->orders, NULL);
}

/* n elements at `from` of a tensor that may be absent, as floats; NULL stays NULL. */
MOE_FN const float *moe_load_optional_(const moe_blockwise_ *call, const void *tensor, int64_t from, int64_t n,
                                       float *buffer) {
  if (!tensor) return NULL;
  memset(buffer, 0, MOE_NR * sizeof *buffer);
  moe_load_row_(call->group.kernels->vec, call->dtype, buffer, (const char *)tensor + from * call->size, n);
  return buffer;
}

/* -------------------------------------------------------------------------------------- decoding, rounding operands */

/* Memory for a decoded [T,H] tensor; NULL if it is plain. */
MOE_FN char *moe_take_decoded_(moe_arena_ *arena, const moe_blockwise_ *call, const moe_quantized_activation *codes) {
  return codes ? (char *)moe_take_(arena, moe_mul3_(call->layer.T, call->layer.H, call->size)) : NULL;
}

/* A plain [T,H] tensor: decoded into `to`, or itself. */
MOE_FN const char *moe_decode_hidden_(moe_context *ctx, const moe_blockwise_ *call,
                                      const moe_quantized_activation *codes, const void *from, char *to) {
  if (!codes) return (const char *)from;
  moe_quantized_activation_decode_(ctx, codes, call->dtype, call->layer.T, call->layer.H, to);
  return to;
}

/* Memory for a rounded [T,H] tensor; NULL if it is not rounded. */
MOE_FN char *moe_take_rounded_(moe_arena_ *arena, const moe_blockwise_ *call, const moe_mx_round_ *round) {
  return round->enabled ? (char *)moe_take_(arena, moe_mul3_(call->layer.T, call->layer.H, call->size)) : NULL;
}

/* A [T,H] tensor as A of products: rounded into `to`, or itself. */
MOE_FN const char *moe_round_hidden_(const moe_context *ctx, const moe_blockwise_ *call, const moe_mx_round_ *round,
                                     const void *from, char *to, moe_mx_layout layout) {
  if (!round->enabled) return (const char *)from;
  const int64_t H = call->layer.H, stride = H * call->size;
  moe_round_tensor_ rows = {
      call->group.kernels, round, (const char *)from, to, stride, stride, call->dtype, call->layer.T, H, 2, layout};
  moe_run_items_(ctx, rows.rows, moe_round_tensor_item_, &rows);
  return to;
}

/* The same of x as A of the forward's products; with gate_up_in_scale every row of an expert is rounded for itself. */
MOE_FN char *moe_take_rounded_x_(moe_arena_ *arena, const moe_blockwise_ *call) {
  const moe_blockwise_layer *l = &call->layer;
  if (!l->mx.gate_up_in_scale) return moe_take_rounded_(arena, call, &call->round_activations);
  return (char *)moe_take_(arena, moe_mul3_(moe_plan_rows_max_(l), l->H, call->size));
}

typedef struct moe_round_rows_ {
  const moe_blockwise_ *call;
  const char *from; /* [T,H] */
  char *to;         /* [rows,H] */
} moe_round_rows_;

MOE_FN void moe_round_rows_item_(void *arg, int64_t row, moe_worker_ *worker) {
  const moe_round_rows_ *rows = (const moe_round_rows_ *)arg;
  const moe_blockwise_ *call = rows->call;
  const moe_plan_ *plan = &call->plan;
  const int64_t bytes = call->layer.H * call->size;
  moe_mx_round_ round = call->round_activations;
  round.scale = call->layer.mx.gate_up_in_scale[plan->run_expert[plan->run[row]]];
  moe_round_tensor_ one = {
      call->group.kernels, &round, rows->from + plan->token[row] * bytes, rows->to + row * bytes, bytes, bytes,
      call->dtype,         1,      call->layer.H,                         2,                      MOE_MX_LAYOUT_PLAIN};
  moe_round_tensor_item_(&one, 0, worker);
}

MOE_FN void moe_round_x_(const moe_context *ctx, moe_blockwise_ *call, const char *from, char *to) {
  const moe_mx_operands *mx = &call->layer.mx;
  moe_round_rows_ rows = {call, from, to};
  call->hidden = to;
  if (mx->gate_up_in_scale) moe_run_items_(ctx, call->plan.rows, moe_round_rows_item_, &rows);
  else call->hidden = moe_round_hidden_(ctx, call, &call->round_activations, from, to, mx->activation_layout);
}

#endif
