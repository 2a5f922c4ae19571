// Second-order pooling in its thin dual form, for small m. Appended to jacobi.cu, separate.cu, rows.cu and product.cu; IN is
// the type of F, C and G (float or double), FUNCTION is LOG, SQRT, INV_SQRT or INVERSE, WIDE the ratio of eigenvalues above which rows of Y are looked at, MIXED what is left of overlaps. eps is one number, or one of each matrix.
//
//   K = F F^T = U diag(s) U^T,  Y = U^T F,  lambda = s + eps
//   C = g(eps) I + Y^T diag(g[lambda_i, eps]) Y
//   dL/dF = 2 U (diag(g[lambda_i, eps]) Y G + (g[lambda_i, lambda_j, eps] o (Y G Y^T)) Y),  G symmetric


#define SERIES 26  // terms for the second difference of log where 0.2^SERIES is below eps

__device__ __forceinline__ REAL function_value(REAL x) {
#if FUNCTION == LOG
    return log(x);
#elif FUNCTION == SQRT
    return sqrt(x);
#elif FUNCTION == INV_SQRT
    return 1 / sqrt(x);
#else
    return 1 / x;
#endif
}

// g[x, y] for x >= y > 0
__device__ __forceinline__ REAL first_difference(REAL x, REAL y) {
#if FUNCTION == LOG
    const REAL gap = x - y;
    return gap == 0 ? 1 / y : log1p(gap / y) / gap;
#elif FUNCTION == SQRT
    return 1 / (sqrt(x) + sqrt(y));
#elif FUNCTION == INV_SQRT
    const REAL a = sqrt(x), b = sqrt(y);
    return -1 / (a * b * (a + b));
#else
    return -1 / (x * y);
#endif
}

// g[x, y, z] for x, y >= z > 0
__device__ __forceinline__ REAL second_difference(REAL x, REAL y, REAL z) {
    if (x < y) {
        const REAL swap = x;
        x = y;
        y = swap;
    }
#if FUNCTION == LOG
    if (x > (REAL)1.5 * z) return (first_difference(x, y) - first_difference(y, z)) / (x - z);
    const REAL center = (REAL)0.5 * (x + z);
    const REAL u = (x - center) / center, v = (y - center) / center, w = (z - center) / center;
    REAL one = 1, two = 1, three = 1, sign = -1, sum = (REAL)-0.5;  // complete homogeneous polynomials of u; u, v; u, v, w
    for (int j = 1; j < SERIES; ++j) {
        one *= u;
        two = two * v + one;
        three = three * w + two;
        sign = -sign;
        sum += sign * three / (j + 2);
    }
    return sum / (center * center);
#elif FUNCTION == SQRT
    const REAL a = sqrt(x), b = sqrt(y), c = sqrt(z);
    return -1 / ((a + b) * (b + c) * (a + c));
#elif FUNCTION == INV_SQRT
    const REAL a = sqrt(x), b = sqrt(y), c = sqrt(z);
    return (a + b + c) / (a * b * c * (a + b) * (b + c) * (a + c));
#else
    return 1 / (x * y * z);
#endif
}

// --- forward ---------------------------------------------------------------------------------------------------------

