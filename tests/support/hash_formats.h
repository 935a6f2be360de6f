/* hash_formats.h: for bits_hash --more: elements and casts that came after the plain output. */
#ifndef MOE_TEST_HASH_FORMATS_H
#define MOE_TEST_HASH_FORMATS_H

typedef moe_status (*hash_encode)(moe_context *, uint8_t *, const float *, int64_t, uint32_t);
typedef moe_status (*hash_decode)(moe_context *, float *, const uint8_t *, int64_t);

/* An element by itself, and under scales, by every cast or, of those of the plain output, by ties toward zero. */
static void hash_format(struct settings *set, moe_element element, const char *name, hash_encode encode,
                        hash_decode decode) {
  static const uint32_t casts[] = {4, 5, 0, 1, 2, 3};
  static float y[ARRAY];
  static uint8_t codes[ARRAY], scales[ARRAY];
  const float *x = random_floats();
  moe_context *ctx = &set->ctx;
  uint64_t h = 0;
  for (int i = 0; i < (element > MOE_ELEMENT_E2M1 ? 6 : 2) * RULES; i++) {
    const moe_quantize_mx_args q = {.element = element, .scale_rule = (moe_scale_rule)(i % RULES),
        .cast = casts[i / RULES], .rows = 121, .columns = 330, .transposed = i % 2, .plain = x, .codes = codes,
        .scales = scales};
    const moe_dequantize_mx_args d = {.element = element, .rows = 121, .columns = 330, .transposed = i % 2,
        .codes = codes, .scales = scales, .plain = y};
    memset(codes, 0, sizeof codes);
    if (encode(ctx, codes, x, ARRAY, q.cast) != MOE_OK) fail("from_f32", ctx);
    h = problem_hash_bytes(h, codes, ARRAY, 1);
    if (decode(ctx, y, codes, ARRAY) != MOE_OK) fail("to_f32", ctx);
    h = problem_hash_bytes(h, y, ARRAY, 4);
    memset(scales, 0, sizeof scales);
    if (moe_quantize_mx(ctx, &q) != MOE_OK) fail("moe_quantize_mx", ctx);
    h = problem_hash_bytes(problem_hash_bytes(h, codes, ARRAY, 1), scales, ARRAY, 1);
    if (moe_dequantize_mx(ctx, &d) != MOE_OK) fail("moe_dequantize_mx", ctx);
    h = problem_hash_bytes(h, y, 121 * 330, 4);
  }
  printf("more element %s %016llx\n", name, (unsigned long long)h);
}

static void hash_formats(struct settings *set) {
#define HASH_FORMAT(name, NAME, bits, fraction, bias, max, infinity, nan) \
  hash_format(set, MOE_ELEMENT_##NAME, #name, moe_##name##_from_f32, moe_##name##_to_f32);
  MOE_ELEMENT_LIST(HASH_FORMAT)
#undef HASH_FORMAT
}

#endif /* MOE_TEST_HASH_FORMATS_H */
