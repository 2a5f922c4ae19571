"""The thin singular value decomposition of matrices with a short side up to 64, and its adjoint, in one kernel each.

The computation is in float64. The kernels read float32 matrices and gradients directly and also write rounded factors,
because a conversion costs as much as the kernel. Matrices of up to 16 entries are decomposed by one thread each
(``tiny.cu``), others by one block each (``svd.cu``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop.cuda import jacobi
from matbackprop.cuda.compiler import TYPES, Module, Source
from matbackprop.cuda.fallback import kernels_may_take
from matbackprop.refinement import ORTHOGONAL

_ADJOINT_THREADS = 256
_MAX_ENTRIES = jacobi.MAX_ORDER**2 // _ADJOINT_THREADS  # of a k×k matrix that a thread holds
SOURCE = Source("svd.cu", MAX_ENTRIES=_MAX_ENTRIES)

MAX_TINY = 16  # entries of a matrix that a single thread holds
TINY_THREADS = 128
TINY = Source("tiny.cu", ORTHOGONAL=ORTHOGONAL)

_LONG, _MANY = 2048, 128  # a longer side occupies too little of a GPU in one block per matrix, unless there are many

Factors = tuple[Tensor, Tensor, Tensor]


def long(side: int, count: int) -> bool:
    """Return whether one block per matrix occupies too little of a GPU for ``count`` matrices with a long side."""
    return side > _LONG and count < _MANY


def takes(x: Tensor, dtype: torch.dtype = torch.float64) -> bool:
    """Return whether the kernels decompose matrices ``(*batch, m, n)`` of a dtype, with a short side up to 64."""
    return x.dtype == dtype and min(x.shape[-2:]) <= jacobi.MAX_ORDER and kernels_may_take(x)


def _on(x: Tensor, dtype: torch.dtype) -> Module:
    return SOURCE.on(x.get_device(), IN=TYPES[dtype])


def _sides(m: int, n: int) -> tuple[int, int, int]:
    """The short side, the long side, and whether the matrix is tall."""
    return min(m, n), max(m, n), int(m > n)


def factor(x: Tensor, limit: float) -> tuple[Factors, Factors]:
    """U ``(*batch, m, k)``, σ ``(*batch, k)`` descending and Vᵀ ``(*batch, k, n)``; NaN if it did not converge.

    In float64, and in the dtype of X, which are the same tensors for float64. ``limit`` is the largest |vᵢ·vⱼ| of the
    long side's vectors that may remain.
    """
    *batch, m, n = x.shape
    k, long, tall = _sides(m, n)
    x, count = x.contiguous(), x.numel() // (m * n)
    shapes = (*batch, m, k), (*batch, k), (*batch, k, n)
    u, s, vh = (x.new_empty(shape, dtype=torch.float64) for shape in shapes)
    factors = rounded = (u, s, vh)
    results = [t.data_ptr() for t in ((vh, s, u) if tall else factors)]
    if x.dtype == torch.float64:
        results += [0, 0, 0]
    else:
        rounded = (x.new_empty(shapes[0]), x.new_empty(shapes[1]), x.new_empty(shapes[2]))
        results += [t.data_ptr() for t in (rounded[::-1] if tall else rounded)]
    if m * n <= MAX_TINY:
        kernels = TINY.on(x.get_device(), K=k, L=long, IN=TYPES[x.dtype])
        blocks = (-(-count // TINY_THREADS),)
        kernels.launch("svd_tiny", blocks, TINY_THREADS, 0, (x.data_ptr(), *results, count, tall))
        return factors, rounded
    scratch = u.new_empty(count * k * (long + k))
    rotated = scratch.data_ptr() + 8 * count * k * long
    sizes = jacobi.Sizes(k)
    kernels = _on(x, x.dtype)
    addresses = (x.data_ptr(), scratch.data_ptr(), rotated, *results)
    kernels.launch("svd_factor", (count,), sizes.threads, sizes.gram_bytes, (*addresses, limit, k, long, tall))
    return factors, rounded


def adjoint(
    factors: Factors,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    tolerance: float,
    broadening: float,
    gauge: float,
    flag: Tensor | None,
) -> Tensor:
    """dL/dX for the gradients of U, σ and Vᵀ, some of which may be absent, in the dtype of the gradients.

    Args:
        factors: U, σ and Vᵀ in float64, as :func:`factor` returns them.
        gradients: of the loss with respect to them, all of one dtype.
        tolerance, broadening: as in `TiePolicy`; broadening is 0 for other policies.
        gauge: fraction of the gradients by which a loss may depend on the choice of tied vectors; if negative, it must
            not depend on tied vectors.
        flag: a boolean tensor that is set to true if the loss depends on that choice.
    """
    u, s, vh = (t.contiguous() for t in factors)
    g_u, g_s, g_vh = (None if g is None else g.contiguous() for g in gradients)
    m, n = u.shape[-2], vh.shape[-1]
    k, long, tall = _sides(m, n)
    q, v, g_q, g_v = (vh, u, g_vh, g_u) if tall else (u, vh, g_u, g_vh)
    dtype = next(g.dtype for g in gradients if g is not None)
    out = u.new_empty((*u.shape[:-1], n), dtype=dtype)
    addresses = tuple(0 if t is None else t.data_ptr() for t in (q, s, v, g_q, g_s, g_v, out, flag))
    threads = _ADJOINT_THREADS if k > 8 or k * long > 512 else 64
    shared = 8 * (2 * jacobi.Sizes(k).tile + 3 * k * (k | 1) + 2 * k + 4 * threads) + 4 * k
    kernels = _on(u, dtype)
    arguments = (*addresses, tolerance, broadening, gauge, k, long, tall)
    kernels.launch("svd_adjoint", (s.numel() // k,), threads, shared, arguments)
    return out
