/* moe_activation_f32: the layer's activations over an array. */
#ifndef MOE_LAYER_ACTIVATION_H
#define MOE_LAYER_ACTIVATION_H

/* alpha 0 (of either sign) stands for the activation's default. */
MOE_FN float moe_resolve_alpha_(moe_activation activation, float alpha) {
  if (moe_casti_scalar(alpha) << 1 != 0) return alpha;
  return activation == MOE_ACT_SWISH ? 1.702f : activation == MOE_ACT_SITU ? 4.0f : 1.0f;
}

typedef struct moe_activation_ {
  moe_activation activation;
  float alpha;
  const float *x;
  float *y, *dy;
  int64_t n;
} moe_activation_;

MOE_FN moe_status moe_activation_check_(moe_context *ctx, void *state, const moe_call_ *call, moe_tensors_ *tensors) {
  const moe_activation_ *a = (const moe_activation_ *)state;
  const int64_t bytes = moe_mul_(a->n, 4);
  const moe_tensor_ own[] = {{"x", a->x, bytes, 4, MOE_INPUT},
                             {"y", a->y, bytes, 4, MOE_OUTPUT_OPTIONAL},
                             {"dy", a->dy, bytes, 4, MOE_OUTPUT_OPTIONAL}};
  (void)call;
  MOE_TRY(moe_check_context_(ctx));
  MOE_TRY(moe_check_enum_(ctx, "activation", (int)a->activation, MOE_ACT_COUNT_));
  MOE_TRY(moe_check_finite_(ctx, "alpha", &a->alpha));
  if (a->n < 0) return moe_fail_(ctx, MOE_ERROR_INVALID_SHAPE, "n", "is negative");
  return a->n > 0 ? MOE_LIST_(tensors, own) : MOE_OK;
}

MOE_FN moe_status moe_activation_run_(moe_context *ctx, void *state) {
  const moe_activation_ *a = (const moe_activation_ *)state;
  moe_glu_ glu = {0};
  glu.activation = a->activation;
  glu.alpha = moe_resolve_alpha_(a->activation, a->alpha);
  const moe_fpenv_ saved = moe_fpenv_enter_();
  (void)ctx;
  moe_kernels_()->vec->activate(&glu, a->x, a->y, a->dy, a->n);
  moe_fpenv_restore_(saved);
  return MOE_OK;
}

static const moe_op_ moe_activation_op_ = {moe_activation_check_, NULL, moe_activation_run_, NULL, NULL};

moe_status moe_activation_f32(moe_context *ctx, moe_activation activation, float alpha, const float *x, float *y,
                              float *dy, int64_t n) {
  moe_activation_ state = {activation, alpha, x, y, dy, n};
  return moe_op_prepared_(&moe_activation_op_, &state, ctx);
}

#endif
