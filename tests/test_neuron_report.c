/* The bounds of moe_neuron.h's reports, on random layers. The "device" is the library in binary32 on reversed axes, its
   outputs rounded to the tensors' types: it sums in another order and rounds nothing in between. Every element is
   within its bound, and the bounds are narrow enough to notice what is wrong. */
#include "moe/moe_neuron.h"
#include "support/cases.h"
#include "support/test.h"

enum { AXES = 4 };

/* from [shape] with the axes of `reversed` (bits) reversed, into `to`, which rounds. */
static void reverse(const test_tensor *from, const int64_t *shape, unsigned reversed, test_tensor *to) {
  for (int64_t i = 0; i < from->count; i++) {
    int64_t at = 0, rest = i, stride = 1;
    for (int axis = AXES - 1; axis >= 0; axis--) {
      const int64_t place = rest % shape[axis];
      at += (reversed >> axis & 1 ? shape[axis] - 1 - place : place) * stride;
      rest /= shape[axis], stride *= shape[axis];
    }
    test_tensor_set(to, at, test_tensor_get(from, i));
  }
}

/* The tensors of a case: shapes of four axes, and which of them H and I are. */
enum { LAYER_INPUTS = 7, LAYER_TENSORS = 16 };
typedef struct tensors {
  test_tensor *of[LAYER_TENSORS]; /* x, affinity, wgu, wd, bgu, bd, dy; gate_up, down, y; six gradients */
  int64_t shape[LAYER_TENSORS][AXES];
  unsigned reversed[LAYER_TENSORS];
} tensors;

static tensors list(test_case *c) {
  const moe_blockwise_layer *l = &c->layer;
  const int64_t T = l->T, H = l->H, I = l->I, E = l->E, N = l->N, B = l->B;
  tensors t = {{&c->x, &c->affinity, &c->wgu, &c->wd, &c->bgu, &c->bd, &c->dy, &c->gate_up, &c->down, &c->y},
               {{1, 1, T, H}, {1, 1, T, E}, {E, H, 2, I}, {1, E, I, H}, {1, E, 2, I}, {1, 1, E, H}, {1, 1, T, H},
                {N, 2, I, B}, {1, N, B, H}, {1, 1, T, H}, {1, 1, T, H}, {1, 1, T, E}, {E, H, 2, I}, {1, E, I, H},
                {1, E, 2, I}, {1, 1, E, H}},
               {8, 0, 10, 12, 8, 8, 8, 4, 8, 8, 8, 0, 10, 12, 8, 8}};
  for (int i = 0; i < TEST_GRADIENTS; i++) t.of[10 + i] = &c->grad[i];
  return t;
}

/* The device's copy of a case: binary32, reversed. */
static void reversed_case(test_case *c, test_case *device) {
  *device = *c;
  device->dtype = device->layer.affinity_dtype = device->layer.checkpoint_dtype = device->weight_grad_dtype =
      MOE_DTYPE_F32;
  tensors from = list(c), to = list(device);
  for (int i = 0; i < LAYER_TENSORS; i++) {
    *to.of[i] = test_tensor_new(MOE_DTYPE_F32, from.of[i]->count);
    if (i < LAYER_INPUTS) reverse(from.of[i], from.shape[i], from.reversed[i], to.of[i]);
  }
  moe_blockwise_layer *l = &device->layer;
  l->hidden_states = device->x.data, l->gate_up_proj_weight = device->wgu.data, l->down_proj_weight = device->wd.data;
  if (l->expert_affinities_masked) l->expert_affinities_masked = device->affinity.data;
  if (l->gate_and_up_proj_bias) l->gate_and_up_proj_bias = device->bgu.data;
  if (l->down_proj_bias) l->down_proj_bias = device->bd.data;
  device->y_start = c->y_start;
  for (int i = 0; i < TEST_GRADIENTS; i++) device->grad_start[i] = c->grad_start[i];
}

/* Tensor i of the device, in the CPU's order and type. */
static test_tensor come_back(test_case *c, test_case *device, int i) {
  const tensors from = list(device), like = list(c);
  test_tensor to = test_tensor_new(like.of[i]->dtype, like.of[i]->count);
  reverse(from.of[i], from.shape[i], from.reversed[i], &to);
  return to;
}

/* A weight or gradient [E,K,parts,columns], as `order` has it. */
static test_tensor reorder(const test_tensor *from, moe_weight_order order, int64_t K, int64_t parts, int64_t columns) {
  test_tensor to = test_tensor_new(from->dtype, from->count);
  for (int64_t i = 0; i < from->count; i++) {
    const int64_t e = i / (K * parts * columns), k = i / (parts * columns) % K, p = i / columns % parts;
    const int64_t n = i % columns;
    const int64_t row = order == MOE_ORDER_OUT_IN ? p * columns + n : n * parts + p;
    test_tensor_set(&to, order == MOE_ORDER_IN_OUT ? i : (e * parts * columns + row) * K + k,
                    test_tensor_get(from, i));
  }
  return to;
}

