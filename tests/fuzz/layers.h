/* layers.h: layers of quantised weights and activations, forward, backward and prepacked, against the same layer from
   the plain tensors that these stand for; where weights' scales come after the sums, from the same weights by other
   instructions. */
#ifndef MOE_FUZZ_LAYERS_H
#define MOE_FUZZ_LAYERS_H

#include "support/pack.h"
#include "weights.h"

/* For the instruction set in use. */
static void fuzz_pack(fuzz_layer *l, int i) {
  fuzz_weight *w = &l->weight[i];
  moe_pack_weights_args a;
  memset(&a, 0, sizeof a);
  a.layout = i ? MOE_PACK_DOWN : l->p.o.layer.skip_gate ? MOE_PACK_UP : MOE_PACK_GATE_UP;
  a.E = w->q.E, a.rows = w->q.K, a.columns = w->q.columns, a.quantized_weight = &w->q.weight;
  moe_status status = test_pack(l->ctx, l->p.o.dtype, &a, &w->packed_bytes);
  if (w->good) fuzz_judge(l->ctx, status, 1, "moe_pack_weights_size");
  if (status != MOE_OK) w->packed_bytes = 64;
  if (posix_memalign(&w->packed, 64, w->packed_bytes) != 0) abort();
  memset(w->packed, 0x5a, w->packed_bytes);
  const int missing = fuzz_pick(l->in, 32) == 0;
  a.packed = w->packed, a.packed_bytes = w->packed_bytes - (size_t)missing;
  fuzz_judge(l->ctx, test_pack(l->ctx, l->p.o.dtype, &a, NULL), w->good && !missing, "moe_pack_weights");
  for (size_t j = 0; j < w->packed_bytes && !(w->good && !missing); j++)
    if (((const uint8_t *)w->packed)[j] != 0x5a) fuzz_fail("packed was written to", l->ctx);
  if (missing) free(w->packed), w->packed = NULL;
}

static void fuzz_give(const fuzz_layer *l, const struct problem *p, moe_blockwise_layer *layer) {
  const int quantized = p == &l->p || !l->comparable;
  if (quantized && l->weight[0].given) {
    layer->gate_up_proj_weight = NULL;
    layer->quantized_gate_up_proj_weight = &l->weight[0].q.weight;
  }
  if (quantized && l->weight[1].given) {
    layer->down_proj_weight = NULL;
    layer->quantized_down_proj_weight = &l->weight[1].q.weight;
  }
}

static void fuzz_give_activations(const fuzz_layer *l, moe_blockwise_layer *layer, moe_blockwise_mm_bwd_args *bwd) {
  if (l->activation[0].given) layer->hidden_states = NULL, layer->quantized_hidden_states = &l->activation[0].s.a;
  if (!l->activation[1].given) return;
  bwd->output_hidden_states_grad = NULL;
  bwd->quantized_output_hidden_states_grad = &l->activation[1].s.a;
}

static void fuzz_call_layer(fuzz_layer *l, enum problem_op op, struct problem_args *args, int legal) {
  size_t bytes = 0;
  const moe_status status = problem_workspace_size(op, l->ctx, args, &bytes);
  const int missing = legal && fuzz_pick(l->in, 64) == 63;
  if (legal) fuzz_judge(l->ctx, status, 1, "workspace_size");
  uint8_t *workspace = fuzz_memory((int64_t)bytes);
  problem_set_workspace(op, args, workspace, bytes - (size_t)missing);
  fuzz_judge(l->ctx, problem_call(op, l->ctx, args), legal && !missing, problem_op_name(op));
  if (missing) {
    problem_set_workspace(op, args, workspace, bytes);
    fuzz_judge(l->ctx, problem_call(op, l->ctx, args), legal, problem_op_name(op));
  }
  free(workspace);
}

