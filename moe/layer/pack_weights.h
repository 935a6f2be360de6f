/* moe_pack_weights_*: a weight tensor as packed panels of B, with a header that says what was packed. */
#ifndef MOE_LAYER_PACK_WEIGHTS_H
#define MOE_LAYER_PACK_WEIGHTS_H

#define MOE_PACKED_MAGIC_ 0x6d6f6570u

typedef struct moe_packed_header_ {
  uint32_t magic, layout, panel, dtype, unscaled, backward;
  int64_t E, rows, columns;
} moe_packed_header_;

/* How the elements of a plain weight lie: how many elements on from an expert, a part, an element of the contraction,
   or a column the next one is. */
typedef struct moe_strides_ {
  int64_t expert, part, k, column;
  const void *up; /* another tensor, in which the second part is; or NULL */
  int each;       /* tensors are arrays of pointers to the experts' */
} moe_strides_;

/* The shape of a packed tensor: panels of 64 (gate and up: 32 and 32) columns, each over `depth`
   elements. The forward contracts rows, or of GROUPED columns; the backward the other axis. */
typedef struct moe_packed_ {
  moe_pack_layout layout;
  moe_panel_kind_ panel;
  moe_dtype dtype;
  int backward;
  int64_t E, rows, columns, k, n, depth, width, panels, panel_bytes; /* k, n: elements and columns of a part */
  moe_strides_ plain;
  moe_quantized_ quantized; /* the weight itself, if it is */
} moe_packed_;

/* How many parts the plain tensor has. */
MOE_FN int moe_pack_parts_(moe_pack_layout layout) {
  return layout == MOE_PACK_GATE_UP || layout == MOE_PACK_UP ? 2 : 1;
}

/* The layer's weights in an order. */
MOE_FN void moe_packed_order_(moe_packed_ *p, moe_weight_order order, const moe_weight_orders *orders, const void *up) {
  const int64_t K = p->k, n = p->n, parts = moe_pack_parts_(p->layout),
                joined = parts == 2 && !orders->up_apart ? 2 : 1;
  p->plain = (moe_strides_){moe_mul3_(joined, K, n), joined > 1 ? n : 0, moe_mul_(joined, n), 1, NULL, orders->per_expert};
  if (order != MOE_ORDER_IN_OUT) p->plain.part = joined > 1 ? moe_mul_(n, K) : 0, p->plain.k = 1, p->plain.column = K;
  if (order == MOE_ORDER_INTERLEAVED) p->plain.part = K, p->plain.column = moe_mul_(2, K);
  if (orders->up_apart && p->layout == MOE_PACK_GATE_UP) p->plain.up = up;
}

MOE_FN void moe_packed_init_(moe_packed_ *p, moe_pack_layout layout, int backward, moe_panel_kind_ kind,
                             moe_dtype dtype, int64_t E, int64_t rows, int64_t columns,
                             const moe_quantized_weight *quantized) {
  const int grouped = layout == MOE_PACK_GROUPED, parts = moe_pack_parts_(layout);
  p->layout = layout;
  p->panel = kind;
  p->dtype = dtype;
  p->E = E;
  p->rows = rows;
  p->columns = columns;
  p->k = grouped ? columns : rows;
  p->n = grouped ? rows : columns;
  p->plain = grouped ? (moe_strides_){moe_mul_(rows, columns), 0, 1, columns, NULL, 0}
                     : (moe_strides_){moe_mul3_(rows, parts, columns), columns, moe_mul_(parts, columns), 1, NULL, 0};
  p->width = layout == MOE_PACK_GATE_UP ? MOE_NR / 2 : MOE_NR;
  p->backward = backward;
  p->depth = backward ? p->n : p->k;
  p->panels = moe_ceil_div_(backward ? p->k : p->n, p->width);
  p->panel_bytes = moe_panel_bytes_(kind, p->depth);
  moe_quantized_init_(&p->quantized, quantized, dtype, E, p->k, parts, p->n, layout == MOE_PACK_UP, grouped);
}

