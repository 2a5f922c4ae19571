// The thin singular value decomposition X = Q diag(sigma) V of matrices with a short side of k <= 64 and a long side of l,
// and its adjoint, one thread block per matrix. REAL is double.
//
// Q (k, k) has the vectors of the short side in columns, V (k, l) those of the long side in rows. For a wide matrix, X, Q
// and V have the layout of torch; for a tall one all three are transposed. Matrices are dense. X, the returned factors and
// their gradients have type IN, float or double; the factors saved for the adjoint are REAL.

#include "rows.cuh"
#include "separate.cuh"

template <typename T>
struct Entries {  // entry j of vector i
    T* x;
    int next, step;
    __device__ T& operator()(int i, int j) const { return x[(long long)i * next + (long long)j * step]; }
};

struct Layout {
    int k, l, long_next, long_step, short_next, short_step;  // strides between vectors and between entries
    __device__ Layout(int k, int l, int tall)
        : k(k), l(l), long_next(tall ? 1 : l), long_step(tall ? k : 1), short_next(tall ? k : 1), short_step(tall ? 1 : k) {}
    template <typename T>
    __device__ Rows<T> rows(const T* x) const {
        return {x == nullptr ? nullptr : x + (long long)blockIdx.x * k * l, l, long_next, long_step};
    }
    template <typename T>
    __device__ Rows<T> short_rows(const T* x) const {
        return {x == nullptr ? nullptr : x + (long long)blockIdx.x * k * k, k, short_next, short_step};
    }
    __device__ Entries<IN> entries(IN* x) const { return {x + (long long)blockIdx.x * k * l, long_next, long_step}; }
    __device__ Vectors long_vectors(REAL* x) const { return {x + (long long)blockIdx.x * k * l, l, long_next, long_step}; }
    __device__ Vectors short_vectors(REAL* x) const { return {x + (long long)blockIdx.x * k * k, k, short_next, short_step}; }
};

// x (batch, k, l) -> q (batch, k, k), sigma (batch, k) descending, v (batch, k, l). |v_i . v_j| <= `limit` is accepted. y (batch,
// k, l) and u (batch, k, k) are scratch. q_out, sigma_out and v_out, if given, receive the same rounded to IN. Shared memory as
// in pool_spectrum.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    svd_factor(const IN* __restrict__ x, REAL* y, REAL* u, REAL* q, REAL* sigma, REAL* v, IN* q_out, IN* sigma_out,
               IN* v_out, double limit, int k, int l, int tall) {
    const Sizes z(k);
    const Layout layout(k, l, tall);
    const GramMemory memory(k, z);
    REAL *a = memory.a, *basis = memory.v, *values = memory.values;
    int* order = memory.order;
    const Rows<IN> rows = layout.rows(x);
    y += (long long)blockIdx.x * k * l;
    u += (long long)blockIdx.x * k * k;
    sigma += (long long)blockIdx.x * k;

    const REAL scale = matrix_scale(rows.x, k * l, basis);  // a power of two: no square overflows or underflows
    const REAL unit = scale == 0 ? (REAL)1 : scale;
    decompose_gram(rows, 1 / unit, memory, u, y, k, z);

    // Small singular values and their vectors are inaccurate in the Gram matrix: recompute them from Y. Directions
    // below the noise floor are rounding error.
    const Extremes extremes(values, k);
    const REAL level = (REAL)NOISE * l, floor_value = level * level * extremes.largest;
    if (extremes.largest > (REAL)limit * (REAL)SAFE_RATIO * extremes.smallest) {
        for (int e = threadIdx.x; e < k * l; e += blockDim.x) {
            if (values[e / l] <= floor_value) y[e] = 0;
        }
        for (int e = threadIdx.x; e < z.players * z.ld; e += blockDim.x) a[e] = 0;
        const Rows<REAL> rotated = {y, l, l, 1};
        gram(rotated, (REAL)1, basis, a, k, z);
        int mixed = 0;
        for (int e = threadIdx.x; e < k * k; e += blockDim.x) {
            const int i = e / k, j = e % k;
            const REAL ratio = a[i * z.ld + j] / (REAL)limit;
            if (i < j && ratio * ratio > a[i * z.ld + i] * a[j * z.ld + j]) mixed = 1;
        }
        if (__syncthreads_or(mixed)) {
            const Vectors vectors = {u, k, k, 1}, long_vectors = {y, l, l, 1};
            separate(long_vectors, vectors, nullptr, (REAL)0, (REAL)limit, k, basis);
        }
        squared_norms(y, values, k, l, basis);
    }
    if (threadIdx.x < k) {
        const REAL mine = values[threadIdx.x];
        int rank = 0;
        for (int j = 0; j < k; ++j) {
            if (values[j] > mine || (values[j] == mine && j < threadIdx.x)) ++rank;
        }
        if (!(mine == mine)) rank = threadIdx.x;
        order[rank] = threadIdx.x;
        sigma[rank] = sqrt(mine) * unit;
    }
    __syncthreads();
    const Vectors out_q = layout.short_vectors(q), out_v = layout.long_vectors(v);
    for (int e = threadIdx.x; e < k * k; e += blockDim.x) out_q(e / k, e % k) = u[order[e / k] * k + e % k];
    for (int e = threadIdx.x; e < k * l; e += blockDim.x) {
        const int i = tall ? e % k : e / l, j = tall ? e / k : e % l;
        const REAL square_norm = values[order[i]];
        out_v(i, j) = square_norm == 0 ? (REAL)0 : y[(long long)order[i] * l + j] / sqrt(square_norm);
    }
    __syncthreads();
    complete(out_v, sigma, k, basis);
    if (q_out == nullptr) return;
    __syncthreads();
    const long long squares = (long long)blockIdx.x * k * k, longs = (long long)blockIdx.x * k * l;
    for (int e = threadIdx.x; e < k * k; e += blockDim.x) q_out[squares + e] = (IN)q[squares + e];
    for (int e = threadIdx.x; e < k * l; e += blockDim.x) v_out[longs + e] = (IN)v[longs + e];
    if (threadIdx.x < k) sigma_out[(long long)blockIdx.x * k + threadIdx.x] = (IN)sigma[threadIdx.x];
}

