// Matrices of at most 64 rows and any number of columns, CHUNK columns at a time in shared memory.

#include "jacobi.cuh"

// Entry j of row i is x[i * next + j * step]; a row has `length` entries.
template <typename T>
struct Rows {
    const T* x;
    int length, next, step;
    __device__ __forceinline__ REAL operator()(int i, int j) const {
        return (REAL)x[(long long)i * next + (long long)j * step];
    }
};

// tile[c][i] = factor x(i, start + c); rows up to ldt and columns past the last are zero. Threads run along
// contiguous entries.
template <typename T>
__device__ __forceinline__ void load_columns(REAL* tile, const Rows<T>& x, REAL factor, int start, int rows, int ldt) {
    for (int e = threadIdx.x; e < CHUNK * ldt; e += blockDim.x) {
        const int c = x.step == 1 ? e % CHUNK : e / ldt, i = x.step == 1 ? e / CHUNK : e % ldt;
        tile[c * ldt + i] = (i < rows && start + c < x.length) ? factor * x(i, start + c) : (REAL)0;
    }
}

// Distributes the 2x2 blocks of a product, and the columns it sums over, to the threads of a block: thread t processes
// block `item` + `first` and every `stride`-th column from `group` on, in passes of `width` blocks.
struct Split {
    int width, stride, item, group;
    __device__ explicit Split(int blocks) {
        width = blocks < blockDim.x ? blocks : blockDim.x;
        stride = blockDim.x / width;
        item = threadIdx.x % width;
        group = threadIdx.x / width;
    }
};

// Add the outer product of two adjacent entries of x and two of y, for the thread's columns of two tiles.
__device__ __forceinline__ void add_products(REAL (&sum)[4], const REAL* x, const REAL* y, int ldt, int columns,
                                             const Split& split) {
#pragma unroll 4
    for (int c = split.group; c < columns; c += split.stride) {
        const REAL x0 = x[c * ldt], x1 = x[c * ldt + 1], y0 = y[c * ldt], y1 = y[c * ldt + 1];
        sum[0] += x0 * y0;
        sum[1] += x0 * y1;
        sum[2] += x1 * y0;
        sum[3] += x1 * y1;
    }
}

// Sums of the groups, in the threads of the first. scratch: 4 blockDim.x numbers, used if there are several groups.
__device__ __forceinline__ void add_groups(REAL (&sum)[4], REAL* scratch, const Split& split) {
    if (split.stride == 1) return;
    __syncthreads();
    for (int h = 0; h < 4; ++h) scratch[h * blockDim.x + threadIdx.x] = sum[h];
    __syncthreads();
    for (int g = 1; split.group == 0 && g < split.stride; ++g) {
        for (int h = 0; h < 4; ++h) sum[h] += scratch[h * blockDim.x + threadIdx.x + g * split.width];
    }
}

// Both triangles of (factor X) (factor X)^T for m rows, in 2x2 blocks; tile holds CHUNK columns of players + 2 numbers,
// which is more than 4 blockDim.x if there are fewer blocks than threads.
template <typename T>
__device__ void gram(const Rows<T>& x, REAL factor, REAL* tile, REAL* out, int m, const Sizes& z) {
    const int ldt = z.players + 2, blocks = z.half * (z.half + 1) / 2;
    const Split split(blocks);
    for (int first = 0; first < blocks; first += split.width) {
        const int item = first + split.item;
        int i = item / (z.half + 1), j = item % (z.half + 1);
        if (j >= z.half - i) {
            j -= z.half - i;
            i = z.half - 1 - i;
        }
        j += i;
        REAL sum[4] = {0, 0, 0, 0};
        for (int start = 0; start < x.length; start += CHUNK) {
            __syncthreads();
            load_columns(tile, x, factor, start, m, ldt);
            __syncthreads();
            const int columns = x.length - start < CHUNK ? x.length - start : CHUNK;
            if (item < blocks) add_products(sum, tile + 2 * i, tile + 2 * j, ldt, columns, split);
        }
        add_groups(sum, tile, split);
        if (item < blocks && split.group == 0) {
            if (i == j) sum[2] = sum[1];
            out[2 * i * z.ld + 2 * j] = out[2 * j * z.ld + 2 * i] = sum[0];
            out[2 * i * z.ld + 2 * j + 1] = out[(2 * j + 1) * z.ld + 2 * i] = sum[1];
            out[(2 * i + 1) * z.ld + 2 * j] = out[2 * j * z.ld + 2 * i + 1] = sum[2];
            out[(2 * i + 1) * z.ld + 2 * j + 1] = out[(2 * j + 1) * z.ld + 2 * i + 1] = sum[3];
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
        UNROLL for (int q = 0; q < 4; ++q) {
            sum[q][0] += left[q][i * step] * near;
            sum[q][1] += left[q][i * step] * far;
        }
    }
}

// y = V^T (factor X), the columns of v in the order of `order`; y has m contiguous rows.
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
            UNROLL for (int q = 0; q < 4; ++q) columns[q] = v + order[r + q < m ? r + q : m - 1];
            multiply_rows(sum, columns, z.ldv, tile, ldt, m);
            UNROLL for (int q = 0; q < 4; ++q) {
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

// Squared norms of the rows of y (m, d), each accurate relative to itself, not to the largest. scratch:
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

// The largest and the smallest of n numbers.
struct Extremes {
    REAL largest, smallest;
    __device__ Extremes(const REAL* values, int n) : largest(0), smallest((REAL)REAL_MAX) {
        for (int r = 0; r < n; ++r) {
            largest = values[r] > largest ? values[r] : largest;
            smallest = values[r] < smallest ? values[r] : smallest;
        }
    }
};

// Shared memory for a Gram matrix a of order n with rotations before it, which share their place with a tile, its
// eigenvectors v, which share theirs with another tile, and its eigenvalues with their order.
struct GramMemory {
    REAL *tile, *a, *v, *values;
    int* order;
    __device__ GramMemory(int n, const Sizes& z) {
        const int chunk = CHUNK * (z.players + 2), front = z.rotations + z.players * z.ld;
        const int back = n * z.ldv > blockDim.x ? n * z.ldv : blockDim.x;
        tile = (REAL*)shared_memory;
        a = tile + z.rotations;
        v = tile + (front > chunk ? front : chunk);
        values = v + (back > chunk ? back : chunk);
        order = (int*)(values + z.players);
    }
};

// (factor X) (factor X)^T = Q diag(s) Q^T for m rows: Q^T (m, m), Y = Q^T (factor X), and the squared norms of its rows in
// memory.values, which have all digits of s.
template <typename T>
__device__ void decompose_gram(const Rows<T>& x, REAL factor, const GramMemory& memory, REAL* vectors, REAL* y, int m,
                               const Sizes& z) {
    for (int e = threadIdx.x; e < z.players * z.ld; e += blockDim.x) memory.a[e] = 0;
    gram(x, factor, memory.v, memory.a, m, z);
    jacobi(memory.a, memory.v, (Rotation*)memory.tile, memory.values, memory.order, m, z);
    for (int e = threadIdx.x; e < m * m; e += blockDim.x) vectors[e] = memory.v[e % m * z.ldv + memory.order[e / m]];
    project(x, factor, memory.tile, memory.v, memory.order, y, m, z);
    squared_norms(y, memory.values, m, x.length, memory.v);
}
