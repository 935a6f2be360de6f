/* Operands of products rounded to MX: encoded in groups of 32 along the contraction axis, and decoded again. */
#ifndef MOE_QUANT_MX_ROUND_H
#define MOE_QUANT_MX_ROUND_H

typedef struct moe_mx_round_ {
  int enabled;
  moe_numbers_ numbers;
  moe_cast_ cast;
  float scale; /* of all elements; 0: E8M0 scales of groups, by the rule */
} moe_mx_round_;

/* One group of at most 32. */
MOE_FN void moe_mx_round_group_(const moe_kernels *kernels, const moe_mx_round_ *r, float *x, int64_t n) {
  uint8_t code[MOE_MX_GROUP_];
  const moe_element_format_ *format = &r->numbers.format;
  if (r->scale > 0) {
    kernels->vec->scale_row(x, 1.0f / r->scale, n);
    kernels->quant->store_codes[1](code, x, n, format, &r->cast);
    kernels->quant->load_codes[1](x, code, n, format);
    kernels->vec->scale_row(x, r->scale, n);
    return;
  }
  const uint32_t byte = moe_mx_encode_(kernels, format, &r->numbers.rule, &r->cast, x, n, code);
  moe_mx_decode_(kernels, format, code, byte, x, n);
}

MOE_FN void moe_mx_round_row_(const moe_kernels *kernels, const moe_mx_round_ *r, float *x, int64_t n) {
  for (int64_t i = 0; i < n; i += MOE_MX_GROUP_) moe_mx_round_group_(kernels, r, x + i, moe_min_(MOE_MX_GROUP_, n - i));
}

/* Rounds to dtype again: a number rounded to MX need not be one at both ends of a range that is less than a float's. */
MOE_FN void moe_mx_fit_(const moe_kernels *kernels, moe_dtype dtype, float *x, int64_t n) {
  float fitted[MOE_NR]; /* room for any type */
  const int fits = dtype == MOE_DTYPE_F32 || dtype == MOE_DTYPE_BF16;
  for (int64_t i = 0; i < n && !fits; i += MOE_NR) {
    moe_store_row_(kernels->vec, dtype, fitted, x + i, moe_min_(MOE_NR, n - i));
    moe_load_row_(kernels->vec, dtype, x + i, fitted, moe_min_(MOE_NR, n - i));
  }
}

/* Rounds the columns of a panel of k <= 32 rows, a group each. The panel has room for an even k. */
MOE_FN void moe_mx_round_panel_(const moe_kernels *kernels, const moe_mx_round_ *r, moe_dtype dtype, float *panel,
                                int64_t k) {
  enum { SOME = 16 }; /* columns at a time: the stack is small */
  float columns[SOME * MOE_MX_GROUP_];
  const int64_t pitch = MOE_MX_GROUP_ * sizeof *columns;
  const int by_group = r->scale > 0 || !kernels->quant->round_panel(panel, k, &r->numbers);
  for (int64_t at = 0; at < MOE_NR && by_group; at += SOME) {
    kernels->vec->transpose_words(columns, pitch, panel + at, MOE_NR_BYTES_, k, SOME);
    for (int64_t j = 0; j < SOME; j++) moe_mx_round_group_(kernels, r, columns + j * MOE_MX_GROUP_, k);
    kernels->vec->transpose_words(panel + at, MOE_NR_BYTES_, columns, pitch, SOME, k);
  }
  moe_panel_even_(k, (char *)panel);
  moe_mx_fit_(kernels, dtype, panel, k * MOE_NR);
}

