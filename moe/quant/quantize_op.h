/* The operations moe_quantize_mx, moe_quantize_scaled, moe_quantize_group, and back. */
#ifndef MOE_QUANT_QUANTIZE_OP_H
#define MOE_QUANT_QUANTIZE_OP_H

/* --------------------------------------------------------------------------------------------------------------- MX */

/* What both directions check; their tensors. */
MOE_FN moe_status moe_mx_quantize_list_(moe_context *ctx, moe_mx_quantize_job_ *job, int64_t rows, int64_t columns,
                                        moe_tensors_ *tensors) {
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_enum_(ctx, "dtype", (int)job->dtype, MOE_DTYPE_COUNT_));
  MOE_TRY(moe_check_flag_(ctx, "transposed", job->transposed));
  MOE_TRY(moe_check_not_negative_(ctx, "rows", rows));
  MOE_TRY(moe_check_not_negative_(ctx, "columns", columns));
  job->dtype = moe_or_(job->dtype, MOE_DTYPE_F32);
  job->lines = job->transposed ? columns : rows, job->length = job->transposed ? rows : columns;
  job->size = moe_dtype_bytes_(job->dtype);
  job->code_stride = moe_element_bytes_(job->length, job->format.bits);
  job->scale_stride = moe_ceil_div_(job->length, MOE_MX_GROUP_);
  const int64_t plain = moe_mul3_(rows, columns, job->size);
  const int64_t codes = moe_mul_(job->lines, job->code_stride), scales = moe_mul_(job->lines, job->scale_stride);
  const moe_role_ plain_role = job->decode ? MOE_OUTPUT : MOE_INPUT, code_role = job->decode ? MOE_INPUT : MOE_OUTPUT;
  const moe_tensor_ own[] = {{"plain", job->plain, plain, job->size, plain_role},
                             {"codes", job->codes, codes, 1, code_role},
                             {"scales", job->scales, scales, 1, code_role}};
  return MOE_LIST_(tensors, own);
}

MOE_FN moe_status moe_quantize_mx_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_mx_quantize_job_ *job = (moe_mx_quantize_job_ *)state;
  const moe_quantize_mx_args *args = (const moe_quantize_mx_args *)call->args;
  MOE_TRY(moe_check_mx_element_(ctx, "element", args->element));
  MOE_TRY(moe_check_enum_(ctx, "scale_rule", (int)args->scale_rule, MOE_SCALE_COUNT_));
  MOE_TRY(moe_check_cast_(ctx, "cast", args->cast));
  job->element = args->element, job->dtype = args->dtype, job->transposed = args->transposed;
  job->format = moe_element_format_of_(args->element);
  job->cast = moe_cast_scaled_(args->element, args->cast);
  job->numbers = moe_numbers_of_(&job->format, &job->cast);
  job->numbers.rule = moe_mx_scale_rule_(args->scale_rule, &job->format);
  job->plain = (char *)(uintptr_t)args->plain, job->codes = args->codes, job->scales = args->scales;
  return moe_mx_quantize_list_(ctx, job, args->rows, args->columns, tensors);
}

MOE_FN moe_status moe_dequantize_mx_check_(moe_context *ctx, void *state, const moe_call_ *call,
                                           moe_tensors_ *tensors) {
  moe_mx_quantize_job_ *job = (moe_mx_quantize_job_ *)state;
  const moe_dequantize_mx_args *args = (const moe_dequantize_mx_args *)call->args;
  MOE_TRY(moe_check_mx_element_(ctx, "element", args->element));
  job->format = moe_element_format_of_(args->element), job->cast = moe_cast_of_(args->element, 0);
  job->numbers = moe_numbers_of_(&job->format, &job->cast);
  job->element = args->element, job->dtype = args->dtype, job->transposed = args->transposed, job->decode = 1;
  job->plain = (char *)args->plain;
  job->codes = (uint8_t *)(uintptr_t)args->codes, job->scales = (uint8_t *)(uintptr_t)args->scales;
  return moe_mx_quantize_list_(ctx, job, args->rows, args->columns, tensors);
}

