"""Orthogonal projectors: on the span of a matrix, and on the leading eigenvectors of a symmetric one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from matbackprop.errors import DomainError, OrderError, TieError
from matbackprop.functional._spans import forward_mode, rank_tolerance
from matbackprop.numerics import (
    autocast_off,
    check_finite,
    check_matrix,
    check_symmetric,
    compute_dtype,
    keep_signature,
    refuse_nested_forward_mode,
    symmetrize,
    wants_check,
)
from matbackprop.solvers import batched_eigh

__all__ = ["projector", "spectral_projector"]


def _span_and_inverse(a: Tensor, tol: float, symmetric: bool) -> tuple[Tensor, Tensor]:
    if symmetric:
        values, u = batched_eigh(a)
        size, vt = values.abs(), u.mT
        largest = size.amax(-1, keepdim=True) if size.shape[-1] else size
    else:
        u, values, vt = torch.linalg.svd(a, full_matrices=False)
        size, largest = values, values[..., :1]
    kept = (size > tol * largest) & (size > 0)
    inverse = torch.where(kept, values, 1).reciprocal() * kept
    return symmetrize((u * kept.unsqueeze(-2)) @ u.mT), (vt.mT * inverse.unsqueeze(-2)) @ u.mT


class _Projector(Function):
    """Π = AA⁺ and A⁺; both are outputs, so that the adjoint's own derivative sees how they move."""

    generate_vmap_rule = True

    @staticmethod
    @keep_signature
    def forward(a: Tensor, tol: float, symmetric: bool) -> tuple[Tensor, Tensor]:
        return _span_and_inverse(a, tol, symmetric)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[0], *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        a, onto, inverse = ctx.saved_tensors
        g_onto, g_inverse = grads
        g_a = torch.zeros_like(a)
        if g_onto is not None:
            g = 2 * symmetrize(g_onto)
            g_a = g_a + (g - onto @ g) @ inverse.mT
        if g_inverse is not None:  # Golub and Pereyra
            turned = g_inverse.mT
            outside = turned - onto @ turned
            g_a = g_a - inverse.mT @ g_inverse @ inverse.mT + outside @ inverse @ inverse.mT
            g_a = g_a + inverse.mT @ inverse @ (turned - (turned @ inverse) @ a)
        return g_a, None, None


class _ProjectorForwardAD(_Projector):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _Projector.setup_context(ctx, inputs, output)
        ctx.save_for_forward(inputs[0], *output)

    @staticmethod
    def jvp(ctx: Any, da: Tensor, *_: None) -> tuple[Tensor, Tensor]:
        refuse_nested_forward_mode("projector")
        a, onto, inverse = ctx.saved_tensors
        moved = (da - onto @ da) @ inverse
        turned = da.mT - da.mT @ onto
        d_inverse = -(inverse @ da @ inverse) + inverse @ inverse.mT @ turned
        d_inverse = d_inverse + (da.mT - inverse @ (a @ da.mT)) @ inverse.mT @ inverse
        return 2 * symmetrize(moved), d_inverse


def projector(
    a: Tensor,
    *,
    symmetric: bool = False,
    rank_tol: float | torch.dtype | None = None,
    precision: torch.dtype | None = None,
    check: bool | None = None,
) -> Tensor:
    r"""Orthogonal projector on the span of the columns of A, :math:`\Pi_A = AA^+`.

    Args:
        a: matrices ``(*b, m, n)`` of any shape and rank.
        symmetric: A is symmetric and stays so: use its eigendecomposition and give a symmetric gradient.
        rank_tol: singular values below this share of the largest count as zero. By default it follows the dtype of
            ``a``; pass a dtype to say what precision the data carry (``torch.float32`` for a float32 map cast to
            float64).
        precision: dtype of the computation; float64 by default.
        check: look at values (finiteness, symmetry): ``None`` on the CPU only, ``True`` always, ``False`` never.

    Returns:
        Π_A ``(*b, m, m)`` in the dtype of ``a``; zero for A = 0.

    Raises:
        ShapeError: not a matrix, or not square with ``symmetric=True``.
        DtypeError: not floating point.
        NonFiniteError: NaN or Inf entries.
        SymmetryError: ``symmetric=True`` and A is not.
        DomainError: a tolerance out of range.

    Gradient:
        dΠ = 2((I − Π) dA A⁺)_sym and ∂L/∂A = 2(I − Π) G_sym (A⁺)ᵀ, with (·)_sym around it for ``symmetric=True``. It
        holds for variations that keep the rank; any other makes Π jump, and has no gradient. All orders, forward mode,
        vmap.

    Example:
        >>> import torch
        >>> from matbackprop.functional.projector import projector
        >>> a = torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 2.0]])
        >>> projector(a)
        tensor([[0.5000, 0.0000, 0.5000],
                [0.0000, 0.0000, 0.0000],
                [0.5000, 0.0000, 0.5000]])

    Reference:
        Ionescu, Vantzos, Sminchisescu, Training Deep Networks with Structured Layers by Matrix Backpropagation, Lemma
        1. Golub and Pereyra, The differentiation of pseudo-inverses, SIAM J. Numer. Anal. 10 (1973).
    """
    check_matrix(a, "a", square=symmetric)
    if wants_check(check, a):
        check_finite(a, "a")
        if symmetric:
            check_symmetric(a, "a")
    dtype = compute_dtype(a.dtype, precision)
    tol = rank_tolerance(a.dtype, dtype, rank_tol)
    with autocast_off(a.device.type):
        x = a.to(dtype)
        function = forward_mode(_Projector, _ProjectorForwardAD)
        onto, _ = function.apply(symmetrize(x) if symmetric else x, tol, symmetric)
        return onto.to(a.dtype)


