/* tokens.h: problems whose tokens have nothing to do with each other. */
#ifndef MOE_TEST_TOKENS_H
#define MOE_TEST_TOKENS_H

#include "problem.h"
#include "test.h"

/* The first byte that differs between n elements, or -1. */
static inline int64_t first_difference(const void *a, const void *b, size_t bytes) {
  const unsigned char *x = a, *y = b;
  if (memcmp(x, y, bytes) == 0) return -1;
  int64_t i = 0;
  while (x[i] == y[i]) i++;
  return i;
}

/* Runs what has rows per token. */
static inline void run_token_ops(const struct problem *p) {
  static const enum problem_op token_ops[] = {PROBLEM_ROUTER, PROBLEM_ROUTE_BLOCKS, PROBLEM_FORWARD, PROBLEM_BACKWARD,
                                              PROBLEM_ROUTER_BACKWARD};
  moe_context ctx = {0};
  for (size_t i = 0; i < sizeof token_ops / sizeof *token_ops; i++)
    if (problem_run(p, &ctx, token_ops[i]) != MOE_OK) fail_msg("%s: %s", problem_op_name(token_ops[i]), ctx.message);
}

/* A problem whose tokens have nothing to do with each other: no capacity, nothing accumulated from outside. */
static inline void open_independent(struct problem *p, struct problem_options o) {
  o.dropping = o.accumulate_output = o.device_output_shape = o.not_accumulating = o.empty_expert = 0;
  o.capacity = 0;
  o.accumulate = 0;
  problem_options_settle(&o);
  assert_true(problem_open(p, &o, NULL, NULL));
  run_token_ops(p);
}

#endif /* MOE_TEST_TOKENS_H */
