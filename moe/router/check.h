/* What the operations of the router check. */
#ifndef MOE_ROUTER_CHECK_H
#define MOE_ROUTER_CHECK_H

MOE_FN moe_status moe_check_softcap_(moe_context *ctx, const char *name, const float *cap) {
  MOE_TRY(moe_check_finite_(ctx, name, cap));
  return *cap >= 0.0f ? MOE_OK : moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, name, "is negative");
}

/* E experts, k of them per token. */
MOE_FN moe_status moe_check_router_(moe_context *ctx, const moe_router_config *config, int64_t E, int64_t K) {
  MOE_TRY(moe_check_count_(ctx, "E", E));
  MOE_TRY(moe_check_positive_(ctx, "K", K));
  MOE_TRY(moe_check_enum_(ctx, "config.score_function", (int)config->score_function, MOE_SCORE_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "config.score_order", (int)config->score_order, MOE_SCORE_ORDER_COUNT_));
  MOE_TRY(moe_check_flag_(ctx, "config.renormalize", config->renormalize));
  MOE_TRY(moe_check_finite_(ctx, "config.renormalize_epsilon", &config->renormalize_epsilon));
  if (config->renormalize_epsilon < 0.0f)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "config.renormalize_epsilon", "is negative");
  MOE_TRY(moe_check_finite_(ctx, "config.routed_scaling_factor", &config->routed_scaling_factor));
  if (config->num_groups < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "config.num_groups", "is negative");
  if (config->topk_groups < (config->num_groups > 0) || config->topk_groups > config->num_groups)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "config.topk_groups",
                     "must be between 1 and num_groups, or 0 like it");
  MOE_TRY(moe_check_enum_(ctx, "config.group_score", (int)config->group_score, MOE_GROUP_SCORE_COUNT_));
  MOE_TRY(moe_check_softcap_(ctx, "config.logit_softcap", &config->logit_softcap));
  if (K > E) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "K", "exceeds E");
  if (config->num_groups > 0) {
    if (E % config->num_groups != 0)
      return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "E", "is not divisible by config.num_groups");
    if (K > E / config->num_groups * config->topk_groups)
      return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "K", "exceeds the experts of config.topk_groups groups");
  }
  return MOE_OK;
}

/* H x E elements must fit, also if H is rounded up. */
MOE_FN moe_status moe_check_router_weight_(moe_context *ctx, int64_t H, int64_t E) {
  MOE_TRY(moe_check_positive_(ctx, "H", H));
  return moe_mul3_(H, E, 8) >= 0 ? MOE_OK
                                 : moe_fail_(ctx, MOE_ERROR_OVERFLOW, "H", "times E overflows the address space");
}

/* Counts of E experts: their sum times E must fit, as moe_bias_sign_ compares. */
MOE_FN moe_status moe_check_expert_counts_(moe_context *ctx, const int64_t *counts, int64_t E) {
  int64_t sum = 0;
  for (int64_t e = 0; e < E; e++) {
    if (counts[e] < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "expert_counts", "has a negative count");
    sum = moe_add_(sum, counts[e]);
  }
  return moe_mul_(sum, E) >= 0 ? MOE_OK : moe_fail_(ctx, MOE_ERROR_OVERFLOW, "expert_counts", "add up to too much");
}

#endif
