/* A table of tensors, bound by name to what a NEFF declares. */
#ifndef MOE_NEURON_BIND_H
#define MOE_NEURON_BIND_H

static const moe_neuron_options moe_neuron_no_options_;
MOE_FN const moe_neuron_options *moe_neuron_options_(const moe_neuron_options *options) {
  return options ? options : &moe_neuron_no_options_;
}

/* ------------------------------------------------------------------------------------------------------------ names */

/* Whether `neff` is what the NEFF calls the operand. */
MOE_FN int moe_neuron_named_(const moe_neuron_operand *operand, const moe_neuron_options *o, const char *neff) {
  for (int32_t i = 0; i < o->names_count; i++)
    if (strcmp(o->names[i].field, operand->name) == 0) return o->names[i].neff && strcmp(o->names[i].neff, neff) == 0;
  return strcmp(operand->name, neff) == 0 || (operand->alias && strcmp(operand->alias, neff) == 0);
}

/* Whether the caller says that it is not bound. */
MOE_FN int moe_neuron_unbound_(const moe_neuron_operand *operand, const moe_neuron_options *o) {
  for (int32_t i = 0; i < o->names_count; i++)
    if (strcmp(o->names[i].field, operand->name) == 0 && !o->names[i].neff) return 1;
  return 0;
}

/* The operand that a declared tensor is, or NULL. */
MOE_FN const moe_neuron_operand *moe_neuron_operand_of_(const moe_neuron_table *table, const moe_neuron_options *o,
                                                        const moe_nrt_tensor_info *declared) {
  for (int32_t i = 0; i < table->count; i++) {
    const moe_neuron_operand *operand = &table->operand[i];
    if ((operand->use == MOE_NEURON_OUTPUT) == moe_neuron_is_output_(declared) &&
        moe_neuron_named_(operand, o, declared->name))
      return operand;
  }
  return NULL;
}

/* ----------------------------------------------------------------------------------------------------------- checks */

/* The data of an operand, or of expert e where these lie apart. */
MOE_FN void *moe_neuron_part_(const moe_neuron_operand *operand, int64_t e) {
  return operand->per_expert ? ((void *const *)operand->data)[e] : operand->data;
}

MOE_FN const char *moe_neuron_dtype_name_(moe_nrt_dtype dtype) {
  switch ((int)dtype) {
#define MOE_NRT_CASE_(name, value, bytes) \
  case value: return #name;
    MOE_NRT_DTYPE_LIST(MOE_NRT_CASE_)
#undef MOE_NRT_CASE_
  }
  return "an unknown type";
}

MOE_FN size_t moe_neuron_dtype_bytes_(moe_nrt_dtype dtype) {
  switch ((int)dtype) {
#define MOE_NRT_CASE_(name, value, bytes) \
  case value: return bytes;
    MOE_NRT_DTYPE_LIST(MOE_NRT_CASE_)
#undef MOE_NRT_CASE_
  }
  return 0;
}

MOE_FN int moe_neuron_is_float_(moe_nrt_dtype dtype) {
  return dtype == MOE_NRT_DTYPE_FLOAT32 || dtype == MOE_NRT_DTYPE_FLOAT16 || dtype == MOE_NRT_DTYPE_BFLOAT16;
}

/* Whether the same bytes mean the same. libnrt does not always tell a type; integers are told apart by their size only,
   and fp8 codes are bytes. */
MOE_FN int moe_neuron_same_type_(moe_nrt_dtype ours, moe_nrt_dtype declared) {
  if (declared == MOE_NRT_DTYPE_FP32R) declared = MOE_NRT_DTYPE_FLOAT32;
  if (ours == declared || declared == MOE_NRT_DTYPE_UNKNOWN) return 1;
  return !moe_neuron_is_float_(ours) && !moe_neuron_is_float_(declared) &&
         moe_neuron_dtype_bytes_(ours) == moe_neuron_dtype_bytes_(declared);
}

