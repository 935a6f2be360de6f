/* neuron_compare.c: what a device computed, read from .npy files, against the CPU, tensor by tensor. Needs no device.

     cc -O2 -I. examples/neuron_compare.c -o neuron_compare -lm -ldl
     ./neuron_compare [options] OPERATION INPUTS OUTPUTS

   OPERATION is forward, backward, grouped, grouped_dx, grouped_dw, matmul, mlp_forward or mlp_backward. INPUTS and
   OUTPUTS are folders. A tensor is a file with its field's name, as numpy.save writes it: INPUTS/hidden_states.npy, of
   moe_blockwise_mm_fwd_args say, and OUTPUTS/output.npy. Its type may be another, its number of elements may not. The
   outputs that are there are compared; each element has a bound, derived from the arithmetic of a kernel that sums in
   binary32 and rounds to the type. The exit code is 0 if all are within theirs.

     --type f32|bf16|fp16     of the function (bf16)
     --act NAME               silu, gelu, ...: the activations of moe.h (silu)
     --mode post|none|pre|on_i  where affinities are multiplied (post)
     --gate-upper X, --gate-lower X, --up-upper X, --up-lower X, --act-upper X, --up-offset X, --up-softcap X
     --padding-row            hidden_states has a row T, which padding rows name
     --gate-up-order, --down-order in_out|out_in|interleaved   of plain weights and their gradients (in_out)
     --topk K                 of grouped GEMM (1); --permute-x, --permute-y, --sum-topk, --topk-pre
     --ekn                    W is [E,K,N]
     --sizes S,H,I            of the MLP; of matmul M,N,K
     --accumulation           sums over blocks are rounded after each of them
     --operand E, --activation E, --roundings N, --confidence C   the kernel's arithmetic: see moe_neuron_arithmetic

   Quantised weights are codes, of uint8 or an 8-bit float, with float scales under gate_up_proj_scale, down_proj_scale
   or W_scale, whose number says which they are; or words, uint16 of 4-bit codes, uint32 of 8-bit ones, with uint8
   scales: MX in --layout NAME. hidden_states and output_hidden_states_grad may be codes in rows, with a scale: floats,
   one or one for each token, or uint8, one for 32. Operands of the MLP are bfloat16, swizzled as well, or words with
   NAME_scales.
     --element e4m3fn|e4m3|e5m2   of 8-bit codes (e4m3fn)
     --layout strided_x4|contiguous_x4|wrapx|wrapx_whole|1x32   of words and swizzled operands (strided_x4; MLP: wrapx)
     --block N                of block scales (256)
     --swizzled NAME          this operand of the MLP is swizzled though its shape does not say so */
#define MOE_IMPLEMENTATION
#include "moe/moe_neuron.h"

#include "npy.h"

#include <stdarg.h>

