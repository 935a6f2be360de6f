/* moe_neuron.h against a stand-in for libnrt (neuron/standin_nrt.c): what is bound, run and read back is to the bit
   what the CPU computes; what does not fit is refused with a sentence; whatever fails, nothing is kept. */
#include <math.h>
#include <pthread.h>

#include "neuron/fixture.h"

#ifndef STANDIN
#error "STANDIN, STANDIN_OLD_PATH and STANDIN_BROKEN_PATH are paths of the stand-in libraries"
#endif

/* The forward's NEFF. */
static void forward_neff(session *s) {
  const moe_blockwise_mm_fwd_args *args = &s->p->fwd[1];
  assert_ok((s->p->dtype == MOE_DTYPE_BF16 ? moe_neuron_describe_blockwise_mm_fwd_bf16
                                           : moe_neuron_describe_blockwise_mm_fwd_f32)(&s->ctx, args, NULL, &s->table),
            &s->ctx);
  neff_of(&s->neff, neuron_op_of(STANDIN_FORWARD, s->p->dtype), args, &s->table);
}

static moe_status forward(session *s, const moe_neuron_options *options) {
  return (s->p->dtype == MOE_DTYPE_BF16 ? moe_neuron_blockwise_mm_fwd_bf16 : moe_neuron_blockwise_mm_fwd_f32)(
      &s->ctx, &s->model, &s->p->fwd[1], options);
}

static void forward_cpu(session *s) {
  const moe_blockwise_mm_fwd_args *args = &s->p->fwd[0];
  assert_ok((s->p->dtype == MOE_DTYPE_BF16 ? moe_blockwise_mm_fwd_bf16 : moe_blockwise_mm_fwd_f32)(&s->ctx, args),
            &s->ctx);
}

static void assert_same_outputs(const problem *p) {
  assert_memory_equal(&p->out[0], &p->out[1], sizeof p->out[0]);
}

/* ---------------------------------------------------------------------------------------------------------- absence */

static void test_no_runtime(void **state) {
  (void)state;
  moe_context ctx = {.allocate = take, .release = give};
  moe_neuron neuron;
  moe_neuron_model model;
  moe_neuron_choice choice;
  moe_neuron_info info;
  problem *p = problem_new(MOE_DTYPE_BF16, 3, 0);
  assert_fails(moe_neuron_open(&ctx, &neuron, "/nowhere/libnrt.so.1"), MOE_ERROR_NO_RUNTIME, &ctx, "/nowhere");
  assert_string_equal(neuron.why, ctx.message);
  assert_fails(moe_neuron_load(&ctx, &neuron, p, sizeof *p, -1, &model), MOE_ERROR_NO_RUNTIME, &ctx, "/nowhere");
  assert_fails(moe_neuron_get_info(&ctx, &neuron, &info), MOE_ERROR_NO_RUNTIME, &ctx, "/nowhere");
  assert_fails(moe_neuron_blockwise_mm_fwd_bf16(&ctx, &model, &p->fwd[1], NULL), MOE_ERROR_NO_RUNTIME, &ctx, "/now");
  assert_ok(moe_blockwise_mm_fwd_bf16(&ctx, &p->fwd[0]), &ctx);
  assert_ok(moe_neuron_or_cpu_blockwise_mm_fwd_bf16(&ctx, &model, &p->fwd[1], NULL, &choice), &ctx);
  assert_int_equal(choice.on_device, 0);
  assert_non_null(strstr(choice.why, "/nowhere"));
  assert_same_outputs(p);
  assert_ok(moe_neuron_or_cpu_blockwise_mm_fwd_bf16(NULL, NULL, &p->fwd[1], NULL, &choice) == MOE_ERROR_WORKSPACE
                ? MOE_OK : MOE_ERROR_WORKSPACE, &ctx);
  assert_ok(moe_neuron_unload(&ctx, &model), &ctx);
  moe_neuron_close(&neuron);
  assert_fails(moe_neuron_open(&ctx, &neuron, STANDIN_BROKEN_PATH), MOE_ERROR_NO_RUNTIME, &ctx, "lacks nrt_execute");
  assert_null(dlopen(STANDIN_BROKEN_PATH, RTLD_NOW | RTLD_NOLOAD));
  free(p);
}

/* A libnrt without the functions that it may lack. */
static void test_old_runtime(void **state) {
  (void)state;
  session s;
  moe_neuron_tensor a, b;
  moe_nrt_vnc_memory_stats stats;
  const moe_neuron_options twice = {.repeat = 2};
  control = hold(STANDIN_OLD_PATH);
  control->reset();
  memset(&s, 0, sizeof s);
  s.ctx.allocate = take, s.ctx.release = give;
  s.p = problem_new(MOE_DTYPE_F32, 7, 0);
  assert_ok(moe_neuron_open(&s.ctx, &s.neuron, STANDIN_OLD_PATH), &s.ctx);
  forward_neff(&s);
  neff_tensor(&s.neff, "hidden_states")->size += H * 4; /* a row T */
  assert_fails(moe_neuron_load(&s.ctx, &s.neuron, &s.neff, sizeof s.neff, -1, &s.model), MOE_ERROR_UNSUPPORTED, &s.ctx,
               "core");
  assert_ok(moe_neuron_load(&s.ctx, &s.neuron, &s.neff, sizeof s.neff, 0, &s.model), &s.ctx);
  forward_cpu(&s);
  assert_ok(forward(&s, &twice), &s.ctx);
  assert_int_equal(control->calls("nrt_execute"), 2);
  assert_same_outputs(s.p);
  assert_ok(moe_neuron_tensor_new(&s.ctx, &s.neuron, 0, 64, NULL, &a), &s.ctx);
  assert_fails(moe_neuron_tensor_slice(&s.ctx, &a, 0, 8, &b), MOE_ERROR_UNSUPPORTED, &s.ctx, "slice");
  assert_fails(moe_neuron_tensor_fill(&s.ctx, &a, 0, 0, 8), MOE_ERROR_UNSUPPORTED, &s.ctx, "nrt_tensor_memset");
  assert_fails(moe_neuron_memory(&s.ctx, &s.neuron, 0, &stats), MOE_ERROR_UNSUPPORTED, &s.ctx, "memory_stats");
  assert_fails(moe_neuron_profile_start(&s.ctx, &s.model, "x"), MOE_ERROR_UNSUPPORTED, &s.ctx, "nrt_profile_start");
  moe_neuron_tensor_free(&a);
  session_close(&s);
}

/* ------------------------------------------------------------------------------------------------------- operations */

static void test_forward(void **state) {
  session s;
  session_open(&s, *(moe_dtype *)*state, 0);
  forward_neff(&s);
  load(&s);
  assert_int_equal(s.model.core, 1); /* which the runtime chose */
  forward_cpu(&s);
  assert_ok(forward(&s, NULL), &s.ctx);
  assert_same_outputs(s.p);
  session_close(&s);
}

