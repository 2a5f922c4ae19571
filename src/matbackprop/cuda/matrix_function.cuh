// g, its first divided difference at any two eigenvalues, and its domain, for the kernels of matrix functions. FUNCTION is
// EXP or one of pool_forms.cuh.

#include "pool_forms.cuh"

__device__ __forceinline__ REAL value_at(REAL x) {
#if FUNCTION == EXP
    return exp(x);
#else
    return function_value(x);
#endif
}

// g[x, y]
__device__ __forceinline__ REAL difference(REAL x, REAL y) {
    const REAL high = x < y ? y : x, low = x < y ? x : y;
#if FUNCTION == EXP
    const REAL gap = high - low;
    return gap == 0 ? exp(high) : exp(high) * (expm1(-gap) / -gap);
#else
    return first_difference(high, low);
#endif
}

// Eigenvalue x of n, where values up to `rounding` times the largest magnitude (of the first or the last eigenvalue) are
// rounding errors: EXP keeps x, functions that are undefined at zero return NaN, and SQRT replaces x by zero if it is
// negative or at most the rounding error 4 n eps of the decomposition.
__device__ __forceinline__ REAL rounded(REAL x, REAL first, REAL last, REAL rounding, int n) {
    const REAL size = fabs(first) > fabs(last) ? fabs(first) : fabs(last);
#if FUNCTION == SQRT
    return x >= -rounding * size && x <= (REAL)8.881784197001252e-16 * n * size ? (REAL)0 : x;
#elif FUNCTION == EXP
    return x;
#else
    return fabs(x) <= rounding * size ? (REAL)nan("") : x;
#endif
}
