/* moe_blockwise_mm_bwd_*: back through the down projection, then everything that depends on it at once. */
#ifndef MOE_LAYER_BLOCKWISE_BWD_H
#define MOE_LAYER_BLOCKWISE_BWD_H

typedef struct moe_backward_ {
  moe_blockwise_ call;
  const moe_blockwise_mm_bwd_args *args;
  moe_dtype weight_grad_dtype;
  void *recomputed;                      /* [N,2,I,B] when the caller has no checkpoint */
  const char *x, *output_grad;           /* as given or decoded */
  char *decoded_x, *decoded_output_grad; /* decoded, or NULL */
  char *rounded_x, *rounded_output_grad; /* rounded to MX, or NULL */
  char *down_x;                          /* room for so many rows of a panel, see moe_down_grad_next_ */
  int64_t down_x_rows;
  char *pre, *scaled, *rounded; /* rounded: pre to MX, or NULL */
  int64_t *no_rows;             /* [E+1]: 0, or NULL */
  moe_group_ none;              /* experts without rows, as skip_gate's gate has: weight gradients are 0 */
  float *dot;                   /* [rows, panels of I] <dm, m> or, with PRE_SCALE, [rows, panels of H] <dX', x> */
  float *scale_grad;            /* [E] (optional), see moe_pairs_ */
  struct moe_backward_ *shared; /* (optional) of an expert of all tokens, as in the forward */
} moe_backward_;

/* ------------------------------------------------------------------------------------------------------ validation */

MOE_FN void moe_backward_list_(const moe_backward_ *backward, moe_tensors_ *tensors) {
  const moe_blockwise_mm_bwd_args *args = backward->args;
  const moe_blockwise_layer *l = &args->layer;
  const int64_t size = backward->call.size, saved = backward->call.checkpoint_size,
                affinity = moe_dtype_bytes_(backward->call.affinity_dtype);
  const int64_t grad = moe_dtype_bytes_(backward->weight_grad_dtype);
  const int64_t gate_up = moe_layer_weight_bytes_(l, moe_layer_parts_(l), grad);
  const moe_quantized_activation *quantized_grad = args->quantized_output_hidden_states_grad;
  moe_layer_list_(&backward->call, args->kernel_type == MOE_KERNEL_DROPPING, tensors);
  moe_quantized_activation_list_(quantized_grad, l->T, l->H, "quantized_output_hidden_states_grad->codes",
                                 "quantized_output_hidden_states_grad->scales", tensors);
  const moe_tensor_ own[] = {
      {"gate_up_proj_weight_grad", args->gate_up_proj_weight_grad, gate_up, grad, MOE_OUTPUT_OPTIONAL},
      {"up_proj_weight_grad", l->orders.up_apart ? args->up_proj_weight_grad : NULL, gate_up, grad,
       MOE_OUTPUT_OPTIONAL},
      {"down_proj_weight_grad", args->down_proj_weight_grad, moe_layer_weight_bytes_(l, 1, grad), grad,
       MOE_OUTPUT_OPTIONAL},
      {"gate_up_activations_T", args->gate_up_activations_T, moe_mul_(moe_mul4_(l->N, 2, l->I, l->B), saved), saved,
       MOE_INPUT_OPTIONAL},
      {"down_activations", args->down_activations, moe_mul4_(l->N, l->B, l->H, saved), saved, MOE_INPUT_OPTIONAL},
      {"scaled_intermediate_checkpoint_T", args->scaled_intermediate_checkpoint_T, moe_mul4_(l->N, l->I, l->B, saved),
       saved, MOE_INPUT_OPTIONAL},
      {"output_hidden_states_grad", quantized_grad ? NULL : args->output_hidden_states_grad,
       moe_mul3_(l->T, l->H, size), size, quantized_grad ? MOE_INPUT_OPTIONAL : MOE_INPUT},
      {"hidden_states_grad", args->hidden_states_grad, moe_mul3_(l->T, l->H, size), size, MOE_OUTPUT_OPTIONAL},
      {"expert_affinities_masked_grad", args->expert_affinities_masked_grad, moe_mul3_(l->T, l->E, affinity), affinity,
       MOE_OUTPUT_OPTIONAL},
      {"gate_and_up_proj_bias_grad", args->gate_and_up_proj_bias_grad, moe_mul4_(l->E, 2, l->I, grad), grad,
       MOE_OUTPUT_OPTIONAL},
      {"down_proj_bias_grad", args->down_proj_bias_grad, moe_mul3_(l->E, l->H, grad), grad, MOE_OUTPUT_OPTIONAL},
  };
  if (l->orders.per_expert) tensors->each |= (uint64_t)7 << tensors->count; /* the first three */
  MOE_LIST_(tensors, own);
}

