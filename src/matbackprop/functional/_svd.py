"""Singular value decomposition, thin or full, of wide and tall matrices.

With dP = UᵀdXV split into its symmetric and antisymmetric parts, the rotations of the singular vectors are

    UᵀdU = dP_sym/(σⱼ − σᵢ) + dP_skew/(σⱼ + σᵢ),    VᵀdV = dP_sym/(σⱼ − σᵢ) − dP_skew/(σⱼ + σᵢ),

which is the paper's K∘(·) with σⱼ² − σᵢ² factored. Small singular values do not cause cancellation; only equal ones
divide by zero. For complex X, ᵀ is the conjugate transpose, and uᵢ and vᵢ share one free phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop._torch import differentiated_again, forward_mode_active, reverse_mode_only
from matbackprop.checks import check_finite, check_matrix, check_result, prepare, wants_check
from matbackprop.cuda import svd as kernels
from matbackprop.cuda.fallback import kernels_may_take
from matbackprop.functional._function import Operation, apply
from matbackprop.functional._ties import (
    TiePolicy,
    Ties,
    exceeds_rounding,
    gaps_of,
    largest_entry,
    rates_apart,
    receives_gradient,
    tie_policy,
    tied_pairs,
)
from matbackprop.numerics import autocast_off, compute_dtype, is_double, real_dtype, symmetrize
from matbackprop.refinement import KERNEL_OVERLAP
from matbackprop.solvers import batched_svd


class SingularTriples(NamedTuple):
    """The result of :func:`svd`, with the field names of torch.linalg.svd."""

    U: Tensor
    S: Tensor
    Vh: Tensor


def _skew(a: Tensor) -> Tensor:
    return 0.5 * (a - a.mH)


def _head(a: Tensor, k: int) -> Tensor:
    # The tensor itself if these are all columns, as batched gradients require.
    return a if a.shape[-1] == k else a.narrow(-1, 0, k)


def _tail(a: Tensor, k: int) -> Tensor:
    return a if k == 0 else a.narrow(-1, k, a.shape[-1] - k)


def _sums_of(s: Tensor) -> Tensor:
    return s.unsqueeze(-1) + s.unsqueeze(-2)


def _zero_pairs(s: Tensor, policy: TiePolicy) -> Tensor:
    """Return which singular values i ≠ j are both zero; their left and right vectors rotate independently."""
    return tied_pairs(s, policy) & policy.tied(_sums_of(s), largest_entry(s.unsqueeze(-1)))


def _free_phases(even: Tensor, odd: Tensor, s: Tensor, policy: TiePolicy, size: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Masks of free phases: that of uᵢ and vᵢ together, and the relative one if σᵢ is zero."""
    if not even.is_complex():
        return []
    zero = policy.tied(s, largest_entry(s.unsqueeze(-1)).squeeze(-1)).unsqueeze(-2)
    phase = odd.diagonal(dim1=-2, dim2=-1).imag.unsqueeze(-2)
    return [*policy.phases(even, size), (zero, policy.gauge_dependent(phase, size))]


class _Saved(NamedTuple):
    u: Tensor
    s: Tensor
    vh: Tensor
    policy: TiePolicy


