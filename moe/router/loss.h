/* The auxiliary losses. They have no workspace: as many tokens and experts are taken at a time as fit on the stack. */
#ifndef MOE_ROUTER_LOSS_H
#define MOE_ROUTER_LOSS_H

enum {
  MOE_LOSS_TOKENS_ = 1024,  /* tokens of a range */
  MOE_LOSS_EXPERTS_ = 2048, /* columns at a time; with more experts all are counted again for every range, */
  MOE_LOSS_COUNTS_ = 512,   /*   so many at a time */
  MOE_LOSS_ITEM_ = 32,      /* tokens of a work item */
  MOE_LOSS_CHUNK_ = 256     /* experts whose scores are computed at a time */
};

enum { MOE_LOSS_BALANCE_, MOE_LOSS_Z_ }; /* kinds of call */

/* One token: p_e = e^(z_e-shift)/total, or score(z_e)/total. */
typedef struct moe_loss_token_ {
  float shift, total;
  float term; /* load balance: sum_e gain_e*p_e; z-loss: (log sum exp)^2 */
} moe_loss_token_;

struct moe_router_loss_;
typedef void (*moe_loss_each_fn_)(const struct moe_router_loss_ *loss, int64_t t, moe_loss_token_ *token);

typedef struct moe_router_loss_ {
  const moe_router_loss_args *args;
  const moe_kernels *kernels;
  int balance;
  moe_score_function score_function;
  int64_t begin, end;     /* the sequence's tokens */
  int64_t tokens;         /* T' */
  int64_t sequences;      /* that have tokens that count */
  int64_t first, last;    /* the range of tokens */
  int64_t from, to;       /* the columns */
  moe_loss_each_fn_ each; /* for each token of the range that counts */
  float *gain;            /* load balance: [to - from] c*E*n_e/(K*T'^2) */
  moe_loss_token_ *token; /* [last - first] */
  float sum, low;         /* of terms, see add_long; */
  int64_t summed;         /*   how many there are already */
} moe_router_loss_;

MOE_INLINE int moe_token_counts_(const moe_router_loss_args *args, int64_t t) {
  return !args->token_mask || args->token_mask[t] != 0;
}

#define MOE_ONES_16_ 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1
static const float moe_ones_[MOE_NR] = {MOE_ONES_16_, MOE_ONES_16_, MOE_ONES_16_, MOE_ONES_16_};
#undef MOE_ONES_16_

/* log x for x >= 1, or NaN or infinity. x = 2^n*m, m near 1; log m = 2*atanh(s), s = (m-1)/(m+1). Within 2 ulp. */
MOE_FN float moe_log_(float x) {
  const uint32_t bits = moe_casti_scalar(x);
  if (bits >= 0x7f800000u) return x;
  const uint32_t shifted = bits - 0x3f3504f3u; /* sqrt(1/2) */
  const float n = (float)((int32_t)shifted >> 23), m = moe_castf_scalar((shifted & 0x007fffffu) + 0x3f3504f3u);
  const float s = (m - 1.0f) / (m + 1.0f), u = moe_mul_scalar(s, s);
  float p = 0x1.f1af3ap-3f;
  p = moe_fma_scalar(p, u, 0x1.b6d68ep-3f);
  p = moe_fma_scalar(p, u, 0x1.250974p-2f);
  p = moe_fma_scalar(p, u, 0x1.9996a8p-2f);
  p = moe_fma_scalar(p, u, 0x1.555558p-1f);
  const float tail = moe_fma_scalar(n, 0x1.7f7d1cp-20f, moe_mul_scalar(moe_mul_scalar(p, u), s));
  return moe_fma_scalar(n, 0x1.62e4p-1f, s + s + tail);
}

/* ----------------------------------------------------------------------------------------------------------- scores */

/* Scores of logits z[0..n), before they are divided. slope: their derivatives, or NULL; not for softmax. */
MOE_FN void moe_loss_scores_(const moe_router_loss_ *loss, const float *z, int64_t n, float shift, float *score,
                             float *slope) {
  float capped[MOE_LOSS_CHUNK_];
  z = moe_softcap_(loss->kernels, loss->args->logit_softcap, z, capped, NULL, n);
  if (loss->score_function == MOE_SCORE_SOFTMAX) loss->kernels->router->exp_row(score, z, shift, n);
  else loss->kernels->router->score_row(score, slope, z, loss->score_function, n);
}

