"""Second-order pooling of features with any side by batched products, an eigensolver and four kernels.

The kernels (``pool_parts.cu``) compute squared norms and weights of rows, add the identity and convert the dtype of C,
compute the symmetric part of its gradient, and apply divided differences. Value and gradient take about 15 launches
in addition to those of the eigensolver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from matbackprop.cuda.compiler import FUNCTION_NUMBERS, POOL_FUNCTIONS, TYPES, Constant, Module, Source
from matbackprop.cuda.jacobi import separate_by_kernel
from matbackprop.refinement import NOISE, OVERLAP

MAX_ORDER = 1024  # above, products dominate the time
EDGE, _THREADS, _MAX_THREADS = 32, 256, 1024  # side of a square; threads of a block; the same for long rows
_LONG_ROW = 4096  # from this length on, one block per row
CONSTANTS: dict[str, Constant] = {
    **FUNCTION_NUMBERS,
    "REAL": "double",
    "EDGE": EDGE,
    "MAX_THREADS": _MAX_THREADS,
}
SOURCES = {thin: Source("pool_parts.cu", CONSTANTS, THIN=int(thin)) for thin in (True, False)}
"""The kernels, for m < d and for m ≥ d."""

Solver = Callable[[Tensor], tuple[Tensor, Tensor]]
"""An eigensolver: symmetric matrices to ascending eigenvalues, and eigenvectors in columns."""


class Factors(NamedTuple):
    """Saved for the gradient, in float64. X is F for m < d and Fᵀ otherwise."""

    s: Tensor  # squared singular values of F (count, n), zero at the noise floor
    weights: Tensor  # (count, n)
    vectors: Tensor  # Q (count, n, n), eigenvectors in columns
    y: Tensor  # QᵀX (count, n, length)
    eps: Tensor  # (count,)


def _kernels(f: Tensor, dtype: torch.dtype, function: str) -> Module:
    """Return the kernels for features F and outputs C of a dtype."""
    m, d = f.shape[-2:]
    return SOURCES[m < d].on(f.get_device(), IN=TYPES[dtype], FUNCTION=POOL_FUNCTIONS[function])


def squares(count: int, d: int) -> tuple[int]:
    """The grid of one block per square of d×d matrices."""
    return (count * (-(-d // EDGE)) ** 2,)


def forward(f: Tensor, eps: float | Tensor, function: str, dtype: torch.dtype, solve: Solver) -> tuple[Tensor, Factors]:
    """C ``(*batch, d, d)`` in a dtype, and the factors that :func:`gradient` needs; arguments as in `pool.forward`."""
    *batch, m, d = f.shape
    kernels = _kernels(f, dtype, function)
    features = f.reshape(-1, m, d).double()
    x = features if m < d else features.mT
    count, n, length = x.shape
    shift = eps.reshape(-1) if isinstance(eps, Tensor) else x.new_full((count,), eps)
    values, vectors = solve(torch.bmm(x, x.mT))
    # An outlier in F makes the small eigenvalues of the Gram matrix inaccurate and mixes their eigenvectors.
    q, y = separate_by_kernel(vectors, torch.bmm(vectors.mT, x), shift, OVERLAP[False])
    values, a = values.contiguous(), y if m < d else q.mT
    s, weights, scaled = torch.empty_like(values), torch.empty_like(values), torch.empty_like(a)
    # Directions at the noise floor are dropped, because 1/ε would amplify them.
    level = (length * NOISE) ** 2
    rows, threads = (1, _MAX_THREADS) if length > _LONG_ROW else (_THREADS // 32, _THREADS)
    addresses = (t.data_ptr() for t in (y, a, scaled, values, shift, s, weights))
    arguments = (*addresses, level, rows, n, length, d, *a.stride()[1:])
    kernels.launch("pool_rows", (count * -(-n // rows),), threads, 0, arguments)
    product = torch.bmm(scaled.mT, a)
    c = torch.empty((*batch, d, d), dtype=dtype, device=f.device)
    finished = (product.data_ptr(), shift.data_ptr(), c.data_ptr(), d)
    kernels.launch("pool_finish", squares(count, d), _THREADS, 0, finished)
    return c, Factors(s, weights, q, y, shift)


def gradient(g: Tensor, f: Tensor, factors: Factors, function: str) -> Tensor:
    """dL/dF ``(*batch, m, d)`` in the dtype of F for the gradient G of C, whose symmetric part is used."""
    m, d = f.shape[-2:]
    kernels = _kernels(f, g.dtype, function)
    s, weights, q, y, eps = factors
    count, n = s.shape
    a = y if m < d else q.mT
    e = y.new_empty((count, d, d))
    kernels.launch("pool_symmetric", squares(count, d), _THREADS, 0, (g.data_ptr(), e.data_ptr(), d))
    t = torch.bmm(a, e)
    w = torch.bmm(t, a.mT)
    addresses = (x.data_ptr() for x in (w, t, s, weights, eps))
    blocks = -(-count * n // (_THREADS // 32))
    kernels.launch("pool_mix", (blocks,), _THREADS, 0, (*addresses, count * n, n, d))
    out = torch.bmm(q, t.baddbmm_(w, y)) if m < d else torch.bmm(y.mT, torch.bmm(w, q.mT))
    return out.to(f.dtype).reshape(f.shape)
