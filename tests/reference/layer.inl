/* The blockwise layer, forward and backward, in plain mathematics over REAL: no tiles, no rounding, one row at a time.
   Needs REAL, REF(name), REF_PART, REF(act) and REF(act_grad). Included once per number type. */

/* The layer's parameters, or their gradients. bgu and bd may be NULL. */
typedef struct REF(tensors) {
  REAL *x, *affinity; /* [T,H], [T,E] */
  REAL *wgu, *wd;     /* [E,H,2,I], [E,I,H] */
  REAL *bgu, *bd;     /* [E,2,I], [E,H] */
} REF(tensors);

/* What one block row computes; for all rows [N,B,...]. g, u are clamped, d has its bias. */
typedef struct REF(rows) {
  REAL *g, *u, *m; /* [I] */
  REAL *d;         /* [H] */
} REF(rows);

static inline REF(rows) REF(row)(const moe_blockwise_layer *l, const REF(rows) *rows, int64_t b, int64_t r) {
  int64_t i = (b * l->B + r) * l->I, h = (b * l->B + r) * l->H;
  return (REF(rows)){rows->g + i, rows->u + i, rows->m + i, rows->d ? rows->d + h : NULL};
}

static inline REAL REF(clamp)(REAL x, int use_upper, float upper, int use_lower, float lower) {
  if (use_upper && REF_PART(x) > (double)upper) x = (REAL)upper;
  if (use_lower && REF_PART(x) < (double)lower) x = (REAL)lower;
  return x;
}

/* ---------------------------------------------------------------------------------------------------------- forward */

/* m of one row from its clamped g and u. */
static inline REAL REF(intermediate)(const moe_layer_config *o, REAL g, REAL u) {
  return o->skip_gate ? REF(act)(o, u) : REF(act)(o, g) * (u + (REAL)o->up_offset);
}

static inline void REF(row_fwd)(const moe_blockwise_layer *l, const REF(tensors) *p, int64_t e, int64_t t,
                                const REF(rows) *row) {
  const moe_layer_config *o = &l->config;
  int64_t H = l->H, I = l->I;
  REAL a = ref_scales_input(o) ? p->affinity[t * l->E + e] : 1;
  for (int64_t i = 0; i < I; ++i) {
    REAL g = 0, u = 0;
    for (int64_t h = 0; h < H; ++h) {
      g += a * p->x[t * H + h] * p->wgu[((e * H + h) * 2 + 0) * I + i];
      u += a * p->x[t * H + h] * p->wgu[((e * H + h) * 2 + 1) * I + i];
    }
    if (p->bgu) g += p->bgu[(e * 2 + 0) * I + i], u += p->bgu[(e * 2 + 1) * I + i];
    row->g[i] = REF(clamp)(g, o->clamp & MOE_CLAMP_GATE_UPPER, o->gate_clamp_upper_limit,
                           o->clamp & MOE_CLAMP_GATE_LOWER, o->gate_clamp_lower_limit);
    row->u[i] = REF(clamp)(u, o->clamp & MOE_CLAMP_UP_UPPER, o->up_clamp_upper_limit, o->clamp & MOE_CLAMP_UP_LOWER,
                           o->up_clamp_lower_limit);
    row->m[i] = REF(intermediate)(o, row->g[i], row->u[i]);
  }
  for (int64_t h = 0; h < H; ++h) {
    REAL d = p->bd ? p->bd[e * H + h] : 0;
    for (int64_t i = 0; i < I; ++i) d += row->m[i] * p->wd[(e * I + i) * H + h];
    row->d[h] = d;
  }
}

/* y [T,H] += the layer; rows: [N,B,...], those of padding, idle blocks and rows that do not count stay as they are. */
static inline void REF(layer_fwd)(const moe_blockwise_layer *l, int not_accumulating, const REF(tensors) *p,
                                  const REF(rows) *rows, REAL *y) {
  for (int64_t b = 0; b < l->N; ++b)
    for (int64_t r = 0, e = ref_block_expert(l, b); e >= 0 && r < l->B; ++r) {
      int64_t t = ref_row_token(l, b, r);
      if (!ref_row_counts(l, not_accumulating, b, r)) continue;
      REF(rows) row = REF(row)(l, rows, b, r);
      REF(row_fwd)(l, p, e, t, &row);
      REAL a = ref_scales_output(&l->config) ? p->affinity[t * l->E + e] : 1;
      for (int64_t h = 0; h < l->H; ++h) y[t * l->H + h] += a * row.d[h];
    }
}

/* --------------------------------------------------------------------------------------------------------- backward */

