/* Closes an instruction set's region. */
#undef MOE_ISA
#undef MOE_VOCABULARY
#undef MOE_TILE_VECTORS
#undef MOE_TILE_ACROSS
#undef MOE_PIECE_BYTES
#undef MOE_ROWS_SHORT
#undef MOE_ROWS_CODES
#undef MOE_ROWS_HALVES
#undef MOE_ROWS_FLOATS
#undef MOE_AHEAD_BYTES
#undef MOE_STREAM_TALL
#undef MOE_MATH
#undef MOE_BF16_BY_MODE
