/* The router and its losses in plain mathematics over REAL, the selection held fixed. Needs REAL, REF(name), REF_PART,
   REF_EXP, REF_LOG, REF_LOG1P and REF_SQRT. Included once per number type. One token unless said otherwise. */

static inline double REF(router_factor)(const moe_router_config *o) {
  return o->routed_scaling_factor != 0 ? (double)o->routed_scaling_factor : 1.0;
}

static inline double REF(largest)(int64_t E, const REAL *z) {
  double largest = REF_PART(z[0]);
  for (int64_t e = 1; e < E; ++e) largest = fmax(largest, REF_PART(z[e]));
  return largest;
}

/* The selected entries of an [E] mask. */
static inline int REF(selected)(int64_t K, const int32_t *index, int64_t e) {
  for (int64_t k = 0; k < K; ++k)
    if (index[k] == e) return 1;
  return 0;
}

/* p [E]: softmax over all E, or over the selected with index != NULL (0 elsewhere). */
static inline void REF(softmax)(int64_t E, int64_t K, const REAL *z, const int32_t *index, REAL *p) {
  double shift = REF(largest)(E, z);
  REAL sum = 0;
  for (int64_t e = 0; e < E; ++e) sum += p[e] = !index || REF(selected)(K, index, e) ? REF_EXP(z[e] - shift) : 0;
  for (int64_t e = 0; e < E && REF_PART(sum) > 0; ++e) p[e] /= sum;
}

/* sigmoid or sqrt-softplus, and its derivative. */
static inline REAL REF(score)(moe_score_function function, REAL z) {
  REAL exp_z = REF_EXP(-z);
  if (function == MOE_SCORE_SIGMOID) return 1 / (1 + exp_z);
  return REF_SQRT(REF_PART(z) > 0 ? z + REF_LOG1P(exp_z) : REF_LOG1P(REF_EXP(z)));
}
static inline REAL REF(score_grad)(moe_score_function function, REAL z) {
  REAL s = 1 / (1 + REF_EXP(-z));
  return function == MOE_SCORE_SIGMOID ? s / (1 + REF_EXP(z)) : s / (2 * REF(score)(function, z));
}

/* s [E], as the configuration says; only the selected entries matter. */
static inline void REF(scores)(const moe_router_config *o, int64_t E, int64_t K, const REAL *z, const int32_t *index,
                               REAL *s) {
  if (o->score_function == MOE_SCORE_SOFTMAX) {
    REF(softmax)(E, K, z, o->score_order == MOE_SCORE_AFTER_TOPK ? index : NULL, s);
    return;
  }
  for (int64_t e = 0; e < E; ++e) s[e] = REF(score)(o->score_function, z[e]);
}

/* w [K] for the selection index [K]; s: room for [E]. */
static inline void REF(router_weights)(const moe_router_config *o, int64_t E, int64_t K, const REAL *z,
                                       const int32_t *index, REAL *s, REAL *w) {
  REAL sum = 0;
  REF(scores)(o, E, K, z, index, s);
  for (int64_t k = 0; k < K; ++k) sum += w[k] = index[k] < 0 ? 0 : s[index[k]];
  for (int64_t k = 0; k < K; ++k) {
    if (o->renormalize && index[k] >= 0) w[k] /= sum + (double)o->renormalize_epsilon;
    w[k] *= REF(router_factor)(o);
  }
}

/* dz [E] += the gradient of sum_k dw[k] w[k]; s, ds: room for [E]. */
static inline void REF(router_weights_bwd)(const moe_router_config *o, int64_t E, int64_t K, const REAL *z,
                                           const int32_t *index, const REAL *dw, REAL *s, REAL *ds, REAL *dz) {
  REAL sum = (double)o->renormalize_epsilon, mean = 0, dot = 0;
  REF(scores)(o, E, K, z, index, s);
  for (int64_t k = 0; k < K; ++k)
    if (index[k] >= 0) sum += s[index[k]], mean += dw[k] * s[index[k]];
  for (int64_t e = 0; e < E; ++e) ds[e] = 0;
  for (int64_t k = 0; k < K; ++k)
    if (index[k] >= 0) ds[index[k]] += REF(router_factor)(o) * (o->renormalize ? (dw[k] - mean / sum) / sum : dw[k]);
  if (o->score_function != MOE_SCORE_SOFTMAX) {
    for (int64_t e = 0; e < E; ++e) dz[e] += ds[e] != 0 ? ds[e] * REF(score_grad)(o->score_function, z[e]) : 0;
    return;
  }
  for (int64_t e = 0; e < E; ++e) dot += s[e] * ds[e];
  for (int64_t e = 0; e < E; ++e) dz[e] += s[e] * (ds[e] - dot);
}

/* ----------------------------------------------------------------------------------------------------------- losses */

/* The load balance probabilities p [E] of a token. */
static inline void REF(balance_scores)(moe_score_function function, int64_t E, const REAL *z, REAL *p) {
  REAL sum = 0;
  if (function == MOE_SCORE_SOFTMAX) {
    REF(softmax)(E, 0, z, NULL, p);
    return;
  }
  for (int64_t e = 0; e < E; ++e) sum += p[e] = REF(score)(function, z[e]);
  for (int64_t e = 0; e < E; ++e) p[e] /= sum;
}

/* All tokens, z [T,E]. p, and n with dz: room for [E]. dz [T,E] += the gradient, when given. */
static inline REAL REF(load_balance_loss)(const moe_router_loss_args *a, const REAL *z, REAL *p, REAL *dz) {
  double tokens = (double)ref_loss_tokens(a);
  double scale = tokens > 0 ? (double)a->coefficient * (double)a->E / ((double)a->K * tokens * tokens) : 0;
  REAL loss = 0;
  for (int64_t t = 0; t < a->T; ++t) {
    if (a->token_mask && !a->token_mask[t]) continue;
    const REAL *row = z + t * a->E;
    REAL dot = 0, sum = 0;
    REF(balance_scores)(a->score_function, a->E, row, p);
    for (int64_t e = 0; e < a->E; ++e) dot += scale * ref_loss_slots(a, e) * p[e];
    loss += dot;
    if (!dz) continue;
    for (int64_t e = 0; e < a->E && a->score_function != MOE_SCORE_SOFTMAX; ++e)
      sum += REF(score)(a->score_function, row[e]);
    for (int64_t e = 0; e < a->E; ++e) {
      REAL dp = scale * ref_loss_slots(a, e) - dot;
      int softmax = a->score_function == MOE_SCORE_SOFTMAX;
      dz[t * a->E + e] += softmax ? p[e] * dp : dp / sum * REF(score_grad)(a->score_function, row[e]);
    }
  }
  return loss;
}

/* As above. */
static inline REAL REF(z_loss)(const moe_router_loss_args *a, const REAL *z, REAL *p, REAL *dz) {
  double tokens = (double)ref_loss_tokens(a);
  REAL loss = 0;
  for (int64_t t = 0; t < a->T; ++t) {
    if (a->token_mask && !a->token_mask[t]) continue;
    const REAL *row = z + t * a->E;
    double shift = REF(largest)(a->E, row);
    REAL sum = 0;
    for (int64_t e = 0; e < a->E; ++e) sum += REF_EXP(row[e] - shift);
    REAL lse = shift + REF_LOG(sum);
    loss += (double)a->coefficient / tokens * lse * lse;
    REF(softmax)(a->E, 0, row, NULL, p);
    for (int64_t e = 0; e < a->E && dz; ++e) dz[t * a->E + e] += 2 * (double)a->coefficient / tokens * lse * p[e];
  }
  return loss;
}
