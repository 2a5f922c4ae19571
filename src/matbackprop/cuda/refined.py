"""Double-precision eigendecomposition: cuSOLVER's batched routine in single precision, refined by products.

On a GPU the float32 routine takes less than half the time of the float64 one, and the rest is batched matrix products,
which run near the device's peak. ``refine.cu`` holds everything between two products and tells how a step works.

Reference:
    Ogita, Aishima, "Iterative refinement for symmetric eigenvalue decomposition", Japan Journal of Industrial and
    Applied Mathematics 35, 2018, for the steps. Pairs that are too close for them are turned by Jacobi rotations.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from matbackprop.cuda import compiler, cusolver
from matbackprop.cuda.compiler import Source
from matbackprop.cuda.graphs import replayed

MIN_ORDER = 129  # below, cuSOLVER's float64 routine keeps a matrix in one thread block
MAX_ORDER = 256  # above, the rotations take longer than the float64 routine does
LIMITS = (5e-3, 3e-5, 5e-9)
"""Largest rotation that a step does by products, in radians. Each step squares what the one before left undone."""

_THREADS, _TILE, _GROUP = 1024, 32, 2  # threads of a block; edge of a tile; tiles that are transposed at once
SOURCE = Source("refine.cu", MAX_THREADS=_THREADS, TILE=_TILE, GROUP=_GROUP)
_TILE_NUMBERS = 2 * _GROUP * _TILE * (_TILE + 1)  # of two matrices
_MAX_BYTES = 2**28  # of matrices at a time: the steps need nine times as much
_MAX_REPLAYED_BYTES = 2**26
_FULL_RATE = ((7, 0), (8, 0), (9, 0), (10, 0))  # elsewhere float64 is 32 or 64 times slower than float32


class Kernels(Protocol):
    """Launches the kernels of ``refine.cu``; a block may have ``shared_limit`` bytes of shared memory."""

    shared_limit: int

    def launch(
        self, name: str, grid: tuple[int, ...], threads: int, shared: int, arguments: tuple[int | float, ...], /
    ) -> None:
        """Run a kernel; see :meth:`matbackprop.cuda.compiler.Module.launch`."""


def available(device: torch.device) -> bool:
    """Whether the device multiplies float64 at full rate, the float32 routine is there and kernels can be compiled."""
    return cusolver.available() and compiler.available() and _capability(device) in _FULL_RATE


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def shared_bytes(n: int, threads: int) -> int:
    """Shared memory that a block needs, as laid out in the source."""
    return 8 * (5 * n + threads + _TILE_NUMBERS) + 8 * ((3 * n + 3) // 2)


def prepare(a: Tensor, kernels: Kernels, threads: int = _THREADS) -> tuple[Tensor, Tensor, Tensor]:
    """Scale contiguous (batch, n, n) matrices by powers of two, in float64 and in float32, and return the scales."""
    batch, n, _ = a.shape
    scaled, single = torch.empty_like(a), torch.empty_like(a, dtype=torch.float32)
    scale = a.new_empty(batch)
    arguments = (a.data_ptr(), scaled.data_ptr(), single.data_ptr(), scale.data_ptr(), n)
    kernels.launch("refine_prepare", (batch,), threads, 8 * threads, arguments)
    return scaled, single, scale


def refine(
    a: Tensor, scale: Tensor, guess: Tensor, kernels: Kernels, threads: int = _THREADS
) -> tuple[Tensor, Tensor, Tensor]:
    """Refine approximate eigenvectors of scaled matrices.

    Args:
        a: scaled float64 matrices (batch, n, n).
        scale: what they were divided by (batch,).
        guess: approximate eigenvectors in rows (batch, n, n), float32.
        kernels: where the steps run.
        threads: of a block.

    Returns:
        Ascending eigenvalues, eigenvectors in rows, and how many indices of each matrix were turned by rotations.
    """
    batch, n, _ = a.shape
    z = a.new_empty(batch, n, 2, n)  # rows of V and of VA in turn: two products then cost one launch
    z[:, :, 0].copy_(guess)
    torch.bmm(z[:, :, 0], a, out=z[:, :, 1])
    s, p, values = torch.empty_like(a), torch.empty_like(a), a.new_empty(batch, n)
    turned = torch.zeros(batch, dtype=torch.int32, device=a.device)
    needed = shared_bytes(n, threads)
    spare = min(2 * n * (n | 1), max(kernels.shared_limit - needed, 0) // 8)
    for step, limit in enumerate(LIMITS):
        last = step == len(LIMITS) - 1
        v = z[:, :, 0]
        g = torch.bmm(z.view(batch, 2 * n, n), v.mT)
        tensors = (g, p, s, z, a, scale, values, turned)
        arguments = (*(x.data_ptr() for x in tensors), limit, int(last), n, spare)
        kernels.launch("refine_step", (batch,), threads, needed + 8 * spare, arguments)
        if not last:
            z = torch.bmm(p, z.view(batch, n, 2 * n)).view(batch, n, 2, n)
    return values, torch.bmm(p, v), turned


def _chain(a: Tensor) -> tuple[Tensor, Tensor]:
    kernels = SOURCE.on(a.get_device())
    scaled, single, scale = prepare(a, kernels)
    cusolver.solve_in_place(single)
    values, vectors, _ = refine(scaled, scale, single, kernels)
    return values, vectors


def solve(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigendecomposition of contiguous (batch, n, n) float64 CUDA matrices; NaN where it did not converge."""
    batch, n, _ = a.shape
    chunk = max(1, _MAX_BYTES // (8 * n * n))
    if batch > chunk:
        parts = [solve(part) for part in a.split(chunk)]
        return torch.cat([values for values, _ in parts]), torch.cat([vectors for _, vectors in parts])
    if a.numel() * 8 <= _MAX_REPLAYED_BYTES and cusolver.recordable():
        values, vectors = replayed("refined", _chain, (a,))
    else:
        values, vectors = _chain(a)
    return values, vectors.mT
