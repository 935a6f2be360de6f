/* problem.h: one whole training step of a MoE layer with every tensor it reads and writes, for the tests that compare
   bits or bytes. Values are made from integers only (no libm, no rounding), so that they are the same on every machine;
   tensors come from a caller-given allocator, so that they can lie against guard pages. No test framework, no threads.
*/
#ifndef MOE_TEST_PROBLEM_H
#define MOE_TEST_PROBLEM_H

#include <stddef.h>
#include <stdint.h>

#include "moe.h"

enum problem_op {
  PROBLEM_ROUTER,
  PROBLEM_LOAD_BALANCE,
  PROBLEM_Z_LOSS,
  PROBLEM_ROUTE_BLOCKS,
  PROBLEM_FORWARD,
  PROBLEM_BACKWARD,
  PROBLEM_ROUTER_BACKWARD,
  PROBLEM_OP_COUNT
};

/* What a tensor's elements are: a fixed type, or one that the options choose. */
enum problem_type {
  PROBLEM_U8,
  PROBLEM_I32,
  PROBLEM_I64,
  PROBLEM_F32,
  PROBLEM_DATA,        /* options.dtype */
  PROBLEM_AFFINITY,    /* options.affinity_dtype */
  PROBLEM_CHECKPOINT,  /* options.checkpoint_dtype */
  PROBLEM_WEIGHT_GRAD  /* options.weight_grad_dtype */
};

#define BY(op) (1u << PROBLEM_##op)

/* X(ENUMERATOR, name in moe.h, type, elements, operations that write it (0 = an input), exponent of typical values).
   `o` is the options and N the number of blocks. */
#define PROBLEM_TENSORS(X)                                                                                            \
  X(HIDDEN_STATES, hidden_states, DATA, o->T *o->H, 0, 0)                                                             \
  X(ROUTER_WEIGHT, router_weight, DATA, o->H *o->E, 0, -3)                                                            \
  X(ROUTER_BIAS, router_bias, DATA, o->E, 0, -2)                                                                      \
  X(SELECTION_BIAS, selection_bias, F32, o->E, 0, -2)                                                                 \
  X(TOKEN_MASK, token_mask, U8, o->T, 0, 0)                                                                           \
  X(LOGITS, router_logits, F32, o->T *o->E, BY(ROUTER), 0)                                                            \
  X(EXPERT_INDEX, expert_index, I32, o->T *o->K, BY(ROUTER), 0)                                                       \
  X(EXPERT_WEIGHTS, expert_weights, F32, o->T *o->K, BY(ROUTER), -1)                                                  \
  X(LOAD_BALANCE_LOSS, loss, F32, 1, BY(LOAD_BALANCE), 0)                                                             \
  X(Z_LOSS, loss, F32, 1, BY(Z_LOSS), 0)                                                                              \
  X(LOGITS_GRAD, router_logits_grad, F32, o->T *o->E, BY(LOAD_BALANCE) | BY(Z_LOSS) | BY(ROUTER_BACKWARD), -4)        \
  X(AFFINITIES, expert_affinities_masked, AFFINITY, (o->T + !o->skip_token) * o->E, BY(ROUTE_BLOCKS), -1)             \
  X(TOKEN_IDS, token_position_to_id, I32, N *o->B, BY(ROUTE_BLOCKS), 0)                                               \
  X(BLOCK_EXPERT, block_to_expert, I32, N, BY(ROUTE_BLOCKS), 0)                                                       \
  X(CONDITIONS, conditions, I32, N + 1, BY(ROUTE_BLOCKS), 0)                                                          \
  X(TOKENS_PER_EXPERT, tokens_per_expert, I64, o->E, BY(ROUTE_BLOCKS), 0)                                             \
  X(GATE_UP_WEIGHT, gate_up_proj_weight, DATA, o->E *o->H * 2 * o->I, 0, -3)                                          \
  X(DOWN_WEIGHT, down_proj_weight, DATA, o->E *o->I *o->H, 0, -3)                                                     \
  X(GATE_UP_BIAS, gate_and_up_proj_bias, DATA, o->E * 2 * o->I, 0, -2)                                                \
  X(DOWN_BIAS, down_proj_bias, DATA, o->E *o->H, 0, -2)                                                               \
  X(GATE_UP_CHECKPOINT, gate_up_activations_T, CHECKPOINT, N * 2 * o->I *o->B, BY(FORWARD), 0)                        \
  X(DOWN_CHECKPOINT, down_activations, CHECKPOINT, N *o->B *o->H, BY(FORWARD), 0)                                     \
  X(OUTPUT, output, DATA, problem_output_rows(o) * o->H, BY(FORWARD), -1)                                             \
  X(OUTPUT_GRAD, output_hidden_states_grad, DATA, o->T *o->H, 0, -2)                                                  \
  X(HIDDEN_GRAD, hidden_states_grad, DATA, o->T *o->H, BY(BACKWARD), -2)                                              \
  X(AFFINITIES_GRAD, expert_affinities_masked_grad, AFFINITY, o->T *o->E, BY(BACKWARD), -2)                           \
  X(GATE_UP_WEIGHT_GRAD, gate_up_proj_weight_grad, WEIGHT_GRAD, o->E *o->H * 2 * o->I, BY(BACKWARD), -3)              \
  X(DOWN_WEIGHT_GRAD, down_proj_weight_grad, WEIGHT_GRAD, o->E *o->I *o->H, BY(BACKWARD), -3)                         \
  X(GATE_UP_BIAS_GRAD, gate_and_up_proj_bias_grad, WEIGHT_GRAD, o->E * 2 * o->I, BY(BACKWARD), -3)                    \
  X(DOWN_BIAS_GRAD, down_proj_bias_grad, WEIGHT_GRAD, o->E *o->H, BY(BACKWARD), -3)                                   \
  X(WEIGHTS_GRAD, expert_weights_grad, F32, o->T *o->K, 0, -2)                                                        \
  X(ROUTER_WEIGHT_GRAD, router_weight_grad, WEIGHT_GRAD, o->H *o->E, BY(ROUTER_BACKWARD), -3)                         \
  X(ROUTER_BIAS_GRAD, router_bias_grad, WEIGHT_GRAD, o->E, BY(ROUTER_BACKWARD), -3)                                   \
  X(ROUTER_HIDDEN_GRAD, hidden_states_grad, DATA, o->T *o->H, BY(ROUTER_BACKWARD), -2)