static void *take(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void give(void *user, void *memory, size_t bytes) { (void)user, (void)bytes, free(memory); }
static moe_context ctx = {.allocate = take, .release = give};

typedef struct settings {
  moe_dtype dtype;
  moe_layer_config config;
  moe_weight_orders orders;
  moe_grouped_gemm_args grouped;
  moe_neuron_options options;
  moe_element element;
  moe_mx_layout layout; /* PLAIN: not said */
  int64_t block, sizes[3];
  int padding_row, accumulation;
  const char *swizzled;
} settings;
static settings set = {.dtype = MOE_DTYPE_BF16, .grouped = {.topk = 1}};

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

static const char *path_of(const char *folder, const char *name) {
  static char path[4096];
  snprintf(path, sizeof path, "%s/%s.npy", folder, name);
  return path;
}

/* A file; without data if it is not there. */
static npy file_of(const char *folder, const char *name) {
  npy array = npy_read(path_of(folder, name));
  if (!array.data && !strstr(array.why, "exist")) die("%s: %s", path_of(folder, name), array.why);
  return array;
}
static npy needed(const char *folder, const char *name) {
  npy array = file_of(folder, name);
  if (!array.data) die("%s does not exist", path_of(folder, name));
  return array;
}

static int is_float(npy_type type) { return type == NPY_F32 || type == NPY_BF16 || type == NPY_F16; }

/* Elements as floats of a type. */
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

/* A file as the operand has it; NULL if it is not there. */
static void *tensor(const char *folder, const moe_neuron_operand *o) {
  npy array = file_of(folder, o->name);
  if (!array.data) return NULL;
  const int floats = o->elements != MOE_DTYPE_DEFAULT || o->dtype == MOE_NRT_DTYPE_BFLOAT16;
  const size_t size = floats ? moe_dtype_size(o->elements ? o->elements : MOE_DTYPE_BF16) : 4;
  const int64_t least = (int64_t)(o->bytes / size), most = (int64_t)((o->bytes + o->padding) / size);
  if (is_float(array.type) != floats)
    die("%s: %s are wanted", path_of(folder, o->name), floats ? "floats" : "integers");
  if (array.count < least || array.count > most)
    die("%s: %lld elements, and not %lld", path_of(folder, o->name), (long long)array.count, (long long)least);
  void *data = floats ? convert(&array, o->elements ? o->elements : MOE_DTYPE_BF16) : ids(&array);
  free(array.data);
  return data;
}

/* --------------------------------------------------------------------------------------------------- quantised ones */

static float *scales_of(npy *array) { return convert(array, MOE_DTYPE_F32); }

/* What float scales are, by how many there are. */
static moe_weight_scaling scaling_of(int64_t count, int64_t E, int64_t parts, int64_t columns) {
  if (count == parts) return MOE_WEIGHT_STATIC;
  if (count == E * parts) return MOE_WEIGHT_STATIC_PER_EXPERT;
  if (count == parts * columns) return MOE_WEIGHT_COLUMN;
  return count == E * parts * columns ? MOE_WEIGHT_COLUMN_PER_EXPERT : MOE_WEIGHT_BLOCK;
}

/* A weight's codes and scales; NULL if it is plain. *columns: output, from its size. */
static const moe_quantized_weight *quantized(const char *in, const char *name, const char *scales_name, int64_t E,
                                             int64_t K, int64_t parts, int64_t *columns, moe_quantized_weight *q) {
  npy codes = needed(in, name);
  const int64_t each = codes.type == NPY_U8 ? 1 : 4; /* codes of an element */
  *columns = codes.count * each / (E * K * parts);
  if (is_float(codes.type)) return NULL;
  npy scales = needed(in, scales_name);
  *q = (moe_quantized_weight){.codes = codes.data, .block = set.block,
      .element = codes.type == NPY_U16 ? MOE_ELEMENT_E2M1 : set.element};
  if (codes.type != NPY_U8) {
    if (scales.type != NPY_U8) die("%s must be of uint8", scales_name);
    q->layout = set.layout ? set.layout : MOE_MX_LAYOUT_NKI_STRIDED_X4, q->scales = scales.data;
    return q;
  }
  if (!is_float(scales.type)) die("%s must be floats", scales_name);
  q->scaling = scaling_of(scales.count, E, parts, *columns), q->scales = scales_of(&scales);
  const int64_t block = set.block ? set.block : 256;
  const int64_t blocks = E * ((K + block - 1) / block) * parts * ((*columns + block - 1) / block);
  if (q->scaling == MOE_WEIGHT_BLOCK && (scales.count % blocks || !(q->repeat = scales.count / blocks)))
    die("%s has %lld scales, which are none of codes' shapes", scales_name, (long long)scales.count);
  return q;
}

static const moe_quantized_activation *quantized_rows(const char *in, const char *name, const char *scales_name,
                                                      npy *codes, moe_quantized_activation *a) {
  *codes = needed(in, name);
  if (is_float(codes->type)) return NULL;
  npy scales = needed(in, scales_name);
  *a = (moe_quantized_activation){.element = set.element, .codes = codes->data, .float_scales = is_float(scales.type)};
  if (codes->type != NPY_U8 || codes->ndim != 2) die("%s must be [T,H] of an 8-bit type", name);
  a->scales = a->float_scales ? (void *)scales_of(&scales) : scales.data;
  a->block_rows = scales.count > 1;
  return a;
}

/* ------------------------------------------------------------------------------------------------------- operations */

typedef union arguments {
  moe_blockwise_mm_fwd_args forward;
  moe_blockwise_mm_bwd_args backward;
  moe_grouped_gemm_args grouped;
  moe_matmul_mxfp8_args matmul;
  moe_mlp_fwd_mxfp8_args mlp_forward;
  moe_mlp_bwd_mxfp8_args mlp_backward;
} arguments;

typedef struct field {
  const char *name;
  size_t offset;
} field;

#define OF_(member, name) {#name, offsetof(arguments, member)},
#define OUT_(member, name) {#name, offsetof(arguments, member.name)},
#define LAYER_(op)                                                                                                    \
  OF_(op.layer.hidden_states, hidden_states) OF_(op.layer.expert_affinities_masked, expert_affinities_masked)         \
  OF_(op.layer.gate_up_proj_weight, gate_up_proj_weight) OF_(op.layer.down_proj_weight, down_proj_weight)             \
  OF_(op.layer.gate_and_up_proj_bias, gate_and_up_proj_bias) OF_(op.layer.down_proj_bias, down_proj_bias)             \
  OF_(op.layer.token_position_to_id, token_position_to_id) OF_(op.layer.block_to_expert, block_to_expert)             \
  OF_(op.layer.conditions, conditions) OF_(op.layer.num_valid_tokens, num_valid_tokens)                               \
  OF_(op.layer.mx.gate_up_in_scale, gate_up_in_scale) OF_(op.layer.mx.down_in_scale, down_in_scale)                   \
  OUT_(op, gate_up_activations_T) OUT_(op, down_activations) OUT_(op, scaled_intermediate_checkpoint_T)
#define MX_(op, name) OF_(op.name.data, name) {#name "_scales", offsetof(arguments, op.name.scales)},

static const field forward_fields[] = {LAYER_(forward) OUT_(forward, output){NULL, 0}};
static const field backward_fields[] = {
    LAYER_(backward) OUT_(backward, output_hidden_states_grad) OUT_(backward, hidden_states_grad)
    OUT_(backward, expert_affinities_masked_grad) OUT_(backward, gate_up_proj_weight_grad)
    OUT_(backward, down_proj_weight_grad) OUT_(backward, gate_and_up_proj_bias_grad)
    OUT_(backward, down_proj_bias_grad){NULL, 0}};
static const field grouped_fields[] = {
    OUT_(grouped, m_sizes) OUT_(grouped, gather_indices) OUT_(grouped, X) OUT_(grouped, W) OUT_(grouped, bias)
    OUT_(grouped, dY) OUT_(grouped, topk_weights) OUT_(grouped, Y) OUT_(grouped, dX) OUT_(grouped, topk_weights_grad)
    OUT_(grouped, dW) OUT_(grouped, bias_grad){NULL, 0}};
static const field matmul_fields[] = {MX_(matmul, a) MX_(matmul, b) OUT_(matmul, output){NULL, 0}};
static const field mlp_forward_fields[] = {
    MX_(mlp_forward, hidden_states) MX_(mlp_forward, gate_up_weights) MX_(mlp_forward, down_weight)
    OUT_(mlp_forward, gate_pre) OUT_(mlp_forward, gate_act) OUT_(mlp_forward, up) OUT_(mlp_forward, hidden)
    OUT_(mlp_forward, output){NULL, 0}};
#define BWD_(name) OUT_(mlp_backward, name)
#define BWD_MX_(name) MX_(mlp_backward, name)
static const field mlp_backward_fields[] = {
    BWD_MX_(output_grad) BWD_MX_(hidden_states) BWD_MX_(gate_up_weights) BWD_MX_(gate_weight_T) BWD_MX_(up_weight_T)
    BWD_MX_(down_weight) BWD_MX_(down_weight_T) BWD_MX_(hidden_states_T) BWD_MX_(output_grad_T) BWD_MX_(hidden_T)
    BWD_(gate_pre) BWD_(gate_act) BWD_(up) BWD_(hidden) BWD_(gate_pre_scratch) BWD_(gate_act_scratch) BWD_(up_scratch)
    BWD_(hidden_scratch) BWD_(d_gate) BWD_(d_up) BWD_(d_gate_up_T) BWD_(hidden_states_grad) BWD_(gate_up_weight_grad)
    BWD_(down_weight_grad){NULL, 0}};

static void **field_of(const field *fields, const char *name, arguments *args) {
  while (fields->name && strcmp(fields->name, name) != 0) fields++;
  return fields->name ? (void **)(void *)((char *)args + fields->offset) : NULL;
}

/* The layer's sizes, and what is quantised; *a: output. */
static void read_layer(const char *in, moe_blockwise_layer *l) {
  static moe_quantized_weight weight[2];
  static moe_quantized_activation rows;
  npy x, affinity = file_of(in, "expert_affinities_masked"), blocks = needed(in, "block_to_expert");
  npy slots = needed(in, "token_position_to_id"), w = needed(in, "gate_up_proj_weight");
  l->config = set.config, l->orders = set.orders;
  l->accumulation_dtype = set.accumulation ? set.dtype : MOE_DTYPE_DEFAULT;
  l->quantized_hidden_states = quantized_rows(in, "hidden_states", "hidden_states_scale", &x, &rows);
  if (x.ndim != 2) die("hidden_states must be [T,H]");
  l->T = x.shape[0] - set.padding_row, l->H = x.shape[1];
  l->E = affinity.data ? affinity.count / x.shape[0] : w.shape[0];
  if (l->T < 1 || l->H < 1 || l->E < 1) die("expert_affinities_masked must be [T,E]");
  l->quantized_gate_up_proj_weight =
      quantized(in, "gate_up_proj_weight", "gate_up_proj_scale", l->E, l->H, 2, &l->I, &weight[0]);
  if (is_float(w.type)) l->I = w.count / (l->E * 2 * l->H);
  int64_t columns;
  l->quantized_down_proj_weight =
      quantized(in, "down_proj_weight", "down_proj_scale", l->E, l->I > 0 ? l->I : 1, 1, &columns, &weight[1]);
  l->N = blocks.count, l->B = l->N ? slots.count / l->N : 0;
  if (l->N < 1 || slots.count % l->N != 0) die("token_position_to_id must have N*B elements");
  const int32_t *id = ids(&slots);
  for (int64_t i = 0; i < slots.count; i++) l->skip_token |= id[i] < 0;
}

static void read_grouped(const char *op, const char *in, const char *out, moe_grouped_gemm_args *a) {
  static moe_quantized_weight weight;
  const int dx = !strcmp(op, "grouped_dx"), dw = !strcmp(op, "grouped_dw");
  npy x = file_of(in, "X"), dy = file_of(in, "dY"), w = file_of(in, "W"), sizes = needed(in, "m_sizes");
  *a = set.grouped;
  a->E = sizes.count;
  if ((!dx && x.ndim != 2) || ((dx || dw) && dy.ndim != 2) || (!dw && !w.data)) die("X must be [rows,K], dY [rows,N]");
  const int64_t rows = dx || dw ? dy.shape[0] : a->permute_x ? x.shape[0] * a->topk : x.shape[0];
  const int64_t each = is_float(w.type) || w.type == NPY_U8 ? 1 : 4;
  a->num_tokens = rows / a->topk;
  a->K = dx ? w.count * each / (a->E * dy.shape[1]) : x.shape[1];
  a->N = dx || dw ? dy.shape[1] : w.count * each / (a->E * a->K);
  int64_t columns;
  if (!dw) a->quantized_W = quantized(in, "W", "W_scale", a->E, a->K, 1, &columns, &weight);
  static float wanted; /* then the table has X as well */
  if (dx && file_of(out, "topk_weights_grad").data) a->topk_weights_grad = &wanted;
}

/* In which state an operand [F,K] is; words and scales are loaded. */
static void read_operand(const char *in, const char *name, int64_t F, int64_t K, moe_mxfp8_operand *x) {
  char scales_name[64];
  npy data = file_of(in, name);
  snprintf(scales_name, sizeof scales_name, "%s_scales", name);
  *x = (moe_mxfp8_operand){.data = NULL};
  if (!data.data) return;
  x->is_swizzled = !is_float(data.type) || (set.swizzled && !strcmp(set.swizzled, name)) ||
                   (data.ndim == 2 && data.shape[0] != F);
  if (is_float(data.type)) {
    free(data.data); /* it is read with the others */
    return;
  }
  npy scales = needed(in, scales_name);
  if (data.type != NPY_I32 || scales.type != NPY_U8) die("%s must be words of uint32, and its scales uint8", name);
  if (data.count * 4 != F * K)
    die("%s has %lld words, and not %lld", name, (long long)data.count, (long long)(F * K / 4));
  x->data = data.data, x->scales = scales.data;
  if (scales.count != F * (K / 32))
    x->scales_layout = scales.count == F * (K / 4) ? MOE_MX_SCALES_NKI_OVERSIZED : MOE_MX_SCALES_NKI_PACKED;
  if (x->scales_layout == MOE_MX_SCALES_NKI_PACKED && scales.count != F * ((K + 2047) / 2048) * 128)
    die("%s has %lld scales", name, (long long)scales.count);
}

static void read_mlp(const char *op, const char *in, arguments *args) {
  const int64_t S = set.sizes[0], H = set.sizes[1], I = set.sizes[2];
  moe_mlp_fwd_mxfp8_args *f = &args->mlp_forward;
  moe_mlp_bwd_mxfp8_args *b = &args->mlp_backward;
  const moe_mxfp8_format format = {.element = set.element, .layout = set.layout ? set.layout : MOE_MX_LAYOUT_NKI_WRAPX};
  const moe_mlp_mxfp8 mlp = {.S = S, .H = H, .I = I, .format = format, .config = set.config};
  if (S < 1 || H < 1 || I < 1) die("--sizes are wanted");
  if (!strcmp(op, "matmul")) {
    args->matmul = (moe_matmul_mxfp8_args){.M = S, .N = H, .K = I, .format = format};
    read_operand(in, "a", S, I, &args->matmul.a), read_operand(in, "b", H, I, &args->matmul.b);
  } else if (!strcmp(op, "mlp_forward")) {
    f->mlp = mlp;
    read_operand(in, "hidden_states", S, H, &f->hidden_states);
    read_operand(in, "gate_up_weights", 2 * I, H, &f->gate_up_weights);
    read_operand(in, "down_weight", H, I, &f->down_weight);
  } else {
    b->mlp = mlp;
    read_operand(in, "output_grad", S, H, &b->output_grad);
    read_operand(in, "hidden_states", S, H, &b->hidden_states);
    read_operand(in, "gate_up_weights", 2 * I, H, &b->gate_up_weights);
    read_operand(in, "gate_weight_T", H, I, &b->gate_weight_T), read_operand(in, "up_weight_T", H, I, &b->up_weight_T);
    read_operand(in, "down_weight", H, I, &b->down_weight), read_operand(in, "down_weight_T", I, H, &b->down_weight_T);
    read_operand(in, "hidden_states_T", H, S, &b->hidden_states_T);
    read_operand(in, "output_grad_T", H, S, &b->output_grad_T), read_operand(in, "hidden_T", I, S, &b->hidden_T);
  }
}

/* Sizes, options, and what says by its file how it is stored. */
static void read_arguments(const char *op, const char *in, const char *out, arguments *args) {
  static moe_quantized_activation rows;
  npy dy;
  if (!strcmp(op, "forward")) {
    read_layer(in, &args->forward.layer);
    args->forward.device.spec = MOE_CTE_SHARD_ON_I, args->forward.device.output_shape = set.padding_row;
  } else if (!strcmp(op, "backward")) {
    read_layer(in, &args->backward.layer);
    args->backward.quantized_output_hidden_states_grad = quantized_rows(
        in, "output_hidden_states_grad", "output_hidden_states_grad_scale", &dy, &rows);
  } else if (!strncmp(op, "grouped", 7)) {
    read_grouped(op, in, out, &args->grouped);
  } else {
    read_mlp(op, in, args);
  }
}

/* The functions of an operation, and where its tensors are. */
typedef struct operation {
  const char *name;
  moe_dtype dtype; /* DEFAULT: any */
  const field *fields;
  moe_status (*describe)(const void *args, moe_neuron_table *table);
  moe_status (*cpu)(const void *args);
  moe_status (*compare)(const void *args, const void *device, moe_neuron_report *report);
} operation;

#define FUNCTIONS_(op, type, kind, NAME)                                                              \
  static moe_status describe_##op(const void *args, moe_neuron_table *table) {                        \
    return moe_neuron_describe_##op(&ctx, (const type *)args, &set.options, table);                   \
  }                                                                                                   \
  static moe_status cpu_##op(const void *args) { return moe_##op(&ctx, (const type *)args); }         \
  static moe_status compare_##op(const void *args, const void *device, moe_neuron_report *report) {   \
    return moe_neuron_compare_##op(&ctx, (const type *)args, (const type *)device, &set.options, report); \
  }