/* The case's weights and both sides' gradients in any order. */
typedef struct ordered {
  moe_weight_orders orders;
  test_tensor gate_up, down, grad[2][2];
} ordered;
static ordered order_case(test_case *c, const test_tensor *device_grad) {
  const moe_blockwise_layer *l = &c->layer;
  ordered o = {.orders = {.gate_up = (moe_weight_order)test_random_range(&c->rng, 0, 2),
      .down = (moe_weight_order)test_random_range(&c->rng, 0, 1)}};
  o.gate_up = reorder(&c->wgu, o.orders.gate_up, l->H, 2, l->I);
  o.down = reorder(&c->wd, o.orders.down, l->I, 1, l->H);
  for (int d = 0; d < 2; d++) {
    const test_tensor *g = d ? device_grad : c->grad;
    o.grad[d][0] = reorder(&g[TEST_DWGU], o.orders.gate_up, l->H, 2, l->I);
    o.grad[d][1] = reorder(&g[TEST_DWD], o.orders.down, l->I, 1, l->H);
  }
  return o;
}
static void order_free(ordered *o) {
  test_tensor *all[] = {&o->gate_up, &o->down, &o->grad[0][0], &o->grad[0][1], &o->grad[1][0], &o->grad[1][1]};
  for (int i = 0; i < 6; i++) test_tensor_free(all[i]);
}