MOE_FN moe_status moe_backward_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_backward_ *backward = (moe_backward_ *)state;
  const moe_blockwise_mm_bwd_args *args = backward->args = (const moe_blockwise_mm_bwd_args *)call->args;
  const uint32_t outputs = MOE_ACCUMULATE_HIDDEN_STATES_GRAD | MOE_ACCUMULATE_AFFINITIES_GRAD |
                           MOE_ACCUMULATE_GATE_UP_WEIGHT_GRAD | MOE_ACCUMULATE_DOWN_WEIGHT_GRAD |
                           MOE_ACCUMULATE_GATE_UP_BIAS_GRAD | MOE_ACCUMULATE_DOWN_BIAS_GRAD;
  MOE_TRY(moe_check_layer_options_(ctx, &args->layer, call->dtype));
  MOE_TRY(moe_quantized_activation_check_(ctx, "quantized_output_hidden_states_grad",
                                          args->quantized_output_hidden_states_grad));
  MOE_TRY(moe_check_hints_(ctx, &args->hints, &args->layer, call->dtype));
  MOE_TRY(moe_check_enum_(ctx, "affinity_option", (int)args->affinity_option, MOE_AFFINITY_OPTION_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "kernel_type", (int)args->kernel_type, MOE_KERNEL_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "weight_grad_dtype", (int)args->weight_grad_dtype, MOE_DTYPE_COUNT_));
  MOE_TRY(moe_check_flag_(ctx, "not_accumulating", args->not_accumulating));
  MOE_TRY(moe_check_accumulate_(ctx, args->accumulate, outputs));
  if (args->kernel_type == MOE_KERNEL_DROPPING && args->layer.N != args->layer.E)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "N", "must equal E for DROPPING");
  if (args->down_activations && args->layer.config.affinity_mode == MOE_AFFINITY_ON_I)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "down_activations", "does not exist with ON_I");
  backward->weight_grad_dtype = moe_or_(args->weight_grad_dtype, call->dtype);
  moe_resolve_(&backward->call, &args->layer, call->dtype, args->kernel_type == MOE_KERNEL_DROPPING);
  moe_weights_resolve_(&backward->call);
  backward->call.layer.packed_gate_up_proj_weight = backward->call.layer.packed_down_proj_weight = NULL;
  moe_backward_list_(backward, tensors);
  return MOE_OK;
}

MOE_FN moe_status moe_backward_check_contents_(moe_context *ctx, const void *state) {
  const moe_backward_ *backward = (const moe_backward_ *)state;
  const moe_blockwise_layer *l = &backward->call.layer;
  MOE_TRY(moe_check_layer_scales_(ctx, &backward->call));
  MOE_TRY(moe_quantized_activation_check_scales_(ctx, backward->args->quantized_output_hidden_states_grad, l->T, l->H,
                                                 "quantized_output_hidden_states_grad->scales"));
  return moe_plan_check_(ctx, &backward->call.plan, l);
}

/* ----------------------------------------------------------------------------------------------------------- stages */

