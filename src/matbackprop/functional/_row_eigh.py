"""Eigenpairs of the moments Xᵀ diag(w) X of rows, to the digits of X itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from matbackprop.checks import values_checkable
from matbackprop.functional._eigh import eigh
from matbackprop.functional._function import product
from matbackprop.functional._ties import Ties
from matbackprop.numerics import real_dtype, symmetrize
from matbackprop.solvers import batched_svd

__all__ = ["row_eigh"]


def _moments(x: Tensor, w: Tensor | None) -> Tensor:
    return symmetrize(product((x if w is None else w.unsqueeze(-1) * x).mH, x))


def row_eigh(
    x: Tensor, w: Tensor | None, blurred: Callable[[Tensor], Tensor], *, ties: Ties, check: bool | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Ascending eigenvalues and eigenvectors V of Xᵀ diag(w) X, with the derivatives of `eigh`, and the rows XV.

    The product knows them to rounding of the largest eigenvalue. Where that does not do, the singular vectors of √w X
    are found first, as constants: along them the product is diagonal, its entries are squared singular values, and the
    rows are left singular vectors times singular values, of which each has its digits.

    Args:
        x: rows ``(*b, m, d)`` in the dtype to compute in.
        w: weights ≥ 0 ``(*b, m)``; may learn, also where they are zero.
        blurred: tells from eigenvalues where rounding of the largest hides one that matters. Asked on the CPU, and
            where values may be looked at, only.
        ties: as in `eigh`.
        check: as in `eigh`.
    """
    values, vectors = eigh(_moments(x, w), ties=ties, check=check, precision=real_dtype(x.dtype))
    seen = values.is_cpu and values_checkable(values) and values.numel() > 0
    if not seen or not bool(blurred(values.detach()).any()):
        return values, vectors, product(x, vectors)
    rows = x.detach() if w is None else w.detach().sqrt().unsqueeze(-1) * x.detach()
    u, sigma, vh = batched_svd(rows, full_matrices=rows.shape[-2] < rows.shape[-1])
    more = vh.shape[-1] - sigma.shape[-1]
    absent = sigma <= max(x.shape[-2:]) * torch.finfo(x.dtype).eps * sigma[..., :1]
    sigma = torch.where(absent, 0, sigma)
    exact = torch.nn.functional.pad(u * sigma.unsqueeze(-2), (0, more)).flip(-1)
    turn = vh.mH.flip(-1)
    turned = product(x, turn)
    if w is not None:  # rows that do not count are what they are
        counts = (w > 0).unsqueeze(-1)
        exact = torch.where(counts, exact / torch.where(counts, w.detach().sqrt().unsqueeze(-1), 1), turned.detach())
    turned = exact + (turned - turned.detach())  # values with all digits, and the derivatives of the product
    moments = _moments(turned, w)
    squares = torch.nn.functional.pad(sigma, (0, more)).flip(-1).square()
    diagonal = torch.diag_embed(squares) + (moments - moments.detach())
    values, vectors = eigh(diagonal, ties=ties, check=check, precision=real_dtype(x.dtype))
    return values, product(turn, vectors), product(turned, vectors)
