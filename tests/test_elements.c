/* test_elements: the narrow element formats over every input. All 2^32 floats to each, where codes change in both kinds
   of overflow and of ties (scalar: in each kind once), elsewhere in one of them (scalar: a quarter of those), and all
   codes back, on every instruction set of this CPU (of AVX-512 BF16, whose converters are AVX-512's, a sixteenth), with
   0 differences against support/element_oracle.h; tails, bounds and bad arguments.

   The range is split over two processes. MOE_TEST_QUICK=1 takes every 257th chunk. */
#include "support/test.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/element_oracle.h"
#include "support/pool.h"

enum { CHUNK = 1 << 16, CHUNKS = 1 << 16, CASTS = 6 };

/* The formats' published limits, in numbers. */
static void test_oracle(void **state) {
  (void)state;
  static const double least[] = {0x1p-9, 0x1p-9, 0x1p-16, 0.5};
  static const double e2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (int e = 0; e < ELEMENTS; e++) {
    assert_int_equal(elements[e].id, e);
    assert_true(element_value(&elements[e], elements[e].last) == elements[e].largest);
  }
  for (size_t e = 0; e < sizeof least / sizeof *least; e++) assert_true(element_value(&elements[e], 1) == least[e]);
  for (int code = 0; code < 8; code++) assert_true(element_value(&elements[MOE_ELEMENT_E2M1], code) == e2m1[code]);
}

/* Whether n floats first, first+1, ..., of one sign and kind, have one code: codes rise with them. */
static int is_one_step(const struct element *f, uint32_t first, uint32_t n, uint32_t cast) {
  return element_code(f, first, cast) == element_code(f, first + n - 1, cast);
}

/* Their codes, where the i-th float's belongs. n is a power of two from 4 on: so many codes are whole bytes. */
static void oracle_codes(const struct element *f, uint32_t first, uint32_t i, uint32_t n, uint32_t cast,
                         uint8_t *codes) {
  uint8_t *to = codes + i * (uint32_t)f->bits / 8;
  if (n > 4 && !is_one_step(f, first + i, n, cast)) {
    oracle_codes(f, first, i, n / 2, cast, codes);
    oracle_codes(f, first, i + n / 2, n / 2, cast, codes);
    return;
  }
  for (uint32_t q = 0; q < 4; q++) element_put(f, to, q, element_code(f, first + i + q, cast));
  for (int64_t q = f->bits / 2; q < element_bytes(f, n); q++) to[q] = to[q - f->bits / 2];
}

struct tally {
  uint64_t compared[TEST_ISA_COUNT], wrong[TEST_ISA_COUNT];
  uint32_t example[TEST_ISA_COUNT], cast[TEST_ISA_COUNT];
};

/* Whether an instruction set converts a chunk. Scalar kernels, which take long, do in two ways, with each kind of
   overflow and each kind of ties, where codes change. */
static int converts(int isa, uint32_t first, uint32_t cast, int one_step) {
  const uint32_t chunk = first / CHUNK / 2, overflow = cast & 1, ties = cast >> 1 & 1;
  if (isa == MOE_ISA_AVX512BF16) return chunk % 16 == 0;
  if (isa != MOE_ISA_SCALAR) return 1;
  return one_step ? chunk / CASTS % 4 == 0 : (overflow ^ ties) == (chunk & 1);
}

/* Which of the casts a chunk of one code is converted in; of others all are. */
static int takes(const struct element *f, uint32_t first, uint32_t cast, int *one_step) {
  *one_step = is_one_step(f, first, CHUNK, cast);
  return !*one_step || cast == first / CHUNK / 2 % CASTS;
}

static void compare_chunk(const struct element *f, uint32_t first, uint32_t cast, const float *x, struct tally *tally) {
  static uint8_t expected[CHUNK], actual[CHUNK];
  const size_t bytes = (size_t)element_bytes(f, CHUNK);
  int one_step;
  if (!takes(f, first, cast, &one_step)) return;
  oracle_codes(f, first, 0, CHUNK, cast, expected);
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!converts(isa, first, cast, one_step) || !test_use_isa(isa)) continue;
    memset(actual, 0x5a, sizeof actual);
    if (f->from_f32(NULL, actual, x, CHUNK, cast) != MOE_OK) tally->wrong[isa]++;
    tally->compared[isa] += CHUNK;
    if (memcmp(expected, actual, bytes) == 0) continue;
    for (uint32_t i = 0; i < CHUNK; i++)
      if (element_get(f, expected, i) != element_get(f, actual, i) && tally->wrong[isa]++ == 0)
        tally->example[isa] = first + i, tally->cast[isa] = cast;
  }
}

