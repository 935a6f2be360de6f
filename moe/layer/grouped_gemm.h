/* moe_grouped_gemm_*, _dx_*, _dw_*: products of expert-sorted rows, their permutations read and written in place. */
#ifndef MOE_LAYER_GROUPED_GEMM_H
#define MOE_LAYER_GROUPED_GEMM_H

typedef enum moe_grouped_op_ { /* in the order of moe_tune_op */
                               MOE_GROUPED_FORWARD,
                               MOE_GROUPED_DX,
                               MOE_GROUPED_DW
} moe_grouped_op_;

typedef struct moe_grouped_ {
  moe_group_ group;
  const moe_grouped_gemm_args *args;
  moe_grouped_op_ op;
  moe_dtype dtype, weight_grad_dtype;
  moe_packed_ weight;        /* as the operation contracts it */
  int sums;                  /* over topk */
  int64_t total, size, rows; /* rows: positions that are no padding */
  int64_t *first;            /* [E+1] */
  int32_t *token;            /* [total]: gather[pos]/topk, with permute_x */
  int32_t *position;         /* [total]: of each slot, or -1 */
  float *factor;             /* [total]: topk weights by position; or NULL */
  float *dot;                /* [total,panels+1]: parts of topk_weights_grad, of panels and of the bias; or NULL */
  float *products;           /* [total,K] by slot, with sums */
} moe_grouped_;

/* ------------------------------------------------------------------------------------------------------ validation */

/* Lists the tensors; those of other operations are taken for absent. */
MOE_FN void moe_grouped_list_(const moe_grouped_ *g, moe_tensors_ *tensors) {
  const moe_grouped_gemm_args *args = g->args;
  const int64_t size = g->size, grad = moe_dtype_bytes_(g->weight_grad_dtype), total = g->total;
  const int forward = g->op == MOE_GROUPED_FORWARD, dx = g->op == MOE_GROUPED_DX, dw = g->op == MOE_GROUPED_DW;
  const int dots = dx && args->topk_weights_grad, permuted = args->permute_x || args->permute_y;
  const int stored = dw || args->packed_W || args->quantized_W; /* W is not read */
  const moe_role_ optional = MOE_INPUT_OPTIONAL, result = MOE_OUTPUT_OPTIONAL;
  const int64_t x_bytes = moe_mul3_(args->permute_x ? args->num_tokens : total, args->K, size),
                weight = moe_mul3_(args->E, args->N, args->K);
  const moe_tensor_ own[] = {
      {"m_sizes", args->m_sizes, moe_mul_(args->E, 4), 4, MOE_INPUT},
      {"gather_indices", args->gather_indices, moe_mul_(total, 4), 4, permuted ? MOE_INPUT : optional},
      {"X", dx && !dots ? NULL : args->X, x_bytes, size, dx && !dots ? optional : MOE_INPUT},
      {"W", stored ? NULL : args->W, moe_mul_(weight, size), size, stored ? optional : MOE_INPUT},
      {"packed_W", dw ? NULL : args->packed_W, moe_packed_bytes_(&g->weight), MOE_ALIGN_, optional},
      {"bias", forward || dots ? args->bias : NULL, moe_mul3_(args->E, args->N, size), size, optional},
      {"dY", forward ? NULL : args->dY, moe_mul3_(total, args->N, size), size, forward ? optional : MOE_INPUT},
      {"topk_weights", args->topk_weights, moe_mul_(total, 4), 4, optional},
      {"Y", forward ? args->Y : NULL, moe_mul3_(total, args->N, size), size, forward ? MOE_OUTPUT : result},
      {"dX", dx ? args->dX : NULL, moe_mul3_(args->sum_topk ? args->num_tokens : total, args->K, size), size,
       dx ? MOE_OUTPUT : result},
      {"topk_weights_grad", dots ? args->topk_weights_grad : NULL, moe_mul_(total, 4), 4, result},
      {"dW", dw ? args->dW : NULL, moe_mul_(weight, grad), grad, dw ? MOE_OUTPUT : result},
      {"bias_grad", dw ? args->bias_grad : NULL, moe_mul3_(args->E, args->N, grad), grad, result},
  };
  MOE_LIST_(tensors, own);
  MOE_QUANTIZED_LIST_(&g->weight.quantized, "quantized_W", tensors);
}

