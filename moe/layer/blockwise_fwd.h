/* moe_blockwise_mm_fwd_*: gate and up, then down and the sum over experts. */
#ifndef MOE_LAYER_BLOCKWISE_FWD_H
#define MOE_LAYER_BLOCKWISE_FWD_H

typedef struct moe_forward_ {
  moe_blockwise_ call;
  const moe_blockwise_mm_fwd_args *args;
  char *m;       /* [rows,I] */
  char *decoded; /* x decoded, or NULL */
  char *rounded; /* x rounded to MX, or NULL */
  float *down; /* [rows,H] m*Wd, where experts have so few rows that it is small compared with the weights; else NULL */
  struct moe_forward_ *shared; /* (optional) of an expert of all tokens, whose terms of a token's sum come next */
} moe_forward_;

/* ------------------------------------------------------------------------------------------------------ validation */

MOE_FN int moe_is_mx_spec_(moe_cte_spec spec) {
  return spec == MOE_CTE_SHARD_ON_BLOCK_MX || spec == MOE_CTE_SHARD_ON_I_MX || spec == MOE_CTE_SHARD_ON_I_MX_HYBRID;
}

MOE_FN int moe_device_weight_(const moe_quantized_weight *w) { return moe_is_mx_(w) && moe_mx_is_x4_(w->layout); }

/* What the device kernels accept. */
MOE_FN moe_status moe_check_device_limits_(moe_context *ctx, const moe_blockwise_mm_fwd_args *args, moe_dtype dtype) {
  const moe_blockwise_layer *l = &args->layer;
  const moe_affinity_mode mode = l->config.affinity_mode;
  const moe_cte_spec spec = args->device.spec;
  const int checkpoints = args->gate_up_activations_T || args->down_activations;
  const struct {
    int broken;
    const char *name, *what;
  } limit[] = {
      {dtype != MOE_DTYPE_BF16 && dtype != MOE_DTYPE_FP16, "dtype", "must be bf16 or fp16 on the device"},
      {l->B % 256 != 0 || l->B > 1024, "B", "must be 256, 512, 768 or 1024 on the device"},
      {l->T > 32768, "T", "must be at most 32768 on the device"},
      {l->H % 512 != 0 || l->H > 8192, "H", "must be a multiple of 512 up to 8192 on the device"},
      {l->I % 16 != 0 || l->I < 2048 || l->I > 16384, "I", "must be a multiple of 16 from 2048 to 16384 on the device"},
      {l->E < 8 || l->E > 64, "E", "must be between 8 and 64 on the device"},
      {spec == MOE_CTE_SHARD_ON_BLOCK && checkpoints, "gate_up_activations_T",
       "and down_activations are not saved by SHARD_ON_BLOCK"},
      {spec == MOE_CTE_SHARD_ON_BLOCK && moe_pre_scaled_(&l->config) && args->hints.pre_scale_delayed,
       "hints.pre_scale_delayed", "is not taken by SHARD_ON_BLOCK"},
      {spec == MOE_CTE_SHARD_ON_BLOCK && ctx && ctx->schedule != MOE_SCHEDULE_PING_PONG, "ctx.schedule",
       "must be PING_PONG for SHARD_ON_BLOCK"},
      {spec == MOE_CTE_SHARD_ON_I && args->hints.skip_weight, "hints.skip_weight", "is not taken by SHARD_ON_I"},
      {spec == MOE_CTE_SHARD_ON_I_HYBRID && checkpoints, "gate_up_activations_T",
       "and down_activations are not saved by SHARD_ON_I_HYBRID"},
      {moe_is_mx_spec_(spec) && checkpoints, "gate_up_activations_T",
       "and down_activations are not saved by the MX specs"},
      {args->scaled_intermediate_checkpoint_T != NULL, "scaled_intermediate_checkpoint_T",
       "is not saved by any spec, but by blockwise_mm_fwd_mxfp8"},
      {spec == MOE_CTE_SHARD_ON_BLOCK_MX && mode != MOE_AFFINITY_POST_SCALE, "config.affinity_mode",
       "must be POST_SCALE for SHARD_ON_BLOCK_MX"},
      {spec == MOE_CTE_SHARD_ON_BLOCK_MX && args->not_accumulating, "not_accumulating",
       "is not taken by SHARD_ON_BLOCK_MX"},
      {moe_is_mx_spec_(spec) && moe_pre_scaled_(&l->config), "config.affinity_mode",
       "may not be PRE_SCALE for SHARD_ON_I_MX"},
      {moe_is_mx_spec_(spec) && !moe_device_weight_(l->quantized_gate_up_proj_weight), "quantized_gate_up_proj_weight",
       "must be in an x4 layout on the device"},
      {moe_is_mx_spec_(spec) && !moe_device_weight_(l->quantized_down_proj_weight), "quantized_down_proj_weight",
       "must be in an x4 layout on the device"},
      {spec == MOE_CTE_SHARD_ON_I_DROPPING && !moe_post_scaled_(&l->config), "config.affinity_mode",
       "must be POST_SCALE or ON_I for SHARD_ON_I_DROPPING"},
  };
  for (size_t i = 0; i < sizeof limit / sizeof *limit; i++)
    if (limit[i].broken) return moe_fail_(ctx, MOE_ERROR_DEVICE_LIMIT, limit[i].name, limit[i].what);
  for (int64_t b = 1; b < l->N && spec == MOE_CTE_SHARD_ON_I_HYBRID && l->conditions; b++)
    if (l->conditions[b] > l->conditions[b - 1])
      return moe_fail_(ctx, MOE_ERROR_DEVICE_LIMIT, "conditions", "must be ones followed by zeros on the device");
  return MOE_OK;
}