MOE_FN moe_status moe_mx_quantize_run_(moe_context *ctx, void *state) {
  moe_mx_quantize_job_ *job = (moe_mx_quantize_job_ *)state;
  const int64_t elements = job->lines * job->length,
                out = job->decode ? elements * job->size : job->lines * job->code_stride;
  if (elements == 0) return MOE_OK;
  job->kernels = moe_kernels_();
  job->nt = !job->transposed && out >= MOE_NT_MIN_BYTES;
  if (job->nt) job->numbers.prefetch_to = 0;
  const int64_t part = elements / 256 / MOE_MX_ITEM_ * MOE_MX_ITEM_; /* of whole groups */
  const int64_t item = moe_max_(MOE_MX_ITEM_, moe_min_(MOE_MX_ITEM_MOST_, part));
  job->block = moe_min_(job->length, job->transposed ? MOE_MX_STRIP_ : item);
  job->line_block = job->transposed ? MOE_NR : moe_max_(1, item / job->block);
  job->blocks = moe_ceil_div_(job->length, job->block);
  const int64_t items = moe_ceil_div_(job->lines, job->line_block) * job->blocks;
  const moe_work_ work = {items, job->transposed ? moe_mx_transposed_item_ : moe_mx_quantize_item_, job,
                          job->transposed || job->decode ? NULL : moe_mx_first_reads_};
  moe_run_(ctx, &work, 1);
  return MOE_OK;
}

static const moe_op_ moe_quantize_mx_op_ = {moe_quantize_mx_check_, NULL, moe_mx_quantize_run_, NULL, NULL};
static const moe_op_ moe_dequantize_mx_op_ = {moe_dequantize_mx_check_, NULL, moe_mx_quantize_run_, NULL, NULL};
MOE_OP_(moe_quantize_mx, moe_quantize_mx_args, moe_quantize_mx_op_, moe_mx_quantize_job_, .dtype = MOE_DTYPE_DEFAULT)
MOE_OP_(moe_dequantize_mx, moe_dequantize_mx_args, moe_dequantize_mx_op_, moe_mx_quantize_job_,
        .dtype = MOE_DTYPE_DEFAULT)

/* ----------------------------------------------------------------------------------------------------- float scales */

/* What both directions check; their tensors. */
MOE_FN moe_status moe_scaled_list_(moe_context *ctx, moe_scaled_job_ *job, moe_element element, moe_tensors_ *tensors) {
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_enum_(ctx, "element", (int)element, MOE_ELEMENT_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "dtype", (int)job->dtype, MOE_DTYPE_COUNT_));
  MOE_TRY(moe_check_not_negative_(ctx, "rows", job->rows));
  MOE_TRY(moe_check_not_negative_(ctx, "columns", job->columns));
  if (job->block_rows < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "block_rows", "is negative");
  if (job->block_columns < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "block_columns", "is negative");
  job->format = moe_element_format_of_(element);
  if (job->format.bits != 8) return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "element", "must have 8 bits");
  job->dtype = moe_or_(job->dtype, MOE_DTYPE_F32);
  job->size = moe_dtype_bytes_(job->dtype);
  const int64_t rows = moe_max_(1, job->rows), columns = moe_max_(1, job->columns); /* there may be no elements */
  job->block_rows = job->block_rows ? moe_min_(job->block_rows, rows) : rows;
  job->block_columns = job->block_columns ? moe_min_(job->block_columns, columns) : columns;
  job->across = moe_ceil_div_(job->columns, job->block_columns);
  const int64_t plain = moe_mul3_(job->rows, job->columns, job->size), codes = moe_mul_(job->rows, job->columns);
  const int64_t scales = moe_mul3_(moe_ceil_div_(job->rows, job->block_rows), job->across, 4);
  const moe_role_ plain_role = job->decode ? MOE_OUTPUT : MOE_INPUT, code_role = job->decode ? MOE_INPUT : MOE_OUTPUT;
  const moe_tensor_ own[] = {{"plain", job->plain, plain, job->size, plain_role},
                             {"codes", job->codes, codes, 1, code_role},
                             {"scales", job->scales, scales, 4, job->given ? MOE_INPUT : code_role}};
  return MOE_LIST_(tensors, own);
}

