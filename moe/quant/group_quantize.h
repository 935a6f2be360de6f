/* moe_quantize_group and moe_dequantize_group: groups of a row under scales of any type. */
#ifndef MOE_QUANT_GROUP_QUANTIZE_H
#define MOE_QUANT_GROUP_QUANTIZE_H

typedef struct moe_group_job_ {
  const moe_kernels *kernels;
  moe_element_format_ format;
  moe_cast_ cast;
  moe_dtype dtype;
  moe_scales_type type;
  int decode, given, global_given;                                 /* given: scales are */
  int64_t rows, columns, group, groups, size, code_stride, height; /* groups: in a row; height: rows of an item */
  char *plain; /* read or, to decode, written; the others are written, or read */
  uint8_t *codes, *zero_points;
  void *scales;
  float *global;
  float largest;
  atomic_uint most; /* the bits of the largest finite magnitude of all */
} moe_group_job_;

/* At most MOE_STORED_ elements. */
MOE_FN void moe_group_load_(const moe_group_job_ *job, float *x, int64_t row, int64_t column, int64_t n) {
  moe_load_row_(job->kernels->vec, job->dtype, x, job->plain + (row * job->columns + column) * job->size, n);
}

/* The least and the largest of 0 and the finite numbers of columns [from, to); returns whether all are finite. Without
   zero points *high may be the largest magnitude. */
MOE_FN int moe_group_range_(const moe_group_job_ *job, int64_t row, int64_t from, int64_t to, float *low, float *high) {
  float x[MOE_STORED_];
  int finite = 1;
  *low = *high = 0.0f;
  if (!job->zero_points) {
    const char *plain = job->plain + (row * job->columns + from) * job->size;
    const uint32_t amax = job->kernels->quant->magnitude[job->dtype](plain, to - from);
    *high = amax < 0x7f800000u ? moe_castf_scalar(amax) : 0.0f;
    if (amax < 0x7f800000u) return 1;
  }
  for (int64_t at = from, n; at < to; at += n) {
    n = moe_min_(MOE_STORED_, to - at);
    moe_group_load_(job, x, row, at, n);
    for (int64_t i = 0; i < n; i++) {
      if ((moe_casti_scalar(x[i]) & 0x7fffffffu) >= 0x7f800000u) finite = 0;
      else if (x[i] < *low) *low = x[i];
      else if (x[i] > *high) *high = x[i];
    }
  }
  return finite;
}

MOE_FN float moe_group_amax_(float low, float high) { return -low > high ? -low : high; }
MOE_FN float moe_group_at_least_(float x) { return x < 0x1p-126f ? 0x1p-126f : x; }
MOE_FN float moe_group_inverse_(float s) { return s < 0x1p-127f ? 0x1p127f : 1.0f / s; }

MOE_FN void moe_group_amax_item_(void *arg, int64_t item, moe_worker_ *worker) {
  moe_group_job_ *job = (moe_group_job_ *)arg;
  const int64_t end = moe_min_(job->rows, (item + 1) * job->height);
  float low, high, amax = 0.0f;
  (void)worker;
  for (int64_t row = item * job->height; row < end; row++) {
    (void)moe_group_range_(job, row, 0, job->columns, &low, &high);
    low = moe_group_amax_(low, high);
    if (low > amax) amax = low;
  }
  const unsigned bits = moe_casti_scalar(amax);
  unsigned most = atomic_load_explicit(&job->most, memory_order_relaxed);
  while (most < bits && !atomic_compare_exchange_weak(&job->most, &most, bits)) {
  }
}

/* Computes a group's scale and stores it. */
MOE_FN void moe_group_scale_(const moe_group_job_ *job, int64_t at, float low, float high, int lost) {
  float x = moe_group_amax_(low, high);
  if (lost) x = moe_castf_scalar(0x7fc00000u);
  else if (x == 0.0f) x = 1.0f;
  else {
    x = job->zero_points ? high / 15.0f - low / 15.0f : x / job->largest;
    x = moe_group_at_least_(job->global ? x / *job->global : x);
  }
  moe_scale_put_(job->kernels, job->type, job->scales, at, x);
}

/* A group's scale, times the global one. */
MOE_FN float moe_group_scale_at_(const moe_group_job_ *job, int64_t at) {
  const float x = moe_scale_at_(job->kernels, job->type, job->scales, at);
  return job->global ? x * *job->global : x;
}

MOE_FN void moe_group_encode_(const moe_group_job_ *job, int64_t row, int64_t g) {
  const int64_t at = row * job->groups + g, from = g * job->group, to = moe_min_(job->columns, from + job->group);
  float low = 0.0f, high = 0.0f, x[MOE_STORED_];
  uint8_t zero = (uint8_t)job->format.zero;
  if (!job->given) {
    const int finite = moe_group_range_(job, row, from, to, &low, &high);
    moe_group_scale_(job, at, low, high, !finite && job->format.nan == 0);
  }
  const float s = moe_group_scale_at_(job, at), factor = s > 0.0f ? moe_group_inverse_(s) : 0.0f;
  if (job->zero_points && !job->given) {
    low = -low * factor;
    job->kernels->quant->store_codes[1](job->zero_points + at, &low, 1, &job->format, &job->cast);
    job->zero_points[at] &= 15u; /* 0 has a sign */
  }
  if (job->zero_points) zero = job->zero_points[at];
  for (int64_t i = from, n; i < to; i += n) {
    n = moe_min_(MOE_STORED_, to - i);
    moe_group_load_(job, x, row, i, n);
    if (factor > 0.0f) job->kernels->vec->scale_row(x, factor, n);
    else memset(x, 0, sizeof x);
    moe_stored_store_(job->kernels, &job->format, &job->cast, job->codes + row * job->code_stride, i, n, x, zero);
  }
}

MOE_FN void moe_group_decode_(const moe_group_job_ *job, int64_t row, int64_t g) {
  const int64_t at = row * job->groups + g, from = g * job->group, to = moe_min_(job->columns, from + job->group);
  const float s = moe_group_scale_at_(job, at);
  const int zero = job->zero_points ? job->zero_points[at] : job->format.zero;
  float x[MOE_STORED_];
  for (int64_t i = from, n; i < to; i += n) {
    n = moe_min_(MOE_STORED_, to - i);
    moe_stored_load_(job->kernels, &job->format, x, job->codes + row * job->code_stride, i, n, zero);
    job->kernels->vec->scale_row(x, s, n);
    moe_store_row_(job->kernels->vec, job->dtype, job->plain + (row * job->columns + i) * job->size, x, n);
  }
}

MOE_FN void moe_group_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_group_job_ *job = (const moe_group_job_ *)arg;
  const int64_t end = moe_min_(job->rows, (item + 1) * job->height);
  (void)worker;
  for (int64_t row = item * job->height; row < end; row++)
    for (int64_t g = 0; g < job->groups; g++)
      if (job->decode) moe_group_decode_(job, row, g);
      else moe_group_encode_(job, row, g);
}

/* Whether one of n scales is. */
MOE_FN int moe_group_any_negative_(const moe_group_job_ *job, int64_t n) {
  const moe_kernels *kernels = moe_kernels_();
  for (int64_t i = 0; i < n; i++)
    if (moe_scale_at_(kernels, job->type, job->scales, i) < 0) return 1;
  return 0;
}

#endif
