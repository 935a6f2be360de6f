/* What an instruction set brings: one table per family, all of them constant. */
#ifndef MOE_KERNELS_H
#define MOE_KERNELS_H

typedef struct moe_kernels {
  moe_isa isa;
  const moe_core_ *core;
  const moe_vec_table_ *vec;
  const moe_gemm_table_ *gemm;
  const moe_quant_table_ *quant;
  const moe_router_table_ *router;
} moe_kernels;

#endif
