/* Memory that will be read or written soon, on its way into cache beside the arithmetic. */
#ifndef MOE_BASE_AHEAD_H
#define MOE_BASE_AHEAD_H

/* A block on its way into cache: `run` fetches `stride` bytes apart, of which some may be of one line, and again `skip`
   bytes on; `at` NULL: nothing. */
typedef struct moe_fetch_ {
  const char *at;
  int64_t run, stride, skip;
} moe_fetch_;

/* Up to so many bytes from fetch to fetch, a line has two or more: there is time to fetch it again. */
enum { MOE_FETCH_SPARSE_ = 32 };

/* How far it is: `at` is next, `left` are left before the next skip. `back`, negative: from `at` to the same
   place a run before, for who fetches again; 0 where there is no time for it. */
typedef struct moe_fetch_at_ {
  const char *at;
  int64_t left, run, stride, skip, back;
} moe_fetch_at_;

MOE_INLINE moe_fetch_at_ moe_fetch_begin_(const moe_fetch_ *fetch) {
  const int64_t back = fetch->stride > MOE_FETCH_SPARSE_ ? 0 : -(fetch->run * fetch->stride + fetch->skip);
  const moe_fetch_at_ begin = {fetch->at, fetch->run, fetch->run, fetch->stride, fetch->skip, back};
  return begin;
}

MOE_INLINE void moe_fetch_next_(moe_fetch_at_ *fetch) {
  __builtin_prefetch(fetch->at, 0, 2);
  fetch->at += fetch->stride;
  if (--fetch->left == 0) {
    fetch->at += fetch->skip;
    fetch->left = fetch->run;
  }
}

/* So many; quicker while there is no skip among them. */
MOE_INLINE void moe_fetch_some_(moe_fetch_at_ *fetch, int64_t count) {
  if (fetch->left <= count) {
    for (int64_t i = 0; i < count; i++) moe_fetch_next_(fetch);
    return;
  }
  for (int64_t i = 0; i < count; i++, fetch->at += fetch->stride) __builtin_prefetch(fetch->at, 0, 2);
  fetch->left -= count;
}

/* Rows of so many lines each, `stride` bytes apart. */
MOE_INLINE moe_fetch_ moe_fetch_rows_(const char *at, int64_t stride, int64_t lines) {
  const moe_fetch_ fetch = {at, lines, 64, stride - 64 * lines};
  return fetch;
}

/* Lines that `bytes` bytes touch at most, at `first` and at multiples of `apart` from it. */
MOE_INLINE int64_t moe_lines_(const char *first, int64_t apart, int64_t bytes) {
  return moe_ceil_div_((apart % 64 == 0 ? (int64_t)((uintptr_t)first % 64) : 63) + bytes, 64);
}

enum { MOE_STRANDS_ = 4 }; /* places at which memory is read in turn: it sends more than from one */

/* What a strand fetches in its turn: of what all read next, `apart` bytes from each other, the lines from `next` on, a
   line of each in turn. */
MOE_INLINE moe_fetch_ moe_fetch_strands_(const char *next, int64_t apart) {
  const moe_fetch_ fetch = {next, MOE_STRANDS_, apart, 64 - MOE_STRANDS_ * apart};
  return fetch;
}

/* Memory that will be read soon: `rows` rows of `lines` cache lines, a row `stride` bytes after the one before or, with
   an index, at index[row] strides; the same again in `parts` parts, `pitch` bytes apart. */
typedef struct moe_ahead_ {
  const char *base;
  const int32_t *index;
  int64_t stride, rows, lines, pitch, parts;
  int64_t row, line; /* how far it is */
  /* At each step `times` blocks of `deep` rows and `wide` lines are fetched; with an index, of a row each. */
  int64_t deep, wide, times;
  moe_fetch_ block; /* the next one */
} moe_ahead_;

