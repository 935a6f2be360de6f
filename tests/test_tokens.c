/* test_tokens: a token's results do not depend on the batch it is in, nor on its place there, to the bit. */
#include "support/test.h"

#include "support/pool.h"
#include "support/problem.h"
#include "support/tokens.h"

/* Tensors with one row per token. */
static const int token_inputs[] = {PT_HIDDEN_STATES, PT_TOKEN_MASK, PT_OUTPUT_GRAD, PT_WEIGHTS_GRAD};
static const int token_outputs[] = {PT_LOGITS, PT_EXPERT_INDEX, PT_EXPERT_WEIGHTS, PT_OUTPUT, PT_LOGITS_GRAD,
                                    PT_HIDDEN_GRAD, PT_AFFINITIES_GRAD, PT_ROUTER_HIDDEN_GRAD};

static size_t row_bytes(const struct problem *p, int tensor) {
  return problem_tensor_bytes(p, tensor) / (size_t)p->o.T;
}

/* A batch of n tokens taken from `whole`: its results must be those rows of the whole's. */
static void check_selection(const struct problem *whole, const int64_t *tokens, int64_t n) {
  struct problem_options o = whole->o;
  struct problem part;
  o.T = n;
  assert_true(problem_open(&part, &o, NULL, NULL));
  for (size_t i = 0; i < sizeof token_inputs / sizeof *token_inputs; i++) {
    size_t row = row_bytes(whole, token_inputs[i]);
    for (int64_t t = 0; t < n; t++)
      memcpy(part.tensor[token_inputs[i]].data + (size_t)t * row,
             whole->tensor[token_inputs[i]].data + (size_t)tokens[t] * row, row);
  }
  run_token_ops(&part);
  for (size_t i = 0; i < sizeof token_outputs / sizeof *token_outputs; i++) {
    int id = token_outputs[i];
    size_t row = row_bytes(whole, id);
    for (int64_t t = 0; t < n; t++) {
      const unsigned char *expected = whole->tensor[id].data + (size_t)tokens[t] * row;
      if (first_difference(part.tensor[id].data + (size_t)t * row, expected, row) < 0) continue;
      char text[400];
      problem_describe(whole, NULL, text, sizeof text);
      fail_msg("%s: token %lld differs in a batch of %lld\nrepro: %s", whole->tensor[id].name, (long long)tokens[t],
               (long long)n, text);
    }
  }
  problem_close(&part, NULL, NULL);
}

static void test_token_alone(void **state) {
  moe_dtype dtype = *(const moe_dtype *)*state;
  int64_t problems = test_cases(60, 4);
  for (int64_t i = 0; i < problems; i++) {
    struct problem p;
    open_independent(&p, problem_options_random(20000 + (uint64_t)i, dtype));
    for (int64_t t = 0; t < p.o.T; t++) check_selection(&p, &t, 1);
    problem_close(&p, NULL, NULL);
  }
}

static void test_permuted_tokens(void **state) {
  moe_dtype dtype = *(const moe_dtype *)*state;
  int64_t problems = test_cases(200, 10);
  for (int64_t i = 0; i < problems; i++) {
    struct problem p;
    struct test_pool pool = {.seed = (uint64_t)i};
    open_independent(&p, problem_options_random(30000 + (uint64_t)i, dtype));
    int64_t *order = test_pool_order(&pool, p.o.T);
    assert_non_null(order);
    check_selection(&p, order, p.o.T);
    check_selection(&p, order, (p.o.T + 1) / 2); /* and half of them, in that order */
    free(order);
    problem_close(&p, NULL, NULL);
  }
}

/* Tokens are taken a chunk at a time, of a size that depends on how many there are and on the experts. */
static void test_chunks(void **state) {
  moe_dtype dtype = *(const moe_dtype *)*state;
  static const int64_t experts[] = {3, 40, 300}, most[] = {900, 1500, 4100};
  for (int64_t i = 0; i < test_cases(9, 3); i++) {
    struct problem_options o = problem_options_random(40000 + (uint64_t)i, dtype);
    struct test_pool pool = {.seed = (uint64_t)i};
    struct problem p;
    o.T = 4500, o.H = 5, o.I = 3, o.E = experts[i % 3], o.K = 2, o.B = 64;
    open_independent(&p, o);
    int64_t *order = test_pool_order(&pool, p.o.T);
    assert_non_null(order);
    check_selection(&p, order, most[(i + i / 3) % 3]);
    free(order);
    problem_close(&p, NULL, NULL);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {EACH_DTYPE(test_token_alone), EACH_DTYPE(test_permuted_tokens),
                                     EACH_DTYPE(test_chunks)};
  return cmocka_run_group_tests_name("tokens", tests, NULL, NULL);
}
