/* exp and related functions, with the same operations on every instruction set. The polynomials are minimax fits of our
   own. MOE_FN: inlined into loops of vectors, but called where a vector is one element, which compiles faster. */

/* e^x. x = n*ln2 + r, |r| <= ln2/2; e^r = 1 + r + r^2*q(r). */
MOE_FN MOE_V(f) MOE_K(exp)(MOE_V(f) x) {
  const float magic = 0x1.8p23f;
  x = MOE_V(max)(MOE_V(set1)(-104.0f), MOE_V(min)(MOE_V(set1)(89.0f), x));
  MOE_V(f) shifted = MOE_V(fma)(x, MOE_V(set1)(0x1.715476p+0f), MOE_V(set1)(magic));
  MOE_V(f) n = MOE_V(sub)(shifted, MOE_V(set1)(magic));
  MOE_V(f) r = MOE_V(fma)(n, MOE_V(set1)(-0x1.62e4p-1f), x);
  r = MOE_V(fma)(n, MOE_V(set1)(-0x1.7f7d1cp-20f), r);
  MOE_V(f) q = MOE_V(set1)(0x1.9f05bap-13f);
  q = MOE_V(fma)(q, r, MOE_V(set1)(0x1.6d90a6p-10f));
  q = MOE_V(fma)(q, r, MOE_V(set1)(0x1.111278p-7f));
  q = MOE_V(fma)(q, r, MOE_V(set1)(0x1.55548ap-5f));
  q = MOE_V(fma)(q, r, MOE_V(set1)(0x1.555554p-3f));
  q = MOE_V(fma)(q, r, MOE_V(set1)(0.5f));
  MOE_V(f) p = MOE_V(add)(MOE_V(fma)(MOE_V(mul)(r, r), q, r), MOE_V(set1)(1.0f));
  return MOE_V(scalef)(p, n);
}

/* |x| */
MOE_INLINE MOE_V(f) MOE_K(abs)(MOE_V(f) x) {
  return MOE_V(castf)(MOE_V(andi)(MOE_V(casti)(x), MOE_V(set1i)(0x7fffffffu)));
}

/* -|x| */
MOE_INLINE MOE_V(f) MOE_K(minus_abs)(MOE_V(f) x) {
  return MOE_V(castf)(MOE_V(ori)(MOE_V(casti)(x), MOE_V(set1i)(0x80000000u)));
}

/* s = 1/(1+e^-z) and its complement 1-s, both without cancellation. */
MOE_FN void MOE_K(sigmoid)(MOE_V(f) z, MOE_V(f) * s, MOE_V(f) * complement) {
  MOE_V(f) e = MOE_K(exp)(MOE_K(minus_abs)(z)), one = MOE_V(set1)(1.0f);
  MOE_V(f) greater = MOE_V(div)(one, MOE_V(add)(one, e)), lesser = MOE_V(mul)(e, greater);
  MOE_V(m) negative = MOE_V(lt)(z, MOE_V(set1)(0.0f));
  *s = MOE_V(select)(negative, lesser, greater);
  *complement = MOE_V(select)(negative, greater, lesser);
}

/* The normal distribution: *cdf = (1+erf(x/sqrt 2))/2, *pdf = e^(-x^2/2)/sqrt(2 pi). With t = 1/(1+0.33|x|) the upper
   tail is e^(-x^2/2)*t*P(t); x^2 is split so that the exponential keeps its relative accuracy. */
