// The polar decomposition of very small matrices with L >= K rows and K columns, and its adjoint, one thread per matrix.
// Columns u and v of the singular value decomposition and its singular values are saved as K rows of L + K + 1 numbers,
// each contiguous over the matrices.

#define IN double
#include "svd_tiny.cuh"

template <int N>
__device__ __forceinline__ double determinant(const double (&a)[N][N]) {
    if constexpr (N == 1) {
        return a[0][0];
    } else {
        double sum = 0;
#pragma unroll
        for (int column = 0; column < N; ++column) {
            double minor[N - 1][N - 1];
#pragma unroll
            for (int i = 1; i < N; ++i) {
#pragma unroll
                for (int j = 0; j < N - 1; ++j) minor[i - 1][j] = a[i][j < column ? j : j + 1];
            }
            sum += (column % 2 ? -a[0][column] : a[0][column]) * determinant<N - 1>(minor);
        }
        return sum;
    }
}

// a (count, L, K) -> q (count, L, K), p (count, K, K), factors (K, L + K + 1, count). For a rotation, L = K and the last
// singular value and its u change sign if the determinant is negative. NaN if q is not unique: the smallest sum of singular
// values that divides is at most `tolerance` times the largest; a negative tolerance accepts any q.
extern "C" __global__ void __launch_bounds__(128)
    polar_tiny(const double* __restrict__ a, double* __restrict__ q, double* __restrict__ p, double* __restrict__ factors,
               double tolerance, int rotation, int count) {
    const int number = blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= count) return;
    Row rows[K];
    bool good = decompose(a + (long long)number * L * K, 1, rows);
#if K == L
    if (rotation) {
        double u[K][K], v[K][K];
#pragma unroll
        for (int i = 0; i < K; ++i) {
#pragma unroll
            for (int j = 0; j < K; ++j) {
                u[i][j] = rows[i].x[j];
                v[i][j] = rows[i].q[j];
            }
        }
        if (determinant<K>(u) * determinant<K>(v) < 0) {
            rows[K - 1].square = -rows[K - 1].square;
#pragma unroll
            for (int j = 0; j < L; ++j) rows[K - 1].x[j] = -rows[K - 1].x[j];
        }
    }
#endif
    const double least = rows[K - 1].square + (rotation && K > 1 ? rows[K > 1 ? K - 2 : 0].square : 0);
    good = good && (tolerance < 0 || (rotation && K == 1) || least > tolerance * rows[0].square);
    const double missing = good ? 0 : nan("");
#pragma unroll
    for (int i = 0; i < L; ++i) {
#pragma unroll
        for (int j = 0; j < K; ++j) {
            double sum = missing;
#pragma unroll
            for (int r = 0; r < K; ++r) sum += rows[r].x[i] * rows[r].q[j];
            q[(long long)number * L * K + i * K + j] = sum;
        }
    }
#pragma unroll
    for (int i = 0; i < K; ++i) {
#pragma unroll
        for (int j = 0; j < K; ++j) {
            double sum = missing;
#pragma unroll
            for (int r = 0; r < K; ++r) sum += rows[r].square * (rows[r].q[i] * rows[r].q[j]);
            p[(long long)number * K * K + i * K + j] = sum;
        }
    }
    factors += number;
#pragma unroll
    for (int r = 0; r < K; ++r) {
#pragma unroll
        for (int i = 0; i < L; ++i, factors += count) *factors = rows[r].x[i] + missing;
#pragma unroll
        for (int i = 0; i < K; ++i, factors += count) *factors = rows[r].q[i];
        *factors = rows[r].square;
        factors += count;
    }
}

// The gradient (count, L, K) of A for the gradients of Q and P. In the bases u and v, with S the symmetric part of that of P,
// it is S + (W - W^T + diag(s) S - S diag(s)) / (s_i + s_j) inside, W = U^T G V, and (I - UU^T) G V / s_j outside.
extern "C" __global__ void __launch_bounds__(128)
    polar_tiny_adjoint(const double* __restrict__ factors, const double* __restrict__ g_q, const double* __restrict__ g_p,
                       double* __restrict__ out, int count) {
    const int number = blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= count) return;
    double u[K][L], v[K][K], s[K];
    factors += number;
#pragma unroll
    for (int r = 0; r < K; ++r) {
#pragma unroll
        for (int i = 0; i < L; ++i, factors += count) u[r][i] = *factors;
#pragma unroll
        for (int i = 0; i < K; ++i, factors += count) v[r][i] = *factors;
        s[r] = *factors;
        factors += count;
    }
    g_q += (long long)number * L * K;
    g_p += (long long)number * K * K;
    out += (long long)number * L * K;
    double moved[K][L], w[K][K], symmetric[K][K];  // moved: columns of G V
#pragma unroll
    for (int r = 0; r < K; ++r) {
        double column[K];
#pragma unroll
        for (int i = 0; i < L; ++i) {
            moved[r][i] = 0;
#pragma unroll
            for (int j = 0; j < K; ++j) moved[r][i] += g_q[i * K + j] * v[r][j];
        }
#pragma unroll
        for (int i = 0; i < K; ++i) {
            column[i] = 0;
#pragma unroll
            for (int j = 0; j < K; ++j) column[i] += 0.5 * (g_p[i * K + j] + g_p[j * K + i]) * v[r][j];
        }
#pragma unroll
        for (int i = 0; i < K; ++i) {
            w[i][r] = dot(u[i], moved[r]);
            symmetric[i][r] = 0;
#pragma unroll
            for (int j = 0; j < K; ++j) symmetric[i][r] += v[i][j] * column[j];
        }
    }
#pragma unroll
    for (int r = 0; r < K; ++r) {
#pragma unroll
        for (int i = 0; i < L; ++i) {
            double outside = 0;
#if L > K
            outside = moved[r][i];
#pragma unroll
            for (int j = 0; j < K; ++j) outside -= u[j][i] * w[j][r];
            outside /= s[r];
#endif
            moved[r][i] = outside;
        }
    }
#pragma unroll
    for (int r = 0; r < K; ++r) {
#pragma unroll
        for (int j = 0; j < K; ++j) {
            const double sum = s[j] + s[r], turned = w[j][r] - w[r][j] + (s[j] - s[r]) * symmetric[j][r];
            const double inside = symmetric[j][r] + (j == r || sum == 0 ? 0 : turned / sum);
#pragma unroll
            for (int i = 0; i < L; ++i) moved[r][i] += u[j][i] * inside;
        }
    }
#pragma unroll
    for (int i = 0; i < L; ++i) {
#pragma unroll
        for (int j = 0; j < K; ++j) {
            double sum = 0;
#pragma unroll
            for (int r = 0; r < K; ++r) sum += moved[r][i] * v[r][j];
            out[i * K + j] = sum;
        }
    }
}
