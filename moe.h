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

   TWENTY LINES (T tokens, H hidden, I intermediate, E experts, K experts per token, B rows per block)
     moe_context ctx = {.allocate = my_malloc, .release = my_free};  (or give each call its workspace)
     moe_router_topk_args router = {.T = T, .H = H, .E = E, .K = K, .hidden_states = x, .router_weight = wr,
                                    .router_logits = logits, .expert_index = index, .expert_weights = weights};
     moe_router_topk_bf16(&ctx, &router);
     moe_route_blocks_args route = {.T = T, .E = E, .K = K, .B = B, .N = moe_route_blocks_count(T, E, K, B),
                                    .expert_index = index, .expert_weights = weights, .affinity_dtype = MOE_DTYPE_F32,
                                    .expert_affinities_masked = affinities, .token_position_to_id = ids,
                                    .block_to_expert = experts, .conditions = conditions};
     moe_route_blocks(&ctx, &route);
     moe_blockwise_mm_fwd_args fwd = {.layer = {.T = T, .H = H, .I = I, .E = E, .N = route.N, .B = B,
         .hidden_states = x, .expert_affinities_masked = affinities, .affinity_dtype = MOE_DTYPE_F32,
         .gate_up_proj_weight = wgu, .down_proj_weight = wd, .token_position_to_id = ids, .block_to_expert = experts},
         .gate_up_activations_T = gu_checkpoint, .output = y};
     if (moe_blockwise_mm_fwd_bf16(&ctx, &fwd) != MOE_OK) puts(ctx.message);

   CONVENTIONS
     Tensors are dense and row-major. `void *` tensors hold the element type named by the function's suffix (f32: float,
     bf16: moe_bf16, fp16: moe_fp16) unless a *_dtype field beside them says otherwise. Every pointer must be aligned to
     its element. A zeroed struct field is the default; pointers marked (optional) may be NULL. Tensor and option names
     are those of AWS nki-library's moe_cte and blockwise_mm_bwd.

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
        (workers 8 apart, 4, 2, 1); <dY,b_d> is added after <dm0,m>. With PRE_SCALE the gate-and-up weight gradient's
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

#include <stddef.h>
#include <stdint.h>

/* <complex.h> makes I a macro; here it is the intermediate size. (Callers that use both undefine one of them.) */
#pragma push_macro("I")
#undef I

#define MOE_VERSION_MAJOR 0
#define MOE_VERSION_MINOR 1
#define MOE_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------ status and types */

/* One list makes the enum, the names and the tests. */
#define MOE_STATUS_LIST(X)                                                                     \
  X(OK, "no error")                                                                            \
  X(ERROR_NULL_ARGUMENT, "a required pointer is NULL")                                         \
  X(ERROR_INVALID_SHAPE, "a size is negative, zero where it may not be, or inconsistent")      \
  X(ERROR_INVALID_OPTION, "an enum, flag or number is outside its range")                      \
  X(ERROR_INVALID_INDEX, "a token or expert id is out of range")                               \
  X(ERROR_OVERFLOW, "a tensor of this shape cannot be addressed")                              \
  X(ERROR_MISALIGNED, "a pointer is not aligned to its element")                               \
  X(ERROR_OVERLAP, "an output overlaps another tensor")                                        \
  X(ERROR_WORKSPACE, "the workspace is missing or too small")                                  \
  X(ERROR_OUT_OF_MEMORY, "the context's allocator returned NULL")                              \
  X(ERROR_UNSUPPORTED, "this combination is not available")                                    \
  X(ERROR_DEVICE_LIMIT, "the spec's device limits, which the caller asked to check, are exceeded")

typedef enum moe_status {
#define MOE_STATUS_ENUM_(name, text) MOE_##name,
  MOE_STATUS_LIST(MOE_STATUS_ENUM_)
#undef MOE_STATUS_ENUM_
} moe_status;

/* The name of a status ("MOE_ERROR_OVERLAP") and what it means in general. Never NULL. */
const char *moe_status_str(moe_status status);
const char *moe_status_text(moe_status status);

typedef uint16_t moe_bf16; /* upper half of a binary32 */
typedef uint16_t moe_fp16; /* IEEE binary16 */

/* X(suffix, C storage type, ENUMERATOR): the element types of activations, weights and gradients. */
#define MOE_DTYPE_LIST(X)  \
  X(f32, float, F32)       \
  X(bf16, moe_bf16, BF16)  \
  X(fp16, moe_fp16, FP16)

typedef enum moe_dtype {
  MOE_DTYPE_DEFAULT = 0, /* the function's own suffix */
#define MOE_DTYPE_ENUM_(name, type, NAME) MOE_DTYPE_##NAME,
  MOE_DTYPE_LIST(MOE_DTYPE_ENUM_)
#undef MOE_DTYPE_ENUM_
} moe_dtype;

/* Bytes of one element; 0 for MOE_DTYPE_DEFAULT and anything unknown. */
size_t moe_dtype_size(moe_dtype dtype);

/* ---------------------------------------------------------------------------------------------- instruction sets */

/* X(suffix, ENUMERATOR), slowest first. */
#define MOE_ISA_LIST(X)      \
  X(scalar, SCALAR)          \
  X(avx2, AVX2)              \
  X(avx512, AVX512)          \
  X(avx512bf16, AVX512BF16)

typedef enum moe_isa {
#define MOE_ISA_ENUM_(name, NAME) MOE_ISA_##NAME,
  MOE_ISA_LIST(MOE_ISA_ENUM_)
#undef MOE_ISA_ENUM_
} moe_isa;

const char *moe_isa_name(moe_isa isa); /* "avx512bf16"; "unknown" for anything else */
int moe_isa_supported(moe_isa isa);    /* 1 when this CPU (and operating system) can run it */
moe_isa moe_isa_active(void);          /* what the next call will use */

/* Use `isa` or, where the CPU lacks it, the best one below it. Process-wide; not to be called while another thread is
   inside the library. MOE_ERROR_INVALID_OPTION for an unknown value. Results do not change, only speed and
   the workspace needed. Left alone, the library takes the best, but multiplies bf16 by f32 fused multiply-adds where
   these are the quicker way to the same bits (Intel's cores); moe_isa_limit(MOE_ISA_AVX512BF16) insists on the dot
   product. */
moe_status moe_isa_limit(moe_isa isa);

/* -------------------------------------------------------------------------------------------------------- context */

typedef void (*moe_task)(void *arg, int64_t index);

/* How work items are dealt to threads. Bits never depend on it. */
typedef enum moe_schedule {
  MOE_SCHEDULE_PING_PONG = 0, /* the next free thread takes the next item */
  MOE_SCHEDULE_HI_LO = 1,     /* each thread owns one contiguous range */
  MOE_SCHEDULE_SHUFFLED = 2   /* items in a pseudo-random order: to convince yourself that order does not matter */
} moe_schedule;

/* A zeroed context is valid: serial (OpenMP's threads under -fopenmp), no allocator. One context serves one call at a
   time. Every function also takes ctx == NULL, which is a zeroed context whose message is lost. */
