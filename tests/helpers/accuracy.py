"""Errors of the operators' gradients for float32 and float64 input, against references with many digits.

One row per operator: the call, its definition in `helpers.truth`, and inputs with simple values, with values that are
bitwise equal, with values 1e-9 apart, and with values spread over three decades. The true gradient is the difference
quotient of the definition, entry by entry.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import get_args

import mpmath
import numpy as np
import torch
from mpmath import mp, mpf

import matbackprop as mb
from helpers import truth
from helpers.matrices import generator, orthogonal
from matbackprop import spd
from matbackprop.spd._metrics import Metric

CASES = ("simple", "equal", "1e-9 apart", "κ = 1e3")
PROMISED = {torch.float32: 2e-7, torch.float64: 5e-12}
_DIGITS, _STEP = 75, mpf(10) ** -20

# With entries ±½: products with small integers are exact in every dtype, so values are bitwise equal.
_HALVES = torch.eye(4, dtype=torch.float64) - 0.5


def _values(case, tied, n):
    if case == "equal":
        return torch.tensor(tied, dtype=torch.float64)
    if case == "1e-9 apart":
        return torch.tensor(tied, dtype=torch.float64) + 1e-9 * torch.arange(n, dtype=torch.float64)
    if case == "κ = 1e3":
        return torch.logspace(-1, 2, n, dtype=torch.float64)
    return torch.linspace(0.6, 2.7, n, dtype=torch.float64).square()


def symmetric(case, tied=(1, 1, 2, 2), seed=0):
    """A matrix of order 4 with values of a case, ascending."""
    q = _HALVES if case == "equal" else orthogonal(4, seed=seed)
    a = (q * _values(case, tied, 4)) @ q.mT
    return 0.5 * (a + a.mT)


def rectangular(m, d, tied=(1, 1, 2), case="simple", seed=0):
    """An m×d matrix with min(m, d) singular values of a case."""
    k = min(m, d)
    left, right = orthogonal(m, seed=seed)[:, :k], orthogonal(d, seed=seed + 1)[:, :k]
    if case == "equal":
        left = _HALVES[:m, :k] if m == 4 else torch.eye(m, k, dtype=torch.float64)
        right = _HALVES[:d, :k] if d == 4 else torch.eye(d, k, dtype=torch.float64)
    return (left * _values(case, tied[-k:], k).flip(-1)) @ right.mT


@dataclass(frozen=True)
class Row:
    """An operator.

    Args:
        name: of the operator.
        call: takes tensors and returns one or several.
        truth: takes the same as mpmath matrices and returns a list of them.
        make: takes a case and returns the inputs in float64; None if the operator has no gradient.
        symmetric: which inputs are symmetric matrices, or stacks of them.
    """

    name: str
    call: Callable
    truth: Callable
    make: Callable
    symmetric: tuple[int, ...] = ()


def _mp(t):
    """A tensor as an mpmath matrix, a stack as a list of them, a number as a number."""
    if t.ndim > 2:
        return [_mp(x) for x in t]
    return mpmath.matrix(t.double().tolist()) if t.ndim else mpf(float(t))


def _pair(cotangents, outs):
    return sum(
        sum(mpf(float(g)) * x for g, x in zip(c, list(m), strict=True)) for c, m in zip(cotangents, outs, strict=True)
    )


def _moves(t, is_symmetric):
    """Unit directions of a tensor, each with the entries of the gradient that it determines."""
    for index in np.ndindex(*t.shape):
        i, j = (0, 0, *index)[-2:]
        if is_symmetric and j > i:
            continue
        unit = torch.zeros(t.shape, dtype=torch.float64)
        places = [index, (*index[:-2], index[-1], index[-2])] if is_symmetric and i != j else [index]
        for place in places:
            unit[place] = 1 / len(places)
        yield unit, places


def _added(x, unit, step):
    if isinstance(x, list):
        return [_added(y, u, step) for y, u in zip(x, unit, strict=True)]
    return x + step * _mp(unit)


def true_gradients(row: Row, inputs: Iterable[torch.Tensor], cotangents: list[list[float]]) -> list[np.ndarray]:
    """The gradient of ⟨G, f⟩ by central differences with many digits."""
    inputs = list(inputs)
    with mp.workdps(_DIGITS):
        points = [_mp(t) for t in inputs]
        gradients = []
        for k, t in enumerate(inputs):
            gradient = np.zeros(t.shape)
            for unit, places in _moves(t, k in row.symmetric):
                sides = [
                    _pair(cotangents, row.truth(*points[:k], _added(points[k], unit, step), *points[k + 1 :]))
                    for step in (_STEP, -_STEP)
                ]
                for place in places:
                    gradient[place] = float((sides[0] - sides[1]) / (2 * _STEP))
            gradients.append(gradient)
        return gradients


def gradient_error(row: Row, case: str, dtype: torch.dtype) -> float | None:
    """‖gradient − truth‖/‖truth‖ over all inputs; None if the operator has no gradient."""
    made = row.make(case)
    if made is None:
        return None
    inputs = [t.to(dtype).requires_grad_() for t in made]
    outs = row.call(*inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    cotangents = [
        torch.randn(o.shape, generator=generator(i), dtype=torch.float64).to(o.dtype) for i, o in enumerate(outs)
    ]
    got = torch.autograd.grad(outs, inputs, cotangents)
    flat = [c.double().flatten().tolist() for c in cotangents]
    expected = true_gradients(row, [t.detach() for t in inputs], flat)
    missed = sum(float(((g.double().numpy() - w) ** 2).sum()) for g, w in zip(got, expected, strict=True)) ** 0.5
    return missed / sum(float((w**2).sum()) for w in expected) ** 0.5


def _of_symmetric(name, call, definition, tied=(1, 1, 2, 2)):
    return Row(name, call, lambda a: [definition(a)], lambda case: (symmetric(case, tied),), (0,))


def _of_rectangle(name, call, definition, m=4, n=3):
    """A row for m×n matrices, whose definition returns a list."""
    return Row(name, call, definition, lambda case: (rectangular(m, n, case=case),))


def _untied(make):
    """Inputs of operators without a gradient at equal values."""
    return lambda case: None if case in ("equal", "1e-9 apart") else make(case)


def _of_vectors(values, vectors):
    values, vectors = values.double(), vectors.double()  # exclude the rounding error of the loss
    return values, vectors @ vectors.mT, (vectors * values) @ vectors.mT, vectors[:, :1] @ vectors[:, :1].mT


def _eigenpairs(a):
    values, u = truth.eig(a)
    return [truth.vector(values), u * u.T, truth.compose(u, values), truth.leading(values, u)]


def _svd(a):
    u, s, vh = (x.double() for x in mb.svd(a))
    return s, (u * s.sqrt()) @ vh, u[:, :1] @ vh[:1]


def _true_svd(a):
    values, u, v = truth.singular(a)
    first = truth.columns(u, 0, 1) * truth.columns(v, 0, 1).T
    return [truth.vector(values), truth.compose(u, [mpmath.sqrt(x) for x in values], v), first]


def _projected(v):
    return v.double() @ v.double().mT


def _values_and_projector(pairs):
    return pairs.eigenvalues, _projected(pairs.eigenvectors)


def _spaced(case):
    """Symmetric matrices whose largest eigenvalue is separated."""
    return (symmetric(case, (1, 1, 1, 2)),)


def _samples(case):
    x = rectangular(4, 3, case=case)
    return x, torch.linspace(0.5, 1.5, 4, dtype=torch.float64)


def _points(case):
    x = torch.randn(4, 3, generator=generator(1), dtype=torch.float64)
    return x, x @ rectangular(3, 3, case=case)


def _pair_of(case):
    return symmetric(case), symmetric("simple", seed=3)


def _stack_of(case):
    stack = torch.stack([symmetric(case)[:2, :2], symmetric("simple", seed=3)[:2, :2]])
    return stack, torch.tensor([0.5, 1.0], dtype=torch.float64)


def _geometry(metric):
    def named(name):
        return lambda *inputs: getattr(spd, name)(*inputs, metric=metric)

    def by(definition):
        return lambda *inputs: [definition(*inputs, metric)]

    def nearby(case):
        a, b = _pair_of(case)
        return a, 0.1 * b

    label = metric.replace("_", "-")
    return [
        Row(f"spd.distance, {label}", named("distance"), by(truth.spd_distance), _pair_of, (0, 1)),
        Row(
            f"spd.geodesic, {label}",
            named("geodesic"),
            by(truth.spd_geodesic),
            lambda case: (*_pair_of(case), torch.tensor(0.3, dtype=torch.float64)),
            (0, 1),
        ),
        Row(f"spd.exp_map, {label}", named("exp_map"), by(truth.spd_exp_map), nearby, (0, 1)),
        Row(f"spd.log_map, {label}", named("log_map"), by(truth.spd_log_map), _pair_of, (0, 1)),
        Row(f"spd.mean, {label}", named("mean"), by(truth.spd_mean), _stack_of, (0,)),
    ]


ROWS = [
    _of_symmetric("matrix_log", mb.matrix_log, truth.log),
    _of_symmetric("matrix_sqrt", mb.matrix_sqrt, lambda a: truth.power(a, mpf(0.5))),
    _of_symmetric("matrix_inv_sqrt", mb.matrix_inv_sqrt, lambda a: truth.power(a, mpf(-0.5))),
    _of_symmetric("matrix_exp of A/32", lambda a: mb.matrix_exp(a / 32), lambda a: truth.exp(a / 32)),
    _of_symmetric("matrix_inverse", mb.matrix_inverse, truth.inverse),
    _of_symmetric("matrix_power, 0.3", lambda a: mb.matrix_power(a, 0.3), lambda a: truth.power(a, mpf(0.3))),
    Row(
        "matrix_functions",
        lambda a: tuple(mb.matrix_functions(a, ["sqrt", "inv_sqrt"])),
        lambda a: [truth.power(a, mpf(0.5)), truth.power(a, mpf(-0.5))],
        lambda case: (symmetric(case),),
        (0,),
    ),
    _of_symmetric(
        "matrix_clamp", lambda a: mb.matrix_clamp(a, 1.5), lambda a: truth.function(a, lambda x: max(x, mpf(1.5)))
    ),
    _of_symmetric(
        "inverse_root, p = 4", lambda a: mb.inverse_root(a, 4, eps=0.1), lambda a: truth.inverse_root(a, 4, 0.1)
    ),
    Row("eigh", lambda a: _of_vectors(*mb.eigh(a)), _eigenpairs, _untied(lambda case: (symmetric(case),)), (0,)),
    Row("generalized_eigh", lambda *x: _of_vectors(*mb.generalized_eigh(*x)), truth.pencil, _untied(_pair_of), (0, 1)),
    Row(
        "generalized_matrix_function, log",
        lambda a, b: mb.generalized_matrix_function(a, b, "log"),
        lambda a, b: [truth.spd_log_map(b, a, "affine_invariant")],
        _pair_of,
        (0, 1),
    ),
    Row("lyapunov", mb.lyapunov, lambda a, c: [truth.sylvester(a, a, c)], _pair_of, (0,)),
    Row(
        "sylvester",
        mb.sylvester,
        lambda a, b, c: [truth.sylvester(a, b, c)],
        lambda case: (*_pair_of(case), rectangular(4, 4, (1, 1, 2, 2), seed=5)),
        (0, 1),
    ),
    Row("topk_eigh, k = 1", lambda a: _values_and_projector(mb.topk_eigh(a, 1)), truth.top, _spaced, (0,)),
    Row(
        "topk_eigh of products, k = 1",
        lambda a: _values_and_projector(mb.topk_eigh(lambda x, a: 0.5 * (a + a.mT) @ x, 1, (a,), n=4)),
        truth.top,
        _spaced,
        (0,),
    ),
    _of_symmetric(
        "topk_subspace, k = 2", lambda a: _projected(mb.topk_subspace(a, 2)), lambda a: truth.leading_space(a, 2)
    ),
    _of_symmetric(
        "spectral_projector", lambda a: mb.spectral_projector(a, rank=2), lambda a: truth.leading_space(a, 2)
    ),
    Row("svd, 4×3", _svd, _true_svd, _untied(lambda case: (rectangular(4, 3, case=case),))),
    Row("svd, 3×4", _svd, _true_svd, _untied(lambda case: (rectangular(3, 4, case=case),))),
    _of_rectangle("polar, 4×3", mb.polar, lambda a: truth.polar(a, 0)),
    _of_rectangle("project_rotation", mb.project_rotation, lambda a: [truth.rotation(a, 0)], 3, 3),
    Row("procrustes", mb.procrustes, lambda x, y: [truth.rotation(x.T * y, 0)], _points),
    _of_rectangle("low_rank, k = 1", lambda a: mb.low_rank(a, 1), lambda a: [truth.low_rank(a, 1)]),
    _of_rectangle("projector", mb.projector, lambda a: [truth.span(a, mpf(10) ** -30)[0]]),
    _of_rectangle("pinv, 4×3", mb.pinv, lambda a: [truth.pinv(a)]),
    _of_rectangle("pinv, 3×4", mb.pinv, lambda a: [truth.pinv(a)], 3, 4),
    Row(
        "lstsq, 4×3",
        mb.lstsq,
        lambda a, b: [truth.pinv(a) * b],
        lambda case: (rectangular(4, 3, case=case), rectangular(4, 2, (1, 2), case, seed=5)),
    ),
    Row(
        "whiten, zca",
        lambda x, w: mb.whiten(x, weight=w, eps=0.1),
        lambda x, w: [truth.whiten(x, list(w), mpf(0.1))],
        _samples,
    ),
    Row(
        "whiten, pca",
        lambda x, w: mb.whiten(x, weight=w, eps=0.1, method="pca").square(),
        lambda x, w: [truth.whiten(x, list(w), mpf(0.1), axes=True)],
        _untied(_samples),
    ),
    _of_rectangle(
        "second_order_pool, 3×4",
        lambda f: mb.second_order_pool(f, eps=0.125),
        lambda f: [truth.pool(f, mpf(0.125), mpmath.log)],
        3,
        4,
    ),
    *(row for metric in get_args(Metric) for row in _geometry(metric)),
    Row(
        "spd.distance of XXᵀ (4×2) and YYᵀ (4×3), bures-wasserstein",
        lambda x, y: spd.distance(*(t.double() @ t.double().mT for t in (x, y)), metric="bures_wasserstein"),
        lambda x, y: [truth.distance_of_factors(x, y)],
        lambda case: (rectangular(4, 2, (1, 1), case), rectangular(4, 3, seed=3)),
    ),
    Row(
        "spd.frechet_distance",
        spd.frechet_distance,
        lambda x, y: [truth.frechet_distance(x, y)],
        lambda case: (rectangular(4, 3, case=case), 2 * rectangular(4, 3, seed=7)),
    ),
]
