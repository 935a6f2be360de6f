/* Formats: conversions, narrow elements, quantising and back, and tensors that the layer takes as they are stored. */
#ifndef MOE_API_QUANTIZE_H
#define MOE_API_QUANTIZE_H

#include "context.h"
#include "layouts.h"

#include "begin.h"

/* ---------------------------------------------------------------------------------------------------- conversions */

/* moe_<suffix>_from_f32 and moe_<suffix>_to_f32 for every element type: dst[i] = src[i] for n elements, rounded as
   contract 5 says. dst: output.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (n < 0), OVERFLOW, MISALIGNED, OVERLAP. */
#define MOE_DECLARE_CONVERT_(name, type, NAME)                                                        \
  MOE_API moe_status moe_##name##_from_f32(moe_context *ctx, type *dst, const float *src, int64_t n); \
  MOE_API moe_status moe_##name##_to_f32(moe_context *ctx, float *dst, const type *src, int64_t n);
MOE_DTYPE_LIST(MOE_DECLARE_CONVERT_)
#undef MOE_DECLARE_CONVERT_

/* X(suffix, ENUMERATOR, bits, fraction bits, exponent bias, code of the largest finite number, code of infinity, code
   stored for NaN; 0 = has none): narrow floating-point elements. The sign comes first, then the exponent; with exponent
   field 0 a value is subnormal.
     e4m3fn  OCP: up to 448, no infinity, NaN is S.1111.111
     e4m3    as IEEE would have it: up to 240, exponent field 15 is infinity or NaN
     e5m2    OCP: up to 57344, exponent field 31 is infinity or NaN
     e4m3fnuz, e5m2fnuz  up to 240 and 57344, no infinity and no -0: code 0x80 is NaN, and what rounds to zero is +0
     e2m1    OCP: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
     e2m3, e3m2  OCP: up to 7.5 in steps of 0.125 and more; up to 28 in steps of 0.0625 and more
   Codes of fewer than 8 bits are contiguous, the first in the least significant bits of the first byte: two codes of
   e2m1 share a byte, the even element in its low nibble, and four codes of 6 bits three bytes. What is left of a last
   byte is written as 0 and not read.
   Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats Specification 1.0, which does not say
   how codes of 6 bits are stored: as rocRoller's FP6x16 does; 8-bit Numerical Formats for Deep Neural Networks (fnuz).
   */
#define MOE_ELEMENT_LIST(X)                             \
  X(e4m3fn, E4M3FN, 8, 3, 7, 0x7eu, 0u, 0x7fu)          \
  X(e4m3, E4M3, 8, 3, 7, 0x77u, 0x78u, 0x7cu)           \
  X(e5m2, E5M2, 8, 2, 15, 0x7bu, 0x7cu, 0x7eu)          \
  X(e2m1, E2M1, 4, 1, 1, 0x7u, 0u, 0u)                  \
  X(e4m3fnuz, E4M3FNUZ, 8, 3, 8, 0x7fu, 0u, 0x80u)      \
  X(e5m2fnuz, E5M2FNUZ, 8, 2, 16, 0x7fu, 0u, 0x80u)     \
  X(e2m3, E2M3, 6, 3, 1, 0x1fu, 0u, 0u)                 \
  X(e3m2, E3M2, 6, 2, 3, 0x1fu, 0u, 0u)

/* X(ENUMERATOR, bits, log2 of the unit, largest magnitude when it is written, the bit that is set in the code of 0 if
   codes count from the least number on, and is not; else 0): integers. Numbers that are too large become the largest;
   -128 is read, but not written.
     MXINT8  OCP: two's complement, in units of 2^-6. Only under E8M0 scales of MX
     INT8, INT4  two's complement. These and the next only under scales of groups
     UINT4   code - 8: from -8 to 7, or code - zero point; Kimi-K2's and compressed-tensors' pack-quantized weights */
#define MOE_INTEGER_LIST(X)      \
  X(MXINT8, 8, -6, 127, 0x80u)   \
  X(INT8, 8, 0, 127, 0x80u)      \
  X(INT4, 4, 0, 15, 0x8u)        \
  X(UINT4, 4, 0, 15, 0u)

typedef enum moe_element {
#define MOE_ELEMENT_ENUM_(name, NAME, bits, fraction, bias, max, infinity, nan) MOE_ELEMENT_##NAME,
#define MOE_INTEGER_ENUM_(NAME, bits, unit, max, flip) MOE_ELEMENT_##NAME,
  MOE_ELEMENT_LIST(MOE_ELEMENT_ENUM_) MOE_INTEGER_LIST(MOE_INTEGER_ENUM_)
#undef MOE_ELEMENT_ENUM_
#undef MOE_INTEGER_ENUM_
} moe_element;

