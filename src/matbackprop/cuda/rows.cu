// Matrices of at most 64 rows and any number of columns, CHUNK columns at a time in shared memory. Appended to jacobi.cu,
// whose eigenvectors turn the rows.

// Entry j of row i is x[i * next + j * step]; a row has `length` entries.
template <typename T>
struct Rows {
    const T* x;
    int length, next, step;
    __device__ __forceinline__ REAL operator()(int i, int j) const {
        return (REAL)x[(long long)i * next + (long long)j * step];
    }
};

// tile[c][i] = factor x(i, start + c); rows up to ldt and columns past the last are zero.
template <typename T>
__device__ __forceinline__ void load_columns(REAL* tile, const Rows<T>& x, REAL factor, int start, int rows, int ldt) {
    for (int e = threadIdx.x; e < CHUNK * ldt; e += blockDim.x) {
        const int c = e % CHUNK, i = e / CHUNK;
        tile[c * ldt + i] = (i < rows && start + c < x.length) ? factor * x(i, start + c) : (REAL)0;
    }
}

// Both triangles of (factor X) (factor X)^T for m rows, in 2x2 blocks; tile has room for CHUNK columns of players + 2.
template <typename T>
__device__ void gram(const Rows<T>& x, REAL factor, REAL* tile, REAL* out, int m, const Sizes& z) {
    const int ldt = z.players + 2, blocks = z.half * (z.half + 1) / 2;
    for (int first = 0; first < blocks; first += blockDim.x) {
        const int item = first + threadIdx.x;
        int i = item / (z.half + 1), j = item % (z.half + 1);
        if (j >= z.half - i) {
            j -= z.half - i;
            i = z.half - 1 - i;
        }
        j += i;
        REAL s00 = 0, s01 = 0, s10 = 0, s11 = 0;
        for (int start = 0; start < x.length; start += CHUNK) {
            __syncthreads();
            load_columns(tile, x, factor, start, m, ldt);
            __syncthreads();
            const int columns = x.length - start < CHUNK ? x.length - start : CHUNK;
            if (item < blocks) {
#pragma unroll 4
                for (int c = 0; c < columns; ++c) {
                    const REAL x0 = tile[c * ldt + 2 * i], x1 = tile[c * ldt + 2 * i + 1];
                    const REAL y0 = tile[c * ldt + 2 * j], y1 = tile[c * ldt + 2 * j + 1];
                    s00 += x0 * y0;
                    s01 += x0 * y1;
                    s10 += x1 * y0;
                    s11 += x1 * y1;
                }
            }
        }
        if (item < blocks) {
            if (i == j) s10 = s01;
            out[2 * i * z.ld + 2 * j] = out[2 * j * z.ld + 2 * i] = s00;
            out[2 * i * z.ld + 2 * j + 1] = out[(2 * j + 1) * z.ld + 2 * i] = s01;
            out[(2 * i + 1) * z.ld + 2 * j] = out[2 * j * z.ld + 2 * i + 1] = s10;
            out[(2 * i + 1) * z.ld + 2 * j + 1] = out[(2 * j + 1) * z.ld + 2 * i + 1] = s11;
        }
    }
    __syncthreads();
}

// Four rows and two columns of a product with a tile, for a warp: sum[q][h] += sum_i left_q[i * step] tile[column h][i].
__device__ __forceinline__ void multiply_rows(REAL (&sum)[4][2], const REAL* const (&left)[4], int step, const REAL* tile,
                                              int ldt, int rows) {
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < rows; ++i) {
        const REAL near = tile[lane * ldt + i], far = tile[(lane + 32) * ldt + i];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            sum[q][0] += left[q][i * step] * near;
            sum[q][1] += left[q][i * step] * far;
        }
    }
}

// y = V^T (factor X), the columns of v taken in `order`; y has m rows, one after the other.
template <typename T>
__device__ void project(const Rows<T>& x, REAL factor, REAL* tile, const REAL* v, const int* order, REAL* y, int m,
                        const Sizes& z) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, ldt = z.players + 2;
    for (int start = 0; start < x.length; start += CHUNK) {
        __syncthreads();
        load_columns(tile, x, factor, start, m, ldt);
        __syncthreads();
        for (int r = 4 * warp; r < m; r += 4 * warps) {
            const REAL* columns[4];
            REAL sum[4][2] = {{0, 0}, {0, 0}, {0, 0}, {0, 0}};
#pragma unroll
            for (int q = 0; q < 4; ++q) columns[q] = v + order[r + q < m ? r + q : m - 1];
            multiply_rows(sum, columns, z.ldv, tile, ldt, m);
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                if (r + q < m) {
                    REAL* row = y + (long long)(r + q) * x.length + start + lane;
                    if (start + lane < x.length) row[0] = sum[q][0];
                    if (start + lane + 32 < x.length) row[32] = sum[q][1];
                }
            }
        }
    }
    __syncthreads();
}

// Squared norms of the rows of y (m, d), which are known to rounding of themselves, not of the largest. scratch:
// blockDim.x numbers of shared memory.
__device__ void squared_norms(const REAL* y, REAL* values, int m, int d, REAL* scratch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int first = 0; first < m; first += warps) {
        const int r = first + warp;
        REAL part = 0;
        __syncthreads();
        for (int k = lane; r < m && k < d; k += 32) part += y[(long long)r * d + k] * y[(long long)r * d + k];
        scratch[threadIdx.x] = part;
        __syncthreads();
        if (lane == 0 && r < m) {
            for (int k = 1; k < 32; ++k) part += scratch[threadIdx.x + k];
            values[r] = part;
        }
    }
    __syncthreads();
}