/* A NEFF with a row T, with more conditions than blocks, and without the checkpoints. */
static void test_padding(void **state) {
  session s;
  session_open(&s, *(moe_dtype *)*state, 0);
  const uint32_t size = s.p->dtype == MOE_DTYPE_BF16 ? 2 : 4;
  s.p->fwd[0].gate_up_activations_T = s.p->fwd[0].down_activations = NULL;
  s.p->fwd[1].gate_up_activations_T = s.p->fwd[1].down_activations = NULL;
  forward_neff(&s);
  neff_tensor(&s.neff, "hidden_states")->size += H * size;
  neff_tensor(&s.neff, "output")->size += H * size;
  neff_tensor(&s.neff, "expert_affinities_masked")->size += E * 4;
  neff_tensor(&s.neff, "conditions")->size += 8;
  load(&s);
  forward_cpu(&s);
  assert_ok(forward(&s, NULL), &s.ctx);
  assert_same_outputs(s.p);
  session_close(&s);
}

static void test_backward(void **state) {
  session s;
  session_open(&s, *(moe_dtype *)*state, 1);
  const int bf16 = s.p->dtype == MOE_DTYPE_BF16;
  forward_cpu(&s);
  memcpy(s.p->out[1].saved, s.p->out[0].saved, sizeof s.p->out[0].saved);
  memcpy(s.p->out[1].down, s.p->out[0].down, sizeof s.p->out[0].down);
  memcpy(s.p->out[1].y, s.p->out[0].y, sizeof s.p->out[0].y);
  assert_ok((bf16 ? moe_neuron_describe_blockwise_mm_bwd_bf16
                  : moe_neuron_describe_blockwise_mm_bwd_f32)(&s.ctx, &s.p->bwd[1], NULL, &s.table), &s.ctx);
  neff_of(&s.neff, neuron_op_of(STANDIN_BACKWARD, s.p->dtype), &s.p->bwd[1], &s.table);
  snprintf(neff_tensor(&s.neff, "gate_up_activations_T")->name, 64, "gate_up_proj_act_checkpoint_T");
  snprintf(neff_tensor(&s.neff, "down_activations")->name, 64, "down_proj_act_checkpoint"); /* as nki-library has it */
  load(&s);
  moe_neuron_report report;
  assert_ok((bf16 ? moe_neuron_check_blockwise_mm_bwd_bf16 : moe_neuron_check_blockwise_mm_bwd_f32)(
                &s.ctx, &s.model, &s.p->bwd[0], &s.p->bwd[1], NULL, &report), &s.ctx);
  assert_same_outputs(s.p);
  assert_int_equal(report.count, 6);
  assert_int_equal(report.agree, 1);
  session_close(&s);
}

/* MX weights in a layout of Trainium: words and scale bytes travel as they are, the bias in the kernel's order. */
static void test_mx(void **state) {
  const moe_element element = *state ? MOE_ELEMENT_E4M3FN : MOE_ELEMENT_E2M1;
  enum { HX = 512, IX = 64, LARGE = HX * 2 * IX * E };
  const int bits = element == MOE_ELEMENT_E2M1 ? 4 : 8;
  static float plain[LARGE], x[T * HX], y[2][T * HX], bias[E * 2 * IX];
  static uint8_t codes[LARGE], scales[LARGE], words[2][LARGE * 2], word_scales[2][LARGE];
  session s;
  uint64_t seed = 11;
  session_open(&s, MOE_DTYPE_F32, 0);
  fill(s.p, plain, LARGE, 1, &seed, MOE_DTYPE_F32), fill(s.p, x, T * HX, 1, &seed, MOE_DTYPE_F32);
  fill(s.p, bias, E * 2 * IX, 1, &seed, MOE_DTYPE_F32);
  for (int w = 0; w < 2; w++) {
    const int64_t rows = w ? E * HX : E * 2 * IX, k = w ? IX : HX;
    const moe_quantize_mx_args quantize = {.element = element, .cast = MOE_CAST_SATURATE, .rows = rows, .columns = k,
        .plain = plain, .codes = codes, .scales = scales};
    const moe_mx_layout_args convert = {.from = MOE_MX_LAYOUT_PLAIN, .to = w ? MOE_MX_LAYOUT_NKI_STRIDED_X4
                                                                             : MOE_MX_LAYOUT_NKI_CONTIGUOUS_X4,
        .element_bits = bits, .parts = w ? 1 : 2, .E = E, .K = k, .columns = w ? HX : IX, .codes_in = codes,
        .scales_in = scales, .codes_out = words[w], .scales_out = word_scales[w]};
    assert_ok(moe_quantize_mx(&s.ctx, &quantize), &s.ctx);
    assert_ok(moe_mx_layout_convert(&s.ctx, &convert), &s.ctx);
  }
  const moe_quantized_weight gate_up = {.element = element, .layout = MOE_MX_LAYOUT_NKI_CONTIGUOUS_X4,
      .codes = words[0], .scales = word_scales[0]};
  moe_quantized_weight down = {.element = element, .layout = MOE_MX_LAYOUT_NKI_STRIDED_X4, .codes = words[1],
      .scales = word_scales[1]};
  for (int d = 0; d < 2; d++) {
    moe_blockwise_layer *l = &s.p->fwd[d].layer;
    s.p->fwd[d].device.spec = MOE_CTE_SHARD_ON_I_MX;
    s.p->fwd[d].gate_up_activations_T = s.p->fwd[d].down_activations = NULL, s.p->fwd[d].output = y[d];
    l->H = HX, l->I = IX, l->hidden_states = x, l->gate_and_up_proj_bias = bias, l->down_proj_bias = NULL;
    l->quantized_gate_up_proj_weight = &gate_up, l->quantized_down_proj_weight = &down;
  }
  forward_neff(&s);
  assert_int_equal(neff_tensor(&s.neff, "gate_up_proj_weight")->dtype,
                   bits == 4 ? MOE_NRT_DTYPE_UINT16 : MOE_NRT_DTYPE_UINT32);
  assert_int_equal(neff_tensor(&s.neff, "gate_up_proj_scale")->size, E * 16 * 2 * (HX / 512) * IX);
  assert_int_equal(neff_tensor(&s.neff, "gate_and_up_proj_bias")->order, MOE_NEURON_ORDER_GATE_UP_BIAS);
  load(&s);
  moe_neuron_report report;
  assert_ok(moe_neuron_check_blockwise_mm_fwd_f32(&s.ctx, &s.model, &s.p->fwd[0], &s.p->fwd[1], NULL, &report), &s.ctx);
  assert_memory_equal(y[0], y[1], sizeof y[0]);
  assert_true(report.bounded && report.agree);
  for (int d = 0; d < 2; d++)
    s.p->fwd[d].layer.mx.activations = (moe_mx_rounding){.enabled = 1, .element = MOE_ELEMENT_E4M3FN,
        .cast = MOE_CAST_SATURATE};
  assert_ok(moe_blockwise_mm_fwd_f32(&s.ctx, &s.p->fwd[0]), &s.ctx);
  memcpy(y[1], y[0], sizeof y[0]);
  y[1][77] += 1000;
  assert_ok(moe_neuron_compare_blockwise_mm_fwd_f32(&s.ctx, &s.p->fwd[0], &s.p->fwd[1], NULL, &report), &s.ctx);
  assert_true(report.bounded && !report.agree && report.tensor[0].over == 1 && report.tensor[0].at == 77);
  assert_true(fabs(report.tensor[0].largest - 1000) < 1);
  s.ctx.allocate = NULL, s.ctx.release = NULL;
  assert_fails(forward(&s, NULL), MOE_ERROR_OUT_OF_MEMORY, &s.ctx, "gate_and_up_proj_bias");
  s.ctx.allocate = take, s.ctx.release = give;
  down.layout = MOE_MX_LAYOUT_PLAIN;
  assert_fails(forward(&s, NULL), MOE_ERROR_UNSUPPORTED, &s.ctx, "down_proj_weight");
  session_close(&s);
}

