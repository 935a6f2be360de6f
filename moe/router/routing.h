/* A routing from each of its forms to the others, through the list of its rows: slots sorted by expert. */
#ifndef MOE_ROUTER_ROUTING_H
#define MOE_ROUTER_ROUTING_H

typedef enum moe_routing_form_ { MOE_FORM_TOPK, MOE_FORM_SORTED, MOE_FORM_BLOCKS } moe_routing_form_;

typedef struct moe_routing_ {
  const moe_routing_args *args;
  moe_routing_form_ form; /* that is read */
  int64_t slots, capacity;
  int64_t *count; /* [E]: an expert's rows before dropping */
  int64_t *first; /* [E+1]: rows of the experts before */
  int64_t *next;  /* [E]: the next row */
  int32_t *slot;  /* [slots]: of each row */
  int32_t *link; /* [slots]: from sorted whether a slot was met; with slot_experts the token's next slot of an expert */
  int32_t *used; /* [T]: from blocks a token's rows, or its first slot of an expert */
  int64_t *pair_first, *pair_count; /* of slot_experts, as first, count and slot are */
  int32_t *pair;
} moe_routing_;

MOE_FN void moe_routing_layout_(void *state, moe_arena_ *arena, int64_t workers) {
  moe_routing_ *r = (moe_routing_ *)state;
  const int64_t E = r->args->E * 8, ids = r->slots * 4;
  const int blocks = r->form == MOE_FORM_BLOCKS;
  (void)workers;
  r->count = (int64_t *)moe_take_(arena, E);
  r->first = (int64_t *)moe_take_(arena, E + 8);
  r->next = (int64_t *)moe_take_(arena, E);
  r->slot = (int32_t *)moe_take_(arena, ids);
  r->link = (int32_t *)moe_take_(arena, r->form == MOE_FORM_TOPK ? 0 : ids);
  r->used = (int32_t *)moe_take_(arena, blocks ? r->args->T * 4 : 0);
  r->pair_count = (int64_t *)moe_take_(arena, blocks ? E : 0);
  r->pair_first = (int64_t *)moe_take_(arena, blocks ? E + 8 : 0);
  r->pair = (int32_t *)moe_take_(arena, blocks ? ids : 0);
}

MOE_FN void moe_fill_ids_(int32_t *ids, int64_t from, int64_t to, int32_t id) {
  for (int64_t i = from; i < to; i++) ids[i] = id;
}

/* --------------------------------------------------------------------------------------------------------- reading */

/* Where each expert's rows begin, with at most `capacity` of its `count`. */
MOE_FN void moe_routing_begin_(const int64_t *count, int64_t capacity, int64_t E, int64_t *first, int64_t *next) {
  first[0] = 0;
  for (int64_t e = 0; e < E; e++) {
    next[e] = first[e];
    first[e + 1] = first[e] + moe_min_(count[e], capacity);
  }
}

/* A stable sort of the slots by expert; those above `capacity` are left out. Returns 0 for an id outside [-1,E). */
MOE_FN int moe_routing_sort_(const int32_t *expert, int64_t slots, int64_t E, int64_t capacity, int64_t *count,
                             int64_t *first, int64_t *next, int32_t *slot) {
  memset(count, 0, (size_t)E * sizeof *count);
  for (int64_t s = 0; s < slots; s++) {
    if (expert[s] < -1 || expert[s] >= E) return 0;
    if (expert[s] >= 0) count[expert[s]]++;
  }
  moe_routing_begin_(count, capacity, E, first, next);
  for (int64_t s = 0; s < slots; s++)
    if (expert[s] >= 0 && next[expert[s]] < first[expert[s] + 1]) slot[next[expert[s]]++] = (int32_t)s;
  return 1;
}

MOE_FN moe_status moe_routing_read_topk_(moe_context *ctx, moe_routing_ *r) {
  const moe_routing_args *args = r->args;
  return moe_routing_sort_(args->expert_index, r->slots, args->E, r->capacity, r->count, r->first, r->next, r->slot)
             ? MOE_OK
             : moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "expert_index", "has an id outside [-1,E)");
}

