"""Symmetric matrices as vectors: the upper triangle with √2 on the off-diagonal entries, and back."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from matbackprop._torch import dispatch_mode_active
from matbackprop.checks import check_floating, check_matrix, values_checkable
from matbackprop.errors import ShapeError
from matbackprop.numerics import real_dtype

__all__ = ["unvectorize_symmetric", "vectorize_symmetric"]


def _triangle(n: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Where the upper triangle lies in a flat matrix (row-major), the factor of each entry, and the way back."""
    rows, columns = torch.triu_indices(n, n, device=device).unbind(0)
    scale = torch.ones_like(rows, dtype=real_dtype(dtype)).masked_fill(rows != columns, math.sqrt(2.0))
    order = torch.arange(len(rows), device=device)
    back = torch.zeros(n, n, dtype=torch.long, device=device)
    back[rows, columns] = order
    back[columns, rows] = order
    return rows * n + columns, scale, back.flatten()


_kept_triangle = functools.lru_cache(maxsize=16)(_triangle)


def _triangle_for(a: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The triangle of order n for ``a``, kept between calls: making it costs more launches than using it.

    Where tensors are not plain (traced, fake, captured in a CUDA graph, in inference mode) it is made anew.
    """
    plain = (
        values_checkable(a)
        and not dispatch_mode_active()
        and not torch.is_inference_mode_enabled()
        and not (a.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )
    return (_kept_triangle if plain else _triangle)(n, a.device, a.dtype)


def vectorize_symmetric(a: Tensor) -> Tensor:
    r"""Write symmetric matrices as vectors so that dot products (their real parts) and norms stay what they were.

    .. math:: v = (a_{11}, \sqrt2 a_{12}, \ldots, \sqrt2 a_{1n}, a_{22}, \ldots), \quad v^\top w = \operatorname{tr}(AB)

    Args:
        a: symmetric (Hermitian) matrices ``(*batch, n, n)``; only the upper triangle is read.

    Returns:
        ``(*batch, n(n+1)/2)``.

    Raises:
        ShapeError, DtypeError: ``a`` is not a batch of square floating-point matrices.

    Gradient:
        Linear; the gradient fills the upper triangle, which every operator here symmetrises. All orders.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.vectorize_symmetric(torch.tensor([[1.0, 2.0], [2.0, 3.0]]))
        tensor([1.0000, 2.8284, 3.0000])

    Reference:
        Ionescu et al., section 4.2; Carreira et al., "Free-form region description with second-order pooling" (2015).
    """
    check_matrix(a, "a", square=True, or_complex=True)
    n = a.shape[-1]
    upper, scale, _ = _triangle_for(a, n)
    return a.flatten(-2).index_select(-1, upper) * scale


def unvectorize_symmetric(v: Tensor) -> Tensor:
    r"""Inverse of `vectorize_symmetric`.

    Args:
        v: ``(*batch, n(n+1)/2)``.

    Returns:
        Symmetric matrices ``(*batch, n, n)``, Hermitian for complex vectors with a real diagonal.

    Raises:
        ShapeError: the last dimension is not n(n+1)/2 for a whole number n.
        DtypeError: ``v`` is not floating point.

    Gradient:
        Linear, the adjoint of the map itself. All orders.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.unvectorize_symmetric(torch.tensor([1.0, 2.0 * 2**0.5, 3.0]))
        tensor([[1., 2.],
                [2., 3.]])

    Reference:
        Ionescu et al., section 4.2.
    """
    check_floating(v, "v", or_complex=True)
    length = v.shape[-1] if v.ndim else 0
    n = (math.isqrt(8 * length + 1) - 1) // 2
    if v.ndim == 0 or n * (n + 1) // 2 != length:
        raise ShapeError(f"v must end in a dimension of n(n+1)/2 entries (1, 3, 6, 10, …), got shape {tuple(v.shape)}.")
    _, scale, back = _triangle_for(v, n)
    a = (v / scale).index_select(-1, back).unflatten(-1, (n, n))
    return a.triu() + a.mH.tril(-1) if a.is_complex() else a