MOE_FN moe_scratch_needs_ moe_backward_layout_own_(moe_backward_ *backward, moe_arena_ *arena, int64_t workers) {
  moe_blockwise_ *call = &backward->call;
  const moe_blockwise_layer *l = &call->layer;
  const int64_t rows = moe_plan_rows_max_(l), pre = moe_mul4_(rows, 2, l->I, call->inner_size);
  const int64_t checkpoint = moe_mul_(moe_mul4_(l->N, 2, l->I, l->B), call->checkpoint_size);
  const int pre_scaled = moe_pre_scaled_(&l->config);
  moe_plan_layout_(&call->plan, arena, l, backward->args->not_accumulating);
  const int recompute = !backward->args->gate_up_activations_T;
  backward->recomputed = recompute ? moe_take_(arena, checkpoint) : NULL;
  backward->down_x_rows =
      backward->args->scaled_intermediate_checkpoint_T ? 0 : moe_down_grad_x_rows_(call, rows, workers);
  backward->down_x = (char *)moe_take_(arena, moe_mul3_(backward->down_x_rows, MOE_NR, call->inner_size));
  backward->pre = (char *)moe_take_(arena, pre);
  backward->scaled = pre_scaled ? (char *)moe_take_(arena, pre) : NULL;
  backward->rounded = call->round_gradients.enabled ? (char *)moe_take_(arena, pre) : NULL;
  backward->decoded_x = moe_take_decoded_(arena, call, l->quantized_hidden_states);
  backward->decoded_output_grad = moe_take_decoded_(arena, call, backward->args->quantized_output_hidden_states_grad);
  backward->rounded_output_grad = moe_take_rounded_(arena, call, &call->round_gradients);
  backward->rounded_x = recompute ? moe_take_rounded_x_(arena, call) : NULL;
  backward->dot =
      (float *)moe_take_(arena, moe_mul3_(rows, moe_ceil_div_(pre_scaled ? moe_max_(l->H, l->I) : l->I, MOE_NR), 4));
  backward->no_rows = call->glu.skip_gate ? (int64_t *)moe_take_(arena, (l->E + 1) * 8) : NULL;
  const int64_t longest = moe_layer_longest_(l), floats = moe_max_(moe_combine_floats_(call, workers), l->T);
  return (moe_scratch_needs_){rows,          longest,
                              MOE_NC_PANELS, moe_down_grad_sums_(call),
                              floats,        moe_weight_grad_bytes_(&call->group, rows, longest)};
}

MOE_FN void moe_backward_layout_(void *state, moe_arena_ *arena, int64_t workers) {
  moe_backward_ *backward = (moe_backward_ *)state, *shared = backward->shared;
  moe_scratch_needs_ needs = moe_backward_layout_own_(backward, arena, workers);
  if (shared) {
    shared->call.plan.chunk_tokens = backward->call.plan.chunk_tokens;
    const moe_scratch_needs_ also = moe_backward_layout_own_(shared, arena, workers);
    needs = moe_scratch_needs_max_(&needs, &also);
  }
  moe_scratch_layout_all_(&backward->call.group, arena, workers, &needs);
  if (shared) moe_group_share_scratch_(&shared->call.group, &backward->call.group);
}

MOE_FN void moe_backward_add_(const moe_combine_ *stage, const moe_combine_rows_ *summands, int64_t h0, int64_t n,
                              float *c, float *sum) {
  const moe_backward_ *backward = (const moe_backward_ *)stage->user;
  const moe_blockwise_ *call = stage->call;
  const moe_blockwise_layer *l = &call->layer;
  const moe_kernels *kernels = call->group.kernels;
  const int pre_scaled = moe_pre_scaled_(&l->config);
  const int64_t panels = moe_ceil_div_(l->H, MOE_NR);
  for (int64_t i = 0; i < summands->rows && pre_scaled; i++) {
    const int64_t row = summands->row[i], at = call->plan.token[row] * l->H + h0;
    float x[MOE_NR];
    moe_load_row_(kernels->vec, call->dtype, x, backward->x + at * call->size, n);
    backward->dot[row * panels + h0 / MOE_NR] = kernels->vec->dot(c + i * MOE_NR, x, n);
  }
  moe_combine_add_rows_(call, summands, c, NULL, pre_scaled ? summands->affinity : NULL, n, sum);
}

