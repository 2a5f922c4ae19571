"""Eigenvalues and eigenvectors of symmetric matrices with both adjoints.

Eigenvectors of Hermitian matrices are determined up to a phase; dU has the gauge diag(UᵀdU) = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop.checks import check_result, prepare
from matbackprop.functional._function import Operation, apply
from matbackprop.functional._ties import TiePolicy, Ties, largest_entry, receives_gradient, tie_policy
from matbackprop.numerics import autocast_off, real_dtype, symmetrize
from matbackprop.solvers import batched_eigh


class Eigenpairs(NamedTuple):
    """The result of :func:`eigh`, with the names that torch.linalg.eigh gives its fields."""

    eigenvalues: Tensor
    eigenvectors: Tensor


def largest_positive(v: Tensor) -> Tensor:
    """Multiply each column by a sign or phase, which is differentiated, that makes its largest entry positive."""
    return v * positive_phase(v)


def positive_phase(v: Tensor) -> Tensor:
    """The sign or phase of each column that `largest_positive` takes ``(*batch, 1, k)``."""
    if v.numel() == 0:
        return torch.ones_like(v[..., :1, :])
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
        inner = symmetrize(policy.over_gaps(lam, u.mH @ g_u, receives_gradient(g_u, g_lam), largest_entry(g_u)))
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
    r"""Eigendecomposition of symmetric matrices with the adjoints of the paper's EIG proposition, corrected.

    .. math:: A = U \operatorname{diag}(\lambda) U^\top

    For complex matrices ᵀ is the conjugate transpose here, and "symmetric" means Hermitian.

    Args:
        a: symmetric matrices ``(*batch, n, n)``; the symmetric part is used.
        ties: treatment of coincident eigenvalues in the gradient of U. ``"raise"``: raise if a gradient reaches a
            vector or value of such a pair and any vector is used at all (below), else leave the pair out.
            ``"drop"``: leave them out, with a GaugeWarning if the loss depends on the choice of vectors. Correct for
            losses of whole eigenspaces, such as projectors. ``"broaden"``: use x/(x² + η²) for 1/x, smooth and biased.
        tie_tol: fraction of the largest |λ| below which two eigenvalues coincide; by default the resolution of the
            dtype of ``a``.
        broadening: η as a fraction of the largest |λ|, for ``"broaden"``.
        check: whether values are checked (finite and symmetric input, ties). None checks on the CPU only, True on every
            device, False never. If values are not checked, also under ``torch.func`` and ``torch.compile``, the result
            for a matrix that is not symmetric is NaN, and so is, with ``ties="raise"``, a gradient that would
            raise.
        precision: dtype of the computation, float64 (complex128) by default; results have the dtype of ``a``.

    Returns:
        Ascending eigenvalues ``(*batch, n)`` and eigenvectors ``(*batch, n, n)`` in columns, each up to its sign or
        phase. Eigenvalues are real.

    Raises:
        ShapeError, DtypeError, NonFiniteError, SymmetryError: as in `matrix_function`.
        DomainError: an eigenvalue overflows.
        TieError: see ``ties``; or the loss depends on the phase of a complex vector.

    Gradient:
        dλ = diag(UᵀdAU), dU = U(K̃ᵀ∘(UᵀdAU)) with K̃ᵢⱼ = 1/(λᵢ − λⱼ); backward U((K̃ᵀ∘(UᵀG_U))_sym + diag(G_λ))Uᵀ.
        Second order by differentiating these, correct if no pair is tied. Never inf or NaN at ties, where the gradients
        of λ and U do not determine that of A, even if the loss does not depend on the choice of vectors. For functions
        of A use `matrix_function`, for eigenspaces `spectral_projector`: they are exact at ties. A loss of eigenvalues
        only never raises; the gradient of a repeated eigenvalue is that of the computed vector.

    Example:
        >>> import torch, matbackprop
        >>> a = torch.diag(torch.tensor([1.0, 3.0])).requires_grad_()
        >>> lam, u = matbackprop.eigh(a)
        >>> lam.prod().backward()
        >>> a.grad
        tensor([[3., 0.],
                [0., 1.]])

    Reference:
        Ionescu, Vantzos, Sminchisescu, "Matrix Backpropagation for Deep Networks with Structured Layers", Proposition
        "EIG Variations", with K̃ for K in dU and the adjoint symmetrized.
    """
    ready = prepare(a, "a", check, precision, sizes="rescale", symmetric=True)
    policy = tie_policy("eigh", ties, tie_tol, broadening, check, a, ready.x.dtype)
    with autocast_off(a.device.type):
        lam, u = apply(_Eigh, ready.x, policy)
        lam = ready.marked(ready.back(lam)).to(real_dtype(a.dtype))
        if ready.check_values:
            check_result(lam, "An eigenvalue", "Scale the matrices.")
        return Eigenpairs(lam, ready.marked(u).to(a.dtype))