MOE_FN moe_status moe_routing_read_sorted_(moe_context *ctx, moe_routing_ *r) {
  const moe_routing_args *args = r->args;
  int64_t position = 0;
  for (int64_t e = 0; e < args->E; e++) {
    if (args->m_sizes[e] < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "m_sizes", "has a negative count");
    position += r->count[e] = args->m_sizes[e];
    if (position > r->slots) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "m_sizes", "add up to more than T*K");
  }
  moe_routing_begin_(r->count, r->capacity, args->E, r->first, r->next);
  moe_fill_ids_(r->link, 0, r->slots, 0);
  position = 0;
  for (int64_t e = 0; e < args->E; e++)
    for (int64_t i = 0; i < r->count[e]; i++) {
      const int32_t slot = args->gather_indices[position++];
      if (slot < 0 || slot >= r->slots)
        return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "gather_indices", "has a slot outside [0,T*K)");
      if (r->link[slot]++) return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "gather_indices", "names a slot twice");
      if (r->next[e] < r->first[e + 1]) r->slot[r->next[e]++] = slot;
    }
  return MOE_OK;
}

/* The expert of a block, E for none. */
MOE_FN int64_t moe_routing_block_(const moe_routing_args *args, int64_t b) {
  if (args->conditions && args->conditions[b] == 0) return args->E;
  return args->block_to_expert ? args->block_to_expert[b] : b;
}

MOE_FN moe_status moe_routing_check_blocks_(moe_context *ctx, const moe_routing_args *args) {
  if (!args->block_to_expert && args->N != args->E && args->N > 0)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "N", "must be E without block_to_expert");
  const int64_t low = args->skip_token ? -1 : 0, high = args->skip_token ? args->T - 1 : args->T;
  for (int64_t b = 0; b < args->N; b++) {
    if (args->conditions && args->conditions[b] != 0 && args->conditions[b] != 1)
      return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "conditions", "must hold 0 or 1");
    if (args->block_to_expert && (args->block_to_expert[b] < 0 || args->block_to_expert[b] > args->E))
      return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "block_to_expert", "has an expert outside [0,E], E meaning none");
  }
  for (int64_t i = 0; i < args->N * args->B; i++)
    if (args->token_position_to_id[i] < low || args->token_position_to_id[i] > high)
      return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "token_position_to_id",
                       "has an id that is neither a token nor the padding id");
  return MOE_OK;
}

/* Goes through the rows of all blocks: counts them or, with `places`, lists their tokens. Returns 0 for a token with
   more than K. */
MOE_FN int moe_routing_blocks_rows_(moe_routing_ *r, int places) {
  const moe_routing_args *args = r->args;
  for (int64_t b = 0; b < args->N; b++) {
    const int64_t e = moe_routing_block_(args, b);
    for (int64_t i = b * args->B; i < (b + 1) * args->B && e < args->E; i++) {
      const int32_t t = args->token_position_to_id[i];
      if (t < 0 || t == args->T) continue;
      if (places) r->slot[r->next[e]++] = t;
      else if (r->count[e]++, ++r->used[t] > args->K) return 0;
    }
  }
  return 1;
}

/* From the rows' tokens to slots of slot_experts: for each expert a list of each token's slots. */
MOE_FN int moe_routing_match_(moe_routing_ *r) {
  const int64_t K = r->args->K;
  moe_fill_ids_(r->used, 0, r->args->T, -1);
  for (int64_t e = 0; e < r->args->E; e++) {
    const int64_t from = r->pair_first[e], to = r->pair_first[e + 1];
    for (int64_t i = to - 1; i >= from; i--) {
      int32_t *head = r->used + r->pair[i] / K;
      r->link[r->pair[i]] = *head;
      *head = r->pair[i];
    }
    for (int64_t row = r->first[e]; row < r->first[e + 1]; row++) {
      int32_t *head = r->used + r->slot[row];
      if (*head < 0) return 0;
      r->slot[row] = *head;
      *head = r->link[*head];
    }
    for (int64_t i = from; i < to; i++) r->used[r->pair[i] / K] = -1;
  }
  return 1;
}