/* Packs k rows of n <= 64 elements into a panel of either kind, and rounds its columns. */
MOE_FN void moe_mx_round_rows_(const moe_kernels *kernels, const moe_mx_round_ *r, const moe_rows_ *rows,
                               moe_dtype dtype, int64_t k, int64_t n, moe_panel_kind_ kind, char *panel) {
  float group[MOE_MX_GROUP_ * MOE_NR];
  for (int64_t at = 0; at < k; at += MOE_MX_GROUP_) {
    const int64_t count = moe_min_(MOE_MX_GROUP_, k - at);
    char *to = panel + moe_panel_bytes_(kind, at);
    const moe_rows_ part = moe_rows_from_(rows, at);
    kernels->gemm->pack_rows[MOE_PANEL_F32][dtype](group, 0, MOE_NR, &part, count, n);
    moe_mx_round_panel_(kernels, r, dtype, group, count);
    if (kind == MOE_PANEL_PAIRS) kernels->gemm->pair_panel(to, group, count);
    else memcpy(to, group, (size_t)moe_panel_bytes_(kind, count));
  }
}

/* -------------------------------------------------------------------------------------------------------- operand B */

/* Another B, whose columns are rounded. */
typedef struct moe_rounded_ {
  const moe_mx_round_ *round;
  void (*b)(const void *arg, int64_t expert, moe_b_ *b);
  const void *arg;
  int64_t segment; /* after so many elements of the contraction a new group begins */
  moe_dtype dtype; /* of the elements */
} moe_rounded_;

/* A panel of either kind that is being filled, and the current group. A pair may be of two groups: if `open` is 1, its
   second row is missing, and its first row is rows[0]. */
typedef struct moe_rounded_panel_ {
  moe_panel_kind_ kind;
  char *to; /* its next row, or pair */
  int odd;  /* k is, of the whole panel */
  int open;
  float rows[(1 + MOE_MX_GROUP_ + 1) * MOE_NR]; /* the group is from the second on */
} moe_rounded_panel_;

/* Appends rows [first, first+count) of the group; if they are the last, an odd k is rounded up. */
MOE_FN void moe_rounded_append_(const moe_kernels *kernels, moe_rounded_panel_ *panel, int64_t first, int64_t count,
                                int last) {
  float *row = panel->rows + (1 + first - panel->open) * MOE_NR;
  const int pairs = panel->kind == MOE_PANEL_PAIRS;
  const int64_t n = count + panel->open, now = pairs && !last ? n - n % 2 : n, up = last && panel->odd;
  if (up) memset(row + n * MOE_NR, 0, MOE_NR_BYTES_);
  if (pairs) kernels->gemm->pair_panel(panel->to, row, now);
  else memcpy(panel->to, row, (size_t)((n + up) * MOE_NR_BYTES_));
  panel->to += now * MOE_NR_BYTES_ / (pairs ? 2 : 1);
  panel->open = n > now;
  if (panel->open) memcpy(panel->rows, row + now * MOE_NR, MOE_NR_BYTES_);
}

/* Groups are rounded whole, though the panel may have only a part of one. The caller may be in a mode that flushes
   subnormals, which must not apply here. */
MOE_FN int moe_rounded_decode_(const moe_b_ *b, const moe_kernels *kernels, moe_panel_kind_ kind, int64_t p,
                               int64_t from, int64_t k, char *to) {
  const moe_rounded_ *rounded = (const moe_rounded_ *)b->source;
  const moe_fpenv_ saved = moe_fpenv_enter_();
  moe_b_ inner;
  rounded->b(rounded->arg, b->expert, &inner);
  moe_rounded_panel_ panel;
  panel.kind = kind, panel.to = to, panel.odd = k % 2 != 0, panel.open = 0;
  for (int64_t at = from, end; at < from + k; at = end) {
    const int64_t segment = at / rounded->segment * rounded->segment;
    const int64_t first = segment + (at - segment) / MOE_MX_GROUP_ * MOE_MX_GROUP_;
    const int64_t n = moe_min_(MOE_MX_GROUP_, moe_min_(segment + rounded->segment, b->k) - first);
    moe_pack_b_(kernels, MOE_PANEL_F32, &inner, p, first, n, panel.rows + MOE_NR);
    moe_mx_round_panel_(kernels, rounded->round, rounded->dtype, panel.rows + MOE_NR, n);
    end = moe_min_(first + n, from + k);
    moe_rounded_append_(kernels, &panel, at - first, end - at, end == from + k);
  }
  moe_fpenv_restore_(saved);
  return 1;
}

