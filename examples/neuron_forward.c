/* neuron_forward.c: one MoE layer on a Trainium, where there is one, and on the CPU in any case; compared.

     cc -O2 -I. examples/neuron_forward.c -o neuron_forward -lm -ldl && ./neuron_forward [kernel.neff [field=name ...]]

   The kernel is nki-library's moe_cte for the shapes below, compiled to a NEFF: docs/trainium.md tells how. field=name
   says what the NEFF calls a field ("hidden_states=input0"), field= that it does not take it. Without a kernel, or
   without Neuron's runtime, the layer runs on the CPU, and the program says why. */
#define MOE_IMPLEMENTATION
#include "moe/moe_neuron.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { T = 256, H = 512, I = 256, E = 4, K = 2, B = 128, N = (T * K - (E - 1) + B - 1) / B + E - 1, NAMES = 32 };

static moe_bf16 x[T][H], gate_up[E][H][2][I], down[E][I][H], y[T][H], y_device[T][H];
static float weights[T][K], affinities[T][E];
static int32_t chosen[T][K], ids[N][B], experts[N];

static void *take(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void give(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }

static void fill(moe_bf16 *to, int64_t n, float scale) {
  static uint64_t state = 88172645463325252u;
  for (int64_t i = 0; i < n; i++) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    const float value = ((float)(uint32_t)(state >> 32) * 0x1p-31f - 1.0f) * scale;
    moe_bf16_from_f32(NULL, &to[i], &value, 1);
  }
}

/* Random tokens and weights, each token with two experts, sorted into blocks. Padding rows have id -1. */
static moe_status prepare(moe_context *ctx) {
  fill(&x[0][0], T * H, 1), fill(&gate_up[0][0][0][0], E * H * 2 * I, 0.06f), fill(&down[0][0][0], E * I * H, 0.08f);
  for (int t = 0; t < T; t++)
    for (int k = 0; k < K; k++) chosen[t][k] = (t * 7 + k * (1 + t % 3)) % E, weights[t][k] = k ? 0.375f : 0.625f;
  const moe_route_blocks_args route = {.T = T, .E = E, .K = K, .B = B, .N = N, .skip_token = 1,
      .expert_index = &chosen[0][0], .expert_weights = &weights[0][0], .expert_affinities_masked = affinities,
      .token_position_to_id = &ids[0][0], .block_to_expert = experts};
  return moe_route_blocks(ctx, &route);
}

static void *read_file(const char *path, size_t *bytes) {
  FILE *file = fopen(path, "rb");
  if (!file) return NULL;
  fseek(file, 0, SEEK_END);
  const long size = ftell(file);
  rewind(file);
  void *data = size > 0 ? malloc((size_t)size) : NULL;
  *bytes = data ? fread(data, 1, (size_t)size, file) : 0;
  fclose(file);
  return data;
}

/* "field=name" into a map; "field=" is not bound. */
static int32_t read_names(int count, char **argument, moe_neuron_name *names) {
  int32_t n = 0;
  for (int i = 0; i < count && n < NAMES; i++) {
    char *equals = strchr(argument[i], '=');
    if (!equals) continue;
    *equals = 0;
    names[n++] = (moe_neuron_name){argument[i], equals[1] ? equals + 1 : NULL};
  }
  return n;
}

int main(int argc, char **argv) {
  moe_context ctx = {.allocate = take, .release = give};
  moe_neuron neuron;
  moe_neuron_model model;
  moe_neuron_choice choice;
  moe_neuron_report report;
  moe_neuron_name names[NAMES];
  size_t bytes = 0;
  double seconds = 0;
  const moe_neuron_options options = {.names = names, .names_count = read_names(argc - 2, argv + 2, names),
      .seconds = &seconds};
  moe_blockwise_mm_fwd_args args = {.layer = {.T = T, .H = H, .I = I, .E = E, .N = N, .B = B, .max_rows = T * K,
      .hidden_states = x, .expert_affinities_masked = affinities, .gate_up_proj_weight = gate_up,
      .down_proj_weight = down, .token_position_to_id = &ids[0][0], .block_to_expert = experts, .skip_token = 1},
      .device = {.spec = MOE_CTE_SHARD_ON_I}, .output = y_device};
  void *neff = argc > 1 ? read_file(argv[1], &bytes) : NULL;
  if (argc > 1 && !neff) return fprintf(stderr, "neuron_forward: cannot read %s\n", argv[1]), 2;
  moe_status status = prepare(&ctx);

  /* Neither needs to succeed: the model then knows what is missing. */
  moe_neuron_open(&ctx, &neuron, NULL);
  moe_neuron_load(&ctx, &neuron, neff, bytes, -1, &model);

  if (status == MOE_OK)
    status = moe_neuron_or_cpu_blockwise_mm_fwd_bf16(&ctx, &model, &args, &options, &choice);
  if (status == MOE_OK) {
    printf("%d tokens, %d of %d experts each, on the %s: %s\n", T, K, E, choice.on_device ? "device" : "CPU",
           choice.why);
  }
  if (status == MOE_OK && choice.on_device) {
    char text[1024];
    moe_blockwise_mm_fwd_args cpu = args;
    cpu.output = y;
    status = moe_neuron_check_blockwise_mm_fwd_bf16(&ctx, &model, &cpu, &args, &options, &report);
    moe_neuron_report_text(&report, text, sizeof text);
    if (status == MOE_OK) printf("%.3f ms\n%s", seconds * 1e3, text);
  }
  if (status != MOE_OK) fprintf(stderr, "neuron_forward: %s\n", ctx.message);
  moe_neuron_unload(&ctx, &model);
  moe_neuron_close(&neuron);
  free(neff);
  return status == MOE_OK && (!choice.on_device || report.agree) ? 0 : 1;
}
