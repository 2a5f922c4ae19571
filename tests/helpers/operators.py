"""One table of operator cases: a new operator is a new row, and every property is tested on it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import matbackprop as mb
from helpers.matrices import generator, relu_features, symmetric, with_singular_values


@dataclass(frozen=True)
class Case:
    """An operator with the inputs that its properties are tested on.

    ``call`` takes the tensors that ``inputs`` makes and returns tensors without a gauge freedom. What
    ``inputs("separated")`` makes has simple values, what ``inputs("repeated")`` makes tied ones; ``exact_at_ties`` says
    whether derivatives exist there.
    """

    name: str
    call: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: Callable[[str], tuple[Tensor, ...]]
    exact_at_ties: bool = True


def _matrices(spectrum: str) -> tuple[Tensor, ...]:
    kept = {"separated": (0.5, 1.2, 2.1), "repeated": (1.0, 1.0, 2.0)}[spectrum]
    return (symmetric(kept, 2, seed=1),)


def _features(m: int, d: int) -> Callable[[str], tuple[Tensor, ...]]:
    def make(spectrum: str) -> tuple[Tensor, ...]:
        k = min(m, d)
        values = torch.linspace(0.5, 1.5, k) if spectrum == "separated" else torch.ones(k)
        f = with_singular_values(m, d, values, 2, seed=2)
        if spectrum == "repeated":
            f = f.clone()
            f[1, 1] = f[1, 0]  # a duplicate row beside the repeated spectrum
        return (f,)

    return make


def _with(make: Callable[[str], tuple[Tensor, ...]], *more: Tensor) -> Callable[[str], tuple[Tensor, ...]]:
    return lambda spectrum: (*make(spectrum), *(t.clone() for t in more))


def _of_symmetric(call: Callable[..., Tensor | tuple[Tensor, ...]]) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Take the symmetric part first: finite differences move one entry at a time."""
    return lambda a, *more: call(0.5 * (a + a.mT), *more)


def _softplus_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x)


def _log_divided(a: Tensor, b: Tensor) -> Tensor:
    low = torch.minimum(a, b)
    x = (torch.maximum(a, b) - low) / low
    return torch.where(x == 0, 1.0, torch.log1p(x) / torch.where(x == 0, 1.0, x)) / low


def _double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _eigh_invariants(a: Tensor) -> tuple[Tensor, ...]:
    lam, u = mb.eigh(a)
    return lam, (u * lam.sin().unsqueeze(-2)) @ u.mT, u[..., :1] @ u[..., :1].mT


def _svd_invariants(full: bool) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def call(a: Tensor) -> tuple[Tensor, ...]:
        u, s, vh = mb.svd(a, full)
        k = s.shape[-1]
        u1, v1 = u[..., :k], vh[..., :k, :]
        out = [
            s,
            (u1 * s.exp().unsqueeze(-2)) @ v1,
            u1 @ (s.unsqueeze(-1) * u1.mT),
            v1.mT @ (s.sin().unsqueeze(-1) * v1),
        ]
        if u.shape[-1] > k:
            out.append(u[..., k:] @ u[..., k:].mT)
        if vh.shape[-2] > k:
            out.append(vh[..., k:, :].mT @ vh[..., k:, :])
        return tuple(out)

    return call


_weights = torch.rand(2, 3, generator=generator(5), dtype=torch.float64) + 0.2
_regions = torch.rand(2, 2, 3, generator=generator(6), dtype=torch.float64) + 0.2
_eps = _double(0.1, 0.3)

CASES = [
    Case("matrix_log", _of_symmetric(mb.matrix_log), _matrices),
    Case("matrix_sqrt", _of_symmetric(mb.matrix_sqrt), _matrices),
    Case("matrix_inv_sqrt", _of_symmetric(mb.matrix_inv_sqrt), _matrices),
    Case("matrix_exp", _of_symmetric(mb.matrix_exp), _matrices),
    Case("matrix_inverse", _of_symmetric(mb.matrix_inverse), _matrices),
    Case("matrix_power", _of_symmetric(mb.matrix_power), _with(_matrices, _double(0.7, -1.3))),
    Case("matrix_cube", _of_symmetric(lambda a: mb.matrix_power(a, 3)), _matrices),
    Case("matrix_power_minus_2", _of_symmetric(lambda a: mb.matrix_power(a, -2)), _matrices),
    Case(
        "own_derivative",
        _of_symmetric(lambda a: mb.matrix_function(a, (torch.nn.functional.softplus, _softplus_slope))),
        _matrices,
    ),
    Case(
        "own_divided_difference", _of_symmetric(lambda a: mb.matrix_function(a, (torch.log, _log_divided))), _matrices
    ),
    Case("pool_thin_log", lambda f, e: mb.second_order_pool(f, eps=e), _with(_features(3, 4), _eps)),
    Case("pool_primal_log", lambda f, e: mb.second_order_pool(f, eps=e), _with(_features(4, 3), _eps)),
    Case(
        "pool_thin_sqrt_weighted",
        lambda f, w: mb.second_order_pool(f, eps=0.1, function="sqrt", weight=w),
        _with(_features(3, 4), _weights),
    ),
    Case(
        "pool_primal_weighted_power",
        lambda f, w, e, p: mb.second_order_pool(f, eps=e, weight=w, function="power", exponent=p),
        _with(_features(3, 2), _weights, _eps, _double(0.7).squeeze()),
    ),
    Case(
        "pool_thin_weighted_power",
        lambda f, w, e, p: mb.second_order_pool(f, eps=e, weight=w, function="power", exponent=p),
        _with(_features(3, 4), _weights, _eps, _double(0.7).squeeze()),
    ),
    Case(
        "pool_regions_centered",
        lambda f, w: mb.second_order_pool(f, eps=0.1, weight=w, center=True),
        _with(_features(3, 4), _regions),
    ),
    Case("eigh", _of_symmetric(_eigh_invariants), _matrices, exact_at_ties=False),
    Case("svd_tall", _svd_invariants(False), _features(4, 3), exact_at_ties=False),
    Case("svd_wide", _svd_invariants(False), _features(3, 4), exact_at_ties=False),
    Case("svd_full_tall", _svd_invariants(True), _features(4, 3), exact_at_ties=False),
    Case("svd_full_wide", _svd_invariants(True), _features(3, 4), exact_at_ties=False),
    Case("vectorize", mb.vectorize_symmetric, _matrices),
    Case("unvectorize", mb.unvectorize_symmetric, lambda _: (relu_features(2, 6),)),
]

SPECTRA_OF_CASES = [
    (case, spectrum)
    for case in CASES
    for spectrum in ("separated", "repeated")
    if spectrum == "separated" or case.exact_at_ties
]


def case_id(value: object) -> str:
    return value.name if isinstance(value, Case) else str(value)


def outputs(case: Case, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The outputs as a tuple."""
    out = case.call(*inputs)
    return out if isinstance(out, tuple) else (out,)


def loss(case: Case, *inputs: Tensor) -> Tensor:
    """A scalar that depends on every entry of every output."""
    total = inputs[0].new_zeros(())
    for i, out in enumerate(outputs(case, *inputs)):
        weights = torch.linspace(-1, 1.3, max(out.shape[-1], 1), dtype=out.dtype, device=out.device)[: out.shape[-1]]
        total = total + ((1 + 0.3 * i) * weights * out).sum() + out.square().sum()
    return total
