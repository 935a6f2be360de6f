/* test_quantized_input: quantised weights that are refused, with a status and a sentence, outputs untouched; what the
   device's MX specs and packed weights want beside them. */
#include "support/quantized_layer.h"

#include <math.h>

/* ------------------------------------------------------------------------------------------------------- bad input */

static void refuse(struct layer *l, const struct problem_args *args, enum problem_op op, moe_status status,
                   const char *word) {
  struct problem_args own = *args;
  moe_context ctx = {0};
  char before[64];
  own.forward.layer.gate_up_proj_weight = own.forward.layer.down_proj_weight = NULL;
  void *workspace = malloc(1 << 24);
  assert_non_null(workspace);
  problem_set_workspace(op, &own, workspace, 1 << 24);
  memcpy(before, l->p.tensor[PT_OUTPUT].data, sizeof before);
  const moe_status got = problem_call(op, &ctx, &own);
  free(workspace);
  if (got != status || !strstr(ctx.message, word))
    fail_msg("%s instead of %s: \"%s\" does not name %s", moe_status_str(got), moe_status_str(status), ctx.message,
             word);
  assert_memory_equal(before, l->p.tensor[PT_OUTPUT].data, sizeof before);
}

/* One field of the weight for gate and up is wrong. */
#define REFUSE(assignment, status, word)                           \
  do {                                                             \
    l.gate_up.weight = good;                                       \
    l.gate_up.weight.assignment;                                   \
    refuse(&l, &args, PROBLEM_FORWARD, MOE_ERROR_##status, word);  \
    refuse(&l, &args, PROBLEM_BACKWARD, MOE_ERROR_##status, word); \
  } while (0)

static void open_bad(struct layer *l, struct problem_args *args, moe_weight_scaling scaling, moe_mx_layout layout) {
  struct storage s = {.gate_up = {.scaling = scaling, .layout = layout}, .powers = 1};
  struct problem_options o = shape(3, MOE_DTYPE_F32, 512, 32);
  o.save_gate_up = 1;
  problem_options_settle(&o);
  layer_open(l, &o, &s, 0);
  moe_context ctx = {.num_threads = 1};
  run(l, &ctx, 0, 0);
  problem_make_args(&l->p, args);
  give_quantized(l, &args->forward.layer), give_quantized(l, &args->backward.layer);
}

static void test_bad_mx(void **state) {
  (void)state;
  struct layer l;
  struct problem_args args;
  open_bad(&l, &args, MOE_WEIGHT_MX, MOE_MX_LAYOUT_NKI_STRIDED_X4);
  const moe_quantized_weight good = l.gate_up.weight;
  REFUSE(codes = NULL, NULL_ARGUMENT, "quantized_gate_up_proj_weight->codes");
  REFUSE(scales = NULL, NULL_ARGUMENT, "quantized_gate_up_proj_weight->scales");
  REFUSE(codes = (const char *)good.codes + 1, MISALIGNED, "quantized_gate_up_proj_weight->codes");
  REFUSE(element = (moe_element)9, INVALID_OPTION, "element");
  REFUSE(scaling = (moe_weight_scaling)-1, INVALID_OPTION, "scaling");
  REFUSE(layout = (moe_mx_layout)99, INVALID_OPTION, "layout");
  REFUSE(scales_layout = MOE_MX_SCALES_TILED_128X4, INVALID_OPTION, "scales_layout");
  REFUSE(scales_layout = (moe_mx_scales)77, INVALID_OPTION, "scales_layout");
  REFUSE(layout = MOE_MX_LAYOUT_GGML, INVALID_OPTION, "element_bits");
  l.gate_up.weight = good;
  l.gate_up.weight.codes = l.p.tensor[PT_OUTPUT].data;
  refuse(&l, &args, PROBLEM_FORWARD, MOE_ERROR_OVERLAP, "output");
  l.gate_up.weight.codes = l.p.tensor[PT_HIDDEN_GRAD].data;
  refuse(&l, &args, PROBLEM_BACKWARD, MOE_ERROR_OVERLAP, "hidden_states_grad");
  l.gate_up.weight = good;
  args.forward.layer.I = args.backward.layer.I = 30; /* not this layout's, for down is in rows */
  l.down.weight.layout = MOE_MX_LAYOUT_NKI_WRAPX;
  refuse(&l, &args, PROBLEM_FORWARD, MOE_ERROR_INVALID_SHAPE, "K");
  layer_close(&l);
}

static void test_bad_scales(void **state) {
  (void)state;
  struct layer l;
  struct problem_args args;
  open_bad(&l, &args, MOE_WEIGHT_BLOCK, MOE_MX_LAYOUT_PLAIN);
  const moe_quantized_weight good = l.gate_up.weight;
  float *scale = (float *)(void *)l.gate_up.scales.data;
  REFUSE(element = MOE_ELEMENT_E2M1, INVALID_OPTION, "element");
  REFUSE(block = -1, INVALID_SHAPE, "block");
  REFUSE(repeat = -1, INVALID_SHAPE, "repeat");
  REFUSE(repeat = INT64_MAX / 2, OVERFLOW, "quantized_gate_up_proj_weight->scales");
  REFUSE(scales = (const char *)good.scales - 1, MISALIGNED, "quantized_gate_up_proj_weight->scales");
  scale[1] = float_of(0x7fc00000u);
  REFUSE(element = MOE_ELEMENT_E4M3FN, INVALID_OPTION, "quantized_gate_up_proj_weight->scales");
  scale[1] = float_of(0x7f800000u);
  REFUSE(element = MOE_ELEMENT_E4M3FN, INVALID_OPTION, "quantized_gate_up_proj_weight->scales");
  layer_close(&l);
}

/* Groups, scales of other types, slices. */
static void test_bad_groups(void **state) {
  (void)state;
  struct layer l;
  struct problem_args args;
  static const float some[64] = {[3] = INFINITY};
  struct storage s = {.gate_up = {.scaling = MOE_WEIGHT_GROUP, .element = MOE_ELEMENT_INT8, .block = 16}, .powers = 1};
  s.down = s.gate_up;
  struct problem_options o = shape(3, MOE_DTYPE_F32, 64, 32);
  o.save_gate_up = 1;
  problem_options_settle(&o);
  layer_open(&l, &o, &s, 0);
  moe_context ctx = {.num_threads = 1};
  run(&l, &ctx, 0, 0);
  problem_make_args(&l.p, &args);
  give_quantized(&l, &args.forward.layer), give_quantized(&l, &args.backward.layer);
  const moe_quantized_weight good = l.gate_up.weight;
  REFUSE(element = MOE_ELEMENT_MXINT8, INVALID_OPTION, "element cannot be MXINT8, which is for MX");
  REFUSE(element = (moe_element)(ELEMENTS + INTEGERS), INVALID_OPTION, "element");
  REFUSE(scaling = MOE_WEIGHT_MX, INVALID_OPTION, "element");
  REFUSE(scaling = MOE_WEIGHT_BLOCK, INVALID_OPTION, "element");
  REFUSE(block = 0, INVALID_SHAPE, "block must be at least 1");
  REFUSE(first_k = 16, INVALID_SHAPE, "first_k is not within a block");
  REFUSE(first_k = -1, INVALID_SHAPE, "first_k is not within a block");
  REFUSE(scales_type = MOE_SCALES_COUNT_, INVALID_OPTION, "scales_type");
  REFUSE(zero_points = (const uint8_t *)some, INVALID_OPTION, "zero_points are for UINT4 and GROUP only");
  REFUSE(codes = NULL, NULL_ARGUMENT, "quantized_gate_up_proj_weight->codes");
  REFUSE(scales = NULL, NULL_ARGUMENT, "quantized_gate_up_proj_weight->scales");
  REFUSE(scales = some, INVALID_OPTION, "quantized_gate_up_proj_weight->scales must be finite");
  REFUSE(global_scale = some, INVALID_OPTION, "quantized_gate_up_proj_weight->global_scale must be finite");
  REFUSE(global_scale = (const float *)(const void *)((const char *)some + 1), MISALIGNED,
         "quantized_gate_up_proj_weight->global_scale");
  l.gate_up.weight = good;
  l.gate_up.weight.scaling = MOE_WEIGHT_BLOCK, l.gate_up.weight.element = MOE_ELEMENT_E4M3FN;
  const moe_quantized_weight good_blocks = l.gate_up.weight;
#define REFUSE_BLOCKS(assignment, word)                                \
  do {                                                                 \
    l.gate_up.weight = good_blocks;                                    \
    l.gate_up.weight.assignment;                                       \
    refuse(&l, &args, PROBLEM_FORWARD, MOE_ERROR_INVALID_SHAPE, word); \
  } while (0)
  REFUSE_BLOCKS(block_columns = -1, "block_columns is negative");
  REFUSE_BLOCKS(first_column = 16, "first_column is not within a block");
  REFUSE_BLOCKS(first_column = -1, "first_column is not within a block");
  REFUSE_BLOCKS(block_columns = 8; l.gate_up.weight.first_column = 8, "first_column is not within a block");
  l.gate_up.weight = good_blocks, l.gate_up.weight.out_in = 2;
  refuse(&l, &args, PROBLEM_FORWARD, MOE_ERROR_INVALID_OPTION, "out_in must be 0 or 1");
  l.gate_up.weight = good_blocks, l.gate_up.weight.global_scale = some;
  refuse(&l, &args, PROBLEM_FORWARD, MOE_ERROR_INVALID_OPTION, "global_scale is for GROUP only");
  l.gate_up.weight = (moe_quantized_weight){.element = MOE_ELEMENT_E2M3, .layout = MOE_MX_LAYOUT_NKI_1X32};
  refuse(&l, &args, PROBLEM_FORWARD, MOE_ERROR_INVALID_OPTION, "layout must be PLAIN for this element");
  layer_close(&l);
}

/* ----------------------------------------------------------------------------------------------------- the MX specs */

static void test_specs(void **state) {
  (void)state;
  for (int spec = MOE_CTE_SHARD_ON_BLOCK_MX; spec <= MOE_CTE_SHARD_ON_I_MX_HYBRID; spec++)
    for (int skip_token = 0; skip_token < 2; skip_token++) {
      struct storage s = {.gate_up = {.layout = MOE_MX_LAYOUT_NKI_STRIDED_X4},
                          .down = {.layout = MOE_MX_LAYOUT_NKI_STRIDED_X4}};
      struct problem_options o = shape(60, MOE_DTYPE_BF16, 512, 64);
      o.skip_token = skip_token, o.device_output_shape = o.accumulate_output = o.not_accumulating = o.dropping = 0;
      o.spec = MOE_CTE_SHARD_ON_BLOCK, o.no_conditions = 0;
      problem_options_settle(&o);
      struct layer l;
      moe_context ctx = {.num_threads = 1};
      layer_open(&l, &o, &s, 0);
      run(&l, &ctx, 1, 0);
      const int64_t row = o.H * 2, rows = spec == MOE_CTE_SHARD_ON_BLOCK_MX ? 2 * o.T : o.T + !skip_token;
      unsigned char *output = malloc((size_t)(rows * row)), *zero = calloc((size_t)(rows * row), 1);
      struct problem_args args;
      problem_make_args(&l.p, &args);
      args.forward.device = (moe_nkilib_device){.spec = (moe_cte_spec)spec, .output_shape = 1};
      args.forward.output = output;
      give_quantized(&l, &args.forward.layer);
      call(&l, &ctx, PROBLEM_FORWARD, &args);
      assert_memory_equal(output, l.p.tensor[PT_OUTPUT].data, (size_t)(o.T * row));
      assert_memory_equal(output + o.T * row, zero, (size_t)((rows - o.T) * row));
      args.forward.layer.quantized_down_proj_weight = NULL;
      args.forward.layer.down_proj_weight = l.p.tensor[PT_DOWN_WEIGHT].data;
      assert_int_equal(problem_call(PROBLEM_FORWARD, &ctx, &args), MOE_ERROR_INVALID_OPTION);
      assert_non_null(strstr(ctx.message, "spec"));
      if (spec == MOE_CTE_SHARD_ON_I_MX_HYBRID) {
        give_quantized(&l, &args.forward.layer);
        args.forward.layer.conditions = NULL;
        assert_int_equal(problem_call(PROBLEM_FORWARD, &ctx, &args), MOE_ERROR_NULL_ARGUMENT);
      }
      free(output), free(zero);
      layer_close(&l);
    }
}

/* A weight whose scales multiply sums, packed: the scales are wanted beside it. */
static void test_packed_alone(void **state) {
  (void)state;
  struct storage s = {.gate_up = {.scaling = MOE_WEIGHT_COLUMN}, .down = {.scaling = MOE_WEIGHT_STATIC}};
  const struct problem_options o = shape(61, MOE_DTYPE_BF16, 40, 48);
  struct layer l;
  moe_context ctx = {.num_threads = 1};
  layer_open(&l, &o, &s, 0);
  run(&l, &ctx, 1, 1);
  struct problem_args args;
  problem_make_args(&l.p, &args);
  void *gate_up = pack_one(&ctx, &l, &l.gate_up, &args.forward.layer.packed_gate_up_proj_weight_bytes);
  args.forward.layer.packed_gate_up_proj_weight = gate_up;
  refuse(&l, &args, PROBLEM_FORWARD, MOE_ERROR_NULL_ARGUMENT, "down_proj_weight");
  args.forward.layer.quantized_down_proj_weight = &l.down.weight;
  refuse(&l, &args, PROBLEM_FORWARD, MOE_ERROR_INVALID_OPTION, "packed_gate_up_proj_weight");
  moe_pack_weights_args pack_args = {
      .layout = MOE_PACK_UP, .backward = 1, .E = 1, .rows = 8, .columns = 8, .quantized_weight = &l.down.weight};
  size_t bytes;
  assert_int_equal(moe_pack_weights_bf16_size(&ctx, &pack_args, &bytes), MOE_ERROR_INVALID_OPTION);
  free(gate_up);
  layer_close(&l);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_bad_mx), cmocka_unit_test(test_bad_scales),   cmocka_unit_test(test_bad_groups),
      cmocka_unit_test(test_specs),  cmocka_unit_test(test_packed_alone),
  };
  return cmocka_run_group_tests_name("quantized input", tests, NULL, NULL);
}
