/* How microscaled weights are stored, and converting between the layouts. */
#ifndef MOE_API_LAYOUTS_H
#define MOE_API_LAYOUTS_H

#include "context.h"

#include "begin.h"

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
  MOE_MX_LAYOUT_GGML = 7,              /* K % 32 == 0, 4 bits; scales are in codes, the scale pointer is not used */
  MOE_MX_LAYOUT_COUNT_
} moe_mx_layout;

/* Where the scale bytes lie, if not as above. Scale rows s of an NKI layout are its second axis. */
typedef enum moe_mx_scales {
  MOE_MX_SCALES_OWN = 0,           /* as above ("compact") */
  MOE_MX_SCALES_NKI_OVERSIZED = 1, /* NKI: as many rows as the words have, row s at (s/4)*32 + s%4: four per quadrant */
  MOE_MX_SCALES_NKI_PACKED = 2,    /* WRAPX*, 1X32: [E,ceil(K/2048)*128,parts*columns]; s = 16t+r is at row
                                      (t/4)*128 + (t%4)*4 + (r/4)*32 + r%4. Source: get_scale_packing_info */
  MOE_MX_SCALES_TILED_128X4 = 3,   /* PLAIN, GPT_OSS: per expert [ceil(rows/128),ceil(G/4)] tiles of 512 bytes, (row,g)
                                      of a tile at (row%32)*16 + (row%128/32)*4 + g%4. Source: cuBLAS, 1D block scaling
                                      factors layout; torchao's to_blocked */
  MOE_MX_SCALES_COUNT_
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
MOE_API moe_status moe_mx_layout_convert(moe_context *ctx, const moe_mx_layout_args *args);

/* What the four buffers need (0 for GGML's scales). Pointers and args->bytes are not looked at. Errors: as above. */
MOE_API moe_status moe_mx_layout_size(moe_context *ctx, const moe_mx_layout_args *args, moe_mx_layout_bytes *bytes);

/* index[n], n < K: the logical element at position n of `layout`, as above. Errors: NULL_ARGUMENT, INVALID_SHAPE,
   INVALID_OPTION, OVERFLOW, MISALIGNED. */
MOE_API moe_status moe_nki_x4_permutation(moe_context *ctx, moe_mx_layout layout, int32_t parts, int64_t K,
                                          int64_t *index);

/* The vectors beside those weights, in the order of Trainium's kernels and back. */
typedef enum moe_nki_vector {
  MOE_NKI_GATE_UP_BIAS = 0, /* [E,2,I] <-> [E,min(I,512)/4,2,ceil(I/512),4]: (g, 512t + q*(R/4) + p) <-> (p,g,t,q) with
                               R = min(512, I-512t). I % 4 == 0; padding becomes 0. Source: nki-library, as X4 */
  MOE_NKI_DOWN_SCALE = 1,   /* [E,1,H]: logical c*128 + p <-> stored p*(H/128) + c; H % 128 == 0. Per-row scales of
                               fp8 weights. Source: nki-library's moe_cte_torch.py, quantisation strategy 5 */
  MOE_NKI_COUNT_
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
MOE_API moe_status moe_nki_vector_convert(moe_context *ctx, const moe_nki_vector_args *args);
MOE_API moe_status moe_nki_vector_size(moe_context *ctx, const moe_nki_vector_args *args, size_t *bytes_in,
                                       size_t *bytes_out);

#include "end.h"

#endif
