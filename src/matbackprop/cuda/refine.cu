// Refinement of a single-precision eigendecomposition to double precision, one thread block per matrix.
//
// V holds approximate eigenvectors in rows and U = V A. From G = [V V^T, U V^T] follow R = I - V V^T and the Rayleigh
// quotient S of the orthonormalised V, both to first order. A step replaces V by P V with P = I + R/2 + T, where the
// antisymmetric T turns each pair of vectors by S_ij / (lambda_i - lambda_j): quadratic convergence, wherever that is
// small. Pairs that would turn by more than `theta` are in conflict: their indices, and those that would turn by as
// much in total, are collected and their part of S is diagonalised by Jacobi rotations, orthogonal whatever the angles.
// What a conflict shows may be no more than what other pairs have mixed into S in second order; such pairs wait for the
// next step.
// The last step leaves nothing above the tolerance, sorts, and starts from the identity where it was given nonsense.

#define EPS 2.220446049250313e-16
#define TOLERANCE (2 * EPS)         // of entries of S off the diagonal, relative to the largest eigenvalue
#define EARLY_TOLERANCE (16 * EPS)  // the same before the last step
#define NEGLIGIBLE (EPS / 8)        // not worth a rotation
#define MIXING_MARGIN 4             // a conflict has to be as much larger than what others may have mixed into it
#define MAX_DEFECT 1e-7             // of orthonormality before the last step, which squares it
#define MAX_SWEEPS 30
#define ROWS 4   // of a product that a thread computes at once

extern __shared__ double shared_memory[];

// The block's shared memory: arrays of n numbers, partial sums, tiles for transposing two matrices.
struct Room {
    double *values, *norms, *noise, *sines, *halves, *partial, *tile;
    int *active, *list, *order;
    double* spare;
    __device__ explicit Room(int n) {
        values = shared_memory;
        norms = values + n;
        noise = norms + n;
        sines = noise + n;
        halves = sines + n;
        partial = halves + n;
        tile = partial + blockDim.x;
        active = (int*)(tile + 2 * GROUP * TILE * (TILE + 1));
        list = active + n;
        order = list + n + 1;
        spare = (double*)(active + (3 * n + 3) / 2 * 2);
    }
};

__device__ double block_max(double x, double* scratch) {
    scratch[threadIdx.x] = x;
    __syncthreads();
    if (threadIdx.x < 32) {
        for (int e = threadIdx.x; e < blockDim.x; e += 32) x = scratch[e] > x ? scratch[e] : x;
        scratch[threadIdx.x] = x;
    }
    __syncthreads();
    for (int e = 0; e < 32; ++e) x = scratch[e] > x ? scratch[e] : x;
    __syncthreads();
    return x;
}

// Threads that share a column when all columns are summed at once, and this thread's part and column.
struct Columns {
    int width, parts, part, column;
    bool used;
    __device__ explicit Columns(int n) {
        width = n < blockDim.x ? (n + 31) / 32 * 32 : blockDim.x;
        if (width > blockDim.x) width = blockDim.x;
        parts = blockDim.x / width;
        part = threadIdx.x / width;
        column = threadIdx.x % width;
        used = part < parts;
    }
};

// The sum over the threads of a column, for its first thread.
__device__ double column_sum(double x, const Columns& mine, double* scratch) {
    __syncthreads();
    scratch[threadIdx.x] = x;
    __syncthreads();
    if (mine.part == 0) {
        for (int k = 1; k < mine.parts; ++k) x += scratch[k * mine.width + mine.column];
    }
    return x;
}

