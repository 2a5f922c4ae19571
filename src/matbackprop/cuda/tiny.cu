// The thin singular value decomposition and the polar decomposition of very small matrices, one thread per matrix.
//
// The decomposition by one-sided Jacobi rotations stays in the registers of a thread. K is the short side and L the long
// side; a tall matrix is transposed, and so are Q and V, as in svd.cu. IN is the type of X and of the returned singular
// value decomposition; polar decompositions are double.

#ifndef SWEEPS
#define SWEEPS 30
#endif
#define UNROLL _Pragma("unroll")
#define STRICT_SWEEPS 12  // after them, the rounding error of an inner product is accepted

struct Row {
    double x[L], q[K];  // row of Y = Q^T X, in the end a right vector, and its left vector in Q
    double square;      // squared norm of x, in the end its singular value
};

__device__ __forceinline__ double dot(const double (&a)[L], const double (&b)[L]) {
    double sum = 0;
    UNROLL for (int j = 0; j < L; ++j) sum += a[j] * b[j];
    return sum;
}

template <int N>
__device__ __forceinline__ void rotate_pair(double (&a)[N], double (&b)[N], double c, double s) {
    UNROLL for (int j = 0; j < N; ++j) {
        const double x = a[j], z = b[j];
        a[j] = c * x - s * z;
        b[j] = s * x + c * z;
    }
}

