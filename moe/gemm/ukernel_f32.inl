/* The f32 product tile: MOE_MR x MOE_NR_VECTORS accumulators stay in registers. The instruction set sets
   MOE_NR_VECTORS (vectors side by side) to fit its register file, the panel's 64 columns being walked in parts of
   that width. It sets MOE_KC_BYTES (bytes of a row that are multiplied at a time), MOE_KC_SHORT_ROWS (half of them up
   to so many rows) and MOE_PREFETCH_BYTES (of weights that are fetched before they are wanted) so that the panel's part
   stays in cache and the sums do not move too often. */

/* The sums of `rows` rows, from products or zero and back. */
MOE_INLINE void MOE_K(ukernel_begin)(int rows, const float *c, int add, MOE_V(f) (*acc)[MOE_NR_VECTORS]) {
  MOE_UNROLL
  for (int i = 0; i < rows; i++) {
    MOE_UNROLL
    for (int j = 0; j < MOE_NR_VECTORS; j++)
      acc[i][j] = add ? MOE_V(load)(c + i * MOE_NR + j * MOE_W) : MOE_V(set1)(0.0f);
  }
}

MOE_INLINE void MOE_K(ukernel_end)(int rows, float *c, MOE_V(f) (*acc)[MOE_NR_VECTORS]) {
  MOE_UNROLL
  for (int i = 0; i < rows; i++) {
    MOE_UNROLL
    for (int j = 0; j < MOE_NR_VECTORS; j++) MOE_V(store)(c + i * MOE_NR + j * MOE_W, acc[i][j]);
  }
}

/* What is to be fetched meanwhile is fetched beside every turn; of columns that are walked in parts, only what comes
   from memory, an equal share beside each part, while there is any: their fewer products leave less room. The sums that
   the next part begins with are fetched as this one begins. A turn of six or four rows, which are most, takes as
   many pairs of k as there are parts: a tile then has as many turns as pairs, and few instructions beside its products,
   which count where a neighbour shares the core (measured). Other rows take a pair, and have turns to spare. */
enum { MOE_K(nr_parts) = MOE_NR / (MOE_NR_VECTORS * MOE_W) };
MOE_INLINE void MOE_K(ukernel_prefetch_share)(moe_ukernel_at_ *at, int64_t col) {
  const int64_t next = col + MOE_NR_VECTORS * MOE_W;
  const char *sums = next < MOE_NR ? (const char *)(at->c + next) : at->next;
  at->left = (at->fetches + col / (MOE_NR_VECTORS * MOE_W)) / MOE_K(nr_parts);
  MOE_UNROLL
  for (int i = 0; i < MOE_MR && MOE_K(nr_parts) > 1; i++) __builtin_prefetch(sums + i * MOE_NR_BYTES_, 0, 3);
}
MOE_INLINE void MOE_K(ukernel_prefetch_step)(moe_ukernel_at_ *at) {
  if (MOE_K(nr_parts) == 1)
    moe_ukernel_prefetch_(at, 8, MOE_KC_BYTES);
  else if (--at->left >= 0)
    moe_prefetch_next_(&at->fetch);
}

/* Adds the rows' elements, `pitch` bytes apart, times b. */
MOE_INLINE void MOE_K(ukernel_step)(int rows, const char *row, int64_t pitch, const MOE_V(f) * b,
                                    MOE_V(f) (*acc)[MOE_NR_VECTORS]) {
  MOE_UNROLL
  for (int i = 0; i < rows; i++) {
    const MOE_V(f) a = MOE_V(set1)(moe_load_scalar(row + i * pitch));
    MOE_UNROLL
    for (int j = 0; j < MOE_NR_VECTORS; j++) acc[i][j] = MOE_V(fma_onto)(a, b[j], acc[i][j]);
  }
}

/* The same of `pairs` pairs of k, of which the panel's columns are at `panel`; `across`: the rows are a panel's columns
   as well. */
