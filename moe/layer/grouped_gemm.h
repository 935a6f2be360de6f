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
  moe_packed_ weight; /* of the forward */
  int64_t total, size;
  int64_t *first; /* [E+1] */
  int32_t *token; /* [total]: gather[pos]/topk, with permute_x */
} moe_grouped_;

/* ------------------------------------------------------------------------------------------------------ validation */

/* Lists the tensors; those of other operations are taken for absent. */
MOE_FN void moe_grouped_list_(const moe_grouped_ *g, moe_tensors_ *tensors) {
  const moe_grouped_gemm_args *args = g->args;
  const int64_t size = g->size, grad = moe_dtype_bytes_(g->weight_grad_dtype);
  const int64_t x_rows = args->permute_x ? args->num_tokens : g->total;
  const moe_role_ gather = args->permute_x || args->permute_y ? MOE_INPUT : MOE_INPUT_OPTIONAL;
  const int forward = g->op == MOE_GROUPED_FORWARD, dx = g->op == MOE_GROUPED_DX, dw = g->op == MOE_GROUPED_DW;
  const int64_t weight_bytes = moe_mul4_(args->E, args->N, args->K, size);
  const moe_tensor_ own[] = {
      {"m_sizes", args->m_sizes, moe_mul_(args->E, 4), 4, MOE_INPUT},
      {"gather_indices", args->gather_indices, moe_mul_(g->total, 4), 4, gather},
      {"X", dx ? NULL : args->X, moe_mul3_(x_rows, args->K, size), size, dx ? MOE_INPUT_OPTIONAL : MOE_INPUT},
      {"W", dw ? NULL : args->W, weight_bytes, size,
       dw || (forward && args->packed_W) ? MOE_INPUT_OPTIONAL : MOE_INPUT},
      {"packed_W", forward ? args->packed_W : NULL, moe_packed_bytes_(&g->weight), MOE_ALIGN_, MOE_INPUT_OPTIONAL},
      {"dY", forward ? NULL : args->dY, moe_mul3_(g->total, args->N, size), size,
       forward ? MOE_INPUT_OPTIONAL : MOE_INPUT},
      {"topk_weights", forward ? args->topk_weights : NULL, moe_mul_(g->total, 4), 4, MOE_INPUT_OPTIONAL},
      {"Y", forward ? args->Y : NULL, moe_mul3_(g->total, args->N, size), size,
       forward ? MOE_OUTPUT : MOE_OUTPUT_OPTIONAL},
      {"dX", dx ? args->dX : NULL, moe_mul3_(g->total, args->K, size), size, dx ? MOE_OUTPUT : MOE_OUTPUT_OPTIONAL},
      {"dW", dw ? args->dW : NULL, moe_mul4_(args->E, args->N, args->K, grad), grad,
       dw ? MOE_OUTPUT : MOE_OUTPUT_OPTIONAL},
  };
  MOE_LIST_(tensors, own);
}

MOE_FN moe_status moe_grouped_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_grouped_ *g = (moe_grouped_ *)state;
  const moe_grouped_gemm_args *args = g->args = (const moe_grouped_gemm_args *)call->args;
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_count_(ctx, "num_tokens", args->num_tokens));
  MOE_TRY(moe_check_count_(ctx, "topk", args->topk));
  MOE_TRY(moe_check_count_(ctx, "E", args->E));
  MOE_TRY(moe_check_positive_(ctx, "N", args->N));
  MOE_TRY(moe_check_positive_(ctx, "K", args->K));
  if (moe_mul_(args->num_tokens, args->topk) >= INT32_MAX)
    return moe_fail_(ctx, MOE_ERROR_OVERFLOW, "num_tokens", "times topk does not fit in 32-bit positions");
  MOE_TRY(moe_check_flag_(ctx, "permute_x", args->permute_x));
  MOE_TRY(moe_check_flag_(ctx, "permute_y", args->permute_y));
  MOE_TRY(moe_check_accumulate_(ctx, args->accumulate, MOE_ACCUMULATE_DW));
  MOE_TRY(moe_check_enum_(ctx, "weight_grad_dtype", (int)args->weight_grad_dtype, MOE_DTYPE_COUNT_));
  if (args->permute_x && args->permute_y)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "permute_x", "and permute_y exclude each other");
  if (args->topk_weights && !args->permute_y)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "topk_weights", "needs permute_y");
  moe_group_init_(&g->group, call->dtype, args->E);
  g->op = (moe_grouped_op_)call->kind;
  g->dtype = call->dtype;
  g->weight_grad_dtype = moe_or_(args->weight_grad_dtype, call->dtype);
  moe_packed_init_(&g->weight, MOE_PACK_GROUPED, g->group.panel, call->dtype, args->E, args->N, args->K, NULL);
  g->total = args->num_tokens * args->topk;
  g->size = moe_dtype_bytes_(call->dtype);
  moe_grouped_list_(g, tensors);
  return MOE_OK;
}

