/* Every option of grouped GEMM: weights in both orders, plain, packed and quantised, biases, topk weights before and
   after, sums over topk, padding, accumulation, and all gradients. */
#include "support/test.h"

#include <complex.h>
#undef I

#include "support/grouped_case.h"
#include "support/pack.h"
#include "support/pool.h"

static void fail_case(const grouped_case *c, const char *what, int64_t i, int isa, int threads) {
  const moe_grouped_gemm_args *a = &c->args;
  fail_msg(
      "%s[%lld] | seed 0x%llx dtype %s isa %s threads %d tokens %lld topk %lld E %lld N %lld K %lld permute %d %d "
      "sum %d order %d mode %d accumulate %u given: gather %d bias %d topk %d; rows %lld of %lld; storage %d/%d/%d",
      what, (long long)i, (unsigned long long)c->seed, test_dtype_name(c->dtype), moe_isa_name((moe_isa)isa), threads,
      (long long)a->num_tokens, (long long)a->topk, (long long)a->E, (long long)a->N, (long long)a->K, a->permute_x,
      a->permute_y, a->sum_topk, a->weight_order, a->topk_mode, a->accumulate, c->o.gather, c->o.bias,
      c->o.topk_weights, (long long)c->rows, (long long)c->total, c->o.quantized ? (int)c->o.storage.scaling : -1,
      (int)c->o.storage.element, (int)c->o.storage.layout);
}

/* All operations against the reference. */
static void check_case(grouped_case *c, int isa, int threads) {
  struct test_pool pool = {.seed = c->seed};
  moe_context ctx = {.parallel_for = test_pool_parallel_for, .parallel_for_user = &pool, .num_threads = threads};
  carried *want[GROUPED_OUTPUTS];
  grouped_reference(c, want);
  for (int op = 0; op < 3; op++) {
    if (grouped_run(c, &ctx, op, &c->args) != MOE_OK) fail_case(c, ctx.message, op, isa, threads);
    for (int output = 0; output < GROUPED_OUTPUTS; output++) {
      const int64_t differs = grouped_writes(c, op, output) ? grouped_differs(c, output, want[output]) : -1;
      if (differs >= 0) fail_case(c, grouped_output_name[output], differs, isa, threads);
    }
  }
  grouped_reference_free(want);
}

static grouped_options options_of(int64_t tokens, int64_t topk, int64_t E, int64_t N, int64_t K) {
  grouped_options o;
  memset(&o, 0, sizeof o);
  o.args.num_tokens = tokens, o.args.topk = topk, o.args.E = E, o.args.N = N, o.args.K = K, o.grads = 1;
  return o;
}

/* One bit field after the other. */
static int take_bits(int64_t *n, int count) {
  const int value = (int)(*n % count);
  *n /= count;
  return value;
}

/* Combination n of all options; 0 when there are no more. */
static int combination(int64_t n, grouped_options *o) {
  static const int permutations[][4] = {{0, 0, 0, 0}, {0, 0, 0, 1}, {1, 0, 0, 1}, {1, 0, 1, 1}, {0, 1, 0, 1}};
  const int *p = permutations[take_bits(&n, 5)];
  o->args.permute_x = p[0], o->args.permute_y = p[1], o->args.sum_topk = p[2], o->gather = p[3];
  o->args.weight_order = (moe_grouped_order)take_bits(&n, MOE_GROUPED_ORDER_COUNT_);
  o->bias = take_bits(&n, 2);
  const int topk = take_bits(&n, 3);
  o->topk_weights = topk > 0, o->args.topk_mode = topk == 2 ? MOE_TOPK_PRE : MOE_TOPK_POST;
  const int accumulate = take_bits(&n, 2);
  for (int i = 0; i < GROUPED_OUTPUTS; i++) o->args.accumulate |= accumulate ? grouped_bit[i] : 0;
  o->padding = take_bits(&n, 2);
  o->exact = take_bits(&n, 2);
  return n == 0;
}

