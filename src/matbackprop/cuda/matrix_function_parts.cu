// Functions of symmetric matrices of any order n between batched products (matrix_function.py); names as in
// matrix_function.cu. GROUP is the number of columns of U that a block processes.

#include "matrix_function.cuh"
#include "pool_parts.cu"

// doubled (batch, n), the eigenvalues of A + A^T, ascending -> lambda (batch, n), scaled = U diag(g(lambda)). Entry (i, j) of a
// matrix U is u[i * next + j * step]; scaled has the same layout.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    function_columns(const REAL* __restrict__ doubled, const REAL* __restrict__ u, REAL* __restrict__ values,
                     REAL* __restrict__ scaled, double rounding, int n, int next, int step) {
    __shared__ REAL weights[GROUP];
    const int groups = (n + GROUP - 1) / GROUP, first = blockIdx.x % groups * GROUP;
    const long long matrix = blockIdx.x / groups;
    doubled += matrix * n;
    if (threadIdx.x < GROUP && first + threadIdx.x < n) {
        const int column = first + threadIdx.x;
        const REAL x = (REAL)0.5 * rounded(doubled[column], doubled[0], doubled[n - 1], (REAL)rounding);
        values[matrix * n + column] = x;
        weights[threadIdx.x] = value_at(x);
    }
    __syncthreads();
    u += matrix * n * n;
    scaled += matrix * n * n;
    for (int e = threadIdx.x; e < GROUP * n; e += blockDim.x) {  // along contiguous entries
        const int j = next == 1 ? e / n : e % GROUP, i = next == 1 ? e % n : e / GROUP;
        const long long at = (long long)i * next + (long long)(first + j) * step;
        if (first + j < n) scaled[at] = weights[j] * u[at];
    }
}

// W (batch, n, n) becomes g[lambda_i, lambda_j] o W / 2, because it is computed from G + G^T. One warp processes one of the `count` rows.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    function_table(REAL* __restrict__ w, const REAL* __restrict__ values, int count, int n) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= count) return;
    const REAL mine = values[row];
    values += (long long)(row / n) * n;
    w += (long long)row * n;
    for (int j = lane; j < n; j += 32) w[j] *= (REAL)0.5 * difference(mine, values[j]);
}
