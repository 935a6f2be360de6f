/* Every kernel of one instruction set, and the table that publishes them. Wants MOE_ISA, MOE_VOCABULARY,
   MOE_TILE_ACROSS (1: the tile is as wide as a panel, and multiplies panels by panels), MOE_PIECE_BYTES,
   MOE_ROWS_SHORT, MOE_AHEAD_BYTES, MOE_MATH, MOE_ROWS_HALVES and MOE_ROWS_FLOATS (rows at most that plain weights
   stream past) and MOE_BF16_BY_MODE. Where that is 1 vectors are of more than one element, and there are
   MOE_TILE_VECTORS, MOE_ROWS_CODES (the same of codes) and MOE_STREAM_TALL (rows of columns side by side of one row; 0:
   two, of a few rows as well). MOE_FORMAT_UPPER: an element is the upper half of its float. What loses speed when it is
   compiled quickly is not (measured: the rows, the tiles, packing, bf16's halves and streams), and what gains by it is
   scheduled (the tiles, bf16's halves). */

#include "math.inl"
MOE_QUICK_WIDE_BEGIN
#include "activation.inl"
#include "glu.inl"
MOE_QUICK_END
#include "row.inl"
MOE_SCHEDULED_BEGIN
#if MOE_BF16_BY_MODE
#include "tile.inl"
#else
#include "portable_tile.inl"
#endif
#if MOE_TILE_ACROSS
#include "across_tile.inl"
#endif
#include "codes.inl"
#include "halves.inl"
MOE_SCHEDULED_END

#define MOE_FORMAT f32
#define MOE_FORMAT_TYPE float
#define MOE_FORMAT_UPPER 0
#include "format.inl"
MOE_QUICK_WIDE_BEGIN
#include "groups.inl"
MOE_QUICK_END
#undef MOE_FORMAT
#undef MOE_FORMAT_TYPE
#undef MOE_FORMAT_UPPER

#define MOE_FORMAT bf16
#define MOE_FORMAT_TYPE moe_bf16
#define MOE_FORMAT_UPPER 1
#include "format.inl"
MOE_QUICK_WIDE_BEGIN
#if MOE_BF16_BY_MODE
#include "groups.inl"
#else
#include "groups_by_float.inl"
#endif
MOE_QUICK_END
#undef MOE_FORMAT
#undef MOE_FORMAT_TYPE
#undef MOE_FORMAT_UPPER

#define MOE_FORMAT fp16
#define MOE_FORMAT_TYPE moe_fp16
#define MOE_FORMAT_UPPER 0
MOE_QUICK_WIDE_BEGIN
#include "format.inl"
#include "groups_by_float.inl"
MOE_QUICK_END
#undef MOE_FORMAT
#undef MOE_FORMAT_TYPE
#undef MOE_FORMAT_UPPER

#if MOE_BF16_BY_MODE
MOE_SCHEDULED_BEGIN
#include "pack_tile.inl"
#include "prepare_tile.inl"
MOE_SCHEDULED_END
#endif

MOE_QUICK_WIDE_BEGIN
#include "words.inl"

#define MOE_CODES_BITS 4
#define MOE_SCALED MOE_K(scaled_e2m1)
#define MOE_PLAIN MOE_K(plain_e2m1)
#include "pack_codes.inl"
#undef MOE_CODES_BITS
#undef MOE_SCALED
#undef MOE_PLAIN

#define MOE_CODES_BITS 8
#define MOE_SCALED MOE_K(scaled_fp8)
#define MOE_PLAIN MOE_K(plain_fp8)
#include "pack_codes.inl"
#undef MOE_CODES_BITS
#undef MOE_SCALED
#undef MOE_PLAIN

#if MOE_BF16_BY_MODE
MOE_QUICK_END
#if MOE_STREAM_TALL
#include "stream_one.inl"
#else
#include "stream_pair.inl"
#endif
#include "stream.inl"
MOE_QUICK_WIDE_BEGIN
#define MOE_COLUMN_PAIRS 0
#include "stream_columns.inl"
#undef MOE_COLUMN_PAIRS
#define MOE_CODES_BITS 4
#include "stream_codes.inl"
#undef MOE_CODES_BITS
#define MOE_CODES_BITS 8
#include "stream_codes.inl"
#undef MOE_CODES_BITS
#endif

