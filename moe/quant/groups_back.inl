/* Groups of 32 codes to elements of f32 or bf16, where all are finite: the usual case. The even elements are in one
   vector and the odd ones in another, as the two bf16 of a word are. Other formats go through these
   (groups_by_float.inl). */

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
