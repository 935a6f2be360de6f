/* A small layer, its arguments, and NEFFs for the stand-in made from them. */
#ifndef NEURON_FIXTURE_H
#define NEURON_FIXTURE_H

#include <dlfcn.h>
#include <stdatomic.h>

#include "neff.h"
#include "support/test.h"

enum { T = 13, H = 64, I = 48, E = 5, K = 2, B = 8, N = 9, SLOTS = N * B };

/* The tensors, as the widest type has them. */
typedef struct problem {
  moe_dtype dtype;
  float x[(T + 1) * H], affinity[(T + 1) * E], gate_up[E * H * 2 * I], down[E * I * H], gate_up_bias[E * 2 * I],
      down_bias[E * H], dy[(T + 1) * H];
  int32_t index[T * K], ids[SLOTS + 8], experts[N], conditions[N + 2];
  float weights[T * K];
  /* outputs: those of the CPU, those of the device */
  struct {
    float y[(T + 1) * H * 2], saved[N * 2 * I * B], down[N * B * H];
    float dx[(T + 1) * H], da[(T + 1) * E], dgate_up[E * H * 2 * I], ddown[E * I * H], dgate_up_bias[E * 2 * I],
        ddown_bias[E * H];
  } out[2];
  moe_blockwise_mm_fwd_args fwd[2];
  moe_blockwise_mm_bwd_args bwd[2];
} problem;

/* n random floats within +-size, in place narrowed to the problem's type. */
static inline void fill(const problem *p, float *to, int64_t n, float size, uint64_t *seed, moe_dtype dtype) {
  for (int64_t i = 0; i < n; i++) {
    const float v = (float)((int64_t)(test_random(seed) % 2001) - 1000) * size / 1000;
    (void)p;
    if (dtype == MOE_DTYPE_F32) to[i] = v;
    else if (dtype == MOE_DTYPE_BF16) (void)moe_bf16_from_f32(NULL, (moe_bf16 *)to + i, &v, 1);
    else (void)moe_fp16_from_f32(NULL, (moe_fp16 *)to + i, &v, 1);
  }
}

static inline void problem_args(problem *p, int skip_token) {
  const moe_blockwise_layer layer = {.T = T, .H = H, .I = I, .E = E, .N = N, .B = B, .hidden_states = p->x,
      .expert_affinities_masked = p->affinity, .gate_up_proj_weight = p->gate_up, .down_proj_weight = p->down,
      .gate_and_up_proj_bias = p->gate_up_bias, .down_proj_bias = p->down_bias, .token_position_to_id = p->ids,
      .block_to_expert = p->experts, .conditions = p->conditions, .skip_token = skip_token};
  for (int d = 0; d < 2; d++) {
    p->fwd[d] = (moe_blockwise_mm_fwd_args){.layer = layer, .gate_up_activations_T = p->out[d].saved,
        .down_activations = p->out[d].down, .output = p->out[d].y};
    p->bwd[d] = (moe_blockwise_mm_bwd_args){.layer = layer, .gate_up_activations_T = p->out[0].saved,
        .down_activations = p->out[0].down, .output_hidden_states_grad = p->dy, .hidden_states_grad = p->out[d].dx,
        .expert_affinities_masked_grad = p->out[d].da, .gate_up_proj_weight_grad = p->out[d].dgate_up,
        .down_proj_weight_grad = p->out[d].ddown, .gate_and_up_proj_bias_grad = p->out[d].dgate_up_bias,
        .down_proj_bias_grad = p->out[d].ddown_bias};
  }
}

/* The caller's memory, counted. */
static atomic_int host_live;
static inline void *take(void *user, size_t bytes) {
  (void)user;
  atomic_fetch_add(&host_live, 1);
  return malloc(bytes);
}
static inline void give(void *user, void *memory, size_t bytes) {
  (void)user, (void)bytes;
  atomic_fetch_sub(&host_live, 1);
  free(memory);
}

