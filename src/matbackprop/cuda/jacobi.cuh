// Parallel cyclic Jacobi for symmetric matrices of order n <= 64, one thread block per matrix, all in shared memory.
//
// A round rotates n/2 disjoint pairs of indices at once; n-1 rounds (a tournament) make a sweep. The block's first warps
// rotate A: each lane of the first warp computes the angle of one pair, each thread of the following warps updates one 2x2
// block (rows of pair i, columns of pair j). The other warps follow one sweep later and rotate the eigenvectors, whose rows
// need no barrier between warps.
// The angle is computed in float: a rotation has to be orthogonal to full precision, but its angle need not be exact.
// Compiled with REAL_IS_DOUBLE 0 or 1 and MAX_THREADS.

#if REAL_IS_DOUBLE
typedef double REAL;
#define REAL_EPS 2.220446049250313e-16
#define REAL_MAX 1.7e308
#define REAL_MAX_EXPONENT 1000
#else
typedef float REAL;
#define REAL_EPS 1.1920929e-07f
#define REAL_MAX 3.4e38f
#define REAL_MAX_EXPONENT 120
#endif

#define UNROLL _Pragma("unroll")
#define MAX_SWEEPS 24
#define STRICT_SWEEPS 12  // after them, rounding between equal diagonal entries is accepted
#define ROW_LANES 8   // lanes that share a row of eigenvectors
#define WARP_ROWS 4   // rows of eigenvectors that a warp holds: 32 / ROW_LANES
#define LANE_PAIRS 4  // pairs of a round that a lane rotates: 32 / ROW_LANES

struct __align__(2 * sizeof(REAL)) Rotation {
    REAL s, half;  // sine, and tangent of half the angle: c = 1 - s * half
};

// Sizes that follow from n: an odd n gets a dummy index whose row and column are zero.
struct Sizes {
    int players, half, rounds, ld, ldv, rotations, pairs_of_pairs, a_threads;
    __device__ explicit Sizes(int n) {
        players = n + (n & 1);
        half = players / 2;
        rounds = players - 1;
        ld = players | 1;
        ldv = (players + 7) / 16 * 16 + 8;  // the rows of a half warp are in different banks
        rotations = 4 * rounds * half;      // two sweeps of rotations, in REALs
        pairs_of_pairs = half * (half - 1) / 2;
        a_threads = 32 + (pairs_of_pairs + 31) / 32 * 32;
    }
};

__device__ __forceinline__ void group_barrier(int threads) {
#ifdef EMULATED
    emulated_barrier(threads);
#else
    asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
#endif
}

// Pair i in round 0 of the tournament; next() moves an index on to the following round.
__device__ __forceinline__ void first_pair(int i, int players, int& p, int& q) {
    p = i == 0 ? players - 1 : i;
    q = i == 0 ? 0 : players - 1 - i;
}

__device__ __forceinline__ int next(int p, int players) {
    if (p == players - 1) return p;
    return p + 1 == players - 1 ? 0 : p + 1;
}

__device__ __forceinline__ Rotation find_rotation(REAL app, REAL aqq, REAL apq, REAL tol) {
    Rotation r = {0, 0};
    if (fabs(apq) > tol) {
        const float b = (float)(2 * apq), d = (float)(aqq - app), square = d * d + b * b;
        float t = __fdividef(b, fabsf(d) + square * rsqrtf(square));
        if (d < 0) t = -t;
        // tan(x/2) = tan(x) * (sqrt(1 + u) - 1) / u, fitted on [0, 1], exact to float at 0
        const float u = t * t, v = u * u;
        const float series = (-0.12498942f + u * 0.06227684f) +
                             v * ((-0.03744914f + u * 0.02167327f) + v * (-0.00922925f + u * 0.00193139f));
        const float half = t * (0.5f + u * series);
        // s = 2 half / (1 + half^2): the reciprocal in float, corrected by (1 + e + e^2)
        r.half = (REAL)half;
        const REAL inverse = (REAL)__fdividef(1.0f, 1 + half * half);
        const REAL e = 1 - (1 + r.half * r.half) * inverse, first = 2 * r.half * inverse;
        r.s = first + first * (e + e * e);
    }
    return r;
}

__device__ __forceinline__ void rotate(const Rotation& r, REAL& x, REAL& y) {
    const REAL old = x;
    x -= r.s * (y + r.half * x);
    y += r.s * (old - r.half * y);
}

