/* Experts distributed over ranks: what ranks send to each other, and in which order what is received is multiplied. */
#ifndef MOE_ROUTER_EXPERT_PARALLEL_H
#define MOE_ROUTER_EXPERT_PARALLEL_H

int64_t moe_expert_parallel_first(int64_t E, int64_t ranks, int64_t rank) {
  if (E < 1 || ranks < 1 || rank < 0 || rank > ranks) return -1;
  return rank * (E / ranks) + moe_min_(rank, E % ranks);
}

/* The rank of an expert. */
MOE_FN int64_t moe_expert_rank_(int64_t E, int64_t ranks, int64_t e) {
  const int64_t each = E / ranks, longer = E % ranks, end = longer * (each + 1);
  return e < end ? e / (each + 1) : longer + (e - end) / each;
}

MOE_FN moe_status moe_check_row_elements_(moe_context *ctx, int64_t row_elements) {
  return row_elements >= 0 && row_elements <= INT32_MAX
             ? MOE_OK
             : moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "row_elements", "must be from 0 to 2^31-1");
}
MOE_FN moe_status moe_check_counts_(moe_context *ctx, int64_t rows, int64_t row_elements) {
  return moe_mul_(rows, moe_max_(1, row_elements)) >= 0 && rows * moe_max_(1, row_elements) <= INT32_MAX
             ? MOE_OK
             : moe_fail_(ctx, MOE_ERROR_OVERFLOW, "row_elements", "times the rows do not fit in 32 bits");
}

/* --------------------------------------------------------------------------------------------------------- sending */

typedef struct moe_send_ {
  const moe_expert_parallel_send_args *args;
  int64_t bins;   /* of which each has rows side by side: experts, or ranks */
  int64_t *first; /* [bins+1] */
  int64_t *next;  /* [bins] */
  int32_t *last;  /* [bins]: the last token, with one_per_token */
} moe_send_;

MOE_FN moe_status moe_send_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_send_ *s = (moe_send_ *)state;
  const moe_expert_parallel_send_args *args = s->args = (const moe_expert_parallel_send_args *)call->args;
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_routing_check_tokens_(ctx, args->T, args->K));
  MOE_TRY(moe_check_count_(ctx, "E", args->E));
  MOE_TRY(moe_check_count_(ctx, "ranks", args->ranks));
  MOE_TRY(moe_check_flag_(ctx, "one_per_token", args->one_per_token));
  MOE_TRY(moe_check_row_elements_(ctx, args->row_elements));
  s->bins = args->one_per_token ? args->ranks : args->E;
  const int64_t ids = args->T * args->K * 4, counts = moe_mul_(args->ranks, 4);
  const moe_tensor_ own[] = {
      {"expert_index", args->expert_index, ids, 4, MOE_INPUT},
      {"send_counts", args->send_counts, counts, 4, MOE_OUTPUT},
      {"send_displacements", args->send_displacements, counts, 4, MOE_OUTPUT},
      {"send_tokens", args->send_tokens, ids, 4, MOE_OUTPUT_OPTIONAL},
  };
  return MOE_LIST_(tensors, own);
}

MOE_FN void moe_send_layout_(void *state, moe_arena_ *arena, int64_t workers) {
  moe_send_ *s = (moe_send_ *)state;
  (void)workers;
  s->first = (int64_t *)moe_take_(arena, (s->bins + 1) * 8);
  s->next = (int64_t *)moe_take_(arena, s->bins * 8);
  s->last = (int32_t *)moe_take_(arena, s->args->one_per_token ? s->bins * 4 : 0);
}

/* Goes through the rows that are sent: counts them in next or, with `tokens`, lists their tokens. */
MOE_FN void moe_send_rows_(const moe_send_ *s, int32_t *tokens) {
  const moe_expert_parallel_send_args *args = s->args;
  if (args->one_per_token) moe_fill_ids_(s->last, 0, s->bins, -1);
  for (int64_t t = 0; t < args->T; t++)
    for (int64_t k = 0; k < args->K; k++) {
      const int32_t e = args->expert_index[t * args->K + k];
      if (e < 0) continue;
      const int64_t bin = args->one_per_token ? moe_expert_rank_(args->E, args->ranks, e) : e;
      if (args->one_per_token && s->last[bin] == t) continue;
      if (args->one_per_token) s->last[bin] = (int32_t)t;
      if (tokens) tokens[s->next[bin]++] = (int32_t)t;
      else s->next[bin]++;
    }
}

MOE_FN moe_status moe_send_run_(moe_context *ctx, void *state) {
  moe_send_ *s = (moe_send_ *)state;
  const moe_expert_parallel_send_args *args = s->args;
  const int64_t slots = args->T * args->K, size = moe_max_(1, args->row_elements);
  for (int64_t i = 0; i < slots; i++)
    if (args->expert_index[i] < -1 || args->expert_index[i] >= args->E)
      return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "expert_index", "has an id outside [-1,E)");
  memset(s->next, 0, (size_t)s->bins * sizeof *s->next);
  moe_send_rows_(s, NULL);
  moe_prefix_sums_(s->first, s->next, s->bins);
  const int64_t rows = s->first[s->bins];
  MOE_TRY(moe_check_counts_(ctx, rows, args->row_elements));
  for (int64_t d = 0; d < args->ranks; d++) {
    const int64_t bin = args->one_per_token ? d : moe_expert_parallel_first(args->E, args->ranks, d),
                  end = args->one_per_token ? d + 1 : moe_expert_parallel_first(args->E, args->ranks, d + 1);
    args->send_displacements[d] = (int32_t)(s->first[bin] * size);
    args->send_counts[d] = (int32_t)((s->first[end] - s->first[bin]) * size);
  }
  if (!args->send_tokens) return MOE_OK;
  memcpy(s->next, s->first, (size_t)s->bins * sizeof *s->next);
  moe_send_rows_(s, args->send_tokens);
  moe_fill_ids_(args->send_tokens, rows, slots, -1);
  return MOE_OK;
}

