/* test_mx_beforehand: moe_blockwise_layer.mx against the library's own calls: without it, on operands that the oracle
   rounded beforehand or with nothing to round; with the checkpoint that it recomputes; from quantised weights. To the
   bit. */
#include "support/test.h"

#include "support/mx_cases.h"
#include "support/pack.h"

static const moe_mx_operands no_operands;

/* Everything that problem_options_random turns on, in shapes with groups of all lengths. */
static struct problem_options any_options(uint64_t seed, moe_dtype dtype, uint64_t *rng) {
  static const int64_t hidden[] = {1, 31, 32, 33, 64, 95, 130, 256};
  static const int64_t intermediate[] = {5, 33, 40, 100, 130, 300, 32, 63};
  struct problem_options o = problem_options_random(seed, dtype);
  o.H = hidden[test_random_range(rng, 0, 7)], o.I = intermediate[test_random_range(rng, 0, 7)];
  problem_options_settle(&o);
  return o;
}

static void round_weights(struct problem *q, const moe_mx_rounding *r, int backward) {
  const struct problem_options *o = &q->o;
  if (backward) {
    round_tensor(q, PT_GATE_UP_WEIGHT, r, o->E * o->H * 2, o->I, 1, NULL);
    round_tensor(q, PT_DOWN_WEIGHT, r, o->E * o->I, o->H, 1, NULL);
  } else {
    round_tensor(q, PT_GATE_UP_WEIGHT, r, o->E, o->H, 2 * o->I, NULL);
    round_tensor(q, PT_DOWN_WEIGHT, r, o->E, o->I, o->H, NULL);
  }
}

static void test_weights_beforehand(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 41 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(30, 4); i++) {
    struct problem_options o = any_options(70000 + (uint64_t)i, dtype, &rng);
    o.save_gate_up = 1;
    o.mx.weights = random_rounding(&rng);
    struct problem p, q;
    use_isa_number(i);
    open_routed(&p, &o, &rng, i % 4 == 0);
    open_copy(&q, &p, &no_operands);
    round_weights(&q, &o.mx.weights, 0);
    call(&p, PROBLEM_FORWARD), call(&q, PROBLEM_FORWARD);
    expect_same_outputs(&p, &q, PROBLEM_FORWARD, "that of weights rounded beforehand");
    copy_tensor(&q, &p, PT_GATE_UP_WEIGHT), copy_tensor(&q, &p, PT_DOWN_WEIGHT);
    round_weights(&q, &o.mx.weights, 1);
    call(&p, PROBLEM_BACKWARD), call(&q, PROBLEM_BACKWARD);
    expect_same_outputs(&p, &q, PROBLEM_BACKWARD, "that of weights rounded beforehand");
    close_problem(&p), close_problem(&q);
  }
  test_use_best_isa();
}

static void test_hidden_states_beforehand(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 42 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(20, 3); i++) {
    struct problem_options o = any_options(71000 + (uint64_t)i, dtype, &rng);
    o.save_gate_up = 1;
    o.mx.activations = random_rounding(&rng);
    struct problem p, q;
    use_isa_number(i);
    open_routed(&p, &o, &rng, i % 4 == 0);
    open_copy(&q, &p, &no_operands);
    round_tensor(&q, PT_HIDDEN_STATES, &o.mx.activations, o.T, o.H, 1, NULL);
    call(&p, PROBLEM_FORWARD), call(&q, PROBLEM_FORWARD);
    expect_same(&p, &q, PT_GATE_UP_CHECKPOINT, "that of hidden states rounded beforehand");
    close_problem(&p), close_problem(&q);
  }
  test_use_best_isa();
}

