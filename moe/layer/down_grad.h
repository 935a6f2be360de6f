/* Stage: back through the down projection and the gated unit. For every expert and panel of intermediate columns,
   dm = dY*Wd^T, then dg, du, the bias gradients, the panel's part of dA, and a*m, which is x of the down weight's
   gradient. */
#ifndef MOE_LAYER_DOWN_GRAD_H
#define MOE_LAYER_DOWN_GRAD_H

typedef struct moe_down_grad_ {
  const moe_blockwise_ *call;
  moe_group_ group;        /* the experts of this round */
  moe_glu_ glu;            /* limits rounded to the checkpoint's type */
  const char *output_grad; /* dY [T,H], as the product takes it */
  const void *checkpoint;  /* [N,2,I,B] */
  moe_panel_major_ down_x; /* this round's a*m (m without affinity), inner type; no base: not wanted */
  int64_t down_x_rows;     /* rows of a panel that it has room for */
  char *pre;               /* [rows,2,I] inner type: gradients of the pre-activations */
  char *rounded;           /* the same rounded to MX, else NULL */
  char *scaled;            /* the same times the affinity (PRE_SCALE), else NULL */
  int nt;          /* pre and scaled are stored by non-temporal stores; not with rounded, for which pre is read */
  float *dot;      /* [rows, panels]: <dm, m> */
  char *bias_grad; /* [E,2,I], or NULL */
  moe_dtype bias_dtype;
  int accumulate;
} moe_down_grad_;

enum {
  MOE_BIAS_SUM_FLOATS_ = 4 * MOE_NR,        /* per panel: gate, up; the sum, and what it lacks */
  MOE_DOWN_GRAD_ROOM_ = 2 * MOE_NR * MOE_NR /* floats of a square of gate's columns and one of up's */
};

MOE_FN int64_t moe_down_grad_panels_(const moe_blockwise_ *call) { return moe_ceil_div_(call->layer.I, MOE_NR); }

/* Floats of an item's sums and room, at most. */
MOE_FN int64_t moe_down_grad_sums_(const moe_blockwise_ *call) {
  return moe_min_(MOE_NC_PANELS_MAX, moe_down_grad_panels_(call)) * MOE_BIAS_SUM_FLOATS_ + MOE_DOWN_GRAD_ROOM_;
}

/* The stage runs in rounds, each of as many experts as down_x has room for, followed by their weight gradients. It has
   room for a fifth of all, or more if workers would get too little to do; at least for a panel of all rows, which may
   be one expert's. */
enum { MOE_DOWN_X_PARTS_ = 5 };
#ifndef MOE_DOWN_X_MIN_BYTES
#define MOE_DOWN_X_MIN_BYTES (2 << 20) /* bytes per worker */
#endif

MOE_FN int64_t moe_down_grad_x_rows_(const moe_blockwise_ *call, int64_t rows, int64_t workers) {
  const int64_t all = moe_mul_(rows, moe_down_grad_panels_(call));
  const int64_t least = moe_max_(rows, workers * MOE_DOWN_X_MIN_BYTES / (MOE_NR * call->inner_size));
  return all < 0 ? all : moe_min_(all, moe_max_(least, moe_ceil_div_(all, MOE_DOWN_X_PARTS_)));
}

/* Before the first round. */
MOE_FN void moe_down_grad_start_(moe_down_grad_ *stage, char *down_x) {
  const moe_panel_major_ none = {down_x, 0, moe_down_grad_panels_(stage->call)};
  stage->down_x = none;
  stage->group = stage->call->group;
  stage->group.to = 0;
}

/* Whether there is another round. */
MOE_FN int moe_down_grad_more_(const moe_down_grad_ *stage) {
  return stage->group.to < stage->group.E ||
         stage->down_x.panel + stage->down_x.panels < moe_down_grad_panels_(stage->call);
}

