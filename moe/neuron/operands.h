/* A call's table of tensors: how a tensor gets into it, and weights, which there are several ways to give. */
#ifndef MOE_NEURON_OPERANDS_H
#define MOE_NEURON_OPERANDS_H

/* X(KIND, what describes it, what bounds it, whether its bounds are known): names of functions. */
#define MOE_NEURON_KIND_LIST_(X)                 \
  X(FORWARD, forward, forward, none)             \
  X(BACKWARD, backward, backward, backward)      \
  X(GROUPED, grouped, grouped, none)             \
  X(GROUPED_DX, grouped, grouped, none)          \
  X(GROUPED_DW, grouped, grouped, none)          \
  X(MATMUL, matmul, matmul, none)                \
  X(MLP_FORWARD, mlp_forward, mlp_forward, none) \
  X(MLP_BACKWARD, mlp_backward, mlp_backward, none)

typedef enum moe_neuron_kind_ {
#define MOE_NEURON_ENUM_(KIND, describe, bound, rounds) MOE_NEURON_##KIND##_,
  MOE_NEURON_KIND_LIST_(MOE_NEURON_ENUM_)
#undef MOE_NEURON_ENUM_
} moe_neuron_kind_;

/* A call, and what it is described to. */
typedef struct moe_neuron_call_ {
  moe_neuron_kind_ kind;
  moe_dtype dtype;
  const moe_neuron_options *options;
  moe_neuron_table *table;
} moe_neuron_call_;

MOE_FN moe_nrt_dtype moe_neuron_dtype_(moe_dtype dtype) {
  switch (dtype) {
    case MOE_DTYPE_BF16: return MOE_NRT_DTYPE_BFLOAT16;
    case MOE_DTYPE_FP16: return MOE_NRT_DTYPE_FLOAT16;
    default: return MOE_NRT_DTYPE_FLOAT32;
  }
}

/* ----------------------------------------------------------------------------------------------------- adding a row */

/* A shape: how many axes, then the axes. */
#define MOE_NEURON_SHAPE_(...) \
  ((const int64_t[]){sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t), __VA_ARGS__})

/* Adds a tensor. Its size cannot overflow: that has been checked. */
MOE_FN moe_neuron_operand *moe_neuron_add_(moe_neuron_call_ *call, const char *name, const void *data,
                                           moe_nrt_dtype dtype, const int64_t *shape) {
  moe_neuron_operand *operand = &call->table->operand[call->table->count++];
  memset(operand, 0, sizeof *operand);
  operand->name = name;
  operand->data = (void *)(uintptr_t)data;
  operand->dtype = dtype;
  operand->bytes = moe_neuron_dtype_bytes_(dtype);
  for (operand->ndim = 0; operand->ndim < shape[0]; operand->ndim++) {
    operand->shape[operand->ndim] = shape[operand->ndim + 1];
    operand->bytes *= (size_t)shape[operand->ndim + 1];
  }
  return operand;
}

/* Lets the NEFF's tensor have one row more: of its last axis. */
MOE_FN void moe_neuron_pad_row_(moe_neuron_operand *operand) {
  operand->padding = (size_t)operand->shape[operand->ndim - 1] * moe_neuron_dtype_bytes_(operand->dtype);
}

/* Likewise of an output's, and of what it is added to, which comes before it. */
MOE_FN void moe_neuron_pad_rows_(moe_neuron_operand *output, int accumulates) {
  for (int i = 0; i <= accumulates; i++) moe_neuron_pad_row_(output - i);
}

/* Adds one of floats, `dtype` or by default the function's type; or an output of them, which can be compared. */
MOE_FN moe_neuron_operand *moe_neuron_add_float_(moe_neuron_call_ *call, const char *name, const void *data,
                                                 moe_dtype dtype, const int64_t *shape) {
  const moe_dtype type = dtype == MOE_DTYPE_DEFAULT ? call->dtype : dtype;
  moe_neuron_operand *operand = moe_neuron_add_(call, name, data, moe_neuron_dtype_(type), shape);
  operand->elements = type;
  return operand;
}
MOE_FN moe_neuron_operand *moe_neuron_add_output_(moe_neuron_call_ *call, const char *name, void *data, moe_dtype dtype,
                                                  const int64_t *shape) {
  moe_neuron_operand *operand = moe_neuron_add_float_(call, name, data, dtype, shape);
  operand->use = MOE_NEURON_OUTPUT;
  operand->rows = 1;
  operand->row = operand->step = (int64_t)(operand->bytes / moe_dtype_size(operand->elements));
  return operand;
}