MOE_FN void MOE_K(normal)(MOE_V(f) x, MOE_V(f) * cdf, MOE_V(f) * pdf) {
  MOE_V(f) one = MOE_V(set1)(1.0f), a = MOE_V(min)(MOE_V(set1)(20.0f), MOE_K(abs)(x));
  MOE_V(f) square = MOE_V(mul)(a, a), low = MOE_V(fma)(a, a, MOE_V(sub)(MOE_V(set1)(0.0f), square));
  MOE_V(f) e = MOE_K(exp)(MOE_V(mul)(square, MOE_V(set1)(-0.5f)));
  e = MOE_V(fma)(MOE_V(mul)(low, MOE_V(set1)(-0.5f)), e, e);
  MOE_V(f) t = MOE_V(div)(one, MOE_V(fma)(a, MOE_V(set1)(0.33f), one));
  static const float coefficient[11] = {0x1.277e86p-6f, -0x1.d506fep-4f, 0x1.2e4fcap-2f, -0x1.80417ap-2f,
                                        0x1.d4be00p-3f, -0x1.9af214p-4f, 0x1.5c22d6p-4f, 0x1.4da1e0p-4f,
                                        0x1.e46da8p-4f, 0x1.0d789ap-3f,  0x1.0da04ep-3f};
  MOE_V(f) p = MOE_V(set1)(coefficient[0]);
  MOE_UNROLL
  for (int i = 1; i < 11; i++) p = MOE_V(fma)(p, t, MOE_V(set1)(coefficient[i]));
  MOE_V(f) tail = MOE_V(mul)(MOE_V(mul)(p, t), e);
  *cdf = MOE_V(select)(MOE_V(lt)(x, MOE_V(set1)(0.0f)), tail, MOE_V(sub)(one, tail));
  *pdf = MOE_V(mul)(e, MOE_V(set1)(0x1.988454p-2f));
}

/* log(1+y) for 0 <= y <= 1: with s = y/(2+y), 2s + s^3*P(s^2). */
MOE_FN MOE_V(f) MOE_K(log1p)(MOE_V(f) y) {
  MOE_V(f) s = MOE_V(div)(y, MOE_V(add)(MOE_V(set1)(2.0f), y)), u = MOE_V(mul)(s, s);
  MOE_V(f) p = MOE_V(set1)(0x1.f1af3ap-3f);
  p = MOE_V(fma)(p, u, MOE_V(set1)(0x1.b6d68ep-3f));
  p = MOE_V(fma)(p, u, MOE_V(set1)(0x1.250974p-2f));
  p = MOE_V(fma)(p, u, MOE_V(set1)(0x1.9996a8p-2f));
  p = MOE_V(fma)(p, u, MOE_V(set1)(0x1.555558p-1f));
  return MOE_V(fma)(MOE_V(mul)(p, u), s, MOE_V(add)(s, s));
}

/* tanh v and its derivative 4e/(1+e)^2, with e = e^(-2|v|): v + v^3*P(v^2) near 0, else (1-e)/(1+e). */
MOE_FN void MOE_K(tanh)(MOE_V(f) v, MOE_V(f) * t, MOE_V(f) * slope) {
  MOE_V(f) one = MOE_V(set1)(1.0f), a = MOE_K(abs)(v), u = MOE_V(mul)(v, v);
  MOE_V(f) e = MOE_K(exp)(MOE_V(mul)(a, MOE_V(set1)(-2.0f))), d = MOE_V(div)(one, MOE_V(add)(one, e));
  MOE_V(f) p = MOE_V(set1)(-0x1.8c2d0ap-8f);
  p = MOE_V(fma)(p, u, MOE_V(set1)(0x1.576e3p-6f));
  p = MOE_V(fma)(p, u, MOE_V(set1)(-0x1.b91582p-5f));
  p = MOE_V(fma)(p, u, MOE_V(set1)(0x1.110dd8p-3f));
  p = MOE_V(fma)(p, u, MOE_V(set1)(-0x1.555552p-2f));
  const MOE_V(f) inner = MOE_V(fma)(MOE_V(mul)(v, u), p, v), outer = MOE_V(mul)(MOE_V(sub)(one, e), d);
  const MOE_V(i) sign = MOE_V(andi)(MOE_V(casti)(v), MOE_V(set1i)(0x80000000u));
  *t = MOE_V(select)(MOE_V(lt)(a, MOE_V(set1)(0.625f)), inner, MOE_V(castf)(MOE_V(ori)(MOE_V(casti)(outer), sign)));
  *slope = MOE_V(mul)(MOE_V(mul)(MOE_V(set1)(4.0f), MOE_V(mul)(e, d)), d);
}

/* Continues the chains of a dot product (numeric contract 4) at column i. Zeros after the last column change nothing:
   chains begin at +0. */
MOE_INLINE void MOE_K(chain)(float *chains, int64_t i, MOE_V(f) a, MOE_V(f) b) {
  float *chain = chains + i % MOE_DOT_CHAINS;
  MOE_V(store)(chain, MOE_V(fma)(a, b, MOE_V(load)(chain)));
}
