/* One function per operation makes the table of its tensors: names, memory, sizes, types, what they are. Binding,
   checking, reading back and comparing all go by it. */
#ifndef MOE_NEURON_DESCRIBE_H
#define MOE_NEURON_DESCRIBE_H

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

/* -------------------------------------------------------------------------------------------------------- the layer */

MOE_FN moe_dtype moe_neuron_affinity_dtype_(const moe_blockwise_layer *l) {
  return l->affinity_dtype == MOE_DTYPE_DEFAULT ? MOE_DTYPE_F32 : l->affinity_dtype;
}

/* That no id is out of range: on the device that is found by a fault. */
MOE_FN moe_status moe_neuron_check_ids_(moe_context *ctx, const moe_blockwise_layer *l, int dropping) {
  const int32_t padding = l->skip_token ? -1 : (int32_t)l->T;
  if (l->num_valid_tokens && (*l->num_valid_tokens < 0 || *l->num_valid_tokens > l->T))
    return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_INDEX, "num_valid_tokens must be from 0 to T");
  for (int64_t i = 0; i < l->N * l->B && l->token_position_to_id; i++)
    if (l->token_position_to_id[i] != padding && (l->token_position_to_id[i] < 0 || l->token_position_to_id[i] >= l->T))
      return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_INDEX, "token_position_to_id has %d at %lld, which is no token",
                              (int)l->token_position_to_id[i], (long long)i);
  for (int64_t b = 0; b < l->N && l->block_to_expert && !dropping; b++)
    if (l->block_to_expert[b] < 0 || l->block_to_expert[b] > l->E)
      return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_INDEX, "block_to_expert has %d at %lld, which is no expert",
                              (int)l->block_to_expert[b], (long long)b);
  return MOE_OK;
}

MOE_FN moe_status moe_neuron_add_layer_(moe_context *ctx, moe_neuron_call_ *call, const moe_blockwise_layer *l,
                                        int dropping, int mx_bias) {
  const moe_neuron_weight_ gate_up = moe_neuron_gate_up_weight_(l, call->dtype);
  const moe_neuron_weight_ down = moe_neuron_down_weight_(l, call->dtype);
  const moe_mx_rounding *rounding[] = {&l->mx.activations, &l->mx.weights, &l->mx.gradients};
  moe_neuron_operand *o;
  for (int i = 0; i < 3; i++)
    if (rounding[i]->enabled && rounding[i]->element >= MOE_ELEMENT_MXINT8)
      return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED, "mx rounds to an element that Trainium's kernels do not take");
  MOE_NEURON_TRY_(moe_neuron_check_ids_(ctx, l, dropping));
  moe_neuron_add_hidden_(call, "hidden_states", "hidden_states_scale", l->hidden_states, l->quantized_hidden_states,
                         l->T, l->H);
  o = moe_neuron_add_float_(call, "expert_affinities_masked", l->expert_affinities_masked,
                            moe_neuron_affinity_dtype_(l), MOE_NEURON_SHAPE_(l->T, l->E));
  moe_neuron_pad_row_(o);
  o->zero_if_absent = l->config.affinity_mode == MOE_AFFINITY_NO_SCALE;
  MOE_NEURON_TRY_(moe_neuron_add_weight_(ctx, call, &gate_up));
  MOE_NEURON_TRY_(moe_neuron_add_weight_(ctx, call, &down));
  o = moe_neuron_add_float_(call, "gate_and_up_proj_bias", l->gate_and_up_proj_bias, MOE_DTYPE_DEFAULT,
                            MOE_NEURON_SHAPE_(l->E, 2, l->I));
  o->use = MOE_NEURON_WEIGHT, o->zero_if_absent = 1;
  if (mx_bias && l->gate_and_up_proj_bias) {
    const moe_nki_vector_args vector = {
        .kind = MOE_NKI_GATE_UP_BIAS, .dtype = o->elements, .to_nki = 1, .E = l->E, .length = l->I};
    size_t in;
    MOE_NEURON_TRY_(moe_nki_vector_size(ctx, &vector, &in, &o->bytes));
    o->order = MOE_NEURON_ORDER_GATE_UP_BIAS;
  }
  o = moe_neuron_add_float_(call, "down_proj_bias", l->down_proj_bias, MOE_DTYPE_DEFAULT,
                            MOE_NEURON_SHAPE_(l->E, l->H));
  o->use = MOE_NEURON_WEIGHT, o->zero_if_absent = 1;
  moe_neuron_add_(call, "token_position_to_id", l->token_position_to_id, MOE_NRT_DTYPE_INT32,
                  MOE_NEURON_SHAPE_(l->N * l->B));
  if (!dropping)
    moe_neuron_add_(call, "block_to_expert", l->block_to_expert, MOE_NRT_DTYPE_INT32, MOE_NEURON_SHAPE_(l->N));
  o = moe_neuron_add_(call, "conditions", l->conditions, MOE_NRT_DTYPE_INT32, MOE_NEURON_SHAPE_(l->N));
  o->padding = 8, o->optional = 1;
  moe_neuron_add_(call, "num_valid_tokens", l->num_valid_tokens, MOE_NRT_DTYPE_INT32, MOE_NEURON_SHAPE_(1))->optional =
      1;
  moe_neuron_add_float_(call, "gate_up_in_scale", l->mx.gate_up_in_scale, MOE_DTYPE_F32, MOE_NEURON_SHAPE_(l->E))
      ->optional = 1;
  moe_neuron_add_float_(call, "down_in_scale", l->mx.down_in_scale, MOE_DTYPE_F32, MOE_NEURON_SHAPE_(l->E))->optional =
      1;
  return MOE_OK;
}