typedef struct moe_context {
  /* Must run task(arg, i) once for every i in [0,count), in any order, on any threads, and return when all are done. A
     task that has begun must go on whatever others do: one may wait for it, though never for one that has not. */
  void (*parallel_for)(void *user, int64_t count, moe_task task, void *arg);
  void *parallel_for_user;
  int32_t num_threads; /* the most tasks the library hands to one parallel_for; 0 = 1, or omp_get_max_threads() */
  moe_schedule schedule;
  /* Used when an args struct has workspace == NULL. allocate may return NULL. Both or neither. */
  void *(*allocate)(void *user, size_t bytes);
  void (*release)(void *user, void *memory, size_t bytes);
  void *allocator_user;
  moe_status status; /* of the last call */
  char message[256]; /* one sentence; "" after success */
} moe_context;

/* ---------------------------------------------------------------------------------------------------- conversions */

/* dst[i] = src[i], n elements, contract 5. dst and src must not overlap.
   moe_<type>_from_f32 and moe_<type>_to_f32 for every element type. */
#define MOE_DECLARE_CONVERT_(name, type, NAME)                                               \
  moe_status moe_##name##_from_f32(moe_context *ctx, type *dst, const float *src, int64_t n); \
  moe_status moe_##name##_to_f32(moe_context *ctx, float *dst, const type *src, int64_t n);
MOE_DTYPE_LIST(MOE_DECLARE_CONVERT_)
#undef MOE_DECLARE_CONVERT_

/* X(suffix, ENUMERATOR, bits, fraction bits, exponent bias, code of the largest finite number, code of infinity, code
   stored for NaN; 0 = has none): narrow floating-point elements, sign first. A value with exponent field 0 is
   subnormal.
     e4m3fn  OCP: up to 448, no infinity, NaN is S.1111.111
     e4m3    as IEEE would have it: up to 240, exponent field 15 is infinity and NaN
     e5m2    OCP: up to 57344, exponent field 31 is infinity and NaN
     e2m1    OCP: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Two codes in a byte, the low half is the even element;
             the high half beside the last of an odd number is written as 0 and not read
   Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats Specification 1.0. */
#define MOE_ELEMENT_LIST(X)                             \
  X(e4m3fn, E4M3FN, 8, 3, 7, 0x7eu, 0u, 0x7fu)          \
  X(e4m3, E4M3, 8, 3, 7, 0x77u, 0x78u, 0x7cu)           \
  X(e5m2, E5M2, 8, 2, 15, 0x7bu, 0x7cu, 0x7eu)          \
  X(e2m1, E2M1, 4, 1, 1, 0x7u, 0u, 0u)

typedef enum moe_element {
#define MOE_ELEMENT_ENUM_(name, NAME, bits, fraction, bias, max, infinity, nan) MOE_ELEMENT_##NAME,
  MOE_ELEMENT_LIST(MOE_ELEMENT_ENUM_)
#undef MOE_ELEMENT_ENUM_
} moe_element;

/* How floats become elements; bits to be combined. 0: ties go to the even code, what rounds beyond the largest
   number becomes infinity or, where there is none, NaN; in e2m1, the largest number. */
enum {
  MOE_CAST_SATURATE = 1, /* too large numbers and infinities become the largest number */
  MOE_CAST_HALF_AWAY = 2 /* ties go away from zero */
};

/* dst[i] = src[i], n elements (of e2m1: ceil(n/2) bytes), contract 5. dst and src must not overlap.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, MISALIGNED, OVERLAP, OVERFLOW. */
#define MOE_DECLARE_ELEMENT_(name, NAME, bits, fraction, bias, max, infinity, nan)                                \
  moe_status moe_##name##_from_f32(moe_context *ctx, uint8_t *dst, const float *src, int64_t n, uint32_t cast);   \
  moe_status moe_##name##_to_f32(moe_context *ctx, float *dst, const uint8_t *src, int64_t n);
MOE_ELEMENT_LIST(MOE_DECLARE_ELEMENT_)
#undef MOE_DECLARE_ELEMENT_

/* The E8M0 scales of microscaled tensors: dst[i] = 2^(src[i]-127), NaN for 255; and back: the exponent of |src[i]|,
   rounded down, 0 for all below 2^-126, 255 for infinities and NaN. Errors as above. */
moe_status moe_e8m0_to_f32(moe_context *ctx, float *dst, const uint8_t *src, int64_t n);
moe_status moe_e8m0_from_f32(moe_context *ctx, uint8_t *dst, const float *src, int64_t n);

/* ------------------------------------------------------------------------------------------------- quantising to MX */

/* How a group's scale follows from amax, its largest finite magnitude. max = M*2^emax is the element's largest
   number, M in [1,2); exponents are exact. */
typedef enum moe_scale_rule {
  MOE_SCALE_OCP_FLOOR = 0, /* floor(log2 amax) - emax. The OCP specification, gpt-oss's format as ggml writes it */
  MOE_SCALE_NKI_ALT = 1,   /* one more for fp8, so that nothing saturates; e2m1 as OCP_FLOOR. Trainium's quantize_mx */
  MOE_SCALE_ROUND_UP = 2,  /* ceil(log2(amax/max)): the least without saturation. Triton's downcast_to_mxfp, NVIDIA */
  MOE_SCALE_CEIL = 3,      /* ceil(log2 amax) - emax. torchao */
  MOE_SCALE_EVEN = 4,      /* floor(log2 of amax rounded to the element's precision) - emax. torchao, AMD */
  MOE_SCALE_NEAREST = 5    /* log2(amax/max) rounded to nearest. MLX's first */
} moe_scale_rule;

/* A plain tensor [rows,columns] as element codes and one E8M0 scale byte per group of 32 along the columns; with
   transposed = 1 the codes are those of the transpose, grouped along the rows. A last group may be shorter.
     scale[r,g] = 127 + exponent by scale_rule, or 0 where that is negative; 0 for a group of zeros
     code[r,c]  = plain[r,c] / 2^(scale[r,c/32]-127), rounded once as `cast` says
   In fp8 infinity becomes infinity (in e4m3fn NaN) and NaN becomes NaN, whatever cast says. In e2m1, which has neither,
   such a group has scale 255 and codes 0. No workspace; about 36 KiB of stack.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, OVERFLOW, MISALIGNED, OVERLAP.
   Sources: OCP Microscaling Formats Specification 1.0, and beside the rules. */
typedef struct moe_quantize_mx_args {
  moe_element element;
  moe_scale_rule scale_rule;
  uint32_t cast;         /* MOE_CAST_* bits; most rules want MOE_CAST_SATURATE */
  moe_dtype dtype;       /* of plain; DEFAULT = F32 */
  int64_t rows, columns;
  int transposed;
  const void *plain;     /* [rows,columns] */
  uint8_t *codes;        /* [rows,columns], in e2m1 [rows,ceil(columns/2)]; transposed: rows, columns change places */
  uint8_t *scales;       /* [rows,ceil(columns/32)], likewise */
} moe_quantize_mx_args;
moe_status moe_quantize_mx(moe_context *ctx, const moe_quantize_mx_args *args);

/* plain = code * 2^(scale-127), exact in binary32 but for overflow to infinity, then rounded to dtype; scale 255
   gives NaN. Shapes and errors as above. */
