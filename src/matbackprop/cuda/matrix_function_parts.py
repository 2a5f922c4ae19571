"""Functions of symmetric matrices of any order by an eigensolver, batched products and four kernels.

Two are in ``matrix_function_parts.cu``: g of the eigenvalues, and its divided differences. Two of ``pool_parts.cu``
convert dtypes and compute symmetric parts. Value and gradient take 11 launches in addition to the eigensolver's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop.cuda import pool_parts
from matbackprop.cuda.compiler import Module, Source
from matbackprop.cuda.headers import FUNCTIONS, TYPES

MAX_ORDER = pool_parts.MAX_ORDER
_GROUP, _THREADS = 8, 256  # columns of U per block; threads per block
SOURCE = Source("matrix_function_parts.cu", pool_parts.CONSTANTS, THIN=0, GROUP=_GROUP)


def _kernels(a: Tensor, function: str) -> Module:
    return SOURCE.on(a.get_device(), IN=TYPES[a.dtype], FUNCTION=FUNCTIONS[function])


def _squares(count: int, n: int) -> tuple[int]:
    return (count * (-(-n // pool_parts.EDGE)) ** 2,)


def _doubled(x: Tensor, kernels: Module) -> Tensor:
    """X + Xᵀ ``(count, n, n)`` in float64."""
    n = x.shape[-1]
    out = torch.empty((x.numel() // (n * n), n, n), dtype=torch.float64, device=x.device)
    kernels.launch("pool_symmetric", _squares(len(out), n), _THREADS, 0, (x.data_ptr(), out.data_ptr(), n))
    return out


def _finished(product: Tensor, like: Tensor, kernels: Module) -> Tensor:
    """Mirror the lower triangle of a product and convert it to the dtype and shape of another tensor."""
    count, n, _ = product.shape
    out = torch.empty_like(like)
    unused = product.data_ptr()  # ε, which the primal form does not read here
    kernels.launch("pool_finish", _squares(count, n), _THREADS, 0, (product.data_ptr(), unused, out.data_ptr(), n))
    return out


def forward(
    a: Tensor, function: str, share: float, solve: pool_parts.Solver, kernels: Module | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """g(A) in the dtype of A, and factors for :func:`gradient`: λ ``(count, n)`` and U ``(count, n, n)`` in float64.

    Args:
        a: A ``(*batch, n, n)``, contiguous float32 or float64, whose symmetric part is used.
        function: the name of g.
        share: rounding error of an eigenvalue as a fraction of the largest; see ``matrix_function.cuh``.
        solve: the eigensolver: symmetric matrices to ascending eigenvalues, and eigenvectors in columns.
        kernels: compiled kernels to run instead of those of the device of A.
    """
    kernels = kernels or _kernels(a, function)
    doubled, vectors = solve(_doubled(a, kernels))
    doubled, (count, n) = doubled.contiguous(), doubled.shape
    values, scaled = torch.empty_like(doubled), torch.empty_like(vectors)
    addresses = (t.data_ptr() for t in (doubled, vectors, values, scaled))
    arguments = (*addresses, share, n, *vectors.stride()[1:])
    kernels.launch("function_columns", (count * -(-n // _GROUP),), _THREADS, 0, arguments)
    return _finished(torch.bmm(scaled, vectors.mT), a, kernels), (values, vectors)


def gradient(
    g: Tensor, a: Tensor, values: Tensor, vectors: Tensor, function: str, kernels: Module | None = None
) -> Tensor:
    """dL/dA in the dtype of A for the gradient G of g(A), whose symmetric part is used."""
    count, n = values.shape
    kernels = kernels or _kernels(a, function)
    w = torch.bmm(torch.bmm(vectors.mT, _doubled(g, kernels)), vectors)
    blocks = -(-count * n // (_THREADS // 32))
    kernels.launch("function_table", (blocks,), _THREADS, 0, (w.data_ptr(), values.data_ptr(), count * n, n))
    return _finished(torch.bmm(torch.bmm(vectors, w), vectors.mT), a, kernels)
