/* Operands of MXFP8 products, in whichever state they are given, as products take them: bf16 values rounded along the
   contraction, in rows along it (A), in packed panels (B), or in rows across it (both, of weight gradients). */
#ifndef MOE_QUANT_MX_MATRIX_H
#define MOE_QUANT_MX_MATRIX_H

enum { MOE_BF16_BYTES_ = 2 };

MOE_FN int moe_mx_in_order_(moe_mx_layout layout) {
  return layout == MOE_MX_LAYOUT_PLAIN || layout == MOE_MX_LAYOUT_NKI_1X32;
}

MOE_FN int moe_mxfp8_is_plain_(const moe_mxfp8_operand *x) { return !x->scales && !x->is_swizzled; }

/* An operand, or a part of it, for a product. */
typedef struct moe_mx_matrix_ {
  const moe_kernels *kernels;
  const moe_mx_round_ *round;     /* NULL: it is rounded already */
  moe_mx_layout layout;           /* which elements are a group */
  const moe_mxfp8_operand *given; /* [stored,K], or transposed [K,stored] */
  int transposed;
  int64_t F, K, first, stored; /* rows [first, first+F) of `stored`, of K elements */
  int64_t k_first, k_stored;   /* transposed: elements from k_first on, of k_stored */
  int64_t segment;             /* as in moe_rounded_ */
  moe_panel_kind_ kind;        /* of panels */
  char *decoded, *room;        /* see moe_mx_matrix_layout_ */
  char *to;                    /* the result: rows of `stride` bytes, or panels */
  int64_t stride;
} moe_mx_matrix_;

/* Bytes of a panel. */
MOE_FN int64_t moe_mx_panel_bytes_(const moe_mx_matrix_ *x) { return moe_panel_bytes_(x->kind, x->K); }

/* Whether panels are rounded as they are packed, from the operand as it is given. */
MOE_FN int moe_mx_packs_given_(const moe_mx_matrix_ *x) {
  return moe_mxfp8_is_plain_(x->given) && (!x->round || moe_mx_in_order_(x->layout));
}

/* From one matrix of bf16 to another. */
typedef struct moe_mx_pass_ {
  const moe_mx_matrix_ *x;
  moe_mx_tensor_ tensor; /* of decoding, columns from `first` on */
  int64_t first, rows, columns;
  const char *from;
  char *to;
  int64_t from_stride, to_stride;
} moe_mx_pass_;

/* Item: 64 rows decoded, or put in order. */
MOE_FN void moe_mx_decode_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_mx_pass_ *pass = (const moe_mx_pass_ *)arg;
  const moe_mx_tensor_ *s = &pass->tensor;
  const moe_kernels *kernels = pass->x->kernels;
  const int64_t first = item * MOE_NR, end = moe_min_(pass->rows, first + MOE_NR);
  (void)worker;
  for (int64_t group = 0; group < s->groups; group++) {
    const int64_t start = group * MOE_MX_GROUP_, n = moe_min_(MOE_MX_GROUP_, s->K - start);
    int64_t element[MOE_MX_GROUP_];
    for (int64_t j = 0; j < n; j++) element[j] = moe_mx_element_(s->layout, 1, s->K, start + j);
    for (int64_t row = first; row < end; row++) {
      const moe_mx_at_ at = {0, 0, pass->first + row, group, NULL};
      uint8_t code[MOE_MX_GROUP_];
      float value[MOE_MX_GROUP_];
      moe_bf16 x[MOE_MX_GROUP_], *to = (moe_bf16 *)(void *)(pass->to + row * pass->to_stride);
      if (s->scale) {
        moe_mx_load_(s, &at, n, code);
        moe_mx_decode_(kernels, &pass->x->round->numbers.format, code, *moe_mx_scale_at_(s, &at), value, n);
        moe_store_row_(kernels->vec, MOE_DTYPE_BF16, x, value, n);
      } else {
        for (int64_t j = 0; j < n; j += MOE_MX_WORD_)
          memcpy(x + j,
                 s->codes + moe_nki_word_at_(s, &at, (start + j) / MOE_MX_WORD_) * MOE_MX_WORD_ * MOE_BF16_BYTES_,
                 MOE_MX_WORD_ * MOE_BF16_BYTES_);
      }
      for (int64_t j = 0; j < n; j++) to[element[j]] = x[j];
    }
  }
}

