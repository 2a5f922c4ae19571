"""Weights and centering of second-order pooling: a prologue kernel applies them, an epilogue back-propagates them.

The prologue computes R = √w ∘ (F − 1 meanᵀ) in float64, one matrix for each region (``pool_prepare.cu``). Sums have
a fixed order, so results are deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop.cuda.compiler import Module, Source
from matbackprop.cuda.fallback import Pair
from matbackprop.cuda.headers import TYPES

_STRIP = 16  # columns per block, so that rows of R fill cache lines
_THREADS, _MAX_THREADS = 256, 1024  # of a block; the same for many rows
_MANY_ROWS = 128
SOURCE = Source("pool_prepare.cu", REAL="double", STRIP=_STRIP, MAX_THREADS=_MAX_THREADS)
_WEIGHTS = {torch.bool: "bool", torch.float32: "float", torch.float64: "double"}


def _kernels(f: Tensor, weight: Tensor | None) -> Module:
    kind = torch.float32 if weight is None else weight.dtype
    return SOURCE.on(f.get_device(), IN=TYPES[f.dtype], WEIGHT=_WEIGHTS[kind])


def readable(weight: Tensor) -> Tensor:
    """Convert weights for the kernels: contiguous, and float32 instead of half precision."""
    return weight.to(weight.dtype if weight.dtype in _WEIGHTS else torch.float32).contiguous()


def _launch(name: str, source: Tensor, weight: Tensor | None, out: Tensor, f: Tensor, center: bool) -> None:
    """Convert F to R, or the gradient of R to that of F, with one block per strip of columns of ``out``."""
    m, d = f.shape[-2:]
    regions = 1 if weight is None else weight.numel() * d // f.numel()
    blocks = out.numel() // (m * d) * -(-d // _STRIP)
    threads = _MAX_THREADS if m > _MANY_ROWS else _THREADS
    address = 0 if weight is None else weight.data_ptr()
    arguments = (source.data_ptr(), address, out.data_ptr(), regions, int(center), m, d)
    _kernels(f, weight).launch(name, (blocks,), threads, 0, arguments)


def forward(f: Tensor, weight: Tensor | None, center: bool) -> Tensor:
    """R in float64, ``(*batch, m, d)`` or ``(*batch, r, m, d)``.

    Args:
        f: F ``(*batch, m, d)``, contiguous float32 or float64.
        weight: w ``(*batch, m)`` or ``(*batch, r, m)``, :func:`readable`.
        center: whether the (weighted) mean row is subtracted.
    """
    shape = f.shape if weight is None else (*weight.shape, f.shape[-1])
    rows = torch.empty(shape, dtype=torch.float64, device=f.device)
    _launch("pool_prepare", f, weight, rows, f, center)
    return rows


def gradient(g: Tensor, f: Tensor, weight: Tensor | None, center: bool) -> Tensor:
    """dL/dF in the dtype of F for the gradient G of R, whose memory is overwritten."""
    out = torch.empty_like(f)
    _launch("pool_prepare_gradient", g, weight, out, f, center)
    return out


def prepared(pair: Pair, weight: Tensor | None, center: bool) -> Pair:
    """Convert a pair whose kernels take R to one of F; its fallback already takes F."""
    if weight is None and not center:
        return pair
    kept = () if weight is None else (weight,)  # saved, so that autograd detects in-place changes

    def value(f: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        rows = forward(f, weight, center)
        c, factors = pair.forward(rows)
        return c, (rows, *kept, *factors)

    def adjoint(g: Tensor, f: Tensor, rows: Tensor, *saved: Tensor) -> Tensor:
        return gradient(pair.gradient(g, rows, *saved[len(kept) :]), f, weight, center)

    return Pair(value, adjoint, pair.general)
