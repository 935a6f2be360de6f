/* The public operations: each is a row of functions, and what is done with them is written once. */
#ifndef MOE_NEURON_OPS_H
#define MOE_NEURON_OPS_H

/* What operations of a kind share, whatever their element type. */
typedef struct moe_neuron_of_kind_ {
  moe_neuron_kind_ kind;
  moe_status (*describe)(moe_context *ctx, const void *args, moe_neuron_call_ *call);
  moe_status (*bound)(moe_context *ctx, const void *args, moe_neuron_bounds_ *bounds);
  int (*rounds)(const void *args); /* whether operands are rounded to MX, and bounds are not known for that */
} moe_neuron_of_kind_;

typedef struct moe_neuron_op_ {
  const moe_neuron_of_kind_ *of;
  moe_dtype dtype;
  moe_status (*cpu)(moe_context *ctx, const void *args);
  moe_status (*check)(moe_context *ctx, const void *args); /* options and shapes, as the CPU's function */
} moe_neuron_op_;

/* Of the layer's backward bounds are not known where operands are rounded. */
MOE_FN int moe_neuron_rounds_backward_(const void *args) {
  const moe_mx_operands *mx = &((const moe_blockwise_mm_bwd_args *)args)->layer.mx;
  return mx->activations.enabled || mx->weights.enabled || mx->gradients.enabled;
}
MOE_FN int moe_neuron_rounds_none_(const void *args) { return (void)args, 0; }

MOE_FN moe_status moe_neuron_describe_(moe_context *ctx, const moe_neuron_op_ *op, const void *args,
                                       const moe_neuron_options *options, moe_neuron_table *table) {
  moe_neuron_call_ call = {op->of->kind, op->dtype, moe_neuron_options_(options), table};
  if (!args) return moe_neuron_null_(ctx, "args");
  if (!table) return moe_neuron_null_(ctx, "table");
  table->count = 0;
  MOE_NEURON_TRY_(op->check(ctx, args));
  MOE_NEURON_TRY_(op->of->describe(ctx, args, &call));
  return moe_neuron_succeed_(ctx);
}

MOE_FN moe_status moe_neuron_on_device_(moe_context *ctx, const moe_neuron_op_ *op, moe_neuron_model *model,
                                        const void *args, const moe_neuron_options *options) {
  moe_neuron_table table;
  MOE_NEURON_TRY_(moe_neuron_check_loaded_(ctx, model));
  MOE_NEURON_TRY_(moe_neuron_describe_(ctx, op, args, options, &table));
  return moe_neuron_run(ctx, model, &table, options);
}

/* Whether the call fits the model: nothing is written to find out. */
MOE_FN moe_status moe_neuron_fits_(moe_context *ctx, const moe_neuron_op_ *op, const moe_neuron_model *model,
                                   const void *args, const moe_neuron_options *options) {
  moe_neuron_table table;
  if (!model) return moe_neuron_fail_(ctx, MOE_ERROR_NO_RUNTIME, "there is no model");
  MOE_NEURON_TRY_(moe_neuron_check_loaded_(ctx, model));
  MOE_NEURON_TRY_(moe_neuron_describe_(ctx, op, args, options, &table));
  return moe_neuron_check_table_(ctx, model, &table, moe_neuron_options_(options));
}

MOE_FN moe_status moe_neuron_either_(moe_context *ctx, const moe_neuron_op_ *op, moe_neuron_model *model,
                                     const void *args, const moe_neuron_options *options, moe_neuron_choice *choice) {
  moe_context own = {0}; /* for the sentence, where the caller has no context */
  moe_context *const said = ctx ? ctx : &own;
  const int fits = moe_neuron_fits_(said, op, model, args, options) == MOE_OK;
  if (choice) {
    choice->on_device = fits;
    if (fits) (void)snprintf(choice->why, sizeof choice->why, "the call fits the model on core %d", (int)model->core);
    else memcpy(choice->why, said->message, sizeof choice->why);
  }
  return fits ? moe_neuron_on_device_(ctx, op, model, args, options) : op->cpu(ctx, args);
}

/* ---------------------------------------------------------------------------------------------------------- compare */

