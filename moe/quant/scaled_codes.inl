/* Codes under scales that are floats to f32 panels (see moe_scaled_codes_). */

/* The values of codes, which are the lowest bits of elements. The mantissa of f->magic counts units of an integer. */
MOE_INLINE MOE_V(f) MOE_K(code_values)(MOE_V(i) codes, const moe_element_format_ *f, const float *zero) {
  if (f->bits == 4 && !f->zero) return MOE_V(e2m1)(codes);
  if (!f->zero) return MOE_K(fp8)(codes, 0, f);
  const MOE_V(i) mask = MOE_V(set1i)(2u * (uint32_t)f->zero - 1u);
  const MOE_V(i) counted = MOE_V(mux)(mask, MOE_V(addi)(codes, MOE_V(set1i)(f->flip)), MOE_V(set1i)(f->magic));
  return MOE_V(sub)(MOE_V(castf)(counted), MOE_V(load)(zero));
}

/* Numbers, infinities or NaN as a product has them. */
MOE_INLINE MOE_V(f) MOE_K(to_bf16)(MOE_V(f) x) {
  return MOE_V(castf)(MOE_V(andi)(MOE_V(bf16_round)(x), MOE_V(set1i)(0xffff0000u)));
}

/* Codes along columns. Words of a column hold its elements in order. */
MOE_FN void MOE_K(pack_scaled_columns)(float *panel, const moe_scaled_codes_ *s) {
  const moe_codes_ *c = &s->codes;
  const moe_element_format_ f = *c->format; /* a copy, which no store can change */
  const int64_t per_word = 32 / f.bits;
  const int bf16 = s->to_bf16;
  for (int64_t col = 0; col < c->width; col += MOE_W)
    for (int64_t at = 0; at < c->k; at += MOE_W * per_word) {
      MOE_V(i) words[MOE_W], none;
      float *p = panel + at * MOE_NR + c->col + col;
      const uint8_t *run = s->run + at, *end = s->run + moe_min_(c->k, at + MOE_W * per_word);
      (void)MOE_K(load_words)(c, col, at, words, &none);
      for (const MOE_V(i) *next = words; run < end; next++) {
        MOE_V(i) codes = *next;
        const uint8_t *stop = run + moe_min_(per_word, end - run);
        for (; run < stop; run++, p += MOE_NR, codes = MOE_V(srli)(codes, f.bits)) {
          const int64_t row = *run * (int64_t)MOE_NR + col;
          const MOE_V(f) code = MOE_K(code_values)(codes, &f, s->zero + (row & s->zero_mask));
          const MOE_V(f) x = MOE_V(mul)(code, MOE_V(load)(s->scale + row));
          MOE_V(store)(p, bf16 ? MOE_K(to_bf16)(x) : x);
        }
      }
    }
}

/* A column's numbers of some runs, for elements that are side by side. */
MOE_INLINE MOE_V(f) MOE_K(of_runs)(const float *numbers, const uint8_t *run, int64_t n, int64_t mask) {
  float some[MOE_W] = {0};
  if (run[0] == run[n - 1]) return MOE_V(set1)(numbers[run[0] * MOE_NR & mask]);
  for (int64_t i = 0; i < n; i++) some[i] = numbers[run[i] * MOE_NR & mask];
  return MOE_V(load)(some);
}

/* Codes along rows: row r of the panel is column r. */
MOE_FN void MOE_K(pack_scaled_rows)(float *panel, const moe_scaled_codes_ *s) {
  const moe_codes_ *c = &s->codes;
  const moe_element_format_ f = *c->format; /* a copy, which no store can change */
  const int bf16 = s->to_bf16;
  for (int64_t r = 0; r < c->k; r++, panel += MOE_NR) {
    const uint8_t *row = c->codes + r * c->stride;
    for (int64_t i = 0; i < c->width; i += MOE_W) {
      float *p = panel + c->col + i, zero[MOE_W];
      const int64_t n = moe_min_(MOE_W, c->n - i);
      if (n < MOE_W) MOE_V(store)(p, MOE_V(set1)(0.0f));
      if (n <= 0) continue;
      if (f.zero) MOE_V(store)(zero, MOE_K(of_runs)(s->zero + r, s->run + i, n, s->zero_mask & ~(MOE_NR - 1)));
      const MOE_V(i) codes = f.bits == 4 ? MOE_K(row_codes_4)(row, i, c->n) : MOE_K(row_codes_8)(row, i, c->n);
      MOE_V(f) x = MOE_V(mul)(MOE_K(code_values)(codes, &f, zero), MOE_K(of_runs)(s->scale + r, s->run + i, n, -1));
      if (bf16) x = MOE_K(to_bf16)(x);
      if (n < MOE_W) MOE_V(storen)(p, x, n);
      else MOE_V(store)(p, x);
    }
  }
}