MOE_FN int64_t moe_packed_bytes_(const moe_packed_ *p) {
  return moe_add_(MOE_ALIGN_, moe_mul3_(p->E, p->panels, p->panel_bytes));
}

/* Lists a packed tensor among a function's. */
MOE_FN void moe_packed_list_(const moe_packed_ *p, const char *name, const void *packed, moe_tensors_ *tensors) {
  const moe_tensor_ own[] = {{name, packed, moe_packed_bytes_(p), MOE_ALIGN_, MOE_INPUT_OPTIONAL}};
  MOE_LIST_(tensors, own);
}

/* Whether it holds codes, whose scales multiply product sums. */
MOE_FN int moe_packed_unscaled_(const moe_packed_ *p) {
  return !p->backward && moe_weight_scaled_after_(p->quantized.weight);
}

/* Whether what the caller gave is this tensor. */
MOE_FN moe_status moe_packed_check_(moe_context *ctx, const moe_packed_ *p, const char *name, const void *packed,
                                    size_t bytes) {
  moe_packed_header_ h;
  if (!packed) return MOE_OK;
  if (bytes < MOE_ALIGN_) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, name, "is too small to be a packed tensor");
  memcpy(&h, packed, sizeof h);
  const uint32_t unscaled = (uint32_t)moe_packed_unscaled_(p);
  if (h.magic == MOE_PACKED_MAGIC_ && h.unscaled != unscaled)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, name, "was packed from a weight with other scales");
  if (h.magic != MOE_PACKED_MAGIC_ || h.layout != (uint32_t)p->layout || h.dtype != (uint32_t)p->dtype || h.E != p->E ||
      h.rows != p->rows || h.columns != p->columns || h.backward != (uint32_t)p->backward)
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, name, "was not packed from a tensor of this layout, type and shape");
  if (h.panel != (uint32_t)p->panel)
    return moe_fail_(ctx, MOE_ERROR_UNSUPPORTED, name, "was packed for another instruction set");
  if (bytes < (size_t)moe_packed_bytes_(p))
    return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, name, "has fewer bytes than a tensor of this shape");
  return MOE_OK;
}

/* ---------------------------------------------------------------------------------------------------------- packing */

/* Where part `part` of a plain tensor's expert begins. */
MOE_FN const char *moe_plain_at_(const moe_packed_ *p, const void *weight, int64_t expert, int64_t part) {
  const moe_strides_ *plain = &p->plain;
  const int64_t size = moe_dtype_bytes_(p->dtype), at = part && plain->up ? 0 : part * plain->part;
  const void *tensor = part && plain->up ? plain->up : weight;
  if (plain->each) return (const char *)((const void *const *)tensor)[expert] + at * size;
  return (const char *)tensor + (expert * plain->expert + at) * size;
}

/* An expert's columns of a plain tensor as B, contracted over k; or, transposed, columns along k, contracted over the
   columns of all parts. */
MOE_FN void moe_plain_b_of_(const moe_packed_ *p, const void *weight, int64_t expert, int transposed, moe_b_ *b) {
  const int64_t size = moe_dtype_bytes_(p->dtype), part = p->layout == MOE_PACK_UP;
  const int64_t parts = p->layout == MOE_PACK_GATE_UP ? 2 : 1;
  const int64_t along = transposed ? p->plain.column : p->plain.k, across = transposed ? p->plain.k : p->plain.column;
  memset(b, 0, sizeof *b);
  b->dtype = p->dtype;
  b->group = 32 * size;
  b->transposed = across != 1;
  b->stride = (across != 1 ? across : along) * size;
  b->parts = transposed ? 1 : parts;
  b->n = transposed ? p->k : p->n;
  b->k = transposed ? parts * p->n : p->k;
  if (!weight) return; /* packed only */
  for (int64_t i = 0; i < parts; i++) b->base[i] = moe_plain_at_(p, weight, expert, part + i);
  if (transposed && parts == 2 && b->base[1] != b->base[0] + p->n * along * size) b->k_second = p->n;
}