typedef struct moe_dequantize_mx_args {
  moe_element element;
  moe_dtype dtype;
  int64_t rows, columns; /* of plain */
  int transposed;
  const uint8_t *codes, *scales;
  void *plain;
} moe_dequantize_mx_args;
moe_status moe_dequantize_mx(moe_context *ctx, const moe_dequantize_mx_args *args);

/* ------------------------------------------------------------------------------------ quantising to scaled elements */

/* A tensor [rows,columns] as element codes in the same order and binary32 scales, one per block of block_rows x
   block_columns (0 = all of them; a last block may be smaller): 0,0 is static, 1,0 per token, 0,1 per column, 128,128
   and 256,256 blocks.
     scale      = amax/max in binary32, amax the block's largest finite magnitude, at least 2^-126; 1 where amax is 0;
                  or as given
     code[r,c]  = plain[r,c] * (1/scale), each rounded to binary32, then rounded once as `cast` says
   Infinities and NaN as in moe_quantize_mx. No workspace; about 16 KiB of stack.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION (also a 4-bit element, or a given scale that is not finite and
   above 0), OVERFLOW, MISALIGNED, OVERLAP. */
typedef struct moe_quantize_scaled_args {
  moe_element element;   /* of 8 bits */
  uint32_t cast;         /* MOE_CAST_* bits */
  moe_dtype dtype;       /* of plain; DEFAULT = F32 */
  int64_t rows, columns, block_rows, block_columns;
  int scales_given;      /* 1: scales are an input */
  const void *plain;     /* [rows,columns] */
  uint8_t *codes;        /* [rows,columns] */
  float *scales;         /* [ceil(rows/block_rows),ceil(columns/block_columns)] */
} moe_quantize_scaled_args;
moe_status moe_quantize_scaled(moe_context *ctx, const moe_quantize_scaled_args *args);

/* plain = code*scale in binary32, rounded to dtype. Scales may be anything. Shapes and errors as above. */
typedef struct moe_dequantize_scaled_args {
  moe_element element;
  moe_dtype dtype;
  int64_t rows, columns, block_rows, block_columns;
  const uint8_t *codes;
  const float *scales;
  void *plain;
} moe_dequantize_scaled_args;
moe_status moe_dequantize_scaled(moe_context *ctx, const moe_dequantize_scaled_args *args);

/* -------------------------------------------------------------------------------------------- layouts of MX weights */

/* How a microscaled weight W is stored: codes of 4 bits (e2m1) or 8 (fp8), and one E8M0 scale byte per 32 of them along
   the contraction axis K. Converting moves bits and computes nothing: there and back gives the same bytes.
     E experts; parts = 2 for gate and up, 1 for down; columns per part (I, or H for down); K = H, or I for down.
     G = ceil(K/32), p_K = min(K,512)/4. A word holds 4 codes, worker 0 in its least significant bits: uint16_t of
     nibbles, uint32_t of fp8.
                      codes                                    scales
     PLAIN            [E,parts,columns,K], or [..,ceil(K/2)]   [E,parts,columns,G]
                      bytes of two nibbles, low = even element
     NKI_*_X4         gate and up: words [E,128,2,K/512,I]     [E,16,2,K/512,I]
                      down: words [E,p_K,ceil(K/512),H]        [E,ceil(p_K/8),ceil(K/512),H]
     NKI_WRAPX*, 1X32 words [E,K/4,parts*columns]              [E,G,parts*columns]
     GPT_OSS          [E,columns*parts,G,16] bytes; row 2j is  [E,columns*parts,G]
                      gate j, row 2j+1 up j; low = even
     GGML             [parts,E,columns,G] blocks of 17 bytes:  in the block
                      scale, then 16 bytes; low nibble = element j, high = element j+16
   A scale byte means 2^(byte-127) everywhere. (ggml doubles its table of codes and halves its scale: the same value.)

   Conversions keep positions along K: position n has scale n/32 in every layout. Which element of the weight is meant:
     all others       n
     NKI_STRIDED_X4   gate and up: q*(K/4) + t*128 + p, where n = 512t + 4p + q: worker q of word (p,t)
                      down, R = min(512, K-512t): 512t + q*(R/4) + p
     NKI_WRAPX_WHOLE  as down
     NKI_WRAPX        as down, but a last tile of 384 is a tile of 256 and one of 128
   So a PLAIN row made from NKI_STRIDED_X4 is a row of W permuted along K. To quantise for that layout, permute K by
   moe_nki_x4_permutation, then quantise. A weight quantised in plain groups becomes NKI_STRIDED_X4 without loss if the
   model's hidden units (or, for down, the columns of gate and up) are permuted likewise. With logical_order PLAIN's
   codes lie in logical order and its scales by position: element index[n] has scale n/32.
   NKI layouts that group different elements do not convert into each other (UNSUPPORTED).
   Padding becomes 0 and is not read: words and scales of a last x4 tile where K > 512, unused rows and columns of
   scales, the high nibble at the end of an odd row.
   Sources: nki-library's moe_cte MX kernels (X4) and matmul_mxfp8 (WRAPX: swizzle_tensor, with fast_dma_transpose for
   WHOLE; 1X32: swizzle_tensor_1x32); gpt-oss's torch/weights.py; ggml's block_mxfp4. */
typedef enum moe_mx_layout {
  MOE_MX_LAYOUT_PLAIN = 0,             /* OCP rows. Any K */
  MOE_MX_LAYOUT_NKI_STRIDED_X4 = 1,    /* K % 4 == 0; gate and up: K % 512 == 0 */
  MOE_MX_LAYOUT_NKI_CONTIGUOUS_X4 = 2, /* likewise; the bytes of STRIDED_X4, but a position is its element */
  MOE_MX_LAYOUT_NKI_WRAPX = 3,         /* K % 32 == 0 */
  MOE_MX_LAYOUT_NKI_WRAPX_WHOLE = 4,   /* K % 32 == 0 */
  MOE_MX_LAYOUT_NKI_1X32 = 5,          /* K % 32 == 0 */
  MOE_MX_LAYOUT_GPT_OSS = 6,           /* K % 32 == 0, 4 bits */
  MOE_MX_LAYOUT_GGML = 7               /* K % 32 == 0, 4 bits; scales are in codes, the scale pointer is not used */
} moe_mx_layout;

/* Where the scale bytes lie, if not as above. Scale rows s of an NKI layout are its second axis. */
typedef enum moe_mx_scales {
  MOE_MX_SCALES_OWN = 0,           /* as above ("compact") */
  MOE_MX_SCALES_NKI_OVERSIZED = 1, /* NKI: as many rows as the words have, row s at (s/4)*32 + s%4: four per quadrant */
  MOE_MX_SCALES_NKI_PACKED = 2,    /* WRAPX*, 1X32: [E,ceil(K/2048)*128,parts*columns]; s = 16t+r is at row
                                      (t/4)*128 + (t%4)*4 + (r/4)*32 + r%4. Source: get_scale_packing_info */
  MOE_MX_SCALES_TILED_128X4 = 3    /* PLAIN, GPT_OSS: per expert [ceil(rows/128),ceil(G/4)] tiles of 512 bytes, (row,g)
                                      of a tile at (row%32)*16 + (row%128/32)*4 + g%4. Source: cuBLAS, 1D block scaling
                                      factors layout; torchao's to_blocked */
} moe_mx_scales;

