/* A layer to time: random tensors, and a routing with a given skew. */
#ifndef MOE_BENCH_LAYER_H
#define MOE_BENCH_LAYER_H

typedef struct bench_shape {
  int64_t T, H, I, E, K;
} bench_shape;

typedef struct bench_layer {
  bench_shape shape;
  moe_dtype dtype;
  int64_t size, B, N;
  void *x, *wgu, *wd, *dy, *y, *dx, *dwgu, *dwd, *checkpoint;
  float *affinities, *daffinities, *weights;
  int32_t *index, *ids, *experts, *conditions;
  void *workspace;
  size_t workspace_bytes;
  int64_t bytes; /* of all tensors */
} bench_layer;

static uint64_t bench_random(uint64_t *state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

static void *bench_alloc(bench_layer *layer, int64_t count, int64_t size) {
  void *p = aligned_alloc(64, (size_t)((count * size + 63) / 64 * 64));
  if (!p) {
    fprintf(stderr, "moe_bench: not enough memory for %lld bytes\n", (long long)(count * size));
    exit(1);
  }
  memset(p, 0, (size_t)(count * size));
  layer->bytes += count * size;
  return p;
}

/* Uniform values in [-scale, scale) of the layer's type. */
static void *bench_tensor(bench_layer *layer, int64_t count, float scale, uint64_t *seed) {
  enum { PIECE = 4096 };
  char *p = (char *)bench_alloc(layer, count, layer->size);
  float buffer[PIECE];
  for (int64_t at = 0; at < count; at += PIECE) {
    const int64_t n = count - at < PIECE ? count - at : PIECE;
    for (int64_t i = 0; i < n; i++) buffer[i] = (float)((int64_t)(bench_random(seed) >> 40) - (1 << 23)) * scale * 0x1p-23f;
    void *dst = p + at * layer->size;
    if (layer->dtype == MOE_DTYPE_F32) memcpy(dst, buffer, (size_t)n * sizeof *buffer);
    if (layer->dtype == MOE_DTYPE_BF16) moe_bf16_from_f32(NULL, (moe_bf16 *)dst, buffer, n);
    if (layer->dtype == MOE_DTYPE_FP16) moe_fp16_from_f32(NULL, (moe_fp16 *)dst, buffer, n);
  }
  return p;
}

/* K different experts per token, uniform; with skew s, a share s of the tokens has expert 0 among them. */
static void bench_choose(bench_layer *layer, double skew, uint64_t *seed) {
  const bench_shape s = layer->shape;
  for (int64_t t = 0; t < s.T; t++)
    for (int64_t k = 0; k < s.K; k++) {
      int taken = 1;
      while (taken) {
        const int hot = k == 0 && skew > 0 && (double)(bench_random(seed) >> 11) * 0x1p-53 < skew;
        layer->index[t * s.K + k] = hot ? 0 : (int32_t)(bench_random(seed) % (uint64_t)s.E);
        taken = 0;
        for (int64_t j = 0; j < k; j++) taken |= layer->index[t * s.K + j] == layer->index[t * s.K + k];
      }
      layer->weights[t * s.K + k] = 1.0f / (float)s.K;
    }
}

static moe_status bench_route(moe_context *ctx, bench_layer *layer) {
  const bench_shape s = layer->shape;
  moe_route_blocks_args args = {.T = s.T, .E = s.E, .K = s.K, .B = layer->B, .N = layer->N, .expert_index = layer->index,
                                .expert_weights = layer->weights, .expert_affinities_masked = layer->affinities,
                                .token_position_to_id = layer->ids, .block_to_expert = layer->experts, .conditions = layer->conditions};
  return moe_route_blocks(ctx, &args);
}

static moe_blockwise_layer bench_arguments(const bench_layer *layer) {
  const bench_shape s = layer->shape;
  moe_blockwise_layer args = {.T = s.T, .H = s.H, .I = s.I, .E = s.E, .N = layer->N, .B = layer->B, .hidden_states = layer->x,
                              .expert_affinities_masked = layer->affinities, .affinity_dtype = MOE_DTYPE_F32,
                              .gate_up_proj_weight = layer->wgu, .down_proj_weight = layer->wd,
                              .token_position_to_id = layer->ids, .block_to_expert = layer->experts, .conditions = layer->conditions};
  return args;
}

static moe_status bench_forward(moe_context *ctx, const bench_layer *layer, int checkpoint) {
  const moe_blockwise_mm_fwd_args args = {.layer = bench_arguments(layer), .output = layer->y, .workspace = layer->workspace,
                                          .workspace_bytes = layer->workspace_bytes,
                                          .gate_up_activations_T = checkpoint ? layer->checkpoint : NULL};
  switch (layer->dtype) {
    case MOE_DTYPE_F32: return moe_blockwise_mm_fwd_f32(ctx, &args);
    case MOE_DTYPE_FP16: return moe_blockwise_mm_fwd_fp16(ctx, &args);
    default: return moe_blockwise_mm_fwd_bf16(ctx, &args);
  }
}

static moe_status bench_backward(moe_context *ctx, const bench_layer *layer) {
  const moe_blockwise_mm_bwd_args args = {
      .layer = bench_arguments(layer), .gate_up_proj_act_checkpoint_T = layer->checkpoint, .output_hidden_states_grad = layer->dy,
      .hidden_states_grad = layer->dx, .expert_affinities_masked_grad = layer->daffinities, .gate_up_proj_weight_grad = layer->dwgu,
      .down_proj_weight_grad = layer->dwd, .workspace = layer->workspace, .workspace_bytes = layer->workspace_bytes};
  switch (layer->dtype) {
    case MOE_DTYPE_F32: return moe_blockwise_mm_bwd_f32(ctx, &args);
    case MOE_DTYPE_FP16: return moe_blockwise_mm_bwd_fp16(ctx, &args);
    default: return moe_blockwise_mm_bwd_bf16(ctx, &args);
  }
}

static size_t bench_workspace(moe_context *ctx, const bench_layer *layer, int backward) {
  moe_blockwise_mm_fwd_args fwd = {.layer = bench_arguments(layer)};
  moe_blockwise_mm_bwd_args bwd = {.layer = bench_arguments(layer), .gate_up_proj_act_checkpoint_T = layer->checkpoint};
  size_t bytes = 0;
  moe_status status;
  switch (layer->dtype) {
    case MOE_DTYPE_F32:
      status = backward ? moe_blockwise_mm_bwd_f32_workspace_size(ctx, &bwd, &bytes) : moe_blockwise_mm_fwd_f32_workspace_size(ctx, &fwd, &bytes);
      break;
    case MOE_DTYPE_FP16:
      status = backward ? moe_blockwise_mm_bwd_fp16_workspace_size(ctx, &bwd, &bytes) : moe_blockwise_mm_fwd_fp16_workspace_size(ctx, &fwd, &bytes);
      break;
    default:
      status = backward ? moe_blockwise_mm_bwd_bf16_workspace_size(ctx, &bwd, &bytes) : moe_blockwise_mm_fwd_bf16_workspace_size(ctx, &fwd, &bytes);
      break;
  }
  return status == MOE_OK ? bytes : 0;
}

static bench_layer bench_make(moe_context *ctx, bench_shape s, moe_dtype dtype, int64_t B, double skew, int backward) {
  bench_layer layer = {.shape = s, .dtype = dtype, .size = (int64_t)moe_dtype_size(dtype), .B = B, .N = moe_route_blocks_count(s.T, s.E, s.K, B)};
  uint64_t seed = 88172645463325252u;
  layer.x = bench_tensor(&layer, s.T * s.H, 1.0f, &seed);
  layer.wgu = bench_tensor(&layer, s.E * s.H * 2 * s.I, 0.05f, &seed);
  layer.wd = bench_tensor(&layer, s.E * s.I * s.H, 0.05f, &seed);
  layer.y = bench_alloc(&layer, s.T * s.H, layer.size);
  layer.affinities = (float *)bench_alloc(&layer, (s.T + 1) * s.E, 4);
  layer.ids = (int32_t *)bench_alloc(&layer, layer.N * B, 4);
  layer.experts = (int32_t *)bench_alloc(&layer, layer.N, 4);
  layer.conditions = (int32_t *)bench_alloc(&layer, layer.N + 1, 4);
  layer.index = (int32_t *)bench_alloc(&layer, s.T * s.K, 4);
  layer.weights = (float *)bench_alloc(&layer, s.T * s.K, 4);
  if (backward) {
    layer.checkpoint = bench_alloc(&layer, layer.N * 2 * s.I * B, layer.size);
    layer.dy = bench_tensor(&layer, s.T * s.H, 1.0f, &seed);
    layer.dx = bench_alloc(&layer, s.T * s.H, layer.size);
    layer.dwgu = bench_alloc(&layer, s.E * s.H * 2 * s.I, layer.size);
    layer.dwd = bench_alloc(&layer, s.E * s.I * s.H, layer.size);
    layer.daffinities = (float *)bench_alloc(&layer, (s.T + 1) * s.E, 4);
  }
  bench_choose(&layer, skew, &seed);
  const size_t forward = bench_workspace(ctx, &layer, 0), back = backward ? bench_workspace(ctx, &layer, 1) : 0;
  layer.workspace_bytes = forward > back ? forward : back;
  layer.workspace = malloc(layer.workspace_bytes);
  return layer;
}

static void bench_free(bench_layer *layer) {
  void *all[] = {layer->x, layer->wgu, layer->wd, layer->dy, layer->y, layer->dx, layer->dwgu, layer->dwd, layer->checkpoint, layer->affinities,
                 layer->daffinities, layer->weights, layer->index, layer->ids, layer->experts, layer->conditions, layer->workspace};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

#endif
