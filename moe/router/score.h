/* What the router's forward, backward and losses share. */
#ifndef MOE_ROUTER_SCORE_H
#define MOE_ROUTER_SCORE_H

MOE_FN moe_status moe_check_expert_index_(moe_context *ctx, const int32_t *index, int64_t n, int64_t E) {
  for (int64_t i = 0; i < n; i++)
    if (index[i] < -1 || index[i] >= E)
      return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "expert_index", "has an id outside [-1,E)");
  return MOE_OK;
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

#endif
