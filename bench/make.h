/* Makes a layer: random tensors, and a routing with a given skew. */
#ifndef MOE_BENCH_MAKE_H
#define MOE_BENCH_MAKE_H

/* Uniform values in [-scale, scale) of the layer's type; a long tensor repeats its first values. */
static void *bench_tensor(bench_layer *layer, int64_t count, float scale) {
  enum { PIECE = 4096, PERIOD = 300 * PIECE };
  char *p = (char *)bench_alloc(layer, count, layer->size);
  float buffer[PIECE];
  for (int64_t at = 0; at < count && at < PERIOD; at += PIECE) {
    const int64_t n = count - at < PIECE ? count - at : PIECE;
    for (int64_t i = 0; i < n; i++)
      buffer[i] = (float)((int64_t)(bench_random(&layer->seed) >> 40) - (1 << 23)) * scale * 0x1p-23f;
    (void)bench_from_f32(NULL, layer->dtype->dtype, p + at * layer->size, buffer, n);
  }
  for (int64_t at = PERIOD; at < count; at += PERIOD) {
    const int64_t n = count - at < PERIOD ? count - at : PERIOD;
    memcpy(p + at * layer->size, p, (size_t)(n * layer->size));
  }
  return p;
}

/* K different experts per token, uniform; with skew s, a share s of the tokens has expert 0 among them. Their weights
   are between 1/8 and 1/4 and exact in every type. */
static void bench_choose(bench_layer *layer) {
  const bench_shape s = layer->shape;
  for (int64_t t = 0; t < s.T; t++)
    for (int64_t k = 0; k < s.K; k++) {
      int taken = 1;
      while (taken) {
        const int hot = k == 0 && (double)(bench_random(&layer->seed) >> 11) * 0x1p-53 < layer->skew;
        layer->index[t * s.K + k] = hot ? 0 : (int32_t)(bench_random(&layer->seed) % (uint64_t)s.E);
        taken = 0;
        for (int64_t j = 0; j < k; j++) taken |= layer->index[t * s.K + j] == layer->index[t * s.K + k];
      }
      layer->weights[t * s.K + k] = (float)(128 + bench_random(&layer->seed) % 128) * 0x1p-10f;
    }
}

static void bench_alloc_workspace(moe_context *ctx, bench_layer *layer) {
  const moe_blockwise_mm_fwd_args fwd = bench_fwd_arguments(layer, layer->checkpoint);
  const moe_blockwise_mm_bwd_args bwd = bench_bwd_arguments(layer);
  size_t back = 0;
  bench_expect(ctx, layer->dtype->fwd_workspace(ctx, &fwd, &layer->workspace_bytes));
  if (layer->parts & BENCH_GRADIENTS) bench_expect(ctx, layer->dtype->bwd_workspace(ctx, &bwd, &back));
  if (back > layer->workspace_bytes) layer->workspace_bytes = back;
  if (layer->parts & BENCH_TOPK) {
    const moe_layer args = bench_topk_arguments(layer);
    bench_expect(ctx, layer->dtype->layer_fwd_workspace(ctx, &args, &layer->workspace_bytes));
    if (layer->checkpoint) bench_expect(ctx, layer->dtype->layer_bwd_workspace(ctx, &args, layer->checkpoint, &back));
    if (back > layer->workspace_bytes) layer->workspace_bytes = back;
  }
  if (layer->parts & BENCH_MLP) {
    const moe_mlp_fwd_mxfp8_args mlp_fwd = bench_mlp_fwd_arguments(layer);
    const moe_mlp_bwd_mxfp8_args mlp_bwd = bench_mlp_bwd_arguments(layer);
    bench_expect(ctx, moe_mlp_fwd_mxfp8_workspace_size(ctx, &mlp_fwd, &back));
    if (back > layer->workspace_bytes) layer->workspace_bytes = back;
    bench_expect(ctx, moe_mlp_bwd_mxfp8_workspace_size(ctx, &mlp_bwd, &back));
    if (back > layer->workspace_bytes) layer->workspace_bytes = back;
  }
  layer->workspace = bench_pages((int64_t)layer->workspace_bytes);
}

static void bench_alloc_routing(bench_layer *layer) {
  const bench_shape s = layer->shape;
  layer->x = bench_tensor(layer, s.T * s.H, 1.0f);
  layer->y = bench_alloc(layer, s.T * s.H, layer->size);
  layer->affinities = (float *)bench_alloc(layer, (s.T + 1) * s.E, 4);
  layer->weights = (float *)bench_alloc(layer, s.T * s.K, 4);
  layer->index = (int32_t *)bench_alloc(layer, s.T * s.K, 4);
  layer->ids = (int32_t *)bench_alloc(layer, layer->N * layer->B, 4);
  layer->experts = (int32_t *)bench_alloc(layer, layer->N, 4);
  layer->conditions = (int32_t *)bench_alloc(layer, layer->N + 1, 4);
  bench_choose(layer);
}

