/* orders.h: a layer's weights and their gradients in any moe_weight_orders, from and to the default order. */
#ifndef MOE_TEST_ORDERS_H
#define MOE_TEST_ORDERS_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "moe.h"
#include "random.h"

/* A weight of `parts` parts as it is stored: in one tensor or two, each whole or an expert at a time. */
struct ordered {
  moe_weight_order order;
  int apart, per_expert;
  int64_t E, K, parts, n, size; /* K: the axis that the forward contracts; n: columns of a part */
  void **expert[2];             /* [E], or one whole tensor */
};

static inline moe_weight_orders test_random_orders(uint64_t *s) {
  moe_weight_orders o = {0};
  o.gate_up = (moe_weight_order)test_random_range(s, 0, MOE_ORDER_COUNT_ - 1);
  o.down = (moe_weight_order)test_random_range(s, 0, MOE_ORDER_OUT_IN);
  o.up_apart = o.gate_up != MOE_ORDER_INTERLEAVED && test_random_chance(s, 2);
  o.per_expert = test_random_chance(s, 3);
  return o;
}

static inline int64_t ordered_tensors(const struct ordered *w) { return w->apart && w->parts == 2 ? 2 : 1; }
static inline int64_t ordered_arrays(const struct ordered *w) { return w->per_expert ? w->E : 1; }

/* Each tensor, or an expert's, in memory of its own, so that tools see what is beyond it. */
static inline void ordered_open(struct ordered *w) {
  const int64_t elements = w->E * w->parts * w->K * w->n / ordered_tensors(w) / ordered_arrays(w);
  for (int64_t t = 0; t < ordered_tensors(w); t++) {
    w->expert[t] = calloc((size_t)w->E, sizeof *w->expert[t]);
    for (int64_t e = 0; e < ordered_arrays(w); e++) w->expert[t][e] = malloc((size_t)(elements * w->size));
  }
}

static inline void ordered_close(struct ordered *w) {
  for (int64_t t = 0; t < ordered_tensors(w); t++) {
    for (int64_t e = 0; e < ordered_arrays(w); e++) free(w->expert[t][e]);
    free(w->expert[t]);
  }
}

/* What the library is given. */
static inline void *ordered_tensor(const struct ordered *w, int t) {
  return w->per_expert ? (void *)w->expert[t] : w->expert[t][0];
}

static inline char *ordered_at(const struct ordered *w, int64_t e, int64_t part, int64_t k, int64_t column) {
  const int64_t K = w->K, n = w->n, parts = w->parts / ordered_tensors(w), p = parts == 2 ? part : 0;
  int64_t at = (k * parts + p) * n + column;
  if (w->order == MOE_ORDER_OUT_IN) at = (p * n + column) * K + k;
  if (w->order == MOE_ORDER_INTERLEAVED) at = (column * parts + p) * K + k;
  if (!w->per_expert) at += e * parts * K * n;
  return (char *)w->expert[ordered_tensors(w) == 2 ? part : 0][w->per_expert ? e : 0] + at * w->size;
}

/* Copies from the default order, or back. */
static inline void ordered_copy(const struct ordered *w, unsigned char *plain, int back) {
  for (int64_t e = 0; e < w->E; e++)
    for (int64_t k = 0; k < w->K; k++)
      for (int64_t part = 0; part < w->parts; part++)
        for (int64_t c = 0; c < w->n; c++, plain += w->size) {
          char *own = ordered_at(w, e, part, k, c);
          memcpy(back ? (void *)plain : own, back ? (void *)own : plain, (size_t)w->size);
        }
}

#endif
