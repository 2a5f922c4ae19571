"""Second-order pooling on CUDA: for features with a side up to 64, five kernels, two forward and three backward.

The kernels are in ``pool.cu``, the formulas for m < d and for m ≥ d in ``pool_forms.cuh``. The Gram matrix and its
Jacobi eigensolver use shared memory, features and outputs are read and written once in their dtype, and intermediate
results are float64. Weights and centering have a prologue kernel that computes R = √w ∘ (F − 1 meanᵀ) in float64, one
matrix for each region, and an epilogue that back-propagates through it (``pool_prepare.cu``). Sums have a fixed order,
so results are deterministic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from matbackprop.checks import is_plain
from matbackprop.cuda import jacobi
from matbackprop.cuda.compiler import (
    CONSTANTS,
    POOL_FUNCTIONS,
    PRODUCT_THREADS,
    TENSOR_CORES,
    TILE,
    TYPES,
    Module,
    Source,
    shared_limit,
    tile,
)
from matbackprop.cuda.fallback import call_kernels, kernels_may_take
from matbackprop.divided_differences import SpectralFunction

_REAL_BYTES = 8
_MAX_ROWS = 4096  # limit for one block per matrix if m ≥ d
SOURCES = {thin: Source("pool.cu", CONSTANTS, REAL_IS_DOUBLE=1, THIN=int(thin)) for thin in (True, False)}
"""The kernels, for m < d and for m ≥ d."""

_STRIP = 16  # columns per block of the prologue, so that rows of R fill cache lines
_PREPARE_THREADS, _PREPARE_MAX_THREADS = 256, 1024  # of a block; the same for many rows
_MANY_ROWS = 128
PREPARE = Source("pool_prepare.cu", REAL="double", STRIP=_STRIP, MAX_THREADS=_PREPARE_MAX_THREADS)
_WEIGHTS = {torch.bool: "bool", torch.float32: "float", torch.float64: "double"}


class Factors(NamedTuple):
    """Saved for the gradient, in float64. X is F for m < d and Fᵀ otherwise; n is its number of rows."""

    s: Tensor  # squared singular values of F (count, n), zero at the noise floor
    weights: Tensor  # (count, n)
    vectors: Tensor  # Qᵀ (count, n, n), eigenvectors in rows
    y: Tensor  # QᵀX (count, n, length)


@functools.cache
def _block(n: int) -> tuple[int, int]:
    """Threads and bytes of shared memory of a block of the eigensolver."""
    sizes = jacobi.Sizes(n)
    return sizes.threads, sizes.shared_bytes(_REAL_BYTES, tile=tile(n))


def _eps_arguments(eps: Tensor | float) -> tuple[int, float]:
    """ε by address, one value per matrix, or by value."""
    return (eps.data_ptr(), 0.0) if isinstance(eps, Tensor) else (0, float(eps))


def applies(f: Tensor, eps: float | Tensor, function: SpectralFunction) -> bool:
    """Return whether kernels support features ``(*batch, m, d)``: a side in 1 … 64, g in closed form, fixed ε > 0.

    float64 features use the general operator, which refines small eigenvectors to float64 digits.
    """
    return (
        f.dtype != torch.float64
        and function.name in POOL_FUNCTIONS
        and function.builtin
        and (is_plain(eps) and not eps.requires_grad if isinstance(eps, Tensor) else eps > 0)
        and f.dtype in TYPES
        and kernels_may_take(f, capability=TENSOR_CORES)
        and on_chip(*f.shape[-2:], shared_limit(f.get_device()))
    )


@functools.cache
def on_chip(m: int, d: int, shared_limit: int) -> bool:
    """Return whether a matrix fits into ``shared_limit`` bytes of shared memory."""
    short = min(m, d) <= jacobi.MAX_ORDER and (m < d or m <= _MAX_ROWS)
    return short and _block(min(m, d))[1] <= shared_limit


def _kernels(f: Tensor, dtype: torch.dtype, function: str) -> Module:
    """Return the definitions for features F and outputs C of a dtype."""
    types = {"IN": TYPES[f.dtype], "OUT": TYPES[dtype]}
    m, d = f.shape[-2:]
    return SOURCES[m < d].on(f.get_device(), FUNCTION=POOL_FUNCTIONS[function], **types)


def _tiles(length: int) -> int:
    return -(-length // TILE)


def forward(f: Tensor, eps: float | Tensor, function: str, dtype: torch.dtype) -> tuple[Tensor, Factors]:
    """C ``(*batch, d, d)`` in a dtype, float32 or float64, and the factors that :func:`gradient` needs.

    F is contiguous float32 or float64; ε a number, or float64 and contiguous, one value per matrix.
    """
    *batch, m, d = f.shape
    count, n, length = f.numel() // (m * d), min(m, d), max(m, d)
    kernels = _kernels(f, dtype, function)
    c = torch.empty((*batch, d, d), dtype=dtype, device=f.device)
    shapes = ((count, n), (count, n), (count, n, n), (count, n, length))
    factors = Factors(*(torch.empty(shape, dtype=torch.float64, device=f.device) for shape in shapes))
    s, weights, vectors, y = (t.data_ptr() for t in factors)
    shift = _eps_arguments(eps)
    kernels.launch("pool_spectrum", (count,), *_block(n), (f.data_ptr(), *shift, s, weights, vectors, y, n, length))
    pairs = _tiles(d) * (_tiles(d) + 1) // 2
    summed = (y if m < d else vectors, weights, *shift, c.data_ptr(), n, d)
    kernels.launch("pool_output", (count, pairs), PRODUCT_THREADS, 0, summed)
    return c, factors


def gradient(g: Tensor, f: Tensor, eps: float | Tensor, factors: Factors, function: str) -> Tensor:
    """dL/dF ``(*batch, m, d)`` in the dtype of F for the gradient G of C, whose symmetric part is used."""
    m, d = f.shape[-2:]
    count, n, length = factors.y.shape
    kernels = _kernels(f, g.dtype, function)
    out, t = torch.empty_like(f), factors.y.new_empty(count, n, d)
    mixing = factors.y.new_empty(count, n, 2 * n if m < d else n)  # coefficients of Y, and of T if m < d
    s, weights, vectors, y = (x.data_ptr() for x in factors)
    panel = y if m < d else vectors
    kernels.launch("pool_project", (count, _tiles(d)), PRODUCT_THREADS, 0, (panel, g.data_ptr(), t.data_ptr(), n, d))
    inner = (panel, t.data_ptr(), s, weights, vectors, *_eps_arguments(eps), mixing.data_ptr(), n, d)
    kernels.launch("pool_mixing", (count,), PRODUCT_THREADS, n * n * _REAL_BYTES, inner)
    mixed = (mixing.data_ptr(), y, t.data_ptr(), out.data_ptr(), n, length)
    kernels.launch("pool_gradient", (count, _tiles(length)), PRODUCT_THREADS, 0, mixed)
    return out


def _prepare_kernels(f: Tensor, weight: Tensor | None) -> Module:
    kind = torch.float32 if weight is None else weight.dtype
    return PREPARE.on(f.get_device(), IN=TYPES[f.dtype], WEIGHT=_WEIGHTS[kind])


def readable(weight: Tensor) -> Tensor:
    """Convert weights for the kernels: contiguous, and float32 instead of half precision."""
    return weight.to(weight.dtype if weight.dtype in _WEIGHTS else torch.float32).contiguous()


def _launch_prepare(name: str, source: Tensor, weight: Tensor | None, out: Tensor, f: Tensor, center: bool) -> None:
    """Convert F to R, or the gradient of R to that of F, with one block per strip of columns of ``out``."""
    m, d = f.shape[-2:]
    regions = 1 if weight is None else weight.numel() * d // f.numel()
    blocks = out.numel() // (m * d) * -(-d // _STRIP)
    threads = _PREPARE_MAX_THREADS if m > _MANY_ROWS else _PREPARE_THREADS
    address = 0 if weight is None else weight.data_ptr()
    arguments = (source.data_ptr(), address, out.data_ptr(), regions, int(center), m, d)
    _prepare_kernels(f, weight).launch(name, (blocks,), threads, 0, arguments)


def prepare(f: Tensor, weight: Tensor | None, center: bool) -> Tensor:
    """R in float64, ``(*batch, m, d)`` or ``(*batch, r, m, d)``, for contiguous F and :func:`readable` weights."""
    shape = f.shape if weight is None else (*weight.shape, f.shape[-1])
    rows = torch.empty(shape, dtype=torch.float64, device=f.device)
    _launch_prepare("pool_prepare", f, weight, rows, f, center)
    return rows


def prepare_gradient(g: Tensor, f: Tensor, weight: Tensor | None, center: bool) -> Tensor:
    """dL/dF in the dtype of F for the gradient G of R, whose memory is overwritten."""
    out = torch.empty_like(f)
    _launch_prepare("pool_prepare_gradient", g, weight, out, f, center)
    return out


Fallback = Callable[[Tensor, Tensor | None, float | Tensor, SpectralFunction, bool], Tensor]
"""Pooling of F, with the weight, ε, g and whether to center, in torch operations."""


class _Pooling(NamedTuple):
    weight: Tensor | None
    eps: float | Tensor
    function: SpectralFunction
    center: bool
    dtype: torch.dtype
    fallback: Fallback

    def _prepares(self) -> bool:
        return self.weight is not None or self.center

    def forward(self, f: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        rows = prepare(f, self.weight, self.center) if self._prepares() else f
        c, factors = forward(rows, self.eps, self.function.name, self.dtype)
        return c, (rows, *factors)

    def gradient(self, g: Tensor, f: Tensor, rows: Tensor, *factors: Tensor) -> Tensor:
        out = gradient(g, rows, self.eps, Factors(*factors), self.function.name)
        return prepare_gradient(out, f, self.weight, self.center) if self._prepares() else out

    def general(self, f: Tensor) -> Tensor:
        return self.fallback(f, self.weight, self.eps, self.function, self.center)


def pool(
    f: Tensor,
    weight: Tensor | None,
    eps: float | Tensor,
    function: SpectralFunction,
    center: bool,
    fallback: Fallback,
) -> Tensor:
    """C in the dtype of F, ``(*batch, d, d)`` or ``(*batch, r, d, d)``, for F for which :func:`applies` holds.

    Weights are plain and without gradient; ε is a number, or float64 with one value per matrix of C.
    """
    wide = f.float() if f.dtype in (torch.float16, torch.bfloat16) else f
    weight = None if weight is None else readable(weight)
    eps = eps.contiguous() if isinstance(eps, Tensor) else eps
    job = _Pooling(weight, eps, function, center, wide.dtype, fallback)
    return call_kernels(wide.contiguous(), job).to(f.dtype)
