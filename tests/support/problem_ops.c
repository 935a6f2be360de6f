/* problem_ops.c: the public functions as seven operations on a struct problem. */
#include <stdlib.h>
#include <string.h>

#include "problem.h"

/* X(ENUMERATOR of problem_op, function, field of problem_args, dtype) of the functions that exist per dtype. */
#define TYPED_OPS(X, dtype)                          \
  X(ROUTER, moe_router_topk, router, dtype)          \
  X(FORWARD, moe_blockwise_mm_fwd, forward, dtype)   \
  X(BACKWARD, moe_blockwise_mm_bwd, backward, dtype) \
  X(ROUTER_BACKWARD, moe_router_topk_bwd, router_backward, dtype)

/* Calls one of them or, with `query`, asks what it needs. */
typedef moe_status typed_call(moe_context *ctx, const struct problem_args *args, int query, size_t *bytes);
#define TYPED_CALL(OP, function, field, dtype)                                                                      \
  static moe_status call_##OP##_##dtype(moe_context *ctx, const struct problem_args *a, int query, size_t *bytes) { \
    return query ? function##_##dtype##_workspace_size(ctx, &a->field, bytes) : function##_##dtype(ctx, &a->field); \
  }
#define TYPED_CALLS(name, type, NAME) TYPED_OPS(TYPED_CALL, name)
MOE_DTYPE_LIST(TYPED_CALLS)

static typed_call *const typed[][PROBLEM_OP_COUNT] = {
#define TYPED_ENTRY(OP, function, field, dtype) [PROBLEM_##OP] = call_##OP##_##dtype,
#define TYPED_ENTRIES(name, type, NAME)         [MOE_DTYPE_##NAME] = {TYPED_OPS(TYPED_ENTRY, name)},
    MOE_DTYPE_LIST(TYPED_ENTRIES)};

const char *problem_op_name(enum problem_op op) {
  static const char *const name[] = {"router",  "load_balance", "z_loss",         "route_blocks",
                                     "forward", "backward",     "router_backward"};
  return name[op];
}

moe_status problem_call(enum problem_op op, moe_context *ctx, const struct problem_args *args) {
  if (typed[args->dtype][op]) return typed[args->dtype][op](ctx, args, 0, NULL);
  switch (op) {
    case PROBLEM_LOAD_BALANCE: return moe_router_load_balance_loss(ctx, &args->load_balance);
    case PROBLEM_Z_LOSS: return moe_router_z_loss(ctx, &args->z_loss);
    case PROBLEM_ROUTE_BLOCKS: return moe_route_blocks(ctx, &args->route);
    default: abort();
  }
}

moe_status problem_workspace_size(enum problem_op op, moe_context *ctx, const struct problem_args *args,
                                  size_t *bytes) {
  if (typed[args->dtype][op]) return typed[args->dtype][op](ctx, args, 1, bytes);
  if (op == PROBLEM_ROUTE_BLOCKS) return moe_route_blocks_workspace_size(ctx, &args->route, bytes);
  *bytes = 0;
  return MOE_OK;
}

void problem_set_workspace(enum problem_op op, struct problem_args *args, void *workspace, size_t bytes) {
  switch (op) {
#define TYPED_CASE(OP, function, field, dtype) \
  case PROBLEM_##OP: args->field.workspace = workspace, args->field.workspace_bytes = bytes; break;
    TYPED_OPS(TYPED_CASE, any)
#undef TYPED_CASE
    case PROBLEM_ROUTE_BLOCKS:
      args->route.workspace = workspace;
      args->route.workspace_bytes = bytes;
      break;
    case PROBLEM_LOAD_BALANCE:
    case PROBLEM_Z_LOSS:
    case PROBLEM_OP_COUNT: break;
  }
}

/* ------------------------------------------------------------------------------------------------------------ args */

static void *tensor(const struct problem *p, enum problem_tensor_id id) { return p->tensor[id].data; }
static void *tensor_if(const struct problem *p, int given, enum problem_tensor_id id) {
  return given ? p->tensor[id].data : NULL;
}

