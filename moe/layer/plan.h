/* The plan of a call: the routing metadata as lists of rows. A row is one (token, expert) pair; padding, idle blocks
   and, without accumulation, overwritten rows are left out. Rows are numbered by expert and, for one expert, in block
   order, so that an expert's rows are contiguous wherever its blocks are. Rows that come from pairs, not from blocks,
   are slots, in blocks of one row. */
#ifndef MOE_LAYER_PLAN_H
#define MOE_LAYER_PLAN_H

enum {
  MOE_CHUNK_TOKENS = 1024,     /* tokens whose outputs a worker sums up at a time: 64 floats each per panel, in L2; */
  MOE_CHUNK_TOKENS_MAX = 4096, /*   or up to so many, since every chunk reads all weights, */
  MOE_CHUNK_EXPERT_ROWS_ = 128 /*   until an expert has as many rows in a chunk */
};

/* Where rows come from, if not from blocks: from tokens' experts, or from pairs that are sorted by expert already. */
typedef struct moe_pairs_ {
  int64_t K;                     /* 0: from blocks. Pair token*K + k is a token's k-th */
  int64_t identities;            /* experts E and up, whose results are their inputs: they have no rows */
  int sorted;                    /* 0: topk_index tells; 1: m_sizes and gather_indices do */
  const int32_t *topk_index;     /* [T,K]: expert of a pair, or -1 */
  const int32_t *m_sizes;        /* [E]: pairs of an expert */
  const int32_t *gather_indices; /* [T*K]: the pair at a position; NULL: position is pair */
  const float *topk_weights;     /* [T*K]: affinity of a pair; NULL: 1 */
  const float *scale;            /* [E]: of an expert's results, which affinities are multiplied by; NULL: 1 */
} moe_pairs_;

typedef struct moe_plan_ {
  moe_pairs_ pairs;
  int64_t rows, chunks;
  int64_t chunk_tokens; /* tokens of a chunk, before the layout 0 or another plan's; the last may have fewer */
  int64_t *first;       /* [E+1]: expert e owns rows first[e] .. first[e+1] */
  int32_t *token;       /* [rows] */
  int32_t *slot;        /* [rows]: block * B + row in the block */
  float *affinity;      /* [rows] */
  int32_t *run;         /* [rows]: number of its run, which is consecutive blocks of one expert */
  int32_t *run_expert;  /* [N] */
  int32_t *order;       /* [rows]: rows by chunk of tokens, then in block order */
  int64_t *chunk_first; /* [chunks+1] */
  uint8_t *used;        /* [N*B]: whether the slot is a row */
  int64_t *counters;    /* [E + chunks]: counters */
  int32_t *last;        /* [T]: each token's last slot, if only that one counts; else NULL */
  int32_t *pair;        /* [rows]: its pair; NULL: rows come from blocks */
} moe_plan_;

/* How many rows there can be. */
MOE_FN int64_t moe_plan_rows_max_(const moe_blockwise_layer *layer) {
  const int64_t slots = moe_mul_(layer->N, layer->B);
  return layer->max_rows > 0 ? moe_min_(layer->max_rows, slots) : slots;
}

/* Tokens of a chunk. Chunks are equal, so that workers finish together. */
MOE_FN int64_t moe_plan_chunk_tokens_(const moe_blockwise_layer *layer) {
  const double rows = (double)moe_plan_rows_max_(layer) / (double)moe_max_(1, layer->E); /* of an expert */
  int64_t chunk = MOE_CHUNK_TOKENS;
  while (chunk < MOE_CHUNK_TOKENS_MAX && rows * (double)chunk < (double)MOE_CHUNK_EXPERT_ROWS_ * (double)layer->T)
    chunk *= 2;
  return moe_equal_part_(layer->T, chunk);
}