#define FUNCTIONS_OF_(name, type, NAME) MOE_NEURON_OP_LIST(FUNCTIONS_, name, NAME)
MOE_DTYPE_LIST(FUNCTIONS_OF_)
MOE_NEURON_MXFP8_OP_LIST(FUNCTIONS_)

#define NAME_FORWARD_      "forward", forward_fields
#define NAME_BACKWARD_     "backward", backward_fields
#define NAME_GROUPED_      "grouped", grouped_fields
#define NAME_GROUPED_DX_   "grouped_dx", grouped_fields
#define NAME_GROUPED_DW_   "grouped_dw", grouped_fields
#define NAME_MATMUL_       "matmul", matmul_fields
#define NAME_MLP_FORWARD_  "mlp_forward", mlp_forward_fields
#define NAME_MLP_BACKWARD_ "mlp_backward", mlp_backward_fields
#define ROW_OF_(name, fields, NAME, op) {name, MOE_DTYPE_##NAME, fields, describe_##op, cpu_##op, compare_##op},
#define ROW_(...) ROW_OF_(__VA_ARGS__)
#define OPERATION_(op, type, kind, NAME) ROW_(NAME_##kind##_, NAME, op)
#define OPERATIONS_OF_(name, type, NAME) MOE_NEURON_OP_LIST(OPERATION_, name, NAME)
static const operation operations[] = {MOE_DTYPE_LIST(OPERATIONS_OF_) MOE_NEURON_MXFP8_OP_LIST(OPERATION_)};

