// Reduces symmetric matrices to tridiagonal form by Householder reflections, CLUSTER thread blocks per matrix.
//
// A panel of reflections is computed before the matrix is updated. With the vectors V and W of the panel so far, the
// matrix is A - V W^T - W V^T: a column needs one row of A and a correction, the product with the next vector one pass
// over A. At the end of a panel every block updates its rows; row k belongs to block k % CLUSTER. The blocks of a matrix
// compute everything else redundantly and exchange their partial products.
//
// Latency dominates: a step from one column to the next costs more than its arithmetic. The product is therefore computed
// with the raw column c, while its norm is still being summed. The reflection vector differs from c in one entry, which is
// corrected by the next row of A, which is fetched anyway. H = I - v v^T, |v|^2 = 2.

#include "conquer.cuh"

#define NEGLIGIBLE 1e-290  // a squared norm below this, for entries of order one, loses digits to underflow

struct __align__(16) Two {
    double x, y;
};

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

// Synchronize all blocks of a matrix and make writes to each other's shared memory visible.
__device__ __forceinline__ void matrix_barrier() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// Write a number to the same address in another block's shared memory.
__device__ __forceinline__ void hand_over(double* place, int rank, double x) {
#if CLUSTER > 1
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"((unsigned)__cvta_generic_to_shared(place)), "r"(rank));
    asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(there), "d"(x) : "memory");
#else
    *place = x;
#endif
}

// The layout of shared memory. panel: alternating V and W of the panel's reflections, n entries each; dots: inner products
// of V and W with c; partial_products: the partial products of all blocks, for this column and the previous one; matrix: the
// remaining memory, for a part of A.
struct Workspace {
    Two *panel, *partial, *dots;
    double *column, *partial_products, *scratch, *pivot, *matrix;
    __device__ Workspace(int n, int width) {
        panel = (Two*)shared_memory;
        partial = panel + width * n;
        dots = partial + blockDim.x;
        column = (double*)(dots + width + 1);
        partial_products = column + n;
        scratch = partial_products + 2 * CLUSTER * n;
        pivot = scratch + 32;
        matrix = pivot + 1 + (n + 1) % 2;  // aligned to an even number of doubles
    }
};

// Writes the lower triangle of `in`, divided by a power of two, to this block's rows of `a`, both triangles; the largest
// entry is then in [1, 2). Returns the power: NaN, with the identity in a, if an entry is not finite.
__device__ double load_scaled(const double* __restrict__ in, double* a, int n, int ld, int rank, const Workspace& workspace) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    double largest = 0;
    int bad = 0;
    for (int i = warp; i < n; i += warps) {
        for (int k = lane; k <= i; k += 32) {
            const double x = fabs(in[(long long)i * n + k]);
            if (!(x <= 1.7976931348623157e308)) bad = 1;
            largest = fmax(largest, x);
        }
    }
    bad = __syncthreads_or(bad);
    largest = block_max(largest, workspace.scratch);
    int exponent = 1;
    if (!bad && largest > 0) frexp(largest, &exponent);
    for (int i = rank + CLUSTER * warp; i < n; i += CLUSTER * warps) {
        for (int k = lane; k < ld; k += 32) {
            double x = 0;
            if (k < n) x = bad ? (double)(i == k) : ldexp(in[i > k ? (long long)i * n + k : (long long)k * n + i], 1 - exponent);
            a[(long long)i * ld + k] = x;
        }
    }
    return bad ? nan("") : ldexp(1.0, exponent - 1);
}

// The rows of A that belong to this block, in global memory or, once the remaining ones fit, in shared memory.
struct BlockRows {
    double* origin;  // address of row 0, column 0
    long long pitch;
    __device__ Two* at(int row, int column) const { return (Two*)(origin + row / CLUSTER * pitch + column); }
};

// The first row from `row` on that belongs to a block.
__device__ __forceinline__ int own_from(int row, int rank) { return row + (rank + CLUSTER - row % CLUSTER) % CLUSTER; }

