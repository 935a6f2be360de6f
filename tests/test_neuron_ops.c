/* Every operation of moe_neuron.h, with every option that has tensors of its own, against the stand-in for libnrt: names,
   types and shapes are what they should be, what is bound, run and read back is to the bit what the CPU computes, and the
   report finds nothing. */
#include "neuron/fixture.h"

#ifndef STANDIN
#error "STANDIN is the path of the stand-in library"
#endif

/* Where outputs go: the CPU's, the device's. */
enum { OUTPUTS = 12, OUTPUT_BYTES = 1 << 17 };
static _Alignas(64) uint8_t outputs[2][OUTPUTS][OUTPUT_BYTES];

/* Runs args[1] on the device and args[0] on the CPU, from outputs that begin alike. */
static void agree(session *s, const neuron_op *op, const void *cpu, const void *device,
                  const moe_neuron_options *options, int bounded) {
  moe_neuron_report report;
  moe_neuron_choice choice;
  char text[4096];
  assert_ok(op->describe(&s->ctx, device, options, &s->table), &s->ctx);
  neff_of(&s->neff, op, device, &s->table);
  load(s);
  for (int i = 0; i < OUTPUTS; i++)
    for (int k = 0; k < OUTPUT_BYTES / 2; k++)
      ((uint16_t *)outputs[0][i])[k] = (uint16_t)(0x3c00 + 37 * k % 256), ((uint16_t *)outputs[1][i])[k] = 0;
  memcpy(outputs[1], outputs[0], sizeof outputs[0]);
  assert_ok(op->check(&s->ctx, &s->model, cpu, device, options, &report), &s->ctx);
  moe_neuron_report_text(&report, text, sizeof text);
  if (memcmp(outputs[0], outputs[1], sizeof outputs[0]) != 0) fail_msg("%s: other bits\n%s", op->name, text);
  if (report.bounded != bounded || report.agree != bounded || report.count < 1) fail_msg("%s\n%s", op->name, text);
  memcpy(outputs[1], outputs[0], sizeof outputs[0]);
  assert_ok(op->either(&s->ctx, &s->model, device, options, &choice), &s->ctx);
  assert_true(choice.on_device);
  assert_ok(moe_neuron_unload(&s->ctx, &s->model), &s->ctx);
}

/* The table has a tensor of that name, use, type and shape. */
static const moe_neuron_operand *has(const session *s, const char *name, moe_neuron_use use, moe_nrt_dtype dtype,
                                     int ndim, ...) {
  const moe_neuron_operand *o = NULL;
  va_list list;
  for (int32_t i = 0; i < s->table.count; i++)
    if (strcmp(s->table.operand[i].name, name) == 0 && s->table.operand[i].use == use) o = &s->table.operand[i];
  if (!o) fail_msg("no tensor %s of use %d", name, (int)use);
  if (o->dtype != dtype || o->ndim != ndim) fail_msg("%s has type %d and %d axes", name, (int)o->dtype, (int)o->ndim);
  va_start(list, ndim);
  for (int i = 0; i < ndim; i++) {
    const int axis = va_arg(list, int);
    if (o->shape[i] != axis) fail_msg("%s: axis %d is %d, and not %d", name, i, (int)o->shape[i], axis);
  }
  va_end(list);
  return o;
}
static int lacks(const session *s, const char *name) {
  for (int32_t i = 0; i < s->table.count; i++)
    if (strcmp(s->table.operand[i].name, name) == 0) return 0;
  return 1;
}

/* ----------------------------------------------------------------------------------------------------- grouped GEMM */

enum { TOTAL = T * K, OUT = 20, IN = 32 };

typedef struct grouped {
  float x[TOTAL * IN], w[E * OUT * IN], bias[E * OUT], dy[TOTAL * OUT], weights[TOTAL], scales[E * OUT * IN];
  uint8_t codes[E * OUT * IN];
  int32_t sizes[E], gather[TOTAL];
  moe_quantized_weight quantized;
  moe_grouped_gemm_args args[2];
} grouped;

