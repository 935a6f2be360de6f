/* Selection of the best k of n. Numbers become ranks: 64-bit integers that order by value, then by lower id, and
   contain the id. */
#ifndef MOE_ROUTER_SELECT_H
#define MOE_ROUTER_SELECT_H

/* Larger is better. NaN ranks below -infinity, -0 is +0, and the lower id wins a tie. */
MOE_INLINE uint64_t moe_rank_(float value, int64_t id) {
  uint32_t bits = moe_casti_scalar(value), order;
  if (bits == 0x80000000u) bits = 0;
  order = bits >> 31 ? ~bits : bits | 0x80000000u;
  if ((bits & 0x7fffffffu) > 0x7f800000u) order = 0;
  return (uint64_t)order << 32 | (uint32_t) ~(uint32_t)id;
}

MOE_INLINE int64_t moe_rank_id_(uint64_t rank) { return (int64_t)(uint32_t) ~(uint32_t)rank; }

/* Restores the heap best[0..n), whose smallest rank is on top, if best[at] is out of place. */
MOE_INLINE void moe_sink_(uint64_t *best, int64_t n, int64_t at) {
  const uint64_t rank = best[at];
  for (;;) {
    int64_t child = 2 * at + 1;
    if (child >= n) break;
    if (child + 1 < n && best[child + 1] < best[child]) child++;
    if (rank <= best[child]) break;
    best[at] = best[child];
    at = child;
  }
  best[at] = rank;
}

/* Keeps the k best of the ranks offered. The first k fill the heap; *count says how many there are. */
MOE_INLINE void moe_offer_(uint64_t *best, int64_t *count, int64_t k, uint64_t rank) {
  if (*count < k) {
    best[(*count)++] = rank;
    if (*count == k)
      for (int64_t i = k / 2 - 1; i >= 0; i--) moe_sink_(best, k, i);
  } else if (rank > best[0]) {
    best[0] = rank;
    moe_sink_(best, k, 0);
  }
}

/* The heap of n ranks becomes the list of them, best first. */
MOE_INLINE void moe_sort_best_(uint64_t *best, int64_t n) {
  for (int64_t last = n - 1; last > 0; last--) {
    const uint64_t rank = best[0];
    best[0] = best[last];
    best[last] = rank;
    moe_sink_(best, last, 0);
  }
}

/* A group's score: its best value, or the sum of its two best. No rank is 0. */
MOE_FN float moe_group_score_(moe_group_score score, const float *value, int64_t n) {
  uint64_t best = 0, second = 0;
  for (int64_t i = 0; i < n; i++) {
    const uint64_t rank = moe_rank_(value[i], i);
    if (rank > best) second = best, best = rank;
    else if (rank > second) second = rank;
  }
  const float most = value[moe_rank_id_(best)];
  return n == 1 || score == MOE_GROUP_SCORE_MAX ? most : most + value[moe_rank_id_(second)];
}

/* best[0..k): the ranks of the k best values, best first; of the topk_groups best groups only, if there are groups.
   groups: room for topk_groups ranks. */
MOE_FN void moe_select_(const moe_router_config *config, const float *value, int64_t n, int64_t k, uint64_t *groups,
                        uint64_t *best) {
  const int64_t grouped = config->num_groups, size = grouped ? n / grouped : n,
                kept = grouped ? config->topk_groups : 1;
  int64_t count = 0;
  for (int64_t g = 0; g < grouped; g++)
    moe_offer_(groups, &count, kept, moe_rank_(moe_group_score_(config->group_score, value + g * size, size), g));
  count = 0;
  for (int64_t i = 0; i < kept; i++)
    for (int64_t j = grouped ? moe_rank_id_(groups[i]) * size : 0, end = j + size; j < end; j++)
      moe_offer_(best, &count, k, moe_rank_(value[j], j));
  moe_sort_best_(best, k);
}

#endif
