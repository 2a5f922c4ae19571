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
    CONSTANTS,
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
from matbackprop.cuda.fallback import call_kernels, kernels_may_take
from matbackprop.divided_differences import SpectralFunction

_REAL_BYTES = 8
SOURCE = Source("matrix_function.cu", CONSTANTS, REAL_IS_DOUBLE=1, THIN=0)


def applies(a: Tensor, function: SpectralFunction) -> bool:
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


def _kernels(a: Tensor, function: str) -> Module:
    return SOURCE.on(a.get_device(), IN=TYPES[a.dtype], FUNCTION=FUNCTIONS[function])


def forward(a: Tensor, function: str, rounding: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    """g(A) in the dtype of A, and factors for :func:`gradient`: λ ``(count, n)`` and U ``(count, n, n)`` in float64.

    Args:
        a: A ``(*batch, n, n)``, contiguous float32 or float64, whose symmetric part is used.
        function: the name of g.
        rounding: rounding error of an eigenvalue as a fraction of the largest; see ``matrix_function.cu``.
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


class _Job(NamedTuple):
    function: str
    rounding: float
    general: Callable[[Tensor], Tensor]

    def forward(self, a: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return forward(a, self.function, self.rounding)

    def gradient(self, g: Tensor, a: Tensor, *factors: Tensor) -> Tensor:
        values, vectors = factors
        return gradient(g, a, values, vectors, self.function)


def matrix_function(a: Tensor, function: str, rounding: float, general: Callable[[Tensor], Tensor]) -> Tensor:
    """g(A) in the dtype of A, for which :func:`applies` holds; ``general`` is the operator without the kernels."""
    wide = a.float() if a.dtype in (torch.float16, torch.bfloat16) else a
    return call_kernels(wide.contiguous(), _Job(function, rounding, general)).to(a.dtype)