// in (batch, n, n), of which the lower triangle is read -> scaled: symmetric, its largest entry in [1, 2), and the same
// in single precision; scale: the power of two that was divided by, NaN where an entry is not finite.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    refine_prepare(const double* __restrict__ in, double* __restrict__ scaled, float* __restrict__ single,
                   double* __restrict__ scale, int n) {
    const long long start = (long long)blockIdx.x * n * n;
    in += start;
    scaled += start;
    single += start;
    double largest = 0;
    int bad = 0;
    for (int e = threadIdx.x; e < n * n; e += blockDim.x) {
        if (e % n > e / n) continue;
        const double x = fabs(in[e]);
        if (!(x <= 1.7976931348623157e308)) bad = 1;
        if (x > largest) largest = x;
    }
    bad = __syncthreads_or(bad);
    largest = block_max(largest, shared_memory);
    int exponent = 1;
    if (!bad && largest > 0) frexp(largest, &exponent);
    for (int e = threadIdx.x; e < n * n; e += blockDim.x) {
        const int i = e / n, j = e % n;
        const double x = bad ? (double)(i == j) : ldexp(in[i > j ? e : j * n + i], 1 - exponent);
        scaled[e] = x;
        single[e] = (float)x;
    }
    if (threadIdx.x == 0) scale[blockIdx.x] = bad ? nan("") : ldexp(1.0, exponent - 1);
}

// What a pair of indices does in a step.
struct Pair {
    bool conflict;
    double angle;
};

__device__ __forceinline__ Pair judge(double s, double gap, double floor, double theta) {
    const double size = fabs(s), reach = theta * fabs(gap);
    Pair pair = {size > reach && size > floor, 0};
    if (size <= reach && floor < reach) pair.angle = s / gap;
    return pair;
}

// Turn (x, y) by an angle given by its sine and the tangent of its half: the rounding error shrinks with the angle.
__device__ __forceinline__ void rotate(double sine, double half_tangent, double& x, double& y) {
    const double old = x;
    x -= sine * (y + half_tangent * x);
    y += sine * (old - half_tangent * y);
}

// Diagonalise the symmetric `s` (count rows of ld entries) by rounds of Jacobi rotations of disjoint pairs, which turn
// the rows of `q` (the same shape, the identity before), until no pair is above its tolerance: `floor`, or theta times
// the gap if that is more. Returns whether that was reached.
__device__ bool diagonalise(double* s, double* q, int count, int ld, double negligible, double theta, double floor,
                            const Room& room) {
    const int players = count + (count & 1), half = players / 2;
    for (int sweep = 0; sweep < MAX_SWEEPS; ++sweep) {
        int unfinished = 0;
        for (int e = threadIdx.x; e < count * count; e += blockDim.x) {
            const int i = e / count, j = e % count;
            const double reach = theta * fabs(s[i * ld + i] - s[j * ld + j]), size = fabs(s[i * ld + j]);
            if (i < j && size > floor && size > reach) unfinished = 1;
        }
        if (!__syncthreads_or(unfinished)) return true;
        for (int round = 0; round < players - 1; ++round) {
            // pair k of a round: the last player meets `round`, the others meet in mirrored places around it
            for (int k = threadIdx.x; k < half; k += blockDim.x) {
                const int a = k == 0 ? players - 1 : (round + k) % (players - 1);
                const int b = k == 0 ? round : (round + players - 1 - k) % (players - 1);
                double sine = 0, half_tangent = 0;
                if (a < count && b < count) {
                    const double off = s[a * ld + b], gap = s[b * ld + b] - s[a * ld + a];
                    if (fabs(off) > negligible) {
                        const double t = 2 * off / (fabs(gap) + sqrt(gap * gap + 4 * off * off));
                        const double cosine = 1 / sqrt(1 + t * t);
                        sine = gap < 0 ? -t * cosine : t * cosine;
                        half_tangent = sine / (1 + cosine);
                    }
                }
                room.order[2 * k] = a;
                room.order[2 * k + 1] = b;
                room.sines[k] = sine;
                room.halves[k] = half_tangent;
            }
            __syncthreads();
            for (int e = threadIdx.x; e < half * half; e += blockDim.x) {
                const int k = e / half, l = e % half;
                if (k > l || (room.sines[k] == 0 && room.sines[l] == 0)) continue;
                const int a = room.order[2 * k], b = room.order[2 * k + 1];
                const int x = room.order[2 * l], y = room.order[2 * l + 1];
                const bool has_a = a < count, has_x = x < count;  // only the first of a pair can be the missing player
                double ax = has_a && has_x ? s[a * ld + x] : 0, ay = has_a ? s[a * ld + y] : 0;
                double bx = has_x ? s[b * ld + x] : 0, by = s[b * ld + y];
                rotate(room.sines[k], room.halves[k], ax, bx);
                rotate(room.sines[k], room.halves[k], ay, by);
                rotate(room.sines[l], room.halves[l], ax, ay);
                rotate(room.sines[l], room.halves[l], bx, by);
                if (k == l) ay = bx = 0;
                if (has_a && has_x) s[a * ld + x] = s[x * ld + a] = ax;
                if (has_a) s[a * ld + y] = s[y * ld + a] = ay;
                if (has_x) s[b * ld + x] = s[x * ld + b] = bx;
                s[b * ld + y] = s[y * ld + b] = by;
            }
            for (int e = threadIdx.x; e < half * count; e += blockDim.x) {
                const int k = e / count, j = e % count;
                if (room.sines[k] == 0) continue;
                double *x = q + room.order[2 * k] * ld + j, *y = q + room.order[2 * k + 1] * ld + j;
                rotate(room.sines[k], room.halves[k], *x, *y);
            }
            __syncthreads();
        }
    }
    return false;
}

