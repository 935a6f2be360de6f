/* test_convert: contract 5 over every input. All 2^32 floats to bf16 and to fp16 and all 65536 codes back, on every
   instruction set of this CPU, with 0 differences against an oracle that shares no code and no idea with the library:

   Codes are decoded by their definition (integer fraction times a power of two, in double). Rounding is monotone, so
   walking the floats upwards the result is a staircase: the code steps up where the float passes the exact midpoint, in
   double, between two neighbouring decoded codes, or meets it and the lower code is odd. The staircase itself is held
   against MPFR (where it is installed) on every 1021st float.

   The range is split over two processes. MOE_TEST_QUICK=1 takes every 257th chunk. */
#include "support/test.h"

#include <math.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef HAVE_MPFR
#include <mpfr.h>
#endif

struct format {
  const char *name;
  int fraction_bits, exponent_bits;
  uint16_t nan;
  moe_status (*from_f32)(moe_context *, uint16_t *, const float *, int64_t);
  moe_status (*to_f32)(moe_context *, float *, const uint16_t *, int64_t);
};

/* Of every element type of 16 bits. */
static const struct format bf16 = {"bf16", 7, 8, 0x7fc0, moe_bf16_from_f32, moe_bf16_to_f32};
static const struct format fp16 = {"fp16", 10, 5, 0x7e00, moe_fp16_from_f32, moe_fp16_to_f32};
static const struct format *const formats[] = {
    &bf16,
    &fp16,
};
enum { FORMATS = sizeof formats / sizeof *formats };
_Static_assert(FORMATS == TEST_DTYPES - 1, "an element type is missing");

enum { CHUNK = 1 << 16, CHUNKS = 1 << 16 };

/* ---------------------------------------------------------------------------------------------------------- oracle */

static uint16_t infinity_code(const struct format *f) {
  return (uint16_t)(((1u << f->exponent_bits) - 1u) << f->fraction_bits);
}

/* The value of a code without sign; infinity's code counts as the next number of a format without end, which is where
   rounding overflows. */
static double decode_magnitude(const struct format *f, uint16_t code) {
  int exponent = code >> f->fraction_bits, fraction = code & ((1 << f->fraction_bits) - 1);
  int least = 2 - (1 << (f->exponent_bits - 1)) - f->fraction_bits;
  return exponent == 0 ? ldexp(fraction, least) : ldexp(fraction + (1 << f->fraction_bits), least + exponent - 1);
}

static double midpoint_above(const struct format *f, uint16_t code) {
  return 0.5 * (decode_magnitude(f, code) + decode_magnitude(f, (uint16_t)(code + 1)));
}

static int rounds_up(double x, double midpoint, uint16_t code) { return x > midpoint || (x == midpoint && (code & 1)); }

/* The largest code that x reaches, by bisection: the start of a walk. */
static uint16_t round_from_scratch(const struct format *f, double x) {
  uint16_t low = 0, high = infinity_code(f);
  while (low < high) {
    uint16_t middle = (uint16_t)((low + high) / 2);
    if (rounds_up(x, midpoint_above(f, middle), middle)) low = (uint16_t)(middle + 1);
    else high = middle;
  }
  return low;
}

static float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* The code of one float. */
static uint16_t oracle(const struct format *f, uint32_t bits) {
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return f->nan;
  uint16_t code = magnitude == 0x7f800000u ? infinity_code(f) : round_from_scratch(f, (double)float_of(magnitude));
  return (uint16_t)(bits >> 31 << 15) | code;
}

/* The codes of the CHUNK floats first, first+1, ... */
static void oracle_chunk(const struct format *f, uint32_t first, uint16_t *codes) {
  uint16_t sign = (uint16_t)(first >> 31 << 15);
  uint32_t magnitude = first & 0x7fffffffu;
  uint16_t last = infinity_code(f), code = last;
  double midpoint = 0;
  if (magnitude < 0x7f800000u) {
    code = round_from_scratch(f, (double)float_of(magnitude));
    midpoint = midpoint_above(f, code);
  }
  for (uint32_t i = 0; i < CHUNK; i++) {
    uint32_t bits = magnitude + i;
    if (bits > 0x7f800000u) {
      codes[i] = f->nan;
      continue;
    }
    if (bits == 0x7f800000u) code = last;
    while (code != last && rounds_up((double)float_of(bits), midpoint, code)) midpoint = midpoint_above(f, ++code);
    codes[i] = sign | code;
  }
}