/* Any option; `op` reads and writes what it does. */
static void grouped_case(grouped *g, session *s, uint64_t *seed) {
  const moe_dtype dtype = s->p->dtype;
  const int permutation = (int)(test_random(seed) % 3), padding = (int)(test_random(seed) % 4);
  const int32_t sizes[E] = {7, 0, 9, TOTAL - 17 - padding, 1};
  memcpy(g->sizes, sizes, sizeof sizes);
  for (int i = 0; i < TOTAL; i++) g->gather[i] = i < TOTAL - padding || test_random(seed) % 2 ? (i * 5) % TOTAL : -1;
  fill(s->p, g->x, TOTAL * IN, 1, seed, dtype), fill(s->p, g->w, E * OUT * IN, 1, seed, dtype);
  fill(s->p, g->bias, E * OUT, 1, seed, dtype), fill(s->p, g->dy, TOTAL * OUT, 1, seed, dtype);
  fill(s->p, g->weights, TOTAL, 1, seed, MOE_DTYPE_F32);
  for (int d = 0; d < 2; d++)
    g->args[d] = (moe_grouped_gemm_args){.num_tokens = T, .topk = K, .E = E, .N = OUT, .K = IN, .m_sizes = g->sizes,
        .gather_indices = g->gather, .permute_x = permutation == 1, .permute_y = permutation == 2, .X = g->x,
        .W = g->w, .dY = g->dy, .Y = outputs[d][0], .dX = outputs[d][1], .dW = outputs[d][2]};
  const uint64_t random = test_random(seed);
  for (int d = 0; d < 2; d++) {
    moe_grouped_gemm_args *a = &g->args[d];
    a->sum_topk = permutation == 1 && random & 1;
    a->weight_order = (moe_grouped_order)(random >> 1 & 1), a->topk_mode = (moe_topk_mode)(random >> 2 & 1);
    if (random >> 3 & 1) a->bias = g->bias, a->bias_grad = outputs[d][3];
    if (random >> 4 & 1) a->topk_weights = g->weights;
    if (random >> 5 & 1) a->topk_weights_grad = (float *)(void *)outputs[d][4];
    a->weight_grad_dtype = random >> 6 & 1 ? MOE_DTYPE_F32 : MOE_DTYPE_DEFAULT;
    if (random >> 8 & 1)
      a->accumulate = MOE_ACCUMULATE_Y | MOE_ACCUMULATE_DX | MOE_ACCUMULATE_DW |
                      (a->bias_grad ? MOE_ACCUMULATE_BIAS_GRAD : 0) |
                      (a->topk_weights_grad ? MOE_ACCUMULATE_TOPK_WEIGHTS_GRAD : 0);
  }
}

/* In place of W: float scales of every shape, or MX in a layout of Trainium's. */
static void grouped_quantized(grouped *g, uint64_t *seed) {
  const int which = (int)(test_random(seed) % (MOE_WEIGHT_COUNT_ + 2));
  if (which >= MOE_WEIGHT_COUNT_) return;
  g->quantized = (moe_quantized_weight){.element = MOE_ELEMENT_E4M3FN, .scaling = (moe_weight_scaling)which,
      .layout = MOE_MX_LAYOUT_NKI_1X32, .block = 16, .repeat = 1 + which % 2, .codes = g->codes, .scales = g->scales};
  for (size_t i = 0; i < sizeof g->codes; i++) g->codes[i] = (uint8_t)(test_random(seed) % 0x60 | (i % 3 ? 0x80 : 0));
  for (int i = 0; i < E * OUT * IN; i++) g->scales[i] = 0.01f * (float)(i % 50 + 1);
  if (which == MOE_WEIGHT_MX) memset(g->scales, 125, sizeof g->scales);
  for (int d = 0; d < 2; d++) g->args[d].quantized_W = &g->quantized, g->args[d].W = NULL;
}

static void test_grouped(void **state) {
  static grouped g;
  session s;
  uint64_t seed = 5;
  session_open(&s, *(moe_dtype *)*state, 0);
  for (int64_t i = 0; i < test_cases(120, 30); i++)
    for (int op = 0; op < 3; op++) {
      grouped_case(&g, &s, &seed);
      if (op < 2) grouped_quantized(&g, &seed);
      agree(&s, neuron_op_of((standin_op)(STANDIN_GROUPED + op), s.p->dtype), &g.args[0], &g.args[1], NULL, 1);
    }
  session_close(&s);
}

