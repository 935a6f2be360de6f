/* A random layer problem: shape, options, routing into blocks and every tensor of the forward and the backward. The
   caller fills the tensors; test_case_forward and test_case_backward call the library. */
#ifndef TEST_CASES_H
#define TEST_CASES_H

#include <inttypes.h>

#include "support/fill.h"

typedef struct test_limits { /* the largest sizes a case may have */
  int64_t T, H, I, E, K, B;
} test_limits;

/* The backward's outputs, in the order of the MOE_ACCUMULATE_ bits. */
enum { TEST_DX, TEST_DA, TEST_DWGU, TEST_DWD, TEST_DBGU, TEST_DBD, TEST_GRADIENTS };
static const char *const test_gradient_name[TEST_GRADIENTS] = {
    "hidden_states_grad",    "expert_affinities_masked_grad", "gate_up_proj_weight_grad",
    "down_proj_weight_grad", "gate_and_up_proj_bias_grad",    "down_proj_bias_grad"};

typedef struct test_case {
  uint64_t seed;
  uint64_t rng;
  moe_dtype dtype;
  moe_blockwise_layer layer;
  int64_t K;
  int dropping, not_accumulating, accumulate_output, keep_down_checkpoint, recompute;
  uint32_t omit; /* bits: gradients that are not asked for */
  moe_cte_spec spec;
  moe_nkilib_hints hints;
  uint32_t accumulate;
  moe_affinity_option affinity_option;
  moe_schedule schedule;
  moe_dtype weight_grad_dtype;
  int32_t *chosen, *ids, *experts, *conditions; /* chosen: [T,K], -1 = an empty slot */
  /* inputs */
  test_tensor x, affinity, wgu, wd, bgu, bd, dy;
  /* outputs: forward, then backward */
  test_tensor y, gate_up, down;
  test_tensor grad[TEST_GRADIENTS];
  /* what y and grad hold before the call */
  test_tensor y_start, grad_start[TEST_GRADIENTS];
} test_case;

static inline const char *test_activation_name(moe_activation activation) {
  static const char *const names[] = {
#define TEST_NAME_(name, NAME) #name,
      MOE_ACTIVATION_LIST(TEST_NAME_)
#undef TEST_NAME_
  };
  return names[activation];
}

/* The repro line of a failure. Returns its argument. */
static inline const char *test_case_describe(const test_case *c, moe_isa isa, int threads, char text[768]) {
  const moe_blockwise_layer *l = &c->layer;
  const moe_layer_config *o = &l->config;
  snprintf(text, 768,
           "case seed 0x%" PRIx64 " dtype %s isa %s threads %d | T %" PRId64 " H %" PRId64 " I %" PRId64 " E %" PRId64
           " K %" PRId64 " N %" PRId64 " B %" PRId64
           " | act %s alpha %g up_offset %g skip_gate %d clamp %u [%g %g %g %g] affinity_mode %d | "
           "bias %d%d conditions %d skip_token %d affinity %s checkpoint %s weight_grad %s not_accumulating %d "
           "accumulate_output %d accumulate 0x%x omit 0x%x down_checkpoint %d affinity_option %d recompute %d schedule "
           "%d spec %d",
           c->seed, test_dtype_name(c->dtype), moe_isa_name(isa), threads, l->T, l->H, l->I, l->E, c->K, l->N, l->B,
           test_activation_name(o->activation), (double)o->alpha, (double)o->up_offset, o->skip_gate,
           (unsigned)o->clamp, (double)o->gate_clamp_upper_limit, (double)o->gate_clamp_lower_limit,
           (double)o->up_clamp_upper_limit, (double)o->up_clamp_lower_limit, (int)o->affinity_mode,
           l->gate_and_up_proj_bias != NULL, l->down_proj_bias != NULL, l->conditions != NULL, l->skip_token,
           test_dtype_name(l->affinity_dtype), test_dtype_name(l->checkpoint_dtype),
           test_dtype_name(c->weight_grad_dtype), c->not_accumulating, c->accumulate_output, (unsigned)c->accumulate,
           (unsigned)c->omit, c->keep_down_checkpoint, (int)c->affinity_option, c->recompute, (int)c->schedule,
           (int)c->spec);
  return text;
}

