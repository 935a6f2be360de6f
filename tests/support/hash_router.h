/* hash_router.h: for bits_hash --more: problems with the router's newer options, the gated unit's, and the losses'; and
   scales that are powers of two. */
#ifndef MOE_TEST_HASH_ROUTER_H
#define MOE_TEST_HASH_ROUTER_H

/* A router weight and bias of floats: what the problem has, as bits of another type, would mean nothing. */
static void hash_router_floats(float *weight, int64_t n, uint64_t *seed) {
  for (int64_t i = 0; i < n; i++) weight[i] = (float)test_random_range(seed, -4000, 4000) * 0x1p-13f;
}

static moe_status hash_router_call(struct settings *set, enum problem_op op, struct problem_args *args) {
  size_t bytes = 0;
  if (problem_workspace_size(op, &set->ctx, args, &bytes) != MOE_OK) fail("--more", &set->ctx);
  void *workspace = malloc(bytes + 1);
  problem_set_workspace(op, args, workspace, bytes);
  const moe_status status = problem_call(op, &set->ctx, args);
  free(workspace);
  return status;
}

/* Every activation with a clamp and a softcap; ids as the router chose them, given, in every other problem, which has a
   float weight as well. */
static void hash_router_problem(struct settings *set, moe_dtype dtype, int i, uint64_t *hash) {
  static float weight[1 << 12], bias[1 << 10];
  struct problem_options o = problem_options_random(9000 + (uint64_t)i, dtype);
  struct problem p;
  struct problem_args args;
  uint64_t seed = (uint64_t)i;
  o.layer.activation = (moe_activation)(i % MOE_ACT_COUNT_);
  o.layer.clamp |= i % 3 ? MOE_CLAMP_ACTIVATION_UPPER : 0, o.layer.activation_clamp_upper_limit = 0.6f;
  o.layer.up_softcap = i % 4 ? 1.7f : 0.0f;
  o.router.logit_softcap = i % 5 ? 2.3f : 0.0f, o.router.group_score = (moe_group_score)(i % 2);
  problem_options_settle(&o);
  if (!problem_open(&p, &o, NULL, NULL)) exit(1);
  hash_router_floats(weight, o.H * o.E, &seed), hash_router_floats(bias, o.E, &seed);
  for (int round = 0; round < 1 + i % 2; round++)
    for (int op = 0; op < PROBLEM_OP_COUNT; op++) {
      const int64_t first[] = {0, o.T / 3, o.T / 3, o.T};
      problem_make_args(&p, &args);
      if (i % 2) args.router.router_weight = weight, args.router.router_bias = o.router_bias ? bias : NULL;
      if (i % 2) args.router_backward.router_weight = weight;
      args.router.router_weight_dtype = args.router_backward.router_weight_dtype =
          i % 2 ? MOE_DTYPE_F32 : MOE_DTYPE_DEFAULT;
      args.router.indices_given = round;
      args.load_balance.logit_softcap = args.z_loss.logit_softcap = o.router.logit_softcap;
      if (i % 3 == 0) args.load_balance.S = 3, args.load_balance.sequence_first = first;
      if (i % 3 == 1) args.load_balance.total_tokens = args.z_loss.total_tokens = 77;
      if (hash_router_call(set, (enum problem_op)op, &args) != MOE_OK) fail("--more", &set->ctx);
      hash[op] = problem_hash(&p, hash[op], (enum problem_op)op);
    }
  problem_close(&p, NULL, NULL);
}

static void hash_router(struct settings *set, moe_dtype dtype) {
  uint64_t hash[PROBLEM_OP_COUNT] = {0}, h = 0;
  static float y[ARRAY], dy[ARRAY];
  static uint8_t codes[ARRAY];
  const float *x = random_floats();
  for (int i = 0; i < 5 * MOE_ACT_COUNT_; i++) hash_router_problem(set, dtype, i, hash);
  for (int op = 0; op < PROBLEM_OP_COUNT; op++)
    printf("more %-16s %s %016llx\n", problem_op_name((enum problem_op)op), problem_dtype_name(dtype),
           (unsigned long long)hash[op]);
  if (dtype != MOE_DTYPE_F32) return;
  for (int a = MOE_ACT_IDENTITY + 1; a < MOE_ACT_COUNT_; a++) {
    if (moe_activation_f32(&set->ctx, (moe_activation)a, 0, x, y, dy, ARRAY) != MOE_OK) fail("activation", &set->ctx);
    h = problem_hash_bytes(problem_hash_bytes(h, y, ARRAY, 4), dy, ARRAY, 4);
  }
  printf("more activations f32 %016llx\n", (unsigned long long)h);
  const moe_quantize_scaled_args q = {.rows = 121, .columns = 330, .block_rows = 2, .block_columns = 40,
      .power_of_two_scales = 1, .plain = x, .codes = codes, .scales = y};
  if (moe_quantize_scaled(&set->ctx, &q) != MOE_OK) fail("moe_quantize_scaled", &set->ctx);
  printf("more powers f32 %016llx\n",
         (unsigned long long)problem_hash_bytes(problem_hash_bytes(0, codes, 121 * 330, 1), y, 61 * 9, 4));
}

#endif /* MOE_TEST_HASH_ROUTER_H */