/* Random tokens, weights and routing; expert 4 has no token. */
static inline problem *problem_new(moe_dtype dtype, uint64_t seed, int skip_token) {
  problem *p = calloc(1, sizeof *p);
  p->dtype = dtype;
  fill(p, p->x, T * H, 1, &seed, dtype), fill(p, p->dy, T * H, 2, &seed, dtype);
  fill(p, p->gate_up, E * H * 2 * I, 0.2f, &seed, dtype), fill(p, p->down, E * I * H, 0.2f, &seed, dtype);
  fill(p, p->gate_up_bias, E * 2 * I, 0.5f, &seed, dtype), fill(p, p->down_bias, E * H, 0.5f, &seed, dtype);
  for (int t = 0; t < T; t++)
    for (int k = 0; k < K; k++) p->index[t * K + k] = (t + k * (1 + t % 3)) % (E - 1);
  fill(p, p->weights, T * K, 1, &seed, MOE_DTYPE_F32);
  const moe_route_blocks_args route = {.T = T, .E = E, .K = K, .B = B, .N = N, .expert_index = p->index,
      .expert_weights = p->weights, .skip_token = skip_token, .expert_affinities_masked = p->affinity,
      .token_position_to_id = p->ids, .block_to_expert = p->experts, .conditions = p->conditions};
  moe_context ctx = {.allocate = take, .release = give};
  if (moe_route_blocks(&ctx, &route) != MOE_OK) fail_msg("%s", ctx.message);
  problem_args(p, skip_token);
  return p;
}

/* ------------------------------------------------------------------------------------------------------------- NEFF */

typedef struct field {
  const char *name;
  size_t offset;
} field;

#define FIELD_(type, name, member) {name, offsetof(type, member)}
#define LAYER_FIELDS(type)                                                                                           \
  FIELD_(type, "hidden_states", layer.hidden_states),                                                                \
      FIELD_(type, "expert_affinities_masked", layer.expert_affinities_masked),                                      \
      FIELD_(type, "gate_up_proj_weight", layer.gate_up_proj_weight),                                                \
      FIELD_(type, "down_proj_weight", layer.down_proj_weight),                                                      \
      FIELD_(type, "gate_and_up_proj_bias", layer.gate_and_up_proj_bias),                                            \
      FIELD_(type, "down_proj_bias", layer.down_proj_bias),                                                          \
      FIELD_(type, "token_position_to_id", layer.token_position_to_id),                                              \
      FIELD_(type, "block_to_expert", layer.block_to_expert), FIELD_(type, "conditions", layer.conditions),          \
      FIELD_(type, "gate_up_activations_T", gate_up_activations_T),                                                  \
      FIELD_(type, "down_activations", down_activations)
static const field fwd_fields[] = {LAYER_FIELDS(moe_blockwise_mm_fwd_args),
                                   FIELD_(moe_blockwise_mm_fwd_args, "output", output), {NULL, 0}};
static const field bwd_fields[] = {
    LAYER_FIELDS(moe_blockwise_mm_bwd_args),
    FIELD_(moe_blockwise_mm_bwd_args, "output_hidden_states_grad", output_hidden_states_grad),
    FIELD_(moe_blockwise_mm_bwd_args, "hidden_states_grad", hidden_states_grad),
    FIELD_(moe_blockwise_mm_bwd_args, "expert_affinities_masked_grad", expert_affinities_masked_grad),
    FIELD_(moe_blockwise_mm_bwd_args, "gate_up_proj_weight_grad", gate_up_proj_weight_grad),
    FIELD_(moe_blockwise_mm_bwd_args, "down_proj_weight_grad", down_proj_weight_grad),
    FIELD_(moe_blockwise_mm_bwd_args, "gate_and_up_proj_bias_grad", gate_and_up_proj_bias_grad),
    FIELD_(moe_blockwise_mm_bwd_args, "down_proj_bias_grad", down_proj_bias_grad), {NULL, 0}};
#define GROUPED_FIELD_(member) FIELD_(moe_grouped_gemm_args, #member, member)
static const field grouped_fields[] = {GROUPED_FIELD_(m_sizes), GROUPED_FIELD_(gather_indices), GROUPED_FIELD_(X),
    GROUPED_FIELD_(W), GROUPED_FIELD_(dY), GROUPED_FIELD_(topk_weights), GROUPED_FIELD_(Y), GROUPED_FIELD_(dX),
    GROUPED_FIELD_(dW), {NULL, 0}};