/* output as device.output_shape says: see there. */
MOE_FN void moe_neuron_add_forward_output_(moe_neuron_call_ *call, const moe_blockwise_mm_fwd_args *args) {
  const moe_blockwise_layer *l = &args->layer;
  const moe_cte_spec spec = args->device.spec;
  const int shaped = args->device.output_shape, accumulates = args->accumulate != 0;
  const int64_t slots = shaped && spec == MOE_CTE_SHARD_ON_BLOCK && !args->not_accumulating ? 2 : 1;
  const int64_t planes = shaped && spec == MOE_CTE_SHARD_ON_BLOCK_MX ? 2 : 1;
  const int padding_row = shaped && slots == 1 && planes == 1 && spec != MOE_CTE_SHARD_ON_BLOCK && !l->skip_token;
  moe_neuron_operand *o = moe_neuron_add_result_(call, accumulates, NULL, "output", args->output, MOE_DTYPE_DEFAULT,
                                                 MOE_NEURON_SHAPE_(planes, l->T + padding_row, slots, l->H));
  o->alias = "output_hidden_states";
  o->rows = l->T, o->row = l->H, o->step = slots * l->H;
  if (!shaped) moe_neuron_pad_rows_(o, accumulates);
}

MOE_FN int moe_neuron_mx_spec_(moe_cte_spec spec) { return spec >= MOE_CTE_SHARD_ON_BLOCK_MX; }

MOE_FN moe_status moe_neuron_describe_forward_(moe_context *ctx, const void *arguments, moe_neuron_call_ *call) {
  const moe_blockwise_mm_fwd_args *args = (const moe_blockwise_mm_fwd_args *)arguments;
  const moe_blockwise_layer *l = &args->layer;
  MOE_NEURON_TRY_(moe_neuron_add_layer_(ctx, call, l, args->device.spec == MOE_CTE_SHARD_ON_I_DROPPING,
                                        moe_neuron_mx_spec_(args->device.spec)));
  moe_neuron_add_output_(call, "gate_up_activations_T", args->gate_up_activations_T, l->checkpoint_dtype,
                         MOE_NEURON_SHAPE_(l->N, 2, l->I, l->B))
      ->alias = "gate_up_proj_act_checkpoint_T";
  moe_neuron_add_output_(call, "down_activations", args->down_activations, l->checkpoint_dtype,
                         MOE_NEURON_SHAPE_(l->N, l->B, l->H))
      ->alias = "down_proj_act_checkpoint";
  moe_neuron_add_output_(call, "scaled_intermediate_checkpoint_T", args->scaled_intermediate_checkpoint_T,
                         l->checkpoint_dtype, MOE_NEURON_SHAPE_(l->N, l->I, l->B));
  moe_neuron_add_forward_output_(call, args);
  return MOE_OK;
}

