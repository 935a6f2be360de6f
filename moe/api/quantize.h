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
     e2m1    OCP: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Two codes share a byte, the even element in its low
             nibble. After an odd number of elements the last high nibble is written as 0 and not read
   Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats Specification 1.0; 8-bit Numerical
   Formats for Deep Neural Networks (fnuz). */
#define MOE_ELEMENT_LIST(X)                             \
  X(e4m3fn, E4M3FN, 8, 3, 7, 0x7eu, 0u, 0x7fu)          \
  X(e4m3, E4M3, 8, 3, 7, 0x77u, 0x78u, 0x7cu)           \
  X(e5m2, E5M2, 8, 2, 15, 0x7bu, 0x7cu, 0x7eu)          \
  X(e2m1, E2M1, 4, 1, 1, 0x7u, 0u, 0u)                  \
  X(e4m3fnuz, E4M3FNUZ, 8, 3, 8, 0x7fu, 0u, 0x80u)      \
  X(e5m2fnuz, E5M2FNUZ, 8, 2, 16, 0x7fu, 0u, 0x80u)

typedef enum moe_element {
#define MOE_ELEMENT_ENUM_(name, NAME, bits, fraction, bias, max, infinity, nan) MOE_ELEMENT_##NAME,
  MOE_ELEMENT_LIST(MOE_ELEMENT_ENUM_)
#undef MOE_ELEMENT_ENUM_
} moe_element;

/* How floats are rounded to elements: bits of every field and argument named `cast`. Without any, ties go to the even
   code, and a number that rounds to more than the largest one becomes infinity; in e4m3fn and the fnuz ones, which have
   none, NaN; in e2m1, which has neither, the largest number. */
enum {
  MOE_CAST_SATURATE = 1,    /* numbers that are too large, and infinities, become the largest number */
  MOE_CAST_HALF_AWAY = 2,   /* ties go away from zero */
  MOE_CAST_HALF_TO_ZERO = 4 /* ties go toward zero, and what becomes zero has no sign: how ggml writes e2m1. Not with
                               HALF_AWAY */
};

/* moe_<suffix>_from_f32 and moe_<suffix>_to_f32 for every narrow element: dst[i] = src[i] for n elements, which in e2m1
   are ceil(n/2) bytes, rounded as contract 5 and `cast` say. dst: output.
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
   Whatever cast says, NaN becomes NaN and infinity infinity, in e4m3fn NaN. In e2m1, which has neither, a group with
   one of them gets scale 255 and codes 0. There is no workspace.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, OVERFLOW, MISALIGNED, OVERLAP.
   Sources: OCP Microscaling Formats Specification 1.0, and those of the rules. */
typedef struct moe_quantize_mx_args {
  moe_element element;
  moe_scale_rule scale_rule;
  uint32_t cast;         /* MOE_CAST_* bits; most rules are meant with MOE_CAST_SATURATE */
  moe_dtype dtype;       /* of plain; DEFAULT = F32 */
  int64_t rows, columns; /* of plain; from 0 */
  int transposed;
  const void *plain;     /* [rows,columns] */
  uint8_t *codes;        /* [rows,columns], of e2m1 [rows,ceil(columns/2)]; transposed: with columns for rows and rows
                            for columns; output */
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

/* ----------------------------------------------------------------------------------- tensors as they are stored */

/* The scales of a quantised weight, and their shapes: of gate and up; of down. MX has E8M0 scales, the others have
   float scales, 8-bit elements, and codes in the order of the plain weight: [E,H,2,I]; [E,I,H]. */
typedef enum moe_weight_scaling {
  MOE_WEIGHT_MX = 0,                 /* as layout and scales_layout say */
  MOE_WEIGHT_STATIC = 1,             /* [2]; [1] */
  MOE_WEIGHT_COLUMN = 2,             /* [2,I]; [H] */
  MOE_WEIGHT_BLOCK = 3,              /* [E,ceil(H/block),2,ceil(I/block),repeat];
                                        [E,ceil(I/block),ceil(H/block),repeat]. Of the last axis the first is read */
  MOE_WEIGHT_STATIC_PER_EXPERT = 4,  /* [E,2]; [E] */
  MOE_WEIGHT_COLUMN_PER_EXPERT = 5,  /* [E,2,I]; [E,H]. nkilib's "row" scales; for the order in which it stores those of
                                        down see MOE_NKI_DOWN_SCALE */
  MOE_WEIGHT_COUNT_
} moe_weight_scaling;

/* A weight as it is stored, which the layer reads in place of a plain one. What is multiplied in the forward is
     MX, BLOCK    code*scale in binary32; in _bf16 functions rounded to bf16. For MX the product is exact unless it
                  overflows to infinity, scale 255 is NaN, and rounding to bf16 changes numbers below 2^-126 only, which
                  products take as zero
     the others   the code; product sums are then multiplied by the scale: g = (x*Wg)*s
   In the backward it is code*scale for all of them, rounded likewise. Products contract in logical order, whatever the
   layout. Float scales must be finite.
   Sources: semantics of quantisation strategies 1 to 6 and of the MX kernels of nkilib's moe_cte; gpt-oss. */
typedef struct moe_quantized_weight {
  moe_element element;
  moe_weight_scaling scaling;
  moe_mx_layout layout;        /* read for MX, as is the next */
  moe_mx_scales scales_layout;
  int64_t block, repeat;       /* read for BLOCK; 0 = 256, and 0 = 1. nkilib repeats 128 times */
  const void *codes;           /* in NKI layouts aligned to words */
  const void *scales;          /* not read for GGML */
} moe_quantized_weight;

/* Activations [T,H] or their gradients as they are stored, which the layer reads in place of plain ones. They are what
   moe_dequantize_mx or, with float_scales, moe_dequantize_scaled makes of them in the function's element type. A call
   decodes them once, into its workspace. */
typedef struct moe_quantized_activation {
  moe_element element;               /* with float_scales of 8 bits */
  int float_scales;                  /* 0: MX, in groups of 32 along H */
  int64_t block_rows, block_columns; /* read with float_scales; 0 = all: 0,0 is static, 1,0 per token, 1,128 blocks */
  const uint8_t *codes;              /* [T,H], of e2m1 [T,ceil(H/2)] */
  const void *scales;                /* uint8_t [T,ceil(H/32)]; or float [ceil(T/block_rows),ceil(H/block_columns)], all
                                        finite */
} moe_quantized_activation;

#include "end.h"

#endif
