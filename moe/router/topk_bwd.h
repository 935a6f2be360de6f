/* The router's backward: dz from dw for some tokens at a time, and dz*W^T while dz is in cache; then x^T*dz and the
   bias gradient over all tokens. */
#ifndef MOE_ROUTER_TOPK_BWD_H
#define MOE_ROUTER_TOPK_BWD_H

typedef struct moe_router_bwd_ {
  const moe_router_topk_bwd_args *args;
  const moe_kernels *kernels;
  moe_dtype dtype, affinity_dtype, weight_grad_dtype;
  int dx, dw; /* which products are wanted */
  moe_router_weight_ weight;
  moe_router_xt_ xt;
  char *workers;
  int64_t scratch_bytes;
} moe_router_bwd_;

typedef struct moe_router_bwd_scratch_ {
  float *c;
  char *a_packed;                     /* of dz*W^T */
  float *xt;                          /* of x^T*dz */
  float *dz, *p, *row;                /* [E] */
  float *capped, *cap_slope;          /* [E], with a softcap */
  float *z, *dw, *s, *slope, *direct; /* [K], of the slots that have an expert */
  int32_t *expert;                    /* [K] */
} moe_router_bwd_scratch_;

MOE_FN void moe_router_bwd_scratch_layout_(const moe_router_bwd_ *bwd, moe_arena_ *arena,
                                           moe_router_bwd_scratch_ *scratch) {
  const int64_t row = bwd->args->E * 4, slots = bwd->args->K * 4, rows = bwd->dx ? MOE_ROUTER_ROWS_ : 0;
  scratch->c = (float *)moe_take_(arena, rows ? MOE_ROUTER_PRODUCTS_ * 4 : 0);
  scratch->a_packed = (char *)moe_take_(arena, rows * moe_router_pitch_(bwd->kernels));
  scratch->xt = (float *)moe_take_(arena, bwd->dw ? moe_router_xt_bytes_(bwd->kernels) : 0);
  scratch->dz = (float *)moe_take_(arena, row);
  scratch->p = (float *)moe_take_(arena, row);
  scratch->row = (float *)moe_take_(arena, row);
  const int64_t capped = bwd->args->config.logit_softcap > 0.0f ? row : 0;
  scratch->capped = (float *)moe_take_(arena, capped);
  scratch->cap_slope = (float *)moe_take_(arena, capped);
  scratch->z = (float *)moe_take_(arena, slots);
  scratch->dw = (float *)moe_take_(arena, slots);
  scratch->s = (float *)moe_take_(arena, slots);
  scratch->slope = (float *)moe_take_(arena, slots);
  scratch->direct = (float *)moe_take_(arena, slots);
  scratch->expert = (int32_t *)moe_take_(arena, slots);
}

MOE_FN void moe_router_bwd_scratch_at_(const moe_router_bwd_ *bwd, int64_t worker, moe_router_bwd_scratch_ *scratch) {
  moe_arena_ arena = {bwd->workers + worker * bwd->scratch_bytes, 0};
  moe_router_bwd_scratch_layout_(bwd, &arena, scratch);
}

/* -------------------------------------------------------------------------------------------------------- one token */

/* Finds the slots of token t that have an expert, their logits, of z, and dw. Returns how many. */
MOE_FN int64_t moe_router_bwd_unscatter_(const moe_router_bwd_ *bwd, const moe_router_bwd_scratch_ *scratch, int64_t t,
                                         const float *z) {
  const moe_router_topk_bwd_args *args = bwd->args;
  const char *affinities_grad = (const char *)args->expert_affinities_masked_grad;
  const int64_t size = moe_dtype_bytes_(bwd->affinity_dtype);
  int64_t n = 0;
  for (int64_t k = 0; k < args->K; k++) {
    const int32_t e = args->expert_index[t * args->K + k];
    if (e < 0) continue;
    scratch->expert[n] = e;
    scratch->z[n] = z[e];
    if (args->expert_weights_grad) scratch->dw[n] = args->expert_weights_grad[t * args->K + k];
    else
      moe_load_row_(bwd->kernels->vec, bwd->affinity_dtype, &scratch->dw[n], affinities_grad + (t * args->E + e) * size,
                    1);
    n++;
  }
  return n;
}

/* scratch->dz = d/dz, without the scaling factor. With R = sum of s + epsilon, D = sum of dw*s/R, or of dw*s if not
   renormalised:
     softmax             dz_j = s_j*(dw_j - D)/R - s_j*D*epsilon/R, or s_j*dw_j - s_j*D; the first term only if j is
                         selected, the second for every j of the softmax
     element by element  dz_j = s'_j*(dw_j - D)/R, or s'_j*dw_j */
