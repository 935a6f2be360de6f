/* Rounding to MX, of values with errors. */
#ifndef MOE_NEURON_BOUND_MX_H
#define MOE_NEURON_BOUND_MX_H

/* Which element of K has position n. */
MOE_FN moe_status moe_neuron_positions_(moe_context *ctx, moe_mx_layout layout, int32_t parts, int64_t K,
                                        int64_t *index) {
  for (int64_t k = 0; k < K; k++) index[k] = k;
  if (layout == MOE_MX_LAYOUT_NKI_STRIDED_X4 || layout == MOE_MX_LAYOUT_NKI_WRAPX ||
      layout == MOE_MX_LAYOUT_NKI_WRAPX_WHOLE)
    return moe_nki_x4_permutation(ctx, layout, parts, K, index);
  return MOE_OK;
}

/* Memory for rounding a row of K elements. */
typedef struct moe_neuron_round_ {
  int64_t K;
  int64_t *index; /* the element at a position */
  float *v, *e, *q, *x, *y, *far, *scale[2];
  uint8_t *codes, *bytes;
} moe_neuron_round_;

/* As a weight in that layout is grouped. */
MOE_FN moe_status moe_neuron_round_new_(moe_context *ctx, moe_neuron_bounds_ *bounds, moe_mx_layout layout,
                                        int32_t parts, int64_t K, moe_neuron_round_ *to) {
  moe_neuron_scratch_ *scratch = &bounds->scratch;
  const int64_t groups = moe_ceil_div_(K, 32);
  float *at = (float *)moe_neuron_take_(scratch, 6 * K + 2 * groups, sizeof *at);
  *to = (moe_neuron_round_){.K = K};
  to->index = (int64_t *)moe_neuron_take_(scratch, K, sizeof *to->index);
  to->codes = (uint8_t *)moe_neuron_take_(scratch, K + groups, 1);
  if (!at || !to->index || !to->codes) return moe_neuron_no_memory_(ctx);
  to->v = at, to->e = at + K, to->q = at + 2 * K, to->x = at + 3 * K, to->y = at + 4 * K;
  to->far = at + 5 * K, to->scale[0] = at + 6 * K, to->scale[1] = to->scale[0] + groups, to->bytes = to->codes + K;
  return moe_neuron_positions_(ctx, layout, parts, K, to->index);
}

/* n floats as codes, and back. */
MOE_FN void moe_neuron_code_(const moe_mx_rounding *rule, const float *x, int64_t n, uint8_t *codes) {
  switch (rule->element) {
#define MOE_NEURON_CASE_(name, NAME, bits, fraction, bias, max, infinity, nan) \
  case MOE_ELEMENT_##NAME: (void)moe_##name##_from_f32(NULL, codes, x, n, rule->cast); break;
    MOE_ELEMENT_LIST(MOE_NEURON_CASE_)
#undef MOE_NEURON_CASE_
    default: break; /* describe.h refuses integers */
  }
}
MOE_FN void moe_neuron_codes_(moe_element element, const uint8_t *codes, int64_t n, float *to) {
  switch (element) {
#define MOE_NEURON_CASE_(name, NAME, bits, fraction, bias, max, infinity, nan) \
  case MOE_ELEMENT_##NAME: (void)moe_##name##_to_f32(NULL, to, codes, n); break;
    MOE_ELEMENT_LIST(MOE_NEURON_CASE_)
#undef MOE_NEURON_CASE_
    default: break; /* describe.h refuses integers */
  }
}

