/* The table of an instruction set's formats. With MOE_GEMM_DOT, codes are also decoded to panels of pairs. */

#define MOE_MAGNITUDE_(name, type, NAME)  [MOE_DTYPE_##NAME] = MOE_CAT(moe_magnitude_##name##_, MOE_VOCABULARY),
#define MOE_QUANTIZE_(name, type, NAME)   [MOE_DTYPE_##NAME] = MOE_CAT(moe_quantize_groups_##name##_, MOE_VOCABULARY),
#define MOE_DEQUANTIZE_(name, type, NAME) [MOE_DTYPE_##NAME] = MOE_CAT(moe_dequantize_groups_##name##_, MOE_VOCABULARY),

static const moe_quant_table_ MOE_K(quant_table) = {
    .load_codes = {MOE_V(load_codes_4), MOE_V(load_codes_8)},
    .store_codes = {MOE_V(store_codes_4), MOE_V(store_codes_8)},
    .magnitude = {MOE_DTYPE_LIST(MOE_MAGNITUDE_)},
    .quantize_groups = {MOE_DTYPE_LIST(MOE_QUANTIZE_)},
    .dequantize_groups = {MOE_DTYPE_LIST(MOE_DEQUANTIZE_)},
    .pack_codes_rows = {MOE_V(pack_codes_rows_4), MOE_V(pack_codes_rows_8)},
    .pack_codes_columns = {MOE_V(pack_codes_columns_4), MOE_V(pack_codes_columns_8)},
    .pack_words_row = {MOE_V(pack_words_row_4), MOE_V(pack_words_row_8)},
    .pack_scaled_rows = MOE_V(pack_scaled_rows),
    .pack_scaled_columns = MOE_V(pack_scaled_columns),
    .load_scales = MOE_V(load_scales),
    .scale_to_bf16 = MOE_V(scale_to_bf16),
    .round_panel = MOE_V(round_panel),
#if MOE_GEMM_DOT
    .pack_pairs_rows = {MOE_K(pack_pairs_rows_4), MOE_K(pack_pairs_rows_8)},
    .pack_pairs_columns = {MOE_K(pack_pairs_columns_4), MOE_K(pack_pairs_columns_8)},
    .small_m_code_rows_bf16 = {MOE_K(small_m_code_rows_4), MOE_K(small_m_code_rows_8)},
#endif
#if MOE_VECTORS
    .small_m_code_rows = {MOE_V(small_m_code_rows_4), MOE_V(small_m_code_rows_8)},
    .small_m_fp8 = MOE_V(small_m_fp8),
    .small_m_codes = {MOE_V(small_m_codes_4), MOE_V(small_m_codes_8)},
#endif
#if MOE_VECTORS
    .small_m_mx = {{[MOE_PRODUCT_F32] = MOE_V(small_m_mx),
                    [MOE_PRODUCT_BF16] = MOE_GEMM_DOT ? MOE_K(small_m_mx) : MOE_V(small_m_mx)},
#if MOE_BYTE_TABLES
                   {[MOE_PRODUCT_F32] = MOE_B(small_m_mx), [MOE_PRODUCT_BF16] = MOE_K(small_m_mx)},
#endif
    },
#endif
#if MOE_BYTE_TABLES
    .byte_table = MOE_B(byte_table),
    .pack_bytes_rows = {[MOE_PANEL_F32] = MOE_B(pack_rows_f32), [MOE_PANEL_PAIRS] = MOE_B(pack_rows_pairs)},
    .pack_bytes_columns = {[MOE_PANEL_F32] = MOE_B(pack_columns_f32), [MOE_PANEL_PAIRS] = MOE_B(pack_columns_pairs)},
    .small_m_bytes = {[MOE_PRODUCT_F32] = MOE_B(small_m_bytes), [MOE_PRODUCT_BF16] = MOE_K(small_m_bytes)},
    .small_m_bytes_columns = {[MOE_PRODUCT_F32] = MOE_B(small_m_bytes_columns),
                              [MOE_PRODUCT_BF16] = MOE_K(small_m_bytes_columns)},
#endif
};

#undef MOE_MAGNITUDE_
#undef MOE_QUANTIZE_
#undef MOE_DEQUANTIZE_
