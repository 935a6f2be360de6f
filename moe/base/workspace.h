/* The workspace of a call: memory of the caller's, or from the context's allocator. */
#ifndef MOE_BASE_WORKSPACE_H
#define MOE_BASE_WORKSPACE_H

/* A bump allocator. With memory == NULL it only adds up, so that one function sizes a workspace and lays it out. */
typedef struct moe_arena_ {
  char *memory;
  int64_t used; /* < 0: overflow */
} moe_arena_;

#define MOE_ALIGN_ 64

MOE_FN void *moe_take_(moe_arena_ *arena, int64_t bytes) {
  int64_t at = arena->used;
  int64_t rounded = moe_mul_(moe_ceil_div_(moe_max_(bytes, 0), MOE_ALIGN_), MOE_ALIGN_);
  arena->used = moe_add_(at, bytes < 0 ? -1 : rounded);
  return arena->memory && arena->used >= 0 ? arena->memory + at : NULL;
}

/* Reports the bytes of a workspace: the layout, and what aligning its start may take. */
MOE_FN moe_status moe_report_workspace_(moe_context *ctx, const moe_arena_ *arena, size_t *bytes) {
  int64_t total = moe_add_(arena->used, MOE_ALIGN_ - 1);
  if (!bytes) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "bytes", "is NULL");
  if (total < 0) return moe_fail_(ctx, MOE_ERROR_OVERFLOW, "workspace", "of this shape overflows the address space");
  *bytes = (size_t)total;
  return moe_succeed_(ctx);
}

/* Lists as much of the caller's workspace as will be written. */
MOE_FN void moe_list_workspace_(moe_tensors_ *tensors, const moe_arena_ *sized, const void *given, size_t given_bytes) {
  const int64_t need = moe_add_(sized->used, MOE_ALIGN_ - 1);
  const int64_t bytes = need >= 0 && given_bytes < (size_t)need ? (int64_t)given_bytes : need;
  const moe_tensor_ own[] = {{"workspace", given, bytes, 1, MOE_OUTPUT_OPTIONAL}};
  MOE_LIST_(tensors, own);
}

typedef struct moe_workspace_ {
  void *owned; /* from ctx.allocate, to be released */
  size_t bytes;
} moe_workspace_;

MOE_FN moe_status moe_open_workspace_(moe_context *ctx, const moe_arena_ *sized, void *given, size_t given_bytes,
                                      moe_workspace_ *workspace, moe_arena_ *arena) {
  int64_t need = moe_add_(sized->used, MOE_ALIGN_ - 1);
  if (need < 0) return moe_fail_(ctx, MOE_ERROR_OVERFLOW, "workspace", "of this shape overflows the address space");
  workspace->owned = NULL;
  workspace->bytes = (size_t)need;
  if (!given) {
    if (!ctx || !ctx->allocate)
      return moe_fail_(ctx, MOE_ERROR_WORKSPACE, "workspace", "is NULL and the context has no allocator");
    given = workspace->owned = ctx->allocate(ctx->allocator_user, workspace->bytes);
    if (!given) return moe_fail_(ctx, MOE_ERROR_OUT_OF_MEMORY, "workspace", "could not be allocated");
  } else if (given_bytes < (size_t)need) {
    return moe_fail_(ctx, MOE_ERROR_WORKSPACE, "workspace_bytes", "is smaller than the workspace_size function says");
  }
  uintptr_t pad = (MOE_ALIGN_ - (uintptr_t)given % MOE_ALIGN_) % MOE_ALIGN_;
  arena->memory = (char *)given + pad;
  arena->used = 0;
  return MOE_OK;
}

MOE_FN void moe_close_workspace_(moe_context *ctx, moe_workspace_ *workspace) {
  if (workspace->owned) ctx->release(ctx->allocator_user, workspace->owned, workspace->bytes);
}

#endif
