/* The table of an instruction set's products. MOE_GEMM_DOT: bf16 products by dot products of pairs; the f32 kernels are
   the vocabulary's in any case. */

#define MOE_PACK_ROWS_(name, type, NAME) [MOE_DTYPE_##NAME] = MOE_CAT(moe_pack_rows_##name##_, MOE_VOCABULARY),
#define MOE_PLAIN_ROWS_(name, type, NAME) \
  [MOE_DTYPE_##NAME] = sizeof(type) < 4 ? MOE_VN(SMALL_M_16BIT) : MOE_VN(SMALL_M_F32),

#define MOE_COLUMNS_ROWS_(name, type, NAME) \
  [MOE_DTYPE_##NAME] = MOE_VECTORS ? MOE_W * MOE_SMALL_M_COLUMNS / 32 * (int)sizeof(type) : 0,

static const moe_gemm_table_ MOE_CAT(MOE_GEMM_TABLE, MOE_CAT(_, MOE_ISA)) = {
    .blocking = {.kc_bytes = {[MOE_PANEL_F32] = MOE_VN(KC_BYTES),
#if MOE_GEMM_DOT
                              [MOE_PANEL_PAIRS] = MOE_KC_BYTES
#endif
                 },
                 .kc_short_rows = {[MOE_PANEL_F32] = MOE_VN(KC_SHORT_ROWS),
#if MOE_GEMM_DOT
                                   [MOE_PANEL_PAIRS] = MOE_KC_SHORT_ROWS
#endif
                 },
                 .nr_parts = MOE_V(nr_parts),
                 .kc = {[MOE_PANEL_F32] = MOE_VN(KC_BYTES) / 4,
#if MOE_GEMM_DOT
                        [MOE_PANEL_PAIRS] = MOE_KC_BYTES / 2
#endif
                 },
                 .mc = MOE_MC,
                 .nc_panels = MOE_NC_PANELS_MAX,
                 .items_per_worker = MOE_ITEMS_PER_WORKER,
                 .prefetch_bytes = MOE_VN(PREFETCH_BYTES),
                 .small_m_plain_rows = {MOE_DTYPE_LIST(MOE_PLAIN_ROWS_)},
                 .small_m_bf16_rows = MOE_SMALL_M_BF16,
                 .small_m_codes_rows = MOE_VN(SMALL_M_CODES),
                 .small_m_columns_rows = {MOE_DTYPE_LIST(MOE_COLUMNS_ROWS_)}},
    .pack_rows = {[MOE_PANEL_F32] = {MOE_DTYPE_LIST(MOE_PACK_ROWS_)},
#if MOE_GEMM_DOT
                  [MOE_PANEL_PAIRS] = {[MOE_DTYPE_BF16] = MOE_K(pack_rows_pairs)}
#endif
    },
    .transpose_u16 = {[MOE_DTYPE_BF16] = MOE_W > 1 ? MOE_V(transpose_u16) : NULL,
                      [MOE_DTYPE_FP16] = MOE_W > 8 ? MOE_V(transpose_fp16) : NULL}, /* shorter vectors gain nothing */
#if !MOE_VECTORS
    .ukernel = {[MOE_PRODUCT_F32] = MOE_V(ukernel_f32), [MOE_PRODUCT_BF16] = MOE_V(ukernel_flush)},
#elif !MOE_GEMM_DOT
    .bf16_by_mode = 1,
    .ukernel = {[MOE_PRODUCT_F32] = MOE_V(ukernel_f32), [MOE_PRODUCT_BF16] = MOE_V(ukernel_f32)},
    .ukernel_pack_b = {[MOE_PANEL_F32] = MOE_V(ukernel_pack_b)},
    .small_m = MOE_V(small_m),
    .small_m_columns = {[MOE_PRODUCT_F32] = MOE_V(small_m_columns), [MOE_PRODUCT_BF16] = MOE_V(small_m_columns)},
#if MOE_PACKED_A
    .ukernel_packed_a = {[MOE_PANEL_F32] = MOE_V(ukernel_packed_a_f32)},
#endif
#else
    .panel = {[MOE_PRODUCT_BF16] = MOE_PANEL_PAIRS},
    .ukernel = {[MOE_PRODUCT_F32] = MOE_V(ukernel_f32), [MOE_PRODUCT_BF16] = MOE_K(ukernel_pairs)},
    .pair_panel = MOE_K(pair_panel),
    .ukernel_pack_b = {[MOE_PANEL_F32] = MOE_V(ukernel_pack_b), [MOE_PANEL_PAIRS] = MOE_K(ukernel_pack_b_bf16)},
    .ukernel_packed_a = {[MOE_PANEL_F32] = MOE_V(ukernel_packed_a_f32),
                         [MOE_PANEL_PAIRS] = MOE_K(ukernel_packed_a_bf16)},
    .small_m = MOE_V(small_m),
    .small_m_bf16 = MOE_K(small_m_bf16),
    .small_m_columns = {[MOE_PRODUCT_F32] = MOE_V(small_m_columns), [MOE_PRODUCT_BF16] = MOE_K(small_m_columns)},
#endif
};

#undef MOE_PACK_ROWS_
#undef MOE_PLAIN_ROWS_
#undef MOE_COLUMNS_ROWS_
