"""Eigenvectors of a Gram matrix XXᵀ to the digits of X. For complex X, ᵀ is the conjugate transpose here.

An eigensolver computes eigenvalues and eigenvectors of XXᵀ to rounding of the largest eigenvalue, so small eigenvalues
lose their digits and their eigenvectors mix. Y = QᵀX, computed from X, has these digits: its rows are rotated until
they are orthogonal relative to each row's norm. Small angles need a Newton step, larger ones a decomposition level by
level, or Jacobi rotations in a CUDA kernel. :mod:`matbackprop.refinement` has the thresholds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop._torch import is_plain
from matbackprop.cuda.fallback import kernels_may_take
from matbackprop.cuda.jacobi import separate_by_kernel
from matbackprop.numerics import inner, is_double, symmetrize
from matbackprop.refinement import LEVEL, OVERLAP, SAFE_RATIO, SMALL_ANGLE, SPREAD, noise_floor
from matbackprop.solvers.eigh import batched_eigh


def squared_norms(y: Tensor) -> Tensor:
    return inner(y, y, (-1,))


def drop_noise(s: Tensor, eps: Tensor, shape: torch.Size) -> Tensor:
    """Squared singular values of X, set to zero at the noise floor, σ ≤ max(m, d) u σ_max, and if they underflow.

    Directions below the noise floor would contribute up to 1e-11 of a gradient, amplified by 1/ε.
    """
    if s.shape[-1] == 0:
        return s
    floor = noise_floor(shape, s.dtype) ** 2 * s.amax(-1, keepdim=True)
    return s * ((s > floor) & (s + eps.unsqueeze(-1) > torch.finfo(s.dtype).tiny))


def gram_eigh(x: Tensor, eps: Tensor, fine: bool, *, products: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """s, Q, Y with XXᵀ = Q diag(s) Qᵀ and Y = QᵀX, s not sorted.

    Errors of s far below ε ``(*batch,)`` do not matter. Without ``fine`` float32 digits are computed, and without
    ``products`` Y is empty if s + ε is accurate without it.
    """
    s, q = batched_eigh(x @ x.mH)
    readable = is_double(x.dtype) and x.numel() > 0 and x.is_cpu and is_plain(q, eps)
    if readable and not products and _narrow(s, eps, fine):
        return s, q, s.new_empty(0)
    y = (x.mH @ q).mH.resolve_conj()
    if readable and _narrow(s, torch.zeros_like(eps), True):
        return s, q, y
    if is_double(x.dtype) and y.numel():
        q, y = separate_rows(q, y, eps, fine, OVERLAP[fine])
    return drop_noise(squared_norms(y), eps, x.shape), q, y


def _narrow(s: Tensor, shift: Tensor, fine: bool) -> bool:
    """Return whether s + shift is accurate in every matrix; s is ascending."""
    # Compare numbers, because for one small matrix comparing tensors costs more than the products.
    columns = (t.reshape(-1).tolist() for t in (s.select(-1, 0), shift, s.select(-1, -1)))
    return all(low + more > max(high / SPREAD[fine], 1e-300) for low, more, high in zip(*columns, strict=True))


def separate_rows(q: Tensor, y: Tensor, eps: Tensor, fine: bool, limit: float) -> tuple[Tensor, Tensor]:
    """Rotate Q and Y = QᵀX until the rows of Y are orthogonal relative to each row's norm, not to the largest.

    Q and Y may be written to. ``limit`` is the largest |yᵢ·yⱼ|/√(λᵢλⱼ) that may remain, λ = s + ε. On CUDA nothing
    synchronizes: for ``fine``, float64 digits, a Newton step is always taken, and a kernel inspects the rows.
    """
    return (_separate if is_plain(q, y, eps) else _operator)(q, y, eps, fine, limit)


def _separate(q: Tensor, y: Tensor, eps: Tensor, fine: bool, limit: float) -> tuple[Tensor, Tensor]:
    if kernels_may_take(q, y, eps):
        if fine:
            q, y = newton_step(squared_norms(y), q, y)
        return separate_by_kernel(q, y, eps, limit)
    s = squared_norms(y)
    if not bool((s.amax(-1) > SAFE_RATIO * limit * (s.amin(-1) + eps)).any()):
        return q, y
    if fine:
        q, y = newton_step(s, q, y)
    mixed = largest_overlap(y, eps) > limit
    if bool(mixed.any()):
        q[mixed], y[mixed] = _separate_mixed(q[mixed], y[mixed], eps[mixed], limit)
    return q, y


def _separate_mixed(q: Tensor, y: Tensor, eps: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Separate the rows of (b, n, k) matrices by a Newton step, or level by level if that does not suffice."""
    new_q, new_y = newton_step(squared_norms(y), q, y)
    left = (largest_overlap(new_y, eps) > limit).nonzero().flatten().tolist()
    for one in left:
        new_q[one], new_y[one] = _separate_by_levels(q[one], y[one])
    if left:
        new_q[left], new_y[left] = newton_step(squared_norms(new_y[left]), new_q[left], new_y[left])
    return new_q, new_y


