// Runs the package's CUDA kernels on the CPU, with one system thread per thread of a block, to test their logic.
#pragma once
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#define EMULATED
#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __align__(x) alignas(x)

using std::copysign;
using std::fabs;
using std::fmax;
using std::frexp;
using std::ldexp;
using std::min;
using std::nan;

struct Index {
    int x, y, z;
};
static thread_local Index threadIdx, blockIdx, gridDim;
static Index blockDim;
static double shared_memory[1 << 15];
static pthread_barrier_t block_barrier, group, warp_barriers[32];
static std::atomic<int> any{0};
static double lane_a[32][32], lane_b[32][32];

static void __syncthreads() { pthread_barrier_wait(&block_barrier); }
static void __syncwarp() { pthread_barrier_wait(&warp_barriers[threadIdx.x / 32]); }
// The first `members` threads of a block meet.
static void emulated_barrier(int members) {
    static std::mutex guard;
    static int ready = 0;
    {
        std::lock_guard<std::mutex> lock(guard);
        if (ready != members) pthread_barrier_init(&group, nullptr, ready = members);
    }
    pthread_barrier_wait(&group);
}
static int __syncthreads_or(int x) {
    if (x) any = 1;
    __syncthreads();
    const int result = any;
    __syncthreads();
    any = 0;
    __syncthreads();
    return result;
}
// All lanes of a warp call these together.
static double __shfl_xor_sync(unsigned, double x, int mask) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    lane_a[warp][lane] = x;
    __syncwarp();
    const double other = lane_a[warp][lane ^ mask];
    __syncwarp();
    return other;
}
static int __any_sync(unsigned, int x) {
    const int warp = threadIdx.x / 32;
    lane_a[warp][threadIdx.x % 32] = x;
    __syncwarp();
    int result = 0;
    for (double other : lane_a[warp]) result |= other != 0;
    __syncwarp();
    return result;
}
static double rsqrt(double x) { return 1 / std::sqrt(x); }
static void __threadfence() {}
static double __ldcg(const double* where) { return *where; }
static float __fdividef(float a, float b) { return a / b; }
static float rsqrtf(float x) { return 1 / std::sqrt(x); }

static void emulated_multiply_add(double (&c)[2], double a, double b) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    lane_a[warp][lane] = a;
    lane_b[warp][lane] = b;
    __syncwarp();
    for (int e = 0; e < 2; ++e)
        for (int k = 0; k < 4; ++k) c[e] += lane_a[warp][lane / 4 * 4 + k] * lane_b[warp][(lane % 4 * 2 + e) * 4 + k];
    __syncwarp();
}

// The grid and the bytes of shared memory of a launch.
static Index grid;
static size_t asked_bytes;
static bool overrun = false;
extern "C" void begin_launch(int x, int y, int z, long long bytes) {
    grid = {x, y, z};
    asked_bytes = bytes;
    overrun = false;
}
extern "C" bool was_overrun() { return overrun; }

// Run one block after the other.
static void launch(int threads, std::function<void()> kernel) {
    blockDim = {threads, 1, 1};
    pthread_barrier_init(&block_barrier, nullptr, threads);
    for (auto& barrier : warp_barriers) pthread_barrier_init(&barrier, nullptr, 32);
    for (int x = 0; x < grid.x; ++x)
        for (int y = 0; y < grid.y; ++y)
            for (int z = 0; z < grid.z; ++z) {
                memset(shared_memory, 0x7f, sizeof shared_memory);  // poison, to detect reads before writes
                std::vector<std::thread> block;
                for (int t = 0; t < threads; ++t)
                    block.emplace_back([=] {
                        threadIdx = {t, 0, 0};
                        blockIdx = {x, y, z};
                        gridDim = grid;
                        kernel();
                    });
                for (auto& thread : block) thread.join();
                const char* bytes = reinterpret_cast<const char*>(shared_memory);
                for (size_t i = asked_bytes; i < sizeof shared_memory; ++i) overrun |= bytes[i] != 0x7f;
            }
}