/* The next round: as many experts as down_x has room for, or as many panels of one for which it has none. */
MOE_FN void moe_down_grad_next_(moe_down_grad_ *stage) {
  moe_group_ *group = &stage->group;
  moe_panel_major_ *down_x = &stage->down_x;
  const int64_t panels = moe_down_grad_panels_(stage->call), end = down_x->panel + down_x->panels;
  down_x->panel = end < panels ? end : 0;
  group->from = end < panels ? group->from : group->to;
  group->to = group->from + 1;
  const int64_t rows = moe_group_all_rows_(group), fit = rows > 0 ? stage->down_x_rows / rows : panels;
  down_x->panels = moe_min_(panels - down_x->panel, down_x->base ? fit : panels);
  while (down_x->panels == panels && group->to < group->E &&
         (!down_x->base || (group->first[group->to + 1] - group->first[group->from]) * panels <= stage->down_x_rows))
    group->to++;
}

/* Rows of pre or scaled. Without non-temporal stores their places have been prefetched. */
MOE_FN void moe_down_grad_store_rows_(const moe_down_grad_ *stage, char *to, int64_t stride, const moe_glu_rows_ *glu,
                                      const float *x) {
  const moe_blockwise_ *call = stage->call;
  const moe_kernels *kernels = call->group.kernels;
  if (stage->nt) moe_store_rows_nt_(kernels, call->inner_dtype, to, stride, x, glu->rows, glu->n);
  else kernels->vec->store_rows[call->inner_dtype](to, stride, NULL, x, glu->rows, glu->n);
}

/* Gradients of the gate (part 0) or up (1) pre-activations of rows from `row` on: stored, also rounded or scaled, and
   added to the bias gradient. */
MOE_FN void moe_down_grad_store_part_(const moe_down_grad_ *stage, int64_t expert, int64_t row, int64_t part,
                                      int64_t i0, const moe_glu_rows_ *glu, float *grad, float *bias_sum) {
  const moe_blockwise_ *call = stage->call;
  const moe_kernels *kernels = call->group.kernels;
  const int64_t stride = 2 * call->layer.I * call->inner_size;
  const int64_t at = row * stride + (part * call->layer.I + i0) * call->inner_size;
  moe_down_grad_store_rows_(stage, stage->pre + at, stride, glu, grad);
  float *sum = bias_sum + part * 2 * MOE_NR;
  if (stage->bias_grad)
    kernels->vec->add_long(sum, sum + MOE_NR, grad, MOE_NR, NULL, row - call->group.first[expert], glu->rows, glu->n);
  for (int64_t i = 0; i < glu->rows && stage->rounded; i++) {
    float operand[MOE_NR]; /* panels hold whole groups of 32 */
    moe_load_row_(kernels->vec, call->inner_dtype, operand, stage->pre + at + i * stride, glu->n);
    moe_mx_round_row_(kernels, &call->round_gradients, operand, glu->n);
    moe_store_row_(kernels->vec, call->inner_dtype, stage->rounded + at + i * stride, operand, glu->n);
  }
  if (!stage->scaled) return;
  for (int64_t i = 0; i < glu->rows; i++)
    kernels->vec->scale_row(grad + i * MOE_NR, call->plan.affinity[row + i], glu->n);
  moe_down_grad_store_rows_(stage, stage->scaled + at, stride, glu, grad);
}