/* Makes b, which rounded->b gave for the expert, a rounded one if rounding is enabled. */
MOE_FN void moe_rounded_b_(const moe_rounded_ *rounded, int64_t expert, moe_b_ *b) {
  if (!rounded->round->enabled) return;
  b->decode = moe_rounded_decode_;
  b->small_m = NULL;
  b->format = NULL;
  b->source = rounded;
  b->expert = expert;
}

/* -------------------------------------------------------------------------------------------------- rows of tensors */

/* Rounds the rows of a tensor, to another one or in place. */
typedef struct moe_round_tensor_ {
  const moe_kernels *kernels;
  const moe_mx_round_ *round;
  const char *from;
  char *to;
  int64_t from_stride, to_stride;
  moe_dtype dtype;
  int64_t rows, length, parts; /* groups are those of a weight of so many parts in `layout` */
  moe_mx_layout layout;
} moe_round_tensor_;

MOE_FN void moe_round_tensor_group_(const moe_round_tensor_ *r, const char *from, char *to, int64_t first, int64_t n) {
  const int64_t size = moe_dtype_bytes_(r->dtype);
  float x[MOE_MX_GROUP_];
  int64_t element[MOE_MX_GROUP_];
  for (int64_t i = 0; i < n; i++) {
    element[i] = moe_mx_element_(r->layout, r->parts, r->length, first + i) * size;
    moe_load_row_(r->kernels->vec, r->dtype, x + i, from + element[i], 1);
  }
  moe_mx_round_group_(r->kernels, r->round, x, n);
  for (int64_t i = 0; i < n; i++) moe_store_row_(r->kernels->vec, r->dtype, to + element[i], x + i, 1);
}

/* n <= MOE_MX_STRIP_ elements of a row, by way of their codes. */
MOE_FN void moe_round_tensor_strip_(const moe_round_tensor_ *r, const char *from, char *to, int64_t n) {
  uint8_t codes[MOE_MX_STRIP_], scales[MOE_MX_STRIP_ / MOE_MX_GROUP_];
  moe_mx_quantize_job_ job = {0};
  moe_mx_part_ part = {0};
  job.kernels = r->kernels, job.numbers = r->round->numbers, job.format = job.numbers.format, job.cast = r->round->cast;
  part.dtype = r->dtype, part.plain = (char *)(uintptr_t)from, part.codes = codes, part.scales = scales, part.n = n;
  part.fetch.at = part.plain;
  if (r->round->scale > 0) {
    float x[MOE_MX_STRIP_];
    moe_load_row_(r->kernels->vec, r->dtype, x, from, n);
    moe_mx_round_row_(r->kernels, r->round, x, n);
    moe_store_row_(r->kernels->vec, r->dtype, to, x, n);
    return;
  }
  moe_mx_convert_(&job, &part);
  job.decode = 1, part.plain = to;
  moe_mx_convert_(&job, &part);
}

MOE_FN void moe_round_tensor_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_round_tensor_ *r = (const moe_round_tensor_ *)arg;
  const int64_t size = moe_dtype_bytes_(r->dtype);
  const char *from = r->from + item * r->from_stride;
  char *to = r->to + item * r->to_stride;
  const int plain = r->layout == MOE_MX_LAYOUT_PLAIN || r->layout == MOE_MX_LAYOUT_NKI_1X32;
  (void)worker;
  for (int64_t at = 0, n; at < r->length; at += n) {
    n = moe_min_(plain ? MOE_MX_STRIP_ : MOE_MX_GROUP_, r->length - at);
    if (plain) moe_round_tensor_strip_(r, from + at * size, to + at * size, n);
    else moe_round_tensor_group_(r, from, to, at, n);
  }
}

#endif
