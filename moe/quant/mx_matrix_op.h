/* Operands of products rounded to MX: checked, listed, and put into the form that products take. */
#ifndef MOE_QUANT_MX_MATRIX_OP_H
#define MOE_QUANT_MX_MATRIX_OP_H

/* --------------------------------------------------------------------------------------------------------- rounding */

MOE_FN moe_status moe_mx_round_check_(moe_context *ctx, const char *name, const moe_mx_rounding *rounding) {
  MOE_TRY(moe_check_flag_(ctx, name, rounding->enabled));
  if (!rounding->enabled) return MOE_OK;
  MOE_TRY(moe_check_mx_element_(ctx, name, rounding->element));
  MOE_TRY(moe_check_enum_(ctx, name, (int)rounding->scale_rule, MOE_SCALE_COUNT_));
  MOE_TRY(moe_check_cast_(ctx, name, rounding->cast));
  return MOE_OK;
}

MOE_FN void moe_mx_round_init_(moe_mx_round_ *r, const moe_mx_rounding *rounding) {
  memset(r, 0, sizeof *r);
  if (!rounding->enabled) return;
  r->enabled = 1;
  const moe_element_format_ format = moe_element_format_of_(rounding->element);
  r->cast = moe_cast_scaled_(rounding->element, rounding->cast);
  r->numbers = moe_numbers_of_(&format, &r->cast);
  r->numbers.rule = moe_mx_scale_rule_(rounding->scale_rule, &format);
}

/* --------------------------------------------------------------------------------------------------- given operands */

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

/* ---------------------------------------------------------------------------------------------------------- targets */

typedef enum moe_mx_target_ { MOE_MX_ROWS_, MOE_MX_COLUMNS_, MOE_MX_PANELS_ } moe_mx_target_;

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
