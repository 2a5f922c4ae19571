// Products of tiles of 64x64 on the double-precision tensor cores (compute capability 8.0 and later). TILE is the edge of
// a tile of a product, which PRODUCT_THREADS, 8 warps, compute. LDT is the leading dimension of a tile's operands, DEPTH
// the inner dimension of a step.

#include "jacobi.cuh"

// [c0; c1] (16x8) += a (16x8) b (8x8). A lane holds entry (lane / 4, lane % 4) of each 8x4 block of a, that of the transpose
// of each 4x8 block of b, and two adjacent entries in row lane / 4 of c0 and c1.
__device__ __forceinline__ void multiply_add(REAL (&c0)[2], REAL (&c1)[2], const REAL (&a)[2][2], const REAL (&b)[2]) {
#ifdef EMULATED
    for (int k = 0; k < 2; ++k) {
        emulated_multiply_add(c0, a[0][k], b[k]);
        emulated_multiply_add(c1, a[1][k], b[k]);
    }
#elif __CUDA_ARCH__ >= 900
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+d"(c0[0]), "+d"(c0[1]), "+d"(c1[0]), "+d"(c1[1])
        : "d"(a[0][0]), "d"(a[1][0]), "d"(a[0][1]), "d"(a[1][1]), "d"(b[0]), "d"(b[1]));
#else
    UNROLL for (int k = 0; k < 2; ++k) {
        asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                     : "+d"(c0[0]), "+d"(c0[1])
                     : "d"(a[0][k]), "d"(b[k]));
        asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                     : "+d"(c1[0]), "+d"(c1[1])
                     : "d"(a[1][k]), "d"(b[k]));
    }
#endif
}

// A warp's part of a 64x64 tile: 16 rows from (warp / 2) * 16, 32 columns from (warp % 2) * 32.
struct ProductTile {
    REAL c[2][4][2];
    __device__ ProductTile() {
        for (int p = 0; p < 2; ++p)
            for (int q = 0; q < 4; ++q) c[p][q][0] = c[p][q][1] = 0;
    }
    __device__ static int row() { return threadIdx.x / 64 * 16; }
    __device__ static int column() { return threadIdx.x / 32 % 2 * 32; }
    // += left^T right for operands of DEPTH rows of LDT entries
    __device__ void add(const REAL* left, const REAL* right) {
        const int lane = threadIdx.x % 32, corner = lane % 4 * LDT + lane / 4;
        left += corner + row();
        right += corner + column();
        UNROLL for (int k = 0; k < DEPTH; k += 8) {
            REAL a[2][2], b[4][2];
            UNROLL for (int e = 0; e < 2; ++e) {
                UNROLL for (int p = 0; p < 2; ++p) a[p][e] = left[(k + 4 * e) * LDT + 8 * p];
                UNROLL for (int q = 0; q < 4; ++q) b[q][e] = right[(k + 4 * e) * LDT + 8 * q];
            }
            UNROLL for (int q = 0; q < 4; ++q) multiply_add(c[0][q], c[1][q], a, b[q]);
        }
    }
    // visit(row, column, value) for every entry of the part
    template <typename Visit>
    __device__ void each(Visit visit) const {
        const int lane = threadIdx.x % 32, top = row() + lane / 4, left = column() + lane % 4 * 2;
        UNROLL for (int p = 0; p < 2; ++p)
            UNROLL for (int q = 0; q < 4; ++q)
                UNROLL for (int e = 0; e < 2; ++e) visit(top + 8 * p, left + 8 * q + e, c[p][q][e]);
    }
};

#define SLOTS (DEPTH * TILE / PRODUCT_THREADS)  // entries of an operand that a thread loads

// Operand[k][i] = x[k][i] from rows of x: lanes run along i. Slots keep the type of x, so that loads stay in flight
// until they are stored.
template <typename T>
__device__ __forceinline__ void fetch_rows(T (&slot)[SLOTS], const T* __restrict__ x, int first, int rows, int column,
                                           int d) {
    UNROLL for (int e = 0; e < SLOTS; ++e) {
        const int entry = threadIdx.x + e * PRODUCT_THREADS, k = first + entry / TILE, i = column + entry % TILE;
        slot[e] = 0;
        if (k < rows && i < d) slot[e] = x[(long long)k * d + i];
    }
}

// Operand[k][i] = x[i][k] from columns of x: lanes run along k.
template <typename T>
__device__ __forceinline__ void fetch_columns(T (&slot)[SLOTS], const T* __restrict__ x, int first, int top, int rows,
                                              int d) {
    UNROLL for (int e = 0; e < SLOTS; ++e) {
        const int entry = threadIdx.x + e * PRODUCT_THREADS, k = first + entry % DEPTH, i = top + entry / DEPTH;
        slot[e] = 0;
        if (i < rows && k < d) slot[e] = x[(long long)i * d + k];
    }
}

template <typename T>
__device__ __forceinline__ void store_rows(REAL* operand, const T (&slot)[SLOTS]) {
    UNROLL for (int e = 0; e < SLOTS; ++e) {
        const int entry = threadIdx.x + e * PRODUCT_THREADS;
        operand[entry / TILE * LDT + entry % TILE] = (REAL)slot[e];
    }
}

template <typename T>
__device__ __forceinline__ void store_columns(REAL* operand, const T (&slot)[SLOTS]) {
    UNROLL for (int e = 0; e < SLOTS; ++e) {
        const int entry = threadIdx.x + e * PRODUCT_THREADS;
        operand[entry % DEPTH * LDT + entry / DEPTH] = (REAL)slot[e];
    }
}
