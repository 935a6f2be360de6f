/* moe_<dtype>_from_f32, moe_<dtype>_to_f32: arrays of a storage type to and from float. */
#ifndef MOE_QUANT_CONVERT_DTYPES_H
#define MOE_QUANT_CONVERT_DTYPES_H

typedef struct moe_convert_job_ {
  char *dst;
  const char *src;
  int64_t n;
  moe_dtype to, from; /* one of the two is f32 */
  const moe_kernels *kernels;
  int nt; /* see MOE_NT_MIN_BYTES */
} moe_convert_job_;

/* Elements of an item, of each read stream in it, of a chunk of a stream, and from prefetch to prefetch. */
enum {
  MOE_CONVERT_ITEM_ = 1 << 16,
  MOE_CONVERT_STREAM_ = MOE_CONVERT_ITEM_ / MOE_READ_STREAMS_,
  MOE_CONVERT_CHUNK_ = MOE_NT_CHUNK_ / (int)sizeof(float),
  MOE_CONVERT_STEP_ = 256
};

MOE_FN void moe_convert_step_(const moe_convert_job_ *job, char *dst, const char *src, int64_t n) {
  float *out = (float *)(void *)dst;
  if (job->from == MOE_DTYPE_F32) {
    moe_store_row_(job->kernels->vec, job->to, dst, (const float *)(const void *)src, n);
    return;
  }
  moe_load_row_(job->kernels->vec, job->from, out, src, n);
  moe_store_row_(job->kernels->vec, MOE_DTYPE_F32, out, out, n); /* NaN becomes the canonical one */
}

/* Elements [at, at+n); meanwhile the lines of `fetch` are prefetched. */
MOE_FN void moe_convert_chunk_(const moe_convert_job_ *job, int64_t at, int64_t n, const moe_prefetch_block_ *fetch) {
  const int64_t to = moe_dtype_bytes_(job->to), from = moe_dtype_bytes_(job->from);
  MOE_LINE_ALIGNED char chunk[MOE_NT_CHUNK_];
  moe_prefetch_at_ prefetch = moe_prefetch_begin_(fetch);
  char *dst = job->nt ? chunk : job->dst + at * to;
  for (int64_t i = 0; i < n; i += MOE_CONVERT_STEP_) {
    const int64_t now = moe_min_(MOE_CONVERT_STEP_, n - i);
    for (int64_t line = 0; line < now * from; line += 64) moe_prefetch_next_(&prefetch);
    moe_convert_step_(job, dst + i * to, job->src + (at + i) * from, now);
  }
  if (job->nt) job->kernels->vec->copy_nt(job->dst + at * to, chunk, n * to);
}

/* Chunks of all streams alternate, and each prefetches a share of the next chunks. */
MOE_FN void moe_convert_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_convert_job_ *job = (const moe_convert_job_ *)arg;
  const int64_t size = moe_dtype_bytes_(job->from), apart = MOE_CONVERT_STREAM_ * size;
  const int64_t share = MOE_CONVERT_CHUNK_ * size / MOE_READ_STREAMS_;
  const int64_t begin = item * MOE_CONVERT_ITEM_, end = moe_min_(begin + MOE_CONVERT_ITEM_, job->n);
  (void)worker;
  for (int64_t i = begin; i < begin + MOE_CONVERT_STREAM_; i += MOE_CONVERT_CHUNK_)
    for (int64_t stream = 0, at = i; stream < MOE_READ_STREAMS_ && at < end; stream++, at += MOE_CONVERT_STREAM_) {
      const char *next = job->src + (i + MOE_CONVERT_CHUNK_) * size + stream * share;
      const moe_prefetch_block_ fetch = moe_prefetch_streams_(next, apart);
      moe_convert_chunk_(job, at, moe_min_(MOE_CONVERT_CHUNK_, end - at), &fetch);
    }
}

#endif
