/* The operations moe_router_topk_* and moe_router_topk_bwd_*. */
#ifndef MOE_ROUTER_TOPK_OP_H
#define MOE_ROUTER_TOPK_OP_H

/* ---------------------------------------------------------------------------------------------------------- forward */

MOE_FN void moe_router_layout_(void *state, moe_arena_ *arena, int64_t workers) {
  moe_router_ *router = (moe_router_ *)state;
  moe_router_scratch_ scratch;
  moe_arena_ one = {NULL, 0};
  router->weight.panels = NULL;
  if (router->product) router->weight.panels = (float *)moe_take_(arena, moe_router_weight_bytes_(&router->weight));
  moe_router_scratch_layout_(router, &one, &scratch);
  router->scratch_bytes = one.used;
  router->workers = (char *)moe_take_(arena, moe_mul_(moe_min_(workers, moe_router_items_(router->args->T)), one.used));
}

MOE_FN moe_status moe_router_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_router_ *router = (moe_router_ *)state;
  const moe_router_topk_args *args = router->args = (const moe_router_topk_args *)call->args;
  router->product = args->hidden_states || (call->query && args->H > 0); /* a query has H only */
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_count_or_none_(ctx, "T", args->T));
  MOE_TRY(moe_check_router_(ctx, &args->config, args->E, args->K));
  MOE_TRY(moe_check_enum_(ctx, "router_weight_dtype", (int)args->router_weight_dtype, MOE_DTYPE_COUNT_));
  MOE_TRY(moe_check_flag_(ctx, "indices_given", args->indices_given));
  if (router->product) MOE_TRY(moe_check_router_weight_(ctx, args->H, args->E));
  router->kernels = moe_kernels_();
  router->dtype = call->dtype;
  const moe_dtype weight_dtype = moe_or_(args->router_weight_dtype, call->dtype);
  router->weight =
      (moe_router_weight_){router->kernels, (const char *)args->router_weight, weight_dtype, args->H, args->E, 0, NULL};
  const int product = router->product;
  const int64_t size = moe_dtype_bytes_(router->dtype), weight_size = moe_dtype_bytes_(weight_dtype), T = args->T,
                E = args->E, H = product ? args->H : 1;
  const int64_t picked = moe_mul3_(T, args->K, 4);
  const void *weight = product ? args->router_weight : NULL, *bias = product ? args->router_bias : NULL;
  const moe_tensor_ own[] = {
      {"hidden_states", args->hidden_states, moe_mul3_(T, H, size), size, MOE_INPUT_OPTIONAL},
      {"router_weight", weight, moe_mul3_(H, E, weight_size), weight_size, product ? MOE_INPUT : MOE_INPUT_OPTIONAL},
      {"router_bias", bias, moe_mul_(E, weight_size), weight_size, MOE_INPUT_OPTIONAL},
      {"selection_bias", args->selection_bias, moe_mul_(E, 4), 4, MOE_INPUT_OPTIONAL},
      {"token_mask", args->token_mask, T, 1, MOE_INPUT_OPTIONAL},
      {"router_logits", args->router_logits, moe_mul3_(T, E, 4), 4, product ? MOE_OUTPUT : MOE_INPUT},
      {"expert_weights", args->expert_weights, picked, 4, MOE_OUTPUT},
      {"expert_index", args->expert_index, picked, 4, MOE_OUTPUT},
  };
  return MOE_LIST_(tensors, own);
}

MOE_FN moe_status moe_router_check_contents_(moe_context *ctx, const void *state) {
  const moe_router_topk_args *args = ((const moe_router_ *)state)->args;
  return args->indices_given ? moe_check_expert_index_(ctx, args->expert_index, args->T * args->K, args->E) : MOE_OK;
}

MOE_FN moe_status moe_router_run_(moe_context *ctx, void *state) {
  moe_router_ *router = (moe_router_ *)state;
  if (router->product) moe_router_pack_(ctx, &router->weight);
  return moe_run_items_(ctx, moe_router_items_(router->args->T), moe_router_item_, router);
}

static const moe_op_ moe_router_op_ = {moe_router_check_, moe_router_layout_, moe_router_run_,
                                       moe_router_check_contents_, NULL};

