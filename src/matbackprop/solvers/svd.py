"""The batched singular value decomposition and the function that chooses its route.

With the short side of X first (k rows, l ≥ k columns), XXᵀ = Q diag(s) Qᵀ, and Y = QᵀX has orthogonal rows σᵢvᵢᵀ. Small
singular values and their vectors are inaccurate in a Gram matrix and are recomputed from Y, as in :mod:`.gram`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from matbackprop._torch import is_plain
from matbackprop.cuda import svd as kernels
from matbackprop.cuda.fallback import kernels_may_take
from matbackprop.cuda.jacobi import complete_by_kernel
from matbackprop.refinement import KERNEL_OVERLAP, SPREAD, SVD_OVERLAP, SVD_SPREAD, noise_floor
from matbackprop.solvers.eigh import batched_eigh, nan_if_not_finite
from matbackprop.solvers.gram import separate_rows, squared_norms

_FEW = 8  # columns of a tall matrix up to which copying its transpose makes products faster
_SMALL = 1024  # entries of a batch up to which one call of LAPACK is faster than the Gram matrix
_PARTS = {16: 256, 32: 512, 64: 1024}  # rows of a part of a long matrix with up to so many columns

Factors = tuple[Tensor, Tensor, Tensor]


def _route(x: Tensor, full_matrices: bool, fine: bool) -> Literal["torch", "kernel", "parts", "small", "gram"]:
    """Return the first route that supports the matrices.

    ``torch`` is :func:`torch.linalg.svd`: on the CPU for float64 digits. ``kernel`` is ``svd.cu``, for CUDA and a short
    side up to 64, and ``parts`` divides a few matrices with a long side among its blocks. ``small`` is LAPACK on the
    CPU for float32 digits, checked. ``gram`` is the eigensolver.
    """
    if full_matrices or x.dtype != torch.float64 or x.numel() == 0:
        return "torch"
    if x.device.type != "cuda":
        if fine:
            return "torch"
        return "small" if x.is_cpu and is_plain(x) and x.numel() <= _SMALL else "gram"
    if not kernels.takes(x):
        return "gram"
    return "parts" if kernels.long(max(x.shape[-2:]), x.shape[:-2].numel()) else "kernel"


def _torch_svd(x: Tensor, full_matrices: bool) -> Factors:
    def solve(x: Tensor) -> Factors:
        u, s, vh = torch.linalg.svd(x, full_matrices=full_matrices)
        return u, s, vh

    try:
        if x.is_cuda:
            return solve(x)
        if is_plain(x):
            u, s, vh = solve(x)
            if bool(s.isfinite().all()):  # LAPACK accepts infinite entries and may return finite vectors
                return u, s, vh
    except torch.linalg.LinAlgError:
        if bool(x.isfinite().all()):
            raise
    u, s, vh = nan_if_not_finite(solve, x)
    return u, s, vh


def batched_svd(x: Tensor, *, full_matrices: bool = False, fine: bool = True) -> Factors:
    """Singular value decomposition X = U diag(σ) Vᵀ by the fastest route; not differentiable.

    On CUDA the thin decomposition of real matrices does not synchronize; it is computed in float64.

    Args:
        x: matrices ``(*batch, m, n)``, real or complex.
        full_matrices: whether U and V are square.
        fine: whether X carries float64 digits; otherwise those of float32 are computed.

    Returns:
        U ``(*batch, m, k)``, σ ``(*batch, k)`` descending and Vᵀ ``(*batch, k, n)``, k = min(m, n). They are NaN for a
        matrix that is not finite.

    Example:
        >>> _, s, _ = batched_svd(torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
        >>> s
        tensor([2., 1.])
    """
    x = x.detach()
    if x.is_cuda and x.dtype == torch.float32 and not full_matrices:
        u, s, vh = batched_svd(x.double(), fine=False)
        return u.float(), s.float(), vh.float()
    route = _route(x, full_matrices, fine)
    if route == "torch":
        u, s, vh = _torch_svd(x, full_matrices)
        return (u, s, vh) if x.is_cpu else (u.clone(), s, vh.clone())  # forward mode takes no views as outputs
    if route == "kernel":
        return kernels.factor(x, KERNEL_OVERLAP[fine])[0]
    if route == "parts":
        if x.shape[-2] >= x.shape[-1]:
            return _svd_by_parts(x, fine)
        v, s, uh = batched_svd(x.mT.contiguous(), fine=fine)
        return uh.mT.contiguous(), s, v.mT.contiguous()  # forward mode takes no views as outputs
    if route == "small":
        u, s, vh = _torch_svd(x, False)
        if bool((s.select(-1, 0) < SVD_SPREAD * s.select(-1, -1)).all()):
            return u, s, vh
    return _thin_svd(x, fine)


def _svd_by_parts(x: Tensor, fine: bool) -> Factors:
    """Decompose parts of the rows, and then the matrix of all σᵢvᵢᵀ, which has the same σ and V as X."""
    *batch, m, k = x.shape
    count = -(-m // next(rows for columns, rows in _PARTS.items() if k <= columns))
    rows = m // count
    parts, rest = x.split([count * rows, m - count * rows], -2)
    u, s, vh = kernels.factor(parts.reshape(*batch, count, rows, k), KERNEL_OVERLAP[fine])[0]
    small = (s.unsqueeze(-1) * vh).flatten(-3, -2)
    outer, s, vh = batched_svd(torch.cat([small, rest], -2), fine=fine)
    inner, rest = outer.split([count * k, m - count * rows], -2)
    return torch.cat([(u @ inner.unflatten(-2, (count, k))).flatten(-3, -2), rest], -2), s, vh


def _thin_svd(x: Tensor, fine: bool) -> Factors:
    """Decompose by the Gram matrix of the shorter side."""
    tall = x.shape[-2] > x.shape[-1]
    if fine or not (x.is_cpu and is_plain(x)):
        u, s, vh = _gram_svd(x.mH if tall else x, fine)
    else:
        short, values, q, accurate = _eigh_of_short_side(x)
        if not accurate:
            u, s, vh = _gram_svd(short, fine, q)
        else:
            s = values.sqrt_()
            scaled = q / s.unsqueeze(-2)
            if tall and x.shape[-1] > _FEW:
                return x @ scaled, s, q.mH.contiguous()
            u, vh = q, scaled.mH @ short
    return (vh.mH.contiguous(), s, u.mH.contiguous()) if tall else (u, s, vh)  # forward mode takes no views as outputs


def _eigh_of_short_side(x: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return X with the short side first, the eigenvalues, descending, and eigenvectors of its Gram matrix.

    Also return whether they have float32 digits.
    """
    tall = x.shape[-2] > x.shape[-1]
    short = x.mH.contiguous() if tall and x.shape[-1] <= _FEW else x.mH if tall else x
    values, q = batched_eigh(short @ short.mH)
    return short, values.flip(-1), q.flip(-1), bool((values[..., 0] * SPREAD[False] > values[..., -1]).all())


def batched_polar(x: Tensor, *, fine: bool) -> Factors:
    """Q of X = QP with m ≥ n, and the eigenvalues, descending, and eigenvectors of P; not differentiable."""
    x = x.detach()
    if _route(x, False, fine) == "gram" and x.is_cpu and is_plain(x) and x.shape[-2] > x.shape[-1]:
        short, values, v, accurate = _eigh_of_short_side(x)
        if accurate:
            s = values.sqrt_()
            inverse = (v / s.unsqueeze(-2)) @ v.mH
            return (inverse @ short).mH if x.shape[-1] <= _FEW else x @ inverse, s, v
    u, s, vh = batched_svd(x, fine=fine)
    return u @ vh, s, vh.mH


def _gram_svd(x: Tensor, fine: bool, q: Tensor | None = None) -> Factors:
    """Decompose X with k rows and l ≥ k columns; Q are the eigenvectors of XXᵀ, if known."""
    unit = None
    if fine:  # a power of two, so that no square overflows or underflows; squares of float32 numbers do not
        largest = x.abs().amax((-2, -1), keepdim=True)
        mantissa = torch.frexp(largest).mantissa
        unit = torch.where(largest == 0, 1, largest / (2 * mantissa))
        x = x / unit
    if q is None:
        _, q = batched_eigh(x @ x.mH)
    y = (x.mH @ q).mH
    q, y = separate_rows(q, _cleared(y), x.new_zeros(x.shape[:-2]), fine, SVD_OVERLAP[fine])
    y = _cleared(y)  # repeated, because separation can move a direction below the noise floor
    s, order = squared_norms(y).sort(-1, descending=True)
    q = q.gather(-1, order.unsqueeze(-2).expand(q.shape))
    y = y.gather(-2, order.unsqueeze(-1).expand(y.shape))
    sigma = s.sqrt()
    nonzero = (s > 0).unsqueeze(-1)
    v = y / torch.where(nonzero, sigma.unsqueeze(-1), 1)
    if kernels_may_take(v, sigma):
        v = complete_by_kernel(v, sigma)
    elif not (is_plain(v) and bool(nonzero.all())):
        v = _complete(v, nonzero)
    return q, sigma if unit is None else sigma * unit.squeeze(-1), v


def _cleared(y: Tensor) -> Tensor:
    """Set rows of Y at the noise floor to zero."""
    s = squared_norms(y)
    return y * (s > noise_floor(y.shape, s.dtype) ** 2 * s.amax(-1, keepdim=True)).unsqueeze(-1)


def _complete(v: Tensor, nonzero: Tensor) -> Tensor:
    """Complete the rows of V whose singular values are zero with rows orthonormal to the others."""
    k, size = v.shape[-2:]
    # Pseudo-random rows, generated on the device because a copy would synchronize.
    new = (
        torch.arange(1, k * size + 1, dtype=v.dtype, device=v.device)
        .square()
        .mul(0.7548776662466927)
        .sin()
        .view(k, size)
    )
    new = torch.where(nonzero, 0, new)
    other = torch.diag_embed(nonzero.squeeze(-1).to(v.dtype))
    for _ in range(2):  # twice, to remove rounding errors
        new = new - (new @ v.mH) @ v
        factor, _ = torch.linalg.cholesky_ex(new @ new.mH + other)
        new = torch.linalg.solve_triangular(factor, new, upper=False)
    return v + new