// X (K, L), contiguous or transposed, to its singular values, descending, and vectors. Returns whether all entries are
// finite and the rotations converged.
template <typename T>
__device__ __forceinline__ bool decompose(const T* __restrict__ x, int tall, Row (&rows)[K]) {
    double largest = 0;
    bool bad = false;
    UNROLL for (int i = 0; i < K; ++i) {
        UNROLL for (int j = 0; j < L; ++j) {
            rows[i].x[j] = x[tall ? j * K + i : i * L + j];
            bad = bad || !(fabs(rows[i].x[j]) <= 1.7e308);
            largest = fabs(rows[i].x[j]) > largest ? fabs(rows[i].x[j]) : largest;
        }
        UNROLL for (int j = 0; j < K; ++j) rows[i].q[j] = i == j ? 1 : 0;
    }
    int exponent = 0;
    if (largest > 0 && !bad) frexp(largest, &exponent);
    exponent = exponent < -1000 ? -1000 : exponent;
    const double unit = ldexp(1.0, exponent - 1), inverse = ldexp(1.0, 1 - exponent);  // no square overflows or underflows
    UNROLL for (int i = 0; i < K; ++i) {
        UNROLL for (int j = 0; j < L; ++j) rows[i].x[j] *= inverse;
    }
    bool rotated = !bad;
    for (int sweep = 0; sweep < SWEEPS && rotated; ++sweep) {
        rotated = false;
        const double tolerance = sweep < STRICT_SWEEPS ? ORTHOGONAL : 8 * ORTHOGONAL;
        UNROLL for (int a = 0; a < K; ++a) {
            UNROLL for (int b = a + 1; b < K; ++b) {
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
    UNROLL for (int i = 0; i < K; ++i) {
        rows[i].square = dot(rows[i].x, rows[i].x);
        top = rows[i].square > top ? rows[i].square : top;
    }
    const double level = NOISE * L, floor_value = level * level * top;  // directions below the noise floor
    UNROLL for (int i = 0; i < K; ++i) {
        if (rows[i].square <= floor_value) rows[i].square = 0;
    }
    UNROLL for (int pass = 0; pass < K - 1; ++pass) {  // the largest first
        UNROLL for (int i = 0; i < K - 1 - pass; ++i) {
            if (rows[i].square < rows[i + 1].square) {
                const Row other = rows[i];
                rows[i] = rows[i + 1];
                rows[i + 1] = other;
            }
        }
    }
    UNROLL for (int i = 0; i < K; ++i) {
        const double norm = sqrt(rows[i].square);
        UNROLL for (int j = 0; j < L; ++j) rows[i].x[j] = norm > 0 ? rows[i].x[j] / norm : 0;
        if (norm == 0) {  // complete with a row orthonormal to the previous ones, from the unit vector farthest from their span
            int best = 0;
            double least = 2;
            UNROLL for (int j = 0; j < L; ++j) {
                double hidden = 0;
                UNROLL for (int r = 0; r < i; ++r) hidden += rows[r].x[j] * rows[r].x[j];
                best = hidden < least ? j : best;
                least = hidden < least ? hidden : least;
            }
            UNROLL for (int j = 0; j < L; ++j) rows[i].x[j] = j == best ? 1 : 0;
            for (int clearing = 0; clearing < 2; ++clearing) {
                UNROLL for (int r = 0; r < i; ++r) {
                    const double overlap = dot(rows[r].x, rows[i].x);
                    UNROLL for (int j = 0; j < L; ++j) rows[i].x[j] -= overlap * rows[r].x[j];
                }
                const double size = sqrt(dot(rows[i].x, rows[i].x));
                UNROLL for (int j = 0; j < L; ++j) rows[i].x[j] /= size;
            }
        }
        rows[i].square = norm * unit;
    }
    return !(bad || rotated);
}

// --- singular value decomposition ------------------------------------------------------------------------------------

// x (count, K, L) -> q (count, K, K), sigma (count, K) descending, v (count, K, L); NaN if an entry is not finite, or
// the rotations do not converge. q_out, sigma_out and v_out, if given, receive the same rounded to IN.
extern "C" __global__ void __launch_bounds__(128)
    svd_tiny(const IN* __restrict__ x, double* __restrict__ q, double* __restrict__ sigma, double* __restrict__ v,
             IN* __restrict__ q_out, IN* __restrict__ sigma_out, IN* __restrict__ v_out, int count, int tall) {
    const int number = blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= count) return;
    x += (long long)number * K * L;
    q += (long long)number * K * K;
    v += (long long)number * K * L;
    sigma += (long long)number * K;
    if (q_out != nullptr) {
        q_out += (long long)number * K * K;
        v_out += (long long)number * K * L;
        sigma_out += (long long)number * K;
    }
    Row rows[K];
    const double missing = decompose(x, tall, rows) ? 0 : nan("");
    UNROLL for (int i = 0; i < K; ++i) {
        sigma[i] = rows[i].square + missing;
        if (q_out != nullptr) sigma_out[i] = (IN)sigma[i];
        UNROLL for (int j = 0; j < K; ++j) {
            const int at = tall ? i * K + j : j * K + i;
            q[at] = rows[i].q[j] + missing;
            if (q_out != nullptr) q_out[at] = (IN)q[at];
        }
        UNROLL for (int j = 0; j < L; ++j) {
            const int at = tall ? j * K + i : i * L + j;
            v[at] = rows[i].x[j] + missing;
            if (q_out != nullptr) v_out[at] = (IN)v[at];
        }
    }
}

// --- polar decomposition ---------------------------------------------------------------------------------------------
//
// Columns u and v of the singular value decomposition and its singular values are saved as K rows of L + K + 1 numbers,
// each contiguous over the matrices.

template <int N>
__device__ __forceinline__ double determinant(const double (&a)[N][N]) {
    if constexpr (N == 1) {
        return a[0][0];
    } else {
        double sum = 0;
        UNROLL for (int column = 0; column < N; ++column) {
            double minor[N - 1][N - 1];
            UNROLL for (int i = 1; i < N; ++i) {
                UNROLL for (int j = 0; j < N - 1; ++j) minor[i - 1][j] = a[i][j < column ? j : j + 1];
            }
            sum += (column % 2 ? -a[0][column] : a[0][column]) * determinant<N - 1>(minor);
        }
        return sum;
    }
}

// a (count, L, K) -> q (count, L, K), p (count, K, K), factors (K, L + K + 1, count). For a rotation, L = K and the last
// singular value and its u change sign if the determinant is negative. NaN if q is not unique: the smallest sum of singular
// values that divides is at most `tolerance` times the largest; a negative tolerance accepts any q.
extern "C" __global__ void __launch_bounds__(128)
    polar_tiny(const double* __restrict__ a, double* __restrict__ q, double* __restrict__ p, double* __restrict__ factors,
               double tolerance, int rotation, int count) {
    const int number = blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= count) return;
    Row rows[K];
    bool good = decompose(a + (long long)number * L * K, 1, rows);
#if K == L
    if (rotation) {
        double u[K][K], v[K][K];
        UNROLL for (int i = 0; i < K; ++i) {
            UNROLL for (int j = 0; j < K; ++j) {
                u[i][j] = rows[i].x[j];
                v[i][j] = rows[i].q[j];
            }
        }
        if (determinant<K>(u) * determinant<K>(v) < 0) {
            rows[K - 1].square = -rows[K - 1].square;
            UNROLL for (int j = 0; j < L; ++j) rows[K - 1].x[j] = -rows[K - 1].x[j];
        }
    }
#endif
    const double least = rows[K - 1].square + (rotation && K > 1 ? rows[K > 1 ? K - 2 : 0].square : 0);
    good = good && (tolerance < 0 || (rotation && K == 1) || least > tolerance * rows[0].square);
    const double missing = good ? 0 : nan("");
    UNROLL for (int i = 0; i < L; ++i) {
        UNROLL for (int j = 0; j < K; ++j) {
            double sum = missing;
            UNROLL for (int r = 0; r < K; ++r) sum += rows[r].x[i] * rows[r].q[j];
            q[(long long)number * L * K + i * K + j] = sum;
        }
    }
    UNROLL for (int i = 0; i < K; ++i) {
        UNROLL for (int j = 0; j < K; ++j) {
            double sum = missing;
            UNROLL for (int r = 0; r < K; ++r) sum += rows[r].square * (rows[r].q[i] * rows[r].q[j]);
            p[(long long)number * K * K + i * K + j] = sum;
        }
    }
    factors += number;
    UNROLL for (int r = 0; r < K; ++r) {
        UNROLL for (int i = 0; i < L; ++i, factors += count) *factors = rows[r].x[i] + missing;
        UNROLL for (int i = 0; i < K; ++i, factors += count) *factors = rows[r].q[i];
        *factors = rows[r].square;
        factors += count;
    }
}

// The gradient (count, L, K) of A for the gradients of Q and P. In the bases u and v, with S the symmetric part of that of P,
// it is S + (W - W^T + diag(s) S - S diag(s)) / (s_i + s_j) inside, W = U^T G V, and (I - UU^T) G V / s_j outside.
extern "C" __global__ void __launch_bounds__(128)
    polar_tiny_adjoint(const double* __restrict__ factors, const double* __restrict__ g_q, const double* __restrict__ g_p,
                       double* __restrict__ out, int count) {
    const int number = blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= count) return;
    double u[K][L], v[K][K], s[K];
    factors += number;
    UNROLL for (int r = 0; r < K; ++r) {
        UNROLL for (int i = 0; i < L; ++i, factors += count) u[r][i] = *factors;
        UNROLL for (int i = 0; i < K; ++i, factors += count) v[r][i] = *factors;
        s[r] = *factors;
        factors += count;
    }
    g_q += (long long)number * L * K;
    g_p += (long long)number * K * K;
    out += (long long)number * L * K;
    double moved[K][L], w[K][K], symmetric[K][K];  // moved: columns of G V
    UNROLL for (int r = 0; r < K; ++r) {
        double column[K];
        UNROLL for (int i = 0; i < L; ++i) {
            moved[r][i] = 0;
            UNROLL for (int j = 0; j < K; ++j) moved[r][i] += g_q[i * K + j] * v[r][j];
        }
        UNROLL for (int i = 0; i < K; ++i) {
            column[i] = 0;
            UNROLL for (int j = 0; j < K; ++j) column[i] += 0.5 * (g_p[i * K + j] + g_p[j * K + i]) * v[r][j];
        }
        UNROLL for (int i = 0; i < K; ++i) {
            w[i][r] = dot(u[i], moved[r]);
            symmetric[i][r] = 0;
            UNROLL for (int j = 0; j < K; ++j) symmetric[i][r] += v[i][j] * column[j];
        }
    }
    UNROLL for (int r = 0; r < K; ++r) {
        UNROLL for (int i = 0; i < L; ++i) {
            double outside = 0;
#if L > K
            outside = moved[r][i];
            UNROLL for (int j = 0; j < K; ++j) outside -= u[j][i] * w[j][r];
            outside /= s[r];
#endif
            moved[r][i] = outside;
        }
    }
    UNROLL for (int r = 0; r < K; ++r) {
        UNROLL for (int j = 0; j < K; ++j) {
            const double sum = s[j] + s[r], turned = w[j][r] - w[r][j] + (s[j] - s[r]) * symmetric[j][r];
            const double inside = symmetric[j][r] + (j == r || sum == 0 ? 0 : turned / sum);
            UNROLL for (int i = 0; i < L; ++i) moved[r][i] += u[j][i] * inside;
        }
    }
    UNROLL for (int i = 0; i < L; ++i) {
        UNROLL for (int j = 0; j < K; ++j) {
            double sum = 0;
            UNROLL for (int r = 0; r < K; ++r) sum += moved[r][i] * v[r][j];
            out[i * K + j] = sum;
        }
    }
}