/* fp8 weights with a scale per column, which the kernel takes in its own order. */
static void test_down_scale(void **state) {
  (void)state;
  enum { HX = 256, IX = 32 };
  static uint8_t gate_up_codes[E * HX * 2 * IX], down_codes[E * IX * HX];
  static float gate_up_scales[E * 2 * IX], down_scales[E * HX], x[T * HX], y[2][T * HX];
  const moe_neuron_options options = {.nki_down_scale = 1};
  session s;
  uint64_t seed = 9;
  session_open(&s, MOE_DTYPE_F32, 0);
  fill(s.p, x, T * HX, 1, &seed, MOE_DTYPE_F32);
  for (size_t i = 0; i < sizeof gate_up_codes; i++) gate_up_codes[i] = (uint8_t)(test_random(&seed) % 0x60);
  for (size_t i = 0; i < sizeof down_codes; i++) down_codes[i] = (uint8_t)(0x80 + test_random(&seed) % 0x60);
  for (int i = 0; i < E * 2 * IX; i++) gate_up_scales[i] = 0.01f * (float)(i + 1);
  for (int i = 0; i < E * HX; i++) down_scales[i] = 0.001f * (float)(i + 1);
  const moe_quantized_weight gate_up = {.element = MOE_ELEMENT_E4M3FN, .scaling = MOE_WEIGHT_COLUMN_PER_EXPERT,
      .codes = gate_up_codes, .scales = gate_up_scales};
  const moe_quantized_weight down = {.element = MOE_ELEMENT_E4M3FN, .scaling = MOE_WEIGHT_COLUMN_PER_EXPERT,
      .codes = down_codes, .scales = down_scales};
  for (int d = 0; d < 2; d++) {
    moe_blockwise_layer *l = &s.p->fwd[d].layer;
    s.p->fwd[d].gate_up_activations_T = s.p->fwd[d].down_activations = NULL, s.p->fwd[d].output = y[d];
    l->H = HX, l->I = IX, l->hidden_states = x, l->gate_and_up_proj_bias = l->down_proj_bias = NULL;
    l->quantized_gate_up_proj_weight = &gate_up, l->quantized_down_proj_weight = &down;
  }
  assert_ok(moe_neuron_describe_blockwise_mm_fwd_f32(&s.ctx, &s.p->fwd[1], &options, &s.table), &s.ctx);
  neff_of(&s.neff, neuron_op_of(STANDIN_FORWARD, MOE_DTYPE_F32), &s.p->fwd[1], &s.table);
  assert_int_equal(neff_tensor(&s.neff, "down_proj_scale")->order, MOE_NEURON_ORDER_DOWN_SCALE);
  load(&s);
  moe_neuron_report report;
  assert_ok(moe_neuron_check_blockwise_mm_fwd_f32(&s.ctx, &s.model, &s.p->fwd[0], &s.p->fwd[1], &options, &report),
            &s.ctx);
  assert_memory_equal(y[0], y[1], sizeof y[0]);
  assert_int_equal(report.agree, 1);
  session_close(&s);
}

/* ------------------------------------------------------------------------------------------------------- mismatches */

/* Changes the NEFF's tensor, loads it, and sees what the forward says, and that or_cpu runs elsewhere. */
static void refused(session *s, void (*change)(standin_neff *neff), const moe_neuron_options *options, moe_status want,
                    const char *words) {
  moe_neuron_choice choice;
  forward_neff(s);
  if (change) change(&s->neff);
  load(s);
  const int written = control->calls("nrt_tensor_write");
  assert_fails(forward(s, options), want, &s->ctx, words);
  assert_int_equal(control->calls("nrt_tensor_write"), written);
  assert_ok(moe_neuron_or_cpu_blockwise_mm_fwd_f32(&s->ctx, &s->model, &s->p->fwd[1], options, &choice), &s->ctx);
  assert_true(!choice.on_device && strstr(choice.why, words));
  assert_same_outputs(s->p);
  assert_ok(moe_neuron_unload(&s->ctx, &s->model), &s->ctx);
}

static void longer(standin_neff *neff) { neff_tensor(neff, "down_proj_weight")->size += 4; }
static void shorter(standin_neff *neff) { neff_tensor(neff, "hidden_states")->size -= 4; }
static void narrower(standin_neff *neff) { neff_tensor(neff, "hidden_states")->dtype = MOE_NRT_DTYPE_BFLOAT16; }
static void renamed(standin_neff *neff) { strcpy(neff_tensor(neff, "output")->name, "output0"); }
static void fewer(standin_neff *neff) { neff_without(neff, "conditions"); }
static void reordered(standin_neff *neff) { /* [E,H,2,I] as [E,2,I,H] */
  standin_tensor *t = neff_tensor(neff, "gate_up_proj_weight");
  t->shape[1] = 2, t->shape[2] = I, t->shape[3] = H;
}
static void flat(standin_neff *neff) { /* axes of 1, and fewer: as frameworks have them */
  standin_tensor *t = neff_tensor(neff, "block_to_expert"), *a = neff_tensor(neff, "expert_affinities_masked");
  t->shape[t->ndim++] = 1, a->ndim = 1, a->shape[0] *= a->shape[1];
}
static void untold(standin_neff *neff) { neff_tensor(neff, "hidden_states")->dtype = MOE_NRT_DTYPE_UNKNOWN; }

