/* The kernels of formats that look bytes up in tables, and the table of formats that has them. With MOE_GEMM_DOT they
   multiply by dot products and make panels of pairs; those that are the same without it are compiled once. */

#if !MOE_GEMM_DOT
MOE_QUICK_WIDE_BEGIN
#include "quant/byte_table.inl"
MOE_QUICK_END
#endif

#if MOE_GEMM_DOT
#define MOE_DOT 1
#include "quant/small_m_e2m1.inl"
#undef MOE_DOT
#endif

#define MOE_BYTE_TABLES 1
#include "quant/table.inl"
#undef MOE_BYTE_TABLES
