/* Groups of 32 bf16 to codes in 16-bit integers, two in each element of a vector. Under a scale that is a power of two,
   dividing changes an exponent and rounding drops the last bits of a short fraction: no float is needed, and twice as
   many elements fit into a vector. Floats of more bits, and products with any other factor, are rounded to odd first:
   the last bit is set if one that is dropped is. Codes have at least two bits less, so that this changes none. For bf16
   under such a factor fp8 has tables (moe_binade_). Loops over fp8 are specialised for fractions of 2 and of 3 bits,
   because shifting by a constant costs half. */

/* The largest magnitudes of groups of 32 elements of 16 bits, W groups at a time: a word for each group, with those of
   its odd and of its even elements. */
MOE_EITHER void MOE_K(u16_largest)(uint32_t *most, const char *from, int64_t groups) {
  const MOE_V(i) magnitudes = MOE_V(set1i)(0x7fff7fffu);
  for (int64_t g = 0; g < groups; g += MOE_W) {
    MOE_V(i) group[MOE_W];
    MOE_UNROLL
    for (int i = 0; i < MOE_W; i++) {
      const char *at = from + 64 * (g + i);
      group[i] = MOE_V(set1i)(0u);
      if (g + i >= groups) continue;
      group[i] = MOE_V(andi)(MOE_V(load2x16)(at), magnitudes);
      for (int j = MOE_W; j < 16; j += MOE_W)
        group[i] = MOE_V(max2x16)(group[i], MOE_V(andi)(MOE_V(load2x16)(at + 4 * j), magnitudes));
    }
    MOE_V(storei)(most + g, MOE_V(largest2x16)(group));
  }
}

/* The scales of some groups from their largest magnitudes, as bits, up to the first group that is not finite: returns
   its index. Without scales they are 1. */
MOE_EITHER int64_t MOE_K(some_scales)(moe_some_groups_ *some, uint8_t *scales, const uint32_t *amax, int64_t groups,
                                      const moe_numbers_ *q) {
  const MOE_V(i) none = MOE_V(set1i)(0u), clear = MOE_V(set1i)(MOE_SCALE_CLEAR_);
  const uint32_t fraction = (uint32_t)q->format.fraction, half = (1u << (6 - fraction)) - 1;
  const uint32_t rebias = (q->format.rebias >> 16) - (127u << 7) - (q->wide ? half : MOE_U16_BOTTOM_);
  uint8_t bytes[MOE_GROUPS_SOME_];
  MOE_V(i) top = none, aside = none;
  for (int64_t i = 0; i < groups; i += MOE_W) {
    const MOE_V(i) most = MOE_V(loadi)(amax + i);
    const MOE_V(i) exponent = MOE_V(srli)(MOE_V(addi)(most, MOE_V(set1i)(q->rule.round)), 23);
    MOE_V(i) scale = MOE_V(maxi)(MOE_V(addi)(exponent, MOE_V(set1i)((uint32_t)q->rule.offset)), none);
    if (!scales) scale = MOE_V(set1i)(127u);
    MOE_V(store8)(bytes + i, scale);
    top = MOE_V(maxi)(top, most);
    aside = MOE_V(ori)(aside, MOE_V(selecti)(MOE_V(lti)(scale, clear), most, none));
    const MOE_V(i) zero = MOE_V(addi)(MOE_V(slli)(MOE_V(maxi)(scale, clear), 7), MOE_V(set1i)(rebias));
    const MOE_V(i) twice = MOE_V(ori)(zero, MOE_V(slli)(zero, 16));
    MOE_V(storei)(some->zero + i, twice);
    MOE_V(storei)(some->deep + i, MOE_V(subi)(twice, MOE_V(set1i)(((fraction << 7) - half) * 0x00010001u)));
  }
  for (int64_t g = 0; MOE_V(topi)(top) >= 0x7f800000u && g < groups; g++)
    if (amax[g] >= 0x7f800000u) groups = g;
  some->plain = !MOE_V(anyi)(aside);
  if (scales) memcpy(scales, bytes, (size_t)groups);
  return groups;
}

/* Magnitudes to fp8 codes, whose fraction is `shift` bits shorter, not saturated. `zero` is the code's exponent 0 as a
   bf16, less what rounds down. From the same less the fraction's binades, `deep`, on magnitudes do not round to zero.
   Subnormal codes are undefined; *lowest is then less than their binades and 127. */