// A power of two near the largest of `count` entries; 0 if all are zero, NaN if one is not finite. scratch: blockDim.x.
template <typename T>
__device__ REAL matrix_scale(const T* a, int count, REAL* scratch) {
    REAL largest = 0;
    int bad = 0;
    for (int e = threadIdx.x; e < count; e += blockDim.x) {
        const REAL x = fabs((REAL)a[e]);
        if (!(x <= (REAL)REAL_MAX)) bad = 1;
        if (x > largest) largest = x;
    }
    scratch[threadIdx.x] = largest;
    bad = __syncthreads_or(bad);
    if (threadIdx.x < 32) {
        for (int e = threadIdx.x; e < blockDim.x; e += 32) largest = scratch[e] > largest ? scratch[e] : largest;
        scratch[threadIdx.x] = largest;
    }
    __syncthreads();
    for (int e = 0; e < 32; ++e) largest = scratch[e] > largest ? scratch[e] : largest;
    __syncthreads();
    if (bad) return (REAL)nan("");
    if (largest == 0) return 0;
    int exponent;
    frexp(largest, &exponent);
    if (exponent < -REAL_MAX_EXPONENT) exponent = -REAL_MAX_EXPONENT;  // its reciprocal has to be finite
    return ldexp((REAL)1, exponent - 1);
}

// One sweep over A by the first a_threads threads: the first warp computes the angles and rotates the diagonal, the others
// rotate the rest. Entries up to tol are not rotated. Returns whether one off the diagonal is still above `done`.
__device__ int sweep_matrix(REAL* a, Rotation* rotations, REAL tol, REAL done, const Sizes& z) {
    int unfinished = 0;
    if (threadIdx.x < 32) {
        const int pair = threadIdx.x;
        int p, q;
        first_pair(pair, z.players, p, q);
        for (int round = 0; round < z.rounds; ++round, rotations += z.half) {
            REAL app = 0, aqq = 0, apq = 0;
            Rotation r = {0, 0};
            if (pair < z.half) {
                app = a[p * z.ld + p];
                aqq = a[q * z.ld + q];
                apq = a[p * z.ld + q];
                r = find_rotation(app, aqq, apq, tol);
                rotations[pair] = r;
            }
            group_barrier(z.a_threads);
            if (pair < z.half) {
                REAL aqp = apq;
                rotate(r, app, apq);
                rotate(r, aqp, aqq);
                rotate(r, app, aqp);
                rotate(r, apq, aqq);
                a[p * z.ld + p] = app;
                a[q * z.ld + q] = aqq;
                a[p * z.ld + q] = apq;
                a[q * z.ld + p] = apq;
                if (round == z.rounds - 1 && fabs(apq) > done) unfinished = 1;
                p = next(p, z.players);
                q = next(q, z.players);
            }
            group_barrier(z.a_threads);
        }
        return unfinished;
    }
    const int id = threadIdx.x - 32;
    const bool owner = id < z.pairs_of_pairs;
    int i = 0, j = 0;  // rows i and half-2-i of the triangle of pairs form one row of `half` blocks
    if (owner) {
        i = id / z.half;
        j = id % z.half;
        if (j >= z.half - 1 - i) {
            j -= z.half - 1 - i;
            i = z.half - 2 - i;
        }
        j += i + 1;
    }
    int pi, qi, pj, qj;
    first_pair(i, z.players, pi, qi);
    first_pair(j, z.players, pj, qj);
    for (int round = 0; round < z.rounds; ++round, rotations += z.half) {
        REAL *row_p = a + pi * z.ld, *row_q = a + qi * z.ld, *mirror_p = a + pj * z.ld, *mirror_q = a + qj * z.ld;
        REAL x00 = 0, x01 = 0, x10 = 0, x11 = 0;
        if (owner) {  // no other thread writes these before the barrier
            x00 = row_p[pj];
            x01 = row_p[qj];
            x10 = row_q[pj];
            x11 = row_q[qj];
        }
        group_barrier(z.a_threads);
        if (owner) {
            const Rotation ri = rotations[i], rj = rotations[j];
            rotate(rj, x00, x01);
            rotate(rj, x10, x11);
            rotate(ri, x00, x10);
            rotate(ri, x01, x11);
            row_p[pj] = x00;
            row_p[qj] = x01;
            row_q[pj] = x10;
            row_q[qj] = x11;
            mirror_p[pi] = x00;
            mirror_q[pi] = x01;
            mirror_p[qi] = x10;
            mirror_q[qi] = x11;
            if (round == z.rounds - 1)
                unfinished = fabs(x00) > done || fabs(x01) > done || fabs(x10) > done || fabs(x11) > done;
            pi = next(pi, z.players);
            qi = next(qi, z.players);
            pj = next(pj, z.players);
            qj = next(qj, z.players);
        }
        group_barrier(z.a_threads);
    }
    return unfinished;
}

