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


def longdouble_svd(f):
    """F = U diag(s) Vᵀ in 80-bit; columns with s = 0 are left out.

    One-sided Jacobi rotations of the rows of F, from a start in float64, give small singular values to high relative
    accuracy.
    """
    f = np.asarray(f, LD)
    if f.shape[0] > f.shape[1]:
        v, s, u = longdouble_svd(f.T)
        return u, s, v
    turn = np.linalg.svd(f.astype(np.float64))[0].T.astype(LD)
    for _ in range(2):
        turn = (3 * np.eye(len(f), dtype=LD) - turn @ turn.T) @ turn / 2
    rows, eps = turn @ f, np.finfo(LD).eps
    for _ in range(60):
        worst = 0.0
        for p, q in _rounds(len(rows)):
            alpha, beta, gamma = (rows[p] ** 2).sum(1), (rows[q] ** 2).sum(1), (rows[p] * rows[q]).sum(1)
            scale = np.sqrt(alpha * beta)
            off = np.abs(gamma) > eps * scale
            worst = max(worst, float(np.max(np.abs(gamma[off]) / scale[off], initial=0)))
            zeta = (beta - alpha) / (2 * np.where(off, gamma, 1))
            t = np.where(off, np.where(zeta >= 0, 1, -1) / (np.abs(zeta) + np.sqrt(1 + zeta * zeta)), 0)[:, None]
            c = 1 / np.sqrt(1 + t * t)
            for side in (rows, turn):
                a, b = side[p], side[q]
                side[p], side[q] = c * (a - t * b), c * (t * a + b)
        if worst < 4 * eps:
            break
    else:
        raise RuntimeError(f"Jacobi rotations did not converge: {worst:.2g} left")
    s = np.sqrt((rows * rows).sum(1))
    keep = s > 0
    return turn[keep].T, s[keep], (rows[keep] / s[keep, None]).T


def _log_slope(a, b):
    gap = a - b
    return np.where(gap == 0, 1 / b, np.log1p(gap / b) / np.where(gap == 0, 1, gap))


def _sqrt_slope(a, b):
    return 1 / (np.sqrt(a) + np.sqrt(b))


LONGDOUBLE_FUNCTIONS = {"log": (np.log, _log_slope), "sqrt": (np.sqrt, _sqrt_slope)}


def pool_longdouble(f, g, eps, name):
    """C = g(FᵀF + εI) and the gradient of ⟨G, C⟩ in 80-bit."""
    value, slope = LONGDOUBLE_FUNCTIONS[name]
    f, g, eps = np.asarray(f, LD), np.asarray(g, LD), LD(eps)
    u, s, v = longdouble_svd(f)
    lam, base = s * s + eps, value(eps) * np.eye(f.shape[1], dtype=LD)
    rise = slope(lam, eps)
    left = v.T @ (g + g.T) / 2
    inside = left @ v
    outside = left - inside @ v.T
    gradient = 2 * (u * s) @ ((slope(lam[:, None], lam) * inside) @ v.T + rise[:, None] * outside)
    return base + (v * (s * s * rise)) @ v.T, gradient


def log_gradient_longdouble(a, g):
    """The gradient of ⟨G, log A⟩ for a positive definite A, in 80-bit."""
    u, s, _ = longdouble_svd(a)  # the singular values are the eigenvalues
    g = np.asarray(g, LD)
    return u @ (_log_slope(s[:, None], s) * (u.T @ (g + g.T) @ u / 2)) @ u.T


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
