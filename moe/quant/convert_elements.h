/* moe_<element>_from_f32, moe_<element>_to_f32: arrays of float to codes and back; and of E8M0 bytes. */
#ifndef MOE_QUANT_CONVERT_ELEMENTS_H
#define MOE_QUANT_CONVERT_ELEMENTS_H

MOE_FN moe_cast_ moe_cast_of_(moe_element element, uint32_t flags) {
  const moe_element_format_ f = moe_element_format_of_(element);
  moe_cast_ cast = {flags & MOE_CAST_HALF_AWAY ? 1u : 0u, f.max, f.max, flags & MOE_CAST_HALF_TO_ZERO ? 1u : 0u};
  if (!(flags & MOE_CAST_SATURATE) && f.nan) cast.overflow = cast.infinity = f.infinity ? f.infinity : f.nan;
  return cast;
}

/* Under scales only finite floats saturate: infinity has the code it has without saturating. */
MOE_FN moe_cast_ moe_cast_scaled_(moe_element element, uint32_t flags) {
  moe_cast_ cast = moe_cast_of_(element, flags);
  cast.infinity = moe_cast_of_(element, 0).infinity;
  return cast;
}

MOE_FN moe_status moe_check_cast_(moe_context *ctx, const char *name, uint32_t cast) {
  if (cast & ~(uint32_t)(MOE_CAST_SATURATE | MOE_CAST_HALF_AWAY | MOE_CAST_HALF_TO_ZERO))
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, name, "has unknown bits");
  return cast & MOE_CAST_HALF_AWAY && cast & MOE_CAST_HALF_TO_ZERO
             ? moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, name, "rounds ties both ways")
             : MOE_OK;
}

/* One conversion of n elements, a chunk at a time: from float or, to decode, from codes. */
typedef struct moe_element_job_ {
  const moe_kernels *kernels;
  void (*chunk)(void *job, int64_t item, moe_worker_ *worker); /* what a work item does */
  moe_element_format_ format;
  moe_cast_ cast;
  int64_t n;
  int decode;
  const float *from;
  uint8_t *to_codes;
  const uint8_t *codes;
  float *to;
} moe_element_job_;

enum { MOE_ELEMENT_CHUNK_ = 1 << 16 };

MOE_FN void moe_element_chunk_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_element_job_ *job = (const moe_element_job_ *)arg;
  const int64_t at = item * MOE_ELEMENT_CHUNK_, n = moe_min_(MOE_ELEMENT_CHUNK_, job->n - at);
  const int64_t code = moe_element_bytes_(at, job->format.bits);
  (void)worker;
  if (job->decode)
    job->kernels->quant->load_codes[moe_wide_(&job->format)](job->to + at, job->codes + code, n, &job->format);
  else
    job->kernels->quant->store_codes[moe_wide_(&job->format)](job->to_codes + code, job->from + at, n, &job->format,
                                                              &job->cast);
}

MOE_FN void moe_e8m0_chunk_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_element_job_ *job = (const moe_element_job_ *)arg;
  const int64_t end = moe_min_(job->n, (item + 1) * MOE_ELEMENT_CHUNK_);
  (void)worker;
  for (int64_t i = item * MOE_ELEMENT_CHUNK_; i < end; i++) {
    if (job->decode) job->to[i] = moe_castf_scalar(moe_e8m0_bits_(job->codes[i]));
    else job->to_codes[i] = (uint8_t)(moe_casti_scalar(job->from[i]) >> 23 & 255u);
  }
}

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
