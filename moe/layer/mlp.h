/* The dense MLP of MXFP8 operands: its forward, and its backward whole or one phase at a time. */
#ifndef MOE_LAYER_MLP_H
#define MOE_LAYER_MLP_H

/* ------------------------------------------------------------------------------------------------ matrices, memory */

/* Whether rows of this call are rows of S. */
MOE_FN int moe_mlp_rows_are_tokens_(const moe_mlp_ *p) {
  return p->phases != MOE_MLP_PHASE3_ && p->phases != MOE_MLP_PHASE4_;
}

MOE_FN void moe_mlp_take_tensors_(moe_mlp_ *p, moe_arena_ *arena) {
  const int tokens = moe_mlp_rows_are_tokens_(p);
  const int64_t row = moe_mul_(p->mlp.I, MOE_BF16_BYTES_), base = tokens ? p->base : 0;
  for (int i = 0; i < MOE_MLP_TENSORS_; i++) {
    moe_mlp_tensor_ *t = &p->tensor[i];
    char *from = t->make ? t->out : (char *)(uintptr_t)t->given;
    if (from) t->at = from + base * row;
    else if (t->needed && t->make) t->at = (char *)moe_take_(arena, moe_mul_(tokens ? p->rows : p->mlp.S, row));
  }
}

/* Recompute, and the first products of the forward. */
MOE_FN void moe_mlp_layout_gate_up_(moe_mlp_ *p, moe_arena_ *arena) {
  const moe_mlp_bwd_mxfp8_args *args = &p->args;
  const int64_t S = p->mlp.S, H = p->mlp.H, I = p->mlp.I;
  const int gate = p->tensor[MOE_GATE_PRE_].make, up = p->tensor[MOE_UP_].make;
  if (!gate && !up) return;
  moe_mxfp8_matrix_(&p->m, &p->x, &args->hidden_states, NULL, p->base, p->rows, S, H);
  moe_mxfp8_matrix_(&p->m, &p->gate, &args->gate_up_weights, NULL, 0, I, 2 * I, H);
  moe_mxfp8_matrix_(&p->m, &p->up, &args->gate_up_weights, NULL, I, I, 2 * I, H);
  moe_mx_matrix_layout_(&p->x, MOE_MX_ROWS_, arena);
  if (gate) moe_mx_matrix_layout_(&p->gate, MOE_MX_PANELS_, arena);
  if (up) moe_mx_matrix_layout_(&p->up, MOE_MX_PANELS_, arena);
}

MOE_FN void moe_mlp_layout_output_(moe_mlp_ *p, moe_arena_ *arena) {
  const int64_t H = p->mlp.H, I = p->mlp.I;
  p->hidden.data = p->tensor[MOE_HIDDEN_].at;
  moe_mxfp8_matrix_(&p->m, &p->m_rows, &p->hidden, NULL, 0, p->rows, p->rows, I);
  moe_mxfp8_matrix_(&p->m, &p->down, &p->args.down_weight, NULL, 0, H, H, I);
  moe_mx_matrix_layout_(&p->m_rows, MOE_MX_ROWS_, arena);
  moe_mx_matrix_layout_(&p->down, MOE_MX_PANELS_, arena);
}

MOE_FN void moe_mlp_layout_phase1_(moe_mlp_ *p, moe_arena_ *arena) {
  const int64_t S = p->mlp.S, H = p->mlp.H, I = p->mlp.I;
  moe_mxfp8_matrix_(&p->m, &p->dy, &p->args.output_grad, NULL, p->base, p->rows, S, H);
  moe_mxfp8_matrix_(&p->m, &p->down_T, &p->args.down_weight_T, &p->args.down_weight, 0, I, I, H);
  moe_mx_matrix_layout_(&p->dy, MOE_MX_ROWS_, arena);
  moe_mx_matrix_layout_(&p->down_T, MOE_MX_PANELS_, arena);
}

