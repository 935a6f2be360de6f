/* moe_neuron.h: the layer on a Trainium, from the argument structs of moe.h. MIT licence, see LICENSE.

   WHAT IT IS
     An optional header. It runs a compiled kernel (a NEFF) through the Neuron runtime, libnrt, with the same structs as
     the CPU's functions: their tensors are bound to the NEFF's by name, sizes and types are compared, outputs come back
     into the caller's buffers. And it compares: the device's results with the CPU's, tensor by tensor, each element
     against a bound that is derived from the arithmetic.
     It needs no SDK: libnrt is loaded when moe_neuron_open is called. Where there is none, all of it compiles, and says
     so. moe.h neither includes nor needs it.

   HOW TO COMPILE
     The C file that defines MOE_IMPLEMENTATION and includes this header has the implementation of both. For a file of
     its own define MOE_NEURON_IMPLEMENTATION there instead. POSIX only; link with -ldl where dlopen is not in libc.
     With MOE_NEURON_USE_SDK_HEADERS the SDK's headers (-I/opt/aws/neuron/include) are included, and our declarations of
     libnrt's values, structs and functions are compared with them.

   AN EXAMPLE
     moe_neuron neuron;
     moe_neuron_model model;
     moe_neuron_choice choice;
     if (moe_neuron_open(&ctx, &neuron, NULL) == MOE_OK) ...
     moe_neuron_load(&ctx, &neuron, neff, neff_bytes, -1, &model);    // or not: model.why says what is missing
     moe_neuron_or_cpu_blockwise_mm_fwd_bf16(&ctx, &model, &args, NULL, &choice);   // runs, here or there
     moe_neuron_unload(&model), moe_neuron_close(&neuron);
     examples/neuron_forward.c is the whole program, docs/trainium.md tells the rest.

   NAMES
     A tensor of a NEFF is bound to the field that has its name, `hidden_states` say, or to what nki-library's kernel
     calls it. Scales have names of their own: gate_up_proj_scale, down_proj_scale, hidden_states_scale,
     output_hidden_states_grad_scale, W_scale, and of an MXFP8 operand X X_scales. What is accumulated is an input as
     well: hidden_states_grad_out, the same of affinities and of weights' gradients in the layer's backward; all else
     under its own name. Frameworks name tensors otherwise ("input0"): moe_neuron_options.names says which is which.

   ERRORS
     Functions return a moe_status and put a sentence into ctx->message, as those of moe.h do. What libnrt returns
     becomes a status by MOE_NRT_STATUS_LIST; the sentence names the function, the NRT status, and what to do. What
     fails gives back what it took. Outputs are written once the kernel has completed, and only with OK or
     DEVICE_NUMERIC; reading them back may fail between two of them.

   THREADS AND MEMORY
     There is no shared state here, and no hidden allocation: handles are structs of the caller's, and what must be
     converted or bounded takes memory from ctx.allocate. Different threads may use different models of one moe_neuron
     at the same time, each with its own context. All calls are synchronous. libnrt itself is one per process: open it
     once. */
#ifndef MOE_NEURON_H
#define MOE_NEURON_H

#include "../moe.h"
#include "neuron/abi.h"

#include "api/begin.h"

/* --------------------------------------------------------------------------------------------------------- runtime */

/* libnrt, loaded. `nrt` has its functions, NULL where this version lacks one; callers may use them as well. */
typedef struct moe_neuron {
  moe_nrt_functions nrt;
  void *library;  /* NULL: not open */
  char why[256];  /* why it is not open */
} moe_neuron;

/* Loads libnrt and initialises it. path: of the library, and then no other is tried; NULL: libnrt.so.1, libnrt.so, and
   /opt/aws/neuron/lib. neuron: output, closed and with `why` after an error.
   Errors: NULL_ARGUMENT, NO_RUNTIME (no library, or one that lacks a function), and what nrt_init returns. */
MOE_API moe_status moe_neuron_open(moe_context *ctx, moe_neuron *neuron, const char *path);

/* Closes it; models are unloaded and tensors freed before that. May be called for one that is not open. */
MOE_API void moe_neuron_close(moe_neuron *neuron);

