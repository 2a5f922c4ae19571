"""Accurate eigendecomposition of second moments Xᵀ diag(w) X."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from matbackprop._torch import values_checkable
from matbackprop.functional._eigh import eigh
from matbackprop.functional._function import product
from matbackprop.functional._ties import Ties
from matbackprop.numerics import real_dtype, symmetrize
from matbackprop.refinement import noise_floor, refinement_needed
from matbackprop.solvers import batched_svd


def _moments(x: Tensor, w: Tensor | None) -> Tensor:
    return symmetrize(product((x if w is None else w.unsqueeze(-1) * x).mH, x))


def row_eigh(
    x: Tensor, w: Tensor | None, lost: Callable[[Tensor], Tensor], *, ties: Ties, check: bool | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Ascending eigenvalues and eigenvectors V of Xᵀ diag(w) X, with the derivatives of `eigh`, and the rows XV.

    The product determines them up to rounding errors of the largest eigenvalue. If that is not accurate enough, or
    values cannot be read, the singular vectors of √w X are computed first, as constants. In their basis the product is
    diagonal with the squared singular values, and the rows are left singular vectors times singular values, all
    accurate.

    ``lost`` maps eigenvalues ``(*batch, d)`` to whether the product is too inaccurate ``(*batch,)``. The weights w ≥ 0
    ``(*batch, m)`` may be trainable, also if they are zero.
    """
    m, d = x.shape[-2:]
    decompose = partial(eigh, ties=ties, check=check, precision=real_dtype(x.dtype))
    if x.is_cpu and values_checkable(x):
        values, vectors = decompose(_moments(x, w))
        if not refinement_needed(lost(values.detach())):
            return values, vectors, product(x, vectors)
    rows = x.detach() if w is None else w.detach().sqrt().unsqueeze(-1) * x.detach()
    if m < d:  # rows of zeros, so that there are d singular vectors
        rows = torch.nn.functional.pad(rows, (0, 0, 0, d - m))
    u, sigma, vh = batched_svd(rows)
    sigma = torch.where(sigma <= noise_floor(x.shape, x.dtype) * sigma[..., :1], 0, sigma)
    exact = (u * sigma.unsqueeze(-2))[..., :m, :].flip(-1)
    axes = vh.mH.flip(-1)
    rotated = product(x, axes)
    if w is not None:  # rows without weight keep their values
        counts = (w > 0).unsqueeze(-1)
        exact = torch.where(counts, exact / torch.where(counts, w.detach().sqrt().unsqueeze(-1), 1), rotated.detach())
    rotated = exact + (rotated - rotated.detach())  # values with all digits, and the derivatives of the product
    moments = _moments(rotated, w)
    diagonal = torch.diag_embed(sigma.flip(-1).square()) + (moments - moments.detach())
    values, vectors = decompose(diagonal)
    return values, product(axes, vectors), product(rotated, vectors)