MOE_FN moe_status moe_grouped_check_options_(moe_context *ctx, const moe_grouped_gemm_args *args) {
  enum {
    outputs = MOE_ACCUMULATE_Y | MOE_ACCUMULATE_DX | MOE_ACCUMULATE_DW | MOE_ACCUMULATE_BIAS_GRAD |
              MOE_ACCUMULATE_TOPK_WEIGHTS_GRAD
  };
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_count_or_none_(ctx, "num_tokens", args->num_tokens));
  MOE_TRY(moe_check_count_(ctx, "topk", args->topk));
  MOE_TRY(moe_check_count_(ctx, "E", args->E));
  MOE_TRY(moe_check_positive_(ctx, "N", args->N));
  MOE_TRY(moe_check_positive_(ctx, "K", args->K));
  if (moe_mul_(args->num_tokens, args->topk) >= INT32_MAX)
    return moe_fail_(ctx, MOE_ERROR_OVERFLOW, "num_tokens", "times topk does not fit in 32-bit positions");
  MOE_TRY(moe_check_flag_(ctx, "permute_x", args->permute_x));
  MOE_TRY(moe_check_flag_(ctx, "permute_y", args->permute_y));
  MOE_TRY(moe_check_flag_(ctx, "sum_topk", args->sum_topk));
  MOE_TRY(moe_check_enum_(ctx, "weight_order", (int)args->weight_order, MOE_GROUPED_ORDER_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "topk_mode", (int)args->topk_mode, MOE_TOPK_COUNT_));
  MOE_TRY(moe_check_accumulate_(ctx, args->accumulate, outputs));
  MOE_TRY(moe_check_enum_(ctx, "weight_grad_dtype", (int)args->weight_grad_dtype, MOE_DTYPE_COUNT_));
  if (args->permute_x && args->permute_y)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "permute_x", "and permute_y exclude each other");
  if (args->sum_topk && !args->permute_x)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "sum_topk", "needs permute_x");
  return MOE_OK;
}

MOE_FN moe_status moe_grouped_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_grouped_ *g = (moe_grouped_ *)state;
  const moe_grouped_gemm_args *args = g->args = (const moe_grouped_gemm_args *)call->args;
  MOE_TRY(moe_grouped_check_options_(ctx, args));
  const int by_rows = args->weight_order == MOE_GROUPED_EKN;
  g->op = (moe_grouped_op_)call->kind;
  const moe_quantized_weight *quantized = g->op == MOE_GROUPED_DW ? NULL : args->quantized_W;
  MOE_TRY(moe_quantized_check_(ctx, quantized, 1, args->K));
  moe_group_init_(&g->group, call->dtype, args->E);
  g->dtype = call->dtype;
  g->weight_grad_dtype = moe_or_(args->weight_grad_dtype, call->dtype);
  moe_packed_init_(&g->weight, by_rows ? MOE_PACK_DOWN : MOE_PACK_GROUPED, g->op == MOE_GROUPED_DX, g->group.panel,
                   call->dtype, args->E, by_rows ? args->K : args->N, by_rows ? args->N : args->K, quantized);
  g->sums = g->op == MOE_GROUPED_DX && args->sum_topk && args->topk > 1;
  g->total = args->num_tokens * args->topk;
  g->size = moe_dtype_bytes_(call->dtype);
  moe_grouped_list_(g, tensors);
  return MOE_OK;
}

MOE_FN moe_status moe_grouped_check_contents_(moe_context *ctx, const void *state) {
  const moe_grouped_ *g = (const moe_grouped_ *)state;
  const moe_grouped_gemm_args *args = g->args;
  if (g->op != MOE_GROUPED_DW)
    MOE_TRY(moe_packed_check_(ctx, &g->weight, "packed_W", args->packed_W, args->packed_W_bytes));
  MOE_TRY(MOE_QUANTIZED_CHECK_SCALES_(ctx, &g->weight.quantized, "quantized_W"));
  int64_t rows = 0;
  for (int64_t e = 0; e < args->E; e++) {
    if (args->m_sizes[e] < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "m_sizes", "has a negative count");
    rows += args->m_sizes[e];
  }
  if (rows > g->total) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "m_sizes", "add up to more than num_tokens*topk");
  for (int64_t i = 0; i < g->total && args->gather_indices; i++)
    if (args->gather_indices[i] < (i < rows ? 0 : -1) || args->gather_indices[i] >= g->total)
      return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "gather_indices",
                       "has a slot outside [0,num_tokens*topk) that is not padding's -1");
  return MOE_OK;
}