/* A [rows,2I] is gate's gradients next to up's; so is B [H,2I], unless it is made from one tensor. */
MOE_FN void moe_mlp_layout_phase2_(moe_mlp_ *p, moe_arena_ *arena) {
  const moe_mlp_bwd_mxfp8_args *args = &p->args;
  const int64_t H = p->mlp.H, I = p->mlp.I, both = 2 * I, stride = both * MOE_BF16_BYTES_, half = I * MOE_BF16_BYTES_;
  p->d_gate.data = p->tensor[MOE_D_GATE_].at, p->d_up.data = p->tensor[MOE_D_UP_].at;
  moe_mxfp8_matrix_(&p->m, &p->dg, &p->d_gate, NULL, 0, p->rows, p->rows, I);
  moe_mxfp8_matrix_(&p->m, &p->du, &p->d_up, NULL, 0, p->rows, p->rows, I);
  char *a = (char *)moe_take_(arena, moe_mul_(p->rows, stride));
  p->dg.to = a, p->du.to = a ? a + half : NULL, p->dg.stride = p->du.stride = stride;
  if (!args->gate_weight_T.data && !args->up_weight_T.data) {
    moe_mxfp8_matrix_(&p->m, &p->both, NULL, &args->gate_up_weights, 0, H, H, both);
    p->both.segment = I;
    moe_mx_matrix_layout_(&p->both, MOE_MX_PANELS_, arena);
    return;
  }
  char *b = (char *)moe_take_(arena, moe_mul_(H, stride));
  p->joined.data = b;
  moe_mxfp8_matrix_(&p->m, &p->gate_T, &args->gate_weight_T, &args->gate_up_weights, 0, H, H, I);
  moe_mxfp8_matrix_(&p->m, &p->up_T, &args->up_weight_T, &args->gate_up_weights, 0, H, H, I);
  p->gate_T.k_stored = p->up_T.k_stored = both;
  p->up_T.k_first = I;
  p->gate_T.to = b, p->up_T.to = b ? b + half : NULL, p->gate_T.stride = p->up_T.stride = stride;
  moe_mx_matrix_layout_(&p->gate_T, MOE_MX_ROWS_, arena);
  moe_mx_matrix_layout_(&p->up_T, MOE_MX_ROWS_, arena);
  moe_mxfp8_matrix_(&p->m, &p->both, &p->joined, NULL, 0, H, H, both);
  p->both.round = NULL;
  moe_mx_matrix_layout_(&p->both, MOE_MX_PANELS_, arena);
}

/* A is columns [base, base+rows) of gate's gradients next to up's. */
MOE_FN void moe_mlp_layout_phase3_(moe_mlp_ *p, moe_arena_ *arena) {
  const moe_mlp_bwd_mxfp8_args *args = &p->args;
  const int64_t S = p->mlp.S, H = p->mlp.H, I = p->mlp.I;
  const int alone = p->phases == MOE_MLP_PHASE3_;
  const int64_t base = alone ? p->base : 0, rows = alone ? p->rows : 2 * I;
  moe_mxfp8_matrix_(&p->m, &p->x_columns, &args->hidden_states_T, &args->hidden_states, 0, H, H, S);
  moe_mx_matrix_layout_(&p->x_columns, MOE_MX_COLUMNS_, arena);
  p->d_gate_up_T.data = alone ? args->d_gate_up_T : NULL;
  p->d_gate.data = p->tensor[MOE_D_GATE_].at, p->d_up.data = p->tensor[MOE_D_UP_].at;
  if (p->d_gate_up_T.data) {
    moe_mxfp8_matrix_(&p->m, &p->grad, &p->d_gate_up_T, NULL, base, rows, 2 * I, S);
    moe_mx_matrix_layout_(&p->grad, MOE_MX_COLUMNS_, arena);
    return;
  }
  const int64_t gates = moe_max_(0, moe_min_(I - base, rows)), stride = rows * MOE_BF16_BYTES_;
  char *a = (char *)moe_take_(arena, moe_mul_(S, stride));
  moe_mxfp8_matrix_(&p->m, &p->grad, NULL, &p->d_gate, base, gates, I, S);
  moe_mxfp8_matrix_(&p->m, &p->grad_up, NULL, &p->d_up, moe_max_(0, base - I), rows - gates, I, S);
  p->grad.to = a, p->grad_up.to = a ? a + gates * MOE_BF16_BYTES_ : NULL;
  p->grad.stride = p->grad_up.stride = stride;
}