/* Names, types and shapes. */
static void test_grouped_table(void **state) {
  (void)state;
  static grouped g;
  session s;
  uint64_t seed = 6;
  session_open(&s, MOE_DTYPE_BF16, 0);
  grouped_case(&g, &s, &seed);
  moe_grouped_gemm_args a = {.num_tokens = T, .topk = K, .E = E, .N = OUT, .K = IN, .m_sizes = g.sizes,
      .gather_indices = g.gather, .permute_x = 1, .sum_topk = 1, .X = g.x, .W = g.w, .bias = g.bias, .dY = g.dy,
      .topk_weights = g.weights, .topk_weights_grad = g.scales, .Y = g.x, .dX = g.x, .dW = g.w, .bias_grad = g.bias,
      .weight_grad_dtype = MOE_DTYPE_F32};
#define IN_(name, dtype, ...) has(&s, name, MOE_NEURON_INPUT, MOE_NRT_DTYPE_##dtype, __VA_ARGS__)
#define WEIGHT_IN_(name, dtype, ...) has(&s, name, MOE_NEURON_WEIGHT, MOE_NRT_DTYPE_##dtype, __VA_ARGS__)
#define OUT_(name, dtype, ...) has(&s, name, MOE_NEURON_OUTPUT, MOE_NRT_DTYPE_##dtype, __VA_ARGS__)
  assert_ok(moe_neuron_describe_grouped_gemm_bf16(&s.ctx, &a, NULL, &s.table), &s.ctx);
  IN_("m_sizes", INT32, 1, E), IN_("gather_indices", INT32, 1, TOTAL), IN_("X", BFLOAT16, 2, T, IN);
  WEIGHT_IN_("W", BFLOAT16, 3, E, OUT, IN), WEIGHT_IN_("bias", BFLOAT16, 2, E, OUT);
  IN_("topk_weights", FLOAT32, 1, TOTAL), OUT_("Y", BFLOAT16, 2, TOTAL, OUT);
  assert_true(lacks(&s, "dY") && lacks(&s, "dX") && lacks(&s, "bias_grad"));
  assert_ok(moe_neuron_describe_grouped_gemm_dx_bf16(&s.ctx, &a, NULL, &s.table), &s.ctx);
  IN_("X", BFLOAT16, 2, T, IN), IN_("dY", BFLOAT16, 2, TOTAL, OUT), IN_("topk_weights", FLOAT32, 1, TOTAL);
  OUT_("dX", BFLOAT16, 2, T, IN), OUT_("topk_weights_grad", FLOAT32, 1, TOTAL);
  WEIGHT_IN_("bias", BFLOAT16, 2, E, OUT);
  a.topk_weights_grad = NULL, a.sum_topk = 0, a.weight_order = MOE_GROUPED_EKN;
  assert_ok(moe_neuron_describe_grouped_gemm_dx_bf16(&s.ctx, &a, NULL, &s.table), &s.ctx);
  OUT_("dX", BFLOAT16, 2, TOTAL, IN), WEIGHT_IN_("W", BFLOAT16, 3, E, IN, OUT);
  assert_true(lacks(&s, "X") && lacks(&s, "bias"));
  a.accumulate = MOE_ACCUMULATE_DW;
  assert_ok(moe_neuron_describe_grouped_gemm_dw_bf16(&s.ctx, &a, NULL, &s.table), &s.ctx);
  OUT_("dW", FLOAT32, 3, E, IN, OUT), IN_("dW", FLOAT32, 3, E, IN, OUT), OUT_("bias_grad", FLOAT32, 2, E, OUT);
  IN_("topk_weights", FLOAT32, 1, TOTAL);
  assert_true(lacks(&s, "W") && lacks(&s, "bias"));
  a.accumulate = 0;
  moe_quantized_weight q = {.element = MOE_ELEMENT_E4M3FN, .scaling = MOE_WEIGHT_BLOCK, .block = 16, .repeat = 128,
      .codes = g.codes, .scales = g.scales};
  a.quantized_W = &q;
  assert_ok(moe_neuron_describe_grouped_gemm_bf16(&s.ctx, &a, NULL, &s.table), &s.ctx);
  WEIGHT_IN_("W", FP8_E4, 3, E, IN, OUT), WEIGHT_IN_("W_scale", FLOAT32, 5, E, 2, 1, 2, 128);
  a.weight_order = MOE_GROUPED_ENK;
  assert_ok(moe_neuron_describe_grouped_gemm_bf16(&s.ctx, &a, NULL, &s.table), &s.ctx);
  WEIGHT_IN_("W", FP8_E4, 3, E, OUT, IN), WEIGHT_IN_("W_scale", FLOAT32, 4, E, 2, 2, 128);
  q.scaling = MOE_WEIGHT_MX, q.layout = MOE_MX_LAYOUT_NKI_1X32;
  assert_ok(moe_neuron_describe_grouped_gemm_bf16(&s.ctx, &a, NULL, &s.table), &s.ctx);
  WEIGHT_IN_("W", UINT32, 1, E * OUT * IN / 4), WEIGHT_IN_("W_scale", UINT8, 1, E * OUT * IN / 32);
  q.layout = MOE_MX_LAYOUT_PLAIN;
  assert_fails(moe_neuron_describe_grouped_gemm_bf16(&s.ctx, &a, NULL, &s.table), MOE_ERROR_UNSUPPORTED, &s.ctx, "W is");
  a.quantized_W = NULL, a.W = NULL, a.packed_W = g.w, a.packed_W_bytes = sizeof g.w;
  assert_fails(moe_neuron_describe_grouped_gemm_bf16(&s.ctx, &a, NULL, &s.table), MOE_ERROR_UNSUPPORTED, &s.ctx,
               "packed W");
  session_close(&s);
}

