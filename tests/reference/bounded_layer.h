/* The blockwise layer over bounded numbers: the operations of the prototypes' comments in moe.h, each with its
   rounding. Inputs are exact (what the tensors hold). A clamp moves nothing apart, so that the forward has no kinks;
   the backward starts from the stored checkpoint, an exact input, so that its masks are met exactly. */
#ifndef REFERENCE_BOUNDED_LAYER_H
#define REFERENCE_BOUNDED_LAYER_H

#include "reference/bounded.h"

typedef struct bounded_layer {
  const moe_blockwise_layer *l;
  moe_dtype dtype; /* of the function */
  tensors_f64 in;  /* what the tensors hold */
} bounded_layer;

/* Forward: g, u, d before they are stored; m as an operand. [N,B,...] */
typedef struct bounded_rows {
  bounded *g, *u, *m; /* [I] */
  bounded *d;         /* [H] */
} bounded_rows;

/* Gradient sums before the final store. */
typedef struct bounded_grads {
  bounded *x, *affinity;                 /* [T,H], [T,E]: summed in block order */
  bounded_sum *wgu, *wd, *bgu, *bd;      /* chains over an expert's rows */
} bounded_grads;

static inline int bounded_flushes(const bounded_layer *p) { return p->dtype == MOE_DTYPE_BF16; }

/* Contract 3: an intermediate on its way into a product. */
static inline bounded bounded_operand(const bounded_layer *p, bounded x) {
  return p->dtype == MOE_DTYPE_BF16 ? bounded_round(MOE_DTYPE_BF16, x) : x;
}

static inline bounded_rows bounded_row(const bounded_layer *p, const bounded_rows *rows, int64_t b, int64_t r) {
  int64_t row = b * p->l->B + r;
  return (bounded_rows){rows->g + row * p->l->I, rows->u + row * p->l->I, rows->m + row * p->l->I,
                        rows->d + row * p->l->H};
}

/* ---------------------------------------------------------------------------------------------------------- forward */

/* One column of x*W, scaled, biased. `up`: 0 = gate, 1 = up. */
static inline bounded bounded_pre_activation(const bounded_layer *p, int64_t e, int64_t t, int64_t i, int up) {
  const moe_blockwise_layer *l = p->l;
  bounded_sum sum = {0};
  for (int64_t h = 0; h < l->H; ++h)
    bounded_sum_weight(&sum, bounded_exact(p->in.x[t * l->H + h]), p->in.wgu[((e * l->H + h) * 2 + up) * l->I + i],
                       bounded_flushes(p));
  bounded value = bounded_chain(&sum);
  if (ref_scales_input(&l->config)) value = bounded_mul(value, bounded_exact(p->in.affinity[t * l->E + e]));
  if (p->in.bgu) value = bounded_add(value, bounded_exact(p->in.bgu[(e * 2 + up) * l->I + i]));
  return value;
}

static inline void bounded_row_fwd(const bounded_layer *p, int64_t e, int64_t t, const bounded_rows *row) {
  const moe_blockwise_layer *l = p->l;
  const moe_layer_config *o = &l->config;
  bounded a = bounded_exact(o->affinity_mode == MOE_AFFINITY_ON_I ? p->in.affinity[t * l->E + e] : 1);
  for (int64_t i = 0; i < l->I; ++i) {
    bounded g = {0, 0}, u = bounded_pre_activation(p, e, t, i, 1), m;
    u = bounded_clamp(u, o->clamp & MOE_CLAMP_UP_UPPER, o->up_clamp_upper_limit, o->clamp & MOE_CLAMP_UP_LOWER,
                      o->up_clamp_lower_limit);
    if (o->skip_gate) {
      m = bounded_act(o, u);
    } else {
      g = bounded_clamp(bounded_pre_activation(p, e, t, i, 0), o->clamp & MOE_CLAMP_GATE_UPPER,
                        o->gate_clamp_upper_limit, o->clamp & MOE_CLAMP_GATE_LOWER, o->gate_clamp_lower_limit);
      m = bounded_mul(bounded_act(o, g), bounded_add(u, bounded_exact((double)o->up_offset)));
    }
    if (o->affinity_mode == MOE_AFFINITY_ON_I) m = bounded_mul(m, a);
    row->g[i] = g, row->u[i] = u, row->m[i] = bounded_operand(p, m);
  }
  for (int64_t h = 0; h < l->H; ++h) {
    bounded_sum sum = {0};
    for (int64_t i = 0; i < l->I; ++i)
      bounded_sum_weight(&sum, row->m[i], p->in.wd[(e * l->I + i) * l->H + h], bounded_flushes(p));
    row->d[h] = bounded_chain(&sum);
    if (p->in.bd) {
      bounded bias = bounded_exact(p->in.bd[e * l->H + h]);
      row->d[h] = bounded_add(row->d[h], o->affinity_mode == MOE_AFFINITY_ON_I ? bounded_mul(a, bias) : bias);
    }
  }
}