def _cross_gaps(values: Tensor, chosen: Tensor) -> Tensor:
    """Γᵢⱼ = 1/(λᵢ − λⱼ) for i chosen and j not, symmetric, zero inside the blocks and across an exact tie."""
    gap = values.unsqueeze(-1) - values.unsqueeze(-2)
    cross = (chosen.unsqueeze(-1) != chosen.unsqueeze(-2)) & (gap != 0)
    return torch.where(cross, gap, 1).reciprocal().abs() * cross


def _along(e: Tensor, values: Tensor, u: Tensor, chosen: Tensor) -> Tensor:
    """First derivative of the projector in the direction E: U(Γ ∘ (UᵀEU))Uᵀ."""
    return u @ (_cross_gaps(values, chosen) * (u.mT @ e @ u)) @ u.mT


class _ProjectorSecond(Function):
    """Second derivative of the projector in the directions E and H.

    The second divided differences of a step function are products of entries of Γ, so matrix products are all it takes,
    and nothing is divided by a gap inside a block.
    """

    generate_vmap_rule = True

    @staticmethod
    @keep_signature
    def forward(e: Tensor, h: Tensor, a: Tensor, values: Tensor, u: Tensor, chosen: Tensor) -> Tensor:
        gamma = _cross_gaps(values, chosen)
        same = chosen.unsqueeze(-1) == chosen.unsqueeze(-2)
        sign = torch.where(chosen, 1.0, -1.0).to(u.dtype).unsqueeze(-1)
        e_hat, h_hat = u.mT @ e @ u, u.mT @ h @ u
        e_cross, h_cross, e_same, h_same = gamma * e_hat, gamma * h_hat, same * e_hat, same * h_hat
        inside = e_cross @ h_cross + h_cross @ e_cross
        across = e_cross @ h_same + h_cross @ e_same - e_same @ h_cross - h_same @ e_cross
        return u @ (sign * (gamma * across - same * inside)) @ u.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, ...]:
        raise OrderError("spectral_projector has derivatives of the first and second order; a third was asked for.")


class _ProjectorDerivative(Function):
    """The first derivative, linear in E and self-adjoint; its own derivative in A is the second one."""

    generate_vmap_rule = True

    @staticmethod
    @keep_signature
    def forward(e: Tensor, a: Tensor, values: Tensor, u: Tensor, chosen: Tensor) -> Tensor:
        return _along(e, values, u, chosen)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, h: Tensor) -> tuple[Tensor | None, ...]:
        e, a, values, u, chosen = ctx.saved_tensors
        h = symmetrize(h)
        g_e = g_a = None
        if ctx.needs_input_grad[0]:
            g_e = forward_mode(_ProjectorDerivative, _ProjectorDerivativeForwardAD).apply(h, a, values, u, chosen)
        if ctx.needs_input_grad[1]:
            g_a = _ProjectorSecond.apply(e, h, a, values, u, chosen)
        return g_e, g_a, None, None, None


class _ProjectorDerivativeForwardAD(_ProjectorDerivative):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _ProjectorDerivative.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, de: Tensor | None, da: Tensor | None, *_: None) -> Tensor:
        refuse_nested_forward_mode("spectral_projector")
        e, a, values, u, chosen = ctx.saved_tensors
        out = torch.zeros_like(e) if de is None else _along(de, values, u, chosen)
        return out if da is None else out + _ProjectorSecond.apply(e, symmetrize(da), a, values, u, chosen)


