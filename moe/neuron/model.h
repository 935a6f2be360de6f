/* A NEFF, loaded: its header, its tensors, its execution. */
#ifndef MOE_NEURON_MODEL_H
#define MOE_NEURON_MODEL_H

_Static_assert(sizeof(moe_neff_header) == 1024, "a NEFF's header has 1024 bytes");

moe_status moe_neff_check(moe_context *ctx, const void *neff, size_t bytes, uint32_t lnc, moe_neff_header *header) {
  moe_neff_header own;
  if (!neff) return moe_neuron_null_(ctx, "neff");
  if (bytes < sizeof own)
    return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "neff has %zu bytes, less than a NEFF's header", bytes);
  memcpy(&own, neff, sizeof own);
  if (own.pkg_version == 0)
    return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "neff is no NEFF: its header has no version");
  if (own.header_size < sizeof own || own.header_size > bytes)
    return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "neff is no NEFF: its header says it has %llu bytes",
                            (unsigned long long)own.header_size);
  if (own.data_size > bytes - own.header_size)
    return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "neff is cut short: %zu bytes of %llu", bytes,
                            (unsigned long long)(own.header_size + own.data_size));
  if (lnc && own.lnc_size && own.lnc_size != lnc)
    return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED,
                            "neff is compiled for logical cores of %u, this process has them of %u: set "
                            "NEURON_LOGICAL_NC_CONFIG=%u, or compile with --lnc %u",
                            (unsigned)own.lnc_size, (unsigned)lnc, (unsigned)own.lnc_size, (unsigned)lnc);
  if (header) *header = own;
  return moe_neuron_succeed_(ctx);
}

/* ----------------------------------------------------------------------------------------------------- load, unload */

MOE_FN moe_status moe_neuron_check_loaded_(moe_context *ctx, const moe_neuron_model *model) {
  if (!model) return moe_neuron_null_(ctx, "model");
  if (model->model) return MOE_OK;
  return moe_neuron_fail_(ctx, MOE_ERROR_NO_RUNTIME, "%s", model->why[0] ? model->why : "model is not loaded");
}

moe_status moe_neuron_unload(moe_context *ctx, moe_neuron_model *model) {
  if (!model) return moe_neuron_null_(ctx, "model");
  if (!model->model) return moe_neuron_succeed_(ctx);
  const moe_nrt_functions *nrt = &model->neuron->nrt;
  moe_nrt_status info = MOE_NRT_SUCCESS;
  if (model->inputs) nrt->nrt_destroy_tensor_set(&model->inputs);
  if (model->outputs) nrt->nrt_destroy_tensor_set(&model->outputs);
  for (int32_t i = 0; i < model->tensors; i++)
    if (model->device[i] && model->owned[i]) nrt->nrt_tensor_free(&model->device[i]);
  if (model->info) info = nrt->nrt_free_model_tensor_info(model->info);
  const moe_nrt_status unload = nrt->nrt_unload(model->model);
  memset(model, 0, sizeof *model);
  MOE_NEURON_TRY_(moe_neuron_nrt_(ctx, "nrt_unload", unload));
  MOE_NEURON_TRY_(moe_neuron_nrt_(ctx, "nrt_free_model_tensor_info", info));
  return moe_neuron_succeed_(ctx);
}

/* What a loaded model is asked and given. */
MOE_FN moe_status moe_neuron_prepare_(moe_context *ctx, moe_neuron_model *model) {
  const moe_neuron *neuron = model->neuron;
  moe_nrt_model_info info = {0};
  size_t written = 0;
  if (neuron->nrt.nrt_get_model_info) {
    MOE_NEURON_TRY_(MOE_NEURON_CALL_(ctx, neuron, nrt_get_model_info, model->model, &info, sizeof info, &written));
    model->core = (int32_t)info.vnc;
  } else if (model->core < 0) {
    return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED, "core must be named: this libnrt does not tell which it took");
  }
  MOE_NEURON_TRY_(MOE_NEURON_CALL_(ctx, neuron, nrt_get_model_tensor_info, model->model, &model->info));
  if (model->info->tensor_count > MOE_NEURON_TENSORS_MAX)
    return moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED, "neff has %llu tensors, more than MOE_NEURON_TENSORS_MAX",
                            (unsigned long long)model->info->tensor_count);
  model->tensor = model->info->tensor_array;
  model->tensors = (int32_t)model->info->tensor_count;
  MOE_NEURON_TRY_(MOE_NEURON_CALL_(ctx, neuron, nrt_allocate_tensor_set, &model->inputs));
  return MOE_NEURON_CALL_(ctx, neuron, nrt_allocate_tensor_set, &model->outputs);
}

