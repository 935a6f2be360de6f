/* save_npy.c: writes calls of every operation as .npy files for examples/neuron_compare.c. For each case a folder with
   in/, right/, wrong/ and `options`: outputs are the CPU's, and in wrong/ one of them has another element. What is
   written goes by the operation's table. */
#define MOE_IMPLEMENTATION
#define STANDIN ""
#include <sys/stat.h>

#include "support/mlp.h"

#include "fixture.h"

static const char *root;
static moe_context ctx = {.allocate = take, .release = give};

static void make(char *path, size_t bytes, const char *name, const char *folder) {
  snprintf(path, bytes, "%s/%s", root, name);
  mkdir(path, 0777);
  if (folder) snprintf(path, bytes, "%s/%s/%s", root, name, folder);
  if (folder) mkdir(path, 0777);
}

static const char *descr(moe_nrt_dtype dtype) {
  switch (dtype) {
    case MOE_NRT_DTYPE_FLOAT32: return "<f4";
    case MOE_NRT_DTYPE_FLOAT16: return "<f2";
    case MOE_NRT_DTYPE_BFLOAT16: return "|V2";
    case MOE_NRT_DTYPE_INT32: return "<i4";
    case MOE_NRT_DTYPE_UINT32: return "<u4";
    case MOE_NRT_DTYPE_UINT16: return "<u2";
    case MOE_NRT_DTYPE_UINT8: return "|u1";
    default: return "|V1";
  }
}

/* One tensor; `wrong`: its first element is 1000 in its type. */
static void save(const char *name, const char *folder, const moe_neuron_operand *o, int wrong) {
  char path[4096], text[256];
  make(path, sizeof path, name, folder);
  snprintf(path + strlen(path), sizeof path - strlen(path), "/%s.npy", o->name);
  int n = snprintf(text, sizeof text, "{'descr': '%s', 'fortran_order': False, 'shape': (", descr(o->dtype));
  for (int32_t i = 0; i < o->ndim; i++)
    n += snprintf(text + n, sizeof text - (size_t)n, "%lld, ", (long long)o->shape[i]);
  n += snprintf(text + n, sizeof text - (size_t)n, "), }");
  while ((n + 11) % 64) text[n++] = ' ';
  text[n++] = '\n';
  FILE *file = fopen(path, "wb");
  if (!file) exit(1);
  const uint8_t start[10] = {0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, (uint8_t)n, (uint8_t)(n >> 8)};
  uint8_t *data = malloc(o->bytes);
  memcpy(data, o->data, o->bytes);
  const float large = 1000;
  if (wrong && o->dtype == MOE_NRT_DTYPE_FLOAT32) memcpy(data, &large, 4);
  else if (wrong) data[0] = 0x7a, data[1] = 0x44; /* 1000 as bfloat16, 4.9 as half */
  fwrite(start, 1, sizeof start, file), fwrite(text, 1, (size_t)n, file), fwrite(data, 1, o->bytes, file);
  free(data);
  if (fclose(file) != 0) exit(1);
}

static void save_case(const char *name, standin_op kind, moe_dtype dtype, const void *args, const char *options) {
  const neuron_op *op = neuron_op_of(kind, dtype);
  moe_neuron_table table;
  char path[4096];
  if (op->describe(&ctx, args, NULL, &table) != MOE_OK || op->cpu(&ctx, args) != MOE_OK) {
    fprintf(stderr, "%s: %s\n", name, ctx.message);
    exit(1);
  }
  for (int32_t i = 0, wrong = 1; i < table.count; i++) {
    const moe_neuron_operand *o = &table.operand[i];
    if (o->data && o->use != MOE_NEURON_OUTPUT) save(name, "in", o, 0);
    if (!o->data || o->use != MOE_NEURON_OUTPUT) continue;
    save(name, "right", o, 0), save(name, "wrong", o, wrong);
    wrong = 0;
  }
  make(path, sizeof path, name, NULL);
  strcat(path, "/options");
  FILE *file = fopen(path, "w");
  if (!file || fprintf(file, "%s", options) < 0 || fclose(file) != 0) exit(1);
}

