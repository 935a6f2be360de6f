/* Every kernel of one instruction set, and the tables that publish them. Wants
     MOE_ISA         the instruction set
     MOE_VOCABULARY  the file of moe/simd/ that its kernels are written in
     MOE_VECTORS     0: vectors have one element, and products are portable C
   and the instruction set's numbers in gemm/blocking.h. For each storage type MOE_FORMAT is set. */

#include "vec/math.inl"
#include "vec/row.inl"
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
#if MOE_VECTORS
#include "quant/groups_words.inl"
#endif

#define MOE_FORMAT f32
#include "gemm/format.inl"
#undef MOE_FORMAT

#define MOE_FORMAT bf16
#include "gemm/format.inl"
#undef MOE_FORMAT

#define MOE_FORMAT fp16
#include "gemm/format.inl"
#undef MOE_FORMAT

#if MOE_VECTORS
#include "gemm/ukernel_pack_b.inl"
#if MOE_SMALL_M_ONE_DEEP
#include "gemm/small_m_one.inl"
#else
#include "gemm/small_m_two.inl"
#endif
#include "gemm/small_m_rows.inl"
#endif