/* What is known of the machine; 0 and "" where this libnrt does not tell. */
typedef struct moe_neuron_info {
  uint64_t version[4];                       /* major, minor, patch, maintenance */
  uint32_t family;                           /* moe_nrt_instance */
  char arch_name[17], device_revision[9];
  uint32_t cores, visible_cores;             /* logical cores of the instance; those that this process may use */
  uint32_t lnc;                              /* physical cores of a logical one: NEURON_LOGICAL_NC_CONFIG, or the
                                                instance's default; 0 = not known */
  int has_tensor_cast, has_tensor_compute;   /* newer functions, which nothing here uses */
} moe_neuron_info;
MOE_API moe_status moe_neuron_get_info(moe_context *ctx, const moe_neuron *neuron, moe_neuron_info *info);

/* Device memory of a core. Errors: NULL_ARGUMENT, NO_RUNTIME, UNSUPPORTED (this libnrt does not tell), libnrt's. */
MOE_API moe_status moe_neuron_memory(moe_context *ctx, const moe_neuron *neuron, uint32_t core,
                                     moe_nrt_vnc_memory_stats *stats);

/* What a status of libnrt becomes here, its name, and what to do about it. For unknown ones DEVICE_FAILED. */
MOE_API moe_status moe_neuron_status(moe_nrt_status status);
MOE_API const char *moe_neuron_status_str(moe_nrt_status status);
MOE_API const char *moe_neuron_advice(moe_nrt_status status);

/* --------------------------------------------------------------------------------------------------- device tensors */

/* Memory on a core, of the caller's. */
typedef struct moe_neuron_tensor {
  const moe_neuron *neuron;
  moe_nrt_tensor *tensor;
  size_t bytes;
} moe_neuron_tensor;

/* Allocates one; its contents are undefined. name: (optional), for the runtime's messages.
   Errors of all of these: NULL_ARGUMENT, INVALID_SHAPE (beyond the tensor's end), NO_RUNTIME, UNSUPPORTED (this libnrt
   lacks the function), and libnrt's. */
MOE_API moe_status moe_neuron_tensor_new(moe_context *ctx, const moe_neuron *neuron, int32_t core, size_t bytes,
                                         const char *name, moe_neuron_tensor *tensor);
/* Bytes [offset, offset+bytes) of another one, without a copy. That one must outlive it. */
MOE_API moe_status moe_neuron_tensor_slice(moe_context *ctx, const moe_neuron_tensor *of, size_t offset, size_t bytes,
                                           moe_neuron_tensor *slice);
MOE_API moe_status moe_neuron_tensor_write(moe_context *ctx, moe_neuron_tensor *tensor, size_t offset,
                                           const void *from, size_t bytes);
MOE_API moe_status moe_neuron_tensor_read(moe_context *ctx, const moe_neuron_tensor *tensor, size_t offset, void *to,
                                          size_t bytes);
MOE_API moe_status moe_neuron_tensor_fill(moe_context *ctx, moe_neuron_tensor *tensor, size_t offset, int byte,
                                          size_t bytes);
/* Both must be on one core. */
MOE_API moe_status moe_neuron_tensor_copy(moe_context *ctx, const moe_neuron_tensor *from, size_t from_offset,
                                          moe_neuron_tensor *to, size_t to_offset, size_t bytes);
/* Frees it; no model may have it any more. May be called twice, and for a zeroed one. */
MOE_API void moe_neuron_tensor_free(moe_neuron_tensor *tensor);

/* ----------------------------------------------------------------------------------------------------------- models */

/* Checks a NEFF's header: that it and its data are within `bytes`, and that it was compiled for logical cores of `lnc`
   physical ones (0: not compared). header: output (optional).
   Errors: NULL_ARGUMENT, INVALID_SHAPE (no NEFF, or cut short), UNSUPPORTED (another lnc). */
MOE_API moe_status moe_neff_check(moe_context *ctx, const void *neff, size_t bytes, uint32_t lnc,
                                  moe_neff_header *header);

enum { MOE_NEURON_TENSORS_MAX = 64 };

/* A loaded NEFF, with a device tensor for each that it declares. These are allocated when they are first needed and
   stay until the model is unloaded. */
typedef struct moe_neuron_model {
  const moe_neuron *neuron;
  moe_nrt_model *model;      /* NULL: not loaded */
  int32_t core;              /* where it is */
  moe_nrt_tensor_info_array *info;
  const moe_nrt_tensor_info *tensor; /* [tensors]: what the NEFF declares */
  int32_t tensors;
  moe_nrt_tensor_set *inputs, *outputs;
  moe_nrt_tensor *device[MOE_NEURON_TENSORS_MAX]; /* by the same index */
  uint8_t owned[MOE_NEURON_TENSORS_MAX];          /* 0: the caller's, attached */
  uint8_t written[MOE_NEURON_TENSORS_MAX];        /* holds what a call wrote */
  char why[256];                                  /* why it is not loaded */
} moe_neuron_model;

