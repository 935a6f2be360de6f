/* painted.h: how much stack a function uses. It runs on a thread whose stack was painted; afterwards the deepest word
   that is no longer the paint tells. */
#ifndef MOE_TEST_PAINTED_H
#define MOE_TEST_PAINTED_H

#include <pthread.h>
#include <stdlib.h>

#include "guard.h"

enum { PAINTED_BYTES = 1 << 17, PAINTED_WORDS = PAINTED_BYTES / 8 };

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { PAINTED_SANITIZED = 1 };
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
enum { PAINTED_SANITIZED = 1 };
#else
enum { PAINTED_SANITIZED = 0 };
#endif
#else
enum { PAINTED_SANITIZED = 0 };
#endif

struct painted {
  struct guarded stack; /* an overflow is a fault */
  uint64_t *words;
  uintptr_t top; /* of what the function may use: below the frame that calls it */
  void (*run)(void *arg);
  void *arg;
};

static inline uint64_t painted_word(size_t i) { return (i + 1) * UINT64_C(0x9e3779b97f4a7c15); }

static inline void painted_paint(struct painted *p, size_t from) {
  for (size_t i = from; i < PAINTED_WORDS; i++) p->words[i] = painted_word(i);
}

static inline void painted_open(struct painted *p) {
  memset(p, 0, sizeof *p);
  p->stack = guard_alloc(PAINTED_BYTES, GUARD_BEFORE);
  if (p->stack.data == NULL) abort();
  p->words = (uint64_t *)(void *)p->stack.data;
  painted_paint(p, 0);
}

static inline void painted_close(struct painted *p) { guard_free(&p->stack); }

static void *painted_enter(void *argument) {
  struct painted *p = argument;
  volatile char here = 0;
  p->top = (uintptr_t)&here;
  p->run(p->arg);
  return NULL;
}

/* Bytes that run(arg) took. */
static inline size_t painted_run(struct painted *p, void (*run)(void *arg), void *arg) {
  pthread_attr_t attributes;
  pthread_t thread;
  size_t i = 0;
  p->run = run, p->arg = arg;
  if (pthread_attr_init(&attributes) != 0 || pthread_attr_setstack(&attributes, p->words, PAINTED_BYTES) != 0 ||
      pthread_create(&thread, &attributes, painted_enter, p) != 0 || pthread_join(thread, NULL) != 0)
    abort();
  pthread_attr_destroy(&attributes);
  while (i < PAINTED_WORDS && p->words[i] == painted_word(i)) i++;
  painted_paint(p, i);
  const uintptr_t deepest = (uintptr_t)(p->words + i);
  return deepest < p->top ? p->top - deepest : 0;
}

#endif /* MOE_TEST_PAINTED_H */