static void fuzz_compare(const fuzz_layer *l, enum problem_op op) {
  for (int i = 0; i < PT_COUNT; i++)
    if (l->p.tensor[i].writers & 1u << op &&
        memcmp(l->p.tensor[i].data, l->twin.tensor[i].data, problem_tensor_bytes(&l->p, i)) != 0)
      fprintf(stderr, "%s ", l->p.tensor[i].name), fuzz_fail("differs", l->ctx);
}

static int fuzz_is_mx(const fuzz_weight *w) { return w->given && w->q.weight.scaling == MOE_WEIGHT_MX; }

static void fuzz_layer_op(fuzz_layer *l, enum problem_op op) {
  struct problem_args args, twin;
  int legal = l->in->legal;
  for (int i = 0; i < 2; i++) legal &= l->weight[i].good || !l->weight[i].given;
  if (op == PROBLEM_FORWARD && l->p.o.spec >= MOE_CTE_SHARD_ON_BLOCK_MX)
    legal &= fuzz_is_mx(&l->weight[0]) && fuzz_is_mx(&l->weight[1]);
  legal &= l->activation[0].good || !l->activation[0].given;
  legal &= l->activation[1].good || !l->activation[1].given || op == PROBLEM_FORWARD;
  problem_make_args(&l->p, &args), problem_make_args(&l->twin, &twin);
  extras_give(&l->extras, &args), extras_give(&l->twin_extras, &twin);
  legal &= !l->extras.limited || (l->extras.valid >= 0 && l->extras.valid <= l->p.o.T);
  moe_blockwise_layer *layer = op == PROBLEM_FORWARD ? &args.forward.layer : &args.backward.layer;
  fuzz_give(l, &l->p, layer), fuzz_give_activations(l, layer, &args.backward);
  fuzz_give(l, &l->twin, op == PROBLEM_FORWARD ? &twin.forward.layer : &twin.backward.layer);
  if (l->comparable && twin.forward.device.spec >= MOE_CTE_SHARD_ON_BLOCK_MX)
    twin.forward.device.spec = MOE_CTE_SHARD_ON_BLOCK;
  if (op == PROBLEM_FORWARD && legal && l->weight[0].packed) {
    layer->packed_gate_up_proj_weight = l->weight[0].packed;
    layer->packed_gate_up_proj_weight_bytes = l->weight[0].packed_bytes;
  }
  if (op == PROBLEM_FORWARD && legal && l->weight[1].packed) {
    layer->packed_down_proj_weight = l->weight[1].packed;
    layer->packed_down_proj_weight_bytes = l->weight[1].packed_bytes;
  }
  const int overlap = fuzz_pick(l->in, 32), i = overlap & 1;
  if (overlap < 2 && legal && l->weight[i].given) {
    args.forward.output = args.backward.hidden_states_grad = l->weight[i].q.codes.data;
    legal = 0;
  }
  fuzz_call_layer(l, op, &args, legal);
  if (legal) {
    fuzz_vary(l->in, l->ctx);
    fuzz_call_layer(l, op, &twin, 1);
  }
  fuzz_compare(l, op);
}

static void fuzz_layers(fuzz_input *in, moe_context *ctx) {
  fuzz_layer l;
  memset(&l, 0, sizeof l);
  l.in = in, l.ctx = ctx, l.rng = fuzz_take(in, 2);
  if (!fuzz_open_layer(&l)) return;
  fuzz_spoil_weight(&l, &l.weight[0]), fuzz_spoil_weight(&l, &l.weight[1]);
  fuzz_vary(in, ctx);
  for (int i = 0; i < 2; i++)
    if (l.weight[i].given && fuzz_pick(in, 2)) fuzz_pack(&l, i);
  fuzz_layer_op(&l, PROBLEM_FORWARD);
  fuzz_layer_op(&l, PROBLEM_BACKWARD);
  fuzz_close_layer(&l);
}

#endif /* MOE_FUZZ_LAYERS_H */
