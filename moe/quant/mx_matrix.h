/* Operands of MXFP8 products, in whichever state they are given, as products take them: bf16 values rounded along the
   contraction, in rows along it (A), in packed panels (B), or in rows across it (both, of weight gradients). */
#ifndef MOE_QUANT_MX_MATRIX_H
#define MOE_QUANT_MX_MATRIX_H

enum { MOE_BF16_BYTES_ = 2 };

/* --------------------------------------------------------------------------------------------------- given operands */

MOE_FN int moe_mx_in_order_(moe_mx_layout layout) {
  return layout == MOE_MX_LAYOUT_PLAIN || layout == MOE_MX_LAYOUT_NKI_1X32;
}

MOE_FN int moe_mxfp8_is_plain_(const moe_mxfp8_operand *x) { return !x->scales && !x->is_swizzled; }

/* The codes and scales of an operand [F,K], or its swizzled values, as a weight. */
MOE_FN moe_mx_tensor_ moe_mxfp8_tensor_(const moe_mxfp8_operand *x, moe_mx_layout layout, int64_t F, int64_t K) {
  moe_mx_tensor_ s = moe_mx_tensor_of_shape_(x->is_swizzled ? layout : MOE_MX_LAYOUT_PLAIN, 8, 1, K, 1, F);
  if (x->scales) s.scales = x->scales_layout;
  s.codes = (uint8_t *)(uintptr_t)x->data;
  s.scale = (uint8_t *)(uintptr_t)x->scales;
  return s;
}

MOE_FN moe_status moe_mxfp8_check_format_(moe_context *ctx, const moe_mxfp8_format *format) {
  MOE_TRY(moe_check_enum_(ctx, "format.element", (int)format->element, MOE_ELEMENT_COUNT_));
  if (moe_element_format_of_(format->element).bits != 8)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "format.element", "must have 8 bits");
  MOE_TRY(moe_check_flag_(ctx, "format.use_scale_rule", format->use_scale_rule));
  if (format->use_scale_rule)
    MOE_TRY(moe_check_enum_(ctx, "format.scale_rule", (int)format->scale_rule, MOE_SCALE_COUNT_));
  if (format->layout != MOE_MX_LAYOUT_PLAIN && !moe_mx_is_kf_(format->layout))
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "format.layout", "must be PLAIN, NKI_WRAPX, its WHOLE or NKI_1X32");
  return MOE_OK;
}

MOE_FN void moe_mxfp8_round_init_(moe_mx_round_ *round, const moe_mxfp8_format *format) {
  const moe_mx_rounding rounding = {1, format->element, format->use_scale_rule ? format->scale_rule : MOE_SCALE_NKI_ALT,
                                    MOE_CAST_SATURATE};
  moe_mx_round_init_(round, &rounding);
}

/* That an axis can be contracted. */
MOE_FN moe_status moe_mxfp8_check_axis_(moe_context *ctx, const moe_mxfp8_format *format, const char *name, int64_t K) {
  return moe_mx_in_order_(format->layout) || K % MOE_MX_GROUP_ == 0
             ? MOE_OK
             : moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, name, "must be a multiple of 32 in this layout");
}

/* An operand [F,K] in a call: checked, and listed among its tensors if it is `read`. */
MOE_FN moe_status moe_mxfp8_list_(moe_context *ctx, const moe_mxfp8_format *format, const char *name,
                                  const char *scales_name, const moe_mxfp8_operand *x, int64_t F, int64_t K, int read,
                                  moe_tensors_ *tensors) {
  MOE_TRY(moe_check_flag_(ctx, name, x->is_swizzled));
  if (x->is_swizzled && format->layout == MOE_MX_LAYOUT_PLAIN)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, name, "cannot be swizzled under format.layout PLAIN");
  if (x->is_swizzled && K % MOE_MX_GROUP_ != 0)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, name, "is swizzled, and its rows must be a multiple of 32");
  const moe_mx_tensor_ s = moe_mxfp8_tensor_(x, format->layout, F, K);
  if (x->scales) MOE_TRY(moe_mx_check_scales_(ctx, scales_name, s.layout, x->scales_layout));
  const moe_mx_bytes_ bytes = moe_mx_size_(&s);
  const int64_t align = x->scales ? (x->is_swizzled ? MOE_MX_WORD_ : 1) : MOE_BF16_BYTES_;
  const moe_tensor_ own[] = {
      {name, read ? x->data : NULL, x->scales ? bytes.codes : moe_mul3_(F, K, MOE_BF16_BYTES_), align,
       read ? MOE_INPUT : MOE_INPUT_OPTIONAL},
      {scales_name, read ? x->scales : NULL, x->scales ? bytes.scales : 0, 1, MOE_INPUT_OPTIONAL}};
  return MOE_LIST_(tensors, own);
}