typedef struct moe_mx_layout_bytes {
  size_t codes_in, scales_in, codes_out, scales_out;
} moe_mx_layout_bytes;

typedef struct moe_mx_layout_args {
  moe_mx_layout from, to;             /* the same: a copy, or other scales */
  moe_mx_scales scales_from, scales_to;
  int32_t element_bits;               /* 4 or 8 */
  int32_t parts;                      /* 2: gate and up, 1: down, or anything without parts */
  int64_t E, K, columns;
  int logical_order;                  /* 1: see above; between PLAIN and an NKI layout only */
  const void *codes_in;               /* aligned to words in NKI layouts */
  const uint8_t *scales_in;           /* not used by GGML */
  void *codes_out;
  uint8_t *scales_out;
  moe_mx_layout_bytes bytes;          /* of the four buffers (optional, each): INVALID_SHAPE where that is too little */
} moe_mx_layout_args;

/* Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, OVERFLOW, MISALIGNED, OVERLAP, UNSUPPORTED. */
moe_status moe_mx_layout_convert(moe_context *ctx, const moe_mx_layout_args *args);

/* What the four buffers need (0 for GGML's scales). Pointers and args->bytes are not looked at. Errors: as above. */
moe_status moe_mx_layout_size(moe_context *ctx, const moe_mx_layout_args *args, moe_mx_layout_bytes *bytes);

/* index[n], n < K: the logical element at position n of `layout`, as above. Errors: NULL_ARGUMENT, INVALID_SHAPE,
   INVALID_OPTION, OVERFLOW, MISALIGNED. */
moe_status moe_nki_x4_permutation(moe_context *ctx, moe_mx_layout layout, int32_t parts, int64_t K, int64_t *index);

/* The vectors beside those weights, in the order of Trainium's kernels and back. */
typedef enum moe_nki_vector {
  MOE_NKI_GATE_UP_BIAS = 0, /* [E,2,I] <-> [E,min(I,512)/4,2,ceil(I/512),4]: (g, 512t + q*(R/4) + p) <-> (p,g,t,q) with
                               R = min(512, I-512t). I % 4 == 0; padding becomes 0. Source: nki-library, as X4 */
  MOE_NKI_DOWN_SCALE = 1    /* [E,1,H]: logical c*128 + p <-> stored p*(H/128) + c; H % 128 == 0. Per-row scales of
                               fp8 weights. Source: nki-library's moe_cte_torch.py, quantisation strategy 5 */
} moe_nki_vector;

typedef struct moe_nki_vector_args {
  moe_nki_vector kind;
  moe_dtype dtype;   /* of both; not DEFAULT. Bits are moved, NaNs too */
  int to_nki;        /* 1: `in` is logical, 0: `out` is */
  int64_t E, length; /* I, or H */
  const void *in;
  void *out;
} moe_nki_vector_args;

/* Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, OVERFLOW, MISALIGNED, OVERLAP. */
moe_status moe_nki_vector_convert(moe_context *ctx, const moe_nki_vector_args *args);
moe_status moe_nki_vector_size(moe_context *ctx, const moe_nki_vector_args *args, size_t *bytes_in, size_t *bytes_out);

/* ----------------------------------------------------------------------------------------------- quantised weights */

/* How the elements of a quantised weight are scaled. Shapes of `scales`: of gate and up; of down. In all but MX the
   codes lie as the plain weight does ([E,H,2,I]; [E,I,H]), elements have 8 bits and scales are float. */
typedef enum moe_weight_scaling {
  MOE_WEIGHT_MX = 0,                 /* E8M0 bytes, as layout and scales_layout say */
  MOE_WEIGHT_STATIC = 1,             /* [2]; [1] */
  MOE_WEIGHT_COLUMN = 2,             /* [2,I]; [H] */
  MOE_WEIGHT_BLOCK = 3,              /* [E,ceil(H/block),2,ceil(I/block),repeat];
                                        [E,ceil(I/block),ceil(H/block),repeat], of the last axis the first is read */
  MOE_WEIGHT_STATIC_PER_EXPERT = 4,  /* [E,2]; [E] */
  MOE_WEIGHT_COLUMN_PER_EXPERT = 5   /* [E,2,I]; [E,H], the "row" scales of nkilib (its stored order of down's:
                                        MOE_NKI_DOWN_SCALE) */
} moe_weight_scaling;

/* A weight as it is stored, in place of a plain one. What it stands for, w, is in the forward
     MX, BLOCK   code*scale in binary32 (MX exactly, but for overflow to infinity; a scale of 255 is NaN), in _bf16
                 functions rounded to bf16, which changes an MX weight only below 2^-126, where products take it as zero
     the others  code, and the product sum is multiplied by the scale: g = (x*Wg)*s
   In the backward w is code*scale, rounded likewise, in all of them. In every layout the contraction runs in logical
   order.
   Sources: semantics of nkilib's moe_cte quantisation strategies 1 to 6, moe_cte's MX kernels, gpt-oss. */
typedef struct moe_quantized_weight {
  moe_element element;
  moe_weight_scaling scaling;
  moe_mx_layout layout;        /* MX only, as the next */
  moe_mx_scales scales_layout;
  int64_t block, repeat;       /* BLOCK only; 0 = 256 and 1. nkilib repeats 128 times */
  const void *codes;           /* aligned to words in NKI layouts */
  const void *scales;          /* not used by GGML */
} moe_quantized_weight;

/* Activations, or gradients of them, [T,H], as they are stored, in place of plain ones. They stand for what
   moe_dequantize_mx or, with float_scales, moe_dequantize_scaled makes of them in the function's type, and are made
   plain once, in workspace, for several experts read them. */
typedef struct moe_quantized_activation {
  moe_element element;               /* under float_scales of 8 bits */
  int float_scales;                  /* 0: MX, groups of 32 along H */
  int64_t block_rows, block_columns; /* float_scales only; 0 = all: 0,0 is static, 1,0 per token, 1,128 blocks */
  const uint8_t *codes;              /* [T,H], of e2m1 [T,ceil(H/2)] */
  const void *scales;                /* uint8_t [T,ceil(H/32)], or float [ceil(T/block_rows),ceil(H/block_columns)],
                                        which must be finite */
} moe_quantized_activation;

/* --------------------------------------------------------------------------------------------------------- router */

typedef enum moe_score_function {
  MOE_SCORE_SOFTMAX = 0,
  MOE_SCORE_SIGMOID = 1,      /* 1/(1+exp(-z)) */
  MOE_SCORE_SQRT_SOFTPLUS = 2 /* sqrt(log(1+exp(z))), below z = -18 computed as exp(z/2), the same within 2^-26 of it */
} moe_score_function;

/* Which of the two comes first matters for softmax only: over the K selected logits, or over all E. */
typedef enum moe_score_order {
  MOE_SCORE_AFTER_TOPK = 0, /* top-k on the logits, then the score of the K values (nkilib router_pre_norm=False) */
  MOE_SCORE_BEFORE_TOPK = 1 /* score all E, then top-k */
} moe_score_order;

typedef struct moe_router_config {
  moe_score_function score_function;
  moe_score_order score_order;
  int renormalize;               /* 1: divide the K weights by (their sum + renormalize_epsilon) */
  float renormalize_epsilon;     /* 0 = none; Megatron uses 1e-20 */
  float routed_scaling_factor;   /* multiplies the K weights last; 0 = 1 */
  int32_t num_groups;            /* group-limited selection: E in num_groups equal groups, of which only */
  int32_t topk_groups;           /*   the best topk_groups stay; 0 and 0 = off */
} moe_router_config;

