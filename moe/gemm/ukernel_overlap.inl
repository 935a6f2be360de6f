/* Tiles that prepare what is multiplied next, beside their products: loads, conversions and stores hide behind those.
   One for all formats, like pack_tile.inl. */

/* Of the next rows, as many elements become floats, side by side, as there are k beside the first of a tile's
   columns. */
MOE_INLINE void MOE_K(pack_a_elements)(moe_dtype dtype, char *to, const char *from, const char *behind, int64_t k) {
  switch (dtype) {
#define MOE_PACK_A_ELEMENTS_(name, type, NAME) \
  case MOE_DTYPE_##NAME: MOE_CAT(moe_pack_a_elements_##name##_, MOE_ISA)(to, from, behind, k); break;
    default: MOE_DTYPE_LIST(MOE_PACK_A_ELEMENTS_)
#undef MOE_PACK_A_ELEMENTS_
  }
}

/* A column's elements, one by one: they take neither the units that multiply nor their registers. */
MOE_INLINE void MOE_K(transpose_elements)(int size, char *to, const char *from) {
  MOE_UNROLL
  for (int e = 0; e < MOE_TRANSPOSE_DEEP_; e++) memcpy(to + e * MOE_NR_BYTES_, from + e * size, (size_t)size);
}

/* turns: columns beside every pair; or else a row is gathered beside every other: all at once would hold the products
   up. */
MOE_INLINE void MOE_K(overlapped_columns)(const moe_ukernel_ *t, moe_ukernel_at_ *at, int transposes) {
  MOE_V(f) acc[MOE_MR][MOE_NR_VECTORS];
  const char *row = at->row, *later[2 * MOE_MR];
  const float *panel = (const float *)t->panel;
  const moe_dtype dtype = t->dtype;
  char *to = t->a_packed + (t->rows - at->rows) * MOE_KC_BYTES;
  moe_transposing_ transposing;
  if (transposes)
    transposing = moe_transposing_begin_(t, at);
  else
    moe_ukernel_later_(t, at, later);
  MOE_K(ukernel_begin)(MOE_MR, at->c, t->add, acc);
  for (int64_t k = 0; k < t->k; k += MOE_OVERLAP_K_) {
    for (int64_t p = 0; p < MOE_OVERLAP_K_ / 2; p++, row += 8, panel += 2 * MOE_NR) {
      const int64_t i = p / 2;
      MOE_K(ukernel_prefetch_step)(at);
      if (transposes) {
        if (transposing.size == 2)
          MOE_K(transpose_elements)(2, transposing.to, transposing.from);
        else
          MOE_K(transpose_elements)(4, transposing.to, transposing.from);
        transposing.from += transposing.stride;
        transposing.to += transposing.step;
      } else if (p % 2 == 0 && i < MOE_MR) {
        MOE_K(pack_a_elements)(dtype, to + i * MOE_KC_BYTES, later[i], later[MOE_MR + i], k);
      }
      MOE_OPAQUE_POINTER(row);
      MOE_K(ukernel_pairs)(MOE_MR, 0, 1, row, panel, acc);
    }
    if (transposes) moe_transposing_move_(&transposing);
  }
  MOE_K(ukernel_end)(MOE_MR, at->c, acc);
}

MOE_FN void MOE_K(ukernel_pack_a)(const moe_ukernel_ *t) {
  for (moe_ukernel_at_ at = moe_ukernel_first_(t); at.rows > 0; moe_ukernel_next_(t, MOE_KC_BYTES, &at)) {
    moe_ukernel_prefetch_begin_(t, MOE_KC_BYTES, &at);
    MOE_K(ukernel_prefetch_share)(&at, 0);
    MOE_K(overlapped_columns)(t, &at, 0);
    if (MOE_K(nr_parts) > 1) MOE_K(ukernel_in_parts)(t, &at, MOE_NR_VECTORS * MOE_W);
  }
}

#if MOE_PACKED_A
MOE_FN void MOE_K(ukernel_transpose)(const moe_ukernel_ *t) {
  for (moe_ukernel_at_ at = moe_ukernel_first_(t); at.rows > 0; moe_ukernel_next_(t, MOE_KC_BYTES, &at)) {
    moe_ukernel_prefetch_begin_(t, MOE_KC_BYTES, &at);
    MOE_K(overlapped_columns)(t, &at, 1);
  }
}
#endif
