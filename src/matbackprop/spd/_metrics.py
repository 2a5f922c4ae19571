"""The three metrics as classes with the same methods, on matrices that are checked and in the dtype of the computation.

With the Cholesky factor A = LLᵀ every formula of the affine-invariant metric is one function of L⁻¹BL⁻ᵀ, and the
transport of the Bures–Wasserstein one of LᵀBL: they have the eigenvalues of A^(∓½)BA^(∓½), and cost no root of A. Both
are taken in coordinates in which they are diagonal. (ᵀ is the conjugate transpose for complex matrices.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from matbackprop.checks import check_option, values_checkable
from matbackprop.divided_differences import named_function
from matbackprop.errors import NumericalError
from matbackprop.functional._function import Operation, apply
from matbackprop.functional._generalized_eigh import Reduced, definite_factor, function_of_pencil
from matbackprop.functional._matrix_function import matrix_function
from matbackprop.functional._polar import orthogonal_factor
from matbackprop.functional._spectrum import Spectrum, derivative
from matbackprop.numerics import inner, real_dtype, symmetrize
from matbackprop.solvers import batched_eigh

__all__ = ["METRICS", "Geometry", "Metric", "check_metric", "lyapunov", "of_matrix"]

_LOWEST = 300.0  # e to the minus of it, and its reciprocal, are far inside of the range of float64
Metric = Literal["affine_invariant", "log_euclidean", "bures_wasserstein"]


def check_metric(metric: Metric) -> Geometry:
    """The metric of that name."""
    check_option(metric, get_args(Metric), "metric")
    return METRICS[metric]


def of_matrix(a: Tensor, function: str, wanted: bool) -> Tensor:
    """A named function of matrices in their own precision."""
    return matrix_function(a, function, check=wanted, precision=real_dtype(a.dtype))


def _derivative(a: Tensor, e: Tensor, function: str) -> Tensor:
    """The derivative of a named function at A in the direction E."""
    return derivative(a, e, Spectrum(*batched_eigh(a.detach())), named_function(function))


def _squared(a: Tensor) -> Tensor:
    return inner(a, a)


class _Lyapunov(Operation):
    """X with PX + XP = C; self-adjoint in C. λ and V are the eigenvalues and eigenvectors of P."""

    forward_twice = "exp_map"

    @staticmethod
    def forward(p: Tensor, c: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
        sums = values.unsqueeze(-1) + values.unsqueeze(-2)
        return vectors @ ((vectors.mH @ c @ vectors) / sums) @ vectors.mH

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> Sequence[Any]:
        p, _, *factors = inputs
        return p, outputs, *factors

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        p, x, *factors = saved
        y = apply(_Lyapunov, p, gradients[0], *factors)
        return -symmetrize(y @ x.mH + x.mH @ y) if needed[0] else None, y

    @staticmethod
    def tangent(saved: Sequence[Any], dp: Tensor | None, dc: Tensor | None, *_: None) -> Tensor:
        p, x, *factors = saved
        right = torch.zeros_like(x) if dc is None else dc
        if dp is not None:
            right = right - dp @ x - x @ dp
        return apply(_Lyapunov, p, right, *factors)


def lyapunov(p: Tensor, c: Tensor) -> Tensor:
    """X with PX + XP = C for a positive definite P, differentiable to every order."""
    return apply(_Lyapunov, p, c, *batched_eigh(p.detach()))


class Geometry(Protocol):
    """What a metric answers; ``wanted`` says whether values are checked."""

    def squared_distance(self, a: Tensor, b: Tensor, wanted: bool) -> Tensor:
        """d²(A, B)."""

    def geodesic(self, a: Tensor, b: Tensor, t: float | Tensor, wanted: bool) -> Tensor:
        """The point at t of the way from A to B."""

    def exp_map(self, p: Tensor, v: Tensor, wanted: bool) -> Tensor:
        """Where the geodesic from P with the velocity V arrives at time 1."""

    def log_map(self, p: Tensor, q: Tensor, wanted: bool) -> Tensor:
        """The velocity at P of the geodesic that arrives at Q at time 1."""


class _AffineInvariant:
    def squared_distance(self, a: Tensor, b: Tensor, wanted: bool) -> Tensor:
        return _squared(Reduced.of(b, a, wanted, "a").function("log", None, wanted))

    def geodesic(self, a: Tensor, b: Tensor, t: float | Tensor, wanted: bool) -> Tensor:
        return function_of_pencil(b, a, "power", t, wanted, "a")

    def exp_map(self, p: Tensor, v: Tensor, wanted: bool) -> Tensor:
        return function_of_pencil(v, p, "exp", None, wanted, "p")

    def log_map(self, p: Tensor, q: Tensor, wanted: bool) -> Tensor:
        return function_of_pencil(q, p, "log", None, wanted, "p")


def _scale(t: float | Tensor) -> float | Tensor:
    return t[..., None, None] if isinstance(t, Tensor) else t


def _unit(a: Tensor) -> Tensor:
    """A power of two of the size of A ``(*batch, 1, 1)``: logarithms of what it divides are small, and keep digits."""
    size = a.detach().abs().sum((-2, -1), keepdim=True)
    return torch.where(size > 0, size, 1).log2().round().exp2()


def _check_exponent(a: Tensor) -> None:
    """Raise where the exponential of A has an eigenvalue of zero in floating point."""
    if a.numel() and float(a.abs().max()) > _LOWEST and float(low := torch.linalg.eigvalsh(a).min()) < -_LOWEST:
        raise NumericalError(
            f"v leads to a matrix with an eigenvalue of exp({float(low):.3g}) times the size of p, which is zero in "
            f"floating point. Scale v down."
        )


class _LogEuclidean:
    """Logarithms are taken of matrices over a common unit, which the metric does not see."""

    def squared_distance(self, a: Tensor, b: Tensor, wanted: bool) -> Tensor:
        unit = _unit(a)
        return _squared(of_matrix(a / unit, "log", wanted) - of_matrix(b / unit, "log", wanted))

    def geodesic(self, a: Tensor, b: Tensor, t: float | Tensor, wanted: bool) -> Tensor:
        unit = _unit(a)
        start, end = of_matrix(a / unit, "log", wanted), of_matrix(b / unit, "log", wanted)
        return unit * of_matrix(start + _scale(t) * (end - start), "exp", wanted)

    def exp_map(self, p: Tensor, v: Tensor, wanted: bool) -> Tensor:
        unit = _unit(p)
        exponent = of_matrix(p / unit, "log", wanted) + _derivative(p / unit, v / unit, "log")
        if wanted and values_checkable(exponent):
            _check_exponent(exponent.detach())
        return unit * of_matrix(exponent, "exp", wanted)

    def log_map(self, p: Tensor, q: Tensor, wanted: bool) -> Tensor:
        unit = _unit(p)
        start = of_matrix(p / unit, "log", wanted)
        return unit * symmetrize(_derivative(start, of_matrix(q / unit, "log", wanted) - start, "exp"))


class _BuresWasserstein:
    def transport(self, a: Tensor, b: Tensor, wanted: bool) -> Tensor:
        """T = Tᵀ > 0 with TAT = B."""
        pencil = Reduced.of(b, a, wanted, "a", inverse=True)
        half = torch.linalg.solve_triangular(pencil.lower.mH, pencil.function("sqrt", None, wanted), upper=True)
        inside = torch.linalg.solve_triangular(pencil.lower.mH, half.mH, upper=True)
        return symmetrize(pencil.v @ inside @ pencil.v.mH)

    def squared_distance(self, a: Tensor, b: Tensor, wanted: bool) -> Tensor:
        # ‖L_A − L_B U‖² with the best orthogonal U: the traces of the usual formula cancel where A and B are close.
        one, other = definite_factor(a, wanted, "a"), definite_factor(b, wanted, "b")
        turn = orthogonal_factor(other.mH @ one, False, a.dtype, False, "polar factor")
        return _squared(one - other @ turn)

    def geodesic(self, a: Tensor, b: Tensor, t: float | Tensor, wanted: bool) -> Tensor:
        # ((1 − t)I + tT)A((1 − t)I + tT) without the product TAT, which is B
        t, moved = _scale(t), self.transport(a, b, wanted) @ a
        return (1 - t) ** 2 * a + t**2 * b + t * (1 - t) * (moved + moved.mH)

    def exp_map(self, p: Tensor, v: Tensor, wanted: bool) -> Tensor:
        definite_factor(p, wanted, "p")
        way = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device) + lyapunov(p, v)
        if wanted:
            what = "I + X with PX + XP = V, beyond which v leaves the positive definite matrices,"
            definite_factor(way, wanted, what)
        return symmetrize(way @ p @ way)

    def log_map(self, p: Tensor, q: Tensor, wanted: bool) -> Tensor:
        moved = self.transport(p, q, wanted) @ p - p
        return moved + moved.mH


METRICS: dict[Metric, Geometry] = {
    "affine_invariant": _AffineInvariant(),
    "log_euclidean": _LogEuclidean(),
    "bures_wasserstein": _BuresWasserstein(),
}