/* An expert's rows from `row` on, a run of the checkpoint, with dm in glu->dm. */
MOE_FN void moe_down_grad_rows_(const moe_down_grad_ *stage, int64_t expert, int64_t row, int64_t i0,
                                moe_glu_rows_ *glu, float *bias_sum) {
  const moe_blockwise_ *call = stage->call;
  const int64_t size = call->inner_size, stride = call->layer.I * size, panels = moe_down_grad_panels_(call);
  char *down_x =
      stage->down_x.base ? moe_panel_major_at_(&stage->group, &stage->down_x, expert, row, i0 / MOE_NR, size) : NULL;
  if (down_x) moe_prefetch_to_write_(down_x, MOE_NR * size, NULL, glu->rows, glu->n * size);
  if (!stage->nt)
    moe_prefetch_to_write_(stage->pre + 2 * row * stride + i0 * size, stride, NULL, 2 * glu->rows, glu->n * size);
  if (!stage->glu.skip_gate) moe_checkpoint_load_(call, stage->checkpoint, row, glu->rows, 2, 0, i0, glu->n, glu->gate);
  moe_checkpoint_load_(call, stage->checkpoint, row, glu->rows, 2, 1, i0, glu->n, glu->up);
  if (moe_post_scaled_(&call->layer.config)) glu->scale = call->plan.affinity + row;
  call->group.kernels->vec->glu_backward(&stage->glu, glu);
  for (int64_t i = 0; i < glu->rows; i++) stage->dot[(row + i) * panels + i0 / MOE_NR] = glu->dot[i];
  if (down_x)
    call->group.kernels->vec->store_rows[call->inner_dtype](down_x, MOE_NR * size, NULL, glu->m, glu->rows, glu->n);
  if (!stage->glu.skip_gate) moe_down_grad_store_part_(stage, expert, row, 0, i0, glu, glu->dgate, bias_sum);
  moe_down_grad_store_part_(stage, expert, row, 1, i0, glu, glu->dup, bias_sum);
}

/* The products are dm; they are overwritten. */
MOE_FN void moe_down_grad_epilogue_(void *arg, const moe_expert_c_ *p) {
  const moe_down_grad_ *stage = (const moe_down_grad_ *)arg;
  float dot[MOE_NR];
  moe_glu_rows_ glu = {0};
  glu.n = p->n;
  glu.gate = glu.dgate = p->room;
  glu.up = glu.dup = p->room + MOE_NR * MOE_NR;
  glu.dot = dot;
  for (int64_t at = 0; at < p->rows; at += glu.rows) {
    glu.rows = moe_checkpoint_run_(stage->call, p->first + at, p->first + p->rows);
    glu.dm = glu.m = p->c + at * MOE_NR;
    moe_down_grad_rows_(stage, p->expert, p->first + at, p->panel * MOE_NR, &glu, p->sum);
  }
}

MOE_FN void moe_down_grad_reads_(const void *arg, const moe_expert_c_ *p, moe_prefetch_ *prefetch) {
  const moe_down_grad_ *stage = (const moe_down_grad_ *)arg;
  moe_checkpoint_reads_(stage->call, stage->checkpoint, p->first, p->rows, p->panel * MOE_NR, p->n, prefetch);
}

/* Stores a panel's bias gradients. */
MOE_FN void moe_down_grad_store_sums_(void *arg, int64_t expert, int64_t panel, float *sum) {
  const moe_down_grad_ *stage = (const moe_down_grad_ *)arg;
  const int64_t I = stage->call->layer.I, i0 = panel * MOE_NR, size = moe_dtype_bytes_(stage->bias_dtype);
  for (int64_t part = 0; part < 2 && stage->bias_grad; part++)
    moe_store_sum_(stage->call->group.kernels, stage->bias_grad + ((expert * 2 + part) * I + i0) * size,
                   stage->bias_dtype, sum + part * 2 * MOE_NR, moe_min_(MOE_NR, I - i0), stage->accumulate);
}

MOE_FN void moe_down_grad_stage_(moe_down_grad_ *down_grad, moe_expert_stage_ *stage) {
  const moe_blockwise_ *call = down_grad->call;
  memset(stage, 0, sizeof *stage);
  stage->group = &down_grad->group;
  stage->a = (moe_rows_){down_grad->output_grad, call->layer.H * call->size, call->plan.token};
  stage->a_dtype = call->dtype;
  stage->b = moe_weights_down_transposed_;
  stage->weights = call;
  stage->store_panel = moe_down_grad_epilogue_;
  stage->reads = moe_down_grad_reads_;
  stage->panel_sums = MOE_BIAS_SUM_FLOATS_;
  stage->room_floats = MOE_DOWN_GRAD_ROOM_;
  stage->store_sums = moe_down_grad_store_sums_;
  stage->arg = down_grad;
  moe_expert_stage_start_(stage, down_grad->down_x.panels, call->layer.H);
  stage->split.panel = down_grad->down_x.panel;
}

#endif