MOE_FN void moe_mlp_layout_phase4_(moe_mlp_ *p, moe_arena_ *arena) {
  const moe_mlp_bwd_mxfp8_args *args = &p->args;
  const int64_t S = p->mlp.S, H = p->mlp.H, I = p->mlp.I;
  const int alone = p->phases == MOE_MLP_PHASE4_;
  p->hidden.data = p->tensor[MOE_HIDDEN_].at;
  moe_mxfp8_matrix_(&p->m, &p->dy_columns, &args->output_grad_T, &args->output_grad, alone ? p->base : 0,
                    alone ? p->rows : H, H, S);
  moe_mxfp8_matrix_(&p->m, &p->hidden_columns, &args->hidden_T, &p->hidden, 0, I, I, S);
  moe_mx_matrix_layout_(&p->dy_columns, MOE_MX_COLUMNS_, arena);
  moe_mx_matrix_layout_(&p->hidden_columns, MOE_MX_COLUMNS_, arena);
}

typedef struct moe_mlp_step_ {
  int phases; /* in which it is */
  void (*layout)(moe_mlp_ *p, moe_arena_ *arena);
  void (*run)(moe_context *ctx, moe_mlp_ *p);
} moe_mlp_step_;

/* ---------------------------------------------------------------------------------------------------------------- run
   */

/* Products of gate (part 0) or up, where there are limits. */
typedef struct moe_mlp_part_ {
  moe_mxfp8_store_ store;
  moe_glu_ limits; /* of the gated unit of the identity */
  int part;
} moe_mlp_part_;

MOE_FN void moe_mlp_clamp_panel_(void *arg, const moe_expert_c_ *p) {
  const moe_mlp_part_ *part = (const moe_mlp_part_ *)arg;
  float other[MOE_STORE_ROWS_AT_ONCE * MOE_NR] = {0}, m[MOE_STORE_ROWS_AT_ONCE * MOE_NR];
  moe_glu_rows_ rows = {0};
  rows.n = p->n, rows.m = m;
  for (int64_t at = 0; at < p->rows; at += rows.rows) {
    float *c = p->c + at * MOE_NR;
    rows.rows = moe_min_(MOE_STORE_ROWS_AT_ONCE, p->rows - at);
    rows.gate = part->part ? other : c, rows.up = part->part ? c : other;
    part->store.kernels->vec->glu_forward(&part->limits, &rows);
  }
  moe_mxfp8_store_panel_(arg, p); /* the store is its first member */
}

MOE_FN void moe_mlp_part_stage_(moe_mlp_ *p, moe_mlp_part_ *part, int up, moe_expert_stage_ *stage) {
  const uint32_t bits = up ? MOE_CLAMP_UP_UPPER | MOE_CLAMP_UP_LOWER : MOE_CLAMP_GATE_UPPER | MOE_CLAMP_GATE_LOWER;
  const int64_t stride = p->mlp.I * MOE_BF16_BYTES_;
  char *to = p->tensor[up ? MOE_UP_ : MOE_GATE_PRE_].at;
  part->store = (moe_mxfp8_store_){p->m.group.kernels, to, stride, MOE_DTYPE_BF16};
  part->limits = p->limits, part->limits.activation = MOE_ACT_IDENTITY;
  part->part = up;
  moe_mxfp8_stage_(&p->m, &p->x, up ? &p->up : &p->gate, part, moe_mlp_clamp_panel_, stage);
  if (!(p->limits.clamp & bits)) {
    stage->store_panel = moe_mxfp8_store_panel_;
    stage->to = (moe_place_){.base = to, .stride = stride, .dtype = MOE_DTYPE_BF16};
  }
  moe_expert_stage_start_(stage, moe_ceil_div_(p->mlp.I, MOE_NR), p->mlp.H);
}

MOE_FN void moe_mlp_run_gate_up_(moe_context *ctx, moe_mlp_ *p) {
  moe_expert_stage_ stage[2];
  moe_mlp_part_ part[2];
  moe_work_ work[2];
  int works = 0;
  if (!p->tensor[MOE_GATE_PRE_].make && !p->tensor[MOE_UP_].make) return;
  moe_mx_matrix_run_(ctx, &p->x, MOE_MX_ROWS_);
  moe_mxfp8_set_rows_(&p->m, ctx, p->rows);
  for (int up = 0; up < 2; up++) {
    if (!p->tensor[up ? MOE_UP_ : MOE_GATE_PRE_].make) continue;
    moe_mx_matrix_run_(ctx, up ? &p->up : &p->gate, MOE_MX_PANELS_);
    moe_mlp_part_stage_(p, &part[works], up, &stage[works]);
    work[works] = moe_expert_stage_work_(&stage[works]);
    works++;
  }
  moe_run_(ctx, work, works);
}

