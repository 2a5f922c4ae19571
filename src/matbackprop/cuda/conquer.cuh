// Eigenvectors of symmetric tridiagonal matrices by divide and conquer, one thread block per pair of halves.
//
// With the halves solved, T = Q (diag(d) + rho z z^T) Q^T, where z holds the last row of the first half's vectors and the
// first row of the second's. Negligible entries of z are deflated, and so are pairs of d so close that a rotation makes
// one entry negligible. The other eigenvalues are the roots of 1/rho + sum z_j^2 / (d_j - x), one after each pole. Each is
// stored as its distance from the nearest pole, which keeps all differences accurate. For orthogonal eigenvectors
// z_j / (d_j - x), z is recomputed so that the computed roots are exact (Gu and Eisenstat, 1994).

#define EPS 2.220446049250313e-16
#ifndef MAX_STEPS
#define MAX_STEPS 80
#endif

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

// The block's arrays, of n = 2 * half entries.
struct Node {
    double *value, *weight;  // d and z, ascending in d
    double *pole, *load;     // the same without deflated entries
    double *shift, *norm;    // of each root: its distance from the pole `origin`; one over the norm of its vector
    double *result, *cosine, *sine;
    int *order, *kept, *place, *origin, *source, *left, *right;
    double* scratch;
    __device__ explicit Node(int n) {
        double** doubles[] = {&value, &weight, &pole, &load, &shift, &norm, &result, &cosine, &sine};
        int** ints[] = {&order, &kept, &place, &origin, &source, &left, &right};
        double* next = shared_memory;
        for (double** array : doubles) {
            *array = next;
            next += n;
        }
        scratch = next;
        int* following = (int*)(scratch + 32);
        for (int** array : ints) {
            *array = following;
            following += n;
        }
    }
};