/* logits z[t,e] = sum_h x[t,h]*W[h,e] + b[e] in binary32, or as given. Scores s = score_function(z) as configured. The
   K experts with the largest selection value are taken in descending order; ties go to the lower id, NaN comes last.
   The selection value is z, which orders as s does; with a selection bias or groups it is s (+ selection_bias), where a
   softmax AFTER_TOPK has z for s. A group's value is the sum of its two largest selection values, or its only one.
   Weights w = s at the K experts, renormalised and scaled. Sums run in ascending expert id (all E) or selection order
   (K). Masked tokens get expert_index -1 and weight 0. Formulas: semantics of nkilib router_topk and Megatron
   topk_routing_with_score_function.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (K > E, K > selectable experts, E not divisible by num_groups), INVALID_OPTION,
   MISALIGNED, OVERLAP, OVERFLOW, WORKSPACE. */
typedef struct moe_router_topk_args {
  int64_t T, H, E, K;
  const void *hidden_states;     /* [T,H]; NULL = router_logits is the input (H is then ignored) */
  const void *router_weight;     /* [H,E], with hidden_states */
  const void *router_bias;       /* [E] (optional), with hidden_states */
  float *router_logits;          /* [T,E] output, or the input when hidden_states is NULL */
  const float *selection_bias;   /* [E] (optional), added for selection only (e_score_correction_bias) */
  const uint8_t *token_mask;     /* [T] (optional), 0 = padding token */
  moe_router_config config;
  int32_t *expert_index;         /* [T,K] output */
  float *expert_weights;         /* [T,K] output */
  void *workspace;               /* (optional with an allocator) */
  size_t workspace_bytes;
} moe_router_topk_args;

/* Gradient of moe_router_topk with the selection held fixed. dw comes either as weights_grad [T,K] or gathered from
   expert_affinities_masked_grad [T,E], which is not read beside weights_grad. Slots with expert_index -1 are absent
   from every sum, whatever dw holds there, so a token with no others adds nothing to logits_grad.
   logits_grad[t,e] = (accumulate ? logits_grad : 0) + d/dz. Then router_weight_grad = X^T dz, router_bias_grad = sum_t
   dz, hidden_states_grad = dz W^T, each where asked for, with dz the finished logits_grad, so that auxiliary losses
   added before this call (accumulate & MOE_ACCUMULATE_LOGITS_GRAD) flow through. The selection bias gets none.
   Errors as moe_router_topk, INVALID_INDEX for an expert_index outside [-1,E). */
typedef struct moe_router_topk_bwd_args {
  int64_t T, H, E, K;
  const void *hidden_states;                 /* [T,H], needed for router_weight_grad */
  const void *router_weight;                 /* [H,E], needed for hidden_states_grad */
  const float *router_logits;                /* [T,E] */
  const int32_t *expert_index;               /* [T,K] of the forward */
  moe_router_config config;                  /* of the forward */
  const float *weights_grad;                 /* [T,K], or NULL and: */
  const void *expert_affinities_masked_grad; /* [T,E] (a last row T is not read) */
  moe_dtype affinity_dtype;                  /* of expert_affinities_masked_grad */
  float *logits_grad;                        /* [T,E] output */
  void *router_weight_grad;                  /* [H,E] output (optional), weight_grad_dtype */
  void *router_bias_grad;                    /* [E] output (optional), weight_grad_dtype */
  void *hidden_states_grad;                  /* [T,H] output (optional) */
  moe_dtype weight_grad_dtype;
  uint32_t accumulate;                       /* MOE_ACCUMULATE_* bits of the outputs to add to; others are
                                                overwritten */
  void *workspace;
  size_t workspace_bytes;
} moe_router_topk_bwd_args;

#define MOE_DECLARE_ROUTER_(name, type, NAME)                                                                       \
  moe_status moe_router_topk_##name(moe_context *ctx, const moe_router_topk_args *args);                            \
  moe_status moe_router_topk_##name##_workspace_size(moe_context *ctx, const moe_router_topk_args *args,            \
                                                     size_t *bytes);                                                \
  moe_status moe_router_topk_bwd_##name(moe_context *ctx, const moe_router_topk_bwd_args *args);                    \
  moe_status moe_router_topk_bwd_##name##_workspace_size(moe_context *ctx, const moe_router_topk_bwd_args *args,    \
                                                         size_t *bytes);
MOE_DTYPE_LIST(MOE_DECLARE_ROUTER_)
#undef MOE_DECLARE_ROUTER_

/* Auxiliary losses. Both write *loss and, when logits_grad is given, ADD their gradient to it. Tokens whose mask is 0
   leave the loss, the counts and the token count T' alike. T' = 0 gives loss 0.
   load balance (Switch, Megatron): c*E/(K*T'^2) * sum_e n_e * sum_t p[t,e]; n_e = slots routed to e (a constant), p =
   softmax over all E, or the sigmoid / sqrt-softplus scores divided by their sum.
   z-loss: c * mean_t (log sum_e exp z[t,e])^2.
   Sums over tokens run in ascending t, a token's over ascending e, with E/(K*T'^2) folded into n_e. The z-loss reads
   neither K, expert_index nor score_function. No workspace; about 60 KiB of stack. Errors: NULL_ARGUMENT,
   INVALID_SHAPE, INVALID_OPTION, INVALID_INDEX, MISALIGNED, OVERLAP. */
typedef struct moe_router_loss_args {
  int64_t T, E, K;
  float coefficient;                 /* c */
  moe_score_function score_function; /* load balance only */
  const float *router_logits;        /* [T,E] */
  const int32_t *expert_index;       /* [T,K], load balance only; -1 = dropped slot */
  const uint8_t *token_mask;         /* [T] (optional) */
  float *loss;                       /* output, one value */
  float *logits_grad;                /* [T,E] (optional) */
} moe_router_loss_args;
moe_status moe_router_load_balance_loss(moe_context *ctx, const moe_router_loss_args *args);
moe_status moe_router_z_loss(moe_context *ctx, const moe_router_loss_args *args);

/* --------------------------------------------------------------------------------------------- routing into blocks */

typedef enum moe_drop_policy {
  MOE_DROP_BY_POSITION = 0, /* beyond capacity, the later tokens are dropped */
  MOE_DROP_BY_WEIGHT = 1    /* the smallest weights are dropped (ties: the later tokens) */
} moe_drop_policy;

/* Blocks that always suffice for a dropless routing: ceil((T*K - (E-1)) / B) + E-1, never less than 1 (with T*K < E it
   is T*K). 0 when an argument is not positive or the count overflows. */
int64_t moe_route_blocks_count(int64_t T, int64_t E, int64_t K, int64_t B);

/* Experts in order, an expert's tokens ascending, ceil(n_e/B) blocks each, tail rows padded; blocks left over go to
   expert E-1, all rows padding, condition 0. With capacity > 0 an expert keeps at most that many tokens. With
   block_per_expert (the dropping layer) N = E, block e is expert e, and capacity defaults to B, its largest value. A
   NaN weight is dropped first. Dropped pairs get affinity 0.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (N too small for this routing), INVALID_OPTION, INVALID_INDEX (an id outside
   [-1,E), or one expert twice for a token), MISALIGNED, OVERLAP, OVERFLOW, WORKSPACE. */
