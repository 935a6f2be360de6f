/* What the stand-in's NEFF holds: a header as NEFFs have it, then, in place of the archive, an operation of moe.h, its
   arguments without pointers, and where each tensor's pointer belongs. */
#ifndef NEURON_NEFF_H
#define NEURON_NEFF_H

#include "moe/moe_neuron.h"

enum { STANDIN_TENSORS = 48, STANDIN_ARGS = 2048, STANDIN_NESTED = 4 };

typedef enum standin_op {
  STANDIN_FORWARD, STANDIN_BACKWARD, STANDIN_GROUPED, STANDIN_GROUPED_DX, STANDIN_GROUPED_DW, STANDIN_MATMUL,
  STANDIN_MLP_FORWARD, STANDIN_MLP_BACKWARD
} standin_op;

typedef struct standin_tensor {
  char name[64];
  uint32_t usage, dtype, ndim, shape[6];
  uint64_t size;
  uint32_t nested, offset; /* where the pointer is: 0 = in args, n = in the n-th nested struct. An input and an output
                              at one place are what is added to, and where that goes */
  uint32_t order;          /* moe_neuron_order */
} standin_tensor;

/* A struct that args have a pointer to, such as a moe_quantized_weight. */
typedef struct standin_nested {
  uint32_t pointer; /* where that is in args; 0: there is none */
  _Alignas(16) uint8_t bytes[128];
} standin_nested;

typedef struct standin_kernel {
  uint32_t op, dtype, count;
  standin_nested nested[STANDIN_NESTED];
  _Alignas(16) uint8_t args[STANDIN_ARGS];
  standin_tensor tensor[STANDIN_TENSORS];
} standin_kernel;

typedef struct standin_neff {
  moe_neff_header header;
  standin_kernel kernel;
} standin_neff;

/* How the tests steer the stand-in; it exports these under the same names. */
typedef struct standin_control {
  void (*fail_at)(const char *function, int after, int status); /* the call after `after` more of them; NULL: none */
  int (*failed)(void);                                       /* whether that has come */
  int (*live)(void);                                         /* models, tensors, sets, infos that are not given back */
  int (*violations)(void);                                   /* uses that libnrt does not allow; each is printed */
  int (*calls)(const char *function);
  void (*reset)(void);                                       /* as if the process had begun anew */
} standin_control;

#endif