/* Rows of H elements in the output: per token and in all. */
MOE_FN int64_t moe_forward_slots_(const moe_blockwise_mm_fwd_args *args) {
  return args->device.output_shape && args->device.spec == MOE_CTE_SHARD_ON_BLOCK && !args->not_accumulating ? 2 : 1;
}
MOE_FN int64_t moe_forward_rows_(const moe_blockwise_mm_fwd_args *args) {
  if (args->device.output_shape && args->device.spec == MOE_CTE_SHARD_ON_BLOCK_MX) return moe_mul_(args->layer.T, 2);
  const int padding_row =
      args->device.output_shape && args->device.spec != MOE_CTE_SHARD_ON_BLOCK && !args->layer.skip_token;
  return moe_mul_(args->layer.T + padding_row, moe_forward_slots_(args));
}

MOE_FN moe_status moe_forward_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_forward_ *forward = (moe_forward_ *)state;
  const moe_blockwise_mm_fwd_args *args = forward->args = (const moe_blockwise_mm_fwd_args *)call->args;
  const moe_blockwise_layer *l = &args->layer;
  const moe_cte_spec spec = args->device.spec;
  MOE_TRY(moe_check_layer_options_(ctx, l, call->dtype));
  MOE_TRY(moe_check_hints_(ctx, &args->hints, l, call->dtype));
  MOE_TRY(moe_check_enum_(ctx, "device.spec", (int)spec, MOE_CTE_COUNT_));
  MOE_TRY(moe_check_flag_(ctx, "device.check_limits", args->device.check_limits));
  MOE_TRY(moe_check_flag_(ctx, "device.output_shape", args->device.output_shape));
  MOE_TRY(moe_check_flag_(ctx, "not_accumulating", args->not_accumulating));
  MOE_TRY(moe_check_accumulate_(ctx, args->accumulate, MOE_ACCUMULATE_OUTPUT));
  if (moe_is_mx_spec_(spec) &&
      !(moe_is_mx_(l->quantized_gate_up_proj_weight) && moe_is_mx_(l->quantized_down_proj_weight)))
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "device.spec", "needs both weights quantised to MX");
  if (spec == MOE_CTE_SHARD_ON_I_DROPPING && l->N != l->E)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "N", "must equal E for SHARD_ON_I_DROPPING");
  const int rounded = l->mx.weights.enabled, dropping = spec == MOE_CTE_SHARD_ON_I_DROPPING;
  if ((rounded && l->packed_gate_up_proj_weight && !l->quantized_gate_up_proj_weight) ||
      (rounded && l->packed_down_proj_weight && !l->quantized_down_proj_weight))
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "mx.weights", "cannot be rounded once they are packed");
  if (args->down_activations && l->config.affinity_mode == MOE_AFFINITY_ON_I)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "down_activations", "does not exist with ON_I");
  moe_resolve_(&forward->call, l, call->dtype, dropping);
  moe_weights_resolve_(&forward->call);
  const int64_t size = forward->call.size, saved = forward->call.checkpoint_size,
                pre = moe_mul_(moe_mul4_(l->N, 2, l->I, l->B), saved);
  const moe_tensor_ own[] = {
      {"gate_up_activations_T", args->gate_up_activations_T, pre, saved, MOE_OUTPUT_OPTIONAL},
      {"down_activations", args->down_activations, moe_mul4_(l->N, l->B, l->H, saved), saved, MOE_OUTPUT_OPTIONAL},
      {"scaled_intermediate_checkpoint_T", args->scaled_intermediate_checkpoint_T, moe_mul4_(l->N, l->I, l->B, saved),
       saved, MOE_OUTPUT_OPTIONAL},
      {"output", args->output, moe_mul3_(moe_forward_rows_(args), l->H, size), size, MOE_OUTPUT},
  };
  moe_layer_list_(&forward->call, dropping, tensors);
  if (spec == MOE_CTE_SHARD_ON_I_HYBRID || spec == MOE_CTE_SHARD_ON_I_MX_HYBRID)
    tensors->tensor[MOE_LAYER_CONDITIONS_].role = MOE_INPUT;
  if (l->packed_gate_up_proj_weight)
    tensors->tensor[MOE_LAYER_GATE_UP_].role = tensors->tensor[MOE_LAYER_UP_].role = MOE_INPUT_OPTIONAL;
  if (l->packed_down_proj_weight) tensors->tensor[MOE_LAYER_DOWN_].role = MOE_INPUT_OPTIONAL;
  MOE_LIST_(tensors, own);
  moe_packed_list_(&forward->call.gate_up, "packed_gate_up_proj_weight", l->packed_gate_up_proj_weight, tensors);
  moe_packed_list_(&forward->call.down, "packed_down_proj_weight", l->packed_down_proj_weight, tensors);
  return MOE_OK;
}

