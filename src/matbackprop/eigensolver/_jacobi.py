"""The Jacobi eigensolver of ``jacobi.cu``: one thread block a matrix, in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from matbackprop.eigensolver import _kernels

FILES = ("eigensolver/jacobi.cu",)
MAX_ORDER = 64  # a warp finds the angles of all pairs at once
_MAX_VECTOR_WARPS = 8  # they keep pace with the warps that rotate the matrix
_WARP = 32
_MAX_WARPS = 24  # of a block: each thread then has 80 registers


@dataclass(frozen=True)
class Sizes:
    """What a block of the kernel needs for order n, as in the source; lengths in numbers of the matrix's dtype."""

    n: int

    @property
    def players(self) -> int:
        """The order, made even."""
        return self.n + self.n % 2

    @property
    def threads(self) -> int:
        """Threads that find angles, rotate the matrix (one for each pair of pairs) and rotate eigenvectors."""
        half = self.players // 2
        matrix_warps = 1 + -(-half * (half - 1) // 2 // _WARP)
        return _WARP * (matrix_warps + min(_MAX_WARPS - matrix_warps, _MAX_VECTOR_WARPS, -(-self.n // 4)))

    @property
    def front(self) -> int:
        """Two sweeps of rotations, and the matrix."""
        half = self.players // 2
        return 4 * (self.players - 1) * half + self.players * (self.players | 1)

    @property
    def back(self) -> int:
        """Eigenvectors, in rows that avoid each other's memory banks."""
        return max(self.n * ((self.players + 7) // 16 * 16 + 8), self.threads)

    def shared_bytes(self, front: int, back: int, itemsize: int) -> int:
        """Shared memory for these regions, the eigenvalues and their order."""
        return (front + back + self.players) * itemsize + 4 * self.players


def solve(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigendecomposition of contiguous (batch, n, n) CUDA matrices, n ≤ 64; NaN where it did not converge."""
    batch, n, _ = a.shape
    values = torch.empty((batch, n), dtype=a.dtype, device=a.device)
    vectors = torch.empty_like(a)
    kernels = _kernels.module(FILES, (("REAL_IS_DOUBLE", int(a.dtype == torch.float64)),), a.get_device())
    sizes = Sizes(n)
    shared = sizes.shared_bytes(sizes.front, sizes.back, a.element_size())
    kernels.launch(
        "jacobi_eigh", (batch,), sizes.threads, shared, (a.data_ptr(), values.data_ptr(), vectors.data_ptr(), n)
    )
    return values, vectors