/* y = x rounded, and the scales that it takes. */
MOE_FN void moe_neuron_round_mx_(const moe_mx_rounding *rule, const moe_neuron_round_ *r, const float *x, float *y,
                                 float *scale) {
  const moe_quantize_mx_args to = {.element = rule->element,
                                   .scale_rule = rule->scale_rule,
                                   .cast = rule->cast,
                                   .rows = 1,
                                   .columns = r->K,
                                   .plain = x,
                                   .codes = r->codes,
                                   .scales = r->bytes};
  const moe_dequantize_mx_args back = {
      .element = rule->element, .rows = 1, .columns = r->K, .codes = r->codes, .scales = r->bytes, .plain = y};
  (void)moe_quantize_mx(NULL, &to);
  if (y) (void)moe_dequantize_mx(NULL, &back);
  if (scale) (void)moe_e8m0_to_f32(NULL, scale, r->bytes, moe_ceil_div_(r->K, 32));
}

/* y = x rounded under the scales: codes of x*(1/scale). */
MOE_FN void moe_neuron_round_under_(const moe_mx_rounding *rule, const moe_neuron_round_ *r, float *scale) {
  for (int64_t g = 0; g < moe_ceil_div_(r->K, 32); g++)
    if (!(scale[g] > 0 && scale[g] < INFINITY)) scale[g] = 1;
  for (int64_t n = 0; n < r->K; n++) r->y[n] = r->x[n] * (1 / scale[n / 32]);
  moe_neuron_code_(rule, r->y, r->K, r->codes);
  moe_neuron_codes_(rule->element, r->codes, r->K, r->y);
  for (int64_t n = 0; n < r->K; n++) r->y[n] *= scale[n / 32];
}

/* A row with errors, by position: q is v rounded, `far` becomes how far from that another rounding can be. Scales are
   given, or those that the interval's ends take. */
MOE_FN void moe_neuron_round_interval_(const moe_mx_rounding *rule, const moe_neuron_round_ *r, int given) {
  for (int most = 0; most < 2 && !given; most++) {
    for (int64_t n = 0; n < r->K; n++) r->x[n] = most ? fabsf(r->v[n]) + r->e[n] : fmaxf(fabsf(r->v[n]) - r->e[n], 0);
    moe_neuron_round_mx_(rule, r, r->x, NULL, r->scale[most]);
  }
  for (int64_t n = 0; n < r->K; n++) { /* where there are more than two scales, it can be anything */
    const int any = !(r->scale[1][n / 32] <= 2 * r->scale[0][n / 32]);
    r->far[n] = any ? 3 * (fabsf(r->v[n]) + r->e[n]) : 0;
  }
  for (int end = 0; end < 4; end++) {
    for (int64_t n = 0; n < r->K; n++) r->x[n] = end & 1 ? r->v[n] + r->e[n] : r->v[n] - r->e[n];
    moe_neuron_round_under_(rule, r, r->scale[end / 2]);
    for (int64_t n = 0; n < r->K; n++) r->far[n] = fmaxf(r->far[n], fabsf(r->y[n] - r->q[n]));
  }
}

/* Rounds a row of values with errors, under one scale or, where that is 0, under scales of their own. What was exact
   stays so. */
MOE_FN void moe_neuron_round_row_(const moe_mx_rounding *rule, const moe_neuron_round_ *r, float scale, float *v,
                                  float *e) {
  int exact = 1;
  for (int64_t n = 0; n < r->K; n++) r->v[n] = v[r->index[n]], r->e[n] = e[r->index[n]], exact &= r->e[n] <= 0;
  for (int64_t g = 0; g < moe_ceil_div_(r->K, 32); g++) r->scale[0][g] = r->scale[1][g] = scale;
  if (scale > 0) {
    memcpy(r->x, r->v, (size_t)r->K * sizeof *r->x);
    moe_neuron_round_under_(rule, r, r->scale[0]);
    memcpy(r->q, r->y, (size_t)r->K * sizeof *r->q);
  } else {
    moe_neuron_round_mx_(rule, r, r->v, r->q, NULL);
  }
  if (!exact) moe_neuron_round_interval_(rule, r, scale > 0);
  for (int64_t n = 0; n < r->K; n++) v[r->index[n]] = r->q[n], e[r->index[n]] = exact ? 0 : r->far[n];
}

#endif
