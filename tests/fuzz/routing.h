/* routing.h: a routing from each form to the others, and what ranks exchange. Ids are near their range, so that most
   calls are legal. */
#ifndef MOE_FUZZ_ROUTING_H
#define MOE_FUZZ_ROUTING_H

#include "call.h"

static inline int32_t *fuzz_ids(fuzz_call *c, int i) { return (int32_t *)(void *)c->tensor[i].data; }

/* Ids from low to high, seldom one more. */
static inline void fuzz_fill_ids(fuzz_call *c, int tensor, int64_t low, int64_t high) {
  const int spoils = fuzz_pick(c->in, 16) == 0;
  const int64_t count = c->tensor[tensor].bytes / 4;
  for (int64_t i = 0; i < count; i++)
    fuzz_ids(c, tensor)[i] = (int32_t)(low + (int64_t)(test_random(&c->rng) % (uint64_t)(high - low + 1)));
  if (!spoils || count == 0) return;
  fuzz_ids(c, tensor)[test_random(&c->rng) % (uint64_t)count] = (int32_t)(fuzz_pick(c->in, 2) ? high + 1 : low - 1);
  c->in->legal = 0;
}

/* The sorted form of random ids, without the last rows now and then. */
static inline void fuzz_sorted(fuzz_call *c, int sizes, int gather, int64_t E) {
  const int64_t slots = c->tensor[gather].bytes / 4;
  int32_t *m = fuzz_ids(c, sizes), *slot = fuzz_ids(c, gather);
  const int spoils = fuzz_pick(c->in, 16);
  memset(m, 0, (size_t)E * 4);
  for (int64_t i = 0; i < slots; i++) {
    const int64_t j = (int64_t)(test_random(&c->rng) % (uint64_t)(i + 1));
    slot[i] = slot[j], slot[j] = (int32_t)i;
    if (test_random(&c->rng) % 8) m[test_random(&c->rng) % (uint64_t)E]++;
  }
  if (spoils == 0 && m[0] > 0) slot[0] = spoils - 1, c->in->legal = 0;
  if (spoils == 1 && m[0] > 1) slot[1] = slot[0], c->in->legal = 0;
  if (spoils == 2) m[E - 1] = -1, c->in->legal = 0;
  if (spoils == 3) m[0] += (int32_t)slots + 1, c->in->legal = 0;
}

/* Whether N blocks hold this many rows of each expert. */
static inline int fuzz_blocks_fit(const moe_routing_args *a, const int64_t *rows) {
  int64_t blocks = 0;
  for (int64_t e = 0; e < a->E; e++)
    blocks += a->block_per_expert ? 1 : fuzz_ceil(a->capacity && rows[e] > a->capacity ? a->capacity : rows[e], a->B);
  return blocks <= a->N;
}

/* Every token K times at most, of which the first rows count. */
static inline void fuzz_blocks(fuzz_call *c, const moe_routing_args *a) {
  int32_t *id = fuzz_ids(c, 3), used[64] = {0};
  const int32_t padding = a->skip_token ? -1 : (int32_t)a->T;
  for (int64_t i = 0; i < a->N * a->B; i++) {
    const int32_t t = (int32_t)(test_random(&c->rng) % (uint64_t)(a->T + 1));
    id[i] = t < a->T && used[t] < a->K ? t : padding;
    if (t < a->T) used[t]++;
  }
  if (fuzz_pick(c->in, 16) != 0) return;
  id[0] = a->skip_token ? (int32_t)a->T : -1;
  c->in->legal = 0;
}

static inline void fuzz_count(const fuzz_call *c, const moe_routing_args *a, int form, int64_t *rows) {
  memset(rows, 0, 64 * sizeof *rows);
  for (int64_t s = 0; s < a->T * a->K && form == 0; s++)
    if (a->expert_index[s] >= 0) rows[a->expert_index[s]]++;
  for (int64_t e = 0; e < a->E && form == 1; e++) rows[e] = a->m_sizes[e];
  (void)c;
}

static inline moe_status fuzz_from_topk(moe_context *ctx, const void *args) { return moe_routing_from_topk(ctx, args); }
static inline moe_status fuzz_from_sorted(moe_context *ctx, const void *args) {
  return moe_routing_from_sorted(ctx, args);
}
static inline moe_status fuzz_from_blocks(moe_context *ctx, const void *args) {
  return moe_routing_from_blocks(ctx, args);
}

