/* test_mx_operands_input: operands to be rounded to MX that are refused, with a status and a sentence, outputs
   untouched. */
#include "support/test.h"

#include "support/mx_cases.h"

/* Both functions refuse these operands and write nothing; the message names what is wrong. */
static void refused(struct problem *p, const moe_mx_operands *mx, moe_status status, const char *name) {
  for (int op = PROBLEM_FORWARD; op <= PROBLEM_BACKWARD; op++) {
    moe_context ctx = {.allocate = oracle_allocate, .release = oracle_free};
    struct problem_args args;
    struct problem before;
    size_t bytes = 0;
    open_copy(&before, p, &p->o.mx);
    p->o.mx = *mx;
    problem_make_args(p, &args);
    assert_int_equal(problem_workspace_size((enum problem_op)op, &ctx, &args, &bytes), status);
    assert_int_equal(problem_call((enum problem_op)op, &ctx, &args), status);
    if (strstr(ctx.message, name) == NULL) fail_msg("\"%s\" does not name %s", ctx.message, name);
    for (int id = 0; id < PT_COUNT; id++) expect_same(p, &before, id, "that before an error");
    close_problem(&before);
  }
}

static void test_bad_operands(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  struct problem_options o = plain_options(78000, dtype, 64, 32);
  struct problem p;
  uint64_t rng = 50;
  open_routed(&p, &o, &rng, 0);
#define REFUSED(field, value, name)                          \
  do {                                                       \
    moe_mx_operands mx = all_operands(&rng);                 \
    mx.field = (value);                                      \
    refused(&p, &mx, MOE_ERROR_INVALID_OPTION, name);        \
  } while (0)
#define REFUSED_EACH(field, value)                    \
  REFUSED(activations.field, value, "mx.activations"); \
  REFUSED(weights.field, value, "mx.weights");         \
  REFUSED(gradients.field, value, "mx.gradients")
  REFUSED_EACH(enabled, 2);
  REFUSED_EACH(enabled, -1);
  REFUSED_EACH(element, (moe_element)(ELEMENTS + 1));
  REFUSED_EACH(element, (moe_element)-1);
  REFUSED_EACH(scale_rule, (moe_scale_rule)RULES);
  REFUSED_EACH(scale_rule, (moe_scale_rule)-1);
  REFUSED_EACH(cast, 8);
  REFUSED_EACH(cast, MOE_CAST_HALF_AWAY | MOE_CAST_HALF_TO_ZERO);
  REFUSED_EACH(cast, 0x80000000u);
  REFUSED(weight_grads, 2, "mx.weight_grads");
  REFUSED(weight_grads, -1, "mx.weight_grads");
  REFUSED(activation_layout, (moe_mx_layout)MOE_MX_LAYOUT_COUNT_, "mx.activation_layout");
  REFUSED(activation_layout, (moe_mx_layout)-1, "mx.activation_layout");
  close_problem(&p);
}