static void test_mismatch(void **state) {
  (void)state;
  const moe_neuron_name names[] = {{"output", "output0"}, {"conditions", NULL}};
  const moe_neuron_options mapped = {.names = names, .names_count = 1};
  const moe_neuron_options unbound = {.names = names + 1, .names_count = 1};
  const moe_neuron_options nameless = {.names_count = 1};
  session s;
  session_open(&s, MOE_DTYPE_F32, 0);
  forward_cpu(&s);
  refused(&s, longer, NULL, MOE_ERROR_INVALID_SHAPE, "down_proj_weight has 61440 bytes here, and 61444 in the NEFF");
  refused(&s, shorter, NULL, MOE_ERROR_INVALID_SHAPE, "hidden_states has 3328 bytes here, and 3324");
  refused(&s, reordered, NULL, MOE_ERROR_INVALID_SHAPE,
          "gate_up_proj_weight has the axes [5,64,2,48] here, and [5,2,48,64] of FLOAT32 in the NEFF");
  refused(&s, narrower, NULL, MOE_ERROR_INVALID_OPTION,
          "hidden_states is of FLOAT32 here, and [13,64] of BFLOAT16 in the NEFF");
  refused(&s, renamed, NULL, MOE_ERROR_INVALID_OPTION, "output0, an output of the NEFF");
  refused(&s, fewer, NULL, MOE_ERROR_INVALID_OPTION, "conditions is no input of the NEFF");
  refused(&s, NULL, &mapped, MOE_ERROR_INVALID_OPTION, "output, an output of the NEFF");
  refused(&s, NULL, &unbound, MOE_ERROR_INVALID_OPTION, "conditions, an input of the NEFF");
  refused(&s, NULL, &nameless, MOE_ERROR_NULL_ARGUMENT, "options.names");
  forward_neff(&s), flat(&s.neff);
  load(&s);
  assert_ok(forward(&s, NULL), &s.ctx);
  assert_ok(moe_neuron_unload(&s.ctx, &s.model), &s.ctx);
  forward_neff(&s), renamed(&s.neff);
  load(&s);
  assert_ok(forward(&s, &mapped), &s.ctx);
  assert_ok(moe_neuron_unload(&s.ctx, &s.model), &s.ctx);
  forward_neff(&s), fewer(&s.neff), untold(&s.neff);
  load(&s);
  s.p->fwd[1].layer.skip_token = 0;
  assert_ok(forward(&s, &unbound), &s.ctx);
  s.p->fwd[1].layer.conditions = NULL;
  assert_ok(forward(&s, NULL), &s.ctx);
  s.p->fwd[1].layer.conditions = s.p->conditions;
  assert_ok(moe_neuron_unload(&s.ctx, &s.model), &s.ctx);
  session_close(&s);
}

/* What no kernel can be asked, and arguments that are wrong by themselves. */
static void test_arguments(void **state) {
  (void)state;
  session s;
  session_open(&s, MOE_DTYPE_F32, 0);
  forward_neff(&s);
  load(&s);
  moe_blockwise_mm_fwd_args *args = &s.p->fwd[1];
  args->accumulate = MOE_ACCUMULATE_OUTPUT;
  assert_fails(forward(&s, NULL), MOE_ERROR_INVALID_OPTION, &s.ctx, "output is no input of the NEFF");
  args->accumulate = 0, args->layer.T = -1;
  assert_fails(forward(&s, NULL), MOE_ERROR_INVALID_SHAPE, &s.ctx, "T");
  args->layer.T = T, s.p->ids[3] = T + 1;
  assert_fails(forward(&s, NULL), MOE_ERROR_INVALID_INDEX, &s.ctx, "token_position_to_id has 14 at 3");
  s.p->ids[3] = T, s.p->experts[1] = E + 1;
  assert_fails(forward(&s, NULL), MOE_ERROR_INVALID_INDEX, &s.ctx, "block_to_expert has 6 at 1");
  s.p->experts[1] = 1, args->layer.hidden_states = NULL;
  assert_fails(forward(&s, NULL), MOE_ERROR_NULL_ARGUMENT, &s.ctx, "hidden_states is NULL");
  args->layer.hidden_states = s.p->x, args->layer.conditions = NULL;
  assert_fails(forward(&s, NULL), MOE_ERROR_NULL_ARGUMENT, &s.ctx, "conditions is NULL, but the NEFF wants it");
  args->layer.conditions = s.p->conditions, args->layer.down_proj_weight = NULL;
  args->layer.packed_down_proj_weight = s.p->down, args->layer.packed_down_proj_weight_bytes = sizeof s.p->down;
  assert_fails(forward(&s, NULL), MOE_ERROR_UNSUPPORTED, &s.ctx, "packed");
  assert_fails(moe_neuron_blockwise_mm_fwd_f32(&s.ctx, &s.model, NULL, NULL), MOE_ERROR_NULL_ARGUMENT, &s.ctx, "args");
  assert_fails(moe_neuron_blockwise_mm_fwd_f32(&s.ctx, NULL, args, NULL), MOE_ERROR_NULL_ARGUMENT, &s.ctx, "model");
  assert_fails(moe_neuron_open(&s.ctx, NULL, NULL), MOE_ERROR_NULL_ARGUMENT, &s.ctx, "neuron");
  const moe_neuron_options wrong = {.repeat = -1}, less = {.retries = -2};
  assert_fails(moe_neuron_execute(&s.ctx, &s.model, &wrong), MOE_ERROR_INVALID_OPTION, &s.ctx, "options.repeat");
  assert_fails(moe_neuron_execute(&s.ctx, &s.model, &less), MOE_ERROR_INVALID_OPTION, &s.ctx, "options.retries");
  session_close(&s);
}

