/* f(x) and f'(x) of every activation. */

typedef struct MOE_K(act) {
  MOE_V(f) f, df;
} MOE_K(act);

/* x*s(z) with z = slope(x): derivative s + x*s*(1-s)*dz. */
MOE_INLINE MOE_K(act) MOE_K(sigmoid_unit)(MOE_V(f) x, MOE_V(f) z, MOE_V(f) dz) {
  MOE_V(f) s, c;
  MOE_K(act) r;
  MOE_K(sigmoid)(z, &s, &c);
  r.f = MOE_V(mul)(x, s);
  r.df = MOE_V(fma)(MOE_V(mul)(x, dz), MOE_V(mul)(s, c), s);
  return r;
}

MOE_INLINE MOE_K(act) MOE_K(gelu_tanh)(MOE_V(f) x) {
  /* (1+tanh v)/2 = s(2v), 2v = x*(c + c*0.044715*x^2), c = 2*sqrt(2/pi). Beyond |x| = 16 s is 0 or 1 and x^2 could
     overflow. */
  const float c1 = 0x1.988454p+0f, c3 = 0x1.2444f2p-4f;
  MOE_V(f) b = MOE_V(max)(MOE_V(set1)(-16.0f), MOE_V(min)(MOE_V(set1)(16.0f), x)), u = MOE_V(mul)(b, b);
  MOE_V(f) z = MOE_V(mul)(b, MOE_V(fma)(u, MOE_V(set1)(c3), MOE_V(set1)(c1)));
  MOE_V(f) dz = MOE_V(fma)(u, MOE_V(set1)(3.0f * c3), MOE_V(set1)(c1));
  return MOE_K(sigmoid_unit)(x, z, dz);
}

/* a*tanh(x/a)*s(x) */
MOE_INLINE MOE_K(act) MOE_K(situ)(MOE_V(f) x, MOE_V(f) a) {
  MOE_V(f) t, slope, s, c;
  MOE_K(act) r;
  MOE_K(tanh)(MOE_V(div)(x, a), &t, &slope);
  MOE_K(sigmoid)(x, &s, &c);
  t = MOE_V(mul)(a, t);
  r.f = MOE_V(mul)(t, s);
  r.df = MOE_V(fma)(t, MOE_V(mul)(s, c), MOE_V(mul)(slope, s));
  return r;
}

MOE_INLINE MOE_K(act) MOE_K(gelu)(MOE_V(f) x) {
  MOE_V(f) cdf, pdf, b = MOE_V(max)(MOE_V(set1)(-20.0f), MOE_V(min)(MOE_V(set1)(20.0f), x));
  MOE_K(act) r;
  MOE_K(normal)(x, &cdf, &pdf);
  r.f = MOE_V(mul)(x, cdf);
  r.df = MOE_V(fma)(b, pdf, cdf);
  return r;
}

MOE_INLINE MOE_K(act) MOE_K(relu)(MOE_V(f) x, int squared) {
  MOE_V(f) zero = MOE_V(set1)(0.0f), positive = MOE_V(max)(zero, x);
  MOE_K(act) r;
  r.f = squared ? MOE_V(mul)(positive, positive) : positive;
  r.df = squared ? MOE_V(add)(positive, positive)
                 : MOE_V(select)(MOE_V(lt)(zero, x), MOE_V(set1)(1.0f), MOE_V(mul)(zero, positive));
  return r;
}

MOE_FN MOE_K(act) MOE_K(activation)(moe_activation kind, float alpha, MOE_V(f) x) {
  MOE_V(f) a = MOE_V(set1)(alpha);
  MOE_K(act) r;
  switch (kind) {
    case MOE_ACT_SILU:
    case MOE_ACT_SWISH: return MOE_K(sigmoid_unit)(x, MOE_V(mul)(a, x), a);
    case MOE_ACT_GELU: return MOE_K(gelu)(x);
    case MOE_ACT_GELU_TANH: return MOE_K(gelu_tanh)(x);
    case MOE_ACT_RELU: return MOE_K(relu)(x, 0);
    case MOE_ACT_SQUARED_RELU: return MOE_K(relu)(x, 1);
    case MOE_ACT_SITU: return MOE_K(situ)(x, a);
    case MOE_ACT_IDENTITY:
    case MOE_ACT_COUNT_: break;
  }
  r.f = x;
  r.df = MOE_V(set1)(1.0f);
  return r;
}

/* The activation of rows of at most 64 x, with stride 64. f and df are written in whole vectors, as if zeros followed
   x. f is multiplied by up + offset, unless up is NULL. df may be NULL. */
MOE_FN void MOE_K(activation_rows)(moe_activation kind, const moe_glu_ *glu, const float *x, const float *up,
                                             int64_t rows, int64_t n, float *f, float *df) {
  const MOE_V(f) offset = MOE_V(set1)(glu->up_offset);
  for (int64_t i = 0; i < n; i += MOE_W) {
    const int64_t left = moe_min_(n - i, MOE_W);
    for (int64_t at = i; at < rows * MOE_NR; at += MOE_NR) {
      MOE_K(act) a = MOE_K(activation)(kind, glu->alpha, MOE_V(loadn)(x + at, left));
      if (glu->clamp & MOE_CLAMP_ACTIVATION_UPPER) {
        const MOE_V(f) upper = MOE_V(set1)(glu->activation_upper);
        a.df = MOE_V(select)(MOE_V(lt)(a.f, upper), a.df, MOE_V(set1)(0.0f));
        a.f = MOE_V(min)(upper, a.f);
      }
      if (up) a.f = MOE_V(mul)(a.f, MOE_V(add)(MOE_V(load)(up + at), offset));
      MOE_V(store)(f + at, a.f);
      if (df) MOE_V(store)(df + at, a.df);
    }
  }
}

/* Not inlined: it is long. It takes several rows at a time, as operations on one row wait for each other. */
MOE_FN __attribute__((noinline)) void MOE_K(activations)(const moe_glu_ *glu, const float *x, const float *up,
                                                         int64_t rows, int64_t n, float *f, float *df) {
  switch (glu->activation) {
#define MOE_ACTIVATION_ROWS_(name, NAME) \
  case MOE_ACT_##NAME: MOE_K(activation_rows)(MOE_ACT_##NAME, glu, x, up, rows, n, f, df); break;
    MOE_ACTIVATION_LIST(MOE_ACTIVATION_ROWS_)
#undef MOE_ACTIVATION_ROWS_
    case MOE_ACT_COUNT_: break;
  }
}