MOE_FN moe_status moe_routing_read_blocks_(moe_context *ctx, moe_routing_ *r) {
  const moe_routing_args *args = r->args;
  MOE_TRY(moe_routing_check_blocks_(ctx, args));
  memset(r->count, 0, (size_t)args->E * sizeof *r->count);
  moe_fill_ids_(r->used, 0, args->T, 0);
  if (!moe_routing_blocks_rows_(r, 0))
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "token_position_to_id", "has a token more than K times");
  if (args->slot_experts && !moe_routing_sort_(args->slot_experts, r->slots, args->E, INT64_MAX, r->pair_count,
                                               r->pair_first, r->next, r->pair))
    return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "slot_experts", "has an id outside [-1,E)");
  moe_routing_begin_(r->count, r->capacity, args->E, r->first, r->next);
  moe_routing_blocks_rows_(r, 1);
  if (args->slot_experts)
    return moe_routing_match_(r) ? MOE_OK
                                 : moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "token_position_to_id",
                                             "has a row that slot_experts has no slot for");
  moe_fill_ids_(r->used, 0, args->T, 0);
  for (int64_t row = 0; row < r->first[args->E]; row++) {
    const int32_t t = r->slot[row];
    r->slot[row] = (int32_t)(t * args->K) + r->used[t]++;
  }
  return MOE_OK;
}

/* --------------------------------------------------------------------------------------------------------- writing */

MOE_FN int64_t moe_routing_rows_(const moe_routing_ *r, int64_t e) { return r->first[e + 1] - r->first[e]; }

/* Blocks of expert e, and its rows in its padded bin. */
MOE_FN int64_t moe_routing_blocks_(const moe_routing_ *r, int64_t e) {
  return r->args->block_per_expert ? 1 : moe_ceil_div_(moe_routing_rows_(r, e), r->args->B);
}
MOE_FN int64_t moe_routing_padded_(const moe_routing_ *r, int64_t e) {
  const int64_t multiple = r->args->bin_multiple ? r->args->bin_multiple : 128;
  return moe_ceil_div_(moe_routing_rows_(r, e), multiple) * multiple;
}

/* Before anything is written. */
MOE_FN moe_status moe_routing_check_room_(moe_context *ctx, const moe_routing_ *r) {
  const moe_routing_args *args = r->args;
  int64_t blocks = 0, padded = 0;
  for (int64_t e = 0; e < args->E; e++) {
    if (r->form != MOE_FORM_BLOCKS && args->token_position_to_id) blocks += moe_routing_blocks_(r, e);
    padded = args->padded_bins ? moe_add_(padded, moe_routing_padded_(r, e)) : 0;
    if (padded < 0 || padded > INT32_MAX)
      return moe_fail_(ctx, MOE_ERROR_OVERFLOW, "padded_bins", "do not fit in 32 bits");
  }
  return blocks <= args->N || !args->token_position_to_id
             ? MOE_OK
             : moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "N", "is too small: this routing needs more blocks");
}

MOE_FN void moe_routing_write_blocks_(const moe_routing_ *r) {
  const moe_routing_args *args = r->args;
  const moe_blocks_out_ out = {args->B, args->skip_token ? -1 : (int32_t)args->T, args->token_position_to_id,
                               args->block_to_expert, args->conditions};
  int64_t block = 0;
  for (int64_t e = 0; e < args->E; e++) {
    const int64_t n = moe_routing_rows_(r, e), end = block + moe_routing_blocks_(r, e);
    for (int64_t i = 0; i < n; i++)
      out.token_position_to_id[block * args->B + i] = (int32_t)(r->slot[r->first[e] + i] / args->K);
    moe_blocks_finish_(&out, block, end, n, e);
    block = end;
  }
  moe_blocks_end_(&out, block, args->N, args->E);
}

