// Second-order pooling of any order n between batched products (pool_parts.py); names as in pool.cu. IN is the type of C
// and G, EDGE the side of the transposed squares, MAX_THREADS the largest block size. Matrices are contiguous, with one
// eps each. The grid is one-dimensional, because the other grid dimensions are limited to 65535.

#include "pool_forms.cuh"

// The square that a block writes, of a matrix of order d.
struct Square {
    int row, column;
    long long matrix;
    __device__ explicit Square(int d) {
        const int edge = (d + EDGE - 1) / EDGE, number = blockIdx.x % (edge * edge);
        matrix = blockIdx.x / (edge * edge);
        row = number / edge * EDGE;
        column = number % edge * EDGE;
    }
};

// square[i][j] = x[row + i][column + j]
template <typename T>
__device__ __forceinline__ void load_square(REAL (*square)[EDGE + 1], const T* x, int row, int column, int d) {
    for (int e = threadIdx.x; e < EDGE * EDGE; e += blockDim.x) {
        const int i = e / EDGE, j = e % EDGE;
        if (row + i < d && column + j < d) square[i][j] = (REAL)x[(long long)(row + i) * d + column + j];
    }
    __syncthreads();
}

// s and weights (batch, n) from the rows of Y (batch, n, length), which are set to zero if s <= level times the largest
// eigenvalue; scaled = diag(weights) A. Entry k of row r of a matrix A is a[r * next + k * step]; scaled has the same
// layout. values has the largest eigenvalue last. A block processes `rows` rows of a matrix, each by whole warps.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    pool_rows(REAL* y, const REAL* a, REAL* __restrict__ scaled, const REAL* __restrict__ values,
              const REAL* __restrict__ all_eps, REAL* __restrict__ s, REAL* __restrict__ weights, double level, int rows,
              int n, int length, int d, int next, int step) {
    __shared__ REAL parts[MAX_THREADS / 32], factors[MAX_THREADS / 32];
    const int groups = (n + rows - 1) / rows, first = blockIdx.x % groups * rows;
    const int width = blockDim.x / rows, row = threadIdx.x / width, lane = threadIdx.x % width;
    const long long matrix = blockIdx.x / groups, number = matrix * n + first + row;
    const bool mine = first + row < n;
    REAL sum = 0;
#pragma unroll 4
    for (int k = lane; mine && k < length; k += width) sum += y[number * length + k] * y[number * length + k];
    for (int mask = 16; mask; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < width / 32; ++w) sum += parts[row * (width / 32) + w];
    const bool noise = sum <= (REAL)level * values[matrix * n + n - 1];  // false for NaN
    const REAL weight = form_weight(noise ? (REAL)0 : sum, all_eps[matrix]);
    for (int k = lane; mine && noise && k < length; k += width) y[number * length + k] = 0;
    if (lane == 0) {
        factors[row] = weight;
        if (mine) {
            s[number] = noise ? (REAL)0 : sum;
            weights[number] = weight;
        }
    }
    __syncthreads();
    a += matrix * n * d;
    scaled += matrix * n * d;
    for (int e = threadIdx.x; e < rows * d; e += blockDim.x) {  // along contiguous entries
        const int r = step == 1 ? e / d : e % rows, k = step == 1 ? e % d : e / rows;
        const long long at = (long long)(first + r) * next + (long long)k * step;
        if (first + r < n) scaled[at] = factors[r] * a[at];
    }
}

// C = rest I + product. Only the lower triangle of the product is read, because its rounding is not symmetric.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    pool_finish(const REAL* __restrict__ product, const REAL* __restrict__ all_eps, IN* __restrict__ c, int d) {
    __shared__ REAL square[EDGE][EDGE + 1];
    const Square at(d);
    const bool above = at.column > at.row;
    product += at.matrix * d * d;
    c += at.matrix * d * d;
    load_square(square, product, above ? at.column : at.row, above ? at.row : at.column, d);
    const REAL rest = form_rest(all_eps[at.matrix]);
    for (int e = threadIdx.x; e < EDGE * EDGE; e += blockDim.x) {
        const int i = e / EDGE, j = e % EDGE, row = at.row + i, column = at.column + j;
        const REAL value = column > row ? square[j][i] : square[i][j];
        if (row < d && column < d) c[(long long)row * d + column] = (IN)(value + (row == column ? rest : (REAL)0));
    }
}

// E = G + G^T
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    pool_symmetric(const IN* __restrict__ g, REAL* __restrict__ out, int d) {
    __shared__ REAL square[EDGE][EDGE + 1];
    const Square at(d);
    g += at.matrix * d * d;
    out += at.matrix * d * d;
    load_square(square, g, at.column, at.row, d);
    for (int e = threadIdx.x; e < EDGE * EDGE; e += blockDim.x) {
        const int i = e / EDGE, j = e % EDGE, row = at.row + i, column = at.column + j;
        const long long where = (long long)row * d + column;
        if (row < d && column < d) out[where] = (REAL)g[where] + square[j][i];
    }
}

// W (batch, n, n) becomes table o W, and in the thin form T (batch, n, d) diag(weights) T. One warp processes one of the `count` rows.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    pool_mix(REAL* __restrict__ w, REAL* __restrict__ t, const REAL* __restrict__ s, const REAL* __restrict__ weights,
             const REAL* __restrict__ all_eps, int count, int n, int d) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= count) return;
    const int matrix = row / n;
    const REAL eps = all_eps[matrix], s_i = s[row], weight = weights[row];
    const REAL* others = s + (long long)matrix * n;
    w += (long long)row * n;
    t += (long long)row * d;
    for (int j = lane; j < n; j += 32) w[j] *= form_table(s_i, others[j], eps);
    for (int k = lane; THIN && k < d; k += 32) t[k] *= weight;
}
