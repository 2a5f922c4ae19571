// g and its divided differences in closed form, and the two forms of second-order pooling, which pool.cu describes.
// FUNCTION is LOG, SQRT, INV_SQRT or INVERSE, REAL is double, THIN chooses the form.

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

#if THIN

// The thin dual form, n = m < d: X = F and A = Y.
//
//   C = g(eps) I + Y^T diag(g[lambda_i, eps]) Y
//   dL/dF = 2 U (diag(g[lambda_i, eps]) Y G + (g[lambda_i, lambda_j, eps] o (Y G Y^T)) Y),  G symmetric

#define SERIES 26  // terms of the second difference of log: 0.2^SERIES is below eps

// g[x, y, z] for x, y >= z > 0
__device__ __forceinline__ REAL second_difference(REAL x, REAL y, REAL z) {
    if (x < y) {
        const REAL swap = x;
        x = y;
        y = swap;
    }
#if FUNCTION == LOG
    if (x > (REAL)1.5 * z) return (first_difference(x, y) - first_difference(y, z)) / (x - z);
    const REAL center = (REAL)0.5 * (x + z);
    const REAL u = (x - center) / center, v = (y - center) / center, w = (z - center) / center;
    REAL one = 1, two = 1, three = 1, sign = -1, sum = (REAL)-0.5;  // complete homogeneous polynomials of u; u, v; u, v, w
    for (int j = 1; j < SERIES; ++j) {
        one *= u;
        two = two * v + one;
        three = three * w + two;
        sign = -sign;
        sum += sign * three / (j + 2);
    }
    return sum / (center * center);
#elif FUNCTION == SQRT
    const REAL a = sqrt(x), b = sqrt(y), c = sqrt(z);
    return -1 / ((a + b) * (b + c) * (a + c));
#elif FUNCTION == INV_SQRT
    const REAL a = sqrt(x), b = sqrt(y), c = sqrt(z);
    return (a + b + c) / (a * b * c * (a + b) * (b + c) * (a + c));
#else
    return 1 / (x * y * z);
#endif
}

// For a zero singular value the row of Y is zero, and at eps = 0 the differences are infinite.
__device__ __forceinline__ REAL form_weight(REAL s, REAL eps) { return s == 0 ? (REAL)0 : first_difference(s + eps, eps); }

__device__ __forceinline__ REAL form_rest(REAL eps) { return function_value(eps); }

__device__ __forceinline__ REAL form_table(REAL s_i, REAL s_j, REAL eps) {
    return s_i == 0 || s_j == 0 ? (REAL)0 : second_difference(s_i + eps, s_j + eps, eps);
}

#else

// The primal form, n = d <= m: X = F^T, A = Q^T = V^T.
//
//   C = V diag(g(lambda)) V^T
//   dL/dF = 2 Y^T (g[lambda_i, lambda_j] o (V^T G V)) V^T,  G symmetric

__device__ __forceinline__ REAL form_weight(REAL s, REAL eps) { return function_value(s + eps); }

__device__ __forceinline__ REAL form_rest(REAL eps) { return 0; }

// For a zero singular value the row of Y is zero, and at eps = 0 the differences are infinite.
__device__ __forceinline__ REAL form_table(REAL s_i, REAL s_j, REAL eps) {
    if (s_i == 0) return 0;
    return s_i < s_j ? first_difference(s_j + eps, s_i + eps) : first_difference(s_i + eps, s_j + eps);
}

#endif