/* sum + the sum of x*y, or of x, over n experts: in ascending order or, of more than 16 experts, by dot products. */
MOE_FN float moe_loss_add_products_(const moe_router_loss_ *loss, float sum, const float *x, const float *y,
                                    int64_t n) {
  if (loss->args->E <= MOE_DOT_CHAINS) {
    for (int64_t i = 0; i < n; i++) sum = sum + (y ? moe_mul_scalar(x[i], y[i]) : x[i]);
    return sum;
  }
  for (int64_t i = 0; i < n; i += MOE_NR)
    sum = sum + loss->kernels->vec->dot(x + i, y ? y + i : moe_ones_, moe_min_(MOE_NR, n - i));
  return sum;
}

MOE_FN void moe_loss_token_init_(const moe_router_loss_ *loss, const float *z, moe_loss_token_ *token) {
  float score[MOE_LOSS_CHUNK_];
  const float largest = moe_largest_(z, loss->args->E);
  token->shift = *moe_softcap_(loss->kernels, loss->args->logit_softcap, &largest, &token->shift, NULL, 1);
  token->total = token->term = 0.0f;
  for (int64_t e = 0; e < loss->args->E; e += MOE_LOSS_CHUNK_) {
    const int64_t n = moe_min_(MOE_LOSS_CHUNK_, loss->args->E - e);
    moe_loss_scores_(loss, z + e, n, token->shift, score, NULL);
    token->total = moe_loss_add_products_(loss, token->total, score, NULL, n);
  }
}

/* grad += d, the gradients of n logits z, which may have a softcap. */
MOE_FN void moe_loss_add_(const moe_router_loss_ *loss, const float *z, float *grad, float *d, int64_t n) {
  float capped[MOE_LOSS_CHUNK_], slope[MOE_LOSS_CHUNK_];
  if (moe_softcap_(loss->kernels, loss->args->logit_softcap, z, capped, slope, n) == capped)
    loss->kernels->vec->multiply_row(d, slope, n);
  loss->kernels->vec->add_scaled(d, grad, 1.0f, n);
  moe_store_row_(loss->kernels->vec, MOE_DTYPE_F32, grad, d, n);
}

/* Work item: `each` for some tokens of the range. */
MOE_FN void moe_loss_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_router_loss_ *loss = (const moe_router_loss_ *)arg;
  const int64_t first = loss->first + item * MOE_LOSS_ITEM_, last = moe_min_(first + MOE_LOSS_ITEM_, loss->last);
  (void)worker;
  for (int64_t t = first; t < last; t++)
    if (moe_token_counts_(loss->args, t)) loss->each(loss, t, &loss->token[t - loss->first]);
}

MOE_FN void moe_loss_each_(moe_context *ctx, moe_router_loss_ *loss, moe_loss_each_fn_ each) {
  loss->each = each;
  moe_run_items_(ctx, moe_ceil_div_(loss->last - loss->first, MOE_LOSS_ITEM_), moe_loss_item_, loss);
}

/* ----------------------------------------------------------------------------------------------------- load balance */

/* Work item, the only one: counts how often the experts in question are selected, and computes their gains. */
MOE_FN void moe_balance_gains_(void *arg, int64_t item, moe_worker_ *worker) {
  moe_router_loss_ *loss = (moe_router_loss_ *)arg;
  const moe_router_loss_args *args = loss->args;
  float scale = args->coefficient * (float)args->E / ((float)args->K * (float)loss->tokens * (float)loss->tokens);
  if (args->sequence_first) scale = scale / (float)loss->sequences;
  (void)item;
  (void)worker;
  for (int64_t from = loss->from; from < loss->to; from += MOE_LOSS_COUNTS_) {
    const int64_t to = moe_min_(from + MOE_LOSS_COUNTS_, loss->to);
    int64_t count[MOE_LOSS_COUNTS_] = {0};
    for (int64_t t = loss->begin; t < loss->end && !args->expert_counts; t++)
      for (int64_t k = 0; k < args->K && moe_token_counts_(args, t); k++) {
        const int64_t e = args->expert_index[t * args->K + k];
        if (e >= from && e < to) count[e - from]++;
      }
    for (int64_t e = from; e < to; e++)
      loss->gain[e - loss->from] = scale * (float)(args->expert_counts ? args->expert_counts[e] : count[e - from]);
  }
}