enum problem_tensor_id {
#define PROBLEM_ENUM(ID, name, type, count, writers, exponent) PT_##ID,
  PROBLEM_TENSORS(PROBLEM_ENUM)
#undef PROBLEM_ENUM
      PT_COUNT
};

struct problem_options {
  uint64_t seed;
  moe_dtype dtype, affinity_dtype, checkpoint_dtype, weight_grad_dtype;
  int64_t T, H, I, E, K, B;
  moe_router_config router;
  moe_layer_config layer;
  moe_mx_operands mx; /* problem_options_random leaves it off */
  int token_mask, router_bias, selection_bias, expert_bias; /* optional tensors that are given */
  int skip_token, dropping;                                 /* dropping: one block per expert */
  int tight;                                                /* max_rows is given */
  int no_conditions;
  int64_t capacity;
  moe_drop_policy drop_policy;
  moe_cte_spec spec;
  int not_accumulating, accumulate_output, device_output_shape;
  int save_gate_up, save_down; /* activation checkpoints */
  moe_affinity_option affinity_option;
  moe_nkilib_hints hints;
  int direct_weights_grad; /* router backward from expert_weights_grad instead of the affinities' gradient */
  uint32_t accumulate;
  int64_t extra_blocks; /* beyond what the routing needs at most: all padding */
  int empty_expert; /* 1 + an expert that gets no token; 0 = none */
  int tiny_rows;    /* some rows so small that their products are subnormal */
  int nan_row;      /* one row holds NaN and infinity */
};

struct problem_tensor {
  const char *name;
  enum problem_type type;
  int element; /* bytes */
  int64_t count;
  unsigned writers;
  int exponent;
  unsigned char *data;
};

struct problem {
  struct problem_options o;
  int64_t N;
  struct problem_tensor tensor[PT_COUNT];
};

/* The arguments of every operation; a test may change them before problem_call. */
struct problem_args {
  moe_dtype dtype;
  moe_router_topk_args router;
  moe_router_loss_args load_balance, z_loss;
  moe_route_blocks_args route;
  moe_blockwise_mm_fwd_args forward;
  moe_blockwise_mm_bwd_args backward;
  moe_router_topk_bwd_args router_backward;
};

typedef void *(*problem_allocate)(void *user, int tensor, size_t bytes);
typedef void (*problem_release)(void *user, int tensor, void *memory);

int64_t problem_output_rows(const struct problem_options *o);

/* Everything valid and chosen by the seed, in shapes of a few dozen. */
struct problem_options problem_options_random(uint64_t seed, moe_dtype dtype);
/* The same in a shape long in one or two directions, so that the library needs more than one of its pieces there: kind
   from 0 to PROBLEM_LONG_SHAPES - 1. */
enum { PROBLEM_LONG_SHAPES = 15 };
struct problem_options problem_options_long(uint64_t seed, moe_dtype dtype, int kind);
/* One of nkilib's five by number; the fourth, PRE_SCALE_DELAYED, is PRE_SCALE and a hint. */
enum { PROBLEM_AFFINITY_MODES = 5 };
void problem_affinity_mode(struct problem_options *o, int64_t number);
/* After fields were changed by hand: makes dependent fields agree again. */
void problem_options_settle(struct problem_options *o);

/* Tensors from malloc with allocate == NULL. 0 = out of memory. */
int problem_open(struct problem *p, const struct problem_options *o, problem_allocate allocate, void *user);
void problem_close(struct problem *p, problem_release release, void *user);
void problem_fill(struct problem *p); /* all tensors, outputs too: they may be accumulated into */

void problem_make_args(const struct problem *p, struct problem_args *args);
moe_status problem_call(enum problem_op op, moe_context *ctx, const struct problem_args *args);
moe_status problem_workspace_size(enum problem_op op, moe_context *ctx, const struct problem_args *args, size_t *bytes);
void problem_set_workspace(enum problem_op op, struct problem_args *args, void *workspace, size_t bytes);

/* One operation with a workspace of exactly the right size from malloc, full of NaN; problem_run_all fills and runs all
   in order, and returns the first error, with *op the operation that it came from. */
moe_status problem_run(const struct problem *p, moe_context *ctx, enum problem_op op);
moe_status problem_run_all(struct problem *p, moe_context *ctx, enum problem_op *op);

/* h continued over the elements as integers: the same on either byte order. */
uint64_t problem_hash_bytes(uint64_t h, const void *data, int64_t count, int element);
uint64_t problem_hash(const struct problem *p, uint64_t h, enum problem_op op);

size_t problem_tensor_bytes(const struct problem *p, int tensor);
const char *problem_op_name(enum problem_op op);
const char *problem_dtype_name(moe_dtype dtype);
/* "seed=.. dtype=.. T=.. .. isa=.. threads=..", for the repro line of a failure. */
void problem_describe(const struct problem *p, const moe_context *ctx, char *text, size_t bytes);

#endif /* MOE_TEST_PROBLEM_H */
