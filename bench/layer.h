/* A layer to time: its tensors, and the arguments of the library's calls. make.h makes one. */
#ifndef MOE_BENCH_LAYER_H
#define MOE_BENCH_LAYER_H

typedef struct bench_shape {
  int64_t T, H, I, E, K;
} bench_shape;

/* What an operation wants to find in its layer. */
enum {
  BENCH_EXPERTS = 1,
  BENCH_GRADIENTS = 2,
  BENCH_PACKED = 4,
  BENCH_GEMM = 8,
  BENCH_ROUTER = 16,
  BENCH_ARRAYS = 32,
  BENCH_GROUPED = 64, /* BENCH_GEMM from weights as they are stored, and back */
  BENCH_MLP = 128,    /* with EXPERTS and GRADIENTS: expert 0 as a dense MLP of bf16 */
  BENCH_TOPK = 256    /* with EXPERTS: the layer from top-k ids */
};

/* Weights in the layout of the kernels. */
typedef struct bench_packed {
  void *memory;
  size_t bytes;
} bench_packed;

typedef struct bench_layer {
  bench_shape shape;
  const bench_dtype *dtype;
  int64_t size, B, N;
  double skew;
  unsigned parts;
  void *x, *y;                                 /* [T,H] */
  float *affinities, *weights;                 /* [T+1,E], [T,K] */
  int32_t *index, *ids, *experts, *conditions; /* [T,K], [N,B], [N], [N+1] */
  const struct bench_weights *storage;
  void *wgu, *wd; /* BENCH_EXPERTS; or: */
  moe_quantized_weight quantized_wgu, quantized_wd;
  double stored;                           /* bytes of one expert's weights */
  void *dy, *dx, *dwgu, *dwd, *checkpoint; /* BENCH_GRADIENTS */
  float *daffinities;
  bench_packed packed_wgu, packed_wd, packed_w; /* BENCH_PACKED, the last one BENCH_GEMM */
  void *products;                               /* BENCH_GEMM: [T*K,2I] */
  int32_t *rows, *sorted;                       /* BENCH_GEMM: [E], [T*K] */
  void *w, *products_grad, *slots_grad, *dw;    /* BENCH_GROUPED: [E,2I,H]; [T*K,2I]; [T*K,H]; [E,2I,H] */
  moe_quantized_weight quantized_w;
  void *router; /* BENCH_ROUTER: [H,E], and what the router writes */
  float *logits, *chosen_weights;
  int32_t *chosen;
  float *plain;   /* BENCH_ARRAYS: [T,H]; or, quantised: */
  uint8_t *codes; /*   of x, as `storage` says, */
  void *scales;   /*   rows of E8M0 bytes or of groups' scales, or a float per row */
  uint8_t *zeros; /*   zero points, or NULL */
  void *workspace;
  size_t workspace_bytes;
  int64_t bytes; /* of all tensors */
  uint64_t seed;
} bench_layer;

/* Ends the program with the library's own sentence. */
static void bench_expect(moe_context *ctx, moe_status status) {
  if (status == MOE_OK) return;
  fprintf(stderr, "moe_bench: %s: %s\n", moe_status_str(status), ctx->message);
  exit(1);
}

