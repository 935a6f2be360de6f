/* face.h: the layer from top-k ids and from sorted slots, forward and backward, weights in any order. */
#ifndef MOE_FUZZ_FACE_H
#define MOE_FUZZ_FACE_H

#include "routing.h"

typedef struct fuzz_face {
  moe_layer l;
  moe_shared_expert shared;
  moe_shared_expert_grads shared_grads;
  moe_grouped_mlp_args mlp;
  moe_layer_grads grads;
  void *y, *saved;
  const void *y_grad;
  int backward, sorted;
} fuzz_face;

static inline moe_status fuzz_face_run(moe_context *ctx, const void *args) {
  const fuzz_face *f = (const fuzz_face *)args;
  if (f->sorted) return f->backward ? moe_grouped_mlp_bwd_bf16(ctx, &f->mlp) : moe_grouped_mlp_bf16(ctx, &f->mlp);
  return f->backward ? moe_layer_backward_bf16(ctx, &f->l, f->saved, f->y_grad, &f->grads)
                     : moe_layer_forward_bf16(ctx, &f->l, f->y, f->saved);
}

/* Tensors 0 and 1 are the routing. */
static inline void fuzz_face_tensors(fuzz_call *c, fuzz_face *f) {
  moe_layer *l = &f->l;
  const int64_t T = l->T, H = l->H, I = l->I, E = l->E, pairs = fuzz_times(T, l->K),
                w = fuzz_times(fuzz_times(E, H), I);
  const int weights_read = f->sorted || l->config.affinity_mode != MOE_AFFINITY_NO_SCALE, backward = f->backward;
  if (f->sorted) fuzz_tensor_of(c, &f->mlp.m_sizes, 0, E, 4), fuzz_tensor_of(c, &f->mlp.gather_indices, 0, pairs, 4);
  else fuzz_tensor_of(c, &l->topk_index, 0, pairs, 4);
  if (weights_read) fuzz_tensor_of(c, &l->topk_weights, 0, pairs, 4);
  fuzz_tensor_of(c, &l->x, 0, fuzz_times(T, H), 2);
  fuzz_tensor_of(c, &l->gate_up, 0, fuzz_times(2, w), 2);
  fuzz_tensor_of(c, &l->down, 0, w, 2);
  if (fuzz_pick(c->in, 2)) fuzz_tensor_of(c, &l->gate_up_bias, 0, fuzz_times(2 * E, I), 2);
  const int shared = !f->sorted && fuzz_pick(c->in, 2), gated = shared && fuzz_pick(c->in, 2);
  if (shared) {
    f->shared.I = I, l->recompute = MOE_RECOMPUTE_SHARED;
    fuzz_tensor_of(c, &f->shared.gate_up, 0, fuzz_times(fuzz_times(2, H), I), 2);
    fuzz_tensor_of(c, &f->shared.down, 0, fuzz_times(H, I), 2);
    if (gated) fuzz_tensor_of(c, &f->shared.gate, 0, H, 2);
  }
  if (backward) fuzz_tensor_of(c, &f->y_grad, 0, fuzz_times(T, H), 2);
  else fuzz_tensor_of(c, &f->y, 1, fuzz_times(T, H), 2);
  if (!backward && fuzz_pick(c->in, 2)) fuzz_tensor_of(c, &f->saved, 1, fuzz_times(pairs, fuzz_times(2, I)), 2);
  if (!backward) return;
  fuzz_tensor_of(c, &f->grads.x, 1, fuzz_times(T, H), 2);
  fuzz_tensor_of(c, &f->grads.gate_up, 1, fuzz_times(2, w), 2);
  fuzz_tensor_of(c, &f->grads.topk_weights, 1, pairs, 4);
  if (shared) fuzz_tensor_of(c, &f->shared_grads.gate_up, 1, fuzz_times(fuzz_times(2, H), I), 2);
  if (gated) fuzz_tensor_of(c, &f->shared_grads.gate, 1, H, 2);
}

/* Seldom: a tensor that must be there is missing or misaligned. */
static inline void fuzz_face_spoil(fuzz_call *c, fuzz_face *f) {
  const void **field[] = {&f->l.x, &f->l.gate_up, &f->l.down};
  const int kind = fuzz_pick(c->in, 32), i = fuzz_pick(c->in, 3);
  if (kind > 1 || !c->in->legal || (i == 0 && f->l.T == 0)) return;
  *field[i] = kind ? (const char *)*field[i] + 1 : NULL;
  c->in->legal = 0;
}

/* The same by the other names. */
static inline void fuzz_face_sorted(fuzz_face *f) {
  moe_grouped_mlp_args *a = &f->mlp;
  const moe_layer *l = &f->l;
  a->num_tokens = l->T, a->topk = l->K, a->E = l->E, a->H = l->H, a->I = l->I;
  a->topk_weights = l->topk_weights, a->X = l->x, a->gate_up = l->gate_up, a->down = l->down;
  a->gate_up_bias = l->gate_up_bias, a->config = l->config, a->saved = f->saved, a->Y = f->y, a->dY = f->y_grad;
  a->dX = f->grads.x, a->dgate_up = f->grads.gate_up, a->dtopk_weights = f->grads.topk_weights;
}

static inline void fuzz_face_layer(fuzz_input *in, moe_context *ctx) {
  fuzz_call c = fuzz_call_of(in, ctx);
  fuzz_face f;
  memset(&f, 0, sizeof f);
  ctx->allocate = fuzz_take_memory, ctx->release = fuzz_give_memory;
  f.backward = fuzz_pick(in, 2), f.sorted = fuzz_pick(in, 3) == 0;
  f.l.T = fuzz_length(in, 0, 12, 1), f.l.H = fuzz_length(in, 1, 40, 1), f.l.I = fuzz_length(in, 1, 40, 1);
  f.l.E = 1 + fuzz_pick(in, 5), f.l.K = 1 + fuzz_pick(in, 3);
  f.l.orders.gate_up = (moe_weight_order)fuzz_enum(in, MOE_ORDER_COUNT_);
  f.l.orders.down = (moe_weight_order)fuzz_enum(in, MOE_ORDER_INTERLEAVED);
  f.l.config.activation = (moe_activation)fuzz_enum(in, MOE_ACT_COUNT_);
  if (!f.sorted) f.l.config.affinity_mode = (moe_affinity_mode)fuzz_enum(in, MOE_AFFINITY_COUNT_);
  if (f.sorted && (f.l.orders.gate_up < 0 || f.l.orders.gate_up >= MOE_ORDER_COUNT_ || f.l.orders.down < 0 ||
                   f.l.orders.down >= MOE_ORDER_INTERLEAVED))
    return; /* which the other call does not have */
  if (f.l.T > 1 << 20 || f.l.H > 1 << 20 || f.l.I > 1 << 20) return;
  fuzz_face_tensors(&c, &f);
  if (fuzz_open(&c)) {
    if (c.in->legal && f.sorted) fuzz_sorted(&c, 0, 1, f.l.E);
    else if (c.in->legal) fuzz_fill_ids(&c, 0, -1, f.l.E - 1);
    fuzz_face_spoil(&c, &f);
    if (f.shared.I) f.l.shared = &f.shared, f.grads.shared = &f.shared_grads;
    fuzz_face_sorted(&f);
    fuzz_run(&c, f.sorted ? "moe_grouped_mlp" : "moe_layer", fuzz_face_run, &f);
  }
  fuzz_close(&c);
}

#endif /* MOE_FUZZ_FACE_H */
