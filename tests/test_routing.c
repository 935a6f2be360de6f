/* A routing from each form to the others, against lists that are searched from end to end; round trips; ranks that
   exchange rows. Every tensor ends at an inaccessible page. */
#include "support/test.h"

#include "support/guard.h"

enum { MOST = 400, TENSORS = 12 };

/* The rows of a routing, in the order of the sorted form. */
typedef struct rows {
  int64_t count, before[64]; /* before: an expert's rows before dropping */
  int32_t expert[MOST], slot[MOST];
} rows;

typedef struct tensors {
  struct guarded all[TENSORS];
  int count;
} tensors;

static int32_t *tensor(tensors *t, int64_t count) {
  struct guarded *g = &t->all[t->count++];
  *g = guard_alloc((size_t)count * 4, GUARD_AFTER);
  assert_non_null(g->data);
  memset(g->data, 0x6b, (size_t)count * 4);
  return (int32_t *)(void *)g->data;
}

static void tensors_free(tensors *t) {
  while (t->count > 0) guard_free(&t->all[--t->count]);
}

static void *take(void *user, size_t bytes) { return (void)user, memset(malloc(bytes), 0xee, bytes); }
static void give(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }
static moe_context context(void) { return (moe_context){.allocate = take, .release = give}; }

typedef moe_status (*routing_function)(moe_context *ctx, const moe_routing_args *args);

static void succeed(routing_function function, const moe_routing_args *args) {
  moe_context ctx = context();
  const moe_status status = function(&ctx, args);
  if (status != MOE_OK) fail_msg("%s: %s", moe_status_str(status), ctx.message);
}

/* ----------------------------------------------------------------------------------------------------------- model */

static void add_row(rows *r, int64_t e, int32_t slot, int64_t capacity) {
  if (r->before[e]++ >= capacity) return;
  r->expert[r->count] = (int32_t)e;
  r->slot[r->count++] = slot;
}

static int64_t capacity_of(const moe_routing_args *a) {
  return a->capacity ? a->capacity : a->block_per_expert ? a->B : INT64_MAX;
}

static rows rows_of_topk(const moe_routing_args *a) {
  rows r = {0};
  for (int64_t e = 0; e < a->E; e++)
    for (int64_t s = 0; s < a->T * a->K; s++)
      if (a->expert_index[s] == e) add_row(&r, e, (int32_t)s, capacity_of(a));
  return r;
}

static rows rows_of_sorted(const moe_routing_args *a) {
  rows r = {0};
  int64_t position = 0;
  for (int64_t e = 0; e < a->E; e++)
    for (int32_t i = 0; i < a->m_sizes[e]; i++) add_row(&r, e, a->gather_indices[position++], capacity_of(a));
  return r;
}

/* The slot of a token's next row: of expert e in slot_experts, or behind those of the rows there are. */
static int32_t next_slot(const moe_routing_args *a, const rows *r, int32_t t, int64_t e) {
  for (int64_t k = 0; k < a->K; k++) {
    const int32_t slot = (int32_t)(t * a->K + k);
    int taken = a->slot_experts && a->slot_experts[slot] != e;
    for (int64_t i = 0; i < r->count; i++) taken |= r->slot[i] == slot;
    if (!taken) return slot;
  }
  fail_msg("no slot");
  return -1;
}

static rows rows_of_blocks(const moe_routing_args *a) {
  rows r = {0};
  for (int64_t e = 0; e < a->E; e++)
    for (int64_t b = 0; b < a->N; b++)
      for (int64_t i = b * a->B; i < (b + 1) * a->B; i++) {
        const int32_t t = a->token_position_to_id[i];
        const int of = (a->block_to_expert ? a->block_to_expert[b] : b) == e && (!a->conditions || a->conditions[b]);
        if (of && t >= 0 && t < a->T) add_row(&r, e, next_slot(a, &r, t, e), INT64_MAX);
      }
  return r;
}

static int64_t rows_of_expert(const rows *r, int64_t e) {
  int64_t count = 0;
  for (int64_t i = 0; i < r->count; i++) count += r->expert[i] == e;
  return count;
}

/* ---------------------------------------------------------------------------------------------------------- checks */

