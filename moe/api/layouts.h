/* How MX weights are stored, and conversion from one layout to another. */
#ifndef MOE_API_LAYOUTS_H
#define MOE_API_LAYOUTS_H

#include "context.h"

#include "begin.h"

/* -------------------------------------------------------------------------------------------- layouts of MX weights */

/* How an MX weight W is stored: codes of 4 bits (e2m1) or 8 bits (fp8), and one E8M0 scale byte for every 32 of them
   along K, the axis that products contract. Conversion moves bits and computes nothing: there and back gives the same
   bytes.
     E experts; parts: 2 for gate and up, 1 for down; columns of a part: I, or H for down; K: H, or I for down.
     G = ceil(K/32), p_K = min(K,512)/4. A word is 4 codes, the first one in its least significant bits: uint16_t of
     4-bit codes, uint32_t of 8-bit ones.
                      codes                                    scales
     PLAIN            8 bits: [E,parts,columns,K]              [E,parts,columns,G]
                      4 bits: [E,parts,columns,ceil(K/2)], the
                      even element in the low nibble
     NKI_*_X4         gate and up: words [E,128,2,K/512,I]     [E,16,2,K/512,I]
                      down: words [E,p_K,ceil(K/512),H]        [E,ceil(p_K/8),ceil(K/512),H]
     NKI_WRAPX*, 1X32 words [E,K/4,parts*columns]              [E,G,parts*columns]
     GPT_OSS          [E,columns*parts,G,16] bytes, the even   [E,columns*parts,G]
                      element in the low nibble; row 2j is
                      column j of gate, row 2j+1 that of up
     GGML             [parts,E,columns,G] blocks of 17 bytes:  in the block
                      the scale, then 16 bytes with element j
                      in the low nibble, j+16 in the high one
   A scale byte stands for 2^(byte-127) everywhere. (ggml doubles its table of values and divides the scale by two,
   which is the same.)

   Conversion keeps positions along K: in every layout position n has scale n/32. Which element of W has position n:
     NKI_STRIDED_X4   gate and up: q*(K/4) + t*128 + p, where n = 512t + 4p + q: code q of word (p,t)
                      down: 512t + q*(R/4) + p, where R = min(512, K-512t)
     NKI_WRAPX_WHOLE  as NKI_STRIDED_X4 has down
     NKI_WRAPX        likewise, but a last tile of 384 is one of 256 and one of 128
     all others       n
   So a PLAIN row made from NKI_STRIDED_X4 is a row of W permuted along K. To quantise for that layout, permute K as
   moe_nki_x4_permutation says, then quantise. A weight that is quantised already can become NKI_STRIDED_X4 without loss
   if the model's hidden units (for down: gate's and up's columns) are permuted likewise. With logical_order PLAIN has
   codes in logical order and scales by position: element index[n] has scale n/32. NKI layouts that group different
   elements cannot be converted into each other (UNSUPPORTED). Padding is written as 0 and not read: words and scales of
   a last x4 tile where K > 512, rows and columns of scales that are not used, the last high nibble of an odd row.
   Sources: nki-library's MX kernels of moe_cte (X4) and matmul_mxfp8 (WRAPX: swizzle_tensor, with fast_dma_transpose
   for WHOLE; 1X32: swizzle_tensor_1x32); gpt-oss's torch/weights.py; ggml's block_mxfp4. */
typedef enum moe_mx_layout {
  MOE_MX_LAYOUT_PLAIN = 0,             /* rows as OCP groups them. Any K */
  MOE_MX_LAYOUT_NKI_STRIDED_X4 = 1,    /* K % 4 == 0; gate and up: K % 512 == 0 */
  MOE_MX_LAYOUT_NKI_CONTIGUOUS_X4 = 2, /* likewise. The same bytes, but position n is element n */
  MOE_MX_LAYOUT_NKI_WRAPX = 3,         /* K % 32 == 0 */
  MOE_MX_LAYOUT_NKI_WRAPX_WHOLE = 4,   /* K % 32 == 0 */
  MOE_MX_LAYOUT_NKI_1X32 = 5,          /* K % 32 == 0 */
  MOE_MX_LAYOUT_GPT_OSS = 6,           /* K % 32 == 0, 4 bits */
  MOE_MX_LAYOUT_GGML = 7,              /* K % 32 == 0, 4 bits; the scales are within the codes */
  MOE_MX_LAYOUT_COUNT_
} moe_mx_layout;