static void bench_alloc_gradients(bench_layer *layer) {
  const bench_shape s = layer->shape;
  layer->checkpoint = bench_alloc(layer, layer->N * 2 * s.I * layer->B, layer->size);
  layer->dy = bench_tensor(layer, s.T * s.H, 1.0f);
  layer->dx = bench_alloc(layer, s.T * s.H, layer->size);
  layer->dwgu = bench_alloc(layer, s.E * s.H * 2 * s.I, layer->size);
  layer->dwd = bench_alloc(layer, s.E * s.I * s.H, layer->size);
  layer->daffinities = (float *)bench_alloc(layer, (s.T + 1) * s.E, 4);
}

static void bench_alloc_router(bench_layer *layer) {
  const bench_shape s = layer->shape;
  layer->router = bench_tensor(layer, s.H * s.E, 0.05f);
  layer->logits = (float *)bench_alloc(layer, s.T * s.E, 4);
  layer->chosen_weights = (float *)bench_alloc(layer, s.T * s.K, 4);
  layer->chosen = (int32_t *)bench_alloc(layer, s.T * s.K, 4);
}

static bench_packed bench_pack(moe_context *ctx, bench_layer *layer, moe_pack_layout layout, const void *weight,
                               const moe_quantized_weight *quantized) {
  bench_packed packed = {0};
  moe_pack_weights_args args = bench_pack_arguments(layer, layout, weight, quantized, packed);
  bench_expect(ctx, layer->dtype->pack_size(ctx, &args, &packed.bytes));
  packed.memory = bench_alloc(layer, (int64_t)packed.bytes, 1);
  args = bench_pack_arguments(layer, layout, weight, quantized, packed);
  bench_expect(ctx, layer->dtype->pack(ctx, &args));
  return packed;
}

/* The same product from weights as they are stored, with its gradients. */
static void bench_alloc_grouped(moe_context *ctx, bench_layer *layer) {
  const bench_shape s = layer->shape;
  layer->quantized_w = layer->storage->as;
  if (layer->storage->name)
    bench_fill_codes(layer, &layer->quantized_w, bench_weights_bytes(ctx, &layer->quantized_w, s.E, s.H, 1, 2 * s.I));
  else layer->w = bench_tensor(layer, s.E * 2 * s.I * s.H, 0.05f);
  layer->products_grad = bench_tensor(layer, s.T * s.K * 2 * s.I, 1.0f);
  layer->slots_grad = bench_alloc(layer, s.T * s.K * s.H, layer->size);
  layer->dw = bench_alloc(layer, s.E * 2 * s.I * s.H, layer->size);
  const moe_grouped_gemm_args args = bench_grouped_arguments(layer);
  for (int i = 0; i < 3; i++) {
    size_t bytes;
    bench_expect(ctx, layer->dtype->gemm_workspace[i](ctx, &args, &bytes));
    if (bytes > layer->workspace_bytes) layer->workspace_bytes = bytes;
  }
  layer->workspace = bench_pages((int64_t)layer->workspace_bytes);
}

/* The first product of the layer alone, X [T,H] by prepacked weights [E,2I,H]: positions sorted by expert, tokens
   ascending. */
static void bench_alloc_gemm(moe_context *ctx, bench_layer *layer) {
  const bench_shape s = layer->shape;
  if (layer->parts & BENCH_GEMM) {
    void *w = bench_tensor(layer, s.E * 2 * s.I * s.H, 0.05f);
    layer->packed_w = bench_pack(ctx, layer, MOE_PACK_GROUPED, w, &bench_weights_plain.as);
    free(w);
  }
  layer->products = bench_alloc(layer, s.T * s.K * 2 * s.I, layer->size);
  layer->rows = (int32_t *)bench_alloc(layer, s.E, 4);
  layer->sorted = (int32_t *)bench_alloc(layer, s.T * s.K, 4);
  int32_t at = 0;
  for (int32_t e = 0; e < s.E; e++)
    for (int64_t slot = 0; slot < s.T * s.K; slot++)
      if (layer->index[slot] == e) layer->sorted[at++] = (int32_t)slot, layer->rows[e]++;
}

static void bench_alloc_weights(moe_context *ctx, bench_layer *layer) {
  const bench_shape s = layer->shape;
  if (layer->storage->name) {
    bench_alloc_quantized(ctx, layer);
    return;
  }
  layer->wgu = bench_tensor(layer, s.E * s.H * 2 * s.I, 0.05f);
  layer->wd = bench_tensor(layer, s.E * s.I * s.H, 0.05f);
  layer->stored = 3.0 * (double)s.H * (double)s.I * (double)layer->size;
}

