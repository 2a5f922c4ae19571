"""Orthogonal projectors on the column space of a matrix and on leading eigenvectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop.checks import nan_where, prepare, raise_or_nan
from matbackprop.divided_differences import STEP
from matbackprop.errors import DomainError, TieError
from matbackprop.functional._function import Operation, apply
from matbackprop.functional._low_rank import check_rank
from matbackprop.functional._pinv import pseudo_inverse
from matbackprop.functional._spectrum import Spectrum, spectral
from matbackprop.numerics import autocast_off, eye_like, gap_tolerance, rank_tolerance, symmetrize
from matbackprop.solvers import batched_eigh, batched_svd


class _Saved(NamedTuple):
    onto: Tensor
    inverse: Tensor


class _Projector(Operation):
    """Π = AA⁺, given its value and A⁺ with its derivatives."""

    forward_twice = "projector"

    @staticmethod
    def forward(a: Tensor, value: Tensor, inverse: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> _Saved:
        return _Saved(outputs, inputs[2])

    @staticmethod
    def adjoint(saved: _Saved, needed: Sequence[bool], g: Tensor) -> Tensor:
        onto, inverse = saved
        g = 2 * symmetrize(g)
        return (g - onto @ g) @ inverse.mH

    @staticmethod
    def tangent(saved: _Saved, da: Tensor, *_: None) -> Tensor:
        onto, inverse = saved
        return 2 * symmetrize((da - onto @ da) @ inverse)


def projector(
    a: Tensor,
    *,
    symmetric: bool = False,
    rank_tol: float | torch.dtype | None = None,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Orthogonal projector on the column space of A, :math:`\Pi_A = AA^+`.

    Args:
        a: matrices ``(*batch, m, n)`` of any shape and rank, real or complex (ᵀ is then the conjugate transpose).
        symmetric: whether A is symmetric. If True, use its eigendecomposition and return a symmetric gradient.
        rank_tol: singular values below this fraction of the largest count as zero. By default it depends on the dtype
            of ``a``. Pass a dtype if the data have a lower precision, such as ``torch.float32`` for a float32 map cast
            to float64.
        check, precision: as in `matrix_function`.

    Returns:
        Π_A ``(*batch, m, m)`` in the dtype of ``a``; zero for A = 0.

    Raises:
        DomainError: ``rank_tol`` is out of range.

    Gradient:
        dΠ = 2((I − Π) dA A⁺)_sym and ∂L/∂A = 2(I − Π) G_sym (A⁺)ᵀ, or its symmetric part if ``symmetric=True``. Exact
        for variations that preserve the rank; Π is discontinuous for others. Supports all orders, forward mode and
        vmap.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.projector(torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 2.0]]))
        tensor([[0.5000, 0.0000, 0.5000],
                [0.0000, 0.0000, 0.0000],
                [0.5000, 0.0000, 0.5000]])

    Reference:
        Ionescu et al. (2015), Lemma 1; Golub and Pereyra, The differentiation of pseudo-inverses, SIAM J. Numer. Anal.
        10 (1973).
    """
    ready = prepare(a, "a", check, precision, sizes="rescale", symmetric=symmetric)
    tol = rank_tolerance(a.dtype, ready.x.dtype, rank_tol)
    with autocast_off(a.device.type):
        x = ready.x.detach()
        if symmetric:
            values, u = batched_eigh(x)
            vh = u.mH
        else:
            u, values, vh = batched_svd(x)
        inverse, basis = pseudo_inverse(ready.x, u, values, vh, tol)
        value = symmetrize(basis @ basis.mH)
        if a.shape[-2] <= a.shape[-1]:  # if all rows are independent, A⁺ would amplify rounding errors of I − Π
            full = (basis != 0).any(-2).all(-1)[..., None, None]
            value = torch.where(full, eye_like(value), value)
        onto = apply(_Projector, ready.x, value, inverse)
        onto = onto if ready.check_values else nan_where(values.isnan().any(-1), onto)
        return ready.marked(onto).to(a.dtype)


def check_cut(rank: int | None, threshold: float | None) -> None:
    if (rank is None) == (threshold is None):
        raise DomainError(f"Pass either rank or threshold, got rank={rank}, threshold={threshold}.")
    if threshold is not None and math.isnan(threshold):
        raise DomainError("threshold must be a number, got NaN.")
    if rank is not None:
        check_rank(rank)


def spectral_projector(
    a: Tensor,
    *,
    rank: int | None = None,
    threshold: float | None = None,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Projector on the leading eigenvectors of a symmetric matrix, :math:`\Pi = U_1U_1^\top`.

    The columns of U₁ are the eigenvectors of the ``rank`` largest eigenvalues, or of those above ``threshold``.

    Args:
        a: symmetric (Hermitian) matrices ``(*batch, n, n)``.
        rank: number of eigenvectors, 0 … n. Pass either this or ``threshold``.
        threshold: keep eigenvalues larger than this.
        check, precision: as in `matrix_function`.

    Returns:
        Π ``(*batch, n, n)`` in the dtype of ``a``.

    Raises:
        DomainError: ``rank`` and ``threshold`` are both given or both None, or ``rank`` is out of range.
        TieError: eigenvalues on both sides of the cut are equal, or one equals ``threshold``, up to rounding errors.

    Gradient:
        U(Γ ∘ (UᵀG_symU))Uᵀ with Γᵢⱼ = 1/|λᵢ − λⱼ| for eigenvalues on different sides of the cut and 0 otherwise. Exact
        at ties on one side. First and second order, forward mode and vmap. Lemma 1 of the paper does not apply to a
        truncated projector, because it omits the eigenvalues below the cut.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.spectral_projector(torch.diag(torch.tensor([3.0, 1.0, 2.0])), rank=2).diagonal()
        tensor([1., 0., 1.])
    """
    check_cut(rank, threshold)
    ready = prepare(a, "a", check, precision, sizes="rescale", symmetric=True)
    n = a.shape[-1]
    if rank is not None and not 0 <= rank <= n:
        raise DomainError(f"rank must be in 0 … {n} for {n}×{n} matrices, got {rank}.")
    with autocast_off(a.device.type):
        values, u = batched_eigh(ready.x.detach())
        if rank is None:
            cut = ready.scaled(values.new_full((*values.shape[:-1], 1), threshold or 0.0)).squeeze(-1)
        elif 0 < rank < n:
            cut = values[..., n - rank - 1 : n - rank + 1].mean(-1)
        else:
            cut = values.new_full(values.shape[:-1], torch.inf if rank == 0 else -torch.inf)
        out = ready.marked(spectral(ready.x, Spectrum(values, u), STEP, cut))
        if values.numel():
            gap = 2 * (values - cut.unsqueeze(-1)).abs().amin(-1)
            tied = gap <= gap_tolerance(values.dtype, n) * values.abs().amax(-1)
            fault = "have equal eigenvalues on both sides of the cut, or one at it. Choose another rank or threshold."
            out = raise_or_nan(tied, out, ready.check_values, TieError, fault)
        return out.to(a.dtype)
