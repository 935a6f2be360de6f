/* The kernels of narrow formats: elements and groups to codes and back, codes to panels of B. */
#ifndef MOE_QUANT_TABLE_H
#define MOE_QUANT_TABLE_H

/* How a conversion to codes rounds, and what becomes of floats that are too large. */
typedef struct moe_cast_ {
  uint32_t away;               /* 1: ties away from zero */
  uint32_t overflow, infinity; /* the codes of finite floats that are too large, and of infinity */
  uint32_t to_zero;            /* 1: ties toward zero, and zeros without a sign */
} moe_cast_;

/* A rule for a group's scale byte: ((bits of amax + round) >> 23) + offset, but at least 0. */
typedef struct moe_scale_ {
  uint32_t round;
  int32_t offset;
} moe_scale_;

/* How groups of finite elements become codes, and back. */
typedef struct moe_numbers_ {
  int wide;        /* codes of 8 bits */
  moe_scale_ rule; /* of scale bytes */
  float factor;    /* without scale bytes: the scale or, to encode, its reciprocal */
  int known;       /* without scale bytes: all are known to be finite and not to overflow */
  moe_element_format_ format;
  int general;                   /* another element or cast than these ways are for: groups are converted one by one */
  uint32_t away;                 /* as in moe_cast_ */
  uint32_t most;                 /* the code of what is too large */
  int drop;                      /* that code is NaN, which has no sign */
  uint32_t least, big;           /* bits of floats: the least normal number; see number in elements.inl */
  uint8_t below[16];             /* from an fp8 magnitude to the normal number of its value, if fraction <= 3 */
  int64_t prefetch, prefetch_to; /* distances, in groups, at which codes are prefetched and lines that are written */
} moe_numbers_;

/* Up to these bits of a scaled magnitude the sum in number does not overflow. Under scale bytes none is larger. */
enum { MOE_SUM_LIMIT_ = 200 << 23 };

/* Under this scale byte and larger ones a subnormal bf16 becomes zero in any format. */
#define MOE_SCALE_CLEAR_ 32

/* Groups that are encoded together: all scales are found before any element is encoded, so that neither waits for the
   other. */
enum {
  MOE_GROUPS_SOME_ = 32,
  MOE_GROUPS_FEW_ = 8,  /* are enough for a table under one factor */
  MOE_U16_BOTTOM_ = 191 /* from exponent 0 of e2m1 down to u16_narrow's bottom: a binade, and 63 */
};
typedef struct moe_some_groups_ {
  float factor[MOE_GROUPS_SOME_];  /* to multiply by */
  uint32_t over[MOE_GROUPS_SOME_]; /* not 0 where some are above MOE_SUM_LIMIT_ */
  /* For 16-bit arithmetic, twice in a word: the code's exponent 0 as a bf16, of e2m1 less MOE_U16_BOTTOM_. 0: the group
     needs the general path, which none does if `plain`. */
  uint32_t zero[MOE_GROUPS_SOME_];
  int plain;
} moe_some_groups_;

/* To fp8 under a factor that is no power of two: where codes change within a binade of bf16. That is the same in every
   binade in which codes are normal, and at most once in eight neighbours. Entry i of `add` makes bf16 8*i to 8*i+7 of
   the binade carry into the code's bits where the code changes. `base` is what the result is then too large by, with
   the first entry in the upper byte, as lookup2x16 has it. */
typedef struct moe_binade_ {
  uint8_t add[16];
  uint32_t base;
} moe_binade_;

/* Whether under this scale byte no normal element overflows or becomes subnormal. */
#define MOE_PLAIN_SCALE_(byte) ((byte) >= 16 && (byte) < 240)

/* Under this plain scale byte and larger ones no subnormal element becomes subnormal either. */
enum { MOE_MARK_SCALE_ = 32 };

/* Codes to decode to columns [col, col+width) of k rows of a panel: n columns of them exist, the others become zero.
   pack_codes_rows: a row's codes are contiguous and rows `stride` bytes apart; 32 columns share a scale byte, rows of
   scales are scale_stride apart. pack_codes_columns: a column's codes are contiguous, but `group` bytes from 32 codes
   to the next 32, and columns `stride` apart; a column's scale bytes are scale_group apart, columns of scales
   scale_stride. scale NULL: 1. Two codes of 4 bits in a byte, the first one low, are even and odd or, with `split`, j
   and j+16 of 32. */
