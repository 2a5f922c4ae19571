// Functions of symmetric matrices of any order n between batched products (matrix_function.py); names as in
// matrix_function.cu. IN is the type of A, g(A) and their gradients, GROUP the number of columns of U that a block processes,
// EDGE the side of a transposed square, MAX_THREADS the largest block size. The grid is one-dimensional, because the other
// grid dimensions are limited to 65535.

#include "matrix_function.cuh"

// The square that a block writes, of a matrix of order n.
struct Square {
    int row, column;
    long long matrix;
    __device__ explicit Square(int n) {
        const int edge = (n + EDGE - 1) / EDGE, number = blockIdx.x % (edge * edge);
        matrix = blockIdx.x / (edge * edge);
        row = number / edge * EDGE;
        column = number % edge * EDGE;
    }
};

// square[i][j] = x[row + i][column + j]
template <typename T>
__device__ __forceinline__ void load_square(REAL (*square)[EDGE + 1], const T* x, int row, int column, int n) {
    for (int e = threadIdx.x; e < EDGE * EDGE; e += blockDim.x) {
        const int i = e / EDGE, j = e % EDGE;
        if (row + i < n && column + j < n) square[i][j] = (REAL)x[(long long)(row + i) * n + column + j];
    }
    __syncthreads();
}

// out = X + X^T
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    function_symmetric(const IN* __restrict__ x, REAL* __restrict__ out, int n) {
    __shared__ REAL square[EDGE][EDGE + 1];
    const Square at(n);
    x += at.matrix * n * n;
    out += at.matrix * n * n;
    load_square(square, x, at.column, at.row, n);
    for (int e = threadIdx.x; e < EDGE * EDGE; e += blockDim.x) {
        const int i = e / EDGE, j = e % EDGE, row = at.row + i, column = at.column + j;
        const long long where = (long long)row * n + column;
        if (row < n && column < n) out[where] = (REAL)x[where] + square[j][i];
    }
}

// The lower triangle of a product, mirrored, because its rounding is not symmetric.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    function_mirror(const REAL* __restrict__ product, IN* __restrict__ out, int n) {
    __shared__ REAL square[EDGE][EDGE + 1];
    const Square at(n);
    const bool above = at.column > at.row;
    product += at.matrix * n * n;
    out += at.matrix * n * n;
    load_square(square, product, above ? at.column : at.row, above ? at.row : at.column, n);
    for (int e = threadIdx.x; e < EDGE * EDGE; e += blockDim.x) {
        const int i = e / EDGE, j = e % EDGE, row = at.row + i, column = at.column + j;
        if (row < n && column < n) out[(long long)row * n + column] = (IN)(column > row ? square[j][i] : square[i][j]);
    }
}

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
        const REAL x = (REAL)0.5 * rounded(doubled[column], doubled[0], doubled[n - 1], (REAL)rounding, n);
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
