/* Groups of 32 elements of one storage format to codes, where all are finite: the usual case. Included for every format
   or, without vectors, for f32; then others go through float (groups_by_float.inl). */

#if MOE_VECTORS

/* Groups as words of 16 bits, rounded to odd; times the factor if they are scaled. */
MOE_FN void MOE_KF(to_words)(char *words, const char *from, int64_t groups, int scaled, float factor,
                             moe_prefetch_at_ *prefetch) {
  const int64_t size = (int64_t)sizeof(MOE_FORMAT_TYPE);
  const MOE_V(i) lower = MOE_V(set1i)(0xffffu), upper = MOE_V(set1i)(0xffff0000u), one = MOE_V(set1i)(0x00010001u);
  const MOE_V(f) by = MOE_V(set1)(factor);
  for (const char *end = from + groups * 32 * size; from < end;) {
    const char *next = from + moe_min_(256, end - from);
    moe_prefetch_four_(prefetch);
    for (; from < next; from += 2 * MOE_W * size, words += 4 * MOE_W) {
      MOE_V(f) even, odd;
      (void)MOE_VF(load2)(from, &even, &odd);
      if (scaled) even = MOE_V(mul)(even, by), odd = MOE_V(mul)(odd, by);
      const MOE_V(i) e = MOE_V(casti)(even), o = MOE_V(casti)(odd);
      const MOE_V(i) rest = MOE_V(min2x16)(MOE_V(mux)(lower, e, MOE_V(slli)(o, 16)), one);
      MOE_V(store2x16)(words, MOE_V(ori)(MOE_V(mux)(upper, o, MOE_V(srli)(e, 16)), rest));
    }
  }
}

/* The largest magnitude of each group, as float bits, and 0 for the rest of a vector. In words the last bit of a float
   is not its own: a rule that depends on it finds it `from` there. */
MOE_INLINE void MOE_KF(groups_magnitudes)(uint32_t *amax, const char *words, const char *from, int64_t groups,
                                          uint32_t round) {
  MOE_K(u16_largest)(amax, words, groups);
  for (int64_t g = 0; g < groups; g += MOE_W) {
    const MOE_V(i) two = MOE_V(loadi)(amax + g);
    MOE_V(storei)(amax + g, MOE_V(slli)(MOE_V(max2x16)(two, MOE_V(srli)(two, 16)), 16));
  }
  for (int64_t g = 0; !MOE_FORMAT_UPPER && ((round + 1) & 0xffffu) > 1 && g < groups; g++)
    amax[g] = MOE_KF(magnitude)(from + 32 * g * (int64_t)sizeof(MOE_FORMAT_TYPE), 32);
}

/* Encodes groups [g, n) one by one, under bytes of scales or the factor. Returns the first that is too large, or n. */
MOE_FN int64_t MOE_KF(quantize_singly)(uint8_t *codes, const uint8_t *scales, const char *from, const uint32_t *amax,
                                       int64_t g, int64_t n, const moe_numbers_ *q) {
  for (; g < n; g++) {
    float x[32];
    if (!scales && !q->known && amax[g] > MOE_SUM_LIMIT_) break;
    MOE_KF(load_one)(x, from + 32 * g * (int64_t)sizeof(MOE_FORMAT_TYPE), 32);
    const float factor = scales ? moe_castf_scalar((254u - scales[g]) << 23) : q->factor;
    MOE_K(quantize_one)(codes + g * (q->wide ? 32 : 16), x, factor, q);
  }
  return g;
}

/* Some groups, whose words are given. Returns how many. */
MOE_FN int64_t MOE_KF(quantize_some)(uint8_t *codes, uint8_t *scales, const char *from, const char *words,
                                     const moe_binade_ *binade, int64_t groups, const moe_numbers_ *q,
                                     moe_prefetch_at_ *prefetch) {
  moe_some_groups_ some;
  uint32_t amax[MOE_GROUPS_SOME_];
  int64_t n = groups;
  some.plain = 1;
  if (!q->known || scales) MOE_KF(groups_magnitudes)(amax, words, from, groups, scales ? q->rule.round : 0);
  else
    for (int i = 0; i < MOE_GROUPS_SOME_; i += MOE_W) MOE_V(storei)(amax + i, MOE_V(set1i)(0u));
  if (!binade) n = MOE_K(some_scales)(&some, scales, amax, groups, q);
  for (int64_t g = 0, end; g < n;) {
    const int64_t next = moe_min_(n, g + 4);
    int plain = 1;
    for (int64_t i = g; !some.plain && i < next; i++) plain &= scales[i] >= MOE_SCALE_CLEAR_;
    end = some.plain ? n : next;
    if (plain) g = MOE_K(quantize_u16)(codes, words, &some, binade, g, end, q, prefetch);
    if (g == end) continue;
    end = moe_min_(n, g + 4);
    g = MOE_KF(quantize_singly)(codes, scales, from, amax, g, end, q);
    if (g < end) return g;
  }
  return n;
}

MOE_FN int64_t MOE_KF(quantize_groups)(uint8_t *codes, uint8_t *scales, const void *x, int64_t groups,
                                       const moe_numbers_ *numbers, const moe_prefetch_block_ *fetch) {
  const moe_numbers_ q = *numbers; /* a copy, which no store can change */
  const int64_t size = 32 * (int64_t)sizeof(MOE_FORMAT_TYPE);
  const char *from = (const char *)x;
  MOE_LINE_ALIGNED char words[64 * MOE_GROUPS_SOME_];
  moe_prefetch_at_ prefetch = moe_prefetch_begin_(fetch), none = {words, 0, 0, 0, 0, 0};
  moe_binade_ binade;
  /* Fewer groups are not worth a table. */
  const int table = MOE_FORMAT_UPPER && q.known && groups >= MOE_GROUPS_SOME_ && MOE_K(binade_of)(&binade, &q);
  for (int64_t at = 0, count, done; at < groups; at += count, from += count * size) {
    uint8_t *to = codes + at * (q.wide ? 32 : 16);
    count = table ? groups : moe_min_(MOE_GROUPS_SOME_, groups - at);
    if (MOE_FORMAT_UPPER && (scales || table))
      done = MOE_KF(quantize_some)(to, scales ? scales + at : NULL, from, from, table ? &binade : NULL, count, &q,
                                   &prefetch);
    else {
      MOE_KF(to_words)(words, from, count, scales == NULL, q.factor, &prefetch);
      done = MOE_KF(quantize_some)(to, scales ? scales + at : NULL, from, words, NULL, count, &q, &none);
    }
    if (done < count) return at + done;
  }
  return groups;
}

#else

MOE_FN int64_t MOE_KF(quantize_groups)(uint8_t *codes, uint8_t *scales, const void *x, int64_t groups,
                                       const moe_numbers_ *q, const moe_prefetch_block_ *fetch) {
  const float *from = (const float *)x;
  float factor = q->factor;
  (void)fetch;
  for (int64_t g = 0; g < groups; g++, from += 32, codes += q->wide ? 32 : 16) {
    const uint32_t amax = MOE_KF(magnitude)(from, 32);
    const int32_t byte = (int32_t)((amax + q->rule.round) >> 23) + q->rule.offset;
    if (amax >= 0x7f800000u) return g;
    if (!scales && moe_casti_scalar(moe_castf_scalar(amax) * factor) > MOE_SUM_LIMIT_) return g;
    if (scales) scales[g] = (uint8_t)(byte < 0 ? 0 : byte);
    if (scales) factor = moe_castf_scalar((254u - scales[g]) << 23);
    MOE_K(quantize_one)(codes, from, factor, q);
  }
  return groups;
}

#endif
