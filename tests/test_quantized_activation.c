/* test_quantized_activation: hidden states and output gradients given as codes and scales give the same bits, outputs
   and gradients, as the plain tensors that they stand for; bad input. */
#include "support/test.h"

#include "support/mx_cases.h"
#include "support/stored.h"

/* ------------------------------------------------------------------------------------------------------------ calls */

/* What is given as codes; NULL: plain. */
static void run(struct problem *p, moe_context *ctx, const struct stored *x, const struct stored *grad) {
  for (int op = PROBLEM_FORWARD; op <= PROBLEM_BACKWARD; op++) {
    struct problem_args args;
    size_t bytes = 0;
    problem_make_args(p, &args);
    moe_blockwise_layer *layer = op == PROBLEM_FORWARD ? &args.forward.layer : &args.backward.layer;
    if (x) layer->hidden_states = NULL, layer->quantized_hidden_states = &x->a;
    if (grad) args.backward.output_hidden_states_grad = NULL;
    if (grad) args.backward.quantized_output_hidden_states_grad = &grad->a;
    assert_int_equal(problem_workspace_size((enum problem_op)op, ctx, &args, &bytes), MOE_OK);
    struct guarded workspace = stored_room((int64_t)bytes, 1);
    problem_set_workspace((enum problem_op)op, &args, workspace.data, bytes);
    if (problem_call((enum problem_op)op, ctx, &args) != MOE_OK) {
      char text[700];
      describe(p, text, sizeof text);
      fail_msg("%s: %s\nrepro: %s", problem_op_name((enum problem_op)op), ctx->message, text);
    }
    guard_free(&workspace);
  }
}

static void open_case(struct problem *p, const struct problem_options *o, struct stored s[2]) {
  uint64_t rng = o->seed;
  open_routed(p, o, &rng, 0);
  s[0].rows = s[1].rows = o->T, s[0].columns = s[1].columns = o->H;
  for (int i = 0; i < 2; i++) stored_make(&s[i], &rng);
}

/* Plain on one thread against codes, on every instruction set. */
static void check(const struct problem_options *o, struct stored s[2], int which) {
  struct problem want, got;
  moe_context one = {.num_threads = 1};
  uint64_t rng = o->seed + 1;
  open_case(&want, o, s);
  if (which & 1) stored_plain(&s[0], o->dtype, want.tensor[PT_HIDDEN_STATES].data);
  if (which & 2) stored_plain(&s[1], o->dtype, want.tensor[PT_OUTPUT_GRAD].data);
  run(&want, &one, NULL, NULL);
  stored_free(&s[0]), stored_free(&s[1]);
  for (int isa = 0; isa < TEST_ISA_COUNT; isa++) {
    if (!test_use_isa(isa)) continue;
    struct test_pool pool = {.seed = test_random(&rng)};
    moe_context ctx = {.parallel_for = test_pool_parallel_for, .parallel_for_user = &pool};
    ctx.num_threads = (int32_t)test_random_range(&rng, 1, 3);
    open_case(&got, o, s);
    run(&got, &ctx, which & 1 ? &s[0] : NULL, which & 2 ? &s[1] : NULL);
    expect_same_outputs(&got, &want, PROBLEM_FORWARD, "the plain tensor's");
    expect_same_outputs(&got, &want, PROBLEM_BACKWARD, "the plain tensor's");
    problem_close(&got, NULL, NULL), stored_free(&s[0]), stored_free(&s[1]);
  }
  test_use_best_isa();
  problem_close(&want, NULL, NULL);
}

/* ------------------------------------------------------------------------------------------------------------ tests */

/* Every element and storage, in random layers, some of whose operands are rounded to MX. */
static void test_storage(void **state) {
  static const int64_t blocks[][2] = {{0, 0}, {1, 0}, {0, 1}, {1, 128}, {3, 7}, {128, 128}, {1000, 1000}};
  enum { STORAGES = 1 + (int)(sizeof blocks / sizeof *blocks) };
  static const int64_t lengths[] = {1, 31, 32, 65, 100, 130, 256, 300};
  const moe_dtype dtype = *(const moe_dtype *)*state;
  for (int64_t i = 0; i < ELEMENTS * STORAGES * 4; i += test_cases(1, 5)) {
    uint64_t rng = 700 + (uint64_t)i;
    struct stored s[2] = {{{0}, 0, 0, {0}, {0}}};
    struct problem_options o = problem_options_random(5000 + (uint64_t)i, dtype);
    o.H = lengths[test_random_range(&rng, 0, 7)], o.tiny_rows = o.nan_row = 0;
    if (i % 3 == 0) o.mx = all_operands(&rng);
    problem_options_settle(&o);
    for (int j = 0; j < 2; j++) {
      const int64_t n = (i + j * 5) / ELEMENTS % STORAGES;
      s[j].a.element = (moe_element)((i + j) % ELEMENTS);
      s[j].a.float_scales = n > 0 && elements[s[j].a.element].bits == 8;
      if (s[j].a.float_scales) s[j].a.block_rows = blocks[n - 1][0], s[j].a.block_columns = blocks[n - 1][1];
    }
    check(&o, s, 1 + (int)(i % 3));
  }
}