static const operation *operation_of(const char *name) {
  const operation *found = NULL;
  for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
    if (!strcmp(operations[i].name, name) && (!found || operations[i].dtype == set.dtype)) found = &operations[i];
  if (!found) die("no operation %s", name);
  return found;
}

/* Reads inputs into both, outputs into `device`, and takes memory for the CPU's. */
static void read_tensors(const operation *op, const char *in, const char *out, arguments *cpu, arguments *device) {
  moe_neuron_table table;
  int outputs = 0;
  if (op->describe(cpu, &table) != MOE_OK) die("%s", ctx.message);
  for (int32_t i = 0; i < table.count; i++) {
    const moe_neuron_operand *o = &table.operand[i];
    void **pointer = field_of(op->fields, o->name, cpu);
    if (o->use == MOE_NEURON_OUTPUT || o->data || !pointer) continue; /* or it has been read */
    *pointer = tensor(in, o);
    if (!*pointer && !o->optional && !o->zero_if_absent) die("%s does not exist", path_of(in, o->name));
  }
  *device = *cpu;
  for (int32_t i = 0; i < table.count; i++) {
    const moe_neuron_operand *o = &table.operand[i];
    void **pointer = field_of(op->fields, o->name, device);
    if (o->use != MOE_NEURON_OUTPUT || !pointer || !(*pointer = tensor(out, o))) continue;
    if (!(*field_of(op->fields, o->name, cpu) = calloc(1, o->bytes + o->padding + 1))) die("out of memory");
    outputs++;
  }
  if (!outputs) die("%s has no output of %s", out, op->name);
}

