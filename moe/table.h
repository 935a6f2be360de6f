/* One table of kernels per instruction set, and the terms they share. */
#ifndef MOE_TABLE_H
#define MOE_TABLE_H

enum {
  MOE_MC = 384,   /* rows of A in flight: their products with a group of panels stay in cache */
  MOE_MC_MANY = 128,  /* with more, products of many panels fill the second-level cache */
  MOE_NC_PANELS = 8, /* panels of B beside each other with so many rows: they share what is gathered of A; */
  MOE_NC_PANELS_WIDE = 20, /*   where there is room, up to so many */
  MOE_DOT_CHAINS = 16,       /* chains of a dot product of two rows */
  MOE_DECODE_K_ = 128,    /* k that are unpacked at a time */
  MOE_SMALL_M_MAX = 32,       /* no more rows are multiplied as weights stream past; fewer as the table says, or */
  MOE_SMALL_M_BF16 = 5,  /*   so many where dot products take half the time on what is packed as well, or */
  MOE_SMALL_M_COLUMNS = 12, /*   so many where columns turn: of 2 bytes an element, with vectors of 16 */
  MOE_SMALL_M_COLUMNS_AT_ONCE = 16,          /* columns that turn at a time, */
  MOE_SMALL_M_COLUMN_BYTES = 4096,   /*   and bytes of each: as many are on their way */
  MOE_SMALL_M_VECTORS = 16, /* vectors of columns that a stream converts before it multiplies them with all rows; */
  MOE_SMALL_M_TWO_ROWS = 8,     /* with up to so many rows, which take about as long as memory, it reads from end to end, */
  MOE_SMALL_M_L1_BYTES = 2048,  /* and so many bytes of a row are on their way into the first-level cache, or twice that */
  MOE_PREFETCH_REPEAT_BYTES = 4096  /* bytes from a line to the next that is fetched with it where fetches are dropped and rows
                              follow each other; else it is the next row's */
};

/* How a product sum rounds: as IEEE says, or as the bf16 dot product does (numeric contract 1). */
typedef enum moe_product_ { MOE_PRODUCT_F32, MOE_PRODUCT_BF16, MOE_PRODUCTS_ } moe_product_;

/* The gated unit of a layer, its defaults resolved. */
typedef struct moe_glu_ {
  moe_activation activation;
  float alpha, up_offset;
  int skip_gate;
  uint32_t clamp;
  float gate_upper, gate_lower, up_upper, up_lower;
} moe_glu_;

/* Rows of at most MOE_NR columns on their way through the gated unit, 64 floats apart. */
typedef struct moe_glu_rows_ {
  int64_t rows, n;
  float *gate, *up;                 /* forward: products in, clamped pre-activations out; backward: those in */
  const float *gate_bias, *up_bias; /* forward, or NULL */
  const float *pre_scale;           /* forward: multiplies a row's products, or NULL */
  const float *scale;               /* multiplies a row's m on its way out (backward: and dm on its way in), or NULL */
  float *m;                         /* out: scale * m */
  const float *dm;                  /* backward in: gradient of m before scale */
  float *dgate, *dup;               /* backward out; may be gate and up */
  float *dot;                       /* backward out: each row's <dm, m>, both before scale */
} moe_glu_rows_;

#define MOE_ELEMENT_COUNT_ (MOE_ELEMENT_E2M1 + 1)

/* A narrow element format: see MOE_ELEMENT_LIST, and what follows from it for codes in 32-bit workers. */
typedef struct moe_element_format_ {
  int bits, fraction, bias;
  uint32_t max, infinity, nan;                      /* codes; 0: there is none */
  uint32_t first_normal, first_infinity, first_nan; /* magnitudes from here on */
  int shift;                                        /* from the code's fraction to a float's */
  uint32_t rebias;                                  /* to add to the exponent, in place */
  uint32_t magic;                                   /* a float whose last place is the smallest subnormal */
} moe_element_format_;

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
  int wide;                  /* codes of 8 bits */
  moe_scale_ rule;           /* of scale bytes */
  float factor;              /* where there are none */
  int known;                 /* there are none, and all are numbers within the largest code: that is not looked at */
  moe_element_format_ format;
  uint32_t away;             /* as in moe_cast_ */
  uint32_t most;             /* the code of what is too large */
  int drop;                  /* that is a NaN, without a sign */
  uint32_t least, big;       /* floats' bits: the least normal number; see encoding */
  uint8_t below[16];         /* fp8 magnitudes are so many steps above where a normal number of their value would be */
  int64_t prefetch, prefetch_to;   /* groups, about, that are fetched before codes are read, and before any are written */
} moe_numbers_;

/* Bits of a scaled magnitude that does not overflow the sum of encoding, as numbers under a scale byte never do. */
enum { MOE_SUM_LIMIT_ = 200 << 23 };

/* Under this scale byte and those above it, a subnormal bf16 becomes zero in any format. */
#define MOE_SCALE_CLEAR_ 32

