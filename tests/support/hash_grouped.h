/* hash_grouped.h: grouped GEMM with every option, for bits_hash. Its functions are there already. */
#ifndef MOE_TEST_HASH_GROUPED_H
#define MOE_TEST_HASH_GROUPED_H

#include "grouped_case.h"

/* How W is stored: plain, or quantised in some ways. */
static void hash_grouped_storage(grouped_options *o, int i) {
  static const moe_quantized_weight storage[] = {
      {.element = MOE_ELEMENT_E2M1},
      {.element = MOE_ELEMENT_E5M2, .layout = MOE_MX_LAYOUT_NKI_1X32},
      {.element = MOE_ELEMENT_E2M1, .layout = MOE_MX_LAYOUT_GGML},
      {.element = MOE_ELEMENT_E4M3FN, .scaling = MOE_WEIGHT_COLUMN_PER_EXPERT},
      {.element = MOE_ELEMENT_E4M3, .scaling = MOE_WEIGHT_BLOCK, .block = 32},
      {.element = MOE_ELEMENT_E4M3FN, .scaling = MOE_WEIGHT_STATIC}};
  enum { STORAGES = sizeof storage / sizeof *storage };
  o->quantized = i % 2;
  if (o->quantized) o->storage = storage[i / 2 % STORAGES], o->args.K = (o->args.K + 31) / 32 * 32;
}

static void hash_grouped(struct settings *set, moe_dtype dtype) {
  uint64_t hash = 0, seed = 41;
  for (int i = 0; i < 60; i++) {
    grouped_options o;
    grouped_case c;
    memset(&o, 0, sizeof o);
    o.args.num_tokens = test_random_range(&seed, 1, 50), o.args.topk = test_random_range(&seed, 1, 3);
    o.args.E = test_random_range(&seed, 1, 4);
    o.args.N = test_random_range(&seed, 1, 150), o.args.K = test_random_range(&seed, 1, 150);
    o.args.permute_x = i % 3 == 0, o.args.permute_y = i % 3 == 1, o.args.sum_topk = i % 6 == 0;
    o.args.weight_order = (moe_grouped_order)(i / 2 % 2), o.args.topk_mode = (moe_topk_mode)(i / 4 % 2);
    o.args.accumulate = (uint32_t)(i / 8 % 2) * (MOE_ACCUMULATE_DW | MOE_ACCUMULATE_Y | MOE_ACCUMULATE_DX);
    o.gather = i % 7 < 3, o.bias = i / 3 % 2, o.topk_weights = i % 5 < 3, o.grads = 1, o.padding = i % 4 == 1;
    hash_grouped_storage(&o, i);
    grouped_open(&c, test_random(&seed), dtype, &o);
    for (int op = 0; op < 3; op++) {
      if (grouped_run(&c, &set->ctx, op, &c.args) != MOE_OK) fail("grouped", &set->ctx);
      for (int output = 0; output < GROUPED_OUTPUTS; output++)
        if (grouped_writes(&c, op, output))
          hash = problem_hash_bytes(hash, c.out[output].data, c.out[output].count,
                                    (int)moe_dtype_size(c.out[output].dtype));
    }
    grouped_close(&c);
  }
  printf("grouped          %s %016llx\n", problem_dtype_name(dtype), (unsigned long long)hash);
}

#endif /* MOE_TEST_HASH_GROUPED_H */
