/* Codes as they are stored, to float and back: by kernels, or code by code where these do not take them. */
#ifndef MOE_QUANT_STORED_CODES_H
#define MOE_QUANT_STORED_CODES_H

enum { MOE_STORED_ = 64 }; /* codes at a time */

/* Code i of a row. Codes are written in order: what is left of a byte becomes 0. */
MOE_EITHER uint32_t moe_code_at_(const uint8_t *row, int64_t i, int bits) {
  const uint8_t *p = row + i * bits / 8;
  const int at = (int)(i * bits % 8);
  const uint32_t above = at + bits > 8 ? p[1] : 0u;
  return (p[0] | above << 8) >> at & ((1u << bits) - 1u);
}
MOE_EITHER void moe_code_put_(uint8_t *row, int64_t i, int bits, uint32_t code) {
  uint8_t *p = row + i * bits / 8;
  const int at = (int)(i * bits % 8);
  const uint32_t word = (p[0] & ((1u << at) - 1u)) | code << at;
  p[0] = (uint8_t)word;
  if (at + bits > 8) p[1] = (uint8_t)(word >> 8);
}

/* n codes of 6 bits as kernels take them. Groups of eight are 48 bits; the sign moves to bit 7. */
MOE_FN void moe_six_to_bytes_(uint8_t *to, const uint8_t *codes, int64_t n) {
  for (int64_t left = n; left > 0; left -= 8, to += 8, codes += 6) {
    const int64_t some = moe_min_(8, left);
    uint8_t copy[8] = {0};
    if (some < 8) memcpy(copy, codes, (size_t)(some * 6 + 7) / 8);
    const uint8_t *p = some < 8 ? copy : codes;
    uint64_t x = p[0] | (uint64_t)p[1] << 8 | (uint64_t)p[2] << 16 | (uint64_t)p[3] << 24 | (uint64_t)p[4] << 32 |
                 (uint64_t)p[5] << 40;
    x = (x & 0xffffffu) | (x & 0xffffff000000u) << 8;
    x = (x & 0x00000fff00000fffu) | (x & 0x00fff00000fff000u) << 4;
    x = (x & 0x003f003f003f003fu) | (x & 0x0fc00fc00fc00fc0u) << 2;
    x = (x & 0x1f1f1f1f1f1f1f1fu) | (x & 0x2020202020202020u) << 2;
    if (some == 8)
      for (int b = 0; b < 8; b++, x >>= 8) to[b] = (uint8_t)x;
    else
      for (int64_t b = 0; b < some; b++, x >>= 8) to[b] = (uint8_t)x;
  }
}

/* Whether kernels take the codes from `first` of a row on. */
MOE_EITHER int moe_stored_plain_(const moe_element_format_ *f, int64_t first) {
  return !f->packed && first * f->bits % 8 == 0;
}

/* n codes from `first` of a row on. `zero`: of integers, the code of 0; see moe_element_format_. */
MOE_FN void moe_stored_load_(const moe_kernels *kernels, const moe_element_format_ *f, float *x, const uint8_t *row,
                             int64_t first, int64_t n, int zero) {
  const float unit = moe_castf_scalar((uint32_t)(121 - f->bias) << 23);
  const int bytes = f->bits == 6 && first % 4 == 0; /* codes begin with a byte */
  uint8_t code[MOE_STORED_];
  if (moe_stored_plain_(f, first)) {
    kernels->quant->load_codes[moe_wide_(f)](x, row + first * f->bits / 8, n, f);
    return;
  }
  for (int64_t at = 0, some; at < n; at += some, x += some) {
    some = moe_min_(MOE_STORED_, n - at);
    if (bytes) moe_six_to_bytes_(code, row + (first + at) * 6 / 8, some);
    for (int64_t i = 0; i < some && !bytes; i++) {
      const uint32_t c = moe_code_at_(row, first + at + i, f->bits);
      if (f->zero) x[i] = (float)((int)(c ^ f->flip) - zero) * unit;
      else if (f->bits == 4) moe_code_put_(code, i, 4, c);
      else code[i] = (uint8_t)((c & 31u) | (c & 32u) << 2);
    }
    if (!f->zero) kernels->quant->load_codes[moe_wide_(f)](x, code, some, f);
  }
}

