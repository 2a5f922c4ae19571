"""The EIG layer of the paper: eigenvalues and eigenvectors of symmetric matrices with both adjoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from matbackprop.functional._ties import TiePolicy, Ties, raise_deferred, tie_policy
from matbackprop.numerics import (
    autocast_off,
    check_finite,
    check_matrix,
    check_symmetric,
    compute_dtype,
    refuse_nested_forward_mode,
    symmetrize,
    wants_check,
)
from matbackprop.solvers import batched_eigh

__all__ = ["eigh"]


def _scale(lam: Tensor) -> Tensor:
    """The largest |λ| of each matrix, (*batch, 1, 1)."""
    return lam.abs().amax(-1)[..., None, None] if lam.shape[-1] else lam.sum(-1)[..., None, None]


def _gaps(lam: Tensor) -> Tensor:
    """λⱼ − λᵢ, the K̃ᵀ of the paper before inversion."""
    return lam.unsqueeze(-2) - lam.unsqueeze(-1)


def _off_diagonal(gaps: Tensor) -> Tensor:
    return ~torch.eye(gaps.shape[-1], dtype=torch.bool, device=gaps.device)


def _largest(a: Tensor) -> Tensor:
    return a.abs().amax((-2, -1), keepdim=True) if a.shape[-1] else a.sum((-2, -1), keepdim=True)


class _Eigh(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, policy: TiePolicy) -> tuple[Tensor, Tensor]:
        lam, u = batched_eigh(a)
        return lam.clone(), u.clone()  # a solver may hand out views, which forward mode does not take as outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.policy = inputs[1]
        ctx.set_materialize_grads(False)  # a zero gradient of U would meet 1/0 at a tie
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, g_lam: Tensor | None, g_u: Tensor | None) -> tuple[Tensor | None, None]:
        if g_lam is None and g_u is None:
            return None, None
        lam, u = ctx.saved_tensors
        inner = torch.zeros_like(u)
        if g_u is not None:
            gaps, scale = _gaps(lam), _scale(lam)
            seen = u.mT @ g_u
            raise_deferred()
            ctx.policy.report((ctx.policy.tied(gaps, scale) & _off_diagonal(gaps), seen - seen.mT, _largest(g_u)))
            inner = symmetrize(ctx.policy.invert(gaps, scale) * seen)
        if g_lam is not None:
            inner = inner + torch.diag_embed(g_lam)
        return u @ inner @ u.mT, None


class _EighForwardAD(_Eigh):  # a jvp in the base class would break fullgraph compilation
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _Eigh.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*output)

    @staticmethod
    def jvp(ctx: Any, da: Tensor, _: None) -> tuple[Tensor, Tensor]:
        refuse_nested_forward_mode("eigh")
        lam, u = ctx.saved_tensors
        gaps, scale = _gaps(lam), _scale(lam)
        variation = u.mT @ symmetrize(da) @ u
        ctx.policy.report((ctx.policy.tied(gaps, scale) & _off_diagonal(gaps), variation, _largest(da)))
        return variation.diagonal(dim1=-2, dim2=-1).clone(), u @ (ctx.policy.invert(gaps, scale) * variation)


def eigh(
    a: Tensor,
    *,
    ties: Ties = "raise",
    tie_tol: float | None = None,
    broadening: float = 1e-6,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Eigendecomposition of symmetric matrices with the adjoints of the paper's EIG proposition, corrected.

    .. math:: A = U \operatorname{diag}(\lambda) U^\top

    Args:
        a: symmetric matrices ``(*batch, n, n)``; the symmetric part is used.
        ties: what the gradient of U does with pairs of eigenvalues that coincide. ``"raise"``: leave them out, and
            raise when the loss depends on the choice of vectors inside a tie (its gradient is not defined there).
            ``"drop"``: leave them out with a GaugeWarning in that case. ``"broaden"``: use x/(x² + η²) for 1/x,
            smooth and biased.
        tie_tol: share of the largest |λ| below which two eigenvalues coincide; by default what the dtype of ``a``
            resolves.
        broadening: η as a share of the largest |λ|, for ``"broaden"``.
        check: whether values are checked (finite and symmetric input, a loss that sees the gauge). None checks at
            once on the CPU; on a GPU it skips the input and reports the gauge when the flag arrives, a few calls
            later or at `matbackprop.functional.raise_deferred`, so that the device is never waited for. True checks
            at once, False never.
        precision: dtype to compute in, float64 unless given; results have the dtype of ``a``.

    Returns:
        Ascending eigenvalues ``(*batch, n)`` and eigenvectors ``(*batch, n, n)`` in columns, each up to its sign.

    Raises:
        ShapeError, DtypeError: ``a`` is not a batch of square floating-point matrices.
        NonFiniteError, SymmetryError: ``a`` holds NaN or Inf, or is not symmetric.
        TieError: see ``ties``.

    Gradient:
        dλ = diag(UᵀdAU), dU = U(K̃ᵀ∘(UᵀdAU)) with K̃ᵢⱼ = 1/(λᵢ − λⱼ); backward U((K̃ᵀ∘(UᵀG_U))_sym + diag(G_λ))Uᵀ.
        Never inf or NaN at ties. Second order by differentiating these, right where no pair is tied. For functions of
        A use `matrix_function`.

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
        "EIG Variations", with K̃ for K in dU and the adjoint symmetrised.
    """
    check_matrix(a, "a", square=True)
    dtype = compute_dtype(a.dtype, precision)
    policy = tie_policy("eigh", ties, tie_tol, broadening, check, a, dtype)
    with autocast_off(a.device.type):
        if wants_check(check, a):
            check_finite(a, "a")
            check_symmetric(a, "a")
        kind = _Eigh if torch.compiler.is_compiling() else _EighForwardAD
        lam, u = kind.apply(symmetrize(a.to(dtype)), policy)
        return lam.to(a.dtype), u.to(a.dtype)
