// One-sided Jacobi: rotates the rows of Y = Q^T X, and the eigenvectors Q with them, until the rows are orthogonal
// relative to each row's norm. Also completes orthonormal rows. Compiled with REAL double, SAFE_RATIO and SEPARATED
// (refinement.py).

#include "jacobi.cuh"

#ifndef SEPARATION_SWEEPS
#define SEPARATION_SWEEPS 30
#endif
#define STRICT_SEPARATION 20  // sweeps after which rounding errors of inner products and rows of noise are accepted
#define CLEARINGS 3  // orthogonalizations of a new row; two leave rounding errors

// Vectors of some length: entry j of vector i is x[i * next + j * step].
struct Vectors {
    REAL* x;
    int length, next, step;
    __device__ REAL& operator()(int i, int j) const { return x[(long long)i * next + (long long)j * step]; }
};

__device__ __forceinline__ void rotate_vectors(const Vectors& v, int a, int b, REAL c, REAL s, int lane) {
    for (int j = lane; j < v.length; j += 32) {
        const REAL x = v(a, j), z = v(b, j);
        v(a, j) = c * x - s * z;
        v(b, j) = s * x + c * z;
    }
}

__device__ __forceinline__ REAL warp_total(REAL part, REAL* scratch, int lane) {
    scratch[lane] = part;
    __syncwarp();
    REAL sum = 0;
    for (int j = 0; j < 32; ++j) sum += scratch[j];
    __syncwarp();
    return sum;
}

// Separate the n rows of y and rotate the eigenvectors q. Only pairs above `limit` are rotated, then pairs with a rotated
// row. overlap is Y Y^T, or null if unknown. Rows and eigenvectors that do not converge become NaN. scratch: shared memory
// for 3 blockDim.x numbers and 2 n int; blockDim.x is a multiple of 32.
__device__ void separate(const Vectors& y, const Vectors& q, const REAL* overlap, REAL eps, REAL limit, int n,
                         REAL* scratch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int players = n + (n & 1);
    REAL* mine = scratch + 96 * warp;
    int* moved = (int*)(scratch + 3 * blockDim.x);  // rows rotated in this sweep, and in the previous one
    int* before = moved + n;
    for (int i = threadIdx.x; i < n; i += blockDim.x) before[i] = overlap == nullptr;
    REAL rest = limit / 10 > (REAL)SEPARATED ? limit / 10 : (REAL)SEPARATED;
    rest = rest < limit ? rest : limit;
    REAL noise = 0;  // squared norm of a row that is rounding error: many such rows in a small space never separate
    for (int sweep = 0; sweep < SEPARATION_SWEEPS; ++sweep) {
        REAL tolerance = sweep ? rest : limit;
        if (sweep >= STRICT_SEPARATION) {
            const REAL rounding = (REAL)REAL_EPS * sqrt((REAL)y.length);
            tolerance = 8 * (rest > rounding ? rest : rounding);
        }
        if (sweep == STRICT_SEPARATION) {
            REAL largest = 0;
            for (int i = 0; i < n; ++i) {
                REAL part = 0;
                for (int j = lane; j < y.length; j += 32) part += y(i, j) * y(i, j);
                const REAL squared = warp_total(part, mine, lane);
                largest = squared > largest ? squared : largest;
            }
            noise = largest * ((REAL)NOISE * y.length) * ((REAL)NOISE * y.length);
        }
        int turned = 0;
        for (int i = threadIdx.x; i < n; i += blockDim.x) moved[i] = 0;
        __syncthreads();
        for (int round = 0; round < players - 1; ++round) {
            for (int pair = warp; pair < players / 2; pair += warps) {
                // round-robin: the last index stays, the others advance by one in each round
                int a = pair == 0 ? players - 1 : (pair + round) % (players - 1);
                int b = (players - 1 - pair + round) % (players - 1);
                if (a > b) {
                    const int swap = a;
                    a = b;
                    b = swap;
                }
                if (b >= n) continue;
                if (!(moved[a] || moved[b] || before[a] || before[b])) {  // both rows are unchanged: use the overlap
                    if (sweep) continue;
                    const REAL ratio = overlap[a * n + b] / limit;
                    if (!(ratio * ratio > (overlap[a * n + a] + eps) * (overlap[b * n + b] + eps))) continue;
                }
                REAL aa = 0, bb = 0, ab = 0;
                for (int j = lane; j < y.length; j += 32) {
                    const REAL x = y(a, j), z = y(b, j);
                    aa += x * x;
                    bb += z * z;
                    ab += x * z;
                }
                mine[lane] = aa;
                mine[32 + lane] = bb;
                mine[64 + lane] = ab;
                __syncwarp();
                aa = bb = ab = 0;
                for (int j = 0; j < 32; ++j) {
                    aa += mine[j];
                    bb += mine[32 + j];
                    ab += mine[64 + j];
                }
                __syncwarp();
                if (aa <= noise || bb <= noise) continue;
                if (!(fabs(ab) > tolerance * sqrt(aa + eps) * sqrt(bb + eps))) continue;
                const REAL zeta = (bb - aa) / (2 * ab);
                const REAL t = (zeta < 0 ? (REAL)-1 : (REAL)1) / (fabs(zeta) + sqrt(1 + zeta * zeta));
                if (t == 0) continue;  // one row is below the rounding error of the other
                turned = 1;
                const REAL c = 1 / sqrt(1 + t * t), s = c * t;
                rotate_vectors(y, a, b, c, s, lane);
                rotate_vectors(q, a, b, c, s, lane);
                if (lane == 0) moved[a] = moved[b] = 1;
            }
            __syncthreads();
        }
        if (!__syncthreads_or(turned)) return;
        int* last = before;
        before = moved;
        moved = last;
    }
    for (int i = warp; i < n; i += warps) {
        for (int j = lane; j < y.length; j += 32) y(i, j) = (REAL)nan("");
        for (int j = lane; j < q.length; j += 32) q(i, j) = (REAL)nan("");
    }
    __syncthreads();
}