MOE_FN moe_status moe_neuron_load_(moe_context *ctx, const moe_neuron *neuron, const void *neff, size_t bytes,
                                   int32_t core, moe_neuron_model *model) {
  moe_nrt_instance_info instance = {0};
  MOE_NEURON_TRY_(moe_neuron_check_open_(ctx, neuron));
  if (neuron->nrt.nrt_get_instance_info)
    MOE_NEURON_TRY_(MOE_NEURON_CALL_(ctx, neuron, nrt_get_instance_info, &instance, sizeof instance));
  MOE_NEURON_TRY_(moe_neff_check(ctx, neff, bytes, moe_neuron_lnc_(instance.family), NULL));
  model->neuron = neuron, model->core = core;
  MOE_NEURON_TRY_(MOE_NEURON_CALL_(ctx, neuron, nrt_load, neff, bytes, core, -1, &model->model));
  return moe_neuron_prepare_(ctx, model);
}

moe_status moe_neuron_load(moe_context *ctx, const moe_neuron *neuron, const void *neff, size_t bytes, int32_t core,
                           moe_neuron_model *model) {
  moe_context own = {0}; /* for the sentence, where the caller has no context */
  if (!model) return moe_neuron_null_(ctx, "model");
  memset(model, 0, sizeof *model);
  moe_context *const said = ctx ? ctx : &own;
  const moe_status status = moe_neuron_load_(said, neuron, neff, bytes, core, model);
  if (status == MOE_OK) return moe_neuron_succeed_(ctx);
  (void)moe_neuron_unload(NULL, model);
  memset(model, 0, sizeof *model);
  memcpy(model->why, said->message, sizeof model->why);
  return status;
}

/* ---------------------------------------------------------------------------------------------------------- tensors */

MOE_FN int moe_neuron_is_output_(const moe_nrt_tensor_info *declared) {
  return declared->usage == MOE_NRT_TENSOR_USAGE_OUTPUT;
}

/* Puts a tensor into its set. */
MOE_FN moe_status moe_neuron_place_(moe_context *ctx, moe_neuron_model *model, int32_t i, moe_nrt_tensor *tensor) {
  const moe_nrt_tensor_info *declared = &model->tensor[i];
  return MOE_NEURON_CALL_(ctx, model->neuron, nrt_add_tensor_to_tensor_set,
                          moe_neuron_is_output_(declared) ? model->outputs : model->inputs, declared->name, tensor);
}

/* Allocates a declared tensor that is not there yet. */
MOE_FN moe_status moe_neuron_allocate_(moe_context *ctx, moe_neuron_model *model, int32_t i) {
  moe_nrt_tensor *tensor = NULL;
  if (model->device[i]) return MOE_OK;
  MOE_NEURON_TRY_(MOE_NEURON_CALL_(ctx, model->neuron, nrt_tensor_allocate, MOE_NRT_TENSOR_PLACEMENT_DEVICE,
                                   model->core, model->tensor[i].size, model->tensor[i].name, &tensor));
  const moe_status status = moe_neuron_place_(ctx, model, i, tensor);
  if (status != MOE_OK) model->neuron->nrt.nrt_tensor_free(&tensor);
  else model->device[i] = tensor, model->owned[i] = 1;
  return status;
}

moe_status moe_neuron_attach(moe_context *ctx, moe_neuron_model *model, moe_nrt_tensor_usage usage, const char *name,
                             const moe_neuron_tensor *tensor) {
  int32_t i = 0;
  MOE_NEURON_TRY_(moe_neuron_check_loaded_(ctx, model));
  if (!name) return moe_neuron_null_(ctx, "name");
  if (!tensor || !tensor->tensor) return moe_neuron_null_(ctx, "tensor");
  while (i < model->tensors && (model->tensor[i].usage != usage || strcmp(model->tensor[i].name, name) != 0)) i++;
  if (i == model->tensors)
    return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_OPTION, "name is no %s of the NEFF: %s",
                            usage == MOE_NRT_TENSOR_USAGE_OUTPUT ? "output" : "input", name);
  if (tensor->bytes != model->tensor[i].size)
    return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "tensor has %zu bytes, and %s has %zu in the NEFF",
                            tensor->bytes, name, model->tensor[i].size);
  MOE_NEURON_TRY_(moe_neuron_place_(ctx, model, i, tensor->tensor));
  if (model->device[i] && model->owned[i]) model->neuron->nrt.nrt_tensor_free(&model->device[i]);
  model->device[i] = tensor->tensor, model->owned[i] = 0, model->written[i] = 1;
  return moe_neuron_succeed_(ctx);
}

