/* Every operation of moe_neuron.h, with every option that has tensors of its own, against the stand-in for libnrt:
   names, types and shapes are what they should be, what is bound, run and read back is to the bit what the CPU
   computes, and the report finds nothing. */
#include "support/mlp.h"

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
  if (op->op == STANDIN_FORWARD || op->op == STANDIN_BACKWARD) /* on the device experts lie together */
    ((moe_blockwise_layer *)(void *)s->neff.kernel.args)->orders.per_expert = 0;
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

/* -------------------------------------------------------------------------------------------------------- the layer */

typedef struct layer {
  int32_t valid;
  float in_scale[2][E];
  uint8_t codes[2][T * H];
  float scales[2][T * H];
  moe_quantized_activation activation[2];
  const void *weight[3][E];       /* of experts: gate and up, down, up */
  void *grad[2][3][E];            /* likewise */
  moe_blockwise_mm_fwd_args fwd[2];
  moe_blockwise_mm_bwd_args bwd[2];
} layer;

/* Weights in any order, apart, or an expert at a time; gradients likewise. */
static void layer_orders(layer *y, problem *p, uint64_t random) {
  moe_weight_orders *o = &y->fwd[0].layer.orders;
  const size_t size = p->dtype == MOE_DTYPE_F32 ? 4 : 2, of[3] = {H * 2 * I, I * H, H * I};
  *o = (moe_weight_orders){.gate_up = (moe_weight_order)(random % 3), .down = (moe_weight_order)(random >> 2 & 1),
      .per_expert = random >> 3 & 1};
  o->up_apart = random >> 4 & 1 && o->gate_up != MOE_ORDER_INTERLEAVED;
  const void *plain[3] = {p->gate_up, p->down, (char *)p->gate_up + E * H * I * size};
  for (int e = 0; e < E; e++)
    for (int w = 0; w < 3; w++) {
      const size_t at = (size_t)e * size * (w == 0 && o->up_apart ? H * I : of[w]);
      y->weight[w][e] = (const char *)plain[w] + at;
      for (int d = 0; d < 2; d++) y->grad[d][w][e] = outputs[d][w] + (size_t)e * 4 * of[w];
    }
  for (int d = 0; d < 2; d++) {
    moe_blockwise_layer *l = &y->fwd[d].layer;
    moe_blockwise_mm_bwd_args *b = &y->bwd[d];
    l->orders = *o;
    l->gate_up_proj_weight = o->per_expert ? (const void *)y->weight[0] : plain[0];
    l->down_proj_weight = o->per_expert ? (const void *)y->weight[1] : plain[1];
    l->up_proj_weight = !o->up_apart ? NULL : o->per_expert ? (const void *)y->weight[2] : plain[2];
    if (o->up_apart && l->config.skip_gate && random >> 5 & 1) l->gate_up_proj_weight = NULL;
    b->gate_up_proj_weight_grad = o->per_expert ? (void *)y->grad[d][0] : outputs[d][0];
    b->down_proj_weight_grad = o->per_expert ? (void *)y->grad[d][1] : outputs[d][1];
    b->up_proj_weight_grad = !o->up_apart ? NULL : o->per_expert ? (void *)y->grad[d][2] : outputs[d][2];
  }
}

/* Hidden states or dY as codes and scales. */
static void layer_quantized(layer *y, int which, uint64_t random) {
  moe_quantized_activation *a = &y->activation[which];
  *a = (moe_quantized_activation){.element = random & 1 ? MOE_ELEMENT_E4M3FN : MOE_ELEMENT_E2M1,
      .codes = y->codes[which], .scales = y->scales[which]};
  for (int i = 0; i < T * H; i++) y->codes[which][i] = (uint8_t)(i * 7 % 0x60), y->scales[which][i] = 0.01f;
  if (random & 1) a->float_scales = random >> 1 & 1, a->block_rows = random >> 2 & 1, a->block_columns = 16;
  if (!a->float_scales) memset(y->scales[which], 122, sizeof y->scales[which]);
}

