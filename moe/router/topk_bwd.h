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

/* ------------------------------------------------------------------------------------------------------- one token */

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
  for (int64_t t = 0; t < args->T; t++)
    bwd->kernels->vec->add_long(sum, low, args->router_logits_grad + t * args->E + at, NULL, t, 1, n);
  moe_store_sum_(bwd->kernels, out, bwd->weight_grad_dtype, sum, n,
                 (args->accumulate & MOE_ACCUMULATE_ROUTER_BIAS_GRAD) != 0);
}

/* -------------------------------------------------------------------------------------------------------- operation */

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
