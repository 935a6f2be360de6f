/* A tile: rows in registers times a panel, and what is fetched beside. */
#ifndef MOE_KERNEL_TILE_H
#define MOE_KERNEL_TILE_H

enum {
  MOE_TILE_ROWS = 6, /* rows of A in registers */
  /* The last seven or eight are four and the rest: two rows take as long as three (measured). */
  MOE_TILE_LAST_ = MOE_TILE_ROWS + 2,
  MOE_PREPARE_K_ = 32, /* of k, beside a multiple of which a tile prepares: whole lines of 2-byte elements, and
                          4 * MOE_TILE_ROWS or more */
  /* A panel turns beside MOE_TURN_TILES_ tiles: beside each a part of k of a part of the columns, and beside every pair
     of k MOE_TURN_DEEP_ elements of one of those. */
  MOE_TURN_PARTS_ = 4,
  MOE_TURN_TILES_ = MOE_TURN_PARTS_ * MOE_TURN_PARTS_,
  MOE_TURN_WIDE_ = MOE_PANEL / MOE_TURN_PARTS_,
  MOE_TURN_DEEP_ = 2 * MOE_PANEL / MOE_TURN_TILES_
};

/* What is fetched beside tiles: each takes a step of `ahead` and, once that is done, of `into`; and its share, as one
   of `tiles`, of `bytes` bytes of each of `count` rows, which are more than streams a prefetcher can follow. */
typedef struct moe_beside_ {
  moe_ahead_ ahead, into;
  moe_rows_ rows;
  int64_t bytes, row, count; /* row: the next one */
  int64_t tiles, due;        /* due: `tiles` for every row that is to be fetched by now */
} moe_beside_;

/* One tile on. Returns whether there is a step to take. */
MOE_INLINE int moe_beside_next_(moe_beside_ *beside) {
  beside->due += beside->count;
  return beside->due >= beside->tiles || beside->ahead.block.at || beside->into.block.at;
}

