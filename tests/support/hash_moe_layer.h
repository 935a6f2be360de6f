/* hash_moe_layer.h: the layer from top-k ids with weights in every order, for bits_hash. Its functions are there already.
 */
#ifndef MOE_TEST_HASH_MOE_LAYER_H
#define MOE_TEST_HASH_MOE_LAYER_H

#include "orders.h"

#define HASH_FACE(name, type, NAME)                                                                                   \
  static moe_status hash_face_##name(moe_context *ctx, const moe_layer *l, const struct problem *p,                   \
                                     const moe_layer_grads *g) {                                                      \
    size_t bytes;                                                                                                     \
    moe_layer own = *l;                                                                                               \
    moe_status status = g ? moe_layer_backward_##name##_workspace_size(ctx, l, NULL, &bytes)                          \
                          : moe_layer_forward_##name##_workspace_size(ctx, l, &bytes);                                \
    if (status != MOE_OK) return status;                                                                              \
    own.workspace = malloc(bytes), own.workspace_bytes = bytes;                                                       \
    status = g ? moe_layer_backward_##name(ctx, &own, NULL, p->tensor[PT_OUTPUT_GRAD].data, g)                        \
               : moe_layer_forward_##name(ctx, &own, p->tensor[PT_OUTPUT].data, NULL);                                \
    free(own.workspace);                                                                                              \
    return status;                                                                                                    \
  }
MOE_DTYPE_LIST(HASH_FACE)
#undef HASH_FACE

static struct ordered hash_ordered(const moe_weight_orders *orders, const struct problem *p, int down, int id) {
  struct ordered w = {.order = down ? orders->down : orders->gate_up, .apart = orders->up_apart,
      .per_expert = orders->per_expert, .E = p->o.E, .K = down ? p->o.I : p->o.H, .parts = down ? 1 : 2,
      .n = down ? p->o.H : p->o.I, .size = p->tensor[id].element};
  ordered_open(&w);
  ordered_copy(&w, p->tensor[id].data, 0);
  return w;
}

static void hash_face(struct settings *set, struct problem *p, uint64_t *seed) {
  static moe_status (*const face[])(moe_context *, const moe_layer *, const struct problem *,
                                    const moe_layer_grads *) = {
#define HASH_FACE(name, type, NAME) [MOE_DTYPE_##NAME] = hash_face_##name,
      MOE_DTYPE_LIST(HASH_FACE)
#undef HASH_FACE
  };
  const struct problem_options *o = &p->o;
  const moe_weight_orders orders = test_random_orders(seed);
  struct ordered w[4] = {hash_ordered(&orders, p, 0, PT_GATE_UP_WEIGHT), hash_ordered(&orders, p, 1, PT_DOWN_WEIGHT),
                         hash_ordered(&orders, p, 0, PT_GATE_UP_WEIGHT_GRAD),
                         hash_ordered(&orders, p, 1, PT_DOWN_WEIGHT_GRAD)};
  int32_t *index = (int32_t *)(void *)p->tensor[PT_EXPERT_INDEX].data;
  for (int64_t i = 0; i < o->T * o->K; i++) index[i] = (int32_t)test_random_range(seed, -1, o->E + 1);
  const moe_layer l = {.T = o->T, .H = o->H, .I = o->I, .E = o->E, .K = o->K, .identity_experts = 2,
      .x = p->tensor[PT_HIDDEN_STATES].data, .topk_index = index,
      .topk_weights = (const float *)(void *)p->tensor[PT_EXPERT_WEIGHTS].data, .gate_up = ordered_tensor(&w[0], 0),
      .up = orders.up_apart ? ordered_tensor(&w[0], 1) : NULL, .down = ordered_tensor(&w[1], 0), .orders = orders,
      .saved_dtype = o->checkpoint_dtype, .config = o->layer};
  const moe_layer_grads g = {.x = p->tensor[PT_HIDDEN_GRAD].data,
      .topk_weights = (float *)(void *)p->tensor[PT_WEIGHTS_GRAD].data, .gate_up = ordered_tensor(&w[2], 0),
      .up = orders.up_apart ? ordered_tensor(&w[2], 1) : NULL, .down = ordered_tensor(&w[3], 0),
      .weight_dtype = o->weight_grad_dtype, .accumulate = o->accumulate & 63u};
  if (face[o->dtype](&set->ctx, &l, p, NULL) != MOE_OK || face[o->dtype](&set->ctx, &l, p, &g) != MOE_OK)
    fail("moe_layer", &set->ctx);
  ordered_copy(&w[2], p->tensor[PT_GATE_UP_WEIGHT_GRAD].data, 1);
  ordered_copy(&w[3], p->tensor[PT_DOWN_WEIGHT_GRAD].data, 1);
  for (int i = 0; i < 4; i++) ordered_close(&w[i]);
}

static void hash_moe_layer(struct settings *set, moe_dtype dtype) {
  static const int written[] = {PT_OUTPUT, PT_HIDDEN_GRAD, PT_WEIGHTS_GRAD, PT_GATE_UP_WEIGHT_GRAD,
                                PT_DOWN_WEIGHT_GRAD};
  uint64_t seed = 31, hash = 0;
  for (int i = 0; i < 16; i++) {
    struct problem_options o = problem_options_random(9000 + (uint64_t)i, dtype);
    struct problem p;
    if (i % 4 == 0) o.H = 150, o.I = 101, o.T = 70;
    problem_options_settle(&o);
    if (!problem_open(&p, &o, NULL, NULL)) exit(1);
    hash_face(set, &p, &seed);
    for (size_t j = 0; j < sizeof written / sizeof *written; j++) {
      const struct problem_tensor *t = &p.tensor[written[j]];
      hash = problem_hash_bytes(hash, t->data, t->count, t->element);
    }
    problem_close(&p, NULL, NULL);
  }
  printf("moe_layer        %s %016llx\n", problem_dtype_name(dtype), (unsigned long long)hash);
}

#endif /* MOE_TEST_HASH_MOE_LAYER_H */
