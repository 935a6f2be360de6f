/* hash_layer_parts.h: the layer with its router, a shared expert with a gate and scales, for bits_hash. */
#ifndef MOE_TEST_HASH_LAYER_PARTS_H
#define MOE_TEST_HASH_LAYER_PARTS_H

static void *hash_take(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void hash_give(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }

static moe_status hash_parts_call(moe_context *ctx, moe_dtype dtype, const moe_layer *l, void *y, const void *dy,
                                  const moe_layer_grads *g) {
  moe_status status = MOE_ERROR_INVALID_OPTION;
#define HASH_PARTS(name, type, NAME)                                       \
  if (dtype == MOE_DTYPE_##NAME) {                                         \
    status = moe_layer_forward_##name(ctx, l, y, NULL);                    \
    if (!status) status = moe_layer_backward_##name(ctx, l, NULL, dy, g); \
  }
  MOE_DTYPE_LIST(HASH_PARTS)
#undef HASH_PARTS
  return status;
}

/* The shared expert has the weights of expert 0. Returns the hash of its gradients. */
static uint64_t hash_parts(struct settings *set, struct problem *p, uint64_t seed) {
  const struct problem_options *o = &p->o;
  const int64_t size = p->tensor[PT_GATE_UP_WEIGHT_GRAD].element, count[4] = {o->H * 2 * o->I, o->I * o->H, o->H, o->E};
  unsigned char *grad[4];
  float scale[64];
  struct problem_args args;
  moe_context ctx = set->ctx;
  ctx.allocate = hash_take, ctx.release = hash_give;
  problem_make_args(p, &args);
  for (int i = 0; i < 4; i++) grad[i] = calloc((size_t)count[i], 8);
  for (int i = 0; i < 64; i++) scale[i] = (float)test_random_range(&seed, -64, 64) / 32.0f;
  const moe_shared_expert shared = {.I = o->I, .gate_up = p->tensor[PT_GATE_UP_WEIGHT].data,
      .down = p->tensor[PT_DOWN_WEIGHT].data, .gate = p->tensor[PT_HIDDEN_STATES].data};
  const moe_shared_expert_grads also = {.gate_up = grad[0], .down = grad[1], .gate = grad[2]};
  const moe_layer l = {.T = o->T, .H = o->H, .I = o->I, .E = o->E, .K = o->K, .x = p->tensor[PT_HIDDEN_STATES].data,
      .router = &args.router, .shared = &shared, .gate_up = p->tensor[PT_GATE_UP_WEIGHT].data,
      .down = p->tensor[PT_DOWN_WEIGHT].data, .config = o->layer,
      .expert_scale = o->layer.affinity_mode == MOE_AFFINITY_POST_SCALE ? scale : NULL};
  const moe_layer_grads g = {.x = p->tensor[PT_HIDDEN_GRAD].data, .expert_scale = (float *)(void *)grad[3],
      .router_weight = p->tensor[PT_ROUTER_WEIGHT_GRAD].data, .gate_up = p->tensor[PT_GATE_UP_WEIGHT_GRAD].data,
      .down = p->tensor[PT_DOWN_WEIGHT_GRAD].data, .weight_dtype = o->weight_grad_dtype, .shared = &also};
  if (hash_parts_call(&ctx, o->dtype, &l, p->tensor[PT_OUTPUT].data, p->tensor[PT_OUTPUT_GRAD].data, &g) != MOE_OK)
    fail("moe_layer with its parts", &ctx);
  uint64_t hash = 0;
  for (int i = 0; i < 4; i++) {
    const int element = i == 3 ? 4 : (int)size;
    hash = problem_hash_bytes(hash, grad[i], count[i], element);
    free(grad[i]);
  }
  return hash;
}

static void hash_layer_parts(struct settings *set, moe_dtype dtype) {
  static const int written[] = {PT_OUTPUT, PT_EXPERT_INDEX, PT_HIDDEN_GRAD, PT_ROUTER_WEIGHT_GRAD,
                                PT_GATE_UP_WEIGHT_GRAD, PT_DOWN_WEIGHT_GRAD};
  uint64_t hash = 0;
  for (int i = 0; i < 30; i++) {
    struct problem_options o = problem_options_random(9700 + (uint64_t)i, dtype);
    struct problem p;
    if (i % 4 == 0) o.H = 150, o.I = 101, o.T = 70;
    problem_options_settle(&o);
    if (!problem_open(&p, &o, NULL, NULL)) exit(1);
    hash ^= hash_parts(set, &p, (uint64_t)i);
    for (size_t j = 0; j < sizeof written / sizeof *written; j++) {
      const struct problem_tensor *t = &p.tensor[written[j]];
      hash = problem_hash_bytes(hash, t->data, t->count, t->element);
    }
    problem_close(&p, NULL, NULL);
  }
  printf("moe_layer parts  %s %016llx\n", problem_dtype_name(dtype), (unsigned long long)hash);
}

#endif /* MOE_TEST_HASH_LAYER_PARTS_H */