/* Rows of scaled_intermediate_checkpoint_T. */
MOE_FN void moe_backward_load_scaled_(const void *arg, int64_t row, int64_t rows, int64_t column, int64_t n, float *x) {
  const moe_backward_ *backward = (const moe_backward_ *)arg;
  for (int64_t at = 0, run; at < rows; at += run) {
    run = moe_checkpoint_run_(&backward->call, row + at, row + rows);
    moe_checkpoint_load_(&backward->call, backward->args->scaled_intermediate_checkpoint_T, row + at, run, 1, 0, column,
                         n, x + at * MOE_NR);
  }
}

/* A weight's gradient, in its order, of inputs x and gradients y of its products, which are rounded as activations and
   as gradients. What is not set yet: which rows and columns, and where they are. */
MOE_FN void moe_backward_weight_(const moe_backward_ *backward, const moe_group_ *group, const moe_packed_ *weight,
                                 const moe_grad_operand_ *x, const moe_grad_operand_ *y, moe_weight_grad_ *stage) {
  const moe_blockwise_ *call = &backward->call;
  const int64_t size = moe_dtype_bytes_(backward->weight_grad_dtype);
  const int in_out = weight->plain.column == 1, round = call->layer.mx.weight_grads;
  moe_grad_operand_ input = *x, grad = *y;
  if (round && call->round_activations.enabled) input.round = &call->round_activations;
  if (round && call->round_gradients.enabled) grad.round = &call->round_gradients;
  memset(stage, 0, sizeof *stage);
  stage->group = group;
  stage->x = in_out ? input : grad;
  stage->y = in_out ? grad : input;
  stage->m = stage->m_to = in_out ? weight->k : weight->n;
  stage->n = in_out ? weight->n : weight->k;
  stage->row_bytes = (in_out ? weight->plain.k : weight->plain.column) * size;
  stage->expert_bytes = weight->plain.expert * size;
  stage->each = weight->plain.each;
  stage->dtype = backward->weight_grad_dtype;
  if (call->rounds_sums) stage->slot = call->plan.slot;
  stage->B = call->layer.B;
}

/* The down weight's gradient, for the experts and panels in down_x, or for all from the checkpoint. */
MOE_FN void moe_backward_down_weight_(const moe_backward_ *backward, const moe_down_grad_ *from,
                                      moe_weight_grad_ *stage) {
  const moe_blockwise_ *call = &backward->call;
  const moe_blockwise_layer *l = &call->layer;
  const int64_t first = from->down_x.panel * MOE_NR, end = moe_min_(l->I, first + from->down_x.panels * MOE_NR);
  moe_grad_operand_ x = {.panels = from->down_x, .dtype = call->inner_dtype},
                    y = {.rows = {backward->output_grad, l->H * call->size, call->plan.token}, .dtype = call->dtype};
  if (backward->args->scaled_intermediate_checkpoint_T) x.load = moe_backward_load_scaled_;
  x.source = backward;
  moe_backward_weight_(backward, &from->group, &call->down, &x, &y, stage);
  if (call->down.plain.column == 1) {
    stage->m_from = first;
    stage->m_to = end;
  } else {
    stage->y_from = first;
    stage->n = end - first;
    stage->offset = first * moe_dtype_bytes_(stage->dtype);
  }
  stage->output = (char *)backward->args->down_proj_weight_grad;
  stage->accumulate = (backward->args->accumulate & MOE_ACCUMULATE_DOWN_WEIGHT_GRAD) != 0;
}

/* The gradients of the pre-activations and of the down weight, but for the last experts in down_x: their weight
   gradients run with the other stages. */
