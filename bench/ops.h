/* What can be timed: one row per operation, with its flops and the least bytes it must move. */
#ifndef MOE_BENCH_OPS_H
#define MOE_BENCH_OPS_H

typedef struct bench_op {
  const char *name;
  moe_status (*run)(moe_context *ctx, const bench_layer *layer);
  double (*flops)(const bench_layer *layer);
  double (*bytes)(const bench_layer *layer); /* each operand read, each result written, once */
  unsigned parts;                            /* of the layer */
  int dot; /* 1: in bf16 a sum of products, which the dot product and fused multiply-adds give to the same bits */
} bench_op;

/* -------------------------------------------------------------------------------------------------------- the layer */

static moe_status bench_run_fwd(moe_context *ctx, const bench_layer *layer) {
  const moe_blockwise_mm_fwd_args args = bench_fwd_arguments(layer, NULL);
  return layer->dtype->fwd(ctx, &args);
}

static moe_status bench_run_bwd(moe_context *ctx, const bench_layer *layer) {
  const moe_blockwise_mm_bwd_args args = bench_bwd_arguments(layer);
  return layer->dtype->bwd(ctx, &args);
}

/* The same from top-k ids. */
static moe_status bench_run_layer_fwd(moe_context *ctx, const bench_layer *layer) {
  const moe_layer args = bench_topk_arguments(layer);
  return layer->dtype->layer_fwd(ctx, &args, layer->y, NULL);
}

static moe_status bench_run_layer_bwd(moe_context *ctx, const bench_layer *layer) {
  const moe_layer args = bench_topk_arguments(layer);
  const moe_layer_grads grads = bench_topk_gradients(layer);
  return layer->dtype->layer_bwd(ctx, &args, layer->checkpoint, layer->dy, &grads);
}

static double bench_row_bytes(const bench_layer *layer) {
  return (double)layer->shape.T * (double)layer->shape.H * (double)layer->size;
}

static double bench_expert_bytes(const bench_layer *layer) {
  return 3.0 * (double)layer->shape.H * (double)layer->shape.I * (double)layer->size;
}

static double bench_fwd_flops(const bench_layer *layer) {
  const bench_shape s = layer->shape;
  return 6.0 * (double)s.T * (double)s.K * (double)s.H * (double)s.I;
}

static double bench_fwd_bytes(const bench_layer *layer) {
  return (double)bench_experts_in_use(layer) * layer->stored + 2 * bench_row_bytes(layer);
}

static double bench_bwd_flops(const bench_layer *layer) { return 2 * bench_fwd_flops(layer); }

/* Every expert has a gradient, if only zeros; x, dY, dX; g and u from the checkpoint. */
static double bench_bwd_bytes(const bench_layer *layer) {
  const bench_shape s = layer->shape;
  return (double)(bench_experts_in_use(layer) + s.E) * bench_expert_bytes(layer) + 3 * bench_row_bytes(layer) +
         2.0 * (double)s.T * (double)s.K * (double)s.I * (double)layer->size;
}

/* The backward of frozen experts: no weight gradients. */
static moe_status bench_run_dx(moe_context *ctx, const bench_layer *layer) {
  moe_blockwise_mm_bwd_args args = bench_bwd_arguments(layer);
  args.gate_up_proj_weight_grad = args.down_proj_weight_grad = NULL;
  return layer->dtype->bwd(ctx, &args);
}

static double bench_dx_bytes(const bench_layer *layer) {
  const bench_shape s = layer->shape;
  return (double)bench_experts_in_use(layer) * layer->stored + 3 * bench_row_bytes(layer) +
         2.0 * (double)s.T * (double)s.K * (double)s.I * (double)layer->size;
}

/* --------------------------------------------------------------------------------------------------- the MXFP8 MLP */

static moe_status bench_run_mlp_fwd(moe_context *ctx, const bench_layer *layer) {
  const moe_mlp_fwd_mxfp8_args args = bench_mlp_fwd_arguments(layer);
  if (layer->dtype->dtype == MOE_DTYPE_BF16) return moe_mlp_fwd_mxfp8(ctx, &args);
  snprintf(ctx->message, sizeof ctx->message, "--dtype must be bf16 for an MLP");
  return MOE_ERROR_UNSUPPORTED;
}

static moe_status bench_run_mlp_bwd(moe_context *ctx, const bench_layer *layer) {
  const moe_mlp_bwd_mxfp8_args args = bench_mlp_bwd_arguments(layer);
  if (layer->dtype->dtype == MOE_DTYPE_BF16) return moe_mlp_bwd_mxfp8(ctx, &args);
  return bench_run_mlp_fwd(ctx, layer);
}