/* What the forward kept. */
MOE_FN void moe_neuron_add_checkpoints_(moe_neuron_call_ *call, const moe_blockwise_mm_bwd_args *args) {
  const moe_blockwise_layer *l = &args->layer;
  moe_neuron_operand *o = moe_neuron_add_float_(call, "gate_up_activations_T", args->gate_up_activations_T,
                                                l->checkpoint_dtype, MOE_NEURON_SHAPE_(l->N, 2, l->I, l->B));
  o->alias = "gate_up_proj_act_checkpoint_T", o->optional = 1;
  o = moe_neuron_add_float_(call, "down_activations", args->down_activations, l->checkpoint_dtype,
                            MOE_NEURON_SHAPE_(l->N, l->B, l->H));
  o->alias = "down_proj_act_checkpoint", o->optional = 1;
  o = moe_neuron_add_float_(call, "scaled_intermediate_checkpoint_T", args->scaled_intermediate_checkpoint_T,
                            l->checkpoint_dtype, MOE_NEURON_SHAPE_(l->N, l->I, l->B));
  o->optional = 1;
}

MOE_FN void moe_neuron_add_gradients_(moe_neuron_call_ *call, const moe_blockwise_mm_bwd_args *args) {
  const moe_blockwise_layer *l = &args->layer;
  const moe_neuron_weight_ gate_up = moe_neuron_gate_up_weight_(l, call->dtype);
  const moe_neuron_weight_ down = moe_neuron_down_weight_(l, call->dtype);
  const moe_dtype dtype = args->weight_grad_dtype;
#define MOE_NEURON_ADDS_(NAME) ((args->accumulate & MOE_ACCUMULATE_##NAME##_GRAD) != 0)
  moe_neuron_pad_rows_(moe_neuron_add_result_(call, MOE_NEURON_ADDS_(HIDDEN_STATES), "hidden_states_grad_out",
                                              "hidden_states_grad", args->hidden_states_grad, MOE_DTYPE_DEFAULT,
                                              MOE_NEURON_SHAPE_(l->T, l->H)),
                       MOE_NEURON_ADDS_(HIDDEN_STATES));
  moe_neuron_pad_rows_(moe_neuron_add_result_(call, MOE_NEURON_ADDS_(AFFINITIES), "expert_affinities_masked_grad_out",
                                              "expert_affinities_masked_grad", args->expert_affinities_masked_grad,
                                              moe_neuron_affinity_dtype_(l), MOE_NEURON_SHAPE_(l->T, l->E)),
                       MOE_NEURON_ADDS_(AFFINITIES));
  moe_neuron_add_weight_grad_(call, &gate_up, MOE_NEURON_ADDS_(GATE_UP_WEIGHT), "gate_up_proj_weight_grad_out",
                              "gate_up_proj_weight_grad", args->gate_up_proj_weight_grad, dtype);
  if (gate_up.apart)
    moe_neuron_add_weight_grad_(call, &gate_up, MOE_NEURON_ADDS_(GATE_UP_WEIGHT), "up_proj_weight_grad_out",
                                "up_proj_weight_grad", args->up_proj_weight_grad, dtype);
  moe_neuron_add_weight_grad_(call, &down, MOE_NEURON_ADDS_(DOWN_WEIGHT), "down_proj_weight_grad_out",
                              "down_proj_weight_grad", args->down_proj_weight_grad, dtype);
  moe_neuron_add_result_(call, MOE_NEURON_ADDS_(GATE_UP_BIAS), NULL, "gate_and_up_proj_bias_grad",
                         args->gate_and_up_proj_bias_grad, dtype, MOE_NEURON_SHAPE_(l->E, 2, l->I));
  moe_neuron_add_result_(call, MOE_NEURON_ADDS_(DOWN_BIAS), NULL, "down_proj_bias_grad", args->down_proj_bias_grad,
                         dtype, MOE_NEURON_SHAPE_(l->E, l->H));
#undef MOE_NEURON_ADDS_
}

MOE_FN moe_status moe_neuron_describe_backward_(moe_context *ctx, const void *arguments, moe_neuron_call_ *call) {
  const moe_blockwise_mm_bwd_args *args = (const moe_blockwise_mm_bwd_args *)arguments;
  const moe_blockwise_layer *l = &args->layer;
  MOE_NEURON_TRY_(moe_neuron_add_layer_(ctx, call, l, args->kernel_type == MOE_KERNEL_DROPPING, 0));
  moe_neuron_add_checkpoints_(call, args);
  moe_neuron_add_hidden_(call, "output_hidden_states_grad", "output_hidden_states_grad_scale",
                         args->output_hidden_states_grad, args->quantized_output_hidden_states_grad, l->T, l->H);
  moe_neuron_add_gradients_(call, args);
  return MOE_OK;
}