// 1/x with the tie policy: 0 if |x| <= `tied`, or x/(x^2 + width^2).
__device__ __forceinline__ REAL inverted(REAL x, REAL tied, REAL width) {
    if (width > 0) return x / (x * x + width * width);
    return fabs(x) <= tied ? (REAL)0 : 1 / x;
}

// dL/dX (batch, k, l) for the gradients of q (batch, k, k), sigma (batch, k) and v (batch, k, l), each of which may be absent.
// With W_q = Q^T G_q and W_v = V G_v^T it is Q ((E/(s_j - s_i) + O/(s_j + s_i) + diag(G_s)) V + diag(1/s) (G_v - W_v^T V)), E and
// O the sum and difference of the skew parts of W_q and W_v; the last term is absent for square matrices. `flag`, if given, is
// set if the loss depends on the vectors of a tied pair: at all (gauge < 0), or by more than the fraction `gauge` of the
// gradients. Shared memory: 2 tiles, 3 k (k | 1) + 2 k + 4 blockDim.x numbers and k int.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    svd_adjoint(const REAL* __restrict__ q, const REAL* __restrict__ sigma, const REAL* __restrict__ v,
                const IN* __restrict__ g_q, const IN* __restrict__ g_sigma, const IN* __restrict__ g_v,
                IN* __restrict__ out, unsigned char* flag, double tolerance, double broadening, double gauge, int k,
                int l, int tall) {
    const Sizes z(k);
    const Layout layout(k, l, tall);
    const int ldt = z.players + 2, ld = k | 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    REAL* tile = (REAL*)shared_memory;
    REAL* g_tile = tile + CHUNK * ldt;
    REAL* of_q = g_tile + CHUNK * ldt;
    REAL* of_v = of_q + k * ld;
    REAL* left = of_v + k * ld;
    REAL* s = left + k * ld;
    REAL* inverse = s + k;
    REAL* scratch = inverse + k;
    int* used = (int*)(scratch + 4 * blockDim.x);
    const Rows<REAL> rows = layout.rows(v), basis = layout.short_rows(q);
    const Rows<IN> g_rows = layout.rows(g_v), g_basis = layout.short_rows(g_q);
    if (threadIdx.x < k) {
        s[threadIdx.x] = sigma[(long long)blockIdx.x * k + threadIdx.x];
        used[threadIdx.x] = 0;
    }
    __syncthreads();
    const REAL tied = (REAL)tolerance * s[0], width = (REAL)broadening * s[0];
    REAL size = 0;

    // W_q and W_v
    for (int e = threadIdx.x; e < k * k; e += blockDim.x) {
        const int i = e / k, j = e % k;
        REAL sum = 0;
        for (int r = 0; g_q != nullptr && r < k; ++r) sum += basis(i, r) * g_basis(j, r);
        of_q[i * ld + j] = sum;
        of_v[i * ld + j] = 0;
        if (g_q != nullptr) {
            const REAL entry = fabs(g_basis(i, j));
            size = entry > size ? entry : size;
            if (entry != 0) used[i] = 1;
        }
    }
    const int blocks = z.half * z.half;
    const Split split(blocks);
    for (int first = 0; g_v != nullptr && first < blocks; first += split.width) {
        const int item = first + split.item, i = 2 * (item / z.half), j = 2 * (item % z.half);
        REAL sum[4] = {0, 0, 0, 0};
        for (int start = 0; start < l; start += CHUNK) {
            __syncthreads();
            load_columns(tile, rows, (REAL)1, start, k, ldt);
            load_columns(g_tile, g_rows, (REAL)1, start, k, ldt);
            __syncthreads();
            const int columns = l - start < CHUNK ? l - start : CHUNK;
            for (int e = threadIdx.x; first == 0 && e < columns * k; e += blockDim.x) {
                const REAL entry = fabs(g_tile[e / k * ldt + e % k]);
                size = entry > size ? entry : size;
                if (entry != 0) used[e % k] |= 2;
            }
            if (item < blocks) add_products(sum, tile + i, g_tile + j, ldt, columns, split);
        }
        add_groups(sum, scratch, split);
        if (item < blocks && split.group == 0) {
            of_v[i * ld + j] = sum[0];
            if (j + 1 < k) of_v[i * ld + j + 1] = sum[1];
            if (i + 1 < k) of_v[(i + 1) * ld + j] = sum[2];
            if (i + 1 < k && j + 1 < k) of_v[(i + 1) * ld + j + 1] = sum[3];
        }
    }
    __syncthreads();
    scratch[threadIdx.x] = size;
    if (threadIdx.x < k) inverse[threadIdx.x] = l > k ? inverted(s[threadIdx.x], tied, width) : (REAL)0;
    __syncthreads();
    for (int e = 0; e < blockDim.x; ++e) size = scratch[e] > size ? scratch[e] : size;

    // the k x k factor in front of V, with the tie policy
    int complain = 0;
    REAL inner[MAX_ENTRIES];
    for (int e = threadIdx.x, at = 0; e < k * k; e += blockDim.x, ++at) {
        const int i = e / k, j = e % k;
        const REAL q_skew = (REAL)0.5 * (of_q[i * ld + j] - of_q[j * ld + i]);
        const REAL v_skew = (REAL)0.5 * (of_v[i * ld + j] - of_v[j * ld + i]);
        const REAL even = q_skew + v_skew, odd = q_skew - v_skew, gap = s[j] - s[i], sum = s[j] + s[i];
        const REAL g_s = g_sigma == nullptr ? (REAL)0 : (REAL)g_sigma[(long long)blockIdx.x * k + i];
        inner[at] = even * inverted(gap, tied, width) + odd * inverted(sum, tied, width) - inverse[i] * of_v[j * ld + i];
        if (i == j) inner[at] += g_s;
        if (i != j && fabs(gap) <= tied) {
            const REAL other = g_sigma == nullptr ? (REAL)0 : (REAL)g_sigma[(long long)blockIdx.x * k + j];
            if (gauge < 0) {
                complain |= used[i] || used[j] || g_s != 0 || other != 0;
            } else {
                complain |= fabs(even) > gauge * size || (fabs(sum) <= tied && fabs(odd) > gauge * size);
            }
        }
        if (gauge < 0 && i == j && l > k && s[i] <= tied) complain |= (used[i] & 2) || g_s != 0;
    }
    __syncthreads();
    for (int e = threadIdx.x, at = 0; e < k * k; e += blockDim.x, ++at) of_q[e / k * ld + e % k] = inner[at];
    __syncthreads();
    for (int e = threadIdx.x; e < k * k; e += blockDim.x) {
        const int i = e / k, j = e % k;
        REAL sum = 0;
        for (int r = 0; r < k; ++r) sum += basis(r, i) * of_q[r * ld + j];
        left[i * ld + j] = sum;
    }
    __syncthreads();
    // of_v is read again only if a singular value is zero; of_q becomes Q diag(1/s)
    for (int e = threadIdx.x; e < k * k; e += blockDim.x) of_q[e / k * ld + e % k] = basis(e % k, e / k) * inverse[e % k];
    const Entries<IN> result = layout.entries(out);
    const int near_zero = gauge >= 0 && l > k && g_v != nullptr && s[k - 1] <= tied;
    for (int start = 0; start < l; start += CHUNK) {
        __syncthreads();
        load_columns(tile, rows, (REAL)1, start, k, ldt);
        if (g_v != nullptr) load_columns(g_tile, g_rows, (REAL)1, start, k, ldt);
        __syncthreads();
        for (int r = 4 * warp; r < k; r += 4 * warps) {
            REAL sum[4][2] = {{0, 0}, {0, 0}, {0, 0}, {0, 0}};
            const REAL *first[4], *second[4];
            UNROLL for (int p = 0; p < 4; ++p) {
                first[p] = left + (r + p < k ? r + p : k - 1) * ld;
                second[p] = of_q + (r + p < k ? r + p : k - 1) * ld;
            }
            multiply_rows(sum, first, 1, tile, ldt, k);
            if (g_v != nullptr && l > k) multiply_rows(sum, second, 1, g_tile, ldt, k);
            UNROLL for (int p = 0; p < 4; ++p) {
                if (r + p < k && start + lane < l) result(r + p, start + lane) = (IN)sum[p][0];
                if (r + p < k && start + lane + 32 < l) result(r + p, start + lane + 32) = (IN)sum[p][1];
            }
        }
        for (int e = threadIdx.x; near_zero && e < CHUNK * k; e += blockDim.x) {
            const int c = e / k, j = e % k;
            if (start + c >= l || s[j] > tied) continue;
            REAL outside = g_tile[c * ldt + j];
            for (int i = 0; i < k; ++i) outside -= of_v[i * ld + j] * tile[c * ldt + i];
            complain |= fabs(outside) > gauge * size;
        }
    }
    if (complain && flag != nullptr) *flag = 1;
}
