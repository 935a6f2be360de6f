/* The kernels of formats that look bytes up in tables, and the table of formats that has them. With MOE_GEMM_DOT they
   multiply by dot products and make panels of pairs; those that are the same without it are compiled once. */

#define MOE_BYTE_TABLES 1
MOE_QUICK_WIDE_BEGIN
#if !MOE_GEMM_DOT
#include "quant/byte_table.inl"
#endif
#include "quant/small_m_bytes.inl"
#include "quant/small_m_mx.inl"
MOE_QUICK_END

#include "quant/table.inl"
#undef MOE_BYTE_TABLES