typedef struct moe_route_blocks_args {
  int64_t T, E, K, B, N;
  const int32_t *expert_index;    /* [T,K]; -1 = no expert in this slot */
  const float *expert_weights;    /* [T,K] */
  int skip_token;                 /* padding rows: 0 = id T, affinities have a zero row T; 1 = id -1 */
  int64_t capacity;               /* 0 = dropless */
  moe_drop_policy drop_policy;
  int block_per_expert;
  moe_dtype affinity_dtype;       /* DEFAULT = F32 */
  void *expert_affinities_masked; /* [(T+1)*E], with skip_token [T*E]; output */
  int32_t *token_position_to_id;  /* [N*B] output */
  int32_t *block_to_expert;       /* [N] output */
  int32_t *conditions;            /* [N+1] output (optional): 1 for blocks with a token, then 0 */
  int64_t *tokens_per_expert;     /* [E] output (optional): before dropping */
  void *workspace;
  size_t workspace_bytes;
} moe_route_blocks_args;
moe_status moe_route_blocks(moe_context *ctx, const moe_route_blocks_args *args);
moe_status moe_route_blocks_workspace_size(moe_context *ctx, const moe_route_blocks_args *args, size_t *bytes);

/* ------------------------------------------------------------------------------------------------- blockwise layer */

/* X(name, ENUMERATOR) f(x); z = alpha*x, s = 1/(1+exp(-z)). */
#define MOE_ACTIVATION_LIST(X)                                                     \
  X(silu, SILU)                 /* x*s, alpha defaults to 1 */                     \
  X(gelu, GELU)                 /* x/2*(1+erf(x/sqrt 2)) */                        \
  X(gelu_tanh, GELU_TANH)       /* x/2*(1+tanh(sqrt(2/pi)*(x+0.044715*x^3))) */    \
  X(swish, SWISH)               /* x*s, alpha defaults to 1.702 */                 \
  X(relu, RELU)                 /* max(x,0); derivative 0 at 0 */                  \
  X(squared_relu, SQUARED_RELU) /* max(x,0)^2 */                                   \
  X(identity, IDENTITY)

typedef enum moe_activation {
#define MOE_ACTIVATION_ENUM_(name, NAME) MOE_ACT_##NAME,
  MOE_ACTIVATION_LIST(MOE_ACTIVATION_ENUM_)
#undef MOE_ACTIVATION_ENUM_
  MOE_ACT_COUNT_ /* not an activation */
} moe_activation;

#define MOE_ACT_ERROR 8      /* contract 6 */
#define MOE_ACT_GRAD_ERROR 8 /* contract 6 */

/* a = the affinity of (token, expert), d = m*Wd + b_d. */
typedef enum moe_affinity_mode {
  MOE_AFFINITY_POST_SCALE = 0,        /* y += a*d */
  MOE_AFFINITY_NO_SCALE = 1,          /* y += d */
  MOE_AFFINITY_PRE_SCALE = 2,         /* expert input a*x: g,u = a*(x*W) + bias */
  MOE_AFFINITY_PRE_SCALE_DELAYED = 3, /* the same values as PRE_SCALE: here both scale after the product */
  MOE_AFFINITY_ON_I = 4               /* y += (a*m)*Wd + a*b_d (nkilib expert_affinity_multiply_on_I) */
} moe_affinity_mode;

enum { MOE_CLAMP_GATE_UPPER = 1, MOE_CLAMP_GATE_LOWER = 2, MOE_CLAMP_UP_UPPER = 4, MOE_CLAMP_UP_LOWER = 8 };

typedef struct moe_layer_config {
  moe_activation activation;
  float alpha;     /* 0 = the activation's default; SiLU and Swish only */
  float up_offset; /* m = act(g)*(u+up_offset); gpt-oss uses 1 */
  int skip_gate;   /* m = act(u): gate weights, biases and limits are never read */
  uint32_t clamp;  /* MOE_CLAMP_* bits: which limits are on. Upper first, then lower */
  float gate_clamp_upper_limit, gate_clamp_lower_limit, up_clamp_upper_limit, up_clamp_lower_limit;
  moe_affinity_mode affinity_mode;
} moe_layer_config;

/* Rounding to MX: v becomes what moe_dequantize_mx makes, in v's own type, of what moe_quantize_mx makes of it. */
typedef struct moe_mx_rounding {
  int enabled;               /* 0: not, and nothing else is looked at */
  moe_element element;
  moe_scale_rule scale_rule;
  uint32_t cast;             /* MOE_CAST_* bits */
} moe_mx_rounding;

/* Which operands of products are rounded to MX, each in groups of 32 along its own contraction axis: MXFP8 training,
   and the activations of Trainium's MX kernels. What is rounded is the operand as contract 3 has it; the gradient
   passes through.
                  activations               weights                           gradients
     forward      x along H, m along I      Wgu along H, Wd along I
     backward                               Wd along H, [Wg|Wu] along I       dY along H, dg and du along I
     weight grads x, a*m along rows                                           dY, dg, du along rows
   Groups along I start anew at up; along rows they count an expert's rows in block order. A quantised weight is rounded
   in the backward only, where its groups run the other way; plain weights that are packed cannot be (INVALID_OPTION).
   Sources: seed mlp_bwd_mxfp8, microxcaling's linear; semantics of moe_cte's MX kernels. */
typedef struct moe_mx_operands {
  moe_mx_rounding activations, weights, gradients;
  int weight_grads;              /* 1: the last line, too */
  moe_mx_layout activation_layout; /* forward: a group holds the elements that one of a weight in this layout does */
} moe_mx_operands;

/* What forward and backward share, so that they cannot disagree. */
typedef struct moe_blockwise_layer {
  int64_t T, H, I, E, N, B;             /* tokens, hidden, intermediate, experts, blocks, rows per block; all from 1 */
  int64_t max_rows;                     /* (optional) at most so many of the N*B rows hold a token, T*K say: the
                                           workspace is for so many, and more are an INVALID_INDEX */
  const void *hidden_states;            /* [T,H] (a padding row T, if there is one, is not read) */
  const moe_quantized_activation *quantized_hidden_states; /* (optional): in place of hidden_states, then not read */
  const void *expert_affinities_masked; /* [T*E] at t*E+e (row T is not read); NULL only with NO_SCALE */
  moe_dtype affinity_dtype;             /* of the affinities and their gradient */
  const void *gate_up_proj_weight;      /* [E,H,2,I]: gate, then up (forward: optional beside its packed form) */
  const void *down_proj_weight;         /* [E,I,H] (likewise) */
  const void *packed_gate_up_weight;    /* (optional): from moe_pack_weights with MOE_PACK_GATE_UP, or MOE_PACK_UP */
  const void *packed_down_weight;       /* (optional): MOE_PACK_DOWN. The backward reads neither */
  size_t packed_gate_up_bytes, packed_down_bytes;
  const moe_quantized_weight *quantized_gate_up_weight; /* (optional): in place of gate_up_proj_weight, which is not */
  const moe_quantized_weight *quantized_down_weight;    /*   read; likewise. Gradients: of the weight it stands for */
  const void *gate_and_up_proj_bias;    /* [E,2,I] (optional) */
  const void *down_proj_bias;           /* [E,H] (optional) */
  const int32_t *token_position_to_id;  /* [N*B]: token of row r of block b at b*B+r */
  const int32_t *block_to_expert;       /* [N]; E = the block does nothing. NULL with dropping: block e is expert e */
  const int32_t *conditions;            /* [N] or longer (optional): blocks with 0 do nothing */
  int skip_token;                       /* padding rows have id T (0) or -1 (1) */
  int skip_weight;                      /* accepted, and changes nothing: weights are read per expert, not per block */
  moe_dtype checkpoint_dtype;           /* of both activation checkpoints */
  moe_layer_config config;
  moe_mx_operands mx;
} moe_blockwise_layer;

