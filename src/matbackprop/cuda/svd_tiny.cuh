// The thin singular value decomposition of a very small matrix by one-sided Jacobi rotations, in the registers of one
// thread. K is the short side and L the long side; a tall matrix is transposed. IN is the type of the matrix.

#ifndef SWEEPS
#define SWEEPS 30
#endif
#define STRICT_SWEEPS 12  // after them, the rounding error of an inner product is accepted

struct Row {
    double x[L], q[K];  // row of Y = Q^T X, in the end a right vector, and its left vector in Q
    double square;      // squared norm of x, in the end its singular value
};

__device__ __forceinline__ double dot(const double (&a)[L], const double (&b)[L]) {
    double sum = 0;
#pragma unroll
    for (int j = 0; j < L; ++j) sum += a[j] * b[j];
    return sum;
}

template <int N>
__device__ __forceinline__ void rotate_pair(double (&a)[N], double (&b)[N], double c, double s) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const double x = a[j], z = b[j];
        a[j] = c * x - s * z;
        b[j] = s * x + c * z;
    }
}

// X (K, L), contiguous or transposed, to its singular values, descending, and vectors. Returns whether all entries are
// finite and the rotations converged.
__device__ __forceinline__ bool decompose(const IN* __restrict__ x, int tall, Row (&rows)[K]) {
    double largest = 0;
    bool bad = false;
#pragma unroll
    for (int i = 0; i < K; ++i) {
#pragma unroll
        for (int j = 0; j < L; ++j) {
            rows[i].x[j] = x[tall ? j * K + i : i * L + j];
            bad = bad || !(fabs(rows[i].x[j]) <= 1.7e308);
            largest = fabs(rows[i].x[j]) > largest ? fabs(rows[i].x[j]) : largest;
        }
#pragma unroll
        for (int j = 0; j < K; ++j) rows[i].q[j] = i == j ? 1 : 0;
    }
    int exponent = 0;
    if (largest > 0 && !bad) frexp(largest, &exponent);
    exponent = exponent < -1000 ? -1000 : exponent;
    const double unit = ldexp(1.0, exponent - 1), inverse = ldexp(1.0, 1 - exponent);  // no square overflows or underflows
#pragma unroll
    for (int i = 0; i < K; ++i) {
#pragma unroll
        for (int j = 0; j < L; ++j) rows[i].x[j] *= inverse;
    }
    bool rotated = !bad;
    for (int sweep = 0; sweep < SWEEPS && rotated; ++sweep) {
        rotated = false;
        const double tolerance = sweep < STRICT_SWEEPS ? ORTHOGONAL : 8 * ORTHOGONAL;
#pragma unroll
        for (int a = 0; a < K; ++a) {
#pragma unroll
            for (int b = a + 1; b < K; ++b) {
                const double aa = dot(rows[a].x, rows[a].x), bb = dot(rows[b].x, rows[b].x), ab = dot(rows[a].x, rows[b].x);
                if (!(fabs(ab) > tolerance * sqrt(aa) * sqrt(bb))) continue;
                const double zeta = (bb - aa) / (2 * ab);
                const double t = (zeta < 0 ? -1.0 : 1.0) / (fabs(zeta) + sqrt(1 + zeta * zeta));
                if (t == 0) continue;  // one row is below the rounding error of the other
                rotated = true;
                const double c = 1 / sqrt(1 + t * t), s = c * t;
                rotate_pair(rows[a].x, rows[b].x, c, s);
                rotate_pair(rows[a].q, rows[b].q, c, s);
            }
        }
    }
    double top = 0;
#pragma unroll
    for (int i = 0; i < K; ++i) {
        rows[i].square = dot(rows[i].x, rows[i].x);
        top = rows[i].square > top ? rows[i].square : top;
    }
    const double level = NOISE * L, floor_value = level * level * top;  // directions below the noise floor
#pragma unroll
    for (int i = 0; i < K; ++i) {
        if (rows[i].square <= floor_value) rows[i].square = 0;
    }
#pragma unroll
    for (int pass = 0; pass < K - 1; ++pass) {  // the largest first
#pragma unroll
        for (int i = 0; i < K - 1 - pass; ++i) {
            if (rows[i].square < rows[i + 1].square) {
                const Row other = rows[i];
                rows[i] = rows[i + 1];
                rows[i + 1] = other;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < K; ++i) {
        const double norm = sqrt(rows[i].square);
#pragma unroll
        for (int j = 0; j < L; ++j) rows[i].x[j] = norm > 0 ? rows[i].x[j] / norm : 0;
        if (norm == 0) {  // complete with a row orthonormal to the previous ones, from the unit vector farthest from their span
            int best = 0;
            double least = 2;
#pragma unroll
            for (int j = 0; j < L; ++j) {
                double hidden = 0;
#pragma unroll
                for (int r = 0; r < i; ++r) hidden += rows[r].x[j] * rows[r].x[j];
                best = hidden < least ? j : best;
                least = hidden < least ? hidden : least;
            }
#pragma unroll
            for (int j = 0; j < L; ++j) rows[i].x[j] = j == best ? 1 : 0;
            for (int clearing = 0; clearing < 2; ++clearing) {
#pragma unroll
                for (int r = 0; r < i; ++r) {
                    const double overlap = dot(rows[r].x, rows[i].x);
#pragma unroll
                    for (int j = 0; j < L; ++j) rows[i].x[j] -= overlap * rows[r].x[j];
                }
                const double size = sqrt(dot(rows[i].x, rows[i].x));
#pragma unroll
                for (int j = 0; j < L; ++j) rows[i].x[j] /= size;
            }
        }
        rows[i].square = norm * unit;
    }
    return !(bad || rotated);
}
