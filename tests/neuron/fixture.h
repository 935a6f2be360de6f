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

/* Where a tensor's pointer is: in the arguments or, where `pointer` is not 0, in a struct that they point to there. */
typedef struct field {
  const char *name;
  size_t offset, pointer, bytes;
} field;

#define FIELD_(type, name, member) {name, offsetof(type, member), 0, 0}
#define OWN_(type, member) FIELD_(type, #member, member)
#define NESTED_(type, name, pointer, nested, member) \
  {name, offsetof(nested, member), offsetof(type, pointer), sizeof(nested)}
#define WEIGHT_(type, name, scales_name, pointer)            \
  NESTED_(type, name, pointer, moe_quantized_weight, codes), \
      NESTED_(type, scales_name, pointer, moe_quantized_weight, scales)
#define ACTIVATION_(type, name, pointer)                         \
  NESTED_(type, name, pointer, moe_quantized_activation, codes), \
      NESTED_(type, name "_scale", pointer, moe_quantized_activation, scales)
#define LAYER_(type, member) FIELD_(type, #member, layer.member)
#define LAYER_FIELDS(type)                                                                                    \
  ACTIVATION_(type, "hidden_states", layer.quantized_hidden_states),                                          \
      WEIGHT_(type, "gate_up_proj_weight", "gate_up_proj_scale", layer.quantized_gate_up_proj_weight),        \
      WEIGHT_(type, "down_proj_weight", "down_proj_scale", layer.quantized_down_proj_weight),                 \
      LAYER_(type, hidden_states), LAYER_(type, expert_affinities_masked), LAYER_(type, gate_up_proj_weight), \
      LAYER_(type, up_proj_weight), LAYER_(type, down_proj_weight), LAYER_(type, gate_and_up_proj_bias),      \
      LAYER_(type, down_proj_bias), LAYER_(type, token_position_to_id), LAYER_(type, block_to_expert),        \
      LAYER_(type, conditions), LAYER_(type, num_valid_tokens),                                               \
      FIELD_(type, "gate_up_in_scale", layer.mx.gate_up_in_scale),                                            \
      FIELD_(type, "down_in_scale", layer.mx.down_in_scale), OWN_(type, gate_up_activations_T),               \
      OWN_(type, down_activations), OWN_(type, scaled_intermediate_checkpoint_T)
static const field fwd_fields[] = {LAYER_FIELDS(moe_blockwise_mm_fwd_args), OWN_(moe_blockwise_mm_fwd_args, output),
                                   {NULL, 0, 0, 0}};
#define BWD_(member) OWN_(moe_blockwise_mm_bwd_args, member)
#define BWD_OUT_(member) FIELD_(moe_blockwise_mm_bwd_args, #member "_out", member), BWD_(member)
static const field bwd_fields[] = {
    LAYER_FIELDS(moe_blockwise_mm_bwd_args),
    ACTIVATION_(moe_blockwise_mm_bwd_args, "output_hidden_states_grad", quantized_output_hidden_states_grad),
    BWD_(output_hidden_states_grad), BWD_OUT_(hidden_states_grad), BWD_OUT_(expert_affinities_masked_grad),
    BWD_OUT_(gate_up_proj_weight_grad), BWD_OUT_(up_proj_weight_grad), BWD_OUT_(down_proj_weight_grad),
    BWD_(gate_and_up_proj_bias_grad), BWD_(down_proj_bias_grad), {NULL, 0, 0, 0}};
#define GROUPED_(member) OWN_(moe_grouped_gemm_args, member)
static const field grouped_fields[] = {
    WEIGHT_(moe_grouped_gemm_args, "W", "W_scale", quantized_W), GROUPED_(m_sizes), GROUPED_(gather_indices),
    GROUPED_(X), GROUPED_(W), GROUPED_(bias), GROUPED_(dY), GROUPED_(topk_weights), GROUPED_(Y), GROUPED_(dX),
    GROUPED_(topk_weights_grad), GROUPED_(dW), GROUPED_(bias_grad), {NULL, 0, 0, 0}};
#define MX_(type, member) FIELD_(type, #member, member.data), FIELD_(type, #member "_scales", member.scales)
static const field matmul_fields[] = {MX_(moe_matmul_mxfp8_args, a), MX_(moe_matmul_mxfp8_args, b),
                                      OWN_(moe_matmul_mxfp8_args, output), {NULL, 0, 0, 0}};
#define MLP_FWD_(member) OWN_(moe_mlp_fwd_mxfp8_args, member)
static const field mlp_fwd_fields[] = {
    MX_(moe_mlp_fwd_mxfp8_args, hidden_states), MX_(moe_mlp_fwd_mxfp8_args, gate_up_weights),
    MX_(moe_mlp_fwd_mxfp8_args, down_weight), MLP_FWD_(gate_pre), MLP_FWD_(gate_act), MLP_FWD_(up), MLP_FWD_(hidden),
    MLP_FWD_(output), {NULL, 0, 0, 0}};