MOE_INLINE void MOE_K(ukernel_pairs)(int rows, int packed, int pairs, const char *row, const float *panel,
                                     MOE_V(f) (*acc)[MOE_NR_VECTORS]) {
  MOE_UNROLL
  for (int pair = 0; pair < pairs; pair++) {
    MOE_UNROLL
    for (int odd = 1; odd >= 0; odd--) {
      MOE_V(f) b[MOE_NR_VECTORS];
      MOE_UNROLL
      for (int j = 0; j < MOE_NR_VECTORS; j++) {
        b[j] = MOE_V(load)(panel + (2 * pair + odd) * MOE_NR + j * MOE_W);
        if (rows == 3) MOE_IN_REGISTER(b[j]);
      }
      MOE_K(ukernel_step)
      (rows, row + (2 * pair + odd) * (packed ? MOE_NR_BYTES_ : 4), packed ? 4 : MOE_KC_BYTES, b, acc);
    }
  }
}

/* So many pairs at the end of a tile as wide as a panel are multiplied with some of its rows after the others, whose
   sums are stored meanwhile: all stores at once would fill the queue that they wait in, and keep the next products
   out. */
enum { MOE_K(ukernel_last) = MOE_K(nr_parts) == 1 ? 3 : 0, MOE_K(ukernel_last_rows) = 2 };
MOE_INLINE void MOE_K(ukernel_finish)(const char *row, const float *panel, float *c, MOE_V(f) (*acc)[MOE_NR_VECTORS]) {
  MOE_UNROLL
  for (int i = 0; i < MOE_MR; i += MOE_K(ukernel_last_rows), row += MOE_K(ukernel_last_rows) * MOE_KC_BYTES) {
    MOE_OPAQUE_POINTER(row);
    MOE_K(ukernel_pairs)(MOE_K(ukernel_last_rows), 0, MOE_K(ukernel_last), row, panel, acc + i);
    MOE_K(ukernel_end)(MOE_K(ukernel_last_rows), c + i * MOE_NR, acc + i);
  }
}

MOE_INLINE void MOE_K(ukernel_columns)(int rows, const moe_ukernel_ *t, moe_ukernel_at_ *at, const char *row,
                                       int64_t col, float *c) {
  MOE_V(f) acc[MOE_MR][MOE_NR_VECTORS];
  const float *panel = (const float *)t->panel + col;
  int64_t p = (t->k + 1) / 2;
  const int64_t last = rows == MOE_MR && p >= MOE_K(ukernel_last) ? MOE_K(ukernel_last) : 0;
  c += col;
  MOE_OPAQUE_POINTER(c);
  MOE_K(ukernel_begin)(rows, c, t->add, acc);
  for (; p >= MOE_K(nr_parts) && MOE_K(nr_parts) > 1 && rows % 2 == 0; p -= MOE_K(nr_parts)) {
    MOE_K(ukernel_prefetch_step)(at);
    MOE_OPAQUE_POINTER(row);
    MOE_K(ukernel_pairs)(rows, 0, MOE_K(nr_parts), row, panel, acc);
    row += 8 * MOE_K(nr_parts);
    panel += 2 * MOE_K(nr_parts) * MOE_NR;
  }
  for (; p > last; p--, row += 8, panel += 2 * MOE_NR) {
    MOE_K(ukernel_prefetch_step)(at);
    MOE_OPAQUE_POINTER(row);
    MOE_K(ukernel_pairs)(rows, 0, 1, row, panel, acc);
  }
  if (last)
    MOE_K(ukernel_finish)(row, panel, c, acc);
  else
    MOE_K(ukernel_end)(rows, c, acc);
}

/* The rows at hand times the panel's columns from there on. */
MOE_INLINE void MOE_K(ukernel_parts_from)(const moe_ukernel_ *t, moe_ukernel_at_ *at, int64_t from) {
  for (int64_t j = from; j < MOE_NR; j += MOE_NR_VECTORS * MOE_W) {
    MOE_K(ukernel_prefetch_share)(at, j);
    switch (at->now) {
      case 1:
      case 2:
      case 3: MOE_K(ukernel_columns)(3, t, at, at->row, j, at->c); break;
      case 4: MOE_K(ukernel_columns)(4, t, at, at->row, j, at->c); break;
      case 5: MOE_K(ukernel_columns)(5, t, at, at->row, j, at->c); break;
      default: MOE_K(ukernel_columns)(MOE_MR, t, at, at->row, j, at->c); break;
    }
  }
}