static void test_neff(void **state) {
  (void)state;
  session s;
  moe_neff_header header;
  session_open(&s, MOE_DTYPE_F32, 0);
  forward_neff(&s);
  assert_ok(moe_neff_check(&s.ctx, &s.neff, sizeof s.neff, 2, &header), &s.ctx);
  assert_int_equal(header.lnc_size, 2);
  assert_fails(moe_neff_check(&s.ctx, &s.neff, 1023, 2, NULL), MOE_ERROR_INVALID_SHAPE, &s.ctx, "header");
  assert_fails(moe_neff_check(&s.ctx, &s.neff, sizeof s.neff - 1, 2, NULL), MOE_ERROR_INVALID_SHAPE, &s.ctx, "short");
  assert_fails(moe_neff_check(&s.ctx, &s.neff, sizeof s.neff, 1, NULL), MOE_ERROR_UNSUPPORTED, &s.ctx,
               "NEURON_LOGICAL_NC_CONFIG=2");
  assert_fails(moe_neff_check(&s.ctx, NULL, 9, 1, NULL), MOE_ERROR_NULL_ARGUMENT, &s.ctx, "neff");
  s.neff.header.data_size = UINT64_MAX;
  assert_fails(moe_neff_check(&s.ctx, &s.neff, sizeof s.neff, 2, NULL), MOE_ERROR_INVALID_SHAPE, &s.ctx, "cut short");
  s.neff.header.header_size = 8;
  assert_fails(moe_neff_check(&s.ctx, &s.neff, sizeof s.neff, 2, NULL), MOE_ERROR_INVALID_SHAPE, &s.ctx, "no NEFF");
  s.neff.header.pkg_version = 0;
  assert_fails(moe_neff_check(&s.ctx, &s.neff, sizeof s.neff, 2, NULL), MOE_ERROR_INVALID_SHAPE, &s.ctx, "no version");
  forward_neff(&s);
  assert_ok(moe_neff_check(&s.ctx, &s.neff, sizeof s.neff, 0, NULL), &s.ctx); /* not compared */
  setenv("NEURON_LOGICAL_NC_CONFIG", "1", 1);
  assert_fails(moe_neuron_load(&s.ctx, &s.neuron, &s.neff, sizeof s.neff, 0, &s.model), MOE_ERROR_UNSUPPORTED, &s.ctx,
               "logical cores of 2");
  assert_string_equal(s.model.why, s.ctx.message);
  unsetenv("NEURON_LOGICAL_NC_CONFIG");
  assert_fails(moe_neuron_load(&s.ctx, &s.neuron, &s.neff, sizeof s.neff, 9, &s.model), MOE_ERROR_DEVICE_RESOURCE,
               &s.ctx, "NRT_LOAD_NOT_ENOUGH_NC (9)");
  session_close(&s);
}

/* Any byte of a NEFF's header, or of what it declares: it runs to the same bits, or is refused with a sentence. */
static void test_any_neff(void **state) {
  (void)state;
  session s;
  uint64_t seed = 77;
  int64_t refusals = 0, ran = 0;
  session_open(&s, MOE_DTYPE_F32, 0);
  forward_cpu(&s);
  for (int64_t i = 0; i < test_cases(3000, 300); i++) {
    forward_neff(&s);
    standin_tensor *t = &s.neff.kernel.tensor[test_random(&seed) % s.neff.kernel.count];
    const uint64_t random = test_random(&seed);
    switch (random % 6) {
      case 0: ((uint8_t *)&s.neff)[random / 8 % sizeof s.neff.header] ^= (uint8_t)(1u << random / 8192 % 8); break;
      case 1: t->name[random / 8 % 20] ^= (char)(random / 1024 % 128); break;
      case 2: t->usage ^= (uint32_t)(random / 8 % 2); break;
      case 3: t->dtype = (uint32_t)(random / 8 % 17); break;
      case 4: t->size = random / 8 % 3 ? t->size + random / 32 % 9 - 4 : random; break;
      case 5: t->ndim = (uint32_t)(random / 8 % 6); break;
    }
    memset(&s.p->out[1], 0, sizeof s.p->out[1]);
    moe_status status = moe_neuron_load(&s.ctx, &s.neuron, &s.neff, sizeof s.neff, -1, &s.model);
    if (status == MOE_OK) status = forward(&s, NULL);
    if (status == MOE_OK) assert_same_outputs(s.p), ran++;
    else assert_true(s.ctx.message[0] && s.p->out[1].y[0] == 0), refusals++;
    assert_ok(moe_neuron_unload(&s.ctx, &s.model), &s.ctx);
  }
  assert_true(refusals > 50 && ran > 50);
  session_close(&s);
}

/* --------------------------------------------------------------------------------------------------- device tensors */

static void test_stay(void **state) {
  (void)state;
  const moe_neuron_options stay = {.weights_stay = 1}, again = {.weights_stay = 1, .repeat = 3};
  session s;
  double seconds = -1;
  moe_neuron_options timed = again;
  timed.seconds = &seconds;
  session_open(&s, MOE_DTYPE_BF16, 0);
  forward_neff(&s);
  load(&s);
  forward_cpu(&s);
  assert_ok(forward(&s, &stay), &s.ctx);
  const int all = control->calls("nrt_tensor_write");
  assert_int_equal(all, 9);
  memset(&s.p->out[1], 0, sizeof s.p->out[1]);
  assert_ok(forward(&s, &timed), &s.ctx);
  assert_int_equal(control->calls("nrt_tensor_write") - all, 5); /* not weights and biases */
  assert_int_equal(control->calls("nrt_execute_repeat"), 3);
  assert_true(seconds >= 0);
  assert_same_outputs(s.p);
  assert_ok(forward(&s, NULL), &s.ctx);
  assert_int_equal(control->calls("nrt_tensor_write") - all, 5 + 9);
  /* an input that nobody gives is zeros, also after one that somebody gave */
  s.p->fwd[0].layer.down_proj_bias = s.p->fwd[1].layer.down_proj_bias = NULL;
  forward_cpu(&s);
  assert_ok(forward(&s, NULL), &s.ctx);
  assert_same_outputs(s.p);
  session_close(&s);
}