/* ------------------------------------------------------------------------------------------------------------ passes */

/* An operand, or a part of it, for a product. */
typedef struct moe_mx_matrix_ {
  const moe_kernels *kernels;
  const moe_mx_round_ *round;     /* NULL: it is rounded already */
  moe_mx_layout layout;           /* which elements are a group */
  const moe_mxfp8_operand *given; /* [stored,K], or transposed [K,stored] */
  int transposed;
  int64_t F, K, first, stored; /* rows [first, first+F) of `stored`, of K elements */
  int64_t k_first, k_stored;   /* transposed: elements from k_first on, of k_stored */
  int64_t segment;             /* as in moe_rounded_ */
  moe_panel_kind_ kind;        /* of panels */
  char *decoded, *room;        /* see moe_mx_matrix_layout_ */
  char *to;                    /* the result: rows of `stride` bytes, or panels */
  int64_t stride;
} moe_mx_matrix_;

typedef enum moe_mx_target_ { MOE_MX_ROWS_, MOE_MX_COLUMNS_, MOE_MX_PANELS_ } moe_mx_target_;

/* Bytes of a panel. */
MOE_FN int64_t moe_mx_panel_bytes_(const moe_mx_matrix_ *x) { return moe_panel_bytes_(x->kind, x->K); }

/* Whether panels are rounded as they are packed, from the operand as it is given. */
MOE_FN int moe_mx_packs_given_(const moe_mx_matrix_ *x) {
  return moe_mxfp8_is_plain_(x->given) && (!x->round || moe_mx_in_order_(x->layout));
}

/* Takes memory for what is in between, and for the result unless it has a place. */
MOE_FN void moe_mx_matrix_layout_(moe_mx_matrix_ *x, moe_mx_target_ target, moe_arena_ *arena) {
  const int64_t row = moe_mul_(x->K, MOE_BF16_BYTES_), all = moe_mul_(x->F, row);
  const int64_t panels = moe_mul_(moe_ceil_div_(x->F, MOE_NR), moe_mx_panel_bytes_(x));
  const int turns = target == MOE_MX_PANELS_ ? !moe_mx_packs_given_(x) : target == MOE_MX_COLUMNS_ && !x->transposed;
  x->decoded = x->transposed && !moe_mxfp8_is_plain_(x->given) ? moe_take_(arena, moe_mul_(x->stored, row)) : NULL;
  x->room = turns ? moe_take_(arena, all) : NULL;
  if (x->stride) return;
  x->stride = target == MOE_MX_COLUMNS_ ? x->F * MOE_BF16_BYTES_ : row;
  x->to = (char *)moe_take_(arena, target == MOE_MX_PANELS_ ? panels : all);
}

/* From one matrix of bf16 to another. */
typedef struct moe_mx_pass_ {
  const moe_mx_matrix_ *x;
  moe_mx_tensor_ tensor; /* of decoding, columns from `first` on */
  int64_t first, rows, columns;
  const char *from;
  char *to;
  int64_t from_stride, to_stride;
} moe_mx_pass_;

/* Item: 64 rows decoded, or put in order. */
MOE_FN void moe_mx_decode_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_mx_pass_ *pass = (const moe_mx_pass_ *)arg;
  const moe_mx_tensor_ *s = &pass->tensor;
  const moe_kernels *kernels = pass->x->kernels;
  const int64_t first = item * MOE_NR, end = moe_min_(pass->rows, first + MOE_NR);
  (void)worker;
  for (int64_t group = 0; group < s->groups; group++) {
    const int64_t start = group * MOE_MX_GROUP_, n = moe_min_(MOE_MX_GROUP_, s->K - start);
    int64_t element[MOE_MX_GROUP_];
    for (int64_t j = 0; j < n; j++) element[j] = moe_mx_element_(s->layout, 1, s->K, start + j);
    for (int64_t row = first; row < end; row++) {
      const moe_mx_at_ at = {0, 0, pass->first + row, group, NULL};
      uint8_t code[MOE_MX_GROUP_];
      float value[MOE_MX_GROUP_];
      moe_bf16 x[MOE_MX_GROUP_], *to = (moe_bf16 *)(void *)(pass->to + row * pass->to_stride);
      if (s->scale) {
        moe_mx_load_(s, &at, n, code);
        moe_mx_decode_(kernels, &pass->x->round->numbers.format, code, *moe_mx_scale_at_(s, &at), value, n);
        moe_store_row_(kernels->vec, MOE_DTYPE_BF16, x, value, n);
      } else {
        for (int64_t j = 0; j < n; j += MOE_MX_WORD_)
          memcpy(x + j,
                 s->codes + moe_nki_word_at_(s, &at, (start + j) / MOE_MX_WORD_) * MOE_MX_WORD_ * MOE_BF16_BYTES_,
                 MOE_MX_WORD_ * MOE_BF16_BYTES_);
      }
      for (int64_t j = 0; j < n; j++) to[element[j]] = x[j];
    }
  }
}