/* Columns [i0, i0+n) of at most MOE_STORE_ROWS_AT_ONCE rows of gate_act and hidden. */
MOE_FN void moe_mlp_unit_rows_(const moe_mlp_ *p, int64_t row, int64_t rows, int64_t i0, int64_t n) {
  const moe_vec_table_ *vec = p->m.group.kernels->vec;
  const int64_t stride = p->mlp.I * MOE_BF16_BYTES_, at = row * stride + i0 * MOE_BF16_BYTES_;
  const moe_mlp_tensor_ *act = &p->tensor[MOE_GATE_ACT_], *hidden = &p->tensor[MOE_HIDDEN_];
  const moe_rows_ gate = {p->tensor[act->given ? MOE_GATE_ACT_ : MOE_GATE_PRE_].at + at, stride, NULL};
  const moe_rows_ up = {p->tensor[MOE_UP_].at + at, stride, NULL};
  float f[MOE_STORE_ROWS_AT_ONCE * MOE_NR] = {0}, u[MOE_STORE_ROWS_AT_ONCE * MOE_NR];
  moe_glu_ glu = p->limits;
  moe_glu_rows_ unit = {0};
  vec->load_rows[MOE_DTYPE_BF16](f, MOE_NR, &gate, rows, n);
  if (!act->given) {
    vec->activate(&p->limits, f, f, NULL, rows * MOE_NR);
    if (act->at && act->make) vec->store_rows[MOE_DTYPE_BF16](act->at + at, stride, NULL, f, rows, n);
    if (!p->mlp.unrounded_gate_act) {
      moe_store_row_(vec, MOE_DTYPE_BF16, u, f, rows * MOE_NR);
      moe_load_row_(vec, MOE_DTYPE_BF16, f, u, rows * MOE_NR);
    }
  }
  if (!hidden->make) return;
  glu.activation = MOE_ACT_IDENTITY, glu.clamp = 0;
  unit.rows = rows, unit.n = n;
  unit.gate = unit.m = f, unit.up = u;
  vec->load_rows[MOE_DTYPE_BF16](u, MOE_NR, &up, rows, n);
  vec->glu_forward(&glu, &unit);
  vec->store_rows[MOE_DTYPE_BF16](hidden->at + at, stride, NULL, unit.m, rows, n);
}

MOE_FN void moe_mlp_unit_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_mlp_ *p = (const moe_mlp_ *)arg;
  const int64_t all = moe_mlp_rows_are_tokens_(p) ? p->rows : p->mlp.S;
  const int64_t row = item * MOE_STORE_ROWS_AT_ONCE, rows = moe_min_(MOE_STORE_ROWS_AT_ONCE, all - row);
  (void)worker;
  for (int64_t i0 = 0; i0 < p->mlp.I; i0 += MOE_NR)
    moe_mlp_unit_rows_(p, row, rows, i0, moe_min_(MOE_NR, p->mlp.I - i0));
}

MOE_FN void moe_mlp_run_unit_(moe_context *ctx, moe_mlp_ *p) {
  const int64_t rows = moe_mlp_rows_are_tokens_(p) ? p->rows : p->mlp.S;
  if (p->tensor[MOE_GATE_ACT_].make || p->tensor[MOE_HIDDEN_].make)
    moe_run_items_(ctx, moe_ceil_div_(rows, MOE_STORE_ROWS_AT_ONCE), moe_mlp_unit_item_, p);
}

MOE_FN void moe_mlp_run_output_(moe_context *ctx, moe_mlp_ *p) {
  const int64_t H = p->mlp.H;
  moe_mx_matrix_run_(ctx, &p->m_rows, MOE_MX_ROWS_);
  moe_mx_matrix_run_(ctx, &p->down, MOE_MX_PANELS_);
  moe_mxfp8_multiply_(ctx, &p->m, &p->m_rows, &p->down, (char *)p->output + p->base * H * MOE_BF16_BYTES_,
                      MOE_DTYPE_BF16);
}

enum { MOE_MLP_ROOM_ = 3 * MOE_NR * MOE_NR }; /* squares of gate_pre, up, gate_act */

