/* From the router's choice to blocks: a counting sort of the (token, expert) pairs by expert, tokens ascending. Tokens
   are counted and placed in chunks, one per worker; the order of the result does not depend on how many there are. */
#ifndef MOE_ROUTER_BLOCKS_H
#define MOE_ROUTER_BLOCKS_H

int64_t moe_route_blocks_count(int64_t T, int64_t E, int64_t K, int64_t B) {
  if (T <= 0 || E <= 0 || K <= 0 || B <= 0) return 0;
  const int64_t pairs = moe_mul_(T, K);
  if (pairs < E) return moe_max_(pairs, 0);
  return moe_max_(moe_add_(moe_ceil_div_(pairs - (E - 1), B), E - 1), 0);
}

typedef struct moe_route_ {
  const moe_route_blocks_args *args;
  const moe_kernels *kernels;
  moe_dtype dtype; /* of the affinities */
  int64_t capacity, chunks;
  int by_weight;
  int64_t *count;       /* [chunks][E]: pairs of a chunk, then the position of its next pair */
  int32_t *seen;        /* [chunks][E]: the last token of the chunk that selects the expert */
  int32_t *found;       /* [chunks]: see moe_route_count_ */
  int64_t *first;       /* [E+1]: pairs of the experts before */
  int64_t *first_block; /* [E+1] */
  uint64_t *pair;       /* [T*K]: sorted by expert, as ranks by weight whose ids are tokens */
  uint64_t *kept;       /* [T*K]: an expert's best pairs, if pairs are dropped by weight */
} moe_route_;

enum { MOE_ROUTE_CHUNK_ = 512 }; /* tokens of a chunk, at least */

MOE_FN void moe_route_layout_(void *state, moe_arena_ *arena, int64_t workers) {
  moe_route_ *route = (moe_route_ *)state;
  const int64_t E = route->args->E, pairs = moe_mul3_(route->args->T, route->args->K, 8);
  route->chunks = moe_min_(workers, moe_max_(1, moe_ceil_div_(route->args->T, MOE_ROUTE_CHUNK_)));
  route->count = (int64_t *)moe_take_(arena, moe_mul3_(route->chunks, E, 8));
  route->seen = (int32_t *)moe_take_(arena, moe_mul3_(route->chunks, E, 4));
  route->found = (int32_t *)moe_take_(arena, route->chunks * 4);
  route->first = (int64_t *)moe_take_(arena, (E + 1) * 8);
  route->first_block = (int64_t *)moe_take_(arena, (E + 1) * 8);
  route->pair = (uint64_t *)moe_take_(arena, pairs);
  route->kept = (uint64_t *)moe_take_(arena, route->by_weight ? pairs : 0);
}

/* --------------------------------------------------------------------------------------------------------- counting */

MOE_FN int64_t moe_route_first_token_(const moe_route_ *route, int64_t chunk) {
  const int64_t share = route->args->T / route->chunks, extra = route->args->T % route->chunks;
  return chunk * share + moe_min_(chunk, extra);
}

enum { MOE_ROUTE_OUTSIDE_ = 1, MOE_ROUTE_TWICE_ = 2 }; /* an id out of range; a token that names an expert twice */

MOE_FN void moe_route_count_(void *arg, int64_t chunk, moe_worker_ *worker) {
  const moe_route_ *route = (const moe_route_ *)arg;
  const moe_route_blocks_args *args = route->args;
  const int64_t E = args->E, K = args->K, last = moe_route_first_token_(route, chunk + 1);
  int64_t *count = route->count + chunk * E;
  int32_t *seen = route->seen + chunk * E, found = 0;
  (void)worker;
  memset(count, 0, (size_t)E * sizeof *count);
  memset(seen, 0xff, (size_t)E * sizeof *seen);
  for (int64_t t = moe_route_first_token_(route, chunk); t < last; t++)
    for (int64_t k = 0; k < K; k++) {
      const int32_t e = args->expert_index[t * K + k];
      if (e == -1) continue;
      if (e < 0 || e >= E) {
        found |= MOE_ROUTE_OUTSIDE_;
        continue;
      }
      if (seen[e] == t) found |= MOE_ROUTE_TWICE_;
      else count[e]++;
      seen[e] = (int32_t)t;
    }
  route->found[chunk] = found;
}

MOE_FN int64_t moe_route_kept_(const moe_route_ *route, int64_t e) {
  return moe_min_(route->first[e + 1] - route->first[e], route->capacity);
}

