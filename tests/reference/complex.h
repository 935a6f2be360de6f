/* The reference over the complex numbers, for derivatives by complex step: f'(x) = Im f(x + ih) / h. Names end in
   _c64. */
#ifndef REFERENCE_COMPLEX_H
#define REFERENCE_COMPLEX_H

#include <complex.h>
#undef I /* a size of the layer */
#include <string.h>

#include "reference/real.h"

static inline double complex ref_complex(double real, double imaginary) { /* CMPLX, which not every compiler has */
  const double parts[2] = {real, imaginary};
  double complex z;
  memcpy(&z, parts, sizeof z);
  return z;
}

/* These two are exact for an infinitesimal imaginary part, which is all they are used with. */
static inline double complex ref_erf_c64(double complex z) {
  double x = creal(z);
  return ref_complex(erf(x), cimag(z) * 2 / sqrt(REF_PI) * exp(-x * x));
}
static inline double complex ref_log1p_c64(double complex z) {
  return ref_complex(log1p(creal(z)), cimag(z) / (1 + creal(z)));
}

#define REAL double complex
#define REF(name) name##_c64
#define REF_PART creal
#define REF_EXP cexp
#define REF_LOG clog
#define REF_LOG1P ref_log1p_c64
#define REF_SQRT csqrt
#define REF_TANH ctanh
#define REF_ERF ref_erf_c64
#include "reference/activation.inl"
#include "reference/layer.inl"
#include "reference/router.inl"
#undef REAL
#undef REF
#undef REF_PART
#undef REF_EXP
#undef REF_LOG
#undef REF_LOG1P
#undef REF_SQRT
#undef REF_TANH
#undef REF_ERF

#endif /* REFERENCE_COMPLEX_H */