/* ----------------------------------------------------------------------------------------------------------- stages */

MOE_FN int moe_grouped_adds_(const moe_grouped_ *g, uint32_t bit) { return (g->args->accumulate & bit) != 0; }

/* The slot of a position; and whether one is padding. */
MOE_FN int64_t moe_grouped_slot_(const moe_grouped_ *g, int64_t pos) {
  return g->args->gather_indices ? g->args->gather_indices[pos] : pos;
}
MOE_FN int moe_grouped_is_padding_(const moe_grouped_ *g, int64_t pos) { return pos < 0 || pos >= g->rows; }

/* The rows of X and of dY for sorted positions. */
MOE_FN moe_rows_ moe_grouped_x_(const moe_grouped_ *g) {
  const moe_rows_ rows = {(const char *)g->args->X, g->args->K * g->size, g->args->permute_x ? g->token : NULL};
  return rows;
}
MOE_FN moe_rows_ moe_grouped_dy_(const moe_grouped_ *g) {
  const moe_rows_ rows = {(const char *)g->args->dY, g->args->N * g->size,
                          g->args->permute_y ? g->args->gather_indices : NULL};
  return rows;
}

/* B: W[e]^T for the forward, W[e] for dx. */
MOE_FN void moe_grouped_b_(const void *arg, int64_t expert, moe_b_ *b) {
  const moe_grouped_ *g = (const moe_grouped_ *)arg;
  moe_weight_b_(&g->weight, g->args->W, g->args->packed_W, expert, b);
}

MOE_FN int64_t moe_grouped_columns_(const moe_grouped_ *g) {
  return g->op == MOE_GROUPED_FORWARD ? g->args->N : g->args->K;
}
MOE_FN int64_t moe_grouped_panels_(const moe_grouped_ *g) { return moe_ceil_div_(moe_grouped_columns_(g), MOE_NR); }

/* Whether the result's rows are stored by gather_indices instead of as sorted; whether they are added to. */
MOE_FN int moe_grouped_scatters_(const moe_grouped_ *g) {
  return g->op == MOE_GROUPED_FORWARD ? g->args->permute_y : g->args->permute_x;
}
MOE_FN int moe_grouped_accumulates_(const moe_grouped_ *g) {
  return !g->sums && moe_grouped_adds_(g, g->op == MOE_GROUPED_FORWARD ? MOE_ACCUMULATE_Y : MOE_ACCUMULATE_DX);
}

/* Where the result's first row is, or that of the products that will be summed. */
MOE_FN moe_place_ moe_grouped_to_(const moe_grouped_ *g) {
  moe_place_ to = {(char *)g->args->Y, g->args->N * g->size, g->dtype, 0, NULL, 0, 0};
  if (g->op == MOE_GROUPED_DX) to.base = (char *)g->args->dX, to.stride = g->args->K * g->size;
  if (g->sums) to.base = (char *)g->products, to.stride = g->args->K * 4, to.dtype = MOE_DTYPE_F32;
  return to;
}

/* The parts of topk_weights_grad that a panel of dY*W[e] gives; the first one finds that of the bias. */
MOE_FN void moe_grouped_dots_(const moe_grouped_ *g, const moe_expert_c_ *p) {
  const moe_grouped_gemm_args *args = g->args;
  const moe_kernels *kernels = g->group.kernels;
  const moe_rows_ x = moe_grouped_x_(g), dy = moe_grouped_dy_(g);
  const int64_t panels = moe_grouped_panels_(g), at = p->panel * MOE_NR * g->size;
  const char *bias = (const char *)args->bias + (args->bias ? p->expert * args->N * g->size : 0);
  float row[MOE_NR];
  for (int64_t i = 0; i < p->rows; i++) {
    float *dot = g->dot + (p->first + i) * (panels + 1);
    moe_load_row_(kernels->vec, g->dtype, row, moe_row_(&x, p->first + i) + at, p->n);
    dot[p->panel] = kernels->vec->dot(p->c + i * MOE_NR, row, p->n);
    if (p->panel > 0) continue;
    dot[panels] = 0.0f;
    if (args->bias && args->topk_mode == MOE_TOPK_POST)
      dot[panels] = moe_dot_rows_(kernels, g->dtype, moe_row_(&dy, p->first + i), g->dtype, bias, args->N);
  }
}