/* ----------------------------------------------------------------------------------------------------- grouped GEMM */

/* That no size or slot is out of range; padding's may be -1. */
MOE_FN moe_status moe_neuron_check_groups_(moe_context *ctx, const moe_grouped_gemm_args *args, int64_t total) {
  int64_t rows = 0;
  for (int64_t e = 0; e < args->E && args->m_sizes; e++) {
    if (args->m_sizes[e] < 0) return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "m_sizes has a negative count");
    rows += args->m_sizes[e];
  }
  if (rows > total)
    return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "m_sizes adds up to more than num_tokens*topk");
  for (int64_t i = 0; i < total && args->gather_indices; i++)
    if (args->gather_indices[i] < (i < rows ? 0 : -1) || args->gather_indices[i] >= total)
      return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_INDEX, "gather_indices has %d at %lld, which is no slot",
                              (int)args->gather_indices[i], (long long)i);
  return MOE_OK;
}

/* What each of the three reads, then what it writes. topk_weights_grad takes X and the bias as well. */
MOE_FN moe_status moe_neuron_describe_grouped_(moe_context *ctx, const void *arguments, moe_neuron_call_ *call) {
  const moe_grouped_gemm_args *a = (const moe_grouped_gemm_args *)arguments;
  const int forward = call->kind == MOE_NEURON_GROUPED_, dx = call->kind == MOE_NEURON_GROUPED_DX_,
            dw = !forward && !dx;
  const int64_t total = a->num_tokens * a->topk;
  const moe_neuron_weight_ w = moe_neuron_grouped_weight_(a, call->dtype);
  moe_neuron_operand *o;
  MOE_NEURON_TRY_(moe_neuron_check_groups_(ctx, a, total));
#define MOE_NEURON_ADDS_(NAME) ((a->accumulate & MOE_ACCUMULATE_##NAME) != 0)
  moe_neuron_add_(call, "m_sizes", a->m_sizes, MOE_NRT_DTYPE_INT32, MOE_NEURON_SHAPE_(a->E));
  o = moe_neuron_add_(call, "gather_indices", a->gather_indices, MOE_NRT_DTYPE_INT32, MOE_NEURON_SHAPE_(total));
  o->optional = !a->permute_x && !a->permute_y;
  if (!dx || a->topk_weights_grad)
    moe_neuron_add_float_(call, "X", a->X, MOE_DTYPE_DEFAULT,
                          MOE_NEURON_SHAPE_(a->permute_x ? a->num_tokens : total, a->K));
  if (!dw) MOE_NEURON_TRY_(moe_neuron_add_weight_(ctx, call, &w));
  if (forward || (dx && a->topk_weights_grad)) {
    o = moe_neuron_add_float_(call, "bias", a->bias, MOE_DTYPE_DEFAULT, MOE_NEURON_SHAPE_(a->E, a->N));
    o->use = MOE_NEURON_WEIGHT, o->zero_if_absent = 1;
  }
  if (!forward) moe_neuron_add_float_(call, "dY", a->dY, MOE_DTYPE_DEFAULT, MOE_NEURON_SHAPE_(total, a->N));
  moe_neuron_add_float_(call, "topk_weights", a->topk_weights, MOE_DTYPE_F32, MOE_NEURON_SHAPE_(total))->optional = 1;
  if (forward)
    moe_neuron_add_result_(call, MOE_NEURON_ADDS_(Y), NULL, "Y", a->Y, MOE_DTYPE_DEFAULT,
                           MOE_NEURON_SHAPE_(total, a->N));
  if (dx) {
    moe_neuron_add_result_(call, MOE_NEURON_ADDS_(DX), NULL, "dX", a->dX, MOE_DTYPE_DEFAULT,
                           MOE_NEURON_SHAPE_(a->sum_topk ? a->num_tokens : total, a->K));
    moe_neuron_add_result_(call, MOE_NEURON_ADDS_(TOPK_WEIGHTS_GRAD), NULL, "topk_weights_grad", a->topk_weights_grad,
                           MOE_DTYPE_F32, MOE_NEURON_SHAPE_(total));
  }
  if (dw) {
    moe_neuron_add_weight_grad_(call, &w, MOE_NEURON_ADDS_(DW), NULL, "dW", a->dW, a->weight_grad_dtype);
    moe_neuron_add_result_(call, MOE_NEURON_ADDS_(BIAS_GRAD), NULL, "bias_grad", a->bias_grad, a->weight_grad_dtype,
                           MOE_NEURON_SHAPE_(a->E, a->N));
  }
#undef MOE_NEURON_ADDS_
  return MOE_OK;
}