// Diagonalise the rows and columns of s named in room.list[0..count), leave the eigenvalues in room.values, and turn
// the rows of p with them. s is destroyed; `compact` has room for two matrices of order count whose rows have ld
// entries.
__device__ bool turn_listed(double* s, double* p, double* compact, int n, int count, int ld, double largest,
                            double theta, double floor, const Room& room) {
    double* q = compact + count * ld;
    for (int e = threadIdx.x; e < count * count; e += blockDim.x) {
        const int i = e / count, j = e % count;
        compact[i * ld + j] = s[room.list[i] * n + room.list[j]];
        q[i * ld + j] = (double)(i == j);
    }
    __syncthreads();
    const bool converged = diagonalise(compact, q, count, ld, NEGLIGIBLE * largest, theta, floor, room);
    for (int i = threadIdx.x; i < count; i += blockDim.x) room.values[room.list[i]] = compact[i * ld + i];
    for (int e = threadIdx.x; e < (count + ROWS - 1) / ROWS * n; e += blockDim.x) {
        const int top = e / n * ROWS, j = e % n;
        double sum[ROWS] = {};
        for (int k = 0; k < count; ++k) {
            const double x = p[room.list[k] * n + j];
            for (int r = 0; r < ROWS; ++r) sum[r] += (top + r < count ? q[(top + r) * ld + k] : 0) * x;
        }
        for (int r = 0; r < ROWS && top + r < count; ++r) s[(top + r) * n + j] = sum[r];
    }
    __syncthreads();
    for (int e = threadIdx.x; e < count * n; e += blockDim.x) p[room.list[e / n] * n + e % n] = s[e];
    __syncthreads();
    return converged;
}

