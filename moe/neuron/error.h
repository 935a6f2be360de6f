/* What libnrt returns, as a status and a sentence. */
#ifndef MOE_NEURON_ERROR_H
#define MOE_NEURON_ERROR_H

/* Records a sentence, and returns the status. */
__attribute__((format(printf, 3, 4))) MOE_FN moe_status moe_neuron_fail_(moe_context *ctx, moe_status status,
                                                                         const char *format, ...) {
  if (!ctx) return status;
  va_list list;
  va_start(list, format);
  (void)vsnprintf(ctx->message, sizeof ctx->message, format, list);
  va_end(list);
  return ctx->status = status;
}

MOE_FN moe_status moe_neuron_succeed_(moe_context *ctx) {
  if (ctx) ctx->message[0] = 0, ctx->status = MOE_OK;
  return MOE_OK;
}

#define MOE_NEURON_TRY_(expression)                        \
  do {                                                     \
    const moe_status moe_neuron_try_ = (expression);       \
    if (moe_neuron_try_ != MOE_OK) return moe_neuron_try_; \
  } while (0)

MOE_FN moe_status moe_neuron_null_(moe_context *ctx, const char *name) {
  return moe_neuron_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "%s is NULL", name);
}

moe_status moe_neuron_status(moe_nrt_status status) {
  switch ((int)status) {
#define MOE_NRT_CASE_(name, value, becomes, advice) \
  case value: return MOE_##becomes;
    MOE_NRT_STATUS_LIST(MOE_NRT_CASE_)
#undef MOE_NRT_CASE_
  }
  return MOE_ERROR_DEVICE_FAILED;
}

const char *moe_neuron_status_str(moe_nrt_status status) {
  switch ((int)status) {
#define MOE_NRT_CASE_(name, value, becomes, advice) \
  case value: return "NRT_" #name;
    MOE_NRT_STATUS_LIST(MOE_NRT_CASE_)
#undef MOE_NRT_CASE_
  }
  return "an unknown status";
}

const char *moe_neuron_advice(moe_nrt_status status) {
  switch ((int)status) {
#define MOE_NRT_CASE_(name, value, becomes, advice) \
  case value: return advice;
    MOE_NRT_STATUS_LIST(MOE_NRT_CASE_)
#undef MOE_NRT_CASE_
  }
  return "see the runtime's log (NEURON_RT_LOG_LEVEL=INFO)";
}

/* What the function `name` of libnrt has returned. */
MOE_FN moe_status moe_neuron_nrt_(moe_context *ctx, const char *name, moe_nrt_status status) {
  if (status == MOE_NRT_SUCCESS) return MOE_OK;
  return moe_neuron_fail_(ctx, moe_neuron_status(status), "%s returns %s (%d): %s", name, moe_neuron_status_str(status),
                          (int)status, moe_neuron_advice(status));
}
#define MOE_NEURON_CALL_(ctx, neuron, function, ...) \
  moe_neuron_nrt_(ctx, #function, (neuron)->nrt.function(__VA_ARGS__))

/* That this libnrt has a function. */
#define MOE_NEURON_HAS_(ctx, neuron, function) \
  ((neuron)->nrt.function ? MOE_OK             \
                          : moe_neuron_fail_(ctx, MOE_ERROR_UNSUPPORTED, "%s is not in this libnrt", #function))

#endif