static void layer_options(layer *y, const session *s, uint64_t *seed) {
  const uint64_t random = test_random(seed);
  moe_blockwise_layer *l = &y->fwd[0].layer;
  moe_layer_config *o = &l->config;
  *l = s->p->fwd[0].layer;
  o->affinity_mode = (moe_affinity_mode)(random % MOE_AFFINITY_COUNT_);
  o->activation = (moe_activation)((random >> 4) % MOE_ACT_COUNT_), o->skip_gate = random >> 12 & 1;
  o->clamp = (uint32_t)(random >> 13) & (o->skip_gate ? 12 : 31);
  o->gate_clamp_upper_limit = o->up_clamp_upper_limit = o->activation_clamp_upper_limit = 0.8f;
  o->gate_clamp_lower_limit = o->up_clamp_lower_limit = -0.7f;
  if (random >> 18 & 1 && !o->skip_gate) o->up_softcap = 1.5f, o->up_offset = 1;
  l->checkpoint_dtype = (moe_dtype)((random >> 20) % 4), l->affinity_dtype = MOE_DTYPE_F32;
  l->accumulation_dtype = random >> 22 & 1 ? s->p->dtype : MOE_DTYPE_DEFAULT;
  if (random >> 23 & 1) y->valid = T - 3, l->num_valid_tokens = &y->valid;
  for (int e = 0; e < E; e++) y->in_scale[0][e] = 0.01f * (float)(e + 1), y->in_scale[1][e] = 0.02f;
  if ((random >> 24 & 3) == 0) {
    l->mx.activations = (moe_mx_rounding){.enabled = 1, .element = MOE_ELEMENT_E4M3FN, .cast = MOE_CAST_SATURATE};
    l->mx.gate_up_in_scale = y->in_scale[0], l->mx.down_in_scale = y->in_scale[1];
  }
  if (random >> 26 & 1) layer_quantized(y, 0, random >> 30), l->quantized_hidden_states = &y->activation[0];
}

static void layer_case(layer *y, session *s, uint64_t *seed) {
  memset(y->fwd, 0, sizeof y->fwd), memset(y->bwd, 0, sizeof y->bwd);
  layer_options(y, s, seed);
  const uint64_t random = test_random(seed);
  y->fwd[1].layer = y->fwd[0].layer;
  layer_orders(y, s->p, random >> 8);
  const int on_h = y->fwd[0].layer.config.affinity_mode != MOE_AFFINITY_ON_I;
  if (random & 1) layer_quantized(y, 1, random >> 16);
  for (int d = 0; d < 2; d++) {
    moe_blockwise_mm_fwd_args *f = &y->fwd[d];
    moe_blockwise_mm_bwd_args *b = &y->bwd[d];
    b->layer = f->layer;
    f->gate_up_activations_T = outputs[d][3], f->down_activations = on_h && random >> 1 & 1 ? outputs[d][4] : NULL;
    f->scaled_intermediate_checkpoint_T = random >> 2 & 1 ? outputs[d][5] : NULL, f->output = outputs[d][6];
    f->accumulate = random >> 3 & 1 ? MOE_ACCUMULATE_OUTPUT : 0;
    b->gate_up_activations_T = random >> 4 & 1 ? s->p->out[0].saved : NULL;
    b->down_activations = on_h && random >> 5 & 1 ? s->p->out[0].down : NULL;
    b->scaled_intermediate_checkpoint_T = random >> 6 & 1 ? s->p->out[0].dgate_up : NULL;
    b->output_hidden_states_grad = s->p->dy;
    b->quantized_output_hidden_states_grad = random & 1 ? &y->activation[1] : NULL;
    b->hidden_states_grad = outputs[d][7], b->expert_affinities_masked_grad = outputs[d][8];
    b->gate_and_up_proj_bias_grad = outputs[d][9], b->down_proj_bias_grad = outputs[d][10];
    b->weight_grad_dtype = random >> 7 & 1 ? MOE_DTYPE_F32 : MOE_DTYPE_DEFAULT;
    b->accumulate = (uint32_t)(random >> 32) & 63;
    if (random >> 40 & 1) b->hidden_states_grad = NULL; /* also where it would be accumulated */
    if (random >> 41 & 1) b->down_proj_bias_grad = NULL;
  }
}

