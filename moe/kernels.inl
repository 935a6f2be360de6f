/* Every kernel of one instruction set, and the table that publishes them. Wants MOE_ISA, MOE_VOCABULARY,
   MOE_PACKED_A (1: the tile is as wide as a panel, and multiplies panels by panels), MOE_KC_BYTES,
   MOE_KC_SHORT_ROWS, MOE_PREFETCH_BYTES, MOE_MATH, MOE_SMALL_M_16BIT and MOE_SMALL_M_F32 (rows at most that plain weights
   stream past) and MOE_BF16_BY_MODE. Where that is 1 vectors are of more than one element, and there are
   MOE_NR_VECTORS, MOE_SMALL_M_CODES (the same of codes) and MOE_SMALL_M_ONE_DEEP (rows of columns side by side of one row; 0:
   two, of a few rows as well). MOE_FORMAT_UPPER: an element is the upper half of its float. What loses speed when it is
   compiled quickly is not (measured: the rows, the tiles, packing, bf16's halves and streams), and what gains by it is
   scheduled (the tiles, bf16's halves). */

#include "vec/math.inl"
MOE_QUICK_WIDE_BEGIN
#include "vec/activation.inl"
#include "vec/glu.inl"
MOE_QUICK_END
#include "vec/row.inl"
MOE_SCHEDULED_BEGIN
#if MOE_BF16_BY_MODE
#include "gemm/ukernel_f32.inl"
#else
#include "gemm/ukernel_portable.inl"
#endif
#if MOE_PACKED_A
#include "gemm/ukernel_packed_a.inl"
#endif
#include "quant/codes.inl"
#include "quant/groups_u16.inl"
MOE_SCHEDULED_END

#define MOE_FORMAT f32
#define MOE_FORMAT_TYPE float
#define MOE_FORMAT_UPPER 0
#include "gemm/format.inl"
MOE_QUICK_WIDE_BEGIN
#include "quant/groups.inl"
MOE_QUICK_END
#undef MOE_FORMAT
#undef MOE_FORMAT_TYPE
#undef MOE_FORMAT_UPPER

#define MOE_FORMAT bf16
#define MOE_FORMAT_TYPE moe_bf16
#define MOE_FORMAT_UPPER 1
#include "gemm/format.inl"
MOE_QUICK_WIDE_BEGIN
#if MOE_BF16_BY_MODE
#include "quant/groups.inl"
#else
#include "quant/groups_by_float.inl"
#endif
MOE_QUICK_END
#undef MOE_FORMAT
#undef MOE_FORMAT_TYPE
#undef MOE_FORMAT_UPPER

#define MOE_FORMAT fp16
#define MOE_FORMAT_TYPE moe_fp16
#define MOE_FORMAT_UPPER 0
MOE_QUICK_WIDE_BEGIN
#include "gemm/format.inl"
#include "quant/groups_by_float.inl"
MOE_QUICK_END
#undef MOE_FORMAT
#undef MOE_FORMAT_TYPE
#undef MOE_FORMAT_UPPER

#if MOE_BF16_BY_MODE
MOE_SCHEDULED_BEGIN
#include "gemm/ukernel_pack_b.inl"
#include "gemm/ukernel_overlap.inl"
MOE_SCHEDULED_END
#endif

MOE_QUICK_WIDE_BEGIN
#include "quant/words.inl"

#define MOE_CODES_BITS 4
#define MOE_SCALED MOE_K(scaled_e2m1)
#define MOE_PLAIN MOE_K(plain_e2m1)
#include "quant/pack_codes.inl"
#undef MOE_CODES_BITS
#undef MOE_SCALED
#undef MOE_PLAIN

#define MOE_CODES_BITS 8
#define MOE_SCALED MOE_K(scaled_fp8)
#define MOE_PLAIN MOE_K(plain_fp8)
#include "quant/pack_codes.inl"
#undef MOE_CODES_BITS
#undef MOE_SCALED
#undef MOE_PLAIN

#if MOE_BF16_BY_MODE
MOE_QUICK_END
#if MOE_SMALL_M_ONE_DEEP
#include "gemm/small_m_one.inl"
#else
#include "gemm/small_m_two.inl"
#endif
#include "gemm/small_m_rows.inl"
MOE_QUICK_WIDE_BEGIN
#define MOE_SMALL_M_PAIRS 0
#include "gemm/small_m_columns.inl"
#undef MOE_SMALL_M_PAIRS
#define MOE_CODES_BITS 4
#include "quant/small_m_codes.inl"
#undef MOE_CODES_BITS
#define MOE_CODES_BITS 8
#include "quant/small_m_codes.inl"
#undef MOE_CODES_BITS
#endif

