/* quantized_layer.h: a problem whose experts' weights are quantised beside the plain weights that these stand for, and
   calls with either. */
#ifndef MOE_TEST_QUANTIZED_LAYER_H
#define MOE_TEST_QUANTIZED_LAYER_H

#include "test.h"

#include "pack.h"
#include "pool.h"
#include "problem.h"
#include "quantized.h"

enum { LAYOUTS = MOE_MX_LAYOUT_COUNT_, PLACEMENTS = MOE_MX_SCALES_COUNT_ };

/* How the weights of a case are given. */
struct storage {
  moe_quantized_weight gate_up, down;
  int packed, powers; /* powers: float scales are powers of two */
  int tiny;           /* 1: gate and up's float scales are below 2^-125, 2: down's */
  int sunk, normal;   /* see skew_codes */
};

struct layer {
  struct problem p;
  struct quantized gate_up, down;
};

static void shrink_scales(struct quantized *q, uint64_t *rng) {
  guard_free(&q->codes), guard_free(&q->scales);
  for (int64_t i = 0; i < quantized_scale_count(q); i++) quantized_set_scale(q, i, (uint32_t)(test_random(rng) >> 40));
  quantized_store(q, 1);
}

/* What kernels tell apart: some scale bytes so low that most of what they scale is subnormal, and codes of normal
   numbers only. */
static void skew_codes(struct quantized *q, const struct storage *s, uint64_t *rng, int side) {
  const int least = 1 << q->format->fraction_bits;
  guard_free(&q->codes), guard_free(&q->scales);
  for (int64_t i = 0; i < quantized_count(q) && s->normal && (int)q->format->id < ELEMENTS; i++)
    if ((q->table.code[i] & (127 >> (8 - q->format->bits))) < least) q->table.code[i] |= (uint8_t)least;
  for (int64_t i = 0; i < quantized_groups(q) && s->sunk; i++)
    if (test_random_chance(rng, 16)) q->table.scale[i] = (uint8_t)test_random_range(rng, 0, 8);
  quantized_store(q, side);
}

static void layer_open(struct layer *l, const struct problem_options *o, const struct storage *s, int codes_only) {
  uint64_t rng = o->seed * 77 + 5;
  const int e5m2 = s->gate_up.element == MOE_ELEMENT_E5M2 || s->down.element == MOE_ELEMENT_E5M2;
  const int low = test_dtype_narrow(o->dtype) ? 120 : 112, high = test_dtype_narrow(o->dtype) && e5m2 ? 126 : 130;
  memset(l, 0, sizeof *l);
  assert_true(problem_open(&l->p, o, NULL, NULL));
  problem_fill(&l->p);
  l->gate_up.weight = s->gate_up, l->down.weight = s->down;
  l->gate_up.E = l->down.E = o->E;
  l->gate_up.K = o->H, l->gate_up.parts = 2, l->gate_up.columns = o->I;
  l->down.K = o->I, l->down.parts = 1, l->down.columns = o->H;
  quantized_make(&l->gate_up, &rng, low, high, s->powers, (int)(o->seed & 1));
  quantized_make(&l->down, &rng, low, high, s->powers, (int)(o->seed & 1));
  skew_codes(&l->gate_up, s, &rng, (int)(o->seed & 1));
  skew_codes(&l->down, s, &rng, (int)(o->seed & 1));
  if (s->tiny == 1) shrink_scales(&l->gate_up, &rng);
  if (s->tiny == 2) shrink_scales(&l->down, &rng);
  assert_true(quantized_plain(&l->gate_up, o->dtype, l->p.tensor[PT_GATE_UP_WEIGHT].data, codes_only));
  assert_true(quantized_plain(&l->down, o->dtype, l->p.tensor[PT_DOWN_WEIGHT].data, codes_only));
}

static void layer_close(struct layer *l) {
  problem_close(&l->p, NULL, NULL);
  quantized_free(&l->gate_up), quantized_free(&l->down);
}

/* ------------------------------------------------------------------------------------------------------------ calls */

static void give_quantized(struct layer *l, moe_blockwise_layer *layer) {
  layer->gate_up_proj_weight = layer->down_proj_weight = NULL;
  layer->quantized_gate_up_proj_weight = &l->gate_up.weight;
  layer->quantized_down_proj_weight = &l->down.weight;
}

static inline void *pack_one(moe_context *ctx, struct layer *l, const struct quantized *q, size_t *bytes) {
  moe_pack_weights_args args = {.layout = q->parts == 1            ? MOE_PACK_DOWN
                                          : l->p.o.layer.skip_gate ? MOE_PACK_UP
                                                                   : MOE_PACK_GATE_UP,
                                .E = q->E,
                                .rows = q->K,
                                .columns = q->columns,
                                .quantized_weight = &q->weight};
  assert_int_equal(test_pack_new(ctx, l->p.o.dtype, &args), MOE_OK);
  *bytes = args.packed_bytes;
  return args.packed;
}

static inline void call(struct layer *l, moe_context *ctx, enum problem_op op, struct problem_args *args) {
  size_t bytes = 0;
  assert_int_equal(problem_workspace_size(op, ctx, args, &bytes), MOE_OK);
  void *workspace = malloc(bytes);
  assert_non_null(workspace);
  problem_set_workspace(op, args, workspace, bytes);
  if (problem_call(op, ctx, args) != MOE_OK) {
    char text[400];
    problem_describe(&l->p, ctx, text, sizeof text);
    fail_msg("%s: %s | %s", problem_op_name(op), ctx->message, text);
  }
  free(workspace);
}

/* The forward and the backward; `quantized`: from the quantised weights. */
static inline void run(struct layer *l, moe_context *ctx, int quantized, int packed) {
  for (int op = 0; op <= PROBLEM_BACKWARD; op++) {
    struct problem_args args;
    void *gate_up = NULL, *down = NULL;
    problem_make_args(&l->p, &args);
    if (quantized) give_quantized(l, &args.forward.layer), give_quantized(l, &args.backward.layer);
    if (packed && op == PROBLEM_FORWARD) {
      moe_blockwise_layer *layer = &args.forward.layer;
      gate_up = pack_one(ctx, l, &l->gate_up, &layer->packed_gate_up_proj_weight_bytes);
      layer->packed_gate_up_proj_weight = gate_up;
      layer->packed_down_proj_weight = down = pack_one(ctx, l, &l->down, &layer->packed_down_proj_weight_bytes);
    }
    call(l, ctx, (enum problem_op)op, &args);
    free(gate_up), free(down);
  }
}

static inline struct problem_options shape(uint64_t seed, moe_dtype dtype, int64_t H, int64_t I) {
  struct problem_options o = problem_options_random(seed, dtype);
  o.H = H, o.I = I;
  if (H * I > 20000) o.E = 2, o.K = 1, o.T = 5, o.B = 4;
  o.empty_expert = o.tiny_rows = o.nan_row = 0;
  problem_options_settle(&o);
  return o;
}

#endif /* MOE_TEST_QUANTIZED_LAYER_H */