MOE_FN void moe_grouped_reads_(const void *arg, const moe_expert_c_ *p, moe_prefetch_ *prefetch) {
  const moe_grouped_ *g = (const moe_grouped_ *)arg;
  const moe_rows_ x = moe_grouped_x_(g), rows = moe_rows_from_(&x, p->first);
  moe_prefetch_rows_(prefetch, rows.base + p->panel * MOE_NR * g->size, NULL, rows.index, rows.stride, p->rows,
                     p->n * g->size);
}

/* Scales of the weight, bias and topk weights, of the forward. */
MOE_FN void moe_grouped_finish_(const moe_grouped_ *g, const moe_expert_c_ *p) {
  const moe_grouped_gemm_args *args = g->args;
  const moe_vec_table_ *vec = g->group.kernels->vec;
  const int64_t at = p->panel * MOE_NR;
  const float *pre = args->topk_mode == MOE_TOPK_PRE && g->factor ? g->factor + p->first : NULL,
              *post = args->topk_mode == MOE_TOPK_POST && g->factor ? g->factor + p->first : NULL;
  float bias[MOE_NR];
  if (args->bias)
    moe_load_row_(vec, g->dtype, bias, (const char *)args->bias + (p->expert * args->N + at) * g->size, p->n);
  for (int64_t i = 0; i < p->rows; i++) {
    float *c = p->c + i * MOE_NR;
    moe_quantized_scale_sums_(&g->weight.quantized, g->group.kernels, p->expert, 0, at, p->n, c);
    if (pre) vec->scale_row(c, pre[i], p->n);
    if (args->bias) vec->add_scaled(c, bias, 1.0f, p->n);
    if (post) vec->scale_row(c, post[i], p->n);
  }
}

MOE_FN void moe_grouped_epilogue_(void *arg, const moe_expert_c_ *p) {
  const moe_grouped_ *g = (const moe_grouped_ *)arg;
  const moe_kernels *kernels = g->group.kernels;
  const int32_t *index = moe_grouped_scatters_(g) ? g->args->gather_indices + p->first : NULL;
  moe_place_ to = moe_grouped_to_(g);
  moe_place_move_(&to, index ? 0 : p->first, p->panel * MOE_NR);
  if (g->op == MOE_GROUPED_FORWARD) moe_grouped_finish_(g, p);
  if (g->dot) moe_grouped_dots_(g, p);
  for (int64_t i = 0; i < p->rows && g->op == MOE_GROUPED_DX && g->factor; i++)
    kernels->vec->scale_row(p->c + i * MOE_NR, g->factor[p->first + i], p->n);
  if (moe_grouped_accumulates_(g)) moe_add_stored_(kernels, p->c, to.base, to.stride, index, to.dtype, p->rows, p->n);
  moe_store_rows_prefetched_(kernels, to.dtype, to.base, to.stride, index, p->c, p->rows, p->n);
}

MOE_FN void moe_grouped_stage_(moe_grouped_ *g, moe_expert_stage_ *stage) {
  const int forward = g->op == MOE_GROUPED_FORWARD;
  const int changes =
      g->factor || (forward ? g->args->bias || moe_weight_scaled_after_(g->weight.quantized.weight) : g->dot != NULL);
  memset(stage, 0, sizeof *stage);
  stage->group = &g->group;
  stage->a = forward ? moe_grouped_x_(g) : moe_grouped_dy_(g);
  stage->a_dtype = g->dtype;
  stage->b = moe_grouped_b_;
  stage->weights = g;
  stage->store_panel = moe_grouped_epilogue_;
  if (g->dot) stage->reads = moe_grouped_reads_;
  stage->arg = g;
  if (!moe_grouped_scatters_(g) && !moe_grouped_accumulates_(g) && !changes) stage->to = moe_grouped_to_(g);
  moe_expert_stage_start_(stage, moe_grouped_panels_(g), g->weight.depth);
}

