/* Products of MXFP8 operands: rows times packed panels, as the stage of one expert. And moe_matmul_mxfp8, one of them. */
#ifndef MOE_LAYER_MATMUL_H
#define MOE_LAYER_MATMUL_H

/* ---------------------------------------------------------------------------------------------------------- products */

/* What products of one call share. */
typedef struct moe_mxfp8_ {
  moe_group_ group;
  int64_t first[2]; /* its rows: those of A */
  moe_mx_round_ round;
  moe_mxfp8_format format;
} moe_mxfp8_;

MOE_FN void moe_mxfp8_init_(moe_mxfp8_ *m, const moe_mxfp8_format *format) {
  moe_group_init_(&m->group, MOE_DTYPE_BF16, 1);
  moe_mxfp8_round_init_(&m->round, format);
  m->format = *format;
}

/* Rows [first, first+F) of `stored` rows of K elements: of x or, where that is not given, of `other` transposed. */
MOE_FN void moe_mxfp8_matrix_(const moe_mxfp8_ *m, moe_mx_matrix_ *matrix, const moe_mxfp8_operand *x,
                              const moe_mxfp8_operand *other, int64_t first, int64_t F, int64_t stored, int64_t K) {
  memset(matrix, 0, sizeof *matrix);
  matrix->kernels = m->group.kernels;
  matrix->round = &m->round;
  matrix->layout = m->format.layout;
  matrix->transposed = other && (!x || !x->data);
  matrix->given = matrix->transposed ? other : x;
  matrix->first = first, matrix->F = F, matrix->stored = stored;
  matrix->K = matrix->segment = matrix->k_stored = K;
  matrix->kind = m->group.panel;
}

MOE_FN void moe_mxfp8_b_(const void *arg, int64_t expert, moe_b_ *b) {
  const moe_mx_matrix_ *x = (const moe_mx_matrix_ *)arg;
  (void)expert;
  moe_b_packed_(b, x->to, moe_mx_panel_bytes_(x), x->F, x->K);
  b->in_cache = 0;
}

/* The stage of A's rows times B's panels; the caller says what becomes of the products, then starts it. */
MOE_FN void moe_mxfp8_stage_(const moe_mxfp8_ *m, const moe_mx_matrix_ *a, const moe_mx_matrix_ *b, void *arg,
                             void (*store_panel)(void *arg, const moe_expert_c_ *products), moe_expert_stage_ *stage) {
  memset(stage, 0, sizeof *stage);
  stage->group = &m->group;
  stage->a = (moe_rows_){a->to, a->stride, NULL};
  stage->a_dtype = MOE_DTYPE_BF16;
  stage->b = moe_mxfp8_b_;
  stage->weights = b;
  stage->store_panel = store_panel;
  stage->arg = arg;
}

MOE_FN void moe_mxfp8_set_rows_(moe_mxfp8_ *m, const moe_context *ctx, int64_t rows) {
  m->first[0] = 0, m->first[1] = rows;
  m->group.first = m->first;
  m->group.in_shares = moe_in_shares_(ctx);
}

/* Products that are stored as they are. */
typedef struct moe_mxfp8_store_ {
  const moe_kernels *kernels;
  char *to;
  int64_t stride;
  moe_dtype dtype;
} moe_mxfp8_store_;

MOE_FN void moe_mxfp8_store_panel_(void *arg, const moe_expert_c_ *p) {
  const moe_mxfp8_store_ *store = (const moe_mxfp8_store_ *)arg;
  char *to = store->to + p->first * store->stride + p->panel * MOE_NR * moe_dtype_bytes_(store->dtype);
  moe_store_rows_prefetched_(store->kernels, store->dtype, to, store->stride, NULL, p->c, p->rows, p->n);
}

MOE_FN void moe_mxfp8_multiply_(const moe_context *ctx, moe_mxfp8_ *m, const moe_mx_matrix_ *a, const moe_mx_matrix_ *b,
                                void *to, moe_dtype dtype) {
  const int64_t stride = b->F * moe_dtype_bytes_(dtype);
  moe_mxfp8_store_ store = {m->group.kernels, (char *)to, stride, dtype};
  moe_expert_stage_ stage;
  moe_mxfp8_set_rows_(m, ctx, a->F);
  moe_mxfp8_stage_(m, a, b, &store, moe_mxfp8_store_panel_, &stage);
  stage.to = (moe_place_){.base = store.to, .stride = stride, .dtype = dtype};
  moe_expert_stage_start_(&stage, moe_ceil_div_(b->F, MOE_NR), a->K);
  const moe_work_ work = moe_expert_stage_work_(&stage);
  moe_run_(ctx, &work, 1);
}

