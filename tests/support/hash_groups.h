/* hash_groups.h: for bits_hash --more: quantising in groups and back, MXINT8, and the layer from weights in groups. */
#ifndef MOE_TEST_HASH_GROUPS_H
#define MOE_TEST_HASH_GROUPS_H

/* Every element that groups take, with every type of scale. */
static void hash_groups(struct settings *set) {
  static const uint32_t casts[] = {0, 1, 2, 5};
  static float y[ARRAY];
  static uint8_t codes[ARRAY], scales[4 * ARRAY], zeros[ARRAY];
  const float *x = random_floats();
  moe_context *ctx = &set->ctx;
  for (int element = 0; element <= MOE_ELEMENT_UINT4; element++) {
    uint64_t h = 0;
    for (int i = 0; i < 4 * MOE_SCALES_COUNT_ && element != MOE_ELEMENT_MXINT8; i++) {
      float global = 0.3f;
      const int64_t group = i % 4 == 0 ? 16 : 7 + 40 * (i % 4);
      const moe_quantize_group_args q = {.element = (moe_element)element, .scales_type = (moe_scales_type)(i / 4),
          .cast = casts[i % 4], .rows = 121, .columns = 329, .group = group,
          .global_scale_given = i / 4 != MOE_SCALES_E4M3FN, .plain = x, .codes = codes, .scales = scales,
          .global_scale = i % 2 ? &global : NULL, .zero_points = element == MOE_ELEMENT_UINT4 && i % 3 ? zeros : NULL};
      const moe_dequantize_group_args d = {.element = q.element, .scales_type = q.scales_type, .rows = 121,
          .columns = 329, .group = group, .codes = codes, .scales = scales, .global_scale = q.global_scale,
          .zero_points = q.zero_points, .plain = y};
      memset(codes, 0, sizeof codes), memset(scales, 0, sizeof scales), memset(zeros, 0, sizeof zeros);
      if (moe_quantize_group(ctx, &q) != MOE_OK) fail("moe_quantize_group", ctx);
      h = problem_hash_bytes(problem_hash_bytes(h, codes, ARRAY, 1), zeros, ARRAY, 1);
      if (i / 4 < MOE_SCALES_E4M3FN) h = problem_hash_bytes(h, scales, ARRAY, i / 4 == MOE_SCALES_F32 ? 4 : 2);
      else h = problem_hash_bytes(h, scales, ARRAY, 1);
      h = problem_hash_bytes(h, &global, 1, 4);
      if (moe_dequantize_group(ctx, &d) != MOE_OK) fail("moe_dequantize_group", ctx);
      h = problem_hash_bytes(h, y, 121 * 329, 4);
    }
    printf("more group %d %016llx\n", element, (unsigned long long)h);
  }
}

static void hash_groups_layer(struct settings *set, moe_dtype dtype) {
  static const float some;
  uint64_t rng = 91, hash = 0;
  for (int i = 0; i < 24; i++) {
    struct problem_options o = problem_options_random(8800 + (uint64_t)i, dtype);
    struct problem p;
    struct quantized q[2] = {{.parts = 2}, {.parts = 1}};
    o.nan_row = 0;
    problem_options_settle(&o);
    if (!problem_open(&p, &o, NULL, NULL)) exit(1);
    problem_fill(&p);
    for (int w = 0; w < 2; w++) {
      q[w].E = o.E, q[w].K = w ? o.I : o.H, q[w].columns = w ? o.H : o.I;
      q[w].weight.scaling = i % 4 ? MOE_WEIGHT_GROUP : i % 8 ? MOE_WEIGHT_BLOCK : MOE_WEIGHT_MX;
      q[w].weight.element = i % 4 ? (moe_element)(MOE_ELEMENT_E2M1 + (i + w) % 9) : (moe_element)(MOE_ELEMENT_E2M3 + w);
      if (i % 8 == 4) q[w].weight.element = MOE_ELEMENT_E4M3FN;
      if (q[w].weight.element == MOE_ELEMENT_MXINT8) q[w].weight.element = MOE_ELEMENT_INT8;
      q[w].weight.block = 3 + i, q[w].weight.block_columns = 1 + i / 2, q[w].weight.first_k = i / 3;
      q[w].weight.scales_type = (moe_scales_type)(i / 4 % MOE_SCALES_COUNT_);
      if (i % 4 == 1) q[w].weight.global_scale = &some;
      quantized_make(&q[w], &rng, 118, 128, 0, 1);
    }
    for (int op = 0; op <= PROBLEM_BACKWARD; op++) {
      struct problem_args args;
      size_t bytes = 0;
      problem_make_args(&p, &args);
      for (int k = 0; k < 2; k++) {
        moe_blockwise_layer *l = k ? &args.backward.layer : &args.forward.layer;
        l->quantized_gate_up_proj_weight = &q[0].weight, l->quantized_down_proj_weight = &q[1].weight;
      }
      if (problem_workspace_size((enum problem_op)op, &set->ctx, &args, &bytes) != MOE_OK) fail("groups", &set->ctx);
      void *workspace = malloc(bytes + 1);
      problem_set_workspace((enum problem_op)op, &args, workspace, bytes);
      if (problem_call((enum problem_op)op, &set->ctx, &args) != MOE_OK) fail("groups", &set->ctx);
      free(workspace);
      hash = problem_hash(&p, hash, (enum problem_op)op);
    }
    quantized_free(&q[0]), quantized_free(&q[1]);
    problem_close(&p, NULL, NULL);
  }
  printf("groups           %s %016llx\n", problem_dtype_name(dtype), (unsigned long long)hash);
}

#endif /* MOE_TEST_HASH_GROUPS_H */