enum { MOE_GROUPED_ROWS_ = 16 }; /* of a work item of the next ones */

/* Work item: zeroes rows of padding. */
MOE_FN void moe_grouped_zero_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_grouped_ *g = (const moe_grouped_ *)arg;
  const moe_place_ to = moe_grouped_to_(g);
  (void)worker;
  for (int64_t r = item * MOE_GROUPED_ROWS_; r < moe_min_(g->total, (item + 1) * MOE_GROUPED_ROWS_); r++)
    if (moe_grouped_is_padding_(g, moe_grouped_scatters_(g) ? g->position[r] : r))
      memset(to.base + r * to.stride, 0, (size_t)to.stride);
}

/* Work item: sums over tokens' slots. */
MOE_FN void moe_grouped_sum_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_grouped_ *g = (const moe_grouped_ *)arg;
  const int64_t K = g->args->K, topk = g->args->topk, end = (item + 1) * MOE_GROUPED_ROWS_;
  const int adds = moe_grouped_adds_(g, MOE_ACCUMULATE_DX);
  (void)worker;
  for (int64_t t = item * MOE_GROUPED_ROWS_; t < moe_min_(g->args->num_tokens, end); t++)
    for (int64_t at = 0; at < K; at += MOE_NR) {
      const int64_t n = moe_min_(MOE_NR, K - at);
      float sum[MOE_NR] = {0};
      int any = 0;
      for (int64_t slot = t * topk; slot < (t + 1) * topk; slot++) {
        if (moe_grouped_is_padding_(g, g->position[slot])) continue;
        g->group.kernels->vec->add_scaled(sum, g->products + slot * K + at, 1.0f, n);
        any = 1;
      }
      if (any || !adds)
        moe_store_sum_(g->group.kernels, (char *)g->args->dX + (t * K + at) * g->size, g->dtype, sum, n, adds);
    }
}

/* Work item: topk_weights_grad of some slots. */
MOE_FN void moe_grouped_topk_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_grouped_ *g = (const moe_grouped_ *)arg;
  const int64_t parts = moe_grouped_panels_(g) + 1, end = moe_min_(g->total, (item + 1) * MOE_GROUPED_ROWS_);
  const int adds = moe_grouped_adds_(g, MOE_ACCUMULATE_TOPK_WEIGHTS_GRAD);
  (void)worker;
  for (int64_t slot = item * MOE_GROUPED_ROWS_; slot < end; slot++) {
    const int64_t pos = g->position[slot];
    const int padding = moe_grouped_is_padding_(g, pos);
    float sum = 0.0f;
    for (int64_t i = 0; i < parts && !padding; i++) sum = sum + g->dot[pos * parts + i];
    if (!padding || !adds)
      moe_store_sum_(g->group.kernels, (char *)(g->args->topk_weights_grad + slot), MOE_DTYPE_F32, &sum, 1, adds);
  }
}

/* Work item: 64 columns of an expert's bias gradient. */
MOE_FN void moe_grouped_bias_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_grouped_ *g = (const moe_grouped_ *)arg;
  const moe_vec_table_ *vec = g->group.kernels->vec;
  const int64_t N = g->args->N, panels = moe_ceil_div_(N, MOE_NR), expert = item / panels, at = item % panels * MOE_NR;
  const int64_t n = moe_min_(MOE_NR, N - at), end = g->first[expert + 1];
  const float *factor = g->args->topk_mode == MOE_TOPK_POST ? g->factor : NULL;
  float sum[MOE_NR] = {0}, low[MOE_NR] = {0}, x[MOE_GROUPED_ROWS_ * MOE_NR];
  moe_rows_ dy = moe_grouped_dy_(g);
  (void)worker;
  dy.base += at * g->size;
  for (int64_t pos = g->first[expert], rows; pos < end; pos += rows) {
    const moe_rows_ some = moe_rows_from_(&dy, pos);
    rows = moe_min_(MOE_GROUPED_ROWS_, end - pos);
    vec->load_rows[g->dtype](x, MOE_NR, &some, rows, n);
    vec->add_long(sum, low, x, MOE_NR, factor ? factor + pos : NULL, pos - g->first[expert], rows, n);
  }
  moe_store_sum_(g->group.kernels,
                 (char *)g->args->bias_grad + (expert * N + at) * moe_dtype_bytes_(g->weight_grad_dtype),
                 g->weight_grad_dtype, sum, n, moe_grouped_adds_(g, MOE_ACCUMULATE_BIAS_GRAD));
}

