"""Pseudo-inverse and minimum-norm least-squares solutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop._torch import differentiated_again
from matbackprop.checks import (
    Prepared,
    check_finite,
    check_floating,
    check_same_kind,
    nan_where,
    narrowed,
    out_of_range,
    prepare,
)
from matbackprop.functional._function import Operation, apply, product, with_derivatives_of
from matbackprop.functional._linear_solve import as_columns
from matbackprop.numerics import autocast_off, rank_tolerance
from matbackprop.solvers import batched_svd


def _outside(t: Tensor, a: Tensor, inverse: Tensor, basis: Tensor) -> Tensor:
    """(I − AA⁺)T, its value by an orthonormal basis of the range: A(A⁺T) loses digits if A is ill-conditioned."""
    by_basis = t - basis @ (basis.mH @ t)
    if not differentiated_again():
        return by_basis
    return with_derivatives_of(t - a @ (inverse @ t), by_basis)


class _Factors(NamedTuple):
    """A = U diag(σ) Vᴴ and how singular values outside the numerical range affect derivatives.

    With i inside and j outside the range, p = σⱼ²/(σᵢ²(σᵢ² − σⱼ²)) and q = σⱼ/(σᵢ(σᵢ² − σⱼ²)).
    """

    u: Tensor
    v: Tensor
    kept: Tensor
    p: Tensor
    q: Tensor

    @property
    def left(self) -> Tensor:
        return self.u * self.kept.unsqueeze(-2)

    @property
    def right(self) -> Tensor:
        return self.v * self.kept.unsqueeze(-2)

    def coupled(self, e: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """The part of the derivative that is due to singular values outside the range."""
        x = u.mH @ e @ v
        return v @ (self.p * x.mH + self.q * x) @ u.mH


class _Saved(NamedTuple):
    a: Tensor
    inverse: Tensor
    factors: _Factors


class _PseudoInverse(Operation):
    """A⁺, given its value and the factors of A. As an output, it is differentiated in the adjoint."""

    forward_twice = "pinv"

    @staticmethod
    def forward(a: Tensor, value: Tensor, u: Tensor, v: Tensor, kept: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return value.clone()  # torch.compile without gradients does not support *arguments here

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> _Saved:
        a, _, *factors = inputs
        return _Saved(a, outputs, _Factors(*factors))

    @staticmethod
    def adjoint(saved: _Saved, needed: Sequence[bool], g: Tensor) -> Tensor:
        a, inverse, factors = saved
        back = inverse.mH
        one = _outside(g.mH, a, inverse, factors.left) @ inverse @ back
        other = _outside(g, a.mH, back, factors.right) @ back @ inverse
        return one + other.mH - back @ g @ back + factors.coupled(g, factors.v, factors.u)

    @staticmethod
    def tangent(saved: _Saved, da: Tensor, *_: None) -> Tensor:
        a, inverse, factors = saved
        back = inverse.mH
        one = _outside(da, a, inverse, factors.left) @ inverse @ back
        other = _outside(da.mH, a.mH, back, factors.right) @ back @ inverse
        return one.mH + other - inverse @ da @ inverse + factors.coupled(da, factors.u, factors.v)


def pseudo_inverse(a: Tensor, u: Tensor, values: Tensor, vh: Tensor, tol: float) -> tuple[Tensor, Tensor]:
    """A⁺ with derivatives given A = U diag(values) Vᴴ, and the columns of U inside the range.

    The rank is the number of values above a fraction ``tol`` of the largest size.
    """
    size = values.abs()
    largest = size.amax(-1, keepdim=True) if size.shape[-1] else size
    kept = ~(((size <= tol * largest) & (largest < torch.inf)) | (size == 0))  # true for NaN
    inverse = torch.where(kept, values, 1).reciprocal() * kept
    inside = inverse.abs().unsqueeze(-1) * ~kept.unsqueeze(-2)  # 1/σᵢ for i inside and j outside the range
    ratio = inside * size.unsqueeze(-2)
    q = inside.square() * ratio / (1 - ratio.square())
    p = q * ratio
    factors = _Factors(u, vh.mH, kept.to(size.dtype), p + p.mT, q + q.mT)
    value = (factors.right * inverse.unsqueeze(-2)) @ factors.left.mH
    return apply(_PseudoInverse, a, value, *factors), factors.left


def _of_prepared(ready: Prepared, dtype: torch.dtype, rtol: float | torch.dtype | None) -> Tensor:
    x = ready.x.detach()
    inverse, _ = pseudo_inverse(ready.x, *batched_svd(x), rank_tolerance(dtype, x.dtype, rtol))
    return inverse if ready.check_values else nan_where(out_of_range(x, x.dtype, "products"), inverse)


def pinv(
    a: Tensor,
    *,
    rtol: float | torch.dtype | None = None,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Moore–Penrose pseudo-inverse :math:`A^+ = \sum_{i \le r} \sigma_i^{-1} v_i u_i^\top`.

    Args:
        a: matrices ``(*batch, m, n)`` of any shape and rank, real or complex (ᵀ is then the conjugate transpose).
        rtol: singular values up to this fraction of the largest count as zero; the others define the rank r. By default
            it depends on the dtype of ``a``. Pass a dtype if the data have a lower precision, as in `projector`.
        check, precision: as in `matrix_function`.

    Returns:
        A⁺ ``(*batch, n, m)`` in the dtype of ``a``; zero for A = 0.

    Raises:
        DomainError: ``rtol`` is out of range.

    Gradient:
        .. math:: dA^+ = -A^+\,dA\,A^+ + A^+(A^+)^\top dA^\top(I - AA^+) + (I - A^+A)\,dA^\top(A^+)^\top A^+

        Exact for variations that preserve the rank; A⁺ is discontinuous for others. No differences of singular values
        occur in denominators. Supports all orders, forward mode and vmap. Second derivatives have a relative error of
        up to about εκ³ with κ = σ_1/σ_r.

        The first derivative is exact even if singular values below the tolerance are not negligible. The second
        derivative treats them as zero, with a relative error of about σ_{r+1}/σ_r. Use ``pinv(low_rank(a, r))`` for
        exact second derivatives.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.pinv(torch.tensor([[1.0, 1.0], [1.0, 1.0]]))
        tensor([[0.2500, 0.2500],
                [0.2500, 0.2500]])

    Reference:
        Golub and Pereyra, The differentiation of pseudo-inverses and nonlinear least squares problems whose variables
        separate, SIAM J. Numer. Anal. 10 (1973).
    """
    ready = prepare(a, "a", check, precision, sizes="products")
    with autocast_off(a.device.type):
        return _of_prepared(ready, a.dtype, rtol).to(a.dtype)