/* Sizes and slots that are out of range; no tokens. */
static void test_grouped_slots(void **state) {
  (void)state;
  static grouped g;
  session s;
  uint64_t seed = 8;
  moe_neuron_choice choice;
  session_open(&s, MOE_DTYPE_F32, 0);
  grouped_case(&g, &s, &seed);
  for (int i = 0; i < TOTAL; i++) g.gather[i] = i;
  moe_grouped_gemm_args *a = &g.args[1];
  const moe_context *ctx = &s.ctx;
#define REFUSED_(status, words) \
  assert_fails(moe_neuron_describe_grouped_gemm_f32(&s.ctx, a, NULL, &s.table), MOE_ERROR_##status, ctx, words)
  const int32_t kept = g.sizes[3];
  g.sizes[3] = -1, REFUSED_(INVALID_SHAPE, "m_sizes has a negative count");
  g.sizes[3] = TOTAL, REFUSED_(INVALID_SHAPE, "m_sizes adds up");
  g.sizes[3] = kept, g.gather[3] = -1, REFUSED_(INVALID_INDEX, "gather_indices has -1 at 3");
  g.gather[3] = TOTAL, REFUSED_(INVALID_INDEX, "which is no slot");
  g.gather[3] = 3, g.sizes[3] -= 2, g.gather[TOTAL - 1] = -1;
  assert_ok(moe_neuron_describe_grouped_gemm_f32(&s.ctx, a, NULL, &s.table), ctx);
  g.gather[TOTAL - 1] = -2, REFUSED_(INVALID_INDEX, "gather_indices has -2");
  memset(g.sizes, 0, sizeof g.sizes);
  *a = (moe_grouped_gemm_args){.topk = K, .E = E, .N = OUT, .K = IN, .m_sizes = g.sizes, .W = g.w};
  assert_ok(moe_neuron_describe_grouped_gemm_f32(&s.ctx, a, NULL, &s.table), ctx);
  assert_ok(moe_neuron_or_cpu_grouped_gemm_f32(&s.ctx, &s.model, a, NULL, &choice), ctx);
  assert_int_equal(choice.on_device, 0);
  moe_neuron_report report;
  assert_ok(moe_neuron_compare_grouped_gemm_f32(&s.ctx, a, a, NULL, &report), ctx);
  assert_int_equal(report.agree, 1);
  session_close(&s);
}

int main(void) {
  const struct CMUnitTest tests[] = {OF(test_grouped, F32), OF(test_grouped, BF16), OF(test_grouped, FP16),
      PLAIN(test_grouped_table), PLAIN(test_grouped_slots)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
