/* Runs work items on the caller's threads. */
#ifndef MOE_BASE_WORKERS_H
#define MOE_BASE_WORKERS_H

#define MOE_MAX_WORKERS_ 1024

MOE_FN int64_t moe_workers_(const moe_context *ctx) {
  int64_t workers = ctx ? ctx->num_threads : 0;
#ifdef _OPENMP
  if (workers == 0) workers = omp_get_max_threads();
#endif
  return workers < 1 ? 1 : workers;
}

MOE_FN moe_status moe_check_context_(moe_context *ctx) {
  if (!ctx) return MOE_OK;
  if (ctx->num_threads < 0 || ctx->num_threads > MOE_MAX_WORKERS_)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, "ctx.num_threads", "must be between 0 and 1024");
  MOE_TRY(moe_check_enum_(ctx, "ctx.schedule", (int)ctx->schedule, MOE_SCHEDULE_COUNT_));
  if (!ctx->allocate != !ctx->release)
    return moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "ctx.allocate", "and ctx.release must be given together");
  return ctx->tune && ctx->tune->count > 0 && !ctx->tune->entries
             ? moe_fail_(ctx, MOE_ERROR_NULL_ARGUMENT, "ctx.tune", "has entries, but they are NULL")
             : MOE_OK;
}

struct moe_prefetch_; /* memory to fetch */
struct moe_worker_;
typedef void (*moe_item_fn_)(void *arg, int64_t item, struct moe_worker_ *worker);

/* Work items of one kind. */
typedef struct moe_work_ {
  int64_t count;
  moe_item_fn_ run;
  void *arg;
  void (*first_reads)(void *arg, int64_t item, struct moe_prefetch_ *prefetch); /* (optional) see moe_next_reads_ */
} moe_work_;

/* What is still in a worker's scratch memory from an earlier item: elements [first, first+count) of what `owner` writes
   there. NULL: nothing. */
typedef struct moe_cached_ {
  const void *owner;
  int64_t first, count;
} moe_cached_;

/* A worker, as its items see it. It is on one thread at a time, so its scratch memory is its own. */
typedef struct moe_worker_ {
  int64_t index;
  moe_cached_ cached;
  const moe_work_ *next_work; /* of its next item; NULL: not known */
  int64_t next_item;
} moe_worker_;

typedef struct moe_job_ {
  const moe_work_ *work;
  int works, claims_next;
  int64_t items, workers, stride; /* stride: MOE_SCHEDULE_SHUFFLED's step, coprime to items */
  moe_schedule schedule;
  atomic_llong next;
} moe_job_;

MOE_FN const moe_work_ *moe_find_work_(const moe_job_ *job, int64_t *item) {
  const moe_work_ *work = job->work;
  while (*item >= work->count) *item -= work++->count;
  return work;
}

/* Whether each worker runs a fixed share of the items: then items should take equally long. */
MOE_FN int moe_in_shares_(const moe_context *ctx) { return ctx && ctx->schedule == MOE_SCHEDULE_HI_LO; }

/* The worker's n-th item, or -1 when there are no more. */
MOE_FN int64_t moe_claim_(moe_job_ *job, int64_t index, int64_t n) {
  if (job->schedule == MOE_SCHEDULE_HI_LO) {
    const int64_t share = job->items / job->workers, extra = job->items % job->workers;
    return n < share + (index < extra) ? index * share + moe_min_(index, extra) + n : -1;
  }
  const int64_t i = (int64_t)atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
  if (i >= job->items) return -1;
  return job->schedule == MOE_SCHEDULE_SHUFFLED
             ? (int64_t)((uint64_t)(i + 1) * (uint64_t)job->stride % (uint64_t)job->items)
             : i;
}

/* Where items say what they read first, a worker claims its next item before it runs one, which can then prefetch for
   the next. Elsewhere it does not: at the end a worker would keep an item that an idle one could run. */
MOE_FN void moe_run_worker_(void *arg, int64_t index) {
  moe_job_ *job = (moe_job_ *)arg;
  const moe_fpenv_ saved = moe_fpenv_enter_();
  int64_t item = moe_claim_(job, index, 0);
  moe_worker_ worker = {0};
  worker.index = index;
  for (int64_t n = 1; item >= 0; n++) {
    const moe_work_ *work = moe_find_work_(job, &item);
    const int64_t next = job->claims_next ? moe_claim_(job, index, n) : -1;
    worker.next_item = next;
    worker.next_work = next >= 0 ? moe_find_work_(job, &worker.next_item) : NULL;
    work->run(work->arg, item, &worker);
    item = job->claims_next ? next : moe_claim_(job, index, n);
  }
  moe_fpenv_restore_(saved);
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

/* Runs all items of all works and returns when they are done. */
MOE_FN void moe_run_(const moe_context *ctx, const moe_work_ *work, int works) {
  moe_job_ job;
  job.work = work;
  job.works = works;
  job.items = 0;
  job.claims_next = 0;
  for (int w = 0; w < works; w++) job.items += work[w].count, job.claims_next |= work[w].first_reads != NULL;
  if (job.items == 0) return;
  job.workers = moe_min_(moe_workers_(ctx), job.items);
  job.schedule = ctx ? ctx->schedule : MOE_SCHEDULE_PING_PONG;
  job.stride = job.items * 5 / 8 + 1;
  while (moe_gcd_(job.stride, job.items) != 1) job.stride++;
  atomic_init(&job.next, 0);
  if (ctx && ctx->parallel_for && job.workers > 1) {
    ctx->parallel_for(ctx->parallel_for_user, job.workers, moe_run_worker_, &job);
    return;
  }
#ifdef _OPENMP
#pragma omp parallel for schedule(static, 1) num_threads((int)job.workers)
#endif
  for (int64_t index = 0; index < job.workers; index++) moe_run_worker_(&job, index);
}

/* The same with items of one kind, which prefetch nothing. Returns MOE_OK, so that an operation can end in it. */
MOE_FN moe_status moe_run_items_(const moe_context *ctx, int64_t count, moe_item_fn_ run, void *arg) {
  const moe_work_ work = {count, run, arg, NULL};
  moe_run_(ctx, &work, 1);
  return MOE_OK;
}

#endif
