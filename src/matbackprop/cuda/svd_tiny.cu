// The thin singular value decomposition of very small matrices, one thread per matrix. As in svd.cu, everything is
// transposed for a tall matrix, and IN is the type of X and of the returned factors.

#include "svd_tiny.cuh"

// x (count, K, L) -> q (count, K, K), sigma (count, K) descending, v (count, K, L); NaN if an entry is not finite, or
// the rotations do not converge. q_out, sigma_out and v_out, if given, receive the same rounded to IN.
extern "C" __global__ void __launch_bounds__(128)
    svd_tiny(const IN* __restrict__ x, double* __restrict__ q, double* __restrict__ sigma, double* __restrict__ v,
             IN* __restrict__ q_out, IN* __restrict__ sigma_out, IN* __restrict__ v_out, int count, int tall) {
    const int number = blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= count) return;
    x += (long long)number * K * L;
    q += (long long)number * K * K;
    v += (long long)number * K * L;
    sigma += (long long)number * K;
    if (q_out != nullptr) {
        q_out += (long long)number * K * K;
        v_out += (long long)number * K * L;
        sigma_out += (long long)number * K;
    }
    Row rows[K];
    const double missing = decompose(x, tall, rows) ? 0 : nan("");
#pragma unroll
    for (int i = 0; i < K; ++i) {
        sigma[i] = rows[i].square + missing;
        if (q_out != nullptr) sigma_out[i] = (IN)sigma[i];
#pragma unroll
        for (int j = 0; j < K; ++j) {
            const int at = tall ? i * K + j : j * K + i;
            q[at] = rows[i].q[j] + missing;
            if (q_out != nullptr) q_out[at] = (IN)q[at];
        }
#pragma unroll
        for (int j = 0; j < L; ++j) {
            const int at = tall ? j * K + i : i * L + j;
            v[at] = rows[i].x[j] + missing;
            if (q_out != nullptr) v_out[at] = (IN)v[at];
        }
    }
}
