/* Bounds of grouped GEMM. */
#ifndef MOE_NEURON_BOUND_GROUPED_H
#define MOE_NEURON_BOUND_GROUPED_H

typedef struct moe_neuron_grouped_ {
  moe_neuron_bounds_ *bounds;
  const moe_grouped_gemm_args *a;
  const float *x, *dy, *bias;
  moe_neuron_loaded_ w;
  moe_neuron_out_ *y, *dx, *dot, *dw, *bias_grad; /* NULL: not compared */
} moe_neuron_grouped_;

/* A position: expert, slot, how many rows the expert has, weight, rows of X and dY, which may be NULL. */
typedef struct moe_neuron_position_ {
  int64_t e, slot, pos, rows;
  double weight;
  const float *x, *dy;
} moe_neuron_position_;

/* n products a[k]*b[k], b's stride apart: their sum, that of their magnitudes, and of their squares. */
typedef struct moe_neuron_sums_of_ {
  double value, size, square;
} moe_neuron_sums_of_;
MOE_FN moe_neuron_sums_of_ moe_neuron_dot_(const float *a, const float *b, int64_t n, int64_t stride) {
  moe_neuron_sums_of_ sums = {0, 0, 0};
  for (int64_t k = 0; k < n; k++) {
    const double p = (double)a[k] * (double)b[k * stride];
    sums.value += p, sums.size += fabs(p), sums.square += p * p;
  }
  return sums;
}

/* Y = (s + b)*w, where w and s + b may be rounded; or s*w + b, where w*x may be. */
MOE_FN void moe_neuron_grouped_y_(moe_neuron_grouped_ *g, const moe_neuron_position_ *p) {
  const moe_grouped_gemm_args *a = g->a;
  const int post = a->topk_mode == MOE_TOPK_POST;
  const double gamma = moe_neuron_gamma_(g->bounds, a->K) + g->w.error, w = p->weight;
  const double rounds = a->topk_weights ? g->bounds->roundings : 0;
  const float *values = moe_neuron_expert_(&g->w, p->e);
  for (int64_t n = 0; n < a->N; n++) {
    const moe_neuron_sums_of_ s = moe_neuron_dot_(p->x, values + n, a->K, a->N);
    const double b = (g->bias ? (double)g->bias[p->e * a->N + n] : 0) * (post ? w : 1);
    const double size = fabs(w) * s.size + fabs(b);
    const double rounded =
        post ? fabs(s.value * w + b) : moe_neuron_carried_(g->bounds, fabs(w) * s.size, w * w * s.square);
    moe_neuron_add_bound_(g->bounds, g->y, (a->permute_y ? p->slot : p->pos) * a->N + n, size,
                          (gamma + 2 * MOE_NEURON_U_) * size + rounds * rounded);
  }
}

/* dX = (dy*W)*w, of a slot or summed over a token's, where dy*w or dy*W may be rounded; and <dy*W,x> + <dy,b>, or
   <dy,y>. */
MOE_FN void moe_neuron_grouped_dx_(moe_neuron_grouped_ *g, const moe_neuron_position_ *p) {
  const moe_grouped_gemm_args *a = g->a;
  moe_neuron_bounds_ *bounds = g->bounds;
  const double gamma = moe_neuron_gamma_(bounds, a->N) + g->w.error, w = fabs(p->weight);
  const double rounds = a->topk_weights ? bounds->roundings : 0;
  const double sums = a->sum_topk ? (double)a->topk * (bounds->operand + MOE_NEURON_U_) : 0;
  const int64_t row = a->sum_topk ? p->slot / a->topk : a->permute_x ? p->slot : p->pos;
  const float *values = moe_neuron_expert_(&g->w, p->e);
  double dot = 0;
  for (int64_t k = 0; k < a->K; k++) {
    const moe_neuron_sums_of_ d = moe_neuron_dot_(p->dy, values + k * a->N, a->N, 1);
    const double rounded = moe_neuron_carried_(bounds, d.size, d.square) + fabs(d.value);
    if (g->dx)
      moe_neuron_add_bound_(bounds, g->dx, row * a->K + k, w * d.size,
                            w * ((gamma + sums) * d.size + rounds * rounded));
    if (g->dot) dot += d.size * fabs((double)p->x[k]);
  }
  if (!g->dot) return;
  if (g->bias && a->topk_mode == MOE_TOPK_POST) dot += moe_neuron_dot_(p->dy, g->bias + p->e * a->N, a->N, 1).size;
  moe_neuron_add_bound_(bounds, g->dot, p->slot, dot,
                        (gamma + moe_neuron_gamma_(bounds, a->K) + bounds->roundings) * dot);
}