/* Checks the NEFF's header and loads it on a core (-1: a free one); `neff` is not needed afterwards. model: output, not
   loaded and with `why` after an error. If neuron is not open, it is NO_RUNTIME, and neuron's `why` is the model's.
   Errors: NULL_ARGUMENT, NO_RUNTIME, UNSUPPORTED (more tensors than MOE_NEURON_TENSORS_MAX; another lnc), those of
   moe_neff_check and libnrt. */
MOE_API moe_status moe_neuron_load(moe_context *ctx, const moe_neuron *neuron, const void *neff, size_t bytes,
                                   int32_t core, moe_neuron_model *model);
/* Frees its tensors and unloads it. May be called for one that is not loaded. Errors: libnrt's; all is freed then, too.
 */
MOE_API moe_status moe_neuron_unload(moe_context *ctx, moe_neuron_model *model);

/* Gives the model a tensor of the caller's as its input or output of that name, in place of one of its own: weights
   that two models share, or one model's output as another's input. It counts as written, need not be a tensor of the
   calls that are bound, and must outlive the model or be replaced.
   Errors: NULL_ARGUMENT, INVALID_OPTION (no such tensor), INVALID_SHAPE (not as large as declared), libnrt's. */
MOE_API moe_status moe_neuron_attach(moe_context *ctx, moe_neuron_model *model, moe_nrt_tensor_usage usage,
                                     const char *name, const moe_neuron_tensor *tensor);

/* Profiles executions of the model from now on; stop writes the file, which must be the same. */
MOE_API moe_status moe_neuron_profile_start(moe_context *ctx, const moe_neuron_model *model, const char *file);
MOE_API moe_status moe_neuron_profile_stop(moe_context *ctx, const moe_neuron_model *model, const char *file);

/* --------------------------------------------------------------------------------------------- operations as tables */

/* What a tensor of an operation is to the device. */
typedef enum moe_neuron_use {
  MOE_NEURON_INPUT = 0,
  MOE_NEURON_WEIGHT = 1, /* an input that options.weights_stay lets stay */
  MOE_NEURON_OUTPUT = 2
} moe_neuron_use;

/* How the device stores what the struct has in logical order: see moe_nki_vector. */
typedef enum moe_neuron_order {
  MOE_NEURON_ORDER_SAME = 0,
  MOE_NEURON_ORDER_GATE_UP_BIAS = 1, /* shape [E,2,I] becomes MOE_NKI_GATE_UP_BIAS */
  MOE_NEURON_ORDER_DOWN_SCALE = 2    /* shape [E,1,H] becomes MOE_NKI_DOWN_SCALE */
} moe_neuron_order;

/* One tensor of a call. Where elements, a moe_dtype, is not DEFAULT, it can be compared: rows of `row` elements, `step`
   elements apart. */
typedef struct moe_neuron_operand {
  const char *name, *alias; /* the field; what nki-library calls it, if otherwise */
  moe_neuron_use use;
  void *data;               /* the caller's; NULL: there is none. Inputs are only read */
  size_t bytes;             /* on the device */
  size_t padding;           /* the NEFF's may have so many bytes more: zeros in an input, in an output not read */
  moe_nrt_dtype dtype;
  moe_neuron_order order;
  int zero_if_absent;       /* an input without data is zeros, as a bias is. Others must have data if the NEFF does */
  int optional;             /* an input that the CPU's function does without */
  int per_expert;           /* data is an array of shape[0] pointers, each to what the tensor holds of one expert */
  int32_t ndim;
  int64_t shape[6];
  moe_dtype elements;
  int64_t rows, row, step;
} moe_neuron_operand;

enum { MOE_NEURON_OPERANDS_MAX = 40 };
typedef struct moe_neuron_table {
  moe_neuron_operand operand[MOE_NEURON_OPERANDS_MAX];
  int32_t count;
} moe_neuron_table;

/* A field's name and the NEFF's for it; NULL: it is not bound. A name that occurs twice, as an input and as an output,
   is told apart by that. */
typedef struct moe_neuron_name {
  const char *field, *neff;
} moe_neuron_name;

/* The arithmetic that a kernel is taken to have, for bounds: relative errors of its steps. A zero field is the default.
   Products accumulate in binary32, in any order. */
