/* What bounds are made of. e is how far a computation can be from the exact result. Products accumulate in binary32, in
   any order, |c' - c| <= gamma_n * sum |a*b|. Errors of a sum's terms are carried through as independent ones: at most
   their sum, and but for a chance of 2*exp(-c^2/2) at most c times the root of the sum of their squares, c being
   options.arithmetic.confidence (Hoeffding; so is gamma_n, see Higham and Mary, A new approach to probabilistic
   rounding error analysis, 2019). */
#ifndef MOE_NEURON_BOUND_H
#define MOE_NEURON_BOUND_H

/* A comparison: where each output's e goes, [rows*row], NULL if it is not compared. */
typedef struct moe_neuron_bounds_ {
  const moe_neuron_table *table;
  float *of[MOE_NEURON_OPERANDS_MAX];     /* e, but for errors in `square` */
  float *square[MOE_NEURON_OPERANDS_MAX]; /* of weights' gradients: the squares of errors of their terms */
  moe_neuron_scratch_ scratch;
  moe_dtype dtype;
  double operand, activation, confidence; /* options.arithmetic, resolved */
  double roundings;                       /* times operand */
} moe_neuron_bounds_;

/* An output's place in the table. */
MOE_FN int32_t moe_neuron_output_(const moe_neuron_bounds_ *bounds, const char *name) {
  int32_t i = 0;
  while (bounds->table->operand[i].use != MOE_NEURON_OUTPUT || strcmp(bounds->table->operand[i].name, name) != 0) i++;
  return i;
}
MOE_FN float *moe_neuron_bound_of_(const moe_neuron_bounds_ *bounds, const char *name) {
  return bounds->of[moe_neuron_output_(bounds, name)];
}

#define MOE_NEURON_U_ 0x1p-24

/* How much n roundings of one size can add up to. */
MOE_FN double moe_neuron_times_rounded_(const moe_neuron_bounds_ *bounds, int64_t n) {
  return fmin((double)n, bounds->confidence * sqrt((double)n));
}
MOE_FN double moe_neuron_gamma_(const moe_neuron_bounds_ *bounds, int64_t n) {
  const double u = moe_neuron_times_rounded_(bounds, n + 2) * MOE_NEURON_U_;
  return u < 0.5 ? u / (1 - u) : 1;
}

/* What errors can add up to, given their sum and that of their squares. */
MOE_FN double moe_neuron_carried_(const moe_neuron_bounds_ *bounds, double sum, double squares) {
  return fmin(sum, bounds->confidence * sqrt(squares));
}

/* e += x in float, rounded up. */
MOE_FN void moe_neuron_more_(float *e, double x) { *e = (float)(((double)*e + x) * (1 + 0x1p-22)); }

/* The error of a product of factors with errors. */
MOE_FN double moe_neuron_product_(double a, double ea, double b, double eb) {
  return fabs(a) * eb + ea * (fabs(b) + eb);
}

/* ----------------------------------------------------------------------------------------------------------- inputs */

/* A tensor of n elements as floats, in scratch. *failed: output, set if there is no memory. */
MOE_FN float *moe_neuron_floats_(moe_neuron_bounds_ *bounds, moe_dtype dtype, const void *tensor, int64_t n,
                                 int *failed) {
  if (!tensor) return NULL;
  float *to = (float *)moe_neuron_take_(&bounds->scratch, n, sizeof *to);
  if (to) moe_neuron_widen_(dtype, tensor, 0, n, to);
  else *failed = 1;
  return to;
}

MOE_FN void moe_neuron_codes_(moe_element element, const uint8_t *codes, int64_t n, float *to) {
  switch (element) {
#define MOE_NEURON_CASE_(name, NAME, bits, fraction, bias, max, infinity, nan) \
  case MOE_ELEMENT_##NAME: (void)moe_##name##_to_f32(NULL, to, codes, n); break;
    MOE_ELEMENT_LIST(MOE_NEURON_CASE_)
#undef MOE_NEURON_CASE_
  }
}