#define MOE_DEFINE_ROUTER_(name, type, NAME)                                                   \
  MOE_OP_WORKSPACE_(moe_router_topk_##name, moe_router_topk_args, moe_router_op_, moe_router_, \
                    .dtype = MOE_DTYPE_##NAME)
MOE_DTYPE_LIST(MOE_DEFINE_ROUTER_)
#undef MOE_DEFINE_ROUTER_

/* --------------------------------------------------------------------------------------------------------- backward */

/* Work items that run at a time, at most: those of tokens, or those of the weight's and the bias's gradient. */
MOE_FN int64_t moe_router_bwd_items_(const moe_router_topk_bwd_args *args) {
  const int64_t panels = moe_add_(moe_ceil_div_(args->H, MOE_NR), 1);
  return moe_max_(moe_router_items_(args->T), moe_mul_(panels, moe_ceil_div_(args->E, MOE_NR)));
}

MOE_FN void moe_router_bwd_layout_(void *state, moe_arena_ *arena, int64_t workers) {
  moe_router_bwd_ *bwd = (moe_router_bwd_ *)state;
  moe_router_bwd_scratch_ scratch;
  moe_arena_ one = {NULL, 0};
  bwd->weight.panels = NULL;
  if (bwd->dx) bwd->weight.panels = (float *)moe_take_(arena, moe_router_weight_bytes_(&bwd->weight));
  moe_router_bwd_scratch_layout_(bwd, &one, &scratch);
  bwd->scratch_bytes = one.used;
  bwd->workers = (char *)moe_take_(arena, moe_mul_(moe_min_(workers, moe_router_bwd_items_(bwd->args)), one.used));
}

MOE_FN moe_status moe_router_bwd_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_router_bwd_ *bwd = (moe_router_bwd_ *)state;
  const moe_router_topk_bwd_args *args = bwd->args = (const moe_router_topk_bwd_args *)call->args;
  const uint32_t known = MOE_ACCUMULATE_HIDDEN_STATES_GRAD | MOE_ACCUMULATE_ROUTER_LOGITS_GRAD |
                         MOE_ACCUMULATE_ROUTER_WEIGHT_GRAD | MOE_ACCUMULATE_ROUTER_BIAS_GRAD;
  const int products = call->query && args->H > 0; /* a query has H only */
  bwd->dx = products || args->hidden_states_grad;
  bwd->dw = products || args->router_weight_grad;
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_count_or_none_(ctx, "T", args->T));
  MOE_TRY(moe_check_router_(ctx, &args->config, args->E, args->K));
  if (bwd->dx || bwd->dw) MOE_TRY(moe_check_router_weight_(ctx, args->H, args->E));
  MOE_TRY(moe_check_enum_(ctx, "affinity_dtype", (int)args->affinity_dtype, MOE_DTYPE_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "router_weight_dtype", (int)args->router_weight_dtype, MOE_DTYPE_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "weight_grad_dtype", (int)args->weight_grad_dtype, MOE_DTYPE_COUNT_));
  MOE_TRY(moe_check_accumulate_(ctx, args->accumulate, known));
  bwd->kernels = moe_kernels_();
  bwd->dtype = call->dtype;
  bwd->affinity_dtype = moe_or_(args->affinity_dtype, MOE_DTYPE_F32);
  bwd->weight_grad_dtype = moe_or_(args->weight_grad_dtype, call->dtype);
  const moe_dtype weight_dtype = moe_or_(args->router_weight_dtype, call->dtype);
  bwd->weight =
      (moe_router_weight_){bwd->kernels, (const char *)args->router_weight, weight_dtype, args->H, args->E, 1, NULL};
  const int64_t T = args->T, E = args->E, H = bwd->dx || bwd->dw ? args->H : 1, size = moe_dtype_bytes_(bwd->dtype);
  const int64_t grad_size = moe_dtype_bytes_(bwd->weight_grad_dtype),
                affinity_size = moe_dtype_bytes_(bwd->affinity_dtype);
  const int64_t logits = moe_mul3_(T, E, 4), weight_size = moe_dtype_bytes_(weight_dtype);
  const moe_role_ x_role = bwd->dw ? MOE_INPUT : MOE_INPUT_OPTIONAL,
                  weight_role = bwd->dx ? MOE_INPUT : MOE_INPUT_OPTIONAL;
  const void *affinities_grad = args->expert_weights_grad ? NULL : args->expert_affinities_masked_grad;
  const moe_tensor_ own[] = {
      {"hidden_states", bwd->dw ? args->hidden_states : NULL, moe_mul3_(T, H, size), size, x_role},
      {"router_weight", bwd->dx ? args->router_weight : NULL, moe_mul3_(H, E, weight_size), weight_size, weight_role},
      {"router_logits", args->router_logits, logits, 4, MOE_INPUT},
      {"expert_index", args->expert_index, moe_mul3_(T, args->K, 4), 4, MOE_INPUT},
      {"expert_weights_grad", args->expert_weights_grad, moe_mul3_(T, args->K, 4), 4,
       affinities_grad ? MOE_INPUT_OPTIONAL : MOE_INPUT},
      {"expert_affinities_masked_grad", affinities_grad, moe_mul3_(T, E, affinity_size), affinity_size,
       MOE_INPUT_OPTIONAL},
      {"router_logits_grad", args->router_logits_grad, logits, 4, MOE_OUTPUT},
      {"router_weight_grad", args->router_weight_grad, moe_mul3_(H, E, grad_size), grad_size, MOE_OUTPUT_OPTIONAL},
      {"router_bias_grad", args->router_bias_grad, moe_mul_(E, grad_size), grad_size, MOE_OUTPUT_OPTIONAL},
      {"hidden_states_grad", args->hidden_states_grad, moe_mul3_(T, H, size), size, MOE_OUTPUT_OPTIONAL},
  };
  return MOE_LIST_(tensors, own);
}