/* The seven moe_cte implementations, by their own values. They compute the same function; here they choose how work is
   ordered, which metadata is read, and what check_device_limits checks. The MX ones need quantised weights. */
typedef enum moe_cte_spec {
  MOE_CTE_SHARD_ON_BLOCK = 0,
  MOE_CTE_SHARD_ON_I = 1,
  MOE_CTE_SHARD_ON_I_HYBRID = 2,   /* conditions required */
  MOE_CTE_SHARD_ON_I_DROPPING = 3, /* N = E, block e is expert e; block_to_expert is not read */
  MOE_CTE_SHARD_ON_BLOCK_MX = 4,
  MOE_CTE_SHARD_ON_I_MX = 5,
  MOE_CTE_SHARD_ON_I_MX_HYBRID = 6
} moe_cte_spec;

/* Forward. For each block with expert e, each row with token t, a = affinity[t,e]:
     g = x*Wg, u = x*Wu; with PRE_SCALE g,u *= a; g,u += bias; g,u = max(min(g, upper), lower)
     [gate_up_activations_T]  m = act(g)*(u+up_offset); with ON_I m *= a
     d = m*Wd + b_d           [down_activations]
     output[t] += a*d         (POST_SCALE; d otherwise, with ON_I the bias is a*b_d)
   in binary32, in block order, rounded once on storing. Tokens in no block get 0. Source: nkilib moe_cte.
   With not_accumulating a token's output is that of the last block that names it.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, INVALID_INDEX, OVERFLOW, MISALIGNED, OVERLAP, WORKSPACE,
   OUT_OF_MEMORY, UNSUPPORTED (weights packed for another instruction set), DEVICE_LIMIT. An MX spec without both
   weights quantised to MX is an INVALID_OPTION. */
typedef struct moe_blockwise_mm_fwd_args {
  moe_blockwise_layer layer;
  moe_cte_spec spec;
  int check_device_limits;     /* 1: refuse what the spec's device kernel cannot do */
  int device_output_shape;     /* 0: output is [T,H]. 1: as the spec's device kernel: SHARD_ON_BLOCK [T,2,H] (slot 1
                                  zero) or, not accumulating, [T,H]; SHARD_ON_BLOCK_MX [2,T,H] (second half zero);
                                  the others [T+1,H] (row T zero), with skip_token [T,H] */
  int not_accumulating;        /* is_tensor_update_accumulating=False */
  int accumulate_output;       /* 1: output += instead of output = */
  void *gate_up_activations_T; /* [N,2,I,B] output (optional): g and u after clamping; 0 in idle blocks, for padding and
                                  superseded rows, and in the gate half with skip_gate */
  void *down_activations;      /* [N,B,H] output (optional): d, bias included, affinity not (not with ON_I); 0
                                  likewise */
  void *output;
  void *workspace;
  size_t workspace_bytes;
} moe_blockwise_mm_fwd_args;

enum { /* bits of `accumulate` */
  MOE_ACCUMULATE_HIDDEN_STATES_GRAD = 1,
  MOE_ACCUMULATE_AFFINITIES_GRAD = 2,
  MOE_ACCUMULATE_GATE_UP_WEIGHT_GRAD = 4,
  MOE_ACCUMULATE_DOWN_WEIGHT_GRAD = 8,
  MOE_ACCUMULATE_GATE_UP_BIAS_GRAD = 16,
  MOE_ACCUMULATE_DOWN_BIAS_GRAD = 32,
  MOE_ACCUMULATE_LOGITS_GRAD = 64,
  MOE_ACCUMULATE_ROUTER_WEIGHT_GRAD = 128,
  MOE_ACCUMULATE_ROUTER_BIAS_GRAD = 256
};

typedef enum moe_shard_option { /* how the device divides the work; here all give the same bits, and one is used */
  MOE_SHARD_ON_HIDDEN = 0,
  MOE_SHARD_ON_INTERMEDIATE = 1,
  MOE_SHARD_AUTO = 2
} moe_shard_option;

typedef enum moe_affinity_option {
  MOE_AFFINITY_OPTION_ON_H = 0, /* dA = <dY, down checkpoint>, or as ON_I where that is NULL */
  MOE_AFFINITY_OPTION_ON_I = 1  /* dA = <dY*Wd^T, m> + <dY, b_d>: needs no down checkpoint */
} moe_affinity_option;

typedef enum moe_kernel_type { MOE_KERNEL_DROPLESS = 0, MOE_KERNEL_DROPPING = 1 } moe_kernel_type;

/* Backward of the above for dY = output_hidden_states_grad; g,u from the checkpoint, or recomputed to the same bits.
     m = act(g)*(u+up_offset), dm0 = dY*Wd^T, dm = a*dm0 (POST_SCALE, ON_I) or dm0
     dA[t,e] = as affinity_option says (POST_SCALE, ON_I); <dX', x> (PRE_SCALE); 0 (NO_SCALE)
     dg = dm*(u+up_offset)*act'(g)*[lower < g < upper], du = dm*act(g)*[lower < u < upper], limits rounded
          to checkpoint_dtype
     dX = dg*Wg^T + du*Wu^T, one product sum over 2I, times a with PRE_SCALE
     dWgu = x^T [dg|du] (times a with PRE_SCALE), dbgu = sum [dg|du], dWd = (a*m)^T dY, dbd = sum a*dY
          (a absent in NO/PRE_SCALE)
   A pair (t,e) that occurs twice sums. Any gradient pointer may be NULL: it is then not computed.
   With skip_gate the gate halves of the gradients are 0 (or left alone where accumulated).
   With not_accumulating, a token's earlier occurrences had no part in the output and get no gradient.
   Errors as the forward. */