// One step. g (batch, n, 2, n): rows of V V^T and U V^T in turn. p (batch, n, n): receives P. s (batch, n, n): room for
// S. g is destroyed. spare: numbers of shared memory behind the room, for small parts of S. In the last step `v`
// (batch, n, 2, n; V in the even rows) and `a`, the matrices, serve the start from the identity, the rows of P are
// sorted by the eigenvalues, and `values` (batch, n) receives these times `scale`, NaN without success. turned (batch):
// counts the indices that were diagonalised by rotations, over all steps, n more after a new start.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    refine_step(double* __restrict__ g, double* __restrict__ p, double* __restrict__ s, double* __restrict__ v,
                const double* __restrict__ a, const double* __restrict__ scale, double* __restrict__ out,
                int* __restrict__ turned, double theta, int last, int n, int spare) {
    const Room room(n);
    const Columns mine(n);
    const long long start = (long long)blockIdx.x * n * n;
    g += 2 * start;
    p += start;
    s += start;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const double* row = g + 2 * i * n;
        room.values[i] = row[n + i] / row[i];
    }
    __syncthreads();
    double largest = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        if (fabs(room.values[i]) > largest) largest = fabs(room.values[i]);
    }
    largest = block_max(largest, room.partial);
    double tolerance = (last ? TOLERANCE : EARLY_TOLERANCE) * largest;

    // S to s and R/2 to p, symmetric to the last bit: a tile and its mirror image, GROUP tiles at a time
    const int tiles = (n + TILE - 1) / TILE, ld = TILE + 1, size = TILE * ld;
    for (int t = 0; t < tiles * tiles; t += GROUP) {
        for (int e = threadIdx.x; e < GROUP * TILE * TILE; e += blockDim.x) {
            const int which = e / (TILE * TILE), row = e / TILE % TILE, column = e % TILE;
            const int i = (t + which) % tiles * TILE + row, j = (t + which) / tiles * TILE + column;
            if (i < n && j < n) {
                double* tile = room.tile + 2 * which * size + column * ld + row;
                tile[0] = g[2 * i * n + j];
                tile[size] = g[(2 * i + 1) * n + j];
            }
        }
        __syncthreads();
        for (int e = threadIdx.x; e < GROUP * TILE * TILE; e += blockDim.x) {
            const int which = e / (TILE * TILE), row = e / TILE % TILE, column = e % TILE;
            const int i = (t + which) / tiles * TILE + row, j = (t + which) % tiles * TILE + column;
            if (i < n && j < n) {
                const double* tile = room.tile + 2 * which * size + row * ld + column;
                const double product = 0.5 * (g[2 * i * n + j] + tile[0]);
                const double image = 0.5 * (g[(2 * i + 1) * n + j] + tile[size]);
                const double defect = (double)(i == j) - product;
                p[i * n + j] = 0.5 * defect;
                s[i * n + j] = i == j ? room.values[i] : image + 0.5 * defect * (room.values[i] + room.values[j]);
            }
        }
        __syncthreads();
    }

    // of each column: what its pairs mix into others in second order, and the sum of |R|
    int trouble = 0, useless = 0;
    for (int first = 0; first < n; first += mine.width) {
        const int j = first + mine.column;
        double mixed = 0, sum = 0;
        if (mine.used && j < n) {
#pragma unroll 4
            for (int i = mine.part; i < n; i += mine.parts) {
                if (last) sum += fabs(p[i * n + j]);
                if (i == j) continue;
                const Pair pair = judge(s[i * n + j], room.values[i] - room.values[j], 0, theta);
                mixed += fabs(pair.angle * s[i * n + j]);
                trouble |= pair.conflict;
            }
        }
        mixed = column_sum(mixed, mine, room.partial);
        if (mine.part == 0 && j < n) room.noise[j] = last || MIXING_MARGIN * mixed < tolerance ? tolerance : MIXING_MARGIN * mixed;
        if (last) {
            sum = column_sum(sum, mine, room.partial);
            if (mine.part == 0 && j < n && !(2 * sum <= MAX_DEFECT)) useless = 1;
        }
    }
    for (int i = threadIdx.x; i < n; i += blockDim.x) room.active[i] = 0;
    trouble = __syncthreads_or(trouble);
    const int again = __syncthreads_or(useless);

    // indices in conflict
    if (again) {
        v += 2 * start;
        a += start;
        for (int e = threadIdx.x; e < n * n; e += blockDim.x) {
            const int i = e / n, j = e % n;
            v[2 * i * n + j] = p[e] = (double)(i == j);
            s[e] = a[e];
        }
        double square = 0;  // of the longest column, a lower bound of the largest eigenvalue
        for (int j = threadIdx.x; j < n; j += blockDim.x) {
            double sum = 0;
            for (int i = 0; i < n; ++i) sum += a[i * n + j] * a[i * n + j];
            if (sum > square) square = sum;
            room.active[j] = 1;
        }
        largest = sqrt(block_max(square, room.partial));
        tolerance = TOLERANCE * largest;
    } else if (trouble) {
        for (int first = 0; first < n; first += mine.width) {
            const int j = first + mine.column;
            double sum = 0;
            if (mine.used && j < n) {
#pragma unroll 4
                for (int i = mine.part; i < n; i += mine.parts) {
                    if (i == j) continue;
                    const double floor = room.noise[i] > room.noise[j] ? room.noise[i] : room.noise[j];
                    const Pair pair = judge(s[i * n + j], room.values[i] - room.values[j], floor, theta);
                    sum += pair.conflict ? theta * theta : pair.angle * pair.angle;
                }
            }
            sum = column_sum(sum, mine, room.partial);
            if (mine.part == 0 && j < n && sum >= theta * theta) room.active[j] = 1;
        }
    }
    int count = 0;
    if (trouble || again) {
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int i = 0; i < n; ++i) {
                if (room.active[i]) room.list[count++] = i;
            }
            room.list[n] = count;
            turned[blockIdx.x] += again ? n + count : count;
        }
        __syncthreads();
        count = room.list[n];
    }

    if (!again) {
        // norms of the columns of I + T, then P
        for (int first = 0; first < n; first += mine.width) {
            const int j = first + mine.column;
            double sum = 0;
            if (mine.used && j < n) {
#pragma unroll 4
                for (int i = mine.part; i < n; i += mine.parts) {
                    if (i == j || (room.active[i] && room.active[j])) continue;
                    const double floor = room.noise[i] > room.noise[j] ? room.noise[i] : room.noise[j];
                    const double angle = judge(s[i * n + j], room.values[i] - room.values[j], floor, theta).angle;
                    sum += angle * angle;
                }
            }
            sum = column_sum(sum, mine, room.partial);
            if (mine.part == 0 && j < n) room.norms[j] = 1 / sqrt(1 + sum);
        }
        __syncthreads();
#pragma unroll 4
        for (int e = threadIdx.x; e < n * n; e += blockDim.x) {
            const int i = e / n, j = e % n;
            double turn = (double)(i == j);
            if (i != j && !(room.active[i] && room.active[j])) {
                const double floor = room.noise[i] > room.noise[j] ? room.noise[i] : room.noise[j];
                turn = judge(s[e], room.values[i] - room.values[j], floor, theta).angle;
            }
            p[e] += turn * room.norms[i];
        }
        __syncthreads();
    }
    bool converged = true;
    if (count) {
        const bool fits = 2 * count * (count | 1) <= spare;
        converged = turn_listed(s, p, fits ? room.spare : g, n, count, fits ? count | 1 : count, largest,
                                last ? 0 : theta, tolerance, room);
    }
    if (!last) return;

    const double unit = converged ? scale[blockIdx.x] : nan("");
    int moved = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const double value = room.values[i];
        int rank = 0;
        for (int j = 0; j < n; ++j) {
            if (room.values[j] < value || (room.values[j] == value && j < i)) ++rank;
        }
        room.order[i] = rank;
        if (rank != i) moved = 1;
        out[(long long)blockIdx.x * n + rank] = value * unit;
    }
    if (!__syncthreads_or(moved) && unit == unit) return;
    for (int e = threadIdx.x; e < n * n; e += blockDim.x) s[e] = p[e];
    __syncthreads();
    for (int e = threadIdx.x; e < n * n; e += blockDim.x) {
        p[room.order[e / n] * n + e % n] = unit == unit ? s[e] : unit;
    }
}