// F (batch, m, d) -> s (batch, m), slope g[s + eps, eps] (batch, m), U (batch, m, m) in columns, Y = U^T F (batch, m, d).
// One block per matrix.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    pool_spectrum(const IN* __restrict__ f, const REAL* __restrict__ all_eps, double one_eps,
                  REAL* __restrict__ out_values,
                  REAL* __restrict__ out_slopes, REAL* out_vectors, REAL* out_y, int m, int d) {
    const Sizes z(m);
    const Rows<IN> rows = {f + (long long)blockIdx.x * m * d, d, d, 1};
    const int ldt = z.players + 2, square = z.players * z.ld;
    const int front = z.rotations + square > CHUNK * ldt ? z.rotations + square : CHUNK * ldt;
    int back = m * z.ldv > blockDim.x ? m * z.ldv : blockDim.x;
    back = back > CHUNK * ldt ? back : CHUNK * ldt;
    Rotation* rotations = (Rotation*)shared_memory;
    REAL* tile = (REAL*)shared_memory;
    REAL* a = tile + z.rotations;
    REAL* v = tile + front;
    REAL* values = v + back;
    int* order = (int*)(values + z.players);
    const REAL eps = all_eps ? all_eps[blockIdx.x] : (REAL)one_eps;
    out_values += (long long)blockIdx.x * m;
    out_slopes += (long long)blockIdx.x * m;
    out_vectors += (long long)blockIdx.x * m * m;
    out_y += (long long)blockIdx.x * m * d;
    for (int e = threadIdx.x; e < square; e += blockDim.x) a[e] = 0;
    gram(rows, (REAL)1, v, a, m, z);
    jacobi(a, v, rotations, values, order, m, z);
    for (int e = threadIdx.x; e < m * m; e += blockDim.x) out_vectors[e] = v[e / m * z.ldv + order[e % m]];
    project(rows, (REAL)1, tile, v, order, out_y, m, z);
    squared_norms(out_y, values, m, d, v);
    // With an outlier in F the Gram matrix has lost the small eigenvalues and their eigenvectors are mixed; Y has them.
    REAL largest = 0, smallest = (REAL)REAL_MAX;
    for (int r = 0; r < m; ++r) {
        largest = values[r] > largest ? values[r] : largest;
        smallest = values[r] < smallest ? values[r] : smallest;
    }
    if (largest > (REAL)WIDE * (smallest + eps)) {
        separate({out_y, d, d, 1}, {out_vectors, m, 1, m}, nullptr, eps, (REAL)MIXED, m, v);
        squared_norms(out_y, values, m, d, v);
        largest = 0;
        for (int r = 0; r < m; ++r) largest = values[r] > largest ? values[r] : largest;
    }
    // A direction at rounding level, sigma <= max(m, d) eps sigma_max, is noise that 1/eps would lift: it is left out.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const REAL level = (REAL)REAL_EPS * (m > d ? m : d), floor_value = level * level * largest;
    for (int r = warp; r < m; r += warps) {
        const bool noise = values[r] <= floor_value;
        const REAL s = noise ? (REAL)0 : values[r];
        for (int k = lane; noise && k < d; k += 32) out_y[(long long)r * d + k] = 0;
        if (lane == 0) {
            out_values[r] = s;
            out_slopes[r] = first_difference(s + eps, eps);
        }
    }
}

// C = g(eps) I + Y^T diag(slopes) Y. Grid (batch, pairs of tiles).
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
    pool_output(const REAL* __restrict__ y, const REAL* __restrict__ slopes, const REAL* __restrict__ all_eps,
                double one_eps, IN* __restrict__ c, int m, int d) {
    __shared__ REAL left[DEPTH * LDT], right[DEPTH * LDT];
    int row = 0, column = blockIdx.y;  // tile (row, column) of the lower triangle
    while (column > row) {
        ++row;
        column -= row;
    }
    row *= TILE;
    column *= TILE;
    y += (long long)blockIdx.x * m * d;
    slopes += (long long)blockIdx.x * m;
    c += (long long)blockIdx.x * d * d;
    Share share;
    REAL slot_l[SLOTS], slot_r[SLOTS];
    for (int start = 0; start < m; start += DEPTH) {
        fetch_rows(slot_l, y, start, m, row, d);
        fetch_rows(slot_r, y, start, m, column, d);
#pragma unroll
        for (int e = 0; e < SLOTS; ++e) {
            const int k = start + (threadIdx.x + e * PRODUCT_THREADS) / TILE;
            slot_l[e] *= k < m ? slopes[k] : (REAL)0;
        }
        __syncthreads();
        store_rows(left, slot_l);
        store_rows(right, slot_r);
        __syncthreads();
        share.add(left, right);
    }
    const REAL at_eps = function_value(all_eps ? all_eps[blockIdx.x] : (REAL)one_eps);
    share.each([&](int i, int j, REAL value) {
        i += row;
        j += column;
        if (i < d && j <= i) {
            const IN entry = (IN)(value + (i == j ? at_eps : (REAL)0));
            c[(long long)i * d + j] = entry;
            c[(long long)j * d + i] = entry;
        }
    });
}

// --- backward --------------------------------------------------------------------------------------------------------

// T = Y (G + G^T)/2, (batch, m, d). Grid (batch, tiles of columns).
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
    pool_project(const REAL* __restrict__ y, const IN* __restrict__ g, REAL* __restrict__ t, int m, int d) {
    __shared__ REAL left[DEPTH * LDT], right[DEPTH * LDT];
    const int column = blockIdx.y * TILE;
    y += (long long)blockIdx.x * m * d;
    t += (long long)blockIdx.x * m * d;
    g += (long long)blockIdx.x * d * d;
    Share share;
    REAL slot_y[SLOTS];
    IN slot_g[SLOTS], slot_m[SLOTS];
    fetch_columns(slot_y, y, 0, 0, m, d);
    fetch_columns(slot_g, g, 0, column, d, d);
    fetch_rows(slot_m, g, 0, d, column, d);
    for (int start = 0; start < d; start += DEPTH) {
        store_columns(left, slot_y);
        store_columns(right, slot_g);
        __syncthreads();
#pragma unroll
        for (int e = 0; e < SLOTS; ++e) {
            const int entry = threadIdx.x + e * PRODUCT_THREADS, where = entry / TILE * LDT + entry % TILE;
            right[where] = (REAL)0.5 * (right[where] + (REAL)slot_m[e]);
        }
        const int following = start + DEPTH;  // on its way while the tensor cores work
        if (following < d) {
            fetch_columns(slot_y, y, following, 0, m, d);
            fetch_columns(slot_g, g, following, column, d, d);
            fetch_rows(slot_m, g, following, d, column, d);
        }
        __syncthreads();
        if (Share::row() < m) share.add(left, right);
        __syncthreads();
    }
    share.each([&](int i, int j, REAL value) {
        if (i < m && column + j < d) t[(long long)i * d + column + j] = value;
    });
}

