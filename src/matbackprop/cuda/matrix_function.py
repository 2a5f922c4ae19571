"""Functions of symmetric matrices up to order 64 on CUDA by two kernels, one forward and one backward.

The Jacobi eigensolver and the products run in shared memory, matrices are read and written once in their dtype, and
intermediate results are float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from matbackprop.cuda import jacobi
from matbackprop.cuda.compiler import (
    DEPTH,
    FUNCTIONS,
    LDT,
    PRODUCT_THREADS,
    TENSOR_CORES,
    TYPES,
    Module,
    Source,
    shared_limit,
)
from matbackprop.cuda.fallback import kernels_may_take
from matbackprop.divided_differences import SpectralFunction

_REAL_BYTES = 8
SOURCE = Source("matrix_function.cu", THIN=0)


def takes(a: Tensor, function: SpectralFunction) -> bool:
    """Return whether kernels support matrices ``(*batch, n, n)``: they fit a block, and g is a built-in function."""
    return (
        function.name in FUNCTIONS
        and function.builtin
        and kernels_may_take(a, capability=TENSOR_CORES)
        and a.dtype in TYPES
        and on_chip(a.shape[-1], shared_limit(a.get_device()))
    )


def _backward_bytes(n: int) -> int:
    return 2 * -(-n // DEPTH) * DEPTH * LDT * _REAL_BYTES


@functools.cache
def on_chip(n: int, shared_limit: int) -> bool:
    """Return whether a matrix fits into ``shared_limit`` bytes of shared memory."""
    if n > jacobi.MAX_ORDER:
        return False
    return max(jacobi.Sizes(n).shared_bytes(_REAL_BYTES), _backward_bytes(n)) <= shared_limit


class MatrixFunction(NamedTuple):
    """g(A) for `call_kernels`. The symmetric parts of A and of the gradient of g(A) are used."""

    name: str  # of g
    rounding: float  # error of an eigenvalue as a fraction of the largest; see ``matrix_function.cu``
    general: Callable[[Tensor], Tensor]  # g(A) in torch operations

    def _kernels(self, a: Tensor) -> Module:
        return SOURCE.on(a.get_device(), IN=TYPES[a.dtype], FUNCTION=FUNCTIONS[self.name])

    def forward(self, a: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """g(A), and in float64 λ ``(count, n)`` and U ``(count, n, n)``."""
        n = a.shape[-1]
        count, sizes = a.numel() // (n * n), jacobi.Sizes(n)
        out = torch.empty_like(a)
        factors = tuple(a.new_empty(count, *shape, dtype=torch.float64) for shape in ((n,), (n, n)))
        arguments = (*(t.data_ptr() for t in (a, out, *factors)), self.rounding, n)
        shared = sizes.shared_bytes(_REAL_BYTES)
        self._kernels(a).launch("function_forward", (count,), sizes.threads, shared, arguments)
        return out, factors

    def gradient(self, g: Tensor, a: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
        count, n = values.shape
        out = torch.empty_like(a)
        arguments = (*(t.data_ptr() for t in (g, values, vectors, out)), n)
        self._kernels(a).launch("function_backward", (count,), PRODUCT_THREADS, _backward_bytes(n), arguments)
        return out
