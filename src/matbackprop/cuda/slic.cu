// One assignment of SLIC: every pixel goes to the nearest centre among those in whose window it lies, the first one
// where two are as near. A grid of one thread per pixel of all images.

extern "C" __global__ void slic_assign(const double* __restrict__ colours, const double* __restrict__ centres,
                                       const int* __restrict__ windows, long long* __restrict__ labels, int images,
                                       int height, int width, int count, double weight) {
    const long long pixel = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long size = (long long)height * width;
    if (pixel >= images * size) return;
    const long long image = pixel / size, place = pixel % size;
    const int row = place / width, column = place % width;
    const double* colour = colours + 3 * image * size + place;
    const double first = colour[0], second = colour[size], third = colour[2 * size];
    centres += 5 * image * count;
    windows += 4 * image * count;
    double nearest = 1e300;
    int label = 0;
    for (int k = 0; k < count; k++, centres += 5, windows += 4) {
        if (row < windows[0] || row >= windows[1] || column < windows[2] || column >= windows[3]) continue;
        const double down = centres[0] - row, right = centres[1] - column;
        const double a = first - centres[2], b = second - centres[3], c = third - centres[4];
        const double distance = (down * down + right * right) * weight + (a * a + b * b + c * c);
        if (distance < nearest) {
            nearest = distance;
            label = k;
        }
    }
    labels[pixel] = label;
}
