/* weights.h: layers whose weights and activations are quantised in any way, seldom in a way that no call takes. */
#ifndef MOE_FUZZ_WEIGHTS_H
#define MOE_FUZZ_WEIGHTS_H

#include "call.h"
#include "support/extras.h"
#include "support/problem.h"
#include "support/quantized.h"
#include "support/stored.h"

/* One weight of the layer. */
typedef struct fuzz_weight {
  struct quantized q;
  int given, good; /* quantised, and as it may be */
  void *packed;
  size_t packed_bytes;
} fuzz_weight;

/* Hidden states or their output's gradient. */
typedef struct fuzz_activation {
  struct stored s;
  int given, good;
} fuzz_activation;

typedef struct fuzz_layer {
  fuzz_input *in;
  moe_context *ctx;
  uint64_t rng;
  struct problem p, twin;
  fuzz_weight weight[2];         /* gate and up, down */
  fuzz_activation activation[2]; /* x, dY */
  int comparable;                /* twin has plain weights */
  struct extras extras, twin_extras;
} fuzz_layer;

/* ---------------------------------------------------------------------------------------------------- descriptions */

static int fuzz_among(int value, int count) { return value >= 0 && value < count; }

static int fuzz_storable(const struct quantized *q) {
  const moe_quantized_weight *w = &q->weight;
  const int blocks = w->scaling == MOE_WEIGHT_BLOCK, group = w->scaling == MOE_WEIGHT_GROUP;
  if (!fuzz_among((int)w->element, ELEMENTS + INTEGERS) || !fuzz_among((int)w->scaling, MOE_WEIGHT_COUNT_))
    return 0;
  if (w->scaling != MOE_WEIGHT_MX) {
    if (w->block < group || w->repeat < 0 || !quantized_storable(w, q->parts, q->K)) return 0;
    if (!blocks && !group) return 1;
    return fuzz_among((int)w->scales_type, MOE_SCALES_COUNT_) && w->first_k < quantized_block(q) &&
           (group || w->first_column < quantized_block_columns(q));
  }
  return fuzz_among((int)w->layout, MOE_MX_LAYOUT_COUNT_) &&
         fuzz_among((int)w->scales_layout, MOE_MX_SCALES_COUNT_) && quantized_storable(w, q->parts, q->K);
}

static void fuzz_describe(fuzz_input *in, moe_quantized_weight *w) {
  const int legal = in->legal;
  static const float some[16];
  w->element = (moe_element)fuzz_enum(in, fuzz_pick(in, 3) ? ELEMENTS : ELEMENTS + INTEGERS);
  w->scaling = fuzz_pick(in, 2) ? MOE_WEIGHT_MX : (moe_weight_scaling)fuzz_enum(in, MOE_WEIGHT_COUNT_);
  w->layout = (moe_mx_layout)fuzz_enum(in, MOE_MX_LAYOUT_COUNT_);
  w->scales_layout = fuzz_pick(in, 2) ? MOE_MX_SCALES_OWN : (moe_mx_scales)fuzz_enum(in, MOE_MX_SCALES_COUNT_);
  w->block = fuzz_pick(in, 2) ? fuzz_length(in, 0, 9, 16) : 0;
  w->repeat = fuzz_enum(in, 4);
  if (fuzz_pick(in, 3) == 0) { /* what came later */
    w->block_columns = fuzz_pick(in, 20), w->first_k = fuzz_pick(in, 9), w->first_column = fuzz_pick(in, 9);
    w->scales_type = (moe_scales_type)fuzz_enum(in, MOE_SCALES_COUNT_);
    if (w->scaling == MOE_WEIGHT_GROUP && fuzz_pick(in, 2)) w->global_scale = some;
    if (w->scaling == MOE_WEIGHT_GROUP && w->element == MOE_ELEMENT_UINT4 && fuzz_pick(in, 2))
      w->zero_points = (const uint8_t *)some;
  }
  in->legal = legal; /* what is not looked at may be anything: fuzz_storable tells */
}

/* A length of the contraction, mostly one that the layout takes. */
static int64_t fuzz_contraction(fuzz_input *in, const moe_quantized_weight *w, int parts) {
  const int64_t any = 1 + fuzz_pick(in, 90);
  if (w->scaling != MOE_WEIGHT_MX || w->layout == MOE_MX_LAYOUT_PLAIN || fuzz_pick(in, 8) == 0) return any;
  if (!mx_is_x4(w->layout)) return 32 * (1 + any % 4);
  return parts == 2 ? 512 : 4 * any;
}

static void fuzz_rounding(fuzz_input *in, moe_mx_rounding *r) {
  r->enabled = fuzz_pick(in, 3) == 0;
  r->element = r->enabled ? fuzz_element(in) : (moe_element)77;
  r->scale_rule = (moe_scale_rule)(r->enabled ? fuzz_enum(in, MOE_SCALE_COUNT_) : -5);
  r->cast = r->enabled ? fuzz_cast(in) : 99;
}

