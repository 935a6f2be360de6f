/* The router and its losses over bounded numbers. Logits and selection are exact inputs (as stored). One token unless
   said otherwise. */
#ifndef REFERENCE_BOUNDED_ROUTER_H
#define REFERENCE_BOUNDED_ROUTER_H

#include "reference/bounded.h"

#define BOUNDED_EXP_ULPS 1 /* contract 6 */
#define BOUNDED_LOG_ULPS 2 /* log and log1p */

/* f(x) computed within `ulps` of the exact f(v), where the argument's bound moves f by at most `moved`. */
static inline bounded bounded_function(double v, double moved, int ulps) {
  return (bounded){v, moved + ulps * test_dtype_ulp(MOE_DTYPE_F32, fabs(v) + moved) + fabs(v) * BOUNDED_SLACK};
}

static inline bounded bounded_exp(bounded x) {
  return bounded_function(exp(x.v), exp(x.v) * expm1(x.e), BOUNDED_EXP_ULPS);
}
static inline bounded bounded_log(bounded x) {
  return bounded_function(log(x.v), -log1p(-x.e / x.v), BOUNDED_LOG_ULPS);
}
static inline bounded bounded_log1p(bounded x) { /* x >= 0: the slope is at most 1 */
  return bounded_function(log1p(x.v), x.e, BOUNDED_LOG_ULPS);
}
static inline bounded bounded_sqrt(bounded x) {
  double below = sqrt(x.v) - sqrt(fmax(x.v - x.e, 0)), above = sqrt(x.v + x.e) - sqrt(x.v);
  return bounded_f32((bounded){sqrt(x.v), fmax(below, above)});
}
static inline bounded bounded_sub(bounded a, bounded b) { return bounded_add(a, (bounded){-b.v, b.e}); }

/* The sum of n numbers in any order: each passes through at most n-1 additions. */
static inline bounded bounded_total(int64_t n, const bounded *x) {
  bounded_sum sum = {0};
  for (int64_t i = 0; i < n; ++i) bounded_sum_weight(&sum, x[i], 1, 0);
  return bounded_sum_depth(&sum, n - 1);
}

/* ----------------------------------------------------------------------------------------------------------- scores */

/* p [E]: softmax over all, or over the selected only (0 elsewhere); e^(z - largest) divided by the sum. */
static inline void bounded_softmax(int64_t E, int64_t K, const double *z, const int32_t *index, bounded *p) {
  double shift = -INFINITY;
  for (int64_t e = 0; e < E; ++e)
    if (!index || selected_f64(K, index, e)) shift = fmax(shift, z[e]);
  for (int64_t e = 0; e < E; ++e) {
    p[e] = (bounded){0, 0};
    if (!index || selected_f64(K, index, e)) p[e] = bounded_exp(bounded_sub(bounded_exact(z[e]), bounded_exact(shift)));
  }
  bounded sum = bounded_total(E, p);
  for (int64_t e = 0; e < E; ++e) p[e] = p[e].v > 0 || p[e].e > 0 ? bounded_div(p[e], sum) : p[e];
}

/* *s = 1/(1+e^-z) and *c = 1-*s, from e^-|z|. */
static inline void bounded_sigmoid(double z, bounded *s, bounded *c) {
  bounded e = bounded_exp(bounded_exact(-fabs(z)));
  bounded large = bounded_div(bounded_exact(1), bounded_add(bounded_exact(1), e)), small = bounded_mul(e, large);
  *s = z < 0 ? small : large;
  *c = z < 0 ? large : small;
}

/* Below -18 sqrt(softplus) is computed as e^(z/2) and its derivative as half of that: both are off by less than e^z,
   relative. */
static inline int bounded_far(double z) { return z < -18; }
static inline bounded bounded_far_root(double z) {
  bounded root = bounded_exp(bounded_exact(z / 2));
  root.e += root.v * exp(z);
  return root;
}

