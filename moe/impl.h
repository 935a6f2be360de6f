/* The spine: what the implementation consists of, in order. Data flows layer -> kernel -> isa -> base. */
#ifndef MOE_IMPL_H
#define MOE_IMPL_H

#include "api/begin.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "base/target.h"

MOE_EXACT_BEGIN

#include "base/size.h"
#include "base/error.h"
#include "base/fpenv.h"
MOE_QUICK_CALLS_BEGIN
#include "base/cpu.h"
#include "base/check.h"
#include "base/workspace.h"
#include "base/workers.h"
MOE_QUICK_END

#include "simd/names.h"
#include "vec/rows.h"
#include "vec/table.h"
#include "quant/element_format.h"
#include "gemm/prefetch.h"
#include "gemm/panel.h"
#include "gemm/blocking.h"
#include "gemm/ukernel.h"
#include "gemm/table.h"
#include "quant/table.h"
#include "router/table.h"
#include "kernels.h"
#include "quant/prefetch_codes.h"

/* --- one region per instruction set --- */

#if MOE_X86 /* where it only stands in for what a processor lacks */
MOE_QUICK_BEGIN
#endif
#include "simd/core_scalar.h"
#include "simd/quant_scalar.h"
#define MOE_ISA scalar
#define MOE_VOCABULARY scalar
#define MOE_VECTORS 0
#include "kernels.inl"
#include "kernels_wide.inl"
#include "kernels_end.inl"
#if MOE_X86
MOE_QUICK_END
#endif

#if MOE_X86

MOE_TARGET_BEGIN("avx2,fma,f16c")
#include "simd/core_avx2.h"
#include "simd/quant_avx2.h"
#define MOE_ISA avx2
#define MOE_VOCABULARY avx2
#define MOE_VECTORS 1
#include "kernels.inl"
MOE_QUICK_WIDE_BEGIN
#include "kernels_wide.inl"
MOE_QUICK_END
#include "kernels_end.inl"
MOE_TARGET_END

MOE_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#include "simd/core_avx512.h"
#include "simd/quant_avx512.h"
#define MOE_ISA avx512
#define MOE_VOCABULARY avx512
#define MOE_VECTORS 1
#include "kernels.inl"
MOE_QUICK_WIDE_BEGIN
#include "kernels_wide.inl"
MOE_QUICK_END
#include "kernels_end.inl"
MOE_TARGET_END

MOE_TARGET_BEGIN("avx512vbmi,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#include "simd/quant_avx512vbmi.h"
#define MOE_ISA avx512vbmi
#define MOE_VOCABULARY avx512
#define MOE_VECTORS 1
#define MOE_GEMM_DOT 0
#include "kernels_vbmi.inl"
#undef MOE_GEMM_DOT
#include "kernels_end.inl"
MOE_TARGET_END

MOE_TARGET_BEGIN("avx512bf16,avx512vbmi,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#include "simd/core_avx512bf16.h"
#define MOE_ISA avx512bf16
#define MOE_VOCABULARY avx512
#define MOE_VECTORS 1
#include "gemm/ukernel_bf16.inl"
#define MOE_GEMM_DOT 1
#include "kernels_vbmi.inl"
#undef MOE_GEMM_DOT
#include "kernels_end.inl"
MOE_TARGET_END

#endif

MOE_QUICK_CALLS_BEGIN

#include "dispatch.h"
#include "op.h"

MOE_QUICK_END
MOE_QUICK_BEGIN

#include "vec/store.h"
#include "gemm/operand.h"
#include "gemm/pack_a.h"
#include "gemm/pack_b.h"
#include "gemm/epilogue.h"
#include "gemm/gemm.h"
#include "gemm/lookahead.h"
#include "gemm/small_m.h"
#include "gemm/macro_kernel.h"

#include "router/select.h"
#include "router/score.h"
#include "router/linear.h"
#include "router/topk.h"
#include "router/topk_bwd.h"
#include "router/loss.h"
#include "quant/convert_dtypes.h"
#include "quant/stored_codes.h"
#include "quant/convert_elements.h"
#include "quant/mx_layout_map.h"
#include "quant/mx_layout_convert.h"
#include "quant/mx_group.h"
#include "quant/mx_quantize.h"
#include "quant/nki_vector.h"
#include "quant/scaled_quantize.h"
#include "quant/scales.h"
#include "quant/group_quantize.h"
#include "quant/mx_round.h"
#include "quant/mx_matrix.h"
#include "quant/quantized_weight.h"
#include "quant/weight_tile.h"
#include "quant/weight_b.h"

MOE_QUICK_END
MOE_QUICK_CALLS_BEGIN

#include "router/check.h"
#include "router/topk_op.h"
#include "router/loss_op.h"
#include "quant/rules.h"
#include "quant/convert_op.h"
#include "quant/mx_layout_op.h"
#include "quant/quantize_op.h"
#include "quant/mx_matrix_op.h"
#include "quant/quantized_op.h"
#include "router/blocks.h"
#include "router/routing.h"
#include "router/expert_parallel.h"
#include "layer/activation.h"
#include "layer/group.h"
#include "layer/tuned.h"
#include "layer/pack_weights.h"
#include "layer/plan.h"
#include "layer/blockwise.h"
#include "layer/weights.h"
#include "layer/checkpoint.h"
#include "layer/combine.h"
#include "layer/small_grads.h"
#include "layer/expert_stage.h"
#include "layer/gate_up.h"
#include "layer/weight_grad.h"
#include "layer/down_grad.h"
#include "layer/blockwise_fwd.h"
#include "layer/blockwise_bwd.h"
#include "layer/face_names.h"
#include "layer/moe_layer.h"
#include "layer/grouped_mlp.h"
#include "layer/grouped_gemm.h"
#include "layer/tune.h"
#include "layer/matmul.h"
#include "layer/mlp_check.h"
#include "layer/mlp.h"

MOE_QUICK_END

MOE_EXACT_END

#include "api/end.h"

#endif