/* The products are dm; they are overwritten. */
MOE_FN void moe_mlp_grad_panel_(void *arg, const moe_expert_c_ *c) {
  const moe_mlp_ *p = (const moe_mlp_ *)arg;
  const moe_vec_table_ *vec = p->m.group.kernels->vec;
  const int64_t stride = p->mlp.I * MOE_BF16_BYTES_;
  float dot[MOE_NR];
  moe_glu_rows_ glu = {0};
  glu.n = c->n, glu.dot = dot;
  glu.gate = glu.dgate = c->room, glu.up = glu.dup = c->room + MOE_NR * MOE_NR;
  float *act = c->room + 2 * MOE_NR * MOE_NR;
  for (int64_t row = 0; row < c->rows; row += glu.rows) {
    const int64_t at = (c->first + row) * stride + c->panel * MOE_NR_BYTES_ / 2;
    const moe_rows_ gate = {p->tensor[MOE_GATE_PRE_].at + at, stride, NULL};
    const moe_rows_ up = {p->tensor[MOE_UP_].at + at, stride, NULL};
    glu.rows = moe_min_(MOE_NR, c->rows - row);
    glu.dm = glu.m = c->c + row * MOE_NR;
    vec->load_rows[MOE_DTYPE_BF16](glu.gate, MOE_NR, &gate, glu.rows, c->n);
    vec->load_rows[MOE_DTYPE_BF16](glu.up, MOE_NR, &up, glu.rows, c->n);
    if (p->tensor[MOE_GATE_ACT_].given || !p->mlp.unrounded_gate_act) {
      const moe_rows_ given = {p->tensor[MOE_GATE_ACT_].at + at, stride, NULL};
      vec->load_rows[MOE_DTYPE_BF16](act, MOE_NR, &given, glu.rows, c->n);
      glu.act = act;
    }
    vec->glu_backward(&p->glu, &glu);
    moe_store_rows_prefetched_(p->m.group.kernels, MOE_DTYPE_BF16, p->tensor[MOE_D_GATE_].at + at, stride, NULL,
                               glu.dgate, glu.rows, c->n);
    moe_store_rows_prefetched_(p->m.group.kernels, MOE_DTYPE_BF16, p->tensor[MOE_D_UP_].at + at, stride, NULL, glu.dup,
                               glu.rows, c->n);
  }
}

MOE_FN void moe_mlp_run_phase1_(moe_context *ctx, moe_mlp_ *p) {
  const int64_t S = p->mlp.S, I = p->mlp.I, row = I * MOE_BF16_BYTES_, column = S * MOE_BF16_BYTES_;
  moe_expert_stage_ stage;
  moe_mx_matrix_run_(ctx, &p->dy, MOE_MX_ROWS_);
  moe_mx_matrix_run_(ctx, &p->down_T, MOE_MX_PANELS_);
  moe_mxfp8_set_rows_(&p->m, ctx, p->rows);
  moe_mxfp8_stage_(&p->m, &p->dy, &p->down_T, p, moe_mlp_grad_panel_, &stage);
  stage.room_floats = MOE_MLP_ROOM_;
  moe_expert_stage_start_(&stage, moe_ceil_div_(I, MOE_NR), p->mlp.H);
  const moe_work_ work = moe_expert_stage_work_(&stage);
  moe_run_(ctx, &work, 1);
  char *to = (char *)p->args.d_gate_up_T;
  for (int up = 0; up < 2 && to; up++)
    moe_mx_transpose_(ctx, &p->dy, p->tensor[up ? MOE_D_UP_ : MOE_D_GATE_].at, row,
                      to + up * I * column + p->base * MOE_BF16_BYTES_, column, p->rows, I);
}

MOE_FN void moe_mlp_run_phase2_(moe_context *ctx, moe_mlp_ *p) {
  const int64_t H = p->mlp.H;
  moe_mx_matrix_run_(ctx, &p->dg, MOE_MX_ROWS_);
  moe_mx_matrix_run_(ctx, &p->du, MOE_MX_ROWS_);
  if (p->joined.data) {
    moe_mx_matrix_run_(ctx, &p->gate_T, MOE_MX_ROWS_);
    moe_mx_matrix_run_(ctx, &p->up_T, MOE_MX_ROWS_);
  }
  moe_mx_matrix_run_(ctx, &p->both, MOE_MX_PANELS_);
  moe_mx_matrix_ a = p->dg;
  a.K = p->both.K;
  moe_mxfp8_multiply_(ctx, &p->m, &a, &p->both, (char *)p->args.hidden_states_grad + p->base * H * MOE_BF16_BYTES_,
                      MOE_DTYPE_BF16);
}