MOE_FN void moe_backward_down_(moe_context *ctx, moe_backward_ *backward, moe_down_grad_ *down_grad) {
  moe_blockwise_ *call = &backward->call;
  const moe_blockwise_mm_bwd_args *args = backward->args;
  if (backward->recomputed) {
    moe_round_x_(ctx, call, backward->x, backward->rounded_x);
    moe_gate_up_ gate_up = {call, NULL, backward->recomputed, NULL};
    moe_expert_stage_ stage;
    moe_gate_up_stage_(&gate_up, &stage);
    const moe_work_ work = moe_expert_stage_work_(&stage);
    moe_run_(ctx, &work, 1);
  }
  memset(down_grad, 0, sizeof *down_grad);
  down_grad->call = call;
  down_grad->glu = call->glu;
  moe_round_limits_(call->group.kernels, call->checkpoint_dtype, &down_grad->glu);
  down_grad->output_grad = moe_round_hidden_(ctx, call, &call->round_gradients, backward->output_grad,
                                             backward->rounded_output_grad, MOE_MX_LAYOUT_PLAIN);
  down_grad->checkpoint = backward->recomputed ? backward->recomputed : args->gate_up_activations_T;
  down_grad->pre = backward->pre;
  down_grad->scaled = backward->scaled;
  down_grad->rounded = backward->rounded;
  /* A third of the usual size: until they are read again, weights pass through the caches as well. */
  const int64_t row = call->layer.I * call->inner_size;
  down_grad->nt = !backward->rounded && row % 64 == 0 && 2 * call->plan.rows * row >= MOE_NT_MIN_BYTES / 3;
  down_grad->dot = backward->dot;
  down_grad->bias_grad = (char *)args->gate_and_up_proj_bias_grad;
  down_grad->bias_dtype = backward->weight_grad_dtype;
  down_grad->accumulate = (args->accumulate & MOE_ACCUMULATE_GATE_UP_BIAS_GRAD) != 0;
  down_grad->down_x_rows = backward->down_x_rows;
  const int wants_x = args->down_proj_weight_grad && !args->scaled_intermediate_checkpoint_T;
  moe_down_grad_start_(down_grad, wants_x ? backward->down_x : NULL);
  while (moe_down_grad_more_(down_grad)) {
    moe_down_grad_next_(down_grad);
    moe_expert_stage_ stage;
    moe_down_grad_stage_(down_grad, &stage);
    moe_weight_grad_ weight;
    moe_backward_down_weight_(backward, down_grad, &weight);
    const moe_work_ work = moe_expert_stage_work_(&stage), after = moe_weight_grad_work_(&weight);
    moe_run_(ctx, &work, 1);
    if (moe_down_grad_more_(down_grad)) moe_run_(ctx, &after, 1);
  }
}

MOE_FN void moe_backward_hidden_(moe_backward_ *backward, moe_combine_ *stage) {
  const moe_blockwise_ *call = &backward->call;
  const moe_blockwise_layer *l = &call->layer;
  memset(stage, 0, sizeof *stage);
  stage->call = call;
  stage->a = (moe_rows_){backward->rounded ? backward->rounded : backward->pre, 2 * l->I * call->inner_size, NULL};
  stage->from = call->glu.skip_gate ? l->I : 0;
  stage->k = 2 * l->I - stage->from;
  stage->b = moe_weights_gate_up_transposed_;
  stage->add = moe_backward_add_;
  stage->output = (char *)backward->args->hidden_states_grad;
  stage->stride = l->H * call->size;
  stage->accumulate = (backward->args->accumulate & MOE_ACCUMULATE_HIDDEN_STATES_GRAD) != 0;
  stage->through = backward->output_grad;
  stage->user = backward;
}

/* The gate's (part 0) or up's (1) weight gradient. Where the rows of both are one, it is the first part's. */
MOE_FN void moe_backward_gate_up_weight_(const moe_backward_ *backward, int64_t part, moe_weight_grad_ *stage) {
  const moe_blockwise_ *call = &backward->call;
  const moe_blockwise_layer *l = &call->layer;
  const moe_packed_ *weight = &call->gate_up;
  const int in_out = weight->plain.column == 1, apart = l->orders.up_apart, joined = in_out && !apart,
            empty = call->glu.skip_gate && !joined && part == 0;
  const int64_t from = joined && call->glu.skip_gate ? l->I : part * l->I;
  const char *pre = backward->scaled ? backward->scaled : backward->pre;
  const moe_grad_operand_ x = {.rows = {backward->x, l->H * call->size, call->plan.token}, .dtype = call->dtype},
                          y = {.rows = {pre, 2 * l->I * call->inner_size, NULL}, .dtype = call->inner_dtype};
  moe_backward_weight_(backward, empty ? &backward->none : &call->group, weight, &x, &y, stage);
  if (joined) stage->n = 2 * l->I - from, stage->skip = from;
  if (in_out) stage->y_from = from;
  else stage->x_from = from;
  if (!apart && !joined) stage->offset = part * weight->plain.part * moe_dtype_bytes_(stage->dtype);
  stage->accumulate = (backward->args->accumulate & MOE_ACCUMULATE_GATE_UP_WEIGHT_GRAD) != 0;
  stage->output =
      (char *)(apart && part ? backward->args->up_proj_weight_grad : backward->args->gate_up_proj_weight_grad);
  if ((joined && part) || (empty && stage->accumulate)) stage->output = NULL;
}

