/* How the experts' weights are stored: as plain tensors, or quantised. */
#ifndef MOE_BENCH_WEIGHTS_H
#define MOE_BENCH_WEIGHTS_H

typedef struct bench_weights {
  const char *name; /* NULL: the dtype's own */
  moe_quantized_weight as;
} bench_weights;

static const bench_weights bench_weights_plain = {NULL, {0}};

/* What stands in the list: they are wanted, and made for each layer. */
static const float bench_global_scales[1];
static const uint8_t bench_zero_points[1];

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
    {"mxfp6", {.element = MOE_ELEMENT_E2M3}},
    {"mxint8", {.element = MOE_ELEMENT_MXINT8}},
    {"nvfp4",
     {.element = MOE_ELEMENT_E2M1,
      .scaling = MOE_WEIGHT_GROUP,
      .block = 16,
      .scales_type = MOE_SCALES_E4M3FN,
      .global_scale = bench_global_scales}},
    {"int8", {.element = MOE_ELEMENT_INT8, .scaling = MOE_WEIGHT_GROUP, .block = 128, .scales_type = MOE_SCALES_BF16}},
    {"int4", {.element = MOE_ELEMENT_INT4, .scaling = MOE_WEIGHT_GROUP, .block = 32, .scales_type = MOE_SCALES_BF16}},
    {"uint4", /* with zero points */
     {.element = MOE_ELEMENT_UINT4,
      .scaling = MOE_WEIGHT_GROUP,
      .block = 128,
      .scales_type = MOE_SCALES_FP16,
      .zero_points = bench_zero_points}},
};

/* NULL when there is no such storage. */
static const bench_weights *bench_weights_named(const char *name, const bench_dtype *dtype) {
  if (strcmp(name, dtype->name) == 0) return &bench_weights_plain;
  for (size_t i = 0; i < sizeof bench_weights_list / sizeof *bench_weights_list; i++)
    if (strcmp(bench_weights_list[i].name, name) == 0) return &bench_weights_list[i];
  return NULL;
}

static int64_t bench_weights_bits(const moe_quantized_weight *w) {
  const moe_element e = w->element;
  if (e == MOE_ELEMENT_E2M1 || e == MOE_ELEMENT_INT4 || e == MOE_ELEMENT_UINT4) return 4;
  return e == MOE_ELEMENT_E2M3 || e == MOE_ELEMENT_E3M2 ? 6 : 8;
}

/* Bytes of a scale that is not MX's. */
static size_t bench_scale_size(const moe_quantized_weight *w) {
  static const size_t size[] = {4, 2, 2, 1, 1};
  return w->scaling == MOE_WEIGHT_GROUP ? size[w->scales_type] : 4;
}

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
  if (w->scaling == MOE_WEIGHT_GROUP) {
    bytes.codes_out = (size_t)(E * parts * columns * ((K * bench_weights_bits(w) + 7) / 8));
    bytes.scales_out = (size_t)(E * parts * columns * ((K + w->block - 1) / w->block)) * bench_scale_size(w);
    return bytes;
  }
  const int64_t block = w->scaling == MOE_WEIGHT_BLOCK ? w->block : 1;
  const int64_t down = w->scaling == MOE_WEIGHT_BLOCK ? (K + block - 1) / block : 1;
  bytes.codes_out = (size_t)(E * K * parts * columns);
  bytes.scales_out = (size_t)(4 * E * down * parts * ((columns + block - 1) / block));
  return bytes;
}

/* Scales near 2^-7, in any type, and zero points, which have as many bytes at most. */
static void bench_fill_scales(bench_layer *layer, moe_quantized_weight *w, uint8_t *scales, size_t bytes) {
  static const uint32_t bits[] = {0x3be56042u, 0x3be5u, 0x1f2bu, 0x3au, 120u}; /* of e4m3fn 1.25, by a global scale */
  const size_t size = bench_scale_size(w);
  const uint32_t scale = w->scaling == MOE_WEIGHT_MX ? 120u : bits[w->scaling == MOE_WEIGHT_GROUP ? w->scales_type : 0];
  for (size_t i = 0; i < bytes; i++) scales[i] = (uint8_t)(scale >> 8 * (w->scaling == MOE_WEIGHT_MX ? 0 : i % size));
  if (w->global_scale) {
    float *global = (float *)bench_alloc(layer, 2 * layer->shape.E, 4);
    for (int64_t i = 0; i < 2 * layer->shape.E; i++) global[i] = 0.0056f;
    w->global_scale = global;
  }
  if (w->zero_points) {
    uint8_t *zeros = (uint8_t *)bench_alloc(layer, (int64_t)(bytes / size), 1);
    for (size_t i = 0; i < bytes / size; i++) zeros[i] = (uint8_t)(bench_random(&layer->seed) >> 40 & 15u);
    w->zero_points = zeros;
  }
}

/* Random codes that are numbers. Codes and scales of one byte share a tensor in ggml's layout: any byte is a code
   there. */
static void bench_fill_codes(bench_layer *layer, moe_quantized_weight *w, moe_mx_layout_bytes bytes) {
  uint8_t *codes = (uint8_t *)bench_alloc(layer, (int64_t)bytes.codes_out, 1);
  uint8_t *scales = (uint8_t *)bench_alloc(layer, (int64_t)bytes.scales_out + 1, 1);
  const int fp8 = w->element < MOE_ELEMENT_MXINT8 && bench_weights_bits(w) == 8, ggml = w->layout == MOE_MX_LAYOUT_GGML;
  for (size_t i = 0; i < bytes.codes_out; i++)
    codes[i] = (uint8_t)(ggml && i % 17 == 0
                             ? 120u
                             : ((bench_random(&layer->seed) >> 40) & (fp8 ? 0x9fu : 0xffu)) | (fp8 ? 0x20u : 0u));
  bench_fill_scales(layer, w, scales, bytes.scales_out);
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
  const moe_quantize_group_args group = {.element = as->element,
                                         .scales_type = as->scales_type,
                                         .cast = MOE_CAST_SATURATE,
                                         .dtype = layer->dtype->dtype,
                                         .rows = layer->shape.T,
                                         .columns = layer->shape.H,
                                         .group = as->block,
                                         .plain = layer->x,
                                         .codes = layer->codes,
                                         .scales = layer->scales,
                                         .zero_points = layer->zeros};
  if (as->scaling == MOE_WEIGHT_GROUP) return moe_quantize_group(ctx, &group);
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
  const moe_dequantize_group_args group = {.element = as->element,
                                           .scales_type = as->scales_type,
                                           .dtype = layer->dtype->dtype,
                                           .rows = layer->shape.T,
                                           .columns = layer->shape.H,
                                           .group = as->block,
                                           .codes = layer->codes,
                                           .scales = layer->scales,
                                           .zero_points = layer->zeros,
                                           .plain = layer->y};
  if (as->scaling == MOE_WEIGHT_GROUP) return moe_dequantize_group(ctx, &group);
  return as->scaling == MOE_WEIGHT_MX ? moe_dequantize_mx(ctx, &mx) : moe_dequantize_scaled(ctx, &scaled);
}

/* Of one element, its share of the scale included. */
static double bench_code_bytes(const bench_layer *layer) {
  const moe_quantized_weight *as = &layer->storage->as;
  const double scale = as->scaling == MOE_WEIGHT_MX      ? 1.0 / 32
                       : as->scaling == MOE_WEIGHT_GROUP ? (double)bench_scale_size(as) / (double)as->block
                                                         : 4.0 / (double)layer->shape.H;
  return (double)bench_weights_bits(as) / 8 + scale;
}

#endif