/* Adds an output; where it is accumulated, what it holds is an input as well, under the name `given` or its own. */
MOE_FN moe_neuron_operand *moe_neuron_add_result_(moe_neuron_call_ *call, int accumulates, const char *given,
                                                  const char *name, void *data, moe_dtype dtype, const int64_t *shape) {
  if (accumulates) {
    moe_neuron_operand *before = moe_neuron_add_float_(call, given ? given : name, data, dtype, shape);
    before->alias = name, before->optional = !data;
  }
  return moe_neuron_add_output_(call, name, data, dtype, shape);
}

/* ---------------------------------------------------------------------------------------------------------- weights */

/* A weight of E experts, [K,parts,columns] each: K is what products contract. */
typedef struct moe_neuron_weight_ {
  const char *name, *up_name, *scales_name, *scales_alias;
  const moe_quantized_weight *quantized; /* or NULL */
  const void *plain, *up, *packed;
  moe_dtype dtype;
  moe_weight_order order;          /* of the plain one and, of grouped GEMM, of codes with float scales */
  int apart, per_expert;           /* up is a tensor of its own; plain and up are arrays of pointers */
  int up_only, down_scales;        /* the gate is not read; scales may be in the order of MOE_NKI_DOWN_SCALE */
  const moe_mx_rounding *rounding; /* of products; NULL: none */
  int64_t E, K, parts, columns;
} moe_neuron_weight_;

MOE_FN moe_neuron_weight_ moe_neuron_gate_up_weight_(const moe_blockwise_layer *l, moe_dtype dtype) {
  return (moe_neuron_weight_){.name = "gate_up_proj_weight",
                              .up_name = "up_proj_weight",
                              .scales_name = "gate_up_proj_scale",
                              .scales_alias = "gate_up_weight_scales",
                              .quantized = l->quantized_gate_up_proj_weight,
                              .plain = l->gate_up_proj_weight,
                              .up = l->up_proj_weight,
                              .packed = l->packed_gate_up_proj_weight,
                              .dtype = dtype,
                              .order = l->orders.gate_up,
                              .apart = l->orders.up_apart,
                              .per_expert = l->orders.per_expert,
                              .up_only = l->config.skip_gate,
                              .rounding = l->mx.weights.enabled ? &l->mx.weights : NULL,
                              .E = l->E,
                              .K = l->H,
                              .parts = 2,
                              .columns = l->I};
}
MOE_FN moe_neuron_weight_ moe_neuron_down_weight_(const moe_blockwise_layer *l, moe_dtype dtype) {
  return (moe_neuron_weight_){.name = "down_proj_weight",
                              .scales_name = "down_proj_scale",
                              .scales_alias = "down_weight_scales",
                              .quantized = l->quantized_down_proj_weight,
                              .plain = l->down_proj_weight,
                              .packed = l->packed_down_proj_weight,
                              .dtype = dtype,
                              .order = l->orders.down,
                              .per_expert = l->orders.per_expert,
                              .down_scales = 1,
                              .rounding = l->mx.weights.enabled ? &l->mx.weights : NULL,
                              .E = l->E,
                              .K = l->I,
                              .parts = 1,
                              .columns = l->H};
}
MOE_FN moe_neuron_weight_ moe_neuron_grouped_weight_(const moe_grouped_gemm_args *args, moe_dtype dtype) {
  return (moe_neuron_weight_){.name = "W",
                              .scales_name = "W_scale",
                              .quantized = args->quantized_W,
                              .plain = args->W,
                              .packed = args->packed_W,
                              .dtype = dtype,
                              .order = args->weight_order == MOE_GROUPED_ENK ? MOE_ORDER_OUT_IN : MOE_ORDER_IN_OUT,
                              .E = args->E,
                              .K = args->K,
                              .parts = 1,
                              .columns = args->N};
}

/* The shape, for MOE_NEURON_SHAPE_, of as many parts as a tensor has. */
MOE_FN const int64_t *moe_neuron_weight_shape_(const moe_neuron_weight_ *w, int64_t shape[5]) {
  const int64_t parts = w->apart ? 1 : w->parts;
  const int first = w->order == MOE_ORDER_IN_OUT, last = w->order != MOE_ORDER_IN_OUT;
  int n = 0;
  shape[++n] = w->E;
  if (first) shape[++n] = w->K;
  if (w->order == MOE_ORDER_INTERLEAVED) shape[++n] = w->columns;
  if (parts > 1) shape[++n] = parts;
  if (w->order != MOE_ORDER_INTERLEAVED) shape[++n] = w->columns;
  if (last) shape[++n] = w->K;
  shape[0] = n;
  return shape;
}