/* The code of an integer in sign and magnitude. */
MOE_EITHER uint32_t moe_integer_code_(const moe_element_format_ *f, uint32_t byte, int zero) {
  const int magnitude = (int)(byte & 127u), most = 2 * f->zero - 1;
  const int code = (byte & 128u ? -magnitude : magnitude) + zero;
  return (uint32_t)(code < 0 ? 0 : code > most ? most : code) ^ f->flip;
}

/* Eight codes of 6 bits, or of integers with a zero that is one of their codes: from bytes of sign and magnitude. */
MOE_EITHER uint64_t moe_eight_codes_(const moe_element_format_ *f, uint64_t bytes, int zero) {
  const uint64_t ones = 0x0101010101010101u, low = 15 * ones, high = 128 * ones, from = (uint64_t)zero * ones;
  if (!f->zero) return (bytes & 31 * ones) | (bytes & high) >> 2;
  uint64_t m = bytes & ~high, negative = (bytes >> 7 & ones) * 255, sum, rest;
  if (f->bits == 4) {
    m = (m | (((m + 0x70 * ones) >> 7 & ones) * 255)) & low; /* at most 15, and so are the next */
    sum = from + m;
    sum = (sum | (((sum + 0x70 * ones) >> 7 & ones) * 255)) & low;
    rest = (from | high) - m;
    rest = rest & low & ((rest >> 7 & ones) * 255);
  } else {
    sum = from + m, rest = from - m;
  }
  return ((sum & ~negative) | (rest & negative)) ^ f->flip * ones;
}

/* n codes of a byte each, to codes from `first` of a row on, as they are stored. */
MOE_FN void moe_stored_pack_(uint8_t *row, int64_t first, int64_t n, int bits, const uint8_t *code) {
  uint8_t *to = row + first * bits / 8;
  int64_t i = 0;
  if (bits == 8) {
    memcpy(to, code, (size_t)n);
    return;
  }
  if (bits == 4 && first % 2 == 0)
    for (; i + 2 <= n; i += 2) *to++ = (uint8_t)(code[i] | code[i + 1] << 4);
  if (bits == 6 && first % 4 == 0)
    for (; i + 4 <= n; i += 4, to += 3) {
      to[0] = (uint8_t)(code[i] | code[i + 1] << 6);
      to[1] = (uint8_t)(code[i + 1] >> 2 | code[i + 2] << 4);
      to[2] = (uint8_t)(code[i + 2] >> 4 | code[i + 3] << 2);
    }
  for (; i < n; i++) moe_code_put_(row, first + i, bits, code[i]);
}

MOE_FN void moe_stored_store_(const moe_kernels *kernels, const moe_element_format_ *f, const moe_cast_ *cast,
                              uint8_t *row, int64_t first, int64_t n, const float *x, int zero) {
  uint8_t code[MOE_STORED_] = {0};
  if (moe_stored_plain_(f, first)) {
    kernels->quant->store_codes[moe_wide_(f)](row + first * f->bits / 8, x, n, f, cast);
    return;
  }
  for (int64_t at = 0, some; at < n; at += some, x += some) {
    some = moe_min_(MOE_STORED_, n - at);
    kernels->quant->store_codes[moe_wide_(f)](code, x, some, f, cast);
    if (f->zero && zero >= 2 * f->zero)
      for (int64_t i = 0; i < some; i++) code[i] = (uint8_t)moe_integer_code_(f, code[i], zero);
    else if (!f->zero && f->bits == 4)
      for (int64_t i = some - 1; i >= 0; i--) code[i] = (uint8_t)moe_code_at_(code, i, 4);
    else
      for (int64_t i = 0; i < some; i += 8) {
        uint64_t eight;
        memcpy(&eight, code + i, sizeof eight);
        eight = moe_eight_codes_(f, eight, zero);
        memcpy(code + i, &eight, sizeof eight);
      }
    moe_stored_pack_(row, first + at, some, f->bits, code);
  }
}

#endif
