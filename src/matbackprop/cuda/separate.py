"""Rows that an eigensolver left mixed, separated on the device by one-sided Jacobi rotations (``separate.cu``)."""

from __future__ import annotations

from torch import Tensor

from matbackprop.cuda import jacobi
from matbackprop.cuda.compiler import Module, Source

WIDE_RATIO = {True: 1e5, False: 1e8}
"""λ_max/λ_min up to which rows need no care, an error being 1e-17 of it; for float64 and for float32 digits."""
MIXED_OVERLAP = {True: 1e-11, False: 1e-9}
"""Largest |yᵢ·yⱼ|/√(λᵢλⱼ) that is left; for float64 and for float32 digits."""
KERNELS = Source("separate.cu")
SOURCE = jacobi.SOURCE + KERNELS


def separate_by_kernel(
    q: Tensor, y: Tensor, eps: Tensor, fine: bool, kernels: Module | None = None, threads: int = 256
) -> tuple[Tensor, Tensor]:
    """Turn the rows of matrices that need it by one-sided Jacobi rotations (``separate.cu``)."""
    n, k = y.shape[-2:]
    rows, vectors = _dense(y.reshape(-1, n, k)), _dense(q.reshape(-1, n, n).mT)
    overlap = rows @ rows.mT
    shift = eps.expand(y.shape[:-2]).contiguous()
    kernels = kernels or SOURCE.on(y.get_device(), REAL_IS_DOUBLE=1)
    addresses = (rows.data_ptr(), vectors.data_ptr(), overlap.data_ptr(), shift.data_ptr())
    sizes = (n, k, *rows.stride()[1:], *vectors.stride()[1:])
    kernels.launch("separate_rows", (len(rows),), threads, 24 * threads, (*addresses, MIXED_OVERLAP[fine], *sizes))
    return vectors.mT.reshape(q.shape), rows.reshape(y.shape)


def _dense(a: Tensor) -> Tensor:
    """Matrices (batch, n, k) that follow each other in memory, each by rows or by columns."""
    return a if a.is_contiguous() or a.mT.is_contiguous() else a.contiguous()
