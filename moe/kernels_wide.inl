/* The kernels of one instruction set that are all intrinsics and unrolled loops, compiled quickly (impl.h); and the
   tables. See kernels.inl. */

#include "vec/activation.inl"
#include "vec/glu.inl"
#include "router/score.inl"

#define MOE_FORMAT f32
#include "quant/groups.inl"
#include "quant/groups_back.inl"
#undef MOE_FORMAT

#define MOE_FORMAT bf16
#if MOE_VECTORS
#include "quant/groups.inl"
#include "quant/groups_back.inl"
#else
#include "quant/groups_by_float.inl"
#endif
#undef MOE_FORMAT

#define MOE_FORMAT fp16
#include "quant/groups_by_float.inl"
#undef MOE_FORMAT

#include "quant/round_panel.inl"
#include "quant/column_words.inl"

#define MOE_CODES_BITS 4
#define MOE_SCALED     MOE_K(scaled_e2m1)
#define MOE_PLAIN      MOE_K(plain_e2m1)
#include "quant/pack_codes.inl"
#undef MOE_CODES_BITS
#undef MOE_SCALED
#undef MOE_PLAIN

#define MOE_CODES_BITS 8
#define MOE_SCALED     MOE_K(scaled_fp8)
#define MOE_PLAIN      MOE_K(plain_fp8)
#include "quant/pack_codes.inl"
#undef MOE_CODES_BITS
#undef MOE_SCALED
#undef MOE_PLAIN
#include "quant/scaled_codes.inl"

#if MOE_VECTORS
#define MOE_SMALL_M_PAIRS 0
#include "gemm/small_m_columns.inl"
#undef MOE_SMALL_M_PAIRS
#include "quant/row_scales.inl"
#define MOE_DOT        0
#define MOE_CODES_BITS 4
#include "quant/small_m_codes.inl"
#include "quant/small_m_code_rows.inl"
#undef MOE_CODES_BITS
#define MOE_CODES_BITS 8
#include "quant/small_m_codes.inl"
#include "quant/small_m_code_rows.inl"
#undef MOE_CODES_BITS
#undef MOE_DOT
#endif

#define MOE_GEMM_DOT    0
#define MOE_BYTE_TABLES 0
#if MOE_VECTORS
#include "quant/small_m_mx.inl"
#endif
#include "vec/table.inl"
#define MOE_GEMM_TABLE moe_gemm_table
#include "gemm/table.inl"
#undef MOE_GEMM_TABLE
#include "quant/table.inl"
#undef MOE_BYTE_TABLES
#undef MOE_GEMM_DOT