/* dW [m,n] = x^T y, rows from `first` on of a tensor. */
MOE_FN void moe_mlp_weight_grad_(moe_context *ctx, moe_mlp_ *p, const moe_mx_matrix_ *x, int64_t m,
                                 const moe_mx_matrix_ *y, void *tensor, int64_t first, uint32_t accumulate) {
  moe_weight_grad_ stage;
  memset(&stage, 0, sizeof stage);
  moe_mxfp8_set_rows_(&p->m, ctx, p->mlp.S);
  stage.group = &p->m.group;
  stage.x.rows = (moe_rows_){x->to, x->stride, NULL};
  stage.y.rows = (moe_rows_){y->to, y->stride, NULL};
  stage.x.dtype = stage.y.dtype = MOE_DTYPE_BF16;
  stage.m = stage.m_to = m;
  stage.n = y->F;
  stage.dtype = p->weight_grad_dtype;
  stage.output = (char *)tensor + first * stage.n * moe_dtype_bytes_(stage.dtype);
  stage.accumulate = (p->args.accumulate & accumulate) != 0;
  const moe_work_ work = moe_weight_grad_work_(&stage);
  if (m > 0) moe_run_(ctx, &work, 1);
}

MOE_FN void moe_mlp_run_phase3_(moe_context *ctx, moe_mlp_ *p) {
  const int alone = p->phases == MOE_MLP_PHASE3_, any = p->mlp.S > 0;
  if (any) moe_mx_matrix_run_(ctx, &p->x_columns, MOE_MX_COLUMNS_);
  if (any) moe_mx_matrix_run_(ctx, &p->grad, MOE_MX_COLUMNS_);
  if (any && !p->d_gate_up_T.data) moe_mx_matrix_run_(ctx, &p->grad_up, MOE_MX_COLUMNS_);
  moe_mlp_weight_grad_(ctx, p, &p->grad, alone ? p->rows : 2 * p->mlp.I, &p->x_columns, p->args.gate_up_weight_grad,
                       alone ? p->base : 0, MOE_ACCUMULATE_GATE_UP_WEIGHT_GRAD);
}

MOE_FN void moe_mlp_run_phase4_(moe_context *ctx, moe_mlp_ *p) {
  if (p->mlp.S > 0) moe_mx_matrix_run_(ctx, &p->dy_columns, MOE_MX_COLUMNS_);
  if (p->mlp.S > 0) moe_mx_matrix_run_(ctx, &p->hidden_columns, MOE_MX_COLUMNS_);
  moe_mlp_weight_grad_(ctx, p, &p->dy_columns, p->dy_columns.F, &p->hidden_columns, p->args.down_weight_grad,
                       p->dy_columns.first, MOE_ACCUMULATE_DOWN_WEIGHT_GRAD);
}

/* The steps in order, each with the phases that take it. */
static const moe_mlp_step_ moe_mlp_steps_[] = {
    {MOE_MLP_FORWARD_ | MOE_MLP_BACKWARD_, moe_mlp_layout_gate_up_, moe_mlp_run_gate_up_},
    {MOE_MLP_FORWARD_ | MOE_MLP_BACKWARD_, NULL, moe_mlp_run_unit_},
    {MOE_MLP_FORWARD_, moe_mlp_layout_output_, moe_mlp_run_output_},
    {MOE_MLP_PHASE1_, moe_mlp_layout_phase1_, moe_mlp_run_phase1_},
    {MOE_MLP_PHASE2_, moe_mlp_layout_phase2_, moe_mlp_run_phase2_},
    {MOE_MLP_PHASE3_, moe_mlp_layout_phase3_, moe_mlp_run_phase3_},
    {MOE_MLP_PHASE4_, moe_mlp_layout_phase4_, moe_mlp_run_phase4_},
};
enum { MOE_MLP_STEPS_ = sizeof moe_mlp_steps_ / sizeof *moe_mlp_steps_ };

