/* The f32 micro-kernel: MOE_MR x MOE_NR_VECTORS accumulators stay in registers. MOE_NR_VECTORS, vectors side by side,
   fits the register file; the panel's 64 columns are walked in parts of that width. */

/* Accumulators from c, or zero, and back. */
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

/* Prefetching. Where the panel is walked in parts, only what comes from memory is prefetched, an equal share in each
   part: there are fewer products to hide behind. The sums that the next part begins with are prefetched as this one
   begins. A step of six or four rows, which are most, takes as many pairs of k as there are parts: a micro-kernel then
   has as many steps as pairs, and few instructions besides its products, which counts where two threads share a core
   (measured). Other rows take a pair a step. */
enum { MOE_K(nr_parts) = MOE_NR / (MOE_NR_VECTORS * MOE_W) };
MOE_INLINE void MOE_K(ukernel_prefetch_share)(moe_ukernel_at_ *at, int64_t col) {
  const int64_t next = col + MOE_NR_VECTORS * MOE_W;
  const char *sums = next < MOE_NR ? (const char *)(at->c + next) : at->next;
  at->left = (at->fetches + col / (MOE_NR_VECTORS * MOE_W)) / MOE_K(nr_parts);
  MOE_UNROLL
  for (int i = 0; i < MOE_MR && MOE_K(nr_parts) > 1; i++) __builtin_prefetch(sums + i * MOE_NR_BYTES_, 0, 3);
}
MOE_INLINE void MOE_K(ukernel_prefetch_step)(moe_ukernel_at_ *at) {
  if (MOE_K(nr_parts) == 1) moe_ukernel_prefetch_(at, 8, MOE_KC_BYTES);
  else if (--at->left >= 0) moe_prefetch_next_(&at->fetch);
}

/* acc += the rows' elements, `pitch` bytes apart, times b. */
MOE_INLINE void MOE_K(ukernel_step)(int rows, const char *row, int64_t pitch, const MOE_V(f) * b,
                                    MOE_V(f) (*acc)[MOE_NR_VECTORS]) {
  MOE_UNROLL
  for (int i = 0; i < rows; i++) {
    const MOE_V(f) a = MOE_V(set1)(moe_load_scalar(row + i * pitch));
    MOE_UNROLL
    for (int j = 0; j < MOE_NR_VECTORS; j++) acc[i][j] = MOE_V(fma_onto)(a, b[j], acc[i][j]);
  }
}

/* The same for `pairs` pairs of k of the panel; `packed`: A is a panel as well. */
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

/* The last pairs of k of a micro-kernel as wide as a panel: some of its rows finish after the others, whose sums are
   stored meanwhile. All stores at once would fill the store buffer, and keep the next products out. */
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
  if (last) MOE_K(ukernel_finish)(row, panel, c, acc);
  else MOE_K(ukernel_end)(rows, c, acc);
}

MOE_FN void MOE_K(ukernel_f32)(const moe_ukernel_ *t) {
  for (moe_ukernel_at_ at = moe_ukernel_first_(t); at.rows > 0; moe_ukernel_next_(t, MOE_KC_BYTES, &at)) {
    moe_ukernel_prefetch_begin_(t, MOE_KC_BYTES, &at);
    for (int64_t j = 0; j < MOE_NR; j += MOE_NR_VECTORS * MOE_W) { /* part by part */
      MOE_K(ukernel_prefetch_share)(&at, j);
      switch (at.now) {
        case 1:
        case 2:
        case 3: MOE_K(ukernel_columns)(3, t, &at, at.row, j, at.c); break;
        case 4: MOE_K(ukernel_columns)(4, t, &at, at.row, j, at.c); break;
        case 5: MOE_K(ukernel_columns)(5, t, &at, at.row, j, at.c); break;
        default: MOE_K(ukernel_columns)(MOE_MR, t, &at, at.row, j, at.c); break;
      }
    }
  }
}
