"""Adversarial matrices: one row per operator, and problems that are determined by a number.

Kinds of matrices: tied (Hadamard matrices and phases, exact in every dtype), nearly tied, scaled as D·A·D by powers of
ten and of two, ill-conditioned, singular, structured (Hilbert, Pascal, circulant, Laplacian), indefinite and others;
real and complex; orders up to 40; four dtypes, also mixed. `helpers.judge` calls and judges them.
"""

import itertools
import math
from typing import get_args

import mpmath
import numpy as np
import scipy.linalg
import torch
from mpmath import mp, mpf

import matbackprop as mb
from helpers import truth
from helpers.judge import MODES, ROUNDING, Problem, Row, judge, rounded
from matbackprop.functional._matrix_function import zero_interval
from matbackprop.numerics import gram_tolerance, rank_tolerance, zero_tolerance
from matbackprop.spd._metrics import Metric

KINDS = (
    "plain",
    "tied",
    "nearly tied",
    "scaled by tens",
    "scaled by twos",
    "ill-conditioned",
    "singular",
    "structured",
    "diagonal",
    "indefinite",
    "constant",
    "zero",
    "not finite",
    "empty",
)
SCALES = {
    torch.float64: (1e-150, 1e-30, 1e30, 1e150),
    torch.float32: (1e-15, 1e-6, 1e6, 1e15),
    torch.bfloat16: (1e-6, 1e6),
    torch.float16: (1e-1, 1e1),
}
DTYPES = tuple(SCALES)


class Draw:
    """Random choices of one problem; its number is the seed."""

    def __init__(self, seed: int, number: int, kind: str, can_be_complex: bool):
        self.rng = rng = np.random.default_rng([seed, number])
        self.kind, self.options, self.exponents = kind, {}, np.zeros(0)
        self.dtype = DTYPES[rng.choice(4, p=[0.45, 0.25, 0.2, 0.1])]
        self.complex = can_be_complex and self.dtype.itemsize > 2 and rng.random() < 0.25
        self.scale = 1.0 if rng.random() < 0.7 else float(rng.choice(SCALES[self.dtype]))
        size = rng.random()
        largest = 4 if self.complex else 6 if size < 0.96 else 13 if size < 0.9985 else 21 if size < 0.9998 else 41
        self.n = 0 if kind == "empty" else int(rng.integers(2 if largest > 6 else 1, largest))

    def pick(self, *choices):
        return choices[int(self.rng.integers(len(choices)))]

    def orthogonal(self, n: int) -> np.ndarray:
        a = self.rng.normal(size=(n, n))
        return np.linalg.qr(a + 1j * self.rng.normal(size=(n, n)) if self.complex else a)[0]

    def phases(self, n: int) -> np.ndarray:
        """Powers of i, or signs, which are exact in every dtype."""
        return 1j ** self.rng.integers(0, 4, n) if self.complex else self.rng.choice([-1.0, 1.0], n)

    def diagonal(self, n: int) -> np.ndarray:
        """D of D·A·D."""
        most = {torch.float64: 6, torch.float32: 4, torch.bfloat16: 4, torch.float16: 1}[self.dtype]
        if len(self.exponents) != n:  # two matrices of one order have the same D
            self.exponents = self.rng.integers(-most, most + 1, n)
        return (10.0 if self.kind == "scaled by tens" else 2.0**3) ** self.exponents

    def sized(self, a: np.ndarray, scale: float | None = None) -> np.ndarray:
        """Scale by a power of two, so that exact ties and ranks are kept."""
        scale = self.scale if scale is None else scale
        return a * 2.0 ** round(math.log2(scale))

    def symmetric(self, n: int | None = None, kind: str | None = None, scale: float | None = None) -> np.ndarray:
        n, kind, rng = self.n if n is None else n, kind or self.kind, self.rng
        values = rng.uniform(0.5, 3, n)
        if kind == "nearly tied":
            values = 1 + self.pick(1e-15, 1e-13, 1e-9, 1e-6) * np.arange(n)
        elif kind == "ill-conditioned":
            values = np.logspace(0, -self.pick(3, 5, 8, 12), n)
        elif kind == "indefinite":
            values *= rng.choice([-1.0, 1.0], n)
        q = np.diag(self.phases(n)) if kind == "diagonal" else self.orthogonal(n)
        a = (q * values) @ q.conj().T
        if kind == "tied" and n:
            order = 2 ** int(math.log2(n))
            h = scipy.linalg.hadamard(order) / order
            a = np.eye(n)
            a[:order, :order] = (h * rng.choice([1.0, 3.0], order)) @ h.T * order
        elif kind == "singular":
            v = rng.integers(-2, 3, (n, max(1, n - self.pick(1, 2)))).astype(float)
            a = v @ v.T
        elif kind == "structured":
            a = self.structured(n)
        elif kind in ("zero", "constant"):
            a = np.full((n, n), 0.0 if kind == "zero" else 1.0)
        if kind in ("tied", "singular", "structured", "constant"):
            p = self.phases(n)
            a = a * p[:, None] * p.conj()
        if kind.startswith("scaled"):
            d = self.diagonal(n)
            a = a * d[:, None] * d
        return self.sized((a + a.conj().T) / 2, scale)

    def structured(self, n: int) -> np.ndarray:
        if n == 0:
            return np.zeros((0, 0))
        path = np.diag(np.ones(n - 1), 1)
        path = path + path.T
        return self.pick(
            lambda: scipy.linalg.hilbert(n),
            lambda: scipy.linalg.pascal(min(n, 8)) if n <= 8 else scipy.linalg.hilbert(n),
            lambda: scipy.linalg.circulant([4.0, 1.0, *[0.0] * (n - 3), 1.0] if n > 2 else [4.0, 1.0][:n]),
            lambda: np.diag(path.sum(1)) - path,
        )()

    def features(self, m: int | None = None, d: int | None = None, *, positive=False, kind=None) -> np.ndarray:
        rng, kind = self.rng, kind or self.kind
        m = (0 if kind == "empty" else max(1, self.n + int(rng.integers(-1, 2)))) if m is None else m
        d = int(rng.integers(1, max(self.n, 2) + 1)) if d is None else d
        k = min(m, d)
        f = rng.normal(size=(m, d)) + (1j * rng.normal(size=(m, d)) if self.complex else 0)
        if kind in ("tied", "structured") and k:
            order = 2 ** int(math.log2(k))
            f = np.eye(m, d)
            f[:order, :order] = scipy.linalg.hadamard(order) / 2.0
        elif kind in ("nearly tied", "ill-conditioned") and k:
            values = 1 + self.pick(1e-13, 1e-9, 1e-6) * np.arange(k)
            values = np.logspace(0, -self.pick(2, 4, 6), k) if kind == "ill-conditioned" else values
            f = (self.orthogonal(m)[:, :k] * values) @ self.orthogonal(d)[:k]
        elif kind == "diagonal":
            f = np.eye(m, d) * rng.uniform(0.5, 2, d)
        elif kind == "singular" and k:
            r = max(1, k - 1)
            f = rng.integers(-2, 3, (m, r)).astype(float) @ rng.integers(-2, 3, (r, d)).astype(float)
        elif kind in ("zero", "constant"):
            f = np.full((m, d), 0.0 if kind == "zero" else 1.0)
        if kind in ("tied", "singular", "constant"):
            f = f * self.phases(m)[:, None] * self.phases(d).conj()
        if kind.startswith("scaled"):
            f = f * self.diagonal(d)
        return self.sized(np.abs(f) if positive and kind != "indefinite" else f)

    def weights(self, m: int) -> np.ndarray:
        w = self.rng.uniform(0.2, 2, m)
        return w * ((self.rng.random(m) > 0.2) | (np.arange(m) == 0)) if self.rng.random() < 0.3 else w

    def labels(self, m: int) -> np.ndarray:
        labels = self.rng.integers(0, 3, m)
        if self.rng.random() < 0.3 and m > 1:
            labels[int(self.rng.integers(1, m))] = -1
        return labels