/* dW = dy^T (w*x), sum of dy*w: rows are contracted. */
MOE_FN void moe_neuron_grouped_dw_(moe_neuron_grouped_ *g, const moe_neuron_position_ *p) {
  const moe_grouped_gemm_args *a = g->a;
  const double gamma = moe_neuron_gamma_(g->bounds, p->rows), w = fabs(p->weight);
  const double rounds = a->topk_weights ? g->bounds->roundings : 0;
  const double w_bias = a->topk_mode == MOE_TOPK_POST ? w : 1;
  int64_t stride;
  for (int64_t k = 0; k < a->K && g->dw; k++) {
    const int64_t at = moe_neuron_weight_row_(&g->w.w, p->e, k, 0, &stride);
    for (int64_t n = 0; n < a->N; n++) {
      const double size = w * fabs((double)p->dy[n] * (double)p->x[k]);
      moe_neuron_add_bound_(g->bounds, g->dw, at + n * stride, size, gamma * size);
      if (rounds > 0) moe_neuron_add_independent_(g->bounds, g->dw, at + n * stride, rounds * size);
    }
  }
  for (int64_t n = 0; n < a->N && g->bias_grad; n++) {
    const double size = w_bias * fabs((double)p->dy[n]);
    moe_neuron_add_bound_(g->bounds, g->bias_grad, p->e * a->N + n, size, gamma * size);
    if (rounds > 0) moe_neuron_add_independent_(g->bounds, g->bias_grad, p->e * a->N + n, rounds * size);
  }
}

MOE_FN void moe_neuron_grouped_position_(moe_neuron_grouped_ *g, int64_t e, int64_t pos) {
  const moe_grouped_gemm_args *a = g->a;
  const int64_t slot = a->gather_indices ? a->gather_indices[pos] : pos;
  const moe_neuron_position_ p = {.e = e,
                                  .slot = slot,
                                  .pos = pos,
                                  .rows = a->m_sizes[e],
                                  .weight = a->topk_weights ? (double)a->topk_weights[slot] : 1,
                                  .x = g->x ? g->x + (a->permute_x ? slot / a->topk : pos) * a->K : NULL,
                                  .dy = g->dy ? g->dy + (a->permute_y ? slot : pos) * a->N : NULL};
  if (g->y) moe_neuron_grouped_y_(g, &p);
  if (g->dx || g->dot) moe_neuron_grouped_dx_(g, &p);
  if (g->dw || g->bias_grad) moe_neuron_grouped_dw_(g, &p);
}

MOE_FN moe_status moe_neuron_bound_grouped_(moe_context *ctx, const void *arguments, moe_neuron_bounds_ *bounds) {
  const moe_grouped_gemm_args *a = (const moe_grouped_gemm_args *)arguments;
  const int64_t total = a->num_tokens * a->topk;
  moe_neuron_grouped_ g = {.bounds = bounds,
                           .a = a,
                           .y = moe_neuron_out_of_(bounds, "Y"),
                           .dx = moe_neuron_out_of_(bounds, "dX"),
                           .dot = moe_neuron_out_of_(bounds, "topk_weights_grad"),
                           .dw = moe_neuron_out_of_(bounds, "dW"),
                           .bias_grad = moe_neuron_out_of_(bounds, "bias_grad")};
  const int by_weight = g.y || g.dx || g.dot;
  moe_neuron_weight_ w = moe_neuron_grouped_weight_(a, bounds->dtype);
  if (!by_weight) w.quantized = NULL;
  if (g.y || g.dot || g.dw)
    g.x = moe_neuron_floats_(bounds, bounds->dtype, a->X, (a->permute_x ? a->num_tokens : total) * a->K);
  if (!g.y) g.dy = moe_neuron_floats_(bounds, bounds->dtype, a->dY, total * a->N);
  if (by_weight) g.bias = moe_neuron_floats_(bounds, bounds->dtype, a->bias, a->E * a->N);
  if (bounds->failed) return moe_neuron_no_memory_(ctx);
  MOE_NEURON_TRY_(moe_neuron_loaded_new_(ctx, bounds, w, &g.w));
  for (int64_t e = 0, pos = 0; e < a->E; e++)
    for (const int64_t end = pos + a->m_sizes[e]; pos < end; pos++) moe_neuron_grouped_position_(&g, e, pos);
  return MOE_OK;
}

#endif
