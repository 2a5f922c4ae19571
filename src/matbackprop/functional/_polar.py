"""Polar decomposition A = QP.

The variation of Q is QΩ + (I − QQᵀ) dA P⁻¹ with Ω skew and PΩ + ΩP = QᵀdA − dAᵀQ, that of P the symmetric part of
QᵀdA − ΩP. In the eigenbasis of P, solving for Ω divides by σᵢ + σⱼ, i ≠ j. P is the differentiable input; its
eigenvalues and eigenvectors are constants. Derivatives of every order are therefore exact. For complex A, ᵀ is the
conjugate transpose, and the diagonal of Ω is imaginary instead of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop._torch import is_differentiated
from matbackprop.checks import check_size, nan_where, prepare, raise_or_nan
from matbackprop.cuda import polar as kernels
from matbackprop.errors import DomainError
from matbackprop.functional._function import Operation, apply, product
from matbackprop.functional._linear_solve import right_solve
from matbackprop.numerics import autocast_off, is_double, symmetrize, zero_tolerance
from matbackprop.solvers.svd import batched_polar


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
        inside, sums = vectors.mH @ c @ vectors, values.unsqueeze(-1) + values.unsqueeze(-2)
        rates = torch.where(sums == 0, torch.inf, sums).reciprocal()
        return vectors @ (0.5 * (inside - inside.mH) * rates) @ vectors.mH  # the diagonal is exactly zero, or imaginary

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


class _Known(NamedTuple):
    q: Tensor
    p: Tensor
    values: Tensor  # of P
    vectors: Tensor


class _Factors(Operation):
    """Q and P of A = QP ``(*batch, m, n)``, m ≥ n, given Q and the eigenvalues and eigenvectors of P."""

    forward_twice = "polar"

    @staticmethod
    def forward(a: Tensor, q: Tensor, values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return q.clone(), symmetrize((vectors * values.unsqueeze(-2)) @ vectors.mH)

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> _Known:
        return _Known(*outputs, *inputs[2:])

    @staticmethod
    def adjoint(saved: _Known, needed: Sequence[bool], g_q: Tensor | None, g_p: Tensor | None) -> Tensor:
        q, p, *factors = saved
        inside = torch.zeros_like(p) if g_q is None else q.mH @ g_q
        along = None if g_p is None else symmetrize(g_p)
        skew = inside if along is None else inside + 0.5 * (p @ along - along @ p)
        mixed = 2 * apply(_SkewSolve, p, skew, *factors)
        mixed = mixed if along is None else mixed + along
        return q @ mixed if g_q is None else _with_outside(saved, g_q, inside, mixed)

    @staticmethod
    def tangent(saved: _Known, da: Tensor, *_: None) -> tuple[Tensor, Tensor]:
        q, p, *factors = saved
        inside = q.mH @ da
        omega = 2 * apply(_SkewSolve, p, inside, *factors)
        return _with_outside(saved, da, inside, omega), symmetrize(inside) + 0.5 * (p @ omega - omega @ p)


def _with_outside(saved: _Known, e: Tensor, inside: Tensor, mixed: Tensor) -> Tensor:
    """QM + (I − QQᵀ) E P⁻¹, with QᵀE."""
    q, p, values, vectors = saved
    if q.shape[-2] == q.shape[-1]:
        return q @ mixed
    return q @ mixed + right_solve(p, e - q @ inside, vectors * values.rsqrt().unsqueeze(-2))


def polar_factors(
    a: Tensor, rotation: bool, carried: torch.dtype, check_values: bool | None, what: str
) -> tuple[Tensor, Tensor]:
    """Q and P of A ``(*batch, m, n)``, m ≥ n, with a rotation Q if requested.

    If Q is not unique, raise an error, or return NaN if ``check_values`` is False; None accepts any Q. ``carried`` is
    the dtype whose precision the data have. For a rotation Q = W diag(1, …, ±1) Vᵀ, and the last eigenvalue of P is ±σ.
    """
    tol = max(0.5 * torch.finfo(carried).eps, zero_tolerance(carried, a.dtype, a.shape[-1]))
    fault = (
        f"have no unique {what}: their smallest singular values are zero, or equal at a reflection. Use different "
        f"data, or add a multiple of the expected matrix."
    )

    def general(a: Tensor, check_values: bool | None) -> tuple[Tensor, Tensor]:
        q, s, v = _decompose(a.detach(), rotation, is_double(carried))
        pair: tuple[Tensor, Tensor] = apply(_Factors, a, q, s, v)
        if check_values is None or s.numel() == 0:
            return pair
        least = s[..., -2:].sum(-1) if rotation else s[..., -1]  # the smallest sum that divides
        bad = s[..., 0].isnan() if rotation and s.shape[-1] == 1 else ~(least > tol * s[..., 0])
        return raise_or_nan(bad, pair[0], check_values, DomainError, fault), nan_where(bad, pair[1])

    if not kernels.takes(a):
        return general(a, check_values)
    unchecked = None if check_values is None else False
    q, p = kernels.polar(a, rotation, -1.0 if check_values is None else tol, lambda a: general(a, unchecked))
    if check_values:
        raise_or_nan(q.detach().isnan().any(-1).any(-1), q, True, DomainError, fault)
    return q, p


def _decompose(a: Tensor, rotation: bool, fine: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Q, and the eigenvalues and eigenvectors of P, the largest singular value first."""
    q, s, v = batched_polar(a, fine=fine)
    if rotation and s.shape[-1]:
        mirrored = torch.linalg.det(q) < 0
        last = v[..., -1:]
        q = torch.where(mirrored[..., None, None], q - 2 * (q @ last) @ last.mH, q)
        s = torch.cat([s[..., :-1], torch.where(mirrored.unsqueeze(-1), -s[..., -1:], s[..., -1:])], -1)
    return q, s, v


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
        if a.shape[-2] < a.shape[-1]:
            q = polar_factors(unit.mH, False, a.dtype, check_values, "polar decomposition")[0].mH.resolve_conj()
        else:
            q, p = polar_factors(unit, False, a.dtype, check_values, "polar decomposition")
        if factors is not None or a.shape[-2] < a.shape[-1]:
            half = product(0.5 * q.mH, a.to(unit.dtype))  # its symmetric part is in range if P is
            p = half + half.mH
        return PolarFactors(q.to(a.dtype), p.to(a.dtype))
