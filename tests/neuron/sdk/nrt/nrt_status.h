#include "nrt.h"
