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

#endif
