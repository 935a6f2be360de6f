/* Prefetches the codes that small-m kernels read next, a few lines in each step, in the order of memory, which hardware
   prefetchers follow. */
#ifndef MOE_QUANT_PREFETCH_CODES_H
#define MOE_QUANT_PREFETCH_CODES_H

typedef struct moe_codes_prefetch_ {
  const uint8_t *at, *end, *second, *scale; /* second: the second part, or NULL */
  int64_t per_step, scales_per_step;        /* lines */
} moe_codes_prefetch_;

/* The columns `prefetch` bytes after these, which are contiguous, in `steps` steps. */
MOE_FN moe_codes_prefetch_ moe_codes_prefetch_of_(const moe_small_m_ *s, const moe_codes_ *parts, int64_t steps) {
  const int64_t bytes = parts->width * parts->stride, scales = parts->width * parts->scale_stride;
  const int apart = s->parts == 2 && parts[1].codes - parts[0].codes >= bytes; /* or the parts' columns alternate */
  const int own = parts->scale && parts->scale_stride < parts->stride;
  moe_codes_prefetch_ walk;
  walk.at = parts->codes + parts->prefetch;
  walk.end = walk.at + bytes;
  walk.second = apart ? parts[1].codes + parts->prefetch : NULL;
  walk.per_step = moe_ceil_div_(moe_ceil_div_((1 + apart) * bytes, 64), moe_max_(1, steps));
  walk.scale = own ? parts->scale + scales : NULL;
  walk.scales_per_step = own ? moe_ceil_div_(moe_ceil_div_(scales, 64), moe_max_(1, steps)) : 0;
  return walk;
}

MOE_INLINE void moe_codes_prefetch_next_(moe_codes_prefetch_ *walk) {
  for (int64_t i = 0; i < walk->per_step; i++) __builtin_prefetch(walk->at + 64 * i, 0, 2);
  for (int64_t i = 0; i < walk->scales_per_step; i++) __builtin_prefetch(walk->scale + 64 * i, 0, 2);
  walk->at += 64 * walk->per_step;
  walk->scale += 64 * walk->scales_per_step;
  if (walk->at < walk->end || !walk->second) return;
  walk->at = walk->second;
  walk->second = NULL;
}

#endif
