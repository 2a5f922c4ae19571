"""Reference implementations of the operators in arbitrary precision (mpmath), from their definitions.

Independent of the library: no divided differences, no adjoints, no Gram matrices in place of singular values. Inputs
are mpmath matrices, outputs are lists of them without a gauge freedom. Derivatives are difference quotients.
"""

import itertools

import mpmath
from mpmath import mp, mpf


class Undefined(ArithmeticError):
    """The operator is undefined at this input."""


class Overflow(ArithmeticError):
    """The value exceeds the range of floating point."""


def norm(a):
    """The largest absolute entry."""
    return max((abs(x) for x in a), default=mpf(0))


def sym(a):
    return (a + a.T) / 2


def diagonal(values):
    return mpmath.diag(list(values))


def columns(a, first, stop):
    out = mpmath.matrix(a.rows, stop - first)
    for i in range(a.rows):
        for j in range(first, stop):
            out[i, j - first] = a[i, j]
    return out


def eig(a):
    """Ascending eigenvalues and eigenvectors of the symmetric part."""
    n = a.rows
    size = norm(a)
    if n == 0 or size == 0:
        return [mpf(0)] * n, mpmath.eye(n)
    values, vectors = mpmath.eigsy(sym(a) / size)
    order = sorted(range(n), key=lambda i: values[i])
    ordered = mpmath.matrix(n, n)
    for j, source in enumerate(order):
        for i in range(n):
            ordered[i, j] = vectors[i, source]
    return [values[i] * size for i in order], ordered


def compose(u, values, v=None):
    """U diag(values) Vᵀ."""
    return (u * diagonal(values)) * (u if v is None else v).T if len(values) else mpmath.matrix(u.rows, u.rows)


def vector(values):
    return mpmath.matrix(list(values)) if values else mpmath.matrix(0, 1)


def leading(values, u):
    """uuᵀ of the first eigenvector, None if it is not determined."""
    n = len(values)
    if n == 0:
        return mpmath.matrix(u.rows, u.rows)
    if n > 1 and values[1] - values[0] <= mpf(10) ** -15 * max(abs(x) for x in values):
        return None
    return columns(u, 0, 1) * columns(u, 0, 1).T


def function(a, g):
    values, u = eig(a)
    return compose(u, [g(x) for x in values])


def positive(values, what="positive"):
    if any(x <= 0 for x in values):
        raise Undefined(what)
    return values


def log(a):
    values, u = eig(a)
    return compose(u, [mpmath.log(x) for x in positive(values)])


def exp(a):
    values, u = eig(a)
    if any(x > 1e4 for x in values):
        raise Overflow
    return compose(u, [mpmath.exp(max(x, mpf(-1e5))) for x in values])


def power(a, p):
    """λ^p; any λ for a whole number p ≥ 0 given as int, nonzero ones for p < 0, positive ones for all other numbers."""
    values, u = eig(a)
    if isinstance(p, int):
        if p < 0 and any(x == 0 for x in values):
            raise Undefined("nonzero")
        return compose(u, [x**p for x in values])
    if any(abs(p * mpmath.log(x)) > 1e5 for x in positive(values)):
        raise Overflow
    return compose(u, [mpmath.exp(p * mpmath.log(x)) for x in values])


def inverse(a):
    return power(a, -1)


def gram(f, weights=None):
    """Fᵀ diag(w) F."""
    return f.T * (f if weights is None else diagonal(weights) * f)


def pool(f, eps, g, weights=None, center=False):
    """g(Fᵀ diag(w) F + εI)."""
    d = f.cols
    w = [mpf(1)] * f.rows if weights is None else list(weights)
    if center and f.rows:
        total = sum(w)
        mean = [sum(w[i] * f[i, j] for i in range(f.rows)) / (total or 1) for j in range(d)]
        f = mpmath.matrix([[f[i, j] - mean[j] for j in range(d)] for i in range(f.rows)])
    values, v = eig(gram(f, w)) if f.rows else ([mpf(0)] * d, mpmath.eye(d))
    return compose(v, [g(max(x, 0) + eps) for x in values])


def span(x, tol):
    """The projector on the columns of X, and its rank, by the eigenvalues of XᵀX above a fraction of the largest."""
    values, v = eig(x.T * x)
    most = max(values, default=mpf(0))
    kept = [i for i, value in enumerate(values) if value > tol * most and value > 0]
    xv = x * v
    onto = mpmath.matrix(x.rows, x.rows)
    for i in kept:
        column = columns(xv, i, i + 1)
        onto += column * column.T / values[i]
    return onto, len(kept)


