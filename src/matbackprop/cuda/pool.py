"""Second-order pooling on CUDA: for features with a side up to 64, five kernels, two forward and three backward.

The kernels are in ``pool.cu``, the formulas for m < d and for m ≥ d in ``pool_forms.cuh``. The Gram matrix and its
Jacobi eigensolver use shared memory, features and outputs are read and written once in their dtype, and intermediate
results are float64. Features with longer sides use ``pool_parts.py``. Weights and centering are applied by
``pool_prepare.py``.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from matbackprop.checks import is_plain
from matbackprop.cuda import jacobi, pool_parts, pool_prepare
from matbackprop.cuda.compiler import Module, Source, shared_limit
from matbackprop.cuda.fallback import Pair, call_pair, kernels_may_take
from matbackprop.cuda.headers import (
    CONSTANTS,
    POOL_FUNCTIONS,
    PRODUCT_THREADS,
    TENSOR_CORES,
    TILE,
    TYPES,
    tile,
)
from matbackprop.divided_differences import SpectralFunction

_REAL_BYTES = 8
_MAX_ROWS = 4096  # limit for one block per matrix in the primal form


class _Factors(NamedTuple):
    """Addresses of s and weights ``(count, n)``, Qᵀ ``(count, n, n)`` and Y ``(count, n, length)``."""

    s: int
    weights: int
    vectors: int
    y: int


class Form(ABC):
    """One of the two forms of pooling.

    Args:
        n: rows of X, the smaller side of F.
        length: its columns.
    """

    source: ClassVar[Source]
    terms: ClassVar[int]
    """Blocks of rows in the gradient: Y, and T in the thin form."""

    def __init__(self, n: int, length: int) -> None:
        self.n, self.length = n, length
        sizes = jacobi.Sizes(n)
        self.threads, self.shared = sizes.threads, sizes.shared_bytes(_REAL_BYTES, tile=tile(n))

    def factors(self, work: Tensor, count: int) -> _Factors:
        """Addresses of the factors in one allocation."""
        s = work.data_ptr()
        weights = s + count * self.n * _REAL_BYTES
        vectors = weights + count * self.n * _REAL_BYTES
        return _Factors(s, weights, vectors, vectors + count * self.n**2 * _REAL_BYTES)

    @staticmethod
    @abstractmethod
    def panel(factors: _Factors) -> int:
        """The address of A ``(count, n, d)``, from whose rows C is computed."""


class Thin(Form):
    """Fewer rows than columns: X = F, A = Y."""

    terms = 2
    source = Source("pool.cu", CONSTANTS, THIN=1)

    @staticmethod
    def panel(factors: _Factors) -> int:
        return factors.y


class Primal(Form):
    """At least as many rows as columns: X = Fᵀ, A = Qᵀ."""

    terms = 1
    source = Source("pool.cu", CONSTANTS, THIN=0)

    @staticmethod
    def panel(factors: _Factors) -> int:
        return factors.vectors


@functools.cache
def form_of(m: int, d: int) -> Form:
    """The form that features ``(*batch, m, d)`` are pooled in."""
    return Thin(m, d) if m < d else Primal(d, m)


def _eps_arguments(eps: Tensor | float) -> tuple[int, float]:
    """ε by address, one value per matrix, or by value."""
    return (eps.data_ptr(), 0.0) if isinstance(eps, Tensor) else (0, float(eps))


def applies(f: Tensor, eps: float | Tensor, function: SpectralFunction) -> bool:
    """Return whether kernels support features ``(*batch, m, d)``: min(m, d) in 1 … 1024, g in closed form, fixed ε > 0.

    float64 features use the general operator, which refines small eigenvectors to float64 digits.
    """
    return (
        f.is_cuda
        and f.dtype != torch.float64
        and function.name in POOL_FUNCTIONS
        and function.builtin
        and 0 < min(f.shape[-2:]) <= pool_parts.MAX_ORDER
        and (is_plain(eps) and not eps.requires_grad if isinstance(eps, Tensor) else eps > 0)
        and f.dtype in TYPES
        and kernels_may_take(f, capability=TENSOR_CORES)
    )


@functools.cache
def on_chip(m: int, d: int, shared_limit: int) -> bool:
    """Return whether a matrix fits into ``shared_limit`` bytes of shared memory; otherwise use :mod:`pool_parts`."""
    short = min(m, d) <= jacobi.MAX_ORDER and (m < d or m <= _MAX_ROWS)
    return short and form_of(m, d).shared <= shared_limit


def _kernels(f: Tensor, dtype: torch.dtype, function: str) -> Module:
    """Return the definitions for features F and outputs C of a dtype."""
    types = {"IN": TYPES[f.dtype], "OUT": TYPES[dtype]}
    source = form_of(*f.shape[-2:]).source
    return source.on(f.get_device(), REAL_IS_DOUBLE=1, FUNCTION=POOL_FUNCTIONS[function], **types)


def _tiles(length: int) -> int:
    return -(-length // TILE)


def forward(
    f: Tensor, eps: float | Tensor, function: str, dtype: torch.dtype, kernels: Module | None = None
) -> tuple[Tensor, Tensor]:
    """C ``(*batch, d, d)`` in a dtype, float32 or float64, and the factors that :func:`gradient` needs, in float64.

    F is contiguous float32 or float64; ε a number, or float64 and contiguous, one value per matrix. ``kernels``
    replace those of the device of F.
    """
    *batch, m, d = f.shape
    count, form = f.numel() // (m * d), form_of(m, d)
    n, length = form.n, form.length
    kernels = kernels or _kernels(f, dtype, function)
    c = torch.empty((*batch, d, d), dtype=dtype, device=f.device)
    work = torch.empty(count * n * (2 + n + length), dtype=torch.float64, device=f.device)
    factors, shift = form.factors(work, count), _eps_arguments(eps)
    given = (f.data_ptr(), *shift, *factors, n, length)
    kernels.launch("pool_spectrum", (count,), form.threads, form.shared, given)
    pairs = _tiles(d) * (_tiles(d) + 1) // 2
    summed = (form.panel(factors), factors.weights, *shift, c.data_ptr(), n, d)
    kernels.launch("pool_output", (count, pairs), PRODUCT_THREADS, 0, summed)
    return c, work


def gradient(
    g: Tensor, f: Tensor, eps: float | Tensor, work: Tensor, function: str, kernels: Module | None = None
) -> Tensor:
    """dL/dF ``(*batch, m, d)`` in the dtype of F for the gradient G of C, whose symmetric part is used."""
    m, d = f.shape[-2:]
    count, form = f.numel() // (m * d), form_of(m, d)
    n, length = form.n, form.length
    kernels = kernels or _kernels(f, g.dtype, function)
    out = torch.empty_like(f)
    own = torch.empty(count * n * (d + form.terms * n), dtype=torch.float64, device=f.device)
    t = own.data_ptr()
    mixing = t + count * n * d * _REAL_BYTES
    factors = form.factors(work, count)
    panel = form.panel(factors)
    kernels.launch("pool_project", (count, _tiles(d)), PRODUCT_THREADS, 0, (panel, g.data_ptr(), t, n, d))
    inner = (panel, t, *factors[:3], *_eps_arguments(eps), mixing, n, d)
    kernels.launch("pool_mixing", (count,), PRODUCT_THREADS, n * n * _REAL_BYTES, inner)
    mixed = (mixing, factors.y, t, out.data_ptr(), n, length)
    kernels.launch("pool_gradient", (count, _tiles(length)), PRODUCT_THREADS, 0, mixed)
    return out


def pool(
    f: Tensor,
    eps: float | Tensor,
    function: SpectralFunction,
    general: Callable[[Tensor, Tensor | None], Tensor],
    solve: pool_parts.Solver,
    weight: Tensor | None,
    center: bool,
) -> Tensor:
    """C = g(Fᵀ diag(w) F + εI) ``(*batch, d, d)``, or ``(*batch, r, d, d)`` of regions, in the dtype of F.

    Args:
        f: features for which :func:`applies` holds.
        eps: a number, or float64 on the device of F, one value per matrix of C.
        function: g.
        general: the same operator without the kernels, of F and the weights.
        solve: eigensolver for matrices that do not fit into shared memory.
        weight: w ``(*batch, m)`` or ``(*batch, r, m)``, plain and without gradient, or None.
        center: whether the (weighted) mean row is subtracted first.
    """
    if isinstance(eps, Tensor):
        eps = eps.contiguous()
    name = function.name
    wide = f.float() if f.dtype in (torch.float16, torch.bfloat16) else f
    w = None if weight is None else pool_prepare.readable(weight)

    def whole(x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        c, work = forward(x, eps, name, wide.dtype)
        return c, (work,)

    def whole_adjoint(g: Tensor, x: Tensor, work: Tensor) -> Tensor:
        return gradient(g, x, eps, work, name)

    def in_parts(x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return pool_parts.forward(x, eps, name, wide.dtype, solve)

    def parts_adjoint(g: Tensor, x: Tensor, *factors: Tensor) -> Tensor:
        return pool_parts.gradient(g, x, pool_parts.Factors(*factors), name)

    def fallback(x: Tensor) -> Tensor:
        return general(x, w)

    chip = on_chip(*f.shape[-2:], shared_limit(f.get_device()))
    pair = Pair(whole, whole_adjoint, fallback) if chip else Pair(in_parts, parts_adjoint, fallback)
    return call_pair(wide.contiguous(), pool_prepare.prepared(pair, w, center)).to(f.dtype)