static inline bounded bounded_score(moe_score_function function, double z) {
  bounded s, c;
  bounded_sigmoid(z, &s, &c);
  if (function == MOE_SCORE_SIGMOID) return s;
  if (bounded_far(z)) return bounded_far_root(z);
  bounded l = bounded_log1p(bounded_exp(bounded_exact(-fabs(z))));
  return bounded_sqrt(bounded_add(bounded_exact(fmax(z, 0)), l));
}

/* d score/dz: s(1-s), or sigmoid/(2 sqrt(softplus)). */
static inline bounded bounded_score_grad(moe_score_function function, double z) {
  bounded s, c;
  bounded_sigmoid(z, &s, &c);
  if (function == MOE_SCORE_SIGMOID) return bounded_mul(s, c);
  if (bounded_far(z)) return bounded_mul(bounded_exact(0.5), bounded_far_root(z));
  bounded twice = bounded_score(function, z);
  twice.v *= 2, twice.e *= 2;
  return bounded_div(s, twice);
}

static inline void bounded_scores(const moe_router_config *o, int64_t E, int64_t K, const double *z,
                                  const int32_t *index, bounded *s) {
  if (o->score_function == MOE_SCORE_SOFTMAX) {
    bounded_softmax(E, K, z, o->score_order == MOE_SCORE_AFTER_TOPK ? index : NULL, s);
    return;
  }
  for (int64_t e = 0; e < E; ++e) s[e] = bounded_score(o->score_function, z[e]);
}

/* ---------------------------------------------------------------------------------------------------------- weights */

/* The divisor of the K weights, 1 without renormalisation. w [K]: room. */
static inline bounded bounded_divisor(const moe_router_config *o, int64_t K, const int32_t *index, const bounded *s,
                                      bounded *w) {
  if (!o->renormalize) return bounded_exact(1);
  for (int64_t k = 0; k < K; ++k) w[k] = index[k] < 0 ? bounded_exact(0) : s[index[k]];
  bounded sum = bounded_total(K, w);
  return o->renormalize_epsilon > 0 ? bounded_add(sum, bounded_exact((double)o->renormalize_epsilon)) : sum;
}

/* w [K]; s: room for [E]. */
static inline void bounded_router_weights(const moe_router_config *o, int64_t E, int64_t K, const double *z,
                                          const int32_t *index, bounded *s, bounded *w) {
  bounded_scores(o, E, K, z, index, s);
  bounded divisor = bounded_divisor(o, K, index, s, w);
  for (int64_t k = 0; k < K; ++k) {
    w[k] = bounded_exact(0);
    if (index[k] < 0) continue;
    w[k] = o->renormalize ? bounded_div(s[index[k]], divisor) : s[index[k]];
    if (router_factor_f64(o) != 1) w[k] = bounded_mul(w[k], bounded_exact(router_factor_f64(o)));
  }
}

/* dz [E] from dw [K]. With R = sum of s + epsilon, w = s/R or s, D = sum of w*dw: a selected j gets w_j*(dw_j - D), or
   w_j*dw_j, or for scores taken one by one s'_j instead of s_j; a softmax takes s_j*D*epsilon/R, or s_j*D, from all it
   reaches. s: room for [E], w for [K]. */
static inline void bounded_router_weights_bwd(const moe_router_config *o, int64_t E, int64_t K, const double *z,
                                              const int32_t *index, const double *dw, bounded *s, bounded *w,
                                              bounded *dz) {
  int softmax = o->score_function == MOE_SCORE_SOFTMAX;
  bounded_scores(o, E, K, z, index, s);
  bounded divisor = bounded_divisor(o, K, index, s, w), factor = bounded_exact(router_factor_f64(o));
  bounded_sum dot = {0};
  for (int64_t k = 0; k < K; ++k)
    if (index[k] >= 0)
      bounded_sum_weight(&dot, o->renormalize ? bounded_div(s[index[k]], divisor) : s[index[k]], dw[k], 0);
  bounded mean = bounded_sum_depth(&dot, dot.terms), lost = mean;
  if (o->renormalize) lost = bounded_mul(mean, bounded_div(bounded_exact((double)o->renormalize_epsilon), divisor));
  for (int64_t e = 0; e < E; ++e) {
    dz[e] = bounded_exact(0);
    if (softmax && dot.terms > 0 && !(o->renormalize && o->renormalize_epsilon == 0)) dz[e] = bounded_mul(s[e], lost);
    dz[e].v = -dz[e].v;
  }
  for (int64_t k = 0; k < K; ++k) {
    if (index[k] < 0) continue;
    bounded own = softmax ? s[index[k]] : bounded_score_grad(o->score_function, z[index[k]]),
            gain = bounded_exact(dw[k]);
    if (o->renormalize) own = bounded_div(own, divisor), gain = bounded_sub(gain, mean);
    dz[index[k]] = bounded_add(dz[index[k]], bounded_mul(own, gain));
  }
  for (int64_t e = 0; e < E && factor.v != 1; ++e) dz[e] = bounded_mul(dz[e], factor);
}