typedef struct moe_blockwise_mm_bwd_args {
  moe_blockwise_layer layer;                /* as given to the forward */
  const void *gate_up_proj_act_checkpoint_T; /* [N,2,I,B] (NULL = recompute) */
  const void *down_proj_act_checkpoint;      /* [N,B,H] (optional) */
  const void *output_hidden_states_grad;     /* [T,H] */
  const moe_quantized_activation *quantized_output_hidden_states_grad; /* (optional): in its place */
  int not_accumulating;
  moe_shard_option shard_option;
  moe_affinity_option affinity_option;
  moe_kernel_type kernel_type;               /* DROPPING: N = E, block e is expert e; block_to_expert is not read */
  int64_t block_tile_size;                   /* a hint; 0 or a divisor of B */
  void *hidden_states_grad;                  /* [T,H] */
  void *expert_affinities_masked_grad;       /* [T*E], affinity_dtype */
  void *gate_up_proj_weight_grad;            /* [E,H,2,I], weight_grad_dtype */
  void *down_proj_weight_grad;               /* [E,I,H], weight_grad_dtype */
  void *gate_and_up_proj_bias_grad;          /* [E,2,I], weight_grad_dtype */
  void *down_proj_bias_grad;                 /* [E,H], weight_grad_dtype */
  moe_dtype weight_grad_dtype;
  uint32_t accumulate;                       /* MOE_ACCUMULATE_* bits */
  void *workspace;
  size_t workspace_bytes;
} moe_blockwise_mm_bwd_args;

/* *bytes for the call with these args and this context's num_threads. Tensors are not read, and may be NULL. */
#define MOE_DECLARE_BLOCKWISE_(name, type, NAME)                                                                       \
  moe_status moe_blockwise_mm_fwd_##name(moe_context *ctx, const moe_blockwise_mm_fwd_args *args);                     \
  moe_status moe_blockwise_mm_fwd_##name##_workspace_size(moe_context *ctx, const moe_blockwise_mm_fwd_args *args,     \
                                                          size_t *bytes);                                              \
  moe_status moe_blockwise_mm_bwd_##name(moe_context *ctx, const moe_blockwise_mm_bwd_args *args);                     \
  moe_status moe_blockwise_mm_bwd_##name##_workspace_size(moe_context *ctx, const moe_blockwise_mm_bwd_args *args,     \
                                                          size_t *bytes);
MOE_DTYPE_LIST(MOE_DECLARE_BLOCKWISE_)
#undef MOE_DECLARE_BLOCKWISE_

/* ---------------------------------------------------------------------------------------------------- grouped GEMM */

/* Products of rows sorted by expert, each with its expert's weights: Y = X*W[e]^T (the interface of Unsloth's grouped
   GEMM). The first m_sizes[0] of the num_tokens*topk sorted positions belong to expert 0, and so on;
   gather_indices[pos] is the slot token*topk+k that position pos holds (a stable argsort of the flattened expert ids).
                  row of X for pos       row of Y, dY for pos
     neither      pos                    pos
     permute_x    gather[pos]/topk       pos                     X is then [num_tokens,K]; dX row gather[pos]
     permute_y    pos                    gather[pos]
   dX[pos] = dY*W[e], with permute_x one row per slot, to be summed over topk by the caller; dW[e] = dY^T X.
   Rows at no position become 0; an expert without rows is not read and its dW is 0. Any N, K.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (negative m_sizes, or more rows than positions), INVALID_OPTION (both
   permutations), INVALID_INDEX, OVERFLOW, MISALIGNED, OVERLAP, WORKSPACE, OUT_OF_MEMORY. */
typedef struct moe_grouped_gemm_args {
  int64_t num_tokens, topk, E, N, K;
  const int32_t *m_sizes;        /* [E] */
  const int32_t *gather_indices; /* [num_tokens*topk]; required with a permutation */
  int permute_x, permute_y;
  const void *X;                 /* forward, dw */
  const void *W;                 /* [E,N,K]; forward (optional beside packed_W), dx */
  const void *packed_W;          /* forward (optional): from moe_pack_weights with MOE_PACK_GROUPED */
  size_t packed_W_bytes;
  const void *dY;                /* dx, dw: [num_tokens*topk,N] */
  const float *topk_weights;     /* [num_tokens*topk] by slot (optional): forward with permute_y multiplies rows */
  void *Y;                       /* forward: [num_tokens*topk,N] output */
  void *dX;                      /* dx: [num_tokens*topk,K] output */
  void *dW;                      /* dw: [E,N,K] output, weight_grad_dtype */
  moe_dtype weight_grad_dtype;
  int accumulate_dW;             /* 1: dW += */
  void *workspace;
  size_t workspace_bytes;
} moe_grouped_gemm_args;

#define MOE_DECLARE_GROUPED_(function)                                      \
  moe_status function(moe_context *ctx, const moe_grouped_gemm_args *args); \
  moe_status function##_workspace_size(moe_context *ctx, const moe_grouped_gemm_args *args, size_t *bytes);
#define MOE_DECLARE_GROUPED_OF_(name, type, NAME)  \
  MOE_DECLARE_GROUPED_(moe_grouped_gemm_##name)    \
  MOE_DECLARE_GROUPED_(moe_grouped_gemm_dx_##name) \
  MOE_DECLARE_GROUPED_(moe_grouped_gemm_dw_##name)
MOE_DTYPE_LIST(MOE_DECLARE_GROUPED_OF_)
#undef MOE_DECLARE_GROUPED_OF_
#undef MOE_DECLARE_GROUPED_

/* ------------------------------------------------------------------------------------------------------- prepacking */

/* Weights in the layout the products consume, for weights that do not change: packing then costs nothing per call. The
   bits are those of the plain weights. The layout depends on the instruction set in use; a call that meets another
   one's layout returns MOE_ERROR_UNSUPPORTED. */
typedef enum moe_pack_layout {
  MOE_PACK_GATE_UP = 0, /* gate_up_proj_weight [E,H,2,I] */
  MOE_PACK_UP = 1,      /* the same, for layers with skip_gate: the up half only */
  MOE_PACK_DOWN = 2,    /* down_proj_weight [E,I,H] */
  MOE_PACK_GROUPED = 3  /* W [E,N,K] of moe_grouped_gemm */
} moe_pack_layout;

/* Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, OVERFLOW, MISALIGNED, OVERLAP, WORKSPACE (packed_bytes too
   small). */
typedef struct moe_pack_weights_args {
  moe_pack_layout layout;
  int64_t E, rows, columns; /* of the tensor above: H,I or I,H or N,K */
  const void *weight;
  const moe_quantized_weight *quantized; /* (optional) instead of weight, not of GROUPED. What is packed is w as in the
                                            forward, so a call wants such a weight's float scales beside it */
  void *packed;             /* output, aligned to 64 bytes */
  size_t packed_bytes;
} moe_pack_weights_args;

#define MOE_DECLARE_PACK_(name, type, NAME)                                                     \
  moe_status moe_pack_weights_##name(moe_context *ctx, const moe_pack_weights_args *args);      \
  moe_status moe_pack_weights_##name##_size(moe_context *ctx, const moe_pack_weights_args *args, size_t *bytes);
MOE_DTYPE_LIST(MOE_DECLARE_PACK_)
#undef MOE_DECLARE_PACK_

/* Activation and derivative over an array, as the layer computes them: y[i] = act(x[i]), dy[i] = act'(x[i]) (either may
   be NULL). alpha 0 = the activation's default. */
moe_status moe_activation_f32(moe_context *ctx, moe_activation activation, float alpha, const float *x, float *y,
                              float *dy, int64_t n);

#ifdef __cplusplus
}
#endif

#pragma pop_macro("I")

#endif /* MOE_H */

#if defined(MOE_IMPLEMENTATION) && !defined(MOE_IMPLEMENTATION_DONE_)
#define MOE_IMPLEMENTATION_DONE_
#include "moe/impl.h"
#endif
