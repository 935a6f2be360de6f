/* Tables of the values of codes. */

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