MOE_INLINE MOE_V(i) MOE_K(u16_wide)(MOE_V(i) magnitude, MOE_V(i) zero, MOE_V(i) deep, int shift, MOE_V(i) * lowest) {
  const MOE_V(i) odd = MOE_V(andi)(MOE_V(srli)(magnitude, shift), MOE_V(set1i)(0x00010001u));
  *lowest = MOE_V(min2x16)(*lowest, MOE_V(sub2x16)(magnitude, deep));
  return MOE_V(srl2x16)(MOE_V(addi)(MOE_V(subs2x16)(magnitude, zero), odd), shift);
}

/* Magnitudes to e2m1 codes, subnormal ones, too; by every scale rule they are below 12 times the scale. In steps of
   bf16 from `bottom` on, the code changes at most once in every 64, first after 63. The table holds, for each 64 steps,
   what to subtract to get 64 times the code. */
MOE_INLINE MOE_V(i) MOE_K(u16_narrow)(MOE_V(i) magnitude, MOE_V(i) bottom) {
  static const uint8_t away[16] = {0, 0, 64, 127, 128, 160, 159, 160, 159, 160, 192, 255};
  const MOE_V(i) number = MOE_V(subs2x16)(magnitude, bottom);
  return MOE_V(srl2x16)(MOE_V(subi)(number, MOE_V(lookup2x16)(away, MOE_V(srl2x16)(number, 6))), 6);
}

/* The table for encoding under a factor. Returns 0 if there is none, near the ends of bf16's range. */
MOE_EITHER int MOE_K(binade_of)(moe_binade_ *binade, const moe_numbers_ *q) {
  static const float sixteenths[16] = {1.0f, 1.0625f, 1.125f, 1.1875f, 1.25f, 1.3125f, 1.375f, 1.4375f,
                                       1.5f, 1.5625f, 1.625f, 1.6875f, 1.75f, 1.8125f, 1.875f, 1.9375f};
  const uint32_t bits = moe_casti_scalar(q->factor), unit = 254 - (bits >> 23); /* times factor: in [1, 2) */
  const int shift = q->format.shift - 16;
  const MOE_V(f) factor = MOE_V(castf)(MOE_V(set1i)((bits & 0x007fffffu) | 0x3f800000u));
  const MOE_V(i) low = MOE_V(set1i)(0xffffu);
  uint32_t sum[16], first[MOE_W];
  if (unit < 32 || unit > 222) return 0;
  for (int i = 0; i < 16; i += MOE_W) {
    MOE_V(f) x = MOE_V(load)(sixteenths + i);
    MOE_V(i) all = MOE_V(set1i)(0u);
    for (int j = 0; j < 8; j++, x = MOE_V(add)(x, MOE_V(set1)(0x1p-7f)))
      all = MOE_V(addi)(all, MOE_V(andi)(MOE_K(number)(MOE_V(mul)(x, factor), q), low));
    MOE_V(storei)(sum + i, all);
  }
  MOE_V(storei)(first, MOE_V(andi)(MOE_K(number)(factor, q), low));
  for (uint32_t i = 0; i < 16; i++)
    binade->add[i] = (uint8_t)((((sum[i] >> 3) + 1 - first[0]) << shift) + (sum[i] & 7) - 8 * (i + 1));
  binade->base = (unit << (7 - shift)) - first[0] + ((uint32_t)binade->add[0] << (8 - shift));
  return 1;
}

/* Magnitudes to fp8 codes by the table. */
MOE_INLINE MOE_V(i) MOE_K(u16_binade)(MOE_V(i) magnitude, const moe_binade_ *binade, int fraction, MOE_V(i) * lowest) {
  const uint32_t deep = (uint32_t)fraction << fraction; /* magnitudes further than this below code 0 round to it */
  const MOE_V(i) entry = MOE_V(andi)(MOE_V(srl2x16)(magnitude, 3), MOE_V(set1i)(0x000f000fu));
  const MOE_V(i) sum = MOE_V(srl2x16)(MOE_V(addi)(magnitude, MOE_V(lookup2x16)(binade->add, entry)), 7 - fraction);
  *lowest = MOE_V(min2x16)(*lowest, MOE_V(sub2x16)(sum, MOE_V(set1i)((binade->base - deep) * 0x00010001u)));
  return MOE_V(subs2x16)(sum, MOE_V(set1i)(binade->base * 0x00010001u));
}

/* Encodes groups [g, n), of 32 words each, under scales of their own, or by a table where none overflows; fraction 1 is
   e2m1. Up to the first four that have subnormal fp8 codes, whose codes are then undefined: returns where they
   begin. */
