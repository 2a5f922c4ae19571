// Products of tiles of 64x64 on the double-precision tensor cores (compute capability 8.0 and later), appended to jacobi.cu.

#define TILE 64   // edge of a tile of a product, which 8 warps compute
#define LDT 68    // leading dimension of a tile's operands: no bank is asked twice
#define DEPTH 16  // inner dimension of a step of a product
#define PRODUCT_THREADS 256

// c (8x8, two entries a lane) += a (8x4) b (4x8), one entry a lane each.
__device__ __forceinline__ void multiply_add(REAL (&c)[2], REAL a, REAL b) {
#ifdef EMULATED
    emulated_multiply_add(c, a, b);
#else
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(c[0]), "+d"(c[1])
                 : "d"(a), "d"(b));
#endif
}

// A warp's share of a 64x64 tile: 16 rows from (warp / 2) * 16, 32 columns from (warp % 2) * 32.
struct Share {
    REAL c[2][4][2];
    __device__ Share() {
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
#pragma unroll
        for (int k = 0; k < DEPTH; k += 4) {
            REAL a[2], b[4];
#pragma unroll
            for (int p = 0; p < 2; ++p) a[p] = left[k * LDT + 8 * p];
#pragma unroll
            for (int q = 0; q < 4; ++q) b[q] = right[k * LDT + 8 * q];
#pragma unroll
            for (int p = 0; p < 2; ++p)
#pragma unroll
                for (int q = 0; q < 4; ++q) multiply_add(c[p][q], a[p], b[q]);
        }
    }
    // visit(row, column, value) for every entry of the share
    template <typename Visit>
    __device__ void each(Visit visit) const {
        const int lane = threadIdx.x % 32, top = row() + lane / 4, left = column() + lane % 4 * 2;
#pragma unroll
        for (int p = 0; p < 2; ++p)
#pragma unroll
            for (int q = 0; q < 4; ++q)
#pragma unroll
                for (int e = 0; e < 2; ++e) visit(top + 8 * p, left + 8 * q + e, c[p][q][e]);
    }
};

#define SLOTS (DEPTH * TILE / PRODUCT_THREADS)  // entries of an operand that a thread brings

// Operand[k][i] = x[k][i] from rows of x: lanes run along i.
template <typename T>
__device__ __forceinline__ void fetch_rows(REAL (&slot)[SLOTS], const T* __restrict__ x, int first, int rows, int column,
                                           int d) {
#pragma unroll
    for (int e = 0; e < SLOTS; ++e) {
        const int entry = threadIdx.x + e * PRODUCT_THREADS, k = entry / TILE, i = entry % TILE;
        slot[e] = (first + k < rows && column + i < d) ? (REAL)x[(long long)(first + k) * d + column + i] : (REAL)0;
    }
}

// Operand[k][i] = x[i][k] from columns of x: lanes run along k.
template <typename T>
__device__ __forceinline__ void fetch_columns(REAL (&slot)[SLOTS], const T* __restrict__ x, int first, int top, int rows,
                                              int d) {
#pragma unroll
    for (int e = 0; e < SLOTS; ++e) {
        const int entry = threadIdx.x + e * PRODUCT_THREADS, k = entry % DEPTH, i = entry / DEPTH;
        slot[e] = (top + i < rows && first + k < d) ? (REAL)x[(long long)(top + i) * d + first + k] : (REAL)0;
    }
}

__device__ __forceinline__ void store_rows(REAL* operand, const REAL (&slot)[SLOTS]) {
#pragma unroll
    for (int e = 0; e < SLOTS; ++e) {
        const int entry = threadIdx.x + e * PRODUCT_THREADS;
        operand[entry / TILE * LDT + entry % TILE] = slot[e];
    }
}

__device__ __forceinline__ void store_columns(REAL* operand, const REAL (&slot)[SLOTS]) {
#pragma unroll
    for (int e = 0; e < SLOTS; ++e) {
        const int entry = threadIdx.x + e * PRODUCT_THREADS;
        operand[entry % DEPTH * LDT + entry / DEPTH] = slot[e];
    }
}
