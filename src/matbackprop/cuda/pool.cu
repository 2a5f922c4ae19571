// Second-order pooling C = g(F^T F + eps I) of features F (m, d) with a side n <= 64: n = m < d with THIN 1, n = d <= m with
// THIN 0. IN is the type of F, OUT that of C and G (float or double). eps is a scalar, or one number per matrix.
//
// X (n, length) is F or its transpose, A (n, d) is Y or Q^T, and weights, rest and table are g and its divided differences:
//
//   X X^T = Q diag(s) Q^T,  Y = Q^T X,  lambda = s + eps
//   C = rest I + A^T diag(weights) A
//   dL/dX = 2 Q ((table o (T A^T))^T Y [+ diag(weights) T]),  T = A (G + G^T)/2

#include "jacobi.cuh"
#include "pool_forms.cuh"
#include "product.cuh"
#include "rows.cuh"
#include "separate.cuh"

#define TERMS (1 + THIN)  // blocks of rows in the gradient: Y, and T in the thin form

// X as a view of F
__device__ __forceinline__ Rows<IN> rows_of(const IN* f, int n, int length) {
    return THIN ? Rows<IN>{f, length, length, 1} : Rows<IN>{f, length, 1, n};
}

// --- forward ---------------------------------------------------------------------------------------------------------

// F (batch, m, d) -> s and weights (batch, n), Q^T (batch, n, n), eigenvectors in rows, Y = Q^T X (batch, n, length). One block per
// matrix.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    pool_spectrum(const IN* __restrict__ f, const REAL* __restrict__ all_eps, double one_eps,
                  REAL* __restrict__ out_values, REAL* __restrict__ out_weights, REAL* out_vectors, REAL* out_y, int n,
                  int length) {
    const Sizes z(n);
    const Rows<IN> rows = rows_of(f + (long long)blockIdx.x * n * length, n, length);
    const GramMemory memory(n, z);
    REAL* values = memory.values;
    const REAL eps = all_eps ? all_eps[blockIdx.x] : (REAL)one_eps;
    out_values += (long long)blockIdx.x * n;
    out_weights += (long long)blockIdx.x * n;
    out_vectors += (long long)blockIdx.x * n * n;
    out_y += (long long)blockIdx.x * n * length;
    decompose_gram(rows, (REAL)1, memory, out_vectors, out_y, n, z);
    // An outlier in F makes the small eigenvalues of the Gram matrix inaccurate and mixes their eigenvectors; recompute from Y.
    Extremes extremes(values, n);
    if (extremes.largest > (REAL)SAFE_RATIO * (REAL)OVERLAP * (extremes.smallest + eps)) {
        separate({out_y, length, length, 1}, {out_vectors, n, n, 1}, nullptr, eps, (REAL)OVERLAP, n, memory.v);
        squared_norms(out_y, values, n, length, memory.v);
        extremes = Extremes(values, n);
    }
    // A direction at rounding level, sigma <= length eps sigma_max, is noise that 1/eps would amplify: drop it.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const REAL level = (REAL)NOISE * length, floor_value = level * level * extremes.largest;
    for (int r = warp; r < n; r += warps) {
        const bool noise = values[r] <= floor_value;
        const REAL s = noise ? (REAL)0 : values[r];
        for (int k = lane; noise && k < length; k += 32) out_y[(long long)r * length + k] = 0;
        if (lane == 0) {
            out_values[r] = s;
            out_weights[r] = form_weight(s, eps);
        }
    }
}

// C = rest I + A^T diag(weights) A. Grid (batch, pairs of tiles).
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
    pool_output(const REAL* __restrict__ a, const REAL* __restrict__ weights, const REAL* __restrict__ all_eps,
                double one_eps, OUT* __restrict__ c, int n, int d) {
    __shared__ REAL left[DEPTH * LDT], right[DEPTH * LDT];
    int row = 0, column = blockIdx.y;  // tile (row, column) of the lower triangle
    while (column > row) {
        ++row;
        column -= row;
    }
    row *= TILE;
    column *= TILE;
    a += (long long)blockIdx.x * n * d;
    weights += (long long)blockIdx.x * n;
    c += (long long)blockIdx.x * d * d;
    ProductTile tile;
    REAL slot_l[SLOTS], slot_r[SLOTS];
    for (int start = 0; start < n; start += DEPTH) {
        fetch_rows(slot_l, a, start, n, row, d);
        fetch_rows(slot_r, a, start, n, column, d);
        UNROLL for (int e = 0; e < SLOTS; ++e) {
            const int k = start + (threadIdx.x + e * PRODUCT_THREADS) / TILE;
            slot_l[e] *= k < n ? weights[k] : (REAL)0;
        }
        __syncthreads();
        store_rows(left, slot_l);
        store_rows(right, slot_r);
        __syncthreads();
        tile.add(left, right);
    }
    const REAL rest = form_rest(all_eps ? all_eps[blockIdx.x] : (REAL)one_eps);
    tile.each([&](int i, int j, REAL value) {
        i += row;
        j += column;
        if (i < d && j <= i) {
            const OUT entry = (OUT)(value + (i == j ? rest : (REAL)0));
            c[(long long)i * d + j] = entry;
            c[(long long)j * d + i] = entry;
        }
    });
}

// --- backward --------------------------------------------------------------------------------------------------------