static void save_layer(void) {
  enum { HX = 512, IX = 64, LARGE = E * HX * 2 * IX };
  static uint8_t codes[2][LARGE], x_codes[T * HX], words[2][LARGE], scales[LARGE], same_scales[LARGE];
  static float floats[2][E * HX], x[T * HX], y[T * HX];
  problem *p = problem_new(MOE_DTYPE_BF16, 7, 1);
  uint64_t seed = 3;
  save_case("forward", STANDIN_FORWARD, MOE_DTYPE_BF16, &p->fwd[0], "forward");
  memcpy(&p->out[1], &p->out[0], sizeof p->out[0]);
  p->bwd[0].layer.orders.gate_up = MOE_ORDER_INTERLEAVED, p->bwd[0].layer.orders.down = MOE_ORDER_OUT_IN;
  save_case("backward", STANDIN_BACKWARD, MOE_DTYPE_BF16, &p->bwd[0],
            "--gate-up-order interleaved --down-order out_in backward");
  fill(p, x, T * HX, 1, &seed, MOE_DTYPE_BF16);
  moe_quantized_weight w[2];
  moe_quantized_activation rows = {.codes = x_codes, .float_scales = 1, .block_rows = 1, .scales = floats[1]};
  moe_blockwise_mm_fwd_args args = p->fwd[0];
  moe_blockwise_layer *l = &args.layer;
  l->H = HX, l->I = IX, l->hidden_states = x, l->gate_and_up_proj_bias = l->down_proj_bias = NULL;
  l->quantized_gate_up_proj_weight = &w[0], l->quantized_down_proj_weight = &w[1];
  args.gate_up_activations_T = args.down_activations = NULL, args.output = y;
  for (int k = 0; k < 2; k++) {
    for (int i = 0; i < LARGE; i++) codes[k][i] = (uint8_t)(test_random(&seed) & 0xb7);
    for (int i = 0; i < E * HX; i++) floats[k][i] = 0.01f * (float)(1 + i % 7);
  }
  memcpy(x_codes, codes[1], sizeof x_codes);
  for (int k = 0; k < 2; k++)
    w[k] = (moe_quantized_weight){.scaling = k ? MOE_WEIGHT_COLUMN_PER_EXPERT : MOE_WEIGHT_STATIC, .codes = codes[k],
        .scales = floats[k]};
  l->quantized_hidden_states = &rows;
  save_case("forward_fp8", STANDIN_FORWARD, MOE_DTYPE_BF16, &args, "forward");
  l->quantized_hidden_states = NULL;
  for (int k = 0; k < 2; k++)
    w[k] = (moe_quantized_weight){.scaling = MOE_WEIGHT_BLOCK, .block = 32, .codes = codes[k], .scales = floats[k]};
  save_case("forward_blocks", STANDIN_FORWARD, MOE_DTYPE_BF16, &args, "--block 32 forward");
  memset(scales, 120, sizeof scales); /* in any layout */
  for (int bits = 4; bits <= 8; bits += 4) {
    for (int k = 0; k < 2; k++) {
      const moe_mx_layout_args to = {.to = MOE_MX_LAYOUT_NKI_CONTIGUOUS_X4, .element_bits = bits, .parts = 2 - k,
          .E = E, .K = k ? IX : HX, .columns = k ? HX : IX, .codes_in = codes[k], .scales_in = scales,
          .codes_out = words[k], .scales_out = same_scales};
      if (moe_mx_layout_convert(&ctx, &to) != MOE_OK) exit(1);
      w[k] = (moe_quantized_weight){.element = bits == 4 ? MOE_ELEMENT_E2M1 : MOE_ELEMENT_E4M3FN,
          .layout = MOE_MX_LAYOUT_NKI_CONTIGUOUS_X4, .codes = words[k], .scales = scales};
    }
    save_case(bits == 4 ? "forward_mxfp4" : "forward_mxfp8", STANDIN_FORWARD, MOE_DTYPE_BF16, &args,
              "--layout contiguous_x4 forward");
  }
  free(p);
}

