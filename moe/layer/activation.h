/* moe_activation_f32: the layer's activations over an array. */
#ifndef MOE_LAYER_ACTIVATION_H
#define MOE_LAYER_ACTIVATION_H

/* alpha 0 (of either sign) stands for the activation's default. */
MOE_FN float moe_resolve_alpha_(moe_activation activation, float alpha) {
  if (moe_casti_scalar(alpha) << 1 != 0) return alpha;
  return activation == MOE_ACT_SWISH ? 1.702f : 1.0f;
}

moe_status moe_activation_f32(moe_context *ctx, moe_activation activation, float alpha, const float *x, float *y,
                              float *dy, int64_t n) {
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_enum_(ctx, "activation", (int)activation, MOE_ACT_COUNT_));
  MOE_TRY(moe_check_finite_(ctx, "alpha", &alpha));
  if (n < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "n", "is negative");
  const moe_tensor_ tensor[] = {
      {"x", x, moe_mul_(n, 4), 4, MOE_INPUT},
      {"y", y, moe_mul_(n, 4), 4, MOE_OUTPUT_OPTIONAL},
      {"dy", dy, moe_mul_(n, 4), 4, MOE_OUTPUT_OPTIONAL},
  };
  if (n > 0) MOE_TRY(moe_check_tensors_(ctx, tensor, 3, 0));
  const moe_kernels *kernels = moe_kernels_();
  moe_glu_ glu = {0};
  glu.activation = activation;
  glu.alpha = moe_resolve_alpha_(activation, alpha);
  const moe_fpenv_ saved = moe_fpenv_enter_();
  kernels->vec->activate(&glu, x, y, dy, n);
  moe_fpenv_restore_(saved);
  return moe_succeed_(ctx);
}

#endif