/* Without weight_grads, dY is rounded on its way to dm0 only, and dg, du on theirs to dX. */
static void test_gradients_apart(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 43 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(30, 5); i++) {
    struct problem_options o = any_options(72000 + (uint64_t)i, dtype, &rng);
    const int pre = o.layer.affinity_mode == MOE_AFFINITY_PRE_SCALE;
    o.mx.gradients = random_rounding(&rng);
    struct problem p, plain, rounded;
    use_isa_number(i);
    open_routed(&p, &o, &rng, i % 4 == 0);
    call(&p, PROBLEM_FORWARD);
    open_copy(&plain, &p, &no_operands), open_copy(&rounded, &p, &no_operands);
    round_tensor(&rounded, PT_OUTPUT_GRAD, &o.mx.gradients, o.T, o.H, 1, NULL);
    call(&p, PROBLEM_BACKWARD), call(&plain, PROBLEM_BACKWARD), call(&rounded, PROBLEM_BACKWARD);
    expect_same(&p, &plain, PT_DOWN_WEIGHT_GRAD, "that of plain operands");
    expect_same(&p, &plain, PT_DOWN_BIAS_GRAD, "that of plain operands");
    expect_same(&p, &rounded, PT_GATE_UP_WEIGHT_GRAD, "that of a rounded output gradient");
    expect_same(&p, &rounded, PT_GATE_UP_BIAS_GRAD, "that of a rounded output gradient");
    if (o.save_down && o.affinity_option == MOE_AFFINITY_OPTION_ON_H)
      expect_same(&p, &plain, PT_AFFINITIES_GRAD, "that of plain operands");
    else if (!pre && !o.expert_bias)
      expect_same(&p, &rounded, PT_AFFINITIES_GRAD, "that of a rounded output gradient");
    close_problem(&p), close_problem(&plain), close_problem(&rounded);
  }
  test_use_best_isa();
}

/* Activations have no part in a backward that has its checkpoint, and weight_grads alone rounds nothing. */
static void test_nothing_to_round(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 44 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(12, 2); i++) {
    struct problem_options o = any_options(73000 + (uint64_t)i, dtype, &rng);
    moe_mx_operands mx = {0};
    struct problem p, q;
    o.save_gate_up = 1;
    open_routed(&p, &o, &rng, 0);
    call(&p, PROBLEM_FORWARD);
    if (i % 2) mx.weight_grads = 1;
    else mx.activations = random_rounding(&rng);
    mx.gradients = (moe_mx_rounding){0, (moe_element)-1, (moe_scale_rule)77, 99}; /* off */
    open_copy(&q, &p, &mx);
    call(&p, PROBLEM_BACKWARD), call(&q, PROBLEM_BACKWARD);
    expect_same_outputs(&q, &p, PROBLEM_BACKWARD, "that of plain operands");
    close_problem(&p), close_problem(&q);
  }
}

static void test_recomputed(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 45 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(40, 5); i++) {
    struct problem_options o = any_options(74000 + (uint64_t)i, dtype, &rng);
    o.mx = all_operands(&rng);
    o.save_gate_up = 1;
    if (i % 4 == 0) o.H = 512, o.I = 36, o.mx.activation_layout = MOE_MX_LAYOUT_NKI_STRIDED_X4;
    struct problem p, q;
    use_isa_number(i);
    open_routed(&p, &o, &rng, i % 4 == 1);
    call(&p, PROBLEM_FORWARD);
    open_copy(&q, &p, &o.mx);
    q.o.save_gate_up = 0;
    call(&p, PROBLEM_BACKWARD), call(&q, PROBLEM_BACKWARD);
    expect_same_outputs(&q, &p, PROBLEM_BACKWARD, "that with its checkpoint");
    close_problem(&p), close_problem(&q);
  }
  test_use_best_isa();
}

/* ------------------------------------------------------------------------------------------------ quantised weights */

struct quantized_layer {
  moe_quantized_weight gate_up, down;
  void *packed[2];
  size_t packed_bytes[2];
};

/* [rows,columns] of every expert, in groups down its columns. */
static moe_quantized_weight quantize(const struct problem *p, int id, const moe_mx_rounding *r, int64_t rows,
                                     int64_t columns) {
  const test_tensor t = problem_typed(p, id);
  const int64_t line = element_bytes(&elements[r->element], rows), groups = (rows + 31) / 32;
  uint8_t *codes = malloc((size_t)(p->o.E * columns * line)), *scales = malloc((size_t)(p->o.E * columns * groups));
  for (int64_t e = 0; e < p->o.E; e++) {
    const moe_quantize_mx_args args = {
        .element = r->element, .scale_rule = r->scale_rule, .cast = r->cast, .dtype = t.dtype,
        .rows = rows, .columns = columns, .transposed = 1, .codes = codes + e * columns * line,
        .scales = scales + e * columns * groups,
        .plain = (const char *)t.data + (size_t)(e * rows * columns) * moe_dtype_size(t.dtype)};
    assert_int_equal(moe_quantize_mx(NULL, &args), MOE_OK);
  }
  return (moe_quantized_weight){.element = r->element, .codes = codes, .scales = scales};
}

