// Connected components of label maps by union-find: every pixel ends at the first pixel of its component.
// Grids of one thread per pixel of all maps.

__device__ __forceinline__ int root_of(const int* parent, int pixel) {
    while (parent[pixel] != pixel) pixel = parent[pixel];
    return pixel;
}

__device__ __forceinline__ void unite(int* parent, int a, int b) {
    while (true) {
        a = root_of(parent, a);
        b = root_of(parent, b);
        if (a == b) return;
        const int high = a > b ? a : b, low = a > b ? b : a;
        const int old = atomicMin(&parent[high], low);
        if (old == high) return;
        a = old;  // somebody was faster: what it pointed to has to be united with the lower one too
        b = low;
    }
}

extern "C" __global__ void components_start(int* parent, int count) {
    const int pixel = blockIdx.x * blockDim.x + threadIdx.x;
    if (pixel < count) parent[pixel] = pixel;
}

extern "C" __global__ void components_unite(const long long* __restrict__ labels, int* parent, int count, int height,
                                            int width, int diagonal) {
    const int pixel = blockIdx.x * blockDim.x + threadIdx.x;
    if (pixel >= count) return;
    const int column = pixel % width, row = pixel / width % height;
    const long long label = labels[pixel];
    const bool right = column + 1 < width, below = row + 1 < height;
    if (right && labels[pixel + 1] == label) unite(parent, pixel, pixel + 1);
    if (below && labels[pixel + width] == label) unite(parent, pixel, pixel + width);
    if (diagonal && below && right && labels[pixel + width + 1] == label) unite(parent, pixel, pixel + width + 1);
    if (diagonal && below && column > 0 && labels[pixel + width - 1] == label) unite(parent, pixel, pixel + width - 1);
}

extern "C" __global__ void components_finish(const int* parent, long long* __restrict__ root, int count) {
    const int pixel = blockIdx.x * blockDim.x + threadIdx.x;
    if (pixel < count) root[pixel] = root_of(parent, pixel);
}
