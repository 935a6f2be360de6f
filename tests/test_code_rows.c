/* test_code_rows: a grouped GEMM's dX from few rows and MX weights, whose rows of codes are multiplied as they lie,
   against the one from the same weights in plain form, to the bit: all scale bytes, codes and shapes there are. */
#include "support/test.h"

#include "support/guard.h"

enum { EXPERTS = 2 };

struct product {
  moe_dtype dtype;
  moe_element element;
  moe_mx_layout layout;
  int64_t N, K, G, row; /* row: bytes of a row of codes */
  struct guarded codes, scales, given, dy;
};

static size_t size_of(const struct product *p) { return p->dtype == MOE_DTYPE_F32 ? 4 : 2; }

static uint8_t any_scale(uint64_t *rng, int kind) {
  switch (kind) {
    case 0: return (uint8_t)test_random_range(rng, 110, 140);
    case 1: return (uint8_t)(test_random_chance(rng, 40) ? 0 : test_random_range(rng, 1, 18));
    case 2: return (uint8_t)(test_random_chance(rng, 40) ? 255 : test_random_range(rng, 236, 254));
    default: return (uint8_t)test_random(rng);
  }
}

/* Numbers, zeros and, in some cases, any bits: subnormals, infinities, NaN. */
static void fill_dy(const struct product *p, int64_t n, int any, uint64_t *rng) {
  for (int64_t i = 0; i < n; i++) {
    float x = (float)test_random_range(rng, -1000, 1000) / 256.0f;
    uint32_t bits;
    if (test_random_chance(rng, 8)) x = 0.0f;
    memcpy(&bits, &x, 4);
    if (any) bits = (uint32_t)test_random(rng);
    if (p->dtype == MOE_DTYPE_F32) memcpy(p->dy.data + 4 * i, &bits, 4);
    else p->dy.data[2 * i] = (unsigned char)(bits >> 16), p->dy.data[2 * i + 1] = (unsigned char)(bits >> 24);
  }
}

/* Weights as OCP has them, and in the layout of the case. */
static void fill_weights(struct product *p, int kind, uint64_t *rng) {
  const int64_t rows = EXPERTS * p->N;
  const int bits = p->element == MOE_ELEMENT_E2M1 ? 4 : 8;
  moe_mx_layout_args args = {MOE_MX_LAYOUT_PLAIN, p->layout, 0, 0, bits, 1, EXPERTS, p->K, p->N, 0, 0, 0, 0, 0, {0}};
  moe_mx_layout_bytes bytes;
  assert_int_equal(moe_mx_layout_size(NULL, &args, &bytes), MOE_OK);
  p->codes = guard_alloc((size_t)(rows * p->row), GUARD_AFTER);
  p->scales = guard_alloc((size_t)(rows * p->G), GUARD_AFTER);
  p->given = guard_alloc(bytes.codes_out, GUARD_AFTER);
  for (int64_t i = 0; i < rows * p->row; i++) {
    p->codes.data[i] = (unsigned char)test_random(rng);
    const int normal = 8 + p->codes.data[i] % 112; /* of all magnitudes */
    if (bits == 8 && kind < 3 && !test_random_chance(rng, 300))
      p->codes.data[i] = (unsigned char)((p->codes.data[i] & 128) | normal);
  }
  for (int64_t i = 0; i < rows * p->G; i++) p->scales.data[i] = any_scale(rng, kind);
  args.codes_in = p->codes.data, args.scales_in = p->scales.data;
  struct guarded scales = guard_alloc(bytes.scales_out, GUARD_AFTER);
  args.codes_out = p->given.data, args.scales_out = bytes.scales_out ? scales.data : NULL;
  assert_int_equal(moe_mx_layout_convert(NULL, &args), MOE_OK);
  if (bytes.scales_out) assert_memory_equal(scales.data, p->scales.data, bytes.scales_out);
  guard_free(&scales);
}

static void call_dx(const struct product *p, moe_grouped_gemm_args *args, void *dx) {
  moe_status (*size)(moe_context *, const moe_grouped_gemm_args *, size_t *) =
      p->dtype == MOE_DTYPE_F32 ? moe_grouped_gemm_dx_f32_workspace_size : moe_grouped_gemm_dx_bf16_workspace_size;
  moe_status (*call)(moe_context *, const moe_grouped_gemm_args *) =
      p->dtype == MOE_DTYPE_F32 ? moe_grouped_gemm_dx_f32 : moe_grouped_gemm_dx_bf16;
  size_t bytes;
  args->dX = dx;
  assert_int_equal(size(NULL, args, &bytes), MOE_OK);
  void *workspace = aligned_alloc(64, (bytes + 64) / 64 * 64);
  assert_non_null(workspace);
  memset(workspace, 0xff, bytes);
  args->workspace = workspace, args->workspace_bytes = bytes;
  assert_int_equal(call(NULL, args), MOE_OK);
  free(workspace);
}

