/* Grouped products of whatever bits may be, NaN and subnormals among them: scalar's results with every instruction set,
   to the bit, whose sums are rounded once; nothing is read or written beyond tensors and workspace. */
#include "support/test.h"

#include "support/cases.h"
#include "support/fill.h"
#include "support/grouped.h"
#include "support/guard.h"
#include "support/pack.h"

/* In the first rows and the last some elements are whatever bits may be: NaN with payloads, infinities and subnormals
   among them. Products of two first rows of float are subnormal. */
static void fill_bits(test_tensor *tensor, uint64_t *rng, int64_t columns) {
  test_fill_uniform(tensor, rng, 1.0);
  for (int64_t i = 0; i < columns && tensor->dtype == MOE_DTYPE_F32; ++i) ((float *)tensor->data)[i] *= 0x1p-65f;
  for (int64_t n = 0; n < 8 * columns; ++n) {
    if (!test_random_chance(rng, 30)) continue;
    const int64_t i = test_random_chance(rng, 2) ? n : tensor->count - 1 - n;
    const uint32_t upper = (uint32_t)test_random_range(rng, 0, 0xffff) | (test_random_chance(rng, 4) ? 0x7f80u : 0);
    if (tensor->dtype == MOE_DTYPE_F32)
      ((uint32_t *)tensor->data)[i] = upper << 16 | (uint32_t)test_random_range(rng, 0, 0xffff);
    else
      ((uint16_t *)tensor->data)[i] = (uint16_t)upper;
  }
}

/* Runs one operation, 0 (Y) or 2 (dW), in a workspace that ends where nothing may be read or written. */
static void run_guarded(moe_context *ctx, moe_dtype dtype, int op, moe_grouped_gemm_args *a) {
  assert_int_equal(grouped_size[dtype][op](ctx, a, &a->workspace_bytes), MOE_OK);
  struct guarded workspace = guard_alloc(a->workspace_bytes, GUARD_AFTER);
  assert_non_null(a->workspace = workspace.data);
  if (grouped_call[dtype][op](ctx, a) != MOE_OK) fail_msg("%s", ctx->message);
  guard_free(&workspace);
}

static void expect_bits(const moe_grouped_gemm_args *a, const char *what, const test_tensor *want,
                        const test_tensor *got, int isa) {
  const int64_t differs = test_tensor_differs(want, got);
  if (differs >= 0)
    fail_msg("%s[%lld] of N=%lld K=%lld differs from scalar, type %s, isa %s", what, (long long)differs,
             (long long)a->N, (long long)a->K, test_dtype_name(want->dtype), moe_isa_name((moe_isa)isa));
}

/* The operation's results are scalar's with every instruction set, to the bit; Y with prepacked weights as well. */
static void check_bits(moe_dtype dtype, int op, moe_grouped_gemm_args *a, moe_dtype result, int64_t count) {
  moe_context ctx = {.allocate = test_allocate, .release = test_release};
  test_tensor want = test_tensor_new(result, count), room = test_tensor_new(result, count + 32);
  test_tensor got = want; /* from where a line begins */
  got.data = (char *)room.data + (-(uintptr_t)room.data & 63);
  for (int isa = 0; isa < TEST_ISA_COUNT; ++isa) {
    if (!test_use_isa(isa)) continue;
    void *to = isa == MOE_ISA_SCALAR ? want.data : memset(got.data, 0x5a, test_tensor_bytes(&got));
    *(op == 0 ? &a->Y : &a->dW) = to;
    run_guarded(&ctx, dtype, op, a);
    if (isa != MOE_ISA_SCALAR) expect_bits(a, op == 0 ? "Y" : "dW", &want, &got, isa);
    if (op != 0 || !test_use_quick_isa(isa)) continue;
    moe_pack_weights_args packing = {
        .layout = MOE_PACK_GROUPED, .E = a->E, .rows = a->N, .columns = a->K, .weight = a->W};
    assert_int_equal(test_pack_new(&ctx, dtype, &packing), MOE_OK);
    moe_grouped_gemm_args packed = *a;
    packed.W = NULL, packed.packed_W = packing.packed, packed.packed_W_bytes = packing.packed_bytes;
    packed.Y = memset(got.data, 0x5a, test_tensor_bytes(&got));
    run_guarded(&ctx, dtype, op, &packed);
    expect_bits(a, "Y, prepacked,", &want, &got, isa);
    free(packing.packed);
  }
  test_use_best_isa();
  test_tensor_free(&want), test_tensor_free(&room);
}