MOE_FN moe_status moe_forward_check_contents_(moe_context *ctx, const void *state) {
  const moe_forward_ *forward = (const moe_forward_ *)state;
  const moe_blockwise_mm_fwd_args *args = forward->args;
  const moe_blockwise_layer *l = &args->layer;
  MOE_TRY(moe_packed_check_(ctx, &forward->call.gate_up, "packed_gate_up_proj_weight", l->packed_gate_up_proj_weight,
                            l->packed_gate_up_proj_weight_bytes));
  MOE_TRY(moe_packed_check_(ctx, &forward->call.down, "packed_down_proj_weight", l->packed_down_proj_weight,
                            l->packed_down_proj_weight_bytes));
  MOE_TRY(moe_check_layer_scales_(ctx, &forward->call));
  if (args->device.check_limits) MOE_TRY(moe_check_device_limits_(ctx, args, forward->call.dtype));
  return moe_plan_check_(ctx, &forward->call.plan, &forward->call.layer);
}

/* ----------------------------------------------------------------------------------------------------------- stages */

/* Up to so many rows per expert that has any, the down projection is a stage of its own, which reads each expert's
   weights once. Its memory is laid out where there are at most so many slots per expert: blocks are mostly padding. */
enum { MOE_DOWN_STAGE_ROWS_ = 16, MOE_DOWN_STAGE_SLOTS_ = 256 };