/* Where an expert's row k of a part begins in a tensor of that order, and how far its columns are apart. */
MOE_FN int64_t moe_neuron_weight_row_(const moe_neuron_weight_ *w, int64_t e, int64_t k, int64_t part,
                                      int64_t *column) {
  const int64_t parts = w->apart ? 1 : w->parts, expert = e * w->K * parts * w->columns, p = w->apart ? 0 : part;
  *column = w->order == MOE_ORDER_IN_OUT ? 1 : w->order == MOE_ORDER_OUT_IN ? w->K : parts * w->K;
  if (w->order == MOE_ORDER_IN_OUT) return expert + (k * parts + p) * w->columns;
  return expert + p * (w->order == MOE_ORDER_OUT_IN ? w->columns : 1) * w->K + k;
}

/* Bytes of n codes. */
MOE_FN int64_t moe_neuron_code_bytes_(moe_element element, int64_t n) {
  static const int bits[] = {
#define MOE_NEURON_BITS_(name, NAME, bits, ...) bits,
      MOE_ELEMENT_LIST(MOE_NEURON_BITS_)
#undef MOE_NEURON_BITS_
          8, /* MXINT8 */
  };
  return (n * bits[element] + 7) / 8;
}

MOE_FN moe_nrt_dtype moe_neuron_element_(moe_element element) {
  switch (element) {
    case MOE_ELEMENT_E4M3FN:
    case MOE_ELEMENT_E4M3: return MOE_NRT_DTYPE_FP8_E4;
    case MOE_ELEMENT_E5M2: return MOE_NRT_DTYPE_FP8_E5;
    default: return MOE_NRT_DTYPE_UINT8;
  }
}

MOE_FN moe_neuron_operand *moe_neuron_add_weight_tensor_(moe_neuron_call_ *call, const char *name, const void *data,
                                                         moe_nrt_dtype dtype, const int64_t *shape) {
  moe_neuron_operand *operand = moe_neuron_add_(call, name, data, dtype, shape);
  operand->use = MOE_NEURON_WEIGHT;
  return operand;
}

/* The scales of a weight with float scales; see moe_weight_scaling. */
MOE_FN void moe_neuron_add_scales_(moe_neuron_call_ *call, const moe_neuron_weight_ *w) {
  const moe_quantized_weight *q = w->quantized;
  const int64_t block = q->block ? q->block : 256, repeat = q->repeat ? q->repeat : 1;
  const int64_t rows = moe_ceil_div_(w->K, block), columns = moe_ceil_div_(w->columns, block);
  const int per_expert = q->scaling == MOE_WEIGHT_STATIC_PER_EXPERT || q->scaling == MOE_WEIGHT_COLUMN_PER_EXPERT;
  const int per_column = q->scaling == MOE_WEIGHT_COLUMN || q->scaling == MOE_WEIGHT_COLUMN_PER_EXPERT;
  moe_neuron_operand *scales;
  if (q->scaling != MOE_WEIGHT_BLOCK)
    scales =
        moe_neuron_add_weight_tensor_(call, w->scales_name, q->scales, MOE_NRT_DTYPE_FLOAT32,
                                      MOE_NEURON_SHAPE_(per_expert ? w->E : 1, w->parts, per_column ? w->columns : 1));
  else if (w->order == MOE_ORDER_IN_OUT)
    scales = moe_neuron_add_weight_tensor_(call, w->scales_name, q->scales, MOE_NRT_DTYPE_FLOAT32,
                                           MOE_NEURON_SHAPE_(w->E, rows, w->parts, columns, repeat));
  else
    scales = moe_neuron_add_weight_tensor_(call, w->scales_name, q->scales, MOE_NRT_DTYPE_FLOAT32,
                                           MOE_NEURON_SHAPE_(w->E, columns, rows, repeat));
  scales->elements = MOE_DTYPE_F32, scales->alias = w->scales_alias;
  if (call->options->nki_down_scale && per_column && w->down_scales) scales->order = MOE_NEURON_ORDER_DOWN_SCALE;
}

MOE_FN int moe_neuron_is_nki_(moe_mx_layout layout) {
  return layout >= MOE_MX_LAYOUT_NKI_STRIDED_X4 && layout <= MOE_MX_LAYOUT_NKI_1X32;
}