static void fuzz_operands(fuzz_input *in, struct problem_options *o) {
  moe_mx_operands *mx = &o->mx;
  if (fuzz_pick(in, 2)) return;
  fuzz_rounding(in, &mx->activations), fuzz_rounding(in, &mx->weights), fuzz_rounding(in, &mx->gradients);
  mx->weight_grads = fuzz_enum(in, 2);
  mx->activation_layout = (moe_mx_layout)fuzz_enum(in, MOE_MX_LAYOUT_COUNT_);
  if (in->legal && mx->activations.enabled &&
      (!mx_storable(mx->activation_layout, MOE_MX_SCALES_OWN, 4, 2, o->H) ||
       !mx_storable(mx->activation_layout, MOE_MX_SCALES_OWN, 4, 1, o->I)))
    in->legal = 0;
}

static struct problem_options fuzz_options(fuzz_layer *l) {
  fuzz_input *in = l->in;
  struct problem_options o = problem_options_random(fuzz_take(in, 2), (moe_dtype)(1 + fuzz_pick(in, TEST_DTYPES)));
  o.T = 1 + fuzz_pick(in, 12), o.E = 1 + fuzz_pick(in, 3), o.B = 1 + fuzz_pick(in, 9), o.K = 1 + fuzz_pick(in, 2);
  if (fuzz_pick(in, 4) == 0) o.spec = (moe_cte_spec)(MOE_CTE_SHARD_ON_BLOCK_MX + fuzz_pick(in, 3)), o.dropping = 0;
  if (o.spec >= MOE_CTE_SHARD_ON_BLOCK_MX) o.no_conditions = o.device_output_shape = 0;
  o.empty_expert = 0;
  for (int i = 0; i < 2; i++) {
    l->weight[i].given = fuzz_pick(in, 6) != 0;
    fuzz_describe(in, &l->weight[i].q.weight);
  }
  o.H = fuzz_contraction(in, &l->weight[0].q.weight, 2), o.I = fuzz_contraction(in, &l->weight[1].q.weight, 1);
  fuzz_operands(in, &o);
  problem_options_settle(&o);
  return o;
}

/* ---------------------------------------------------------------------------------------------------------- memory */

static void fuzz_fill_weight(fuzz_layer *l, struct quantized *q) {
  const int wild = fuzz_pick(l->in, 4) == 0;
  quantized_open(q);
  for (int64_t i = 0; i < quantized_count(q); i++) {
    const int any = (int)(test_random(&l->rng) >> 40) & ((1 << q->format->bits) - 1), sign = 1 << (q->format->bits - 1);
    const int all = wild || (int)q->format->id >= ELEMENTS;
    q->table.code[i] = (uint8_t)(all || (any & (sign - 1)) <= q->format->last ? any : any & sign);
  }
  for (int64_t i = 0; i < quantized_groups(q); i++) {
    const int any = (int)(test_random(&l->rng) >> 40) & 255;
    q->table.scale[i] = (uint8_t)(wild ? any : 116 + any % 16);
  }
  for (int64_t i = 0; i < quantized_scale_count(q); i++) {
    const uint64_t r = test_random(&l->rng);
    const uint32_t exponent = wild ? (uint32_t)(r >> 32) % 255 : 120 + (uint32_t)(r >> 32) % 12;
    if (quantized_scale_size(q) < 4)
      quantized_random_scale(q, i, &l->rng, 0);
    else
      quantized_set_scale(q, i, i % quantized_repeat(q) ? 0x7fc00000u : ((uint32_t)r & 0x807fffffu) | exponent << 23);
  }
  quantized_random_extras(q, &l->rng, 0);
  quantized_store(q, fuzz_pick(l->in, 2));
}

static void fuzz_make_weight(fuzz_layer *l, int i, int tensor) {
  static uint64_t somewhere[8];
  fuzz_weight *w = &l->weight[i];
  const struct problem_options *o = &l->p.o;
  w->q.E = o->E, w->q.K = i ? o->I : o->H, w->q.parts = i ? 1 : 2, w->q.columns = i ? o->H : o->I;
  w->good = fuzz_storable(&w->q);
  w->q.weight.codes = w->q.weight.scales = somewhere;
  if (!w->good || !w->given) return;
  fuzz_fill_weight(l, &w->q);
  if (w->q.weight.scaling != MOE_WEIGHT_MX && w->q.weight.scaling != MOE_WEIGHT_BLOCK &&
      w->q.weight.scaling != MOE_WEIGHT_GROUP)
    l->comparable = 0;
  if (l->comparable && !quantized_plain(&w->q, o->dtype, l->twin.tensor[tensor].data, 0)) abort();
}