MOE_FN moe_scratch_needs_ moe_forward_layout_own_(moe_forward_ *forward, moe_arena_ *arena, int64_t workers) {
  moe_blockwise_ *call = &forward->call;
  const moe_blockwise_layer *l = &call->layer;
  moe_plan_layout_(&call->plan, arena, l, forward->args->not_accumulating);
  const int64_t rows = moe_plan_rows_max_(l), down_rows = moe_min_(rows, moe_mul_(l->E, MOE_DOWN_STAGE_ROWS_));
  const int64_t slots = call->plan.pairs.K ? MOE_DOWN_STAGE_ROWS_ : MOE_DOWN_STAGE_SLOTS_; /* pairs are no padding */
  const int may = moe_ceil_div_(moe_mul_(l->N, l->B), slots) <= l->E;
  forward->m = (char *)moe_take_(arena, moe_mul3_(rows, l->I, call->inner_size));
  forward->decoded = moe_take_decoded_(arena, call, l->quantized_hidden_states);
  forward->rounded = moe_take_rounded_x_(arena, call);
  forward->down = may ? (float *)moe_take_(arena, moe_mul3_(down_rows, l->H, 4)) : NULL;
  return (moe_scratch_needs_){rows, moe_layer_longest_(l), MOE_NC_PANELS, 0, moe_combine_floats_(call, workers), 0};
}

MOE_FN void moe_forward_layout_(void *state, moe_arena_ *arena, int64_t workers) {
  moe_forward_ *forward = (moe_forward_ *)state, *shared = forward->shared;
  moe_scratch_needs_ needs = moe_forward_layout_own_(forward, arena, workers);
  if (shared) {
    shared->call.plan.chunk_tokens = forward->call.plan.chunk_tokens;
    const moe_scratch_needs_ also = moe_forward_layout_own_(shared, arena, workers);
    needs = moe_scratch_needs_max_(&needs, &also);
  }
  moe_scratch_layout_all_(&forward->call.group, arena, workers, &needs);
  if (shared) moe_group_share_scratch_(&shared->call.group, &forward->call.group);
}

/* Keeps the products of the down projection's own stage. */
MOE_FN void moe_forward_down_epilogue_(void *arg, const moe_expert_c_ *p) {
  const moe_forward_ *forward = (const moe_forward_ *)arg;
  const int64_t H = forward->call.layer.H;
  for (int64_t i = 0; i < p->rows; i++)
    memcpy(forward->down + (p->first + i) * H + p->panel * MOE_NR, p->c + i * MOE_NR, (size_t)p->n * sizeof(float));
}

MOE_FN void moe_forward_down_stage_(moe_forward_ *forward, moe_expert_stage_ *stage) {
  const moe_blockwise_ *call = &forward->call;
  memset(stage, 0, sizeof *stage);
  stage->group = &call->group;
  stage->a = (moe_rows_){forward->m, call->layer.I * call->inner_size, NULL};
  stage->a_dtype = call->inner_dtype;
  stage->b = moe_weights_down_;
  stage->weights = call;
  stage->store_panel = moe_forward_down_epilogue_;
  stage->arg = forward;
  moe_expert_stage_start_(stage, call->down.panels, call->layer.I);
}