/* That inputs which bounds need are there, and that both sides have the same outputs. */
MOE_FN moe_status moe_neuron_check_comparable_(moe_context *ctx, const moe_neuron_table *cpu,
                                               const moe_neuron_table *device) {
  if (device->count != cpu->count)
    return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_OPTION, "device_args differs from args in more than outputs");
  for (int32_t i = 0; i < cpu->count; i++) {
    const moe_neuron_operand *o = &cpu->operand[i];
    const int output = o->use == MOE_NEURON_OUTPUT;
    if (!output && o->bytes > 0 && !o->data && !o->zero_if_absent && !o->optional)
      return moe_neuron_null_(ctx, o->name);
    if (output && o->data && !device->operand[i].data)
      return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_OPTION, "device_args has no %s, and args has", o->name);
    MOE_NEURON_TRY_(moe_neuron_check_experts_(ctx, o));
    MOE_NEURON_TRY_(moe_neuron_check_experts_(ctx, &device->operand[i]));
  }
  return MOE_OK;
}

/* Whether the output is an input as well. */
MOE_FN int moe_neuron_accumulated_(const moe_neuron_table *table, const moe_neuron_operand *output) {
  int found = 0;
  for (int32_t i = 0; i < table->count; i++)
    found |= table->operand[i].use != MOE_NEURON_OUTPUT && table->operand[i].data == output->data;
  return found;
}

MOE_FN moe_status moe_neuron_take_bounds_(moe_context *ctx, const moe_neuron_op_ *op, const moe_neuron_table *table,
                                          const moe_neuron_options *options, moe_neuron_bounds_ *bounds) {
  const moe_neuron_arithmetic *a = &moe_neuron_options_(options)->arithmetic;
  bounds->table = table, bounds->dtype = op->dtype;
  bounds->operand = a->operand > 0 ? a->operand : moe_neuron_unit_of_(op->dtype);
  bounds->activation = a->activation > 0 ? a->activation : bounds->operand;
  bounds->confidence = a->confidence > 0 ? a->confidence : 8;
  bounds->roundings = (a->roundings > 0 ? a->roundings : 4) * bounds->operand;
  for (int32_t i = 0; i < table->count; i++) {
    const moe_neuron_operand *o = &table->operand[i];
    moe_neuron_out_ *out = &bounds->out[i];
    if (o->use != MOE_NEURON_OUTPUT || !o->data) continue;
    out->n = o->rows * o->row, out->accumulated = moe_neuron_accumulated_(table, o);
    out->e = (float *)moe_neuron_take_(&bounds->scratch, out->n, sizeof *out->e);
    if (!out->e) return moe_neuron_no_memory_(ctx);
  }
  return MOE_OK;
}

MOE_FN moe_status moe_neuron_compare_tables_(moe_context *ctx, const moe_neuron_op_ *op, const void *args,
                                             const moe_neuron_table *cpu, const moe_neuron_table *device,
                                             const moe_neuron_options *options, moe_neuron_bounds_ *bounds,
                                             moe_neuron_report *report) {
  report->agree = report->bounded = !op->of->rounds(args);
  if (report->bounded) MOE_NEURON_TRY_(moe_neuron_take_bounds_(ctx, op, cpu, options, bounds));
  if (report->bounded) MOE_NEURON_TRY_(op->of->bound(ctx, args, bounds));
  if (bounds->failed) return moe_neuron_no_memory_(ctx);
  for (int32_t i = 0; i < cpu->count; i++) {
    if (cpu->operand[i].use != MOE_NEURON_OUTPUT || !cpu->operand[i].data) continue;
    moe_neuron_error *error = &report->tensor[report->count++];
    moe_neuron_judge_tensor_(&cpu->operand[i], &device->operand[i], bounds, &bounds->out[i], error);
    report->agree &= error->over == 0;
  }
  return moe_neuron_succeed_(ctx);
}

MOE_FN moe_status moe_neuron_compare_(moe_context *ctx, const moe_neuron_op_ *op, const void *args,
                                      const void *device_args, const moe_neuron_options *options,
                                      moe_neuron_report *report) {
  moe_neuron_table cpu, device;
  moe_neuron_bounds_ bounds = {.scratch = {.ctx = ctx}};
  if (!report) return moe_neuron_null_(ctx, "report");
  memset(report, 0, sizeof *report);
  MOE_NEURON_TRY_(moe_neuron_describe_(ctx, op, args, options, &cpu));
  MOE_NEURON_TRY_(moe_neuron_describe_(ctx, op, device_args, options, &device));
  MOE_NEURON_TRY_(moe_neuron_check_comparable_(ctx, &cpu, &device));
  const moe_status status = moe_neuron_compare_tables_(ctx, op, args, &cpu, &device, options, &bounds, report);
  if (status != MOE_OK) report->count = report->agree = 0;
  moe_neuron_give_(&bounds.scratch);
  return status;
}

