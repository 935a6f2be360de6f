/* The context at work: validation, workspaces, and running work items on the caller's threads. */
#ifndef MOE_BASE_CONTEXT_H
#define MOE_BASE_CONTEXT_H

#define MOE_MAX_LANES_ 1024

MOE_FN int64_t moe_lanes_(const moe_context *ctx) {
  int64_t lanes = ctx ? ctx->num_threads : 0;
#ifdef _OPENMP
  if (lanes == 0) lanes = omp_get_max_threads();
#endif
  return lanes < 1 ? 1 : lanes;
}

MOE_FN moe_status moe_check_context_(moe_context *ctx) {
  if (!ctx) return MOE_OK;
  if (ctx->num_threads < 0 || ctx->num_threads > MOE_MAX_LANES_)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "ctx.num_threads", "must be between 0 and 1024");
  MOE_TRY(moe_check_enum_(ctx, "ctx.schedule", (int)ctx->schedule, MOE_SCHEDULE_SHUFFLED + 1));
  if (!ctx->allocate != !ctx->release)
    return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "ctx.allocate", "and ctx.release must be given together");
  return MOE_OK;
}

/* ------------------------------------------------------------------------------------------------------ workspace */

/* A bump allocator. With memory == NULL it only adds up, so that the size asked for and the layout used are one
   code. */
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

/* Bytes to ask the caller for: the layout plus what aligning its start may cost. */
MOE_FN moe_status moe_report_workspace_(moe_context *ctx, const moe_arena_ *arena, size_t *bytes) {
  int64_t total = moe_add_(arena->used, MOE_ALIGN_ - 1);
  if (!bytes) return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "bytes", "is NULL");
  if (total < 0) return moe_fail_(ctx, MOE_ERROR_OVERFLOW, "workspace", "of this shape overflows the address space");
  *bytes = (size_t)total;
  return moe_succeed_(ctx);
}