#define COMPARE(function, dtype, ...)                                                                         \
  ((dtype) == MOE_DTYPE_F32    ? moe_neuron_compare_blockwise_mm_##function##_f32(__VA_ARGS__)                \
   : (dtype) == MOE_DTYPE_BF16 ? moe_neuron_compare_blockwise_mm_##function##_bf16(__VA_ARGS__)               \
                               : moe_neuron_compare_blockwise_mm_##function##_fp16(__VA_ARGS__))

static double widest[1 + TEST_DTYPES]; /* the largest part of a bound that was taken */

static void judge(const test_case *c, const moe_neuron_report *report, moe_status status, const moe_context *ctx) {
  char text[4096], line[768];
  if (status != MOE_OK) fail_msg("%s: %s", moe_status_str(status), ctx->message);
  moe_neuron_report_text(report, text, sizeof text);
  if (!report->agree) fail_msg("%s| %s", text, test_case_describe(c, moe_isa_active(), 1, line));
  for (int32_t i = 0; i < report->count; i++)
    if (report->tensor[i].bound > 0)
      widest[c->dtype] = fmax(widest[c->dtype], report->tensor[i].error / report->tensor[i].bound);
}

static void check_forward(test_case *c, test_case *device, moe_context *ctx) {
  test_tensor gate_up, down, y;
  moe_neuron_report report;
  if (test_case_forward(c, ctx) != MOE_OK || test_case_forward(device, ctx) != MOE_OK) fail_msg("%s", ctx->message);
  gate_up = come_back(c, device, 7), down = come_back(c, device, 8), y = come_back(c, device, 9);
  const moe_blockwise_mm_fwd_args cpu = {.layer = c->layer, .device = {.spec = c->spec}, .hints = c->hints,
      .not_accumulating = c->not_accumulating, .gate_up_activations_T = c->gate_up.data,
      .down_activations = c->keep_down_checkpoint ? c->down.data : NULL, .output = c->y.data};
  moe_blockwise_mm_fwd_args other = cpu;
  other.gate_up_activations_T = gate_up.data, other.output = y.data;
  if (cpu.down_activations) other.down_activations = down.data;
  const moe_status status = COMPARE(fwd, c->dtype, ctx, &cpu, &other, NULL, &report);
  judge(c, &report, status, ctx);
  test_tensor_free(&gate_up), test_tensor_free(&down), test_tensor_free(&y);
}

/* From the CPU's checkpoint; limits are met as its type holds them. */
static void check_backward(test_case *c, test_case *device, moe_context *ctx) {
  const tensors from = list(c), to = list(device);
  test_tensor grad[TEST_GRADIENTS];
  moe_neuron_report report;
  moe_layer_config *config = &device->layer.config;
  float *limits[] = {&config->gate_clamp_upper_limit, &config->gate_clamp_lower_limit, &config->up_clamp_upper_limit,
                     &config->up_clamp_lower_limit};
  for (int i = 0; i < 4; i++) *limits[i] = (float)test_dtype_round(c->layer.checkpoint_dtype, (double)*limits[i]);
  for (int i = 7; i < 9; i++) reverse(from.of[i], from.shape[i], from.reversed[i], to.of[i]);
  if (test_case_backward(c, ctx) != MOE_OK || test_case_backward(device, ctx) != MOE_OK) fail_msg("%s", ctx->message);
  moe_blockwise_mm_bwd_args args[2];
  for (int i = 0; i < TEST_GRADIENTS; i++) grad[i] = come_back(c, device, 10 + i);
  ordered o = order_case(c, grad);
  for (int d = 0; d < 2; d++) {
    const test_tensor *g = d ? grad : c->grad;
    args[d] = (moe_blockwise_mm_bwd_args){.layer = c->layer,
        .gate_up_activations_T = c->recompute ? NULL : c->gate_up.data,
        .down_activations = c->keep_down_checkpoint ? c->down.data : NULL, .output_hidden_states_grad = c->dy.data,
        .hints = c->hints, .not_accumulating = c->not_accumulating, .affinity_option = c->affinity_option,
        .kernel_type = c->dropping ? MOE_KERNEL_DROPPING : MOE_KERNEL_DROPLESS, .hidden_states_grad = g[0].data,
        .expert_affinities_masked_grad = g[1].data, .gate_up_proj_weight_grad = o.grad[d][0].data,
        .down_proj_weight_grad = o.grad[d][1].data, .gate_and_up_proj_bias_grad = g[4].data,
        .down_proj_bias_grad = g[5].data,
        .weight_grad_dtype = c->weight_grad_dtype};
    args[d].layer.orders = o.orders;
    args[d].layer.gate_up_proj_weight = o.gate_up.data, args[d].layer.down_proj_weight = o.down.data;
  }
  const moe_status status = COMPARE(bwd, c->dtype, ctx, &args[0], &args[1], NULL, &report);
  judge(c, &report, status, ctx);
  for (int i = 0; i < TEST_GRADIENTS; i++) test_tensor_free(&grad[i]);
  order_free(&o);
}

static void fill_case(test_case *c) {
  const moe_blockwise_layer *l = &c->layer;
  test_fill_uniform(&c->x, &c->rng, 2), test_fill_uniform(&c->dy, &c->rng, 2);
  test_fill_uniform(&c->wgu, &c->rng, 2 / sqrt((double)l->H));
  test_fill_uniform(&c->wd, &c->rng, 2 / sqrt((double)l->I));
  test_fill_uniform(&c->bgu, &c->rng, 0.5), test_fill_uniform(&c->bd, &c->rng, 0.5);
  test_fill_uniform(&c->affinity, &c->rng, 1);
}

/* A clamped value may lie on either side of its limit where g and u are computed again: only with a checkpoint is a
   gradient of such an element known, and bounded as it should be. */
static void test_bounds(void **state) {
  const moe_dtype dtype = *(moe_dtype *)*state;
  const test_limits most = {.T = 24, .H = 80, .I = 70, .E = 5, .K = 3, .B = 9};
  const uint64_t seed = test_seed(0x6e6575726f6e + (uint64_t)dtype);
  moe_context ctx = {.allocate = test_allocate, .release = test_release};
  for (int64_t i = 0; i < test_cases(150, 15); i++) {
    test_case c, device;
    memset(&c, 0, sizeof c);
    c.seed = c.rng = test_case_seed(seed, (uint64_t)i);
    test_case_options(&c, dtype, &most);
    test_case_real_activation(&c);
    if (test_with(&c.rng, 0.2)) c.layer.config.clamp |= MOE_CLAMP_ACTIVATION_UPPER;
    c.layer.config.activation_clamp_upper_limit = 0.4f;
    if (!c.layer.config.skip_gate && test_with(&c.rng, 0.2)) c.layer.config.up_softcap = 1.25f;
    c.accumulate_output = 0, c.accumulate = 0, c.omit = 0;
    test_route_case(&c);
    test_case_allocate(&c);
    fill_case(&c);
    reversed_case(&c, &device);
    check_forward(&c, &device, &ctx);
    check_backward(&c, &device, &ctx);
    c.recompute = device.recompute = 1;
    if (dtype == MOE_DTYPE_F32 && c.layer.checkpoint_dtype == MOE_DTYPE_F32) check_backward(&c, &device, &ctx);
    const tensors mine = list(&device);
    for (int k = 0; k < LAYER_TENSORS; k++) test_tensor_free(mine.of[k]);
    test_case_free(&c);
  }
  print_message("%s: at most %.2f of a bound\n", test_dtype_name(dtype), widest[dtype]);
  assert_true(widest[dtype] > 0.02); /* a bound that nothing comes near finds nothing */
}

int main(void) {
  const struct CMUnitTest tests[] = {EACH_DTYPE(test_bounds)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
