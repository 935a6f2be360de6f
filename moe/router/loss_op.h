/* The operations moe_router_load_balance_loss, moe_router_z_loss and moe_router_bias_update. */
#ifndef MOE_ROUTER_LOSS_OP_H
#define MOE_ROUTER_LOSS_OP_H

/* -------------------------------------------------------------------------------------------------------- operation */

/* Work items, the only ones. Sums are taken by one worker, tokens in ascending order. */
MOE_FN void moe_loss_sum_(void *arg, int64_t item, moe_worker_ *worker) {
  moe_router_loss_ *loss = (moe_router_loss_ *)arg;
  (void)item;
  (void)worker;
  for (int64_t t = loss->first, next; t < loss->last; t = next) { /* a run of tokens that count */
    for (next = t; next < loss->last && moe_token_counts_(loss->args, next);) next++;
    loss->kernels->vec->add_long(&loss->sum, &loss->low, &loss->token[t - loss->first].term,
                                 sizeof *loss->token / sizeof(float), NULL, loss->summed, next - t, 1);
    loss->summed += next - t;
    next += next < loss->last;
  }
}

MOE_FN void moe_loss_finish_(void *arg, int64_t item, moe_worker_ *worker) {
  moe_router_loss_ *loss = (moe_router_loss_ *)arg;
  (void)item;
  (void)worker;
  if (!loss->balance && loss->tokens > 0) loss->sum = loss->args->coefficient * (loss->sum / (float)loss->tokens);
  moe_store_row_(loss->kernels->vec, MOE_DTYPE_F32, loss->args->loss, &loss->sum, 1);
}

/* The next sequence: all tokens or, for the load balance, sequence s. Returns how many of its tokens count. */
MOE_FN int64_t moe_loss_sequence_(moe_router_loss_ *loss, int64_t s) {
  const int64_t *first = loss->balance ? loss->args->sequence_first : NULL;
  loss->begin = first ? first[s] : 0, loss->end = first ? first[s + 1] : loss->args->T;
  loss->from = loss->to = -1; /* no gains are known */
  loss->tokens = 0;
  for (int64_t t = loss->begin; t < loss->end; t++) loss->tokens += moe_token_counts_(loss->args, t);
  return loss->tokens;
}

/* Adds the loss and the gradients of a sequence. */
MOE_FN void moe_loss_add_sequence_(moe_context *ctx, moe_router_loss_ *loss) {
  const moe_router_loss_args *args = loss->args;
  moe_loss_token_ token[MOE_LOSS_TOKENS_];
  float gain[MOE_LOSS_EXPERTS_];
  loss->token = token;
  loss->gain = gain;
  if (loss->tokens > 0 && args->total_tokens) loss->tokens = args->total_tokens;
  for (loss->first = loss->begin; loss->first < loss->end && loss->tokens > 0; loss->first = loss->last) {
    loss->last = moe_min_(loss->first + MOE_LOSS_TOKENS_, loss->end);
    if (loss->balance) moe_balance_each_(ctx, loss, moe_balance_term_);
    else moe_loss_each_(ctx, loss, moe_z_term_);
    moe_run_items_(ctx, 1, moe_loss_sum_, loss);
    if (loss->balance && args->router_logits_grad) moe_balance_each_(ctx, loss, moe_balance_grad_);
  }
}

MOE_FN moe_status moe_loss_run_(moe_context *ctx, void *state) {
  moe_router_loss_ *loss = (moe_router_loss_ *)state;
  const int64_t S = loss->balance && loss->args->sequence_first ? loss->args->S : 1;
  for (int64_t s = 0; s < S; s++) loss->sequences += moe_loss_sequence_(loss, s) > 0;
  for (int64_t s = 0; s < S; s++) {
    moe_loss_sequence_(loss, s);
    moe_loss_add_sequence_(ctx, loss);
  }
  return moe_run_items_(ctx, 1, moe_loss_finish_, loss);
}

MOE_FN moe_status moe_loss_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_router_loss_ *loss = (moe_router_loss_ *)state;
  const moe_router_loss_args *args = loss->args = (const moe_router_loss_args *)call->args;
  const int balance = loss->balance = call->kind == MOE_LOSS_BALANCE_;
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_count_or_none_(ctx, "T", args->T));
  MOE_TRY(moe_check_count_(ctx, "E", args->E));
  MOE_TRY(moe_check_finite_(ctx, "coefficient", &args->coefficient));
  if (balance) {
    MOE_TRY(moe_check_positive_(ctx, "K", args->K));
    if (args->K > args->E) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "K", "exceeds E");
    MOE_TRY(moe_check_enum_(ctx, "score_function", (int)args->score_function, MOE_SCORE_COUNT_));
  }
  MOE_TRY(moe_check_softcap_(ctx, "logit_softcap", &args->logit_softcap));
  MOE_TRY(moe_check_not_negative_(ctx, "total_tokens", args->total_tokens));
  const int sequences = balance && args->sequence_first, given = balance && args->expert_counts;
  if (sequences) MOE_TRY(moe_check_count_or_none_(ctx, "S", args->S));
  if (sequences && (given || args->total_tokens))
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, given ? "expert_counts" : "total_tokens",
                     "cannot be given with sequence_first");
  loss->kernels = moe_kernels_();
  loss->score_function = balance ? args->score_function : MOE_SCORE_SOFTMAX;
  const int64_t logits = moe_mul3_(args->T, args->E, 4), picked = balance ? moe_mul3_(args->T, args->K, 4) : 0;
  const moe_tensor_ own[] = {
      {"router_logits", args->router_logits, logits, 4, MOE_INPUT},
      {"expert_index", balance && !given ? args->expert_index : NULL, picked, 4,
       balance && !given ? MOE_INPUT : MOE_INPUT_OPTIONAL},
      {"expert_counts", given ? args->expert_counts : NULL, moe_mul_(args->E, 8), 8, MOE_INPUT_OPTIONAL},
      {"sequence_first", sequences ? args->sequence_first : NULL, sequences ? moe_mul_(args->S + 1, 8) : 0, 8,
       MOE_INPUT_OPTIONAL},
      {"token_mask", args->token_mask, args->T, 1, MOE_INPUT_OPTIONAL},
      {"loss", args->loss, 4, 4, MOE_OUTPUT},
      {"router_logits_grad", args->router_logits_grad, logits, 4, MOE_OUTPUT_OPTIONAL},
  };
  return MOE_LIST_(tensors, own);
}