#define MLP_MX_(member) MX_(moe_mlp_bwd_mxfp8_args, member)
#define MLP_BWD_(member) OWN_(moe_mlp_bwd_mxfp8_args, member)
static const field mlp_bwd_fields[] = {
    MLP_MX_(output_grad), MLP_MX_(hidden_states), MLP_MX_(gate_up_weights), MLP_MX_(gate_weight_T),
    MLP_MX_(up_weight_T), MLP_MX_(down_weight), MLP_MX_(down_weight_T), MLP_MX_(hidden_states_T),
    MLP_MX_(output_grad_T), MLP_MX_(hidden_T), MLP_BWD_(gate_pre), MLP_BWD_(gate_act), MLP_BWD_(up), MLP_BWD_(hidden),
    MLP_BWD_(gate_pre_scratch), MLP_BWD_(gate_act_scratch), MLP_BWD_(up_scratch), MLP_BWD_(hidden_scratch),
    MLP_BWD_(d_gate), MLP_BWD_(d_up), MLP_BWD_(d_gate_up_T), MLP_BWD_(hidden_states_grad),
    MLP_BWD_(gate_up_weight_grad), MLP_BWD_(down_weight_grad), {NULL, 0, 0, 0}};

/* An operation of moe_neuron.h. */
typedef struct neuron_op {
  const char *name;
  standin_op op;
  moe_dtype dtype;
  size_t bytes; /* of its arguments */
  moe_status (*describe)(moe_context *ctx, const void *args, const moe_neuron_options *o, moe_neuron_table *table);
  moe_status (*device)(moe_context *ctx, moe_neuron_model *model, const void *args, const moe_neuron_options *o);
  moe_status (*either)(moe_context *ctx, moe_neuron_model *model, const void *args, const moe_neuron_options *o,
                       moe_neuron_choice *choice);
  moe_status (*compare)(moe_context *ctx, const void *args, const void *device_args, const moe_neuron_options *o,
                        moe_neuron_report *report);
  moe_status (*check)(moe_context *ctx, moe_neuron_model *model, const void *args, const void *device_args,
                      const moe_neuron_options *o, moe_neuron_report *report);
  moe_status (*cpu)(moe_context *ctx, const void *args);
} neuron_op;

/* A short name for the table of functions. */
typedef moe_neuron_options options_;
#define OP_FUNCTIONS_(op, type, kind, NAME)                                                                   \
  static moe_status describe_##op(moe_context *ctx, const void *args, const options_ *o,                      \
                                  moe_neuron_table *table) {                                                  \
    return moe_neuron_describe_##op(ctx, (const type *)args, o, table);                                       \
  }                                                                                                           \
  static moe_status device_##op(moe_context *ctx, moe_neuron_model *m, const void *args, const options_ *o) { \
    return moe_neuron_##op(ctx, m, (const type *)args, o);                                                    \
  }                                                                                                           \
  static moe_status either_##op(moe_context *ctx, moe_neuron_model *m, const void *args, const options_ *o,   \
                                moe_neuron_choice *choice) {                                                  \
    return moe_neuron_or_cpu_##op(ctx, m, (const type *)args, o, choice);                                     \
  }                                                                                                           \
  static moe_status compare_##op(moe_context *ctx, const void *args, const void *device, const options_ *o,   \
                                 moe_neuron_report *report) {                                                 \
    return moe_neuron_compare_##op(ctx, (const type *)args, (const type *)device, o, report);                 \
  }                                                                                                           \
  static moe_status check_##op(moe_context *ctx, moe_neuron_model *m, const void *args, const void *device,   \
                               const options_ *o, moe_neuron_report *report) {                                \
    return moe_neuron_check_##op(ctx, m, (const type *)args, (const type *)device, o, report);                \
  }                                                                                                           \
  static moe_status cpu_##op(moe_context *ctx, const void *args) { return moe_##op(ctx, (const type *)args); }