/* A step's operands lie where those of the step before were. */
MOE_FN void moe_mlp_layout_(void *state, moe_arena_ *arena, int64_t workers) {
  moe_mlp_ *p = (moe_mlp_ *)state;
  const int64_t longest = moe_max_(p->mlp.H, moe_mul_(2, p->mlp.I));
  const int grads = (p->wanted & (MOE_MLP_PHASE3_ | MOE_MLP_PHASE4_)) != 0, one = (p->wanted & MOE_MLP_PHASE1_) != 0;
  moe_mxfp8_scratch_(&p->m, arena, workers, p->mlp.S, longest, one ? MOE_MLP_ROOM_ : 0, grads);
  moe_mlp_take_tensors_(p, arena);
  const int64_t before = arena->used;
  int64_t most = before;
  for (int i = 0; i < MOE_MLP_STEPS_; i++) {
    if (!moe_mlp_steps_[i].layout || !(p->wanted & moe_mlp_steps_[i].phases)) continue;
    arena->used = before;
    moe_mlp_steps_[i].layout(p, arena);
    most = most < 0 || arena->used < 0 ? -1 : moe_max_(most, arena->used);
  }
  arena->used = most;
}

MOE_FN moe_status moe_mlp_run_(moe_context *ctx, void *state) {
  moe_mlp_ *p = (moe_mlp_ *)state;
  /* Without tokens there are gradients of weights only. */
  const int none = p->mlp.S == 0, grads = p->wanted & (MOE_MLP_PHASE3_ | MOE_MLP_PHASE4_);
  for (int i = 0; i < MOE_MLP_STEPS_ && (none || p->rows > 0); i++) {
    const int phases = moe_mlp_steps_[i].phases;
    if (none ? (phases & grads) == phases : phases & p->wanted) moe_mlp_steps_[i].run(ctx, p);
  }
  return MOE_OK;
}

/* ----------------------------------------------------------------------------------------------------------- public */

static const moe_op_ moe_mlp_fwd_op_ = {moe_mlp_fwd_check_, moe_mlp_layout_, moe_mlp_run_, NULL, NULL};
static const moe_op_ moe_mlp_bwd_op_ = {moe_mlp_bwd_check_, moe_mlp_layout_, moe_mlp_run_, NULL, NULL};

MOE_OP_WORKSPACE_(moe_mlp_fwd_mxfp8, moe_mlp_fwd_mxfp8_args, moe_mlp_fwd_op_, moe_mlp_, .dtype = MOE_DTYPE_BF16)
#define MOE_DEFINE_MLP_BWD_(function, PHASE)                                                              \
  MOE_OP_WORKSPACE_(function, moe_mlp_bwd_mxfp8_args, moe_mlp_bwd_op_, moe_mlp_, .dtype = MOE_DTYPE_BF16, \
                    .kind = MOE_MLP_##PHASE##_)
MOE_DEFINE_MLP_BWD_(moe_mlp_bwd_mxfp8, BACKWARD)
MOE_DEFINE_MLP_BWD_(moe_mlp_bwd_mxfp8_recompute, RECOMPUTE)
MOE_DEFINE_MLP_BWD_(moe_mlp_bwd_mxfp8_phase1, PHASE1)
MOE_DEFINE_MLP_BWD_(moe_mlp_bwd_mxfp8_phase2, PHASE2)
MOE_DEFINE_MLP_BWD_(moe_mlp_bwd_mxfp8_phase3, PHASE3)
MOE_DEFINE_MLP_BWD_(moe_mlp_bwd_mxfp8_phase4, PHASE4)
#undef MOE_DEFINE_MLP_BWD_

moe_status moe_program_sharding_info(moe_context *ctx, int64_t num_shards, int64_t shard, int64_t rows,
                                     int64_t *row_base, int64_t *row_count) {
  if (num_shards < 1) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "num_shards", "must be at least 1");
  if (rows < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "rows", "is negative");
  if (shard < 0 || shard >= num_shards)
    return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "shard", "is outside [0,num_shards)");
  if (!row_base) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "row_base", "is NULL");
  if (!row_count) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "row_count", "is NULL");
  const int64_t share = rows / num_shards, extra = rows % num_shards;
  *row_base = shard * share + moe_min_(shard, extra);
  *row_count = share + (shard < extra);
  return moe_succeed_(ctx);
}

#endif
