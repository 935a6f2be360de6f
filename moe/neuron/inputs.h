/* What a call reads, as floats. */
#ifndef MOE_NEURON_INPUTS_H
#define MOE_NEURON_INPUTS_H

/* A tensor of n elements as floats, in scratch. */
MOE_FN float *moe_neuron_floats_(moe_neuron_bounds_ *bounds, moe_dtype dtype, const void *tensor, int64_t n) {
  if (!tensor) return NULL;
  float *to = (float *)moe_neuron_take_(&bounds->scratch, n, sizeof *to);
  if (to) moe_neuron_widen_(dtype, tensor, 0, n, to);
  else bounds->failed = 1;
  return to;
}

/* A [T,H] tensor, plain or quantised. */
MOE_FN float *moe_neuron_hidden_(moe_neuron_bounds_ *bounds, const void *plain, const moe_quantized_activation *a,
                                 int64_t T, int64_t H) {
  if (!a) return moe_neuron_floats_(bounds, bounds->dtype, plain, T * H);
  float *to = (float *)moe_neuron_take_(&bounds->scratch, T * H, sizeof *to);
  if (!to) return bounds->failed = 1, to;
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

/* A weight whose values are wanted, an expert at a time. */
typedef struct moe_neuron_loaded_ {
  moe_neuron_weight_ w;
  double error;            /* relative, of a value: it may be rounded or not */
  moe_neuron_round_ round; /* along K, of a plain one that is rounded */
  uint8_t *codes, *scales; /* of an MX weight: rows as OCP groups them, in logical order */
  int64_t *position;       /* of element k along K, whose scale is position/32 */
  float *row;              /* [K] and more */
  float *raw;              /* an expert, or one part of it, as it is stored */
  float *values;           /* [K,parts,columns] of the expert that was loaded last */
  int64_t expert;
} moe_neuron_loaded_;

/* Brings an MX weight into rows. */
MOE_FN moe_status moe_neuron_rows_(moe_context *ctx, moe_neuron_bounds_ *bounds, moe_neuron_loaded_ *to) {
  const moe_neuron_weight_ *w = &to->w;
  const moe_quantized_weight *q = w->quantized;
  moe_mx_layout_args args = {.from = q->layout,
                             .to = MOE_MX_LAYOUT_PLAIN,
                             .scales_from = q->scales_layout,
                             .element_bits = q->element == MOE_ELEMENT_E2M1 ? 4 : 8,
                             .parts = (int32_t)w->parts,
                             .E = w->E,
                             .K = w->K,
                             .columns = w->columns,
                             .logical_order = moe_neuron_is_nki_(q->layout),
                             .codes_in = q->codes,
                             .scales_in = (const uint8_t *)q->scales};
  moe_mx_layout_bytes bytes;
  MOE_NEURON_TRY_(moe_mx_layout_size(ctx, &args, &bytes));
  args.codes_out = to->codes = (uint8_t *)moe_neuron_take_(&bounds->scratch, (int64_t)bytes.codes_out, 1);
  args.scales_out = to->scales = (uint8_t *)moe_neuron_take_(&bounds->scratch, (int64_t)bytes.scales_out, 1);
  int64_t *const index = (int64_t *)moe_neuron_take_(&bounds->scratch, 2 * w->K, sizeof *index);
  if (!to->codes || !to->scales || !index) return moe_neuron_no_memory_(ctx);
  to->position = index + w->K;
  MOE_NEURON_TRY_(moe_mx_layout_convert(ctx, &args));
  MOE_NEURON_TRY_(moe_neuron_positions_(ctx, q->layout, (int32_t)w->parts, w->K, index));
  for (int64_t n = 0; n < w->K; n++) to->position[index[n]] = n;
  return MOE_OK;
}

MOE_FN moe_status moe_neuron_loaded_new_(moe_context *ctx, moe_neuron_bounds_ *bounds, moe_neuron_weight_ weight,
                                         moe_neuron_loaded_ *to) {
  const moe_neuron_weight_ *w = &to->w;
  const int64_t n = weight.K * weight.parts * weight.columns;
  *to = (moe_neuron_loaded_){.w = weight, .expert = -1};
  to->values = (float *)moe_neuron_take_(&bounds->scratch, n, sizeof *to->values);
  to->raw = (float *)moe_neuron_take_(&bounds->scratch, n, sizeof *to->raw);
  to->row = (float *)moe_neuron_take_(&bounds->scratch, w->K + w->K / 32 + 2, sizeof *to->row);
  if (!to->values || !to->raw || !to->row) return moe_neuron_no_memory_(ctx);
  if (!w->quantized && weight.rounding)
    MOE_NEURON_TRY_(moe_neuron_round_new_(ctx, bounds, MOE_MX_LAYOUT_PLAIN, 1, w->K, &to->round));
  if (!w->quantized) return MOE_OK;
  if (w->quantized->scaling == MOE_WEIGHT_MX) return moe_neuron_rows_(ctx, bounds, to);
  to->error = bounds->operand + MOE_NEURON_U_; /* code*scale; or the code, and the scale after the product */
  if (w->parts > 1 || w->down_scales) to->w.order = MOE_ORDER_IN_OUT;
  to->w.apart = 0;
  return MOE_OK;
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
  const int64_t rows = moe_ceil_div_(w->K, block), columns = moe_ceil_div_(w->columns, block);
  const int64_t of_expert = e * rows * w->parts * columns;
  if (w->order != MOE_ORDER_IN_OUT) return scale[(of_expert + column / block * rows + k / block) * repeat];
  return scale[(of_expert + (k / block * w->parts + part) * columns + column / block) * repeat];
}

MOE_FN void moe_neuron_load_mx_(moe_neuron_loaded_ *to, int64_t e) {
  const moe_neuron_weight_ *w = &to->w;
  const int64_t rows = w->parts * w->columns, groups = moe_ceil_div_(w->K, 32);
  const int64_t bytes = w->quantized->element == MOE_ELEMENT_E2M1 ? moe_ceil_div_(w->K, 2) : w->K;
  float *const scale = to->row + w->K;
  for (int64_t r = 0; r < rows; r++) {
    moe_neuron_codes_(w->quantized->element, to->codes + (e * rows + r) * bytes, w->K, to->row);
    (void)moe_e8m0_to_f32(NULL, scale, to->scales + (e * rows + r) * groups, groups);
    for (int64_t k = 0; k < w->K; k++) to->values[k * rows + r] = to->row[k] * scale[to->position[k] / 32];
  }
}

/* A part of expert e from `raw`, into logical order. */
MOE_FN void moe_neuron_load_part_(moe_neuron_loaded_ *to, int64_t e, int64_t part) {
  const moe_neuron_weight_ *w = &to->w;
  int64_t stride;
  for (int64_t k = 0; k < w->K; k++) {
    const int64_t from = moe_neuron_weight_row_(w, 0, k, part, &stride);
    float *const row = to->values + (k * w->parts + part) * w->columns;
    for (int64_t n = 0; n < w->columns; n++) row[n] = to->raw[from + n * stride];
    for (int64_t n = 0; n < w->columns && w->quantized; n++) row[n] *= moe_neuron_scale_(w, e, k, part, n);
  }
}

/* Rounds columns along K: what is given is rounded alike by all. */
MOE_FN void moe_neuron_round_columns_(const moe_neuron_loaded_ *to) {
  const int64_t K = to->w.K, columns = to->w.parts * to->w.columns;
  const moe_neuron_round_ *r = &to->round;
  for (int64_t n = 0; n < columns; n++) {
    for (int64_t k = 0; k < K; k++) r->x[k] = to->values[k * columns + n];
    moe_neuron_round_mx_(to->w.rounding, r, r->x, r->y, NULL);
    for (int64_t k = 0; k < K; k++) to->values[k * columns + n] = r->y[k];
  }
}

MOE_FN void moe_neuron_load_plain_(moe_neuron_loaded_ *to, int64_t e) {
  const moe_neuron_weight_ *w = &to->w;
  const int64_t n = w->K * w->columns * (w->apart ? 1 : w->parts);
  for (int64_t part = 0; part < w->parts; part++) {
    const void *from = w->apart && part > 0 ? w->up : w->plain;
    if (!from) continue; /* with skip_gate there may be no gate: values are zeroed */
    const void *expert = w->per_expert ? ((const void *const *)from)[e] : from;
    if (part == 0 || w->apart) moe_neuron_widen_(w->dtype, expert, w->per_expert ? 0 : e * n, n, to->raw);
    moe_neuron_load_part_(to, e, part);
  }
  if (w->rounding) moe_neuron_round_columns_(to);
}

/* Expert e's values, [K,parts,columns]. */
MOE_FN const float *moe_neuron_expert_(moe_neuron_loaded_ *to, int64_t e) {
  const moe_neuron_weight_ *w = &to->w;
  const int64_t n = w->K * w->parts * w->columns;
  if (to->expert == e) return to->values;
  to->expert = e;
  if (w->quantized && w->quantized->scaling == MOE_WEIGHT_MX) {
    moe_neuron_load_mx_(to, e);
  } else if (w->quantized) {
    moe_neuron_codes_(w->quantized->element, (const uint8_t *)w->quantized->codes + e * n, n, to->raw);
    for (int64_t part = 0; part < w->parts; part++) moe_neuron_load_part_(to, e, part);
  } else {
    moe_neuron_load_plain_(to, e);
  }
  return to->values;
}

#endif
