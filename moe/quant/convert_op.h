/* The operations moe_<dtype>_from_f32, moe_<element>_from_f32, moe_e8m0_from_f32, and back. */
#ifndef MOE_QUANT_CONVERT_OP_H
#define MOE_QUANT_CONVERT_OP_H

/* ---------------------------------------------------------------------------------------------------- storage types */

MOE_FN moe_status moe_convert_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  const moe_convert_job_ *job = (const moe_convert_job_ *)state;
  const int64_t to = moe_dtype_bytes_(job->to), from = moe_dtype_bytes_(job->from);
  const moe_tensor_ own[] = {{"src", job->src, moe_mul_(job->n, from), from, MOE_INPUT},
                             {"dst", job->dst, moe_mul_(job->n, to), to, MOE_OUTPUT}};
  (void)call;
  MOE_TRY(moe_check_context_(ctx));
  if (job->n < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "n", "is negative");
  return job->n > 0 ? MOE_LIST_(tensors, own) : MOE_OK;
}

MOE_FN moe_status moe_convert_run_(moe_context *ctx, void *state) {
  moe_convert_job_ *job = (moe_convert_job_ *)state;
  job->kernels = moe_kernels_();
  job->nt = job->n * moe_dtype_bytes_(job->to) >= MOE_NT_MIN_BYTES;
  return moe_run_items_(ctx, moe_ceil_div_(job->n, MOE_CONVERT_ITEM_), moe_convert_item_, job);
}

static const moe_op_ moe_convert_op_ = {moe_convert_check_, NULL, moe_convert_run_, NULL, NULL};

#define MOE_DEFINE_CONVERT_(name, type, NAME)                                                             \
  moe_status moe_##name##_from_f32(moe_context *ctx, type *dst, const float *src, int64_t n) {            \
    moe_convert_job_ job = {(char *)dst, (const char *)src, n, MOE_DTYPE_##NAME, MOE_DTYPE_F32, NULL, 0}; \
    return moe_op_prepared_(&moe_convert_op_, &job, ctx);                                                 \
  }                                                                                                       \
  moe_status moe_##name##_to_f32(moe_context *ctx, float *dst, const type *src, int64_t n) {              \
    moe_convert_job_ job = {(char *)dst, (const char *)src, n, MOE_DTYPE_F32, MOE_DTYPE_##NAME, NULL, 0}; \
    return moe_op_prepared_(&moe_convert_op_, &job, ctx);                                                 \
  }
MOE_DTYPE_LIST(MOE_DEFINE_CONVERT_)
#undef MOE_DEFINE_CONVERT_

/* --------------------------------------------------------------------------------------------------------- elements */

MOE_FN moe_status moe_element_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  const moe_element_job_ *job = (const moe_element_job_ *)state;
  const int64_t floats = moe_mul_(job->n, 4), codes = moe_element_bytes_(job->n, job->format.bits);
  const moe_tensor_ to_float[] = {{"src", job->codes, codes, 1, MOE_INPUT}, {"dst", job->to, floats, 4, MOE_OUTPUT}};
  const moe_tensor_ from_float[] = {{"src", job->from, floats, 4, MOE_INPUT},
                                    {"dst", job->to_codes, codes, 1, MOE_OUTPUT}};
  (void)call;
  MOE_TRY(moe_check_context_(ctx));
  if (job->n < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "n", "is negative");
  if (job->n == 0) return MOE_OK;
  return job->decode ? MOE_LIST_(tensors, to_float) : MOE_LIST_(tensors, from_float);
}

MOE_FN moe_status moe_element_run_(moe_context *ctx, void *state) {
  moe_element_job_ *job = (moe_element_job_ *)state;
  job->kernels = moe_kernels_();
  return moe_run_items_(ctx, moe_ceil_div_(job->n, MOE_ELEMENT_CHUNK_), job->chunk, job);
}

static const moe_op_ moe_element_op_ = {moe_element_check_, NULL, moe_element_run_, NULL, NULL};

MOE_FN moe_status moe_element_from_f32_(moe_context *ctx, moe_element element, uint8_t *dst, const float *src,
                                        int64_t n, uint32_t cast) {
  moe_element_job_ job = {.chunk = moe_element_chunk_, .n = n, .from = src, .to_codes = dst};
  MOE_TRY(moe_check_cast_(ctx, "cast", cast));
  job.cast = moe_cast_of_(element, cast), job.format = moe_element_format_of_(element);
  return moe_op_prepared_(&moe_element_op_, &job, ctx);
}

MOE_FN moe_status moe_element_to_f32_(moe_context *ctx, moe_element element, float *dst, const uint8_t *src,
                                      int64_t n) {
  moe_element_job_ job = {.chunk = moe_element_chunk_, .n = n, .codes = src, .to = dst, .decode = 1};
  job.format = moe_element_format_of_(element);
  return moe_op_prepared_(&moe_element_op_, &job, ctx);
}

#define MOE_DEFINE_ELEMENT_(name, NAME, bits, fraction, bias, max, infinity, nan)                                \
  moe_status moe_##name##_from_f32(moe_context *ctx, uint8_t *dst, const float *src, int64_t n, uint32_t cast) { \
    return moe_element_from_f32_(ctx, MOE_ELEMENT_##NAME, dst, src, n, cast);                                    \
  }                                                                                                              \
  moe_status moe_##name##_to_f32(moe_context *ctx, float *dst, const uint8_t *src, int64_t n) {                  \
    return moe_element_to_f32_(ctx, MOE_ELEMENT_##NAME, dst, src, n);                                            \
  }
MOE_ELEMENT_LIST(MOE_DEFINE_ELEMENT_)
#undef MOE_DEFINE_ELEMENT_

moe_status moe_e8m0_to_f32(moe_context *ctx, float *dst, const uint8_t *src, int64_t n) {
  moe_element_job_ job = {
      .chunk = moe_e8m0_chunk_, .format = {.bits = 8}, .n = n, .codes = src, .to = dst, .decode = 1};
  return moe_op_prepared_(&moe_element_op_, &job, ctx);
}

moe_status moe_e8m0_from_f32(moe_context *ctx, uint8_t *dst, const float *src, int64_t n) {
  moe_element_job_ job = {.chunk = moe_e8m0_chunk_, .format = {.bits = 8}, .n = n, .from = src, .to_codes = dst};
  return moe_op_prepared_(&moe_element_op_, &job, ctx);
}

#endif