MOE_FN moe_status moe_grouped_check_contents_(moe_context *ctx, const void *state) {
  const moe_grouped_ *g = (const moe_grouped_ *)state;
  const moe_grouped_gemm_args *args = g->args;
  if (g->op == MOE_GROUPED_FORWARD)
    MOE_TRY(moe_packed_check_(ctx, &g->weight, "packed_W", args->packed_W, args->packed_W_bytes));
  int64_t rows = 0;
  for (int64_t e = 0; e < args->E; e++) {
    if (args->m_sizes[e] < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "m_sizes", "has a negative count");
    rows += args->m_sizes[e];
  }
  if (rows > g->total) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "m_sizes", "add up to more than num_tokens*topk");
  for (int64_t i = 0; i < g->total && args->gather_indices; i++)
    if (args->gather_indices[i] < 0 || args->gather_indices[i] >= g->total)
      return moe_fail_(ctx, MOE_ERROR_INVALID_INDEX, "gather_indices", "has a slot outside [0,num_tokens*topk)");
  return MOE_OK;
}

/* ----------------------------------------------------------------------------------------------------------- stages */

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
  const moe_grouped_gemm_args *args = g->args;
  if (g->op == MOE_GROUPED_FORWARD) {
    moe_weight_b_(&g->weight, args->W, args->packed_W, expert, b);
    return;
  }
  moe_packed_ rows;
  moe_packed_init_(&rows, MOE_PACK_DOWN, g->group.panel, g->dtype, args->E, args->N, args->K, NULL);
  moe_plain_b_(&rows, args->W, expert, b);
}

MOE_FN int64_t moe_grouped_columns_(const moe_grouped_ *g) {
  return g->op == MOE_GROUPED_FORWARD ? g->args->N : g->args->K;
}
MOE_FN int64_t moe_grouped_depth_(const moe_grouped_ *g) {
  return g->op == MOE_GROUPED_FORWARD ? g->args->K : g->args->N;
}
MOE_FN int64_t moe_grouped_panels_(const moe_grouped_ *g) { return moe_ceil_div_(moe_grouped_columns_(g), MOE_NR); }

/* The result, and whether its rows are stored by gather_indices instead of as sorted. */
MOE_FN char *moe_grouped_out_(const moe_grouped_ *g) {
  return (char *)(g->op == MOE_GROUPED_FORWARD ? g->args->Y : g->args->dX);
}
MOE_FN int moe_grouped_scatters_(const moe_grouped_ *g) {
  return g->op == MOE_GROUPED_FORWARD ? g->args->permute_y : g->args->permute_x;
}

/* Stores columns [at, at+n) of the rows for sorted positions [pos, pos+rows). */
MOE_FN void moe_grouped_store_(const moe_grouped_ *g, int64_t pos, int64_t rows, int64_t at, int64_t n, float *c) {
  const moe_grouped_gemm_args *args = g->args;
  const int forward = g->op == MOE_GROUPED_FORWARD, scatters = moe_grouped_scatters_(g);
  const int64_t stride = moe_grouped_columns_(g) * g->size;
  const int32_t *index = scatters ? args->gather_indices + pos : NULL;
  char *dst = moe_grouped_out_(g) + (scatters ? 0 : pos * stride) + at * g->size;
  for (int64_t i = 0; i < rows && forward && args->topk_weights; i++) /* with permute_y only */
    g->group.kernels->vec->scale_row(c + i * MOE_NR, args->topk_weights[index[i]], n);
  moe_store_rows_prefetched_(g->group.kernels, g->dtype, dst, stride, index, c, rows, n);
}

MOE_FN void moe_grouped_epilogue_(void *arg, const moe_expert_c_ *p) {
  moe_grouped_store_((const moe_grouped_ *)arg, p->first, p->rows, p->panel * MOE_NR, p->n, p->c);
}

MOE_FN void moe_grouped_stage_(moe_grouped_ *g, moe_expert_stage_ *stage) {
  memset(stage, 0, sizeof *stage);
  stage->group = &g->group;
  stage->a = g->op == MOE_GROUPED_FORWARD ? moe_grouped_x_(g) : moe_grouped_dy_(g);
  stage->a_dtype = g->dtype;
  stage->b = moe_grouped_b_;
  stage->weights = g;
  stage->store_panel = moe_grouped_epilogue_;
  stage->arg = g;
  if (!moe_grouped_scatters_(g))
    stage->to = (moe_place_){moe_grouped_out_(g), moe_grouped_columns_(g) * g->size, g->dtype, 0, NULL, 0, 0};
  moe_expert_stage_start_(stage, moe_grouped_panels_(g), moe_grouped_depth_(g));
}

