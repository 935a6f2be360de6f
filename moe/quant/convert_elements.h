/* moe_<element>_from_f32, moe_<element>_to_f32: arrays of float to codes and back; and of E8M0 bytes. */
#ifndef MOE_QUANT_CONVERT_ELEMENTS_H
#define MOE_QUANT_CONVERT_ELEMENTS_H

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
  (void)worker;
  if (job->decode) moe_stored_load_(job->kernels, &job->format, job->to + at, job->codes, at, n, 0);
  else moe_stored_store_(job->kernels, &job->format, &job->cast, job->to_codes, at, n, job->from + at, 0);
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

#endif
