"""Reference values in 80-bit floating point, sharing no code with the package.

One-sided Jacobi rotations on the rows of F give singular values to high relative accuracy, and the divided differences
of log are taken from closed forms and a series.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Real = NDArray[np.longdouble]
_SWEEPS = 40
_SERIES = 60


def _rotate_rows(rows: Real) -> tuple[Real, Real]:
    """Make rows orthogonal by rotations: (rotated rows, rotation Q) with Q rows = rotated."""
    rotated, q = rows.copy(), np.eye(len(rows), dtype=np.longdouble)
    tiny = np.finfo(np.longdouble).eps
    for _ in range(_SWEEPS):
        worst = np.longdouble(0)
        for i in range(len(rows) - 1):
            for j in range(i + 1, len(rows)):
                a, b, c = rotated[i] @ rotated[i], rotated[j] @ rotated[j], rotated[i] @ rotated[j]
                if abs(c) <= tiny * np.sqrt(a * b):
                    continue
                worst = max(worst, abs(c) / np.sqrt(a * b))
                zeta = (b - a) / (2 * c)
                t = (1 if zeta >= 0 else -1) / (abs(zeta) + np.sqrt(1 + zeta * zeta))
                cosine = 1 / np.sqrt(1 + t * t)
                for x in (rotated, q):
                    x[i], x[j] = cosine * (x[i] - t * x[j]), cosine * (t * x[i] + x[j])
        if worst <= tiny:
            break
    return rotated, q


def _log_differences(a: Real, b: Real) -> Real:
    """log[a, b] for positive a, b."""
    low, gap = np.minimum(a, b), np.abs(a - b)
    x = gap / low
    safe = np.where(x == 0, 1, x)
    quotient: Real = np.asarray(np.log1p(safe) / safe, dtype=np.longdouble)
    quotient[x == 0] = 1
    return quotient / low


def _log_second(a: Real, b: Real, c: Real) -> Real:
    """log[a, b, c] for positive a, b, c: a series if all are close, else the quotient over the widest gap."""
    a, b, c = np.sort(np.stack(np.broadcast_arrays(a, b, c)), 0)
    gap = c - a
    near = gap < a / 2
    center = (a + c) / 2
    u, v, w = ((np.where(near, x, center) - center) / center for x in (a, b, c))
    one = two = three = np.ones_like(center)
    total = -three / 2
    for j in range(1, _SERIES):
        one = one * u
        two = two * v + one
        three = three * w + two
        total = total + (-1) ** (j + 1) * three / (j + 2)
    far = (_log_differences(b, c) - _log_differences(a, b)) / np.where(near, 1, gap)
    return np.where(near, total / center**2, far)


def log_pool_gradient(f: NDArray[np.float64], g: NDArray[np.float64], eps: float) -> Real:
    """Gradient in F (m, d), m ≤ d, of ⟨G, log(FᵀF + εI)⟩."""
    rows = f.astype(np.longdouble)
    sym = (g + g.T).astype(np.longdouble) / 2
    y, q = _rotate_rows(rows)
    s = (y * y).sum(1)
    lam, base = s + np.longdouble(eps), np.longdouble(eps)
    t = y @ sym
    first = _log_differences(lam, np.full_like(lam, base))
    second = _log_second(lam[:, None], lam[None], np.full((1, 1), base))
    return 2 * q.T @ (first[:, None] * t + (second * (t @ y.T)) @ y)


def symmetric_log_gradient(a: NDArray[np.float64], g: NDArray[np.float64]) -> Real:
    """Gradient in A (n, n), symmetric positive definite, of ⟨G, log A⟩."""
    rotated, q = _rotate_rows(a.astype(np.longdouble))
    lam = np.sqrt((rotated * rotated).sum(1))  # rows of Q A are λ times the eigenvectors
    sym = (g + g.T).astype(np.longdouble) / 2
    return q.T @ (_log_differences(lam[:, None], lam[None]) * (q @ sym @ q.T)) @ q
