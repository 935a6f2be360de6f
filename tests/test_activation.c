/* test_activation: contract 6. Every activation and derivative on a dense sample of all floats against double precision
   libm, whose own error (an ulp of a double, 2^-52) is nothing beside the bound (8 * 2^-24); every instruction set
   gives the same bits as the scalar one on every float tried, NaN and infinity included. MOE_TEST_LONG=1 tries all. */
#include "support/test.h"

#include <math.h>

enum { CHUNK = 1 << 12 };

struct exact {
  double f, df;
};

/* x*s(z), z' = dz */
static struct exact sigmoid_unit(double x, double z, double dz) {
  double s = 1.0 / (1.0 + exp(-z)), complement = 1.0 / (1.0 + exp(z));
  return (struct exact){x * s, s + x * dz * (s * complement)};
}

static struct exact exact_silu(double x, double alpha) { return sigmoid_unit(x, alpha * x, alpha); }

static struct exact exact_gelu(double x, double alpha) {
  (void)alpha;
  double cdf = 0.5 * erfc(-x / sqrt(2.0)), pdf = exp(-0.5 * x * x) / sqrt(2.0 * acos(-1.0));
  return (struct exact){x * cdf, cdf + x * pdf};
}

/* (1+tanh v)/2 = s(2v) */
static struct exact exact_gelu_tanh(double x, double alpha) {
  (void)alpha;
  double c = sqrt(2.0 / acos(-1.0));
  return sigmoid_unit(x, 2.0 * c * (x + 0.044715 * x * x * x), 2.0 * c * (1.0 + 3.0 * 0.044715 * x * x));
}

static struct exact exact_relu(double x, double alpha) {
  (void)alpha;
  return x > 0.0 ? (struct exact){x, 1.0} : (struct exact){0.0, 0.0};
}

static struct exact exact_squared_relu(double x, double alpha) {
  (void)alpha;
  return x > 0.0 ? (struct exact){x * x, 2.0 * x} : (struct exact){0.0, 0.0};
}

static struct exact exact_identity(double x, double alpha) {
  (void)alpha;
  return (struct exact){x, 1.0};
}

static struct exact exact_situ(double x, double alpha) {
  const double t = tanh(x / alpha), s = 1 / (1 + exp(-x)), e = exp(-2 * fabs(x / alpha));
  return (struct exact){alpha * t * s, 4 * e / (1 + e) / (1 + e) * s + alpha * t * s / (1 + exp(x))};
}

struct activation_case {
  const char *name;
  moe_activation activation;
  float alpha, effective_alpha;
  struct exact (*exact)(double x, double alpha);
  int correctly_rounded; /* instead of within the bound */
};

static struct activation_case cases[] = {
    {"silu", MOE_ACT_SILU, 0.0f, 1.0f, exact_silu, 0},
    {"silu alpha=1.25", MOE_ACT_SILU, 1.25f, 1.25f, exact_silu, 0},
    {"gelu", MOE_ACT_GELU, 0.0f, 0.0f, exact_gelu, 0},
    {"gelu_tanh", MOE_ACT_GELU_TANH, 0.0f, 0.0f, exact_gelu_tanh, 0},
    {"swish", MOE_ACT_SWISH, 0.0f, 1.702f, exact_silu, 0},
    {"relu", MOE_ACT_RELU, 0.0f, 0.0f, exact_relu, 1},
    {"squared_relu", MOE_ACT_SQUARED_RELU, 0.0f, 0.0f, exact_squared_relu, 1},
    {"identity", MOE_ACT_IDENTITY, 0.0f, 0.0f, exact_identity, 1},
    {"situ", MOE_ACT_SITU, 0.0f, 4.0f, exact_situ, 0},
    {"situ alpha=1.3", MOE_ACT_SITU, 1.3f, 1.3f, exact_situ, 0},
};

struct worst {
  double f, df; /* largest error in units of 2^-24 (times |x| for f) */
};

static uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static int is_nan_bits(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

static void fail_at(const struct activation_case *c, float x, const char *what, float value, double wanted) {
  fail_msg("%s %s: %a instead of %a\nrepro: activation=%d alpha=%a x=%a (0x%08x) isa=scalar", c->name, what,
           (double)value, wanted, (int)c->activation, (double)c->alpha, (double)x, (unsigned)bits_of(x));
}

/* The scalar results y, dy at x against the exact ones. */
static void check_value(const struct activation_case *c, float x, float y, float dy, struct worst *worst) {
  if (is_nan_bits(bits_of(x))) {
    if (bits_of(y) != 0x7fc00000u) fail_at(c, x, "of NaN is not the canonical NaN", y, (double)x);
    if (is_nan_bits(bits_of(dy)) && bits_of(dy) != 0x7fc00000u) fail_at(c, x, "' of NaN is another NaN", dy, (double)x);
    return;
  }
  if (fabs((double)x) > 0x1p60) return;
  struct exact e = c->exact((double)x, (double)c->effective_alpha);
  if (c->correctly_rounded) {
    if (y != (float)e.f) fail_at(c, x, "is not correctly rounded", y, e.f);
    if (dy != (float)e.df) fail_at(c, x, "' is not correctly rounded", dy, e.df);
    return;
  }
  double unit = 0x1p-24 * fabs((double)x), error = fabs((double)y - e.f), slope_error = fabs((double)dy - e.df);
  if (!(error <= MOE_ACT_ERROR * unit + 0x1p-140)) fail_at(c, x, "is out of bounds", y, e.f);
  if (!(slope_error <= MOE_ACT_GRAD_ERROR * 0x1p-24)) fail_at(c, x, "' is out of bounds", dy, e.df);
  if (unit > 0x1p-100 && error / unit > worst->f) worst->f = error / unit;
  if (slope_error * 0x1p24 > worst->df) worst->df = slope_error * 0x1p24;
}

/* CHUNK floats with bits first, first+stride, ... on every instruction set. */
static void check_chunk(const struct activation_case *c, uint32_t first, uint32_t stride, struct worst *worst) {
  static float x[CHUNK], reference[2][CHUNK], actual[2][CHUNK];
  for (uint32_t i = 0; i < CHUNK; i++) {
    uint32_t bits = first + i * stride;
    memcpy(&x[i], &bits, sizeof bits);
  }
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!test_use_isa(isa)) continue;
    float(*result)[CHUNK] = isa == MOE_ISA_SCALAR ? reference : actual;
    assert_int_equal(moe_activation_f32(NULL, c->activation, c->alpha, x, result[0], result[1], CHUNK), MOE_OK);
    if (isa == MOE_ISA_SCALAR) {
      for (int i = 0; i < CHUNK; i++) check_value(c, x[i], reference[0][i], reference[1][i], worst);
    } else if (memcmp(actual, reference, sizeof actual) != 0) {
      for (int i = 0; i < 2 * CHUNK; i++)
        if (memcmp(&actual[i / CHUNK][i % CHUNK], &reference[i / CHUNK][i % CHUNK], sizeof(float)) != 0)
          fail_msg("%s%s differs from scalar\nrepro: activation=%d alpha=%a x bits 0x%08x isa=%s", c->name,
                   i < CHUNK ? "" : "'", (int)c->activation, (double)c->alpha, (unsigned)bits_of(x[i % CHUNK]),
                   moe_isa_name((moe_isa)isa));
    }
  }
  test_use_best_isa();
}

static void test_activation(void **state) {
  const struct activation_case *c = *state;
  static const float centre[] = {0.0f,  0x1p-126f, 0x1p-40f, 0x1p-12f, 0.1f,   0.5f,   0.6931f, 1.0f,    1.702f,  2.0f,
                                 3.0f,  4.0f,      5.0f,     8.0f,     10.0f,  13.0f,  14.4f,   16.0f,   20.0f,   51.0f,
                                 61.1f, 87.3f,     88.7f,    89.0f,    103.9f, 104.0f, 1000.0f, 0x1p60f, 0x1p127f};
  struct worst worst = {0, 0};
  uint32_t stride = getenv("MOE_TEST_LONG") ? 1 : (uint32_t)test_cases(257, 65537);
  uint64_t span = (uint64_t)CHUNK * stride;
  for (uint64_t first = 0; first < UINT64_C(1) << 32; first += span) check_chunk(c, (uint32_t)first, stride, &worst);
  for (size_t i = 0; i < sizeof centre / sizeof *centre; i++) {
    for (int chunk = -4; chunk < 4; chunk++) {
      uint32_t first = bits_of(centre[i]) + (uint32_t)(chunk * CHUNK);
      check_chunk(c, first & 0x7fffffffu, 1, &worst);
      check_chunk(c, first | 0x80000000u, 1, &worst);
    }
  }
  if (!c->correctly_rounded)
    print_message("%s: worst error %.3f (allowed %d), derivative %.3f (allowed %d)\n", c->name, worst.f, MOE_ACT_ERROR,
                  worst.df, MOE_ACT_GRAD_ERROR);
}

/* y or dy may be NULL, lengths need not be a multiple of anything, and nothing is written past n. */
static void test_either_output_and_tails(void **state) {
  (void)state;
  enum { MOST = 70 };
  float x[MOST], both[2][MOST], y[MOST], dy[MOST];
  for (int i = 0; i < MOST; i++) x[i] = (float)(i - 30) * 0.17f;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!test_use_isa(isa)) continue;
    for (int kind = 0; kind < MOE_ACT_COUNT_; kind++) {
      moe_activation activation = (moe_activation)kind;
      assert_int_equal(moe_activation_f32(NULL, activation, 0.0f, x, both[0], both[1], MOST), MOE_OK);
      for (int n = 0; n < MOST; n++) {
        memset(y, 0x5a, sizeof y);
        memset(dy, 0x5a, sizeof dy);
        assert_int_equal(moe_activation_f32(NULL, activation, 0.0f, x, y, NULL, n), MOE_OK);
        assert_int_equal(moe_activation_f32(NULL, activation, 0.0f, x, NULL, dy, n), MOE_OK);
        assert_memory_equal(y, both[0], (size_t)n * sizeof *y);
        assert_memory_equal(dy, both[1], (size_t)n * sizeof *dy);
        for (int i = n; i < MOST; i++) assert_true(bits_of(y[i]) == 0x5a5a5a5au && bits_of(dy[i]) == 0x5a5a5a5au);
      }
    }
  }
  test_use_best_isa();
}

int main(void) {
  enum { CASES = sizeof cases / sizeof *cases };
  struct CMUnitTest tests[CASES + 1] = {cmocka_unit_test(test_either_output_and_tails)};
  for (int i = 0; i < CASES; i++)
    tests[i + 1] = (struct CMUnitTest){cases[i].name, test_activation, NULL, NULL, &cases[i]};
  return cmocka_run_group_tests_name("activation", tests, NULL, NULL);
}
