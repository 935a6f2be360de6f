/* moe.h: the Mixture-of-Experts layer for the CPU, in C. MIT licence, see the end of this file or LICENSE.

   WHAT IT IS
     Route tokens to experts, run the experts forward, run the exact backward, for float, bfloat16 and IEEE half
     tensors, from plain weights or from fp8, MXFP8 and MXFP4 ones as they are stored.
     One header, no dependencies but the C library and libm, no threads of its own, no allocation behind your back.

   HOW TO COMPILE
     In exactly one C file:       #define MOE_IMPLEMENTATION
                                  #include "moe.h"
     everywhere else:             #include "moe.h"          (declarations only, C99 and C++11)
     cc -O2 -I<this directory> trainer.c -lm                (the implementation wants C11; no -m flags: the CPU is
                                                             asked at run time and the fastest kernels are taken)
     MOE_STATIC, MOE_SHARED and MOE_API, in moe/api/types.h, say who sees the functions.
     The macros of <windows.h> do no harm. <complex.h> makes I a macro: a file that names a field .I as well must
     #undef I (and write _Complex_I). gcc for Windows must compile the implementation without -flto; where that
     matters, the assembler says so.

   TWENTY LINES (T tokens, H hidden, I intermediate, E experts, K experts per token, B rows per block)
     moe_context ctx = {.allocate = my_malloc, .release = my_free};  (or give each call its workspace)
     moe_router_topk_args router = {.T = T, .H = H, .E = E, .K = K, .hidden_states = x, .router_weight = wr,
                                    .router_logits = logits, .expert_index = index, .expert_weights = weights};
     moe_router_topk_bf16(&ctx, &router);
     moe_route_blocks_args route = {.T = T, .E = E, .K = K, .B = B, .N = moe_route_blocks_count(T, E, K, B),
                                    .expert_index = index, .expert_weights = weights,
                                    .expert_affinities_masked = affinities, .token_position_to_id = ids,
                                    .block_to_expert = experts, .conditions = conditions};
     moe_route_blocks(&ctx, &route);
     moe_blockwise_mm_fwd_args fwd = {.layer = {.T = T, .H = H, .I = I, .E = E, .N = route.N, .B = B,
         .hidden_states = x, .expert_affinities_masked = affinities,
         .gate_up_proj_weight = wgu, .down_proj_weight = wd, .token_position_to_id = ids, .block_to_expert = experts},
         .gate_up_activations_T = gu_checkpoint, .output = y};
     if (moe_blockwise_mm_fwd_bf16(&ctx, &fwd) != MOE_OK) puts(ctx.message);

   CONVENTIONS
     Tensors are dense and row-major. `void *` tensors hold the element type named by the function's suffix (f32: float,
     bf16: moe_bf16, fp16: moe_fp16) unless a *_dtype field beside them says otherwise. Every pointer must be aligned to
     its element. A zeroed struct field is the default; pointers marked (optional) may be NULL. An enum's MOE_*_COUNT_
     is none of its values, but how many there are. Tensor and option names are those of AWS nki-library's moe_cte and
     blockwise_mm_bwd.

   NUMERIC CONTRACT: the same bits from every instruction set, thread count, compiler and optimisation level
     1. Product sums. c = sum over k of a[k]*b[k] is one chain of fused multiply-adds in binary32 from +0, two k at a
        time, the odd one first: c = fma(a[1],b[1],c); c = fma(a[0],b[0],c); c = fma(a[3],b[3],c) ...; an odd length is
        padded with one zero pair element. In _bf16 functions the expert products additionally take subnormal operands
        as zero and flush subnormal results to zero (as VDPBF16PS does; tininess is judged after rounding). Nowhere else
        is a subnormal flushed. The router's products are never flushed.
     2. Everything else is IEEE binary32, round to nearest even, gradual underflow, nothing contracted or reassociated,
        in the order the prototypes' comments give. The caller's rounding and flush modes are saved and restored.
     3. Operands of products: tensors as stored (quantised weights: see moe_quantized_weight); intermediates (m, dg, du,
        a*m) are rounded to bf16 in _bf16 functions and kept in binary32 in _f32 and _fp16 functions.
     4. Sums: a token's output and input gradient add its experts' terms in block order, in binary32; a value to
        accumulate onto is added last; the sum is rounded once on storing. Weight gradients contract, and bias gradients
        sum, over an expert's rows in block order, bias gradients from the unrounded dg, du. The dot products of two
        rows in affinity gradients take 64 columns at a time, in order: 16 interleaved chains from +0, added pairwise
        (chains 8 apart, 4, 2, 1); <dY,b_d> is added after <dm0,m>. With PRE_SCALE the gate-and-up weight gradient's
        operand is a*dg, a*du, rounded once.
     5. Conversions round to nearest even, keep subnormals, overflow to infinity; every NaN stored is the canonical one
        (f32 0x7fc00000, bf16 0x7fc0, fp16 0x7e00; e4m3fn 0x7f, e4m3 0x7c, e5m2 0x7e; e2m1 has none and takes code 0).
        Narrow elements overflow as `cast` says: see MOE_ELEMENT_LIST. Zeros keep their sign.
     6. Activations: |computed - exact| <= MOE_ACT_ERROR * 2^-24 * |x| (plus 2^-140), derivatives MOE_ACT_GRAD_ERROR *
        2^-24, for every finite x with |x| <= 2^60; relu and identity are exact, squared_relu is one rounding. exp is
        within 1 ulp, log and log(1+y) within 2 ulp.

   ERROR CONTRACT
     Every function returns a moe_status. On an error no output has been written, and ctx->message holds one sentence
     that names the argument. Nothing prints, aborts or exits.

   THREADS AND MEMORY
     The library owns no threads: set ctx.parallel_for and ctx.num_threads, or compile with -fopenmp, or stay serial.
     Scratch memory is the caller's (moe_*_workspace_size tells how much) or comes from ctx.allocate. With R rows, N*B
     or max_rows, s = 2 bytes (bf16) or 4, and I in whole 64s, it is at most
       forward   R*(I*s + 20) + N*B bytes, with N*B <= 256*E also min(R, 16*E)*H*4, and 3.6 MiB per thread;
       backward  R*(2*I*s + I/16 + 20) + N*B, of R*I*s as much as is the most of a fifth, 64*R*s and 2 MiB per thread,
                 with PRE_SCALE R*(2*I*s + H/16) more, without the gate_up checkpoint its size more, and per thread the
                 largest of 3.6 MiB, 256*R + 0.5 MiB and 4*T + 0.5 MiB;
       per thread, if that is less, 8*(L + 256)*(R + T + 64) bytes and 128 KiB, with L the larger of H and 2*I;
       with mx   T*H*s for x (backward: only without the checkpoint), T*H*s for dY and 2*R*I*s for dg, du more;
       and T*H*s for each of x and dY that is quantised;
     and a few KiB for each expert, block and chunk of 512 tokens or more.
     What moe_*_from_f32, moe_*_to_f32, moe_quantize_* and moe_dequantize_* write is stored by non-temporal stores if it has
     MOE_NT_MIN_BYTES bytes or more: 32 MiB, unless it is defined otherwise where the implementation is. So are weight
     gradients where AVX-512 is in use and, if I is whole lines of 64 bytes, from a third as much on, what the backward
     keeps for its own products. */
#ifndef MOE_H
#define MOE_H

#define MOE_VERSION_MAJOR 0
#define MOE_VERSION_MINOR 1
#define MOE_VERSION_PATCH 0

#include "moe/api/types.h"
#include "moe/api/context.h"
#include "moe/api/router.h"
#include "moe/api/layer.h"
#include "moe/api/blockwise.h"
#include "moe/api/grouped.h"
#include "moe/api/quantize.h"
#include "moe/api/layouts.h"
#include "moe/api/pack.h"

#endif /* MOE_H */

#if defined(MOE_IMPLEMENTATION) && defined(__cplusplus)
#error "define MOE_IMPLEMENTATION in a C file of its own, say moe.c, and link that: moe.h is implemented in C11, not C++"
#elif defined(MOE_IMPLEMENTATION) && !defined(MOE_IMPLEMENTATION_DONE_)
#define MOE_IMPLEMENTATION_DONE_
#include "moe/impl.h"
#endif