def make(seed: int, number: int, mode: str | None = None, device: str = "cpu") -> tuple[Problem, str]:
    """The problem of a number, and its kind; consecutive numbers cycle through the rows."""
    row = ROWS[number % len(ROWS)]
    kind = KINDS[(number // len(ROWS) + number % len(ROWS)) % len(KINDS)]

    def drawn(kind: str, calm: bool) -> tuple[Draw, list[np.ndarray]]:
        draw = Draw(seed, number, kind, row.complex > 0)
        draw.scale = 1.0 if calm else draw.scale
        arrays = [np.asarray(a) for a in row.draw(draw)]
        for i, a in enumerate(arrays):
            if draw.complex and a.dtype.kind != "i":
                arrays[i] = a + 0j if i < row.complex else a.real
        return draw, arrays

    draw, arrays = drawn(kind, False)
    _, partners = drawn("plain" if kind != "empty" else kind, True)
    partners = [np.maximum(a, 0) if a.dtype.kind == "i" else a for a in partners]
    if [(a.shape, a.dtype) for a in arrays] != [(a.shape, a.dtype) for a in partners]:
        partners = arrays
    rng = draw.rng
    dtypes = [draw.dtype] * len(arrays)
    if len(arrays) > 1 and rng.random() < 0.1:
        dtypes = [draw.pick(torch.float64, torch.float32, draw.dtype) for _ in arrays]
    floating = [i for i, a in enumerate(arrays) if a.dtype.kind != "i" and a.size]
    if kind == "not finite" and floating:
        i = draw.pick(*floating)
        bad = arrays[i].copy()
        spot = np.unravel_index(int(rng.integers(bad.size)), bad.shape)
        bad[spot] = draw.pick(math.nan, math.inf, -math.inf)
        if i in row.symmetric:
            bad[spot[::-1]] = bad[spot]
        arrays[i] = bad
        arrays = [np.maximum(a, 0) if a.dtype.kind == "i" else a for a in arrays]  # rows with label −1 are not used
    arrays = [a if a.dtype.kind == "i" else rounded(a, t) for a, t in zip(arrays, dtypes, strict=True)]
    chosen = str(rng.choice(MODES, p=[0.45, 0.2, 0.18, 0.155, 0.015]))
    mode = mode or (chosen if row.traced or chosen == "unchecked" else "eager")
    layout = str(rng.choice(["contiguous", "transposed", "beside", "behind"])) if mode in ("eager", "unchecked") else ""
    return Problem(row, arrays, partners, dtypes, draw.options, mode, layout, rng, device), kind


def find(
    name: str, kind: str, mode: str = "eager", dtype: torch.dtype = torch.float64, is_complex: bool = False
) -> Problem:
    """The first problem of a row and kind with an ordinary scale and three rows, or columns if no problem has them."""
    index = next(i for i, row in enumerate(ROWS) if row.name == name)
    for side in (0, -1):
        for number in range(index, 4000 * len(ROWS), len(ROWS)):
            problem, drawn = make(0, number, mode)
            if drawn != kind or set(problem.dtypes) != {dtype} or problem.is_complex != is_complex:
                continue
            largest = max(np.abs(a).max() for a in problem.arrays if a.size)
            if problem.arrays[0].shape[side] > 2 and 0.01 < largest < 100 and problem.options.get("rank") != 0:
                return problem
    raise LookupError(name)


def record(seed: int, number: int, mutations: bool = True, device: str = "cpu") -> dict:
    """Judge the problem of a number."""
    problem, kind = make(seed, number, device=device)
    result = judge(problem, mutations)
    return {
        "number": number,
        "operator": problem.row.name,
        "kind": kind,
        "dtype": " ".join(dict.fromkeys(str(t).removeprefix("torch.") for t in problem.dtypes)),
        "complex": problem.is_complex,
        "mode": problem.mode,
        "order": max((max(a.shape, default=1) for a in problem.arrays), default=0),
        "options": {k: v if isinstance(v, (int, float, str)) else str(v) for k, v in problem.options.items()},
        **result,
    }


# --- tolerances that the operators document --------------------------------------------------------------------------


def _rank_tol(problem: Problem) -> float:
    return rank_tolerance(problem.dtype, torch.float64, None)


def _unique_tol(problem: Problem) -> float:
    """Of the smallest singular value, for a unique polar factor."""
    n = max(problem.arrays[0].shape[-1], 1)
    return max(torch.finfo(problem.dtype).eps / 2, zero_tolerance(problem.dtype, torch.float64, n))


def _gram_tol(problem: Problem) -> float:
    return gram_tolerance(problem.dtype, torch.float64, problem.arrays[0].shape[1], None)


# --- inputs ----------------------------------------------------------------------------------------------------------


def _matrix(draw: Draw):
    return (draw.symmetric(),)


def _small(draw: Draw) -> Draw:
    """Limit the order: the reference solves a system of order n²."""
    draw.n = min(draw.n, 3)
    return draw


def _chosen(name: str, *choices, draw_matrix=_matrix):
    """A matrix, and an option."""

    def draw_with_option(draw: Draw):
        draw.options[name] = draw.pick(*choices)
        return draw_matrix(draw)

    return draw_with_option


def _two(draw: Draw):
    """A symmetric matrix and a second one, of the same kind or plain; two scaled ones have the same D."""
    a = draw.symmetric()
    return a, draw.symmetric(kind=draw.kind if draw.kind.startswith("scaled") else draw.pick("plain", draw.kind))


def _two_definite(draw: Draw):
    """Two matrices; singular ones are raised on the diagonal."""
    return tuple(_raised(a) for a in _two(draw))


def _raised(a):
    if not a.size or not np.isfinite(a).all():
        return a
    diagonal = np.abs(np.diag(a))
    units = np.sqrt(np.where(diagonal > 0, diagonal, diagonal.max() or 1))
    least = np.linalg.eigvalsh((a + a.conj().T) / 2 / units / units[:, None])[0]
    near = 8 * len(a) * zero_tolerance(torch.float32, torch.float64, 1)  # a matrix may be rounded to float32
    return a + np.diag(units**2) / 8 if abs(least) < near else a


def _pooled(*parts, tall: bool = False):
    """Features; by name weights, ε and an exponent as tensors. ε is a fraction of the size of the Gram matrix."""

    def draw_pooled(draw: Draw):
        d = max(1, min(draw.n, 6))
        f = draw.features(0 if draw.kind == "empty" else d + 2 if tall else max(1, d - 1), d)
        size = min(float(np.abs(f).max()), 1e150) if f.size else 0.0
        eps = max((size * size or 1.0) * draw.pick(0.1, 1e-3, 1e-6), torch.finfo(draw.dtype).tiny)
        more = {
            "w": lambda: draw.weights(f.shape[0]),
            "e": lambda: np.array(eps),
            "p": lambda: np.array(draw.pick(0.7, 0.3, -1.3, 2.0)),
        }
        if "e" not in parts:
            draw.options["eps"] = eps
        return (f, *(more[part]() for part in parts))

    return draw_pooled


def _tall(draw: Draw):
    d = 0 if draw.kind == "empty" else max(1, min(draw.n, 8))
    return (draw.features(d and d + int(draw.rng.integers(0, 3)), d),)


def _wide(draw: Draw):
    return (_tall(draw)[0].T,)


def _square(draw: Draw):
    return (draw.features(draw.n, draw.n),)


def _points(draw: Draw):
    m, d = int(draw.rng.integers(2, 5)), int(draw.rng.integers(1, 4))
    m = 0 if draw.kind == "empty" else m
    return draw.features(m, d), draw.features(m, d, kind="plain"), draw.weights(m)


def _cut(*parts, positive: bool = False):
    def draw_cut(draw: Draw):
        f = draw.features(positive=positive)
        m, d = f.shape
        more = {
            "w": lambda: draw.weights(m),
            "l": lambda: np.eye(d) + 0.25 * (lambda a: a + a.T)(draw.rng.uniform(0, 1, (d, d))),
        }
        if "ridge" in parts:
            draw.options["ridge"] = draw.pick(0.3, 1.0, 1e-3, 1e-8)
        return (f, draw.labels(m), *(more[p]() for p in parts if p in more))

    return draw_cut


def _affinities(draw: Draw):
    f = draw.features(positive=draw.kind != "indefinite")
    peak = np.abs(f).max() if f.size else 0
    f = f / peak if peak > 0 else f
    return (draw.sized(f @ f.T),)


def _system(draw: Draw):
    a = draw.symmetric()
    return a, draw.rng.uniform(-1, 1, (a.shape[0], 1)) + (0j if draw.complex else 0)


def _samples(draw: Draw):
    """Two sets of samples of one dimension, some with fewer samples than dimensions."""
    d = int(draw.rng.integers(1, 4))
    m, k = (0, 0) if draw.kind == "empty" else draw.rng.integers(2, 6, 2).tolist()
    return draw.features(m, d), draw.features(k, d, kind=draw.pick("plain", draw.kind))


# --- definitions that are not in helpers.truth -----------------------------------------------------------------------


def _triangle(a, problem):
    root = mpmath.sqrt(2)
    return [truth.vector([a[i, j] * (1 if i == j else root) for i in range(a.rows) for j in range(i, a.rows)])]


def _untriangle(v, problem):
    n = (math.isqrt(8 * len(v) + 1) - 1) // 2
    out, k = mpmath.matrix(n, n), 0
    for i in range(n):
        for j in range(i, n):
            out[i, j] = out[j, i] = v[k] if i == j else v[k] / mpmath.sqrt(2)
            k += 1
    return [out]


def _clamp(a, problem):
    least = mpf(problem.options["least"])
    return truth.function(a, lambda x: max(x, least))


def _threshold(*fractions):
    def draw_threshold(draw: Draw):
        (a,) = _matrix(draw)
        draw.options["least"] = draw.pick(*fractions) * (float(np.abs(a).max()) or 1.0 if a.size else 1.0)
        return (a,)

    return draw_threshold


def _apart(values, digits=15) -> bool:
    """Whether all values differ by more than 10^−digits of the largest."""
    most = max(map(abs, values), default=mpf(0))
    return all(abs(b - a) > mpf(10) ** -digits * most for a, b in itertools.pairwise(values))


def _eigenpairs(a, problem):
    """Eigenvalues, UΛUᵀ and U diag(1, …, n) Uᵀ; the last two of separated eigenvalues."""
    values, u = truth.eig(a)
    copies = 2 if problem.is_complex else 1
    if not _apart(values[::copies]):
        return [truth.vector(values), None, None]
    return [truth.vector(values), a, truth.compose(u, [mpf(1 + i // copies) for i in range(len(values))])]


def _seen_pairs(lam, u):
    top = lam.abs().amax(-1, keepdim=True) if lam.shape[-1] else lam
    unit = torch.where(top > 0, top, 1).detach()
    whole = (u * (lam / unit).unsqueeze(-2)) @ u.mH * unit.unsqueeze(-1)
    return lam, whole, (u * (1 + torch.arange(lam.shape[-1], device=u.device))) @ u.mH


def _leading_pairs(a, problem):
    """The k largest eigenvalues, and the projector on their eigenvectors."""
    values, u = truth.eig(-a)
    k = problem.options["k"]
    there = _apart(values[: k + 1])
    first = truth.columns(u, 0, k)
    return [truth.vector([-x for x in values[:k]]), first * first.T if there else None]


def _few(draw: Draw):
    a = draw.symmetric(max(draw.n, 1))
    draw.options["k"] = int(draw.rng.integers(1, min(len(a), 4) + 1))
    return (a,)


def _singular(a, problem):
    values, u, v = truth.singular(a)
    if not values:
        return [truth.vector(values), a, a]
    copies = 2 if problem.is_complex else 1
    if not _apart([*values[::copies], mpf(0)]):
        return [truth.vector(values), None, None]
    return [truth.vector(values), a, truth.compose(u, [mpf(1 + i // copies) for i in range(len(values))], v)]


def _seen_triples(u, s, vh):
    k = s.shape[-1]
    top = s.amax(-1, keepdim=True) if k else s
    unit = torch.where(top > 0, top, 1).detach()
    whole = (u[..., :k] * (s / unit).unsqueeze(-2)) @ vh[..., :k, :] * unit.unsqueeze(-1)
    return s, whole, (u[..., :k] * (1 + torch.arange(k, device=u.device))) @ vh[..., :k, :]


def _ranked(draw_matrix):
    def draw_ranked(draw: Draw):
        (a,) = draw_matrix(draw)
        draw.options["rank"] = int(draw.rng.integers(0, 1 + min(a.shape)))
        return (a,)

    return draw_ranked


def _rank(problem) -> int:
    return problem.options["rank"] * (2 if problem.is_complex else 1)


def _leading_space(a, problem):
    values, u = truth.eig(a)
    n, rank = len(values), _rank(problem)
    if 0 < rank < n and values[n - rank] == values[n - rank - 1]:
        raise truth.Undefined("a gap")
    return [truth.compose(u, [mpf(i >= n - rank) for i in range(n)])]


def _nearest(a, problem):
    values, u, v = truth.singular(a)
    rank = _rank(problem)
    if 0 < rank < len(values) and values[rank - 1] == values[rank] > 0:
        raise truth.Undefined("a gap")
    if any(values) and not problem.arrays[0].any():  # the difference quotient at zero is not linear
        raise truth.Undefined("derivative")
    return [truth.compose(u, [s if i < rank else mpf(0) for i, s in enumerate(values)], v) if values else a]


def _pinv(a, problem):
    return [truth.pinv(a, mpf(_rank_tol(problem))) if a.rows and a.cols else a.T]


def _power(p):
    def g(x):
        if x <= 0:
            raise truth.Undefined("positive")
        if p * mpmath.log(x) > 1e5:
            raise truth.Overflow
        return mpmath.exp(p * mpmath.log(x))

    return g


def _log(x):
    if x <= 0:
        raise truth.Undefined("positive")
    return mpmath.log(x)


def _eps(problem):
    return mpf(problem.options["eps"])


# --- rows ------------------------------------------------------------------------------------------------------------


def _spectral(name, value, call, draw=_matrix, **more):
    return Row(name, draw, lambda a, problem: [value(a, problem)], call, symmetric=(0,), complex=1, **more)


def _of_number(a, problem):
    p = problem.options["p"]
    return truth.power(a, p) if isinstance(p, int) else _real_power(a, mpf(p))


def _real_power(a, p):
    """λ^p; for p > 0 eigenvalues may be zero."""
    if p < 0:
        return truth.power(a, p)
    values, u = truth.eig(a)
    most, digits = truth.norm(values), mp.dps // 4  # the step of a difference quotient is between these two bounds
    if any(x < -most * mpf(10) ** -digits for x in values):
        raise truth.Undefined("nonnegative")
    zero = most * mpf(10) ** (-2 * digits)
    return truth.compose(u, [mpmath.exp(p * mpmath.log(x)) if x > zero else mpf(0) for x in values])


def _without_rounding(positive=False, index=0):
    """Set negative, or also positive, eigenvalues within rounding errors of zero to zero, as the operators do."""

    def counted(i, a, problem):
        if i != index:
            return a
        values, u = truth.eig(a)
        low, high = zero_interval(problem.dtypes[i], torch.float64, max(a.rows, 1), "nonnegative")
        low, high = -low * truth.norm(values), high * truth.norm(values) * positive
        if not any(low <= x <= high and x for x in values):
            return a
        return truth.compose(u, [mpf(0) if low <= x <= high else x for x in values])

    return counted


_COUNTED = _without_rounding(positive=True)


def _user_defined(name, g, pair, **more):
    return _spectral(
        name,
        lambda a, problem: truth.function(a, g),
        lambda a, **o: mb.matrix_function(a, pair, **o),
        orders=1,
        **more,
    )


def _labeled(objective, *names):
    def call(f, labels, *more, **options):
        return objective(f, labels, num_labels=3, **dict(zip(names, more, strict=True)), **options)

    return call


def _pool(name, parts, truth_of, call, *, tall, is_complex=1, **more):
    relative = tuple(range(1, 1 + len(parts)))
    return Row(name, _pooled(*parts, tall=tall), truth_of, call, relative=relative, complex=is_complex, **more)


def _geometry(metric):
    """The rows of a metric; the maps of the log-Euclidean metric have one derivative."""
    named = {
        "distance": (_two_definite if metric == "bures_wasserstein" else _two, truth.spd_distance),
        "geodesic": (
            lambda draw: (*_two(draw), np.array(draw.pick(0.3, 0.5, 0.0, 1.0, 1.5, -0.5))),
            lambda a, b, t, metric: truth.spd_geodesic(a, b, t[0], metric),
        ),
        "exp_map": (
            lambda draw: (draw.symmetric(), draw.symmetric(kind=draw.pick("plain", "indefinite")) * 0.25),
            truth.spd_exp_map,
        ),
        "log_map": (_two, truth.spd_log_map),
    }
    common = {"symmetric": (0, 1), "complex": 2, "real_factor": math.sqrt(0.5), "covariant": True}
    common |= {} if metric == "log_euclidean" else {"unit": 4 * ROUNDING}
    rows = [
        Row(
            f"spd_{name}_{metric}",
            draw,
            lambda *inputs, problem, definition=definition: [definition(*inputs, metric)],
            lambda *inputs, name=name, **o: getattr(mb.spd, name)(*inputs, metric=metric, **o),
            orders=1 if name.endswith("map") and metric == "log_euclidean" else 2,
            least=1.0 if name == "distance" and metric != "bures_wasserstein" else 0.0,
            **common,
        )
        for name, (draw, definition) in named.items()
    ]
    mean = Row(
        f"spd_mean_{metric}",
        lambda draw: (*_two(draw), draw.rng.uniform(0.2, 2, 2)),
        lambda a, b, w, problem: [truth.spd_mean_of_two(a, b, w, metric)],
        lambda a, b, w, **o: mb.spd.mean(torch.stack([a, b], -3), w, metric=metric, **o),
        relative=(2,),
        traced=metric == "log_euclidean",
        **{**common, "complex": 0, "unit": ROUNDING if metric == "log_euclidean" else 1e-11},
    )
    return [*rows, mean]


def _nonzero(values):
    if any(x == 0 for x in values):
        raise truth.Undefined("nonzero")
    return values


_PENCIL = {
    "log": (mpmath.log, truth.positive),
    "inv_sqrt": (lambda x: 1 / mpmath.sqrt(x), truth.positive),
    "inverse": (lambda x: 1 / x, _nonzero),
}
_of_two = {"symmetric": (0, 1), "unit": 4 * ROUNDING, "covariant": True}
_cut_row = {"rank_tol": lambda problem: math.sqrt(_gram_tol(problem)), "least": 4.0}

ROWS = [
    _spectral("matrix_log", lambda a, problem: truth.log(a), mb.matrix_log, least=1.0),
    _spectral(
        "matrix_sqrt",
        lambda a, problem: _real_power(a, mpf(0.5)),
        mb.matrix_sqrt,
        counted=_COUNTED,
    ),
    _spectral("matrix_inv_sqrt", lambda a, problem: truth.power(a, mpf(-0.5)), mb.matrix_inv_sqrt),
    _spectral("matrix_exp", lambda a, problem: truth.exp(a), mb.matrix_exp),
    _spectral("matrix_inverse", lambda a, problem: truth.inverse(a), mb.matrix_inverse),
    Row(
        "matrix_power",
        lambda draw: (draw.symmetric(), np.array(draw.pick(0.7, -1.3, 2.0, 0.5, 1e-4, 7.5))),
        lambda a, p, problem: [truth.power(a, p[0])],
        mb.matrix_power,
        symmetric=(0,),
        relative=(1,),
        complex=1,
    ),
    _spectral(
        "matrix_power_of_a_number",
        _of_number,
        mb.matrix_power,
        _chosen("p", 0, 1, 2, 5, -1, -3, 0.5, -0.5, 2.5, -1.7, 1e-4, 20.5),
        counted=lambda i, a, problem: a if isinstance(problem.options["p"], int) else _COUNTED(i, a, problem),
    ),
    _spectral("matrix_cube", lambda a, problem: truth.power(a, 3), lambda a, **o: mb.matrix_power(a, 3, **o)),
    _spectral(
        "matrix_power_minus_2", lambda a, problem: truth.power(a, -2), lambda a, **o: mb.matrix_power(a, -2, **o)
    ),
    _user_defined("own_derivative", mpmath.atan, (torch.arctan, lambda x: 1 / (1 + x * x))),
    _user_defined("own_log", _log, (torch.log, torch.reciprocal), least=1.0),
    _user_defined(
        "own_quotient", lambda x: 1 / (2 + x * x), (lambda x: 1 / (2 + x * x), lambda x: -2 * x / (2 + x * x) ** 2)
    ),
    Row(
        "matrix_functions",
        _matrix,
        lambda a, problem: [
            *(_real_power(_COUNTED(0, a, problem), mpf(p)) for p in (0.5, 0.3)),
            truth.inverse(a),
        ],
        lambda a, **o: mb.matrix_functions(a, ["sqrt", 0.3, "inverse"], **o),
        symmetric=(0,),
        complex=1,
    ),
    _spectral("matrix_clamp", _clamp, mb.matrix_clamp, _threshold(0.0, 0.5, -1.0, 1e-3)),
    _spectral(
        "inverse_root",
        lambda a, problem: truth.inverse_root(a, problem.options["p"], _eps(problem)),
        mb.inverse_root,
        _chosen(
            "p",
            2,
            4,
            1,
            2.5,
            draw_matrix=lambda draw: _chosen("eps", *(draw.scale * e for e in (0.1, 0.0, 1e-6)))(draw),
        ),
        counted=_without_rounding(),
    ),
    _spectral(
        "inverse_root_relative",
        lambda a, problem: truth.inverse_root(a, 2, _eps(problem), relative=True),
        lambda a, **o: mb.inverse_root(a, 2, relative=True, **o),
        _chosen("eps", 0.1, 1e-6),
        counted=_without_rounding(),
    ),
    *(
        _pool(
            f"pool_{form}_log",
            "e",
            lambda f, e, problem: [truth.pool(f, e[0], _log)],
            lambda f, e, **o: mb.second_order_pool(f, eps=e, **o),
            tall=form == "primal",
        )
        for form in ("thin", "primal")
    ),
    _pool(
        "pool_thin_sqrt_weighted",
        "w",
        lambda f, w, problem: [truth.pool(f, _eps(problem), mpmath.sqrt, w)],
        lambda f, w, **o: mb.second_order_pool(f, function="sqrt", weight=w, **o),
        tall=False,
    ),
    *(
        _pool(
            f"pool_{form}_weighted_power",
            "wep",
            lambda f, w, e, p, problem: [truth.pool(f, e[0], _power(p[0]), w)],
            lambda f, w, e, p, **o: mb.second_order_pool(f, eps=e, weight=w, function="power", exponent=p, **o),
            tall=form == "primal",
        )
        for form in ("primal", "thin")
    ),
    _pool(
        "pool_regions_centered",
        "w",
        lambda f, w, problem: [truth.pool(f, _eps(problem), _log, w, center=True)],
        lambda f, w, **o: mb.second_order_pool(f, weight=w.unsqueeze(-2), center=True, **o).squeeze(-3),
        tall=True,
        is_complex=0,
    ),
    *(
        _pool(
            f"pool_by_{method}",
            "",
            lambda f, problem: [truth.pool(f, _eps(problem), _log)],
            lambda f, method=method, **o: mb.second_order_pool(f, method=method, **o),
            tall=True,
            unit=2.0**-26,
            orders=0,
        )
        for method in ("svd", "eig")
    ),
    Row("eigh", _matrix, _eigenpairs, mb.eigh, _seen_pairs, symmetric=(0,), composed=True, complex=1),
    Row(
        "topk_eigh",
        _few,
        _leading_pairs,
        mb.topk_eigh,
        lambda lam, v: (lam, v @ v.mH),
        symmetric=(0,),
        composed=True,
    ),
    *(
        Row(
            f"whiten_{name}",
            _pooled("w", tall=name != "thin"),
            lambda x, w, problem: [truth.whiten(x, w, _eps(problem))],
            lambda x, w, **o: mb.whiten(x, weight=w, **o),
            relative=(1,),
            least=1.0,
        )
        for name in ("thin", "zca")
    ),
    Row(
        "whiten_pca",
        _pooled("w", tall=True),
        lambda x, w, problem: [truth.whiten(x, w, _eps(problem), axes=True)],
        lambda x, w, **o: mb.whiten(x, weight=w, method="pca", **o),
        lambda y: (y * y,),
        relative=(1,),
        unit=2.0**-26,
        orders=1,
        composed=True,
    ),
    Row(
        "whiten_by_statistics",
        lambda draw: (
            draw.rng.normal(size=(3, draw.n)),
            draw.rng.normal(size=draw.n),
            *_chosen("eps", 0.1, 1e-6)(draw),
        ),
        lambda x, mean, a, problem: [truth.whiten_by(x, mean, a, _eps(problem))],
        lambda x, mean, a, **o: mb.whiten(x, mean=mean, covariance=a, **o),
        symmetric=(2,),
        counted=_without_rounding(index=2),
    ),
    Row(
        "generalized_eigh",
        _two,
        lambda a, b, problem: [
            m if k == 0 or _apart(list(truth.pencil(a, b)[0])) else None for k, m in enumerate(truth.pencil(a, b))
        ],
        mb.generalized_eigh,
        lambda lam, v: (lam, v @ v.mT, (v * lam.unsqueeze(-2)) @ v.mT, v[..., :1] @ v[..., :1].mT),
        composed=True,
        **_of_two,
    ),
    Row(
        "generalized_matrix_function",
        lambda draw: (*_two(draw), np.array(draw.pick(0.7, 0.3, -1.3, 2.0))),
        lambda a, b, p, problem: [truth.pencil_function(a, b, _power(p[0]))],
        lambda a, b, p, **o: mb.generalized_matrix_function(a, b, "power", exponent=p, **o),
        relative=(2,),
        complex=2,
        **_of_two,
    ),
    Row(
        "generalized_matrix_function_by_name",
        _chosen("function", *_PENCIL, draw_matrix=_two),
        lambda a, b, problem: [truth.pencil_function(a, b, *_PENCIL[problem.options["function"]])],
        mb.generalized_matrix_function,
        complex=2,
        **_of_two,
    ),
    *(
        Row(
            f"svd_{full}{shape}",
            draw,
            _singular,
            lambda a, full=full, **o: mb.svd(a, full_matrices=bool(full), **o),
            _seen_triples,
            composed=True,
            complex=1,
        )
        for full in ("", "full_")
        for shape, draw in (("tall", _tall), ("wide", _wide))
    ),
    Row(
        "projector",
        lambda draw: (draw.features(),),
        lambda a, problem: [truth.span(a, mpf(_rank_tol(problem)) ** 2)[0]],
        mb.projector,
        rank_tol=_rank_tol,
        complex=1,
    ),
    _spectral(
        "projector_symmetric",
        lambda a, problem: truth.span(a, mpf(_rank_tol(problem)) ** 2)[0],
        lambda a, **o: mb.projector(a, symmetric=True, **o),
        orders=0,
    ),
    # One order, because second derivatives count singular values below the tolerance as zero.
    *(
        Row(f"pinv_{shape}", draw, _pinv, mb.pinv, rank_tol=_rank_tol, complex=1, orders=1)
        for shape, draw in (("tall", _tall), ("wide", _wide))
    ),
    Row("pinv_deficient", _matrix, _pinv, mb.pinv, orders=0),
    Row(
        "lstsq",
        lambda draw: (*(a := _tall(draw)), draw.rng.uniform(-1, 1, (a[0].shape[0], 2))),
        lambda a, b, problem: [_pinv(a, problem)[0] * b],
        mb.lstsq,
        rank_tol=_rank_tol,
        complex=2,
        orders=1,
    ),
    Row("spectral_projector", _ranked(_matrix), _leading_space, mb.spectral_projector, symmetric=(0,), complex=1),
    *(
        Row(f"polar_{shape}", draw, lambda a, problem: truth.polar(a, _unique_tol(problem)), mb.polar, complex=1)
        for shape, draw in (("tall", _tall), ("wide", _wide))
    ),
    Row("project_rotation", _square, lambda a, problem: [truth.rotation(a, _unique_tol(problem))], mb.project_rotation),
    Row(
        "procrustes",
        _points,
        lambda x, y, w, problem: [
            truth.rotation(x.T * truth.diagonal(w) * y, _unique_tol(problem))
            if x.rows
            else truth.rotation(mpmath.matrix(x.cols, x.cols), 0)
        ],
        lambda x, y, w, **o: mb.procrustes(x, y, weight=w, **o),
        relative=(2,),
    ),
    Row(
        "procrustes_with_reflections",
        lambda draw: _points(draw)[:2],
        lambda x, y, problem: [
            truth.rotation(x.T * y if x.rows else mpmath.matrix(x.cols, x.cols), _unique_tol(problem), reflection=True)
        ],
        lambda x, y, **o: mb.procrustes(x, y, reflection=True, **o),
    ),
    Row("low_rank", _ranked(lambda draw: (draw.features(),)), _nearest, mb.low_rank, complex=1),
    Row("affinity", lambda draw: (draw.features(),), lambda f, problem: [f * f.T], mb.affinity),
    Row(
        "normalized_affinity",
        _affinities,
        lambda w, problem: [truth.normalized_affinity(w)],
        mb.normalized_affinity,
        symmetric=(0,),
    ),
    Row(
        "normalized_cut_value",
        lambda draw: (lambda w: (w, draw.labels(w.shape[0])))(_affinities(draw)[0]),
        lambda w, labels, problem: [truth.cut_value(w, labels)],
        _labeled(mb.normalized_cut_value),
        symmetric=(0,),
        least=1.0,
    ),
    Row(
        "normalized_cut_j1",
        _cut("w", "l", positive=True),
        lambda f, labels, w, lam, problem: [truth.j1(f, labels, _gram_tol(problem), w, lam)],
        _labeled(mb.normalized_cut_j1, "weight", "lam"),
        symmetric=(3,),
        relative=(2,),
        **_cut_row,
    ),
    Row(
        "normalized_cut_j1_plain",
        _cut(positive=True),
        lambda f, labels, problem: [truth.j1(f, labels, _gram_tol(problem))],
        _labeled(mb.normalized_cut_j1),
        **_cut_row,
    ),
    Row(
        "normalized_cut_j2",
        _cut("w"),
        lambda f, labels, w, problem: [truth.j2(f, labels, _gram_tol(problem), w)],
        _labeled(mb.normalized_cut_j2, "weight"),
        relative=(2,),
        **_cut_row,
    ),
    Row(
        "normalized_cut_soft",
        _cut("ridge"),
        lambda f, labels, problem: [truth.soft(f, labels, problem.options["ridge"])],
        _labeled(mb.normalized_cut_soft),
        least=4.0,
    ),
    Row(
        "normalized_cut_soft_weighted",
        _cut("ridge", "w"),
        lambda f, labels, w, problem: [truth.soft(f, labels, problem.options["ridge"], w)],
        _labeled(mb.normalized_cut_soft, "weight"),
        relative=(2,),
        least=4.0,
    ),
    Row(
        "spectral_embedding",
        lambda draw: (draw.features(int(draw.rng.integers(2, 6)) if draw.kind != "empty" else 0, 3, positive=True),),
        lambda f, problem: truth.embedding(f, 2, _gram_tol(problem)),
        lambda f, **o: mb.spectral_embedding(f, 2, **o),
        lambda lam, u, degree: (lam, u @ u.mT, degree),
        rank_tol=lambda problem: math.sqrt(_gram_tol(problem)),
        composed=True,
    ),
    Row(
        "linear_solve",
        _system,
        lambda a, b, problem: [truth.solve_definite(a, b)],
        lambda a, b, **o: mb.linear_solve(a, b, symmetric=True, **o),
        symmetric=(0,),
        covariant=True,
        complex=2,
    ),
    Row(
        "lyapunov",
        lambda draw: (_small(draw).symmetric(), draw.rng.uniform(-1, 1, (draw.n, draw.n))),
        lambda a, c, problem: [truth.sylvester(a, a, c)],
        mb.lyapunov,
        symmetric=(0,),
    ),
    Row(
        "linear_solve_by_lu",
        lambda draw: (
            draw.features(draw.n, draw.n),
            draw.rng.uniform(-1, 1, (draw.n, 1)) + (0j if draw.complex else 0),
        ),
        lambda a, b, problem: [truth.solve(a, b)],
        mb.linear_solve,
        complex=2,
    ),
    Row("vectorize_symmetric", _matrix, _triangle, mb.vectorize_symmetric, symmetric=(0,), passes=True, checks=False),
    Row(
        "unvectorize_symmetric",
        lambda draw: (draw.sized(draw.rng.normal(size=draw.n * (draw.n + 1) // 2)),),
        _untriangle,
        mb.unvectorize_symmetric,
        passes=True,
        checks=False,
    ),
    *(row for metric in get_args(Metric) for row in _geometry(metric)),
    Row(
        "spd_distance_of_singular_matrices",
        _two,
        lambda a, b, problem: [
            truth.bures_distance(a, b, mpf(a.rows * zero_tolerance(problem.dtype, torch.float64, 1)))
        ],
        lambda a, b, **o: mb.spd.distance(a, b, metric="bures_wasserstein", **o),
        symmetric=(0, 1),
        complex=2,
        real_factor=math.sqrt(0.5),
        unit=4 * ROUNDING,
        orders=0,
    ),
    Row(
        "spd_bimap",
        lambda draw: (draw.symmetric(), draw.rng.normal(size=(draw.n, 2))),
        lambda x, w, problem: [w.T * truth.sym(x) * w if x.rows else mpmath.matrix(2, 2)],
        mb.spd.bimap,
        symmetric=(0,),
        composed=True,  # computed in the dtype of the inputs
        passes=True,
        checks=False,
    ),
    _spectral(
        "spd_re_eig",
        _clamp,
        lambda a, least, **o: mb.spd.re_eig(a, least, **o),
        _threshold(0.5, 1e-3),
        composed=True,  # the diagonal is raised by some roundings of the dtype
    ),
    Row(
        "spd_log_eig",
        _matrix,
        lambda a, problem: _triangle(truth.log(a), problem),
        mb.spd.log_eig,
        symmetric=(0,),
        least=1.0,
    ),
    Row(
        "spd_batch_norm",
        lambda draw: (*_two(draw), draw.symmetric(kind="plain", scale=1.0), *draw.rng.uniform(0.5, 2, (2, 1))),
        lambda x, m, b, v, s, problem: [truth.spd_batch_norm(x, m, b, v[0], s[0], mpf(1e-5))],
        lambda x, m, b, v, s, **o: mb.spd.batch_norm(x, m, bias=b, variance=v.squeeze(-1), scale=s.squeeze(-1), **o),
        symmetric=(0, 1, 2),
        relative=(3, 4),
    ),
    Row(
        "sylvester",
        lambda draw: (*_two(_small(draw)), draw.rng.uniform(-1, 1, (draw.n, draw.n))),
        lambda a, b, c, problem: [truth.sylvester(a, b, c)],
        mb.sylvester,
        symmetric=(0, 1),
    ),
    Row(
        "spd_frechet_distance",
        _samples,
        lambda x, y, problem: [truth.frechet_distance(x, y)],
        mb.spd.frechet_distance,
        orders=1,
    ),
]
