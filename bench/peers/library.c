/* The library for compare.py, as a shared object: layers are made, and their arguments filled in, as moe_bench does. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#define MOE_IMPLEMENTATION
#include "../../moe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "../../examples/pool.h"
#include "../dtypes.h"
#include "../limits.h"
#include "../tile.h"
#include "../layer.h"
#include "../weights.h"
#include "../make.h"
#include "../ops.h"
#include "../run.h"

static bench_setting peer;

void peer_start(int threads) {
  bench_machine_start(&peer.machine, threads);
  peer.ctx = bench_context(&peer.machine);
}

void peer_stop(void) { bench_machine_stop(&peer.machine); }

void peer_empty_caches(void) { bench_empty_caches(&peer.machine); }

/* weights: how they are stored, the dtype's name where plain. NULL when there is no memory for it. */
bench_layer *peer_make(const int64_t *shape, const char *dtype, const char *weights, int backward) {
  const bench_shape s = {shape[0], shape[1], shape[2], shape[3], shape[4]};
  const bench_dtype *type = bench_dtype_named(dtype);
  bench_layer *layer = (bench_layer *)malloc(sizeof *layer);
  if (layer)
    *layer = bench_make(&peer.ctx, s, type, bench_weights_named(weights, type), 0, 0,
                        backward ? BENCH_TRAINING : BENCH_EXPERTS);
  return layer;
}

void peer_free(bench_layer *layer) {
  bench_free(layer);
  free(layer);
}

/* Ends the program when the library refuses. */
void peer_run(const bench_layer *layer, const char *op) {
  bench_expect(&peer.ctx, bench_op_named(op)->run(&peer.ctx, layer));
}

/* Fills the checkpoint anew, after the hidden states were changed. */
void peer_save(const bench_layer *layer) {
  const moe_blockwise_mm_fwd_args args = bench_fwd_arguments(layer, layer->checkpoint);
  bench_expect(&peer.ctx, layer->dtype->fwd(&peer.ctx, &args));
}

/* Seconds that the machine's limits, as they are now, leave for an operation. */
double peer_limit(const bench_layer *layer, const char *op) {
  bench_result result = {.op = bench_op_named(op)};
  result.flops = result.op->flops(layer);
  result.bytes = result.op->bytes(layer);
  peer.dtype = layer->dtype;
  return bench_limit_seconds(&peer, &result, bench_measure_limits(&peer.machine, peer.machine.threads.threads));
}

/* NULL when there is no tensor of that name. */
void *peer_tensor(const bench_layer *layer, const char *name) {
  const moe_quantized_weight *gate_up = &layer->quantized_wgu, *down = &layer->quantized_wd;
  const struct {
    const char *name;
    void *memory;
  } tensors[] = {{"x", layer->x},
                 {"y", layer->y},
                 {"wgu", layer->wgu},
                 {"wd", layer->wd},
                 {"wgu_codes", (void *)(uintptr_t)gate_up->codes},
                 {"wgu_scales", (void *)(uintptr_t)gate_up->scales},
                 {"wd_codes", (void *)(uintptr_t)down->codes},
                 {"wd_scales", (void *)(uintptr_t)down->scales},
                 {"dy", layer->dy},
                 {"dx", layer->dx},
                 {"dwgu", layer->dwgu},
                 {"dwd", layer->dwd},
                 {"index", layer->index},
                 {"weights", layer->weights},
                 {"daffinities", layer->daffinities}};
  for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
    if (strcmp(tensors[i].name, name) == 0) return tensors[i].memory;
  return NULL;
}
