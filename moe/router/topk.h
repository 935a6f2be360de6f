/* The router's forward: logits, selection, weights. A work item does all of it for MOE_ROUTER_ROWS_ tokens, so their
   logits are still in cache when the experts are selected. */
#ifndef MOE_ROUTER_TOPK_H
#define MOE_ROUTER_TOPK_H

typedef struct moe_router_ {
  const moe_router_topk_args *args;
  const moe_kernels *kernels;
  moe_dtype dtype;
  int product; /* logits are to be computed */
  moe_router_weight_ weight;
  char *workers;
  int64_t scratch_bytes;
} moe_router_;

typedef struct moe_router_scratch_ {
  float *c;               /* products */
  char *a_packed;         /* rows of A */
  float *scores, *values; /* [E] */
  float *capped;          /* [E], with a softcap */
  float *z, *w;           /* [K] */
  uint64_t *best;         /* [K] */
  uint64_t *groups;       /* [topk_groups] */
} moe_router_scratch_;

MOE_FN void moe_router_scratch_layout_(const moe_router_ *router, moe_arena_ *arena, moe_router_scratch_ *scratch) {
  const moe_router_topk_args *args = router->args;
  const int64_t rows = router->product ? MOE_ROUTER_ROWS_ : 0;
  scratch->c = (float *)moe_take_(arena, rows ? MOE_ROUTER_PRODUCTS_ * 4 : 0);
  scratch->a_packed = (char *)moe_take_(arena, rows * moe_router_pitch_(router->kernels));
  scratch->scores = (float *)moe_take_(arena, args->E * 4);
  scratch->values = (float *)moe_take_(arena, args->E * 4);
  scratch->capped = (float *)moe_take_(arena, args->config.logit_softcap > 0.0f ? args->E * 4 : 0);
  scratch->z = (float *)moe_take_(arena, args->K * 4);
  scratch->w = (float *)moe_take_(arena, args->K * 4);
  scratch->best = (uint64_t *)moe_take_(arena, args->K * 8);
  scratch->groups = (uint64_t *)moe_take_(arena, (int64_t)args->config.topk_groups * 8);
}

/* -------------------------------------------------------------------------------------------------------- one token */

/* The values that experts are selected by. Writes to scratch->scores what moe_router_scores_ needs of all experts.
   *sum: their sum if they are softmax terms, not yet divided by it. */
MOE_FN const float *moe_router_values_(const moe_router_ *router, const moe_router_scratch_ *scratch, const float *z,
                                       float *sum) {
  const moe_router_topk_args *args = router->args;
  const moe_router_config *config = &args->config;
  const float *bias = args->selection_bias;
  const float *scores = scratch->scores;
  *sum = 1.0f;
  if (moe_softmax_over_all_(config)) *sum = moe_softmax_terms_(router->kernels, scratch->scores, z, args->E);
  else if (config->score_function == MOE_SCORE_SOFTMAX) scores = z;
  else if (bias || config->num_groups)
    router->kernels->router->score_row(scratch->scores, NULL, z, config->score_function, args->E);
  if (!bias && !config->num_groups) return z;
  for (int64_t e = 0; e < args->E; e++) {
    scratch->values[e] = scores[e] / *sum;
    if (bias) scratch->values[e] = scratch->values[e] + bias[e];
  }
  return scratch->values;
}

/* w = the scores of the slots that have an expert, one after the other. Returns how many. */
MOE_FN int64_t moe_router_scores_(const moe_router_ *router, const moe_router_scratch_ *scratch, const int32_t *index,
                                  const float *z, float sum) {
  const moe_router_config *config = &router->args->config;
  const int over_all = moe_softmax_over_all_(config);
  int64_t n = 0;
  for (int64_t k = 0; k < router->args->K; k++) {
    if (index[k] < 0) continue;
    if (over_all) scratch->w[n] = scratch->scores[index[k]] / sum;
    else scratch->z[n] = z[index[k]];
    n++;
  }
  if (over_all || n == 0) return n;
  if (config->score_function == MOE_SCORE_SOFTMAX) moe_softmax_(router->kernels, scratch->w, scratch->z, n);
  else router->kernels->router->score_row(scratch->w, NULL, scratch->z, config->score_function, n);
  return n;
}

MOE_FN void moe_router_token_(const moe_router_ *router, const moe_router_scratch_ *scratch, int64_t t) {
  const moe_router_topk_args *args = router->args;
  const moe_router_config *config = &args->config;
  const int64_t K = args->K;
  int32_t *index = args->expert_index + t * K;
  float *weights = args->expert_weights + t * K, sum;
  if (args->token_mask && args->token_mask[t] == 0) {
    for (int64_t k = 0; k < K; k++) {
      index[k] = -1;
      weights[k] = 0.0f;
    }
    return;
  }
  const float *z = moe_softcap_(router->kernels, config->logit_softcap, args->router_logits + t * args->E,
                                scratch->capped, NULL, args->E);
  const float *values = moe_router_values_(router, scratch, z, &sum);
  if (!args->indices_given) moe_select_(config, values, args->E, K, scratch->groups, scratch->best);
  for (int64_t k = 0; k < K && !args->indices_given; k++) index[k] = (int32_t)moe_rank_id_(scratch->best[k]);
  int64_t n = moe_router_scores_(router, scratch, index, z, sum);
  const float divisor = moe_sum_(scratch->w, n) + config->renormalize_epsilon, factor = moe_router_factor_(config);
  for (int64_t i = 0; i < n; i++) {
    if (config->renormalize) scratch->w[i] = scratch->w[i] / divisor;
    scratch->w[i] = scratch->w[i] * factor;
  }
  for (int64_t k = K - 1; k >= 0; k--) scratch->w[k] = index[k] < 0 ? 0.0f : scratch->w[--n];
  moe_store_row_(router->kernels->vec, MOE_DTYPE_F32, weights, scratch->w, K);
}

/* ------------------------------------------------------------------------------------------------------- all tokens */

MOE_FN void moe_router_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_router_ *router = (const moe_router_ *)arg;
  const moe_router_topk_args *args = router->args;
  moe_arena_ memory = {router->workers + worker->index * router->scratch_bytes, 0};
  moe_router_scratch_ scratch;
  moe_router_scratch_layout_(router, &memory, &scratch);
  const int64_t first = item * MOE_ROUTER_ROWS_, rows = moe_min_(MOE_ROUTER_ROWS_, args->T - first);
  if (router->product) {
    const char *bias = (const char *)args->router_bias;
    const moe_router_product_ product = {&router->weight, (char *)args->router_logits, MOE_DTYPE_F32, bias, 0};
    moe_a_ a;
    moe_router_a_(&a, args->hidden_states, router->dtype, args->H, first, rows, scratch.a_packed);
    moe_router_multiply_(&product, &a, first, scratch.c);
  }
  for (int64_t t = first; t < first + rows; t++) moe_router_token_(router, &scratch, t);
}

#endif
