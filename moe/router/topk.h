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

/* ------------------------------------------------------------------------------------------------------- one token */

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

/* -------------------------------------------------------------------------------------------------------- operation */

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

#endif
