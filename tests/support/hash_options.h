/* hash_options.h: the layer with nki-library's newer arguments, for bits_hash. Its functions are there already. */
#ifndef MOE_TEST_HASH_OPTIONS_H
#define MOE_TEST_HASH_OPTIONS_H

#include "extras.h"

static void hash_options_step(struct settings *set, struct problem *p, const struct extras *x, uint64_t *hash) {
  for (int op = 0; op <= PROBLEM_BACKWARD; op++) {
    struct problem_args args;
    size_t bytes = 0;
    problem_make_args(p, &args);
    extras_give(x, &args);
    if (problem_workspace_size((enum problem_op)op, &set->ctx, &args, &bytes) != MOE_OK) fail("options", &set->ctx);
    void *workspace = malloc(bytes + 1);
    problem_set_workspace((enum problem_op)op, &args, workspace, bytes);
    if (problem_call((enum problem_op)op, &set->ctx, &args) != MOE_OK) fail("options", &set->ctx);
    free(workspace);
    *hash = problem_hash(p, *hash, (enum problem_op)op);
  }
  if (x->scaled) *hash = problem_hash_bytes(*hash, x->scaled, x->count, x->element);
}

static void hash_options(struct settings *set, moe_dtype dtype) {
  uint64_t seed = 77, hash = 0;
  for (int i = 0; i < 40; i++) {
    struct problem_options o = problem_options_random(8000 + (uint64_t)i, dtype);
    struct problem p;
    o.nan_row = 0;
    o.mx.weights.enabled = o.mx.gradients.enabled = o.mx.weight_grads = i % 4 == 3;
    problem_options_settle(&o);
    if (!problem_open(&p, &o, NULL, NULL)) exit(1);
    struct extras x = extras_random(&p, &seed);
    hash_options_step(set, &p, &x, &hash);
    free(x.scaled);
    problem_close(&p, NULL, NULL);
  }
  printf("options          %s %016llx\n", problem_dtype_name(dtype), (unsigned long long)hash);
}

#endif /* MOE_TEST_HASH_OPTIONS_H */