/* Chunks start, start+step, ... of the whole range. */
static void compare_share(const struct element *f, int start, int step, struct tally *tally) {
  static float x[CHUNK];
  for (int64_t chunk = start; chunk < CHUNKS; chunk += step) {
    uint32_t first = (uint32_t)chunk * CHUNK;
    for (uint32_t i = 0; i < CHUNK; i++) x[i] = float_of(first + i);
    for (uint32_t cast = 0; cast < CASTS; cast++) compare_chunk(f, first, cast, x, tally);
  }
}

static void report(const struct element *f, const struct tally *tally) {
  uint64_t wrong = 0;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!moe_isa_supported((moe_isa)isa)) continue;
    print_message("f32 to %s, %s: %llu compared, %llu wrong\n", f->name, moe_isa_name((moe_isa)isa),
                  (unsigned long long)tally->compared[isa], (unsigned long long)tally->wrong[isa]);
    if (tally->wrong[isa] != 0)
      print_message("repro: isa=%s element=%s cast=%u float bits 0x%08x\n", moe_isa_name((moe_isa)isa), f->name,
                    (unsigned)tally->cast[isa], (unsigned)tally->example[isa]);
    wrong += tally->wrong[isa];
  }
  assert_int_equal(wrong, 0);
}

static void test_from_every_float(void **state) {
  const struct element *f = (const struct element *)*state;
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
    if (sum.wrong[isa] == 0) sum.example[isa] = share[1].example[isa], sum.cast[isa] = share[1].cast[isa];
    sum.wrong[isa] += share[1].wrong[isa];
  }
  munmap(share, 2 * sizeof *share);
  test_use_best_isa();
  report(f, &sum);
}

/* Every byte, so every code and for e2m1 every pair; of 6 bits, that many bytes of every value. */
static void test_every_code(void **state) {
  const struct element *f = (const struct element *)*state;
  const int n = 256 * 8 / f->bits;
  uint8_t codes[256];
  float actual[512];
  for (int i = 0; i < 256; i++) codes[i] = (uint8_t)i;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!test_use_isa(isa)) continue;
    assert_int_equal(f->to_f32(NULL, actual, codes, n), MOE_OK);
    for (int i = 0; i < n; i++) {
      uint32_t expected = element_decoded(f, element_get(f, codes, i));
      if (bits_of(actual[i]) != expected)
        fail_msg("repro: isa=%s %s element %d: 0x%08x instead of 0x%08x", moe_isa_name((moe_isa)isa), f->name, i,
                 (unsigned)bits_of(actual[i]), (unsigned)expected);
    }
  }
  test_use_best_isa();
}

static void test_every_scale(void **state) {
  (void)state;
  uint8_t codes[256];
  float actual[256];
  for (int i = 0; i < 256; i++) codes[i] = (uint8_t)i;
  assert_int_equal(moe_e8m0_to_f32(NULL, actual, codes, 256), MOE_OK);
  for (int i = 0; i < 255; i++) assert_int_equal(bits_of(actual[i]), bits_of(ldexpf(1.0f, i - 127)));
  assert_int_equal(bits_of(actual[255]), 0x7fc00000u);
}

/* Every exponent with its ends and a middle, either sign. */
static void test_scales_from_floats(void **state) {
  (void)state;
  static const uint32_t fraction[] = {0, 1, 0x400000, 0x7fffff};
  float x[256 * 8];
  uint8_t codes[256 * 8];
  for (uint32_t i = 0; i < 256 * 8; i++) x[i] = float_of(i / 8 << 23 | fraction[i % 4] | (i & 4) << 29);
  assert_int_equal(moe_e8m0_from_f32(NULL, codes, x, 256 * 8), MOE_OK);
  for (int i = 0; i < 256 * 8; i++) {
    int exponent = 0;
    if (isfinite(x[i]) && fabsf(x[i]) >= 0x1p-126f) frexpf(x[i], &exponent);
    assert_int_equal(codes[i], !isfinite(x[i]) ? 255 : exponent == 0 && fabsf(x[i]) < 0x1p-126f ? 0 : exponent + 126);
  }
  assert_int_equal(moe_e8m0_from_f32(NULL, NULL, x, 4), MOE_ERROR_NULL_ARGUMENT);
}

/* n elements both ways: right, the high half of an odd number's last byte 0 out and ignored in, nothing beyond
   touched. */
static void check_tail(const struct element *f, const float *x, int64_t n, uint32_t cast) {
  uint8_t codes[128];
  float back[128];
  const int64_t bytes = element_bytes(f, n);
  memset(codes, 0x5a, sizeof codes);
  memset(back, 0x5a, sizeof back);
  assert_int_equal(f->from_f32(NULL, codes, x, n, cast), MOE_OK);
  for (int64_t i = 0; i < n; i++) assert_int_equal(element_get(f, codes, i), element_code(f, bits_of(x[i]), cast));
  for (int64_t i = bytes; i < 128; i++) assert_int_equal(codes[i], 0x5a);
  if (n * f->bits % 8) {
    assert_int_equal(codes[bytes - 1] >> n * f->bits % 8, 0);
    codes[bytes - 1] |= (uint8_t)(0xdd << n * f->bits % 8);
  }
  assert_int_equal(f->to_f32(NULL, back, codes, n), MOE_OK);
  for (int64_t i = 0; i < 128; i++)
    assert_int_equal(bits_of(back[i]), i < n ? element_decoded(f, element_get(f, codes, i)) : 0x5a5a5a5au);
}

