// Sums and maxima over the threads of a warp or a block, in double precision.

extern __shared__ double shared_memory[];

// The sum over a power of two of adjacent threads, returned in each.
template <int COUNT>
__device__ __forceinline__ double sum_over(double x) {
#pragma unroll
    for (int offset = COUNT / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// The sum over a block of at most MAX_WARPS warps, the same in all threads, with one barrier. `scratch` has one number per
// warp; separate its uses by a barrier.
template <int MAX_WARPS>
__device__ __forceinline__ double block_sum(double x, double* scratch) {
    x = sum_over<32>(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    double sum[4] = {};
#pragma unroll
    for (int w = 0; w < MAX_WARPS; ++w) sum[w % 4] += 32 * w < blockDim.x ? scratch[w] : 0;
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

__device__ double block_max(double x, double* scratch) {
    for (int offset = 16; offset > 0; offset /= 2) x = fmax(x, __shfl_xor_sync(0xffffffffu, x, offset));
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    for (int w = 0; w < blockDim.x / 32; ++w) x = fmax(x, scratch[w]);
    return x;
}