// Subtract V W^T + W V^T from the rows and columns after j. Those that the next panel reads are also written to `a`, for
// the other blocks.
__device__ __forceinline__ void update_rows(const BlockRows& local, const BlockRows& a, int n, int rank, int j, int count, int width,
                                            const Workspace& workspace) {
    const int start = (j + 1) / 2, pairs = (n + 1) / 2 - start, top = own_from(j + 1, rank);
    const int rows = top < n ? (n - top + CLUSTER - 1) / CLUSTER : 0;
    for (int task = threadIdx.x; task < (rows + ROWS - 1) / ROWS * pairs; task += blockDim.x) {
        const int column = 2 * (start + task % pairs), group = task / pairs;
        int k[ROWS];
        Two sum[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            k[r] = top + (ROWS * group + r) * CLUSTER;
            sum[r] = *local.at(k[r] < n ? k[r] : top, column);
        }
        for (int t = 0; t < count; ++t) {
            const Two* row = workspace.panel + t * n;
            const Two left = row[column], right = row[column + 1];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const Two by = row[k[r] < n ? k[r] : top];
                sum[r].x -= by.x * left.y;  // two statements, so that each is fused
                sum[r].x -= by.y * left.x;
                sum[r].y -= by.x * right.y;
                sum[r].y -= by.y * right.x;
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (k[r] < n) *local.at(k[r], column) = sum[r];
            if (k[r] < n && local.origin != a.origin && k[r] <= j + width) *a.at(k[r], column) = sum[r];
        }
    }
}

// Copy the rows and columns from `first` on to shared memory. Returns the offset of their origin.
__device__ int make_resident(const BlockRows& a, int n, int rank, int first, int pitch, const Workspace& workspace) {
    const int base = first / 2 * 2, top = own_from(first, rank), pairs = (n + 1) / 2 - base / 2;
    const int offset = -(top / CLUSTER) * pitch - base;
    const BlockRows local = {workspace.matrix + offset, pitch};
    for (int k = top + threadIdx.x / 32 * CLUSTER; k < n; k += blockDim.x / 32 * CLUSTER) {
        for (int p = threadIdx.x % 32; p < pairs; p += 32) *local.at(k, base + 2 * p) = *a.at(k, base + 2 * p);
    }
    return offset;
}

// Write the `count` vectors of the panel that ends before column `end` to columns of the reflection blocks.
__device__ void store_panel(double* __restrict__ reflectors, int n, int end, int count, const Workspace& workspace) {
    for (int e = threadIdx.x; e < n * count; e += blockDim.x) {
        const int i = e / count, t = e % count, column = end - count + t;
        if (i > column && column < n - 2)
            reflectors[((long long)(column / BLOCK) * n + i) * BLOCK + column % BLOCK] = workspace.panel[t * n + i].x;
    }
}

// Partial product of the matrix with c over this block's rows, right of column j: two columns per thread, rows
// distributed over groups of threads; the pairs of a group are `across` apart.
template <int UNROLL>
__device__ __forceinline__ void multiply_column(const BlockRows& local, int n, int rank, int j, int groups, int across,
                                                const Workspace& workspace) {
    const int start = (j + 1) / 2, pairs = (n + 1) / 2 - start;
    const int group = threadIdx.x / across, pair = threadIdx.x % across;
    if (group < groups && pair < pairs) {
        const int top = own_from(j + 1, rank) + group * CLUSTER;
        const Two* entry = local.at(top, 2 * (start + pair));
        const long long step = groups * local.pitch / 2;
        Two sum = {0, 0};
#pragma unroll UNROLL
        for (int k = top; k < n; k += groups * CLUSTER, entry += step) {
            const Two x = *entry;
            const double by = workspace.column[k];
            sum.x += x.x * by;
            sum.y += x.y * by;
        }
        workspace.partial[group * across + pair] = sum;
    }
}