class _SVD(Operation):
    forward_twice = "svd"

    @staticmethod
    def forward(x: Tensor, full: bool, fine: bool, policy: TiePolicy) -> tuple[Tensor, Tensor, Tensor]:
        out = batched_svd(x, full_matrices=full, fine=fine)
        if forward_mode_active():  # it does not accept views as outputs
            u, s, vh = (t.clone(memory_format=torch.contiguous_format) for t in out)
            return u, s, vh
        return out

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor, Tensor]) -> _Saved:
        return _Saved(*outputs, inputs[3])

    @staticmethod
    def adjoint(
        saved: _Saved, needed: Sequence[bool], g_u: Tensor | None, g_s: Tensor | None, g_vh: Tensor | None
    ) -> Tensor:
        u, s, vh, policy = saved
        gradients = g_u, g_s, g_vh
        if not (g_u is None and g_vh is None) and _kernel_takes(u, s, vh, *gradients):
            return _adjoint_by_kernel(saved, gradients)
        v, g_v = vh.mH, None if g_vh is None else g_vh.mH
        if u.shape[-2] >= v.shape[-2]:
            return _adjoint(u, s, v, g_u, g_s, g_v, policy)
        return _adjoint(v, s, u, g_v, g_s, g_u, policy).mH.resolve_conj()

    @staticmethod
    def tangent(saved: _Saved, dx: Tensor, *_: None) -> tuple[Tensor, Tensor, Tensor]:
        u, s, vh, policy = saved
        v = vh.mH
        if u.shape[-2] >= v.shape[-2]:
            du, ds, dv = _tangent(u, s, v, dx, policy)
        else:
            dv, ds, du = _tangent(v, s, u, dx.mH, policy)
        return du, ds, dv.mH


def _adjoint(
    u: Tensor, s: Tensor, v: Tensor, g_u: Tensor | None, g_s: Tensor | None, g_v: Tensor | None, policy: TiePolicy
) -> Tensor:
    """dL/dX for X ``(*batch, m, n)`` with m ≥ n; U is thin or full."""
    k = s.shape[-1]
    first = _head(u, k)
    if g_u is None and g_v is None:
        return (first * g_s.unsqueeze(-2)) @ v.mH  # type: ignore[union-attr]
    if not u.is_complex() and u.shape[-1] == k and policy.apart(torch.nn.functional.pad(s, (0, 1))):
        return _adjoint_apart(u, s, v, g_u, g_s, g_v)
    g_u = torch.zeros_like(u) if g_u is None else g_u
    g_v = torch.zeros_like(v) if g_v is None else g_v
    g_first = _head(g_u, k)
    scale = largest_entry(s.unsqueeze(-1))
    within_u, within_v = first.mH @ g_first, v.mH @ g_v
    even, odd = _skew(within_u) + _skew(within_v), _skew(within_u) - _skew(within_v)
    inner = even * policy.invert(gaps_of(s), scale) + odd * policy.invert(_sums_of(s), scale)
    if g_s is not None:
        inner = inner + torch.diag_embed(g_s)
    size = torch.maximum(largest_entry(g_u), largest_entry(g_v))
    used = receives_gradient(g_first, g_s) | receives_gradient(g_v, None)
    ties = [
        (tied_pairs(s, policy), policy.visible(used, even, size)),
        (_zero_pairs(s, policy), policy.visible(used, odd, size)),
        *_free_phases(even, odd, s, policy, size),
    ]
    if u.shape[-2] == k:
        return u @ policy.enforce(inner, *ties) @ v.mH
    outside = _outside(u, g_u, within_u)
    zero = policy.tied(s, scale.squeeze(-1)).unsqueeze(-2)
    if policy.ties == "raise":
        ties.append((zero, receives_gradient(g_first, g_s).unsqueeze(-2)))
    else:
        ties.append((zero, policy.gauge_dependent(outside, size)))
    if u.shape[-1] > k:
        rest = _skew(_tail(u, k).mH @ _tail(g_u, k))
        ties.append((torch.ones_like(rest, dtype=torch.bool), policy.gauge_dependent(rest, size)))
    inner = policy.enforce(inner, *ties)
    return (first @ inner + outside * policy.invert(s, scale.squeeze(-1)).unsqueeze(-2)) @ v.mH


def _adjoint_apart(
    u: Tensor, s: Tensor, v: Tensor, g_u: Tensor | None, g_s: Tensor | None, g_v: Tensor | None
) -> Tensor:
    """`_adjoint` for thin real factors and values that are apart and not zero, with fewer passes over memory."""
    zero = s.new_zeros(*s.shape, s.shape[-1])
    within_u = zero if g_u is None else u.mT @ g_u
    within_v = zero if g_v is None else v.mT @ g_v
    even, odd = within_u + within_v, within_u - within_v
    inner = (even - even.mT) * rates_apart(2 * s) + (odd - odd.mT) * _sums_of(2 * s).reciprocal_()
    if g_s is not None:
        inner = inner + torch.diag_embed(g_s)
    if u.shape[-2] == u.shape[-1] or g_u is None:
        return u @ (inner @ v.mT)
    rate = s.reciprocal().unsqueeze(-2)
    return u @ ((inner - within_u * rate) @ v.mT) + g_u @ (v * rate).mT