/* How floats are rounded to elements: bits of every field and argument named `cast`. Without any, ties go to the even
   code, and a number that rounds to more than the largest one becomes infinity; in e4m3fn and the fnuz ones, which have
   none, NaN; in e2m1, e2m3, e3m2 and integers, which have neither, the largest number. */
enum {
  MOE_CAST_SATURATE = 1,    /* numbers that are too large, and infinities, become the largest number */
  MOE_CAST_HALF_AWAY = 2,   /* ties go away from zero */
  MOE_CAST_HALF_TO_ZERO = 4 /* ties go toward zero, and what becomes zero has no sign: how ggml writes e2m1. Not with
                               HALF_AWAY */
};

/* moe_<suffix>_from_f32 and moe_<suffix>_to_f32 for every narrow element: dst[i] = src[i] for n elements, which are
   ceil(n*bits/8) bytes, rounded as contract 5 and `cast` say. dst: output.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (n < 0), INVALID_OPTION (unknown bits in cast), OVERFLOW, MISALIGNED, OVERLAP.
   */
#define MOE_DECLARE_ELEMENT_(name, NAME, bits, fraction, bias, max, infinity, nan)                      \
  MOE_API moe_status moe_##name##_from_f32(moe_context *ctx, uint8_t *dst, const float *src, int64_t n, \
                                           uint32_t cast);                                              \
  MOE_API moe_status moe_##name##_to_f32(moe_context *ctx, float *dst, const uint8_t *src, int64_t n);
MOE_ELEMENT_LIST(MOE_DECLARE_ELEMENT_)
#undef MOE_DECLARE_ELEMENT_

/* The E8M0 scales of MX tensors, n of them. To float: dst[i] = 2^(src[i]-127), NaN for 255. From float: the scale of
   the largest power of two that is not above |src[i]|; 0 below 2^-126, 255 for infinities and NaN. dst: output.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (n < 0), OVERFLOW, MISALIGNED, OVERLAP. */
MOE_API moe_status moe_e8m0_to_f32(moe_context *ctx, float *dst, const uint8_t *src, int64_t n);
MOE_API moe_status moe_e8m0_from_f32(moe_context *ctx, uint8_t *dst, const float *src, int64_t n);

/* ------------------------------------------------------------------------------------------------- quantising to MX */

/* The exponent of a group's scale, given amax, the largest finite magnitude of the group. The element's largest number
   is max = M*2^emax, M in [1,2). Exponents are exact: no logarithm is rounded. */
typedef enum moe_scale_rule {
  MOE_SCALE_OCP_FLOOR = 0, /* floor(log2 amax) - emax. Source: OCP's specification; ggml writes gpt-oss's format so */
  MOE_SCALE_NKI_ALT = 1,   /* for fp8 one more, so that nothing saturates; for e2m1 the same. Source: Trainium's
                              quantize_mx */
  MOE_SCALE_ROUND_UP = 2,  /* ceil(log2(amax/max)): the least one with which nothing saturates. Source: Triton's
                              downcast_to_mxfp, NVIDIA */
  MOE_SCALE_CEIL = 3,      /* ceil(log2 amax) - emax. Source: torchao */
  MOE_SCALE_EVEN = 4,      /* floor(log2 of amax rounded to the element's precision) - emax. Source: torchao, AMD */
  MOE_SCALE_NEAREST = 5,   /* log2(amax/max), rounded to nearest. Source: the first rule of MLX */
  MOE_SCALE_COUNT_
} moe_scale_rule;

/* Quantises a tensor to MX: element codes, and one E8M0 scale for every 32 elements in succession along the columns.
   With `transposed` it is the transpose that is quantised, so that groups lie along the rows. A last group may be
   shorter.
     scale[r,g] = 127 + the exponent of scale_rule, at least 0; 0 for a group of zeros
     code[r,c]  = plain[r,c] / 2^(scale[r,c/32]-127), rounded once, as `cast` says
   Whatever cast says, NaN becomes NaN and infinity infinity, in e4m3fn NaN. In elements that have neither (e2m1, e2m3,
   e3m2, MXINT8) a group with one of them gets scale 255 and codes 0. There is no workspace.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, OVERFLOW, MISALIGNED, OVERLAP.
   Sources: OCP Microscaling Formats Specification 1.0, and those of the rules. */