/* ---------------------------------------------------------------------------------------------------------- routing */

/* K experts for each token; the same one twice only where that is asked for. */
static inline void test_route_tokens(test_case *c, int duplicates) {
  int64_t E = c->layer.E, K = c->K;
  c->chosen = malloc((size_t)(c->layer.T * K) * sizeof *c->chosen);
  for (int64_t t = 0; t < c->layer.T; ++t)
    for (int64_t k = 0; k < K; ++k) {
      int64_t e = test_random_range(&c->rng, 0, E - 1);
      for (int64_t j = 0; j < k && !duplicates; ++j)
        if (c->chosen[t * K + j] == e) e = (e + 1) % E, j = -1;
      c->chosen[t * K + k] = test_with(&c->rng, 0.04) ? -1 : (int32_t)e; /* now and then a slot without an expert */
    }
}

static inline int64_t test_route_rows(const test_case *c, int64_t e) {
  int64_t rows = 0;
  for (int64_t i = 0; i < c->layer.T * c->K; ++i) rows += c->chosen[i] == e;
  return rows;
}

static inline void test_swap_blocks(test_case *c, int64_t a, int64_t b) {
  int64_t B = c->layer.B;
  for (int64_t r = 0; r < B; ++r) {
    int32_t id = c->ids[a * B + r];
    c->ids[a * B + r] = c->ids[b * B + r], c->ids[b * B + r] = id;
  }
  int32_t e = c->experts[a];
  c->experts[a] = c->experts[b], c->experts[b] = e;
}

/* An expert's tokens into its blocks from block b on; rows beyond `blocks` blocks are dropped. */
static inline void test_route_expert(test_case *c, int64_t e, int64_t b, int64_t blocks) {
  const moe_blockwise_layer *l = &c->layer;
  for (int64_t i = 0, row = 0; i < l->T * c->K && row < blocks * l->B; ++i)
    if (c->chosen[i] == e) c->ids[b * l->B + row++] = (int32_t)(i / c->K);
  for (int64_t i = 0; i < blocks; ++i) c->experts[b + i] = (int32_t)e;
}

/* Blocks of one expert each, and some left over: all padding, or of the expert that does nothing. */
static inline void test_route_dropless(test_case *c) {
  moe_blockwise_layer *l = &c->layer;
  int64_t b = 0;
  for (int64_t e = 0; e < l->E; ++e) {
    int64_t blocks = (test_route_rows(c, e) + l->B - 1) / l->B;
    test_route_expert(c, e, b, blocks);
    b += blocks;
  }
  for (; b < l->N; ++b) {
    int nothing = test_with(&c->rng, 0.5);
    c->experts[b] = (int32_t)(nothing ? l->E : l->E - 1);
    if (nothing && l->T > 1) c->ids[b * l->B] = 0; /* its rows are not looked at */
  }
  if (test_with(&c->rng, 0.5))
    for (int64_t i = l->N - 1; i > 0; --i) test_swap_blocks(c, i, test_random_range(&c->rng, 0, i));
}

