/* The implementation of moe_neuron.h in a file of its own. */
#define MOE_NEURON_IMPLEMENTATION
#include "moe/moe_neuron.h"
