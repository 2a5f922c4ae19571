"""References in 80-bit and arbitrary precision, independent of the library: other formulas and solvers."""

import mpmath
import numpy as np

LD = np.longdouble


def _rounds(n):
    """Rounds of disjoint pairs that together hold every pair once (a round-robin tournament)."""
    players = list(range(n + n % 2))
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = [(p, q) for p, q in zip(players[:half], reversed(players[half:]), strict=True) if max(p, q) < n]
        yield np.array([p for p, _ in pairs], dtype=int), np.array([q for _, q in pairs], dtype=int)
        players = [players[0], players[-1], *players[1:-1]]


def longdouble_eigh(a):
    """Eigendecomposition of a symmetric matrix in 80-bit: a float64 start, finished by Jacobi rotations."""
    a = np.asarray(a, LD)
    n = len(a)
    v = np.linalg.eigh(a.astype(np.float64))[1].astype(LD)
    for _ in range(2):
        v = v @ (3 * np.eye(n, dtype=LD) - v.T @ v) / 2
    b = v.T @ a @ v
    scale = np.abs(np.diag(b)).max() if n else LD(0)
    for _ in range(6):
        off = np.abs(b - np.diag(np.diag(b)))
        if n < 2 or off.max() <= 20 * np.finfo(LD).eps * scale:
            break
        for p, q in _rounds(n):
            gap, link = b[q, q] - b[p, p], b[p, q]
            sign = np.where(gap < 0, -1, 1)
            t = 2 * link * sign / (np.abs(gap) + np.hypot(gap, 2 * link) + (link == 0))
            c = 1 / np.sqrt(1 + t * t)
            s = t * c
            for side in (b, v, b.T):
                left, right = side[:, p].copy(), side[:, q].copy()
                side[:, p], side[:, q] = c * left - s * right, s * left + c * right
    return np.diag(b).copy(), v


def _log_slope(a, b):
    gap = a - b
    return np.where(gap == 0, 1 / b, np.log1p(gap / b) / np.where(gap == 0, 1, gap))


def _sqrt_slope(a, b):
    return 1 / (np.sqrt(a) + np.sqrt(b))


LONGDOUBLE_FUNCTIONS = {"log": (np.log, _log_slope), "sqrt": (np.sqrt, _sqrt_slope)}


def pool_longdouble(f, g, eps, name):
    """C = g(FᵀF + εI) and the gradient of ⟨G, C⟩ in 80-bit, through the smaller Gram matrix."""
    value, slope = LONGDOUBLE_FUNCTIONS[name]
    f, g, eps = np.asarray(f, LD), np.asarray(g, LD), LD(eps)
    g = (g + g.T) / 2
    m, d = f.shape
    if m >= d:
        _, v = longdouble_eigh(f.T @ f)
        z = f @ v
        lam = (z * z).sum(0) + eps
        return (v * value(lam)) @ v.T, 2 * z @ (slope(lam[:, None], lam[None, :]) * (v.T @ g @ v)) @ v.T
    _, u = longdouble_eigh(f @ f.T)
    y = u.T @ f
    s = (y * y).sum(1)
    rise = slope(s + eps, eps)
    c = value(eps) * np.eye(d, dtype=LD) + (y.T * rise) @ y
    # (g[λᵢ, λⱼ] − g[λⱼ, ε])/sᵢ needs sᵢ the larger of the two; if both are zero, Y is zero.
    low, high = np.minimum(s[:, None], s[None, :]), np.maximum(s[:, None], s[None, :])
    second = (slope(low + eps, high + eps) - slope(low + eps, eps)) / np.where(high > 0, high, 1)
    yg = y @ g
    return c, 2 * u @ (rise[:, None] * yg + (second * (yg @ y.T)) @ y)


def divided_difference(g, points, digits=160):
    """The divided difference of an mpmath function at points that may coincide: the recursion with many digits."""
    with mpmath.workdps(digits):
        step = mpmath.mpf(10) ** (-digits // 4)
        x = sorted(mpmath.mpf(float(p)) for p in points)
        if len(set(x)) < len(x):
            x = [p + step * i * max(abs(p), 1) for i, p in enumerate(x)]
        table = [g(p) for p in x]
        for k in range(1, len(x)):
            table = [(table[i + 1] - table[i]) / (x[i + k] - x[i]) for i in range(len(table) - 1)]
        return +table[0]


def matrix_function_mpmath(a, g, digits=40):
    """g(A) of a symmetric matrix with many digits, as float64."""
    with mpmath.workdps(digits):
        lam, u = mpmath.eigsy(mpmath.matrix(np.asarray(a, dtype=float).tolist()))
        out = u * mpmath.diag([g(x) for x in lam]) * u.T
        return np.array(out.tolist(), dtype=float)


def _pool_gradient(f, g, eps, function, digits):
    """The gradient as an mpmath matrix, inside a context of that many digits."""
    g = (g + g.T) / 2
    d = f.cols
    lam, u = mpmath.eigsy(f.T * f + mpmath.mpf(eps) * mpmath.eye(d))
    inner = u.T * g * u
    for i in range(d):
        for j in range(d):
            gap = lam[i] - lam[j]
            if abs(gap) > mpmath.mpf(10) ** (-digits // 2) * abs(lam[i]):
                inner[i, j] *= (function(lam[i]) - function(lam[j])) / gap
            else:
                inner[i, j] *= mpmath.diff(function, (lam[i] + lam[j]) / 2)
    return 2 * f * u * inner * u.T


def _mp(a):
    return mpmath.matrix(np.asarray(a, float).tolist())


def pool_gradient_mpmath(f, g, eps, function, digits=50):
    """Gradient of ⟨G, g(FᵀF + εI)⟩ in F through the d×d matrix and its divided differences, with many digits."""
    with mpmath.workdps(digits):
        return np.array(_pool_gradient(_mp(f), _mp(g), eps, function, digits).tolist(), dtype=float)


def pool_value_mpmath(f, eps, function, digits=60):
    """g(FᵀF + εI) through the d×d matrix, with many digits."""
    with mpmath.workdps(digits):
        f = _mp(f)
        lam, u = mpmath.eigsy(f.T * f + mpmath.mpf(eps) * mpmath.eye(f.cols))
        return np.array((u * mpmath.diag([function(x) for x in lam]) * u.T).tolist(), dtype=float)


def pool_hessian_vector_mpmath(f, g, v, eps, function, digits=80):
    """The derivative of that gradient in the direction V, by a central difference with many digits."""
    with mpmath.workdps(digits):
        step = mpmath.mpf(10) ** (-digits // 4)
        f, g, v = _mp(f), _mp(g), _mp(v)
        forth, back = (_pool_gradient(f + sign * step * v, g, eps, function, digits) for sign in (1, -1))
        return np.array(((forth - back) / (2 * step)).tolist(), dtype=float)
