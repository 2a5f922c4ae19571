"""Launch ``separate.cu``, which separates rows by one-sided Jacobi rotations and completes orthonormal rows."""

from __future__ import annotations

from torch import Tensor

from matbackprop.cuda.compiler import Module, Source
from matbackprop.cuda.headers import CONSTANTS, MAX_WARPS

SOURCE = Source("separate.cu", CONSTANTS)


def separate_by_kernel(
    q: Tensor, y: Tensor, eps: Tensor, limit: float, kernels: Module | None = None, threads: int = 0
) -> tuple[Tensor, Tensor]:
    """Rotate rows until no overlap is above ``limit``; NaN if that fails."""
    n, k = y.shape[-2:]
    threads = threads or _threads(n)
    rows, vectors = _dense(y.reshape(-1, n, k)), _dense(q.reshape(-1, n, n).mT)
    overlap = rows @ rows.mT
    shift = eps.expand(y.shape[:-2]).contiguous()
    kernels = kernels or SOURCE.on(y.get_device(), REAL_IS_DOUBLE=1)
    addresses = (rows.data_ptr(), vectors.data_ptr(), overlap.data_ptr(), shift.data_ptr())
    sizes = (n, k, *rows.stride()[1:], *vectors.stride()[1:])
    kernels.launch("separate_rows", (len(rows),), threads, 24 * threads + 8 * n, (*addresses, limit, *sizes))
    return vectors.mT.reshape(q.shape), rows.reshape(y.shape)


def complete_by_kernel(v: Tensor, sigma: Tensor, kernels: Module | None = None, threads: int = 0) -> Tensor:
    """Replace the rows of V whose σ is zero by rows orthonormal to all others."""
    n, k = v.shape[-2:]
    threads = threads or _threads(n)
    rows = _dense(v.reshape(-1, n, k))
    kernels = kernels or SOURCE.on(v.get_device(), REAL_IS_DOUBLE=1)
    arguments = (rows.data_ptr(), sigma.contiguous().data_ptr(), n, k, *rows.stride()[1:])
    kernels.launch("complete_rows", (len(rows),), threads, 8 * (n + threads), arguments)
    return rows.reshape(v.shape)


def _threads(n: int) -> int:
    """Return the threads of a block: one warp processes one pair of rows at a time."""
    return 32 * min(MAX_WARPS, max(1, n // 4))


def _dense(a: Tensor) -> Tensor:
    """Return contiguous matrices (batch, n, k), each row-major or column-major."""
    return a if a.is_contiguous() or a.mT.is_contiguous() else a.contiguous()