// The number of entries of an ascending array that are below x, or not above it.
__device__ int count_below(const double* sorted, int n, double x, bool or_equal) {
    int low = 0;
    for (int high = n; low < high;) {
        const int middle = (low + high) / 2;
        if (sorted[middle] < x || (or_equal && sorted[middle] == x)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// Whether a rotation of two adjacent entries makes one negligible: the off-diagonal entry that it creates is at most `tolerance`.
__device__ bool nearly_tied(double gap, double z, double next, double tolerance) {
    return fabs(gap * z * next) <= tolerance * (z * z + next * next);
}

// Deflate adjacent pairs in order, by one thread. Returns the number of rotations.
__device__ int deflate_pairs(Node& node, int& count, double tolerance) {
    int rotations = 0, kept = 0, before = node.kept[0];
    for (int k = 1; k < count; ++k) {
        const int now = node.kept[k];
        const double z = node.weight[before], next = node.weight[now], low = node.value[before], high = node.value[now];
        if (nearly_tied(high - low, z, next, tolerance)) {
            const double size = sqrt(z * z + next * next), c = next / size, s = -z / size;
            node.left[rotations] = before;
            node.right[rotations] = now;
            node.cosine[rotations] = c;
            node.sine[rotations++] = s;
            node.weight[now] = size;
            node.value[before] = low * c * c + high * s * s;
            node.value[now] = low * s * s + high * c * c;
            node.place[before] = -1;
        } else {
            node.kept[kept++] = before;
        }
        before = now;
    }
    node.kept[kept++] = before;
    count = kept;
    return rotations;
}

// 1/x to one or two ulp, for normal x whose reciprocal is normal.
__device__ __forceinline__ double inverse(double x) {
#ifdef EMULATED
    return 1 / x;
#else
    double r;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(x));
    r = fma(r, fma(-x, r, 1.0), r);
    return fma(r, fma(-x, r, 1.0), r);
#endif
}

// The two sums at pole[origin] + mu, over the poles up to i and over the others, and their slopes.
struct Secular {
    double psi, phi, psi_slope, phi_slope;
    __device__ Secular(const Node& node, int count, int i, int origin, double mu)
        : psi(0), phi(0), psi_slope(0), phi_slope(0) {
        const double base = node.pole[origin];
        const int lane = threadIdx.x % LANES;
#pragma unroll 4
        for (int j = lane; j < count; j += LANES) {
            const double z = node.load[j], quotient = z * inverse((node.pole[j] - base) - mu), term = z * quotient;
            if (j <= i) {
                psi += term;
                psi_slope += quotient * quotient;
            } else {
                phi += term;
                phi_slope += quotient * quotient;
            }
        }
        psi = sum_over<LANES>(psi);
        phi = sum_over<LANES>(phi);
        psi_slope = sum_over<LANES>(psi_slope);
        phi_slope = sum_over<LANES>(phi_slope);
    }
};

// The root of c x^2 - a x + b of smaller magnitude.
__device__ __forceinline__ double small_root(double a, double b, double c) {
    const double root = sqrt(fabs(a * a - 4 * b * c));
    return a > 0 ? 2 * b / (a + root) : (a - root) / (2 * c);
}

// Root i of the secular equation, by LANES threads; all threads of a warp call this together. Rational interpolation with
// the poles on both sides (Li's middle way) inside a bracket. Returns whether it converged.
__device__ bool find_root(Node& node, int count, int i, double rho, double total, bool valid) {
    const double constant = 1 / rho;
    const bool last = i == count - 1;
    int origin = i;
    double low = 0, high = rho * total, mu = high;
    const double gap = last ? high : node.pole[i + 1] - node.pole[i];
    if (__any_sync(0xffffffffu, !last)) {
        const Secular at(node, count, i, i, 0.5 * gap);
        if (!last) {
            const double value = constant + at.psi + at.phi, here = node.load[i] * node.load[i];
            const double there = node.load[i + 1] * node.load[i + 1];
            const double rest = value + (here - there) / (0.5 * gap);
            const bool near = value >= 0;  // the root is in the first half of the gap
            origin = near ? i : i + 1;
            low = near ? 0 : -0.5 * gap;
            high = near ? 0.5 * gap : 0;
            mu = small_root((near ? rest : -rest) * gap + here + there, near ? here * gap : -there * gap, rest);
            if (!(mu > low && mu < high)) mu = 0.5 * (low + high);
        }
    }
    bool done = !valid;
    for (int step = 0; step < MAX_STEPS && __any_sync(0xffffffffu, !done); ++step) {
        const Secular at(node, count, i, origin, mu);
        if (done) continue;
        const double value = constant + at.psi + at.phi, slope = at.psi_slope + at.phi_slope;
        if (fabs(value) <= EPS * (8 * (at.phi - at.psi) + constant + fabs(mu) * slope)) {
            done = true;
            continue;
        }
        if (value < 0) {
            low = mu;
        } else {
            high = mu;
        }
        const double here = (node.pole[i] - node.pole[origin]) - mu;
        double change;
        if (last) {
            change = here * value / (value - here * at.psi_slope);
        } else {
            const double there = (node.pole[i + 1] - node.pole[origin]) - mu;
            const double c = value - here * at.psi_slope - there * at.phi_slope;
            const double a = (here + there) * value - here * there * slope;
            change = small_root(a, here * there * value, c);
        }
        if (!(value * change < 0)) change = -value / slope;
        double next = mu + change;
        if (!(next > low && next < high)) {
            // A bracket that starts at zero is shortened by more than half: the root may be orders of magnitude smaller.
            const double same = low * high > 0 ? copysign(sqrt(low * high), low) : 0.5 * (low + high);
            next = low == 0 ? 0.0625 * high : high == 0 ? 0.0625 * low : same;
            if (!(next > low && next < high)) next = mu;
        }
        done = fabs(next - mu) <= EPS * fabs(next);
        mu = next;
    }
    if (valid && threadIdx.x % LANES == 0) {
        node.origin[i] = origin;
        node.shift[i] = mu;
    }
    return done;
}

// Mark a merge as failed; the parent merges propagate the mark.
__device__ void mark_failure(double* merged, double* mixing, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) merged[i] = nan("");
    for (long long e = threadIdx.x; e < (long long)n * n; e += blockDim.x) mixing[e] = nan("");
}

// values (nodes, 2, half) ascending, vectors (nodes, 2, half, half) in columns: the halves; couplings (matrices, parts *
// 2 half) -> merged (nodes, n) ascending, mixing (nodes, n, n) for n = 2 half: diag(vectors) mixing holds the vectors of
// the whole. scale (matrices): null, or the factor of the eigenvalues; a NaN factor makes values and vectors NaN.
// One block per node; a matrix has `parts` nodes.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
    merge_halves(const double* __restrict__ values, const double* __restrict__ vectors,
                 const double* __restrict__ couplings, const double* __restrict__ scale, double* __restrict__ merged,
                 double* mixing, int half, int parts) {
    const int n = 2 * half, warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    Node node(n);
    values += (long long)blockIdx.x * n;
    vectors += (long long)blockIdx.x * n * half;
    merged += (long long)blockIdx.x * n;
    mixing += (long long)blockIdx.x * n * n;
    const double coupling = couplings[(long long)blockIdx.x * n + half - 1], unit = scale ? scale[blockIdx.x / parts] : 1;
    const double rho = 2 * fabs(coupling);  // for z of unit norm

    int bad = !(unit == unit);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const bool upper = i < half;
        const double z = vectors[upper ? (long long)(half - 1) * half + i : (long long)half * half + i - half];
        node.result[i] = values[i];
        node.norm[i] = (upper || coupling > 0 ? 0.7071067811865476 : -0.7071067811865476) * z;
        if (!(fabs(values[i]) <= 1e300 && fabs(z) <= 2)) bad = 1;
    }
    if (__syncthreads_or(bad)) return mark_failure(merged, mixing, n);
    double largest = 0, heaviest = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const double d = node.result[i], z = node.norm[i];
        const int to = i < half ? i + count_below(node.result + half, half, d, false)
                                : i - half + count_below(node.result, half, d, true);
        node.value[to] = d;
        node.weight[to] = z;
        node.order[to] = i;
        largest = fmax(largest, fabs(d));
        heaviest = fmax(heaviest, fabs(z));
    }
    largest = block_max(largest, node.scratch);
    __syncthreads();
    heaviest = block_max(heaviest, node.scratch);
    const double tolerance = 8 * EPS * fmax(largest, heaviest);

    // deflation
    for (int i = threadIdx.x; i < n; i += blockDim.x) node.place[i] = rho * fabs(node.weight[i]) > tolerance ? 1 : -1;
    __syncthreads();
    int count = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        int before = 0;
        for (int k = 0; k < i; ++k) before += node.place[k] > 0;
        if (node.place[i] > 0) node.kept[before] = i;
    }
    for (int i = 0; i < n; ++i) count += node.place[i] > 0;
    __syncthreads();
    int trouble = 0;
    for (int k = threadIdx.x; k + 1 < count; k += blockDim.x) {
        const int a = node.kept[k], b = node.kept[k + 1];
        if (nearly_tied(node.value[b] - node.value[a], node.weight[a], node.weight[b], tolerance)) trouble = 1;
    }
    int rotations = 0;
    if (__syncthreads_or(trouble)) {
        if (threadIdx.x == 0) {
            rotations = deflate_pairs(node, count, tolerance);
            node.source[0] = rotations;
            node.source[1] = count;
        }
        __syncthreads();
        rotations = node.source[0];
        count = node.source[1];
    }
    double total = 0;
    for (int k = threadIdx.x; k < count; k += blockDim.x) {
        const int from = node.kept[k];
        node.pole[k] = node.value[from];
        node.load[k] = node.weight[from];
        node.place[from] = k;
        total += node.weight[from] * node.weight[from];
    }
    __syncthreads();
    total = block_sum<MERGE_THREADS / 32>(total, node.scratch);

    // roots, and the z with exactly these roots
    const int at_once = blockDim.x / LANES, own = threadIdx.x / LANES, sub = threadIdx.x % LANES;
    for (int first = 0; first < count; first += at_once) {
        const int i = first + own;
        if (!find_root(node, count, i < count ? i : count - 1, rho, total, i < count)) bad = 1;
    }
    if (__syncthreads_or(bad)) return mark_failure(merged, mixing, n);
    for (int first = 0; first < count; first += at_once) {
        const int j = first + own < count ? first + own : count - 1;
        double product = 1;
        for (int i = sub; i < count; i += LANES) {
            const double over = (node.pole[node.origin[i]] - node.pole[j]) + node.shift[i];
            product *= i == j ? over : over * inverse(node.pole[i] - node.pole[j]);
        }
        for (int offset = LANES / 2; offset > 0; offset /= 2) product *= __shfl_xor_sync(0xffffffffu, product, offset);
        __syncwarp();
        if (first + own < count && sub == 0) node.load[j] = copysign(sqrt(fabs(product)), node.load[j]);
    }
    __syncthreads();
    for (int first = 0; first < count; first += at_once) {
        const int i = first + own < count ? first + own : count - 1;
        const double base = node.pole[node.origin[i]], mu = node.shift[i];
        double sum = 0;
        for (int j = sub; j < count; j += LANES) {
            const double entry = node.load[j] * inverse((node.pole[j] - base) - mu);
            sum += entry * entry;
        }
        sum = sum_over<LANES>(sum);
        if (first + own < count && sub == 0) {
            node.norm[i] = 1 / sqrt(sum);
            node.value[node.kept[i]] = base + mu;
        }
    }
    __syncthreads();

    // ascending
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const double mine = node.value[i];
        int to = 0;
        for (int k = 0; k < n; ++k) to += node.value[k] < mine || (node.value[k] == mine && k < i);
        node.source[to] = i;
        merged[to] = mine * unit;
    }
    __syncthreads();
    for (int row = warp; row < n; row += warps) {
        const int place = node.place[row];
        double* entries = mixing + (long long)node.order[row] * n;
        const double z = place < 0 ? 0 : node.load[place], d = place < 0 ? 0 : node.pole[place];
        for (int column = lane; column < n; column += 32) {
            const int from = node.source[column], root = node.place[from];
            double entry = from == row;
            if (root >= 0) {
                const double distance = (d - node.pole[node.origin[root]]) - node.shift[root];
                entry = place < 0 ? 0 : z * inverse(distance) * node.norm[root];
            }
            entries[column] = entry;
        }
    }
    if (rotations == 0) return;
    __syncthreads();
    for (int column = threadIdx.x; column < n; column += blockDim.x) {
        for (int r = rotations - 1; r >= 0; --r) {
            double* x = mixing + (long long)node.order[node.left[r]] * n + column;
            double* y = mixing + (long long)node.order[node.right[r]] * n + column;
            const double c = node.cosine[r], s = node.sine[r], old = *x;
            *x = c * old - s * *y;
            *y = s * old + c * *y;
        }
    }
}
