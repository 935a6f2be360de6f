/* The operations moe_quantize_mx, moe_quantize_scaled, and back. */
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
  MOE_TRY(moe_check_enum_(ctx, "element", (int)args->element, MOE_ELEMENT_COUNT_));
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
  MOE_TRY(moe_check_enum_(ctx, "element", (int)args->element, MOE_ELEMENT_COUNT_));
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
  return moe_run_items_(ctx, moe_ceil_div_(job->lines, job->line_block) * job->blocks, moe_mx_quantize_item_, job);
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
  return moe_run_items_(ctx, moe_ceil_div_(job->rows, job->height) * job->spans, moe_scaled_item_, job);
}

static const moe_op_ moe_quantize_scaled_op_ = {moe_quantize_scaled_check_, NULL, moe_scaled_run_,
                                                moe_quantize_scaled_check_contents_, NULL};
static const moe_op_ moe_dequantize_scaled_op_ = {moe_dequantize_scaled_check_, NULL, moe_scaled_run_, NULL, NULL};
MOE_OP_(moe_quantize_scaled, moe_quantize_scaled_args, moe_quantize_scaled_op_, moe_scaled_job_,
        .dtype = MOE_DTYPE_DEFAULT)
MOE_OP_(moe_dequantize_scaled, moe_dequantize_scaled_args, moe_dequantize_scaled_op_, moe_scaled_job_,
        .dtype = MOE_DTYPE_DEFAULT)

#endif