// in (batch, n, n), whose lower triangle is read -> the tridiagonal matrix, cut into `parts` leaves for divide and conquer
// (conquer.cuh): leaves (batch, parts, leaf, leaf), with the absolute value of the entry at a cut subtracted from the two
// adjacent diagonal entries; couplings (batch, parts * leaf), the off-diagonal entries; scale (batch), the divisor.
// Rows beyond n are zero except for a diagonal entry above all eigenvalues.
// reflectors (batch, blocks, n, BLOCK): v_j in columns, with leading zeros. a (batch, n, ld), ld even, and bands (batch, 2, n) are
// scratch. blockDim.x >= n; BLOCK is a multiple of the panel width. The last `resident` rows, an even number, are
// kept in shared memory.
extern "C" __global__ void CLUSTERED __launch_bounds__(REDUCE_THREADS)
    tridiagonalize(const double* __restrict__ in, double* a, double* bands, double* __restrict__ reflectors,
                   double* __restrict__ leaves, double* __restrict__ couplings, double* __restrict__ scale, int n, int ld,
                   int width, int resident, int blocks, int leaf, int parts) {
    const int matrix = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, i = threadIdx.x;
    const Workspace workspace(n, width);
    a += (long long)matrix * n * ld;
    reflectors += (long long)matrix * blocks * n * BLOCK;
    double *diagonal = bands + (long long)matrix * 2 * n, *off = diagonal + n;
    const double unit = load_scaled(in + (long long)matrix * n * n, a, n, ld, rank, workspace);
    __threadfence();
    matrix_barrier();
    double c = i < n ? __ldcg(a + i) : 0;  // the updated next column
    if (i < n) workspace.column[i] = c;
    if (i == 0 && rank == 0) diagonal[0] = c;
    const BlockRows far = {a + rank * ld, (long long)CLUSTER * ld};
    bool close = n <= resident;
    int offset = close ? make_resident(far, n, rank, 0, resident, workspace) : 0;
    __syncthreads();

    int count = 0;  // reflections of the panel so far
    for (int j = 0; j + 1 < n; ++j) {
        const bool inside = i > j && i < n;
        double below = inside ? __ldcg(a + (long long)(j + 1) * ld + i) : 0;
        const int across = ((n + 1) / 2 - (j + 1) / 2 + 31) / 32 * 32;
        const BlockRows near = {workspace.matrix + offset, resident};
        const int groups = min((int)blockDim.x / across, MAX_GROUPS);
        if (close) {
            multiply_column<4>(near, n, rank, j, groups, across, workspace);
        } else {
            multiply_column<8>(far, n, rank, j, groups, across, workspace);
        }
        for (int first = 0; first <= count; first += blockDim.x / DOT_LANES) {
            const int t = first + i / DOT_LANES;
            Two sum = {0, 0};
            if (t < count) {
                const Two* row = workspace.panel + t * n;
#pragma unroll 4
                for (int k = j + 1 + i % DOT_LANES; k < n; k += DOT_LANES) {
                    sum.x += row[k].x * workspace.column[k];
                    sum.y += row[k].y * workspace.column[k];
                }
            } else if (t == count) {
                for (int k = j + 2 + i % DOT_LANES; k < n; k += DOT_LANES) sum.x += workspace.column[k] * workspace.column[k];
            }
            sum.x = sum_over<DOT_LANES>(sum.x);
            sum.y = sum_over<DOT_LANES>(sum.y);
            if (t <= count && i % DOT_LANES == 0) workspace.dots[t] = sum;
        }
        if (inside) {
            double more = 0;
#pragma unroll 4
            for (int t = 0; t < count; ++t) {
                const Two local = workspace.panel[t * n + i], at = workspace.panel[t * n + j + 1];
                below -= local.x * at.y;
                more -= local.y * at.x;
            }
            below += more;
        }
        __syncthreads();
        double product = 0, more = 0;
        if (inside) {
            const Two* partial = workspace.partial + i / 2 - (j + 1) / 2;
#pragma unroll 4
            for (int g = 0; g < groups; ++g) product += i % 2 ? partial[g * across].y : partial[g * across].x;
        }
        if (CLUSTER > 1) {
            double* partial_products = workspace.partial_products + j % 2 * CLUSTER * n + i;
            for (int r = 0; inside && r < CLUSTER; ++r) hand_over(partial_products + rank * n, r, product);
            matrix_barrier();
            product = 0;
            for (int r = 0; inside && r < CLUSTER; ++r) product += partial_products[r * n];
        }
        if (inside) {
#pragma unroll 4
            for (int t = 0; t < count; ++t) {
                const Two local = workspace.panel[t * n + i], dot = workspace.dots[t];
                product -= local.x * dot.y;
                more -= local.y * dot.x;
            }
            product += more;
        }
        const double alpha = workspace.column[j + 1], square = workspace.dots[count].x, size = sqrt(alpha * alpha + square);
        const bool turns = square > NEGLIGIBLE;
        const double beta = turns ? -copysign(size, alpha) : alpha;
        const double factor = turns ? rsqrt(size * (size + fabs(alpha))) : 0, first = factor * (alpha - beta);
        const double v = !inside ? 0 : i == j + 1 ? first : factor * c;
        const double y = inside ? factor * (product - beta * below) : 0;
        if (i == j + 1) workspace.pivot[0] = y;
        const double half = 0.5 * block_sum<REDUCE_THREADS / 32>(v * y, workspace.scratch);
        const double w = y - half * v;
        if (inside) {
            c = below - v * (workspace.pivot[0] - half * first) - w * first;
            workspace.panel[count * n + i] = {v, w};
            workspace.column[i] = c;
        }
        if (i == j + 1 && rank == 0) {
            off[j] = beta;
            diagonal[i] = c;
        }
        __syncthreads();
        if (++count < width) continue;
        if (close) {
            update_rows(near, far, n, rank, j + 1, count, width, workspace);
        } else {
            update_rows(far, far, n, rank, j + 1, count, width, workspace);
        }
        if (rank == 0) store_panel(reflectors, n, j + 1, count, workspace);
        count = 0;
        __threadfence();
        if (!close && n - j - 1 <= resident) {
            __syncthreads();
            close = true;
            offset = make_resident(far, n, rank, j + 2, resident, workspace);
        }
        matrix_barrier();
    }
    matrix_barrier();  // no block may exit while others write to its shared memory
    if (rank) return;
    store_panel(reflectors, n, n - 1, count, workspace);

    double bound = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const double beside = (i > 0 ? fabs(off[i - 1]) : 0) + (i + 1 < n ? fabs(off[i]) : 0);
        bound = fmax(bound, fabs(diagonal[i]) + beside);
    }
    bound = block_max(bound, workspace.scratch);
    const double above = bound > 0 ? 1.0625 * bound : 1;
    leaves += (long long)matrix * parts * leaf * leaf;
    couplings += (long long)matrix * parts * leaf;
    for (int i = threadIdx.x; i < parts * leaf; i += blockDim.x) {
        const int row = i % leaf;
        const double before = i > 0 && i < n ? off[i - 1] : 0, after = i + 1 < n ? off[i] : 0;
        double* entries = leaves + (long long)i * leaf;
        for (int c = 0; c < leaf; ++c) entries[c] = 0;
        entries[row] = i < n ? diagonal[i] - (row == 0 ? fabs(before) : 0) - (row == leaf - 1 ? fabs(after) : 0) : above;
        if (row > 0) entries[row - 1] = before;
        if (row < leaf - 1) entries[row + 1] = after;
        couplings[i] = after;
    }
    if (threadIdx.x == 0) scale[matrix] = unit;
}

