"""The mean of positive definite matrices, differentiated through what it minimises and not through the iterations.

M minimises Σ wᵢd²(M, Aᵢ), so that the gradient G(M, A, w) of that sum vanishes. Hence dM = −H⁻¹ ∂G, with H = ∂G/∂M
symmetric and positive definite: conjugate gradients solve with it, given its products, which are derivatives of G.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from matbackprop.checks import check_finite, check_weight_values
from matbackprop.errors import DomainError, ShapeError, SolverError
from matbackprop.functional._function import Operation, apply
from matbackprop.functional._generalized_eigh import congruent, definite_factor, spectrum_of_pencil
from matbackprop.functional._linear_solve import check_iterations, conjugate_gradient_solve, pull_back, push_forward
from matbackprop.numerics import autocast_off, is_double, real_dtype, symmetrize
from matbackprop.spd._functions import prepare
from matbackprop.spd._metrics import METRICS, Metric, check_metric, of_matrix

__all__ = ["mean"]


def _affine_gradient(m: Tensor, points: Tensor, weight: Tensor) -> Tensor:
    """−Σ wᵢ L⁻ᵀ log(L⁻¹AᵢL⁻ᵀ) L⁻¹ with M = LLᵀ: half of the gradient of Σ wᵢd²(M, Aᵢ)."""
    lower = definite_factor(symmetrize(m), False, "a").unsqueeze(-3)
    logs = _weighted(of_matrix(congruent(lower, points), "log", False), weight)
    half = torch.linalg.solve_triangular(lower.squeeze(-3).mH, logs, upper=True)
    return -symmetrize(torch.linalg.solve_triangular(lower.squeeze(-3).mH, half.mH, upper=True))


def _bures_gradient(m: Tensor, points: Tensor, weight: Tensor) -> Tensor:
    """I − Σ wᵢTᵢ with TᵢMTᵢ = Aᵢ."""
    maps: Tensor = METRICS["bures_wasserstein"].transport(symmetrize(m).unsqueeze(-3), points, False)  # type: ignore[attr-defined]
    return torch.eye(m.shape[-1], dtype=m.dtype, device=m.device) - _weighted(maps, weight)


def _weighted(points: Tensor, weight: Tensor) -> Tensor:
    return (weight[..., None, None] * points).sum(-3)


def _as_vector(m: Tensor) -> Tensor:
    """Real numbers ``(*batch, n² or 2n²)``, with the inner product of matrices."""
    return (torch.view_as_real(m).flatten(-3) if m.is_complex() else m.flatten(-2)).contiguous()


def _as_matrix(x: Tensor, like: Tensor) -> Tensor:
    n = like.shape[-1]
    return torch.view_as_complex(x.unflatten(-1, (n, n, 2))) if like.is_complex() else x.unflatten(-1, (n, n))


class _Minimiser(Operation):
    """M, given it as a constant, with G(M, θ) = 0."""

    forward_twice = "mean"
    widen = False

    @staticmethod
    def forward(gradient: Any, tolerance: float, minimum: Tensor, *params: Tensor) -> Tensor:
        return minimum.clone()

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> Sequence[Any]:
        gradient, tolerance, _, *params = inputs
        return gradient, tolerance, outputs, *params

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        gradient, tolerance, m, *params = saved
        y = _solve(gradient, tolerance, m, params, gradients[0])
        return None, None, None, *pull_back(gradient, m, params, needed[3:], -y)

    @staticmethod
    def tangent(saved: Sequence[Any], *directions: Tensor | None) -> Tensor:
        gradient, tolerance, m, *params = saved
        return -_solve(gradient, tolerance, m, params, push_forward(gradient, m, params, directions[3:]))


def _solve(gradient: Any, tolerance: float, m: Tensor, params: Sequence[Tensor], b: Tensor) -> Tensor:
    """H⁻¹B with H = ∂G/∂M, which is symmetric."""

    def product(x: Tensor, m: Tensor, *params: Tensor) -> Tensor:
        pull: Any = torch.func.vjp(lambda moved: gradient(moved, *params), m)[1]
        return _as_vector(symmetrize(pull(_as_matrix(x, m))[0]))

    y = conjugate_gradient_solve(
        product,
        _as_vector(symmetrize(b)),
        (m, *params),
        tolerance=tolerance,
        precision=real_dtype(m.dtype),
        check=False,
    )
    return symmetrize(_as_matrix(y, m))


def _iterate(
    step: Callable[[Tensor], tuple[Tensor, Tensor]], m: Tensor, tolerance: float, max_iterations: int
) -> Tensor:
    """Repeat M ↦ (next M, size of what is left) until that is small."""
    left = torch.full_like(m.real[..., 0, 0], torch.inf)
    for _ in range(max_iterations):
        m, left = step(m)
        if bool((left <= tolerance).all()):
            return m
        if bool(left.isnan().any()):
            break
    raise SolverError(
        f"the mean did not converge in {max_iterations} iterations: {float(left.max()):.3g} is left, {tolerance:.3g} "
        f"was wanted. Raise max_iterations or tolerance, and look for matrices that are nearly singular."
    )


def _affine_step(points: Tensor, weight: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A gradient step of the best length for the spectra at hand (Bini and Iannazzo)."""

    def step(m: Tensor) -> tuple[Tensor, Tensor]:
        lower = definite_factor(m, False, "a")
        values, vectors = spectrum_of_pencil(points, lower.unsqueeze(-3))
        logs = _weighted((vectors * values.log().unsqueeze(-2)) @ vectors.mH, weight)
        spread = values[..., -1] / values[..., 0]
        bend = torch.where(spread > 1 + 1e-6, 0.5 * spread.log() * (spread + 1) / (spread - 1).clamp_min(1e-6), 1)
        length = 2 / (1 + (weight * bend).sum(-1))
        turned = of_matrix(length[..., None, None] * symmetrize(logs), "exp", False)
        return symmetrize(lower @ turned @ lower.mH), torch.linalg.matrix_norm(logs)

    return step