/* ------------------------------------------------------------------------------------------------------- comparison */

struct tally {
  uint64_t compared[TEST_ISA_COUNT], wrong[TEST_ISA_COUNT];
  uint32_t example[TEST_ISA_COUNT];
};

/* Chunks start, start+2, ... of the whole range, every instruction set on each. */
static void compare_share(const struct format *f, int start, int step, struct tally *tally) {
  static uint16_t expected[CHUNK], actual[CHUNK];
  static float x[CHUNK];
  for (int64_t chunk = start; chunk < CHUNKS; chunk += step) {
    uint32_t first = (uint32_t)chunk * CHUNK;
    for (uint32_t i = 0; i < CHUNK; i++) {
      uint32_t bits = first + i;
      memcpy(&x[i], &bits, sizeof bits);
    }
    oracle_chunk(f, first, expected);
    for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
      if (!test_use_isa(isa)) continue;
      memset(actual, 0x5a, sizeof actual);
      if (f->from_f32(NULL, actual, x, CHUNK) != MOE_OK) tally->wrong[isa]++;
      tally->compared[isa] += CHUNK;
      if (memcmp(expected, actual, sizeof actual) == 0) continue;
      for (uint32_t i = 0; i < CHUNK; i++)
        if (expected[i] != actual[i] && tally->wrong[isa]++ == 0) tally->example[isa] = first + i;
    }
  }
}

static void report(const struct format *f, const struct tally *tally) {
  uint64_t wrong = 0;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!moe_isa_supported((moe_isa)isa)) continue;
    print_message("f32 to %s, %s: %llu compared, %llu wrong\n", f->name, moe_isa_name((moe_isa)isa),
                  (unsigned long long)tally->compared[isa], (unsigned long long)tally->wrong[isa]);
    if (tally->wrong[isa] != 0)
      print_message("repro: isa=%s dtype=%s float bits 0x%08x\n", moe_isa_name((moe_isa)isa), f->name,
                    (unsigned)tally->example[isa]);
    wrong += tally->wrong[isa];
  }
  assert_int_equal(wrong, 0);
}

static void test_from_every_float(void **state) {
  const struct format *f = (const struct format *)*state;
  int step = (int)test_cases(2, 2 * 257);
  struct tally *share = mmap(NULL, 2 * sizeof *share, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_true(share != MAP_FAILED);
  fflush(NULL);
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    compare_share(f, 1, step, &share[1]);
    _exit(0);
  }
  compare_share(f, step == 2 ? 0 : 256, step, &share[0]);
  int status = 1;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_int_equal(status, 0);
  struct tally sum = share[0];
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    sum.compared[isa] += share[1].compared[isa];
    if (sum.wrong[isa] == 0) sum.example[isa] = share[1].example[isa];
    sum.wrong[isa] += share[1].wrong[isa];
  }
  munmap(share, 2 * sizeof *share);
  test_use_best_isa();
  report(f, &sum);
}

/* Where the staircase steps: midpoints and the floats beside them, which is all that a monotone conversion can get
   wrong. */
