// A prologue that applies weights and centering to features, R = sqrt(w) o (F - 1 mean^T), and an epilogue from dL/dR to dL/dF. F is
// (images, m, d), w (images, regions, m) or null for ones, R (images, regions, m, d) in REAL. IN is the type of F, WEIGHT that of w.
// A block processes STRIP columns of a matrix. Lanes run along the columns; rows are distributed round-robin. The grid is
// one-dimensional.

// The sum over the threads of a column, in a fixed order.
__device__ REAL sum_of_parts(REAL part) {
    __shared__ REAL parts[MAX_THREADS];
    __syncthreads();  // the scratch memory of the previous sum has been read
    parts[threadIdx.x] = part;
    __syncthreads();
    REAL sum = 0;
    for (int e = threadIdx.x % STRIP; e < blockDim.x; e += STRIP) sum += parts[e];
    return sum;
}

// The entries that a thread processes: rows first, first + step, ... < `rows` of its column.
struct Strip {
    int column, first, step, rows;
    long long matrix;
    __device__ Strip(int m, int d) {
        const int strips = (d + STRIP - 1) / STRIP;
        matrix = blockIdx.x / strips;
        column = blockIdx.x % strips * STRIP + threadIdx.x % STRIP;
        first = threadIdx.x / STRIP;
        step = blockDim.x / STRIP;
        rows = column < d ? m : 0;
    }
    // The sum of value(row) over the rows; all threads of a block call this together.
    template <typename Value>
    __device__ __forceinline__ REAL sum(Value value) const {
        REAL part = 0;
#pragma unroll 4
        for (int i = first; i < rows; i += step) part += value(i);
        return sum_of_parts(part);
    }
};

struct Weights {
    const WEIGHT* w;
    REAL total;
    // fraction() is valid if `centered`
    __device__ Weights(const WEIGHT* all, long long matrix, int m, const Strip& at, int centered) {
        w = all ? all + matrix * m : nullptr;
        total = m;
        if (!w || !centered) return;
        total = at.sum([&](int i) { return (REAL)w[i]; });
        if (total == 0) total = 1;  // a region without weight has mean 0
    }
    __device__ REAL root(int i) const { return w ? sqrt((REAL)w[i]) : (REAL)1; }
    __device__ REAL fraction(int i) const { return (w ? (REAL)w[i] : (REAL)1) / total; }
};

// F -> R
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    pool_prepare(const IN* __restrict__ f, const WEIGHT* __restrict__ all_weights, REAL* __restrict__ rows, int regions,
                 int centered, int m, int d) {
    const Strip at(m, d);
    const Weights weights(all_weights, at.matrix, m, at, centered);
    f += at.matrix / regions * m * d + at.column;
    rows += at.matrix * m * d + at.column;
    REAL mean = 0;
    if (centered && weights.w) mean = at.sum([&](int i) { return weights.fraction(i) * (REAL)f[(long long)i * d]; });
    if (centered && !weights.w) mean = at.sum([&](int i) { return (REAL)f[(long long)i * d]; }) / m;
    for (int i = at.first; i < at.rows; i += at.step)
        rows[(long long)i * d] = weights.root(i) * ((REAL)f[(long long)i * d] - mean);
}

// dL/dR -> dL/dF, one block per image. The sum over the regions overwrites the first one.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    pool_prepare_gradient(REAL* g, const WEIGHT* __restrict__ all_weights, IN* __restrict__ out, int regions, int centered,
                          int m, int d) {
    const Strip at(m, d);
    REAL* sums = g + at.matrix * regions * m * d + at.column;
    out += at.matrix * m * d + at.column;
    for (int r = 0; r < regions; ++r) {
        const Weights weights(all_weights, at.matrix * regions + r, m, at, centered);
        const REAL* mine = sums + (long long)r * m * d;
        REAL on_mean = 0;
        if (centered) on_mean = at.sum([&](int i) { return weights.root(i) * mine[(long long)i * d]; });
        for (int i = at.first; i < at.rows; i += at.step) {
            REAL value = weights.root(i) * mine[(long long)i * d];
            if (centered) value -= weights.fraction(i) * on_mean;
            if (r > 0) value += sums[(long long)i * d];
            if (r + 1 < regions) sums[(long long)i * d] = value;
            else out[(long long)i * d] = (IN)value;
        }
    }
}
