"""Float64 eigensolver for matrices of a few hundred rows: tridiagonal reduction and divide and conquer.

``tridiagonal.cu`` reduces a matrix to tridiagonal form in one kernel. Its leaves of at most 16 rows are solved by the
Jacobi kernel and merged two by two (``conquer.cuh``); the products that apply a merge, and the reflections at the end,
are batched matrix products. Nothing synchronizes, and every step can be captured into a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from matbackprop.cuda import compiler, jacobi
from matbackprop.cuda.compiler import Module, Source

MIN_ORDER = 49  # below, the Jacobi kernel is faster for every batch size
MAX_ORDER = 1024
_MERGE_THREADS = 1024
_MAX_LEAF = 16
_BLOCK = 64  # reflections that are applied at once
_LANES = 4  # threads that compute a root of the secular equation
_FACTOR_LANES = 4  # threads that share a column of a factor
SOURCE = Source(
    "tridiagonal.cu",
    MERGE_THREADS=_MERGE_THREADS,
    BLOCK=_BLOCK,
    FACTOR_LANES=_FACTOR_LANES,
    LANES=_LANES,
    DOT_LANES=16,  # threads that share a product with a vector of the panel
    MAX_GROUPS=8,  # groups of threads that divide the rows of a matrix
    ROWS=4,  # rows that a thread updates at once
)
_MIN_SHARED_ORDER = 128  # below, synchronizing blocks takes longer than reading the matrix
_MAX_BYTES = 2**29  # of matrices per call; workspace is six times as much
_FULL_RATE = ((7, 0), (8, 0), (9, 0), (10, 0))  # on others float64 is 32 or 64 times slower than float32


class Plan(NamedTuple):
    """Sizes for the reduction and the leaves of matrices of order n."""

    n: int

    @property
    def parts(self) -> int:
        """Leaves, a power of two."""
        return 1 << max(0, (-(-self.n // _MAX_LEAF) - 1).bit_length())

    @property
    def leaf(self) -> int:
        """Rows of a leaf; the last leaves are padded."""
        return -(-self.n // self.parts)

    @property
    def blocks(self) -> int:
        """Blocks of reflections, of which n - 2 are needed."""
        return -(-max(self.n - 2, 1) // _BLOCK)

    @property
    def ld(self) -> int:
        """Leading dimension of the working copy."""
        return (self.n + 3) // 4 * 4

    @property
    def width(self) -> int:
        """Reflections of a panel, as many as shared memory holds."""
        return 16 if 256 < self.n <= 512 else 8

    @property
    def threads(self) -> int:
        """Threads of the reduction, one or more per row."""
        return 512 if self.n <= 512 else 1024

    def shared_bytes(self, cluster: int) -> int:
        """Shared memory that the reduction needs, as laid out in the source."""
        return 16 * (self.width * self.n + self.threads + self.width + 2) + 8 * ((1 + 2 * cluster) * self.n + 33)

    def resident(self, spare: int, cluster: int) -> int:
        """Rows of the last part of a matrix that its blocks keep in ``spare`` bytes each; 0 for less than half."""
        sizes = range(self.n + self.n % 2, self.n // 2, -2)
        return next((s for s in sizes if 8 * s * -(-s // cluster) <= spare), 0)


def takes(device: torch.device, n: int) -> bool:
    """Return whether this solver supports order n: a compiler, full float64 rate, and shared memory for panels."""
    if not (MIN_ORDER <= n <= MAX_ORDER and compiler.available() and compiler.capability(device) in _FULL_RATE):
        return False
    return bool(_clusters(device, Plan(n)))


def _clusters(device: torch.device, plan: Plan) -> list[int]:
    """Numbers of thread blocks that may share a matrix."""
    limit = compiler.shared_limit(torch.cuda.current_device() if device.index is None else device.index)
    known = (1, 2, 4, 8) if compiler.capability(device) >= (9, 0) else (1,)
    return [c for c in known if plan.shared_bytes(c) <= limit]


def _cluster(device: torch.device, batch: int, plan: Plan) -> int:
    """The number of thread blocks that share a matrix, more than one if there are few or it is large."""
    fitting, units = _clusters(device, plan), torch.cuda.get_device_properties(device).multi_processor_count
    if plan.n < _MIN_SHARED_ORDER:
        return fitting[0]
    # The blocks of a matrix must be in one cluster, and fewer large clusters fit on the device than blocks.
    most = {1: batch, 2: units, 4: 3 * units // 4, 8: 3 * units // 4}
    return max((c for c in fitting if batch * c <= most[c]), default=fitting[0])


class Tridiagonal(NamedTuple):
    """Result of the reduction, as ``tridiagonalize`` in the source describes it."""

    leaves: Tensor
    couplings: Tensor
    scale: Tensor
    reflectors: Tensor


def reduce(a: Tensor, kernels: Module, cluster: int = 1) -> Tridiagonal:
    """Reduce contiguous (batch, n, n) float64 matrices, given by their lower triangles, to tridiagonal form."""
    batch, n, _ = a.shape
    plan = Plan(n)
    work, bands = a.new_empty(batch, n, plan.ld), a.new_empty(batch, 2, n)
    out = Tridiagonal(
        leaves=a.new_empty(batch, plan.parts, plan.leaf, plan.leaf),
        couplings=a.new_empty(batch, plan.parts * plan.leaf),
        scale=a.new_empty(batch),
        reflectors=a.new_zeros(batch, plan.blocks, n, _BLOCK),
    )
    needed = plan.shared_bytes(cluster)
    resident = plan.resident(kernels.shared_limit - needed, cluster)
    tensors = (a, work, bands, out.reflectors, out.leaves, out.couplings, out.scale)
    sizes = (n, plan.ld, plan.width, resident, plan.blocks, plan.leaf, plan.parts)
    arguments = (*(x.data_ptr() for x in tensors), *sizes)
    shared = needed + 8 * resident * -(-resident // cluster)
    kernels.launch("tridiagonalize", (batch * cluster,), plan.threads, shared, arguments)
    return out


def conquer(t: Tridiagonal, values: Tensor, vectors: Tensor, kernels: Module) -> tuple[Tensor, Tensor]:
    """Merge the eigenvalues and eigenvectors of the leaves until they are those of the tridiagonal matrices.

    Args:
        t: the tridiagonal matrices.
        values: of the leaves ``(batch * parts, leaf)``, ascending.
        vectors: of the leaves ``(batch * parts, leaf, leaf)``, in columns.
        kernels: launches the steps.

    Returns:
        Ascending eigenvalues ``(batch, n)`` and eigenvectors ``(batch, n, n)`` in columns; NaN if ``t.scale``
        is, or a root did not converge.
    """
    batch, parts, leaf, _ = t.leaves.shape
    half = leaf
    while parts > 1:
        parts, n = parts // 2, 2 * half
        merged, mixing = values.new_empty(batch * parts, n), values.new_empty(batch * parts, n, n)
        threads = min(_MERGE_THREADS, -(-_LANES * n // 32) * 32)
        scale = t.scale.data_ptr() if parts == 1 else 0
        addresses = (values.data_ptr(), vectors.data_ptr(), t.couplings.data_ptr(), scale)
        arguments = (*addresses, merged.data_ptr(), mixing.data_ptr(), half, parts)
        kernels.launch("merge_halves", (batch * parts,), threads, 8 * (9 * n + 32) + 4 * 7 * n, arguments)
        vectors = torch.bmm(vectors.view(-1, half, half), mixing.view(-1, half, n)).view(-1, n, n)
        values, half = merged, n
    n = t.reflectors.shape[-2]
    return values[:, :n], vectors[:, :n, :n]


def reflect(t: Tridiagonal, vectors: Tensor, kernels: Module) -> Tensor:
    """Apply the reflections to vectors ``(batch, n, n)`` in columns, which may be written to."""
    batch, blocks, n, _ = t.reflectors.shape
    v = t.reflectors.view(-1, n, _BLOCK)
    gram = torch.bmm(v.mT, v)
    factors = torch.empty_like(gram)
    arguments = (gram.data_ptr(), factors.data_ptr())
    shared = 8 * _BLOCK * (2 * _BLOCK + 1)
    kernels.launch("block_factors", (batch * blocks,), _BLOCK * _FACTOR_LANES, shared, arguments)
    scaled = torch.bmm(v, factors).view(batch, blocks, n, _BLOCK)
    for block in reversed(range(blocks)):
        top = block * _BLOCK
        rows = vectors[:, top:]
        inside = torch.bmm(t.reflectors[:, block, top:].mT, rows)
        rows.baddbmm_(scaled[:, block, top:], inside, alpha=-1)
    return vectors


def solve(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigendecomposition of contiguous (batch, n, n) float64 CUDA matrices; NaN if it did not converge."""
    batch, n, _ = a.shape
    chunk = max(1, _MAX_BYTES // (8 * n * n))
    if batch > chunk:
        parts = [solve(part) for part in a.split(chunk)]
        return torch.cat([values for values, _ in parts]), torch.cat([vectors for _, vectors in parts])
    plan = Plan(n)
    cluster = _cluster(a.device, batch, plan)
    kernels = SOURCE.on(a.get_device(), CLUSTER=cluster, REDUCE_THREADS=plan.threads)
    t = reduce(a, kernels, cluster)
    leaf = t.leaves.shape[-1]
    values, vectors = conquer(t, *jacobi.solve(t.leaves.view(-1, leaf, leaf)), kernels)
    return values.contiguous(), reflect(t, vectors.contiguous(), kernels)
