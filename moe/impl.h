/* The spine: what the implementation consists of, in order. Data flows layer -> kernel -> isa -> base. */
#ifndef MOE_IMPL_H
#define MOE_IMPL_H

#pragma push_macro("I") /* see moe.h */
#undef I

#include <math.h>
#include <stdatomic.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "base/target.h"

MOE_EXACT_BEGIN

#include "base/cpu.h"
#include "base/size.h"
#include "base/error.h"
#include "base/check.h"
#include "base/fpenv.h"
#include "base/workspace.h"
#include "base/ahead.h"
#include "base/context.h"

#include "kernel/names.h"
#include "kernel/rows.h"
#include "kernel/tile.h"
#include "kernel/table.h"
#include "kernel/walk.h"

/* --- one region per instruction set --- */

#if MOE_X86 /* where it only stands in for what a processor lacks */
MOE_QUICK_BEGIN
#endif
#include "isa/scalar.h"
#define MOE_ISA scalar
#define MOE_VOCABULARY scalar
#define MOE_TILE_ACROSS 0
#define MOE_PIECE_BYTES 512
#define MOE_ROWS_SHORT 0
#define MOE_ROWS_HALVES 0
#define MOE_ROWS_FLOATS 0
#define MOE_AHEAD_BYTES (32 << 10)
#define MOE_MATH MOE_FN
#define MOE_BF16_BY_MODE 0
#include "kernel/all.inl"
#include "kernel/end.inl"
#if MOE_X86
MOE_QUICK_END
#endif

#if MOE_X86

MOE_TARGET_BEGIN("avx2,fma,f16c")
#include "isa/avx2.h"
#define MOE_ISA avx2
#define MOE_VOCABULARY avx2
#define MOE_TILE_VECTORS 2
#define MOE_TILE_ACROSS 0
#define MOE_PIECE_BYTES 1024
#define MOE_ROWS_SHORT 96
#define MOE_ROWS_CODES 16
#define MOE_ROWS_HALVES 10
#define MOE_ROWS_FLOATS 15
#define MOE_AHEAD_BYTES (32 << 10)
#define MOE_STREAM_TALL 8
#define MOE_MATH MOE_INLINE
#define MOE_BF16_BY_MODE 1
#include "kernel/all.inl"
#include "kernel/end.inl"
MOE_TARGET_END

MOE_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#include "isa/avx512.h"
#define MOE_ISA avx512
#define MOE_VOCABULARY avx512
#define MOE_TILE_VECTORS 4
#define MOE_TILE_ACROSS 1
#define MOE_PIECE_BYTES 512
#define MOE_ROWS_SHORT 0
#define MOE_ROWS_CODES 32
#define MOE_ROWS_HALVES 20
#define MOE_ROWS_FLOATS 20
#define MOE_AHEAD_BYTES (128 << 10)
#define MOE_STREAM_TALL 0
#define MOE_MATH MOE_INLINE
#define MOE_BF16_BY_MODE 1
#include "kernel/all.inl"
#include "kernel/end.inl"
MOE_TARGET_END

MOE_TARGET_BEGIN("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#include "isa/avx512bf16.h"
#define MOE_ISA avx512bf16
#define MOE_VOCABULARY avx512
#define MOE_PIECE_BYTES 1024
#define MOE_ROWS_SHORT 48
#include "kernel/pairs.inl"
#include "kernel/end.inl"
MOE_TARGET_END

#endif

#include "kernel/dispatch.h"

MOE_QUICK_BEGIN

#include "kernel/operands.h"
#include "kernel/piece.h"
#include "kernel/product.h"

#include "layer/leave.h"
#include "layer/router_select.h"
#include "layer/router_score.h"
#include "layer/router_linear.h"
#include "layer/router.h"
#include "layer/router_bwd.h"
#include "layer/route_blocks.h"
#include "layer/convert.h"
#include "layer/element.h"
#include "layer/router_loss.h"
#include "layer/activation.h"
MOE_ONCE_BEGIN
#include "layer/group.h"
#include "layer/expert_stage.h"
MOE_ONCE_END
#include "layer/mx_layout_map.h"
#include "layer/mx_layout.h"
#include "layer/nki_vector.h"
#include "layer/mx_quantize.h"
#include "layer/scaled_quantize.h"
#include "layer/mx_round.h"
#include "layer/quantized.h"
#include "layer/quantized_activation.h"
#include "layer/quantized_pack.h"
#include "layer/pack_weights.h"
#include "layer/plan.h"
#include "layer/blockwise.h"
MOE_ONCE_BEGIN
#include "layer/weights.h"
MOE_ONCE_END
#include "layer/checkpoint.h"
#include "layer/combine.h"
MOE_ONCE_BEGIN
#include "layer/gate_up.h"
#include "layer/weight_grad.h"
#include "layer/down_grad.h"
MOE_ONCE_END
#include "layer/small_grads.h"
#include "layer/blockwise_fwd.h"
#include "layer/blockwise_bwd.h"
#include "layer/grouped_gemm.h"

MOE_QUICK_END

MOE_EXACT_END

#pragma pop_macro("I")

#endif