static uint64_t bench_random(uint64_t *state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

static void *bench_alloc(bench_layer *layer, int64_t count, int64_t size) {
  void *p = bench_pages(count * size);
  if (!p) {
    fprintf(stderr, "moe_bench: not enough memory for %lld bytes\n", (long long)(count * size));
    exit(1);
  }
  layer->bytes += count * size;
  return p;
}

static int64_t bench_experts_in_use(const bench_layer *layer) {
  const bench_shape s = layer->shape;
  int64_t used = 0;
  char *seen = (char *)calloc((size_t)s.E, 1);
  if (!seen) return s.E;
  for (int64_t i = 0; i < s.T * s.K; i++) used += !seen[layer->index[i]], seen[layer->index[i]] = 1;
  free(seen);
  return used;
}

static moe_status bench_route_blocks(moe_context *ctx, const bench_layer *layer) {
  const bench_shape s = layer->shape;
  const moe_route_blocks_args args = {.T = s.T,
                                      .E = s.E,
                                      .K = s.K,
                                      .B = layer->B,
                                      .N = layer->N,
                                      .expert_index = layer->index,
                                      .expert_weights = layer->weights,
                                      .expert_affinities_masked = layer->affinities,
                                      .token_position_to_id = layer->ids,
                                      .block_to_expert = layer->experts,
                                      .conditions = layer->conditions};
  return moe_route_blocks(ctx, &args);
}

/* Packed weights stand in for the plain ones. */
static moe_blockwise_layer bench_arguments(const bench_layer *layer) {
  const bench_shape s = layer->shape;
  const int packed = (layer->parts & BENCH_PACKED) != 0, quantized = layer->quantized_wgu.codes != NULL;
  const moe_blockwise_layer args = {.T = s.T,
                                    .H = s.H,
                                    .I = s.I,
                                    .E = s.E,
                                    .N = layer->N,
                                    .B = layer->B,
                                    .max_rows = s.T * s.K,
                                    .hidden_states = layer->x,
                                    .expert_affinities_masked = layer->affinities,
                                    .gate_up_proj_weight = packed ? NULL : layer->wgu,
                                    .down_proj_weight = packed ? NULL : layer->wd,
                                    .quantized_gate_up_proj_weight = quantized ? &layer->quantized_wgu : NULL,
                                    .quantized_down_proj_weight = quantized ? &layer->quantized_wd : NULL,
                                    .packed_gate_up_proj_weight = layer->packed_wgu.memory,
                                    .packed_gate_up_proj_weight_bytes = layer->packed_wgu.bytes,
                                    .packed_down_proj_weight = layer->packed_wd.memory,
                                    .packed_down_proj_weight_bytes = layer->packed_wd.bytes,
                                    .token_position_to_id = layer->ids,
                                    .block_to_expert = layer->experts,
                                    .conditions = layer->conditions};
  return args;
}

static moe_blockwise_mm_fwd_args bench_fwd_arguments(const bench_layer *layer, void *checkpoint) {
  const moe_blockwise_mm_fwd_args args = {.layer = bench_arguments(layer),
                                          .gate_up_activations_T = checkpoint,
                                          .output = layer->y,
                                          .workspace = layer->workspace,
                                          .workspace_bytes = layer->workspace_bytes};
  return args;
}

static moe_blockwise_mm_bwd_args bench_bwd_arguments(const bench_layer *layer) {
  const moe_blockwise_mm_bwd_args args = {.layer = bench_arguments(layer),
                                          .gate_up_activations_T = layer->checkpoint,
                                          .output_hidden_states_grad = layer->dy,
                                          .hidden_states_grad = layer->dx,
                                          .expert_affinities_masked_grad = layer->daffinities,
                                          .gate_up_proj_weight_grad = layer->dwgu,
                                          .down_proj_weight_grad = layer->dwd,
                                          .workspace = layer->workspace,
                                          .workspace_bytes = layer->workspace_bytes};
  return args;
}

/* From top-k ids. The checkpoint has room for what is saved. */
static moe_layer bench_topk_arguments(const bench_layer *layer) {
  const bench_shape s = layer->shape;
  const int quantized = layer->quantized_wgu.codes != NULL;
  const moe_layer args = {.T = s.T,
                          .H = s.H,
                          .I = s.I,
                          .E = s.E,
                          .K = s.K,
                          .x = layer->x,
                          .topk_index = layer->index,
                          .topk_weights = layer->weights,
                          .gate_up = layer->wgu,
                          .down = layer->wd,
                          .quantized_gate_up = quantized ? &layer->quantized_wgu : NULL,
                          .quantized_down = quantized ? &layer->quantized_wd : NULL,
                          .workspace = layer->workspace,
                          .workspace_bytes = layer->workspace_bytes};
  return args;
}

static moe_layer_grads bench_topk_gradients(const bench_layer *layer) {
  const moe_layer_grads grads = {
      .x = layer->dx, .topk_weights = layer->daffinities, .gate_up = layer->dwgu, .down = layer->dwd};
  return grads;
}

static moe_grouped_gemm_args bench_grouped_arguments(const bench_layer *layer) {
  const bench_shape s = layer->shape;
  const moe_grouped_gemm_args args = {.num_tokens = s.T,
                                      .topk = s.K,
                                      .E = s.E,
                                      .N = 2 * s.I,
                                      .K = s.H,
                                      .m_sizes = layer->rows,
                                      .gather_indices = layer->sorted,
                                      .permute_x = 1,
                                      .X = layer->x,
                                      .W = layer->w,
                                      .quantized_W = layer->quantized_w.codes ? &layer->quantized_w : NULL,
                                      .packed_W = layer->packed_w.memory,
                                      .packed_W_bytes = layer->packed_w.bytes,
                                      .dY = layer->products_grad,
                                      .Y = layer->products,
                                      .dX = layer->slots_grad,
                                      .dW = layer->dw,
                                      .workspace = layer->workspace,
                                      .workspace_bytes = layer->workspace_bytes};
  return args;
}

/* Expert 0's numbers, in the MLP's order. */
static moe_mlp_fwd_mxfp8_args bench_mlp_fwd_arguments(const bench_layer *layer) {
  const moe_mlp_fwd_mxfp8_args args = {.mlp = {.S = layer->shape.T, .H = layer->shape.H, .I = layer->shape.I},
                                       .hidden_states = {.data = layer->x},
                                       .gate_up_weights = {.data = layer->wgu},
                                       .down_weight = {.data = layer->wd},
                                       .output = layer->y,
                                       .workspace = layer->workspace,
                                       .workspace_bytes = layer->workspace_bytes};
  return args;
}

/* gate_pre and up are given, hidden is not. */
static moe_mlp_bwd_mxfp8_args bench_mlp_bwd_arguments(const bench_layer *layer) {
  const int64_t elements = layer->shape.T * layer->shape.I;
  const moe_mlp_bwd_mxfp8_args args = {.mlp = {.S = layer->shape.T, .H = layer->shape.H, .I = layer->shape.I},
                                       .output_grad = {.data = layer->dy},
                                       .hidden_states = {.data = layer->x},
                                       .gate_up_weights = {.data = layer->wgu},
                                       .down_weight = {.data = layer->wd},
                                       .gate_pre = layer->checkpoint,
                                       .up = (const char *)layer->checkpoint + elements * layer->size,
                                       .hidden_states_grad = layer->dx,
                                       .gate_up_weight_grad = layer->dwgu,
                                       .down_weight_grad = layer->dwd,
                                       .workspace = layer->workspace,
                                       .workspace_bytes = layer->workspace_bytes};
  return args;
}

static moe_pack_weights_args bench_pack_arguments(const bench_layer *layer, moe_pack_layout layout, const void *weight,
                                                  const moe_quantized_weight *quantized, bench_packed packed) {
  const bench_shape s = layer->shape;
  const int64_t rows[] = {s.H, s.H, s.I, 2 * s.I}, columns[] = {s.I, s.I, s.H, s.H}; /* by layout */
  const moe_pack_weights_args args = {.layout = layout,
                                      .E = s.E,
                                      .rows = rows[layout],
                                      .columns = columns[layout],
                                      .weight = weight,
                                      .quantized_weight = quantized->codes ? quantized : NULL,
                                      .packed = packed.memory,
                                      .packed_bytes = packed.bytes};
  return args;
}

#endif
