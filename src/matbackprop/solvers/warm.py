"""Eigendecomposition that starts from the eigenvectors of a matrix nearby, by matrix products alone."""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop.checks import is_plain
from matbackprop.numerics import symmetrize
from matbackprop.solvers.eigh import batched_eigh

__all__ = ["warm_eigh"]

_CORRECTIONS = 3  # each doubles the digits: more are needed only where a decomposition is cheaper
_FAR = 0.25  # an off-diagonal entry this large beside its gap, or a turn this large, is not nearby


def warm_eigh(a: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues ``(*batch, n)``, ascending, and eigenvectors of symmetric matrices near those that made a basis.

    A matrix whose eigenvectors lie too far from the basis, or whose close eigenvalues have mixed, is decomposed by
    :func:`batched_eigh`; which ones do is read from the device. The residual is at the level of rounding either way.

    Args:
        a: symmetric matrices ``(*batch, n, n)``, float32 or float64.
        basis: nearly orthonormal columns of the same shape.

    Reference:
        Ogita and Aishima, Iterative refinement for symmetric eigenvalue decomposition, JJIAM 35 (2018).
    """
    n = a.shape[-1]
    if a.numel() == 0 or not is_plain(a, basis):
        return batched_eigh(a)
    rounding = n * torch.finfo(a.dtype).eps
    eye = torch.eye(n, dtype=a.dtype, device=a.device)
    every, x = a.detach().reshape(-1, n, n), basis.detach().reshape(-1, n, n).to(a.dtype)
    values, vectors = every.new_empty(every.shape[:-1]), torch.empty_like(every)
    near = torch.arange(len(every), device=a.device)
    far = near[:0]
    for step in range(_CORRECTIONS + 1):
        s, r = x.mT @ (every[near] @ x), eye - x.mT @ x
        lam = s.diagonal(dim1=-2, dim2=-1) / (1 - r.diagonal(dim1=-2, dim2=-1))
        rows, columns = lam.unsqueeze(-1), lam.unsqueeze(-2)
        off = torch.where(eye == 1, 0, symmetrize(s) + 0.5 * (rows + columns) * r)
        gap = columns - rows
        still = off.abs() <= rounding * lam.abs().amax(-1)[:, None, None]  # nothing to turn: equal eigenvalues too
        turn = torch.where(still, 0, off / torch.where(still, 1, gap)) + 0.5 * r  # skew to the bit, and a stretch
        mixed = ~still & (off.abs() > _FAR * gap.abs())
        size = turn.square().sum((-2, -1)).sqrt()
        left = mixed.any(-1).any(-1) | ~(size < _FAR)
        # A correction leaves the square of its turn behind; a last one that is small enough needs no other look.
        done = ~left & (size.square() <= rounding)
        left = left | (~done & (step == _CORRECTIONS))
        x = x + x @ turn
        values[near[done]], vectors[near[done]] = lam[done], x[done]
        far, near, x = torch.cat([far, near[left]]), near[~(done | left)], x[~(done | left)]
        if len(near) == 0:
            break
    if len(far):
        values[far], vectors[far] = batched_eigh(every[far])
    values, order = values.sort(-1)
    vectors = vectors.gather(-1, order.unsqueeze(-2).expand_as(vectors))
    return values.reshape(a.shape[:-1]), vectors.reshape(a.shape)