static inline void *fuzz_take_memory(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static inline void fuzz_give_memory(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }

static inline moe_routing_args fuzz_routing_shape(fuzz_input *in) {
  moe_routing_args a;
  memset(&a, 0, sizeof a);
  a.T = fuzz_pick(in, 64), a.E = 1 + fuzz_pick(in, 60), a.K = 1 + fuzz_pick(in, 8), a.B = 1 + fuzz_pick(in, 20);
  a.skip_token = fuzz_enum(in, 2), a.block_per_expert = fuzz_pick(in, 4) == 0;
  a.capacity = fuzz_pick(in, 3) ? 0 : fuzz_pick(in, 12), a.bin_multiple = fuzz_pick(in, 12);
  a.N = a.block_per_expert ? a.E : 1 + fuzz_pick(in, 100);
  if (a.block_per_expert && a.capacity > a.B) in->legal = 0;
  return a;
}

static inline void fuzz_routing(fuzz_input *in, moe_context *ctx) {
  static const fuzz_function from[] = {fuzz_from_topk, fuzz_from_sorted, fuzz_from_blocks};
  moe_routing_args a = fuzz_routing_shape(in);
  const int form = fuzz_pick(in, 3), blocks = form == 2;
  fuzz_call c = fuzz_call_of(in, ctx);
  const int64_t slots = fuzz_times(a.T, a.K);
  if (blocks && (a.capacity || a.block_per_expert)) in->legal = 0;
  ctx->allocate = fuzz_take_memory, ctx->release = fuzz_give_memory;
  fuzz_tensor_of(&c, &a.expert_index, form != 0, slots, 4);
  fuzz_tensor_of(&c, &a.m_sizes, form != 1, a.E, 4);
  fuzz_tensor_of(&c, &a.gather_indices, form != 1, slots, 4);
  fuzz_tensor_of(&c, &a.token_position_to_id, !blocks, a.N * a.B, 4);
  fuzz_tensor_of(&c, &a.block_to_expert, !blocks, a.N, 4);
  fuzz_tensor_of(&c, &a.conditions, !blocks, a.N + 1, 4);
  fuzz_tensor_of(&c, &a.slot_positions, 1, slots, 4);
  fuzz_tensor_of(&c, &a.bins, 1, a.E, 4);
  fuzz_tensor_of(&c, &a.padded_bins, 1, a.E, 4);
  fuzz_tensor_of(&c, &a.tokens_per_expert, 1, a.E, 8);
  if (!fuzz_open(&c)) return;
  if (in->legal) {
    int64_t rows[64];
    if (form == 0) fuzz_fill_ids(&c, 0, -1, a.E - 1);
    if (form == 1) fuzz_sorted(&c, 1, 2, a.E);
    if (blocks) {
      c.tensor[5].bytes -= 4; /* the last condition is not read */
      fuzz_blocks(&c, &a), fuzz_fill_ids(&c, 4, 0, a.E), fuzz_fill_ids(&c, 5, 0, 1);
      c.tensor[5].bytes += 4;
      a.conditions[a.N] = 7, a.slot_experts = NULL;
    }
    if (in->legal) fuzz_count(&c, &a, form, rows);
    if (in->legal && !blocks && !fuzz_blocks_fit(&a, rows)) in->legal = 0;
  }
  (void)fuzz_run(&c, "routing", from[form], &a);
  fuzz_close(&c);
}

static inline moe_status fuzz_send(moe_context *ctx, const void *args) { return moe_expert_parallel_send(ctx, args); }
static inline moe_status fuzz_receive(moe_context *ctx, const void *args) {
  return moe_expert_parallel_receive(ctx, args);
}

static inline void fuzz_ranks(fuzz_input *in, moe_context *ctx) {
  moe_expert_parallel_send_args s;
  moe_expert_parallel_receive_args r;
  fuzz_call c = fuzz_call_of(in, ctx);
  memset(&s, 0, sizeof s), memset(&r, 0, sizeof r);
  ctx->allocate = fuzz_take_memory, ctx->release = fuzz_give_memory;
  const int sends = fuzz_pick(in, 2);
  s.T = fuzz_pick(in, 64), s.E = r.E = fuzz_length(in, 1, 60, 1), s.K = 1 + fuzz_pick(in, 8);
  s.ranks = r.ranks = 1 + fuzz_pick(in, 20), s.row_elements = r.row_elements = fuzz_pick(in, 9) - 1;
  if (s.E >= INT32_MAX || s.row_elements < 0) in->legal = 0;
  s.one_per_token = fuzz_enum(in, 2), r.rank = fuzz_pick(in, 22) - 1, r.rows = fuzz_pick(in, 200);
  if (!sends && s.one_per_token != 0 && s.one_per_token != 1) in->legal = 0;
  if (!sends && (r.rank < 0 || r.rank >= r.ranks)) in->legal = 0;
  if (sends) {
    fuzz_tensor_of(&c, &s.expert_index, 0, s.T * s.K, 4);
    fuzz_tensor_of(&c, &s.send_counts, 1, s.ranks, 4), fuzz_tensor_of(&c, &s.send_displacements, 1, s.ranks, 4);
    fuzz_tensor_of(&c, &s.send_tokens, 1, s.T * s.K, 4);
  } else {
    if (!in->legal || s.E > 1000) return;
    fuzz_tensor_of(&c, &r.rank_m_sizes, 0, r.ranks * r.E, 4);
    fuzz_tensor_of(&c, &r.receive_counts, 1, r.ranks, 4), fuzz_tensor_of(&c, &r.receive_displacements, 1, r.ranks, 4);
    fuzz_tensor_of(
        &c, &r.local_m_sizes, 1,
        moe_expert_parallel_first(r.E, r.ranks, r.rank + 1) - moe_expert_parallel_first(r.E, r.ranks, r.rank), 4);
    fuzz_tensor_of(&c, &r.local_gather_indices, 1, r.rows, 4);
  }
  if (!fuzz_open(&c)) return;
  if (in->legal) fuzz_fill_ids(&c, 0, sends ? -1 : 0, sends ? s.E - 1 : 3);
  if (in->legal && !sends) {
    int64_t rows = 0;
    for (int64_t i = 0; i < r.ranks * r.E; i++)
      if (i % r.E >= moe_expert_parallel_first(r.E, r.ranks, r.rank) &&
          i % r.E < moe_expert_parallel_first(r.E, r.ranks, r.rank + 1))
        rows += r.rank_m_sizes[i];
    if (rows > r.rows) in->legal = 0;
  }
  if (!sends && !in->legal) { /* counts above 3 are legal */
    fuzz_close(&c);
    return;
  }
  if (sends) fuzz_run(&c, "send", fuzz_send, &s);
  else fuzz_run(&c, "receive", fuzz_receive, &r);
  fuzz_close(&c);
}

#endif /* MOE_FUZZ_ROUTING_H */