static void save_grouped(void) {
  enum { TOTAL = T * K, OUT = 20, IN = 32 };
  static float x[TOTAL * IN], w[E * OUT * IN], bias[E * OUT], dy[TOTAL * OUT], weights[TOTAL], y[5][E * OUT * IN];
  static uint8_t codes[E * OUT * IN];
  int32_t sizes[E] = {7, 0, 9, TOTAL - 19, 1}, gather[TOTAL];
  problem *p = problem_new(MOE_DTYPE_F32, 7, 1);
  uint64_t seed = 13;
  for (int i = 0; i < TOTAL; i++) gather[i] = i < TOTAL - 2 ? (i * 5) % TOTAL : -1;
  fill(p, x, TOTAL * IN, 1, &seed, MOE_DTYPE_F32), fill(p, w, E * OUT * IN, 1, &seed, MOE_DTYPE_F32);
  fill(p, bias, E * OUT, 1, &seed, MOE_DTYPE_F32), fill(p, dy, TOTAL * OUT, 1, &seed, MOE_DTYPE_F32);
  fill(p, weights, TOTAL, 1, &seed, MOE_DTYPE_F32);
  moe_grouped_gemm_args a = {.num_tokens = T, .topk = K, .E = E, .N = OUT, .K = IN, .m_sizes = sizes,
      .gather_indices = gather, .permute_x = 1, .X = x, .W = w, .bias = bias, .dY = dy, .topk_weights = weights,
      .topk_mode = MOE_TOPK_PRE, .weight_order = MOE_GROUPED_EKN, .Y = y[0], .dX = y[1], .dW = y[2],
      .bias_grad = y[3], .topk_weights_grad = y[4]};
  save_case("grouped", STANDIN_GROUPED, MOE_DTYPE_F32, &a, "--type f32 --topk 2 --permute-x --topk-pre --ekn grouped");
  save_case("grouped_dw", STANDIN_GROUPED_DW, MOE_DTYPE_F32, &a,
            "--type f32 --topk 2 --permute-x --topk-pre --ekn grouped_dw");
  a.sum_topk = 1;
  save_case("grouped_dx", STANDIN_GROUPED_DX, MOE_DTYPE_F32, &a,
            "--type f32 --topk 2 --permute-x --sum-topk --topk-pre --ekn grouped_dx");
  for (int i = 0; i < E * OUT * IN; i++) codes[i] = (uint8_t)(test_random(&seed) & 0xb7);
  const moe_quantized_weight q = {.scaling = MOE_WEIGHT_COLUMN_PER_EXPERT, .codes = codes, .scales = w};
  a.quantized_W = &q, a.permute_x = a.sum_topk = 0, a.permute_y = 1, a.weight_order = MOE_GROUPED_ENK;
  save_case("grouped_fp8", STANDIN_GROUPED, MOE_DTYPE_F32, &a, "--type f32 --topk 2 --permute-y --topk-pre grouped");
  free(p);
}

static void save_mlp(void) {
  enum { S = 64, H_ = 96, I_ = 32 };
  static moe_bf16 t[16][2 * S * H_];
  uint64_t seed = 17;
  const moe_mlp_mxfp8 m = {.S = S, .H = H_, .I = I_, .format = {.layout = MOE_MX_LAYOUT_NKI_WRAPX}};
  const float *x = mlp_values(&seed, S * H_, 1), *w = mlp_values(&seed, 2 * I_ * H_, 0.3f);
  const float *d = mlp_values(&seed, H_ * I_, 0.3f), *dy = mlp_values(&seed, S * H_, 1);
  const moe_mxfp8_operand words =
      mlp_operand(&m.format, w, 2 * I_, H_, MLP_FP8_SWIZZLED, MOE_MX_SCALES_NKI_PACKED).given;
  const moe_mxfp8_operand plain = mlp_operand(&m.format, x, S, H_, MLP_PLAIN, MOE_MX_SCALES_OWN).given;
  const moe_mxfp8_operand swizzled = mlp_operand(&m.format, d, H_, I_, MLP_SWIZZLED, MOE_MX_SCALES_OWN).given;
  const moe_mlp_fwd_mxfp8_args fwd = {.mlp = m, .hidden_states = plain, .gate_up_weights = words,
      .down_weight = swizzled, .gate_pre = t[0], .gate_act = t[1], .up = t[2], .hidden = t[3], .output = t[4]};
  save_case("mlp_forward", STANDIN_MLP_FORWARD, MOE_DTYPE_BF16, &fwd, "--sizes 64,96,32 mlp_forward");
  const moe_mlp_bwd_mxfp8_args bwd = {.mlp = m, .hidden_states = plain, .gate_up_weights = words,
      .down_weight = swizzled, .gate_pre = t[0], .up = t[2], .d_gate = t[5], .d_up = t[6], .hidden_states_grad = t[7],
      .output_grad = mlp_operand(&m.format, dy, S, H_, MLP_FP8_SWIZZLED, MOE_MX_SCALES_NKI_OVERSIZED).given,
      .hidden_states_T = mlp_operand(&m.format, mlp_transposed(x, S, H_), H_, S, MLP_FP8_SWIZZLED, 0).given,
      .gate_up_weight_grad = t[8], .down_weight_grad = t[9]};
  save_case("mlp_backward", STANDIN_MLP_BACKWARD, MOE_DTYPE_BF16, &bwd, "--sizes 64,96,32 mlp_backward");
  const moe_matmul_mxfp8_args product = {.M = S, .N = 2 * I_, .K = H_, .format = m.format, .a = plain, .b = words,
      .output = t[10]};
  save_case("matmul", STANDIN_MATMUL, MOE_DTYPE_BF16, &product, "--sizes 64,64,96 matmul");
  mlp_release();
}

int main(int argc, char **argv) {
  if (argc != 2) return 1;
  root = argv[1];
  save_layer(), save_grouped(), save_mlp();
  return 0;
}
