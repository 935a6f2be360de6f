/* Groups of 32 elements to codes and back through float, which represents every element exactly: for storage formats
   that are not worth more code. Included for each of them. */

#if MOE_VECTORS
MOE_INLINE MOE_V(i) MOE_VF(load2)(const char *p, MOE_V(f) * even, MOE_V(f) * odd) {
  return MOE_V(split)(MOE_VF(load)(p), MOE_VF(load)(p + MOE_W * sizeof(MOE_FORMAT_TYPE)), even, odd);
}
#include "groups.inl"
#else
MOE_FN int64_t MOE_KF(quantize_groups)(uint8_t *codes, uint8_t *scales, const void *x, int64_t groups,
                                       const moe_numbers_ *numbers, const moe_prefetch_block_ *fetch) {
  const int64_t size = 32 * (int64_t)sizeof(MOE_FORMAT_TYPE), step = numbers->wide ? 32 : 16;
  const char *from = (const char *)x;
  moe_prefetch_at_ prefetch = moe_prefetch_begin_(fetch);
  float floats[MOE_GROUPS_SOME_ * 32];
  const moe_prefetch_block_ here = {(const char *)floats, 0, 0, 0};
  for (int64_t g = 0, n, done; g < groups; g += n) {
    n = moe_min_(MOE_GROUPS_SOME_, groups - g);
    for (int64_t line = 0; line < n * size; line += 64) moe_prefetch_next_(&prefetch);
    MOE_KF(load_one)(floats, from + g * size, n * 32);
    done = MOE_K(quantize_groups_f32)(codes + g * step, scales ? scales + g : NULL, floats, n, numbers, &here);
    if (done < n) return g + done;
  }
  return groups;
}
#endif

/* Through bf16 where that is exact, which is less to write and read than float. */
MOE_FN int64_t MOE_KF(dequantize_groups)(void *x, const uint8_t *codes, const uint8_t *scales, int64_t groups,
                                         const moe_numbers_ *numbers) {
  const int64_t size = 32 * (int64_t)sizeof(MOE_FORMAT_TYPE), step = numbers->wide ? 32 : 16;
  moe_numbers_ q = *numbers;
  char *to = (char *)x;
  float floats[MOE_GROUPS_SOME_ * 32];
  q.prefetch_to = 0;
  for (int64_t g = 0, n, done; g < groups; g += n, to += n * size) {
    n = moe_min_(MOE_GROUPS_SOME_, groups - g);
    for (int64_t line = 0; line < n * size; line += 64) __builtin_prefetch(to + numbers->prefetch_to * size + line, 1);
    done = MOE_W > 1 && scales ? MOE_KF(from_u16)(to, codes + g * step, scales + g, n, &q) : 0;
    for (int64_t more; done < n; done += more) {
      const uint8_t *bytes = scales ? scales + g + done : NULL;
      more = MOE_K(dequantize_groups_f32)(floats, codes + (g + done) * step, bytes, n - done, &q);
      MOE_KF(store_one)(to + done * size, floats, more * 32);
      if (more == 0) return g + done;
    }
  }
  return groups;
}
