/* pool.h: a few POSIX threads behind moe_context.parallel_for. Items are dealt in order to whoever is free; the caller
   works too. Who waits looks out for a while before it sleeps, because waking up takes longer than the gaps between
   calls. Nothing here can change a result: every item has its own outputs and shares no sum with another one. */
#ifndef EXAMPLE_POOL_H
#define EXAMPLE_POOL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

enum { POOL_MAX = 256, POOL_LOOKS = 1 << 12 /* some 100 microseconds */ };

typedef struct pool {
  pthread_mutex_t lock;
  pthread_cond_t work, done;
  pthread_t thread[POOL_MAX];
  int threads; /* the caller included */
  int quit;
  void (*task)(void *arg, int64_t index);
  void *arg;
  int64_t next, count;
  atomic_llong calls, finished; /* only grow, finished within a call; under the lock, but for looks */
} pool;

/* Returns when *what is at least `least`, or after a while. */
static void pool_look(atomic_llong *what, long long least) {
  for (int i = 0; i < POOL_LOOKS && atomic_load_explicit(what, memory_order_relaxed) < least; i++) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

/* Called and left with the lock held. */
static void pool_take_items(pool *p) {
  while (p->next < p->count) {
    int64_t index = p->next++;
    pthread_mutex_unlock(&p->lock);
    p->task(p->arg, index);
    pthread_mutex_lock(&p->lock);
    if (++p->finished == p->count) pthread_cond_broadcast(&p->done);
  }
}

static void *pool_thread(void *argument) {
  pool *p = argument;
  pthread_mutex_lock(&p->lock);
  while (!p->quit) {
    pool_take_items(p);
    const long long next = p->calls + 1;
    pthread_mutex_unlock(&p->lock);
    pool_look(&p->calls, next);
    pthread_mutex_lock(&p->lock);
    while (!p->quit && p->calls < next) pthread_cond_wait(&p->work, &p->lock);
  }
  pthread_mutex_unlock(&p->lock);
  return NULL;
}

/* The hook: task(arg, i) for every i in [0,count), back when all are done. */
static void pool_run(void *user, int64_t count, void (*task)(void *arg, int64_t index), void *arg) {
  pool *p = user;
  pthread_mutex_lock(&p->lock);
  p->task = task, p->arg = arg;
  p->next = 0, p->count = count, p->finished = 0;
  ++p->calls;
  if (count > 1) pthread_cond_broadcast(&p->work);
  pool_take_items(p);
  pthread_mutex_unlock(&p->lock);
  pool_look(&p->finished, count);
  pthread_mutex_lock(&p->lock);
  while (p->finished < count) pthread_cond_wait(&p->done, &p->lock);
  pthread_mutex_unlock(&p->lock);
}

/* Where the system refuses a thread, the pool has fewer. */
static void pool_start(pool *p, int threads) {
  *p = (pool){.threads = 1};
  pthread_mutex_init(&p->lock, NULL);
  pthread_cond_init(&p->work, NULL);
  pthread_cond_init(&p->done, NULL);
  while (p->threads < threads && p->threads < POOL_MAX &&
         pthread_create(&p->thread[p->threads], NULL, pool_thread, p) == 0)
    p->threads++;
}

static void pool_stop(pool *p) {
  pthread_mutex_lock(&p->lock);
  p->quit = 1;
  pthread_cond_broadcast(&p->work);
  pthread_mutex_unlock(&p->lock);
  for (int i = 1; i < p->threads; i++) pthread_join(p->thread[i], NULL);
  pthread_cond_destroy(&p->done);
  pthread_cond_destroy(&p->work);
  pthread_mutex_destroy(&p->lock);
}

#endif
