"""Eigendecomposition of symmetric matrices.

Eigenvectors of Hermitian matrices are unique up to a phase. The derivative uses the gauge diag(UᵀdU) = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop.checks import check_result, prepare
from matbackprop.functional._function import Operation, apply
from matbackprop.functional._ties import TiePolicy, Ties, largest_entry, tie_policy
from matbackprop.numerics import autocast_off, real_dtype, symmetrize
from matbackprop.solvers import batched_eigh


class Eigenpairs(NamedTuple):
    """The result of :func:`eigh`, with the field names of torch.linalg.eigh."""

    eigenvalues: Tensor
    eigenvectors: Tensor


def largest_positive(v: Tensor) -> Tensor:
    """Multiply each column by the sign or phase that makes its largest entry positive; differentiable."""
    return v * positive_phase(v)


def positive_phase(v: Tensor) -> Tensor:
    """Return the factors of `largest_positive`, ``(*batch, 1, k)``."""
    if v.numel() == 0:
        return v.new_ones(*v.shape[:-2], 1, v.shape[-1])
    entry = v.gather(-2, v.detach().abs().argmax(-2, keepdim=True))
    return entry.conj() / entry.abs() if v.is_complex() else torch.where(entry.detach() < 0, -1.0, 1.0)


class _Saved(NamedTuple):
    lam: Tensor
    u: Tensor
    policy: TiePolicy


class _Eigh(Operation):
    forward_twice = "eigh"

    @staticmethod
    def forward(a: Tensor, policy: TiePolicy) -> tuple[Tensor, Tensor]:
        lam, u = batched_eigh(a)
        return lam.clone(), u.clone()  # a solver may return views, which forward mode does not accept as outputs

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> _Saved:
        return _Saved(*outputs, inputs[1])

    @staticmethod
    def adjoint(saved: _Saved, needed: Sequence[bool], g_lam: Tensor | None, g_u: Tensor | None) -> Tensor:
        lam, u, policy = saved
        if g_u is None:
            return (u * g_lam.unsqueeze(-2)) @ u.mH  # type: ignore[union-attr]
        inner = symmetrize(policy.over_gaps(lam, u.mH @ g_u, g_u, g_lam))
        if g_lam is not None:
            inner = inner + torch.diag_embed(g_lam)
        return u @ inner @ u.mH

    @staticmethod
    def tangent(saved: _Saved, da: Tensor, _: None) -> tuple[Tensor, Tensor]:
        lam, u, policy = saved
        variation = u.mH @ symmetrize(da) @ u
        rotation = policy.rotation(lam, variation, largest_entry(da))
        return variation.diagonal(dim1=-2, dim2=-1).real.clone(), u @ rotation


def eigh(
    a: Tensor,
    *,
    ties: Ties = "raise",
    tie_tol: float | None = None,
    broadening: float = 1e-6,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Eigenpairs:
    r"""Eigendecomposition of symmetric or Hermitian matrices.

    .. math:: A = U \operatorname{diag}(\lambda) U^\top

    For complex matrices, ᵀ is the conjugate transpose and "symmetric" means Hermitian.

    Args:
        a: symmetric matrices ``(*batch, n, n)``; the symmetric part is used.
        ties: treatment of repeated eigenvalues in the gradient of U. A pair of equal eigenvalues is called tied.
            ``"raise"`` raises TieError if the loss uses eigenvectors and a gradient reaches a vector or value of a tied
            pair. ``"drop"`` omits tied pairs and issues a GaugeWarning if the loss depends on the choice of vectors; it
            is correct for losses of whole eigenspaces, such as projectors. ``"broaden"`` replaces 1/x by x/(x² + η²),
            which is smooth but biased.
        tie_tol: fraction of the largest |λ| below which two eigenvalues are tied. By default it depends on the dtype.
        broadening: η as a fraction of the largest |λ|, for ``"broaden"``.
        check: whether to check values (finite and symmetric input, ties): None on the CPU only, True on every device,
            False never. Without checks, and under ``torch.func`` and ``torch.compile``, results for asymmetric matrices
            are NaN. With ``ties="raise"``, gradients that would raise are NaN.
        precision: as in `matrix_function`.

    Returns:
        Named tuple of ascending real eigenvalues ``(*batch, n)`` and eigenvectors ``(*batch, n, n)`` in columns, in the
        dtype of ``a``. Each eigenvector is unique up to its sign or phase.

    Raises:
        DomainError: an eigenvalue overflows.
        TieError: see ``ties``. Also raised if the loss depends on the phase of a complex eigenvector.

    Gradient:
        dλ = diag(UᵀdAU) and dU = U(K̃ᵀ∘(UᵀdAU)) with K̃ᵢⱼ = 1/(λᵢ − λⱼ). The backward pass is
        U((K̃ᵀ∘(UᵀG_U))_sym + diag(G_λ))Uᵀ. Higher orders are correct if no pair is tied.

        At ties, the gradients of λ and U do not determine that of A, even if the loss does not depend on the choice of
        vectors. Use `matrix_function` for functions of A and `spectral_projector` for eigenspaces; both are exact at
        ties. A loss of eigenvalues alone never raises; the gradient of a repeated eigenvalue uses the computed vector.

    Example:
        >>> import torch, matbackprop
        >>> a = torch.diag(torch.tensor([1.0, 3.0])).requires_grad_()
        >>> lam, u = matbackprop.eigh(a)
        >>> lam.prod().backward()
        >>> a.grad
        tensor([[3., 0.],
                [0., 1.]])

    Reference:
        Ionescu et al. (2015), Proposition "EIG Variations", with K̃ for K in dU and a symmetrized adjoint.
    """
    ready = prepare(a, "a", check, precision, sizes="rescale", symmetric=True)
    policy = tie_policy("eigh", ties, tie_tol, broadening, check, a, ready.x.dtype)
    with autocast_off(a.device.type):
        lam, u = apply(_Eigh, ready.x, policy)
        lam = ready.marked(ready.back(lam)).to(real_dtype(a.dtype))
        if ready.check_values:
            check_result(lam, "An eigenvalue", "Scale the matrices.")
        return Eigenpairs(lam, ready.marked(u).to(a.dtype))
