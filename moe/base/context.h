/* The context at work: validation, and running work items on the caller's threads. */
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

typedef struct moe_job_ {
  const moe_work_ *work;
  int works, looks_ahead;
  int64_t items, lanes, stride; /* stride: MOE_SCHEDULE_SHUFFLED's step, coprime to items */
  moe_schedule schedule;
  atomic_llong next;
} moe_job_;

MOE_FN const moe_work_ *moe_find_work_(const moe_job_ *job, int64_t *item) {
  const moe_work_ *work = job->work;
  while (*item >= work->count) *item -= work++->count;
  return work;
}

/* Whether a lane's share of the items is known beforehand: then all should be alike. */
MOE_FN int moe_in_shares_(const moe_context *ctx) { return ctx && ctx->schedule == MOE_SCHEDULE_HI_LO; }

/* Whether items are claimed in their order, those of the first work first. */
MOE_FN int moe_in_order_(const moe_context *ctx) { return !ctx || ctx->schedule == MOE_SCHEDULE_PING_PONG; }

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

/* Where a work looks ahead, a lane claims one item ahead, so that the item under way can have the next one's memory
   fetched. At the end that leaves items with a lane while others have none: so only there. */
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
    int64_t next = job->looks_ahead ? moe_claim_(job, lane, n) : -1, inner = next;
    if (next >= 0) {
      const moe_work_ *after = moe_find_work_(job, &inner);
      if (after->look_ahead) after->look_ahead(after->arg, inner, &turn.ahead);
    }
    work->run(work->arg, item, &turn);
    item = job->looks_ahead ? next : moe_claim_(job, lane, n);
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

/* Runs all items of all works and returns when they are done. An item may wait for one before it if moe_in_order_: all
   of those are done or, somewhere, under way. */
MOE_FN void moe_run_(const moe_context *ctx, const moe_work_ *work, int works) {
  moe_job_ job;
  job.work = work;
  job.works = works;
  job.items = 0;
  job.looks_ahead = 0;
  for (int w = 0; w < works; w++) job.items += work[w].count, job.looks_ahead |= work[w].look_ahead != NULL;
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