/* dW leaves by several ways, of which only some see a NaN: whole tiles and rests of them, whole panels and narrow ones,
   lines that begin where rows do and others, experts with no row, a few, and more than a piece; panels of y that fill
   the workspace to its end. */
static void test_weight_grad_bits(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  static const int64_t sides[][2] = {{6, 64}, {70, 64}, {64, 72}, {11, 128}, {130, 160}, {6, 448}};
  int32_t sizes[] = {0, 1, 7, 530, 12};
  for (size_t n = 0; n < 3 * sizeof sides / sizeof *sides; n += (size_t)test_cases(1, 2)) { /* all types in turn */
    uint64_t rng = test_case_seed(test_seed(1), n);
    moe_grouped_gemm_args a = {
        .num_tokens = 550, .topk = 1, .E = 5, .N = sides[n / 3][0], .K = sides[n / 3][1], .m_sizes = sizes};
    a.weight_grad_dtype = test_dtype_number((int64_t)n);
    test_tensor x = test_tensor_new(dtype, a.num_tokens * a.K), dy = test_tensor_new(dtype, a.num_tokens * a.N);
    fill_bits(&x, &rng, a.K), fill_bits(&dy, &rng, a.N);
    a.X = x.data, a.dY = dy.data;
    check_bits(dtype, 2, &a, a.weight_grad_dtype, a.E * a.N * a.K);
    test_tensor_free(&x), test_tensor_free(&dy);
  }
}

/* Y of experts with so many rows, sizes[E], to the bit. Nothing is read behind the weights. */
static void check_y_bits(moe_dtype dtype, size_t n, int64_t N, int64_t K, int64_t E, const int32_t *sizes) {
  uint64_t rng = test_case_seed(test_seed(1), n);
  moe_grouped_gemm_args a = {.topk = 1, .E = E, .N = N, .K = K, .m_sizes = sizes};
  for (int64_t e = 0; e < E; ++e) a.num_tokens += sizes[e];
  test_tensor x = test_tensor_new(dtype, a.num_tokens * K), w = test_tensor_new(dtype, E * N * K);
  struct guarded weights = guard_alloc(test_tensor_bytes(&w), GUARD_AFTER);
  fill_bits(&x, &rng, K), fill_bits(&w, &rng, K);
  a.X = x.data, a.W = memcpy(weights.data, w.data, test_tensor_bytes(&w));
  check_bits(dtype, 0, &a, dtype, a.num_tokens * N);
  guard_free(&weights);
  test_tensor_free(&x), test_tensor_free(&w);
}

/* Weights whose columns turn into a panel beside the tiles of the panel before: of as many rows as there are tiles for
   none of it, a quarter, half and all, and then some; of one piece, of several of one length, and of a last one that is
   shorter. */
static void test_turning_bits(void **state) {
  static const int64_t sides[][2] = {{200, 64}, {192, 160}, {256, 288}, {130, 300}, {192, 258}, {1480, 32}};
  static const int32_t sizes[] = {53, 54, 0, 83, 126, 131};
  for (size_t n = 0; n < sizeof sides / sizeof *sides; ++n)
    check_y_bits(*(const moe_dtype *)*state, n, sides[n][0], sides[n][1], sizeof sizes / sizeof *sizes, sizes);
}

/* Weights whose columns turn as they stream past a few rows, on both sides of every bound: whole squares and rests of
   them, columns longer than what streams at a time, and rows longer than are kept. */
