/* Many arrays in one allocation: lay them out once without memory to learn the size, and once more with it. */
#ifndef TEST_ARENA_H
#define TEST_ARENA_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct test_arena {
  char *memory; /* NULL while only measuring */
  size_t used;
} test_arena;

/* count elements of a size that is a multiple of 8; NULL while measuring. */
static inline void *test_carve(test_arena *arena, int64_t count, size_t size) {
  size_t begin = arena->used;
  arena->used += (size_t)count * size;
  return arena->memory ? arena->memory + begin : NULL;
}

/* The measured arena gets its memory, zeroed, and is ready to be laid out. */
static inline void test_arena_allocate(test_arena *arena) {
  arena->memory = calloc(1, arena->used + 1);
  if (!arena->memory) abort();
  arena->used = 0;
}

static inline void test_arena_free(test_arena *arena) {
  free(arena->memory);
  memset(arena, 0, sizeof *arena);
}

#endif /* TEST_ARENA_H */
