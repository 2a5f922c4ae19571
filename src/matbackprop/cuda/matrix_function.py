"""Functions of symmetric matrices on CUDA: up to order 64 by two kernels, one forward and one backward.

The Jacobi eigensolver and the products run in shared memory, matrices are read and written once in their dtype, and
intermediate results are float64 (``matrix_function.cu``). Larger matrices use ``matrix_function_parts.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from matbackprop.cuda import jacobi
from matbackprop.cuda import matrix_function_parts as parts
from matbackprop.cuda.compiler import Module, Source, shared_limit
from matbackprop.cuda.fallback import Pair, call_pair, kernels_may_take
from matbackprop.cuda.headers import CONSTANTS, DEPTH, FUNCTIONS, LDT, PRODUCT_THREADS, TENSOR_CORES, TYPES
from matbackprop.cuda.pool_parts import Solver
from matbackprop.divided_differences import SpectralFunction

_REAL_BYTES = 8
SOURCE = Source("matrix_function.cu", CONSTANTS, THIN=0)


def applies(a: Tensor, function: SpectralFunction) -> bool:
    """Return whether kernels support matrices ``(*batch, n, n)``: n ≤ 1024, and g is a built-in function."""
    return (
        a.is_cuda
        and function.name in FUNCTIONS
        and function.builtin
        and kernels_may_take(a, capability=TENSOR_CORES)
        and a.dtype in TYPES
        and a.shape[-1] <= parts.MAX_ORDER
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
    return SOURCE.on(a.get_device(), REAL_IS_DOUBLE=1, IN=TYPES[a.dtype], FUNCTION=FUNCTIONS[function])


def forward(a: Tensor, function: str, share: float, kernels: Module | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """g(A) in the dtype of A, and factors for :func:`gradient`: λ ``(count, n)`` and U ``(count, n, n)`` in float64.

    Args:
        a: A ``(*batch, n, n)``, contiguous float32 or float64, whose symmetric part is used.
        function: the name of g.
        share: rounding error of an eigenvalue as a fraction of the largest; see ``matrix_function.cuh``.
        kernels: compiled kernels to run instead of those of the device of A.
    """
    n = a.shape[-1]
    count, sizes = a.numel() // (n * n), jacobi.Sizes(n)
    kernels = kernels or _kernels(a, function)
    out = torch.empty_like(a)
    values = torch.empty((count, n), dtype=torch.float64, device=a.device)
    vectors = torch.empty((count, n, n), dtype=torch.float64, device=a.device)
    addresses = (t.data_ptr() for t in (a, out, values, vectors))
    shared = sizes.shared_bytes(_REAL_BYTES)
    kernels.launch("function_forward", (count,), sizes.threads, shared, (*addresses, share, n))
    return out, (values, vectors)


def gradient(
    g: Tensor, a: Tensor, values: Tensor, vectors: Tensor, function: str, kernels: Module | None = None
) -> Tensor:
    """dL/dA in the dtype of A for the gradient G of g(A), whose symmetric part is used."""
    count, n = values.shape
    kernels = kernels or _kernels(a, function)
    out = torch.empty_like(a)
    addresses = (t.data_ptr() for t in (g, values, vectors, out))
    kernels.launch("function_backward", (count,), PRODUCT_THREADS, _backward_bytes(n), (*addresses, n))
    return out


def matrix_function(
    a: Tensor, function: str, share: float, general: Callable[[Tensor], Tensor], solve: Solver
) -> Tensor:
    """g(A) ``(*batch, n, n)`` in the dtype of A.

    Args:
        a: matrices for which :func:`applies` holds.
        function: the name of g.
        share: as in :func:`forward`.
        general: the same operator without the kernels.
        solve: eigensolver for matrices that do not fit into shared memory.
    """
    if on_chip(a.shape[-1], shared_limit(a.get_device())):
        pair = Pair(
            functools.partial(forward, function=function, share=share),
            functools.partial(gradient, function=function),
            general,
        )
    else:
        pair = Pair(
            functools.partial(parts.forward, function=function, share=share, solve=solve),
            functools.partial(parts.gradient, function=function),
            general,
        )
    wide = a.float() if a.dtype in (torch.float16, torch.bfloat16) else a
    return call_pair(wide.contiguous(), pair).to(a.dtype)
