/* Software prefetching: memory that is read or written next is brought into cache while the kernels compute. */
#ifndef MOE_GEMM_PREFETCH_H
#define MOE_GEMM_PREFETCH_H

/* A block of memory to prefetch: `run` prefetches `stride` bytes apart, some of which may be of one line, and again
   `skip` bytes after the last; `at` NULL: nothing. */
typedef struct moe_prefetch_block_ {
  const char *at;
  int64_t run, stride, skip;
} moe_prefetch_block_;

/* Up to so many bytes from one prefetch to the next, a line has two or more: there is time to prefetch it again. */
enum { MOE_PREFETCH_REPEAT_STRIDE_ = 32 };

/* A position in a block: `at` is next, `left` are left before the next skip. `back`, negative, leads from `at` to the
   same place a run before, where a kernel prefetches again; 0: there is no time for it. */
typedef struct moe_prefetch_at_ {
  const char *at;
  int64_t left, run, stride, skip, back;
} moe_prefetch_at_;

MOE_INLINE moe_prefetch_at_ moe_prefetch_begin_(const moe_prefetch_block_ *fetch) {
  const int64_t back = fetch->stride > MOE_PREFETCH_REPEAT_STRIDE_ ? 0 : -(fetch->run * fetch->stride + fetch->skip);
  const moe_prefetch_at_ begin = {fetch->at, fetch->run, fetch->run, fetch->stride, fetch->skip, back};
  return begin;
}

MOE_INLINE void moe_prefetch_next_(moe_prefetch_at_ *fetch) {
  __builtin_prefetch(fetch->at, 0, 2);
  fetch->at += fetch->stride;
  if (--fetch->left == 0) {
    fetch->at += fetch->skip;
    fetch->left = fetch->run;
  }
}

/* The four of a block whose run they are. */
MOE_INLINE void moe_prefetch_four_(moe_prefetch_at_ *fetch) {
  MOE_UNROLL
  for (int i = 0; i < 4; i++) __builtin_prefetch(fetch->at + i * fetch->stride, 0, 2);
  fetch->at += 4 * fetch->stride + fetch->skip;
}

/* `count` of them; quicker while there is no skip among them. */
MOE_INLINE void moe_prefetch_some_(moe_prefetch_at_ *fetch, int64_t count) {
  if (fetch->left <= count) {
    for (int64_t i = 0; i < count; i++) moe_prefetch_next_(fetch);
    return;
  }
  for (int64_t i = 0; i < count; i++, fetch->at += fetch->stride) __builtin_prefetch(fetch->at, 0, 2);
  fetch->left -= count;
}

/* Rows of so many lines each, `stride` bytes apart. */
MOE_INLINE moe_prefetch_block_ moe_prefetch_block_rows_(const char *at, int64_t stride, int64_t lines) {
  const moe_prefetch_block_ fetch = {at, lines, 64, stride - 64 * lines};
  return fetch;
}

/* Lines that `bytes` bytes touch at most, at `first` and at multiples of `apart` from it. */
MOE_INLINE int64_t moe_lines_(const char *first, int64_t apart, int64_t bytes) {
  return moe_ceil_div_((apart % 64 == 0 ? (int64_t)((uintptr_t)first % 64) : 63) + bytes, 64);
}

enum { MOE_READ_STREAMS_ = 4 }; /* an array is read at so many places alternately: memory delivers more than from one */

/* One of these places prefetches for all: a line at each, from `next` on, `apart` bytes from each other. */
MOE_INLINE moe_prefetch_block_ moe_prefetch_streams_(const char *next, int64_t apart) {
  const moe_prefetch_block_ fetch = {next, MOE_READ_STREAMS_, apart, 64 - MOE_READ_STREAMS_ * apart};
  return fetch;
}

/* A region to prefetch: `rows` rows of `lines` cache lines, a row `stride` bytes after the one before or, with an
   index, at index[row] strides; the same again in `parts` parts, `pitch` bytes apart. */
typedef struct moe_prefetch_ {
  const char *base;
  const int32_t *index;
  int64_t stride, rows, lines, pitch, parts;
  int64_t row, line; /* the position in it */
  /* A step prefetches `times` blocks of `deep` rows and `wide` lines; with an index, of a row each. */
  int64_t deep, wide, times;
  moe_prefetch_block_ block; /* the next one */
} moe_prefetch_;

