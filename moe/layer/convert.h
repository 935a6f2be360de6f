/* Conversions and activations over arrays: the kernels' own, for users and tests. */
#ifndef MOE_LAYER_CONVERT_H
#define MOE_LAYER_CONVERT_H

typedef struct moe_convert_ {
  char *dst;
  const char *src;
  int64_t n;
  moe_dtype to, from; /* one of the two is f32 */
} moe_convert_;

enum {
  MOE_CONVERT_ITEM_ = 1 << 16,                               /* elements */
  MOE_CONVERT_STRAND_ = MOE_CONVERT_ITEM_ / MOE_STRANDS_,    /* of an item, one of the places it is read at in turn */
  MOE_CONVERT_PIECE_ = MOE_PAST_PIECE_ / (int)sizeof(float), /* of a strand, in its turn */
  MOE_CONVERT_STEP_ = 256                                    /* between what is fetched */
};

typedef struct moe_convert_job_ {
  moe_kernels kernels;
  moe_convert_ convert;
  int past; /* see MOE_PAST_LEAST */
} moe_convert_job_;

MOE_FN void moe_convert_step_(const moe_convert_job_ *job, char *dst, const char *src, int64_t n) {
  const moe_convert_ *c = &job->convert;
  float *out = (float *)(void *)dst;
  if (c->from == MOE_DTYPE_F32) {
    moe_store_row_(&job->kernels, c->to, dst, (const float *)(const void *)src, n);
    return;
  }
  moe_load_row_(&job->kernels, c->from, out, src, n);
  moe_store_row_(&job->kernels, MOE_DTYPE_F32, out, out, n); /* NaN becomes the canonical one */
}

/* Elements [at, at+n), the lines of `fetch` being fetched beside. */
MOE_FN void moe_convert_piece_(const moe_convert_job_ *job, int64_t at, int64_t n, const moe_fetch_ *fetch) {
  const moe_convert_ *c = &job->convert;
  const int64_t to = moe_dtype_bytes_(c->to), from = moe_dtype_bytes_(c->from);
  MOE_LINE_ALIGNED char piece[MOE_PAST_PIECE_];
  moe_fetch_at_ ahead = moe_fetch_begin_(fetch);
  char *dst = job->past ? piece : c->dst + at * to;
  for (int64_t i = 0; i < n; i += MOE_CONVERT_STEP_) {
    const int64_t now = moe_min_(MOE_CONVERT_STEP_, n - i);
    for (int64_t line = 0; line < now * from; line += 64) moe_fetch_next_(&ahead);
    moe_convert_step_(job, dst + i * to, c->src + (at + i) * from, now);
  }
  if (job->past) job->kernels.copy_past(c->dst + at * to, piece, n * to);
}

MOE_FN void moe_convert_item_(void *arg, int64_t item, moe_turn_ *turn) {
  const moe_convert_job_ *job = (const moe_convert_job_ *)arg;
  const int64_t size = moe_dtype_bytes_(job->convert.from), apart = MOE_CONVERT_STRAND_ * size;
  const int64_t begin = item * MOE_CONVERT_ITEM_, end = moe_min_(begin + MOE_CONVERT_ITEM_, job->convert.n);
  (void)turn;
  for (int64_t i = 0; i < MOE_CONVERT_STRAND_; i += MOE_CONVERT_PIECE_)
    for (int64_t strand = 0, at = begin + i; strand < MOE_STRANDS_ && at < end; strand++, at += MOE_CONVERT_STRAND_) {
      const int64_t next = (begin + i + MOE_CONVERT_PIECE_) * size, share = MOE_CONVERT_PIECE_ * size / MOE_STRANDS_;
      const moe_fetch_ fetch = moe_fetch_strands_(job->convert.src + next + strand * share, apart);
      moe_convert_piece_(job, at, moe_min_(MOE_CONVERT_PIECE_, end - at), &fetch);
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
  job.past = convert->n * to >= MOE_PAST_LEAST;
  const moe_work_ work = {moe_ceil_div_(convert->n, MOE_CONVERT_ITEM_), moe_convert_item_, &job, NULL};
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
