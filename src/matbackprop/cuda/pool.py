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

from matbackprop._torch import is_plain
from matbackprop.cuda import jacobi
from matbackprop.cuda.compiler import (
    POOL_FUNCTIONS,
    PRODUCT_THREADS,
    TENSOR_CORES,
    TILE,
    TYPES,
    Module,
    Source,
    shared_limit,
)
from matbackprop.cuda.fallback import call_kernels, kernels_may_take
from matbackprop.divided_differences import SpectralFunction

_REAL_BYTES = 8
_MAX_ROWS = 4096  # limit for one block per matrix if m ≥ d
SOURCES = {thin: Source("pool.cu", THIN=int(thin)) for thin in (True, False)}
"""The kernels, for m < d and for m ≥ d."""

_STRIP = 16  # columns per block of the prologue, so that rows of R fill cache lines
_PREPARE_THREADS, _PREPARE_MAX_THREADS = 256, 1024  # of a block; the same for many rows
_MANY_ROWS = 128
PREPARE = Source("pool_prepare.cu", REAL="double", STRIP=_STRIP, MAX_THREADS=_PREPARE_MAX_THREADS)
_WEIGHTS = {torch.bool: "bool", torch.float32: "float", torch.float64: "double"}


class Factors(NamedTuple):
    """Saved for the gradient, in float64. X is R for m < d and Rᵀ otherwise; n is its number of rows."""

    s: Tensor  # squared singular values of R (count, n), zero at the noise floor
    weights: Tensor  # (count, n)
    vectors: Tensor  # Qᵀ (count, n, n), eigenvectors in rows
    y: Tensor  # QᵀX (count, n, length)


@functools.cache
def _block(n: int) -> tuple[int, int]:
    """Threads and bytes of shared memory of a block of the eigensolver."""
    sizes = jacobi.Sizes(n)
    return sizes.threads, sizes.gram_bytes


def takes(f: Tensor, eps: float | Tensor, function: SpectralFunction) -> bool:
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


