/* Prefetches the codes that small-m kernels read next, a few lines in each step, in the order of memory, which hardware
   prefetchers follow. */
#ifndef MOE_QUANT_PREFETCH_CODES_H
#define MOE_QUANT_PREFETCH_CODES_H

typedef struct moe_codes_prefetch_ {
  const uint8_t *at, *second; /* second: the second part, or NULL */
  int64_t line, column;       /* how many are left of the column and of the part */
  int64_t lines, columns, gap;
  int64_t per_step;
} moe_codes_prefetch_;

/* The columns `prefetch` bytes after these, in `steps` steps. */
MOE_FN moe_codes_prefetch_ moe_codes_prefetch_of_(const moe_small_m_ *s, const moe_codes_ *parts, int bits,
                                                  int64_t steps) {
  moe_codes_prefetch_ walk;
  walk.lines = walk.line = moe_ceil_div_(s->k * bits, 8 * 64);
  walk.columns = walk.column = parts->width;
  walk.gap = parts->stride - 64 * walk.lines;
  walk.at = parts->codes + parts->prefetch;
  walk.second = s->parts == 2 ? parts[1].codes + parts[1].prefetch : NULL;
  walk.per_step = moe_ceil_div_(s->parts * walk.columns * walk.lines, moe_max_(1, steps));
  return walk;
}

MOE_INLINE void moe_codes_prefetch_next_(moe_codes_prefetch_ *walk) {
  for (int64_t i = 0; i < walk->per_step; i++, walk->at += 64) {
    __builtin_prefetch(walk->at);
    if (--walk->line > 0) continue;
    walk->line = walk->lines;
    walk->at += walk->gap;
    if (--walk->column > 0 || !walk->second) continue;
    walk->at = walk->second - 64;
    walk->second = NULL;
  }
}

#endif