def _bures_step(points: Tensor, weight: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """M ↦ SMS with S the mean of the transport maps (Álvarez-Esteban and others).

    What is left, I − S, carries the rounding of maps that may be large; nothing is left where M no longer moves.
    """

    def step(m: Tensor) -> tuple[Tensor, Tensor]:
        left = _bures_gradient(m, points, weight)
        way = torch.eye(m.shape[-1], dtype=m.dtype, device=m.device) - left
        new = symmetrize(way @ m @ way)
        moved = torch.linalg.matrix_norm(new - m) / torch.linalg.matrix_norm(m)
        still = moved <= 4 * m.shape[-1] * torch.finfo(m.dtype).eps
        return new, torch.where(still, 0, torch.linalg.matrix_norm(left))

    return step


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
        a: positive definite matrices ``(*batch, m, n, n)``; the mean is over m.
        weight: w ≥ 0 ``(*batch, m)``, divided by its sum; equal if None.
        metric: of d. ``"log_euclidean"`` has the closed form :math:`\exp(\sum_i w_i\log A_i)`, the others are found by
            iteration, which reads the device once per step.
        tolerance: size of the gradient to stop at, and relative residual of the adjoint's system; 1e-11 by default, or
            1e-5 for a computation in float32.
        max_iterations: before giving up.
        check, precision: as in `distance`.

    Returns:
        ``(*batch, n, n)`` in the dtype of ``a``.

    Raises:
        SolverError: no convergence.
        DomainError: weights that are negative or all zero; the other errors are those of `distance`.

    Gradient:
        In matrices and weights, through the converged mean: H⁻¹ by conjugate gradients. Two orders and forward mode,
        exact where eigenvalues coincide.

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> spd.mean(torch.stack([torch.eye(2), 4 * torch.eye(2)])).diagonal().round(decimals=4)
        tensor([2., 2.])

    Reference:
        Bini and Iannazzo, Computing the Karcher mean of symmetric positive definite matrices, 2013; Álvarez-Esteban,
        del Barrio, Cuesta-Albertos, Matrán, A fixed-point approach to barycenters in Wasserstein space, 2016.
    """
    check_metric(metric)
    check_iterations(tolerance, max_iterations)
    (x,), wanted = prepare(check, precision, a=a)
    tolerance = (1e-11 if is_double(x.dtype) else 1e-5) if tolerance is None else tolerance
    if a.ndim < 3 or a.shape[-3] == 0:
        raise ShapeError(f"a must be (*batch, m, n, n) with m ≥ 1 matrices to take the mean of, got {tuple(a.shape)}.")
    with autocast_off(a.device.type):
        w = torch.ones_like(x.real[..., 0, 0]) if weight is None else weight.to(real_dtype(x.dtype))
        if w.shape != x.shape[:-2]:
            raise ShapeError(f"weight must be {tuple(x.shape[:-2])}, one per matrix, got {tuple(w.shape)}.")
        if wanted:
            definite_factor(x, True, "a")
            if weight is not None:
                check_finite(weight, "weight")
                check_weight_values(weight)
                if bool((weight.detach().sum(-1) == 0).any()):
                    raise DomainError("weights must not all be zero.")
        w = w / w.sum(-1, keepdim=True)
        closed = metric == "log_euclidean" or x.numel() == 0 or x.is_meta  # of which shapes are all there is
        logs = _weighted(of_matrix(x if closed else x.detach(), "log", wanted), w)
        start = of_matrix(logs, "exp", False)
        if closed:
            return start.to(a.dtype)
        with torch.no_grad():
            fixed, share = x.detach(), w.detach()
            make = _affine_step if metric == "affine_invariant" else _bures_step
            minimum = _iterate(make(fixed, share), start.detach(), tolerance, max_iterations)
        if metric == "bures_wasserstein":
            return apply(_Minimiser, _bures_gradient, tolerance, minimum, x, w).to(a.dtype)
        # The metric does not see congruences: around the identity its Hessian has eigenvalues from 1 on.
        lower = definite_factor(minimum, False, "a")
        around = congruent(lower.unsqueeze(-3), x)
        eye = torch.eye(a.shape[-1], dtype=x.dtype, device=x.device).expand_as(minimum)
        middle = apply(_Minimiser, _affine_gradient, tolerance, eye, around, w)
        return symmetrize(lower @ middle @ lower.mH).to(a.dtype)