typedef struct moe_quantize_mx_args {
  moe_element element;   /* one of MOE_ELEMENT_LIST, or MXINT8 */
  moe_scale_rule scale_rule;
  uint32_t cast;         /* MOE_CAST_* bits; most rules are meant with MOE_CAST_SATURATE */
  moe_dtype dtype;       /* of plain; DEFAULT = F32 */
  int64_t rows, columns; /* of plain; from 0 */
  int transposed;
  const void *plain;     /* [rows,columns] */
  uint8_t *codes;        /* [rows,ceil(columns*bits/8)]: of 8 bits [rows,columns], of e2m1 [rows,ceil(columns/2)];
                            transposed: with columns for rows and rows for columns; output */
  uint8_t *scales;       /* [rows,ceil(columns/32)], likewise; output */
} moe_quantize_mx_args;
MOE_API moe_status moe_quantize_mx(moe_context *ctx, const moe_quantize_mx_args *args);

/* And back: plain = code * 2^(scale-127), which in binary32 is exact unless it overflows to infinity, then rounded to
   dtype. Scale 255 gives NaN. There is no workspace.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, OVERFLOW, MISALIGNED, OVERLAP. */
typedef struct moe_dequantize_mx_args {
  moe_element element;
  moe_dtype dtype;               /* of plain; DEFAULT = F32 */
  int64_t rows, columns;         /* of plain; from 0 */
  int transposed;
  const uint8_t *codes, *scales; /* shaped as moe_quantize_mx writes them */
  void *plain;                   /* [rows,columns] output */
} moe_dequantize_mx_args;
MOE_API moe_status moe_dequantize_mx(moe_context *ctx, const moe_dequantize_mx_args *args);

/* ------------------------------------------------------------------------------------ quantising to scaled elements */

/* Quantises a tensor to 8-bit elements with float scales, one for every block of block_rows x block_columns elements. A
   block size of 0 is all rows, or all columns; last blocks may be smaller. So 0,0 is one static scale, 1,0 one per
   token, 0,1 one per column, and 128,128 is blocks.
     scale     = amax/max in binary32, at least 2^-126, with amax the block's largest finite magnitude and max the
                 element's largest number; 1 where amax is 0; or as given. With power_of_two_scales the least power
                 of two, from 2^-126 on, with which amax does not exceed max: up, never down (DeepSeek-V3.1)
     code[r,c] = plain[r,c] * (1/scale), both operations in binary32, then rounded once, as `cast` says
   Infinities and NaN become what they become in moe_quantize_mx. There is no workspace.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION (also an element of 4 bits, and a given scale that is not finite
   and above 0), OVERFLOW, MISALIGNED, OVERLAP. */
typedef struct moe_quantize_scaled_args {
  moe_element element;               /* of 8 bits */
  uint32_t cast;                     /* MOE_CAST_* bits */
  moe_dtype dtype;                   /* of plain; DEFAULT = F32 */
  int64_t rows, columns;             /* of plain; from 0: then there are no scales either */
  int64_t block_rows, block_columns; /* 0 = all */
  int scales_given;                  /* 1: scales are an input */
  int power_of_two_scales;           /* 1: those that are computed are powers of two */
  const void *plain;                 /* [rows,columns] */
  uint8_t *codes;                    /* [rows,columns] output */
  float *scales;                     /* [ceil(rows/block_rows),ceil(columns/block_columns)] output, or input */
} moe_quantize_scaled_args;
MOE_API moe_status moe_quantize_scaled(moe_context *ctx, const moe_quantize_scaled_args *args);

/* And back: plain = code*scale in binary32, rounded to dtype. Scales may have any value. There is no workspace.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, OVERFLOW, MISALIGNED, OVERLAP. */
typedef struct moe_dequantize_scaled_args {
  moe_element element;               /* of 8 bits */
  moe_dtype dtype;                   /* of plain; DEFAULT = F32 */
  int64_t rows, columns;             /* of plain; from 0: then there are no scales either */
  int64_t block_rows, block_columns; /* 0 = all */
  const uint8_t *codes;              /* shaped as moe_quantize_scaled writes them, as are the scales */
  const float *scales;
  void *plain;                       /* [rows,columns] output */
} moe_dequantize_scaled_args;
MOE_API moe_status moe_dequantize_scaled(moe_context *ctx, const moe_dequantize_scaled_args *args);

/* ----------------------------------------------------------------------------------- quantising in groups of a row */

/* What scales are stored as. */
typedef enum moe_scales_type {
#define MOE_SCALES_ENUM_(name, type, NAME) MOE_SCALES_##NAME,
  MOE_DTYPE_LIST(MOE_SCALES_ENUM_)
#undef MOE_SCALES_ENUM_
  MOE_SCALES_E4M3FN, /* a byte each, of e4m3fn: NVFP4. A sign counts */
  MOE_SCALES_E8M0,   /* a byte each: 2^(byte-127), NaN for 255 */
  MOE_SCALES_COUNT_
} moe_scales_type;