static const moe_op_ moe_send_op_ = {moe_send_check_, moe_send_layout_, moe_send_run_, NULL, NULL};
MOE_OP_WORKSPACE_(moe_expert_parallel_send, moe_expert_parallel_send_args, moe_send_op_, moe_send_, .kind = 0)

/* ------------------------------------------------------------------------------------------------------- receiving */

typedef struct moe_receive_ {
  const moe_expert_parallel_receive_args *args;
  int64_t from, to; /* this rank's experts */
} moe_receive_;

MOE_FN moe_status moe_receive_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_receive_ *r = (moe_receive_ *)state;
  const moe_expert_parallel_receive_args *args = r->args = (const moe_expert_parallel_receive_args *)call->args;
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_count_(ctx, "E", args->E));
  MOE_TRY(moe_check_count_(ctx, "ranks", args->ranks));
  MOE_TRY(moe_check_row_elements_(ctx, args->row_elements));
  if (args->rank < 0 || args->rank >= args->ranks)
    return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "rank", "is outside [0,ranks)");
  if (args->rows < 0 || args->rows > INT32_MAX)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "rows", "must be from 0 to 2^31-1");
  r->from = moe_expert_parallel_first(args->E, args->ranks, args->rank);
  r->to = moe_expert_parallel_first(args->E, args->ranks, args->rank + 1);
  const moe_tensor_ own[] = {
      {"rank_m_sizes", args->rank_m_sizes, moe_mul3_(args->ranks, args->E, 4), 4, MOE_INPUT},
      {"receive_counts", args->receive_counts, args->ranks * 4, 4, MOE_OUTPUT},
      {"receive_displacements", args->receive_displacements, args->ranks * 4, 4, MOE_OUTPUT},
      {"local_m_sizes", args->local_m_sizes, (r->to - r->from) * 4, 4, MOE_OUTPUT_OPTIONAL},
      {"local_gather_indices", args->local_gather_indices, args->rows * 4, 4, MOE_OUTPUT_OPTIONAL},
  };
  return MOE_LIST_(tensors, own);
}

MOE_FN moe_status moe_receive_check_contents_(moe_context *ctx, const void *state) {
  const moe_receive_ *r = (const moe_receive_ *)state;
  const moe_expert_parallel_receive_args *args = r->args;
  int64_t rows = 0;
  for (int64_t rank = 0; rank < args->ranks; rank++)
    for (int64_t e = 0; e < args->E; e++) {
      const int32_t m = args->rank_m_sizes[rank * args->E + e];
      if (m < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "rank_m_sizes", "has a negative count");
      if (e >= r->from && e < r->to) rows = moe_add_(rows, m);
    }
  MOE_TRY(moe_check_counts_(ctx, rows, args->row_elements));
  return !args->local_gather_indices || rows <= args->rows
             ? MOE_OK
             : moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "rows", "are fewer than are received");
}

/* Until the end counts and displacements are in rows, and a displacement is where the rank's next row is. */
MOE_FN moe_status moe_receive_run_(moe_context *ctx, void *state) {
  const moe_receive_ *r = (const moe_receive_ *)state;
  const moe_expert_parallel_receive_args *args = r->args;
  const int64_t size = moe_max_(1, args->row_elements);
  int32_t *count = args->receive_counts, *at = args->receive_displacements, rows = 0;
  (void)ctx;
  for (int64_t rank = 0; rank < args->ranks; rank++) {
    at[rank] = rows;
    count[rank] = 0;
    for (int64_t e = r->from; e < r->to; e++) count[rank] += args->rank_m_sizes[rank * args->E + e];
    rows += count[rank];
  }
  int64_t position = 0;
  for (int64_t e = r->from; e < r->to; e++) {
    const int64_t first = position;
    for (int64_t rank = 0; rank < args->ranks; rank++)
      for (int32_t m = args->rank_m_sizes[rank * args->E + e]; m > 0; m--, position++, at[rank]++)
        if (args->local_gather_indices) args->local_gather_indices[position] = at[rank];
    if (args->local_m_sizes) args->local_m_sizes[e - r->from] = (int32_t)(position - first);
  }
  if (args->local_gather_indices) moe_fill_ids_(args->local_gather_indices, rows, args->rows, -1);
  for (int64_t rank = 0; rank < args->ranks; rank++) {
    at[rank] = (int32_t)((at[rank] - count[rank]) * size);
    count[rank] = (int32_t)(count[rank] * size);
  }
  return MOE_OK;
}

static const moe_op_ moe_receive_op_ = {moe_receive_check_, NULL, moe_receive_run_, moe_receive_check_contents_, NULL};
MOE_OP_(moe_expert_parallel_receive, moe_expert_parallel_receive_args, moe_receive_op_, moe_receive_, .kind = 0)

#endif