/* Two models with one weight, a slice of a larger tensor. */
static void test_attach(void **state) {
  (void)state;
  session s;
  moe_neuron_model other;
  moe_neuron_tensor pool, weight, copy, none;
  uint8_t back[16];
  const size_t bytes = sizeof(float) * E * I * H;
  session_open(&s, MOE_DTYPE_F32, 0);
  forward_neff(&s);
  load(&s);
  assert_ok(moe_neuron_load(&s.ctx, &s.neuron, &s.neff, sizeof s.neff, 1, &other), &s.ctx);
  assert_ok(moe_neuron_tensor_new(&s.ctx, &s.neuron, 1, bytes + 64, "pool", &pool), &s.ctx);
  assert_ok(moe_neuron_tensor_slice(&s.ctx, &pool, 64, bytes, &weight), &s.ctx);
  assert_ok(moe_neuron_tensor_write(&s.ctx, &weight, 0, s.p->down, bytes), &s.ctx);
  const moe_nrt_tensor_usage in = MOE_NRT_TENSOR_USAGE_INPUT;
  assert_fails(moe_neuron_attach(&s.ctx, &s.model, in, "none", &weight), MOE_ERROR_INVALID_OPTION, &s.ctx, "none");
  assert_fails(moe_neuron_attach(&s.ctx, &s.model, in, "output", &weight), MOE_ERROR_INVALID_OPTION, &s.ctx, "output");
  assert_fails(moe_neuron_attach(&s.ctx, &s.model, in, "down_proj_weight", &pool), MOE_ERROR_INVALID_SHAPE, &s.ctx,
               "down_proj_weight");
  forward_cpu(&s);
  assert_ok(forward(&s, NULL), &s.ctx); /* has a tensor of its own, which goes */
  assert_ok(moe_neuron_attach(&s.ctx, &s.model, in, "down_proj_weight", &weight), &s.ctx);
  assert_ok(moe_neuron_attach(&s.ctx, &other, in, "down_proj_weight", &weight), &s.ctx);
  s.p->fwd[1].layer.down_proj_weight = NULL;
  memset(&s.p->out[1], 0, sizeof s.p->out[1]);
  assert_ok(forward(&s, NULL), &s.ctx);
  assert_same_outputs(s.p);
  memset(&s.p->out[1], 0, sizeof s.p->out[1]);
  assert_ok(moe_neuron_blockwise_mm_fwd_f32(&s.ctx, &other, &s.p->fwd[1], NULL), &s.ctx);
  assert_same_outputs(s.p);
  assert_ok(moe_neuron_unload(&s.ctx, &other), &s.ctx); /* what is attached may be no tensor of the call */
  snprintf(neff_tensor(&s.neff, "down_proj_weight")->name, 64, "both_weights");
  const moe_neuron_name apart[] = {{"down_proj_weight", NULL}};
  const moe_neuron_options unnamed = {.names = apart, .names_count = 1};
  assert_ok(moe_neuron_load(&s.ctx, &s.neuron, &s.neff, sizeof s.neff, 1, &other), &s.ctx);
  assert_fails(moe_neuron_blockwise_mm_fwd_f32(&s.ctx, &other, &s.p->fwd[1], &unnamed), MOE_ERROR_INVALID_OPTION,
               &s.ctx, "both_weights");
  assert_ok(moe_neuron_attach(&s.ctx, &other, in, "both_weights", &weight), &s.ctx);
  s.p->fwd[1].layer.down_proj_weight = s.p->down;
  memset(&s.p->out[1], 0, sizeof s.p->out[1]);
  assert_ok(moe_neuron_blockwise_mm_fwd_f32(&s.ctx, &other, &s.p->fwd[1], &unnamed), &s.ctx);
  assert_same_outputs(s.p);
  assert_ok(moe_neuron_tensor_new(&s.ctx, &s.neuron, 1, 32, NULL, &copy), &s.ctx);
  assert_ok(moe_neuron_tensor_fill(&s.ctx, &copy, 0, 7, 32), &s.ctx);
  assert_ok(moe_neuron_tensor_copy(&s.ctx, &weight, 4, &copy, 8, 8), &s.ctx);
  assert_ok(moe_neuron_tensor_read(&s.ctx, &copy, 4, back, 16), &s.ctx);
  assert_true(back[0] == 7 && back[15] == 7 && memcmp(back + 4, (char *)s.p->down + 4, 8) == 0);
  assert_fails(moe_neuron_tensor_read(&s.ctx, &copy, 20, back, 16), MOE_ERROR_INVALID_SHAPE, &s.ctx, "tensor has 32");
  assert_fails(moe_neuron_tensor_write(&s.ctx, &copy, SIZE_MAX, back, 16), MOE_ERROR_INVALID_SHAPE, &s.ctx, "tensor");
  assert_fails(moe_neuron_tensor_slice(&s.ctx, &copy, 32, 1, &none), MOE_ERROR_INVALID_SHAPE, &s.ctx, "of has 32");
  assert_ok(moe_neuron_unload(&s.ctx, &other), &s.ctx);
  assert_ok(moe_neuron_unload(&s.ctx, &s.model), &s.ctx);
  moe_neuron_tensor_free(&copy), moe_neuron_tensor_free(&copy);
  moe_neuron_tensor_free(&none), moe_neuron_tensor_free(&weight), moe_neuron_tensor_free(&pool);
  session_close(&s);
}

static void test_device(void **state) {
  (void)state;
  session s;
  moe_neuron_info info;
  moe_nrt_vnc_memory_stats stats;
  session_open(&s, MOE_DTYPE_F32, 0);
  assert_ok(moe_neuron_get_info(&s.ctx, &s.neuron, &info), &s.ctx);
  assert_true(info.version[0] == 2 && info.version[1] == 34 && info.family == MOE_NRT_INSTANCE_TRN2);
  assert_true(info.cores == 2 && info.visible_cores == 2 && info.lnc == 2);
  assert_string_equal(info.arch_name, "stand-in");
  assert_true(info.has_tensor_cast && !info.has_tensor_compute);
  forward_neff(&s);
  load(&s);
  assert_ok(moe_neuron_profile_start(&s.ctx, &s.model, "forward.ntff"), &s.ctx);
  assert_ok(forward(&s, NULL), &s.ctx);
  assert_ok(moe_neuron_profile_stop(&s.ctx, &s.model, "forward.ntff"), &s.ctx);
  assert_ok(moe_neuron_memory(&s.ctx, &s.neuron, (uint32_t)s.model.core, &stats), &s.ctx);
  size_t bytes = 0;
  for (int32_t i = 0; i < s.model.tensors; i++) bytes += s.model.tensor[i].size;
  assert_int_equal(stats.bytes_used, bytes);
  assert_fails(moe_neuron_memory(&s.ctx, &s.neuron, 7, &stats), MOE_ERROR_INVALID_OPTION, &s.ctx, "NRT_INVALID (2)");
  session_close(&s);
}

/* --------------------------------------------------------------------------------------------------------- failures */

static void test_statuses(void **state) {
  (void)state;
  static const struct {
    int nrt;
    moe_status status;
  } list[] = {
#define STATUS(name, value, becomes, advice) {value, MOE_##becomes},
      MOE_NRT_STATUS_LIST(STATUS)};
  session s;
  session_open(&s, MOE_DTYPE_F32, 0);
  forward_neff(&s);
  load(&s);
  forward_cpu(&s);
  const moe_neuron_options few = {.retries = 2};
  for (size_t i = 1; i < sizeof list / sizeof *list; i++) {
    char number[16];
    snprintf(number, sizeof number, "(%d)", list[i].nrt);
    memset(&s.p->out[1], 0, sizeof s.p->out[1]);
    control->fail_at("nrt_execute", 0, list[i].nrt);
    const int before = control->calls("nrt_execute");
    assert_fails(forward(&s, &few), list[i].status, &s.ctx, number);
    assert_non_null(strstr(s.ctx.message, moe_neuron_advice((moe_nrt_status)list[i].nrt)));
    assert_int_equal(control->calls("nrt_execute") - before, list[i].nrt == MOE_NRT_QUEUE_FULL ? 3 : 1);
    if (list[i].nrt == MOE_NRT_EXEC_COMPLETED_WITH_NUM_ERR) assert_same_outputs(s.p);
    else assert_true(s.p->out[1].y[0] == 0 && s.p->out[1].saved[0] == 0);
    control->fail_at(NULL, 0, 0);
  }
  moe_neuron_report report;
  control->fail_at("nrt_execute", 0, MOE_NRT_EXEC_COMPLETED_WITH_NUM_ERR);
  assert_fails(moe_neuron_check_blockwise_mm_fwd_f32(&s.ctx, &s.model, &s.p->fwd[0], &s.p->fwd[1], NULL, &report),
               MOE_ERROR_DEVICE_NUMERIC, &s.ctx, "(1003)");
  assert_true(report.count == 3 && report.agree);
  control->fail_at("nrt_execute", 0, MOE_NRT_TIMEOUT);
  assert_fails(moe_neuron_check_blockwise_mm_fwd_f32(&s.ctx, &s.model, &s.p->fwd[0], &s.p->fwd[1], NULL, &report),
               MOE_ERROR_DEVICE_TIMEOUT, &s.ctx, "(5)");
  assert_int_equal(moe_neuron_status(MOE_NRT_EXEC_OOB), MOE_ERROR_DEVICE_OUT_OF_BOUNDS);
  assert_int_equal(moe_neuron_status(MOE_NRT_EXEC_UNIT_UNRECOVERABLE), MOE_ERROR_DEVICE_LOST);
  assert_int_equal(moe_neuron_status(MOE_NRT_EXEC_COMPLETED_WITH_NUM_ERR), MOE_ERROR_DEVICE_NUMERIC);
  assert_int_equal(moe_neuron_status((moe_nrt_status)4711), MOE_ERROR_DEVICE_FAILED);
  assert_string_equal(moe_neuron_status_str((moe_nrt_status)4711), "an unknown status");
  session_close(&s);
}