// The triangular factors of products of reflections, I - V T V^T = H_0 H_1 ...: T is the inverse of the upper triangle of
// V^T V with ones on the diagonal. gram (blocks, BLOCK, BLOCK) -> factors (blocks, BLOCK, BLOCK). One thread block
// per factor, FACTOR_LANES threads per column.
extern "C" __global__ void __launch_bounds__(BLOCK* FACTOR_LANES)
    block_factors(const double* __restrict__ gram, double* __restrict__ factors) {
    double* rows = shared_memory;
    double* local = rows + BLOCK * BLOCK;  // columns of T, contiguous
    const long long start = (long long)blockIdx.x * BLOCK * BLOCK;
    const int c = threadIdx.x / FACTOR_LANES, lane = threadIdx.x % FACTOR_LANES;
    for (int e = threadIdx.x; e < BLOCK * BLOCK; e += blockDim.x) rows[e] = gram[start + e];
    __syncthreads();
    double* column = local + c * (BLOCK + 1);
    for (int i = BLOCK - 1; i >= 0; --i) {
        double sum = 0;
        for (int k = i + 1 + lane; k <= c; k += FACTOR_LANES) sum -= rows[i * BLOCK + k] * column[k];
        sum = sum_over<FACTOR_LANES>(sum);
        if (lane == 0) column[i] = i == c ? 1 : sum;
        __syncwarp();
    }
    __syncthreads();
    for (int e = threadIdx.x; e < BLOCK * BLOCK; e += blockDim.x)
        factors[start + e] = local[e % BLOCK * (BLOCK + 1) + e / BLOCK];
}