MOE_FN void moe_forward_add_(const moe_combine_ *stage, const moe_combine_rows_ *summands, int64_t h0, int64_t n,
                             float *c, float *sum) {
  const moe_forward_ *forward = (const moe_forward_ *)stage->user;
  const moe_blockwise_ *call = stage->call;
  const moe_blockwise_layer *l = &call->layer;
  const moe_kernels *kernels = call->group.kernels;
  const int on_i = l->config.affinity_mode == MOE_AFFINITY_ON_I;
  float buffer[MOE_NR];
  const float *bias = moe_load_optional_(call, l->down_proj_bias, summands->expert * l->H + h0, n, buffer);
  for (int64_t i = 0; i < summands->rows && moe_weight_scaled_after_(l->quantized_down_proj_weight); i++)
    moe_quantized_scale_sums_(&call->down.quantized, kernels, summands->expert, 0, h0, n, c + i * MOE_NR);
  if (bias && (on_i || forward->args->down_activations)) {
    for (int64_t i = 0; i < summands->rows; i++)
      kernels->vec->add_scaled(c + i * MOE_NR, bias, on_i ? summands->affinity[i] : 1.0f, n);
    bias = NULL;
  }
  for (int64_t i = 0; i < summands->rows && forward->args->down_activations; i++)
    moe_store_row_(kernels->vec, call->checkpoint_dtype,
                   (char *)forward->args->down_activations +
                       (call->plan.slot[summands->row[i]] * l->H + h0) * call->checkpoint_size,
                   c + i * MOE_NR, n);
  moe_combine_add_rows_(call, summands, c, bias,
                        l->config.affinity_mode == MOE_AFFINITY_POST_SCALE ? summands->affinity : NULL, n, sum);
}

/* Zeroes the rows of a device-shaped output that are not a token's sum. */
MOE_FN void moe_forward_zero_rows_(const moe_forward_ *forward) {
  const moe_blockwise_mm_fwd_args *args = forward->args;
  const int64_t slots = moe_forward_slots_(args), rows = moe_forward_rows_(args),
                bytes = args->layer.H * forward->call.size;
  if (args->accumulate & MOE_ACCUMULATE_OUTPUT) return;
  for (int64_t i = 0; i < rows; i++)
    if (i % slots != 0 || i / slots >= args->layer.T) memset((char *)args->output + i * bytes, 0, (size_t)bytes);
}

/* Whether m is rounded to MX in layouts in which a panel does not hold whole groups. */
MOE_FN int moe_forward_rounds_m_(const moe_blockwise_ *call) {
  const moe_mx_operands *mx = &call->layer.mx;
  return mx->activations.enabled && !mx->down_in_scale && mx->activation_layout != MOE_MX_LAYOUT_PLAIN;
}

MOE_FN void moe_forward_round_m_(const moe_context *ctx, const moe_forward_ *forward) {
  const moe_blockwise_ *call = &forward->call;
  if (!moe_forward_rounds_m_(call)) return;
  const int64_t I = call->layer.I, stride = I * call->inner_size;
  moe_round_tensor_ rows = {call->group.kernels,
                            &call->round_activations,
                            forward->m,
                            forward->m,
                            stride,
                            stride,
                            call->inner_dtype,
                            call->plan.rows,
                            I,
                            1,
                            call->layer.mx.activation_layout};
  moe_run_items_(ctx, rows.rows, moe_round_tensor_item_, &rows);
}

typedef struct moe_forward_stages_ {
  moe_gate_up_ gate_up;
  moe_checkpoint_zero_ zero;
  moe_expert_stage_ gate_up_stage, down_stage;
  moe_combine_ down;
} moe_forward_stages_;