MOE_FN void MOE_K(fill_table)(moe_kernels *t) {
  t->kc_bytes[MOE_PANEL_F32] = MOE_KC_BYTES;
  t->kc_short_rows[MOE_PANEL_F32] = MOE_KC_SHORT_ROWS;
  t->nr_parts = MOE_K(nr_parts);
  t->prefetch_bytes = MOE_PREFETCH_BYTES;
  t->panel[MOE_PRODUCT_F32] = t->panel[MOE_PRODUCT_BF16] = MOE_PANEL_F32;
  t->ukernel[MOE_PRODUCT_F32] = MOE_K(ukernel_f32);
#if MOE_BF16_BY_MODE
  t->ukernel[MOE_PRODUCT_BF16] = MOE_K(ukernel_f32);
#else
  t->ukernel[MOE_PRODUCT_BF16] = MOE_K(ukernel_flush);
#endif
#if MOE_PACKED_A
  t->ukernel_packed_a[MOE_PANEL_F32] = MOE_K(ukernel_packed_a_f32);
#endif
  t->bf16_by_mode = MOE_BF16_BY_MODE;
#define MOE_FORMAT_KERNELS_(name, type, NAME)                                              \
  t->small_m_plain_rows[MOE_DTYPE_##NAME] = sizeof(type) < 4 ? MOE_SMALL_M_16BIT : MOE_SMALL_M_F32;  \
  t->load_rows[MOE_DTYPE_##NAME] = MOE_CAT(moe_load_rows_##name##_, MOE_ISA);              \
  t->store_rows[MOE_DTYPE_##NAME] = MOE_CAT(moe_store_rows_##name##_, MOE_ISA);            \
  t->magnitude[MOE_DTYPE_##NAME] = MOE_CAT(moe_magnitude_##name##_, MOE_ISA);              \
  t->quantize_groups[MOE_DTYPE_##NAME] = MOE_CAT(moe_quantize_groups_##name##_, MOE_ISA);  \
  t->dequantize_groups[MOE_DTYPE_##NAME] = MOE_CAT(moe_dequantize_groups_##name##_, MOE_ISA); \
  t->pack_rows[MOE_PANEL_F32][MOE_DTYPE_##NAME] = MOE_CAT(moe_pack_rows_##name##_, MOE_ISA);
  MOE_DTYPE_LIST(MOE_FORMAT_KERNELS_)
#undef MOE_FORMAT_KERNELS_
#if MOE_BF16_BY_MODE
  t->small_m = MOE_K(small_m);
  t->small_m_fp8 = MOE_K(small_m_fp8);
  t->small_m_codes_rows = MOE_SMALL_M_CODES;
  t->small_m_columns_rows = MOE_W * MOE_SMALL_M_COLUMNS / 16;
  t->small_m_columns[MOE_PRODUCT_F32] = t->small_m_columns[MOE_PRODUCT_BF16] = MOE_K(small_m_columns);
  t->ukernel_pack_b[MOE_PANEL_F32] = MOE_K(ukernel_pack_b);
  t->ukernel_pack_a[MOE_PANEL_F32] = MOE_K(ukernel_pack_a);
#if MOE_PACKED_A
  t->ukernel_transpose[MOE_PANEL_F32] = MOE_K(ukernel_transpose);
#endif
#endif
#define MOE_CODES_KERNELS_(i, bits)                                                   \
  t->load_codes[i] = MOE_CAT(moe_load_codes_##bits##_, MOE_ISA);                      \
  t->store_codes[i] = MOE_CAT(moe_store_codes_##bits##_, MOE_ISA);                    \
  t->pack_words_row[i] = MOE_CAT(moe_pack_words_row_##bits##_, MOE_ISA);              \
  t->pack_codes_rows[i] = MOE_CAT(moe_pack_codes_rows_##bits##_, MOE_ISA);            \
  t->pack_codes_columns[i] = MOE_CAT(moe_pack_codes_columns_##bits##_, MOE_ISA);
#if MOE_BF16_BY_MODE
  t->small_m_codes[0] = MOE_CAT(moe_small_m_codes_4_, MOE_ISA);
  t->small_m_codes[1] = MOE_CAT(moe_small_m_codes_8_, MOE_ISA);
#endif
  MOE_CODES_KERNELS_(0, 4)
  MOE_CODES_KERNELS_(1, 8)
#undef MOE_CODES_KERNELS_
  t->glu_forward = MOE_K(glu_forward);
  t->glu_backward = MOE_K(glu_backward);
  t->activate = MOE_K(activate);
  t->add_scaled = MOE_K(add_scaled);
  t->add_rows = MOE_K(add_rows);
  t->scale_row = MOE_K(scale_row);
  t->multiply_row = MOE_K(multiply_row);
  t->scale_to_bf16 = MOE_K(scale_to_bf16);
  t->copy_nt = MOE_K(copy_nt);
  t->transpose_tile = MOE_K(transpose_tile);
  t->transpose_u16[MOE_DTYPE_BF16] = MOE_W > 1 ? MOE_K(transpose_u16) : NULL;
  t->transpose_u16[MOE_DTYPE_FP16] = MOE_W > 8 ? MOE_K(transpose_fp16) : NULL; /* shorter vectors gain nothing (measured) */
  t->dot = MOE_K(dot);
  t->exp_row = MOE_K(exp_row);
  t->score_row = MOE_K(score_row);
}
MOE_QUICK_END
