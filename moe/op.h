/* The runner of the public operations. An operation says what it checks, which tensors it takes, what its workspace
   holds and what it runs. The order of these, and all that is the same for every operation, is here. */
#ifndef MOE_OP_H
#define MOE_OP_H

/* A call of a public function. */
typedef struct moe_call_ {
  const void *args;
  moe_dtype dtype; /* in the function's name */
  int kind;        /* which of the functions that share an operation */
  int query;       /* asks only how much memory is needed: there may be no tensors yet */
  void *answer;    /* where the answer to a query goes */
  void *workspace; /* the caller's */
  size_t workspace_bytes;
} moe_call_;

/* An operation. `state` is a struct of its own, one for each call, which is zero to begin with. */
typedef struct moe_op_ {
  /* Checks the options, fills in the state and lists the tensors, but for the workspace. */
  moe_status (*check)(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors);
  /* Takes the parts of the workspace from the arena: once to add them up, once to place them; NULL: there is none. */
  void (*layout)(void *state, moe_arena_ *arena, int64_t workers);
  moe_status (*run)(moe_context *ctx, void *state);
  /* (optional) Checks what the tensors hold. */
  moe_status (*check_contents)(moe_context *ctx, const void *state);
  /* (optional) Answers a query that is not about the workspace. */
  moe_status (*answer)(moe_context *ctx, const moe_tensors_ *tensors, void *answer);
} moe_op_;

/* All but the run, or all of a query. */
MOE_FN moe_status moe_op_open_(const moe_op_ *op, void *state, moe_context *ctx, const moe_call_ *call,
                               moe_workspace_ *workspace) {
  moe_tensors_ tensors; /* not on the stack while the operation runs */
  moe_arena_ sized = {NULL, 0}, arena;
  const int64_t workers = moe_workers_(ctx);
  if (!call->args) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "args", "is NULL");
  tensors.count = 0, tensors.each = 0, tensors.experts = 0;
  MOE_TRY(op->check(ctx, state, call, &tensors));
  if (op->layout) op->layout(state, &sized, workers);
  if (op->layout) moe_list_workspace_(&tensors, &sized, call->workspace, call->workspace_bytes);
  MOE_TRY(moe_check_tensors_(ctx, &tensors, call->query));
  if (call->query && !op->answer) return moe_report_workspace_(ctx, &sized, (size_t *)call->answer);
  if (!call->query && op->check_contents) MOE_TRY(op->check_contents(ctx, state));
  if (!call->query && op->layout) {
    MOE_TRY(moe_open_workspace_(ctx, &sized, call->workspace, call->workspace_bytes, workspace, &arena));
    op->layout(state, &arena, workers);
  }
  return call->query ? op->answer(ctx, &tensors, call->answer) : MOE_OK;
}

MOE_FN moe_status moe_op_run_(const moe_op_ *op, void *state, moe_context *ctx, const moe_call_ *call) {
  moe_workspace_ workspace = {NULL, 0};
  moe_status status = moe_op_open_(op, state, ctx, call, &workspace);
  if (status == MOE_OK && !call->query) status = op->run(ctx, state);
  moe_close_workspace_(ctx, &workspace);
  return status == MOE_OK ? moe_succeed_(ctx) : status;
}

/* A call whose arguments are in its state already. */
MOE_FN moe_status moe_op_prepared_(const moe_op_ *op, void *state, moe_context *ctx) {
  const moe_call_ call = {.args = state};
  return moe_op_run_(op, state, ctx, &call);
}

/* The body of a public function; what follows are members of its call. */
#define MOE_OP_BODY_(op, state_type, ...)        \
  {                                              \
    const moe_call_ call = {__VA_ARGS__};        \
    state_type state = {0};                      \
    return moe_op_run_(&op, &state, ctx, &call); \
  }

/* Define a function of (ctx, args), one that tells how many bytes it needs, and both for one with a workspace. */
#define MOE_OP_(function, args_type, op, state_type, ...) \
  moe_status function(moe_context *ctx, const args_type *args) MOE_OP_BODY_(op, state_type, .args = args, __VA_ARGS__)
#define MOE_OP_SIZE_(function, args_type, op, state_type, ...)                \
  moe_status function(moe_context *ctx, const args_type *args, size_t *bytes) \
      MOE_OP_BODY_(op, state_type, .args = args, .query = 1, .answer = bytes, __VA_ARGS__)
#define MOE_OP_WORKSPACE_(function, args_type, op, state_type, ...)                                              \
  MOE_OP_(function, args_type, op, state_type, .workspace = args ? args->workspace : NULL,                       \
          .workspace_bytes = args ? args->workspace_bytes : 0, __VA_ARGS__)                                      \
  MOE_OP_SIZE_(function##_workspace_size, args_type, op, state_type, .workspace = args ? args->workspace : NULL, \
               .workspace_bytes = args ? args->workspace_bytes : 0, __VA_ARGS__)

#endif
