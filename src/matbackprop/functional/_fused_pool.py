"""Second-order pooling of small feature maps on CUDA in five kernels: two forward, three backward.

``_fused_pool.cu`` holds them. The Gram matrix and its Jacobi eigensolver stay on chip, features and outputs are read
and written once in their own dtype, and everything between is float64. They are compiled when first used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from matbackprop.divided_differences import SpectralFunction
from matbackprop.eigensolver import _jacobi, _kernels
from matbackprop.numerics import values_checkable

PRODUCT_FILES = (*_jacobi.FILES, "functional/_fused_product.cu")
PRODUCT_THREADS, TILE = 256, 64  # as in the source
TYPES = {torch.float32: "float", torch.float64: "double", torch.float16: "float", torch.bfloat16: "float"}

_FILES = (*PRODUCT_FILES, "functional/_fused_pool.cu")
_FUNCTIONS = {"log": 0, "sqrt": 1, "inv_sqrt": 2, "inverse": 3}
_CHUNK = 64  # as in the source
_REAL_BYTES = 8


class _Shift(ctypes.Structure):
    """ε by address, one value a matrix, or by value."""

    _fields_ = (("each", ctypes.c_void_p), ("value", ctypes.c_double))

    @classmethod
    def of(cls, eps: Tensor | float) -> _Shift:
        return cls(eps.data_ptr(), 0.0) if isinstance(eps, Tensor) else cls(None, eps)


def kernels_apply(f: Tensor) -> bool:
    """Whether run-time kernels may take these features: plain CUDA tensors outside of any transformation."""
    return (
        f.device.type == "cuda"
        and f.dtype in TYPES
        and f.numel() > 0
        and values_checkable(f)
        and type(f) in (Tensor, torch.nn.Parameter)
        and torch.autograd.forward_ad._current_level < 0
        and _kernels.available()
        and torch.cuda.get_device_capability(f.device) >= (8, 0)  # the products use double-precision tensor cores
    )


def applies(f: Tensor, eps: float | Tensor, function: SpectralFunction) -> bool:
    """Whether the kernels take features ``(*batch, m, d)``: 0 < m ≤ 64, m < d, g in closed form, a fixed ε > 0."""
    return (
        function.name in _FUNCTIONS
        and 0 < f.shape[-2] <= _jacobi.MAX_ORDER
        and f.shape[-2] < f.shape[-1]
        and (not eps.requires_grad if isinstance(eps, Tensor) else eps > 0)
        and kernels_apply(f)
    )


def _module(dtype: torch.dtype, function: str, device: int) -> _kernels.Module:
    defines = (("REAL_IS_DOUBLE", 1), ("IN", TYPES[dtype]), ("FUNCTION", _FUNCTIONS[function]))
    return _kernels.module(_FILES, defines, device)


def forward(f: Tensor, eps: float | Tensor, function: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """C ``(*batch, d, d)`` in the dtype of F and, in float64, s, U, Y of the thin form and the slopes g[s + ε, ε].

    F is float32 or float64; ε a number or float64 and contiguous, one value a matrix.
    """
    *batch, m, d = f.shape
    f = f.contiguous()
    count = f.numel() // (m * d)
    kernels = _module(f.dtype, function, f.get_device())
    c = torch.empty((*batch, d, d), dtype=f.dtype, device=f.device)
    s, slopes = (torch.empty((*batch, m), dtype=torch.float64, device=f.device) for _ in range(2))
    u = torch.empty((*batch, m, m), dtype=torch.float64, device=f.device)
    y = torch.empty((*batch, m, d), dtype=torch.float64, device=f.device)
    sizes = _jacobi.Sizes(m)
    chunk = _CHUNK * (sizes.players + 2)
    shared = sizes.shared_bytes(max(sizes.front, chunk), max(sizes.back, chunk), _REAL_BYTES)
    shift = _Shift.of(eps)
    kernels.launch("pool_spectrum", (count,), sizes.threads, shared, (f, shift, s, slopes, u, y, m, d))
    tiles = -(-d // TILE)
    kernels.launch("pool_output", (count, tiles * (tiles + 1) // 2), PRODUCT_THREADS, 0, (y, slopes, shift, c, m, d))
    return c, s, u, y, slopes


def gradient(g: Tensor, eps: float | Tensor, s: Tensor, u: Tensor, y: Tensor, slopes: Tensor, function: str) -> Tensor:
    """dL/dF ``(*batch, m, d)`` in the dtype of G, the gradient of C, whose symmetric part counts."""
    m, d = y.shape[-2:]
    g = g.contiguous()
    count = y.numel() // (m * d)
    kernels = _module(g.dtype, function, g.get_device())
    t = torch.empty_like(y)
    out = torch.empty(y.shape, dtype=g.dtype, device=g.device)
    mixing = torch.empty((count, 2 * m, m), dtype=torch.float64, device=g.device)
    tiles = (count, -(-d // TILE))
    kernels.launch("pool_project", tiles, PRODUCT_THREADS, 0, (y, g, t, m, d))
    shared = 2 * m * (m | 1) * _REAL_BYTES
    arguments = (y, t, s, slopes, u, _Shift.of(eps), mixing, m, d)
    kernels.launch("pool_mixing", (count,), PRODUCT_THREADS, shared, arguments)
    kernels.launch("pool_gradient", tiles, PRODUCT_THREADS, 0, (mixing, t, y, out, m, d))
    return out


class _FusedPool(Function):
    """The kernels, with the general operator behind them for derivatives of the gradient."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, eps: float | Tensor, function: str, general: Callable[[Tensor], Tensor]) -> Tensor:
        c, *factors = forward(f, eps, function)
        ctx.eps, ctx.function, ctx.general = eps, function, general
        ctx.save_for_backward(f, *factors)
        return c

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        f, s, u, y, slopes = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient itself is to be differentiated
            (out,) = torch.autograd.grad(ctx.general(f), f, g, create_graph=True)
        else:
            out = gradient(g, ctx.eps, s, u, y, slopes, ctx.function)
        return out, None, None, None


def pool(f: Tensor, eps: float | Tensor, function: SpectralFunction, general: Callable[[Tensor], Tensor]) -> Tensor:
    """C = g(FᵀF + εI) ``(*batch, d, d)`` in the dtype of F; ``general`` is the same operator without the kernels."""
    if isinstance(eps, Tensor):
        eps = eps.to(torch.float64).expand(f.shape[:-2]).contiguous()
    wide = f.float() if f.dtype in (torch.float16, torch.bfloat16) else f
    return _FusedPool.apply(wide, eps, function.name, general).to(f.dtype)
