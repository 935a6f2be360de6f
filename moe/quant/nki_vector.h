/* moe_nki_vector_convert: biases and scales of Trainium's expert weights, between logical and device order. */
#ifndef MOE_QUANT_NKI_VECTOR_H
#define MOE_QUANT_NKI_VECTOR_H

typedef struct moe_nki_vector_job_ {
  const moe_nki_vector_args *args;
  int64_t size, tiles;
} moe_nki_vector_job_;

MOE_FN int64_t moe_nki_vector_plain_(const moe_nki_vector_args *a) {
  return moe_mul3_(a->E, a->kind == MOE_NKI_GATE_UP_BIAS ? 2 : 1, a->length);
}

MOE_FN int64_t moe_nki_vector_device_(const moe_nki_vector_args *a) {
  if (a->kind == MOE_NKI_DOWN_SCALE) return moe_nki_vector_plain_(a);
  const int64_t tiles = moe_ceil_div_(a->length, MOE_MX_TILE_);
  return moe_mul4_(a->E, moe_nki_partitions_(a->length), 2, moe_mul_(tiles, MOE_MX_WORD_));
}

/* Of element k of an expert's part: its index in the expert's device tensor. */
MOE_FN int64_t moe_nki_vector_at_(const moe_nki_vector_job_ *job, int64_t part, int64_t k) {
  const int64_t length = job->args->length;
  if (job->args->kind == MOE_NKI_DOWN_SCALE) return k % 128 * (length / 128) + k / 128;
  const int64_t t = k / MOE_MX_TILE_, m = k % MOE_MX_TILE_;
  const int64_t quarter = moe_min_(MOE_MX_TILE_, length - t * MOE_MX_TILE_) / MOE_MX_WORD_;
  return ((m % quarter * 2 + part) * job->tiles + t) * MOE_MX_WORD_ + m / quarter;
}

MOE_FN void moe_nki_vector_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_nki_vector_job_ *job = (const moe_nki_vector_job_ *)arg;
  const moe_nki_vector_args *a = job->args;
  const int64_t parts = a->kind == MOE_NKI_GATE_UP_BIAS ? 2 : 1, device = moe_nki_vector_device_(a) / a->E;
  (void)worker;
  if (a->to_nki) memset((char *)a->out + item * device * job->size, 0, (size_t)(device * job->size));
  for (int64_t part = 0; part < parts; part++)
    for (int64_t k = 0; k < a->length; k++) {
      const int64_t plain = ((item * parts + part) * a->length + k) * job->size;
      const int64_t nki = (item * device + moe_nki_vector_at_(job, part, k)) * job->size;
      const int64_t to = a->to_nki ? nki : plain, from = a->to_nki ? plain : nki;
      memcpy((char *)a->out + to, (const char *)a->in + from, (size_t)job->size);
    }
}

MOE_FN moe_status moe_nki_vector_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_nki_vector_job_ *job = (moe_nki_vector_job_ *)state;
  const moe_nki_vector_args *a = job->args = (const moe_nki_vector_args *)call->args;
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_enum_(ctx, "kind", (int)a->kind, MOE_NKI_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "dtype", (int)a->dtype, MOE_DTYPE_COUNT_));
  if (a->dtype == MOE_DTYPE_DEFAULT) return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "dtype", "must be given");
  MOE_TRY(moe_check_flag_(ctx, "to_nki", a->to_nki));
  MOE_TRY(moe_check_positive_(ctx, "E", a->E));
  MOE_TRY(moe_check_positive_(ctx, "length", a->length));
  if (a->kind == MOE_NKI_GATE_UP_BIAS && a->length % MOE_MX_WORD_ != 0)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "length", "must be a multiple of 4 for a bias");
  if (a->kind == MOE_NKI_DOWN_SCALE && a->length % 128 != 0)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "length", "must be a multiple of 128 for a scale");
  job->size = moe_dtype_bytes_(a->dtype);
  job->tiles = moe_ceil_div_(a->length, MOE_MX_TILE_);
  const int64_t plain = moe_mul_(moe_nki_vector_plain_(a), job->size);
  const int64_t device = moe_mul_(moe_nki_vector_device_(a), job->size);
  const moe_tensor_ own[] = {{"in", a->in, a->to_nki ? plain : device, job->size, MOE_INPUT},
                             {"out", a->out, a->to_nki ? device : plain, job->size, MOE_OUTPUT}};
  return MOE_LIST_(tensors, own);
}

MOE_FN moe_status moe_nki_vector_answer_(moe_context *ctx, const moe_tensors_ *tensors, void *answer) {
  size_t *const *bytes = (size_t *const *)answer; /* in, out */
  if (!bytes[0]) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "bytes_in", "is NULL");
  if (!bytes[1]) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "bytes_out", "is NULL");
  for (int i = 0; i < 2; i++) *bytes[i] = (size_t)tensors->tensor[i].bytes;
  return MOE_OK;
}

MOE_FN moe_status moe_nki_vector_run_(moe_context *ctx, void *state) {
  return moe_run_items_(ctx, ((const moe_nki_vector_job_ *)state)->args->E, moe_nki_vector_item_, state);
}

static const moe_op_ moe_nki_vector_op_ = {moe_nki_vector_check_, NULL, moe_nki_vector_run_, NULL,
                                           moe_nki_vector_answer_};
MOE_OP_(moe_nki_vector_convert, moe_nki_vector_args, moe_nki_vector_op_, moe_nki_vector_job_,
        .dtype = MOE_DTYPE_DEFAULT)
moe_status moe_nki_vector_size(moe_context *ctx, const moe_nki_vector_args *args, size_t *bytes_in, size_t *bytes_out) {
  size_t *bytes[] = {bytes_in, bytes_out};
  MOE_OP_BODY_(moe_nki_vector_op_, moe_nki_vector_job_, .args = args, .query = 1, .answer = bytes)
}

#endif
