/* The reference in double: names end in _f64. */
#ifndef REFERENCE_REAL_H
#define REFERENCE_REAL_H

#include "reference/blocks.h"

#define REF_PI 3.14159265358979323846

#define REAL double
#define REF(name) name##_f64
#define REF_PART(x) (x)
#define REF_EXP exp
#define REF_LOG log
#define REF_LOG1P log1p
#define REF_SQRT sqrt
#define REF_TANH tanh
#define REF_ERF erf
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

#endif /* REFERENCE_REAL_H */
