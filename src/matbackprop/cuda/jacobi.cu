// Eigendecomposition of symmetric matrices of order n <= 64, one thread block per matrix.

#include "jacobi.cuh"

// in (batch, n, n) symmetric (only the lower triangle is read) -> values (batch, n) ascending, vectors (batch, n, n) in columns.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    jacobi_eigh(const REAL* __restrict__ in, REAL* __restrict__ out_values, REAL* __restrict__ out_vectors, int n) {
    const Sizes z(n);
    Rotation* rotations = (Rotation*)shared_memory;
    REAL* a = (REAL*)shared_memory + z.rotations;
    REAL* v = a + z.players * z.ld;
    REAL* values = v + (n * z.ldv > blockDim.x ? n * z.ldv : blockDim.x);
    int* order = (int*)(values + z.players);
    in += (long long)blockIdx.x * n * n;
    for (int e = threadIdx.x; e < z.players * z.ld; e += blockDim.x) {
        const int i = e / z.ld, j = e % z.ld;
        a[e] = (i < n && j < n) ? in[i > j ? i * n + j : j * n + i] : 0;
    }
    __syncthreads();
    jacobi(a, v, rotations, values, order, n, z);
    out_vectors += (long long)blockIdx.x * n * n;
    out_values += (long long)blockIdx.x * n;
    for (int e = threadIdx.x; e < n * n; e += blockDim.x) out_vectors[e] = v[e / n * z.ldv + order[e % n]];
    if (threadIdx.x < n) out_values[threadIdx.x] = values[threadIdx.x];
}