/* Builds the plan and the stages, of x [T,H]; work: gate and up, what becomes zero, and the down projection's stage. */
MOE_FN moe_status moe_forward_begin_(moe_context *ctx, moe_forward_ *forward, const char *x,
                                     moe_forward_stages_ *stages, moe_work_ *work) {
  moe_blockwise_ *call = &forward->call;
  const moe_blockwise_mm_fwd_args *args = forward->args;
  const moe_blockwise_layer *l = &call->layer;
  MOE_TRY(moe_plan_build_(ctx, &call->plan, l, call->group.kernels, call->affinity_dtype));
  call->group.first = call->plan.first;
  call->group.in_shares = moe_in_shares_(ctx);
  moe_round_x_(ctx, call, x, forward->rounded);
  if (call->plan.rows > MOE_DOWN_STAGE_ROWS_ * moe_group_experts_(&call->group)) forward->down = NULL;
  moe_checkpoint_zero_ *zero = &stages->zero;
  stages->gate_up =
      (moe_gate_up_){call, forward->m, args->gate_up_activations_T, args->scaled_intermediate_checkpoint_T};
  *zero = (moe_checkpoint_zero_){call, (char *)args->gate_up_activations_T, (char *)args->down_activations,
                                 (char *)args->scaled_intermediate_checkpoint_T};
  moe_gate_up_stage_(&stages->gate_up, &stages->gate_up_stage);
  moe_forward_down_stage_(forward, &stages->down_stage);
  work[0] = moe_expert_stage_work_(&stages->gate_up_stage);
  work[1] = (moe_work_){call->plan.used && (zero->gate_up || zero->down || zero->scaled) ? l->N : 0,
                        moe_checkpoint_zero_item_, zero, NULL};
  if (call->plan.pair) moe_checkpoint_zero_pairs_(zero);
  work[2] = moe_expert_stage_work_(&stages->down_stage);
  if (!forward->down) work[2].count = 0;
  moe_combine_ *down = &stages->down;
  memset(down, 0, sizeof *down);
  down->call = call;
  down->products = forward->down;
  down->a = (moe_rows_){forward->m, l->I * call->inner_size, NULL};
  down->k = l->I;
  down->b = moe_weights_down_;
  down->add = moe_forward_add_;
  down->output = (char *)args->output;
  down->stride = moe_forward_slots_(args) * l->H * call->size;
  down->accumulate = (args->accumulate & MOE_ACCUMULATE_OUTPUT) != 0;
  down->through = x;
  down->user = forward;
  return MOE_OK;
}

/* x: [T,H], decoded. */
MOE_FN moe_status moe_forward_run_x_(moe_context *ctx, moe_forward_ *forward, const char *x) {
  moe_forward_stages_ own, also;
  moe_work_ work[6] = {0}, first[4];
  MOE_TRY(moe_forward_begin_(ctx, forward, x, &own, work));
  if (forward->shared) MOE_TRY(moe_forward_begin_(ctx, forward->shared, x, &also, work + 3));
  if (forward->shared) own.down.then = &also.down;
  for (int i = 0; i < 4; i++) first[i] = work[i / 2 * 3 + i % 2];
  const moe_work_ products[] = {work[2], work[5]};
  moe_run_(ctx, first, 4);
  moe_forward_round_m_(ctx, forward);
  if (forward->shared) moe_forward_round_m_(ctx, forward->shared);
  moe_run_(ctx, products, 2);
  const moe_work_ second = {moe_combine_items_(&forward->call), moe_combine_item_, &own.down, moe_combine_reads_};
  moe_run_(ctx, &second, 1);
  moe_forward_zero_rows_(forward);
  return MOE_OK;
}

MOE_FN const char *moe_forward_x_(moe_context *ctx, const moe_forward_ *forward) {
  const moe_blockwise_layer *l = &forward->call.layer;
  return moe_decode_hidden_(ctx, &forward->call, l->quantized_hidden_states, l->hidden_states, forward->decoded);
}

MOE_FN moe_status moe_forward_run_(moe_context *ctx, void *state) {
  moe_forward_ *forward = (moe_forward_ *)state;
  return moe_forward_run_x_(ctx, forward, moe_forward_x_(ctx, forward));
}

/* ----------------------------------------------------------------------------------------------------------- public */

static const moe_op_ moe_forward_op_ = {moe_forward_check_, moe_forward_layout_, moe_forward_run_,
                                        moe_forward_check_contents_, NULL};

#define MOE_DEFINE_FORWARD_(name, type, NAME)                                                              \
  MOE_OP_WORKSPACE_(moe_blockwise_mm_fwd_##name, moe_blockwise_mm_fwd_args, moe_forward_op_, moe_forward_, \
                    .dtype = MOE_DTYPE_##NAME)
MOE_DTYPE_LIST(MOE_DEFINE_FORWARD_)
#undef MOE_DEFINE_FORWARD_

#endif