/* Adds an axis to "[2,3". */
MOE_FN size_t moe_neuron_axis_(char *text, size_t bytes, size_t at, int64_t axis) {
  if (at + 1 >= bytes) return at;
  return at + (size_t)snprintf(text + at, bytes - at, "%c%lld", at ? ',' : '[', (long long)axis);
}

/* "[2,3] of FLOAT32" */
MOE_FN const char *moe_neuron_declared_(const moe_nrt_tensor_info *declared, char *text, size_t bytes) {
  size_t at = 0;
  for (uint32_t i = 0; i < declared->ndim && declared->shape; i++)
    at = moe_neuron_axis_(text, bytes, at, (int64_t)declared->shape[i]);
  if (at < bytes)
    (void)snprintf(text + at, bytes - at, "%s%s", at ? "] of " : "", moe_neuron_dtype_name_(declared->dtype));
  return text;
}
MOE_FN const char *moe_neuron_axes_(const moe_neuron_operand *operand, char *text, size_t bytes) {
  size_t at = 0;
  for (int32_t i = 0; i < operand->ndim; i++) at = moe_neuron_axis_(text, bytes, at, operand->shape[i]);
  if (at < bytes) (void)snprintf(text + at, bytes - at, "]");
  return text;
}

/* Whether the NEFF has as many axes as we have, but others: a weight in another order. An axis of 1 is none. What is
   padded, or differs in how many axes there are, is not looked at. */
MOE_FN int moe_neuron_other_axes_(const moe_neuron_operand *operand, const moe_nrt_tensor_info *declared) {
  int32_t a = 0;
  uint32_t b = 0;
  int differ = 0;
  if (!declared->shape || declared->size != operand->bytes) return 0;
  for (;; a++, b++) {
    while (a < operand->ndim && operand->shape[a] == 1) a++;
    while (b < declared->ndim && declared->shape[b] == 1) b++;
    if (a >= operand->ndim || b >= declared->ndim) break;
    differ |= operand->shape[a] != (int64_t)declared->shape[b];
  }
  return differ && a >= operand->ndim && b >= declared->ndim;
}

/* That each expert's data are there, where they lie apart. */
MOE_FN moe_status moe_neuron_check_experts_(moe_context *ctx, const moe_neuron_operand *operand) {
  for (int64_t e = 0; operand->data && operand->per_expert && e < operand->shape[0]; e++)
    if (!moe_neuron_part_(operand, e))
      return moe_neuron_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "%s has a NULL at %lld", operand->name, (long long)e);
  return MOE_OK;
}

/* One tensor of the NEFF. */
MOE_FN moe_status moe_neuron_check_declared_(moe_context *ctx, const moe_neuron_model *model, int32_t i,
                                             const moe_neuron_operand *operand) {
  char text[96], own[96];
  const moe_nrt_tensor_info *declared = &model->tensor[i];
  const int output = moe_neuron_is_output_(declared), attached = model->device[i] && !model->owned[i];
  if (!operand && attached) return MOE_OK;
  if (!operand)
    return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_OPTION,
                            "%s, an %s of the NEFF, is no tensor of this call: see "
                            "options.names",
                            declared->name, output ? "output" : "input");
  if (!operand->data && !output && !operand->zero_if_absent && !model->written[i])
    return moe_neuron_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "%s is NULL, but the NEFF wants it", operand->name);
  if (!operand->data) return MOE_OK;
  if (!moe_neuron_same_type_(operand->dtype, declared->dtype))
    return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_OPTION, "%s is of %s here, and %s in the NEFF", operand->name,
                            moe_neuron_dtype_name_(operand->dtype), moe_neuron_declared_(declared, text, sizeof text));
  if (declared->size < operand->bytes || declared->size - operand->bytes > operand->padding)
    return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "%s has %zu bytes here, and %zu in the NEFF, %s",
                            operand->name, operand->bytes, declared->size,
                            moe_neuron_declared_(declared, text, sizeof text));
  if (moe_neuron_other_axes_(operand, declared))
    return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "%s has the axes %s here, and %s in the NEFF", operand->name,
                            moe_neuron_axes_(operand, own, sizeof own),
                            moe_neuron_declared_(declared, text, sizeof text));
  return moe_neuron_check_experts_(ctx, operand);
}