/* The one copy of this where columns are walked in parts, for the tile that gathers as well. */
MOE_FN void MOE_K(ukernel_in_parts)(const moe_ukernel_ *t, moe_ukernel_at_ *at, int64_t from) {
  MOE_K(ukernel_parts_from)(t, at, from);
}

MOE_FN void MOE_K(ukernel_f32)(const moe_ukernel_ *t) {
  for (moe_ukernel_at_ at = moe_ukernel_first_(t); at.rows > 0; moe_ukernel_next_(t, MOE_KC_BYTES, &at)) {
    moe_ukernel_prefetch_begin_(t, MOE_KC_BYTES, &at);
    if (MOE_K(nr_parts) > 1)
      MOE_K(ukernel_in_parts)(t, &at, 0);
    else
      MOE_K(ukernel_parts_from)(t, &at, 0);
  }
}

/* What a stream takes at a time: rows of half a panel's columns. */
enum { MOE_K(small_m_wide) = MOE_NR / 2, MOE_K(small_m_vectors) = MOE_K(small_m_wide) / MOE_W };
enum { MOE_K(small_m_deep) = MOE_SMALL_M_VECTORS / MOE_K(small_m_vectors) };

/* What lies ahead of `deep` rows of `bytes` bytes is fetched into the second-level cache, which takes more at a time
   than the first. */
MOE_INLINE void MOE_K(small_m_prefetch)(int deep, int bytes, const moe_small_m_ *s, const char *src) {
  src += s->prefetch;
  MOE_UNROLL
  for (int q = 0; q < deep; q++, src += s->stride) {
    MOE_UNROLL
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(src + i, 0, 2);
  }
}

/* All rows of a stream (see moe_small_m_) times `pairs` pairs of elements, of which k are there, of `vectors` vectors of
   columns: element q of vector v is b[q * vectors + v]. */
MOE_INLINE void MOE_K(small_m_products)(const moe_small_m_ *s, int pairs, int vectors, int64_t k, const MOE_V(f) * b,
                                        const float *x, float *c) {
  for (int64_t r = 0; r < s->rows; r++, x += s->x_stride, c += MOE_NR) {
    MOE_V(f) sum[4];
    MOE_UNROLL
    for (int v = 0; v < vectors; v++) sum[v] = MOE_V(load)(c + v * MOE_W);
    MOE_UNROLL
    for (int q = 0; q < 2 * pairs; q += 2) {
      /* The missing odd element of the last pair is a zero in both operands. */
      const MOE_V(f) even = MOE_V(set1)(x[q]), odd = MOE_V(set1)(q + 1 < k ? x[q + 1] : 0.0f);
      MOE_UNROLL
      for (int v = 0; v < vectors; v++) sum[v] = MOE_V(fma)(odd, b[(q + 1) * vectors + v], sum[v]);
      MOE_UNROLL
      for (int v = 0; v < vectors; v++) sum[v] = MOE_V(fma)(even, b[q * vectors + v], sum[v]);
    }
    MOE_UNROLL
    for (int v = 0; v < vectors; v++) MOE_V(store)(c + v * MOE_W, sum[v]);
  }
}

/* The same of k rows of stream_wide columns, already floats. */
MOE_FN void MOE_K(small_m_floats)(const moe_small_m_ *s, int64_t k, const float *rows, const float *x, float *c) {
  for (; k > 0; k -= 2, rows += 2 * MOE_K(small_m_wide), x += 2) {
    MOE_V(f) b[2 * MOE_K(small_m_vectors)];
    MOE_UNROLL
    for (int i = 0; i < 2 * MOE_K(small_m_vectors); i++) b[i] = MOE_V(load)(rows + i * MOE_W);
    MOE_K(small_m_products)(s, 1, MOE_K(small_m_vectors), k, b, x, c);
  }
}