MOE_FN void MOE_K(fill_table)(moe_kernels *t) {
  t->piece_bytes[MOE_PANEL_F32] = MOE_PIECE_BYTES;
  t->rows_short[MOE_PANEL_F32] = MOE_ROWS_SHORT;
  t->tile_parts = MOE_K(tile_parts);
  t->ahead_bytes = MOE_AHEAD_BYTES;
  t->panel[MOE_PRODUCT_F32] = t->panel[MOE_PRODUCT_BF16] = MOE_PANEL_F32;
  t->tile[MOE_PRODUCT_F32] = MOE_K(tile_f32);
#if MOE_BF16_BY_MODE
  t->tile[MOE_PRODUCT_BF16] = MOE_K(tile_f32);
#else
  t->tile[MOE_PRODUCT_BF16] = MOE_K(tile_flush);
#endif
#if MOE_TILE_ACROSS
  t->across_tile[MOE_PANEL_F32] = MOE_K(across_tile_f32);
#endif
  t->bf16_by_mode = MOE_BF16_BY_MODE;
#define MOE_FORMAT_KERNELS_(name, type, NAME)                                              \
  t->plain_rows[MOE_DTYPE_##NAME] = sizeof(type) < 4 ? MOE_ROWS_HALVES : MOE_ROWS_FLOATS;  \
  t->load_rows[MOE_DTYPE_##NAME] = MOE_CAT(moe_load_rows_##name##_, MOE_ISA);              \
  t->store_rows[MOE_DTYPE_##NAME] = MOE_CAT(moe_store_rows_##name##_, MOE_ISA);            \
  t->magnitude[MOE_DTYPE_##NAME] = MOE_CAT(moe_magnitude_##name##_, MOE_ISA);              \
  t->quantize_groups[MOE_DTYPE_##NAME] = MOE_CAT(moe_quantize_groups_##name##_, MOE_ISA);  \
  t->dequantize_groups[MOE_DTYPE_##NAME] = MOE_CAT(moe_dequantize_groups_##name##_, MOE_ISA); \
  t->pack_rows[MOE_PANEL_F32][MOE_DTYPE_##NAME] = MOE_CAT(moe_pack_rows_##name##_, MOE_ISA);
  MOE_DTYPE_LIST(MOE_FORMAT_KERNELS_)
#undef MOE_FORMAT_KERNELS_
#if MOE_BF16_BY_MODE
  t->stream = MOE_K(stream);
  t->stream_fp8 = MOE_K(stream_fp8);
  t->codes_rows = MOE_ROWS_CODES;
  t->columns_rows = MOE_W * MOE_ROWS_FEW_COLUMNS / 16;
  t->stream_columns[MOE_PRODUCT_F32] = t->stream_columns[MOE_PRODUCT_BF16] = MOE_K(stream_columns);
  t->pack_tile[MOE_PANEL_F32] = MOE_K(pack_tile);
  t->gather_tile[MOE_PANEL_F32] = MOE_K(gather_tile);
#if MOE_TILE_ACROSS
  t->turn_tile[MOE_PANEL_F32] = MOE_K(turn_tile);
#endif
#endif
#define MOE_CODES_KERNELS_(i, bits)                                                   \
  t->load_codes[i] = MOE_CAT(moe_load_codes_##bits##_, MOE_ISA);                      \
  t->store_codes[i] = MOE_CAT(moe_store_codes_##bits##_, MOE_ISA);                    \
  t->pack_words_row[i] = MOE_CAT(moe_pack_words_row_##bits##_, MOE_ISA);              \
  t->pack_codes_rows[i] = MOE_CAT(moe_pack_codes_rows_##bits##_, MOE_ISA);            \
  t->pack_codes_columns[i] = MOE_CAT(moe_pack_codes_columns_##bits##_, MOE_ISA);
#if MOE_BF16_BY_MODE
  t->stream_codes[0] = MOE_CAT(moe_stream_codes_4_, MOE_ISA);
  t->stream_codes[1] = MOE_CAT(moe_stream_codes_8_, MOE_ISA);
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
  t->copy_past = MOE_K(copy_past);
  t->transpose_tile = MOE_K(transpose_tile);
  t->turn_halves[MOE_DTYPE_BF16] = MOE_W > 1 ? MOE_K(turn_halves) : NULL;
  t->turn_halves[MOE_DTYPE_FP16] = MOE_W > 8 ? MOE_K(turn_fp16) : NULL; /* shorter vectors gain nothing (measured) */
  t->dot = MOE_K(dot);
  t->exp_row = MOE_K(exp_row);
  t->score_row = MOE_K(score_row);
}
MOE_QUICK_END