static void test_every_combination(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  grouped_options o;
  for (int64_t n = 0;; n += test_cases(1, 7)) {
    uint64_t rng = test_case_seed(test_seed(1), (uint64_t)n);
    o = options_of(test_random_range(&rng, 1, 12), test_random_range(&rng, 1, 3), test_random_range(&rng, 1, 4),
                   test_random_range(&rng, 1, 80), test_random_range(&rng, 1, 140));
    if (!combination(n, &o)) break;
    o.args.weight_grad_dtype = test_random_chance(&rng, 2) ? MOE_DTYPE_F32 : MOE_DTYPE_DEFAULT;
    int isa = (int)test_random_range(&rng, 0, TEST_ISA_COUNT - 1);
    if (!test_use_isa(isa)) test_use_isa(isa = MOE_ISA_SCALAR);
    grouped_case c;
    grouped_open(&c, test_random(&rng), dtype, &o);
    check_case(&c, isa, 1 + (int)(n % 3));
    grouped_close(&c);
  }
  test_use_best_isa();
}

/* Accumulation of each output by itself, and with and without the optional ones. */
static void test_each_accumulated(void **state) {
  (void)state;
  for (int64_t n = 0; n < 4 * GROUPED_OUTPUTS; n++) {
    grouped_options o = options_of(9, 2, 3, 70, 66);
    o.args.permute_x = (int)(n & 1), o.args.permute_y = !o.args.permute_x;
    o.grads = (int)(n >> 1 & 1), o.padding = o.bias = o.topk_weights = o.exact = 1;
    o.args.accumulate = grouped_bit[n / 4];
    grouped_case c;
    grouped_open(&c, test_case_seed(test_seed(2), (uint64_t)n), test_dtype_number(n), &o);
    check_case(&c, TEST_ISA_COUNT - 1, 2);
    grouped_close(&c);
  }
}

/* Layers of models, a fraction of their size: both projections, with what each model does. */
static void test_models(void **state) {
  (void)state;
  static const struct {
    int64_t tokens, topk, E, H, I;
    int bias, pre, by_rows;
  } models[] = {
      {48, 8, 16, 128, 48, 0, 0, 0},  /* Qwen3-30B-A3B: 2048, 768, 128 experts */
      {40, 1, 16, 160, 256, 0, 1, 1}, /* Llama 4 Scout: 5120, 8192 */
      {33, 2, 8, 128, 448, 0, 0, 0},  /* Mixtral: 4096, 14336 */
      {40, 4, 8, 90, 90, 1, 0, 1},    /* gpt-oss: 2880, 2880, biases */
      {200, 1, 1, 65, 67, 1, 1, 0},   {7, 3, 5, 1, 1, 1, 0, 1},
  };
  for (size_t n = 0; n < 2 * sizeof models / sizeof *models; n++)
    for (int dtype = MOE_DTYPE_F32; dtype <= TEST_DTYPES; dtype++) {
      const int64_t H = models[n / 2].H, I = models[n / 2].I;
      grouped_options o =
          options_of(models[n / 2].tokens, models[n / 2].topk, models[n / 2].E, n % 2 ? H : 2 * I, n % 2 ? I : H);
      o.args.permute_x = n % 2 == 0, o.args.permute_y = !o.args.permute_x, o.args.sum_topk = o.args.permute_x;
      o.bias = models[n / 2].bias, o.topk_weights = models[n / 2].pre == o.args.permute_x;
      o.args.topk_mode = models[n / 2].pre ? MOE_TOPK_PRE : MOE_TOPK_POST;
      o.args.weight_order = models[n / 2].by_rows ? MOE_GROUPED_EKN : MOE_GROUPED_ENK;
      grouped_case c;
      grouped_open(&c, test_case_seed(test_seed(3), n), (moe_dtype)dtype, &o);
      check_case(&c, TEST_ISA_COUNT - 1, 3);
      grouped_close(&c);
    }
}

/* --------------------------------------------------------------------------------------------------------- weights */

static moe_status pack_case(const grouped_case *c, moe_context *ctx, int backward, moe_grouped_gemm_args *a) {
  const int by_rows = a->weight_order == MOE_GROUPED_EKN;
  moe_pack_weights_args p = {.layout = by_rows ? MOE_PACK_DOWN : MOE_PACK_GROUPED,
                             .backward = backward,
                             .E = a->E,
                             .rows = by_rows ? a->K : a->N,
                             .columns = by_rows ? a->N : a->K,
                             .weight = a->W,
                             .quantized_weight = a->quantized_W};
  const moe_status status = test_pack_new(ctx, c->dtype, &p);
  a->W = NULL, a->packed_W = p.packed, a->packed_W_bytes = p.packed_bytes;
  return status;
}