/* Work item: zeroes 64 columns of the rows at no position. */
MOE_FN void moe_grouped_zero_item_(void *arg, int64_t panel, moe_worker_ *worker) {
  const moe_grouped_ *g = (const moe_grouped_ *)arg;
  const int64_t at = panel * MOE_NR, n = moe_min_(MOE_NR, moe_grouped_columns_(g) - at);
  float zero[MOE_NR] = {0};
  (void)worker;
  for (int64_t pos = g->first[g->group.E]; pos < g->total; pos++) moe_grouped_store_(g, pos, 1, at, n, zero);
}

MOE_FN void moe_grouped_dw_(const moe_grouped_ *g, moe_weight_grad_ *stage) {
  memset(stage, 0, sizeof *stage);
  stage->group = &g->group;
  stage->x.rows = moe_grouped_dy_(g);
  stage->y.rows = moe_grouped_x_(g);
  stage->x.dtype = stage->y.dtype = g->dtype;
  stage->m = stage->m_to = g->args->N;
  stage->n = g->args->K;
  stage->output = (char *)g->args->dW;
  stage->dtype = g->weight_grad_dtype;
  stage->accumulate = (g->args->accumulate & MOE_ACCUMULATE_DW) != 0;
}

/* What the context's table knows such a call by. */
MOE_FN void moe_grouped_tune_key_(const moe_grouped_gemm_args *args, moe_grouped_op_ op, moe_dtype dtype,
                                  moe_tune_entry *key) {
  memset(key, 0, sizeof *key);
  key->op = (moe_tune_op)op;
  key->dtype = dtype;
  key->flags = (args->permute_x ? MOE_TUNE_PERMUTE_X : 0) | (args->permute_y ? MOE_TUNE_PERMUTE_Y : 0) |
               (op == MOE_GROUPED_FORWARD && args->packed_W ? MOE_TUNE_PACKED : 0);
  key->E = args->E;
  key->N = args->N;
  key->K = args->K;
}

/* ----------------------------------------------------------------------------------------------------------- public */

MOE_FN void moe_grouped_layout_(void *state, moe_arena_ *arena, int64_t workers) {
  moe_grouped_ *g = (moe_grouped_ *)state;
  const int dw = g->op == MOE_GROUPED_DW;
  g->first = (int64_t *)moe_take_(arena, (g->args->E + 1) * 8);
  g->token = (int32_t *)moe_take_(arena, g->args->permute_x ? g->total * 4 : 0);
  g->group.first = g->first;
  const int64_t longest = moe_max_(g->args->N, g->args->K);
  const moe_scratch_needs_ needs = {g->total, longest, dw ? MOE_NC_PANELS : MOE_NC_PANELS_WIDE,
                                    0,        0,       dw ? moe_weight_grad_bytes_(&g->group, g->total, longest) : 0};
  moe_scratch_layout_all_(&g->group, arena, workers, &needs);
}

MOE_FN moe_status moe_grouped_run_(moe_context *ctx, void *state) {
  moe_grouped_ *g = (moe_grouped_ *)state;
  moe_tune_entry key;
  moe_grouped_tune_key_(g->args, g->op, g->dtype, &key);
  moe_group_tune_(&g->group, ctx, &key);
  g->group.in_shares = moe_in_shares_(ctx);
  g->first[0] = 0;
  for (int64_t e = 0; e < g->args->E; e++) g->first[e + 1] = g->first[e] + g->args->m_sizes[e];
  for (int64_t i = 0; i < g->total && g->args->permute_x; i++)
    g->token[i] = (int32_t)(g->args->gather_indices[i] / g->args->topk);
  if (g->op == MOE_GROUPED_DW) {
    moe_weight_grad_ stage;
    moe_grouped_dw_(g, &stage);
    const moe_work_ work = moe_weight_grad_work_(&stage);
    moe_run_(ctx, &work, 1);
    return MOE_OK;
  }
  moe_expert_stage_ stage;
  moe_grouped_stage_(g, &stage);
  const moe_work_ work[] = {moe_expert_stage_work_(&stage), {moe_grouped_panels_(g), moe_grouped_zero_item_, g, NULL}};
  moe_run_(ctx, work, 2);
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
