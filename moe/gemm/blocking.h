/* Blocking: every number that says how much of a product is worked on at a time. The numbers of an instruction set are
   its column of the table below; moe/README.md says where each was measured. */
#ifndef MOE_GEMM_BLOCKING_H
#define MOE_GEMM_BLOCKING_H

enum {
  MOE_MC = 384,             /* rows of A in flight: their products with a group of panels stay in cache */
  MOE_MC_MANY = 128,        /* with more, products of many panels fill the second-level cache */
  MOE_NC_PANELS = 8,        /* panels of B beside each other with so many rows: they share what is gathered of A; */
  MOE_NC_PANELS_WIDE = 20,  /*   where there is room, up to so many */
  MOE_DECODE_K_ = 128,      /* k that are unpacked at a time */
  MOE_SMALL_M_MAX = 32,     /* no more rows are multiplied as weights stream past; fewer as the table says, or */
  MOE_SMALL_M_BF16 = 5,     /*   so many where dot products take half the time on what is packed as well, or */
  MOE_SMALL_M_COLUMNS = 12, /*   so many where columns turn: of 2 bytes an element, with vectors of 16 */
  MOE_SMALL_M_COLUMNS_AT_ONCE = 16, /* columns that turn at a time, */
  MOE_SMALL_M_COLUMN_BYTES = 4096,  /*   and bytes of each: as many are on their way */
  MOE_SMALL_M_VECTORS = 16, /* vectors of columns that a stream converts before it multiplies them with all rows; */
  MOE_SMALL_M_TWO_ROWS = 8, /* with up to so many rows, which take about as long as memory, it reads from end to end, */
  MOE_SMALL_M_L1_BYTES =
      2048, /* and so many bytes of a row are on their way into the first-level cache, or twice that */
  MOE_PREFETCH_REPEAT_BYTES =
      4096 /* bytes from a line to the next that is fetched with it where fetches are dropped and rows
                              follow each other; else it is the next row's */
};

/*                                                        scalar        avx2        avx512    avx512bf16 (pairs) */
/* Vectors of a micro-kernel's accumulators side by side: the panel's 64 columns are walked in parts of that width. */
#define MOE_NR_VECTORS_avx2          2
#define MOE_NR_VECTORS_avx512        4
/* Whether packed A times packed B has a micro-kernel: that wants one as wide as a panel. */
#define MOE_PACKED_A_scalar          0
#define MOE_PACKED_A_avx2            0
#define MOE_PACKED_A_avx512          1
/* kc: bytes of a row that are multiplied at a time, so that a part of the panel stays in the first-level cache; */
#define MOE_KC_BYTES_scalar          512
#define MOE_KC_BYTES_avx2            1024
#define MOE_KC_BYTES_avx512          512
#define MOE_KC_BYTES_avx512bf16      1024
/*   half of them for up to so many rows, where packing is a good part of the work. */
#define MOE_KC_SHORT_ROWS_scalar     0
#define MOE_KC_SHORT_ROWS_avx2       96
#define MOE_KC_SHORT_ROWS_avx512     0
#define MOE_KC_SHORT_ROWS_avx512bf16 48
/* Bytes of B that are prefetched before they are wanted. */
#define MOE_PREFETCH_BYTES_scalar    (32 << 10)
#define MOE_PREFETCH_BYTES_avx2      (32 << 10)
#define MOE_PREFETCH_BYTES_avx512    (128 << 10)
/* Up to so many rows nothing is packed: f32 weights, 16-bit ones, codes. */
#define MOE_SMALL_M_F32_scalar       0
#define MOE_SMALL_M_F32_avx2         15
#define MOE_SMALL_M_F32_avx512       20
#define MOE_SMALL_M_16BIT_scalar     0
#define MOE_SMALL_M_16BIT_avx2       10
#define MOE_SMALL_M_16BIT_avx512     20
#define MOE_SMALL_M_CODES_scalar     0
#define MOE_SMALL_M_CODES_avx2       16
#define MOE_SMALL_M_CODES_avx512     32
/* Rows of weights side by side for one row of A (small_m_one.inl); 0: two, for a few rows (small_m_two.inl). */
#define MOE_SMALL_M_ONE_DEEP_avx2    8
#define MOE_SMALL_M_ONE_DEEP_avx512  0

/* What the drivers read of it. */
typedef struct moe_blocking_ {
  int64_t kc_bytes[MOE_PANEL_KINDS_], kc_short_rows[MOE_PANEL_KINDS_]; /* of pairs at least MOE_SMALL_M_MAX */
  int64_t nr_parts; /* in which the f32 micro-kernel walks a panel's columns */
  int64_t prefetch_bytes;
  int64_t small_m_plain_rows[MOE_DTYPE_COUNT_], small_m_codes_rows;
  int64_t small_m_columns_rows; /* columns of 2 bytes an element; of 4 twice as many */
} moe_blocking_;

#endif