/* The same bits from packed weights. */
static void check_packed(grouped_case *c, int isa) {
  moe_context ctx = {.num_threads = 2};
  for (int op = 0; op < 2; op++) {
    moe_grouped_gemm_args packed = c->args;
    test_tensor *out = &c->out[op], plain = test_tensor_new(out->dtype, out->count);
    if (grouped_run(c, &ctx, op, &c->args) != MOE_OK) fail_case(c, ctx.message, op, isa, 2);
    test_tensor_copy(&plain, out);
    if (pack_case(c, &ctx, op, &packed) != MOE_OK) fail_case(c, ctx.message, op, isa, 2);
    if (grouped_run(c, &ctx, op, &packed) != MOE_OK) fail_case(c, ctx.message, op, isa, 2);
    const int64_t differs = test_tensor_differs(&plain, out);
    if (differs >= 0) fail_case(c, op ? "packed dX" : "packed Y", differs, isa, 2);
    if (op == 0 && moe_isa_supported((moe_isa)isa)) { /* what is packed for one is not for the other */
      assert_int_equal(grouped_run(c, &ctx, 1, &packed), MOE_ERROR_INVALID_SHAPE + (grouped_scaled_after(c) != 0));
      assert_non_null(strstr(ctx.message, "packed_W"));
    }
    free((void *)(uintptr_t)packed.packed_W);
    test_tensor_free(&plain);
  }
}

/* Plain weights that stand for the same values give the same bits, if no scale that multiplies sums rounds. */
static void check_twin(grouped_case *c, int isa) {
  moe_context ctx = {.num_threads = 3};
  const int64_t N = c->args.N, K = c->args.K;
  if (test_dtype_narrow(c->dtype) || (grouped_scaled_after(c) && !c->o.exact)) return;
  test_tensor w = test_tensor_new(c->dtype, c->args.E * N * K);
  for (int64_t i = 0; i < w.count; i++) {
    const int64_t e = i / N / K, n = i / K % N, k = i % K;
    test_tensor_set(&w, grouped_w_at(c, e, n, k), grouped_w(c, e, n, k, 1));
  }
  for (int op = 0; op < 2; op++) {
    moe_grouped_gemm_args plain = c->args;
    test_tensor *out = &c->out[op], from_codes = test_tensor_new(out->dtype, out->count);
    if (grouped_run(c, &ctx, op, &c->args) != MOE_OK) fail_case(c, ctx.message, op, isa, 3);
    test_tensor_copy(&from_codes, out);
    plain.W = w.data, plain.quantized_W = NULL;
    if (grouped_run(c, &ctx, op, &plain) != MOE_OK) fail_case(c, ctx.message, op, isa, 3);
    const int64_t differs = test_tensor_differs(&from_codes, out);
    if (differs >= 0) fail_case(c, op ? "dX from codes" : "Y from codes", differs, isa, 3);
    test_tensor_free(&from_codes);
  }
  test_tensor_free(&w);
}

static void check_storage(const moe_quantized_weight *storage, uint64_t seed, moe_dtype dtype, int order, int isa) {
  uint64_t rng = seed;
  grouped_options o =
      options_of(test_random_range(&rng, 1, 50), test_random_range(&rng, 1, 2), test_random_range(&rng, 1, 3),
                 test_random_range(&rng, 1, 150), test_random_range(&rng, 1, 150));
  const int narrow = storage->element == MOE_ELEMENT_E2M1;
  if (!mx_storable(storage->layout, storage->scales_layout, narrow ? 4 : 8, 1, o.args.K) &&
      storage->scaling == MOE_WEIGHT_MX)
    o.args.K = 32 * test_random_range(&rng, 1, 9);
  o.quantized = 1, o.storage = *storage, o.args.weight_order = (moe_grouped_order)order;
  o.args.permute_x = test_random_chance(&rng, 2), o.bias = test_random_chance(&rng, 2);
  o.topk_weights = test_random_chance(&rng, 3);
  for (o.exact = 0; o.exact < 2; o.exact++) { /* scales of powers of two, in E8M0 any are */
    grouped_case c;
    grouped_open(&c, test_random(&rng), dtype, &o);
    check_twin(&c, isa), check_packed(&c, isa);
    c.o.exact = 0; /* codes of fp8 are no integers */
    if (o.exact == 0) check_case(&c, isa, 1);
    grouped_close(&c);
  }
}

