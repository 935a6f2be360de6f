/* Closes an instruction set's region. */
#undef MOE_ISA
#undef MOE_VOCABULARY
#undef MOE_NR_VECTORS
#undef MOE_PACKED_A
#undef MOE_KC_BYTES
#undef MOE_KC_SHORT_ROWS
#undef MOE_SMALL_M_CODES
#undef MOE_SMALL_M_16BIT
#undef MOE_SMALL_M_F32
#undef MOE_PREFETCH_BYTES
#undef MOE_SMALL_M_ONE_DEEP
#undef MOE_MATH
#undef MOE_BF16_BY_MODE
