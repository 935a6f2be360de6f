/* mlp.h: the MXFP8 MLP's backward and the product of MXFP8 operands, of any shapes, formats and states of operands. */
#ifndef MOE_FUZZ_MLP_H
#define MOE_FUZZ_MLP_H

#include "call.h"

static void *fuzz_mlp_allocate(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void fuzz_mlp_release(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }

static moe_status fuzz_call_matmul(moe_context *ctx, const void *args) {
  return moe_matmul_mxfp8(ctx, (const moe_matmul_mxfp8_args *)args);
}
static moe_status fuzz_call_mlp(moe_context *ctx, const void *args) {
  return moe_mlp_bwd_mxfp8(ctx, (const moe_mlp_bwd_mxfp8_args *)args);
}

static moe_mxfp8_format fuzz_mxfp8_format(fuzz_input *in) {
  static const moe_mx_layout layout[] = {MOE_MX_LAYOUT_PLAIN, MOE_MX_LAYOUT_NKI_1X32, MOE_MX_LAYOUT_NKI_WRAPX,
                                         MOE_MX_LAYOUT_NKI_WRAPX_WHOLE, MOE_MX_LAYOUT_GGML};
  const int which = (int)fuzz_take(in, 1);
  moe_mxfp8_format f = {(moe_element)fuzz_enum(in, 4), fuzz_enum(in, 2),
                        (moe_scale_rule)fuzz_enum(in, MOE_SCALE_COUNT_), layout[which == 255 ? 4 : which % 4]};
  if ((int)f.element == 4) f.element = MOE_ELEMENT_INT8; /* beyond the four */
  if (which == 255 || f.element == MOE_ELEMENT_E2M1) in->legal = 0;
  return f;
}

/* A contracted axis; with a step of 32 where the layout wants one. */
static int64_t fuzz_axis(fuzz_input *in, const moe_mxfp8_format *f, int64_t most) {
  const int wrapped = f->layout == MOE_MX_LAYOUT_NKI_WRAPX || f->layout == MOE_MX_LAYOUT_NKI_WRAPX_WHOLE;
  const int64_t n = fuzz_length(in, 1, wrapped ? most / 32 : most, 1), all = wrapped ? fuzz_times(n, 32) : n;
  if (all < 1 || all >= INT32_MAX) in->legal = 0;
  return in->legal ? all : n;
}

static int64_t fuzz_mxfp8_scales(const moe_mxfp8_operand *x, int64_t F, int64_t K) {
  const int64_t G = fuzz_ceil(K, 32);
  switch (x->scales_layout) {
    case MOE_MX_SCALES_NKI_OVERSIZED: return fuzz_times(K / 4, F);
    case MOE_MX_SCALES_NKI_PACKED: return fuzz_times(fuzz_times(fuzz_ceil(K, 2048), 128), F);
    case MOE_MX_SCALES_TILED_128X4: return fuzz_times(fuzz_ceil(F, 128), fuzz_times(fuzz_ceil(G, 4), 512));
    default: return fuzz_times(F, G);
  }
}

static void fuzz_operand(fuzz_call *c, const moe_mxfp8_format *f, moe_mxfp8_operand *x, int64_t F, int64_t K) {
  const int state = fuzz_pick(c->in, 4), placement = fuzz_pick(c->in, 16);
  x->is_swizzled = state & 1;
  if (x->is_swizzled && (f->layout == MOE_MX_LAYOUT_PLAIN || K % 32 != 0)) c->in->legal = 0;
  if (state < 2) {
    fuzz_tensor_of(c, &x->data, 0, fuzz_times(F, K), 2);
    return;
  }
  if (placement < 4) x->scales_layout = (moe_mx_scales)placement;
  if (x->is_swizzled == (x->scales_layout == MOE_MX_SCALES_TILED_128X4) && x->scales_layout != MOE_MX_SCALES_OWN)
    c->in->legal = 0;
  if (x->is_swizzled) fuzz_tensor_of(c, &x->data, 0, fuzz_times(F, K) / 4, 4);
  else fuzz_tensor_of(c, &x->data, 0, fuzz_times(F, K), 1);
  fuzz_tensor_of(c, &x->scales, 0, fuzz_mxfp8_scales(x, F, K), 1);
}

static void fuzz_mlp_context(moe_context *ctx) { ctx->allocate = fuzz_mlp_allocate, ctx->release = fuzz_mlp_release; }

static void fuzz_matmul(fuzz_input *in, moe_context *ctx) {
  fuzz_call c = fuzz_call_of(in, ctx);
  moe_matmul_mxfp8_args args = {.format = fuzz_mxfp8_format(in)};
  args.K = fuzz_axis(in, &args.format, 130);
  args.M = fuzz_length(in, 1, 90, 1), args.N = fuzz_length(in, 1, 90, 1);
  if (args.M >= INT32_MAX || args.N >= INT32_MAX) in->legal = 0;
  args.output_dtype = (moe_dtype)fuzz_enum(in, 1 + TEST_DTYPES);
  fuzz_operand(&c, &args.format, &args.a, args.M, args.K);
  fuzz_operand(&c, &args.format, &args.b, args.N, args.K);
  const moe_dtype dtype = args.output_dtype ? args.output_dtype : MOE_DTYPE_BF16;
  fuzz_tensor_of(&c, &args.output, 1, fuzz_times(args.M, args.N), in->legal ? (int64_t)moe_dtype_size(dtype) : 4);
  fuzz_mlp_context(ctx);
  if (fuzz_open(&c)) (void)fuzz_run(&c, "moe_matmul_mxfp8", fuzz_call_matmul, &args);
  fuzz_close(&c);
}

static moe_layer_config fuzz_mlp_config(fuzz_input *in) {
  moe_layer_config config = {.activation = (moe_activation)fuzz_enum(in, MOE_ACT_COUNT_)};
  config.clamp = (uint32_t)fuzz_enum(in, 16);
  config.skip_gate = fuzz_pick(in, 64) == 1;
  if (config.skip_gate) in->legal = 0;
  config.gate_clamp_upper_limit = config.up_clamp_upper_limit = 2.0f;
  config.gate_clamp_lower_limit = config.up_clamp_lower_limit = -2.0f;
  return config;
}

static void fuzz_mlp(fuzz_input *in, moe_context *ctx) {
  fuzz_call c = fuzz_call_of(in, ctx);
  moe_mlp_bwd_mxfp8_args args = {.mlp.format = fuzz_mxfp8_format(in)};
  const moe_mxfp8_format *f = &args.mlp.format;
  const int64_t S = args.mlp.S = fuzz_axis(in, f, 64), H = args.mlp.H = fuzz_axis(in, f, 64);
  const int64_t I = args.mlp.I = fuzz_axis(in, f, 64), given = (int64_t)fuzz_take(in, 2);
  const int64_t inner = fuzz_times(S, I), outer = fuzz_times(S, H), weight = fuzz_times(H, I);
  args.mlp.config = fuzz_mlp_config(in);
  args.mlp.unrounded_gate_act = fuzz_enum(in, 2);
  fuzz_operand(&c, f, &args.output_grad, S, H);
  fuzz_operand(&c, f, &args.hidden_states, S, H);
  fuzz_operand(&c, f, &args.gate_up_weights, fuzz_times(2, I), H);
  fuzz_operand(&c, f, &args.down_weight, H, I);
  if (given & 1) fuzz_operand(&c, f, &args.gate_weight_T, H, I);
  if (given & 2) fuzz_operand(&c, f, &args.down_weight_T, I, H);
  if (given & 4) fuzz_operand(&c, f, &args.hidden_T, I, S);
  if (given & 8) fuzz_operand(&c, f, &args.output_grad_T, H, S);
  if (given & 16) fuzz_tensor_of(&c, &args.gate_pre, 0, inner, 2);
  if (given & 32) fuzz_tensor_of(&c, &args.gate_act, 0, inner, 2);
  if (given & 64) fuzz_tensor_of(&c, &args.up, 0, inner, 2);
  if (given & 128) fuzz_tensor_of(&c, &args.hidden, 0, inner, 2);
  if (given & 256) fuzz_tensor_of(&c, &args.d_gate_up_T, 1, fuzz_times(2, inner), 2);
  fuzz_tensor_of(&c, &args.hidden_states_grad, 1, outer, 2);
  fuzz_tensor_of(&c, &args.gate_up_weight_grad, 1, fuzz_times(2, weight), 2);
  fuzz_tensor_of(&c, &args.down_weight_grad, 1, weight, 2);
  fuzz_mlp_context(ctx);
  if (fuzz_open(&c)) (void)fuzz_run(&c, "moe_mlp_bwd_mxfp8", fuzz_call_mlp, &args);
  fuzz_close(&c);
}

#endif /* MOE_FUZZ_MLP_H */