static void test_streaming_bits(void **state) {
  static const int64_t sides[][2] = {{70, 33}, {16, 1}, {33, 4131}, {144, 2080}, {9, 640}, {8, 9000}};
  static const int32_t sizes[] = {1, 2, 6, 7, 0, 12, 13, 24, 25};
  for (size_t n = 0; n < sizeof sides / sizeof *sides; ++n)
    check_y_bits(*(const moe_dtype *)*state, n, sides[n][0], sides[n][1], sizeof sizes / sizeof *sizes, sizes);
}

/* Factors and addends whose exact product and sum lies half-way between two floats, or next to that, among normal
   floats and subnormals; or next to the least normal float, below which bf16's sums become zero. Returns how many. */
static int64_t put_close_values(float *to, float unit, int sign) {
  static const int exponents[] = {0, -12, -24, -36, -63, -75, -125, -126, -127, -149};
  const float fraction[] = {1, 1 + unit, 1 + 2 * unit, 1 - unit, 1 - unit / 2, 1.5f};
  int64_t count = 0;
  for (size_t e = 0; e < sizeof exponents / sizeof *exponents; ++e)
    for (size_t f = 0; f < sizeof fraction / sizeof *fraction; ++f, ++count)
      to[count] = ldexpf((float)sign * fraction[f], exponents[e]);
  return count;
}

/* Sums of a product and an addend: X's rows are (a, 1), W's (b, c). They are the same with every instruction set, and
   those of float what fmaf returns. */
static void test_close_sums(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  float factor[60], addend[120];
  const float unit = ldexpf(1, 1 - test_dtype_digits(dtype));
  const int64_t factors = put_close_values(factor, unit, 1);
  int64_t addends = put_close_values(addend, unit, 1);
  addends += put_close_values(addend + addends, unit, -1);
  test_tensor x = test_tensor_new(dtype, factors * 2), w = test_tensor_new(dtype, factors * addends * 2);
  for (int64_t a = 0; a < factors; ++a) {
    test_tensor_set(&x, 2 * a, factor[a]), test_tensor_set(&x, 2 * a + 1, 1);
    for (int64_t c = 0; c < addends; ++c)
      test_tensor_set(&w, 2 * (a * addends + c), factor[a]), test_tensor_set(&w, 2 * (a * addends + c) + 1, addend[c]);
  }
  int32_t size = (int32_t)factors;
  moe_grouped_gemm_args a = {.num_tokens = factors, .topk = 1, .E = 1, .N = factors * addends, .K = 2,
                             .m_sizes = &size, .X = x.data, .W = w.data};
  check_bits(dtype, 0, &a, dtype, a.num_tokens * a.N);
  test_tensor y = test_tensor_new(dtype, a.num_tokens * a.N);
  moe_context ctx = {.allocate = test_allocate, .release = test_release};
  (void)moe_isa_limit(MOE_ISA_SCALAR);
  a.Y = y.data;
  run_guarded(&ctx, dtype, 0, &a);
  test_use_best_isa();
  for (int64_t i = 0; dtype == MOE_DTYPE_F32 && i < y.count; ++i) {
    const float left = factor[i / a.N], right = factor[i % a.N / addends], plus = addend[i % addends];
    const float want = fmaf(left, right, plus), got = ((const float *)y.data)[i];
    if (memcmp(&want, &got, 4) != 0) fail_msg("%a * %a + %a is %a, not %a", left, right, plus, got, want);
  }
  test_tensor_free(&x), test_tensor_free(&w), test_tensor_free(&y);
}

int main(void) {
  const struct CMUnitTest tests[] = {EACH_DTYPE(test_weight_grad_bits), EACH_DTYPE(test_turning_bits),
                                     EACH_DTYPE(test_streaming_bits), EACH_DTYPE(test_close_sums)};
  return cmocka_run_group_tests_name("grouped_bits", tests, NULL, NULL);
}
