// The primal form, n = d <= m: X = F^T, A = Q^T = V^T. Appended to pool_function.cu.
//
//   C = V diag(g(lambda)) V^T
//   dL/dF = 2 Y^T (g[lambda_i, lambda_j] o (V^T G V)) V^T,  G symmetric

__device__ __forceinline__ REAL form_weight(REAL s, REAL eps) { return function_value(s + eps); }

__device__ __forceinline__ REAL form_rest(REAL eps) { return 0; }

// A direction that F does not have has a row of zeros in Y, and at eps = 0 no difference that is finite.
__device__ __forceinline__ REAL form_table(REAL s_i, REAL s_j, REAL eps) {
    if (s_i == 0) return 0;
    return s_i < s_j ? first_difference(s_j + eps, s_i + eps) : first_difference(s_i + eps, s_j + eps);
}
