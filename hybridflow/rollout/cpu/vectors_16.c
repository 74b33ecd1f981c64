/* The innermost loops for any processor: SSE2, NEON. */

#define LANES 4
#define LEVEL vectors_16
#include "vectors.h"
