/* Scales of any type, one at a time. */
#ifndef MOE_QUANT_SCALES_H
#define MOE_QUANT_SCALES_H

/* The types of floats come first, in the order of moe_dtype. */
MOE_FN moe_dtype moe_scales_dtype_(moe_scales_type type) { return (moe_dtype)(type + 1); }
MOE_FN int64_t moe_scales_bytes_(moe_scales_type type) {
  return type < MOE_SCALES_E4M3FN ? moe_dtype_bytes_(moe_scales_dtype_(type)) : 1;
}

/* Scale i, in any floating-point mode. */
MOE_FN float moe_scale_at_(const moe_kernels *kernels, moe_scales_type type, const void *scales, int64_t i) {
  const char *at = (const char *)scales + i * moe_scales_bytes_(type);
  const uint32_t byte = (uint8_t)*at;
  float x;
  if (type == MOE_SCALES_E8M0) return moe_e8m0_(byte);
  if (type == MOE_SCALES_E4M3FN) {
    if ((byte & 127u) == 127u) return moe_castf_scalar(0x7fc00000u);
    x = (byte & 127u) < 8u ? (float)(byte & 7u) * 0x1p-9f : moe_castf_scalar(((byte & 127u) << 20) + (120u << 23));
    return byte & 128u ? -x : x;
  }
  if (type == MOE_SCALES_F32) memcpy(&x, at, sizeof x);
  else moe_load_row_(kernels->vec, moe_scales_dtype_(type), &x, at, 1);
  return x;
}

/* n of them. */
MOE_FN void moe_scales_load_(const moe_kernels *kernels, moe_scales_type type, float *x, const void *scales,
                             int64_t n) {
  const uint8_t *byte = (const uint8_t *)scales;
  const moe_element_format_ e4m3fn = moe_element_format_of_(MOE_ELEMENT_E4M3FN);
  if (type == MOE_SCALES_E4M3FN) kernels->quant->load_codes[1](x, byte, n, &e4m3fn);
  else if (type != MOE_SCALES_E8M0) moe_load_row_(kernels->vec, moe_scales_dtype_(type), x, scales, n);
  else
    for (int64_t i = 0; i < n; i++) x[i] = moe_e8m0_(byte[i]);
}

/* Stores x, above 0 or NaN, rounded as moe_quantize_group says. */
MOE_FN void moe_scale_put_(const moe_kernels *kernels, moe_scales_type type, void *scales, int64_t i, float x) {
  char *at = (char *)scales + i * moe_scales_bytes_(type);
  const uint32_t bits = moe_casti_scalar(x);
  if (type == MOE_SCALES_E8M0) *at = (char)(uint8_t)(bits > 0x7f800000u ? 255u : (bits + 0x007fffffu) >> 23);
  else if (type == MOE_SCALES_E4M3FN) {
    const moe_element_format_ e4m3fn = moe_element_format_of_(MOE_ELEMENT_E4M3FN);
    const moe_cast_ saturating = {0, e4m3fn.max, e4m3fn.max, 0};
    kernels->quant->store_codes[1]((uint8_t *)at, &x, 1, &e4m3fn, &saturating);
  } else {
    if (type == MOE_SCALES_FP16 && x > 65504.0f) x = 65504.0f;
    if (type == MOE_SCALES_F32 && bits <= 0x7f800000u) memcpy(at, &x, sizeof x);
    else moe_store_row_(kernels->vec, moe_scales_dtype_(type), at, &x, 1);
  }
}

/* That n scales, one in every `step`, are finite. */
MOE_FN moe_status moe_check_scales_(moe_context *ctx, const char *name, moe_scales_type type, const void *scales,
                                    int64_t n, int64_t step) {
  const moe_kernels *kernels = moe_kernels_();
  const int floats = type < MOE_SCALES_E4M3FN && step == 1 && n > 0;
  if (floats && kernels->quant->magnitude[moe_scales_dtype_(type)](scales, n) < 0x7f800000u) return MOE_OK;
  for (int64_t i = 0; i < n; i += step) {
    const float x = moe_scale_at_(kernels, type, scales, i);
    if (!moe_is_finite_(&x)) return moe_check_finite_(ctx, name, &x);
  }
  return MOE_OK;
}

#endif
