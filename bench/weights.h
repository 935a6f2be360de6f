/* How the experts' weights are stored: as plain tensors, or quantised. */
#ifndef MOE_BENCH_WEIGHTS_H
#define MOE_BENCH_WEIGHTS_H

typedef struct bench_weights {
  const char *name; /* NULL: the dtype's own */
  moe_quantized_weight as;
} bench_weights;

static const bench_weights bench_weights_plain = {NULL, {0}};

static const bench_weights bench_weights_list[] = {
    {"mxfp4", {.element = MOE_ELEMENT_E2M1}},
    {"mxfp8", {.element = MOE_ELEMENT_E4M3FN}},
    {"mxfp8_e5m2", {.element = MOE_ELEMENT_E5M2}},
    {"fp8", {.element = MOE_ELEMENT_E4M3FN, .scaling = MOE_WEIGHT_COLUMN_PER_EXPERT}},
    {"fp8_block", {.element = MOE_ELEMENT_E4M3FN, .scaling = MOE_WEIGHT_BLOCK, .block = 128}},
    {"mxfp4_gpt_oss", {.element = MOE_ELEMENT_E2M1, .layout = MOE_MX_LAYOUT_GPT_OSS}},
    {"mxfp4_ggml", {.element = MOE_ELEMENT_E2M1, .layout = MOE_MX_LAYOUT_GGML}},
    {"mxfp4_x4", {.element = MOE_ELEMENT_E2M1, .layout = MOE_MX_LAYOUT_NKI_STRIDED_X4}},
    {"mxfp8_x4", {.element = MOE_ELEMENT_E4M3FN, .layout = MOE_MX_LAYOUT_NKI_STRIDED_X4}},
};

/* NULL when there is no such storage. */
static const bench_weights *bench_weights_named(const char *name, const bench_dtype *dtype) {
  if (strcmp(name, dtype->name) == 0) return &bench_weights_plain;
  for (size_t i = 0; i < sizeof bench_weights_list / sizeof *bench_weights_list; i++)
    if (strcmp(bench_weights_list[i].name, name) == 0) return &bench_weights_list[i];
  return NULL;
}

static int64_t bench_weights_bits(const moe_quantized_weight *w) { return w->element == MOE_ELEMENT_E2M1 ? 4 : 8; }

/* Bytes of codes and scales of [E,parts,columns] columns of K elements. */
static moe_mx_layout_bytes bench_weights_bytes(moe_context *ctx, const moe_quantized_weight *w, int64_t E, int64_t K,
                                               int parts, int64_t columns) {
  const moe_mx_layout_args args = {.to = w->layout,
                                   .element_bits = (int32_t)bench_weights_bits(w),
                                   .parts = parts,
                                   .E = E,
                                   .K = K,
                                   .columns = columns};
  moe_mx_layout_bytes bytes = {0};
  if (w->scaling == MOE_WEIGHT_MX) {
    bench_expect(ctx, moe_mx_layout_size(ctx, &args, &bytes));
    return bytes;
  }
  const int64_t block = w->scaling == MOE_WEIGHT_BLOCK ? w->block : 1;
  const int64_t down = w->scaling == MOE_WEIGHT_BLOCK ? (K + block - 1) / block : 1;
  bytes.codes_out = (size_t)(E * K * parts * columns);
  bytes.scales_out = (size_t)(4 * E * down * parts * ((columns + block - 1) / block));
  return bytes;
}

/* Random codes that are numbers, and scales near 2^-7. Codes and scales of one byte share a tensor in ggml's layout:
   any byte is a code there. */