// Sum over the block; scratch: blockDim.x numbers of shared memory.
__device__ REAL block_total(REAL part, REAL* scratch) {
    __syncthreads();
    scratch[threadIdx.x] = part;
    __syncthreads();
    REAL sum = 0;
    for (int e = 0; e < blockDim.x; ++e) sum += scratch[e];
    __syncthreads();
    return sum;
}

// Rows of v with a positive sigma, n numbers, are orthonormal; the others are replaced by rows orthonormal to all. scratch:
// n + blockDim.x numbers of shared memory; blockDim.x is a multiple of 32.
__device__ void complete(const Vectors& v, const REAL* sigma, int n, REAL* scratch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    REAL* dots = scratch + blockDim.x;
    for (int r = 0; r < n; ++r) {
        if (!(sigma[r] <= 0)) continue;  // keep NaN
        // pseudo-random entries, not in the span of structured rows
        for (int j = threadIdx.x; j < v.length; j += blockDim.x) {
            const REAL number = (REAL)r * v.length + j + 1;
            v(r, j) = sin((REAL)0.7548776662466927 * number * number);
        }
        __syncthreads();
        for (int clearing = 0; clearing < CLEARINGS; ++clearing) {
            for (int i = warp; i < n; i += warps) {
                const bool there = i != r && (sigma[i] > 0 || i < r);
                REAL part = 0;
                for (int j = lane; there && j < v.length; j += 32) part += v(i, j) * v(r, j);
                scratch[threadIdx.x] = part;
                __syncwarp();
                if (lane == 0) {
                    for (int e = 1; e < 32; ++e) part += scratch[threadIdx.x + e];
                    dots[i] = part;
                }
                __syncwarp();
            }
            __syncthreads();
            REAL square = 0;
            for (int j = threadIdx.x; j < v.length; j += blockDim.x) {
                REAL entry = v(r, j);
                for (int i = 0; i < n; ++i) {
                    if (i != r && (sigma[i] > 0 || i < r)) entry -= dots[i] * v(i, j);
                }
                v(r, j) = entry;
                square += entry * entry;
            }
            const REAL norm = sqrt(block_total(square, scratch));
            for (int j = threadIdx.x; j < v.length; j += blockDim.x) v(r, j) /= norm;
            __syncthreads();
        }
    }
}
