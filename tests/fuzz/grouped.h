/* grouped.h: grouped GEMM with any options, its weights plain, packed or quantised in any way: the same bytes whatever
   the instruction set, threads and schedule, and from weights that are packed, or plain and stand for the same. */
#ifndef MOE_FUZZ_GROUPED_H
#define MOE_FUZZ_GROUPED_H

#include "support/grouped_case.h"
#include "support/pack.h"
#include "weights.h"

static grouped_options fuzz_grouped_options(fuzz_input *in) {
  grouped_options o;
  memset(&o, 0, sizeof o);
  moe_grouped_gemm_args *a = &o.args;
  a->num_tokens = fuzz_pick(in, 16), a->topk = 1 + fuzz_pick(in, 3), a->E = 1 + fuzz_pick(in, 4);
  const int permutation = fuzz_pick(in, 3), flags = (int)fuzz_take(in, 2);
  a->permute_x = permutation == 1, a->permute_y = permutation == 2, a->sum_topk = permutation == 1 && flags & 1;
  a->weight_order = (moe_grouped_order)(flags >> 1 & 1), a->topk_mode = (moe_topk_mode)(flags >> 2 & 1);
  o.gather = flags >> 3 & 1, o.bias = flags >> 4 & 1, o.topk_weights = flags >> 5 & 1, o.grads = flags >> 6 & 1;
  o.padding = flags >> 7 & 1, o.quantized = flags >> 8 & 1;
  for (int i = 0; i < GROUPED_OUTPUTS; i++) a->accumulate |= flags >> (9 + i) & 1 ? grouped_bit[i] : 0;
  a->weight_grad_dtype = (moe_dtype)fuzz_pick(in, TEST_DTYPES + 1);
  a->N = 1 + fuzz_pick(in, 90);
  if (o.quantized) fuzz_describe(in, &o.storage);
  a->K = o.quantized ? fuzz_contraction(in, &o.storage, 1) : 1 + fuzz_pick(in, 90);
  return o;
}

/* Seldom one thing that no call takes; whether there is one. */
static int fuzz_spoil_grouped(fuzz_input *in, grouped_case *c, int op) {
  moe_grouped_gemm_args *a = &c->args;
  switch (fuzz_pick(in, 48)) {
    case 0: return a->permute_x = 2, 1;
    case 1: return a->weight_order = MOE_GROUPED_ORDER_COUNT_, 1;
    case 2: return a->topk_mode = (moe_topk_mode)-1, 1;
    case 3: return a->accumulate |= MOE_ACCUMULATE_OUTPUT, 1;
    case 4: return a->sum_topk = 1, !a->permute_x;
    case 5: return a->num_tokens = -1 - a->num_tokens, 1;
    case 6: return a->num_tokens = INT32_MAX, 1;
    case 7: return a->m_sizes = NULL, 1;
    case 8: return c->sizes[0] = -1, 1;
    case 9: return c->sizes[a->E - 1] = INT32_MAX, 1;
    case 10: return c->gather && c->total > 0 ? c->gather[0] = (int32_t)c->total, 1 : 0;
    case 11: return c->gather && c->rows > 1 ? c->gather[0] = c->gather[c->rows - 1], 1 : 0;
    case 12: return c->gather && c->rows > 0 ? c->gather[0] = -1, 1 : 0;
    case 13: return op != 2 && c->total > 0 ? *(op ? &a->dX : &a->Y) = NULL, 1 : 0;
    case 14: return a->K = INT64_MAX, 1;
    case 15: return a->weight_grad_dtype = (moe_dtype)77, 1;
    case 16: return op == 2 && c->dy.count > 0 ? a->dW = c->dy.data, 1 : 0;
    default: return 0;
  }
}

/* The operation in a workspace of its size; what it does not write stays. */
static void fuzz_run_grouped(moe_context *ctx, grouped_case *c, int op, const moe_grouped_gemm_args *a, int legal) {
  fuzz_judge(ctx, grouped_run(c, ctx, op, a), legal, "grouped GEMM");
  for (int i = 0; i < GROUPED_OUTPUTS; i++)
    if (!(legal && grouped_writes(c, op, i)) && test_tensor_differs(&c->out[i], &c->start[i]) >= 0)
      fuzz_fail("an output that is none was written to", ctx);
}

