/* pool.h: adversarial parallel_for hooks for moe_context.

   test_pool_parallel_for   real threads, as many as there are items (at most 64), started in a random order, each
                            taking items from a shuffled list, with small random delays
   test_serial_parallel_for one thread, items in a random order; needs no pthreads

   `user` is a struct test_pool (a seed that moves on with every call), or NULL: items in order, no delays. */
#ifndef MOE_TEST_POOL_H
#define MOE_TEST_POOL_H

#include <stdint.h>
#include <stdlib.h>

#include "moe.h"
#include "random.h"

struct test_pool {
  uint64_t seed;
  int64_t calls; /* how often the library used the hook: lets a test show that it did */
};

enum { TEST_POOL_MAX_THREADS = 64 };

/* 0..count-1 in a random order, or in order without a pool. NULL when there is no memory. */
static inline int64_t *test_pool_order(struct test_pool *pool, int64_t count) {
  int64_t *order = malloc((size_t)count * sizeof *order);
  if (order == NULL) return NULL;
  for (int64_t i = 0; i < count; i++) order[i] = i;
  if (pool == NULL) return order;
  pool->calls++;
  for (int64_t i = count - 1; i > 0; i--) {
    int64_t j = (int64_t)(test_random(&pool->seed) % (uint64_t)(i + 1));
    int64_t swap = order[i];
    order[i] = order[j];
    order[j] = swap;
  }
  return order;
}

static inline void test_serial_parallel_for(void *user, int64_t count, moe_task task, void *arg) {
  if (count <= 0) return;
  int64_t *order = test_pool_order(user, count);
  if (order == NULL) abort();
  for (int64_t i = 0; i < count; i++) task(arg, order[i]);
  free(order);
}

#ifndef MOE_TEST_NO_THREADS
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

struct test_pool_job {
  moe_task task;
  void *arg;
  const int64_t *order;
  int64_t count;
  _Atomic int64_t next;
};

struct test_pool_thread {
  struct test_pool_job *job;
  uint64_t seed; /* 0 = no delays */
  pthread_t handle;
  int started;
};

static inline void test_pool_delay(uint64_t *seed) {
  uint64_t r = test_random(seed);
  if ((r & 3) == 0) sched_yield();
  for (volatile uint64_t spin = (r >> 8) & 1023; spin > 0; spin--) continue;
}

static inline void *test_pool_run(void *argument) {
  struct test_pool_thread *thread = argument;
  struct test_pool_job *job = thread->job;
  for (;;) {
    if (thread->seed != 0) test_pool_delay(&thread->seed);
    int64_t item = atomic_fetch_add(&job->next, 1);
    if (item >= job->count) return NULL;
    job->task(job->arg, job->order[item]);
  }
}

static inline void test_pool_parallel_for(void *user, int64_t count, moe_task task, void *arg) {
  if (count <= 0) return;
  struct test_pool *pool = user;
  int64_t *order = test_pool_order(pool, count);
  if (order == NULL) abort();
  struct test_pool_job job = {.task = task, .arg = arg, .order = order, .count = count};
  struct test_pool_thread threads[TEST_POOL_MAX_THREADS];
  int64_t n = count < TEST_POOL_MAX_THREADS ? count : TEST_POOL_MAX_THREADS;
  for (int64_t i = 0; i < n; i++) {
    threads[i].job = &job;
    threads[i].seed = pool != NULL ? test_random(&pool->seed) | 1 : 0;
    threads[i].started = pthread_create(&threads[i].handle, NULL, test_pool_run, &threads[i]) == 0;
  }
  struct test_pool_thread self = {.job = &job}; /* also finishes the job where no thread could be had */
  if (pool == NULL || n < count) test_pool_run(&self);
  for (int64_t i = 0; i < n; i++)
    if (threads[i].started) pthread_join(threads[i].handle, NULL);
  test_pool_run(&self);
  free(order);
}
#endif /* MOE_TEST_NO_THREADS */

#endif /* MOE_TEST_POOL_H */