static void check_slots(const moe_routing_args *a, const rows *r) {
  for (int64_t s = 0; s < a->T * a->K; s++) {
    int32_t position = -1;
    for (int64_t i = 0; i < r->count; i++)
      if (r->slot[i] == s) position = (int32_t)i;
    if (a->slot_positions) assert_int_equal(a->slot_positions[s], position);
    assert_int_equal(a->expert_index[s], position < 0 ? -1 : r->expert[position]);
    assert_int_equal(a->gather_indices[s], s < r->count ? r->slot[s] : -1);
  }
}

static void check_experts(const moe_routing_args *a, const rows *r) {
  int64_t bin = 0, padded = 0;
  const int64_t multiple = a->bin_multiple ? a->bin_multiple : 128;
  for (int64_t e = 0; e < a->E; e++) {
    const int64_t n = rows_of_expert(r, e);
    assert_int_equal(a->m_sizes[e], n);
    bin += n;
    while (n > 0 && padded % multiple) padded++;
    for (int64_t i = 0; i < n; i += multiple) padded += multiple;
    if (a->bins) assert_int_equal(a->bins[e], bin);
    if (a->padded_bins) assert_int_equal(a->padded_bins[e], padded);
    if (a->tokens_per_expert) assert_int_equal(a->tokens_per_expert[e], r->before[e]);
  }
}

static void check_blocks(const moe_routing_args *a, const rows *r) {
  int64_t row = 0, b = 0;
  for (int64_t e = 0; e < a->E; e++)
    for (int64_t rest = rows_of_expert(r, e), first = 1; rest > 0 || (first && a->block_per_expert); b++, first = 0) {
      assert_int_equal(a->block_to_expert[b], e);
      if (a->conditions) assert_int_equal(a->conditions[b], rest > 0);
      for (int64_t i = 0; i < a->B; i++, rest--)
        assert_int_equal(a->token_position_to_id[b * a->B + i], rest > 0        ? r->slot[row++] / a->K
                                                                : a->skip_token ? -1
                                                                                : a->T);
    }
  for (; b < a->N; b++) {
    assert_int_equal(a->block_to_expert[b], a->E - 1);
    if (a->conditions) assert_int_equal(a->conditions[b], 0);
    for (int64_t i = 0; i < a->B; i++)
      assert_int_equal(a->token_position_to_id[b * a->B + i], a->skip_token ? -1 : a->T);
  }
  if (a->conditions) assert_int_equal(a->conditions[a->N], 0);
}

/* ----------------------------------------------------------------------------------------------------------- cases */

static moe_routing_args random_shape(uint64_t *rng) {
  moe_routing_args a = {.T = test_random_range(rng, 0, 40),
                        .E = test_random_range(rng, 1, 12),
                        .K = test_random_range(rng, 1, 6),
                        .B = test_random_range(rng, 1, 16),
                        .skip_token = test_random_chance(rng, 2),
                        .capacity = test_random_chance(rng, 3) ? test_random_range(rng, 1, 20) : 0,
                        .bin_multiple = test_random_chance(rng, 2) ? test_random_range(rng, 1, 20) : 0};
  a.block_per_expert = test_random_chance(rng, 3) && a.capacity <= a.B;
  a.N = a.block_per_expert ? a.E : a.T * a.K / a.B + a.E + test_random_range(rng, 0, 2);
  return a;
}

/* All tensors, every optional one now and then NULL. */
static void open(tensors *t, uint64_t *rng, moe_routing_args *a) {
  const int64_t slots = a->T * a->K;
  a->expert_index = tensor(t, slots), a->gather_indices = tensor(t, slots), a->m_sizes = tensor(t, a->E);
  a->token_position_to_id = tensor(t, a->N * a->B), a->block_to_expert = tensor(t, a->N);
  if (!test_random_chance(rng, 4)) a->conditions = tensor(t, a->N + 1);
  if (!test_random_chance(rng, 4)) a->slot_positions = tensor(t, slots);
  if (!test_random_chance(rng, 4)) a->bins = tensor(t, a->E);
  if (!test_random_chance(rng, 4)) a->padded_bins = tensor(t, a->E);
  if (!test_random_chance(rng, 4)) a->tokens_per_expert = (int64_t *)(void *)tensor(t, 2 * a->E);
}