static void test_quantized(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = test_seed(4);
  static const float some;
  for (int element = 0; element < ELEMENTS + INTEGERS; element++)
    for (int scaling = 0; scaling < MOE_WEIGHT_COUNT_; scaling++)
      for (int layout = 0; layout < (scaling == MOE_WEIGHT_MX ? MOE_MX_LAYOUT_COUNT_ * MOE_MX_SCALES_COUNT_ : 10);
           layout += (int)test_cases(1, 3)) {
        moe_quantized_weight w = {.element = (moe_element)element, .scaling = (moe_weight_scaling)scaling};
        if (scaling == MOE_WEIGHT_MX) w.layout = (moe_mx_layout)(layout % MOE_MX_LAYOUT_COUNT_);
        if (scaling == MOE_WEIGHT_MX) w.scales_layout = (moe_mx_scales)(layout / MOE_MX_LAYOUT_COUNT_);
        w.out_in = layout / 2 % 2; /* the same as the order ENK */
        if (scaling == MOE_WEIGHT_BLOCK) {
          w.block = layout % 2 ? 16 : 0, w.repeat = layout / 2 ? 3 : 0, w.block_columns = layout / 4 ? 5 : 0;
          w.first_k = layout % 3 * 5, w.first_column = layout % 4, w.scales_type = (moe_scales_type)(layout / 2);
        } else if (scaling == MOE_WEIGHT_GROUP) {
          w.block = 1 + layout * layout, w.first_k = layout / 2, w.scales_type = (moe_scales_type)(layout % 5);
          if (layout % 2) w.global_scale = &some;
          if (layout % 4 < 2 && w.element == MOE_ELEMENT_UINT4) w.zero_points = (const uint8_t *)&some;
        }
        if (!quantized_storable(&w, 1, 32)) continue;
        int isa = (int)test_random_range(&rng, 0, TEST_ISA_COUNT - 1);
        if (!test_use_isa(isa)) test_use_isa(isa = MOE_ISA_SCALAR);
        check_storage(&w, test_random(&rng), dtype, (layout + 1) / 2 % 2, isa);
      }
  test_use_best_isa();
}

/* -------------------------------------------------------------------------------------------------------- same bits */

/* Of finite values or any bits: every instruction set, thread count and schedule. Weights in the other order as well,
   and dW in it. */
static void check_same_bits(grouped_case *c, grouped_case *other) {
  test_tensor want[GROUPED_OUTPUTS];
  for (int i = 0; i < GROUPED_OUTPUTS; i++) want[i] = test_tensor_new(c->out[i].dtype, c->out[i].count);
  for (int run = 0; run <= 4 * TEST_ISA_COUNT; run++) {
    const int isa = run / 4, threads = 1 + run % 4 * 2;
    struct test_pool pool = {.seed = c->seed + (uint64_t)run};
    moe_context ctx = {.parallel_for = test_pool_parallel_for,
                       .parallel_for_user = &pool,
                       .num_threads = threads,
                       .schedule = (moe_schedule)(run % 3)};
    const int turned = run == 4 * TEST_ISA_COUNT;
    grouped_case *now = turned ? other : c;
    if (!turned && !test_use_isa(isa)) continue;
    for (int op = 0; op < 3; op++) {
      if (grouped_run(now, &ctx, op, &now->args) != MOE_OK) fail_case(now, ctx.message, op, isa, threads);
      for (int i = 0; i < GROUPED_OUTPUTS; i++) {
        if (!grouped_writes(c, op, i)) continue;
        if (run == 0) test_tensor_copy(&want[i], &now->out[i]);
        for (int64_t j = 0; turned && i == GROUPED_DW && j < want[i].count; j++) {
          const int64_t N = c->args.N, K = c->args.K, e = j / N / K, n = j / K % N, k = j % K;
          if (test_tensor_get(&want[i], grouped_w_at(c, e, n, k)) !=
              test_tensor_get(&now->out[i], grouped_w_at(now, e, n, k)))
            fail_case(now, "dW in the other order", j, isa, threads);
        }
        const int64_t differs = turned && i == GROUPED_DW ? -1 : test_tensor_differs(&want[i], &now->out[i]);
        if (differs >= 0) fail_case(now, grouped_output_name[i], differs, isa, threads);
      }
    }
  }
  for (int i = 0; i < GROUPED_OUTPUTS; i++) test_tensor_free(&want[i]);
}