def largest_overlap(y: Tensor, eps: Tensor) -> Tensor:
    """The largest |yᵢ·yⱼ|/√(λᵢλⱼ), i ≠ j, of each matrix: the relative error that remains in g(XXᵀ + εI)."""
    overlap = y @ y.mH
    scale = (overlap.diagonal(dim1=-2, dim2=-1).real + eps.unsqueeze(-1)).clamp_min(torch.finfo(y.dtype).tiny).rsqrt()
    cosines = overlap * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    cosines.diagonal(dim1=-2, dim2=-1).zero_()
    return cosines.abs().amax((-2, -1))


def newton_step(s: Tensor, q: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate by e^Ω, Ωᵢⱼ = Eᵢⱼ/(sⱼ − sᵢ) with E = YYᵀ − diag(s), except pairs that are too close.

    To fourth order, because angles of 1e-4 between all pairs of some hundred rows add up and Q must stay orthogonal.
    """
    rows, columns = s.unsqueeze(-1), s.unsqueeze(-2)
    overlap, gap = symmetrize(y @ y.mH), columns - rows  # products may differ in rounding from their transposes
    omega = torch.where(overlap.abs() < SMALL_ANGLE * gap.abs(), overlap / torch.where(gap == 0, 1, gap), 0)
    half = 0.5 * omega @ omega
    even, odd = half + half @ half / 6, omega + omega @ half / 3
    return q + q @ (even + odd), y + (even - odd) @ y


def _separate_by_levels(q: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Separate the rows of one matrix Y ``(n, k)`` and the columns of Q with them, the largest rows first.

    The others are made orthogonal to them and decomposed separately, and so on down to the noise floor.
    """
    rest = torch.arange(len(y), device=y.device)
    s = squared_norms(y)
    floor = noise_floor(y.shape, y.dtype) ** 2 * s.max()
    while True:
        top = s >= LEVEL * s.max()
        done, rest = rest[top], rest[~top]
        if len(rest) == 0 or s[~top].max() <= floor:
            return q, y
        kept = y[done]
        small = y[rest] - (y[rest] @ (kept / s[top].unsqueeze(-1)).mH) @ kept
        _, rotation = torch.linalg.eigh(small @ small.mH)
        y[rest], q[:, rest] = rotation.mH @ small, q[:, rest] @ rotation
        s = squared_norms(y[rest])


@torch.library.custom_op("matbackprop::separate_rows", mutates_args=())
def _operator(q: Tensor, y: Tensor, eps: Tensor, fine: bool, limit: float) -> tuple[Tensor, Tensor]:
    """Custom operator for torch.compile and vmap, under which no value can be read."""
    new_q, new_y = _separate(q.clone(), y.clone(), eps, fine, limit)
    return new_q.contiguous(), new_y.contiguous()


@_operator.register_fake
def _(q: Tensor, y: Tensor, eps: Tensor, fine: bool, limit: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), y.new_empty(y.shape)


@_operator.register_vmap
def _(info, in_dims, q, y, eps, fine, limit):  # type: ignore[no-untyped-def]
    q, y, eps = (
        t.unsqueeze(0).expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip((q, y, eps), in_dims[:3], strict=True)
    )
    return _operator(q, y, eps, fine, limit), (0, 0)
