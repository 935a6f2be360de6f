/* Closes an instruction set's region. */
#undef MOE_ISA
#undef MOE_VOCABULARY
#undef MOE_VECTORS
