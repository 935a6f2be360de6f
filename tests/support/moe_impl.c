/* The one translation unit of every test program that holds the implementation. */
#define MOE_IMPLEMENTATION
#include "moe.h"