/* Rows of `bytes` bytes, whichever lines they touch; second: the same again from there, or NULL. */
MOE_FN void moe_prefetch_rows_(moe_prefetch_ *prefetch, const char *first, const char *second, const int32_t *index,
                               int64_t stride, int64_t rows, int64_t bytes) {
  const int64_t pitch = second ? second - first : 0;
  memset(prefetch, 0, sizeof *prefetch);
  prefetch->base = first;
  if (rows > 0) prefetch->block.at = first + (index ? index[0] * stride : 0);
  prefetch->index = index;
  prefetch->stride = stride;
  prefetch->rows = rows;
  prefetch->pitch = pitch;
  prefetch->parts = second ? 2 : 1;
  prefetch->lines = moe_lines_(first, stride | pitch, bytes);
}

enum { MOE_PREFETCH_MIN_LINES = 16 }; /* lines of a step, so that all is there early where steps abound */

/* Spreads a region over `steps` steps, each of which has room for so many prefetches; `full`: each makes as many, some
   of the same line. A region is prefetched in the order it lies in, which the hardware follows. */
MOE_FN void moe_prefetch_pace_(moe_prefetch_ *prefetch, int64_t steps, int64_t room, int full) {
  const int64_t lines = moe_max_(1, prefetch->lines), all = prefetch->parts * prefetch->rows;
  const int64_t even = moe_ceil_div_(all * lines, moe_max_(1, steps));
  const int64_t share = moe_min_(room, moe_max_(MOE_PREFETCH_MIN_LINES, even));
  const int64_t across = moe_ceil_div_(lines, share); /* blocks side by side in a row */
  prefetch->wide = moe_ceil_div_(lines, across);
  prefetch->deep = prefetch->index ? 1 : moe_max_(1, moe_min_(moe_ceil_div_(share, lines), room / lines));
  prefetch->block.run = full ? room / prefetch->deep : prefetch->wide;
  prefetch->block.stride = moe_ceil_div_(prefetch->wide * 64, prefetch->block.run);
  prefetch->block.skip = prefetch->stride - prefetch->block.run * prefetch->block.stride;
  const int64_t blocks = prefetch->parts * moe_ceil_div_(prefetch->rows, prefetch->deep) * across;
  prefetch->times = moe_ceil_div_(blocks, moe_max_(1, steps));
  if (prefetch->parts == 0) prefetch->block.at = NULL;
}

/* What the worker's next item reads first; nothing, if that is not known. */
MOE_FN void moe_next_reads_(const moe_worker_ *worker, moe_prefetch_ *prefetch) {
  const moe_work_ *work = worker->next_work;
  memset(prefetch, 0, sizeof *prefetch);
  if (work && work->first_reads) work->first_reads(work->arg, worker->next_item, prefetch);
}

/* Moves on to the next block. */
MOE_INLINE void moe_prefetch_move_(moe_prefetch_ *prefetch) {
  prefetch->block.at += prefetch->wide * 64;
  prefetch->line += prefetch->wide;
  if (prefetch->line < prefetch->lines) return;
  prefetch->line = 0;
  prefetch->row += prefetch->deep;
  if (prefetch->row >= prefetch->rows) {
    prefetch->row = 0;
    prefetch->base += prefetch->pitch;
    prefetch->parts--;
  }
  const int64_t row = prefetch->index ? prefetch->index[prefetch->row] : prefetch->row;
  prefetch->block.at = prefetch->parts > 0 ? prefetch->base + row * prefetch->stride : NULL;
}

/* Inlined: gcc takes a function that only prefetches for one without effects, and drops its calls. */
MOE_INLINE void moe_prefetch_now_(const moe_prefetch_ *prefetch) {
  const char *at = prefetch->block.at;
  for (int64_t row = 0; row < prefetch->deep; row++, at += prefetch->stride)
    for (int64_t n = 0; n < prefetch->wide; n++) __builtin_prefetch(at + 64 * n, 0, 2);
}

/* One step. The last block, if there is one, is for the caller, who spreads it over its arithmetic. Returns the number
   of its prefetches. */
MOE_INLINE int64_t moe_prefetch_step_(moe_prefetch_ *prefetch, moe_prefetch_block_ *fetch) {
  if (!prefetch->block.at) return 0;
  for (int64_t i = 1; i < prefetch->times && prefetch->block.at; i++) {
    moe_prefetch_now_(prefetch);
    moe_prefetch_move_(prefetch);
  }
  if (!prefetch->block.at) return 0;
  fetch->at = prefetch->block.at;
  fetch->run = prefetch->block.run;
  fetch->stride = prefetch->block.stride;
  fetch->skip = prefetch->block.skip;
  moe_prefetch_move_(prefetch);
  return prefetch->deep * fetch->run;
}

#endif
