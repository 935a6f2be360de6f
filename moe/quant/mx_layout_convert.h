/* moe_mx_layout_convert: any layout to any other, a group of 32 codes at a time; and their permutations. */
#ifndef MOE_QUANT_MX_LAYOUT_CONVERT_H
#define MOE_QUANT_MX_LAYOUT_CONVERT_H

enum { MOE_MX_BLOCK_COLUMNS_ = 64, MOE_MX_ZERO_CHUNK_ = 1 << 16 };

typedef struct moe_mx_job_ {
  const moe_mx_layout_args *args;
  moe_mx_tensor_ in, out;
  int64_t blocks; /* of columns, per part */
} moe_mx_job_;

/* All groups of a block of columns: no two items write to the same byte, word or row. */
MOE_FN void moe_mx_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_mx_job_ *job = (const moe_mx_job_ *)arg;
  const moe_mx_tensor_ *in = &job->in, *out = &job->out;
  const moe_mx_layout order = in->logical ? out->layout : in->layout;
  int64_t element[MOE_MX_GROUP_];
  uint8_t code[MOE_MX_GROUP_];
  moe_mx_at_ at = {item / job->blocks / in->parts, item / job->blocks % in->parts, 0, 0, element};
  const int64_t first = item % job->blocks * MOE_MX_BLOCK_COLUMNS_;
  const int64_t end = moe_min_(in->columns, first + MOE_MX_BLOCK_COLUMNS_);
  (void)worker;
  for (at.group = 0; at.group < in->groups; at.group++) {
    const int64_t start = at.group * MOE_MX_GROUP_, n = moe_min_(MOE_MX_GROUP_, in->K - start);
    if (in->logical || out->logical)
      for (int64_t j = 0; j < n; j++) element[j] = moe_mx_element_(order, in->parts, in->K, start + j);
    for (at.column = first; at.column < end; at.column++) {
      moe_mx_load_(in, &at, n, code);
      moe_mx_store_(out, &at, n, code);
      *moe_mx_scale_at_(out, &at) = *moe_mx_scale_at_(in, &at);
    }
  }
}

typedef struct moe_zero_job_ {
  uint8_t *memory;
  int64_t bytes;
} moe_zero_job_;

MOE_FN void moe_zero_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_zero_job_ *job = (const moe_zero_job_ *)arg;
  const int64_t at = item * MOE_MX_ZERO_CHUNK_;
  (void)worker;
  memset(job->memory + at, 0, (size_t)moe_min_(MOE_MX_ZERO_CHUNK_, job->bytes - at));
}

typedef struct moe_permutation_ {
  moe_mx_layout layout;
  int32_t parts;
  int64_t K, *index;
} moe_permutation_;

MOE_FN moe_status moe_permutation_run_(moe_context *ctx, void *state) {
  const moe_permutation_ *p = (const moe_permutation_ *)state;
  (void)ctx;
  for (int64_t n = 0; n < p->K; n++) p->index[n] = moe_mx_element_(p->layout, p->parts, p->K, n);
  return MOE_OK;
}

#endif
