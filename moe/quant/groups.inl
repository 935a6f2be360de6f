/* Groups of 32 elements of one storage format to codes and back, where all are finite: the usual case. The even
   elements are in one vector and the odd ones in another, as the two bf16 of a word are. Included for f32 and, where
   there are vectors, for bf16; other formats go through float (groups_by_float.inl). */

/* Encodes groups [g, n) of some, up to the first that needs the general path; returns where it stopped. */
MOE_INLINE_LARGE int64_t MOE_KF(quantize_some)(uint8_t *codes, const char *from, const moe_some_groups_ *some,
                                               int64_t g, int64_t n, const moe_numbers_ *q,
                                               moe_prefetch_at_ *prefetch) {
  const MOE_V(i) most = MOE_V(set1i)(q->most * 0x00010001u);
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE), step = q->wide ? 32 : 16;
  codes += g * step, from += g * 32 * size;
  for (; g < n && (q->known || !some->over[g]); g++, codes += step, from += 32 * size) {
    const MOE_V(f) scale = MOE_V(set1)(q->known ? q->factor : some->factor[g]);
    MOE_V(i) code[16 / MOE_W], signs[16 / MOE_W];
    for (int64_t i = 0; i < 32 * size; i += 64) moe_prefetch_next_(prefetch);
    __builtin_prefetch(codes + step * q->prefetch_to, 1);
    MOE_UNROLL_FEW
    for (int i = 0; i < 16 / MOE_W; i++) {
      MOE_V(f) even, odd;
      signs[i] = MOE_VF(load2)(from + 2 * MOE_W * i * size, &even, &odd);
      const MOE_V(i) low = MOE_K(number)(MOE_V(mul)(even, scale), q);
      const MOE_V(i) high = MOE_V(slli)(MOE_K(number)(MOE_V(mul)(odd, scale), q), 16);
      code[i] = MOE_V(min2x16)(MOE_V(mux)(MOE_V(set1i)(0xffffu), low, high), most);
      if (q->drop) signs[i] = MOE_K(without_nan_signs)(signs[i], code[i], most);
    }
    if (q->wide) MOE_V(store32x8)(codes, code, signs);
    else MOE_V(store32x4)(codes, code, signs);
  }
  return g;
}

/* The largest magnitude of each group, and 0 for the rest of a vector. */
MOE_INLINE void MOE_KF(groups_magnitudes)(uint32_t *amax, const char *from, int64_t groups) {
  int64_t g = 0;
  if (MOE_FORMAT_UPPER) {
    MOE_K(u16_largest)(amax, from, groups);
    for (; g < groups; g += MOE_W) {
      const MOE_V(i) two = MOE_V(loadi)(amax + g);
      MOE_V(storei)(amax + g, MOE_V(slli)(MOE_V(max2x16)(two, MOE_V(srli)(two, 16)), 16));
    }
    return;
  }
  for (; g < groups; g++) amax[g] = MOE_V(topi)(MOE_K(largest)(from + 128 * g, 32, 4));
  for (; g % MOE_W != 0; g++) amax[g] = 0;
}

MOE_FN int64_t MOE_KF(quantize_groups)(uint8_t *codes, uint8_t *scales, const void *x, int64_t groups,
                                       const moe_numbers_ *numbers, const moe_prefetch_block_ *fetch) {
  const moe_numbers_ q = *numbers; /* a copy, which no store can change */
  moe_prefetch_at_ prefetch = moe_prefetch_begin_(fetch);
  const int64_t size = 32 * (int64_t)sizeof(MOE_FORMAT_TYPE), step = q.wide ? 32 : 16;
  const char *from = (const char *)x;
  moe_some_groups_ some;
  moe_binade_ binade;
  /* Fewer groups are not worth a table. */
  const int scaled = MOE_FORMAT_UPPER && q.known && groups >= MOE_GROUPS_SOME_ && MOE_K(binade_of)(&binade, &q);
  const int u16 = scaled || (MOE_FORMAT_UPPER && scales && !q.away);
  for (int64_t at = 0, count; at < groups; at += count) {
    count = q.known ? groups : moe_min_(MOE_GROUPS_SOME_, groups - at);
    uint32_t amax[MOE_GROUPS_SOME_];
    if (!q.known) MOE_KF(groups_magnitudes)(amax, from, count);
    const int64_t n = q.known ? count : MOE_K(some_scales)(&some, scales ? scales + at : NULL, amax, count, &q);
    for (int64_t g = 0, end; g < n;) {
      if (MOE_FORMAT_UPPER && scaled) g = MOE_K(u16_scaled)(codes, from, &binade, g, n, &q, &prefetch);
      else if (MOE_FORMAT_UPPER && u16) g = MOE_K(quantize_u16)(codes, from, &some, g, n, &q, &prefetch);
      end = u16 ? moe_min_(n, g + 1) : n;
      g = MOE_KF(quantize_some)(codes, from, &some, g, end, &q, &prefetch);
      if (g < end) return at + g;
    }
    if (n < count) return at + n;
    from += n * size, codes += n * step;
  }
  return groups;
}