typedef struct moe_codes_ {
  const moe_element_format_ *format;
  const uint8_t *codes, *scale;
  int64_t stride, group, scale_stride, scale_group;
  int split;
  int64_t col, width, n, k;
  int64_t prefetch;             /* for small_m_codes: bytes from a code to one that is prefetched */
  const moe_byte_table_ *table; /* for pack_bytes_*: with scales, marked */
} moe_codes_;
typedef void (*moe_pack_codes_fn_)(float *panel, const moe_codes_ *codes);
struct moe_codes_prefetch_;
typedef int (*moe_pack_bytes_fn_)(void *panel, const moe_codes_ *codes);

/* Entries in pairs are for codes of 4 bits (e2m1) and of 8 (fp8). */
typedef struct moe_quant_table_ {
  void (*load_codes[2])(float *dst, const uint8_t *src, int64_t n, const moe_element_format_ *format);
  void (*store_codes[2])(uint8_t *dst, const float *src, int64_t n, const moe_element_format_ *format,
                         const moe_cast_ *cast);
  uint32_t (*magnitude[MOE_DTYPE_COUNT_])(const void *x, int64_t n); /* the largest bit pattern of |x[i]| */
  /* Groups of 32 to codes and back, up to the first that is not finite or whose scale byte is 0 or 255. Returns how
     many. scales NULL: see moe_numbers_.factor. For each line of x that is read, one of `fetch` is prefetched. */
  int64_t (*quantize_groups[MOE_DTYPE_COUNT_])(uint8_t *codes, uint8_t *scales, const void *x, int64_t groups,
                                               const moe_numbers_ *numbers, const moe_prefetch_block_ *fetch);
  int64_t (*dequantize_groups[MOE_DTYPE_COUNT_])(void *x, const uint8_t *codes, const uint8_t *scales, int64_t groups,
                                                 const moe_numbers_ *numbers);
  /* To f32 panels; to panels of bf16 pairs, where there are such. */
  moe_pack_codes_fn_ pack_codes_rows[2], pack_codes_columns[2];
  void (*pack_pairs_rows[2])(void *pairs, const moe_codes_ *codes);
  void (*pack_pairs_columns[2])(void *pairs, const moe_codes_ *codes);
  /* `width` columns of a row of an f32 panel from n words of four codes: the codes from bit `shift` on times the words'
     scale bytes. */
  void (*pack_words_row[2])(float *row, const uint8_t *words, int shift, const uint8_t *scale, int64_t n, int64_t width,
                            const moe_element_format_ *format);
  /* Rows of whole vectors, 64 apart, of which n columns exist, times these columns' factors, rounded to bf16. */
  void (*scale_to_bf16)(float *panel, const float *scale, int64_t rows, int64_t n);
  /* Rounds the columns of k <= 32 rows of an f32 panel to MX, a group each, or returns 0 where one needs the general
     path. */
  int (*round_panel)(float *panel, int64_t k, const moe_numbers_ *numbers);
  /* A few rows of A times codes that are not packed: rows of fp8; the columns of pack_codes_columns. Or NULL. */
  void (*small_m_fp8)(const moe_small_m_ *small_m);
  void (*small_m_codes[2])(const moe_small_m_ *small_m, const moe_codes_ *parts);
  /* Tables of bytes: 128 values times a scale, rounded to bf16. `mark` sets the last bit, which is 0, of numbers that
     are not zero: scale bytes are added to their exponents. Or NULL: the CPU cannot look them up. */
  void (*byte_table)(moe_byte_table_ *table, const moe_bf16 *value, float scale, int mark);
  /* Rows of codes, and columns, 32 of a column side by side, to a panel. Return 0 where a scale byte is not plain. */
  moe_pack_bytes_fn_ pack_bytes_rows[MOE_PANEL_KINDS_], pack_bytes_columns[MOE_PANEL_KINDS_];
  /* A few rows of A times rows of codes; times the first and the last 32 columns of a panel, a
     column's codes side by side. */
  void (*small_m_bytes[MOE_PRODUCTS_])(const moe_small_m_ *small_m);
  void (*small_m_bytes_columns[MOE_PRODUCTS_])(const moe_small_m_ *small_m, const moe_codes_ *codes,
                                               struct moe_codes_prefetch_ *walk);
} moe_quant_table_;

#endif
