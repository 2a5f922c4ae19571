"""The Jacobi eigensolver (``jacobi.cu``), and the separation of rows by one-sided rotations (``separate.cu``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from matbackprop.cuda.compiler import CHUNK, MAX_WARPS, Source

MAX_ORDER = 64  # one warp computes the angles of all pairs at once
_MAX_VECTOR_WARPS = 8  # enough to be as fast as the warps that rotate the matrix
_ENTRIES_PER_WARP = 400  # of the eigenvectors, if the kernel does nothing else: then more matrices run at once
_WARP = 32
SOURCE = Source("jacobi.cu")
SEPARATE = Source("separate.cu")


@dataclass(frozen=True)
class Sizes:
    """Block sizes of the kernel for order n, as in ``jacobi.cuh``; lengths in numbers of the matrix's dtype."""

    n: int

    @property
    def players(self) -> int:
        """The order, rounded up to an even number."""
        return self.n + self.n % 2

    @property
    def threads(self) -> int:
        """Threads that compute angles, rotate the matrix (one for each pair of pairs) and rotate eigenvectors."""
        return self._threads(-(-self.n // 4))

    @property
    def solver_threads(self) -> int:
        """The same for a kernel that only computes eigenvalues and eigenvectors."""
        return self._threads(-(-(self.n**2) // _ENTRIES_PER_WARP))

    def _threads(self, vector_warps: int) -> int:
        half = self.players // 2
        matrix_warps = 1 + -(-half * (half - 1) // 2 // _WARP)
        return _WARP * (matrix_warps + min(MAX_WARPS - matrix_warps, _MAX_VECTOR_WARPS, vector_warps))

    @property
    def vectors(self) -> int:
        """Eigenvectors, with rows padded against bank conflicts."""
        return max(self.n * ((self.players + 7) // 16 * 16 + 8), self.threads)

    @property
    def tile(self) -> int:
        """CHUNK columns of a matrix of n rows, as in ``rows.cuh``."""
        return CHUNK * (self.players + 2)

    def shared_bytes(self, itemsize: int, tile: int = 0) -> int:
        """Shared memory for two sweeps of rotations and the matrix, the eigenvectors, and the eigenvalues in order.

        ``tile`` is the smallest size of the first two parts, in numbers of ``itemsize`` bytes.
        """
        matrix = 2 * (self.players - 1) * self.players + self.players * (self.players | 1)
        numbers = max(matrix, tile) + max(self.vectors, tile) + self.players
        return numbers * itemsize + 4 * self.players

    @property
    def gram_bytes(self) -> int:
        """Shared memory of ``GramMemory`` in ``rows.cuh``."""
        return self.shared_bytes(8, self.tile)


def solve(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigendecomposition of contiguous (batch, n, n) CUDA matrices, n ≤ 64; NaN if it did not converge."""
    batch, n, _ = a.shape
    values = torch.empty((batch, n), dtype=a.dtype, device=a.device)
    vectors = torch.empty_like(a)
    kernels = SOURCE.on(a.get_device(), REAL_IS_DOUBLE=int(a.dtype == torch.float64))
    sizes, addresses = Sizes(n), (a.data_ptr(), values.data_ptr(), vectors.data_ptr())
    shared = sizes.shared_bytes(a.element_size())
    kernels.launch("jacobi_eigh", (batch,), sizes.solver_threads, shared, (*addresses, n))
    return values, vectors


def separate_by_kernel(q: Tensor, y: Tensor, eps: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Rotate rows until no overlap is above ``limit``; NaN if that fails."""
    n, k = y.shape[-2:]
    threads = _threads(n)
    rows, vectors = _dense(y.reshape(-1, n, k)), _dense(q.reshape(-1, n, n).mT)
    overlap = rows @ rows.mT
    shift = eps.expand(y.shape[:-2]).contiguous()
    kernels = SEPARATE.on(y.get_device())
    addresses = (rows.data_ptr(), vectors.data_ptr(), overlap.data_ptr(), shift.data_ptr())
    sizes = (n, k, *rows.stride()[1:], *vectors.stride()[1:])
    kernels.launch("separate_rows", (len(rows),), threads, 24 * threads + 8 * n, (*addresses, limit, *sizes))
    return vectors.mT.reshape(q.shape), rows.reshape(y.shape)


def complete_by_kernel(v: Tensor, sigma: Tensor) -> Tensor:
    """Replace the rows of V whose σ is zero by rows orthonormal to all others."""
    n, k = v.shape[-2:]
    threads = _threads(n)
    rows = _dense(v.reshape(-1, n, k))
    kernels = SEPARATE.on(v.get_device())
    arguments = (rows.data_ptr(), sigma.contiguous().data_ptr(), n, k, *rows.stride()[1:])
    kernels.launch("complete_rows", (len(rows),), threads, 8 * (n + threads), arguments)
    return rows.reshape(v.shape)


def _threads(n: int) -> int:
    """Return the threads of a block: one warp processes one pair of rows at a time."""
    return 32 * min(MAX_WARPS, max(1, n // 4))


def _dense(a: Tensor) -> Tensor:
    """Return contiguous matrices (batch, n, k), each row-major or column-major."""
    return a if a.is_contiguous() or a.mT.is_contiguous() else a.contiguous()
