/* Blocking: every number that says how much of a product is worked on at a time. The numbers of an instruction set are
   its column of the table below; moe/README.md says where each was measured. */
#ifndef MOE_GEMM_BLOCKING_H
#define MOE_GEMM_BLOCKING_H

/* ------------------------------------------------------------------------------------- for all instruction sets */

enum {
  MOE_MC = 384,             /* rows of A at a time: their products with a group of panels stay in cache */
  MOE_MC_MANY = 128,        /* with more, products of many panels fill the second-level cache */
  MOE_NC_PANELS = 8,        /* panels of B at a time with so many rows, which share what is packed of A, */
  MOE_NC_PANELS_WIDE = 20,  /*   where there is room up to so many, */
  MOE_NC_PANELS_MAX = 128,  /*   and of few rows up to so many */
  MOE_ITEMS_PER_WORKER = 4, /* work items that several workers get at least, where there are panels enough */
  MOE_KC_MULTIPLE = 32,     /* kc is a multiple of it, but for the last block */
  MOE_DECODE_K_ = 128,      /* k that are decoded at a time, */
  MOE_DECODE_PAIRS_K_ = 32, /*   or to pairs through float */
  /* Nothing is packed of B for so few rows at most; fewer as the table below says, or */
  MOE_SMALL_M_MAX = 32,
  MOE_SMALL_M_BF16 = 5,             /*   where dot products take half the time on packed panels as well, or */
  MOE_SMALL_M_CODE_ROWS = 20,       /*   where rows of codes have scale bytes, or */
  MOE_SMALL_M_COLUMNS = 12,         /*   where columns are transposed: of 2 bytes an element, with vectors of 16 */
  MOE_SMALL_M_COLUMNS_AT_ONCE = 16, /* columns that are transposed at a time, and bytes of each: as many are */
  MOE_SMALL_M_COLUMN_BYTES = 4096,  /*   in flight from memory */
  MOE_SMALL_M_VECTORS = 16,         /* vectors of B that are converted before they are multiplied with all rows */
  /* Two rows of B are read from end to end (small_m_two.inl) for so many rows of A, which take about as long as memory;
     for fewer of 16-bit elements where stores are half as wide; where prefetches are not dropped it pays for one only.
     */
  MOE_SMALL_M_TWO_ROWS = 8,
  MOE_SMALL_M_TWO_ROWS_16BIT = 2,
  MOE_SMALL_M_L1_BYTES = 2048, /* of a row in flight into the first-level cache meanwhile, or twice that */
  /* Where prefetches are dropped and rows follow each other, from a line to the one that is prefetched again. */
  MOE_PREFETCH_REPEAT_BYTES = 4096
};

/* ----------------------------------------------------------------------------------------- by instruction set */

/* Vectors of a micro-kernel's accumulators side by side: the panel's 64 columns are walked in parts of that width. */
#define MOE_NR_VECTORS_avx2          2
#define MOE_NR_VECTORS_avx512        4
/* Of few rows times MX codes: rows whose sums are in registers, and whether e2m1 is looked up as it is multiplied. */
#define MOE_MX_ROWS_avx2             2
#define MOE_MX_ROWS_avx512           4
#define MOE_MX_LOOKUP_avx2           0
#define MOE_MX_LOOKUP_avx512         1
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

/* What the drivers read of it. The first two lines are the kernels'; the others only move work, and may be tuned. */
typedef struct moe_blocking_ {
  int64_t kc_bytes[MOE_PANEL_KINDS_], kc_short_rows[MOE_PANEL_KINDS_]; /* of pairs at least MOE_SMALL_M_MAX */
  int64_t nr_parts; /* in which the f32 micro-kernel walks a panel's columns */
  int64_t kc[MOE_PANEL_KINDS_], mc, nc_panels, items_per_worker; /* kc: elements, at most kc_bytes */
  int64_t prefetch_bytes;
  /* Rows up to which nothing is packed, at most MOE_SMALL_M_MAX: of rows of a dtype, of bf16 by dot products, of codes,
     of columns of a dtype. */
  int64_t small_m_plain_rows[MOE_DTYPE_COUNT_], small_m_bf16_rows, small_m_codes_rows,
      small_m_columns_rows[MOE_DTYPE_COUNT_];
} moe_blocking_;

/* kc at most, in elements, for so many rows. Up to kc_short_rows, where packing is a good part of the work, half of it:
   what is packed and multiplied stays closer. With more rows a panel comes from the second-level cache as fast as it is
   used, and sums move half as often. */
MOE_FN int64_t moe_kc_max_(const moe_blocking_ *blocking, moe_panel_kind_ kind, int64_t rows) {
  const int64_t half = blocking->kc_bytes[kind] / (kind == MOE_PANEL_F32 ? 8 : 4);
  return rows <= blocking->kc_short_rows[kind] ? moe_min_(half, blocking->kc[kind]) : blocking->kc[kind];
}

/* kc for a contraction over k: blocks are as equal as can be, since a short one would hide neither the sums that it
   moves nor what is stored meanwhile. */
MOE_FN int64_t moe_kc_(const moe_blocking_ *blocking, moe_panel_kind_ kind, int64_t rows, int64_t k) {
  const int64_t most = moe_kc_max_(blocking, kind, rows);
  return moe_min_(most, moe_ceil_div_(moe_equal_part_(moe_max_(1, k), most), MOE_KC_MULTIPLE) * MOE_KC_MULTIPLE);
}

#endif