static void pack(const struct problem *p, struct quantized_layer *w, int down) {
  moe_pack_weights_args args = {.layout = down ? MOE_PACK_DOWN : p->o.layer.skip_gate ? MOE_PACK_UP : MOE_PACK_GATE_UP,
                                .E = p->o.E, .rows = down ? p->o.I : p->o.H, .columns = down ? p->o.H : p->o.I,
                                .quantized_weight = down ? &w->down : &w->gate_up};
  assert_int_equal(test_pack_new(NULL, p->o.dtype, &args), MOE_OK);
  w->packed[down] = args.packed;
  w->packed_bytes[down] = args.packed_bytes;
}

static void free_quantized(struct quantized_layer *w) {
  free((void *)(uintptr_t)w->gate_up.codes), free((void *)(uintptr_t)w->gate_up.scales);
  free((void *)(uintptr_t)w->down.codes), free((void *)(uintptr_t)w->down.scales);
  free(w->packed[0]), free(w->packed[1]);
}

static void quantize_layer(moe_blockwise_layer *l, const struct quantized_layer *w) {
  l->gate_up_proj_weight = l->down_proj_weight = NULL;
  l->quantized_gate_up_proj_weight = &w->gate_up, l->quantized_down_proj_weight = &w->down;
  l->packed_gate_up_proj_weight = w->packed[0], l->packed_down_proj_weight = w->packed[1];
  l->packed_gate_up_proj_weight_bytes = w->packed_bytes[0], l->packed_down_proj_weight_bytes = w->packed_bytes[1];
}

static void call_quantized(struct problem *p, enum problem_op op, const struct quantized_layer *w) {
  moe_context ctx = {.allocate = oracle_allocate, .release = oracle_free};
  struct problem_args args;
  problem_make_args(p, &args);
  quantize_layer(&args.forward.layer, w);
  quantize_layer(&args.backward.layer, w);
  if (problem_call(op, &ctx, &args) != MOE_OK) fail_msg("%s: %s", problem_op_name(op), ctx.message);
}

/* A quantised weight is the plain one rounded once; mx.weights rounds it again in the backward only. */
static void test_quantized(void **state) {
  const moe_dtype dtype = *(const moe_dtype *)*state;
  uint64_t rng = 46 + (uint64_t)dtype;
  for (int64_t i = 0; i < test_cases(24, 4); i++) {
    struct problem_options o = any_options(75000 + (uint64_t)i, dtype, &rng);
    const moe_mx_rounding stored = random_rounding(&rng);
    struct quantized_layer w = {0};
    struct problem p, q;
    o.mx.weights = random_rounding(&rng);
    o.save_gate_up = 1;
    use_isa_number(i);
    open_routed(&p, &o, &rng, 0);
    w.gate_up = quantize(&p, PT_GATE_UP_WEIGHT, &stored, o.H, 2 * o.I);
    w.down = quantize(&p, PT_DOWN_WEIGHT, &stored, o.I, o.H);
    if (i % 2) pack(&p, &w, 0), pack(&p, &w, 1);
    open_copy(&q, &p, &no_operands);
    round_weights(&q, &stored, 0);
    call_quantized(&p, PROBLEM_FORWARD, &w), call(&q, PROBLEM_FORWARD);
    expect_same_outputs(&p, &q, PROBLEM_FORWARD, "that of the weight it stands for");
    if (i % 3 == 0) p.o.save_gate_up = 0; /* recomputed: as the forward */
    round_weights(&q, &o.mx.weights, 1);
    call_quantized(&p, PROBLEM_BACKWARD, &w), call(&q, PROBLEM_BACKWARD);
    expect_same_outputs(&p, &q, PROBLEM_BACKWARD, "that of the weight it stands for, rounded across");
    free_quantized(&w);
    close_problem(&p), close_problem(&q);
  }
  test_use_best_isa();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      EACH_DTYPE(test_weights_beforehand), EACH_DTYPE(test_hidden_states_beforehand), EACH_DTYPE(test_gradients_apart),
      EACH_DTYPE(test_nothing_to_round), EACH_DTYPE(test_recomputed), EACH_DTYPE(test_quantized),
  };
  return cmocka_run_group_tests_name("mx operands rounded beforehand", tests, NULL, NULL);
}
