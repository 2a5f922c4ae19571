// Symmetric matrices to tridiagonal form by Householder reflections, CLUSTER thread blocks per matrix.
//
// A panel of reflections is found before the matrix is touched: with the vectors V and W of the panel so far, the matrix
// is A - V W^T - W V^T, so that a column of it costs a row of A and a correction, and the product with the next vector
// one reading of A. At the end of a panel every block updates its own rows; row k belongs to block k % CLUSTER. The
// blocks of a matrix compute everything else redundantly, and exchange their parts of the products.
//
// Latency dominates: a step from one column to the next costs more than its arithmetic. So the product is taken with the column c as it is, while its norm is still being summed; the reflection's
// vector differs from c in one entry, which the next row of A, fetched anyway, makes up for. H = I - v v^T, |v|^2 = 2.

#include "conquer.cuh"
#include "reduce.cuh"

#define NEGLIGIBLE 1e-290  // a squared norm beside entries of size one, below which it loses digits

struct __align__(16) Two {
    double x, y;
};

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

// Synchronize all blocks of a matrix; afterwards writes to each other's shared memory can be read.
__device__ __forceinline__ void matrix_barrier() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// Write a number to the same place of another block's shared memory.
__device__ __forceinline__ void hand_over(double* place, int rank, double x) {
#if CLUSTER > 1
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"((unsigned)__cvta_generic_to_shared(place)), "r"(rank));
    asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(there), "d"(x) : "memory");
#else
    *place = x;
#endif
}

// The block's shared memory. panel: V and W of the panel's reflections in turn, one row of n for each; dots: of V and W
// with c; shares: the products of all blocks, of this column and the one before; matrix: the rest, for a part of A.
struct Room {
    Two *panel, *partial, *dots;
    double *column, *shares, *scratch, *pivot, *matrix;
    __device__ Room(int n, int width) {
        panel = (Two*)shared_memory;
        partial = panel + width * n;
        dots = partial + blockDim.x;
        column = (double*)(dots + width + 1);
        shares = column + n;
        scratch = shares + 2 * CLUSTER * n;
        pivot = scratch + 32;
        matrix = pivot + 1 + (n + 1) % 2;  // after an even number of doubles
    }
};