MOE_FN void moe_balance_term_(const moe_router_loss_ *loss, int64_t t, moe_loss_token_ *token) {
  const float *z = loss->args->router_logits + t * loss->args->E;
  float score[MOE_LOSS_CHUNK_];
  if (loss->from == 0) moe_loss_token_init_(loss, z, token);
  for (int64_t e = loss->from; e < loss->to; e += MOE_LOSS_CHUNK_) {
    const int64_t n = moe_min_(MOE_LOSS_CHUNK_, loss->to - e);
    moe_loss_scores_(loss, z + e, n, token->shift, score, NULL);
    for (int64_t i = 0; i < n; i++) score[i] = score[i] / token->total;
    token->term = moe_loss_add_products_(loss, token->term, score, loss->gain + e - loss->from, n);
  }
}

/* dz_e = p_e*(gain_e - term) for softmax, s'_e/total*(gain_e - term) otherwise. */
MOE_FN void moe_balance_grad_(const moe_router_loss_ *loss, int64_t t, moe_loss_token_ *token) {
  const int64_t row = t * loss->args->E;
  const float *z = loss->args->router_logits + row;
  float score[MOE_LOSS_CHUNK_], slope[MOE_LOSS_CHUNK_];
  for (int64_t e = loss->from; e < loss->to; e += MOE_LOSS_CHUNK_) {
    const int64_t n = moe_min_(MOE_LOSS_CHUNK_, loss->to - e);
    moe_loss_scores_(loss, z + e, n, token->shift, score, slope);
    const float *d = loss->score_function == MOE_SCORE_SOFTMAX ? score : slope;
    for (int64_t i = 0; i < n; i++) score[i] = d[i] / token->total * (loss->gain[e - loss->from + i] - token->term);
    moe_loss_add_(loss, z + e, loss->args->router_logits_grad + row + e, score, n);
  }
}

/* One step of the load balance loss over all columns, MOE_LOSS_EXPERTS_ at a time. */
MOE_FN void moe_balance_each_(moe_context *ctx, moe_router_loss_ *loss, moe_loss_each_fn_ each) {
  const int64_t E = loss->args->E;
  for (int64_t from = 0; from < E; from += MOE_LOSS_EXPERTS_) {
    const int64_t to = moe_min_(from + MOE_LOSS_EXPERTS_, E);
    const int known = loss->from == from && loss->to == to;
    loss->from = from;
    loss->to = to;
    if (!known) moe_run_items_(ctx, 1, moe_balance_gains_, loss);
    moe_loss_each_(ctx, loss, each);
  }
}

/* ----------------------------------------------------------------------------------------------------------- z-loss */

MOE_FN void moe_z_term_(const moe_router_loss_ *loss, int64_t t, moe_loss_token_ *token) {
  const moe_router_loss_args *args = loss->args;
  const float *z = args->router_logits + t * args->E;
  float score[MOE_LOSS_CHUNK_];
  moe_loss_token_init_(loss, z, token);
  const float logsumexp = token->shift + moe_log_(token->total);
  const float gain = 2.0f * args->coefficient / (float)loss->tokens * logsumexp;
  token->term = moe_mul_scalar(logsumexp, logsumexp);
  for (int64_t e = 0; e < args->E && args->router_logits_grad; e += MOE_LOSS_CHUNK_) {
    const int64_t n = moe_min_(MOE_LOSS_CHUNK_, args->E - e);
    moe_loss_scores_(loss, z + e, n, token->shift, score, NULL);
    for (int64_t i = 0; i < n; i++) score[i] = score[i] / token->total * gain;
    moe_loss_add_(loss, z + e, args->router_logits_grad + t * args->E + e, score, n);
  }
}

#endif
