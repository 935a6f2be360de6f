/* Panels. C = A*B is formed nr = 64 columns at a time: B as a packed panel of nr columns, A as rows, of which a kc
   block at a time is packed from where they lie. Panels come in two kinds:
     MOE_PANEL_F32    float [K][64], K rounded up to even
     MOE_PANEL_PAIRS  bf16 [K/2][64][2]: two k side by side, for instructions that take a dot product of bf16 pairs */
#ifndef MOE_GEMM_PANEL_H
#define MOE_GEMM_PANEL_H

typedef enum moe_panel_kind_ { MOE_PANEL_F32, MOE_PANEL_PAIRS, MOE_PANEL_KINDS_ } moe_panel_kind_;

/* How a product sum rounds: as IEEE says, or as the bf16 dot product does (numeric contract 1). */
typedef enum moe_product_ { MOE_PRODUCT_F32, MOE_PRODUCT_BF16, MOE_PRODUCTS_ } moe_product_;

/* Where the sums of whole panels are stored as they are, rounded: row i at base + i * stride. NULL: nowhere. */
typedef struct moe_place_ {
  char *base;
  int64_t stride; /* in bytes */
  moe_dtype dtype;
  int nt; /* by non-temporal stores, which only packed A times packed B can; it takes bf16 not to be subnormal */
  /* With nt, where panels are not whole lines: room for 64 bytes for each row, the last of the panel before, which fill
     lines together with the next one's; and whether this panel is the first, the last. NULL: they are whole lines. */
  char *carry;
  int begins, ends;
} moe_place_;

/* To an element further on. */
MOE_INLINE void moe_place_move_(moe_place_ *place, int64_t row, int64_t column) {
  if (place->base) place->base += row * place->stride + column * moe_dtype_bytes_(place->dtype);
  if (place->carry) place->carry += row * 64;
}

#endif
