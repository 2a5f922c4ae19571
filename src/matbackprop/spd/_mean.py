"""Mean of positive definite matrices with implicit differentiation.

M minimizes Σ wᵢd²(M, Aᵢ), and the gradient G(M, A, w) of this sum is zero at M. Hence dM = −H⁻¹ ∂G, where H = ∂G/∂M is
symmetric and positive definite. Systems with H are solved by conjugate gradients; products with H are derivatives of G.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop._torch import is_batched
from matbackprop.checks import check_weight_totals, nan_where
from matbackprop.divided_differences import Given, SpectralFunction, resolve_function
from matbackprop.errors import DomainError, ShapeError, SolverError
from matbackprop.functional._function import Operation, apply
from matbackprop.functional._generalized_eigh import (
    Reduced,
    congruent,
    definite_factor,
    descending,
    permuted,
    spectrum_of_pencil,
)
from matbackprop.functional._linear_solve import pull_back, push_forward, solve_by_products
from matbackprop.numerics import autocast_off, is_double, real_dtype, symmetrize
from matbackprop.solvers import batched_eigh
from matbackprop.spd._definite import prepare_definite
from matbackprop.spd._metrics import Coordinates, Metric, geometry, of_matrix


def _weighted(points: Tensor, weight: Tensor) -> Tensor:
    return (weight[..., None, None] * points).sum(-3)


def _log_euclidean_mean(points: Tensor, weight: Tensor) -> Tensor:
    """exp(Σ wᵢ log Aᵢ) in the coordinates of the matrix of largest weight."""
    index = weight.detach().argmax(-1)[..., None, None, None].expand(*weight.shape[:-1], 1, *points.shape[-2:])
    at = Coordinates.of(points.gather(-3, index))
    return at.outside(of_matrix(_weighted(at.log(points), weight).unsqueeze(-3), "exp")).squeeze(-3)


class _Frame(NamedTuple):
    """The pencils of all points and a matrix M = LLᵀ, as constants."""

    lower: Tensor
    values: Tensor
    u: Tensor

    @classmethod
    def of(cls, m: Tensor, points: Tensor, inverse: bool) -> _Frame:
        lower = definite_factor(m)
        return cls(lower, *spectrum_of_pencil(points, lower.unsqueeze(-3), inverse))

    def mean_of(self, values: Tensor, weight: Tensor) -> Tensor:
        """Σ wᵢ Uᵢ diag(valuesᵢ) Uᵢᵀ."""
        return symmetrize(_weighted((self.u * values.unsqueeze(-2)) @ self.u.mH, weight))


class _Mean:
    """The gradient G of half of Σ wᵢd²(M, Aᵢ) is a constant minus Σ wᵢ L⁻ᵀ Kᵢ L⁻¹."""

    inverse: bool
    function: tuple[SpectralFunction, Given]

    def gradient(self, x: Tensor, points: Tensor, weight: Tensor, *constants: Tensor) -> Tensor:
        """S∘(BᵀGB) at M + B(S∘X)Bᵀ without the constant of G, given the pencils of M and the points, and Z = BᵀV."""
        values, v, w, z, scale = constants
        moved = symmetrize(z.mH @ (scale * x).unsqueeze(-3) @ z)
        pencil = Reduced.at(points, moved, values, v, w, self.inverse)
        half = torch.linalg.solve_triangular(pencil.lower.mH, pencil.function(self.function), upper=True)
        inside = torch.linalg.solve_triangular(pencil.lower.mH, half.mH, upper=True)
        return -scale * symmetrize(_weighted(z @ inside @ z.mH, weight))


class _AffineMean(_Mean):
    """K = log(L⁻¹AL⁻ᵀ); the constant is zero."""

    inverse, function = False, resolve_function("log")

    def step(self, frame: _Frame, weight: Tensor) -> Tensor:
        """Take a gradient step of optimal length for these spectra (Bini and Iannazzo)."""
        spread = frame.values[..., -1] / frame.values[..., 0]
        bend = torch.where(spread > 1 + 1e-6, 0.5 * spread.log() * (spread + 1) / (spread - 1).clamp_min(1e-6), 1)
        length = 2 / (1 + (weight * bend).sum(-1))
        moved = of_matrix(length[..., None, None] * frame.mean_of(frame.values.log(), weight), "exp")
        return symmetrize(frame.lower @ moved @ frame.lower.mH)

    def basis(self, m: Tensor, frame: _Frame, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """In this basis the eigenvalues of the Hessian are at least 1."""
        return frame.lower, frame.u, torch.ones_like(m.real)


class _BuresMean(_Mean):
    """K = (LᵀAL)^½; L⁻ᵀKL⁻¹ is the transport T with TMT = A, and the constant is I."""

    inverse, function = True, resolve_function("sqrt")

    def step(self, frame: _Frame, weight: Tensor) -> Tensor:
        """M ↦ SMS with S the mean of the transport maps (Álvarez-Esteban and others)."""
        half = torch.linalg.solve_triangular(frame.lower.mH, frame.mean_of(frame.values.sqrt(), weight), upper=True)
        return symmetrize(half @ half.mH)

    def basis(self, m: Tensor, frame: _Frame, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """In the eigenvectors of M, entries over √(λᵢ + λⱼ): the Hessian is then the identity if all Aᵢ are M."""
        values, vectors = batched_eigh(m)
        return vectors, vectors.mH.unsqueeze(-3) @ v, (values.unsqueeze(-1) + values.unsqueeze(-2)).sqrt()


_MEANS: dict[str, _AffineMean | _BuresMean] = {"affine_invariant": _AffineMean(), "bures_wasserstein": _BuresMean()}


def _as_vector(m: Tensor) -> Tensor:
    """Real numbers ``(*batch, n² or 2n²)``, with the inner product of matrices."""
    return (torch.view_as_real(m).flatten(-3) if m.is_complex() else m.flatten(-2)).contiguous()


def _as_matrix(x: Tensor, like: Tensor) -> Tensor:
    n = like.shape[-1]
    return torch.view_as_complex(x.unflatten(-1, (n, n, 2))) if like.is_complex() else x.unflatten(-1, (n, n))


class _Saved(NamedTuple):
    gradient: Any  # G(X, θ)
    tolerance: float
    x: Tensor
    params: tuple[Tensor, ...]

    def solve(self, b: Tensor) -> Tensor:
        """H⁻¹B with H = ∂G/∂X, which is symmetric."""

        def product(y: Tensor, x: Tensor, *params: Tensor) -> Tensor:
            pull: Any = torch.func.vjp(lambda moved: self.gradient(moved, *params), x)[1]
            return _as_vector(symmetrize(pull(_as_matrix(y, x))[0]))

        right = _as_vector(symmetrize(b))
        y = solve_by_products(product, right, (self.x, *self.params), self.tolerance, 10 * right.shape[-1])
        return symmetrize(_as_matrix(y, self.x))


class _Minimizer(Operation):
    """X = 0, with G(X, θ) = 0."""

    forward_twice = "mean"
    widen = False

    @staticmethod
    def forward(gradient: Any, tolerance: float, zero: Tensor, *params: Tensor) -> Tensor:
        return zero.clone()

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> _Saved:
        return _Saved(inputs[0], inputs[1], outputs, inputs[3:])

    @staticmethod
    def adjoint(saved: _Saved, needed: Sequence[bool], g: Tensor) -> Any:
        y = saved.solve(g)
        return None, None, None, *pull_back(saved.gradient, saved.x, saved.params, needed[3:], -y)

    @staticmethod
    def tangent(saved: _Saved, *directions: Tensor | None) -> Tensor:
        return -saved.solve(push_forward(saved.gradient, saved.x, saved.params, directions[3:]))


def _iterate(
    kind: _AffineMean | _BuresMean, m: Tensor, points: Tensor, weight: Tensor, tolerance: float, max_iterations: int
) -> Tensor:
    """Repeat steps until L⁻¹ΔL⁻ᵀ is small, or all entries mᵢⱼ move by rounding errors of √(mᵢᵢmⱼⱼ) only."""
    rounding = 4 * m.shape[-1] * torch.finfo(m.dtype).eps
    change = moved = torch.full_like(m.real[..., 0, 0], torch.inf)
    for _ in range(max_iterations):
        frame = _Frame.of(m, points, kind.inverse)
        new = kind.step(frame, weight)
        change = torch.linalg.matrix_norm(congruent(frame.lower, new - m))
        size = m.diagonal(dim1=-2, dim2=-1).real.sqrt()
        last, moved = moved, ((new - m).abs() / (size.unsqueeze(-1) * size.unsqueeze(-2))).amax((-2, -1))
        m = new
        stagnates = (moved <= tolerance) & (moved >= last)
        if bool(((change <= tolerance) | (moved <= rounding) | stagnates).all()):
            return m
        if bool(change.isnan().any()):
            break
    raise SolverError(
        f"The mean did not converge in {max_iterations} iterations: the last step changed it by "
        f"{float(change.max()):.3g}, the tolerance is {tolerance:.3g}. Raise max_iterations or tolerance, or remove "
        f"nearly singular matrices."
    )


def mean(
    a: Tensor,
    weight: Tensor | None = None,
    *,
    metric: Metric = "affine_invariant",
    tolerance: float | None = None,
    max_iterations: int = 300,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Mean of positive definite matrices, :math:`\operatorname*{argmin}_M \sum_i w_i d^2(M, A_i)`.

    Args:
        a: positive definite matrices ``(*batch, m, n, n)``, averaged over m.
        weight: nonnegative weights ``(*batch, m)``, normalized to sum 1; equal weights if None.
        metric: name of the metric. ``"log_euclidean"`` has the closed form :math:`\exp(\sum_i w_i\log A_i)`. Other
            metrics iterate and synchronize with the device once per step.
        tolerance: relative change of the mean at which to stop, and relative residual of the adjoint system. 1e-11 by
            default, 1e-5 for ``precision=torch.float32``. Changes within rounding error also stop the iteration.
        max_iterations: maximum number of steps.
        check, precision: as in `distance`.

    Returns:
        ``(*batch, n, n)`` in the dtype of ``a``.

    Raises:
        SolverError: no convergence.
        DomainError: a weight is negative, or all weights are zero.

    Gradient:
        Implicit differentiation with respect to matrices and weights; the adjoint system is solved by conjugate
        gradients. First and second order and forward mode, exact at repeated eigenvalues.

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> spd.mean(torch.stack([torch.eye(2), 4 * torch.eye(2)])).diagonal().round(decimals=4)
        tensor([2., 2.])

    Reference:
        Bini and Iannazzo, Computing the Karcher mean of symmetric positive definite matrices, 2013; Álvarez-Esteban,
        del Barrio, Cuesta-Albertos, Matrán, A fixed-point approach to barycenters in Wasserstein space, 2016.
    """
    geometry(metric)
    if tolerance is not None and not 0 < tolerance < 1:
        raise DomainError(f"tolerance must be in (0, 1) or be None, got {tolerance}.")
    if max_iterations < 0:
        raise DomainError(f"max_iterations must not be negative, got {max_iterations}.")
    given = prepare_definite({"a": a}, check, precision, others=(weight,))
    (x,) = given.matrices
    if a.ndim < 3 or a.shape[-3] == 0:
        raise ShapeError(f"a must be (*batch, m, n, n) with m ≥ 1, got shape {tuple(a.shape)}. Stack the matrices.")
    tolerance = (1e-11 if is_double(x.dtype) else 1e-5) if tolerance is None else tolerance
    with autocast_off(a.device.type):
        w = x.new_ones(x.shape[:-2], dtype=real_dtype(x.dtype)) if weight is None else weight.to(real_dtype(x.dtype))
        if w.shape != x.shape[:-2]:
            raise ShapeError(f"weight must have shape {tuple(x.shape[:-2])}, one per matrix, got {tuple(w.shape)}.")
        if metric != "log_euclidean" and (is_batched(x) or is_batched(w)):
            raise SolverError("The iteration for a mean depends on values. Replace vmap by leading dimensions.")
        if weight is not None and given.check_values:
            check_weight_totals(weight)
        bad = None if given.bad is None else given.bad.any(-1)
        if bad is not None:
            wrong = ~((w >= 0).all(-1) & w.isfinite().all(-1) & (w.sum(-1) > 0))
            bad, w = bad | wrong, torch.where(wrong.unsqueeze(-1), 1, nan_where(wrong, w))  # with gradients of NaN
        w = w / w.sum(-1, keepdim=True)
        given = given._replace(bad=bad)
        if metric == "log_euclidean" or x.numel() == 0 or x.is_meta:
            return given.result(_log_euclidean_mean(x, w), "The mean", "Scale the matrices.")
        kind = _MEANS[metric]
        order = descending(x.detach().mean(-3))
        x = permuted(x, order.unsqueeze(-2).expand(x.shape[:-1]))
        with torch.no_grad():
            fixed, fraction = x.detach(), w.detach()
            m = _iterate(kind, _log_euclidean_mean(fixed, fraction), fixed, fraction, tolerance, max_iterations)
            frame = _Frame.of(m, fixed, kind.inverse)
            lower = frame.lower.unsqueeze(-3)
            v, outer = torch.linalg.solve_triangular(lower.mH, frame.u, upper=True), lower @ frame.u
            basis, z, scale = kind.basis(m, frame, v)
        constants = (frame.values, v, outer, z, scale)
        moved = apply(_Minimizer, kind.gradient, tolerance, torch.zeros_like(m), x, w, *constants)
        if given.bad is not None:  # no adjoint system for undefined means
            moved = torch.where(given.bad[..., None, None], 0, moved)
        out = m + symmetrize(basis @ (scale * moved) @ basis.mH)
        return given.result(permuted(out, order.argsort(-1)), "The mean", "Scale the matrices.")