def _tangent(u: Tensor, s: Tensor, v: Tensor, dx: Tensor, policy: TiePolicy) -> tuple[Tensor, Tensor, Tensor]:
    """dU, dσ and dV for X ``(*batch, m, n)`` with m ≥ n."""
    k = s.shape[-1]
    first = _head(u, k)
    scale, size = largest_entry(s.unsqueeze(-1)), largest_entry(dx)
    dp = first.mH @ dx @ v
    even, odd = symmetrize(dp), _skew(dp)
    ties = [
        (tied_pairs(s, policy), exceeds_rounding(even, size)),
        (_zero_pairs(s, policy), exceeds_rounding(odd, size)),
    ]
    even, odd = even * policy.invert(gaps_of(s), scale), odd * policy.invert(_sums_of(s), scale)
    du, dv = first @ (even + odd), v @ (even - odd)
    if u.shape[-2] > k:
        moved = dx @ v
        moved = moved - first @ (first.mH @ moved)
        ties.append((policy.tied(s, scale.squeeze(-1)).unsqueeze(-2), exceeds_rounding(moved, size)))
        change = moved * policy.invert(s, scale.squeeze(-1)).unsqueeze(-2)
        du = torch.cat([du + change, -first @ (change.mH @ _tail(u, k))], -1)
    return policy.enforce(du, *ties), dp.diagonal(dim1=-2, dim2=-1).real.clone(), policy.enforce(dv, *ties)


class _SVDByKernel(Operation):
    """For float32 matrices: factors in float32, and in float64 for the adjoint."""

    @staticmethod
    def forward(x: Tensor, policy: TiePolicy) -> tuple[Tensor, ...]:
        factors, rounded = kernels.factor(x, KERNEL_OVERLAP[False])
        return *rounded, *factors

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> _Saved:
        _, _, _, u, s, vh = outputs
        return _Saved(u, s, vh, inputs[1])

    @staticmethod
    def adjoint(saved: _Saved, needed: Sequence[bool], *gradients: Any) -> Any:
        rounded, factors = gradients[:3], gradients[3:]
        given = [g for g in rounded if g is not None]
        first_order = not differentiated_again() and all(g is None for g in factors)
        if first_order and kernels_may_take(saved.s, *given):
            return _adjoint_by_kernel(saved, rounded)
        total = []
        for g, more in zip(rounded, factors, strict=True):
            wide = None if g is None else g.double()
            total.append(wide if more is None else more if wide is None else wide + more)
        return _SVD.adjoint(saved, needed, *total).float()


def _kernel_takes_input(a: Tensor) -> bool:
    return (
        a.is_cuda
        and reverse_mode_only()
        and kernels.takes(a, torch.float32)
        and not kernels.long(max(a.shape[-2:]), a.shape[:-2].numel())
    )


def _kernel_takes(u: Tensor, s: Tensor, vh: Tensor, *gradients: Tensor | None) -> bool:
    """Whether the adjoint is one kernel: thin factors, and no derivative of the adjoint itself."""
    return (
        u.is_cuda
        and u.shape[-1] == s.shape[-1] == vh.shape[-2]
        and not differentiated_again()
        and kernels.takes(u)
        and not kernels.long(max(u.shape[-2], vh.shape[-1]), s.shape[:-1].numel())
        and kernels_may_take(s, vh, *(g for g in gradients if g is not None))
    )


def _adjoint_by_kernel(saved: _Saved, gradients: tuple[Any, ...]) -> Tensor:
    u, s, vh, policy = saved
    flag = torch.zeros((), dtype=torch.bool, device=u.device)
    broadening = policy.broadening if policy.ties == "broaden" else 0.0
    gauge = -1.0 if policy.ties == "raise" else policy.gauge_tolerance
    out = kernels.adjoint((u, s, vh), gradients, policy.tolerance, broadening, gauge, flag)
    return policy.enforce_flag(out, flag)


