"""Conversion between symmetric matrices and vectors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from matbackprop.checks import check_floating, check_matrix
from matbackprop.errors import ShapeError
from matbackprop.numerics import real_dtype


def _triangle(n: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of the upper triangle (row-major), and the factor of each entry."""
    rows, columns = torch.triu_indices(n, n, device=like.device).unbind(0)
    scale = torch.ones_like(rows, dtype=real_dtype(like.dtype)).masked_fill(rows != columns, math.sqrt(2.0))
    return rows, columns, scale


def vectorize_symmetric(a: Tensor) -> Tensor:
    r"""Convert symmetric matrices to vectors with the same (real) inner products and norms.

    .. math:: v = (a_{11}, \sqrt2 a_{12}, \ldots, \sqrt2 a_{1n}, a_{22}, \ldots), \quad v^\top w = \operatorname{tr}(AB)

    Args:
        a: symmetric (Hermitian) matrices ``(*batch, n, n)``; only the upper triangle is read.

    Returns:
        Vectors ``(*batch, n(n+1)/2)``.

    Raises:
        ShapeError, DtypeError: ``a`` is not a batch of square floating-point matrices.

    Gradient:
        Nonzero in the upper triangle only; operators on symmetric matrices symmetrize it. All orders.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.vectorize_symmetric(torch.tensor([[1.0, 2.0], [2.0, 3.0]]))
        tensor([1.0000, 2.8284, 3.0000])

    Reference:
        Ionescu et al. (2015), section 4.2; Carreira et al., Free-form region description with second-order pooling
        (2015).
    """
    check_matrix(a, "a", square=True, or_complex=True)
    n = a.shape[-1]
    rows, columns, scale = _triangle(n, a)
    return a.flatten(-2).index_select(-1, rows * n + columns) * scale


def unvectorize_symmetric(v: Tensor) -> Tensor:
    r"""Convert vectors to symmetric matrices; the inverse of `vectorize_symmetric`.

    Args:
        v: vectors ``(*batch, n(n+1)/2)``.

    Returns:
        Symmetric matrices ``(*batch, n, n)``, Hermitian for complex vectors with real diagonal entries.

    Raises:
        ShapeError: the last dimension is not n(n+1)/2 for an integer n.
        DtypeError: ``v`` is not floating point.

    Gradient:
        The adjoint of the linear map. All orders.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.unvectorize_symmetric(torch.tensor([1.0, 2.0 * 2**0.5, 3.0]))
        tensor([[1., 2.],
                [2., 3.]])
    """
    check_floating(v, "v", or_complex=True)
    length = v.shape[-1] if v.ndim else 0
    n = (math.isqrt(8 * length + 1) - 1) // 2
    if v.ndim == 0 or n * (n + 1) // 2 != length:
        raise ShapeError(f"v must end in a dimension of n(n+1)/2 entries (1, 3, 6, 10, …), got shape {tuple(v.shape)}.")
    rows, columns, scale = _triangle(n, v)
    back = torch.empty(n, n, dtype=torch.long, device=v.device)
    back[rows, columns] = back[columns, rows] = torch.arange(length, device=v.device)
    a = (v / scale).index_select(-1, back.flatten()).unflatten(-1, (n, n))
    return a.triu() + a.mH.tril(-1) if a.is_complex() else a
