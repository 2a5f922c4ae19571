"""Fréchet distance between Gaussians, given samples or covariances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from matbackprop._torch import differentiated_again
from matbackprop.checks import check_finite, check_matrix, check_size, nan_where, wants_check
from matbackprop.errors import OrderError, ShapeError
from matbackprop.functional._function import Operation, apply
from matbackprop.numerics import autocast_off, compute_dtype, eye_like, inner, symmetrize
from matbackprop.solvers import batched_eigh, batched_svd


class _Gradient(NamedTuple):
    g: Tensor
    silent: bool
    x: Tensor
    y: Tensor

    def refuse(self) -> None:
        if not self.silent:
            raise OrderError("frechet_distance has no second derivative. Detach its gradient.")


class _Once(Operation):
    """A gradient without derivatives: they raise an error, or are NaN if ``silent``."""

    @staticmethod
    def forward(g: Tensor, silent: bool, x: Tensor, y: Tensor) -> Tensor:
        return g.clone()

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> _Gradient:
        return _Gradient(*inputs)

    @staticmethod
    def adjoint(saved: _Gradient, needed: Sequence[bool], g: Tensor) -> Any:
        saved.refuse()
        bad = (g != 0).any(-1).any(-1)  # a gradient of zero belongs to a matrix that does not use this one
        return None, None, *(nan_where(bad, torch.zeros_like(x)) for x in (saved.x, saved.y))

    @staticmethod
    def tangent(saved: _Gradient, *_: Tensor | None) -> Tensor:
        saved.refuse()
        return torch.full_like(saved.g, torch.nan)


class _Saved(NamedTuple):
    x: Tensor
    y: Tensor
    value: Tensor
    grad_x: Tensor
    grad_y: Tensor
    silent: bool

    def gradients(self) -> list[Tensor]:
        return [apply(_Once, grad, self.silent, self.x, self.y) for grad in (self.grad_x, self.grad_y)]


class _Given(Operation):
    """A value with given gradients in X and Y."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, value: Tensor, grad_x: Tensor, grad_y: Tensor, silent: bool) -> Tensor:
        return value.clone()

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> _Saved:
        return _Saved(*inputs)

    @staticmethod
    def adjoint(saved: _Saved, needed: Sequence[bool], g: Tensor) -> tuple[Tensor, ...]:
        grads = saved.gradients() if differentiated_again() else [saved.grad_x, saved.grad_y]
        g = g[..., None, None]  # NaN derivatives of a gradient that is not used do not count
        return tuple(torch.where(g == 0, 0, g * grad) for grad in grads)

    @staticmethod
    def tangent(saved: _Saved, dx: Tensor | None, dy: Tensor | None, *_: None) -> Tensor:
        parts = [inner(grad, d) for grad, d in zip(saved.gradients(), (dx, dy), strict=True) if d is not None]
        return sum(parts[1:], parts[0]) if parts else torch.zeros_like(saved.value)


def semidefinite_factor(a: Tensor, tolerance: float) -> Tensor:
    """X with A = XXᴴ. With A scaled to a unit diagonal, eigenvalues up to the tolerance count as zero."""
    diagonal = a.diagonal(dim1=-2, dim2=-1).real
    unit = torch.where(diagonal > 0, diagonal, 1).sqrt().unsqueeze(-1)
    values, vectors = batched_eigh(symmetrize(a / unit / unit.mT))
    return unit * vectors * torch.where(values > tolerance, values, 0).sqrt().unsqueeze(-2)