static void random_topk(uint64_t *rng, const moe_routing_args *a, int32_t *ids) {
  for (int64_t s = 0; s < a->T * a->K; s++)
    ids[s] = (int32_t)test_random_range(rng, test_random_chance(rng, 8) ? -1 : 0, a->E - 1);
}

static void test_from_topk(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < (uint64_t)test_cases(2000, 200); seed++) {
    uint64_t rng = seed;
    tensors t = {0};
    moe_routing_args a = random_shape(&rng);
    open(&t, &rng, &a);
    int32_t *ids = a.expert_index;
    random_topk(&rng, &a, ids);
    const rows r = rows_of_topk(&a);
    succeed(moe_routing_from_topk, &a);
    check_experts(&a, &r), check_blocks(&a, &r);
    a.expert_index = tensor(&t, a.T * a.K); /* as it comes back, without what was dropped */
    moe_routing_args back = {.T = a.T,
                             .E = a.E,
                             .K = a.K,
                             .expert_index = a.expert_index,
                             .m_sizes = a.m_sizes,
                             .gather_indices = a.gather_indices};
    succeed(moe_routing_from_sorted, &back);
    check_slots(&a, &r);
    for (int64_t s = 0; s < a.T * a.K && capacity_of(&a) == INT64_MAX; s++) assert_int_equal(ids[s], a.expert_index[s]);
    tensors_free(&t);
  }
}

static void test_from_sorted(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < (uint64_t)test_cases(2000, 200); seed++) {
    uint64_t rng = seed;
    tensors t = {0};
    moe_routing_args a = random_shape(&rng);
    open(&t, &rng, &a);
    const int64_t slots = a.T * a.K, placed = test_random_chance(&rng, 2) ? slots : test_random_range(&rng, 0, slots);
    memset(a.m_sizes, 0, (size_t)a.E * 4);
    for (int64_t i = 0; i < placed; i++) a.m_sizes[test_random_range(&rng, 0, a.E - 1)]++;
    for (int64_t i = 0; i < slots; i++) {
      const int64_t j = test_random_range(&rng, 0, i);
      a.gather_indices[i] = a.gather_indices[j], a.gather_indices[j] = (int32_t)i;
    }
    for (int64_t i = placed; i < slots; i++) a.gather_indices[i] = 12345678; /* not read */
    const rows r = rows_of_sorted(&a);
    succeed(moe_routing_from_sorted, &a);
    a.m_sizes = NULL, check_blocks(&a, &r);
    moe_routing_args again = a;
    again.m_sizes = tensor(&t, a.E), again.gather_indices = tensor(&t, slots), again.token_position_to_id = NULL;
    again.capacity = again.block_per_expert = 0, again.block_to_expert = again.conditions = NULL;
    succeed(moe_routing_from_topk, &again); /* in ascending order of slots */
    for (int64_t i = 1; i < r.count; i++)
      assert_true(r.expert[i] != r.expert[i - 1] || again.gather_indices[i] > again.gather_indices[i - 1]);
    for (int64_t s = 0; s < slots; s++) {
      int32_t e = -1;
      for (int64_t i = 0; i < r.count; i++)
        if (r.slot[i] == s) e = r.expert[i];
      assert_int_equal(a.expert_index[s], e);
    }
    tensors_free(&t);
  }
}

/* Blocks in any order, some of them idle, padding anywhere, ids of every kind in blocks that do not count. */
static void random_blocks(uint64_t *rng, moe_routing_args *a) {
  int32_t used[64] = {0};
  for (int64_t b = 0; b < a->N; b++) {
    const int idle = a->conditions && test_random_chance(rng, 4);
    if (a->conditions) a->conditions[b] = !idle;
    if (a->block_to_expert) a->block_to_expert[b] = (int32_t)test_random_range(rng, 0, a->E);
    const int counts = !idle && (!a->block_to_expert || a->block_to_expert[b] < a->E);
    for (int64_t i = b * a->B; i < (b + 1) * a->B; i++) {
      const int64_t token = test_random_range(rng, 0, a->T);
      const int some = token < a->T && (!counts || used[token] < a->K) && !test_random_chance(rng, 3);
      a->token_position_to_id[i] = some ? (int32_t)token : a->skip_token ? -1 : (int32_t)a->T;
      if (some && counts) used[token]++;
    }
  }
}