/* An expert's columns as B: packed if given, else quantised, else plain. */
MOE_FN void moe_weight_b_(const moe_packed_ *p, const void *weight, const void *packed, int64_t expert, moe_b_ *b) {
  if (!packed && p->quantized.weight) {
    moe_quantized_b_(&p->quantized, expert, p->backward, b);
    return;
  }
  moe_plain_b_of_(p, packed ? NULL : weight, expert, p->backward, b);
  if (packed) b->panel = (const char *)packed + MOE_ALIGN_ + expert * p->panels * p->panel_bytes;
  b->panel_bytes = p->panel_bytes;
}

typedef struct moe_pack_job_ {
  const moe_kernels *kernels;
  moe_packed_ packed;
  const moe_pack_weights_args *args;
  const void *weight; /* with the gate apart: of UP the up weight */
} moe_pack_job_;

MOE_FN void moe_pack_item_(void *arg, int64_t item, moe_worker_ *worker) {
  const moe_pack_job_ *job = (const moe_pack_job_ *)arg;
  const moe_packed_ *p = &job->packed;
  char *panel = (char *)job->args->packed + MOE_ALIGN_ + item * p->panel_bytes;
  moe_b_ b;
  (void)worker;
  moe_weight_b_(p, job->weight, NULL, item / p->panels, &b);
  moe_pack_b_(job->kernels, p->panel, &b, item % p->panels, 0, p->depth, panel);
}

MOE_FN moe_status moe_check_orders_(moe_context *ctx, const moe_weight_orders *orders) {
  MOE_TRY(moe_check_enum_(ctx, "orders.gate_up", (int)orders->gate_up, MOE_ORDER_COUNT_));
  MOE_TRY(moe_check_enum_(ctx, "orders.down", (int)orders->down, MOE_ORDER_COUNT_));
  MOE_TRY(moe_check_flag_(ctx, "orders.up_apart", orders->up_apart));
  MOE_TRY(moe_check_flag_(ctx, "orders.per_expert", orders->per_expert));
  if (orders->down == MOE_ORDER_INTERLEAVED)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "orders.down", "cannot be INTERLEAVED");
  if (orders->gate_up == MOE_ORDER_INTERLEAVED && orders->up_apart)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "orders.up_apart", "and INTERLEAVED exclude each other");
  return MOE_OK;
}