/* What an expert has one number of. */
MOE_FN void moe_routing_write_experts_(const moe_routing_ *r) {
  const moe_routing_args *args = r->args;
  int64_t padded = 0;
  for (int64_t e = 0; e < args->E; e++) {
    if (r->form != MOE_FORM_SORTED && args->m_sizes) args->m_sizes[e] = (int32_t)moe_routing_rows_(r, e);
    if (args->tokens_per_expert) args->tokens_per_expert[e] = r->count[e];
    if (args->bins) args->bins[e] = (int32_t)r->first[e + 1];
    if (args->padded_bins) args->padded_bins[e] = (int32_t)(padded += moe_routing_padded_(r, e));
  }
}

MOE_FN void moe_routing_write_(const moe_routing_ *r) {
  const moe_routing_args *args = r->args;
  const int64_t rows = r->first[args->E];
  int32_t *gather = r->form == MOE_FORM_SORTED ? NULL : args->gather_indices, *positions = args->slot_positions,
          *expert = r->form == MOE_FORM_TOPK ? NULL : args->expert_index;
  moe_routing_write_experts_(r);
  if (gather) moe_fill_ids_(gather, rows, r->slots, -1);
  if (positions) moe_fill_ids_(positions, 0, r->slots, -1);
  if (expert) moe_fill_ids_(expert, 0, r->slots, -1);
  for (int64_t e = 0; e < args->E; e++)
    for (int64_t row = r->first[e]; row < r->first[e + 1]; row++) {
      if (gather) gather[row] = r->slot[row];
      if (positions) positions[r->slot[row]] = (int32_t)row;
      if (expert) expert[r->slot[row]] = (int32_t)e;
    }
  if (r->form != MOE_FORM_BLOCKS && args->token_position_to_id) moe_routing_write_blocks_(r);
}

/* ------------------------------------------------------------------------------------------------------- operation */

/* Tokens may be none. */
MOE_FN moe_status moe_routing_check_tokens_(moe_context *ctx, int64_t T, int64_t K) {
  MOE_TRY(moe_check_count_or_none_(ctx, "T", T));
  MOE_TRY(moe_check_positive_(ctx, "K", K));
  const int64_t slots = moe_mul_(T, K);
  return slots >= 0 && slots < INT32_MAX
             ? MOE_OK
             : moe_fail_(ctx, MOE_ERROR_OVERFLOW, "T", "times K does not fit in 32-bit slots");
}

MOE_FN moe_status moe_routing_check_options_(moe_context *ctx, const moe_routing_ *r) {
  const moe_routing_args *args = r->args;
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_routing_check_tokens_(ctx, args->T, args->K));
  MOE_TRY(moe_check_count_(ctx, "E", args->E));
  MOE_TRY(moe_check_flag_(ctx, "skip_token", args->skip_token));
  MOE_TRY(moe_check_flag_(ctx, "block_per_expert", args->block_per_expert));
  if (args->bin_multiple < 0 || args->bin_multiple > INT32_MAX)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "bin_multiple", "must be from 0 to 2^31-1");
  if (args->capacity < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "capacity", "is negative");
  if (r->form == MOE_FORM_BLOCKS && (args->capacity || args->block_per_expert))
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, args->capacity ? "capacity" : "block_per_expert",
                     "is for writing blocks");
  if (r->form != MOE_FORM_BLOCKS && args->slot_experts)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "slot_experts", "is for reading blocks");
  if (r->form != MOE_FORM_BLOCKS && !args->token_position_to_id) {
    const char *with = args->block_to_expert ? "is NULL, but block_to_expert is not"
                       : args->conditions    ? "is NULL, but conditions is not"
                                             : NULL;
    return with ? moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "token_position_to_id", with) : MOE_OK;
  }
  MOE_TRY(moe_check_positive_(ctx, "B", args->B));
  MOE_TRY(moe_check_not_negative_(ctx, "N", args->N));
  if (args->block_per_expert && args->N != args->E)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "N", "must be E with block_per_expert");
  if (args->block_per_expert && args->capacity > args->B)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "capacity", "exceeds B, the rows of an expert's only block");
  return MOE_OK;
}

