/* The micro-kernel in portable C, for vectors of one element: a row at a time, its sums for all of a panel's columns
   side by side. Where fma is an instruction, compilers vectorise it, but on x86, where this is compiled quickly. */

enum { MOE_K(nr_parts) = 1 };

/* Two k of a row, from `row` on, times the panel's columns. */
MOE_INLINE void MOE_K(portable_pair)(const char *row, const float *panel, float *sum) {
  const float even = moe_load_scalar(row), odd = moe_load_scalar(row + 4);
  for (int j = 0; j < MOE_NR; j++)
    sum[j] = moe_fma_onto_scalar(even, panel[j], moe_fma_onto_scalar(odd, panel[MOE_NR + j], sum[j]));
}

/* The same as the bf16 dot product does it: where no sum becomes tiny, there is nothing to flush. */
MOE_INLINE void MOE_K(portable_pair_flush)(const char *row, const float *panel, float *sum) {
  const float even = moe_daz_scalar(moe_load_scalar(row)), odd = moe_daz_scalar(moe_load_scalar(row + 4));
  float next[MOE_NR];
  uint32_t tiny = 0;
  for (int j = 0; j < MOE_NR; j++) {
    const float first = moe_fma_onto_scalar(odd, moe_daz_scalar(panel[MOE_NR + j]), sum[j]);
    next[j] = moe_fma_onto_scalar(even, moe_daz_scalar(panel[j]), first);
    tiny |= moe_tiny_scalar(first) | moe_tiny_scalar(next[j]);
  }
  for (int j = 0; tiny && j < MOE_NR; j++)
    next[j] = moe_fma_flush_scalar(even, panel[j], moe_fma_flush_scalar(odd, panel[MOE_NR + j], sum[j]));
  memcpy(sum, next, sizeof next);
}

MOE_INLINE void MOE_K(ukernel_portable)(const moe_ukernel_ *t, int flush) {
  for (moe_ukernel_at_ at = moe_ukernel_first_(t); at.rows > 0; moe_ukernel_next_(t, MOE_KC_BYTES, &at)) {
    moe_ukernel_prefetch_begin_(t, MOE_KC_BYTES, &at);
    for (int64_t i = 0; i < at.now; i++) {
      const char *row = at.row + i * MOE_KC_BYTES;
      const float *panel = (const float *)t->panel;
      float *c = at.c + i * MOE_NR, sum[MOE_NR];
      for (int j = 0; j < MOE_NR; j++) sum[j] = !t->add ? 0.0f : flush ? moe_daz_scalar(c[j]) : c[j];
      for (int64_t p = (t->k + 1) / 2; p > 0; p--, row += 8, panel += 2 * MOE_NR) {
        if (i == 0) moe_ukernel_prefetch_(&at, 8, MOE_KC_BYTES);
        if (flush)
          MOE_K(portable_pair_flush)(row, panel, sum);
        else
          MOE_K(portable_pair)(row, panel, sum);
      }
      memcpy(c, sum, sizeof sum);
    }
  }
}

MOE_FN void MOE_K(ukernel_f32)(const moe_ukernel_ *t) { MOE_K(ukernel_portable)(t, 0); }
MOE_FN void MOE_K(ukernel_flush)(const moe_ukernel_ *t) { MOE_K(ukernel_portable)(t, 1); }
