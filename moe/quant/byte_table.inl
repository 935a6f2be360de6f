/* Tables of the values of codes, and what they make of codes: panels. */

/* The last bit of words that are numbers, but not zero. */
MOE_INLINE MOE_V(i) MOE_B(marks)(MOE_V(i) words) {
  const MOE_V(i) magnitude = MOE_V(andi)(words, MOE_V(set1i)(0x7fff7fffu));
  const MOE_V(i) finite = MOE_V(lt2x16)(magnitude, MOE_V(set1i)(0x7f807f80u));
  const MOE_V(i) numbers = MOE_V(andi)(finite, MOE_V(lt2x16)(MOE_V(set1i)(0u), magnitude));
  return MOE_V(andi)(numbers, MOE_V(set1i)(0x00010001u));
}

MOE_FN void MOE_B(byte_table)(moe_byte_table_ *table, const moe_bf16 *value, float scale, int mark) {
  const MOE_V(f) factor = MOE_V(set1)(scale);
  for (int i = 0; i < MOE_BYTE_VALUES_; i += 2 * MOE_W) {
    const MOE_V(f) first = MOE_V(mul)(MOE_V(load_bf16)(value + i), factor);
    const MOE_V(f) second = MOE_V(mul)(MOE_V(load_bf16)(value + i + MOE_W), factor);
    const MOE_V(i) words = MOE_V(round2)(MOE_V(canon)(first), MOE_V(canon)(second));
    MOE_B(store_bytes)(table->low + i, table->high + i, mark ? MOE_V(ori)(words, MOE_B(marks)(words)) : words);
  }
}

enum { MOE_B(run) = 4 * MOE_W }; /* codes of a column at a time */

/* `vectors` vectors of pairs go to a row of pairs or, with f32, to two rows of floats, of which the second one may not
   be there. */
MOE_INLINE void MOE_B(store_pairs)(int f32, int both, void *panel, const MOE_V(i) * pairs, int vectors) {
  MOE_UNROLL
  for (int v = 0; v < vectors; v++) {
    uint32_t *to = (uint32_t *)panel + v * MOE_W;
    if (!f32) {
      MOE_V(storei)(to, both ? pairs[v] : MOE_V(andi)(pairs[v], MOE_V(set1i)(0xffffu)));
      continue;
    }
    MOE_V(storei)(to, MOE_V(slli)(pairs[v], 16));
    if (both) MOE_V(storei)(to + MOE_NR, MOE_V(andi)(pairs[v], MOE_V(set1i)(0xffff0000u)));
  }
}

/* What add_scale adds for plain scale bytes: their exponents, and the marks are taken away. */
MOE_INLINE MOE_V(i) MOE_B(scale_of)(MOE_V(i) even, MOE_V(i) odd) {
  const MOE_V(i) both = MOE_V(ori)(MOE_V(slli)(even, 7), MOE_V(slli)(odd, 23));
  return MOE_V(sub2x16)(both, MOE_V(set1i)((127u << 7 | 1u) * 0x00010001u));
}

/* Two rows, or one: n columns of them exist, `width`, 32 or 64, are made. */
MOE_INLINE int MOE_B(two_rows)(int f32, int both, void *panel, const uint8_t *row, const uint8_t *scale,
                               const moe_codes_ *c, const MOE_V(i) * table) {
  MOE_V(i) codes[2], pairs[2];
  MOE_B(pair_codes)(table, row, both ? row + c->stride : row, c->n, codes);
  for (int64_t i = 0; i < c->width; i += 2 * MOE_W, panel = (char *)panel + 8 * MOE_W) {
    MOE_B(lookup_pairs)(table, c->format->nan_is_minus_zero, codes[i > 0], pairs);
    if (scale && i < c->n) {
      const uint32_t even = scale[i / 32], odd = both ? scale[c->scale_stride + i / 32] : 127u;
      if (even < MOE_MARK_SCALE_ || odd < MOE_MARK_SCALE_ || !MOE_PLAIN_SCALE_(even) || !MOE_PLAIN_SCALE_(odd))
        return 0;
      const MOE_V(i) factor = MOE_B(scale_of)(MOE_V(set1i)(even), MOE_V(set1i)(odd));
      pairs[0] = MOE_B(add_scale)(pairs[0], factor), pairs[1] = MOE_B(add_scale)(pairs[1], factor);
    }
    MOE_B(store_pairs)(f32, both, panel, pairs, 2);
  }
  return 1;
}

