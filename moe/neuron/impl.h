/* The implementation of moe_neuron.h, in order. It calls the public functions of moe.h; else it needs of it nothing but
   checked sizes. */
#ifndef MOE_NEURON_IMPL_H
#define MOE_NEURON_IMPL_H

#include "../api/begin.h"

#include <dlfcn.h>
#include <math.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../base/target.h"
#include "../base/size.h"

#include "error.h"
#include "runtime.h"
#include "tensor.h"
#include "model.h"
#include "bind.h"
#include "operands.h"
#include "describe.h"
#include "bound.h"
#include "bound_mx.h"
#include "inputs.h"
#include "bound_unit.h"
#include "bound_layer.h"
#include "bound_grouped.h"
#include "bound_mlp.h"
#include "report.h"
#include "ops.h"

#include "../api/end.h"

#endif