static void bench_fill_codes(bench_layer *layer, moe_quantized_weight *w, moe_mx_layout_bytes bytes) {
  uint8_t *codes = (uint8_t *)bench_alloc(layer, (int64_t)bytes.codes_out, 1);
  uint8_t *scales = (uint8_t *)bench_alloc(layer, (int64_t)bytes.scales_out + 1, 1);
  const int fp8 = w->element != MOE_ELEMENT_E2M1, ggml = w->layout == MOE_MX_LAYOUT_GGML;
  for (size_t i = 0; i < bytes.codes_out; i++)
    codes[i] = (uint8_t)(ggml && i % 17 == 0
                             ? 120u
                             : ((bench_random(&layer->seed) >> 40) & (fp8 ? 0x9fu : 0xffu)) | (fp8 ? 0x20u : 0u));
  for (size_t i = 0; i < bytes.scales_out && w->scaling == MOE_WEIGHT_MX; i++) scales[i] = 120;
  for (size_t i = 0; i < bytes.scales_out / 4 && w->scaling != MOE_WEIGHT_MX; i++)
    ((float *)(void *)scales)[i] = 0.007f;
  w->codes = codes, w->scales = scales;
}

static void bench_alloc_quantized(moe_context *ctx, bench_layer *layer) {
  const bench_shape s = layer->shape;
  moe_quantized_weight *w[] = {&layer->quantized_wgu, &layer->quantized_wd};
  layer->stored = 0;
  for (int i = 0; i < 2; i++) {
    *w[i] = layer->storage->as;
    const moe_mx_layout_bytes bytes =
        i == 0 ? bench_weights_bytes(ctx, w[i], s.E, s.H, 2, s.I) : bench_weights_bytes(ctx, w[i], s.E, s.I, 1, s.H);
    bench_fill_codes(layer, w[i], bytes);
    layer->stored += (double)(bytes.codes_out + bytes.scales_out) / (double)s.E;
  }
}

/* The hidden states, as activations are quantised: MX groups or, with float scales, one scale per row. */
static moe_status bench_quantize_x(moe_context *ctx, const bench_layer *layer) {
  const moe_quantized_weight *as = &layer->storage->as;
  const moe_quantize_mx_args mx = {.element = as->element,
                                   .cast = MOE_CAST_SATURATE,
                                   .dtype = layer->dtype->dtype,
                                   .rows = layer->shape.T,
                                   .columns = layer->shape.H,
                                   .plain = layer->x,
                                   .codes = layer->codes,
                                   .scales = (uint8_t *)layer->scales};
  const moe_quantize_scaled_args scaled = {.element = as->element,
                                           .cast = MOE_CAST_SATURATE,
                                           .dtype = layer->dtype->dtype,
                                           .rows = layer->shape.T,
                                           .columns = layer->shape.H,
                                           .block_rows = 1,
                                           .plain = layer->x,
                                           .codes = layer->codes,
                                           .scales = (float *)layer->scales};
  return as->scaling == MOE_WEIGHT_MX ? moe_quantize_mx(ctx, &mx) : moe_quantize_scaled(ctx, &scaled);
}

static moe_status bench_dequantize_x(moe_context *ctx, const bench_layer *layer) {
  const moe_quantized_weight *as = &layer->storage->as;
  const moe_dequantize_mx_args mx = {.element = as->element,
                                     .dtype = layer->dtype->dtype,
                                     .rows = layer->shape.T,
                                     .columns = layer->shape.H,
                                     .codes = layer->codes,
                                     .scales = (uint8_t *)layer->scales,
                                     .plain = layer->y};
  const moe_dequantize_scaled_args scaled = {.element = as->element,
                                             .dtype = layer->dtype->dtype,
                                             .rows = layer->shape.T,
                                             .columns = layer->shape.H,
                                             .block_rows = 1,
                                             .codes = layer->codes,
                                             .scales = (float *)layer->scales,
                                             .plain = layer->y};
  return as->scaling == MOE_WEIGHT_MX ? moe_dequantize_mx(ctx, &mx) : moe_dequantize_scaled(ctx, &scaled);
}

/* Of one element, its share of the scale included. */
static double bench_code_bytes(const bench_layer *layer) {
  const moe_quantized_weight *as = &layer->storage->as;
  const double scale = as->scaling == MOE_WEIGHT_MX ? 1.0 / 32 : 4.0 / (double)layer->shape.H;
  return (double)bench_weights_bits(as) / 8 + scale;
}

#endif
