// The normalized-cut objectives J2 and soft for a batch of images.
//
// Rows of F with a label outside 0 ... k - 1 are ignored. An image may have several consecutive labelings. Optional row
// weights have shape (images / labelings, rows). With C = F^T F, S the sums of F over regions and N the region sizes, all
// weighted:
//   P = C^+ (J2) or (C + mu I)^-1, mu = ridge tr(C) / d (soft),  A = N^-1 S P,  T = S^T N^-1 S
//   J2 = (rank + regions)/2 - tr(P T),  soft = (tr(PCPC) + regions)/2 - tr(P T),  dJ/dF = 2 (F Q - A[label])
//   Q = PTP (J2) or PCP + Z + (ridge/d) tr(Z) I with Z = PTP - PCPCP (soft)

#include "jacobi.cuh"
#include "product.cuh"

// partial (images, pieces, d + k, d + 1): [F | E]^T [F | 1] over a piece of the rows. Grid (images, pieces, tiles of d + k).
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
    cut_sums(const IN* __restrict__ f, const long long* __restrict__ labels, const REAL* __restrict__ weights,
             REAL* __restrict__ partial, int m, int d, int k, int piece, int labelings) {
    __shared__ REAL left[DEPTH * LDT], right[DEPTH * LDT];
    f += (long long)(blockIdx.x / labelings) * m * d;
    labels += (long long)blockIdx.x * m;
    if (weights) weights += (long long)(blockIdx.x / labelings) * m;
    partial += (long long)(blockIdx.x * gridDim.y + blockIdx.y) * (d + k) * (d + 1);
    const int top = blockIdx.z * TILE, first = blockIdx.y * piece;
    const int end = first + piece < m ? first + piece : m;
    ProductTile tile;
    IN slot_l[SLOTS], slot_r[SLOTS];
    REAL slot_weight[SLOTS];
    int slot_label[SLOTS];
    const auto fetch = [&](int start) {
#pragma unroll
        for (int e = 0; e < SLOTS; ++e) {
            const int entry = threadIdx.x + e * PRODUCT_THREADS, row = start + entry / TILE, i = entry % TILE;
            slot_label[e] = -1;
            slot_weight[e] = 1;
            slot_l[e] = slot_r[e] = 0;
            if (row < end) {
                const long long label = labels[row];
                if (label >= 0 && label < k) slot_label[e] = (int)label;
                if (weights) slot_weight[e] = weights[row];
                if (i < d) slot_r[e] = f[(long long)row * d + i];
                if (top + i < d) slot_l[e] = f[(long long)row * d + top + i];
            }
        }
    };
    fetch(first);
    for (int start = first; start < end; start += DEPTH) {
#pragma unroll
        for (int e = 0; e < SLOTS; ++e) {
            const int entry = threadIdx.x + e * PRODUCT_THREADS, i = entry % TILE, where = entry / TILE * LDT + i;
            const bool counts = slot_label[e] >= 0;
            const REAL indicator = slot_label[e] == top + i - d;
            left[where] = !counts ? (REAL)0 : slot_weight[e] * (top + i < d ? (REAL)slot_l[e] : indicator);
            right[where] = !counts ? (REAL)0 : i < d ? (REAL)slot_r[e] : (REAL)(i == d);
        }
        __syncthreads();
        if (start + DEPTH < end) fetch(start + DEPTH);  // prefetched while the tensor cores compute
        tile.add(left, right);
        __syncthreads();
    }
    tile.each([&](int i, int j, REAL value) {
        if (top + i < d + k && j <= d) partial[(long long)(top + i) * (d + 1) + j] = value;
    });
}