/* y [T,H]: zero, then the sum over blocks, to which the caller's old output is added last. */
static inline void bounded_layer_fwd(const bounded_layer *p, int not_accumulating, const bounded_rows *rows,
                                     bounded *y) {
  const moe_blockwise_layer *l = p->l;
  for (int64_t b = 0; b < l->N; ++b)
    for (int64_t r = 0, e = ref_block_expert(l, b); e >= 0 && r < l->B; ++r) {
      int64_t t = ref_row_token(l, b, r);
      if (!ref_row_counts(l, not_accumulating, b, r)) continue;
      bounded_rows row = bounded_row(p, rows, b, r);
      bounded_row_fwd(p, e, t, &row);
      for (int64_t h = 0; h < l->H; ++h) {
        bounded term = row.d[h];
        if (l->config.affinity_mode == MOE_AFFINITY_POST_SCALE)
          term = bounded_mul(term, bounded_exact(p->in.affinity[t * l->E + e]));
        y[t * l->H + h] = bounded_accumulate(y[t * l->H + h], term);
      }
    }
}

/* --------------------------------------------------------------------------------------------------------- backward */

/* The limits as the masks compare them: rounded to the checkpoint's type. */
static inline moe_layer_config bounded_mask_config(const moe_blockwise_layer *l) {
  moe_layer_config o = l->config;
  float *limits[] = {&o.gate_clamp_upper_limit, &o.gate_clamp_lower_limit, &o.up_clamp_upper_limit,
                     &o.up_clamp_lower_limit};
  for (int i = 0; i < 4; ++i) *limits[i] = (float)test_dtype_round(l->checkpoint_dtype, (double)*limits[i]);
  return o;
}

typedef struct bounded_unit { /* one element of the gated unit's backward; m before any affinity */
  bounded m, dg, du;
} bounded_unit;

static inline bounded_unit bounded_unit_bwd(const moe_layer_config *o, double g, double u, bounded dm) {
  bounded_unit unit = {{0, 0}, {0, 0}, {0, 0}};
  int gate_open = ref_open(o->clamp, MOE_CLAMP_GATE_UPPER, MOE_CLAMP_GATE_LOWER, g, (double)o->gate_clamp_upper_limit,
                           (double)o->gate_clamp_lower_limit);
  int up_open = ref_open(o->clamp, MOE_CLAMP_UP_UPPER, MOE_CLAMP_UP_LOWER, u, (double)o->up_clamp_upper_limit,
                         (double)o->up_clamp_lower_limit);
  if (o->skip_gate) {
    unit.m = bounded_act(o, bounded_exact(u));
    if (up_open) unit.du = bounded_mul(dm, bounded_act_grad(o, u));
    return unit;
  }
  bounded f = bounded_act(o, bounded_exact(g)), v = bounded_add(bounded_exact(u), bounded_exact((double)o->up_offset));
  unit.m = bounded_mul(f, v);
  if (gate_open) unit.dg = bounded_mul(bounded_mul(dm, v), bounded_act_grad(o, g));
  if (up_open) unit.du = bounded_mul(dm, f);
  return unit;
}