/* Item: 64 rows of the result, which are columns of what is transposed. */
MOE_FN void moe_mx_transpose_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_mx_pass_ *pass = (const moe_mx_pass_ *)arg;
  const moe_vec_table_ *vec = pass->x->kernels->vec;
  const int64_t first = item * MOE_NR, n = moe_min_(MOE_NR, pass->columns - first);
  (void)worker;
  for (int64_t at = 0, rows; at < pass->rows; at += rows) {
    float x[MOE_NR * MOE_NR / 2], y[MOE_NR * MOE_NR / 2]; /* 32 rows: the stack is small */
    rows = moe_min_(MOE_NR / 2, pass->rows - at);
    const moe_rows_ from = {pass->from + at * pass->from_stride + first * MOE_BF16_BYTES_, pass->from_stride, NULL};
    vec->load_rows[MOE_DTYPE_BF16](x, MOE_NR, &from, rows, n);
    vec->transpose_words(y, MOE_NR_BYTES_ / 2, x, MOE_NR_BYTES_, rows, n);
    for (int64_t i = 0; i < n; i++)
      moe_store_row_(vec, MOE_DTYPE_BF16, pass->to + (first + i) * pass->to_stride + at * MOE_BF16_BYTES_,
                     y + i * MOE_NR / 2, rows);
  }
}

/* Item: 64 columns, rounded in groups of rows. */
MOE_FN void moe_mx_columns_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_mx_pass_ *pass = (const moe_mx_pass_ *)arg;
  const moe_mx_matrix_ *x = pass->x;
  const moe_vec_table_ *vec = x->kernels->vec;
  const int64_t at = item * MOE_NR, n = moe_min_(MOE_NR, pass->columns - at);
  const int order = moe_mx_in_order_(x->layout);
  float panel[MOE_MX_GROUP_ * MOE_NR] = {0};
  (void)worker;
  for (int64_t from = 0, k; from < pass->rows; from += k) {
    const int64_t segment = from / x->segment * x->segment, length = moe_min_(x->segment, pass->rows - segment);
    int32_t index[MOE_MX_GROUP_];
    k = moe_min_(MOE_MX_GROUP_, segment + length - from);
    for (int64_t i = 0; i < k && !order; i++)
      index[i] = (int32_t)(segment + moe_mx_element_(x->layout, 1, length, from - segment + i));
    const int64_t start = order ? from : 0;
    const int32_t *where = order ? NULL : index;
    const moe_rows_ rows = {pass->from + start * pass->from_stride + at * MOE_BF16_BYTES_, pass->from_stride, where};
    vec->load_rows[MOE_DTYPE_BF16](panel, MOE_NR, &rows, k, n);
    moe_mx_round_panel_(x->kernels, x->round, MOE_DTYPE_BF16, panel, k);
    vec->store_rows[MOE_DTYPE_BF16](pass->to + start * pass->to_stride + at * MOE_BF16_BYTES_, pass->to_stride, where,
                                    panel, k, n);
  }
}

typedef struct moe_mx_pack_ {
  const moe_mx_matrix_ *x;
  moe_b_ b;
} moe_mx_pack_;

MOE_FN void moe_mx_pack_b_(const void *arg, int64_t expert, moe_b_ *b) {
  (void)expert;
  *b = ((const moe_mx_pack_ *)arg)->b;
}

/* Item: a panel. */
MOE_FN void moe_mx_pack_item_(void *arg, int64_t panel, moe_worker_ *worker) {
  const moe_mx_pack_ *pack = (const moe_mx_pack_ *)arg;
  const moe_mx_matrix_ *x = pack->x;
  const moe_rounded_ rounded = {x->round, moe_mx_pack_b_, pack, x->segment, MOE_DTYPE_BF16};
  moe_b_ b = pack->b;
  (void)worker;
  if (x->round && moe_mx_packs_given_(x)) moe_rounded_b_(&rounded, 0, &b);
  moe_pack_b_(x->kernels, x->kind, &b, panel, 0, x->K, x->to + panel * moe_mx_panel_bytes_(x));
}

#endif
