// Separates and completes rows of matrices in global memory, one thread block per matrix.

#include "separate.cuh"

// y (batch, n, k) and q (batch, n, n), eigenvectors in rows, with the given strides; overlap (batch, n, n) is Y Y^T.
// Grid (batch); shared memory: 3 numbers per thread and 2 n int.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    separate_rows(REAL* y, REAL* q, const REAL* __restrict__ overlap, const REAL* __restrict__ all_eps, double limit,
                  int n, int k, int y_next, int y_step, int q_next, int q_step) {
    const REAL eps = all_eps[blockIdx.x];
    overlap += (long long)blockIdx.x * n * n;
    REAL* extremes = (REAL*)shared_memory;  // overlaps are read only if the spectrum is wide
    REAL largest = 0, smallest = (REAL)REAL_MAX;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const REAL square = overlap[(long long)i * n + i];
        largest = square > largest ? square : largest;
        smallest = square < smallest ? square : smallest;
    }
    extremes[threadIdx.x] = largest;
    extremes[blockDim.x + threadIdx.x] = smallest;
    __syncthreads();
    for (int e = 0; e < blockDim.x; ++e) {
        largest = extremes[e] > largest ? extremes[e] : largest;
        smallest = extremes[blockDim.x + e] < smallest ? extremes[blockDim.x + e] : smallest;
    }
    if (!(largest > (REAL)SAFE_RATIO * (REAL)limit * (smallest + eps))) return;
    int mixed = 0;
    for (int e = threadIdx.x; e < n * n; e += blockDim.x) {
        const int i = e / n, j = e % n;
        const REAL ratio = overlap[e] / (REAL)limit;
        if (i < j && ratio * ratio > (overlap[i * n + i] + eps) * (overlap[j * n + j] + eps)) mixed = 1;
    }
    if (!__syncthreads_or(mixed)) return;
    const Vectors rows = {y + (long long)blockIdx.x * n * k, k, y_next, y_step};
    const Vectors vectors = {q + (long long)blockIdx.x * n * n, n, q_next, q_step};
    separate(rows, vectors, overlap, eps, (REAL)limit, n, (REAL*)shared_memory);
}

// v (batch, n, k) in rows, with the given strides, and sigma (batch, n): see complete. Grid (batch);
// shared memory: n + blockDim.x numbers.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    complete_rows(REAL* v, const REAL* __restrict__ sigma, int n, int k, int v_next, int v_step) {
    const Vectors rows = {v + (long long)blockIdx.x * n * k, k, v_next, v_step};
    complete(rows, sigma + (long long)blockIdx.x * n, n, (REAL*)shared_memory);
}
