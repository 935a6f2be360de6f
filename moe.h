/* moe.h: the Mixture-of-Experts layer for the CPU, in C. MIT licence, see the end of this file or LICENSE.

   WHAT IT IS
     The layer of a Mixture-of-Experts model: choose each token's experts, run them forward, and compute the exact
     gradients of all of it. Tensors are float, bfloat16 or IEEE half; weights may also be fp8, MXFP8, MXFP6, MXFP4,
     MXINT8, NVFP4, int8 or int4, as they are stored. It needs the C library and libm, starts no threads and allocates
     no memory that you do not give it.
     Whatever the instruction set, the number of threads and the compiler, the bits of a result are the same.

   HOW TO COMPILE
     One C file defines MOE_IMPLEMENTATION before it includes moe.h; it is compiled as C11 by gcc or clang. All others
     just include moe.h: it is C99 and C++11 to them. No -m flags are needed: the CPU is asked at run time, and the
     fastest kernels that it can run are used. Link with -lm.
     MOE_STATIC keeps everything static in one file, MOE_SHARED exports it from a shared library, MOE_API is whatever
     you want before each prototype: see moe/api/types.h.
     Macros of <windows.h> and <complex.h> do no harm to moe.h. <complex.h> makes I a macro: a file that names a field
     .I as well must #undef I, and write _Complex_I. gcc for Windows must compile the implementation without -flto;
     where that matters, the assembler says so.

   AN EXAMPLE (cc -O2 -I<this directory> example.c -lm)
     #define MOE_IMPLEMENTATION
     #include "moe.h"
     #include <stdio.h>
     #include <stdlib.h>

     // Tokens, hidden size, intermediate size, experts, experts per token.
     enum { T = 4, H = 64, I = 96, E = 8, K = 2 };
     static float x[T][H], scorer[H][E], gate_up[E][H][2][I], down[E][I][H], y[T][H];  // input, weights, output
     static float logits[T][E], weights[T][K];
     static int32_t chosen[T][K];

     static void *take(void *user, size_t bytes) { return (void)user, malloc(bytes); }
     static void give(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }

     int main(void) {
       moe_context ctx = {.allocate = take, .release = give};
       moe_router_topk_args router = {.router_weight = scorer, .router_logits = logits[0], .expert_index = chosen[0],
           .expert_weights = weights[0]};
       moe_layer layer = {.T = T, .H = H, .I = I, .E = E, .K = K, .x = x, .router = &router, .gate_up = gate_up,
           .down = down};
       int failed = moe_layer_forward_f32(&ctx, &layer, y, NULL);
       puts(failed ? ctx.message : "y is the layer of x");
       return failed;
     }
     The backward, moe_layer_backward_f32, takes the same layer, the gradient of y, and where gradients go.

   WHERE TO LOOK
     moe/api/types.h      status codes, element types, MOE_API
     moe/api/context.h    the context of a call: threads, allocator, error; instruction sets
     moe/api/router.h     the router, its backward, auxiliary losses, sorting tokens into blocks
     moe/api/routing.h    a routing from each of its forms to the others; experts on several ranks
     moe/api/layer.h      activations, limits, affinities, rounded operands
     moe/api/moe_layer.h  the layer of a router, or of its top-k, forward and backward; shared experts
     moe/api/blockwise.h  the layer over blocks of rows, likewise
     moe/api/grouped.h    grouped GEMM and its gradients
     moe/api/grouped_mlp.h  two grouped products with the gated unit between them, and their gradients
     moe/api/tune.h       blocking by measurement
     moe/api/mlp.h        the dense MLP of MXFP8 operands, and its product
     moe/api/quantize.h   conversions, narrow elements, quantising and back, tensors as they are stored
     moe/api/layouts.h    how MX weights are stored
     moe/api/pack.h       weights packed once

   CONVENTIONS
     Tensors are dense and row-major; [a,b] is a rows of b elements. A `void *` tensor has the element type of the
     function's suffix (f32: float, bf16: moe_bf16, fp16: moe_fp16), unless a field named *_dtype says otherwise.
     A *_dtype that is zero, MOE_DTYPE_DEFAULT, means float for affinities and their gradients, and in functions without
     a suffix; for all other tensors it means the function's suffix.
     A pointer must be aligned to its element, and may be NULL only where a comment says (optional) or so.
     A field of a struct may be zero: that is its default, unless it is a size or a pointer that is not optional.
     A tensor has one name in the forward and in the backward. X_grad is the gradient of X, packed_X or quantized_X is
     read in place of X, X_bytes is the size of the buffer X, and X_T is stored transposed.
     T, H, I and E are tokens, hidden size, intermediate size and experts; K is experts per token, N blocks, B rows of a
     block. Grouped GEMM has Unsloth's names, in which N is outputs and K the axis that products contract; K is that
     axis in layouts of MX weights as well. In one struct a letter has one meaning.
     A size is at least 1, and ids are 32-bit numbers. But T, num_tokens, S and N, tokens and blocks, may be 0, as may be
     rows and columns that are converted: tensors without elements may then be NULL. Without tokens losses are 0, and
     gradients of weights and biases are 0 or, accumulated, stay what they are.
     An enum's MOE_*_COUNT_ is none of its values, but how many there are.
     The names of the layer's tensors and options are those of AWS's nki-library, moe_cte and blockwise_mm_bwd.

   NUMERIC CONTRACT: the same bits from every instruction set, thread count, compiler and optimisation level
     1. Products. c = sum over k of a[k]*b[k] is one chain of fused multiply-adds in binary32, which begins with +0 and
        takes two k at a time, the odd one first: c = fma(a[1],b[1],c); c = fma(a[0],b[0],c); c = fma(a[3],b[3],c); and
        so on. An odd length is continued with one pair of zeros. In _bf16 functions the experts' products take
        subnormal operands as zero and flush subnormal results to zero, as VDPBF16PS does: whether a result is subnormal
        is judged after rounding. Nothing else is flushed; the router's products never are.
     2. All else is IEEE binary32, rounded to nearest even, with gradual underflow, in the order that the prototypes'
        comments give; nothing is contracted or reassociated. The caller's rounding and flush modes are saved and
        restored.
     3. Operands of products are tensors as they are stored (for quantised weights: see moe_quantized_weight) and
        intermediate results: m, dg, du and a*m. In _bf16 functions these are rounded to bf16, in _f32 and _fp16
        functions they stay binary32.
     4. Sums. A token's output and input gradient are sums over its experts, in block order, in binary32. What is there
        already is added last, where a result is accumulated. The sum is rounded once, when it is stored. Weight
        gradients contract, and bias gradients sum, an expert's rows in block order; bias gradients sum dg and du before
        these are rounded. Sums of terms over tokens, which are bias gradients and losses, are compensated: s = sum + y
        where y = term, from the 65th term on term + low; lost = y - (s - sum), or 0 if s is not finite; low = lost,
        in the first 64 low + lost. So up to 64 terms they are plain sums, and of more, however many, within 2^-22 of
        the sum of magnitudes. The dot product of two rows in an affinity gradient takes 64 columns at a time, in order:
        16 interleaved chains that begin with +0, added pairwise (chains 8 apart, then 4, 2, 1); <dY,b_d> is added after
        <dm0,m>. With PRE_SCALE the operands of the gate-and-up weight gradient are a*dg and a*du, rounded once. With
        accumulation_dtype sums over blocks are rounded after each of them: see moe_blockwise_mm_bwd_args.
     5. Conversions round to nearest even, keep subnormals and overflow to infinity. A NaN that is stored is always the
        same: f32 0x7fc00000, bf16 0x7fc0, fp16 0x7e00, e4m3fn 0x7f, e4m3 0x7c, e5m2 0x7e, e4m3fnuz and e5m2fnuz 0x80;
        e2m1, e2m3, e3m2 and integers have none and store code 0. How narrow elements round and overflow `cast` says:
        see MOE_CAST_SATURATE. Zeros keep their sign, but in fnuz elements.
     6. Activations. For every finite x with |x| <= 2^60 the error is at most MOE_ACT_ERROR * 2^-24 * |x| + 2^-140, that
        of derivatives at most MOE_ACT_GRAD_ERROR * 2^-24. relu and identity are exact, squared_relu is rounded once.
        exp is within 1 ulp, log and log(1+y) are within 2 ulp.

   ERROR CONTRACT
     A function that can fail returns a moe_status. On an error no output has been written, and ctx->message is one
     sentence, which begins with the name of the argument that is wrong. Nothing is printed, and no function aborts.
     Arguments, sizes, alignment, overlap and every id are checked before anything is written.

   THREADS AND MEMORY
     The library starts no threads: it uses those that ctx.parallel_for gives it, or OpenMP's if the implementation is
     compiled with -fopenmp, or one. Different threads may make calls at the same time, each with its own context.
     Of the stack a function, and each task given to parallel_for, takes at most 32 KiB. (Where the implementation is
     compiled without optimisation, 48 KiB with gcc, 96 KiB with clang, and moe_layer with a shared expert 4 KiB more.)
     A function with a workspace takes it from its arguments, or from ctx.allocate if they have none; the matching
     *_workspace_size function tells its size. With R = N*B rows, or max_rows (of moe_layer T*K, and 4*R bytes more),
     s = 2 bytes in _bf16 functions and 4 in others, and I rounded up to whole 64s, the layer's is at most the sum of
       forward        R*(I*s + 20) + N*B bytes; where N*B <= 256*E, of moe_layer where R <= 16*E, also
                      min(R, 16*E)*H*4; 3.6 MiB per thread
       backward       R*(2*I*s + I/16 + 20) + N*B bytes; of R*I*s a fifth, 64*R*s or 2 MiB per thread, whichever is
                      most, but not more than all of it; with PRE_SCALE R*(2*I*s + H/16); without
                      gate_up_activations_T its size; per thread the most of 3.6 MiB, 256*R + 0.5 MiB and 4*T + 0.5 MiB
       per thread     if that is less than the above, 8*(L + 256)*(R + T + 64) bytes and 128 KiB, with L the larger of H
                      and 2*I
       mx             T*H*s for x, with gate_up_in_scale R*H*s, in the backward only without gate_up_activations_T;
                      T*H*s for dY; 2*R*I*s for dg, du
       quantised      T*H*s for each of x and dY
       shared expert  the same again with R = T and its own I, but per thread; with a gate 20*T + 512*H bytes
       router         4*H*E bytes, E in whole 64s; in the backward 4*T*(K + E) more
     and a few KiB for each expert, block and chunk of 512 tokens or more.
     Results of at least MOE_NT_MIN_BYTES bytes, 32 MiB unless it is defined where the implementation is, are written by
     non-temporal stores: those of moe_*_from_f32, moe_*_to_f32, moe_quantize_* and moe_dequantize_*, and weight
     gradients that are not accumulated, if their rows are whole cache lines or AVX-512 is in use. So is, from a third
     of that size on, what the backward keeps for its own products, if its rows are whole cache lines. */
#ifndef MOE_H
#define MOE_H

#define MOE_VERSION_MAJOR 0
#define MOE_VERSION_MINOR 1
#define MOE_VERSION_PATCH 0

#include "moe/api/types.h"
#include "moe/api/context.h"
#include "moe/api/router.h"
#include "moe/api/routing.h"
#include "moe/api/layer.h"
#include "moe/api/blockwise.h"
#include "moe/api/moe_layer.h"
#include "moe/api/grouped.h"
#include "moe/api/grouped_mlp.h"
#include "moe/api/tune.h"
#include "moe/api/mlp.h"
#include "moe/api/quantize.h"
#include "moe/api/layouts.h"
#include "moe/api/pack.h"

#endif /* MOE_H */

#if defined(MOE_IMPLEMENTATION) && defined(__cplusplus)
#error "define MOE_IMPLEMENTATION in a C file of its own, say moe.c, and link it: moe.h is implemented in C11, not C++"
#elif defined(MOE_IMPLEMENTATION) && !defined(MOE_IMPLEMENTATION_DONE_)
#define MOE_IMPLEMENTATION_DONE_
#include "moe/impl.h"
#endif