/* Quantises a tensor in groups of `group` elements in succession along the columns, each with a scale of its own; a
   last group may be shorter. NVFP4 is E2M1 in groups of 16 under E4M3FN scales and a global scale; int8, int4: INT8,
   INT4 or UINT4 under scales of any type. With amax and max as in moe_quantize_scaled (of 8-bit integers 127, of 4-bit
   ones 7), all operations in binary32:
     global_scale = amax(all of plain)/(max*448), at least 2^-126; 1 where amax is 0; or as given. Without one it is 1
     scale        = amax/max/global_scale, at least 2^-126, at most the type's largest number, rounded to the type; in
                    E8M0 up, never down; 1 where amax is 0; or as given
     s            = scale*global_scale
     code[r,c]    = plain[r,c] * (1/s), rounded once, as `cast` says, with 1/s at most 2^127; 0 where s is 0
   With zero_points, which are for UINT4, let low and high be the least and the largest of the group's numbers and 0:
     scale        = high/15 - low/15, then as above
     zero point   = -low * (1/s), rounded as `cast` says, at most 15; or as given
     code[r,c]    = plain[r,c] * (1/s), rounded likewise, plus the zero point, from 0 to 15
   A group with an infinity or NaN, in an element that has neither, gets the scale NaN and codes of 0; under given
   scales infinities become the largest number and NaN 0. There is no workspace.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION (also given scales that are negative or not finite, a given
   global scale that is not finite and above 0, and one to be computed but for E4M3FN), OVERFLOW, MISALIGNED, OVERLAP.
   Sources: vLLM's and llm-compressor's NVFP4 (their global scale is the reciprocal of this one, which is ModelOpt's
   weight_scale_2); compressed-tensors' pack-quantized; AWQ and GPTQ for zero points, which they store in other orders.
   */
typedef struct moe_quantize_group_args {
  moe_element element;         /* any but MXINT8 */
  moe_scales_type scales_type;
  uint32_t cast;               /* MOE_CAST_* bits */
  moe_dtype dtype;             /* of plain; DEFAULT = F32 */
  int64_t rows, columns;       /* of plain; from 0 */
  int64_t group;               /* at least 1; more than columns: all of them */
  int scales_given;            /* 1: scales and zero_points are inputs */
  int global_scale_given;      /* 1: so is global_scale; scales_given requires it if there is one */
  const void *plain;           /* [rows,columns] */
  uint8_t *codes;              /* [rows,ceil(columns*bits/8)] output */
  void *scales;                /* [rows,ceil(columns/group)] output, or input */
  float *global_scale;         /* [1] (optional): output, or input */
  uint8_t *zero_points;        /* [rows,ceil(columns/group)] (optional): a byte each; output, or input */
} moe_quantize_group_args;
MOE_API moe_status moe_quantize_group(moe_context *ctx, const moe_quantize_group_args *args);

/* And back: plain = (code - zero point)*s in binary32, rounded to dtype; the zero point of UINT4 is 8 if there are
   none. There is no workspace.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, OVERFLOW, MISALIGNED, OVERLAP. */
typedef struct moe_dequantize_group_args {
  moe_element element;         /* any but MXINT8 */
  moe_scales_type scales_type;
  moe_dtype dtype;             /* of plain; DEFAULT = F32 */
  int64_t rows, columns;       /* of plain; from 0 */
  int64_t group;               /* at least 1 */
  const uint8_t *codes;        /* shaped as moe_quantize_group writes them, as are the next */
  const void *scales;
  const float *global_scale;   /* (optional) */
  const uint8_t *zero_points;  /* (optional) */
  void *plain;                 /* [rows,columns] output */
} moe_dequantize_group_args;
MOE_API moe_status moe_dequantize_group(moe_context *ctx, const moe_dequantize_group_args *args);

/* ----------------------------------------------------------------------------------- tensors as they are stored */

/* The scales of a quantised weight, and their shapes: of gate and up; of down. MX has E8M0 scales. STATIC, COLUMN and
   BLOCK have float scales, 8-bit floating-point elements, and codes [E,H,2,I]; [E,I,H], or as out_in says. GROUP has
   elements as in moe_quantize_group, codes [E,2,I,ceil(H*bits/8)]; [E,H,ceil(I*bits/8)], which are checkpoints' rows. A
   block of BLOCK is `block` elements along H (of down I), the axis that products contract, times
   block_columns; a group is `block` elements along that axis. A weight may be a slice that begins within a block, at
   its element first_k and column first_column: below, H is then first_k + H, and so on. */