#define OP_FUNCTIONS_OF_(name, type, NAME) MOE_NEURON_OP_LIST(OP_FUNCTIONS_, name, NAME)
MOE_DTYPE_LIST(OP_FUNCTIONS_OF_)
MOE_NEURON_MXFP8_OP_LIST(OP_FUNCTIONS_)
static const neuron_op neuron_ops[] = {
#define OP_ROW_(op, type, kind, NAME)                                                                          \
  {#op, STANDIN_##kind, MOE_DTYPE_##NAME, sizeof(type), describe_##op, device_##op, either_##op, compare_##op, \
   check_##op, cpu_##op},
#define OP_ROWS_OF_(name, type, NAME) MOE_NEURON_OP_LIST(OP_ROW_, name, NAME)
    MOE_DTYPE_LIST(OP_ROWS_OF_) MOE_NEURON_MXFP8_OP_LIST(OP_ROW_)};
enum { NEURON_OPS = sizeof neuron_ops / sizeof *neuron_ops };

static inline const neuron_op *neuron_op_of(standin_op op, moe_dtype dtype) {
  for (size_t i = 0; i < NEURON_OPS; i++)
    if (neuron_ops[i].op == op && neuron_ops[i].dtype == dtype) return &neuron_ops[i];
  fail_msg("no such operation");
  return NULL;
}

static inline const field *fields_of(standin_op op) {
  switch (op) {
    case STANDIN_FORWARD: return fwd_fields;
    case STANDIN_BACKWARD: return bwd_fields;
    case STANDIN_MATMUL: return matmul_fields;
    case STANDIN_MLP_FORWARD: return mlp_fwd_fields;
    case STANDIN_MLP_BACKWARD: return mlp_bwd_fields;
    default: return grouped_fields;
  }
}

/* The nested struct that args point to at f->pointer, from 1; 0: there is none. */
static inline uint32_t nest(standin_kernel *k, const void *args, const field *f) {
  const void *from;
  uint32_t n = 0;
  memcpy(&from, (const char *)args + f->pointer, sizeof from);
  if (!f->pointer || !from) return 0;
  while (n < STANDIN_NESTED && k->nested[n].pointer && k->nested[n].pointer != f->pointer) n++;
  if (n == STANDIN_NESTED || f->bytes > sizeof k->nested[n].bytes) fail_msg("no room for what is nested");
  if (!k->nested[n].pointer) memcpy(k->nested[n].bytes, from, f->bytes);
  k->nested[n].pointer = (uint32_t)f->pointer;
  return n + 1;
}

/* Where an operand's pointer belongs: of two the nested one, if it is there. */
static inline void place(const field *fields, const moe_neuron_operand *o, const void *args, standin_kernel *kernel,
                         standin_tensor *t) {
  const field *own = NULL;
  for (; fields->name; fields++) {
    if (strcmp(fields->name, o->name) != 0) continue;
    t->nested = nest(kernel, args, fields), t->offset = (uint32_t)fields->offset;
    if (t->nested) return;
    if (!fields->pointer) own = fields;
  }
  if (!own) fail_msg("no field %s", o->name);
  t->offset = (uint32_t)own->offset;
}

/* A NEFF that runs `op` on what the table lists; absent tensors are left out. */
static inline void neff_of(standin_neff *neff, const neuron_op *op, const void *args, const moe_neuron_table *table) {
  standin_kernel *k = &neff->kernel;
  const field *fields = fields_of(op->op);
  memset(neff, 0, sizeof *neff);
  neff->header.pkg_version = 2, neff->header.header_size = sizeof neff->header;
  neff->header.data_size = sizeof neff->kernel, neff->header.neff_version_major = 2, neff->header.lnc_size = 2;
  k->op = op->op, k->dtype = op->dtype;
  if (op->bytes > sizeof k->args) fail_msg("no room for the arguments");
  memcpy(k->args, args, op->bytes);
  for (const field *f = fields; f->name; f++)
    if (!f->pointer) memset(k->args + f->offset, 0, sizeof(void *));
  for (int32_t i = 0; i < table->count; i++) {
    const moe_neuron_operand *o = &table->operand[i];
    if (!o->data) continue;
    if (k->count == STANDIN_TENSORS) fail_msg("no room for the tensors");
    standin_tensor *t = &k->tensor[k->count++];
    snprintf(t->name, sizeof t->name, "%s", o->name);
    t->usage = o->use == MOE_NEURON_OUTPUT, t->dtype = (uint32_t)o->dtype, t->size = o->bytes;
    t->ndim = (uint32_t)o->ndim, t->order = (uint32_t)o->order;
    for (int32_t d = 0; d < o->ndim; d++) t->shape[d] = (uint32_t)o->shape[d];
    place(fields, o, args, k, t);
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

/* --------------------------------------------------------------------------------------------------------- sessions */

/* What a test has at hand. */
typedef struct session {
  moe_context ctx;
  moe_neuron neuron;
  moe_neuron_model model;
  moe_neuron_table table;
  standin_neff neff;
  problem *p;
} session;

static inline int begin(void **state) {
  (void)state;
  control = hold(STANDIN);
  control->reset();
  return 0;
}

static inline void session_open(session *s, moe_dtype dtype, int skip_token) {
  memset(s, 0, sizeof *s);
  s->ctx.allocate = take, s->ctx.release = give;
  s->p = problem_new(dtype, 7, skip_token);
  assert_ok(moe_neuron_open(&s->ctx, &s->neuron, STANDIN), &s->ctx);
}

static inline void session_close(session *s) {
  assert_ok(moe_neuron_unload(&s->ctx, &s->model), &s->ctx);
  moe_neuron_close(&s->neuron);
  free(s->p);
  assert_clean();
}

static inline void load(session *s) {
  assert_ok(moe_neuron_load(&s->ctx, &s->neuron, &s->neff, sizeof s->neff, -1, &s->model), &s->ctx);
}

#define PLAIN(test) cmocka_unit_test_setup(test, begin)
#define OF(test, NAME) \
  { #test " " #NAME, test, begin, NULL, test_dtype_state(MOE_DTYPE_##NAME) }

#endif