static void test_same_bits(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (int64_t n = 0; n < test_cases(24, 6); n++) {
    uint64_t rng = test_case_seed(test_seed(5), (uint64_t)n);
    grouped_options o =
        options_of(test_random_range(&rng, 1, 60), test_random_range(&rng, 1, 3), test_random_range(&rng, 1, 4),
                   test_random_range(&rng, 1, 200), test_random_range(&rng, 1, 200));
    if (!combination(test_random_range(&rng, 0, 239), &o)) break;
    grouped_case c, other;
    const uint64_t seed = test_random(&rng);
    o.exact = 0, o.args.weight_order = MOE_GROUPED_ENK;
    grouped_open(&c, seed, dtype, &o);
    o.args.weight_order = MOE_GROUPED_EKN;
    grouped_open(&other, seed, dtype, &o);
    const int64_t N = o.args.N, K = o.args.K;
    for (int64_t i = 0; i < c.w.count; i++)
      test_tensor_set(&other.w, grouped_w_at(&other, i / N / K, i / K % N, i % K), test_tensor_get(&c.w, i));
    for (int64_t e = 0; e < o.args.E; e++)
      for (int64_t i = 0; i < N * K; i++)
        test_tensor_set(&other.start[GROUPED_DW], grouped_w_at(&other, e, i / K, i % K),
                        test_tensor_get(&c.start[GROUPED_DW], e * N * K + i));
    check_same_bits(&c, &other);
    grouped_close(&c), grouped_close(&other);
  }
  test_use_best_isa();
}

/* -------------------------------------------------------------------------------------------------------- gradients */

/* <dY,Y> in double, with `step` added to element i of a tensor: 0 X by slot, 1 W, 2 bias, 3 topk weights. */
static double complex loss(const grouped_case *c, int tensor, int64_t i, double complex step) {
  const moe_grouped_gemm_args *a = &c->args;
  double complex sum = 0;
  for (int64_t pos = 0; pos < c->rows; pos++) {
    const int64_t e = grouped_expert(c, pos), slot = grouped_slot(c, pos);
    double complex weight = grouped_topk(c, pos) + (tensor == 3 && i == slot ? step : 0);
    for (int64_t n = 0; n < a->N; n++) {
      double complex y = 0;
      for (int64_t k = 0; k < a->K; k++) {
        const double complex x = test_tensor_get(&c->x, grouped_x_row(c, pos) * a->K + k) +
                                 (tensor == 0 && i == grouped_dx_row(c, pos) * a->K + k ? step : 0);
        y += x * (test_tensor_get(&c->w, grouped_w_at(c, e, n, k)) +
                  (tensor == 1 && i == grouped_w_at(c, e, n, k) ? step : 0));
      }
      const double complex bias = a->bias ? test_tensor_get(&c->bias, e * a->N + n) : 0;
      const double complex b = bias + (tensor == 2 && i == e * a->N + n ? step : 0);
      y = a->topk_mode == MOE_TOPK_POST ? weight * (y + b) : weight * y + b;
      sum += test_tensor_get(&c->dy, grouped_y_row(c, pos) * a->N + n) * y;
    }
  }
  return sum;
}