/* ---------------------------------------------------------------------------------------------------------- options */

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

/* Numbers, and the bits that say that they are in use. */
static int set_number(const char *option, const char *value) {
  moe_layer_config *c = &set.config;
  moe_neuron_arithmetic *a = &set.options.arithmetic;
  const struct {
    const char *name;
    float *number;
    double *precise;
    uint32_t bit;
  } list[] = {{"--gate-upper", &c->gate_clamp_upper_limit, NULL, MOE_CLAMP_GATE_UPPER},
              {"--gate-lower", &c->gate_clamp_lower_limit, NULL, MOE_CLAMP_GATE_LOWER},
              {"--up-upper", &c->up_clamp_upper_limit, NULL, MOE_CLAMP_UP_UPPER},
              {"--up-lower", &c->up_clamp_lower_limit, NULL, MOE_CLAMP_UP_LOWER},
              {"--act-upper", &c->activation_clamp_upper_limit, NULL, MOE_CLAMP_ACTIVATION_UPPER},
              {"--up-offset", &c->up_offset, NULL, 0}, {"--up-softcap", &c->up_softcap, NULL, 0},
              {"--operand", NULL, &a->operand, 0}, {"--activation", NULL, &a->activation, 0},
              {"--confidence", NULL, &a->confidence, 0}};
  for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
    if (strcmp(option, list[i].name) != 0) continue;
    if (list[i].number) *list[i].number = strtof(value, NULL);
    else *list[i].precise = strtod(value, NULL);
    c->clamp |= list[i].bit;
    return 1;
  }
  return 0;
}

