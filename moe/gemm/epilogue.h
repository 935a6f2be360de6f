/* What becomes of a product's panels. */
#ifndef MOE_GEMM_EPILOGUE_H
#define MOE_GEMM_EPILOGUE_H

typedef struct moe_epilogue_ {
  /* Takes panel p's products c, which it may change, once they are complete; it rounds as everywhere. NULL: they
     stay in c. Panels are counted from the product's first. */
  void (*store_panel)(void *arg, int64_t p, float *c);
  /* (optional) What that reads, which is prefetched during the panel's last kc block. */
  void (*reads)(void *arg, int64_t p, moe_prefetch_ *prefetch);
  void *arg;
  const moe_prefetch_ *into; /* instead of reads: where the products go, prefetched meanwhile; or NULL */
  /* Instead of store_panel, where the first panel's columns are stored and those of the others next to them, if they
     are whole and k > 0: once the products of a micro-kernel are. */
  moe_place_ to;
} moe_epilogue_;

MOE_FN void moe_epilogue_init_(moe_epilogue_ *epilogue, void (*store_panel)(void *arg, int64_t p, float *c),
                               void *arg) {
  memset(epilogue, 0, sizeof *epilogue);
  epilogue->store_panel = store_panel;
  epilogue->arg = arg;
}

#endif