/* Decodes groups [g, n), up to the first that needs the general path; returns where it stopped. */
MOE_INLINE_LARGE int64_t MOE_KF(dequantize_some)(char *to, const uint8_t *codes, const uint8_t *scales, int64_t g,
                                                 int64_t n, const moe_numbers_ *q) {
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE), step = q->wide ? 32 : 16;
  const uint32_t shift = (uint32_t)q->format.shift;
  MOE_V(f) factor = MOE_V(set1)(q->factor);
  codes += g * step, to += g * 32 * size;
  for (; g < n; g++, to += 32 * size, codes += step) {
    __builtin_prefetch(codes + step * q->prefetch);
    for (int64_t line = 0; line < 32 * size; line += 64) __builtin_prefetch(to + line + 32 * size * q->prefetch_to, 1);
    if (scales) {
      if (scales[g] == 0 || scales[g] == 255) return g;
      factor = MOE_V(castf)(MOE_V(set1i)((uint32_t)scales[g] << 23));
    }
    if (q->wide && MOE_K(special_codes)(codes, q)) return g;
    for (int i = 0; i < 16; i += MOE_W) {
      MOE_V(f) even, odd;
      MOE_V(i) signs = MOE_V(set1i)(0u);
      if (q->wide) {
        const MOE_V(i) both = MOE_V(load2x8)(codes + 2 * i);
        even = MOE_K(magnitude_of)(MOE_V(sllv)(both, MOE_V(set1i)(shift)), q);
        odd = MOE_K(magnitude_of)(MOE_V(sllv)(both, MOE_V(set1i)(shift - 16)), q);
        signs = MOE_V(slli)(MOE_V(andi)(both, MOE_V(set1i)(0x00800080u)), 8);
      } else {
        const MOE_V(i) both = MOE_V(loadu8)(codes + i);
        even = MOE_V(e2m1)(both);
        odd = MOE_V(e2m1)(MOE_V(srli)(both, 4));
      }
      even = MOE_V(mul)(even, factor);
      odd = MOE_V(mul)(odd, factor);
      MOE_VF(store2)(to + 2 * i * size, even, odd, signs);
    }
  }
  return g;
}

/* Decodes groups to bf16 or, through bf16, to f32, up to the first for which that does not work; returns how many. */
MOE_INLINE_LARGE int64_t MOE_KF(dequantize_u16)(char *to, const uint8_t *codes, const uint8_t *scales, int64_t groups,
                                                const moe_numbers_ *q) {
  const int64_t step = q->wide ? 32 : 16;
  if (MOE_FORMAT_UPPER) return MOE_K(u16_back)(to, codes, scales, groups, q);
  for (int64_t g = 0, n, done; g < groups; g += n, to += n * 128) {
    n = moe_min_(MOE_GROUPS_SOME_, groups - g);
    done = MOE_KF(from_u16)(to, codes + step * g, scales + g, n, q);
    if (done < n) return g + done;
  }
  return groups;
}

MOE_FN int64_t MOE_KF(dequantize_groups)(void *x, const uint8_t *codes, const uint8_t *scales, int64_t groups,
                                         const moe_numbers_ *numbers) {
  const moe_numbers_ q = *numbers;
  const int64_t size = 32 * (int64_t)sizeof(MOE_FORMAT_TYPE), step = q.wide ? 32 : 16;
  /* Fewer groups are not worth a table. */
  const int u16 = MOE_W > 1 && (scales || (MOE_FORMAT_UPPER && groups >= MOE_GROUPS_FEW_));
  char *to = (char *)x;
  for (int64_t g = 0, end; g < groups;) {
    if (MOE_W > 1 && u16)
      g += MOE_KF(dequantize_u16)(to + g * size, codes + step * g, scales ? scales + g : NULL, groups - g, &q);
    end = u16 ? moe_min_(groups, g + 1) : groups;
    g = MOE_KF(dequantize_some)(to, codes, scales, g, end, &q);
    if (g < end) return g;
  }
  return groups;
}