/* Adds up the chunks' counts. The caller's tensors are not written before. */
MOE_FN moe_status moe_route_sum_(moe_context *ctx, moe_route_ *route) {
  const moe_route_blocks_args *args = route->args;
  int64_t pairs = 0, blocks = 0;
  for (int64_t c = 0; c < route->chunks; c++)
    if (route->found[c] & MOE_ROUTE_OUTSIDE_)
      return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "expert_index", "has an id outside [-1,E)");
  route->first[0] = route->first_block[0] = 0;
  for (int64_t e = 0; e < args->E; e++) {
    for (int64_t c = 0; c < route->chunks; c++) {
      const int64_t n = route->count[c * args->E + e];
      route->count[c * args->E + e] = pairs;
      pairs += n;
    }
    route->first[e + 1] = pairs;
    blocks += args->block_per_expert ? 1 : moe_ceil_div_(moe_route_kept_(route, e), args->B);
    route->first_block[e + 1] = blocks;
  }
  return blocks <= args->N
             ? MOE_OK
             : moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "N", "is too small: this routing needs more blocks");
}

/* ---------------------------------------------------------------------------------------------------------- writing */

MOE_FN char *moe_route_affinity_(const moe_route_ *route, int64_t t, int64_t e) {
  return (char *)route->args->expert_affinities_masked + (t * route->args->E + e) * moe_dtype_bytes_(route->dtype);
}

/* The weight of the expert in slot k: of all slots that have it, which are from k on. */
MOE_FN float moe_route_weight_(const moe_route_ *route, int64_t chunk, int64_t t, int64_t k) {
  const int64_t K = route->args->K;
  const int32_t *index = route->args->expert_index + t * K;
  const float *weight = route->args->expert_weights + t * K;
  float sum = weight[k];
  for (int64_t j = k + 1; j < K && route->found[chunk] & MOE_ROUTE_TWICE_; j++)
    if (index[j] == index[k]) sum = sum + weight[j];
  return sum;
}

/* Work item: a chunk's affinities, as if nothing were dropped, and its pairs. */
MOE_FN void moe_route_place_(void *arg, int64_t chunk, moe_worker_ *worker) {
  const moe_route_ *route = (const moe_route_ *)arg;
  const moe_route_blocks_args *args = route->args;
  const int64_t E = args->E, K = args->K, last = moe_route_first_token_(route, chunk + 1);
  const size_t row = (size_t)(E * moe_dtype_bytes_(route->dtype));
  int64_t *next = route->count + chunk * E;
  int32_t *seen = route->seen + chunk * E;
  (void)worker;
  memset(seen, 0xff, (size_t)E * sizeof *seen);
  for (int64_t t = moe_route_first_token_(route, chunk); t < last; t++) {
    memset(moe_route_affinity_(route, t, 0), 0, row);
    for (int64_t k = 0; k < K; k++) {
      const int32_t e = args->expert_index[t * K + k];
      if (e < 0 || seen[e] == t) continue;
      const float weight = moe_route_weight_(route, chunk, t, k);
      seen[e] = (int32_t)t;
      moe_store_row_(route->kernels->vec, route->dtype, moe_route_affinity_(route, t, e), &weight, 1);
      route->pair[next[e]++] = moe_rank_(weight, t);
    }
  }
  if (last == args->T && !args->skip_token) memset(moe_route_affinity_(route, last, 0), 0, row);
}

/* Where blocks are written: see moe_route_blocks_args. */
typedef struct moe_blocks_out_ {
  int64_t B;
  int32_t padding, *token_position_to_id, *block_to_expert, *conditions; /* padding: its id */
} moe_blocks_out_;

/* Pads blocks [block, end), which have n tokens of expert e, and sets their expert and conditions. */
MOE_FN void moe_blocks_finish_(const moe_blocks_out_ *out, int64_t block, int64_t end, int64_t n, int64_t e) {
  for (int64_t i = block * out->B + n; i < end * out->B; i++) out->token_position_to_id[i] = out->padding;
  for (int64_t b = block; b < end; b++) {
    out->block_to_expert[b] = (int32_t)e;
    if (out->conditions) out->conditions[b] = (b - block) * out->B < n;
  }
}

/* Blocks [block, N), which no expert needs. */
MOE_FN void moe_blocks_end_(const moe_blocks_out_ *out, int64_t block, int64_t N, int64_t E) {
  moe_blocks_finish_(out, block, N, 0, E - 1);
  if (out->conditions) out->conditions[N] = 0;
}