MOE_FN __attribute__((noinline)) int MOE_B(pack_rows)(int f32, void *panel, const moe_codes_ *c) {
  MOE_V(i) table[MOE_B(table_vectors)];
  const uint8_t *row = c->codes, *scale = c->scale;
  char *to = (char *)panel + 4 * c->col;
  MOE_B(load_table)(c->table, table);
  for (int64_t k = c->k; k > 0; k -= 2, row += 2 * c->stride, to += f32 ? 2 * MOE_NR_BYTES_ : MOE_NR_BYTES_) {
    if (!MOE_B(two_rows)(f32, k > 1, to, row, scale, c, table)) return 0;
    if (scale) scale += 2 * c->scale_stride;
  }
  return 1;
}
MOE_FN int MOE_B(pack_rows_f32)(void *panel, const moe_codes_ *c) { return MOE_B(pack_rows)(1, panel, c); }
MOE_FN int MOE_B(pack_rows_pairs)(void *panel, const moe_codes_ *c) { return MOE_B(pack_rows)(0, panel, c); }

/* The codes of W columns from `col` on, from code `at` on, 64 of each or as many as there are, four in a word. */
MOE_INLINE void MOE_B(column_codes)(const moe_codes_ *c, int64_t col, int64_t at, MOE_V(i) * words) {
  const uint8_t *from = c->codes + col * c->stride + at;
  uint8_t columns[4 * MOE_W * MOE_W];
  if (col + MOE_W <= c->n && at + MOE_B(run) <= c->k) {
    MOE_V(load_columns)(from, c->stride, words);
    return;
  }
  MOE_V(copy_columns)(columns, c, from, c->k - at, c->n - col);
  MOE_V(load_columns)(columns, MOE_B(run), words);
}

/* W columns of up to 64 codes to a panel. */
MOE_INLINE int MOE_B(pack_some_columns)(int f32, char *to, const moe_codes_ *c, int64_t col, int64_t at,
                                        const MOE_V(i) * table) {
  const int64_t k = moe_min_(MOE_B(run), c->k - at), row = f32 ? 2 * MOE_NR_BYTES_ : MOE_NR_BYTES_;
  MOE_V(i) words[MOE_W], pairs[2], scales = MOE_V(set1i)(0x7f7f7f7fu), factor = scales;
  MOE_B(column_codes)(c, col, at, words);
  if (c->scale) scales = MOE_V(scale_words)(c, col, at / 32, (k + 31) / 32);
  const MOE_V(i) less = MOE_V(subi)(scales, MOE_V(set1i)((MOE_MARK_SCALE_ - 16) * 0x01010101u));
  if (c->scale && (MOE_V(scales_special)(scales) || MOE_V(scales_special)(less))) return 0;
  for (int64_t i = 0; i < k; i += 4, to += 2 * row) {
    MOE_B(lookup_pairs)(table, c->format->nan_is_minus_zero, MOE_B(pair_words)(words[i / 4]), pairs);
    if (c->scale) {
      const MOE_V(i) byte = MOE_V(andi)(scales, MOE_V(set1i)(255u));
      if (i % 32 == 0) factor = MOE_B(scale_of)(byte, byte), scales = MOE_V(srli)(scales, 8);
      pairs[0] = MOE_B(add_scale)(pairs[0], factor), pairs[1] = MOE_B(add_scale)(pairs[1], factor);
    }
    MOE_B(store_pairs)(f32, k - i > 1, to, pairs, 1);
    if (k - i > 2) MOE_B(store_pairs)(f32, k - i > 3, to + row, pairs + 1, 1);
  }
  return 1;
}

MOE_FN __attribute__((noinline)) int MOE_B(pack_columns)(int f32, void *panel, const moe_codes_ *c) {
  MOE_V(i) table[MOE_B(table_vectors)];
  MOE_B(load_table)(c->table, table);
  for (int64_t at = 0; at < c->k; at += MOE_B(run))
    for (int64_t col = 0; col < c->width; col += MOE_W) {
      char *to = (char *)panel + 4 * (c->col + col) + (f32 ? at : at / 2) * MOE_NR_BYTES_;
      if (!MOE_B(pack_some_columns)(f32, to, c, col, at, table)) return 0;
    }
  return 1;
}
MOE_FN int MOE_B(pack_columns_f32)(void *panel, const moe_codes_ *c) { return MOE_B(pack_columns)(1, panel, c); }
MOE_FN int MOE_B(pack_columns_pairs)(void *panel, const moe_codes_ *c) { return MOE_B(pack_columns)(0, panel, c); }