/* Groups on their way to codes: their scales are found before they are encoded, so that neither waits for the other. */
enum {
  MOE_GROUPS_SOME_ = 32,
  MOE_GROUPS_FEW_ = 8, /* are enough for tables under one factor */
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

/* Panel columns [col, col+width) from K rows of n <= width elements; the rest of the columns becomes zero. */
typedef void (*moe_pack_rows_fn_)(void *panel, int64_t col, int64_t width, const moe_rows_ *rows, int64_t k, int64_t n);
/* A few rows times many columns that are read once, in the order they lie in: k rows, `stride` bytes apart, of n
   elements in each part. Column j of part p belongs to panel j / (64/parts): its sum for row i is at c[panel * c_stride
   + 64*i + 64/parts*p + j % (64/parts)], and is added to. */
typedef struct moe_small_m_ {
  const moe_element_format_ *format; /* of codes, or NULL: of dtype, */
  moe_dtype dtype;
  moe_load_rows_fn_ load;            /*   and what loads those */
  int64_t size;                      /* bytes of an element */
  const float *x;                    /* element q of row i at x[i * x_stride + q] */
  int64_t rows, x_stride, k;
  const char *base[2];
  int64_t parts, stride, n, prefetch; /* ahead: how many bytes further on to fetch, eight rows or more */
  int contiguous;                      /* rows follow each other in memory, with all parts */
  int drops;                       /* the core drops fetches while too many are under way */
  int64_t pair_rows;               /* up to so many rows are multiplied with two rows of columns at a time */
  float *c;
  int64_t c_stride;
} moe_small_m_;

/* A few rows times n columns of k elements each, which are read once: a column's lie side by side, the next one's
   `stride` bytes on. Column j's sum for row i is at c[64*i + j], and is added to. */
typedef struct moe_small_m_columns_ {
  const char *base;
  int64_t stride, size, n, k; /* size: bytes of an element */
  moe_dtype dtype;
  const char *x; /* rows, x_stride bytes apart, as the product's tile takes them */
  int64_t x_stride, rows;
  float *c;
  moe_prefetch_at_ *fetch; /* as many lines are fetched as are read */
} moe_small_m_columns_;

/* Where the sums of a part's columns from j on are, if those of the `wide` columns before are at c: `width` columns of
   it lie side by side in a panel. */
MOE_INLINE float *moe_small_m_c_(const moe_small_m_ *s, float *c, int64_t j, int64_t wide, int64_t width) {
  return c + wide + (j & (width - 1) ? 0 : s->c_stride - width);
}

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

typedef struct moe_kernels {
  moe_isa isa;
  moe_panel_kind_ panel[MOE_PRODUCTS_]; /* the kind of panel each product takes */
  int64_t kc_bytes[MOE_PANEL_KINDS_]; /* bytes of a row that are multiplied at a time, */
  int64_t kc_short_rows[MOE_PANEL_KINDS_];  /* half of them of up to so many rows; of pairs at least MOE_SMALL_M_MAX */
  int64_t nr_parts;                   /* in which the f32 tile walks a panel's columns */
  int64_t prefetch_bytes;                  /* of the B are fetched before they are wanted */
  moe_ukernel_fn_ ukernel[MOE_PRODUCTS_];
  int64_t small_m_codes_rows;                   /* up to so many rows, at most MOE_SMALL_M_MAX, codes stream past, */
  int64_t small_m_plain_rows[MOE_DTYPE_COUNT_]; /*   or plain weights, which cost little to unpack, */
  int64_t small_m_columns_rows;                 /*   or columns of 2 bytes an element, of 4 twice as many */
  int drops_prefetches; /* as long as too many are under way */
  int half_width_stores; /* of vectors in the time that a whole one is multiplied */
  int bf16_by_mode;  /* tile[MOE_PRODUCT_BF16] relies on the flushing mode of the floating-point environment */
  moe_load_rows_fn_ load_rows[MOE_DTYPE_COUNT_];
  moe_store_rows_fn_ store_rows[MOE_DTYPE_COUNT_]; /* contract 5 */
  /* Of 4 bits (e2m1), of 8 (fp8). */
  void (*load_codes[2])(float *dst, const uint8_t *src, int64_t n, const moe_element_format_ *format);
  void (*store_codes[2])(uint8_t *dst, const float *src, int64_t n, const moe_element_format_ *format,
                         const moe_cast_ *cast);
  /* Groups of 32 to codes and back, up to the first that is none of numbers, or whose scale is none. Returns how many.
     scales NULL: numbers->factor is the scale or, to codes, its reciprocal. For every line of x one of `fetch` is
     fetched. */
  int64_t (*quantize_groups[MOE_DTYPE_COUNT_])(uint8_t *codes, uint8_t *scales, const void *x, int64_t groups,
                                               const moe_numbers_ *numbers, const moe_prefetch_block_ *fetch);
  int64_t (*dequantize_groups[MOE_DTYPE_COUNT_])(void *x, const uint8_t *codes, const uint8_t *scales, int64_t groups,
                                                 const moe_numbers_ *numbers);
  moe_pack_codes_fn_ pack_codes_rows[2], pack_codes_columns[2];
  /* `width` columns of a row of an f32 panel from n words of four codes, that from bit `shift` on times its scale byte.
     */
  void (*pack_words_row[2])(float *row, const uint8_t *words, int shift, const uint8_t *scale, int64_t n, int64_t width,
                            const moe_element_format_ *format);
  uint32_t (*magnitude[MOE_DTYPE_COUNT_])(const void *x, int64_t n); /* the largest bit pattern of |x[i]| */
  moe_pack_rows_fn_ pack_rows[MOE_PANEL_KINDS_][MOE_DTYPE_COUNT_];
  /* Of any dtype, of pairs bf16 only; or NULL. */
  moe_ukernel_fn_ ukernel_pack_b[MOE_PANEL_KINDS_];   /* MOE_MR rows, an even k */
  moe_ukernel_fn_ ukernel_pack_a[MOE_PANEL_KINDS_]; /* multiples of these, MOE_OVERLAP_K_ k */
  moe_ukernel_fn_ ukernel_transpose[MOE_PANEL_KINDS_];   /* the same */
  /* The tile whose A is a panel, too, row i its column i, and whose sums can leave; or NULL. */
  moe_ukernel_fn_ ukernel_packed_a[MOE_PANEL_KINDS_];
  /* If there are pairs: those of an f32 panel, of codes. */
  void (*pair_panel)(void *pairs, const float *panel, int64_t k);
  void (*pack_pairs_rows[2])(void *pairs, const moe_codes_ *codes);
  void (*pack_pairs_columns[2])(void *pairs, const moe_codes_ *codes);
  /* Of a dtype, of columns of codes; or NULL. bf16 products rely on the flushing mode. */
  void (*small_m)(const moe_small_m_ *small_m);
  void (*small_m_fp8)(const moe_small_m_ *small_m);
  void (*small_m_bf16)(const moe_small_m_ *small_m); /* of bf16, in bf16 products; or NULL */
  void (*small_m_columns[MOE_PRODUCTS_])(const moe_small_m_columns_ *columns); /* of a dtype, of pairs bf16; or NULL */
  /* Adds rows' products with a panel that pack_codes_columns would make of the stream's parts; of 4 bits, of 8; or
     NULL. */
  void (*small_m_codes[2])(const moe_small_m_ *small_m, const moe_codes_ *parts);
  void (*glu_forward)(const moe_glu_ *glu, const moe_glu_rows_ *rows);
  void (*glu_backward)(const moe_glu_ *glu, const moe_glu_rows_ *rows); /* limits rounded to the checkpoint's type */
  void (*activate)(const moe_glu_ *glu, const float *x, float *y, float *dy, int64_t n);
  void (*add_scaled)(float *sum, const float *x, float scale, int64_t n); /* sum += scale*x */
  /* For rows of x, 64 apart: row to[i] of sum, 64 apart as well, += scale[i] * (x + bias), in order; bias, scale NULL:
     0, 1; to NULL: all add up in one row. */
  void (*add_rows)(float *sum, const int32_t *to, const float *x, const float *bias, const float *scale, int64_t rows,
                   int64_t n);
  void (*scale_row)(float *x, float scale, int64_t n);
  void (*multiply_row)(float *x, const float *y, int64_t n);                      /* x *= y */
  /* rows of whole vectors, 64 apart, of which n columns are there, times these columns' factors, rounded to bf16 */
  void (*scale_to_bf16)(float *panel, const float *scale, int64_t rows, int64_t n);
  void (*copy_nt)(void *dst, const void *src, int64_t bytes);                   /* by non-temporal stores */
  /* 32-bit words: rows x cols, at most 64 x 64, rows so many bytes apart */
  void (*transpose_tile)(void *dst, int64_t dst_stride, const void *src, int64_t stride, int64_t rows, int64_t cols);
  /* An f32 panel from 64 columns of k elements of 2 bytes each, `stride` bytes apart, of which whole vectors are read;
     or NULL. */
  void (*transpose_u16[MOE_DTYPE_COUNT_])(float *panel, const void *columns, int64_t stride, int64_t k);
  float (*dot)(const float *a, const float *b, int64_t n);                        /* contract 4 */
  void (*exp_row)(float *y, const float *x, float shift, int64_t n);              /* y = exp(x - shift) */
  /* y = sigmoid or sqrt-softplus of x; dy: its derivative, or NULL */
  void (*score_row)(float *y, float *dy, const float *x, moe_score_function score_function, int64_t n);
} moe_kernels;

/* One row, of any length. */
MOE_FN void moe_load_row_(const moe_kernels *kernels, moe_dtype dtype, float *dst, const void *src, int64_t n) {
  const moe_rows_ row = {(const char *)src, 0, NULL};
  kernels->load_rows[dtype](dst, 0, &row, 1, n);
}
MOE_FN void moe_store_row_(const moe_kernels *kernels, moe_dtype dtype, void *dst, const float *src, int64_t n) {
  kernels->store_rows[dtype](dst, 0, NULL, src, 1, n);
}

#endif