/* Everything that takes something, in one walk. Returns the first error. */
static moe_status walk(session *s) {
  moe_neuron_info info;
  moe_nrt_vnc_memory_stats stats;
  moe_neuron_tensor a = {0}, slice = {0}, given = {0};
  char back[8];
  const moe_neuron_options twice = {.repeat = 2};
  moe_status status = moe_neuron_open(&s->ctx, &s->neuron, STANDIN), unload;
  moe_neuron *n = &s->neuron;
#define NEXT(call) \
  if (status == MOE_OK) status = (call)
  NEXT(moe_neuron_get_info(&s->ctx, n, &info));
  NEXT(moe_neuron_load(&s->ctx, n, &s->neff, sizeof s->neff, -1, &s->model));
  NEXT(moe_neuron_memory(&s->ctx, n, 0, &stats));
  NEXT(moe_neuron_tensor_new(&s->ctx, n, 1, 64, "a", &a));
  NEXT(moe_neuron_tensor_slice(&s->ctx, &a, 8, 8, &slice));
  NEXT(moe_neuron_tensor_fill(&s->ctx, &a, 0, 1, 64));
  NEXT(moe_neuron_tensor_copy(&s->ctx, &a, 0, &slice, 0, 8));
  NEXT(moe_neuron_tensor_read(&s->ctx, &a, 0, back, 8));
  NEXT(moe_neuron_tensor_new(&s->ctx, n, 1, sizeof s->p->down, "weight", &given));
  NEXT(moe_neuron_attach(&s->ctx, &s->model, MOE_NRT_TENSOR_USAGE_INPUT, "down_proj_weight", &given));
  NEXT(moe_neuron_profile_start(&s->ctx, &s->model, "p"));
  const int profiling = status == MOE_OK;
  NEXT(forward(s, NULL));
  NEXT(forward(s, &twice));
  if (profiling) {
    const moe_status stop = moe_neuron_profile_stop(&s->ctx, &s->model, "p");
    NEXT(stop);
  }
  unload = s->model.model ? moe_neuron_unload(&s->ctx, &s->model) : MOE_OK;
  NEXT(unload);
  moe_neuron_tensor_free(&slice), moe_neuron_tensor_free(&a), moe_neuron_tensor_free(&given);
  moe_neuron_close(n);
  return status;
}

/* Each function fails at its first call, its second, and so on until it is not called as often. */
static void test_every_failure(void **state) {
  (void)state;
  static const char *const function[] = {
#define NAME(result, name, arguments) #name,
      MOE_NRT_FUNCTION_LIST(NAME, NAME)};
  session s;
  session_open(&s, MOE_DTYPE_F32, 0);
  s.p->fwd[1].layer.down_proj_bias = NULL;
  forward_neff(&s);
  neff_tensor(&s.neff, "hidden_states")->size += H * 4; /* what is longer is zeroed */
  moe_neuron_close(&s.neuron);
  int failures = 0;
  for (size_t f = 0; f < sizeof function / sizeof *function; f++)
    for (int after = 0;; after++) {
      control->reset();
      control->fail_at(function[f], after, MOE_NRT_RESOURCE);
      const moe_status status = walk(&s);
      const int failed = control->failed();
      const int void_function = strcmp(function[f], "nrt_close") == 0 || strcmp(function[f], "nrt_tensor_free") == 0 ||
                                strcmp(function[f], "nrt_destroy_tensor_set") == 0;
      if (status != (failed && !void_function ? MOE_ERROR_DEVICE_RESOURCE : MOE_OK))
        fail_msg("%s, call %d: %s %s", function[f], after, moe_status_str(status), s.ctx.message);
      if (control->live() || control->violations())
        fail_msg("%s, call %d: %d not given back, %d violations", function[f], after, control->live(),
                 control->violations());
      failures += failed;
      if (!failed) break;
    }
  assert_true(failures > 60);
  free(s.p);
}

/* Allocations of the caller's fail, each once. */
static void *take_some(void *user, size_t bytes) { return (*(int *)user)-- > 0 ? take(NULL, bytes) : NULL; }
static void test_no_memory(void **state) {
  (void)state;
  session s;
  moe_neuron_report report;
  int left = 0, before = -1;
  session_open(&s, MOE_DTYPE_F32, 0);
  forward_cpu(&s);
  s.ctx.allocate = take_some, s.ctx.allocator_user = &left;
  moe_status status = MOE_ERROR_OUT_OF_MEMORY;
  while (status != MOE_OK) {
    left = ++before;
    status = moe_neuron_compare_blockwise_mm_fwd_f32(&s.ctx, &s.p->fwd[0], &s.p->fwd[0], NULL, &report);
    if (status != MOE_OK) assert_fails(status, MOE_ERROR_OUT_OF_MEMORY, &s.ctx, "ctx.allocate");
  }
  assert_true(before > 10 && report.agree);
  s.ctx.allocate = take;
  session_close(&s);
}

/* ----------------------------------------------------------------------------------------------------------- report */

/* What a kernel gets wrong is over the bounds: a bias that is dropped, a row that is missing, columns that change
   places, a scale rule that is off by two. */