static void test_from_blocks(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < (uint64_t)test_cases(2000, 200); seed++) {
    uint64_t rng = seed;
    tensors t = {0};
    moe_routing_args a = random_shape(&rng);
    const int no_experts = test_random_chance(&rng, 4);
    a.capacity = a.block_per_expert = 0;
    if (no_experts) a.N = a.E;
    open(&t, &rng, &a);
    if (no_experts) a.block_to_expert = NULL;
    random_blocks(&rng, &a);
    const rows r = rows_of_blocks(&a);
    succeed(moe_routing_from_blocks, &a);
    check_slots(&a, &r), check_experts(&a, &r);
    /* With the ids that it gave, in any order of a token's slots, the same rows come back. */
    int32_t *ids = tensor(&t, a.T * a.K);
    for (int64_t s = 0; s < a.T * a.K; s++) ids[s] = a.expert_index[s / a.K * a.K + (a.K - 1 - s % a.K)];
    a.slot_experts = ids;
    const rows again = rows_of_blocks(&a);
    succeed(moe_routing_from_blocks, &a);
    check_slots(&a, &again);
    for (int64_t s = 0; s < a.T * a.K; s++) assert_int_equal(a.expert_index[s], ids[s]);
    tensors_free(&t);
  }
}

/* What moe_route_blocks writes is what these write, and with the ids of the slots all comes back; by weight as well. */
static void test_route_blocks(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < (uint64_t)test_cases(600, 100); seed++) {
    uint64_t rng = seed;
    tensors t = {0};
    moe_context ctx = context();
    moe_routing_args a = random_shape(&rng), b;
    if (a.T == 0 || a.K > a.E) continue;
    open(&t, &rng, &a);
    for (int64_t s = 0; s < a.T * a.K; s++)
      a.expert_index[s] = (int32_t)((s / a.K + s % a.K * (1 + s / a.K % 2)) % a.E);
    for (int64_t s = 0; s < a.T * a.K; s++)
      for (int64_t k = 0; k < s % a.K; k++)
        if (a.expert_index[s - 1 - k] == a.expert_index[s]) a.expert_index[s] = -1;
    float weights[MOST], affinities[MOST * 2];
    for (int64_t s = 0; s < a.T * a.K; s++) weights[s] = (float)(test_random(&rng) % 1000);
    const int by_weight = a.capacity && test_random_chance(&rng, 2);
    moe_route_blocks_args route = {.T = a.T,
                                   .E = a.E,
                                   .K = a.K,
                                   .B = a.B,
                                   .N = a.N,
                                   .expert_index = a.expert_index,
                                   .expert_weights = weights,
                                   .skip_token = a.skip_token,
                                   .capacity = a.capacity,
                                   .drop_policy = by_weight ? MOE_DROP_BY_WEIGHT : MOE_DROP_BY_POSITION,
                                   .block_per_expert = a.block_per_expert,
                                   .expert_affinities_masked = affinities,
                                   .token_position_to_id = a.token_position_to_id,
                                   .block_to_expert = a.block_to_expert,
                                   .conditions = a.conditions};
    assert_int_equal(moe_route_blocks(&ctx, &route), MOE_OK);
    const rows dropped = rows_of_topk(&a);
    if (!by_weight) check_blocks(&a, &dropped);
    b = a, b.capacity = b.block_per_expert = 0, b.slot_experts = a.expert_index, b.expert_index = tensor(&t, a.T * a.K);
    succeed(moe_routing_from_blocks, &b);
    assert_int_equal(b.bins ? b.bins[a.E - 1] : dropped.count, dropped.count);
    for (int64_t s = 0; s < a.T * a.K; s++)
      assert_true(b.expert_index[s] == -1 || b.expert_index[s] == a.expert_index[s]);
    if (!by_weight) check_slots(&b, &dropped);
    tensors_free(&t);
  }
}

/* ---------------------------------------------------------------------------------------------------------- errors */

static void refuse_(routing_function function, const moe_routing_args *args, moe_status status, const char *sentence) {
  moe_context ctx = context();
  assert_int_equal(function(&ctx, args), status);
  assert_string_equal(ctx.message, sentence);
}