// Apply one sweep of rotations to the columns of v; warp `warp` of `warps` processes every warps-th group of rows.
__device__ void sweep_vectors(const Rotation* rotations, REAL* v, int n, int warp, int warps, const Sizes& z) {
    const int lane = threadIdx.x % 32, sub = lane % ROW_LANES;
    for (int group = warp; group * WARP_ROWS < n; group += warps) {
        const int row = group * WARP_ROWS + lane / ROW_LANES;
        REAL* x = v + row * z.ldv;
        int p[LANE_PAIRS], q[LANE_PAIRS];
        UNROLL for (int k = 0; k < LANE_PAIRS; ++k) first_pair(sub + ROW_LANES * k, z.players, p[k], q[k]);
        const Rotation* now = rotations + sub;
        for (int round = 0; round < z.rounds; ++round, now += z.half) {
            Rotation r[LANE_PAIRS];
            REAL left[LANE_PAIRS], right[LANE_PAIRS];
            UNROLL for (int k = 0; k < LANE_PAIRS; ++k) {
                if (row < n && sub + ROW_LANES * k < z.half) {
                    r[k] = now[ROW_LANES * k];
                    left[k] = x[p[k]];
                    right[k] = x[q[k]];
                }
            }
            UNROLL for (int k = 0; k < LANE_PAIRS; ++k) {
                if (row < n && sub + ROW_LANES * k < z.half) {
                    rotate(r[k], left[k], right[k]);
                    x[p[k]] = left[k];
                    x[q[k]] = right[k];
                    p[k] = next(p[k], z.players);
                    q[k] = next(q[k], z.players);
                }
            }
            __syncwarp();
        }
    }
}

// Diagonalize the symmetric `a` (players rows of ld entries; dummy and padding zero) in place. The columns of v (n rows of
// ldv entries, at least blockDim.x in total) receive the eigenvectors. `rotations` holds two sweeps. order[r] is the column
// of the r-th smallest eigenvalue, values[r] that eigenvalue. blockDim.x is a multiple of 32, above a_threads. If it did
// not converge, or an entry is not finite, values and vectors are NaN.
__device__ void jacobi(REAL* a, REAL* v, Rotation* rotations, REAL* values, int* order, int n, const Sizes& z) {
    const REAL scale = matrix_scale(a, z.players * z.ld, v);
    const bool finite = scale == scale;
    bool converged = scale == 0;
    const REAL inverse = converged ? (REAL)1 : 1 / scale;
    for (int e = threadIdx.x; e < z.players * z.ld; e += blockDim.x) a[e] *= inverse;
    for (int e = threadIdx.x; e < n * z.ldv; e += blockDim.x) v[e] = e / z.ldv == e % z.ldv ? 1 : 0;
    __syncthreads();
    const REAL tol = (REAL)0.125 * (REAL)REAL_EPS;
    const int warp = threadIdx.x / 32, a_warps = z.a_threads / 32, warps = blockDim.x / 32;
    const int size = z.rounds * z.half;
    int sweep = 0;
    for (; sweep < MAX_SWEEPS && finite && !converged; ++sweep) {
        int unfinished = 0;
        if (warp < a_warps) {
            const REAL done = sweep < STRICT_SWEEPS ? tol : 8 * (REAL)REAL_EPS;
            unfinished = sweep_matrix(a, rotations + sweep % 2 * size, tol, done, z);
        } else if (sweep > 0) {
            sweep_vectors(rotations + (sweep - 1) % 2 * size, v, n, warp - a_warps, warps - a_warps, z);
        }
        converged = !__syncthreads_or(unfinished);
    }
    if (sweep > 0) sweep_vectors(rotations + (sweep - 1) % 2 * size, v, n, warp, warps, z);
    converged = converged && finite;
    if (threadIdx.x < n) {
        const REAL mine = a[threadIdx.x * z.ld + threadIdx.x];
        int rank = 0;
        for (int j = 0; j < n; ++j) {
            const REAL other = a[j * z.ld + j];
            if (other < mine || (other == mine && j < threadIdx.x)) ++rank;
        }
        if (!converged) rank = threadIdx.x;
        order[rank] = threadIdx.x;
        values[rank] = converged ? mine * scale : (REAL)nan("");
    }
    for (int e = threadIdx.x; !converged && e < n * z.ldv; e += blockDim.x) v[e] = (REAL)nan("");
    __syncthreads();
}

extern __shared__ double shared_memory[];