def _outside(long: Tensor, g: Tensor, within: Tensor) -> Tensor:
    """The part of a gradient that rotates the first k vectors out of their span, with U₂ᵀdU₂ = 0 for the others."""
    k = within.shape[-1]
    first, g_first = _head(long, k), _head(g, k)
    if long.shape[-1] == k:
        return g_first - first @ within
    rest, g_rest = _tail(long, k), _tail(g, k)
    return rest @ (rest.mH @ g_first - g_rest.mH @ first)


def svd(
    a: Tensor,
    full_matrices: bool = False,
    *,
    ties: Ties = "raise",
    tie_tol: float | None = None,
    broadening: float = 1e-6,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> SingularTriples:
    r"""Singular value decomposition.

    .. math:: A = U \operatorname{diag}(\sigma) V^\top

    The factors, their orthogonality and UΣVᵀ = A are accurate to the rounding of the dtype of ``a`` for any spectrum.
    With ``precision=torch.float32`` the accuracy is that of torch.linalg.svd in float32.

    Args:
        a: matrices ``(*batch, m, n)``, wide or tall, real or complex (ᵀ is then the conjugate transpose).
        full_matrices: whether U and V are square. Unlike in torch.linalg.svd, the default is False. The extra vectors
            follow the paper's gauge U₂ᵀdU₂ = 0.
        ties: treatment of repeated or zero singular values in the gradients of U and V: ``"raise"``, ``"drop"`` or
            ``"broaden"``, as in `eigh`.
        tie_tol: fraction of the largest σ below which a gap counts as zero. By default it depends on the dtype.
        broadening: η as a fraction of the largest σ, for ``"broaden"``.
        check, precision: as in `eigh`.

    Returns:
        Named tuple of U ``(*batch, m, k)``, descending σ ``(*batch, k)`` and Vᵀ ``(*batch, k, n)`` with k = min(m, n),
        in the dtype of ``a``. With ``full_matrices``, U is ``(*batch, m, m)`` and Vᵀ is ``(*batch, n, n)``.

    Raises:
        DomainError: a singular value overflows.
        TieError: see ``ties``.

    Gradient:
        The paper's dσ, dU and dV with σᵢ² − σⱼ² factored as (σᵢ − σⱼ)(σᵢ + σⱼ), and their adjoint for all three
        outputs. Higher orders are correct if no pair is tied. A loss that depends on the choice of U₂ (U₂ᵀG_U₂ is not
        symmetric) counts as gauge-dependent.

    Example:
        >>> import torch, matbackprop
        >>> a = torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]], requires_grad=True)
        >>> u, s, vh = matbackprop.svd(a)
        >>> s.sum().backward()  # the nuclear norm
        >>> a.grad
        tensor([[1., 0., 0.],
                [0., 1., 0.]])

    Reference:
        Ionescu et al. (2015), Proposition "SVD Variations", with corrections.
    """
    check_matrix(a, "a", or_complex=True)
    dtype = compute_dtype(precision, a.dtype)
    policy = tie_policy("svd", ties, tie_tol, broadening, check, a, dtype)
    with autocast_off(a.device.type):
        if dtype == torch.float64 and not full_matrices and _kernel_takes_input(a):
            if wants_check(check, a):
                check_finite(a, "a")
            u, s, vh, *_ = apply(_SVDByKernel, a, policy)
            return SingularTriples(u, s, vh)
        ready = prepare(a, "a", check, precision, sizes="rescale")
        u, s, vh = apply(_SVD, ready.x, full_matrices, is_double(a.dtype), policy)
        s = ready.back(s.to(real_dtype(a.dtype)))
        if ready.check_values:
            check_result(s, "A singular value", "Scale the matrices.")
        return SingularTriples(u.to(a.dtype), s, vh.to(a.dtype))