static void test_errors(void **state) {
  (void)state;
  int32_t ids[8] = {0, 1, 2, 0, -1, 1, 2, 2}, sizes[3] = {2, 2, 3}, gather[8] = {0, 3, 1, 5, 2, 6, 7, -1}, blocks[32],
          experts[8], conditions[9], other[16];
  const moe_routing_args good = {.T = 4,
                                 .E = 3,
                                 .K = 2,
                                 .B = 4,
                                 .N = 8,
                                 .expert_index = ids,
                                 .m_sizes = sizes,
                                 .gather_indices = gather,
                                 .token_position_to_id = blocks,
                                 .block_to_expert = experts,
                                 .conditions = conditions};
#define REFUSE(form, change, status, sentence)                          \
  do {                                                                  \
    moe_routing_args a = good;                                          \
    change;                                                             \
    refuse_(moe_routing_from_##form, &a, MOE_ERROR_##status, sentence); \
  } while (0)
  REFUSE(topk, a.T = -1, INVALID_SHAPE, "T must be at least 1");
  REFUSE(topk, a.K = 0, INVALID_SHAPE, "K must be at least 1");
  REFUSE(topk, a.T = 1 << 30, OVERFLOW, "T times K does not fit in 32-bit slots");
  REFUSE(topk, a.E = 0, INVALID_SHAPE, "E must be at least 1");
  REFUSE(topk, a.skip_token = 2, INVALID_OPTION, "skip_token must be 0 or 1");
  REFUSE(topk, a.block_per_expert = -1, INVALID_OPTION, "block_per_expert must be 0 or 1");
  REFUSE(topk, a.bin_multiple = -1, INVALID_OPTION, "bin_multiple must be from 0 to 2^31-1");
  REFUSE(topk, a.capacity = -1, INVALID_SHAPE, "capacity is negative");
  REFUSE(topk, a.slot_experts = other, INVALID_OPTION, "slot_experts is for reading blocks");
  REFUSE(topk, a.token_position_to_id = NULL, NULL_ARGUMENT,
         "token_position_to_id is NULL, but block_to_expert is not");
  REFUSE(topk, a.block_to_expert = a.token_position_to_id = NULL, NULL_ARGUMENT,
         "token_position_to_id is NULL, but conditions is not");
  REFUSE(topk, a.block_to_expert = NULL, NULL_ARGUMENT, "block_to_expert is NULL");
  REFUSE(topk, a.expert_index = NULL, NULL_ARGUMENT, "expert_index is NULL");
  REFUSE(topk, a.B = 0, INVALID_SHAPE, "B must be at least 1");
  REFUSE(topk, a.N = 2, INVALID_SHAPE, "N is too small: this routing needs more blocks");
  REFUSE(topk, a.block_per_expert = 1, INVALID_SHAPE, "N must be E with block_per_expert");
  REFUSE(topk, (a.block_per_expert = 1, a.N = 3, a.capacity = 5), INVALID_SHAPE,
         "capacity exceeds B, the rows of an expert's only block");
  REFUSE(topk, a.E = 2, INVALID_INDEX, "expert_index has an id outside [-1,E)");
  REFUSE(topk, a.bins = ids, OVERLAP, "bins overlaps another tensor of this call");
  REFUSE(topk, a.m_sizes = (int32_t *)(void *)((char *)other + 1), MISALIGNED,
         "m_sizes is not aligned to its element type");
  REFUSE(topk, (a.padded_bins = other, a.bin_multiple = INT32_MAX), OVERFLOW, "padded_bins do not fit in 32 bits");
  REFUSE(sorted, a.gather_indices = NULL, NULL_ARGUMENT, "gather_indices is NULL");
  REFUSE(sorted, a.m_sizes = NULL, NULL_ARGUMENT, "m_sizes is NULL");
  REFUSE(sorted, (a.T = 3, a.expert_index = NULL), INVALID_SHAPE, "m_sizes add up to more than T*K");
  REFUSE(blocks, a.capacity = 1, INVALID_OPTION, "capacity is for writing blocks");
  REFUSE(blocks, a.block_per_expert = 1, INVALID_OPTION, "block_per_expert is for writing blocks");
  REFUSE(blocks, a.token_position_to_id = NULL, NULL_ARGUMENT, "token_position_to_id is NULL");
  REFUSE(blocks, a.block_to_expert = NULL, INVALID_SHAPE, "N must be E without block_to_expert");
  gather[2] = 3;
  REFUSE(sorted, (void)a, INVALID_INDEX, "gather_indices names a slot twice");
  gather[2] = 8;
  REFUSE(sorted, (void)a, INVALID_INDEX, "gather_indices has a slot outside [0,T*K)");
  sizes[1] = -1;
  REFUSE(sorted, (void)a, INVALID_SHAPE, "m_sizes has a negative count");
  succeed(moe_routing_from_topk, &good);
  conditions[0] = 2;
  REFUSE(blocks, (void)a, INVALID_OPTION, "conditions must hold 0 or 1");
  conditions[0] = 1, experts[1] = 4;
  REFUSE(blocks, (void)a, INVALID_INDEX, "block_to_expert has an expert outside [0,E], E meaning none");
  experts[1] = 1, blocks[0] = 5;
  REFUSE(blocks, (void)a, INVALID_INDEX, "token_position_to_id has an id that is neither a token nor the padding id");
  blocks[0] = 4;
  REFUSE(blocks, a.skip_token = 1, INVALID_INDEX,
         "token_position_to_id has an id that is neither a token nor the padding id");
  blocks[0] = 0;
  memcpy(other, ids, sizeof ids);
  other[0] = -1;
  REFUSE(blocks, (a.slot_experts = other, a.expert_index = NULL), INVALID_INDEX,
         "token_position_to_id has a row that slot_experts has no slot for");
  other[0] = other[1] = 0; /* of the expert before there is one left */
  REFUSE(blocks, (a.slot_experts = other, a.expert_index = NULL), INVALID_INDEX,
         "token_position_to_id has a row that slot_experts has no slot for");
  other[0] = 3;
  REFUSE(blocks, (a.slot_experts = other, a.expert_index = NULL), INVALID_INDEX,
         "slot_experts has an id outside [-1,E)");
  blocks[1] = blocks[2] = 3;
  REFUSE(blocks, (void)a, INVALID_SHAPE, "token_position_to_id has a token more than K times");
#undef REFUSE
  refuse_(moe_routing_from_topk, NULL, MOE_ERROR_NULL_ARGUMENT, "args is NULL");
  assert_int_equal(moe_routing_from_topk(NULL, &good), MOE_ERROR_WORKSPACE);
}

/* ----------------------------------------------------------------------------------------------------------- ranks */

enum { RANKS = 7 };

static int64_t rank_of(int64_t E, int64_t ranks, int64_t e) {
  for (int64_t rank = 0, end = 0; rank < ranks; rank++)
    if (e < (end += E / ranks + (rank < E % ranks))) return rank;
  return -1;
}

/* All ranks send, and every row arrives where its expert is, in the order that grouped GEMM takes it. */
static void exchange(uint64_t *rng) {
  const int64_t E = test_random_range(rng, 1, 12), ranks = test_random_range(rng, 1, RANKS),
                K = test_random_range(rng, 1, 4), size = test_random_chance(rng, 2) ? 0 : 3, one = size ? size : 1;
  int32_t ids[RANKS][60], sizes[RANKS * 12], counts[RANKS][RANKS], places[RANKS][RANKS], tokens[RANKS][60], gather[60];
  int64_t T[RANKS];
  for (int64_t r = 0; r < ranks; r++) {
    moe_context ctx = context();
    T[r] = test_random_range(rng, 0, 15);
    moe_routing_args a = {
        .T = T[r], .E = E, .K = K, .expert_index = ids[r], .m_sizes = sizes + r * E, .gather_indices = gather};
    random_topk(rng, &a, ids[r]);
    succeed(moe_routing_from_topk, &a);
    moe_expert_parallel_send_args send = {.T = T[r],
                                          .E = E,
                                          .K = K,
                                          .ranks = ranks,
                                          .row_elements = size,
                                          .expert_index = ids[r],
                                          .send_counts = counts[r],
                                          .send_displacements = places[r],
                                          .send_tokens = tokens[r]};
    assert_int_equal(moe_expert_parallel_send(&ctx, &send), MOE_OK);
    for (int64_t i = 0; i < T[r] * K; i++) assert_int_equal(tokens[r][i], gather[i] < 0 ? -1 : gather[i] / K);
  }
  for (int64_t r = 0; r < ranks; r++) {
    moe_context ctx = context();
    int32_t from[RANKS], place[RANKS], local[12], order[RANKS * 60], expert[RANKS * 60], token[RANKS * 60];
    moe_expert_parallel_receive_args receive = {.E = E,
                                                .ranks = ranks,
                                                .rank = r,
                                                .row_elements = size,
                                                .rows = RANKS * 60,
                                                .rank_m_sizes = sizes,
                                                .receive_counts = from,
                                                .receive_displacements = place,
                                                .local_m_sizes = local,
                                                .local_gather_indices = order};
    assert_int_equal(moe_expert_parallel_receive(&ctx, &receive), MOE_OK);
    int64_t received = 0;
    for (int64_t s = 0; s < ranks; s++) {
      assert_int_equal(from[s], counts[s][r]);
      assert_int_equal(place[s], received * one);
      int64_t skip = places[s][r] / one; /* which row of rank s is the first for this one */
      for (int64_t e = 0; e < E; e++)
        for (int64_t i = 0; i < T[s] * K; i++)
          if (ids[s][i] == e && rank_of(E, ranks, e) == r) {
            expert[received] = (int32_t)e, token[received] = (int32_t)(i / K);
            assert_int_equal(tokens[s][skip++], token[received++]);
          }
    }
    int64_t at = 0;
    for (int64_t e = moe_expert_parallel_first(E, ranks, r), i = 0; e < moe_expert_parallel_first(E, ranks, r + 1);
         e++, i++)
      for (int32_t m = 0, last = -1; m < local[i]; m++, at++) {
        assert_int_equal(expert[order[at]], e);
        assert_true(order[at] > last);
        last = order[at];
      }
    assert_int_equal(at, received);
    for (; at < RANKS * 60; at++) assert_int_equal(order[at], -1);
  }
}

/* Once per token and rank; the rows of nkilib's metadata. */
static void send_once(uint64_t *rng) {
  const int64_t E = test_random_range(rng, 1, 12), ranks = test_random_range(rng, 1, RANKS),
                K = test_random_range(rng, 1, 4);
  int32_t ids[60], metadata[4 * RANKS] = {0}, tokens[60];
  moe_context ctx = context();
  moe_routing_args a = {.T = test_random_range(rng, 0, 15), .E = E, .K = K};
  random_topk(rng, &a, ids);
  moe_expert_parallel_send_args send = {.T = a.T,
                                        .E = E,
                                        .K = K,
                                        .ranks = ranks,
                                        .row_elements = 5,
                                        .one_per_token = 1,
                                        .expert_index = ids,
                                        .send_counts = metadata,
                                        .send_displacements = metadata + ranks,
                                        .send_tokens = tokens};
  assert_int_equal(moe_expert_parallel_send(&ctx, &send), MOE_OK);
  int64_t sent = 0;
  for (int64_t d = 0; d < ranks; d++) {
    const int64_t first = sent;
    for (int64_t t = 0; t < a.T; t++) {
      int goes = 0;
      for (int64_t k = 0; k < K; k++) goes |= ids[t * K + k] >= 0 && rank_of(E, ranks, ids[t * K + k]) == d;
      if (goes) assert_int_equal(tokens[sent++], t);
    }
    assert_int_equal(metadata[d], (sent - first) * 5);
    assert_int_equal(metadata[ranks + d], first * 5);
  }
  for (; sent < a.T * K; sent++) assert_int_equal(tokens[sent], -1);
}

static void test_ranks(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < (uint64_t)test_cases(2000, 200); seed++) {
    uint64_t rng = seed;
    exchange(&rng), send_once(&rng);
  }
  for (int64_t E = 1; E < 20; E++)
    for (int64_t ranks = 1; ranks < 20; ranks++) {
      assert_int_equal(moe_expert_parallel_first(E, ranks, 0), 0);
      assert_int_equal(moe_expert_parallel_first(E, ranks, ranks), E);
      for (int64_t e = 0; e < E; e++)
        assert_true(moe_expert_parallel_first(E, ranks, rank_of(E, ranks, e)) <= e &&
                    e < moe_expert_parallel_first(E, ranks, rank_of(E, ranks, e) + 1));
    }
  assert_int_equal(moe_expert_parallel_first(0, 1, 0), -1);
  assert_int_equal(moe_expert_parallel_first(4, 0, 0), -1);
  assert_int_equal(moe_expert_parallel_first(4, 2, 3), -1);
  assert_int_equal(moe_expert_parallel_first(4, 2, -1), -1);
}