MOE_FN moe_status moe_quantize_scaled_check_(moe_context *ctx, void *state, const moe_call_ *call,
                                             moe_tensors_ *tensors) {
  moe_scaled_job_ *job = (moe_scaled_job_ *)state;
  const moe_quantize_scaled_args *args = (const moe_quantize_scaled_args *)call->args;
  MOE_TRY(moe_check_enum_(ctx, "element", (int)args->element, MOE_ELEMENT_COUNT_));
  MOE_TRY(moe_check_cast_(ctx, "cast", args->cast));
  MOE_TRY(moe_check_flag_(ctx, "scales_given", args->scales_given));
  job->cast = moe_cast_scaled_(args->element, args->cast);
  MOE_TRY(moe_check_flag_(ctx, "power_of_two_scales", args->power_of_two_scales));
  job->dtype = args->dtype, job->given = args->scales_given, job->powers = args->power_of_two_scales;
  job->rows = args->rows, job->columns = args->columns;
  job->block_rows = args->block_rows, job->block_columns = args->block_columns;
  job->plain = (char *)(uintptr_t)args->plain, job->codes = args->codes, job->scales = args->scales;
  return moe_scaled_list_(ctx, job, args->element, tensors);
}

MOE_FN moe_status moe_dequantize_scaled_check_(moe_context *ctx, void *state, const moe_call_ *call,
                                               moe_tensors_ *tensors) {
  moe_scaled_job_ *job = (moe_scaled_job_ *)state;
  const moe_dequantize_scaled_args *args = (const moe_dequantize_scaled_args *)call->args;
  job->decode = 1, job->dtype = args->dtype;
  job->rows = args->rows, job->columns = args->columns;
  job->block_rows = args->block_rows, job->block_columns = args->block_columns;
  job->plain = (char *)args->plain;
  job->codes = (uint8_t *)(uintptr_t)args->codes, job->scales = (float *)(uintptr_t)args->scales;
  return moe_scaled_list_(ctx, job, args->element, tensors);
}

MOE_FN moe_status moe_scaled_run_(moe_context *ctx, void *state) {
  moe_scaled_job_ *job = (moe_scaled_job_ *)state;
  const uint8_t most = (uint8_t)job->format.max;
  if (job->rows == 0 || job->columns == 0) return MOE_OK;
  job->kernels = moe_kernels_();
  job->numbers = moe_numbers_of_(&job->format, &job->cast);
  job->unit = job->decode || job->given ? 1 : job->block_rows;
  job->in_streams = !job->decode && job->unit == 1;
  if (!job->decode && !job->given) /* a row is read twice, to find its scales and to encode it: the next row */
    job->numbers.prefetch_to += moe_min_(1024, job->columns / MOE_MX_GROUP_);
  job->prefetch = job->numbers.prefetch_to * MOE_MX_GROUP_ * job->size;
  job->nt = moe_scaled_bytes_(job, moe_mul_(job->rows, job->columns)) >= MOE_NT_MIN_BYTES;
  if (job->nt) job->numbers.prefetch_to = 0;
  job->kernels->quant->load_codes[1](&job->largest, &most, 1, &job->format);
  job->span = moe_max_(1, MOE_SCALED_STRIP_ / job->block_columns) * job->block_columns;
  job->spans = moe_ceil_div_(job->columns, job->span);
  const int64_t item = moe_max_(MOE_SCALED_ITEM_, moe_min_(MOE_SCALED_ITEM_MOST_, job->rows * job->columns / 256));
  job->height = moe_max_(1, item / (job->unit * job->span)) * job->unit;
  if (job->decode) job->unit = job->height;
  const moe_work_ work = {moe_ceil_div_(job->rows, job->height) * job->spans, moe_scaled_item_, job,
                          job->in_streams ? moe_scaled_first_reads_ : NULL};
  moe_run_(ctx, &work, 1);
  return MOE_OK;
}