/* Everything, before anything is written. */
MOE_FN moe_status moe_neuron_check_table_(moe_context *ctx, const moe_neuron_model *model,
                                          const moe_neuron_table *table, const moe_neuron_options *o) {
  MOE_NEURON_TRY_(moe_neuron_check_loaded_(ctx, model));
  if (!table) return moe_neuron_null_(ctx, "table");
  if (table->count < 0 || table->count > MOE_NEURON_OPERANDS_MAX)
    return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "table.count is not within MOE_NEURON_OPERANDS_MAX");
  if (o->names_count < 0 || (o->names_count > 0 && !o->names)) return moe_neuron_null_(ctx, "options.names");
  for (int32_t i = 0; i < o->names_count; i++)
    if (!o->names[i].field) return moe_neuron_null_(ctx, "options.names.field");
  for (int32_t i = 0; i < table->count; i++)
    if (!table->operand[i].name) return moe_neuron_null_(ctx, "table.operand.name");
  for (int32_t i = 0; i < model->tensors; i++)
    MOE_NEURON_TRY_(moe_neuron_check_declared_(ctx, model, i, moe_neuron_operand_of_(table, o, &model->tensor[i])));
  for (int32_t k = 0; k < table->count; k++) {
    const moe_neuron_operand *operand = &table->operand[k];
    int found = !operand->data || moe_neuron_unbound_(operand, o);
    for (int32_t i = 0; i < model->tensors; i++)
      found |= moe_neuron_operand_of_(table, o, &model->tensor[i]) == operand;
    if (!found)
      return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_OPTION, "%s is no %s of the NEFF: see options.names",
                              operand->name, operand->use == MOE_NEURON_OUTPUT ? "output" : "input");
  }
  return MOE_OK;
}

/* -------------------------------------------------------------------------------------------------------- transfers */

/* Writes or reads an operand, an expert's part at a time where these lie apart. */
MOE_FN moe_status moe_neuron_move_(moe_context *ctx, const moe_neuron_model *model, int32_t i,
                                   const moe_neuron_operand *operand, int read) {
  const int64_t parts = operand->per_expert ? operand->shape[0] : 1;
  const size_t bytes = operand->bytes / (size_t)parts;
  for (int64_t e = 0; e < parts && bytes > 0; e++) {
    void *data = moe_neuron_part_(operand, e);
    const size_t at = (size_t)e * bytes;
    MOE_NEURON_TRY_(read ? MOE_NEURON_CALL_(ctx, model->neuron, nrt_tensor_read, model->device[i], data, at, bytes)
                         : MOE_NEURON_CALL_(ctx, model->neuron, nrt_tensor_write, model->device[i], data, at, bytes));
  }
  return MOE_OK;
}

/* Writes an operand whose order on the device is another one. */
MOE_FN moe_status moe_neuron_write_converted_(moe_context *ctx, const moe_neuron_model *model, int32_t i,
                                              const moe_neuron_operand *operand) {
  const moe_nki_vector kind = operand->order == MOE_NEURON_ORDER_DOWN_SCALE ? MOE_NKI_DOWN_SCALE : MOE_NKI_GATE_UP_BIAS;
  moe_nki_vector_args args = {.kind = kind,
                              .dtype = operand->elements,
                              .to_nki = 1,
                              .E = operand->shape[0],
                              .length = operand->shape[2],
                              .in = operand->data};
  if (!ctx || !ctx->allocate)
    return moe_neuron_fail_(ctx, MOE_ERROR_OUT_OF_MEMORY, "%s must be converted, and ctx has no allocator",
                            operand->name);
  args.out = ctx->allocate(ctx->allocator_user, operand->bytes);
  if (!args.out)
    return moe_neuron_fail_(ctx, MOE_ERROR_OUT_OF_MEMORY, "%s could not be converted: no memory", operand->name);
  moe_status status = moe_nki_vector_convert(ctx, &args);
  if (status == MOE_OK)
    status = MOE_NEURON_CALL_(ctx, model->neuron, nrt_tensor_write, model->device[i], args.out, 0, operand->bytes);
  ctx->release(ctx->allocator_user, args.out, operand->bytes);
  return status;
}

