/* What the stand-in's NEFF holds: a header as NEFFs have it, then, in place of the archive, an operation of moe.h, its
   arguments without pointers, and where each tensor's pointer belongs. */
#ifndef NEURON_NEFF_H
#define NEURON_NEFF_H

#include "moe/moe_neuron.h"

enum { STANDIN_TENSORS = 24, STANDIN_ARGS = 1024 };

typedef enum standin_op {
  STANDIN_FWD, STANDIN_BWD, STANDIN_GROUPED, STANDIN_GROUPED_DX, STANDIN_GROUPED_DW
} standin_op;

/* In which struct the pointer is. */
typedef enum standin_place { STANDIN_IN_ARGS, STANDIN_IN_GATE_UP, STANDIN_IN_DOWN } standin_place;

typedef struct standin_tensor {
  char name[64];
  uint32_t usage, dtype, ndim, shape[6];
  uint64_t size;
  uint32_t place, offset;
  uint32_t order; /* moe_neuron_order */
} standin_tensor;

typedef struct standin_kernel {
  uint32_t op, dtype, count;
  uint32_t quantized_gate_up_offset, quantized_down_offset; /* of the pointers to these in args; 0: none */
  moe_quantized_weight gate_up, down;
  uint8_t args[STANDIN_ARGS];
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