static const moe_op_ moe_quantize_scaled_op_ = {moe_quantize_scaled_check_, NULL, moe_scaled_run_,
                                                moe_quantize_scaled_check_contents_, NULL};
static const moe_op_ moe_dequantize_scaled_op_ = {moe_dequantize_scaled_check_, NULL, moe_scaled_run_, NULL, NULL};
MOE_OP_(moe_quantize_scaled, moe_quantize_scaled_args, moe_quantize_scaled_op_, moe_scaled_job_,
        .dtype = MOE_DTYPE_DEFAULT)
MOE_OP_(moe_dequantize_scaled, moe_dequantize_scaled_args, moe_dequantize_scaled_op_, moe_scaled_job_,
        .dtype = MOE_DTYPE_DEFAULT)

/* ---------------------------------------------------------------------------------------------------------- groups */

/* What both directions check; their tensors. */
MOE_FN moe_status moe_group_list_(moe_context *ctx, moe_group_job_ *job, moe_element element, moe_tensors_ *tensors) {
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_group_element_(ctx, "element", element));
  MOE_TRY(moe_check_enum_(ctx, "scales_type", (int)job->type, MOE_SCALES_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "dtype", (int)job->dtype, MOE_DTYPE_COUNT_));
  MOE_TRY(moe_check_not_negative_(ctx, "rows", job->rows));
  MOE_TRY(moe_check_not_negative_(ctx, "columns", job->columns));
  MOE_TRY(moe_check_positive_(ctx, "group", job->group));
  if (job->zero_points && element != MOE_ELEMENT_UINT4)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "zero_points", "are for UINT4 only");
  job->format = moe_element_format_of_(element);
  job->dtype = moe_or_(job->dtype, MOE_DTYPE_F32);
  job->size = moe_dtype_bytes_(job->dtype);
  job->group = moe_min_(job->group, moe_max_(1, job->columns));
  job->groups = moe_ceil_div_(job->columns, job->group);
  job->code_stride = moe_element_bytes_(job->columns, job->format.bits);
  job->height = moe_max_(1, (1 << 15) / moe_max_(1, job->columns));
  const int64_t plain = moe_mul3_(job->rows, job->columns, job->size), each = moe_scales_bytes_(job->type);
  const int64_t codes = moe_mul_(job->rows, job->code_stride), scales = moe_mul_(job->rows, job->groups);
  const moe_role_ plain_role = job->decode ? MOE_OUTPUT : MOE_INPUT, code_role = job->decode ? MOE_INPUT : MOE_OUTPUT;
  const int in = job->decode || job->given, global_in = in || job->global_given;
  const moe_tensor_ own[] = {
      {"plain", job->plain, plain, job->size, plain_role},
      {"codes", job->codes, codes, 1, code_role},
      {"scales", job->scales, moe_mul_(scales, each), each, in ? MOE_INPUT : MOE_OUTPUT},
      {"global_scale", job->global, 4, 4, global_in ? MOE_INPUT_OPTIONAL : MOE_OUTPUT_OPTIONAL},
      {"zero_points", job->zero_points, scales, 1, in ? MOE_INPUT_OPTIONAL : MOE_OUTPUT_OPTIONAL}};
  return MOE_LIST_(tensors, own);
}

MOE_FN moe_status moe_quantize_group_check_(moe_context *ctx, void *state, const moe_call_ *call,
                                            moe_tensors_ *tensors) {
  moe_group_job_ *job = (moe_group_job_ *)state;
  const moe_quantize_group_args *args = (const moe_quantize_group_args *)call->args;
  MOE_TRY(moe_check_group_element_(ctx, "element", args->element));
  MOE_TRY(moe_check_cast_(ctx, "cast", args->cast));
  MOE_TRY(moe_check_flag_(ctx, "scales_given", args->scales_given));
  MOE_TRY(moe_check_flag_(ctx, "global_scale_given", args->global_scale_given));
  job->dtype = args->dtype, job->type = args->scales_type;
  job->given = args->scales_given, job->global_given = args->global_scale_given;
  job->rows = args->rows, job->columns = args->columns, job->group = args->group;
  job->plain = (char *)(uintptr_t)args->plain, job->codes = args->codes, job->scales = args->scales;
  job->global = args->global_scale, job->zero_points = args->zero_points;
  job->cast = moe_cast_scaled_(args->element, args->cast);
  if (job->global && !job->global_given && job->given)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "global_scale_given", "must be 1 where scales are given");
  if (job->global && !job->global_given && job->type != MOE_SCALES_E4M3FN)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "global_scale", "is computed for E4M3FN scales only");
  return moe_group_list_(ctx, job, args->element, tensors);
}