/* Every token has the one expert. */
static double bench_mlp_fwd_flops(const bench_layer *layer) {
  return 6.0 * (double)layer->shape.T * (double)layer->shape.H * (double)layer->shape.I;
}
static double bench_mlp_fwd_bytes(const bench_layer *layer) {
  return bench_expert_bytes(layer) + 2 * bench_row_bytes(layer);
}
static double bench_mlp_bwd_flops(const bench_layer *layer) { return 2 * bench_mlp_fwd_flops(layer); }
static double bench_mlp_bwd_bytes(const bench_layer *layer) {
  return 2 * bench_expert_bytes(layer) + 3 * bench_row_bytes(layer) +
         2.0 * (double)layer->shape.T * (double)layer->shape.I * (double)layer->size;
}

/* ----------------------------------------------------------------------------------------- single products, packing */

static moe_status bench_run_gemm(moe_context *ctx, const bench_layer *layer) {
  const moe_grouped_gemm_args args = bench_grouped_arguments(layer);
  return layer->dtype->gemm[0](ctx, &args);
}

static moe_status bench_run_gemm_dx(moe_context *ctx, const bench_layer *layer) {
  const moe_grouped_gemm_args args = bench_grouped_arguments(layer);
  return layer->dtype->gemm[1](ctx, &args);
}

static moe_status bench_run_gemm_dw(moe_context *ctx, const bench_layer *layer) {
  const moe_grouped_gemm_args args = bench_grouped_arguments(layer);
  return layer->dtype->gemm[2](ctx, &args);
}

static double bench_gemm_flops(const bench_layer *layer) { return bench_fwd_flops(layer) * 2 / 3; }

static double bench_gemm_bytes(const bench_layer *layer) {
  const bench_shape s = layer->shape;
  return (double)bench_experts_in_use(layer) * bench_expert_bytes(layer) * 2 / 3 + bench_row_bytes(layer) +
         2.0 * (double)s.T * (double)s.K * (double)s.I * (double)layer->size;
}

/* W [E,2I,H] as it is stored, and rows of Y or dY and dX. */
static double bench_grouped_bytes(const bench_layer *layer) {
  const bench_shape s = layer->shape;
  const double w = 2.0 * (double)s.H * (double)s.I * (double)bench_weights_bits(&layer->storage->as) / 8;
  return bench_gemm_bytes(layer) +
         (double)bench_experts_in_use(layer) * (layer->storage->name ? w - bench_expert_bytes(layer) * 2 / 3 : 0);
}

static double bench_grouped_dx_bytes(const bench_layer *layer) {
  return bench_grouped_bytes(layer) + (double)(layer->shape.K - 1) * bench_row_bytes(layer);
}

/* Every expert has a gradient, if only zeros. */
static double bench_grouped_dw_bytes(const bench_layer *layer) {
  return bench_gemm_bytes(layer) +
         (double)(layer->shape.E - bench_experts_in_use(layer)) * bench_expert_bytes(layer) * 2 / 3;
}

static moe_status bench_run_pack(moe_context *ctx, const bench_layer *layer) {
  const moe_pack_weights_args gate_up =
      bench_pack_arguments(layer, MOE_PACK_GATE_UP, layer->wgu, &layer->quantized_wgu, layer->packed_wgu);
  const moe_pack_weights_args down =
      bench_pack_arguments(layer, MOE_PACK_DOWN, layer->wd, &layer->quantized_wd, layer->packed_wd);
  const moe_status status = layer->dtype->pack(ctx, &gate_up);
  return status == MOE_OK ? layer->dtype->pack(ctx, &down) : status;
}

static double bench_pack_bytes(const bench_layer *layer) {
  return (double)layer->shape.E * layer->stored + (double)layer->packed_wgu.bytes + (double)layer->packed_wd.bytes;
}

/* ------------------------------------------------------------------------------------------------------ the routing */

/* The router chooses by itself; the blocks are made of the layer's own routing, which has the skew asked for. */
static moe_status bench_run_route(moe_context *ctx, const bench_layer *layer) {
  const bench_shape s = layer->shape;
  const moe_router_topk_args args = {.T = s.T,
                                     .H = s.H,
                                     .E = s.E,
                                     .K = s.K,
                                     .hidden_states = layer->x,
                                     .router_weight = layer->router,
                                     .router_logits = layer->logits,
                                     .expert_index = layer->chosen,
                                     .expert_weights = layer->chosen_weights};
  const moe_status status = layer->dtype->router(ctx, &args);
  return status == MOE_OK ? bench_route_blocks(ctx, layer) : status;
}

static double bench_route_flops(const bench_layer *layer) {
  const bench_shape s = layer->shape;
  return 2.0 * (double)s.T * (double)s.H * (double)s.E;
}

