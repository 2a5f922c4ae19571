// g(A) of symmetric matrices of order n <= 64, and its gradient. IN is the type of A, g(A) and their gradients (float or
// double), FUNCTION is EXP or one of pool_forms.cuh.
//
//   (A + A^T)/2 = U diag(lambda) U^T,  g(A) = U diag(g(lambda)) U^T
//   dL/dA = U (g[lambda_i, lambda_j] o (U^T S U)) U^T,  S = (G + G^T)/2
//
// One block per matrix.

#include "jacobi.cuh"
#include "pool_forms.cuh"
#include "product.cuh"

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

__device__ __forceinline__ REAL symmetric_part(const IN* x, int i, int j, int n) {
    return (REAL)0.5 * ((REAL)x[i * n + j] + (REAL)x[j * n + i]);
}

// A (batch, n, n) -> g(A), bitwise symmetric, lambda (batch, n) and U (batch, n, n), eigenvectors in columns.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    function_forward(const IN* __restrict__ in, IN* __restrict__ out, REAL* __restrict__ out_values,
                     REAL* __restrict__ out_vectors, double rounding, int n) {
    const Sizes z(n);
    Rotation* rotations = (Rotation*)shared_memory;
    REAL* weights = (REAL*)shared_memory;  // g(lambda) in the column order of v, after the rotations
    REAL* a = weights + z.rotations;
    REAL* v = a + z.players * z.ld;
    REAL* values = v + (n * z.ldv > blockDim.x ? n * z.ldv : blockDim.x);
    int* order = (int*)(values + z.players);
    const long long matrix = (long long)blockIdx.x * n * n;
    in += matrix;
    out += matrix;
    out_vectors += matrix;
    for (int e = threadIdx.x; e < z.players * z.ld; e += blockDim.x) {
        const int i = e / z.ld, j = e % z.ld;
        a[e] = i < n && j < n ? symmetric_part(in, i, j, n) : (REAL)0;
    }
    __syncthreads();
    jacobi(a, v, rotations, values, order, n, z);
    if (threadIdx.x < n) {
        const REAL x = rounded(values[threadIdx.x], values[0], values[n - 1], (REAL)rounding, n);
        out_values[(long long)blockIdx.x * n + threadIdx.x] = x;
        weights[order[threadIdx.x]] = value_at(x);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < n * n; e += blockDim.x) {
        const int i = e / n, j = e % n;
        out_vectors[e] = v[i * z.ldv + order[j]];
        a[i * z.ld + j] = weights[j] * v[i * z.ldv + j];
    }
    __syncthreads();
    for (int e = threadIdx.x; e < n * n; e += blockDim.x) {
        const int i = e / n, j = e % n;
        if (j > i) continue;
        REAL sum = 0;
#pragma unroll 4
        for (int k = 0; k < n; ++k) sum += v[i * z.ldv + k] * a[j * z.ld + k];
        out[i * n + j] = (IN)sum;
        out[j * n + i] = (IN)sum;
    }
}

// out = left^T right for operands of `rows` rows of LDT entries each. out may alias an operand.
__device__ void multiply(const REAL* left, const REAL* right, REAL* out, int rows) {
    ProductTile tile;
    __syncthreads();
    for (int k = 0; k < rows && ProductTile::row() < rows; k += DEPTH) tile.add(left + k * LDT, right + k * LDT);
    __syncthreads();
    tile.each([&](int i, int j, REAL value) {
        if (i < rows) out[i * LDT + j] = value;
    });
}

// G (batch, n, n), lambda and U -> dL/dA, bitwise symmetric. Shared memory: two matrices with rows of LDT entries.
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
    function_backward(const IN* __restrict__ g, const REAL* __restrict__ values, const REAL* __restrict__ vectors,
                      IN* __restrict__ out, int n) {
    const int rows = (n + DEPTH - 1) / DEPTH * DEPTH;
    REAL* u = (REAL*)shared_memory;
    REAL* x = u + rows * LDT;
    const long long matrix = (long long)blockIdx.x * n * n;
    g += matrix;
    vectors += matrix;
    out += matrix;
    values += (long long)blockIdx.x * n;
    for (int e = threadIdx.x; e < rows * TILE; e += PRODUCT_THREADS) {
        const int i = e / TILE, j = e % TILE, where = i * LDT + j;
        const bool inside = i < n && j < n;
        u[where] = inside ? vectors[i * n + j] : (REAL)0;
        x[where] = inside ? symmetric_part(g, i, j, n) : (REAL)0;
    }
    multiply(x, u, x, rows);  // S U, since S is symmetric
    multiply(u, x, x, rows);  // U^T S U
    __syncthreads();
    for (int e = threadIdx.x; e < n * n; e += PRODUCT_THREADS) {
        const int i = e / n, j = e % n;
        x[i * LDT + j] *= difference(values[i], values[j]);
        if (j < i) {
            const REAL old = u[i * LDT + j];
            u[i * LDT + j] = u[j * LDT + i];
            u[j * LDT + i] = old;
        }
    }
    multiply(x, u, x, rows);  // u holds U^T here, and x is symmetric up to rounding
    multiply(u, x, x, rows);
    __syncthreads();
    for (int e = threadIdx.x; e < n * n; e += PRODUCT_THREADS) {
        const int i = e / n, j = e % n;
        out[e] = (IN)(j > i ? x[j * LDT + i] : x[i * LDT + j]);
    }
}