MOE_FN void moe_backward_small_(const moe_backward_ *backward, moe_small_grads_ *stage) {
  const moe_blockwise_ *call = &backward->call;
  const moe_blockwise_mm_bwd_args *args = backward->args;
  const int post = moe_post_scaled_(&call->layer.config), pre = moe_pre_scaled_(&call->layer.config);
  memset(stage, 0, sizeof *stage);
  stage->call = call;
  stage->output_grad = backward->output_grad;
  stage->x = backward->x;
  stage->dot = post || pre ? backward->dot : NULL;
  stage->dots = moe_ceil_div_(pre ? call->layer.H : call->layer.I, MOE_NR);
  if (post && args->affinity_option == MOE_AFFINITY_OPTION_ON_H)
    stage->down_checkpoint = (const char *)args->down_activations;
  stage->bias_term = post && call->layer.down_proj_bias != NULL;
  stage->affinity_grad = (char *)args->expert_affinities_masked_grad;
  stage->scale_grad = backward->scale_grad;
  stage->down_bias_grad = (char *)args->down_proj_bias_grad;
  stage->bias_dtype = backward->weight_grad_dtype;
  stage->accumulate = args->accumulate;
}

typedef struct moe_backward_stages_ {
  moe_combine_ hidden;
  moe_weight_grad_ gate, up, down;
  moe_small_grads_ grads;
} moe_backward_stages_;

/* What follows the gated unit's gradients; work: of weights and biases, and of affinities. */
MOE_FN void moe_backward_follow_(moe_backward_ *backward, const moe_down_grad_ *down_grad, moe_backward_stages_ *stages,
                                 moe_work_ *work) {
  moe_blockwise_ *call = &backward->call;
  const moe_blockwise_layer *l = &call->layer;
  moe_small_grads_ *grads = &stages->grads;
  moe_backward_hidden_(backward, &stages->hidden);
  if (backward->no_rows) memset(backward->no_rows, 0, (size_t)(l->E + 1) * 8);
  backward->none = call->group;
  backward->none.first = backward->no_rows;
  moe_backward_gate_up_weight_(backward, 0, &stages->gate);
  moe_backward_gate_up_weight_(backward, 1, &stages->up);
  moe_backward_down_weight_(backward, down_grad, &stages->down);
  moe_backward_small_(backward, grads);
  if (call->plan.pair && grads->affinity_grad && !(backward->args->accumulate & MOE_ACCUMULATE_AFFINITIES_GRAD))
    memset(grads->affinity_grad, 0, (size_t)(l->T * call->plan.pairs.K) * sizeof(float)); /* of pairs without a row */
  work[0] = moe_weight_grad_work_(&stages->gate);
  work[1] = moe_weight_grad_work_(&stages->up);
  work[2] = moe_weight_grad_work_(&stages->down);
  work[3] = (moe_work_){grads->down_bias_grad ? l->E * moe_ceil_div_(l->H, MOE_NR) : 0, moe_down_bias_grad_item_, grads,
                        NULL};
  const int affinities = grads->affinity_grad || grads->scale_grad;
  work[4] =
      (moe_work_){affinities ? l->E + (call->plan.pairs.identities > 0) : 0, moe_affinity_grad_item_, grads, NULL};
}

/* With PRE_SCALE the hidden states' stage forms the parts of the affinity gradient, which waits for them. then: what
   the shared expert adds to x's gradient, or NULL. */
