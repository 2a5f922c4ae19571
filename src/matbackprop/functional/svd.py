"""The SVD layer of the paper, thin and full, for wide and tall matrices, with the adjoints of all three factors.

With dP = UᵀdXV split into its symmetric and antisymmetric parts, the rotations of the singular vectors are

    UᵀdU = dP_sym/(σⱼ − σᵢ) + dP_skew/(σⱼ + σᵢ),    VᵀdV = dP_sym/(σⱼ − σᵢ) − dP_skew/(σⱼ + σᵢ),

which is the paper's K∘(·) with σⱼ² − σᵢ² factored: only a true tie of singular values divides by zero, two small ones
do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from matbackprop.functional._ties import TiePolicy, Ties, raise_deferred, tie_policy
from matbackprop.functional.eigh import _gaps, _largest, _off_diagonal, _scale
from matbackprop.numerics import (
    autocast_off,
    check_finite,
    check_matrix,
    compute_dtype,
    refuse_nested_forward_mode,
    symmetrize,
    wants_check,
)

__all__ = ["svd"]


def _skew(a: Tensor) -> Tensor:
    return 0.5 * (a - a.mT)


def _head(a: Tensor, k: int) -> Tensor:
    """The first k columns; the tensor itself where these are all, which batched gradients need."""
    return a if a.shape[-1] == k else a.narrow(-1, 0, k)


class _SVD(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, full: bool, policy: TiePolicy) -> tuple[Tensor, Tensor, Tensor]:
        u, s, vh = torch.linalg.svd(x, full_matrices=full)
        return u, s, vh

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, _, ctx.policy = inputs
        ctx.tall, ctx.wide = x.shape[-2] > x.shape[-1], x.shape[-2] < x.shape[-1]
        ctx.set_materialize_grads(False)  # a zero gradient of U or V would meet 1/0 at a tie
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(
        ctx: Any, g_u: Tensor | None, g_s: Tensor | None, g_vh: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        if g_u is None and g_s is None and g_vh is None:
            return None, None, None
        u, s, vh = ctx.saved_tensors
        k, policy = s.shape[-1], ctx.policy
        u1, vh1 = _head(u, k), vh if vh.shape[-2] == k else vh.narrow(-2, 0, k)
        inner = torch.zeros_like(s.unsqueeze(-1) * s.unsqueeze(-2)) if g_s is None else torch.diag_embed(g_s)
        outer = None
        if g_u is not None or g_vh is not None:
            raise_deferred()
            g_u = torch.zeros_like(u) if g_u is None else g_u
            g_v = (torch.zeros_like(vh) if g_vh is None else g_vh).mT
            scale, gaps = _scale(s), _gaps(s)
            sums = s.unsqueeze(-1) + s.unsqueeze(-2)
            within_u, within_v = u1.mT @ _head(g_u, k), vh1 @ _head(g_v, k)
            ju, jv = _skew(within_u), _skew(within_v)
            size = torch.maximum(_largest(g_u), _largest(g_v))
            parts: list[tuple[Tensor, Tensor, Tensor | float]] = [
                (policy.tied(gaps, scale) & _off_diagonal(gaps), ju + jv, size),
                (policy.tied(sums, scale), ju - jv, size),
            ]
            inner = inner + (ju + jv) * policy.invert(gaps, scale) + (ju - jv) * policy.invert(sums, scale)
            if ctx.tall or ctx.wide:  # the longer side has vectors outside the span of the factors
                long, g_long, within = (u, g_u, within_u) if ctx.tall else (vh.mT, g_v, within_v)
                outside = _outside(long, g_long, within)
                zero = policy.tied(s, scale.squeeze(-1)).unsqueeze(-2)
                parts.append((zero, outside, size))
                if long.shape[-1] > k:
                    rest = _skew(long[..., k:].mT @ g_long[..., k:])
                    parts.append((torch.ones_like(rest, dtype=torch.bool), rest, size))
                outer = outside * policy.invert(s, scale.squeeze(-1)).unsqueeze(-2)
            policy.report(*parts)
        total = u1 @ inner
        if outer is not None and ctx.tall:
            total = total + outer
        total = total @ vh1
        if outer is not None and ctx.wide:
            total = total + u1 @ outer.mT
        return total, None, None


def _outside(long: Tensor, g: Tensor, within: Tensor) -> Tensor:
    """The part of a gradient that turns the first k vectors out of their span, with U₂ᵀdU₂ = 0 for the others.

    ``within`` (k, k) is the product of the first vectors with their gradient.
    """
    k = within.shape[-1]
    first, g_first = _head(long, k), _head(g, k)
    if long.shape[-1] == k:
        return g_first - first @ within
    rest, g_rest = long[..., k:], g[..., k:]
    return rest @ (rest.mT @ g_first - g_rest.mT @ first)


class _SVDForwardAD(_SVD):  # a jvp in the base class would break fullgraph compilation
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _SVD.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*output)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: None) -> tuple[Tensor, Tensor, Tensor]:
        refuse_nested_forward_mode("svd")
        u, s, vh = ctx.saved_tensors
        k, policy = s.shape[-1], ctx.policy
        u1, v = _head(u, k), vh.mT
        v1 = _head(v, k)
        scale, gaps = _scale(s), _gaps(s)
        sums = s.unsqueeze(-1) + s.unsqueeze(-2)
        dp = u1.mT @ dx @ v1
        even, odd = symmetrize(dp), _skew(dp)
        size = _largest(dx)
        parts: list[tuple[Tensor, Tensor, Tensor | float]] = [
            (policy.tied(gaps, scale) & _off_diagonal(gaps), even, size),
            (policy.tied(sums, scale), odd, size),
        ]
        even, odd = even * policy.invert(gaps, scale), odd * policy.invert(sums, scale)
        du, dv = u1 @ (even + odd), v1 @ (even - odd)
        if ctx.tall or ctx.wide:
            long, moved = (u, dx @ v1) if ctx.tall else (v, dx.mT @ u1)
            first = _head(long, k)
            parts.append((policy.tied(s, scale.squeeze(-1)).unsqueeze(-2), moved - first @ (first.mT @ moved), size))
            turn = moved * policy.invert(s, scale.squeeze(-1)).unsqueeze(-2)
            if long.shape[-1] == k:
                change = turn - first @ (first.mT @ turn)
                rest = turn[..., :0]
            else:
                rest = long[..., k:]
                q = rest.mT @ turn
                change, rest = rest @ q, -first @ q.mT
            if ctx.tall:
                du = torch.cat([du + change, rest], -1)
            else:
                dv = torch.cat([dv + change, rest], -1)
        policy.report(*parts)
        return du, dp.diagonal(dim1=-2, dim2=-1).clone(), dv.mT


def svd(
    a: Tensor,
    full_matrices: bool = False,
    *,
    ties: Ties = "raise",
    tie_tol: float | None = None,
    broadening: float = 1e-6,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Singular value decomposition with the adjoints of the paper's SVD proposition, corrected and for any shape.

    .. math:: A = U \operatorname{diag}(\sigma) V^\top

    Args:
        a: matrices ``(*batch, m, n)``, wide or tall.
        full_matrices: whether U and V are square. The extra vectors follow the paper's gauge choice U₂ᵀdU₂ = 0.
        ties: what the gradients of U and V do where singular values coincide, or are zero. ``"raise"``: leave such
            pairs out, and raise when the loss depends on the choice of vectors (its gradient is not defined there).
            ``"drop"``: leave them out with a GaugeWarning in that case. ``"broaden"``: use x/(x² + η²) for 1/x,
            smooth and biased.
        tie_tol: share of the largest σ below which a gap is zero; by default what the dtype of ``a`` resolves.
        broadening: η as a share of the largest σ, for ``"broaden"``.
        check: whether values are checked, as in `eigh`: None never waits for a GPU.
        precision: dtype to compute in, float64 unless given; results have the dtype of ``a``.

    Returns:
        U ``(*batch, m, k)``, σ ``(*batch, k)`` descending and Vᵀ ``(*batch, k, n)`` with k = min(m, n); with
        ``full_matrices`` U is ``(*batch, m, m)`` and Vᵀ ``(*batch, n, n)``.

    Raises:
        ShapeError, DtypeError: ``a`` is not a batch of floating-point matrices.
        NonFiniteError: ``a`` holds NaN or Inf.
        TieError: see ``ties``.

    Gradient:
        The paper's dσ, dU, dV with σᵢ² − σⱼ² factored (module text), and their adjoint for all three outputs. Never
        inf or NaN at ties. Second order by differentiating these, right where no pair is tied. A loss that sees the
        choice of U₂ (its U₂ᵀG_U₂ is not symmetric) counts as gauge-dependent.

    Example:
        >>> import torch, matbackprop
        >>> a = torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]], requires_grad=True)
        >>> u, s, vh = matbackprop.svd(a)
        >>> s.sum().backward()  # the nuclear norm
        >>> a.grad
        tensor([[1., 0., 0.],
                [0., 1., 0.]])

    Reference:
        Ionescu, Vantzos, Sminchisescu, "Matrix Backpropagation for Deep Networks with Structured Layers", Proposition
        "SVD Variations".
    """
    check_matrix(a, "a")
    dtype = compute_dtype(a.dtype, precision)
    policy = tie_policy("svd", ties, tie_tol, broadening, check, a, dtype)
    with autocast_off(a.device.type):
        if wants_check(check, a):
            check_finite(a, "a")
        kind = _SVD if torch.compiler.is_compiling() else _SVDForwardAD
        u, s, vh = kind.apply(a.to(dtype), full_matrices, policy)
        return u.to(a.dtype), s.to(a.dtype), vh.to(a.dtype)