/* Rows of X times their topk weights. */
MOE_FN void moe_grouped_load_x_(const void *source, int64_t row, int64_t rows, int64_t column, int64_t n, float *x) {
  const moe_grouped_ *g = (const moe_grouped_ *)source;
  const moe_vec_table_ *vec = g->group.kernels->vec;
  const moe_rows_ all = moe_grouped_x_(g);
  moe_rows_ some = moe_rows_from_(&all, row);
  some.base += column * g->size;
  vec->load_rows[g->dtype](x, MOE_NR, &some, rows, n);
  for (int64_t i = 0; i < rows; i++) vec->scale_row(x + i * MOE_NR, g->factor[row + i], n);
}

MOE_FN void moe_grouped_dw_(const moe_grouped_ *g, moe_weight_grad_ *stage) {
  const int by_rows = g->args->weight_order == MOE_GROUPED_EKN;
  moe_grad_operand_ *dy = by_rows ? &stage->y : &stage->x, *x = by_rows ? &stage->x : &stage->y;
  memset(stage, 0, sizeof *stage);
  stage->group = &g->group;
  dy->rows = moe_grouped_dy_(g);
  x->rows = moe_grouped_x_(g);
  if (g->factor) x->load = moe_grouped_load_x_;
  x->source = g;
  stage->x.dtype = stage->y.dtype = g->dtype;
  stage->m = stage->m_to = by_rows ? g->args->K : g->args->N;
  stage->n = by_rows ? g->args->N : g->args->K;
  stage->output = (char *)g->args->dW;
  stage->dtype = g->weight_grad_dtype;
  stage->accumulate = moe_grouped_adds_(g, MOE_ACCUMULATE_DW);
}

/* What the context's table knows such a call by. */
MOE_FN void moe_grouped_tune_key_(const moe_grouped_gemm_args *args, moe_grouped_op_ op, moe_dtype dtype,
                                  moe_tune_entry *key) {
  memset(key, 0, sizeof *key);
  key->op = (moe_tune_op)op;
  key->dtype = dtype;
  key->flags = (args->permute_x ? MOE_TUNE_PERMUTE_X : 0) | (args->permute_y ? MOE_TUNE_PERMUTE_Y : 0) |
               (args->weight_order == MOE_GROUPED_EKN ? MOE_TUNE_EKN : 0);
  if (op != MOE_GROUPED_DW && args->packed_W) key->flags |= MOE_TUNE_PACKED;
  if (op != MOE_GROUPED_DW && args->quantized_W)
    key->flags |= MOE_TUNE_QUANTIZED |
                  256 * ((int64_t)args->quantized_W->element +
                         256 * ((int64_t)args->quantized_W->scaling + 256 * (int64_t)args->quantized_W->layout));
  key->E = args->E;
  key->N = args->N;
  key->K = args->K;
}

/* ----------------------------------------------------------------------------------------------------------- public */

MOE_FN void moe_grouped_layout_(void *state, moe_arena_ *arena, int64_t workers) {
  moe_grouped_ *g = (moe_grouped_ *)state;
  const moe_grouped_gemm_args *args = g->args;
  const int dw = g->op == MOE_GROUPED_DW, dx = g->op == MOE_GROUPED_DX;
  const int64_t longest = moe_max_(args->N, args->K), slots = g->total * 4;
  g->first = (int64_t *)moe_take_(arena, (args->E + 1) * 8);
  g->token = (int32_t *)moe_take_(arena, slots);
  g->position = (int32_t *)moe_take_(arena, slots);
  g->factor = (float *)moe_take_(arena, slots);
  g->dot = (float *)moe_take_(arena, dx && args->topk_weights_grad ? moe_mul_(moe_grouped_panels_(g) + 1, slots) : 0);
  g->products = (float *)moe_take_(arena, dx && g->sums ? moe_mul_(args->K, slots) : 0);
  g->group.first = g->first;
  const moe_scratch_needs_ needs = {g->total, longest, dw ? MOE_NC_PANELS : MOE_NC_PANELS_WIDE,
                                    0,        0,       dw ? moe_weight_grad_bytes_(&g->group, g->total, longest) : 0};
  moe_scratch_layout_all_(&g->group, arena, workers, &needs);
}

