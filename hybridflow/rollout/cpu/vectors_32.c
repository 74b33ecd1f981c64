/* The innermost loops for AVX2. */

#include "kernels.h"

#ifdef HAS_LEVELS
#pragma GCC target("avx2,fma,bmi,bmi2")
#define LANES 8
#define LEVEL vectors_32
#include "vectors.h"
#endif
