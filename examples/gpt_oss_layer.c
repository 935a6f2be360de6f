/* gpt_oss_layer.c: one MoE layer of gpt-oss, run from the tensors as its checkpoint stores them, and checked.

     cc -O2 -I. examples/gpt_oss_layer.c -o gpt_oss_layer -lm && ./gpt_oss_layer

   The checkpoint holds MXFP4: *_blocks uint8 [E,rows,K/32,16], *_scales uint8 [E,rows,K/32], rows of gate and up
   interleaved, biases in bf16. Nothing is unpacked beforehand. The check follows the model's published formulas, in
   double:

     the 4 experts with the largest router logits, weighted by the softmax of these
     g = x*Wg + bg up to 7, u = x*Wu + bu within 7;  m = g * sigmoid(1.702 g) * (u + 1);  y = sum of w * (m*Wd + bd) */
#define MOE_IMPLEMENTATION
#include "moe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { T = 96, H = 320, I = 352, E = 16, K = 4, B = 32 };

/* The checkpoint's tensors, here random. */
static uint8_t mlp1_blocks[E][2 * I][H / 32][16], mlp1_scales[E][2 * I][H / 32];
static uint8_t mlp2_blocks[E][H][I / 32][16], mlp2_scales[E][H][I / 32];
static moe_bf16 mlp1_bias[E][2 * I], mlp2_bias[E][H], gate_weight[H][E], gate_bias[E];
static moe_bf16 x[T][H], y[T][H];

static uint64_t random_state = 88172645463325252u;
static uint32_t random_bits(void) {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return (uint32_t)(random_state >> 32);
}

static void fill(moe_bf16 *to, int64_t n, float scale) {
  for (int64_t i = 0; i < n; i++) {
    const float value = ((float)random_bits() * 0x1p-31f - 1.0f) * scale;
    moe_bf16_from_f32(NULL, &to[i], &value, 1);
  }
}

static double widen(moe_bf16 bits) {
  float value;
  moe_bf16_to_f32(NULL, &value, &bits, 1);
  return value;
}

static void fill_all(void) {
  uint8_t *const blocks[] = {&mlp1_blocks[0][0][0][0], &mlp2_blocks[0][0][0][0]};
  uint8_t *const scales[] = {&mlp1_scales[0][0][0], &mlp2_scales[0][0][0]};
  const size_t bytes[] = {sizeof mlp1_blocks, sizeof mlp2_blocks};
  for (int w = 0; w < 2; w++) {
    for (size_t i = 0; i < bytes[w]; i++) blocks[w][i] = (uint8_t)random_bits();
    for (size_t i = 0; i < bytes[w] / 16; i++) scales[w][i] = (uint8_t)(120 + random_bits() % 4);
  }
  fill(&x[0][0], T * H, 1), fill(&gate_weight[0][0], H * E, 0.1f), fill(gate_bias, E, 0.1f);
  fill(&mlp1_bias[0][0], E * 2 * I, 1), fill(&mlp2_bias[0][0], E * H, 1);
}

/* -------------------------------------------------------------------------------------------------------- the layer */