MOE_FN moe_status moe_loss_check_contents_(moe_context *ctx, const void *state) {
  const moe_router_loss_ *loss = (const moe_router_loss_ *)state;
  const moe_router_loss_args *args = loss->args;
  if (!loss->balance) return MOE_OK;
  const int64_t *first = args->sequence_first;
  for (int64_t s = 0; s < args->S && first; s++)
    if (first[s] > first[s + 1]) return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "sequence_first", "descends");
  if (first && (first[0] != 0 || first[args->S] != args->T))
    return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "sequence_first", "must begin with 0 and end with T");
  if (args->expert_counts) return moe_check_expert_counts_(ctx, args->expert_counts, args->E);
  return moe_check_expert_index_(ctx, args->expert_index, args->T * args->K, args->E);
}

/* ------------------------------------------------------------------------------------------------------ bias update */

typedef struct moe_bias_update_ {
  const moe_router_bias_update_args *args;
} moe_bias_update_;

MOE_FN moe_status moe_bias_update_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  const moe_router_bias_update_args *args = (const moe_router_bias_update_args *)call->args;
  ((moe_bias_update_ *)state)->args = args;
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_count_(ctx, "E", args->E));
  MOE_TRY(moe_check_finite_(ctx, "rate", &args->rate));
  MOE_TRY(moe_check_flag_(ctx, "centered", args->centered));
  const moe_tensor_ own[] = {{"expert_counts", args->expert_counts, moe_mul_(args->E, 8), 8, MOE_INPUT},
                             {"selection_bias", args->selection_bias, moe_mul_(args->E, 4), 4, MOE_OUTPUT}};
  return MOE_LIST_(tensors, own);
}

MOE_FN moe_status moe_bias_update_check_contents_(moe_context *ctx, const void *state) {
  const moe_router_bias_update_args *args = ((const moe_bias_update_ *)state)->args;
  return moe_check_expert_counts_(ctx, args->expert_counts, args->E);
}

/* 1 for fewer tokens than the mean, -1 for more. */
MOE_FN int64_t moe_bias_sign_(const moe_router_bias_update_args *args, int64_t e, int64_t all) {
  const int64_t own = args->expert_counts[e] * args->E;
  return (own < all) - (own > all);
}

MOE_FN void moe_bias_update_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_router_bias_update_args *args = ((const moe_bias_update_ *)arg)->args;
  const moe_kernels *kernels = moe_kernels_();
  int64_t all = 0, signs = 0;
  (void)item, (void)worker;
  for (int64_t e = 0; e < args->E; e++) all += args->expert_counts[e];
  for (int64_t e = 0; e < args->E && args->centered; e++) signs += moe_bias_sign_(args, e, all);
  for (int64_t e = 0; e < args->E; e++) {
    const float step = (float)moe_bias_sign_(args, e, all) - (float)signs / (float)args->E;
    kernels->vec->add_scaled(args->selection_bias + e, &step, args->rate, 1);
  }
}

MOE_FN moe_status moe_bias_update_run_(moe_context *ctx, void *state) {
  return moe_run_items_(ctx, 1, moe_bias_update_item_, state);
}

static const moe_op_ moe_bias_update_op_ = {moe_bias_update_check_, NULL, moe_bias_update_run_,
                                            moe_bias_update_check_contents_, NULL};
MOE_OP_(moe_router_bias_update, moe_router_bias_update_args, moe_bias_update_op_, moe_bias_update_,
        .dtype = MOE_DTYPE_F32)

static const moe_op_ moe_loss_op_ = {moe_loss_check_, NULL, moe_loss_run_, moe_loss_check_contents_, NULL};
MOE_OP_(moe_router_load_balance_loss, moe_router_loss_args, moe_loss_op_, moe_router_loss_, .kind = MOE_LOSS_BALANCE_)
MOE_OP_(moe_router_z_loss, moe_router_loss_args, moe_loss_op_, moe_router_loss_, .kind = MOE_LOSS_Z_)

#endif