static void bench_alloc_codes(moe_context *ctx, bench_layer *layer) {
  const bench_shape s = layer->shape;
  layer->codes = (uint8_t *)bench_alloc(layer, s.T * s.H, 1);
  layer->scales = bench_alloc(layer, s.T * ((s.H + 15) / 16 + 4), 1);
  if (layer->storage->as.zero_points) layer->zeros = (uint8_t *)bench_alloc(layer, s.T * ((s.H + 15) / 16), 1);
  bench_expect(ctx, bench_quantize_x(ctx, layer));
}

/* B = 0: 128 rows a block, fewer where there are fewer tokens. The layer is routed, its checkpoint filled. */
static bench_layer bench_make(moe_context *ctx, bench_shape s, const bench_dtype *dtype, const bench_weights *storage,
                              int64_t B, double skew, unsigned parts) {
  bench_layer layer = {.shape = s,
                       .dtype = dtype,
                       .storage = storage,
                       .size = (int64_t)moe_dtype_size(dtype->dtype),
                       .skew = skew,
                       .parts = parts,
                       .seed = 88172645463325252u};
  layer.B = B > 0 ? B : s.T < 128 ? (s.T + 7) / 8 * 8 : 128;
  layer.N = moe_route_blocks_count(s.T, s.E, s.K, layer.B);
  bench_alloc_routing(&layer);
  bench_expect(ctx, bench_route_blocks(ctx, &layer));
  if (parts & BENCH_ROUTER) bench_alloc_router(&layer);
  if ((parts & BENCH_ARRAYS) && storage->name) bench_alloc_codes(ctx, &layer);
  if ((parts & BENCH_ARRAYS) && !storage->name) {
    layer.plain = (float *)bench_alloc(&layer, s.T * s.H, 4);
    bench_expect(ctx, bench_to_f32(ctx, dtype->dtype, layer.plain, layer.x, s.T * s.H));
  }
  if (parts & (BENCH_GEMM | BENCH_GROUPED)) bench_alloc_gemm(ctx, &layer);
  if (parts & BENCH_GROUPED) bench_alloc_grouped(ctx, &layer);
  if (!(parts & BENCH_EXPERTS)) return layer;
  bench_alloc_weights(ctx, &layer);
  if (parts & BENCH_PACKED) {
    layer.packed_wgu = bench_pack(ctx, &layer, MOE_PACK_GATE_UP, layer.wgu, &layer.quantized_wgu);
    layer.packed_wd = bench_pack(ctx, &layer, MOE_PACK_DOWN, layer.wd, &layer.quantized_wd);
  }
  if (parts & BENCH_GRADIENTS) bench_alloc_gradients(&layer);
  bench_alloc_workspace(ctx, &layer);
  if (parts & BENCH_GRADIENTS) {
    const moe_blockwise_mm_fwd_args args = bench_fwd_arguments(&layer, layer.checkpoint);
    const moe_layer topk = bench_topk_arguments(&layer);
    bench_expect(ctx, parts & BENCH_TOPK ? dtype->layer_fwd(ctx, &topk, layer.y, layer.checkpoint)
                                         : dtype->fwd(ctx, &args));
  }
  return layer;
}

static void bench_free(bench_layer *layer) {
  void *all[] = {layer->x,
                 layer->y,
                 layer->affinities,
                 layer->weights,
                 layer->index,
                 layer->ids,
                 layer->experts,
                 layer->conditions,
                 layer->wgu,
                 layer->wd,
                 (void *)(uintptr_t)layer->quantized_wgu.codes,
                 (void *)(uintptr_t)layer->quantized_wgu.scales,
                 (void *)(uintptr_t)layer->quantized_wd.codes,
                 (void *)(uintptr_t)layer->quantized_wd.scales,
                 layer->dy,
                 layer->dx,
                 layer->dwgu,
                 layer->dwd,
                 layer->checkpoint,
                 layer->daffinities,
                 layer->packed_wgu.memory,
                 layer->packed_wd.memory,
                 layer->packed_w.memory,
                 layer->products,
                 layer->rows,
                 layer->sorted,
                 layer->w,
                 layer->products_grad,
                 layer->slots_grad,
                 layer->dw,
                 (void *)(uintptr_t)layer->quantized_w.codes,
                 (void *)(uintptr_t)layer->quantized_w.scales,
                 (void *)(uintptr_t)layer->quantized_wgu.global_scale,
                 (void *)(uintptr_t)layer->quantized_wgu.zero_points,
                 (void *)(uintptr_t)layer->quantized_wd.global_scale,
                 (void *)(uintptr_t)layer->quantized_wd.zero_points,
                 (void *)(uintptr_t)layer->quantized_w.global_scale,
                 (void *)(uintptr_t)layer->quantized_w.zero_points,
                 layer->router,
                 layer->logits,
                 layer->chosen_weights,
                 layer->chosen,
                 layer->plain,
                 layer->codes,
                 layer->scales,
                 layer->zeros,
                 layer->workspace};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

#endif
