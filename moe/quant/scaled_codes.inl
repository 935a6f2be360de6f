/* Codes under scales that are floats to f32 panels (see moe_scaled_codes_). */

/* The values of codes, which are the lowest bits of elements. The last bits of f->magic count units of an integer. */
MOE_INLINE MOE_V(f)
    MOE_K(code_values)(int bits, int integer, MOE_V(i) codes, MOE_V(f) zero, const moe_element_format_ *f) {
  if (!integer) return bits == 4 ? MOE_V(e2m1)(codes) : MOE_K(fp8)(codes, 0, f);
  const MOE_V(i) up = MOE_V(addi)(codes, MOE_V(set1i)(f->flip)), mask = MOE_V(set1i)((1u << bits) - 1u);
  return MOE_V(sub)(MOE_V(castf)(MOE_V(mux)(mask, up, MOE_V(set1i)(f->magic))), zero);
}

/* Times their scales. A NaN among them is one that rounding keeps. */
MOE_INLINE MOE_V(f) MOE_K(scaled_values)(MOE_V(f) x, MOE_V(f) scale, int bf16) {
  x = MOE_V(mul)(x, scale);
  return bf16 ? MOE_V(castf)(MOE_V(andi)(MOE_V(bf16_round)(x), MOE_V(set1i)(0xffff0000u))) : x;
}

/* n elements of W columns, from `at` on, whose words follow each other. */
MOE_INLINE void MOE_K(pack_scaled_words)(int bits, int integer, float *p, const MOE_V(i) * words, int64_t n,
                                         const moe_scaled_codes_ *s, int64_t at, int64_t col) {
  const moe_element_format_ f = *s->codes.format; /* a copy, which no store can change */
  const int64_t block = s->block, run = (s->first + at) / block, zero_stride = s->zero_stride;
  const float *scale = s->scale + run * MOE_NR + col, *zero = s->zero + run * zero_stride + col;
  const int bf16 = s->to_bf16;
  MOE_V(f) factor = MOE_V(load)(scale), zeros = integer ? MOE_V(load)(zero) : factor;
  int64_t left = block - (s->first + at) % block;
  for (int64_t some; n > 0; n -= some, words++) {
    MOE_V(i) codes = *words;
    some = moe_min_(n, 32 / bits);
    for (const float *end = p + some * MOE_NR; p < end; p += MOE_NR, codes = MOE_V(srli)(codes, bits)) {
      if (left-- == 0) {
        left = block - 1;
        factor = MOE_V(load)(scale += MOE_NR);
        if (integer) zeros = MOE_V(load)(zero += zero_stride);
      }
      MOE_V(store)(p, MOE_K(scaled_values)(MOE_K(code_values)(bits, integer, codes, zeros, &f), factor, bf16));
    }
  }
}

MOE_FN void MOE_K(pack_scaled_columns)(float *panel, const moe_scaled_codes_ *s) {
  const moe_codes_ *c = &s->codes;
  const int bits = c->format->bits, integer = c->format->zero > 0;
  const int64_t some = MOE_W * 32 / bits;
  for (int64_t col = 0; col < c->width; col += MOE_W)
    for (int64_t at = 0; at < c->k; at += some) {
      MOE_V(i) words[MOE_W], none;
      const int64_t n = moe_min_(some, c->k - at);
      float *p = panel + at * MOE_NR + c->col + col;
      (void)MOE_K(load_words)(c, col, at, words, &none);
      if (integer && bits == 8) MOE_K(pack_scaled_words)(8, 1, p, words, n, s, at, col);
      else if (integer) MOE_K(pack_scaled_words)(4, 1, p, words, n, s, at, col);
      else if (bits == 8) MOE_K(pack_scaled_words)(8, 0, p, words, n, s, at, col);
      else MOE_K(pack_scaled_words)(4, 0, p, words, n, s, at, col);
    }
}

/* Where the next elements of a column find their scale and zero point. */
typedef struct MOE_K(scaled_walk_) {
  const float *scale, *zero;
  int64_t left;
} MOE_K(scaled_walk);

/* Those of the next n <= W elements, which are not in one run. */
MOE_FN __attribute__((noinline)) MOE_K(scaled_walk)
    MOE_K(scaled_some)(MOE_K(scaled_walk) walk, const moe_scaled_codes_ *s, int64_t n, float *scales, float *zeros) {
  for (int64_t i = 0; i < n; i++, walk.left--) {
    if (walk.left == 0) walk.scale += MOE_NR, walk.zero += s->zero_stride, walk.left = s->block;
    scales[i] = *walk.scale, zeros[i] = *walk.zero;
  }
  return walk;
}