MOE_FN void moe_backward_finish_(moe_context *ctx, moe_backward_ *backward, const moe_down_grad_ *down_grad,
                                 const moe_combine_ *then) {
  const moe_blockwise_ *call = &backward->call;
  const int pre = moe_pre_scaled_(&call->layer.config);
  moe_backward_stages_ stages;
  moe_work_ work[6];
  moe_backward_follow_(backward, down_grad, &stages, work + 1);
  stages.hidden.then = then;
  work[0] = (moe_work_){stages.hidden.output || (pre && work[5].count) ? moe_combine_items_(call) : 0,
                        moe_combine_item_, &stages.hidden, moe_combine_reads_};
  moe_run_(ctx, work, pre ? 5 : 6);
  if (pre) moe_run_(ctx, work + 5, 1);
}

/* The same of the shared expert, but for x's part, whose stage is left in `hidden`. */
MOE_FN void moe_backward_finish_shared_(moe_context *ctx, moe_backward_ *backward, const moe_down_grad_ *down_grad,
                                        moe_combine_ *hidden) {
  moe_backward_stages_ stages;
  moe_work_ work[5];
  moe_backward_follow_(backward, down_grad, &stages, work);
  moe_run_(ctx, work, 5);
  *hidden = stages.hidden;
}

/* Builds the plan, and forms the gated unit's gradients, from x and dY. */
MOE_FN moe_status moe_backward_begin_(moe_context *ctx, moe_backward_ *backward, const char *x, const char *output_grad,
                                      moe_down_grad_ *down_grad) {
  moe_blockwise_ *call = &backward->call;
  MOE_TRY(moe_plan_build_(ctx, &call->plan, &call->layer, call->group.kernels, call->affinity_dtype));
  call->group.first = call->plan.first;
  call->group.in_shares = moe_in_shares_(ctx);
  backward->x = x;
  backward->output_grad = output_grad;
  moe_backward_down_(ctx, backward, down_grad);
  return MOE_OK;
}

/* x: [T,H], decoded. */
MOE_FN moe_status moe_backward_run_x_(moe_context *ctx, moe_backward_ *backward, const char *x) {
  const moe_blockwise_mm_bwd_args *args = backward->args;
  moe_down_grad_ down_grad;
  moe_combine_ shared;
  const char *output_grad = moe_decode_hidden_(ctx, &backward->call, args->quantized_output_hidden_states_grad,
                                               args->output_hidden_states_grad, backward->decoded_output_grad);
  if (backward->shared) {
    MOE_TRY(moe_backward_begin_(ctx, backward->shared, x, output_grad, &down_grad));
    moe_backward_finish_shared_(ctx, backward->shared, &down_grad, &shared);
  }
  MOE_TRY(moe_backward_begin_(ctx, backward, x, output_grad, &down_grad));
  moe_backward_finish_(ctx, backward, &down_grad, backward->shared ? &shared : NULL);
  return MOE_OK;
}

MOE_FN const char *moe_backward_x_(moe_context *ctx, const moe_backward_ *backward) {
  const moe_blockwise_layer *l = &backward->call.layer;
  return moe_decode_hidden_(ctx, &backward->call, l->quantized_hidden_states, l->hidden_states, backward->decoded_x);
}

MOE_FN moe_status moe_backward_run_(moe_context *ctx, void *state) {
  moe_backward_ *backward = (moe_backward_ *)state;
  return moe_backward_run_x_(ctx, backward, moe_backward_x_(ctx, backward));
}

/* ----------------------------------------------------------------------------------------------------------- public */

static const moe_op_ moe_backward_op_ = {moe_backward_check_, moe_backward_layout_, moe_backward_run_,
                                         moe_backward_check_contents_, NULL};

#define MOE_DEFINE_BACKWARD_(name, type, NAME)                                                               \
  MOE_OP_WORKSPACE_(moe_blockwise_mm_bwd_##name, moe_blockwise_mm_bwd_args, moe_backward_op_, moe_backward_, \
                    .dtype = MOE_DTYPE_##NAME)
MOE_DTYPE_LIST(MOE_DEFINE_BACKWARD_)
#undef MOE_DEFINE_BACKWARD_

#endif