MOE_FN moe_status moe_routing_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_routing_ *r = (moe_routing_ *)state;
  const moe_routing_args *args = r->args = (const moe_routing_args *)call->args;
  r->form = (moe_routing_form_)call->kind;
  MOE_TRY(moe_routing_check_options_(ctx, r));
  r->slots = args->T * args->K;
  r->capacity = args->capacity > 0                                     ? args->capacity
                : args->token_position_to_id && args->block_per_expert ? args->B
                                                                       : INT64_MAX;
  const int sorted = r->form == MOE_FORM_SORTED, blocks = r->form == MOE_FORM_BLOCKS;
  const moe_role_ optional = MOE_OUTPUT_OPTIONAL;
  const int64_t slots = r->slots * 4, experts = moe_mul_(args->E, 4);
  const int places = blocks || args->token_position_to_id;
  const int64_t N = places ? moe_mul_(args->N, 4) : 0, ids = places ? moe_mul_(N, args->B) : 0;
  const moe_tensor_ own[] = {
      {"expert_index", args->expert_index, slots, 4, r->form == MOE_FORM_TOPK ? MOE_INPUT : optional},
      {"m_sizes", args->m_sizes, experts, 4, sorted ? MOE_INPUT : optional},
      {"gather_indices", args->gather_indices, slots, 4, sorted ? MOE_INPUT : optional},
      {"token_position_to_id", args->token_position_to_id, ids, 4, blocks ? MOE_INPUT : optional},
      {"block_to_expert", args->block_to_expert, N, 4,
       blocks                       ? MOE_INPUT_OPTIONAL
       : args->token_position_to_id ? MOE_OUTPUT
                                    : optional},
      {"conditions", args->conditions, moe_add_(N, 4), 4, blocks ? MOE_INPUT_OPTIONAL : optional},
      {"slot_experts", args->slot_experts, slots, 4, MOE_INPUT_OPTIONAL},
      {"tokens_per_expert", args->tokens_per_expert, moe_mul_(args->E, 8), 8, optional},
      {"slot_positions", args->slot_positions, slots, 4, optional},
      {"bins", args->bins, experts, 4, optional},
      {"padded_bins", args->padded_bins, experts, 4, optional},
  };
  return MOE_LIST_(tensors, own);
}

MOE_FN moe_status moe_routing_run_(moe_context *ctx, void *state) {
  moe_routing_ *r = (moe_routing_ *)state;
  if (r->form == MOE_FORM_TOPK) MOE_TRY(moe_routing_read_topk_(ctx, r));
  if (r->form == MOE_FORM_SORTED) MOE_TRY(moe_routing_read_sorted_(ctx, r));
  if (r->form == MOE_FORM_BLOCKS) MOE_TRY(moe_routing_read_blocks_(ctx, r));
  MOE_TRY(moe_routing_check_room_(ctx, r));
  moe_routing_write_(r);
  return MOE_OK;
}

static const moe_op_ moe_routing_op_ = {moe_routing_check_, moe_routing_layout_, moe_routing_run_, NULL, NULL};
MOE_OP_WORKSPACE_(moe_routing_from_topk, moe_routing_args, moe_routing_op_, moe_routing_, .kind = MOE_FORM_TOPK)
MOE_OP_WORKSPACE_(moe_routing_from_sorted, moe_routing_args, moe_routing_op_, moe_routing_, .kind = MOE_FORM_SORTED)
MOE_OP_WORKSPACE_(moe_routing_from_blocks, moe_routing_args, moe_routing_op_, moe_routing_, .kind = MOE_FORM_BLOCKS)

#endif