/* A row of a panel: the elements of a column. */
MOE_INLINE void MOE_K(pack_scaled_row)(int bits, int integer, float *p, const uint8_t *row, int64_t r,
                                       const moe_scaled_codes_ *s) {
  const moe_element_format_ f = *s->codes.format;
  const int64_t block = s->block, zero_stride = s->zero_stride;
  MOE_K(scaled_walk) walk = {s->scale + r, s->zero + r, s->block - s->first};
  for (int64_t i = 0; i < s->codes.width; i += MOE_W) {
    const int64_t n = moe_min_(MOE_W, s->codes.n - i);
    if (n < MOE_W) MOE_V(store)(p + i, MOE_V(set1)(0.0f));
    if (n <= 0) continue;
    if (walk.left == 0) walk.scale += MOE_NR, walk.zero += zero_stride, walk.left = block;
    MOE_V(f) scale = MOE_V(set1)(*walk.scale), zero = MOE_V(set1)(*walk.zero);
    if (walk.left >= n) walk.left -= n;
    else {
      float scales[MOE_W], zeros[MOE_W];
      walk = MOE_K(scaled_some)(walk, s, n, scales, zeros);
      scale = MOE_V(loadn)(scales, n), zero = MOE_V(loadn)(zeros, n);
    }
    const MOE_V(i) codes = bits == 4 ? MOE_K(row_codes_4)(row, i, s->codes.n) : MOE_K(row_codes_8)(row, i, s->codes.n);
    const MOE_V(f) x = MOE_K(scaled_values)(MOE_K(code_values)(bits, integer, codes, zero, &f), scale, s->to_bf16);
    if (n < MOE_W) MOE_V(storen)(p + i, x, n);
    else MOE_V(store)(p + i, x);
  }
}

MOE_FN void MOE_K(pack_scaled_rows)(float *panel, const moe_scaled_codes_ *s) {
  const int bits = s->codes.format->bits, integer = s->codes.format->zero > 0;
  const uint8_t *row = s->codes.codes;
  float *p = panel + s->codes.col;
  for (int64_t r = 0; r < s->codes.k; r++, row += s->codes.stride, p += MOE_NR)
    if (integer && bits == 8) MOE_K(pack_scaled_row)(8, 1, p, row, r, s);
    else if (integer) MOE_K(pack_scaled_row)(4, 1, p, row, r, s);
    else if (bits == 8) MOE_K(pack_scaled_row)(8, 0, p, row, r, s);
    else MOE_K(pack_scaled_row)(4, 0, p, row, r, s);
}

/* The scales of runs of n columns, whole vectors and whole words of them: e4m3fn, of `format`, E8M0, bf16 or f32. */
MOE_FN void MOE_K(load_scales)(float *scale, const uint8_t *from, int64_t stride, int64_t n, int64_t runs,
                               moe_scales_type type, const moe_element_format_ *format) {
  const moe_element_format_ f = *format;
  const int bits = type == MOE_SCALES_F32 ? 32 : type == MOE_SCALES_BF16 ? 16 : 8;
  for (int64_t col = 0; col < n; col += MOE_W, from += MOE_W * stride)
    for (int64_t r = 0; r < runs;) {
      const MOE_V(i) word = MOE_V(gather)(from + r * bits / 8, stride);
      const int e4m3fn = type == MOE_SCALES_E4M3FN, special = MOE_K(special_fp8)(MOE_K(outside_fp8)(word, &f));
      for (int at = 0; at < 32; at += bits, r++) {
        const MOE_V(i) up = MOE_V(slli)(word, 32 - bits - at), byte = MOE_V(srli)(up, 24);
        MOE_V(f) x = MOE_V(castf)(up);
        if (bits == 16) x = MOE_V(castf)(MOE_V(andi)(up, MOE_V(set1i)(0xffff0000u)));
        if (e4m3fn) x = special ? MOE_K(fp8)(byte, 0, &f) : MOE_K(plain_fp8)(word, at, MOE_V(set1i)(127u), &f);
        if (type == MOE_SCALES_E8M0) x = MOE_K(times_e8m0)(MOE_V(set1)(1.0f), byte);
        MOE_V(store)(scale + r * MOE_NR + col, x);
      }
    }
}