MOE_INLINE_LARGE int64_t MOE_K(u16_run)(uint8_t *codes, const char *words, const moe_some_groups_ *some,
                                        const moe_binade_ *table, int64_t g, int64_t n, const moe_numbers_ *q,
                                        moe_prefetch_at_ *fetch, int fraction) {
  const int shift = 7 - fraction, bytes = fraction > 1 ? 32 : 16;
  const MOE_V(i) most = MOE_V(set1i)(q->most * 0x00010001u);
  const MOE_V(i) magnitudes = MOE_V(set1i)(0x7fff7fffu);
  const MOE_V(i) subnormal =
      MOE_V(set1i)((table ? (uint32_t)(fraction + 1) << fraction : ((uint32_t)fraction << 7) + 127) * 0x00010001u);
  const int drop = fraction == 3 && q->drop && !table, away = q->away && !table;
  const int64_t prefetch_to = bytes * q->prefetch_to;
  moe_binade_ binade = {{0}, 0}; /* a copy, which no store can change */
  moe_prefetch_at_ prefetch = *fetch;
  char few[4 * 64];
  uint8_t few_codes[4 * 32];
  if (table) binade = *table;
  for (; g < n; g += 4) {
    const char *from = words + 64 * g;
    uint8_t *to = codes + bytes * g;
    MOE_V(i) lowest = MOE_V(set1i)(~0u);
    moe_prefetch_four_(&prefetch);
    for (int i = 0; i < 4 * bytes; i += 64) __builtin_prefetch(to + prefetch_to + i, 1);
    if (n - g < 4) {
      memset(few, 0, sizeof few);
      memcpy(few, from, (size_t)(64 * (n - g)));
      from = few, to = few_codes;
    }
    for (int64_t at = g; at < g + 4; at += MOE_W / 4, from += 16 * MOE_W, to += MOE_W / 4 * bytes) {
      MOE_V(i) pairs[2];
      MOE_UNROLL
      for (int j = 0; j < 2; j++) {
        MOE_V(i) x[2], code[2];
        MOE_UNROLL
        for (int i = 0; i < 2; i++) {
          const int64_t group = at + (2 * j + i) * MOE_W / 16;
          x[i] = MOE_V(load2x16)(from + 4 * MOE_W * (2 * j + i));
          MOE_V(i) magnitude = MOE_V(andi)(x[i], magnitudes);
          if (__builtin_expect(away, 0)) magnitude = MOE_V(ori)(magnitude, MOE_V(set1i)(0x00010001u));
          if (table) code[i] = MOE_K(u16_binade)(magnitude, &binade, fraction, &lowest);
          else if (fraction == 1) code[i] = MOE_K(u16_narrow)(magnitude, MOE_V(set1i)(some->zero[group]));
          else
            code[i] = MOE_V(min2x16)(MOE_K(u16_wide)(magnitude, MOE_V(set1i)(some->zero[group]),
                                                     MOE_V(set1i)(some->deep[group]), shift, &lowest),
                                     most);
          if (__builtin_expect(drop, 0)) x[i] = MOE_K(without_nan_signs)(x[i], code[i], most);
        }
        if (fraction == 1) pairs[j] = MOE_V(nibble_pairs)(code, x);
        else MOE_V(store_words8)(to + 4 * MOE_W * j, code, x);
      }
      if (fraction == 1) MOE_V(store_pairs)(to, pairs);
    }
    if (fraction > 1 && MOE_V(anyi)(MOE_V(subs2x16)(subnormal, lowest))) break;
    if (n - g < 4) memcpy(codes + bytes * g, few_codes, (size_t)(bytes * (n - g)));
  }
  *fetch = prefetch;
  return moe_min_(g, n);
}

/* Not inlined: the constants of the loops need the registers. */
MOE_FN __attribute__((noinline)) int64_t MOE_K(quantize_u16)(uint8_t *codes, const char *words,
                                                             const moe_some_groups_ *some, const moe_binade_ *binade,
                                                             int64_t g, int64_t n, const moe_numbers_ *q,
                                                             moe_prefetch_at_ *fetch) {
  if (!q->wide) return MOE_K(u16_run)(codes, words, some, NULL, g, n, q, fetch, 1);
  if (q->format.fraction == 2)
    return binade ? MOE_K(u16_run)(codes, words, some, binade, g, n, q, fetch, 2)
                  : MOE_K(u16_run)(codes, words, some, NULL, g, n, q, fetch, 2);
  return binade ? MOE_K(u16_run)(codes, words, some, binade, g, n, q, fetch, 3)
                : MOE_K(u16_run)(codes, words, some, NULL, g, n, q, fetch, 3);
}
