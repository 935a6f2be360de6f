/* Status names, and the one sentence a context keeps about the last error. */
#ifndef MOE_BASE_ERROR_H
#define MOE_BASE_ERROR_H

const char *moe_status_str(moe_status status) {
  switch (status) {
#define MOE_STATUS_CASE_(name, text) \
  case MOE_##name: return "MOE_" #name;
    MOE_STATUS_LIST(MOE_STATUS_CASE_)
#undef MOE_STATUS_CASE_
  }
  return "unknown status";
}

const char *moe_status_text(moe_status status) {
  switch (status) {
#define MOE_STATUS_CASE_(name, text) \
  case MOE_##name: return text;
    MOE_STATUS_LIST(MOE_STATUS_CASE_)
#undef MOE_STATUS_CASE_
  }
  return "unknown status";
}

size_t moe_dtype_size(moe_dtype dtype) {
  switch (dtype) {
    case MOE_DTYPE_DEFAULT: return 0;
#define MOE_DTYPE_CASE_(name, type, NAME) \
  case MOE_DTYPE_##NAME: return sizeof(type);
      MOE_DTYPE_LIST(MOE_DTYPE_CASE_)
#undef MOE_DTYPE_CASE_
  }
  return 0;
}

/* Records an error; the sentence is "<argument> <what>". Returns the status, so that checks end in
   `return moe_fail_(...)`. */
MOE_FN moe_status moe_fail_(moe_context *ctx, moe_status status, const char *argument, const char *what) {
  if (ctx) {
    const char *part[3] = {argument, " ", what};
    size_t at = 0;
    for (int i = 0; i < 3; i++)
      for (const char *c = part[i]; *c && at + 1 < sizeof ctx->message; c++) ctx->message[at++] = *c;
    ctx->message[at] = 0;
    ctx->status = status;
  }
  return status;
}

MOE_FN moe_status moe_succeed_(moe_context *ctx) {
  if (ctx) {
    ctx->message[0] = 0;
    ctx->status = MOE_OK;
  }
  return MOE_OK;
}

#define MOE_TRY(expression)                  \
  do {                                       \
    moe_status moe_try_ = (expression);      \
    if (moe_try_ != MOE_OK) return moe_try_; \
  } while (0)

#endif
