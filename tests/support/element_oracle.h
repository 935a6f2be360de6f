/* element_oracle.h: the narrow element formats by their definitions, one for each entry of MOE_ELEMENT_LIST: a code is
   an integer fraction times a power of two, in double, and a float's code is found by bisection between midpoints.
   Shares no code and no constants with the library. */
#ifndef MOE_TEST_ELEMENT_ORACLE_H
#define MOE_TEST_ELEMENT_ORACLE_H

#include <math.h>

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

struct element {
  const char *name;
  moe_element id;
  int bits, fraction_bits, least; /* least: log2 of the smallest subnormal */
  int last, inf, nan;             /* codes; inf, nan < 0: there is none */
  double largest;                 /* of code `last` */
  moe_status (*from_f32)(moe_context *, uint8_t *, const float *, int64_t, uint32_t);
  moe_status (*to_f32)(moe_context *, float *, const uint8_t *, int64_t);
};

#define ELEMENT_ONE_(...) +1
enum { ELEMENTS = 0 MOE_ELEMENT_LIST(ELEMENT_ONE_) };
static const struct element elements[] = {
    {"e4m3fn", MOE_ELEMENT_E4M3FN, 8, 3, -9, 0x7e, -1, 0x7f, 448, moe_e4m3fn_from_f32, moe_e4m3fn_to_f32},
    {"e4m3", MOE_ELEMENT_E4M3, 8, 3, -9, 0x77, 0x78, 0x7c, 240, moe_e4m3_from_f32, moe_e4m3_to_f32},
    {"e5m2", MOE_ELEMENT_E5M2, 8, 2, -16, 0x7b, 0x7c, 0x7e, 57344, moe_e5m2_from_f32, moe_e5m2_to_f32},
    {"e2m1", MOE_ELEMENT_E2M1, 4, 1, -1, 7, -1, -1, 6, moe_e2m1_from_f32, moe_e2m1_to_f32},
    {"e4m3fnuz", MOE_ELEMENT_E4M3FNUZ, 8, 3, -10, 0x7f, -1, 0x80, 240, moe_e4m3fnuz_from_f32, moe_e4m3fnuz_to_f32},
    {"e5m2fnuz", MOE_ELEMENT_E5M2FNUZ, 8, 2, -17, 0x7f, -1, 0x80, 57344, moe_e5m2fnuz_from_f32, moe_e5m2fnuz_to_f32},
    {"e2m3", MOE_ELEMENT_E2M3, 6, 3, -3, 0x1f, -1, -1, 7.5, moe_e2m3_from_f32, moe_e2m3_to_f32},
    {"e3m2", MOE_ELEMENT_E3M2, 6, 2, -4, 0x1f, -1, -1, 28, moe_e3m2_from_f32, moe_e3m2_to_f32},
};
_Static_assert(sizeof elements / sizeof *elements == ELEMENTS, "an element has no row here");

/* Integers. Their codes here are of sign and magnitude, all subnormal. */
static const struct element integers[] = {
    {"mxint8", MOE_ELEMENT_MXINT8, 8, 7, -6, 127, -1, -1, 127.0 / 64, NULL, NULL},
    {"int8", MOE_ELEMENT_INT8, 8, 7, 0, 127, -1, -1, 127, NULL, NULL},
    {"int4", MOE_ELEMENT_INT4, 4, 7, 0, 15, -1, -1, 7, NULL, NULL},
    {"uint4", MOE_ELEMENT_UINT4, 4, 7, 0, 15, -1, -1, 7, NULL, NULL},
};
enum { INTEGERS = sizeof integers / sizeof *integers };
static inline const struct element *element_of(moe_element id) {
  return (int)id < ELEMENTS ? &elements[id] : &integers[(int)id - ELEMENTS];
}

/* A stored code's number; `zero`: of UINT4 the code of 0. */
static inline double integer_value(const struct element *f, int code, int zero) {
  const int half = 1 << (f->bits - 1), twos = code < half ? code : code - 2 * half;
  if (f->id == MOE_ELEMENT_UINT4) return code - zero;
  return f->id == MOE_ELEMENT_MXINT8 ? twos / 64.0 : twos;
}

/* The i-th of 8 bits, in a circle. */
static inline moe_element element_wide(int64_t i) {
  for (int64_t e = 0;; e++)
    if (elements[e % ELEMENTS].bits == 8 && i-- == 0) return (moe_element)(e % ELEMENTS);
}
static inline int64_t element_wides(void) {
  int64_t n = 0;
  for (int e = 0; e < ELEMENTS; e++) n += elements[e].bits == 8;
  return n;
}