/* Of integers every gradient is an integer, and the derivative by complex step is it to a part in 1e12. */
static void test_gradients(void **state) {
  (void)state;
  static const int output_of[] = {GROUPED_DX, GROUPED_DW, GROUPED_DB, GROUPED_DT};
  moe_context ctx = {.num_threads = 1};
  for (int64_t n = 0; n < test_cases(240, 60); n++) {
    uint64_t rng = test_case_seed(test_seed(6), (uint64_t)n);
    grouped_options o = options_of(test_random_range(&rng, 1, 5), test_random_range(&rng, 1, 3), 2, 3, 4);
    if (!combination(n, &o)) break;
    grouped_case c;
    o.exact = 1, o.args.accumulate = 0;
    grouped_open(&c, test_random(&rng), MOE_DTYPE_F32, &o);
    for (int op = 1; op < 3; op++) {
      if (grouped_run(&c, &ctx, op, &c.args) != MOE_OK) fail_case(&c, ctx.message, op, 0, 1);
      for (int tensor = 0; tensor < 4; tensor++)
        for (int64_t i = 0; i < c.out[output_of[tensor]].count && grouped_writes(&c, op, output_of[tensor]); i++) {
          const double got = test_tensor_get(&c.out[output_of[tensor]], i);
          const double want = cimag(loss(&c, tensor, i, 1e-150 * _Complex_I)) / 1e-150;
          if (!(fabs(got - want) <= 1e-12 * (1 + fabs(want))))
            fail_case(&c, grouped_output_name[output_of[tensor]], i, 0, 1);
        }
    }
    grouped_close(&c);
  }
}

/* ---------------------------------------------------------------------------------------------- nothing, and errors */

/* No tokens, with tensors or without; experts without rows. Gradients are 0, or stay. */
static void test_nothing(void **state) {
  (void)state;
  for (int n = 0; n < 24; n++) {
    grouped_options o = options_of(n & 1 ? 0 : 3, 2, 2, 70, 33);
    o.args.permute_x = n >> 1 & 1, o.padding = o.exact = 1, o.args.accumulate = n >> 2 & 1 ? MOE_ACCUMULATE_DW : 0;
    grouped_case c;
    grouped_open(&c, (uint64_t)n, test_dtype_number(n / 8), &o);
    for (int64_t e = 0; e < 2; e++) c.sizes[e] = 0;
    for (int64_t i = 0; i < c.total; i++) c.position[i] = -1;
    for (int64_t i = 0; i < c.total && c.gather; i++) c.gather[i] = -1;
    c.rows = 0;
    if (c.total == 0) {
      c.args.X = c.args.dY = c.args.Y = c.args.dX = NULL, c.args.topk_weights_grad = NULL;
      c.args.gather_indices = NULL;
    }
    check_case(&c, TEST_ISA_COUNT - 1, 2);
    grouped_close(&c);
  }
}

/* Spoils one thing of operation *op; what must follow, and what the message must name. NULL: there are no more. */
static const char *spoil(int which, int *op, grouped_case *c, moe_status *status) {
  moe_grouped_gemm_args *a = &c->args;
  *op = which % 3, *status = MOE_ERROR_INVALID_OPTION;
  switch (which) {
    case 0:
    case 1:
    case 2: return a->weight_order = MOE_GROUPED_ORDER_COUNT_, "weight_order";
    case 3:
    case 4:
    case 5: return a->topk_mode = (moe_topk_mode)-1, "topk_mode";
    case 6:
    case 7:
    case 8: return a->sum_topk = 2, "sum_topk";
    case 9:
    case 10:
    case 11: return a->permute_x = 0, a->sum_topk = 1, "sum_topk";
    case 12:
    case 13:
    case 14: return a->accumulate = 1u << 15, "accumulate";
    case 15:
    case 16:
    case 17: return *status = MOE_ERROR_INVALID_INDEX, c->gather[1] = c->gather[0], "gather_indices";
    case 18:
    case 19:
    case 20: return *status = MOE_ERROR_INVALID_INDEX, c->gather[0] = -1, "gather_indices";
    case 21:
    case 22:
    case 23: return *status = MOE_ERROR_INVALID_SHAPE, a->num_tokens = -1, "num_tokens";
    case 24: return *status = MOE_ERROR_MISALIGNED, a->bias = (const char *)a->bias + 1, "bias";
    case 25: return *status = MOE_ERROR_NULL_ARGUMENT, a->X = NULL, "X";
    case 26: return *status = MOE_ERROR_OVERLAP, a->bias_grad = a->dW, "dW";
    case 27: return *status = MOE_ERROR_OVERLAP, a->Y = (void *)(uintptr_t)a->topk_weights, "Y";
    case 28: return *status = MOE_ERROR_OVERLAP, a->topk_weights_grad = (float *)a->dX, "dX";
    case 29: return *status = MOE_ERROR_MISALIGNED, a->bias_grad = (char *)a->bias_grad + 1, "bias_grad";
    case 30: return *status = MOE_ERROR_NULL_ARGUMENT, a->W = NULL, "W";
    case 31: return *status = MOE_ERROR_NULL_ARGUMENT, a->W = NULL, "W";
    case 32: return *status = MOE_ERROR_NULL_ARGUMENT, a->dW = NULL, "dW";
    default: return NULL;
  }
}