// sums (images, d + k, d + 1), A (images, k, d), terms (images, k, 2) and Q (images, d, d) are written and read back; value
// (images). ridge <= 0 selects J2. Grid (images).
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    cut_solve(const REAL* __restrict__ partial, REAL* sums, REAL* a_out, REAL* terms, REAL* q_out, IN* __restrict__ value,
              double ridge, double tol, int pieces, int d, int k) {
    const Sizes z(d);
    const int entries = (d + k) * (d + 1);
    Rotation* rotations = (Rotation*)shared_memory;
    REAL* a = (REAL*)shared_memory + z.rotations;
    REAL* v = a + z.players * z.ld;
    REAL* values = v + (d * z.ldv > blockDim.x ? d * z.ldv : blockDim.x);
    REAL* inverse = values + z.players;
    REAL* common = inverse + z.players;  // mu, rank, trace of P T P, sum of terms, regions
    int* order = (int*)(common + 5);
    partial += (long long)blockIdx.x * pieces * entries;
    sums += (long long)blockIdx.x * entries;
    a_out += (long long)blockIdx.x * k * d;
    terms += (long long)blockIdx.x * k * 2;
    q_out += (long long)blockIdx.x * d * d;
    for (int e = threadIdx.x; e < entries; e += blockDim.x) {
        REAL sum = 0;
#pragma unroll 8
        for (int piece = 0; piece < pieces; ++piece) sum += partial[(long long)piece * entries + e];
        sums[e] = sum;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < z.players * z.ld; e += blockDim.x) {
        const int i = e / z.ld, j = e % z.ld;
        a[e] = (i < d && j < d) ? sums[(i > j ? i : j) * (d + 1) + (i > j ? j : i)] : 0;
    }
    __syncthreads();
    const bool converged = jacobi(a, v, rotations, values, order, d, z);
    const REAL nan_or_one = converged ? (REAL)1 : (REAL)nan("");
    if (threadIdx.x == 0) {
        REAL trace = 0;
        for (int r = 0; r < d; ++r) trace += values[r];
        const REAL mu = (REAL)ridge * trace / d;
        int rank = 0;
        for (int r = 0; r < d; ++r) {
            const bool kept = ridge > 0 ? trace > 0 : values[r] > (REAL)tol * values[d - 1] && values[r] > 0;
            inverse[r] = kept ? 1 / (ridge > 0 ? values[r] + mu : values[r]) : 0;
            rank += kept;
        }
        common[0] = mu;
        common[1] = rank;
    }
    __syncthreads();
    REAL* p = a;  // the matrix is no longer needed
    for (int e = threadIdx.x; e < d * d; e += blockDim.x) {
        const int i = e / d, j = e % d;
        REAL sum = 0;
        for (int r = 0; r < d; ++r) sum += v[i * z.ldv + order[r]] * inverse[r] * v[j * z.ldv + order[r]];
        p[e] = sum * nan_or_one;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < k * d; e += blockDim.x) {
        const REAL* row = sums + (d + e / d) * (d + 1);
        REAL sum = 0;
        for (int i = 0; i < d; ++i) sum += row[i] * p[i * d + e % d];
        a_out[e] = row[d] > 0 ? sum / row[d] : 0;
    }
    __syncthreads();
    for (int j = threadIdx.x; j < k; j += blockDim.x) {
        const REAL* row = sums + (d + j) * (d + 1);
        REAL aligned = 0, square = 0;
        for (int i = 0; i < d; ++i) {
            aligned += row[i] * a_out[j * d + i];
            square += a_out[j * d + i] * a_out[j * d + i];
        }
        terms[2 * j] = aligned;
        terms[2 * j + 1] = square * row[d];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        REAL aligned = 0, trace = 0;
        int regions = 0;
        for (int j = 0; j < k; ++j) {
            aligned += terms[2 * j];
            trace += terms[2 * j + 1];
            regions += sums[(d + j) * (d + 1) + d] > 0;
        }
        REAL square_norm = common[1];
        if (ridge > 0) {
            square_norm = 0;
            for (int r = 0; r < d; ++r) {
                const REAL fraction = values[r] * inverse[r];
                square_norm += fraction * fraction;
                trace -= fraction * fraction * inverse[r];
            }
        }
        common[2] = (REAL)ridge / d * trace;
        value[blockIdx.x] = (IN)((REAL)0.5 * (square_norm + regions) - aligned);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < d * d; e += blockDim.x) {
        const int i = e / d, c = e % d;
        REAL sum = 0;
        for (int j = 0; j < k; ++j) sum += sums[(d + j) * (d + 1) + d] * a_out[j * d + i] * a_out[j * d + c];
        if (ridge > 0) {
            for (int r = 0; r < d; ++r) {
                const REAL fraction = values[r] * inverse[r];
                sum += v[i * z.ldv + order[r]] * (fraction * inverse[r] * (1 - fraction)) * v[c * z.ldv + order[r]];
            }
            if (i == c) sum += common[2];
        }
        q_out[e] = sum;
    }
}

// dL/dF = 2 g w (F Q - A[label]). Grid (images, tiles of 64 rows); shared memory for Q and a tile of F.
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
    cut_gradient(const IN* __restrict__ f, const long long* __restrict__ labels, const REAL* __restrict__ weights,
                 const REAL* __restrict__ a, const REAL* __restrict__ q, const IN* __restrict__ g, IN* __restrict__ out,
                 int m, int d, int k, int labelings) {
    REAL* q_tile = (REAL*)shared_memory;
    REAL* f_tile = q_tile + d * d;
    const int first = blockIdx.y * TILE, rows = first + TILE < m ? TILE : m - first;
    const REAL twice = 2 * (REAL)g[blockIdx.x];
    f += ((long long)(blockIdx.x / labelings) * m + first) * d;
    out += ((long long)blockIdx.x * m + first) * d;
    labels += (long long)blockIdx.x * m + first;
    if (weights) weights += (long long)(blockIdx.x / labelings) * m + first;
    a += (long long)blockIdx.x * k * d;
    q += (long long)blockIdx.x * d * d;
    for (int e = threadIdx.x; e < d * d; e += PRODUCT_THREADS) q_tile[e] = q[e];
    for (int e = threadIdx.x; e < rows * d; e += PRODUCT_THREADS) f_tile[e] = (REAL)f[e];
    __syncthreads();
    for (int e = threadIdx.x; e < rows * d; e += PRODUCT_THREADS) {
        const int row = e / d, c = e % d;
        const long long label = labels[row];
        REAL sum = 0;
        if (label >= 0 && label < k) {
            for (int i = 0; i < d; ++i) sum += f_tile[row * d + i] * q_tile[i * d + c];
            sum = twice * (weights ? weights[row] : (REAL)1) * (sum - a[label * d + c]);
        }
        out[e] = (IN)sum;
    }
}