static void make_router_args(const struct problem *p, struct problem_args *a) {
  const struct problem_options *o = &p->o;
  a->router = (moe_router_topk_args){.T = o->T, .H = o->H, .E = o->E, .K = o->K,
      .hidden_states = tensor(p, PT_HIDDEN_STATES), .router_weight = tensor(p, PT_ROUTER_WEIGHT),
      .router_bias = tensor_if(p, o->router_bias, PT_ROUTER_BIAS), .router_logits = tensor(p, PT_LOGITS),
      .selection_bias = tensor_if(p, o->selection_bias, PT_SELECTION_BIAS),
      .token_mask = tensor_if(p, o->token_mask, PT_TOKEN_MASK), .config = o->router,
      .expert_index = tensor(p, PT_EXPERT_INDEX), .expert_weights = tensor(p, PT_EXPERT_WEIGHTS)};
  a->load_balance = (moe_router_loss_args){.T = o->T, .E = o->E, .K = o->K, .coefficient = 0.01f,
      .score_function = o->router.score_function, .router_logits = tensor(p, PT_LOGITS),
      .expert_index = tensor(p, PT_EXPERT_INDEX), .token_mask = tensor_if(p, o->token_mask, PT_TOKEN_MASK),
      .loss = tensor(p, PT_LOAD_BALANCE_LOSS), .router_logits_grad = tensor(p, PT_LOGITS_GRAD)};
  a->z_loss = a->load_balance;
  a->z_loss.expert_index = NULL;
  a->z_loss.loss = tensor(p, PT_Z_LOSS);
  a->router_backward = (moe_router_topk_bwd_args){.T = o->T, .H = o->H, .E = o->E, .K = o->K,
      .hidden_states = tensor(p, PT_HIDDEN_STATES), .router_weight = tensor(p, PT_ROUTER_WEIGHT),
      .router_logits = tensor(p, PT_LOGITS), .expert_index = tensor(p, PT_EXPERT_INDEX), .config = o->router,
      .expert_weights_grad = tensor_if(p, o->direct_weights_grad, PT_WEIGHTS_GRAD),
      .expert_affinities_masked_grad = tensor_if(p, !o->direct_weights_grad, PT_AFFINITIES_GRAD),
      .affinity_dtype = o->affinity_dtype, .router_logits_grad = tensor(p, PT_LOGITS_GRAD),
      .router_weight_grad = tensor(p, PT_ROUTER_WEIGHT_GRAD), .router_bias_grad = tensor(p, PT_ROUTER_BIAS_GRAD),
      .hidden_states_grad = tensor(p, PT_ROUTER_HIDDEN_GRAD), .weight_grad_dtype = o->weight_grad_dtype,
      .accumulate = o->accumulate & (MOE_ACCUMULATE_HIDDEN_STATES_GRAD | MOE_ACCUMULATE_ROUTER_LOGITS_GRAD |
                                     MOE_ACCUMULATE_ROUTER_WEIGHT_GRAD | MOE_ACCUMULATE_ROUTER_BIAS_GRAD)};
}

static moe_blockwise_layer make_layer(const struct problem *p) {
  const struct problem_options *o = &p->o;
  return (moe_blockwise_layer){.T = o->T, .H = o->H, .I = o->I, .E = o->E, .N = p->N, .B = o->B,
      .max_rows = o->tight ? o->T * o->K : 0,
      .hidden_states = tensor(p, PT_HIDDEN_STATES), .expert_affinities_masked = tensor(p, PT_AFFINITIES),
      .affinity_dtype = o->affinity_dtype,
      .gate_up_proj_weight = tensor(p, PT_GATE_UP_WEIGHT), .down_proj_weight = tensor(p, PT_DOWN_WEIGHT),
      .gate_and_up_proj_bias = tensor_if(p, o->expert_bias, PT_GATE_UP_BIAS),
      .down_proj_bias = tensor_if(p, o->expert_bias, PT_DOWN_BIAS), .token_position_to_id = tensor(p, PT_TOKEN_IDS),
      .block_to_expert = tensor_if(p, !o->dropping, PT_BLOCK_EXPERT),
      .conditions = tensor_if(p, !o->no_conditions, PT_CONDITIONS),
      .skip_token = o->skip_token, .checkpoint_dtype = o->checkpoint_dtype, .config = o->layer,
      .mx = o->mx};
}