/* The part of the caller's workspace that will be written, for the overlap check. */
MOE_FN moe_tensor_ moe_workspace_tensor_(const moe_arena_ *sized, const void *given, size_t given_bytes) {
  const int64_t need = moe_add_(sized->used, MOE_ALIGN_ - 1);
  const moe_tensor_ tensor = {"workspace", given, need >= 0 && given_bytes < (size_t)need ? (int64_t)given_bytes : need,
                              1, MOE_OUTPUT_OPTIONAL};
  return tensor;
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

/* ------------------------------------------------------------------------------------------------------ work items */

/* A block on its way into cache: `run` fetches `stride` bytes apart, of which some may be of one line, and again `skip`
   bytes on; `at` NULL: nothing. */
typedef struct moe_fetch_ {
  const char *at;
  int64_t run, stride, skip;
} moe_fetch_;

/* Memory that will be read soon: `rows` rows of `lines` cache lines, a row `stride` bytes after the one before or, with
   an index, at index[row] strides; the same again in `parts` parts, `pitch` bytes apart. */
typedef struct moe_ahead_ {
  const char *base;
  const int32_t *index;
  int64_t stride, rows, lines, pitch, parts;
  int64_t row, line; /* how far it is */
  /* At each step `times` blocks of `deep` rows and `wide` lines are fetched; with an index, `times` rows. */
  int64_t deep, wide, times;
  moe_fetch_ block; /* the next one */
} moe_ahead_;

/* The rows of `bytes` each, whichever lines they touch; second: again from there, or NULL. */
MOE_FN moe_ahead_ moe_ahead_rows_(const char *first, const char *second, const int32_t *index, int64_t stride,
                                  int64_t rows, int64_t bytes) {
  moe_ahead_ ahead = {0};
  ahead.base = ahead.block.at = first;
  ahead.index = index;
  ahead.stride = stride;
  ahead.rows = rows;
  ahead.pitch = second ? second - first : 0;
  ahead.parts = second ? 2 : 1;
  ahead.lines = moe_ceil_div_((int64_t)((uintptr_t)first % 64) + bytes, 64);
  return ahead;
}

/* The rows of a left operand that a lane has gathered: rows [first, first+rows) of stage `of`; NULL: none. */
typedef struct moe_held_ {
  const void *of;
  int64_t first, rows;
} moe_held_;

/* What a work item is told beside its number. At any moment a lane is on one thread only, so a lane's scratch memory is
   its own; `held` is what the item before left there, `ahead` what the lane's next item will read first. */
typedef struct moe_turn_ {
  int64_t lane;
  moe_held_ held;
  moe_ahead_ ahead;
} moe_turn_;

/* One kind of work item. */
typedef struct moe_work_ {
  int64_t count;
  void (*run)(void *arg, int64_t item, moe_turn_ *turn);
  void *arg;
  void (*look_ahead)(void *arg, int64_t item, moe_ahead_ *ahead); /* (optional) */
} moe_work_;

enum { MOE_AHEAD_LEAST = 16 }; /* lines of a step, so that all is there early where steps abound */

/* Memory ahead is brought into cache a little at a time, beside the arithmetic: all of it in `steps` steps, of which
   each has room for so many fetches. It is walked in the order it lies in, which the memory system follows. */
MOE_FN void moe_ahead_pace_(moe_ahead_ *ahead, int64_t steps, int64_t room) {
  const int64_t lines = moe_max_(1, ahead->lines), all = ahead->parts * ahead->rows;
  const int64_t even = moe_ceil_div_(all * lines, moe_max_(1, steps));
  const int64_t share = moe_min_(room, moe_max_(MOE_AHEAD_LEAST, even));
  const int64_t across = moe_ceil_div_(lines, share); /* blocks beside each other in a row */
  ahead->wide = moe_ceil_div_(lines, across);
  ahead->deep = moe_max_(1, moe_min_(moe_ceil_div_(share, lines), room / lines));
  ahead->block.run = room / ahead->deep;
  ahead->block.stride = moe_ceil_div_(ahead->wide * 64, ahead->block.run);
  ahead->block.skip = ahead->stride - ahead->block.run * ahead->block.stride;
  const int64_t blocks = ahead->parts * moe_ceil_div_(ahead->rows, ahead->deep) * across;
  ahead->times = moe_ceil_div_(ahead->index ? ahead->rows : blocks, moe_max_(1, steps));
  if (ahead->parts == 0) ahead->block.at = NULL;
}

/* Moves on to the next block. */
MOE_INLINE void moe_ahead_move_(moe_ahead_ *ahead) {
  ahead->block.at += ahead->wide * 64;
  ahead->line += ahead->wide;
  if (ahead->line < ahead->lines) return;
  ahead->line = 0;
  ahead->row += ahead->deep;
  ahead->block.at = ahead->base + ahead->row * ahead->stride;
  if (ahead->row < ahead->rows) return;
  ahead->row = 0;
  ahead->base += ahead->pitch;
  ahead->block.at = --ahead->parts > 0 ? ahead->base : NULL;
}

/* `times` rows of an index. */
MOE_FN void moe_ahead_index_(moe_ahead_ *ahead) {
  for (const int64_t end = moe_min_(ahead->rows, ahead->row + ahead->times); ahead->row < end; ahead->row++)
    for (int64_t i = 0; i < ahead->lines; i++)
      __builtin_prefetch(ahead->base + ahead->index[ahead->row] * ahead->stride + i * 64, 0, 2);
}

/* Inlined: gcc takes a function that only fetches for one without effects, and drops its calls. */
MOE_INLINE void moe_ahead_fetch_(const moe_ahead_ *ahead) {
  const char *at = ahead->block.at;
  for (int64_t row = 0; at && row < ahead->deep; row++, at += ahead->block.skip)
    for (int64_t n = 0; n < ahead->block.run; n++, at += ahead->block.stride) __builtin_prefetch(at, 0, 2);
}

/* One step. The last block, if there is one, is left to the caller, who has arithmetic to spread it over. */
MOE_INLINE int moe_ahead_step_(moe_ahead_ *ahead, moe_fetch_ *fetch) {
  if (!ahead->block.at) return 0;
  if (ahead->index) {
    moe_ahead_index_(ahead);
    return 0;
  }
  for (int64_t i = 1; i < ahead->times && ahead->block.at; i++) {
    moe_ahead_fetch_(ahead);
    moe_ahead_move_(ahead);
  }
  fetch->at = ahead->block.at;
  if (!fetch->at) return 0;
  fetch->run = ahead->block.run;
  fetch->stride = ahead->block.stride;
  fetch->skip = ahead->block.skip;
  moe_ahead_move_(ahead);
  return 1;
}

typedef struct moe_job_ {
  const moe_work_ *work;
  int works;
  int64_t items, lanes, stride; /* stride: MOE_SCHEDULE_SHUFFLED's step, coprime to items */
  moe_schedule schedule;
  atomic_llong next;
} moe_job_;

MOE_FN const moe_work_ *moe_find_work_(const moe_job_ *job, int64_t *item) {
  const moe_work_ *work = job->work;
  while (*item >= work->count) *item -= work++->count;
  return work;
}

/* The lane's n-th item, or -1 when there are no more. */
MOE_FN int64_t moe_claim_(moe_job_ *job, int64_t lane, int64_t n) {
  if (job->schedule == MOE_SCHEDULE_HI_LO) {
    const int64_t share = job->items / job->lanes, extra = job->items % job->lanes;
    return n < share + (lane < extra) ? lane * share + moe_min_(lane, extra) + n : -1;
  }
  const int64_t i = (int64_t)atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
  if (i >= job->items) return -1;
  return job->schedule == MOE_SCHEDULE_SHUFFLED
             ? (int64_t)((uint64_t)(i + 1) * (uint64_t)job->stride % (uint64_t)job->items)
             : i;
}

/* A lane claims one item ahead, so that the item under way can have the next one's memory fetched. */
MOE_FN void moe_run_lane_(void *arg, int64_t lane) {
  moe_job_ *job = (moe_job_ *)arg;
  const moe_fpenv_ saved = moe_fpenv_enter_();
  int64_t item = moe_claim_(job, lane, 0);
  moe_turn_ turn = {0};
  turn.lane = lane;
  for (int64_t n = 1; item >= 0; n++) {
    const moe_work_ *work = moe_find_work_(job, &item);
    const moe_ahead_ nothing = {0};
    turn.ahead = nothing;
    int64_t next = moe_claim_(job, lane, n), inner = next;
    if (next >= 0) {
      const moe_work_ *after = moe_find_work_(job, &inner);
      if (after->look_ahead) after->look_ahead(after->arg, inner, &turn.ahead);
    }
    work->run(work->arg, item, &turn);
    item = next;
  }
  moe_fpenv_leave_(saved);
  moe_cpu_clean_();
}

MOE_FN int64_t moe_gcd_(int64_t a, int64_t b) {
  while (b) {
    int64_t r = a % b;
    a = b;
    b = r;
  }
  return a;
}

/* Runs all items of all works, in no particular order, and returns when they are done. */
MOE_FN void moe_run_(const moe_context *ctx, const moe_work_ *work, int works) {
  moe_job_ job;
  job.work = work;
  job.works = works;
  job.items = 0;
  for (int w = 0; w < works; w++) job.items += work[w].count;
  if (job.items == 0) return;
  job.lanes = moe_min_(moe_lanes_(ctx), job.items);
  job.schedule = ctx ? ctx->schedule : MOE_SCHEDULE_PING_PONG;
  job.stride = job.items * 5 / 8 + 1;
  while (moe_gcd_(job.stride, job.items) != 1) job.stride++;
  atomic_init(&job.next, 0);
  if (ctx && ctx->parallel_for && job.lanes > 1) {
    ctx->parallel_for(ctx->parallel_for_user, job.lanes, moe_run_lane_, &job);
    return;
  }
#ifdef _OPENMP
#pragma omp parallel for schedule(static, 1) num_threads((int)job.lanes)
#endif
  for (int64_t lane = 0; lane < job.lanes; lane++) moe_run_lane_(&job, lane);
}

#endif