MOE_FN moe_status moe_pack_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  moe_pack_job_ *job = (moe_pack_job_ *)state;
  const moe_pack_weights_args *args = job->args = (const moe_pack_weights_args *)call->args;
  const int parts = moe_pack_parts_(args->layout);
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_enum_(ctx, "layout", (int)args->layout, MOE_PACK_COUNT_));
  MOE_TRY(moe_check_count_(ctx, "E", args->E));
  MOE_TRY(moe_check_positive_(ctx, "rows", args->rows));
  MOE_TRY(moe_check_positive_(ctx, "columns", args->columns));
  MOE_TRY(moe_check_flag_(ctx, "backward", args->backward));
  if (args->backward && args->layout != MOE_PACK_DOWN && args->layout != MOE_PACK_GROUPED)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "backward", "is for DOWN and GROUPED only");
  MOE_TRY(moe_check_orders_(ctx, &args->orders));
  MOE_TRY(moe_quantized_check_(ctx, args->quantized_weight, parts,
                               args->layout == MOE_PACK_GROUPED ? args->columns : args->rows));
  moe_group_ group;
  moe_group_init_(&group, call->dtype, args->E);
  job->kernels = group.kernels;
  job->weight = args->weight;
  moe_packed_init_(&job->packed, args->layout, args->backward, group.panel, call->dtype, args->E, args->rows,
                   args->columns, args->quantized_weight);
  const int apart = parts == 2 && args->orders.up_apart, up = args->layout == MOE_PACK_UP;
  const moe_weight_order order = parts == 2 ? args->orders.gate_up : args->orders.down;
  if (args->layout != MOE_PACK_GROUPED) moe_packed_order_(&job->packed, order, &args->orders, args->up_weight);
  if (apart && up) job->weight = args->up_weight;
  const int64_t size = moe_dtype_bytes_(job->packed.dtype);
  const int64_t bytes =
      moe_mul_(moe_mul4_(args->orders.per_expert ? 1 : args->E, args->rows, apart ? 1 : parts, args->columns), size);
  const moe_role_ role = args->quantized_weight ? MOE_INPUT_OPTIONAL : MOE_INPUT;
  const moe_tensor_ own[] = {
      {"weight", args->quantized_weight || (apart && up) ? NULL : args->weight, bytes, size,
       apart && up ? MOE_INPUT_OPTIONAL : role},
      {"packed", args->packed, moe_packed_bytes_(&job->packed), MOE_ALIGN_, MOE_OUTPUT},
      {"up_weight", args->quantized_weight || !apart ? NULL : args->up_weight, bytes, size,
       apart ? role : MOE_INPUT_OPTIONAL},
  };
  MOE_LIST_(tensors, own);
  tensors->experts = args->E;
  if (args->orders.per_expert) tensors->each = 1 | 1 << 2;
  MOE_QUANTIZED_LIST_(&job->packed.quantized, "quantized_weight", tensors);
  return MOE_OK;
}

MOE_FN moe_status moe_pack_answer_(moe_context *ctx, const moe_tensors_ *tensors, void *answer) {
  if (!answer) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "bytes", "is NULL");
  *(size_t *)answer = (size_t)tensors->tensor[1].bytes; /* packed */
  return MOE_OK;
}

MOE_FN moe_status moe_pack_check_contents_(moe_context *ctx, const void *state) {
  const moe_pack_job_ *job = (const moe_pack_job_ *)state;
  if (job->args->packed_bytes < (size_t)moe_packed_bytes_(&job->packed))
    return moe_fail_(ctx, MOE_ERROR_WORKSPACE, "packed_bytes", "is smaller than moe_pack_weights_*_size says");
  return MOE_QUANTIZED_CHECK_SCALES_(ctx, &job->packed.quantized, "quantized_weight");
}

MOE_FN moe_status moe_pack_run_(moe_context *ctx, void *state) {
  moe_pack_job_ *job = (moe_pack_job_ *)state;
  const moe_packed_ *p = &job->packed;
  const uint32_t unscaled = (uint32_t)moe_packed_unscaled_(p);
  const moe_packed_header_ header = {MOE_PACKED_MAGIC_,
                                     (uint32_t)p->layout,
                                     (uint32_t)p->panel,
                                     (uint32_t)p->dtype,
                                     unscaled,
                                     (uint32_t)p->backward,
                                     p->E,
                                     p->rows,
                                     p->columns};
  memset(job->args->packed, 0, MOE_ALIGN_);
  memcpy(job->args->packed, &header, sizeof header);
  return moe_run_items_(ctx, p->E * p->panels, moe_pack_item_, job);
}

static const moe_op_ moe_pack_op_ = {moe_pack_check_, NULL, moe_pack_run_, moe_pack_check_contents_, moe_pack_answer_};

#define MOE_DEFINE_PACK_(name, type, NAME)                                                                        \
  MOE_OP_(moe_pack_weights_##name, moe_pack_weights_args, moe_pack_op_, moe_pack_job_, .dtype = MOE_DTYPE_##NAME) \
  MOE_OP_SIZE_(moe_pack_weights_##name##_size, moe_pack_weights_args, moe_pack_op_, moe_pack_job_,                \
               .dtype = MOE_DTYPE_##NAME)
MOE_DTYPE_LIST(MOE_DEFINE_PACK_)
#undef MOE_DEFINE_PACK_

#endif