static void make_layer_args(const struct problem *p, struct problem_args *a) {
  const struct problem_options *o = &p->o;
  a->route = (moe_route_blocks_args){.T = o->T, .E = o->E, .K = o->K, .B = o->B, .N = p->N,
      .expert_index = tensor(p, PT_EXPERT_INDEX), .expert_weights = tensor(p, PT_EXPERT_WEIGHTS),
      .skip_token = o->skip_token, .capacity = o->capacity, .drop_policy = o->drop_policy,
      .block_per_expert = o->dropping, .affinity_dtype = o->affinity_dtype,
      .expert_affinities_masked = tensor(p, PT_AFFINITIES), .token_position_to_id = tensor(p, PT_TOKEN_IDS),
      .block_to_expert = tensor(p, PT_BLOCK_EXPERT), .conditions = tensor(p, PT_CONDITIONS),
      .tokens_per_expert = tensor(p, PT_TOKENS_PER_EXPERT)};
  a->forward = (moe_blockwise_mm_fwd_args){.layer = make_layer(p),
      .device = {.spec = o->spec, .output_shape = o->device_output_shape}, .hints = o->hints,
      .not_accumulating = o->not_accumulating, .accumulate = o->accumulate_output ? MOE_ACCUMULATE_OUTPUT : 0,
      .gate_up_activations_T = tensor_if(p, o->save_gate_up, PT_GATE_UP_CHECKPOINT),
      .down_activations = tensor_if(p, o->save_down, PT_DOWN_CHECKPOINT), .output = tensor(p, PT_OUTPUT)};
  a->backward = (moe_blockwise_mm_bwd_args){.layer = make_layer(p),
      .gate_up_activations_T = tensor_if(p, o->save_gate_up, PT_GATE_UP_CHECKPOINT),
      .down_activations = tensor_if(p, o->save_down, PT_DOWN_CHECKPOINT),
      .output_hidden_states_grad = tensor(p, PT_OUTPUT_GRAD), .not_accumulating = o->not_accumulating,
      .hints = o->hints, .affinity_option = o->affinity_option,
      .kernel_type = o->dropping ? MOE_KERNEL_DROPPING : MOE_KERNEL_DROPLESS,
      .hidden_states_grad = tensor(p, PT_HIDDEN_GRAD),
      .expert_affinities_masked_grad = tensor(p, PT_AFFINITIES_GRAD),
      .gate_up_proj_weight_grad = tensor(p, PT_GATE_UP_WEIGHT_GRAD),
      .down_proj_weight_grad = tensor(p, PT_DOWN_WEIGHT_GRAD),
      .gate_and_up_proj_bias_grad = tensor(p, PT_GATE_UP_BIAS_GRAD),
      .down_proj_bias_grad = tensor(p, PT_DOWN_BIAS_GRAD),
      .weight_grad_dtype = o->weight_grad_dtype, .accumulate = o->accumulate & 63u};
}

void problem_make_args(const struct problem *p, struct problem_args *args) {
  memset(args, 0, sizeof *args);
  args->dtype = p->o.dtype;
  make_router_args(p, args);
  make_layer_args(p, args);
}

/* ------------------------------------------------------------------------------------------------------------- run */

/* Takes an expert's tokens away after the router chose them. */
static void drop_expert(const struct problem *p, int32_t expert) {
  for (int64_t i = 0; i < p->tensor[PT_EXPERT_INDEX].count; i++) {
    int32_t *index = (int32_t *)(void *)p->tensor[PT_EXPERT_INDEX].data + i;
    if (*index == expert) *index = -1;
  }
}

moe_status problem_run(const struct problem *p, moe_context *ctx, enum problem_op op) {
  struct problem_args args;
  problem_make_args(p, &args);
  size_t bytes = 0;
  moe_status status = problem_workspace_size(op, ctx, &args, &bytes);
  if (status != MOE_OK) return status;
  void *workspace = malloc(bytes ? bytes : 1);
  if (workspace == NULL) return MOE_ERROR_OUT_OF_MEMORY;
  memset(workspace, 0xff, bytes);
  problem_set_workspace(op, &args, workspace, bytes);
  status = problem_call(op, ctx, &args);
  free(workspace);
  if (status == MOE_OK && op == PROBLEM_ROUTER && p->o.empty_expert) drop_expert(p, p->o.empty_expert - 1);
  return status;
}

moe_status problem_run_all(struct problem *p, moe_context *ctx, enum problem_op *op) {
  problem_fill(p);
  for (int i = 0; i < PROBLEM_OP_COUNT; i++) {
    *op = (enum problem_op)i;
    moe_status status = problem_run(p, ctx, *op);
    if (status != MOE_OK) return status;
  }
  return MOE_OK;
}