MOE_FN moe_status moe_dequantize_group_check_(moe_context *ctx, void *state, const moe_call_ *call,
                                              moe_tensors_ *tensors) {
  moe_group_job_ *job = (moe_group_job_ *)state;
  const moe_dequantize_group_args *args = (const moe_dequantize_group_args *)call->args;
  job->decode = 1, job->dtype = args->dtype, job->type = args->scales_type;
  job->rows = args->rows, job->columns = args->columns, job->group = args->group;
  job->plain = (char *)args->plain, job->codes = (uint8_t *)(uintptr_t)args->codes;
  job->scales = (void *)(uintptr_t)args->scales, job->global = (float *)(uintptr_t)args->global_scale;
  job->zero_points = (uint8_t *)(uintptr_t)args->zero_points;
  return moe_group_list_(ctx, job, args->element, tensors);
}

MOE_FN moe_status moe_quantize_group_check_contents_(moe_context *ctx, const void *state) {
  const moe_group_job_ *job = (const moe_group_job_ *)state;
  if (job->global && job->global_given) {
    MOE_TRY(moe_check_finite_(ctx, "global_scale", job->global));
    if (*job->global <= 0) return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "global_scale", "must be above 0");
  }
  if (!job->given) return MOE_OK;
  const int64_t n = job->rows * job->groups;
  MOE_TRY(moe_check_scales_(ctx, "scales", job->type, job->scales, n, 1));
  if (moe_group_any_negative_(job, n))
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "scales", "must not be negative");
  return MOE_OK;
}

MOE_FN moe_status moe_group_run_(moe_context *ctx, void *state) {
  moe_group_job_ *job = (moe_group_job_ *)state;
  const int64_t items = moe_ceil_div_(job->rows, job->height);
  const uint8_t most = (uint8_t)job->format.max;
  job->kernels = moe_kernels_();
  job->kernels->quant->load_codes[moe_wide_(&job->format)](&job->largest, &most, 1, &job->format);
  if (job->format.zero) job->largest = (float)(job->format.zero - 1);
  if (!job->decode && job->global && !job->global_given) {
    MOE_TRY(moe_run_items_(ctx, items, moe_group_amax_item_, job));
    const moe_fpenv_ saved = moe_fpenv_enter_();
    const float amax = moe_castf_scalar((uint32_t)atomic_load_explicit(&job->most, memory_order_relaxed));
    *job->global = amax == 0.0f ? 1.0f : moe_group_at_least_(amax / (job->largest * 448.0f));
    moe_fpenv_restore_(saved);
  }
  return job->columns == 0 ? MOE_OK : moe_run_items_(ctx, items, moe_group_item_, job);
}

static const moe_op_ moe_quantize_group_op_ = {moe_quantize_group_check_, NULL, moe_group_run_,
                                               moe_quantize_group_check_contents_, NULL};
static const moe_op_ moe_dequantize_group_op_ = {moe_dequantize_group_check_, NULL, moe_group_run_, NULL, NULL};
MOE_OP_(moe_quantize_group, moe_quantize_group_args, moe_quantize_group_op_, moe_group_job_, .dtype = MOE_DTYPE_DEFAULT)
MOE_OP_(moe_dequantize_group, moe_dequantize_group_args, moe_dequantize_group_op_, moe_group_job_,
        .dtype = MOE_DTYPE_DEFAULT)

#endif
