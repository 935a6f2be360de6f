/* What an instruction set brings: one table per family, all of them constant. */
#ifndef MOE_KERNELS_H
#define MOE_KERNELS_H

/* How the cores of a maker behave where it matters to kernels. */
typedef struct moe_core_ {
  int drops_prefetches;                         /* while too many are in flight; others wait until there is room */
  int small_m_two_rows, small_m_two_rows_16bit; /* see MOE_SMALL_M_TWO_ROWS */
} moe_core_;

typedef struct moe_kernels {
  moe_isa isa;
  const moe_core_ *core;
  const moe_vec_table_ *vec;
  const moe_gemm_table_ *gemm;
  const moe_blocking_ *blocking; /* of products: gemm's, or numbers that were tuned */
  const moe_quant_table_ *quant;
  const moe_router_table_ *router;
} moe_kernels;

#endif