// Writes the lower triangle of `in`, divided by a power of two, to this block's rows of `a`, both triangles; the largest
// entry is then in [1, 2). Returns the power: NaN, with the identity in a, if an entry is not finite.
__device__ double load_scaled(const double* __restrict__ in, double* a, int n, int ld, int rank, const Room& room) {
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
    largest = block_max(largest, room.scratch);
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

// The rows of A that belong to this block, in global memory or, as soon as those that are left fit, in shared memory.
struct OwnRows {
    double* origin;  // where row 0 and column 0 would be
    long long pitch;
    __device__ Two* at(int row, int column) const { return (Two*)(origin + row / CLUSTER * pitch + column); }
};

// The first row from `row` on that belongs to a block.
__device__ __forceinline__ int own_from(int row, int rank) { return row + (rank + CLUSTER - row % CLUSTER) % CLUSTER; }

// Rows and columns behind j: minus V W^T + W V^T. Those that the next panel reads go to `a` as well, where other
// blocks find them.
__device__ __forceinline__ void update_rows(const OwnRows& own, const OwnRows& a, int n, int rank, int j, int count, int width,
                                            const Room& room) {
    const int start = (j + 1) / 2, pairs = (n + 1) / 2 - start, top = own_from(j + 1, rank);
    const int rows = top < n ? (n - top + CLUSTER - 1) / CLUSTER : 0;
    for (int task = threadIdx.x; task < (rows + ROWS - 1) / ROWS * pairs; task += blockDim.x) {
        const int column = 2 * (start + task % pairs), group = task / pairs;
        int k[ROWS];
        Two sum[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            k[r] = top + (ROWS * group + r) * CLUSTER;
            sum[r] = *own.at(k[r] < n ? k[r] : top, column);
        }
        for (int t = 0; t < count; ++t) {
            const Two* row = room.panel + t * n;
            const Two left = row[column], right = row[column + 1];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const Two by = row[k[r] < n ? k[r] : top];
                sum[r].x -= by.x * left.y;  // one after the other: each is fused
                sum[r].x -= by.y * left.x;
                sum[r].y -= by.x * right.y;
                sum[r].y -= by.y * right.x;
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (k[r] < n) *own.at(k[r], column) = sum[r];
            if (k[r] < n && own.origin != a.origin && k[r] <= j + width) *a.at(k[r], column) = sum[r];
        }
    }
}

// Brings the rows and columns from `first` on into shared memory. Returns the offset of their origin.
__device__ int make_resident(const OwnRows& a, int n, int rank, int first, int pitch, const Room& room) {
    const int base = first / 2 * 2, top = own_from(first, rank), pairs = (n + 1) / 2 - base / 2;
    const int offset = -(top / CLUSTER) * pitch - base;
    const OwnRows own = {room.matrix + offset, pitch};
    for (int k = top + threadIdx.x / 32 * CLUSTER; k < n; k += blockDim.x / 32 * CLUSTER) {
        for (int p = threadIdx.x % 32; p < pairs; p += 32) *own.at(k, base + 2 * p) = *a.at(k, base + 2 * p);
    }
    return offset;
}

// The `count` vectors of the panel that ends before column `end`, to columns of the blocks of reflections.
__device__ void store_panel(double* __restrict__ reflectors, int n, int end, int count, const Room& room) {
    for (int e = threadIdx.x; e < n * count; e += blockDim.x) {
        const int i = e / count, t = e % count, column = end - count + t;
        if (i > column && column < n - 2)
            reflectors[((long long)(column / BLOCK) * n + i) * BLOCK + column % BLOCK] = room.panel[t * n + i].x;
    }
}

// Shares of the product of the matrix with c, by this block's rows right of column j: two columns per thread, the rows
// distributed over groups of threads; the pairs of a group are `across` apart.
template <int UNROLL>
__device__ __forceinline__ void multiply(const OwnRows& own, int n, int rank, int j, int groups, int across,
                                         const Room& room) {
    const int start = (j + 1) / 2, pairs = (n + 1) / 2 - start;
    const int group = threadIdx.x / across, pair = threadIdx.x % across;
    if (group < groups && pair < pairs) {
        const int top = own_from(j + 1, rank) + group * CLUSTER;
        const Two* entry = own.at(top, 2 * (start + pair));
        const long long step = groups * own.pitch / 2;
        Two sum = {0, 0};
#pragma unroll UNROLL
        for (int k = top; k < n; k += groups * CLUSTER, entry += step) {
            const Two x = *entry;
            const double by = room.column[k];
            sum.x += x.x * by;
            sum.y += x.y * by;
        }
        room.partial[group * across + pair] = sum;
    }
}

// in (batch, n, n), whose lower triangle is read -> the tridiagonal matrix, cut into `parts` leaves for divide and conquer
// (conquer.cuh): leaves (batch, parts, leaf, leaf), each with the size of the entry at a cut taken from the two diagonal
// entries beside it; couplings (batch, parts * leaf), the entries next to the diagonal; scale (batch), the
// divisor. Rows beyond n have a diagonal entry above all eigenvalues and nothing beside it.
// reflectors (batch, blocks, n, BLOCK): v_j in columns, zero before. a (batch, n, ld), ld even, and bands (batch, 2, n) are
// scratch. blockDim.x >= n; BLOCK is a multiple of the panel's width; from `resident` rows on, and that many, an even
// number, the matrix is kept in shared memory.
extern "C" __global__ void CLUSTERED __launch_bounds__(REDUCE_THREADS)
    tridiagonalize(const double* __restrict__ in, double* a, double* bands, double* __restrict__ reflectors,
                   double* __restrict__ leaves, double* __restrict__ couplings, double* __restrict__ scale, int n, int ld,
                   int width, int resident, int blocks, int leaf, int parts) {
    const int matrix = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, i = threadIdx.x;
    const Room room(n, width);
    a += (long long)matrix * n * ld;
    reflectors += (long long)matrix * blocks * n * BLOCK;
    double *diagonal = bands + (long long)matrix * 2 * n, *off = diagonal + n;
    const double unit = load_scaled(in + (long long)matrix * n * n, a, n, ld, rank, room);
    __threadfence();
    matrix_barrier();
    double c = i < n ? __ldcg(a + i) : 0;  // of the column that is next, up to date
    if (i < n) room.column[i] = c;
    if (i == 0 && rank == 0) diagonal[0] = c;
    const OwnRows far = {a + rank * ld, (long long)CLUSTER * ld};
    bool close = n <= resident;
    int offset = close ? make_resident(far, n, rank, 0, resident, room) : 0;
    __syncthreads();

    int count = 0;  // reflections of the panel so far
    for (int j = 0; j + 1 < n; ++j) {
        const bool inside = i > j && i < n;
        double below = inside ? __ldcg(a + (long long)(j + 1) * ld + i) : 0;
        const int across = ((n + 1) / 2 - (j + 1) / 2 + 31) / 32 * 32;
        const OwnRows near = {room.matrix + offset, resident};
        const int groups = min((int)blockDim.x / across, MAX_GROUPS);
        if (close) {
            multiply<4>(near, n, rank, j, groups, across, room);
        } else {
            multiply<8>(far, n, rank, j, groups, across, room);
        }
        for (int first = 0; first <= count; first += blockDim.x / DOT_LANES) {
            const int t = first + i / DOT_LANES;
            Two sum = {0, 0};
            if (t < count) {
                const Two* row = room.panel + t * n;
#pragma unroll 4
                for (int k = j + 1 + i % DOT_LANES; k < n; k += DOT_LANES) {
                    sum.x += row[k].x * room.column[k];
                    sum.y += row[k].y * room.column[k];
                }
            } else if (t == count) {
                for (int k = j + 2 + i % DOT_LANES; k < n; k += DOT_LANES) sum.x += room.column[k] * room.column[k];
            }
            sum.x = sum_over<DOT_LANES>(sum.x);
            sum.y = sum_over<DOT_LANES>(sum.y);
            if (t <= count && i % DOT_LANES == 0) room.dots[t] = sum;
        }
        if (inside) {
            double more = 0;
#pragma unroll 4
            for (int t = 0; t < count; ++t) {
                const Two own = room.panel[t * n + i], at = room.panel[t * n + j + 1];
                below -= own.x * at.y;
                more -= own.y * at.x;
            }
            below += more;
        }
        __syncthreads();
        double product = 0, more = 0;
        if (inside) {
            const Two* partial = room.partial + i / 2 - (j + 1) / 2;
#pragma unroll 4
            for (int g = 0; g < groups; ++g) product += i % 2 ? partial[g * across].y : partial[g * across].x;
        }
        if (CLUSTER > 1) {
            double* shares = room.shares + j % 2 * CLUSTER * n + i;
            for (int r = 0; inside && r < CLUSTER; ++r) hand_over(shares + rank * n, r, product);
            matrix_barrier();
            product = 0;
            for (int r = 0; inside && r < CLUSTER; ++r) product += shares[r * n];
        }
        if (inside) {
#pragma unroll 4
            for (int t = 0; t < count; ++t) {
                const Two own = room.panel[t * n + i], dot = room.dots[t];
                product -= own.x * dot.y;
                more -= own.y * dot.x;
            }
            product += more;
        }
        const double alpha = room.column[j + 1], square = room.dots[count].x, size = sqrt(alpha * alpha + square);
        const bool turns = square > NEGLIGIBLE;
        const double beta = turns ? -copysign(size, alpha) : alpha;
        const double factor = turns ? rsqrt(size * (size + fabs(alpha))) : 0, first = factor * (alpha - beta);
        const double v = !inside ? 0 : i == j + 1 ? first : factor * c;
        const double y = inside ? factor * (product - beta * below) : 0;
        if (i == j + 1) room.pivot[0] = y;
        const double half = 0.5 * block_sum<REDUCE_THREADS / 32>(v * y, room.scratch);
        const double w = y - half * v;
        if (inside) {
            c = below - v * (room.pivot[0] - half * first) - w * first;
            room.panel[count * n + i] = {v, w};
            room.column[i] = c;
        }
        if (i == j + 1 && rank == 0) {
            off[j] = beta;
            diagonal[i] = c;
        }
        __syncthreads();
        if (++count < width) continue;
        if (close) {
            update_rows(near, far, n, rank, j + 1, count, width, room);
        } else {
            update_rows(far, far, n, rank, j + 1, count, width, room);
        }
        if (rank == 0) store_panel(reflectors, n, j + 1, count, room);
        count = 0;
        __threadfence();
        if (!close && n - j - 1 <= resident) {
            __syncthreads();
            close = true;
            offset = make_resident(far, n, rank, j + 2, resident, room);
        }
        matrix_barrier();
    }
    matrix_barrier();  // no block may exit while others write to its shared memory
    if (rank) return;
    store_panel(reflectors, n, n - 1, count, room);

    double bound = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const double beside = (i > 0 ? fabs(off[i - 1]) : 0) + (i + 1 < n ? fabs(off[i]) : 0);
        bound = fmax(bound, fabs(diagonal[i]) + beside);
    }
    bound = block_max(bound, room.scratch);
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
// V^T V with ones on the diagonal. gram (blocks, BLOCK, BLOCK) -> factors (blocks, BLOCK, BLOCK). One thread block for
// each, FACTOR_LANES threads for each column.
extern "C" __global__ void __launch_bounds__(BLOCK* FACTOR_LANES)
    block_factors(const double* __restrict__ gram, double* __restrict__ factors) {
    double* rows = shared_memory;
    double* own = rows + BLOCK * BLOCK;  // columns of T, one behind the other
    const long long start = (long long)blockIdx.x * BLOCK * BLOCK;
    const int c = threadIdx.x / FACTOR_LANES, lane = threadIdx.x % FACTOR_LANES;
    for (int e = threadIdx.x; e < BLOCK * BLOCK; e += blockDim.x) rows[e] = gram[start + e];
    __syncthreads();
    double* column = own + c * (BLOCK + 1);
    for (int i = BLOCK - 1; i >= 0; --i) {
        double sum = 0;
        for (int k = i + 1 + lane; k <= c; k += FACTOR_LANES) sum -= rows[i * BLOCK + k] * column[k];
        sum = sum_over<FACTOR_LANES>(sum);
        if (lane == 0) column[i] = i == c ? 1 : sum;
        __syncwarp();
    }
    __syncthreads();
    for (int e = threadIdx.x; e < BLOCK * BLOCK; e += blockDim.x)
        factors[start + e] = own[e % BLOCK * (BLOCK + 1) + e / BLOCK];
}
