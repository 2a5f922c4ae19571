"""The three metrics as classes with the same methods, on matrices in the dtype of the computation.

Maps whose result is not positive definite return NaN. With the Cholesky factor A = LLᵀ the affine-invariant
formulas are functions of L⁻¹BL⁻ᵀ and the Bures–Wasserstein transport is a function of LᵀBL, each in coordinates in
which it is diagonal. For complex matrices, ᵀ is the conjugate transpose.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from matbackprop._torch import is_differentiated
from matbackprop.checks import check_option, nan_where
from matbackprop.divided_differences import named_function, resolve_function
from matbackprop.functional._function import with_derivatives_of
from matbackprop.functional._generalized_eigh import (
    Reduced,
    definite_factor,
    descending,
    diagonal_spectrum,
    permuted,
    spectrum_of_pencil,
    with_rows,
)
from matbackprop.functional._matrix_function import of_known_spectrum
from matbackprop.functional._polar import polar_factors
from matbackprop.functional._spectrum import Spectrum, spectral
from matbackprop.functional._sylvester import lyapunov_by_spectrum
from matbackprop.numerics import eye_like, inner, real_dtype, symmetrize
from matbackprop.refinement import refinement_needed
from matbackprop.solvers import batched_eigh

_LOWEST = -300.0  # exponents below this count as zero
_MOST_SPREAD = 1e4  # of the pivots of two Cholesky factors, up to which their polar factor has accurate derivatives
Metric = Literal["affine_invariant", "log_euclidean", "bures_wasserstein"]


def of_matrix(a: Tensor, function: str, spectrum: Spectrum | None = None) -> Tensor:
    """A function of exactly symmetric matrices; NaN outside its domain."""
    return of_known_spectrum(a, spectrum or Spectrum(*batched_eigh(a.detach())), resolve_function(function))


def spectrum_of(a: Tensor) -> Spectrum:
    """The spectrum of positive definite matrices, accurate for channels in different units."""
    order = descending(a)
    values, vectors = spectrum_of_pencil(permuted(a.detach(), order))
    return Spectrum(values, with_rows(vectors, order.argsort(-1)))


def _squared(a: Tensor) -> Tensor:
    return inner(a, a)


def _size(a: Tensor) -> Tensor:
    return a.detach().abs().sum((-2, -1), keepdim=True)


def _spread(lower: Tensor) -> Tensor:
    """The ratio of the largest and smallest pivot of a Cholesky factor."""
    if lower.shape[-1] == 0:
        return lower.real.sum((-2, -1))
    low, high = lower.detach().diagonal(dim1=-2, dim2=-1).real.aminmax(dim=-1)
    return high / low


def _derivative(a: Tensor, e: Tensor, function: str) -> Tensor:
    return spectral(a, Spectrum(*batched_eigh(a.detach())), named_function(function), None, e)


class _AffineInvariant:
    def _function(self, a: Tensor, b: Tensor, function: str, t: float | Tensor | None = None) -> Tensor:
        return Reduced.of(a, b, descending(b, a)).transformed(resolve_function(function, t))

    def squared_distance(self, a: Tensor, b: Tensor) -> Tensor:
        return _squared(Reduced.of(b, a, descending(a, b)).function(resolve_function("log")))

    def geodesic(self, a: Tensor, b: Tensor, t: float | Tensor) -> Tensor:
        return self._function(b, a, "power", t)

    def exp_map(self, p: Tensor, v: Tensor) -> Tensor:
        return Reduced.of(v, p, descending(p)).transformed(resolve_function("exp"))

    def log_map(self, p: Tensor, q: Tensor) -> Tensor:
        return self._function(q, p, "log")


class Coordinates(NamedTuple):
    """The size, the eigenvalues and the eigenvectors U of a matrix A, as constants.

    The log-Euclidean metric is invariant to scale and rotation. Near A the derivatives of log and exp cancel, which
    loses all digits of small eigenvalues unless A is exactly diagonal.
    """

    unit: Tensor  # a power of two near the size of A
    base: Tensor  # A divided by the unit
    values: Tensor
    u: Tensor

    @classmethod
    def of(cls, a: Tensor) -> Coordinates:
        size = _size(a)
        unit = torch.where(size > 0, size, 1).log2().round().exp2()
        base = a.detach() / unit
        return cls(unit, base, *spectrum_of(base)[:2])

    def inside(self, b: Tensor) -> Tensor:
        """Uᵀ(B/unit)U, which is exactly diagonal at B = A."""
        b = b / self.unit
        near = _size(self.base) <= 2 * _size(b)  # otherwise B − A would lose the digits of B
        diagonal = torch.diag_embed(self.values).to(b.dtype)
        moved = self.u.mH @ (b - torch.where(near, self.base, 0)) @ self.u
        return symmetrize(torch.where(near, diagonal, 0) + moved)

    def outside(self, x: Tensor) -> Tensor:
        return self.unit * symmetrize(self.u @ x @ self.u.mH)

    def log(self, b: Tensor) -> Tensor:
        b = self.inside(b)
        return of_matrix(b, "log", spectrum_of(b))

    def log_of_base(self, a: Tensor) -> Tensor:
        """`log` of A itself, which is diagonal."""
        a = self.inside(a)
        return of_matrix(a, "log", diagonal_spectrum(self.values, a))


class _LogEuclidean:
    def squared_distance(self, a: Tensor, b: Tensor) -> Tensor:
        at = Coordinates.of(a)
        return _squared(at.log_of_base(a) - at.log(b))

    def geodesic(self, a: Tensor, b: Tensor, t: float | Tensor) -> Tensor:
        t = torch.as_tensor(t, dtype=real_dtype(a.dtype), device=a.device)[..., None, None]
        swap = t.detach() > 0.5  # start from the closer end
        a, b, t = torch.where(swap, b, a), torch.where(swap, a, b), torch.where(swap, 1 - t, t)
        at = Coordinates.of(a)
        start, end = at.log_of_base(a), at.log(b)
        return at.outside(of_matrix(start + t * (end - start), "exp"))

    def exp_map(self, p: Tensor, v: Tensor) -> Tensor:
        at = Coordinates.of(p)
        exponent = at.log_of_base(p) + _derivative(at.inside(p), at.u.mH @ (v / at.unit) @ at.u, "log")
        values, vectors = batched_eigh(exponent.detach())
        end = spectral(exponent, Spectrum(values, vectors), named_function("exp"))
        return at.outside(nan_where((values < _LOWEST).any(-1), end))

    def log_map(self, p: Tensor, q: Tensor) -> Tensor:
        at = Coordinates.of(p)
        start = at.log_of_base(p)
        return at.outside(_derivative(start, at.log(q) - start, "exp"))


class _BuresWasserstein:
    def _root(self, a: Tensor, b: Tensor) -> tuple[Tensor, Reduced]:
        """The square root of LᵀBL with A = LLᵀ, in the coordinates of a pencil."""
        pencil = Reduced.of(b, a, descending(a), inverse=True)
        return pencil.function(resolve_function("sqrt")), pencil

    def _moved(self, a: Tensor, b: Tensor) -> tuple[Tensor, Reduced]:
        """TA = (BA)^½, where T = Tᵀ > 0 and TAT = B. The terms of the derivative of a product T · A would cancel."""
        root, pencil = self._root(a, b)
        half = torch.linalg.solve_triangular(pencil.lower.mH, root, upper=True)
        return pencil.v @ half @ pencil.lower.mH @ pencil.w.mH, pencil

    def squared_distance(self, a: Tensor, b: Tensor) -> Tensor:
        # ‖L_A − L_B U‖² with the best orthogonal U, because the traces of the usual formula cancel for close matrices.
        one, other = definite_factor(a), definite_factor(b)
        q, _ = polar_factors(other.mH @ one, False, a.dtype, None, "polar factor")
        value = _squared(one - other @ q)
        wide = _spread(one) * _spread(other) > _MOST_SPREAD
        if not refinement_needed(wide):
            return value
        # The polar factor has the rounding error of the largest entry, and derivatives multiply it by the inverses.
        traces = [t.diagonal(dim1=-2, dim2=-1).real.sum(-1) for t in (a, b, self._root(a, b)[0])]
        formula = traces[0] + traces[1] - 2 * traces[2]
        out = torch.where(wide, with_derivatives_of(formula, value), value)
        if is_differentiated(a) or is_differentiated(b):  # derivatives that are not resolved must be an error
            out = nan_where(wide & formula.isnan(), out)
        return out

    def geodesic(self, a: Tensor, b: Tensor, t: float | Tensor) -> Tensor:
        # ((1 − t)I + tT)A((1 − t)I + tT) without the product TAT, which is B
        moved, pencil = self._moved(a, b)
        t = torch.as_tensor(t, dtype=real_dtype(a.dtype), device=a.device)[..., None, None]
        # congruent to (1 − t)I + tT
        way = (1 - t) * pencil.w.mH @ pencil.w + t * torch.diag_embed(pencil.values.sqrt())
        left = ((t < 0) | (t > 1)).squeeze((-2, -1)) & (torch.linalg.cholesky_ex(way.detach()).info != 0)
        return nan_where(left, (1 - t) ** 2 * a + t**2 * b + t * (1 - t) * (moved + moved.mH))

    def exp_map(self, p: Tensor, v: Tensor) -> Tensor:
        way = eye_like(p) + lyapunov_by_spectrum(p, v, spectrum_of(p))
        inside = torch.linalg.cholesky_ex(way.detach()).info == 0
        return nan_where(~inside, symmetrize(way @ p @ way))

    def log_map(self, p: Tensor, q: Tensor) -> Tensor:
        moved = self._moved(p, q)[0] - p
        return moved + moved.mH


Geometry = _AffineInvariant | _LogEuclidean | _BuresWasserstein
_METRICS: dict[Metric, Geometry] = {
    "affine_invariant": _AffineInvariant(),
    "log_euclidean": _LogEuclidean(),
    "bures_wasserstein": _BuresWasserstein(),
}


def geometry(metric: Metric) -> Geometry:
    check_option(metric, get_args(Metric), "metric")
    return _METRICS[metric]
