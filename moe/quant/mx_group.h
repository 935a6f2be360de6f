/* Groups of up to 32 elements under one E8M0 scale byte: rules for the byte, and groups of any elements to codes and
   back. */
#ifndef MOE_QUANT_MX_GROUP_H
#define MOE_QUANT_MX_GROUP_H

MOE_FN uint32_t moe_mx_scale_byte_(const moe_scale_ *rule, uint32_t amax) {
  const int32_t byte = (int32_t)((amax + rule->round) >> 23) + rule->offset;
  return byte < 0 ? 0u : byte > 254 ? 254u : (uint32_t)byte;
}

MOE_FN uint32_t moe_mx_finite_magnitude_(const float *x, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = moe_casti_scalar(x[i]) & 0x7fffffffu;
    if (bits < 0x7f800000u && bits > most) most = bits;
  }
  return most;
}

MOE_FN float moe_e8m0_(uint32_t byte) { return moe_castf_scalar(moe_e8m0_bits_(byte)); }

/* Encodes x, which it overwrites, and returns the scale byte. Scaling is exact but below 2^-126, where codes are 0. */
MOE_FN uint32_t moe_mx_encode_(const moe_kernels *kernels, const moe_element_format_ *format, const moe_scale_ *rule,
                               const moe_cast_ *cast, float *x, int64_t n, uint8_t *codes) {
  uint32_t amax = kernels->quant->magnitude[MOE_DTYPE_F32](x, n);
  const int special = amax >= 0x7f800000u;
  if (special) amax = moe_mx_finite_magnitude_(x, n);
  uint32_t byte = moe_mx_scale_byte_(rule, amax);
  if (special && format->nan == 0) {
    memset(x, 0, (size_t)n * sizeof *x);
    byte = 255;
  } else {
    kernels->vec->scale_row(x, moe_e8m0_(254 - byte), n);
  }
  moe_stored_store_(kernels, format, cast, codes, 0, n, x, format->zero);
  return byte;
}

MOE_FN void moe_mx_decode_(const moe_kernels *kernels, const moe_element_format_ *format, const uint8_t *codes,
                           uint32_t byte, float *x, int64_t n) {
  moe_stored_load_(kernels, format, x, codes, 0, n, format->zero);
  kernels->vec->scale_row(x, moe_e8m0_(byte), n);
}

#endif