static void test_case(moe_dtype dtype, int64_t number, uint64_t *rng) {
  static const moe_element elements[] = {MOE_ELEMENT_E2M1, MOE_ELEMENT_E2M1, MOE_ELEMENT_E2M1, MOE_ELEMENT_E4M3FN,
                                         MOE_ELEMENT_E5M2};
  static const moe_mx_layout layouts[] = {MOE_MX_LAYOUT_PLAIN, MOE_MX_LAYOUT_GPT_OSS, MOE_MX_LAYOUT_GGML,
                                          MOE_MX_LAYOUT_PLAIN, MOE_MX_LAYOUT_PLAIN};
  static const int64_t rows[] = {1, 2, 5, 11, 20, 21, 33};
  struct product p = {dtype, elements[number % 5], layouts[number % 5], 0, 0, 0, 0, {0}, {0}, {0}, {0}};
  const int kind = (int)(number / 5 % 4);
  const int64_t T = rows[test_random_range(rng, 0, 6)] + rows[test_random_range(rng, 0, 3)];
  const int32_t m_sizes[EXPERTS] = {(int32_t)test_random_range(rng, 0, T), 0};
  const int32_t sizes[EXPERTS] = {m_sizes[0], (int32_t)(T - m_sizes[0])};
  p.N = test_random_range(rng, 1, number % 7 ? 70 : 300);
  p.K = test_random_range(rng, 1, number % 3 ? 200 : 1300);
  if (p.layout != MOE_MX_LAYOUT_PLAIN || test_random_chance(rng, 2)) p.K = (p.K + 31) / 32 * 32;
  p.G = (p.K + 31) / 32, p.row = p.element == MOE_ELEMENT_E2M1 ? (p.K + 1) / 2 : p.K;
  fill_weights(&p, kind, rng);
  p.dy = guard_alloc((size_t)(T * p.N) * size_of(&p), GUARD_AFTER);
  fill_dy(&p, T * p.N, number % 6 == 5, rng);
  const size_t bytes = (size_t)(T * p.K) * size_of(&p);
  void *plain = malloc((size_t)(EXPERTS * p.N * p.K) * size_of(&p)), *expected = malloc(bytes), *dx = malloc(bytes);
  assert_true(plain && expected && dx);
  const moe_dequantize_mx_args decode = {p.element, dtype, EXPERTS * p.N, p.K, 0, p.codes.data, p.scales.data, plain};
  assert_int_equal(moe_dequantize_mx(NULL, &decode), MOE_OK);
  const moe_quantized_weight weight = {.element = p.element,
                                       .scaling = MOE_WEIGHT_MX,
                                       .layout = p.layout,
                                       .codes = p.given.data,
                                       .scales = p.scales.data};
  moe_grouped_gemm_args args = {.num_tokens = T, .topk = 1, .E = EXPERTS, .N = p.N, .K = p.K};
  args.m_sizes = sizes, args.dY = p.dy.data, args.W = plain;
  call_dx(&p, &args, expected);
  args.W = NULL, args.quantized_W = &weight;
  call_dx(&p, &args, dx);
  if (memcmp(expected, dx, bytes) != 0)
    fail_msg("case %lld: element %d, layout %d, scales %d, rows %d and %d, N %lld, K %lld differs", (long long)number,
             (int)p.element, (int)p.layout, kind, sizes[0], sizes[1], (long long)p.N, (long long)p.K);
  free(plain), free(expected), free(dx);
  guard_free(&p.codes), guard_free(&p.scales), guard_free(&p.given), guard_free(&p.dy);
}

static void test_as_plain_weights(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    uint64_t rng = 90 + (uint64_t)dtype;
    if (!test_use_isa(isa)) continue;
    for (int64_t i = 0; i < test_cases(isa == MOE_ISA_SCALAR ? 100 : 800, 40); i++) test_case(dtype, i, &rng);
  }
  test_use_best_isa();
}

int main(void) {
  const struct CMUnitTest tests[] = {TEST_OF_DTYPE(test_as_plain_weights, f32, F32),
                                     TEST_OF_DTYPE(test_as_plain_weights, bf16, BF16)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
