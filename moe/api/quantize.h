/* Conversions, narrow elements, quantising, and tensors as they are stored quantised. */
#ifndef MOE_API_QUANTIZE_H
#define MOE_API_QUANTIZE_H

#include "context.h"
#include "layouts.h"

#include "begin.h"

/* ---------------------------------------------------------------------------------------------------- conversions */

/* dst[i] = src[i], n elements, contract 5. dst and src must not overlap.
   moe_<type>_from_f32 and moe_<type>_to_f32 for every element type. */
#define MOE_DECLARE_CONVERT_(name, type, NAME)                                                        \
  MOE_API moe_status moe_##name##_from_f32(moe_context *ctx, type *dst, const float *src, int64_t n); \
  MOE_API moe_status moe_##name##_to_f32(moe_context *ctx, float *dst, const type *src, int64_t n);
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
#define MOE_DECLARE_ELEMENT_(name, NAME, bits, fraction, bias, max, infinity, nan)                      \
  MOE_API moe_status moe_##name##_from_f32(moe_context *ctx, uint8_t *dst, const float *src, int64_t n, \
                                           uint32_t cast);                                              \
  MOE_API moe_status moe_##name##_to_f32(moe_context *ctx, float *dst, const uint8_t *src, int64_t n);
MOE_ELEMENT_LIST(MOE_DECLARE_ELEMENT_)
#undef MOE_DECLARE_ELEMENT_

/* The E8M0 scales of microscaled tensors: dst[i] = 2^(src[i]-127), NaN for 255; and back: the exponent of |src[i]|,
   rounded down, 0 for all below 2^-126, 255 for infinities and NaN. Errors as above. */
MOE_API moe_status moe_e8m0_to_f32(moe_context *ctx, float *dst, const uint8_t *src, int64_t n);
MOE_API moe_status moe_e8m0_from_f32(moe_context *ctx, uint8_t *dst, const float *src, int64_t n);

/* ------------------------------------------------------------------------------------------------- quantising to MX */

/* How a group's scale follows from amax, its largest finite magnitude. max = M*2^emax is the element's largest
   number, M in [1,2); exponents are exact. */
typedef enum moe_scale_rule {
  MOE_SCALE_OCP_FLOOR = 0, /* floor(log2 amax) - emax. The OCP specification, gpt-oss's format as ggml writes it */
  MOE_SCALE_NKI_ALT = 1,   /* one more for fp8, so that nothing saturates; e2m1 as OCP_FLOOR. Trainium's quantize_mx */
  MOE_SCALE_ROUND_UP = 2,  /* ceil(log2(amax/max)): the least without saturation. Triton's downcast_to_mxfp, NVIDIA */
  MOE_SCALE_CEIL = 3,      /* ceil(log2 amax) - emax. torchao */
  MOE_SCALE_EVEN = 4,      /* floor(log2 of amax rounded to the element's precision) - emax. torchao, AMD */
  MOE_SCALE_NEAREST = 5,   /* log2(amax/max) rounded to nearest. MLX's first */
  MOE_SCALE_COUNT_
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
MOE_API moe_status moe_quantize_mx(moe_context *ctx, const moe_quantize_mx_args *args);

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
MOE_API moe_status moe_dequantize_mx(moe_context *ctx, const moe_dequantize_mx_args *args);

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
MOE_API moe_status moe_quantize_scaled(moe_context *ctx, const moe_quantize_scaled_args *args);

/* plain = code*scale in binary32, rounded to dtype. Scales may be anything. Shapes and errors as above. */
typedef struct moe_dequantize_scaled_args {
  moe_element element;
  moe_dtype dtype;
  int64_t rows, columns, block_rows, block_columns;
  const uint8_t *codes;
  const float *scales;
  void *plain;
} moe_dequantize_scaled_args;
MOE_API moe_status moe_dequantize_scaled(moe_context *ctx, const moe_dequantize_scaled_args *args);

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
  MOE_WEIGHT_COLUMN_PER_EXPERT = 5,  /* [E,2,I]; [E,H], the "row" scales of nkilib (its stored order of down's:
                                        MOE_NKI_DOWN_SCALE) */
  MOE_WEIGHT_COUNT_
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

#include "end.h"

#endif
