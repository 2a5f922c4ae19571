"""Sylvester and Lyapunov equations with symmetric coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop.checks import check_matrix, prepare, raise_or_nan
from matbackprop.errors import DomainError, ShapeError
from matbackprop.functional._function import Operation, apply
from matbackprop.functional._linear_solve import broadcast_batches
from matbackprop.functional._spectrum import Spectrum
from matbackprop.numerics import autocast_off, compute_dtype, symmetrize, zero_tolerance
from matbackprop.solvers import batched_eigh


class _Saved(NamedTuple):
    a: Tensor
    b: Tensor
    x: Tensor
    lam: Tensor
    u: Tensor
    mu: Tensor
    v: Tensor


class _Sylvester(Operation):
    """X with AX + XB = C, given the eigenvalues and eigenvectors of A and B; self-adjoint in C."""

    forward_twice = "sylvester"

    @staticmethod
    def forward(a: Tensor, b: Tensor, c: Tensor, lam: Tensor, u: Tensor, mu: Tensor, v: Tensor) -> Tensor:
        return u @ ((u.mH @ c @ v) / (lam.unsqueeze(-1) + mu.unsqueeze(-2))) @ v.mH

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> _Saved:
        a, b, _, *factors = inputs
        return _Saved(a, b, outputs, *factors)

    @staticmethod
    def adjoint(saved: _Saved, needed: Sequence[bool], g: Tensor) -> Any:
        a, b, x, *factors = saved
        y = apply(_Sylvester, a, b, g, *factors)
        grad_a = -symmetrize(y @ x.mH) if needed[0] else None
        return grad_a, -symmetrize(x.mH @ y) if needed[1] else None, y

    @staticmethod
    def tangent(saved: _Saved, da: Tensor | None, db: Tensor | None, dc: Tensor | None, *_: None) -> Tensor:
        a, b, x, *factors = saved
        right = torch.zeros_like(x) if dc is None else dc
        if da is not None:
            right = right - symmetrize(da) @ x
        if db is not None:
            right = right - x @ symmetrize(db)
        return apply(_Sylvester, a, b, right, *factors)


def lyapunov_by_spectrum(p: Tensor, c: Tensor, spectrum: Spectrum) -> Tensor:
    """X with PX + XP = C, given the spectrum of P."""
    values, vectors, _ = spectrum
    return apply(_Sylvester, p, p, c, values, vectors, values, vectors)


def sylvester(
    a: Tensor, b: Tensor, c: Tensor, *, check: bool | None = None, precision: torch.dtype | None = None
) -> Tensor:
    r"""Solution of the Sylvester equation :math:`AX + XB = C` with symmetric (Hermitian) A and B.

    .. math:: X = U\Bigl(\frac{(U^\top CV)_{ij}}{\lambda_i + \mu_j}\Bigr)V^\top,\qquad
        A = U\operatorname{diag}(\lambda)U^\top,\quad B = V\operatorname{diag}(\mu)V^\top

    Args:
        a: symmetric matrices ``(*batch, m, m)``.
        b: symmetric matrices ``(*batch, n, n)``.
        c: right-hand sides ``(*batch, m, n)``. Batches broadcast.
        check, precision: as in `matrix_function`.

    Returns:
        X ``(*batch, m, n)`` in the dtype of ``c``, complex if any argument is.

    Raises:
        DomainError: a sum λᵢ + μⱼ is zero, that is, at most τ times the largest \|λ\| + \|μ\| (τ is on the stability
            page). Without checks the result is NaN.

    Gradient:
        With AY + YB = G: ∂L/∂C = Y, ∂L/∂A = −(YXᵀ)_sym and ∂L/∂B = −(XᵀY)_sym. All orders, exact at repeated
        eigenvalues.

    Example:
        >>> import torch, matbackprop
        >>> a, b = torch.diag(torch.tensor([1.0, 3.0])), torch.tensor([[1.0]])
        >>> matbackprop.sylvester(a, b, torch.ones(2, 1))
        tensor([[0.5000],
                [0.2500]])

    Reference:
        Bhatia and Rosenthal, How and why to solve the operator equation AX − XB = Y, 1997.
    """
    for name, x in (("a", a), ("b", b), ("c", c)):
        check_matrix(x, name, square=name != "c", or_complex=True)
    if c.shape[-2:] != (a.shape[-1], b.shape[-1]):
        raise ShapeError(f"c must be (*batch, {a.shape[-1]}, {b.shape[-1]}), got shape {tuple(c.shape)}.")
    batch = broadcast_batches({"a": a, "b": b, "c": c})
    has_complex = any(x.is_complex() for x in (a, b, c))
    compute = compute_dtype(precision, torch.complex64 if has_complex else torch.float32)
    with autocast_off(c.device.type):
        of_a, of_b, of_c = (
            prepare(x, name, check, precision, sizes="products", symmetric=name != "c", others=(a, b, c))
            for name, x in (("a", a), ("b", b), ("c", c))
        )
        left, right, inside = (ready.x.to(compute).expand(*batch, *ready.x.shape[-2:]) for ready in (of_a, of_b, of_c))
        (lam, u), (mu, v) = batched_eigh(left.detach()), batched_eigh(right.detach())
        if c.shape[-1] and c.shape[-2]:
            sums = (lam.unsqueeze(-1) + mu.unsqueeze(-2)).abs().amin((-2, -1))
            tolerance = max(zero_tolerance(x.dtype, compute, max(c.shape[-2:])) for x in (a, b))
            zero = sums <= tolerance * (lam.abs().amax(-1) + mu.abs().amax(-1))
            fault = "a have an eigenvalue that plus one of b is zero. Add a multiple of the identity."
            lam = raise_or_nan(zero, lam, of_c.check_values, DomainError, fault)
        dtype = torch.promote_types(c.dtype, torch.complex64) if has_complex else c.dtype
        return of_a.marked(of_b.marked(apply(_Sylvester, left, right, inside, lam, u, mu, v).to(dtype)))


def lyapunov(a: Tensor, c: Tensor, *, check: bool | None = None, precision: torch.dtype | None = None) -> Tensor:
    r"""Solution of the Lyapunov equation :math:`AX + XA = C` with a symmetric (Hermitian) A.

    Args:
        a: symmetric matrices ``(*batch, n, n)``, positive definite or with λᵢ + λⱼ ≠ 0 for all eigenvalues.
        c: right-hand sides ``(*batch, n, n)``. X is symmetric if C is.
        check, precision: as in `matrix_function`.

    Returns:
        X ``(*batch, n, n)`` in the dtype of ``c``, complex if A is.

    Gradient:
        Same as `sylvester` with B = A.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.lyapunov(2 * torch.eye(2), torch.ones(2, 2))
        tensor([[0.2500, 0.2500],
                [0.2500, 0.2500]])
    """
    return sylvester(a, a, c, check=check, precision=precision)