/* ----------------------------------------------------------------------------------------------------------- losses */

/* Over all tokens: z [T,E]; dz [T,E] becomes the gradient; p: room for [E]. The result is the loss. */
static inline bounded bounded_load_balance_loss(const moe_router_loss_args *a, const double *z, bounded *p,
                                                bounded *dz) {
  bounded tokens = bounded_exact((double)ref_loss_tokens(a)), loss = bounded_exact(0);
  if (tokens.v == 0) return loss;
  bounded slots = bounded_mul(bounded_mul(bounded_exact((double)a->K), tokens), tokens);
  bounded scale = bounded_div(bounded_mul(bounded_exact((double)a->coefficient), bounded_exact((double)a->E)), slots);
  for (int64_t t = 0; t < a->T; ++t) {
    const double *row = z + t * a->E;
    int softmax = a->score_function == MOE_SCORE_SOFTMAX;
    if (a->token_mask && !a->token_mask[t]) continue;
    bounded_sum term = {0};
    for (int64_t e = 0; e < a->E && !softmax; ++e) p[e] = bounded_score(a->score_function, row[e]);
    bounded total = softmax ? bounded_exact(1) : bounded_total(a->E, p);
    if (softmax) bounded_softmax(a->E, 0, row, NULL, p);
    for (int64_t e = 0; e < a->E; ++e) {
      bounded gain = bounded_mul(scale, bounded_exact(ref_loss_slots(a, e)));
      bounded_sum_add(&term, gain, softmax ? p[e] : bounded_div(p[e], total), 0);
    }
    bounded sum = bounded_sum_depth(&term, term.terms);
    for (int64_t e = 0; e < a->E; ++e) {
      bounded gain = bounded_mul(scale, bounded_exact(ref_loss_slots(a, e)));
      bounded slope = softmax ? p[e] : bounded_div(bounded_score_grad(a->score_function, row[e]), total);
      dz[t * a->E + e] = bounded_mul(slope, bounded_sub(gain, sum));
    }
    loss = bounded_accumulate(loss, sum);
  }
  return loss;
}

/* As above. */
static inline bounded bounded_z_loss(const moe_router_loss_args *a, const double *z, bounded *p, bounded *dz) {
  bounded tokens = bounded_exact((double)ref_loss_tokens(a)), c = bounded_exact((double)a->coefficient),
          loss = bounded_exact(0);
  for (int64_t t = 0; t < a->T; ++t) {
    const double *row = z + t * a->E;
    if (a->token_mask && !a->token_mask[t]) continue;
    bounded shift = bounded_exact(largest_f64(a->E, row));
    for (int64_t e = 0; e < a->E; ++e) p[e] = bounded_exp(bounded_sub(bounded_exact(row[e]), shift));
    bounded lse = bounded_add(shift, bounded_log(bounded_total(a->E, p)));
    bounded gain = bounded_mul(bounded_div(bounded_exact(2 * c.v), tokens), lse);
    bounded_softmax(a->E, 0, row, NULL, p);
    for (int64_t e = 0; e < a->E; ++e) dz[t * a->E + e] = bounded_mul(p[e], gain);
    loss = bounded_accumulate(loss, bounded_mul(lse, lse));
  }
  return tokens.v > 0 ? bounded_mul(c, bounded_div(loss, tokens)) : loss;
}

#endif /* REFERENCE_BOUNDED_ROUTER_H */