typedef struct moe_neuron_arithmetic {
  double operand;    /* rounding of intermediates and of per-block sums; default: half a unit of the function's type */
  double activation; /* error of act(x) and act'(x), relative to |x| and absolute; default: as operand */
  int32_t roundings; /* how many roundings an intermediate takes; default: 4 */
  double confidence; /* c: roundings are taken as independent, and an element exceeds its bound with a chance of at most
                        2*exp(-c^2/2); default: 8, which makes 3e-14. 1e9: bounds that always hold, but are far wider */
} moe_neuron_arithmetic;

/* How to run. All of it may be zero. */
typedef struct moe_neuron_options {
  const moe_neuron_name *names;
  int32_t names_count;
  int weights_stay;   /* 1: weights that this model has been given stay on the device, and are not written again */
  int nki_down_scale; /* 1: the NEFF takes down's scales per column in the order of MOE_NKI_DOWN_SCALE */
  int32_t repeat;     /* executions, of which the last one's outputs are read; 0 = 1 */
  int32_t retries;    /* of an execution while the queue is full, a millisecond apart; 0 = 100, -1 = none */
  double *seconds;    /* output (optional): of one execution, transfers not included */
  moe_neuron_arithmetic arithmetic; /* of check and compare */
} moe_neuron_options;

/* Binds a table to a model: each tensor that the NEFF declares must be in the table, with its size and type, by its own
   name or that in options; where it has as many axes of more than 1, these must be the same: a weight in another order
   does not fit. Inputs are written, those that are absent or longer than the table's are zeroed. Sentences name the
   tensor and say what the NEFF declares. Nothing is written if anything does not fit.
   Errors: NULL_ARGUMENT (also an input that the NEFF wants), NO_RUNTIME (no model), INVALID_OPTION (a name or type),
   INVALID_SHAPE (a size or axis), OUT_OF_MEMORY (conversion needs ctx.allocate), libnrt's. */
MOE_API moe_status moe_neuron_bind(moe_context *ctx, moe_neuron_model *model, const moe_neuron_table *table,
                                   const moe_neuron_options *options);
/* Runs the model on what it has. Inputs that nobody has written are zeros. */
MOE_API moe_status moe_neuron_execute(moe_context *ctx, moe_neuron_model *model, const moe_neuron_options *options);
/* Reads the outputs of the table that have data. */
MOE_API moe_status moe_neuron_read(moe_context *ctx, const moe_neuron_model *model, const moe_neuron_table *table,
                                   const moe_neuron_options *options);
/* bind, execute, read. For operations of your own: fill in a table. */
MOE_API moe_status moe_neuron_run(moe_context *ctx, moe_neuron_model *model, const moe_neuron_table *table,
                                  const moe_neuron_options *options);

/* ----------------------------------------------------------------------------------------------------------- report */

typedef struct moe_neuron_error {
  const char *name;
  int64_t elements, over;  /* in all; not within their bounds */
  int64_t at;              /* the element whose error is the largest part of its bound; in a tensor without bounds the
                              largest */
  double device, cpu;      /* its values */
  double error, bound;     /* |device - cpu|, and the most that the arithmetic explains */
  double largest;          /* the largest error of all */
} moe_neuron_error;

enum { MOE_NEURON_ERRORS_MAX = 12 };
typedef struct moe_neuron_report {
  moe_neuron_error tensor[MOE_NEURON_ERRORS_MAX];
  int32_t count;
  int bounded; /* 0: the layer's backward with `mx`, for which no bound is known: largest errors only, and agree is 0 */
  int agree;   /* every element of every tensor is within its bound */
} moe_neuron_report;

/* The report as a table of lines, of at most `bytes` with the final 0. Returns how long all of it is, without that. */
MOE_API size_t moe_neuron_report_text(const moe_neuron_report *report, char *text, size_t bytes);

/* ------------------------------------------------------------------------------------------------------- operations */

/* Where moe_neuron_or_cpu_* ran, and why there. */
typedef struct moe_neuron_choice {
  int on_device;
  char why[256];
} moe_neuron_choice;