/* Where the scale bytes lie. A row s of scales is an index of the second axis of an NKI layout. */
typedef enum moe_mx_scales {
  MOE_MX_SCALES_OWN = 0,           /* as the layout has them */
  MOE_MX_SCALES_NKI_OVERSIZED = 1, /* NKI layouts: as many rows as the words have, row s at (s/4)*32 + s%4 */
  MOE_MX_SCALES_NKI_PACKED = 2,    /* WRAPX*, 1X32: [E,ceil(K/2048)*128,parts*columns], row s = 16t + r at
                                      (t/4)*128 + (t%4)*4 + (r/4)*32 + r%4. Source: nki-library's
                                      get_scale_packing_info */
  MOE_MX_SCALES_TILED_128X4 = 3,   /* PLAIN, GPT_OSS: for each expert [ceil(rows/128),ceil(G/4)] tiles of 512 bytes,
                                      (row,g) at (row%32)*16 + (row%128/32)*4 + g%4 of its tile. Sources: cuBLAS's 1D
                                      block scaling factors layout, torchao's to_blocked */
  MOE_MX_SCALES_COUNT_
} moe_mx_scales;

/* Bytes of the four buffers of a conversion. */
typedef struct moe_mx_layout_bytes {
  size_t codes_in, scales_in, codes_out, scales_out;
} moe_mx_layout_bytes;

typedef struct moe_mx_layout_args {
  moe_mx_layout from, to;    /* the same: a copy, or other scales */
  moe_mx_scales scales_from, scales_to;
  int32_t element_bits;      /* 4 or 8 */
  int32_t parts;             /* 2: gate and up; 1: down, or any tensor without parts */
  int64_t E, K, columns;
  int logical_order;         /* 1: see above; between PLAIN and an NKI layout only */
  const void *codes_in;      /* in NKI layouts aligned to words */
  const uint8_t *scales_in;  /* not read for GGML */
  void *codes_out;           /* output; likewise */
  uint8_t *scales_out;       /* output; likewise */
  moe_mx_layout_bytes bytes; /* how large each buffer is: too small is an INVALID_SHAPE; 0 = not checked */
} moe_mx_layout_args;

/* Converts the codes and scales of E experts.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, OVERFLOW, MISALIGNED, OVERLAP, UNSUPPORTED. */
MOE_API moe_status moe_mx_layout_convert(moe_context *ctx, const moe_mx_layout_args *args);

/* *bytes: what the four buffers must have; 0 for GGML's scales. args' buffers and bytes are not read.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, OVERFLOW, UNSUPPORTED. */
MOE_API moe_status moe_mx_layout_size(moe_context *ctx, const moe_mx_layout_args *args, moe_mx_layout_bytes *bytes);

/* index[n] = the element at position n of `layout`, for n < K, as above. index: [K] output.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, OVERFLOW, MISALIGNED. */
MOE_API moe_status moe_nki_x4_permutation(moe_context *ctx, moe_mx_layout layout, int32_t parts, int64_t K,
                                          int64_t *index);

/* Vectors that belong to such weights, from logical order to the order of Trainium's kernels and back. Padding is
   written as 0 and not read. */
typedef enum moe_nki_vector {
  MOE_NKI_GATE_UP_BIAS = 0, /* [E,2,I], I % 4 == 0 <-> [E,min(I,512)/4,2,ceil(I/512),4]: (g, 512t + q*(R/4) + p) <->
                               (p,g,t,q), R = min(512, I-512t). Source: nki-library's MX kernels of moe_cte */
  MOE_NKI_DOWN_SCALE = 1,   /* [E,1,H], H % 128 == 0: c*128 + p <-> p*(H/128) + c. Scales per row of fp8 weights.
                               Source: nki-library's moe_cte_torch.py, quantisation strategy 5 */
  MOE_NKI_COUNT_
} moe_nki_vector;

typedef struct moe_nki_vector_args {
  moe_nki_vector kind;
  moe_dtype dtype;   /* of both vectors; must be named. Bits are moved as they are, NaNs as well */
  int to_nki;        /* 1: `in` is in logical order; 0: `out` is */
  int64_t E, length; /* length: I, or H */
  const void *in;
  void *out;         /* output */
} moe_nki_vector_args;

/* Converts such a vector, and tells how many bytes the two of a conversion have. Their pointers are not read for that.
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, OVERFLOW, MISALIGNED, OVERLAP. */
MOE_API moe_status moe_nki_vector_convert(moe_context *ctx, const moe_nki_vector_args *args);
MOE_API moe_status moe_nki_vector_size(moe_context *ctx, const moe_nki_vector_args *args, size_t *bytes_in,
                                       size_t *bytes_out);

#include "end.h"

#endif