static void test_notices(void **state) {
  (void)state;
  session s;
  moe_neuron_report report;
  session_open(&s, MOE_DTYPE_BF16, 1);
  problem *p = s.p;
  const moe_blockwise_layer right = p->fwd[1].layer;
  forward_cpu(&s);
  for (int wrong = 0; wrong < 6; wrong++) {
    moe_blockwise_mm_fwd_args args = p->fwd[1];
    p->fwd[1].layer = right;
    args.gate_up_activations_T = args.down_activations = NULL;
    if (wrong == 1) args.layer.down_proj_bias = NULL;
    if (wrong == 2) p->ids[0] = -1;
    if (wrong == 3) {
      moe_bf16 *x = (moe_bf16 *)p->x + 2 * H, swap = x[10];
      x[10] = x[11], x[11] = swap;
    }
    if (wrong == 4) args.layer.config.up_offset = 0.125f;
    if (wrong == 5) args.layer.config.activation = MOE_ACT_GELU;
    assert_ok(moe_blockwise_mm_fwd_bf16(&s.ctx, &args), &s.ctx);
    if (wrong == 2) p->ids[0] = 0;
    if (wrong == 3) {
      moe_bf16 *x = (moe_bf16 *)p->x + 2 * H, swap = x[10];
      x[10] = x[11], x[11] = swap;
    }
    moe_blockwise_mm_fwd_args cpu = p->fwd[0];
    cpu.gate_up_activations_T = cpu.down_activations = NULL;
    assert_ok(moe_neuron_compare_blockwise_mm_fwd_bf16(&s.ctx, &cpu, &args, NULL, &report), &s.ctx);
    if (report.agree != (wrong == 0)) fail_msg("%d: %d of %d are over", wrong, (int)report.tensor[0].over,
                                               (int)report.tensor[0].elements);
  }
  char text[2000], cut[40];
  const size_t length = moe_neuron_report_text(&report, text, sizeof text);
  assert_int_equal(length, strlen(text));
  assert_int_equal(moe_neuron_report_text(&report, cut, sizeof cut), length);
  assert_int_equal(strlen(cut), sizeof cut - 1);
  assert_int_equal(moe_neuron_report_text(&report, NULL, 0), length);
  assert_non_null(strstr(text, "they do not agree"));
  moe_blockwise_mm_fwd_args less = p->fwd[1];
  less.output = NULL;
  assert_fails(moe_neuron_compare_blockwise_mm_fwd_bf16(&s.ctx, &p->fwd[0], &less, NULL, &report),
               MOE_ERROR_INVALID_OPTION, &s.ctx, "device_args has no output");
  session_close(&s);
}

/* A sum of many small terms in two orders: what the order explains is within the bound, and twice that is not. */
static void test_order(void **state) {
  (void)state;
  enum { DEEP = 256 };
  static float x[DEEP], w[DEEP], y[2];
  const int32_t size = 1;
  moe_context ctx = {.allocate = take, .release = give};
  moe_neuron_report report;
  for (int i = 0; i < DEEP; i++) x[i] = i < 2 ? 0.5f : 0x1p-24f, w[i] = 1;
  moe_grouped_gemm_args args[2];
  for (int d = 0; d < 2; d++)
    args[d] = (moe_grouped_gemm_args){.num_tokens = 1, .topk = 1, .E = 1, .N = 1, .K = DEEP, .m_sizes = &size, .X = x,
        .W = w, .Y = &y[d]};
  assert_ok(moe_grouped_gemm_f32(&ctx, &args[0]), &ctx);
  assert_true(y[0] == 1);
  for (int times = 1; times <= 2; times++) {
    y[1] = 1 + (float)times * (DEEP - 2) * 0x1p-24f;
    assert_ok(moe_neuron_compare_grouped_gemm_f32(&ctx, &args[0], &args[1], NULL, &report), &ctx);
    assert_int_equal(report.agree, times == 1);
  }
}

/* A batch without tokens fits no kernel, and runs on the CPU. */
static void test_no_tokens(void **state) {
  (void)state;
  session s;
  moe_neuron_choice choice;
  session_open(&s, MOE_DTYPE_F32, 0);
  forward_neff(&s);
  load(&s);
  s.p->fwd[1].layer.T = s.p->fwd[1].layer.N = 0;
  assert_ok(moe_neuron_or_cpu_blockwise_mm_fwd_f32(&s.ctx, &s.model, &s.p->fwd[1], NULL, &choice), &s.ctx);
  assert_int_equal(choice.on_device, 0);
  moe_neuron_report report;
  assert_ok(moe_neuron_compare_blockwise_mm_fwd_f32(&s.ctx, &s.p->fwd[1], &s.p->fwd[1], NULL, &report), &s.ctx);
  assert_int_equal(report.agree, 1);
  session_close(&s);
}

/* ---------------------------------------------------------------------------------------------------------- threads */

/* Two cores, two models, two threads. */
static void *thread_run(void *argument) {
  session *s = argument;
  for (int i = 0; i < 20; i++) {
    memset(&s->p->out[1], 0, sizeof s->p->out[1]);
    if (forward(s, NULL) != MOE_OK || memcmp(&s->p->out[0], &s->p->out[1], sizeof s->p->out[0]) != 0) return s;
  }
  return NULL;
}

static void test_threads(void **state) {
  (void)state;
  session s[2];
  pthread_t thread[2];
  session_open(&s[0], MOE_DTYPE_BF16, 0);
  s[1] = s[0];
  s[1].p = problem_new(MOE_DTYPE_F32, 19, 1);
  for (int i = 0; i < 2; i++) {
    forward_neff(&s[i]);
    assert_ok(moe_neuron_load(&s[i].ctx, &s[0].neuron, &s[i].neff, sizeof s[i].neff, i, &s[i].model), &s[i].ctx);
    forward_cpu(&s[i]);
  }
  for (int i = 0; i < 2; i++) assert_int_equal(pthread_create(&thread[i], NULL, thread_run, &s[i]), 0);
  for (int i = 0; i < 2; i++) {
    void *failed;
    pthread_join(thread[i], &failed);
    assert_null(failed);
  }
  assert_ok(moe_neuron_unload(&s[1].ctx, &s[1].model), &s[1].ctx);
  free(s[1].p);
  session_close(&s[0]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      PLAIN(test_no_runtime), PLAIN(test_old_runtime), OF(test_forward, F32), OF(test_forward, BF16),
      OF(test_padding, F32), OF(test_padding, BF16), OF(test_backward, F32), OF(test_backward, BF16),
      PLAIN(test_mx), OF(test_mx, F32), PLAIN(test_down_scale),
      PLAIN(test_mismatch), PLAIN(test_arguments), PLAIN(test_neff), PLAIN(test_any_neff), PLAIN(test_stay),
      PLAIN(test_attach),
      PLAIN(test_device), PLAIN(test_statuses), PLAIN(test_every_failure), PLAIN(test_no_memory),
      PLAIN(test_notices), PLAIN(test_order),
      PLAIN(test_no_tokens), PLAIN(test_threads)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