/* Scratch memory for products of at most so many rows, and elements of a row. */
MOE_FN void moe_mxfp8_scratch_(moe_mxfp8_ *m, moe_arena_ *arena, int64_t workers, int64_t rows, int64_t longest,
                               int64_t sums, int grads) {
  const moe_scratch_needs_ needs = {rows, longest, grads ? MOE_NC_PANELS : MOE_NC_PANELS_WIDE,
                                    sums, 0,       grads ? moe_weight_grad_bytes_(&m->group, rows, longest) : 0};
  moe_scratch_layout_all_(&m->group, arena, workers, &needs);
}

/* ----------------------------------------------------------------------------------------------------------- product */

typedef struct moe_matmul_ {
  moe_mxfp8_ m;
  const moe_matmul_mxfp8_args *args;
  moe_dtype dtype;
  moe_mx_matrix_ a, b;
} moe_matmul_;

MOE_FN moe_status moe_matmul_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_matmul_ *p = (moe_matmul_ *)state;
  const moe_matmul_mxfp8_args *args = p->args = (const moe_matmul_mxfp8_args *)call->args;
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_mxfp8_check_format_(ctx, &args->format));
  MOE_TRY(moe_check_count_or_none_(ctx, "M", args->M));
  MOE_TRY(moe_check_count_(ctx, "N", args->N));
  MOE_TRY(moe_check_count_or_none_(ctx, "K", args->K));
  MOE_TRY(moe_mxfp8_check_axis_(ctx, &args->format, "K", args->K));
  MOE_TRY(moe_check_enum_(ctx, "output_dtype", (int)args->output_dtype, MOE_DTYPE_COUNT_));
  p->dtype = moe_or_(args->output_dtype, MOE_DTYPE_BF16);
  const int64_t size = moe_dtype_bytes_(p->dtype);
  const moe_tensor_ output[] = {{"output", args->output, moe_mul3_(args->M, args->N, size), size, MOE_OUTPUT}};
  moe_mxfp8_init_(&p->m, &args->format);
  MOE_TRY(moe_mxfp8_list_(ctx, &args->format, "a", "a.scales", &args->a, args->M, args->K, 1, tensors));
  MOE_TRY(moe_mxfp8_list_(ctx, &args->format, "b", "b.scales", &args->b, args->N, args->K, 1, tensors));
  return MOE_LIST_(tensors, output);
}

MOE_FN void moe_matmul_layout_(void *state, moe_arena_ *arena, int64_t workers) {
  moe_matmul_ *p = (moe_matmul_ *)state;
  const moe_matmul_mxfp8_args *args = p->args;
  moe_mxfp8_matrix_(&p->m, &p->a, &args->a, NULL, 0, args->M, args->M, args->K);
  moe_mxfp8_matrix_(&p->m, &p->b, &args->b, NULL, 0, args->N, args->N, args->K);
  moe_mx_matrix_layout_(&p->a, MOE_MX_ROWS_, arena);
  moe_mx_matrix_layout_(&p->b, MOE_MX_PANELS_, arena);
  moe_mxfp8_scratch_(&p->m, arena, workers, args->M, moe_max_(args->N, args->K), 0, 0);
}

MOE_FN moe_status moe_matmul_run_(moe_context *ctx, void *state) {
  moe_matmul_ *p = (moe_matmul_ *)state;
  const int64_t outputs = p->args->M * p->args->N;
  if (outputs == 0) return MOE_OK;
  if (p->args->K == 0) return memset(p->args->output, 0, (size_t)(outputs * moe_dtype_bytes_(p->dtype))), MOE_OK;
  moe_mx_matrix_run_(ctx, &p->a, MOE_MX_ROWS_);
  moe_mx_matrix_run_(ctx, &p->b, MOE_MX_PANELS_);
  moe_mxfp8_multiply_(ctx, &p->m, &p->a, &p->b, p->args->output, p->dtype);
  return MOE_OK;
}

static const moe_op_ moe_matmul_op_ = {moe_matmul_check_, moe_matmul_layout_, moe_matmul_run_, NULL, NULL};
MOE_OP_WORKSPACE_(moe_matmul_mxfp8, moe_matmul_mxfp8_args, moe_matmul_op_, moe_matmul_, .dtype = MOE_DTYPE_BF16)

#endif