/* Whether a pair is of such an expert, and its affinity. */
MOE_FN int moe_pair_is_identity_(const moe_pairs_ *pairs, int64_t E, int64_t pair) {
  return pairs->identities > 0 && pairs->topk_index[pair] >= E;
}
MOE_FN float moe_pair_affinity_(const moe_pairs_ *pairs, int64_t pair) {
  return pairs->topk_weights ? pairs->topk_weights[pair] : 1.0f;
}

MOE_FN void moe_plan_layout_(moe_plan_ *plan, moe_arena_ *arena, const moe_blockwise_layer *layer, int last_only) {
  const int64_t rows = moe_mul_(moe_plan_rows_max_(layer), 4);
  if (!plan->chunk_tokens) plan->chunk_tokens = moe_plan_chunk_tokens_(layer);
  plan->chunks = moe_ceil_div_(layer->T, moe_max_(1, plan->chunk_tokens));
  plan->first = (int64_t *)moe_take_(arena, (layer->E + 1) * 8);
  plan->token = (int32_t *)moe_take_(arena, rows);
  plan->slot = (int32_t *)moe_take_(arena, rows);
  plan->affinity = (float *)moe_take_(arena, rows);
  plan->run = (int32_t *)moe_take_(arena, rows);
  const int pairs = plan->pairs.K > 0;
  plan->run_expert = (int32_t *)moe_take_(arena, moe_mul_(pairs ? layer->E : layer->N, 4));
  plan->order = (int32_t *)moe_take_(arena, rows);
  plan->chunk_first = (int64_t *)moe_take_(arena, (plan->chunks + 1) * 8);
  plan->used = pairs ? NULL : (uint8_t *)moe_take_(arena, moe_mul_(layer->N, layer->B));
  plan->pair = pairs ? (int32_t *)moe_take_(arena, rows) : NULL;
  plan->counters = (int64_t *)moe_take_(arena, (layer->E + plan->chunks) * 8);
  plan->last = last_only ? (int32_t *)moe_take_(arena, moe_mul_(layer->T, 4)) : NULL;
}

/* The expert of block b, or -1 if it is idle. */
MOE_FN int64_t moe_block_expert_(const moe_blockwise_layer *layer, int64_t b) {
  if (layer->conditions && layer->conditions[b] == 0) return -1;
  if (!layer->block_to_expert) return b;
  return layer->block_to_expert[b] == layer->E ? -1 : layer->block_to_expert[b];
}

MOE_FN int64_t moe_valid_tokens_(const moe_blockwise_layer *layer) {
  return layer->num_valid_tokens ? *layer->num_valid_tokens : layer->T;
}

MOE_FN int moe_is_padding_(const moe_blockwise_layer *layer, int32_t token) {
  return token < 0 || token >= moe_valid_tokens_(layer);
}

/* Of pairs; whether one is named twice is seen when they are placed. */
MOE_FN moe_status moe_plan_check_pairs_(moe_context *ctx, const moe_pairs_ *pairs, int64_t T, int64_t E) {
  const int64_t all = T * pairs->K;
  int64_t rows = 0;
  for (int64_t i = 0; i < all && !pairs->sorted && pairs->topk_index; i++) /* NULL: to be chosen yet */
    if (pairs->topk_index[i] < -1 || pairs->topk_index[i] >= E + pairs->identities)
      return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "topk_index", "has no expert's id, and not -1 for none");
  if (!pairs->sorted) return MOE_OK;
  for (int64_t e = 0; e < E; e++) {
    if (pairs->m_sizes[e] < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "m_sizes", "has a negative count");
    rows += pairs->m_sizes[e];
  }
  if (rows > all) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "m_sizes", "add up to more than num_tokens*topk");
  for (int64_t i = 0; i < rows && pairs->gather_indices; i++)
    if (pairs->gather_indices[i] < 0 || pairs->gather_indices[i] >= all)
      return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "gather_indices", "has a slot outside [0,num_tokens*topk)");
  return MOE_OK;
}

