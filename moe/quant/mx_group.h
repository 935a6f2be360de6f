/* Groups of up to 32 elements under one E8M0 scale byte: rules for the byte, and groups of any elements to codes and
   back. */
#ifndef MOE_QUANT_MX_GROUP_H
#define MOE_QUANT_MX_GROUP_H

/* Let amax be m*2^e and the format's largest number M*2^emax, m and M in [1,2). Every rule is e - emax + offset, and
   one more from some m on: there adding `round` to the bits carries into the exponent. As emax >= 2, the byte is below
   254, and 0 for all subnormals. */
MOE_FN moe_scale_ moe_mx_scale_rule_(moe_scale_rule rule, const moe_element_format_ *f) {
  const uint32_t one = 1u << 23, top = (f->max << (23 - f->fraction) & (one - 1)) | one;
  moe_scale_ s = {0, f->bias - (int)(f->max >> f->fraction)};
  switch (rule) {
    case MOE_SCALE_COUNT_:
    case MOE_SCALE_OCP_FLOOR: break;
    case MOE_SCALE_NKI_ALT: s.offset += f->bits == 8; break;
    case MOE_SCALE_ROUND_UP: s.round = 2 * one - (top + 1); break;
    case MOE_SCALE_CEIL: s.round = one - 1; break;
    case MOE_SCALE_EVEN: s.round = one >> (f->fraction + 1); break;
    case MOE_SCALE_NEAREST: /* M <= sqrt(2)*m: the least m above M/sqrt(2), which is irrational, is searched for */
      s.offset--;
      for (uint64_t low = one, high = 2 * (uint64_t)one; low < high;) {
        const uint64_t m = (low + high) / 2;
        if (2 * m * m < (uint64_t)top * top) low = m + 1;
        else high = m;
        s.round = 2 * one - (uint32_t)low;
      }
      break;
  }
  return s;
}

MOE_FN uint32_t moe_mx_scale_byte_(const moe_scale_ *rule, uint32_t amax) {
  const int32_t byte = (int32_t)((amax + rule->round) >> 23) + rule->offset;
  return byte < 0 ? 0u : (uint32_t)byte;
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

MOE_FN moe_numbers_ moe_numbers_of_(const moe_element_format_ *f, const moe_cast_ *cast) {
  moe_numbers_ q = {0};
  q.wide = moe_wide_(f);
  q.format = *f, q.away = cast->away, q.general = f->nan_is_minus_zero || cast->to_zero;
  q.prefetch = q.prefetch_to = 64;
  q.most = cast->overflow, q.least = f->rebias + (1u << 23);
  q.big = ((127u + (uint32_t)f->shift) << 23) + ((0u - (q.least >> f->shift)) & 0xffffu);
  q.drop = f->nan != 0 && cast->overflow == f->nan;
  for (int code = 1, steps = 1 << f->fraction; q.wide && code < steps && code < 16; code++) {
    int down = 0;
    while (code << down < steps) down++;
    q.below[code] = (uint8_t)(code - ((1 - down) * steps + (code << down) - steps));
  }
  return q;
}

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
  kernels->quant->store_codes[moe_wide_(format)](codes, x, n, format, cast);
  return byte;
}

MOE_FN void moe_mx_decode_(const moe_kernels *kernels, const moe_element_format_ *format, const uint8_t *codes,
                           uint32_t byte, float *x, int64_t n) {
  kernels->quant->load_codes[moe_wide_(format)](x, codes, n, format);
  kernels->vec->scale_row(x, moe_e8m0_(byte), n);
}

#endif