def singular(a):
    """Descending singular values, and U, V of the thin decomposition; columns of U with σ = 0 are zero."""
    if a.rows < a.cols:
        values, u, v = singular(a.T)
        return values, v, u
    squares, v = eig(a.T * a)
    n = len(squares)
    v = mpmath.matrix([[v[i, n - 1 - j] for j in range(n)] for i in range(n)]) if n else v
    values = [mpmath.sqrt(max(x, 0)) for x in reversed(squares)]
    av = a * v
    u = mpmath.matrix(a.rows, n)
    for j in range(n):
        for i in range(a.rows):
            u[i, j] = av[i, j] / values[j] if values[j] > 0 else 0
    return values, u, v


def polar(a, tol):
    """Q and P of A = QP, Q with orthonormal columns or rows."""
    values, u, v = singular(a)
    if not values:
        return [a, a.T * a]
    if values[-1] <= tol * values[0]:
        raise Undefined("full rank")
    q = u * v.T
    return [q, sym(q.T * a)]


def rotation(a, tol, reflection=False):
    """The nearest rotation, or orthogonal matrix."""
    n = a.rows
    values, u, v = singular(a)
    if n == 0:
        return a
    if values[0] == 0 and n > 1:
        raise Undefined("rank")
    if not reflection and n > 1 and values[-2] + values[-1] <= tol * values[0]:
        raise Undefined("unique")
    if values[-1] <= mpf(10) ** (-mp.dps // 3) * values[0]:  # the last vector completes the basis
        if reflection:
            raise Undefined("rank")
        for i in range(n):
            unit = mpmath.matrix(n, 1)
            unit[i] = 1
            for j in range(n - 1):
                other = columns(u, j, j + 1)
                unit -= other * (other.T * unit)[0]
            size = mpmath.sqrt((unit.T * unit)[0])
            if size > mpf("0.1"):
                for k in range(n):
                    u[k, n - 1] = unit[k] / size
                break
    sign = [mpf(1)] * n
    if not reflection and mpmath.det(u * v.T) < 0:
        sign[-1] = mpf(-1)
    least = values[-1] if reflection else (values[-2] + sign[-1] * values[-1] if n > 1 else values[0] + 1)
    if least <= tol * values[0]:
        raise Undefined("unique")
    return compose(u, sign, v)


def indicators(labels, k, weights):
    """√w E for the rows that count."""
    e = mpmath.matrix(len(labels), k)
    for i, label in enumerate(labels):
        if label >= 0:
            e[i, label] = mpmath.sqrt(weights[i])
    return e


def labeled(f, labels, weights):
    """Rows times the square root of their weight, and the weights; rows without a label have weight 0."""
    weights = [mpf(1)] * f.rows if weights is None else list(weights)
    weights = [w if label >= 0 else mpf(0) for w, label in zip(weights, labels, strict=True)]
    if weights and not any(w > 0 for w in weights):
        raise Undefined("labeled rows")
    return diagonal([mpmath.sqrt(w) for w in weights]) * f, weights


def distance(one, other):
    """½‖A − B‖²."""
    return mpmath.matrix([sum(x * x for x in one - other) / 2])


def j2(f, labels, tol, weights=None, k=3):
    if f.rows == 0:
        return mpmath.matrix(1, 1)
    x, w = labeled(f, labels, weights)
    return distance(span(x, tol)[0], span(indicators(labels, k, w), mpf(10) ** -30)[0])


def j1(f, labels, tol, weights=None, lam=None, k=3):
    if f.rows == 0:
        return mpmath.matrix(1, 1)
    x, w = labeled(f, labels, weights)
    lam = mpmath.eye(f.cols) if lam is None else lam
    root = mpmath.matrix([mpmath.sqrt(v) for v in w])
    full = x * lam * (x.T * root)  # √w times the degrees
    degree = [full[i] / root[i] if w[i] > 0 else mpf(0) for i in range(f.rows)]
    if any(x < 0 for x in degree):
        raise Undefined("degrees")
    down = diagonal([1 / mpmath.sqrt(x) if x > 0 else mpf(0) for x in degree])
    up = diagonal([mpmath.sqrt(x) for x in degree])
    return distance(span(down * x, tol)[0], span(up * indicators(labels, k, w), mpf(10) ** -30)[0])


def soft(f, labels, ridge, weights=None, k=3):
    if f.rows == 0:
        return mpmath.matrix(1, 1)
    x, w = labeled(f, labels, weights)
    c = x.T * x
    trace = sum(c[i, i] for i in range(f.cols))
    onto = mpmath.matrix(f.rows, f.rows)
    if trace > 0:
        inner = c / trace + (mpf(ridge) / f.cols) * mpmath.eye(f.cols)
        onto = (x / mpmath.sqrt(trace)) * mpmath.inverse(inner) * (x / mpmath.sqrt(trace)).T
    return distance(onto, span(indicators(labels, k, w), mpf(10) ** -30)[0])


def cut_value(w, labels, k=3):
    """Σ over regions of the cut over the volume."""
    if w.rows == 0:
        return mpmath.matrix(1, 1)
    total = mpf(0)
    for region in range(k):
        inside = [i for i, label in enumerate(labels) if label == region]
        there = [i for i, label in enumerate(labels) if label >= 0]
        volume = sum((w[i, j] for i in inside for j in there), mpf(0))
        kept = sum((w[i, j] for i in inside for j in inside), mpf(0))
        if volume > 0:
            total += (volume - kept) / volume
    _degrees(mpmath.matrix([[w[i, j] for j in there] for i in there]))
    return mpmath.matrix([total])


def _degrees(w):
    degree = [sum((w[i, j] for j in range(w.cols)), mpf(0)) for i in range(w.rows)]
    if any(x < 0 for x in degree):
        raise Undefined("degrees")
    return degree


def normalized_affinity(w):
    down = diagonal([1 / mpmath.sqrt(x) if x > 0 else mpf(0) for x in _degrees(w)])
    return down * w * down


def embedding(f, k, tol):
    """Eigenvalues, the projector on the k eigenvectors, degrees."""
    if k > min(f.rows, f.cols):
        raise Undefined("k eigenvectors")
    degree = [(f * (f.T * mpmath.ones(f.rows, 1)))[i] for i in range(f.rows)]
    if any(x < 0 for x in degree):
        raise Undefined("degrees")
    x = diagonal([1 / mpmath.sqrt(d) if d > 0 else mpf(0) for d in degree]) * f
    values, v = eig(x.T * x)
    n = len(values)
    most = max(values, default=mpf(0))
    onto, kept = mpmath.matrix(f.rows, f.rows), []
    for i in range(n - 1, n - 1 - k, -1):
        there = values[i] > tol * most and values[i] > 0
        kept.append(values[i] if there else mpf(0))
        if there:
            column = x * columns(v, i, i + 1)
            onto += column * column.T / values[i]
    return [mpmath.matrix(kept), onto, mpmath.matrix(degree)]


def solve(a, b):
    """A⁻¹b."""
    if a.rows == 0:
        return b
    try:
        return mpmath.inverse(a) * b
    except (ZeroDivisionError, TypeError) as error:  # raised by mpmath at a zero pivot
        raise Undefined("nonsingular") from error


def sylvester(a, b, c):
    """X with AX + XB = C, by the linear system of its columns."""
    a, b = sym(a), sym(b)
    m, n = c.rows, c.cols
    if m * n == 0:
        return c
    system, right = mpmath.matrix(m * n, m * n), mpmath.matrix(m * n, 1)
    for i, j in itertools.product(range(m), range(n)):
        right[j * m + i] = c[i, j]
        for k in range(m):
            system[j * m + i, j * m + k] += a[i, k]
        for k in range(n):
            system[j * m + i, k * m + i] += b[k, j]
    x = solve(system, right)
    return mpmath.matrix([[x[j * m + i] for j in range(n)] for i in range(m)])


def solve_definite(a, b):
    if a.rows and eig(a)[0][0] <= 0:
        raise Undefined("positive definite")
    return solve(sym(a), b)


def pencil(a, b):
    """Eigenvalues of AV = BVΛ, VVᵀ, VΛVᵀ and the first v vᵀ."""
    values, u = eig(b)
    down = compose(u, [1 / mpmath.sqrt(x) for x in positive(values)])
    lam, v = eig(down * sym(a) * down)
    v = down * v
    return [vector(lam), v * v.T, compose(v, lam), leading(lam, v)]


def pencil_function(a, b, g, domain=positive):
    """B^(½) g(B^(−½)AB^(−½)) B^(½)."""
    up, down = _roots(b)
    values, u = eig(down * sym(a) * down)
    return up * compose(u, [g(x) for x in domain(values)]) * up


def inverse_root(a, p, eps, relative=False):
    """(A + εI)^(−1/p)."""
    values, u = eig(a)
    shift = mpf(eps) * (max(values, default=mpf(0)) if relative else 1)
    return compose(u, [x ** (-1 / mpf(p)) for x in positive([x + shift for x in values])])


def _centered(x, w):
    total = sum(w)
    if total == 0:
        raise Undefined("weights")
    fraction = [v / total for v in w]
    mean = [sum(fraction[i] * x[i, j] for i in range(x.rows)) for j in range(x.cols)]
    return mpmath.matrix([[x[i, j] - mean[j] for j in range(x.cols)] for i in range(x.rows)]), fraction


def whiten(x, w, eps, axes=False):
    """(X − 1μᵀ)(Σ + εI)^(−½), or the squares of (X − 1μᵀ)U(Λ + ε)^(−½), the largest variance first."""
    rows, fraction = _centered(x, w)
    if not axes:
        return rows * pool(rows, eps, lambda v: 1 / mpmath.sqrt(v), fraction)
    values, u = eig(gram(rows, fraction))
    if any(b - a <= mpf(10) ** -15 * values[-1] for a, b in itertools.pairwise(values)):
        return None
    y = rows * u
    n = len(values)
    return mpmath.matrix([[y[i, n - 1 - j] ** 2 / (values[n - 1 - j] + eps) for j in range(n)] for i in range(x.rows)])


def whiten_by(x, mean, a, eps):
    """Whitening by a given mean and covariance."""
    centered = x - mpmath.ones(x.rows, 1) * mean.T
    return centered * inverse_root(a, 2, eps)


def top(a):
    """The largest eigenvalue, and the projector on its eigenvector."""
    values, u = eig(-a)
    return [vector([-values[0]]), leading(values, u)]


def pinv(a, tol=0):
    """The pseudo-inverse, by the singular values above a fraction of the largest."""
    values, u, v = singular(a)
    most = max(values, default=mpf(0))
    return compose(v, [1 / x if x > tol * most and x > 0 else mpf(0) for x in values], u)


def low_rank(a, rank):
    values, u, v = singular(a)
    return compose(u, [x if i < rank else mpf(0) for i, x in enumerate(values)], v)


def leading_space(a, k):
    """The projector on the eigenvectors of the k largest eigenvalues."""
    values, u = eig(a)
    top = columns(u, len(values) - k, len(values))
    return top * top.T


def _roots(a):
    """A^(½) and A^(−½)."""
    values, u = eig(a)
    roots = [mpmath.sqrt(x) for x in positive(values)]
    return compose(u, roots), compose(u, [1 / x for x in roots])


def _slope(f, a, e):
    """The derivative of f at A in the direction E, by a difference quotient with two thirds of the digits."""
    step = mpf(10) ** (-mp.dps // 3)
    return (f(a + step * e) - f(a - step * e)) / (2 * step)


def _transport(a, b):
    """T with TAT = B."""
    up, down = _roots(a)
    return down * _roots(up * sym(b) * up)[0] * down


def spd_distance(a, b, metric):
    if metric == "affine_invariant":
        gap = log(_roots(a)[1] * sym(b) * _roots(a)[1])
    elif metric == "log_euclidean":
        gap = log(a) - log(b)
    else:
        up = _roots(a)[0]
        whole = sym(a) + sym(b) - 2 * _roots(up * sym(b) * up)[0]
        return mpmath.matrix([mpmath.sqrt(sum(whole[i, i] for i in range(a.rows)))])
    return mpmath.matrix([mpmath.sqrt(sum(x * x for x in gap))])


def bures_distance(a, b, tol):
    """By factors of semidefinite matrices, whose eigenvalues up to tol at a unit diagonal count as zero."""

    def factor(m):
        units = [mpmath.sqrt(abs(m[i, i])) or mpf(1) for i in range(m.rows)]
        inverse = diagonal([1 / x for x in units])
        values, u = eig(inverse * sym(m) * inverse)
        if min(values, default=mpf(0)) < -tol:
            raise Undefined("semidefinite")
        return diagonal(units) * u * diagonal([mpmath.sqrt(x) if x > tol else mpf(0) for x in values])

    return distance_of_factors(factor(a), factor(b))


def distance_of_factors(x, y):
    """The Bures–Wasserstein distance of XXᵀ and YYᵀ, by the nuclear norm of YᵀX."""
    total = sum(v * v for m in (x, y) for v in m) - 2 * sum(singular(y.T * x)[0])
    return mpmath.matrix([mpmath.sqrt(max(total, 0))])


def _centered_samples(x):
    """Samples minus their mean, over the square root of their number minus one."""
    mean = [sum(x[i, j] for i in range(x.rows)) / x.rows for j in range(x.cols)]
    rows = [[x[i, j] - mean[j] for j in range(x.cols)] for i in range(x.rows)]
    return mpmath.matrix(rows) / mpmath.sqrt(x.rows - 1), mpmath.matrix(mean)


def frechet_distance(x, y):
    """‖μ − ν‖² + tr(A) + tr(B) − 2 tr((A^(½)BA^(½))^(½)), the last trace as a nuclear norm."""
    if min(x.rows, y.rows) < 2:
        raise Undefined("two samples")
    (one, mean), (other, mean_other) = _centered_samples(x), _centered_samples(y)
    squares = sum(v * v for part in (one, other, mean - mean_other) for v in part)
    cross = singular(one * other.T)[0][: min(x.rows - 1, y.rows - 1, x.cols)]  # centering makes the others zero
    return mpmath.matrix([squares - 2 * sum(cross)])


def spd_geodesic(a, b, t, metric):
    if metric == "affine_invariant":
        return pencil_function(b, a, lambda x: mpmath.exp(t * mpmath.log(x)))
    if metric == "log_euclidean":
        return exp((1 - t) * log(a) + t * log(b))
    way = (1 - t) * mpmath.eye(a.rows) + t * _transport(a, b)
    if not 0 <= t <= 1:
        positive(eig(way)[0])
    return way * sym(a) * way


def spd_exp_map(p, v, metric):
    p, v = sym(p), sym(v)
    if metric == "affine_invariant":
        up, down = _roots(p)
        return up * exp(down * v * down) * up
    if metric == "log_euclidean":
        size = norm(p) or mpf(1)
        exponent = log(p / size) + _slope(log, p / size, v / size)
        if any(x < -300 for x in eig(exponent)[0]):  # zero in floating point
            raise Undefined("positive definite")
        return size * exp(exponent)
    values, u = eig(p)
    positive(values)
    inside = u.T * v * u
    for i in range(p.rows):
        for j in range(p.rows):
            inside[i, j] /= values[i] + values[j]
    way = mpmath.eye(p.rows) + u * inside * u.T
    positive(eig(way)[0])
    return way * p * way


def spd_log_map(p, q, metric):
    if metric == "affine_invariant":
        return pencil_function(q, p, mpmath.log)
    if metric == "log_euclidean":
        return _slope(exp, log(p), log(q) - log(p))
    moved = _transport(p, q) * sym(p)
    return moved + moved.T - 2 * sym(p)


def spd_batch_norm(x, mean, bias, variance, scale, eps):
    down, back = _roots(mean)[1], _roots(bias)[0]
    p = scale / mpmath.sqrt(variance + eps)
    return back * power(down * sym(x) * down, p) * back


def spd_mean_of_two(a, b, weights, metric):
    """The mean of two matrices, a point on their geodesic."""
    if any(w < 0 for w in weights) or not sum(weights):
        raise Undefined("weights")
    return spd_geodesic(a, b, weights[1] / sum(weights), metric)


def spd_mean(points, weights, metric):
    """The matrix at which the weighted velocities to all points cancel, by Newton steps with a difference quotient."""
    total = sum(weights)
    fraction = [w / total for w in weights]
    m = sum((w * log(a) for w, a in zip(fraction, points, strict=True)), mpmath.matrix(points[0].rows))
    m = exp(m)
    if metric == "log_euclidean":
        return m
    n = m.rows
    places = [(i, j) for i in range(n) for j in range(i + 1)]

    def velocity(m):
        way = sum((w * spd_log_map(m, a, metric) for w, a in zip(fraction, points, strict=True)), mpmath.matrix(n))
        return mpmath.matrix([way[i, j] for i, j in places])

    def nudged(m, by):
        out = m.copy()
        for (i, j), x in zip(places, by, strict=True):
            out[i, j] += x
            if i != j:
                out[j, i] += x
        return out

    step = mpf(10) ** (-mp.dps // 3)
    for _ in range(60):
        left = velocity(m)
        slopes = mpmath.matrix(len(places), len(places))
        for k in range(len(places)):
            unit = [step * (i == k) for i in range(len(places))]
            slope = (velocity(nudged(m, unit)) - velocity(nudged(m, [-x for x in unit]))) / (2 * step)
            for i in range(len(places)):
                slopes[i, k] = slope[i]
        by = mpmath.lu_solve(slopes, -left)
        m = nudged(m, list(by))
        if norm(by) < mpf(10) ** (-mp.dps * 9 // 10) * norm(m):
            return m
    raise ArithmeticError("Newton's method did not converge")