static void *allocate(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void release(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }

static moe_status run_layer(moe_context *ctx) {
  enum { N = (T * K - (E - 1) + B - 1) / B + E - 1 };
  static float logits[T][E], weights[T][K], affinities[T + 1][E];
  static int32_t chosen[T][K], ids[N * B], experts[N], conditions[N + 1];
  static moe_bf16 gate_up_bias[E][2][I]; /* the library wants gate, then up */
  for (int e = 0; e < E; e++)
    for (int i = 0; i < 2 * I; i++) gate_up_bias[e][i % 2][i / 2] = mlp1_bias[e][i];

  const moe_router_topk_args router = {.T = T, .H = H, .E = E, .K = K, .hidden_states = x, .router_weight = gate_weight,
      .router_bias = gate_bias, .router_logits = &logits[0][0], .expert_index = &chosen[0][0],
      .expert_weights = &weights[0][0]};
  const moe_route_blocks_args route = {.T = T, .E = E, .K = K, .B = B, .N = N, .expert_index = &chosen[0][0],
      .expert_weights = &weights[0][0], .expert_affinities_masked = affinities, .token_position_to_id = ids,
      .block_to_expert = experts, .conditions = conditions};
  const moe_quantized_weight gate_up = {.element = MOE_ELEMENT_E2M1, .layout = MOE_MX_LAYOUT_GPT_OSS,
      .codes = mlp1_blocks, .scales = mlp1_scales};
  const moe_quantized_weight down = {.element = MOE_ELEMENT_E2M1, .layout = MOE_MX_LAYOUT_GPT_OSS, .codes = mlp2_blocks,
      .scales = mlp2_scales};
  const moe_blockwise_mm_fwd_args forward = {.layer = {.T = T, .H = H, .I = I, .E = E, .N = N, .B = B,
      .max_rows = T * K, .hidden_states = x, .expert_affinities_masked = affinities,
      .quantized_gate_up_proj_weight = &gate_up, .quantized_down_proj_weight = &down,
      .gate_and_up_proj_bias = gate_up_bias, .down_proj_bias = mlp2_bias, .token_position_to_id = ids, .block_to_expert = experts, .conditions = conditions,
      .config = {.activation = MOE_ACT_SWISH, .up_offset = 1, .gate_clamp_upper_limit = 7, .up_clamp_upper_limit = 7,
          .up_clamp_lower_limit = -7, .clamp = MOE_CLAMP_GATE_UPPER | MOE_CLAMP_UP_UPPER | MOE_CLAMP_UP_LOWER}},
      .output = y};
  moe_status status = moe_router_topk_bf16(ctx, &router);
  if (status == MOE_OK) status = moe_route_blocks(ctx, &route);
  if (status == MOE_OK) status = moe_blockwise_mm_fwd_bf16(ctx, &forward);
  return status;
}

/* -------------------------------------------------------------------------------------------------------- the check */

/* Element k of a row: the low half of a byte is the even one. */
static double mxfp4(uint8_t (*blocks)[16], const uint8_t *scales, int k) {
  static const double value[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
  return ldexp(value[blocks[k / 32][k % 32 / 2] >> (k % 2 * 4) & 15], scales[k / 32] - 127);
}

static void expert_adds(int t, int e, double weight, double *sum) {
  double m[I];
  for (int i = 0; i < I; i++) {
    double g = widen(mlp1_bias[e][2 * i]), u = widen(mlp1_bias[e][2 * i + 1]);
    for (int h = 0; h < H; h++) {
      g += widen(x[t][h]) * mxfp4(mlp1_blocks[e][2 * i], mlp1_scales[e][2 * i], h);
      u += widen(x[t][h]) * mxfp4(mlp1_blocks[e][2 * i + 1], mlp1_scales[e][2 * i + 1], h);
    }
    g = fmin(g, 7), u = fmax(fmin(u, 7), -7);
    m[i] = g / (1 + exp(-1.702 * g)) * (u + 1);
  }
  for (int h = 0; h < H; h++) {
    double d = widen(mlp2_bias[e][h]);
    for (int i = 0; i < I; i++) d += m[i] * mxfp4(mlp2_blocks[e][h], mlp2_scales[e][h], i);
    sum[h] += weight * d;
  }
}

/* The largest difference of token t's outputs, in units of their root mean square. */
static double check_token(int t) {
  double z[E], sum[H] = {0}, total = 0, square = 0, worst = 0;
  int best[K];
  for (int e = 0; e < E; e++) {
    z[e] = widen(gate_bias[e]);
    for (int h = 0; h < H; h++) z[e] += widen(x[t][h]) * widen(gate_weight[h][e]);
  }
  double left[E];
  memcpy(left, z, sizeof left);
  for (int k = 0; k < K; k++) {
    best[k] = 0;
    for (int e = 1; e < E; e++)
      if (left[e] > left[best[k]]) best[k] = e;
    left[best[k]] = -INFINITY;
    total += exp(z[best[k]]);
  }
  for (int k = 0; k < K; k++) expert_adds(t, best[k], exp(z[best[k]]) / total, sum);
  for (int h = 0; h < H; h++) square += sum[h] * sum[h] / H, worst = fmax(worst, fabs(sum[h] - widen(y[t][h])));
  return worst / sqrt(square);
}

int main(void) {
  moe_context ctx = {.allocate = allocate, .release = release};
  fill_all();
  if (run_layer(&ctx) != MOE_OK) return fprintf(stderr, "gpt_oss_layer: %s\n", ctx.message), 1;
  double worst = 0;
  for (int t = 0; t < T; t += 8) worst = fmax(worst, check_token(t));
  printf("%d tokens, %d of %d experts each, %s: outputs within %.4f of their root mean square of the formulas\n", T, K,
         E, moe_isa_name(moe_isa_active()), worst);
  return worst < 0x1p-6 ? 0 : 1; /* m and y are rounded to bf16: 2^-9 each, and sums of them */
}