static const char *spoil_quantized(int which, moe_quantized_weight *w, moe_status *status) {
  static const float infinite[1] = {INFINITY};
  *status = MOE_ERROR_INVALID_OPTION;
  switch (which) {
    case 0: return w->element = (moe_element)9, "element";
    case 1: return w->scaling = MOE_WEIGHT_COUNT_, "scaling";
    case 2: return w->element = MOE_ELEMENT_E2M1, "element";
    case 3: return w->scales = infinite, "quantized_W->scales";
    case 4: return *status = MOE_ERROR_NULL_ARGUMENT, w->codes = NULL, "quantized_W->codes";
    case 5: return *status = MOE_ERROR_INVALID_SHAPE, w->block = -1, "block";
    case 6: return w->scaling = MOE_WEIGHT_MX, w->layout = MOE_MX_LAYOUT_COUNT_, "layout";
    case 7:
      return *status = MOE_ERROR_INVALID_SHAPE, w->scaling = MOE_WEIGHT_MX, w->layout = MOE_MX_LAYOUT_NKI_1X32, "K";
    default: return NULL;
  }
}

static void expect_refused(grouped_case *c, int op, moe_status want, const char *name) {
  moe_context ctx = {.allocate = NULL};
  moe_grouped_gemm_args fine = c->o.args;
  const moe_status status = grouped_run(c, &ctx, op, &c->args);
  (void)fine;
  if (status != want || strncmp(ctx.message, name, strlen(name)) != 0)
    fail_msg("operation %d: %s, \"%s\", wanted %s for %s", op, moe_status_str(status), ctx.message,
             moe_status_str(want), name);
  for (int i = 0; i < GROUPED_OUTPUTS; i++) assert_int_equal(test_tensor_differs(&c->out[i], &c->start[i]), -1);
}

static void test_refused(void **state) {
  (void)state;
  grouped_options o = options_of(5, 2, 2, 20, 30);
  o.args.permute_x = o.bias = o.topk_weights = 1;
  for (int which = 0;; which++) {
    grouped_case c;
    int op;
    moe_status status;
    grouped_open(&c, test_case_seed(7, (uint64_t)which), MOE_DTYPE_BF16, &o);
    const char *name = spoil(which, &op, &c, &status);
    if (name) expect_refused(&c, op, status, name);
    grouped_close(&c);
    if (!name) break;
  }
  o.quantized = 1, o.storage = (moe_quantized_weight){.element = MOE_ELEMENT_E4M3FN, .scaling = MOE_WEIGHT_STATIC};
  for (int which = 0;; which++) {
    grouped_case c;
    moe_status status;
    grouped_open(&c, (uint64_t)which, MOE_DTYPE_F32, &o);
    const char *name = spoil_quantized(which / 2, &c.q.weight, &status);
    if (name) expect_refused(&c, which % 2, status, name);
    grouped_close(&c);
    if (!name) break;
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {EACH_DTYPE(test_every_combination), cmocka_unit_test(test_each_accumulated),
                                     cmocka_unit_test(test_models),      EACH_DTYPE(test_quantized),
                                     EACH_DTYPE(test_same_bits),         cmocka_unit_test(test_gradients),
                                     cmocka_unit_test(test_nothing),     cmocka_unit_test(test_refused)};
  return cmocka_run_group_tests_name("grouped_options", tests, NULL, NULL);
}