/* The down projection, and dg, du into unit [I]. g, u [I] and d [H] (or NULL) as stored. */
static inline void bounded_row_bwd_down(const bounded_layer *p, const moe_layer_config *o, int64_t e, int64_t t,
                                        const double *dy, const rows_f64 *stored, const bounded_grads *grad,
                                        bounded_unit *unit) {
  const moe_blockwise_layer *l = p->l;
  bounded a = bounded_exact(ref_scales_output(o) ? p->in.affinity[t * l->E + e] : 1);
  bounded_sum by_down = {0}, by_m = {0}, by_bias = {0};
  for (int64_t i = 0; i < l->I; ++i) {
    bounded_sum sum = {0};
    for (int64_t h = 0; h < l->H; ++h)
      bounded_sum_weight(&sum, bounded_exact(dy[h]), p->in.wd[(e * l->I + i) * l->H + h], bounded_flushes(p));
    bounded dm0 = bounded_chain(&sum), dm = ref_scales_output(o) ? bounded_mul(a, dm0) : dm0;
    unit[i] = bounded_unit_bwd(o, stored->g[i], stored->u[i], dm);
    bounded_sum_add(&by_m, dm0, unit[i].m, 0);
    bounded am = bounded_operand(p, ref_scales_output(o) ? bounded_mul(a, unit[i].m) : unit[i].m);
    for (int64_t h = 0; h < l->H; ++h)
      bounded_sum_weight(&grad->wd[(e * l->I + i) * l->H + h], am, dy[h], bounded_flushes(p));
  }
  for (int64_t h = 0; h < l->H; ++h) {
    if (stored->d) bounded_sum_weight(&by_down, bounded_exact(dy[h]), stored->d[h], 0);
    else if (p->in.bd) bounded_sum_weight(&by_bias, bounded_exact(dy[h]), p->in.bd[e * l->H + h], 0);
    bounded_sum_weight(&grad->bd[e * l->H + h], a, dy[h], 0);
  }
  if (!ref_scales_output(o)) return;
  bounded da = bounded_row_dot(stored->d ? &by_down : &by_m);
  if (!stored->d && p->in.bd) da = bounded_add(da, bounded_row_dot(&by_bias));
  grad->affinity[t * l->E + e] = bounded_accumulate(grad->affinity[t * l->E + e], da);
}

/* From dg, du back to x and the gate and up projections. */
static inline void bounded_row_bwd_gate_up(const bounded_layer *p, int64_t e, int64_t t, const bounded_grads *grad,
                                           const bounded_unit *unit) {
  const moe_blockwise_layer *l = p->l;
  int pre = ref_scales_input(&l->config), flush = bounded_flushes(p);
  bounded a = bounded_exact(pre ? p->in.affinity[t * l->E + e] : 1);
  bounded_sum by_x = {0};
  for (int64_t h = 0; h < l->H; ++h) {
    double x = p->in.x[t * l->H + h];
    bounded_sum sum = {0};
    for (int64_t i = 0; i < l->I; ++i) {
      int64_t gate = ((e * l->H + h) * 2 + 0) * l->I + i, up = gate + l->I;
      bounded_sum_weight(&sum, bounded_operand(p, unit[i].dg), p->in.wgu[gate], flush);
      bounded_sum_weight(&sum, bounded_operand(p, unit[i].du), p->in.wgu[up], flush);
      bounded_sum_weight(&grad->wgu[gate], bounded_operand(p, pre ? bounded_mul(a, unit[i].dg) : unit[i].dg), x, flush);
      bounded_sum_weight(&grad->wgu[up], bounded_operand(p, pre ? bounded_mul(a, unit[i].du) : unit[i].du), x, flush);
    }
    bounded dx = bounded_chain(&sum);
    bounded_sum_weight(&by_x, dx, x, 0);
    grad->x[t * l->H + h] = bounded_accumulate(grad->x[t * l->H + h], pre ? bounded_mul(a, dx) : dx);
  }
  for (int64_t i = 0; i < l->I; ++i) {
    bounded_sum_weight(&grad->bgu[(e * 2 + 0) * l->I + i], unit[i].dg, 1, 0);
    bounded_sum_weight(&grad->bgu[(e * 2 + 1) * l->I + i], unit[i].du, 1, 0);
  }
  if (pre) grad->affinity[t * l->E + e] = bounded_accumulate(grad->affinity[t * l->E + e], bounded_row_dot(&by_x));
}

/* grad += everything. stored: g, u [N,B,I] and d [N,B,H] (or NULL) as the checkpoints hold them. unit: room for [I]. */
static inline void bounded_layer_bwd(const bounded_layer *p, int not_accumulating, const rows_f64 *stored,
                                     const double *dy, const bounded_grads *grad, bounded_unit *unit) {
  const moe_blockwise_layer *l = p->l;
  const moe_layer_config mask = bounded_mask_config(l);
  for (int64_t b = 0; b < l->N; ++b)
    for (int64_t r = 0, e = ref_block_expert(l, b); e >= 0 && r < l->B; ++r) {
      int64_t t = ref_row_token(l, b, r);
      if (!ref_row_counts(l, not_accumulating, b, r)) continue;
      rows_f64 row = row_f64(l, stored, b, r);
      bounded_row_bwd_down(p, &mask, e, t, dy + t * l->H, &row, grad, unit);
      bounded_row_bwd_gate_up(p, e, t, grad, unit);
    }
}

#endif /* REFERENCE_BOUNDED_LAYER_H */
