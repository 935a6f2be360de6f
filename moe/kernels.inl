/* Every kernel of one instruction set, and the table that publishes them. Wants MOE_ISA, MOE_VOCABULARY,
   MOE_PACKED_A (1: the tile is as wide as a panel, and multiplies panels by panels), MOE_KC_BYTES,
   MOE_KC_SHORT_ROWS, MOE_PREFETCH_BYTES, MOE_MATH, MOE_SMALL_M_16BIT and MOE_SMALL_M_F32 (rows at most that plain weights
   stream past) and MOE_VECTORS. Where that is 1 vectors are of more than one element, and there are
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
#if MOE_VECTORS
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
#if MOE_VECTORS
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

#if MOE_VECTORS
MOE_SCHEDULED_BEGIN
#include "gemm/ukernel_pack_b.inl"
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

#if MOE_VECTORS
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

MOE_QUICK_END

#include "vec/table.inl"
#define MOE_GEMM_DOT 0
#define MOE_GEMM_TABLE moe_gemm_table
#include "gemm/table.inl"
#undef MOE_GEMM_TABLE
#include "quant/table.inl"
#undef MOE_GEMM_DOT