/* x, the router's weights, logits and affinities [T,E]; ids and weights [T,K] written and read. */
static double bench_route_bytes(const bench_layer *layer) {
  const bench_shape s = layer->shape;
  return bench_row_bytes(layer) + (double)s.H * (double)s.E * (double)layer->size + 8.0 * (double)s.T * (double)s.E +
         16.0 * (double)s.T * (double)s.K;
}

/* -------------------------------------------------------------------------------------------------- the conversions */

static moe_status bench_run_quantize(moe_context *ctx, const bench_layer *layer) {
  if (layer->codes) return bench_quantize_x(ctx, layer);
  return bench_from_f32(ctx, layer->dtype->dtype, layer->y, layer->plain, layer->shape.T * layer->shape.H);
}

static moe_status bench_run_dequantize(moe_context *ctx, const bench_layer *layer) {
  if (layer->codes) return bench_dequantize_x(ctx, layer);
  return bench_to_f32(ctx, layer->dtype->dtype, layer->plain, layer->x, layer->shape.T * layer->shape.H);
}

static double bench_no_flops(const bench_layer *layer) { return (void)layer, 0; }

static double bench_convert_bytes(const bench_layer *layer) {
  const double other = layer->codes ? bench_code_bytes(layer) : 4;
  return bench_row_bytes(layer) * (1 + other / (double)layer->size);
}

/* -------------------------------------------------------------------------------------------------------- the table */

enum { BENCH_TRAINING = BENCH_EXPERTS | BENCH_GRADIENTS, BENCH_FROZEN = BENCH_EXPERTS | BENCH_PACKED };

/* decode is a forward of few tokens: its own name keeps the two apart in a list of results. */
static const bench_op bench_ops[] = {
    {"fwd", bench_run_fwd, bench_fwd_flops, bench_fwd_bytes, BENCH_EXPERTS, 1},
    {"bwd", bench_run_bwd, bench_bwd_flops, bench_bwd_bytes, BENCH_TRAINING, 1},
    {"layer_fwd", bench_run_layer_fwd, bench_fwd_flops, bench_fwd_bytes, BENCH_EXPERTS | BENCH_TOPK, 1},
    {"layer_bwd", bench_run_layer_bwd, bench_bwd_flops, bench_bwd_bytes, BENCH_TRAINING | BENCH_TOPK, 1},
    {"dx", bench_run_dx, bench_fwd_flops, bench_dx_bytes, BENCH_TRAINING, 1},
    {"decode", bench_run_fwd, bench_fwd_flops, bench_fwd_bytes, BENCH_EXPERTS, 1},
    {"fwd-packed", bench_run_fwd, bench_fwd_flops, bench_fwd_bytes, BENCH_FROZEN, 1},
    {"decode-packed", bench_run_fwd, bench_fwd_flops, bench_fwd_bytes, BENCH_FROZEN, 1},
    {"mlp_fwd", bench_run_mlp_fwd, bench_mlp_fwd_flops, bench_mlp_fwd_bytes, BENCH_TRAINING | BENCH_MLP, 1},
    {"mlp_bwd", bench_run_mlp_bwd, bench_mlp_bwd_flops, bench_mlp_bwd_bytes, BENCH_TRAINING | BENCH_MLP, 1},
    {"gemm", bench_run_gemm, bench_gemm_flops, bench_gemm_bytes, BENCH_GEMM, 1},
    {"grouped", bench_run_gemm, bench_gemm_flops, bench_grouped_bytes, BENCH_GROUPED, 1},
    {"grouped_dx", bench_run_gemm_dx, bench_gemm_flops, bench_grouped_dx_bytes, BENCH_GROUPED, 1},
    {"grouped_dw", bench_run_gemm_dw, bench_gemm_flops, bench_grouped_dw_bytes, BENCH_GROUPED, 1},
    {"pack", bench_run_pack, bench_no_flops, bench_pack_bytes, BENCH_FROZEN, 0},
    {"route", bench_run_route, bench_route_flops, bench_route_bytes, BENCH_ROUTER, 0},
    {"quantize", bench_run_quantize, bench_no_flops, bench_convert_bytes, BENCH_ARRAYS, 0},
    {"dequantize", bench_run_dequantize, bench_no_flops, bench_convert_bytes, BENCH_ARRAYS, 0},
};

/* NULL when there is no such operation. */
static const bench_op *bench_op_named(const char *name) {
  for (size_t i = 0; i < sizeof bench_ops / sizeof *bench_ops; i++)
    if (strcmp(bench_ops[i].name, name) == 0) return &bench_ops[i];
  return NULL;
}

#endif
