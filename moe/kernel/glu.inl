/* The gated unit, one row of a panel at a time. Forward: products -> pre-activations -> m. Backward: dm -> dg, du,
   a*m. */

MOE_INLINE MOE_V(f) MOE_K(clamp)(MOE_V(f) x, int upper_on, float upper, int lower_on, float lower) {
  if (upper_on) x = MOE_V(min)(MOE_V(set1)(upper), x);
  if (lower_on) x = MOE_V(max)(MOE_V(set1)(lower), x);
  return x;
}

/* x where lower < at < upper, else 0. */
MOE_INLINE MOE_V(f) MOE_K(mask)(MOE_V(f) x, MOE_V(f) at, int upper_on, float upper, int lower_on, float lower) {
  MOE_V(f) zero = MOE_V(set1)(0.0f);
  if (upper_on) x = MOE_V(select)(MOE_V(lt)(at, MOE_V(set1)(upper)), x, zero);
  if (lower_on) x = MOE_V(select)(MOE_V(lt)(MOE_V(set1)(lower), at), x, zero);
  return x;
}

/* The activation is chosen inside the loops: a well-predicted jump costs less than their copies. */
MOE_FN void MOE_K(glu_forward)(const moe_glu_ *glu, moe_glu_row_ *row) {
  const uint32_t on = glu->clamp;
  for (int64_t i = 0; i < row->n; i += MOE_W) {
    MOE_V(f) u = MOE_V(mul)(MOE_V(load)(row->up + i), MOE_V(set1)(row->pre_scale));
    if (row->up_bias) u = MOE_V(add)(u, MOE_V(load)(row->up_bias + i));
    u = MOE_K(clamp)(u, on & MOE_CLAMP_UP_UPPER, glu->up_upper, on & MOE_CLAMP_UP_LOWER, glu->up_lower);
    MOE_V(store)(row->up + i, u);
    MOE_V(f) g = u;
    if (!glu->skip_gate) {
      g = MOE_V(mul)(MOE_V(load)(row->gate + i), MOE_V(set1)(row->pre_scale));
      if (row->gate_bias) g = MOE_V(add)(g, MOE_V(load)(row->gate_bias + i));
      g = MOE_K(clamp)(g, on & MOE_CLAMP_GATE_UPPER, glu->gate_upper, on & MOE_CLAMP_GATE_LOWER, glu->gate_lower);
      MOE_V(store)(row->gate + i, g);
    }
    MOE_V(f) m = MOE_K(activation)(glu->activation, glu->alpha, g).f;
    if (!glu->skip_gate) m = MOE_V(mul)(m, MOE_V(add)(u, MOE_V(set1)(glu->up_offset)));
    MOE_V(store)(row->m + i, MOE_V(mul)(m, MOE_V(set1)(row->scale)));
  }
}

/* Columns at or beyond n take part in no sum: their dm is read as zero. */
MOE_FN void MOE_K(glu_backward)(const moe_glu_ *glu, moe_glu_row_ *row) {
  const uint32_t on = glu->clamp;
  float lanes[MOE_LANES] = {0};
  const MOE_V(f) scale = MOE_V(set1)(row->scale);
  for (int64_t i = 0; i < row->n; i += MOE_W) {
    const int64_t left = moe_min_(row->n - i, MOE_W);
    MOE_V(f) dm0 = MOE_V(loadn)(row->dm + i, left), dm = MOE_V(mul)(dm0, scale), m;
    const MOE_V(f) u = MOE_V(loadn)(row->up + i, left), g = glu->skip_gate ? u : MOE_V(loadn)(row->gate + i, left);
    const MOE_K(act) a = MOE_K(activation)(glu->activation, glu->alpha, g);
    if (glu->skip_gate) {
      m = a.f;
      MOE_V(f) du = MOE_V(mul)(dm, a.df);
      du = MOE_K(mask)(du, u, on & MOE_CLAMP_UP_UPPER, glu->up_upper, on & MOE_CLAMP_UP_LOWER, glu->up_lower);
      MOE_V(store)(row->dup + i, du);
    } else {
      const MOE_V(f) v = MOE_V(add)(u, MOE_V(set1)(glu->up_offset));
      m = MOE_V(mul)(a.f, v);
      MOE_V(f) dg = MOE_V(mul)(MOE_V(mul)(dm, v), a.df), du = MOE_V(mul)(dm, a.f);
      dg = MOE_K(mask)(dg, g, on & MOE_CLAMP_GATE_UPPER, glu->gate_upper, on & MOE_CLAMP_GATE_LOWER, glu->gate_lower);
      MOE_V(store)(row->dgate + i, dg);
      du = MOE_K(mask)(du, u, on & MOE_CLAMP_UP_UPPER, glu->up_upper, on & MOE_CLAMP_UP_LOWER, glu->up_lower);
      MOE_V(store)(row->dup + i, du);
    }
    MOE_V(store)(row->m + i, MOE_V(mul)(m, scale));
    MOE_V(f) sum = MOE_V(load)(lanes + i % MOE_LANES);
    MOE_V(storen)(lanes + i % MOE_LANES, MOE_V(fma)(dm0, m, sum), left);
  }
  row->dot = moe_reduce_lanes_(lanes);
}

MOE_FN void MOE_K(activate)(const moe_glu_ *glu, const float *x, float *y, float *dy, int64_t n) {
  for (int64_t i = 0; i < n; i += MOE_W) {
    const int64_t left = moe_min_(n - i, MOE_W);
    MOE_K(act) a = MOE_K(activation)(glu->activation, glu->alpha, MOE_V(loadn)(x + i, left));
    if (y) MOE_V(storen)(y + i, MOE_V(canon)(a.f), left);
    if (dy) MOE_V(storen)(dy + i, MOE_V(canon)(a.df), left);
  }
}