/* Checks every id before any is used. */
MOE_FN moe_status moe_plan_check_(moe_context *ctx, const moe_plan_ *plan, const moe_blockwise_layer *layer) {
  if (plan->pairs.K) return moe_plan_check_pairs_(ctx, &plan->pairs, layer->T, layer->E);
  if (moe_valid_tokens_(layer) < 0 || moe_valid_tokens_(layer) > layer->T)
    return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "num_valid_tokens", "must be from 0 to T");
  for (int64_t b = 0; b < layer->N; b++) {
    if (layer->conditions && layer->conditions[b] != 0 && layer->conditions[b] != 1)
      return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "conditions", "must hold 0 or 1");
    if (layer->block_to_expert && (layer->block_to_expert[b] < 0 || layer->block_to_expert[b] > layer->E))
      return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "block_to_expert", "has an expert outside [0,E], E meaning none");
  }
  const int64_t low = layer->skip_token ? -1 : 0, high = layer->skip_token ? layer->T - 1 : layer->T;
  int64_t rows = 0;
  for (int64_t i = 0; i < layer->N * layer->B; i++) {
    const int32_t token = layer->token_position_to_id[i];
    if (token < low || token > high)
      return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "token_position_to_id",
                       "has an id that is neither a token nor the padding id");
    rows += !moe_is_padding_(layer, token);
  }
  if (rows > moe_plan_rows_max_(layer))
    return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "token_position_to_id", "has more tokens than max_rows");
  return MOE_OK;
}

/* Marks the slots that are rows and counts them by expert and by chunk. */
MOE_FN void moe_plan_count_(moe_plan_ *plan, const moe_blockwise_layer *layer) {
  int64_t *by_expert = plan->counters, *by_chunk = plan->counters + layer->E;
  memset(plan->counters, 0, (size_t)(layer->E + plan->chunks) * sizeof *plan->counters);
  for (int64_t b = 0; b < layer->N; b++) {
    const int64_t expert = moe_block_expert_(layer, b);
    for (int64_t slot = b * layer->B; slot < (b + 1) * layer->B; slot++) {
      const int32_t token = layer->token_position_to_id[slot];
      plan->used[slot] = expert >= 0 && !moe_is_padding_(layer, token);
      if (plan->used[slot] && plan->last) plan->last[token] = (int32_t)slot;
    }
  }
  for (int64_t b = 0; b < layer->N; b++) {
    const int64_t expert = moe_block_expert_(layer, b);
    for (int64_t slot = b * layer->B; slot < (b + 1) * layer->B; slot++) {
      const int32_t token = layer->token_position_to_id[slot];
      if (plan->used[slot] && plan->last && plan->last[token] != slot) plan->used[slot] = 0;
      if (!plan->used[slot]) continue;
      by_expert[expert]++;
      by_chunk[token / plan->chunk_tokens]++;
    }
  }
  moe_prefix_sums_(plan->first, by_expert, layer->E);
  moe_prefix_sums_(plan->chunk_first, by_chunk, plan->chunks);
  plan->rows = plan->first[layer->E];
}

/* Sorts pairs by expert, in ascending order. */
MOE_FN void moe_plan_sort_pairs_(moe_plan_ *plan, const moe_blockwise_layer *layer) {
  const int32_t *expert = plan->pairs.topk_index;
  const int64_t all = layer->T * plan->pairs.K, E = layer->E;
  memset(plan->counters, 0, (size_t)layer->E * sizeof *plan->counters);
  for (int64_t i = 0; i < all; i++)
    if (expert[i] >= 0 && expert[i] < E) plan->counters[expert[i]]++;
  moe_prefix_sums_(plan->first, plan->counters, layer->E);
  for (int64_t i = 0; i < all; i++)
    if (expert[i] >= 0 && expert[i] < E) plan->pair[plan->first[expert[i]] + plan->counters[expert[i]]++] = (int32_t)i;
}

