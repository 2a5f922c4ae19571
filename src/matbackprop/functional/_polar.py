"""Polar decomposition A = QP.

The variation of Q is QΩ + (I − QQᵀ) dA P⁻¹ with Ω skew and PΩ + ΩP = QᵀdA − dAᵀQ. In the eigenbasis of P, solving for
Ω divides by σᵢ + σⱼ, i ≠ j. P is the differentiable input; its eigenvalues and eigenvectors are constants. Derivatives
of every order are therefore exact. For complex A, ᵀ is the conjugate transpose, and the diagonal of Ω is imaginary
instead of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop._torch import is_differentiated
from matbackprop.checks import check_size, prepare, raise_or_nan
from matbackprop.cuda import polar as kernels
from matbackprop.errors import DomainError
from matbackprop.functional._function import Operation, apply, product
from matbackprop.numerics import autocast_off, is_double, symmetrize, zero_tolerance
from matbackprop.solvers import batched_svd


class PolarFactors(NamedTuple):
    """The result of :func:`polar`."""

    Q: Tensor
    P: Tensor


class _Saved(NamedTuple):
    x: Tensor  # the differentiable input, P or A
    out: Tensor
    values: Tensor  # of P
    vectors: Tensor


def _saved(inputs: tuple[Any, ...], outputs: Tensor) -> _Saved:
    return _Saved(inputs[0], outputs, *inputs[2:])


class _SkewSolve(Operation):
    """X skew with PX + XP = (C − Cᵀ)/2; self-adjoint in C. λ and V are the eigenvalues and eigenvectors of P."""

    save = staticmethod(_saved)

    @staticmethod
    def forward(p: Tensor, c: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
        inside = vectors.mH @ (0.5 * (c - c.mH)) @ vectors
        sums = values.unsqueeze(-1) + values.unsqueeze(-2)
        absent = sums == 0
        if not c.is_complex():  # the diagonal of a real skew matrix is zero, of a complex one imaginary
            absent = absent | torch.eye(values.shape[-1], dtype=torch.bool, device=values.device)
        return vectors @ (inside * torch.where(absent, torch.inf, sums).reciprocal()) @ vectors.mH

    @staticmethod
    def adjoint(saved: _Saved, needed: Sequence[bool], g: Tensor) -> Any:
        p, x, *factors = saved
        y = apply(_SkewSolve, p, g, *factors)
        return symmetrize(y @ x + x @ y) if needed[0] else None, y

    @staticmethod
    def tangent(saved: _Saved, dp: Tensor | None, dc: Tensor | None, *_: None) -> Tensor:
        p, x, *factors = saved
        right = torch.zeros_like(x) if dc is None else dc
        if dp is not None:
            right = right - 2 * (dp @ x)  # its skew part is dP X + X dP
        return apply(_SkewSolve, p, right, *factors)


class _RightSolve(Operation):
    """CP⁻¹, given the eigenvalues λ and eigenvectors V of P."""

    save = staticmethod(_saved)

    @staticmethod
    def forward(p: Tensor, c: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
        return ((c @ vectors) / values.unsqueeze(-2)) @ vectors.mH

    @staticmethod
    def adjoint(saved: _Saved, needed: Sequence[bool], g: Tensor) -> Any:
        p, x, *factors = saved
        y = apply(_RightSolve, p, g, *factors)
        return -symmetrize(x.mH @ y) if needed[0] else None, y

    @staticmethod
    def tangent(saved: _Saved, dp: Tensor | None, dc: Tensor | None, *_: None) -> Tensor:
        p, x, *factors = saved
        right = torch.zeros_like(x) if dc is None else dc
        return apply(_RightSolve, p, right if dp is None else right - x @ dp, *factors)


class _OrthogonalFactor(Operation):
    """Q of A = QP ``(*batch, m, n)``, m ≥ n, given Q and the eigenvalues and eigenvectors of P."""

    forward_twice = "polar"
    save = staticmethod(_saved)

    @staticmethod
    def forward(a: Tensor, q: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
        return q.clone()

    @staticmethod
    def adjoint(saved: _Saved, needed: Sequence[bool], g: Tensor) -> Any:
        return _variation(saved, g)

    @staticmethod
    def tangent(saved: _Saved, da: Tensor, *_: None) -> Tensor:
        return _variation(saved, da)


def _variation(saved: _Saved, e: Tensor) -> Tensor:
    """2QY + (I − QQᵀ) E P⁻¹, the derivative of Q in the direction E; it is self-adjoint."""
    a, q, *factors = saved
    p = symmetrize(q.mH @ a)
    out = 2 * q @ apply(_SkewSolve, p, q.mH @ e, *factors)
    if a.shape[-2] > a.shape[-1]:
        out = out + apply(_RightSolve, p, e - q @ (q.mH @ e), *factors)
    return out


def _factors(
    a: Tensor, rotation: bool, carried: torch.dtype, check_values: bool | None, what: str
) -> tuple[Tensor, Tensor | None]:
    """:func:`orthogonal_factor`, and P if a kernel has computed it."""
    n = a.shape[-1]
    tol = max(0.5 * torch.finfo(carried).eps, zero_tolerance(carried, a.dtype, n))
    fault = (
        f"have no unique {what}: their smallest singular values are zero, or equal at a reflection. Use different "
        f"data, or add a multiple of the expected matrix."
    )
    if kernels.takes(a):
        unchecked = None if check_values is None else False

        def fallback(a: Tensor) -> tuple[Tensor, Tensor]:
            q = _orthogonal_factor(a, rotation, carried, unchecked, tol, fault)
            half = product(0.5 * q.mH, a)
            return q, half + half.mH

        q, p = kernels.polar(a, rotation, -1.0 if check_values is None else tol, fallback)
        if check_values:
            raise_or_nan(q.detach().isnan().any(-1).any(-1), q, True, DomainError, fault)
        return q, p
    return _orthogonal_factor(a, rotation, carried, check_values, tol, fault), None


def _orthogonal_factor(
    a: Tensor, rotation: bool, carried: torch.dtype, check_values: bool | None, tol: float, fault: str
) -> Tensor:
    w, s, vh = batched_svd(a.detach(), fine=is_double(carried))
    if rotation and s.shape[-1]:
        last = torch.arange(s.shape[-1], device=s.device) == s.shape[-1] - 1
        sign = torch.where(last, torch.linalg.det(w @ vh).sign().unsqueeze(-1), 1)
        w, s = w * sign.unsqueeze(-2), s * sign
    out = apply(_OrthogonalFactor, a, w @ vh, s, vh.mH)
    if check_values is None or s.numel() == 0:
        return out
    least = s[..., -2:].sum(-1) if rotation else s[..., -1]  # the smallest sum that divides
    bad = s[..., 0].isnan() if rotation and s.shape[-1] == 1 else ~(least > tol * s[..., 0])
    return raise_or_nan(bad, out, check_values, DomainError, fault)


def orthogonal_factor(a: Tensor, rotation: bool, carried: torch.dtype, check_values: bool | None, what: str) -> Tensor:
    """Q of A ``(*batch, m, n)``, m ≥ n, a rotation if requested.

    If Q is not unique, raise an error, or return NaN if ``check_values`` is False; None accepts any Q. ``carried`` is
    the dtype whose precision the data have. For a rotation Q = W diag(1, …, ±1) Vᵀ, and the last eigenvalue of P is ±σ.
    """
    return _factors(a, rotation, carried, check_values, what)[0]


def polar(a: Tensor, *, check: bool | None = None, precision: torch.dtype | None = None) -> PolarFactors:
    r"""Polar decomposition, :math:`A = QP` with orthonormal (unitary) Q and positive semidefinite P.

    .. math:: A = W \operatorname{diag}(\sigma) V^\top,\qquad Q = WV^\top,\quad P = V \operatorname{diag}(\sigma) V^\top
        = (A^\top A)^{1/2}

    Q is the matrix with orthonormal columns (rows, if A is wide) nearest to A.

    Args:
        a: matrices ``(*batch, m, n)`` of full rank, real or complex (ᵀ is then the conjugate transpose).
        check, precision: as in `matrix_function`.

    Returns:
        Named tuple of Q ``(*batch, m, n)`` and P ``(*batch, n, n)`` in the dtype of ``a``.

    Raises:
        ShapeError, DtypeError, NonFiniteError: as in `matrix_function`.
        DomainError: a matrix is not of full rank, and Q is not unique. Also raised if ``a`` requires a gradient and its
            entries are too large or too small for the compute dtype.

    Gradient:
        2QY + (I − QQᵀ) G P⁻¹ with Y skew and PY + YP the skew part of QᵀG. In the eigenbasis of P, solving for Y
        divides by σᵢ + σⱼ; the result is exact at repeated singular values. Supports all orders, forward mode and vmap.

    Example:
        >>> import torch, matbackprop
        >>> q, p = matbackprop.polar(torch.tensor([[0.0, -2.0], [3.0, 0.0]]))
        >>> q, p
        (tensor([[ 0., -1.],
                [ 1.,  0.]]), tensor([[3., 0.],
                [0., 2.]]))

    Reference:
        Higham, Functions of Matrices (2008), chapter 8.
    """
    unit, check_values, _, factors = prepare(a, "a", check, precision, sizes="rescale")
    if check_values and is_differentiated(a):  # P has the scale of A, and its derivatives have products of it
        check_size(a, unit.dtype, "a", "sums")
    with autocast_off(a.device.type):
        x = a.to(unit.dtype)
        p = None
        if a.shape[-2] >= a.shape[-1]:
            q, p = _factors(unit, False, a.dtype, check_values, "polar decomposition")
        else:
            q = orthogonal_factor(unit.mH, False, a.dtype, check_values, "polar decomposition").mH.resolve_conj()
        if p is None or factors is not None:
            half = product(0.5 * q.mH, x)  # its symmetric part is in range if P is
            p = half + half.mH
        return PolarFactors(q.to(a.dtype), p.to(a.dtype))
