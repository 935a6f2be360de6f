/* The router's kernels on rows of logits. */

MOE_FN void MOE_K(exp_row)(float *y, const float *x, float shift, int64_t n) {
  for (int64_t i = 0; i < n; i += MOE_W) {
    const int64_t left = moe_min_(n - i, MOE_W);
    MOE_V(storen)(y + i, MOE_K(exp)(MOE_V(sub)(MOE_V(loadn)(x + i, left), MOE_V(set1)(shift))), left);
  }
}

/* sigmoid, or sqrt(softplus), where softplus z = max(z,0) + log(1+e^-|z|). dy, the derivative, may be NULL. */
MOE_FN void MOE_K(score_row)(float *y, float *dy, const float *x, moe_score_function score_function, int64_t n) {
  for (int64_t i = 0; i < n; i += MOE_W) {
    const int64_t left = moe_min_(n - i, MOE_W);
    MOE_V(f) z = MOE_V(loadn)(x + i, left), zero = MOE_V(set1)(0.0f), s, complement, slope;
    MOE_K(sigmoid)(z, &s, &complement);
    if (score_function == MOE_SCORE_SIGMOID) {
      slope = MOE_V(mul)(s, complement);
    } else {
      MOE_V(f) l = MOE_K(log1p)(MOE_K(exp)(MOE_K(minus_abs)(z)));
      MOE_V(f) root = MOE_V(sqrt)(MOE_V(add)(MOE_V(max)(zero, z), l));
      /* For z < -18 log(1+e^z) is e^z to the last bit, but that may underflow: e^(z/2) is the root. */
      MOE_V(m) tiny = MOE_V(lt)(z, MOE_V(set1)(-18.0f));
      root = MOE_V(select)(tiny, MOE_K(exp)(MOE_V(mul)(z, MOE_V(set1)(0.5f))), root);
      slope = MOE_V(mul)(MOE_V(set1)(0.5f), MOE_V(select)(tiny, root, MOE_V(div)(s, root)));
      s = root;
    }
    MOE_V(storen)(y + i, s, left);
    if (dy) MOE_V(storen)(dy + i, slope, left);
  }
}

MOE_FN void MOE_K(softcap_row)(float *y, float *dy, const float *x, float cap, int64_t n) {
  for (int64_t i = 0; i < n; i += MOE_W) {
    const int64_t left = moe_min_(n - i, MOE_W);
    MOE_V(f) t, slope;
    MOE_K(tanh)(MOE_V(div)(MOE_V(loadn)(x + i, left), MOE_V(set1)(cap)), &t, &slope);
    MOE_V(storen)(y + i, MOE_V(mul)(MOE_V(set1)(cap), t), left);
    if (dy) MOE_V(storen)(dy + i, slope, left);
  }
}

/* Their table. */
static const moe_router_table_ MOE_K(router_table) = {
    .exp_row = MOE_K(exp_row), .score_row = MOE_K(score_row), .softcap_row = MOE_K(softcap_row)};