/* -------------------------------------------------------------------------------------------------------- execution */

MOE_FN double moe_neuron_now_(void) {
  struct timespec t;
  (void)timespec_get(&t, TIME_UTC);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Executes once, or `repeat` times in one call of libnrt, and again while the queue is full. */
MOE_FN moe_nrt_status moe_neuron_try_(moe_neuron_model *model, int32_t repeat, int32_t retries) {
  const moe_nrt_functions *nrt = &model->neuron->nrt;
  for (int32_t tries = 0;; tries++) {
    const moe_nrt_status status = repeat > 1
                                      ? nrt->nrt_execute_repeat(model->model, model->inputs, model->outputs, repeat)
                                      : nrt->nrt_execute(model->model, model->inputs, model->outputs);
    if (status != MOE_NRT_QUEUE_FULL || tries >= retries) return status;
    for (const double until = moe_neuron_now_() + 1e-3; moe_neuron_now_() < until;) (void)sched_yield();
  }
}

moe_status moe_neuron_execute(moe_context *ctx, moe_neuron_model *model, const moe_neuron_options *options) {
  static const moe_neuron_options none;
  MOE_NEURON_TRY_(moe_neuron_check_loaded_(ctx, model));
  const moe_neuron_options *o = options ? options : &none;
  if (o->repeat < 0) return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_OPTION, "options.repeat is negative");
  if (o->retries < -1) return moe_neuron_fail_(ctx, MOE_ERROR_INVALID_OPTION, "options.retries is below -1");
  for (int32_t i = 0; i < model->tensors; i++) {
    MOE_NEURON_TRY_(moe_neuron_allocate_(ctx, model, i));
    if (model->written[i] || moe_neuron_is_output_(&model->tensor[i])) continue;
    MOE_NEURON_TRY_(moe_neuron_zero_(ctx, model->neuron, model->device[i], 0, model->tensor[i].size));
    model->written[i] = 1;
  }
  const int32_t repeat = o->repeat ? o->repeat : 1, retries = o->retries == 0 ? 100 : o->retries < 0 ? 0 : o->retries;
  const int32_t at_once = model->neuron->nrt.nrt_execute_repeat ? repeat : 1;
  const double begin = moe_neuron_now_();
  moe_nrt_status status = MOE_NRT_SUCCESS;
  for (int32_t i = 0; i < repeat && status == MOE_NRT_SUCCESS; i += at_once)
    status = moe_neuron_try_(model, at_once, retries);
  if (o->seconds) *o->seconds = (moe_neuron_now_() - begin) / repeat;
  MOE_NEURON_TRY_(moe_neuron_nrt_(ctx, at_once > 1 ? "nrt_execute_repeat" : "nrt_execute", status));
  return moe_neuron_succeed_(ctx);
}

moe_status moe_neuron_profile_start(moe_context *ctx, const moe_neuron_model *model, const char *file) {
  MOE_NEURON_TRY_(moe_neuron_check_loaded_(ctx, model));
  if (!file) return moe_neuron_null_(ctx, "file");
  MOE_NEURON_TRY_(MOE_NEURON_HAS_(ctx, model->neuron, nrt_profile_start));
  MOE_NEURON_TRY_(MOE_NEURON_CALL_(ctx, model->neuron, nrt_profile_start, model->model, file));
  return moe_neuron_succeed_(ctx);
}

moe_status moe_neuron_profile_stop(moe_context *ctx, const moe_neuron_model *model, const char *file) {
  MOE_NEURON_TRY_(moe_neuron_check_loaded_(ctx, model));
  if (!file) return moe_neuron_null_(ctx, "file");
  MOE_NEURON_TRY_(MOE_NEURON_HAS_(ctx, model->neuron, nrt_profile_stop));
  MOE_NEURON_TRY_(MOE_NEURON_CALL_(ctx, model->neuron, nrt_profile_stop, file));
  return moe_neuron_succeed_(ctx);
}

#endif
