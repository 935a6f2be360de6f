/* Bounds of grouped GEMM. */
#ifndef MOE_NEURON_BOUND_GROUPED_H
#define MOE_NEURON_BOUND_GROUPED_H

/* e[j] += f * |x[j]| */
MOE_FN void moe_neuron_add_magnitudes_(float *e, double f, const float *x, int64_t n) {
  for (int64_t j = 0; j < n; j++) moe_neuron_more_(e + j, f * fabs((double)x[j]));
}

MOE_FN double moe_neuron_magnitude_(const float *x, const float *y, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += fabs((double)x[i] * (double)y[i]);
  return sum;
}

/* One position, of expert e. */
MOE_FN void moe_neuron_grouped_row_(const moe_neuron_bounds_ *bounds, const moe_grouped_gemm_args *a, const float *x,
                                    const float *dy, moe_neuron_weight_ *w, int64_t e, int64_t rows, int64_t pos) {
  const int64_t slot = a->gather_indices ? a->gather_indices[pos] : pos;
  const float *xr = x ? x + (a->permute_x ? slot / a->topk : pos) * a->K : NULL;
  const float *yr = dy ? dy + (a->permute_y ? slot : pos) * a->N : NULL;
  float *const bound = bounds->of[bounds->table->count - 1]; /* of the one output, which comes last */
  const char output = bounds->table->operand[bounds->table->count - 1].name[1];
  float *y = output == 0 ? bound : NULL, *dx = output == 'X' ? bound : NULL, *dw = output == 'W' ? bound : NULL;
  if (y) {
    const float *value = moe_neuron_expert_(w, e);
    const double scale = a->topk_weights ? fabs((double)a->topk_weights[slot]) : 1;
    const double f = (moe_neuron_gamma_(bounds, a->K) + (a->topk_weights ? bounds->operand : 0)) * scale;
    float *to = y + (a->permute_y ? slot : pos) * a->N;
    for (int64_t n = 0; n < a->N; n++) moe_neuron_more_(to + n, f * moe_neuron_magnitude_(xr, value + n * a->K, a->K));
  }
  if (dx) {
    const float *value = moe_neuron_expert_(w, e);
    float *to = dx + (a->permute_x ? slot : pos) * a->K;
    for (int64_t n = 0; n < a->N; n++)
      moe_neuron_add_magnitudes_(to, moe_neuron_gamma_(bounds, a->N) * fabs((double)yr[n]), value + n * a->K, a->K);
  }
  for (int64_t n = 0; n < a->N && dw; n++)
    moe_neuron_add_magnitudes_(dw + (e * a->N + n) * a->K, moe_neuron_gamma_(bounds, rows) * fabs((double)yr[n]), xr,
                               a->K);
}

MOE_FN moe_status moe_neuron_bound_grouped_(moe_context *ctx, const void *arguments, moe_neuron_bounds_ *bounds) {
  const moe_grouped_gemm_args *a = (const moe_grouped_gemm_args *)arguments;
  const int64_t total = a->num_tokens * a->topk;
  const char output = bounds->table->operand[bounds->table->count - 1].name[1];
  const int dw_only = output == 'W', dx = output == 'X';
  int failed = 0;
  moe_neuron_weight_ w = {.plain = a->W, .dtype = bounds->dtype, .K = a->N, .parts = 1, .columns = a->K};
  const float *x =
      dx ? NULL
         : moe_neuron_floats_(bounds, bounds->dtype, a->X, (a->permute_x ? a->num_tokens : total) * a->K, &failed);
  const float *dy = dx || dw_only ? moe_neuron_floats_(bounds, bounds->dtype, a->dY, total * a->N, &failed) : NULL;
  if (failed) return moe_neuron_no_memory_(ctx);
  if (!dw_only && !a->W) return moe_neuron_null_(ctx, "W");
  MOE_NEURON_TRY_(moe_neuron_weight_new_(ctx, bounds, &w, a->E));
  for (int64_t e = 0, pos = 0; e < a->E; e++)
    for (const int64_t end = pos + a->m_sizes[e]; pos < end; pos++)
      moe_neuron_grouped_row_(bounds, a, x, dy, &w, e, a->m_sizes[e], pos);
  return MOE_OK;
}

#endif
