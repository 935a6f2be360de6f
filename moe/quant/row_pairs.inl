/* Rows of codes as pairs of bf16, for small_m_code_rows.inl. */

/* The pairs of k of all rows of A. */
MOE_FN void MOE_K(row_pairs_of)(const moe_small_m_ *s, int64_t row, moe_row_scales_ *t) {
  MOE_K(strip_rows)(MOE_V(small_m_deep), s, row, t->pairs);
}

/* From the scales of rows to those of pairs. */
MOE_FN void MOE_K(row_pair_scales)(moe_row_scales_ *t) {
  for (int q = 0; q < MOE_V(small_m_deep); q += 2) {
    const MOE_V(f) even = MOE_V(load)(t->scale[q]), odd = MOE_V(load)(t->scale[q + 1]);
    MOE_V(storei)(t->scale[q / 2], MOE_V(sub2x16)(MOE_K(join_uppers)(even, odd), MOE_V(set1i)(0x3f803f80u)));
  }
}