/* Takes the pairs that are sorted, each of which may occur once. */
MOE_FN moe_status moe_plan_take_pairs_(moe_context *ctx, moe_plan_ *plan, const moe_blockwise_layer *layer) {
  const int32_t *gather = plan->pairs.gather_indices;
  int32_t *seen = plan->order; /* [T*K] until it is filled */
  plan->first[0] = 0;
  for (int64_t e = 0; e < layer->E; e++) plan->first[e + 1] = plan->first[e] + plan->pairs.m_sizes[e];
  memset(seen, 0, (size_t)(layer->T * plan->pairs.K) * sizeof *seen);
  for (int64_t i = 0; i < plan->first[layer->E]; i++) {
    plan->pair[i] = gather ? gather[i] : (int32_t)i;
    if (seen[plan->pair[i]]++) return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "gather_indices", "names a slot twice");
  }
  return MOE_OK;
}

/* The rows of pairs. Those of an expert are one run. */
MOE_FN moe_status moe_plan_build_pairs_(moe_context *ctx, moe_plan_ *plan, const moe_blockwise_layer *layer) {
  int64_t *by_chunk = plan->counters + layer->E;
  if (plan->pairs.sorted) MOE_TRY(moe_plan_take_pairs_(ctx, plan, layer));
  else moe_plan_sort_pairs_(plan, layer);
  plan->rows = plan->first[layer->E];
  memset(by_chunk, 0, (size_t)plan->chunks * sizeof *by_chunk);
  for (int64_t e = 0; e < layer->E; e++) {
    plan->run_expert[e] = (int32_t)e;
    for (int64_t row = plan->first[e]; row < plan->first[e + 1]; row++) {
      plan->run[row] = (int32_t)e;
      plan->slot[row] = (int32_t)row;
      plan->token[row] = (int32_t)(plan->pair[row] / plan->pairs.K);
      plan->affinity[row] = moe_pair_affinity_(&plan->pairs, plan->pair[row]);
      if (plan->pairs.scale) plan->affinity[row] = plan->affinity[row] * plan->pairs.scale[e];
      by_chunk[plan->token[row] / plan->chunk_tokens]++;
    }
  }
  moe_prefix_sums_(plan->chunk_first, by_chunk, plan->chunks);
  for (int64_t row = 0; row < plan->rows; row++) {
    const int64_t chunk = plan->token[row] / plan->chunk_tokens;
    plan->order[plan->chunk_first[chunk] + by_chunk[chunk]++] = (int32_t)row;
  }
  return MOE_OK;
}

/* Affinities become float; where the layer has none they are 1. */
MOE_FN moe_status moe_plan_build_(moe_context *ctx, moe_plan_ *plan, const moe_blockwise_layer *layer,
                                  const moe_kernels *kernels, moe_dtype affinity_dtype) {
  const char *affinities = (const char *)layer->expert_affinities_masked;
  const int64_t size = moe_dtype_bytes_(affinity_dtype);
  int64_t *by_expert = plan->counters, *by_chunk = plan->counters + layer->E, previous = -1;
  int32_t run = -1;
  if (plan->pairs.K) return moe_plan_build_pairs_(ctx, plan, layer);
  moe_plan_count_(plan, layer);
  for (int64_t b = 0; b < layer->N; b++) {
    const int64_t expert = moe_block_expert_(layer, b);
    if (expert < 0) continue;
    if (expert != previous) plan->run_expert[++run] = (int32_t)expert;
    previous = expert;
    for (int64_t slot = b * layer->B; slot < (b + 1) * layer->B; slot++) {
      if (!plan->used[slot]) continue;
      const int32_t token = layer->token_position_to_id[slot];
      const int64_t row = plan->first[expert] + by_expert[expert]++, chunk = token / plan->chunk_tokens;
      plan->token[row] = token;
      plan->slot[row] = (int32_t)slot;
      plan->run[row] = run;
      plan->affinity[row] = 1.0f;
      if (affinities)
        moe_load_row_(kernels->vec, affinity_dtype, &plan->affinity[row],
                      affinities + (token * layer->E + expert) * size, 1);
      plan->order[plan->chunk_first[chunk] + by_chunk[chunk]++] = (int32_t)row;
    }
  }
  return MOE_OK;
}

#endif