/* Again from other arguments, which must give the same bytes. */
static void fuzz_same_grouped(moe_context *ctx, grouped_case *c, int op, const moe_grouped_gemm_args *a,
                              const char *what) {
  test_tensor first[GROUPED_OUTPUTS];
  for (int i = 0; i < GROUPED_OUTPUTS; i++) {
    first[i] = test_tensor_new(c->out[i].dtype, c->out[i].count);
    test_tensor_copy(&first[i], &c->out[i]);
  }
  fuzz_run_grouped(ctx, c, op, a, 1);
  for (int i = 0; i < GROUPED_OUTPUTS; i++) {
    if (test_tensor_differs(&first[i], &c->out[i]) >= 0)
      fprintf(stderr, "%s of operation %d, %s, ", grouped_output_name[i], op, what), fuzz_fail("differs", ctx);
    test_tensor_free(&first[i]);
  }
}

/* From packed weights, and from plain ones that stand for the same values. */
static void fuzz_other_weights(moe_context *ctx, grouped_case *c, int op) {
  moe_grouped_gemm_args a = c->args;
  const int by_rows = a.weight_order == MOE_GROUPED_EKN;
  moe_pack_weights_args p;
  memset(&p, 0, sizeof p);
  p.layout = by_rows ? MOE_PACK_DOWN : MOE_PACK_GROUPED, p.backward = op, p.E = a.E, p.weight = a.W;
  p.rows = by_rows ? a.K : a.N, p.columns = by_rows ? a.N : a.K, p.quantized_weight = a.quantized_W;
  fuzz_judge(ctx, test_pack_new(ctx, c->dtype, &p), 1, "packing");
  a.W = NULL, a.packed_W = p.packed, a.packed_W_bytes = p.packed_bytes;
  fuzz_same_grouped(ctx, c, op, &a, "packed");
  free(p.packed);
  if (!c->o.quantized || test_dtype_narrow(c->dtype) || grouped_scaled_after(c)) return;
  test_tensor w = test_tensor_new(c->dtype, a.E * a.N * a.K);
  for (int64_t i = 0; i < w.count; i++) {
    const int64_t e = i / a.K / a.N, n = i / a.K % a.N, k = i % a.K;
    test_tensor_set(&w, grouped_w_at(c, e, n, k), grouped_w(c, e, n, k, 1));
  }
  a.W = w.data, a.quantized_W = NULL, a.packed_W = NULL;
  fuzz_same_grouped(ctx, c, op, &a, "from plain weights");
  test_tensor_free(&w);
}

static void fuzz_grouped_op(fuzz_input *in, moe_context *ctx, grouped_case *c, int op) {
  if (fuzz_spoil_grouped(in, c, op)) in->legal = 0;
  fuzz_vary(in, ctx);
  fuzz_run_grouped(ctx, c, op, &c->args, in->legal);
  if (!in->legal) return;
  fuzz_vary(in, ctx);
  fuzz_same_grouped(ctx, c, op, &c->args, "the second time");
  if (op < 2 && fuzz_pick(in, 2)) fuzz_other_weights(ctx, c, op);
}

static void fuzz_grouped(fuzz_input *in, moe_context *ctx) {
  static uint64_t somewhere[8];
  grouped_options o = fuzz_grouped_options(in);
  grouped_case c;
  const struct quantized q = {.weight = o.storage, .E = o.args.E, .K = o.args.K, .parts = 1, .columns = o.args.N};
  const int refused = o.quantized && !fuzz_storable(&q), op = fuzz_pick(in, 3);
  if (refused) o.quantized = 0;
  grouped_open(&c, fuzz_take(in, 2), (moe_dtype)(1 + fuzz_pick(in, TEST_DTYPES)), &o);
  if (refused) o.storage.codes = o.storage.scales = somewhere, c.args.quantized_W = &o.storage;
  if (refused && op < 2) in->legal = 0;
  fuzz_grouped_op(in, ctx, &c, op);
  grouped_close(&c);
}

#endif /* MOE_FUZZ_GROUPED_H */