/* Work item: expert e's blocks; e = E: the blocks that no expert needs. */
MOE_FN void moe_route_expert_(void *arg, int64_t e, moe_worker_ *worker) {
  const moe_route_ *route = (const moe_route_ *)arg;
  const moe_route_blocks_args *args = route->args;
  const moe_blocks_out_ out = {args->B, args->skip_token ? -1 : (int32_t)args->T, args->token_position_to_id,
                               args->block_to_expert, args->conditions};
  (void)worker;
  if (e == args->E) {
    moe_blocks_end_(&out, route->first_block[e], args->N, e);
    return;
  }
  const uint64_t *pair = route->pair + route->first[e];
  uint64_t *kept = route->kept + (route->by_weight ? route->first[e] : 0);
  const int64_t pairs = route->first[e + 1] - route->first[e], keep = moe_route_kept_(route, e);
  const int select = route->by_weight && keep < pairs;
  int32_t *id = args->token_position_to_id + route->first_block[e] * args->B;
  int64_t count = 0, n = 0;
  for (int64_t i = 0; i < pairs && select; i++) moe_offer_(kept, &count, keep, pair[i]);
  for (int64_t i = 0; i < pairs; i++) {
    const int64_t t = moe_rank_id_(pair[i]);
    if (select ? pair[i] >= kept[0] : n < keep) id[n++] = (int32_t)t;
    else memset(moe_route_affinity_(route, t, e), 0, (size_t)moe_dtype_bytes_(route->dtype));
  }
  moe_blocks_finish_(&out, route->first_block[e], route->first_block[e + 1], n, e);
  if (args->tokens_per_expert) args->tokens_per_expert[e] = pairs;
}

/* -------------------------------------------------------------------------------------------------------- operation */

MOE_FN moe_status moe_route_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_route_ *route = (moe_route_ *)state;
  const moe_route_blocks_args *args = route->args = (const moe_route_blocks_args *)call->args;
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_count_or_none_(ctx, "T", args->T));
  MOE_TRY(moe_check_count_(ctx, "E", args->E));
  MOE_TRY(moe_check_positive_(ctx, "K", args->K));
  MOE_TRY(moe_check_positive_(ctx, "B", args->B));
  MOE_TRY(moe_check_not_negative_(ctx, "N", args->N));
  MOE_TRY(moe_check_flag_(ctx, "skip_token", args->skip_token));
  MOE_TRY(moe_check_flag_(ctx, "block_per_expert", args->block_per_expert));
  MOE_TRY(moe_check_enum_(ctx, "drop_policy", (int)args->drop_policy, MOE_DROP_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "affinity_dtype", (int)args->affinity_dtype, MOE_DTYPE_COUNT_));
  if (args->K > args->E) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "K", "exceeds E");
  if (args->capacity < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "capacity", "is negative");
  if (args->block_per_expert && args->N != args->E)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "N", "must be E with block_per_expert");
  if (args->block_per_expert && args->capacity > args->B)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "capacity", "exceeds B, the rows of an expert's only block");
  route->kernels = moe_kernels_();
  route->dtype = moe_or_(args->affinity_dtype, call->dtype);
  route->capacity = args->capacity > 0 ? args->capacity : args->block_per_expert ? args->B : INT64_MAX;
  route->by_weight = args->drop_policy == MOE_DROP_BY_WEIGHT && route->capacity < args->T;
  const int64_t size = moe_dtype_bytes_(route->dtype);
  const int64_t picked = moe_mul3_(args->T, args->K, 4),
                affinities = moe_mul3_(args->T + !args->skip_token, args->E, size);
  const moe_tensor_ own[] = {
      {"expert_index", args->expert_index, picked, 4, MOE_INPUT},
      {"expert_weights", args->expert_weights, picked, 4, MOE_INPUT},
      {"expert_affinities_masked", args->expert_affinities_masked, affinities, size, MOE_OUTPUT},
      {"block_to_expert", args->block_to_expert, moe_mul_(args->N, 4), 4, MOE_OUTPUT},
      {"token_position_to_id", args->token_position_to_id, moe_mul3_(args->N, args->B, 4), 4, MOE_OUTPUT},
      {"conditions", args->conditions, moe_mul_(moe_add_(args->N, 1), 4), 4, MOE_OUTPUT_OPTIONAL},
      {"tokens_per_expert", args->tokens_per_expert, moe_mul_(args->E, 8), 8, MOE_OUTPUT_OPTIONAL},
  };
  return MOE_LIST_(tensors, own);
}

MOE_FN moe_status moe_route_run_(moe_context *ctx, void *state) {
  moe_route_ *route = (moe_route_ *)state;
  moe_run_items_(ctx, route->chunks, moe_route_count_, route);
  MOE_TRY(moe_route_sum_(ctx, route));
  moe_run_items_(ctx, route->chunks, moe_route_place_, route);
  return moe_run_items_(ctx, route->args->E + 1, moe_route_expert_, route);
}

static const moe_op_ moe_route_op_ = {moe_route_check_, moe_route_layout_, moe_route_run_, NULL, NULL};
MOE_OP_WORKSPACE_(moe_route_blocks, moe_route_blocks_args, moe_route_op_, moe_route_, .dtype = MOE_DTYPE_F32)

#endif