MOE_FN moe_status moe_neuron_check_(moe_context *ctx, const moe_neuron_op_ *op, moe_neuron_model *model,
                                    const void *args, const void *device_args, const moe_neuron_options *options,
                                    moe_neuron_report *report) {
  if (!report) return moe_neuron_null_(ctx, "report");
  memset(report, 0, sizeof *report);
  MOE_NEURON_TRY_(moe_neuron_fits_(ctx, op, model, device_args, options));
  MOE_NEURON_TRY_(op->cpu(ctx, args));
  const moe_status status = moe_neuron_on_device_(ctx, op, model, device_args, options);
  if (status != MOE_OK && status != MOE_ERROR_DEVICE_NUMERIC) return status;
  MOE_NEURON_TRY_(moe_neuron_compare_(ctx, op, args, device_args, options, report));
  return status == MOE_OK ? MOE_OK : moe_neuron_nrt_(ctx, "nrt_execute", MOE_NRT_EXEC_COMPLETED_WITH_NUM_ERR);
}

/* ----------------------------------------------------------------------------------------------------------- public */

#define MOE_NEURON_KIND_(KIND, describe, bound, rounds)                                                                \
  static const moe_neuron_of_kind_ moe_neuron_of_##KIND##_ = {MOE_NEURON_##KIND##_, moe_neuron_describe_##describe##_, \
                                                              moe_neuron_bound_##bound##_,                             \
                                                              moe_neuron_rounds_##rounds##_};
MOE_NEURON_KIND_LIST_(MOE_NEURON_KIND_)
#undef MOE_NEURON_KIND_

#define MOE_NEURON_DEFINE_OP_(op, args_type, kind, NAME)                                                          \
  MOE_FN moe_status moe_neuron_cpu_##op##_(moe_context *ctx, const void *args) {                                  \
    return moe_##op(ctx, (const args_type *)args);                                                                \
  }                                                                                                               \
  MOE_FN moe_status moe_neuron_size_##op##_(moe_context *ctx, const void *args) {                                 \
    size_t bytes;                                                                                                 \
    return moe_##op##_workspace_size(ctx, (const args_type *)args, &bytes);                                       \
  }                                                                                                               \
  static const moe_neuron_op_ moe_neuron_op_##op##_ = {&moe_neuron_of_##kind##_, MOE_DTYPE_##NAME,                \
                                                       moe_neuron_cpu_##op##_, moe_neuron_size_##op##_};          \
  moe_status moe_neuron_describe_##op(moe_context *ctx, const args_type *args, const moe_neuron_options *options, \
                                      moe_neuron_table *table) {                                                  \
    return moe_neuron_describe_(ctx, &moe_neuron_op_##op##_, args, options, table);                               \
  }                                                                                                               \
  moe_status moe_neuron_##op(moe_context *ctx, moe_neuron_model *model, const args_type *args,                    \
                             const moe_neuron_options *options) {                                                 \
    return moe_neuron_on_device_(ctx, &moe_neuron_op_##op##_, model, args, options);                              \
  }                                                                                                               \
  moe_status moe_neuron_or_cpu_##op(moe_context *ctx, moe_neuron_model *model, const args_type *args,             \
                                    const moe_neuron_options *options, moe_neuron_choice *choice) {               \
    return moe_neuron_either_(ctx, &moe_neuron_op_##op##_, model, args, options, choice);                         \
  }                                                                                                               \
  moe_status moe_neuron_compare_##op(moe_context *ctx, const args_type *args, const args_type *device_args,       \
                                     const moe_neuron_options *options, moe_neuron_report *report) {              \
    return moe_neuron_compare_(ctx, &moe_neuron_op_##op##_, args, device_args, options, report);                  \
  }                                                                                                               \
  moe_status moe_neuron_check_##op(moe_context *ctx, moe_neuron_model *model, const args_type *args,              \
                                   const args_type *device_args, const moe_neuron_options *options,               \
                                   moe_neuron_report *report) {                                                   \
    return moe_neuron_check_(ctx, &moe_neuron_op_##op##_, model, args, device_args, options, report);             \
  }
#define MOE_NEURON_DEFINE_(name, type, NAME) MOE_NEURON_OP_LIST(MOE_NEURON_DEFINE_OP_, name, NAME)
MOE_DTYPE_LIST(MOE_NEURON_DEFINE_)
MOE_NEURON_MXFP8_OP_LIST(MOE_NEURON_DEFINE_OP_)
#undef MOE_NEURON_DEFINE_
#undef MOE_NEURON_DEFINE_OP_

#endif