MOE_FN void moe_router_bwd_weights_(const moe_router_bwd_ *bwd, const moe_router_bwd_scratch_ *scratch, const float *z,
                                    int64_t n) {
  const moe_router_config *config = &bwd->args->config;
  const int64_t E = bwd->args->E;
  const int softmax = config->score_function == MOE_SCORE_SOFTMAX, over_all = moe_softmax_over_all_(config);
  float dot = 0.0f;
  if (over_all) {
    moe_softmax_(bwd->kernels, scratch->p, z, E);
    for (int64_t i = 0; i < n; i++) scratch->s[i] = scratch->p[scratch->expert[i]];
  } else if (softmax) {
    moe_softmax_(bwd->kernels, scratch->s, scratch->z, n);
  } else {
    bwd->kernels->router->score_row(scratch->s, scratch->slope, scratch->z, config->score_function, n);
  }
  const float divisor = moe_sum_(scratch->s, n) + config->renormalize_epsilon;
  for (int64_t i = 0; i < n; i++) {
    const float w = config->renormalize ? scratch->s[i] / divisor : scratch->s[i];
    scratch->direct[i] = softmax ? w : config->renormalize ? scratch->slope[i] / divisor : scratch->slope[i];
    dot = dot + moe_mul_scalar(w, scratch->dw[i]);
  }
  for (int64_t i = 0; i < n; i++)
    scratch->direct[i] =
        moe_mul_scalar(scratch->direct[i], config->renormalize ? scratch->dw[i] - dot : scratch->dw[i]);
  /* From here on dot is what every softmax term loses: nothing, if the weights were divided by their own sum. */
  if (config->renormalize)
    dot = config->renormalize_epsilon > 0.0f ? dot * (config->renormalize_epsilon / divisor) : 0.0f;
  for (int64_t e = 0; e < E; e++) scratch->dz[e] = over_all ? 0.0f - moe_mul_scalar(scratch->p[e], dot) : 0.0f;
  for (int64_t i = 0; i < n; i++) {
    const float lost = softmax && !over_all ? moe_mul_scalar(scratch->s[i], dot) : 0.0f;
    scratch->dz[scratch->expert[i]] = scratch->dz[scratch->expert[i]] + (scratch->direct[i] - lost);
  }
}

MOE_FN void moe_router_bwd_token_(const moe_router_bwd_ *bwd, const moe_router_bwd_scratch_ *scratch, int64_t t) {
  const moe_router_topk_bwd_args *args = bwd->args;
  const int64_t E = args->E;
  const float *z = moe_softcap_(bwd->kernels, args->config.logit_softcap, args->router_logits + t * E, scratch->capped,
                                scratch->cap_slope, E);
  const int64_t n = moe_router_bwd_unscatter_(bwd, scratch, t, z);
  const int accumulate = (args->accumulate & MOE_ACCUMULATE_ROUTER_LOGITS_GRAD) != 0;
  float *out = args->router_logits_grad + t * E;
  if (n > 0) moe_router_bwd_weights_(bwd, scratch, z, n);
  if (n > 0 && z == scratch->capped) bwd->kernels->vec->multiply_row(scratch->dz, scratch->cap_slope, E);
  if (accumulate) moe_load_row_(bwd->kernels->vec, MOE_DTYPE_F32, scratch->row, out, E);
  else memset(scratch->row, 0, (size_t)E * sizeof *scratch->row);
  if (n > 0) bwd->kernels->vec->add_scaled(scratch->row, scratch->dz, moe_router_factor_(&args->config), E);
  moe_store_row_(bwd->kernels->vec, MOE_DTYPE_F32, out, scratch->row, E);
}

/* ----------------------------------------------------------------------------------------------------------- stages */

MOE_FN void moe_router_bwd_tokens_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_router_bwd_ *bwd = (const moe_router_bwd_ *)arg;
  const moe_router_topk_bwd_args *args = bwd->args;
  moe_router_bwd_scratch_ scratch;
  moe_router_bwd_scratch_at_(bwd, worker->index, &scratch);
  const int64_t first = item * MOE_ROUTER_ROWS_, rows = moe_min_(MOE_ROUTER_ROWS_, args->T - first);
  for (int64_t t = first; t < first + rows; t++) moe_router_bwd_token_(bwd, &scratch, t);
  if (!bwd->dx) return;
  const int accumulate = (args->accumulate & MOE_ACCUMULATE_HIDDEN_STATES_GRAD) != 0;
  const moe_router_product_ product = {&bwd->weight, (char *)args->hidden_states_grad, bwd->dtype, NULL, accumulate};
  moe_a_ a;
  moe_router_a_(&a, args->router_logits_grad, MOE_DTYPE_F32, args->E, first, rows, scratch.a_packed);
  moe_router_multiply_(&product, &a, first, scratch.c);
}

MOE_FN void moe_router_bwd_xt_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_router_bwd_ *bwd = (const moe_router_bwd_ *)arg;
  moe_router_bwd_scratch_ scratch;
  moe_router_bwd_scratch_at_(bwd, worker->index, &scratch);
  moe_router_xt_item_(&bwd->xt, item, scratch.xt);
}

/* Work item: the bias gradient of 64 experts, tokens in ascending order. */
MOE_FN void moe_router_bwd_bias_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_router_bwd_ *bwd = (const moe_router_bwd_ *)arg;
  const moe_router_topk_bwd_args *args = bwd->args;
  const int64_t at = item * MOE_NR, n = moe_min_(MOE_NR, args->E - at);
  char *out = (char *)args->router_bias_grad + at * moe_dtype_bytes_(bwd->weight_grad_dtype);
  float sum[MOE_NR] = {0}, low[MOE_NR] = {0};
  (void)worker;
  bwd->kernels->vec->add_long(sum, low, args->router_logits_grad + at, args->E, NULL, 0, args->T, n);
  moe_store_sum_(bwd->kernels, out, bwd->weight_grad_dtype, sum, n,
                 (args->accumulate & MOE_ACCUMULATE_ROUTER_BIAS_GRAD) != 0);
}

#endif