/* In a list of tests: the same one for every element, which *state points to. */
#define TEST_OF_ELEMENT(test, NAME) \
  { #test " " #NAME, test, NULL, NULL, (void *)(uintptr_t)&elements[MOE_ELEMENT_##NAME] }
#define EACH_ELEMENT(test)                                                                           \
  TEST_OF_ELEMENT(test, E4M3FN), TEST_OF_ELEMENT(test, E4M3), TEST_OF_ELEMENT(test, E5M2),           \
      TEST_OF_ELEMENT(test, E2M1), TEST_OF_ELEMENT(test, E4M3FNUZ), TEST_OF_ELEMENT(test, E5M2FNUZ), \
      TEST_OF_ELEMENT(test, E2M3), TEST_OF_ELEMENT(test, E3M2)

/* The value of a code without sign, as if the format went on beyond its last number. */
static inline double element_value(const struct element *f, int code) {
  int exponent = code >> f->fraction_bits, fraction = code & ((1 << f->fraction_bits) - 1);
  return exponent == 0 ? ldexp(fraction, f->least) : ldexp(fraction + (1 << f->fraction_bits), f->least + exponent - 1);
}

/* The step that x >= 0 reaches, last + 1 for overflow: rounding is monotone, a staircase with its steps at
   midpoints. */
static inline int element_step(const struct element *f, double x, uint32_t cast) {
  int low = 0, high = f->last + 1;
  while (low < high) {
    int middle = (low + high) / 2;
    double midpoint = 0.5 * (element_value(f, middle) + element_value(f, middle + 1));
    if (x > midpoint ||
        (x == midpoint && !(cast & MOE_CAST_HALF_TO_ZERO) && (cast & MOE_CAST_HALF_AWAY || (middle & 1))))
      low = middle + 1;
    else high = middle;
  }
  return low;
}

static inline int element_overflow(const struct element *f, int negative, int saturate) {
  int sign = negative << (f->bits - 1);
  if (saturate || f->nan < 0) return sign | f->last;
  return f->inf >= 0 ? sign | f->inf : f->nan;
}

/* The code of a number. */
static inline int element_of_number(const struct element *f, int negative, double magnitude, uint32_t cast) {
  int step = element_step(f, magnitude, cast);
  if (step == 0 && (cast & MOE_CAST_HALF_TO_ZERO || f->nan == 0x80)) return 0;
  return step > f->last ? element_overflow(f, negative, (cast & MOE_CAST_SATURATE) != 0)
                        : step | negative << (f->bits - 1);
}

/* The code of a float, by its bits. */
static inline int element_code(const struct element *f, uint32_t bits, uint32_t cast) {
  uint32_t magnitude = bits & 0x7fffffffu;
  int negative = (int)(bits >> 31), saturate = (cast & MOE_CAST_SATURATE) != 0;
  if (magnitude > 0x7f800000u) return f->nan < 0 ? 0 : f->nan;
  if (magnitude == 0x7f800000u) return element_overflow(f, negative, saturate);
  return element_of_number(f, negative, (double)float_of(magnitude), cast);
}

/* The bits of a code's float. */
static inline uint32_t element_decoded(const struct element *f, int code) {
  if ((int)f->id >= ELEMENTS) return bits_of((float)integer_value(f, code, 8));
  int negative = code >> (f->bits - 1), magnitude = code & ((1 << (f->bits - 1)) - 1);
  if (magnitude == f->inf) return (uint32_t)negative << 31 | 0x7f800000u;
  if (magnitude > f->last || code == f->nan) return 0x7fc00000u;
  return bits_of((float)element_value(f, magnitude)) | (uint32_t)negative << 31;
}

/* Codes where they lie: one per byte, or two, the even one low, or four in three bytes, bit after bit. Codes are put in
   order. */
static inline int64_t element_bytes(const struct element *f, int64_t n) { return (n * f->bits + 7) / 8; }

static inline int element_get(const struct element *f, const uint8_t *codes, int64_t i) {
  int code = 0;
  if (f->bits != 6) return f->bits == 8 ? codes[i] : codes[i / 2] >> (i % 2 * 4) & 15;
  for (int64_t b = 0; b < 6; b++) code |= (codes[(6 * i + b) / 8] >> ((6 * i + b) % 8) & 1) << b;
  return code;
}

static inline void element_put(const struct element *f, uint8_t *codes, int64_t i, int code) {
  if (f->bits == 8) codes[i] = (uint8_t)code;
  else if (f->bits == 4) codes[i / 2] = (uint8_t)(i % 2 ? codes[i / 2] | code << 4 : code);
  else
    for (int64_t b = 0; b < 6; b++) {
      uint8_t *at = codes + (6 * i + b) / 8;
      const int64_t bit = (6 * i + b) % 8;
      if (bit == 0) *at = 0;
      *at = (uint8_t)(*at | (code >> b & 1) << bit);
    }
}

#endif
