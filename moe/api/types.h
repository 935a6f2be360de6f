/* Status codes, element types, and what stands before every public function. */
#ifndef MOE_API_TYPES_H
#define MOE_API_TYPES_H

#include <stddef.h>
#include <stdint.h>

#include "begin.h"

/* ------------------------------------------------------------------------------------------------ what is exported */

/* MOE_API stands before every public prototype. At most one of these may be defined before moe.h is first included, and
   it must be the same in every file of a program:
     MOE_STATIC   every function is static: for a single C file, which also defines MOE_IMPLEMENTATION
     MOE_SHARED   every function is exported from a shared library, also under -fvisibility=hidden. On Windows the file
                  with MOE_IMPLEMENTATION exports them from its DLL and all others import them
     MOE_API      whatever should stand there */
#ifndef MOE_API
#if defined(MOE_STATIC)
#define MOE_API static __attribute__((unused))
#elif defined(MOE_SHARED) && (defined(_WIN32) || defined(__CYGWIN__)) && defined(MOE_IMPLEMENTATION)
#define MOE_API __declspec(dllexport)
#elif defined(MOE_SHARED) && (defined(_WIN32) || defined(__CYGWIN__))
#define MOE_API __declspec(dllimport)
#elif defined(MOE_SHARED)
#define MOE_API __attribute__((visibility("default")))
#else
#define MOE_API
#endif
#endif

/* ---------------------------------------------------------------------------------------------------------- status */

/* X(NAME, what it means). This list makes the enum, the names and the tests. */
#define MOE_STATUS_LIST(X)                                                                     \
  X(OK, "no error")                                                                            \
  X(ERROR_NULL_ARGUMENT, "a required pointer is NULL")                                         \
  X(ERROR_INVALID_SHAPE, "a size is negative, zero where it may not be, or inconsistent")      \
  X(ERROR_INVALID_OPTION, "an enum, flag or number is outside its range")                      \
  X(ERROR_INVALID_INDEX, "a token or expert id is out of range")                               \
  X(ERROR_OVERFLOW, "a tensor of this shape cannot be addressed")                              \
  X(ERROR_MISALIGNED, "a pointer is not aligned to its element")                               \
  X(ERROR_OVERLAP, "an output overlaps another tensor")                                        \
  X(ERROR_WORKSPACE, "the workspace is missing or too small")                                  \
  X(ERROR_OUT_OF_MEMORY, "the context's allocator returned NULL")                              \
  X(ERROR_UNSUPPORTED, "this combination is not available")                                    \
  X(ERROR_DEVICE_LIMIT, "the spec's device limits, which the caller asked to check, are exceeded") \
  /* of moe_neuron.h */                                                                        \
  X(ERROR_NO_RUNTIME, "there is no Neuron runtime on this machine, or it lacks a function")    \
  X(ERROR_DEVICE_RESOURCE, "the device's memory or cores are used up")                         \
  X(ERROR_DEVICE_BUSY, "the device is busy: try again")                                        \
  X(ERROR_DEVICE_TIMEOUT, "the device did not answer in time")                                 \
  X(ERROR_DEVICE_OUT_OF_BOUNDS, "the kernel was given an id that is out of range")             \
  X(ERROR_DEVICE_NUMERIC, "outputs are there, but the kernel computed a NaN")                  \
  X(ERROR_DEVICE_FAILED, "the runtime or the device reports a failure")                        \
  X(ERROR_DEVICE_LOST, "the device cannot recover: restart the process")

typedef enum moe_status {
#define MOE_STATUS_ENUM_(name, text) MOE_##name,
  MOE_STATUS_LIST(MOE_STATUS_ENUM_)
#undef MOE_STATUS_ENUM_
} moe_status;

/* The name of a status, "MOE_ERROR_OVERLAP" say, and what the list says that it means. Neither is ever NULL: they are
   "unknown status" for any other value. */
MOE_API const char *moe_status_str(moe_status status);
MOE_API const char *moe_status_text(moe_status status);

/* --------------------------------------------------------------------------------------------------- element types */

typedef uint16_t moe_bf16; /* bfloat16: the upper 16 bits of a binary32 */
typedef uint16_t moe_fp16; /* IEEE binary16 */

/* X(suffix, storage type in C, ENUMERATOR): the element types of activations, weights and gradients. */
#define MOE_DTYPE_LIST(X)  \
  X(f32, float, F32)       \
  X(bf16, moe_bf16, BF16)  \
  X(fp16, moe_fp16, FP16)

typedef enum moe_dtype {
  MOE_DTYPE_DEFAULT = 0, /* float for affinities and their gradients, and in functions without a suffix; for any other
                            tensor the function's suffix */
#define MOE_DTYPE_ENUM_(name, type, NAME) MOE_DTYPE_##NAME,
  MOE_DTYPE_LIST(MOE_DTYPE_ENUM_)
#undef MOE_DTYPE_ENUM_
} moe_dtype;

/* Bytes of an element; 0 for MOE_DTYPE_DEFAULT and any unknown value. */
MOE_API size_t moe_dtype_size(moe_dtype dtype);

/* --------------------------------------------------------------------------------------------------- accumulating */

/* The bits of every field named `accumulate`: outputs that the result is added to. All others are overwritten. A bit
   that names no output of the function is an INVALID_OPTION. */
enum {
  MOE_ACCUMULATE_HIDDEN_STATES_GRAD = 1,
  MOE_ACCUMULATE_AFFINITIES_GRAD = 2,
  MOE_ACCUMULATE_GATE_UP_WEIGHT_GRAD = 4,
  MOE_ACCUMULATE_DOWN_WEIGHT_GRAD = 8,
  MOE_ACCUMULATE_GATE_UP_BIAS_GRAD = 16,
  MOE_ACCUMULATE_DOWN_BIAS_GRAD = 32,
  MOE_ACCUMULATE_ROUTER_LOGITS_GRAD = 64,
  MOE_ACCUMULATE_ROUTER_WEIGHT_GRAD = 128,
  MOE_ACCUMULATE_ROUTER_BIAS_GRAD = 256,
  MOE_ACCUMULATE_OUTPUT = 512, /* of the layer's forward */
  MOE_ACCUMULATE_DW = 1024,    /* of grouped GEMM, as are the next */
  MOE_ACCUMULATE_Y = 2048,
  MOE_ACCUMULATE_DX = 4096,
  MOE_ACCUMULATE_BIAS_GRAD = 8192,
  MOE_ACCUMULATE_TOPK_WEIGHTS_GRAD = 16384
};

#include "end.h"

#endif