/* A [T,H] tensor, plain or quantised. */
MOE_FN float *moe_neuron_hidden_(moe_neuron_bounds_ *bounds, const void *plain, const moe_quantized_activation *a,
                                 int64_t T, int64_t H, int *failed) {
  if (!a) return moe_neuron_floats_(bounds, bounds->dtype, plain, T * H, failed);
  float *to = (float *)moe_neuron_take_(&bounds->scratch, T * H, sizeof *to);
  if (!to) return *failed = 1, to;
  if (a->float_scales) {
    const moe_dequantize_scaled_args args = {.element = a->element,
                                             .rows = T,
                                             .columns = H,
                                             .block_rows = a->block_rows,
                                             .block_columns = a->block_columns,
                                             .codes = a->codes,
                                             .scales = (const float *)a->scales,
                                             .plain = to};
    (void)moe_dequantize_scaled(NULL, &args);
  } else {
    const moe_dequantize_mx_args args = {.element = a->element,
                                         .rows = T,
                                         .columns = H,
                                         .codes = a->codes,
                                         .scales = (const uint8_t *)a->scales,
                                         .plain = to};
    (void)moe_dequantize_mx(NULL, &args);
  }
  return to;
}

/* A weight of E experts, [K,parts,columns] each. */
typedef struct moe_neuron_weight_ {
  const moe_quantized_weight *quantized; /* or NULL */
  const void *plain;
  moe_dtype dtype;
  int64_t K, parts, columns;
  uint8_t *codes, *scales; /* of an MX weight: rows as OCP groups them, in logical order */
  int64_t *position;       /* of element k along K, whose scale is position/32 */
  float *row;              /* [K] and more */
  float *values;           /* [K,parts,columns] of the expert that was loaded last */
  int64_t loaded;
} moe_neuron_weight_;

/* Brings an MX weight into rows. */
MOE_FN moe_status moe_neuron_rows_(moe_context *ctx, moe_neuron_bounds_ *bounds, moe_neuron_weight_ *w, int64_t E) {
  const moe_quantized_weight *q = w->quantized;
  const int nki = q->layout >= MOE_MX_LAYOUT_NKI_STRIDED_X4 && q->layout <= MOE_MX_LAYOUT_NKI_1X32;
  moe_mx_layout_args args = {.from = q->layout,
                             .to = MOE_MX_LAYOUT_PLAIN,
                             .scales_from = q->scales_layout,
                             .element_bits = q->element == MOE_ELEMENT_E2M1 ? 4 : 8,
                             .parts = (int32_t)w->parts,
                             .E = E,
                             .K = w->K,
                             .columns = w->columns,
                             .logical_order = nki,
                             .codes_in = q->codes,
                             .scales_in = (const uint8_t *)q->scales};
  moe_mx_layout_bytes bytes;
  MOE_NEURON_TRY_(moe_mx_layout_size(ctx, &args, &bytes));
  args.codes_out = w->codes = (uint8_t *)moe_neuron_take_(&bounds->scratch, (int64_t)bytes.codes_out, 1);
  args.scales_out = w->scales = (uint8_t *)moe_neuron_take_(&bounds->scratch, (int64_t)bytes.scales_out, 1);
  w->position = (int64_t *)moe_neuron_take_(&bounds->scratch, 2 * w->K, sizeof *w->position);
  if (!w->codes || !w->scales || !w->position) return moe_neuron_no_memory_(ctx);
  MOE_NEURON_TRY_(moe_mx_layout_convert(ctx, &args));
  int64_t *const index = w->position + w->K;
  for (int64_t k = 0; k < w->K; k++) index[k] = k;
  if (q->layout == MOE_MX_LAYOUT_NKI_STRIDED_X4 || q->layout == MOE_MX_LAYOUT_NKI_WRAPX ||
      q->layout == MOE_MX_LAYOUT_NKI_WRAPX_WHOLE)
    MOE_NEURON_TRY_(moe_nki_x4_permutation(ctx, q->layout, (int32_t)w->parts, w->K, index));
  for (int64_t n = 0; n < w->K; n++) w->position[index[n]] = n;
  return MOE_OK;
}