def lstsq(
    a: Tensor,
    b: Tensor,
    *,
    rtol: float | torch.dtype | None = None,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Least-squares solution of minimum norm, :math:`X = A^+B`.

    .. math:: X = \operatorname*{argmin}_X \|X\|_F \quad\text{over the minimizers of}\quad \|AX - B\|_F

    Args:
        a: matrices ``(*batch, m, n)`` of any shape and rank, real or complex.
        b: right-hand sides: ``(m,)``, ``(*batch, m)`` with the batch of A, or ``(*batch, m, k)`` with a batch that
            broadcasts.
        rtol: relative tolerance for the rank of A, as in `pinv`.
        check, precision: as in `matrix_function`.

    Returns:
        X ``(*batch, n)`` or ``(*batch, n, k)`` in the dtype of ``b``.

    Gradient:
        With respect to A and B, as in `pinv`.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.lstsq(torch.tensor([[1.0, 1.0], [1.0, 1.0]]), torch.tensor([2.0, 4.0]))
        tensor([1.5000, 1.5000])
    """
    check_floating(b, "b", or_complex=True)
    ready = prepare(a, "a", check, precision, sizes="products", others=(b,))
    check_same_kind(a, b)
    if ready.check_values:
        check_finite(b, "b")
    with autocast_off(a.device.type):
        full, columns, vector = as_columns(ready.x, b)
        columns = narrowed(columns, full.dtype, "b", ready.check_values)
        inverse = _of_prepared(ready, a.dtype, rtol).expand(*full.shape[:-2], a.shape[-1], a.shape[-2])
        x = product(inverse, columns)
        return (x.squeeze(-1) if vector else x).to(b.dtype)