/* What is known by position and by slot. */
MOE_FN moe_status moe_grouped_sort_(moe_context *ctx, moe_grouped_ *g) {
  const moe_grouped_gemm_args *args = g->args;
  g->first[0] = 0;
  for (int64_t e = 0; e < args->E; e++) g->first[e + 1] = g->first[e] + args->m_sizes[e];
  g->rows = g->first[args->E];
  for (int64_t i = 0; i < g->total; i++) g->position[i] = -1;
  for (int64_t pos = 0; pos < g->total; pos++) {
    const int64_t slot = moe_grouped_slot_(g, pos);
    g->token[pos] = (int32_t)(slot / args->topk);
    if (slot < 0) continue;
    if (g->position[slot] >= 0) return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "gather_indices", "names a slot twice");
    g->position[slot] = (int32_t)pos;
    if (args->topk_weights) g->factor[pos] = args->topk_weights[slot];
  }
  if (!args->topk_weights) g->factor = NULL;
  if (g->op != MOE_GROUPED_DX || !args->topk_weights_grad) g->dot = NULL;
  return MOE_OK;
}

MOE_FN moe_status moe_grouped_run_(moe_context *ctx, void *state) {
  moe_grouped_ *g = (moe_grouped_ *)state;
  const int64_t chunks = moe_ceil_div_(g->total, MOE_GROUPED_ROWS_);
  moe_tune_entry key;
  MOE_TRY(moe_grouped_sort_(ctx, g));
  moe_grouped_tune_key_(g->args, g->op, g->dtype, &key);
  moe_group_tune_(&g->group, ctx, &key);
  g->group.in_shares = moe_in_shares_(ctx);
  if (g->op == MOE_GROUPED_DW) {
    moe_weight_grad_ stage;
    moe_grouped_dw_(g, &stage);
    const int64_t biases = g->args->bias_grad ? g->args->E * moe_ceil_div_(g->args->N, MOE_NR) : 0;
    const moe_work_ work[] = {moe_weight_grad_work_(&stage), {biases, moe_grouped_bias_item_, g, NULL}};
    moe_run_(ctx, work, 2);
    return MOE_OK;
  }
  moe_expert_stage_ stage;
  moe_grouped_stage_(g, &stage);
  const int zeroes = g->rows < g->total && !g->sums && !moe_grouped_accumulates_(g);
  const moe_work_ work[] = {moe_expert_stage_work_(&stage), {zeroes ? chunks : 0, moe_grouped_zero_item_, g, NULL}};
  const moe_work_ then[] = {
      {g->sums ? moe_ceil_div_(g->args->num_tokens, MOE_GROUPED_ROWS_) : 0, moe_grouped_sum_item_, g, NULL},
      {g->dot ? chunks : 0, moe_grouped_topk_item_, g, NULL}};
  moe_run_(ctx, work, 2);
  moe_run_(ctx, then, 2);
  return MOE_OK;
}

static const moe_op_ moe_grouped_gemm_op_ = {moe_grouped_check_, moe_grouped_layout_, moe_grouped_run_,
                                             moe_grouped_check_contents_, NULL};

/* op: "" (forward), _dx or _dw */
#define MOE_DEFINE_GROUPED_OP_(op, OP, name, NAME)                                                            \
  MOE_OP_WORKSPACE_(moe_grouped_gemm##op##_##name, moe_grouped_gemm_args, moe_grouped_gemm_op_, moe_grouped_, \
                    .dtype = MOE_DTYPE_##NAME, .kind = MOE_GROUPED_##OP)
#define MOE_DEFINE_GROUPED_(name, type, NAME)   \
  MOE_DEFINE_GROUPED_OP_(, FORWARD, name, NAME) \
  MOE_DEFINE_GROUPED_OP_(_dx, DX, name, NAME)   \
  MOE_DEFINE_GROUPED_OP_(_dw, DW, name, NAME)
MOE_DTYPE_LIST(MOE_DEFINE_GROUPED_)
#undef MOE_DEFINE_GROUPED_
#undef MOE_DEFINE_GROUPED_OP_

#endif