/* ------------------------------------------------------------------------------------------------------- bad input */

static void refuse(struct problem *p, struct problem_args *args, enum problem_op op, moe_status want,
                   const char *name) {
  moe_context ctx = {0};
  char before[64];
  const int id = op == PROBLEM_FORWARD ? PT_OUTPUT : PT_HIDDEN_GRAD;
  const size_t n = problem_tensor_bytes(p, id) < 64 ? problem_tensor_bytes(p, id) : 64;
  memcpy(before, p->tensor[id].data, n);
  assert_int_equal(problem_call(op, &ctx, args), want);
  assert_non_null(strstr(ctx.message, name));
  assert_memory_equal(before, p->tensor[id].data, n);
}

#define REFUSE(which, op, change, status, text)                   \
  do {                                                            \
    const moe_quantized_activation good = s[which].a;             \
    s[which].a.change;                                            \
    refuse(&p, &args, PROBLEM_##op, MOE_ERROR_##status, text);    \
    s[which].a = good;                                            \
  } while (0)

static void test_bad_input(void **state) {
  static const char *const x = "quantized_hidden_states", *const grad = "quantized_output_hidden_states_grad";
  struct problem_options o = plain_options(3, MOE_DTYPE_BF16, 64, 40);
  struct stored s[2] = {{{.element = MOE_ELEMENT_E2M1}, 0, 0, {0}, {0}},
                        {{.element = MOE_ELEMENT_E4M3FN, .float_scales = 1, .block_rows = 1}, 0, 0, {0}, {0}}};
  struct problem p;
  struct problem_args args;
  (void)state;
  open_case(&p, &o, s);
  problem_make_args(&p, &args);
  size_t bytes[2];
  for (int op = PROBLEM_FORWARD; op <= PROBLEM_BACKWARD; op++) {
    moe_blockwise_layer *layer = op == PROBLEM_FORWARD ? &args.forward.layer : &args.backward.layer;
    layer->quantized_hidden_states = &s[0].a;
    args.backward.quantized_output_hidden_states_grad = &s[1].a;
    assert_int_equal(problem_workspace_size((enum problem_op)op, NULL, &args, &bytes[op - PROBLEM_FORWARD]), MOE_OK);
    void *workspace = malloc(bytes[op - PROBLEM_FORWARD]);
    assert_non_null(workspace);
    problem_set_workspace((enum problem_op)op, &args, workspace, bytes[op - PROBLEM_FORWARD]);
    REFUSE(0, FORWARD, codes = NULL, NULL_ARGUMENT, "quantized_hidden_states->codes");
    if (op == PROBLEM_FORWARD) {
      REFUSE(0, FORWARD, scales = NULL, NULL_ARGUMENT, "quantized_hidden_states->scales");
      REFUSE(0, FORWARD, element = (moe_element)(ELEMENTS + 1), INVALID_OPTION, x);
      REFUSE(0, FORWARD, float_scales = 2, INVALID_OPTION, x);
      REFUSE(0, FORWARD, float_scales = 1, INVALID_OPTION, x); /* of 4 bits */
      REFUSE(0, FORWARD, codes = p.tensor[PT_OUTPUT].data, OVERLAP, "output");
      REFUSE(0, FORWARD, codes = workspace, OVERLAP, "workspace");
    } else {
      float *scale = (float *)(void *)s[1].scales.data;
      REFUSE(0, BACKWARD, element = (moe_element)(ELEMENTS + 1), INVALID_OPTION, x);
      REFUSE(1, BACKWARD, codes = NULL, NULL_ARGUMENT, "quantized_output_hidden_states_grad->codes");
      REFUSE(1, BACKWARD, scales = NULL, NULL_ARGUMENT, "quantized_output_hidden_states_grad->scales");
      REFUSE(1, BACKWARD, scales = (const char *)s[1].a.scales + 1, MISALIGNED,
             "quantized_output_hidden_states_grad->scales");
      REFUSE(1, BACKWARD, element = MOE_ELEMENT_E2M1, INVALID_OPTION, grad);
      REFUSE(1, BACKWARD, block_rows = -1, INVALID_SHAPE, grad);
      REFUSE(1, BACKWARD, block_columns = -1, INVALID_SHAPE, grad);
      REFUSE(1, BACKWARD, codes = p.tensor[PT_HIDDEN_GRAD].data, OVERLAP, "hidden_states_grad");
      const float kept = *scale;
      *scale = float_of(0x7fc00000u);
      REFUSE(1, BACKWARD, block_rows = 1, INVALID_OPTION, "quantized_output_hidden_states_grad->scales");
      *scale = kept;
    }
    assert_int_equal(problem_call((enum problem_op)op, NULL, &args), MOE_OK);
    free(workspace);
  }
  problem_close(&p, NULL, NULL), stored_free(&s[0]), stored_free(&s[1]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      EACH_DTYPE(test_storage),
      cmocka_unit_test(test_bad_input),
  };
  return cmocka_run_group_tests_name("quantized activations", tests, NULL, NULL);
}