/* Item: 64 rows of the result, which are columns of what is transposed. */
MOE_FN void moe_mx_transpose_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_mx_pass_ *pass = (const moe_mx_pass_ *)arg;
  const moe_vec_table_ *vec = pass->x->kernels->vec;
  const int64_t first = item * MOE_NR, n = moe_min_(MOE_NR, pass->columns - first);
  (void)worker;
  for (int64_t at = 0, rows; at < pass->rows; at += rows) {
    float x[MOE_NR * MOE_NR / 2], y[MOE_NR * MOE_NR / 2]; /* 32 rows: the stack is small */
    rows = moe_min_(MOE_NR / 2, pass->rows - at);
    const moe_rows_ from = {pass->from + at * pass->from_stride + first * MOE_BF16_BYTES_, pass->from_stride, NULL};
    vec->load_rows[MOE_DTYPE_BF16](x, MOE_NR, &from, rows, n);
    vec->transpose_words(y, MOE_NR_BYTES_ / 2, x, MOE_NR_BYTES_, rows, n);
    for (int64_t i = 0; i < n; i++)
      moe_store_row_(vec, MOE_DTYPE_BF16, pass->to + (first + i) * pass->to_stride + at * MOE_BF16_BYTES_,
                     y + i * MOE_NR / 2, rows);
  }
}

/* Item: 64 columns, rounded in groups of rows. */
MOE_FN void moe_mx_columns_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_mx_pass_ *pass = (const moe_mx_pass_ *)arg;
  const moe_mx_matrix_ *x = pass->x;
  const moe_vec_table_ *vec = x->kernels->vec;
  const int64_t at = item * MOE_NR, n = moe_min_(MOE_NR, pass->columns - at);
  const int order = moe_mx_in_order_(x->layout);
  float panel[MOE_MX_GROUP_ * MOE_NR] = {0};
  (void)worker;
  for (int64_t from = 0, k; from < pass->rows; from += k) {
    const int64_t segment = from / x->segment * x->segment, length = moe_min_(x->segment, pass->rows - segment);
    int32_t index[MOE_MX_GROUP_];
    k = moe_min_(MOE_MX_GROUP_, segment + length - from);
    for (int64_t i = 0; i < k && !order; i++)
      index[i] = (int32_t)(segment + moe_mx_element_(x->layout, 1, length, from - segment + i));
    const int64_t start = order ? from : 0;
    const int32_t *where = order ? NULL : index;
    const moe_rows_ rows = {pass->from + start * pass->from_stride + at * MOE_BF16_BYTES_, pass->from_stride, where};
    vec->load_rows[MOE_DTYPE_BF16](panel, MOE_NR, &rows, k, n);
    moe_mx_round_panel_(x->kernels, x->round, MOE_DTYPE_BF16, panel, k);
    vec->store_rows[MOE_DTYPE_BF16](pass->to + start * pass->to_stride + at * MOE_BF16_BYTES_, pass->to_stride, where,
                                    panel, k, n);
  }
}

typedef struct moe_mx_pack_ {
  const moe_mx_matrix_ *x;
  moe_b_ b;
} moe_mx_pack_;

MOE_FN void moe_mx_pack_b_(const void *arg, int64_t expert, moe_b_ *b) {
  (void)expert;
  *b = ((const moe_mx_pack_ *)arg)->b;
}

/* Item: a panel. */
MOE_FN void moe_mx_pack_item_(void *arg, int64_t panel, moe_worker_ *worker) {
  const moe_mx_pack_ *pack = (const moe_mx_pack_ *)arg;
  const moe_mx_matrix_ *x = pack->x;
  const moe_rounded_ rounded = {x->round, moe_mx_pack_b_, pack, x->segment, MOE_DTYPE_BF16};
  moe_b_ b = pack->b;
  (void)worker;
  if (x->round && moe_mx_packs_given_(x)) moe_rounded_b_(&rounded, 0, &b);
  moe_pack_b_(x->kernels, x->kind, &b, panel, 0, x->K, x->to + panel * moe_mx_panel_bytes_(x));
}

/* ----------------------------------------------------------------------------------------------------------- targets */

