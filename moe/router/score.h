/* What the router's forward, backward and losses share: checks and the softmax. */
#ifndef MOE_ROUTER_SCORE_H
#define MOE_ROUTER_SCORE_H

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

MOE_FN moe_status moe_check_expert_index_(moe_context *ctx, const int32_t *index, int64_t n, int64_t E) {
  for (int64_t i = 0; i < n; i++)
    if (index[i] < -1 || index[i] >= E)
      return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "expert_index", "has an id outside [-1,E)");
  return MOE_OK;
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

MOE_INLINE float moe_router_factor_(const moe_router_config *config) {
  return config->routed_scaling_factor == 0.0f ? 1.0f : config->routed_scaling_factor;
}

MOE_INLINE int moe_softmax_over_all_(const moe_router_config *config) {
  return config->score_function == MOE_SCORE_SOFTMAX && config->score_order == MOE_SCORE_BEFORE_TOPK;
}

/* The largest of n, in independent chains. It may ignore a NaN, which makes every softmax NaN all the same. */
MOE_FN float moe_largest_(const float *x, int64_t n) {
  float chain[8];
  int64_t at = 0;
  for (int i = 0; i < 8; i++) chain[i] = x[0];
  for (; at + 8 <= n; at += 8)
    for (int i = 0; i < 8; i++) chain[i] = x[at + i] > chain[i] ? x[at + i] : chain[i];
  for (; at < n; at++) chain[0] = x[at] > chain[0] ? x[at] : chain[0];
  for (int i = 1; i < 8; i++) chain[0] = chain[i] > chain[0] ? chain[i] : chain[0];
  return chain[0];
}

MOE_FN float moe_sum_(const float *x, int64_t n) {
  float sum = 0.0f;
  for (int64_t i = 0; i < n; i++) sum = sum + x[i];
  return sum;
}

/* Logits with the softcap, if there is one, in `room`; slope: its derivatives, or NULL. */
MOE_FN const float *moe_softcap_(const moe_kernels *kernels, float cap, const float *z, float *room, float *slope,
                                 int64_t n) {
  if (cap <= 0.0f) return z;
  kernels->router->softcap_row(room, slope, z, cap, n);
  return room;
}

/* y = e^(x - the largest x), not yet divided by their sum, which is returned. */
MOE_FN float moe_softmax_terms_(const moe_kernels *kernels, float *y, const float *x, int64_t n) {
  kernels->router->exp_row(y, x, moe_largest_(x, n), n);
  return moe_sum_(y, n);
}

MOE_FN void moe_softmax_(const moe_kernels *kernels, float *y, const float *x, int64_t n) {
  const float sum = moe_softmax_terms_(kernels, y, x, n);
  for (int64_t i = 0; i < n; i++) y[i] = y[i] / sum;
}

/* H x E elements must fit, also if H is rounded up. */
MOE_FN moe_status moe_check_router_weight_(moe_context *ctx, int64_t H, int64_t E) {
  MOE_TRY(moe_check_positive_(ctx, "H", H));
  return moe_mul3_(H, E, 8) >= 0 ? MOE_OK
                                 : moe_fail_(ctx, MOE_ERROR_OVERFLOW, "H", "times E overflows the address space");
}

#endif