static void test_every_step(void **state) {
  const struct format *f = (const struct format *)*state;
  enum { BESIDE = 3, STEPS = 2 * BESIDE << 15 };
  static float x[STEPS];
  static uint16_t actual[STEPS];
  int64_t n = 0;
  for (uint16_t code = 0; code < infinity_code(f); code++)
    for (int i = 0; i < 2 * BESIDE; i++) {
      const float midpoint = (float)midpoint_above(f, code);
      uint32_t bits;
      memcpy(&bits, &midpoint, sizeof bits);
      x[n++] = float_of((bits + (uint32_t)(i / 2) - 1) | (uint32_t)(i % 2) << 31);
    }
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!test_use_isa(isa)) continue;
    assert_int_equal(f->from_f32(NULL, actual, x, n), MOE_OK);
    for (int64_t i = 0; i < n; i++) {
      uint32_t bits;
      memcpy(&bits, &x[i], sizeof bits);
      if (actual[i] != oracle(f, bits))
        fail_msg("repro: isa=%s %s: 0x%04x of float bits 0x%08x", moe_isa_name((moe_isa)isa), f->name,
                 (unsigned)actual[i], (unsigned)bits);
    }
  }
  test_use_best_isa();
}

/* Every code of the format to float: exact, NaN canonical. */
static void test_every_code(void **state) {
  const struct format *f = (const struct format *)*state;
  static uint16_t codes[65536];
  static uint32_t actual[65536];
  for (uint32_t i = 0; i < 65536; i++) codes[i] = (uint16_t)i;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!test_use_isa(isa)) continue;
    assert_int_equal(f->to_f32(NULL, (float *)(void *)actual, codes, 65536), MOE_OK);
    for (uint32_t i = 0; i < 65536; i++) {
      uint16_t magnitude = (uint16_t)(i & 0x7fff);
      uint32_t expected = 0x7fc00000u;
      if (magnitude <= infinity_code(f)) {
        float value = magnitude == infinity_code(f) ? INFINITY : (float)decode_magnitude(f, magnitude);
        memcpy(&expected, &value, sizeof value);
        expected |= (i & 0x8000u) << 16;
      }
      if (actual[i] != expected)
        fail_msg("repro: isa=%s %s code 0x%04x: 0x%08x instead of 0x%08x", moe_isa_name((moe_isa)isa), f->name,
                 (unsigned)i, (unsigned)actual[i], (unsigned)expected);
    }
  }
  test_use_best_isa();
}

/* Every n up to 300, from every offset up to 16: tails are converted and nothing beyond n is written. f32 to f32 copies
   bits, but for NaN. */
static void check_tail(const float *source, int64_t offset, int64_t n) {
  static float copied[512];
  static uint16_t half[512];
  memset(copied, 0x5a, sizeof copied);
  memset(half, 0x5a, sizeof half);
  assert_int_equal(moe_f32_from_f32(NULL, copied + offset, source + offset, n), MOE_OK);
  assert_int_equal(moe_bf16_from_f32(NULL, half + offset, source + offset, n), MOE_OK);
  for (int64_t i = 0; i < 512; i++) {
    uint32_t bits, was;
    memcpy(&was, &source[i], sizeof was);
    memcpy(&bits, &copied[i], sizeof bits);
    int inside = i >= offset && i < offset + n, is_nan = (was & 0x7fffffffu) > 0x7f800000u;
    assert_int_equal(bits, !inside ? 0x5a5a5a5au : is_nan ? 0x7fc00000u : was);
    assert_int_equal(half[i], inside ? oracle(&bf16, was) : 0x5a5a);
  }
}

static void test_f32_and_tails(void **state) {
  (void)state;
  static float source[512];
  uint64_t seed = 5;
  for (int i = 0; i < 512; i++) {
    uint32_t bits = (uint32_t)(test_random(&seed) >> 32);
    if (i % 16 == 3) bits |= 0x7f800001u;
    memcpy(&source[i], &bits, sizeof bits);
  }
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (int64_t n = 0; n < 300 && test_use_isa(isa); n++) check_tail(source, n % 17, n);
  test_use_best_isa();
}