/* The metadata: blocks in any order, padding anywhere in a block, some blocks switched off. */
static inline void test_route_case(test_case *c) {
  moe_blockwise_layer *l = &c->layer;
  int64_t N = 0;
  test_route_tokens(c, !c->not_accumulating && test_with(&c->rng, 0.15));
  for (int64_t e = 0; e < l->E; ++e) N += (test_route_rows(c, e) + l->B - 1) / l->B;
  l->N = c->dropping ? l->E : N + test_random_range(&c->rng, N == 0, 2);
  c->ids = malloc((size_t)(l->N * l->B) * sizeof *c->ids);
  c->experts = malloc((size_t)l->N * sizeof *c->experts);
  for (int64_t i = 0; i < l->N * l->B; ++i) c->ids[i] = l->skip_token ? -1 : (int32_t)l->T;
  for (int64_t e = 0; e < l->E && c->dropping; ++e) test_route_expert(c, e, e, 1);
  if (!c->dropping) test_route_dropless(c);
  for (int64_t i = 0; i < l->N && test_with(&c->rng, 0.7); ++i) { /* the last row, often padding, changes places */
    int64_t r = test_random_range(&c->rng, 0, l->B - 1), at = i * l->B + r, last = (i + 1) * l->B - 1;
    int32_t id = c->ids[at];
    c->ids[at] = c->ids[last], c->ids[last] = id;
  }
  l->token_position_to_id = c->ids;
  l->block_to_expert = c->dropping ? NULL : c->experts;
  if (test_with(&c->rng, 0.4)) {
    c->conditions = malloc((size_t)(l->N + 1) * sizeof *c->conditions);
    for (int64_t i = 0; i <= l->N; ++i) c->conditions[i] = i < l->N && !test_with(&c->rng, 0.15);
    l->conditions = c->conditions;
  }
  for (int64_t i = 0; i < l->N * l->B; ++i) l->max_rows += c->ids[i] >= 0 && c->ids[i] < l->T;
  if (test_with(&c->rng, 0.5)) l->max_rows = 0;
  c->spec =
      c->dropping ? MOE_CTE_SHARD_ON_I_DROPPING : (moe_cte_spec)test_random_range(&c->rng, 0, l->conditions ? 2 : 1);
}

/* ---------------------------------------------------------------------------------------------------------- options */

static inline moe_dtype test_any_dtype(uint64_t *rng, moe_dtype own) {
  int64_t pick = test_random_range(rng, 0, TEST_DTYPES + 1);
  return pick < TEST_DTYPES ? (moe_dtype)(MOE_DTYPE_F32 + pick) : own;
}

/* Shape and options; the activation, alpha, up_offset and clamp limits are the caller's. */
static inline void test_case_options(test_case *c, moe_dtype dtype, const test_limits *most) {
  uint64_t *rng = &c->rng;
  moe_blockwise_layer *l = &c->layer;
  c->dtype = dtype;
  l->T = test_random_range(rng, 1, most->T), l->H = test_random_range(rng, 1, most->H),
  l->I = test_random_range(rng, 1, most->I);
  l->E = test_random_range(rng, 1, most->E), l->B = test_random_range(rng, 1, most->B);
  c->K = test_random_range(rng, 1, most->K < l->E ? most->K : l->E);
  c->dropping = test_with(rng, 0.12);
  c->hints.block_tile_size = test_with(rng, 0.3) ? l->B : 0;
  c->omit = test_with(rng, 0.25) ? (uint32_t)test_random_range(rng, 0, 63) : 0;
  l->skip_token = test_with(rng, 0.5), c->hints.skip_weight = test_with(rng, 0.2);
  l->affinity_dtype = test_any_dtype(rng, dtype);
  l->checkpoint_dtype = test_any_dtype(rng, dtype);
  c->weight_grad_dtype = test_any_dtype(rng, dtype);
  l->config.affinity_mode = (moe_affinity_mode)test_random_range(rng, 0, MOE_AFFINITY_COUNT_ - 1);
  c->hints.pre_scale_delayed = test_with(rng, 0.2);
  l->config.skip_gate = test_with(rng, 0.15);
  l->config.clamp = test_with(rng, 0.5) ? (uint32_t)test_random_range(rng, 0, 15) : 0;
  c->not_accumulating = test_with(rng, 0.15);
  c->accumulate_output = test_with(rng, 0.2);
  c->accumulate = test_with(rng, 0.3) ? (uint32_t)test_random_range(rng, 0, 63) : 0;
  c->keep_down_checkpoint = l->config.affinity_mode != MOE_AFFINITY_ON_I && test_with(rng, 0.6);
  c->affinity_option = (moe_affinity_option)test_random_range(rng, 0, MOE_AFFINITY_OPTION_COUNT_ - 1);
  c->hints.shard_option = (moe_shard_option)test_random_range(rng, 0, MOE_SHARD_COUNT_ - 1);
  c->schedule = (moe_schedule)test_random_range(rng, 0, MOE_SCHEDULE_COUNT_ - 1);
}