class _SpectralProjector(Function):
    generate_vmap_rule = True

    @staticmethod
    @keep_signature
    def forward(a: Tensor, rank: int | None, threshold: float | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values, u = batched_eigh(a)
        if threshold is not None:
            chosen = values > threshold
        else:
            n, rank = values.shape[-1], rank or 0
            chosen = (torch.arange(n, device=a.device) >= n - rank).expand(values.shape)
        return symmetrize((u * chosen.unsqueeze(-2)) @ u.mT), values, u, chosen.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, values, u, chosen = output
        # Safe here: the derivative in A of what backward computes is given by _ProjectorDerivative itself.
        ctx.mark_non_differentiable(values, u, chosen)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[0], values, u, chosen)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grads[0] is None:
            return None, None, None
        a, values, u, chosen = ctx.saved_tensors
        function = forward_mode(_ProjectorDerivative, _ProjectorDerivativeForwardAD)
        return function.apply(symmetrize(grads[0]), a, values, u, chosen), None, None


class _SpectralProjectorForwardAD(_SpectralProjector):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _SpectralProjector.setup_context(ctx, inputs, output)
        ctx.save_for_forward(inputs[0], *output[1:])

    @staticmethod
    def jvp(ctx: Any, da: Tensor, *_: None) -> tuple[Tensor, None, None, None]:
        refuse_nested_forward_mode("spectral_projector")
        a, values, u, chosen = ctx.saved_tensors
        moved = _ProjectorDerivativeForwardAD.apply(symmetrize(da), a, values, u, chosen)
        return moved, None, None, None


def _check_gap(values: Tensor, chosen: Tensor) -> None:
    inside = torch.where(chosen, values, torch.inf).amin(-1)
    outside = torch.where(chosen, -torch.inf, values).amax(-1)
    scale = values.abs().amax(-1)
    tied = inside - outside <= 16 * values.shape[-1] * torch.finfo(values.dtype).eps * scale
    if bool(tied.any()):
        raise TieError(
            f"{int(tied.sum())} of {max(tied.numel(), 1)} matrices have equal eigenvalues on both sides of the cut "
            f"(gap {float((inside - outside).min()):.3g}), so the projector is not defined; choose another rank or "
            f"threshold, or pass check=False to drop the tied pairs from the gradient."
        )


def spectral_projector(
    a: Tensor,
    *,
    rank: int | None = None,
    threshold: float | None = None,
    precision: torch.dtype | None = None,
    check: bool | None = None,
) -> Tensor:
    r"""Projector on the leading eigenvectors of a symmetric matrix, :math:`\Pi = U_1U_1^\top`.

    U₁ holds the eigenvectors of the ``rank`` largest eigenvalues, or of those above ``threshold``. Give one of the two.

    Args:
        a: symmetric matrices ``(*b, n, n)``.
        rank: how many eigenvectors, 0 … n.
        threshold: keep eigenvalues larger than this.
        precision: dtype of the computation; float64 by default.
        check: look at values (finiteness, symmetry, a gap at the cut): ``None`` on the CPU only, ``True`` always,
            ``False`` never.

    Returns:
        Π ``(*b, n, n)`` in the dtype of ``a``.

    Raises:
        DomainError: not exactly one of ``rank`` and ``threshold``, or a rank out of range.
        TieError: equal eigenvalues on both sides of the cut.
        ShapeError, DtypeError, NonFiniteError, SymmetryError: as for :func:`projector`.

    Gradient:
        U(Γ ∘ (UᵀG_symU))Uᵀ with Γᵢⱼ = 1/(λᵢ − λⱼ) across the cut and 0 inside each block, so repeated eigenvalues on
        one side do no harm. First and second order, forward mode, vmap. Lemma 1 of the paper is not the derivative of a
        truncated projector (it lacks the eigenvalues below the cut).

    Example:
        >>> import torch
        >>> from matbackprop.functional.projector import spectral_projector
        >>> spectral_projector(torch.diag(torch.tensor([3.0, 1.0, 2.0])), rank=2).diagonal()
        tensor([1., 0., 1.])
    """
    check_matrix(a, "a", square=True)
    n = a.shape[-1]
    if (rank is None) == (threshold is None):
        raise DomainError(f"give either rank or threshold, got rank={rank}, threshold={threshold}.")
    if threshold is not None and math.isnan(threshold):
        raise DomainError("threshold must be a number, got NaN, above which no eigenvalue lies.")
    if rank is not None and not 0 <= rank <= n:
        raise DomainError(f"rank must lie in 0 … {n} for {n}×{n} matrices, got {rank}.")
    wanted = wants_check(check, a)
    if wanted:
        check_finite(a, "a")
        check_symmetric(a, "a")
    with autocast_off(a.device.type):
        x = symmetrize(a.to(compute_dtype(a.dtype, precision)))
        function = forward_mode(_SpectralProjector, _SpectralProjectorForwardAD)
        onto, values, _, chosen = function.apply(x, rank, threshold)
        if wanted and values.numel():
            _check_gap(values, chosen)
        return onto.to(a.dtype)