/* Arrays of several items, the last of which ends anywhere in its strands; from and to odd places. */
static void test_long(void **state) {
  (void)state;
  enum { ITEM = 65536, MOST = 3 * ITEM };
  static const int64_t lengths[] = {ITEM / 4 + 1, ITEM / 2 + 1023, ITEM - 1, ITEM + 3, 2 * ITEM + 3 * ITEM / 4 - 77};
  static float source[MOST], back[MOST + 8];
  static uint16_t half[MOST + 8];
  uint64_t seed = 6;
  for (int i = 0; i < MOST; i++) source[i] = (float)(int32_t)(test_random(&seed) >> 32) * 0x1p-20f;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (int i = 0; i < 5 && test_use_isa(isa); i++) {
      const int64_t n = lengths[i], at = 1 + i;
      memset(half, 0x5a, sizeof half), memset(back, 0x5a, sizeof back);
      assert_int_equal(moe_bf16_from_f32(NULL, half + at, source, n), MOE_OK);
      assert_int_equal(moe_bf16_to_f32(NULL, back + at, half + at, n), MOE_OK);
      for (int64_t j = 0; j < MOST + 8; j++) {
        const int inside = j >= at && j < at + n;
        uint32_t bits, was = 0;
        memcpy(&bits, back + j, 4);
        if (inside) memcpy(&was, source + j - at, 4);
        const uint16_t want = inside ? oracle(&bf16, was) : 0x5a5a;
        if (half[j] != want || bits != (inside ? (uint32_t)want << 16 : 0x5a5a5a5au))
          fail_msg("repro: isa=%s n=%lld: element %lld", moe_isa_name(moe_isa_active()), (long long)n,
                   (long long)(j - at));
      }
    }
  test_use_best_isa();
}

#ifdef HAVE_MPFR
/* Rounds x to the format in MPFR, subnormals and overflow included, and returns the value in double. */
static double round_by_mpfr(const struct format *f, float x) {
  mpfr_t number;
  int bias = (1 << (f->exponent_bits - 1)) - 1;
  mpfr_set_emin(2 - bias - f->fraction_bits); /* MPFR's significand lies in [1/2,1) */
  mpfr_set_emax(bias + 1);
  mpfr_init2(number, f->fraction_bits + 1);
  int inexact = mpfr_set_d(number, (double)x, MPFR_RNDN);
  inexact = mpfr_check_range(number, inexact, MPFR_RNDN);
  mpfr_subnormalize(number, inexact, MPFR_RNDN);
  double value = mpfr_get_d(number, MPFR_RNDN);
  mpfr_clear(number);
  return value;
}

static void check_oracle(const struct format *f) {
  static uint16_t codes[CHUNK];
  for (int64_t chunk = 0; chunk < 0x7f80; chunk++) {
    if (chunk % test_cases(1, 64) != 0) continue;
    oracle_chunk(f, (uint32_t)chunk * CHUNK, codes);
    for (uint32_t i = (uint32_t)(chunk % 1021); i < CHUNK; i += 1021) {
      float x = float_of((uint32_t)chunk * CHUNK + i);
      double own = codes[i] == infinity_code(f) ? (double)INFINITY : decode_magnitude(f, codes[i]);
      if (own != round_by_mpfr(f, x)) fail_msg("the oracle for %s and MPFR disagree at %a", f->name, (double)x);
    }
  }
}
#endif

static void test_oracle_against_mpfr(void **state) {
  (void)state;
#ifdef HAVE_MPFR
  for (int i = 0; i < FORMATS; i++) check_oracle(formats[i]);
#else
  skip();
#endif
}

int main(void) {
  enum { FIRST = 3 };
  struct CMUnitTest tests[FIRST + 3 * FORMATS] = {cmocka_unit_test(test_oracle_against_mpfr),
                                                  cmocka_unit_test(test_f32_and_tails), cmocka_unit_test(test_long)};
  for (int i = 0; i < FORMATS; i++) {
    void *format = (void *)(uintptr_t)formats[i];
    tests[FIRST + i] = (struct CMUnitTest){"test_every_code", test_every_code, NULL, NULL, format};
    tests[FIRST + FORMATS + i] = (struct CMUnitTest){"test_every_step", test_every_step, NULL, NULL, format};
    tests[FIRST + 2 * FORMATS + i] =
        (struct CMUnitTest){"test_from_every_float", test_from_every_float, NULL, NULL, format};
  }
  return cmocka_run_group_tests_name("convert", tests, NULL, NULL);
}