static void test_layer(void **state) {
  static layer y;
  session s;
  uint64_t seed = 41;
  for (int skip_token = 0; skip_token < 2; skip_token++) {
    session_open(&s, *(moe_dtype *)*state, skip_token);
    for (int64_t i = 0; i < test_cases(100, 20); i++) {
      layer_case(&y, &s, &seed);
      const int bounded = !y.fwd[0].layer.mx.activations.enabled;
      agree(&s, neuron_op_of(STANDIN_FORWARD, s.p->dtype), &y.fwd[0], &y.fwd[1], NULL, 1);
      agree(&s, neuron_op_of(STANDIN_BACKWARD, s.p->dtype), &y.bwd[0], &y.bwd[1], NULL, bounded);
    }
    session_close(&s);
    control->reset();
  }
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
  const int which = (int)(test_random(seed) % (MOE_WEIGHT_GROUP + 2));
  if (which >= MOE_WEIGHT_GROUP) return;
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
  assert_fails(moe_neuron_describe_grouped_gemm_bf16(&s.ctx, &a, NULL, &s.table), MOE_ERROR_UNSUPPORTED, &s.ctx,
               "W is");
  q.scaling = MOE_WEIGHT_GROUP;
  assert_fails(moe_neuron_describe_grouped_gemm_bf16(&s.ctx, &a, NULL, &s.table), MOE_ERROR_UNSUPPORTED, &s.ctx,
               "W has scales");
  q.scaling = MOE_WEIGHT_STATIC, q.out_in = 1;
  assert_fails(moe_neuron_describe_grouped_gemm_bf16(&s.ctx, &a, NULL, &s.table), MOE_ERROR_UNSUPPORTED, &s.ctx,
               "W is in rows");
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

/* --------------------------------------------------------------------------------------------------- MXFP8 operands */

typedef struct mlp {
  moe_mlp_mxfp8 m;
  uint64_t seed;
  float *x, *gate_up, *down, *dy;
  moe_mlp_fwd_mxfp8_args fwd[2];
  moe_mlp_bwd_mxfp8_args bwd[2];
  moe_matmul_mxfp8_args matmul[2];
} mlp;

/* An operand in any state that the device has. */
static moe_mxfp8_operand mlp_any(mlp *c, const float *values, int64_t F, int64_t K_) {
  const int plain = c->m.format.layout == MOE_MX_LAYOUT_PLAIN || K_ % 32 != 0;
  const int state = plain ? MLP_PLAIN : (int)(test_random(&c->seed) % 3);
  return mlp_operand(&c->m.format, values, F, K_, state, (moe_mx_scales)(test_random(&c->seed) % 3)).given;
}
static moe_mxfp8_operand mlp_any_transposed(mlp *c, const float *values, int64_t F, int64_t K_) {
  return mlp_any(c, mlp_transposed(values, F, K_), K_, F);
}

static void mlp_options(mlp *c) {
  static const moe_mx_layout layout[] = {MOE_MX_LAYOUT_PLAIN, MOE_MX_LAYOUT_NKI_1X32, MOE_MX_LAYOUT_NKI_WRAPX,
                                         MOE_MX_LAYOUT_NKI_WRAPX_WHOLE};
  const uint64_t random = test_random(&c->seed);
  const int64_t step = random % 4 ? 32 : 5; /* PLAIN: any size */
  moe_layer_config *o = &c->m.config;
  c->m = (moe_mlp_mxfp8){.S = step * (1 + (int64_t)(random >> 8 & 1)), .H = step * (1 + (int64_t)(random >> 9 & 1)),
      .I = step * (1 + (int64_t)(random >> 10 & 1)), .format = {.layout = layout[random % 4],
      .element = random >> 11 & 1 ? MOE_ELEMENT_E5M2 : MOE_ELEMENT_E4M3FN, .use_scale_rule = random >> 12 & 1}};
  o->activation = (moe_activation)(random >> 16 & 15) % MOE_ACT_COUNT_;
  o->clamp = (uint32_t)(random >> 20) & 31;
  o->gate_clamp_upper_limit = 1.3f, o->gate_clamp_lower_limit = -0.9f, o->up_clamp_upper_limit = 0.7f;
  o->up_clamp_lower_limit = -1.1f, o->activation_clamp_upper_limit = 0.6f;
  if (random >> 25 & 1) o->up_offset = 1;
  if (random >> 26 & 1) o->up_softcap = 2;
  c->m.unrounded_gate_act = random >> 27 & 1;
}

static void mlp_case(mlp *c) {
  mlp_options(c);
  const int64_t S = c->m.S, H_ = c->m.H, I_ = c->m.I;
  c->x = mlp_values(&c->seed, S * H_, 1), c->gate_up = mlp_values(&c->seed, 2 * I_ * H_, 0.3f);
  c->down = mlp_values(&c->seed, H_ * I_, 0.3f), c->dy = mlp_values(&c->seed, S * H_, 1);
  c->fwd[0] = (moe_mlp_fwd_mxfp8_args){.mlp = c->m, .hidden_states = mlp_any(c, c->x, S, H_),
      .gate_up_weights = mlp_any(c, c->gate_up, 2 * I_, H_), .down_weight = mlp_any(c, c->down, H_, I_)};
  c->matmul[0] = (moe_matmul_mxfp8_args){.M = S, .N = 2 * I_, .K = H_, .format = c->m.format,
      .a = c->fwd[0].hidden_states, .b = c->fwd[0].gate_up_weights,
      .output_dtype = (moe_dtype)(test_random(&c->seed) % 4)};
  c->bwd[0] = (moe_mlp_bwd_mxfp8_args){.mlp = c->m, .hidden_states = c->fwd[0].hidden_states,
      .gate_up_weights = c->fwd[0].gate_up_weights, .down_weight = c->fwd[0].down_weight,
      .output_grad = mlp_any(c, c->dy, S, H_), .weight_grad_dtype = (moe_dtype)(test_random(&c->seed) % 4)};
  const uint64_t given = test_random(&c->seed);
  moe_mlp_bwd_mxfp8_args *b = &c->bwd[0];
  if (given & 1) b->gate_weight_T = mlp_any_transposed(c, c->gate_up, I_, H_);
  if (given & 2) b->up_weight_T = mlp_any_transposed(c, c->gate_up + I_ * H_, I_, H_);
  if (given & 4) b->down_weight_T = mlp_any_transposed(c, c->down, H_, I_);
  if (given & 8) b->hidden_states_T = mlp_any_transposed(c, c->x, S, H_);
  if (given & 16) b->output_grad_T = mlp_any_transposed(c, c->dy, S, H_);
  const float *saved = mlp_values(&c->seed, S * I_, 1);
  if (given & 32) b->hidden_T = mlp_any_transposed(c, saved, S, I_);
  if (given & 64) b->gate_pre = mlp_bf16(saved, S * I_);
  if (given & 128) b->gate_act = mlp_bf16(saved, S * I_);
  if (given & 256) b->up = mlp_bf16(saved, S * I_);
  if (given & 512) b->hidden = mlp_bf16(saved, S * I_);
  if (given & 1024) b->accumulate = MOE_ACCUMULATE_GATE_UP_WEIGHT_GRAD | MOE_ACCUMULATE_DOWN_WEIGHT_GRAD;
}

static void mlp_outputs(mlp *c, uint64_t wanted) {
  c->fwd[1] = c->fwd[0], c->bwd[1] = c->bwd[0], c->matmul[1] = c->matmul[0];
  for (int d = 0; d < 2; d++) {
    moe_mlp_bwd_mxfp8_args *b = &c->bwd[d];
    void **saved[] = {&c->fwd[d].gate_pre, &c->fwd[d].gate_act, &c->fwd[d].up, &c->fwd[d].hidden};
    void **gradient[] = {&b->gate_pre_scratch, &b->gate_act_scratch, &b->up_scratch, &b->hidden_scratch, &b->d_gate,
        &b->d_up, &b->d_gate_up_T, &b->hidden_states_grad, &b->gate_up_weight_grad, &b->down_weight_grad};
    c->matmul[d].output = c->fwd[d].output = outputs[d][11];
    for (int i = 0; i < 4; i++) *saved[i] = wanted >> i & 1 ? outputs[d][i] : NULL;
    for (int i = 0; i < 10; i++) *gradient[i] = wanted >> i & 1 ? outputs[d][i] : NULL;
    if (!b->gate_up_weight_grad) b->accumulate &= ~(uint32_t)MOE_ACCUMULATE_GATE_UP_WEIGHT_GRAD;
    if (!b->down_weight_grad) b->accumulate &= ~(uint32_t)MOE_ACCUMULATE_DOWN_WEIGHT_GRAD;
  }
}

static void test_mlp(void **state) {
  (void)state;
  mlp c = {.seed = 0x6d6c70};
  session s;
  session_open(&s, MOE_DTYPE_BF16, 0);
  for (int64_t i = 0; i < test_cases(120, 30); i++) {
    mlp_case(&c);
    mlp_outputs(&c, i % 3 ? test_random(&c.seed) | 512 : 1023);
    agree(&s, neuron_op_of(STANDIN_MATMUL, MOE_DTYPE_BF16), &c.matmul[0], &c.matmul[1], NULL, 1);
    agree(&s, neuron_op_of(STANDIN_MLP_FORWARD, MOE_DTYPE_BF16), &c.fwd[0], &c.fwd[1], NULL, 1);
    agree(&s, neuron_op_of(STANDIN_MLP_BACKWARD, MOE_DTYPE_BF16), &c.bwd[0], &c.bwd[1], NULL, 1);
    mlp_release();
  }
  session_close(&s);
}

/* Names, types and shapes: words, and scales where the layout has them. */
static void test_mlp_table(void **state) {
  (void)state;
  enum { S = 64, H_ = 96, I_ = 32 };
  static moe_bf16 t[S * H_ * 8];
  static uint8_t scales[S * H_ * 8];
  session s;
  const moe_mlp_mxfp8 m = {.S = S, .H = H_, .I = I_, .format = {.layout = MOE_MX_LAYOUT_NKI_WRAPX}};
  const moe_mxfp8_operand plain = {.data = t}, swizzled = {.data = t, .is_swizzled = 1};
  const moe_mxfp8_operand words = {.data = t, .scales = scales, .is_swizzled = 1};
  moe_mxfp8_operand packed = words, oversized = words;
  packed.scales_layout = MOE_MX_SCALES_NKI_PACKED, oversized.scales_layout = MOE_MX_SCALES_NKI_OVERSIZED;
  moe_mlp_fwd_mxfp8_args fwd = {.mlp = m, .hidden_states = plain, .gate_up_weights = words, .down_weight = packed,
      .gate_pre = t, .gate_act = t, .up = t, .hidden = t, .output = t};
  moe_mlp_bwd_mxfp8_args bwd = {.mlp = m, .output_grad = swizzled, .hidden_states = plain, .gate_up_weights = words,
      .gate_weight_T = plain, .up_weight_T = plain, .down_weight_T = oversized, .hidden_states_T = plain,
      .output_grad_T = packed, .hidden_T = plain, .gate_pre = t, .up = t, .d_gate_up_T = t, .hidden_scratch = t,
      .hidden_states_grad = t, .gate_up_weight_grad = t, .down_weight_grad = t, .weight_grad_dtype = MOE_DTYPE_F32,
      .accumulate = MOE_ACCUMULATE_DOWN_WEIGHT_GRAD};
  session_open(&s, MOE_DTYPE_BF16, 0);
  assert_ok(moe_neuron_describe_mlp_fwd_mxfp8(&s.ctx, &fwd, NULL, &s.table), &s.ctx);
  assert_string_equal(IN_("hidden_states", BFLOAT16, 2, S, H_)->alias, "hidden");
  WEIGHT_IN_("gate_up_weights", UINT32, 2, H_ / 4, 2 * I_);
  assert_string_equal(WEIGHT_IN_("gate_up_weights_scales", UINT8, 2, H_ / 32, 2 * I_)->alias, "gate_up_scales");
  WEIGHT_IN_("down_weight", UINT32, 2, I_ / 4, H_), WEIGHT_IN_("down_weight_scales", UINT8, 2, 128, H_);
  assert_string_equal(OUT_("gate_pre", BFLOAT16, 2, S, I_)->alias, "save_gate_pre");
  OUT_("gate_act", BFLOAT16, 2, S, I_), OUT_("up", BFLOAT16, 2, S, I_), OUT_("hidden", BFLOAT16, 2, S, I_);
  OUT_("output", BFLOAT16, 2, S, H_);
  assert_true(lacks(&s, "hidden_states_scales"));
  assert_ok(moe_neuron_describe_mlp_bwd_mxfp8(&s.ctx, &bwd, NULL, &s.table), &s.ctx);
  IN_("output_grad", BFLOAT16, 2, H_ / 4, 4 * S), WEIGHT_IN_("gate_weight_T", BFLOAT16, 2, H_, I_);
  assert_string_equal(WEIGHT_IN_("down_weight_T", UINT32, 2, H_ / 4, I_)->alias, "down_proj_weight");
  WEIGHT_IN_("down_weight_T_scales", UINT8, 2, H_ / 4, I_), IN_("output_grad_T_scales", UINT8, 2, 128, H_);
  IN_("hidden_states_T", BFLOAT16, 2, H_, S), IN_("hidden_T", BFLOAT16, 2, I_, S), IN_("gate_pre", BFLOAT16, 2, S, I_);
  assert_string_equal(IN_("hidden", BFLOAT16, 2, S, I_)->alias, "intermediate");
  OUT_("hidden_scratch", BFLOAT16, 2, S, I_), OUT_("d_gate_up_T", BFLOAT16, 2, 2 * I_, S);
  OUT_("hidden_states_grad", BFLOAT16, 2, S, H_), OUT_("gate_up_weight_grad", FLOAT32, 2, 2 * I_, H_);
  OUT_("down_weight_grad", FLOAT32, 2, H_, I_), IN_("down_weight_grad", FLOAT32, 2, H_, I_);
  fwd.down_weight.is_swizzled = 0, fwd.down_weight.scales_layout = MOE_MX_SCALES_OWN;
  assert_fails(moe_neuron_describe_mlp_fwd_mxfp8(&s.ctx, &fwd, NULL, &s.table), MOE_ERROR_UNSUPPORTED, &s.ctx,
               "down_weight is in no layout");
  fwd.down_weight = packed, fwd.row_count = 32;
  assert_fails(moe_neuron_describe_mlp_fwd_mxfp8(&s.ctx, &fwd, NULL, &s.table), MOE_ERROR_UNSUPPORTED, &s.ctx, "row_");
  fwd.row_count = 0, fwd.mlp.S = -1;
  assert_fails(moe_neuron_describe_mlp_fwd_mxfp8(&s.ctx, &fwd, NULL, &s.table), MOE_ERROR_INVALID_SHAPE, &s.ctx, "S");
  session_close(&s);
}

/* ---------------------------------------------------------------------------------------------------- any arguments */

static int64_t any_size(uint64_t *seed, int huge) {
  static const int64_t size[] = {-1, 0, 1, 2, 3, 4, 5, 32, 64, 128, 512, INT32_MAX, (int64_t)1 << 40, INT64_MAX};
  return size[test_random(seed) % (huge ? 14 : 9)];
}

/* Bytes of any kind into what is no size and no pointer. */
static void any_options(uint64_t *seed, moe_layer_config *c, moe_weight_orders *o, moe_mx_operands *mx) {
  const uint64_t random = test_random(seed);
  c->activation = (moe_activation)(random % 10), c->affinity_mode = (moe_affinity_mode)(random >> 4 & 7);
  c->skip_gate = random >> 8 & 1, c->clamp = (uint32_t)(random >> 12 & 63);
  o->gate_up = (moe_weight_order)(random >> 20 & 3), o->down = (moe_weight_order)(random >> 22 & 1);
  o->up_apart = random >> 24 & 1, mx->activations.enabled = random >> 28 & 1, mx->weights.enabled = random >> 29 & 1;
}

/* The table of any arguments: it is refused with a sentence, or each operand has the bytes that its shape says. */
static int described(session *s, const neuron_op *op, const void *args) {
  if (op->describe(&s->ctx, args, NULL, &s->table) != MOE_OK) {
    assert_true(s->ctx.message[0]);
    return 0;
  }
  for (int32_t i = 0; i < s->table.count; i++) {
    const moe_neuron_operand *o = &s->table.operand[i];
    uint64_t elements = 1;
    for (int32_t d = 0; d < o->ndim; d++) elements *= (uint64_t)o->shape[d];
    assert_true(o->order == MOE_NEURON_ORDER_GATE_UP_BIAS || o->bytes % (elements ? elements : 1) == 0);
  }
  return 1;
}

static void test_any_arguments(void **state) {
  (void)state;
  static int32_t zeros[1 << 18];
  static moe_quantized_weight q;
  session s;
  uint64_t seed = 12;
  int fit[8] = {0};
  session_open(&s, MOE_DTYPE_BF16, 0);
  for (int64_t i = 0; i < test_cases(20000, 2000); i++) {
    moe_blockwise_mm_fwd_args f = {.layer = {.T = any_size(&seed, 0), .H = any_size(&seed, 1), .I = any_size(&seed, 1),
        .E = any_size(&seed, 0), .N = any_size(&seed, 0), .B = any_size(&seed, 0), .token_position_to_id = zeros,
        .block_to_expert = zeros}, .device = {.spec = (moe_cte_spec)(test_random(&seed) % 8)}, .output = zeros};
    moe_blockwise_mm_bwd_args b = {.accumulate = (uint32_t)test_random(&seed) & 63};
    moe_grouped_gemm_args g = {.num_tokens = any_size(&seed, 0), .topk = any_size(&seed, 0), .E = any_size(&seed, 0),
        .N = any_size(&seed, 1), .K = any_size(&seed, 1), .permute_x = (int)(test_random(&seed) % 2),
        .sum_topk = (int)(test_random(&seed) % 2), .weight_order = (moe_grouped_order)(test_random(&seed) % 3),
        .topk_weights_grad = test_random(&seed) % 2 ? (float *)(void *)zeros : NULL, .m_sizes = zeros,
        .accumulate = (uint32_t)(test_random(&seed) % 32) << 10};
    moe_mlp_fwd_mxfp8_args m = {.mlp = {.S = any_size(&seed, 1), .H = any_size(&seed, 1), .I = any_size(&seed, 1),
        .format = {.layout = (moe_mx_layout)(test_random(&seed) % 8)}}};
    any_options(&seed, &f.layer.config, &f.layer.orders, &f.layer.mx);
    q = (moe_quantized_weight){.element = (moe_element)(test_random(&seed) % 7), .codes = zeros, .scales = zeros,
        .scaling = (moe_weight_scaling)(test_random(&seed) % 7), .layout = (moe_mx_layout)(test_random(&seed) % 9),
        .scales_layout = (moe_mx_scales)(test_random(&seed) % 5), .block = any_size(&seed, 1),
        .repeat = any_size(&seed, 1)};
    if (test_random(&seed) % 2) f.layer.quantized_gate_up_proj_weight = f.layer.quantized_down_proj_weight = &q;
    if (test_random(&seed) % 2) g.quantized_W = &q;
    b.layer = f.layer;
    moe_mxfp8_operand any = {.data = zeros, .scales = test_random(&seed) % 2 ? (uint8_t *)zeros : NULL,
        .is_swizzled = (int)(test_random(&seed) % 2), .scales_layout = (moe_mx_scales)(test_random(&seed) % 4)};
    m.hidden_states = m.gate_up_weights = m.down_weight = any, m.output = zeros;
    const moe_mlp_bwd_mxfp8_args n = {.mlp = m.mlp, .output_grad = any, .hidden_T = any, .hidden_states = any,
        .gate_up_weights = any, .down_weight_T = any, .hidden_states_grad = zeros, .accumulate = f.layer.config.clamp};
    const void *args[] = {&f, &b, &g, &g, &g, NULL, &m, &n};
    for (int op = 0; op < 8; op++)
      if (args[op]) fit[op] += described(&s, neuron_op_of((standin_op)op, MOE_DTYPE_BF16), args[op]);
  }
  for (int op = 0; op < 8; op++) assert_true(fit[op] > 2 || op == STANDIN_MATMUL);
  session_close(&s);
}

int main(void) {
  const struct CMUnitTest tests[] = {OF(test_layer, F32), OF(test_layer, BF16), OF(test_layer, FP16),
      OF(test_grouped, F32), OF(test_grouped, BF16), OF(test_grouped, FP16),
      PLAIN(test_grouped_table), PLAIN(test_grouped_slots), PLAIN(test_mlp), PLAIN(test_mlp_table),
      PLAIN(test_any_arguments)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