// T = A (G + G^T)/2, (batch, n, d). Grid (batch, tiles of columns).
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
    pool_project(const REAL* __restrict__ a, const OUT* __restrict__ g, REAL* __restrict__ t, int n, int d) {
    __shared__ REAL left[DEPTH * LDT], right[DEPTH * LDT];
    const int column = blockIdx.y * TILE;
    a += (long long)blockIdx.x * n * d;
    t += (long long)blockIdx.x * n * d;
    g += (long long)blockIdx.x * d * d;
    ProductTile tile;
    REAL slot_a[SLOTS];
    OUT slot_g[SLOTS], slot_m[SLOTS];
    fetch_columns(slot_a, a, 0, 0, n, d);
    fetch_columns(slot_g, g, 0, column, d, d);
    fetch_rows(slot_m, g, 0, d, column, d);
    for (int start = 0; start < d; start += DEPTH) {
        store_columns(left, slot_a);
        store_columns(right, slot_g);
        __syncthreads();
        UNROLL for (int e = 0; e < SLOTS; ++e) {
            const int entry = threadIdx.x + e * PRODUCT_THREADS, where = entry / TILE * LDT + entry % TILE;
            right[where] = (REAL)0.5 * (right[where] + (REAL)slot_m[e]);
        }
        const int following = start + DEPTH;  // prefetched while the tensor cores compute
        if (following < d) {
            fetch_columns(slot_a, a, following, 0, n, d);
            fetch_columns(slot_g, g, following, column, d, d);
            fetch_rows(slot_m, g, following, d, column, d);
        }
        __syncthreads();
        if (ProductTile::row() < n) tile.add(left, right);
        __syncthreads();
    }
    tile.each([&](int i, int j, REAL value) {
        if (i < n && column + j < d) t[(long long)i * d + column + j] = value;
    });
}

// mixing (batch, TERMS n, n): 2 (table o (T A^T)) Q^T, below it 2 diag(weights) Q^T. Grid (batch); shared memory: n^2 numbers.
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
    pool_mixing(const REAL* __restrict__ a, const REAL* __restrict__ t, const REAL* __restrict__ values,
                const REAL* __restrict__ weights, const REAL* __restrict__ vectors, const REAL* __restrict__ all_eps,
                double one_eps, REAL* __restrict__ mixing, int n, int d) {
    __shared__ REAL left[DEPTH * LDT], right[DEPTH * LDT];
    REAL* inner = (REAL*)shared_memory;
    const REAL eps = all_eps ? all_eps[blockIdx.x] : (REAL)one_eps;
    a += (long long)blockIdx.x * n * d;
    t += (long long)blockIdx.x * n * d;
    values += (long long)blockIdx.x * n;
    weights += (long long)blockIdx.x * n;
    vectors += (long long)blockIdx.x * n * n;
    mixing += (long long)blockIdx.x * TERMS * n * n;
    ProductTile projected, mixed;
    REAL slot_l[SLOTS], slot_r[SLOTS];
    fetch_columns(slot_l, t, 0, 0, n, d);
    fetch_columns(slot_r, a, 0, 0, n, d);
    for (int start = 0; start < d; start += DEPTH) {
        store_columns(left, slot_l);
        store_columns(right, slot_r);
        __syncthreads();
        if (start + DEPTH < d) {
            fetch_columns(slot_l, t, start + DEPTH, 0, n, d);
            fetch_columns(slot_r, a, start + DEPTH, 0, n, d);
        }
        if (ProductTile::row() < n) projected.add(left, right);
        __syncthreads();
    }
    projected.each([&](int i, int j, REAL value) {
        if (i < n && j < n) inner[i * n + j] = 2 * value;
    });
    __syncthreads();
    // a separate loop, so that the table is not inlined for each entry of the tile
    for (int e = threadIdx.x; e < n * n; e += PRODUCT_THREADS) inner[e] *= form_table(values[e / n], values[e % n], eps);
    for (int start = 0; start < n; start += DEPTH) {
        __syncthreads();
        fetch_columns(slot_l, inner, start, 0, n, n);
        fetch_rows(slot_r, vectors, start, n, 0, n);
        store_columns(left, slot_l);
        store_rows(right, slot_r);
        __syncthreads();
        if (ProductTile::row() < n) mixed.add(left, right);
    }
    mixed.each([&](int i, int j, REAL value) {
        if (i < n && j < n) mixing[i * n + j] = value;
    });
    for (int e = threadIdx.x; THIN && e < n * n; e += PRODUCT_THREADS) {
        mixing[n * n + e] = 2 * weights[e / n] * vectors[e];
    }
}

// dL/dX = mixing^T [Y; T], T in the thin form only; written in the layout of dL/dF. Grid (batch, tiles of columns).
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
    pool_gradient(const REAL* __restrict__ mixing, const REAL* __restrict__ y, const REAL* __restrict__ t,
                  IN* __restrict__ out, int n, int length) {
    __shared__ REAL left[DEPTH * LDT], right[DEPTH * LDT];
    const int column = blockIdx.y * TILE;
    const long long first = (long long)blockIdx.x * n * length;
    mixing += (long long)blockIdx.x * TERMS * n * n;
    const Rows<IN> x = rows_of(out, n, length);
    ProductTile tile;
    REAL slot_l[SLOTS], slot_r[SLOTS];
    for (int term = 0; term < TERMS; ++term) {
        for (int start = 0; start < n; start += DEPTH) {
            fetch_rows(slot_l, mixing + term * n * n, start, n, 0, n);
            fetch_rows(slot_r, (term ? t : y) + first, start, n, column, length);
            __syncthreads();
            store_rows(left, slot_l);
            store_rows(right, slot_r);
            __syncthreads();
            if (ProductTile::row() < n) tile.add(left, right);
        }
    }
    tile.each([&](int i, int j, REAL value) {
        j += column;
        if (i < n && j < length) out[first + (long long)i * x.next + (long long)j * x.step] = (IN)value;
    });
}