static void fuzz_make_activation(fuzz_layer *l, int i, int tensor) {
  static uint64_t somewhere[8];
  fuzz_activation *f = &l->activation[i];
  moe_quantized_activation *a = &f->s.a;
  const int legal = l->in->legal;
  f->given = fuzz_pick(l->in, 3) == 0;
  f->s.rows = l->p.o.T, f->s.columns = l->p.o.H;
  if (!f->given) return;
  l->in->legal = 1;
  a->element = fuzz_element(l->in);
  a->float_scales = fuzz_enum(l->in, 2);
  a->block_rows = a->float_scales ? fuzz_length(l->in, 0, 4, 4) : -7;
  a->block_columns = a->float_scales ? fuzz_length(l->in, 0, 40, 16) : -7;
  f->good = l->in->legal && (!a->float_scales || elements[a->element].bits == 8);
  l->in->legal = legal;
  a->codes = (const uint8_t *)somewhere, a->scales = somewhere;
  if (!f->good) return;
  stored_make(&f->s, &l->rng);
  stored_plain(&f->s, l->p.o.dtype, l->twin.tensor[tensor].data);
}

/* The same for both but for the checkpoint. */
static void fuzz_make_extras(fuzz_layer *l) {
  const moe_mx_rounding given = l->p.o.mx.activations;
  l->extras = extras_random(&l->p, &l->rng);
  if (!l->in->legal) l->extras.in_scales = 0, l->p.o.mx.activations = given;
  if (fuzz_pick(l->in, 32) == 0) l->extras.limited = 1, l->extras.valid = fuzz_pick(l->in, 2) ? -1 : INT32_MAX;
  l->twin.o.mx.activations = l->p.o.mx.activations;
  l->twin_extras = l->extras;
  const size_t bytes = (size_t)l->extras.count * (size_t)l->extras.element;
  if (l->extras.scaled) l->twin_extras.scaled = memset(fuzz_memory((int64_t)bytes), 0, bytes);
}

static void fuzz_close_layer(fuzz_layer *l) {
  free(l->extras.scaled), free(l->twin_extras.scaled);
  for (int i = 0; i < 2; i++) {
    stored_free(&l->activation[i].s);
    quantized_free(&l->weight[i].q);
    free(l->weight[i].packed);
  }
  problem_close(&l->p, NULL, NULL), problem_close(&l->twin, NULL, NULL);
}

static int fuzz_open_layer(fuzz_layer *l) {
  const struct problem_options o = fuzz_options(l);
  if (o.E * o.H * o.I > 40000) return 0;
  if (!problem_open(&l->p, &o, NULL, NULL) || !problem_open(&l->twin, &o, NULL, NULL)) abort();
  for (int op = PROBLEM_ROUTER; op <= PROBLEM_ROUTE_BLOCKS; op++)
    if (problem_run(&l->p, l->ctx, (enum problem_op)op) != MOE_OK ||
        problem_run(&l->twin, l->ctx, (enum problem_op)op) != MOE_OK)
      fuzz_fail("routing", l->ctx);
  l->comparable = !test_dtype_narrow(o.dtype) && !o.mx.weights.enabled;
  fuzz_make_weight(l, 0, PT_GATE_UP_WEIGHT), fuzz_make_weight(l, 1, PT_DOWN_WEIGHT);
  fuzz_make_activation(l, 0, PT_HIDDEN_STATES), fuzz_make_activation(l, 1, PT_OUTPUT_GRAD);
  fuzz_make_extras(l);
  return 1;
}

/* --------------------------------------------------------------------------------------------------------- spoiling */

static void fuzz_spoil_nan(fuzz_layer *l, const struct quantized *q) {
  const int64_t i = (int64_t)fuzz_take(l->in, 2) % quantized_scale_count(q);
  const float bad = float_of(fuzz_pick(l->in, 2) ? 0x7f800001u : 0xff800000u);
  memcpy(q->scales.data + 4 * (i - i % quantized_repeat(q)), &bad, 4);
}

/* Seldom a good description with one thing wrong. */
static void fuzz_spoil_weight(fuzz_layer *l, fuzz_weight *w) {
  moe_quantized_weight *q = &w->q.weight;
  const int mx = q->scaling == MOE_WEIGHT_MX, ggml = mx && q->layout == MOE_MX_LAYOUT_GGML;
  if (!w->good || !w->given) return;
  w->good = 0;
  switch (fuzz_pick(l->in, 48)) {
    case 0: q->codes = NULL; return;
    case 1: q->element = (moe_element)ELEMENTS; return;
    case 2: q->scaling = (moe_weight_scaling)-1; return;
    case 3:
      if (ggml) break;
      q->scales = NULL;
      return;
    case 4:
      if (!mx)
        q->repeat = -1;
      else
        q->layout = (moe_mx_layout)8;
      return;
    case 5:
      if (!mx)
        q->block = INT64_MIN;
      else
        q->scales_layout = (moe_mx_scales)4;
      return;
    case 6:
      if (mx && !mx_is_nki(q->layout)) break;
      if (mx)
        q->codes = (const char *)q->codes + 1;
      else
        q->scales = (const char *)q->scales + 1;
      return;
    case 7:
    case 8:
      if (mx) break;
      fuzz_spoil_nan(l, &w->q);
      return;
    default: break;
  }
  w->good = 1;
}

#endif /* MOE_FUZZ_WEIGHTS_H */
