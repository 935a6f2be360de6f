/* The micro-kernel that packs B: MOE_MR rows times columns where they lie, which become the panel for the rows that
   follow. Stores and conversions overlap with the products. One for all formats, whose loads it chooses inside: one for
   each would take long to compile. */

/* The next k; what is packed next is prefetched. */
MOE_INLINE void MOE_K(pack_b_load)(moe_dtype dtype, const char *const src[2], int64_t offset, int64_t prefetch,
                                   MOE_V(f) * b) {
  switch (dtype) {
#define MOE_PACK_B_LOAD_(name, type, NAME) \
  case MOE_DTYPE_##NAME: MOE_CAT(moe_pack_b_load_##name##_, MOE_ISA)(src, offset, prefetch, b); break;
    default: MOE_DTYPE_LIST(MOE_PACK_B_LOAD_)
#undef MOE_PACK_B_LOAD_
  }
}

MOE_FN void MOE_K(ukernel_pack_b)(const moe_ukernel_ *t) {
  moe_ukernel_at_ at = moe_ukernel_first_(t);
  moe_ukernel_prefetch_begin_(t, MOE_KC_BYTES, &at);
  for (int64_t col = 0; col < MOE_NR; col += MOE_NR_VECTORS * MOE_W) { /* columns [col, col + MOE_NR_VECTORS * MOE_W) */
    MOE_V(f) acc[MOE_MR][MOE_NR_VECTORS], b[MOE_NR_VECTORS];
    const int64_t half = MOE_NR / 2, stride = t->stride, prefetch = t->prefetch;
    float *panel = (float *)t->packed + col;
    const char *src[2] = {t->base[col / half] + col % half * moe_dtype_bytes_(t->dtype), t->base[1]};
    const char *row = t->row;
    float *c = t->c + col;
    const moe_dtype dtype = t->dtype;
    MOE_K(ukernel_prefetch_share)(&at, col);
    MOE_OPAQUE_POINTER(c);
    MOE_K(ukernel_begin)(MOE_MR, c, t->add, acc);
    for (int64_t p = t->k / 2; p > 0; p--, row += 8, panel += 2 * MOE_NR) {
      MOE_K(ukernel_prefetch_step)(&at);
      MOE_OPAQUE_POINTER(row);
      MOE_UNROLL
      for (int odd = 1; odd >= 0; odd--) {
        MOE_K(pack_b_load)(dtype, src, odd * stride, prefetch, b);
        MOE_UNROLL
        for (int j = 0; j < MOE_NR_VECTORS; j++) MOE_V(store)(panel + odd * MOE_NR + j * MOE_W, b[j]);
        MOE_K(ukernel_step)(MOE_MR, row + odd * 4, MOE_KC_BYTES, b, acc);
      }
      src[0] += 2 * stride;
      src[1] += 2 * stride;
    }
    MOE_K(ukernel_end)(MOE_MR, c, acc);
  }
  moe_ukernel_store_(t, &at);
}