static void test_rank_errors(void **state) {
  (void)state;
  int32_t ids[4] = {0, 1, -1, 2}, counts[3], places[3], tokens[4], sizes[9] = {1, 0, 2, 1, 1, 0, 0, 0, 3};
#define REFUSE(kind, change, status, sentence)                                  \
  do {                                                                          \
    moe_context ctx = context();                                                \
    moe_expert_parallel_##kind##_args a = kind;                                 \
    change;                                                                     \
    assert_int_equal(moe_expert_parallel_##kind(&ctx, &a), MOE_ERROR_##status); \
    assert_string_equal(ctx.message, sentence);                                 \
  } while (0)
  const moe_expert_parallel_send_args send = {.T = 2,
                                              .E = 3,
                                              .K = 2,
                                              .ranks = 3,
                                              .expert_index = ids,
                                              .send_counts = counts,
                                              .send_displacements = places,
                                              .send_tokens = tokens};
  REFUSE(send, a.T = -1, INVALID_SHAPE, "T must be at least 1");
  REFUSE(send, a.ranks = 0, INVALID_SHAPE, "ranks must be at least 1");
  REFUSE(send, a.one_per_token = 2, INVALID_OPTION, "one_per_token must be 0 or 1");
  REFUSE(send, a.row_elements = -1, INVALID_OPTION, "row_elements must be from 0 to 2^31-1");
  REFUSE(send, a.row_elements = INT32_MAX, OVERFLOW, "row_elements times the rows do not fit in 32 bits");
  REFUSE(send, a.E = 2, INVALID_INDEX, "expert_index has an id outside [-1,E)");
  REFUSE(send, a.send_counts = NULL, NULL_ARGUMENT, "send_counts is NULL");
  REFUSE(send, a.send_displacements = counts + 1, OVERLAP, "send_counts overlaps another tensor of this call");
  const moe_expert_parallel_receive_args receive = {.E = 3,
                                                    .ranks = 3,
                                                    .rank = 2,
                                                    .rows = 4,
                                                    .rank_m_sizes = sizes,
                                                    .receive_counts = counts,
                                                    .receive_displacements = places,
                                                    .local_gather_indices = tokens};
  REFUSE(receive, a.rank = 3, INVALID_INDEX, "rank is outside [0,ranks)");
  REFUSE(receive, a.rows = -1, INVALID_SHAPE, "rows must be from 0 to 2^31-1");
  REFUSE(receive, (void)a, INVALID_SHAPE, "rows are fewer than are received");
  REFUSE(receive, a.row_elements = INT32_MAX, OVERFLOW, "row_elements times the rows do not fit in 32 bits");
  REFUSE(receive, a.rank_m_sizes = NULL, NULL_ARGUMENT, "rank_m_sizes is NULL");
  sizes[0] = -1;
  REFUSE(receive, (void)a, INVALID_SHAPE, "rank_m_sizes has a negative count");
#undef REFUSE
}

/* Nothing at all, and no tensors of it. */
static void test_nothing(void **state) {
  (void)state;
  int32_t m[3] = {5, 5, 5}, conditions[1] = {5}, counts[2], places[2];
  moe_context ctx = context();
  const moe_routing_args a = {.E = 3, .K = 2, .B = 4, .m_sizes = m, .conditions = conditions};
  succeed(moe_routing_from_blocks, &a);
  assert_true(m[0] == 0 && m[1] == 0 && m[2] == 0);
  const moe_routing_args b = {.E = 3, .K = 2, .m_sizes = m};
  succeed(moe_routing_from_topk, &b);
  succeed(moe_routing_from_sorted, &b);
  const moe_expert_parallel_send_args send = {
      .E = 3, .K = 2, .ranks = 2, .send_counts = counts, .send_displacements = places};
  assert_int_equal(moe_expert_parallel_send(&ctx, &send), MOE_OK);
  assert_true(counts[0] == 0 && counts[1] == 0 && places[1] == 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_from_topk),    cmocka_unit_test(test_from_sorted), cmocka_unit_test(test_from_blocks),
      cmocka_unit_test(test_route_blocks), cmocka_unit_test(test_errors),      cmocka_unit_test(test_ranks),
      cmocka_unit_test(test_rank_errors),  cmocka_unit_test(test_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
