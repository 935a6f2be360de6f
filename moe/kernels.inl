/* Every kernel of one instruction set, and the tables that publish them. Wants
     MOE_ISA         the instruction set
     MOE_VOCABULARY  the file of moe/simd/ that its kernels are written in
     MOE_VECTORS     0: vectors have one element, and products are portable C
     MOE_MATH        how exp and its kin are compiled: inlined into loops of vectors, or called
   and the instruction set's numbers in gemm/blocking.h. For each storage format MOE_FORMAT is set; MOE_FORMAT_UPPER: an
   element is the upper 16 bits of its float. */

#include "vec/math.inl"
#include "vec/activation.inl"
#include "vec/glu.inl"
#include "vec/row.inl"
#include "router/score.inl"
#if MOE_VECTORS
#include "gemm/ukernel_f32.inl"
#include "gemm/small_m.inl"
#else
#include "gemm/ukernel_portable.inl"
#endif
#if MOE_PACKED_A
#include "gemm/ukernel_packed_a.inl"
#endif
#include "quant/elements.inl"
#include "quant/groups_u16.inl"

#define MOE_FORMAT       f32
#define MOE_FORMAT_TYPE  float
#define MOE_FORMAT_UPPER 0
#include "gemm/format.inl"
#include "quant/groups.inl"
#undef MOE_FORMAT
#undef MOE_FORMAT_TYPE
#undef MOE_FORMAT_UPPER

#define MOE_FORMAT       bf16
#define MOE_FORMAT_TYPE  moe_bf16
#define MOE_FORMAT_UPPER 1
#include "gemm/format.inl"
#if MOE_VECTORS
#include "quant/groups.inl"
#else
#include "quant/groups_by_float.inl"
#endif
#undef MOE_FORMAT
#undef MOE_FORMAT_TYPE
#undef MOE_FORMAT_UPPER

#define MOE_FORMAT       fp16
#define MOE_FORMAT_TYPE  moe_fp16
#define MOE_FORMAT_UPPER 0
#include "gemm/format.inl"
#include "quant/groups_by_float.inl"
#undef MOE_FORMAT
#undef MOE_FORMAT_TYPE
#undef MOE_FORMAT_UPPER

#if MOE_VECTORS
#include "gemm/ukernel_pack_b.inl"
#endif

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

#if MOE_VECTORS
#if MOE_SMALL_M_ONE_DEEP
#include "gemm/small_m_one.inl"
#else
#include "gemm/small_m_two.inl"
#endif
#include "gemm/small_m_rows.inl"
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

#include "vec/table.inl"
#define MOE_GEMM_DOT   0
#define MOE_GEMM_TABLE moe_gemm_table
#include "gemm/table.inl"
#undef MOE_GEMM_TABLE
#include "quant/table.inl"
#undef MOE_GEMM_DOT