/* For every operation and element type, <op> being blockwise_mm_fwd_bf16 say:

   moe_neuron_describe_<op>   the table of a call. Options and shapes are checked as the CPU's function does, and that
                              ids are in range. Errors: that function's, and UNSUPPORTED for what a kernel cannot be
                              asked: packed weights, MX operands in no layout of Trainium's, some rows of the MLP
   moe_neuron_<op>            describe and run. Errors: those of both
   moe_neuron_or_cpu_<op>     that, or the CPU's function if model is NULL or not loaded, or the call does not fit it.
                              What fails as it executes is an error and not computed again. choice: output (optional)
   moe_neuron_compare_<op>    compares the outputs that `args` and `device_args` point to, element by element: args' are
                              the CPU's, device_args' from wherever it is; all else is read from args. What was
                              accumulated must have begun alike. Takes memory from ctx.allocate: 4 to 12 bytes for each
                              element that is compared or read, of the MLP 8 for each element of every operand.
                              Errors: as describe, OUT_OF_MEMORY, INVALID_OPTION (device_args lacks an output)
   moe_neuron_check_<op>      runs args on the CPU, device_args on the device, and compares; the two differ in where
                              outputs go. Errors: those of all three; with DEVICE_NUMERIC there is a report. One with
                              `agree` 0 is no error

   Bounds are those of two computations, either of which may sum in any order in binary32 and round as
   options.arithmetic says; every element's is derived from the terms that it is the sum of. What is given is rounded to
   MX alike by both; what was computed may be rounded to whatever its interval reaches, under either scale of its group.
   Of the layer's backward with `mx` no bound is known. */
#define MOE_NEURON_OP_LIST(X, name, NAME)                                    \
  X(blockwise_mm_fwd_##name, moe_blockwise_mm_fwd_args, FORWARD, NAME)       \
  X(blockwise_mm_bwd_##name, moe_blockwise_mm_bwd_args, BACKWARD, NAME)      \
  X(grouped_gemm_##name, moe_grouped_gemm_args, GROUPED, NAME)               \
  X(grouped_gemm_dx_##name, moe_grouped_gemm_args, GROUPED_DX, NAME)         \
  X(grouped_gemm_dw_##name, moe_grouped_gemm_args, GROUPED_DW, NAME)

/* The same of MXFP8 operands, whose types their arguments say. */
#define MOE_NEURON_MXFP8_OP_LIST(X)                              \
  X(matmul_mxfp8, moe_matmul_mxfp8_args, MATMUL, BF16)           \
  X(mlp_fwd_mxfp8, moe_mlp_fwd_mxfp8_args, MLP_FORWARD, BF16)    \
  X(mlp_bwd_mxfp8, moe_mlp_bwd_mxfp8_args, MLP_BACKWARD, BF16)

#define MOE_NEURON_DECLARE_OP_(op, args_type, kind, NAME)                                                              \
  MOE_API moe_status moe_neuron_describe_##op(moe_context *ctx, const args_type *args,                                 \
                                              const moe_neuron_options *options, moe_neuron_table *table);             \
  MOE_API moe_status moe_neuron_##op(moe_context *ctx, moe_neuron_model *model, const args_type *args,                 \
                                     const moe_neuron_options *options);                                               \
  MOE_API moe_status moe_neuron_or_cpu_##op(moe_context *ctx, moe_neuron_model *model, const args_type *args,          \
                                            const moe_neuron_options *options, moe_neuron_choice *choice);             \
  MOE_API moe_status moe_neuron_compare_##op(moe_context *ctx, const args_type *args, const args_type *device_args,    \
                                             const moe_neuron_options *options, moe_neuron_report *report);            \
  MOE_API moe_status moe_neuron_check_##op(moe_context *ctx, moe_neuron_model *model, const args_type *args,           \
                                           const args_type *device_args, const moe_neuron_options *options,            \
                                           moe_neuron_report *report);
#define MOE_NEURON_DECLARE_(name, type, NAME) MOE_NEURON_OP_LIST(MOE_NEURON_DECLARE_OP_, name, NAME)
MOE_DTYPE_LIST(MOE_NEURON_DECLARE_)
MOE_NEURON_MXFP8_OP_LIST(MOE_NEURON_DECLARE_OP_)
#undef MOE_NEURON_DECLARE_
#undef MOE_NEURON_DECLARE_OP_

#include "api/end.h"

#endif

#if (defined(MOE_IMPLEMENTATION) || defined(MOE_NEURON_IMPLEMENTATION)) && defined(__cplusplus)
#error "define MOE_NEURON_IMPLEMENTATION in a C file of its own and link it: moe_neuron.h is implemented in C11"
#elif (defined(MOE_IMPLEMENTATION) || defined(MOE_NEURON_IMPLEMENTATION)) && !defined(MOE_NEURON_IMPLEMENTATION_DONE_)
#define MOE_NEURON_IMPLEMENTATION_DONE_
#include "neuron/impl.h"
#endif