/* The operand in bf16, as it is given. */
MOE_FN const char *moe_mx_plain_of_(const moe_context *ctx, const moe_mx_matrix_ *x, char *to, int64_t *stride) {
  const int64_t length = x->transposed ? x->stored : x->K, first = x->transposed ? x->k_first : x->first;
  if (moe_mxfp8_is_plain_(x->given)) {
    const int64_t before = first * length + (x->transposed ? x->first : 0);
    *stride = length * MOE_BF16_BYTES_;
    return (const char *)x->given->data + before * MOE_BF16_BYTES_;
  }
  moe_mx_pass_ pass = {0};
  pass.x = x;
  pass.tensor = moe_mxfp8_tensor_(x->given, x->layout, x->transposed ? x->k_stored : x->stored, length);
  pass.first = first;
  pass.rows = x->transposed ? x->K : x->F;
  pass.to = to;
  pass.to_stride = *stride;
  moe_run_items_(ctx, moe_ceil_div_(pass.rows, MOE_NR), moe_mx_decode_item_, &pass);
  return x->transposed ? to + x->first * MOE_BF16_BYTES_ : to;
}

MOE_FN void moe_mx_transpose_(const moe_context *ctx, const moe_mx_matrix_ *x, const char *from, int64_t from_stride,
                              char *to, int64_t to_stride, int64_t rows, int64_t columns) {
  moe_mx_pass_ pass = {0};
  pass.x = x;
  pass.rows = rows, pass.columns = columns;
  pass.from = from, pass.to = to;
  pass.from_stride = from_stride, pass.to_stride = to_stride;
  moe_run_items_(ctx, moe_ceil_div_(columns, MOE_NR), moe_mx_transpose_item_, &pass);
}

/* F rows along the contraction. */
MOE_FN void moe_mx_rows_of_matrix_(const moe_context *ctx, const moe_mx_matrix_ *x, char *to, int64_t stride) {
  int64_t from_stride = x->transposed ? x->stored * MOE_BF16_BYTES_ : stride;
  const char *from = moe_mx_plain_of_(ctx, x, x->transposed ? x->decoded : to, &from_stride);
  if (x->transposed) {
    moe_mx_transpose_(ctx, x, from, from_stride, to, stride, x->K, x->F);
    from = to, from_stride = stride;
  }
  if (!x->transposed && x->given->scales) return;
  moe_round_tensor_ rows = {x->kernels,     x->round, from, to, from_stride, stride,
                            MOE_DTYPE_BF16, x->F,     x->K, 1,  x->layout};
  moe_run_items_(ctx, x->F, moe_round_tensor_item_, &rows);
}

/* K rows across it. */
MOE_FN void moe_mx_columns_of_matrix_(const moe_context *ctx, const moe_mx_matrix_ *x, char *to, int64_t stride) {
  int64_t from_stride = x->stored * MOE_BF16_BYTES_;
  if (!x->transposed) {
    const int64_t row = x->K * MOE_BF16_BYTES_;
    moe_mx_rows_of_matrix_(ctx, x, x->room, row);
    moe_mx_transpose_(ctx, x, x->room, row, to, stride, x->F, x->K);
    return;
  }
  moe_mx_pass_ pass = {0};
  pass.x = x;
  pass.from = moe_mx_plain_of_(ctx, x, x->decoded, &from_stride);
  pass.from_stride = from_stride;
  pass.rows = x->K, pass.columns = x->F;
  pass.to = to, pass.to_stride = stride;
  moe_run_items_(ctx, moe_ceil_div_(x->F, MOE_NR), moe_mx_columns_item_, &pass);
}

MOE_FN void moe_mx_panels_of_matrix_(const moe_context *ctx, const moe_mx_matrix_ *x) {
  int64_t stride = (x->transposed ? x->F : x->K) * MOE_BF16_BYTES_;
  const char *from = x->room;
  moe_mx_pack_ pack;
  memset(&pack, 0, sizeof pack);
  pack.x = x;
  if (moe_mx_packs_given_(x)) from = moe_mx_plain_of_(ctx, x, NULL, &stride);
  else if (x->transposed) moe_mx_columns_of_matrix_(ctx, x, x->room, stride);
  else moe_mx_rows_of_matrix_(ctx, x, x->room, stride);
  pack.b.base[0] = from, pack.b.stride = stride, pack.b.transposed = !x->transposed;
  pack.b.parts = 1, pack.b.n = x->F, pack.b.k = x->K;
  pack.b.dtype = MOE_DTYPE_BF16, pack.b.group = MOE_MX_GROUP_ * MOE_BF16_BYTES_;
  moe_run_items_(ctx, moe_ceil_div_(x->F, MOE_NR), moe_mx_pack_item_, &pack);
}

MOE_FN void moe_mx_matrix_run_(const moe_context *ctx, const moe_mx_matrix_ *x, moe_mx_target_ target) {
  if (target == MOE_MX_ROWS_) moe_mx_rows_of_matrix_(ctx, x, x->to, x->stride);
  else if (target == MOE_MX_COLUMNS_) moe_mx_columns_of_matrix_(ctx, x, x->to, x->stride);
  else moe_mx_panels_of_matrix_(ctx, x);
}

#endif