def _tiles(length: int) -> int:
    return -(-length // TILE)


Fallback = Callable[[Tensor, Tensor | None, float | Tensor, SpectralFunction, bool], Tensor]
"""Pooling of F, with the weight, ε, g and whether to center, in torch operations."""


class Pooling(NamedTuple):
    """C = g(RᵀR + εI) of F for `call_kernels`."""

    weight: Tensor | None  # contiguous, (*batch, m) or (*batch, r, m), of a dtype in _WEIGHTS
    eps: float | Tensor  # a number, or contiguous and float64 with one value per matrix of C
    function: SpectralFunction
    center: bool
    fallback: Fallback

    def forward(self, f: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """C in the dtype of F, ``(*batch, d, d)`` or ``(*batch, r, d, d)``, R and the `Factors`."""
        rows = self.rows(f)
        *batch, m, d = rows.shape
        count, n, length = rows.numel() // (m * d), min(m, d), max(m, d)
        kernels = self._kernels(rows, f.dtype)
        c = f.new_empty(*batch, d, d)
        shapes = ((count, n), (count, n), (count, n, n), (count, n, length))
        factors = Factors(*(f.new_empty(shape, dtype=torch.float64) for shape in shapes))
        s, weights, vectors, y = (t.data_ptr() for t in factors)
        shift = self._eps_arguments()
        spectrum = (rows.data_ptr(), *shift, s, weights, vectors, y, n, length)
        kernels.launch("pool_spectrum", (count,), *_block(n), spectrum)
        pairs = _tiles(d) * (_tiles(d) + 1) // 2
        summed = (y if m < d else vectors, weights, *shift, c.data_ptr(), n, d)
        kernels.launch("pool_output", (count, pairs), PRODUCT_THREADS, 0, summed)
        return c, (rows, *factors)

    def gradient(self, g: Tensor, f: Tensor, rows: Tensor, *saved: Tensor) -> Tensor:
        """dL/dF in the dtype of F for the gradient G of C, whose symmetric part is used."""
        factors = Factors(*saved)
        m, d = rows.shape[-2:]
        count, n, length = factors.y.shape
        kernels = self._kernels(rows, g.dtype)
        out, t = torch.empty_like(rows), factors.y.new_empty(count, n, d)
        mixing = factors.y.new_empty(count, n, 2 * n if m < d else n)  # coefficients of Y, and of T if m < d
        s, weights, vectors, y = (x.data_ptr() for x in factors)
        panel = y if m < d else vectors
        projected = (panel, g.data_ptr(), t.data_ptr(), n, d)
        kernels.launch("pool_project", (count, _tiles(d)), PRODUCT_THREADS, 0, projected)
        inner = (panel, t.data_ptr(), s, weights, vectors, *self._eps_arguments(), mixing.data_ptr(), n, d)
        kernels.launch("pool_mixing", (count,), PRODUCT_THREADS, n * n * _REAL_BYTES, inner)
        mixed = (mixing.data_ptr(), y, t.data_ptr(), out.data_ptr(), n, length)
        kernels.launch("pool_gradient", (count, _tiles(length)), PRODUCT_THREADS, 0, mixed)
        return self.rows_gradient(out, f)

    def general(self, f: Tensor) -> Tensor:
        return self.fallback(f, self.weight, self.eps, self.function, self.center)

    def rows(self, f: Tensor) -> Tensor:
        """R, ``(*batch, m, d)`` or ``(*batch, r, m, d)``: in float64, or F itself without weights and centering."""
        if self.weight is None and not self.center:
            return f
        shape = f.shape if self.weight is None else (*self.weight.shape, f.shape[-1])
        rows = f.new_empty(shape, dtype=torch.float64)
        self._launch_prepare("pool_prepare", f, rows, f)
        return rows

    def rows_gradient(self, g: Tensor, f: Tensor) -> Tensor:
        """dL/dF in the dtype of F for the gradient G of R, whose memory is overwritten."""
        if self.weight is None and not self.center:
            return g
        out = torch.empty_like(f)
        self._launch_prepare("pool_prepare_gradient", g, out, f)
        return out

    def _launch_prepare(self, name: str, source: Tensor, out: Tensor, f: Tensor) -> None:
        """Convert F to R, or the gradient of R to that of F, with one block per strip of columns of ``out``."""
        (m, d), weight = f.shape[-2:], self.weight
        regions = 1 if weight is None else weight.numel() * d // f.numel()
        blocks = out.numel() // (m * d) * -(-d // _STRIP)
        threads = _PREPARE_MAX_THREADS if m > _MANY_ROWS else _PREPARE_THREADS
        address = 0 if weight is None else weight.data_ptr()
        arguments = (source.data_ptr(), address, out.data_ptr(), regions, int(self.center), m, d)
        kind = torch.float32 if weight is None else weight.dtype
        kernels = PREPARE.on(f.get_device(), IN=TYPES[f.dtype], WEIGHT=_WEIGHTS[kind])
        kernels.launch(name, (blocks,), threads, 0, arguments)

    def _kernels(self, rows: Tensor, dtype: torch.dtype) -> Module:
        """The kernels for features R and outputs C of a dtype."""
        m, d = rows.shape[-2:]
        function, types = POOL_FUNCTIONS[self.function.name], {"IN": TYPES[rows.dtype], "OUT": TYPES[dtype]}
        return SOURCES[m < d].on(rows.get_device(), FUNCTION=function, **types)

    def _eps_arguments(self) -> tuple[int, float]:
        """ε by address, one value per matrix, or by value."""
        return (self.eps.data_ptr(), 0.0) if isinstance(self.eps, Tensor) else (0, float(self.eps))


def pool(
    f: Tensor,
    weight: Tensor | None,
    eps: float | Tensor,
    function: SpectralFunction,
    center: bool,
    fallback: Fallback,
) -> Tensor:
    """C in the dtype of F, for which :func:`takes` holds; weights are plain and without gradient."""
    if weight is not None:
        weight = weight.to(weight.dtype if weight.dtype in _WEIGHTS else torch.float32).contiguous()
    if isinstance(eps, Tensor):
        eps = eps.contiguous()
    return call_kernels(f, Pooling(weight, eps, function, center, fallback)).to(f.dtype)
