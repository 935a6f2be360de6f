/* Conversions and activations over arrays: the kernels' own, for users and tests. */
#ifndef MOE_LAYER_CONVERT_H
#define MOE_LAYER_CONVERT_H

typedef struct moe_convert_ {
  char *dst;
  const char *src;
  int64_t n;
  moe_dtype to, from; /* one of the two is f32 */
} moe_convert_;

enum { MOE_CONVERT_PIECE_ = 1 << 16 };

typedef struct moe_convert_job_ {
  moe_kernels kernels;
  moe_convert_ convert;
} moe_convert_job_;

MOE_FN void moe_convert_piece_(void *arg, int64_t item, moe_turn_ *turn) {
  const moe_convert_job_ *job = (const moe_convert_job_ *)arg;
  const moe_convert_ *c = &job->convert;
  const int64_t at = item * MOE_CONVERT_PIECE_, n = moe_min_(MOE_CONVERT_PIECE_, c->n - at);
  char *dst = c->dst + at * moe_dtype_bytes_(c->to);
  const char *src = c->src + at * moe_dtype_bytes_(c->from);
  (void)turn;
  if (c->from == MOE_DTYPE_F32) {
    moe_store_row_(&job->kernels, c->to, dst, (const float *)(const void *)src, n);
  } else {
    float *out = (float *)(void *)dst;
    moe_load_row_(&job->kernels, c->from, out, src, n);
    moe_store_row_(&job->kernels, MOE_DTYPE_F32, out, out, n); /* NaN becomes the canonical one */
  }
}

MOE_FN moe_status moe_convert_any_(moe_context *ctx, const moe_convert_ *convert) {
  const int64_t to = moe_dtype_bytes_(convert->to), from = moe_dtype_bytes_(convert->from);
  MOE_TRY(moe_check_context_(ctx));
  if (convert->n < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "n", "is negative");
  const moe_tensor_ tensor[] = {
      {"src", convert->src, moe_mul_(convert->n, from), from, MOE_INPUT},
      {"dst", convert->dst, moe_mul_(convert->n, to), to, MOE_OUTPUT},
  };
  if (convert->n > 0) MOE_TRY(moe_check_tensors_(ctx, tensor, 2, 0));
  moe_convert_job_ job;
  job.kernels = moe_kernels_();
  job.convert = *convert;
  const moe_work_ work = {moe_ceil_div_(convert->n, MOE_CONVERT_PIECE_), moe_convert_piece_, &job, NULL};
  moe_run_(ctx, &work, 1);
  return moe_succeed_(ctx);
}

#define MOE_DEFINE_CONVERT_(name, type, NAME)                                                          \
  moe_status moe_##name##_from_f32(moe_context *ctx, type *dst, const float *src, int64_t n) {         \
    const moe_convert_ convert = {(char *)dst, (const char *)src, n, MOE_DTYPE_##NAME, MOE_DTYPE_F32}; \
    return moe_convert_any_(ctx, &convert);                                                            \
  }                                                                                                    \
  moe_status moe_##name##_to_f32(moe_context *ctx, float *dst, const type *src, int64_t n) {           \
    const moe_convert_ convert = {(char *)dst, (const char *)src, n, MOE_DTYPE_F32, MOE_DTYPE_##NAME}; \
    return moe_convert_any_(ctx, &convert);                                                            \
  }
MOE_DTYPE_LIST(MOE_DEFINE_CONVERT_)
#undef MOE_DEFINE_CONVERT_

#endif