#define ACT_NAME_(name, NAME) #name " "
static void set_option(const char *option, const char *value) {
  if (set_number(option, value)) return;
  if (!strcmp(option, "--type")) set.dtype = (moe_dtype)(1 + word_of(option, value, "f32 bf16 fp16"));
  else if (!strcmp(option, "--act"))
    set.config.activation = (moe_activation)word_of(option, value, MOE_ACTIVATION_LIST(ACT_NAME_));
  else if (!strcmp(option, "--mode"))
    set.config.affinity_mode = (moe_affinity_mode)word_of(option, value, "post none pre on_i");
  else if (!strcmp(option, "--gate-up-order"))
    set.orders.gate_up = (moe_weight_order)word_of(option, value, "in_out out_in interleaved");
  else if (!strcmp(option, "--down-order")) set.orders.down = (moe_weight_order)word_of(option, value, "in_out out_in");
  else if (!strcmp(option, "--element")) set.element = (moe_element)word_of(option, value, "e4m3fn e4m3 e5m2");
  else if (!strcmp(option, "--layout"))
    set.layout = (moe_mx_layout)word_of(option, value, "plain strided_x4 contiguous_x4 wrapx wrapx_whole 1x32");
  else if (!strcmp(option, "--topk")) set.grouped.topk = atoll(value);
  else if (!strcmp(option, "--block")) set.block = atoll(value);
  else if (!strcmp(option, "--swizzled")) set.swizzled = value;
  else if (!strcmp(option, "--roundings")) set.options.arithmetic.roundings = atoi(value);
  else if (!strcmp(option, "--sizes")) {
    char *at = (char *)(uintptr_t)value;
    for (int i = 0; i < 3; i++) set.sizes[i] = strtoll(at, &at, 10), at += *at == ',';
  } else die("no option %s", option);
}