// mixing (batch, 2m, m), transposed: 2 [U diag(slopes) | U (g[lambda_i, lambda_j, eps] o T Y^T)], dL/dF = mixing [T; Y].
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
    pool_mixing(const REAL* __restrict__ y, const REAL* __restrict__ t, const REAL* __restrict__ values,
                const REAL* __restrict__ slopes, const REAL* __restrict__ vectors, const REAL* __restrict__ all_eps,
                double one_eps, REAL* __restrict__ mixing, int m, int d) {
    __shared__ REAL left[DEPTH * LDT], right[DEPTH * LDT];
    REAL* w = (REAL*)shared_memory;  // (m, m | 1), then U in the same shape
    const int ld = m | 1;
    REAL* u = w + m * ld;
    const REAL eps = all_eps ? all_eps[blockIdx.x] : (REAL)one_eps;
    y += (long long)blockIdx.x * m * d;
    t += (long long)blockIdx.x * m * d;
    values += (long long)blockIdx.x * m;
    slopes += (long long)blockIdx.x * m;
    vectors += (long long)blockIdx.x * m * m;
    mixing += (long long)blockIdx.x * 2 * m * m;
    for (int e = threadIdx.x; e < m * m; e += PRODUCT_THREADS) u[e / m * ld + e % m] = vectors[e];
    Share share;
    REAL slot_t[SLOTS], slot_y[SLOTS];
    fetch_columns(slot_t, t, 0, 0, m, d);
    fetch_columns(slot_y, y, 0, 0, m, d);
    for (int start = 0; start < d; start += DEPTH) {
        store_columns(left, slot_t);
        store_columns(right, slot_y);
        __syncthreads();
        if (start + DEPTH < d) {
            fetch_columns(slot_t, t, start + DEPTH, 0, m, d);
            fetch_columns(slot_y, y, start + DEPTH, 0, m, d);
        }
        if (Share::row() < m) share.add(left, right);
        __syncthreads();
    }
    share.each([&](int i, int j, REAL value) {
        if (i < m && j < m) w[i * ld + j] = value;
    });
    __syncthreads();
    for (int e = threadIdx.x; e < m * m; e += PRODUCT_THREADS) {
        const int i = e / m, j = e % m;
        if (j <= i) {
            const REAL entry = w[i * ld + j] * second_difference(values[i] + eps, values[j] + eps, eps);
            w[i * ld + j] = entry;
            w[j * ld + i] = entry;
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < m * m; e += PRODUCT_THREADS) {
        const int j = e / m, i = e % m;
        REAL sum = 0;
        for (int k = 0; k < m; ++k) sum += u[i * ld + k] * w[k * ld + j];
        mixing[(m + j) * m + i] = 2 * sum;
        mixing[j * m + i] = 2 * u[i * ld + j] * slopes[j];
    }
}

// dL/dF = mixing [T; Y]. Grid (batch, tiles of columns).
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
    pool_gradient(const REAL* __restrict__ mixing, const REAL* __restrict__ t, const REAL* __restrict__ y,
                  IN* __restrict__ out, int m, int d) {
    __shared__ REAL left[DEPTH * LDT], right[DEPTH * LDT];
    const int column = blockIdx.y * TILE;
    mixing += (long long)blockIdx.x * 2 * m * m;
    t += (long long)blockIdx.x * m * d;
    y += (long long)blockIdx.x * m * d;
    out += (long long)blockIdx.x * m * d;
    Share share;
    REAL slot_l[SLOTS], slot_r[SLOTS];
    for (int part = 0; part < 2; ++part) {
        for (int start = 0; start < m; start += DEPTH) {
            fetch_rows(slot_l, mixing + part * m * m, start, m, 0, m);
            fetch_rows(slot_r, part ? y : t, start, m, column, d);
            __syncthreads();
            store_rows(left, slot_l);
            store_rows(right, slot_r);
            __syncthreads();
            if (Share::row() < m) share.add(left, right);
        }
    }
    share.each([&](int i, int j, REAL value) {
        if (i < m && column + j < d) out[(long long)i * d + column + j] = (IN)value;
    });
}