MOE_FN moe_status moe_router_bwd_check_contents_(moe_context *ctx, const void *state) {
  const moe_router_topk_bwd_args *args = ((const moe_router_bwd_ *)state)->args;
  return moe_check_expert_index_(ctx, args->expert_index, args->T * args->K, args->E);
}

MOE_FN moe_status moe_router_bwd_run_(moe_context *ctx, void *state) {
  moe_router_bwd_ *bwd = (moe_router_bwd_ *)state;
  const moe_router_topk_bwd_args *args = bwd->args;
  const int accumulate = (args->accumulate & MOE_ACCUMULATE_ROUTER_WEIGHT_GRAD) != 0;
  moe_work_ last[] = {{0, moe_router_bwd_xt_, bwd, NULL}, {0, moe_router_bwd_bias_, bwd, NULL}};
  if (bwd->dw) {
    /* Two panels of x per item halve the packing of dz, if there are items enough for all workers. */
    const int64_t panels = args->H / MOE_NR >= 4 * moe_workers_(ctx) ? MOE_XT_ROWS_ : 1;
    const char *x = (const char *)args->hidden_states;
    char *out = (char *)args->router_weight_grad;
    bwd->xt = (moe_router_xt_){
        bwd->kernels,           args->T,    args->H, args->E, x, bwd->dtype, args->router_logits_grad, out,
        bwd->weight_grad_dtype, accumulate, panels};
    last[0].count = moe_router_xt_items_(&bwd->xt);
  }
  if (args->router_bias_grad) last[1].count = moe_ceil_div_(args->E, MOE_NR);
  if (bwd->dx) moe_router_pack_(ctx, &bwd->weight);
  moe_run_items_(ctx, moe_router_items_(args->T), moe_router_bwd_tokens_, bwd);
  moe_run_(ctx, last, 2);
  return MOE_OK;
}

static const moe_op_ moe_router_bwd_op_ = {moe_router_bwd_check_, moe_router_bwd_layout_, moe_router_bwd_run_,
                                           moe_router_bwd_check_contents_, NULL};

#define MOE_DEFINE_ROUTER_BWD_(name, type, NAME)                                                               \
  MOE_OP_WORKSPACE_(moe_router_topk_bwd_##name, moe_router_topk_bwd_args, moe_router_bwd_op_, moe_router_bwd_, \
                    .dtype = MOE_DTYPE_##NAME)
MOE_DTYPE_LIST(MOE_DEFINE_ROUTER_BWD_)
#undef MOE_DEFINE_ROUTER_BWD_

#endif
