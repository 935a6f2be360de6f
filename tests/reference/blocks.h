/* What the routing metadata says, shared by every reference. */
#ifndef REFERENCE_BLOCKS_H
#define REFERENCE_BLOCKS_H

#include <math.h>
#include <stdint.h>

#include "moe.h"

/* The expert of block b, -1 when the block does nothing. */
static inline int64_t ref_block_expert(const moe_blockwise_layer *l, int64_t b) {
  if (l->conditions && !l->conditions[b]) return -1;
  int64_t e = l->block_to_expert ? l->block_to_expert[b] : b;
  return e < l->E ? e : -1;
}

/* The token of row r of block b, -1 for padding. */
static inline int64_t ref_row_token(const moe_blockwise_layer *l, int64_t b, int64_t r) {
  int64_t t = l->token_position_to_id[b * l->B + r];
  return t < l->T ? t : -1;
}

/* Whether the row takes part in the output: with not_accumulating only a token's last block does. */
static inline int ref_row_counts(const moe_blockwise_layer *l, int not_accumulating, int64_t b, int64_t r) {
  int64_t t = ref_row_token(l, b, r);
  if (t < 0) return 0;
  for (int64_t later = b + 1; not_accumulating && later < l->N; ++later)
    for (int64_t row = 0; ref_block_expert(l, later) >= 0 && row < l->B; ++row)
      if (ref_row_token(l, later, row) == t) return 0;
  return 1;
}

static inline double ref_alpha(const moe_layer_config *o) {
  if (o->alpha != 0) return (double)o->alpha;
  return o->activation == MOE_ACT_SWISH ? (double)1.702f : o->activation == MOE_ACT_SITU ? 4.0 : 1.0;
}

static inline int ref_scales_input(const moe_layer_config *o) { return o->affinity_mode == MOE_AFFINITY_PRE_SCALE; }
static inline int ref_scales_output(const moe_layer_config *o) {
  return o->affinity_mode == MOE_AFFINITY_POST_SCALE || o->affinity_mode == MOE_AFFINITY_ON_I;
}

/* Whether a clamped value lets its gradient through; limits as the mask compares them. */
static inline int ref_open(uint32_t clamp, uint32_t upper_bit, uint32_t lower_bit, double value, double upper,
                           double lower) {
  return !((clamp & upper_bit) && !(value < upper)) && !((clamp & lower_bit) && !(lower < value));
}

/* The tokens and the routed slots (n_e) a router loss counts. */
static inline int64_t ref_loss_tokens(const moe_router_loss_args *a) {
  int64_t tokens = 0;
  for (int64_t t = 0; t < a->T; ++t) tokens += !a->token_mask || a->token_mask[t];
  return tokens;
}
static inline double ref_loss_slots(const moe_router_loss_args *a, int64_t e) { /* n_e */
  int64_t slots = 0;
  for (int64_t i = 0; i < a->T * a->K; ++i)
    slots += a->expert_index[i] == e && (!a->token_mask || a->token_mask[i / a->K]);
  return (double)slots;
}

#endif /* REFERENCE_BLOCKS_H */
