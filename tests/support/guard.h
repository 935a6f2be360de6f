/* guard.h: memory with an inaccessible page directly after its last byte, or directly before its first.
   Reading or writing one byte outside is a SIGSEGV, even from a vector load or a masked store that goes too far. */
#ifndef MOE_TEST_GUARD_H
#define MOE_TEST_GUARD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum guard_side { GUARD_AFTER, GUARD_BEFORE };

struct guarded {
  unsigned char *data; /* NULL when there was no memory */
  size_t bytes;
  unsigned char *mapping;
  size_t mapped;
  unsigned char *pages; /* the accessible part of the mapping */
  size_t accessible;
};

/* With GUARD_AFTER data is as aligned as `bytes` is; with GUARD_BEFORE it is aligned to a page. */
static inline struct guarded guard_alloc(size_t bytes, enum guard_side side) {
  struct guarded g = {NULL, bytes, NULL, 0, NULL, 0};
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  g.accessible = bytes == 0 ? page : (bytes + page - 1) / page * page;
  g.mapped = g.accessible + 2 * page;
  void *mapping = mmap(NULL, g.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return g;
  g.mapping = mapping;
  g.pages = g.mapping + page;
  if (mprotect(g.pages, g.accessible, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping, g.mapped);
    return g;
  }
  g.data = side == GUARD_AFTER ? g.pages + (g.accessible - bytes) : g.pages;
  return g;
}

/* How the memory itself, not only its surroundings, may be used: PROT_NONE, PROT_READ or PROT_READ | PROT_WRITE. */
static inline int guard_protect(const struct guarded *g, int protection) {
  return mprotect(g->pages, g->accessible, protection);
}

static inline void guard_free(struct guarded *g) {
  if (g->mapping != NULL) munmap(g->mapping, g->mapped);
  memset(g, 0, sizeof *g);
}

/* Does a fault at `address` belong to this buffer or its guard pages? */
static inline int guard_owns(const struct guarded *g, const void *address) {
  uintptr_t a = (uintptr_t)address, start = (uintptr_t)g->mapping;
  return g->mapping != NULL && a >= start && a < start + g->mapped;
}

#endif /* MOE_TEST_GUARD_H */