MOE_FN moe_status moe_neuron_write_(moe_context *ctx, moe_neuron_model *model, int32_t i,
                                    const moe_neuron_operand *operand, const moe_neuron_options *o) {
  const int stays = operand->use == MOE_NEURON_WEIGHT && o->weights_stay;
  const size_t size = model->tensor[i].size, bytes = operand->data ? operand->bytes : 0;
  MOE_NEURON_TRY_(moe_neuron_allocate_(ctx, model, i));
  if (operand->use == MOE_NEURON_OUTPUT ||
      (model->written[i] && (stays || (!operand->data && !operand->zero_if_absent))))
    return MOE_OK;
  model->written[i] = 0;
  if (bytes > 0 && operand->order != MOE_NEURON_ORDER_SAME)
    MOE_NEURON_TRY_(moe_neuron_write_converted_(ctx, model, i, operand));
  else if (bytes > 0) MOE_NEURON_TRY_(moe_neuron_move_(ctx, model, i, operand, 0));
  MOE_NEURON_TRY_(moe_neuron_zero_(ctx, model->neuron, model->device[i], bytes, size - bytes));
  model->written[i] = 1;
  return MOE_OK;
}

moe_status moe_neuron_bind(moe_context *ctx, moe_neuron_model *model, const moe_neuron_table *table,
                           const moe_neuron_options *options) {
  const moe_neuron_options *o = moe_neuron_options_(options);
  MOE_NEURON_TRY_(moe_neuron_check_table_(ctx, model, table, o));
  for (int32_t i = 0; i < model->tensors; i++) {
    const moe_neuron_operand *operand = moe_neuron_operand_of_(table, o, &model->tensor[i]);
    if (operand) MOE_NEURON_TRY_(moe_neuron_write_(ctx, model, i, operand, o));
  }
  return moe_neuron_succeed_(ctx);
}

moe_status moe_neuron_read(moe_context *ctx, const moe_neuron_model *model, const moe_neuron_table *table,
                           const moe_neuron_options *options) {
  const moe_neuron_options *o = moe_neuron_options_(options);
  MOE_NEURON_TRY_(moe_neuron_check_table_(ctx, model, table, o));
  for (int32_t i = 0; i < model->tensors; i++) {
    const moe_neuron_operand *operand = moe_neuron_operand_of_(table, o, &model->tensor[i]);
    if (!operand || operand->use != MOE_NEURON_OUTPUT || !operand->data) continue;
    if (!model->device[i]) return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_OPTION, "model has not been executed");
    MOE_NEURON_TRY_(moe_neuron_move_(ctx, model, i, operand, 1));
  }
  return moe_neuron_succeed_(ctx);
}

/* Executes what is bound and reads it back. A NaN is reported once the outputs are read. */
MOE_FN moe_status moe_neuron_run_(moe_context *ctx, moe_neuron_model *model, const moe_neuron_table *table,
                                  const moe_neuron_options *options) {
  const moe_status status = moe_neuron_execute(ctx, model, options);
  if (status != MOE_OK && status != MOE_ERROR_DEVICE_NUMERIC) return status;
  MOE_NEURON_TRY_(moe_neuron_read(ctx, model, table, options));
  if (status != MOE_OK) return moe_neuron_nrt_(ctx, "nrt_execute", MOE_NRT_EXEC_COMPLETED_WITH_NUM_ERR);
  return moe_neuron_succeed_(ctx);
}

moe_status moe_neuron_run(moe_context *ctx, moe_neuron_model *model, const moe_neuron_table *table,
                          const moe_neuron_options *options) {
  MOE_NEURON_TRY_(moe_neuron_bind(ctx, model, table, options));
  return moe_neuron_run_(ctx, model, table, options);
}

#endif
