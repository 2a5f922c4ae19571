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
) -> tuple[Tensor, Tensor]:
    """Ascending eigenvalues and eigenvectors of Xᵀ diag(w) X, with the derivatives of `eigh`.

    The product knows them to rounding of the largest eigenvalue. Where that does not do, the singular vectors of √w X
    are found first, as constants: along them the product is diagonal, and its entries are squared singular values, of
    which each has its digits.

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
        return values, vectors
    rows = x.detach() if w is None else w.detach().sqrt().unsqueeze(-1) * x.detach()
    _, sigma, vh = batched_svd(rows, full_matrices=rows.shape[-2] < rows.shape[-1])
    sigma = torch.nn.functional.pad(sigma, (0, vh.shape[-1] - sigma.shape[-1])).flip(-1)
    absent = sigma <= max(x.shape[-2:]) * torch.finfo(x.dtype).eps * sigma[..., -1:]
    turn = vh.mH.flip(-1)
    turned = product(x, turn)
    # What is left of a direction that the rows do not have is rounding; its variation is not.
    noise = absent.unsqueeze(-2) if w is None else absent.unsqueeze(-2) & (w > 0).unsqueeze(-1)
    moments = _moments(turned - turned.detach() * noise, w)
    squares = torch.where(absent, 0, sigma).square()
    diagonal = torch.diag_embed(squares) + (moments - moments.detach())  # its derivatives are those of the sum
    values, vectors = eigh(diagonal, ties=ties, check=check, precision=real_dtype(x.dtype))
    return values, product(turn, vectors)
