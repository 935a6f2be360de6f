/* The kernels of narrow formats: elements and groups to codes and back, codes to B panels. */
#ifndef MOE_QUANT_TABLE_H
#define MOE_QUANT_TABLE_H

/* How a conversion to codes rounds and ends. */
typedef struct moe_cast_ {
  uint32_t away;               /* 1: ties away from zero */
  uint32_t overflow, infinity; /* the codes of what is finite but too large, and of infinity */
} moe_cast_;

/* A group's scale byte, by rule: 0 or, if that is more, ((bits of amax + round) >> 23) + offset. */
typedef struct moe_scale_ {
  uint32_t round;
  int32_t offset;
} moe_scale_;

/* How numbers under a scale become codes, and back. */
typedef struct moe_numbers_ {
  int wide;        /* codes of 8 bits */
  moe_scale_ rule; /* of scale bytes */
  float factor;    /* where there are none */
  int known;       /* there are none, and all are numbers within the largest code: that is not looked at */
  moe_element_format_ format;
  uint32_t away;       /* as in moe_cast_ */
  uint32_t most;       /* the code of what is too large */
  int drop;            /* that is a NaN, without a sign */
  uint32_t least, big; /* floats' bits: the least normal number; see encoding */
  uint8_t below[16];   /* fp8 magnitudes are so many steps above where a normal number of their value would be */
  int64_t prefetch, prefetch_to; /* groups, about, that are fetched before codes are read, and before any are written */
} moe_numbers_;

/* Bits of a scaled magnitude that does not overflow the sum of encoding, as numbers under a scale byte never do. */
enum { MOE_SUM_LIMIT_ = 200 << 23 };

/* Under this scale byte and those above it, a subnormal bf16 becomes zero in any format. */
#define MOE_SCALE_CLEAR_ 32

/* Groups on their way to codes: their scales are found before they are encoded, so that neither waits for the other. */
enum {
  MOE_GROUPS_SOME_ = 32,
  MOE_GROUPS_FEW_ = 8,  /* are enough for tables under one factor */
  MOE_U16_BOTTOM_ = 191 /* below exponent 0 of e2m1: an octave to half of the least code, and 63 */
};
typedef struct moe_some_groups_ {
  float factor[MOE_GROUPS_SOME_];  /* to be multiplied by */
  uint32_t over[MOE_GROUPS_SOME_]; /* not 0 where some would be beyond MOE_SUM_LIMIT_ */
  /* For 16-bit workers: the code's exponent 0 in a bf16's place, of e2m1 less MOE_U16_BOTTOM_, twice; 0: not for them,
     which no group is if they are `plain`. */
  uint32_t zero[MOE_GROUPS_SOME_];
  int plain;
} moe_some_groups_;

/* To codes under a factor that is no power of two: where an octave of bf16 steps from one fp8 code to the next. It is
   the same in every octave in which codes are normal, and eight neighbours never hold two steps. With entry i of `add`,
   bf16 8*i to 8*i+7 of the octave carry into the code's bits where they step; `base` is what all codes are then too
   far, the first entry in the upper byte included. */
typedef struct moe_octave_ {
  uint8_t add[16];
  uint32_t base;
} moe_octave_;

/* A scale byte with which no normal element under- or overflows. */
#define MOE_PLAIN_SCALE_(byte) ((byte) >= 16 && (byte) < 240)

/* Codes that become columns [col, col+width) of k rows of a panel, of which n are there; the rest becomes zero.
   pack_codes_rows: a row's codes lie side by side, rows `stride` bytes apart; columns share scale bytes by 32, scale
   rows scale_stride apart. pack_codes_columns: a column's codes lie side by side, columns `stride` apart, `group` bytes
   from 32 codes to the next 32; its scale bytes lie scale_group apart, columns scale_stride. scale NULL: 1. Two codes
   of 4 bits in a byte: even and odd or, with `split`, j and j+16 of 32. */
typedef struct moe_codes_ {
  const moe_element_format_ *format;
  const uint8_t *codes, *scale;
  int64_t stride, group, scale_stride, scale_group;
  int split;
  int64_t col, width, n, k;
  int64_t prefetch; /* of a stream: bytes from a code to one that will be wanted soon, to be fetched */
} moe_codes_;
typedef void (*moe_pack_codes_fn_)(float *panel, const moe_codes_ *codes);

/* Pairs of entries: of 4 bits (e2m1), of 8 (fp8). */
typedef struct moe_quant_table_ {
  void (*load_codes[2])(float *dst, const uint8_t *src, int64_t n, const moe_element_format_ *format);
  void (*store_codes[2])(uint8_t *dst, const float *src, int64_t n, const moe_element_format_ *format,
                         const moe_cast_ *cast);
  uint32_t (*magnitude[MOE_DTYPE_COUNT_])(const void *x, int64_t n); /* the largest bit pattern of |x[i]| */
  /* Groups of 32 to codes and back, up to the first that is none of numbers, or whose scale is none. Returns how many.
     scales NULL: numbers->factor is the scale or, to codes, its reciprocal. For every line of x one of `fetch` is
     fetched. */
  int64_t (*quantize_groups[MOE_DTYPE_COUNT_])(uint8_t *codes, uint8_t *scales, const void *x, int64_t groups,
                                               const moe_numbers_ *numbers, const moe_prefetch_block_ *fetch);
  int64_t (*dequantize_groups[MOE_DTYPE_COUNT_])(void *x, const uint8_t *codes, const uint8_t *scales, int64_t groups,
                                                 const moe_numbers_ *numbers);
  /* To f32 panels and, where there are such, to panels of pairs; */
  moe_pack_codes_fn_ pack_codes_rows[2], pack_codes_columns[2];
  void (*pack_pairs_rows[2])(void *pairs, const moe_codes_ *codes);
  void (*pack_pairs_columns[2])(void *pairs, const moe_codes_ *codes);
  /*   `width` columns of a row of an f32 panel from n words of four codes, that from bit `shift` on times its scale
       byte; */
  void (*pack_words_row[2])(float *row, const uint8_t *words, int shift, const uint8_t *scale, int64_t n, int64_t width,
                            const moe_element_format_ *format);
  /*   rows of whole vectors, 64 apart, of which n columns are there, times these columns' factors, rounded to bf16. */
  void (*scale_to_bf16)(float *panel, const float *scale, int64_t rows, int64_t n);
  /* A few rows' products with codes, nothing packed: rows of fp8; with a panel that pack_codes_columns would make of the
     parts. Or NULL. */
  void (*small_m_fp8)(const moe_small_m_ *small_m);
  void (*small_m_codes[2])(const moe_small_m_ *small_m, const moe_codes_ *parts);
} moe_quant_table_;

#endif