/* Any activation, alpha, offset and limits that random fills of size about 1 reach. */
static inline void test_case_real_activation(test_case *c) {
  uint64_t *rng = &c->rng;
  moe_layer_config *o = &c->layer.config;
  o->activation = (moe_activation)test_random_range(rng, 0, MOE_ACT_COUNT_ - 1);
  if ((o->activation == MOE_ACT_SILU || o->activation == MOE_ACT_SWISH) && test_with(rng, 0.4))
    o->alpha = (float)(0.25 + 2 * test_unit(rng));
  if (test_with(rng, 0.5)) o->up_offset = test_with(rng, 0.5) ? 1.0f : (float)test_signed(rng);
  o->gate_clamp_upper_limit = (float)(0.1 + test_unit(rng)), o->gate_clamp_lower_limit = (float)(-0.1 - test_unit(rng));
  o->up_clamp_upper_limit = (float)(0.1 + test_unit(rng)), o->up_clamp_lower_limit = (float)(-0.1 - test_unit(rng));
}

static inline moe_router_config test_router_config(uint64_t *rng) {
  moe_router_config o = {.score_function = (moe_score_function)test_random_range(rng, 0, MOE_SCORE_COUNT_ - 1),
                         .score_order = (moe_score_order)test_random_range(rng, 0, MOE_SCORE_ORDER_COUNT_ - 1),
                         .renormalize = test_with(rng, 0.5)};
  if (o.renormalize && test_with(rng, 0.5)) o.renormalize_epsilon = test_with(rng, 0.5) ? 1e-20f : 0.01f;
  if (test_with(rng, 0.5)) o.routed_scaling_factor = (float)(0.5 + 2 * test_unit(rng));
  return o;
}

/* ---------------------------------------------------------------------------------------------------------- tensors */

/* Every tensor at its exact size, the layer's pointers set; the biases each with probability 0.6. */
static inline void test_case_allocate(test_case *c) {
  moe_blockwise_layer *l = &c->layer;
  int64_t size[TEST_GRADIENTS] = {l->T * l->H,        l->T * l->E,     l->E * l->H * 2 * l->I,
                                  l->E * l->I * l->H, l->E * 2 * l->I, l->E * l->H};
  test_tensor *input[TEST_GRADIENTS] = {&c->x, &c->affinity, &c->wgu, &c->wd, &c->bgu, &c->bd};
  for (int i = 0; i < TEST_GRADIENTS; ++i) {
    *input[i] = test_tensor_new(i == TEST_DA ? l->affinity_dtype : c->dtype, size[i]);
    moe_dtype dtype = i == TEST_DA ? l->affinity_dtype : i == TEST_DX ? c->dtype : c->weight_grad_dtype;
    c->grad[i] = test_tensor_new(dtype, size[i]);
    c->grad_start[i] = test_tensor_new(dtype, size[i]);
  }
  c->dy = test_tensor_new(c->dtype, l->T * l->H);
  c->y = test_tensor_new(c->dtype, l->T * l->H), c->y_start = test_tensor_new(c->dtype, l->T * l->H);
  c->gate_up = test_tensor_new(l->checkpoint_dtype, l->N * 2 * l->I * l->B);
  c->down = test_tensor_new(l->checkpoint_dtype, l->N * l->B * l->H);
  l->hidden_states = c->x.data;
  int without_affinities = l->config.affinity_mode == MOE_AFFINITY_NO_SCALE && test_with(&c->rng, 0.5);
  l->expert_affinities_masked = without_affinities ? NULL : c->affinity.data;
  l->gate_up_proj_weight = c->wgu.data, l->down_proj_weight = c->wd.data;
  l->gate_and_up_proj_bias = test_with(&c->rng, 0.6) ? c->bgu.data : NULL;
  l->down_proj_bias = test_with(&c->rng, 0.6) ? c->bd.data : NULL;
}

