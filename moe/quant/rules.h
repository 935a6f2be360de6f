/* How numbers become codes: casts, rules for a scale byte, and the constants that kernels compute with. */
#ifndef MOE_QUANT_RULES_H
#define MOE_QUANT_RULES_H

MOE_FN moe_cast_ moe_cast_of_(moe_element element, uint32_t flags) {
  const moe_element_format_ f = moe_element_format_of_(element);
  moe_cast_ cast = {flags & MOE_CAST_HALF_AWAY ? 1u : 0u, f.max, f.max, flags & MOE_CAST_HALF_TO_ZERO ? 1u : 0u};
  if (!(flags & MOE_CAST_SATURATE) && f.nan) cast.overflow = cast.infinity = f.infinity ? f.infinity : f.nan;
  return cast;
}

/* Under scales only finite floats saturate: infinity has the code it has without saturating. */
MOE_FN moe_cast_ moe_cast_scaled_(moe_element element, uint32_t flags) {
  moe_cast_ cast = moe_cast_of_(element, flags);
  cast.infinity = moe_cast_of_(element, 0).infinity;
  return cast;
}

MOE_FN moe_status moe_check_cast_(moe_context *ctx, const char *name, uint32_t cast) {
  if (cast & ~(uint32_t)(MOE_CAST_SATURATE | MOE_CAST_HALF_AWAY | MOE_CAST_HALF_TO_ZERO))
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, name, "has unknown bits");
  return cast & MOE_CAST_HALF_AWAY && cast & MOE_CAST_HALF_TO_ZERO
             ? moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, name, "rounds ties both ways")
             : MOE_OK;
}

/* What MX takes, and what groups do. */
MOE_FN moe_status moe_check_mx_element_(moe_context *ctx, const char *name, moe_element element) {
  return element == MOE_ELEMENT_MXINT8 ? MOE_OK : moe_check_enum_(ctx, name, (int)element, MOE_ELEMENT_COUNT_);
}
MOE_FN moe_status moe_check_group_element_(moe_context *ctx, const char *name, moe_element element) {
  if (element == MOE_ELEMENT_MXINT8)
    return moe_fail_(ctx, MOE_ERROR_INVALID_OPTION, name, "cannot be MXINT8, which is for MX");
  return moe_check_enum_(ctx, name, (int)element, MOE_ELEMENT_ALL_);
}

/* Let amax be m*2^e and the format's largest number M*2^emax, m and M in [1,2). Every rule is e - emax + offset, and
   one more from some m on: there adding `round` to the bits carries into the exponent. As emax >= 2, the byte is below
   254, and 0 for all subnormals; of MXINT8 emax is 0, and the byte 254 at most. */
MOE_FN moe_scale_ moe_mx_scale_rule_(moe_scale_rule rule, const moe_element_format_ *f) {
  const uint32_t one = 1u << 23;
  const uint32_t top = f->zero ? f->max << 17 : (f->max << (23 - f->fraction) & (one - 1)) | one; /* M */
  moe_scale_ s = {0, f->bias - (int)(f->max >> f->fraction)};
  switch (rule) {
    case MOE_SCALE_COUNT_:
    case MOE_SCALE_OCP_FLOOR: break;
    case MOE_SCALE_NKI_ALT: s.offset += f->bits == 8 && !f->packed; break;
    case MOE_SCALE_ROUND_UP: s.round = 2 * one - (top + 1); break;
    case MOE_SCALE_CEIL: s.round = one - 1; break;
    case MOE_SCALE_EVEN: s.round = one >> (f->fraction + !f->zero); break;
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

MOE_FN moe_numbers_ moe_numbers_of_(const moe_element_format_ *f, const moe_cast_ *cast) {
  moe_numbers_ q = {0};
  q.wide = moe_wide_(f);
  q.format = *f, q.away = cast->away, q.general = f->packed || f->nan_is_minus_zero || cast->to_zero;
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

#endif
