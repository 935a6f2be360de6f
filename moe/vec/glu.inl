/* The gated unit, on rows of a panel. Forward: products, pre-activations, m. Backward: dm, then dg, du and a*m. */

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

/* The factor of row r. */
MOE_INLINE MOE_V(f) MOE_K(glu_scale)(const float *scale, int64_t r) { return MOE_V(set1)(scale ? scale[r] : 1.0f); }

/* Whether products are pre-activations without further operations. */
MOE_INLINE int MOE_K(glu_plain)(const moe_glu_ *glu, const moe_glu_rows_ *rows) {
  return !rows->pre_scale && !rows->gate_bias && !rows->up_bias && !glu->clamp;
}

MOE_INLINE void MOE_K(glu_products_row)(const moe_glu_ *glu, const moe_glu_rows_ *rows, int64_t r) {
  const uint32_t on = glu->clamp;
  const MOE_V(f) pre_scale = MOE_K(glu_scale)(rows->pre_scale, r);
  for (int64_t i = 0; i < rows->n; i += MOE_W) {
    const int64_t at = r * MOE_NR + i;
    MOE_V(f) u = MOE_V(mul)(MOE_V(load)(rows->up + at), pre_scale);
    if (rows->up_bias) u = MOE_V(add)(u, MOE_V(load)(rows->up_bias + i));
    u = MOE_K(clamp)(u, on & MOE_CLAMP_UP_UPPER, glu->up_upper, on & MOE_CLAMP_UP_LOWER, glu->up_lower);
    MOE_V(store)(rows->up + at, u);
    if (glu->skip_gate) continue;
    MOE_V(f) g = MOE_V(mul)(MOE_V(load)(rows->gate + at), pre_scale);
    if (rows->gate_bias) g = MOE_V(add)(g, MOE_V(load)(rows->gate_bias + i));
    g = MOE_K(clamp)(g, on & MOE_CLAMP_GATE_UPPER, glu->gate_upper, on & MOE_CLAMP_GATE_LOWER, glu->gate_lower);
    MOE_V(store)(rows->gate + at, g);
  }
}

MOE_INLINE void MOE_K(glu_scale_row)(const moe_glu_rows_ *rows, int64_t r) {
  const MOE_V(f) scale = MOE_K(glu_scale)(rows->scale, r);
  for (float *m = rows->m + r * MOE_NR, *end = m + rows->n; m < end; m += MOE_W)
    MOE_V(store)(m, MOE_V(mul)(MOE_V(load)(m), scale));
}

/* b*tanh(u/b) and its derivative. */
MOE_INLINE MOE_K(act) MOE_K(up_softcap)(MOE_V(f) u, float b) {
  MOE_K(act) r;
  MOE_K(tanh)(MOE_V(div)(u, MOE_V(set1)(b)), &r.f, &r.df);
  r.f = MOE_V(mul)(r.f, MOE_V(set1)(b));
  return r;
}

/* m *= up with its softcap + offset. */
MOE_INLINE void MOE_K(glu_softcap_row)(const moe_glu_ *glu, const moe_glu_rows_ *rows, int64_t r) {
  for (int64_t at = r * MOE_NR; at < r * MOE_NR + rows->n; at += MOE_W) {
    const MOE_V(f) v = MOE_K(up_softcap)(MOE_V(load)(rows->up + at), glu->up_softcap).f;
    MOE_V(store)(rows->m + at, MOE_V(mul)(MOE_V(load)(rows->m + at), MOE_V(add)(v, MOE_V(set1)(glu->up_offset))));
  }
}

MOE_FN void MOE_K(glu_forward)(const moe_glu_ *glu, const moe_glu_rows_ *rows) {
  const int plain = MOE_K(glu_plain)(glu, rows), softcap = glu->up_softcap > 0.0f && !glu->skip_gate;
  for (int64_t r = 0; r < rows->rows && !plain; r++) MOE_K(glu_products_row)(glu, rows, r);
  MOE_K(activations)
  (glu, glu->skip_gate ? rows->up : rows->gate, glu->skip_gate || softcap ? NULL : rows->up, rows->rows, rows->n,
   rows->m, NULL);
  for (int64_t r = 0; r < rows->rows && softcap; r++) MOE_K(glu_softcap_row)(glu, rows, r);
  for (int64_t r = 0; r < rows->rows && rows->scale; r++) MOE_K(glu_scale_row)(rows, r);
}

/* f, df: the activations of a row and their derivatives. dm is read as zero in columns from n on, which so add nothing.
   */
