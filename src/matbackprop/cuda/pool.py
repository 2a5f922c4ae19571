"""Second-order pooling of small feature maps on CUDA in five kernels: two forward, three backward.

``pool.cu`` holds them. The Gram matrix and its Jacobi eigensolver stay on chip, features and outputs are read
and written once in their own dtype, and everything between is float64. They are compiled when first used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from matbackprop.checks import is_plain
from matbackprop.cuda import jacobi, separate
from matbackprop.cuda.compiler import Module, Source
from matbackprop.cuda.product import PRODUCT, PRODUCT_THREADS, TENSOR_CORES, TILE, TYPES
from matbackprop.cuda.rows import ROWS, tile
from matbackprop.cuda.twin import Pair, call_pair, kernels_may_take
from matbackprop.divided_differences import SpectralFunction

_FUNCTIONS = {"log": 0, "sqrt": 1, "inv_sqrt": 2, "inverse": 3}
_REAL_BYTES = 8
_OWN = Source(
    "pool.cu",
    WIDE=separate.SAFE_RATIO * separate.OVERLAP_LIMIT[False],
    MIXED=separate.OVERLAP_LIMIT[False],
    **{name.upper(): number for name, number in _FUNCTIONS.items()},
)
SOURCE = jacobi.SOURCE + separate.KERNELS + ROWS + PRODUCT + _OWN


def _eps_arguments(eps: Tensor | float) -> tuple[int, float]:
    """ε by address, one value per matrix, or by value."""
    return (eps.data_ptr(), 0.0) if isinstance(eps, Tensor) else (0, float(eps))


def applies(f: Tensor, eps: float | Tensor, function: SpectralFunction) -> bool:
    """Whether the kernels take features ``(*batch, m, d)``: 0 < m ≤ 64, m < d, g in closed form, a fixed ε > 0.

    float64 features are left to the general operator, which refines small eigenvectors to the digits these carry.
    """
    return (
        f.is_cuda
        and f.dtype != torch.float64
        and function.name in _FUNCTIONS
        and 0 < f.shape[-2] <= jacobi.MAX_ORDER
        and f.shape[-2] < f.shape[-1]
        and (is_plain(eps) and not eps.requires_grad if isinstance(eps, Tensor) else eps > 0)
        and f.dtype in TYPES
        and kernels_may_take(f, capability=TENSOR_CORES)
    )


def _kernels(f: Tensor, function: str) -> Module:
    return SOURCE.on(f.get_device(), REAL_IS_DOUBLE=1, IN=TYPES[f.dtype], FUNCTION=_FUNCTIONS[function])


@functools.cache
def _plan(m: int, d: int) -> tuple[int, int, int]:
    """Threads and shared memory of ``pool_spectrum``, and the tiles that cover d."""
    sizes = jacobi.Sizes(m)
    shared = sizes.shared_bytes(_REAL_BYTES, tile=tile(m))
    return sizes.threads, shared, -(-d // TILE)


def _factors(work: Tensor, count: int, m: int, d: int) -> tuple[int, int, int, int]:
    """Addresses of s, slopes ``(count, m)``, U ``(count, m, m)`` and Y ``(count, m, d)`` in one piece of memory."""
    s = work.data_ptr()
    slopes = s + count * m * _REAL_BYTES
    u = slopes + count * m * _REAL_BYTES
    return s, slopes, u, u + count * m * m * _REAL_BYTES


def forward(f: Tensor, eps: float | Tensor, function: str) -> tuple[Tensor, Tensor]:
    """C ``(*batch, d, d)`` in the dtype of F, and the factors that :func:`gradient` needs, in float64.

    F is contiguous float32 or float64; ε a number, or float64 and contiguous, one value per matrix.
    """
    *batch, m, d = f.shape
    count = f.numel() // (m * d)
    kernels = _kernels(f, function)
    c = torch.empty((*batch, d, d), dtype=f.dtype, device=f.device)
    work = torch.empty(count * m * (2 + m + d), dtype=torch.float64, device=f.device)
    s, slopes, u, y = _factors(work, count, m, d)
    threads, shared, tiles = _plan(m, d)
    shift = _eps_arguments(eps)
    kernels.launch("pool_spectrum", (count,), threads, shared, (f.data_ptr(), *shift, s, slopes, u, y, m, d))
    arguments = (y, slopes, *shift, c.data_ptr(), m, d)
    kernels.launch("pool_output", (count, tiles * (tiles + 1) // 2), PRODUCT_THREADS, 0, arguments)
    return c, work


def gradient(g: Tensor, f: Tensor, eps: float | Tensor, work: Tensor, function: str) -> Tensor:
    """dL/dF ``(*batch, m, d)`` in the dtype of F for the gradient G of C, whose symmetric part counts."""
    m, d = f.shape[-2:]
    count = f.numel() // (m * d)
    kernels = _kernels(f, function)
    out = torch.empty_like(f)
    own = torch.empty(count * m * (d + 2 * m), dtype=torch.float64, device=f.device)
    t = own.data_ptr()
    mixing = t + count * m * d * _REAL_BYTES
    s, slopes, u, y = _factors(work, count, m, d)
    tiles = (count, _plan(m, d)[2])
    kernels.launch("pool_project", tiles, PRODUCT_THREADS, 0, (y, g.data_ptr(), t, m, d))
    shared = 2 * m * (m | 1) * _REAL_BYTES
    arguments = (y, t, s, slopes, u, *_eps_arguments(eps), mixing, m, d)
    kernels.launch("pool_mixing", (count,), PRODUCT_THREADS, shared, arguments)
    kernels.launch("pool_gradient", tiles, PRODUCT_THREADS, 0, (mixing, t, y, out.data_ptr(), m, d))
    return out


def pool(f: Tensor, eps: float | Tensor, function: SpectralFunction, general: Callable[[Tensor], Tensor]) -> Tensor:
    """C = g(FᵀF + εI) ``(*batch, d, d)`` in the dtype of F.

    Args:
        f: features for which :func:`applies` holds.
        eps: a number, or float64 on the device of F, one value per matrix.
        function: g.
        general: the same operator without the kernels.
    """
    if isinstance(eps, Tensor):
        eps = eps.contiguous()

    def kernels(x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        c, work = forward(x, eps, function.name)
        return c, (work,)

    def adjoint(g: Tensor, x: Tensor, work: Tensor) -> Tensor:
        return gradient(g, x, eps, work, function.name)

    wide = f.float() if f.dtype in (torch.float16, torch.bfloat16) else f
    return call_pair(wide.contiguous(), Pair(kernels, adjoint, general)).to(f.dtype)
