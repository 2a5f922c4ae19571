"""The batched singular value decomposition, on the package's own eigensolver where that is faster than torch's.

With the short side of X first (k rows, l ≥ k columns), XXᵀ = Q diag(s) Qᵀ and Y = QᵀX has orthogonal rows σᵢvᵢᵀ. What a
Gram matrix cannot tell, small singular values and their vectors, is read from Y itself, as in :mod:`.gram`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop.checks import is_plain
from matbackprop.cuda import svd as kernels
from matbackprop.cuda.fallback import kernels_may_take
from matbackprop.cuda.separate import complete_by_kernel
from matbackprop.refinement import KERNEL_OVERLAP, SAFE_RATIO, SPREAD, SVD_OVERLAP, SVD_SPREAD, noise_floor
from matbackprop.solvers.eigh import batched_eigh
from matbackprop.solvers.gram import separate_rows, squared_norms

__all__ = ["batched_svd"]

_FEW = 8  # columns of a tall matrix up to which products with its transpose are so much faster that a copy pays
_SMALL = 1024  # entries of a batch up to which one call of LAPACK in float64 is faster than the steps of the other way


def batched_svd(x: Tensor, *, full_matrices: bool = False, fine: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Singular value decomposition X = U diag(σ) Vᵀ by the fastest route installed; not differentiable.

    On CUDA the thin decomposition of float64 neither waits for the device nor moves anything to the CPU.

    Args:
        x: matrices ``(*batch, m, n)``, real or complex.
        full_matrices: whether U and V are square.
        fine: whether X carries float64 digits; otherwise those of float32 are wanted.

    Returns:
        U ``(*batch, m, k)``, σ ``(*batch, k)`` descending and Vᵀ ``(*batch, k, n)``, k = min(m, n).

    Example:
        >>> _, s, _ = batched_svd(torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
        >>> s
        tensor([2., 1.])
    """
    x = x.detach()
    # float64 digits are left to LAPACK on the CPU; for those of float32 the Gram matrix in float64 is mostly faster.
    lapack = full_matrices or (fine and x.device.type != "cuda")
    if lapack or x.dtype != torch.float64 or x.numel() == 0:
        u, s, vh = torch.linalg.svd(x, full_matrices=full_matrices)
        return (u, s, vh) if x.is_cpu else (u.clone(), s, vh.clone())  # forward mode takes no views as outputs
    if kernels.takes(x):
        return kernels.factor(x, KERNEL_OVERLAP[fine])[0]
    if x.is_cpu and is_plain(x) and x.numel() <= _SMALL:
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        if bool((s.select(-1, 0) < SVD_SPREAD * s.select(-1, -1)).all()):
            return u, s, vh
    return _thin_svd(x, fine)


def _thin_svd(x: Tensor, fine: bool) -> tuple[Tensor, Tensor, Tensor]:
    """By the Gram matrix of the shorter side."""
    tall = x.shape[-2] > x.shape[-1]
    if fine or not (x.is_cpu and is_plain(x)):
        u, s, vh = _gram_svd(x.mH if tall else x, fine)
    else:
        short = x.mH.contiguous() if tall and x.shape[-1] <= _FEW else x.mH if tall else x
        values, q = batched_eigh(short @ short.mH)
        q = q.flip(-1)
        if not bool((values[..., 0] * SPREAD[fine] > values[..., -1]).all()):
            u, s, vh = _gram_svd(short, fine, q)
        else:
            s = values.flip(-1).sqrt_()
            scaled = q / s.unsqueeze(-2)
            if tall and x.shape[-1] > _FEW:
                return x @ scaled, s, q.mH.contiguous()
            u, vh = q, scaled.mH @ short
    return (vh.mH.contiguous(), s, u.mH.contiguous()) if tall else (u, s, vh)  # forward mode takes no views as outputs


def _gram_svd(x: Tensor, fine: bool, q: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Of X with k rows and l ≥ k columns, for which Q may be known: eigenvectors of XXᵀ, largest eigenvalue first."""
    unit = None
    if fine:  # a power of two, so that no square overflows or vanishes; those of float32 numbers do not
        exponent = torch.frexp(x.abs().amax((-2, -1), keepdim=True)).exponent
        unit = torch.exp2(exponent.to(x.dtype))
        x = x / unit
    known = q is not None
    if q is None:
        _, q = batched_eigh(x @ x.mH)
    y = (x.mH @ q).mH
    if known:
        sigma = torch.linalg.vector_norm(y, dim=-1)
        right = _right(sigma, SAFE_RATIO * SVD_OVERLAP[fine])
        if bool(right.any()):
            y.div_(sigma.unsqueeze(-1))
            if not bool(right.all()):
                q[~right], sigma[~right], y[~right] = _gram_svd(x[~right], fine, q[~right])
            return q, sigma, y
    q, y = separate_rows(q, _cleared(y), x.new_zeros(x.shape[:-2]), fine, SVD_OVERLAP[fine])
    y = _cleared(y)  # once more: a direction that X does not have is left smaller than rounding
    s, order = squared_norms(y).sort(-1, descending=True)
    q = q.gather(-1, order.unsqueeze(-2).expand(q.shape))
    y = y.gather(-2, order.unsqueeze(-1).expand(y.shape))
    sigma = s.sqrt()
    there = (s > 0).unsqueeze(-1)
    v = y / torch.where(there, sigma.unsqueeze(-1), 1)
    if kernels_may_take(v, sigma):
        v = complete_by_kernel(v, sigma)
    elif not (is_plain(v) and bool(there.all())):
        v = _complete(v, there)
    return q, sigma if unit is None else sigma * unit.squeeze(-1), v


def _cleared(y: Tensor) -> Tensor:
    """Y with zeros for rows at the level of rounding, directions that X does not have."""
    s = squared_norms(y)
    return y * (s > noise_floor(y.shape, s.dtype) ** 2 * s.amax(-1, keepdim=True)).unsqueeze(-1)


def _right(sigma: Tensor, ratio: float) -> Tensor:
    """Where σ is descending, positive, and σ² of so narrow a range that no row has to be cleared of larger ones."""
    first, last = sigma[..., 0].square(), sigma[..., -1].square()
    return (sigma.diff(dim=-1) <= 0).all(-1) & (first < ratio * last)


def _complete(v: Tensor, there: Tensor) -> Tensor:
    """Put orthonormal rows, orthogonal to the others, where rows of V are not there, for singular values of zero."""
    k, size = v.shape[-2:]
    # Any rows will do that no structure of V can hide; made on the device, where a copy would have to wait.
    new = (
        torch.arange(1, k * size + 1, dtype=v.dtype, device=v.device)
        .square()
        .mul(0.7548776662466927)
        .sin()
        .view(k, size)
    )
    new = torch.where(there, 0, new)
    other = torch.diag_embed(there.squeeze(-1).to(v.dtype))
    for _ in range(2):  # once more for what rounding left
        new = new - (new @ v.mH) @ v
        factor, _ = torch.linalg.cholesky_ex(new @ new.mH + other)
        new = torch.linalg.solve_triangular(factor, new, upper=False)
    return v + new