/* MX codes as words, and scales. */
MOE_FN moe_status moe_neuron_add_mx_weight_(moe_context *ctx, moe_neuron_call_ *call, const moe_neuron_weight_ *w) {
  const moe_quantized_weight *q = w->quantized;
  const moe_mx_layout_args layout = {.from = q->layout,
                                     .to = q->layout,
                                     .scales_from = q->scales_layout,
                                     .scales_to = q->scales_layout,
                                     .element_bits = q->element == MOE_ELEMENT_E2M1 ? 4 : 8,
                                     .parts = (int32_t)w->parts,
                                     .E = w->E,
                                     .K = w->K,
                                     .columns = w->columns};
  moe_mx_layout_bytes bytes;
  if (!moe_neuron_is_nki_(q->layout))
    return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED,
                            "%s is in no layout of Trainium: convert it by moe_mx_layout_convert", w->name);
  MOE_NEURON_TRY_(moe_mx_layout_size(ctx, &layout, &bytes));
  const int32_t word = layout.element_bits / 2;
  moe_neuron_add_weight_tensor_(call, w->name, q->codes, word == 2 ? MOE_NRT_DTYPE_UINT16 : MOE_NRT_DTYPE_UINT32,
                                MOE_NEURON_SHAPE_((int64_t)bytes.codes_in / word));
  moe_neuron_add_weight_tensor_(call, w->scales_name, q->scales, MOE_NRT_DTYPE_UINT8,
                                MOE_NEURON_SHAPE_((int64_t)bytes.scales_in))
      ->alias = w->scales_alias;
  return MOE_OK;
}

/* A weight as it is stored: plain, or codes and scales. */
MOE_FN moe_status moe_neuron_add_weight_(moe_context *ctx, moe_neuron_call_ *call, const moe_neuron_weight_ *w) {
  int64_t shape[5];
  const moe_quantized_weight *q = w->quantized;
  if (q && q->scaling == MOE_WEIGHT_MX) return moe_neuron_add_mx_weight_(ctx, call, w);
  if (q && (q->scaling == MOE_WEIGHT_GROUP ||
            (q->scaling == MOE_WEIGHT_BLOCK && (q->block_columns || q->first_k || q->first_column || q->scales_type))))
    return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED, "%s has scales that Trainium's kernels do not take", w->name);
  if (q && q->out_in)
    return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED, "%s is in rows, which Trainium's kernels do not take", w->name);
  if (w->quantized) {
    moe_neuron_weight_ codes = *w;
    if (w->parts > 1 || w->down_scales) codes.order = MOE_ORDER_IN_OUT, codes.apart = 0;
    moe_neuron_add_weight_tensor_(call, w->name, w->quantized->codes, moe_neuron_element_(w->quantized->element),
                                  moe_neuron_weight_shape_(&codes, shape));
    moe_neuron_add_scales_(call, &codes);
    return MOE_OK;
  }
  if (w->packed && !w->plain)
    return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED, "packed %s is for CPUs: give the plain one", w->name);
  for (int up = 0; up <= w->apart; up++) {
    moe_neuron_operand *o =
        moe_neuron_add_weight_tensor_(call, up ? w->up_name : w->name, up ? w->up : w->plain,
                                      moe_neuron_dtype_(w->dtype), moe_neuron_weight_shape_(w, shape));
    o->elements = w->dtype, o->per_expert = w->per_expert;
    o->optional = !up && w->apart && w->up_only;
  }
  return MOE_OK;
}

/* Its gradient, of `dtype`: names are those of the tensor, and of what it is added to. */
MOE_FN void moe_neuron_add_weight_grad_(moe_neuron_call_ *call, const moe_neuron_weight_ *w, int accumulates,
                                        const char *given, const char *name, void *data, moe_dtype dtype) {
  int64_t shape[5];
  moe_neuron_operand *o =
      moe_neuron_add_result_(call, accumulates, given, name, data, dtype, moe_neuron_weight_shape_(w, shape));
  for (int k = 0; k <= accumulates; k++) o[-k].per_expert = w->per_expert;
}

/* A [T,H] tensor, plain or quantised; the device's may have a row T. */
MOE_FN void moe_neuron_add_hidden_(moe_neuron_call_ *call, const char *name, const char *scales_name, const void *plain,
                                   const moe_quantized_activation *a, int64_t T, int64_t H) {
  moe_neuron_operand *operand;
  if (!a) {
    operand = moe_neuron_add_float_(call, name, plain, MOE_DTYPE_DEFAULT, MOE_NEURON_SHAPE_(T, H));
    moe_neuron_pad_row_(operand);
    return;
  }
  const int64_t columns = moe_neuron_code_bytes_(a->element, H);
  operand = moe_neuron_add_(call, name, a->codes, moe_neuron_element_(a->element), MOE_NEURON_SHAPE_(T, columns));
  moe_neuron_pad_row_(operand);
  const int64_t rows = !a->float_scales ? T : a->block_rows ? moe_ceil_div_(T, a->block_rows) : 1;
  const int64_t groups = !a->float_scales   ? moe_ceil_div_(H, 32)
                         : a->block_columns ? moe_ceil_div_(H, a->block_columns)
                                            : 1;
  operand = moe_neuron_add_(call, scales_name, a->scales, a->float_scales ? MOE_NRT_DTYPE_FLOAT32 : MOE_NRT_DTYPE_UINT8,
                            MOE_NEURON_SHAPE_(rows, groups));
  if (rows == T) moe_neuron_pad_row_(operand);
}

#endif