/* Scales of inputs: finite and above 0, and activations that are rounded to 8 bits. */
static void test_bad_scales(void **state) {
  static const float bad[] = {0.0f, -1.0f, INFINITY, NAN};
  const moe_dtype dtype = *(const moe_dtype *)*state;
  struct problem_options o = plain_options(78500, dtype, 40, 36);
  struct problem p;
  uint64_t rng = 52;
  float scale[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  open_routed(&p, &o, &rng, 0);
  for (int i = 0; i < 14; i++) {
    moe_context ctx = {.allocate = oracle_allocate, .release = oracle_free};
    struct problem_args args;
    moe_mx_operands mx = all_operands(&rng);
    mx.activations.element = i == 12 ? MOE_ELEMENT_E2M1 : MOE_ELEMENT_E5M2;
    mx.activations.enabled = i != 13;
    *(i % 2 ? &mx.down_in_scale : &mx.gate_up_in_scale) = scale;
    scale[p.o.E - 1] = i < 8 ? bad[i / 2] : 1;
    const char *name = i % 2 ? "mx.down_in_scale" : "mx.gate_up_in_scale";
    if (i >= 12) refused(&p, &mx, MOE_ERROR_INVALID_OPTION, name);
    for (int op = PROBLEM_FORWARD; op <= PROBLEM_BACKWARD && i < 12; op++) {
      struct problem before;
      p.o.mx = mx;
      open_copy(&before, &p, &mx);
      problem_make_args(&p, &args);
      assert_int_equal(problem_call((enum problem_op)op, &ctx, &args), i < 8 ? MOE_ERROR_INVALID_OPTION : MOE_OK);
      if (i < 8) assert_non_null(strstr(ctx.message, name));
      for (int id = 0; id < PT_COUNT && i < 8; id++) expect_same(&p, &before, id, "that before an error");
      close_problem(&before);
    }
  }
  close_problem(&p);
}

/* H for x with two parts, I for m with one. */
static void test_bad_layouts(void **state) {
  static const struct {
    int64_t H, I;
    moe_mx_layout layout;
  } bad[] = {{256, 32, MOE_MX_LAYOUT_NKI_STRIDED_X4}, {512, 34, MOE_MX_LAYOUT_NKI_STRIDED_X4},
             {516, 32, MOE_MX_LAYOUT_NKI_CONTIGUOUS_X4}, {512, 2, MOE_MX_LAYOUT_NKI_CONTIGUOUS_X4},
             {48, 32, MOE_MX_LAYOUT_NKI_WRAPX}, {64, 36, MOE_MX_LAYOUT_NKI_WRAPX},
             {31, 32, MOE_MX_LAYOUT_NKI_WRAPX_WHOLE}, {64, 31, MOE_MX_LAYOUT_NKI_WRAPX_WHOLE},
             {33, 32, MOE_MX_LAYOUT_NKI_1X32}, {64, 40, MOE_MX_LAYOUT_NKI_1X32}, {40, 32, MOE_MX_LAYOUT_GPT_OSS},
             {64, 16, MOE_MX_LAYOUT_GPT_OSS}, {16, 32, MOE_MX_LAYOUT_GGML}, {64, 8, MOE_MX_LAYOUT_GGML}};
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    struct problem_options o = plain_options(79000 + i, dtype, bad[i].H, bad[i].I);
    uint64_t rng = i;
    moe_mx_operands mx = all_operands(&rng);
    struct problem p;
    open_routed(&p, &o, &rng, 0);
    mx.activation_layout = bad[i].layout;
    refused(&p, &mx, MOE_ERROR_INVALID_SHAPE, "");
    mx.activations.enabled = 0; /* then the layout has no say */
    p.o.mx = mx;
    call(&p, PROBLEM_FORWARD);
    close_problem(&p);
  }
}

static void test_packed_weights(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (int which = 0; which < 2; which++) {
    struct problem_options o = plain_options(79500, dtype, 40, 36);
    moe_context ctx = {.allocate = oracle_allocate, .release = oracle_free};
    struct problem_args args;
    struct problem p, before;
    uint64_t rng = 51;
    o.mx.weights = random_rounding(&rng);
    open_routed(&p, &o, &rng, 0);
    open_copy(&before, &p, &o.mx);
    problem_make_args(&p, &args);
    *(which ? &args.forward.layer.packed_down_proj_weight : &args.forward.layer.packed_gate_up_proj_weight) = &p;
    assert_int_equal(problem_call(PROBLEM_FORWARD, &ctx, &args), MOE_ERROR_INVALID_OPTION);
    assert_non_null(strstr(ctx.message, "mx.weights"));
    for (int id = 0; id < PT_COUNT; id++) expect_same(&p, &before, id, "that before an error");
    close_problem(&p), close_problem(&before);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      EACH_DTYPE(test_bad_operands),
      EACH_DTYPE(test_bad_scales),
      EACH_DTYPE(test_bad_layouts),
      EACH_DTYPE(test_packed_weights),
  };
  return cmocka_run_group_tests_name("mx operands input", tests, NULL, NULL);
}