MOE_INLINE void moe_beside_rows_(moe_beside_ *beside) {
  for (; beside->due >= beside->tiles && beside->row < beside->count; beside->due -= beside->tiles) {
    const char *row = moe_row_(&beside->rows, beside->row++);
    for (int64_t at = 0; at < beside->bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
  }
  if (beside->row == beside->count) beside->count = beside->row = beside->due = 0;
}

/* The step: as moe_ahead_step_. Not inlined into every tile; and quick code copies words by words, as vectors are not
   to be touched with their registers' upper halves in use. */
MOE_QUICK_BEGIN
MOE_FN __attribute__((noinline)) int64_t moe_beside_step_(moe_beside_ *beside, moe_fetch_ *fetch) {
  moe_beside_rows_(beside);
  const int64_t fetches = moe_ahead_step_(&beside->ahead, fetch);
  return fetches ? fetches : moe_ahead_step_(&beside->into, fetch);
}
MOE_QUICK_END

/* `rows` rows times a panel, MOE_TILE_ROWS at a time, over k > 0 elements, an odd k rounded up as rows and panel are:
   c[i][0..64) += row i * panel. A row's elements lie side by side, of the panel's type, and the next row a piece
   (piece_bytes) on. One or two may be multiplied as three, or an odd number as one more: those beyond the last may be
   anything, but there is room for them, in c as well. Meanwhile `beside` is brought into the second-level cache; where
   the tile has the panel's columns side by side (`tile_parts`, the table's, is 1) a line for every pair of k, and into
   the first a share of what the next MOE_TILE_ROWS take as well: their rows and sums. */
typedef struct moe_tile_ {
  const char *row; /* the first */
  int64_t rows, k;
  const void *panel;
  float *c;
  int add;             /* 0: c starts at +0 */
  moe_beside_ *beside; /* or NULL */
  const char *soon;    /* rows that are multiplied after the last, */
  const float *soon_c; /*   and their sums */
  moe_dtype dtype;     /* of what pack_tile, gather_tile or turn_tile reads */
  /* For pack_tile, which takes MOE_TILE_ROWS and makes the panel on the way: columns [32p, 32p+32) of row k lie at
     base[p] + k*stride, or in the panel's own place; what is packed next, `ahead` bytes on, is fetched. */
  const char *base[2];
  int64_t stride, ahead;
  void *packed;
  /* For turn_tile, which takes up to MOE_TURN_TILES_ whole MOE_TILE_ROWS: beside each, a part of k of a part of the
     columns of another panel turns, k after k. Column n lies at base[0] + n*stride; its element k goes to row k of
     `packed`, rows of a panel's length, as element n of that type or, if it turns into a float, as the upper bits of
     float n, whose others are zero already. */
  /* For gather_tile, which takes whole MOE_TILE_ROWS: beside each the next ones are gathered, a piece apart, and those
     behind are fetched: later_rows of them from `later` on, the first of which is brought to `gathered`. */
  moe_rows_ later;
  int64_t later_rows;
  char *gathered;
  moe_place_ to;            /* where the sums leave for, whatever c then holds; nowhere: they stay in c */
  moe_store_rows_fn_ store; /*   as its type */
} moe_tile_;
typedef void (*moe_tile_fn_)(const moe_tile_ *tile);

/* Bytes of a row of sums that leaves. */
MOE_INLINE int64_t moe_tile_to_bytes_(const moe_tile_ *t) { return MOE_PANEL * (t->to.dtype == MOE_DTYPE_F32 ? 4 : 2); }

/* Rows of a tile that leave past the caches, a line at a time beside the next one's products: all at once they would
   take up the places where misses of the first-level cache wait. */
typedef struct moe_past_ {
  const char *from; /* the next line, and where it goes */
  char *to, *row;       /* row: somewhere in the first line of its row that goes */
  int64_t stride, skip; /* bytes from row to row where they go; between them where they come from */
  int64_t run;          /* lines of a row */
  int64_t in_row, left; /* lines that are left of the row, and of all */
} moe_past_;

MOE_INLINE char *moe_line_of_(char *at) { return at - ((uintptr_t)at & 63); }

/* The line that a first panel begins within has been stored. */
MOE_INLINE moe_past_ moe_past_begin_(const moe_place_ *place, const char *lines, char *to, int64_t rows,
                                     int64_t bytes) {
  const int64_t skip = place->carry && place->begins ? 64 : 0, run = (bytes - skip) / 64;
  const moe_past_ past = {lines + skip, moe_line_of_(to) + skip, to + skip, place->stride, skip, run, run, rows * run};
  return past;
}

MOE_INLINE void moe_past_move_(moe_past_ *past) {
  past->from += 64;
  past->to += 64;
  past->left--;
  if (--past->in_row > 0) return;
  past->in_row = past->run;
  past->from += past->skip;
  past->row += past->stride;
  past->to = moe_line_of_(past->row);
}

/* How far it is: at the rows from here on, `rows` of them, and at what is fetched beside the first few. */
typedef struct moe_tile_at_ {
  const char *row;
  int64_t rows, now; /* now: of those, as many as are multiplied at once */
  float *c;
  char *to, *carry; /* or NULL */
  moe_fetch_at_ fetch;
  int64_t fetches, left; /* in all; that are left of a part's */
  const char *soon, *next;
} moe_tile_at_;

/* Of so many rows. */
MOE_INLINE int64_t moe_tile_now_(int64_t rows) {
  if (rows > MOE_TILE_LAST_) return MOE_TILE_ROWS;
  return rows > MOE_TILE_ROWS ? MOE_TILE_LAST_ / 2 : rows;
}

/* How many tiles of MOE_TILE_ROWS there are before the last three to MOE_TILE_LAST_ rows. */
MOE_INLINE int64_t moe_tiles_before_last_(int64_t rows) {
  return (rows + MOE_TILE_ROWS - MOE_TILE_LAST_ - 1) / MOE_TILE_ROWS;
}

MOE_INLINE moe_tile_at_ moe_tile_first_(const moe_tile_ *t) {
  moe_tile_at_ at;
  at.row = t->row;
  at.rows = t->rows;
  at.now = moe_tile_now_(at.rows);
  at.c = t->c;
  at.to = t->to.base;
  at.carry = t->to.carry;
  return at;
}

/* On to the next rows, `pitch` bytes apart. */
MOE_INLINE void moe_tile_move_(const moe_tile_ *t, int64_t pitch, moe_tile_at_ *at) {
  at->row += at->now * pitch;
  if (at->carry) at->carry += at->now * 64;
  at->rows -= at->now;
  at->c += at->now * MOE_PANEL;
  if (at->to) at->to += at->now * t->to.stride;
  at->now = moe_tile_now_(at->rows);
}

/* Where the rows are that are gathered beside those at hand, and then those that are fetched. */
MOE_INLINE void moe_tile_later_(const moe_tile_ *t, const moe_tile_at_ *at, const char *row[2 * MOE_TILE_ROWS]) {
  const int64_t first = t->rows - at->rows, last = t->later_rows - 1;
  for (int64_t j = 0; j < 2 * MOE_TILE_ROWS; j++) row[j] = moe_row_(&t->later, moe_min_(first + j, last));
}

/* Whether elements are the upper halves of floats (MOE_FORMAT_UPPER), and whether they turn into floats as they are. */
MOE_INLINE int moe_is_upper_(moe_dtype dtype) { return dtype == MOE_DTYPE_BF16; }
MOE_INLINE int moe_turns_to_float_(moe_dtype dtype) { return dtype == MOE_DTYPE_F32 || moe_is_upper_(dtype); }

/* Columns that turn beside the rows at hand: the next one, and where it goes. */
typedef struct moe_turning_ {
  const char *from;
  char *to;
  int64_t stride, step, size;
} moe_turning_;

MOE_INLINE moe_turning_ moe_turning_begin_(const moe_tile_ *t, const moe_tile_at_ *at) {
  const int64_t tile = (t->rows - at->rows) / MOE_TILE_ROWS, k = tile / MOE_TURN_PARTS_ * (t->k / MOE_TURN_PARTS_),
                n = tile % MOE_TURN_PARTS_ * MOE_TURN_WIDE_;
  const int64_t size = moe_dtype_bytes_(t->dtype), step = moe_turns_to_float_(t->dtype) ? 4 : size;
  const moe_turning_ turning = {t->base[0] + n * t->stride + k * size,
                                (char *)t->packed + k * MOE_SQUARE_ + n * step + (step - size), t->stride, step, size};
  return turning;
}

/* On to the next k, after all columns. */
MOE_INLINE void moe_turning_move_(moe_turning_ *turning) {
  turning->from += MOE_TURN_DEEP_ * turning->size - MOE_TURN_WIDE_ * turning->stride;
  turning->to += MOE_TURN_DEEP_ * MOE_SQUARE_ - MOE_TURN_WIDE_ * turning->step;
}

/* Sums that are to leave do so from c, which is in the first-level cache. */
MOE_INLINE void moe_tile_leave_(const moe_tile_ *t, const moe_tile_at_ *at) {
  if (at->to) t->store(at->to, t->to.stride, NULL, at->c, at->now, MOE_PANEL);
}

/* With the rows at hand multiplied, on to the next. */
MOE_INLINE void moe_tile_next_(const moe_tile_ *t, int64_t pitch, moe_tile_at_ *at) {
  moe_tile_leave_(t, at);
  moe_tile_move_(t, pitch, at);
}

/* What is to be fetched beside those at hand: a line that is there where nothing is. */
MOE_INLINE void moe_tile_beside_(const moe_tile_ *t, int64_t pitch, moe_tile_at_ *at) {
  moe_fetch_ fetch = {(const char *)t->panel, t->k, 0, 0};
  at->fetches = t->beside && moe_beside_next_(t->beside) ? moe_beside_step_(t->beside, &fetch) : 0;
  at->fetch = moe_fetch_begin_(&fetch);
  const int last = at->rows <= at->now;
  at->soon = last ? t->soon : at->row + at->now * pitch;
  at->next = (const char *)(last ? t->soon_c : at->c + at->now * MOE_PANEL);
}

/* All of one pair's, which is `size` of the bytes of each row's piece. */
MOE_INLINE void moe_tile_fetch_(moe_tile_at_ *at, int64_t size, int64_t piece) {
  moe_fetch_next_(&at->fetch);
  __builtin_prefetch(at->soon, 0, 3);
  at->soon += MOE_TILE_ROWS * size;
  __builtin_prefetch(at->next, 0, 3);
  at->next += MOE_TILE_ROWS * MOE_PANEL * 4 / (piece / size);
}

#endif