/* dg and du of one row from dm. */
static inline void REF(row_bwd_intermediate)(const moe_layer_config *o, REAL g, REAL u, REAL dm, REAL *dg, REAL *du) {
  int gate_open = ref_open(o->clamp, MOE_CLAMP_GATE_UPPER, MOE_CLAMP_GATE_LOWER, (double)REF_PART(g),
                           (double)o->gate_clamp_upper_limit, (double)o->gate_clamp_lower_limit);
  int up_open = ref_open(o->clamp, MOE_CLAMP_UP_UPPER, MOE_CLAMP_UP_LOWER, (double)REF_PART(u),
                         (double)o->up_clamp_upper_limit, (double)o->up_clamp_lower_limit);
  *dg = gate_open && !o->skip_gate ? dm * (u + (REAL)o->up_offset) * REF(act_grad)(o, g) : 0;
  *du = !up_open ? 0 : o->skip_gate ? dm * REF(act_grad)(o, u) : dm * REF(act)(o, g);
}

/* From dY back to dm = row_grad->m, dg, du, and everything of the down projection. d may be NULL: dA is then had from
   m. */
static inline void REF(row_bwd_down)(const moe_blockwise_layer *l, const REF(tensors) *p, int64_t e, int64_t t,
                                     const REAL *dy, const REF(rows) *row, const REF(tensors) *grad,
                                     const REF(rows) *row_grad) {
  const moe_layer_config *o = &l->config;
  int64_t H = l->H, I = l->I;
  REAL a = ref_scales_output(o) ? p->affinity[t * l->E + e] : 1, da = 0;
  for (int64_t i = 0; i < I; ++i) {
    REAL m = REF(intermediate)(o, row->g[i], row->u[i]), dm = 0;
    for (int64_t h = 0; h < H; ++h) {
      dm += dy[h] * p->wd[(e * I + i) * H + h];
      grad->wd[(e * I + i) * H + h] += a * m * dy[h];
    }
    if (!row->d) da += dm * m;
    row_grad->m[i] = a * dm;
    REF(row_bwd_intermediate)(o, row->g[i], row->u[i], a * dm, &row_grad->g[i], &row_grad->u[i]);
  }
  for (int64_t h = 0; h < H; ++h) {
    if (row->d) da += dy[h] * row->d[h];
    else if (p->bd) da += dy[h] * p->bd[e * H + h];
    grad->bd[e * H + h] += a * dy[h];
  }
  if (ref_scales_output(o)) grad->affinity[t * l->E + e] += da;
}

/* From dg, du back to x and the gate and up projections. */
static inline void REF(row_bwd_gate_up)(const moe_blockwise_layer *l, const REF(tensors) *p, int64_t e, int64_t t,
                                        const REF(tensors) *grad, const REF(rows) *row_grad) {
  int64_t H = l->H, I = l->I;
  const REAL *dg = row_grad->g, *du = row_grad->u;
  int pre = ref_scales_input(&l->config);
  REAL a = pre ? p->affinity[t * l->E + e] : 1;
  for (int64_t h = 0; h < H; ++h) {
    REAL x = p->x[t * H + h], dx = 0;
    for (int64_t i = 0; i < I; ++i) {
      int64_t gate = ((e * H + h) * 2 + 0) * I + i, up = gate + I;
      dx += dg[i] * p->wgu[gate] + du[i] * p->wgu[up];
      grad->wgu[gate] += a * x * dg[i];
      grad->wgu[up] += a * x * du[i];
    }
    grad->x[t * H + h] += a * dx;
    if (pre) grad->affinity[t * l->E + e] += dx * x;
  }
  for (int64_t i = 0; i < I; ++i) grad->bgu[(e * 2 + 0) * I + i] += dg[i], grad->bgu[(e * 2 + 1) * I + i] += du[i];
}

/* grad += the layer's gradients for dy [T,H], given the rows of the forward (m is not read; d may be NULL).
   grad_rows: the gradients of g, u and m, [N,B,I]. */
static inline void REF(layer_bwd)(const moe_blockwise_layer *l, int not_accumulating, const REF(tensors) *p,
                                  const REF(rows) *rows, const REAL *dy, const REF(tensors) *grad,
                                  const REF(rows) *grad_rows) {
  for (int64_t b = 0; b < l->N; ++b)
    for (int64_t r = 0, e = ref_block_expert(l, b); e >= 0 && r < l->B; ++r) {
      int64_t t = ref_row_token(l, b, r);
      if (!ref_row_counts(l, not_accumulating, b, r)) continue;
      REF(rows) row = REF(row)(l, rows, b, r), row_grad = REF(row)(l, grad_rows, b, r);
      REF(row_bwd_down)(l, p, e, t, dy + t * l->H, &row, grad, &row_grad);
      REF(row_bwd_gate_up)(l, p, e, t, grad, &row_grad);
    }
}