/* Where an operand's pointer belongs; scales are the quantised weight's. */
static inline void place(const field *fields, const moe_neuron_operand *o, const standin_kernel *kernel,
                         standin_tensor *t) {
  const int gate_up = strncmp(o->name, "gate_up_proj", 12) == 0 && kernel->quantized_gate_up_offset;
  const int down = strncmp(o->name, "down_proj", 9) == 0 && kernel->quantized_down_offset;
  const size_t name = strlen(o->name);
  if ((gate_up || down) && strcmp(o->name + name - 5, "_bias") != 0) {
    t->place = gate_up ? STANDIN_IN_GATE_UP : STANDIN_IN_DOWN;
    t->offset = (uint32_t)(strcmp(o->name + name - 6, "_scale") == 0 ? offsetof(moe_quantized_weight, scales)
                                                                     : offsetof(moe_quantized_weight, codes));
    return;
  }
  while (fields->name && strcmp(fields->name, o->name) != 0) fields++;
  if (!fields->name) fail_msg("no field %s", o->name);
  t->place = STANDIN_IN_ARGS, t->offset = (uint32_t)fields->offset;
}

/* A NEFF that runs `op` on what the table lists; absent tensors are left out. */
static inline void neff_of(standin_neff *neff, standin_op op, moe_dtype dtype, const void *args, size_t bytes,
                           const field *fields, const moe_neuron_table *table) {
  standin_kernel *k = &neff->kernel;
  const moe_blockwise_layer *l = op == STANDIN_FWD   ? &((const moe_blockwise_mm_fwd_args *)args)->layer
                                 : op == STANDIN_BWD ? &((const moe_blockwise_mm_bwd_args *)args)->layer : NULL;
  memset(neff, 0, sizeof *neff);
  neff->header.pkg_version = 2, neff->header.header_size = sizeof neff->header;
  neff->header.data_size = sizeof neff->kernel, neff->header.neff_version_major = 2, neff->header.lnc_size = 2;
  k->op = op, k->dtype = dtype;
  memcpy(k->args, args, bytes);
  if (l && l->quantized_gate_up_proj_weight)
    k->gate_up = *l->quantized_gate_up_proj_weight,
    k->quantized_gate_up_offset = (uint32_t)offsetof(moe_blockwise_mm_fwd_args, layer.quantized_gate_up_proj_weight);
  if (l && l->quantized_down_proj_weight)
    k->down = *l->quantized_down_proj_weight,
    k->quantized_down_offset = (uint32_t)offsetof(moe_blockwise_mm_fwd_args, layer.quantized_down_proj_weight);
  for (const field *f = fields; f->name; f++) memset(k->args + f->offset, 0, sizeof(void *));
  for (int32_t i = 0; i < table->count; i++) {
    const moe_neuron_operand *o = &table->operand[i];
    if (!o->data) continue;
    standin_tensor *t = &k->tensor[k->count++];
    snprintf(t->name, sizeof t->name, "%s", o->name);
    t->usage = o->use == MOE_NEURON_OUTPUT, t->dtype = (uint32_t)o->dtype, t->size = o->bytes;
    t->ndim = (uint32_t)o->ndim, t->order = (uint32_t)o->order;
    for (int32_t d = 0; d < o->ndim; d++) t->shape[d] = (uint32_t)o->shape[d];
    place(fields, o, k, t);
  }
}

static inline standin_tensor *neff_tensor(standin_neff *neff, const char *name) {
  for (uint32_t i = 0; i < neff->kernel.count; i++)
    if (strcmp(neff->kernel.tensor[i].name, name) == 0) return &neff->kernel.tensor[i];
  fail_msg("the NEFF has no %s", name);
  return NULL;
}

static inline void neff_without(standin_neff *neff, const char *name) {
  standin_tensor *t = neff_tensor(neff, name), *end = neff->kernel.tensor + --neff->kernel.count;
  memmove(t, t + 1, (size_t)((char *)end - (char *)t));
}

/* ------------------------------------------------------------------------------------------------------- the device */

/* The runtime that the tests load, held open, so that its counts stay. */
static const standin_control *control;
static inline const standin_control *hold(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) fail_msg("%s", dlerror());
  return (const standin_control *)dlsym(library, "standin");
}

/* Nothing is alive, and nothing was done that libnrt does not allow. */
static inline void assert_clean(void) {
  assert_int_equal(control->live(), 0);
  assert_int_equal(control->violations(), 0);
  assert_int_equal(host_live, 0);
}

static inline void assert_ok(moe_status status, const moe_context *ctx) {
  if (status != MOE_OK) fail_msg("%s: %s", moe_status_str(status), ctx->message);
}

/* The status, and a sentence with these words. */
static inline void assert_fails(moe_status got, moe_status want, const moe_context *ctx, const char *words) {
  if (got != want || !strstr(ctx->message, words))
    fail_msg("%s \"%s\", and not %s \"%s\"", moe_status_str(got), ctx->message, moe_status_str(want), words);
}

#endif