MOE_FN float MOE_K(glu_backward_row)(const moe_glu_ *glu, const moe_glu_rows_ *rows, int64_t r, const float *f,
                                     const float *df) {
  const uint32_t on = glu->clamp;
  float chains[MOE_DOT_CHAINS] = {0};
  const MOE_V(f) scale = MOE_K(glu_scale)(rows->scale, r);
  for (int64_t i = 0; i < rows->n; i += MOE_W) {
    const int64_t left = moe_min_(rows->n - i, MOE_W), at = r * MOE_NR + i;
    const MOE_V(f) dm0 = MOE_V(loadn)(rows->dm + at, left), dm = MOE_V(mul)(dm0, scale);
    const MOE_V(f) a = rows->act ? MOE_V(loadn)(rows->act + at, left) : MOE_V(load)(f + i);
    const MOE_V(f) slope = MOE_V(load)(df + i), u = MOE_V(loadn)(rows->up + at, left);
    MOE_V(f) m = a, du;
    if (glu->skip_gate) {
      du = MOE_V(mul)(dm, slope);
    } else {
      MOE_K(act) up = {u, MOE_V(set1)(1.0f)};
      if (glu->up_softcap > 0.0f) up = MOE_K(up_softcap)(u, glu->up_softcap);
      const MOE_V(f) v = MOE_V(add)(up.f, MOE_V(set1)(glu->up_offset));
      MOE_V(f) dg = MOE_V(mul)(MOE_V(mul)(dm, v), slope);
      if (on & (MOE_CLAMP_GATE_UPPER | MOE_CLAMP_GATE_LOWER))
        dg = MOE_K(mask)(dg, MOE_V(loadn)(rows->gate + at, left), on & MOE_CLAMP_GATE_UPPER, glu->gate_upper,
                         on & MOE_CLAMP_GATE_LOWER, glu->gate_lower);
      MOE_V(store)(rows->dgate + at, dg);
      m = MOE_V(mul)(a, v);
      du = MOE_V(mul)(dm, a);
      if (glu->up_softcap > 0.0f) du = MOE_V(mul)(du, up.df);
    }
    if (on & (MOE_CLAMP_UP_UPPER | MOE_CLAMP_UP_LOWER))
      du = MOE_K(mask)(du, u, on & MOE_CLAMP_UP_UPPER, glu->up_upper, on & MOE_CLAMP_UP_LOWER, glu->up_lower);
    MOE_V(store)(rows->dup + at, du);
    MOE_V(store)(rows->m + at, MOE_V(mul)(m, scale));
    MOE_K(chain)(chains, i, dm0, m);
  }
  return MOE_V(sum16)(chains);
}

/* Keeps x that are inside their limits apart from those at a limit: x < upper is at most `below`, x > lower is at least
   `above`. */
MOE_FN void MOE_K(keep_inside)(float *x, float upper, float below, float lower, float above, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; r++, x += MOE_NR)
    for (int64_t i = 0; i < n; i += MOE_W) {
      MOE_V(f) v = MOE_V(load)(x + i);
      v = MOE_V(select)(MOE_V(lt)(v, MOE_V(set1)(upper)), MOE_V(min)(MOE_V(set1)(below), v), v);
      v = MOE_V(select)(MOE_V(lt)(MOE_V(set1)(lower), v), MOE_V(max)(MOE_V(set1)(above), v), v);
      MOE_V(store)(x + i, v);
    }
}

enum { MOE_K(glu_rows) = 4 }; /* rows whose activations are computed at a time */
MOE_FN void MOE_K(glu_backward)(const moe_glu_ *glu, const moe_glu_rows_ *rows) {
  float f[MOE_K(glu_rows) * MOE_NR], df[MOE_K(glu_rows) * MOE_NR];
  const float *x = glu->skip_gate ? rows->up : rows->gate;
  for (int64_t r = 0; r < rows->rows; r++) {
    const int64_t at = r % MOE_K(glu_rows), some = moe_min_(MOE_K(glu_rows), rows->rows - r);
    if (at == 0) MOE_K(activations)(glu, x + r * MOE_NR, NULL, some, rows->n, f, df);
    rows->dot[r] = MOE_K(glu_backward_row)(glu, rows, r, f + at * MOE_NR, df + at * MOE_NR);
  }
}

MOE_FN void MOE_K(activate)(const moe_glu_ *glu, const float *x, float *y, float *dy, int64_t n) {
  float f[MOE_NR], df[MOE_NR];
  for (int64_t from = 0; from < n; from += MOE_NR) {
    const int64_t to = moe_min_(n, from + MOE_NR);
    MOE_K(activations)(glu, x + from, NULL, 1, to - from, f, df);
    for (int64_t i = from; i < to; i += MOE_W) {
      const int64_t left = moe_min_(to - i, MOE_W);
      if (y) MOE_V(storen)(y + i, MOE_V(canon)(MOE_V(load)(f + i - from)), left);
      if (dy) MOE_V(storen)(dy + i, MOE_V(canon)(MOE_V(load)(df + i - from)), left);
    }
  }
}