static int set_flag(const char *option) {
  moe_grouped_gemm_args *g = &set.grouped;
  if (!strcmp(option, "--padding-row")) return set.padding_row = 1;
  if (!strcmp(option, "--accumulation")) return set.accumulation = 1;
  if (!strcmp(option, "--permute-x")) return g->permute_x = 1;
  if (!strcmp(option, "--permute-y")) return g->permute_y = 1;
  if (!strcmp(option, "--sum-topk")) return g->sum_topk = 1;
  if (!strcmp(option, "--topk-pre")) return g->topk_mode = MOE_TOPK_PRE, 1;
  if (!strcmp(option, "--ekn")) return g->weight_order = MOE_GROUPED_EKN, 1;
  return 0;
}

int main(int argc, char **argv) {
  static arguments cpu, device;
  moe_neuron_report report;
  char text[4096];
  int at = 1;
  for (; at < argc && argv[at][0] == '-'; at++)
    if (!set_flag(argv[at])) {
      if (at + 1 == argc) die("%s needs a value", argv[at]);
      set_option(argv[at], argv[at + 1]), at++;
    }
  if (argc - at != 3) die("[options] OPERATION INPUTS OUTPUTS, of which the comment in neuron_compare.c tells more");
  const operation *op = operation_of(argv[at]);
  if (set.grouped.topk < 1) die("--topk must be at least 1");
  read_arguments(argv[at], argv[at + 1], argv[at + 2], &cpu);
  read_tensors(op, argv[at + 1], argv[at + 2], &cpu, &device);
  moe_status status = op->cpu(&cpu);
  if (status == MOE_OK) status = op->compare(&cpu, &device, &report);
  if (status != MOE_OK) die("%s", ctx.message);
  moe_neuron_report_text(&report, text, sizeof text);
  fputs(text, stdout);
  return report.agree ? 0 : 1;
}