MOE_FN moe_status moe_neuron_weight_new_(moe_context *ctx, moe_neuron_bounds_ *bounds, moe_neuron_weight_ *w,
                                         int64_t E) {
  w->loaded = -1;
  w->values = (float *)moe_neuron_take_(&bounds->scratch, w->K * w->parts * w->columns, sizeof *w->values);
  w->row = (float *)moe_neuron_take_(&bounds->scratch, w->K + w->K / 32 + 2, sizeof *w->row);
  if (!w->values || !w->row) return moe_neuron_no_memory_(ctx);
  return w->quantized && w->quantized->scaling == MOE_WEIGHT_MX ? moe_neuron_rows_(ctx, bounds, w, E) : MOE_OK;
}

/* The float scale of an element: see moe_weight_scaling. */
MOE_FN float moe_neuron_scale_(const moe_neuron_weight_ *w, int64_t e, int64_t k, int64_t part, int64_t column) {
  const moe_quantized_weight *q = w->quantized;
  const float *scale = (const float *)q->scales;
  const int64_t block = q->block ? q->block : 256, repeat = q->repeat ? q->repeat : 1;
  switch (q->scaling) {
    case MOE_WEIGHT_STATIC: return scale[part];
    case MOE_WEIGHT_COLUMN: return scale[part * w->columns + column];
    case MOE_WEIGHT_STATIC_PER_EXPERT: return scale[e * w->parts + part];
    case MOE_WEIGHT_COLUMN_PER_EXPERT: return scale[(e * w->parts + part) * w->columns + column];
    default: break;
  }
  const int64_t row = e * moe_ceil_div_(w->K, block) + k / block;
  return scale[((row * w->parts + part) * moe_ceil_div_(w->columns, block) + column / block) * repeat];
}

MOE_FN void moe_neuron_load_mx_(moe_neuron_weight_ *w, int64_t e) {
  const int64_t rows = w->parts * w->columns, groups = moe_ceil_div_(w->K, 32);
  const int64_t bytes = w->quantized->element == MOE_ELEMENT_E2M1 ? moe_ceil_div_(w->K, 2) : w->K;
  float *const scale = w->row + w->K;
  for (int64_t r = 0; r < rows; r++) {
    moe_neuron_codes_(w->quantized->element, w->codes + (e * rows + r) * bytes, w->K, w->row);
    (void)moe_e8m0_to_f32(NULL, scale, w->scales + (e * rows + r) * groups, groups);
    for (int64_t k = 0; k < w->K; k++) w->values[k * rows + r] = w->row[k] * scale[w->position[k] / 32];
  }
}

/* Expert e's values. */
MOE_FN const float *moe_neuron_expert_(moe_neuron_weight_ *w, int64_t e) {
  const int64_t rows = w->parts * w->columns;
  if (w->loaded == e) return w->values;
  w->loaded = e;
  if (!w->quantized) {
    moe_neuron_widen_(w->dtype, w->plain, e * w->K * rows, w->K * rows, w->values);
  } else if (w->quantized->scaling == MOE_WEIGHT_MX) {
    moe_neuron_load_mx_(w, e);
  } else {
    moe_neuron_codes_(w->quantized->element, (const uint8_t *)w->quantized->codes + e * w->K * rows, w->K * rows,
                      w->values);
    for (int64_t k = 0; k < w->K; k++)
      for (int64_t r = 0; r < rows; r++)
        w->values[k * rows + r] *= moe_neuron_scale_(w, e, k, r / w->columns, r % w->columns);
  }
  return w->values;
}

#endif
