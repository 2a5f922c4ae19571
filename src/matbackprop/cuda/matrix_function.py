"""Functions of symmetric matrices on CUDA: up to order 64 by two kernels, one forward and one backward.

The Jacobi eigensolver and the products run in shared memory, matrices are read and written once in their dtype, and
intermediate results are float64 (``matrix_function.cu``). Larger matrices need an eigensolver, batched products and
the four kernels of ``matrix_function_parts.cu``, in 11 launches besides the eigensolver's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from matbackprop.cuda import jacobi
from matbackprop.cuda.compiler import (
    CONSTANTS,
    DEPTH,
    FUNCTION_NUMBERS,
    FUNCTIONS,
    LDT,
    PRODUCT_THREADS,
    TENSOR_CORES,
    TYPES,
    Module,
    Source,
    shared_limit,
)
from matbackprop.cuda.fallback import call_kernels, kernels_may_take
from matbackprop.divided_differences import SpectralFunction

_REAL_BYTES = 8
_MAX_ORDER = 1024  # above, products dominate the time
_GROUP, _EDGE, _THREADS = 8, 32, 256  # of the kernels in parts: columns of U or edge of the square of a block; threads
SOURCE = Source("matrix_function.cu", CONSTANTS, REAL_IS_DOUBLE=1, THIN=0)
PARTS = Source(
    "matrix_function_parts.cu", FUNCTION_NUMBERS, THIN=0, REAL="double", GROUP=_GROUP, EDGE=_EDGE, MAX_THREADS=_THREADS
)

Solver = Callable[[Tensor], tuple[Tensor, Tensor]]
"""An eigensolver: symmetric matrices to ascending eigenvalues, and eigenvectors in columns."""


def applies(a: Tensor, function: SpectralFunction) -> bool:
    """Return whether kernels support matrices ``(*batch, n, n)``: n ≤ 1024, and g is a built-in function."""
    return (
        function.name in FUNCTIONS
        and function.builtin
        and kernels_may_take(a, capability=TENSOR_CORES)
        and a.dtype in TYPES
        and a.shape[-1] <= _MAX_ORDER
    )


def _backward_bytes(n: int) -> int:
    return 2 * -(-n // DEPTH) * DEPTH * LDT * _REAL_BYTES


@functools.cache
def on_chip(n: int, shared_limit: int) -> bool:
    """Return whether a matrix fits into ``shared_limit`` bytes of shared memory."""
    if n > jacobi.MAX_ORDER:
        return False
    return max(jacobi.Sizes(n).shared_bytes(_REAL_BYTES), _backward_bytes(n)) <= shared_limit


def _kernels(a: Tensor, function: str) -> Module:
    return SOURCE.on(a.get_device(), IN=TYPES[a.dtype], FUNCTION=FUNCTIONS[function])


def forward(a: Tensor, function: str, rounding: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    """g(A) in the dtype of A, and factors for :func:`gradient`: λ ``(count, n)`` and U ``(count, n, n)`` in float64.

    Args:
        a: A ``(*batch, n, n)``, contiguous float32 or float64, whose symmetric part is used.
        function: the name of g.
        rounding: rounding error of an eigenvalue as a fraction of the largest; see ``matrix_function.cuh``.
    """
    n = a.shape[-1]
    count, sizes = a.numel() // (n * n), jacobi.Sizes(n)
    out = torch.empty_like(a)
    values = torch.empty((count, n), dtype=torch.float64, device=a.device)
    vectors = torch.empty((count, n, n), dtype=torch.float64, device=a.device)
    addresses = (t.data_ptr() for t in (a, out, values, vectors))
    shared = sizes.shared_bytes(_REAL_BYTES)
    arguments = (*addresses, rounding, n)
    _kernels(a, function).launch("function_forward", (count,), sizes.threads, shared, arguments)
    return out, (values, vectors)


def gradient(g: Tensor, a: Tensor, values: Tensor, vectors: Tensor, function: str) -> Tensor:
    """dL/dA in the dtype of A for the gradient G of g(A), whose symmetric part is used."""
    count, n = values.shape
    out = torch.empty_like(a)
    arguments = (*(t.data_ptr() for t in (g, values, vectors, out)), n)
    _kernels(a, function).launch("function_backward", (count,), PRODUCT_THREADS, _backward_bytes(n), arguments)
    return out


def _kernels_of_parts(a: Tensor, function: str) -> Module:
    return PARTS.on(a.get_device(), IN=TYPES[a.dtype], FUNCTION=FUNCTIONS[function])


def _squares(count: int, n: int) -> tuple[int]:
    """The grid of one block per square of n×n matrices."""
    return (count * (-(-n // _EDGE)) ** 2,)


def _doubled(x: Tensor, kernels: Module) -> Tensor:
    """X + Xᵀ ``(count, n, n)`` in float64."""
    n = x.shape[-1]
    out = torch.empty((x.numel() // (n * n), n, n), dtype=torch.float64, device=x.device)
    kernels.launch("function_symmetric", _squares(len(out), n), _THREADS, 0, (x.data_ptr(), out.data_ptr(), n))
    return out


def _mirrored(product: Tensor, like: Tensor, kernels: Module) -> Tensor:
    """Mirror the lower triangle of a product and convert it to the dtype and shape of another tensor."""
    count, n, _ = product.shape
    out = torch.empty_like(like)
    kernels.launch("function_mirror", _squares(count, n), _THREADS, 0, (product.data_ptr(), out.data_ptr(), n))
    return out


def forward_in_parts(a: Tensor, function: str, rounding: float, solve: Solver) -> tuple[Tensor, tuple[Tensor, ...]]:
    """:func:`forward` for any order, by an eigensolver: ascending eigenvalues, and eigenvectors in columns."""
    kernels = _kernels_of_parts(a, function)
    doubled, vectors = solve(_doubled(a, kernels))
    doubled, (count, n) = doubled.contiguous(), doubled.shape
    values, scaled = torch.empty_like(doubled), torch.empty_like(vectors)
    addresses = (t.data_ptr() for t in (doubled, vectors, values, scaled))
    arguments = (*addresses, rounding, n, *vectors.stride()[1:])
    kernels.launch("function_columns", (count * -(-n // _GROUP),), _THREADS, 0, arguments)
    return _mirrored(torch.bmm(scaled, vectors.mT), a, kernels), (values, vectors)


def gradient_in_parts(g: Tensor, a: Tensor, values: Tensor, vectors: Tensor, function: str) -> Tensor:
    """:func:`gradient` for any order."""
    count, n = values.shape
    kernels = _kernels_of_parts(a, function)
    w = torch.bmm(torch.bmm(vectors.mT, _doubled(g, kernels)), vectors)
    blocks = -(-count * n // (_THREADS // 32))
    kernels.launch("function_table", (blocks,), _THREADS, 0, (w.data_ptr(), values.data_ptr(), count * n, n))
    return _mirrored(torch.bmm(torch.bmm(vectors, w), vectors.mT), a, kernels)


class _Job(NamedTuple):
    function: str
    rounding: float
    on_chip: bool
    solve: Solver
    general: Callable[[Tensor], Tensor]

    def forward(self, a: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.on_chip:
            return forward(a, self.function, self.rounding)
        return forward_in_parts(a, self.function, self.rounding, self.solve)

    def gradient(self, g: Tensor, a: Tensor, *factors: Tensor) -> Tensor:
        values, vectors = factors
        return (gradient if self.on_chip else gradient_in_parts)(g, a, values, vectors, self.function)


def matrix_function(
    a: Tensor, function: str, rounding: float, general: Callable[[Tensor], Tensor], solve: Solver
) -> Tensor:
    """g(A) in the dtype of A, for which :func:`applies` holds; ``general`` is the operator without the kernels."""
    job = _Job(function, rounding, on_chip(a.shape[-1], shared_limit(a.get_device())), solve, general)
    wide = a.float() if a.dtype in (torch.float16, torch.bfloat16) else a
    return call_kernels(wide.contiguous(), job).to(a.dtype)
