/* neuron_compare.c: what a device computed, read from .npy files, against the CPU, tensor by tensor. Needs no device.

     cc -O2 -I. examples/neuron_compare.c -o neuron_compare -lm -ldl
     ./neuron_compare [options] forward|backward|grouped|grouped_dx|grouped_dw INPUTS OUTPUTS

   INPUTS and OUTPUTS are folders. A tensor is a file with its field's name: INPUTS/hidden_states.npy, of
   moe_blockwise_mm_fwd_args say, as numpy.save writes it, and OUTPUTS/output.npy. Sizes are those of the files. The
   outputs that are there are compared; each element has a bound, derived from the arithmetic of a kernel that sums in
   binary32 and rounds to the type. The exit code is 0 if all are within theirs.

     --type f32|bf16|fp16     of the function (bf16)
     --act NAME               silu, gelu, ...: the activations of moe.h (silu)
     --mode post|none|pre|on_i  where affinities are multiplied (post)
     --gate-upper X, --gate-lower X, --up-upper X, --up-lower X, --up-offset X
     --padding-row            hidden_states has a row T, which padding rows name
     --topk K                 of grouped GEMM (1); --permute-x, --permute-y
     --operand E, --activation E, --roundings N, --confidence C   the kernel's arithmetic: see moe_neuron_arithmetic */
#define MOE_IMPLEMENTATION
#include "moe/moe_neuron.h"

#include "npy.h"

#include <stdarg.h>

static void *take(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void give(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }

static moe_dtype dtype = MOE_DTYPE_BF16;

_Noreturn static void die(const char *format, ...) {
  va_list list;
  va_start(list, format);
  fputs("neuron_compare: ", stderr);
  vfprintf(stderr, format, list);
  fputc('\n', stderr);
  va_end(list);
  exit(2);
}

/* ---------------------------------------------------------------------------------------------------------- tensors */

/* n elements as floats of a moe_dtype, or as ids. */
static void *convert(const npy *from, moe_dtype to) {
  const int64_t n = from->count;
  float *wide = malloc((size_t)n * 4 + 4);
  uint16_t *narrow = malloc((size_t)n * 2 + 2);
  if (!wide || !narrow) die("out of memory");
  if (from->type == NPY_F32) memcpy(wide, from->data, (size_t)n * 4);
  if (from->type == NPY_BF16) moe_bf16_to_f32(NULL, wide, from->data, n);
  if (from->type == NPY_F16) moe_fp16_to_f32(NULL, wide, from->data, n);
  if (to == MOE_DTYPE_F32) return free(narrow), wide;
  if (to == MOE_DTYPE_BF16) moe_bf16_from_f32(NULL, narrow, wide, n);
  else moe_fp16_from_f32(NULL, narrow, wide, n);
  return free(wide), narrow;
}

static void *ids(const npy *from) {
  int32_t *to = malloc((size_t)from->count * 4 + 4);
  if (!to) die("out of memory");
  for (int64_t i = 0; i < from->count; i++)
    to[i] = from->type == NPY_I64 ? (int32_t)((const int64_t *)from->data)[i] : ((const int32_t *)from->data)[i];
  return to;
}

/* A tensor of a folder; NULL if it is optional and not there. shape: output (optional). count: as many elements it must
   have, 0 = any. */
static void *tensor(const char *folder, const char *name, moe_dtype to, int64_t count, int optional, npy *shape) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s.npy", folder, name);
  npy array = npy_read(path);
  if (!array.data && optional && strstr(array.why, "exist")) return NULL;
  if (!array.data) die("%s: %s", path, array.why);
  const int integers = array.type == NPY_I32 || array.type == NPY_I64;
  if (integers != (to == MOE_DTYPE_DEFAULT)) die("%s: %s are wanted", path, integers ? "floats" : "integers");
  if (count && array.count != count)
    die("%s: %lld elements, and not %lld", path, (long long)array.count, (long long)count);
  void *data = integers ? ids(&array) : convert(&array, to);
  free(array.data);
  array.data = NULL;
  if (shape) *shape = array;
  return data;
}

/* The same for outputs, and memory for the CPU's. */
static void *output(const char *folder, const char *name, moe_dtype type, int64_t count, void **cpu) {
  void *device = tensor(folder, name, type, count, 1, NULL);
  if (device && !(*cpu = calloc((size_t)count, 4))) die("out of memory");
  return device;
}