def squared_bures_distance(a: Tensor, b: Tensor, tolerance: float) -> Tensor:
    """d² of positive semidefinite matrices by any factors A = XXᴴ, B = YYᴴ: min over unitary U of ‖X − YU‖².

    With YᴴX = PSQᴴ the gradient in A is I − YPS⁺PᴴYᴴ.
    """
    x, y = (semidefinite_factor(m.detach(), tolerance) for m in (a, b))
    p, s, qh = batched_svd(y.mH @ x)
    one, other = y @ p, x @ qh.mH
    value = inner(x - one @ qh, x - one @ qh)
    # Sᵢ is the inner product of columns of the two, and counts as zero if they are orthogonal to rounding.
    sizes = torch.linalg.vector_norm(one, dim=-2) * torch.linalg.vector_norm(other, dim=-2)
    floor = 4 * a.shape[-1] * torch.finfo(a.dtype).eps * s[..., :1]
    scale = torch.where((s > tolerance * sizes) & (s > floor), s, torch.inf).rsqrt().unsqueeze(-2)
    one, other = one * scale, other * scale
    return apply(_Given, a, b, value, eye_like(a) - one @ one.mH, eye_like(a) - other @ other.mH, True)


def frechet_distance(
    x: Tensor, y: Tensor, *, check: bool | None = None, precision: torch.dtype | None = None
) -> Tensor:
    r"""Squared Fréchet distance between the Gaussians fitted to two sets of samples, as in FID.

    .. math:: \|\mu - \nu\|^2 + \operatorname{tr}\bigl(A + B - 2(A^{1/2}BA^{1/2})^{1/2}\bigr)

    with the means and unbiased covariances of the samples. To avoid cancellation, the second term is computed as
    :math:`\min_U\|R_X - UR_Y\|_F^2` with triangular factors of the centered samples, without forming covariances.

    Args:
        x: samples ``(*batch, m, d)`` with m ≥ 2. m may be smaller than d.
        y: samples ``(*batch, k, d)`` with the same batch and k ≥ 2.
        check, precision: as in `distance`.

    Returns:
        ``(*batch,)`` in the dtype of ``x``.

    Gradient:
        :math:`2(X - U_rY)` for centered samples. :math:`U_r` is the polar factor of the cross product of X and Y,
        restricted to singular values above rounding error. It is always finite. First order and forward mode only.

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> x = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
        >>> spd.frechet_distance(x, x + torch.tensor([3.0, 4.0]))
        tensor(25.)

    Reference:
        Dowson and Landau, The Fréchet distance between multivariate normal distributions, 1982; Heusel et al., GANs
        trained by a two time-scale update rule, NeurIPS 2017.
    """
    for name, a in (("x", x), ("y", y)):
        check_matrix(a, name)
        if a.shape[-2] < 2:
            raise ShapeError(f"{name} must contain at least two samples (*batch, m, d), got shape {tuple(a.shape)}.")
    if x.shape[:-2] != y.shape[:-2] or x.shape[-1] != y.shape[-1]:
        raise ShapeError(f"x and y must have the same batch and dimension, got {tuple(x.shape)} and {tuple(y.shape)}.")
    dtype = compute_dtype(precision)
    if wants_check(check, x, y):
        for name, a in (("x", x), ("y", y)):
            check_finite(a, name)
            check_size(a, dtype, name, "large")
    with autocast_off(x.device.type):
        a, b = x.to(dtype), y.to(dtype)
        apart = (a.mean(-2) - b.mean(-2)).square().sum(-1)
        a, b = ((s - s.mean(-2, keepdim=True)) * (s.shape[-2] - 1) ** -0.5 for s in (a, b))
        (q, r), (p, t) = _factors(a.detach(), b.detach()), _factors(b.detach(), a.detach())
        u, sigma, vh = batched_svd(r @ t.mT)
        value = (r - u @ (vh @ t)).square().sum((-2, -1))
        floor = 4 * max(r.shape[-2:]) * torch.finfo(dtype).eps
        polar = (u * (sigma > floor * sigma[..., :1]).unsqueeze(-2)) @ vh
        grads = 2 * (a.detach() - q @ (polar @ t)), 2 * (b.detach() - p @ (polar.mT @ r))
        return (apart + apply(_Given, a, b, value, *grads, False)).to(x.dtype)


def _factors(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Q and R of A = QR with as many rows of R as the larger of A and B has, the last ones zero."""
    q, r = torch.linalg.qr(a)
    missing = min(max(a.shape[-2], b.shape[-2]), a.shape[-1]) - r.shape[-2]
    return pad(q, (0, missing)), pad(r, (0, 0, 0, missing))
