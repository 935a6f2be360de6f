/* Tables of the values of codes, and what they make of codes: panels. */

/* 128 values times a scale, rounded to bf16. */
MOE_FN void MOE_B(byte_table)(moe_byte_table_ *table, const moe_bf16 *value, float scale) {
  const MOE_V(f) factor = MOE_V(set1)(scale);
  for (int i = 0; i < MOE_BYTE_VALUES_; i += 2 * MOE_W) {
    const MOE_V(f) first = MOE_V(mul)(MOE_V(load_bf16)(value + i), factor);
    const MOE_V(f) second = MOE_V(mul)(MOE_V(load_bf16)(value + i + MOE_W), factor);
    const MOE_V(i) words = MOE_V(round2)(MOE_V(canon)(first), MOE_V(canon)(second));
    MOE_B(store_bytes)(table->low + i, table->high + i, words);
  }
}

enum { MOE_B(table_vectors) = sizeof(moe_byte_table_) / 64, MOE_B(run) = 4 * MOE_W };

MOE_INLINE void MOE_B(load_table)(const moe_byte_table_ *table, MOE_V(i) * bytes) {
  MOE_UNROLL
  for (int i = 0; i < MOE_B(table_vectors); i++) bytes[i] = MOE_V(loadi)(table->low + 64 * i);
}

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

/* Two rows, or one: n columns of them exist, `width`, 32 or 64, are made. */
MOE_INLINE void MOE_B(two_rows)(int f32, int both, void *panel, const uint8_t *row, const moe_codes_ *c,
                                const MOE_V(i) * table) {
  MOE_V(i) codes[2], pairs[4];
  MOE_B(pair_codes)(row, both ? row + c->stride : row, c->n, codes);
  MOE_B(lookup_pairs)(table, c->format->nan_is_minus_zero, codes[0], pairs);
  MOE_B(store_pairs)(f32, both, panel, pairs, 2);
  if (c->width <= 2 * MOE_W) return;
  MOE_B(lookup_pairs)(table, c->format->nan_is_minus_zero, codes[1], pairs);
  MOE_B(store_pairs)(f32, both, (char *)panel + 8 * MOE_W, pairs, 2);
}

MOE_INLINE void MOE_B(pack_rows)(int f32, void *panel, const moe_codes_ *c) {
  MOE_V(i) table[MOE_B(table_vectors)];
  const uint8_t *row = c->codes;
  char *to = (char *)panel + 4 * c->col;
  MOE_B(load_table)(c->table, table);
  for (int64_t k = c->k; k > 0; k -= 2, row += 2 * c->stride, to += f32 ? 2 * MOE_NR_BYTES_ : MOE_NR_BYTES_)
    if (k > 1) MOE_B(two_rows)(f32, 1, to, row, c, table);
    else MOE_B(two_rows)(f32, 0, to, row, c, table);
}
MOE_FN void MOE_B(pack_rows_f32)(void *panel, const moe_codes_ *c) { MOE_B(pack_rows)(1, panel, c); }
MOE_FN void MOE_B(pack_rows_pairs)(void *panel, const moe_codes_ *c) { MOE_B(pack_rows)(0, panel, c); }

/* The codes of W columns from `col` on, from code `at` on, 64 of each or as many as there are, four in a word. */
MOE_INLINE void MOE_B(column_codes)(const moe_codes_ *c, int64_t col, int64_t at, MOE_V(i) * words) {
  const uint8_t *from = c->codes + col * c->stride + at;
  uint8_t columns[4 * MOE_W * MOE_W];
  if (col + MOE_W <= c->n && at + MOE_B(run) <= c->k) {
    MOE_V(load_columns)(from, c->stride, words);
    return;
  }
  memset(columns, 0, sizeof columns);
  for (int64_t i = 0; i < moe_min_(c->n - col, MOE_W); i++)
    memcpy(columns + i * MOE_B(run), from + i * c->stride, (size_t)moe_min_(MOE_B(run), c->k - at));
  MOE_V(load_columns)(columns, MOE_B(run), words);
}

/* W columns of up to 64 codes to a panel. */
MOE_INLINE void MOE_B(pack_some_columns)(int f32, char *to, const moe_codes_ *c, int64_t col, int64_t at,
                                         const MOE_V(i) * table) {
  const int64_t k = moe_min_(MOE_B(run), c->k - at), row = f32 ? 2 * MOE_NR_BYTES_ : MOE_NR_BYTES_;
  MOE_V(i) words[MOE_W], pairs[2];
  MOE_B(column_codes)(c, col, at, words);
  for (int64_t i = 0; i < k; i += 4, to += 2 * row) {
    MOE_B(lookup_pairs)(table, c->format->nan_is_minus_zero, MOE_B(pair_words)(words[i / 4]), pairs);
    if (k - i == 1) MOE_B(store_pairs)(f32, 0, to, pairs, 1);
    else MOE_B(store_pairs)(f32, 1, to, pairs, 1);
    if (k - i == 3) MOE_B(store_pairs)(f32, 0, to + row, pairs + 1, 1);
    if (k - i > 3) MOE_B(store_pairs)(f32, 1, to + row, pairs + 1, 1);
  }
}

MOE_INLINE void MOE_B(pack_columns)(int f32, void *panel, const moe_codes_ *c) {
  MOE_V(i) table[MOE_B(table_vectors)];
  MOE_B(load_table)(c->table, table);
  for (int64_t at = 0; at < c->k; at += MOE_B(run))
    for (int64_t col = 0; col < c->width; col += MOE_W) {
      char *to = (char *)panel + 4 * (c->col + col) + (f32 ? at : at / 2) * MOE_NR_BYTES_;
      MOE_B(pack_some_columns)(f32, to, c, col, at, table);
    }
}
MOE_FN void MOE_B(pack_columns_f32)(void *panel, const moe_codes_ *c) { MOE_B(pack_columns)(1, panel, c); }
MOE_FN void MOE_B(pack_columns_pairs)(void *panel, const moe_codes_ *c) { MOE_B(pack_columns)(0, panel, c); }