static inline void test_case_free(test_case *c) {
  test_tensor *single[] = {&c->x,  &c->affinity, &c->wgu,     &c->wd,      &c->bgu, &c->bd,
                           &c->dy, &c->y,        &c->y_start, &c->gate_up, &c->down};
  for (size_t i = 0; i < sizeof single / sizeof *single; ++i) test_tensor_free(single[i]);
  for (int i = 0; i < TEST_GRADIENTS; ++i) test_tensor_free(&c->grad[i]), test_tensor_free(&c->grad_start[i]);
  free(c->chosen), free(c->ids), free(c->experts), free(c->conditions);
  memset(c, 0, sizeof *c);
}

/* ------------------------------------------------------------------------------------------------------------ calls */

static inline void *test_allocate(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static inline void test_release(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }

/* Outputs start from y_start and grad_start. */
static inline moe_status test_case_forward(test_case *c, moe_context *ctx) {
  moe_blockwise_mm_fwd_args args = {.layer = c->layer,
                                    .device = {.spec = c->spec},
                                    .hints = c->hints,
                                    .not_accumulating = c->not_accumulating,
                                    .accumulate = c->accumulate_output ? MOE_ACCUMULATE_OUTPUT : 0,
                                    .gate_up_activations_T = c->gate_up.data,
                                    .down_activations = c->keep_down_checkpoint ? c->down.data : NULL,
                                    .output = c->y.data};
  test_tensor_copy(&c->y, &c->y_start);
  switch (c->dtype) {
#define TEST_CALL_(name, type, NAME) \
  case MOE_DTYPE_##NAME: return moe_blockwise_mm_fwd_##name(ctx, &args);
    MOE_DTYPE_LIST(TEST_CALL_)
#undef TEST_CALL_
    default: return MOE_ERROR_INVALID_OPTION;
  }
}

/* A gradient's memory, NULL where it is not asked for. */
static inline void *test_case_wanted(const test_case *c, int i) { return c->omit >> i & 1 ? NULL : c->grad[i].data; }

static inline moe_status test_case_backward(test_case *c, moe_context *ctx) {
  moe_blockwise_mm_bwd_args args = {.layer = c->layer,
                                    .gate_up_activations_T = c->recompute ? NULL : c->gate_up.data,
                                    .down_activations = c->keep_down_checkpoint ? c->down.data : NULL,
                                    .output_hidden_states_grad = c->dy.data, .not_accumulating = c->not_accumulating,
                                    .hints = c->hints, .affinity_option = c->affinity_option,
                                    .kernel_type = c->dropping ? MOE_KERNEL_DROPPING : MOE_KERNEL_DROPLESS,
                                    .hidden_states_grad = test_case_wanted(c, TEST_DX),
                                    .expert_affinities_masked_grad = test_case_wanted(c, TEST_DA),
                                    .gate_up_proj_weight_grad = test_case_wanted(c, TEST_DWGU),
                                    .down_proj_weight_grad = test_case_wanted(c, TEST_DWD),
                                    .gate_and_up_proj_bias_grad = test_case_wanted(c, TEST_DBGU),
                                    .down_proj_bias_grad = test_case_wanted(c, TEST_DBD),
                                    .weight_grad_dtype = c->weight_grad_dtype, .accumulate = c->accumulate};
  for (int i = 0; i < TEST_GRADIENTS; ++i) test_tensor_copy(&c->grad[i], &c->grad_start[i]);
  switch (c->dtype) {
#define TEST_CALL_(name, type, NAME) \
  case MOE_DTYPE_##NAME: return moe_blockwise_mm_bwd_##name(ctx, &args);
    MOE_DTYPE_LIST(TEST_CALL_)
#undef TEST_CALL_
    default: return MOE_ERROR_INVALID_OPTION;
  }
}

#endif /* TEST_CASES_H */