/* ------------------------------------------------------------------------------------------------- the MLP of MXFP8 */

/* An operand [F,K]: values, or words and scales. */
MOE_FN moe_status moe_neuron_add_mx_(moe_context *ctx, moe_neuron_call_ *call, const char *name, const char *alias,
                                     const char *scales_name, const char *scales_alias, const moe_mxfp8_operand *x,
                                     int64_t F, int64_t K) {
  const int64_t rows = x->scales_layout == MOE_MX_SCALES_NKI_OVERSIZED ? K / 4
                       : x->scales_layout == MOE_MX_SCALES_NKI_PACKED  ? moe_ceil_div_(K, 2048) * 128
                                                                       : K / 32;
  moe_neuron_operand *o;
  if (x->scales && !x->is_swizzled)
    return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED,
                            "%s is in no layout of Trainium: convert it by moe_mx_layout_convert", name);
  if (x->scales) o = moe_neuron_add_(call, name, x->data, MOE_NRT_DTYPE_UINT32, MOE_NEURON_SHAPE_(K / 4, F));
  else if (x->is_swizzled)
    o = moe_neuron_add_(call, name, x->data, MOE_NRT_DTYPE_BFLOAT16, MOE_NEURON_SHAPE_(K / 4, 4 * F));
  else o = moe_neuron_add_(call, name, x->data, MOE_NRT_DTYPE_BFLOAT16, MOE_NEURON_SHAPE_(F, K));
  o->alias = alias, o->optional = 1;
  o->use = strstr(name, "weight") ? MOE_NEURON_WEIGHT : MOE_NEURON_INPUT;
  if (!x->scales) return MOE_OK;
  o = moe_neuron_add_(call, scales_name, x->scales, MOE_NRT_DTYPE_UINT8, MOE_NEURON_SHAPE_(rows, F));
  o->alias = scales_alias, o->optional = 1, o->use = o[-1].use;
  return MOE_OK;
}
#define MOE_NEURON_ADD_MX_(field, alias, scales_alias, F, K) \
  MOE_NEURON_TRY_(moe_neuron_add_mx_(ctx, call, #field, alias, #field "_scales", scales_alias, &args->field, F, K))

MOE_FN moe_status moe_neuron_describe_matmul_(moe_context *ctx, const void *arguments, moe_neuron_call_ *call) {
  const moe_matmul_mxfp8_args *args = (const moe_matmul_mxfp8_args *)arguments;
  MOE_NEURON_ADD_MX_(a, NULL, NULL, args->M, args->K);
  MOE_NEURON_ADD_MX_(b, NULL, NULL, args->N, args->K);
  moe_neuron_add_output_(call, "output", args->output, args->output_dtype, MOE_NEURON_SHAPE_(args->M, args->N));
  return MOE_OK;
}

MOE_FN moe_status moe_neuron_describe_mlp_forward_(moe_context *ctx, const void *arguments, moe_neuron_call_ *call) {
  const moe_mlp_fwd_mxfp8_args *args = (const moe_mlp_fwd_mxfp8_args *)arguments;
  const int64_t S = args->mlp.S, H = args->mlp.H, I = args->mlp.I;
  if (args->row_base || args->row_count)
    return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED, "row_base and row_count must be 0: a kernel computes all rows");
  MOE_NEURON_ADD_MX_(hidden_states, "hidden", "hidden_scales", S, H);
  MOE_NEURON_ADD_MX_(gate_up_weights, NULL, "gate_up_scales", 2 * I, H);
  MOE_NEURON_ADD_MX_(down_weight, "down_weights", "down_scales", H, I);
#define MOE_NEURON_ADD_SAVED_(field) \
  moe_neuron_add_output_(call, #field, args->field, MOE_DTYPE_BF16, MOE_NEURON_SHAPE_(S, I))->alias = "save_" #field
  MOE_NEURON_ADD_SAVED_(gate_pre);
  MOE_NEURON_ADD_SAVED_(gate_act);
  MOE_NEURON_ADD_SAVED_(up);
  MOE_NEURON_ADD_SAVED_(hidden);
#undef MOE_NEURON_ADD_SAVED_
  moe_neuron_add_output_(call, "output", args->output, MOE_DTYPE_BF16, MOE_NEURON_SHAPE_(S, H));
  return MOE_OK;
}

/* What is computed for want of a checkpoint, and gradients. */
MOE_FN void moe_neuron_add_mlp_results_(moe_neuron_call_ *call, const moe_mlp_bwd_mxfp8_args *args) {
  const int64_t S = args->mlp.S, H = args->mlp.H, I = args->mlp.I;
  const moe_dtype dtype = args->weight_grad_dtype;
#define MOE_NEURON_ADD_(field, checkpoint) \
  moe_neuron_add_output_(call, #field, checkpoint ? NULL : args->field, MOE_DTYPE_BF16, MOE_NEURON_SHAPE_(S, I))
  MOE_NEURON_ADD_(gate_pre_scratch, args->gate_pre);
  MOE_NEURON_ADD_(gate_act_scratch, args->gate_act);
  MOE_NEURON_ADD_(up_scratch, args->up);
  MOE_NEURON_ADD_(hidden_scratch, args->hidden);
  MOE_NEURON_ADD_(d_gate, NULL);
  MOE_NEURON_ADD_(d_up, NULL);
#undef MOE_NEURON_ADD_
  moe_neuron_add_output_(call, "d_gate_up_T", args->d_gate_up_T, MOE_DTYPE_BF16, MOE_NEURON_SHAPE_(2 * I, S));
  moe_neuron_add_output_(call, "hidden_states_grad", args->hidden_states_grad, MOE_DTYPE_BF16, MOE_NEURON_SHAPE_(S, H));
  moe_neuron_add_result_(call, (args->accumulate & MOE_ACCUMULATE_GATE_UP_WEIGHT_GRAD) != 0, NULL,
                         "gate_up_weight_grad", args->gate_up_weight_grad, dtype, MOE_NEURON_SHAPE_(2 * I, H));
  moe_neuron_add_result_(call, (args->accumulate & MOE_ACCUMULATE_DOWN_WEIGHT_GRAD) != 0, NULL, "down_weight_grad",
                         args->down_weight_grad, dtype, MOE_NEURON_SHAPE_(H, I))
      ->alias = "down_proj_weight_grad";
}

MOE_FN moe_status moe_neuron_describe_mlp_backward_(moe_context *ctx, const void *arguments, moe_neuron_call_ *call) {
  const moe_mlp_bwd_mxfp8_args *args = (const moe_mlp_bwd_mxfp8_args *)arguments;
  const int64_t S = args->mlp.S, H = args->mlp.H, I = args->mlp.I;
  MOE_NEURON_ADD_MX_(output_grad, NULL, NULL, S, H);
  MOE_NEURON_ADD_MX_(hidden_states, NULL, NULL, S, H);
  MOE_NEURON_ADD_MX_(gate_up_weights, NULL, NULL, 2 * I, H);
  MOE_NEURON_ADD_MX_(gate_weight_T, NULL, NULL, H, I);
  MOE_NEURON_ADD_MX_(up_weight_T, NULL, NULL, H, I);
  MOE_NEURON_ADD_MX_(down_weight, NULL, NULL, H, I);
  MOE_NEURON_ADD_MX_(down_weight_T, "down_proj_weight", NULL, I, H);
  MOE_NEURON_ADD_MX_(hidden_states_T, NULL, NULL, H, S);
  MOE_NEURON_ADD_MX_(output_grad_T, NULL, NULL, H, S);
  MOE_NEURON_ADD_MX_(hidden_T, "intermediate_T", NULL, I, S);
#define MOE_NEURON_ADD_(field, name)                                                                                   \
  do {                                                                                                                 \
    moe_neuron_operand *o = moe_neuron_add_float_(call, #field, args->field, MOE_DTYPE_BF16, MOE_NEURON_SHAPE_(S, I)); \
    o->alias = name, o->optional = 1;                                                                                  \
  } while (0)
  MOE_NEURON_ADD_(gate_pre, NULL);
  MOE_NEURON_ADD_(gate_act, NULL);
  MOE_NEURON_ADD_(up, NULL);
  MOE_NEURON_ADD_(hidden, "intermediate");
#undef MOE_NEURON_ADD_
  moe_neuron_add_mlp_results_(call, args);
  return MOE_OK;
}
#undef MOE_NEURON_ADD_MX_

#endif
