// g and its first divided difference in closed form, for the kernels of second-order pooling. FUNCTION is LOG, SQRT, INV_SQRT or
// INVERSE, REAL is double. pool_thin.cu or pool_primal.cu follows and has form_weight, form_rest and form_table: see pool.cu.

__device__ __forceinline__ REAL function_value(REAL x) {
#if FUNCTION == LOG
    return log(x);
#elif FUNCTION == SQRT
    return sqrt(x);
#elif FUNCTION == INV_SQRT
    return 1 / sqrt(x);
#else
    return 1 / x;
#endif
}

// g[x, y] for x >= y > 0
__device__ __forceinline__ REAL first_difference(REAL x, REAL y) {
#if FUNCTION == LOG
    const REAL gap = x - y;
    return gap == 0 ? 1 / y : log1p(gap / y) / gap;
#elif FUNCTION == SQRT
    return 1 / (sqrt(x) + sqrt(y));
#elif FUNCTION == INV_SQRT
    const REAL a = sqrt(x), b = sqrt(y);
    return -1 / (a * b * (a + b));
#else
    return -1 / (x * y);
#endif
}
