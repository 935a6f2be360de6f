/* The library's product tile by itself, its operands in the core's own caches: what is lost there layers win back a
   little of, at most, by longer rows; and a neighbour on the same core takes more of it than of a loop without
   loads. */
#ifndef MOE_BENCH_TILE_H
#define MOE_BENCH_TILE_H

enum {
  TILE_K = 128,
  TILE_RUN = 2 * MOE_MR, /* rows at a time */
  TILE_TURNS = 960,      /* a millisecond: bringing the operands in is to be nothing beside it */
  TILE_PIECE = 1024      /* of a row: at least what any table has */
};

typedef struct bench_tile {
  moe_ukernel_fn_ multiply;
  moe_ukernel_ tile;
  _Alignas(BENCH_LINE) char panel[TILE_K * MOE_NR * sizeof(float)]; /* as packed ones are */
  _Alignas(BENCH_LINE) char rows[TILE_RUN * TILE_PIECE];
  /* what a next tile would add to is fetched, too */
  _Alignas(BENCH_LINE) float c[(TILE_RUN + MOE_MR) * MOE_NR];
} bench_tile;

static void bench_tile_task(void *arg, int64_t index) {
  bench_tile tile = *(const bench_tile *)arg; /* each thread has its own */
  (void)index;
  tile.tile.panel = tile.panel;
  tile.tile.a_next = tile.rows;
  tile.tile.c_next = tile.tile.c = tile.c;
  tile.tile.row = tile.rows;
  for (int i = 0; i < TILE_TURNS; i++) tile.multiply(&tile.tile);
}

/* GFLOP/s that the tile keeps up for about `seconds`. */
static double bench_tile_rate(bench_machine *m, moe_dtype dtype, double seconds) {
  const moe_kernels *kernels = moe_kernels_();
  bench_tile tile = {.multiply = kernels->gemm->ukernel[dtype == MOE_DTYPE_BF16 ? MOE_PRODUCT_BF16 : MOE_PRODUCT_F32]};
  const double flops = 2.0 * TILE_RUN * MOE_NR * TILE_K * TILE_TURNS;
  tile.tile.rows = TILE_RUN;
  tile.tile.k = TILE_K;
  tile.tile.add = 1;
  return bench_sustained(m, bench_tile_task, &tile, flops, seconds) * 1e-9;
}

#endif