static void test_tails(void **state) {
  const struct element *f = (const struct element *)*state;
  float x[128];
  uint64_t seed = 9;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++)
    for (int64_t n = 0; n < 100 && test_use_isa(isa); n++) {
      for (int i = 0; i < 128; i++) {
        uint32_t random = (uint32_t)(test_random(&seed) >> 32);
        x[i] = float_of((random & 0x8fffffffu) + (i % 16 == 3 ? 0x7f800000u : 0x38000000u));
      }
      check_tail(f, x, n, (uint32_t)n % CASTS);
    }
  test_use_best_isa();
}

/* More than one piece, on several threads, whatever the caller's rounding and flush modes: an odd number of
   elements. */
static void test_threads(void **state) {
  const struct element *f = (const struct element *)*state;
  enum { N = 200001 };
  float *x = malloc(N * sizeof *x), *back = malloc(N * sizeof *back);
  uint8_t *codes = malloc(N);
  assert_true(x && back && codes);
  uint64_t seed = 10;
  struct test_pool pool = {.seed = 11};
  moe_context ctx = {.parallel_for = test_pool_parallel_for, .parallel_for_user = &pool, .num_threads = 3};
  for (int i = 0; i < N; i++) x[i] = ldexpf((float)(int32_t)(test_random(&seed) >> 32), -26);
  assert_int_equal(f->from_f32(&ctx, codes, x, N, MOE_CAST_SATURATE), MOE_OK);
  assert_int_equal(f->to_f32(&ctx, back, codes, N), MOE_OK);
  for (int i = 0; i < N; i++) {
    assert_int_equal(element_get(f, codes, i), element_code(f, bits_of(x[i]), MOE_CAST_SATURATE));
    assert_int_equal(bits_of(back[i]), element_decoded(f, element_get(f, codes, i)));
  }
  free(x), free(back), free(codes);
}

static void test_bad_arguments(void **state) {
  const struct element *f = (const struct element *)*state;
  moe_context ctx = {0};
  float x[4] = {1, 2, 3, 4};
  uint8_t codes[4] = {0};
  assert_int_equal(f->from_f32(&ctx, codes, x, 4, 8), MOE_ERROR_INVALID_OPTION);
  assert_string_equal(ctx.message, "cast has unknown bits");
  assert_int_equal(f->from_f32(&ctx, codes, x, -1, 0), MOE_ERROR_INVALID_SHAPE);
  assert_int_equal(f->to_f32(&ctx, x, codes, -1), MOE_ERROR_INVALID_SHAPE);
  assert_int_equal(f->from_f32(&ctx, NULL, x, 4, 0), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(f->from_f32(&ctx, codes, NULL, 4, 0), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(f->to_f32(&ctx, NULL, codes, 4), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(f->to_f32(&ctx, x, NULL, 4), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(f->from_f32(&ctx, codes, x, INT64_MAX, 0), MOE_ERROR_OVERFLOW);
  assert_int_equal(f->from_f32(&ctx, codes, (const float *)(const void *)((const char *)x + 1), 1, 0),
                   MOE_ERROR_MISALIGNED);
  assert_int_equal(f->from_f32(&ctx, (uint8_t *)x + 2, x, 4, 0), MOE_ERROR_OVERLAP);
  assert_int_equal(f->to_f32(&ctx, x, (const uint8_t *)x + 2, 4), MOE_ERROR_OVERLAP);
  assert_int_equal(f->from_f32(&ctx, NULL, NULL, 0, 0), MOE_OK);
  assert_int_equal(f->to_f32(&ctx, NULL, NULL, 0), MOE_OK);
  assert_int_equal(moe_e8m0_to_f32(&ctx, x, NULL, 4), MOE_ERROR_NULL_ARGUMENT);
  assert_int_equal(moe_e8m0_to_f32(&ctx, x, codes, -4), MOE_ERROR_INVALID_SHAPE);
  for (int i = 0; i < 4; i++) assert_true(x[i] == (float)(i + 1) && codes[i] == 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_oracle),       cmocka_unit_test(test_every_scale),
      cmocka_unit_test(test_scales_from_floats),
      EACH_ELEMENT(test_every_code),       EACH_ELEMENT(test_tails),
      EACH_ELEMENT(test_threads),          EACH_ELEMENT(test_bad_arguments),
      EACH_ELEMENT(test_from_every_float),
  };
  return cmocka_run_group_tests_name("elements", tests, NULL, NULL);
}