/* ------------------------------------------------------------------------------------------------------- operations */

#define OF_TYPE(function, ...)                                                     \
  (dtype == MOE_DTYPE_F32    ? function##_f32(__VA_ARGS__)                         \
   : dtype == MOE_DTYPE_BF16 ? function##_bf16(__VA_ARGS__) : function##_fp16(__VA_ARGS__))

static moe_blockwise_layer read_layer(const char *in, const moe_layer_config *config, int padding_row) {
  moe_blockwise_layer l = {.config = *config};
  npy x, w, blocks;
  l.hidden_states = tensor(in, "hidden_states", dtype, 0, 0, &x);
  l.gate_up_proj_weight = tensor(in, "gate_up_proj_weight", dtype, 0, 0, &w);
  if (x.ndim != 2 || w.ndim != 4 || w.shape[2] != 2 || w.shape[1] != x.shape[1])
    die("hidden_states must be [T,H] and gate_up_proj_weight [E,H,2,I]");
  l.T = x.shape[0] - padding_row, l.H = w.shape[1], l.E = w.shape[0], l.I = w.shape[3];
  l.down_proj_weight = tensor(in, "down_proj_weight", dtype, l.E * l.I * l.H, 0, NULL);
  l.gate_and_up_proj_bias = tensor(in, "gate_and_up_proj_bias", dtype, l.E * 2 * l.I, 1, NULL);
  l.down_proj_bias = tensor(in, "down_proj_bias", dtype, l.E * l.H, 1, NULL);
  l.expert_affinities_masked = tensor(in, "expert_affinities_masked", MOE_DTYPE_F32, (l.T + padding_row) * l.E,
                                      config->affinity_mode == MOE_AFFINITY_NO_SCALE, NULL);
  l.block_to_expert = tensor(in, "block_to_expert", MOE_DTYPE_DEFAULT, 0, 0, &blocks);
  l.N = blocks.count;
  l.token_position_to_id = tensor(in, "token_position_to_id", MOE_DTYPE_DEFAULT, 0, 0, &blocks);
  l.conditions = tensor(in, "conditions", MOE_DTYPE_DEFAULT, 0, 1, NULL);
  if (l.N < 1 || blocks.count % l.N != 0) die("token_position_to_id must have N*B elements");
  l.B = blocks.count / l.N;
  for (int64_t i = 0; i < blocks.count; i++) l.skip_token |= l.token_position_to_id[i] < 0;
  return l;
}

static moe_status forward(moe_context *ctx, const char *in, const char *out, const moe_layer_config *config,
                          int padding_row, const moe_neuron_options *options, moe_neuron_report *report) {
  moe_blockwise_mm_fwd_args cpu = {.layer = read_layer(in, config, padding_row)}, device;
  const moe_blockwise_layer *l = &cpu.layer;
  cpu.device.spec = MOE_CTE_SHARD_ON_I, cpu.device.output_shape = padding_row;
  device = cpu;
  device.output = output(out, "output", dtype, (l->T + (padding_row && !l->skip_token)) * l->H, &cpu.output);
  device.gate_up_activations_T =
      output(out, "gate_up_activations_T", dtype, l->N * 2 * l->I * l->B, &cpu.gate_up_activations_T);
  device.down_activations = output(out, "down_activations", dtype, l->N * l->B * l->H, &cpu.down_activations);
  if (!device.output) die("%s/output.npy does not exist", out);
  moe_status status = OF_TYPE(moe_blockwise_mm_fwd, ctx, &cpu);
  if (status == MOE_OK) status = OF_TYPE(moe_neuron_compare_blockwise_mm_fwd, ctx, &cpu, &device, options, report);
  return status;
}

static moe_status backward(moe_context *ctx, const char *in, const char *out, const moe_layer_config *config,
                           int padding_row, const moe_neuron_options *options, moe_neuron_report *report) {
  moe_blockwise_mm_bwd_args cpu = {.layer = read_layer(in, config, padding_row)}, device;
  const moe_blockwise_layer *l = &cpu.layer;
  const int64_t tokens = l->T + padding_row;
  cpu.gate_up_activations_T = tensor(in, "gate_up_activations_T", dtype, l->N * 2 * l->I * l->B, 1, NULL);
  cpu.down_activations = tensor(in, "down_activations", dtype, l->N * l->B * l->H, 1, NULL);
  cpu.output_hidden_states_grad = tensor(in, "output_hidden_states_grad", dtype, tokens * l->H, 0, NULL);
  device = cpu;
  device.hidden_states_grad = output(out, "hidden_states_grad", dtype, tokens * l->H, &cpu.hidden_states_grad);
  device.expert_affinities_masked_grad = output(out, "expert_affinities_masked_grad", MOE_DTYPE_F32, tokens * l->E,
                                                &cpu.expert_affinities_masked_grad);
  device.gate_up_proj_weight_grad =
      output(out, "gate_up_proj_weight_grad", dtype, l->E * l->H * 2 * l->I, &cpu.gate_up_proj_weight_grad);
  device.down_proj_weight_grad =
      output(out, "down_proj_weight_grad", dtype, l->E * l->I * l->H, &cpu.down_proj_weight_grad);
  device.gate_and_up_proj_bias_grad =
      output(out, "gate_and_up_proj_bias_grad", dtype, l->E * 2 * l->I, &cpu.gate_and_up_proj_bias_grad);
  device.down_proj_bias_grad = output(out, "down_proj_bias_grad", dtype, l->E * l->H, &cpu.down_proj_bias_grad);
  moe_status status = OF_TYPE(moe_blockwise_mm_bwd, ctx, &cpu);
  if (status == MOE_OK) status = OF_TYPE(moe_neuron_compare_blockwise_mm_bwd, ctx, &cpu, &device, options, report);
  return status;
}

static moe_status grouped(moe_context *ctx, const char *op, const char *in, const char *out,
                          moe_grouped_gemm_args cpu, const moe_neuron_options *options, moe_neuron_report *report) {
  const int dx = !strcmp(op, "grouped_dx"), dw = !strcmp(op, "grouped_dw");
  npy w = {0}, x = {0}, dy = {0}, sizes;
  moe_status status;
  cpu.m_sizes = tensor(in, "m_sizes", MOE_DTYPE_DEFAULT, 0, 0, &sizes);
  if (!dx) cpu.X = tensor(in, "X", dtype, 0, 0, &x);
  if (!dw) cpu.W = tensor(in, "W", dtype, 0, 0, &w);
  if (dx || dw) cpu.dY = tensor(in, "dY", dtype, 0, 0, &dy);
  if ((!dx && x.ndim != 2) || (!dw && w.ndim != 3) || ((dx || dw) && dy.ndim != 2))
    die("X must be [rows,K], W [E,N,K], dY [rows,N]");
  cpu.E = sizes.count, cpu.N = dw ? dy.shape[1] : w.shape[1], cpu.K = dx ? w.shape[2] : x.shape[1];
  const int64_t total = dx || dw ? dy.shape[0] : cpu.permute_x ? x.shape[0] * cpu.topk : x.shape[0];
  cpu.num_tokens = total / cpu.topk;
  if ((!dw && w.shape[0] != cpu.E) || (!dx && !dw && w.shape[2] != cpu.K)) die("W must be [E,N,K]");
  cpu.gather_indices =
      tensor(in, "gather_indices", MOE_DTYPE_DEFAULT, total, !cpu.permute_x && !cpu.permute_y, NULL);
  cpu.topk_weights = dx || dw ? NULL : tensor(in, "topk_weights", MOE_DTYPE_F32, total, 1, NULL);
  moe_grouped_gemm_args device = cpu;
  if (dx) device.dX = output(out, "dX", dtype, total * cpu.K, &cpu.dX);
  else if (dw) device.dW = output(out, "dW", dtype, cpu.E * cpu.N * cpu.K, &cpu.dW);
  else device.Y = output(out, "Y", dtype, total * cpu.N, &cpu.Y);
  if (!device.dX && !device.dW && !device.Y) die("%s has no output of %s", out, op);
#define GROUPED(suffix)                                                                             \
  status = OF_TYPE(moe_grouped_gemm##suffix, ctx, &cpu);                                            \
  if (status == MOE_OK)                                                                             \
    status = OF_TYPE(moe_neuron_compare_grouped_gemm##suffix, ctx, &cpu, &device, options, report)
  if (dx) {
    GROUPED(_dx);
  } else if (dw) {
    GROUPED(_dw);
  } else {
    GROUPED();
  }
  return status;
}

/* ---------------------------------------------------------------------------------------------------------- options */

typedef struct settings {
  moe_layer_config config;
  moe_grouped_gemm_args grouped;
  moe_neuron_options options;
  int padding_row;
} settings;

/* The place of a word in a list; the words are separated by blanks. */
static int word_of(const char *option, const char *word, const char *list) {
  int place = 0;
  const size_t n = strlen(word);
  for (const char *at = list; *at; place++) {
    const size_t length = strcspn(at, " ");
    if (length == n && memcmp(at, word, n) == 0) return place;
    at += length + (at[length] == ' ');
  }
  die("%s must be one of: %s", option, list);
}

static void set_limit(moe_layer_config *c, uint32_t bit, float *limit, const char *value) {
  c->clamp |= bit, *limit = strtof(value, NULL);
}

#define ACT_NAME_(name, NAME) #name " "
static void set_option(settings *s, const char *option, const char *value) {
  moe_layer_config *c = &s->config;
  if (!strcmp(option, "--type")) dtype = (moe_dtype)(1 + word_of(option, value, "f32 bf16 fp16"));
  else if (!strcmp(option, "--act"))
    c->activation = (moe_activation)word_of(option, value, MOE_ACTIVATION_LIST(ACT_NAME_));
  else if (!strcmp(option, "--mode"))
    c->affinity_mode = (moe_affinity_mode)word_of(option, value, "post none pre on_i");
  else if (!strcmp(option, "--gate-upper")) set_limit(c, MOE_CLAMP_GATE_UPPER, &c->gate_clamp_upper_limit, value);
  else if (!strcmp(option, "--gate-lower")) set_limit(c, MOE_CLAMP_GATE_LOWER, &c->gate_clamp_lower_limit, value);
  else if (!strcmp(option, "--up-upper")) set_limit(c, MOE_CLAMP_UP_UPPER, &c->up_clamp_upper_limit, value);
  else if (!strcmp(option, "--up-lower")) set_limit(c, MOE_CLAMP_UP_LOWER, &c->up_clamp_lower_limit, value);
  else if (!strcmp(option, "--up-offset")) c->up_offset = strtof(value, NULL);
  else if (!strcmp(option, "--topk")) s->grouped.topk = atoll(value);
  else if (!strcmp(option, "--operand")) s->options.arithmetic.operand = atof(value);
  else if (!strcmp(option, "--activation")) s->options.arithmetic.activation = atof(value);
  else if (!strcmp(option, "--roundings")) s->options.arithmetic.roundings = atoi(value);
  else if (!strcmp(option, "--confidence")) s->options.arithmetic.confidence = atof(value);
  else die("no option %s", option);
}

static int set_flag(settings *s, const char *option) {
  if (!strcmp(option, "--padding-row")) return s->padding_row = 1;
  if (!strcmp(option, "--permute-x")) return s->grouped.permute_x = 1;
  if (!strcmp(option, "--permute-y")) return s->grouped.permute_y = 1;
  return 0;
}

int main(int argc, char **argv) {
  moe_context ctx = {.allocate = take, .release = give};
  moe_neuron_report report;
  settings s = {.grouped = {.topk = 1}};
  char text[4096];
  int at = 1;
  for (; at < argc && argv[at][0] == '-'; at++)
    if (!set_flag(&s, argv[at])) {
      if (at + 1 == argc) die("%s needs a value", argv[at]);
      set_option(&s, argv[at], argv[at + 1]), at++;
    }
  if (argc - at != 3) die("neuron_compare [options] forward|backward|grouped|grouped_dx|grouped_dw INPUTS OUTPUTS");
  const char *op = argv[at], *in = argv[at + 1], *out = argv[at + 2];
  if (s.grouped.topk < 1) die("--topk must be at least 1");
  moe_status status = MOE_OK;
  if (!strcmp(op, "forward")) status = forward(&ctx, in, out, &s.config, s.padding_row, &s.options, &report);
  else if (!strcmp(op, "backward")) status = backward(&ctx, in, out, &s.config, s.padding_row, &s.options, &report);
  else if (!strncmp(op, "grouped", 7)) status = grouped(&ctx, op, in, out, s.grouped, &s.options, &report);
  else die("no operation %s", op);
  if (status != MOE_OK) die("%s", ctx.message);
  moe_neuron_report_text(&report, text, sizeof text);
  fputs(text, stdout);
  return report.agree ? 0 : 1;
}