/* The rows of `bytes` each, whichever lines they touch; second: again from there, or NULL. */
MOE_FN moe_ahead_ moe_ahead_rows_(const char *first, const char *second, const int32_t *index, int64_t stride,
                                  int64_t rows, int64_t bytes) {
  moe_ahead_ ahead = {0};
  const int64_t pitch = second ? second - first : 0;
  ahead.base = first;
  if (rows > 0) ahead.block.at = first + (index ? index[0] * stride : 0);
  ahead.index = index;
  ahead.stride = stride;
  ahead.rows = rows;
  ahead.pitch = pitch;
  ahead.parts = second ? 2 : 1;
  ahead.lines = moe_lines_(first, stride | pitch, bytes);
  return ahead;
}

enum { MOE_AHEAD_LEAST = 16 }; /* lines of a step, so that all is there early where steps abound */

/* Memory ahead is brought into cache a little at a time, beside the arithmetic: all of it in `steps` steps, of which
   each has room for so many fetches; `full`: each makes as many, some of the same line. It is walked in the order it
   lies in, which the memory system follows. */
MOE_FN void moe_ahead_pace_(moe_ahead_ *ahead, int64_t steps, int64_t room, int full) {
  const int64_t lines = moe_max_(1, ahead->lines), all = ahead->parts * ahead->rows;
  const int64_t even = moe_ceil_div_(all * lines, moe_max_(1, steps));
  const int64_t share = moe_min_(room, moe_max_(MOE_AHEAD_LEAST, even));
  const int64_t across = moe_ceil_div_(lines, share); /* blocks beside each other in a row */
  ahead->wide = moe_ceil_div_(lines, across);
  ahead->deep = ahead->index ? 1 : moe_max_(1, moe_min_(moe_ceil_div_(share, lines), room / lines));
  ahead->block.run = full ? room / ahead->deep : ahead->wide;
  ahead->block.stride = moe_ceil_div_(ahead->wide * 64, ahead->block.run);
  ahead->block.skip = ahead->stride - ahead->block.run * ahead->block.stride;
  const int64_t blocks = ahead->parts * moe_ceil_div_(ahead->rows, ahead->deep) * across;
  ahead->times = moe_ceil_div_(blocks, moe_max_(1, steps));
  if (ahead->parts == 0) ahead->block.at = NULL;
}

/* Moves on to the next block. */
MOE_INLINE void moe_ahead_move_(moe_ahead_ *ahead) {
  ahead->block.at += ahead->wide * 64;
  ahead->line += ahead->wide;
  if (ahead->line < ahead->lines) return;
  ahead->line = 0;
  ahead->row += ahead->deep;
  if (ahead->row >= ahead->rows) {
    ahead->row = 0;
    ahead->base += ahead->pitch;
    ahead->parts--;
  }
  const int64_t row = ahead->index ? ahead->index[ahead->row] : ahead->row;
  ahead->block.at = ahead->parts > 0 ? ahead->base + row * ahead->stride : NULL;
}

/* Inlined: gcc takes a function that only fetches for one without effects, and drops its calls. */
MOE_INLINE void moe_ahead_fetch_(const moe_ahead_ *ahead) {
  const char *at = ahead->block.at;
  for (int64_t row = 0; row < ahead->deep; row++, at += ahead->stride)
    for (int64_t n = 0; n < ahead->wide; n++) __builtin_prefetch(at + 64 * n, 0, 2);
}

/* One step. The last block, if there is one, is left to the caller, who has arithmetic to spread it over. Returns the
   number of its fetches. */
MOE_INLINE int64_t moe_ahead_step_(moe_ahead_ *ahead, moe_fetch_ *fetch) {
  if (!ahead->block.at) return 0;
  for (int64_t i = 1; i < ahead->times && ahead->block.at; i++) {
    moe_ahead_fetch_(ahead);
    moe_ahead_move_(ahead);
  }
  if (!ahead->block.at) return 0;
  fetch->at = ahead->block.at;
  fetch->run = ahead->block.run;
  fetch->stride = ahead->block.stride;
  fetch->skip = ahead->block.skip;
  moe_ahead_move_(ahead);
  return ahead->deep * fetch->run;
}

#endif