typedef enum moe_weight_scaling {
  MOE_WEIGHT_MX = 0,                 /* as layout and scales_layout say */
  MOE_WEIGHT_STATIC = 1,             /* [2]; [1] */
  MOE_WEIGHT_COLUMN = 2,             /* [2,I]; [H] */
  MOE_WEIGHT_BLOCK = 3,              /* [E,ceil(H/block),2,ceil(I/block_columns),repeat];
                                        [E,ceil(I/block),ceil(H/block_columns),repeat]. Of the last axis the first is
                                        read */
  MOE_WEIGHT_STATIC_PER_EXPERT = 4,  /* [E,2]; [E] */
  MOE_WEIGHT_COLUMN_PER_EXPERT = 5,  /* [E,2,I]; [E,H]. nkilib's "row" scales; for the order in which it stores those of
                                        down see MOE_NKI_DOWN_SCALE */
  MOE_WEIGHT_GROUP = 6,              /* [E,2,I,ceil(H/block)]; [E,H,ceil(I/block)] */
  MOE_WEIGHT_COUNT_
} moe_weight_scaling;

/* A weight as it is stored, which the layer reads in place of a plain one. What is multiplied in the forward is
     MX, BLOCK    code*scale in binary32; in _bf16 functions rounded to bf16. For MX the product is exact unless it
                  overflows to infinity, scale 255 is NaN, and rounding to bf16 changes numbers below 2^-126 only, which
                  products take as zero
     GROUP        what moe_dequantize_group makes of it: (code - zero point)*(scale*global scale); likewise
     the others   the code; product sums are then multiplied by the scale: g = (x*Wg)*s
   In the backward it is code*scale for all of them, rounded likewise. Products contract in logical order, whatever the
   layout. Float scales must be finite; E4M3FN and E8M0 bytes may be NaN. Elements of 6 bits and MXINT8 are for MX, in
   the layout PLAIN, elements of 6 bits for GROUP as well.
   Sources: semantics of quantisation strategies 1 to 6 and of the MX kernels of nkilib's moe_cte; gpt-oss. */
typedef struct moe_quantized_weight {
  moe_element element;
  moe_weight_scaling scaling;
  moe_mx_layout layout;        /* read for MX, as is the next */
  moe_mx_scales scales_layout;
  int64_t block, repeat;       /* read for BLOCK; 0 = 256, and 0 = 1. nkilib repeats 128 times. Of GROUP block is at
                                  least 1, and repeat not read */
  const void *codes;           /* in NKI layouts aligned to words */
  const void *scales;          /* not read for GGML */
  int64_t block_columns;       /* read for BLOCK; 0 = block */
  int64_t first_k;             /* read for BLOCK and GROUP: from 0 to block - 1 */
  int64_t first_column;        /* read for BLOCK: from 0 to block_columns - 1, of gate and of up */
  moe_scales_type scales_type; /* read for BLOCK and GROUP */
  const float *global_scale;   /* GROUP (optional): [E,2], gate's and up's own; [E] */
  const uint8_t *zero_points;  /* GROUP of UINT4 (optional): as many as scales, a byte each */
  int out_in;                  /* read for STATIC, COLUMN and BLOCK: 1: rows of checkpoints, codes [E,2,I,H]; [E,H,I], and
                                  BLOCK's scales [E,2,ceil(I/block_columns),ceil(H/block),repeat];
                                  [E,ceil(H/block_columns),ceil(I/block),repeat] (DeepSeek-V3, Qwen3-FP8) */
} moe_quantized_weight;

/* Activations [T,H] or their gradients as they are stored, which the layer reads in place of plain ones. They are what
   moe_dequantize_mx or, with float_scales, moe_dequantize_scaled makes of them in the function's element type. A call
   decodes them once, into its workspace. */
typedef struct moe_quantized_activation {
  moe_element element;               /* with float_scales of 8 bits */
  int float_scales;                  /* 0: MX, in groups of 32 along H */
  int64_t block_rows, block_columns; /* read with float_scales; 0 = all: 0,0 is static, 1,0 per token, 1,128 blocks */
  const uint8_t *codes;              /* [T,H], of fewer bits [T,ceil(H*bits/8)] */
  const void *scales;                /* uint8_t [T,ceil(H/32)]; or float [ceil(T/block_rows),ceil(H/block_columns)], all
                                        finite */
} moe_quantized_activation;

#include "end.h"

#endif
