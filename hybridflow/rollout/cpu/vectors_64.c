/* The innermost loops for AVX-512. */

#include "kernels.h"

#ifdef HAS_LEVELS
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi,bmi2")
#define LANES 16
#define LEVEL vectors_64
#include "vectors.h"
#endif
